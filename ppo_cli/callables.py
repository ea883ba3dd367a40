"""Functions and rows that a call in Python gives to a run, as files that all its processes read.

A function is pickled by value into FILE.py:NAME. The file is named after a digest of what the
function does: its code and the values that it uses, but not the lines where it was written. So the
same call finds the same file in any process, and an edited function makes another run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import inspect
import io
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, MethodType
from typing import Any

import cloudpickle

from ppo_cli.data_sets.rows import as_plain
from ppo_cli.errors import ConfigError
from ppo_cli.secrets.known import secret_values
from ppo_cli.secrets.redact import redact

DIGEST_CHARS = 12
SHOWN_ROWS = 5  # bad values that a message lists
_CACHED = type(functools.lru_cache(len))


def write_rows(folder: Path, argument: str, rows: Any) -> str:
    """Write a list of dicts, a data frame or a Dataset as JSON lines; return the file.

    Values become what they are in a parquet file. ConfigError names each row and key that is not
    JSON.
    """
    if hasattr(rows, "iterrows"):  # a frame of pandas, where NaN stands for a missing value
        rows = rows.astype(object).where(rows.notna(), None).to_dict("records")
    listed = hasattr(rows, "__len__") and not isinstance(rows, str | bytes | Mapping)
    if not listed or not len(rows):
        kind = "empty" if listed else f"of type {type(rows).__name__}"
        raise ConfigError(f"{argument} is {kind}; give a list of dicts, a data frame or a Dataset.")
    problems = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            problems.append(f"{argument}: row {number} is of type {type(row).__name__}, not dict.")
            continue
        for key, value in row.items():
            try:
                json.dumps(as_plain(value, strict=True), allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                problems.append(f"{argument}: row {number}, key {key!r}: {value!r:.40}: {error}.")
    if problems:
        excess = f"{argument}: {len(problems) - SHOWN_ROWS} more values are not JSON."
        raise ConfigError(problems[:SHOWN_ROWS] + [excess] * (len(problems) > SHOWN_ROWS))
    text = "".join(f"{json.dumps(as_plain(row), ensure_ascii=False)}\n" for row in rows)
    # Samples are drawn by the name of the file: it stays the same when a row is edited.
    path = folder / hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS] / f"{argument}.jsonl"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    return str(path)


def write_function(folder: Path, argument: str, function: Callable[..., Any]) -> str:
    """Pickle a function by value into a Python file; return FILE.py:NAME.

    Raises ConfigError, which names the variable, if it holds what cannot be pickled.
    """
    if not callable(function):
        kind = type(function).__name__
        raise ConfigError(f"{argument} is an object of type {kind}: give a function or class.")
    core, shown = _find_core(function), f"{argument}={name_of(function)}"
    # For a lambda the argument, without the sections of a key.
    name = core.__name__ if core.__name__.isidentifier() else argument.rpartition(".")[2]
    # What it uses of a module that is not installed is pickled by value too.
    module = sys.modules.get(core.__module__ or "")
    file = getattr(module, "__file__", None) or ""
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    package = (core.__module__ or "").partition(".")[0]
    by_value = file and package not in ("__main__", "ppo_cli") and not file.startswith(installed)
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        data, digest = _pickle(_Pickler, function), _pickle(_DigestPickler, function)
    except Exception as error:
        reason = _find_reason(core, function) or error
        raise ConfigError(
            f"{shown} cannot be sent to another process: {reason}. Make or open it "
            "inside the function, or in a module that the function imports."
        ) from None
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    if any(secret.encode() in data for secret in secret_values()):
        raise ConfigError(
            f"{shown} holds the value of a secret variable, and would write it to the "
            "run folder; read it from os.environ inside the function."
        )
    try:
        source = redact(inspect.getsource(core))
    except (OSError, TypeError):
        source = "(not available)"
    version, paths = sys.version_info[:2], [os.path.abspath(path) for path in sys.path]
    path = folder / f"{name}_{hashlib.sha256(digest).hexdigest()[:DIGEST_CHARS]}.py"
    path.write_text(
        f"# {shown} as a file. Its source (what runs is the pickle below):\n"
        + "".join(f"# {line}".rstrip() + "\n" for line in source.splitlines())
        + "import base64, pickle, sys\n"
        f"if sys.version_info[:2] != {version}:\n"
        f"    raise ImportError('this function was pickled by Python {version}')\n"
        f"sys.path += [path for path in {paths} if path not in sys.path]\n"
        f"{name} = pickle.loads(base64.b85decode({base64.b85encode(data).decode()!r}))\n",
        encoding="utf-8",
    )
    return f"{path}:{name}"


def name_of(function: object) -> str:
    """Return what messages call a function or an object in its place."""
    return str(_find_core(function).__name__)


def _find_core(function: Any) -> Any:
    """Return the function or class below partials, bound methods, decorators and objects."""
    while isinstance(function, functools.partial | MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    function = inspect.unwrap(function)
    is_code = inspect.isroutine(function) or inspect.isclass(function)
    return function if is_code else type(function)


class _Pickler(cloudpickle.CloudPickler):
    """Refuses open files, of which cloudpickle sends the text, and pickles lru_cache by value."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, io.IOBase) and not isinstance(value, io.StringIO | io.BytesIO):
            raise TypeError(f"it holds an open file {getattr(value, 'name', '')!r}")
        if isinstance(value, _CACHED):
            return _cached, (value.__wrapped__, value.cache_parameters())
        return super().reducer_override(value)


class _DigestPickler(_Pickler):
    """Writes the same in each process: no lines of code, order of sets, or ids of classes."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, CodeType):
            return value.co_code, value.co_consts, value.co_names, value.co_varnames
        if isinstance(value, set | frozenset):
            return sorted(map(repr, value))
        return "id" if isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) else None


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _pickle(pickler: type[_Pickler], value: object) -> bytes:
    file = io.BytesIO()
    pickler(file).dump(value)
    return file.getvalue()


def _find_reason(core: Any, function: object) -> str:
    """Return which variable of a function, or attribute of an object, cannot be pickled."""
    variables = dict(getattr(function, "__dict__", {}))
    if inspect.isfunction(core):
        used = inspect.getclosurevars(core)
        variables |= {**used.globals, **used.nonlocals}
    for name, value in variables.items():
        try:
            _pickle(_Pickler, value)
        except Exception as error:
            kind = f"it holds a {type(value).__module__}.{type(value).__qualname__}"
            return f"{error if 'open file' in str(error) else kind} (variable {name})"
    return ""
