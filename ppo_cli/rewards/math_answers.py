r"""Mathematical answers: find the one a reply gives, and say whether it equals the right one.

`decide_quickly` settles by text what text can settle. `equal` asks math-verify and sympy, which
may run for ever on a hostile expression: only call it where it can be killed (see `pool`).
"""

from __future__ import annotations

import re
from typing import Any

from ppo_cli.rewards.checkers import (
    accepted,
    after_thinking,
    clean,
    find_after_hashes,
    find_boxed,
    find_choice,
    find_first_number,
    find_last_number,
    normalise_maths,
    read_choice,
    read_number,
    unwrap_text,
)

LONGEST_ANSWER = 300
LAST_PART = 2000
_ANNOUNCED = re.compile(
    r"(?:final\s+answer|answer)\s*(?:is|:|=)\s*:?|答案\s*(?:是|为|為|:)\s*:?", re.IGNORECASE
)
_INLINE_MATHS = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_MATHS_SIGN = re.compile(r"[\\^=<>(){}\[\]/+*]")
_LEADING_CHOICE = re.compile(r"[(\[]([A-J])[)\]]\s|([A-J])[.):,]\s")
_MIXED_NUMBER = re.compile(r"(?<![\d.])(\d+)\s+(\d+)/(\d+)")
_ROOT = re.compile(r"√\s*(\d+|[A-Za-z])")
_SENTENCE_END = re.compile(r"\n|。|\.(?=\s|$)|[;!](?=\s|$)")
_MEMBER_OF = re.compile(r"^\s*[A-Za-z]\s*(?:\\in\b|∈)\s*")
_SYMBOLS = str.maketrans(
    {
        "√": "\\sqrt",
        "∞": "\\infty ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "≠": "\\ne ",
        "π": "\\pi ",
        "×": "\\times ",
        "·": "\\cdot ",
        "÷": "\\div ",
        "∪": "\\cup ",
        "∩": "\\cap ",
        "±": "\\pm ",
    }
)
_INTEGER = re.compile(r"[-+]?\d+|[-+]?\d{1,3}(?:,\d{3})+")


def find_answer(reply: str, ground_truth: Any = None) -> str | None:
    """Return the answer of a reply: boxed, announced, after `####`, or the last fitting thing."""
    text = clean(after_thinking(reply))
    found = find_boxed(text) or _marked(text)
    if found:
        return found
    text = text[-LAST_PART:]
    golds = accepted(ground_truth)
    if golds and all(read_choice(gold) for gold in golds):
        return read_choice(text.strip()) or find_choice(text)
    last_number = find_last_number(text)
    maths = list(_INLINE_MATHS.finditer(text))
    wants_number = bool(golds) and all(read_number(gold) is not None for gold in golds)
    if maths and not (wants_number and find_last_number(text[maths[-1].end() :])):
        return _inside(maths[-1]).rpartition("=")[2].strip() or None
    return last_number


def _inside(maths: re.Match[str]) -> str:
    return str(next(filter(None, maths.groups()))).strip()


def _marked(text: str) -> str | None:
    """Return what follows the last `the answer is` or `####`, whichever comes later."""
    places = [match.end() for match in _ANNOUNCED.finditer(text)]
    hashes = find_after_hashes(text)
    if not places or (hashes and text.rfind("####") > places[-1]):
        return hashes
    return _announced(text[places[-1] :])


def _announced(rest: str) -> str | None:
    """Return the answer at the head of what follows `the answer is`."""
    rest = rest.strip().strip("*").strip()
    maths = _INLINE_MATHS.match(rest)
    if maths:
        return _inside(maths)
    sentence = _SENTENCE_END.split(rest, maxsplit=1)[0].strip(" *,:$")
    several = re.search(r"\bor\b|或", sentence) is not None
    if " " in sentence and not several and not _MATHS_SIGN.search(sentence):
        return _leading_choice(sentence) or find_first_number(sentence) or sentence
    return sentence or None


def _leading_choice(text: str) -> str | None:
    """Return the letter of `(B) 12`, `B. 12` or `B`."""
    match = _LEADING_CHOICE.match(unwrap_text(text).strip())
    return match.group(1) or match.group(2) if match else read_choice(text)


def decide_quickly(answer: str | None, gold: str) -> bool | None:
    """Return the verdict where comparing text is enough, else None."""
    if answer is None:
        return False
    if normalise_maths(answer) == normalise_maths(gold):
        return True
    if len(answer) > LONGEST_ANSWER or len(gold) > LONGEST_ANSWER:
        return False
    wanted, given = read_choice(gold), _leading_choice(answer)
    if wanted and given and gold.strip(" ()[].:$").isupper():
        return wanted == given
    left, right = normalise_maths(answer), normalise_maths(gold)
    if _INTEGER.fullmatch(left) and _INTEGER.fullmatch(right):
        return read_number(left) == read_number(right) and read_number(left) is not None
    return None


def equal(answer: str, gold: str) -> bool:
    """Ask math-verify whether two expressions are equal; may hang, call it in a worker."""
    import logging

    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # It says once that its own time limits are off; the worker's limits hold instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    kinds = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

    def read(text: str) -> list[Any]:
        plain = _ROOT.sub(r"\\sqrt{\1}", _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", clean(text)))
        inside = _MEMBER_OF.sub("", plain.translate(_SYMBOLS))
        inside = inside.replace("\\$", "").replace("$", "")
        boxed = f"\\boxed{{{inside}}}"
        return list(parse(boxed, kinds, fallback_mode="no_fallback", parsing_timeout=None))

    golds = read(gold)
    answers = read(answer) if golds else []
    if not golds or not answers:
        return False
    # A range may be given as a set by one and as an inequality by the other.
    if verify(golds, answers, allow_set_relation_comp=True, timeout_seconds=None):
        return True
    return any(_same_constant(one, other) for one in golds for other in answers)


def _same_constant(one: Any, other: Any) -> bool:
    """Compare constants in which e and i were read as letters, such as e^{i*pi} and -1."""
    from sympy import E, Expr, I, Symbol

    known = {Symbol("e"): E, Symbol("i"): I}
    if not (isinstance(one, Expr) and isinstance(other, Expr)):
        return False
    free = one.free_symbols | other.free_symbols
    if not free or not {str(symbol) for symbol in free} <= {"e", "i"}:
        return False
    values = {symbol: known[Symbol(str(symbol))] for symbol in free}
    gap = (one.subs(values) - other.subs(values)).evalf(30)
    return bool(gap.is_number and abs(complex(gap)) < 1e-12)
