"""Errors of vLLM's worker processes, which vLLM logs there and names nowhere else.

A vLLM over several devices tells its caller to look at a stack trace that another process has
logged. With `log_errors` its workers also write each error to a file, which `read_error` reads.
vLLM imports this module in each worker before its own parts, so it imports none of them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppo_cli import errors

VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
FILE = "errors.jsonl"
WORKER_LOGGER = "vllm.v1.executor.multiproc_executor"  # in vLLM 0.32 and 0.33


class ErrorFile(logging.Handler):
    """Appends type and text of each logged exception to a file, a line each."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Write the exception of a record, if it has one."""
        if record.exc_info and (error := record.exc_info[1]) is not None:
            line = json.dumps([type(error).__name__, str(error)]) + "\n"
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(line)  # at once: several processes append


@contextmanager
def log_errors(folder: Path) -> Iterator[None]:
    """Let workers that vLLM starts write errors to stderr and to a file in this folder.

    A configuration of logging in the environment wins.
    """
    if VARIABLE in os.environ or "VLLM_CONFIGURE_LOGGING" in os.environ:
        yield
        return
    level = os.environ["VLLM_LOGGING_LEVEL"].upper()  # as vLLM reads it
    handlers = {
        "log": {
            "class": "logging.StreamHandler", "stream": "ext://sys.stderr",
            "level": "ERROR" if level == "CRITICAL" else level,
        },
        "file": {"()": f"{__name__}.{ErrorFile.__name__}", "path": str(folder / FILE)},
    }  # fmt: skip
    vllm = {"handlers": ["log"], "propagate": False, "level": handlers["log"]["level"]}
    config = {
        "version": 1, "disable_existing_loggers": False, "handlers": handlers,
        "loggers": {"vllm": vllm, WORKER_LOGGER: {"handlers": ["file"]}},
    }  # fmt: skip
    path = folder / "logging.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    os.environ[VARIABLE] = str(path)
    try:
        yield
    finally:
        del os.environ[VARIABLE]  # the folder goes with its engine


def read_error(folder: Path) -> Exception | None:
    """Return the first error that a worker has logged, ours as it was raised; None without one.

    Later ones are mostly of workers that wait for the first.
    """
    try:
        lines = (folder / FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    kind, text = json.loads(lines[0])
    ours = getattr(errors, kind, None)
    if isinstance(ours, type) and issubclass(ours, errors.UserError):
        return ours(text)
    return RuntimeError(f"{kind}: {text}" if text else kind)
