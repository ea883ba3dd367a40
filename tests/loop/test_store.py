"""Runs with a copy in a store: killed in the middle of an upload, on a wiped disk, without it."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ppo_cli import load_run
from ppo_cli.cli.app import main
from ppo_cli.digests import MANIFEST
from ppo_cli.errors import DataError, Interrupted, UserError
from ppo_cli.run_folder.folder import RunFolder, paid_calls, run_settings
from ppo_cli.run_folder.lines import LABELS_FILE, ROLLOUTS
from ppo_cli.run_folder.store import (
    FETCHING,
    INDEX,
    LEASE,
    checkpoints_in,
    is_mine,
    localise,
    make_lease,
    mirrored,
    open_store,
    put,
    read_json,
    scan,
    try_store,
)
from tests.forked import PPO, Forked, run_forked
from tests.judge_server import JudgeServer
from tests.loop.runs import SLOW_DISK, SMALL, assert_same_run, train, wait_for
from tests.s3_server import S3Server
from tests.waiting import wait_until

URL = "s3://bucket/runs/a"
KILLS = int(os.environ.get("PPO_KILLS", "0"))
# Writes the checkpoint of step 4 when it may.
WAITING = SLOW_DISK.replace("time.monotonic() < end", 'not Path(os.environ["DESK"], "go").exists()')
ARGS = (*SMALL, "trainer.max_ckpt_to_keep=2")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in a folder, without interruption."""
    out = tmp_path_factory.mktemp("calm") / "run"
    train(out, *ARGS)
    return out


@pytest.fixture
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


def environment(s3: S3Server, tmp_path: Path) -> dict[str, str]:
    cache = str(tmp_path / "cache")
    root = str(Path(__file__).resolve().parents[2])
    return os.environ | s3.environment | {
        "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": cache,
    }  # fmt: skip


def local(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "ppo-cli" / "runs" / "s3" / "bucket" / "runs" / "a"


def copied(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The copy in the store, on this disk again."""
    for name, value in environment(s3, tmp_path).items():
        monkeypatch.setenv(name, value)
    return localise(URL)


def run(s3: S3Server, tmp_path: Path, *args: str, exit_code: int = 0) -> str:
    env = environment(s3, tmp_path)
    done = run_forked(["train", *ARGS, "--output_dir", URL, *args], env, timeout=300)
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert "loopback-secret" not in done.stdout + done.stderr
    return done.stdout + done.stderr


def begin(s3: S3Server, tmp_path: Path) -> Forked:
    return Forked(PPO, ["train", *ARGS, "--output_dir", URL], environment(s3, tmp_path))


def end(process: Forked) -> None:
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_killed_in_an_upload_and_wiped_it_goes_on_to_the_same_bits(
    calm: Path, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.hold = r"/step_00000[468]/critic/"
    env = environment(s3, tmp_path) | {"DESK": str(tmp_path), "HOLD": "0"}
    process = Forked(WAITING, ["train", *ARGS, "--output_dir", URL], env)
    try:
        while "step_000002/digests.json" not in s3.read("runs/a/index.json"):
            assert process.poll() is None
            time.sleep(0.1)
        (tmp_path / "go").touch()
        assert s3.held.wait(120)
        assert process.poll() is None
    finally:
        end(process)
    s3.hold = None
    s3.release.set()
    shutil.rmtree(tmp_path / "cache")
    # A part of a later checkpoint is there, and does not count.
    assert any(re.search("step_00000[468]/", name) for name in s3.names())
    output = run(s3, tmp_path)
    assert "Fetching" in output and "Going on after step 2" in output, output
    assert_same_run(local(tmp_path), calm)
    # The copy is the folder: it is complete, and older checkpoints are gone.
    assert_same_run(copied(s3, tmp_path, monkeypatch), calm)
    steps = {name.split("/")[3] for name in s3.names() if "/checkpoints/" in name}
    assert steps == {path.name for path in (calm / "checkpoints").glob("step_*")}
    assert not any("lease" in name for name in s3.names())


@pytest.mark.slow
def test_a_store_that_goes_away_does_not_stop_the_run(
    calm: Path, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = begin(s3, tmp_path)
    try:
        wait_for(local(tmp_path) / "metrics.jsonl", process)
        s3.gone.set()
        wait_for(local(tmp_path) / "checkpoints" / "step_000008", process)
        refused = s3.refused
        while s3.refused < refused + 2:
            time.sleep(0.1)
        s3.gone.clear()
        output = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert s3.refused and output.count("does not answer") == 1
    for out in (local(tmp_path), copied(s3, tmp_path, monkeypatch)):
        assert_same_run(out, calm)


@pytest.mark.slow
def test_verdicts_and_spending_survive_the_machine(s3: S3Server, tmp_path: Path) -> None:
    env = environment(s3, tmp_path) | {"OPENAI_API_KEY": "key-of-the-loopback-judge"}
    with JudgeServer() as judge:
        judge.keys = {env["OPENAI_API_KEY"]}
        args = [
            "train", "--preset", "embedded", "--batch_size", "8", "--max_steps", "2",
            "--save_freq", "1", "data.val_files=[]", "--use_api_reward", "--rm_model", "one",
            "--rm_prompt_preset", "math", "--rm_api_type", "openai", "--rm_canary_every", "0",
            "--rm_base_url", judge.url("openai"), "--rm_price_input", "1",
            "--rm_price_output", "4", "--output_dir", URL,
        ]  # fmt: skip
        assert run_forked(args, env, timeout=300).returncode == 0
        calls, answered = paid_calls(local(tmp_path)), judge.state.answered
        assert calls
        # Step 2 is lost, and judged again at no cost.
        index = json.loads(s3.read("runs/a/index.json"))
        index["files"] = {n: e for n, e in index["files"].items() if "step_000002/" not in n}
        index["links"] = {}
        s3.write("runs/a/index.json", json.dumps(index))
        shutil.rmtree(tmp_path / "cache")
        done = run_forked(args, env, timeout=300)
        assert "Going on after step 1" in done.stdout
        assert judge.state.answered == answered and paid_calls(local(tmp_path)) == calls


@pytest.mark.slow
@pytest.mark.skipif(not KILLS, reason="PPO_KILLS=20 kills as many runs, each on a fresh disk")
def test_kills_at_random_moments(calm: Path, s3: S3Server, tmp_path: Path) -> None:
    dice = random.Random(KILLS)
    killed = []
    for number in range(KILLS):
        url = ("--output_dir", f"{URL}{number}")
        process = Forked(PPO, ["train", *ARGS, *url], environment(s3, tmp_path))
        time.sleep(dice.uniform(1, 9))
        killed.append(process.poll() is None)
        end(process)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        output = run(s3, tmp_path, *url)
        fetched = re.findall("Going on after step . *|This run is complete", output)
        print(number, "killed" if killed[-1] else "ended before", *fetched, flush=True)
        assert_same_run(local(tmp_path).with_name(f"a{number}"), calm)
    assert sum(killed) > KILLS / 2


def save(folder: RunFolder, step: int, text: str) -> None:
    checkpoint = folder.checkpoints / f"step_{step:06d}"
    (checkpoint / "state").mkdir(parents=True)
    (checkpoint / "state" / "run.json").write_text(text)
    (checkpoint / MANIFEST).write_text(text)
    folder.path.joinpath("metrics.jsonl").write_text(text)


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_the_state_of_a_folder_and_what_another_run_left(tmp_path: Path, scheme: str) -> None:
    """Small files stand for a run here; in one of the stores, files are renamed into place."""
    url = f"{scheme}://{tmp_path}/store"
    notes: list[str] = []

    def begin_on(machine: str) -> tuple[RunFolder, AbstractContextManager[None]]:
        folder = RunFolder(tmp_path / machine)
        folder.path.mkdir(exist_ok=True)
        return folder, mirrored(url, folder, notes.append, "ppo train")

    def state(folder: RunFolder) -> dict[str, str]:
        return {name: (folder.path / name).read_text() for name in scan(folder.path)}

    first, copy = begin_on("first")
    with copy:
        save(first, 1, "one")
    # Elsewhere the copy is fetched; it goes on, and the first machine follows.
    second, copy = begin_on("second")
    with copy:
        assert state(second) == state(first)
        save(second, 2, "two")
        shutil.rmtree(second.checkpoints / "step_000001")
    first, copy = begin_on("first")
    with copy:
        assert state(first) == state(second) and "step_000002" in str(state(first))
    # What is newer here stays, and is copied.
    save(first, 3, "three")
    first, copy = begin_on("first")
    with copy:
        assert "step_000003" in str(state(first))
    # A checkpoint that a run went back from since the last copy is not fetched again.
    shutil.rmtree(first.checkpoints / "step_000003")
    (first.path / "restraints.json").write_text("[]")
    first, copy = begin_on("first")
    with copy:
        assert "step_000003" not in str(state(first))
    save(first, 3, "three")
    with begin_on("first")[1]:
        pass
    # Another run in its place: the earlier one is kept, there too, and never fetched.
    with begin_on("first")[1]:
        first.set_aside()
        save(first, 1, "new")
    third, copy = begin_on("third")
    with copy:
        assert state(third)["metrics.jsonl"] == "new" and len(checkpoints_in(scan(third.path))) == 1
        assert (third.path / "earlier_1").is_dir()
    names = read_json(open_store(url), INDEX)["files"]
    assert "earlier_1/checkpoints/step_000003/state/run.json" in names
    # A folder with another run is set aside before.
    fourth, copy = begin_on("fourth")
    save(fourth, 9, "mine")
    os.utime(fourth.checkpoints / "step_000009" / MANIFEST, (1, 1))
    with copy:
        assert state(fourth)["earlier_2/metrics.jsonl"] == "mine"
    assert any("is another one: it is moved to" in note for note in notes)
    # Another run that is newer does not replace the copy, and a run below is no part of this one.
    fifth, copy = begin_on("fifth")
    save(fifth, 9, "mine")
    with pytest.raises(UserError, match="has another run than"), copy:
        pass
    assert read_json(open_store(url), "lease.json") is None
    save(RunFolder(fifth.path / "below"), 1, "below")
    assert not any("below" in name for name in scan(fifth.path))
    # A machine whose last checkpoint has a higher number keeps nothing of it, not even a folder.
    second, copy = begin_on("second")
    with copy:
        assert [path.name for path in second.checkpoints.iterdir()] == ["step_000001"]
    index = read_json(open_store(url), INDEX)
    put(open_store(url), INDEX, {"files": {"../evil": [1, 1]}, "links": {}})
    with pytest.raises(UserError, match="outside the run"), begin_on("sixth")[1]:
        pass
    put(open_store(url), INDEX, index)


@pytest.mark.slow
def test_what_is_wrong_with_a_store_is_said_at_the_start(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ppo_cli.run_folder.store.POLL_S", 0.05)
    notes: list[str] = []

    def refusal(url: str, kind: type[Exception]) -> str:
        from s3fs import S3FileSystem

        S3FileSystem.clear_instance_cache()
        with pytest.raises(kind) as caught, mirrored(url, RunFolder(tmp_path), notes.append, "x y"):
            pass
        return str(caught.value)

    # No rights, a wrong key or clock, no bucket and no key: at once. S3's reason is in the message.
    for s3.error in ("AccessDenied", "SignatureDoesNotMatch", "RequestTimeTooSkewed"):
        assert refusal(URL, UserError) == f"{URL} cannot be used: so: {s3.error}."
        assert try_store(URL) == ([], [f"{URL} cannot be used: so: {s3.error}."])
    assert s3.refused == 6 and not notes
    s3.error = ""
    for sentence in (refusal("s3://none/a", UserError), try_store("s3://none/a")[1][0]):
        assert "bucket does not exist" in sentence
    assert try_store(URL) == ([], [])
    with monkeypatch.context() as without:
        without.delenv("AWS_ACCESS_KEY_ID")
        without.setenv("AWS_EC2_METADATA_DISABLED", "true")
        assert "Unable to locate credentials" in refusal(URL, UserError)
    # A store that is away is tried again; then the command goes on with the run.
    monkeypatch.setattr("ppo_cli.run_folder.store.PATIENCE_S", 2.5)
    s3.gone.set()
    assert refusal(URL, Interrupted).endswith("Go on with: x y")
    assert s3.refused > 6 and len(notes) == 1
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "Could not connect" in refusal(URL, Interrupted)
    assert "Could not connect" in try_store(URL)[0][0]
    s3.gone.clear()
    assert s3.names() == [] and list(tmp_path.iterdir()) == []


def test_a_fetch_that_is_cut_off_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppo_cli.run_folder.store.PATIENCE_S", 0.5)
    store, files = open_store(f"memory://{tmp_path.name}"), ["metrics.jsonl"]
    files += [f"checkpoints/step_000001/{name}" for name in (MANIFEST, "state/run.json")]
    for name in files:
        put(store, name, {"of": name})
    entries = {name: [1, 1] for name in files}
    put(store, INDEX, {"files": entries, "links": {"latest": "step_000001"}})
    copy = mirrored(f"memory://{tmp_path.name}", RunFolder(tmp_path), print, "")
    lost = Mock(side_effect=OSError("lost"))
    with monkeypatch.context() as broken, pytest.raises(Interrupted, match="does not answer"):
        broken.setattr("ppo_cli.run_folder.store.move_into_place", lost)
        copy.__enter__()
    # Nothing has the name of a checkpoint, and the next start does not take this for a run.
    assert (tmp_path / FETCHING).exists() and not list(tmp_path.glob("checkpoints/step_*"))
    with mirrored(f"memory://{tmp_path.name}", RunFolder(tmp_path), print, ""):
        assert {*scan(tmp_path)} == {*files} and not (tmp_path / FETCHING).exists()
        assert os.readlink(tmp_path / "checkpoints" / "latest") == "step_000001"
    assert {*store.find("")} == {*files, INDEX}


def test_databases_labels_and_rollouts_follow_the_newest_checkpoint(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    writer, reader = (RunFolder(tmp_path / name) for name in ("writer", "reader"))
    for folder in (writer, reader):
        folder.path.mkdir()
    (writer.path / LABELS_FILE).write_text("of the writer")
    with closing(sqlite3.connect(writer.path / "judge.sqlite")) as verdicts:
        verdicts.execute("PRAGMA journal_mode=WAL")  # rows go to a second file first
        verdicts.execute("CREATE TABLE verdicts (step)")
        for step in (1, 2):
            verdicts.execute("INSERT INTO verdicts VALUES (?)", [step])
            verdicts.commit()
            save(writer, step, str(step))
            for folder in (writer, reader):
                with mirrored(url, folder, print, ""):
                    pass
            with closing(sqlite3.connect(reader.path / "judge.sqlite")) as copy:
                rows = copy.execute("SELECT step FROM verdicts").fetchall()
            assert rows == [(1,), (2,)][:step]
            if step == 1:
                # There, labels are given, and a step is begun that another machine takes again.
                (reader.path / LABELS_FILE).write_text("of the reader")
                killed = sqlite3.connect(reader.path / "judge.sqlite")
                killed.execute("INSERT INTO verdicts VALUES (99)")
                killed.commit()
                (reader.path / ROLLOUTS).mkdir()
                (reader.path / ROLLOUTS / "000002.jsonl").write_text("begun")
        killed.close()
        # A row that is in the second file only is a change.
        for row in (3, 4):
            verdicts.execute("INSERT INTO verdicts VALUES (?)", [row])
            verdicts.commit()
            with mirrored(url, writer, print, ""):
                pass
    open_store(url).get_file("judge.sqlite", str(tmp_path / "copy"))
    with closing(sqlite3.connect(tmp_path / "copy")) as copy:
        assert len(copy.execute("SELECT * FROM verdicts").fetchall()) == 4
    assert (reader.path / LABELS_FILE).read_text() == "of the reader"
    assert not [*(reader.path / ROLLOUTS).iterdir()]


def test_an_outage_of_the_store_is_told_once_and_caught_up_with(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ppo_cli.run_folder.store.POLL_S", 0.05)
    notes, folder = list[str](), RunFolder(tmp_path)
    with mirrored(URL, folder, notes.append, ""):
        s3.error = "AccessDenied"
        save(folder, 1, "one")
        wait_until(lambda: s3.refused > 3)
        s3.error = ""
    assert sum("does not answer" in note for note in notes) == 1
    assert f"{URL} answers again." in notes
    assert "step_000001/digests.json" in s3.read("runs/a/index.json")


def test_a_store_that_never_answers_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("POLL_S", "PATIENCE_S"):
        monkeypatch.setattr(f"ppo_cli.run_folder.store.{name}", 0.2)
    hung, put_file = threading.Event(), put

    def hang(*arguments: Any) -> None:
        if folder.path.joinpath("metrics.jsonl").exists():
            hung.wait(60)
        put_file(*arguments)

    monkeypatch.setattr("ppo_cli.run_folder.store.put", hang)
    folder = RunFolder(tmp_path)
    copy = partial(mirrored, f"memory://{tmp_path.name}", folder, print, "ppo train")
    # In a finished run, and before it begins.
    with pytest.raises(Interrupted, match=r"not everything is copied: .*does not answer"), copy():
        (tmp_path / "metrics.jsonl").write_text("{}")
    with pytest.raises(Interrupted, match=r"does not answer.*Go on with: ppo train"), copy():
        pass
    hung.set()


def test_the_index_lists_no_checkpoint_that_is_being_replaced(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    folder = RunFolder(tmp_path)
    save(folder, 1, "one")
    with mirrored(URL, folder, print, ""):
        pass
    folder.set_aside()
    save(folder, 1, "two")
    s3.hold = "/a/checkpoints/step_000001/"
    monkeypatch.setattr("ppo_cli.run_folder.store.POLL_S", 0.05)
    with mirrored(URL, folder, print, ""):
        assert s3.held.wait(60)
        assert '"checkpoints/' not in s3.read("runs/a/index.json")
        s3.release.set()
    assert s3.read("runs/a/checkpoints/step_000001/state/run.json") == "two"


def test_a_lease_of_a_process_of_this_machine_that_has_ended_keeps_nobody_waiting(
    tmp_path: Path,
) -> None:
    store, notes = open_store(f"memory://{tmp_path.name}"), list[str]()
    ended = subprocess.Popen(["true"])
    ended.wait()
    put(store, LEASE, make_lease() | {"pid": ended.pid})
    with mirrored(f"memory://{tmp_path.name}", RunFolder(tmp_path), notes.append, ""):
        assert notes == [] and (read_json(store, LEASE) or {})["pid"] == os.getpid()


def test_two_machines_with_one_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppo_cli.run_folder.store.POLL_S", 0.05)
    monkeypatch.setattr("ppo_cli.run_folder.store.LEASE_S", 1.5)
    url, notes = f"memory://{tmp_path.name}", list[str]()
    folder = RunFolder(tmp_path)
    store = open_store(url)
    lease = {"host": "elsewhere", "pid": 1}

    def renew() -> None:
        while not ended.wait(0.1):
            put(store, LEASE, lease | {"time": time.time() - 300})

    # Alive, with a clock of its own: refused. Without a sign of life: taken over.
    put(store, LEASE, lease | {"time": time.time()})
    ended = threading.Event()
    other = threading.Thread(target=renew)
    other.start()
    with pytest.raises(UserError, match="active on elsewhere"), mirrored(url, folder, print, ""):
        pass
    ended.set()
    other.join()
    (tmp_path / "metrics.jsonl").write_text("{}")
    with mirrored(url, folder, notes.append, ""):
        assert is_mine(read_json(store, LEASE) or {})
    assert "may be in use on elsewhere" in notes[0] and read_json(store, LEASE) is None
    # The other one comes back and writes: this run says so at its end, and copies nothing.
    with (
        pytest.raises(Interrupted, match="elsewhere writes to"),
        mirrored(url, folder, notes.append, ""),
    ):
        put(store, LEASE, lease | {"time": time.time()})
        wait_until(lambda: "goes on without a copy" in notes[-1])
        (tmp_path / "metrics.jsonl").write_text("{}\n{}")
    assert store.cat_file("metrics.jsonl") == b"{}"


@pytest.mark.slow
def test_a_run_at_an_address_is_shown_exported_and_forked(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (s3.environment | {"XDG_CACHE_HOME": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    tiny = ("--preset", "embedded", "--batch_size", "4", "--rollout_n", "1", "--max_steps", "1")
    assert main(["train", *tiny, "--output_dir", URL, "data.val_max_samples=4"]) == 0
    assert list(load_run(URL).metrics.index) == [0, 1]
    assert main(["show", URL]) == main(["report", URL]) == main(["runs", URL]) == 0
    # As on a disk, RUN/checkpoints is its newest; a folder with that name may have runs, too.
    assert main(["export", f"{URL}/checkpoints/", "--out", "model"]) == 0
    open_store("s3://bucket").copy("runs/a", "checkpoints/a", recursive=True)
    for word in ("", "/checkpoints", "/checkpoints/latest/actor"):
        assert localise(f"s3://bucket/checkpoints/a{word}").is_dir()
    fork = ("--fork", f"{URL}@1", "--max_steps", "2", "data.val_max_samples=4")
    assert main(["train", *fork]) == 0
    assert run_settings(tmp_path / "a-step_000001").trainer.store is None
    with pytest.raises(DataError, match=r"^s3://bucket/none has no run"):
        load_run("s3://bucket/none")
