"""Everything that can go wrong at a server, over the real httpx: who pays for it, and the words."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any

import pytest

from ppo_cli.errors import Interrupted, RewardError
from ppo_cli.records import Rollout, Score
from ppo_cli.rewards.served import client
from ppo_cli.rewards.served.protocols import Kind, ServerFault
from ppo_cli.rewards.served.reward import ServedModelReward
from tests.reward_server import score_of_text
from tests.rewards.served.conftest import SECRET, Bench


def sent_text(rollout: Rollout) -> str:
    return rollout.prompt.rendered + rollout.text


# --- one sample is to blame ---------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 413, 422, 500])
def test_only_the_sample_that_is_not_taken_fails(bench: Bench, status: int) -> None:
    bench.server.fail(status, holding="poison", message="this one is too long")
    rollouts = [bench.rollout(n, "poison" if n == 5 else None) for n in range(16)]
    scores = bench.score_all(bench.make("openrlhf"), rollouts)
    for each, score in zip(rollouts, scores, strict=True):
        if each.text == "poison":
            assert score.value is None
            assert score.failure == f"http_{status}: this one is too long"
        else:
            assert score.value == score_of_text(sent_text(each))
    assert len(bench.server.calls) < 40


def test_a_lone_sample_that_is_not_taken_fails_too(bench: Bench) -> None:
    bench.server.fail(400, holding="poison", message="too long")
    (score,) = bench.score_all(bench.make(), [bench.rollout(1, "poison")])
    assert score.failure == "http_400: too long"


def test_a_server_that_takes_fewer_rows_gets_fewer(bench: Bench) -> None:
    bench.server.fail(422, rows=4, message="batch size 16 > maximum allowed batch size 4")
    reward = bench.make("openrlhf", request_rows=16, concurrency=1)
    assert all(
        s.value is not None for s in bench.score_all(reward, [bench.rollout(n) for n in range(16)])
    )
    before = len(bench.server.calls)
    assert all(
        s.value is not None for s in bench.score_all(reward, [bench.rollout(n) for n in range(16)])
    )
    assert len(bench.server.calls) - before == 4


@pytest.mark.parametrize("wire", ["vllm", "openrlhf", "rerank"])
def test_no_number_is_made_up(bench: Bench, wire: str) -> None:
    reward = bench.make(wire, concurrency=1)
    for kind in ("null", "nan", "string", "bool", "huge"):
        bench.server.fail(kind, times=1)
        rollouts = [bench.rollout(1, "One.", 0), bench.rollout(1, "Two.", 1)]
        first, second = bench.score_all(reward, rollouts)
        assert first.value is None, kind
        assert first.failure.startswith("no number: the server's score is")
        assert second.value is not None and reward.pop_metrics()["model/failed"] == 1


@pytest.mark.parametrize("wire", ["vllm", "openrlhf", "rerank"])
def test_a_reply_that_does_not_fit_its_request_gives_no_score(bench: Bench, wire: str) -> None:
    reward = bench.make(wire)
    kinds = {"short", "long", "twice", "object", "other_json"}
    if wire == "openrlhf":
        kinds.remove("twice")  # a list without indices does not show it
    for kind in kinds:
        bench.server.heal()
        bench.server.fail(kind, holding="odd")
        rollouts = [bench.rollout(1, "odd", 0), bench.rollout(2, "even", 1)]
        odd, even = bench.score_all(reward, rollouts)
        assert odd.value is None and odd.failure.startswith("bad_body: "), kind
        assert even.value is not None


def test_rows_without_an_index_are_not_guessed(bench: Bench) -> None:
    bench.server.fail("no_index", holding="odd")
    (score,) = bench.score_all(bench.make(), [bench.rollout(1, "odd")])
    assert score.value is None and "without a usable index" in score.failure


def test_what_passes_is_tried_again(bench: Bench) -> None:
    reward = bench.make("openrlhf")
    for kind in ("html", "truncated", "empty", "cut", 500, 503, 429, 408):
        bench.server.fail(kind, times=1)
        (score,) = bench.score_all(reward, [bench.rollout(1)])
        assert score.value is not None
        metrics = reward.pop_metrics()
        assert (metrics["model/retries"], metrics["model/requests"]) == (1, 2), kind


def test_a_slow_reply_is_given_up_and_asked_for_again(bench: Bench) -> None:
    bench.server.fail("hang", times=1)
    began = time.monotonic()
    (score,) = bench.score_all(bench.make("openrlhf", timeout=0.3), [bench.rollout(1)])
    assert score.value is not None and 0.3 <= time.monotonic() - began < 20.0


def test_retry_after_is_kept(bench: Bench) -> None:
    bench.server.fail(429, times=1, retry_after=0.4)
    bench.score_all(bench.make("openrlhf"), [bench.rollout(1)])
    first, second = (call.time for call in bench.server.calls)
    assert 0.4 <= second - first < 2.0


def test_who_is_asked_to_wait_long_sees_first_whether_the_server_is_down(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LONG_PAUSE_S", 0.2)
    for asked, calls in ((60, 3), (0.1, 2)):
        before = len(bench.server.calls)
        bench.server.fail(503, times=1, retry_after=asked)
        began = time.monotonic()
        (score,) = bench.score_all(bench.make("openrlhf"), [bench.rollout(1)])
        assert score.value is not None and time.monotonic() - began < 20.0
        assert len(bench.server.calls) - before == calls


def test_half_a_character_is_the_servers_to_judge(bench: Bench) -> None:
    odd = bench.rollout(1, "half \ud83d of it")
    (score,) = bench.score_all(bench.make("openrlhf"), [odd])
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
    reward.end_round()
    return futures


@pytest.mark.parametrize("fault", ["refused", 503, "html", 429, 404, 401])
def test_an_outage_is_waited_out(bench: Bench, fault: Any) -> None:
    reward = bench.make("openrlhf", request_rows=2, outage_wait=20.0)
    assert (
        bench.score_all(reward, [bench.rollout(0)])[0].value is not None
        and reward.waiting_for() is None
    )
    rollouts = [bench.rollout(n) for n in range(9)]
    if fault == "refused":
        bench.server.pause()
    else:
        bench.server.fail(fault, message="not today")
    futures = submit_all(reward, rollouts)
    said = sentence_of(reward)
    assert said is not None and said.startswith("The reward model's server does not answer (")
    assert "trying again in" in said and not any(future.done() for future in futures)
    bench.server.heal()
    if fault == "refused":
        bench.server.resume()
    assert [f.result(20).value for f in futures] == [score_of_text(sent_text(r)) for r in rollouts]
    assert reward.waiting_for() is None


def test_an_outage_that_lasts_stops_the_run_resumably(bench: Bench) -> None:
    reward = bench.make("openrlhf", outage_wait=0.4, request_rows=1)
    bench.server.pause()
    futures = submit_all(reward, [bench.rollout(n) for n in range(5)])
    for future in futures:
        with pytest.raises(Interrupted, match="did not answer for 0 s") as told:
            future.result(10)
        assert told.value.exit_code == 3
    with pytest.raises(Interrupted):
        submit_all(reward, [bench.rollout(9)])[0].result(10)
    bench.server.resume()


def test_a_server_that_turns_all_away_stops_the_run(bench: Bench) -> None:
    fresh, proven = bench.make("openrlhf"), bench.make("openrlhf")
    bench.score_all(proven, [bench.rollout(0)])
    bench.server.fail(403, message="your key is no good")
    with pytest.raises(RewardError, match="your key is no good"):
        submit_all(fresh, [bench.rollout(1)])[0].result(10)
    with pytest.raises(Interrupted, match="your key is no good"):
        submit_all(proven, [bench.rollout(1)])[0].result(10)


def test_a_sample_that_brings_the_server_down_is_found(bench: Bench) -> None:
    bench.server.fail("cut", holding="poison")
    scores = bench.score_all(
        bench.make("openrlhf"), [bench.rollout(n, "poison" if n == 2 else None) for n in range(4)]
    )
    assert [score.value is None for score in scores] == [False, False, True, False]
    assert scores[2].failure.startswith("connection: ")


def test_a_sample_that_brings_the_server_down_again_and_again_fails_alone(bench: Bench) -> None:
    bench.server.fail(500, holding="poison")
    reward = bench.make("openrlhf")
    calls: list[float] = []

    async def witness() -> None:
        # Down after each last try of the sample, and soon back.
        calls.append(time.monotonic())
        if len(calls) % 2:
            raise ServerFault(Kind.DOWN, "http_503", "starting")

    reward._client.outage._witness = witness
    (score,) = bench.score_all(reward, [bench.rollout(1, "poison")])
    assert score.failure == "http_500: a fault of this test"
    assert (len(calls), len(bench.server.calls)) == (2 * 3, 3 * 10)


def test_pauses_grow_to_a_limit_and_are_not_shorter_than_what_is_asked() -> None:
    assert client._pause(1, 7.0) == 7.0
    assert client._pause(1, 900.0) == 10.0


def test_pauses_of_an_outage_double_up_to_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float | None] = [None, None, 9.0, *[None] * 5, 500.0]
    waits: list[float] = []

    async def witness() -> None:
        if len(waits) < len(asked):
            raise ServerFault(Kind.DOWN, "http_503", "", retry_after=asked[len(waits)])

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.5)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    outage = client.Outage("u", 100.0, witness)
    was_up = asyncio.run(outage.is_well(time.monotonic()))
    assert not was_up and not outage.down
    assert waits[:-1] == [0.5, 1.0, 9.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert 90.0 < waits[-1] <= 100.0  # no longer than an outage is waited out


def test_closing_ends_what_is_under_way(bench: Bench) -> None:
    bench.server.fail("hang")
    reward = bench.make("openrlhf")
    full = submit_all(reward, [bench.rollout(1)])
    half = reward.submit(bench.rollout(2))
    threads = threading.active_count()
    reward.close()
    for future in (*full, half):
        with pytest.raises(Interrupted):
            future.result(5)
    assert threading.active_count() == threads - 1


# --- the start ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["vllm", "openrlhf", "rerank"])
def test_a_good_server_passes_the_start(bench: Bench, wire: str) -> None:
    told: list[str] = []
    reward = bench.make(wire)
    reward.start([bench.prompt(ground_truth="1<|im_end|>")], tell=told.append)
    assert [line for line in told if "end token" not in line and "cut long" not in line] == []
    assert len(told) == (2 if wire == "openrlhf" else 0)
    metrics = reward.pop_metrics()
    assert (metrics["model/requests"], metrics["model/neutralised"]) == (0, 0)


def test_a_server_that_gives_no_scores_is_told_at_once(bench: Bench) -> None:
    words: dict[str | int, str] = {
        404: "Check the address", 401: "key", 400: "a fault of this test", 422: "http_422",
        500: "http_500", "html": "a web page: Sign in to this network",
        "object": "bad_body", "truncated": "not JSON", 405: "http_405", 307: "http_307",
    }  # fmt: skip
    for fault, said in words.items():
        bench.server.heal()
        bench.server.fail(fault)
        began = time.monotonic()
        with pytest.raises(RewardError) as told:
            bench.make("openrlhf").start([bench.prompt()])
        assert said in str(told.value) and "--reward_model" in str(told.value)
        assert bench.server.url() in str(told.value) and time.monotonic() - began < 30.0


def test_nobody_there_is_told_at_once(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(RewardError, match=r"connection: .*Check the address"):
        bench.make(path=f"http://127.0.0.1:{port}/classify").start([bench.prompt()])


def test_a_patient_start_waits(bench: Bench) -> None:
    bench.server.pause()
    threading.Timer(0.4, bench.server.resume).start()
    told: list[str] = []
    bench.make().start([bench.prompt()], patient=True, tell=told.append)
    assert len(told) == 1 and "does not answer yet" in told[0]
    bench.server.pause()
    with pytest.raises(Interrupted, match="did not answer"):
        bench.make(outage_wait=0.3).start([bench.prompt()], patient=True)
    bench.server.resume()


def test_the_key_is_sent_and_never_told(bench: Bench) -> None:
    bench.server.key = SECRET
    bench.make(key_env="MY_KEY").start([bench.prompt()])
    bench.server.key = "another"
    with pytest.raises(RewardError) as told:
        bench.make(key_env="MY_KEY").start([bench.prompt()])
    assert "http_401: Unauthorized: " in str(told.value) and SECRET not in str(told.value)
    bench.server.key = SECRET
    bench.server.fail(403, message=f"{SECRET} may not ask")
    with pytest.raises(RewardError, match="may not ask") as told:
        bench.make(key_env="MY_KEY").start([bench.prompt()])
    assert SECRET not in str(told.value)
    bench.server.key = "another"
    address = bench.server.url("/classify").replace("//", "//me:pass-word@")
    with pytest.raises(RewardError) as told:
        bench.make(path=address).start([bench.prompt()])
    assert "pass-word" not in str(told.value)


@pytest.mark.parametrize("switch", ["use_activation", "activation", "softmax"])
def test_raw_scores_are_had_by_whatever_name(bench: Bench, switch: str) -> None:
    bench.server.switch = switch
    told: list[str] = []
    reward = bench.make()
    reward.start([bench.prompt()], tell=told.append)
    (score,) = bench.score_all(reward, [bench.rollout(1)])
    assert score.value is not None and score.value > 1.0 and told == []


def test_scores_that_are_raw_whatever_is_asked_pass(bench: Bench) -> None:
    bench.server.switch, bench.server.activation = None, "none"
    told: list[str] = []
    bench.make().start([bench.prompt()], tell=told.append)
    assert told == []


def test_scores_that_look_activated_are_told(bench: Bench) -> None:
    bench.server.switch = None
    told: list[str] = []
    bench.make().start([bench.prompt()], tell=told.append)
    assert len(told) == 1 and "between 0 and 1" in told[0] and "--pooler-config" in told[0]
    bench.server.activation = "softmax"
    with pytest.raises(RewardError, match="exactly 1"):
        bench.make().start([bench.prompt()])


@pytest.mark.parametrize("wire", ["vllm", "openrlhf", "rerank"])
def test_the_self_test_finds_a_model_that_knows_nothing(bench: Bench, wire: str) -> None:
    bench.server.score = lambda text: -score_of_text(text)
    with pytest.raises(RewardError, match=r"only 0 of 1 good answers .*'1' got .*'I do not know"):
        bench.make(wire).start([bench.prompt()])
    with pytest.raises(RewardError, match=r"only 0 of 5 good answers .* Paris"):
        bench.make(wire).start([bench.prompt(ground_truth=None)])
    bench.make(wire, self_test="off").start([bench.prompt()])
    bench.server.score = lambda text: 3.0
    with pytest.raises(RewardError, match="--reward_model_self_test warn"):
        bench.make(wire).start([bench.prompt()])


def test_the_self_test_finds_scores_that_change(bench: Bench) -> None:
    turn = iter(range(10_000))
    bench.server.score = lambda text: score_of_text(text) + 10.0 * (next(turn) % 3)
    with pytest.raises(RewardError, match="when asked twice"):
        bench.make("openrlhf").start([bench.prompt()])
    bench.server.score = lambda text: score_of_text(text) + 0.01 * (next(turn) % 3)
    told: list[str] = []
    bench.make("openrlhf").start([bench.prompt()], tell=told.append)
    assert "up to 0.0" in told[-1]


def test_the_self_test_finds_scores_that_are_none(bench: Bench) -> None:
    bench.server.fail("nan", after=1)
    with pytest.raises(RewardError, match="no score for a harmless sample"):
        bench.make("openrlhf").start([bench.prompt()])


@pytest.mark.parametrize("entries", ["127.0.0.1", "127.0.0.0/8"])
def test_no_proxy_exempts_the_server_from_a_socks_proxy(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, entries: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", entries)
    reward = bench.make()
    assert bench.score_all(reward, [bench.rollout(1)])[0].value is not None


@pytest.mark.skipif(find_spec("socksio") is not None, reason="SOCKS works")
def test_a_socks_proxy_that_leads_to_the_server_needs_a_package(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    with pytest.raises(RewardError, match=r"pip install httpx\[socks\]"):
        bench.make().start([bench.prompt()])
