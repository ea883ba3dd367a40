"""A user's split of responses, `--rm_place FILE.py:FUNCTION`: loaded, called and checked.

The function gets a text that the judge reads and returns its pieces: a list of texts that, joined,
are the text. It is called in the process that asks the judge, twice for each text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ppo_cli.errors import Interrupted, RewardError, did_you_mean
from ppo_cli.processes.user_code import describe_error, import_file
from ppo_cli.rewards.function import find_file
from ppo_cli.waits import NoAnswer, await_result, run_in_thread

FLAG = "--rm_place"
SPLIT_S = 20.0  # for the two calls with a text
# A text of usual parts, with which the function is tried when it is loaded.
TRIAL_TEXT = "One sentence. Then 3.14, and »more«?\n\n2. A second line 😀\n\tend"


@lru_cache(maxsize=8)
def load_split(spec: str) -> Callable[[str], list[str]]:
    """Return the function of FILE.py:NAME, which returns the checked pieces of a text.

    Both raise RewardError with one sentence that names the file and the line.
    """
    path, name = find_file(spec, FLAG)
    try:
        module = import_file(str(path))
    except (Exception, SystemExit) as error:
        problem = describe_error(error, str(path))
        raise RewardError(f"{FLAG} {spec} does not load: {problem}.") from None
    function = getattr(module, name, None)
    if not callable(function) or inspect.isclass(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise RewardError(
            f"{FLAG} {spec}: {path} has no function {name!r}.{did_you_mean(name, names)} Define "
            f"{name}(text), which returns the pieces of a text."
        )
    split = lru_cache(maxsize=1024)(partial(_split, function, spec, path))
    split(TRIAL_TEXT)
    return split


def _split(function: Callable[[str], Any], spec: str, path: Path, text: str) -> list[str]:
    def call() -> list[Any]:
        return [
            list(result) if isinstance(result, Iterable) and not isinstance(result, str) else result
            for result in (function(text), function(text))
        ]

    try:
        pieces, repeated = await_result(run_in_thread(call), spec, SPLIT_S)
    except NoAnswer:
        raise RewardError(
            f"{FLAG} {spec} does not return within {SPLIT_S:g} s for {text[:40]!r}."
        ) from None
    except Interrupted:
        raise
    except (Exception, SystemExit) as error:
        problem = describe_error(error, str(path))
        raise RewardError(f"{FLAG} {spec} fails on {text[:40]!r}: {problem}.") from None
    if problem := _find_problem(text, pieces, repeated):
        code = getattr(inspect.unwrap(function), "__code__", None)
        line = f", line {code.co_firstlineno}" if code else ""
        raise RewardError(
            f"{FLAG} {spec}: {problem} ({path.name}{line}). Return a list of texts which, joined, "
            "are the text."
        )
    return list(pieces)


def _find_problem(text: str, pieces: Any, repeated: Any) -> str:
    """Return what is wrong with the pieces of a text, "" if nothing is."""
    if not isinstance(pieces, list):
        return f"it returns a value of type {type(pieces).__name__}"
    if pieces != repeated:
        return f"a second call with {text[:40]!r} returns other pieces"
    at = 0
    for k, piece in enumerate(pieces, start=1):
        if not isinstance(piece, str):
            return f"piece {k} is of type {type(piece).__name__}"
        if not text.startswith(piece, at):
            return f"piece {k} is {piece[:40]!r} where the text goes on {text[at : at + 40]!r}"
        at += len(piece)
    return f"no piece has the end of the text, {text[at : at + 40]!r}" if at < len(text) else ""
