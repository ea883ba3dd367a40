"""Mistakes named before anything is started, and clusters that run already."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.cli.app import exit_code_of as tell_and_end
from ppo_cli.cluster.addresses import free_port, is_literal, is_mine, listen, resolve_host
from ppo_cli.cluster.nodes import Nodes, _resources, join_cluster, open_cluster
from ppo_cli.cluster.ray_process import RayProcess
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import DISK_ERRNOS, ConfigError, Interrupted, WorkerLost, exit_code_of


def config(**trainer: Any) -> Config:
    return Config.model_validate({"trainer": {"nnodes": 2, "node_rank": 0, **trainer}})


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def refusal(settings: Config, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        open_cluster(settings, environ or {}, lambda text: None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("trainer", "environ", "said"),
    [
        (
            {"master_addr": "no-such-host.invalid"}, {},
            "MASTER_ADDR 'no-such-host.invalid' is not a name",
        ),
        (
            {"master_addr": "198.51.100.7"}, {},
            "198.51.100.7 is not an address of this machine",
        ),
        (
            {"master_addr": "127.0.0.1"}, {"NODE_ADDR": "198.51.100.7"},
            "NODE_ADDR 198.51.100.7 is not",
        ),
        ({"node_rank": 1}, {"RAY_ADDRESS": "10.0.0.1:6379"}, "leave out NODE_RANK, or RAY_ADDRESS"),
        ({}, {"RAY_ADDRESS": "ray://10.0.0.1:10001"}, "is not HOST:PORT"),
        ({}, {"RAY_ADDRESS": "somewhere"}, "is not HOST:PORT"),
        ({}, {"RAY_ADDRESS": "a:b"}, "is not HOST:PORT"),
    ],
)  # fmt: skip
def test_an_address_that_cannot_be(
    trainer: dict[str, Any], environ: dict[str, str], said: str
) -> None:
    assert said in refusal(config(**trainer), environ)


def test_a_port_that_another_program_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refusal(config(master_addr="127.0.0.1", master_port=port))
    assert said.startswith(f"port {port} is in use, by another run or program. ")
    assert "MASTER_PORT=" in said


def test_rays_own_port_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr("ppo_cli.cluster.addresses.RAY_PORT", port)
        assert "ray start --head" in refusal(config(master_addr="127.0.0.1", master_port=port))


def test_nodes_that_do_not_come_are_named() -> None:
    said: list[str] = []
    begun = time.monotonic()
    settings = config(master_addr="127.0.0.1", master_port=unused_port(), node_timeout=1)
    environ = {"SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_NNODES": "2"}
    with pytest.raises(ConfigError, match=r"did not come in time .*: node 1 \(gpu2\).*srun"):
        open_cluster(settings, environ, said.append)
    assert time.monotonic() - begun < 20
    assert said[0] == "1 of 2 nodes are here; waiting for node 1 (gpu2)"


def test_the_door_is_shut_again() -> None:
    port = unused_port()
    settings = config(master_addr="127.0.0.1", master_port=port, node_timeout=1)
    refusal(settings)
    with listen("127.0.0.1", port):
        pass


def test_a_server_that_is_no_ray_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        said = refusal(config(node_timeout=8), {**os.environ, "RAY_ADDRESS": address})
    assert "is no Ray head" in said


def test_a_cluster_that_does_not_answer() -> None:
    assert "nothing answers" in refusal(config(), {"RAY_ADDRESS": f"127.0.0.1:{unused_port()}"})


def test_exit_codes() -> None:
    found = [exit_code_of(e) for e in (None, ConfigError("x"), WorkerLost("x"), Interrupted("x"))]
    assert found == [0, 2, 3, 3]
    left = [exit_code_of(SystemExit(code)) for code in (None, 0, 5, 256 + 7, "a word")]
    assert left == [0, 0, 5, 7, 1]
    assert exit_code_of(KeyboardInterrupt()) == 130
    assert exit_code_of(OSError(errno.ENOSPC, "full")) == 2
    assert [exit_code_of(e) for e in (ValueError(), OSError(errno.ENOENT, "none"))] == [1, 1]


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("x"),
        Interrupted("x"),
        WorkerLost("x"),
        ValueError("x"),
        *(OSError(n, "x") for n in DISK_ERRNOS),
    ],
)
def test_the_others_end_as_node_0_does(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tell_and_end(error) == exit_code_of(error)


class Lost(Nodes):
    """Nodes of which one never comes back."""

    def lost(self) -> str | None:
        return "node 1 (host-b) is gone: it closed the connection."


def test_a_stop_is_heard_while_a_node_is_waited_for() -> None:
    begun, asked = time.monotonic(), []

    def stop_requested() -> str | None:
        asked.append(time.monotonic() - begun)
        return "SIGINT" if len(asked) > 1 else None

    with pytest.raises(Interrupted, match=r"^Stopped while waiting for a node \(SIGINT\)\.$"):
        Lost("", {}, timeout=60, tell=lambda text: None).wait_until_whole(
            stop_requested=stop_requested
        )
    assert asked[-1] < 30


def test_addresses() -> None:
    assert resolve_host("127.0.0.1") == "127.0.0.1"
    assert is_literal("::1")
    assert not is_literal("localhost")
    assert is_mine("127.0.0.1")
    assert not is_mine("198.51.100.7")


def test_a_taken_port_gives_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port("127.0.0.1", port) != port
    assert free_port("127.0.0.1", 70000) > 0


def test_ray_that_cannot_start_says_why() -> None:
    ray = RayProcess(["--no-such-option"], {"PATH": "/usr/bin:/bin"}, "node 1 (host-b)")
    try:
        with pytest.raises(WorkerLost, match=r"Ray stopped on node 1 \(host-b\) \(exit 2\)"):
            ray.wait(60)
        assert "no-such-option" in ray.tail()
    finally:
        ray.stop()
    assert not ray.folder.exists()


def test_nothing_to_close_is_fine() -> None:
    nodes = Nodes("auto", {})
    nodes.close(0)
    nodes.close(1)
    assert nodes.lost() is None


def test_what_is_known_is_told_though_a_node_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppo_cli.cluster.nodes.GRACE_S", 0.3)
    given = {"nnodes": 3, "master_addr": "127.0.0.1", "master_port": unused_port()}
    ends: dict[int, ConfigError] = {}
    said: list[str] = []

    def run(rank: int, start: Callable[..., object], **settings: Any) -> threading.Thread:
        trainer = {**given, "node_rank": rank, "node_timeout": 30}
        node = Config.model_validate({"trainer": trainer, **settings})

        def live() -> None:
            try:
                start(node, {"CUDA_VISIBLE_DEVICES": ""}, said.append)
            except ConfigError as error:
                ends[rank] = error

        thread = threading.Thread(target=live, daemon=True)
        thread.start()
        return thread

    threads = [run(0, open_cluster), run(1, join_cluster, actor={"ppo_epochs": 3})]
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    problem = ends[1].problems[0]
    assert problem.endswith("was started with other settings: actor.ppo_epochs.")
    assert ends[0].problems == (problem, "node 2 is not here yet.")
    assert sum(": no GPU, ppo-cli" in line for line in said) == 2


class QuietRay:
    """Stands where Ray would be started, and keeps how it was; a test may let it die."""

    made: list[QuietRay]

    def __init__(self, options: list[str], environ: Mapping[str, str], label: str) -> None:
        self.options, self.environ, self.label = options, dict(environ), label
        self.living = True
        self.made.append(self)

    def option(self, name: str) -> str:
        return self.options[self.options.index(f"--{name}") + 1]

    def wait(self) -> None: ...

    def alive(self) -> bool:
        return self.living

    def ended(self) -> str:
        return f"Ray stopped on {self.label}."

    def tail(self) -> str:
        return ""

    def stop(self) -> None:
        self.living = False


@pytest.fixture
def rays(monkeypatch: pytest.MonkeyPatch) -> list[QuietRay]:
    monkeypatch.setattr(QuietRay, "made", [], raising=False)
    monkeypatch.setattr("ppo_cli.cluster.nodes.RayProcess", QuietRay)
    return QuietRay.made


def test_two_nodes_start_one_ray_and_end_together(rays: list[QuietRay]) -> None:
    port = unused_port()
    given = {"master_addr": "127.0.0.1", "master_port": port, "node_timeout": 30, "num_workers": 90}
    settings = {"rollout": {"num_samplers": 7}}
    first, second = (
        Config.model_validate(
            {"trainer": {**given, "nnodes": 2, "node_rank": rank, "max_restarts": 1}, **settings}
        )
        for rank in (0, 1)
    )
    ended: list[int] = []
    guest = threading.Thread(
        target=lambda: ended.append(
            join_cluster(second, {"NODE_ADDR": "127.0.0.2", "A": "b"}, lambda text: None)
        ),
        daemon=True,
    )
    guest.start()
    nodes = open_cluster(first, {"A": "c"}, lambda text: None)
    head, node = rays
    assert nodes.address == f"127.0.0.1:{head.option('port')}" == node.option("address")
    assert "--head" in head.options and "--head" not in node.options
    assert int(head.option("ray-client-server-port")) > 0
    assert (head.option("node-ip-address"), node.option("node-ip-address")) == (
        "127.0.0.1", "127.0.0.2",
    )  # fmt: skip
    assert nodes.ips == {0: "127.0.0.1", 1: "127.0.0.2"} and list(nodes.names) == [0, 1]
    for ray, own in ((head, "c"), (node, "b")):
        cores = max(90 + 7 + 2, os.cpu_count() or 1)
        assert (int(ray.option("num-cpus")), ray.option("num-gpus")) == (cores, "0")
        assert ray.environ["A"] == own and nodes.variables.items() <= ray.environ.items()
    assert len(nodes.variables["RAY_AUTH_TOKEN"]) >= 32 and nodes.timeout == 30
    node.living = False
    until = time.monotonic() + 20
    while len(rays) < 3 or nodes.lost() is not None:  # a node starts its own anew, max_restarts 1
        assert time.monotonic() < until
        time.sleep(0.02)
    nodes.close(3)
    guest.join(20)
    assert ended == [3] and [ray.living for ray in rays] == [False] * 3


def test_a_node_offers_the_gpus_that_it_is_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppo_cli.cluster.nodes.gpu_count", lambda environ: 8)
    for given, offered in ((config(n_gpus_per_node=2), "2"), (config(), "1")):
        options = _resources(given, {})
        assert options[options.index("--num-gpus") + 1] == offered
        assert options[options.index("--num-cpus") + 1] == str(os.cpu_count())
