"""Functions and rows that a call in Python gives to a run, as files that all its processes read.

A function is pickled by value into FILE.py:NAME, which settings take. Its file is named after a
digest of what the function does: its code, and the values of the variables that it uses, but not
the lines or the notebook cell where it was written. The same call finds the same file again, in
any process; an edited function has another file, and makes another run.
"""

from __future__ import annotations

import base64
import dis
import functools
import inspect
import io
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ppo_cli.digests import digest_text
from ppo_cli.errors import ConfigError
from ppo_cli.redact import redact

DIGEST_CHARS = 12
MAX_PICKLE_BYTES = 64 << 20  # base85 and the parser need several times as much memory
SHOWN_ROWS = 5  # bad rows that a message lists
# What a class has of its own accord.
CLASS_ATTRIBUTES = (
    "__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "__static_attributes__",
    "_abc_impl",
)  # fmt: skip


@dataclass(frozen=True)
class InputFile:
    """A file for the run folder; `function` is the name of its function, and empty for rows."""

    name: str
    text: str
    function: str = ""

    def spec(self, folder: Path) -> str:
        """Return the file, or FILE.py:NAME, in a folder."""
        return f"{folder / self.name}{self.function and ':'}{self.function}"


def make_rows_file(argument: str, rows: object) -> InputFile:
    """Return rows as JSON lines; ConfigError names each row and key that is not JSON."""
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes) or not rows:
        raise ConfigError(
            f"{argument} is {'empty' if rows == [] else f'of type {type(rows).__name__}'}; give a "
            "list of dicts (of a pandas frame: frame.to_dict('records'))."
        )
    problems = [problem for i, row in enumerate(rows, 1) for problem in _check_row(row, i)]
    if problems:
        more = len(problems) - SHOWN_ROWS
        lines = [f"{argument}: {problem}" for problem in problems[:SHOWN_ROWS]]
        raise ConfigError(lines + [f"{argument}: {more} more values are not JSON."] * (more > 0))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    # Samples are drawn by the name of the file: it stays the same when a row is edited.
    return InputFile(f"{digest_text(text, DIGEST_CHARS)}/{argument}.jsonl", text)


def _check_row(row: object, number: int) -> Iterator[str]:
    """Yield what is not JSON in a row."""
    if not isinstance(row, Mapping):
        yield f"row {number} is of type {type(row).__name__}, not a dict."
        return
    for key, value in row.items():
        try:
            json.dumps({key: value}, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            yield f"row {number}, key {key!r}: {error}."


def make_function_file(
    argument: str, function: Callable[..., Any], inputs: Sequence[str] | None = None
) -> InputFile:
    """Return a Python file with a function that is pickled by value.

    With `inputs` the file has a def with these parameters, which passes them on by name. Raises
    ConfigError, with the variable in question, for a function that cannot be pickled.
    """
    core = _core(function)
    name = getattr(core, "__name__", "")
    name = name if name.isidentifier() else argument
    label = f"{argument}={name}"
    module = sys.modules.get(getattr(core, "__module__", None) or "")
    walk = _Walk(module.__name__ if module and _is_users(module) else "__main__")
    digest = digest_text(json.dumps([walk.describe(function, ""), inputs]), DIGEST_CHARS)
    data = _pickle(label, function, walk)
    try:
        source = redact(inspect.getsource(core))
    except (OSError, TypeError):
        source = "(not available)"
    version, loaded = sys.version_info[:2], name if inputs is None else "_function"
    lines = [
        f"# {label} as a file. Its source (what runs is the pickle below):",
        *(f"# {line}".rstrip() for line in source.splitlines()),
        "import base64, pickle, sys",
        f"if sys.version_info[:2] != {version}:",
        f"    raise ImportError('{label} was pickled by Python {version[0]}.{version[1]}')",
        f"sys.path += [path for path in {_user_paths()} if path not in sys.path]",
        f"{loaded} = pickle.loads(base64.b85decode({base64.b85encode(data).decode()!r}))",
    ]
    if inputs is not None:
        passed = ", ".join(f"{name}={name}" for name in inputs)
        lines += [f"def {name}({', '.join(inputs)}):", f"    return _function({passed})"]
    return InputFile(f"{name}_{digest}.py", "\n".join(lines) + "\n", name)


def _core(function: Any) -> Any:
    """Return the function or class below partials, bound methods, decorators and objects."""
    while isinstance(function, functools.partial | MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    function = inspect.unwrap(function)
    return function if inspect.isroutine(function) or inspect.isclass(function) else type(function)


def _pickle(label: str, function: object, walk: _Walk) -> bytes:
    """Pickle a function by value, with what it uses of its own module; raises ConfigError."""
    # Imported here: `import ppo_cli` and `plan` of plain settings do without it.
    import cloudpickle

    class Pickler(cloudpickle.CloudPickler):
        """Pickles what functools.lru_cache made by value too, with an empty cache."""

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, _CACHED):
                return _cached, (value.__wrapped__, value.cache_parameters())
            return super().reducer_override(value)

    def dump(value: object) -> bytes:
        file = io.BytesIO()
        Pickler(file).dump(value)
        return file.getvalue()

    def is_picklable(value: object) -> bool:
        try:
            return bool(dump(value))
        except Exception:
            return False

    module = sys.modules[walk.module]
    if walk.module != "__main__":  # which cloudpickle takes by value anyway
        cloudpickle.register_pickle_by_value(module)
    try:
        # cloudpickle would send what is in a file now.
        held = next((leaf for leaf in walk.leaves if isinstance(leaf[1], io.IOBase)), None)
        data = b"" if held else dump(function)
    except Exception as error:
        held = next((leaf for leaf in walk.leaves if not is_picklable(leaf[1])), ("", error))
    finally:
        if walk.module != "__main__":
            cloudpickle.unregister_pickle_by_value(module)
    if held:
        path, value = held
        kind = f"a {type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, io.IOBase):
            kind = f"an open file {getattr(value, 'name', '')!r}"
        reason = f"it holds {kind} (variable {path})" if path else str(value)
        raise ConfigError(
            f"{label} cannot be sent to another process: {reason}. Make or open it inside the "
            "function, or in a module that the function imports."
        )
    if len(data) > MAX_PICKLE_BYTES:
        raise ConfigError(
            f"{label} brings {len(data) >> 20} MiB of values, more than {MAX_PICKLE_BYTES >> 20}. "
            "Load them inside the function, once, from a file."
        )
    return data


_CACHED = type(functools.lru_cache(len))


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _is_users(module: ModuleType) -> bool:
    """Whether a module is neither installed nor part of this package."""
    file = getattr(module, "__file__", None) or ""
    inside = any(file.startswith(path) for path in sysconfig.get_paths().values())
    return bool(file) and not inside and module.__name__.partition(".")[0] != "ppo_cli"


def _user_paths() -> list[str]:
    """Return where this process finds modules that are not installed."""
    installed = set(sysconfig.get_paths().values())
    paths = (str(Path(path).absolute()) for path in sys.path)
    return [path for path in paths if not any(path.startswith(place) for place in installed)]


class _Walk:
    """Describes functions and values for a digest, and collects what cannot be described.

    `module` is the user's module whose functions and classes are described by what they do, as
    those of `__main__` are. `leaves` has these values with the variables that hold them.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self.leaves: list[tuple[str, object]] = []
        self._seen: dict[int, tuple[int, object]] = {}  # keeps the values, so that ids stay theirs

    def describe(self, value: Any, path: str) -> Any:
        """Return a JSON value that is the same in each process; `path` names the variable."""
        if value is None or isinstance(value, str | bytes | int | float | complex):
            return repr(value)
        if id(value) in self._seen:
            return f"again {self._seen[id(value)][0]}"
        self._seen[id(value)] = len(self._seen), value

        def describe_all(values: Any) -> list[Any]:
            return [self.describe(item, path) for item in values]

        def describe_named(values: Mapping[str, Any]) -> list[Any]:
            below = {name: f"{path}.{name}" if path else name for name in values}
            return [[name, self.describe(item, below[name])] for name, item in values.items()]

        # Code without file and lines.
        if isinstance(value, CodeType):
            names = [value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars]
            counts = value.co_argcount, value.co_kwonlyargcount, value.co_flags
            return [value.co_code.hex(), *names, counts, describe_all(value.co_consts)]
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, FunctionType | type) and value.__module__ not in (
            "__main__", self.module,
        ):  # fmt: skip
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, FunctionType):
            used = [name for name in _global_names(value.__code__) if name in value.__globals__]
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            return [
                self.describe(value.__code__, path),
                describe_all([value.__defaults__, value.__kwdefaults__]),
                describe_named({name: value.__globals__[name] for name in sorted(used)}),
                # A cell is empty until its variable has a value.
                describe_named({n: c.cell_contents for n, c in cells if c != CellType()}),
            ]
        if isinstance(value, type):
            own = {k: v for k, v in vars(value).items() if k not in CLASS_ATTRIBUTES}
            return [value.__qualname__, describe_all(value.__bases__), describe_named(own)]
        if isinstance(value, property):
            return describe_all([value.fget, value.fset, value.fdel])
        if isinstance(value, classmethod | staticmethod | MethodType):
            return describe_all([value.__func__, getattr(value, "__self__", None)])
        if isinstance(value, _CACHED):
            return describe_all([value.__wrapped__, value.cache_parameters()])
        if isinstance(value, dict):
            return [describe_all(value.keys()), describe_all(value.values())]
        if isinstance(value, list | tuple):
            return describe_all(value)
        if isinstance(value, set | frozenset):
            return sorted(json.dumps(item) for item in describe_all(value))
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:
            self.leaves.append((path, value))
            return type(value).__qualname__
        if isinstance(reduced, str):
            return f"{value.__module__}.{reduced}"
        make, arguments, state, *items = (*reduced, None, None, None)[:5]
        return [
            describe_all([make, arguments, *(list(item or ()) for item in items)]),
            describe_named(state) if isinstance(state, dict) else self.describe(state, path),
        ]


def _global_names(code: CodeType) -> set[str]:
    """Return the global names that code uses, that of functions inside it too."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname.endswith("_GLOBAL")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _global_names(constant)
    return names
