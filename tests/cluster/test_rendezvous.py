"""Node 0's door: who is let in, who is refused, who is missed; over real sockets, without Ray."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from ppo_cli.cluster import nodes as member_room
from ppo_cli.cluster import rendezvous as room
from ppo_cli.cluster.nodes import Membership, find_head
from ppo_cli.errors import ConfigError, WorkerLost
from tests.cluster.meeting import HEAD, KEY, SETTINGS, FakeRay, Meeting, why


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    made.room.close()
    made.ray.close()


def test_the_nodes_come_together_and_follow_the_exit_code(meeting: Meeting) -> None:
    one, two = meeting.whole()
    assert meeting.nodes().lost() is None
    begun = time.monotonic()
    meeting.nodes().close(3)
    assert time.monotonic() - begun < 20
    assert (one.end(), two.end()) == (3, 3)
    assert one.rays[0].stopped
    assert one.token == two.token == "a seed"
    assert any("exit code 3" in line for line in one.said)


@pytest.mark.parametrize("code", [0, 1, 2])
def test_each_exit_code_is_followed(meeting: Meeting, code: int) -> None:
    one, _ = meeting.whole()
    meeting.nodes().close(code)
    assert one.end() == code


def test_who_is_missing_is_named_with_the_host(meeting: Meeting) -> None:
    assert meeting.room.missing() == ["node 1 (host-b)", "node 2 (host-c)"]
    meeting.guest(1)
    meeting.until(lambda: meeting.room.members)
    assert meeting.room.missing() == ["node 2 (host-c)"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"run": "0" * 32}, "is another one"),
        ({"protocol": 2}, "another version of ppo-cli"),
        ({"job": "8"}, "SLURM job 8"),
        ({"facts": 3}, "its hello is malformed"),
        ({"facts": {}}, "its hello is malformed"),
        ({"settings": []}, "its hello is malformed"),
        ({"rank": 3}, "NODE_RANK 3 does not exist: node 0 has NNODES=3"),
        ({"rank": 0}, "NODE_RANK 0 is taken by host-a"),
        (
            {"facts": asdict(replace(HEAD, rank=1, gpus=8, wanted_gpus=8))},
            "once a node",
        ),
    ],
)
def test_a_node_that_does_not_fit_is_refused(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert said in why(meeting.hello(**change))
    assert meeting.room.members == {}


def test_a_rank_that_lives_is_taken(meeting: Meeting) -> None:
    meeting.guest(1)
    meeting.until(lambda: meeting.room.members)
    said = why(meeting.hello(1))
    assert said == "NODE_RANK 1 is taken by host-b (127.0.0.1): each node needs its own."
    meeting.until(lambda: any("Refused a node at 127.0.0.1" in line for line in meeting.said))


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 70_000, b"{}\n", b""])
def test_garbage_changes_nothing(meeting: Meeting, garbage: bytes) -> None:
    # Refused early, the connection may be reset while the rest is still on its way.
    stranger = socket.create_connection(("127.0.0.1", meeting.port), 5)
    with stranger, contextlib.suppress(OSError):
        stranger.sendall(garbage)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(100) == b""
    assert meeting.room.members == {}
    meeting.whole()


def test_the_slow_are_not_waited_for(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "HELLO_S", 0.2)
    with socket.create_connection(("127.0.0.1", meeting.port), 5) as stranger:
        assert stranger.recv(100) == b""


def test_all_problems_of_all_nodes_reach_both_sides(meeting: Meeting) -> None:
    one, two = meeting.guest(1, ray="2.59.0", torch="2.12.0"), meeting.guest(2)
    meeting.offer()
    meeting.until(lambda: len(meeting.room.in_phase("checked")) == 2)
    problems = meeting.room.problems()
    assert len(problems) == 2
    meeting.room.refuse_all()
    first, second = one.end(), two.end()
    assert isinstance(first, ConfigError)
    assert first.problems == tuple(problems)
    assert "node 0 (host-a) says why" in str(second)


def test_a_port_that_node_1_cannot_reach(meeting: Meeting) -> None:
    meeting.ray.close()
    meeting.guest(1)
    meeting.offer()
    meeting.until(lambda: meeting.room.in_phase("checked"))
    said = meeting.room.problems()[0]
    assert said.startswith("node 1 (host-b, 127.0.0.1) cannot reach 127.0.0.1:")
    assert "firewall" in said


def test_told_twice_that_it_is_examined_a_node_starts_once(meeting: Meeting) -> None:
    one, _ = meeting.whole()
    assert one.line is not None
    one.line.send("checked", reaches=False, listens=1)
    one.line.send("ready")
    meeting.nodes().close(0)
    assert one.end() == 0
    assert len(one.rays) == 1


def test_a_node_that_node_0_cannot_reach(meeting: Meeting) -> None:
    line = meeting.hello(1)
    line.send("checked", reaches=True, listens=1)
    meeting.until(lambda: meeting.room.in_phase("checked"))
    assert "node 0 (host-a) cannot reach node 1" in meeting.room.problems()[0]
    line.close()


def test_a_node_that_dies_is_noticed_and_named(meeting: Meeting) -> None:
    one, _ = meeting.whole()
    begun = time.monotonic()
    assert one.line is not None
    one.line.close()
    meeting.until(meeting.nodes().lost)
    assert time.monotonic() - begun < 8
    assert "node 1 (host-b, 127.0.0.1) is gone: it closed" in str(meeting.nodes().lost())
    with pytest.raises(WorkerLost, match=r"node 1 .* did not come back within 0.3 s"):
        meeting.nodes().wait_until_whole(0.3)


def test_a_node_comes_back(meeting: Meeting) -> None:
    one, two = meeting.whole()
    assert one.line is not None
    one.line.close()
    meeting.until(meeting.nodes().lost)
    assert isinstance(one.end(), WorkerLost)
    back = meeting.guest(1)
    meeting.nodes().wait_until_whole(10)
    meeting.nodes().close(0)
    assert (back.end(), two.end()) == (0, 0)


def test_a_node_that_comes_back_different_is_refused(meeting: Meeting) -> None:
    one, _ = meeting.whole()
    assert one.line is not None
    one.line.close()
    meeting.until(meeting.nodes().lost)
    assert "has ray 2.59.0" in str(meeting.guest(1, ray="2.59.0").end())
    assert any("has ray 2.59.0" in line for line in meeting.said)


def test_silence_counts_as_gone(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "SILENCE_S", 0.3)
    line = meeting.hello(1)
    meeting.until(lambda: meeting.room.members and meeting.room.members[1].phase == "gone")
    assert "silent for 0.3 s" in meeting.room.members[1].why
    line.close()


def test_ray_that_dies_on_a_node_is_named_and_started_anew(meeting: Meeting) -> None:
    one, _ = meeting.guest(1, restarts=1), meeting.guest(2)
    meeting.offer()
    meeting.until(lambda: len(meeting.room.in_phase("checked")) == 2)
    meeting.room.start_all()
    meeting.nodes().wait_until_whole()
    one.rays[0].up.clear()
    meeting.until(lambda: len(one.rays) == 2)
    meeting.nodes().wait_until_whole()
    one.rays[1].up.clear()
    assert "died too often" in str(one.end())
    meeting.until(meeting.nodes().lost)


def test_node_0_without_a_word_is_named(meeting: Meeting) -> None:
    one, _ = meeting.whole()
    meeting.room.close()
    end = one.end()
    assert isinstance(end, WorkerLost)
    assert "node 0 (127.0.0.1) is gone" in str(end)
    assert str(end).endswith("start the same line again on all nodes.")
    assert one.rays[0].stopped


def test_a_silent_node_0_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_room, "HEAD_SILENCE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as door:
        line = find_head("127.0.0.1", door.getsockname()[1], None, 5, print)
        stay = Membership(line, replace(HEAD, rank=1), lambda *_: FakeRay(), 0, print)  # type: ignore[arg-type, return-value]
        with pytest.raises(ConfigError, match="is not node 0 of this run: it has been silent"):
            stay.run(KEY, SETTINGS)


def test_another_program_in_node_0s_place_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:

        def answer() -> None:
            sock, _ = door.accept()
            sock.sendall(b"-ERR unknown command\r\n")
            time.sleep(0.2)
            sock.close()

        threading.Thread(target=answer, daemon=True).start()
        line = find_head("127.0.0.1", door.getsockname()[1], None, 5, print)
        stay = Membership(line, replace(HEAD, rank=1), lambda *_: FakeRay(), 0, print)  # type: ignore[arg-type, return-value]
        with pytest.raises(ConfigError, match="not node 0 of this run"):
            stay.run(KEY, SETTINGS)


def test_node_0_that_never_comes_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"node 0 is not there: 127.0.0.1:\d+ says 'connection"):
        find_head("127.0.0.1", port, None, 0.2, said.append)
    assert "waiting for node 0" in said[0]
