"""The last words of a run say what was measured, and nothing as done that was not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.cli.app import main
from ppo_cli.cli.screen import format_summary
from ppo_cli.errors import ExhaustedBudget, Interrupted, RewardError, ppo, replace_flag
from ppo_cli.report.health import EXPLOITS
from ppo_cli.report.judge_card import describe_judge_totals, format_dollars
from ppo_cli.report.metrics import extend_budget, find_lr_jumps, refuse_unscored, summarise
from ppo_cli.report.page.run_data import RunData
from ppo_cli.report.tracker import Summary
from ppo_cli.run_folder.folder import run_settings
from ppo_cli.run_folder.lines import read_lines, replace_lines
from tests.settings import complete

HERE = Path("my run")
HISTORIES = Path(__file__).with_name("histories.jsonl")


def summary_of(*lines: dict[str, Any], session: tuple[int, float] = (9, 5.0)) -> Summary:
    return summarise(lines, HERE, complete({}), session=session, resume_command="ppo train --lr 1")


def test_what_was_measured_once_is_one_number() -> None:
    end = summary_of(
        {"step": 1, "reward_mean": 0.4},
        {"step": 2, "reward_mean": 0.5, "val/accuracy": 0.617, "val/reward_mean": 0.617},
    )
    assert end.measures == [("reward", 0.4, 0.5), ("validation accuracy", None, 0.617)]
    alone = summary_of({"step": 1, "reward_mean": 0.4})
    assert alone.measures == [("reward", None, 0.4)]


def test_the_time_is_of_all_sessions() -> None:
    lines = [{"step": n, "reward_mean": 0.1, "time/run_s": 30.0 * n} for n in range(1, 11)]
    end = summary_of(*lines, session=(4, 100.0))
    assert end.wall_seconds == 300.0 and end.session == (4, 100.0)
    assert summary_of(*lines, session=(10, 301.0)).session is None


def test_a_tenth_of_the_steps_is_compared_at_each_end() -> None:
    rows = [{"step": n, **mixture(n, 0.1 * n, float(n))} for n in range(1, 31)]
    end = summary_of(*rows, session=(30, 1.0))
    measures = {name: ends for name, *ends in end.measures}
    assert measures["reward"] == pytest.approx([0.2, 2.9])
    assert measures["reward judge"] == [2.0, 29.0] and measures["validation judge"] == [1.0, 30.0]
    assert end.steps == 30 and len(end.rewards) == 30 and end.model_dir is None


def test_what_the_critic_explains_is_a_mean_of_the_last_steps() -> None:
    explained = [0.0] * 18 + [0.4, 0.5]
    lines = [{"step": n, "reward_mean": 0.1, "explained_variance": x} for n, x in
             enumerate(explained, 1)]  # fmt: skip
    assert summary_of(*lines).critic == "explained variance 0.45"
    # Returns that were all equal in one of these steps, or in both.
    for change in ({"explained_variance": None}, {"score/std": 0.0}):
        assert summary_of(*lines[:-1], lines[-1] | change).critic[-4:] == "0.40"
    unknown = {"explained_variance": math.nan}
    assert summary_of(*(line | unknown for line in lines)).critic == "explained variance unknown"
    assert summary_of({"step": 1, "reward_mean": 0.4}).critic == ""


def test_calls_are_counted_over_judges_sessions_and_validations(tmp_path: Path) -> None:
    def row(outcome: str, usd: float) -> str:
        return json.dumps({"outcome": outcome, "usd": usd}) + "\n"

    (tmp_path / "judge_calls.jsonl").write_text(
        row("ok", 0.5) + row("timeout", 0.25) + row("timeout", 0.0) + '{"started": 1}\n'
    )
    (tmp_path / "judge_calls_safety.jsonl").write_text(row("http_503", 0.25))
    history = [
        {"step": 0, "val/judge/cached": 2.0, "val/score/failed": 1.0},
        {"step": 1, "judge/cached": 3.0, "judge/retries": 4.0, "judge_safety/retries": 1.0,
         "score/failed": 2.0, "judge/cached_share": 9.0},
    ]  # fmt: skip
    assert describe_judge_totals(tmp_path, history) == (
        "4 calls, 3 failed (timeout 2, http_503 1), 5 retries, 5 verdicts reused, "
        "3 responses without a score, $1.00"
    )
    (tmp_path / "judge_calls.in_flight").write_text(
        '{"id": "a-7", "outcome": "in_flight", "usd": 0.5}\n'
    )
    assert describe_judge_totals(tmp_path, history).startswith(
        "5 calls, 1 in flight (at their worst case), 3 failed"
    )
    assert describe_judge_totals(tmp_path, history).endswith("$1.50")
    assert describe_judge_totals(tmp_path / "none", history[:0]) == ""
    assert describe_judge_totals(tmp_path / "none", history[:1]).startswith(
        "0 calls, 2 verdicts reused"
    )


def mixture(step: int, total: float, judge: float) -> dict[str, Any]:
    metrics = {"reward_mean": total, "reward/judge": judge, "reward/judge/weight": 1.0}
    return {"step": step} | metrics | {f"val/{name}": value for name, value in metrics.items()}


def test_a_mixture_whose_mean_is_0_by_itself_is_told_by_its_parts() -> None:
    end = summary_of(mixture(1, 1e-17, 4.0), mixture(2, -1e-17, 6.0))
    assert end.rewards == ()
    assert end.measures == [("reward judge", 4.0, 6.0), ("validation judge", 4.0, 6.0)]
    plain = summary_of(mixture(1, 0.4, 4.0), mixture(2, 0.6, 6.0))
    assert plain.measures[0] == ("reward", 0.4, 0.6)
    assert ("validation reward", 0.4, 0.6) in plain.measures


def test_scores_that_happen_to_be_1_in_the_last_validation_are_no_accuracy() -> None:
    validations = [
        {"step": 0, "reward_mean": 0.5, "val/reward_mean": 0.5},
        {"step": 1, "reward_mean": 0.6, "val/reward_mean": 1.0, "val/accuracy": 1.0},
    ]
    assert ("validation reward", 0.5, 1.0) in summary_of(*validations).measures
    each = [line | {"val/accuracy": line["val/reward_mean"]} for line in validations]
    assert ("validation accuracy", 0.5, 1.0) in summary_of(*each).measures


def test_a_run_without_any_score_is_not_done() -> None:
    failed = [{"step": n, "score/failed_share": 1.0} for n in range(4)]
    for count in (1, 2, 3):
        with pytest.raises(RewardError) as refused:
            refuse_unscored(failed[: count + 1], HERE, "ppo train --resume auto --lr 1")
        assert f"No response of the {count} step" in str(refused.value)
        assert "ppo show 'my run' --worst 5" in str(refused.value)
        assert str(refused.value).endswith("ppo train --lr 1 --resume never")
    refuse_unscored([*failed, {"step": 4, "reward_mean": 0.0}], HERE, "")
    refuse_unscored(failed[:1], HERE, "")


def test_what_comes_next_works_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPO_COMMAND", r"/a\ b/ppo")
    steps = summary_of({"step": 3, "reward_mean": 0.1}).next_steps
    assert [command for _, command in steps] == [
        r"/a\ b/ppo view 'my run'",
        r"/a\ b/ppo show 'my run' --worst 5",
        "ppo train --lr 1 --max_steps 6",
    ]
    embedded = complete({"model": {"path": "embedded"}})
    next_steps = summarise([], HERE, embedded, session=(0, 1.0), resume_command="").next_steps
    assert len(next_steps) == 4
    assert all(command.startswith(r"/a\ b/ppo ") for _, command in next_steps)
    # A reward of one's own is not advised to those who have one.
    own = complete({"model": {"path": "embedded"}, "reward": {"function": "f.py:compute_score"}})
    next_steps = summarise([], HERE, own, session=(0, 1.0), resume_command="").next_steps
    assert not any("--reward_function" in command for _, command in next_steps)


def test_advice_to_train_longer_says_what_the_learning_rate_does() -> None:
    optim = {"lr": 1e-3, "lr_scheduler_type": "cosine"}
    cosine = complete({"actor": {"optim": optim}})
    last = {"step": 3, "reward_mean": 0.1, "actor/lr": 2.5e-4}
    for config, fragment in (
        (cosine, "rises from 0.00025 at step 3 to 0.0005 at step 4"),
        (complete({}), ""),
    ):
        line = last | {"actor/lr": last["actor/lr"] if fragment else config.actor.optim.lr}
        steps = summarise([line], HERE, config, session=(3, 1.0), resume_command="ppo train")
        longer = steps.next_steps.index(("go on from here", "ppo train --max_steps 6"))
        notes = [note for _, note in steps.next_steps[longer + 1 :]]
        assert len(notes) == bool(fragment) and all(fragment in note for note in notes)


def test_a_learning_rate_is_compared_with_that_of_the_checkpoints_step(tmp_path: Path) -> None:
    lines = [{"step": step, "actor/lr": step * 1e-3} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    config = complete({"actor": {"optim": {"lr": 1e-2}}})
    (jump,) = find_lr_jumps(
        config.actor.optim, config.critic.optim, tmp_path / "checkpoints" / "step_000002", 4
    )
    assert "rises from 0.002 at step 2 to 0.01 at step 3" in jump


def test_what_lies_in_the_run_folder_is_told(tmp_path: Path) -> None:
    store, history = tmp_path / "checkpoints", [{"step": 4, "reward_mean": 0.5}]
    for step in (2, 4):
        (store / f"step_00000{step}" / "actor").mkdir(parents=True)
    (tmp_path / "judge_calls.jsonl").write_text(json.dumps({"outcome": "ok", "usd": 0.25}))
    (store / "latest").symlink_to("step_000004")
    for best, named in (("step_000002", True), ("step_000004", False)):
        (store / "best").unlink(missing_ok=True)
        (store / "best").symlink_to(best)
        end = summarise(history, tmp_path, complete({}), session=(4, 1.0), resume_command="ppo")
        assert end.model_dir == store / "latest" / "actor" and end.judge[0] == (
            "calls",
            "1 call, $0.25",
        )
        assert (
            any(str(store / "best" / "actor") == command for _, command in end.next_steps) is named
        )


def test_how_this_program_is_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PPO_COMMAND", raising=False)
    program = tmp_path / "a b" / "ppo"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setattr("sys.argv", [str(program), "train"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ppo("show") == f"'{program}' show"
    monkeypatch.setenv("PATH", str(program.parent))
    assert ppo("show") == "ppo show"
    monkeypatch.setattr("sys.argv", ["/x/ppo_cli/__main__.py"])
    assert ppo("show").endswith(" -m ppo_cli show")
    monkeypatch.setattr("sys.argv", ["/x/worker.py"])
    assert ppo() == "ppo"


def test_a_flag_takes_the_place_of_the_one_before() -> None:
    for line in (
        "ppo train --rm_budget_usd 0.002 --lr 1",
        "ppo train --lr 1 --rm-budget-usd=0.002",
    ):
        replaced = replace_flag(line, "--rm_budget_usd", "0.004")
        assert replaced == "ppo train --lr 1 --rm_budget_usd 0.004"


def test_a_resume_line_names_a_budget_that_finishes_the_run() -> None:
    config = complete(
        {"data": {"train_batch_size": 10, "val_files": ["embedded"]},
         "actor": {"ppo_mini_batch_size": 10},
         "trainer": {"test_freq": 5}, "reward": {"api": {"enable": True}}}
    )  # fmt: skip

    def budget(used: ExhaustedBudget, done: int, validated: bool, rows: int) -> list[str]:
        history = [{"step": n, "reward_mean": 0.5} for n in range(1, done + 1)]
        history = [{"step": 0, "val/reward_mean": 0.1}, *history] if validated else history
        line = extend_budget(
            "ppo train --rm_budget_usd=1 reward.api.budget_usd=2 --lr 1",
            Interrupted("", used_up=used), config, history, 20, rows,
        )  # fmt: skip
        assert line.startswith("ppo train")
        return line.split()[-2:]

    # 40 responses cost a dollar: 200 cost five, and a fifth more is six.
    spent = ExhaustedBudget("--rm_budget_usd", 1.0, 40, 0.0)
    assert budget(spent, 4, False, 0) == ["--rm_budget_usd", "6"]
    # Four of five validations of 40 rows are still to come: 400 responses in all, 80 done.
    assert budget(ExhaustedBudget("--rm_budget_usd", 1.0, 80, 0.0), 4, True, 40)[1] == "6"
    # Cut short in the first step: 8 of 200 are paid for.
    assert budget(ExhaustedBudget("--rm_budget_usd", 0.01, 8, 0.0), 0, False, 0)[1] == "0.3"
    assert budget(ExhaustedBudget("--rm_budget_usd", 0.0, 0, 0.01), 0, False, 0)[1] == "2.4"
    # 100 responses of critic pretraining: before the first step, and after four.
    config = config.model_copy(
        update={"critic": config.critic.model_copy(update={"pretrain_steps": 10})}
    )
    assert budget(ExhaustedBudget("--rm_budget_usd", 0.5, 50, 0.0), 0, False, 0)[1] == "3.6"
    assert budget(ExhaustedBudget("--rm_budget_usd", 1.4, 140, 0.0), 4, False, 0)[1] == "3.6"
    config = config.model_copy(
        update={"critic": config.critic.model_copy(update={"pretrain_steps": 0})}
    )
    # Two votes a response, and a step cut short: 12 of 200 were asked, 24 calls; a call is added.
    votes = config.reward.api.model_copy(update={"votes": 2, "max_votes": 2})
    config = config.model_copy(update={"reward": config.reward.model_copy(update={"api": votes})})
    assert budget(ExhaustedBudget("--rm_budget_usd", 0.12, 24, 0.5), 1, False, 0)[1] == "2.9"
    used = ExhaustedBudget("--rm_budget_tokens", 4_000, 40, 90)
    assert budget(used, 4, False, 0) == ["--rm_budget_tokens", "25000"]
    plain = extend_budget("ppo train", Interrupted("down"), config, [], 20, 0)
    assert plain == "ppo train"


def steps(*rewards: float, **metrics: float) -> list[dict[str, Any]]:
    return [{"step": n, "reward_mean": r, **metrics} for n, r in enumerate(rewards, start=1)]


def test_noise_is_no_decline() -> None:
    noisy = [0.50, 0.44, 0.53, 0.47, 0.52, 0.45, 0.51, 0.46]
    for rewards, fell in (
        (noisy, False), ([0.9, 0.1], False), ([0.9, 0.8, 0.5, 0.2, 0.1], False),
        ([0.5] * 8, False), (noisy[::-1], False), ([*noisy, 0.02], True),
        ([0.45, 0.47, 0.46, 0.44, 0.45, 0.46, 0.0], True), ([0.5] * 7 + [0.4], True),
    ):  # fmt: skip
        assert ("reward" in summary_of(*steps(*rewards)).declined) is fell, rewards


def test_a_validation_declines_beyond_the_noise_of_its_responses() -> None:
    config = complete({"data": {"val_files": ["embedded"], "val_max_samples": 100}})
    four = config.model_copy(
        update={
            "rollout": config.rollout.model_copy(
                update={"val_kwargs": config.rollout.val_kwargs.model_copy(update={"n": 4})}
            )
        }
    )
    for judged, after, fell in (
        (config, 0.45, False), (config, 0.37, False), (config, 0.2, True), (four, 0.41, True),
    ):  # fmt: skip
        lines = [
            {"step": n, "val/accuracy": v, "val/reward_mean": v, "val/score/std": 0.5}
            for n, v in enumerate([0.5, after])
        ]
        end = summarise(lines, HERE, judged, session=(1, 1.0), resume_command="")
        assert ("validation accuracy" in end.declined) is fell


def test_a_collapse_is_said_at_the_end_too() -> None:
    good = steps(0.4, 0.5, 0.45, kl_divergence=0.01, entropy=1.0, **{"score/min": 0.0})
    gone = {"step": 4, "reward_mean": 0.0, "kl_divergence": 5.3, "entropy": 1e-5, "score/min": 0.0}
    assert summary_of(*good).warnings == ()
    (warning,) = summary_of(*good, gone).warnings
    assert warning.startswith("The policy has collapsed")


JUDGE = {"api": {"enable": True, "model": "m"}}


@pytest.mark.parametrize(
    ("run", "reward", "verdict", "troubles", "exploited"),
    [
        # Hacked: judges that are fooled by length, and by praise.
        ("padded", {"function": "f.py"}, "Doubtful", ["hacking", "kl_high"], [7]),
        ("flattered", JUDGE, "Doubtful", ["hacking", "kl_high"], [23]),
        # Honest: what a sentence says, which makes it longer too; and the digits of sums.
        ("honest", {"function": "f.py"}, "No clear change", ["kl_high"], []),
        ("digits", {"function": "f.py"}, "Learned", [], []),
    ],
)
def test_summary_and_page_judge_recorded_runs_alike(
    run: str,
    reward: dict[str, Any],
    verdict: str,
    troubles: list[str],
    exploited: list[int],
    tmp_path: Path,
) -> None:
    """Runs of SmolLM2-135M (`honest`), the bundled model (`digits`), benchmarks/hacking.py."""
    lines = [line for line in read_lines(HISTORIES) if line.pop("run") == run]
    replace_lines(tmp_path / "metrics.jsonl", lines)
    settings = {
        "model": {"path": "m", "dtype": "bfloat16"},
        "data": {"val_files": ["embedded"]},
        "reward": reward,
    }
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    config = run_settings(tmp_path)
    summary = summarise(lines, tmp_path, config, session=(14, 9.0), resume_command="ppo train")
    page = RunData(tmp_path, run).read()
    now = {span["kind"]: span["text"] for span in page["findings"] if span["now"]}
    assert sorted(now) == troubles and sorted(now.values()) == sorted(summary.warnings)
    assert summary.verdict == verdict and page["verdict"][0][0] == f"{verdict}: "
    # More of the same would not help where the reward is exploited.
    purposes = [purpose for purpose, _ in summary.next_steps]
    assert ("go on from here" in purposes) is (not exploited)
    # Before the true score fell, in steps 9 and 27.
    assert [s["from"] for s in page["findings"] if s["kind"] in EXPLOITS] == exploited
    # No other name for a validation whose scores all happen to be 1.
    assert {name for name, *_ in summary.measures} <= {"reward", "validation reward"}


PRETRAINED = [{"step": 1, "explained_variance": None}, {"step": 2, "explained_variance": 0.56}]


@pytest.mark.parametrize(
    ("critic", "sentence"),
    [
        (
            {"pretrain_steps": 2},
            "critic pretrained in 2 steps: explained variance unknown -> 0.56",
        ),
        (
            {"pretrain_until": 0.56},
            "critic pretrained in 2 steps: explained variance unknown -> 0.56 (target 0.56)",
        ),
        (
            {"pretrain_steps": 2, "pretrain_until": 0.6},
            "critic pretrained in 2 steps: explained variance unknown -> 0.56, below the target "
            "0.6 (more steps: --critic_pretrain_steps)",
        ),
        (
            {"pretrain_until": 0.6},
            "critic pretraining: step 2 of 50, explained variance unknown -> 0.56 (target 0.6)",
        ),
    ],
)
def test_summary_show_and_page_say_what_pretraining_reached(
    critic: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = complete({"critic": critic})
    replace_lines(tmp_path / "metrics.jsonl", lines := [{"step": 1, "reward_mean": 0.4}])
    replace_lines(tmp_path / "pretraining.jsonl", PRETRAINED)
    settings = "".join(f"  {name}: {value}\n" for name, value in critic.items())
    (tmp_path / "config.yaml").write_text(f"critic:\n{settings}")
    end = summarise(lines, tmp_path, config, session=(1, 1.0), resume_command="")
    assert end.pretraining == sentence
    row = sentence.removeprefix("critic ")
    assert any(line.split(maxsplit=1) == ["critic", row] for line in format_summary(end))
    assert ("critic", row) in RunData(tmp_path, "run").read()["facts"]
    assert main(["show", str(tmp_path)]) == 0
    assert sentence in capsys.readouterr().out.split("\n")


def test_small_amounts_are_not_nothing() -> None:
    shown = {
        12.5: "$12.50", 0.996: "$1.00", 0.994: "$0.99", 0.25: "$0.25", 0.0021: "$0.0021",
        0.00001: "$1.0e-05", 0.0: "$0",
    }  # fmt: skip
    assert {amount: format_dollars(amount) for amount in shown} == shown
