"""The process that holds the tests: it calls the candidate, judges the answers, and reports.

It runs inside a separate sandbox. Its reports go to the trainer over a channel that the candidate
process does not have, each with the nonce that came with the job.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys

from ppo_cli.rewards.code.channel import (
    MAX_BYTES,
    MAX_TRUSTED_BYTES,
    BadRow,
    ChannelClosed,
    Link,
    NumpyFinder,
    Peer,
    Remote,
    decode,
    describe_exception,
    encode,
    exec_row_text,
    move_descriptor,
    refuse_number,
    refuse_object,
)
from ppo_cli.rewards.code.limits import apply_limits, renew_cpu_limit
from ppo_cli.rewards.code.pytest_names import install, list_calls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

TOLERANCE = 1e-6  # of decimals in an answer, relative to the expected value


def same_output(printed: str, expected: str) -> bool:
    """Compare lines without trailing spaces, else word by word, decimals within the tolerance."""
    printed_lines, expected_lines = _lines(printed), _lines(expected)
    if printed_lines == expected_lines:
        return True
    if len(printed_lines) != len(expected_lines):
        return False
    pairs = zip(
        (line.split() for line in printed_lines),
        (line.split() for line in expected_lines),
        strict=True,
    )
    return all(len(a) == len(b) and all(map(_same_word, a, b)) for a, b in pairs)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    value, expected_value = _number(word), _number(expected)
    if value is None or expected_value is None or not ("." in word or "." in expected):
        return False
    return _close(value, expected_value)


def _number(word: str) -> int | float | None:
    """Return the number that a word is, None for other words, infinity and NaN."""
    if not word or not set(word) <= set("0123456789+-.eE") or len(word) > 400:
        return None
    try:
        number = float(word) if set(word) & set(".eE") else int(word)
    except ValueError:
        return None
    return number if _is_finite(number) else None


def _is_finite(number: float) -> bool:
    # math.isfinite raises OverflowError for a large int.
    return abs(number) <= sys.float_info.max


def _close(value: float, expected: float) -> bool:
    """Compare within a tolerance that depends on the expected number.

    An expected integer allows rounding errors only, otherwise an estimate would pass for a count.
    Infinity and NaN equal themselves.
    """
    # Equal, or both NaN.
    if value == expected or (value != value and expected != expected):
        return True
    if type(expected) is int:
        # From 2**53 on, neighbouring integers are the same float.
        return abs(expected) < 2**53 and abs(value - expected) <= TOLERANCE
    if not (_is_finite(value) and _is_finite(expected)):
        return False
    return abs(value - expected) <= TOLERANCE * max(1.0, abs(expected))


def same_value(value: Any, expected: Any) -> bool:
    """Compare as JSON: tuples are lists, decimals within the tolerance; `[x]` also accepts `x`."""
    if _same(value, expected):
        return True
    return type(expected) is list and len(expected) == 1 and _same(value, expected[0])


def _same(value: Any, expected: Any) -> bool:
    """Return whether a value equals the expected one, with a tolerance for floats.

    A list equals a tuple with the same items, and keys of dicts are compared as text.
    """
    if type(value) in (list, tuple) and type(expected) in (list, tuple):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(_same(a, b) for a, b in pairs)
    if type(value) is dict and type(expected) is dict:
        named = {str(key): item for key, item in value.items()}
        expected_items = {str(key): item for key, item in expected.items()}
        # The lengths differ when two keys have the same text, such as 1 and "1".
        return (
            len(value) == len(expected_items) == len(named)
            and named.keys() == expected_items.keys()
            and all(_same(named[k], expected_items[k]) for k in named)
        )
    # A bool is neither an int nor a float here: True does not equal 1.
    if float in (type(value), type(expected)) and {type(value), type(expected)} <= {int, float}:
        return _close(value, expected)
    return type(value) is type(expected) and bool(value == expected)


# The name of the AssertLog in the namespace of the tests.
RECORD = "__checks__"
MAX_SOURCE_CHARS = 160


class AssertLog:
    """The outcome of every test: True, False, or None when it has not been reached.

    `first` describes the first failure, `line` is the line of the response that raised it;
    `broken` counts texts that failed outside their asserts.
    """

    def __init__(self) -> None:
        self.sources: list[ast.AST] = []
        self.passed: list[bool | None] = []
        self.first = self.line = ""
        self.broken = 0

    def add(self, source: ast.AST) -> int:
        """Add a test; returns its number."""
        self.sources.append(source)
        self.passed.append(None)
        return len(self.passed) - 1

    def check(self, number: int, value: Any) -> None:
        """Record the value of an assert: an assert in a loop passes only if it always holds."""
        if value if type(value) is bool else bool(value):
            self.passed[number] = self.passed[number] is not False
        else:
            self.fail(number, "AssertionError")

    def caught(self, number: int) -> None:
        """Record the exception that is being handled."""
        error = sys.exc_info()[1]
        assert error is not None
        self.fail(number, _describe_failure(error), find_note(error))

    def fail(self, number: int, what: str, line: str = "") -> None:
        """Record a failure; the first one is described."""
        self.passed[number] = False
        if not self.first:
            self.first, self.line = f"{what} at `{_shorten_source(self.sources[number])}`", line

    def abort(self, since: int, error: BaseException) -> None:
        """Record that a text of tests raised: the asserts that it has not reached have failed."""
        if not self.first:
            self.first, self.line = (
                f"{_describe_failure(error)} outside the asserts",
                find_note(error),
            )
        open_ones = [n for n in range(since, len(self.passed)) if self.passed[n] is None]
        for number in open_ones:
            self.passed[number] = False
        self.broken += not open_ones

    def finish(self, since: int) -> None:
        """Record that a text of tests ran to its end; without asserts it counts as one test."""
        mine = self.passed[since:]
        if not mine:
            self.passed.append(True)
        elif all(outcome is None for outcome in mine):
            self.first = self.first or "no assert was reached"
            self.passed[since:] = [False] * len(mine)

    def count(self) -> tuple[int, int]:
        """Return how many tests passed, of how many that ran or should have."""
        ran = [outcome for outcome in self.passed if outcome is not None]
        return sum(ran), len(ran) + self.broken


def find_note(error: BaseException) -> str:
    """Return the line of the response that raised an error, "" without one."""
    return "".join(getattr(error, "__notes__", ())[:1])


def _describe_failure(error: BaseException) -> str:
    names, text = describe_exception(error)
    message = " ".join(text.split())[:200]
    return f"{names[0]}: {message}" if message else names[0]


def _shorten_source(source: ast.AST) -> str:
    text = " ".join(ast.unparse(source).split())
    return text if len(text) <= MAX_SOURCE_CHARS else f"{text[: MAX_SOURCE_CHARS - 3]}..."


class _AssertRecorder(ast.NodeTransformer):
    """Turns `assert x` into a recorded check, so that a failure does not end the tests.

    A `try` with asserts in its body counts as one test: its handlers belong to what it tests.
    """

    def __init__(self, checks: AssertLog) -> None:
        self.checks = checks

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        # `assert True` tests nothing, so it is not counted.
        if isinstance(node.test, ast.Constant) and node.test.value:
            return ast.copy_location(ast.Pass(), node)
        number = self.checks.add(node)
        return self.guard(number, [_call("check", number, node.test)], node)

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """Record a `try` with handlers and asserts as one test, asserts in others singly."""
        asserts = any(
            isinstance(child, ast.Assert) for part in node.body for child in ast.walk(part)
        )
        # A `try` without handlers changes nothing; its asserts are recorded one by one.
        if not node.handlers or not asserts:
            return self.generic_visit(node)
        number = self.checks.add(node)
        passed = _call("check", number, ast.Constant(True))
        return self.guard(number, [node, passed], node)

    def guard(self, number: int, body: list[ast.stmt], place: ast.stmt) -> ast.Try:
        """Wrap statements in a `try` that records an exception as a failed test."""
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [])
        handler.body = [_call("caught", number)]
        guarded = ast.Try(body, [handler], [], [])
        return ast.fix_missing_locations(ast.copy_location(guarded, place))


def _call(method: str, number: int, *values: ast.expr) -> ast.Expr:
    target = ast.Attribute(ast.Name(RECORD, ast.Load()), method, ast.Load())
    return ast.Expr(ast.Call(target, [ast.Constant(number), *values], []))


def record_asserts(tree: ast.Module, checks: AssertLog) -> ast.Module:
    """Rewrite the asserts of a module into recorded ones."""
    _AssertRecorder(checks).visit(tree)
    return ast.fix_missing_locations(tree)


def free_names(trees: list[ast.Module]) -> list[str]:
    """Return the names that the tests need from the response.

    The response must not replace functions that the tests rely on. So a builtin counts only if it
    is the only function that they call (some tasks ask for a function named `sum`), and a name
    that is only used with a dot (`np.allclose`) does not count.
    """
    nodes = [node for tree in trees for node in ast.walk(tree)]
    # Names before a dot, names that are read, and names that are called.
    bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    loaded = {
        node.id
        for node in nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in bases
    }
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    defined = _defined(nodes)
    names = sorted(name for name in loaded - defined if not hasattr(builtins, name))
    return names or (sorted(called - defined) if len(called - defined) == 1 else [])


def used_modules(trees: list[ast.Module]) -> list[str]:
    """Return the standard modules that the tests use as `module.name` without importing them."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    owners = [node.value for node in nodes if isinstance(node, ast.Attribute)]
    bases = {owner.id for owner in owners if isinstance(owner, ast.Name)}
    return sorted((bases & sys.stdlib_module_names) - _defined(nodes))


SOLUTION_MODULE = "solution"  # by which name tests in files of their own import the response


def imported_names(trees: list[ast.Module]) -> tuple[list[str], list[str]]:
    """Return the names that tests import from `solution`, and its attributes that they use."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imported: list[str] = []
    modules: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == SOLUTION_MODULE:
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            aliases = [alias for alias in node.names if alias.name == SOLUTION_MODULE]
            modules |= {alias.asname or alias.name for alias in aliases}
    used = [
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
    ]
    return imported, used


def _defined(nodes: list[ast.AST]) -> set[str]:
    """Return the names that these nodes assign, define or import."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
    return names


CHECK = "check"
SOLUTION = "Solution"


class NotDefined(Exception):
    """The response lacks what the tests call."""


class Tester:
    """Runs the tests of one job against the candidate behind `peer`.

    `begin` reports that a test of inputs and outputs begins, each of which has its time limit.
    """

    def __init__(self, job: dict[str, Any], peer: Peer, begin: Callable[[], None]) -> None:
        self.job = job
        self.peer = peer
        self.begin = begin
        self.checks = AssertLog()
        self.loaded = False

    def run(self) -> None:
        """Run all tests."""
        kind = self.job["kind"]
        if kind == "programs":
            self.run_programs()
        elif kind == "calls":
            self.run_calls()
        else:
            self.run_asserts()

    def load(self, names: list[str]) -> dict[str, Any]:
        """Load the code in the candidate; returns those of these names that it defines."""
        job = self.job
        definitions = self.peer.ask(
            "load", job["attempts"], self.preamble(), names, job["entry_point"]
        )
        self.loaded = True
        return definitions if type(definitions) is dict else {}

    def preamble(self) -> dict[str, Any]:
        """Return what the candidate executes before the code.

        The setup of asserts stays in the tester, except its imports: it may contain answers. The
        common imports are for those kinds of rows whose original scorers have them.
        """
        job = self.job
        # What the code may see, by the kind of the row.
        texts = {
            "asserts": [job["before"]],
            "calls": [job["before"], job["setup"]],
            "programs": [job["setup"]],
        }
        usual = job["kind"] != "asserts" or "class Solution" in job["attempts"][0]
        return {
            "imports": list(job["imports"]),
            "texts": texts[job["kind"]],
            "usual": usual,
            "seeded": usual or "random" in job["attempts"][0],
        }

    def entry(self, definitions: dict[str, Any]) -> Any:
        """Return the function under test, or the method of that name of `Solution`."""
        name = self.job["entry_point"]
        if name not in definitions and type(definitions.get(SOLUTION)) is Remote:
            return getattr(definitions[SOLUTION](), name)
        if name not in definitions:
            raise NotDefined(f"the code defines no '{name}'")
        return definitions[name]

    def run_asserts(self) -> None:
        """Run tests that are Python: asserts, or a function `check(candidate)`."""
        try:
            trees = [ast.parse(text) for text in (self.job["setup"], *self.job["tests"])]
        except (SyntaxError, ValueError, RecursionError) as error:
            raise BadRow(f"the tests are not valid Python ({error})") from None
        # Load the code, asking for the names that the tests use.
        entry = self.job["entry_point"]
        modules = used_modules(trees)
        names = [name for name in free_names(trees) if name not in modules]
        imported, used = imported_names(trees)
        wanted = [*names, *imported, *used, *([entry] if entry else []), SOLUTION]
        definitions = self.load(list(dict.fromkeys(wanted)))
        missing = [name for name in imported if name not in definitions and name != "*"]
        if missing:
            raise NotDefined(f"the code defines no '{missing[0]}'")
        install()
        sys.modules[SOLUTION_MODULE] = module = type(sys)(SOLUTION_MODULE)
        module.__dict__.update(definitions)
        # The namespace of the tests. What the prompt defines wins over the code, except the entry.
        space: dict[str, Any] = {"__name__": "tests", RECORD: self.checks}
        space |= {name: __import__(name) for name in modules}
        # Tests with random inputs are the same for every response.
        if "random" in "".join(self.job["tests"]):
            __import__("random").seed(0)
        exec_row_text(self.job["before"], space)
        space |= {
            name: definitions[name] for name in names if name in definitions and name not in space
        }
        if entry:
            space[entry] = space["candidate"] = self.entry(definitions)
        self.run_setup(trees[0], space)
        for tree in trees[1:]:
            self.run_tree(tree, space)
        if not self.checks.passed and not self.checks.broken:
            raise BadRow("the tests assert nothing")

    def run_setup(self, tree: ast.Module, space: dict[str, Any]) -> None:
        """Run the setup; an error that does not involve the response is the row's fault."""
        requests_before = self.peer.request_count
        try:
            exec(compile(tree, "<setup>", "exec"), space)
        except Exception as error:
            if self.peer.request_count == requests_before and not isinstance(error, NameError):
                raise BadRow(f"the row's setup raised {type(error).__name__}: {error}") from None
            raise

    def run_tree(self, tree: ast.Module, space: dict[str, Any]) -> None:
        """Run one text of tests; an exception outside its asserts ends this text only."""
        since = len(self.checks.passed)
        function, named = _check_function(tree), _tests_to_call(tree)
        # A text that can neither assert nor raise does not test anything.
        can_fail = any(
            isinstance(node, (ast.Assert, ast.Raise))
            or (isinstance(node, ast.Attribute) and node.attr == "raises")
            for node in ast.walk(tree)
        )
        recorded = record_asserts(tree, self.checks)
        # Run the text, then the functions that it only defines: check(candidate), test_…
        try:
            exec(compile(recorded, "<tests>", "exec"), space)
            if function:
                if "candidate" not in space:
                    raise BadRow("the tests define check(candidate), but there is no entry_point")
                space[CHECK](space["candidate"])
            for name in named:
                self.run_named(space[name], space)
        except SystemExit:
            raise BadRow("the tests end the interpreter") from None
        except Exception as error:
            if isinstance(error, ImportError) and error is not self.peer.raised:
                raise BadRow(f"the tests raised {type(error).__name__}: {error}") from None
            self.checks.abort(since, error)
        else:
            if can_fail or len(self.checks.passed) > since:
                self.checks.finish(since)

    def run_named(self, test: Any, space: dict[str, Any]) -> None:
        """Run a function `test_…`, or the methods of a class of tests."""
        if not isinstance(test, type):
            for arguments in list_calls(test, space):
                test(**arguments)
            return
        from unittest import TestCase, defaultTestLoader

        if not issubclass(test, TestCase):
            for name in [name for name in vars(test) if name.startswith("test")]:
                for arguments in list_calls(vars(test)[name], space):
                    instance = test()
                    getattr(instance, "setup_method", bool)()
                    getattr(instance, name)(**arguments)
            return
        names = defaultTestLoader.getTestCaseNames(test)
        for method in names:
            number = self.checks.add(ast.Name(f"{test.__name__}.{method}", ast.Load()))
            try:
                test(method).debug()
                self.checks.check(number, True)
            except Exception:
                self.checks.caught(number)

    def run_calls(self) -> None:
        """Call one function with every input, and compare what it returns."""
        name = self.job["entry_point"]
        function = self.entry(self.load([name, SOLUTION]))

        def returns(args: list[Any], expected: Any) -> bool:
            value = function(*args)
            # A function that changes its first argument in place returns nothing.
            if value is None and expected is not None and args:
                return type(args[0]) is list and same_value(args[0], expected)
            return same_value(value, expected)

        for number, (args, expected) in enumerate(self.job["pairs"], 1):
            self.judge(number, lambda args=args, expected=expected: returns(args, expected))

    def run_programs(self) -> None:
        """Run the program on every input, and compare what it prints."""
        self.peer.ask("prepare", self.job["attempts"], self.preamble())
        self.loaded = True

        def prints(program_input: str, expected: str) -> bool:
            printed = _text(self.peer.ask("run", program_input))
            if self.job["checker"]:
                return accepts(self.job["checker"], program_input, expected, printed)
            return same_output(printed, expected)

        for number, (given, expected) in enumerate(self.job["pairs"], 1):
            self.judge(number, lambda given=given, expected=expected: prints(given, expected))

    def judge(self, number: int, right: Any) -> None:
        """Record one pair of input and output; `right` compares them."""
        self.begin()
        test = self.checks.add(ast.Constant(f"input {number}"))
        try:
            if right():
                self.checks.check(test, True)
            else:
                self.checks.fail(test, "the output differs from the expected one")
        except Exception:
            self.checks.caught(test)


def accepts(checker: str, program_input: str, expected: str, printed: str) -> bool:
    """Return whether the checker of a row accepts an output: it reads three files and prints 1."""
    texts = {"input.txt": program_input, "correct_output.txt": expected, "output.txt": printed}
    for name, text in texts.items():
        with open(name, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
    io = __import__("io")
    stdout, argv = sys.stdout, sys.argv
    sys.stdout, sys.argv = io.StringIO(), ["checker.py", *texts]
    try:
        exec(compile(checker, "<checker>", "exec"), {"__name__": "__main__"})
    except SystemExit:
        pass
    except SyntaxError as error:
        raise BadRow(f"the row's checker is not valid Python ({error})") from None
    finally:
        verdict, sys.stdout, sys.argv = sys.stdout.getvalue(), stdout, argv
    return _number(verdict.strip()) == 1


def _text(printed: Any) -> str:
    return printed.decode("utf-8", "replace") if type(printed) is bytes else ""


def _check_function(tree: ast.Module) -> bool:
    """Whether the tests define `check` without calling it, as HumanEval's do."""
    defines = any(isinstance(node, ast.FunctionDef) and node.name == CHECK for node in tree.body)
    calls = (
        node.value.func.id
        for node in tree.body
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
    )
    return defines and CHECK not in calls


def _tests_to_call(tree: ast.Module) -> list[str]:
    """Return the names of test functions and classes, which a test runner would call."""
    return [
        node.name
        for node in tree.body
        if (isinstance(node, ast.FunctionDef) and node.name.startswith("test"))
        or (
            isinstance(node, ast.ClassDef)
            and (
                any("TestCase" in ast.unparse(base) for base in node.bases)
                or (node.name.startswith("Test") and not node.bases)
            )
        )
    ]


def main(arguments: list[str]) -> None:
    """Receive one job, run it, report."""
    # Take the channels out of reach first: the tests of a row may read and print.
    candidate = Link(move_descriptor(0), MAX_BYTES + 1024)
    control = Link(move_descriptor(1, 2), MAX_TRUSTED_BYTES)
    *limits, packages = arguments
    apply_limits(*map(int, limits))
    sys.meta_path.append(NumpyFinder(packages))
    job = decode(control.receive(), refuse_number)

    def report(what: str, **facts: Any) -> None:
        control.send(encode((job["nonce"], what, facts), refuse_object))

    try:
        candidate.receive()
    except ChannelClosed:
        report("no candidate")
        return
    report("ready")
    work(job, Peer(candidate), report)
    sys.stderr.flush()
    os._exit(0)


def work(job: dict[str, Any], peer: Peer, report: Any) -> None:
    """Run the job, and report how it ended in every case."""
    # How the job ended, as the first word of the report; see Check._read_verdict.

    def begin() -> None:
        renew_cpu_limit()
        report("test")

    tester = Tester(job, peer, begin)
    end, text, line = "done", "", ""
    try:
        tester.run()
    except ChannelClosed as error:
        end, text = "gone", str(error)
    except BadRow as fault:
        end, text = "row", str(fault)
    except NotDefined as error:
        end, text = "broken", str(error)
    except BaseException as error:
        end, text = "broken", f"{type(error).__name__}: {error}"[:300]
        line = find_note(error)
    passed, total = tester.checks.count()
    report(
        end, text=text, loaded=tester.loaded, passed=passed, total=total,
        first=tester.checks.first, line=line or tester.checks.line,
    )  # fmt: skip
