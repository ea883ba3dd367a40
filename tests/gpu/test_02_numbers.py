"""The one-process engine and reward models on a GPU, in this process, beside the CPU's numbers."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ppo_cli.algo.batch import build_batch
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.models.attention import PackedRows, attend_by_rows
from tests.engine import second_device_runs as scenarios
from tests.engine.second_device import Watch
from tests.gpu.conftest import CPU, OnDevice

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
HALF = 0.2  # bfloat16 rounds at other places than float32 on the CPU
FLOAT = 1e-3
LENGTHS = (7, 1, 12, 7, 2)


def test_attention_of_packed_rows_is_that_of_each_row(gpu: torch.device) -> None:
    """The kernel of GPUs in bfloat16, outputs and gradients, beside float32 on the CPU."""
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    ends = PackedRows.from_lengths(LENGTHS, CPU).rows_113B
    torch.manual_seed(0)
    first = [torch.randn(1, heads, sum(LENGTHS), 64) for heads in (4, 2, 2)]
    sides = []
    for place, dtype in ((gpu, torch.bfloat16), (CPU, torch.float32)):
        states = [s.to(place, dtype).requires_grad_() for s in first]
        out, _ = attend_by_rows(module, *states, ends, scaling=0.1)
        out.float().square().sum().backward()
        sides.append([out, *(s.grad for s in states)])
    for actual, exact in zip(*sides, strict=True):
        assert (actual.cpu().float() - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("name", scenarios.RUNS)
def test_training_gives_the_numbers_of_the_cpu(
    name: str, gpu: torch.device, compute_on: OnDevice, tmp_path: Path, figure: Any
) -> None:
    """Sampling, annotating, stepping, publishing, saving and loading, in six ways."""
    config = scenarios.config_of(scenarios.RUNS[name])
    half = name.startswith("half")
    sides = []
    for place in (CPU, gpu):
        compute_on(place)
        watch = nullcontext if place == CPU else Watch
        numbers = scenarios.train(config, tmp_path / place.type, watch)
        # Rounding may draw another token, and others after it.
        sides.append({n: v for n, v in numbers.items() if not (half and n.startswith("sample"))})
    gaps = scenarios.gaps(*sides)
    figure(name, max(gaps.values()))
    assert not {n: gap for n, gap in gaps.items() if not gap <= (HALF if half else FLOAT)}


@pytest.mark.parametrize("name", scenarios.REWARDS)
def test_reward_models_give_the_scores_of_the_cpu(
    name: str, gpu: torch.device, compute_on: OnDevice, tmp_path: Path
) -> None:
    path = scenarios.REWARDS[name](tmp_path / "model")
    sides = []
    for place in (CPU, gpu):
        compute_on(place)
        sides.append(scenarios.score(path, nullcontext if place == CPU else Watch))
    gaps = scenarios.gaps(*sides)
    assert gaps and not {n: gap for n, gap in gaps.items() if not gap <= FLOAT}


@pytest.mark.parametrize("spread", [False, True])
def test_before_the_first_step_the_policy_is_its_reference(
    spread: bool, gpu: torch.device, compute_on: OnDevice, tmp_path: Path
) -> None:
    """A bfloat16 checkpoint with tied embeddings, in bfloat16: log-probs agree to the bit."""
    source = model_folder("embedded")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(source)
    tokenizer.save_pretrained(tmp_path)
    compute_on(gpu)
    half = {"path": str(tmp_path), "dtype": "bfloat16", "packing": None, "spread_weights": spread}
    penalty = {"adv_estimator": "grpo", "use_kl_in_reward": True, "kl_penalty": "full"}
    config = scenarios.config_of({"model": half, "algorithm": penalty})
    prompts = scenarios.prompts_of(tokenizer)
    batch = build_batch(scenarios.rollouts_of(prompts), tokenizer.pad_token_id)
    annotated = LocalEngine(config, tokenizer, total_steps=1).annotate(batch)
    assert annotated.full_kl_BT is not None and annotated.ref_logprobs_BT is not None
    mask = batch.response_mask_BT
    assert torch.equal(annotated.old_logprobs_BT[mask], annotated.ref_logprobs_BT[mask])
    assert annotated.full_kl_BT[mask].abs().max() == 0
