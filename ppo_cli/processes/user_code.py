"""A user's Python file in a child process: importing it, and its lines in messages.

Programs load this file by its path with any Python of 3.9 or newer: it imports the standard library
alone.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType


def import_file(file: str) -> ModuleType:
    """Import a file as a module; raises what it raises.

    As for a script, files in the same folder can be imported; classes can be pickled.
    """
    stem = os.path.splitext(os.path.basename(file))[0]
    # The module's name must not shadow one that is already imported.
    name = stem if stem.isidentifier() and stem not in sys.modules else f"user_{stem}"
    loader = SourceFileLoader(name, file)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(file))
    sys.modules[name] = module
    sys.dont_write_bytecode = True
    loader.exec_module(module)
    return module


def describe_error(error: BaseException, file: str = "") -> str:
    """Return `ValueError: text (file.py, line 12)` on one line; the line is in `file`."""
    try:
        text = " ".join(str(error).split())[:300]
    except Exception:
        text = ""
    line = error_line(error, file)
    if isinstance(error, SyntaxError) and error.filename == file:
        line, text = error.lineno, error.msg
    name = type(error).__name__
    location = f" ({os.path.basename(file)}, line {line})" if line else ""
    return (f"{name}: {text}" if text else name) + location


def error_line(error: BaseException, file: str) -> int | None:
    """Return the innermost line of `file` in the traceback of an error, None without one."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
