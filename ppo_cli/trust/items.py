"""The tasks of an audit, bundled or the user's, and the scale on which it measures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from statistics import median
from typing import Any

import yaml

from ppo_cli.config.reward_schema import Reward as RewardSettings
from ppo_cli.errors import ConfigError, did_you_mean
from ppo_cli.records import Prompt
from ppo_cli.trust.rows import Answered, read_answered
from ppo_cli.trust.sources import default_items

# Rules are chosen by data_source: the bundled sums end as gsm8k's solutions do.
SOURCES = {"math": "gsm8k", "code": "code", "dialogue": "dialogue", "safety": "safety"}
LONGEST_ANSWER = 200


@dataclass(frozen=True)
class Item:
    """One task with responses whose worth is known; an empty one is not known."""

    place: str
    prompt: Prompt
    good: str = ""
    partial: str = ""
    bad: str = ""

    @property
    def weak(self) -> str:
        """What attacks are built on: a response that earns little by itself."""
        return self.bad or "I do not know the answer."

    @property
    def own(self) -> str:
        """The best response that is there, to be padded and asked about twice."""
        return self.good or self.partial or self.weak


@lru_cache(maxsize=1)
def bundled() -> Mapping[str, Sequence[Mapping[str, str]]]:
    """The tasks that ship with the program, by the name of the judge prompt they suit."""
    text = files("ppo_cli.trust").joinpath("items.yaml").read_text(encoding="utf-8")
    found: Mapping[str, Sequence[Mapping[str, str]]] = yaml.safe_load(text)
    return found


def load_items(
    settings: RewardSettings,
    *,
    file: str | None,
    preset: str | None,
    most: int,
    prompt_key: str = "prompt",
    source_key: str = "data_source",
) -> list[Item]:
    """Return up to `most` tasks: the rows of `file`, else those bundled for the judge prompt."""
    if most < 1:
        raise ConfigError(f"--rows {most}: an audit needs at least one row.")
    if file is not None and preset is not None:
        raise ConfigError("--data and --items are both set; keep one.")
    if file is not None:
        found = read_answered(file, prompt_key=prompt_key, source_key=source_key, response_key=None)
        return _from_rows(found.rows)[:most]
    name = preset or default_items(settings)
    if name not in bundled():
        known = ", ".join(bundled())
        raise ConfigError(
            f"--items {name}: there is no such set.{did_you_mean(name, bundled())} Known: {known}."
        )
    items = []
    for n, row in enumerate(bundled()[name][:most], start=1):
        prompt = plain_prompt(f"{name}:{n}", row["prompt"], row["ground_truth"], SOURCES[name])
        items.append(Item(f"{name} {n}", prompt, row["good"], row["partial"], row["bad"]))
    return items


def plain_prompt(
    uid: str,
    text: str,
    ground_truth: Any = None,
    data_source: str = "",
    extra_info: Mapping[str, Any] | None = None,
) -> Prompt:
    """A prompt of one user message."""
    messages = ({"role": "user", "content": text},)
    return Prompt(uid, text, messages, "", (), data_source, ground_truth, extra_info or {})


def _from_rows(rows: Sequence[Answered]) -> list[Item]:
    """Rows to tasks: `good`, `partial` and `bad` columns where there are, else the ground truth.

    A short ground truth states a right answer, and that of another row a wrong one.
    """
    truths = [_text(row.rollout.prompt.ground_truth) for row in rows]
    truths = [text if len(text) <= LONGEST_ANSWER else "" for text in truths]
    items = []
    for index, (row, truth) in enumerate(zip(rows, truths, strict=True)):
        good, partial, bad = (_text(row.record.get(name)) for name in ("good", "partial", "bad"))
        around = [*truths[index + 1 :], *truths[:index]]
        wrong = next((other for other in around if other and other != truth), "")
        items.append(
            Item(
                place=str(row.place),
                prompt=row.rollout.prompt,
                good=good or (_stated(truth) if truth else ""),
                partial=partial or row.rollout.text,
                bad=bad or (_stated(wrong) if truth and wrong else ""),
            )
        )
    return items


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return (value or "").strip()
    return json.dumps(value, ensure_ascii=False, default=str)


def _stated(answer: str) -> str:
    return answer if "####" in answer else f"The answer is {answer}.\n#### {answer}"


Key = tuple[str, str]
INSIDE = 1e-9


@dataclass(frozen=True)
class Ruler:
    """Places scores; `unit` is None where nothing is there to measure by."""

    unit: float | None = 1.0
    zeros: Mapping[str, float] | None = None
    gaps: tuple[float, ...] = field(default=(), compare=False)

    @property
    def free(self) -> bool:
        """Whether the scale is the reward's own."""
        return self.zeros is not None

    def zero(self, uid: str) -> float | None:
        """The score of a prompt's bad answer; 0 where scores lie between 0 and 1."""
        return 0.0 if self.zeros is None else self.zeros.get(uid)


def ruler_for(
    items: Sequence[Item], values: Mapping[Key, float | None], *, own_scale: bool
) -> Ruler:
    """Measure from 0 to 1; by the answers of known worth where scores have a scale of their own."""
    known = [value for value in values.values() if value is not None]
    if not own_scale and all(-INSIDE <= value <= 1 + INSIDE for value in known):
        return Ruler()
    zeros: dict[str, float] = {}
    gaps = []
    for item in items:
        bad = values.get((item.prompt.uid, item.weak))
        good = values.get((item.prompt.uid, item.good)) if item.good else None
        if bad is not None:
            zeros[item.prompt.uid] = bad
        if bad is not None and good is not None and item.bad:
            gaps.append(good - bad)
    unit = median(gaps) if gaps else 0.0
    return Ruler(unit if unit > 0 else None, zeros, tuple(gaps))


def why_none(ruler: Ruler) -> str:
    """Say why nothing can be measured."""
    if not ruler.gaps:
        return "these rows hold no good and bad answers to measure by"
    return "good answers do not score above bad ones here, so there is nothing to measure by"
