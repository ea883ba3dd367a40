"""Reads a judge's reply: a score on the scale that was asked for, or a JudgeError, never a guess.

Called by the client, once for each reply. What counts depends on what was asked for:

- JSON: the reply is one object with the key `score_1_to_10` (the scale's) or `score`, and only
  strings that explain it besides.
- Text: the last line is `Score-CODE: N` with the code of the request, which no response knows. A
  bare number or `Score: N` counts too where it cannot quote the response.

A complete thought before the answer is skipped. A reply that was cut never counts. A number inside
a sentence is never a score: asking again is cheap, a wrong reward is not.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ppo_cli.errors import RewardError, first_line
from ppo_cli.rewards.judge.calls import (
    CODE_LENGTH,
    JudgeError,
    Output,
    Question,
    Reply,
    Scale,
)
from ppo_cli.rewards.judge.rubric import Comparison, Placing, Rubric, RubricDraft, win_share
from ppo_cli.rewards.remote.failures import Failure
from ppo_cli.thoughts import MARKS, UnfinishedThought, strip_leading_thought

# The answer format as the judge reads it at the end of each request.
SCORE_FORMATS: Mapping[Output, str] = {
    "json": (
        "Reply with ONE JSON object and nothing else, the reason first and no longer than three "
        'sentences:\n{{"reason": "...", "{key}": N}}'
    ),
    "text": (
        "Give the reason first, in no more than three sentences. End with one line in exactly "
        "this form and write nothing after it:\nScore-{code}: N"
    ),
}
REMINDER = (
    "Your last answer to this was not in the form asked for. {asked}\n"
    "N is one whole number from {low} to {high}. Name no other score."
)
# How often a judge is reminded of the format before its verdict counts as failed.
MAX_REMINDERS: Mapping[Output, int] = {"json": 2, "text": 1}
PLAIN_KEY = "score"  # many judges shorten `score_1_to_10` to this
MAX_REASON_CHARS = 2000
MAX_SCORE_LINE_CHARS = 200
SUM_TOLERANCE = 0.02  # providers round each probability

REASON_KEYS = frozenset(
    ("reason", "reasoning", "explanation", "rationale", "justification", "analysis", "feedback")
)
# Stop tokens that a server without its model's chat template leaves at the end of a reply.
_STOP_TOKENS = re.compile(
    r"(?:\s{0,9}(?:<\|[a-zA-Z_]{1,30}\|>|</s>|<eos>|<end_of_turn>|<turn\|>))+\Z"
)
_WRAPPERS = (
    r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```",
    r"<answer>(.*)</answer>",  # Hunyuan
    r"<\|(?:START_RESPONSE|begin_of_solution)\|>(.*)",  # Cohere, OpenThinker
)
_WRAPPED = re.compile("|".join(_WRAPPERS), re.S | re.I)
_TAG_LINE = re.compile(r"^[ \t]{0,9}(?:</?[^\s<>/][^<>\n]{0,40}>|\[[A-Z_]{3,}\])", re.M)
# A backslash that JSON does not know, as in LaTeX; it can only be part of a string.
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')

# --- parts of a text verdict: the words are English, as the judge prompts are ---
_FULL_WIDTH = str.maketrans("０１２３４５６７８９：／（）", "0123456789:/()")
_MATHS = re.compile(r"\$+([^$\n]*)\$+")
_MARKUP = re.compile(r"^#{1,6}\s+|\\boxed|\*{1,3}|__|[`\[\]()\"{}]")
_NUMBER = r"[-−]?(?:0|[1-9][0-9]{0,5})(?:\.[0-9]{1,6})?"
_LABEL = (
    r"(?:[-•+]\s+)?(?:(?:so|thus|therefore|the|my|final|overall),?\s+){0,4}"
    r"(?:score|rating|grade)"
)
# A sentence or list item before the score is complete; "The response ends with" is not, and a
# score after it may be a quotation.
_COMPLETE_LINE = re.compile(
    r"[.!?。！？…)）\]】»”\"|~$`]\W{0,9}$|[:：]\W{0,9}[0-9./]{1,9}\W{0,9}$"
    rf"|\A\s*(?:[-*•+#|]|[0-9]+[.)]\s|(?:{'|'.join(REASON_KEYS)})\s*:)",
    re.I,
)
# "Punktzahl: zehn", which a judge may translate into a score line.
_LABELLED_LINE = re.compile(r"^[^:=\n]{0,60}\w[^:=\n]{0,20}[:=]\s*[^\W\d]", re.M)
_ANNOUNCING_LINE = re.compile(r"(?:[:：]|\b(?:follow(?:s|ing)|below|e\.g))\W{0,9}$", re.I)


class Unreadable(Exception):
    """Why a reply holds no score; `cause` is the word for metrics."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


def read_answer(reply: Reply, question: Question) -> tuple[float, str, dict[str, Any]]:
    """Return score, reason and further values of a reply; JudgeError UNPARSED if unreadable.

    The error's cause is `empty`, `truncated`, `thought` (unfinished or of an unknown kind), `form`
    (not the format asked for), `ambiguous` (a second score) or `out_of_range`; for probabilities
    also `unparsed`.

    A rubric is answered by one JSON object with a verdict for each criterion and no other key, or
    by the probabilities of all levels of each criterion; its `grades` are returned. With placing,
    the scores of the `pieces` in [0, 1] are returned besides that of the whole. For a
    comparison the `places` are returned, 1 for the best, and the score is the share of the others
    that the first response beat. Criteria that the judge wrote are returned as `rubric`, with their
    number as the score.
    """
    try:
        if reply.probabilities is not None:
            return _read_probabilities(reply.probabilities, question)
        if reply.truncated:
            raise Unreadable("truncated", "the judge's reply was cut at its token limit")
        value, reason, info = _read_reply(reply.text, question)
    except UnfinishedThought as problem:
        raise _build_error("thought", str(problem), reply) from None
    except Unreadable as problem:
        raise _build_error(problem.cause, str(problem), reply) from None
    return value, reason.strip()[:MAX_REASON_CHARS], info


def build_reminder(question: Question) -> str:
    """Return what is added to a request after an answer that did not count."""
    if question.answer_spec is not None:
        form = question.answer_spec.answer_format()
        return f"Your last answer to this was not in the form asked for. {form}"
    scale = question.scale
    form = score_format(question.output, scale, question.code)
    return REMINDER.format(asked=form, low=scale.low, high=scale.high)


def score_format(output: Output, scale: Scale, code: str) -> str:
    """Return the format of a score as the judge reads it."""
    return SCORE_FORMATS[output].format(key=scale.key, code=code)


def _build_error(cause: str, problem: str, reply: Reply) -> JudgeError:
    """Return the error for an unreadable reply, with the reply's beginning and end."""
    excerpt = " ".join(reply.text.split())
    excerpt = f"{excerpt[:60]} … {excerpt[-60:]}" if len(excerpt) > 130 else excerpt
    shown = f", in the judge's reply {excerpt!r}" if excerpt else ""
    return JudgeError(
        Failure.UNPARSED, cause, f"{problem}{shown}", usage=reply.usage, reply=reply.text
    )


def _read_reply(text: str, question: Question) -> tuple[float, str, dict[str, Any]]:
    """Read a complete reply as the kind of answer that the question asked for."""
    answer = _extract_answer(text, question.output if question.answer_spec is None else "json")
    if question.comparison is not None:
        places, reason = _read_places(answer, question.comparison)
        return win_share(places), reason, {"places": places}
    if question.draft is not None:
        rows = _read_draft(answer, question.draft)
        return float(len(rows)), "", {"rubric": rows}
    if question.rubric is not None:
        grades, reason, quotes = _read_grades(answer, question.rubric)
        info = {"grades": grades} | ({"quotes": quotes} if question.rubric.quoted else {})
        return question.rubric.value(grades), reason, info
    if question.placing is not None:
        value, pieces, reason = _read_pieces(answer, question.placing, question)
        return value, reason, {"pieces": pieces}
    # A judge that was asked for text may still answer with an object.
    if answer[0] == "{":
        return *_read_object(answer, question), {}
    return *_read_text(answer, question), {}


def _extract_answer(text: str, output: Output) -> str:
    """Return a reply without thought, code fence and stop tokens; for "json" only an object."""
    text = text.strip("\ufeff \t\r\n").replace("\r\n", "\n")
    if not text:
        raise Unreadable("empty", "the judge's reply is empty")
    answer = _STOP_TOKENS.sub("", text)
    if not answer.startswith("{"):
        answer = strip_leading_thought(answer)
    if (wrapped := _WRAPPED.fullmatch(answer)) is not None:
        answer = next(part for part in wrapped.groups() if part is not None).strip()
    if answer.startswith("{"):
        return answer
    # A tag that `thoughts` does not know may open a thought that holds a draft of the score.
    if not answer or MARKS.search(answer) or _TAG_LINE.search(answer):
        raise Unreadable("thought", "there is no plain answer after what seems to be a thought")
    if output == "json":
        raise Unreadable("form", "it is not one JSON object and nothing else")
    return answer


def _check_range(value: float, scale: Scale) -> float:
    """Return a value that is on the scale; raise Unreadable for any other, never clamp it."""
    if not scale.low <= value <= scale.high:
        raise Unreadable("out_of_range", f"the score is outside {scale}")
    if 0 < value < 1 < scale.high:
        raise Unreadable("ambiguous", f"{value:g} may be a share of {scale} or a score on it")
    return float(value)


# --- JSON ----------------------------------------------------------------------------------------


def _read_object(text: str, question: Question) -> tuple[float, str]:
    """Return score and reason of an object with the key that was asked for, or plain `score`."""
    entries, scale = _decode(text), question.scale
    reasons = [value for key, value in entries.items() if key in REASON_KEYS]
    keys = [key for key in entries if key not in REASON_KEYS]
    if len(keys) != 1 or keys[0] not in (scale.key, PLAIN_KEY):
        odd = [key for key in keys if key not in (scale.key, PLAIN_KEY)]
        problem = f"the key {odd[0][:40]!r} was not asked for" if odd else f'no "{scale.key}" in it'
        raise Unreadable("form", problem)
    if not all(isinstance(reason, str) for reason in reasons):
        raise Unreadable("form", "the reason is not a text")
    if "..." in reasons:
        raise Unreadable("form", "its reason is the placeholder of the form")
    return _read_score(entries[keys[0]], keys[0], question), "\n".join(reasons)


def _read_score(score: Any, key: str, question: Question) -> float:
    """Return the score under a key: a number on the scale, or one in a string."""
    if isinstance(score, str):
        score = _read_number(score, question.scale)
    if score is None or isinstance(score, bool) or not isinstance(score, int | float):
        raise Unreadable("form", f'"{key}" is not a number')
    # A judge that copies the response without escaping it copies this pair with it.
    pairs = re.findall(rf"{key}[\"']?\s*:\s*[\"']?({_NUMBER})", question.shown, re.I)
    if any(float(number.replace("−", "-")) == score for number in pairs):
        raise Unreadable("form", "its score may be a quotation")
    return _check_range(score, question.scale)


def _read_grades(text: str, rubric: Rubric) -> tuple[list[float], str, list[str]]:
    """Return the grades in [0, 1] of all criteria, their reasons, one per line, and quotations."""
    entries, grades, reasons, quotes = _decode(text), [], [], []
    if set(entries) != set(rubric.keys):
        raise Unreadable("form", f"its keys are not {', '.join(rubric.keys)}")
    for key, criterion in zip(rubric.keys, rubric.criteria, strict=True):
        entry, name = entries[key], criterion.key
        reason = _pop_reason(entry, f"{key}'s") if isinstance(entry, dict) else ""
        if rubric.quoted and isinstance(entry, dict):
            quotes.append(entry.pop("quote", None))
            if not isinstance(quotes[-1], str):
                raise Unreadable("form", f"{key} has no quote")
        if not isinstance(entry, dict) or set(entry) != {name}:
            raise Unreadable("form", f"{key} is not {name!r} and a reason")
        verdict = entry[name]
        # Booleans are integers in Python: each kind of criterion takes only its own type.
        right = isinstance(verdict, bool) if criterion.levels == 1 else type(verdict) is int
        if not right:
            raise Unreadable("form", f"{name!r} of {key} is not what was asked for")
        if not 0 <= verdict <= criterion.levels:
            raise Unreadable("out_of_range", f"the level of {key} is outside 0-{criterion.levels}")
        grades.append(verdict / criterion.levels)
        grade_text = criterion.describe_grade(grades[-1])
        reasons.append(f"{criterion.name}: {grade_text}. {reason.strip()}".rstrip())
    return grades, "\n".join(reasons), quotes


def _read_pieces(text: str, placing: Placing, question: Question) -> tuple[float, list[float], str]:
    """Return the score of the whole, those of all pieces in [0, 1], in order, and the reason.

    A piece without a score, or one too many, fails the reply: the scores may be of other pieces.
    """
    entries, keys = _decode(text), placing.keys
    reason = _pop_reason(entries, "its")
    if PLAIN_KEY in entries and placing.whole not in entries:
        entries[placing.whole] = entries.pop(PLAIN_KEY)
    if set(entries) != set(keys):
        missing = [key for key in keys if key not in entries]
        problem = f'no "{missing[0]}" in it' if missing else "it scores more pieces than there are"
        raise Unreadable("form", problem)
    scores = [_read_score(entries[key], key, question) for key in keys]
    return scores[-1], [question.scale.scaled(score) for score in scores[:-1]], reason


def _pop_reason(entries: dict[str, Any], owner: str) -> str:
    """Remove the reason from an object and return it; empty where there is none."""
    reasons = [entries.pop(key) for key in list(entries) if key in REASON_KEYS]
    reason = reasons[0] if reasons else ""
    if len(reasons) > 1 or not isinstance(reason, str) or reason == "...":
        raise Unreadable("form", f"{owner} reason is not one text")
    return reason


def _read_draft(text: str, request: RubricDraft) -> list[dict[str, Any]]:
    """Return the criteria that a judge wrote, as rows of a rubric file (name, text, weight, must).

    Raises Unreadable unless they have the number and the form that `request` allows.
    """
    entries = _decode(text)
    rows = entries.get("criteria")
    if set(entries) != {"criteria"} or not isinstance(rows, list):
        raise Unreadable("form", 'it is not a list under "criteria" and nothing else')
    try:
        return request.read(rows).as_rows()
    except RewardError as error:
        raise Unreadable("form", first_line(error)) from None


def _read_places(text: str, comparison: Comparison) -> tuple[list[int], str]:
    """Return the place of each response (1 the best, equal ones share one) and the reason."""
    entries = _decode(text)
    reason = _pop_reason(entries, "its")
    keys = [key.casefold() for key in comparison.keys]
    if set(entries) != set(keys):
        raise Unreadable("form", f"its keys are not reason, {', '.join(comparison.keys)}")
    verdicts = [entries[key] for key in keys]
    if comparison.count == 2:
        better = verdicts[0].strip().upper() if isinstance(verdicts[0], str) else ""
        if better not in PLACES_OF_TWO:
            raise Unreadable(
                "out_of_range", f"better_response is not one of {', '.join(PLACES_OF_TWO)}"
            )
        return list(PLACES_OF_TWO[better]), reason
    if any(type(place) is not int for place in verdicts):
        raise Unreadable("form", "a place is not a whole number")
    if not all(1 <= place <= comparison.count for place in verdicts):
        raise Unreadable("out_of_range", f"a place is outside 1-{comparison.count}")
    if 1 not in verdicts:  # points or levels instead of a ranking
        raise Unreadable("form", "no response has place 1")
    return verdicts, reason


PLACES_OF_TWO = {"R1": (1, 2), "R2": (2, 1), "TIE": (1, 1)}


def _decode(text: str) -> dict[str, Any]:
    """Decode one JSON object into a dict with lower-case keys; each key may occur once."""
    try:
        try:
            entries = _DECODER.decode(text)
        except json.JSONDecodeError:
            entries = _DECODER.decode(_ESCAPE.sub(lambda e: e[0] if e[1] else r"\\", text))
    except (ValueError, RecursionError):  # broken, NaN, a number of a million digits, too deep
        raise Unreadable("form", "it is not one JSON object and nothing else") from None
    return dict(entries)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = {key.strip().casefold(): value for key, value in pairs}
    if len(entries) != len(pairs):
        raise Unreadable("form", "a key occurs twice")
    return entries


def _reject_constant(word: str) -> float:
    raise ValueError(word)  # NaN and Infinity


# `strict=False` allows line breaks in strings: not valid JSON, but harmless.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_constant=_reject_constant, strict=False
)


# --- text ----------------------------------------------------------------------------------------


def _read_text(text: str, question: Question) -> tuple[float, str]:
    """Return score and reason of a reply that ends with a score line, or is a bare number.

    The reason is the text before. Raises Unreadable for a score outside the scale, a second,
    different score, or a last line that may quote the response.
    """
    scale = question.scale
    lines = [line for line in text.translate(_FULL_WIDTH).split("\n") if re.search(r"\w", line)]
    if not lines or len(lines[-1]) > MAX_SCORE_LINE_CHARS:
        raise Unreadable("form", "its last line is not a score and nothing else")
    before, last = lines[:-1], lines[-1]
    scores = [_read_score_line(line, scale) for line in lines]
    coded = [score[1] for score in scores if score and score[0] == question.code]
    value: float | None
    others: Sequence[float | None]
    if coded and scores[-1] == (question.code, coded[-1]):
        # Score lines without the code are quotations.
        value, others = coded[-1], coded
    else:
        code, value = scores[-1] or ("", None if before else _read_number(last, scale))
        if code or coded or value is None:
            raise Unreadable("form", "its last line is not a score and nothing else")
        if _may_be_quoted(before, last, value, question.shown):
            raise Unreadable("form", "its last line may be a quotation")
        others = [score[1] if score else _read_number(line, scale)
                  for score, line in zip(scores, lines, strict=True)]  # fmt: skip
    value = _check_range(value, scale)
    if any(other not in (None, value) for other in others):
        raise Unreadable("ambiguous", "it names several different scores")
    return value, "\n".join(before)


def _may_be_quoted(before: Sequence[str], last: str, value: float, shown: str) -> bool:
    """Whether a score line without the code may quote the response that the judge was shown.

    A judge may also translate the response, or quote a part of it: the number is enough, or any
    label, since its number may be a word.
    """
    if not before:
        return last.strip() in shown and not last.strip().isdigit()
    # An indented score, or one after an unfinished line.
    if last[0].isspace() or not _COMPLETE_LINE.search(before[-1]):
        return True
    text = unicodedata.normalize("NFKC", shown)
    numbers = re.findall(r"\d+", text) + re.findall(r"\d+[.,]\d+", text)
    is_shown = any(float(number.replace(",", ".")) == abs(value) for number in numbers)
    labelled = _LABELLED_LINE.search(text) or _ANNOUNCING_LINE.search(before[-1])
    return is_shown or labelled is not None


@lru_cache(maxsize=16)
def _patterns(scale: Scale) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the patterns of a number and of a score line, both without markup.

    The top of the scale may follow the number ("8/10"), and the label may name the scale.
    """
    low, high = re.escape(str(scale.low)), re.escape(str(scale.high))
    number = rf"(?P<value>{_NUMBER})(?:\s*(?:/|out\s+of)\s*{high})?(?:\s*points?)?\s*[.!]?"
    named = rf"(?:\s*(?:{low}\s*(?:[-–]|to)\s*{high}|out\s+of\s+{high}))?"
    code = rf"(?:\s*[-–]?\s*(?P<code>[0-9a-f]{{{CODE_LENGTH}}}))?"
    return (
        re.compile(number, re.I),
        re.compile(rf"{_LABEL}{code}{named}\s*(?:is\s*:?|[:=])\s*{number}", re.I),
    )


def _read_score_line(line: str, scale: Scale) -> tuple[str, float] | None:
    """Return code and N of a line that is `Score-CODE: N`, in any markup; None for other lines.

    The code is empty in a line without one.
    """
    match = _match(_patterns(scale)[1], line)
    return None if match is None else ((match["code"] or "").lower(), _value(match))


def _read_number(text: str, scale: Scale) -> float | None:
    """Return the number of a text that is one number, perhaps over the top of the scale."""
    item = re.fullmatch(r"\s*\d+\.\s*", text)
    match = None if item else _match(_patterns(scale)[0], text)
    return None if match is None else _value(match)


def _match(pattern: re.Pattern[str], line: str) -> re.Match[str] | None:
    return pattern.fullmatch(_MARKUP.sub("", _MATHS.sub(r"\1", line)).strip())


def _value(match: re.Match[str]) -> float:
    return float(match["value"].replace("−", "-"))


# --- probabilities -------------------------------------------------------------------------------


def _read_probabilities(
    probabilities: Sequence[Mapping[int, float]], question: Question
) -> tuple[float, str, dict[str, Any]]:
    """Return the mean level of a score, or the value of the mean levels of all criteria.

    The further value `spread` is the standard deviation of the score, `spreads` are those of the
    grades.
    """
    if question.rubric is None:
        level, spread, likely = _read_levels(probabilities[0], question.scale)
        return level, likely, {"spread": spread}
    grades, spreads, reasons = [], [], []
    for criterion, shares in zip(question.rubric.criteria, probabilities, strict=True):
        level, spread, likely = _read_levels(shares, Scale(0, criterion.levels))
        grades.append(level / criterion.levels)
        spreads.append(spread)
        reasons.append(f"{criterion.name}: {criterion.describe_grade(grades[-1])}. {likely}")
    info = {"grades": grades, "spreads": spreads, "spread": question.rubric.spread(spreads)}
    return question.rubric.value(grades), "\n".join(reasons), info


def _read_levels(shares: Mapping[int, float], scale: Scale) -> tuple[float, float, str]:
    """Return the mean level, its standard deviation as a share of the scale, and likely levels.

    Probabilities of exactly the levels of the scale are required.
    """
    if not shares:
        raise Unreadable("empty", "the judge gave no probabilities")
    if wrong := [level for level in shares if level not in scale.levels()]:
        raise Unreadable("out_of_range", f"level {wrong[0]!r} is not on the scale {scale}")
    if missing := [level for level in scale.levels() if level not in shares]:
        raise Unreadable("unparsed", f"there is no probability of level {missing[0]}")
    if any(not math.isfinite(p) or not 0.0 <= p <= 1.0 + SUM_TOLERANCE for p in shares.values()):
        raise Unreadable("unparsed", "the judge's probabilities are not probabilities")
    total = math.fsum(shares.values())
    if abs(total - 1.0) > SUM_TOLERANCE:
        raise Unreadable("unparsed", f"the judge's probabilities sum to {total:.3g}, not to 1")
    above = math.fsum((level - scale.low) * p for level, p in shares.items()) / total
    # Rounding alone may carry the mean past the end of the scale by the last bit.
    mean = min(scale.low + above, float(scale.high))
    variance = math.fsum(p * (level - mean) ** 2 for level, p in shares.items()) / total
    best = sorted(shares, key=lambda level: -shares[level])[:3]
    likely = ", ".join(f"{level}: {shares[level]:.3g}" for level in best)
    spread = math.sqrt(variance) / (scale.high - scale.low)
    return mean, spread, f"most likely levels {likely}"
