"""The process that holds the tests. It asks the candidate, judges the answers, and reports.

Runs inside a sandbox of its own. Its reports go to the trainer over a channel that the
candidate's process does not have, each with the nonce that came with the job.
"""

from __future__ import annotations

import ast
import os
import sys

from ppo_cli.rewards.code.checks import RECORD, Checks, free_names, record_asserts, used_modules
from ppo_cli.rewards.code.limits import confine
from ppo_cli.rewards.code.link import MOST_TRUSTED, Gone, Link, take_over
from ppo_cli.rewards.code.outputs import same_output, same_value
from ppo_cli.rewards.code.plain_data import MOST_BYTES, decode, encode, no_numbers, no_objects
from ppo_cli.rewards.code.remote import Peer, Remote, RowFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CHECK = "check"


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
            self.run_asserts(*self.parse())

    def load(self, names: list[str]) -> dict[str, Any]:
        """Have the candidate load the code; returns what it defines of these names."""
        job = self.job
        seeded = "random" in job["attempts"][0]
        found = self.peer.ask(
            "load", job["attempts"], job["before"], names, job["entry_point"], seeded
        )
        self.loaded = True
        return found if type(found) is dict else {}

    def parse(self) -> tuple[list[ast.Module], ast.Module | None]:
        """Parse the tests; what is no Python is the row's fault."""
        try:
            setup = ast.parse(self.job["setup"])
            tests = [ast.parse(text) for text in self.job["tests"]]
        except (SyntaxError, ValueError, RecursionError) as error:
            raise RowFault(f"the tests are not valid Python ({error})") from None
        return [setup, *tests], _parsed(self.job["before"])

    def run_asserts(self, trees: list[ast.Module], before: ast.Module | None) -> None:
        """Run tests that are Python: asserts, or a function `check(candidate)`."""
        entry = self.job["entry_point"]
        modules = used_modules(trees)
        names = [name for name in free_names(trees) if name not in modules]
        found = self.load([*names, entry] if entry else names)
        space: dict[str, Any] = {"__name__": "tests", RECORD: self.checks}
        space |= {name: __import__(name) for name in modules}
        if "random" in "".join(self.job["tests"]):
            __import__("random").seed(0)
        if before is not None:
            _try_to_run(before, space)
        space |= {name: found[name] for name in names if name in found and name not in space}
        if entry:
            if entry not in found:
                raise NotDefined(f"the code defines no '{entry}'")
            space[entry] = space["candidate"] = found[entry]
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
        can_fail = _can_fail(tree)
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
        found = self.load([name, "Solution"])
        if name not in found and type(found.get("Solution")) is Remote:
            found[name] = getattr(found["Solution"](), name)
        if name not in found:
            raise NotDefined(f"the code defines no '{name}'")
        for number, (args, expected) in enumerate(self.job["pairs"], 1):
            self.judge(number, lambda args=args, expected=expected: same_value(
                found[name](*args), expected
            ))  # fmt: skip

    def run_programs(self) -> None:
        """Run the program on every input, and compare what it prints."""
        self.peer.ask("prepare", self.job["attempts"])
        self.loaded = True
        seeded = "random" in self.job["attempts"][0]
        for number, (given, expected) in enumerate(self.job["pairs"], 1):
            self.judge(number, lambda given=given, expected=expected: same_output(
                _text(self.peer.ask("run", given, seeded)), expected
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


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _try_to_run(tree: ast.Module, space: dict[str, Any]) -> None:
    try:
        exec(compile(tree, "<prompt>", "exec"), space)
    except Exception as error:
        print(f"the prompt raised {type(error).__name__}: {error}", file=sys.stderr)


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


def _can_fail(tree: ast.Module) -> bool:
    """Say whether anything in a text of tests could tell a wrong answer from a right one."""
    return any(isinstance(node, (ast.Assert, ast.Raise)) for node in ast.walk(tree))


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
