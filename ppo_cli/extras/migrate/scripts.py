"""Reads what Python scripts of TRL and Unsloth set inside; nothing in them runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ppo_cli.paths import user_path

# Calls whose keywords are flags of TRL, and other names for some of these keywords.
CALLS = ("Config", "Arguments", "Trainer", "from_pretrained", "get_peft_model", "load_dataset")
KEYWORDS = {
    "r": "lora_r",
    "load_dataset.split": "dataset_train_split",
    "model": "model_name_or_path",
}
# Positional arguments of calls that have some.
POSITIONS = {
    "from_pretrained": ("model_name_or_path",),
    "load_dataset": ("dataset_name", "dataset_config"),
}
METHODS = ("grpo", "rloo", "ppo")


def read_script(path: str) -> tuple[str, list[tuple[str, list[str]]]]:
    """Return the method of a script ("" if none shows), and its settings as flags with values.

    Only constants are read, and the names of reward functions: naming the script as their file
    would run it, so they have FILE.py as a placeholder.
    """
    try:
        tree = ast.parse(user_path(path).read_text("utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return "", []
    method, flags = "", {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            call = getattr(node.func, "attr", getattr(node.func, "id", ""))
            method = next((m for m in METHODS if call.lower().startswith(m)), method)
            if call.endswith(CALLS) and "Tokenizer" not in ast.dump(node.func):
                for name, value in _list_arguments(call, node):
                    if words := list(_read_values(value, names=name == "reward_funcs")):
                        flags[KEYWORDS.get(f"{call}.{name}", KEYWORDS.get(name, name))] = words
    return method, [(f"--{name}", words) for name, words in flags.items()]


def _list_arguments(call: str, node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yield the arguments of a call by their names."""
    yield from zip(POSITIONS.get(call, ()), node.args, strict=False)
    yield from ((keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg)


def _read_values(value: ast.expr, *, names: bool) -> Iterator[str]:
    """Yield the constants of an argument, and with `names` those of functions."""
    for item in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
        if isinstance(item, ast.Constant) and item.value is not None:
            yield str(item.value)
        elif isinstance(item, ast.UnaryOp) and isinstance(item.operand, ast.Constant):
            yield f"-{item.operand.value!r}"
        elif names and isinstance(item, ast.Name):
            yield f"FILE.py:{item.id}"
