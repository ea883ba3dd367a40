"""`ppo eval` and `ppo generate`: sample from finished models, and score what they answer.

An eval writes a row a response as soon as its score is there, in a file for each model. The same
command goes on with what is missing: each response has a random stream of its own, so it comes out
the same whichever others are sampled beside it.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from ppo_cli.atomic import atomic_replace
from ppo_cli.config.derived import sampler_seed
from ppo_cli.config.machine.gpus import list_gpus
from ppo_cli.config.mixture import SCALINGS, mixture_of
from ppo_cli.config.models.bundled import model_folder, prompt_files
from ppo_cli.config.models.folder import read_config, vocabulary_size
from ppo_cli.config.models.limits import require_length
from ppo_cli.config.schema.keys import value_of
from ppo_cli.config.schema.reward import Composite, Reward, Shaping
from ppo_cli.config.schema.run import Config
from ppo_cli.data_sets.files import Place
from ppo_cli.data_sets.prompts import Renderer, render_prompts
from ppo_cli.data_sets.rows import Columns, Row, RowSet
from ppo_cli.engine.base import Sampler, Sampling, build_sampler
from ppo_cli.engine.cpu.runtime import set_threads
from ppo_cli.engine.device import require_gpus
from ppo_cli.engine.export import base_name, write_model
from ppo_cli.engine.models.lora import ADAPTER_CONFIG
from ppo_cli.errors import ConfigError, Interrupted, MissingPart, UserError, first_line
from ppo_cli.records import Message, Prompt, Rollout, Scored
from ppo_cli.redact import redact
from ppo_cli.report.tracker import Screen, rollout_line
from ppo_cli.run.assemble import load_tokenizer, prompt_settings, read_prompts
from ppo_cli.run.identity import changes, digest, rows_digest, setting_values
from ppo_cli.run_folder import ModelSource, RunFolder, append_line, plain, read_lines, replace_lines
from ppo_cli.scoring.score import Callbacks, open_reward, score_all, total_spending
from ppo_cli.scoring.statistics import PromptScores, ScoresByPrompt, compare_models
from ppo_cli.step.stages import VALIDATION, stream_seed

SETTINGS_FILE = "eval.json"
DEFAULT_PLACE = "evals"
LM_EVAL_ROWS = 16  # that lm-eval computes at once


def eval_sampling(config: Config, n: int | None, *, greedy: bool, as_trained: bool) -> Sampling:
    """How an eval samples: as the validation of a run does, or as its training does.

    As in training where that is asked for, or where `n` responses a prompt are and the
    validation is greedy, which would give the same response n times.
    """
    train, validation = config.rollout, config.rollout.val_kwargs
    n = n or validation.n
    drawn = train if as_trained or (n > 1 and not validation.temperature) else validation
    return Sampling(
        temperature=0.0 if greedy else drawn.temperature,
        top_p=drawn.top_p,
        top_k=drawn.top_k,
        n=n,
        max_tokens=config.data.max_response_length,
        seed=stream_seed(sampler_seed(config), VALIDATION, 0),
        stop=train.stop,
    )


class Sampled:
    """A model that answers; its weights are loaded with the first answer.

    An adapter is merged into its base, in a folder that lasts until `close`. One that is `limited`
    raises ModelError where prompts and responses may be longer than its positions.
    """

    def __init__(self, config: Config, source: ModelSource, *, limited: bool = True) -> None:
        require_gpus(len(list_gpus()[:1]))
        path, trust = source.path, config.model.trust_remote_code
        with ExitStack() as opened:
            if (Path(path).expanduser() / ADAPTER_CONFIG).exists():
                whole = opened.enter_context(tempfile.TemporaryDirectory(prefix="ppo-eval-"))
                write_model(Path(path).expanduser(), Path(whole), trust_remote_code=trust)
                path = whole
            if limited:
                require_length(read_config(path), source.path, config.data)
            model = config.model.model_copy(update={"path": path, "lora_rank": 0})
            self.config = config.model_copy(update={"model": model})
            self.tokenizer = load_tokenizer(path, trust_remote_code=trust, flag="MODEL")
            self._open = opened.pop_all()

    @property
    def uses_template(self) -> bool:
        """Whether prompts go through a chat template."""
        data = self.config.data
        return Renderer(self.tokenizer, None, data.apply_chat_template).uses_template

    def read(self, files: Sequence[str]) -> tuple[Sequence[Prompt], Sequence[str]]:
        """Read prompt files; with the remarks on them."""
        found = read_prompts(self.config, self.tokenizer, files, self.config.data.val_max_samples)
        return found.prompts, found.notes

    def prompt(self, asked: str | Sequence[Message]) -> Prompt:
        """Make a prompt of a text or a conversation; DataError where the model cannot read it."""
        asked = asked if isinstance(asked, str) else tuple(asked)
        row = Row(Place("prompt", 1), asked, None, "", {})
        rows = RowSet("prompt", "prompt", (row,), (), Columns("prompt", "", "", ()))
        found = render_prompts(
            [rows],
            self.tokenizer,
            vocabulary_size=vocabulary_size(self.config.model.path),
            **prompt_settings(self.config.data),
        )
        return found.prompts[0]

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Rollout]:
        """Yield `sampling.n` responses to each prompt, each as soon as it finishes."""
        yield from self._sampler.generate(prompts, sampling, 0)

    @cached_property
    def _sampler(self) -> Sampler:
        set_threads(self.config.trainer.threads)
        sampler = build_sampler(self.config, self.tokenizer)
        self._open.callback(sampler.close)
        return sampler

    def close(self) -> None:
        """Free the model. Safe to call twice."""
        self._open.close()


def answers(
    sampled: Sampled,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    advance: Callable[[int], None] = lambda more: None,
) -> list[dict[str, Any]]:
    """Let a model answer: a row a response, in the order of the prompts."""
    place = {prompt.uid: i for i, prompt in enumerate(prompts)}
    found = []
    for rollout in sampled.generate(prompts, sampling):
        found.append(rollout)
        advance(1)
    found.sort(key=lambda one: (place[one.prompt.uid], one.sample))
    return [_answer(one) for one in found]


def _answer(rollout: Rollout) -> dict[str, Any]:
    """A response as a row that `ppo reward score` reads; what its prompt lacks is left out."""
    prompt = rollout.prompt
    row = {
        "prompt": prompt.text,
        "response": rollout.text,
        "finish_reason": rollout.finish_reason,
        "tokens": len(rollout.token_ids),
    }
    more = {"data_source": prompt.data_source, "ground_truth": prompt.ground_truth,
            "opened": prompt.opened}  # fmt: skip
    found: dict[str, Any] = plain(row | {name: value for name, value in more.items() if value})
    return found


@dataclass
class _Rows:
    """The rows of a model in a file, by prompt and sample; another start asks for failed ones."""

    file: Path

    def __post_init__(self) -> None:
        self._lock = Lock()
        lines = [line for line in read_lines(self.file) if line.get("score") is not None]
        self.done = {(str(line["uid"]), int(line["sample"])): line for line in lines}
        if self.file.exists():
            replace_lines(self.file, self.done.values())  # without what is torn or failed

    def add(self, scored: Scored) -> None:
        """Write a row; called by whatever thread has the score."""
        line = {k: v for k, v in rollout_line(0, scored).items() if k != "step"}
        with self._lock:
            append_line(self.file, line)
            self.done[scored.rollout.key] = plain(line)

    def by_prompt(self, prompts: Sequence[Prompt]) -> ScoresByPrompt:
        """The scores of these prompts, as far as they are there."""
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
    sources: Sequence[ModelSource],
    sampling: Sampling,
    screen: Screen,
    *,
    out: Path | None,
    threshold: float | None,
) -> dict[str, Any]:
    """Score what models answer to the validation prompts, and compare the first with each other.

    Returns what `ppo eval --json` prints; `stopped` says why some scores are missing. Rows go to
    `out`, or to a folder below ./evals that the settings name. A response counts as right from
    `threshold` on.
    """
    files = prompt_files(config.data.val_files, "val")
    reward, relative = with_fixed_scales(config.reward)
    config = config.model_copy(update={"reward": reward})
    if relative:
        screen.note(
            f"Training scales {', '.join(relative)} by what the model answers, which no two models "
            "share: here they count as they are. For a scale of your own set "
            f"reward.composite.parts.{relative[0]}.scaling=affine, with mean and std."
        )
    models: list[tuple[str, ScoresByPrompt]] = []
    told: list[dict[str, Any]] = []
    stopped, folder = "", None
    with ExitStack() as closing:
        for source in sources:
            sampled = Sampled(config, source)
            closing.callback(sampled.close)
            prompts, notes = sampled.read(files)
            for note in notes:
                screen.note(note)
            if folder is None:
                settings = _settings(config, sampling, prompts)
                place = out or Path(DEFAULT_PLACE) / digest(settings)
                folder = closing.enter_context(_folder(place, settings))
            rows = _Rows(folder / _file_name(source))
            spent: dict[str, float] = {}
            if not stopped:
                with screen.phase(source.name, len(prompts) * sampling.n) as advance:
                    watch = Callbacks(advance, screen.note)
                    stopped, spent = _complete(rows, sampled, prompts, sampling, watch, folder)
            sampled.close()
            if stopped and not rows.done:
                continue
            failed = [line for line in rows.done.values() if line["score"] is None]
            causes = Counter(line["failure"].partition(":")[0] for line in failed)
            models.append((source.name, rows.by_prompt(prompts)))
            told.append({
                "path": source.path, "rows": str(rows.file),
                "failures": dict(causes.most_common()), "spent": spent,
            })  # fmt: skip
    if not models:
        raise Interrupted(f"{stopped} No score is there yet; the same command starts again.")
    found = compare_models(models, threshold)
    found["models"] = [facts | more for facts, more in zip(found["models"], told, strict=True)]
    return {"out": str(folder), "sampling": asdict(sampling), **found, "stopped": stopped}


def with_fixed_scales(settings: Reward) -> tuple[Reward, list[str]]:
    """The same reward without shaping, and with fixed scales of the parts of a mixture.

    Parts that answers would scale count as they are; also returns their names.
    """
    settings = settings.model_copy(update={"shaping": Shaping()})  # of training alone
    parts = mixture_of(settings)
    relative = [part.name for part in parts if SCALINGS[part.scaling].relative]
    if not relative:
        return settings, []
    own = {p.name: p.model_dump(exclude={"name"}, exclude_unset=True) for p in parts}
    for name in relative:
        own[name] = {k: v for k, v in own[name].items() if k != "clip"} | {"scaling": "none"}
    update = {"parts": (), "composite": Composite(enable=True, parts=own)}
    return settings.model_copy(update=update), relative


def evaluate_tasks(
    config: Config, sources: Sequence[ModelSource], tasks: Sequence[str], screen: Screen
) -> dict[str, Any]:
    """Let lm-eval run its tasks on models; a task is a name that it knows, or a YAML file.

    Returns what `ppo eval --tasks --json` prints: by model, task and metric the value and its
    standard error, None where lm-eval has none. Raises MissingPart without the package.
    """
    if find_spec("lm_eval") is None:
        raise MissingPart(
            "--tasks needs the package lm-eval. Install it with "
            f"`{shlex.quote(sys.executable)} -m pip install lm-eval`."
        )
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    # Reading all that lm-eval has takes many seconds, which its names need but files do not.
    manager = TaskManager(include_defaults=not all(Path(task).is_file() for task in tasks))
    told = []
    for source in sources:
        sampled = Sampled(config, source, limited=False)
        with closing(sampled), screen.phase(source.name, None):
            model = sampled.config.model
            try:
                found = simple_evaluate(
                    model="hf",
                    model_args={
                        "pretrained": str(Path(model_folder(model.path)).expanduser()),
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
            except Exception as error:  # a task is code of its own: data, templates, metrics
                why = redact(first_line(error))
                raise UserError(f"lm-eval failed with {', '.join(tasks)}: {why}.") from error
        by_task = {
            task: {
                name.removesuffix(",none"): {"value": value, "stderr": _stderr(measured, name)}
                for name, value in measured.items()
                if isinstance(value, int | float) and "_stderr" not in name and "," in name
            }
            for task, measured in found["results"].items()
        }
        told.append({"name": source.name, "path": source.path, "tasks": by_task})
    return {"models": told}


def _stderr(measured: Mapping[str, Any], name: str) -> float | None:
    """The standard error beside `exact_match,strict-match`; lm-eval says N/A where it has none."""
    metric, _, way = name.partition(",")
    value = measured.get(f"{metric}_stderr,{way}")
    return value if isinstance(value, float) else None


def _complete(
    rows: _Rows,
    sampled: Sampled,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    watch: Callbacks,
    folder: Path,
) -> tuple[str, dict[str, float]]:
    """Sample and score what is missing; returns why it stopped, and what was spent on it."""
    missing = {(p.uid, i) for p in prompts for i in range(sampling.n)} - rows.done.keys()
    watch.advance(len(prompts) * sampling.n - len(missing))
    if not missing:
        return "", {}
    uids = {uid for uid, _ in missing}
    asked = [prompt for prompt in prompts if prompt.uid in uids]
    watch = replace(watch, scored=lambda rollout, score: rows.add(Scored(rollout, score)))
    with open_reward(sampled.config.reward, prompts, watch, folder) as reward:
        sampling_now = sampled.generate(asked, sampling)
        rollouts = (rollout for rollout in sampling_now if rollout.key in missing)
        found = score_all(reward, rollouts, watch, "validation")
    return found.stopped, total_spending(found.metrics)


@contextmanager
def _folder(place: Path, settings: Mapping[str, Any]) -> Iterator[Path]:
    """Claim the folder of an eval, noted with its settings; ConfigError where it has others."""
    folder, noted = RunFolder(place, "--out"), place / SETTINGS_FILE
    try:
        folder.prepare()
        with folder.alone():
            before = json.loads(noted.read_bytes()) if noted.exists() else settings
            if other := changes(before, settings):
                raise ConfigError(
                    f"--out {place} holds an eval with another {other}. Name another "
                    "folder, or leave --out out: each eval then has one of its own."
                )
            with atomic_replace(noted) as fresh:
                fresh.write_text(json.dumps(settings, indent=2))
            yield place
    except UserError:
        folder.drop_if_empty()
        raise


def _settings(config: Config, sampling: Sampling, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What decides the rows of an eval, by the key that sets it, as JSON gives it back."""
    found = {f"sampling.{name}": value for name, value in asdict(sampling).items()}
    found |= {f"data.{name}": value for name, value in prompt_settings(config.data).items()}
    sampler = ("model.dtype", "rollout.name", "rollout.engine_kwargs.vllm")
    found |= {name: value_of(config, name) for name in sampler}
    found |= setting_values(config, of_eval=True) | {"data.val_files": rows_digest(prompts)}
    settings: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return settings


def _file_name(source: ModelSource) -> str:
    """The file for the rows of a model: another one after it or its base was written again."""
    folder = Path(source.path).expanduser()
    folders = [folder]
    if (folder / ADAPTER_CONFIG).exists():
        folders.append(Path(base_name(folder)).expanduser())
    files = [file for part in folders for file in sorted(part.glob("*")) if file.is_file()]
    weights = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    path = str(folder.resolve()) if files else source.path
    name = re.sub(r"[^\w.-]+", "_", source.name)[-40:]
    return f"{name}-{digest([path, weights])}.jsonl"
