"""Reward functions called by the packages they were written for, without the models around them.

A caller gets a function, rollouts and the number of the step. It skips its test where the package
is not installed.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ppo_cli.records import Rollout
from ppo_cli.rewards.base import RunLength

LENGTH = RunLength(12, 4)
Caller = Callable[[Any, Sequence[Rollout], int], list[float | None]]


def completion_of(rollout: Rollout) -> Any:
    """Return a response as trainers with conversations hand it over."""
    is_chat = not isinstance(rollout.prompt.columns["prompt"], str)
    return [{"role": "assistant", "content": rollout.text}] if is_chat else rollout.text


def call_trl(function: Any, rollouts: Sequence[Rollout], step: int) -> list[float | None]:
    module = pytest.importorskip("trl.trainer.grpo_trainer", reason="pip install trl==1.16.0")
    from transformers import TrainerState

    epochs = LENGTH.total_steps // LENGTH.steps_per_epoch
    trainer_state = TrainerState(
        global_step=step - 1, max_steps=LENGTH.total_steps, num_train_epochs=epochs,
        epoch=(step - 1) / LENGTH.steps_per_epoch,
    )  # fmt: skip
    _, loop, ready = module.start_event_loop_in_daemon(name="rewards")
    ready.wait()
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True), environments=None,
        args=SimpleNamespace(report_to=[]), state=trainer_state, async_loop=loop,
        reward_funcs=[function], reward_processing_classes=[None], reward_func_names=["f"],
        _pending_extra_logs=defaultdict(list), _pending_metrics=defaultdict(list),
    )  # fmt: skip
    for log in ("_log_completion_extra", "_log_metric"):
        setattr(trainer, log, getattr(module.GRPOTrainer, log).__get__(trainer))
    rows = [dict(rollout.prompt.columns) for rollout in rollouts]
    returned = module.GRPOTrainer._calculate_rewards(
        trainer, rows, [row["prompt"] for row in rows], list(map(completion_of, rollouts)),
        [list(rollout.token_ids) for rollout in rollouts],
    )  # fmt: skip
    return [None if math.isnan(value) else value for value in returned[:, 0].tolist()]


class CharacterTokenizer:
    """A token is a character; 0, which ends a response, has no text."""

    def __call__(self, text: str, **kwargs: Any) -> dict[str, Any]:
        import torch

        return {"input_ids": torch.tensor([list(map(ord, text))])}

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return "".join(chr(int(token)) for token in token_ids if token)


def call_openrlhf(function: Any, rollouts: Sequence[Rollout], step: int) -> list[float | None]:
    agent = pytest.importorskip("openrlhf.utils.agent", reason="pip install openrlhf==0.11.2")
    executor = agent.SingleTurnAgentExecutor(["http://reward"])
    executor.reward_func = function
    values: list[float | None] = []
    for rollout in rollouts:

        async def generate(*args: Any, sampled: Rollout = rollout, **kwargs: Any) -> Any:
            ids, reason = list(sampled.token_ids), sampled.finish_reason
            output = SimpleNamespace(token_ids=ids, finish_reason=reason, logprobs=None)
            return SimpleNamespace(outputs=[output])

        label, sampling = rollout.prompt.ground_truth, SimpleNamespace(max_tokens=8, logprobs=None)
        engine = SimpleNamespace(generate=generate)
        record = asyncio.run(
            executor.execute(
                rollout.prompt.rendered, label, sampling, 64, CharacterTokenizer(), engine
            )
        )
        reward = record["reward"]
        values.append(None if reward is None else float(reward[0]))
    return values


def make_verl_data(rollouts: Sequence[Rollout]) -> Any:
    """Return the `DataProto` of verl for these responses, padded to one length."""
    protocol = pytest.importorskip("verl.protocol", reason="pip install --no-deps verl==0.9.1")
    import numpy as np
    import torch

    longest = max(len(rollout.token_ids) for rollout in rollouts)
    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
    ids = [[*r.token_ids, *[0] * (longest - len(r.token_ids))] for r in rollouts]
    columns: dict[str, list[Any]] = {
        "data_source": [r.prompt.data_source for r in rollouts],
        "reward_model": [{"ground_truth": r.prompt.ground_truth} for r in rollouts],
        "extra_info": [dict(r.prompt.extra_info) for r in rollouts],
        "__num_turns__": [2] * len(rollouts),
    }
    return protocol.DataProto.from_dict(
        tensors={
            "prompts": torch.ones(len(rollouts), 1, dtype=torch.long),
            "responses": torch.tensor(ids),
            "attention_mask": (torch.arange(longest + 1) <= lengths[:, None]).long(),
        },
        non_tensors={name: np.array(values, dtype=object) for name, values in columns.items()},
    )


def call_verl(function: Any, rollouts: Sequence[Rollout], step: int) -> list[float | None]:
    data = make_verl_data(rollouts)
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

    async def score() -> list[float | None]:
        manager = NaiveRewardManager(None, CharacterTokenizer(), function)
        manager.loop = asyncio.get_running_loop()
        results = [await manager.run_single(data[[at]]) for at in range(len(data))]
        return [float(result["reward_score"]) for result in results]

    return asyncio.run(score())


def call_verl_batch(function: Any, rollouts: Sequence[Rollout], step: int) -> list[float | None]:
    data = make_verl_data(rollouts)
    from verl.workers.reward_manager.batch import BatchRewardManager

    manager = BatchRewardManager(CharacterTokenizer(), 0, function)
    return [float(value) for value in manager(data).sum(-1)]


def call_verifiers(function: Any, rollouts: Sequence[Rollout], step: int) -> list[float | None]:
    verifiers = pytest.importorskip("verifiers", reason="pip install verifiers==0.1.14")
    if not hasattr(verifiers, "Rubric"):
        pytest.skip("this verifiers has no rubrics: pip install verifiers==0.1.14")
    rubric = verifiers.Rubric(funcs=[function])
    states = []
    for rollout in rollouts:
        prompt = [dict(message) for message in rollout.prompt.messages]
        fields = {**rollout.prompt.columns, "prompt": prompt, "answer": rollout.prompt.ground_truth}
        if isinstance(fields["info"], str):
            import json

            fields["info"] = json.loads(fields["info"])
        state = verifiers.State(input={**fields, "example_id": 0})
        state["task"] = fields
        state["completion"] = [{"role": "assistant", "content": rollout.text}]
        state["is_truncated"] = rollout.finish_reason == "length"
        state["timing"] = SimpleNamespace(scoring_ms=0.0, total_ms=0.0)
        state["trajectory"] = [{"reward": None, "advantage": None}]
        asyncio.run(rubric.score_group([state]))
        states.append(state)
    return [float(state["reward"]) for state in states]


CALLERS: dict[str, Caller] = {
    "TRL": call_trl,
    "OpenRLHF": call_openrlhf,
    "verl": call_verl,
    "verl's batch manager": call_verl_batch,
    "verifiers": call_verifiers,
    "verifiers' groups": call_verifiers,
}
