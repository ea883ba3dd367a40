"""Forecast of a judge: calls, tokens and cost of a run; and what an API key may use.

Requests are rendered from real rows as in training. The lengths of responses and verdicts and the
judge's tokenizer are unknown beforehand, so each figure has a low and a high value.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo_cli.config.mixture import other_judges
from ppo_cli.config.models.known_models import JUDGES, missing_sdk_settings
from ppo_cli.config.schema.environment import Environment
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.config.schema.run import Config
from ppo_cli.data_sets.sources import is_hub_name
from ppo_cli.errors import DataError, did_you_mean, plural
from ppo_cli.planning.batches import batch_arithmetic, split_files, train_rows, val_rows
from ppo_cli.records import Prompt
from ppo_cli.rewards.judge.calls import REQUEST_OVERHEAD, Usage
from ppo_cli.rewards.judge.compare import calls_per_prompt
from ppo_cli.rewards.judge.format_check import format_checks
from ppo_cli.rewards.judge.monitor import NOISE_REPEATS
from ppo_cli.rewards.judge.placing import MAX_PIECES, request_places, show_example
from ppo_cli.rewards.judge.prices import Price, find_price, look_up_model, model_hint
from ppo_cli.rewards.judge.prompt import (
    Template,
    build_material,
    check_rows,
    load_fixed_rubric,
    load_template,
    reference_answer,
    rubric_reader,
)
from ppo_cli.rewards.judge.providers import describe_endpoint, monitor_settings
from ppo_cli.rewards.judge.providers.base import SdkProvider
from ppo_cli.rewards.judge.rubric import TOKENS_A_PIECE
from ppo_cli.rewards.judge.sanitise import cut_middle
from ppo_cli.rewards.judge.visible import Passage, Response
from ppo_cli.scoring.rows import read_held_out
from ppo_cli.secrets.redact import redact

# Rows that are rendered for a forecast; more would take long and change the means little.
SAMPLE = 200
# UTF-8 bytes per token for the low and the high figure. The ledger's estimate is an upper bound,
# about twice what prose takes: right for a budget, too high for a forecast.
TOKEN_BYTES = (4, 3)
CRITERION_TOKENS = (15, 60)  # verdict on one criterion: a word, or a long sentence
PIECE_CHARS = 80  # of a piece of a response that the judge scores: a short sentence
QUOTE_TOKENS = (0, 40)  # of the passage that decides a criterion: none, or a long sentence
TOOLS_CHARS = 1000  # of the list of tools in an episode: five with a sentence each
DIFFERING = 0.136  # share of repeated verdicts that differ (arXiv 2606.13685)
MAX_REQUEST_CHARS = 3000  # of each text of a request in a plan
RESPONSE_NOTE = "(a response of the model)"
VERDICT_TOKENS = (40, 160)  # a short reason, or three full sentences


Tokens = NDArray[np.float64]  # of input and of output


@dataclass(frozen=True)
class UsageRange:
    """A number of calls, with low and high estimates of their tokens."""

    calls: int
    low: Tokens
    high: Tokens

    def times(self, calls: float, most_calls: float | None = None) -> UsageRange:
        """Return the estimate for `calls` times as many calls, at most `most` times as many."""
        most_calls = calls if most_calls is None else most_calls
        return UsageRange(round(self.calls * most_calls), self.low * calls, self.high * most_calls)

    def __add__(self, other: UsageRange) -> UsageRange:
        """Return the sum of two estimates."""
        return UsageRange(self.calls + other.calls, self.low + other.low, self.high + other.high)

    def costs(self, price: Price | None) -> tuple[float, float] | None:
        """Return the lowest and the highest cost in US dollars; None without a price."""
        if price is None:
            return None
        low, high = (price.cost(Usage(*map(round, ends))) for ends in (self.low, self.high))
        return low, high

    def as_dict(self, price: Price | None) -> dict[str, Any]:
        """Return a JSON object; pairs are (low, high)."""
        read, written = zip(map(round, self.low), map(round, self.high), strict=True)
        return {
            "calls": self.calls,
            "input_tokens": list(read),
            "output_tokens": list(written),
            "cost_usd": self.costs(price),
        }


@dataclass(frozen=True)
class Forecast:
    """Estimates for a step and for the run; `run` is None while the number of steps is unknown."""

    api: ApiReward
    sums: dict[str, Any]  # of `batch_arithmetic`
    lengths: tuple[int, int]  # assumed tokens of a response: short, full
    price: Price | None
    a_step: UsageRange
    run: UsageRange | None
    steps: int | None
    rows: int
    sampled: int
    held_out: int = 0  # verdicts on labelled responses
    repeated: int = 0  # verdicts that measure the noise
    wishes: int = 0  # verdicts on what the prompts ask for
    criteria_bill: UsageRange | None = None  # of the criteria that only validations ask about
    others: tuple[Forecast, ...] = ()  # of a cascade's cheaper judge, or of a panel's others

    def stops_at(self) -> tuple[int, int] | None:
        """Return the earliest and the latest step at which a budget ends the run; 0: before 1."""
        if self.run is None or self.steps is None:
            return None
        # A budget ends the run at the step where the run's share of it is used up.
        ratios = [
            (budget / high, budget / low) for budget, low, high in self._budgets() if low and high
        ]
        if not ratios or min(first for first, _ in ratios) >= 1:
            return None
        # The smallest budget counts, in the expensive case and in the cheap one. Critic pretraining
        # comes before the first step.
        pretraining = self.sums.get("reward_calls_pretraining") or 0
        before = pretraining / (self.sums["reward_calls"] or 1)
        first, last = (
            0 if share < before else max(1, int(self.steps * (share - before) / (1 - before)))
            for share in map(min, zip(*ratios, strict=True))
        )
        return first, min(self.steps, last)

    def _budgets(self) -> Iterator[tuple[float, float, float]]:
        """Yield (budget, low, high) for each budget: the low and high estimates of the run."""
        api, run = self.api, self.run
        assert run is not None
        costs = run.costs(self.price)
        # Further judges spend from the same budgets.
        for other in self.others:
            assert other.run is not None
            other_costs = other.run.costs(other.price)
            costs = costs and other_costs and (costs[0] + other_costs[0], costs[1] + other_costs[1])
            run += other.run
        if api.budget_usd is not None and costs is not None:
            yield api.budget_usd, *costs
        if api.budget_tokens is not None:
            yield api.budget_tokens, float(run.low.sum()), float(run.high.sum())

    def as_dict(self) -> dict[str, Any]:
        """Return the forecast as a JSON object; pairs are (low, high)."""
        api = self.api
        others: dict[str, Any] = {}
        if asked_too := [other.as_dict() for other in self.others]:
            cascaded = api.cascade.model is not None
            others = {"cheaper": asked_too[0]} if cascaded else {"panel": asked_too}
        if api.monitor.model is not None:
            second = monitor_settings(api)
            names = {"provider": second.type, "model": second.model}
            others["second_judge"] = names | describe_endpoint(second)
        return {
            "provider": api.type,
            "model": api.model,
            "a_step": self.a_step.as_dict(self.price),
            "run": None if self.run is None else self.run.as_dict(self.price),
            "price_per_million": self.price and [self.price.input, self.price.output],
            "price_source": self.price and self.price.source,
            "budget_usd": api.budget_usd,
            "budget_tokens": api.budget_tokens,
            "stops_at_step": self.stops_at(),
            "assumed": self.assumptions(),
            **describe_endpoint(api),
            **others,
        }

    def lines(self) -> list[str]:
        """Return the forecast as lines for the terminal."""
        api, price = self.api, self.price
        # The judge's bill for the run if its length is known, else for one step; then what may
        # change it.
        usage, where = (self.a_step, " a step") if self.run is None else (self.run, "")
        lines = [f"judge: {_usage_line(usage, price)}{where}{self._price_note()}"]
        if api.cascade.model is not None:
            share = api.cascade.share
            lines[0] += f", if it decides {share:.0%} of the responses (--rm_cascade_share)"
        lines += _endpoint_lines(api)
        who = "cheaper judge" if api.cascade.model is not None else "judge of the panel"
        for other in self.others:
            line = _usage_line(other.run or other.a_step, other.price)
            lines.append(f"{who}, asked about all responses: {line}{where}{other._price_note()}")
            lines += _endpoint_lines(other.api)
            lines += other._model_warnings()
        if self.run is not None:
            lines.append(f"a step: {_usage_line(self.a_step, price)}")
        max_batches = self.sums.get("gen_batches_per_step_at_most")
        if max_batches is not None and max_batches > 1:
            lines.append(
                "dynamic sampling may take more, because groups with equal scores are sampled "
                f"again, at most {_usage_line(self.a_step.times(max_batches), price)} a step"
            )
        lines += self._model_warnings()
        lines += self._budget_lines()
        # A second judge sees a share of the responses once, not once per vote.
        share = api.monitor.share
        scored = 1.0 if api.cascade.model is None else api.cascade.share
        read = usage.times(share / scored / expected_votes(api), share / scored / api.max_votes)
        if api.monitor.model is None and self.run is not None:
            lines.append(
                "no second judge watches for exploits; --rm_monitor_model, of another family, "
                f"would read {share:.0%} of the responses: {_usage_line(read, price)} at this "
                "judge's price"
            )
        if api.monitor.model is not None:
            monitor = monitor_settings(api)
            line = _usage_line(read, find_price(monitor))
            lines.append(
                f"{share:.0%} of the responses are also sent to {monitor.type}: {line}{where} for "
                f"the second judge {monitor.model} are added"
            )
            lines += _endpoint_lines(monitor)
        if self.held_out and self.run is not None:
            lines.append(
                f"{self.held_out:,} of the verdicts are on labelled responses, scored again "
                f"({api.monitor.labels})"
            )
        if self.repeated and self.run is not None:
            lines.append(
                f"{self.repeated:,} of the verdicts are repeated ones, which show the judge's "
                "noise (--rm_noise_responses 0: none)"
            )
        if self.wishes and self.run is not None:
            lines.append(
                "1 of the verdicts says which style the prompt or rubric asks for, so that it is "
                "no evidence of an exploit (--rm_canary_every 0: none)"
            )
        lines += self._held_out_lines()
        if api.asks_on:
            lines.append(
                f"votes: up to {api.max_votes} a response are counted as calls and in the high "
                f"figures, {expected_votes(api):.2f} in the low ones, as repeated verdicts differ "
                f"in {DIFFERING:.1%} of cases (arXiv 2606.13685)"
            )
        return [*lines, f"assumed: {self.assumptions()}"]

    def _held_out_lines(self) -> Iterator[str]:
        """Yield which criteria are held out, and what validations cost more by them."""
        api = self.api
        if api.rubric_held_out is None or api.rubric is None:
            return
        what = f"{api.rubric_held_out:.0%} of the criteria of each row"
        if not api.rubric.startswith("extra_info."):
            criteria = load_fixed_rubric(api).criteria
            names = [criterion.name for criterion in criteria if criterion.held_out]
            what = f"{', '.join(names)} ({len(names)} of {len(criteria)} criteria)"
        cost = ", which this run does not have"
        if self.criteria_bill is not None:
            bill = _usage_line(self.criteria_bill, self.price).removeprefix("0 calls, ")
            cost = f", for {bill} more"
        yield f"held out: {what}; validations alone ask about them{cost}"

    def _price_note(self) -> str:
        """Return model and price in brackets, or an empty text without a price."""
        model, price = self.api.model, self.price
        if price is None:
            return ""
        return f" ({model}: ${price.input:g} in, ${price.output:g} out per M; {price.source})"

    def _model_warnings(self) -> Iterator[str]:
        """Warn if the judge's model looks misspelt, or if its context is too short for a call."""
        api, longest = self.api, self.a_step.high
        assert api.model is not None
        if api.base_url is None and (near := model_hint(api.type, api.model)):
            yield f"{api.model} is in no list of {api.type}'s models.{near}"
        # Prompts that the model cannot read fail at its provider, so say it before the run.
        listed = look_up_model(api)
        tokens = round(longest.sum() / max(1, self.a_step.calls))
        if listed is not None and listed.context is not None and tokens > listed.context:
            yield (
                f"a call may take {tokens:,} tokens, and {api.model} reads {listed.context:,} at "
                "most, by genai-prices: leave long prompts out, or name a model that reads more"
            )

    def _budget_lines(self) -> Iterator[str]:
        """Yield whether the budgets suffice, or that the price is unknown."""
        api = self.api
        if self.price is None:
            yield (
                f"the price of {api.model} is unknown: set --rm_price_input and --rm_price_output "
                "(US dollars for a million tokens), or a file with --rm_prices"
            )
        # Only budgets that are set, under the names of their flags.
        set_ = {"--rm_budget_usd": api.budget_usd, "--rm_budget_tokens": api.budget_tokens}
        named = " and ".join(f"{flag} {budget:,.12g}" for flag, budget in set_.items() if budget)
        if not named or self.run is None or not list(self._budgets()):
            return
        stops = self.stops_at()
        if stops is None:
            yield f"{named} is enough"
            return
        first, last = stops
        when = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        if last == self.steps:
            yield f"{named} may not be enough: the run may stop from step {first:,} on"
        elif not last:
            yield f"with {named} the run would stop in critic pretraining, before its first step"
        else:
            yield f"with {named} the run would stop at about step {when} of {self.steps:,}"

    def assumptions(self) -> str:
        """Return the assumptions behind the figures, in one sentence."""
        # The figures of a single call show which lengths were assumed.
        short, full = self.lengths
        low, high, calls = self.a_step.low, self.a_step.high, max(1, self.a_step.calls)
        brief, long = round(low[1] / calls), round(high[1] / calls)
        rows = f"{self.sampled:,} of {self.rows:,} rows" if self.sampled < self.rows else "all rows"
        return (
            f"requests rendered from {rows}; low: {TOKEN_BYTES[0]} characters a token, responses "
            f"of {short:,} tokens, verdicts of {brief}; high: {TOKEN_BYTES[1]} characters, "
            f"responses of {full:,} tokens, verdicts of {long} (a model that reasons writes "
            "more); nothing from the cache, no call twice"
        )


def forecast(config: Config, read: Callable[[Any], Sequence[Prompt]], wishes: int = 0) -> Forecast:
    """Forecast the calls, tokens and cost of a run's judge; UserError if that is not possible.

    `read` returns the first prompts of a split ("train" or "val"); `wishes` are calls that ask what
    the prompts want.
    """
    api, environment = config.reward.api, config.environment
    template = load_template(api)
    sums, listed = batch_arithmetic(config), api.compare == "list"
    # A cascade's judge is asked about a share of the responses.
    share = 1.0 if api.cascade.model is None else api.cascade.share
    expected, most_votes = share * expected_votes(api), share * api.max_votes
    # Responses per request (alone, in a list), and requests per response.
    alone, of_list, requests = 1, 1, 1.0
    if api.mode == "compare":
        n, max_calls = config.rollout.n, api.compare_calls
        alone, of_list, requests = 2, n if listed else 2, 2.0
        if api.within_group:
            requests = (
                calls_per_prompt(n, max_calls and max_calls // (2 * api.votes), listed=listed) / n
            )
    # Read a sample of the rows: rendering all of a large file is slow.
    files = (*split_files(config.data, "train")[0], *split_files(config.data, "val")[0])
    if far := [name for name in files if is_hub_name(name)]:
        # A forecast does not download datasets.
        raise DataError(f"{', '.join(far)}: not downloaded yet, so its rows are unknown.")
    train = read("train")
    val = read("val") if config.data.val_files else []
    chosen = _sample_prompts(train, config.trainer.seed)
    chosen_val = _sample_prompts(val, config.trainer.seed)
    lengths = short, full = _response_tokens(config.data.max_response_length, environment, api)
    coarse, fine = TOKEN_BYTES
    texts = [_filler(api, environment, size) for size in (short * coarse, full * fine)]
    a_call = _usage_per_call(template, chosen, api, texts, of_list)
    calls, validation = sums["reward_calls"], sums["reward_calls_validation"]
    # The run: training calls, validation, labelled responses and format checks.
    run, criteria_bill = None, None
    if calls is not None and validation is not None:
        # Training calls without validation's, since the two read different rows.
        trained = (calls - validation) * requests
        run = a_call.times(trained * expected, trained * most_votes)
        if validation:
            bill = _usage_per_call(template, chosen_val, api, texts, alone)
            counts = (validation * expected * alone, validation * most_votes * alone)
            run += bill.times(*counts)
            if api.rubric_held_out is not None:
                trained_only = [replace(prompt, validation=False) for prompt in chosen_val]
                less = _usage_per_call(template, trained_only, api, texts, alone)
                criteria_bill = UsageRange(
                    bill.calls - less.calls, bill.low - less.low, bill.high - less.high
                ).times(*counts)
    labelled = len(read_held_out(api.monitor.labels)) if api.monitor.labels is not None else 0
    # The labelled responses are scored at the start, and again every `labels_every` steps.
    labelled *= 1 + (sums["total_steps"] or 0) // api.monitor.labels_every
    checks = len(format_checks(api, template)) if api.canary_every else 0
    # A few responses of the first step are judged again, unless votes show the noise.
    a_step = (sums["reward_calls_per_step"] or 0) * requests
    repeated = 0
    if api.repeats:
        repeated = NOISE_REPEATS * round(min(api.noise_responses, a_step))
    if run is not None:
        run += a_call.times(labelled + checks + wishes + repeated)
    # Further judges are asked about the same rows; those of a panel are repeated too.
    others, rows = [], {"train": train, "val": val}
    for judge in other_judges(api):
        noise = {"noise_responses": api.noise_responses if api.panel.judges else 0}
        reward = config.reward.model_copy(update={"api": judge.model_copy(update=noise)})
        others.append(forecast(config.model_copy(update={"reward": reward}), rows.__getitem__))
    return Forecast(
        api=api,
        sums=sums,
        lengths=lengths,
        price=find_price(api),
        a_step=a_call.times(a_step * expected, a_step * most_votes),
        run=run,
        steps=sums["total_steps"],
        rows=(train_rows(config.data) or len(train)) + (val_rows(config.data) or len(val)),
        sampled=len(chosen) + len(chosen_val),
        held_out=labelled,
        repeated=repeated,
        wishes=wishes,
        criteria_bill=criteria_bill,
        others=tuple(others),
    )


def first_request(api: ApiReward, prompts: Sequence[Prompt]) -> list[str]:
    """Return the lines of the request about the first row, redacted and cut in the middle."""
    response = show_example(RESPONSE_NOTE, api, "" if api.place is None else RESPONSE_NOTE)
    material = build_material(prompts[0], response)
    if api.mode == "compare":
        other = RESPONSE_NOTE if api.of_the_run else reference_answer(api, material)
        material = build_material(prompts[0], RESPONSE_NOTE, other)
    template, rubric = load_template(api), rubric_reader(api)(material)
    question = template.question(
        material, api, nonce="0" * 16, rubric=rubric,
        placing=request_places(response, api, template.scale),
    )  # fmt: skip
    lines = []
    for text in (question.system, question.user):
        head, left_out, tail = cut_middle(redact(text), MAX_REQUEST_CHARS)
        note = [f"[{left_out:,} characters are left out here]"] if left_out else []
        lines += [*head.splitlines(), *note, *tail.splitlines(), ""]
    return lines[:-1]


def _endpoint_lines(api: ApiReward) -> Iterator[str]:
    """Yield where a judge is asked, and the variable with its key; nothing if that is unknown."""
    if (endpoint := describe_endpoint(api))["address"]:
        key = f", key in {endpoint['key_variable']}" if endpoint["key_variable"] else ""
        yield f"asked at {endpoint['address']}{key}"


def expected_votes(api: ApiReward) -> float:
    """Return the expected votes on a response: one more each time that a further one differs."""
    further = range(1, api.max_votes - api.votes + 1)
    return api.votes + sum(DIFFERING**number for number in further)


def _sample_prompts(prompts: Sequence[Prompt], seed: int) -> Sequence[Prompt]:
    return prompts if len(prompts) <= SAMPLE else random.Random(seed).sample(prompts, SAMPLE)


def _usage_per_call(
    template: Template,
    prompts: Sequence[Prompt],
    api: ApiReward,
    texts: Sequence[Response],
    responses: int,
) -> UsageRange:
    """Return the mean usage of a request with `responses` responses, of low and of high length."""
    # One request per rubric, or one per criterion if each is asked separately.
    materials = [build_material(prompt, "") for prompt in prompts]
    check_rows(api, template, prompts)
    of = rubric_reader(api)
    rubrics = [of(material) for material in materials]
    rubrics_of_calls = [
        r.split_criteria() if r is not None and api.rubric_calls == "each" else [r] for r in rubrics
    ]
    calls = max(1, round(fmean(map(len, rubrics_of_calls))))
    # A decision endpoint writes nothing.
    criteria = fmean(len(r.criteria) if r else 0 for r in rubrics)
    brief, long = (float(min(api.max_tokens, tokens)) for tokens in VERDICT_TOKENS)
    if criteria:
        brief, long = (criteria * tokens for tokens in CRITERION_TOKENS)
        if api.place is not None:
            brief, long = brief + criteria * QUOTE_TOKENS[0], long + criteria * QUOTE_TOKENS[1]
    if api.mode == "decision":
        brief = long = 0.0
    # What is written about pieces counts too.
    placings = [request_places(text, api, template.scale) for text in texts]
    in_pieces = [TOKENS_A_PIECE * placing.count if placing else 0 for placing in placings]
    brief, long = brief + in_pieces[0], long + in_pieces[1]
    sizes = []  # mean UTF-8 bytes of the requests for responses of each length
    for text, placing in zip(texts, placings, strict=True):
        requests = []
        for prompt, each in zip(prompts, rubrics_of_calls, strict=True):
            material = build_material(prompt, *[text] * responses)
            questions = (
                template.question(material, api, nonce="0" * 16, rubric=rubric, placing=placing)
                for rubric in each
            )
            requests.append("".join(q.system + q.user for q in questions))
        sizes.append(fmean(len(request.encode("utf-8", "replace")) for request in requests))
    # Low: short responses and many bytes per token; high: full length, few bytes, and overhead.
    low, high = (size / per_token for size, per_token in zip(sizes, TOKEN_BYTES, strict=True))
    high += calls * REQUEST_OVERHEAD
    return UsageRange(calls, np.array([low, brief]), np.array([high, long]))


def _filler(api: ApiReward, environment: Environment, length: int) -> Response:
    """Return a response of `length` characters; episodes and pieces have the fences of them all."""
    text = ("and so on " * (length // 10 + 1))[:length]
    if not environment.is_set or api.scope == "turn":
        count = min(MAX_PIECES, length // PIECE_CHARS)
        if api.place not in ("sentence", "line", "step") or count < 2:
            return text
        share = length // count
        return tuple(Passage("piece", k + 1, text[k * share :][:share]) for k in range(count))
    turns = environment.max_turns
    # Of each turn: text, a call and its result, which fill the episode together.
    kinds = [(kind, turn) for turn in range(1, turns + 1) for kind in ("assistant", "call", "tool")]
    share = max(1, length // len(kinds))
    tools = () if environment.path else (Passage("tools", 0, "t" * TOOLS_CHARS),)
    return tools + tuple(
        Passage(kind, turn, text[place * share : (place + 1) * share])
        for place, (kind, turn) in enumerate(kinds)
    )


def _response_tokens(longest: int, environment: Environment, api: ApiReward) -> tuple[int, int]:
    """Return the assumed response lengths: half of the limit, and the limit.

    The limit of an episode counts its tools' results as well; a judge of its last turn reads the
    tokens of that turn.
    """
    if environment.is_set and api.scope == "turn":
        longest = min(longest, environment.max_turn_tokens)
    return max(1, longest // 2), longest


def _usage_line(bill: UsageRange, price: Price | None) -> str:
    """Format an estimate: `10,240 calls, 4.1 to 6.1 M tokens, $1.20 to $1.50`."""
    totals = bill.low.sum(), bill.high.sum()
    size, unit = (1e6, " M") if totals[1] >= 1e6 else (1e3, " k") if totals[1] >= 1e4 else (1, "")
    low, high = (f"{total / size:,.{0 if size == 1 else 1}f}" for total in totals)
    tokens = f"about {low}{unit}" if low == high else f"{low} to {high}{unit}"
    line = f"{plural(bill.calls, 'call')}, {tokens} tokens"
    if (costs := bill.costs(price)) is None:
        return line
    low, high = (f"${usd:,.{2 if costs[1] >= 0.1 else 4}f}" for usd in costs)
    return f"{line}, {low if low == high else f'{low} to {high}'}"


LIST_TIMEOUT_S = 30.0  # for a provider's list of models
NO_LIST = "this provider does not list the models of a key"


def providers_with_keys(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the judge types for which the environment has a key."""
    for name, provider in JUDGES.items():
        # A provider is ready with a key, or if it needs none but its SDK's settings are there.
        keyed = any(environ.get(key, "").strip() for key in provider.keys)
        ready = provider.needs and provider.keyless
        if (keyed or ready) and not missing_sdk_settings(
            name, environ, base_url=None, key_env=None
        ):
            yield name


async def fetch_models(provider: SdkProvider) -> list[str] | None:
    """The models that a provider lists for its key, sorted; raises only JudgeError."""
    names = await provider.run_with_client(LIST_TIMEOUT_S, provider.list_models)
    return None if names is None else sorted(set(names))


def describe_availability(model: str, names: list[str] | None) -> str:
    """Return whether a model is in the list of names, as a sentence."""
    if names is None:
        return NO_LIST
    # A listed name may be a dated version of the model.
    if any(name == model or name.startswith(f"{model}-") for name in names):
        return f"the key may use {plural(len(names), 'model')}, including {model}"
    near = did_you_mean(model, names)
    return f"the key may use {plural(len(names), 'model')}, but not {model}.{near}"
