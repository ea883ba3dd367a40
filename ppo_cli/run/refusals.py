"""What would stop a run and can be found without loading a model: for `ppo plan` and the library.

Nothing here imports torch, unless a chat template has to be tried.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from typing import Any

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.folder import (
    check_folder,
    has_placeholders,
    template_raises,
    vocabulary_size,
)
from ppo_cli.config.schema.finding import Finding
from ppo_cli.config.schema.run import Config, Trainer
from ppo_cli.data_sets.files import EAGER_ROWS, count_rows
from ppo_cli.data_sets.row_sets import RowSet, load_sets
from ppo_cli.data_sets.rows import RowPrompt, list_names, prompt_of
from ppo_cli.data_sets.sources import check_present, is_hub_name
from ppo_cli.digests import require_resumable
from ppo_cli.errors import UserError, collect_problems
from ppo_cli.paths import user_path
from ppo_cli.planning.batches import (
    DataSplit,
    count_steps,
    describe_missing_rows,
    split_files,
    train_rows,
)
from ppo_cli.planning.findings.models import damaged_models
from ppo_cli.planning.findings.rules import list_texts
from ppo_cli.planning.resolved import Resolved
from ppo_cli.planning.run_plan import RunPlan
from ppo_cli.records import Prompt, mark_validation
from ppo_cli.run_folder.checkpoints import CheckpointStore, find_resume, read_state, step_of
from ppo_cli.run_folder.lines import METRICS_FILE
from ppo_cli.run_folder.restraints import read_restraints
from ppo_cli.scoring.sources import file_checks, row_checks, sandbox_checks
from ppo_cli.secrets.redact import redact

# Rows that a plan reads, so that it takes less than a second for any number of rows.
MAX_PLAN_ROWS = 4_000
FRAME_TOKENS = 256  # more than chat templates put around the contents of a prompt
SPLITS: tuple[DataSplit, ...] = ("train", "val")


class FirstRows:
    """The first MAX_PLAN_ROWS rows of each split's local files, read once for a plan."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.count = cache(self._count)
        # DataError for bad rows, or for none; sets of the hub are skipped.
        self.read = cache(self._read)
        self.prompts = cache(self._build_prompts)
        self.render = cache(self._render)

    def _count(self, split: DataSplit) -> int:
        """Return the number of all rows of a split that a run uses, but those of the hub."""
        files, max_samples = split_files(self.config.data, split)
        count = sum(count_rows(name) or 0 for name in files)
        return count if max_samples < 0 else min(count, max_samples)

    def _read(self, split: DataSplit) -> list[RowSet]:
        files, max_samples = split_files(self.config.data, split)
        return load_sets(
            [name for name in files if not is_hub_name(name)],
            **self.config.data.keys,
            max_samples=max_samples,
            at_most=MAX_PLAN_ROWS,
        )

    def _build_prompts(self, split: DataSplit) -> list[Prompt]:
        """Return the prompts of a split, not yet rendered."""
        prompts = [prompt_of(rows.label, row) for rows in self.read(split) for row in rows.rows]
        return prompts if split == "train" else mark_validation(prompts)

    def _render(self, split: DataSplit) -> tuple[list[str], list[str]]:
        """Return the problems of rendering a split with a local model's tokenizer, and notes."""
        config, data = self.config, self.config.data
        folder = user_path(model_folder(config.model.path or ""))
        # Tokenizers of models on the hub are not downloaded for a plan.
        if not folder.is_dir():
            return [], []
        raises = template_raises(folder) if data.apply_chat_template else None
        prompts = [row.prompt for rows in self.read(split) for row in rows.rows]
        plain = data.system_prompt is None and all(isinstance(text, str) for text in prompts)
        # The tokenizer takes seconds to load: only for templates that may refuse rows, and for
        # large sets with prompts that may be too long.
        refuses = raises or has_placeholders(folder) or (raises is None and not plain)
        room = data.max_prompt_length - FRAME_TOKENS - len((data.system_prompt or "").encode())
        large = self.count(split) > EAGER_ROWS
        if not refuses and not (large and any(count_bytes(text) > room for text in prompts)):
            return [], []
        from ppo_cli.engine.pretrained import load_tokenizer

        tokenizer = load_tokenizer(str(folder), trust_remote_code=config.model.trust_remote_code)
        notes: list[str] = []
        problems = collect_problems([lambda: notes.extend(self._measure(split, tokenizer))])
        return list(problems), notes

    def _measure(self, split: DataSplit, tokenizer: Any) -> list[str]:
        """Return a note on prompts that are too long; DataError if any row is refused."""
        from ppo_cli.data_sets.prompts import limit_lengths, render_prompts
        from ppo_cli.run.assemble import prompt_settings

        sets, data = self.read(split), self.config.data
        how = prompt_settings(data) | {"vocabulary_size": vocabulary_size(self.config.model.path)}
        read, total = sum(len(rows.rows) for rows in sets), self.count(split)
        if read >= total:
            render_prompts(sets, tokenizer, **how)
            return []
        # Prompts of any length, as only the first ones are known.
        whole = how | {"max_prompt_length": sys.maxsize}
        prompts = render_prompts(sets, tokenizer, **whole).prompts
        limit = data.max_prompt_length
        lengths = [len(prompt.token_ids) for prompt in prompts]
        long = [index for index, length in enumerate(lengths) if length > limit]
        if not long:
            return []
        about = f"about {round(len(long) / read * total):,} of {total:,}"
        if not data.filter_overlong_prompts and data.truncation == "error":
            places = [row.place for rows in sets for row in rows.rows]
            limit_lengths(
                places[long[0]], [lengths[index] for index in long], read, limit=limit,
                truncation="error", filter_overlong=False,
                among=f" among the first {read:,}, {about} as estimated",
            )  # fmt: skip
        what = "dropped" if data.filter_overlong_prompts else f"cut to {limit} tokens"
        return [
            f"{about.capitalize()} prompts are longer than {limit} tokens and will be {what}, as "
            f"estimated from the first {read:,}."
        ]

    def notes(self) -> list[str]:
        """Return notes about the rows of both splits; bad rows are refused elsewhere."""
        notes: dict[str, None] = {}
        for split in SPLITS:
            with suppress(UserError):  # there may be no validation files
                notes |= dict.fromkeys(note for rows in self.read(split) for note in rows.notes)
                notes |= dict.fromkeys(self.render(split)[1])
        return list(notes)


def count_bytes(prompt: RowPrompt) -> int:
    """Return the bytes of the contents of a prompt."""
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    return sum(len(text.encode()) for text in texts)


def checkpoints_of(trainer: Trainer) -> CheckpointStore:
    """Return the checkpoints of the run that the settings name; it writes none."""
    return CheckpointStore(user_path(trainer.output_dir) / "checkpoints", None)


def find_all_refusals(
    resolved: Resolved, findings: Iterable[Finding], rows: FirstRows, *, scored: bool = True
) -> list[str]:
    """Return why a run would be refused: settings and files, the environment, then the rows.

    A run that is not `scored` by its reward may lack what that needs of rows.
    """
    config, problems = resolved.config, find_refusals(resolved, findings)
    if config.environment.is_set:
        from ppo_cli.run.episodes import check_episodes

        problems += collect_problems([partial(check_episodes, config)])
    return list(dict.fromkeys([*problems, *_find_row_refusals(rows, scored=scored)]))


def find_refusals(resolved: Resolved, findings: Iterable[Finding]) -> list[str]:
    """Return why settings and files would be refused.

    Missing GPUs and keys are left out: a plan may be made on another machine, and notes them.
    """
    config = resolved.config
    if config.trainer.node_rank:  # node 0 has the files, and compares the settings of all nodes
        return []
    problems = list_texts(findings, "refuse", "missing")
    problems += collect_problems(_list_file_checks(config))
    problems += damaged_models(config.training_models, config.reward)
    return [redact(line) for line in dict.fromkeys(problems)]


def plan_resume(plan: RunPlan, command: str) -> tuple[list[str], list[str]]:
    """Return what `train`, started by `command`, does with the run folder: notes, and problems.

    The rows of the data are not compared with those of the checkpoint.
    """
    config = plan.settings
    if config.trainer.node_rank:  # other nodes follow node 0
        return [], []
    mode, folder = config.trainer.resume_mode, user_path(config.trainer.output_dir)
    notes: list[str] = []
    store_problems: list[str] = []
    if url := config.trainer.store:
        from ppo_cli.run_folder.store import try_store

        notes, store_problems = try_store(url.rstrip("/"))

    def check() -> None:
        checkpoint = find_resume(checkpoints_of(config.trainer), mode)
        if checkpoint is None and not (mode == "auto" and read_restraints(folder)):
            if mode == "never" and (folder / METRICS_FILE).exists():
                notes.append(f"A new run; the earlier one is moved to a folder in {folder}.")
            return
        # They import numpy, which a plan of a new run does without.
        from ppo_cli.report.metrics import find_lr_jumps
        from ppo_cli.run.identity import (
            describe_new_run,
            find_changes,
            keep_decisions,
            setting_values,
        )

        run = checkpoint.parents[1] if checkpoint else folder
        kept, free, kept_notes = keep_decisions(plan, run, step_of(checkpoint))
        identity = {k: v for k, v in setting_values(kept.settings).items() if k not in free}
        now = kept.settings
        other = find_changes(checkpoint, now.trainer, now.pretrain_steps, identity, command)
        if other:
            notes.append(describe_new_run(other, run, checkpoint, identity))
            return
        notes.extend(kept_notes)
        if checkpoint is None:
            notes.append(f"The run in {folder} went back to its start, and begins again.")
            return
        # auto resumes only what is complete; digests of large checkpoints take minutes.
        if mode != "auto":
            require_resumable(checkpoint, command)
        step = read_state(checkpoint)["run"]["step"]
        total = count_steps(config.data, config.trainer)
        if total and step >= total:
            notes.append(
                f"The run in {folder} is complete: {step} of {total} steps. To go on, raise "
                "--max_steps or --epochs; to start again, use --resume never or another "
                "--output_dir."
            )
            return
        optims = config.actor.optim, config.critic.optim
        jumps = find_lr_jumps(*optims, checkpoint, total) if total else []
        notes.append("; ".join([f"The run resumes after step {step}, from {checkpoint}", *jumps]))

    problems = [*store_problems, *collect_problems([check])]
    return notes, [redact(line) for line in problems]


def _find_row_refusals(rows: FirstRows, *, scored: bool) -> list[str]:
    """Return the problems of the data: rows that are bad, too few, or without ground truth."""
    config = rows.config
    if config.trainer.node_rank:
        return []
    problems: list[str] = []
    prompts: dict[DataSplit, list[Prompt]] = {}
    # Format of the rows, for files on this disk.
    named = {split: split_files(config.data, split)[0] for split in SPLITS}
    for split, files in named.items():
        try:
            if not all(map(is_hub_name, files)):
                prompts[split] = rows.prompts(split)
        except UserError as error:
            problems.append(str(error))
    # Enough rows for a batch.
    count = train_rows(config.data)
    mini = config.actor.ppo_mini_batch_size
    if count and (shortage := describe_missing_rows(config.data, mini, count)):
        problems.append(shortage)
    # Only with good rows: what the reward and the template need.
    if not problems and prompts:
        for split, split_prompts in prompts.items() if scored else ():
            far = any(map(is_hub_name, named[split]))
            sets = rows.read(split)
            answers = dict.fromkeys(name for row_set in sets for name in row_set.columns.answers)
            hint = (
                f" The answer may be in {list_names(answers)}: --answer_key NAME."
                if answers
                else ""
            )
            checks = row_checks(config.reward, split_prompts, all_known=not far)
            problems += [f"{problem}{hint}" for problem in collect_problems(checks)]
            problems += collect_problems(sandbox_checks(config.reward, split_prompts))
        local = [split for split in SPLITS if not all(map(is_hub_name, named[split]))]
        problems += [problem for split in local for problem in rows.render(split)[0]]
    return [redact(line) for line in dict.fromkeys(problems)]


def models_by_flag(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the models of a run with their flags, each once: unset ones are the policy's."""
    models = {config.ref.path: "--ref_model", config.critic.model.path: "--critic_model"}
    for path, flag in (models | {config.model.path: "--model"}).items():
        yield flag, path


def _list_file_checks(config: Config) -> Iterator[Callable[[], object]]:
    """Yield functions that raise UserError if a file, model or package of the run is missing."""
    for name in chain.from_iterable(split_files(config.data, split)[0] for split in SPLITS):
        yield partial(check_present, name)
    for flag, path in models_by_flag(config):
        yield partial(check_folder, model_folder(path), flag)
    yield from file_checks(config.reward)
