"""Writes verl_defaults.json: what verl's own YAML sets, by version, and what its engines add.

Run: python scripts/write_verl_defaults.py VERSION=FOLDER… with the folders of verl's source (its
verl/trainer/config is read). A later version has what changed; a setting that follows another has
that one's value. `engines` has the values of settings that no version has for FSDP: those of
Megatron, VeOmni and TorchTitan, and of profilers.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

OUT = Path(__file__).parents[1] / "ppo_cli/extras/migrate/verl/verl_defaults.json"
# Settings of other programs, which verl.toml refuses by their group.
ELSEWHERE = (
    "megatron", "npu_profile", "nsight", "profiler", "torchtitan", "turbo_config", "veomni",
)  # fmt: skip


def settings(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Give each setting by its dotted name."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def comes_to(value: Any, name: str, found: dict[str, Any]) -> Any:
    """Return what a setting comes to; `???` is for the user to set."""
    follows = re.fullmatch(r"\$\{(?:oc\.select:|oc\.env:)?([\w.]*)(?:,\s*(.*))?\}", str(value))
    if follows is None:
        return value
    path = f"{name.rpartition('.')[0]}{follows[1]}" if follows[1][:1] == "." else follows[1]
    if path in found:
        return comes_to(found[path], path, found)
    return "???" if follows[2] is None else comes_to(yaml.safe_load(follows[2]), name, found)


def read(path: Path) -> dict[str, Any]:
    """Return the settings of one file; those of Hydra are no settings of verl."""
    found = dict(settings(yaml.safe_load(path.read_text(encoding="utf-8"))))
    kept = [name for name in found if "_target_" not in name and not name.startswith("hydra")]
    return {name: comes_to(found[name], name, found) for name in kept if name != "defaults"}


def main() -> None:
    """Write the file."""
    before: dict[str, Any] = {}
    written: dict[str, dict[str, Any]] = {}
    engines: dict[str, list[Any]] = defaultdict(list)
    for word in sys.argv[1:]:
        version, _, folder = word.partition("=")
        config = Path(folder) / "verl" / "trainer" / "config"
        wholes = sorted(config.glob("_generated_ppo_*.yaml")) or sorted(config.glob("ppo_*.yaml"))
        fsdp = next(path for path in wholes if path.name.endswith("ppo_trainer.yaml"))
        now = {k: v for k, v in read(fsdp).items() if not any(word in k for word in ELSEWHERE)}
        for path in wholes:
            for name, value in read(path).items():
                if value not in engines[name]:
                    engines[name].append(value)
        changed = {k: v for k, v in now.items() if k not in before or before[k] != v}
        written[version] = {"set": changed, "gone": sorted(before.keys() - now.keys())}
        before = now
    for row in written.values():
        for name in row["set"]:
            engines.pop(name, None)
    lines = json.dumps({"versions": written, "engines": engines}, indent=0, sort_keys=True)
    OUT.write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
