"""The channel between tester and candidate, and its two ends.

Messages are framed plain data. An object of the response that is not plain data stays in the
candidate and travels as a number. The tests hold a `Remote` in its place; comparing one raises.

The candidate process runs the response's code. It answers calls and does not know the tests.
The tester trusts nothing that comes from there: the response's code may control that whole process.
Both ends run inside sandboxes, so this module imports nothing that slows down a process start
(docs/design/006-code-rewards.md).
"""

from __future__ import annotations

import builtins
import os
import sys
from struct import Struct

from ppo_cli.rewards.code.limits import apply_limits, renew_cpu_limit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType
    from typing import Any

# Limits of a message from the candidate. The tester may send more (MAX_TRUSTED_BYTES).
MAX_BYTES = 8 << 20
MAX_DEPTH = 100

# Every value starts with a tag and a size; then follow that many bytes, or that many values.
_HEAD = Struct("<BI")
_FLOAT = Struct("<d")
_COMPLEX = Struct("<dd")
_OBJECT, _DICT = b"h"[0], b"d"[0]
# Type, value to bytes, bytes to value. The first type that fits decides. A subclass is written as
# its base, with the methods of the base: an override in the response cannot change the bytes.
_SCALARS: dict[int, tuple[Any, Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    b"f"[0]: (float, _FLOAT.pack, lambda data: _FLOAT.unpack(data)[0]),
    b"s"[0]: (
        str,
        lambda value: str.encode(value, "utf-8", "surrogatepass"),
        lambda data: data.decode("utf-8", "surrogatepass"),
    ),
    b"B"[0]: (bool, lambda value: b"1" if value else b"", bool),
    b"i"[0]: (
        int,
        lambda value: int.to_bytes(value, int.bit_length(value) // 8 + 1, "little", signed=True),
        lambda data: int.from_bytes(data, "little", signed=True),
    ),
    b"N"[0]: (type(None), lambda value: b"", lambda data: None),
    b"E"[0]: (type(...), lambda value: b"", lambda data: ...),
    b"b"[0]: (bytes, bytes, bytes),
    b"a"[0]: (bytearray, bytes, bytearray),
    b"c"[0]: (
        complex,
        lambda value: _COMPLEX.pack(value.real, value.imag),
        lambda data: complex(*_COMPLEX.unpack(data)),
    ),
}
_SEQUENCES: dict[int, Any] = {b"l"[0]: list, b"t"[0]: tuple, b"S"[0]: set, b"Z"[0]: frozenset}
# Standard types by module and name, imported only when one arrives. A class of the response with
# the same name has another module, so it travels as an object.
_NAMED: dict[int, tuple[str, str, Callable[[Any], list[Any]]]] = {
    b"r"[0]: ("builtins", "range", lambda value: [value.start, value.stop, value.step]),
    b"q"[0]: ("fractions", "Fraction", lambda value: [value.numerator, value.denominator]),
    b"D"[0]: ("decimal", "Decimal", lambda value: [str(value)]),
    b"k"[0]: ("collections", "deque", lambda value: [list(value)]),
}


class NotTransferable(Exception):
    """A value that cannot be sent: too large, or nested too deeply."""


class Malformed(Exception):
    """Bytes that do not encode a value."""


def encode(value: Any, number_of: Callable[[Any], int], max_bytes: int = MAX_BYTES) -> bytes:
    """Return a value as bytes; `number_of` gives the number of an object that is not plain data."""
    out = bytearray()

    def write(value: Any, depth: int) -> None:
        """Append a value to `out`; NotTransferable if it is nested too deep."""
        if depth > MAX_DEPTH:
            raise NotTransferable(f"the value is nested more than {MAX_DEPTH} deep")
        for tag, (kind, to_bytes, _) in _SCALARS.items():
            if isinstance(value, kind):
                data = to_bytes(value)
                head(tag, len(data))
                out.extend(data)
                return
        tag, items = _split_value(value)
        # A number of numpy is sent as Python's.
        is_numpy = tag == _OBJECT and type(value).__module__ == "numpy"
        if is_numpy and getattr(value, "shape", None) == ():
            write(value.item(), depth + 1)
            return
        head(tag, number_of(value) if items is None else len(items))
        for item in items or ():
            write(item, depth + 1)

    def head(tag: int, size: int) -> None:
        if len(out) + (size if tag != _OBJECT else 0) > max_bytes:
            raise NotTransferable(f"the value takes more than {max_bytes >> 20} MB")
        out.extend(_HEAD.pack(tag, size))

    write(value, 0)
    return bytes(out)


def _split_value(value: Any) -> tuple[int, list[Any] | None]:
    """Return the tag of a value and its items; None for an object that is not plain data."""
    for tag, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return tag, list(kind.__iter__(value))
    if isinstance(value, dict):
        return _DICT, [item for pair in dict.items(value) for item in pair]
    for tag, (module, name, items_of) in _NAMED.items():
        if type(value).__name__ == name and type(value).__module__ == module:
            return tag, items_of(value)
    return _OBJECT, None


def decode(data: bytes, object_of: Callable[[int], Any]) -> Any:
    """Return the value that bytes encode; `object_of` maps a number to its object."""
    place = 0

    def take(size: int) -> bytes:
        nonlocal place
        if size > len(data) - place:
            raise Malformed("the value ends too early")
        place += size
        return data[place - size : place]

    def read(depth: int) -> Any:
        """Return the next value in the data; Malformed if it is nested too deep or incomplete."""
        if depth > MAX_DEPTH:
            raise Malformed("nested too deep")
        tag, size = _HEAD.unpack(take(_HEAD.size))
        if tag == _OBJECT:
            return object_of(size)
        if tag in _SCALARS:
            return _SCALARS[tag][2](take(size))
        if size > len(data) - place:
            raise Malformed("more items than bytes")
        items = [read(depth + 1) for _ in range(size)]
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](items)
        if tag == _DICT:
            return dict(zip(items[::2], items[1::2], strict=True))
        module, name, _ = _NAMED[tag]  # KeyError for an unknown tag
        return getattr(__import__(module), name)(*items)

    try:
        value = read(0)
    except Malformed:
        raise
    except Exception as error:
        raise Malformed(f"{type(error).__name__}: {error}"[:200]) from None
    if place != len(data):
        raise Malformed("bytes after the value")
    return value


def refuse_object(value: Any) -> int:
    """As `number_of` of `encode`: refuse objects, where only plain data may be sent."""
    raise NotTransferable(f"an object of type {type(value).__name__} cannot be sent")


def refuse_number(number: int) -> Any:
    """As `object_of` of `decode`: refuse objects, where only plain data may arrive."""
    raise Malformed("an object where plain data is expected")


# Limit of messages from our own side: a job holds all tests of a row, which may be large.
MAX_TRUSTED_BYTES = 256 << 20
_LENGTH = Struct("<Q")
_PIECE = 1 << 16


class ChannelClosed(BaseException):
    """The other end has closed, or sent something that is not a message.

    Not a subclass of `Exception`: a test that catches every exception must not pass because of it.
    """


class Link:
    """One end of a socket: sends and receives whole messages, each with its length in front."""

    def __init__(self, fd: int, max_bytes: int) -> None:
        self._fd = fd
        self._max_bytes = max_bytes

    def send(self, data: bytes) -> None:
        """Send one message; ChannelClosed when the other end is closed."""
        view = memoryview(_LENGTH.pack(len(data)) + data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise ChannelClosed(f"the other end is gone ({error.strerror})") from None

    def receive(self) -> bytes:
        """Wait for one message; ChannelClosed when the other end closes or sends too much."""
        size = int(_LENGTH.unpack(self._read(_LENGTH.size))[0])
        if size > self._max_bytes:
            raise ChannelClosed(f"an answer of more than {self._max_bytes >> 20} MB")
        return self._read(size)

    def _read(self, size: int) -> bytes:
        """Return exactly `size` bytes; ChannelClosed if the other end closes before."""
        data = bytearray()
        while len(data) < size:
            try:
                piece = os.read(self._fd, min(size - len(data), _PIECE))
            except OSError as error:
                raise ChannelClosed(f"the other end is gone ({error.strerror})") from None
            if not piece:
                raise ChannelClosed("the other end is gone")
            data += piece
        return bytes(data)


def move_descriptor(fd: int, replacement: int | None = None) -> int:
    """Return a duplicate of a standard stream, and replace the stream itself.

    Afterwards its number refers to `replacement`, or to /dev/null when that is None. So the code
    of a response cannot reach the channel through descriptors 0 to 2.
    """
    duplicate = os.dup(fd)
    spare = os.open("/dev/null", os.O_RDWR) if replacement is None else replacement
    os.dup2(spare, fd)
    if replacement is None:
        os.close(spare)
    return duplicate


MAX_REQUEST_BYTES = 64 * MAX_BYTES
# Not raised in the tester: inside a generator or a loop they would end it without an error.
_LOOP_ENDING = ("StopIteration", "StopAsyncIteration")


class ResponseError(Exception):
    """The response raised an exception that is not one of Python's built-in ones."""


class BadRow(BaseException):
    """The tests of the row cannot be run at all; the response is not at fault."""


class Peer:
    """The tester's client of the candidate process.

    `raised` is the last error of the response; its note is the line of the code that raised it.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.request_count = 0
        self.raised: Exception | None = None

    def ask(self, *request: Any) -> Any:
        """Send a request and return its answer; raises what the response's code raised."""
        self.request_count += 1
        self._link.send(encode(request, _number, MAX_REQUEST_BYTES))
        try:
            answer = decode(self._link.receive(), lambda number: Remote(self, number))
        except (Malformed, MemoryError) as error:
            raise ChannelClosed(f"an answer that cannot be read ({error})") from None
        # The answer is untrusted: its shape and the exact types are checked before use.
        match answer:
            case ("ok", value):
                return value
            case ("raised", list(names), str(text), str(line)) if all(
                type(name) is str for name in names
            ):
                self.raised = _error(names, text)
                self.raised.add_note(line)
                raise self.raised
        raise ChannelClosed("an answer that cannot be read")


def _number(value: Any) -> int:
    if type(value) is Remote:
        return int(object.__getattribute__(value, "_number"))
    kind = type(value).__name__
    raise BadRow(f"the tests pass an object of type {kind}, which cannot be sent to the response")


def _error(names: list[str], text: str) -> Exception:
    """Build the most specific built-in exception among these type names, the nearest first."""
    for name in names:
        kind: Any = getattr(builtins, name, None)
        is_exception = isinstance(kind, type) and issubclass(kind, Exception)
        if is_exception and name not in _LOOP_ENDING:
            if kind is Exception and names[0] != "Exception":
                break
            try:
                error = kind(text)
            except TypeError:
                break
            assert isinstance(error, Exception)
            return error
    return ResponseError(f"{names[0] if names else 'error'}: {text}")


def _name_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    """Return the arguments of a call by index or keyword."""
    return dict([*enumerate(args), *kwargs.items()])


def _apply_changes(args: dict[int | str, Any], answer: Any) -> Any:
    """Return the value in the answer to a call, a pair of value and changed arguments.

    Arguments are named by index or keyword.

    If the value is None (as of an in-place sort), the contents of `args` are updated in place. Else
    they stay: a response must not change what its value is compared with.
    """
    if type(answer) is not tuple or len(answer) != 2 or type(answer[1]) is not dict:
        raise ChannelClosed("an answer that cannot be read")
    value, changed = answer
    for name, new in changed.items() if value is None else ():
        if type(name) in (int, str) and name in args and type(args[name]) is type(new):
            _replace_contents(args[name], new)
    return value


def _replace_contents(old: Any, new: Any) -> None:
    if type(old) is list:
        old[:] = new
    elif type(old) in (dict, set):
        old.clear()
        old.update(new)


class Remote:
    """A proxy of an object of the response: can be called and passed back, but not compared."""

    __slots__ = ("_number", "_peer")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object in the candidate process."""
        answer = self._peer.ask("call", self, args, kwargs)
        return _apply_changes(_name_arguments(args, kwargs), answer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("item", self, key)

    def __len__(self) -> int:
        size = self._peer.ask("size", self)
        if type(size) is not int:
            raise TypeError("the length is not an int")
        return size

    def __iter__(self) -> Iterator[Any]:
        steps = self._peer.ask("iterate", self)
        while True:
            step = self._peer.ask("next", steps)
            if type(step) is not tuple or not step:
                return
            yield step[0]

    def __eq__(self, other: object) -> bool:
        raise TypeError("the response returned an object of a class it wrote, which equals nothing")

    __ne__ = __eq__

    def __bool__(self) -> bool:
        raise TypeError("the response returned an object of a class it wrote, not a bool")


# Objects are never released: the tests may hold any of them until the end of the job.
MAX_OBJECTS = 200_000
MAX_TEXT_CHARS = 300
RESPONSE = "<response>"  # the file name of its code
# Requests other than calls, by name: what they do to an object of the response.
OPERATIONS: dict[str, Any] = {
    "get": getattr,
    "set": setattr,
    "item": lambda target, key: target[key],
    "size": len,
}


class Candidate:
    """The response's module, and the objects of it that the tests hold by number."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.text = ""  # the code that runs
        self.source: Any = None
        self.preamble: dict[str, Any] = {}

    def number_of(self, value: Any) -> int:
        """Store an object that is not plain data, and return its number."""
        if len(self.objects) >= MAX_OBJECTS:
            raise MemoryError("too many objects are sent to the tests")
        self.objects.append(value)
        return len(self.objects) - 1

    def answer(self, request: bytes) -> bytes:
        """Execute a request and return the reply; an exception of the code becomes a reply too."""
        try:
            what, *rest = decode(request, self.objects.__getitem__)
            act = OPERATIONS.get(what) or getattr(self, f"do_{what}")
            return encode(("ok", act(*rest)), self.number_of)
        except BaseException as error:
            what = (*describe_exception(error), find_line(error, self.text))
            return encode(("raised", *what), self.number_of)

    def compile(self, attempts: list[str]) -> Any:
        """Compile the first text that is valid Python; raises the error of the last one."""
        for self.text in attempts[:-1]:
            try:
                return compile(self.text, RESPONSE, "exec", dont_inherit=True)
            except Exception:
                continue
        self.text = attempts[-1]
        return compile(self.text, RESPONSE, "exec", dont_inherit=True)

    def do_load(
        self, attempts: list[str], preamble: dict[str, Any], names: list[str], entry: str
    ) -> dict[str, Any]:
        """Run the code and return those of the names that it defines."""
        code = self.compile(attempts)
        module = new_module("solution", preamble)
        # The prompt's stub of the function does not count as an answer.
        module.__dict__.pop(entry, None)
        exec(code, module.__dict__)
        return {name: module.__dict__[name] for name in names if name in module.__dict__}

    def do_prepare(self, attempts: list[str], preamble: dict[str, Any]) -> None:
        """Compile a program that reads its input and prints."""
        self.source, self.preamble = self.compile(attempts), preamble

    def do_run(self, text: str) -> bytes:
        """Run the program from the start on an input; return what it printed."""
        renew_cpu_limit()
        return run_program(self.source, text, self.preamble)

    def do_call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[int | str, Any]]:
        """Call a function or class; returns the value, and for None the changed arguments."""
        renew_cpu_limit()
        named = _name_arguments(args, kwargs)
        before = {name: snapshot(argument) for name, argument in named.items()}
        value = target(*args, **kwargs)
        if value is not None:
            return value, {}
        return None, {
            n: argument for n, argument in named.items() if before[n] != snapshot(argument)
        }

    def do_iterate(self, target: Any) -> Any:
        """Start iterating over an object."""
        return _Steps(iter(target))

    def do_next(self, steps: Any) -> tuple[Any, ...]:
        """Return the next item in a tuple, or an empty one at the end."""
        for item in steps.iterator:
            return (item,)
        return ()


class _Steps:
    """Wraps an iterator, so that it is never encoded as plain data."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator


def snapshot(value: Any) -> bytes | None:
    """Return the encoded contents of a container, to detect changes; None for other values."""
    if type(value) not in (list, dict, set):
        return None
    try:
        return encode(value, lambda other: 0)
    except Exception:
        return None


# The scorers of LiveCodeBench and APPS put these imports in front of every response.
_COMMON_MODULES = (
    "typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math",
    "random", "statistics", "itertools", "functools", "operator", "io", "sys", "json",
)  # fmt: skip
_COMMON_IMPORTS = "\n".join(
    [
        *(f"from {module} import *" for module in _COMMON_MODULES),
        f"import {', '.join(_COMMON_MODULES)}, time, fractions",
    ]
)
_RECURSION_LIMIT = 50_000  # as in those scorers


def new_module(name: str, preamble: dict[str, Any]) -> ModuleType:
    """Create the module that the code runs in; dataclasses and pickle find it in sys.modules.

    Imports of the preamble go into the module's `__builtins__`, not into its namespace. So an
    imported function is not mistaken for one that the code defines, and the code's line numbers
    do not change.
    """
    module = type(sys)(name)
    sys.modules[name] = module
    usual: dict[str, Any] = {}
    if preamble["usual"]:
        exec(_COMMON_IMPORTS, usual)
        sys.setrecursionlimit(_RECURSION_LIMIT)
    if preamble["seeded"]:
        __import__("random").seed(0)
    # The imports of the row win over the common ones.
    imported: dict[str, Any] = {}
    for text in preamble["imports"]:
        exec_row_text(text, imported)
    ends = {"exit": sys.exit, "quit": sys.exit}  # from `site`, which is not imported
    module.__dict__["__builtins__"] = {**usual, **ends, **vars(builtins), **imported}
    for text in preamble["texts"]:
        exec_row_text(text, module.__dict__)
    return module


class NumpyFinder:
    """Finds numpy, the only package that code and tests may import, in the folder of packages.

    That folder cannot be listed in a sandbox, so it is not on the path.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return where numpy is; None for other modules."""
        if name != "numpy" or not self.folder:
            return None
        from importlib.util import spec_from_file_location

        package = f"{self.folder}/numpy"
        return spec_from_file_location(
            name, f"{package}/__init__.py", submodule_search_locations=[package]
        )


def exec_row_text(text: str, space: dict[str, Any]) -> None:
    """Execute a text of the row; a text that raises or is not Python is skipped."""
    try:
        exec(compile(text, "<prompt>", "exec", dont_inherit=True), space)
    except Exception:
        return


def run_program(code: Any, text: str, preamble: dict[str, Any]) -> bytes:
    """Run a program with `text` on its standard input, and return what it printed.

    Input and output are files, not pipes, so that seeking and reading by descriptor work too. The
    program ends as the interpreter ends one: threads, `atexit`, buffers, then its objects.
    """
    atexit, gc = __import__("atexit"), __import__("gc")
    original_exit = os._exit
    with open("input", "wb+") as file, open("output", "wb+") as printed:
        file.write(text.encode("utf-8", "surrogatepass"))
        file.seek(0)
        # Replace descriptors 0 and 1 and Python's streams on top of them.
        duplicates = [move_descriptor(0, file.fileno()), move_descriptor(1, printed.fileno())]
        stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = stdout
        vars(sys).update(__stdin__=sys.stdin, __stdout__=stdout)
        atexit._clear()
        # Exit code and output of a program that calls os._exit.
        early_exit: list[tuple[int, bytes]] = []

        def leave(code: int = 0) -> None:
            if not early_exit:
                early_exit.append(
                    (code, os.pread(printed.fileno(), os.fstat(printed.fileno()).st_size, 0))
                )
            raise SystemExit(code)

        os._exit = leave  # type: ignore[assignment]
        module = new_module("__main__", preamble)
        try:
            exec(code, module.__dict__)
        except SystemExit as end:
            if end.code not in (None, 0) and not early_exit:
                raise
        finally:
            os._exit = original_exit
            if not early_exit:
                join_threads()
                atexit._run_exitfuncs()
                if not getattr(sys.stdout, "closed", False):
                    sys.stdout.flush()
            atexit._clear()
            # A file on descriptor 1 that nobody closed is written when it is freed.
            sys.stdout = stdout
            sys.modules.pop("__main__", None)
            del module
            gc.collect()
            if not stdout.closed:
                stdout.flush()
            for fd, stream in enumerate(duplicates):
                os.dup2(stream, fd)
                os.close(stream)
        if early_exit:
            if early_exit[0][0]:
                raise SystemExit(early_exit[0][0])
            return early_exit[0][1]
        printed.seek(0)
        return printed.read()


def join_threads() -> None:
    """Wait for threads, as the interpreter does at the end of a program."""
    threading = sys.modules.get("threading")
    if threading is not None:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()


def describe_exception(error: BaseException) -> tuple[list[str], str]:
    """Return the names of an exception's types, the nearest first, and its text."""
    names = [kind.__name__ for kind in type(error).__mro__]
    try:
        text = str(error)[:MAX_TEXT_CHARS]
    except BaseException:
        text = ""
    return names, text


def find_line(error: BaseException, text: str) -> str:
    """Return the innermost line of a response's code that raised, or that is no Python; or ""."""
    try:
        number = error.lineno if isinstance(error, SyntaxError) else None
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == RESPONSE:
                number = trace.tb_lineno
            trace = trace.tb_next
        return text.split("\n")[number - 1].strip()[:MAX_TEXT_CHARS] if number else ""
    except BaseException:
        return ""


def main(arguments: list[str]) -> None:
    """Serve until the tester hangs up."""
    # Take the channel out of reach first, then limit this process, then report that it is ready.
    link = Link(move_descriptor(0), MAX_TRUSTED_BYTES)
    *limits, packages = arguments
    apply_limits(*map(int, limits))
    sys.meta_path.append(NumpyFinder(packages))
    sys.argv = [""]
    link.send(b"ready")
    candidate = Candidate()
    while True:
        link.send(candidate.answer(link.receive()))
