"""Everything that can go wrong at a server, over the real httpx: who pays for it, and the words."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from ppo_cli.errors import Interrupted, RewardError
from ppo_cli.records import Rollout, Score
from ppo_cli.rewards.served.reward import ServedModelReward
from tests.reward_server import RewardServer, score_of_text
from tests.rewards.served.conftest import SECRET

Make = Callable[..., ServedModelReward]
MakeRollout = Callable[..., Rollout]
ScoreAll = Callable[..., list[Score]]


def sent_text(rollout: Rollout) -> str:
    return rollout.prompt.rendered + rollout.text


# --- one sample is to blame ---------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 413, 422, 500])
def test_only_the_sample_that_is_not_taken_fails(
    make: Make, server: RewardServer, rollout: MakeRollout, score_all: ScoreAll, status: int
) -> None:
    server.fail(status, holding="poison", message="this one is too long")
    rollouts = [rollout(n, "poison" if n == 5 else None) for n in range(16)]
    scores = score_all(make("openrlhf"), rollouts)
    for each, score in zip(rollouts, scores, strict=True):
        if each.text == "poison":
            assert score.value is None
            assert score.failure == f"http_{status}: this one is too long"
        else:
            assert score.value == score_of_text(sent_text(each))
    assert len(server.calls) < 40


def test_a_lone_sample_that_is_not_taken_fails_too(
    make: Make, server: RewardServer, rollout: MakeRollout, score_all: ScoreAll
) -> None:
    server.fail(400, holding="poison", message="too long")
    (score,) = score_all(make(), [rollout(1, "poison")])
    assert score.failure == "http_400: too long"


def test_a_server_that_takes_fewer_rows_gets_fewer(
    make: Make, server: RewardServer, rollout: MakeRollout, score_all: ScoreAll
) -> None:
    server.fail(422, rows=4, message="batch size 16 > maximum allowed batch size 4")
    reward = make("openrlhf", request_rows=16, concurrency=1)
    assert all(s.value is not None for s in score_all(reward, [rollout(n) for n in range(16)]))
    before = len(server.calls)
    assert all(s.value is not None for s in score_all(reward, [rollout(n) for n in range(16)]))
    assert len(server.calls) - before == 4


@pytest.mark.parametrize("wire", ["vllm", "openrlhf", "rerank"])
@pytest.mark.parametrize("kind", ["null", "nan", "string", "bool", "huge"])
def test_no_number_is_made_up(
    make: Make, server: RewardServer, rollout: MakeRollout, score_all: ScoreAll, kind: str,
    wire: str,
) -> None:  # fmt: skip
    reward = make(wire, concurrency=1)
    server.fail(kind, times=1)
    first, second = score_all(reward, [rollout(1, "One.", 0), rollout(1, "Two.", 1)])
    assert first.value is None and first.failure.startswith("no number: the server's score is")
    assert second.value is not None and reward.measure()["model/failed"] == 1


MISFITS = [
    (wire, kind)
    for wire in ("vllm", "openrlhf", "rerank")
    for kind in ("short", "long", "twice", "object", "other_json")
    if (wire, kind) != ("openrlhf", "twice")  # a list without indices does not show it
]


@pytest.mark.parametrize(("wire", "kind"), MISFITS)
def test_a_reply_that_does_not_fit_its_request_gives_no_score(
    make: Make, server: RewardServer, rollout: MakeRollout, score_all: ScoreAll, kind: str,
    wire: str,
) -> None:  # fmt: skip
    reward = make(wire)
    server.fail(kind, holding="odd")
    odd, even = score_all(reward, [rollout(1, "odd", 0), rollout(2, "even", 1)])
    assert odd.value is None and odd.failure.startswith("bad_body: ")
    assert even.value is not None


def test_rows_without_an_index_are_not_guessed(
    make: Make, server: RewardServer, rollout: MakeRollout, score_all: ScoreAll
) -> None:
    server.fail("no_index", holding="odd")
    (score,) = score_all(make(), [rollout(1, "odd")])
    assert score.value is None and "without a usable index" in score.failure


@pytest.mark.parametrize("kind", ["html", "truncated", "empty", "cut", 500, 503, 429, 408])
def test_what_passes_is_tried_again(
    make: Make, server: RewardServer, rollout: MakeRollout, score_all: ScoreAll, kind: Any
) -> None:
    server.fail(kind, times=1)
    reward = make("openrlhf")
    (score,) = score_all(reward, [rollout(1)])
    assert score.value is not None
    metrics = reward.measure()
    assert metrics["model/retries"] == 1 and metrics["model/requests"] == 2


def test_a_slow_reply_is_given_up_and_asked_for_again(
    make: Make, server: RewardServer, rollout: MakeRollout, score_all: ScoreAll
) -> None:
    server.fail("hang", times=1)
    began = time.monotonic()
    (score,) = score_all(make("openrlhf", timeout=0.3), [rollout(1)])
    assert score.value is not None and 0.3 <= time.monotonic() - began < 20.0


def test_retry_after_is_kept(
    make: Make, server: RewardServer, rollout: MakeRollout, score_all: ScoreAll
) -> None:
    server.fail(429, times=1, retry_after=0.4)
    score_all(make("openrlhf"), [rollout(1)])
    first, second = (call.time for call in server.calls)
    assert 0.4 <= second - first < 2.0


def test_half_a_character_is_the_servers_to_judge(
    make: Make, server: RewardServer, rollout: MakeRollout, score_all: ScoreAll
) -> None:
    odd = rollout(1, "half \ud83d of it")
    (score,) = score_all(make("openrlhf"), [odd])
    assert score.value == score_of_text(sent_text(odd))


# --- the server is down -------------------------------------------------------------------------


def sentence_of(reward: ServedModelReward, within: float = 5.0) -> str | None:
    """What the reward waits for, as soon as it says so."""
    end = time.monotonic() + within
    while (said := reward.waiting_for()) is None and time.monotonic() < end:
        time.sleep(0.01)
    return said


def submit_all(reward: ServedModelReward, rollouts: list[Rollout]) -> list[Future[Score]]:
    futures = [reward.submit(rollout) for rollout in rollouts]
    reward.settle()
    return futures


@pytest.mark.parametrize("fault", ["refused", 503, "html", 429, 404, 401])
def test_an_outage_is_waited_out(
    make: Make, server: RewardServer, rollout: MakeRollout, score_all: ScoreAll, fault: Any
) -> None:
    reward = make("openrlhf", request_rows=2, outage_wait=20.0)
    assert score_all(reward, [rollout(0)])[0].value is not None and reward.waiting_for() is None
    rollouts = [rollout(n) for n in range(9)]
    if fault == "refused":
        server.pause()
    else:
        server.fail(fault, message="not today")
    futures = submit_all(reward, rollouts)
    said = sentence_of(reward)
    assert said is not None and said.startswith("The reward model's server does not answer (")
    assert "trying again in" in said and not any(future.done() for future in futures)
    server.heal()
    if fault == "refused":
        server.resume()
    assert [f.result(20).value for f in futures] == [score_of_text(sent_text(r)) for r in rollouts]
    assert reward.waiting_for() is None


def test_an_outage_that_lasts_stops_the_run_resumably(
    make: Make, server: RewardServer, rollout: MakeRollout
) -> None:
    reward = make("openrlhf", outage_wait=0.4, request_rows=1)
    server.pause()
    futures = submit_all(reward, [rollout(n) for n in range(5)])
    for future in futures:
        with pytest.raises(Interrupted, match="did not answer for 0 s") as told:
            future.result(10)
        assert told.value.exit_code == 3
    with pytest.raises(Interrupted):
        submit_all(reward, [rollout(9)])[0].result(10)
    server.resume()


def test_a_server_that_turns_all_away_stops_the_run(
    make: Make, server: RewardServer, rollout: MakeRollout, score_all: ScoreAll
) -> None:
    fresh, proven = make("openrlhf"), make("openrlhf")
    score_all(proven, [rollout(0)])
    server.fail(403, message="your key is no good")
    with pytest.raises(RewardError, match="your key is no good"):
        submit_all(fresh, [rollout(1)])[0].result(10)
    with pytest.raises(Interrupted, match="your key is no good"):
        submit_all(proven, [rollout(1)])[0].result(10)


def test_a_sample_that_brings_the_server_down_is_found(
    make: Make, server: RewardServer, rollout: MakeRollout, score_all: ScoreAll
) -> None:
    server.fail("cut", holding="poison")
    scores = score_all(
        make("openrlhf"), [rollout(n, "poison" if n == 2 else None) for n in range(4)]
    )
    assert [score.value is None for score in scores] == [False, False, True, False]
    assert scores[2].failure.startswith("connection: ")


def test_closing_ends_what_is_under_way(
    make: Make, server: RewardServer, rollout: MakeRollout
) -> None:
    server.fail("hang")
    reward = make("openrlhf")
    full = submit_all(reward, [rollout(1)])
    half = reward.submit(rollout(2))
    threads = threading.active_count()
    reward.close()
    for future in (*full, half):
        with pytest.raises(Interrupted):
            future.result(5)
    assert threading.active_count() == threads - 1


# --- the start ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["vllm", "openrlhf", "rerank"])
def test_a_good_server_passes_the_start(make: Make, prompt: Any, wire: str) -> None:
    told: list[str] = []
    reward = make(wire)
    reward.start([prompt()], tell=told.append)
    assert [line for line in told if "end token" not in line and "cut long" not in line] == []
    assert len(told) == (2 if wire == "openrlhf" else 0)
    assert reward.measure()["model/requests"] == 0


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (404, "Check the address"), (401, "key"), (400, "a fault of this test"), (422, "http_422"),
        (500, "http_500"), ("html", "a web page: Sign in to this network"),
        ("object", "bad_body"), ("truncated", "not JSON"), (405, "http_405"), (307, "http_307"),
    ],
)  # fmt: skip
def test_a_server_that_gives_no_scores_is_told_at_once(
    make: Make, server: RewardServer, prompt: Any, fault: Any, words: str
) -> None:
    server.fail(fault)
    began = time.monotonic()
    with pytest.raises(RewardError) as told:
        make("openrlhf").start([prompt()])
    assert words in str(told.value) and "--reward_model" in str(told.value)
    assert server.url() in str(told.value) and time.monotonic() - began < 30.0


def test_nobody_there_is_told_at_once(make: Make, prompt: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(RewardError, match=r"connection: .*Check the address"):
        make(path=f"http://127.0.0.1:{port}/classify").start([prompt()])


def test_a_patient_start_waits(make: Make, server: RewardServer, prompt: Any) -> None:
    server.pause()
    threading.Timer(0.4, server.resume).start()
    told: list[str] = []
    make().start([prompt()], patient=True, tell=told.append)
    assert len(told) == 1 and "does not answer yet" in told[0]
    server.pause()
    with pytest.raises(Interrupted, match="did not answer"):
        make(outage_wait=0.3).start([prompt()], patient=True)
    server.resume()


def test_the_key_is_sent_and_never_told(
    make: Make, server: RewardServer, rollout: MakeRollout, prompt: Any
) -> None:
    server.key = SECRET
    make(key_env="MY_KEY").start([prompt()])
    server.key = "another"
    with pytest.raises(RewardError) as told:
        make(key_env="MY_KEY").start([prompt()])
    assert "http_401: Unauthorized: " in str(told.value) and SECRET not in str(told.value)
    server.key = SECRET
    server.fail(403, message=f"{SECRET} may not ask")
    with pytest.raises(RewardError, match="may not ask") as told:
        make(key_env="MY_KEY").start([prompt()])
    assert SECRET not in str(told.value)
    server.key = "another"
    address = server.url("/classify").replace("//", "//me:pass-word@")
    with pytest.raises(RewardError) as told:
        make(path=address).start([prompt()])
    assert "pass-word" not in str(told.value)


@pytest.mark.parametrize("switch", ["use_activation", "activation", "softmax"])
def test_raw_scores_are_had_by_whatever_name(
    make: Make, server: RewardServer, rollout: MakeRollout, score_all: ScoreAll, prompt: Any,
    switch: str,
) -> None:  # fmt: skip
    server.switch = switch
    told: list[str] = []
    reward = make()
    reward.start([prompt()], tell=told.append)
    (score,) = score_all(reward, [rollout(1)])
    assert score.value is not None and score.value > 1.0 and told == []


def test_scores_that_are_raw_whatever_is_asked_pass(
    make: Make, server: RewardServer, prompt: Any
) -> None:
    server.switch, server.activation = None, "none"
    told: list[str] = []
    make().start([prompt()], tell=told.append)
    assert told == []


def test_scores_that_look_activated_are_told(make: Make, server: RewardServer, prompt: Any) -> None:
    server.switch = None
    told: list[str] = []
    make().start([prompt()], tell=told.append)
    assert len(told) == 1 and "between 0 and 1" in told[0] and "--pooler-config" in told[0]
    server.activation = "softmax"
    with pytest.raises(RewardError, match="exactly 1"):
        make().start([prompt()])


@pytest.mark.parametrize("wire", ["vllm", "openrlhf", "rerank"])
def test_the_self_test_finds_a_model_that_knows_nothing(
    make: Make, server: RewardServer, prompt: Any, wire: str
) -> None:
    server.score = lambda text: -score_of_text(text)
    with pytest.raises(RewardError, match=r"only 0 of 1 good answers .*'1' got .*'I do not know"):
        make(wire).start([prompt()])
    with pytest.raises(RewardError, match=r"only 0 of 5 good answers .* Paris"):
        make(wire).start([prompt(ground_truth=None)])
    make(wire, self_test="off").start([prompt()])
    server.score = lambda text: 3.0
    with pytest.raises(RewardError, match="--reward_model_self_test warn"):
        make(wire).start([prompt()])


def test_the_self_test_finds_scores_that_change(
    make: Make, server: RewardServer, prompt: Any
) -> None:
    turn = iter(range(10_000))
    server.score = lambda text: score_of_text(text) + 10.0 * (next(turn) % 3)
    with pytest.raises(RewardError, match="when asked twice"):
        make("openrlhf").start([prompt()])
    server.score = lambda text: score_of_text(text) + 0.01 * (next(turn) % 3)
    told: list[str] = []
    make("openrlhf").start([prompt()], tell=told.append)
    assert "up to 0.0" in told[-1]


def test_the_self_test_finds_scores_that_are_none(
    make: Make, server: RewardServer, prompt: Any
) -> None:
    server.fail("nan", after=1)
    with pytest.raises(RewardError, match="no score for a harmless sample"):
        make("openrlhf").start([prompt()])
