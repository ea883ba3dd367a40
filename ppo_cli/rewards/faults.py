"""Where a response goes wrong, as far as a rule is certain: a wrong equation, a line that raises.

What a response loses is placed there, in three pieces: what is before the fault, it, and what is
after it. Without a certain place the score belongs to the end, as ever.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from ppo_cli.records import PlacedReward, Score

Span = tuple[int, int]

MAX_CHARS = 100  # of the left side of an equation
NEAR = 200  # characters around it that are read
SHOWN_CHARS = 80  # of a fault
# Python refuses to read numbers of thousands of digits.
_NUMBER = r"(?:\d{1,30}(?:,\d{3}){0,9}(?:\.\d{1,30})?|\.\d{1,30})"
_EQUATION = re.compile(
    rf"(?P<formula>[.(\d$€£][\d \t.,$€£()x+*/×÷−–-]{{0,{MAX_CHARS}}})={{1,2}}[ \t]*"
    rf"(?P<result>[$€£]?[-−]?[$€£]?{_NUMBER})"
    r"(?!\w|[ \t]*(?:[-+*/×÷−–^%°:(]|\\[^\])\\])|[ \t]+(?:x )?[\d$]|[,.]\d)"
)
# What stands in front of the left side makes it a part of something else.
_PART = re.compile(
    r"[\w.^)\]}%:'\\*/+×÷−–√∛∜?#-]$"
    r"|(?:[\d^)\]}%*/+×÷−–\\·⋅∙∑-]|(?<!\w)[a-zA-Z]|\b(?:by|times|plus|minus))\s+$"
    r"|\b(?i:log|ln|lg|sin|cos|tan|sqrt|root|twice|than|hour|step|day|case|part|page|chapter|angle)"
    r"s?[ \t]+$"
    r"|(?:\d[ \t]+and|(?:%|half|third|thirds|quarter|quarters)[ \t]+of)[ \t]+$"
)
_ITEM = re.compile(r"(?:^|\n)[ \t]*(?:[-–*•]|\(?\d{1,3}[.)])[ \t]+$")  # the mark of a list
_FIRST_ITEM = re.compile(r"\(?\d{1,3}[.)][ \t]+(?=[(\d$€£])")
_TWO_QUOTIENTS = re.compile(r"[/÷][ \t$]*[\d.]+[ \t]*[/÷]")  # 3 / 1/4 is meant in two ways
# Other arithmetic, or a text about mistakes.
_DOUBT = re.compile(
    r"\b(?:mod\w*|base|binary|boolean|gf|octal|hex\w*|clock|remainder|wrong|incorrect|mistake|not|false"
    r"|impossible|contradict\w*|suppose|if|let|says|half|root of|digit|nearest|pages|cancel)\b"
    r"|n[’']t\b|[≠?✗]|~~|\d\.\d{3}(?!\d)",  # 1.000 may be a thousand
    re.I,
)
# A result in another unit than what is calculated with, or one that goes on in the next line.
_OTHER_UNIT = re.compile(
    r"[ \t$]*(?:(?:hour|minute|second|day|week|month|year|inch|yard|mile|meter|metre|gram|pound"
    r"|ounce|liter|litre|gallon|cent|dozen|hundred|thousand|million|billion|goal)(?:e?s)?\b"
    r"|(?:feet|foot|per|percent|pct|prozent|[ap]\.?m|k?g|[ckm]?m|km|lbs?|oz|ml)\b|[^\x00-\x7f]|\s*[-+*/]\s*\d)",
    re.I,
)
NEARLY = Fraction(1, 10**9)  # what floating-point numbers differ by
_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "–": "-", **dict.fromkeys("$€£", " ")})
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_LATEX = re.compile(r"\\(times|cdot|div|\$)")


def find_wrong_equation(text: str, _: Score) -> Span | None:
    """Return the first equation of numbers that does not hold, None without one.

    A quotient, or a calculation with decimals, may be rounded or cut off on the right side.
    """
    signs = {"times": "*", "cdot": "*", "div": "/", "$": " "}
    text = _LATEX.sub(lambda match: signs[match[1]].ljust(len(match[0])), text)
    for match in _EQUATION.finditer(text):
        formula = match["formula"]
        if item := _FIRST_ITEM.match(formula):
            formula = formula[item.end() :]
        while formula.startswith("(") and formula.count("(") > formula.count(")"):
            formula = formula[1:]
        start = match.end("formula") - len(formula)
        before, after = text[max(0, start - NEAR) : start], text[start : match.end() + NEAR]
        line = before.rpartition("\n")[2] + after.partition("\n")[0]
        value = _calculate(formula)
        if value is None or _TWO_QUOTIENTS.search(formula) or _DOUBT.search(line):
            continue
        if _PART.search(before) and not _ITEM.search(before):
            continue
        written = re.sub(r"[^\d.-]", "", match["result"].translate(_SIGNS))
        rounded = "/" in formula.translate(_SIGNS) or "." in formula
        unit = Fraction(1, 10 ** len(written.partition(".")[2])) if rounded else Fraction(0)
        right, money = Fraction(written), any(sign in match[0] for sign in "$€£")
        # Cents, and a distance such as 2020-2024.
        if abs(right) == abs(value) or (money and value in (100 * right, right / 100)):
            continue
        if _OTHER_UNIT.match(text[match.end() : match.end() + NEAR]):
            continue
        if abs(value - right) >= max(unit, NEARLY):
            return start, match.end()
    return None


def _calculate(text: str) -> Fraction | None:
    """Return the value of a calculation of numbers; None of anything else."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.translate(_SIGNS)).strip()
    text = re.sub(r"(?<=[\d)])([ \t]*)x(?=[ \t]*[\d(.])", r"\1*", text)
    try:
        tree = ast.parse(text, mode="eval").body
        return _evaluate(tree, text) if isinstance(tree, ast.BinOp) else None
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()):
            return Fraction(ast.get_source_segment(text, node) or "")
        case ast.UnaryOp(op=ast.USub()):
            return -_evaluate(node.operand, text)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            operate = _OPERATORS[type(node.op)]
            return operate(_evaluate(node.left, text), _evaluate(node.right, text))
    raise ValueError


def find_raising_line(text: str, score: Score) -> Span | None:
    """Return the line at which the first test failed by an error, if it is there once."""
    line = score.info.get("line")
    if not line:
        return None
    spans = [m.span() for m in re.finditer(rf"(?m)^[ \t]*{re.escape(line)}[ \t\r]*$", text)]
    return spans[0] if len(spans) == 1 else None


def place_loss(score: Score, text: str, fault: Span) -> Score:
    """Return a score v in [0, 1] with v - 1 at a fault of the text, and 1/n at each of n pieces.

    So they add up to v, and what is not the fault earns what it earns in a right response.
    """
    start, end = fault
    ends = [start] if text[:start].strip() else []
    ends += [end, len(text)] if text[end:].strip() else [len(text)]
    at = ends.index(end) if end in ends else len(ends) - 1
    share = 1 / len(ends)
    values = [share + (score.number - 1) * (number == at) for number in range(len(ends))]
    steps = tuple(PlacedReward(*place) for place in zip(ends, values, strict=True))
    fault_text = text[start:end].strip()[:SHOWN_CHARS]
    return replace(score, steps=steps, info={**score.info, "fault": fault_text})
