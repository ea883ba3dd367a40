"""Real runs under Ray on the CPU: two ranks train as one process does, in every arrangement."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ppo_cli.config.models.bundled import model_folder
from tests.loop.runs import metrics, rows, stored, train
from tests.loop.test_profile import PHASES, phases

pytestmark = pytest.mark.slow

# Four steps of two mini-batches: 8 optimizer steps of actor and of critic. Where a gradient is
# nothing but rounding (key biases cancel in the softmax), Adam still makes steps of the size of
# the learning rate, so with the preset's own of 1e-4 and 1e-3 single elements go their own way.
FOUR = (
    "--preset", "embedded", "--batch_size", "8", "--mini_batch_size", "4", "--rollout_n", "2",
    "--max_steps", "4", "--save_freq", "2", "--test_freq", "4",
    "--max_response_length", "8", "data.val_max_samples=16", "trainer.val_before_train=false",
    "--lr", "1e-5", "--critic_lr", "1e-5",
)  # fmt: skip
TWO = ("--engine", "ray", "--num_workers", "2")
OFFLOADED = (
    "actor.fsdp_config.param_offload=true", "actor.fsdp_config.optimizer_offload=true",
    "critic.fsdp_config.param_offload=true", "critic.fsdp_config.optimizer_offload=true",
    "ref.param_offload=true",
)  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    train(out, *FOUR)
    return out


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pair") / "run"
    shown = train(out, *FOUR, *TWO, "--profile", "2").stdout
    out.with_name("shown").write_text(shown)
    return out


def assert_same_weights(a: Path, b: Path, *, within: float = 1e-5) -> None:
    for model in ("actor", "critic"):
        weights_a, weights_b = (
            stored(out / "checkpoints" / "latest", f"{model}/") for out in (a, b)
        )
        assert weights_a.keys() == weights_b.keys()
        gap = max((weights_a[name] - weights_b[name]).abs().max().item() for name in weights_a)
        assert gap <= within, f"{model}: {gap}"


def assert_same_numbers(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
    """Metrics equal to rounding; extremes of single tokens and machine facts left out."""
    for row_a, row_b in zip(a, b, strict=True):
        for name in (
            "step", "reward_mean", "policy_loss", "value_loss", "clip_fraction", "ppo_ratio",
            "entropy", "grad_norm", "critic_grad_norm", "kl_divergence", "explained_variance",
            "response_length_mean", "actor/lr", "critic/lr",
        ):  # fmt: skip
            assert row_b[name] == pytest.approx(row_a[name], rel=2e-4, abs=2e-6), name


def copy_before(run: Path, out: Path, step: int) -> None:
    """Copy a run without its last checkpoint, that of this step."""
    shutil.copytree(run, out, symlinks=True)
    shutil.rmtree(out / "checkpoints" / f"step_{step:06d}")
    (out / "checkpoints" / "latest").unlink()


def assert_same_training(a: Path, b: Path) -> None:
    assert_same_weights(a, b)
    assert len(rows(a)) == 4 * 16
    for row_a, row_b in zip(rows(a), rows(b), strict=True):
        assert (row_a["response"], row_a["score"]) == (row_b["response"], row_b["score"])
    assert_same_numbers(metrics(a), metrics(b))


def test_two_ranks_train_as_one_process(alone: Path, pair: Path) -> None:
    begun = load_file(Path(model_folder("embedded")) / "model.safetensors")
    trained = stored(alone / "checkpoints" / "latest", "actor/")
    assert max((trained[name] - begun[name].float()).abs().max() for name in trained) > 5e-5
    assert_same_training(alone, pair)


def test_every_process_writes_its_own_profile(pair: Path) -> None:
    shown = pair.with_name("shown").read_text()
    traces = {path.name: path for path in (pair / "profile").iterdir()}
    processes = ("rank_0", "rank_1", "sampler_0")
    assert set(traces) == {
        f"step_000002.{p}.{end}" for p in processes for end in ("json.gz", "txt")
    }
    for rank in (0, 1):
        assert phases(traces[f"step_000002.rank_{rank}.json.gz"]) == set(PHASES[1:])
    assert phases(traces["step_000002.sampler_0.json.gz"]) == {"rollout"}
    for process in ("rank_0", "sampler_0"):
        assert traces[f"step_000002.{process}.txt"].read_text().rstrip() in shown


@pytest.mark.weekly
def test_two_ranks_that_share_layers_and_keep_all_in_host_memory_train_as_one_process(
    alone: Path, tmp_path: Path
) -> None:
    train(tmp_path / "run", *FOUR, *TWO, *OFFLOADED, "--tensor_parallel_size", "2")
    assert_same_training(alone, tmp_path / "run")


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.weekly)])
def test_a_checkpoint_of_two_ranks_goes_on_with_others(
    pair: Path, tmp_path: Path, ranks: int
) -> None:
    out = tmp_path / "run"
    copy_before(pair, out, 4)
    others = () if ranks == 1 else ("--engine", "ray", "--num_workers", str(ranks))
    output = train(out, *FOUR, *others).stdout
    assert "Going on after step 2" in output
    assert_same_training(pair, out)


@pytest.mark.weekly
def test_roles_that_share_some_devices_train_as_roles_that_share_all(
    reward_model: Path, tmp_path: Path
) -> None:
    judged = ("--reward_model", str(reward_model), "--reward_model_self_test", "off")
    short = (*FOUR, *judged, "--engine", "ray", "--max_steps", "2", "--save_freq", "2")
    # The second one's first sampler sleeps while its device trains, the other one does not.
    placements = {"all": "train:0-1,rollout:0-1,reward:1", "some": "train:0-1,rollout:1-2,reward:2"}
    for name, placement in placements.items():
        train(tmp_path / name, *short, "--placement", placement)
    assert_same_weights(tmp_path / "all", tmp_path / "some")
    assert_same_numbers(metrics(tmp_path / "all"), metrics(tmp_path / "some"))
    assert rows(tmp_path / "all") == rows(tmp_path / "some")


def test_partial_rollouts_go_on_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    ahead = (*FOUR, "--engine", "ray", "--async_steps", "2", "--partial_tokens", "1")
    uninterrupted, out = tmp_path / "whole", tmp_path / "run"
    train(uninterrupted, *ahead)
    copy_before(uninterrupted, out, 4)
    assert "Going on after step 2" in train(out, *ahead).stdout
    assert_same_weights(uninterrupted, out, within=0)
    assert rows(uninterrupted) == rows(out)
    expected, resumed = metrics(uninterrupted), metrics(out)
    for name in ("rollout/staleness_max", "rollout/carried_share", "rollout/logprob_diff_max"):
        assert [line.get(name) for line in expected] == [line.get(name) for line in resumed]
    assert [line["rollout/staleness_max"] for line in expected] == [0, 1, 2, 2]
    carried = [line["rollout/carried_share"] for line in expected]
    assert carried[0] == 0 and min(carried[1:]) > 0.5
