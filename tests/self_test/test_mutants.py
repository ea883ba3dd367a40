"""Each check fails when what it checks is broken, and the checks of other things do not."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ppo_cli.cluster.driver import DriverEngine
from ppo_cli.config.schema.reward import Code
from ppo_cli.engine.cpu.row_products import RowSpan
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.models import attention
from ppo_cli.engine.models.attention import PackedRows
from ppo_cli.engine.samplers import hf as hf_sampler
from ppo_cli.engine.samplers.hf import HFSampler
from ppo_cli.engine.training import actor_critic
from ppo_cli.engine.training.optimizer import Optimizer
from ppo_cli.rewards.code import check as code_check
from ppo_cli.rewards.code.sandboxes import Unsandboxed, choose_sandbox
from ppo_cli.self_test.checks import devices, runs
from ppo_cli.self_test.declarations import CHECKS
from ppo_cli.self_test.results import LayerShape, Outcome, Setup
from ppo_cli.self_test.runner import compute_outcome
from tests.nvml import H100

pytestmark = pytest.mark.slow
Patch = pytest.MonkeyPatch
SMALL = LayerShape(heads=4, kv_heads=2, head_size=32, vocabulary=1000, model="a small model")
BY_NAME = {check.name: check for check in CHECKS}
# What runs in a few seconds in this process.
QUICK = (
    "devices", "products", "attention", "training steps", "optimizer", "save and resume",
    "sampler", "code sandbox",
)  # fmt: skip


def run(name: str, folder: Path) -> Outcome:
    folder = folder / name.replace(" ", "-")
    folder.mkdir()
    return compute_outcome(BY_NAME[name], Setup("cpu", 0, folder, SMALL))


def see_the_future(patch: Patch) -> None:
    """Attention without the causal mask, by SDPA and by products."""
    forward = attention.sdpa_attention_forward
    patch.setattr(attention, "sdpa_attention_forward", partial(forward, is_causal=False))

    def scores(self: RowSpan, query_kqd: torch.Tensor, key_kmd: torch.Tensor) -> torch.Tensor:
        return query_kqd @ key_kmd.mT

    patch.setattr(RowSpan, "scores", scores)


def drop_the_scale(patch: Patch) -> None:
    forward = attention.sdpa_attention_forward
    patch.setattr(attention, "_prefers_products", lambda *states: False)

    def unscaled(*states: Any, **options: Any) -> Any:
        return forward(*states, **options | {"scaling": 1.0})

    patch.setattr(attention, "sdpa_attention_forward", unscaled)


def leak_between_rows(patch: Patch) -> None:
    """The first token of the second row belongs to the row before it."""
    build = PackedRows.from_lengths

    def leaking(*values: Any) -> PackedRows:
        packed = build(*values)
        if packed.rows_113B.shape[-1] > 2:
            packed.rows_113B[0, 0, 0, 1] += 1
        return packed

    patch.setattr(PackedRows, "from_lengths", leaking)


def change_epsilon(patch: Patch) -> None:
    start = torch.optim.AdamW.__init__

    def other(self: Any, *values: Any, **options: Any) -> None:
        start(self, *values, **options | {"eps": options["eps"] * 10})

    patch.setattr(torch.optim.AdamW, "__init__", other)


def lose_moments(patch: Patch) -> None:
    patch.setattr(Optimizer, "load_moments", lambda self, names, read: None)


def keep_old_weights(patch: Patch) -> None:
    patch.setattr(HFSampler, "load_weights", lambda self, weights: False)


def record_wrong_logprobs(patch: Patch) -> None:
    draw = hf_sampler.draw_tokens

    def shifted(*values: Any, **options: Any) -> Any:
        tokens, logprobs, *others = draw(*values, **options)
        return (tokens, logprobs + 0.01, *others)

    patch.setattr(hf_sampler, "draw_tokens", shifted)


def compute_wrong_logprobs(patch: Patch) -> None:
    gather = actor_critic.gather_logprobs_entropy

    def shifted(*values: Any, **options: Any) -> Any:
        logprobs, entropy = gather(*values, **options)
        return logprobs * 1.001, entropy

    patch.setattr(actor_critic, "gather_logprobs_entropy", shifted)


def invert_weights(patch: Patch) -> None:
    weigh = runs.importance_weights

    def inverted(old: torch.Tensor, sampler: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return weigh(sampler, old, *rest, **options)

    patch.setattr(runs, "importance_weights", inverted)


def open_the_sandbox(patch: Patch) -> None:
    patch.setattr(code_check, "choose_sandbox", lambda settings, tell: Unsandboxed())


def move_the_reference(patch: Patch) -> None:
    load = Learner._load_reference

    def moved(self: Learner) -> Any:
        reference = load(self)
        if reference is not None and reference.backbone is not self.policy.backbone:
            with torch.no_grad():
                next(iter(reference.model.parameters())).mul_(1.0001)
        return reference

    patch.setattr(Learner, "_load_reference", moved)


def leave_the_adapter_out(patch: Patch) -> None:
    from peft.tuners.lora.layer import Linear

    patch.setattr(Linear, "forward", lambda self, x, *arguments, **named: self.base_layer(x))


def ignore_seeds(patch: Patch) -> None:
    numbers = itertools.count(1)
    patch.setattr(hf_sampler, "stream_key", lambda *values: next(numbers))


def count_a_gpu_too_many(patch: Patch) -> None:
    patch.setattr(devices, "list_gpus", lambda: (H100,))


def round_products(patch: Patch) -> None:
    """float32 is multiplied in bfloat16, as a careless setting would have it."""
    multiply = torch.Tensor.__matmul__

    def rounded(first: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if first.dtype == torch.float32:
            return multiply(first.bfloat16(), right.bfloat16()).float()
        return multiply(first, right)

    patch.setattr(torch.Tensor, "__matmul__", rounded)


Mutant = Callable[[Patch], None]
# What each breaks, and which checks then fail. Those of a row break different ones.
MUTANTS: tuple[dict[Mutant, set[str]], ...] = (
    {see_the_future: {"attention", "training steps"}, keep_old_weights: {"sampler"}},
    {drop_the_scale: {"attention", "training steps", "sampler"}, open_the_sandbox: {"code sandbox"},
     lose_moments: {"save and resume"}},
    {leak_between_rows: {"attention", "training steps"}, record_wrong_logprobs: {"sampler"}},
    {change_epsilon: {"optimizer", "training steps"}, ignore_seeds: {"sampler"}},
    {compute_wrong_logprobs: {"training steps"}, count_a_gpu_too_many: {"devices"}},
    {move_the_reference: {"training steps"}, round_products: {"products"}},
    {leave_the_adapter_out: {"training steps"}},
    {invert_weights: {"training steps"}},
)  # fmt: skip


@pytest.mark.parametrize("mutants", MUTANTS, ids=lambda row: "+".join(f.__name__ for f in row))
def test_broken_parts_fail_their_checks_and_no_others(
    mutants: dict[Mutant, set[str]], tmp_path: Path, monkeypatch: Patch
) -> None:
    if open_the_sandbox in mutants:
        choose_sandbox(Code())  # without any, the check does not apply here
    for mutate in mutants:
        mutate(monkeypatch)
    outcomes = [run(name, tmp_path) for name in QUICK]
    wrong = {o.check: o.detail for o in outcomes if o.state not in ("ok", "skipped")}
    assert wrong.keys() == set().union(*mutants.values()), wrong


def test_unbroken_parts_pass(tmp_path: Path) -> None:
    outcomes = [run(name, tmp_path) for name in QUICK]
    assert [o.detail for o in outcomes if o.state not in ("ok", "skipped")] == []


@pytest.mark.weekly
def test_garbage_on_one_rank_fails_collectives(tmp_path: Path, monkeypatch: Patch) -> None:
    reduce = dist.all_reduce

    def garbled(tensor: torch.Tensor, *values: Any, **options: Any) -> Any:
        done = reduce(tensor, *values, **options)
        if dist.get_rank() == 1 and tensor.is_floating_point():
            tensor.add_(1)
        return done

    assert run("collectives", tmp_path).state == "ok"
    monkeypatch.setattr(dist, "all_reduce", garbled)
    (tmp_path / "broken").mkdir()
    outcome = run("collectives", tmp_path / "broken")
    assert outcome.state == "differs" and "all-reduce, rank 1" in outcome.detail


def test_weights_that_are_not_published_fail_the_ray_check(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(DriverEngine, "publish", lambda self: None)
    outcome = run("Ray ranks", tmp_path)
    assert outcome.state == "differs" and "sampler and trainer, step 2" in outcome.detail, outcome


def check_vllm_with_old_weights(folder: Path) -> Outcome:
    from ppo_cli.engine.samplers.vllm import VLLMSampler

    VLLMSampler.load_weights = lambda self, weights: False  # type: ignore[method-assign]
    return run("vLLM sampler", folder)


@pytest.mark.weekly
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (scripts/setup vllm)"
)
def test_old_weights_in_vllm_fail_its_check(tmp_path: Path) -> None:
    # A process of its own, as in a self-test: vLLM depends on what a process did before.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        outcome = process.submit(check_vllm_with_old_weights, tmp_path).result(timeout=300)
    assert outcome.state == "differs" and "log-probs, new weights" in outcome.detail, outcome
