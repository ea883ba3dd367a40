"""`ppo eval` and `ppo generate`: sample from trained models, and score their responses.

An eval appends a row for each response when it is scored, to one file for each model. The same
command continues with the missing rows: each response has a separate random stream, so that it is
the same whichever others are sampled with it.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from ppo_cli.atomic import atomic_replace
from ppo_cli.config.mixture import SCALINGS, mixture_of
from ppo_cli.config.models.bundled import model_folder, prompt_files
from ppo_cli.config.models.folder import read_config, vocabulary_size
from ppo_cli.config.models.limits import require_length
from ppo_cli.config.schema.keys import value_of, with_settings
from ppo_cli.config.schema.reward import Composite, Reward, Shaping
from ppo_cli.config.schema.run import Config
from ppo_cli.config.schema.run import Rollout as RolloutSettings
from ppo_cli.data_sets.files import Place
from ppo_cli.data_sets.prompts import Renderer, render_prompts
from ppo_cli.data_sets.row_sets import RowSet
from ppo_cli.data_sets.rows import Columns, Row
from ppo_cli.engine.base import Sampler, Sampling, build_sampler
from ppo_cli.engine.cpu.runtime import set_threads
from ppo_cli.engine.device import require_gpus
from ppo_cli.engine.export import base_name, write_model
from ppo_cli.engine.models.lora import ADAPTER_CONFIG
from ppo_cli.engine.pretrained import load_tokenizer
from ppo_cli.environments.episodes import Episodes
from ppo_cli.errors import ConfigError, Interrupted, UserError, first_line
from ppo_cli.machine.machine import Machine
from ppo_cli.paths import load_json, read_text, user_path
from ppo_cli.records import Message, Prompt, Rollout, Scored, mark_validation
from ppo_cli.report.tracker import Screen, make_episode_fields, make_rollout_line
from ppo_cli.run.assemble import prompt_settings, read_prompts
from ppo_cli.run.episodes import start_episodes
from ppo_cli.run.identity import (
    describe_changes,
    digest_rows,
    digest_value,
    drop_undecided,
    setting_values,
)
from ppo_cli.run_folder.folder import RunFolder
from ppo_cli.run_folder.lines import append_line, plain, read_lines, replace_lines
from ppo_cli.run_folder.sources import ModelSource, recorded_quantization
from ppo_cli.scoring.score import Callbacks, open_reward, score_all, total_spending
from ppo_cli.scoring.statistics import PromptScores, ScoresByPrompt, compare_models
from ppo_cli.secrets.redact import redact
from ppo_cli.step.sampling import VALIDATION, stream_seed

# The settings of an eval in its folder, and the parent of folders without --out.
SETTINGS_FILE = "eval.json"
DEFAULT_PLACE = "evals"
LM_EVAL_ROWS = 16  # batch size of lm-eval


def eval_sampling(
    rollout: RolloutSettings, max_tokens: int, n: int | None, *, greedy: bool, as_trained: bool
) -> Sampling:
    """Return the sampling of an eval: that of a run's validation, or of its training.

    Training's if `as_trained`, or if several responses are wanted and the validation is greedy,
    which would give the same response n times.
    """
    validation = rollout.val_kwargs
    # Greedy sampling would return n equal responses.
    n = n or validation.n
    drawn = rollout if as_trained or (n > 1 and not validation.temperature) else validation
    return Sampling(
        temperature=0.0 if greedy else drawn.temperature,
        top_p=drawn.top_p,
        top_k=drawn.top_k,
        n=n,
        max_tokens=max_tokens,
        seed=stream_seed(rollout.seed, VALIDATION, 0),
        stop=rollout.stop,
    )


class SampledModel:
    """A model to sample from; its weights are loaded for the first response.

    An adapter is merged into its base model, in a temporary folder until `close`; `notes` say in
    what form. With `limited`, raises ModelError if prompts and responses may exceed the model's
    positions.
    """

    def __init__(
        self, config: Config, machine: Machine, source: ModelSource, *, limited: bool = True
    ) -> None:
        require_gpus(machine, len(machine.gpus[:1]))
        path, trust = source.path, config.model.trust_remote_code
        self.notes: list[str] = []
        with ExitStack() as opened:
            # The hf sampler and vLLM need a complete model.
            if (user_path(path) / ADAPTER_CONFIG).exists():
                merged = opened.enter_context(tempfile.TemporaryDirectory(prefix="ppo-eval-"))
                recorded = recorded_quantization(user_path(path))
                written = write_model(
                    user_path(path), Path(merged), recorded=recorded, trust_remote_code=trust
                )
                self.notes.append(f"{path} is merged with {written.base}, {written.merged}")
                path = merged
            if limited:
                require_length(read_config(path), source.path, config.data)
            self.config = with_settings(config, {"model.path": path, "model.lora_rank": 0})
            self.tokenizer = load_tokenizer(path, trust_remote_code=trust, flag="MODEL")
            self._open = opened.pop_all()

    @property
    def uses_template(self) -> bool:
        """Whether a chat template is applied to prompts."""
        data = self.config.data
        return Renderer(self.tokenizer, None, data.apply_chat_template).uses_template

    def read(self, files: Sequence[str]) -> tuple[Sequence[Prompt], Sequence[str]]:
        """Read prompt files, as those of a validation; return prompts and notes on them."""
        prompt_set = read_prompts(
            self.config, self.tokenizer, files, self.config.data.val_max_samples
        )
        return mark_validation(prompt_set.prompts), prompt_set.notes

    def prompt(self, conversation: str | Sequence[Message]) -> Prompt:
        """Build a prompt from a text or a conversation; DataError if the model cannot read it."""
        conversation = conversation if isinstance(conversation, str) else tuple(conversation)
        row = Row(Place("prompt", 1), conversation, None, "", {})
        # The same checks as for a row of a file.
        rows = RowSet("prompt", "prompt", (row,), (), Columns("prompt", "", "", ()))
        prompt_set = render_prompts(
            [rows],
            self.tokenizer,
            vocabulary_size=vocabulary_size(self.config.model.path),
            **prompt_settings(self.config.data),
        )
        return prompt_set.prompts[0]

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Rollout]:
        """Yield `sampling.n` responses to each prompt, each when it is finished."""
        if self._episodes is None:
            yield from self._sampler.generate(prompts, sampling, 0)
            return

        def draw(unfinished: Sequence[Rollout], turn_sampling: Sampling) -> Iterator[Rollout]:
            return self._sampler.generate((), turn_sampling, 0, unfinished)

        yield from self._episodes.play(draw, prompts, sampling)

    @cached_property
    def _episodes(self) -> Episodes | None:
        if not self.config.environment.is_set:
            return None
        return start_episodes(self.config, self.tokenizer, None, self._open)

    @cached_property
    def _sampler(self) -> Sampler:
        set_threads(self.config.trainer.threads)
        sampler = build_sampler(self.config, self.tokenizer)
        self._open.callback(sampler.close)
        return sampler

    def close(self) -> None:
        """Free the model. Safe to call twice."""
        self._open.close()


def generate_answers(
    sampled: SampledModel,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    advance: Callable[[int], None] = lambda count: None,
) -> list[dict[str, Any]]:
    """Sample a model; return a row for each response, in the order of the prompts."""
    # Responses finish in any order.
    place = {prompt.uid: i for i, prompt in enumerate(prompts)}
    rollouts = []
    for rollout in sampled.generate(prompts, sampling):
        rollouts.append(rollout)
        advance(1)
    rollouts.sort(key=lambda finished: (place[finished.prompt.uid], finished.sample))
    return [_answer_row(finished) for finished in rollouts]


def _answer_row(rollout: Rollout) -> dict[str, Any]:
    """Return a response as a row for `ppo reward score`, without fields that its prompt lacks."""
    prompt = rollout.prompt
    row = {
        "prompt": prompt.text,
        "response": rollout.text,
        "finish_reason": rollout.finish_reason,
        "tokens": rollout.policy_tokens,
    }
    # Empty fields are left out.
    optional = {"data_source": prompt.data_source, "ground_truth": prompt.ground_truth,
            "opened": prompt.opened}  # fmt: skip
    row |= {name: value for name, value in optional.items() if value}
    answer: dict[str, Any] = plain(row | make_episode_fields(rollout))
    return answer


@dataclass
class _ScoredRows:
    """A model's scored rows in a file, by prompt and sample; a new start repeats failed ones."""

    file: Path

    def __post_init__(self) -> None:
        self._lock = Lock()
        # Failed rows are scored again.
        lines = [line for line in read_lines(self.file) if line.get("score") is not None]
        self.done = {(str(line["uid"]), int(line["sample"])): line for line in lines}
        if self.file.exists():
            replace_lines(self.file, self.done.values())  # without torn lines and failed scores

    def add(self, scored: Scored) -> None:
        """Write a row; thread-safe, because any thread may deliver a score."""
        line = {k: v for k, v in make_rollout_line(0, scored).items() if k != "step"}
        with self._lock:
            append_line(self.file, line)
            self.done[scored.rollout.key] = plain(line)

    def by_prompt(self, prompts: Sequence[Prompt]) -> ScoresByPrompt:
        """Return the scores of these prompts, as far as they exist."""
        scores: dict[str, list[tuple[int, float | None]]] = {}
        for (uid, sample), line in self.done.items():
            scores.setdefault(uid, []).append((sample, line["score"]))
        return {
            p.uid: PromptScores(p.data_source, tuple(score for _, score in sorted(scores[p.uid])))
            for p in prompts
            if p.uid in scores
        }


def evaluate(
    config: Config,
    machine: Machine,
    sources: Sequence[ModelSource],
    sampling: Sampling,
    screen: Screen,
    *,
    out: Path | None,
    threshold: float | None,
) -> dict[str, Any]:
    """Score models on the validation prompts, and compare the first with each of the others.

    Returns the output of `ppo eval --json`; `stopped` says why some scores are missing. Rows are
    written to `out`, or to a folder in ./evals named by a digest of the settings. A response with
    at least the score `threshold` counts as correct.
    """
    # Scales of training depend on the model and are removed.
    files = prompt_files(config.data.val_files, "val")
    reward, relative = fix_scales(config.reward)
    config = config.model_copy(update={"reward": reward})
    if relative:
        screen.note(
            f"Training scales {', '.join(relative)} by the model's responses, which differ between "
            "models: here these parts are not scaled. For a fixed scale set "
            f"reward.composite.parts.{relative[0]}.scaling=affine, with mean and std."
        )
    models: list[tuple[str, ScoresByPrompt]] = []
    reports: list[dict[str, Any]] = []
    stopped, folder = "", None
    with ExitStack() as closing:
        for source in sources:
            # One model after the other: only one is in memory.
            sampled = SampledModel(config, machine, source)
            closing.callback(sampled.close)
            prompts, notes = sampled.read(files)
            screen.note_all([*sampled.notes, *notes])
            # All models share the folder, which the settings of the eval identify.
            if folder is None:
                settings = _identity_settings(config, sampling, prompts)
                place = out or Path(DEFAULT_PLACE) / digest_value(settings)
                folder = closing.enter_context(_claim_folder(place, settings))
            rows = _ScoredRows(folder / _file_name(source))
            spent: dict[str, float] = {}
            if not stopped:
                with screen.phase(source.name, len(prompts) * sampling.n) as advance:
                    watch = Callbacks(advance, screen.note)
                    stopped, spent = _score_missing(rows, sampled, prompts, sampling, watch, folder)
            sampled.close()
            if stopped and not rows.done:
                continue
            # A model without any row is left out of the comparison.
            failed = [line for line in rows.done.values() if line["score"] is None]
            causes = Counter(line["failure"].partition(":")[0] for line in failed)
            models.append((source.name, rows.by_prompt(prompts)))
            reports.append({
                "path": source.path, "rows": str(rows.file),
                "failures": dict(causes.most_common()), "spent": spent,
            })  # fmt: skip
    if not models:
        raise Interrupted(f"{stopped} No score is there yet; the same command starts again.")
    # The first model is compared with each of the others.
    comparison = compare_models(models, threshold)
    comparison["models"] = [
        facts | report for facts, report in zip(comparison["models"], reports, strict=True)
    ]
    return {"out": str(folder), "sampling": asdict(sampling), **comparison, "stopped": stopped}


def fix_scales(settings: Reward) -> tuple[Reward, list[str]]:
    """Return a reward without shaping and without scales that depend on the responses.

    The second result is the names of the parts whose scaling was removed.
    """
    settings = settings.model_copy(update={"shaping": Shaping()})  # only for training
    parts = mixture_of(settings)
    relative = [part.name for part in parts if SCALINGS[part.scaling].relative]
    if not relative:
        return settings, []
    part_settings = {p.name: p.model_dump(exclude={"name"}, exclude_unset=True) for p in parts}
    for name in relative:
        part_settings[name] = {k: v for k, v in part_settings[name].items() if k != "clip"} | {
            "scaling": "none"
        }
    update = {"parts": (), "composite": Composite(enable=True, parts=part_settings)}
    return settings.model_copy(update=update), relative


def evaluate_tasks(
    config: Config,
    machine: Machine,
    sources: Sequence[ModelSource],
    tasks: Sequence[str],
    screen: Screen,
) -> dict[str, Any]:
    """Run lm-eval's tasks on models; a task is one of its names, or a YAML file.

    Returns the output of `ppo eval --tasks --json`: for each model, task and metric the value and
    its standard error, None if lm-eval has none.
    """
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    # Indexing lm-eval's tasks takes many seconds; only their names need it, files do not.
    manager = TaskManager(include_defaults=not all(Path(task).is_file() for task in tasks))
    reports = []
    for source in sources:
        sampled = SampledModel(config, machine, source, limited=False)
        screen.note_all(sampled.notes)
        with closing(sampled), screen.phase(source.name, None):
            model = sampled.config.model
            try:
                output = simple_evaluate(
                    model="hf",
                    model_args={
                        "pretrained": str(user_path(model_folder(model.path))),
                        "dtype": model.dtype,
                        "trust_remote_code": model.trust_remote_code,
                    },
                    tasks=list(tasks),
                    task_manager=manager,
                    device="cuda" if torch.cuda.is_available() else "cpu",
                    batch_size=LM_EVAL_ROWS,
                    apply_chat_template=sampled.uses_template,
                    log_samples=False,
                    random_seed=config.trainer.seed,
                )
            except Exception as error:  # a task contains code: data, templates, metrics
                why = redact(first_line(error))
                raise UserError(f"lm-eval failed with {', '.join(tasks)}: {why}.") from error
        # lm-eval's keys are `metric,filter`.
        by_task = {
            task: {
                name.removesuffix(",none"): {"value": value, "stderr": _stderr(measured, name)}
                for name, value in measured.items()
                if isinstance(value, int | float) and "_stderr" not in name and "," in name
            }
            for task, measured in output["results"].items()
        }
        reports.append({"name": source.name, "path": source.path, "tasks": by_task})
    return {"models": reports}


def _stderr(measured: Mapping[str, Any], name: str) -> float | None:
    """Return the standard error of a metric such as `exact_match,strict-match`; None for N/A."""
    metric, _, way = name.partition(",")
    value = measured.get(f"{metric}_stderr,{way}")
    return value if isinstance(value, float) else None


def _score_missing(
    rows: _ScoredRows,
    sampled: SampledModel,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    watch: Callbacks,
    folder: Path,
) -> tuple[str, dict[str, float]]:
    """Sample and score the missing rows; return why it stopped, and the spending."""
    missing = {(p.uid, i) for p in prompts for i in range(sampling.n)} - rows.done.keys()
    watch.advance(len(prompts) * sampling.n - len(missing))
    if not missing:
        return "", {}
    # A prompt with a missing sample is sampled completely; finished samples are dropped.
    uids = {uid for uid, _ in missing}
    incomplete = [prompt for prompt in prompts if prompt.uid in uids]
    watch = replace(watch, scored=lambda rollout, score: rows.add(Scored(rollout, score)))
    with open_reward(sampled.config.reward, prompts, watch, folder) as reward:
        sampling_now = sampled.generate(incomplete, sampling)
        rollouts = (rollout for rollout in sampling_now if rollout.key in missing)
        scoring = score_all(reward, rollouts, watch, "validation")
    return scoring.stopped, total_spending(scoring.metrics)


def _read_noted(file: Path) -> dict[str, Any]:
    """Return the settings of an earlier eval; ConfigError if the file does not hold them."""
    with suppress(OSError, ValueError):
        if isinstance(settings := load_json(read_text(file)), dict):
            return settings
    raise ConfigError(f"{file} does not hold the settings of an eval. Give --out another folder.")


@contextmanager
def _claim_folder(place: Path, settings: Mapping[str, Any]) -> Iterator[Path]:
    """Claim the folder of an eval and write its settings; ConfigError if it has other ones."""
    folder, noted = RunFolder(place, "--out"), place / SETTINGS_FILE
    try:
        folder.prepare()
        with folder.alone():
            # An existing eval must have the same settings.
            before = _read_noted(noted) if noted.exists() else settings
            if before.get("reward.api.max_votes", 1) is None:  # of a version without these rules
                before = drop_undecided(before, ())
            if other := describe_changes(before, settings):
                raise ConfigError(
                    f"--out {place} holds an eval with another {other}. Name another "
                    "folder, or leave --out out: each eval then gets a separate one."
                )
            with atomic_replace(noted) as fresh:
                fresh.write_text(json.dumps(settings, indent=2))
            yield place
    except UserError:
        folder.drop_if_empty()
        raise


def _identity_settings(
    config: Config, sampling: Sampling, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Return the settings that determine the rows of an eval, by key, as JSON values."""
    values = {f"sampling.{name}": value for name, value in asdict(sampling).items()}
    values |= {f"data.{name}": value for name, value in prompt_settings(config.data).items()}
    # Settings of the sampler that change tokens.
    sampler = ("model.dtype", "rollout.name", "rollout.engine_kwargs.vllm")
    values |= {name: value_of(config, name) for name in sampler}
    values |= setting_values(config, of_eval=True) | {"data.val_files": digest_rows(prompts)}
    settings: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return settings


def _file_name(source: ModelSource) -> str:
    """Return the file of a model's rows; it changes when the model or its base is rewritten."""
    folder = user_path(source.path)
    folders = [folder]
    if (folder / ADAPTER_CONFIG).exists():
        folders.append(user_path(base_name(folder)))
    files = [file for part in folders for file in sorted(part.glob("*")) if file.is_file()]
    # Size and time of the files stand for their contents.
    weights = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    path = str(folder.resolve()) if files else source.path
    name = re.sub(r"[^\w.-]+", "_", source.name)[-40:]
    return f"{name}-{digest_value([path, weights])}.jsonl"
