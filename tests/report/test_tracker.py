"""metrics.jsonl and rollouts: exact, whole, and without what will be done again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppo_cli.errors import UserError
from ppo_cli.records import Part, Prompt, Rollout, Score, Scored
from ppo_cli.report.drift import read_opinions
from ppo_cli.report.labels import compute_response_id
from ppo_cli.report.tracker import Screen, Tracker
from ppo_cli.run_folder.lines import replace_lines
from tests.rewards.scoring import sum_episode
from tests.settings import complete


class Heard(Screen):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.warnings: list[str] = []

    def step(self, step: int, total_steps: int, metrics: Any) -> None:
        self.steps.append(step)

    def health(self, text: str, kind: str = "") -> None:
        self.warnings.append(text)


def make(folder: Path, screen: Any = None, loggers: tuple[str, ...] = ("console",)) -> Tracker:
    return Tracker(folder, screen or Screen(), loggers, total_steps=9, config=complete({}))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_text(encoding="utf-8").splitlines()]


def scored(text: str = "4", value: float | None = 1.0, reply: str = "", **info: Any) -> Scored:
    prompt = Prompt("p1", "2+2?", (), "", (1, 2), data_source="add", ground_truth="4")
    rollout = Rollout(prompt, 0, (5, 6, 7), np.zeros(3, np.float32), text, "stop")
    if value is None:
        return Scored(rollout, Score.failed("timeout", **info))
    score = Score(value, reason="right", parts={"rule": Part(2.0, 1.0)}, info=info, reply=reply)
    return Scored(rollout, score)


def test_a_step_is_one_line_with_exact_numbers(tmp_path: Path) -> None:
    tracker = make(tmp_path)
    third = 1 / 3
    endless = {"x": float("nan"), "y": np.float64("-inf"), "z": np.float32("inf")}
    tracker.step(1, {"reward_mean": third, "a/b": np.float32(0.1), "n": np.int64(3), **endless})
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line["step"] == 1 and line["reward_mean"] == third
    assert line["a/b"] == float(np.float32(0.1)) and line["n"] == 3
    assert {line[name] for name in endless} == {None}
    assert next(iter(line)) == "step" and list(line)[1:] == sorted(list(line)[1:])
    assert tracker.history == [line]


def test_drift_of_a_judge_is_a_metric_once_there_are_steps_enough(tmp_path: Path) -> None:
    screen = Heard()
    judged = complete({"reward": {"api": JUDGED}})
    tracker = Tracker(tmp_path, screen, ("console",), total_steps=99, config=judged)
    for step in range(1, 21):
        gap = 0.0 if step <= 10 else 0.3
        tracker.step(step, {"judge/monitor_mean": 0.5, "judge/monitor_gap": gap})
    drifts = [line.get("judge/drift") for line in lines(tmp_path / "metrics.jsonl")]
    assert drifts[:10] == [None] * 7 + [0.0] * 3
    assert drifts[-1] == pytest.approx(0.3) and drifts[10:] == sorted(drifts[10:])
    assert any("while its second judge rose by only 0.00" in text for text in screen.warnings)


JUDGED = {"enable": True, "model": "m"}


@pytest.mark.parametrize(
    ("reward", "good", "expected"),
    [
        ({"api": JUDGED}, 1, {}),
        ({"api": JUDGED}, 10, {}),  # labels on the judge's own scale, 1-10
        ({"api": JUDGED | {"scale": "0-4"}}, 4, {}),
        ({"parts": ("judge:0.5", "rule:0.5"), "api": JUDGED}, 1, {"score": -3.0}),
    ],
)
def test_labels_given_while_a_run_goes_on_count_at_its_next_step(
    tmp_path: Path, reward: dict[str, Any], good: int, expected: dict[str, Any]
) -> None:
    screen = Heard()
    config = complete({"reward": reward})
    tracker = Tracker(tmp_path, screen, ("console",), total_steps=99, config=config)

    def label(step: int, judge: float, person_label: float | None) -> dict[str, Any]:
        line = {"id": f"train:{step}:{judge}", "step": step, "score": judge, "label": person_label}
        return line | {"parts": {"judge": {"raw": judge, "scaled": 2.0}}} | expected

    tracker.step(80, {})
    bad = 1 if good == 10 else 0
    labels = [label(s, 1.0, good) for s in range(1, 11)] + [label(5, 0.3, None)]
    labels += [label(80 - s, 1.0, bad if s < 5 else good) for s in range(10)]
    odd: list[dict[str, Any]] = [{"parts": None}, {"parts": "x"}, {"parts": {"judge": None}}]
    odd = odd if "parts" in reward else []
    replace_lines(tmp_path / "labels.jsonl", labels + [labels[0] | change for change in odd])
    tracker.step(81, {})
    assert tracker.history[-2].get("judge/drift") is None
    assert tracker.history[-1]["judge/drift"] == pytest.approx(0.5)
    assert any("while the labels that people gave" in text for text in screen.warnings)


def test_labels_that_cannot_be_read_for_certain_say_nothing(tmp_path: Path) -> None:
    labels = [{"step": s, "score": 1.0, "label": 5} for s in range(1, 30)]
    replace_lines(tmp_path / "labels.jsonl", [*labels, labels[0] | {"label": 10**400}])

    def people(**api: Any) -> int:
        config = complete({"reward": {"api": JUDGED | api}})
        return len(read_opinions(tmp_path, config.reward))

    api = {"scoring_prompt": "Rate {response} from 1 to 5."}
    assert (people(), people(**api), people(**api, scale="1-5")) == (29, 0, 29)
    (tmp_path / "labels.jsonl").unlink()
    (tmp_path / "labels.jsonl").mkdir()
    assert people() == 0


def test_phases_are_timed_and_added_up_and_start_again(tmp_path: Path) -> None:
    tracker = make(tmp_path)
    for _ in range(2):
        with tracker.phase("update actor", 2) as advance:
            advance(1)
    tracker.step(1, {})
    with pytest.raises(KeyError), tracker.phase("rollout"):
        raise KeyError("bug")
    tracker.step(2, {})
    first, second = lines(tmp_path / "metrics.jsonl")
    assert set(first) == {"step", "time/update_actor_s"} and first["time/update_actor_s"] > 0
    assert set(second) == {"step", "time/rollout_s"}


def test_time_left_is_of_the_whole_run_and_time_spent_of_all_sessions(tmp_path: Path) -> None:
    tracker = make(tmp_path)
    tracker.validation(0, {"val/accuracy": 0.5})
    tracker.step(1, {"time/step_s": 39.0})
    tracker.step(2, {"time/step_s": 41.0, "time/validate_s": 10.0})
    first = lines(tmp_path / "metrics.jsonl")
    assert [round(line["time/left_s"]) for line in first[1:]] == [8 * 39, 7 * 45]
    assert tracker.session[0] == 2
    tracker.close()
    replace_lines(tmp_path / "metrics.jsonl", [*first[:2], first[2] | {"time/run_s": 500.0}])
    resumed = make(tmp_path)
    resumed.resume_at(2)
    resumed.step(3, {"time/step_s": 1.0})
    last = lines(tmp_path / "metrics.jsonl")[-1]
    assert 500.0 < last["time/run_s"] < 560.0 and last["time/left_s"] == 6.0
    assert resumed.session[0] == 1


def test_the_newest_steps_and_all_that_comes_between_tell_the_time_left(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, Screen(), (), total_steps=20, config=complete({}))
    for step in range(1, 13):
        tracker.step(step, {"time/step_s": 100.0 if step <= 2 else 7.0})
    between = {"time/validate_s": 6.0, "time/validate_reward_s": 12.0, "time/save_s": 21.0}
    tracker.step(13, {"time/step_s": 7.0, **between, "time/rollout_s": 99.0})
    seconds_left = [line["time/left_s"] for line in lines(tmp_path / "metrics.jsonl")]
    assert seconds_left[10] == pytest.approx(9 * (100 + 9 * 7) / 10)  # ten steps, one of them slow
    assert seconds_left[11:] == pytest.approx([8 * 7, 7 * (7 + 39 / 13)])


def test_the_time_of_the_first_validation_is_in_its_own_line(tmp_path: Path) -> None:
    tracker = make(tmp_path)
    with tracker.phase("validate"):
        pass
    tracker.validation(0, {"val/x": 1.0})
    tracker.step(1, {})
    first, second = lines(tmp_path / "metrics.jsonl")
    assert "time/validate_s" in first and second == {"step": 1}


def test_validation_joins_the_line_of_its_step_and_step_0_has_its_own(tmp_path: Path) -> None:
    screen = Heard()
    tracker = make(tmp_path, screen)
    tracker.validation(0, {"val/accuracy": 0.1})
    tracker.validation(1, {"val/accuracy": 0.2})
    tracker.step(1, {"reward_mean": 1.0})
    tracker.step(2, {"reward_mean": 1.0})
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 0, "val/accuracy": 0.1},
        {"step": 1, "reward_mean": 1.0, "val/accuracy": 0.2},
        {"step": 2, "reward_mean": 1.0},
    ]
    assert screen.steps == [0, 1, 2]


def test_without_console_no_line_is_shown_but_warnings_are(tmp_path: Path) -> None:
    screen = Heard()
    make(tmp_path, screen, ()).step(1, {"ppo_ratio": 2.0})
    assert screen.steps == []
    assert len(screen.warnings) == 1 and "ppo_ratio" in screen.warnings[0]


@pytest.mark.parametrize("torn", ["", '{"step": 5, "rew', "\x00\x00", '{"step": 3, "x": 1}\n{"s'])
def test_resume_drops_later_steps_and_a_torn_line(tmp_path: Path, torn: str) -> None:
    tracker = make(tmp_path)
    for step in range(5):
        tracker.step(step, {"x": 0.1 * step})
        tracker.rollouts(step, [scored()])
        tracker.rollouts(step, [scored()], split="val")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    (tmp_path / "rollouts" / ".unfinished-step_000005.jsonl").write_text("{")
    resumed = make(tmp_path)
    resumed.resume_at(2)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    names = sorted(p.name for p in (tmp_path / "rollouts").iterdir())
    assert names == [f"{kind}_00000{n}.jsonl" for kind in ("step", "val") for n in range(3)]
    resumed.step(3, {"x": 0.1 * 3})
    assert lines(tmp_path / "metrics.jsonl")[-1] == {"step": 3, "x": 0.1 * 3}
    assert [line["step"] for line in resumed.history] == [0, 1, 2, 3]


def test_a_resumed_file_is_the_same_bytes_as_an_unbroken_one(tmp_path: Path) -> None:
    metrics = {s: {"x": s / 7, "nan": float("nan"), "a/long_name": 1e-17 * s} for s in range(1, 7)}
    intact, broken = make(tmp_path / "a"), make(tmp_path / "b")
    for step, values in metrics.items():
        intact.step(step, values)
    for step in range(1, 6):
        broken.step(step, metrics[step])
    resumed = make(tmp_path / "b")
    resumed.resume_at(3)
    for step in range(4, 7):
        resumed.step(step, metrics[step])
    files = [(tmp_path / n / "metrics.jsonl").read_bytes() for n in ("a", "b")]
    assert files[0] == files[1]
    assert json.dumps(intact.history) == json.dumps(resumed.history)


def test_a_step_written_again_replaces_its_line(tmp_path: Path) -> None:
    tracker = make(tmp_path)
    for value in (1.0, 2.0):
        tracker.validation(0, {"val/x": value})
    tracker.step(1, {})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 0, "val/x": 2.0}, {"step": 1}]


def test_a_rollout_line_has_everything(tmp_path: Path) -> None:
    info = {"tokens": 99, "latency_s": np.float32(0.5)}
    rows = [scored("4", 1.0, "SCORE: 10", **info), scored("5", None)]
    make(tmp_path).rollouts(7, rows)
    first, second = lines(tmp_path / "rollouts" / "step_000007.jsonl")
    assert first == {
        "step": 7, "uid": "p1", "sample": 0, "prompt": "2+2?", "response": "4",
        "ground_truth": "4", "data_source": "add", "score": 1.0, "failure": "", "reason": "right",
        "parts": {"rule": {"raw": 2.0, "scaled": 1.0}}, "tokens": 3, "finish_reason": "stop",
        "judge_reply": "SCORE: 10", "reward_tokens": 99, "latency_s": 0.5,
    }  # fmt: skip
    assert second["score"] is None and second["failure"] == "timeout"
    assert [p.name for p in (tmp_path / "rollouts").iterdir()] == ["step_000007.jsonl"]


def test_a_line_of_an_episode_has_its_turns(tmp_path: Path) -> None:
    episode = replace(sum_episode(1), ended="turns")
    failed = replace(episode, turns=episode.turns[:1], sample=1, failure="the tool died", ended="")
    tracker = make(tmp_path)
    tracker.rollouts(3, [Scored(episode, Score(1.0)), Scored(failed, Score.failed(failed.failure))])
    line, other = lines(tmp_path / "rollouts" / "step_000003.jsonl")
    assert line["opening"] == [{"role": "user", "content": "What is 1 + 1?"}]
    assert line["turns"] == [
        {
            "message": dict(episode.turns[0].message), "replies": list(episode.turns[0].replies),
            "rewards": {"form": 0.25}, "tokens": 4, "seconds": 0.5, "tools": [["add", 0.5]],
        },
        {"message": {"role": "assistant", "content": "It is 2."}, "tokens": 3},
    ]  # fmt: skip
    assert (line["response"], line["ended"], line["tokens"]) == ("It is 2.", "turns", 7)
    assert (other["failure"], len(other["turns"]), other["score"]) == ("the tool died", 1, None)
    assert compute_response_id(line) != compute_response_id(line | {"turns": line["turns"][1:]})


def test_any_text_comes_back_as_it_was_but_for_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "very-secret-value")
    texts = ["日本 é 🎉", "half \ud83d", "a\u2028b\x85c\nd\te", '"\\', "\x1b[31m"]
    secret = scored("I know very-secret-value", 1.0, raw={"list": ["very-secret-value"]})
    unknown = scored("4", 1.0, a=Path("x"), b={1: {2}}, c=np.arange(2))
    make(tmp_path).rollouts(1, [*map(scored, texts), secret, unknown])
    raw = (tmp_path / "rollouts" / "step_000001.jsonl").read_bytes()
    assert raw.count(b"\n") == len(texts) + 2 and b"very-secret" not in raw
    *earlier, _, last = (json.loads(line) for line in raw.split(b"\n")[:-1])
    assert [line["response"] for line in earlier] == texts
    assert (last["a"], last["b"], last["c"]) == ("x", {"1": [2]}, [0, 1])


def test_a_full_disk_is_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = make(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"No space left.*run the same command again"):
        tracker.step(1, {})
    with pytest.raises(UserError, match="No space left"):
        tracker.rollouts(1, [scored()])
    assert not (tmp_path / "rollouts" / "step_000001.jsonl").exists()
