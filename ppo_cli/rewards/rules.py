"""The built-in rules, each declared at its scoring function with the data_sources it serves.

`answers` extracts the answer of a response, `values` reads numbers, `algebra` compares
expressions. A rule returns a dict: `score`, `extracted` (the answer of the response), and `reason`
if there is no answer. It raises `CannotScore` if the row has nothing to compare with.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.errors import RewardError, did_you_mean, shorten
from ppo_cli.plugins import entry_points, find_plugin, load
from ppo_cli.processes.user_code import describe_error
from ppo_cli.records import Prompt, Score, data_sources
from ppo_cli.rewards.answers import (
    Extraction,
    extract_answer,
    find_after_hashes,
    find_marked_answer,
    find_tagged,
    read_choice,
)
from ppo_cli.rewards.base import Call, CannotScore, read_returned
from ppo_cli.rewards.faults import Span, find_raising_line, find_wrong_equation
from ppo_cli.rewards.values import (
    Quantity,
    accepted_answers,
    clean,
    contains_answer,
    names_value,
    normalise_words,
    read_quantity,
    repetition,
    same_quantity,
)
from ppo_cli.thoughts import split_strictly, strip_reasoning

LAST_CHARS = 300  # where verl's scorer of gsm8k looks for the answer
SHOWN_CHARS = 60

Facts = Mapping[str, Any]
Answer = dict[str, Any]
# Takes reply, ground truth and extra_info of a row, and settings by name; None: undecided.
ScoreReply = Callable[..., Answer | None]

_FRAMED = re.compile(r"\s*<answer>(?:(?!</?answer>).)+</answer>\s*", re.DOTALL)


@dataclass(frozen=True)
class Rule:
    """A way to score a reply.

    `score` answers immediately, or returns None: then a worker process, which can be killed, calls
    `in_worker`. `looks_for` completes the sentence "the rule looks for …". `sources` are patterns
    of data_sources. `has_answer`: a ground truth is an answer, not tests or a pattern.
    `reads_thoughts`: the rule also reads the thought of a response. `find_fault` returns where a
    response without thoughts goes wrong, if that is certain (faults.py).
    """

    name: str
    score: ScoreReply
    looks_for: str
    sources: tuple[str, ...] = ()
    has_answer: bool = True
    in_worker: ScoreReply | None = None
    reads_thoughts: bool = False
    find_fault: Callable[[str, Score], Span | None] | None = None

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of its settings, which are the keyword-only parameters of `score`."""
        parameters = inspect.signature(self.in_worker or self.score).parameters.values()
        return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


RULES: dict[str, Rule] = {}


def _rule(
    name: str, looks_for: str, *sources: str, **fields: Any
) -> Callable[[ScoreReply], ScoreReply]:
    """Decorator that declares a rule by its scoring function; `fields` are its other fields."""

    def declare(score: ScoreReply) -> ScoreReply:
        RULES[name] = Rule(name, score, looks_for, sources, **fields)
        return score

    return declare


def _answer(right: bool, extracted: str | None, reason: str = "") -> Answer:
    answer: Answer = {"score": float(right), "extracted": extracted}
    return answer | {"reason": reason} if reason else answer


@_rule(
    "gsm8k", "`#### NUMBER` in the last 300 characters", "openai/gsm8k", "gsm8k*",
    find_fault=find_wrong_equation,
)  # fmt: skip
def score_gsm8k(reply: str, truth: Any, extra: Facts) -> Answer:
    """1 when the line of the last `####`, or `<answer>…</answer>`, is the right number."""
    # Tags win over `####`, as the rule `format` asks for them.
    text = clean(strip_reasoning(reply))
    if find_tagged(text)[0] is not None:
        return _score_number(extract_answer(reply), truth)
    line = find_after_hashes(text[-LAST_CHARS:])
    return _score_number(Extraction(line, "" if line else "no answer: no #### NUMBER"), truth)


@_rule(
    "number", "a number in <answer>, \\boxed{}, after #### or `the answer is`, or at the end",
    find_fault=find_wrong_equation,
)  # fmt: skip
def score_number(reply: str, truth: Any, extra: Facts) -> Answer:
    """1 when the answer of the reply is the right number."""
    return _score_number(extract_answer(reply), truth)


@_rule(
    "arithmetic", "an integer as the answer", "ppo-cli/arithmetic", "arithmetic*",
    find_fault=find_wrong_equation,
)  # fmt: skip
def score_arithmetic(reply: str, truth: Any, extra: Facts) -> Answer:
    """1 when the answer of the reply is the right integer."""
    return _score_number(extract_answer(reply), truth, integer=True)


def _score_number(answer: Extraction, truth: Any, *, integer: bool = False) -> Answer:
    """Compare with ground truths that are bare numbers or whole GSM8K solutions."""
    golds = [_gold_quantity(gold) for gold in _golds(truth)]
    if answer.text is None:
        return _answer(False, None, answer.reason)
    number = _read_value(answer.text)
    if number is None or (integer and number.value.denominator != 1):
        kind = "an integer" if integer else "a number"
        shown = shorten(answer.text, SHOWN_CHARS)
        return _answer(False, None, f"no answer: {shown!r} is not {kind}")
    return _answer(any(same_quantity(number, gold) for gold in golds), answer.text)


def _gold_quantity(gold: str) -> Quantity:
    """Return the number of a ground truth; of a GSM8K solution, the one after `####`.

    Raises CannotScore if the ground truth is not a number.
    """
    written = find_after_hashes(clean(gold)) if "####" in gold else gold
    quantity = None if written is None else read_quantity(written)
    if quantity is None:
        raise CannotScore(f"ground_truth {shorten(gold, SHOWN_CHARS)!r} is not a number")
    return quantity


def _read_value(text: str) -> Quantity | None:
    """Return the number of `5`, `x = 5` or `12 + 30 = 42`; of `1/3 ≈ 0.33` the exact one."""
    # The name of a value and a rounded value after `≈` are dropped.
    exact, *rounded = re.split(r"\\approx|≈", text)
    name, _, value = exact.rpartition("=")
    if re.search(r"[!<>]\s?$", name):
        return None
    if not names_value(name) or (value.strip() == "0" and re.search(r"[A-Za-z]\W*[-+*/^]", name)):
        return None
    # `x ≈ 0.33` has only a rounded value.
    if rounded and ("=" not in exact or not value.strip()):
        value = rounded[-1]
    return read_quantity(value, decimal_comma=True)


def compare_algebra(reply: str, truth: Any, extra: Facts) -> Answer:
    """1 when the reply's answer is mathematically equal to a ground truth; may hang."""
    from ppo_cli.rewards.algebra import Unreadable, decide, equal

    golds = [_gold_maths(gold) for gold in _golds(truth)]
    answer = _extract_maths(reply, golds)
    reason = answer.reason
    for gold in golds if answer.text is not None else ():
        verdict = decide(answer.text, gold)
        try:
            if verdict or (verdict is None and equal(str(answer.text), gold)):
                return _answer(True, answer.text)
        except Unreadable as problem:
            reason = f"unreadable: {problem}"
    return _answer(False, answer.text, reason)


@_rule(
    "math", "\\boxed{ANSWER}, <answer>, `the answer is …`, or an expression at the end",
    "lighteval/math*", "digitallearninggmbh/math-lighteval", "huggingfaceh4/math-500",
    "huggingfaceh4/aime*", "math*", "aime*", "amc*", "numina*", "olympiad*",
    in_worker=compare_algebra, find_fault=find_wrong_equation,
)  # fmt: skip
def score_math(reply: str, truth: Any, extra: Facts) -> Answer | None:
    """Score by comparing texts and numbers; None when the comparison needs algebra."""
    from ppo_cli.rewards.algebra import decide

    golds = [_gold_maths(gold) for gold in _golds(truth)]
    answer = _extract_maths(reply, golds)
    verdicts = [decide(answer.text, gold) for gold in golds]
    if True in verdicts or None not in verdicts:
        return _answer(True in verdicts, answer.text, answer.reason)
    return None


def _extract_maths(reply: str, golds: Sequence[str]) -> Extraction:
    letters = all(read_choice(gold) and gold.strip(" ()[].:$").isupper() for gold in golds)
    return extract_answer(reply, choice=letters)


def _gold_maths(gold: str) -> str:
    """Return the answer within a ground truth that may be a whole solution."""
    return find_marked_answer(clean(gold)) or gold


def score_entry(reply: str, truth: Any, extra: Facts) -> Answer:
    """Score with the scorer of the set, which gets the entry as the package has generated it."""
    import reasoning_gym  # type: ignore[import-not-found, unused-ignore]

    tagged, _ = find_tagged(reply)
    answer = (reply if tagged is None else tagged).strip()
    entry = ast.literal_eval(extra["entry"])
    score = reasoning_gym.get_score_answer_fn(extra["set"])(answer, entry)
    return {"score": float(score), "extracted": answer}


@_rule(
    "reasoning_gym", "<answer>ANSWER</answer>, or nothing but the answer, as the set's scorer does",
    "reasoning_gym:*", has_answer=False, in_worker=score_entry,
)  # fmt: skip
def leave_entry_to_worker(reply: str, truth: Any, extra: Facts) -> None:
    """Leave the reply to the scorer of the set, which may take long."""
    if not {"entry", "set"} <= extra.keys():
        raise CannotScore(
            "extra_info has no entry and set: `ppo data prepare reasoning_gym:SET` writes them"
        )
    if importlib.util.find_spec("reasoning_gym") is None:
        raise CannotScore("the package reasoning_gym is not installed: pip install reasoning-gym")


@_rule("choice", "a letter A-J in <answer>, \\boxed{} or `the answer is`, or at the end")
def score_choice(reply: str, truth: Any, extra: Facts) -> Answer:
    """1 when the reply chooses the right letter."""
    letters = [read_choice(gold) for gold in _golds(truth)]
    if None in letters:
        raise CannotScore(f"ground_truth {shorten(str(truth), SHOWN_CHARS)!r} is not a letter A-J")
    answer = extract_answer(reply, choice=True)
    return _answer(answer.text in letters, answer.text, answer.reason)


@_rule("exact", "nothing but the answer")
def score_exact(reply: str, truth: Any, extra: Facts) -> Answer:
    """1 when the whole reply, or the content of its tags, is the right text but for case."""
    text = normalise_words(_inside_tags(strip_reasoning(reply)))
    return _answer(any(text == normalise_words(gold) for gold in _golds(truth)), text or None)


@_rule("contains", "the ground truth as separate words")
def score_contains(reply: str, truth: Any, extra: Facts) -> Answer:
    """1 when the right text occurs in the reply, or in its tags, as separate words."""
    text = _inside_tags(strip_reasoning(reply))
    match = next((gold for gold in _golds(truth) if contains_answer(text, gold)), None)
    return _answer(match is not None, match)


def _inside_tags(text: str) -> str:
    content, _ = find_tagged(text)
    return text if content is None else content


def match_pattern(reply: str, truth: Any, extra: Facts, *, pattern: str = "") -> Answer:
    """1 when the whole reply matches a pattern, from `extra_info.format` or the setting."""
    expression = str(extra.get("format") or pattern)
    try:
        match = re.compile(expression, re.DOTALL).fullmatch(reply)
    except re.error as error:
        raise CannotScore(
            f"the pattern {shorten(expression, SHOWN_CHARS)!r} is not valid: {error}"
        ) from error
    return _answer(match is not None, None if match is None else "matched")


@_rule(
    "format",
    "a whole reply that matches",
    has_answer=False,
    in_worker=match_pattern,
    reads_thoughts=True,
)
def score_format(reply: str, truth: Any, extra: Facts, *, pattern: str = "") -> Answer | None:
    """1 for a closed thought, then `<answer>…</answer>` and nothing else.

    None if the user gives a pattern, as `pattern` or as the row's `format`: it may backtrack for
    ever, so it is matched in a worker.
    """
    if extra.get("format") or pattern:
        return None
    # Exactly one closed thought, then the tags and nothing else.
    split = split_strictly(reply)
    matches = split is not None and split[0] != "" and _FRAMED.fullmatch(split[1]) is not None
    return _answer(matches, "matched" if matches else None)


@_rule("length", "a length within the limits", has_answer=False, reads_thoughts=True)
def score_length(
    reply: str, truth: Any, extra: Facts, *, max_chars: float = 2000, min_chars: float = 1
) -> Answer:
    """1 between `min_chars` and `max_chars`, falling linearly to 0 at 0 and 2 * `max_chars`."""
    # The row's limits win over the setting.
    longest = float(extra.get("max_chars", max_chars))
    least = float(extra.get("min_chars", min_chars))
    size = len(reply.strip())
    short = size / least if size < least else 1.0
    long = max(0.0, 2 - size / longest) if longest > 0 else 0.0
    return {"score": min(1.0, short, long), "extracted": str(size)}


@_rule("repetition", "words that do not repeat", has_answer=False, reads_thoughts=True)
def score_repetition(reply: str, truth: Any, extra: Facts) -> Answer:
    """1 minus the share of four-word sequences that occur more than once."""
    share = repetition(reply)
    return {"score": 1 - share, "extracted": f"{share:.3f} repeated"}


@_rule(
    "code", "Python code, fenced or bare",
    "openai_humaneval", "openai/openai_humaneval", "humaneval*", "evalplus/*", "mbpp*",
    "google-research-datasets/mbpp", "codecontests", "code_contests", "deepmind/code_contests",
    "apps", "codeparrot/apps", "taco", "baai/taco", "livecodebench*",
    "kodcode*",
    has_answer=False, find_fault=find_raising_line,
)  # fmt: skip
def score_code(reply: str, truth: Any, extra: Facts) -> Answer | None:
    """0 for a reply without code; None for code, which a sandbox must run."""
    from ppo_cli.rewards.code.extract import find_code, read_tests

    if find_code(reply, read_tests(truth, extra).entry_point).strip():
        return None
    return {"score": 0.0, "extracted": None, "reason": "no code in the response"}


def _golds(ground_truth: Any) -> list[str]:
    """Return the accepted answers of a row; CannotScore if it has none, or an unknown object."""
    golds = accepted_answers(_read_object(ground_truth))
    if not golds:
        raise CannotScore("the row has no ground_truth")
    return golds


# Keys of an object that has the answer or several, as in the rows of Search-R1.
_ANSWER_KEYS = ("target", "answer", "answers", "ground_truth")


def _read_object(truth: Any) -> Any:
    """Return the answers in a ground truth that is an object, or the JSON of one."""
    if isinstance(truth, str) and truth.lstrip()[:1] == "{":
        with suppress(ValueError, RecursionError):
            truth = json.loads(truth)
    if not isinstance(truth, Mapping):
        return truth
    answers = [truth[key] for key in _ANSWER_KEYS if key in truth]
    if len(answers) != 1 or isinstance(answers[0], Mapping):
        keys = ", ".join(map(str, truth)) or "no keys"
        raise CannotScore(
            f"ground_truth is an object with {shorten(keys, SHOWN_CHARS)}: give the answer, a list "
            'of accepted ones, or {"target": […]}'
        )
    return answers[0]


# Pattern of a data_source (case-insensitive) -> rule; the first match decides.
ROUTES: tuple[tuple[str, str], ...] = (
    *((pattern, rule.name) for rule in RULES.values() for pattern in rule.sources),
    *((name, name) for name in RULES),
)


@lru_cache(1024)
def find_rule(data_source: str) -> Rule | None:
    """Return the rule that serves a data_source, or None."""
    source = data_source.casefold()
    return next((RULES[rule] for pattern, rule in ROUTES if fnmatchcase(source, pattern)), None)


def get_rule(name: str) -> Rule:
    """Return the rule of this name, also of a package; RewardError suggests the nearest one."""
    names = [*RULES, *entry_points("rules")]
    if name not in names:
        hint = did_you_mean(name, names)
        raise RewardError(f"--rule {name}: there is no such rule.{hint} Known: {', '.join(names)}.")
    if not find_plugin("rules", name, RULES):
        return RULES[name]
    rule = load("rules", name)
    if isinstance(rule, Rule):
        return rule
    # A function may hang: worker processes call it.
    return Rule(name, _leave_to_worker, f"what {name} scores", in_worker=rule, has_answer=False)


def choose_rule(settings: RewardSettings) -> Rule | None:
    """Return the rule of all rows, None if each row's data_source chooses one.

    Raises RewardError if it is unknown, or lacks a setting that is set.
    """
    if settings.rule is None:
        if settings.function_kwargs:
            raise RewardError(
                "reward.function_kwargs belong to --reward_function FILE:NAME or --rule NAME, "
                "but neither is set."
            )
        return None
    rule = get_rule(settings.rule)
    for name in settings.function_kwargs:
        if name not in rule.settings:
            names = ", ".join(rule.settings) or "none"
            hint = did_you_mean(name, rule.settings)
            raise RewardError(
                f"reward.function_kwargs.{name}: the rule {rule.name} has no such setting.{hint} "
                f"Known: {names}."
            )
    return rule


def check_places(rules: Sequence[RewardSettings]) -> None:
    """Raise RewardError if none of these rules knows a place where a response goes wrong."""
    if all(rule.rule is not None and get_rule(rule.rule).find_fault is None for rule in rules):
        names = ", ".join(name for name, other in RULES.items() if other.find_fault)
        raise RewardError(
            "--rule_place: no rule of this run knows where a response goes wrong. Use one of "
            f"{names}, or leave --rule_place out."
        )


def runs_code(rule: Rule | None, prompts: Sequence[Prompt]) -> bool:
    """Whether this rule, or the rule of any prompt's data_source, runs the responses as code."""
    if rule is not None:
        return rule is RULES["code"]
    return any(find_rule(source) is RULES["code"] for source in data_sources(prompts))


def _leave_to_worker(reply: str, truth: Any, extra: Facts, **settings: Any) -> None:
    """Leave every reply to the worker process."""


def score_immediately(rule: Rule, call: Call, settings: Facts) -> Score | None:
    """Return a rule's score; None when it needs a worker process or a sandbox."""
    try:
        value = rule.score(call.solution_str, call.ground_truth, call.extra_info, **settings)
        return None if value is None else read_returned(value)
    except CannotScore as problem:
        return Score.failed(str(problem))
    except Exception as error:
        return Score.failed(f"raised {describe_error(error)}")


def check_prompts(rule: Rule | None, settings: Facts, prompts: Sequence[Prompt]) -> None:
    """Raise RewardError if a rule has nothing to compare with in any of its prompts."""
    # One scorable prompt of a rule is enough: others fail alone.
    rules = {rule} if rule else {find_rule(source) for source in data_sources(prompts)} - {None}
    scorable: set[str] = set()
    failures: dict[str, tuple[int, str]] = {}  # how many, and the last
    for prompt in prompts:
        if len(scorable) == len(rules):
            break
        chosen = rule or find_rule(prompt.data_source)
        if chosen is None or chosen.name in scorable:
            continue
        call = Call(prompt.data_source, "", prompt.ground_truth, dict(prompt.extra_info))
        returned = score_immediately(chosen, call, settings)
        if returned is None or not returned.failure:
            scorable.add(chosen.name)
        else:
            failures[chosen.name] = failures.get(chosen.name, (0, ""))[0] + 1, returned.failure
    for name, (count, failure) in failures.items():
        if name not in scorable:
            raise RewardError(
                f"None of {count} prompts for the rule {name} can be scored: {failure}. Name the "
                "column with what the rule compares with (--answer_key), add it to the rows, or "
                "choose another reward with --rule NAME or --reward_function FILE:NAME."
            )


def check_sources(sources: Collection[str]) -> None:
    """Raise unless every data_source of the prompts has a rule."""
    # Name at most five sources, and suggest the nearest pattern.
    unknown = sorted(source for source in sources if find_rule(source) is None)
    if not unknown:
        return
    advice = (
        "Give your own reward function with --reward_function FILE:NAME, or one rule for "
        f"every row with --rule NAME ({', '.join(RULES)})."
    )
    if unknown == [""]:
        raise RewardError(f"The prompts have no data_source, which chooses the rule. {advice}")
    patterns = dict.fromkeys(pattern for pattern, _ in ROUTES)
    hints = dict.fromkeys(did_you_mean(name.casefold(), patterns) for name in unknown)
    named = ", ".join(repr(name) for name in unknown[:5])
    suffix = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
    raise RewardError(
        f"No rule for data_source {named}{suffix}.{''.join(hints)} "
        f"Known: {', '.join(patterns)}. {advice}"
    )
