"""Paths that a user writes, in flags, settings and arguments of commands, and the files there."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppo_cli.errors import UserError, shorten

# What Linux and macOS take; a longer text is rarely meant as a path.
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4095


def user_path(text: str | os.PathLike[str]) -> Path:
    """Return a path with `~` replaced; UserError for a text that no file can have as its name.

    The home of an unknown user stays as it is: no such file exists, which the caller says.
    """
    path = str(text)
    problem = path_problem(path)
    if not problem:  # it may be the name of a user
        path = os.path.expanduser(path)
        problem = path_problem(path)
    if problem:
        raise UserError(f"{shorten(path, 60)!a} is not a path: {problem}.")
    return Path(path)


def path_problem(path: str) -> str:
    """Return why no file can have this path; "" if one can."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "it has half of a surrogate pair, which is not a character"
    if b"\0" in encoded:
        return "it has a NUL byte"
    longest = max(map(len, encoded.split(b"/")))
    if longest > MAX_NAME_BYTES:
        return f"a file name has at most {MAX_NAME_BYTES} bytes, and this one {longest:,}"
    if len(encoded) > MAX_PATH_BYTES:
        return f"a path has at most {MAX_PATH_BYTES:,} bytes, and this one {len(encoded):,}"
    try:
        os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "its symbolic links lead in a circle"
    return ""


def nearest_existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def can_write(folder: Path) -> bool:
    """Whether this user may write into a folder, which need not exist yet."""
    place = nearest_existing(folder)
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)


def find_special_file(folder: Path) -> Path | None:
    """Return a pipe, a socket or a device in a folder, which nobody can copy; None without one."""
    for directory, _, names in os.walk(folder):
        for name in names:
            path = Path(directory, name)
            if path.exists() and not path.is_file():
                return path
    return None


def read_text(path: Path) -> str:
    """Return the text of a file, with bytes that are not UTF-8 replaced.

    OSError where there is none; so for a pipe or a device, which might never end.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is a folder, a pipe or a device", str(path))
    return path.read_text(encoding="utf-8-sig", errors="replace")


def load_json(text: str | bytes) -> Any:
    """Return a JSON value; ValueError for other texts, and for one that is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects in the lines of a file; skips a line that a kill has cut off."""
    lines = []
    for row in read_text(path).split("\n"):
        with suppress(ValueError):
            line = load_json(row)
            if isinstance(line, dict):
                lines.append(line)
    return lines
