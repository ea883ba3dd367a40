"""What is run: the code of a response, and the tests of its row.

Text work only. Nothing foreign is parsed as Python here, for even that can crash an interpreter.
Tests are read from a row's ground_truth (JSON or an object) or its extra_info, in these forms:
HumanEval (`test`, `entry_point`, `prompt`), asserts (`test_list`, `tests`, with
`test_setup_code`), inputs and outputs of a program, or of a function with `fn_name`, in the
layouts of APPS and TACO (`input_output`), CodeContests (`public_tests`) and LiveCodeBench
(`public_test_cases`).
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

from ppo_cli.rewards.base import CannotScore
from ppo_cli.thoughts import strip_reasoning

_FENCE = re.compile(r"[ \t]*(```+|~~~+)[ \t]*([\w.+#-]*)")
_PYTHON = ("python", "python3", "py", "py3")
_ANSWER, _ANSWER_END = "<answer>", "</answer>"
_NEW_BLOCK = re.compile(r"\n(?=[^\s#)\]}])")


def find_code(text: str, entry_point: str = "") -> str:
    """Return the code of a response, or an empty text when there is none.

    It is in the last complete `<answer>…</answer>`, else anywhere in the response. Of several
    fenced blocks it is the last in Python (else the last of any kind) that defines the entry
    point; where none does, the last. Without any it is the whole text.
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
    """Return what the last complete `<answer>…</answer>` holds, else the text."""
    # Fenced code is blanked out: a program may print such tags.
    lines = (" " * len(line) if fenced else line for line, _, fenced in _read_lines(text))
    visible = "\n".join(lines)
    end = visible.rfind(_ANSWER_END)
    start = visible.rfind(_ANSWER, 0, max(end, 0))
    return text if start < 0 else text[start + len(_ANSWER) : end]


def _list_blocks(text: str) -> list[tuple[str, str]]:
    """Return language and code of every fenced block; the last one may lack its end."""
    blocks: list[tuple[str, list[str]]] = []
    for line, language, fenced in _read_lines(text):
        if language is not None:
            blocks.append((language, []))
        elif fenced:
            blocks[-1][1].append(line)
    return [(language, "\n".join(code)) for language, code in blocks]


def _read_lines(text: str) -> Iterator[tuple[str, str | None, bool]]:
    """Yield each line, the language of the fence that it opens, and whether it is fenced code.

    Goes line by line: on a long line of fence characters or blanks, a single pattern would go
    back and forth for hours.
    """
    fence = ""
    for line in text.split("\n"):
        opening = None if fence else _FENCE.match(line)
        if opening is not None:
            fence = opening[1]
            yield line, opening[2].lower(), False
            continue
        bare = line.strip(" \t")
        # The end of the answer ends a fence that was not closed, too.
        if fence and bare and bare.removesuffix(_ANSWER_END).rstrip(" \t") in ("", fence):
            fence = ""
        yield line, None, bool(fence)


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
    "`test` with `entry_point`, `test_list` of asserts, `inputs` and `outputs`, `input_output`, "
    "`public_tests` or `public_test_cases` (in ground_truth, extra_info or the row)"
)
_ASSERTS = ("test", "test_list", "tests", "assert_case", "test_cases")
_ENTRY = ("entry_point", "fn_name", "function_name", "func_name")
_SETUP = ("test_imports", "test_setup_code")
_PROMPTS = ("starter_code", "prompt", "question")
_CONTEST_TESTS = (
    "public_tests", "private_tests", "generated_tests", "public_test_cases", "private_test_cases",
)  # fmt: skip
_METHOD_OWNER = "Solution()."


@dataclass(frozen=True)
class RowTests:
    """What a tester needs to know. `pairs` are inputs with outputs, `tests` Python texts.

    `before` is the code that the answer goes on from, `imports` are the statements of the row's
    texts that import something.
    """

    kind: Literal["asserts", "programs", "calls"]
    entry_point: str = ""
    before: str = ""
    setup: str = ""
    tests: tuple[str, ...] = ()
    pairs: tuple[tuple[Any, Any], ...] = ()
    imports: tuple[str, ...] = ()


def read_tests(ground_truth: Any, extra_info: Mapping[str, Any] | None) -> RowTests:
    """Return the tests of a row; CannotScore tells what is wrong with it."""
    truth = _given(ground_truth)
    facts = {**(extra_info or {}), **truth}
    # A form that the ground truth has comes before any of the extra facts.
    tests = _read_form(truth, facts) or _read_form(facts, facts)
    if tests is None:
        raise CannotScore(f"the row's ground_truth has no tests; known forms: {FORMS}")
    texts = [facts[key] for key in _PROMPTS if isinstance(facts.get(key), str)]
    parts = [facts[key] for key in _SETUP if facts.get(key)]
    lines = [line for part in parts for line in ([part] if isinstance(part, str) else part)]
    setup = "\n".join(map(str, lines))
    before = next((str(facts[key]) for key in _PROMPTS[:2] if facts.get(key) in texts), "")
    question = str(facts.get("question", ""))
    if not before and defines(question, tests.entry_point) and _is_python(question):
        before = question
    imports = [statement for text in (*texts, setup) for statement in find_imports(text)]
    return replace(tests, before=before, setup=setup, imports=tuple(dict.fromkeys(imports)))


def _is_python(text: str) -> bool:
    """Whether a text is code and nothing else, as the prompts of HumanEval are."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True


def find_imports(text: str) -> Iterator[str]:
    """Yield what may be the import statements of a text at the outermost level of its code."""
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
    """Return the tests that one of the two has, in whatever form; `facts` names the function."""
    entry = next((str(facts[key]) for key in _ENTRY if facts.get(key)), "")
    entry = entry.removeprefix(_METHOD_OWNER)
    texts: Any = next((source[key] for key in _ASSERTS if source.get(key)), None)
    if isinstance(texts, str):
        texts = _loaded(texts) if texts.lstrip()[:1] in ("[", "{") else texts
    if _are_pairs(texts):
        return _read_listed(list(texts), entry)
    if texts is not None:
        tests = (texts,) if isinstance(texts, str) else tuple(texts)
        if not all(isinstance(one, str) for one in tests):
            raise CannotScore(f"the row's tests are no texts; known forms: {FORMS}")
        return RowTests("asserts", entry, tests=tests)
    packed = _loaded(source.get("input_output"))
    pairs = {**source, **packed} if isinstance(packed, Mapping) else source
    if pairs.get("inputs") is not None and pairs.get("outputs") is not None:
        entry = next((str(pairs[key]) for key in _ENTRY if pairs.get(key)), entry)
        return _read_pairs(_listed(pairs["inputs"]), _listed(pairs["outputs"]), entry)
    cases = [case for key in _CONTEST_TESTS for case in _list_cases(source.get(key))]
    if not cases:
        return None
    metadata = _loaded(facts.get("metadata"))
    if isinstance(metadata, Mapping):
        entry = next((str(metadata[key]) for key in _ENTRY if metadata.get(key)), entry)
    return _read_listed(cases, entry)


def _list_cases(value: Any) -> list[Mapping[str, Any]]:
    """Return the {"input", "output"} of a list, or of an object of two lists."""
    cases = _loaded(value)
    if isinstance(cases, str) and cases:
        cases = _unpack(cases)
    if isinstance(cases, Mapping):
        columns = [_listed(cases.get(key) or []) for key in ("input", "output")]
        if len(columns[0]) != len(columns[1]):
            raise CannotScore(f"the row has {len(columns[0])} inputs but {len(columns[1])} outputs")
        return [{"input": a, "output": b} for a, b in zip(*columns, strict=True)]
    if cases and not _are_pairs(cases):
        raise CannotScore(f"the row's tests have no input and output; known forms: {FORMS}")
    return list(cases or [])


class _TextUnpickler(pickle.Unpickler):
    """Reads text and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not text")


def _unpack(text: str) -> Any:
    """Read LiveCodeBench's private tests: JSON, pickled, compressed, in base64."""
    try:
        packed = zlib.decompress(base64.b64decode(text, validate=True))
        return _loaded(_TextUnpickler(io.BytesIO(packed)).load())
    except (ValueError, zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise CannotScore(f"the row's packed tests cannot be read ({error})") from None


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
    arguments = list(given) if isinstance(given, (list, tuple)) else [given]
    # JSON has made the numbers that are keys into texts; APPS' scorer undoes this for the first.
    if arguments and isinstance(arguments[0], Mapping):
        with suppress(ValueError):
            arguments[0] = {int(key): value for key, value in arguments[0].items()}
    return arguments


def _text(value: Any) -> str:
    """Return the text of an input or output; a list holds its lines."""
    if isinstance(value, (list, tuple)):
        return "\n".join(map(_text, value))
    return value if isinstance(value, str) else "" if value is None else str(value)
