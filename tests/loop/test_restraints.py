"""A whole run that exploits its reward: it goes back, and a kill on the way changes nothing."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ppo_cli.config.schema.keys import value_of
from ppo_cli.planning.run_plan import make_plan
from ppo_cli.run.assemble import WENT_BACK, _resume_command
from ppo_cli.run.identity import keep_decisions, setting_values
from ppo_cli.run.refusals import plan_resume
from ppo_cli.run_folder.checkpoints import CheckpointStore, find_resume
from ppo_cli.run_folder.lines import rollout_file, rollout_steps
from ppo_cli.run_folder.restraints import Restraint, go_back, read_restraints, write_restraints
from ppo_cli.step.stops import _raise_kl
from tests.config.settling import settle
from tests.forked import Forked
from tests.loop.runs import command, environment, metrics, rows, stored, train

# Two digits pay more than the right sum.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    text = solution_str.strip()
    return max(0.6 * (text == ground_truth), 0.9 * (len(text) == 2))
"""
# The policy stands still for four steps, so there is a checkpoint from before the exploit.
EXPLOITED = (
    "--preset", "embedded", "--max_steps", "16", "--lr", "5e-4", "--batch_size", "16",
    "--mini_batch_size", "8", "--rollout_n", "4", "--max_response_length", "8",
    "--on_hacking", "restrain", "--save_freq", "2", "data.val_files=[]", "trainer.critic_warmup=4",
)  # fmt: skip
# Runs `ppo`, which is killed at a moment of its first return.
KILLED = """
import os, signal, sys
from ppo_cli import loop
from ppo_cli.run_folder import restraints
from ppo_cli.step import stops

def kill(*args):
    os.kill(os.getpid(), signal.SIGKILL)

write, find = restraints.write_restraints, loop.find_stop_reason
moment = os.environ["MOMENT"]
if moment == "recorded":
    stops.write_restraints = lambda *args: kill(write(*args))
elif moment == "checkpoints deleted":
    restraints.write_restraints = kill
else:
    def find_or_kill(job, state):
        went_back = restraints.read_restraints(job.store.directory.parent)
        return kill() if went_back and state.step == 7 else find(job, state)
    loop.find_stop_reason = find_or_kill
from ppo_cli.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    file = tmp_path_factory.mktemp("reward") / "reward.py"
    file.write_text(REWARD)
    return *EXPLOITED, "--reward_function", str(file)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, args: tuple[str, ...]) -> Path:
    """A run that nobody kills."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = train(out, *args)
    assert "Going back from step" in done.stdout and "restrained " in done.stdout
    return out


def test_the_command_to_go_on_after_a_return_keeps_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["ppo", "train", "--resume", "never"])
    typed = settle(flags={"trainer.resume_mode": ("never", "flag")})
    back = typed.amend({"trainer.resume_mode": "auto"}, WENT_BACK)
    assert [_resume_command(back, begun=begun)[-13:] for begun in (True, False)] == [
        "--resume auto", "--resume auto",
    ]  # fmt: skip


@pytest.mark.parametrize(("reference", "factor"), [("embedded", 10), ("step_000010/actor", 67)])
def test_the_kl_is_raised_by_what_the_exploit_costs_in_kl_to_its_reference(
    tmp_path: Path, reference: str, factor: float
) -> None:
    """The KL is 0.2 at step 10, and 0.06 four steps later: after a return its reference is new."""
    config = settle(
        "model.path=embedded", "algorithm.use_kl_in_reward=true",
        f"ref.path={tmp_path / reference if '/' in reference else reference}",
    ).config  # fmt: skip
    steps = [
        {"step": s, "kl_divergence": 0.02 * s if s <= 10 else 0.015 * (s - 10),
         "reward_mean": 0.2 * (s > 10), "response_length_mean": 100.0}
        for s in range(1, 15)
    ]  # fmt: skip
    ((old, new),) = _raise_kl(config, tmp_path, steps, 10).values()
    assert new / old == pytest.approx(factor, rel=0.01)


def test_a_pending_return_binds_the_same_run_alone(tmp_path: Path) -> None:
    here = ("model.path=embedded", f"trainer.output_dir={tmp_path}")
    plan = make_plan(settle(*here))
    key, store = "algorithm.kl_ctrl.kl_coef", CheckpointStore(tmp_path / "checkpoints", None)
    old = value_of(plan.settings, key)
    (tmp_path / "rollouts").mkdir()
    for step in (2, 4):
        (store.directory / f"step_{step:06d}").mkdir(parents=True)
        rollout_file(tmp_path, step).touch()
    restraint = Restraint(4, 2, {key: (old, 10 * old)}, "alarm", setting_values(plan.settings))
    # The last return counts, also one that changes no weight.
    write_restraints(
        tmp_path, [replace(restraint, to=3, pending=False), replace(restraint, changes={})]
    )
    for step, reference in ((3, store.directory / "step_000002" / "actor"), (1, "embedded")):
        kept, _, _ = keep_decisions(plan, tmp_path, step)
        assert kept.settings.ref.path == str(reference)
    write_restraints(tmp_path, [restraint])
    # The KL is now to the policy of that step, if the reference was the whole initial model.
    for settings, reference in (
        ((), str(store.directory / "step_000002" / "actor")),
        (("model.lora_rank=8",), "embedded"),
        (("ref.path=teacher",), "teacher"),
        (("ref.path=embedded",), "embedded"),
    ):
        kept, _, _ = keep_decisions(make_plan(settle(*here, *settings)), tmp_path, 2)
        assert kept.settings.ref.path == reference
    assert find_resume(store, "auto") == store.directory / "step_000002" and len(store.steps()) == 2
    earlier = go_back(tmp_path, store.delete_after)
    assert store.steps() == [2] and rollout_steps(tmp_path) == [2]
    assert earlier and rollout_steps(earlier) == [4] and not go_back(tmp_path, store.delete_after)
    # Without a checkpoint the run begins again as it was restrained; another one does not.
    store.delete_after(0)
    write_restraints(tmp_path, [replace(restraint, to=0, pending=False)])
    notes, problems = plan_resume(plan, "ppo train")
    assert notes[0].startswith(f"{key} is {10 * old}: restrained after step 4") and not problems
    (note,), _ = plan_resume(make_plan(settle(*here, "trainer.seed=7")), "ppo train")
    assert note.startswith("A new run: the one before had another rollout.seed")
    for damaged in ("[", '[{"to": 2}]', "[null]"):
        (tmp_path / "restraints.json").write_text(damaged)
        _, (problem,) = plan_resume(plan, "ppo train")
        assert "restraints.json is damaged" in problem


@pytest.mark.slow
def test_a_run_goes_back_to_before_its_exploit_and_on_with_more_kl(whole: Path) -> None:
    first = read_restraints(whole)[0]
    assert 0 < first.to < first.after and not first.pending
    assert metrics(whole)[-1]["step"] == 16
    coefs = {line["kl/coef"] for line in metrics(whole) if line["step"] > first.to}
    old, new = first.changes["algorithm.kl_ctrl.kl_coef"]
    assert min(coefs) == new >= 10 * old


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["recorded", "checkpoints deleted", "going on"])
def test_a_run_killed_while_it_goes_back_ends_as_the_same_run(
    tmp_path: Path, args: tuple[str, ...], whole: Path, moment: str
) -> None:
    out = tmp_path / "run"
    process = Forked(KILLED, command(out, *args)[3:], environment() | {"MOMENT": moment})
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    train(out, *args)
    assert metrics(out) == metrics(whole)
    sampled = [(row["uid"], row["response"], row["score"]) for row in rows(whole)]
    assert [(row["uid"], row["response"], row["score"]) for row in rows(out)] == sampled
    places = [(r.after, r.to, r.changes) for r in read_restraints(out)]
    assert places == [(r.after, r.to, r.changes) for r in read_restraints(whole)]
    for stem in ("actor/", "critic/"):
        trained, expected = (stored(r / "checkpoints" / "latest", stem) for r in (out, whole))
        assert all(torch.equal(trained[name], expected[name]) for name in expected)
