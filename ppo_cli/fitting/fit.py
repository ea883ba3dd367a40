"""`ppo reward fit`: fits a reward model to pairs; keeps the best by held-out accuracy.

The folder of a fitted model is written whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ppo_cli.atomic import replacing
from ppo_cli.config.bundled import model_folder
from ppo_cli.engine.device import Compute
from ppo_cli.errors import ConfigError, DataError, Interrupted, ModelError, UserError
from ppo_cli.fitting.network import ScoreNetwork, load_to_fit
from ppo_cli.fitting.preferences import (
    EncodedPair,
    Pair,
    Split,
    count,
    encode_pairs,
    keep_apart,
    load_pairs,
    refuse_refused,
    split_by_prompt,
    tell_left_out,
    whole_format,
)
from ppo_cli.fitting.training import (
    Figures,
    FitSettings,
    Stepped,
    Trainer,
    batches,
    choose_lr,
    measure,
    steps_of,
)
from ppo_cli.report.tracker import Screen
from ppo_cli.rewards.local.base import LoadedModel
from ppo_cli.signals import StopOnSignal

RECORD_FILE = "fit.json"


class ModelFolder:
    """Where the best model so far lies; refuses at once a place that it must not take."""

    def __init__(self, out: Path, *, overwrite: bool = False) -> None:
        self.path = out.expanduser()
        self._place = self.path.resolve()
        self._check(overwrite)

    def _check(self, overwrite: bool) -> None:
        if self._place.exists() and not self._place.is_dir():
            raise ConfigError(f"--out {self.path} is a file; name a folder.")
        if self._place.is_dir() and any(self._place.iterdir()):
            if not (self._place / RECORD_FILE).exists():
                raise ConfigError(
                    f"--out {self.path} holds files that no fit wrote, and a fit replaces the "
                    "whole folder. Name another folder."
                )
            if not overwrite:
                raise ConfigError(
                    f"--out {self.path} holds a fitted model already. Name another folder, or "
                    "replace the model with --overwrite."
                )
        parent = next(p for p in self._place.parents if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise ConfigError(f"--out {self.path}: the folder {parent} cannot be written.")

    def write(self, model: Any, tokenizer: Any, record: Mapping[str, Any]) -> None:
        """Put model, tokenizer and record in the place of whatever the folder held."""
        try:
            self._place.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._place) as fresh:
                fresh.mkdir()
                model.save_pretrained(fresh)
                tokenizer.save_pretrained(fresh)
                _write_record(fresh, record)
        except OSError as error:
            raise UserError(
                f"The model could not be written to {self.path}: {error.strerror or error}. Free "
                "some space, or choose another --out."
            ) from error

    def finish(self, record: Mapping[str, Any]) -> None:
        """Replace the record of the model that lies there."""
        _write_record(self._place, record)


def _write_record(folder: Path, record: Mapping[str, Any]) -> None:
    with replacing(folder / RECORD_FILE) as fresh:
        fresh.write_text(json.dumps(record, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


LINES = 20  # lines about steps in a fit
MEASURED = 4  # times that the held-out pairs are scored, besides at the start


@dataclass(frozen=True)
class Material:
    """Encoded pairs of both sides, and what was dropped on the way."""

    train: tuple[EncodedPair, ...]
    held_out: tuple[EncodedPair, ...]
    dropped: dict[str, int]


@dataclass
class Course:
    """How the fit went so far."""

    total_steps: int
    before: Figures
    best: Figures | None = None
    best_step: int = 0
    last: Figures | None = None
    step: int = 0
    skipped: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


def fit(settings: FitSettings, screen: Screen) -> dict[str, Any]:
    """Fit and save; returns the record that lies beside the model. Interrupted: see there."""
    folder = ModelFolder(settings.out, overwrite=settings.overwrite)
    split, dropped = read_split(settings, screen)
    recipe = settings.recipe
    loaded = load_to_fit(
        model_folder(settings.model),
        compute=Compute.choose(recipe.dtype),
        seed=recipe.seed,
        frozen=recipe.freeze_body,
        template=settings.template,
        max_length=settings.max_length,
    )
    material = encode(loaded, settings, split, dropped, screen)
    return Fit(settings, loaded, material, folder, screen).run()


def read_split(settings: FitSettings, screen: Screen) -> tuple[Split, dict[str, int]]:
    """Read the pairs and set the held-out ones apart."""
    found = load_pairs(settings.data, skip_bad_rows=settings.skip_bad_rows)
    tell(screen, found.notes)
    if not found.pairs:
        raise DataError("No usable pair is left in --data.")
    if not settings.val_data:
        split = split_by_prompt(found.pairs, settings.val_share, settings.recipe.seed)
        return split, found.dropped
    held_out = load_pairs(settings.val_data, skip_bad_rows=settings.skip_bad_rows)
    tell(screen, held_out.notes)
    if not held_out.pairs:
        raise DataError("No usable pair is left in --val_data.")
    split = keep_apart(found.pairs, held_out.pairs)
    if shared := len(found.pairs) - len(split.train):
        screen.note(f"{count(shared, 'pair')} left out: the prompt is in --val_data too.")
        return split, found.dropped | {"in_val_data": shared}
    return split, found.dropped


def encode(
    loaded: LoadedModel,
    settings: FitSettings,
    split: Split,
    dropped: dict[str, int],
    screen: Screen,
) -> Material:
    """Encode both sides by the format that the fitted model will be scored with."""
    form = whole_format(loaded, settings.model)
    sides: list[tuple[EncodedPair, ...]] = []
    lost = {"too_long": 0, "refused": 0}
    named: list[tuple[str, Sequence[Pair]]] = [
        ("training", split.train), ("held-out", split.held_out)
    ]  # fmt: skip
    with screen.phase("encode", len(split.train) + len(split.held_out)) as advance:
        for what, pairs in named:
            found = encode_pairs(form, pairs, loaded.max_length, advance)
            if not settings.skip_bad_rows:
                refuse_refused(found)
            tell(screen, tell_left_out(found, what, loaded.max_length))
            lost["too_long"] += len(found.too_long)
            lost["refused"] += len(found.refused)
            sides.append(found.pairs)
    return Material(sides[0], sides[1], dropped | {k: n for k, n in lost.items() if n})


class Fit:
    """The run itself: steps, measures, keeps, stops."""

    def __init__(
        self,
        settings: FitSettings,
        loaded: LoadedModel,
        material: Material,
        folder: ModelFolder,
        screen: Screen,
    ) -> None:
        assert isinstance(loaded.network, ScoreNetwork)
        self._network = loaded.network
        self._settings = settings
        self._loaded = loaded
        self._material = material
        self._folder = folder
        self._screen = screen
        self._lr = choose_lr(settings.recipe, self._network.size())
        total = steps_of(len(material.train), settings.recipe)
        self._trainer = Trainer(self._network, settings.recipe, self._lr, total)
        self._total_steps = total

    def run(self) -> dict[str, Any]:
        """Do all steps, or as many as a signal allows; the best model lies in the folder."""
        self._tell_start()
        with StopOnSignal(self._screen.note) as stop:
            course = Course(self._total_steps, self._measure())
            if not math.isfinite(course.before.loss):
                raise ModelError(
                    f"{self._settings.model} gives scores that are not finite: its weights are "
                    "damaged, or --dtype is too small for it."
                )
            self._screen.note(told_figures(0, course.total_steps, course.before))
            self._steps(course, stop.reason)
        if reason := stop.reason():
            self._interrupt(course, reason)
        record = self._record(course, finished=True)
        self._folder.finish(record)
        return record

    def _steps(self, course: Course, stopped: Callable[[], str | None]) -> None:
        recipe, total = self._settings.recipe, course.total_steps
        every = max(1, total // LINES)
        marks = {round(total * (i + 1) / MEASURED) for i in range(MEASURED)} | {total}
        with self._screen.phase("fit", total) as advance:
            for number, pairs in enumerate(batches(self._material.train, recipe, total)):
                if stopped():
                    break
                done = self._trainer.step(number, pairs)
                course.step, course.skipped = number + 1, self._trainer.skipped
                advance(1)
                if not done.updated:
                    self._screen.health(f"step {course.step}: not finite, skipped.")
                if course.step % every == 0:
                    self._screen.note(told_step(course.step, total, done))
                if course.step in marks:
                    self._keep(course)
        if course.step and course.step not in marks:
            self._keep(course)

    def _keep(self, course: Course) -> None:
        """Measure on the held-out pairs, and save when it is the best so far."""
        course.last = figures = self._measure()
        course.history.append({"step": course.step, **figures.as_dict()})
        better = math.isfinite(figures.loss) and figures.better_than(course.best)
        kept = "; kept" if better else ""
        self._screen.note(told_figures(course.step, course.total_steps, figures) + kept)
        if better:
            course.best, course.best_step = figures, course.step
            record = self._record(course, finished=False)
            self._folder.write(self._network.module, self._loaded.tokenizer, record)

    def _measure(self) -> Figures:
        pairs = self._material.held_out
        with self._screen.phase("held out", 2 * len(pairs)) as advance:
            return measure(self._network, pairs, self._settings.recipe.batch_tokens, advance)

    def _tell_start(self) -> None:
        size = self._network.size()
        tell(self._screen, self._network.notes)
        chosen = "" if self._settings.recipe.lr else " (unset: chosen by what is trained)"
        what = "the head alone" if self._settings.recipe.freeze_body else f"{size:,} weights"
        self._screen.note(
            f"{count(len(self._material.train), 'pair')} to train on, "
            f"{len(self._material.held_out)} held out; {count(self._total_steps, 'step')} of "
            f"{self._settings.recipe.batch_size}, {what}, lr {self._lr:g}{chosen}."
        )

    def _interrupt(self, course: Course, reason: str) -> None:
        done = f"{reason}: stopped after {course.step} of {course.total_steps} steps."
        if course.best is None:
            raise Interrupted(f"{done} Nothing was saved; run the same command again.")
        self._folder.finish(self._record(course, finished=False))
        raise Interrupted(
            f"{done} {self._folder.path} holds the best model so far (step {course.best_step}, "
            f"held-out accuracy {course.best.accuracy:.3f}), whole and ready for --reward_model. "
            "A fit does not go on from there: for all of it run the same command with --overwrite."
        )

    def _record(self, course: Course, *, finished: bool) -> dict[str, Any]:
        best = course.best
        assert best is not None
        recipe = self._settings.recipe.model_dump() | {"lr": self._lr}
        return {
            "model": self._settings.model,
            "out": str(self._folder.path),
            "finished": finished,
            "data": list(self._settings.data),
            "val_data": list(self._settings.val_data),
            "pairs": {
                "train": len(self._material.train), "held_out": len(self._material.held_out)
            },
            "dropped": self._material.dropped,
            "steps": {
                "done": course.step, "all": course.total_steps, "skipped": course.skipped,
                "kept": course.best_step,
            },
            "before": course.before.as_dict(),
            "after": best.as_dict(),
            "scores": {"mean": best.mean, "std": best.std},
            "history": course.history,
            "recipe": recipe,
            "max_length": self._loaded.max_length,
            "torch": torch.__version__.split("+")[0],
        }  # fmt: skip


def tell(screen: Screen, notes: Sequence[str]) -> None:
    """Show remarks."""
    for note in notes:
        screen.note(note)


def told_step(step: int, total: int, done: Stepped) -> str:
    """Return the line of a step."""
    figures = done.figures
    return (
        f"step {step}/{total}  loss {done.loss:.4f}  accuracy {figures.accuracy:.3f}  "
        f"margin {figures.margin:+.3f}  grad_norm {done.grad_norm:.3g}"
    )


def told_figures(step: int, total: int, figures: Figures) -> str:
    """Return the line of a measurement on the held-out pairs."""
    return (
        f"held out after step {step}/{total}: loss {figures.loss:.4f}  "
        f"accuracy {figures.accuracy:.3f}  margin {figures.margin:+.3f}"
    )
