"""vLLM on one GPU: runs with each way that weights travel, and sleeping and waking."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_04_runs import SMALL, train

# Where there is no GPU: tests/engine/test_vllm_sampler.py does this on the CPU.
pytestmark = [
    pytest.mark.weekly,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed (scripts/setup vllm)",
    ),
]
LIMIT = 0.15  # between log-probs of vLLM and of the learner, in half precision
EAGER = ("rollout.enforce_eager=true",)  # graphs take a minute to compile: once is enough
APART = ("--n_gpus", "2", "--placement", "train:0,rollout:1", *EAGER)
LORA = ("model.lora_rank=4", "model.lora_merge=false", *EAGER)
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "memory": ("memory", EAGER), "ipc": ("ipc", ()), "nccl": ("nccl", APART),
    "adapter": ("memory", LORA), "gloo": ("gloo", EAGER),
}  # fmt: skip
ON_GPU, ON_CPU = ("memory", "ipc", "nccl", "adapter"), ("memory", "gloo", "adapter")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs")


def choose_runs() -> list[Any]:
    """Each way to send weights where it works: (on the GPU, its name)."""
    marks = {"nccl": [two_gpus]}
    on_gpu = [(True, way, [pytest.mark.gpu, *marks.get(way, [])]) for way in ON_GPU]
    on_cpu = [(False, way, [pytest.mark.slow]) for way in ON_CPU]
    return [
        pytest.param(gpu, way, marks=marks, id=f"{'cuda' if gpu else 'cpu'}-{way}")
        for gpu, way, marks in [*on_gpu, *on_cpu]
    ]


@pytest.mark.parametrize(("on_gpu", "way"), choose_runs())
def test_samples_come_from_the_weights_that_were_sent(
    on_gpu: bool, way: str, variables: dict[str, str], tmp_path: Path, figure: Any
) -> None:
    """The learner's log-probs of each response are vLLM's, before and after weights change."""
    travels, settings = RUNS[way]
    lines = train(
        tmp_path / "run", variables, *SMALL, *settings, "trainer.engine=ray", "--max_steps", "3",
        "--rollout_name", "vllm", f"rollout.weight_transfer={travels}", "model.dtype=bfloat16",
        "actor.optim.lr=1e-3", "algorithm.use_kl_in_reward=true",
    )  # fmt: skip
    gaps = [line["rollout/logprob_diff_max"] for line in lines[1:]]
    figure("largest gap of log-probs", max(gaps))
    assert len(gaps) == 3 and max(gaps) < LIMIT
    assert all(line[f"perf/weights_by_{travels}"] == 1 for line in lines[1:])
    # The bundled model in greedy validation: one answer may be another in half precision.
    assert lines[0]["val/accuracy"] == pytest.approx(0.625, abs=1.5 / 16)
    assert lines[3]["kl/penalty"] != 0  # the weights have changed


@pytest.mark.parametrize("sleep", ["discard", "offload", "keep"])
def test_greedy_responses_are_the_same_after_sleep(
    sleep: str, on_gpu: bool, run_program: Callable[..., str], figure: Any
) -> None:
    out = run_program(str(Path(__file__).with_name("sleep_probe.py")), sleep)
    probe = json.loads(out.splitlines()[-1])
    figure(f"{sleep}: GB given back", probe["given back"] / 1e9)
    assert probe["before"] == probe["after"] and len(set(map(tuple, probe["before"]))) > 1
    assert probe["changed"] != probe["before"]
    assert not on_gpu or probe["given back"] > 0
