"""N ranks on these devices: what each collective gives, how fast it is, and one step by FSDP.

The ranks are forked from a process that has not used CUDA yet. GPUs talk by NCCL, CPUs by gloo.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from ppo_cli.algo.batch import AnnotatedBatch, Annotations, merge_annotations
from ppo_cli.config.models.bundled import EMBEDDED, model_folder
from ppo_cli.config.schema.keys import with_settings
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import MiniBatch, Sums, merge_sums
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.ranks import ALONE, Ranks, gather_objects, join_ranks, sum_over_ranks
from ppo_cli.self_test.checks.runs import LIMITS, largest_gap, make_batch, make_config, score_rows
from ppo_cli.self_test.results import Results, Setup, describe_error

Gaps = dict[str, tuple[float, float]]  # what is compared -> the gap and its limit
# More ranks take long to start and show nothing new.
MOST_RANKS = 8
TIMEOUT_S = 90.0
NUMBERS = 1000  # of a tensor, per rank
ROUNDS = 100  # of `exchange_failures`
LARGE_BYTES = {"cpu": 2**22, "cuda": 2**28}  # of the tensors whose transfer is timed
# The steps that are compared, by name, with their settings.
KEPT = "step with gathered weights kept"
WAYS: dict[str, dict[str, Any]] = {
    "step by FSDP": {},
    KEPT: {f"{part}.fsdp_config.reshard_after_forward": False for part in ("actor", "critic")},
}


# Meshes whose norms and updates are compared: ranks of one layer, and of one shard.
LAYOUTS = {"step by tensor parallelism": (2, -1), "step by HSDP": (1, 1)}
SPLIT_MODEL = "split-model"  # folder of the model whose layers are split


def check_collectives(setup: Setup, results: Results) -> None:
    """Run `_check_rank` on each rank, then the layouts; collect what the ranks find."""
    size = min(setup.gpus, MOST_RANKS) if setup.device == "cuda" else 2
    if size < 2:
        results.skip("needs two GPUs")
        return
    # Each rank compares its results itself and reports gaps.
    reports = run_ranks(size, _check_rank, setup)
    for name in reports[0]["parts"]:
        with results.part(name, *(("keep_gathered",) if name == KEPT else ())):
            for rank, report in enumerate(reports):
                gaps = report["parts"][name]
                if isinstance(gaps, str):
                    raise RuntimeError(f"rank {rank}: {gaps}")
                for what, (gap, limit) in gaps.items():
                    results.compare(f"{what}, rank {rank}", gap, limit)
    results.figures |= reports[0]["figures"]
    pairs = size - size % 2
    _save_split_model(setup.folder / SPLIT_MODEL)
    for name, layout in LAYOUTS.items():
        with results.part(name):
            work = partial(_compare_step, way=name)
            for rank, gaps in enumerate(run_ranks(pairs, work, setup, *layout)):
                for what, (gap, limit) in gaps.items():
                    results.compare(f"{what}, rank {rank}", gap, limit)
    # NCCL's log names the transport, such as P2P or NET/IB.
    log = (setup.folder / "log").read_text(errors="replace") if setup.device == "cuda" else ""
    if transports := sorted({*re.findall(r"via (\S+)", log)}):  # NCCL_DEBUG=INFO
        results.figures["transport"] = ", ".join(transports)


def _save_split_model(folder: Path) -> None:
    """Save a model with norms per head and with biases, which the bundled one does not have."""
    tokenizer = load_tokenizer(model_folder(EMBEDDED))
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        attention_bias=True, initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)


def run_ranks(
    size: int,
    work: Callable[[Ranks, Setup], Mapping[str, Any]],
    setup: Setup,
    tensor_size: int = 1,
    shard_size: int = -1,
) -> list[Mapping[str, Any]]:
    """Fork `size` processes that meet as ranks; what each returns, by rank."""
    layout = {"tensor_size": tensor_size, "shard_size": shard_size}
    context = get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_run_rank, args=(rank, size, layout, work, setup, pipe[1]))
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    # One deadline for all ranks: a rank that hangs makes the others wait.
    deadline = time.monotonic() + TIMEOUT_S
    reports: list[Mapping[str, Any]] = []
    for rank, (pipe, sender) in enumerate(pipes):
        sender.close()
        with closing(pipe):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} of {size} gave nothing in {TIMEOUT_S:g} s")
            try:
                reports.append(pipe.recv())
            except EOFError:
                processes[rank].join()
                code = processes[rank].exitcode
                raise RuntimeError(f"rank {rank} of {size} ended with exit code {code}") from None
    return reports


def _run_rank(
    rank: int,
    size: int,
    layout: Mapping[str, int],
    work: Callable[[Ranks, Setup], Mapping[str, Any]],
    setup: Setup,
    pipe: Any,
) -> None:
    """Join the group as one rank, in a forked process; send the result of `work` to `pipe`."""
    # A file in the check's folder is enough to meet on one machine.
    device = torch.device(setup.device, rank) if setup.device == "cuda" else torch.device("cpu")
    meeting = f"file://{setup.folder / 'meeting'}-{layout['tensor_size']}-{layout['shard_size']}"
    ranks = join_ranks(
        rank, size, init_method=meeting, device=device, timeout_s=TIMEOUT_S, **layout
    )
    pipe.send(work(ranks, setup))
    dist.destroy_process_group()


def _check_rank(ranks: Ranks, setup: Setup) -> dict[str, Any]:
    """Run all parts of the check on one rank; return {"parts": ..., "figures": ...}.

    Each part has the gaps that it measured, or the text of its error; the figures are speeds.
    """
    parts: dict[str, Any] = {}
    figures: dict[str, Any] = {}
    # An error in one part must not hide the others.
    works: dict[str, Callable[[], Gaps]] = {
        "collectives": partial(_compute_collectives, ranks, setup.device),
        "speed": partial(_measure_speed, ranks, setup.device, figures),
    }
    works |= {way: partial(_compare_step, ranks, setup, way) for way in WAYS}
    for name, work in works.items():
        try:
            parts[name] = work()
        except Exception as error:
            parts[name] = describe_error(error)
    return {"parts": parts, "figures": figures}


def _compute_collectives(ranks: Ranks, device: str) -> Gaps:
    """Each kind of collective on numbers whose result is known."""
    rank, size = ranks.rank, ranks.size

    def numbers(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-999, 999, (NUMBERS,), generator=generator).float()

    # Whole numbers: sums are exact in any order, so the results must be equal.
    every = torch.stack([numbers(r) for r in range(size)])
    local = numbers(rank).to(device)
    gaps: dict[str, Tensor] = {}
    total, largest, first = local.clone(), local.clone(), local.clone()
    dist.all_reduce(total)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.broadcast(first, 0)
    gaps["all-reduce"] = total.cpu() - every.sum(0)
    gaps["all-reduce of maxima"] = largest.cpu() - every.amax(0)
    gaps["broadcast"] = first.cpu() - every[0]
    # Gather and reduce-scatter, which FSDP uses.
    gathered = torch.empty((size * NUMBERS,), device=device)
    dist.all_gather_single(gathered, local)
    gaps["all-gather"] = gathered.cpu() - every.flatten()
    pieces = torch.cat([local * (piece + 1) for piece in range(size)])
    piece = torch.empty((NUMBERS,), device=device)
    dist.reduce_scatter_single(piece, pieces)
    gaps["reduce-scatter"] = piece.cpu() - every.sum(0) * (rank + 1)
    # Collectives of Python objects and numbers, which the engine uses.
    objects = gather_objects(ranks, ("rank", rank))
    gaps["objects"] = torch.tensor([float(objects != [("rank", r) for r in range(size)])])
    gaps["sum"] = torch.tensor([sum_over_ranks(ranks, rank + 0.5) - (size * size / 2)])
    ranks.exchange_failures()
    return {name: (float(gap.abs().max()), 0.0) for name, gap in gaps.items()}


def _measure_speed(ranks: Ranks, device: str, figures: dict[str, Any]) -> Gaps:
    """GB/s of an all-gather, and milliseconds of `exchange_failures`."""
    # A first round allocates and connects; it is not timed.
    large = torch.ones(LARGE_BYTES[device] // 4 // ranks.size, device=device)
    gathered = torch.empty(large.numel() * ranks.size, device=device)

    def gather() -> None:
        dist.all_gather_single(gathered, large)
        float(gathered[-1])  # waits for a GPU

    gather()
    figures["all_gather_gb_per_s"] = round(gathered.nbytes / _time_rounds(gather) / 1e9, 2)
    figures["agree_ms"] = round(1e3 * _time_rounds(ranks.exchange_failures, ROUNDS), 3)
    return {"all-gather of many": (float((gathered - 1).abs().max()), 0.0)}


def _time_rounds(work: Callable[[], None], rounds: int = 3) -> float:
    started = time.perf_counter()
    for _ in range(rounds):
        work()
    return (time.perf_counter() - started) / rounds


def _compare_step(ranks: Ranks, setup: Setup, way: str) -> Gaps:
    """One step of all ranks together, and the same step of this rank alone."""
    model = {"path": str(setup.folder / SPLIT_MODEL)} if ranks.tensor_size > 1 else {}
    config = with_settings(make_config(setup.device, model=model), WAYS.get(way, {}))
    # The same batch on all ranks and on this rank alone.
    together, alone = (_take_step(config, group) for group in (ranks, ALONE))
    limit = LIMITS[str(config.model.dtype)]
    gaps = {f"log-probs after a {way}": (largest_gap(together[0], alone[0]), limit)}
    for metric in ("actor_loss", "grad_norm", "critic_loss", "critic_grad_norm"):
        numbers = [sums[metric][0] / sums[metric][1] for sums in (together[1], alone[1])]
        gap = abs(numbers[0] - numbers[1]) / max(1.0, abs(numbers[1]))
        gaps[f"{metric} of a {way}"] = (gap, limit)
    return gaps


def _take_step(config: Config, ranks: Ranks) -> tuple[Tensor, Sums]:
    """The log-probs after a step, and its sums over all ranks."""
    tokenizer = load_tokenizer(model_folder(config.model.path))
    # Weights and batch depend on fixed seeds: all ranks have the same.
    learner = Learner(config, tokenizer, ranks, total_steps=8)
    batch = make_batch(learner.policy.model.config.vocab_size)

    def annotate() -> AnnotatedBatch:
        shares: list[Annotations] = gather_objects(ranks, learner.annotate(batch))
        return merge_annotations(batch, shares)

    minibatch = MiniBatch(score_rows(annotate()), actor=True, critic=True)
    sums = merge_sums(gather_objects(ranks, learner.step(minibatch)))
    learner.publish()
    return annotate().old_logprobs_BT, sums
