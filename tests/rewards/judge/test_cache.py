"""A verdict is paid for once, whoever asks, and a broken cache is told in one sentence."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle
from ppo_cli.errors import RewardError
from ppo_cli.rewards.judge.cache import VerdictCache, cache_key, cache_path
from ppo_cli.rewards.judge.calls import JudgeError, Question, Scale, Usage, Verdict
from ppo_cli.rewards.remote.failures import Failure

QUESTION = Question("sys", "user NONCE", "sys\nuser", Scale(1, 10))
VERDICT = Verdict(
    8.0, "good", '{"score": 8}', Usage(10, 2), 0.01, 1.5, calls=2, info={"votes": [8, 8]}
)


def test_what_is_put_comes_back_free_of_charge(tmp_path: Path) -> None:
    cache = VerdictCache(tmp_path / "new" / "judge.sqlite")
    assert cache.get("k") is None
    cache.put("k", VERDICT)
    expected = replace(VERDICT, usage=Usage(), cost_usd=0.0, latency_s=0.0, calls=0, cached=True)
    assert cache.get("k") == expected
    cache.close()
    cache.close()
    assert cache.get("k") is None
    second_cache = VerdictCache(tmp_path / "new" / "judge.sqlite")
    assert second_cache.get("k") == expected
    second_cache.close()


def test_a_refusal_is_kept_and_raised(cache: VerdictCache) -> None:
    cache.put_refusal("k", "content_filter", "the judge will not judge this")
    with pytest.raises(JudgeError, match="will not judge") as caught:
        cache.get("k")
    error = caught.value
    assert (error.kind, error.cause, error.usage) == (Failure.REFUSED, "content_filter", Usage())
    cache.put("k", VERDICT)
    assert cache.get("k") is not None
    cache.put_refusal("later", "bad_request", "the judge was set up wrongly")
    assert cache.get("later") is None, "it may pass later"


@contextlib.contextmanager
def held_by_another(path: Path) -> Iterator[None]:
    other = sqlite3.connect(path)
    other.execute("BEGIN IMMEDIATE")
    yield
    other.rollback()
    other.close()


def test_a_file_held_by_another_process_keeps_nobody_waiting(cache: VerdictCache) -> None:
    cache.put("before", VERDICT)
    assert cache.flush()
    began = time.monotonic()
    with held_by_another(cache.path):
        for i in range(50):
            cache.put(f"k{i}", VERDICT)
            assert cache.get(f"k{i}") is not None
            assert cache.get("before") is not None
        assert time.monotonic() - began < 20.0
        assert not cache.flush(0.2)
    assert cache.flush()
    cache.close()
    second_cache = VerdictCache(cache.path)
    assert all(second_cache.get(f"k{i}") for i in range(50))
    second_cache.close()


def test_closing_does_not_wait_for_another_process_for_long(
    cache: VerdictCache, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    with held_by_another(cache.path), caplog.at_level(logging.WARNING):
        cache.put("k", VERDICT)
        cache.close()
        cache.put("late", VERDICT)
    assert time.monotonic() - began < 20.0
    assert "another process holds it" in caplog.text
    assert cache.get("k") is None and not cache._pending  # nothing is kept for nobody


def test_what_quotes_a_key_is_kept_without_it(
    tmp_path: Path, cache: VerdictCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-verysecret0123456789")
    quoted = "you are sk-verysecret0123456789"
    cache.put("v", replace(VERDICT, reason=quoted, text=quoted, info={"votes": [{"said": quoted}]}))
    verdict = cache.get("v")
    assert (
        verdict is not None and verdict.value == VERDICT.value and "you are ***" in verdict.reason
    )
    cache.put_refusal("k", "refusal", "key sk-verysecret0123456789 may not ask this")
    with pytest.raises(JudgeError, match="may not ask this") as caught:
        cache.get("k")
    cache.close()
    assert "verysecret" not in str(caught.value)
    assert not [f for f in tmp_path.iterdir() if b"verysecret" in f.read_bytes()]


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"user": "user OTHER NONCE"}, True), ({"max_tokens": 5}, True),
        ({"identity": "else"}, False), ({"scale": Scale(1, 5)}, False),
        ({"vote": 1}, False), ({"output": "text"}, False),
    ],
)  # fmt: skip
def test_the_key_goes_by_what_changes_the_answer(changed: dict[str, object], same: bool) -> None:
    other = replace(QUESTION, **changed)  # type: ignore[arg-type]
    assert (cache_key("openai m", QUESTION) == cache_key("openai m", other)) is same


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_keys_do_not_run_into_each_other(first: tuple[str, str], second: tuple[str, str]) -> None:
    keys = [cache_key(who, replace(QUESTION, identity=text)) for who, text in (first, second)]
    assert (keys[0] == keys[1]) == (first == second)


@given(st.text(st.characters(), max_size=50))
def test_any_text_survives(text: str) -> None:
    cache = VerdictCache(Path("file::memory:").with_name(":memory:"))
    cache.put("k", replace(VERDICT, text=text, reason=text))
    verdict = cache.get("k")
    cache.close()
    assert verdict is not None
    assert (verdict.text, verdict.reason) == (text, text)


def fill(path: Path, name: str, together: Barrier) -> None:
    together.wait(30)
    cache = VerdictCache(path)
    for i in range(100):
        cache.put(f"{name}-{i}", VERDICT)
    cache.close()


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "judge.sqlite"
    context = multiprocessing.get_context("fork")
    together = context.Barrier(4)
    workers = [context.Process(target=fill, args=(path, str(n), together)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    cache = VerdictCache(path)
    assert all(cache.get(f"{n}-{i}") for n in range(4) for i in range(100))
    cache.close()


def test_an_older_layout_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "judge.sqlite"
    execute("CREATE TABLE verdicts (key TEXT, old TEXT)")(path)
    cache = VerdictCache(path)
    cache.put("k", VERDICT)
    assert cache.get("k") is not None
    cache.close()


def execute(statement: str) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute(statement)

    return spoil


UNUSABLE = {
    "corrupt": lambda path: path.write_bytes(b"this is no database at all" * 100),
    "newer": execute("PRAGMA user_version=99"),
    "foreign": execute("CREATE TABLE customers (name TEXT)"),
    "folder": Path.mkdir,
}


def content(path: Path) -> object:
    if path.is_dir():
        return "a folder"
    with contextlib.closing(sqlite3.connect(path)) as db:
        try:
            return db.execute("PRAGMA user_version").fetchone(), *db.iterdump()
        except sqlite3.DatabaseError:
            return path.read_bytes()


@pytest.mark.parametrize("spoil", UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_file_is_named_with_the_way_out_and_left_as_it_was(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    path = tmp_path / "judge.sqlite"
    spoil(path)
    before = content(path)
    with pytest.raises(RewardError) as caught:
        VerdictCache(path)
    assert re.fullmatch(rf".*{re.escape(str(path))}.*--rm_cache off.*", str(caught.value))
    assert content(path) == before


def test_a_full_disk_is_told_once_and_costs_nothing_else(
    cache: VerdictCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.put("kept", VERDICT)
    assert cache.flush()
    assert cache._db is not None
    pages = cache._db.execute("PRAGMA page_count").fetchone()[0]
    cache._db.execute(f"PRAGMA max_page_count={pages}")
    with caplog.at_level(logging.WARNING):
        for i in range(3):
            cache.put(f"k{i}", replace(VERDICT, text="x" * 100_000))
            assert cache.flush()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "full" in caplog.text
    assert cache.get("k0") is None
    assert cache.get("kept") is not None


@pytest.mark.parametrize(
    ("folder", "place"), [("", ".cache"), ("relative", ".cache"), ("{home}/c", "c")]
)
def test_where_the_cache_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, place: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", folder.format(home=tmp_path))
    assert cache_path(settle(Config()).config.reward.api) == cache_path(ApiReward())
    assert cache_path(ApiReward()) == tmp_path / place / "ppo-cli" / "judge.sqlite"
    assert cache_path(ApiReward(cache="off")) is None
    assert cache_path(ApiReward(cache=str(tmp_path / "x.sqlite"))) == tmp_path / "x.sqlite"
