"""When samplers that share the learner's devices sleep and wake, and who makes room for them.

The publisher and the sampler are the product's own; vLLM's engine and the GPU's memory are those of
`tests/engine/gpu_engine.py`, with the sizes of a 7B model next to one of eight ranks on 80 GB.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ppo_cli.cluster.engine import Publisher
from ppo_cli.engine.base import Sampling, Weights
from ppo_cli.engine.models.lora import LoRA
from ppo_cli.engine.samplers import vllm as vllm_sampler
from ppo_cli.engine.samplers.vllm import VLLMSampler
from ppo_cli.errors import UserError
from ppo_cli.planning.memory.publishing import publish_bytes
from ppo_cli.records import Prompt
from tests.config.test_publishing import QWEN_7B, RANKS_8, WHOLE
from tests.engine.gpu_engine import Gpu, GpuEngine
from tests.settings import complete

GPU_BYTES = 80 * 10**9
REST = 38 * 10**9  # of the learner between its phases
CLAIMED = GPU_BYTES // 2  # by vLLM: weights and cache
PROMPTS = [Prompt(f"p{i}", "", (), "", (3, 4)) for i in range(3)]


class Learner:
    """A rank on the same GPU; what it frees stays with it until `spare_memory`."""

    def __init__(self, gpu: Gpu, samplers: list[Any], bytes_of_transfer: int) -> None:
        self.gpu, self.samplers, self.bytes = gpu, samplers, bytes_of_transfer
        self.version = 0
        self.adapter = False
        gpu.take("learner", REST)

    def send_weights(self) -> None:
        self.gpu.take("kept by the learner", self.bytes)
        for sampler in self.samplers:
            sampler.start_weight_update()
            sampler.update_weights({})
            sampler.finish_weight_update(self.version)

    def weights(self) -> Weights:
        self.gpu.take("kept by the learner", self.bytes)
        return Weights({}, self.version, adapter=self.adapter)

    def spare_memory(self) -> None:
        self.gpu.free("kept by the learner")

    def step(self) -> None:
        self.gpu.take("kept by the learner", GPU_BYTES - REST - WHOLE)
        self.version += 1


class Called:
    """A cluster that calls its members, which live here, at once."""

    timeout_s = 1.0

    def __init__(self) -> None:
        self.waits = self

    def ask(self, member: Any, name: str, method: str = "call", *args: Any) -> SimpleNamespace:
        return SimpleNamespace(ref=getattr(member, name)(*args))

    def call(self, members: list[Any], name: str, *args: Any, **limit: Any) -> None:
        for member in members:
            self.ask(member, name, "call", *args)

    def collect(self, calls: list[Any], *limit: Any) -> list[Any]:
        return [call.ref for call in calls]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds a learner and a sampler on one GPU, and the publisher between them."""
    monkeypatch.setattr(vllm_sampler, "set_environment", lambda: None)
    monkeypatch.setattr(vllm_sampler, "write_adapter", lambda folder, *_: folder.mkdir())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    request = SimpleNamespace(
        LoRARequest=lambda name, number, folder: SimpleNamespace(lora_int_id=number)
    )
    for module in ("vllm", "vllm.lora", "vllm.lora.request"):  # vLLM may not be installed
        monkeypatch.setitem(sys.modules, module, request)

    def make(way: str, sleep: Any, lora: bool = False, size: int = GPU_BYTES) -> Any:
        model = {"lora_rank": 8, "lora_merge": False} if lora else {}
        rollout = {"name": "vllm", "weight_transfer": way}
        config = complete({"rollout": rollout, "model": model})
        transfer = publish_bytes(config.model, config.rollout, QWEN_7B, RANKS_8)
        gpu = Gpu(size)
        engine = GpuEngine(
            gpu, weights=WHOLE, cache=CLAIMED - WHOLE, update=transfer.sampler, batches_ahead=2
        )
        monkeypatch.setattr(VLLMSampler, "_start_engine", lambda self, *_: None)
        sampler = VLLMSampler(
            "m", eos_token_ids=frozenset({1}), detokenize=lambda ids, context: str(ids),
            max_model_len=1024, sleep=sleep, lora=LoRA(8, 16.0) if lora else None,
        )  # fmt: skip
        sampler._engine = engine
        monkeypatch.setattr(
            sampler,
            "_submit_request",
            lambda begun, _: engine.submit(f"{begun.key} {len(engine.events)}"),
        )
        sampler.sleep()  # before the learner's models are loaded
        learner = Learner(gpu, [sampler], transfer.learner)
        learner.adapter = lora
        publisher = Publisher(Called(), [learner], [sampler], sleepers=[sampler])  # type: ignore
        publisher._asleep = {"weights", "cache"}
        if way != "memory":
            publisher._connected = True
        return SimpleNamespace(gpu=gpu, engine=engine, sampler=sampler, learner=learner,
                               publisher=publisher)  # fmt: skip

    return make


def sample(run: Any) -> None:
    run.publisher.wake()
    rollouts = list(run.sampler.generate(PROMPTS, Sampling(n=2), run.learner.version))
    assert len(rollouts) == 6 and run.sampler.weight_version == run.learner.version


def train(run: Any) -> None:
    run.publisher.sleep()
    run.learner.step()
    run.publisher.send()


WAYS = [
    ("ipc", "discard", False), ("ipc", "offload", False), ("ipc", "keep", False),
    ("memory", "discard", False), ("memory", "offload", False), ("gloo", "discard", False),
    ("memory", "offload", True), ("memory", "keep", True),
]  # fmt: skip


@pytest.mark.parametrize(("way", "sleep", "lora"), WAYS)
def test_no_step_of_a_run_touches_memory_that_sleeps_and_the_cache_sleeps_in_a_transfer(
    way: str, sleep: str, lora: bool, shared: Any
) -> None:
    run = shared(way, sleep, lora)
    # By memory, ranks have put the weights together before samplers wake.
    transfer = run.engine._update + (0 if way == "memory" else run.learner.bytes)
    run.publisher.send()  # at the start, also of a run that is resumed
    run.publisher.send()  # of what a checkpoint held
    sample(run)  # a validation before the first step
    sample(run)
    for _ in range(2):
        run.engine.peaks.clear()
        train(run)
        assert run.engine.peaks["update_weights"] == REST + WHOLE + transfer
        sample(run)
        assert run.engine.peaks["step"] == REST + CLAIMED
    run.publisher.sleep()  # for an annotation that no update follows
    assert run.gpu.total == REST + (WHOLE if sleep == "keep" else 0)
    assert run.engine.pinned == (WHOLE if sleep == "offload" else 0)
    sample(run)
    train(run)
    train(run)  # of the critic alone: nothing is sampled in between
    sample(run)


def test_the_order_of_a_step(shared: Any) -> None:
    run = shared("ipc", "discard")
    run.publisher.send()
    sample(run)
    run.engine.events.clear()
    train(run)
    sample(run)
    assert [event for event in run.engine.events if event != "step"] == [
        "sleep 2", "wake_up weights", "start_weight_update", "update_weights",
        "finish_weight_update", "wake_up kv_cache",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("room", "advice"),
    [(WHOLE // 2, "optimizer_offload=true"), (CLAIMED // 2, "lower --gpu_memory_utilization")],
)
def test_no_room_on_waking_is_one_sentence(room: int, advice: str, shared: Any) -> None:
    run = shared("memory", "discard", size=10**12)
    run.gpu.size = REST + room
    run.learner.bytes = run.engine._update = 0
    with pytest.raises(UserError, match=r"did not fit next to the learner on waking: .*") as caught:
        sample(run)
    assert advice in str(caught.value) and str(caught.value).endswith(
        "separate GPUs (--placement)."
    )


def test_no_room_for_a_transfer_is_one_sentence(shared: Any) -> None:
    run = shared("memory", "offload")
    run.gpu.size = REST + WHOLE + run.learner.bytes // 2
    run.learner.bytes = 0
    with pytest.raises(UserError, match=r"to the samplers ran out of memory\. Use roll"):
        sample(run)


def test_a_sampler_refuses_what_a_gpu_would_crash_on(shared: Any) -> None:
    run = shared("ipc", "discard")
    with pytest.raises(RuntimeError, match="sampling before the weights have come"):
        run.sampler.generate(PROMPTS, Sampling(), 0)
    with pytest.raises(RuntimeError, match="weights came before there was memory"):
        run.sampler.load_weights(Weights({}, 1))
    adapted = shared("memory", "offload", lora=True).sampler
    with pytest.raises(RuntimeError, match="weights came before there was memory"):
        adapted.load_weights(Weights({}, 1, adapter=True))
    run.sampler.wake_weights()
    run.engine._update = 0
    run.sampler.wake_cache()
    with pytest.raises(RuntimeError, match="sampling before the weights have come"):
        run.sampler.generate(PROMPTS, Sampling(), 0)
    run.sampler.load_weights(Weights({}, 1))
    assert len(list(run.sampler.generate(PROMPTS, Sampling(), 1))) == 3


# A transfer through memory, and waking in two parts: the learner makes room before each of them.
BY_MEMORY = ("learner weights", "sampler load_weights")
WAKE_WEIGHTS = ("learner spare_memory", "sampler wake_weights")
WAKE_CACHE = ("learner spare_memory", "sampler wake_cache")


@pytest.mark.parametrize(
    ("sleepers", "verbs", "expected"),
    [
        ((), "sleep send wake", BY_MEMORY),  # samplers with separate devices never sleep
        (
            ("sampler",), "sleep wake wake",
            ("sampler sleep", "learner weights", *WAKE_WEIGHTS, "sampler load_weights",
             *WAKE_CACHE),
        ),
        (
            ("sampler",), "connect sleep wake wake",
            ("learner connect", "sampler sleep", *WAKE_WEIGHTS, "learner send_weights",
             *WAKE_CACHE),
        ),
        (  # only those that share devices sleep, and all get the weights
            ("sharer",), "sleep wake",
            ("sharer sleep", "learner weights", "learner spare_memory", "sharer wake_weights",
             "sampler load_weights", "sharer load_weights", "learner spare_memory",
             "sharer wake_cache"),
        ),
        (  # those of which only the weights are awake sleep again
            ("sampler",), "sleep send sleep",
            ("sampler sleep", "learner weights", *WAKE_WEIGHTS, "sampler load_weights",
             "sampler sleep"),
        ),
        ((), "send_in_place send", (*BY_MEMORY, "learner weights")),  # told once where to read
    ],
)  # fmt: skip
def test_what_is_asked_of_whom(
    sleepers: tuple[str, ...], verbs: str, expected: tuple[str, ...]
) -> None:
    roles = Mock()
    samplers = [roles.sampler, *(getattr(roles, name) for name in sleepers if name != "sampler")]
    for sampler in samplers:
        sampler.load_weights.return_value = "send_in_place" in verbs
    asleep = [getattr(roles, name) for name in sleepers]
    publisher: Any = Publisher(Called(), [roles.learner], samplers, sleepers=asleep)  # type: ignore[arg-type]
    for verb in verbs.replace("_in_place", "").split():
        getattr(publisher, verb)(*[None] * (verb == "connect"))
    assert [name.replace(".", " ") for name, _, _ in roles.mock_calls] == [*expected]


def test_samplers_are_asked_for_weights_that_are_there() -> None:
    roles, called = Mock(), Called()
    collect = called.collect
    called.collect = lambda calls: roles.wait() and collect(calls)  # type: ignore
    Publisher(called, [roles.learner], [roles.sampler], sleepers=[]).send()  # type: ignore
    names = [name for name, _, _ in roles.mock_calls]
    assert names[:3] == ["learner.weights", "wait", "sampler.load_weights"]
