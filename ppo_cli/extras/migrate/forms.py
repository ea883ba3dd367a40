"""How other trainers call the reward functions that are written for them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from ppo_cli.rewards.forms import Form, Response, Responses


def _call_trl(call: Responses) -> dict[str, Any]:
    """TRL: prompts, completions, their tokens, the trainer's state, and columns by name."""
    rows = call.responses
    names = dict.fromkeys(name for row in rows for name in row.columns)
    columns = {name: [row.columns.get(name) for row in rows] for name in names}
    for name in ("prompt", "completion"):
        columns.pop(name, None)
    # Its state counts the steps that are done.
    done, (total, per_epoch) = max(call.step - 1, 0), call.length
    state = SimpleNamespace(
        global_step=done, max_steps=total, epoch=done / per_epoch,
        num_train_epochs=math.ceil(total / per_epoch),
    )  # fmt: skip
    return columns | {
        "prompts": [row.prompt for row in rows],
        "completions": [row.completion for row in rows],
        "completion_ids": [list(row.token_ids) for row in rows],
        "trainer_state": state,
    }


def _call_openrlhf(call: Responses) -> dict[str, Any]:
    """OpenRLHF: lists of one; a query is a prompt with its response."""
    rows = call.responses
    return {
        "queries": [row.rendered + row.text for row in rows],
        "prompts": [row.rendered for row in rows],
        "labels": ["" if row.ground_truth is None else row.ground_truth for row in rows],
    }


def _call_verl_batch(call: Responses) -> dict[str, Any]:
    """verl's batch manager: what `compute_score` gets one by one; columns are arrays."""
    import numpy as np

    rows = call.responses
    return {
        "data_sources": np.array([row.data_source for row in rows], dtype=object),
        "solution_strs": [row.text for row in rows],
        "ground_truths": [row.ground_truth for row in rows],
        "extra_infos": np.array([dict(row.extra_info) for row in rows], dtype=object),
    }


def _make_sample(row: Response, index: int) -> SimpleNamespace:
    """Return what slime's functions read of a response."""
    name = "TRUNCATED" if row.finish_reason == "length" else "COMPLETED"
    types = sys.modules.get("slime.utils.types")  # the function compares with its Status
    status = types.Sample.Status[name] if types else SimpleNamespace(name=name, value=name.lower())
    metadata = row.columns.get("metadata")
    return SimpleNamespace(
        prompt=row.prompt, response=row.text, label=row.ground_truth,
        metadata=dict(metadata if isinstance(metadata, Mapping) else row.extra_info),
        tokens=[*row.prompt_ids, *row.token_ids], response_length=len(row.token_ids),
        status=status, index=index, reward=None, loss_mask=None, remove_sample=False,
    )  # fmt: skip


def _call_slime(call: Responses) -> dict[str, Any]:
    samples = [_make_sample(row, index) for index, row in enumerate(call.responses)]
    args = SimpleNamespace(reward_key=None)
    return {"args": args, "sample": samples[0], "samples": samples}


class _Parser:
    """The parser of a rubric that was made without one."""

    def parse(self, text: str) -> str:
        return text

    def get_assistant_messages(self, completion: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [message for message in completion if message["role"] == "assistant"]

    def parse_answer(self, completion: Any) -> str:
        return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _make_state(row: Response) -> dict[str, Any]:
    """Return the state of verifiers after a single turn."""
    info = row.columns.get("info")
    if isinstance(info, str):
        with suppress(ValueError):  # a text of its own, such as "from chapter 3"
            info = json.loads(info)
    prompt = [dict(message) for message in row.messages]
    completion = [{"role": "assistant", "content": row.text}]
    truncated = row.finish_reason == "length"
    turn = {"prompt": prompt, "completion": completion, "is_truncated": truncated}
    return {
        "prompt": prompt, "completion": completion,
        "answer": "" if row.ground_truth is None else row.ground_truth,
        "info": dict(info if isinstance(info, Mapping) else row.extra_info),
        "task": row.columns.get("task", row.data_source or "default"),
        "is_completed": True, "is_truncated": truncated, "trajectory": [turn], "turn": 1,
    }  # fmt: skip


def _call_verifiers(call: Responses) -> dict[str, Any]:
    """A rubric of verifiers: what it takes of a rollout, and columns of the row by name."""
    (row,) = call.responses
    state = _make_state(row)
    names = ("prompt", "completion", "answer", "info", "task")
    return {
        **row.columns, **{name: state[name] for name in names}, "state": state, "parser": _Parser()
    }  # fmt: skip


def _call_verifiers_group(call: Responses) -> dict[str, Any]:
    """A rubric's function of a group: lists of the same."""
    states = [_make_state(row) for row in call.responses]
    names = ("prompt", "completion", "answer", "info", "task")
    lists = {f"{name}s": [state[name] for state in states] for name in names}
    return {**lists, "states": states, "parser": _Parser()}


FORMS = (
    Form(
        "TRL", "f(completions, **columns) -> list", ("completions",),
        ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
        _call_trl, takes_columns=True,
        hints=("completion_ids", "trainer_state", "log_extra", "log_metric"),
    ),
    Form(
        "OpenRLHF", "f(queries, prompts, labels) -> {rewards: …}, list or tensor",
        ("queries", "labels"), ("queries", "prompts", "labels"), _call_openrlhf, unit="response",
    ),
    Form(
        "verl's batch manager",
        "f(data_sources, solution_strs, ground_truths, extra_infos) -> list",
        ("solution_strs", "data_sources", "ground_truths", "extra_infos"),
        ("data_sources", "solution_strs", "ground_truths", "extra_infos"), _call_verl_batch,
    ),
    Form(
        "slime", "async f(args, sample) -> number or dict", ("sample",), ("args", "sample"),
        _call_slime, unit="response", batch=False,
    ),
    Form(
        "slime's groups", "async f(args, samples) -> list", (), ("args", "samples"), _call_slime,
        unit="group", hints=("samples",),
    ),
    Form(
        "verifiers", "f(completion, answer, …) -> number", ("completion", "state"),
        ("prompt", "completion", "answer", "state", "info", "task", "parser"),
        _call_verifiers, unit="response", batch=False, takes_columns=True,
    ),
    Form(
        "verifiers' groups", "f(completions, states, …) -> list", (),
        ("prompts", "completions", "answers", "states", "infos", "tasks", "parser"),
        _call_verifiers_group, unit="group", hints=("states",),
    ),
)  # fmt: skip
