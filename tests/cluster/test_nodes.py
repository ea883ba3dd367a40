"""How nodes meet, are lost and end: real threads and settings over a stand-in for Ray's head."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from ray import _raylet
from ray.exceptions import AuthenticationError, RpcError

from ppo_cli.cluster import addresses, nodes
from ppo_cli.cluster.nodes import Nodes, join_cluster, open_cluster, set_token
from ppo_cli.cluster.ray_process import RayOptions
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import ConfigError, Interrupted, PpoError, WorkerLost
from ppo_cli.machine.machine import Machine
from tests.settings import CPU, resolved, with_gpus

SECRET = "one long secret of ours"


class FakeHead:
    """What Ray's head keeps: values by key, and the nodes that joined."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self.rays: list[FakeRay] = []
        self.error: Exception | None = None
        self.start_error: Exception | None = None

    @property
    def values(self) -> dict[bytes, bytes]:
        """Every request fails while there is an error."""
        if self.error is not None:
            raise self.error
        return self._values

    def client(self, address: str) -> FakeHead:
        assert self.values is not None
        return self

    def internal_kv_get(self, key: bytes, *_: Any, timeout: float) -> bytes | None:
        return self.values.get(key)

    def internal_kv_put(self, key: bytes, value: bytes, *_: Any, timeout: float) -> None:
        self.values[key] = value

    def internal_kv_del(self, key: bytes, *_: Any, timeout: float) -> None:
        self.values.pop(key, None)

    def get_all_node_info(self, timeout: float) -> dict[int, Any]:
        assert self.values is not None
        # A killed node stays in Ray's list for some seconds; nothing listens there any more.
        return {
            number: SimpleNamespace(
                state=0,
                labels=ray.options.labels,
                node_manager_address=ray.options.node_address,
                node_manager_port=2 if ray.running else 1,
            )
            for number, ray in enumerate(self.rays)
        }

    def ray_of(self, rank: int) -> FakeRay:
        return [ray for ray in self.rays if ray.options.labels == {"ppo-rank": str(rank)}][-1]


class FakeRay:
    """Takes the place of a RayProcess. A test may let it die."""

    head: FakeHead

    def __init__(self, options: RayOptions, *, label: str, environ: Any) -> None:
        self.options, self.label, self.environ = options, label, environ
        self.running = True
        self.server = None
        if options.head_address is None:
            self.server = socket.create_server(("", options.port))
        self.head.rays.append(self)

    def await_address(self, timeout_s: float, stop_requested: Any = lambda: None) -> str:
        if self.options.head_address and self.head.start_error is not None:
            self.running = False
            raise self.head.start_error
        return f"{self.options.node_address}:{self.options.port}"

    def failure(self) -> str | None:
        return None if self.running else f"Ray on {self.label} lost its raylet."

    def close(self) -> None:
        self.running = False
        if self.server is not None:
            self.server.close()


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> FakeHead:
    fake = FakeHead()
    monkeypatch.setattr(FakeRay, "head", fake, raising=False)
    monkeypatch.setattr(nodes, "RayProcess", FakeRay)
    monkeypatch.setattr(_raylet, "GcsClient", fake.client)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(nodes, "POLL_S", 0.01)
    monkeypatch.setattr(nodes, "STOP_S", 5.0)
    monkeypatch.setattr(nodes, "accepts_connections", lambda address: address[-2:] != ":1")
    return fake


def config(rank: int = 0, *, actor: Any = None, **trainer: Any) -> Config:
    """Settings of a node of two; without a `master_port` it is one where nothing listens."""
    base = {
        "nnodes": 2, "node_rank": rank, "master_addr": "127.0.0.1", "node_timeout": 20,
        "master_port": addresses.free_port("127.0.0.1"),
    }  # fmt: skip
    return Config.model_validate({"trainer": base | trainer, "actor": actor or {}})


class Guest:
    """Another node than node 0, in a thread."""

    def __init__(self, settings: Config, **environ: str) -> None:
        self.notes: list[str] = []
        self._outcome: int | PpoError | None = None
        environ = {"NODE_ADDR": f"127.0.0.{2 + settings.trainer.node_rank}"} | environ

        def live() -> None:
            try:
                self._outcome = join_cluster(resolved(settings), environ, self.notes.append)
            except PpoError as error:
                self._outcome = error

        self._thread = threading.Thread(target=live, daemon=True)
        self._thread.start()

    def outcome(self) -> int | PpoError | None:
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self._outcome


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refusal(
    settings: Config, environ: dict[str, str] | None = None, here: Machine = CPU
) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        open_cluster(resolved(settings, here), environ or {}, lambda text: None)
    return caught.value


@pytest.fixture
def pair(head: FakeHead) -> Iterator[tuple[Nodes, Guest]]:
    port = addresses.free_port("127.0.0.1")
    trainer = {"master_port": port, "max_restarts": 1, "num_workers": 90, "node_timeout": 4}
    guest = Guest(config(1, **trainer))
    settings = config(**trainer)
    run_nodes = open_cluster(resolved(settings), {"NODE_ADDR": "127.0.0.2"}, lambda text: None)
    wait_for(lambda: any("has joined node 0" in note for note in guest.notes))
    yield run_nodes, guest
    run_nodes.close(0)
    guest.outcome()


@pytest.mark.parametrize("code", [0, 3])
def test_nodes_come_together_and_end_with_one_exit_code(
    pair: tuple[Nodes, Guest], head: FakeHead, code: int
) -> None:
    run_nodes, guest = pair
    first, second = head.rays
    assert run_nodes.lost() is None and run_nodes.stop_asked() is None
    assert second.options.head_address == f"127.0.0.1:{first.options.port}"
    assert [ray.options.node_address for ray in head.rays] == ["127.0.0.2", "127.0.0.3"]
    assert {ray.options.num_cpus for ray in head.rays} == {max(93, os.cpu_count() or 1)}
    run_nodes.close(code)
    assert guest.outcome() == code
    assert not first.running and not second.running
    assert any("exit code 3" in note for note in guest.notes) == (code == 3)


@pytest.mark.slow
def test_a_lost_node_is_named_and_may_come_back(pair: tuple[Nodes, Guest], head: FakeHead) -> None:
    run_nodes, _guest = pair
    host = socket.gethostname()
    old, replacement = head.ray_of(1), FakeRay(head.ray_of(1).options, label="", environ={})
    head.rays.remove(replacement)
    old.failure = lambda: None  # type: ignore[method-assign]  # its whole node is dead
    old.running = False
    assert run_nodes.lost() == f"node 1 ({host}, 127.0.0.3) is gone: Ray does not run there."
    with pytest.raises(WorkerLost, match="did not come back within 4 s"):
        run_nodes.wait_until_whole()
    with pytest.raises(Interrupted, match="SIGINT"):
        run_nodes.wait_until_whole(stop_requested=lambda: "SIGINT")
    other = Guest(config(1, master_port=head.ray_of(0).options.port, actor={"ppo_epochs": 3}))
    assert isinstance(other.outcome(), ConfigError)
    assert "other settings: actor.ppo_epochs" in str(run_nodes.lost())
    head.rays.append(replacement)
    run_nodes.wait_until_whole()


def test_ray_that_dies_on_a_node_is_started_again_a_few_times(
    pair: tuple[Nodes, Guest], head: FakeHead
) -> None:
    run_nodes, guest = pair
    head.ray_of(1).running = False
    wait_for(lambda: len(head.rays) == 3 and run_nodes.lost() is None)
    head.ray_of(1).running = False
    assert "died too often" in str(guest.outcome())
    assert "does not work: Ray on node 1" in str(run_nodes.lost())


def test_ray_that_dies_on_node_0_ends_the_wait(pair: tuple[Nodes, Guest], head: FakeHead) -> None:
    run_nodes, _ = pair
    head.ray_of(0).running = False
    with pytest.raises(WorkerLost, match="start the same command again on all"):
        run_nodes.wait_until_whole()


def test_a_dead_node_0_is_named(
    pair: tuple[Nodes, Guest], head: FakeHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    _nodes, guest = pair
    monkeypatch.setattr(nodes, "HEAD_GONE_S", 0.2)
    head.error = RpcError("no answer")
    outcome = guest.outcome()
    assert isinstance(outcome, WorkerLost)
    assert "node 0 (127.0.0.1:" in str(outcome) and "does not answer" in str(outcome)
    assert not head.ray_of(1).running


def test_a_rank_or_a_machine_that_is_taken(pair: tuple[Nodes, Guest], head: FakeHead) -> None:
    port = head.ray_of(0).options.port
    assert "NODE_RANK 1 is used by" in str(Guest(config(1, master_port=port)).outcome())
    same = Guest(
        config(2, master_port=port, n_gpus_per_node=1), NODE_ADDR="127.0.0.3"
    )  # fmt: skip
    assert "ppo is started once per node" in str(same.outcome())


def test_a_rank_that_two_nodes_have_ends_the_start(head: FakeHead) -> None:
    for address in ("127.0.0.3", "127.0.0.4"):
        options = RayOptions(1, 0, head_address="x", node_address=address, labels={"ppo-rank": "1"})
        FakeRay(options, label="", environ={})
    assert "NODE_RANK 1 is used by 127.0.0.3 and" in str(refusal(config(node_timeout=1)))


def test_what_does_not_fit_is_reported_on_both_nodes_and_who_is_missing(
    head: FakeHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "GRACE_S", 0.3)
    port = addresses.free_port("127.0.0.1")
    guest = Guest(config(1, master_port=port, nnodes=3, actor={"ppo_epochs": 3}))
    error = refusal(config(master_port=port, nnodes=3))
    outcome = guest.outcome()
    assert isinstance(outcome, ConfigError)
    (problem,) = outcome.problems
    assert problem.endswith("other settings: actor.ppo_epochs.")
    assert error.problems == (problem, "node 2 is not here yet.")


def test_a_missing_node_is_named_and_after_a_while_what_to_check(
    head: FakeHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "NOTE_EVERY_S", 0.3)
    notes: list[str] = []
    environ = {"SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_NNODES": "2"}
    with pytest.raises(ConfigError, match=r"did not connect in time .*: node 1 \(gpu2\).*srun"):
        settings = config(node_timeout=1)
        open_cluster(resolved(settings), environ, notes.append)
    waiting = [note for note in notes if "waiting for node 1 (gpu2)" in note]
    assert waiting[0] == "1 of 2 nodes are connected; waiting for node 1 (gpu2)"
    assert waiting[1].startswith(f"{waiting[0]}: ") and "PPO_CLUSTER_SECRET" in waiting[1]


def test_a_node_on_which_ray_does_not_start_is_named(head: FakeHead) -> None:
    head.start_error = WorkerLost("Ray did not start on node 1.")
    port = addresses.free_port("127.0.0.1")
    guest = Guest(config(1, master_port=port, node_timeout=2))
    assert "Ray did not start" in str(refusal(config(master_port=port, node_timeout=2)))
    assert isinstance(guest.outcome(), WorkerLost)


@pytest.mark.parametrize(
    ("error", "greeting", "fragment"),
    [
        (AuthenticationError("InvalidAuthToken"), b"", "PPO_CLUSTER_SECRET, output_dir"),
        (RpcError("timed out"), b"", "does not answer"),
        (RpcError("timed out"), b"SSH-2.0", "is not a Ray head"),
    ],
)
def test_a_head_that_is_not_ours(
    head: FakeHead, error: Exception, greeting: bytes, fragment: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    head.error = error
    if not greeting:
        monkeypatch.setattr(addresses, "CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server(("", 0)) as server, ExitStack() as lines:
        port = server.getsockname()[1]

        def greet() -> None:
            with suppress(OSError):  # the server is closed
                while greeting:
                    lines.enter_context(server.accept()[0]).sendall(greeting)

        threading.Thread(target=greet, daemon=True).start()
        assert fragment in str(Guest(config(1, master_port=port)).outcome())
        variables = {"RAY_ADDRESS": f"127.0.0.1:{port}"}
        fragment = "needs its token" if isinstance(error, AuthenticationError) else fragment
        assert fragment in str(refusal(config(), variables))


def test_a_node_0_that_does_not_come_is_named() -> None:
    guest = Guest(config(1, master_port=addresses.free_port("127.0.0.1"), node_timeout=1))
    assert "node 0 is not there" in str(guest.outcome())
    assert "waiting for node 0" in guest.notes[0]


@pytest.mark.parametrize(
    ("trainer", "environ", "fragment"),
    [
        ({"master_addr": "no-such-host.invalid"}, {}, "is not a name"),
        ({"master_addr": "198.51.100.7"}, {}, "not an address of this machine"),
        ({}, {"NODE_ADDR": "198.51.100.7"}, "NODE_ADDR 198.51.100.7"),
        ({"node_rank": 1}, {"RAY_ADDRESS": "10.0.0.1:6379"}, "leave out NODE_RANK"),
        ({}, {"RAY_ADDRESS": "ray://10.0.0.1:10001"}, "is not HOST:PORT"),
        ({}, {"RAY_ADDRESS": "somewhere"}, "is not HOST:PORT"),
        ({}, {"RAY_ADDRESS": "127.0.0.1:1"}, "nothing answers"),
    ],
)
def test_an_address_that_cannot_be(
    trainer: dict[str, Any], environ: dict[str, str], fragment: str
) -> None:
    assert fragment in str(refusal(config(**trainer), environ))


def test_a_port_that_another_program_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = str(refusal(config(master_port=port)))
        assert message.startswith(f"port {port} is in use") and "MASTER_PORT=" in message
        monkeypatch.setattr(addresses, "RAY_PORT", port)
        assert "ray start --head" in str(refusal(config(master_port=port)))


def test_a_name_of_this_machine_alone_is_not_where_others_find_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert addresses.head_address("localhost") is None
    assert addresses.head_address("127.0.0.1") == "127.0.0.1"
    monkeypatch.setattr(addresses, "is_loopback", lambda address: False)
    assert addresses.head_address("localhost") == addresses.resolve_host("localhost")


def test_the_token_is_of_one_run_and_one_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = set()
    for folder, secret, rank in product(("here", "elsewhere"), ("  ", SECRET), (0, 1)):
        monkeypatch.setenv("RAY_AUTH_TOKEN", "")
        set_token(config(rank, output_dir=folder).trainer, {"PPO_CLUSTER_SECRET": secret})
        tokens.add(os.environ["RAY_AUTH_TOKEN"])
        assert SECRET not in os.environ["RAY_AUTH_TOKEN"]
    assert len(tokens) == 4
    with pytest.raises(ConfigError, match="has 5 characters and needs 16") as caught:
        set_token(config().trainer, {"PPO_CLUSTER_SECRET": "12345"})
    assert "12345" not in str(caught.value)


def test_nothing_to_close_is_fine() -> None:
    nothing = Nodes("auto", 1, print)
    nothing.close(0)
    nothing.close(1)
    assert nothing.lost() is None and nothing.stop_asked() is None


def test_a_node_offers_the_gpus_that_it_is_to_give(head: FakeHead) -> None:
    for trainer, offered in (({"n_gpus_per_node": 2}, 2), ({}, 1)):
        refusal(config(node_timeout=1, **trainer), here=with_gpus(8))
        options = head.rays[-1].options
        assert (options.num_gpus, options.num_cpus) == (offered, os.cpu_count())
