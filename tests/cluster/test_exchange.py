"""Weights go by gloo from two learner ranks to two real vLLMs; then one is lost on the way.

And a way that fails at its first use: NCCL, where no GPU is.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_cli.algo.batch import AnnotatedBatch, build_batch
from ppo_cli.cluster.workers import ExchangePlan
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import MiniBatch, Sampling
from ppo_cli.errors import ConfigError, WorkerLost
from ppo_cli.planning.placement import Placement
from ppo_cli.records import Prompt
from tests.cluster.whole_engine import WholeEngine
from tests.engine.packed_steps import scored
from tests.settings import complete

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here"),
]
PLACEMENT = Placement(1, 0, (0, 1), ((2,), (3,)), ())
SAMPLING = Sampling(n=2, max_tokens=24, seed=5)
TOLERANCE = 1e-4


def settings(way: str, **trainer: Any) -> Config:
    # The output head of the bundled model is tied to its embedding.
    return complete(
        {
            "model": {"path": "embedded", "dtype": "float32"},
            "rollout": {"name": "vllm", "weight_transfer": way, "max_num_seqs": 32},
            "data": {"max_prompt_length": 32, "max_response_length": SAMPLING.max_tokens},
            "algorithm": {"adv_estimator": "grpo"},
            "actor": {"optim": {"lr": 1e-3}},
            "trainer": {"worker_timeout": 240, "node_timeout": 240, **trainer},
        }
    )


def start_recording(*arguments: Any) -> Any:
    """A sampler that notes the thread of each call of vLLM's engine."""
    from vllm.v1.engine.llm_engine import LLMEngine

    from ppo_cli.cluster.workers import SamplerRole

    threads: dict[str, set[int]] = {}

    def note(name: str, method: Any) -> Any:
        def noted(*values: Any, **named: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return method(*values, **named)

        return noted

    for name in ENGINE_CALLS:
        setattr(LLMEngine, name, note(name, getattr(LLMEngine, name)))
    role: Any = SamplerRole(*arguments)
    role.engine_threads = lambda: threads
    return role


ENGINE_CALLS = (
    "__init__", "add_request", "step", "collective_rpc", "reset_prefix_cache",
    "set_weight_version",
)  # fmt: skip


@pytest.fixture(scope="module")
def engine(
    address: str, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WholeEngine]:
    config = settings("gloo")
    logs = tmp_path_factory.mktemp("run") / "logs"
    pickled = pickle.dumps(tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ppo_cli.cluster.engine.SAMPLER", start_recording)
        engine = WholeEngine(
            config,
            pickled,
            total_steps=4,
            insists_on_transfer=True,
            placement=PLACEMENT,
            logs=logs,
            address=address,
        )
    yield engine
    engine.close()


def gap(annotated: AnnotatedBatch, sampled_BT: torch.Tensor) -> float:
    """The largest difference between the learner's log-probs of responses and others."""
    return float(
        ((annotated.old_logprobs_BT - sampled_BT) * annotated.response_mask_BT).abs().max()
    )


# The first test of the file: the fixture `engine`, which the others share, stays joined.
@pytest.mark.weekly
def test_auto_goes_on_by_memory_where_its_way_fails_at_the_first_use(
    address: str, prompts: list[Prompt], tokenizer: Any, tmp_path: Path
) -> None:
    # Settings that say that there are GPUs, of which one only samples: NCCL is chosen then.
    config = settings("nccl", n_gpus_per_node=2, placement="train:0,rollout:1")
    notes: list[str] = []
    engine = WholeEngine(
        config, pickle.dumps(tokenizer), total_steps=4, insists_on_transfer=False,
        placement=Placement(1, 0, (0,), ((1,),), ()), logs=tmp_path / "logs", tell=notes.append,
        address=address,
    )  # fmt: skip
    try:
        (line,) = [text for text in notes if "weight_transfer" in text]
        assert line.startswith("Weights do not travel by nccl here (RuntimeError: ")
        assert line.endswith("travel by memory from now on (rollout.weight_transfer).")
        assert "\n" not in line and engine.weight_transfer == "memory"
        for version in range(2):
            rollouts = list(engine.generate(prompts[:4], SAMPLING))
            assert {rollout.weight_version for rollout in rollouts} == {version}
            batch = build_batch(rollouts, tokenizer.pad_token_id)
            annotated = engine.annotate(batch)
            assert gap(annotated, batch.sampler_logprobs_BT) < TOLERANCE
            sums = engine.step(MiniBatch(scored(annotated, seed=3), actor=True, critic=False))
            assert sums["perf/weights_by_memory"] == (1.0, 1.0)
            engine.publish()
    finally:
        engine.close()


def test_both_samplers_hold_the_learners_weights_after_each_publish(
    engine: WholeEngine, prompts: list[Prompt], tokenizer: Any
) -> None:
    for version in range(3):
        rollouts = list(engine.generate(prompts, SAMPLING))
        assert {rollout.weight_version for rollout in rollouts} == {version}
        batch = build_batch(rollouts, tokenizer.pad_token_id)
        annotated = engine.annotate(batch)
        assert gap(annotated, batch.sampler_logprobs_BT) < TOLERANCE
        engine.step(MiniBatch(scored(annotated, seed=3), actor=True, critic=False))
        engine.publish()
        assert gap(engine.annotate(batch), batch.sampler_logprobs_BT) > 100 * TOLERANCE


def test_an_engine_is_built_loaded_and_stepped_in_one_thread(engine: WholeEngine) -> None:
    for threads in engine.cluster.call(engine._samplers, "engine_threads"):
        assert threads.keys() == {*ENGINE_CALLS}
        assert len(set.union(*threads.values())) == 1, threads


def test_a_way_that_does_not_work_here_is_told_at_the_start(engine: WholeEngine) -> None:
    plan = ExchangePlan("ipc", tuple(engine._samplers), 1, "127.0.0.1", timeout_s=60)
    with pytest.raises(ConfigError, match=r"do not travel by ipc here \(.*accelerator.*memory\.$"):
        engine._publisher.connect(plan)


def test_a_sampler_that_is_killed_while_it_takes_weights_is_named(engine: WholeEngine) -> None:
    stopped, killed = engine._learners[1].pid, engine._samplers[1].pid
    # Without the second rank no tensor is ever whole: the exchange stops, the samplers
    # wait for the first rank, and that waits for the second one. Nobody feels the loss by itself.
    os.kill(stopped, signal.SIGSTOP)
    killing = threading.Timer(2.0, os.kill, (killed, signal.SIGKILL))
    started = time.monotonic()
    killing.start()
    try:
        with pytest.raises(WorkerLost, match=r"Sampler 1 on node .* was killed .*`update_weights`"):
            engine._publisher.send()
    finally:
        killing.cancel()
        os.kill(stopped, signal.SIGCONT)
    assert 2.0 <= time.monotonic() - started < 150
