"""The cache of verdicts: one SQLite file, shared by all runs of a user.

Refusals are kept as well as verdicts. Neither keys nor values contain a secret. A separate thread
writes, so that no caller waits while another process locks the file.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppo_cli.addresses import cache_root
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.digests import digest_text
from ppo_cli.errors import RewardError
from ppo_cli.paths import user_path
from ppo_cli.rewards.judge.calls import JudgeError, Question, Verdict
from ppo_cli.rewards.remote.failures import Failure
from ppo_cli.secrets.redact import mask_secrets

logger = logging.getLogger(__name__)

# Layout of the table; a file of an older one is replaced.
SCHEMA = 1
# Part of each key. Raise it when replies are read differently and old verdicts must not count.
READING = 3
CONNECT_S = 30.0
# Refusals that concern the text itself; others may have had a temporary reason.
FINAL_REFUSALS = frozenset({"refusal", "content_filter"})
MAX_PENDING = 20_000  # rows in memory while the file is locked; beyond that the oldest are dropped
_BATCH = 500  # rows in one transaction
_BUSY_S = 0.02  # how long SQLite itself waits for a lock
_RETRY_S = 0.1  # pause of the writer while the file is locked
_CLOSE_S = 2.0  # how long `close` waits for the last rows

Row = tuple[str, str, float]


def cache_key(provider_identity: str, question: Question) -> str:
    """Return the cache key of a question to a provider: a digest of all that changes the answer.

    The nonce and the token limit are not part of it.
    """
    scale = [question.scale.low, question.scale.high]
    parts_of_question = [question.identity, scale, question.vote, question.output]
    parts = json.dumps([READING, provider_identity, *parts_of_question])
    return digest_text(parts)


def cache_path(api: ApiReward) -> Path | None:
    """Return the cache file that the settings name, or None when the cache is off."""
    cache = api.cache or f"{cache_root()}/judge.sqlite"
    return None if cache.strip().lower() == "off" else user_path(cache)


class VerdictCache:
    """Keeps verdicts and refusals under their `cache_key`; several processes may share a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Condition()
        # Rows that the file does not have yet, by key.
        self._pending: dict[str, Row] = {}
        self._writer: threading.Thread | None = None
        self._closing = False
        self._warned = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db: sqlite3.Connection | None = _connect_when_free(path)
        except (OSError, sqlite3.Error) as problem:
            why = getattr(problem, "strerror", None) or str(problem)
            raise RewardError(
                f"Cannot use the verdict cache {path}: {why}. Name another file with --rm_cache, "
                "delete this one, or go without it: --rm_cache off."
            ) from None

    def get(self, key: str) -> Verdict | None:
        """Return a verdict at no cost, or None; a cached refusal is raised as JudgeError."""
        row = self._read_row(key)
        if row is None:
            return None
        try:
            kind, content = row[0], json.loads(row[1])
            if kind != "refusal":
                return Verdict(
                    float(content["value"]), str(content["reason"]), str(content["text"]),
                    calls=0, cached=True, info=dict(content["info"]),
                )  # fmt: skip
            cause, message = str(content["cause"]), str(content["message"])
        except (ValueError, KeyError, TypeError):
            return None  # a damaged row: the question is asked again
        if cause in FINAL_REFUSALS:
            raise JudgeError(Failure.REFUSED, cause, message)
        return None

    def put(self, key: str, verdict: Verdict) -> None:
        """Store a verdict; `get` returns it at once, the file has it a little later."""
        content = {
            "value": verdict.value,
            "reason": verdict.reason,
            "text": verdict.text,
            "info": dict(verdict.info),
        }
        self._write(key, "verdict", content)

    def put_refusal(self, key: str, cause: str, message: str) -> None:
        """Store that the judge refuses this question."""
        self._write(key, "refusal", {"cause": cause, "message": message})

    def flush(self, within_s: float = _CLOSE_S) -> bool:
        """Wait at most `within_s` seconds for the writer; return whether it is done."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._pending, within_s)

    def close(self) -> None:
        """Write the pending rows, if the file is free, and close it. Safe to call twice."""
        if not self.flush():
            self._warn_once("write", TimeoutError("another process holds it"))
        with self._lock:
            self._closing = True
            self._pending.clear()
            self._lock.notify_all()
            db, self._db = self._db, None
            if db is not None:
                with contextlib.suppress(sqlite3.Error):
                    db.close()

    def _read_row(self, key: str) -> tuple[str, str] | None:
        """Return kind and content of a verdict; None if it is not cached or unreadable."""
        with self._lock:
            if self._db is None:
                return None
            # A row that the writer has not written yet counts too.
            if key in self._pending:
                return self._pending[key][:2]
            try:
                query = self._db.execute("SELECT kind, content FROM verdicts WHERE key = ?", (key,))
                row: tuple[str, str] | None = query.fetchone()
            except sqlite3.Error as problem:
                self._warn_once("read", problem)
                return None
        return row

    def _write(self, key: str, kind: str, content: Mapping[str, Any]) -> None:
        """Give a verdict to the thread that writes the file, which is started on first use.

        Secrets are masked. When MAX_PENDING verdicts wait, the oldest is dropped with a warning.
        """
        # Surrogates cannot be stored as UTF-8: JSON escapes them.
        row = (kind, json.dumps(mask_secrets(content), default=str), time.time())
        with self._lock:
            if self._db is None or self._closing:
                return
            self._pending[key] = row
            # Another process holds the file for long: memory stays bounded.
            if len(self._pending) > MAX_PENDING:
                del self._pending[next(iter(self._pending))]
                self._warn_once("write", TimeoutError("another process holds it"))
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_pending, daemon=True)
                self._writer.start()
            self._lock.notify_all()

    def _write_pending(self) -> None:
        """Write pending rows until the cache is closed; the writer thread's loop."""
        with self._lock:
            while True:
                self._lock.wait_for(lambda: self._pending or self._closing)
                if self._db is None or self._closing:
                    return
                batch = dict(itertools.islice(self._pending.items(), _BATCH))
                if not self._write_batch(self._db, batch):
                    self._lock.wait_for(lambda: self._closing, _RETRY_S)
                    continue
                for key in batch:
                    del self._pending[key]
                self._lock.notify_all()

    def _write_batch(self, db: sqlite3.Connection, batch: Mapping[str, Row]) -> bool:
        """Write rows in one transaction; return False when the file is locked."""
        rows = [(key, *row) for key, row in batch.items()]
        try:
            with db:
                db.executemany("INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?)", rows)
        except sqlite3.Error as problem:
            if _is_locked(problem):
                return False
            self._warn_once("write", problem)
        return True

    def _warn_once(self, what: str, problem: Exception) -> None:
        if not self._warned:
            logger.warning(
                "cannot %s the verdict cache %s (%s); continuing without", what, self.path, problem
            )
        self._warned = True


def _connect_when_free(path: Path) -> sqlite3.Connection:
    """Open the file, retrying for CONNECT_S seconds while it is locked."""
    # When several processes create the file at once, SQLite fails some of them without waiting.
    until = time.monotonic() + CONNECT_S
    while True:
        try:
            return _connect(path)
        except sqlite3.OperationalError as problem:
            if not _is_locked(problem) or time.monotonic() > until:
                raise
        time.sleep(0.02)


def _is_locked(problem: sqlite3.Error) -> bool:
    return "locked" in str(problem) or "busy" in str(problem)


def _connect(path: Path) -> sqlite3.Connection:
    """Open the file and make sure that it has the table."""
    # `VerdictCache._lock` guards the connection, so several threads may use it.
    db = sqlite3.connect(path, timeout=CONNECT_S, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        with db:
            db.execute("BEGIN IMMEDIATE")
            _prepare(db)
        db.execute("SELECT count(*) FROM (SELECT 1 FROM verdicts LIMIT 1)").fetchone()
        # From here on callers must not wait for a lock: the writer retries instead.
        db.execute(f"PRAGMA busy_timeout={int(1000 * _BUSY_S)}")
    except BaseException:
        db.close()
        raise
    return db


def _prepare(db: sqlite3.Connection) -> None:
    """Create the table; replace one of an older layout, and refuse one of a newer layout."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA:
        raise sqlite3.DatabaseError("it was written by a newer version of this program")
    if version < SCHEMA:
        tables = {
            name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type='table'")
        }
        if tables - {"verdicts"}:
            raise sqlite3.DatabaseError("it is a database of something else")
        db.execute("DROP TABLE IF EXISTS verdicts")
        db.execute(
            "CREATE TABLE verdicts (key TEXT PRIMARY KEY, kind TEXT NOT NULL, "
            "content TEXT NOT NULL, time REAL NOT NULL) WITHOUT ROWID"
        )
        db.execute(f"PRAGMA user_version={SCHEMA}")
