"""Everything that can go wrong at a server, over the real httpx: whose score is lost, and why."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from ppo_cli.errors import Interrupted, RewardError
from ppo_cli.records import Rollout
from ppo_cli.rewards.models.served import ServedModelReward
from tests.reward_server import score_of_text
from tests.rewards.served.conftest import SECRET, Bench


def sent_text(rollout: Rollout) -> str:
    return rollout.prompt.rendered + rollout.text


def lone(bench: Bench, text: str | None = None) -> list[Rollout]:
    return [bench.rollout(1, text)]


def start_error(bench: Bench, *, wire: str = "openrlhf", **changes: Any) -> str:
    """The message of a start that fails."""
    with pytest.raises(RewardError) as caught:
        bench.make(wire, **changes).start([bench.prompt()])
    return str(caught.value)


def start_notes(bench: Bench, *, wire: str = "vllm") -> list[str]:
    """What a start that succeeds tells the user."""
    notes: list[str] = []
    bench.make(wire).start([bench.prompt(ground_truth="1<|im_end|>")], tell=notes.append)
    return notes


# --- one sample is to blame ---------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 413, 422, 500])
def test_only_the_sample_that_is_rejected_fails(bench: Bench, status: int) -> None:
    bench.server.fail(status, holding="poison", message="this one is too long")
    rollouts = [bench.rollout(n, "poison" if n == 5 else None) for n in range(16)]
    scores = bench.score_all(bench.make("openrlhf"), rollouts)
    assert scores[5].value is None and scores[5].failure == f"http_{status}: this one is too long"
    expected = [score_of_text(sent_text(rollout)) for rollout in rollouts]
    assert [s.value for s in scores[:5] + scores[6:]] == expected[:5] + expected[6:]
    # Halved until one is left. Those that fail with 500 are repeated for a while first.
    assert status == 500 or len(bench.server.calls) <= 9


def test_a_server_that_takes_fewer_rows_gets_fewer(bench: Bench) -> None:
    bench.server.fail(422, rows=4, message="batch size 16 > maximum allowed batch size 4")
    reward = bench.make("openrlhf", request_rows=16, concurrency=1)
    for _ in range(2):
        before = len(bench.server.calls)
        scores = bench.score_all(reward, [bench.rollout(n) for n in range(16)])
        assert all(score.value is not None for score in scores)
    assert len(bench.server.calls) - before == 4


@pytest.mark.parametrize("wire", ["vllm", "openrlhf"])
def test_a_score_is_never_invented(bench: Bench, wire: str) -> None:
    reward = bench.make(wire, concurrency=1)
    for kind in ("null", "nan", "string", "bool", "huge"):
        bench.server.fail(kind, times=1)
        rollouts = [bench.rollout(1, "First.", 0), bench.rollout(1, "Second.", 1)]
        first, second = bench.score_all(reward, rollouts)
        assert first.value is None, kind
        assert first.failure.startswith("no number: the server's score is")
        assert second.value is not None and reward.pop_metrics()["model/failed"] == 1


@pytest.mark.parametrize(
    ("wire", "kind"),
    [(wire, kind) for wire in ("vllm", "openrlhf")
     for kind in ("short", "long", "twice", "object", "other_json")
     if (wire, kind) != ("openrlhf", "twice")]  # a list without indices does not show it
    + [("vllm", "no_index")],
)  # fmt: skip
def test_a_reply_that_does_not_fit_its_request_gives_no_score(
    bench: Bench, wire: str, kind: str
) -> None:
    bench.server.fail(kind, holding="odd")
    odd, even = bench.score_all(bench.make(wire), [*lone(bench, "odd"), bench.rollout(2, "even")])
    assert odd.value is None and odd.failure.startswith("bad_body: ")
    assert "without a usable index" in odd.failure or kind != "no_index"
    assert even.value is not None


def test_temporary_failures_are_retried(bench: Bench) -> None:
    reward = bench.make("openrlhf", timeout=3.0)
    for kind in ("html", "truncated", "empty", "cut", "hang", 500, 503, 429, 408):
        bench.server.fail(kind, times=1)
        (score,) = bench.score_all(reward, lone(bench))
        assert score.value is not None
        metrics = reward.pop_metrics()
        assert (metrics["model/retries"], metrics["model/requests"]) == (1, 2), kind


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_obeyed(bench: Bench, status: int) -> None:
    bench.server.fail(status, times=1, retry_after=0.4)
    bench.score_all(bench.make("openrlhf"), lone(bench))
    first, second = (call.time for call in bench.server.calls)
    assert 0.4 <= second - first < 20.0


def test_the_server_decides_about_half_a_surrogate_pair(bench: Bench) -> None:
    odd = bench.rollout(1, "half \ud83d of it")
    (score,) = bench.score_all(bench.make("openrlhf"), [odd])
    assert score.value == score_of_text(sent_text(odd))


# --- the server is down -------------------------------------------------------------------------


def sentence_of(reward: ServedModelReward, within: float = 10.0) -> str:
    """What the reward waits for, as soon as it says so."""
    end = time.monotonic() + within
    while (sentence := reward.waiting_for()) is None and time.monotonic() < end:
        time.sleep(0.01)
    return sentence or ""


@pytest.mark.parametrize("fault", ["refused", 503, "html", "object", 404, 401])
def test_an_outage_is_waited_out(bench: Bench, fault: Any) -> None:
    reward = bench.make("openrlhf", request_rows=2, outage_wait=20.0)
    assert bench.score_all(reward, [bench.rollout(0)])[0].value is not None
    assert reward.waiting_for() is None
    rollouts = [bench.rollout(n) for n in range(9)]
    if fault == "refused":
        bench.server.pause()
    else:
        bench.server.fail(fault, message="not today")
    futures = bench.submit_all(reward, rollouts)
    sentence = sentence_of(reward)
    assert sentence.startswith("The reward model's server ")
    bench.server.heal()
    if fault == "refused":
        bench.server.resume()
    values = [future.result(20).value for future in futures]
    # A server that rejects texts one by one is found out after four of them.
    assert sum(value is None for value in values) <= (4 if fault == "object" else 0)
    assert {v for v in values if v is not None} <= {score_of_text(sent_text(r)) for r in rollouts}
    assert reward.waiting_for() is None


def test_an_outage_that_lasts_stops_the_run_resumably(bench: Bench) -> None:
    reward = bench.make("openrlhf", outage_wait=0.4, request_rows=1)
    bench.server.pause()
    futures = bench.submit_all(reward, [bench.rollout(n) for n in range(5)])
    for future in futures:
        with pytest.raises(Interrupted, match="did not answer for 0 s") as caught:
            future.result(10)
        assert caught.value.exit_code == 3
    with pytest.raises(Interrupted):
        bench.submit_all(reward, [bench.rollout(9)])[0].result(10)
    bench.server.resume()


def test_a_server_that_rejects_the_key_stops_the_run(bench: Bench) -> None:
    bench.server.fail(403, message="your key is no good")
    (future,) = bench.submit_all(bench.make("openrlhf"), lone(bench))
    with pytest.raises(Interrupted, match=r"rejects every request .*your key is no good"):
        future.result(10)


@pytest.mark.parametrize(("kind", "cause"), [("cut", "connection: "), (500, "http_500: ")])
def test_a_sample_that_brings_the_server_down_fails_alone(
    bench: Bench, kind: Any, cause: str
) -> None:
    bench.server.fail(kind, holding="poison")
    rollouts = [bench.rollout(n, "poison" if n == 2 else None) for n in range(4)]
    scores = bench.score_all(bench.make("openrlhf"), rollouts)
    assert [score.value is None for score in scores] == [False, False, True, False]
    assert scores[2].failure.startswith(cause)
    (score,) = bench.score_all(bench.make("openrlhf"), lone(bench, "poison"))
    assert score.failure.startswith(cause)


def test_closing_ends_requests_in_flight(bench: Bench) -> None:
    bench.server.fail("hang")
    before = set(threading.enumerate())
    reward = bench.make("openrlhf")
    futures = [*bench.submit_all(reward, lone(bench)), reward.submit(bench.rollout(2))]
    (thread,) = set(threading.enumerate()) - before
    reward.close()
    for future in futures:
        with pytest.raises(Interrupted):
            future.result(5)
    assert not thread.is_alive()


# --- the start ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("wire", "count"), [("vllm", 0), ("openrlhf", 2)])
def test_a_good_server_passes_the_start(bench: Bench, wire: str, count: int) -> None:
    notes = start_notes(bench, wire=wire)
    assert [note for note in notes if "end token" not in note and "cut long" not in note] == []
    assert len(notes) == count
    metrics = bench.rewards[-1].pop_metrics()
    assert (metrics["model/requests"], metrics["model/neutralised"]) == (0, 0)


@pytest.mark.parametrize(
    ("fault", "fragment"),
    [
        (404, "Check the address"), (401, "key"), (400, "a fault of this test"), (405, "http_405"),
        (422, "http_422"), ("html", "a web page: Sign in to this network"), (307, "http_307"),
        ("object", "bad_body"), ("truncated", "not JSON"), ("nan", "gave no score"),
    ],
)  # fmt: skip
def test_a_server_without_scores_is_reported_at_once(
    bench: Bench, fault: str | int, fragment: str
) -> None:
    bench.server.fail(fault)
    began = time.monotonic()
    message = start_error(bench)
    assert fragment in message and time.monotonic() - began < 30.0
    assert fault == "nan" or (bench.server.url() in message and "--reward_model" in message)


def test_a_start_waits_for_a_server_that_is_down(bench: Bench) -> None:
    bench.server.pause()
    address = bench.server.url("/classify")
    assert "connection: " in (message := start_error(bench, path=address))
    assert "Check the address" in message
    notes: list[str] = []

    def tell(note: str) -> None:
        notes.append(note)
        bench.server.resume()

    bench.make().start([bench.prompt()], patient=True, tell=tell)
    assert len(notes) == 1 and "does not answer yet" in notes[0]
    bench.server.fail(503)
    with pytest.raises(Interrupted, match="did not answer"):
        bench.make(outage_wait=0.3).start([bench.prompt()])


def test_nobody_listens_at_the_address(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert "connection: " in start_error(bench, path=f"http://127.0.0.1:{port}/classify")


def test_the_key_is_sent_and_never_shown(bench: Bench) -> None:
    bench.server.key = SECRET
    bench.make(key_env="MY_KEY").start([bench.prompt()])
    bench.server.fail(403, message=f"{SECRET} may not ask")
    assert "may not ask" in (message := start_error(bench, key_env="MY_KEY"))
    assert SECRET not in message
    bench.server.key = "another"
    assert "http_401: Unauthorized: " in (message := start_error(bench, key_env="MY_KEY"))
    assert SECRET not in message
    address = bench.server.url("/classify").replace("//", "//me:pass-word@")
    assert "pass-word" not in start_error(bench, path=address)


@pytest.mark.parametrize("switch", ["use_activation", "activation", "softmax"])
def test_the_switch_for_raw_scores_is_found(bench: Bench, switch: str) -> None:
    bench.server.switch = switch
    assert start_notes(bench) == []
    (score,) = bench.score_all(bench.rewards[-1], lone(bench))
    assert score.value is not None and score.value > 1.0


def test_scores_that_look_activated_are_reported(bench: Bench) -> None:
    bench.server.switch = None
    (note,) = start_notes(bench)
    assert "between 0 and 1" in note and "--pooler-config" in note
    bench.server.activation = "softmax"
    assert "exactly 1" in start_error(bench, wire="vllm")
    bench.server.activation = "none"
    assert start_notes(bench) == []


@pytest.mark.parametrize("wire", ["vllm", "openrlhf"])
def test_the_self_test_finds_a_model_that_knows_nothing(bench: Bench, wire: str) -> None:
    bench.server.score = lambda text: -score_of_text(text)
    message = start_error(bench, wire=wire)
    assert "only 0 of 1 good answers" in message and "'1' got" in message
    with pytest.raises(RewardError, match=r"only 0 of 5 good answers .* Paris"):
        bench.make(wire).start([bench.prompt(ground_truth=None)])
    bench.make(wire, self_test="off").start([bench.prompt()])
    bench.server.score = lambda text: 3.0
    assert "--reward_model_self_test warn" in start_error(bench, wire=wire)


def test_the_self_test_finds_scores_that_change(bench: Bench) -> None:
    turn = iter(range(10_000))
    bench.server.score = lambda text: score_of_text(text) + 10.0 * (next(turn) % 3)
    assert "apart in two tries" in start_error(bench)
    bench.server.score = lambda text: score_of_text(text) + 0.01 * (next(turn) % 3)
    assert "up to 0.0" in start_notes(bench, wire="openrlhf")[-1]


@pytest.mark.parametrize("entries", ["127.0.0.1", "127.0.0.0/8"])
def test_no_proxy_exempts_the_server_from_a_socks_proxy(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, entries: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", entries)
    assert bench.score_all(bench.make(), lone(bench))[0].value is not None
