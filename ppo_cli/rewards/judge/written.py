"""What a person writes for a judge: YAML files, and the scale that a prompt names.

A scale is `LOW-HIGH` as a setting, or the one range that a scoring prompt names. A range counts
only where the words around it say that it is one of scores ("Score 1-10", "on a scale of 1 – 7",
"from 0 to 5"); "1-2 sentences" never does.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ppo_cli.config.layers import read_settings_text, yaml_problem
from ppo_cli.config.schema.reward import parse_scale_bounds
from ppo_cli.config.schema.values import load_yaml
from ppo_cli.errors import ConfigError, RewardError, did_you_mean
from ppo_cli.rewards.judge.calls import Scale

M = TypeVar("M", bound=BaseModel)


class FileModel(BaseModel):
    """A group of keys in such a file; nothing is converted, and no key may be unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, mapping: Any) -> Any:
        known_keys = list(cls.model_fields)
        if not isinstance(mapping, dict):
            raise ValueError(f"there must be keys here: {', '.join(known_keys)}")
        unknown = [key for key in mapping if key not in known_keys]
        if unknown:
            problems = [f"'{key}'.{did_you_mean(str(key), known_keys)}" for key in unknown]
            raise ValueError(
                f"there is no key {' And no key '.join(problems)} Known: {', '.join(known_keys)}"
            )
        return mapping


def read_file(path: Path, model: type[M], label: str) -> M:
    """Read such a file; RewardError names the file (by `label`) and every mistake in it."""
    try:
        return model.model_validate(read_yaml(path, label))
    except ValidationError as error:
        problems = [_problem(label, **problem) for problem in error.errors()]
        raise RewardError("\n".join(problems)) from None


def read_yaml(path: Path, label: str) -> Any:
    """Return what a YAML or JSON file holds; RewardError names it by `label`, and the line."""
    try:
        return load_yaml(read_settings_text(path, label))
    except ConfigError as error:
        raise RewardError(str(error)) from None
    except yaml.YAMLError as error:
        raise RewardError(yaml_problem(error, label)) from None


def _problem(label: str, *, type: str, loc: tuple[Any, ...], msg: str, input: Any, **_: Any) -> str:
    where = ".".join(str(part + 1 if isinstance(part, int) else part) for part in loc)
    place = f"{label}, key {where}" if where else label
    if type == "missing":
        return f"{place}: the key is missing."
    if type == "value_error":
        return f"{place}: {msg.removeprefix('Value error, ')}."
    return f"{place}: {msg.replace('Input should be', 'must be')}, but is {input!r}."


DEFAULT = Scale(1, 10)
NUMBER = r"(?<![A-Za-z0-9_.,/-])(?P<low>-?\d{1,4}(?:\.\d+)?)"
GLOSS = r"(?:\s*[(（][^()（）\n]{1,60}[)）])?"  # the "(worst)" in "1 (worst) to 10 (best)"
DASH = r"-|–|—|−|~|〜|～|\.\.\.?|to|through|and|到|至"
TOP = r"(?P<high>-?\d{1,4}(?:\.\d+)?)(?![\w]*\d|[.,/]\d|-\d)"
RANGE = re.compile(rf"{NUMBER}{GLOSS}\s*(?P<dash>{DASH})\s*{TOP}", re.IGNORECASE)
BRACKETS = re.compile(r"[\[(](?P<low>-?\d{1,4}(?:\.\d+)?)\s*,\s*(?P<high>-?\d{1,4}(?:\.\d+)?)[\])]")
OUT_OF = re.compile(r"(?:\bout of\s+|(?<![\d\w])/\s?|\w/)(?P<high>10|5|100|7|20)(?![\w.,/]*\d)")

CUE = (
    r"(?:scor(?:e|es|ed|ing)|rat(?:e|ed|ing)|ratings|grad(?:e|ed|ing)|scale|marks?|verdict|points?"
    r"|打分|评分|分数|得分|分值|评级)"
)
# Words that may stand between the cue and its range without changing what the range is of.
GLUE = (
    r"(?:it|them|the|this|that|each|its|his|her|their|your|overall|final|total|response|responses"
    r"|answer|answers|reply|quality|from|between|of|on|a|an|as|in|is|with|to|by|at|using|scale"
    r"|range|ranges|ranging|score|scores|rating|integer|number|whole|single|value|be|should|must"
    r"|will|one|give|assign|output|return|only|inclusive|points?|为|是|从|在|范围|请|给出|整数)"
)
BEFORE = re.compile(rf"{CUE}(?:[\s:：=*_`\"'(（\[,，]|{GLUE}\b){{0,16}}$", re.IGNORECASE)
AFTER = re.compile(
    r"\s*[-\])）]?\s*(?:%\s*)?(?:[-\s]?point)?\s*(?:scale\b|points?\b|stars?\b|score\b|scores\b"
    r"|rating\b|marks\b|[打评]?分)",
    re.IGNORECASE,
)
SPAN_WORDS = re.compile(
    r"(?:from|between|从|(?:scale|range) of|range|(?:integer|number) in)\s*$", re.IGNORECASE
)
ENDS_THERE = re.compile(
    r"\s*(?:$|[\n.;:,!)\]）。；：，！}（(]|%|where\b|with\b|for\b|based\b|according\b|inclusive\b"
    r"|being\b|depending\b|in which\b|how\b|by\b|and (?:nothing|no)\b)",
    re.IGNORECASE,
)
VERBS = re.compile(
    r"\b(?:scor|rat(?:e|ing)|grad(?:e|ing)|mark|give|assign|evaluat|judge|return|output|repl"
    r"(?:y|ies)|respond)|分|^\s*(?:from|between)\s*$",
    re.IGNORECASE,
)
PLACES = re.compile(
    r"\b(?:page|pages|chapters?|steps?|lines?|items?|sections?|rows?|days?|years?|ages?"
    r"|paragraphs?|turns?|levels?|parts?|questions?|sentences?|words?)\s+(?:from|between|in)?\s*$",
    re.IGNORECASE,
)
SENTENCE = re.compile(r"[.!?。！？\n]")


class Span(NamedTuple):
    """A range of numbers in a text, and whether it is one of scores."""

    low: str
    high: str
    of_scores: bool


def parse_scale(text: str, where: str) -> Scale:
    """Read `LOW-HIGH`; `where` names the flag or key in the error."""
    try:
        return Scale(*parse_scale_bounds(text))
    except ValueError as error:
        raise RewardError(f"{where}: {error}.") from None


def named_scale(text: str, where: str) -> Scale:
    """Return the scale that a scoring prompt names, 1-10 when it names none.

    Ranges that are bands of a wider one ("1-3 poor, 4-7 fair, 8-10 good") do not count. With
    two scales, or one of decimals, there is no telling: a RewardError asks for --rm_scale.
    """
    spans = [*_spans(text, RANGE), *_spans(text, BRACKETS)]
    scored = [span for span in spans if span.of_scores]
    if any("." in span.low + span.high for span in scored):
        raise RewardError(
            f"{where}: it asks for scores with decimals; a judge gives whole numbers here. "
            "Ask for a wider range, such as 0-100, or set --rm_scale."
        )
    ranges = {(int(s.low), int(s.high)) for s in scored if int(s.low) < int(s.high)}
    wide = _widest(ranges)
    if not ranges:
        return _top_only(text)
    if wide is None or _goes_on(wide, spans):
        named = ", ".join(f"{low}-{high}" for low, high in sorted(ranges))
        raise RewardError(
            f"{where}: it is not clear which scale it means ({named}). Set --rm_scale LOW-HIGH."
        )
    return Scale(*wide)


def _spans(text: str, pattern: re.Pattern[str]) -> list[Span]:
    return [
        Span(m["low"], m["high"], _is_of_scores(text, m, sure=pattern is not BRACKETS))
        for m in pattern.finditer(text)
    ]


def _is_of_scores(text: str, match: re.Match[str], *, sure: bool) -> bool:
    before, after = text[max(0, match.start() - 200) : match.start()], text[match.end() :][:60]
    if PLACES.search(before):
        return False
    if BEFORE.search(before) and (AFTER.match(after) or ENDS_THERE.match(after)):
        return True
    if not sure:
        return False
    if match.groupdict().get("dash", "").lower() == "and" and not SPAN_WORDS.search(before):
        return False
    if AFTER.match(after):
        return True
    sentence = SENTENCE.split(before)[-1]
    return bool(SPAN_WORDS.search(sentence) and VERBS.search(sentence) and ENDS_THERE.match(after))


def _widest(ranges: set[tuple[int, int]]) -> tuple[int, int] | None:
    """The only range, or the one that all others are bands of; else None."""
    if len(ranges) < 2:
        return next(iter(ranges), None)
    low, high = min(r[0] for r in ranges), max(r[1] for r in ranges)
    bands = sorted(ranges - {(low, high)})
    apart = all(a[1] < b[0] for a, b in pairwise(bands))
    return (low, high) if (low, high) in ranges and len(bands) > 1 and apart else None


def _goes_on(wide: tuple[int, int], spans: list[Span]) -> bool:
    """Tell whether another range begins where this one ends: then it is only a band."""
    others = [s for s in spans if "." not in s.low + s.high]
    return any(int(s.low) in (wide[1], wide[1] + 1) for s in others if int(s.high) > wide[1])


def _top_only(text: str) -> Scale:
    """A text with `/5` or `out of 5` names only the best score; the lowest is then 1."""
    tops = {int(match["high"]) for match in OUT_OF.finditer(text)}
    return Scale(1, tops.pop()) if len(tops) == 1 else DEFAULT
