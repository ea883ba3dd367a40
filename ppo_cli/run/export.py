"""`ppo export`: write the model of a checkpoint as one folder with a model card; upload it."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ppo_cli.atomic import atomic_replace
from ppo_cli.config.derived import train_rows, val_rows
from ppo_cli.config.layers import DEFAULT
from ppo_cli.config.mixture import judges_of, mixture_line, mixture_of, models_of, rules_of
from ppo_cli.config.models.bundled import EMBEDDED, model_folder
from ppo_cli.config.schema.keys import value_of
from ppo_cli.config.schema.run import Config
from ppo_cli.digests import require_intact_model
from ppo_cli.errors import (
    ConfigError,
    UserError,
    command_line,
    first_line,
    refuse_out_address,
    replace_flag,
    replace_path,
    shell_name,
)
from ppo_cli.redact import mask_secrets, redact
from ppo_cli.report.metrics import Lines, describe_judge_totals, mixture_part_means, summarise
from ppo_cli.report.page.run_data import read_run_config, read_settings
from ppo_cli.run_folder import STEP_NAME, find_model, has_model, plain, read_metrics

CARD, CURVE = "README.md", "curve.svg"
UNKNOWN = "not known"
UNREADABLE = "Not known: the config.yaml of the run cannot be read by this version of ppo-cli."
# Settings of a machine, not of the model: the card leaves them out.
MACHINE_SETTINGS = frozenset(
    f"trainer.{name}" for name in ("output_dir", "resume_mode", "master_addr", "node_rank")
)
# Fields of the base model's card that are copied.
LICENCE = ("license", "license_name", "license_link")
COLOURS = ("#1f6fb2", "#c2571a", "#2f8f5b", "#8a4fb0", "#7a7a7a")
WIDTH, HEIGHT, EDGE = 640, 260, 44  # of the curve, in pixels
Points = Sequence[tuple[int, float]]
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Paths of this machine are useless to others, and may contain a person's name.
_FOLDERS = re.compile(r'(?<=")(?:/|~/)(?:[^"/]+/)+(?=[^"/]+/?")')


def write_card(run: Path, out: Path, *, name: str, step: int, critic: bool) -> None:
    """Write the card and the reward curve of the model of `step` into its folder `out`.

    Everything is read from the run folder and from files of the base model on this machine.
    """
    config, _ = read_run_config(run)
    metrics = read_metrics(run)
    history = [line for line in metrics if line["step"] <= step]
    picture = draw_curve(_curve_series(history))
    if picture:
        (out / CURVE).write_text(picture, encoding="utf-8")
    # Front matter, and settings that differ from the defaults.
    settings, written_by = read_settings(run)
    values = {key: value for key, value, _ in settings}
    base = str(yaml.safe_load(values.get("model.path", "null")) or UNKNOWN)
    front, base_lines = _describe_base(base)
    front |= {"library_name": "transformers", "tags": ["ppo", "reinforcement-learning"]}
    front |= {} if critic else {"pipeline_tag": "text-generation"}
    chosen = [
        f"{key}: {_public_value(key, value)}"
        for key, value, origin in settings
        if origin != DEFAULT and key not in MACHINE_SETTINGS
        if config is None or value_of(config, key) != value_of(Config(), key)
    ]
    # The sections of the card.
    estimator = yaml.safe_load(values.get("algorithm.adv_estimator", UNKNOWN))
    what = "critic" if critic else "model"
    parts = [
        f"---\n{yaml.safe_dump(plain(front), sort_keys=False, allow_unicode=True)}---\n\n# {name}",
        f"The {what} after step {step} of PPO training (advantage estimator: {estimator}).",
        *("\n".join(lines) for lines in (
            ["## Base model", "", *base_lines],
            ["## Data", "", *(_describe_data(config) if config else [UNREADABLE])],
            ["## Reward", "", *(_describe_reward(config) if config else [UNREADABLE])],
            ["## Results", "", *_results_table(run, history, config)],
            [f"![Reward by step]({CURVE})"] if picture else [],
            [f"Judges of the entire run: {describe_judge_totals(run, metrics) or 'none asked'}."],
            ["## Settings that differ from the defaults", "", "```yaml", *chosen, "```"],
            ["## Versions", "", written_by or UNKNOWN],
        ) if lines),
    ]  # fmt: skip
    (out / CARD).write_text(redact("\n\n".join(parts)) + "\n", encoding="utf-8")


def _describe_base(path: str) -> tuple[dict[str, Any], list[str]]:
    """Return front matter about the base model, and lines with its name and licence."""
    card = _read_card(path)
    folder = Path(model_folder(path)).expanduser()
    # The licence is in the card, else in config.json.
    front = {key: str(card[key]) for key in LICENCE if card.get(key)}
    licence = front.get("license_name") or front.get("license")
    if licence is None and folder.is_dir():
        with suppress(OSError, ValueError, AttributeError):
            licence = json.loads((folder / "config.json").read_bytes()).get("license")
    # The hub links a model to its base: only hub names are given.
    local = folder.is_dir() or folder.is_absolute() or path == EMBEDDED
    name = f"{path} (ships with ppo-cli)" if path == EMBEDDED else _public_name(path)
    origin = card.get("base_model") if local else path
    if isinstance(origin, str) and _HUB_NAME.fullmatch(origin):
        front = {"base_model": origin, **front}
        name += f", itself made from {origin}" if local else ""
    return front, [f"- Name: {name}", f"- Licence: {licence or UNKNOWN}"]


def _read_card(path: str) -> dict[str, Any]:
    """Read the front matter of a model's card: from its folder, or from the hub's cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.repocard import metadata_load

    card: Any = Path(model_folder(path)).expanduser() / CARD
    with suppress(OSError, ValueError, yaml.YAMLError):
        if not card.exists():
            card = try_to_load_from_cache(path, CARD)
        return (metadata_load(card) if isinstance(card, str | Path) else None) or {}
    return {}


def _describe_data(config: Config) -> list[str]:
    """Return a line for training and validation: the files and the number of rows read."""
    lines = []
    for title, files, rows in (
        ("Training", config.data.train_files, train_rows(config)),
        ("Validation", config.data.val_files, val_rows(config)),
    ):
        names = ", ".join(map(_public_name, files))
        counted = f"{rows:,} rows" if rows is not None else f"rows {UNKNOWN}"
        lines.append(f"- {title}: {names}, {counted}" if files else f"- {title}: none")
    return lines


def _describe_reward(config: Config) -> list[str]:
    """Return a line for each judge, reward model, rule and function."""
    reward = config.reward
    # A mixture is one line, followed by its parts.
    mixed = mixture_of(reward)
    lines = [f"- Mixture: {mixture_line(mixed)}"] if mixed else []
    for judge in judges_of(reward):
        api = judge.settings
        lines.append(f"- LLM {judge.name.removeprefix('the ')}: {api.model} ({api.type})")
        prompt = _public_name(api.prompt_file) if api.prompt_file else api.prompt_preset
        lines[-1] += f", prompt {prompt}, votes a response: {api.votes}"
    for model in models_of(reward):
        path = _public_name(str(model.settings.path))
        lines.append(f"- {model.name.removeprefix('the ').capitalize()}: {path}")
    for rule in rules_of(reward):
        if rule.function:
            lines.append(f"- Function: {_public_name(rule.function)}")
        else:
            lines.append(f"- Rule: {rule.rule or 'chosen by the data_source of each row'}")
    return lines


def _results_table(run: Path, history: Lines, config: Config | None) -> list[str]:
    """Return a table of reward and validation at the start and the end."""
    summary = summarise(history, run, config or Config(), session=(0, 0.0), resume_command="")
    lines = [
        f"| {name} | {_number(before)} | {_number(after)} |"
        for name, before, after in summary.measures
    ]
    if not lines:
        return ["No step has a reward."]
    # The summary's measures.
    heads = ["Before and after are the first and the last tenth of the steps, and the first and",
             "the last validation.", "", "| | before | after |", "|---|---|---|"]  # fmt: skip
    return [*heads, *lines]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{round(value, 9) + 0.0:.4g}"


def _public_name(path: str) -> str:
    """Return an absolute path's last part; hub names, URLs and relative paths unchanged."""
    return Path(path).name if path.startswith(("/", "~")) else path


def _public_value(key: str, value: str) -> str:
    """Return a setting's YAML without secrets and without folders of this machine."""
    masked = mask_secrets({key: yaml.safe_load(value)})[key]
    return _FOLDERS.sub("", json.dumps(masked, ensure_ascii=False))


def _curve_series(history: Lines) -> dict[str, Points]:
    """Return the series of the curve: the reward (or a mixture's parts) and the validation."""
    # Parts of a mixture replace the total reward.
    kinds = {name for line in history for name in mixture_part_means(line)}
    series: dict[str, list[tuple[int, float]]] = {}
    for line in history:
        part_rewards = {f"reward {name}": line.get(f"reward/{name}") for name in sorted(kinds)}
        values = part_rewards or {"reward": line.get("reward_mean")}
        accuracy = line.get("val/accuracy")
        values["validation"] = line.get("val/reward_mean") if accuracy is None else accuracy
        for name, value in values.items():
            if value is not None:
                series.setdefault(name, []).append((line["step"], float(value)))
    return {name: points for name, points in series.items() if len(points) > 1}


def draw_curve(series: Mapping[str, Points]) -> str:
    """Draw curves over the step as SVG; an empty text without two points."""
    steps = [step for points in series.values() for step, _ in points]
    values = [value for points in series.values() for _, value in points]
    if not steps:
        return ""
    (first, right), (low, high) = (min(steps), max(steps)), (min(values), max(values))
    # Pixels for a step and for a unit of the value.
    across = (WIDTH - 2 * EDGE) / max(right - first, 1)
    up = (HEIGHT - 2 * EDGE) / ((high - low) or 1.0)
    bottom = HEIGHT - EDGE
    shapes = [
        f'<path d="M{EDGE} {EDGE}V{bottom}H{WIDTH - EDGE}" fill="none" stroke="#888"/>',
        f'<text x="{EDGE - 4}" y="{EDGE + 4}" text-anchor="end">{high:.3g}</text>',
        f'<text x="{EDGE - 4}" y="{bottom}" text-anchor="end">{low:.3g}</text>' * (high > low),
        f'<text x="{EDGE}" y="{bottom + 18}">step {first}</text>',
        f'<text x="{WIDTH - EDGE}" y="{bottom + 18}" text-anchor="end">{right}</text>',
    ]
    # A line and a label for each series.
    for at, (name, points) in enumerate(series.items()):
        colour = COLOURS[at % len(COLOURS)]
        line = " ".join(
            f"{EDGE + (step - first) * across:.1f},{bottom - (value - low) * up:.1f}"
            for step, value in points
        )
        shapes.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        label = f'<text x="{EDGE + 8 + 150 * at}" y="{EDGE - 14}" fill="{colour}">'
        shapes.append(f"{label}{html.escape(redact(name))}</text>")
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#fff"/>', *filter(None, shapes), "</svg>\n",
    ])  # fmt: skip


CRITIC_HEAD = "ForTokenClassification"


def export(
    source: Path,
    out: Path,
    *,
    checkpoint: str | None = None,
    critic: bool = False,
    dtype: str | None = None,
    base: str | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
    push: str | None = None,
    public: bool = False,
) -> dict[str, Any]:
    """Write the actor (or critic) of a run or checkpoint to `out` as one Hugging Face folder.

    `checkpoint` is best, latest, a step's folder or a path; None is the latest. The model of a run
    gets a card. `push` is the hub repository to upload to, private unless `public`. Returns what
    was written, and from where, as a JSON value; `step` is None if it is unknown.
    """
    if public and push is None:
        raise ConfigError("--public says who can read what --push uploads: add --push NAME.")
    if push is not None:
        _check_hub(push)
    folder = find_model(source.expanduser(), checkpoint, critic=critic).resolve()
    require_intact_model(folder, partial(_command_with_model, source, checkpoint))
    match = STEP_NAME.match(folder.parent.name)
    step = int(match.group(1)) if match else None
    run = folder.parents[2]
    card = step is not None and (run / "config.yaml").is_file()
    # A card needs the run's config.yaml and metrics.
    with _replace_folder(out.expanduser(), folder, force=force) as fresh:
        from ppo_cli.engine.export import write_model  # torch, which takes seconds

        written = write_model(
            folder,
            fresh,
            dtype=dtype,
            base=model_folder(base) if base else None,
            trust_remote_code=trust_remote_code,
        )
        if card and step is not None:
            write_card(run, fresh, name=out.resolve().name, step=step, critic=critic)
    return {
        "out": str(out),
        "use_as": "--critic_model" if _is_critic(out.expanduser(), folder) else "--model",
        "source": str(folder),
        "step": step,
        "base": written.base,
        "dtype": written.dtype,
        "parameters": written.parameters,
        "bytes": written.bytes,
        "files": list(written.files),
        "card": card,
        "pushed": None if push is None else _upload(out.expanduser(), push, public=public),
    }


def _command_with_model(source: Path, checkpoint: str | None, model: Path) -> str:
    """Return this command line with another checkpoint's model."""
    if checkpoint is not None:
        return replace_flag(command_line(), "--checkpoint", shlex.quote(str(model.parent)))
    return replace_path(str(source), str(model if has_model(source) else model.parent))


def _check_hub(name: str) -> None:
    """Raise ConfigError before anything is written if the upload cannot work."""
    from huggingface_hub import get_token
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    problems = []
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        problem = str(error).partition(":")[0].rstrip(".")
        problems.append(f"--push {name}: {problem}.")
    if get_token() is None:
        problems.append("--push needs a token of the hub: run `hf auth login`, or set HF_TOKEN.")
    if is_offline_mode():
        problems.append("--push needs the hub: unset HF_HUB_OFFLINE.")
    if problems:
        raise ConfigError(problems)


def _upload(folder: Path, name: str, *, public: bool) -> str:
    """Upload a folder; return the address of the repository."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    outcome = f"The model is in {folder}, but it was not uploaded to {name}"
    try:
        repository = api.create_repo(name, private=not public, exist_ok=True)
        # An existing public repository stays public: refuse to upload.
        exposed = not public and not api.repo_info(repository.repo_id).private
        if not exposed:
            api.upload_folder(
                repo_id=repository.repo_id,
                folder_path=folder,
                commit_message="Upload by ppo export",
            )
    except Exception as failure:  # HTTP, LFS and Xet have different errors
        error: BaseException = failure
        while error.__cause__ and not isinstance(error, HfHubHTTPError):
            error = error.__cause__
        why = first_line(error)
        if isinstance(error, HfHubHTTPError):
            reply = error.server_message or error.response.reason_phrase
            why = f"the hub answered {error.response.status_code}, {reply}"
            if error.response.status_code in (401, 403):
                why = f"{why.rstrip('.')}. Give it a token that may write there (HF_TOKEN)"
        # The message contains the command that repeats the upload.
        hf = Path(sys.executable).with_name("hf")
        arguments = [] if public else ["--private"]
        arguments = ["upload", name, str(folder), *arguments]
        raise UserError(
            f"{outcome}: {redact(why).rstrip('.')}. To try again: "
            f"{shell_name(hf) if hf.exists() else 'hf'} {shlex.join(arguments)}"
        ) from failure
    if exposed:
        raise UserError(
            f"{outcome}: that repository exists and everybody can read it. Add --public, or give "
            "another name."
        )
    return str(repository)


def _is_critic(out: Path, source: Path) -> bool:
    """Whether a written model is a critic, by its head or its source folder."""
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    heads = config.get("architectures") or []
    return source.name == "critic" or any(name.endswith(CRITIC_HEAD) for name in heads)


@contextmanager
def _replace_folder(out: Path, source: Path, *, force: bool) -> Iterator[Path]:
    """Yield a hidden folder to fill; at the end it replaces `out`."""
    place = out.resolve()
    _check_target(out, place, source, force=force)
    try:
        with atomic_replace(place) as fresh:
            fresh.mkdir(parents=True)
            yield fresh
    except OSError as error:
        raise UserError(
            f"The model could not be written to {out}: {error.strerror or error}. Free some "
            "space, or choose another --out."
        ) from error


def _check_target(out: Path, place: Path, source: Path, *, force: bool) -> None:
    """Raise ConfigError if the model cannot be written to `--out`, or would replace something else.

    `place` is the absolute path of `out`; `source` is the model to export. With `force`, a folder
    with a model may be replaced.
    """
    # --force replaces only models.
    refuse_out_address(out)
    if place.exists() and not place.is_dir():
        raise ConfigError(f"--out {out} is a file; name a folder.")
    if source.is_relative_to(place) or place.is_relative_to(source):
        raise ConfigError(f"--out {out} contains {source}, or is in it. Name another folder.")
    if place.is_dir() and any(place.iterdir()):
        if not force:
            raise ConfigError(
                f"--out {out} is not empty. Name another folder, or replace all of it with --force."
            )
        if not has_model(place):
            raise ConfigError(
                f"--out {out} holds no model but other files, and --force would delete them all. "
                "Name another folder."
            )
    # The nearest existing parent must be writable.
    parent = next(folder for folder in place.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(f"--out {out}: the folder {parent} cannot be written.")
