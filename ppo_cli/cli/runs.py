"""`ppo runs DIR`: the runs below a folder, with state, steps, reward and cost."""

from __future__ import annotations

import fcntl
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ppo_cli.cli.screen import aligned, number, print_result, validation_value
from ppo_cli.config.plan import arithmetic
from ppo_cli.errors import DataError, UserError
from ppo_cli.report.metrics import dollars
from ppo_cli.run_folder import (
    LOCK,
    METRICS_FILE,
    STEP_NAME,
    CheckpointStore,
    paid_calls,
    read_metrics,
    run_settings,
)

DEEPEST = 3  # folders below DIR


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder that holds run folders.")
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the runs in a folder and below it, the newest first."""
    found: list[dict[str, Any]] = []
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder. Name one that holds run folders.")
    for run in find_runs(folder):
        try:
            found.append(run_facts(run))
        except DataError as error:  # of one run; the others are listed
            typer.echo(f"note: {error}", err=True)
    found.sort(key=lambda run: -run["changed"])
    if not found and not as_json:
        raise DataError(f"{folder} holds no run: none has a config.yaml and a {METRICS_FILE}.")
    print_result(found, lambda: runs_table(found), as_json=as_json)


def find_runs(folder: Path, depth: int = 0) -> list[Path]:
    """The run folders here and below; what is in a run, earlier runs too, is a part of it."""
    if (folder / METRICS_FILE).exists():
        return [folder]
    if depth == DEEPEST:
        return []
    inner: list[Path] = []
    with suppress(OSError):
        inner = sorted(p for p in folder.iterdir() if p.is_dir() and p.name[0] != ".")
    return [run for path in inner for run in find_runs(path, depth + 1)]


def run_facts(run: Path) -> dict[str, Any]:
    """State, steps, rewards, cost (dollars) and time of last change (Unix) of one run."""
    lines, file = read_metrics(run), run / "config.yaml"
    total = None
    with suppress(UserError):
        if file.exists():
            total = arithmetic(run_settings(run))["total_steps"]
    step = max((int(line["step"]) for line in lines), default=0)
    rewards = [line["reward_mean"] for line in lines if line.get("reward_mean") is not None]
    values = [v for line in lines if (v := validation_value(line)) is not None]
    saved = CheckpointStore(run / "checkpoints", 1).newest()
    found = STEP_NAME.match(saved.name) if saved else None
    state = "running" if is_running(run) else "done" if total and step >= total else "stopped"
    return {
        "run": str(run),
        "state": state,
        "step": step,
        "total_steps": total,
        "saved_step": int(found.group(1)) if found else None,
        "reward": rewards[-1] if rewards else None,
        "validation": values[-1] if values else None,
        "cost_usd": sum(float(call["usd"]) for call in paid_calls(run)),
        "changed": (run / METRICS_FILE).stat().st_mtime,
    }


def is_running(run: Path) -> bool:
    """Whether a process holds the run's claim."""
    try:
        with (run / LOCK).open() as claim:
            fcntl.flock(claim, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def runs_table(found: list[dict[str, Any]]) -> str:
    """The runs as aligned columns."""
    rows = [["run", "state", "step", "saved", "reward", "val", "cost", "changed"]]
    for run in found:
        total = f"/{run['total_steps']}" if run["total_steps"] else ""
        rows.append([
            run["run"], run["state"], f"{run['step']}{total}", str(run["saved_step"] or "-"),
            number(run["reward"]), number(run["validation"]),
            dollars(run["cost_usd"]) if run["cost_usd"] else "-",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run["changed"])),
        ])  # fmt: skip
    return "\n".join(aligned(rows))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(epilog="Example: ppo runs experiments")(runs)
