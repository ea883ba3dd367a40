"""Run a config's learner as rank 0 without weights, and measure each phase of a step.

`ppo plan --simulate` starts this program as a child without a GPU, because it replaces functions
of torch and of this package. It answers a config, as JSON, with lines of progress as parts, and
with the measurements.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import masking_utils

from ppo_cli.algo.batch import TrainBatch
from ppo_cli.config.schema.run import Config
from ppo_cli.engine import learner
from ppo_cli.engine.base import MiniBatch
from ppo_cli.engine.batches import packing
from ppo_cli.engine.batches.micro_batches import Budget, plan_rank_micro_batches
from ppo_cli.engine.batches.rows import row_lengths, row_prompts
from ppo_cli.engine.checkpoint import TrainedModel
from ppo_cli.engine.device import Compute
from ppo_cli.engine.models import attention
from ppo_cli.engine.ranks import ALONE, Ranks, join_ranks
from ppo_cli.engine.sharding import gathered, host_memory
from ppo_cli.errors import PpoError
from ppo_cli.extras.lab.simulation.device import DEVICE, NAME, Simulator, fake_ranks, register
from ppo_cli.planning.placement import data_ranks, placement_of
from ppo_cli.processes.channel import PART, Channel

TURNS = 2  # micro-batches per rank: from the second one on there are gradients in memory


@dataclass(frozen=True)
class PhaseMeasurement:
    """The peak memory of one phase on the device and the host of rank 0.

    `collectives` are those of one micro-batch: kind -> {"calls", "bytes"}; `work` has its launches,
    FLOPs and bytes.
    """

    peak_bytes: int
    peak_by_maker: Mapping[str, int]
    host_peak_bytes: int
    micro_batch_tokens: int
    collectives: Mapping[str, Mapping[str, float]]
    work: Mapping[str, float]
    seconds: float


@dataclass(frozen=True)
class Measurements:
    """Bytes after loading, and the measurements of each phase, by the plan's names."""

    ranks: int
    rest_bytes: int
    rest_by_maker: Mapping[str, int]
    host_rest_bytes: int
    phases: Mapping[str, PhaseMeasurement]


class SimulatedLearner(learner.Learner):
    """A learner without checkpoints."""

    def trained(self) -> list[TrainedModel]:
        """Return nothing: no checkpoint is written."""
        return []


def simulate(config: Config, report: Callable[[str], None] = lambda text: None) -> Measurements:
    """Load a config's models on the simulated device, annotate and update; reports progress."""
    # The device must exist before the first tensor.
    register()
    simulator, size = Simulator(), placement_of(config).ranks
    with ExitStack() as stack:
        stack.enter_context(fake_ranks())
        stack.enter_context(_without_numbers(simulator))
        stack.enter_context(simulator)
        if config.model.compile_layers:
            # Imported on use: torch's compiler takes a second.
            from ppo_cli.extras.lab.simulation.compiled import compiling

            stack.enter_context(compiling(simulator, simulator.operations))
        # Rank 0 of simulated ranks; all others do the same work.
        ranks = ALONE
        if size > 1:
            ranks = join_ranks(
                0, size, init_method="", device=DEVICE,
                tensor_size=config.trainer.tensor_parallel_size,
                shard_size=config.actor.fsdp_config.fsdp_size,
            )  # fmt: skip
        report("loading the models")
        rank0 = SimulatedLearner(config, range(0), ranks, total_steps=10)
        device, host = simulator.device_memory, simulator.host_memory
        # Loaded weights come from several functions: count them as parameters.
        for model in rank0._models():
            device.rename(model.model.parameters(), "parameters")
        # Memory at rest is measured after garbage of loading is gone.
        gc.collect()
        rest, by_maker = device.total_bytes, _positive(device.by_maker)
        host_rest = host.total_bytes
        phases = {
            name: _measure(
                simulator, name, make_batch(config, name, budget), budget, work, ranks, report
            )
            for name, budget, work in _phases(rank0)
        }
    return Measurements(max(1, size), rest, by_maker, host_rest, phases)


def _phases(
    rank0: learner.Learner,
) -> Iterator[tuple[str, Budget, Callable[[TrainBatch], object]]]:
    """Yield name, budget and work of each phase, in the order of a training step."""
    yield "annotation", rank0._annotate_budget, rank0.annotate

    def update(name: str, batch: TrainBatch) -> object:
        return rank0.step(MiniBatch(batch, actor=name == "actor", critic=name == "critic"))

    for name, part in rank0._learners().items():
        yield f"update of the {name}", part.budget, partial(update, name)


def _measure(
    simulator: Simulator,
    name: str,
    batch: TrainBatch,
    budget: Budget,
    work: Callable[[TrainBatch], object],
    ranks: Ranks,
    report: Callable[[str], None],
) -> PhaseMeasurement:
    """Run a phase on a batch of full rows, and return its peak memory and collectives."""
    device, host, collectives = (
        simulator.device_memory, simulator.host_memory, simulator.collectives,
    )  # fmt: skip
    began = time.monotonic()
    report(name)
    gc.collect()
    for counter in (device, host):
        counter.restart()
    collectives.clear()
    simulator.operations.clear()
    with _masks_as_packed(budget.packed):
        work(batch)
    # The plan again, for the number and size of its micro-batches.
    lengths, prompts = row_lengths(batch), row_prompts(batch.input_ids_BL, batch.prompt_len_B)
    plan = plan_rank_micro_batches(lengths, budget, ranks, prompts)
    sizes = (
        budget.size(len(part), max(part), sum(part))
        for part in ([lengths[row] for row in turn] for turn in plan if turn)
    )
    operations = simulator.operations
    names = ("launches", "flops", "product_bytes", "other_bytes")
    return PhaseMeasurement(
        device.peak_bytes,
        _positive(device.at_peak),
        host.peak_bytes,
        max(sizes),
        {
            kind: {what: count / len(plan) for what, count in counts.items()}
            for kind, counts in collectives.summarise().items()
        },
        {name: getattr(operations, name) / len(plan) for name in names},
        time.monotonic() - began,
    )


def make_batch(config: Config, phase: str, budget: Budget) -> TrainBatch:
    """Build a batch of zeros with rows of equal, full length.

    It has `TURNS` full micro-batches for each data rank, or all rows of the phase if those are
    fewer. `budget` is the size of a micro-batch.
    """
    n, ranks = config.rollout.n, data_ranks(config)
    prompts = {
        "annotation": config.data.train_batch_size,
        "update of the actor": config.actor.ppo_mini_batch_size,
        "update of the critic": config.critic.ppo_mini_batch_size,
    }[phase]
    # Full rows: the longest prompt, and as many response tokens as fit.
    longest = config.data.max_prompt_length + config.data.max_response_length
    at_once, length = _choose_rows(longest, prompts * n, n, ranks, budget)
    response = max(1, length - config.data.max_prompt_length)
    prompt = length - response
    count = min(prompts * n, TURNS * at_once * ranks)
    group_B = torch.arange(count) // min(n, at_once)  # a larger group is cut where it is full
    ids_BL = torch.zeros(count, prompt + response, dtype=torch.int64)
    ids_BL[:, 0] = group_B  # rows of a group have one prompt
    numbers_BT, ones_B = torch.zeros(count, response), torch.ones(count, dtype=torch.bool)
    return TrainBatch(
        input_ids_BL=ids_BL,
        prompt_len_B=torch.full((count,), prompt),
        response_len_B=torch.full((count,), response),
        response_mask_BT=torch.ones(count, response, dtype=torch.bool),
        sampler_logprobs_BT=numbers_BT,
        group_B=group_B,
        weight_version_B=torch.full((count,), -1),
        old_logprobs_BT=numbers_BT,
        entropy_BT=numbers_BT,
        ref_logprobs_BT=numbers_BT,
        full_kl_BT=None,
        values_BT=numbers_BT,
        scores_B=torch.zeros(count),
        valid_B=ones_B,
        token_rewards_BT=numbers_BT,
        advantages_BT=numbers_BT,
        returns_BT=numbers_BT,
        is_weight_BT=numbers_BT,
    )


def _choose_rows(
    longest: int, row_count: int, n: int, ranks: int, budget: Budget
) -> tuple[int, int]:
    """Return the number of rows that fill a micro-batch, and their length.

    Rows of the longest length fill a budget that is a multiple of it. Otherwise packed rows fill
    it with more and shorter rows, of equal length so that they are distributed evenly.
    """
    # Candidates: number of rows in a micro-batch -> their length.
    full = max(1, min(budget.tokens // longest, budget.rows or budget.tokens))
    step = n if budget.shared and full >= n else 1  # rows of one prompt come together
    choices = {full // step * step: longest}
    packed_rows = -(-budget.tokens // (longest * step)) * step
    if budget.packed and packed_rows <= (budget.rows or packed_rows):
        choices[packed_rows] = min(longest, budget.tokens // packed_rows)

    def fill(rows: int) -> int:
        count = min(row_count, TURNS * rows * ranks)
        turns = -(-count // (rows * ranks))
        return -(-count // (turns * ranks)) * choices[rows]

    at_once = max(choices, key=fill)
    return at_once, choices[at_once]


@contextmanager
def _without_numbers(simulator: Simulator) -> Iterator[None]:
    """Context without file reads and comparisons of numbers, on the simulated device."""

    # Replacements of the learner's functions.
    namespace: Any = learner

    def choose(_: Any, dtype: str | None) -> Compute:
        return Compute(DEVICE, getattr(torch, dtype or "bfloat16"))

    def load_empty(load: Any, path: str, *, empty: bool = False, **options: Any) -> Any:
        loaded = load(path, empty=True, **options)
        _put_on_host(loaded.model, simulator)
        return loaded

    def adapt_empty(*args: Any) -> Callable[[nn.Module], nn.Module] | None:
        """Replace `adapt`: return a function that adds an adapter without numbers, or None."""
        inject = adapt(*args)
        if inject is None:
            return None

        def inject_empty(model: nn.Module) -> nn.Module:
            with torch.device("meta"):
                adapted: nn.Module = inject(model)
            _put_on_host(adapted, simulator)
            return adapted

        return inject_empty

    # The originals, which the replacements call.
    adapt = namespace.adapt
    memo = simulator.fakes.fake_tensor_converter.meta_converter.tensor_memo
    swap: Any = torch.utils.swap_tensors

    def swap_tensors(tensor: Tensor, other: Tensor) -> None:
        memo.clear()  # it holds weak references to fake tensors, with which none can be swapped
        swap(tensor, other)

    def allocate_host(tensors: Sequence[Tensor], *, pinned: bool) -> list[Tensor]:
        return [simulator.like(tensor, torch.device("cpu")) for tensor in tensors]

    with ExitStack() as stack:
        for owner, name, value in (
            (torch.utils, "swap_tensors", swap_tensors),
            (Compute, "choose", classmethod(choose)),
            (namespace, "load_policy", partial(load_empty, namespace.load_policy)),
            (namespace, "load_value_model", partial(load_empty, namespace.load_value_model)),
            (namespace, "adapt", adapt_empty),
            # The kernel of packed rows is assumed to be exact.
            (packing, "_try_gradients", lambda *_: ""),
            (attention, "has_packed_kernel", lambda device: device.type == NAME),
            (host_memory, "allocate_host", allocate_host),
            (gathered, "allocate_host", allocate_host),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def _put_on_host(model: nn.Module, simulator: Simulator) -> None:
    """Replace tensors on the meta device by fake host tensors; tied ones stay tied."""
    placed: dict[int, tuple[Tensor, Tensor]] = {}  # the old tensors live on, and with them their id
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in placed:
                    fresh = simulator.like(tensor, torch.device("cpu"))
                    if isinstance(tensor, nn.Parameter):
                        fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
                    placed[id(tensor)] = (fresh, tensor)
                tensors[name] = placed[id(tensor)][0]  # type: ignore[assignment]


@contextmanager
def _masks_as_packed(packed: bool) -> Iterator[None]:
    """Context in which transformers detects packed sequences only if rows are packed.

    It detects them by the values of positions, which do not exist here.
    """
    if packed:
        yield
        return
    with patch.object(masking_utils, "find_packed_sequence_indices", lambda positions: None):
        yield


def _positive(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in sorted(counts.items(), key=lambda at: -at[1]) if size > 0}


def main() -> None:
    """Simulate the config of the first request."""
    channel = Channel()
    number, data = next(iter(channel))
    try:
        config = Config.model_validate_json(data)
        answer = asdict(simulate(config, lambda line: channel.send(number, line.encode(), PART)))
    except PpoError as error:
        answer = {"problem": str(error)}
    channel.send(number, json.dumps(answer).encode())
    # Exit without cleanup: autograd's threads cannot be joined with a device written in Python.
    os._exit(0)


if __name__ == "__main__":
    main()
