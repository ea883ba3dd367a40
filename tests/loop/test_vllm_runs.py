"""A whole run with vLLM as the sampler, on the CPU under Ray: it learns, and the weights arrive."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from ppo_cli.run_folder.lines import read_metrics
from tests.loop.runs import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here"),
]


def test_a_run_with_vllm_learns_and_samples_from_the_weights_of_the_learner(tmp_path: Path) -> None:
    out = tmp_path / "run"
    output = train(out, "--preset", "embedded", "--rollout_name", "vllm", "--max_steps", "12")
    lines = read_metrics(out)
    accuracy = [line["val/accuracy"] for line in lines if "val/accuracy" in line]
    assert accuracy[-1] >= accuracy[0] + 0.15, accuracy
    trained = lines[1:]
    assert [line["step"] for line in trained] == [*range(1, 13)]
    assert all(line["perf/weights_by_memory"] == 1 for line in trained)
    assert max(line["rollout/logprob_diff_max"] for line in trained) < 1e-4
    assert "Traceback" not in output.stdout + output.stderr
