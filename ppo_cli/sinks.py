"""Where metrics go beside metrics.jsonl: TensorBoard and Weights & Biases, when asked for.

Their packages are imported only here, and only when `--logger` names them.
"""

from __future__ import annotations

import shlex
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ppo_cli.errors import MissingPart, UserError
from ppo_cli.redact import mask_secrets
from ppo_cli.run_folder.folder import plain


class Sink(Protocol):
    """Takes the metrics of each step."""

    def open(self, step: int, *, resumed: bool) -> None:
        """Make ready; `step` is the first that will come, `resumed` whether others came before."""
        ...

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step."""
        ...

    def close(self) -> None:
        """See everything to its place. Safe to call twice."""
        ...


def check_loggers(loggers: Sequence[str]) -> None:
    """Raise MissingPart when a logger's package is not installed; imports nothing."""
    for package in ("tensorboard", "wandb"):
        if package in loggers and find_spec(package) is None:
            raise MissingPart(_missing(package))


def make_sinks(
    loggers: Sequence[str],
    run_dir: Path,
    *,
    project: str,
    experiment: str,
    config: Mapping[str, Any],
) -> list[Sink]:
    """Build what `--logger` asks for; raises MissingPart when a package is not installed."""
    sinks: list[Sink] = []
    if "tensorboard" in loggers:
        sinks.append(TensorBoardSink(run_dir / "tensorboard"))
    if "wandb" in loggers:
        sinks.append(WandbSink(run_dir, project, experiment, config))
    return sinks


class TensorBoardSink:
    """Event files in `tensorboard/`, written without torch."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingPart(_missing("tensorboard")) from error
        self._events, self._summaries = event_pb2, summary_pb2
        self._make_writer = EventFileWriter
        self._folder = folder
        self._writer: Any = None

    def open(self, step: int, *, resumed: bool) -> None:
        """Start an event file; points that an earlier one has from `step` on are void."""
        self._writer = self._make_writer(str(self._folder))
        log = self._events.SessionLog
        mark = log(status=log.START)
        self._writer.add_event(
            self._events.Event(step=step, wall_time=time.time(), session_log=mark)
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        value = self._summaries.Summary.Value
        summary = self._summaries.Summary(
            value=[value(tag=name, simple_value=number) for name, number in metrics.items()]
        )
        event = self._events.Event(step=step, wall_time=time.time(), summary=summary)
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class WandbSink:
    """A Weights & Biases run; `WANDB_MODE=offline` keeps it on this machine."""

    def __init__(
        self, run_dir: Path, project: str, experiment: str, config: Mapping[str, Any]
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingPart(_missing("wandb")) from error
        self._wandb = wandb
        self._run_dir = run_dir
        self._settings = {
            "project": project,
            "name": experiment,
            "config": plain(mask_secrets(config)),
        }
        self._run: Any = None

    def open(self, step: int, *, resumed: bool) -> None:
        """Start a W&B run, or go on with the one that this run folder belongs to."""
        name_file = self._run_dir / "wandb" / "run_id"
        name_file.parent.mkdir(parents=True, exist_ok=True)
        if not (resumed and name_file.exists()):
            name_file.write_text(uuid.uuid4().hex[:12])
        try:
            self._run = self._wandb.init(
                dir=str(self._run_dir), id=name_file.read_text(), resume="allow", **self._settings
            )
        except self._wandb.Error as error:
            raise UserError(
                f"W&B did not start ({error}). Log in with `wandb login`, or set "
                "WANDB_MODE=offline, or leave wandb out of --logger."
            ) from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step; W&B itself passes over steps that it has seen."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload what is left."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()


def _missing(package: str) -> str:
    return (
        f"--logger {package} needs the package {package}. Install it with "
        f"`{shlex.quote(sys.executable)} -m pip install {package}`, or leave it out of --logger."
    )
