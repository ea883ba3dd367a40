"""`ppo doctor`: checks this machine; `--self_test` compares its numbers with the CPU's."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ppo_cli.cli.flags import Arguments, add_command, make_flag, make_switch
from ppo_cli.cli.help import App
from ppo_cli.config.models.bundled import MODELS
from ppo_cli.config.models.folder import read_config
from ppo_cli.config.models.shape import Shape
from ppo_cli.errors import EXIT_USER, MissingPart, UserError
from ppo_cli.machine.device_record import require_record
from ppo_cli.machine.gpus import pin_gpu_order
from ppo_cli.machine.machine import Machine
from ppo_cli.paths import user_path
from ppo_cli.run_folder.lines import read_metrics, to_json

if TYPE_CHECKING:
    from ppo_cli.self_test.results import LayerShape, Outcome
    from ppo_cli.self_test.runner import Progress

# Kind of a finding about this machine -> the word in its line.
FINDING_STATES = {"ok": "ok", "remark": "warn", "missing": "fail"}
# State of an outcome of the self-test -> the word in the table.
STATES = {"ok": "ok", "differs": "differs", "failed": "failed", "skipped": "does not apply"}


def doctor(arguments: Arguments) -> None:
    """Check Python, packages, GPUs, vLLM, Ray, memory, disk, hub, sandboxes and judges.

    Each line says ok, warn or fail, and suggests a fix. The exit code is 2 if a check fails.
    With the flags of a training run, its output folder and its judges are checked as well.
    --self_test runs the program's parts on these devices instead, for about two minutes, and
    compares their numbers with the CPU's in float64; --model sets the sizes of the layers.
    --report writes the last self-test, and the run in --output_dir if there is one, as a file to
    send: it has no secrets, names of the machine or paths.
    """
    from ppo_cli.cli.screen import print_json, print_result, print_text
    from ppo_cli.run.doctor import examine

    resolved = arguments.resolve()
    as_json = bool(arguments.extras["json"])
    report: Path | None = arguments.extras["report"]
    self_test: bool = arguments.extras["self_test"]
    if report is not None:
        from ppo_cli.run.machine_report import describe_run, make_report
        from ppo_cli.scoring.rows import check_out, write_out

        # Before the self-test, which takes minutes.
        check_out(report, resolved.config.trainer.output_dir, "--report")
        run = user_path(resolved.config.trainer.output_dir)
        figures = describe_run(run) if read_metrics(run) else None
    if self_test or report is not None:
        machine, model = resolved.machine, resolved.config.model.path
        ok = not self_test or _run_self_test(model, machine, as_json=as_json)
        if report is not None:
            facts = make_report(require_record("--report"), machine, figures)
            write_out(report, to_json(facts, indent=1) + "\n", "--report")
            of_run = f"the run in {run}" if figures else f"no run ({run} has none)"
            line = f"{report}: the last self-test and {of_run}"
            result = {"out": str(report), "run": str(run) if figures else None}
            if as_json and self_test:  # stdout has the record
                print(line, file=sys.stderr)
            else:
                print_result(result, lambda: line, as_json=as_json)
        if not ok:
            raise typer.Exit(EXIT_USER)
        return
    # A check may take seconds, so each finding is printed at once.
    rows = []
    for part, finding in examine(resolved, os.environ, probe=arguments.extras["probe"]):
        state = FINDING_STATES[finding.kind]
        rows.append({"part": part, "state": state, "found": finding.text, "fix": finding.advice})
        if not as_json:
            lines = [f"{state:<5} {part:<14} {finding.text}"]
            lines += [f"{'':<20} -> {finding.advice}"] * bool(finding.advice)
            print_text("\n".join(lines))
    if as_json:
        print_json(rows)
    if any(row["state"] == "fail" for row in rows):
        raise typer.Exit(EXIT_USER)


def _run_self_test(model: str, machine: Machine, *, as_json: bool) -> bool:
    """Run all checks of the self-test, write their record, print them; whether none has failed."""
    from ppo_cli.cli.screen import print_json, print_text
    from ppo_cli.machine.device_record import require_writable, write_record
    from ppo_cli.self_test.results import Setup
    from ppo_cli.self_test.runner import make_record, run_checks

    # CUDA reads its variables once, so the order of the GPUs is set before torch is imported.
    gpus = len(machine.gpus)
    pin_gpu_order(os.environ)
    if fault := machine.gpu_fault(gpus):
        raise MissingPart(str(fault))
    try:
        require_writable()
    except UserError as error:
        line = f"The result of this self-test cannot be saved: {error}."
        print(line, file=sys.stderr, flush=True)
    setup = Setup("cuda" if gpus else "cpu", gpus, Path(), _read_layer_shape(model))
    started = time.monotonic()
    outcomes = list(run_checks(setup, tell=_print_progress))
    _clear_progress()
    record = make_record(outcomes)
    path, reason = None, None
    # A self-test that passed counts even if its record cannot be saved.
    try:
        path = str(write_record(record))
    except UserError as error:
        reason = str(error)
    if as_json:
        print_json(asdict(record) | {"path": path, "not_written": reason})
    else:
        counts = {state: sum(o.state == state for o in outcomes) for state in STATES}
        counted = ", ".join(f"{n} {STATES[state]}" for state, n in counts.items() if n)
        device = "the CPU" if setup.device == "cpu" else "GPUs"
        where = path or f"not written: {reason}"
        lines = [
            *_format_outcomes(outcomes),
            "",
            f"On {device}, with layers of {setup.shape.model}: {counted}",
            f"{time.monotonic() - started:.0f} s; record: {where}",
        ]
        if proven := ", ".join(record.proven):
            lines.append(f"proven on these GPUs: {proven}")
        print_text("\n".join(lines))
    return all(outcome.state not in ("differs", "failed") for outcome in outcomes)


def _read_layer_shape(path: str) -> LayerShape:
    """Return the layer sizes of --model; the defaults for a bundled model."""
    from ppo_cli.self_test.results import LayerShape

    shape = None if path in MODELS else Shape.from_config(read_config(path))
    if shape is None:
        return LayerShape()
    # Query heads share key heads in many models, so both are counted in heads of the same size.
    size = shape.queries // shape.heads
    return LayerShape(shape.heads, shape.keys // size, size, shape.vocabulary, path)


def _print_progress(progress: Progress) -> None:
    """Print progress to stderr: a line that is overwritten on a terminal, else one per check."""
    time_left = f"about {progress.seconds_left:.0f} s left"
    line = f"self-test {progress.number}/{progress.count}: {progress.check}, {time_left}"
    _clear_progress()
    print(line, end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)


def _clear_progress() -> None:
    """Erase the progress line of a terminal."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _format_outcomes(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the outcomes as a table: check, outcome, seconds, what was compared."""
    from ppo_cli.cli.screen import align_columns

    rows = [["check", "outcome", "seconds", "what was compared"]]
    for outcome in outcomes:
        figures = [f"{name.replace('_', ' ')} {value}" for name, value in outcome.figures.items()]
        detail = "; ".join([outcome.detail, *([", ".join(figures)] if figures else [])])
        seconds = f"{outcome.seconds:.1f}" if outcome.seconds else "-"
        rows.append([outcome.check, STATES[outcome.state], seconds, detail])
    return align_columns(rows, left_aligned=4)


# The help lists the settings that the checks read; other flags of a run are accepted too.
doctor_app = App()
add_command(
    doctor_app,
    doctor,
    "ppo doctor --use_api_reward --rm_api_type openai --probe",
    [
        make_switch(
            "self_test", "Run the program's parts on these devices and compare their numbers."
        ),
        make_flag(
            "report", Path, None,
            "File to write: the last self-test and the run in --output_dir.", "FILE",
        ),
        make_switch("probe", "Also call the model hub, and each judge for a few tokens."),
        make_switch("json", "Print JSON."),
    ],
    ("trainer.default_local_dir", "trainer.output_dir", "reward.api."),
)  # fmt: skip
