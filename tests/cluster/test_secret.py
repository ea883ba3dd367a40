"""The secret of the nodes: who lacks it learns nothing, and it is never said."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from ppo_cli.cluster.addresses import Line, is_loopback, listen
from ppo_cli.cluster.nodes import Membership, find_head
from ppo_cli.cluster.ray_process import RayProcess
from ppo_cli.cluster.rendezvous import VARIABLE, Secret
from ppo_cli.errors import ConfigError
from ppo_cli.redact import redact
from tests.cluster.meeting import HEAD, KEY, SETTINGS, FakeRay, Meeting, why

WORD, OTHER = "one long secret of ours", "another secret of theirs"


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting(WORD)
    yield made
    made.room.close()
    made.ray.close()


def test_nodes_with_the_secret_work_with_a_token_that_did_not_travel(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    travelled: list[bytes] = []
    send = socket.socket.sendall

    def listening(sock: socket.socket, data: bytes) -> None:
        travelled.append(data)
        send(sock, data)

    monkeypatch.setattr(socket.socket, "sendall", listening)
    one, two = meeting.whole(secret=WORD)
    meeting.nodes().close(0)
    assert (one.end(), two.end()) == (0, 0)
    assert one.token == two.token == Secret({VARIABLE: WORD}).token("a seed", meeting.room.address)
    said = b"".join(travelled)
    assert b"a seed" in said
    for kept in (one.token, WORD):
        assert kept.encode() not in said


def test_another_secret_is_named_on_both_sides(meeting: Meeting) -> None:
    end = meeting.guest(1, secret=OTHER).end()
    assert isinstance(end, ConfigError)
    assert "node 1 has another PPO_CLUSTER_SECRET than node 0" in str(end)
    meeting.until(lambda: any("has another PPO_CLUSTER_SECRET" in line for line in meeting.said))
    assert meeting.room.members == {}
    assert not any(word in line for word in (WORD, OTHER) for line in [*meeting.said, str(end)])


def test_a_node_without_it_is_told_nothing_of_the_run(meeting: Meeting) -> None:
    wanted = "node 1 has no PPO_CLUSTER_SECRET, node 0 has one: set the same on all nodes."
    assert str(meeting.guest(1).end()) == wanted
    assert why(meeting.hello(run="0" * 32, settings={})) == wanted


def test_node_0_without_it_does_not_get_the_node() -> None:
    meeting = Meeting()
    try:
        end = meeting.guest(1, secret=WORD).end()
    finally:
        meeting.room.close()
        meeting.ray.close()
    assert "node 1 has a PPO_CLUSTER_SECRET, node 0 has none" in str(end)


@pytest.mark.parametrize("said", ["", "0" * 64, "\ud800", 3, None])
def test_a_guess_does_not_get_in(meeting: Meeting, said: object) -> None:
    line = meeting.hello(nonce="n")
    challenge = line.read(5)
    assert challenge is not None
    assert challenge["type"] == "challenge"
    line.send("proof", proof=said)
    assert "has another PPO_CLUSTER_SECRET" in why(line)
    assert meeting.room.members == {}


def test_a_proof_is_good_for_one_meeting_and_one_rank(meeting: Meeting) -> None:
    def answer(rank: int, old: str = "") -> tuple[Line, str]:
        line = meeting.hello(rank, nonce="n")
        challenge = line.read(5)
        assert challenge is not None
        proof = Secret({VARIABLE: WORD}).proof("node", KEY, "1", "n", challenge["nonce"])
        line.send("proof", proof=old or proof)
        return line, proof

    first, proof = answer(1)
    admitted = first.read(5)
    assert admitted is not None
    assert admitted["type"] == "proof"
    assert "has another" in why(answer(1, proof)[0])
    assert "has another" in why(answer(2)[0])
    first.close()


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        (["welcome"], "has a PPO_CLUSTER_SECRET, and what answers at 127.0.0.1 does not ask"),
        (["challenge", "proof"], "node 1 has another PPO_CLUSTER_SECRET than node 0"),
        (["challenge", "start"], "does not ask for it"),
    ],
)
def test_a_false_node_0_does_not_get_the_node(answers: list[str], wanted: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        lines: list[Line] = []

        def pretend() -> None:
            lines.append(Line(door.accept()[0]))
            for kind in answers:
                lines[0].read(5)
                lines[0].send(kind, nonce="n", proof="p", address="127.0.0.1:1", seed="s")

        threading.Thread(target=pretend, daemon=True).start()
        line = find_head("127.0.0.1", door.getsockname()[1], None, 5, print)
        rays: list[FakeRay] = []

        def start_ray(*_: str) -> FakeRay:
            rays.append(FakeRay())
            return rays[-1]

        facts = type(HEAD)(**{**asdict(HEAD), "rank": 1})
        kept = Secret({VARIABLE: WORD})
        stay = Membership(line, facts, start_ray, 0, print, kept)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=wanted):
            stay.run(KEY, SETTINGS)
        lines[0].close()
    assert rays == []


def test_a_short_secret_is_refused_and_blanks_are_none() -> None:
    with pytest.raises(ConfigError, match="PPO_CLUSTER_SECRET has 5 characters and needs 16") as no:
        Secret({VARIABLE: "12345"})
    assert "12345" not in str(no.value)
    assert not Secret({VARIABLE: "  "})
    assert Secret({}).token("seed", "10.0.0.1:1") == "seed"


def test_the_token_is_of_one_address_and_one_run() -> None:
    secret = Secret({VARIABLE: WORD})
    found = {secret.token(seed, at) for seed in ("a", "b") for at in ("10.0.0.1:1", "10.0.0.2:1")}
    assert len(found) == 4
    assert secret.proof("a", "bc") != secret.proof("ab", "c")


def test_the_secret_is_hidden_in_what_is_said() -> None:
    environ = {VARIABLE: WORD}
    assert WORD not in redact(f"it said {WORD} there", environ)
    assert WORD not in repr(Secret(environ)) + str(Secret(environ))


def test_the_secret_does_not_reach_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []

    class Noted:
        def __init__(self, command: list[str], **options: object) -> None:
            environ = options["env"]
            assert isinstance(environ, dict)
            given.append(environ)

    monkeypatch.setattr("ppo_cli.cluster.ray_process.subprocess.Popen", Noted)
    ray = RayProcess([], {**os.environ, VARIABLE: WORD, "KEPT": "yes"}, "node 0")
    (ray.folder / "start.log").unlink()
    ray.folder.rmdir()
    assert VARIABLE not in given[0]
    assert given[0]["KEPT"] == "yes"


def test_the_door_is_at_the_address_that_a_name_stands_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Stands for an address towards others, which a machine of tests may lack.
    monkeypatch.setattr("ppo_cli.cluster.addresses.is_loopback", lambda address: False)
    with listen("localhost", 0) as door:
        assert is_loopback(door.getsockname()[0])


def test_the_door_is_everywhere_for_a_name_of_this_machine_alone() -> None:
    for name in ("localhost", None):
        with listen(name, 0) as door:
            assert door.getsockname()[0] in ("0.0.0.0", "::")
