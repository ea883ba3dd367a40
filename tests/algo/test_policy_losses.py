"""Policy losses against the formulas of their papers, a row at a time in float64.

The plain side sees only tokens that count. It has no code of the product, and no tensors of the
whole batch: gradients are taken by autograd through the paper's own expression.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from torch import Tensor

from ppo_cli.algo import losses
from ppo_cli.algo.estimators import POLICY_LOSSES, AggregationMode

CASES, LOW, HIGH, KL, SCALE = 60, 0.15, 0.3, 0.7, 11.0
TAUS, D_LOW, D_HIGH = (1.0, 1.3), 0.004, 0.01
NAN = float("nan")


def cases() -> Iterator[dict[str, Tensor]]:
    for seed in range(CASES):
        g = torch.Generator().manual_seed(seed)
        B, T = (int(torch.randint(low, high, (), generator=g)) for low, high in ((1, 9), (1, 14)))
        mask = torch.rand(B, T, generator=g) < 0.75
        mask[0, 0] = True
        noise = torch.randn(4, B, T, generator=g, dtype=torch.float64)
        x = {
            "old": (noise[0] - 2).clamp(max=-0.01),
            "new": (noise[0] - 2 + 0.4 * noise[1]).clamp(max=-0.01),
            "advantages": 2 * noise[2],
            "weights": noise[3].exp().clamp(max=2),
        }
        # A sequence has one advantage in the papers of groups; other cases have one a token.
        if seed % 2:
            x["advantages"] = x["advantages"][:, :1].expand(B, T).clone()
        outside = (NAN, float("inf"), float("-inf"))[seed % 3]
        yield {k: torch.where(mask, v, outside) for k, v in x.items()} | {"mask": mask}


def chosen(kind: str, x: dict[str, Tensor]) -> Tensor | None:
    if not POLICY_LOSSES[kind].chooses:
        return None
    return losses.choose_tokens(
        kind, x["new"].detach(), x["old"], x["advantages"], x["mask"], share=0.1,
        clip_low=LOW, clip_high=HIGH, cov_low=0.1, cov_high=3.0,
    )  # fmt: skip


def paper(kind: str, x: dict[str, Tensor], selection: Tensor | None, mode: str) -> Tensor:
    """Summed over rows, each token with its share of the mean."""
    total, rows = torch.zeros((), dtype=torch.float64), int(x["mask"].any(1).sum())
    for b in range(len(x["mask"])):
        at = x["mask"][b]
        if not at.any():
            continue
        new, old, A, w = (x[k][b][at] for k in ("new", "old", "advantages", "weights"))
        r = torch.exp(new - old)
        if kind == "geo_mean":
            side = torch.where(A > 0, r.clamp(max=torch.tensor(HIGH).exp().item()), r)
            side = torch.where(A < 0, side.clamp(min=torch.tensor(-LOW).exp().item()), side)
            mean = side.prod() ** (1 / len(r))
            total = total - A.mean() * mean * w.prod() ** (1 / len(r)) / rows
            continue
        if kind == "sapo":
            total = total - sum(
                w[t] * A[t] * (4 / tau) / (1 + torch.exp(-tau * (r[t] - 1))) / len(r) / rows
                for t, tau in enumerate(TAUS[0] if a > 0 else TAUS[1] for a in A.tolist())
            )
            continue
        if kind.startswith("dppo"):
            # One token at a time: does A push p away from old p, and is it too far already?
            terms = []
            for t, (p, q) in enumerate(zip(new.exp().tolist(), old.exp().tolist(), strict=True)):
                far = abs(p - q) if kind == "dppo_tv" else (
                    q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
                )  # fmt: skip
                up = A[t] > 0
                masked = far > (D_HIGH if up else D_LOW) and (p > q if up else p < q)
                terms.append(0.0 * new[t] if masked else -A[t] * min(p / q, 1.5) * new[t])
            token = torch.stack(terms)
        elif kind == "gspo":
            s = (torch.exp(new).prod() / torch.exp(old).prod()) ** (1 / len(r))
            s_t = s.detach() * torch.exp(new) / torch.exp(new).detach()
            token = -torch.minimum(s_t * A, s_t.clamp(1 - LOW, 1 + HIGH) * A)
        elif kind == "cispo":
            token = -r.clamp(1 - LOW, 1 + HIGH).detach() * A * new
        elif kind == "dis":  # arXiv 2607.07508: f(r) = r inside of the range, 0 outside
            inside = [1 - LOW <= ratio <= 1 + HIGH for ratio in r.tolist()]
            token = torch.stack(
                [-r[t].detach() * A[t] * new[t] if counts else 0.0 * new[t]
                 for t, counts in enumerate(inside)]
            )  # fmt: skip
        elif kind == "gpg":
            token = -new * A
        elif kind == "kl_cov":
            token = torch.where(selection[b][at], -r * A + KL * (new - old).abs(), -r * A)
        else:
            token = -torch.minimum(r * A, r.clamp(1 - LOW, 1 + HIGH) * A)
            if kind == "vanilla":
                token = torch.where(A < 0, torch.minimum(token, -3.0 * A), token)
            else:
                token = torch.where(selection[b][at], 0.0, token)
        share = {
            "token-mean": 1 / x["mask"].sum(), "token-sum": 1.0, "seq-mean-token-sum": 1 / rows,
            "seq-mean-token-mean": 1 / len(r) / rows, "seq-mean-token-sum-norm": 1 / rows / SCALE,
        }  # fmt: skip
        total = total + (token * w).sum() * share[mode]
    return total


def our_loss(kind: str, x: dict[str, Tensor], mode: str, rows: slice = slice(None)) -> Tensor:
    counts, selection = losses.count_mask(x["mask"]), chosen(kind, x)
    far = kind.startswith("dppo")
    return losses.policy_loss(
        x["new"][rows], x["old"][rows], x["advantages"][rows], x["mask"][rows], kind=kind,
        clip_low=D_LOW if far else LOW, clip_high=D_HIGH if far else HIGH,
        dual_clip=1.5 if far else 3.0, tau_pos=TAUS[0], tau_neg=TAUS[1],
        chosen_BT=None if selection is None else selection[rows],
        kl_coef=KL, mode=mode, global_tokens=counts[0], global_sequences=counts[1],
        is_weight_BT=x["weights"][rows], scale_factor=SCALE,
    ).loss  # fmt: skip


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_value_and_gradient_are_the_papers_also_in_micro_batches(kind: str) -> None:
    for number, case in enumerate(cases()):
        mode = get_args(AggregationMode)[number % 5]
        mine, plain, cut = ({**case, "new": case["new"].clone().requires_grad_()} for _ in range(3))
        half = len(case["mask"]) // 2
        parts = (our_loss(kind, cut, mode, rows) for rows in (slice(half), slice(half, None)))
        expected = paper(kind, plain, chosen(kind, case), mode)
        expected.backward()
        expected_grad = torch.where(case["mask"], plain["new"].grad, 0.0)
        for x, loss in ((mine, our_loss(kind, mine, mode)), (cut, sum(parts))):
            loss.backward()
            assert abs((loss - expected).item()) < 1e-6
            # Exactly 0 outside of the mask.
            assert not x["new"].grad[~case["mask"]].any()
            assert (x["new"].grad - expected_grad).abs().max() < 1e-6


@pytest.mark.parametrize(("kind", "share"), [("dppo_tv", 0.5), ("dppo_kl", 0.5)])
def test_dppo_masks_what_would_move_a_probability_too_far(kind: str, share: float) -> None:
    # p from 0.5 to 0.6: total variation 0.1, KL 0.0204. Only A > 0 would move it further.
    new, old = torch.tensor([[0.6, 0.6]]).log(), torch.tensor([[0.5, 0.5]]).log()
    advantages, mask = torch.tensor([[1.0, -1.0]]), torch.tensor([[True, True]])
    limits = {"dppo_tv": (0.099, 0.101), "dppo_kl": (0.0203, 0.0205)}[kind]
    shares = [
        losses.policy_loss(
            new, old, advantages, mask, kind=kind, clip_low=limit, clip_high=limit,
            dual_clip=1.1, global_tokens=2, global_sequences=1,
        )
        for limit in limits
    ]  # fmt: skip
    assert [float(part.clip_sum / part.token_count) for part in shares] == [share, 0.0]
    # The ratio 1.2 is truncated to 1.1 where the token counts.
    assert [int(part.clip_lower_sum) for part in shares] == [1, 2]
    assert shares[0].loss.item() == pytest.approx(1.1 * math.log(0.6) / 2)


def test_the_likelihood_of_right_answers_is_their_mean_over_all_micro_batches() -> None:
    for case in cases():
        new, mask = case["new"].clone().requires_grad_(), case["mask"]
        right = [b % 3 != 1 for b in range(len(mask))]
        tokens = [(b, t) for b, t in mask.nonzero().tolist() if right[b]]
        expected = -sum(case["new"][b, t].item() for b, t in tokens) / max(len(tokens), 1)
        positive = torch.tensor(right)[:, None].expand(mask.shape)
        parts = [
            losses.positive_nll(
                new[rows], mask[rows], positive[rows], global_positives=len(tokens)
            )
            for rows in (slice(1), slice(1, None))
        ]  # fmt: skip
        total = parts[0] + parts[1]
        assert abs(total.item() - expected) < 1e-6
        total.backward()
        gradient = torch.zeros_like(mask, dtype=torch.float64)
        for b, t in tokens:
            gradient[b, t] = -1 / len(tokens)
        assert torch.allclose(new.grad, gradient, atol=1e-12)


def test_tokens_are_chosen_by_their_covariance_over_the_whole_batch() -> None:
    drawn = set()
    for x in cases():
        at = x["mask"]
        new, A = x["new"][at], x["advantages"][at]
        cov = torch.full(at.shape, NAN, dtype=torch.float64)
        cov[at] = (new - new.mean()) * (A - A.mean())
        count = max(1, int(0.1 * len(new)))
        largest = chosen("kl_cov", x)
        assert largest is not None and largest.sum() == count
        assert cov[largest].min() >= cov[at & ~largest].max() if count < len(new) else True
        selection = chosen("clip_cov", x)
        ratio = torch.exp(x["new"] - x["old"])
        free = -x["advantages"] * ratio >= -x["advantages"] * ratio.clamp(1 - LOW, 1 + HIGH)
        fit = at & free & (cov > 0.1) & (cov < 3.0)
        assert selection is not None and not (selection & ~fit).any()
        assert selection.sum() == min(count, int(fit.sum()))
        assert torch.equal(selection, chosen("clip_cov", x))  # type: ignore[arg-type]
        if fit.sum() > 1:
            drawn.add(int(selection.flatten().nonzero()[0]) == int(fit.flatten().nonzero()[0]))
    assert drawn == {True, False}  # by chance, not always the first


def test_an_unknown_loss_is_named() -> None:
    x = next(cases())
    with pytest.raises(ValueError, match="unknown policy loss 'dro'"):
        losses.policy_loss(
            x["new"], x["old"], x["advantages"], x["mask"], kind="dro", global_tokens=1,
            global_sequences=1,
        )  # fmt: skip
