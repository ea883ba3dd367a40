"""Tiny models of many families, trained by `ppo train` and compared with transformers.

The oracle is scripts/families/oracle.py. PPO_SWEEP=1 adds all families with all checks.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest
from families.configs import FAMILIES

from tests.forked import ROOT, run_forked
from tests.marks import quick_only

# One of each kind: dense, experts and sinks, states, experts, windows, learned positions, latent
# attention, mixed layers, shared caches, fused projections, ALiBi, states beside attention. The
# others are weekly.
COMPARED = (
    "llama", "gpt_oss", "mamba2", "qwen3_moe", "gemma3", "gpt2", "deepseek_v3", "qwen3_5",
    "gemma4_text", "phi3", "bloom", "falcon_h1",
)  # fmt: skip
PROGRAM = """
import dataclasses, json, sys
scripts, family, checks = sys.argv[1:]
sys.path.insert(0, scripts)
from families.checks import check_family
outcome = check_family(family, quick=checks == "quick")
print("\\n" + json.dumps(dataclasses.asdict(outcome) | {"passes": outcome.passes}))
"""


def outcome_of(family: str, checks: str) -> dict[str, Any]:
    done = run_forked([str(ROOT / "scripts"), family, checks], os.environ, 600, PROGRAM)
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome


@pytest.mark.parametrize("family", quick_only(COMPARED, "llama"))
def test_sampler_annotation_update_and_critic_are_those_of_transformers(family: str) -> None:
    outcome = outcome_of(family, "quick")
    assert outcome["passes"], outcome


def test_page_names_each_family() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)` [\d.]+e-\d+", page)
    assert sorted(named) == sorted(FAMILIES)


@pytest.mark.weekly
@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_as_its_row_in_the_page_says(family: str) -> None:
    """Families that pass, and those that are refused, stay so."""
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    outcome = outcome_of(family, "all")
    assert outcome["passes"] == (f"- `{family}`: " not in page), outcome
