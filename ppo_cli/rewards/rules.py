"""The built-in rules, each declared at the function that scores, with the data_sources it serves,
and the reward of rules: text is compared at once, algebra is for workers, code for sandboxes.

A rule returns a dict: `score`, and `extracted`, what it found in the reply. It raises
`CannotScore` where the row gives it nothing to compare with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from ppo_cli.config.reward_schema import Code
from ppo_cli.errors import RewardError, did_you_mean, shorten
from ppo_cli.records import Part, Prompt, Rollout, Score
from ppo_cli.rewards.base import Call, CannotScore, Reward, describe_error, read_returned
from ppo_cli.rewards.checkers import (
    accepted,
    clean,
    contains_answer,
    find_after_hashes,
    find_boxed,
    find_choice,
    find_first_number,
    find_last_number,
    normalise_maths,
    normalise_words,
    read_choice,
    read_number,
    repetition,
    unwrap_text,
)
from ppo_cli.rewards.code.extract import find_code, read_tests
from ppo_cli.thoughts import NO_ANSWER, split_strictly, strip_reasoning

if TYPE_CHECKING:
    from ppo_cli.rewards.code.check import CodePool
    from ppo_cli.rewards.pool import WorkerPool

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
    name: str,
    looks_for: str,
    *sources: str,
    has_answer: bool = True,
    slow: ScoreReply | None = None,
    whole: bool = False,
) -> Callable[[ScoreReply], ScoreReply]:
    """Declare a rule by the function that scores."""

    def declare(score: ScoreReply) -> ScoreReply:
        RULES[name] = Rule(name, score, looks_for, sources, has_answer, slow, whole)
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
    "google-research-datasets/mbpp", "codecontests", "apps", "taco", "livecodebench*",
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


CPU_SECONDS = 3.0
MOST_MEMORY = 4 << 30


def load_slow(name: str, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the slow way of a rule, with its libraries loaded before the clock runs."""
    slow = RULES[name].slow
    assert slow is not None

    def compute_score(solution_str: str, ground_truth: Any, extra_info: Any, **_: Any) -> Any:
        return slow(solution_str, ground_truth, extra_info, **settings)

    if name == "math":
        slow(r"\boxed{\frac{2}{4}}", "0.5", {})
    return compute_score


class RuleReward(Reward):
    """Scores by rule: strings are compared at once, algebra goes to workers, code to sandboxes.

    `rule` serves every row; without it each row's data_source chooses. `timeout` is by the
    wall clock, `cpu_seconds` by the worker's own processor time; `code` limits the rule code.
    """

    name = "rule"

    def __init__(
        self,
        rule: Rule | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        timeout: float = 10.0,
        num_workers: int = 2,
        cpu_seconds: float = CPU_SECONDS,
        code: Code | None = None,
    ) -> None:
        from ppo_cli.rewards.code.check import CodePool

        self._rule = rule
        self._settings = dict(settings or {})
        self._timeout = timeout
        self._num_workers = num_workers
        self._cpu_seconds = cpu_seconds
        self._code = CodePool(code or Code(), size=num_workers)
        self._pools: dict[str, WorkerPool] = {}
        self._closed = False
        _check_settings(rule, self._settings)

    def start(
        self,
        prompts: Sequence[Prompt],
        *,
        patient: bool = False,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Choose the sandbox where prompts ask for code.

        RewardError when no sandbox works, or when no prompt of a rule can be scored.
        """
        check_prompts(self._rule, self._settings, prompts)
        if any((self._rule or rule_for(p.data_source)) is RULES["code"] for p in prompts):
            self._code.start(tell)

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Score one rollout; most rules answer before this returns."""
        if self._closed:
            raise RuntimeError("this reward is closed")
        prompt = rollout.prompt
        rule = self._rule or rule_for(prompt.data_source)
        if rule is None:
            return _done(Score.failed(f"no rule for data_source {prompt.data_source!r}"))
        text = rollout.whole if rule.whole else rollout.answer
        call = Call(prompt.data_source, text, prompt.ground_truth, dict(prompt.extra_info))
        score = answer_now(rule, call, self._settings)
        if not rule.whole and not text and rollout.unclosed and not (score and score.failure):
            score = read_returned({"score": 0.0, "extracted": None, "reason": NO_ANSWER})
        if score is None:
            return self._pool(rule).submit(call, partial(_named, rule))
        return _done(_named(rule, score))

    def _pool(self, rule: Rule) -> WorkerPool | CodePool:
        if rule.slow is None:
            return self._code
        if rule.name not in self._pools:
            from ppo_cli.rewards.pool import Task, WorkerPool

            load = partial(load_slow, rule.name, self._settings)
            task = Task(f"the rule {rule.name}", load, self._cpu_seconds, MOST_MEMORY)
            self._pools[rule.name] = WorkerPool(task, size=self._num_workers, timeout=self._timeout)
        return self._pools[rule.name]

    def close(self) -> None:
        """Stop the workers."""
        self._closed = True
        self._code.close()
        for pool in self._pools.values():
            pool.close()


def _done(score: Score) -> Future[Score]:
    future: Future[Score] = Future()
    future.set_result(score)
    return future


def _named(rule: Rule, score: Score) -> Score:
    # How long it took stays out: the same rollout gives the same record.
    info = {k: v for k, v in score.info.items() if k != "latency_s"} | {"rule": rule.name}
    value = score.value
    parts = {} if value is None else {rule.name: Part(raw=value, scaled=value)}
    return replace(score, parts=parts, info=info)


def _check_settings(rule: Rule | None, settings: Mapping[str, Any]) -> None:
    if not settings:
        return
    if rule is None:
        raise RewardError(
            "reward.function_kwargs belong to --reward_function FILE:NAME or --rule NAME, "
            "but neither is set."
        )
    for name in settings:
        if name not in rule.settings:
            known = ", ".join(rule.settings) or "none"
            hint = did_you_mean(name, rule.settings)
            raise RewardError(
                f"reward.function_kwargs.{name}: the rule {rule.name} has no such setting.{hint} "
                f"Known: {known}."
            )
