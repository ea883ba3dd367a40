"""The names of pytest that the tests of a row use: the tester's sandbox does not have pytest.

`raises`, `approx`, `fail`, `fixture` and `mark.parametrize` do what pytest's do; other marks do
nothing, other names make the row unusable.
"""

from __future__ import annotations

import re
import sys

from ppo_cli.rewards.code.channel import BadRow

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


class Raises:
    """`with pytest.raises(ValueError, match="…") as info:`; `info.value` is the exception."""

    def __init__(self, expected: Any, match: str = "") -> None:
        self.expected, self.match = expected, match
        self.value: BaseException | None = None

    def __enter__(self) -> Raises:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> bool:
        if kind is None:
            raise AssertionError(f"did not raise {self.expected}")
        self.value = error
        if not issubclass(kind, self.expected):
            return False
        if self.match and not re.search(self.match, str(error)):
            raise AssertionError(f"{str(error)!r} does not match {self.match!r}")
        return True


def raises(expected: Any, call: Any = None, *args: Any, match: str = "", **kwargs: Any) -> Raises:
    """Return the context, or call a function that must raise."""
    context = Raises(expected, match)
    if call is not None:
        with context:
            call(*args, **kwargs)
    return context


class approx:
    """A number, or lists and objects of numbers, that equals others within a tolerance."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float = 1e-6, abs: float = 1e-12) -> None:
        self.expected, self.rel, self.abs = expected, rel, abs

    def __eq__(self, actual: object) -> bool:
        return self.matches(actual, self.expected)

    def matches(self, actual: Any, expected: Any) -> bool:
        """Compare two values, and the items of lists, tuples and dicts."""
        if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
            return len(actual) == len(expected) and all(map(self.matches, actual, expected))
        if isinstance(expected, dict) and isinstance(actual, dict):
            same = actual.keys() == expected.keys()
            return same and all(self.matches(actual[key], expected[key]) for key in expected)
        numbers = (int, float, complex)
        if actual == expected or not (
            isinstance(actual, numbers) and isinstance(expected, numbers)
        ):
            return bool(actual == expected)
        return bool(abs(actual - expected) <= max(self.rel * abs(expected), self.abs))


def fail(reason: str = "") -> None:
    """Fail a test."""
    raise AssertionError(reason)


def fixture(function: Any = None, **settings: Any) -> Any:
    """Mark a function whose value is passed to the tests that have an argument of its name."""
    if function is None:
        return fixture
    function.is_fixture = True
    return function


def parametrize(names: Any, values: Any, **settings: Any) -> Callable[[Any], Any]:
    """Run a test once with each of these values; several names take a tuple of them."""
    split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    sets = [dict(zip(split, v if len(split) > 1 else [v], strict=True)) for v in values]

    def mark_test(test: Any) -> Any:
        before = getattr(test, "parameters", [{}])
        test.parameters = [{**a, **b} for a in before for b in sets]
        return test

    return mark_test


class Marks:
    """`pytest.mark`: of the marks only `parametrize` means something here."""

    parametrize = staticmethod(parametrize)

    def __getattr__(self, name: str) -> Any:
        if name in ("skip", "skipif", "xfail"):
            raise BadRow(f"the tests use pytest.mark.{name}")
        # Used as `@pytest.mark.slow`, or with arguments.
        return lambda *args, **kwargs: args[0] if args and callable(args[0]) else _keep


def _keep(test: Any) -> Any:
    return test


def refuse_name(name: str) -> Any:
    """Refuse a row whose tests use another name of pytest."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise BadRow(f"the tests use pytest.{name}, which only pytest has")


def install() -> None:
    """Let `import pytest` find these names."""
    module = type(sys)("pytest")
    names = {"raises": raises, "approx": approx, "fail": fail, "fixture": fixture, "mark": Marks()}
    module.__dict__.update(names, __getattr__=refuse_name)
    sys.modules["pytest"] = module


def list_calls(test: Any, space: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each call of a test: its parameters, and values of fixtures."""
    wanted = test.__code__.co_varnames[: test.__code__.co_argcount]
    for parameters in getattr(test, "parameters", [{}]):
        arguments = dict(parameters)
        for name in wanted:
            if name not in arguments and name != "self":
                arguments[name] = _call_fixture(name, space, test.__name__)
        yield arguments


def _call_fixture(name: str, space: dict[str, Any], test: str) -> Any:
    function = space.get(name)
    if not getattr(function, "is_fixture", False):
        raise BadRow(f"{test} takes arguments, which only pytest could pass")
    assert function is not None
    (arguments,) = list_calls(function, space)
    value = function(**arguments)
    # A fixture may yield its value, and clean up later.
    return next(value) if type(value).__name__ == "generator" else value
