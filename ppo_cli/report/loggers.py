"""Loggers besides metrics.jsonl: TensorBoard, W&B, trackio, MLflow and SwanLab.

Each is a class, listed in `SINKS` by the name of its package; packages are imported only when they
are used. All but TensorBoard have their own runs, and a resumed run continues the same one.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ppo_cli.atomic import atomic_replace
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import Interrupted, UserError, first_line
from ppo_cli.run_folder.lines import plain
from ppo_cli.secrets.redact import mask_secrets, redact
from ppo_cli.waits import Progress, await_result, run_in_thread

T = TypeVar("T")
ANSWER_S = 120.0  # for a call of a logger; the run then stops and can be resumed

# Columns of the table of responses in W&B.
TABLE = ("step", "data_source", "prompt", "response", "ground_truth", "score", "reason", "failure")
TABLE_ROWS, TABLE_CHARS = 8, 2000  # rows per step, characters per text


class Sink(ABC):
    """A destination for the metrics of one run, one step at a time."""

    @abstractmethod
    def open(self, step: int, *, resumed: bool) -> None:
        """Start logging; the first `write` will be for `step`. Works again after `close`."""

    @abstractmethod
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one point to each curve."""

    def rollouts(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Accept the responses of the next step to be written, as lines of a rollout file."""
        return

    @abstractmethod
    def close(self) -> None:
        """Write or upload the remaining data. Safe to call twice."""


class TensorBoardSink(Sink):
    """Writes event files to `tensorboard/`, without torch."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        # `tensorboard.compat` is not documented (tried with tensorboard 2.21); the documented
        # writer is part of torch, which takes seconds to import.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        self._make_writer = EventFileWriter
        self._folder = run_dir / "tensorboard"
        self._writer: Any = None

    def open(self, step: int, *, resumed: bool) -> None:
        """Start an event file; TensorBoard drops points of earlier files from `step` on."""
        self._writer = self._make_writer(str(self._folder))
        # A START event makes TensorBoard purge later points of earlier sessions.
        log = self._events.SessionLog
        self._write_event(step, session_log=log(status=log.START))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        summary = self._summaries.Summary
        values = [summary.Value(tag=name, simple_value=x) for name, x in metrics.items()]
        self._write_event(step, summary=summary(value=values))
        self._writer.flush()

    def _write_event(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(step=step, wall_time=time.time(), **content))

    def close(self) -> None:
        """Write the remaining events."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class RunSink(Sink):
    """A sink whose package has its own runs.

    The folder `<package>/` in the run folder has `run_id`, the run to resume, and `last_step`, so
    that steps which are repeated after a restart are not logged twice.
    """

    package: str
    advice: str  # what to do if it does not start

    def __init__(self, run_dir: Path, config: Config) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / self.package
        self._project = config.trainer.project_name
        self._name = config.trainer.experiment_name
        # Settings are uploaded, so secrets are masked first.
        self._config = plain(mask_secrets(config.model_dump(mode="json")))
        self._run: Any = None
        self._last_step = -1

    def open(self, step: int, *, resumed: bool) -> None:
        """Start a run, or resume the one that this run folder belongs to.

        Raises UserError with advice if the package fails to start.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        run_id, self._last_step = "", -1
        if resumed and (self._folder / "run_id").exists():
            run_id = (self._folder / "run_id").read_text()
            self._last_step = int((self._folder / "last_step").read_text())
        try:
            self._run, name = self._await(lambda: self._start(run_id))
        except Interrupted:
            raise
        except Exception as error:  # each package has its own errors
            raise UserError(
                f"{self.package} did not start ({redact(first_line(error))}). {self.advice}, "
                f"or leave {self.package} out of --logger."
            ) from error
        self._write_state("last_step", str(self._last_step))
        self._write_state("run_id", name)

    def _await(self, work: Callable[[], T]) -> T:
        """Return the result of a call of the package, whose server may not answer."""
        # From now on: a signal of long ago must not cut off a healthy server.
        return await_result(run_in_thread(work), self.package, ANSWER_S, progress=Progress())

    def _write_state(self, name: str, text: str) -> None:
        """Write a file of the sink's folder in one piece."""
        with atomic_replace(self._folder / name) as fresh:
            fresh.write_text(text)

    @abstractmethod
    def _start(self, run_id: str) -> tuple[Any, str]:
        """Start a run, or resume the run `run_id`; returns the run and its id."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step, unless an earlier session already did."""
        if step > self._last_step:
            self._await(lambda: self._log(step, metrics))
            self._last_step = step
            self._write_state("last_step", str(step))

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step; W&B, trackio and SwanLab have the same call."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload the remaining data."""
        run, self._run = self._run, None
        if run is not None:
            self._await(run.finish)


class WandbSink(RunSink):
    """A Weights & Biases run; `WANDB_MODE=offline` keeps it on this machine."""

    package = "wandb"
    advice = "Log in with `wandb login`, or set WANDB_MODE=offline"

    def __init__(self, run_dir: Path, config: Config) -> None:
        import wandb

        super().__init__(run_dir, config)
        self._wandb = wandb
        self._rows: list[list[Any]] = []

    def _start(self, run_id: str) -> tuple[Any, str]:
        name = run_id or uuid.uuid4().hex[:12]
        run = self._wandb.init(
            dir=str(self._run_dir), id=name, resume="allow", project=self._project,
            name=self._name, config=self._config,
        )  # fmt: skip
        return run, name

    def rollouts(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Choose a few responses, evenly over the batch, for the table of the step."""
        chosen = lines[:: -(-len(lines) // TABLE_ROWS) or 1]
        rows = [[line.get(name) for name in TABLE] for line in plain(list(chosen))]
        self._rows = [[v[:TABLE_CHARS] if isinstance(v, str) else v for v in row] for row in rows]

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        # Each step has its own table.
        rows, self._rows = self._rows, []
        table = self._wandb.Table(columns=list(TABLE), data=rows) if rows else None
        self._run.log(dict(metrics) | ({"rollouts": table} if rows else {}), step=step)


class TrackioSink(RunSink):
    """A trackio run in TRACKIO_DIR on this machine; view it with `trackio show`."""

    package = "trackio"
    advice = "Check TRACKIO_DIR"

    def _start(self, run_id: str) -> tuple[Any, str]:
        """Start a trackio run, or resume the run named `run_id`; return the run and its name."""
        import trackio

        # trackio identifies a run only by its name, so new runs get a random suffix.
        name = run_id or f"{self._name}-{uuid.uuid4().hex[:6]}"
        run = trackio.init(
            project=self._project, name=name, config=self._config, resume="allow", embed=False,
            auto_log_cpu=False,
        )  # fmt: skip
        return run, name


class SwanlabSink(RunSink):
    """A SwanLab experiment; `SWANLAB_MODE=offline` keeps it on this machine."""

    package = "swanlab"
    advice = "Log in with `swanlab login`, or set SWANLAB_MODE=offline"

    def _start(self, run_id: str) -> tuple[Any, str]:
        """Start a SwanLab experiment, or resume `run_id`; return the experiment and its id."""
        import swanlab

        name = run_id or uuid.uuid4().hex[:12]
        run = swanlab.init(
            project=self._project, name=self._name, config=self._config, id=name, resume="allow",
            log_dir=str(self._folder),
        )  # fmt: skip
        return run, name


class MlflowSink(RunSink):
    """An MLflow run at MLFLOW_TRACKING_URI; without one, in `mlflow/` of the run folder."""

    package = "mlflow"
    advice = "Check MLFLOW_TRACKING_URI"
    _PARAMS_PER_CALL = 100  # the maximum of MLflow's log_batch

    def _start(self, run_id: str) -> tuple[Any, str]:
        """Start an MLflow run with the settings as parameters, or resume `run_id`.

        Returns the client and the run's id.
        """
        from mlflow import MlflowClient
        from mlflow.entities import Param

        default_uri = f"sqlite:///{self._folder.resolve() / 'mlflow.db'}"
        client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or default_uri)
        self._id = run_id
        # Resume: a run that was stopped or killed becomes active again.
        if run_id:
            client.update_run(run_id, status="RUNNING")
            return client, run_id
        existing = client.get_experiment_by_name(self._project)
        experiment = existing.experiment_id if existing else client.create_experiment(self._project)
        self._id = client.create_run(experiment, run_name=self._name).info.run_id
        # Settings are parameters; servers limit their length.
        settings = list(_flatten_settings("", self._config))
        for start in range(0, len(settings), self._PARAMS_PER_CALL):
            part = settings[start : start + self._PARAMS_PER_CALL]
            client.log_batch(self._id, params=[Param(key, str(value)[:500]) for key, value in part])
        return client, self._id

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step, with names that MLflow allows."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # MLflow allows only these characters in names of metrics.
        points = [
            Metric(re.sub(r"[^\w\-. :/]", "_", name), value, now, step)
            for name, value in metrics.items()
        ]
        self._run.log_batch(self._id, metrics=points)

    def close(self) -> None:
        """Mark the run as finished."""
        client, self._run = self._run, None
        if client is not None:
            self._await(lambda: client.set_terminated(self._id))


def _flatten_settings(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield nested settings as (dotted key, value) pairs."""
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, inner in value.items():
        yield from _flatten_settings(f"{key}.{name}" if key else name, inner)


# Name in --logger, which is also the package's -> class.
SINKS: dict[str, Callable[[Path, Config], Sink]] = {
    "tensorboard": TensorBoardSink, "wandb": WandbSink, "trackio": TrackioSink,
    "mlflow": MlflowSink, "swanlab": SwanlabSink,
}  # fmt: skip
