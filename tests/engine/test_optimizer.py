"""Schedules by hand, clipping, and steps that must not be taken."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from ppo_cli.config.schedule import lr_factor
from ppo_cli.config.schema.algorithm import Optim
from ppo_cli.engine.ranks import Ranks
from ppo_cli.engine.training import loss_scale
from ppo_cli.engine.training.optimizer import Optimizer, dequantise, quantise
from ppo_cli.errors import MissingPart
from tests.engine.packed_steps import build_optimizer

COSINE = {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.1}
SCHEDULES: list[tuple[dict[str, Any], int, dict[int, float]]] = [
    ({}, 10, dict.fromkeys(range(12), 1.0)),
    ({"lr_warmup_steps": 3}, 10, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0}),
    ({"lr_warmup_steps_ratio": 0.2}, 10, {0: 1 / 3, 1: 2 / 3, 2: 1.0}),
    # A share of steps is rounded up: 2.5 of 10 are 3, 1 of 10 is 1.
    ({"lr_warmup_steps_ratio": 0.25}, 10, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0}),
    ({"lr_warmup_steps_ratio": 0.1}, 10, {0: 0.5, 1: 1.0}),
    ({"lr_warmup_steps": 0, "lr_warmup_steps_ratio": 0.5}, 10, {0: 1.0}),
    (COSINE | {"lr_warmup_steps": 8}, 8, {7: 8 / 9, 8: 1.0}),
    (COSINE | {"lr_warmup_steps": 2}, 8, {4: 0.1 + 0.45 * 1.5, 6: 0.1 + 0.45 * 0.5}),
    (COSINE | {"lr_warmup_steps": 0}, 8, {0: 1.0, 4: 0.55, 8: 0.1, 99: 0.1}),
    # Half the steps after the warm-up are 4.
    (COSINE | {"lr_warmup_steps": 4}, 12, {3: 0.8, 4: 1.0, 8: 0.55, 12: 0.1}),
]


def test_schedules_by_hand() -> None:
    for settings, total, expected in SCHEDULES:
        optim = Optim.model_validate(settings)
        factors = {step: lr_factor(step, total, optim) for step in expected}
        assert factors == pytest.approx(expected), settings


def build(module: nn.Module, **options: Any) -> Optimizer:
    return build_optimizer(module, Optim(lr=0.1, weight_decay=0.0), **{"grad_clip": 1.0} | options)


def test_losses_are_scaled_as_torch_s_grad_scaler_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    ours, module = build(first := nn.Linear(3, 2), scales_losses=True), copy.deepcopy(first)
    theirs = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.0)
    # Gradients above and below the limit of the norm, and two that are not finite.
    sizes = [1e-6, math.inf, math.nan, 1.0, 1e-3, 7.0, 2.0]
    steps = []
    for number, size in enumerate(sizes):
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        (first(inputs).sum() * size * ours.loss_scale.value).backward()
        scaler.scale(module(inputs).sum() * size).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(theirs)
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(theirs)
        scaler.update()
        theirs.zero_grad()
        steps.append(stepped := ours.apply())
        assert stepped[0] == pytest.approx(float(norm), nan_ok=True)
        assert ours.loss_scale.value == scaler.get_scale()
        torch.testing.assert_close(first.state_dict(), module.state_dict())
    assert [stepped for _, stepped in steps] == [math.isfinite(size) for size in sizes]
    assert ours.loss_scale.state() == (2.0**15, 1)
    ours.loss_scale.load_state((2.0, 0))
    for _ in range(2):
        first.weight.grad = torch.full_like(first.weight, math.inf)
        ours.apply()
    assert ours.loss_scale.value == loss_scale.LEAST


def test_value_clipping_does_not_hide_an_infinity() -> None:
    module = nn.Linear(2, 1, bias=False)
    before = module.weight.clone()
    module.weight.grad = torch.tensor([[math.inf, 1.0]])
    norm, stepped = build(module, clip_grad_value=0.5).apply()
    assert norm == math.inf and not stepped
    assert torch.equal(module.weight, before) and module.weight.grad is None


def test_the_first_step_takes_no_memory_for_moments() -> None:
    module = nn.Linear(512, 512)
    optimizer = build(module)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        optimizer.apply()
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in seen.events())
    assert allocated < module.weight.nbytes / 8


@pytest.fixture
def one_rank() -> Iterator[Ranks]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Ranks(mesh=init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()


def test_moments_in_host_memory_are_filled_where_they_lie(one_rank: Ranks) -> None:
    """As with offloaded weights: the mesh computes on another device than holds the pieces."""
    mesh = init_device_mesh("cpu", (1,))
    module = nn.Linear(3, 2, bias=False)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
    optimizer = build(module, ranks=one_rank)
    mesh._device_type = "meta"
    saved = {f"weight.{what}": torch.full((2, 3), 0.5) for what in ("exp_avg", "exp_avg_sq")}
    saved["weight.step"] = torch.tensor(7.0)
    optimizer.load_moments(saved, saved.__getitem__)
    moments = optimizer.moments()
    assert moments.keys() == saved.keys()
    for name, tensor in moments.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(local, saved[name])


def steps(module: nn.Module, optimizer: Optimizer, numbers: range) -> None:
    for number in numbers:
        noise = torch.Generator().manual_seed(number)
        for p in module.parameters():
            # Of very different sizes, so that blocks have small codes too.
            sizes = torch.rand(p.shape, generator=noise) ** 8
            p.grad = torch.randn(p.shape, generator=noise) * sizes
        optimizer.apply()


def eight_bit(module: nn.Module) -> Optimizer:
    pytest.importorskip("bitsandbytes", reason="the extra quantised installs it")
    return build_optimizer(module, Optim(lr=0.01, optimizer="AdamW8bit"))


def test_moments_in_8_bits_step_nearly_as_float32_ones() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(97, 301)
    other, before = copy.deepcopy(layer), layer.weight.detach().clone()
    plain = build_optimizer(other, Optim(lr=0.01))
    quantised = eight_bit(layer)
    steps(layer, quantised, range(20))
    steps(other, plain, range(20))
    moved = (other.weight - before).abs().mean()
    assert (layer.weight - other.weight).abs().mean() < 0.15 * moved
    assert (layer.bias - other.bias).abs().max() < 1e-6
    states = [v for state in quantised._adamw.state.values() for v in state.values()]
    codes = [v for v in states if isinstance(v, torch.Tensor) and v.dtype == torch.uint8]
    assert [c.shape for c in codes] == [(301, 97)] * 2


def test_moments_in_8_bits_come_back_to_the_bit() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(97, 301)
    optimizer = eight_bit(layer)
    steps(layer, optimizer, range(20))
    other, saved = copy.deepcopy(layer), optimizer.moments()
    assert {t.dtype for t in saved.values()} == {torch.float32}
    resumed = eight_bit(other)
    resumed.load_moments(list(saved), saved.get)
    steps(layer, optimizer, range(20, 40))
    steps(other, resumed, range(20, 40))
    assert torch.equal(layer.weight, other.weight) and torch.equal(layer.bias, other.bias)


def test_moments_go_from_one_precision_to_the_other() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(97, 301)
    plain = build_optimizer(layer, Optim(lr=0.01))
    steps(layer, plain, range(3))
    saved = plain.moments()
    quantised = eight_bit(layer)
    quantised.load_moments(list(saved), saved.get)
    for name, tensor in quantised.moments().items():
        assert (tensor - saved[name]).abs().max() <= 0.02 * saved[name].abs().max(), name


def test_without_the_package_8_bits_are_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingPart, match="pip install bitsandbytes"):
        build_optimizer(nn.Linear(1, 1), Optim(optimizer="AdamW8bit"))


def test_steps_are_those_of_adamw_by_hand() -> None:
    """Decoupled decay for matrices alone, with the settings' betas, epsilon and schedule."""
    optim = Optim(lr=0.1, weight_decay=0.2, betas=(0.7, 0.8), eps=1e-2, lr_warmup_steps=1)
    module = nn.Linear(3, 2)
    optimizer = build_optimizer(module, optim, total_steps=4)
    weights = {n: p.detach().clone() for n, p in module.named_parameters()}
    first, second = ({n: torch.zeros_like(p) for n, p in weights.items()} for _ in range(2))
    for step, rate in enumerate((0.05, 0.1, 0.1), 1):
        optimizer.set_progress(step - 1)
        assert optimizer.lr == pytest.approx(rate)
        for name, p in module.named_parameters():
            p.grad = torch.linspace(-1, 2 * step, p.numel()).view_as(p)
            first[name] = 0.7 * first[name] + 0.3 * p.grad
            second[name] = 0.8 * second[name] + 0.2 * p.grad**2
            spread = (second[name] / (1 - 0.8**step)).sqrt() + 1e-2
            weights[name] *= 1 - rate * (0.2 if p.ndim == 2 else 0.0)
            weights[name] -= rate * first[name] / (1 - 0.7**step) / spread
        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in module.parameters()))
        assert optimizer.apply() == (pytest.approx(norm), True)
        for name, p in module.named_parameters():
            torch.testing.assert_close(p, weights[name])
    moments = optimizer.moments()
    assert moments["bias.step"] == 3
    torch.testing.assert_close(moments["weight.exp_avg"], first["weight"])
    torch.testing.assert_close(moments["bias.exp_avg_sq"], second["bias"])


def test_clipping_bounds_values_both_ways_and_norms_from_above() -> None:
    for clip, value, grad, expected in (
        (0.0, None, [3.0, -4.0], [3.0, -4.0]),  # 0: no bound
        (2.5, None, [3.0, -4.0], [1.5, -2.0]),
        (5.0, None, [3.0, -4.0], [3.0, -4.0]),
        (0.0, 1.0, [0.5, -4.0], [0.5, -1.0]),
        (0.5, 3.0, [3.0, -4.0], [0.5**1.5, -(0.5**1.5)]),
    ):
        module = nn.Linear(2, 1, bias=False)
        optimizer = build(module, grad_clip=clip, clip_grad_value=value)
        module.weight.grad = torch.tensor([grad])
        norm, _ = optimizer.apply()
        assert norm == pytest.approx(math.hypot(*grad))
        moment = optimizer.moments()["weight.exp_avg"]
        torch.testing.assert_close(moment, 0.1 * torch.tensor([expected]))


@pytest.fixture
def of_four() -> Iterator[Ranks]:
    """A rank of four, whose messages to the others go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "tensor"))
    yield Ranks(rank=0, size=4, mesh=mesh)
    dist.destroy_process_group()


def test_a_copy_of_a_gradient_counts_as_often_as_ranks_hold_it(of_four: Ranks) -> None:
    assert of_four.mesh is not None
    for placements, copies in (
        ((Replicate(), Shard(0), Replicate()), 2),
        ((Replicate(), Replicate(), Replicate()), 4),
        ((Shard(0), Shard(1), Replicate()), 1),
    ):
        module = nn.Linear(4, 2, bias=False)
        placed = DTensor.from_local(torch.zeros(2, 4), of_four.mesh, placements, run_check=False)
        module.weight = nn.Parameter(placed)
        optimizer = build(module, ranks=of_four)
        gradient = torch.full((2, 4), 2.0)  # of this rank: 32 squared
        module.weight.grad = DTensor.from_local(gradient, of_four.mesh, placements, run_check=False)
        norm, _ = optimizer.apply()
        assert norm == pytest.approx(math.sqrt(32 / copies))


def test_codes_and_sizes_of_blocks_by_hand() -> None:
    """Two blocks of 256 numbers, the second one not full; the map may begin above -1."""
    for first in (-1.0, -0.75, 0.0):
        code = torch.tensor([first, 0.25, 0.5, 1.0])
        codes = torch.arange(300) % 4
        sizes = torch.tensor([3.0, 0.5])
        values = code[codes] * sizes.repeat_interleave(256)[:300]
        actual_codes, blocks = quantise(values.view(3, 100), code)
        assert (actual_codes.dtype, actual_codes.shape) == (torch.uint8, (3, 100))
        assert torch.equal(actual_codes.flatten().long(), codes) and torch.equal(blocks, sizes)
        # The second moment is too small to be held in 8 bits.
        state = {"step": 7, "state1": actual_codes, "absmax1": blocks, "qmap1": code}
        state["state2"] = values
        moments = dequantise(state)
        assert moments["step"] == 7 and torch.equal(moments["exp_avg_sq"], values)
        torch.testing.assert_close(moments["exp_avg"], values.view(3, 100))
    rounded, size = quantise(torch.tensor([0.3, 0.4, 2.0, -0.9]), torch.tensor([0.0, 0.25, 1.0]))
    assert rounded.tolist() == [1, 1, 2, 0] and size.tolist() == [2.0]
    assert dequantise({}) == {}


def test_only_parameters_that_had_a_gradient_have_moments() -> None:
    module = nn.Linear(2, 1)
    optimizer = build(module)
    assert optimizer.moments() == {}
    module.weight.grad = torch.ones(1, 2)
    optimizer.apply()
    assert {name.partition(".")[0] for name in optimizer.moments()} == {"weight"}
