"""A step that runs out of memory is taken in halves, with the same numbers, and leaves nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families.configs import build_model
from transformers import AutoTokenizer

from ppo_cli.algo.batch import AnnotatedBatch
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.engine.base import MiniBatch, Sums
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.models import load_tokenizer
from tests.engine.packed_steps import make_batch, scored, settings
from tests.gpu.conftest import OnDevice

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
MIB = 2**20


def save_model(folder: Path, *, large: bool) -> str:
    """A random model; a large one makes activations that outweigh it on a real GPU."""
    AutoTokenizer.from_pretrained(model_folder("embedded")).save_pretrained(folder)
    size = {"num_hidden_layers": 8, "num_attention_heads": 16} if large else {}
    width = 512 if large else 64
    build_model(
        "qwen2", hidden_size=width, intermediate_size=3 * width, tie_word_embeddings=True, **size
    ).save_pretrained(folder)
    return str(folder)


def allocated(gpu: torch.device) -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if gpu.type == "cuda" else 0


@contextmanager
def less_memory(engine: LocalEngine, gpu: torch.device, rest: int, peak: int) -> Iterator[None]:
    """Let a step have 60 % of what it took; on a device without limits a layer counts tokens."""
    if gpu.type == "cuda":
        total = torch.cuda.get_device_properties(gpu).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((rest + 0.6 * (peak - rest)) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return

    def count(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].numel() > 0.6 * peak:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    models = [model.model for model in engine._learner._models()]
    hooks = [m.get_input_embeddings().register_forward_pre_hook(count) for m in models]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def take_step(engine: LocalEngine, annotated: AnnotatedBatch) -> Sums:
    return engine.step(MiniBatch(scored(annotated, 0), actor=True, critic=True))


@pytest.mark.parametrize("packing", [True, False])
def test_a_step_too_large_is_halved_and_gives_the_same_numbers(
    packing: bool, gpu: torch.device, compute_on: OnDevice, tmp_path: Path, figure: Any
) -> None:
    on_gpu = gpu.type == "cuda"
    rows = ((64, 192),) * 32 if on_gpu else ((6, 10),) * 8
    tokens = sum(map(sum, rows))
    compute_on(gpu)
    path = save_model(tmp_path, large=on_gpu)
    data = {"max_prompt_length": 64, "max_response_length": 192}
    model = {"path": path, "dtype": "float32", "packing": packing}
    config = settings(
        tokens, model=model | {"enable_gradient_checkpointing": False}, data=data,
        algorithm={"adv_estimator": "gae"}, trainer={"engine": "local"},
    )  # fmt: skip
    batch = make_batch(rows, 0)
    sums, halvings = [], []
    for limited in (False, True):
        engine = LocalEngine(config, load_tokenizer(path), total_steps=2)
        annotated = engine.annotate(batch)
        rest = allocated(gpu)
        if not limited:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            sums.append(take_step(engine, annotated))
            peak = torch.cuda.max_memory_allocated() if on_gpu else tokens
        else:
            with less_memory(engine, gpu, rest, peak):
                sums.append(take_step(engine, annotated))
            figure("left behind, MiB", (allocated(gpu) - rest) / MIB)
            assert allocated(gpu) - rest < 32 * MIB
        learners = engine._learner._learners().values()
        halvings.append([learner.budget.halvings for learner in learners])
        del engine
    figure("halvings", halvings)
    assert halvings[0] == [0, 0] and max(halvings[1]) > 0
    names = sums[0].keys()
    assert sums[1].keys() >= names
    for name in names:
        assert sums[1][name] == pytest.approx(sums[0][name], rel=1e-2, abs=1e-3), name
