"""The model card of a run: what a model was trained from, on what, by which reward, to what end."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from ppo_cli.config.bundled import EMBEDDED, model_folder
from ppo_cli.config.derived import train_rows, val_rows
from ppo_cli.config.keys import value_of
from ppo_cli.config.mixture import judges_of, mixture_line, mixture_of, models_of, rules_of
from ppo_cli.config.resolve import DEFAULT
from ppo_cli.config.schema import Config
from ppo_cli.redact import mask_secrets, redact
from ppo_cli.report.metrics import Lines, judge_totals, mixture_parts, summarise
from ppo_cli.report.page.run_data import config_of, settings_of
from ppo_cli.run_folder import read_metrics

CARD, CURVE = "README.md", "curve.svg"
UNKNOWN = "not known"
UNREADABLE = "Not known: the config.yaml of the run cannot be read by this version of ppo-cli."
OF_THE_MACHINE = frozenset(
    f"trainer.{name}" for name in ("output_dir", "resume_mode", "master_addr", "node_rank")
)
LICENCE = ("license", "license_name", "license_link")
COLOURS = ("#1f6fb2", "#c2571a", "#2f8f5b", "#8a4fb0", "#7a7a7a")
WIDTH, HEIGHT, EDGE = 640, 260, 44  # of the curve, in pixels
Points = Sequence[tuple[int, float]]
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Folders of this machine say nothing to others, and may name a person.
_FOLDERS = re.compile(r'(?<=")(?:/|~/)(?:[^"/]+/)+(?=[^"/]+/?")')


def write_card(run: Path, out: Path, *, name: str, step: int, critic: bool) -> None:
    """Write the card of the model of `step` into its folder `out`, and the curve beside it.

    Everything is read from the run folder and, of the base model, from files on this machine.
    """
    config, _ = config_of(run)
    whole = read_metrics(run)
    history = [line for line in whole if line["step"] <= step]
    picture = curve(_series(history))
    if picture:
        (out / CURVE).write_text(redact(picture), encoding="utf-8")
    settings, written_by = settings_of(run)
    values = {key: value for key, value, _ in settings}
    base = str(yaml.safe_load(values.get("model.path", "null")) or UNKNOWN)
    front, told = _base(base)
    front |= {"library_name": "transformers", "tags": ["ppo", "reinforcement-learning"]}
    front |= {} if critic else {"pipeline_tag": "text-generation"}
    chosen = [
        f"{key}: {_shown(key, value)}"
        for key, value, origin in settings
        if origin != DEFAULT and key not in OF_THE_MACHINE
        if config is None or value_of(config, key) != value_of(Config(), key)
    ]
    estimator = yaml.safe_load(values.get("algorithm.adv_estimator", UNKNOWN))
    what = "critic" if critic else "model"
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n# {name}",
        f"The {what} after step {step} of PPO training (advantage estimator: {estimator}).",
        *("\n".join(lines) for lines in (
            ["## Base model", "", *told],
            ["## Data", "", *(_data(config) if config else [UNREADABLE])],
            ["## Reward", "", *(_reward(config) if config else [UNREADABLE])],
            ["## Results", "", *_results(run, history, config)],
            [f"![Reward by step]({CURVE})"] if picture else [],
            ["Judges of the whole run: " + (judge_totals(run, whole) or "none asked") + "."],
            ["## Settings that differ from the defaults", "", "```yaml", *chosen, "```"],
            ["## Versions", "", written_by or UNKNOWN],
        ) if lines),
    ]  # fmt: skip
    (out / CARD).write_text(redact("\n\n".join(parts)) + "\n", encoding="utf-8")


def _base(path: str) -> tuple[dict[str, Any], list[str]]:
    """Front matter about the base model, and the lines that tell its name and licence."""
    known = _own_card(path)
    folder = Path(model_folder(path)).expanduser()
    front = {key: str(known[key]) for key in LICENCE if known.get(key)}
    licence = front.get("license_name") or front.get("license")
    if licence is None and folder.is_dir():
        with suppress(OSError, ValueError, AttributeError):
            licence = json.loads((folder / "config.json").read_bytes()).get("license")
    local = folder.is_dir() or folder.is_absolute() or path == EMBEDDED
    name = f"{path} (ships with ppo-cli)" if path == EMBEDDED else _name(path)
    origin = known.get("base_model") if local else path
    if isinstance(origin, str) and _HUB_NAME.fullmatch(origin):
        front = {"base_model": origin, **front}
        name += f", itself made from {origin}" if local else ""
    return front, [f"- Name: {name}", f"- Licence: {licence or UNKNOWN}"]


def _own_card(path: str) -> dict[str, Any]:
    """Front matter of a model's own card: in its folder, or what was downloaded of the hub's."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.repocard import metadata_load

    card: Any = Path(model_folder(path)).expanduser() / CARD
    with suppress(OSError, ValueError, yaml.YAMLError):
        if not card.exists():
            card = try_to_load_from_cache(path, CARD)
        return (metadata_load(card) if isinstance(card, str | Path) else None) or {}
    return {}


def _data(config: Config) -> list[str]:
    """The prompt files and how many rows are read of them."""
    lines = []
    for title, files, rows in (
        ("Training", config.data.train_files, train_rows(config)),
        ("Validation", config.data.val_files, val_rows(config)),
    ):
        names = ", ".join(map(_name, files))
        counted = f"{rows:,} rows" if rows is not None else f"rows {UNKNOWN}"
        lines.append(f"- {title}: {names}, {counted}" if files else f"- {title}: none")
    return lines


def _reward(config: Config) -> list[str]:
    """What scores responses, a line each."""
    reward = config.reward
    mixed = mixture_of(reward)
    lines = [f"- Mixture: {mixture_line(mixed)}"] if mixed else []
    for judge in judges_of(reward):
        own = judge.settings
        lines.append(f"- LLM {judge.name.removeprefix('the ')}: {own.model} ({own.type})")
        prompt = _name(own.prompt_file) if own.prompt_file else own.prompt_preset
        lines[-1] += f", prompt {prompt}, votes a response: {own.votes}"
    for model in models_of(reward):
        path = _name(str(model.settings.path))
        lines.append(f"- {model.name.removeprefix('the ').capitalize()}: {path}")
    for rule in rules_of(reward):
        if rule.function:
            lines.append(f"- Function: {_name(rule.function)}")
        else:
            lines.append(f"- Rule: {rule.rule or 'chosen by the data_source of each row'}")
    return lines


def _results(run: Path, history: Lines, config: Config | None) -> list[str]:
    """The reward and the validation before and after, as a table."""
    found = summarise(history, run, config or Config(), session=(0, 0.0), resume_command="")
    rows = [("reward", found.reward_before, found.reward_after)]
    rows += [(name, found.before.get(name), after) for name, after in found.after.items()]
    lines = [
        f"| {name} | {_number(before)} | {_number(after)} |"
        for name, before, after in rows
        if after is not None
    ]
    if not lines:
        return ["No step has a reward."]
    heads = ["Before and after are the first and the last tenth of the steps, and the first and",
             "the last validation.", "", "| | before | after |", "|---|---|---|"]  # fmt: skip
    return [*heads, *lines]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{round(value, 9) + 0.0:.4g}"


def _name(path: str) -> str:
    """A path without the folders of this machine; a hub name, a URL or a relative path as it is."""
    return Path(path).name if path.startswith(("/", "~")) else path


def _shown(key: str, value: str) -> str:
    """A setting's YAML without secrets and without the folders that a file lies in."""
    masked = mask_secrets({key: yaml.safe_load(value)})[key]
    return _FOLDERS.sub("", json.dumps(masked, ensure_ascii=False))


def _series(history: Lines) -> dict[str, Points]:
    """What the curve shows: the reward (of a mixture its parts) and the validation."""
    kinds = {name for line in history for name in mixture_parts(line)}
    found: dict[str, list[tuple[int, float]]] = {}
    for line in history:
        own = {f"reward {name}": line.get(f"reward/{name}") for name in sorted(kinds)}
        values = own or {"reward": line.get("reward_mean")}
        accuracy = line.get("val/accuracy")
        values["validation"] = line.get("val/reward_mean") if accuracy is None else accuracy
        for name, value in values.items():
            if value is not None:
                found.setdefault(name, []).append((line["step"], float(value)))
    return {name: points for name, points in found.items() if len(points) > 1}


def curve(series: Mapping[str, Points]) -> str:
    """Draw curves over the step as SVG; an empty text where there is none with two points."""
    steps = [step for points in series.values() for step, _ in points]
    values = [value for points in series.values() for _, value in points]
    if not steps:
        return ""
    (left, right), (low, high) = (min(steps), max(steps)), (min(values), max(values))
    across = (WIDTH - 2 * EDGE) / max(right - left, 1)
    up = (HEIGHT - 2 * EDGE) / ((high - low) or 1.0)
    bottom = HEIGHT - EDGE
    shapes = [
        f'<path d="M{EDGE} {EDGE}V{bottom}H{WIDTH - EDGE}" fill="none" stroke="#888"/>',
        f'<text x="{EDGE - 4}" y="{EDGE + 4}" text-anchor="end">{high:.3g}</text>',
        f'<text x="{EDGE - 4}" y="{bottom}" text-anchor="end">{low:.3g}</text>' * (high > low),
        f'<text x="{EDGE}" y="{bottom + 18}">step {left}</text>',
        f'<text x="{WIDTH - EDGE}" y="{bottom + 18}" text-anchor="end">{right}</text>',
    ]
    for at, (name, points) in enumerate(series.items()):
        colour = COLOURS[at % len(COLOURS)]
        line = " ".join(
            f"{EDGE + (step - left) * across:.1f},{bottom - (value - low) * up:.1f}"
            for step, value in points
        )
        shapes.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        label = f'<text x="{EDGE + 8 + 150 * at}" y="{EDGE - 14}" fill="{colour}">'
        shapes.append(f"{label}{html.escape(name)}</text>")
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#fff"/>', *filter(None, shapes), "</svg>\n",
    ])  # fmt: skip
