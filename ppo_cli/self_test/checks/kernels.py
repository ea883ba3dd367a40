"""Products, attention and AdamW on a device, against the formulas in float64 on the CPU.

Legend: L tokens of rows end to end, h heads, k heads of keys, d size of a head, N tokens,
V vocabulary, H hidden size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ppo_cli.algo.tokens import gather_logprobs_entropy
from ppo_cli.config.schedule import lr_factor
from ppo_cli.config.schema.algorithm import Optim
from ppo_cli.engine.cpu.products import set_matmul_library
from ppo_cli.engine.models.attention import PackedRows, attend_by_rows
from ppo_cli.engine.models.policy import Float32Head
from ppo_cli.engine.training.optimizer import Optimizer
from ppo_cli.planning.memory.model import LOGIT_CHUNK
from ppo_cli.self_test.checks.runs import uses_bfloat16
from ppo_cli.self_test.results import Results, Setup

# Common head sizes; the size of the model to train is added.
HEAD_SIZES = (64, 128)
ROWS = (33, 1, 7, 130)  # lengths; the longest one crosses a block of every kernel
SHARED = ((0, 0, 2, 2), (0, 20, 0, 5))  # leads, and tokens of them that come before a row
TIMED, TIMED_ROUNDS = (1024, 256, 8), 3  # tokens of a prompt and a response, responses
# Sizes of the products and log-probs below.
HIDDEN = 128
TOKENS = 16
TEMPERATURE = 0.7
# A result is rounded once: half a unit in the last of 8 bits (24 of float32, and sums of many).
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# Attention rounds probabilities too.
ATTENTION = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def relative_gap(value: Tensor, expected: Tensor) -> float:
    """The norm of the difference as a share of the norm of what is expected."""
    expected = expected.detach().double().cpu()
    gap = (value.detach().double().cpu() - expected).norm() / expected.norm()
    return float(gap)


def check_products(setup: Setup, results: Results) -> None:
    """A product, the log-probs of a large vocabulary and the gradient of an embedding."""
    generator = torch.Generator().manual_seed(0)
    # Processors take half a minute for products of this size in float16.
    halves = (torch.bfloat16,) if setup.device == "cpu" else (torch.bfloat16, torch.float16)
    for dtype in (torch.float32, *halves):
        with results.part(str(dtype).removeprefix("torch.")):
            _check_product(setup, results, dtype, generator)
            _check_vocabulary(setup, results, dtype, generator)
    # Repeated ids: a faulty kernel could lose some of their gradients.
    with results.part("embedding"):
        vocabulary = setup.shape.vocabulary
        ids_N = torch.randint(vocabulary, (512,), generator=generator) % 7  # many of the same
        states_NH = torch.randn((512, HIDDEN), generator=generator)
        table_VH = torch.zeros((vocabulary, HIDDEN), device=setup.device, requires_grad=True)
        looked_up = nn.functional.embedding(ids_N.to(setup.device), table_VH)
        (looked_up * states_NH.to(setup.device)).sum().backward()
        assert table_VH.grad is not None
        expected = torch.zeros((7, HIDDEN), dtype=torch.float64)
        expected.index_add_(0, ids_N, states_NH.double())
        results.compare("embedding gradient", relative_gap(table_VH.grad[:7], expected), 1e-5)
        results.require("an unused embedding has a gradient", not table_VH.grad[7:].any())


def _check_product(
    setup: Setup, results: Results, dtype: torch.dtype, generator: torch.Generator
) -> None:
    first, right = (torch.randn((HIDDEN, 1024), generator=generator).to(dtype) for _ in range(2))
    product = first.to(setup.device) @ right.to(setup.device).T
    gap = relative_gap(product, first.double() @ right.double().T)
    results.compare(f"product in {dtype}", gap, ROUNDING[dtype])
    # The output layer that only rounds its operands.
    head: Any = nn.Linear(1024, HIDDEN, bias=False, device=setup.device)
    head.__class__, head.operands = Float32Head, dtype
    states = torch.randn((TOKENS, 1024), generator=generator)
    rounded = [x.detach().cpu().to(dtype).double() for x in (states, head.weight)]
    gap = relative_gap(head(states.to(setup.device)), rounded[0] @ rounded[1].T)
    results.compare(f"output layer of operands in {dtype}", gap, ROUNDING[torch.float32])


def _check_vocabulary(
    setup: Setup, results: Results, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Log-probs and entropies as a learner computes them, and the gradient of states."""
    vocabulary, device = setup.shape.vocabulary, setup.device
    weight_VH = (torch.randn((vocabulary, HIDDEN), generator=generator) / 8).to(dtype)
    states_NH = torch.randn((TOKENS, HIDDEN), generator=generator).to(dtype)
    targets_N = torch.randint(vocabulary, (TOKENS,), generator=generator)
    # The formula in float64.
    exact_NH = states_NH.double().requires_grad_()
    exact_NV = (exact_NH @ weight_VH.double().T / TEMPERATURE).log_softmax(-1)
    expected_N = exact_NV.gather(1, targets_N[:, None])[:, 0]
    expected_N.sum().backward()
    entropy_N = -(exact_NV.exp() * exact_NV).sum(-1).detach()
    # The learner's way: chunks of logits, never all of them.
    head = nn.Linear(HIDDEN, vocabulary, bias=False, device=device, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(weight_VH)
    states_NH = states_NH.to(device).requires_grad_()
    logprobs_N, entropies_N = gather_logprobs_entropy(
        states_NH, head, targets_N.to(device), TEMPERATURE, LOGIT_CHUNK, True
    )
    logprobs_N.sum().backward()
    assert states_NH.grad is not None and exact_NH.grad is not None
    # Half precision rounds each logit, of a size of about 30.
    limit = 1e-4 if dtype == torch.float32 else 0.1
    results.compare(
        f"log-probs of {vocabulary:,} tokens",
        float((logprobs_N.detach().cpu().double() - expected_N.detach()).abs().max()), limit,
    )  # fmt: skip
    results.compare("entropy", relative_gap(entropies_N, entropy_N), 0.01 if limit > 1e-4 else 1e-4)
    results.compare(
        "gradient of states", relative_gap(states_NH.grad, exact_NH.grad), ATTENTION[dtype]
    )


def check_attention(setup: Setup, results: Results) -> None:
    """Rows end to end, alone and with shared prompts, for each head size and precision."""
    if setup.device == "cuda" and not uses_bfloat16(setup.device):
        results.skip("the kernel for packed rows needs a GPU with bfloat16")
        return
    # On a CPU products of float32 choose between two ways to attend.
    set_matmul_library("blas")
    _check_head_sizes(setup, results)
    if setup.device == "cpu" and set_matmul_library("onednn"):
        _check_head_sizes(setup, results)


def _check_head_sizes(setup: Setup, results: Results) -> None:
    """Compare packed attention with float64 for all head sizes, then shared prompts with one size.

    On a GPU, shared prompts are proven only if they are also faster.
    """
    # Every head size alone, then shared prompts with the size of the model.
    size = setup.shape.head_size
    dtypes = (torch.float32,) if setup.device == "cpu" else (torch.float32, torch.bfloat16)
    with results.part("packed rows", "packed_attention"):
        for head_size in dict.fromkeys((size, *HEAD_SIZES)):
            for dtype in dtypes:
                _check_rows(setup, results, head_size, dtype, shared=False)
    with results.part("shared prompts"):
        for dtype in dtypes:
            _check_rows(setup, results, size, dtype, shared=True)
        if setup.device == "cuda" and _time_rows(setup, shared=True) <= _time_rows(setup):
            results.prove("shared_prompts")


def _time_rows(setup: Setup, *, shared: bool = False) -> float:
    """Seconds of attention to responses to one prompt, with its tokens once or for each row."""
    s, (prompt, response, count) = setup.shape, TIMED
    lengths = [prompt + response] + [response + (0 if shared else prompt)] * (count - 1)
    counts = [0] + [prompt if shared else 0] * (count - 1)
    leads = [0] * count if shared else [*range(count)]
    rows = PackedRows.from_lengths(lengths, torch.device(setup.device), leads, counts).rows_113B
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = s.heads // s.kv_heads, True  # type: ignore[assignment]
    # Random states; only the time counts.
    query, key, value = (
        torch.randn((1, heads, sum(lengths), s.head_size), device=setup.device)
        .bfloat16()
        .requires_grad_()
        for heads in (s.heads, s.kv_heads, s.kv_heads)
    )
    for turn in range(1 + TIMED_ROUNDS):
        if turn == 1:  # the first one compiles and allocates
            torch.cuda.synchronize()
            started = time.perf_counter()
        attend_by_rows(module, query, key, value, rows)[0].sum().backward()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _check_rows(
    setup: Setup, results: Results, size: int, dtype: torch.dtype, *, shared: bool
) -> None:
    """Compare packed attention and its gradients, for one head size and dtype, with float64.

    With `shared`, some rows share the tokens of a prompt.
    """
    heads, kv_heads = setup.shape.heads, setup.shape.kv_heads
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = heads // kv_heads, True  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(size)
    # States in float64, rounded to the precision that is tested.
    exact = [
        torch.randn((1, count, sum(ROWS), size), generator=generator).to(dtype).double()
        for count in (heads, kv_heads, kv_heads)
    ]
    states = [s.to(setup.device, dtype).requires_grad_() for s in exact]
    exact = [s.requires_grad_() for s in exact]
    leads, counts = SHARED if shared else (tuple(range(len(ROWS))), (0,) * len(ROWS))
    rows = PackedRows.from_lengths(ROWS, torch.device(setup.device), leads, counts).rows_113B
    packed_1Lhd, _ = attend_by_rows(module, states[0], states[1], states[2], rows)
    expected_Lhd = attend_in_float64(exact[0][0], exact[1][0], exact[2][0], leads, counts)
    # A random weighting makes every output count in the gradients.
    weight_Lhd = torch.randn(expected_Lhd.shape, generator=generator)
    (packed_1Lhd[0] * weight_Lhd.to(packed_1Lhd)).sum().backward()
    (expected_Lhd * weight_Lhd).sum().backward()
    name = f"head size {size}{', shared prompts' if shared else ''}, {str(dtype)[6:]}"
    results.compare(
        f"attention, {name}", relative_gap(packed_1Lhd[0], expected_Lhd), ATTENTION[dtype]
    )
    for part, state, reference in zip(("queries", "keys", "values"), states, exact, strict=True):
        assert state.grad is not None and reference.grad is not None
        limit = 2 * ATTENTION[dtype]
        results.compare(
            f"gradient of {part}, {name}", relative_gap(state.grad, reference.grad), limit
        )


def attend_in_float64(
    query_hLd: Tensor, key_kLd: Tensor, value_kLd: Tensor, leads: Sequence[int],
    counts: Sequence[int],
) -> Tensor:  # fmt: skip
    """softmax(q k^T / sqrt(d)) v of each row, written out: (L, h, d).

    Row i continues the first `counts[i]` tokens of row `leads[i]`.
    """
    groups, size = len(query_hLd) // len(key_kLd), query_hLd.shape[-1]
    # Each row attends to its prefix in the lead row, and to itself.
    bounds = [*pairwise([0, *accumulate(ROWS)])]
    outputs: list[Tensor] = []
    for (start, stop), lead, count in zip(bounds, leads, counts, strict=True):
        first = bounds[lead][0]
        at = torch.tensor([*range(first, first + count), *range(start, stop)])
        key_hnd, value_hnd = (s[:, at].repeat_interleave(groups, 0) for s in (key_kLd, value_kLd))
        scores_hnn = query_hLd[:, at] @ key_hnd.mT / math.sqrt(size)
        hidden_nn = torch.ones(scores_hnn.shape[1:], dtype=torch.bool).triu(1)
        weights_hnn = scores_hnn.masked_fill(hidden_nn, -math.inf).softmax(-1)
        outputs.append((weights_hnn @ value_hnd).transpose(0, 1)[count:])
    return torch.cat(outputs)


STEPS = 3
OPTIM = Optim(
    lr=1e-2, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1, lr_scheduler_type="cosine",
    lr_warmup_steps=1,
)  # fmt: skip
GRAD_CLIP = 0.5


def check_optimizer(setup: Setup, results: Results) -> None:
    """A few steps of the run's AdamW, with clipping and a schedule."""
    generator = torch.Generator().manual_seed(0)
    # Weights with and without decay, of sizes that do not fill a block.
    shapes = {"matrix": (300, 70), "norm": (70,), "odd": (3, 5, 7)}
    exact = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    module = nn.ParameterDict({n: t.float().to(setup.device) for n, t in exact.items()})
    exact = {name: tensor.float().double() for name, tensor in exact.items()}
    optimizer = Optimizer(
        module, OPTIM, total_steps=STEPS + 1, grad_clip=GRAD_CLIP, clip_grad_value=None
    )
    step = AdamWFormulas(exact)
    for turn in range(STEPS):
        # Gradients that are small compared with eps, and large ones.
        scale = (1e-4, 1.0, 1e-3)[turn]
        grads = {
            n: (scale * torch.randn(s, generator=generator)).double() for n, s in shapes.items()
        }
        for name, parameter in module.items():
            parameter.grad = grads[name].float().to(setup.device)
        optimizer.set_progress(turn)
        norm, stepped = optimizer.apply()
        expected = step(grads, OPTIM.lr * lr_factor(turn, STEPS + 1, OPTIM))
        results.require("a step was skipped", stepped)
        results.compare("gradient norm", abs(norm / expected - 1), 1e-5)
        for name, parameter in module.items():
            results.compare(
                f"weights after step {turn + 1}", relative_gap(parameter, exact[name]), 2e-6
            )
    for name, moment in optimizer.moments().items():
        if not name.endswith(".step"):
            results.compare("moments", relative_gap(moment, step.moments[name]), 1e-5)
    # A gradient of NaN must skip the step.
    next(iter(module.values())).grad = torch.full(shapes["matrix"], math.nan, device=setup.device)
    results.require("a step was taken with a gradient of NaN", not optimizer.apply()[1])


class AdamWFormulas:
    """AdamW as its paper has it (arXiv 1711.05101, algorithm 2), in float64."""

    def __init__(self, weights: dict[str, Tensor], optim: Optim = OPTIM) -> None:
        self.weights = weights
        self.moments: dict[str, Tensor] = {}
        self._optim = optim
        self._steps = 0

    @torch.no_grad()
    def __call__(self, grads: dict[str, Tensor], lr: float, grad_clip: float = GRAD_CLIP) -> float:
        """Clip the gradients, move the weights; returns the norm before clipping."""
        self._steps += 1
        (b1, b2), optim = self._optim.betas, self._optim
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        scale = min(1.0, grad_clip / norm) if grad_clip else 1.0
        for name, weight in self.weights.items():
            grad = grads[name] * scale
            first, second = (f"{name}.{what}" for what in ("exp_avg", "exp_avg_sq"))
            zero = torch.zeros_like(grad)
            self.moments[first] = b1 * self.moments.get(first, zero) + (1 - b1) * grad
            self.moments[second] = b2 * self.moments.get(second, zero) + (1 - b2) * grad.square()
            if weight.ndim > 1:
                weight.mul_(1 - lr * optim.weight_decay)
            root = (self.moments[second] / (1 - b2**self._steps)).sqrt() + optim.eps
            weight.sub_(lr * self.moments[first] / (1 - b1**self._steps) / root)
        return norm
