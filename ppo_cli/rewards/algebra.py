"""Equality of mathematical expressions: by comparing text, or with sympy and math-verify.

`decide` is quick and safe. `equal` may hang on hostile expressions: call it in a worker process.
math-verify reads single expressions, relations, sets and matrices. `Unreadable` is raised for
texts that its grammar would misread (words as products of letters, `3 4` as 7, `12:30` as a
fraction).
"""

from __future__ import annotations

import re
from typing import Any

from ppo_cli.rewards.answers import read_choice, read_leading_choice, strip_delimiters
from ppo_cli.rewards.values import (
    NOISE,
    ROUNDING,
    clean,
    names_value,
    normalise_maths,
    normalise_words,
    read_quantity,
    same_quantity,
    unwrap_text,
)

EXACT_DIGITS = 1000  # of the difference of two constants without decimals
MAX_ANSWER_CHARS = 300  # sympy is too slow for longer expressions

# Unicode signs -> LaTeX.

_SYMBOLS = str.maketrans({
    "√": "\\sqrt", "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "π": "\\pi ",
    "×": "\\times ", "·": "\\cdot ", "÷": "\\div ", "∪": "\\cup ", "∩": "\\cap ", "±": "\\pm ",
    "∈": "\\in ", "∅": "\\emptyset ", "≈": "\\approx ", "θ": "\\theta ", "ℝ": "\\mathbb{R}",
    "α": "\\alpha ", "β": "\\beta ", "ℤ": "\\mathbb{Z}", "−": "-",
})  # fmt: skip
# Regular expressions that bring spellings of one thing into the LaTeX that math-verify reads,
# applied in this order. The numbers name the groups.
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:math(?:rm|bf|it)|text(?:normal|bf|it|rm)|mbox|operatorname)(?=\s*\{)", r"\\text"),
        # \text{…} around a number or a single letter is dropped.
        (r"\\text\s*\{([^{}A-Za-z]*)\}", r"\1"),
        (r"\\text\s*\{\s*([A-Za-z])\s*\}", r"\1"),
        # Operators and relations.
        (r"\*\*", "^"),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=|\\neq(?![a-z])", r"\\ne "),
        (r"\\(?:leq|leqslant|le)(?![a-z])", r"\\le "),
        (r"\\(?:geq|geqslant|ge)(?![a-z])", r"\\ge "),
        (r"\\lt(?![a-z])", "<"),
        (r"\\gt(?![a-z])", ">"),
        (r"\\varnothing", r"\\emptyset "),
        # Roots and functions, with and without braces or backslash.
        (r"\\sqrt\s+(?=\w)|√\s*(?=\w)", r"\\sqrt"),
        (r"(?<![\\A-Za-z])(sqrt)\s*\(([^()]*)\)", r"\\sqrt{\2}"),
        (r"\\sqrt\s*(\d+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])(sin|cos|tan|cot|sec|csc|log|ln|exp|pi|infinity)(?![a-z])", r"\\\1 "),
        (r"\\infinity", r"\\infty"),
        (r"\\[lcdv]?dots[bcim]?(?![a-z])|\.\.\.", r"\\dots "),
        # Mixed numbers, powers of ten, thousands separators.
        (r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)", r"\1\\frac{\2}{\3}"),
        (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)", r"(\1\\cdot 10^{\2})"),
        (r"(?<=\d)(?:\{,\}|,\\!|\\,|\\!)\s?(?=\d{3})", ""),
        # Spacing, sizes of brackets, degrees.
        (r"\\q?quad(?![a-z])|(?<!\\)\\[,;:! ]|~|\\displaystyle|\\limits", " "),
        (r"\\(?:left|right|mathopen|mathclose|[bB]igg?[lr]?)(?![a-z])", ""),
        (r"\^\s*\{?\\circ\}?|°|\\degree", ""),
    )
)  # fmt: skip
_OR = re.compile(
    r"\s*,?\s*(?:\\text\s*\{\s*or\s*\}|(?<![A-Za-z\\])or(?![a-z])|\\lor|\\vee|或|または)\s*"
)
_AND = re.compile(
    r"\s*,?\s*(?:\\text\s*\{\s*and\s*\}|(?<![A-Za-z\\])and(?![a-z])|\\land|\\wedge|且|かつ|和)\s*"
)
# `x < 1`, `x \le 1`; then units at the end, bare and in \text{…}.
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|leq|geq|neq|lt|gt)(?![a-z])|!=")
_TRAILING_UNIT = re.compile(
    r"(?:(?<=\w)|(?<=[})\]]))(?:\s+(?:sq(?:uare)? )?(?:units?|cm|mm|km|kg|feet|ft|inches|meters?"
    r"|metres?|miles?|degrees?|dollars?|days?|weeks?|months?|years?|hours?|minutes?|seconds?)(?:\s*\^\s*\{?\d\}?)?|\s*\\?%|\s+percent)$"
)
# Single letters only if they are units: `2\mathrm{e}` is a product.
_MARKED_UNIT = re.compile(
    r"(?<=[\w})\]])(?:\s|~|\\[,;: ])*\\(?:text\w*|mbox|math(?:rm|bf|it)|operatorname)\s*"
    r"\{[\s~]*(?:[msghLNJWVAKC]|(?!(?:and|or)\b)[^{}\d]{2,}?)[\s.]*\}(?:\s*\^\s*\{?\d\}?)?$"
)
# `[0,1[` and `]0,1[` are written with round brackets where an end is open.
_INTERVAL = re.compile(r"([\[\]])\s*([^\[\],;\s][^\[\],;]*)[,;]\s*([^\[\],;]+)([\[\]])")
# `x \in`, and `\{x \mid x > 1\}`.
_MEMBER_OF = re.compile(r"^\s*[A-Za-z]\s*\\in(?![a-z])\s*")
_BUILDER = re.compile(
    r"^\\?\{\s*([a-z])\s*(?:\\in\s*(?:\\mathbb\s*\{?\s*R\s*\}?|R)\s*)?(?:\\mid|\\vert|\||:)\s*(.+?)\s*\\?\}$"
)
_DOTS = re.compile(r"\\dots|\.\. ")
# `12:30`, `3:4`, `101_2`.
_TIME = re.compile(r"\d{1,2}:\d{2}(?!\d)")
_RATIO = re.compile(r"\s*([\w.\\{}]+)\s*:\s*([\w.\\{}]+)\s*")
_BASE = re.compile(r"\(?([0-9A-Za-z]+)\)?_\s*\{?(\d{1,2})\}?")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
# Short words that mark a text as words; other short letters may be a product of variables.
_SMALL_WORDS = {
    "is", "of", "if", "for", "in", "the", "to", "by", "at", "no", "yes", "odd", "not", "all", "any",
    "are", "be", "do", "we", "so", "it", "on", "as", "an", "or", "and", "but", "mod",
}  # fmt: skip
_NAME = re.compile(r"[^\d+\-*^<>=,;]+")


class Unreadable(Exception):
    """An expression that math-verify does not read, or would misread."""


def decide(answer: str | None, gold: str) -> bool | None:
    """Return whether answer and gold are equal, None if comparing text cannot tell."""
    if answer is None:
        return False
    plain_answer, plain_gold = normalise_maths(answer), normalise_maths(gold)
    if plain_answer == plain_gold:
        return True
    if len(answer) > MAX_ANSWER_CHARS or len(gold) > MAX_ANSWER_CHARS:
        return False
    # Choices, numbers with a base, quantities, words: each has its own comparison.
    letter = read_choice(gold)
    if letter and gold.strip(" ()[].:$").isupper():
        chosen = read_leading_choice(answer)
        return chosen == letter if chosen else None
    bases = _BASE.fullmatch(plain_answer), _BASE.fullmatch(plain_gold)
    if bases[0] and bases[1]:
        return bases[0].groups() == bases[1].groups()
    quantities = read_quantity(answer, decimal_comma=True), read_quantity(gold)
    if quantities[0] and quantities[1]:
        return same_quantity(quantities[0], quantities[1])
    phrases = [_read_words(text) for text in (answer, gold)]
    if phrases[0] and phrases[1]:
        return phrases[0] == phrases[1]
    return False if (phrases[0] and quantities[1]) or (phrases[1] and quantities[0]) else None


def _read_words(text: str) -> str:
    """Return plain words in lower case; empty for a text that may be an expression."""
    phrase = normalise_words(strip_delimiters(unwrap_text(text)))
    if not phrase or re.search(r"[\d\\=<>^*/+|{}\[\]_]", phrase):
        return ""
    letters = [word for word in re.split(r"[\W_]+", phrase) if word]
    plain = any(len(word) > 3 or not word.isascii() or word in _SMALL_WORDS for word in letters)
    return phrase if plain and not re.search(r"[απθβ∞√≤≥≠∪∩±]", phrase) else ""


def equal(answer: str, gold: str) -> bool:
    """Return whether math-verify finds two expressions equal; may hang, so call it in a worker.

    Raises Unreadable for a text that its grammar does not cover or would misread.
    """
    answer_latex, gold_latex = _write_latex(answer), _write_latex(gold)
    answer_latex, gold_latex = _unwrap_equations(answer_latex, gold_latex)
    if normalise_maths(answer_latex) == normalise_maths(gold_latex):
        return True
    if ":" in answer_latex or ":" in gold_latex:
        answer_latex, gold_latex = _write_ratios(answer_latex, gold_latex)
    if (
        (quantities := (read_quantity(answer_latex), read_quantity(gold_latex)))
        and quantities[0]
        and quantities[1]
    ):
        return same_quantity(quantities[0], quantities[1])
    if (
        _is_tuple(gold_latex)
        and _list_parts(answer_latex)[1:]
        and not re.search(r"[(\[]|\\\{", answer_latex)
    ):
        answer_latex = f"({answer_latex.strip(' {}')})"
    if (gold_latex.startswith("\\{") and answer_latex.startswith("(")) or (
        answer_latex.startswith("\\{")
        and _is_tuple(gold_latex)
        and not _BUILDER.match(answer_latex)
    ):
        return False
    return _compare(_read(answer_latex), _read(gold_latex))


def _write_latex(text: str) -> str:
    """Return a text in the notation that math-verify reads, without its unit."""
    plain = strip_delimiters(clean(text).translate(_SYMBOLS)).replace("\n", " ")
    plain = _MARKED_UNIT.sub("", plain.replace("\\$", "").replace("$", "").strip())
    for pattern, replacement in _REWRITES:
        plain = pattern.sub(replacement, plain)
    plain = _INTERVAL.sub(_write_interval, plain)
    plain = _TRAILING_UNIT.sub("", plain.strip()).strip()
    return _MEMBER_OF.sub("", plain).strip().rstrip(".,;").strip()


def _write_interval(match: re.Match[str]) -> str:
    start, low, high, end = match.groups()
    if (start, end) == ("[", "]"):
        return match.group()
    return f"{'(' if start == ']' else '['}{low},{high}{')' if end == '[' else ']'}"


def _unwrap_equations(answer_latex: str, gold_latex: str) -> tuple[str, str]:
    """Reduce equations to their values: `x = 5` compared with `5`, or with `x = 10/2`."""
    answer, gold = (_split_equation(text) for text in (answer_latex, gold_latex))
    if answer and gold is None and len(answer) == 2 and re.fullmatch("[A-Za-z]", answer[1]):
        answer.reverse()
    if answer is None and gold is None:
        return answer_latex, gold_latex
    if gold is None and answer is not None:
        if not all(names_value(side, answer[-1]) for side in answer[:-1]) or (
            answer[-1] == "0" and not _NAME.fullmatch(_drop_subscripts(answer[0]))
        ):
            raise Unreadable("an equation, not a value")
        return answer[-1], gold_latex
    if answer is None and gold is not None:
        return answer_latex, gold[-1] if _NAME.fullmatch(_drop_subscripts(gold[0])) else gold_latex
    assert answer is not None and gold is not None
    if normalise_maths(answer[0]) == normalise_maths(gold[0]) and _NAME.fullmatch(
        _drop_subscripts(gold[0])
    ):
        return answer[-1], gold[-1]
    return answer_latex, gold_latex


def _split_equation(text: str) -> list[str] | None:
    """Return the sides of an equation, without rounded values; None for any other text."""
    text, *rounded = re.split(r"\\approx|\\simeq|\\doteq", text)
    if rounded and not text.strip("= "):
        return ["", rounded[-1].strip()]
    if "=" not in text:
        return (
            [text.strip(), rounded[-1].strip()]
            if rounded and _NAME.fullmatch(_drop_subscripts(text.strip()))
            else (["", text.strip()] if rounded else None)
        )
    if (
        _OR.search(text)
        or _AND.search(text)
        or _RELATION.search(text)
        or _list_parts(text)[1:]
        or "\\begin" in text
        or "\\sum" in text
        or "\\prod" in text
    ):
        return None
    return (
        [side.strip() for side in text.split("=")]
        if not re.search(r"[^\\]\{[^{}]*=", text)
        else None
    )


def _drop_subscripts(text: str) -> str:
    return re.sub(r"_(?:\{[^{}]*\}|\w)|\d(?=\))", "", text) or "x"


def _list_parts(text: str) -> list[str]:
    """Split at commas and semicolons outside brackets; a comma in `1,000` does not split."""
    parts, depth, start = list[str](), 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if sign in ",;" and depth <= 0 and not re.match(r"\d{3}(?!\d)", text[place + 1 :]):
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def _is_tuple(text: str) -> bool:
    """Whether a text is one pair of round brackets with a comma inside."""
    return (
        text.startswith("(")
        and text.endswith(")")
        and "," in text
        and text.count("(") == text.count(")")
        and (len(_list_parts(text)) == 1 and "\\cup" not in text)
    )


def _write_ratios(answer_latex: str, gold_latex: str) -> tuple[str, str]:
    """Write ratios as fractions; Unreadable for times of day, which only text can compare."""
    if _BUILDER.match(answer_latex) or _BUILDER.match(gold_latex):
        return answer_latex, gold_latex
    if _TIME.fullmatch(answer_latex.strip()) or _TIME.fullmatch(gold_latex.strip()):
        raise Unreadable("a time of day or a ratio")
    sides = [_RATIO.fullmatch(text) for text in (answer_latex, gold_latex)]
    if any(
        ":" in text and side is None
        for text, side in zip((answer_latex, gold_latex), sides, strict=True)
    ):
        raise Unreadable("a ratio of several")
    answer_fraction, gold_fraction = (
        rf"\frac{{{s[1]}}}{{{s[2]}}}" if s else text
        for s, text in zip(sides, (answer_latex, gold_latex), strict=True)
    )
    return answer_fraction, gold_fraction


def _check_readable(text: str) -> None:
    """Raise Unreadable for words, lists with dots, and numbers with only a space between them.

    math-verify's grammar would misread these; times and ratios are handled elsewhere.
    """
    if _DOTS.search(text):
        raise Unreadable("a list with dots")
    if re.search(r"\\text\s*\{[^{}]*[A-Za-z]{2}|\\begin\{cases\}", text):
        raise Unreadable("words within an expression")
    if re.search(r"(?<![_^\d.])[\d.]+\s+(?=\d)", text):
        raise Unreadable("numbers without an operator between them")
    bare = re.sub(r"\\(?:begin|end)\{\w+\}(?:\{[clr|]+\})?|\\[A-Za-z]+", " ", text)
    for word in _WORDS.findall(bare):
        if len(word) > 3 or word.casefold() in _SMALL_WORDS:
            raise Unreadable(f"the word {word!r} within an expression")


def _read(text: str) -> Any:
    """Return the sympy object of a whole expression."""
    from latex2sympy2_extended.latex2sympy2 import (
        NormalizationConfig,
        latex2sympy,
        normalize_latex,
    )
    from math_verify.grader import should_treat_as_complex

    # Set builders and relations joined by "and" or "or" become sets of sympy.
    builder = _BUILDER.match(text)
    if _RELATION.search(text) and not re.search(r"[(\[{]", text):
        text = text.replace("\\cup", " or ")
    if builder is not None and (_RELATION.search(builder[2]) or "=" in builder[2]):
        return _read_relations(builder[2])
    if _RELATION.search(text) and (_OR.search(text) or _AND.search(text)):
        return _read_relations(text)
    text = _AND.sub(", ", _OR.sub(", ", text)).replace(",,", ",").replace(", ,", ",")
    _check_readable(text)
    looks = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
    )
    latex = normalize_latex(text, looks)
    if not latex.strip():
        raise Unreadable("an empty expression")
    try:
        return latex2sympy(
            latex,
            is_real=not should_treat_as_complex(latex),
            convert_degrees=False,
            normalization_config=None,
        )
    except Exception as error:  # it raises many kinds of errors for an unreadable text
        raise Unreadable("an expression that math-verify does not read") from error


def _read_relations(text: str) -> Any:
    """Return the set of `x < 1 or x > 2`, whose relations have one variable."""
    from sympy import Intersection, Union

    pieces = []
    for alternative in _OR.split(text):
        parts = [_read(part) for part in re.split(_AND.pattern + "|,", alternative) if part.strip()]
        try:
            pieces.append(Intersection(*(part.as_set() for part in parts)))
        except Exception as error:
            raise Unreadable("relations that are no set of one variable") from error
        if len({symbol for part in parts for symbol in part.free_symbols}) != 1:
            raise Unreadable("relations in several variables")
    return Union(*pieces)


def _compare(answer: Any, gold: Any) -> bool:
    """Compare two sympy objects: numbers by value, anything else with math-verify."""
    import logging

    from math_verify import verify
    from sympy import Basic, Expr, Float, Rational

    if isinstance(answer, Expr) and isinstance(gold, Expr):
        numbers = _evaluate(answer), _evaluate(gold)
        if numbers[0] is not None and numbers[1] is not None:
            return _same_number(numbers[0], numbers[1], answer, gold)
    # It warns that its time limits are off; the worker has limits instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    exact = [
        side.xreplace({number: Rational(str(number)) for number in side.atoms(Float)})
        if isinstance(side, Basic) and side.has(Float) else side
        for side in (gold, answer)
    ]  # fmt: skip
    # One side may be a set and the other an inequality.
    return bool(
        verify(
            *exact,
            float_rounding=30,
            numeric_precision=40,
            allow_set_relation_comp=True,
            timeout_seconds=None,
        )
    )


def _evaluate(expression: Any, max_digits: int = 100) -> Any:
    """Return a constant expression as a number of 50 digits, with e and i as constants.

    Terms that cancel are computed with up to `max_digits`. Returns None for an expression that is
    not constant or not finite.
    """
    from sympy import E, I, oo, zoo

    constants = {"e": E, "i": I}
    free = expression.free_symbols
    if not {str(symbol) for symbol in free} <= constants.keys() or expression in free:
        return None
    value = expression.doit().subs({symbol: constants[str(symbol)] for symbol in free})
    if value.has(oo, -oo, zoo):
        return None
    number = value.evalf(50, maxn=max_digits)
    return number if number.is_number and number.is_finite else None


def _same_number(answer_value: Any, gold_value: Any, answer: Any, gold: Any) -> bool:
    """Compare exactly, or within a relative tolerance if one side has decimals."""
    from sympy import Float, Rational, primefactors, simplify

    gap, size = abs(answer_value - gold_value), max(abs(answer_value), abs(gold_value))
    decimals = [side.has(Float) for side in (answer, gold)]
    if not any(decimals):
        if size < 1e-30:
            return bool(gap == 0) or simplify(answer - gold) == 0
        if gap > size * 1e-40:
            return False
        # Digits beyond those of the values count, as in 100! and 100! + 1.
        rest = _evaluate(answer - gold, EXACT_DIGITS)
        return rest is not None and bool(abs(rest) < 1e-30 * min(1, size))
    # A fraction with a finite decimal form must match it; others may be rounded.
    exact = [side for side, decimal in zip((answer, gold), decimals, strict=True) if not decimal]
    ends = all(
        side.doit().is_Rational and not set(primefactors(int(side.doit().q))) - {2, 5}
        for side in exact
    )
    tolerance = NOISE if ends else ROUNDING
    return bool(gap <= size * Rational(tolerance.numerator, tolerance.denominator))
