"""The built-in rules, each a `compute_score`, and the data_source that selects each.

A rule returns a dict: `score`, and `extracted`, what it found in the reply. It raises
`CannotScore` where the row gives it nothing to compare with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ppo_cli.errors import RewardError, did_you_mean
from ppo_cli.records import Prompt
from ppo_cli.rewards import checkers
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
from ppo_cli.rewards.code.extract import find_code, read_tests
from ppo_cli.rewards.returned import CannotScore, Returned, describe_error, read_returned
from ppo_cli.rewards.worker import Call

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


Info = Mapping[str, Any] | None
ComputeScore = Callable[..., dict[str, Any] | None]

THINK_ANSWER = r"\s*<think>(?:(?!</?think>).)+</think>\s*<answer>(?:(?!</?answer>).)+</answer>\s*"
_BUILT_IN_FORMAT = re.compile(THINK_ANSWER, re.DOTALL)


@dataclass(frozen=True)
class Rule:
    """A way to score a reply.

    `quick` answers at once or gives None, which means: ask `compute_score` in a worker process,
    where it can be killed. `looks_for` completes the sentence "this rule looks for …".
    """

    name: str
    compute_score: ComputeScore
    quick: ComputeScore
    looks_for: str
    wants: str = "text"

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the keyword arguments it takes besides the four of every reward function."""
        parameters = inspect.signature(self.compute_score).parameters.values()
        return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def score_gsm8k(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None
) -> dict[str, Any]:
    """1 when the last `#### number` near the end of the reply is the right number."""
    return _score_number(checkers.find_after_hashes(solution_str), ground_truth)


def score_number(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None
) -> dict[str, Any]:
    """1 when the last number of the reply is the right one, wherever it stands."""
    text = checkers.after_thinking(solution_str)
    return _score_number(checkers.find_last_number(text), ground_truth)


def score_arithmetic(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None
) -> dict[str, Any]:
    """1 when the last number of the reply is the right integer."""
    text = checkers.after_thinking(solution_str)
    found = checkers.find_last_number(text)
    number = None if found is None else checkers.read_number(found)
    is_integer = number is not None and number.denominator == 1
    return _score_number(found if is_integer else None, ground_truth)


def _score_number(found: str | None, ground_truth: Any) -> dict[str, Any]:
    numbers = [_gold_number(gold) for gold in _golds(ground_truth)]
    right = any(found is not None and checkers.same_number(found, gold) for gold in numbers)
    return {"score": float(right), "extracted": found}


def _gold_number(gold: str) -> str:
    """Return the number of a ground truth, be it bare or a whole GSM8K solution."""
    number = checkers.find_after_hashes(gold) if "####" in gold else gold
    if number is None or checkers.read_number(number) is None:
        raise CannotScore(f"ground_truth {_cut(gold)!r} is not a number")
    return number


def score_math(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None
) -> dict[str, Any]:
    """1 when the answer of the reply equals the right one mathematically; may hang."""
    quick = decide_math(data_source, solution_str, ground_truth, extra_info)
    if quick is not None:
        return quick
    golds = _golds(ground_truth)
    found = find_answer(solution_str, golds)
    right = any(found is not None and equal(found, _gold_maths(g)) for g in golds)
    return {"score": float(right), "extracted": found}


def decide_math(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None
) -> dict[str, Any] | None:
    """Score what comparing text can settle; None when it takes algebra."""
    golds = [_gold_maths(gold) for gold in _golds(ground_truth)]
    found = find_answer(solution_str, golds)
    verdicts = [decide_quickly(found, gold) for gold in golds]
    if True in verdicts or None not in verdicts:
        return {"score": float(True in verdicts), "extracted": found}
    return None


def _gold_maths(gold: str) -> str:
    """Return the answer within a ground truth that may be a whole solution."""
    return checkers.find_boxed(gold) or checkers.find_after_hashes(gold) or gold


def score_choice(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None
) -> dict[str, Any]:
    """1 when the reply chooses the right letter."""
    letters = [checkers.read_choice(gold) for gold in _golds(ground_truth)]
    if None in letters:
        raise CannotScore(f"ground_truth {_cut(str(ground_truth))!r} is not a letter A-J")
    found = find_answer(solution_str, ground_truth)
    letter = found and (checkers.read_choice(found) or checkers.find_choice(found))
    return {"score": float(letter in letters), "extracted": letter or None}


def score_exact(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None
) -> dict[str, Any]:
    """1 when the whole reply is the right text, but for case and spaces."""
    reply = checkers.normalise_words(checkers.after_thinking(solution_str))
    right = any(reply == checkers.normalise_words(gold) for gold in _golds(ground_truth))
    return {"score": float(right), "extracted": reply or None}


def score_contains(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None
) -> dict[str, Any]:
    """1 when the right text stands somewhere in the reply as words of its own."""
    text = checkers.after_thinking(solution_str)
    found = [gold for gold in _golds(ground_truth) if checkers.contains_answer(text, gold)]
    return {"score": float(bool(found)), "extracted": found[0] if found else None}


def score_format(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Info = None,
    *,
    pattern: str = "",
) -> dict[str, Any]:
    """1 when the whole reply matches a pattern, from `extra_info.format` or the setting."""
    wanted = (extra_info or {}).get("format") or pattern or THINK_ANSWER
    try:
        match = re.compile(str(wanted), re.DOTALL).fullmatch(solution_str)
    except re.error as error:
        raise CannotScore(f"the pattern {_cut(str(wanted))!r} is not valid: {error}") from error
    return {"score": float(match is not None), "extracted": None if match is None else "matched"}


def decide_format(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Info = None,
    *,
    pattern: str = "",
) -> dict[str, Any] | None:
    """Score by the built-in pattern; None for one of the user's, which may backtrack for ever."""
    if (extra_info or {}).get("format") or pattern:
        return None
    match = _BUILT_IN_FORMAT.fullmatch(solution_str)
    return {"score": float(match is not None), "extracted": None if match is None else "matched"}


def score_length(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Info = None,
    *,
    max_chars: float = 2000,
    min_chars: float = 1,
) -> dict[str, Any]:
    """1 between `min_chars` and `max_chars`, falling to 0 at no text and at twice the most."""
    most = float((extra_info or {}).get("max_chars", max_chars))
    least = float((extra_info or {}).get("min_chars", min_chars))
    size = len(solution_str.strip())
    short = size / least if size < least else 1.0
    long = max(0.0, 2 - size / most) if most > 0 else 0.0
    return {"score": min(1.0, short, long), "extracted": str(size)}


def score_repetition(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None
) -> dict[str, Any]:
    """1 when no run of four words is said twice, less the share of those that are."""
    share = checkers.repetition(solution_str)
    return {"score": 1 - share, "extracted": f"{share:.3f} repeated"}


def score_code(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None
) -> dict[str, Any]:
    """1 when the code of the reply passes the tests of the row, run in a sandbox."""
    quick = decide_code(data_source, solution_str, ground_truth, extra_info)
    if quick is not None:
        return quick
    # pydantic comes with it, which worker processes do without
    from ppo_cli.rewards.code.check import score_now

    return score_now(data_source, solution_str, ground_truth, extra_info)


def decide_code(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None
) -> dict[str, Any] | None:
    """Score a reply without code; None for one that must be run."""
    tests = read_tests(ground_truth, extra_info)
    if find_code(solution_str, tests.entry_point).strip():
        return None
    return {"score": 0.0, "extracted": None, "reason": "no code in the response"}


def _golds(ground_truth: Any) -> list[str]:
    golds = checkers.accepted(ground_truth)
    if not golds:
        raise CannotScore("the row has no ground_truth")
    return golds


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _rule(name: str, score: ComputeScore, looks_for: str, wants: str = "text") -> Rule:
    return Rule(name, score, score, looks_for, wants)


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        _rule("gsm8k", score_gsm8k, "`#### NUMBER` in the last 300 characters", "a number"),
        _rule("number", score_number, "the last number", "a number"),
        _rule("arithmetic", score_arithmetic, "an integer as the last number", "an integer"),
        Rule(
            "math",
            score_math,
            decide_math,
            "\\boxed{ANSWER}, `the answer is …`, or the last expression",
            "an expression",
        ),
        _rule("choice", score_choice, "a letter A-J that stands alone", "a letter A-J"),
        _rule("exact", score_exact, "nothing but the answer"),
        _rule("contains", score_contains, "the ground truth as words of its own"),
        Rule("format", score_format, decide_format, "a whole reply that matches", "anything"),
        _rule("length", score_length, "a length within the limits", "anything"),
        _rule("repetition", score_repetition, "words that do not repeat", "anything"),
        Rule("code", score_code, decide_code, "Python code, fenced or bare", "anything"),
    )
}

# The first pattern that fits decides; matched without regard to case.
ROUTES: tuple[tuple[str, str], ...] = (
    ("openai/gsm8k", "gsm8k"),
    ("gsm8k*", "gsm8k"),
    ("ppo-cli/arithmetic", "arithmetic"),
    ("arithmetic*", "arithmetic"),
    ("lighteval/math*", "math"),
    ("digitallearninggmbh/math-lighteval", "math"),
    ("huggingfaceh4/math-500", "math"),
    ("huggingfaceh4/aime*", "math"),
    ("math*", "math"),
    ("aime*", "math"),
    ("amc*", "math"),
    ("numina*", "math"),
    ("olympiad*", "math"),
    ("openai_humaneval", "code"),
    ("openai/openai_humaneval", "code"),
    ("humaneval*", "code"),
    ("evalplus/*", "code"),
    ("mbpp*", "code"),
    ("google-research-datasets/mbpp", "code"),
    ("codecontests", "code"),
    ("apps", "code"),
    ("taco", "code"),
    ("livecodebench*", "code"),
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
        raise RewardError(f"--rule {name}: there is no such rule.{hint} Known: {_listed(RULES)}.")
    return RULES[name]


def answer_now(rule: Rule, call: Call, settings: Mapping[str, Any]) -> Returned | None:
    """Return what a rule says at once; None where it takes a worker process."""
    try:
        value = rule.quick(**vars(call), **settings)
        return None if value is None else read_returned(value)
    except CannotScore as problem:
        return Returned(None, str(problem))
    except Exception as error:
        return Returned(None, f"raised {describe_error(error)}")


def check_prompts(
    rule: Rule | None, settings: Mapping[str, Any], prompts: Sequence[Prompt]
) -> None:
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
        f"every row with --rule NAME ({_listed(RULES)})."
    )
    if unknown == [""]:
        raise RewardError(f"The prompts have no data_source, which chooses the rule. {mend}")
    known = [pattern for pattern, _ in ROUTES]
    hints = dict.fromkeys(did_you_mean(name.casefold(), known) for name in unknown)
    named = ", ".join(repr(name) for name in unknown[:5])
    more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
    raise RewardError(
        f"No rule for data_source {named}{more}.{''.join(hints)} Known: {_listed(known)}. {mend}"
    )


def _listed(names: Collection[str]) -> str:
    return ", ".join(dict.fromkeys(names))
