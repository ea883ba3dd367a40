"""The verdict of a reply that is, or holds, a JSON object with a "score".

Every object is read whole by a decoder, never by a pattern; a fragment that looks like one and
cannot be read makes the reply unreadable, for the score may have been in what is lost.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ppo_cli.rewards.judge.exchange import Scale
from ppo_cli.rewards.judge.verdict_value import Unreadable, is_range, read_json_value

# Keys are compared in small letters, without blanks, dashes and underscores.
SCORE_KEYS = frozenset(
    (
        *("score", "finalscore", "overallscore", "rating", "finalrating", "overallrating"),
        # A score that was put right: beside another one, neither counts.
        *("correctedscore", "newscore", "revisedscore", "adjustedscore", "updatedscore"),
        *("评分", "分数", "得分", "最终评分", "最终得分", "スコア", "점수"),
    )
)
REASON_KEYS = (
    *("reason", "reasoning", "explanation", "rationale", "justification"),
    *("comment", "feedback", "analysis", "理由", "原因", "说明"),
)
# Names of a verdict, or of what makes another one of it: a number under such a key must agree.
# A plain criterion ("accuracy", "style") has none of these in its name.
_NOUNS = re.compile(
    r"scor|grade|point|reward|评分|評分|分数|分數|得分|打分|スコア|点数|점수|평점"
    r"|评级|等级|(?<![a-z])(?:rating|stars?(?![a-z])|outcome|result|verdict|judg|assessment|evaluation|value|number|marks?(?![a-z]))"
)
_RIVALS = re.compile(
    r"total|final|overall|adjust|penal|deduct|correct(?:ed|ion)|revis|updat|aggregat|composite"
    r"|combin|averag|weighted|consensus|subtract|reduc|discount|bonus|malus|minus|modifi|bottomline"
    r"|总|總|最终|最終|综合|扣|调整|修正|实际"
    r"|(?<![a-z])(?:net|actual|real|true|new|sum|avg|mean|decision|conclusion|my|ultimate"
    r"|effective|cap|capped|limit|override|should_?be)(?![a-z])"
)
_CHANGES = re.compile(r"penal|deduct|subtract|reduc|discount|bonus|malus|minus|扣")
_PROSE = re.compile(r"reason|explan|rational|justif|comment|feedback|analysis|理由|原因|说明")
_BEFORE = re.compile(r"(?<![a-z])(?:initial|first|draft|previous|preliminary)")
_FEW = re.compile(r"\b(?:zero|one|two|three|four|five|six|seven|eight|nine|ten)\b", re.I)
_WRAPPERS = frozenset(
    (
        *("result", "evaluation", "verdict", "judgment", "judgement", "output", "final", "data"),
        *("arguments", "parameters", "input"),
    )
)
_SCALE_KEYS = frozenset(["max", "maxscore", "scoremax", "maximum", "maximumscore", "outof"])
_LOW_KEYS = frozenset(["min", "minscore", "scoremin", "minimum", "minimumscore"])
_SCALE_NAMES = frozenset(["scale", "range", "scorescale", "scorerange"])
_PART_KEYS = frozenset(["criterion", "criteria", "aspect", "dimension", "metric"])
_MOST_OPENINGS = 500
_LONGEST_LITERAL = 20_000
# What a `{` must be followed by to be taken for the start of an object, not for prose or LaTeX.
_OBJECT_LIKE = re.compile(r"""\{\s*(?:["'“”‘’/#]|[\w-]{1,60}\s*:|$)|\[\s*\{""")
_MENTIONS = re.compile(r"score|rating|评分|分数|得分|スコア|점수", re.I)
_PLACEHOLDER = re.compile(r"""(?:score|rating)["']?\s*:\s*["']?\s*(?:<[a-z]+>|\.\.\.|…)""", re.I)


@dataclass(frozen=True)
class Entries:
    """A decoded object that has kept every one of its keys, repeated ones too."""

    pairs: tuple[tuple[str, Any], ...]

    def under(self, names: frozenset[str]) -> list[Any]:
        """Return the values of all keys of one of these names."""
        return [value for key, value in self.pairs if _plain(key) in names]


@dataclass(frozen=True)
class Found:
    """One object and where it stands."""

    start: int
    end: int
    entries: Entries

    def moved(self, by: int) -> Found:
        """Return the same object in a text that was cut or grew in front of it."""
        return Found(self.start + by, self.end + by, self.entries)


def find_objects(text: str) -> list[Found]:
    """Return all objects of a text, outermost only; Unreadable when one of them is broken."""
    return list(_objects(text))


def read_entries(entries: Entries, scale: Scale, depth: int = 0) -> tuple[float, str] | None:
    """Read score and reason of one object; None when it holds no score."""
    values = entries.under(SCORE_KEYS)
    if not values:
        inner = [v for v in entries.under(_WRAPPERS) if isinstance(v, Entries)]
        found = read_entries(inner[0], scale, depth + 1) if len(inner) == 1 and depth < 3 else None
        if found is not None:
            _check_company(entries, scale)
            check_rivals(entries, found[0], scale)
        return found
    _check_company(entries, scale)
    if any(isinstance(v, str) and is_range(v.strip()) for v in values):
        raise Unreadable("ambiguous", f"{values[0]!r} is a range, not a score")
    scores = {read_json_value(value, scale) for value in values}
    if len(scores) > 1:
        raise Unreadable("ambiguous", "one object holds several different scores")
    score = scores.pop()
    check_rivals(entries, score, scale)
    return score, _reason(entries)


def check_rivals(entries: Entries, score: float, scale: Scale, *, named: bool = True) -> None:
    """Raise Unreadable when a key that may name the verdict too holds another number.

    `named` is false below a criterion, where a plain "score" is the criterion's.
    """
    for key, value in entries.pairs:
        spaced = re.sub(r"[\s_-]+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key)).casefold()
        if _plain(key) in _SCALE_KEYS | _SCALE_NAMES | _LOW_KEYS or _BEFORE.search(spaced):
            continue
        strong = bool(_RIVALS.search(spaced))
        rival = strong or (named and bool(_NOUNS.search(spaced)))
        change = bool(_CHANGES.search(spaced))
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Entries):
                plural = spaced.endswith("s") and not strong
                check_rivals(item, score, scale, named=(rival and not plural) or _is_wrapper(key))
            elif isinstance(item, str) and (_PROSE.search(spaced) or not _is_short(item, strong)):
                continue
            elif rival and _disagrees(item, score, scale, change=change):
                raise Unreadable("ambiguous", f"{key[:40]!r} holds another number than the score")


def _is_wrapper(key: str) -> bool:
    return _plain(key) in _WRAPPERS


def _is_short(text: str, strong: bool) -> bool:
    """Say whether a text is a value, or speaks of one where only a verdict is expected."""
    return strong or bool(re.search(r"^\W*[0-9]|[0-9]\W*$", text)) or len(text.split()) <= 3


def _disagrees(value: Any, score: float, scale: Scale, *, change: bool) -> bool:
    """Say whether a value may be another verdict; a penalty of 0 changes nothing."""
    if isinstance(value, str):
        try:
            return read_json_value(value, scale) != score
        except Unreadable:
            numbers = re.findall(r"-?[0-9]+(?:\.[0-9]+)?", value)
        others = (_disagrees(float(n), score, scale, change=change) for n in numbers)
        return bool(_FEW.search(value)) or any(others)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return value != score and not (change and value == 0)


def _plain(key: str) -> str:
    return re.sub(r"[\s_-]", "", key).casefold()


def _reason(entries: Entries) -> str:
    for name in REASON_KEYS:
        for value in entries.under(frozenset([name])):
            if isinstance(value, str):
                return value.strip()
    return ""


def _check_company(entries: Entries, scale: Scale) -> None:
    for end in entries.under(_SCALE_KEYS):
        if isinstance(end, bool) or end not in (scale.high, str(scale.high)):
            raise Unreadable("unparsed", f"the object gives another scale than {scale}")
    for end in entries.under(_LOW_KEYS):
        if isinstance(end, bool) or end not in (scale.low, str(scale.low)):
            raise Unreadable("unparsed", f"the object gives another scale than {scale}")
    for stated in entries.under(_SCALE_NAMES):
        numbers = re.findall(r"[0-9]+", _flat_text(stated))
        if not numbers or int(numbers[-1][:9]) != scale.high:
            raise Unreadable("unparsed", f"the object gives another scale than {scale}")
    for part in entries.under(_PART_KEYS):
        if isinstance(part, str) and part.casefold().strip() not in ("overall", "final", "total"):
            raise Unreadable("unparsed", f"the score is only that of {part[:40]!r}")


def _flat_text(value: Any) -> str:
    """A value on one level as text; what lies deeper is no way to write a scale."""
    if isinstance(value, Entries):
        value = [item for _, item in value.pairs]
    items = value if isinstance(value, list) else [value]
    return " ".join(str(item) for item in items if isinstance(item, (str, int, float)))


def _objects(text: str) -> Iterator[Found]:
    place, openings = 0, 0
    while (found := re.compile(r"[\[{]").search(text, place)) is not None:
        openings += 1
        if openings > _MOST_OPENINGS:
            raise Unreadable("unparsed", "too many brackets to be a verdict")
        place = found.start()
        if not _OBJECT_LIKE.match(text, place):
            place += 1
            continue
        value, end = _decode(text, place)
        if value is None:
            place = _past_broken(text, place)
            continue
        _check_whole(text, place, end)
        for entries in _flat(value):
            yield Found(place, end, entries)
        place = end


def _decode(text: str, start: int) -> tuple[Any, int]:
    decoder = json.JSONDecoder(object_pairs_hook=lambda p: Entries(tuple(p)), strict=False)
    try:
        return decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        pass
    end = _closing(text, start)
    if end is None:
        return None, start
    return _decode_literal(text[start:end]), end


def _flat(value: Any) -> Iterator[Entries]:
    if isinstance(value, Entries):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _flat(item)


def _past_broken(text: str, start: int) -> int:
    """Step over a fragment that is no object; Unreadable when it may have been the verdict."""
    end = _closing(text, start)
    if end is None:
        raise Unreadable("unparsed", "the JSON is not closed")
    fragment = text[start:end]
    if _MENTIONS.search(fragment) and not _PLACEHOLDER.search(fragment):
        raise Unreadable("unparsed", "the JSON is not valid")
    return end


def _check_whole(text: str, start: int, end: int) -> None:
    # An object in the middle of a larger structure whose frame is lost is only a part.
    if re.search(r"""["']\s*:\s*$""", text[max(0, start - 40) : start]):
        raise Unreadable("unparsed", "the object is only a part of a larger one")
    if re.match(r"""\s*,\s*(?:["'{\[]|$)|\s*\]""", text[end : end + 40]):
        raise Unreadable("unparsed", "the object is only a part of a larger one")


def _closing(text: str, start: int) -> int | None:
    """Return the end of the bracket that opens at `start`, passing over double-quoted strings."""
    depth, quoted, escaped = 0, False, False
    for place in range(start, len(text)):
        char = text[place]
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
            if depth == 0:
                return place + 1
    return None


def _decode_literal(fragment: str) -> Any:
    """Read Python's spelling of an object: single quotes, trailing commas, True and None."""
    if '"' not in fragment:
        fragment = fragment.translate({ord("“"): '"', ord("”"): '"'})
    odd = len(fragment) > _LONGEST_LITERAL or re.search(r"\\|\b0[xob]|[0-9]_", fragment, re.I)
    if odd:
        return None
    try:
        return _plain_value(ast.parse(fragment.strip(), mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError, Warning):
        return None


def _plain_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Dict):
        keys = [k.value if isinstance(k, ast.Constant) else None for k in node.keys]
        if not all(isinstance(k, str) for k in keys):
            raise ValueError("a key is not a string")
        pairs = zip(map(str, keys), map(_plain_value, node.values), strict=True)
        return Entries(tuple(pairs))
    if isinstance(node, ast.List):
        return [_plain_value(item) for item in node.elts]
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _plain_value(node.operand)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return -value
    raise ValueError("not a plain value")
