"""The judge as a reward, in one process: the real openai SDK against a judge on loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from ppo_cli.errors import Interrupted, RewardError
from ppo_cli.rewards.judge.calls import JudgeError, score_from_votes
from ppo_cli.rewards.judge.reward import JudgeReward
from ppo_cli.rewards.remote.failures import Failure
from tests.judge_server import JudgeServer
from tests.judge_server.asking import SECRET, make_question
from tests.rewards.scoring import score_all, sum_prompt, sum_rollout
from tests.waiting import wait_until

Make = Callable[..., JudgeReward]


@pytest.fixture
def make(judge_of: Make) -> Make:
    return partial(judge_of, prompt_preset="math")


def test_scores_are_scaled_and_tell_what_was_said(make: Make) -> None:
    good, bad = score_all(make(), [sum_rollout(1), sum_rollout(2, "It is 7.")])
    assert (good.value, bad.value) == (1.0, 0.0)
    assert good.parts["judge"].raw == 10 and good.parts["judge"].scaled == 1.0
    assert good.reason and '"score": 10' in good.reply
    assert good.info["judge_tokens"] > 0 and good.info["cached"] is False


def test_nothing_is_asked_for_a_response_without_content(make: Make, server: JudgeServer) -> None:
    reward = make()
    scores = score_all(
        reward, [sum_rollout(n, text) for n, text in enumerate(("", " :", "Solution:"))]
    )
    assert [s.value for s in scores] == [0.0] * 3 and server.count == 0
    assert all(s.gated for s in scores)
    assert reward.pop_metrics()["judge/gated"] == 3 and reward.pop_metrics() == {}
    (score,) = score_all(make(gate=False), [sum_rollout(5, ":")])
    assert score.value == 0.0 and server.count == 1
    asks = "What is a homogeneous mixture called?"
    rollouts = [
        sum_rollout(6, "Solution", text=asks, ground_truth="solution"),
        sum_rollout(7, asks, text=asks),
    ]
    expected, repeated = score_all(reward, rollouts)
    assert repeated.gated and not expected.gated and server.count == 2


def test_votes_are_averaged_and_their_spread_is_told(server: JudgeServer, make: Make) -> None:
    answers = iter([4, 7, 10])
    server.score = lambda system, user: next(answers)
    reward = make(votes=3)
    (score,) = score_all(reward, [sum_rollout(1)])
    assert score.value == pytest.approx(6 / 9) and sorted(score.info["votes"]) == [4, 7, 10]
    assert score.parts["judge"].raw == 7 and '"score": 7' in score.reply
    assert score.info["vote_spread"] == pytest.approx(np.std([3 / 9, 6 / 9, 1.0]))
    assert reward.pop_metrics()["judge/vote_spread"] == pytest.approx(score.info["vote_spread"])
    assert [call.body["seed"] for call in server.calls] == [0, 1, 2]
    score_all(reward, [sum_rollout(1, "")])
    assert "judge/vote_spread" not in reward.pop_metrics()


def test_a_vote_that_may_still_come_is_why_there_is_no_score() -> None:
    errors = [JudgeError(kind, "any", "no") for kind in (Failure.REFUSED, Failure.RETRYABLE)]
    assert score_from_votes(errors, make_question()) == (None, errors[1])


def test_half_of_the_votes_are_not_enough(server: JudgeServer, make: Make) -> None:
    server.fail("refusal", times=1)
    reward = make(votes=2, max_failure_rate=1.0)
    (score,) = score_all(reward, [sum_rollout(1)])
    assert score.value is None and score.failure.startswith("refusal")
    assert reward.pop_metrics()["judge/refusals"] == 1


def test_settings_reach_the_request(server: JudgeServer, make: Make) -> None:
    reward = make(
        max_tokens=77, max_response_chars=200, temperature=0.3, reasoning="keep",
        scoring_prompt="{extra_info.rubric} {response}",
    )  # fmt: skip
    response = "<think>It is easy</think>It is 2." + " ever" * 200
    score_all(reward, [sum_rollout(1, response, extra_info={"rubric": "Be brief."})])
    body = server.calls[-1].body
    assert (body["max_tokens"], body["temperature"]) == (77, 0.3)
    messages = str(body["messages"])
    assert (
        "It is easy" in messages and "Be brief." in messages and 20 < messages.count(" ever") < 60
    )


def test_what_becomes_of_a_failure_is_a_setting(server: JudgeServer, make: Make) -> None:
    server.score = lambda system, user: "no number" if "What is 1 +" in user else 10
    rollouts = [sum_rollout(n) for n in range(1, 6)]
    assert [s.value for s in score_all(make(), rollouts)] == [None, 1.0, 1.0, 1.0, 1.0]
    imputed, *_ = score_all(make(on_failure="batch_mean"), rollouts)
    assert imputed.value == 1.0 and imputed.imputed.startswith("form")
    with pytest.raises(Interrupted, match="1 of 5 responses"):
        score_all(make(on_failure="stop"), rollouts)
    with pytest.raises(Interrupted, match="--rm_max_failure_rate 0 allows"):
        score_all(make(max_failure_rate=0.0), rollouts)


def test_a_conversation_is_shown_whole(make: Make, server: JudgeServer) -> None:
    turns = (
        {"role": "user", "content": "Remember the word heron."},
        {"role": "assistant", "content": "I will."},
        {"role": "user", "content": "Which word was it?"},
    )
    reward = make(prompt_preset="dialogue")
    score_all(reward, [sum_rollout(1, "It was heron.", messages=turns, text="Which word was it?")])
    content = server.calls[-1].body["messages"][-1]["content"]
    transcript = (
        "User: Remember the word heron.",
        "Assistant: I will.",
        "User: Which word was it?",
    )
    assert "\n\n".join(transcript) in content


def test_metrics_of_a_step(make: Make, server: JudgeServer) -> None:
    reward = make(price_input=1.0, price_output=2.0)
    server.fail(503, times=1)
    rollouts = [*map(sum_rollout, (1, 2, 3)), sum_rollout(4, "no " * 40), sum_rollout(5, "")]
    scored = score_all(reward, rollouts)
    metrics = reward.pop_metrics()

    def total(name: str) -> float:
        return sum(score.info.get(name, 0) for score in scored)

    assert total("judge_calls") == metrics["judge/calls"]
    assert total("judge_tokens") == metrics["judge/tokens_in"] + metrics["judge/tokens_out"]
    cost = metrics["judge/tokens_in"] + 2 * metrics["judge/tokens_out"]
    assert metrics["judge/cost_usd"] == pytest.approx(cost / 1e6)
    assert metrics["judge/cost_usd"] == pytest.approx(total("cost_usd"))
    slowest = max(score.info.get("latency_s", 0.0) for score in scored)
    assert slowest >= metrics["judge/latency_p95_s"] - 1e-3
    assert (metrics["judge/calls"], metrics["judge/retries"], metrics["judge/gated"]) == (5, 1, 1)
    assert metrics["judge/length_correlation"] < -0.9
    assert reward.pop_metrics() == {}
    score_all(reward, [sum_rollout(1), sum_rollout(1)])
    second = reward.pop_metrics()
    assert second["judge/cache_hits"] == 1.0 and second["judge/cost_usd"] == 0.0
    assert second["judge/cost_usd_total"] == metrics["judge/cost_usd_total"]


def test_canaries_go_past_gate_and_cache(make: Make, server: JudgeServer) -> None:
    server.score = lambda system, user: 9
    reward = make(canary_every=2)
    for step in (1, 2, 4):
        reward.begin_step(step)
        score_all(reward, [sum_rollout(1)])
        wait_until(lambda: server.count == {1: 1, 2: 5, 4: 9}[step])  # noqa: B023
    wait_until(lambda: reward.pop_metrics().get("judge/canary_max") == pytest.approx(8 / 9))
    assert server.count == 9  # one verdict, twice four canaries


def test_the_start_checks_key_model_and_form(make: Make, server: JudgeServer) -> None:
    notes: list[str] = []
    make().start([sum_prompt(1)], tell=notes.append)
    assert server.count == 1 and notes == []
    with pytest.raises(RewardError, match="ground_truth"):  # before any call
        make().start([sum_prompt(1), sum_prompt(2, ground_truth=None)])
    make().start([sum_prompt(1)])
    assert server.count == 1  # paid for, and in the cache
    server.fail(404)
    with pytest.raises(RewardError, match=r"(?s)http_404.*judge-1.*--rm_model"):
        make(cache="off").start([sum_prompt(1)])
    server.heal()
    server.fail("prose")
    with pytest.raises(RewardError, match="no score can be read"):
        make(cache="off").start([sum_prompt(1)])


def test_the_start_tells_which_parameters_a_model_does_not_take(
    make: Make, server: JudgeServer
) -> None:
    notes: list[str] = []
    server.fail("reject_param", param="temperature")
    make(temperature=0.5).start([sum_prompt(1)], tell=notes.append)
    assert len(notes) == 1 and "temperature" in notes[0] and "judge-1" in notes[0]


def test_the_start_waits_ever_longer_and_as_long_as_it_is_told(
    make: Make, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = time.sleep
    main = threading.get_ident()

    def note(seconds: float) -> None:
        pauses.append(seconds) if threading.get_ident() == main else sleep(seconds)

    monkeypatch.setattr("ppo_cli.rewards.remote.client.time.sleep", note)
    notes: list[str] = []
    server.fail(503, times=6)
    make(cache="off").start([sum_prompt(1)], tell=notes.append)
    assert len(notes) == 1 and "does not answer yet (http_503" in notes[0]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    pauses.clear()
    server.fail(429, times=1, retry_after=7)
    make(cache="off", outage_wait=60.0).start([sum_prompt(1)])
    server.fail(429, times=1, retry_after=7000)
    make(cache="off", outage_wait=60.0).start([sum_prompt(1)])
    assert pauses == [7.0, pytest.approx(60.0, abs=5.0)]
    with pytest.raises(Interrupted, match="did not answer for 1 s"):
        # A run that goes on takes an address where nobody is for an outage.
        make(base_url="http://127.0.0.1:9/v1", outage_wait=0.5).start([sum_prompt(1)], patient=True)


def test_the_start_asks_about_other_prompts_when_some_are_refused(
    make: Make, server: JudgeServer
) -> None:
    notes: list[str] = []
    server.fail("refusal", times=2)
    make(cache="off").start([sum_prompt(n) for n in range(5)], tell=notes.append)
    assert server.count == 3 and notes == []
    server.fail("refusal")
    make(cache="off").start([sum_prompt(n) for n in range(5)], tell=notes.append)
    assert server.count == 6 and "would not judge the first prompts" in notes[0]


def test_closing_twice_is_fine_and_submitting_after_is_not(make: Make) -> None:
    reward = make()
    reward.close()
    reward.close()
    with pytest.raises(RuntimeError, match="closed"):
        reward.submit(sum_rollout(1))


def test_a_page_in_place_of_a_judge_is_named_at_the_start(
    make: Make, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppo_cli.rewards.remote.client.UNREACHABLE_S", 0.1)
    server.fail("html")
    with pytest.raises(RewardError, match=r"a page of HTML: Sign in.*--rm_base_url"):
        make(cache="off").start([sum_prompt(1)])
    with pytest.raises(RewardError, match="cannot be reached at http://127"):
        make(base_url="http://127.0.0.1:9/v1").start([sum_prompt(1)])


@pytest.mark.parametrize(
    "reason",
    [
        'It embeds <img src="https://maps.example.com/staticmap?key=YOUR_KEY"> without alt text.',
        'It runs curl "https://h/?sig=1" twice.',
        '{"url": "https://h/?x=1&password=p"}',
        f'It prints the key "{SECRET}" and \\ and "token={SECRET}\\".',
    ],
)
def test_a_reply_is_read_before_secrets_are_taken_out(
    make: Make, server: JudgeServer, reason: str
) -> None:
    server.score = lambda system, user: json.dumps({"reason": reason, "score": 8})
    (score,) = score_all(make(cache="off"), [sum_rollout(1)])
    assert score.parts["judge"].raw == 8.0 and server.count == 1
    assert SECRET not in f"{score.reason}{score.reply}"


def test_a_reply_that_does_not_count_shows_no_secret(make: Make, server: JudgeServer) -> None:
    server.score = lambda system, user: f"The key is {SECRET}, and it is good."
    (score,) = score_all(make(cache="off"), [sum_rollout(1)])
    assert score.value is None
    assert SECRET not in f"{score.failure}{score.reply}{score.reason}"
    assert "it is good" in score.reply


def test_a_step_whose_requests_do_not_fit_stops_with_what_helps(
    make: Make, server: JudgeServer
) -> None:
    reward = make(cache="off", outage_wait=60.0)
    score_all(reward, [sum_rollout(0)])
    server.fail(400, message="prompt is too long: 900 tokens > 700 maximum")
    began = time.monotonic()
    with pytest.raises(Interrupted, match=r"too_long 9.*--rm_max_response_chars"):
        score_all(reward, [sum_rollout(n) for n in range(1, 10)])
    assert time.monotonic() - began < 50.0
