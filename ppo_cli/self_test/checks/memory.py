"""What happens to the memory of a GPU: a step that does not fit, and segments that grow."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from ppo_cli.algo.batch import TrainBatch, merge_annotations
from ppo_cli.engine.base import MiniBatch, Sums
from ppo_cli.engine.device import expand_segments
from ppo_cli.engine.learner import Learner
from ppo_cli.self_test.checks.runs import make_batch, make_config, score_rows
from ppo_cli.self_test.checks.training import check_run, make_learner
from ppo_cli.self_test.results import Results, Setup

ROWS = ((40, (16,) * 4),) * 256  # so many that activations take most of the memory of a step
SHARE = 0.6  # of what a step takes, which it is then left
TIMEOUT_S = 60.0


def check_out_of_memory(setup: Setup, results: Results) -> None:
    """A step with less memory than it takes: it halves its micro-batches and finishes."""
    tokens = sum(prompt + sum(responses) for prompt, responses in ROWS) * 4
    parts = {"ppo_max_token_len_per_gpu": tokens}
    # All rows in one micro-batch.
    config = make_config(setup.device, actor=parts | {"use_kl_loss": False})
    learner = make_learner(config)
    batch = make_batch(learner.policy.model.config.vocab_size, rows=ROWS)
    train_batch = score_rows(merge_annotations(batch, [learner.annotate(batch)]))
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _step(learner, train_batch)
    step_bytes = torch.cuda.max_memory_allocated() - before_bytes
    torch.cuda.empty_cache()
    resting_bytes = torch.cuda.memory_allocated()
    # Repeat it with less memory than it needs.
    limit_bytes = torch.cuda.memory_reserved() + SHARE * step_bytes
    torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.mem_get_info()[1])
    try:
        sums = _step(learner, train_batch)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    # It must finish with smaller micro-batches and free everything.
    halved = "actor/micro_batch_tokens" in sums
    results.require("a step without enough memory did not halve its micro-batches", halved)
    results.require("a step was skipped", sums["actor/skipped_steps"][0] == 0)
    left_bytes = torch.cuda.memory_allocated() - resting_bytes
    results.compare("bytes that a failed attempt leaves behind", max(0, left_bytes), 0)
    results.figures["step_mib"] = round(step_bytes / 2**20)


def _step(learner: Learner, batch: TrainBatch) -> Sums:
    return learner.step(MiniBatch(batch, actor=True, critic=False))


def check_expandable_segments(setup: Setup, results: Results) -> None:
    """Steps, and a tensor that another process reads, in segments that grow."""
    with results.part("expandable segments", "expandable_segments"):
        expand_segments()
        check_run("expandable segments", make_config(setup.device), results)
        numbers = torch.arange(2**20, device=setup.device, dtype=torch.float64)
        total = _sum_elsewhere(numbers)
        results.compare("a sum in another process", abs(total - float(numbers.sum())), 0)


def _sum_elsewhere(numbers: torch.Tensor) -> float:
    """Sum a tensor of this GPU in a separate process, as vLLM's workers read weights."""
    # A forked process cannot use CUDA.
    context = get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=_sum_shared, args=(sender, *reduce_tensor(numbers)))
    process.start()
    try:
        if not receiver.poll(TIMEOUT_S):
            raise TimeoutError(f"another process did not read a tensor in {TIMEOUT_S:g} s")
        return float(receiver.recv())
    finally:
        process.kill()
        process.join()


def _sum_shared(pipe: Any, rebuild: Callable[..., torch.Tensor], arguments: Any) -> None:
    pipe.send(float(rebuild(*arguments).sum()))
