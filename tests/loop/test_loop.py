"""What the loop asks of its engine and reward, setting by setting; nothing is trained here."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_cli import signals
from ppo_cli.engine.base import MiniBatch, Sampling, Sums
from ppo_cli.errors import Interrupted, UserError, WentBack, WorkerLost
from ppo_cli.loop import run
from ppo_cli.records import PlacedReward, Prompt, Rollout, Score
from ppo_cli.run.assemble import run_with_restarts
from ppo_cli.run_folder.restraints import go_back, read_restraints, write_restraints
from ppo_cli.step.saving import load
from tests.loop.scripted import LENGTH, Engine, Scoring, Script, Stage, is_greedy, number, who

Make = Callable[..., Script]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A script of 6 prompts a step with 2 responses each; settings by section."""

    def build(folder: str = "run", **sections: Any) -> Script:
        settings: dict[str, Any] = {
            "data": {"train_batch_size": 6, "max_response_length": 9},
            "rollout": {"n": 2},
            "actor": {"ppo_mini_batch_size": 2},
            "algorithm": {"use_kl_in_reward": False},
            "trainer": {"save_freq": -1},
        }
        options = {k: sections.pop(k) for k in tuple(sections) if k in Script.__dataclass_fields__}
        for name, extra in sections.items():
            settings[name] = settings.get(name, {}) | extra
        (tmp_path / folder).mkdir(exist_ok=True)
        return Script(tmp_path / folder, settings, **options)

    return build


def ran(script: Script, fails: type[Exception] | None = None) -> Stage:
    stage = script.build()
    if fails is None:
        run(stage.job, stage.state)
        return stage
    with pytest.raises(fails) as caught:
        run(stage.job, stage.state)
    stage.screen.notes.append(str(caught.value))
    return stage


def resume(script: Script, step: int) -> Stage:
    """Build the run again, and go on from its checkpoint of a step."""
    stage = script.build()
    run(stage.job, load(stage.job, stage.job.store.directory / f"step_{step:06d}"))
    return stage


def worth(prompt: int, sample: int) -> float:
    return prompt + sample / 10


def test_a_step_in_order_with_whole_mini_batches(make: Make) -> None:
    """Prompts times rollout.n rows each, every row once an epoch, the critic first."""
    script = make(
        steps=2, actor={"ppo_mini_batch_size": 2, "ppo_epochs": 2},
        critic={"ppo_mini_batch_size": 4, "ppo_epochs": 3},
        score=lambda rollout, step: worth(number(rollout.prompt), rollout.sample),
    )  # fmt: skip
    stage = ran(script)
    first = ["generate", "annotate", *["critic"] * 6, *["actor"] * 6, "publish"]
    assert stage.engine.calls == [*first, *first, "last save"]
    assert stage.reward.calls == [1, "train", 2, "train"]
    orders = []
    for role, sizes, epochs in (("critic", [8, 4], 3), ("actor", [4, 4, 4], 2)):
        for step in (1, 2):
            batches = stage.engine.batches(role, step)
            assert [len(batch) for batch in batches] == sizes * epochs
            values = [int(uid[1:]) for uid in stage.engine.samplings[step - 1][0]]
            every = [(prompt, sample) for prompt in values for sample in (0, 1)]
            per_epoch = len(sizes)
            for start in range(0, len(batches), per_epoch):
                rows = [row for b in batches[start : start + per_epoch] for row in who(b)]
                assert sorted(rows) == sorted(every)
                orders.append(tuple(every.index(row) for row in rows))
            for batch in batches:  # scores stay with their rows, however they came in
                scores = [worth(*row) for row in who(batch)]
                torch.testing.assert_close(batch.scores_B, torch.tensor(scores))
    assert len(set(orders)) == len(orders)  # another order for each step, epoch and model
    values = [uids for uids, _ in stage.engine.samplings]
    assert {*values[0], *values[1]} == {f"t{i}" for i in range(12)}
    assert stage.column("scripted/scored") == {1: 12, 2: 24}


def test_the_critics_mini_batch_is_the_actors_unless_set_and_order_may_stay(make: Make) -> None:
    stage = ran(make(steps=1, actor={"shuffle": False}, critic={"shuffle": False}))
    prompts = [int(uid[1:]) for uid in stage.engine.samplings[0][0]]
    for role in ("actor", "critic"):
        batches = stage.engine.batches(role)
        assert [row for batch in batches for row in who(batch)] == [
            (prompt, sample) for prompt in prompts for sample in (0, 1)
        ]
        assert [len(batch) for batch in batches] == [4, 4, 4]
    shuffled = ran(make("one", steps=1, critic={"shuffle": False}))
    assert [who(b) for b in shuffled.engine.batches("actor")] != [
        who(b) for b in stage.engine.batches("actor")
    ]
    assert [who(b) for b in shuffled.engine.batches("critic")] == [
        who(b) for b in stage.engine.batches("critic")
    ]


def test_pretraining_trains_the_critic_alone_and_an_outage_undoes_its_step(make: Make) -> None:
    outage = iter([False] * 30 + [True])  # in the third step of twelve responses

    def score(rollout: Rollout, step: int) -> float:
        if next(outage, False):
            raise Interrupted("The judge is down.")
        return worth(number(rollout.prompt), rollout.sample)

    script = make(steps=1, score=score, critic={"pretrain_steps": 4}, trainer={"save_freq": 1})
    stage = ran(script, fails=Interrupted)
    assert "The judge is down. 2 steps of critic pretraining are saved." in stage.screen.notes[-1]
    step = ["generate", "annotate", *["critic"] * 3, "save"]
    assert [c for c in stage.engine.calls if c != "last save"] == [*step, *step, *step[:2]]
    assert all(m.pretraining for _, m in stage.engine.minibatches)
    resumed = resume(script, 0)
    assert resumed.engine.calls == [
        "load", *step, *step, *step[:-1], *["actor"] * 3, "publish", "last save"
    ]  # fmt: skip
    assert [m.pretraining for _, m in resumed.engine.minibatches] == [True] * 6 + [False] * 6
    # A reward hears of no step, so that nothing which it does every so many steps is due.
    assert resumed.reward.calls == ["train", "train", 1, "train"]
    assert len(resumed.state.pretraining) == 0 and resumed.column("scripted/scored") == {1: 60}
    whole = ran(make("whole", steps=1, score=lambda r, s: worth(number(r.prompt), r.sample),
                     critic={"pretrain_steps": 4}))  # fmt: skip
    drawn = [s for of in (stage, resumed) for s in of.engine.samplings]
    assert drawn[:2] + drawn[3:] == whole.engine.samplings
    assert drawn[2] == whole.engine.samplings[2]  # what was undone is sampled again
    later = resume(script, 1)
    assert later.engine.calls == ["load"]


def test_how_training_and_validation_sample(make: Make) -> None:
    stop = ("END", "\n\n")
    rollout = {"temperature": 0.7, "top_p": 0.8, "top_k": 5, "n": 3, "stop": [*stop]}
    resumed = ran(make(rollout=rollout, steps=2, val_prompts=4, trainer={"test_freq": 1})).engine
    trained, validated = resumed.sampled("t"), resumed.sampled("v", greedy=True)
    seeds = [s.seed for s in trained]
    assert trained == [Sampling(0.7, 0.8, 5, 3, 9, seed, stop=stop) for seed in seeds]
    assert len(set(seeds)) == 2  # another draw each step
    assert len(validated) == 3 and set(validated) == {
        Sampling(0.0, 1.0, -1, 1, 9, validated[0].seed, stop=stop)
    }
    assert validated[0].seed not in seeds
    custom = {"temperature": 0.3, "top_p": 0.6, "top_k": 2, "n": 4}
    other = ran(
        make("seeded", rollout=rollout | {"seed": 5, "val_kwargs": custom}, steps=2, val_prompts=4)
    ).engine
    assert set(other.sampled("v")) == {Sampling(0.3, 0.6, 2, 4, 9, validated[0].seed, stop=stop)}
    assert not {s.seed for s in other.sampled("t")} & set(seeds)
    resumed = ran(make("again", rollout=rollout, steps=2)).engine
    assert [s.seed for s in resumed.sampled("t")] == seeds
    moved = ran(make("moved", rollout=rollout, steps=2, val_prompts=4, trainer={"seed": 7})).engine
    assert not {s.seed for _, s in moved.samplings} & {s.seed for _, s in resumed.samplings}


def test_remax_takes_the_greedy_score_of_each_rows_own_prompt(make: Make) -> None:
    """Both lose the same for their length, so that it does not show in the difference."""

    def score(rollout: Rollout, step: int) -> float | None:
        prompt = number(rollout.prompt)
        if is_greedy(rollout):
            return None if prompt == 5 else prompt * 10.0
        return 1.0 + rollout.sample

    remax = {"adv_estimator": "remax", "use_kl_in_reward": False}
    shaping = {"shaping": {"overlong_buffer": 8}}
    rollout = {"n": 2, "stop": ["END"]}
    stage = ran(
        make(score=score, steps=2, prompts=6, algorithm=remax, reward=shaping, rollout=rollout)
    )
    greedy = stage.engine.sampled("t", greedy=True)
    assert greedy == [Sampling(0.0, 1.0, -1, 1, 9, s.seed, stop=("END",)) for s in greedy]
    assert len(greedy) == 2
    assert stage.reward.calls == [1, "train", "baseline", 2, "train", "baseline"]
    assert stage.reward.scored == 2 * (6 * 2 + 6)
    assert stage.column("reward_mean") == {1: 1.5, 2: 1.5}  # baselines are in no statistic
    rows = [
        (row, float(a[0]), bool(valid))
        for batch in stage.engine.batches("actor")
        for row, a, valid in zip(who(batch), batch.advantages_BT, batch.valid_B, strict=True)
    ]
    assert len(rows) == 24
    for (prompt, sample), advantage, valid in rows:
        assert valid is (prompt != 5)
        assert advantage == (1.0 + sample - prompt * 10.0 if valid else 0.0)


def test_the_critic_warms_up_alone(make: Make) -> None:
    stage = ran(make(steps=4, trainer={"critic_warmup": 2}))
    assert [len(stage.engine.batches("actor", step)) for step in (1, 2, 3, 4)] == [0, 0, 3, 3]
    assert [len(stage.engine.batches("critic", step)) for step in (1, 2, 3, 4)] == [3] * 4


def test_target_kl_ends_the_epochs_of_one_step_above_one_and_a_half_times(make: Make) -> None:
    tokens = 40.0
    moved = {1: [0.149] * 6, 2: [0.1, 0.151, 0.0, 0.0, 0.0, 0.0], 3: [0.0] * 6}
    updates: dict[int, int] = {}

    def report_sums(minibatch: MiniBatch, step: int) -> Sums:
        if minibatch.critic:
            return {"value_loss": (0.5, 1.0)}
        updates[step] = updates.get(step, 0) + 1
        return {"actor/approx_kl": (moved[step][updates[step] - 1] * tokens, tokens)}

    stage = ran(make(sums=report_sums, actor={"target_kl": 0.1, "ppo_epochs": 2}))
    assert updates == {1: 6, 2: 2, 3: 6}
    assert stage.column("actor/stopped_early") == {2: 1.0}
    assert stage.column("actor/approx_kl") == pytest.approx({1: 0.149, 2: 0.251 / 2, 3: 0.0})
    assert stage.column("value_loss") == {1: 0.5, 2: 0.5, 3: 0.5}
    updates.clear()
    assert (
        ran(make("free", sums=report_sums, actor={"ppo_epochs": 2})).column("actor/stopped_early")
        == {}
    )
    assert updates == {1: 6, 2: 6, 3: 6}


def test_the_adaptive_kl_coefficient_is_taken_over_from_step_to_step(make: Make) -> None:
    """Rows whose score failed do not count, neither in the KL nor in the sequences."""

    def score(rollout: Rollout, step: int) -> float | None:
        return None if rollout.sample == 1 and number(rollout.prompt) % 2 else 1.0

    control = {"type": "adaptive", "kl_coef": 0.5, "target_kl": 0.125, "horizon": 30}
    algorithm = {"use_kl_in_reward": True, "kl_ctrl": control}
    stage = ran(make(score=score, algorithm=algorithm, prompts=6, trainer={"save_freq": 1}))
    growth = 1 + 0.2 * 9 / 30  # 9 of 12 rows have a score; the KL is far above its target
    coefs = [0.5 * growth**i for i in range(4)]
    assert stage.column("kl/coef") == pytest.approx(dict(zip((1, 2, 3), coefs, strict=False)))
    assert stage.state.kl_coef == pytest.approx(coefs[3])
    newest = stage.job.store.newest()
    assert newest is not None
    for kind, remaining in (("adaptive", coefs[3]), ("fixed", 0.25)):  # a fixed one is a setting
        ctrl = control | {"type": kind, "kl_coef": 0.25}
        resumed = make(algorithm=algorithm | {"kl_ctrl": ctrl}, prompts=6).build()
        assert load(resumed.job, newest).kl_coef == pytest.approx(remaining)
        assert resumed.engine.version == 3


def by_step(values: dict[int, float]) -> Scoring:
    """Scores of validations by step (0 before the first); what is trained on gets 1."""
    return lambda rollout, step: values[step] if rollout.prompt.uid[0] == "v" else 1.0


def test_patience_counts_validations_without_a_new_best(make: Make) -> None:
    values = {0: 0.2, 1: 0.5, 2: 0.5, 3: 0.4, 4: 0.6, 5: 0.6, 6: 0.1, 7: 0.1, 8: 0.9}
    patient: dict[str, Any] = {"trainer": {"save_freq": -1, "test_freq": 1, "patience": 3}}
    script = make(score=by_step(values), steps=8, val_prompts=2, **patient)
    stage = ran(script)
    assert stage.state.step == 7 and (stage.state.best, stage.state.best_step) == (0.6, 4)
    assert stage.column("val/reward_mean") == {k: v for k, v in values.items() if k < 8}
    assert stage.screen.notes == [
        "val is of greedy responses to the validation prompts, reward of sampled ones to the "
        "training prompts",
        "Ended at step 7: 3 validations without a new best. To go on, raise --patience.",
    ]
    assert stage.job.store.newest_step() == 7
    resumed = resume(script, 7)
    assert resumed.engine.calls == ["load"] and len(resumed.screen.notes) == 1
    patient["trainer"]["patience"] = 4
    longer = resume(make(score=by_step(values), steps=8, val_prompts=2, **patient), 7)
    assert longer.state.step == 0 and longer.column("val/reward_mean") == values


def test_a_run_acts_when_its_alarm_begins_as_it_was_asked_to(make: Make, tmp_path: Path) -> None:
    """It stops and goes on when it is resumed, or it goes back twice, and then stops there."""
    counts = Counter[int]()

    def score(rollout: Rollout, step: int) -> float | None:
        """From step 4 on more responses fail, and the others score more than before."""
        counts[step] += 1
        return None if counts[step] <= max(step, 3) else 0.1 * max(step, 3)

    trainer = {"save_freq": 2, "max_ckpt_to_keep": 1, "output_dir": str(tmp_path / "run")}
    weights = {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.5}}
    settings: dict[str, Any] = {
        "score": score, "steps": 12, "prompts": 20, "reward": {"function": "f.py"},
        "algorithm": weights, "data": {"train_batch_size": 10},
    }  # fmt: skip
    stopping = trainer | {"on_hacking": "stop", "max_ckpt_to_keep": None}
    script = make(**settings, trainer=stopping)
    stopped = ran(script, Interrupted)
    at, before = stopped.state.step, tmp_path / "run" / "checkpoints" / "step_000002"
    place = f"{shlex.quote(str(tmp_path / 'run'))}/checkpoints/step_000002"
    assert 6 <= at < 12 and stopped.job.store.newest_step() == at
    (alarm,) = [text for text in stopped.screen.warnings if "may exploit its reward" in text]
    assert f"the last checkpoint before is {place}." in alarm and before.exists()
    assert f"--on_hacking stop; the last checkpoint before is {place}" in stopped.screen.notes[-1]
    assert resume(script, at).job.store.newest_step() == 12
    # Without the setting it only warns.
    counts.clear()
    assert ran(make("other", **settings)).state.step == 12
    # All steps of the schedule are kept, and it goes back to the last one before the bend.
    out = tmp_path / "restrained"
    restraining = trainer | {"on_hacking": "restrain", "output_dir": str(out), "save_freq": 1}
    restrained = make("restrained", **settings, trainer=restraining)
    for outcome in (WentBack, WentBack, Interrupted):
        counts.clear()
        stage = restrained.build()
        newest = stage.job.store.newest()
        state = load(stage.job, newest) if newest else stage.state
        with pytest.raises(outcome) as caught:
            run(stage.job, state)
        go_back(out, stage.job.store.delete_after)
        restraint, first = read_restraints(out)[-1], read_restraints(out)[0]
        assert (restraint.after, restraint.pending) == (at, False)
        assert stage.job.store.steps()[-1] == restraint.to == min(3, first.to)
        # A later return goes at least as far back as the first.
        write_restraints(out, [replace(first, to=2), *read_restraints(out)[1:]])
    assert restraint.changes == {} and state.step == 2 and "Go on with" in str(caught.value)
    for old, new in (r.changes["algorithm.kl_ctrl.kl_coef"] for r in read_restraints(out)[:2]):
        assert (old, 5.0 <= new <= 50.0) == (0.5, True)


@pytest.mark.parametrize(
    "trainer, validated, saved, expected",
    [
        ({"save_freq": 3, "test_freq": 2}, [0, 2, 4, 6, 7], [3, 4, 6, 7], [4, 6, 7]),
        ({"save_freq": -1}, [0, 7], [7], [7]),
        ({"save_freq": -1, "test_freq": -1}, [0], [7], [7]),
        ({"save_freq": 7, "test_freq": 7, "val_before_train": False}, [7], [7], [7]),
        ({"save_freq": 2, "test_freq": 0, "max_ckpt_to_keep": 3}, [0, 7], [2, 4, 6, 7], [4, 6, 7]),
        ({"save_freq": 1, "test_freq": 3, "max_ckpt_to_keep": 1}, [0, 3, 6, 7], [*range(1, 8)],
         [3, 7]),
        ({"save_freq": 2, "test_freq": 1}, [], [2, 4, 6, 7], [6, 7]),  # without prompts for it
    ],
)  # fmt: skip
def test_when_validations_and_checkpoints_are_due(
    make: Make, trainer: dict[str, Any], validated: list[int], saved: list[int], expected: list[int]
) -> None:
    """A new best is saved at once and is never pruned."""
    values = {0: 0.9} | {step: 0.95 if step in (3, 4) else 0.1 for step in range(1, 8)}
    script = make(
        score=by_step(values),
        steps=7,
        val_prompts=2 * bool(validated),
        trainer={"max_ckpt_to_keep": 2} | trainer,
    )
    stage = ran(script)
    assert list(stage.column("val/reward_mean")) == validated
    saves = [n for n, verb in enumerate(stage.engine.calls) if verb.endswith("save")]
    assert [stage.engine.calls[n] for n in saves] == ["save"] * (len(saves) - 1) + ["last save"]
    published = [stage.engine.calls[:n].count("publish") for n in saves]
    assert published == saved
    assert stage.job.store.steps() == expected
    assert stage.engine.calls.count("generate") == 7 + len(validated)


def test_rewards_are_shaped_and_placed_before_they_are_learnt_from(make: Make) -> None:
    def score(rollout: Rollout, step: int) -> Score:
        value = 4.0 if rollout.sample else 2.0
        return Score(value, steps=(PlacedReward(2, 0.5, "token"),))

    shaping = {
        "overlong_buffer": 8, "overlong_penalty": 2.0, "normalize": "running", "reward_clip": 0.75,
    }  # fmt: skip
    stage = ran(make(score=score, steps=2, reward={"shaping": shaping}))
    # 3 of the 8 tokens before the limit of 9 are used up; shaped scores are one spread from 3.
    assert stage.column("shaping/overlong_mean") == pytest.approx({1: -0.75, 2: -0.75})
    assert stage.state.moments.count == 24 and stage.state.moments.mean == pytest.approx(2.25)
    assert stage.column("reward_mean") == {1: 3.0, 2: 3.0}  # told as its source gave it
    for batch in stage.engine.batches("critic"):
        expected = [[0, 0.5, 0, (0.75 if sample else -0.75) - 0.5] for _, sample in who(batch)]
        torch.testing.assert_close(batch.token_rewards_BT, torch.tensor(expected))


def test_a_run_without_any_score_says_why_and_stops(make: Make) -> None:
    script = make(score=lambda rollout, step: None, steps=9)
    stage = ran(script, Interrupted)
    assert script.diagnosed == [12] and stage.screen.warnings.count("why there is no reward") == 1
    assert stage.job.store.steps() == [3]
    assert "no response of 3 steps in a row got a score" in stage.screen.notes[-1]
    assert "ppo train --again" in stage.screen.notes[-1]
    zero = make("zero", score=lambda rollout, step: 0.0, steps=20)
    assert ran(zero).state.zero_steps == 20
    assert zero.diagnosed == [12, 12]  # after two steps without any reward, and after twenty
    fell = make("fell", score=lambda rollout, step: float(step == 2), steps=5)
    assert ran(fell).state.zero_steps == 3
    assert fell.diagnosed == []  # it was rewarded before: the task can be done


def test_gradients_that_stay_broken_end_the_run(make: Make) -> None:
    broken = {2: "actor", 4: "critic", 5: "actor", 6: "critic"}

    def report_sums(minibatch: MiniBatch, step: int) -> Sums:
        role = "actor" if minibatch.actor else "critic"
        return {f"{role}/skipped_steps": (float(broken.get(step) == role), 1.0)}

    script = make(sums=report_sums, steps=9, trainer={"max_nonfinite_steps": 3})
    stage = ran(script, UserError)
    assert "not finite in 3 steps in a row (the last is step 6)" in stage.screen.notes[-1]
    assert stage.column("actor/skipped_steps")[2] == 3.0  # a count, not a mean
    longer = make("more", sums=report_sums, steps=9, trainer={"max_nonfinite_steps": 4})
    assert ran(longer).state.step == 9


@pytest.mark.parametrize(
    ("gaps", "rollout", "trainer", "ends_at"),
    [
        ({}, {}, {}, None),
        ({0: 0.09, 1: 0.09}, {}, {}, None),  # rounding, at its most
        ({0: 4.0}, {}, {}, 1),  # weights that were lost on waking
        ({1: 0.11}, {}, {}, 2),  # after the first publish
        ({2: 4.0}, {}, {}, None),  # later it is a matter of training
        ({0: 0.3}, {"temperature": 0.3}, {}, None),
        ({0: 0.4}, {"temperature": 0.3}, {}, 1),
        ({0: 0.5}, {"engine_kwargs": {"vllm": {"quantization": "fp8"}}}, {}, None),
        ({0: 4.0}, {"engine_kwargs": {"vllm": {"quantization": "fp8"}}}, {}, 1),
        ({0: 4.0}, {"name": "hf"}, {}, None),
        ({0: 4.0}, {}, {"async_steps": 1}, None),
    ],
)
def test_weights_that_vllm_lacks_end_the_run_before_an_update(
    gaps: dict[int, float], rollout: dict[str, Any], trainer: dict[str, Any], ends_at: int | None,
    make: Make,
) -> None:  # fmt: skip
    stage = make(steps=3, rollout={"name": "vllm", **rollout}, trainer=trainer).build()
    stage.engine.gaps = gaps
    if ends_at is None:
        run(stage.job, stage.state)
        return
    with pytest.raises(UserError, match="does not sample with the trainer's weights") as caught:
        run(stage.job, stage.state)
    assert "rollout.sleep=offload" in str(caught.value) and "ppo train --again" in str(caught.value)
    assert stage.engine.version == ends_at - 1
    assert stage.engine.batches("actor", ends_at) == []


def test_a_step_that_cannot_be_scored_never_was(make: Make) -> None:
    down = {"now": True}

    def score(rollout: Rollout, step: int) -> float:
        if step == 3 and down["now"] and rollout.sample == 0 and number(rollout.prompt) % 4 == 0:
            raise Interrupted("The judge is down.")
        return float(number(rollout.prompt))

    script = make(score=score, steps=5, trainer={"save_freq": 4})
    stage = ran(script, Interrupted)
    assert stage.screen.notes[-1] == (
        "The judge is down. Everything up to step 2 of 5 is saved. Go on with: ppo train --again"
    )
    assert stage.state.step == 2 and stage.job.store.steps() == [2]
    down["now"] = False
    resumed = resume(script, 2)
    uninterrupted = ran(make("whole", score=score, steps=5, trainer={"save_freq": 4}))
    assert resumed.lines == uninterrupted.lines
    assert resumed.engine.samplings == uninterrupted.engine.samplings[2:]


FILTER = {"enable": True, "metric": "seq_reward", "max_num_gen_batches": 4}


def test_dynamic_sampling_fills_the_batch_and_resumes_within_a_refill(make: Make) -> None:
    """Prompts whose number 3 divides score alike; a step of 6 takes batches of 4 of them."""
    down = {"now": True}
    scored_steps: list[int] = []

    def score(rollout: Rollout, step: int) -> float | Score | None:
        scored_steps.append(step)
        if step == 3 and down["now"] and scored_steps.count(3) > 8:  # in the second batch
            raise Interrupted("The judge is down.")
        p = number(rollout.prompt)
        if p in (1, 2) and rollout.sample:  # one verdict is left: it differs from nothing
            return None if p == 1 else Score(9.0, imputed="slow")
        return 7.0 if p % 3 == 0 else float(rollout.sample)

    arguments: dict[str, Any] = {
        "score": score, "steps": 4, "prompts": 24, "trainer": {"save_freq": 1},
        "data": {"gen_batch_size": 4, "train_batch_size": 6, "max_response_length": 9},
        "algorithm": {"use_kl_in_reward": False, "filter_groups": FILTER},
    }  # fmt: skip

    script = make(**arguments)
    stage = ran(script, Interrupted)
    assert stage.job.store.steps()[-1] == 2
    down["now"] = False
    resumed = resume(script, 2)
    uninterrupted = ran(make("whole", **arguments))
    assert resumed.lines == uninterrupted.lines
    batches = [who(b) for b in uninterrupted.engine.batches("actor", 3)]
    assert [who(b) for b in resumed.engine.batches("actor", 3)] == batches
    for step in range(1, 5):
        rows = [row for b in uninterrupted.engine.batches("actor", step) for row in who(b)]
        trained = {p for p, _ in rows}
        assert len(trained) == 6 and len(rows) == 12
        assert all(p % 3 and p not in (1, 2) for p in trained)
    turns = uninterrupted.column("filter/gen_batches")
    assert sum(turns.values()) == len(uninterrupted.engine.samplings) and max(turns.values()) > 1
    # Each batch of prompts of a step has its own seed.
    assert len({s.seed for _, s in uninterrupted.engine.samplings}) == len(
        uninterrupted.engine.samplings
    )
    sampled = [int(uid[1:]) for uids, _ in uninterrupted.engine.samplings for uid in uids]
    alike = sum(p % 3 == 0 or p in (1, 2) for p in sampled)
    shares = uninterrupted.column("filter/alike_share")
    assert sum(shares[s] * 4 * turns[s] for s in turns) == pytest.approx(alike)


def test_dynamic_sampling_ends_where_nothing_differs(make: Make) -> None:
    for limit, batches in ((2, 2), (0, 4)):  # 0: one pass over the prompts
        filtered = {
            "use_kl_in_reward": False,
            "filter_groups": FILTER | {"max_num_gen_batches": limit},
        }
        script = make(f"run{limit}", prompts=24, algorithm=filtered)
        stage = ran(script, Interrupted)
        assert len(stage.engine.samplings) == batches
        message = f"found 0 of the 6 prompts of a batch in {batches} batches ({6 * batches} prompts"
        assert message in stage.screen.notes[-1]


@pytest.mark.parametrize(
    ("patience", "message"),
    [
        (60.0, "Stopped after step 2 (SIGTERM). Everything up to step 2 of 4 is saved."),
        (0.0, "Stopped while sampling (SIGTERM). Everything up to step 1 of 4 is saved."),
    ],
)
def test_a_signal_saves_the_step_that_it_leaves_time_for(
    patience: float, message: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "LEAVE_S", patience)
    signals.forget_signals()  # those of tests before
    stops, sending = list[str](), iter(["SIGTERM"])
    script = make(steps=4, stop_requested=lambda: stops[0] if stops else None)

    def score(rollout: Rollout, step: int) -> float:
        # Responses are scored at the same time; a second signal leaves no time.
        if step == 2 and (signal := next(sending, "")):
            signals.note_signal()
            stops.append(signal)
        return 1.0

    script.score = score
    try:
        stage = ran(script, Interrupted)
    finally:
        signals.forget_signals()
    assert stage.screen.notes[-1].startswith(message)
    assert stage.job.store.steps() == [int(message.split(" of ")[0][-1])]


def test_a_stop_in_a_validation_goes_on_with_it(make: Make) -> None:
    down = {"now": True}

    def score(rollout: Rollout, step: int) -> float:
        if rollout.prompt.uid[0] == "v" and step == 2 and down["now"]:
            raise Interrupted("The judge is down.")
        return 1.0

    script = make("validating", score=score, steps=3, val_prompts=2, trainer={"test_freq": 2})
    stage = ran(script, Interrupted)
    assert stage.job.store.steps() == [2] and [line["step"] for line in stage.lines] == [0, 1]
    down["now"] = False
    resumed = script.build()
    state = load(resumed.job, stage.folder / "checkpoints" / "step_000002")
    assert state.unfinished and state.unfinished["reward_mean"] == 1.0
    run(resumed.job, state)
    assert resumed.engine.calls[:3] == ["load", "generate", "generate"]  # validated first,
    assert resumed.engine.calls.count("publish") == 1  # and not trained again
    assert [line["step"] for line in resumed.lines] == [0, 1, 2, 3]


class Mortal(Engine):
    """Dies in the given steps, once each, when some responses are there already."""

    def __init__(self, deaths: list[int]) -> None:
        super().__init__()
        self._deaths = deaths

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> Iterator[Rollout]:  # type: ignore[override]
        for done, rollout in enumerate(super().generate(prompts, sampling)):
            if done == 3 and self._deaths and self.version + 1 == self._deaths[0]:
                del self._deaths[0]
                raise WorkerLost("A sampler died.")
            yield rollout


@pytest.mark.parametrize("deaths, limit, warnings", [
    ([2], 1, ["A sampler died. Starting again (1 of 1) from the first step."]),
    ([4, 3], 2, ["A sampler died. Starting again (1 of 2) from step_000002, the last checkpoint.",
                 "A sampler died. Starting again (2 of 2) from step_000002, the last checkpoint."]),
    ([4, 5, 5], 2, []),
])  # fmt: skip
def test_lost_workers_cost_the_steps_since_the_last_checkpoint(
    make: Make, deaths: list[int], limit: int, warnings: list[str]
) -> None:
    """What is taken again is the same: rows, scores, counts, the KL coefficient, the log."""
    kl = {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "horizon": 50, "kl_coef": 0.5}}
    options: dict[str, Any] = {"steps": 5, "trainer": {"save_freq": 2}, "algorithm": kl}
    options["score"] = lambda rollout, step: float(number(rollout.prompt) + step)
    stage, uninterrupted = make(**options).build(), ran(make("whole", **options))
    engines: list[Engine] = []

    def build() -> Engine:
        engines.append(Mortal(deaths))
        return engines[-1]

    job, gathered = replace(stage.job, engine=build()), []

    def train() -> None:
        run_with_restarts(
            job, lambda job: stage.state, build=build, max_restarts=limit,
            gather=lambda: gathered.append(len(engines)),
        )  # fmt: skip

    if not warnings:
        with pytest.raises(Interrupted, match=r"one loss more than --max_restarts 2.*Step 4 of 5"):
            train()
        return
    train()
    assert stage.screen.warnings == warnings
    assert gathered == [*range(1, len(engines))]  # asked for before each new one
    assert [e.calls[-1] for e in engines] == ["close"] * (len(engines) - 1) + ["last save"]
    assert stage.lines == uninterrupted.lines


def test_without_a_checkpoint_of_its_own_a_run_begins_again_at_its_origin(make: Make) -> None:
    origin = ran(make("first", steps=2)).job.store.newest()
    assert origin is not None
    stage, deaths = make("second", steps=5, trainer={"save_freq": 3}).build(), [3, 5]
    run_with_restarts(
        replace(stage.job, engine=Mortal(deaths)), lambda job: load(job, origin),
        build=lambda: Mortal(deaths), max_restarts=2, origin=origin,
    )  # fmt: skip
    assert not deaths and [line["step"] for line in stage.lines] == [3, 4, 5]
    second = [output for output in stage.screen.warnings if "Starting again" in output]
    assert [output.partition("from ")[2] for output in second] == [
        "step_000002, the last checkpoint.",
        "step_000003, the last checkpoint.",
    ]  # its own one, once there is one


def test_how_old_responses_are_is_told_only_where_sampling_runs_ahead(make: Make) -> None:
    stage = ran(make(steps=1))
    assert not any(key.startswith("rollout/staleness") for key in stage.lines[0])
    ahead = make("ahead", trainer={"async_steps": 1}).build()
    ahead.state.step = 2
    run(ahead.job, ahead.state)
    assert ahead.column("rollout/staleness_mean") == {3: 2.0}
    assert ahead.engine.minibatches[0][1].batch.response_len_B.tolist() == [LENGTH] * 4
