"""The simulated device: bytes worked out by hand, and torch's own tracker of FSDP's memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_cli.engine.batches.micro_batches import Budget, plan_rank_micro_batches
from ppo_cli.engine.batches.rows import row_lengths, row_prompts
from ppo_cli.engine.ranks import Ranks
from ppo_cli.extras.lab.simulation.counters import CollectiveCounter
from ppo_cli.extras.lab.simulation.steps import make_batch
from ppo_cli.planning.memory.plan import with_settings
from tests.extras.lab.simulated_steps import (
    BUDGET,
    HIDDEN,
    INNER,
    KEYS,
    LAYERS,
    RANK,
    VOCABULARY,
    WIDE_RANK,
    make_config,
)
from tests.forked import SCRIPT, run_forked

KEY_WIDTH = KEYS * 64
LAYER = 2 * HIDDEN**2 + 2 * HIDDEN * KEY_WIDTH + 3 * HIDDEN * INNER + 2 * HIDDEN
PARAMETERS = 2 * VOCABULARY * HIDDEN + LAYERS * LAYER + HIDDEN
TENSORS = LAYERS * 9 + 3
FREQUENCIES = 2 * 32 * 4  # of rotary positions: 32 of a head, and their first values


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = Path(__file__).with_name("simulated_steps.py")
    folder = tmp_path_factory.mktemp("llama")
    done = run_forked([str(script), str(folder)], os.environ, 600, SCRIPT)
    assert done.returncode == 0, done.stderr
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


@pytest.mark.slow
def test_one_layer_takes_its_rows_its_weights_and_their_gradient(report: dict[str, Any]) -> None:
    weights, rows, scalars = 4 * 64 * 32, 4 * 16 * 32, 2 * 4  # the loss and its gradient
    assert report["one layer"] == {
        "rest": weights + rows,
        "peak": 2 * weights + rows + scalars,
        "after": 2 * weights + rows,
        # Two products; the sum, and the gradient of the loss, a 1 for the loss.
        "launches": 4,
        "flops": 2 * (2 * 16 * 32 * 64),
        "product_bytes": 2 * (weights + rows + 4 * 16 * 64),
        "other_bytes": 4 * 16 * 64 + 4 + 2 * 4,
    }


@pytest.mark.slow
def test_autocast_keeps_the_copy_of_a_trained_weight_until_it_ends(report: dict[str, Any]) -> None:
    weights, rows, copy = 4 * 64 * 32, 4 * 16 * 32, 2 * 64 * 32
    assert report["cast"] == {
        "trained, inside": weights + rows + copy,
        "trained, after": weights + rows,
        "frozen, inside": weights + rows,
        "frozen, after": weights + rows,
    }


@pytest.mark.slow
def test_the_backward_pass_of_silu_makes_nothing_but_its_gradient(report: dict[str, Any]) -> None:
    rows, scalars = 4 * 16 * 32, 2 * 4  # the loss and its gradient
    assert report["gated unit"] == 2 * rows + scalars


@pytest.mark.slow
def test_torchs_current_stream_waits_for_events_of_the_device(report: dict[str, Any]) -> None:
    # FSDP2 asks torch.accelerator for it where a gathered layer has no backward pass.
    assert report["waits"] == 20


@pytest.mark.slow
def test_the_counters_watch_tensors_with_numbers_too(report: dict[str, Any]) -> None:
    weights = 4 * 64 * 32
    # The product is freed before the loss exists to the counter, its gradient with the pass.
    assert report["on the CPU"]["after"] == 2 * weights
    assert report["on the CPU"]["during"] == weights + 4


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_rank_holds_its_share_of_weights_gradients_and_moments(
    report: dict[str, Any], ranks: int
) -> None:
    measured = report[str(ranks)]
    at_rest = measured["rest_by_maker"]
    frequencies = FREQUENCIES if ranks > 1 else 0  # one rank lists them as activations
    assert at_rest["parameters"] == 4 * PARAMETERS // ranks + frequencies
    assert at_rest["moments"] == 8 * PARAMETERS // ranks + 4 * TENSORS
    assert measured["gradients"] == [4 * PARAMETERS // ranks]


@pytest.mark.slow
def test_an_adapter_trains_alone_and_its_moments_are_in_host_memory(report: dict[str, Any]) -> None:
    measured = report["adapter, offloaded"]
    inputs = 6 * HIDDEN + INNER
    outputs = 3 * HIDDEN + 2 * KEY_WIDTH + 2 * INNER
    # Of the 4 rows of A that 8 ranks share, rank 0 has one, and an eighth of the rows of B.
    adapter_size = LAYERS * (inputs + RANK * outputs // 8)
    assert measured["gradients"] == [4 * adapter_size]
    assert measured["host_rest_bytes"] == 8 * adapter_size
    assert measured["rest_by_maker"]["moments"] == 4 * LAYERS * 7 * 2  # counts of steps


@pytest.mark.slow
def test_an_adapter_takes_no_memory_of_this_machine_while_models_load(
    report: dict[str, Any],
) -> None:
    loaded = report["wide adapter"]
    adapter = 4 * LAYERS * WIDE_RANK * (9 * HIDDEN + 2 * KEY_WIDTH + 3 * INNER)
    assert loaded["simulated"] > adapter // 2  # of 2 ranks
    assert loaded["real"] < adapter


@pytest.mark.parametrize("budget", [1100, 3000, 16_384, 18_432])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("ranks", [1, 8])
def test_two_micro_batches_of_each_rank_fill_a_budget_of_any_size(
    budget: int, shared: bool, ranks: int
) -> None:
    config = with_settings(
        make_config("unused", ranks), {"data.max_response_length": 960, "rollout.n": 8}
    )
    packed = Budget(budget, packed=True, shared=shared)
    batch = make_batch(config, "update of the actor", packed)
    lengths = row_lengths(batch)
    assert max(lengths) <= 1024
    prompts = row_prompts(batch.input_ids_BL, batch.prompt_len_B)
    for rank in range(ranks):
        places = Ranks(rank, ranks)
        plan = plan_rank_micro_batches(lengths, packed, places, prompts)
        assert len(plan) == 2
        for rows in plan:
            assert 0.99 * budget < sum(lengths[row] for row in rows) <= budget


@pytest.mark.slow
def test_a_micro_batch_is_reported_as_full_as_it_was(report: dict[str, Any]) -> None:
    phase = report["adapter, offloaded"]["phases"]["update of the actor"]
    assert phase["micro_batch_tokens"] == BUDGET


@pytest.mark.slow
def test_all_experts_have_gradients_in_full(report: dict[str, Any]) -> None:
    hidden, inner, experts, heads, keys, head = 32, 24, 4, 4, 2, 8
    attention = 2 * hidden * head * (heads + keys) + 2 * head
    layer = attention + experts * hidden + experts * 3 * inner * hidden + 2 * hidden
    assert report["experts"]["gradients"] == [4 * (2 * 282 * hidden + 2 * layer + hidden)]


@pytest.mark.slow
def test_a_micro_batch_gathers_each_group_twice_and_reduces_it_once(report: dict[str, Any]) -> None:
    collectives = report["8"]["phases"]["update of the actor"]["collectives"]
    groups, half = LAYERS + 1, 2 * PARAMETERS
    assert collectives["all-gather"] == {"calls": 2 * groups, "bytes": 2 * half}
    assert collectives["reduce-scatter"] == {"calls": groups, "bytes": 4 * PARAMETERS}


def test_to_wait_for_a_collective_is_none() -> None:
    collectives, tensor = CollectiveCounter(), torch.zeros(4, device="meta")
    functional = torch.ops._c10d_functional
    collectives.record(functional.all_reduce.default, [tensor, "sum", "0"])
    collectives.record(functional.wait_tensor.default, [tensor])
    assert collectives.summarise() == {"all-reduce": {"calls": 1, "bytes": 16}}


@pytest.mark.slow
def test_the_peak_is_that_of_torchs_tracker(report: dict[str, Any]) -> None:
    peaks = report["trackers"]
    assert peaks["ours"] == peaks["torch's"] > 4 * PARAMETERS
