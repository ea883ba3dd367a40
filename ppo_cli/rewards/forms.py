"""Reward functions that were written for other trainers, called as those call them.

Plug-ins declare how a trainer calls its functions, as a `Form`. It is recognised by the names of
the parameters. A worker wraps the function with `adapt`, and its results become scores.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ppo_cli import plugins
from ppo_cli.errors import RewardError
from ppo_cli.records import Rollout, Score
from ppo_cli.rewards.base import BatchScore, RunLength, as_plain, read_returned
from ppo_cli.rewards.worker import is_coroutine_function, wait_for

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
    """The call of a foreign function, for the responses of its unit."""

    responses: tuple[Response, ...]
    step: int
    length: RunLength
    form: str


@dataclass(frozen=True)
class Form:
    """How a trainer calls its reward functions; packages add them as `ppo_cli.reward_forms`.

    `mark`: parameters that only this form has; `hints` count where they have no default, or where
    no form has a mark. `arguments` returns what the trainer passes, by
    name; `offered` are the names that are always there, and columns of the rows come with them if
    `takes_columns`. `unit` has the responses of a call: one, those to a prompt, or all of a round.
    `batch`: the arguments are lists, and so is what the function returns.
    """

    name: str
    signature: str
    mark: tuple[str, ...]
    offered: tuple[str, ...]
    arguments: Callable[[Responses], dict[str, Any]]
    unit: Literal["response", "group", "round"] = "round"
    batch: bool = True
    takes_columns: bool = False
    hints: tuple[str, ...] = ()


def list_forms() -> list[Form]:
    """Return the forms that packages add; RewardError or ConfigError for what cannot be used."""
    forms: list[Form] = []
    for name, (point, *_) in sorted(plugins.entry_points("reward_forms").items()):
        added = plugins.load("reward_forms", name)
        if not isinstance(added, tuple) or not all(isinstance(form, Form) for form in added):
            raise RewardError(
                f"The form of reward functions '{name}' of the package {point.package()[0]} "
                f"({point.value}) is {added!r:.60}, and not a tuple of ppo_cli.rewards.forms.Form. "
                "Mend that, or uninstall the package."
            )
        forms += added
    return forms


def get_form(name: str) -> Form:
    """Return the form of a name that `adapt` has seen."""
    return next(form for form in list_forms() if form.name == name)


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
        "num_turns": 2,  # as verl counts a question and its answer
        "rollout_reward_scores": {},
    }


def find_form(
    parameters: Mapping[str, inspect.Parameter], kwargs: Mapping[str, Any]
) -> Form | None:
    """Return the form of a function with these parameters; None for our own.

    ValueError says why it has none, or more than one.
    """
    needed, names = set(required(parameters, kwargs)), parameters.keys() - kwargs
    names_of_ours = set(ARGUMENTS[:3]) <= parameters.keys()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if (
        names_of_ours
        or ("solution_str" in parameters and needed <= {*ARGUMENTS})
        or all(parameters[name].kind in variadic for name in names)
    ):
        return None
    forms = list_forms()
    marked = [form for form in forms if {*form.mark} & names or {*form.hints} & needed]
    marked = marked or [form for form in forms if {*form.hints} & names]
    # A column of the rows may have any name that does not hold the responses.
    by_columns = [form for form in marked if form.takes_columns and form.batch]
    if by_columns and not {"queries", "solution_strs"} & names and "completion" not in needed:
        # A group's form that passes all that is needed; `prefer_columns` sees the rows.
        exact = [form for form in marked if {*form.hints} & needed and needed <= {*form.offered}]
        marked = exact or by_columns
    trainers = [
        *(["verl"] if marked and "solution_str" in parameters else []),
        *(f.name for f in marked),
    ]
    if len(trainers) > 1:
        raise ValueError(
            f"its parameters are those of {' and of '.join(trainers)}: which one shall call it? "
            "Keep the parameters of one"
        )
    if not marked:
        return None
    form = marked[0]
    lacking = sorted(needed.difference(form.offered))
    if lacking and not form.takes_columns:
        raise ValueError(
            f"it has the form of {form.name}, {form.signature}, which passes no "
            f"{', '.join(lacking)}: give it a default, or a value in reward.function_kwargs"
        )
    return form


def prefer_columns(form: Form, needed: Iterable[str], columns: Iterable[str]) -> Form:
    """Return the form that passes columns, if those of the rows have all that is needed."""
    for other in list_forms():
        named = {*other.mark}.intersection(needed)
        if other.takes_columns and named and {*needed} <= {*other.offered, *columns}:
            return other
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
    """Return a function of what a `Responses` has that calls one of another form.

    It returns what `read_returned` reads, for a batch one Score with those of its responses.
    """
    parameters = inspect.signature(function).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def prepare(call: Responses) -> tuple[Any, Callable[[Any], Any]]:
        """Call the function, and return what reads its result."""
        form, count = get_form(call.form), len(call.responses)
        extra: dict[str, Sequence[Any]] = {}
        metrics: dict[str, Any] = {}
        logs = {"log_extra": extra.__setitem__, "log_metric": metrics.__setitem__}
        arguments = form.arguments(call)
        arguments |= {name: log for name, log in logs.items() if name in form.offered}
        # A function may forward its **kwargs: it gets no more than its trainer passes.
        chosen = {
            name: value
            for name, value in arguments.items()
            if (open_ended or name in parameters) and (form.takes_columns or name in form.offered)
        }

        def read(returned: Any) -> Any:
            if not form.batch:
                return returned
            logged = extra | {name: [value] * count for name, value in metrics.items()}
            return read_batch(returned, count, logged)

        return function(**chosen | dict(kwargs)), read

    async def call_async(**fields: Any) -> Any:
        returned, read = prepare(Responses(**fields))
        return read(await returned)

    def call(**fields: Any) -> Any:
        returned, read = prepare(Responses(**fields))
        return read(wait_for(returned))

    wrapper: Any = call_async if is_coroutine_function(function) else call
    wrapper.__wrapped__ = function  # its file is named in messages
    wrapper.form, wrapper.required = form.name, tuple(required(parameters, kwargs))
    return wrapper  # type: ignore[no-any-return]


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
    if not isinstance(items, list) or len(items) != count:
        size = f"{len(items)} scores" if isinstance(items, list) else type(items).__name__
        raise ValueError(f"it returned {size} for {count} responses")
    columns = {name: _as_list(values) for name, values in logged.items()}
    scores = []
    for at, item in enumerate(items):
        value = item[0] if isinstance(item, list) and len(item) == 1 else item
        facts = {
            name: as_plain(values[at])
            for name, values in columns.items()
            if isinstance(values, list) and len(values) == count
        }
        score = (
            Score.failed("the function returned None") if value is None else read_returned(value)
        )
        scores.append(replace(score, info={**facts, **score.info}))
    return BatchScore(0.0, scores=tuple(scores))


def _as_list(values: Any) -> Any:
    """Return a tensor, an array or any other iterable as a list; other values as they are."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return (
        values
        if isinstance(values, str | Mapping) or not isinstance(values, Iterable)
        else [*values]
    )
