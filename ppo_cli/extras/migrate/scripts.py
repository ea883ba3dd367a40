"""Reads what Python scripts of TRL and Unsloth set inside; nothing in them runs."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping

from ppo_cli.paths import read_text, user_path

# Calls whose keywords are flags of TRL, some of them classes whose attributes are flags as well,
# and other names for some of these keywords.
CLASSES = ("Config", "Arguments")
CALLS = (
    *CLASSES, "Trainer", "from_pretrained", "get_peft_model", "load_dataset",
    "get_model_and_tokenizer",
)  # fmt: skip
KEYWORDS = {
    "r": "lora_r",
    "load_dataset.split": "dataset_train_split",
    "model": "model_name_or_path",
}
# Positional arguments of calls that have some.
POSITIONS = {
    "from_pretrained": ("model_name_or_path",),
    "get_model_and_tokenizer": ("model_name_or_path",),
    "load_dataset": ("dataset_name", "dataset_config"),
}
# How objects are named whose attributes are flags.
OBJECTS = ("args", "config", "cfg")
BUILT_ROWS = "rows.jsonl"  # what stands for rows that a script builds with map()
METHODS = ("grpo", "rloo", "ppo")
# Libraries that a script may import, the most telling one first.
LIBRARIES = {"unsloth": "Unsloth", "verifiers": "verifiers", "trl": "TRL"}


def read_script(path: str) -> tuple[str, str, list[tuple[str, list[str]]]]:
    """Return the library and the method of a script ("" if none shows), and its flags with values.

    Only constants are read, and the names of reward functions: naming the script as their file
    would run it, so they have FILE.py as a placeholder.
    """
    try:
        tree = ast.parse(read_text(user_path(path)))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return "", "", []
    method, flags, values = "", {}, _find_constants(tree)
    imported, maps_rows = set[str](), False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            imported |= {module.partition(".")[0] for module in modules}
        if isinstance(node, ast.Call):
            call = getattr(node.func, "attr", getattr(node.func, "id", ""))
            maps_rows |= call == "map" and isinstance(node.func, ast.Attribute)
            method = next((m for m in METHODS if call.lower().startswith(m)), method)
            if call.endswith(CALLS) and "Tokenizer" not in ast.dump(node.func):
                for name, value in _list_arguments(call, node):
                    if constants := list(_read_values(value, values, name == "reward_funcs")):
                        flags[KEYWORDS.get(f"{call}.{name}", KEYWORDS.get(name, name))] = constants
    flags |= _read_assignments(tree, values)
    if files := flags.pop("data_files", None):  # load_dataset("json", data_files=…)
        flags["dataset_name"] = files
    if "dataset_name" in flags and maps_rows:
        flags = {name: v for name, v in flags.items() if not name.startswith("dataset_")}
        flags["train_files"] = [BUILT_ROWS]
    library = next((LIBRARIES[name] for name in LIBRARIES if name in imported), "")
    return library, method, [(f"--{name}", constants) for name, constants in flags.items()]


def _find_constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the constants that the file gives a name, once."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    names = Counter(ast.unparse(target) for node in nodes for target in node.targets)
    values = {ast.unparse(node.targets[0]): node.value for node in nodes}
    return {n: v for n, v in values.items() if names[n] == 1 and isinstance(v, ast.Constant)}


def _read_assignments(tree: ast.Module, values: Mapping[str, ast.expr]) -> dict[str, list[str]]:
    """Return what is set later on objects that hold flags, as in `args.learning_rate = 1e-6`.

    Such an object has a name that ends in one of OBJECTS, or is made by one of CLASSES.
    """
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    assignments.sort(key=lambda node: node.lineno)  # the last one counts, at any depth
    objects, flags = set(), {}
    for node in assignments:
        target = node.targets[0]
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Call):
            if ast.unparse(node.value.func).endswith(CLASSES):
                objects.add(target.id)
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            name = target.value.id
            constants = list(_read_values(node.value, values))
            if constants and (name in objects or name.lower().endswith(OBJECTS)):
                flags[KEYWORDS.get(target.attr, target.attr)] = constants
    return flags


def _list_arguments(call: str, node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yield the arguments of a call by their names."""
    yield from zip(POSITIONS.get(call, ()), node.args, strict=False)
    yield from ((keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg)


def _read_values(
    value: ast.expr, values: Mapping[str, ast.expr], functions: bool = False
) -> Iterator[str]:
    """Yield the constants of an argument, also by name, and those of `functions` with a file."""
    for element in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
        item = values.get(ast.unparse(element), element)
        if isinstance(item, ast.Constant) and item.value is not None:
            yield str(item.value)
        elif isinstance(item, ast.UnaryOp) and isinstance(item.operand, ast.Constant):
            yield f"-{item.operand.value!r}"
        elif functions and isinstance(item, ast.Name):
            yield f"FILE.py:{item.id}"
