"""What is run: the code of a response, and the tests of its row.

Text work only. Nothing foreign is parsed as Python here, for even that can crash an interpreter.
Tests are read from a row's ground_truth (JSON or an object) or its extra_info, in these forms:
HumanEval (`test`, `entry_point`, `prompt`), asserts (`test_list`, `tests`, with
`test_setup_code`), inputs and outputs of a program, or of a function with `fn_name`.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ppo_cli.rewards.base import CannotScore
from ppo_cli.thoughts import strip_reasoning

_FENCE = re.compile(r"[ \t]*(```+|~~~+)[ \t]*([\w.+#-]*)")
_PYTHON = ("python", "python3", "py", "py3")
_NEW_BLOCK = re.compile(r"\n(?=[^\s#)\]}])")


def find_code(text: str, entry_point: str = "") -> str:
    """Return the code of a response, or an empty text when there is none.

    Of several fenced blocks it is the last in Python (else the last of any kind) that defines
    the entry point; where none does, the last. Without any it is the whole text.
    """
    answer = strip_reasoning(text)
    blocks = _list_blocks(answer)
    filled = [(language, code) for language, code in blocks if code.strip()]
    if not filled:
        return "" if blocks else answer.strip("\n").rstrip()
    codes = [code for language, code in filled if language in _PYTHON]
    codes = codes or [code for _, code in filled]
    defining = [code for code in codes if defines(code, entry_point)]
    return (defining or codes)[-1].strip("\n").rstrip()


def _list_blocks(text: str) -> list[tuple[str, str]]:
    """Return language and code of every fenced block; the last one may lack its end.

    Goes line by line: on a long line of fence characters or blanks, a single pattern would go
    back and forth for hours.
    """
    blocks: list[tuple[str, list[str]]] = []
    fence = ""
    for line in text.split("\n"):
        opening = None if fence else _FENCE.match(line)
        if opening is not None:
            fence = opening[1]
            blocks.append((opening[2].lower(), []))
        elif fence and line.strip(" \t") == fence:
            fence = ""
        elif fence:
            blocks[-1][1].append(line)
    return [(language, "\n".join(code)) for language, code in blocks]


def defines(code: str, name: str) -> bool:
    """Say whether the code has a line that makes this name at its outermost level."""
    if not name:
        return False
    made = rf"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+{re.escape(name)}\b"
    assigned = rf"^{re.escape(name)}[ \t]*(?::[^=\n]+)?=[^=]"
    return re.search(f"{made}|{assigned}", code, re.MULTILINE) is not None


def list_attempts(code: str, prompt: str, entry_point: str) -> list[str]:
    """Return what to compile, best first: the code alone, or what it makes with the prompt.

    A body without its `def` line goes on where the prompt has stopped; what a model adds
    behind it (another function, an explanation) is left out where it is no Python.
    """
    alone = textwrap.dedent(code)
    if not prompt or not entry_point or defines(code, entry_point):
        return [alone]
    start = prompt.rstrip() + "\n"
    body = code if code[:1] in (" ", "\t") else textwrap.indent(code, "    ")
    bodies = (body, _NEW_BLOCK.split(body, maxsplit=1)[0])
    # The first line of a completion has often lost its indent.
    mended = [f"    {code}", _NEW_BLOCK.split(f"    {code}", maxsplit=1)[0]]
    return list(dict.fromkeys([*(start + one for one in (*bodies, *mended)), alone]))


FORMS = (
    "`test` with `entry_point`, `test_list` of asserts, or `inputs` and `outputs` "
    "(in ground_truth or extra_info)"
)
_ASSERTS = ("test", "test_list", "tests", "assert_case", "test_cases")
_ENTRY = ("entry_point", "fn_name", "function_name")
_SETUP = ("test_imports", "test_setup_code")


@dataclass(frozen=True)
class RowTests:
    """What a tester needs to know. `pairs` are inputs with outputs, `tests` Python texts."""

    kind: Literal["asserts", "programs", "calls"]
    entry_point: str = ""
    before: str = ""
    setup: str = ""
    tests: tuple[str, ...] = ()
    pairs: tuple[tuple[Any, Any], ...] = ()


def read_tests(ground_truth: Any, extra_info: Mapping[str, Any] | None) -> RowTests:
    """Return the tests of a row; CannotScore tells what is wrong with it."""
    facts = {**(extra_info or {}), **_given(ground_truth)}
    entry = next((str(facts[key]) for key in _ENTRY if facts.get(key)), "")
    texts: Any = next((facts[key] for key in _ASSERTS if facts.get(key)), None)
    if isinstance(texts, str):
        texts = _loaded(texts) if texts.lstrip()[:1] in ("[", "{") else texts
    if _are_pairs(texts):
        return _read_listed(list(texts), entry)
    if texts is not None:
        tests = (texts,) if isinstance(texts, str) else tuple(texts)
        if not all(isinstance(one, str) for one in tests):
            raise CannotScore(f"the row's tests are no texts; known forms: {FORMS}")
        before = facts.get("prompt") if isinstance(facts.get("prompt"), str) else ""
        found = [facts[key] for key in _SETUP if facts.get(key)]
        lines = [line for one in found for line in ([one] if isinstance(one, str) else one)]
        setup = "\n".join(map(str, lines))
        return RowTests("asserts", entry, str(before or ""), setup, tests)
    if facts.get("inputs") is not None and facts.get("outputs") is not None:
        return _read_pairs(_listed(facts["inputs"]), _listed(facts["outputs"]), entry)
    raise CannotScore(f"the row's ground_truth has no tests; known forms: {FORMS}")


def _given(ground_truth: Any) -> dict[str, Any]:
    """Return a ground truth as named facts: JSON is read, Python and lists are tests."""
    value = ground_truth
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        value = _loaded(value)
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return {"tests": list(value)}
    if isinstance(value, str) and ("assert" in value or "def check" in value):
        return {"test": value}
    return {}


def _loaded(value: Any) -> Any:
    """Read a text of JSON; anything else stays as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _listed(value: Any) -> list[Any]:
    value = _loaded(value)
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _are_pairs(texts: Any) -> bool:
    listed = isinstance(texts, (list, tuple)) and bool(texts)
    return listed and all(isinstance(one, Mapping) and "output" in one for one in texts)


def _read_listed(cases: list[Mapping[str, Any]], entry: str) -> RowTests:
    """Read a list of {"input", "output"}, each with its kind, as contest sets have it."""
    kinds = {str(case.get("testtype") or case.get("type") or "") for case in cases}
    names = [str(case[key]) for case in cases for key in _ENTRY if case.get(key)]
    function = bool(kinds & {"functional", "function_call"}) or bool(names)
    name = (names[0] if names else entry) if function else ""
    if function and not name:
        raise CannotScore("the row's tests call a function, but it has no fn_name")
    return _read_pairs([c.get("input") for c in cases], [c["output"] for c in cases], name)


def _read_pairs(inputs: list[Any], outputs: list[Any], entry: str) -> RowTests:
    if len(inputs) != len(outputs) or not inputs:
        raise CannotScore(f"the row has {len(inputs)} inputs but {len(outputs)} outputs")
    if entry:
        calls = zip(map(_arguments, inputs), map(_loaded, outputs), strict=True)
        return RowTests("calls", entry, pairs=tuple(calls))
    texts = zip(map(_text, inputs), map(_text, outputs), strict=True)
    return RowTests("programs", pairs=tuple(texts))


def _arguments(given: Any) -> list[Any]:
    """Return the arguments of one call: a list, or a line of JSON for each."""
    if isinstance(given, str):
        return [_loaded(line) for line in given.splitlines() if line.strip()]
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _text(value: Any) -> str:
    """Return the text of an input or output; a list holds its lines."""
    if isinstance(value, (list, tuple)):
        return "\n".join(map(_text, value))
    return value if isinstance(value, str) else "" if value is None else str(value)
