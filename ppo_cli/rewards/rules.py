"""The built-in rules, each declared at the function that scores, with the data_sources it serves.

First the string functions: find an answer in a reply, read it, compare it. Nothing there evaluates
an expression, so no input can make it slow. A rule returns a dict: `score`, and `extracted`, what
it found in the reply. It raises `CannotScore` where the row gives it nothing to compare with.
"""

from __future__ import annotations

import inspect
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any

from ppo_cli.errors import RewardError, did_you_mean, shorten
from ppo_cli.records import Prompt, Score
from ppo_cli.rewards.base import Call, CannotScore, describe_error, read_returned
from ppo_cli.rewards.code.extract import find_code, read_tests
from ppo_cli.thoughts import split_strictly, strip_reasoning

LAST_CHARS = 300
LONGEST_NUMBER = 60

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_SIGNED = rf"(?:(?<![\w)\]}}])[-+])?\$?(?:{_NUMBER})(?:/\d+)?%?"
_ANY_NUMBER = re.compile(rf"(?<![\d.])(?:{_SIGNED})(?!\d)")
_HASHES = re.compile(rf"####[\s*$\\]*([-+]?\s?\$?(?:{_NUMBER})(?:/\d+)?%?)")
_PLAIN_NUMBER = re.compile(rf"([-+]?)({_NUMBER})(?:/(\d+))?")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# An escaped brace is a sign, not a bracket.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$\\.,;]+)")
_CHOICE = re.compile(
    r"(?<![A-Za-z])(?:\(([A-J])\)|\[([A-J])\]|([B-HJ]|[AI](?=[.):]|\s*$)))(?![A-Za-z'])"
)
_LONE_CHOICE = re.compile(r"[(\[]?([A-Ja-j])[)\]]?[.:]?")
_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname|mbox)\s*\{([^{}]*)\}"
)
_VULGAR_FRACTION = re.compile(r"(?<=\d)[¼-¾⅐-⅞]")
_SIGNS = str.maketrans({"⁄": "/", "−": "-", "﹣": "-", "–": "-", "’": "'", "“": '"', "”": '"'})
_DROPPED = re.compile(
    r"\\left|\\right|\\[!,;:]|\\ |~|\$|\\displaystyle|\^\s*\{?\\circ\}?|\\%|%|°|\s+"
)


def clean(text: str) -> str:
    """Return text with full-width characters, typographic minus signs and quotes made plain."""
    spaced = _VULGAR_FRACTION.sub(lambda match: f" {match.group()}", text)
    return unicodedata.normalize("NFKC", spaced).translate(_SIGNS)


def accepted(ground_truth: Any) -> list[str]:
    """Return the accepted answers as text: a list stands for several, None for none."""
    several = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    return [str(one) for one in several if one is not None and str(one).strip()]


def find_boxed(text: str) -> str | None:
    r"""Return what stands in the last \boxed{…} whose braces balance, or None."""
    starts = {match.end() for match in _BOX.finditer(text)}
    opened: list[int] = []
    last: tuple[int, int] | None = None
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.end())
        elif match.group() == "}" and opened:
            start = opened.pop()
            if start in starts and (last is None or start > last[0]):
                last = (start, match.start())
    if last is not None:
        return text[last[0] : last[1]].strip()
    bare = _BARE_BOX.findall(text)
    return str(bare[-1]) if bare else None


def find_after_hashes(text: str) -> str | None:
    """Return the number after the last `####` in the last 300 characters, or None."""
    found = _HASHES.findall(clean(text[-LAST_CHARS:]))
    return str(found[-1]).strip() if found else None


def find_last_number(text: str) -> str | None:
    """Return the last number in the text as it is written, or None."""
    found = _ANY_NUMBER.findall(clean(text))
    return str(found[-1]).strip() if found else None


def find_first_number(text: str) -> str | None:
    """Return the first number in the text as it is written, or None."""
    match = _ANY_NUMBER.search(clean(text))
    return match.group().strip() if match else None


def find_choice(text: str) -> str | None:
    """Return the last choice letter A-J that stands alone; bracketed ones come first.

    "A" and "I" inside a sentence are words, not choices.
    """
    found = _CHOICE.findall(clean(text))
    bracketed = [a or b for a, b, _ in found if a or b]
    bare = [letter for _, _, letter in found if letter]
    letters = bracketed or bare
    return letters[-1] if letters else None


def read_choice(text: str) -> str | None:
    """Return the letter when the whole text is one choice such as `B`, `(b)` or `B.`."""
    match = _LONE_CHOICE.fullmatch(unwrap_text(clean(text)).strip(" $"))
    return match.group(1).upper() if match else None


def read_number(text: str) -> Fraction | None:
    """Read a whole text as one number: `1,234.50`, `$5`, `72.`, `50%` (as 50), `1/2`."""
    plain = clean(text).strip().replace("\\$", "").replace("$", "").replace("\\%", "%")
    plain = re.sub(r"^([-+]) ", r"\1", plain.strip()).rstrip(".").rstrip("% ").rstrip(".")
    match = _PLAIN_NUMBER.fullmatch(plain)
    if match is None or len(plain) > LONGEST_NUMBER:
        return None
    sign, size, below = match.groups()
    if below is not None and int(below) == 0:
        return None
    value = Fraction(size.replace(",", "")) / int(below or 1)
    return -value if sign == "-" else value


def unwrap_text(text: str) -> str:
    r"""Return LaTeX with \text{…} and its kin replaced by what they hold."""
    return _TEXT_COMMAND.sub(r"\1", text)


def normalise_maths(text: str) -> str:
    """Return an answer stripped of everything that is only looks, for comparing as text."""
    plain = unwrap_text(clean(text)).strip().rstrip(".")
    plain = plain.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return _DROPPED.sub("", plain)


def normalise_words(text: str) -> str:
    """Return text in lower case, spaces made single, without an ending full stop."""
    return " ".join(clean(text).casefold().split()).rstrip(".。").rstrip()


def contains_answer(text: str, answer: str) -> bool:
    """Say whether the answer stands in the text, not inside a longer word or number."""
    wanted = normalise_words(answer)
    if not wanted:
        return False
    before = r"(?<![a-z0-9])(?<!\d[.,])" if wanted[0].isascii() and wanted[0].isalnum() else ""
    after = r"(?![a-z0-9])(?![.,]\d)" if wanted[-1].isascii() and wanted[-1].isalnum() else ""
    return re.search(before + re.escape(wanted) + after, normalise_words(text)) is not None


def repetition(text: str, size: int = 4) -> float:
    """Return the share of word n-grams that have been said before, 0 to 1."""
    words: Sequence[str] = normalise_words(text).split()
    grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


Facts = Mapping[str, Any]

LONGEST_ANSWER = 300
LAST_PART = 2000
SHOWN = 60
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
_SYMBOLS = str.maketrans({
    "√": "\\sqrt", "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "π": "\\pi ",
    "×": "\\times ", "·": "\\cdot ", "÷": "\\div ", "∪": "\\cup ", "∩": "\\cap ", "±": "\\pm ",
})  # fmt: skip
_INTEGER = re.compile(r"[-+]?\d+|[-+]?\d{1,3}(?:,\d{3})+")


def find_answer(reply: str, ground_truth: Any = None) -> str | None:
    """Return the answer of a reply: boxed, announced, after `####`, or the last fitting thing."""
    text = clean(strip_reasoning(reply))
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
    from sympy import E, Expr, I

    known = {"e": E, "i": I}
    if not (isinstance(one, Expr) and isinstance(other, Expr)):
        return False
    free = one.free_symbols | other.free_symbols
    if not free or not {str(symbol) for symbol in free} <= known.keys():
        return False
    values = {symbol: known[str(symbol)] for symbol in free}
    gap = (one.subs(values) - other.subs(values)).evalf(30)
    return bool(gap.is_number and abs(complex(gap)) < 1e-12)


Answer = dict[str, Any]
# Reply, ground truth and extra_info of a row, then settings by name; None: not decided.
ScoreReply = Callable[..., Answer | None]

_FRAMED = re.compile(r"\s*<answer>(?:(?!</?answer>).)+</answer>\s*", re.DOTALL)


@dataclass(frozen=True)
class Rule:
    """A way to score a reply.

    `score` answers at once or gives None, which means: ask `slow` in a worker process, where it
    can be killed. `looks_for` completes the sentence "this rule looks for …"; `sources` are the
    patterns of the data_sources that it serves; `has_answer` says that a ground truth is one, and
    `whole` that it reads thoughts too.
    """

    name: str
    score: ScoreReply
    looks_for: str
    sources: tuple[str, ...] = ()
    has_answer: bool = True
    slow: ScoreReply | None = None
    whole: bool = False

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the keyword arguments that it takes."""
        parameters = inspect.signature(self.score).parameters.values()
        return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


RULES: dict[str, Rule] = {}


def _rule(
    name: str, looks_for: str, *sources: str, **more: Any
) -> Callable[[ScoreReply], ScoreReply]:
    """Declare a rule by the function that scores; `more` are other fields of it."""

    def declare(score: ScoreReply) -> ScoreReply:
        RULES[name] = Rule(name, score, looks_for, sources, **more)
        return score

    return declare


def _answer(right: bool, extracted: str | None) -> Answer:
    return {"score": float(right), "extracted": extracted}


@_rule("gsm8k", "`#### NUMBER` in the last 300 characters", "openai/gsm8k", "gsm8k*")
def score_gsm8k(reply: str, truth: Any, extra: Facts) -> Answer:
    """1 when the last `#### number` near the end of the reply is the right number."""
    return _score_number(find_after_hashes(strip_reasoning(reply)), truth)


@_rule("number", "the last number")
def score_number(reply: str, truth: Any, extra: Facts) -> Answer:
    """1 when the last number of the reply is the right one, wherever it stands."""
    return _score_number(find_last_number(strip_reasoning(reply)), truth)


@_rule("arithmetic", "an integer as the last number", "ppo-cli/arithmetic", "arithmetic*")
def score_arithmetic(reply: str, truth: Any, extra: Facts) -> Answer:
    """1 when the last number of the reply is the right integer."""
    found = find_last_number(strip_reasoning(reply))
    number = None if found is None else read_number(found)
    is_integer = number is not None and number.denominator == 1
    return _score_number(found if is_integer else None, truth)


def _score_number(found: str | None, truth: Any) -> Answer:
    """Compare with ground truths that are bare numbers or whole GSM8K solutions."""
    given, right = None if found is None else read_number(found), False
    for gold in _golds(truth):
        written = find_after_hashes(gold) if "####" in gold else gold
        number = None if written is None else read_number(written)
        if number is None:
            raise CannotScore(f"ground_truth {shorten(gold, SHOWN)!r} is not a number")
        right |= given == number
    return _answer(right, found)


def compare_algebra(reply: str, truth: Any, extra: Facts) -> Answer:
    """1 when the answer of the reply equals the right one mathematically; may hang."""
    golds = _golds(truth)
    found = find_answer(reply, golds)
    return _answer(found is not None and any(equal(found, _gold_maths(g)) for g in golds), found)


@_rule(
    "math", "\\boxed{ANSWER}, `the answer is …`, or the last expression",
    "lighteval/math*", "digitallearninggmbh/math-lighteval", "huggingfaceh4/math-500",
    "huggingfaceh4/aime*", "math*", "aime*", "amc*", "numina*", "olympiad*",
    slow=compare_algebra,
)  # fmt: skip
def score_math(reply: str, truth: Any, extra: Facts) -> Answer | None:
    """Score what comparing text can settle; None when it takes algebra."""
    golds = [_gold_maths(gold) for gold in _golds(truth)]
    found = find_answer(reply, golds)
    verdicts = [decide_quickly(found, gold) for gold in golds]
    if True in verdicts or None not in verdicts:
        return _answer(True in verdicts, found)
    return None


def _gold_maths(gold: str) -> str:
    """Return the answer within a ground truth that may be a whole solution."""
    return find_boxed(gold) or find_after_hashes(gold) or gold


@_rule("choice", "a letter A-J that stands alone")
def score_choice(reply: str, truth: Any, extra: Facts) -> Answer:
    """1 when the reply chooses the right letter."""
    letters = [read_choice(gold) for gold in _golds(truth)]
    if None in letters:
        raise CannotScore(f"ground_truth {shorten(str(truth), SHOWN)!r} is not a letter A-J")
    found = find_answer(reply, truth)
    letter = found and (read_choice(found) or find_choice(found))
    return _answer(letter in letters, letter or None)


@_rule("exact", "nothing but the answer")
def score_exact(reply: str, truth: Any, extra: Facts) -> Answer:
    """1 when the whole reply is the right text, but for case and spaces."""
    said = normalise_words(strip_reasoning(reply))
    return _answer(any(said == normalise_words(gold) for gold in _golds(truth)), said or None)


@_rule("contains", "the ground truth as words of its own")
def score_contains(reply: str, truth: Any, extra: Facts) -> Answer:
    """1 when the right text stands somewhere in the reply as words of its own."""
    text = strip_reasoning(reply)
    found = next((gold for gold in _golds(truth) if contains_answer(text, gold)), None)
    return _answer(found is not None, found)


def match_pattern(reply: str, truth: Any, extra: Facts, *, pattern: str = "") -> Answer:
    """1 when the whole reply matches a pattern, from `extra_info.format` or the setting."""
    wanted = str(extra.get("format") or pattern)
    try:
        match = re.compile(wanted, re.DOTALL).fullmatch(reply)
    except re.error as error:
        raise CannotScore(
            f"the pattern {shorten(wanted, SHOWN)!r} is not valid: {error}"
        ) from error
    return _answer(match is not None, None if match is None else "matched")


@_rule("format", "a whole reply that matches", has_answer=False, slow=match_pattern, whole=True)
def score_format(reply: str, truth: Any, extra: Facts, *, pattern: str = "") -> Answer | None:
    """1 for a closed thought, then `<answer>…</answer>`; None for a pattern of the user's.

    Those may backtrack for ever.
    """
    if extra.get("format") or pattern:
        return None
    split = split_strictly(reply)
    matches = split is not None and split[0] != "" and _FRAMED.fullmatch(split[1]) is not None
    return _answer(matches, "matched" if matches else None)


@_rule("length", "a length within the limits", has_answer=False, whole=True)
def score_length(
    reply: str, truth: Any, extra: Facts, *, max_chars: float = 2000, min_chars: float = 1
) -> Answer:
    """1 between `min_chars` and `max_chars`, falling to 0 at no text and at twice the most."""
    most = float(extra.get("max_chars", max_chars))
    least = float(extra.get("min_chars", min_chars))
    size = len(reply.strip())
    short = size / least if size < least else 1.0
    long = max(0.0, 2 - size / most) if most > 0 else 0.0
    return {"score": min(1.0, short, long), "extracted": str(size)}


@_rule("repetition", "words that do not repeat", has_answer=False, whole=True)
def score_repetition(reply: str, truth: Any, extra: Facts) -> Answer:
    """1 when no run of four words is said twice, less the share of those that are."""
    share = repetition(reply)
    return {"score": 1 - share, "extracted": f"{share:.3f} repeated"}


@_rule(
    "code", "Python code, fenced or bare",
    "openai_humaneval", "openai/openai_humaneval", "humaneval*", "evalplus/*", "mbpp*",
    "google-research-datasets/mbpp", "codecontests", "code_contests", "deepmind/code_contests",
    "apps", "codeparrot/apps", "taco", "baai/taco", "livecodebench*",
    has_answer=False,
)  # fmt: skip
def score_code(reply: str, truth: Any, extra: Facts) -> Answer | None:
    """Score a reply without code; None for one that must be run, which sandboxes do."""
    if find_code(reply, read_tests(truth, extra).entry_point).strip():
        return None
    return {"score": 0.0, "extracted": None, "reason": "no code in the response"}


def _golds(ground_truth: Any) -> list[str]:
    golds = accepted(ground_truth)
    if not golds:
        raise CannotScore("the row has no ground_truth")
    return golds


# The first pattern that fits decides; matched without regard to case.
ROUTES: tuple[tuple[str, str], ...] = (
    *((pattern, rule.name) for rule in RULES.values() for pattern in rule.sources),
    *((name, name) for name in RULES),
)


def rule_for(data_source: str) -> Rule | None:
    """Return the rule of a data_source, or None."""
    wanted = data_source.casefold()
    return next((RULES[rule] for pattern, rule in ROUTES if fnmatchcase(wanted, pattern)), None)


def rule_named(name: str) -> Rule:
    """Return a rule by its name; an unknown one fails with the nearest name."""
    if name not in RULES:
        hint = did_you_mean(name, RULES)
        raise RewardError(f"--rule {name}: there is no such rule.{hint} Known: {', '.join(RULES)}.")
    return RULES[name]


def answer_now(rule: Rule, call: Call, settings: Facts) -> Score | None:
    """Return what a rule says at once; None where it takes a worker process."""
    try:
        value = rule.score(call.solution_str, call.ground_truth, call.extra_info, **settings)
        return None if value is None else read_returned(value)
    except CannotScore as problem:
        return Score.failed(str(problem))
    except Exception as error:
        return Score.failed(f"raised {describe_error(error)}")


def check_prompts(rule: Rule | None, settings: Facts, prompts: Sequence[Prompt]) -> None:
    """Raise where a rule finds nothing to compare with in any of its prompts."""
    by_rule: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        if chosen := rule or rule_for(prompt.data_source):
            by_rule.setdefault(chosen.name, []).append(prompt)
    for name, own in by_rule.items():
        failure = ""
        for prompt in own:
            call = Call(prompt.data_source, "", prompt.ground_truth, dict(prompt.extra_info))
            returned = answer_now(rule or RULES[name], call, settings)
            if returned is None or not returned.failure:
                break
            failure = returned.failure
        else:
            raise RewardError(
                f"None of {len(own)} prompts for the rule {name} can be scored: {failure}. Give "
                "the rows what the rule compares with, or choose another reward with --rule NAME "
                "or --reward_function FILE:NAME."
            )


def check_sources(sources: Collection[str]) -> None:
    """Raise unless every data_source of the prompts has a rule."""
    unknown = sorted(source for source in sources if rule_for(source) is None)
    if not unknown:
        return
    mend = (
        "Give a reward function of your own with --reward_function FILE:NAME, or one rule for "
        f"every row with --rule NAME ({', '.join(RULES)})."
    )
    if unknown == [""]:
        raise RewardError(f"The prompts have no data_source, which chooses the rule. {mend}")
    known = dict.fromkeys(pattern for pattern, _ in ROUTES)
    hints = dict.fromkeys(did_you_mean(name.casefold(), known) for name in unknown)
    named = ", ".join(repr(name) for name in unknown[:5])
    more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
    raise RewardError(
        f"No rule for data_source {named}{more}.{''.join(hints)} Known: {', '.join(known)}. {mend}"
    )
