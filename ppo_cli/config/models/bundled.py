"""Files that ship with the program: small model, prompts, presets, judge prompts.

In a source tree, presets and judge prompts are at the top; in an installed wheel, in the package.
In settings, `embedded` means the bundled model or prompt set, `one-digit-sums` a smaller prompt
set, and `embedded-tools` the model, prompts and tools of a game with a tool.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from ppo_cli.errors import ConfigError, did_you_mean

EMBEDDED = "embedded"
EMBEDDED_TOOLS = "embedded-tools"
ONE_DIGIT = "one-digit-sums"
PACKAGE = Path(__file__).resolve().parents[2]
MODELS = {EMBEDDED: ("embedded", "model"), EMBEDDED_TOOLS: ("embedded", "tools", "model")}


def bundled_path(*parts: str) -> Path:
    """Return the path of a bundled file or folder, such as `presets` or `embedded/model`."""
    inside = PACKAGE.joinpath(*parts)
    beside = PACKAGE.parent.joinpath(*parts)
    return inside if inside.exists() or not beside.exists() else beside


def model_folder(path: str) -> str:
    """Return the folder or hub name of `model.path`, which may be a bundled model's name."""
    return str(bundled_path(*MODELS[path])) if path in MODELS else path


def tools_file(path: str) -> str:
    """Return the file of `environment.tools`; `embedded-tools` means the bundled one."""
    return str(bundled_path("embedded", "tools", "multiply.py")) if path == EMBEDDED_TOOLS else path


def prompt_files(files: Iterable[str], split: Literal["train", "val"]) -> tuple[str, ...]:
    """Return prompt files, with names of bundled sets replaced by their file of this split."""
    bundled = {
        EMBEDDED: bundled_path("embedded", f"{split}.jsonl"),
        ONE_DIGIT: bundled_path("embedded", f"one-digit-sums.{split}.jsonl"),
        EMBEDDED_TOOLS: bundled_path("embedded", "tools", f"{split}.jsonl"),
    }
    return tuple(str(bundled.get(name, name)) for name in files)


def preset_names() -> tuple[str, ...]:
    """Return the names of the bundled presets."""
    return tuple(sorted(p.stem for p in bundled_path("presets").glob("*.yaml")))


def preset_path(name: str) -> Path:
    """Return the file of a preset; an unknown name is refused with the nearest one."""
    names = preset_names()
    chosen = ALIASES.get(name, name)
    if chosen in names:
        return bundled_path("presets") / f"{chosen}.yaml"
    # The nearest alias, the only preset that contains the name, or the nearest preset.
    part_of = [preset for preset in names if name and name in preset]
    if near := did_you_mean(name, ALIASES):
        hint = near
    elif len(part_of) == 1:
        hint = f" Did you mean '{part_of[0]}'?"
    elif not part_of and (near := did_you_mean(name, [*names, *ALIASES])):
        hint = near
    else:
        hint = f" Known: {', '.join(part_of or names)}."
    if name.endswith((".yaml", ".yml")) or "/" in name:
        hint = f" Name a file with --config {name}."
    raise ConfigError(f"there is no preset '{name}'.{hint}")


# Short names of presets.
ALIASES = {"gsm8k": "gsm8k-qwen2.5-0.5b", "7b": "qwen2.5-7b-8gpu", "lora": "lora-low-memory"}
