"""The exact request of a judge for one data row, and the bundled prompts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ppo_cli.config.reward_schema import ApiReward
from ppo_cli.data_sets.files import RowError, RowProblem, raise_problems
from ppo_cli.data_sets.rows import Row, find_columns, question_of, read_row, read_source
from ppo_cli.errors import DataError, RewardError
from ppo_cli.rewards.judge.calls import Question
from ppo_cli.rewards.judge.prompt import (
    Material,
    Template,
    ask,
    criteria_of,
    load_preset,
    load_template,
    preset_names,
    preset_path,
    readable,
    reference_of,
)
from ppo_cli.rewards.judge.providers import NO_KEY, locate, provider_class
from ppo_cli.rewards.judge.providers.base import Key
from ppo_cli.rewards.judge.sanitise import content_free
from ppo_cli.trust.rows import RESPONSE, read_response

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
        where = {"endpoint": provider.base_url, "mode": api.mode, "method": call.method}
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
        other = ANOTHER if api.of_the_run else reference_of(api, material)
        material = replace(material, rivals=(chosen, other))
    question = ask(api, template, material, rubric=criteria_of(api)(material))
    seen = readable(chosen, api.reasoning)
    gated = content_free(material.prompt, seen, row.ground_truth) if api.gate else None
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
