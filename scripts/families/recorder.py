"""Records what the first steps of `ppo train` compute: log-probs, values, gradients, weights.

It stands around methods of the engine in a forked process; the run itself is the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from families.oracle import Gradients, Rows, Update

STEPS = 2
State = dict[str, Tensor]


@dataclass
class Step:
    """What one training step computed, and with which weights."""

    rows: Rows
    state: State  # of the policy that sampled
    sampler_logprobs_BT: Tensor
    annotated_logprobs_BT: Tensor
    actor: Update | None = None
    critic: Update | None = None


@dataclass
class Recording:
    """All recorded steps, how rows were computed, and the weights at the end."""

    steps: list[Step] = field(default_factory=list)
    packing: str = ""
    shares_prompts: bool = False
    kernel: str = ""
    last_state: State = field(default_factory=dict)


def record_run(adapter: bool = False) -> Recording:
    """Record the run that this process is about to start; an `adapter` has no full gradients."""
    from ppo_cli.engine.learner import LocalEngine
    from ppo_cli.engine.training.optimizer import Optimizer

    recording = Recording()
    gradients: dict[int, Tensor] = {}  # by id of the parameter
    annotate, step, publish, apply = (
        LocalEngine.annotate, LocalEngine.step, LocalEngine.publish, Optimizer.apply,
    )  # fmt: skip

    def record_annotation(engine: Any, batch: Any) -> Any:
        policy = engine._learner.policy
        recording.packing = policy.packing.value if policy.packing else ""
        recording.shares_prompts = policy.shares_prompts
        recording.kernel = policy.model.config._attn_implementation
        annotated = annotate(engine, batch)
        if len(recording.steps) < STEPS:
            again = annotate(engine, replace(batch, sampler_entropy_BT=None))
            recording.steps.append(
                Step(
                    Rows(batch.input_ids_BL, batch.prompt_len_B, batch.response_mask_BT),
                    _copy(policy.model),
                    batch.sampler_logprobs_BT,
                    again.old_logprobs_BT,
                )
            )
        return annotated

    def record_update(engine: Any, minibatch: Any) -> Any:
        learner, current = engine._learner, recording.steps[-1]
        if adapter or learner.weight_version >= STEPS:
            return step(engine, minibatch)
        batch = minibatch.batch
        rows = Rows(batch.input_ids_BL, batch.prompt_len_B, batch.loss_mask_BT)
        gradients.clear()
        if minibatch.critic:
            value_model = learner._critic.value_model
            state, head = _copy(value_model.backbone), _copy(value_model.head)
            sums = step(engine, minibatch)
            named = {f"head.{n}": p for n, p in value_model.head.named_parameters()}
            of_all = _gradients_by_name(
                named | dict(value_model.backbone.named_parameters()), gradients
            )
            current.critic = Update(rows, batch.values_BT, batch.returns_BT, state, of_all, head)
            return sums
        policy = learner.policy.model
        state = _copy(policy)
        sums = step(engine, minibatch)
        of_all = _gradients_by_name(dict(policy.named_parameters()), gradients)
        current.actor = Update(rows, batch.old_logprobs_BT, batch.advantages_BT, state, of_all, {})
        return sums

    def record_gradients(optimizer: Any) -> tuple[float, bool]:
        for parameter in optimizer._parameters.values():
            if parameter.grad is not None:
                gradients[id(parameter)] = parameter.grad.clone()
        return apply(optimizer)

    def record_weights(engine: Any) -> None:
        publish(engine)
        recording.last_state = _copy(engine._learner.policy.model)

    patches: dict[tuple[Any, str], Callable[..., Any]] = {
        (LocalEngine, "annotate"): record_annotation,
        (LocalEngine, "step"): record_update,
        (LocalEngine, "publish"): record_weights,
        (Optimizer, "apply"): record_gradients,
    }
    for (owner, name), method in patches.items():
        setattr(owner, name, method)
    return recording


def _copy(module: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def _gradients_by_name(named: dict[str, Any], gradients: dict[int, Tensor]) -> Gradients:
    return {
        name: gradients.get(id(parameter), torch.zeros_like(parameter))
        for name, parameter in named.items()
    }
