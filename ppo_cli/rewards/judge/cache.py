"""Verdicts that were paid for once, in one SQLite file shared by all runs of a user.

A refusal is as final as a verdict and is kept too. Neither keys nor values hold a secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppo_cli.config.rewarding import ApiReward
from ppo_cli.errors import RewardError
from ppo_cli.redact import redact
from ppo_cli.rewards.judge.exchange import Failure, JudgeError, Question, Verdict

logger = logging.getLogger(__name__)

SCHEMA = 1
BUSY_TIMEOUT_S = 30.0


def key_of(provider_identity: str, question: Question) -> str:
    """Return the key of a question put to a provider: what changes the answer, and nothing else.

    The nonce, the number of the attempt and the token limit stay out of it.
    """
    scale = [question.scale.low, question.scale.high]
    parts = json.dumps([SCHEMA, provider_identity, question.identity, scale, question.vote])
    return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()


def default_cache_path(environ: Mapping[str, str]) -> Path:
    """Return where a user's verdicts are kept unless told otherwise."""
    base = environ.get("XDG_CACHE_HOME", "")
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    folder = Path(base) if Path(base).is_absolute() else home / ".cache"
    return folder / "ppo-cli" / "judge.sqlite"


def cache_path(api: ApiReward, environ: Mapping[str, str]) -> Path | None:
    """Return the file of the cache that the settings ask for, or None when it is off."""
    if api.cache is None:
        return default_cache_path(environ)
    return None if api.cache.strip().lower() == "off" else Path(api.cache).expanduser()


class VerdictCache:
    """Keeps verdicts and refusals under keys of `key_of`; safe with several processes at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._complained = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db: sqlite3.Connection | None = _connect_when_free(path)
        except (OSError, sqlite3.Error) as problem:
            raise self._unusable(problem) from None

    def get(self, key: str) -> Verdict | None:
        """Return a verdict at no cost, or None; a kept refusal is raised as JudgeError."""
        row = self._read(key)
        if row is None:
            return None
        try:
            kind, content = row[0], json.loads(row[1])
            if kind == "refusal":
                cause, message = str(content["cause"]), str(content["message"])
            else:
                return Verdict(
                    float(content["value"]), str(content["reason"]), str(content["text"]),
                    calls=0, cached=True, info=dict(content["info"]),
                )  # fmt: skip
        except (ValueError, KeyError, TypeError):
            # Written by something else: asking again mends it.
            return None
        raise JudgeError(Failure.REFUSED, cause, message)

    def put(self, key: str, verdict: Verdict) -> None:
        """Keep a verdict."""
        content = {
            "value": verdict.value,
            "reason": verdict.reason,
            "text": verdict.text,
            "info": dict(verdict.info),
        }
        self._write(key, "verdict", content)

    def put_refusal(self, key: str, cause: str, message: str) -> None:
        """Keep that the judge will not judge this."""
        self._write(key, "refusal", {"cause": cause, "message": redact(message)})

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        with self._lock:
            db, self._db = self._db, None
            if db is not None:
                with contextlib.suppress(sqlite3.Error):
                    db.close()

    def _read(self, key: str) -> tuple[str, str] | None:
        with self._lock:
            if self._db is None:
                return None
            try:
                query = self._db.execute("SELECT kind, content FROM verdicts WHERE key = ?", (key,))
                row: tuple[str, str] | None = query.fetchone()
            except sqlite3.Error as problem:
                self._complain("read", problem)
                return None
        return row

    def _write(self, key: str, kind: str, content: Mapping[str, Any]) -> None:
        # surrogates cannot be stored as UTF-8, so JSON's own escapes carry them.
        row = (key, kind, json.dumps(content, default=str), time.time())
        with self._lock:
            if self._db is None:
                return
            try:
                with self._db:
                    self._db.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?)", row)
            except sqlite3.Error as problem:
                self._complain("write", problem)

    def _complain(self, what: str, problem: Exception) -> None:
        if not self._complained:
            logger.warning(
                "cannot %s the verdict cache %s (%s); going on without", what, self.path, problem
            )
        self._complained = True

    def _unusable(self, problem: Exception) -> RewardError:
        why = getattr(problem, "strerror", None) or str(problem)
        return RewardError(
            f"Cannot use the verdict cache {self.path}: {why}. Name another file with --rm_cache, "
            "delete this one, or go without it: --rm_cache off."
        )


def _connect_when_free(path: Path) -> sqlite3.Connection:
    # Of several processes that make the file at once, SQLite sends some away without waiting.
    until = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            return _connect(path)
        except sqlite3.OperationalError as problem:
            if "locked" not in str(problem) or time.monotonic() > until:
                raise
        time.sleep(0.02)


def _connect(path: Path) -> sqlite3.Connection:
    # One lock of ours guards the connection, so it may move between threads.
    db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        with db:
            db.execute("BEGIN IMMEDIATE")
            _prepare(db)
        db.execute("SELECT count(*) FROM (SELECT 1 FROM verdicts LIMIT 1)").fetchone()
    except BaseException:
        db.close()
        raise
    return db


def _prepare(db: sqlite3.Connection) -> None:
    """Make the table; one of an older layout is replaced, one of a newer layout is left alone."""
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
