"""A judge's prompts: the exact request for one data row, and criteria that a judge drafts.

Criteria are drafted from questions and reference answers, for a person to edit. A draft is only
accepted in exactly the requested form; otherwise its row is left out. After an early stop the
drafts so far are written, and the next call skips rows that are in the file.
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

from ppo_cli.atomic import atomic_replace
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.data_sets.files import RowError, RowProblem, raise_problems
from ppo_cli.data_sets.rows import as_plain
from ppo_cli.data_sets.sources import read_source
from ppo_cli.errors import DataError, Interrupted, RewardError, UserError, first_line, plural
from ppo_cli.paths import load_json, read_text
from ppo_cli.processes.event_loop import LoopThread
from ppo_cli.report.tracker import Screen
from ppo_cli.rewards.judge.cache import cache_key
from ppo_cli.rewards.judge.calls import JudgeError, Question, Usage, Verdict, worst_case
from ppo_cli.rewards.judge.client import JudgeClient, reach_judge
from ppo_cli.rewards.judge.connection import DRAIN_S, connect_judge
from ppo_cli.rewards.judge.costs import Spending
from ppo_cli.rewards.judge.placing import request_places, show_response
from ppo_cli.rewards.judge.prices import find_price
from ppo_cli.rewards.judge.prompt import (
    RUBRIC_SCALE,
    Material,
    Template,
    as_text,
    build_material,
    load_template,
    reference_answer,
    rubric_reader,
)
from ppo_cli.rewards.judge.providers import NO_KEY, provider_class, resolve_base_url
from ppo_cli.rewards.judge.providers.base import Key
from ppo_cli.rewards.judge.rubric import DRAFT_SYSTEM, RubricDraft
from ppo_cli.rewards.judge.sanitise import cut_middle, no_content_reason
from ppo_cli.rewards.judge.visible import written_text
from ppo_cli.scoring.rows import (
    RESPONSE,
    ResponseRow,
    find_response_columns,
    read_response_row,
    write_rows,
)
from ppo_cli.scoring.score import POLL_S, STOPPED_BY_CTRL_C

# Used in place of a model's name until the user has chosen one.
PLACEHOLDER_MODEL = "no-model"
# Used in place of the other response when the run would provide it.
OTHER_RESPONSE = "(another response to the same prompt)"


@dataclass(frozen=True)
class RenderedRow:
    """The request for a row, its template, and the gate's reason to reject the row, if any."""

    template: Template
    question: Question
    gated: str | None


class RecordingClient:
    """Takes the place of an SDK's client: raises RecordedCall with the arguments, sends nothing."""

    def __init__(self, path: str = "") -> None:
        self.path = path

    def __getattr__(self, name: str) -> RecordingClient:
        return RecordingClient(f"{self.path}.{name}".lstrip("."))

    def __call__(self, **arguments: Any) -> Any:
        """Raise the call as an exception."""
        raise RecordedCall(self.path, arguments)


class RecordedCall(Exception):
    """The call that a provider would have sent: the path of the method, and its arguments."""


def provider_call(api: ApiReward, question: Question) -> dict[str, Any]:
    """Return the first call that the provider would send: endpoint, method and arguments.

    Needs no key and no SDK, and sends nothing. If the model refuses an option, a provider repeats
    the call without it; that later call is not shown.
    """
    # Without a model the rest of the call can still be shown.
    kind = provider_class(api.type)
    named = api.model_copy(update={"model": api.model or PLACEHOLDER_MODEL})
    provider = kind(named, resolve_base_url(kind, api, os.environ), Key(NO_KEY, ""))
    request = (
        provider.request_decision(RecordingClient(), question, api.timeout)
        if api.mode == "decision"
        else provider.request_verdict(RecordingClient(), question, provider.forms(), api.timeout)
    )
    try:
        # The provider builds the request as in training; the client raises it instead of sending
        # it.
        asyncio.run(request)
    except RecordedCall as call:
        path, arguments = call.args
        method = path.replace(".with_raw_response", "")
        where = {"endpoint": provider.base_url, "mode": api.mode, "method": method}
        return where | {"arguments": arguments | {"model": api.model}}
    except NotImplementedError as error:
        raise RewardError(f"{error}: leave --rm_mode at text.") from error
    raise AssertionError(f"{provider!r} request nothing")


def render_row(
    api: ApiReward,
    source_file: str,
    row_number: int,
    *,
    response: str | None = None,
    **keys: Any,
) -> RenderedRow:
    """Render the request for one row; `response` replaces the row's response.

    `keys` name its columns, as those of `find_response_columns`.
    """
    template = load_template(api)
    row = read_numbered_row(source_file, row_number, **keys)
    rollout = row.rollout if response is None else replace(row.rollout, text=response, turns=())
    if response is None and not row.has_response:
        raise DataError(
            f"{row.place} has no column '{RESPONSE}': set a response with --response TEXT."
        )
    seen = show_response(rollout, api)
    material = build_material(rollout.prompt, seen)
    # In comparisons the judge sees two responses: another one of the run, or the row's reference.
    if api.mode == "compare":
        other = OTHER_RESPONSE if api.of_the_run else reference_answer(api, material)
        material = replace(material, compared=(seen, other))
    question = template.question(
        material, api, rubric=rubric_reader(api)(material),
        placing=request_places(seen, api, template.scale),
    )  # fmt: skip
    gated = None
    if api.gate:
        gated = no_content_reason(material.prompt, written_text(seen), material.ground_truth)
    return RenderedRow(template, question, gated)


def read_numbered_row(source_file: str, number: int, **keys: Any) -> ResponseRow:
    """Read one row by the number used in messages: a line of JSONL, a row of other files."""
    # Mistakes in other rows do not matter here.
    raw = read_source(source_file)
    records = {place.number: (place, record) for place, record in raw.records}
    raise_problems([problem for problem in raw.problems if problem.place.number == number])
    if number not in records:
        numbers = f"{min(records)} to {max(records)}" if records else "none"
        raise DataError(f"{raw.source} has no row {number}; it has {numbers}.")
    place, record = records[number]
    columns = find_response_columns(raw, **keys)
    try:
        return read_response_row(raw.label, place, record, columns)
    except RowError as error:
        raise DataError(str(RowProblem(place, error.column, str(error)))) from error


RUBRIC = "rubric"  # the value of extra_info that --rm_rubric extra_info.rubric reads
# The texts of the request for a draft: one row, its reference answer, or several rows together.
REQUEST = "Request:\n{prompt}"
REFERENCE = "\n\nReference answer, which those who check do not see:\n{ground_truth}"
REQUESTS = (
    "Requests of one kind, with reference answers where there are some. Write criteria that hold "
    "for responses to any such request, not for these alone:\n{prompt}"
)
DRAFT_ROWS = 8  # rows that criteria for a whole run are drafted from
MAX_TEXT_CHARS = 3000  # of each text of these rows


@dataclass(frozen=True)
class Drafts:
    """Verdicts and errors in the order of the questions; None was not asked."""

    answers: tuple[Verdict | JudgeError | None, ...]
    spent: Spending
    stopped: str = ""


def draft_rows(
    api: ApiReward, rows: Sequence[ResponseRow], out: Path, max_criteria: int, screen: Screen
) -> dict[str, Any]:
    """Draft criteria for each row and write the rows that have some, in their order."""
    # Skip rows that have criteria.
    earlier = _read_earlier_drafts(out)
    done: dict[int, dict[str, Any] | None] = {}
    for n, row in enumerate(rows):
        extra = row.rollout.prompt.extra_info
        # A person may have edited criteria of an earlier call: they win over those of the input.
        complete = {**row.record, "extra_info": dict(extra)} if extra.get(RUBRIC) else None
        done[n] = earlier.get(_row_identity(row.record, extra), complete)
    missing = [n for n, record in done.items() if record is None]
    questions = []
    for n in missing:
        material = build_material(rows[n].rollout.prompt, "")
        request = REQUEST + REFERENCE * bool(_reference(material))
        template = Template("draft", "1", DRAFT_SYSTEM, request, RUBRIC_SCALE)
        questions.append(template.question(material, api, draft=RubricDraft(max_criteria)))
    screen.note(_forecast_drafts(api, questions, len(rows) - len(missing)))
    drafts = ask_all(api, questions, screen)
    failed = []
    # A draft is written into the row's extra_info; a failed row is reported and asked again by the
    # next call.
    for n, answer in zip(missing, drafts.answers, strict=True):
        if isinstance(answer, Verdict):
            extra = {**rows[n].rollout.prompt.extra_info, RUBRIC: answer.info["rubric"]}
            done[n] = {**rows[n].record, "extra_info": extra}
        elif answer is not None:
            failed.append({"row": str(rows[n].place), "why": answer.summary})
    written = [record for record in done.values() if record is not None]
    write_rows(out, written)
    return {"rows": len(rows), "written": len(written), "there before": len(rows) - len(missing),
            "failed": failed, **_spending_facts(api, drafts)}  # fmt: skip


def draft_for_run(
    api: ApiReward, rows: Sequence[ResponseRow], out: Path, max_criteria: int, screen: Screen
) -> dict[str, Any]:
    """Draft criteria for a whole run from some of its rows, as a file for --rm_rubric."""
    if out.exists():
        raise UserError(f"--out {out} exists and may have been edited; choose another name.")
    # Use rows from the whole file, not only its start.
    step = max(1, len(rows) // DRAFT_ROWS)
    chosen = [build_material(row.rollout.prompt, "") for row in rows[::step][:DRAFT_ROWS]]
    # Number the requests and cut long ones, so that they fit into one question.
    texts = []
    for n, material in enumerate(chosen, start=1):
        truth = _reference(material)
        reference = f"\nReference answer: {_cut_middle(truth)}" if truth else ""
        texts.append(f"{n}. {_cut_middle(material.prompt)}{reference}")
    template = Template("draft", "1", DRAFT_SYSTEM, REQUESTS, RUBRIC_SCALE)
    together = Material("\n\n".join(texts), "")
    question = template.question(together, api, draft=RubricDraft(max_criteria))
    screen.note(_forecast_drafts(api, [question], 0))
    drafts = ask_all(api, [question], screen)
    answer = drafts.answers[0]
    failed = [{"row": "all", "why": answer.summary}] if isinstance(answer, JudgeError) else []
    if isinstance(answer, Verdict):
        head = f"# Drafted by {api.model} from {len(chosen)} of {len(rows)} rows; edit it.\n"
        text = yaml.safe_dump(answer.info["rubric"], sort_keys=False, allow_unicode=True, width=90)
        # Replaced as a whole, so that an interrupted command leaves no half file.
        with atomic_replace(out) as fresh:
            fresh.write_text(head + text, encoding="utf-8")
    return {"rows": len(chosen), "written": int(isinstance(answer, Verdict)), "there before": 0,
            "failed": failed, **_spending_facts(api, drafts)}  # fmt: skip


def _reference(material: Material) -> str:
    return "" if material.ground_truth is None else as_text(material.ground_truth).strip()


def _cut_middle(text: str) -> str:
    head, left_out, tail = cut_middle(text, MAX_TEXT_CHARS)
    return f"{head} … {tail}" if left_out else head


def _read_earlier_drafts(out: Path) -> dict[str, dict[str, Any]]:
    """The rows of an earlier call by identity; a person may have edited the criteria."""
    rows = {}
    try:
        text = read_text(out) if out.exists() else ""
    except OSError as error:
        raise DataError(f"--out {out} cannot be read: {error.strerror}.") from None
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            row = load_json(line)
            rows[_row_identity(row, row["extra_info"])] = row
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"--out {out}, line {number} is not an earlier draft ({first_line(error)}). "
                "Fix it, or choose another name."
            ) from None
    return rows


def _row_identity(record: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
    """A row as canonical JSON, without its criteria."""
    bare = {name: value for name, value in extra.items() if name != RUBRIC}
    identity = as_plain({**record, "extra_info": bare})
    return json.dumps(identity, sort_keys=True, ensure_ascii=False, default=str)


def _forecast_drafts(api: ApiReward, questions: Sequence[Question], finished: int) -> str:
    """Return the number of drafts and their highest cost, as a sentence."""
    worst = sum((worst_case(question) for question in questions), Usage())
    price = find_price(api)
    cost = "price unknown" if price is None else f"${price.cost(worst):.4f}"
    before = f"{plural(finished, 'row')} already with criteria. " if finished else ""
    return (
        f"{before}Asking for {plural(len(questions), 'draft')}: at most {worst.total:,} tokens, "
        f"{cost}, if no call is repeated."
    )


def ask_all(api: ApiReward, questions: Sequence[Question], screen: Screen) -> Drafts:
    """Ask each question once, with the limits, budget and cache of the settings."""
    if not questions:
        return Drafts((), Spending())
    # The same provider, budget and cache as a judge in training.
    connection = connect_judge(api, os.environ)
    provider, cache, client = connection.provider, connection.cache, connection.direct
    loop, stopped = LoopThread(), ""
    futures: list[Future[Verdict | JudgeError]] = []
    try:
        provider.start_server(screen.note)
        answered: dict[int, Verdict] = {}
        key = cache_key(provider.identity, questions[0])
        # The first question tests key, model and address: if they are wrong, ask nothing else.
        with suppress(JudgeError):
            if cache is None or cache.get(key) is None:
                answered[0] = reach_judge(
                    loop, client, questions[0], api, tell=screen.note, parse_attempts=1
                )
                if cache is not None:
                    cache.put(key, answered[0])
        numbered = enumerate(questions)
        futures = [loop.submit(_ask(client, question, answered.get(n))) for n, question in numbered]
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
        stopped = STOPPED_BY_CTRL_C
    finally:
        # Let calls in progress finish, within DRAIN_S.
        loop.call(connection.close(), timeout=2 * DRAIN_S)
        loop.close()
        provider.stop_server()
        if cache is not None:
            cache.close()
    # After a stop, questions that were not submitted have no answer.
    futures += [Future() for _ in questions[len(futures) :]]
    finished = [f.done() and not f.cancelled() and f.exception() is None for f in futures]
    answers = (f.result() if done else None for f, done in zip(futures, finished, strict=True))
    return Drafts(tuple(answers), connection.ledger.total, stopped)


async def _ask(
    client: JudgeClient, question: Question, answer: Verdict | None
) -> Verdict | JudgeError:
    """Return the given verdict, or ask for one; a JudgeError is returned, not raised."""
    try:
        return answer or await client.ask(question)
    except JudgeError as error:
        return error


def _spending_facts(api: ApiReward, drafts: Drafts) -> dict[str, Any]:
    spent = drafts.spent
    cost = None if find_price(api) is None else spent.usd
    return {"calls": spent.calls, "tokens": spent.usage.total, "cost_usd": cost,
            "stopped": drafts.stopped}  # fmt: skip
