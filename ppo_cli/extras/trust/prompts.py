"""A judge's prompts: the exact request for one data row, and criteria that a judge drafts.

Criteria are drafted from questions and reference answers, for a person to edit. A draft counts in
exactly the form that was asked for; any other leaves its row out. Verdicts so far are written when
something stops it, and rows that are in the file already are not asked again.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ppo_cli.atomic import replacing
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.data_sets.files import RowError, RowProblem, raise_problems
from ppo_cli.data_sets.rows import Row, as_plain, find_columns, question_of, read_row
from ppo_cli.data_sets.sources import read_source
from ppo_cli.errors import DataError, Interrupted, RewardError, UserError, first_line
from ppo_cli.redact import redact
from ppo_cli.report.tracker import Screen
from ppo_cli.rewards.judge.cache import VerdictCache, cache_key, cache_path
from ppo_cli.rewards.judge.calls import JudgeError, Question, Usage, Verdict, worst_case
from ppo_cli.rewards.judge.client import JudgeClient, reach
from ppo_cli.rewards.judge.costs import Spending, build_ledger
from ppo_cli.rewards.judge.prices import find_price
from ppo_cli.rewards.judge.prompt import (
    RUBRIC_SCALE,
    Material,
    Template,
    as_text,
    build_material,
    load_preset,
    load_template,
    preset_names,
    preset_path,
    reference_answer,
    rubric_reader,
    visible_text,
)
from ppo_cli.rewards.judge.providers import NO_KEY, build_provider, locate, provider_class
from ppo_cli.rewards.judge.providers.base import Key
from ppo_cli.rewards.judge.rubric import DRAFT_SYSTEM, RubricDraft
from ppo_cli.rewards.judge.sanitise import cut_middle, no_content_reason
from ppo_cli.rewards.remote.event_loop import LoopThread
from ppo_cli.rewards.remote.limits import Limits
from ppo_cli.scoring.rows import RESPONSE, Answered, read_response, write_rows
from ppo_cli.scoring.score import BY_HAND, POLL_S

UNNAMED = "no-model"
ANOTHER = "(another response to the same prompt)"


@dataclass(frozen=True)
class Shown:
    """A row's request, its template, and why the gate would answer in the judge's place."""

    template: Template
    question: Question
    gated: str | None


class Recorder:
    """Stands in for an SDK's client: keeps what it is called with, and sends nothing."""

    def __init__(self, path: str = "") -> None:
        self.path = path

    def __getattr__(self, name: str) -> Recorder:
        return Recorder(f"{self.path}.{name}".lstrip("."))

    def __call__(self, **arguments: Any) -> Any:
        """Keep the call."""
        raise Recorded(self.path, arguments)


class Recorded(Exception):
    """The call that a provider would have made."""

    def __init__(self, method: str, arguments: Mapping[str, Any]) -> None:
        super().__init__(method)
        self.method = method
        self.arguments = arguments


def wire_form(
    api: ApiReward, question: Question, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return the call that the provider would make first: endpoint, method and arguments.

    Neither a key nor the SDK is needed, and nothing is sent. What a model refuses is left out
    by later calls.
    """
    # Without a model the rest can be shown all the same.
    kind, named = provider_class(api.type), api.model_copy(update={"model": api.model or UNNAMED})
    provider = kind(named, locate(kind, api, environ), Key(NO_KEY, ""))
    asked = (
        provider.decide(Recorder(), question, api.timeout)
        if api.mode == "decision"
        else provider.judge(Recorder(), question, provider.form(), api.timeout)
    )
    try:
        asyncio.run(asked)
    except Recorded as call:
        method = call.method.replace(".with_raw_response", "")
        where = {"endpoint": provider.base_url, "mode": api.mode, "method": method}
        return where | {"arguments": dict(call.arguments) | {"model": api.model}}
    except NotImplementedError as error:
        raise RewardError(f"{error}: leave --rm_mode at text.") from error
    raise AssertionError(f"{provider!r} asked nothing")


def bundled_prompts() -> tuple[Template, ...]:
    """Return the bundled judge prompts, read and checked."""
    return tuple(load_preset(name) for name in preset_names())


def prompt_text(name: str) -> str:
    """Return the file of a bundled judge prompt, comments and all."""
    return preset_path(name).read_text(encoding="utf-8")


def show_row(
    api: ApiReward,
    source_file: str,
    row_number: int,
    *,
    response: str | None = None,
    prompt_key: str = "prompt",
    source_key: str = "data_source",
) -> Shown:
    """Render one row; `response` stands in for the row's own, or for one that is not there."""
    template = load_template(api)
    row, own = find_row(source_file, row_number, prompt_key, source_key)
    chosen = own if response is None else response
    if chosen is None:
        raise DataError(
            f"{row.place} has no column '{RESPONSE}': give a placeholder with --response TEXT."
        )
    material = Material(question_of(row.prompt), chosen, row.ground_truth, row.extra_info)
    if api.mode == "compare":
        other = ANOTHER if api.of_the_run else reference_answer(api, material)
        material = replace(material, compared=(chosen, other))
    question = template.question(material, api, rubric=rubric_reader(api)(material))
    seen = visible_text(chosen, api.reasoning)
    gated = no_content_reason(material.prompt, seen, row.ground_truth) if api.gate else None
    return Shown(template, question, gated)


def find_row(
    source_file: str, number: int, prompt_key: str, source_key: str
) -> tuple[Row, str | None]:
    """Read one row by the number that messages use: a line of JSONL, a row of other files."""
    raw = read_source(source_file)
    records = {place.number: (place, record) for place, record in raw.records}
    raise_problems([problem for problem in raw.problems if problem.place.number == number])
    if number not in records:
        some = f"{min(records)} to {max(records)}" if records else "none"
        raise DataError(f"{raw.source} has no row {number}; it has {some}.")
    place, record = records[number]
    columns = find_columns(raw, prompt_key, source_key)
    try:
        row = read_row(place, record, columns)
        own = read_response(record)
    except RowError as error:
        raise DataError(str(RowProblem(place, error.column, str(error)))) from error
    return row, own


RUBRIC = "rubric"  # the value of extra_info that --rm_rubric extra_info.rubric reads
REQUEST = "Request:\n{prompt}"
REFERENCE = "\n\nReference answer, which those who check do not see:\n{ground_truth}"
SEVERAL = (
    "Requests of one kind, with reference answers where there are some. Write criteria that hold "
    "for responses to any such request, not for these alone:\n{prompt}"
)
SHOWN = 8  # requests that criteria for a whole run are drafted from
LONGEST = 3000  # characters of each of their texts
DRAIN_S = 20.0


@dataclass(frozen=True)
class Asked:
    """The verdicts and errors in the order of the questions; None was not asked."""

    answers: tuple[Verdict | JudgeError | None, ...]
    spent: Spending
    stopped: str = ""


def draft_rows(
    api: ApiReward, rows: Sequence[Answered], out: Path, most: int, screen: Screen
) -> dict[str, Any]:
    """RubricDraft criteria for each row and write the rows that have some, in their order."""
    known = _written(out)
    done = {n: _own(row, known) for n, row in enumerate(rows)}
    left = [n for n, record in done.items() if record is None]
    questions = [_question(api, build_material(rows[n].rollout.prompt, ""), most) for n in left]
    screen.note(_forecast(api, questions, len(rows) - len(left)))
    asked = ask_all(api, questions, screen)
    failed = []
    for n, answer in zip(left, asked.answers, strict=True):
        if isinstance(answer, Verdict):
            extra = {**rows[n].rollout.prompt.extra_info, RUBRIC: answer.info["rubric"]}
            done[n] = {**rows[n].record, "extra_info": extra}
        elif answer is not None:
            failed.append({"row": str(rows[n].place), "why": answer.said})
    written = [record for record in done.values() if record is not None]
    write_rows(out, written)
    return {"rows": len(rows), "written": len(written), "there before": len(rows) - len(left),
            "failed": failed, **_facts(api, asked)}  # fmt: skip


def draft_one(
    api: ApiReward, rows: Sequence[Answered], out: Path, most: int, screen: Screen
) -> dict[str, Any]:
    """RubricDraft criteria for a whole run from some of its rows, as a file for --rm_rubric."""
    if out.exists():
        raise UserError(f"--out {out} is there already, and may be edited; give another name.")
    step = max(1, len(rows) // SHOWN)
    chosen = [build_material(row.rollout.prompt, "") for row in rows[::step][:SHOWN]]
    texts = [
        f"{n}. {_short(one.prompt)}{_answer(one)}" for n, one in enumerate(chosen, start=1)
    ]  # fmt: skip
    template = Template("draft", "1", DRAFT_SYSTEM, SEVERAL, RUBRIC_SCALE)
    together = Material("\n\n".join(texts), "")
    question = template.question(together, api, draft=RubricDraft(most))
    screen.note(_forecast(api, [question], 0))
    asked = ask_all(api, [question], screen)
    answer = asked.answers[0]
    failed = [{"row": "all", "why": answer.said}] if isinstance(answer, JudgeError) else []
    if isinstance(answer, Verdict):
        head = f"# Drafted by {api.model} from {len(chosen)} of {len(rows)} rows; edit it.\n"
        text = yaml.safe_dump(answer.info["rubric"], sort_keys=False, allow_unicode=True, width=90)
        with replacing(out) as fresh:
            fresh.write_text(head + text, encoding="utf-8")
    return {"rows": len(chosen), "written": int(isinstance(answer, Verdict)), "there before": 0,
            "failed": failed, **_facts(api, asked)}  # fmt: skip


def _answer(material: Material) -> str:
    truth = as_text(material.ground_truth).strip() if material.ground_truth is not None else ""
    return f"\nReference answer: {_short(truth)}" if truth else ""


def _short(text: str) -> str:
    head, left_out, tail = cut_middle(text, LONGEST)
    return f"{head} … {tail}" if left_out else head


def _question(api: ApiReward, material: Material, most: int) -> Question:
    truth = material.ground_truth
    refers = truth is not None and bool(as_text(truth).strip())
    template = Template(
        "draft", "1", DRAFT_SYSTEM, REQUEST + REFERENCE * refers, RUBRIC_SCALE
    )  # fmt: skip
    return template.question(material, api, draft=RubricDraft(most))


def _written(out: Path) -> dict[str, dict[str, Any]]:
    """The rows of an earlier call by what they were drafted from; a person may have edited them."""
    found = {}
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            found[_key(row, row["extra_info"])] = row
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"--out {out}, line {number} is no row of an earlier draft ({first_line(error)}). "
                "Mend it, or give another name."
            ) from None
    return found


def _own(row: Answered, known: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """A row that has criteria: from an earlier call, or its own."""
    extra = row.rollout.prompt.extra_info
    own = {**row.record, "extra_info": dict(extra)} if extra.get(RUBRIC) else None
    return known.get(_key(row.record, extra), own)


def _key(record: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
    """What a row is but for its criteria."""
    bare = {name: value for name, value in extra.items() if name != RUBRIC}
    whole = as_plain({**record, "extra_info": bare})
    return json.dumps(whole, sort_keys=True, ensure_ascii=False, default=str)


def _forecast(api: ApiReward, questions: Sequence[Question], there: int) -> str:
    """Say how much will be asked, and what one call for each costs at most."""
    worst = sum((worst_case(question) for question in questions), Usage())
    price = find_price(api)
    cost = "its price is not known" if price is None else f"${price.cost(worst):.4f}"
    before = f"{there:,} rows have criteria already. " if there else ""
    return (
        f"{before}Asking for {len(questions):,} drafts: at most {worst.total:,} tokens, {cost}, "
        "where each answer counts at once."
    )


def ask_all(
    api: ApiReward, questions: Sequence[Question], screen: Screen,
    environ: Mapping[str, str] = os.environ,
) -> Asked:  # fmt: skip
    """Ask each question once, within the limits, budget and cache of the settings."""
    if not questions:
        return Asked((), Spending())
    provider = build_provider(api, environ=environ)
    ledger = build_ledger(api, environ)
    path = cache_path(api, environ)
    cache = None if path is None else VerdictCache(path)
    client = JudgeClient(provider, limits=Limits.of(api), ledger=ledger, cache=cache)
    loop, stopped = LoopThread(), ""
    futures: list[Future[Verdict | JudgeError]] = []
    try:
        provider.begin(screen.note)
        known: dict[int, Verdict] = {}
        key = cache_key(provider.identity, questions[0])
        # Where key, model or address are wrong, no other question is asked.
        with suppress(JudgeError):
            if cache is None or cache.get(key) is None:
                known[0] = reach(loop, client, questions[0], api, tell=screen.note, tries=1)
                if cache is not None:
                    cache.put(key, known[0])
        asked = enumerate(questions)
        futures = [loop.submit(_ask(client, one, known.get(n))) for n, one in asked]
        with screen.phase("draft", len(futures)) as advance:
            for future in futures:
                while not wait([future], timeout=POLL_S).done:
                    if why := client.waiting_for():
                        screen.note(why)
                future.result()
                advance(1)
    except Interrupted as reason:
        stopped = str(reason)
    except KeyboardInterrupt:
        stopped = BY_HAND
    finally:
        loop.call(client.close(DRAIN_S), timeout=2 * DRAIN_S)
        loop.close()
        provider.end()
        if cache is not None:
            cache.close()
    futures += [Future() for _ in questions[len(futures) :]]
    return Asked(tuple(map(_now, futures)), ledger.total, stopped)


async def _ask(
    client: JudgeClient, question: Question, known: Verdict | None
) -> Verdict | JudgeError:
    try:
        return known or await client.ask(question)
    except JudgeError as error:
        return error


def _now(future: Future[Verdict | JudgeError]) -> Verdict | JudgeError | None:
    """What was answered as far as it is there."""
    there = future.done() and not future.cancelled() and future.exception() is None
    return future.result() if there else None


def _facts(api: ApiReward, asked: Asked) -> dict[str, Any]:
    spent = asked.spent
    cost = None if find_price(api) is None else spent.usd
    return {"calls": spent.calls, "tokens": spent.usage.total, "cost_usd": cost,
            "stopped": redact(asked.stopped)}  # fmt: skip
