"""The process that holds the tests. It asks the candidate, judges the answers, and reports.

Runs inside a sandbox of its own. Its reports go to the trainer over a channel that the
candidate's process does not have, each with the nonce that came with the job."""

from __future__ import annotations

import ast
import builtins
import os
import sys

from ppo_cli.rewards.code.channel import (
    MOST_BYTES,
    MOST_TRUSTED,
    Gone,
    Link,
    Peer,
    Remote,
    RowFault,
    decode,
    describe,
    encode,
    no_numbers,
    no_objects,
    run_given,
    take_over,
)
from ppo_cli.rewards.code.limits import confine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CLOSE = 1e-6


def same_output(printed: str, expected: str) -> bool:
    """Compare line by line without spaces at the ends, then word by word with decimals near."""
    left, right = _lines(printed), _lines(expected)
    if left == right:
        return True
    if len(left) != len(right):
        return False
    pairs = zip((line.split() for line in left), (line.split() for line in right), strict=True)
    return all(len(a) == len(b) and all(map(_same_word, a, b)) for a, b in pairs)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    one, other = _number(word), _number(expected)
    if one is None or other is None or not ("." in word or "." in expected):
        return False
    return _close(one, other)


def _number(word: str) -> int | float | None:
    if not word or not set(word) <= set("0123456789+-.eE") or len(word) > 400:
        return None
    try:
        number = float(word) if set(word) & set(".eE") else int(word)
    except ValueError:
        return None
    return number if _is_finite(number) else None


def _is_finite(number: float) -> bool:
    # An integer may be too long for math.isfinite.
    return abs(number) <= sys.float_info.max


def _close(value: float, expected: float) -> bool:
    """Compare within a tolerance that what was expected sets.

    A whole number leaves room for rounding errors only, or an estimate would pass for a count.
    What is not finite equals itself.
    """
    if value == expected or (value != value and expected != expected):
        return True
    if type(expected) is int:
        # Beyond, neighbours are the same float.
        return abs(expected) < 2**53 and abs(value - expected) <= CLOSE
    if not (_is_finite(value) and _is_finite(expected)):
        return False
    return abs(value - expected) <= CLOSE * max(1.0, abs(expected))


def same_value(value: Any, expected: Any) -> bool:
    """Compare as JSON would: tuples are lists, decimals may be near; one result may be wrapped."""
    if _same(value, expected):
        return True
    return type(expected) is list and len(expected) == 1 and _same(value, expected[0])


def _same(value: Any, expected: Any) -> bool:
    if type(value) in (list, tuple) and type(expected) in (list, tuple):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(_same(a, b) for a, b in pairs)
    if type(value) is dict and type(expected) is dict:
        named = {str(key): item for key, item in value.items()}
        wanted = {str(key): item for key, item in expected.items()}
        # Keys that are different and read the same stay two.
        return (
            len(value) == len(wanted) == len(named)
            and named.keys() == wanted.keys()
            and all(_same(named[k], wanted[k]) for k in named)
        )
    if float in (type(value), type(expected)) and {type(value), type(expected)} <= {int, float}:
        return _close(value, expected)
    return type(value) is type(expected) and bool(value == expected)


RECORD = "__checks__"
LONGEST_SOURCE = 160


class Checks:
    """What became of every test."""

    def __init__(self) -> None:
        self.sources: list[ast.AST] = []
        self.passed: list[bool | None] = []
        self.first = ""
        self.broken = 0

    def add(self, source: ast.AST) -> int:
        """Take one more test; returns its number."""
        self.sources.append(source)
        self.passed.append(None)
        return len(self.passed) - 1

    def check(self, number: int, value: Any) -> None:
        """Record what an assert has found."""
        if value if type(value) is bool else bool(value):
            self.passed[number] = self.passed[number] is not False
        else:
            self.fail(number, "AssertionError")

    def caught(self, number: int) -> None:
        """Record the exception that is being handled."""
        error = sys.exc_info()[1]
        assert error is not None
        self.fail(number, _told(error))

    def fail(self, number: int, what: str) -> None:
        """Record a failure; the first is told."""
        self.passed[number] = False
        self.first = self.first or f"{what} at `{_shown(self.sources[number])}`"

    def abort(self, since: int, error: BaseException) -> None:
        """Record that a text of tests ended early: what it has not reached has failed."""
        self.first = self.first or f"{_told(error)} outside the asserts"
        open_ones = [n for n in range(since, len(self.passed)) if self.passed[n] is None]
        for number in open_ones:
            self.passed[number] = False
        self.broken += not open_ones

    def finish(self, since: int) -> None:
        """Record that a text of tests ran to its end; without asserts it is one test itself."""
        mine = self.passed[since:]
        if not mine:
            self.passed.append(True)
        elif all(one is None for one in mine):
            self.first = self.first or "no assert was reached"
            self.passed[since:] = [False] * len(mine)

    def count(self) -> tuple[int, int]:
        """Return how many tests passed, of how many that ran or should have."""
        ran = [one for one in self.passed if one is not None]
        return sum(ran), len(ran) + self.broken


def _told(error: BaseException) -> str:
    names, text = describe(error)
    words = " ".join(text.split())[:200]
    return f"{names[0]}: {words}" if words else names[0]


def _shown(source: ast.AST) -> str:
    text = " ".join(ast.unparse(source).split())
    return text if len(text) <= LONGEST_SOURCE else f"{text[: LONGEST_SOURCE - 3]}..."


class _Recorder(ast.NodeTransformer):
    def __init__(self, checks: Checks) -> None:
        self.checks = checks

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        if isinstance(node.test, ast.Constant) and node.test.value:
            return ast.copy_location(ast.Pass(), node)
        number = self.checks.add(node)
        return self.guard(number, [_call("check", number, node.test)], node)

    def visit_Try(self, node: ast.Try) -> ast.AST:
        asserts = any(isinstance(one, ast.Assert) for part in node.body for one in ast.walk(part))
        if not node.handlers or not asserts:
            return self.generic_visit(node)
        number = self.checks.add(node)
        passed = _call("check", number, ast.Constant(True))
        return self.guard(number, [node, passed], node)

    def guard(self, number: int, body: list[ast.stmt], place: ast.stmt) -> ast.Try:
        """Wrap statements so that what they raise becomes a failed test."""
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [])
        handler.body = [_call("caught", number)]
        guarded = ast.Try(body, [handler], [], [])
        return ast.fix_missing_locations(ast.copy_location(guarded, place))


def _call(method: str, number: int, *values: ast.expr) -> ast.Expr:
    target = ast.Attribute(ast.Name(RECORD, ast.Load()), method, ast.Load())
    return ast.Expr(ast.Call(target, [ast.Constant(number), *values], []))


def record_asserts(tree: ast.Module, checks: Checks) -> ast.Module:
    """Rewrite the asserts of a module into recorded ones."""
    _Recorder(checks).visit(tree)
    return ast.fix_missing_locations(tree)


def free_names(trees: list[ast.Module]) -> list[str]:
    """Return the names that the tests want of the response.

    A response must not compute for the tests. So a builtin counts only where it is the one
    thing that they call (some tasks ask for a function named `sum`), and a name that is only
    ever followed by a dot (`np.allclose`) does not count at all.
    """
    nodes = [node for tree in trees for node in ast.walk(tree)]
    bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    loaded = {
        node.id
        for node in nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in bases
    }
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    defined = _defined(nodes)
    own = sorted(name for name in loaded - defined if not hasattr(builtins, name))
    return own or (sorted(called - defined) if len(called - defined) == 1 else [])


def used_modules(trees: list[ast.Module]) -> list[str]:
    """Return the standard modules that the tests use as such without importing them."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    owners = [node.value for node in nodes if isinstance(node, ast.Attribute)]
    bases = {owner.id for owner in owners if isinstance(owner, ast.Name)}
    return sorted((bases & sys.stdlib_module_names) - _defined(nodes))


def _defined(nodes: list[ast.AST]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
    return found


CHECK = "check"
SOLUTION = "Solution"


class NotDefined(Exception):
    """The response lacks what the tests call."""


class Tester:
    """One job: its tests, and the candidate that they are asked of."""

    def __init__(self, job: dict[str, Any], peer: Peer) -> None:
        self.job = job
        self.peer = peer
        self.checks = Checks()
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
        """Have the candidate load the code; returns what it defines of these names."""
        job = self.job
        found = self.peer.ask("load", job["attempts"], self.given(), names, job["entry_point"])
        self.loaded = True
        return found if type(found) is dict else {}

    def given(self) -> dict[str, Any]:
        """Return what runs in front of the code.

        The setup of asserts stays here, but for its imports: it may hold answers. The usual
        imports are for the kinds of rows whose own scorers have them.
        """
        job = self.job
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

    def entry(self, found: dict[str, Any]) -> Any:
        """Return the function that the tests are about, or that method of `Solution`."""
        name = self.job["entry_point"]
        if name not in found and type(found.get(SOLUTION)) is Remote:
            return getattr(found[SOLUTION](), name)
        if name not in found:
            raise NotDefined(f"the code defines no '{name}'")
        return found[name]

    def run_asserts(self) -> None:
        """Run tests that are Python: asserts, or a function `check(candidate)`."""
        try:
            trees = [ast.parse(text) for text in (self.job["setup"], *self.job["tests"])]
        except (SyntaxError, ValueError, RecursionError) as error:
            raise RowFault(f"the tests are not valid Python ({error})") from None
        entry = self.job["entry_point"]
        modules = used_modules(trees)
        names = [name for name in free_names(trees) if name not in modules]
        found = self.load([*names, entry, SOLUTION] if entry else names)
        space: dict[str, Any] = {"__name__": "tests", RECORD: self.checks}
        space |= {name: __import__(name) for name in modules}
        if "random" in "".join(self.job["tests"]):
            __import__("random").seed(0)
        run_given(self.job["before"], space)
        space |= {name: found[name] for name in names if name in found and name not in space}
        if entry:
            space[entry] = space["candidate"] = self.entry(found)
        self.run_setup(trees[0], space)
        for tree in trees[1:]:
            self.run_tree(tree, space)
        if not self.checks.passed and not self.checks.broken:
            raise RowFault("the tests assert nothing")

    def run_setup(self, tree: ast.Module, space: dict[str, Any]) -> None:
        """Run what the tests need first."""
        asked = self.peer.asked
        try:
            exec(compile(tree, "<setup>", "exec"), space)
        except Exception as error:
            if self.peer.asked == asked and not isinstance(error, NameError):
                raise RowFault(f"the row's setup raised {type(error).__name__}: {error}") from None
            raise

    def run_tree(self, tree: ast.Module, space: dict[str, Any]) -> None:
        """Run one text of tests; an exception outside its asserts ends this text only."""
        since = len(self.checks.passed)
        function, named = _check_function(tree), _tests_to_call(tree)
        # Say whether anything in a text of tests could tell a wrong answer from a right one.
        can_fail = any(isinstance(node, (ast.Assert, ast.Raise)) for node in ast.walk(tree))
        recorded = record_asserts(tree, self.checks)
        try:
            exec(compile(recorded, "<tests>", "exec"), space)
            if function:
                if "candidate" not in space:
                    raise RowFault("the tests define check(candidate), but there is no entry_point")
                space[CHECK](space["candidate"])
            for name in named:
                self.run_named(space[name])
        except SystemExit:
            raise RowFault("the tests end the interpreter") from None
        except Exception as error:
            if isinstance(error, ImportError) and error is not self.peer.raised:
                raise RowFault(f"the tests raised {type(error).__name__}: {error}") from None
            self.checks.abort(since, error)
        else:
            if can_fail or len(self.checks.passed) > since:
                self.checks.finish(since)

    def run_named(self, test: Any) -> None:
        """Run a function `test_…`, or the methods of a unittest.TestCase."""
        if not isinstance(test, type):
            if test.__code__.co_argcount:
                raise RowFault(f"{test.__name__} takes arguments, which only pytest could give")
            test()
            return
        from unittest import TestCase, defaultTestLoader

        names = defaultTestLoader.getTestCaseNames(test) if issubclass(test, TestCase) else ()
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
        for number, (args, expected) in enumerate(self.job["pairs"], 1):
            self.judge(number, lambda args=args, expected=expected: same_value(
                function(*args), expected
            ))  # fmt: skip

    def run_programs(self) -> None:
        """Run the program on every input, and compare what it prints."""
        self.peer.ask("prepare", self.job["attempts"], self.given())
        self.loaded = True
        for number, (given, expected) in enumerate(self.job["pairs"], 1):
            self.judge(number, lambda given=given, expected=expected: same_output(
                _text(self.peer.ask("run", given)), expected
            ))  # fmt: skip

    def judge(self, number: int, right: Any) -> None:
        """Record one test of an input and its output."""
        test = self.checks.add(ast.Constant(f"input {number}"))
        try:
            if right():
                self.checks.check(test, True)
            else:
                self.checks.fail(test, "another output than expected")
        except Exception:
            self.checks.caught(test)


def _text(printed: Any) -> str:
    return printed.decode("utf-8", "replace") if type(printed) is bytes else ""


def _check_function(tree: ast.Module) -> bool:
    """Say whether the tests define `check` and leave it to others to call it."""
    defines = any(isinstance(one, ast.FunctionDef) and one.name == CHECK for one in tree.body)
    calls = (
        one.value.func.id
        for one in tree.body
        if isinstance(one, ast.Expr)
        and isinstance(one.value, ast.Call)
        and isinstance(one.value.func, ast.Name)
    )
    return defines and CHECK not in calls


def _tests_to_call(tree: ast.Module) -> list[str]:
    """Return the names of pytest's functions and unittest's classes, which others call."""
    return [
        one.name
        for one in tree.body
        if (isinstance(one, ast.FunctionDef) and one.name.startswith("test"))
        or (isinstance(one, ast.ClassDef) and any("TestCase" in ast.unparse(b) for b in one.bases))
    ]


def main(arguments: list[str]) -> None:
    """Take one job, run it, report."""
    asked = Link(take_over(0), MOST_BYTES + 1024)
    control = Link(take_over(1, 2), MOST_TRUSTED)
    confine(*map(int, arguments))
    job = decode(control.receive(), no_numbers)

    def report(what: str, **facts: Any) -> None:
        control.send(encode((job["nonce"], what, facts), no_objects))

    try:
        asked.receive()
    except Gone:
        report("no candidate")
        return
    report("ready")
    work(job, Peer(asked), report)
    sys.stderr.flush()
    os._exit(0)


def work(job: dict[str, Any], peer: Peer, report: Any) -> None:
    """Run the job; how it ended is reported in any case."""
    tester = Tester(job, peer)
    end, text = "done", ""
    try:
        tester.run()
    except Gone as error:
        end, text = "gone", str(error)
    except RowFault as fault:
        end, text = "row", str(fault)
    except NotDefined as error:
        end, text = "broken", str(error)
    except BaseException as error:
        end, text = "broken", f"{type(error).__name__}: {error}"[:300]
    passed, total = tester.checks.count()
    report(
        end, text=text, loaded=tester.loaded, passed=passed, total=total, first=tester.checks.first
    )
