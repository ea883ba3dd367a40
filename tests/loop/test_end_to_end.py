"""Real PPO runs on the embedded model, as a user starts them: they learn, stop and go on."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from tests.forked import run_forked
from tests.loop.runs import (
    SMALL,
    assert_same_run,
    environment,
    hidden,
    metrics,
    rows,
    start,
    start_slow,
    train,
    train_killed_halfway,
    undocumented,
    wait_for,
)

pytestmark = pytest.mark.slow  # whole runs


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    train(out, *SMALL, fresh=True)
    return out


def test_killed_and_resumed_equals_uninterrupted(uninterrupted: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train_killed_halfway(out, *SMALL)
    assert_same_run(uninterrupted, out)


def test_killed_while_saving_it_goes_on_from_the_save_before(
    uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed" / "run"
    process = start_slow(out, *SMALL, hold=600)
    try:
        # Step 5 is trained, and 6 begun, while step 4 is still being written.
        wait_for(out / "rollouts" / "step_000006.jsonl", process)
        assert (tmp_path / "killed" / "held").exists()
        (hidden_file,) = hidden(out)
        assert hidden_file.endswith("-step_000004")
        assert os.readlink(out / "checkpoints" / "latest") == "step_000002"
    finally:
        process.kill()
        process.communicate()
    assert "Going on after step 2" in train(out, *SMALL).stdout
    assert hidden(out) == []
    assert_same_run(uninterrupted, out)


def test_a_signal_finishes_the_step_and_tells_how_to_go_on(
    uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = start(out, *SMALL)
    wait_for(out / "rollouts" / "step_000001.jsonl", process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=800)
    assert process.returncode == 3, output
    assert "SIGTERM" in output and f"--output_dir {out}" in output and "Traceback" not in output
    train(out, *SMALL)
    assert_same_run(uninterrupted, out)


def test_a_complete_run_says_so_and_stays_as_it_is(uninterrupted: Path) -> None:
    before = metrics(uninterrupted)
    output = train(uninterrupted, *SMALL)
    assert "This run is complete: 8 of 8 steps" in output.stdout
    assert metrics(uninterrupted) == before


def test_a_learning_rate_that_jumps_when_a_run_is_made_longer_is_announced(
    uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(uninterrupted, out, symlinks=True)
    longer = [*SMALL, "--max_steps", "12", "--save_freq", "12", "--output_dir", str(out)]
    # Half cosines at 7/8 and 8/12, times the peak of 1e-4.
    jump = "the actor's learning rate rises from 3.8e-06 at step 8 to 2.5e-05 at step 9"
    planned = run_forked(["plan", *longer], environment(), timeout=300)
    assert planned.returncode == 0 and jump in " ".join(planned.stdout.split())
    assert jump in " ".join(train(out, *longer).stdout.split())
    assert metrics(out)[-4]["actor/lr"] == pytest.approx(2.5e-5)


def test_metrics_are_documented_and_the_first_step_has_no_kl_and_nothing_unmeasured(
    uninterrupted: Path,
) -> None:
    assert undocumented(uninterrupted) == set()
    first = metrics(uninterrupted)[1]
    assert first["step"] == 1 and abs(first["kl_divergence"]) < 1e-6
    assert not {"rollout/logprob_diff", "rollout/mismatch_kl"} & first.keys()


def test_a_run_on_sums_scores_them_right_and_takes_the_rows_that_it_should(
    uninterrupted: Path,
) -> None:
    """Each score by the sum itself; the order of rows is promised on every machine."""
    values = []
    for step in range(1, 9):
        responses = rows(uninterrupted, step)
        values.append([int(row["uid"].rpartition(":")[2]) for row in responses[::2]])
        for row in responses:
            expected = sum(int(word) for word in re.findall(r"\d+", row["prompt"]))
            assert row["ground_truth"] == str(expected)
            assert row["score"] == float(row["response"].strip() == str(expected)), row
    args = np.random.PCG64([42, 0]).random_raw(36)  # numpy promises these words for good
    first = np.argsort(args, kind="stable").tolist()
    assert [uid - min(map(min, values)) for step in values[:4] for uid in step] == first[:32]
    assert set(values[4][:4]) == {min(map(min, values)) + i for i in first[32:]}
    lines = metrics(uninterrupted)
    assert [line["step"] for line in lines if "val/reward_mean" in line] == [0, 4, 8]
    rates = [line["actor/lr"] / lines[1]["actor/lr"] for line in lines[1:]]
    assert rates == pytest.approx(
        [1, 0.9619, 0.8536, 0.6913, 0.5, 0.3087, 0.1464, 0.0381], abs=1e-4
    )


def test_saved_actor_loads_and_generates(uninterrupted: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = uninterrupted / "checkpoints" / "latest" / "actor"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is 12 + 13?"}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    reply = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(reply, skip_special_tokens=True).strip().isdigit()


def test_the_embedded_run_learns(tmp_path: Path) -> None:
    """The default command, cut to 24 of its 40 steps, must already be plainly better.

    The critic has learned which prompts are hard, and there is nothing to warn of.
    """
    done = train(tmp_path / "run", "--preset", "embedded", "--max_steps", "24")
    lines = metrics(tmp_path / "run")
    assert lines[-1]["val/accuracy"] >= lines[0]["val/accuracy"] + 0.15
    assert fmean(line["explained_variance"] for line in lines[-5:]) > 0.1
    assert "accuracy" in done.stdout and "curve" in done.stdout
    assert "explained variance 0." in done.stdout and "warning" not in done.stdout


@pytest.mark.parametrize(
    ("estimator", "loss"),
    [
        ("grpo", "gspo"), ("remax", "clip_cov"),
        *(pytest.param(*pair, marks=pytest.mark.weekly) for pair in (
            ("rloo", "cispo"), ("opo", "kl_cov"), ("reinforce_plus_plus", "geo_mean"),
            ("gpg", "gpg"),
        )),
    ],
)  # fmt: skip
def test_estimators_without_a_critic_run(estimator: str, loss: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    args = (*SMALL, "--adv_estimator", estimator, "--policy_loss", loss, "--max_steps", "2")
    train(
        out, *args, "actor.use_kl_loss=true", "actor.kl_loss_type=full",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_penalty=full", "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.rollout_is_threshold=0.5",
    )  # fmt: skip
    assert not (out / "checkpoints" / "latest" / "critic").exists()
    last = metrics(out)[-1]
    assert "value_loss" not in last
    # Measured over the whole vocabulary, a KL is never negative beyond rounding.
    assert last["actor/kl_loss"] > 0 and last["kl/penalty"] > 0
    # Sampler and trainer agree, so that every weight of about 1 is truncated.
    assert last["rollout/is_weight_mean"] == 0.5


@pytest.mark.parametrize(
    "loss",
    ["dppo_tv", *(pytest.param(loss, marks=pytest.mark.weekly) for loss in ("dppo_kl", "sapo"))],
)
def test_the_variants_of_ppo_run(loss: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("actor.positive_nll_coef=0.1", "algorithm.subtract_group_mean=true")
    lambdas = ("--critic_lam", "1", "--lam_alpha", "0.5")
    train(out, *SMALL, "--policy_loss", loss, *lambdas, *options, "--max_steps", "3")
    assert all(line["actor/positive_nll"] > 0 for line in metrics(out)[1:])
    assert abs(metrics(out)[1]["returns/mean"]) < 0.1  # rewards have mean 0 in each group


def test_a_teacher_is_learned_from_without_the_score(tmp_path: Path) -> None:
    """The trained model teaches the untrained one, which comes near it."""
    embedded = ("--preset", "embedded", "--max_steps", "12")
    train(tmp_path / "teacher", *embedded)
    taught = tmp_path / "taught"
    train(
        taught, *embedded, "--ref_model", str(tmp_path / "teacher/checkpoints/latest/actor"),
        "--adv_estimator", "reinforce_plus_plus", "--gamma", "0", "--kl_coef", "1",
        "algorithm.score_coef=0",
    )  # fmt: skip
    lines = metrics(taught)
    assert lines[-1]["kl_divergence"] < lines[1]["kl_divergence"] / 2
    assert lines[-1]["val/accuracy"] >= lines[0]["val/accuracy"] + 0.1


def test_a_disk_that_is_full_is_told_while_training_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "full" / "run"
    process = start_slow(out, *SMALL, "--max_steps", "6", hold=0.5, FULL="1")
    output = process.communicate(timeout=800)[0]
    assert process.returncode == 2
    assert "checkpoint of step 4 could not be written" in output and output.count("error: ") == 1
    assert "Traceback" not in output
    assert hidden(out) == []
    assert sorted(p.name for p in (out / "checkpoints").glob("step_*")) == ["step_000002"]


def test_stopped_while_writing_all_is_saved_when_it_says_so(tmp_path: Path) -> None:
    out = tmp_path / "stopped" / "run"
    process = start_slow(out, *SMALL, hold=1.0)
    wait_for(tmp_path / "stopped" / "held", process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=800)[0]
    assert process.returncode == 3, output
    saved = re.search(r"Everything up to step (\d) of 8 is saved", output)
    assert saved, output
    assert hidden(out) == []
    assert os.readlink(out / "checkpoints" / "latest") == f"step_00000{saved.group(1)}"
    assert (out / "checkpoints" / "step_000004" / "state" / "run.json").exists()


def test_a_run_that_is_killed_in_its_first_save_leaves_no_partial_checkpoint(
    tmp_path: Path,
) -> None:
    out, first = tmp_path / "killed" / "run", ("--save_freq", "4", "--max_steps", "4")
    process = start_slow(out, *SMALL, *first, hold=60.0)
    wait_for(tmp_path / "killed" / "held", process)
    process.kill()
    process.communicate()
    assert hidden(out) != []
    train(out, *SMALL, *first)
    assert (out / "checkpoints" / "step_000004").is_dir()
    assert (out / "earlier_1" / "metrics.jsonl").exists()
    assert list(out.rglob(".unfinished-*")) == []
