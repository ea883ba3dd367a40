"""Finds the code of a response and the tests of its row.

This module only works on text: it does not parse a response as Python, because that can crash an
interpreter. Tests are read from a row's ground_truth (JSON or an object) or its extra_info, in:
HumanEval (`test`, `entry_point`, `prompt`), asserts (`test_list`, `tests`, with
`test_setup_code`; KodCode's import the response as `solution`), inputs and outputs of a program, or
of a function with `fn_name`, in the layouts of APPS and TACO (`input_output`), CodeContests
(`public_tests`), LiveCodeBench (`public_test_cases`) and open-r1 (`official_tests`).
"""

from __future__ import annotations

import ast
import base64
import io
import json
import pickle
import re
import textwrap
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from ppo_cli.rewards.answers import TAG
from ppo_cli.rewards.base import CannotScore
from ppo_cli.thoughts import strip_reasoning

_FENCE = re.compile(r"[ \t]*(```+|~~~+)[ \t]*([\w.+#-]*)")
_PYTHON = ("python", "python3", "py", "py3")
_ANSWER_END = "</answer>"
# Outside of triple quotes: such quotes, a short text, a comment. Inside: an escape, or such quotes.
_OUTSIDE = re.compile(r"""\"{3}|'{3}|"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?|\#""")
_INSIDE = re.compile(r"""\\.|"{3}|'{3}""")
_TRIPLE = ('"""', "'''")
MAX_LINES_OF_TEXT = 1000  # that are searched for the end of a text in quotes
# A line break before an unindented line that is not a comment or a closing bracket.
_NEW_BLOCK = re.compile(r"\n(?=[^\s#)\]}])")


def find_code(text: str, entry_point: str = "") -> str:
    """Return the code of a response, "" without code.

    It is taken from the last complete `<answer>…</answer>`, or from the whole response if there is
    none. Of several fenced blocks only Python blocks count, or all if none is Python; of these it
    is the last one that defines the entry point, or the last one if none does. Without a block it
    is the whole text.
    """
    answer = _find_answer(strip_reasoning(text).replace("\r\n", "\n").replace("\r", "\n"))
    blocks = _list_blocks(answer)
    filled = [(language, code) for language, code in blocks if code.strip()]
    if not filled:
        return "" if blocks else answer.strip("\n").rstrip()
    codes = [code for language, code in filled if language in _PYTHON]
    codes = codes or [code for _, code in filled]
    defining = [code for code in codes if defines(code, entry_point)]
    return (defining or codes)[-1].strip("\n").rstrip()


def _find_answer(text: str) -> str:
    """Return the content of the last complete `<answer>…</answer>`; the whole text without one."""
    # Fenced code is replaced by spaces: a program may print such tags.
    lines = (" " * len(line) if fenced else line for line, _, fenced in _read_lines(text))
    visible = "\n".join(lines)
    start, content = -1, text
    for tag in TAG.finditer(visible):
        if not tag[1]:
            start = tag.end()
        elif start >= 0:
            content = text[start : tag.start()]
    return content


def _list_blocks(text: str) -> list[tuple[str, str]]:
    """Return language and code of every fenced block; the last one may be unclosed."""
    blocks: list[tuple[str, list[str]]] = []
    for line, language, fenced in _read_lines(text):
        if language is not None:
            blocks.append((language, []))
        elif fenced:
            blocks[-1][1].append(line)
    return [(language, "\n".join(code)) for language, code in blocks]


def _read_lines(text: str) -> Iterator[tuple[str, str | None, bool]]:
    """Yield each line, the language of the fence that it opens, and whether it is fenced code.

    Works line by line: on a long line of fence characters or spaces, a single pattern would
    backtrack for hours.
    """
    lines = text.split("\n")
    closing = -1  # the line that closes the last fence
    for number, line in enumerate(lines):
        opening = None if number < closing else _FENCE.match(line)
        if number == closing:
            yield line, None, False
        elif opening is not None:
            closing = _find_closing(lines, number, opening[1], opening[2].lower())
            yield line, opening[2].lower(), False
        else:
            yield line, None, number < closing


def _find_closing(lines: list[str], start: int, fence: str, language: str) -> int:
    """Return the number of the line that closes a fence, or of the end of the text.

    A fence within a text of several lines in quotes belongs to the code, unless these quotes are
    closed only in a later block: then the code lacks its closing quotes.
    """
    first = 0
    quotes = ""
    indent = len(lines[start]) - len(lines[start].lstrip())
    for number in range(start + 1, len(lines)):
        line = lines[number]
        bare = line.strip(" \t")
        # `</answer>` also closes a fence.
        if bare and bare.removesuffix(_ANSWER_END).rstrip(" \t") in ("", fence):
            if not quotes or language not in (*_PYTHON, ""):
                return number
            first = first or number
        opening = _FENCE.match(line) if first else None
        starts_block = opening and opening[2] and len(line) - len(line.lstrip()) <= indent
        if first and (starts_block or number - first > MAX_LINES_OF_TEXT):
            return first
        quotes = _track_quotes(line, quotes)
    return first if first and quotes else len(lines)


def _track_quotes(line: str, quotes: str) -> str:
    """Return the triple quotes that are open after a line of Python, "" if none are."""
    place = 0
    while match := (_INSIDE if quotes else _OUTSIDE).search(line, place):
        place, sign = match.end(), match.group()
        if sign == "#":
            break
        if quotes:
            quotes = "" if sign == quotes else quotes
        elif sign in _TRIPLE:
            quotes = sign
    return quotes


def defines(code: str, name: str) -> bool:
    """Whether a line of the code defines or assigns this name."""
    if not name:
        return False
    definition = rf"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+{re.escape(name)}\b"
    assigned = rf"^{re.escape(name)}[ \t]*(?::[^=\n]+)?=[^=]"
    return re.search(f"{definition}|{assigned}", code, re.MULTILINE) is not None


def list_attempts(code: str, prompt: str, entry_point: str) -> list[str]:
    """Return texts to compile, best first: the code alone, or the code after the prompt.

    A function body without its `def` line continues the prompt. Further attempts leave out what
    follows the body (another function, an explanation), which may not be Python.
    """
    alone = textwrap.dedent(code)
    if not prompt or not entry_point or defines(code, entry_point):
        return [alone]
    start = prompt.rstrip() + "\n"
    body = code if code[:1] in (" ", "\t") else textwrap.indent(code, "    ")
    bodies = (body, _NEW_BLOCK.split(body, maxsplit=1)[0])
    # The first line of a completion often lacks its indent.
    mended = [f"    {code}", _NEW_BLOCK.split(f"    {code}", maxsplit=1)[0]]
    return list(dict.fromkeys([*(start + body_text for body_text in (*bodies, *mended)), alone]))


# Keys of a row by their meaning, in the order in which they are tried.
FORMS = (
    "`test` with `entry_point`, `test_list` of asserts, `inputs` and `outputs`, `input_output`, "
    "`public_tests`, `public_test_cases`, `official_tests` (in ground_truth, extra_info or the row)"
)
_ASSERTS = ("test", "test_list", "tests", "assert_case", "test_cases", "functional")
# Objects, often as JSON, that hold the tests.
_PACKED = ("input_output", "unit_tests", "verification_info")
_ENTRY = ("entry_point", "fn_name", "function_name", "func_name")
_SETUP = ("test_imports", "test_setup_code")
_PROMPTS = ("starter_code", "prompt", "question")
_CONTEST_TESTS = (
    "public_tests", "private_tests", "generated_tests", "public_test_cases", "private_test_cases",
    "official_tests",
)  # fmt: skip
# What open-r1's rows of Codeforces may ask for, and comparing printed texts cannot do.
_UNSUPPORTED = {
    "interaction_format": "it is interactive",
    "input_mode": "it reads and writes files",
}
_METHOD_OWNER = "Solution()."
MAX_SECONDS = 60.0  # a longer limit is in another unit, or a mistake


@dataclass(frozen=True)
class RowTests:
    """The tests of a row. `pairs` are inputs with outputs, `tests` are Python texts.

    `before` is the code that the response continues, `imports` are the import statements in the
    texts of the row. `checker` is a program that judges the output of each input, `seconds` the
    time that the row allows for each test.
    """

    kind: Literal["asserts", "programs", "calls"]
    entry_point: str = ""
    before: str = ""
    setup: str = ""
    tests: tuple[str, ...] = ()
    pairs: tuple[tuple[Any, Any], ...] = ()
    imports: tuple[str, ...] = ()
    checker: str = ""
    seconds: float = 0.0


def read_tests(ground_truth: Any, extra_info: Mapping[str, Any] | None) -> RowTests:
    """Return the tests of a row; CannotScore says what is wrong with the row."""
    truth = _read_truth(ground_truth)
    facts = {**(extra_info or {}), **truth}
    # Tests in the ground truth win over tests in extra_info.
    tests = _read_form(truth, facts) or _read_form(facts, facts)
    if tests is None:
        raise CannotScore(f"the row's ground_truth has no tests; known forms: {FORMS}")
    texts = [facts[key] for key in _PROMPTS if isinstance(facts.get(key), str)]
    # Setup code, and the code that the response continues: a prompt, or a question that is code.
    parts = [facts[key] for key in _SETUP if facts.get(key)]
    lines = [line for part in parts for line in ([part] if isinstance(part, str) else part)]
    setup = "\n".join(map(str, lines))
    before = next((str(facts[key]) for key in _PROMPTS[:2] if facts.get(key) in texts), "")
    question = str(facts.get("question", ""))
    if not before and defines(question, tests.entry_point) and _is_python(question):
        before = question
    imports = [statement for text in (*texts, setup) for statement in find_imports(text)]
    for key, problem in _UNSUPPORTED.items():
        if facts.get(key) and facts[key] != "stdio":
            raise CannotScore(f"the row's tests cannot be run: {problem} (`{key}`)")
    return replace(
        tests, before=before, setup=setup, imports=tuple(dict.fromkeys(imports)),
        checker=str(facts.get("generated_checker") or ""), seconds=_read_seconds(facts),
    )  # fmt: skip


def _read_seconds(facts: Mapping[str, Any]) -> float:
    """Return the time limit of a row: a number, or CodeContests' seconds and nanoseconds."""
    limit = facts.get("time_limit")
    if isinstance(limit, Mapping):
        limit = (limit.get("seconds") or 0) + (limit.get("nanos") or 0) / 1e9
    return float(limit) if isinstance(limit, int | float) and 0 < limit <= MAX_SECONDS else 0.0


def _is_python(text: str) -> bool:
    """Whether a text of the row is Python as a whole, as the prompts of HumanEval are."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True


def find_imports(text: str) -> Iterator[str]:
    """Yield the unindented import statements of a text, which may be prose as well."""
    lines = iter(text.replace("\r", "").split("\n"))
    for line in lines:
        if line.startswith(("import ", "from ")) and " import " in f" {line}":
            while line.count("(") > line.count(")"):
                continuation = next(lines, None)
                if continuation is None:
                    break
                line += f"\n{continuation}"
            yield line


def _read_form(source: Mapping[str, Any], facts: Mapping[str, Any]) -> RowTests | None:
    """Return the tests in `source`, in any known form; `facts` names the function."""
    for packed in (_parse_json(source.get(key)) for key in _PACKED):
        if isinstance(packed, Mapping):
            source, facts = {**source, **packed}, {**facts, **packed}
    entry = _find_entry(facts) or _find_entry(facts.get("metadata"))
    # Asserts: a text, a list of texts, or a list of input and output pairs under the same key.
    texts: Any = next((source[key] for key in _ASSERTS if source.get(key)), None)
    if isinstance(texts, str):
        texts = _parse_json(texts) if texts.lstrip()[:1] in ("[", "{") else texts
    if _are_pairs(texts):
        return _read_to_list(list(texts), entry)
    if texts is not None:
        tests = (texts,) if isinstance(texts, str) else tuple(texts)
        if not all(isinstance(test, str) for test in tests):
            raise CannotScore(f"the row's tests are not texts; known forms: {FORMS}")
        return RowTests("asserts", entry, tests=tests)
    # Inputs and outputs as two lists, as in APPS.
    if source.get("inputs") is not None and source.get("outputs") is not None:
        return _read_pairs(_to_list(source["inputs"]), _to_list(source["outputs"]), entry)
    # Lists of cases, as in CodeContests and LiveCodeBench.
    cases = [case for key in _CONTEST_TESTS for case in _list_cases(source.get(key))]
    return _read_to_list(cases, entry) if cases else None


def _find_entry(facts: Any) -> str:
    """Return the name of the function under test in an object, which may be JSON, or ""."""
    facts = _parse_json(facts)
    names = (facts.get(key) for key in _ENTRY) if isinstance(facts, Mapping) else ()
    return next((str(name) for name in names if name), "").removeprefix(_METHOD_OWNER)


def _list_cases(value: Any) -> list[Mapping[str, Any]]:
    """Return the {"input", "output"} of a list, or of an object of two lists."""
    cases = _parse_json(value)
    if isinstance(cases, str) and cases:
        cases = _unpack(cases)
    if isinstance(cases, Mapping):
        columns = [_to_list(cases.get(key) or []) for key in ("input", "output")]
        if len(columns[0]) != len(columns[1]):
            raise CannotScore(f"the row has {len(columns[0])} inputs but {len(columns[1])} outputs")
        return [{"input": a, "output": b} for a, b in zip(*columns, strict=True)]
    if cases and not _are_pairs(cases):
        raise CannotScore(f"the row's tests have no input and output; known forms: {FORMS}")
    return list(cases or [])


class _TextUnpickler(pickle.Unpickler):
    """Unpickles text only: every class is refused, so nothing can run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not text")


def _unpack(text: str) -> Any:
    """Read LiveCodeBench's private tests: JSON, pickled, compressed, in base64."""
    try:
        packed = zlib.decompress(base64.b64decode(text, validate=True))
        return _parse_json(_TextUnpickler(io.BytesIO(packed)).load())
    except (ValueError, zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise CannotScore(f"the row's packed tests cannot be read ({error})") from None


def _read_truth(ground_truth: Any) -> dict[str, Any]:
    """Return a ground truth as a dict: JSON is parsed, Python and lists count as tests."""
    value = ground_truth
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        value = _parse_json(value)
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return {"tests": list(value)}
    if isinstance(value, str) and ("assert" in value or "def check" in value):
        return {"test": value}
    return {}


def _parse_json(value: Any) -> Any:
    """Parse a text of JSON; any other value is returned unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _to_list(value: Any) -> list[Any]:
    value = _parse_json(value)
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _are_pairs(texts: Any) -> bool:
    listed = isinstance(texts, (list, tuple)) and bool(texts)
    return listed and all(isinstance(case, Mapping) and "output" in case for case in texts)


def _read_to_list(cases: list[Mapping[str, Any]], entry: str) -> RowTests:
    """Read a list of {"input", "output"}, each with its own kind, as in contest data sets."""
    kinds = {str(case.get("testtype") or case.get("type") or "") for case in cases}
    # DeepCoder has the metadata of LiveCodeBench in each case.
    named = (_find_entry(case) or _find_entry(case.get("metadata")) for case in cases)
    names = [name for name in named if name]
    function = bool(kinds & {"functional", "function_call"}) or bool(names)
    name = (names[0] if names else entry) if function else ""
    if function and not name:
        raise CannotScore("the row's tests call a function, but it has no fn_name")
    return _read_pairs([c.get("input") for c in cases], [c["output"] for c in cases], name)


def _read_pairs(inputs: list[Any], outputs: list[Any], entry: str) -> RowTests:
    """Return tests that call `entry` with each input, or without it run the program on each.

    Lists of arguments come with values, as in APPS; lines of JSON with an output of JSON, as in
    LiveCodeBench. Raises CannotScore unless there is one output for each input.
    """
    if len(inputs) != len(outputs) or not inputs:
        raise CannotScore(f"the row has {len(inputs)} inputs but {len(outputs)} outputs")
    if entry:
        calls = (
            (_arguments(arguments), _parse_json(value) if isinstance(arguments, str) else value)
            for arguments, value in zip(inputs, outputs, strict=True)
        )
        return RowTests("calls", entry, pairs=tuple(calls))
    texts = zip(map(_to_text, inputs), map(_to_text, outputs), strict=True)
    return RowTests("programs", pairs=tuple(texts))


def _arguments(call_input: Any) -> list[Any]:
    """Return the arguments of one call: a list, or a line of JSON for each argument."""
    if isinstance(call_input, str):
        return [_parse_json(line) for line in call_input.splitlines() if line.strip()]
    arguments = list(call_input) if isinstance(call_input, (list, tuple)) else [call_input]
    # JSON turns numeric keys into texts; like APPS' scorer, undo that for the first argument.
    if arguments and isinstance(arguments[0], Mapping):
        with suppress(ValueError):
            arguments[0] = {int(key): value for key, value in arguments[0].items()}
    return arguments


def _to_text(value: Any) -> str:
    """Return the text of an input or output; a list contains its lines."""
    if isinstance(value, (list, tuple)):
        return "\n".join(map(_to_text, value))
    return value if isinstance(value, str) else "" if value is None else str(value)
