"""The script of one node with the real Ray: who can reach it, what is secret, and what is left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ppo_cli.extras.migrate.bridge.folder import node_scripts
from ppo_cli.extras.migrate.bridge.rewards import KEYS_FILE, read_and_delete_keys
from ppo_cli.processes import reaper
from tests.extras.migrate.bridge.settled import settled
from tests.waiting import free_port, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="sockets and processes are read in /proc"),
]
HERE_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
KEY = "sk-of-nobody-0123456789"
ROOT = Path(__file__).parents[4]
# In the place of verl's trainer: a job that runs until the file `end` is there.
TRAINER = """
import os, pathlib, ray, time
ray.init(log_to_driver=False, logging_level="ERROR")
folder = pathlib.Path(os.environ["DESK"])

@ray.remote
def look():
    return [name for name in os.environ if name in ("OPENAI_API_KEY", "RAY_AUTH_TOKEN")]

(folder / "seen").write_text(repr(ray.get(look.remote())))
(folder / "session").write_text(ray._private.worker._global_node.get_session_dir_path())
(folder / "begun").touch()
while not (folder / "end").exists():
    time.sleep(0.1)
"""
STRANGER = """
import ray, sys
ray.init(address=sys.argv[1], logging_level="ERROR")
print(ray.get(ray.remote(lambda: "it ran").remote()))
"""


def without_ray() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}


class Node:
    """A folder of one node whose script runs, and what a look at its processes finds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        config = settled("trainer.nnodes=1", "trainer.n_gpus_per_node=1")
        (folder / "node_0.sh").write_text(node_scripts(config.trainer, config.reward)["node_0.sh"])
        (folder / "overrides").touch()
        for package in ("verl", "verl/trainer"):
            (folder / "packages" / package).mkdir(parents=True)
            (folder / "packages" / package / "__init__.py").touch()
        (folder / "packages/verl/trainer/main_ppo.py").write_text(TRAINER)
        (folder / "tmp").mkdir()
        self.temp = Path("/tmp") / f"t{os.getpid()}{free_port()}"
        self.temp.mkdir()
        paths = os.pathsep.join([str(folder / "packages"), str(ROOT)])
        environ = without_ray() | {
            "PYTHON": sys.executable, "PYTHONPATH": paths, "DESK": str(folder),
            "NODE_TIMEOUT": "120", "MASTER_PORT": str(self.port), "OPENAI_API_KEY": KEY,
            "TMPDIR": str(self.temp),
        }  # fmt: skip
        with (folder / "stderr").open("w") as stderr:
            self.script = subprocess.Popen(
                ["bash", str(folder / "node_0.sh")], env=environ, text=True,
                stdout=subprocess.DEVNULL, stderr=stderr,
            )  # fmt: skip

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.script.pid).children(recursive=True)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    created = Node(tmp_path)
    script = created.script
    try:
        wait_until(lambda: (tmp_path / "begun").exists() or script.poll() is not None, 180)
        assert script.poll() is None, (tmp_path / "stderr").read_text()
        yield created
    finally:
        script.terminate()
        try:
            script.wait(60)
        finally:
            script.kill()
        created.temp.rmdir()  # nothing is left in it


def listening(processes: list[psutil.Process]) -> dict[int, str]:
    """Ports on which they listen, with the address."""
    doors = [door for process in processes for door in process.net_connections("inet")]
    return {door.laddr.port: door.laddr.ip for door in doors if door.status == "LISTEN"}


def test_only_this_machine_and_this_user_reach_it(node: Node) -> None:
    doors = listening(node.processes())
    assert node.port in doors and len(doors) > 2
    assert {ip.removeprefix("::ffff:") for ip in doors.values()} == {"127.0.0.1"}
    around = without_ray() | {"HOME": str(node.folder)} | HERE_ONLY
    command = [sys.executable, "-c", STRANGER, f"127.0.0.1:{node.port}"]
    for mode in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x"}):
        try:
            stranger = subprocess.run(command, env=around | mode, capture_output=True, timeout=60)
        except subprocess.TimeoutExpired as error:
            assert b"it ran" not in (error.stdout or b"")
        else:
            assert stranger.returncode != 0 and b"it ran" not in stranger.stdout
    session = Path((node.folder / "session").read_text())
    parents = [folder for folder in session.parents if folder.is_relative_to(node.temp)]
    assert any(folder.stat().st_mode & 0o077 == 0 for folder in parents[:-1])


def test_secrets_are_in_files_of_the_user_alone(node: Node) -> None:
    token = (node.folder / ".ray_token").read_text()
    assert len(token) == 64
    for process in node.processes():
        output = Path(f"/proc/{process.pid}/environ").read_bytes()
        output += Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert KEY.encode() not in output and token.encode() not in output, process.cmdline()
    assert (node.folder / "seen").read_text() == "[]"
    holders = {
        path.name: path.stat().st_mode & 0o777
        for top in (node.folder, node.temp) for path in top.rglob("*")
        if path.is_file() and any(s in path.read_bytes() for s in (KEY.encode(), token.encode()))
    }  # fmt: skip
    assert holders == {".ray_token": 0o600, KEYS_FILE: 0o600}
    assert read_and_delete_keys(node.folder) == {"OPENAI_API_KEY": KEY}


@contextmanager
def other_ray() -> Iterator[subprocess.Popen[bytes]]:
    """Another Ray of this user: a head of its own folder and ports."""
    with tempfile.TemporaryDirectory(prefix="o", dir="/tmp") as folder:
        options = [f"--port={free_port()}", f"--ray-client-server-port={free_port()}"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *options,
                   "--block", "--include-dashboard=false", "--dashboard-agent-listen-port=0",
                   "--num-cpus=1", "--disable-usage-stats", "--temp-dir", folder]  # fmt: skip
        log = Path(folder, "log")
        with log.open("w") as stream:
            ray = subprocess.Popen(
                [sys.executable, reaper.__file__, str(os.getpid()), folder, *command],
                env=without_ray() | {"RAY_AUTH_MODE": "disabled"} | HERE_ONLY,
                stdout=stream, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            started = "Ray runtime started"
            wait_until(lambda: started in log.read_text() or ray.poll() is not None, 120)
            assert ray.poll() is None, log.read_text()
            yield ray
        finally:
            ray.terminate()
            ray.wait(30)


@pytest.mark.parametrize(
    "how", ["end", *(pytest.param(how, marks=pytest.mark.weekly) for how in ("kill", "terminate"))]
)
def test_another_ray_of_the_user_stays_and_nothing_of_this_one_does(
    node: Node, tmp_path_factory: pytest.TempPathFactory, how: str
) -> None:
    with other_ray() as other:
        processes = node.processes()
        assert any("gcs_server" in process.name() for process in processes)
        if how == "end":
            (node.folder / "end").touch()
        else:
            getattr(node.script, how)()
        node.script.wait(90)
        _, alive = psutil.wait_procs(processes, 30)
        assert alive == []
        names = {process.name() for process in psutil.Process(other.pid).children(recursive=True)}
        assert other.poll() is None and {"gcs_server", "raylet"} <= names
        secrets = [node.folder / name for name in (".ray_token", KEYS_FILE)]
        assert how == "kill" or not any(path.exists() for path in secrets)
