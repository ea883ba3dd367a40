"""Reads numbers, units and texts of answers, and compares them exactly.

Nothing here evaluates an expression, so no input can make it slow. Used by rules and algebra.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from ppo_cli.estimates import repeated_share

LONGEST_NUMBER = 1000
LARGEST_EXPONENT = 400
# Relative tolerances: between two decimals, and for a rounded decimal of 1/3 or pi.
NOISE = Fraction(1, 10**9)
ROUNDING = Fraction(2, 10**7)

# --- characters and LaTeX commands that only change the looks of an answer ---
_VULGAR_FRACTION = re.compile(r"(?<=\d)[¼-¾⅐-⅞]")
_RAISED, _LOWERED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+"), re.compile("[₀-₉]+")
_SIGNS = str.maketrans({
    "⁄": "/", "−": "-", "﹣": "-", "–": "-", "’": "'", "“": '"', "”": '"', "‐": "-", "‑": "-",
})  # fmt: skip
_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|operatorname|mbox)\s*\{([^{}]*)\}"
)
_LOOKS = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:]|\\ |~|\$|\\displaystyle|\^\s*\{?\\circ\}?|\\%|%|°"
)
_SPACE = re.compile(r"(?<=[0-9.])\s+(?=[0-9.])|\s+")
# Separators within a number: `1{,}000`, `1,\!000`, `1\,000`.
_BRACED_COMMA = re.compile(r"\{,\}|,\\!\s?")
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,;:! ]|~)\s?(?=\d)")
_FRACTION = re.compile(
    r"\\[dtc]?frac\s*(?:\{\s*([-+]?[\d.,]+)\s*\}|(\d))\s*(?:\{\s*([\d.,]+)\s*\}|(\d))"
)

# --- numbers: grouped (1,000 or 1 000 or 1'000), decimal, European (1.000,5), powers of ten ---
_GROUPED = (
    r"\d{1,3}(?:,\d{3})+(?!\d)|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)"
    r"|\d{1,3}(?: \d{3})+(?! ?\d)|\d{1,3}(?:'\d{3})+(?!\d)"
)
_DECIMAL = rf"(?:(?:{_GROUPED}|\d+)(?:\.\d*)?|\.\d+)"
_EUROPEAN = (
    r"\d{1,3}(?:[. ]\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}(?![.\d])"
    r"|(?:0,\d+|\d{4,},\d+|\d{1,3},(?!\d{3}(?!\d))\d+)(?!,|\.?\d)"
)
_TIMES_TEN = r"\s?(?:\\times|\\cdot|[×·*x])\s?10\s?(?:\^|\*\*)\s?[{(]{0,2}([-+]?\d+)[)}]{0,2}"
_POWER_OF_TEN = re.compile(r"([-+]?)\s?10\s?(?:\^|\*\*)\s?[{(]{0,2}([-+]?\d+)[)}]{0,2}")
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s?(?P<currency>[$€£¥₹₩])?\s?(?P<minus>-?)"
    rf"(?:(?P<whole>\d+) (?P<top>\d+)/(?P<below>\d+)(?!\d)"
    rf"|(?P<european>{_EUROPEAN})|(?P<size>{_DECIMAL})"
    rf"(?:[eE](?P<exponent>[-+]?\d+)(?![\d.])|{_TIMES_TEN}|\s?/\s?(?P<divisor>{_DECIMAL}))?)"
)  # fmt: skip
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}")

# Unit name -> its dimension and its size in the base unit; conversions are exact.
_UNITS: dict[str, tuple[str, Fraction]] = {
    name: (dimension, Fraction(size))
    for dimension, size, names in (
        ("length", "1", "m meter meters metre metres 米 メートル"),
        ("length", "1000", "km kilometer kilometers kilometre kilometres 千米 公里 キロメートル"),
        ("length", "0.01", "cm centimeter centimeters centimetre centimetres 厘米 センチメートル"),
        ("length", "0.001", "mm millimeter millimeters millimetre millimetres 毫米"),
        ("length", "0.3048", "ft foot feet"),
        ("length", "0.0254", "inch inches"),
        ("length", "0.9144", "yd yard yards"),
        ("length", "1609.344", "mi mile miles"),
        ("mass", "1", "kg kilogram kilograms kilo kilos 千克 公斤 キログラム"),
        ("mass", "0.001", "g gram grams 克 グラム"),
        ("mass", "0.000001", "mg milligram milligrams 毫克"),
        ("volume", "1", "L l liter liters litre litres 升 リットル"),
        ("volume", "0.001", "mL ml milliliter milliliters millilitre millilitres 毫升"),
        ("time", "1", "s sec secs second seconds 秒"),
        ("time", "60", "min mins minute minutes 分钟 分鐘"),
        ("time", "3600", "h hr hrs hour hours 小时 小時 時間"),
        ("time", "86400", "day days 天"),
        ("time", "604800", "week weeks 周"),
        ("dollar", "1", "$ dollar dollars USD usd 美元"),
        ("dollar", "0.01", "cent cents ¢ 美分"),
        ("euro", "1", "€ euro euros EUR"),
        ("sterling", "1", "£ GBP"),
        ("degree", "1", "° deg degree degrees 度"),
        ("celsius", "1", "°C"),
        ("fahrenheit", "1", "°F"),
        ("radian", "1", "rad radian radians"),
        ("force", "1", "N newton newtons"),
        ("force", "1000", "kN"),
        ("energy", "1", "J joule joules"),
        ("energy", "1000", "kJ"),
        ("power", "1", "W watt watts"),
        ("power", "1000", "kW"),
        ("pressure", "1", "Pa pascal pascals"),
        ("pressure", "1000", "kPa"),
        ("frequency", "1", "Hz hertz"),
        ("tension", "1", "V volt volts"),
        ("current", "1", "A ampere amperes amps"),
        ("temperature", "1", "K kelvin kelvins"),
        ("amount", "1", "mol mole moles"),
    )
    for name in names.split()
}
_COMPOUND = {"mph": "miles/hour", "kph": "km/h", "kmph": "km/h", "kmh": "km/h"}
_SCALES = {
    "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12,
    "千": 3, "万": 4, "萬": 4, "億": 8, "亿": 8,
}  # fmt: skip
_SCALE = re.compile(r"(hundred|thousand|million|billion|trillion)\b|(千(?!米|克)|万|萬|億|亿)")
_PERCENT = re.compile(
    r"(?:\\?%|percent(?:age)?\b|per cent\b|pct\b|パーセント|퍼센트)", re.IGNORECASE
)
_UNIT = re.compile(
    r"[^\W\d_°¢€$][^\d=+*<>()\[\]{}|,;:?!^\\]*(?:\^\s?\{?[23]\}?|(?<=m)[23])?|[°¢€$£][CF]?"
)
_UNIT_PART = re.compile(r"(?:(square|sq\.?|cubic|cu\.?)\s)?([^\s^]+?)(?:\s?\^?\s?\{?([23])\}?)?")
# Words after a number that make it an expression and not a quantity ("3 more than x").
NOT_A_UNIT = re.compile(
    r"\b(?:and|or|to|of|than|more|less|fewer|times|plus|minus|over|mod|modulo|choose|factorial|if|not"
    r"|but|pi|sqrt|sin|cos|tan|log|ln|exp|infinity|squared|cubed|base|through|until|root|where|for"
    r"|because|since|as|otherwise|unless|when|with|divided|multiplied|half|is|are|was|were|und|oder|et|ou|y|o|halves|thirds|f(?:our|if)ths|(?:six|seven|eigh|nin|ten|hundred|thousand)ths|dozens?"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|(?:thir|four|fif|six|seven|eigh|nine)teen|ten|eleven"
    r"|twelve|one|two|three|four|five|six|seven|eight|nine)\b|\b[α-λν-ω]\b|‰|或|和|又は|または|ではない|じゃない|でない|아니",
    re.IGNORECASE,
)  # fmt: skip


@dataclass(frozen=True)
class Quantity:
    """A number and its unit; `rounded` means that it was written with decimals or an exponent."""

    value: Fraction
    rounded: bool = False
    unit: str = ""
    percent: bool = False


def clean(text: str) -> str:
    """Return text with full-width characters, typographic minus signs and quotes made plain."""
    raised = _RAISED.sub(lambda run: f"^{{{run.group()}}}", text.replace("\r\n", "\n"))
    lowered = _LOWERED.sub(lambda run: f"_{{{run.group()}}}", raised)
    spaced = _VULGAR_FRACTION.sub(lambda match: f" {match.group()}", lowered)
    return unicodedata.normalize("NFKC", spaced).translate(_SIGNS)


def accepted_answers(ground_truth: Any) -> list[str]:
    """Return the accepted answers as text: several for a list, none for None and NaN.

    A float is also accepted without `.0` or exponent: pandas and JSON turn 5 into 5.0 and 0.00001
    into 1e-05.
    """
    several = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    texts: dict[str, None] = {}
    for item in several:
        if item is None or item != item or not str(item).strip():
            continue
        texts[str(item)] = None
        if isinstance(item, float) and abs(item) < 1e300:
            texts[format(Decimal(str(item)), "f").removesuffix(".0")] = None
    return list(texts)


def unwrap_text(text: str) -> str:
    r"""Return LaTeX with \text{…} and similar commands replaced by their content."""
    return _TEXT_COMMAND.sub(r"\1", text)


def normalise_maths(text: str) -> str:
    """Return an answer without formatting, for a comparison as text."""
    plain = re.sub(r"(?<!\.)\.\Z", "", unwrap_text(clean(text)).strip())
    plain = plain.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    # A blank between two digits matters: `1 2` is not 12.
    return _SPACE.sub(
        lambda run: " " if _between_digits(run) else "", _LOOKS.sub("", plain).strip()
    )


def _between_digits(run: re.Match[str]) -> bool:
    before, after = run.string[run.start() - 1 : run.start()], run.string[run.end() : run.end() + 1]
    return before.isdigit() and after.isdigit()


def normalise_words(text: str) -> str:
    """Return text in lower case, spaces made single, without an ending full stop."""
    return " ".join(clean(text).casefold().split()).rstrip(".。").rstrip()


def read_quantity(text: str, *, decimal_comma: bool = False) -> Quantity | None:
    r"""Read a whole text as one number and its unit: `1,234.50`, `$5`, `50%`, `\frac12`, `1.2e-5`.

    `decimal_comma` reads `2,74` as 2.74.
    """
    plain = _strip_latex(text)
    if len(plain) > LONGEST_NUMBER + 60:
        return None
    # Repeating decimals and powers of ten have their own forms.
    for pattern in (_REPEATING, _POWER_OF_TEN):
        match = pattern.match(plain)
        if match is not None:
            value = _read_repeating(match) if pattern is _REPEATING else _read_power(match)
            return _add_unit(plain[match.end() :], value, rounded=False)
    match = _NUMBER.match(plain)
    if match is None or match.end() - match.start() > LONGEST_NUMBER:
        return None
    # `2,74` is a decimal only where that is certain.
    european = match["european"]
    if european and not (decimal_comma or european.startswith("0,") or re.search("[. ]", european)):
        return None
    number = _read_value(match)
    if number is None:
        return None
    # Sign, precision and what follows the number.
    size, power = match["size"] or "", match["exponent"] or match[_POWER_GROUP]
    rounded = "." in size or power is not None or bool(european)
    negative = (match["sign"] == "-") != (match["minus"] == "-")
    rest = plain[match.end() :]
    return _add_unit(rest, -number if negative else number, rounded, match["currency"] or "")


_POWER_GROUP = _NUMBER.groupindex["exponent"] + 1


def _strip_latex(text: str) -> str:
    """Return a number without LaTeX, so that one pattern reads it."""
    plain = re.sub(r"(?<!\.)\.\Z", "", clean(text).strip()).strip()
    plain = re.sub(r"\A\$([^$]+)\$", r"\1 ", plain).strip()
    # `\text{12 apples}`, or a number in bold before its unit.
    wrapped = _TEXT_COMMAND.match(plain)
    if wrapped:
        plain = f"{wrapped[1].strip()}{plain[wrapped.end() :]}"
    plain = re.sub(r"\A\(([-+\d.]+)\)\Z", r"\1", unwrap_text(plain) if "(" in plain else plain)
    plain = plain.replace("\\$", "$").replace("\\left", "").replace("\\right", "")
    plain = _THIN_SPACE.sub(" ", _BRACED_COMMA.sub(",", plain))
    plain = _FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]}", plain).strip()
    plain = re.sub(r"^([-+]) (?=\d)", r"\1", plain)
    return re.sub(r"\^\s*\{?\\circ\}?\s*", "°", plain)


def _read_value(match: re.Match[str]) -> Fraction | None:
    """Return the exact value of a matched number, None for a division by 0 or a huge exponent."""
    if match["whole"]:
        below = int(match["below"])
        return int(match["whole"]) + Fraction(int(match["top"]), below) if below else None
    if match["european"]:
        return Fraction(re.sub("[. ]", "", match["european"]).replace(",", "."))
    value = Fraction(re.sub("[, ']", "", match["size"]))
    if match["divisor"]:
        below_value = Fraction(re.sub("[, ']", "", match["divisor"]))
        return value / below_value if below_value else None
    power = int(match["exponent"] or match[_POWER_GROUP] or 0)
    return value * Fraction(10) ** power if abs(power) <= LARGEST_EXPONENT else None


def _read_power(match: re.Match[str]) -> Fraction | None:
    if abs(int(match[2])) > LARGEST_EXPONENT:
        return None
    return (-1 if match[1] == "-" else 1) * Fraction(10) ** int(match[2])


def _read_repeating(match: re.Match[str]) -> Fraction | None:
    sign, integer_digits, fixed, repeated = match.groups()
    if len(match.group()) > LONGEST_NUMBER:
        return None
    value = Fraction(f"{integer_digits or 0}.{fixed or 0}")
    value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(fixed))
    return -value if sign == "-" else value


def _add_unit(
    rest: str, value: Fraction | None, rounded: bool, currency: str = ""
) -> Quantity | None:
    """Return the quantity of a number and the text after it; None where that is not a unit.

    Words that are not known count as units, too (`3 apples`). `million` multiplies the value, `%`
    only sets `percent`. `rounded`: the number has decimals or an exponent.
    """
    if value is None or rest.startswith(".."):
        return None
    marked = _TEXT_COMMAND.match(rest.lstrip(" ~\\,;:!")) is not None
    separate = marked or rest[:1] in (" ", "\\", "~", "")
    unit_text = re.sub(r"\\[,;:! ]|~", " ", unwrap_text(rest))
    unit_text = (
        re.sub(r"^[\s$]+|[\s.$]+$", "", unit_text) if currency or rest.strip() != "$" else "$"
    )
    scale = _SCALE.match(unit_text)
    if scale is not None:
        value *= 10 ** _SCALES[scale.group()]
        unit_text = unit_text[scale.end() :].strip()
        separate = True
    # A percent sign, then a unit.
    percent = _PERCENT.match(unit_text)
    if percent is not None:
        unit_text = unit_text[percent.end() :].strip(" .")
    if not unit_text:
        return Quantity(value, rounded, currency, percent is not None)
    if (
        _UNIT.fullmatch(unit_text) is None
        or len(unit_text.split()) > 5
        or NOT_A_UNIT.search(unit_text)
    ):
        return None
    # `3t` is a product and `3 x` may be one; `3 m` and `3 apples` are quantities.
    name = unit_text.split()[0].strip(".")
    if name.isascii() and name.isalpha():
        measured = _parse_unit(unit_text) is not None and (separate or len(name) > 1)
        if not measured and not (separate and (marked or len(name) > 2)):
            return None
    return Quantity(value, rounded, currency or unit_text, percent is not None)


def _parse_unit(unit: str) -> tuple[tuple[tuple[str, int], ...], Fraction] | None:
    """Return dimensions and size of a unit such as `square feet` or `km/h`; None if unknown."""
    size, dimensions = Fraction(1), list[tuple[str, int]]()
    for place, part in enumerate(re.split(r"\s*(?:/|\bper\b)\s*", _COMPOUND.get(unit, unit))):
        match = _UNIT_PART.fullmatch(part.strip())
        if match is None:
            return None
        name = match[2]
        dimension = _UNITS.get(name) or _UNITS.get(name.casefold())
        if dimension is None:
            return None
        power = int(match[3] or {"s": 2, "c": 3}.get((match[1] or " ")[0], 1))
        power = -power if place else power
        dimensions.append((dimension[0], power))
        size *= dimension[1] ** power
    return tuple(dimensions), size


def same_quantity(answer: Quantity, gold: Quantity) -> bool:
    """Return whether two quantities are equal; a unit that only one of them has is ignored."""
    # Convert the answer into the unit of the reference.
    factor = Fraction(1)
    if answer.unit and gold.unit and answer.unit != gold.unit:
        measures = _parse_unit(answer.unit), _parse_unit(gold.unit)
        if measures[0] is not None and measures[1] is not None:
            if measures[0][0] != measures[1][0]:
                return False
            factor = measures[0][1] / measures[1][1]
    if _nearly_equal(answer, gold, answer.value * factor, gold.value):
        return True
    # Only one of them is a percentage: 50% is accepted for 0.5.
    if answer.percent == gold.percent:
        return False
    parts = [q.value / 100 if q.percent else q.value for q in (answer, gold)]
    return _nearly_equal(answer, gold, *parts)


def names_value(left_side: str, right_side: str = "") -> bool:
    """Return whether the left side of an equation only names its value: `x`, `x + y`, `12 + 30`.

    False for an equation that is still to be solved: `2x + 4`, or `x^2` where the right is `4x`.
    """
    bare = re.sub(
        r"_(?:\{[^{}]*\}|\w)|\^\s*(?:\{[^{}]*\}|\w)|\d+(?=\s*\))", "", unwrap_text(left_side)
    )
    bare = re.sub(r"\\[A-Za-z]+", "", bare)
    letters = set(re.findall(r"[A-Za-z]", re.sub(r"\([^()]*\)", "", bare)))
    if letters & set(re.findall(r"(?<![\\A-Za-z])[A-Za-z]", right_side)):
        return False
    return not (re.search(r"[A-Za-z]", bare) and re.search(r"\d|^\s*-", bare))


def _nearly_equal(
    answer: Quantity, gold: Quantity, answer_value: Fraction, gold_value: Fraction
) -> bool:
    """Return whether two values are equal; of rounded decimals, up to rounding."""
    if answer_value == gold_value or not (answer.rounded or gold.rounded):
        return answer_value == gold_value
    # A rounded decimal is accepted only for a value without a finite decimal form.
    exact = [value for q, value in ((answer, answer_value), (gold, gold_value)) if not q.rounded]
    infinite = any(not _is_finite_decimal(value) for value in exact)
    return abs(answer_value - gold_value) <= (ROUNDING if infinite else NOISE) * max(
        abs(answer_value), abs(gold_value)
    )


def _is_finite_decimal(value: Fraction) -> bool:
    below = value.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    return below == 1


_WORD_EDGE = r"(?<![a-z0-9])(?<!\d[.,])", r"(?![a-z0-9])(?![.,]\d)"
_NUMBERS_IN_TEXT = re.compile(
    rf"(?<![\w.^])(?<!\d[,:])(?<!\d\*\*)(?:(?<![\w)\]}}])[-+])?[$€£]?"
    rf"(?:\d+ \d+/\d+|(?:{_DECIMAL})(?:[eE][-+]?\d+|/\d+)?)%?(?!\w|[.,:]\d|\^|\*\*\d)"
)  # fmt: skip


def contains_answer(text: str, answer: str) -> bool:
    """Return whether the text contains the answer, not inside a longer word or number.

    A number is compared by value with each number of the text.
    """
    # An empty answer is contained in nothing.
    wanted_text = normalise_words(answer)
    if not wanted_text:
        return False
    number = read_quantity(answer)
    if number is not None and not number.unit:
        quantities = map(read_quantity, dict.fromkeys(_NUMBERS_IN_TEXT.findall(clean(text))))
        return any(q is not None and same_quantity(q, number) for q in quantities)
    before = _WORD_EDGE[0] if wanted_text[0].isascii() and wanted_text[0].isalnum() else ""
    after = _WORD_EDGE[1] if wanted_text[-1].isascii() and wanted_text[-1].isalnum() else ""
    return re.search(before + re.escape(wanted_text) + after, normalise_words(text)) is not None


def repetition(text: str) -> float:
    """Return the share of sequences of four words that repeat an earlier one, 0 to 1."""
    return repeated_share(normalise_words(text).split(), 4)
