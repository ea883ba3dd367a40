"""How much verdicts differ by chance: asked for once, kept over a kill; votes while they do."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.rewards.judge.asker import UNKNOWN_ANSWER
from ppo_cli.rewards.judge.compare import CompareReward
from tests.judge_server import JudgeServer
from tests.rewards.scoring import number_of, score_all, sum_rollout

Make = Callable[..., Any]


def repeating(server: JudgeServer, *verdicts: int) -> Counter[int]:
    """Give these verdicts on each response in turn; returns how often it was asked about."""
    times: Counter[int] = Counter()

    def score(system: str, user: str) -> int:
        times[number_of(user)] += 1
        return verdicts[min(times[number_of(user)], len(verdicts)) - 1]

    server.score = score
    return times


def test_a_few_responses_are_asked_about_again_and_keep_their_scores(
    server: JudgeServer, judge_of: Make, tmp_path: Path
) -> None:
    times = repeating(server, 4, 6, 8)
    reward = judge_of(prompt_preset="math", noise_responses=3)
    reward.attach(tmp_path)
    reward.begin_step(1)
    scores = score_all(reward, [sum_rollout(number) for number in range(5)])
    metrics = reward.pop_metrics()
    assert [score.value for score in scores] == pytest.approx([3 / 9] * 5)
    assert Counter(times.values()) == {3: 3, 1: 2}, "three of the five responses, twice more"
    # Of 3/9, 5/9 and 7/9 the variance, divided by n - 1, is (2/9)^2.
    assert metrics["judge/noise"] == pytest.approx(2 / 9)
    assert metrics["judge/noise_responses"] == 3 and "judge/noise_failed" not in metrics
    # Only the first step, and only once.
    reward.begin_step(2)
    score_all(reward, [sum_rollout(number) for number in range(5, 9)])
    assert "judge/noise" not in reward.pop_metrics() and sum(times.values()) == 15
    # The cache has the first verdicts only: another run measures for itself.
    other = judge_of(prompt_preset="math", noise_responses=3)
    other.begin_step(1)
    score_all(other, [sum_rollout(number) for number in range(5)])
    assert other.pop_metrics()["judge/noise"] > 0 and sum(times.values()) == 21


def test_a_resumed_run_asks_only_for_the_verdicts_that_are_missing(
    server: JudgeServer, judge_of: Make, tmp_path: Path
) -> None:
    times = repeating(server, 4, 6, 8)
    rollouts = [sum_rollout(number) for number in range(4)]

    def run_first_step() -> dict[str, float]:
        reward = judge_of(prompt_preset="math", noise_responses=4)
        reward.attach(tmp_path)
        reward.begin_step(1)
        score_all(reward, rollouts)
        metrics: dict[str, float] = reward.pop_metrics()
        reward.close()
        return {name: value for name, value in metrics.items() if "noise" in name}

    before = run_first_step()
    assert sum(times.values()) == 12
    assert run_first_step() == before and sum(times.values()) == 12, "all of them are in the file"
    # As a kill leaves it: three of the eight verdicts are lost, the last line is cut.
    file = tmp_path / "judge_repeats.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:5], lines[5][:20]]) + "\n")
    run_first_step()
    assert sum(times.values()) == 15
    # From a later checkpoint nothing is due.
    later = judge_of(prompt_preset="math", noise_responses=4)
    later.attach(tmp_path)
    later.begin_step(3)
    score_all(later, rollouts)
    assert "judge/noise" not in later.pop_metrics() and sum(times.values()) == 15


def test_repeated_requests_differ_by_their_nonce(server: JudgeServer, judge_of: Make) -> None:
    requests: list[str] = []

    def score(system: str, user: str) -> int:
        requests.append(user)
        return 5

    server.score = score
    reward = judge_of(prompt_preset="math", noise_responses=1)
    reward.begin_step(1)
    score_all(reward, [sum_rollout(1)])
    reward.pop_metrics()
    assert len(requests) == len(set(requests)) == 3


def test_a_judge_that_fails_to_repeat_itself_changes_no_score(
    server: JudgeServer, judge_of: Make
) -> None:
    times: Counter[int] = Counter()

    def score(system: str, user: str) -> int | str:
        times[number_of(user)] += 1
        return 10 if times[number_of(user)] == 1 else "no number"

    server.score = score
    reward = judge_of(prompt_preset="math", noise_responses=2, cache="off")
    reward.begin_step(1)
    assert [s.value for s in score_all(reward, [sum_rollout(1), sum_rollout(2)])] == [1.0, 1.0]
    metrics = reward.pop_metrics()
    assert metrics["judge/noise_failed"] == 4 and "judge/noise" not in metrics


def test_votes_show_the_noise_without_further_calls(server: JudgeServer, judge_of: Make) -> None:
    times = repeating(server, 2, 4)
    reward = judge_of(prompt_preset="math", votes=2)
    reward.begin_step(1)
    score_all(reward, [sum_rollout(number) for number in range(3)])
    metrics = reward.pop_metrics()
    assert metrics["judge/noise"] == pytest.approx(math.sqrt(2) / 9) and set(times.values()) == {2}


def test_comparisons_are_repeated_too(server: JudgeServer, judge_of: Make) -> None:
    # The same question is asked again: not another one, which this judge would answer otherwise.
    def score(system: str, user: str) -> str:
        return json.dumps({"better_response": "R1" if UNKNOWN_ANSWER in user else "tie"})

    server.score = score
    reward = judge_of(kind=CompareReward, mode="compare", compare="ground_truth", noise_responses=3)
    reward.begin_step(1)
    score_all(reward, [sum_rollout(number, "It is 7, or so.") for number in range(4)])
    metrics = reward.pop_metrics()
    assert metrics["judge/noise"] == 0.0 and metrics["judge/noise_responses"] == 3
    assert server.count == 4 * 2 + 3 * 2


@pytest.mark.parametrize(
    ("verdicts", "calls", "raw"),
    [((7, 7), 2, 7), ((7, 8, 8), 3, 23 / 3), ((1, 2, 3, 4, 5), 5, 3), ((1, 2, 3, 3, 3), 5, 2.4)],
)
def test_another_vote_is_asked_for_only_while_no_score_has_a_majority(
    server: JudgeServer, judge_of: Make, verdicts: tuple[int, ...], calls: int, raw: float
) -> None:
    # One after another, so that the order of the replies is that of the votes.
    times = repeating(server, *verdicts)
    reward = judge_of(prompt_preset="math", votes=2, max_votes=5, cache="off", concurrency=1)
    reward.begin_step(1)
    (score,) = score_all(reward, [sum_rollout(1)])
    assert (times[1], score.parts["judge"].raw) == (calls, pytest.approx(raw))
    metrics = reward.pop_metrics()
    assert metrics["judge/votes"] == calls == len(score.facts["votes"])
    # The noise is that of the votes which every response gets.
    gap = abs(verdicts[0] - verdicts[1]) / 9
    assert metrics["judge/noise"] == pytest.approx(gap / math.sqrt(2))


def test_how_well_places_repeat_is_measured_with_the_same_calls(
    server: JudgeServer, judge_of: Make, tmp_path: Path
) -> None:
    replies = [{"piece_1": 10, "piece_2": low, "score_1_to_10": 5} for low in (1, 4, 1)]
    answers = iter(map(json.dumps, replies))
    server.score = lambda system, user: next(answers)
    reward = judge_of(noise_responses=3, place="sentence")
    reward.attach(tmp_path)
    reward.begin_step(1)
    score_all(reward, [replace(sum_rollout(1), text="It is 2. Sure?")])
    metrics = reward.pop_metrics()
    # Of 0, 1/3 and 0 the variance is 1/27; between the pieces it is 1/2, 2/9 and 1/2.
    assert metrics["judge/place_noise"] == pytest.approx(math.sqrt(1 / 54))
    assert metrics["judge/place_repeats"] == pytest.approx(1 - 1 / 22)
    assert metrics["judge/place_pieces"] == 2 and metrics["judge/noise"] == 0
