"""Imports only go down: every import of the package, those inside functions too.

`MAY` holds the rooms (and, dotted, single modules) of our own that a room may import besides
itself. A new room fails the test until it is given its line here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

GROUND = {
    "addresses", "allocator", "atomic", "digests", "errors", "estimates", "moments", "paths",
    "plugins", "processes", "records", "secrets", "signals", "spending", "thoughts", "version",
    "waits",
}  # fmt: skip
FLOOR_2 = {"config", "data_sets", "machine", "planning", "report", "run_folder"}
LOOP = {"loop", "step"}
MAY: dict[str, set[str]] = {
    **dict.fromkeys(GROUND, GROUND),
    **dict.fromkeys(FLOOR_2, GROUND | FLOOR_2),
    # The page shows what judges were asked, as the reward reads it.
    "report.page": GROUND | FLOOR_2 | {"rewards.judge.prompt"},
    "algo": {"moments", "records", "errors", "plugins"},
    # What a plan asks about the machine, without torch.
    "machine": GROUND,
    # A plan counts the rows of prompt files; settings take the names of estimators.
    "config": GROUND | {"algo.estimators", "data_sets.files", "machine"},
    # What holds: nothing above it decides anything again.
    "planning": GROUND | FLOOR_2 | {"algo.estimators"},
    "rewards": GROUND | {"config", "machine", "planning"},
    "engine": GROUND | {"config", "machine", "planning", "algo"},
    "environments": GROUND | {"config", "data_sets", "algo", "engine.base"},
    **{room: GROUND | FLOOR_2 | LOOP | {"algo", "engine.base", "rewards.base"} for room in LOOP},
    # Scores rows without training: no engine, no torch.
    "scoring": GROUND | FLOOR_2 | {"rewards"},
    # The engine over many processes and machines; starts Ray and brings the nodes together.
    "cluster": GROUND | {"config", "machine", "planning", "algo", "engine"},
    # What registers by entry points, like packages of others; they do not import each other.
    "extras.lab": GROUND | FLOOR_2 | {"algo.batch", "cli", "engine", "rewards", "scoring"},
    # Models and rewards behind HTTP calls, for loops of other programs.
    "extras.serve": GROUND | FLOOR_2 | {"algo", "cli", "engine", "rewards", "scoring"},
    # Rewrites what was written for other trainers; runs on verl without engine and torch.
    "extras.migrate": GROUND
    | FLOOR_2
    | {"machine", "cli", "run.identity", "rewards", "scoring", "algo.estimators"},
    "extras": set(),
    # Tools of the bundled game, which an environment process runs.
    "embedded": set(),
    # Runs parts of the engine and of rewards for their numbers alone.
    "self_test": GROUND | FLOOR_2 | {"algo", "engine", "cluster", "rewards"},
    "run": GROUND
    | FLOOR_2
    | LOOP
    | {"algo", "engine", "cluster", "environments", "rewards", "scoring"},
    # Commands reach the upper rooms through these, and only inside a function.
    "cli": GROUND
    | FLOOR_2
    | {
        "run",
        "cluster",
        "scoring",
        "self_test",
        "engine.pretrained",
        "algo.estimators",
    },
    "__main__": {"cli", "signals"},
    # What `from ppo_cli import …` gives: beside cli, and imported when it is asked for.
    "library": GROUND
    | FLOOR_2
    | {"run", "algo.estimators", "rewards.function", "callables", "environments.pool"},
    "callables": GROUND | {"data_sets.rows"},
    "__init__": {"library", "version"},
}
# What a command imports only inside a function: heavy, or not for every command.
UPPER = ("run", "cluster", "scoring", "self_test")
SDKS = {"openai", "anthropic", "google", "dashscope"}
# Third-party roots -> the only places that may import them, at any depth.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "torch": (
        *LOOP, "algo", "engine", "cluster", "run", "extras.lab.fitting", "extras.lab.simulation",
        "extras.serve", "rewards.models", "self_test",
    ),
    "torch.distributed": ("engine", "extras.lab.simulation", "self_test.checks"),
    "transformers": (
        "engine", "run", "extras.lab.fitting", "extras.lab.simulation", "data_sets",
        "rewards.models", "self_test.checks",
    ),
    "peft": ("engine.models.lora",),
    "ray": ("cluster", "extras.migrate.bridge.rewards"),
    "bokeh": ("report.page",),
    "pynvml": ("machine.gpus",),
    "vllm": ("engine.samplers", "rewards.judge.providers.vllm_serve"),
    "genai_prices": ("rewards.judge.prices",),
    **dict.fromkeys(SDKS, ("rewards.judge.providers",)),
    "google": ("rewards.judge.providers", "extras.serve.wire"),  # google.protobuf
}  # fmt: skip
# Heavy libraries that only algo/, engine/ and the loop may import at module level.
HEAVY = {
    "torch", "transformers", "datasets", "pyarrow", "pandas", "math_verify", "sympy", "ray",
    "vllm", "peft", "tensorboard", "wandb", "trackio", "mlflow", "swanlab", "bokeh", "genai_prices",
    *SDKS,
}  # fmt: skip
HEAVY_AT_TOP = {
    *LOOP, "algo", "engine", "cluster", "extras.lab.fitting", "extras.lab.simulation",
    "extras.serve", "rewards.models", "self_test.checks",
}  # fmt: skip


class Import(NamedTuple):
    """One imported name and where it is imported."""

    module: str
    line: int
    at_top: bool


def called_imports(node: ast.AST) -> Iterator[str]:
    """Names in `importlib.import_module("x")` and `__import__("x")`."""
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        callee = node.func
        name = callee.attr if isinstance(callee, ast.Attribute) else getattr(callee, "id", "")
        if name in {"import_module", "__import__"}:
            yield str(node.args[0].value)


@cache
def imports_of(source: str) -> tuple[Import, ...]:
    """Every import in a module; at the top means when it is imported, for more than its types."""
    imports = []
    nodes: list[tuple[ast.AST, bool]] = [(ast.parse(source), True)]
    for node, at_top in nodes:  # which grows
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for_types = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        at_top = at_top and not (is_function or for_types)
        nodes += [(child, at_top) for child in ast.iter_child_nodes(node)]
        names: list[str] = list(called_imports(node))
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "."]
            if names[0].startswith("ppo_cli"):  # what is taken from it may be a module too
                names += [f"{names[0]}.{alias.name}" for alias in node.names]
        imports += [Import(name, getattr(node, "lineno", 0), at_top) for name in names]
    return tuple(imports)


def is_in(name: str, places: set[str] | tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


def breaches(module: str, source: str) -> list[str]:
    """What a module imports and must not, in words."""
    room = max((r for r in MAY if is_in(module, (r,))), key=len, default="")
    if not room:
        return [f"{module}: give its room a line in tests/house/test_floors.py"]
    violations = []
    for name, line, at_top in imports_of(source):
        where = f"{module} line {line}: {name}"
        if name.startswith("ppo_cli."):
            inner_name = name.removeprefix("ppo_cli.")
            if not is_in(inner_name, MAY[room] | {room, "__version__"}):
                violations.append(f"{where} is not below")
            if room == "cli" and at_top and is_in(inner_name, UPPER):
                violations.append(f"{where} belongs inside the command")
        for library, places in ONLY_IN.items():
            if is_in(name, (library,)) and not is_in(module, places):
                violations.append(f"{where} may be imported only in {', '.join(places)}")
        if at_top and name.split(".")[0] in HEAVY and not is_in(module, HEAVY_AT_TOP):
            violations.append(f"{where} is heavy: import it where it is used")
    return violations


def test_every_import_goes_down(modules: dict[str, str]) -> None:
    assert [line for module, source in modules.items() for line in breaches(module, source)] == []


def test_nothing_imports_the_extras() -> None:
    assert not [room for room, below in MAY.items() if any(is_in(r, ("extras",)) for r in below)]


def own_imports(source: str) -> set[str]:
    """Modules and names of the package that a source imports, functions included."""
    names = {name for name, _, _ in imports_of(source)}
    return {name.removeprefix("ppo_cli.") for name in names if name.startswith("ppo_cli.")}


def rings(below: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is left when modules that import nothing, or that nothing imports, are taken away."""
    while True:
        imported = set().union(*below.values())
        allowed = {m: needs & below.keys() for m, needs in below.items() if m in imported and needs}
        if allowed == below:
            return below
        below = allowed


def test_no_ring_of_imports(modules: dict[str, str]) -> None:
    below = {module: own_imports(source) & modules.keys() for module, source in modules.items()}
    assert "loop" in below["run.assemble"]
    assert rings(below) == {}


def test_rings_are_seen() -> None:
    assert rings({"a": {"b"}, "b": {"c"}, "c": set()}) == {}
    assert rings({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"b": {"c"}, "c": {"b"}}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("records", "import numpy"), ("engine.local", "from ppo_cli.algo.losses import x"),
        ("loop", "from ppo_cli.engine.base import Engine"),
        ("rewards.rules", "def f():\n    import sympy"),
        ("cli.train", "def f():\n    from ppo_cli.run.assemble import build"),
        ("cli.train", "if TYPE_CHECKING:\n    from ppo_cli.run.assemble import x"),
    ],
)  # fmt: skip
def test_imports_that_go_down_are_allowed(module: str, source: str) -> None:
    assert breaches(module, source) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.local", "from ppo_cli.rewards.base import Reward"),
        ("engine.local", "def f():\n    from ppo_cli import loop"),
        ("loop", "from ppo_cli.engine.learner import LocalEngine"),
        ("config.schema", "def f():\n    import torch"), ("rewards.rules", "import sympy"),
        ("rewards.rules", "import importlib\nimportlib.import_module('torch')"),
        ("cli.train", "from ppo_cli.run.assemble import build"),
        ("cli.train", "if TYPE_CHECKING:\n    from ppo_cli.engine.base import x"),
        ("run.evaluate", "from ppo_cli.extras.lab.calibrate import calibrate"),
        ("extras.migrate.flags", "from ppo_cli.extras.lab import cascade"), ("attic", ""),
    ],
)  # fmt: skip
def test_breaches_are_seen(module: str, source: str) -> None:
    assert breaches(module, source)
