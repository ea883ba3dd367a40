"""Masked statistics, log-probs and entropy in chunks, full-vocabulary KL."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ppo_cli.algo import tokens

NAN = float("nan")


def test_masked_statistics_by_hand() -> None:
    x = torch.tensor([[1.0, 3.0, NAN], [5.0, NAN, NAN]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert tokens.masked_sum(x, mask) == 9
    assert tokens.masked_sum(x, mask, 1).tolist() == [4, 5]
    assert tokens.masked_mean(x, mask) == 3
    assert tokens.masked_mean(x, mask, 1).tolist() == [2, 5]
    assert tokens.masked_var(x, mask) == 4
    nothing = torch.zeros_like(mask)
    assert tokens.masked_mean(x, nothing) == 0
    assert tokens.masked_mean(x, nothing, 1).tolist() == [0, 0]
    assert tokens.masked_whiten(x[:0], mask[:0]).shape == (0, 3)
    white = tokens.masked_whiten(x, mask)
    assert white.tolist()[0] == pytest.approx([-1, 0, 0], abs=1e-6)
    assert white.tolist()[1] == pytest.approx([1, 0, 0], abs=1e-6)


@pytest.mark.parametrize("count", [0, 1])
def test_whiten_of_too_few_is_zero(count: int) -> None:
    x = torch.tensor([[NAN, 7.0]])
    mask = torch.tensor([[False, count == 1]])
    assert tokens.masked_whiten(x, mask).tolist() == [[0, 0]]
    assert tokens.masked_var(x, mask) == 0


def test_whiten_of_equal_numbers_is_exactly_zero() -> None:
    # The fp32 mean of 0.1 seven times is not 0.1, and the division by 1e-4 would show it.
    x = torch.full((7,), 0.1)
    assert x.mean() != x[0]
    assert tokens.masked_whiten(x, torch.ones(7, dtype=torch.bool)).abs().max() == 0


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a \(2, 3\), b \(2, 1\)"):
        tokens.require_same_shape(a=torch.zeros(2, 3), b=torch.zeros(2, 1))


def random_head(seed: int, H: int = 6, V: int = 13) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(9, H, generator=g), torch.randn(V, H, generator=g)


def project(weight: Tensor, calls: list[int] | None = None) -> Callable[[Tensor], Tensor]:
    """An output head that notes how many tokens each call has."""

    def head(hidden: Tensor) -> Tensor:
        if calls is not None:
            calls.append(len(hidden))
        return hidden @ weight.T

    return head


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 9, 100])
def test_chunks_change_neither_values_nor_gradients(chunk: int, keep: bool) -> None:
    hidden, weight = random_head(0)
    targets = torch.arange(9)
    hidden.requires_grad_()
    weight.requires_grad_()
    logprob, entropy = tokens.gather_logprobs_entropy(
        hidden, project(weight), targets, temperature=0.7, chunk=chunk, keep=keep
    )
    coefficients = torch.linspace(-1, 2, 9)
    (logprob * coefficients + entropy * coefficients.flip(0)).sum().backward()
    gradients = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None

    plain = torch.distributions.Categorical(logits=hidden @ weight.T / 0.7)
    alone, none = tokens.gather_logprobs_entropy(
        hidden, project(weight), targets, 0.7, chunk, with_entropy=False
    )
    torch.testing.assert_close(alone, logprob)
    assert none.tolist() == [0] * 9
    torch.testing.assert_close(logprob, plain.log_prob(targets))
    torch.testing.assert_close(entropy, plain.entropy())
    expected = plain.log_prob(targets) * coefficients + plain.entropy() * coefficients.flip(0)
    expected.sum().backward()
    torch.testing.assert_close(gradients, (hidden.grad, weight.grad), rtol=1e-4, atol=1e-5)


def test_no_tokens_give_empty_results_and_zero_gradients() -> None:
    hidden, weight = random_head(1)
    none = hidden[:0].clone().requires_grad_()
    head = project(weight.requires_grad_())
    logprob, entropy = tokens.gather_logprobs_entropy(
        none, head, torch.zeros(0, dtype=torch.int64), temperature=1.0, chunk=4
    )
    kl = tokens.full_kl(none, head, none, head, temperature=1.0, chunk=4)
    assert logprob.shape == entropy.shape == kl.shape == (0,)
    (logprob.sum() + entropy.sum() + kl.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0


@pytest.mark.parametrize("keep", [False, True])
def test_logits_are_computed_in_chunks_and_again_unless_they_are_kept(keep: bool) -> None:
    """Without `keep`, no more than a chunk of the vocabulary's logits is ever there."""
    hidden, weight = random_head(2)
    calls: list[int] = []
    saved_sizes: list[int] = []
    head = project(weight.requires_grad_(), calls)
    targets = torch.zeros(9, dtype=torch.int64)

    def pack(saved: Tensor) -> Tensor:
        saved_sizes.append(saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        logprob, _ = tokens.gather_logprobs_entropy(hidden, head, targets, 1.0, 2, keep=keep)
    assert calls == [2, 2, 2, 2, 1]
    assert keep or max(saved_sizes, default=0) < 2 * weight.shape[0]
    logprob.sum().backward()
    assert len(calls) == (5 if keep else 10)


def test_bfloat16_logits_become_fp32() -> None:
    hidden, _ = random_head(4)
    logprob, entropy = tokens.gather_logprobs_entropy(
        hidden.bfloat16(), torch.clone, torch.zeros(9, dtype=torch.int64), 1.0, 4
    )
    assert logprob.dtype == entropy.dtype == torch.float32


@pytest.mark.parametrize("chunk", [2, 50])
def test_full_kl_and_its_gradient(chunk: int) -> None:
    hidden, weight = random_head(5)
    ref_hidden, ref_weight = random_head(6, H=4)
    for leaf in (hidden, weight, ref_hidden, ref_weight):
        leaf.requires_grad_()
    kl = tokens.full_kl(hidden, project(weight), ref_hidden, project(ref_weight), 0.8, chunk)
    plain = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=hidden @ weight.T / 0.8),
        torch.distributions.Categorical(logits=(ref_hidden @ ref_weight.T / 0.8).detach()),
    )
    torch.testing.assert_close(kl, plain)
    of_reference = torch.autograd.grad(
        kl.sum(), (ref_hidden, ref_weight), allow_unused=True, retain_graph=True
    )
    assert of_reference == (None, None)
    gradients = torch.autograd.grad(kl.sum(), (hidden, weight))
    torch.testing.assert_close(
        gradients, torch.autograd.grad(plain.sum(), (hidden, weight)), rtol=1e-4, atol=1e-5
    )
    chunked_kl = tokens.full_kl(hidden, torch.clone, hidden, torch.clone, temperature=1.0, chunk=4)
    assert chunked_kl.abs().max() == 0


def test_bad_arguments_are_named() -> None:
    hidden, weight = random_head(8)
    targets, head = torch.arange(9), project(weight)
    with pytest.raises(ValueError, match="9 hidden states for 8 targets"):
        tokens.gather_logprobs_entropy(hidden, head, targets[1:], 1, 4)
    for message, ref_hidden, ref_head in (
        ("9 hidden states of the actor, 8 of the reference", hidden[1:], head),
        ("13 tokens in its vocabulary, the reference 12", hidden, project(weight[1:])),
    ):
        with pytest.raises(ValueError, match=message):
            tokens.full_kl(hidden, head, ref_hidden, ref_head, temperature=1, chunk=4)
