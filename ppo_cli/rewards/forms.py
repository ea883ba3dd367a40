"""The forms of reward functions: how each trainer calls the functions that are written for it.

A form is recognised by the names of the parameters. A worker wraps the function with `adapt`, so
that it is called as its own trainer calls it, and its results become scores.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from ppo_cli.records import Rollout, Score
from ppo_cli.rewards.base import BatchScore, as_plain, read_returned

# What a function of our own form takes, as in verl.
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True)
class Response:
    """What a function may read of one response, picklable."""

    prompt: Any  # as its row has it: text or messages
    messages: tuple[Mapping[str, Any], ...]
    rendered: str  # the prompt as the model reads it
    text: str
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    finish_reason: str
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    columns: Mapping[str, Any]  # of its row, by name

    @property
    def is_chat(self) -> bool:
        """Whether the row has messages, so that a completion is a list of messages too."""
        return not isinstance(self.prompt, str)

    @property
    def completion(self) -> Any:
        """The response as TRL and verifiers hand it over."""
        return [{"role": "assistant", "content": self.text}] if self.is_chat else self.text


@dataclass(frozen=True)
class Responses:
    """The call of a foreign function: the responses of a round, or one of them."""

    responses: tuple[Response, ...]
    step: int


@dataclass(frozen=True)
class Form:
    """How a trainer calls its reward functions.

    `mark`: parameters that only this form has. `arguments` returns what the trainer passes, by
    name; columns of the data come with them if `takes_columns`. `batch`: the function gets all
    responses of a round and returns a list.
    """

    name: str
    signature: str
    mark: tuple[str, ...]
    offered: tuple[str, ...]
    arguments: Callable[[Responses], dict[str, Any]]
    batch: bool = True
    takes_columns: bool = False


def describe_response(rollout: Rollout) -> Response:
    """Return what a function may read of a rollout."""
    prompt = rollout.prompt
    return Response(
        prompt.columns.get("prompt", list(prompt.messages)),
        prompt.messages, prompt.rendered, rollout.text, tuple(rollout.token_ids),
        tuple(prompt.token_ids), rollout.finish_reason, prompt.data_source, prompt.ground_truth,
        {**describe_finish(rollout), **prompt.extra_info}, prompt.columns,
    )  # fmt: skip


def describe_finish(rollout: Rollout) -> dict[str, Any]:
    """Return how a response ended, as functions of our own form read it in `extra_info`."""
    return {
        "finish_reason": rollout.finish_reason,
        "truncated": rollout.finish_reason == "length",
        "response_tokens": len(rollout.token_ids),
    }


def _call_trl(call: Responses) -> dict[str, Any]:
    """TRL: prompts, completions, their tokens, the trainer's state, and columns by name."""
    rows = call.responses
    names = dict.fromkeys(name for row in rows for name in row.columns)
    columns = {n: [row.columns.get(n) for row in rows] for n in names if n != "prompt"}
    return columns | {
        "prompts": [row.prompt for row in rows],
        "completions": [row.completion for row in rows],
        "completion_ids": [list(row.token_ids) for row in rows],
        "trainer_state": SimpleNamespace(global_step=call.step, epoch=None, max_steps=None),
    }


def _call_openrlhf(call: Responses) -> dict[str, Any]:
    """OpenRLHF: `reward_func(queries, prompts, labels)`; a query is a prompt with its response."""
    rows = call.responses
    return {
        "queries": [row.rendered + row.text for row in rows],
        "prompts": [row.rendered for row in rows],
        "labels": ["" if row.ground_truth is None else row.ground_truth for row in rows],
    }


def _call_verl_batch(call: Responses) -> dict[str, Any]:
    """verl's batch manager: lists of what `compute_score` gets one by one."""
    rows = call.responses
    return {
        "data_sources": [row.data_source for row in rows],
        "solution_strs": [row.text for row in rows],
        "ground_truths": [row.ground_truth for row in rows],
        "extra_infos": [dict(row.extra_info) for row in rows],
    }


def _call_slime(call: Responses) -> dict[str, Any]:
    """slime: `async def reward_func(args, sample, **kwargs)`."""
    (row,) = call.responses
    name = "TRUNCATED" if row.finish_reason == "length" else "COMPLETED"
    status = SimpleNamespace(name=name, value=name.lower())
    sample = SimpleNamespace(
        prompt=row.prompt, response=row.text, label=row.ground_truth,
        metadata=dict(row.extra_info), tokens=[*row.prompt_ids, *row.token_ids],
        response_length=len(row.token_ids), status=status,
    )  # fmt: skip
    return {"args": SimpleNamespace(reward_key=None), "sample": sample}


def _call_verifiers(call: Responses) -> dict[str, Any]:
    """A rubric of verifiers: any of prompt, completion, answer, state, info, task."""
    (row,) = call.responses
    answer = "" if row.ground_truth is None else row.ground_truth
    completion = [{"role": "assistant", "content": row.text}]
    given = {
        "prompt": [dict(message) for message in row.messages], "completion": completion,
        "answer": answer, "info": dict(row.extra_info), "task": row.data_source or "default",
    }  # fmt: skip
    return given | {"state": dict(given, is_truncated=row.finish_reason == "length")}


FORMS = (
    Form(
        "TRL", "f(completions, **columns) -> list", ("completions",),
        ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
        _call_trl, takes_columns=True,
    ),
    Form(
        "OpenRLHF", "f(queries, prompts, labels) -> list, tensor or {rewards: …}",
        ("queries", "labels"), ("queries", "prompts", "labels"), _call_openrlhf,
    ),
    Form(
        "verl's batch manager",
        "f(data_sources, solution_strs, ground_truths, extra_infos) -> list",
        ("solution_strs", "data_sources", "ground_truths", "extra_infos"),
        ("data_sources", "solution_strs", "ground_truths", "extra_infos"), _call_verl_batch,
    ),
    Form(
        "slime", "async f(args, sample) -> number or dict", ("sample",), ("args", "sample"),
        _call_slime, batch=False,
    ),
    Form(
        "verifiers", "f(completion, answer, …) -> number", ("completion", "state"),
        ("prompt", "completion", "answer", "state", "info", "task"), _call_verifiers, batch=False,
    ),
)  # fmt: skip


def find_form(
    parameters: Mapping[str, inspect.Parameter], kwargs: Mapping[str, Any]
) -> Form | None:
    """Return the form of a function with these parameters; None for our own.

    ValueError says why it has none, or more than one.
    """
    names_of_ours = set(ARGUMENTS[:3]) <= parameters.keys()
    if names_of_ours or (
        "solution_str" in parameters and set(required(parameters, kwargs)) <= {*ARGUMENTS}
    ):
        return None
    marked = [form for form in FORMS if set(form.mark) & set(parameters)]
    # A column of the rows may have any name that does not hold the responses.
    if "completions" in parameters and not {"queries", "solution_strs"} & parameters.keys():
        marked = [form for form in marked if form.takes_columns]
    names = [
        *(["verl"] if marked and "solution_str" in parameters else []),
        *(f.name for f in marked),
    ]
    if len(names) > 1:
        raise ValueError(
            f"its parameters are those of {' and of '.join(names)}: which one shall call it? Keep "
            "the parameters of one"
        )
    if not marked:
        return None
    form = marked[0]
    lacking = [name for name in required(parameters, kwargs) if name not in form.offered]
    if lacking and not form.takes_columns:
        raise ValueError(
            f"it has the form of {form.name}, {form.signature}, which passes no "
            f"{', '.join(lacking)}: give it a default, or a value in reward.function_kwargs"
        )
    return form


def required(parameters: Mapping[str, inspect.Parameter], kwargs: Mapping[str, Any]) -> list[str]:
    """Return the parameters without a default that settings do not fill."""
    return [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and name not in kwargs
    ]


def adapt(
    function: Callable[..., Any], form: Form, kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a function of `responses` and `step` that calls one of another form.

    It returns what `read_returned` reads, for a batch one Score with those of its responses.
    """
    parameters = inspect.signature(function).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def choose(call: Responses, records: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that the function takes."""
        arguments = form.arguments(call) | records
        return {k: v for k, v in arguments.items() if open_ended or k in parameters} | dict(kwargs)

    async def call_one(responses: tuple[Response, ...], step: int) -> Any:
        return await function(**choose(Responses(responses, step), {}))

    def call(responses: tuple[Response, ...], step: int) -> Any:
        extra: dict[str, Sequence[Any]] = {}
        metrics: dict[str, Any] = {}
        logs = {"log_extra": extra.__setitem__, "log_metric": metrics.__setitem__}
        records = logs if form.takes_columns else {}
        returned = function(**choose(Responses(responses, step), records))
        if inspect.isawaitable(returned):
            returned = asyncio.run(_await(returned))
        if not form.batch:
            return returned
        logged = extra | {name: [value] * len(responses) for name, value in metrics.items()}
        return read_batch(returned, len(responses), logged)

    wrapper: Any = call_one if not form.batch and inspect.iscoroutinefunction(function) else call
    wrapper.__wrapped__ = function  # its file is named in messages
    wrapper.form, wrapper.required = form.name, tuple(required(parameters, kwargs))
    return wrapper  # type: ignore[no-any-return]


async def _await(value: Any) -> Any:
    return await value


def read_batch(returned: Any, count: int, logged: Mapping[str, Any]) -> BatchScore:
    """Read what a function returned for a batch: a list, a tensor, or OpenRLHF's dict.

    `logged` has a value for each response by name. ValueError says what is wrong.
    """
    if isinstance(returned, Mapping):
        if "rewards" not in returned:
            names = ", ".join(map(repr, returned)) or "nothing"
            raise ValueError(f"it returned a dict without 'rewards' (it has {names})")
        logged = {**logged, **(returned.get("extra_logs") or {})}
        returned = returned["rewards"]
    items = _as_list(returned)
    if not isinstance(items, Sequence) or isinstance(items, str) or len(items) != count:
        size = f"{len(items)} scores" if isinstance(items, Sequence) else type(items).__name__
        raise ValueError(f"it returned {size} for {count} responses")
    columns = {name: _as_list(values) for name, values in logged.items()}
    scores = []
    for at, item in enumerate(items):
        value = item[0] if isinstance(item, list) and len(item) == 1 else item
        facts = {
            name: as_plain(values[at])
            for name, values in columns.items()
            if isinstance(values, Sequence) and len(values) == count
        }
        score = (
            Score.failed("the function returned None") if value is None else read_returned(value)
        )
        scores.append(replace(score, info={**facts, **score.info}))
    return BatchScore(0.0, scores=tuple(scores))


def _as_list(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values
