"""The connection to the process that talks to Ray: answers, errors, and its sudden end."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ppo_cli import signals
from ppo_cli.cluster import driver as clients
from ppo_cli.cluster.driver import GONE, Answer, Client, DriverEngine
from ppo_cli.cluster.driver_process import portable_error
from ppo_cli.cluster.members import WorkerFault
from ppo_cli.cluster.ray_process import import_paths
from ppo_cli.cluster.worker_process import read_tail
from ppo_cli.errors import ConfigError, Interrupted, WorkerLost
from ppo_cli.processes.reaper import descendants

ROOT = Path(__file__).resolve().parents[3]
VERBS = (sys.executable, "-m", "tests.cluster.verbs")


@contextmanager
def connect() -> Iterator[Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        client = Client(VERBS, import_paths())
        assert client.ask("add", 1).take(60) == ("done", 1)
        yield client
        client.close(1.0)
    assert client._child._process.returncode is not None


@pytest.fixture(scope="module")
def lasting_client() -> Iterator[Client]:
    """For tests after which its process still runs: it takes seconds to start."""
    with connect() as client:
        yield client


@pytest.fixture
def client() -> Iterator[Client]:
    with connect() as client:
        yield client


def freeze(client: Client) -> None:
    """Stop the process, which may still answer that it has."""
    client.ask("freeze")
    state = Path(f"/proc/{client.pid}/stat")
    until = time.monotonic() + 300
    while state.read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < until
        time.sleep(0.01)


def rest(answer: Answer) -> list[tuple[str, Any]]:
    parts = [answer.take(20)]
    while parts[-1][0] == "item":
        parts.append(answer.take(20))
    return parts


def test_the_process_that_talks_to_ray_imports_no_models(lasting_client: Client) -> None:
    assert lasting_client.ask("imported", "torch").take(20) == ("done", True)
    assert lasting_client.ask("imported", "transformers").take(20) == ("done", False)


def test_answers_come_to_whom_they_are_for(lasting_client: Client) -> None:
    slow, quick = lasting_client.ask("count", 20), lasting_client.ask("add", 2, 3)
    assert quick.take(20) == ("done", 5)
    assert rest(slow) == [*(("item", i) for i in range(20)), ("done", None)]
    kind, error = lasting_client.ask("refuse").take(20)
    assert kind == "error" and isinstance(error, ConfigError)
    assert error.problems == ("one thing", "another")
    kind, error = lasting_client.ask("add", "x").take(20)
    assert isinstance(error, WorkerFault) and "TypeError" in str(error)


def test_a_stream_that_is_dropped_ends(lasting_client: Client) -> None:
    answer = lasting_client.ask("count", 100_000)
    answer.take(20)
    answer.drop()
    began = lasting_client.ask("count_so_far").take(20)[1]
    time.sleep(0.2)
    assert lasting_client.ask("count_so_far").take(20)[1] <= began + 1


def test_one_that_does_not_listen_is_killed(client: Client) -> None:
    freeze(client)
    family = descendants(client._child._process.pid)
    client._loop.call(client._child.close("", 0.5))
    assert not any(Path(f"/proc/{pid}").exists() for pid in family)
    assert client.ask("add", 1).take(1) == (GONE, None)


@pytest.mark.slow
def test_one_that_hangs_sets_those_free_who_send_to_it(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "SILENT_S", 3)
    time.sleep(2 * clients.BEAT_S)  # beats keep it alive, and by now it waits by the new limit
    assert client.ask("add", 1).take(20) == ("done", 1)
    freeze(client)
    # More than a socket holds, so that this is stuck until the end.
    assert client.ask("add", bytes(10_000_000)).take(20) == (GONE, None)
    assert client.ending().startswith("said nothing for ")


def test_a_signal_ends_the_wait_for_a_sampler_that_hangs(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = object.__new__(DriverEngine)
    vars(engine).update(
        _client=client, _closed=False, _ray_process=None, _patience_s=300.0,
        _stop_requested=lambda: "Ctrl-C",
    )  # fmt: skip
    freeze(client)
    monkeypatch.setattr(signals, "LEAVE_S", 0.5)
    signals.note_signal()
    try:
        with pytest.raises(Interrupted, match="sampling"):
            next(engine.generate([], Mock()))
    finally:
        signals.forget_signals()


def test_errors_travel_as_themselves_or_as_text() -> None:
    lost = portable_error(WorkerLost("gone"))
    assert isinstance(pickle.loads(pickle.dumps(lost)), WorkerLost)

    class Unpicklable(WorkerLost):
        pass

    for error in (Unpicklable("words"), ValueError("words")):
        sent = portable_error(error)
        assert type(sent) is WorkerFault and "words" in str(sent)


def test_how_it_ended_is_told_with_its_own_last_words(tmp_path: Path, client: Client) -> None:
    log = tmp_path / "log"
    with log.open("a") as file:
        file.write(f"--- process 1, a day\nold words\n--- process {client.pid}, a day\n")
    assert read_tail(log, client.pid) == f"Its log: {log}."
    with log.open("a") as file:
        file.write(f"new words\n--- process {client.pid}0, a day\n")
    assert read_tail(log, client.pid).endswith(f"{log}:\n  new words")
    waiting = client.ask("count", 100_000)
    os.kill(client.pid, signal.SIGKILL)
    assert rest(waiting)[-1] == (GONE, None)
    assert client.ending() == "was killed (signal 9; out of memory?)"


def test_a_farewell_cut_short_still_ends_the_client_and_ray() -> None:
    parts = Mock()
    parts.client.ask.side_effect = KeyboardInterrupt
    engine = object.__new__(DriverEngine)
    vars(engine).update(
        _closing=threading.Lock(), _closed=False, _joins=True, _saver=ThreadPoolExecutor(1),
        _client=parts.client, _ray_process=parts.ray,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert [name for name, _, _ in parts.mock_calls] == ["client.ask", "client.close", "ray.close"]
