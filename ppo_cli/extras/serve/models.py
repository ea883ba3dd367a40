"""The models of a Tinker server: training them call by call, sampling, and their files.

The same calls with the same seeds give the same bits.
Legend: N targets of all rows, B rows, L tokens, T response tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import inf, nan
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ppo_cli.algo.advantages import gae
from ppo_cli.algo.batch import AnnotatedBatch, TrainBatch, build_batch, merge_annotations
from ppo_cli.algo.losses import policy_loss
from ppo_cli.algo.tokens import gather_logprobs_entropy
from ppo_cli.atomic import atomic_replace
from ppo_cli.config.models.folder import read_config
from ppo_cli.config.models.shape import Shape
from ppo_cli.engine.base import MiniBatch, Sampling, merge_sums
from ppo_cli.engine.batches.micro_batches import Budget, plan_micro_batches
from ppo_cli.engine.checkpoint import to_file_layout, write_tensors
from ppo_cli.engine.device import Compute
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.models.lora import ADAPTER_WEIGHTS, load_adapter
from ppo_cli.engine.models.policy import stop_token_ids
from ppo_cli.engine.pretrained import pad_token_id
from ppo_cli.engine.samplers.hf import build_shared_sampler
from ppo_cli.engine.saved_files import write_files
from ppo_cli.errors import UserError
from ppo_cli.extras.serve.wire import Datum
from ppo_cli.planning.memory.model import LOGIT_CHUNK
from ppo_cli.planning.memory.plan import fit_memory
from ppo_cli.planning.resolved import Resolved
from ppo_cli.records import Prompt, Rollout

FACTS = "tinker.json"  # what is in a saved folder: the model, its rank, metadata
PPO = ("logprobs", "advantages")
# The SDK's loss -> its inputs beside target_tokens, and the defaults of loss_fn_config: those of
# the SDK's documentation, where thresholds bound the ratio; for gspo those of its paper.
LOSSES: dict[str, tuple[tuple[str, ...], dict[str, float]]] = {
    "cross_entropy": (("weights",), {}),
    "importance_sampling": (PPO, {}),
    "ppo": (PPO, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": (PPO, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "gspo": (
        (*PPO, "sequence_ratio_mask"), {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004}
    ),
    "dro": (PPO, {"beta": 0.05}),
}  # fmt: skip


def sum_loss(
    loss: str, logprobs_N: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]
) -> Tensor:
    """Return a loss of `LOSSES`, summed over the tokens of one row.

    dro: -(A log p - beta / 2 (log p - log q)^2). The others, beside cross_entropy, are losses of
    `policy_loss`: importance_sampling is its clipped surrogate without a clip.
    """
    if loss == "cross_entropy":
        return -(logprobs_N * inputs["weights"]).sum()
    old_N, advantages_N = inputs["logprobs"], inputs["advantages"]
    if loss == "dro":
        penalty_N = settings["beta"] / 2 * (logprobs_N - old_N) ** 2
        return (penalty_N - logprobs_N * advantages_N).sum()
    mask_N = inputs["sequence_ratio_mask"] != 0 if loss == "gspo" else torch.ones_like(old_N) > 0
    return policy_loss(
        logprobs_N[None], old_N[None], advantages_N[None], mask_N[None],
        kind=loss if loss in ("gspo", "cispo") else "vanilla", dual_clip=None, mode="token-sum",
        clip_low=1 - settings.get("clip_low_threshold", -inf),
        clip_high=settings.get("clip_high_threshold", inf) - 1, global_tokens=1, global_sequences=1,
    ).loss  # fmt: skip


class ServedModel:
    """The base model with a LoRA adapter of `rank`, or with all weights trained if it is 0.

    It has its own optimizer, and the critic and the reference that the settings ask for. `adapter`
    is a folder of sampler weights to start from.
    """

    def __init__(
        self, resolved: Resolved, tokenizer: Any, rank: int, seed: int, adapter: Path | None = None
    ) -> None:
        shape = Shape.from_config(read_config(resolved.config.model.path))
        if shape and rank > shape.hidden:
            raise UserError(
                f"rank is {rank}, more than the layers have: give one of 1 to {shape.hidden}, or 0 "
                "to train all weights."
            )
        of_client = resolved.amend({"model.lora_rank": rank, "trainer.seed": seed})
        self.config = fit_memory(of_client).config
        self.rank, self._tokenizer = rank, tokenizer
        self._compute = Compute.choose(self.config.model.dtype)
        self._learner = Learner(self.config, tokenizer, total_steps=1)
        self._policy, self._actor = self._learner.policy, self._learner.trained()[0]
        if adapter is not None:
            load_adapter(self._policy.model, load_file(adapter / ADAPTER_WEIGHTS))

    def _compute_logprobs(self, rows: Sequence[Datum]) -> list[Tensor]:
        """Return the log-probs of each row's targets, with gradients if they are on."""
        lengths = [len(row.tokens) for row in rows]
        ids_BL = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        mask_BL = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        ids_BL[mask_BL] = torch.tensor([token for row in rows for token in row.tokens])
        target_N = torch.cat([row.inputs["target_tokens"] for row in rows])

        def compute(ids_BL: Tensor, mask_BL: Tensor, target_N: Tensor) -> tuple[Tensor, ...]:
            hidden_NH = self._policy.hidden_BLH(ids_BL)[mask_BL]
            head = self._policy.head
            return gather_logprobs_entropy(hidden_NH, head, target_N, 1.0, LOGIT_CHUNK, False)

        with self._compute.autocast(), self._policy.awake():
            moved = [tensor.to(self._compute.device) for tensor in (ids_BL, mask_BL, target_N)]
            return list(self._policy.run(compute, *moved)[0].cpu().split(lengths))

    def run_batch(
        self, rows: Sequence[Datum], loss: str, settings: Mapping[str, float], *, backward: bool
    ) -> tuple[list[Tensor], float]:
        """Return the log-probs of each row, and the loss summed over all tokens.

        With `backward`, gradients are added to those since the last `step`.
        """
        self._check_batch(rows, loss, settings)
        settings = {**LOSSES[loss][1], **settings}
        budget = self.config.actor.ppo_max_token_len_per_gpu
        logprobs, total = dict[int, Tensor](), 0.0
        for group in plan_micro_batches([len(row.tokens) for row in rows], Budget(budget)):
            with torch.set_grad_enabled(backward):
                chosen = [rows[i] for i in group]
                computed = self._compute_logprobs(chosen)
                losses = [
                    sum_loss(loss, new_N, row.inputs, settings)
                    for row, new_N in zip(chosen, computed, strict=True)
                ]
                part = torch.stack(losses).sum()
            if backward:
                (part * self._actor.optimizer.loss_scale.value).backward()
            total += part.item()
            logprobs |= {i: new_N.detach() for i, new_N in zip(group, computed, strict=True)}
        return [logprobs[i] for i in range(len(rows))], total

    def _check_batch(self, rows: Sequence[Datum], loss: str, settings: Mapping[str, float]) -> None:
        """Raise UserError for a loss that is not served, or for rows that it cannot take."""
        if loss not in LOSSES:
            raise UserError(f"The loss '{loss}' is not served: take one of {', '.join(LOSSES)}.")
        inputs, defaults = LOSSES[loss]
        names = {"target_tokens", *inputs}
        if unknown := sorted(settings.keys() - defaults.keys()):
            raise UserError(f"loss_fn_config of {loss} has {sorted(defaults)}, not {unknown}.")
        for number, row in enumerate(rows):
            what = f"Row {number}"
            sizes = {name: len(numbers) for name, numbers in row.inputs.items()}
            if sizes != dict.fromkeys(names, len(row.tokens)):
                raise UserError(
                    f"{what}: the loss {loss} takes {sorted(names)}, with one number for "
                    f"each of the {len(row.tokens)} tokens, not {sizes}."
                )
            if row.inputs["target_tokens"].is_floating_point():
                raise UserError(f"{what}: target_tokens are not integers.")
            for tokens in (row.tokens, row.inputs["target_tokens"].tolist()):
                self._check_tokens(tokens, what)

    def _check_tokens(self, tokens: Sequence[int], what: str, room: int = 0) -> None:
        """Raise UserError for tokens that the model does not have, or more than it can read."""
        model = self._policy.model
        vocabulary = model.get_input_embeddings().weight.shape[0]
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", inf)
        if not tokens or not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise UserError(f"{what}: give one token or more, each below {vocabulary}.")
        if len(tokens) + room > positions:
            raise UserError(f"{what}: {len(tokens) + room} tokens; the model reads {positions}.")

    def step(self, adam: Mapping[str, float]) -> dict[str, float]:
        """Take an AdamW step with the gradients since the last one; return its metrics."""
        optimizer = self._actor.optimizer
        optimizer.configure(
            adam["learning_rate"], (adam["beta1"], adam["beta2"]), adam["eps"],
            adam["weight_decay"], adam["grad_clip_norm"],
        )  # fmt: skip
        scale = optimizer.loss_scale.value
        norm, stepped = optimizer.apply()
        if not stepped and optimizer.loss_scale.value == scale:
            raise UserError(
                "The gradient is not finite, so no step was taken: look for such numbers in the "
                "inputs of the loss, or lower the learning rate."
            )
        return {"grad_norm": norm, "lr": optimizer.lr}

    def sample(
        self, tokens: Sequence[int], sampling: Sampling, end_ids: Sequence[int] | None,
        check: Callable[[], None],
    ) -> list[Rollout]:  # fmt: skip
        """Return `sampling.n` responses to a prompt.

        `end_ids` end a response next to the model's own; None: only its length ends it. `check` is
        called before each token, and ends all responses with the error that it raises.
        """
        self._check_tokens(tokens, "The prompt and max_tokens", sampling.max_tokens)
        model = self._policy.model
        ends = () if end_ids is None else {*stop_token_ids(model, self._tokenizer), *end_ids}
        sampler = build_shared_sampler(model, self.config, self._tokenizer, end_ids=frozenset(ends))
        prompt = Prompt("tinker", "", (), "", tuple(tokens))
        with self._policy.awake(), model.register_forward_pre_hook(lambda *_: check()):
            rollouts = sampler.generate([prompt], sampling, weight_version=1)
            return sorted(rollouts, key=lambda rollout: rollout.sample)

    @torch.no_grad()
    def score_prompt(self, tokens: Sequence[int]) -> Tensor:
        """Return the log-prob of each token; NaN for the first one."""
        self._check_tokens(tokens, "The prompt")
        logprobs = torch.full((len(tokens),), nan)
        if len(tokens) > 1:
            row = Datum(tokens[:-1], {"target_tokens": torch.tensor(tokens[1:])})
            logprobs[1:] = self._compute_logprobs([row])[0]
        return logprobs

    def save(self, folder: Path, facts: Mapping[str, Any], *, sampler: bool) -> None:
        """Write a checkpoint, or for samplers a Hugging Face folder or PEFT adapter: all or none.

        A checkpoint also has the moments of the optimizer, and the critic.
        """
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replace(folder) as fresh:
            fresh.mkdir()
            if sampler:
                write_files(fresh, self._actor.files)
                weights = to_file_layout(self._actor.model, dict(self._actor.weights))
                write_tensors(fresh / f"{Path(self._actor.stem).name}.safetensors", weights)
            else:
                self._learner.begin_save(fresh).result()
            (fresh / FACTS).write_text(json.dumps({**facts, "rank": self.rank}))

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Load a checkpoint of `save`; without `optimizer`, moments start from zero."""
        self._learner.load(folder)
        if not optimizer:
            self._actor.optimizer.load_moments((), lambda name: None)

    def annotate(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, list[float]]]:
        """Return log-probs, reference log-probs and values of each `response` to its `prompt`.

        Rows with `rewards`, one number a token, also get the advantages and returns of GAE.
        """
        batch, algorithm = self._annotate(rows), self.config.algorithm
        columns = {
            "logprobs": batch.old_logprobs_BT, "ref_logprobs": batch.ref_logprobs_BT,
            "values": batch.values_BT,
        }  # fmt: skip
        if batch.values_BT is not None and all("rewards" in row for row in rows):
            columns["advantages"], columns["returns"] = gae(
                _pad(rows, "rewards"), batch.values_BT, batch.response_mask_BT,
                algorithm.gamma, algorithm.lam, whiten=False,
            )  # fmt: skip
        return [
            {name: c[b, :length].tolist() for name, c in columns.items() if c is not None}
            for b, length in enumerate(batch.response_len_B.tolist())
        ]

    def train_critic(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Take a step of the critic towards `returns`, one number a token; return its metrics."""
        batch, returns_BT = self._annotate(rows), _pad(rows, "returns")
        if batch.values_BT is None:
            raise UserError("There is no critic: start the server with --adv_estimator gae.")
        train = TrainBatch(
            **vars(batch), scores_B=returns_BT[:, 0], valid_B=torch.ones(len(rows)) > 0,
            token_rewards_BT=returns_BT, advantages_BT=returns_BT, returns_BT=returns_BT,
            is_weight_BT=torch.ones_like(returns_BT),
        )  # fmt: skip
        sums = self._learner.step(MiniBatch(train, actor=False, critic=True, pretraining=True))
        return {name: total / count for name, (total, count) in merge_sums([sums]).items()}

    def _annotate(self, rows: Sequence[Mapping[str, Any]]) -> AnnotatedBatch:
        rollouts = []
        for number, row in enumerate(rows):
            prompt, response = tuple(row["prompt"]), tuple(row["response"])
            self._check_tokens(prompt, f"Row {number}", len(response))
            self._check_tokens(response, f"Row {number}")
            owner = Prompt(str(number), "", (), "", prompt)
            logprobs = torch.zeros(len(response)).numpy()
            rollouts.append(Rollout(owner, 0, response, logprobs, "", "stop"))
        batch = build_batch(rollouts, pad_token_id(self._tokenizer))
        return merge_annotations(batch, [self._learner.annotate(batch)])


def _pad(rows: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    """Return a number for each response token, (B, T)."""
    if any(len(row[name]) != len(row["response"]) for row in rows):
        raise UserError(f"'{name}' needs one number for each token of 'response'.")
    return pad_sequence([torch.tensor(row[name], dtype=torch.float32) for row in rows], True)
