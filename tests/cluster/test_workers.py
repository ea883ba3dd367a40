"""Workers without models: errors, deadlines, deaths, streams and logs, over one real Ray."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import threading
import time
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.cluster.engine import ClusterEngine
from ppo_cli.cluster.members import Cluster, WorkerFault
from ppo_cli.errors import ConfigError, WorkerLost
from ppo_cli.planning.placement import Placement

pytestmark = pytest.mark.slow
ONE_NODE = Placement(1, 0, (0, 1), ((2,),), ())


class Thing:
    """What the workers of these tests host."""

    def add(self, *numbers: int) -> int:
        return sum(numbers)

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def say(self, text: str) -> None:
        print(text)
        print(f"{text}, loudly", file=sys.stderr)
        os.write(2, f"{text}, from C\n".encode())

    def make_a_bug(self) -> float:
        try:
            return 1 / 0
        except ZeroDivisionError as error:
            raise RuntimeError("the outer one") from error

    def refuse(self) -> None:
        raise ConfigError(["one thing", "another thing"])

    def refuse_to_be_built(self) -> None:
        raise ConfigError("this cannot be built")

    def fill_the_disk(self) -> None:
        raise OSError(28, "No space left on device", "some/file")

    def open_nothing(self) -> None:
        raise FileNotFoundError(2, "No such file or directory", "some/file")

    def find(self, module: str) -> str | None:
        return importlib.import_module(module).__file__

    def leave(self) -> None:
        sys.exit(3)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def crash(self) -> None:
        ctypes.string_at(0)

    def fail_after(self, seconds: float) -> None:
        time.sleep(seconds)
        raise RuntimeError("Connection closed by peer")

    def bunch(self, proceed: Path) -> Iterator[int]:
        yield from (0, 1)
        while not proceed.exists():
            time.sleep(0.05)
        yield 2
        raise ValueError("no more")

    def count(self, upto: int, pause: float) -> Iterator[int]:
        for number in range(upto):
            yield number
            time.sleep(pause)


class Recorder:
    """Notes the thread of each call."""

    def __init__(self) -> None:
        self.threads = [threading.get_ident()]

    def note(self) -> list[int]:
        self.threads.append(threading.get_ident())
        return self.threads

    def count(self, upto: int) -> Iterator[int]:
        for number in range(upto):
            self.note()
            yield number
            time.sleep(0.05)


class Hosted:
    """A member, and the cluster that calls it."""

    def __init__(
        self, cluster: Cluster, factory: Callable[[], object], role: str, streams: bool = False
    ) -> None:
        self.cluster = cluster
        if streams:
            (self.member,) = cluster.start([cluster.seat(role, [])])
            building = cluster.ask(self.member, "start", "build_streaming", factory)
            cluster.waits.collect([building])
        else:
            self.member = cluster.host(factory, role=role)

    def call(self, name: str, *args: object) -> Any:
        return self.cluster.call([self.member], name, *args)[0]


class Writer:
    """Writes for some polls, then is done or fails."""

    def __init__(self) -> None:
        self.polls = 0

    def write(self, polls: int, fails: bool = False) -> None:
        self.polls, self.fails = polls, fails

    def saved(self) -> bool:
        self.polls -= 1
        if self.polls <= 0 and self.fails:
            raise OSError(28, "No space left on device", "some/file")
        return self.polls <= 0

    def left(self) -> int:
        return self.polls


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def cluster(address: str, logs: Path) -> Iterator[Cluster]:
    chance = logs / "here"
    chance.mkdir()
    (chance / "wave.py").write_text("raise SystemExit('not for us')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(chance)
        patch.setattr(sys, "path", [path for path in sys.path if path])
        cluster = Cluster(ONE_NODE, logs, address=address, worker_timeout=240, node_timeout=240)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def things(cluster: Cluster) -> list[Hosted]:
    return [Hosted(cluster, Thing, role=f"thing {i}", streams=True) for i in range(2)]


def test_calls_give_values_from_any_thread(things: list[Hosted]) -> None:
    assert things[0].call("add", 1, 2) == 3
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(things[1].call, ["add"] * 5, range(5))) == list(range(5))


def test_workers_have_a_separate_environment_and_import_nothing_from_the_current_folder(
    things: list[Hosted],
) -> None:
    assert things[0].call("environment", "OMP_NUM_THREADS") == "1"
    assert things[0].call("environment", "CUDA_VISIBLE_DEVICES") == ""
    assert things[0].call("find", "wave") == wave.__file__


def test_a_users_mistake_comes_out_as_itself(things: list[Hosted]) -> None:
    with pytest.raises(ConfigError) as caught:
        things[0].call("refuse")
    assert caught.value.problems == ("one thing", "another thing")
    assert caught.value.__cause__ is None
    with pytest.raises(OSError) as full:
        things[0].call("fill_the_disk")
    assert (full.value.errno, full.value.filename) == (28, "some/file")
    with pytest.raises(ConfigError, match="this cannot be built"):
        things[0].cluster.host(Thing().refuse_to_be_built, role="wreck")


def test_a_bug_shows_the_workers_traceback_once(things: list[Hosted]) -> None:
    with pytest.raises(WorkerFault) as caught:
        things[1].call("make_a_bug")
    text = str(caught.value)
    assert text.startswith("thing 1 on node ")
    assert text.count("ZeroDivisionError") == 1
    assert text.rstrip().endswith("RuntimeError: the outer one")
    assert "ray" not in text.lower()
    assert caught.value.__cause__ is None
    with pytest.raises(WorkerFault, match=r"^thing 1 on node (.|\n)*FileNotFoundError"):
        things[1].call("open_nothing")
    with pytest.raises(WorkerFault, match="SystemExit: 3"):
        things[1].call("leave")


def test_streams_are_merged_as_they_come(cluster: Cluster, things: list[Hosted]) -> None:
    members = [thing.member for thing in things]
    calls = [cluster.ask(member, "count", "stream", 6, 0.4) for member in members]
    seen = [number for part in cluster.waits.stream(calls) for number in part]
    assert sorted(seen) == sorted([*range(6)] * 2)
    assert seen[:6] != [*range(6)]  # the second did not wait for the end of the first


def test_an_object_is_built_called_and_streamed_in_one_thread(cluster: Cluster) -> None:
    streaming = Hosted(cluster, Recorder, role="recorder 0", streams=True)
    items = cluster.waits.stream([cluster.ask(streaming.member, "count", "stream", 20)])
    first = next(items)
    # Sent while the stream is under way: it is answered when that has ended.
    threads = streaming.call("note")
    assert first + [item for part in items for item in part] == [*range(20)]
    assert len(threads) == 22 and len({*threads}) == 1
    cluster.dismiss(streaming.member)


def test_an_object_that_does_not_stream_lives_in_the_main_thread(cluster: Cluster) -> None:
    plain = Hosted(cluster, Recorder, role="recorder 1")
    call = cluster.ask(plain.member, "main", "run", lambda: threading.main_thread().ident)
    assert {*plain.call("note")} == {cluster.waits.collect([call])[0]}
    cluster.dismiss(plain.member)


def test_items_of_a_stream_are_not_held_back_by_a_later_pause_or_error(
    cluster: Cluster, things: list[Hosted], tmp_path: Path
) -> None:
    proceed, came = tmp_path / "proceed", list[int]()
    call = cluster.ask(things[0].member, "bunch", "stream", proceed)
    with pytest.raises(WorkerFault, match="ValueError: no more"):
        for part in cluster.waits.stream([call]):
            came += part
            if 1 in part:
                proceed.touch()
    assert came == [0, 1, 2]


def test_a_save_ends_when_all_ranks_have_ended(cluster: Cluster) -> None:
    writers = [Hosted(cluster, Writer, role=f"writer {i}") for i in range(2)]
    engine = object.__new__(ClusterEngine)
    engine.cluster = cluster
    engine._learners = [writer.member for writer in writers]
    writers[0].call("write", 1, True)
    writers[1].call("write", 3)
    with pytest.raises(OSError, match="some/file"):
        engine._await_saved(time.monotonic())
    assert writers[1].call("left") == 0
    for writer in writers:
        cluster.dismiss(writer.member)


def test_a_deadline_names_who_and_what(cluster: Cluster, things: list[Hosted], logs: Path) -> None:
    call = cluster.ask(things[0].member, "sleep", "call", 5.0)
    with pytest.raises(WorkerLost) as caught:
        cluster.waits.collect([call], 0.5)
    assert "Thing 0 on node" in str(caught.value)
    assert "has not answered `sleep` for 0.5 s" in str(caught.value)
    assert str(logs / "thing-0.log") in str(caught.value)
    assert things[0].call("add", 1) == 1  # it was only slow


def test_logs_hold_all_that_a_worker_says(
    things: list[Hosted], logs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    things[1].call("say", "hello there")
    text = (logs / "thing-1.log").read_text()
    assert "hello there\n" in text
    assert "hello there, loudly\n" in text
    assert "hello there, from C\n" in text
    assert "hello there" not in (logs / "thing-0.log").read_text()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("method", ["call", "stream"])
def test_a_killed_worker_is_named_at_once(
    cluster: Cluster, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    victim = Hosted(cluster, Thing, role=f"victim {method}", streams=True)
    threading.Timer(1.0, os.kill, (victim.member.pid, 9)).start()
    started = time.monotonic()
    with pytest.raises(WorkerLost) as caught:
        if method == "call":
            victim.call("sleep", 900)
        for _ in cluster.waits.stream([cluster.ask(victim.member, "count", "stream", 9000, 0.1)]):
            pass
    assert time.monotonic() - started < 120
    doing = "sleep" if method == "call" else "count"
    assert f"Victim {method} on node " in str(caught.value)
    assert f"was killed (signal 9; out of memory?) during `{doing}`" in str(caught.value)
    cluster.dismiss(victim.member)
    time.sleep(0.5)  # Ray's messages come later, if at all
    assert capfd.readouterr() == ("", "")


class Handler(Thing):
    """Brings a library that handles crashes itself."""

    def __init__(self) -> None:
        ctypes.CDLL(None).signal(signal.SIGSEGV, 0)


@pytest.mark.parametrize("kind", [Thing, Handler])
def test_a_crash_is_reported_with_the_last_lines_of_the_log(
    cluster: Cluster, kind: type[Thing]
) -> None:
    victim = Hosted(cluster, kind, role=f"victim {kind.__name__}")
    with pytest.raises(
        WorkerLost, match=r"crashed during `crash`(.|\n)*Fatal Python error: Segmentation fault"
    ):
        victim.call("crash")


def test_who_died_matters_more_than_who_complains(cluster: Cluster, things: list[Hosted]) -> None:
    victim = Hosted(cluster, Thing, role="victim 9")
    calls = [
        cluster.ask(things[0].member, "fail_after", "call", 0.3),
        cluster.ask(victim.member, "sleep", "call", 60),
    ]
    threading.Timer(1.0, os.kill, (victim.member.pid, 9)).start()
    with pytest.raises(WorkerLost, match="Victim 9"):
        cluster.waits.collect(calls)
