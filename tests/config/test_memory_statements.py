"""The plan's sentences on memory and disk are compared with the numbers that they print.

As in tests/report/test_statements.py, the rules say what the words mean, not how they are chosen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ppo_cli.config.schema.keys import with_settings
from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle
from ppo_cli.errors import UserError
from ppo_cli.machine.machine import Machine
from ppo_cli.planning.memory.disk import plan_disk
from ppo_cli.planning.memory.plan import fit_memory, memory_plan
from ppo_cli.planning.placement import PlanPart
from tests.settings import CPU, GIB, with_gpus

BYTES = {"MiB": 1 << 20, "GiB": GIB}
SIZE = r"([\d.]+(?:e\+\d+)? [MG]iB)"
VALUES: dict[str, list[Any]] = {
    "model.path": ["embedded", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-72B"],
    "model.lora_rank": [0, 16],
    "model.enable_gradient_checkpointing": [None, True, False],
    "algorithm.adv_estimator": ["gae", "grpo"],
    "rollout.n": [4],
    "rollout.name": ["hf", "vllm"],
    "rollout.gpu_memory_utilization": [0.05, 0.3, 0.9],
    "data.max_response_length": [64, 16384],
    "actor.fsdp_config.reshard_after_forward": [None, True],
    "trainer.max_ckpt_to_keep": [None, 1, 3],
}
MACHINES = st.tuples(
    st.sampled_from([0, 0, 1, 2, 8]), st.sampled_from([1, 24, 80]), st.sampled_from([4, 32, 2000]),
    st.sampled_from([(), ("keep_gathered", "sleep")]),
)  # fmt: skip


def as_bytes(size: str) -> float:
    number, unit = size.split()
    return float(number) * BYTES[unit]


# Words of a line, and what the sizes in it must be to each other.
SIZES: list[tuple[str, Callable[..., bool]]] = [
    (rf"needs about {SIZE} \([^)]*\) of {SIZE}: fits", lambda need, size: need < size),
    (rf"needs about {SIZE} \([^)]*\) of {SIZE}, of which {SIZE} must stay free: does not fit",
     lambda need, size, free: need > 0.995 * (size - free)),
    (rf"gives vLLM {SIZE}, which needs {SIZE} .* does not fit", lambda share, need: share < need),
    (rf"checkpointing: off \(a step with all activations needs about {SIZE} of {SIZE}\)",
     lambda step, size: step <= size),
    (rf"checkpointing: on \(a step with all activations needs about {SIZE} of {SIZE}\)",
     lambda step, size: step > 0.5 * size),
]  # fmt: skip


def check_lines(part: PlanPart, said: set[str]) -> None:
    for line in part.sentences:
        for pattern, holds in SIZES:
            if match := re.search(pattern, line):
                said.add(pattern)
                assert holds(*map(as_bytes, match.groups())), line
    for device in part.facts.get("devices", ()):
        (line,) = (line for line in part.sentences if line.startswith(f"{device['name']} "))
        assert device["there"] is None or line.endswith(": fits") == device["fits"], line


def check_change(requested: Config, machine: Machine, part: PlanPart) -> None:
    """What makes a run fit does so, and nothing is offered to one that fits."""
    offered = part.facts.get("changes")
    assert not (offered and part.facts["fits"])
    if offered:
        changed = with_settings(requested, offered)
        part = memory_plan(changed, fit_memory(settle(changed, machine)), machine)
        assert part.facts["fits"], (offered, part.sentences)


@pytest.mark.slow
def test_a_line_on_memory_says_what_its_numbers_say() -> None:
    said: set[str] = set()

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(st.fixed_dictionaries({k: st.sampled_from(v) for k, v in VALUES.items()}), MACHINES)
    def walk(values: dict[str, Any], kind: tuple[int, int, int, Any]) -> None:
        gpus, size, host, proven = kind
        machine = with_gpus(gpus, size * GIB, proven=proven, host_bytes=host * GIB) if gpus else CPU
        trainer = {"engine": "ray" if gpus else "local", "n_gpus_per_node": gpus}
        try:
            requested = with_settings(Config.model_validate({"trainer": trainer}), values)
            fitted = fit_memory(settle(requested, machine))
        except (UserError, ValidationError, ValueError):
            return  # settings that exclude each other
        part = memory_plan(requested, fitted, machine)
        check_lines(part, said)
        check_change(requested, machine, part)
        (line,) = plan_disk(fitted.config, 100).sentences
        if match := re.search(rf"{SIZE} each, at most (\d+) \({SIZE}\)", line):
            each, count, total = as_bytes(match[1]), int(match[2]), as_bytes(match[3])
            assert abs(each * count - total) <= 0.011 * total, line

    walk()
    assert len(said) == len(SIZES), {pattern for pattern, _ in SIZES} - said
