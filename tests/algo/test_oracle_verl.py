"""Our formulas against verl 0.9.1's, 200 random cases each, masks with holes and empty rows.

Differences are |ours - verl's| / max(1, |verl's|), so absolute below 1. Where verl has no answer
(whitening fewer than two tokens) the case is drawn so that it has one; where it counts an empty
row as a member of its group, it is given the other rows only. Whitening equal numbers should
give 0: we do, verl gives its mean's rounding error times 1e4, so such cases are not drawn.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from ppo_cli.algo import advantages, kl, losses, tokens
from ppo_cli.algo.estimators import ESTIMATORS, POLICY_LOSSES, AggregationMode
from ppo_cli.config.schema.algorithm import REJECTIONS

pytestmark = pytest.mark.oracle

CASES = 200
LIMIT = 1e-6


def imported(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"verl 0.9.1 is not importable here ({error}); see the oracle extra")


@pytest.fixture(scope="module")
def core() -> Any:
    return imported("verl.trainer.ppo.core_algos")


@pytest.fixture(scope="module")
def torch_functional() -> Any:
    return imported("verl.utils.torch_functional")


@pytest.fixture(scope="module")
def correction() -> Any:
    return imported("verl.trainer.ppo.rollout_corr_helper")


@dataclass
class Case:
    generator: torch.Generator
    mask_BT: Tensor
    group_B: Tensor
    seed: int

    @property
    def float_mask_BT(self) -> Tensor:
        return self.mask_BT.float()

    def normal(self, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(self.mask_BT.shape, generator=self.generator)

    def uniform(self, low: float, high: float) -> float:
        return float(low + (high - low) * torch.rand((), generator=self.generator))

    def rewards(self) -> Tensor:
        """A score on the last token (0/1 in every other case) and a little KL on each."""
        B = len(self.mask_BT)
        scores_B = torch.randn(B, generator=self.generator)
        if self.seed % 2:
            scores_B = (scores_B > 0).float()
        length_B = torch.full((B,), self.mask_BT.shape[1])
        placed_BT = advantages.place_scores(scores_B, length_B, self.mask_BT)
        return placed_BT + self.normal(0.01) * self.mask_BT * (self.seed % 3 == 0)


def cases(least_rows: int) -> Iterator[Case]:
    """Draw cases in which two tokens count, and so many rows have one that counts."""
    for seed in range(CASES):
        g = torch.Generator().manual_seed(seed)
        B, T = (int(torch.randint(low, high, (), generator=g)) for low, high in ((1, 13), (1, 25)))
        mask_BT = torch.rand(B, T, generator=g) < 0.75
        mask_BT &= (torch.rand(B, generator=g) < 0.8)[:, None]
        if mask_BT.sum() < 2 or mask_BT.any(1).sum() < least_rows:
            B, T = max(B, 2), max(T, 2)
            mask_BT = torch.zeros(B, T, dtype=torch.bool)
            mask_BT[:least_rows, :2] = True
        yield Case(g, mask_BT, torch.randint(0, max(B // 3, 1), (B,), generator=g), seed)


def largest_difference(our_values: Any, verl_values: Any) -> float:
    our_values, verl_values = (
        torch.as_tensor(x, dtype=torch.float64).detach() for x in (our_values, verl_values)
    )
    assert our_values.shape == verl_values.shape
    assert our_values.isfinite().all() and verl_values.isfinite().all()
    if our_values.numel() == 0:
        return 0.0
    return float(((our_values - verl_values).abs() / verl_values.abs().clamp_min(1)).max())


def with_gradients(
    at_BT: Tensor, compute_ours: Callable[..., Any], compute_verls: Callable[..., Any]
) -> float:
    """The largest difference of two functions of a tensor: their first results, their gradients.

    What else they return is compared, too.
    """
    mine_BT, other_BT = (at_BT.clone().requires_grad_() for _ in range(2))
    mine, other = compute_ours(mine_BT), compute_verls(other_BT)
    mine[0].backward()
    other[0].backward()
    pairs = [*zip(mine, other, strict=True), (mine_BT.grad, other_BT.grad)]
    return max(largest_difference(*pair) for pair in pairs)


Hold = Callable[..., None]


@pytest.fixture
def hold(record_property: Callable[[str, object], None]) -> Hold:
    """Compares all cases, and reports the largest difference."""

    def check(name: str, compare: Callable[[Case], float], least_rows: int = 1) -> None:
        largest = max(compare(case) for case in cases(least_rows))
        record_property("largest_difference", largest)
        print(f"oracle {name:<44} {largest:.1e}")
        assert largest < LIMIT

    return check


def verl_advantages(core: Any, name: str, case: Case, rows: Tensor, args: Any) -> Any:
    """Call verl's estimator on some rows; the mask as float, as verl wants it."""
    rewards_BT, mask_BT = args["token_rewards_BT"][rows], case.float_mask_BT[rows]
    index = case.group_B[rows].numpy().astype(object)
    if name == "gae":
        return core.compute_gae_advantage_return(
            rewards_BT, args["values_BT"][rows], mask_BT, args["gamma"], args["lam"]
        )
    if name == "grpo":
        return core.compute_grpo_outcome_advantage(
            rewards_BT, mask_BT, index, norm_adv_by_std_in_grpo=args["norm_by_std"]
        )
    function = getattr(core, f"compute_{name}_outcome_advantage")
    if name == "remax":
        return function(rewards_BT, args["baseline_B"][rows], mask_BT)
    if name == "gpg":
        return function(rewards_BT, mask_BT, index)
    if name == "gdpo":
        # verl puts a part on the last token that is attended to, here that of a whole row.
        lengths = torch.ones(len(rows), mask_BT.shape[1] + 1, dtype=torch.long)
        return function(
            rewards_BT, mask_BT, index, norm_adv_by_std_in_grpo=args["norm_by_std"],
            config={"gdpo_reward_keys": ["0", "1"], "gdpo_reward_weights": args["weights"]},
            non_tensor_batch={str(k): args["parts_BK"][rows, k].numpy() for k in range(2)},
            batch={"prompts": torch.ones(len(rows), 1), "attention_mask": lengths},
        )  # fmt: skip
    if name == "reinforce_plus_plus":
        return function(rewards_BT, mask_BT, config=SimpleNamespace(gamma=args["gamma"]))
    return function(rewards_BT, mask_BT, index)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages(name: str, core: Any, hold: Hold) -> None:
    def compare(case: Case) -> float:
        B = len(case.mask_BT)
        args = {
            "token_rewards_BT": case.rewards(),
            "values_BT": case.normal(),
            "gamma": case.uniform(0.9, 1.0),
            "lam": case.uniform(0.8, 1.0),
            "norm_by_std": case.seed % 5 != 0,
            "baseline_B": torch.randn(B, generator=case.generator),
            "parts_BK": torch.randn(B, 2, generator=case.generator),
            "weights": [1.0, case.uniform(0.1, 2.0)],
        }
        our_values = advantages.compute_advantages(
            name, mask_BT=case.mask_BT, group_B=case.group_B, **args
        )
        grouped = ESTIMATORS[name].grouped
        rows = case.mask_BT.any(1).nonzero().squeeze(1) if grouped else torch.arange(B)
        verl_values = verl_advantages(core, name, case, rows, args)
        keep_BT = case.mask_BT[rows]
        return max(
            largest_difference(mine[rows][keep_BT], other[keep_BT])
            for mine, other in zip(our_values, verl_values, strict=True)
        )

    # One row alone is whitened to 0 (see above): all of its tokens have the same number.
    least_rows = 2 if name in ("reinforce_plus_plus_baseline", "gdpo") else 1
    hold(f"advantages {name}", compare, least_rows)


def test_decoupled_gae_is_verls_gae_twice(core: Any, hold: Hold) -> None:
    def compare(case: Case) -> float:
        rewards_BT, values_BT, gamma = case.rewards(), case.normal(), case.uniform(0.9, 1.0)
        lams = case.uniform(0.8, 1.0), case.uniform(0.8, 1.0)
        mine = advantages.gae(
            rewards_BT, values_BT, case.mask_BT, gamma, lams[0], critic_lam=lams[1]
        )
        verls = [
            core.compute_gae_advantage_return(
                rewards_BT, values_BT, case.float_mask_BT, gamma, lam
            )[i] for i, lam in enumerate(lams)
        ]  # fmt: skip
        return max(
            largest_difference(x[case.mask_BT], y[case.mask_BT])
            for x, y in zip(mine, verls, strict=True)
        )

    hold("advantages gae, two lambdas", compare)


@pytest.mark.parametrize("mode", get_args(AggregationMode))
def test_aggregation_and_its_gradient(mode: str, core: Any, hold: Hold) -> None:
    def compare(case: Case) -> float:
        tokens, rows = int(case.mask_BT.sum()) + 7, len(case.mask_BT) + 3

        def compute_ours(loss_BT: Tensor) -> list[Tensor]:
            return [losses.aggregate(
                loss_BT, case.mask_BT, mode, global_tokens=tokens, global_sequences=rows,
                scale_factor=17.0,
            )]  # fmt: skip

        def compute_verls(loss_BT: Tensor) -> list[Tensor]:
            return [core.agg_loss(
                loss_BT, case.float_mask_BT, mode, batch_num_tokens=tokens, global_batch_size=rows,
                loss_scale_factor=17.0,
            )]  # fmt: skip

        return with_gradients(case.normal(), compute_ours, compute_verls)

    hold(f"aggregate {mode}", compare)


class ActorConfig(SimpleNamespace):
    """The settings that verl's policy loss reads."""

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)


@pytest.mark.parametrize("mode", get_args(AggregationMode))
def test_policy_loss_and_its_gradient(mode: str, core: Any, hold: Hold) -> None:
    def compare(case: Case) -> float:
        old_BT = case.normal() - 3
        spread = 25.0 if case.seed % 10 == 0 else 0.7
        new_BT = old_BT + case.normal(spread).clamp(max=5)
        advantages_BT = case.normal(2.0)
        weights_BT = case.normal().exp().clamp(max=2) if case.seed % 2 else None
        counts = int(case.mask_BT.sum()), int(case.mask_BT.any(1).sum())
        low, high, c = case.uniform(0.05, 0.4), case.uniform(0.05, 0.6), case.uniform(1.1, 4)

        def compute_ours(new_BT: Tensor) -> list[Tensor]:
            mine = losses.policy_loss(
                new_BT, old_BT, advantages_BT, case.mask_BT, clip_low=low, clip_high=high,
                dual_clip=c, mode=mode, global_tokens=counts[0], global_sequences=counts[1],
                scale_factor=float(case.mask_BT.shape[1]), is_weight_BT=weights_BT,
            )  # fmt: skip
            sums = (mine.clip_sum, mine.clip_lower_sum, mine.approx_kl_sum)
            return [mine.loss, *(total / mine.token_count for total in sums)]

        def compute_verls(new_BT: Tensor) -> list[Tensor]:
            config = ActorConfig(
                clip_ratio=0.2, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=c,
                global_batch_info={},
            )  # fmt: skip
            loss, metrics = core.compute_policy_loss_vanilla(
                old_BT, new_BT, advantages_BT, case.float_mask_BT, mode, config, weights_BT
            )
            names = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl")
            return [loss, *(metrics[name] for name in names)]

        return with_gradients(new_BT, compute_ours, compute_verls)

    hold(f"policy_loss {mode}", compare)


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_other_policy_losses_and_their_gradients(
    kind: str, core: Any, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both draw the first of the tokens that clip_cov may draw from, and not by chance."""
    monkeypatch.setattr(torch, "randperm", lambda n, **options: torch.arange(n))
    verl_config = imported("verl.workers.config")

    def compare(case: Case) -> float:
        rows = case.mask_BT.any(1)
        mask_BT, old_BT = case.mask_BT[rows], (case.normal() - 2)[rows].clamp(max=-0.01)
        new_BT = (old_BT + case.normal(0.5)[rows]).clamp(max=-0.01)
        advantages_BT, weights_BT = case.normal(2.0)[rows], case.normal().exp()[rows]
        low, high = case.uniform(0.05, 0.4), case.uniform(0.45, 0.6)
        if not POLICY_LOSSES[kind].around_one:  # divergences: small enough that some tokens pass
            low, high = low / 20, high / 20
        if kind == "dis":  # verl divides by the weights' mean, which is 0 if all are masked
            low, high = 2 * low, 5 * high
        taus = case.uniform(0.5, 2.0), case.uniform(0.5, 2.0)
        chosen_BT = None
        if POLICY_LOSSES[kind].chooses:
            chosen_BT = losses.choose_tokens(
                kind, new_BT, old_BT, advantages_BT, mask_BT, share=0.1, clip_low=low,
                clip_high=high, cov_low=0.2, cov_high=4.0,
            )  # fmt: skip
        config = verl_config.ActorConfig(
            strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio_low=low,
            clip_ratio_high=high, tau_pos=taus[0], tau_neg=taus[1],
        )  # fmt: skip
        for name, value in {
            "clip_cov_ratio": 0.1, "clip_cov_lb": 0.2, "clip_cov_ub": 4.0, "kl_cov_ratio": 0.1,
            "ppo_kl_coef": 0.3,
        }.items():  # fmt: skip
            object.__setattr__(config.policy_loss, name, value)

        def compute_ours(new_BT: Tensor) -> list[Tensor]:
            return [losses.policy_loss(
                new_BT, old_BT, advantages_BT, mask_BT, kind=kind, clip_low=low, clip_high=high,
                chosen_BT=chosen_BT, kl_coef=0.3, tau_pos=taus[0], tau_neg=taus[1],
                dual_clip=3.0, mode="token-mean",
                global_tokens=int(mask_BT.sum()), global_sequences=len(mask_BT),
                is_weight_BT=weights_BT,
            ).loss]  # fmt: skip

        if kind == "dis":  # verl's name for a bypass with a weight of 0 outside of a window
            correction = {
                "loss_type": "reinforce", "rollout_is": "token",
                "rollout_is_threshold": f"{1 - low}_{1 + high}",
            }  # fmt: skip
            object.__setattr__(config.policy_loss, "rollout_correction", correction)
            weights_BT = torch.ones_like(weights_BT)

        def compute_verls(new_BT: Tensor) -> list[Tensor]:
            function = core.get_policy_loss_fn("bypass_mode" if kind == "dis" else kind)
            arguments = (old_BT, new_BT, advantages_BT, mask_BT.float(), "token-mean", config)
            return [function(*arguments, weights_BT)[0]]

        return with_gradients(new_BT, compute_ours, compute_verls)

    hold(f"policy_loss {kind}", compare)


@pytest.mark.parametrize("mode", get_args(AggregationMode))
def test_value_loss_and_its_gradient(mode: str, core: Any, hold: Hold) -> None:
    def compare(case: Case) -> float:
        old_BT, returns_BT = case.normal(), case.normal()
        new_BT, clip_range = old_BT + case.normal(0.6), case.uniform(0.1, 0.9)
        counts = int(case.mask_BT.sum()) + 5, len(case.mask_BT) + 2

        def compute_ours(new_BT: Tensor) -> list[Tensor]:
            mine = losses.value_loss(
                new_BT, old_BT, returns_BT, case.mask_BT, clip_range=clip_range, mode=mode,
                global_tokens=counts[0], global_sequences=counts[1], scale_factor=11.0,
            )  # fmt: skip
            return [mine.loss, mine.clip_sum / mine.token_count]

        def compute_verls(new_BT: Tensor) -> Any:
            return core.compute_value_loss(
                new_BT, returns_BT, old_BT, case.float_mask_BT, clip_range, mode,
                batch_num_tokens=counts[0], global_batch_size=counts[1], loss_scale_factor=11.0,
            )  # fmt: skip

        return with_gradients(new_BT, compute_ours, compute_verls)

    hold(f"value_loss {mode}", compare)


@pytest.mark.parametrize("kind", kl.SAMPLED_KINDS)
def test_token_kl_and_its_gradient(kind: str, core: Any, hold: Hold) -> None:
    def compare(case: Case) -> float:
        ref_BT = case.normal() - 2
        spread = 15.0 if case.seed % 10 == 0 else 0.5

        def compute_ours(new_BT: Tensor) -> list[Tensor]:
            kl_BT = torch.where(case.mask_BT, kl.token_kl(new_BT, ref_BT, kind), 0)
            return [kl_BT.sum(), kl_BT]

        def compute_verls(new_BT: Tensor) -> list[Tensor]:
            kl_BT = core.kl_penalty(new_BT, ref_BT, kind) * case.float_mask_BT
            return [kl_BT.sum(), kl_BT]

        return with_gradients(ref_BT + case.normal(spread), compute_ours, compute_verls)

    hold(f"token_kl {kind}", compare)


def test_adaptive_controller(core: Any, hold: Hold) -> None:
    def compare(case: Case) -> float:
        coef, target = case.uniform(0.001, 0.5), case.uniform(0.01, 0.2)
        other = core.AdaptiveKLController(coef, target, 10_000)
        for _ in range(10):
            current, n = case.uniform(0, 0.3), len(case.mask_BT) * 64
            coef = kl.adapt_coef(coef, current, n, target=target, horizon=10_000)
            other.update(current, n)
        return largest_difference(coef, other.value)

    hold("AdaptiveKLController, 10 updates", compare)


def test_mean_kl(torch_functional: Any, hold: Hold) -> None:
    def compare(case: Case) -> float:
        rows, kl_BT = case.mask_BT.any(1), case.normal()
        other = torch_functional.masked_mean(kl_BT[rows], case.float_mask_BT[rows], axis=-1).mean()
        return largest_difference(kl.mean_kl(kl_BT, case.mask_BT), other)

    hold("mean_kl", compare)


def test_masked_statistics(torch_functional: Any, hold: Hold) -> None:
    def compare(case: Case) -> float:
        x_BT, mask_BT, float_mask_BT = case.normal() + 1, case.mask_BT, case.float_mask_BT
        other = torch_functional
        pairs = [
            (tokens.masked_sum(x_BT, mask_BT), other.masked_sum(x_BT, float_mask_BT)),
            (tokens.masked_mean(x_BT, mask_BT, 1), other.masked_mean(x_BT, float_mask_BT, axis=1)),
            (tokens.masked_var(x_BT, mask_BT), other.masked_var(x_BT, float_mask_BT)),
            (tokens.masked_whiten(x_BT, mask_BT)[mask_BT],
             other.masked_whiten(x_BT, float_mask_BT)[mask_BT]),
        ]  # fmt: skip
        return max(largest_difference(*pair) for pair in pairs)

    hold("masked sum, mean, var, whiten", compare)


def test_logprobs_and_entropy(torch_functional: Any, hold: Hold) -> None:
    def compare(case: Case) -> float:
        N, V = case.mask_BT.numel(), 50
        logits_NV = 3 * torch.randn(N, V, generator=case.generator)
        targets_N = torch.randint(0, V, (N,), generator=case.generator)
        temperature = case.uniform(0.5, 1.5)
        mine = tokens.gather_logprobs_entropy(logits_NV, torch.clone, targets_N, temperature, 16)
        scaled_NV = logits_NV / temperature
        logprobs_N = torch_functional.logprobs_from_logits_naive(scaled_NV, targets_N)
        entropy_N = torch_functional.entropy_from_logits(scaled_NV)
        return max(largest_difference(mine[0], logprobs_N), largest_difference(mine[1], entropy_N))

    hold("gather_logprobs_entropy", compare)


@pytest.mark.parametrize(
    ("level", "normalize", "lower"),
    [*product(["token", "sequence"], [False, True], [None]), ("token", False, 0.3)],
)
def test_importance_weights(
    level: str, normalize: bool, lower: float | None, correction: Any, hold: Hold
) -> None:
    def compare(case: Case) -> float:
        old_BT = case.normal() - 2
        sampler_BT = old_BT + case.normal(8.0 if case.seed % 10 == 0 else 0.4)
        threshold = case.uniform(1.0, 5.0)
        mine = kl.importance_weights(
            old_BT, sampler_BT, case.mask_BT, level=level, threshold=threshold, lower=lower,
            normalize=normalize,
        )  # fmt: skip
        bounds = threshold if lower is None else f"{lower}_{threshold}"
        other, _ = correction.compute_rollout_correction_weights(
            old_BT - sampler_BT, case.float_mask_BT, level, bounds, normalize
        )
        return largest_difference(mine, other)

    hold(f"importance_weights {level} normalize={normalize} lower={lower}", compare)


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejection(name: str, correction: Any, hold: Hold) -> None:
    def compare(case: Case) -> float:
        old_BT = case.normal() - 2
        sampler_BT = old_BT + case.normal(0.4)
        high = case.uniform(1.1, 3.0) if name.endswith("k1") else case.uniform(0.02, 0.6)
        mine = kl.accepted_tokens(
            old_BT, sampler_BT, case.mask_BT,
            [(name, 1 / high if name.endswith("k1") else None, high)],
        )  # fmt: skip
        other, _ = correction.compute_rollout_rejection_mask(
            old_BT - sampler_BT, case.float_mask_BT, name, high
        )
        return largest_difference(mine.float(), other)

    hold(f"rejection {name}", compare)


def test_mismatch_diagnostics(correction: Any, hold: Hold) -> None:
    def compare(case: Case) -> float:
        old_BT = case.normal() - 2
        sampler_BT = old_BT + case.normal(0.4)
        mine = kl.compute_mismatch(old_BT, sampler_BT, case.mask_BT)
        other = correction.compute_offpolicy_metrics(old_BT, sampler_BT, case.float_mask_BT)
        return largest_difference(mine.k3_kl_sum / mine.token_count, other["k3_kl"])

    hold("mismatch k3", compare)
