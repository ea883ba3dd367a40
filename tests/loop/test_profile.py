"""`--profile`: a trace and a table of the steps that were asked for, in real runs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.config.settling import settle
from tests.loop.runs import train

SHORT = (
    "--preset", "embedded", "--batch_size", "4", "--mini_batch_size", "4", "--max_steps", "3",
    "--max_response_length", "4", "trainer.val_before_train=false", "data.val_max_samples=4",
    "data.train_max_samples=12", "--profile", "2",
)  # fmt: skip
PHASES = ("rollout", "annotate", "update critic", "update actor")


def phases(trace: Path) -> set[str]:
    """The phases of a Chrome trace, which has operators too."""
    with gzip.open(trace, "rt") as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert any(name.startswith("aten::") for name in names)
    return {name.removeprefix("phase: ") for name in names if name.startswith("phase: ")}


@pytest.mark.slow
def test_one_process_traces_the_step_and_shows_its_table(tmp_path: Path) -> None:
    done = train(tmp_path, *SHORT, fresh=True)
    shown = done.stdout
    assert "USDT" not in shown + done.stderr
    trace, table = sorted((tmp_path / "profile").iterdir())
    assert trace.name == "step_000002.rank_0.json.gz" and phases(trace) == set(PHASES)
    text = table.read_text().rstrip()
    assert text in shown
    rows = {line[:14].strip(): line[14:].split()[:2] for line in text.splitlines()[2:]}
    assert set(rows) == {*PHASES, "outside"}
    full_run = float(text.split(" s;")[0].split()[-1])
    assert sum(float(seconds) for seconds, _ in rows.values()) == pytest.approx(full_run, abs=0.05)
    assert sum(float(share.rstrip("%")) for _, share in rows.values()) == pytest.approx(100, abs=3)
    assert "aten::" in next(line for line in text.splitlines() if line.startswith("annotate"))


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ("trainer.profile_steps=3", {3}),
        ("trainer.profile_steps=2,5", {2, 5}),
        ("trainer.profile_steps=[2,5]", {2, 5}),
        ("trainer.profile_steps=2-4,7", {2, 3, 4, 7}),
        ("global_profiler.steps=[1,2,5]", {1, 2, 5}),
        ("global_profiler.tool=null", set()),
        ("trainer.threads=2", set()),
    ],
)
def test_which_steps_are_profiled(arguments: str, steps: set[int]) -> None:
    config = settle(arguments).config
    assert {step for step in range(10) if config.trainer.is_profiled(step)} == steps


def test_of_another_profiler_a_run_says_which_it_has() -> None:
    notes = settle("global_profiler.tool=nsys").notes
    assert any("--profile STEPS" in note for note in notes), notes
