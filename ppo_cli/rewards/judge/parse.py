"""From a judge's reply to a score on its scale, or to a failure; never to a guess.

A whole JSON object wins, then a labelled line, then a reply that is one number. Whenever a
careful reader would hesitate, the reply is unparsed: asking again is cheap, a wrong reward is not.
"""

from __future__ import annotations

import math
import re
import unicodedata

from ppo_cli.rewards.judge.exchange import Failure, JudgeError, Reply, Scale
from ppo_cli.rewards.judge.verdict_json import Found, check_rivals, find_objects, read_entries
from ppo_cli.rewards.judge.verdict_text import (
    labelled_values,
    named_otherwise,
    quotes_something,
    read_text,
    stated_values,
    takes_back,
)
from ppo_cli.rewards.judge.verdict_value import Unreadable

LONGEST_REASON = 2000
# Providers round each probability; more missing than this means that levels are missing, and
# an expectation over the rest would lean to one side.
SUM_TOLERANCE = 0.1

_THINK = r"(?:seed:)?(?:think|thinking|thought|thoughts|reasoning|scratchpad|analysis|reflection)"
_OPEN = rf"(?:<{_THINK}(?:\s[^<>]*)?>|◁think▷|\[THINK\])"
_CLOSE = rf"(?:</{_THINK}\s*>|◁/think▷|\[/THINK\])"
_BLOCK = re.compile(rf"{_OPEN}(?:(?!{_OPEN}|{_CLOSE}).)*{_CLOSE}", re.I | re.S)
_OPEN_RE, _CLOSE_RE = re.compile(_OPEN, re.I), re.compile(_CLOSE, re.I)
_DEEPEST_THOUGHT = 4
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)[^<]*<\|message\|>")
_DATA = re.compile(
    r"<((?:response|prompt|ground_truth|extra_info[^<>]*)-[0-9a-f]{16})>.*?(?:</\1>|\Z)", re.S
)
_ENDING = re.compile(r"(?:\s{0,9}(?:<\|[\w-]{1,30}\|>|</s>|<eos>|<end_of_turn>))+$")
_FENCE = re.compile(r"```\w*")


def read_verdict(reply: Reply, scale: Scale) -> tuple[float, str]:
    """Return score and reason of a reply; JudgeError of kind UNPARSED when there is no clear one.

    Its cause is `empty`, `truncated`, `unparsed`, `ambiguous` or `out_of_range`.
    """
    try:
        if reply.probabilities is not None:
            return _expectation(reply.probabilities, scale)
        value, reason = _read(_normalised(reply.text), scale, reply.truncated)
    except Unreadable as problem:
        cause = "truncated" if reply.truncated and not reply.probabilities else problem.cause
        raise _failure(cause, str(problem), reply) from None
    except (RecursionError, ValueError, OverflowError):
        # Brackets a thousand deep, numbers of a million digits: whatever it was, no verdict.
        raise _failure("unparsed", "it is too odd to be read", reply) from None
    return value, reason.strip()[:LONGEST_REASON]


def _failure(cause: str, problem: str, reply: Reply) -> JudgeError:
    excerpt = " ".join(reply.text.split())
    excerpt = f"{excerpt[:60]} … {excerpt[-60:]}" if len(excerpt) > 130 else excerpt
    said = f", in the judge's reply {excerpt!r}" if excerpt else ""
    cut = "the judge's reply was cut at its token limit; " if cause == "truncated" else ""
    return JudgeError(
        Failure.UNPARSED, cause, f"{cut}{problem}{said}", usage=reply.usage, reply=reply.text
    )


def _read(text: str, scale: Scale, truncated: bool) -> tuple[float, str]:
    if not text:
        raise Unreadable("empty", "the judge's reply is empty")
    if (whole := _whole_object(text, scale)) is not None:
        return whole
    text = _without_ending(_without_thinking(_DATA.sub("\n", text)))
    objects = find_objects(text)
    read = [(found, read_entries(found.entries, scale)) for found in objects]
    verdicts = [(found, verdict) for found, verdict in read if verdict is not None]
    if verdicts:
        for found, verdict in read:
            if verdict is None:
                check_rivals(found.entries, verdicts[-1][1][0], scale)
        return _from_objects(text, verdicts, scale)
    if truncated:
        raise Unreadable("truncated", "nothing whole can be read")
    return read_text(_without(text, objects), scale)


def _whole_object(text: str, scale: Scale) -> tuple[float, str] | None:
    # A reply that is one object is read first: its strings may hold tags and quotes at will.
    inner = re.sub(r"^```\w*\n|\n```$", "", _without_ending(text)).strip()
    if not inner.startswith("{") or not inner.endswith("}"):
        return None
    try:
        objects = find_objects(inner)
    except Unreadable:
        return None
    if len(objects) != 1 or (objects[0].start, objects[0].end) != (0, len(inner)):
        return None
    return read_entries(objects[0].entries, scale)


def _from_objects(
    text: str, verdicts: list[tuple[Found, tuple[float, str]]], scale: Scale
) -> tuple[float, str]:
    values = {value for _, (value, _) in verdicts}
    outside = _without(text, [found for found, _ in verdicts])
    values |= {line.value for line in labelled_values(outside, scale)} | stated_values(outside)
    if len(values) > 1:
        raise Unreadable("ambiguous", "the reply gives several different scores")
    if not any(_stands_as_verdict(text, found) for found, _ in verdicts):
        raise Unreadable("unparsed", "the only score seems to be quoted from somewhere else")
    found, (value, reason) = verdicts[-1]
    first = min(found.start for found, _ in verdicts)
    after = _without(text[first:], [f.moved(-first) for f in find_objects(text)])
    if named_otherwise(text[:first], value, scale) or takes_back(after, value, scale):
        raise Unreadable("ambiguous", "what follows the score seems to change it")
    return value, reason or _FENCE.sub("", _without(text, [found])).strip()


def _stands_as_verdict(text: str, found: Found) -> bool:
    """Say whether an object opens or closes the reply, and is not announced as a quotation."""
    before, after = (_FENCE.sub("", part) for part in (text[: found.start], text[found.end :]))
    # A blockquote, or a quotation mark that touches the object, shows somebody else's words.
    if quotes_something(before) or re.search(r"(?:^|\n)\s{0,9}>[^\n]*$|[\"“«]$", before):
        return False
    first, last = (not re.search(r"\w", part) for part in (before, after))
    short = len(after) <= 200 and not re.search(r"[0-9]", after) and "\n" in after[:2]
    return first or last or (short and not _DOUBTS.search(after))


_DOUBTS = re.compile(
    r"\b(?:but|however|wrong|inject\w*|manipul\w*|cannot|can't|not|refus\w*|ignor\w*)\b", re.I
)


def _without(text: str, objects: list[Found]) -> str:
    # The objects of one list stand at one place, which is cut out once.
    for start, end in sorted({(f.start, f.end) for f in objects if f.start >= 0}, reverse=True):
        text = f"{text[:start]}\n{text[end:]}"
    return text


def _normalised(text: str) -> str:
    """Fold full-width forms and foreign digits; keep a raised or broken digit apart from others."""
    plain = text if text.isascii() else "".join(_one(char) for char in text)
    return unicodedata.normalize("NFKC", plain).replace("\u2212", "-").strip()


def _one(char: str) -> str:
    if char < "\x80":
        return char
    if unicodedata.category(char) == "Cf":
        return ""
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    kind = unicodedata.decomposition(char).partition(" ")[0]
    # 8² is not 82 and 7½ is not 71/2: a caret keeps them from becoming numbers.
    return f"^{char}" if kind in ("<super>", "<sub>", "<fraction>", "<circle>") else char


def _without_ending(text: str) -> str:
    text = text.rstrip()
    return text[:-200] + _ENDING.sub("", text[-200:])


def _without_thinking(text: str) -> str:
    """Drop what the judge thought aloud; a thought that never ends leaves nothing to read."""
    channels = list(_CHANNEL.finditer(text))
    if channels:
        if channels[-1][1] != "final":
            raise Unreadable("unparsed", "the judge was still thinking when its reply ended")
        text = text[channels[-1].end() :]
    for _ in range(_DEEPEST_THOUGHT):
        text = _BLOCK.sub("\n", text)
    for close in list(_CLOSE_RE.finditer(text))[-1:]:
        text = text[close.end() :]
    if _OPEN_RE.search(text):
        raise Unreadable("unparsed", "the judge was still thinking when its reply ended")
    return text


def _expectation(probabilities: object, scale: Scale) -> tuple[float, str]:
    """Return the mean level under the given probabilities."""
    pairs = dict(probabilities) if probabilities else {}  # type: ignore[call-overload]
    if not pairs:
        raise Unreadable("empty", "the judge gave no probabilities")
    if wrong := [level for level in pairs if level not in scale.levels()]:
        raise Unreadable("out_of_range", f"level {wrong[0]!r} is not on the scale {scale}")
    if any(not math.isfinite(p) or not 0.0 <= p <= 1.0 + SUM_TOLERANCE for p in pairs.values()):
        raise Unreadable("unparsed", "the judge's probabilities are not probabilities")
    total = math.fsum(pairs.values())
    if abs(total - 1.0) > SUM_TOLERANCE:
        raise Unreadable("unparsed", f"the judge's probabilities sum to {total:.3g}, not to 1")
    above = math.fsum((level - scale.low) * p for level, p in pairs.items()) / total
    best = sorted(pairs, key=lambda level: -pairs[level])[:3]
    likely = ", ".join(f"{level}: {pairs[level]:.3g}" for level in best)
    # Rounding alone may carry the mean a last bit past the end.
    return min(scale.low + above, float(scale.high)), f"most likely levels {likely}"
