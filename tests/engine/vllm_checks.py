"""What holds for real engines of vLLM, which changes the process that it runs in.

`test_vllm_sampler.py` gives this file to two pytests: one runs `TestFiles`, the other all else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.run import Config, Transfer
from ppo_cli.engine.base import Sampling, Weights, build_sampler
from ppo_cli.engine.export import write_model, write_weights
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.models import load_policy, load_tokenizer, stop_token_ids
from ppo_cli.engine.models.lora import adapt, adapter_tensors
from ppo_cli.engine.samplers.hf import HFSampler
from ppo_cli.engine.samplers.text import decode_text
from ppo_cli.engine.samplers.vllm import VLLMSampler
from ppo_cli.engine.saved_files import model_files, write_files
from ppo_cli.errors import DataError, ModelError
from ppo_cli.planning.resolve import resolve
from ppo_cli.records import Prompt, Rollout
from tests.engine.small_samplers import logprob_gap
from tests.engine.tiny_families import make_model, save_model
from tests.settings import complete

TOLERANCE = 1e-4
LONGEST = 128
BUNDLED = model_folder("embedded")
# Sizes that vLLM has kernels for on the CPU.
WIDE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 64, "moe_intermediate_size": 64}
PLAIN = Sampling(n=4, max_tokens=24)
GREEDY = Sampling(temperature=0.0, top_p=0.5, top_k=2, n=2, max_tokens=24)
LORA = ("model.lora_rank=4", "model.lora_alpha=8")


def read_config(*args: str) -> Config:
    settings = ["rollout.name=vllm", "data.max_prompt_length=64", "data.max_response_length=64",
                "rollout.max_num_seqs=32", "model.path=embedded", *args]  # fmt: skip
    resolved = resolve(flags={}, preset=None, config_files=[], overrides=settings, environ={})
    return complete(resolved.requested, resolved.machine)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(BUNDLED)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[Prompt]:
    prompts = []
    for i in range(8):
        messages = [{"role": "user", "content": f"{7 * i}+{3 * i}="}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(Prompt(f"p{i}", text, (), text, tuple(tokenizer(text)["input_ids"])))
    return prompts


def assert_same(first: Sequence[Rollout], second: Sequence[Rollout]) -> None:
    """Rollouts of `second` must be those of `first` with the same keys."""
    rollouts_by_key = {rollout.key: rollout for rollout in first}
    assert [(r.token_ids, r.text) for r in second] == [
        (rollouts_by_key[r.key].token_ids, rollouts_by_key[r.key].text) for r in second
    ]


@torch.no_grad()
def change_weights(model: Any) -> None:
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight) * 0.2 * weight.std(correction=0))


def change_adapter(model: Any) -> None:
    for _, tensor in adapter_tensors(model):
        tensor.data.normal_(std=0.2)


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def assert_new_weights_sample(
    sampler: Any,
    model: Any,
    prompts: list[Prompt],
    publish: Callable[[int], object] | None = None,
    change: Callable[[Any], None] = change_weights,
) -> None:
    """Three times in a row; the versions are kept and stamped on rollouts."""

    def load(version: int) -> None:
        sampler.load_weights(Weights(snapshot(model), version))

    rollouts = list(sampler.generate(prompts, PLAIN, 0))
    assert logprob_gap(model, rollouts) < TOLERANCE
    for version in (5, 6, 7):
        change(model)
        assert logprob_gap(model, rollouts) > 100 * TOLERANCE
        (publish or load)(version)
        assert sampler.weight_version == version
        rollouts = list(sampler.generate(prompts, PLAIN, version))
        assert logprob_gap(model, rollouts) < TOLERANCE
        assert {rollout.weight_version for rollout in rollouts} == {version}


@dataclass(frozen=True)
class Bundled:
    """The bundled model, whose output head is tied to its embedding."""

    sampler: VLLMSampler
    model: Any
    prompts: list[Prompt]

    def sample(self, sampling: Sampling = PLAIN) -> list[Rollout]:
        return list(self.sampler.generate(self.prompts, sampling, 2))

    def gap(self, rollouts: list[Rollout], temperature: float = 1.0) -> float:
        return logprob_gap(self.model, rollouts, temperature)


class TestBundled:
    """One sampler for all; the last two change its weights."""

    @pytest.fixture(scope="class")
    def bundled(self, tokenizer: Any, prompts: list[Prompt]) -> Iterator[Bundled]:
        sampler = build_sampler(read_config(), tokenizer)
        assert isinstance(sampler, VLLMSampler)
        yield Bundled(sampler, load_policy(BUNDLED).model, prompts)
        sampler.close()
        sampler.close()

    @pytest.mark.parametrize("stop", [(), ("1", "20")])
    def test_greedy_tokens_are_those_of_the_hf_sampler(
        self, bundled: Bundled, tokenizer: Any, stop: tuple[str, ...]
    ) -> None:
        """They end with an end token or a stop text."""
        ends = stop_token_ids(bundled.model, tokenizer)
        hf = HFSampler(
            bundled.model, eos_token_ids=ends, pad_token_id=tokenizer.pad_token_id,
            max_num_seqs=64, detokenize=partial(decode_text, tokenizer),
        )  # fmt: skip
        sampling = replace(GREEDY, stop=stop)
        rollouts = bundled.sample(sampling)
        assert_same(rollouts, list(hf.generate(bundled.prompts, sampling, 2)))
        assert len(rollouts) == 16 and {r.finish_reason for r in rollouts} == {"stop"}
        assert stop or all(r.token_ids[-1] in ends for r in rollouts)
        assert not stop or any("1" in r.text for r in rollouts)

    def test_a_response_that_is_too_long_is_cut(self, bundled: Bundled) -> None:
        rollouts = bundled.sample(replace(GREEDY, max_tokens=1))
        assert {(r.finish_reason, len(r.token_ids)) for r in rollouts} == {("length", 1)}

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"temperature": 0.7},
            {"temperature": 1.5, "top_p": 0.8, "seed": 3},
            {"temperature": 0.5, "top_k": 3},
            {"temperature": 1.2, "top_p": 0.9, "top_k": 5},
            {"temperature": 0.0, "top_p": 0.5, "top_k": 2, "n": 2},
        ],
    )
    def test_logprobs_are_untruncated_and_draws_do_not_depend_on_the_batch(
        self, bundled: Bundled, changes: dict[str, Any]
    ) -> None:
        """Samples of a prompt differ unless they are greedy."""
        sampling = replace(PLAIN, **changes)
        rollouts = bundled.sample(sampling)
        assert bundled.gap(rollouts, sampling.temperature or 1.0) < TOLERANCE
        two = [bundled.prompts[6], bundled.prompts[1]]
        repeated = list(bundled.sampler.generate(two, sampling, 2))
        assert len(repeated) == 2 * sampling.n
        assert_same(rollouts, repeated)
        texts = {r.token_ids for r in rollouts}
        assert len(texts) > 8 if sampling.temperature else len(texts) <= 8

    def test_a_response_goes_on_after_a_pause(self, bundled: Bundled) -> None:
        rollouts = bundled.sample(replace(PLAIN, new_tokens=3))
        begun = [r for r in rollouts if r.finish_reason == "unfinished"]
        assert begun and {len(rollout.token_ids) for rollout in begun} == {3}
        begun_ids = {r.key: r.token_ids for r in begun}
        complete = list(bundled.sampler.generate((), PLAIN, 3, begun))
        assert len(complete) == len(begun)
        for r in complete:
            assert r.token_ids[:3] == begun_ids[r.key] and len(r.token_ids) > 3 == r.carried
        assert bundled.gap(complete) < TOLERANCE
        repeated = list(bundled.sampler.generate((), PLAIN, 3, begun[::-2]))
        assert len(repeated) == (len(begun) + 1) // 2
        assert_same(complete, repeated)

    def test_a_caller_may_walk_away(self, bundled: Bundled) -> None:
        stream = bundled.sampler.generate(bundled.prompts, PLAIN, 2)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert len(bundled.sample()) == 32

    def test_a_prompt_that_is_too_long_is_named(self, bundled: Bundled) -> None:
        with pytest.raises(DataError, match="The prompt p0 has 21 tokens; with 128"):
            bundled.sample(replace(PLAIN, max_tokens=LONGEST))

    def test_new_weights_are_the_ones_that_sample(self, bundled: Bundled) -> None:
        assert_new_weights_sample(bundled.sampler, bundled.model, bundled.prompts)

    def test_logits_that_are_not_finite_are_told(self, bundled: Bundled) -> None:
        weights = snapshot(bundled.model)
        weights["model.norm.weight"].fill_(float("nan"))
        bundled.sampler.load_weights(Weights(weights, 8))
        with pytest.raises(ModelError, match="logits are not finite"):
            bundled.sample()


def test_an_adapter_alone_travels(tokenizer: Any, prompts: list[Prompt]) -> None:
    config = read_config(*LORA)
    inject, model = adapt(config.model, config.trainer.seed), load_policy(BUNDLED).model
    assert inject is not None
    sampler = build_sampler(config, tokenizer)
    inject(model)

    def publish(version: int) -> None:
        tensors = {name: t.detach().clone() for name, t in adapter_tensors(model)}
        sampler.load_weights(Weights(tensors, version, adapter=True))

    assert_new_weights_sample(sampler, model, prompts, publish, change_adapter)
    sampler.close()


def test_samplers_are_led_together_through_an_exchange() -> None:
    """Two samplers of two GPUs each; no GPU takes part."""
    from ppo_cli.engine.samplers.weight_transfer import SamplerClient, Sender, TensorSource

    calls: list[tuple[str, list[tuple[Any, ...]]]] = []

    class Backend:
        """Stands where vLLM's sender does, which needs a GPU."""

        def send_weights(self) -> None:
            client.start_weight_update()
            client.update_weights([m.name for m in source.metadata()])
            client.finish_weight_update()

        def shutdown(self) -> None:
            """Hold nothing."""

    source = TensorSource([("w", torch.float32, (2,))], lambda: iter([("w", torch.ones(2))]))
    client = SamplerClient(lambda *call: calls.append(call), num_samplers=2, gpus_each=2)
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 1 + client.num_gpus})
    sender = Sender(Backend(), client)
    sender.send(9)
    sender.close()
    offsets = [({"rank_offset": offset, "world_size": 5},) for offset in (1, 3)]
    assert calls == [
        ("init_weight_transfer", offsets), ("start_weight_update", [(), ()]),
        ("update_weights", [(["w"],), (["w"],)]), ("finish_weight_update", [(9,), (9,)]),
    ]  # fmt: skip
    assert source.largest_bytes == 8


def test_a_rank_that_does_not_send_gathers_for_vllms_sender_by_nccl() -> None:
    from ppo_cli.engine.samplers.weight_transfer import SamplerClient, TensorSource, connect

    gathered: list[str] = []

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "vw":
            gathered.append(name)
            yield name, torch.ones(2)

    source = TensorSource([(name, torch.float32, (2,)) for name in "vw"], gather)
    client = SamplerClient(lambda *call: pytest.fail(f"{call}"), num_samplers=1, gpus_each=1)
    sender = connect("nccl", source, client, rank=1, address="127.0.0.1", port=0, timeout_s=1)
    for version in (1, 2):
        sender.send(version)
    sender.close()
    assert gathered == [*"vw", *"vw"]


def test_a_chunk_by_nccl_is_full_with_the_tensor_that_fills_it() -> None:
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    sizes, chunks = (3, 9, 2, 2, 2, 20, 1), []
    tensors = iter([(str(size), torch.zeros(size, dtype=torch.uint8)) for size in sizes])
    while (chunk := pack_tensors(tensors, lambda item: item[1], 4)) is not None:
        chunks.append(chunk.packed_tensor.numel())
    assert chunks == [12, 6, 20, 1]


def connect_gloo(learner: Learner, sampler: Any) -> Any:
    """A sender of the learner's weights to the sampler, through a group of their own."""
    from ppo_cli.engine.samplers.weight_transfer import SamplerClient, TensorSource, connect

    def ask_all(method: str, arguments: list[tuple[Any, ...]]) -> None:
        getattr(sampler, method)(*arguments[0])

    shapes = [(name, t.dtype, tuple(t.shape)) for name, t in learner.published()]
    source = TensorSource(shapes, learner.published)
    client = SamplerClient(ask_all, num_samplers=1, gpus_each=1)
    return connect("gloo", source, client, rank=0, address="127.0.0.1", port=0, timeout_s=60)


def test_merged_weights_come_by_gloo(tokenizer: Any, prompts: list[Prompt]) -> None:
    config = read_config(*LORA, "model.lora_merge=true")
    learner = Learner(config, tokenizer, total_steps=1)
    sampler = build_sampler(config, tokenizer, transfer="gloo")
    sender = connect_gloo(learner, sampler)
    model = learner.policy.model
    assert_new_weights_sample(sampler, model, prompts, sender.send, change_adapter)
    sender.close()
    sampler.close()


def test_it_samples_the_same_after_it_has_slept(
    tokenizer: Any, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own scheduler and executor sleep and wake; the CPU gives no memory back."""
    model, sampler = load_policy(BUNDLED).model, build_sampler(read_config(), tokenizer)
    assert isinstance(sampler, VLLMSampler)
    from vllm.v1.worker.cpu_worker import CPUWorker

    monkeypatch.setattr(CPUWorker, "discard", lambda self, tags: None, raising=False)
    engine = sampler._engine
    executor = engine.engine_core.engine_core.model_executor

    def state() -> tuple[set[str], bool]:
        return set(executor.sleeping_tags), engine.is_sleeping()

    for mode in ("keep", "offload", "discard"):
        sampler._sleep = mode  # type: ignore[assignment]
        before = list(sampler.generate(prompts, PLAIN, 1))
        for _ in range(2):  # the second time with a cache that is still asleep
            sampler.sleep()
            asleep = {"kv_cache"} if mode == "keep" else {"kv_cache", "weights"}
            assert state() == (asleep, True)
            sampler.wake_weights()
            assert state() == ({"kv_cache"}, True)
            sampler.load_weights(Weights(snapshot(model), 1))
        sampler.wake_cache()
        assert state() == (set(), False)
        after = list(sampler.generate(prompts, PLAIN, 1))
        assert len(after) == 32
        assert_same(before, after)
    sampler.close()


@pytest.mark.parametrize(
    ("mistake", "longest", "options", "fragment"),
    [
        ("too long", 1_000_000, {}, "(1000000) is greater than"),
        ("architecture", LONGEST, {}, "['NoSuchModelForCausalLM'] are not supported"),
        ("no weights", LONGEST, {}, "Cannot find any model weights"),
        ("nowhere", LONGEST, {}, "nowhere"),
        (
            "in a worker", LONGEST,
            {"tensor_parallel_size": 2, "hf_overrides": {"num_hidden_layers": 5}},
            "not initialized from checkpoint",
        ),
    ],
)  # fmt: skip
def test_what_vllm_does_not_take_is_one_sentence(
    mistake: str, longest: int, options: dict[str, Any], fragment: str, tmp_path: Path
) -> None:
    path = tmp_path / mistake if mistake not in ("too long", "in a worker") else Path(BUNDLED)
    if mistake in ("architecture", "no weights"):
        GPT2Config(vocab_size=300, n_embd=30, n_head=2, n_layer=1).save_pretrained(path)
    if mistake == "architecture":
        config = json.loads((path / "config.json").read_text())
        config["architectures"] = ["NoSuchModelForCausalLM"]
        (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as error:
        VLLMSampler(
            str(path), eos_token_ids=frozenset({1}), detokenize=str, max_model_len=longest,
            gpu_memory_utilization=0.5, **options,
        )  # fmt: skip
    message = str(error.value)
    assert message.startswith("vLLM does not start with ") and fragment in message
    assert "(--rollout_name hf)." in message and "\n" not in message


def save_head(folder: Path, noise: float) -> str:
    """The bundled model, which ties its output layer, with one in the files all the same."""
    shutil.copytree(BUNDLED, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    torch.manual_seed(0)
    change = torch.randn_like(embedding) * embedding.std() * noise
    file.unlink()
    save_file(tensors | {"lm_head.weight": embedding + change}, file, {"format": "pt"})
    return str(folder)


class TestFiles:
    """Models whose files have other tensors; a process makes groups of experts at its start."""

    @pytest.mark.parametrize(
        ("kind", "transfer"),
        [
            ("mixtral", "memory"), ("mixtral", "gloo"), ("qwen3_moe", "memory"),
            ("untied files", "memory"), ("files with a copy", "memory"),
        ],
    )  # fmt: skip
    def test_new_weights_are_the_ones_that_sample(
        self, kind: str, transfer: Transfer, tokenizer: Any, prompts: list[Prompt], tmp_path: Path
    ) -> None:
        """Experts one by one; an output layer that config.json ties and the files hold."""
        heads = {"untied files": 0.3, "files with a copy": 0.0}
        path = (
            save_head(tmp_path / "model", heads[kind])
            if kind in heads
            else save_model(tmp_path, kind, **WIDE)
        )
        config = read_config(f"model.path={path}")
        learner = Learner(config, tokenizer, total_steps=1)
        sampler = build_sampler(config, tokenizer, transfer=transfer)

        def publish(version: int) -> None:
            weights = learner.weights()
            assert weights is not None
            sampler.load_weights(replace(weights, version=version))

        if transfer == "gloo":
            publish = connect_gloo(learner, sampler).send
        assert_new_weights_sample(sampler, learner.policy.model, prompts, publish)
        sampler.close()

    def test_an_export_samples_as_its_checkpoint(
        self, tokenizer: Any, prompts: list[Prompt], tmp_path: Path
    ) -> None:
        """RoPE as Llama 3 scales it, whose settings both generations of readers find."""
        scale = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope = {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 16}
        model = make_model("llama", **WIDE, rope_parameters=rope | scale)
        for folder in ("actor", "out"):
            (tmp_path / folder).mkdir()
        write_files(tmp_path / "actor", model_files(model, tokenizer))
        write_weights(model, tmp_path / "actor")
        write_model(tmp_path / "actor", tmp_path / "out")
        sampler = build_sampler(read_config(f"model.path={tmp_path / 'out'}"), tokenizer)
        rollouts = list(sampler.generate(prompts, Sampling(n=2, max_tokens=64), 0))
        assert logprob_gap(model, rollouts) < TOLERANCE
        sampler.close()

    def test_experts_that_stay_as_they_were_are_refused(
        self, tokenizer: Any, tmp_path: Path
    ) -> None:
        """vLLM's loader writes them where a reload does not see them."""
        path = save_model(tmp_path, "gpt_oss", **WIDE)
        config = read_config(f"model.path={path}")
        weights = Learner(config, tokenizer, total_steps=1).weights()
        assert weights is not None
        sampler = build_sampler(config, tokenizer)
        with pytest.raises(ModelError, match="vLLM cannot put new weights into the exp") as error:
            sampler.load_weights(weights)
        message = str(error.value)
        assert "--rollout_name hf" in message and "model.lora_merge=false" in message
        sampler.close()
