"""List the flags of releases of TRL and OpenRLHF, and those that flags.toml does not know.

    pip download --no-deps trl==1.16.0 openrlhf==0.11.2
    python scripts/list_foreign_flags.py trl-*.whl openrlhf-*.whl [--write]

`--write` keeps the names for the tests, in tests/extras/migrate/foreign_releases.json.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ppo_cli.extras.migrate.flags import find_name, is_known

RELEASES = Path(__file__).parents[1] / "tests" / "extras" / "migrate" / "foreign_releases.json"
# Files of a wheel whose classes or parsers declare flags of PPO and its relatives.
SOURCES = (
    "cli/train_ppo_ray.py",
    "trl/trainer/grpo_config.py",
    "ppo/ppo_config.py",
    "trainer/model_config.py",
)


def list_flags(source: str) -> Iterator[str]:
    """Yield the names of `add_argument` calls and of dataclass fields.

    A call in a loop over prefixes, `add_argument(f"--{prefix}.lr")`, is read once for each.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            name = node.args[0]
            if isinstance(name, ast.Constant):
                yield str(name.value).removeprefix("--")
            elif isinstance(name, ast.JoinedStr):
                for prefix in ("actor", "critic"):
                    parts = [
                        p.value if isinstance(p, ast.Constant) else prefix for p in name.values
                    ]
                    yield "".join(map(str, parts)).removeprefix("--")
        elif isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id


def read_wheel(wheel: Path) -> list[str]:
    """Return the flags that a wheel declares, sorted."""
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if name.endswith(SOURCES)]
        return sorted({flag for name in files for flag in list_flags(archive.read(name).decode())})


def main() -> None:
    """Print the unknown flags of each wheel; with --write keep all names."""
    wheels = [Path(word) for word in sys.argv[1:] if word != "--write"]
    releases = {" ".join(wheel.name.split("-")[:2]): read_wheel(wheel) for wheel in wheels}
    for release, flags in releases.items():
        unknown = [flag for flag in flags if not is_known(find_name(flag))]
        print(f"{release}: {len(flags)} flags, unknown: {', '.join(unknown) or 'none'}")
    if "--write" in sys.argv:
        RELEASES.write_text(json.dumps(releases, indent=1) + "\n")


if __name__ == "__main__":
    main()
