"""Reads a run folder for the page: curves, findings, settings and spending, as JSON."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppo_cli.config.layers import describe_fork
from ppo_cli.config.mixture import describe_reward, judges_of, mixture_line, mixture_of
from ppo_cli.config.schema.reward import Reward
from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle_defaults
from ppo_cli.errors import UserError, first_sentence, format_duration, plural
from ppo_cli.planning.config_file import HOLDS, as_yaml
from ppo_cli.report.catalogue import list_cards
from ppo_cli.report.critic import describe_critic
from ppo_cli.report.drift import Opinion
from ppo_cli.report.health import CALM_STEPS, adapt_kl, find_troubles
from ppo_cli.report.judge_card import format_dollars
from ppo_cli.report.limits import Limits
from ppo_cli.report.metrics import (
    DOUBTFUL,
    describe_pretraining,
    read_limits,
    read_pretraining,
    summarise,
)
from ppo_cli.report.tracker import Summary
from ppo_cli.report.validation import (
    ROUNDING,
    count_scores,
    describe_choice,
    describe_gain,
    list_validations,
)
from ppo_cli.run_folder.checkpoints import CheckpointStore
from ppo_cli.run_folder.folder import (
    SPENT,
    WRITTEN_BY,
    is_active,
    paid_calls,
    read_decisions,
    read_fork,
    run_settings,
    run_state,
)
from ppo_cli.run_folder.lines import (
    JUDGES_FILE,
    LABELS_FILE,
    METRICS_FILE,
    PRETRAINING_FILE,
    read_lines,
    read_metrics,
)
from ppo_cli.run_folder.restraints import describe_restraints

# Kind of trouble -> metric whose card shows it; that of the reward shows other troubles.
METRIC_OF_TROUBLE = {
    "collapsed": "reward_mean", "reward_same": "reward_mean", "hacking": "reward_mean",
    "kl_high": "kl_divergence", "kl_low": "kl_divergence", "clip_high": "clip_fraction",
    "clip_low": "clip_fraction", "ratio": "ppo_ratio", "entropy": "entropy",
    "critic": "explained_variance", "grad_norm": "grad_norm", "failed": "score/failed_share",
    "too_long": "response_length/clip_ratio", "never_answers": "thought/unclosed_share",
    "tool_errors": "environment/tool_error_share", "fewer_pieces": "pieces/count_mean",
    "sampler": "rollout/logprob_diff", "judge_changed": "judge/label_drift",
}  # fmt: skip
# A line of config.yaml: indentation, key, value, and the origin as a comment.
_SETTING = re.compile(r"^( *)([\w.-]+):(?: (.*?)  # (.*))?$")
RESUMED = "perf/resumed"


class RunData:
    """One run folder; `read` returns its current data, cached while no file has changed."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self._lock = threading.Lock()
        self._version: tuple[Any, ...] = ()
        self._data: dict[str, Any] = {}
        self._troubles: list[dict[str, str]] = []  # of each line in `_checked`
        self._checked: list[Mapping[str, Any]] = []
        self._people: tuple[Opinion, ...] = ()

    def version(self) -> tuple[Any, ...]:
        """Return a value that changes when a file that the page reads changes."""
        names = METRICS_FILE, PRETRAINING_FILE, "config.yaml", LABELS_FILE
        files = [self.folder / name for name in names]
        states = [f.stat() for f in [*files, *sorted(self.folder.glob(SPENT))] if f.exists()]
        saved = CheckpointStore(self.folder / "checkpoints", 1).steps()
        return (*((s.st_size, s.st_mtime_ns) for s in states), *saved, is_active(self.folder))

    def read(self) -> dict[str, Any]:
        """Return the run as a dictionary for JSON; base.js and curves.js show its keys."""
        with self._lock:
            version = self.version()
            if version != self._version:
                self._data, self._version = self._read(), version
            return self._data

    def _read(self) -> dict[str, Any]:
        """Read all files of the run and compute curves, cards, findings and spending."""
        history = read_metrics(self.folder)
        config, note = read_run_config(self.folder)
        saved = CheckpointStore(self.folder / "checkpoints", 1).steps()
        # Ranges of the run's settings; labels of people measure the judge's drift.
        run_config = config or settle_defaults()
        limits = read_limits(self.folder, run_config)
        total = limits.total_steps if config else None
        summary = summarise(history, self.folder, run_config)
        validations = list_validations(history)
        steps = [int(line["step"]) for line in history]
        keys = _drop_repeated_keys(
            {key for line in history for key in line} - {"step", RESUMED},
            accurate=bool(validations) and "val/accuracy" in validations[0],
        )
        series = {key: [_round_for_curve(line.get(key)) for line in history] for key in keys}
        findings = self._find_trouble_spans(history, limits)
        spent = _summarise_spending(self.folder, history)
        settings, written_by = read_settings(self.folder)
        return {
            "name": self.name,
            "verdict": describe_verdict(summary, total, validations, findings, spent["usd"]),
            "facts": list_facts(self.folder, history, config, total, spent["usd"]),
            "answers": answer_questions(summary, run_config, saved, validations),
            "next": summary.next_steps[1:],  # without the page
            "note": note,
            "steps": steps,
            "total": total,
            "series": series,
            "cards": list_cards(series, adapt_kl(history, limits), findings),
            "findings": findings,
            "marks": {
                "checkpoints": saved,
                "restarts": [line["step"] for line in history if line.get(RESUMED)],
            },
            "settings": settings,
            "machine": written_by,
            "reward": describe_judging(self.folder, config.reward if config else None),
            "judge": summary.judge,
            "episodes": summary.episodes,
            "spent": spent,
            "critic": describe_critic(self.folder),
        }

    def _find_trouble_spans(
        self, history: Sequence[Mapping[str, Any]], limits: Limits
    ) -> list[dict[str, Any]]:
        """Return the troubles of all steps as spans (first and last step, text), oldest first.

        Up to CALM_STEPS steps without the trouble do not end a span. Only new steps are checked,
        unless earlier ones or the labels changed.
        """
        if history[: len(self._checked)] != self._checked or limits.people != self._people:
            self._troubles.clear()
        self._people = limits.people
        # Check each new step with the history up to it, as the run did.
        for end in range(len(self._troubles) + 1, len(history) + 1):
            part = history[:end]
            self._troubles.append(find_troubles(part, limits) if part[-1]["step"] > 0 else {})
        self._checked = list(history)
        # Join steps with the same trouble to spans, unless calm steps lie between.
        spans: list[dict[str, Any]] = []
        last: dict[str, dict[str, Any]] = {}
        for line, troubles in zip(history, self._troubles, strict=True):
            step = line["step"]
            for kind, text in troubles.items():
                span = last.get(kind)
                if span is None or step - span["to"] > CALM_STEPS:
                    span = last[kind] = {
                        "kind": kind, "from": step,
                        "key": METRIC_OF_TROUBLE.get(kind, "reward_mean"),
                    }  # fmt: skip
                    spans.append(span)
                span |= {"to": step, "text": text}
        for span in spans:
            span["now"] = span["to"] == history[-1]["step"]
        return spans


def _drop_repeated_keys(keys: set[str], *, accurate: bool) -> list[str]:
    """Return sorted metric keys without redundant ones, such as the only part of a reward.

    If `accurate`, the mean score of each validation is its accuracy.
    """
    for start in ("reward/", "val/reward/", "val/reward_mean/"):
        parts = {key for key in keys if re.fullmatch(f"{start}[^/]+", key)}
        keys = keys - parts if len(parts) == 1 else keys
    return sorted(keys - {"val/reward_mean" if accurate else "val/accuracy"})


def list_facts(
    folder: Path,
    history: Sequence[Mapping[str, Any]],
    config: Config | None,
    total: int | None,
    usd: float,
) -> list[tuple[str, str]]:
    """Return the facts at the top of the page: state, step, time, cost, model, data, reward.

    `total` is the number of steps of the whole run, None if it is unknown.
    """
    last = history[-1] if history else {"step": 0}
    step = int(last["step"])
    state = run_state(folder, step, total)
    saved = CheckpointStore(folder / "checkpoints", 1).newest_step()
    newest = "no checkpoint" if saved is None else f"newest checkpoint: step {saved}"
    facts = [
        ("state", f"failed, {newest}" if state == "failed" else state),
        ("step", f"{step} of {total}" if total else str(step)),
    ]
    if state == "running" and last.get("time/left_s"):
        facts.append(("time left", format_duration(last["time/left_s"])))
    facts.append(("time so far", format_duration(last.get("time/run_s") or 0.0)))
    pretraining = read_pretraining(folder)
    if usd:
        # Steps cost about the same, so the cost of the whole run follows from the steps so far.
        before, in_all = len(pretraining), ""
        if total and step:
            all_usd = usd / (before + step) * (before + total)
            in_all = f", about {format_dollars(all_usd)} in all"
        facts.append(("judge cost", format_dollars(usd) + (in_all if state != "done" else "")))
    if config is None:
        return facts
    facts += [
        ("model", config.model.path),
        ("data", ", ".join(config.data.train_files)),
        ("reward", describe_reward(config.reward)),
    ]
    if pretraining:
        text = describe_pretraining(config.pretraining, pretraining)
        facts.append(("critic", text.removeprefix("critic ")))
    if restrained := describe_restraints(folder):
        facts.append(("restrained", restrained))
    if fork := describe_fork_of(folder):
        facts.append(("forked from", fork.removeprefix("fork of ")))
    return facts


def describe_judging(folder: Path, reward: Reward | None) -> dict[str, Any]:
    """Return the weights of a run's mixture, and what each of its judges was asked."""
    parts = mixture_of(reward) if reward else ()
    return {
        "formula": mixture_line(parts) if parts else "",
        "weights": {part.name: part.weight for part in parts},
        "judges": read_requests(folder, reward) if reward else [],
    }


def read_requests(folder: Path, reward: Reward) -> list[dict[str, Any]]:
    """Return what each judge of a run was asked, as `describe_request` does.

    Older runs have not recorded it: then it is read from the judge's files as they are now.
    """
    from ppo_cli.rewards.judge.prompt import describe_request

    recorded = {line.get("part"): line for line in read_lines(folder / JUDGES_FILE)}
    started = (folder / "config.yaml").stat().st_mtime
    return [
        recorded.get(judge.part) or {"part": judge.part} | describe_request(judge.settings, started)
        for judge in judges_of(reward)
    ]


def answer_questions(
    summary: Summary,
    config: Config,
    saved: Sequence[int],
    validations: Sequence[Mapping[str, Any]],
) -> list[tuple[str, str, str]]:
    """Return (question, answer, metric that shows it): which step to keep, is the gain real."""
    folder, doubtful = summary.run_dir, summary.verdict == DOUBTFUL
    key = _card_key("validation", validations)
    scores = count_scores(config.data, config.rollout)
    return [
        ("step to keep", describe_choice(validations, folder, config.data, saved), key),
        ("is the gain real?", describe_gain(validations, folder, scores, doubtful=doubtful), key),
    ]


def describe_verdict(
    summary: Summary,
    total: int | None,
    validations: Sequence[Mapping[str, Any]],
    findings: Sequence[Mapping[str, Any]],
    usd: float,
) -> list[tuple[str, str]]:
    """Return the verdict on a run: what changed, the findings of its last step, and the cost.

    It is a list of texts, each with the metric that shows it, or "".
    """
    steps = summary.steps
    if not steps and not validations:
        return [("No step is finished yet.", "")]
    length = f"{steps} of {total} steps" if total and steps < total else plural(steps, "step")
    if summary.first_step > 1:  # a fork counts on from its run
        length = f"steps {summary.first_step} to {steps}"
    # First and last values of the main measures; the verdict follows from the validation.
    measures = [
        (
            f"{name} {'' if before is None else f'{_format_value(before)} to '}"
            f"{_format_value(after)}",
            _card_key(name, validations),
        )
        for name, before, after in sorted(
            summary.measures, key=lambda measure: not measure[0].startswith("validation")
        )[:3]
    ]
    # The first sentence of each finding; its card and the list below the curves have the advice.
    checks = [(first_sentence(span["text"]), span["key"]) for span in findings if span["now"]]
    pieces = [(f"{summary.verdict}: ", ""), *_join(measures or [("no reward yet", "")], ", ")]
    pieces.append((f" in {length}. {'Check: ' if checks else 'Nothing to check.'}", ""))
    pieces += [*_join(checks, "; "), (".", "")] if checks else []
    return [*pieces, (f" Judge {format_dollars(usd)}.", "")] if usd else pieces


def _join(pieces: Sequence[tuple[str, str]], separator: str) -> list[tuple[str, str]]:
    """Return pieces of a sentence with a separator between them."""
    return [part for piece in pieces for part in ((separator, ""), piece)][1:]


def _card_key(measure: str, validations: Sequence[Mapping[str, Any]]) -> str:
    """Return the metric that shows a measure of the summary, such as `validation accuracy`."""
    if measure.startswith("reward"):
        return measure.replace(" ", "/", 1) if measure != "reward" else "reward_mean"
    accuracy = any(line.get("val/accuracy") is not None for line in validations)
    return "val/accuracy" if accuracy else "val/reward_mean" if validations else ""


def _format_value(value: float) -> str:
    """Return a number with two decimals, or with two significant digits if it is small."""
    if abs(value) >= 0.1 or abs(value) < ROUNDING:
        return f"{abs(value) if abs(value) < ROUNDING else value:.2f}"
    return f"{value:.2g}"


def _round_for_curve(value: Any) -> float | None:
    """Return a number with six digits, which halves the page and is enough for a curve."""
    return None if value is None else float(f"{float(value):.6g}")


def read_run_config(folder: Path) -> tuple[Config | None, str]:
    """Return the settings of a run and ""; None and a note if they cannot be read."""
    if not (folder / "config.yaml").exists():
        return None, "The folder has no config.yaml: ranges are those of the default settings."
    try:
        return run_settings(folder), ""
    except UserError as error:
        message = str(error).splitlines()[0]
        return None, f"config.yaml cannot be read ({message}): ranges are those of the defaults."


def read_settings(folder: Path) -> tuple[list[tuple[str, str, str]], str]:
    """Return (key, value that held, origin) of each setting of a run, and what wrote them."""
    file = folder / "config.yaml"
    if not file.is_file():
        return [], ""
    settings, groups, written_by = [], list[tuple[int, str]](), ""
    decided = read_decisions(folder)
    # The origins are comments, which YAML parsers drop, so lines are parsed here.
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        if line.startswith(WRITTEN_BY):
            written_by = line.removeprefix(WRITTEN_BY)
        if match := _SETTING.match(line):
            indent, key, value, origin = len(match[1]), match[2], match[3], match[4]
            groups = [(depth, name) for depth, name in groups if depth < indent] + [(indent, key)]
            if value is not None:
                name = ".".join(name for _, name in groups)
                value = as_yaml(decided[name]) if name in decided else value
                settings.append((name, value, origin.partition(HOLDS)[0]))
    return settings, written_by


def describe_fork_of(folder: Path) -> str:
    """Return of which run at which step a run is a fork, and what differs; empty if it is none."""
    fork = read_fork(folder)
    origins = {key: origin for key, _, origin in read_settings(folder)[0]}
    return describe_fork(str(fork[0]), fork[1], origins) if fork else ""


def _summarise_spending(folder: Path, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the spending of a run: dollars, and table rows with time, tokens and judge cost."""
    calls = paid_calls(folder)
    models = Counter(str(call.get("model")) for call in calls)
    tokens = {kind: sum(int(call.get(kind) or 0) for call in calls) for kind in ("input", "output")}
    seconds = float(history[-1].get("time/run_s") or 0.0) if history else 0.0
    per_step = [line for line in history if line.get("time/step_s") and line["step"] > 0]
    trained = sum(
        float(line.get("perf/tokens_per_s") or 0.0) * line["time/step_s"] for line in per_step
    )
    usd = sum(float(call["usd"]) for call in calls)
    rows = [["time", format_duration(seconds)], ["tokens trained on", f"{trained:,.0f}"]]
    if calls:
        rows += [["judge models", ", ".join(models)]]
        rows += [["judge tokens", f"{tokens['input']:,} in, {tokens['output']:,} out"]]
    return {"usd": usd, "rows": rows}
