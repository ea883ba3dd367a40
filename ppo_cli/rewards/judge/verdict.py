"""From a judge's reply to a score on its scale, or to a failure; never to a guess.

What was asked for decides what counts. Asked for JSON, only a reply that is one object with
`score`, beside it nothing but strings that explain it. Asked for text, a bare number, or one
labelled score as the last line, and no second score anywhere. A complete thought in front is left
out; a reply that was cut never counts. Asking again is cheap, a wrong reward is not."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ppo_cli.errors import RewardError, first_line
from ppo_cli.rewards.judge.calls import JudgeError, Output, Question, Reply, Scale
from ppo_cli.rewards.judge.rubric import Comparison, Rubric, RubricDraft, win_share
from ppo_cli.rewards.remote.failures import Failure
from ppo_cli.thoughts import MARKS, UnfinishedThought, strip_leading_thought

# What a judge is asked for, in the words that it reads.
SCORE_FORMATS: Mapping[Output, str] = {
    "json": (
        "Reply with ONE JSON object and nothing else, the reason first and no longer than three "
        'sentences:\n{{"reason": "...", "{key}": N}}'
    ),
    "text": (
        "Give the reason first, in no more than three sentences. End with one line in exactly "
        "this form and write nothing after it:\nScore: N"
    ),
}
REMINDER = (
    "Your last answer to this was not in the form asked for. {asked}\n"
    "N is one whole number from {low} to {high}. Name no other score."
)
PLAIN_KEY = "score"
LONGEST_REASON = 2000
LONGEST_SCORE_LINE = 200
SUM_TOLERANCE = 0.02  # providers round each probability

REASON_KEYS = frozenset(
    ("reason", "reasoning", "explanation", "rationale", "justification", "analysis", "feedback")
)
_NUMBER = r"[-−]?(?:0|[1-9][0-9]{0,5})(?:\.[0-9]{1,6})?"
_FINAL = r"final|overall|gesamt|最终|最終|综合|総合|최종|итогов\w+"
_NOUN = (
    r"score|rating|grade|mark|评分|評分|分数|得分|打分|スコア|評価|点数|得点|점수|평점|bewertung"
    r"|punktzahl|note\s+finale|puntuación|calificación|pontuação|punteggio|балл|оценка|التقييم"
)
_IS = r"(?:\bis\b\s*:?|[:=]|为|是|は)"
_OVER = r"(?:/|out\s+of|von|из|sobre|sur|su)"
# Stop tokens that a server without its model's template leaves at the end.
_STOP = re.compile(r"(?:\s{0,9}(?:<\|[a-zA-Z_]{1,30}\|>|</s>|<eos>|<end_of_turn>|<turn\|>))+\Z")
_FRAMES = (
    r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```",
    r"<answer>(.*)</answer>",  # Hunyuan
    r"<\|(?:START_RESPONSE|begin_of_solution)\|>(.*)",  # Cohere, OpenThinker
)
_FRAME = re.compile("|".join(_FRAMES), re.S | re.I)
# A backslash that JSON does not know, as models write in mathematics; it is only ever text.
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_QUOTED = re.compile(
    r"\"[^\"]*\"|“[^“”]*”|‘[^‘’]*’|`[^`]*`|「[^「」]*」|«[^«»]*»|(?<!\w)'[^']*'(?!\w)"
)
# A number in digits, in English words or, before the sign for points, in Chinese ones.
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_HAN = "一二三四五六七八九十"
_CLOSES = r"(?=\W{0,9}(?:[.。!;]|$))"
_WORD = rf"(?:{'|'.join(_WORDS)})(?:(?=\s+out\s+of\b)|{_CLOSES})"
_COUNT = rf"(?:{_NUMBER}|{_WORD}|[{_HAN}](?=[分点]{_CLOSES}))"
_LINK = r"is|was|of|as|an?|at|to|be|has|should|would|must|therefore|only"
# "Grade 8 level" and "mark 3" are no scores, "final mark 3" is.
_SCORE = rf"(?!(?<!final\s)(?<!my\s)(?:grade|mark)\s[0-9])(?:{_NOUN}|総合点)(?![a-z])"
# A label of two alphabets, or of letters set apart, passes for another.
_HIDDEN = r"\w{0,20}(?:[a-z][Ͱ-ӿ]|[Ͱ-ӿ][a-z])\w{0,20}|[^\W\d](?:[ ][^\W\d]){3,20}"
_GIVE = (
    r"\bI(?:['’]d|\s+would|\s+will)?\s+(?:give|rate|score|grade)(?:\s+(?:it|this|the)(?:\s+\w+)?)?"
)
# What names a score: a label and a number, a line with a number and nothing else, or a verb
# whose clause ends with the number.
_ANOTHER = re.compile(
    rf"(?:{_SCORE}|(?:{_FINAL}|adjusted|total)(?=[^\w\n]{{0,6}}[:=])"
    rf"|^\W{{0,6}}(?:{_HIDDEN})(?=\s?[:=])"
    rf"|^(?=[^\w\n]{{0,6}}{_NUMBER}(?:\s?{_OVER}\s?[0-9]+)?[^\w\n]*$))"
    rf"[^\w\n]{{0,9}}?(?:(?:{_LINK})[^\w\n]{{1,4}}|(?:应该?)?[为是]|は){{0,4}}\s?"
    rf"({_COUNT})(?![a-zа-я0-9_%]|\s*(?:[-–~～]|to\s)\s*[0-9])"
    rf"|(?:{_GIVE}|\bdeserves?|\bso)\W{{1,4}}(?:(?:of|an?|as|at)\W{{1,4}}){{0,2}}({_COUNT})"
    rf"(?=(?:\s?{_OVER}\s?[0-9]+)?{_CLOSES})"
    rf"|(?:给|[分点]中)({_COUNT})(?=[分点])",
    re.I | re.M,
)
# A line that may stand before the score's: a sentence that ends, or an item of a list.
_ENDS = re.compile(r"[.!?。！？…)）\]】»”\"|~$`]\W{0,9}$|[:：]\W{0,9}[0-9./]{1,9}\W{0,9}$")
_ITEM = re.compile(rf"\s*(?:[-*•+#|]|[0-9]+[.)]\s|(?:{'|'.join(REASON_KEYS)}|理由)\s*[:：])", re.I)
_ANNOUNCES = re.compile(r"\b(?:follow(?:s|ing)|below|this|these|says|reads|e\.g)\W{0,9}$", re.I)
_LAST_SENTENCE = re.compile(rf"(.*(?:[.!?]\s|[。！？]))\s*((?:{_FINAL})?\s?(?:{_NOUN}).*)", re.I)
_TAG = re.compile(r"^[ \t]{0,9}(?:</?[^\s<>/][^<>\n]{0,40}>|\[[A-Z_]{3,}\])", re.M)


class Unreadable(Exception):
    """Why no score can be taken from a reply; `cause` is the word for metrics."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


def read_answer(reply: Reply, question: Question) -> tuple[float, str, dict[str, Any]]:
    """Return score, reason and what else was decided; JudgeError UNPARSED when it does not count.

    Its cause is `empty`, `truncated`, `thought` (not finished, or of an unknown kind), `form`
    (not what was asked for), `ambiguous` (a second score) or `out_of_range`; for probabilities
    also `unparsed`.

    With a rubric only one JSON object counts that has a verdict for each criterion, no other key,
    and beside a verdict nothing but a reason; its `grades` are returned. A comparison is read in
    the same way: its `places` are returned, 1 the best, and as the score what the first one won.
    A draft is returned as the `rubric` it makes, and as the score how many criteria it has.
    """
    try:
        if reply.probabilities is not None:
            return *_expectation(reply.probabilities, question.scale), {}
        if reply.truncated:
            raise Unreadable("truncated", "the judge's reply was cut at its token limit")
        value, reason, info = _read(reply.text, question)
    except UnfinishedThought as problem:
        raise _failure("thought", str(problem), reply) from None
    except Unreadable as problem:
        raise _failure(problem.cause, str(problem), reply) from None
    return value, reason.strip()[:LONGEST_REASON], info


def build_reminder(question: Question) -> str:
    """What a judge is told when its answer did not count."""
    if question.answer_spec is not None:
        form = question.answer_spec.answer_format()
        return f"Your last answer to this was not in the form asked for. {form}"
    scale = question.scale
    answer_form = score_format(question.output, scale)
    return REMINDER.format(asked=answer_form, low=scale.low, high=scale.high)


def score_format(output: Output, scale: Scale) -> str:
    """The form of a score, in the words that a judge reads."""
    return SCORE_FORMATS[output].format(key=scale.key)


def _failure(cause: str, problem: str, reply: Reply) -> JudgeError:
    excerpt = " ".join(reply.text.split())
    excerpt = f"{excerpt[:60]} … {excerpt[-60:]}" if len(excerpt) > 130 else excerpt
    shown = f", in the judge's reply {excerpt!r}" if excerpt else ""
    return JudgeError(
        Failure.UNPARSED, cause, f"{problem}{shown}", usage=reply.usage, reply=reply.text
    )


def _read(text: str, question: Question) -> tuple[float, str, dict[str, Any]]:
    answer = _answer(text, question.output if question.answer_spec is None else "json")
    if question.comparison is not None:
        places, reason = _read_places(answer, question.comparison)
        return win_share(places), reason, {"places": places}
    if question.draft is not None:
        rows = _read_draft(answer, question.draft)
        return float(len(rows)), "", {"rubric": rows}
    if question.rubric is not None:
        grades, reason = _read_grades(answer, question.rubric)
        return question.rubric.value(grades), reason, {"grades": grades}
    read = _read_object if answer[0] == "{" else _read_text
    return *read(answer, question.scale), {}


def _answer(text: str, output: Output) -> str:
    """What a reply says after its thought and out of its fence; of "json" only an object."""
    text = text.strip("\ufeff \t\r\n").replace("\r\n", "\n")
    if not text:
        raise Unreadable("empty", "the judge's reply is empty")
    answer = _STOP.sub("", text)
    if not answer.startswith("{"):
        answer = strip_leading_thought(answer)
    if (frame := _FRAME.fullmatch(answer)) is not None:
        answer = next(part for part in frame.groups() if part is not None).strip()
    if answer.startswith("{"):
        return answer
    if not answer or MARKS.search(answer) or _TAG.search(_SCORE_TAG.sub("", answer)):
        raise Unreadable("thought", "there is no plain answer after what seems to be a thought")
    if output == "json":
        raise Unreadable("form", "it is not one JSON object and nothing else")
    return answer


def _within(value: float, scale: Scale) -> float:
    """Return a value that lies on the scale; anything else is refused, never clamped."""
    if not scale.low <= value <= scale.high:
        raise Unreadable("out_of_range", f"the score is outside {scale}")
    if 0 < value < 1 < scale.high:
        raise Unreadable("ambiguous", f"{value:g} may be a share of {scale} or a score on it")
    return float(value)


# --- JSON ----------------------------------------------------------------------------------------


def _read_object(text: str, scale: Scale) -> tuple[float, str]:
    """The score under the key that was asked for, or under the plain `score`.

    A judge that writes `score` may mean another scale, so its reason must name no other one.
    """
    entries = _decode(text)
    reasons = [value for key, value in entries.items() if key in REASON_KEYS]
    keys = [key for key in entries if key not in REASON_KEYS]
    if len(keys) != 1 or keys[0] not in (scale.key, PLAIN_KEY):
        odd = [key for key in keys if key not in (scale.key, PLAIN_KEY)]
        problem = (
            f"the key {odd[0][:40]!r} was not asked for" if odd else f'it has no "{scale.key}"'
        )
        raise Unreadable("form", problem)
    if not all(isinstance(reason, str) for reason in reasons):
        raise Unreadable("form", "the reason is not a text")
    if "..." in reasons:
        raise Unreadable("form", "its reason is the placeholder of the form")
    score = entries[keys[0]]
    if isinstance(score, str):
        score = _written(score.strip(), scale)
    if score is None or isinstance(score, bool) or not isinstance(score, int | float):
        raise Unreadable("form", f'"{keys[0]}" is not a number')
    value = _within(score, scale)
    reason = "\n".join(reasons)
    if keys[0] == PLAIN_KEY:
        plain_reason = _QUOTED.sub(" ", reason.translate(_WIDE)).replace("\n", ". ")
        _check_only_score(plain_reason, value, scale, sums=True)
    return value, reason


def _read_grades(text: str, rubric: Rubric) -> tuple[list[float], str]:
    """Grades in [0, 1] of all criteria, in their order, and the reasons, one a line."""
    entries, grades, reasons = _decode(text), [], []
    if set(entries) != set(rubric.keys):
        raise Unreadable("form", f"its keys are not {', '.join(rubric.keys)}")
    for key, criterion in zip(rubric.keys, rubric.criteria, strict=True):
        entry, name = entries[key], criterion.key
        reason = _take_reason(entry, f"{key}'s") if isinstance(entry, dict) else ""
        if not isinstance(entry, dict) or set(entry) != {name}:
            raise Unreadable("form", f"{key} is not {name!r} and a reason")
        verdict = entry[name]
        right = isinstance(verdict, bool) if criterion.levels == 1 else type(verdict) is int
        if not right:
            raise Unreadable("form", f"{name!r} of {key} is not what was asked for")
        if not 0 <= verdict <= criterion.levels:
            raise Unreadable("out_of_range", f"the level of {key} is outside 0-{criterion.levels}")
        grades.append(verdict / criterion.levels)
        reasons.append(
            f"{criterion.name}: {criterion.describe_grade(grades[-1])}. {reason.strip()}".rstrip()
        )
    return grades, "\n".join(reasons)


def _take_reason(entries: dict[str, Any], whose: str) -> str:
    """Take the reason out of an object that may have one."""
    reasons = [entries.pop(key) for key in list(entries) if key in REASON_KEYS]
    reason = reasons[0] if reasons else ""
    if len(reasons) > 1 or not isinstance(reason, str) or reason == "...":
        raise Unreadable("form", f"{whose} reason is not a text of its own")
    return reason


def _read_draft(text: str, draft: RubricDraft) -> list[dict[str, Any]]:
    """The criteria of a draft, as a rubric file has them."""
    entries = _decode(text)
    rows = entries.get("criteria")
    if set(entries) != {"criteria"} or not isinstance(rows, list):
        raise Unreadable("form", 'it is not a list under "criteria" and nothing else')
    try:
        return draft.read(rows).as_rows()
    except RewardError as error:
        raise Unreadable("form", first_line(error)) from None


def _read_places(text: str, rivals: Comparison) -> tuple[list[int], str]:
    """The place of each response, 1 the best, equal ones tied; and the reason."""
    entries = _decode(text)
    reason = _take_reason(entries, "its")
    keys = [key.casefold() for key in rivals.keys]
    if set(entries) != set(keys):
        raise Unreadable("form", f"its keys are not reason, {', '.join(rivals.keys)}")
    verdicts = [entries[key] for key in keys]
    if rivals.count == 2:
        better = verdicts[0].strip().upper() if isinstance(verdicts[0], str) else ""
        if better not in PLACES_OF_TWO:
            raise Unreadable(
                "out_of_range", f"better_response is not one of {', '.join(PLACES_OF_TWO)}"
            )
        return list(PLACES_OF_TWO[better]), reason
    if any(type(place) is not int for place in verdicts):
        raise Unreadable("form", "a place is not a whole number")
    if not all(1 <= place <= rivals.count for place in verdicts):
        raise Unreadable("out_of_range", f"a place is outside 1-{rivals.count}")
    if 1 not in verdicts:  # points or levels, not a ranking
        raise Unreadable("form", "no response has place 1")
    return verdicts, reason


PLACES_OF_TWO = {"R1": (1, 2), "R2": (2, 1), "TIE": (1, 1)}


def _decode(text: str) -> dict[str, Any]:
    """Decode one object; its keys in small letters, each there once."""
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
        raise Unreadable("form", "a key stands there twice")
    return entries


def _reject_constant(word: str) -> float:
    raise ValueError(word)


# Line breaks in a string are no JSON, and harmless.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_constant=_reject_constant, strict=False
)


# --- text ----------------------------------------------------------------------------------------


def _read_text(text: str, scale: Scale) -> tuple[float, str]:
    lines = [line for line in text.translate(_WIDE).split("\n") if re.search(r"\w", line)]
    if not lines or text == "1.":  # a list that ends at once
        raise Unreadable("form", "there is no score in it")
    if sentence := _LAST_SENTENCE.fullmatch(lines[-1]):
        lines[-1:] = sentence.groups()
    before, last = lines[:-1], lines[-1]
    if len(last) > LONGEST_SCORE_LINE:
        raise Unreadable("form", "its last line is not a score and nothing else")
    value, headed = _written(_bare(last), scale), bool(before) and _is_heading(before[-1])
    if headed:  # "### Score" and then "7/10", or "Verdict:" and then "Score: 7"
        before = before[:-1]
    if value is None or (before and not headed):
        value = _labelled(last, scale)
    if value is None:
        raise Unreadable("form", "its last line is not a score and nothing else")
    if before and (last[0].isspace() or not _leads(before[-1])):
        raise Unreadable("form", "its last line may be a quotation")
    value = _within(value, scale)
    reason = "\n".join(before)
    _check_only_score(reason, value, scale, sums=bool(re.search(_FINAL, last, re.I)))
    return value, reason


_SCORE_TAG = re.compile(r"^<(score|rating)>([^<>\n]{1,20})</\1>\Z", re.M)
_WIDE = str.maketrans("０１２３４５６７８９：／（）", "0123456789:/()")
_NO_WIDTH = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")


@lru_cache(maxsize=16)
def _patterns(scale: Scale) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """A value, and a labelled value, on one scale; another scale than that does not match."""
    low, high = re.escape(str(scale.low)), re.escape(str(scale.high))
    bracket = rf"分?\s*\(\s*(?:out\s+of|满分)\s*{high}\s*分?\s*\)"
    over = rf"(?P<over>\s*{_OVER}\s*{high}|\s*{bracket})"
    unit = r"(?:\s*(?:points?|分|点|점|punkten?|баллов))?"
    value = rf"(?P<value>{_NUMBER}){over}?{unit}\s*[.。!]?"
    named = rf"(?:\s*\(?(?:{low}\s*(?:[-–~]|to|到|至)\s*{high}|(?:out\s+of|满分)\s*{high}分?)\)?)?"
    lead = r"(?:(?:so|thus|therefore|hence|overall),?\s+)?(?:(?:the|my)\s+)?"
    label = (
        rf"{lead}\[?(?P<vague>note|nota|voto|total)?(?:{_FINAL})?\s*(?P<noun>{_NOUN})?"
        rf"(?:\s+final)?\]?{named}\s*{_IS}\s*"
    )
    give = (
        r"I(?:['’]d|\s+would)?\s+(?:rate|give|score)\s+(?:it|(?:this|the)(?:\s+\w+)?)(?:\s+an?)?"
        r"(?:\s+(?:score|rating)\s+of)?\s+"
    )
    return re.compile(value, re.I), re.compile(f"(?:{label}|{give}){value}", re.I)


def _bare(line: str) -> str:
    """Take marks of markdown and LaTeX off a line; a blockquote keeps its own."""
    line = re.sub(r"(?<!\w)(?:\*{1,3}|__)|(?:\*{1,3}|__)(?!\w)|`|\\[\[\]()]", "", line)
    line = re.sub(r"\$+([^$\n]*)\$+", r"\1", line)
    line = re.sub(r"\\boxed\{([^{}]*)\}|\[\[([^\[\]]*)\]\]", r"\1\2", line)
    return line.strip()


def _written(text: str, scale: Scale) -> float | None:
    """A number, perhaps over the top of the scale, and nothing else; None for anything else."""
    match = _patterns(scale)[0].fullmatch(text)
    return _number(match["value"]) if match else None


def _labelled(line: str, scale: Scale) -> float | None:
    if tag := _SCORE_TAG.fullmatch(line):
        return _written(tag[2].strip(), scale)
    match = _patterns(scale)[1].fullmatch(re.sub(r"^(?:#{1,6}|[-•+])\s+", "", _bare(line)))
    # "Total score: 7" may be a sum, "Overall: 8" many things, unless they name the scale.
    if not match or not (match["over"] or (match["noun"] and not match["vague"])):
        return None
    return _number(match["value"])


def _number(text: str) -> float:
    for names in (_WORDS, _HAN):
        if text.lower() in names:
            return names.index(text.lower()) + 1.0
    return float(text.replace("−", "-"))


def _is_heading(line: str) -> bool:
    """Whether a line does nothing but announce the score of the whole."""
    plain = re.sub(r"^#{1,6}\s+", "", _bare(line))
    nouns = rf"{_NOUN}|evaluation|assessment|verdict|judge?ment|conclusion|result"
    return bool(re.fullmatch(rf"(?:{_FINAL}|my)?\s*(?:{nouns})\s*:?", plain, re.I))


def _leads(line: str) -> bool:
    """Whether a line is whole in itself, and does not announce the next one."""
    complete = _ITEM.match(line) or _ENDS.search(line)
    return bool(complete) and not re.search(r"[:：]\W{0,9}$", line) and not _ANNOUNCES.search(line)


@lru_cache(maxsize=16)
def _other_measure(scale: Scale) -> re.Pattern[str]:
    """Words that name another scale, or what an end of this one means."""
    low, high = re.escape(str(scale.low)), re.escape(str(scale.high))
    to = r"\s?(?:[-–]|to)\s?"
    span = rf"(?!{low}{to}{high}(?![0-9]))-?[0-9]{{1,4}}{to}[0-9]{{1,4}}"
    return re.compile(
        rf"\bscale\s{{1,3}}(?:of\s|from\s)?{span}|(?<![\w.-]){span}[\s-]{{1,3}}scale\b"
        rf"|(?<![0-9]\s)\bout\s+of\s+(?!{high}\b)[0-9]+(?:(?=\s+points\b)|{_CLOSES})"
        r"|\b(?:lower|smaller|less)\s+(?:is|scores\s+are)\s+better|\b(?:scores|ratings)\b.{0,20}\bpercent"
        r"|\b(?:place|rank)\s+[0-9]+\s+of\b|\b[0-9]{1,3}\s+means\s+[0-9]+\s?%"
        rf"|(?:^|[(,;:]\s?)(?:{low}|{high})\s{{0,3}}=\s{{0,3}}[^\W\d]{{3}}"
        rf"|(?<![\w./-])(?:{low}|{high})\s{{0,3}}(?:means\b|being\b"
        r"|is\s+(?:the\s+)?(?:best|worst|most|lowest|highest)\b|[がは]\s?最)",
        re.I,
    )


def _check_only_score(reason: str, value: float, scale: Scale, *, sums: bool) -> None:
    """Refuse a reason that names another score or scale.

    A score that `sums` up may stand beside such of criteria, as in "style 6/10, facts 9/10".
    """
    reason = _NO_WIDTH.sub("", reason)
    numbers = [_number(match[match.lastindex or 0]) for match in _ANOTHER.finditer(reason)]
    over = rf"(?<![\w/.])({_NUMBER})\s*{_OVER}\s*{scale.high}(?![\w/])({_CLOSES})?"
    shares = list(re.finditer(over, reason, re.I))
    if not sums or (len(shares) == 1 and shares[0][2] is not None):
        numbers += [_number(share[1]) for share in shares]
    if any(number != value for number in numbers):
        raise Unreadable("ambiguous", "it names several different scores")
    if _other_measure(scale).search(reason):
        raise Unreadable("ambiguous", f"it speaks of another scale than {scale}")


# --- probabilities -------------------------------------------------------------------------------


def _expectation(probabilities: Mapping[int, float], scale: Scale) -> tuple[float, str]:
    """Return the mean level; the probabilities must be those of exactly the levels asked for."""
    pairs = dict(probabilities)
    if not pairs:
        raise Unreadable("empty", "the judge gave no probabilities")
    if wrong := [level for level in pairs if level not in scale.levels()]:
        raise Unreadable("out_of_range", f"level {wrong[0]!r} is not on the scale {scale}")
    if missing := [level for level in scale.levels() if level not in pairs]:
        raise Unreadable("unparsed", f"there is no probability of level {missing[0]}")
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
