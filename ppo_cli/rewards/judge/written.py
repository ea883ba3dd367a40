"""Reads what users write for a judge: YAML files, and the scale that a scoring prompt names.

A scale is `LOW-HIGH` in a setting, or the only range of scores in a scoring prompt. A range counts
where the words around it say that it is one of scores ("Score 1-10", "on a scale of 1 – 7", "from 0
to 5"); "1-2 sentences" does not.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ppo_cli.config.layers import (
    read_settings_text,
    yaml_problem,
)
from ppo_cli.config.schema.reward import parse_scale_bounds
from ppo_cli.config.schema.values import load_yaml
from ppo_cli.errors import ConfigError, RewardError, did_you_mean
from ppo_cli.rewards.judge.calls import Scale

M = TypeVar("M", bound=BaseModel)


class FileModel(BaseModel):
    """A mapping in a YAML file: values are not converted, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, mapping: Any) -> Any:
        """Return the mapping if all its keys are fields.

        Raises ValueError for unknown keys, with the nearest fields, and for a value that is not a
        mapping.
        """
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
    """Read a YAML file into a model; RewardError names the file as `label`, and every mistake."""
    content: M = _read_text(_read(path, label), model, label)
    return content


@lru_cache(maxsize=32)  # each judge of a run reads the same prices and prompts
def _read_text(text: str, model: type[M], label: str) -> M:
    try:
        return model.model_validate(_parse(text, label))
    except ValidationError as error:
        problems = [_problem(label, **problem) for problem in error.errors()]
        raise RewardError("\n".join(problems)) from None


def read_yaml(path: Path, label: str) -> Any:
    """Return the content of a YAML or JSON file; RewardError names it as `label`, and the line."""
    return _parse(_read(path, label), label)


def _read(path: Path, label: str) -> str:
    try:
        return read_settings_text(path, label)
    except ConfigError as error:
        raise RewardError(str(error)) from None


def _parse(text: str, label: str) -> Any:
    try:
        return load_yaml(text)
    except yaml.YAMLError as error:
        raise RewardError(yaml_problem(error, label)) from None


def _problem(label: str, *, type: str, loc: tuple[Any, ...], msg: str, input: Any, **_: Any) -> str:
    """Return the message for one of pydantic's errors: file, key, and what is wrong."""
    where = ".".join(str(part + 1 if isinstance(part, int) else part) for part in loc)
    place = f"{label}, key {where}" if where else label
    if type == "missing":
        return f"{place}: the key is missing."
    if type == "value_error":
        return f"{place}: {msg.removeprefix('Value error, ')}" + "." * (msg[-1] not in ".?")
    return f"{place}: {msg.replace('Input should be', 'must be')}, but is {input!r}."


DEFAULT = Scale(1, 10)
# --- forms of a range: "1-10", "1 (worst) to 10 (best)", "[0, 5]", "/5", "out of 5" ---
NUMBER = r"(?<![A-Za-z0-9_.,/-])(?P<low>-?\d{1,4}(?:\.\d+)?)"
GLOSS = r"(?:\s*[(（][^()（）\n]{1,60}[)）])?"  # "(worst)"
DASH = r"-|–|—|−|~|〜|～|\.\.\.?|to|through|and|到|至"
TOP = r"(?P<high>-?\d{1,4}(?:\.\d+)?)(?![\w]*\d|[.,/]\d|-\d)"
RANGE = re.compile(rf"{NUMBER}{GLOSS}\s*(?P<dash>{DASH})\s*{TOP}", re.IGNORECASE)
BRACKETS = re.compile(r"[\[(](?P<low>-?\d{1,4}(?:\.\d+)?)\s*,\s*(?P<high>-?\d{1,4}(?:\.\d+)?)[\])]")
OUT_OF = re.compile(r"(?:\bout of\s+|(?<![\d\w])/\s?|\w/)(?P<high>10|5|100|7|20)(?![\w.,/]*\d)")

# --- words around a range of scores ---
CUE = (
    r"(?:scor(?:e|es|ed|ing)|rat(?:e|ed|ing)|ratings|grad(?:e|ed|ing)|scale|marks?|verdict|points?"
    r"|打分|评分|分数|得分|分值|评级)"
)
# Words between the cue and its range that do not change what the range is of.
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
# Words before "0 to 5" that need a verb of scoring in the same sentence.
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
# "pages 1-10" is not a range of scores.
PLACES = re.compile(
    r"\b(?:page|pages|chapters?|steps?|lines?|items?|sections?|rows?|days?|years?|ages?"
    r"|paragraphs?|turns?|levels?|parts?|questions?|sentences?|words?)\s+(?:from|between|in)?\s*$",
    re.IGNORECASE,
)
SENTENCE = re.compile(r"[.!?。！？\n]")


class Span(NamedTuple):
    """A range of numbers in a text, and whether it is a range of scores."""

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

    Bands of a wider range ("1-3 poor, 4-7 fair, 8-10 good") do not count. Two scales, or one of
    decimals, are ambiguous: a RewardError asks for --rm_scale.
    """
    spans = [*_spans(text, RANGE), *_spans(text, BRACKETS)]
    scored = [span for span in spans if span.of_scores]
    if any("." in span.low + span.high for span in scored):
        raise RewardError(
            f"{where}: it asks for scores with decimals; a judge gives whole numbers here. "
            "Ask for a wider range, such as 0-100, or set --rm_scale."
        )
    # Distinct ranges of scores; bands of a wider one are merged.
    ranges = {(int(s.low), int(s.high)) for s in scored if int(s.low) < int(s.high)}
    wide = _widest(ranges)
    if not ranges:
        # `/N` or `out of N` means 1 to N.
        tops = {int(match["high"]) for match in OUT_OF.finditer(text)}
        return Scale(1, tops.pop()) if len(tops) == 1 else DEFAULT
    # A range is only a band if another one begins where it ends.
    others = [(int(s.low), int(s.high)) for s in spans if "." not in s.low + s.high]
    if wide is None or any(low - wide[1] in (0, 1) and high > wide[1] for low, high in others):
        named = ", ".join(f"{low}-{high}" for low, high in sorted(ranges))
        raise RewardError(
            f"{where}: it is not clear which scale it means ({named}). Set --rm_scale LOW-HIGH."
        )
    return Scale(*wide)


def _spans(text: str, pattern: re.Pattern[str]) -> list[Span]:
    return [
        Span(m["low"], m["high"], _is_score_range(text, m, sure=pattern is not BRACKETS))
        for m in pattern.finditer(text)
    ]


def _is_score_range(text: str, match: re.Match[str], *, sure: bool) -> bool:
    """Return whether the words around a range say that it is the range of the score.

    A range in brackets (not `sure`) must follow BEFORE. Others may also precede AFTER, or end a
    sentence with SPAN_WORDS and VERBS.
    """
    # The words around the range decide.
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
    """Return the only range, or the one that all others divide into bands; None without one."""
    if len(ranges) < 2:
        return next(iter(ranges), None)
    low, high = min(r[0] for r in ranges), max(r[1] for r in ranges)
    bands = sorted(ranges - {(low, high)})
    apart = all(a[1] < b[0] for a, b in pairwise(bands))
    return (low, high) if (low, high) in ranges and len(bands) > 1 and apart else None
