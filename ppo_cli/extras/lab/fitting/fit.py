"""`ppo reward fit`: fit a reward model to preference pairs or to labels of responses.

Of a fit to pairs the best model by held-out accuracy is kept. One to labels keeps the last, so that
its held-out figures chose nothing. The folder of a fitted model is written atomically.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ppo_cli.atomic import atomic_replace, check_out_folder, replace_model
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle
from ppo_cli.digests import require_intact_model
from ppo_cli.engine.base import Sampling, build_sampler
from ppo_cli.engine.cpu.products import set_matmul_library
from ppo_cli.engine.device import Compute, require_gpus
from ppo_cli.engine.export import write_weights
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.saved_files import model_files, write_files
from ppo_cli.errors import ConfigError, DataError, Interrupted, ModelError, plural, replace_path
from ppo_cli.extras.lab.fitting.preferences import (
    EncodedExample,
    Example,
    Labels,
    PairSet,
    Split,
    encode_pairs,
    exclude_held_out,
    load_pairs,
    split_by_prompt,
    unlimited_format,
)
from ppo_cli.extras.lab.fitting.training import (
    Figures,
    FitSettings,
    GradeObjective,
    ScoreNetwork,
    Trainer,
    choose_lr,
    count_steps,
    iterate_batches,
    load_to_fit,
    score_examples,
)
from ppo_cli.machine.machine import Machine
from ppo_cli.paths import user_path
from ppo_cli.records import Prompt
from ppo_cli.report.tracker import Screen
from ppo_cli.rewards.models.heads import CRITERIA_FILE
from ppo_cli.run_folder.lines import to_json
from ppo_cli.signals import StopOnSignal

RECORD_FILE = "fit.json"


class ModelFolder:
    """The folder of the best model so far; ConfigError at once if it must not be written."""

    def __init__(self, out: Path, *, overwrite: bool = False) -> None:
        self.path = user_path(out)
        check_out_folder(self.path)
        self._place = self.path.resolve()
        # A fit replaces the whole folder, so refuse one with files that it did not write.
        if self._place.is_dir() and any(self._place.iterdir()):
            if not (self._place / RECORD_FILE).exists():
                raise ConfigError(
                    f"--out {self.path} has files that no fit wrote, and a fit replaces the "
                    "whole folder. Name another folder."
                )
            if not overwrite:
                raise ConfigError(
                    f"--out {self.path} already has a fitted model. Name another folder, or "
                    "replace the model with --overwrite."
                )

    def write(self, save: Callable[[Path], object], record: Mapping[str, Any]) -> None:
        """Replace the folder by what `save` writes, plus the record."""
        with replace_model(self.path) as fresh:
            save(fresh)
            self.finish(record, fresh)

    def finish(self, record: Mapping[str, Any], folder: Path | None = None) -> None:
        """Replace the record of the saved model."""
        text = to_json(record, indent=2) + "\n"
        with atomic_replace((folder or self._place) / RECORD_FILE) as fresh:
            fresh.write_text(text, encoding="utf-8")


STEP_LINES = 20  # log lines about steps in a fit
MEASUREMENTS = 4  # on the held-out pairs, after the one at the start


def fit(settings: FitSettings, screen: Screen) -> dict[str, Any]:
    """Fit and save a model; returns the record in its folder. Interrupted after a signal."""
    machine = Machine.here()
    require_gpus(machine, len(machine.gpus[:1]))
    # Check the folder and the data before the model is loaded.
    folder = ModelFolder(settings.out, overwrite=settings.overwrite)
    labels = Labels.of(settings.labels, settings.criteria) if settings.labels else None
    split, dropped = read_split(settings, screen, labels)
    if labels:
        require_two_labels(labels, settings, split.train, split.held_out)
    recipe = settings.recipe
    # Incomplete weights are found now, before anything is loaded.
    require_intact_model(
        user_path(model_folder(settings.model)),
        lambda other: replace_path(settings.model, str(other)),
    )
    set_matmul_library(machine.matmul)
    usual = "bfloat16" if machine.gpus and machine.has_bfloat16(1) else "float32"
    # Load the model, ready for training.
    network = load_to_fit(
        model_folder(settings.model),
        compute=Compute.choose(recipe.dtype or usual),
        seed=recipe.seed,
        frozen=recipe.freeze_body,
        template=settings.template,
        max_length=settings.max_length,
        objective=GradeObjective(labels.rubric) if labels else None,
    )
    # Encode both sides in the format that will score with the model later.
    form = unlimited_format(network.tokenizer, settings.model)
    sides: list[list[EncodedExample]] = []
    with screen.phase("encode", len(split.train) + len(split.held_out)) as advance:
        for what, pairs in (("training", split.train), ("held-out", split.held_out)):
            encoded, notes, left_out = encode_pairs(
                form, pairs, what, network.max_length,
                skip_bad_rows=settings.skip_bad_rows, advance=advance,
            )  # fmt: skip
            screen.note_all(notes)
            dropped.update(left_out)
            sides.append(encoded)
    if labels:  # some rows may have been too long
        require_two_labels(labels, settings, *sides)
    record = Fit(settings, network, sides[0], sides[1], +dropped, folder, screen).run()
    if labels is None:
        return record
    # What a judge costs beside its policy is known once the policy has written something.
    rows = split.held_out[:POLICY_ROWS]
    record["seconds"]["policy"] = time_policy(settings, network.tokenizer, rows)
    folder.finish(record)
    return record


POLICY_ROWS = 16  # responses that are written to time the policy


def time_policy(settings: FitSettings, tokenizer: Any, rows: Sequence[Example]) -> float:
    """Return the seconds in which --model writes a response as long as those of the rows."""
    dtype = {"dtype": settings.recipe.dtype} if settings.recipe.dtype else {}
    requested = Config.model_validate({"model": {"path": settings.model, **dtype}})
    config = settle(requested).config
    prompts = []
    for number, row in enumerate(rows):
        ids = tokenizer.apply_chat_template(
            list(row.messages), add_generation_prompt=True, return_dict=False
        )
        prompts.append(Prompt(str(number), "", row.messages, "", tuple(ids)))
    tokens = sum(len(tokenizer(row.texts[0]).input_ids) for row in rows) / len(rows)
    sampler = build_sampler(config, load_tokenizer(model_folder(settings.model)))
    try:
        sampling, began = Sampling(max_tokens=max(1, round(tokens))), time.perf_counter()
        written = sum(len(rollout.token_ids) for rollout in sampler.generate(prompts, sampling, 0))
        return (time.perf_counter() - began) * tokens / written
    finally:
        sampler.close()


def read_split(
    settings: FitSettings, screen: Screen, labels: Labels | None = None
) -> tuple[Split, Counter[str]]:
    """Read and split pairs or rows; also return how many were dropped, by reason."""
    word = "rows" if labels else "pairs"

    def load(flag: str, files: Sequence[str]) -> PairSet:
        loaded = load_pairs(files, skip_bad_rows=settings.skip_bad_rows, labels=labels)
        if not loaded.pairs:
            why = [*loaded.notes, *([labels.shape] if labels else [])]
            raise DataError(" ".join([f"{flag} {', '.join(files)} has no usable {word}.", *why]))
        screen.note_all(loaded.notes)
        return loaded

    loaded = load("--data", settings.data)
    dropped = Counter(loaded.dropped)
    # Without held-out data, hold out a share of the prompts.
    if not settings.val_data:
        return split_by_prompt(loaded.pairs, settings.val_share, settings.recipe.seed), dropped
    # A prompt in both files would make the held-out accuracy too good.
    split = exclude_held_out(loaded.pairs, load("--val_data", settings.val_data).pairs)
    if shared := len(loaded.pairs) - len(split.train):
        screen.note(f"{plural(shared, word[:-1])} left out: the prompt is in --val_data too.")
        dropped["in_val_data"] = shared
    return split, dropped


def require_two_labels(
    labels: Labels,
    settings: FitSettings,
    train: Sequence[Example | EncodedExample],
    held_out: Sequence[Example | EncodedExample],
) -> None:
    """Raise DataError if equal labels leave nothing to learn, or nothing to measure."""
    grades = [row.targets for row in (*train, *held_out)]
    # A held-out row that lacks the label of a criterion has no score to compare.
    complete = [row.targets for row in held_out if not any(map(math.isnan, row.targets))]
    measured = [(labels.rubric.value(row),) for row in complete]
    add, files = "Add rows with another label", ", ".join((*settings.data, *settings.val_data))
    for rows, side, advice in (
        (grades, "row", add),
        (grades[: len(train)], "training row", f"{add}: all that there are were held out"),
        (measured, "held-out row", f"{add}, or hold out others with --val_share or --val_data"),
    ):
        if len(set(rows)) < 2:
            problem = "no held-out row has all labels"
            if rows:
                label = "/".join("null" if math.isnan(g) else f"{g:g}" for g in rows[0])
                problem = f"{plural(len(rows), side)} with only the label {label}"
            raise DataError(
                f"{files}: {problem} in column '{labels.column}': there is nothing to "
                f"{'measure' if rows is measured else 'learn'}. {advice}."
            )


class Fit:
    """A running fit: trains, measures, saves the best, handles signals."""

    def __init__(
        self,
        settings: FitSettings,
        network: ScoreNetwork,
        train: Sequence[EncodedExample],
        held_out: Sequence[EncodedExample],
        dropped: Mapping[str, int],
        folder: ModelFolder,
        screen: Screen,
    ) -> None:
        self._network = network
        self._settings, self._folder, self._screen = settings, folder, screen
        self._train, self._held_out, self._dropped = train, held_out, dropped
        # Read at once, so that the saved model has the files of the one that was loaded.
        self._files = model_files(network.module, network.tokenizer)
        self._lr = choose_lr(settings.recipe, self._network.size())
        self._total = count_steps(len(train), settings.recipe)
        self._trainer = Trainer(self._network, settings.recipe, self._lr, self._total)
        self._step = self._best_step = 0
        self._before: Figures | None = None
        self._best: Figures | None = None
        self._history: list[dict[str, float]] = []
        self._word = "row" if settings.labels else "pair"
        self._agreement: dict[str, Any] = {}  # with held-out labels
        self._seconds = 0.0  # to score a held-out response

    def run(self) -> dict[str, Any]:
        """Run all steps, or stop after a signal; the best model is saved in the folder."""
        # Announce what is trained, on how much, and at which rate.
        recipe = self._settings.recipe
        self._screen.note_all(self._network.notes)
        size = self._network.size()
        chosen = "" if recipe.lr else " (unset: chosen by what is trained)"
        what = "the head alone" if recipe.freeze_body else f"{size:,} weights"
        self._screen.note(
            f"{plural(len(self._train), self._word)} to train on, {len(self._held_out)} held out; "
            f"{plural(self._total, 'step')} of {recipe.batch_size}, {what}, "
            f"lr {self._lr:g}{chosen}."
        )
        with StopOnSignal(self._screen.note) as stop:
            # The model before the fit is the base of comparison; scores that are not finite end it
            # here.
            self._before = self._measure()
            if not math.isfinite(self._before.loss):
                raise ModelError(
                    f"{self._settings.model} gives scores that are not finite: its weights may be "
                    "damaged, or --dtype is too small for it."
                )
            self._screen.note(self._figures_line(self._before))
            self._train_steps(stop.reason)
        # A stop before the first measurement has nothing to save.
        reason = stop.reason()
        if reason and self._best is None:
            raise Interrupted(
                f"{self._stop_text(reason)} Nothing was saved; run the same command again."
            )
        record = self._build_record(finished=not reason)
        self._folder.finish(record)
        # The saved model is the best so far; its record tells whether the fit was finished.
        if reason and self._best:
            raise Interrupted(
                f"{self._stop_text(reason)} {self._folder.path} holds the "
                f"{'last' if self._settings.labels else 'best'} model so far (step "
                f"{self._best_step}, held-out accuracy {self._best.accuracy:.3f}), complete and "
                "ready for --reward_model. A fit cannot continue from it: run the same "
                "command with --overwrite."
            )
        return record

    def _stop_text(self, reason: str) -> str:
        return f"{reason}: stopped after {self._step} of {self._total} steps."

    def _train_steps(self, stopped: Callable[[], str | None]) -> None:
        """Run the steps of the fit, with measurements in between, until the end or a stop."""
        recipe, total = self._settings.recipe, self._total
        # Spread the log lines and the measurements evenly over the steps.
        every = max(1, total // STEP_LINES)
        marks = {round(total * (i + 1) / MEASUREMENTS) for i in range(MEASUREMENTS)} | {total}
        with self._screen.phase("fit", total) as advance:
            for number, pairs in enumerate(iterate_batches(self._train, recipe, total)):
                if stopped():
                    break
                done = self._trainer.step(number, pairs)
                self._step = number + 1
                advance(1)
                if not done.updated:
                    self._screen.health(f"step {self._step}: not finite, skipped.")
                if self._step % every == 0:
                    figures = done.figures
                    self._screen.note(
                        f"step {self._step}/{total}  loss {done.loss:.4f}  "
                        f"accuracy {figures.accuracy:.3f}  margin {figures.margin:+.3f}  "
                        f"grad_norm {done.grad_norm:.3g}"
                    )
                if self._step in marks:
                    self._measure_and_save()
        # A stop between two measurements: measure the last weights too.
        if self._step and self._step not in marks:
            self._measure_and_save()

    def _measure_and_save(self) -> None:
        """Measure on the held-out pairs, and save the model if it is the best so far."""
        figures = self._measure()
        self._history.append({"step": self._step, **asdict(figures)})
        # Scores that are not finite never replace a model, and labels choose none.
        chosen = bool(self._settings.labels) or figures.better_than(self._best)
        better = math.isfinite(figures.loss) and chosen
        self._screen.note(self._figures_line(figures) + ("; kept" if better else ""))
        if better:
            self._best, self._best_step = figures, self._step
            record = self._build_record(finished=False)
            self._folder.write(self._save, record)

    def _save(self, folder: Path) -> None:
        write_files(folder, self._files)
        write_weights(self._network.module, folder)
        objective = self._network.objective
        if isinstance(objective, GradeObjective):
            criteria = json.dumps({"criteria": objective.rubric.as_rows()}, indent=2)
            (folder / CRITERIA_FILE).write_text(criteria, encoding="utf-8")

    def _measure(self) -> Figures:
        samples = len(self._held_out) * len(self._held_out[0].samples)
        with self._screen.phase("held out", samples) as advance:
            tokens, began = self._settings.recipe.batch_tokens, time.perf_counter()
            scores_SPO = score_examples(self._network, self._held_out, tokens, advance)
        self._seconds = (time.perf_counter() - began) / samples
        objective = self._network.objective
        if isinstance(objective, GradeObjective):
            agreement = objective.agreement(scores_SPO, self._held_out)
            why = {"why": "all held-out labels are equal"}  # shown where there is no value
            self._agreement = {name: asdict(figure) | why for name, figure in agreement.items()}
        return objective.figures(scores_SPO, self._held_out)

    def _figures_line(self, figures: Figures) -> str:
        return (
            f"held out after step {self._step}/{self._total}: loss {figures.loss:.4f}  "
            f"accuracy {figures.accuracy:.3f}  margin {figures.margin:+.3f}"
        )

    def _build_record(self, *, finished: bool) -> dict[str, Any]:
        """Return the record of the fit, which is written as fit.json."""
        assert self._best is not None and self._before is not None
        labelled: dict[str, Any] = {
            "labels": self._settings.labels, "criteria": self._settings.criteria,
            "agreement": self._agreement, "seconds": {"score": self._seconds},
        }  # fmt: skip
        return (labelled if self._settings.labels else {}) | {
            "model": self._settings.model,
            "out": str(self._folder.path),
            "finished": finished,
            "data": list(self._settings.data),
            "val_data": list(self._settings.val_data),
            f"{self._word}s": {"train": len(self._train), "held_out": len(self._held_out)},
            "dropped": dict(self._dropped),
            "steps": {
                "done": self._step, "all": self._total, "skipped": self._trainer.skipped,
                "kept": self._best_step,
            },
            "before": asdict(self._before),
            "after": asdict(self._best),
            "scores": {"mean": self._best.mean, "std": self._best.std},
            "history": self._history,
            "recipe": asdict(self._settings.recipe) | {"lr": self._lr},
            "max_length": self._network.max_length,
            "torch": torch.__version__.split("+")[0],
        }  # fmt: skip
