"""`ppo export`: write the model of a checkpoint as one folder with a model card; upload it."""

from __future__ import annotations

import html
import json
import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from ppo_cli.atomic import check_out_folder, replace_model
from ppo_cli.config.layers import (
    DEFAULT,
    describe_fork,
)
from ppo_cli.config.mixture import (
    judges_of,
    mixture_line,
    mixture_of,
    models_of,
    other_judges,
    rules_of,
)
from ppo_cli.config.models.bundled import MODELS, model_folder
from ppo_cli.config.models.folder import check_folder, has_template
from ppo_cli.config.models.known_models import JUDGES
from ppo_cli.config.schema.keys import value_of
from ppo_cli.config.schema.reward import ApiReward, Reward
from ppo_cli.config.schema.run import Config, Data
from ppo_cli.config.settle import settle_defaults
from ppo_cli.digests import require_intact_model
from ppo_cli.errors import (
    ConfigError,
    UserError,
    command_line,
    first_line,
    plural,
    replace_flag,
    replace_path,
    shell_name,
)
from ppo_cli.paths import load_json, read_text, user_path
from ppo_cli.planning.batches import train_rows, val_rows
from ppo_cli.report.judge_card import describe_judge_totals, format_dollars
from ppo_cli.report.metrics import (
    Lines,
    mixture_part_means,
    summarise,
)
from ppo_cli.report.page.run_data import read_requests, read_run_config, read_settings
from ppo_cli.report.tracker import Summary
from ppo_cli.report.validation import choose_step, find_best, list_validations
from ppo_cli.run_folder.checkpoints import STEP_NAME, CheckpointStore
from ppo_cli.run_folder.folder import list_ancestors, paid_calls, read_decisions
from ppo_cli.run_folder.lines import plain, read_lines, read_metrics, rollout_file, rollout_steps
from ppo_cli.run_folder.sources import find_model, has_model, recorded_quantization
from ppo_cli.secrets.redact import mask_secrets, redact

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
EXAMPLES, EXAMPLE_CHARACTERS = 2, 600  # validation prompts in the card, and of each text
LICENCES = {"Apache License": "apache-2.0", "MIT License": "mit", "BSD 3-Clause": "bsd-3-clause"}
PRIVATE = "(private address)"
Points = Sequence[tuple[int, float]]
Lineage = Sequence[tuple[Path, int]]  # runs, the oldest first, each with its last step here
_ADDRESS = re.compile(r"""\b(?:https?|wss?)://[^\s"',\]}]+""")
_CALLS, _COST = (re.compile(rf"(val/)?judge(_[^/]+)?/{name}") for name in ("calls", "cost_usd"))
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Paths of this machine are useless to others, and may contain a person's name.
_FOLDERS = re.compile(r'(?<=")(?:/|~/)(?:[^"/]+/)+(?=[^"/]+/?")')


def write_card(run: Path, out: Path, *, name: str, step: int, critic: bool, checked: str) -> None:
    """Write the card and the reward curve of the model of `step` into its folder `out`.

    Everything is read from the run folder and from files of the base model on this machine.
    """
    config, _ = read_run_config(run)
    # A fork's steps come after those of the runs before it, oldest first.
    lineage = [*reversed(list_ancestors(run)), (run, step)]
    history = [line for folder, last in lineage for line in _read_steps(folder, last)]
    summarise_lines = partial(
        summarise,
        run_dir=run,
        config=config or settle_defaults(),
        session=(0, 0.0),
        resume_command="",
    )
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
    decided = read_decisions(run)  # nobody has set these
    chosen = [
        f"{key}: {_public_value(key, value)}"
        for key, value, origin in settings
        if origin != DEFAULT and key not in MACHINE_SETTINGS and key not in decided
        if config is None or value_of(config, key) != value_of(Config(), key)
    ]
    estimator = yaml.safe_load(values.get("algorithm.adv_estimator", UNKNOWN))
    what = "critic" if critic else "model"
    warnings = summarise_lines(_read_steps(run, step)).warnings  # those that the run gave
    findings = [f"- {text.split('. ')[0].rstrip('.')}." for text in warnings]
    parts = [
        f"---\n{yaml.safe_dump(plain(front), sort_keys=False, allow_unicode=True)}---\n\n# {name}",
        f"The {what} after step {step} of PPO training (advantage estimator: {estimator})."
        + _describe_ancestry(lineage, settings),
        *("\n".join(lines) for lines in (
            ["## Base model", "", *base_lines],
            ["## Data", "", *(_describe_data(config.data) if config else [UNREADABLE])],
            ["## Reward", "", *(_describe_reward(run, config.reward) if config else [UNREADABLE])],
            ["## Use it", "", *_list_uses(out, name, critic=critic)],
            ["## Results", "", *_results_table(summarise_lines(history), history)],
            [f"![Reward by step]({CURVE})"] if picture else [],
            [_describe_judge_costs(lineage)],
            ["## Findings of the last step", "", *(findings or ["None."])],
            [] if critic else _list_examples(lineage),
            ["## Settings that differ from the defaults", "", "```yaml", *chosen, "```"],
            ["## Checked", "", f"{checked[0].upper()}{checked[1:]}."],
            ["## Versions", "", written_by or UNKNOWN],
        ) if lines),
    ]  # fmt: skip
    (out / CARD).write_text(redact("\n\n".join(parts)) + "\n", encoding="utf-8")


def _read_steps(run: Path, last: int) -> Lines:
    """Return the metrics of a run up to the step `last`."""
    return [line for line in read_metrics(run) if line["step"] <= last]


def _describe_ancestry(lineage: Lineage, settings: Sequence[tuple[str, str, str]]) -> str:
    """Return a sentence about the runs that a fork was made from; empty without any."""
    forks = [describe_fork(run.name, last, {}) for run, last in lineage[-2::-1]]
    if not forks:
        return ""
    origins = {key: origin for key, _, origin in settings}
    _, _, differs = describe_fork("", 0, origins).partition("; ")
    return f" The run is a {', itself a '.join(forks)}{differs and f'; it {differs}'}."


def _describe_judge_costs(lineage: Lineage) -> str:
    """Return a sentence about the judges of a run, and of the steps that it was forked from."""
    run, _ = lineage[-1]
    text = f"Judges of the entire run: {describe_judge_totals(run, read_metrics(run))}."
    text = text.replace(": .", ": none asked.")
    # The calls of earlier runs after the fork do not count, so the metrics of each step do.
    earlier = [line for folder, last in lineage[:-1] for line in _read_steps(folder, last)]
    calls, cost = (
        math.fsum(v or 0.0 for line in earlier for k, v in line.items() if name.fullmatch(k))
        for name in (_CALLS, _COST)
    )
    if calls:
        whole = cost + math.fsum(float(call["usd"]) for call in paid_calls(run))
        text += f" The steps before the fork: {calls:,.0f} calls, {format_dollars(cost)}; "
        text += f"{format_dollars(whole)} in all."
    return text


def _list_uses(out: Path, name: str, *, critic: bool) -> list[str]:
    """Return commands and code that use the exported folder."""
    if critic:
        return ["```bash", f"ppo train --critic_model {name}", "```"]
    prompt = (
        '[{"role": "user", "content": "Your prompt"}]' if has_template(out) else '"Your prompt"'
    )
    return [
        "```bash", f'ppo generate {name} "Your prompt"', f"vllm serve {name}", "```", "",
        "```python", "from transformers import pipeline", "",
        f'print(pipeline("text-generation", "{name}")({prompt}))', "```",
    ]  # fmt: skip


def _list_examples(lineage: Lineage) -> list[str]:
    """Return the answers to the first validation prompts, of the first and last validation."""
    validations = [
        (run, at) for run, last in lineage for at in rollout_steps(run, "val") if at <= last
    ]
    # The first line of each prompt: several samples have the same.
    answers: dict[Any, dict[int, dict[str, Any]]] = {}
    for run, at in (*validations[:1], *validations[-1:]):
        for line in read_lines(rollout_file(run, at, "val")):
            answers.setdefault((line.get("uid"), line.get("prompt")), {}).setdefault(at, line)
    lines = ["## Examples", "", "Answers to the first prompts of the validation."]
    for (_, prompt), of_step in [item for item in answers.items() if len(item[1]) == 2][:EXAMPLES]:
        texts = {"Prompt": prompt}
        for at, line in sorted(of_step.items()):
            texts[f"Step {at}, score {_number(line.get('score'))}"] = line.get("response")
        for title, text in texts.items():
            # An indented block: no text can end it.
            rows = str(text or "")[:EXAMPLE_CHARACTERS].split("\n")
            lines += ["", f"{title}:", "", *(f"    {row}" for row in rows)]
    return lines if len(lines) > 3 else []


def _describe_base(path: str) -> tuple[dict[str, Any], list[str]]:
    """Return front matter about the base model, and lines with its name and licence."""
    card = _read_card(path)
    folder = user_path(model_folder(path))
    front = {key: str(card[key]) for key in LICENCE if card.get(key)}
    if not front and (licence := _read_licence(folder, path)):
        front["license"] = licence
    licence = front.get("license_name") or front.get("license")
    # The hub links a model to its base: only hub names are given.
    local = folder.is_dir() or folder.is_absolute() or path in MODELS
    name = f"{path} (ships with ppo-cli)" if path in MODELS else _public_name(path)
    origin = card.get("base_model") if local else path
    if isinstance(origin, str) and _HUB_NAME.fullmatch(origin):
        front = {"base_model": origin, **front}
        name += f", itself made from {origin}" if local else ""
    return front, [f"- Name: {name}", f"- Licence: {licence or UNKNOWN}"]


def _read_licence(folder: Path, path: str) -> str | None:
    """Return the licence in a model's config.json, or that of its LICENSE file by its title."""
    if path in MODELS:
        return "apache-2.0"
    with suppress(OSError, ValueError, AttributeError):
        if licence := load_json(read_text(folder / "config.json")).get("license"):
            return str(licence)
    for file in sorted(folder.glob("LICEN[CS]E*")):
        head = file.read_text("utf-8", "replace")[:500]
        return next((word for title, word in LICENCES.items() if title in head), "other")
    return None


def _read_card(path: str) -> dict[str, Any]:
    """Read the front matter of a model's card: from its folder, or from the hub's cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.repocard import metadata_load

    card: Any = user_path(model_folder(path)) / CARD
    with suppress(OSError, ValueError, yaml.YAMLError):
        if not card.exists():
            card = try_to_load_from_cache(path, CARD)
        return (metadata_load(card) if isinstance(card, str | Path) else None) or {}
    return {}


def _describe_data(data: Data) -> list[str]:
    """Return a line for training and validation: the files and the number of rows read."""
    lines = []
    for title, files, rows in (
        ("Training", data.train_files, train_rows(data)),
        ("Validation", data.val_files, val_rows(data)),
    ):
        names = ", ".join(map(_public_name, files))
        counted = plural(rows, "row") if rows is not None else f"rows {UNKNOWN}"
        lines.append(f"- {title}: {names}, {counted}" if files else f"- {title}: none")
    return lines


def _describe_reward(run: Path, reward: Reward) -> list[str]:
    """Return a line for each judge, reward model, rule and function."""
    # A mixture is one line, followed by its parts.
    mixed = mixture_of(reward)
    lines = [f"- Mixture: {mixture_line(mixed)}"] if mixed else []
    for judge, request in zip(judges_of(reward), read_requests(run, reward), strict=True):
        api = judge.settings
        lines.append(f"- LLM {judge.name.removeprefix('the ')}: {api.model} ({api.type})")
        asked = f"prompt {_public_name(api.prompt_file or api.prompt_preset)}"
        if api.rubric is not None:
            asked = f"rubric {_public_name(api.rubric)}"
        lines[-1] += f", {asked}, votes a response: {api.votes}"
        lines[-1] += f" to {api.max_votes}" if api.asks_on else ""
        lines += [f"- Further judge: {other.model} ({other.type})" for other in other_judges(api)]
        lines += _list_criteria(api, request)
    for model in models_of(reward):
        path = _public_name(str(model.settings.path))
        lines.append(f"- {model.name.removeprefix('the ').capitalize()}: {path}")
    for rule in rules_of(reward):
        if rule.function:
            lines.append(f"- Function: {_public_name(rule.function)}")
        else:
            lines.append(f"- Rule: {rule.rule or 'chosen by the data_source of each row'}")
    return lines


def _list_criteria(api: ApiReward, request: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each criterion of a judge's rubric: name, weight and text."""
    if api.rubric is not None and not request["criteria"]:
        gone = f"criteria {UNKNOWN}: the file is not there any more"
        yield f"  - {gone if request['problem'] else 'the criteria of each row'}"
    for row in request["criteria"]:
        facts = [f"weight {row['weight']}", *(["must"] if row.get("must") else [])]
        facts += ["held out: not trained on"] if row.get("held_out") else []
        facts += [f"levels 0 to {row['levels']}"] if "levels" in row else []
        yield f"  - {row['name']} ({', '.join(facts)}): {' '.join(row['text'].split())}"


def _results_table(summary: Summary, history: Lines) -> list[str]:
    """Return a table of reward and validation at the start and the end."""
    lines = [
        f"| {name} | {_number(before)} | {_number(after)} |"
        for name, before, after in summary.measures
    ]
    if not lines:
        return ["No step has a reward."]
    # Of the validations, the first is the base model's own unless its run is gone.
    validated = [line["step"] for line in history if line.get("val/reward_mean") is not None]
    base = f"step {validated[0]}" if validated and validated[0] else "the base model"
    heads = ["Before and after are the first and the last tenth of the steps; for the validation,",
             f"{base} and the last one.", "", "| | before | after |", "|---|---|---|"]  # fmt: skip
    return [*heads, *lines]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{round(value, 9) + 0.0:.4g}"


def _public_name(path: str) -> str:
    """Return an absolute path's last part; hub names, public URLs, relative paths unchanged."""
    return Path(path).name if path.startswith(("/", "~")) else _hide_addresses(path)


def _hide_addresses(text: str) -> str:
    """Replace addresses of servers that are not the providers' public ones."""
    hosts = {urlsplit(judge.url).hostname for judge in JUDGES.values()}
    return _ADDRESS.sub(lambda m: m[0] if urlsplit(m[0]).hostname in hosts else PRIVATE, text)


def _public_value(key: str, value: str) -> str:
    """Return a setting's YAML without secrets and without folders of this machine."""
    masked = mask_secrets({key: yaml.safe_load(value)})[key]
    return _hide_addresses(_FOLDERS.sub("", json.dumps(masked, ensure_ascii=False)))


def _curve_series(history: Lines) -> dict[str, Points]:
    """Return the series of the curve: the reward (or a mixture's parts) and the validation."""
    # Parts of a mixture replace the total reward.
    kinds = {name for line in history for name in mixture_part_means(line)}
    series: dict[str, list[tuple[int, float]]] = {}
    for line in history:
        part_rewards = {f"reward {name}": line.get(f"reward/{name}") for name in sorted(kinds)}
        values = part_rewards or {"reward": line.get("reward_mean")}
        values["validation"] = line.get("val/reward_mean")
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


def export(
    source: Path,
    out: Path,
    *,
    checkpoint: str | None = None,
    critic: bool = False,
    dtype: str | None = None,
    base: str | None = None,
    quantization: str | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
    push: str | None = None,
    public: bool = False,
) -> dict[str, Any]:
    """Write the actor (or critic) of a run or checkpoint to `out` as one Hugging Face folder.

    `checkpoint` is best, latest, a step's folder or a path; None is the step that the page of the
    run recommends, or the latest. The model of a run gets a card. `push` is the hub repository to
    upload to, private unless `public`. Returns what was written, and from where, as a JSON value;
    `step` is None if it is unknown, and `choice` says why it is not the latest.
    """
    if public and push is None:
        raise ConfigError("--public says who can read what --push uploads: add --push NAME.")
    if push is not None:
        _check_hub(push)
    choice = ""
    if checkpoint is None:
        chosen, choice = choose_checkpoint(user_path(source))
        folder = find_model(user_path(source), chosen, critic=critic).resolve()
    else:
        folder = find_model(user_path(source), checkpoint, critic=critic).resolve()
    require_intact_model(folder, partial(_command_with_model, source, checkpoint))
    if base is not None and (folder / "adapter_config.json").exists():
        check_folder(model_folder(base), "--base")
    match = STEP_NAME.match(folder.parent.name)
    step = int(match.group(1)) if match else None
    run = folder.parents[2]
    card = step is not None and (run / "config.yaml").is_file()
    # A card needs the run's config.yaml and metrics.
    _check_target(user_path(out), folder, force=force)
    with replace_model(user_path(out)) as fresh:
        from ppo_cli.engine.export import write_model  # torch, which takes seconds

        written = write_model(
            folder,
            fresh,
            dtype=dtype,
            base=model_folder(base) if base else None,
            quantization=quantization,
            recorded=recorded_quantization(folder),
            trust_remote_code=trust_remote_code,
        )
        if card and step is not None:
            name = out.resolve().name
            checked = written.checked
            checked += f". Merged with the base, {written.merged}" if written.merged else ""
            write_card(run, fresh, name=name, step=step, critic=critic, checked=checked)
    return {
        "out": str(out),
        "use_as": "--critic_model" if written.critic else "--model",
        "source": str(folder),
        "step": step,
        "choice": choice,
        "base": written.base,
        "merged": written.merged,
        "dtype": written.dtype,
        "parameters": written.parameters,
        "bytes": written.bytes,
        "files": list(written.files),
        "checked": written.checked,
        "card": card,
        "pushed": None if push is None else _upload(user_path(out), push, public=public),
    }


def choose_checkpoint(source: Path) -> tuple[str | None, str]:
    """Return the checkpoint that the page of a run recommends, and a remark on the choice.

    None, for the latest, if there is no recommendation.
    """
    steps = CheckpointStore(source / "checkpoints", keep=1).steps()
    validations = list_validations(read_metrics(source))
    step = choose_step(validations, steps)
    if step is None:
        return None, ""
    best, remark = int(find_best(validations)["step"]), ""
    if step != best:
        remark = f"the nearest to step {best}, the best of {len(validations)}, which is not saved"
    elif step != steps[-1]:
        remark = f"the best of {len(validations)} validations"
    if step != steps[-1]:
        remark += f"; --checkpoint latest: step {steps[-1]}"
    return f"step_{step:06d}", remark


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


def _check_target(out: Path, source: Path, *, force: bool) -> None:
    """Raise UserError if the model cannot be written to `--out`, or would replace something else.

    `source` is the model to export. With `force`, a folder with a model may be replaced.
    """
    # --force replaces only models.
    check_out_folder(out)
    place = out.resolve()
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
