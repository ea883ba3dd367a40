"""Settings as a run resolves them, from what a test gives, on a machine without a GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ppo_cli.config.schema.keys import nest_values, table
from ppo_cli.config.schema.run import Config
from ppo_cli.config.schema.values import read_value
from ppo_cli.errors import ConfigError
from ppo_cli.machine.machine import Machine
from ppo_cli.planning.findings.devices import device_remarks
from ppo_cli.planning.findings.rules import find_findings, list_texts
from ppo_cli.planning.findings.scene import Scene
from ppo_cli.planning.findings.unused import find_unused
from ppo_cli.planning.resolve import resolve
from ppo_cli.planning.resolved import Resolved
from tests.settings import CPU, complete

ENV = {"MODEL_PATH": "some/model", "CUDA_VISIBLE_DEVICES": ""}


def settle(
    *overrides: str,
    flags: Mapping[str, tuple[object, str]] | None = None,
    mix: tuple[str, ...] = (),
    file: str = "",
    preset: str | None = None,
    files: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    machine: Machine | None = None,
) -> Resolved:
    """Resolve flags (those of `--reward` are `mix`), a reward file, files and overrides."""
    all_flags = dict(flags or {})
    if mix:
        all_flags["reward.parts"] = (mix, "flag --reward")
    if file:
        all_flags["reward.config_file"] = (file, "flag --reward_config")
    return resolve(
        flags=all_flags, preset=preset, config_files=files, overrides=overrides,
        environ=ENV | dict(env or {}), machine=machine,
    )  # fmt: skip


def problems(*overrides: str, **layers: Any) -> tuple[str, ...]:
    """All that is wrong with settings; () when they are accepted."""
    try:
        settle(*overrides, **layers)
    except ConfigError as error:
        return error.problems
    return ()


def remarks(resolved: Resolved, environ: Mapping[str, str] = os.environ) -> list[str]:
    """What may surprise, and settings of files and presets without effect."""
    return list_texts(find_findings(resolved, environ), "no_effect", "remark")


def refusals(resolved: Resolved, environ: Mapping[str, str] = os.environ) -> list[str]:
    """What keeps a run from starting here."""
    return list_texts(find_findings(resolved, environ), "refuse", "missing", "elsewhere")


def unused(resolved: Resolved) -> tuple[list[str], list[str]]:
    """Settings without effect: those that are refused, and those that are only remarked on."""
    findings = list(find_unused(resolved))
    return list_texts(findings, "refuse"), list_texts(findings, "no_effect")


def device_notes(resolved: Resolved, environ: Mapping[str, str]) -> list[str]:
    """Remarks on devices."""
    return list(device_remarks(Scene(resolved, environ)))


def written(text: str) -> str:
    """Write a reward file into the folder where the test is, and return its name."""
    Path("r.yaml").write_text(text, encoding="utf-8")
    return "r.yaml"


def unchecked(overrides: str, machine: Machine = CPU) -> Config:
    """Complete settings that no check has seen."""
    pairs = (override.partition("=") for override in overrides.split())
    values = {name: read_value(table()[name], raw) for name, _, raw in pairs}
    return complete(nest_values(values), machine)


def load_table(name: str) -> Any:
    """Return a YAML file of cases next to the tests."""
    return yaml.safe_load((Path(__file__).parent / name).read_text(encoding="utf-8"))
