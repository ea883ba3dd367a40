"""Settings for the tests of the bridge: every preset, and configurations drawn at random."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppo_cli.config.schema.keys import Key, offered_choices, table
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import ConfigError
from ppo_cli.extras.migrate.bridge.folder import write_folder
from ppo_cli.extras.migrate.bridge.overrides import OUR_ENGINE_ONLY, REFUSED, build_overrides
from ppo_cli.planning.resolve import resolve
from tests.scoring.scripted import write_rows

# The model is one that is here, since verl's own checks load its tokenizer.
GPUS = (
    "trainer.n_gpus_per_node=8", "trainer.engine=verl", "data.train_files=p.jsonl",
    "model.path=embedded", "critic.model.path=null",
)  # fmt: skip
# Values to draw, but for free text. Rewards are not drawn: they go to verl as a file of ours.
NUMBERS: dict[str, list[Any]] = yaml.safe_load(Path(__file__).with_name("drawn.yaml").read_text())


def settled(*overrides: str, preset: str | None = None, **flags: Any) -> Config:
    """What was set, resolved as `ppo bridge verl` does."""
    arguments = {name: (value, "drawn") for name, value in flags.items()}
    return resolve(
        flags=arguments, preset=preset, config_files=[], overrides=[*GPUS, *overrides], environ={}
    ).requested


def write_judged_run(folder: Path, rows: list[dict[str, Any]], url: str, *overrides: str) -> None:
    """Write the folder of a run on one GPU that trains on these rows, with a judge at `url`."""
    base = (
        f"data.train_files={write_rows(folder / 'rows.jsonl', *rows)}", "model.path=embedded",
        "trainer.engine=verl", "trainer.n_gpus_per_node=1", "reward.api.enable=true",
        "reward.api.type=openai", "reward.api.model=m", f"reward.api.base_url={url}",
        "reward.api.cache=off",
    )  # fmt: skip
    resolved = resolve(
        flags={}, preset=None, config_files=[], overrides=[*base, *overrides], environ={}
    )
    bridged = build_overrides(resolved.requested, resolved.machine)
    assert bridged.problems == ()
    write_folder(folder, resolved, bridged)


def choices(key: Key) -> list[Any]:
    """Return values to draw from: words that work, both switches, or the numbers above."""
    if key.name in NUMBERS:
        return NUMBERS[key.name]
    if key.kind is bool:
        return [True, False]
    return [] if key.is_list else list(offered_choices(key.choices))


FIXED = ("reward.", "trainer.engine", "trainer.logger", "rollout.name", "rollout.weight_transfer")


def drawn(seed: int) -> Config:
    """Draw a configuration that holds together; each setting is changed one time in three."""
    dice = random.Random(seed)
    while True:
        flags: dict[str, Any] = {}
        for name, key in table().items():
            apart = name in REFUSED or name in OUR_ENGINE_ONLY or name.startswith(FIXED)
            if (name in NUMBERS or not apart) and choices(key) and dice.random() < 1 / 3:
                value = dice.choice(choices(key))
                if value is not None or key.optional:
                    flags[name] = value
        try:
            return settled(**flags)
        except ConfigError as error:  # a clash: draw again
            assert "there is no setting" not in str(error)


def verl_config_dir() -> str:
    """The folder of verl's own Hydra files; without verl the test is skipped."""
    pytest.importorskip("hydra", reason="verl 0.9.1's Hydra files are not here")
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        pytest.skip("verl 0.9.1 is not installed here; see the oracle extra")
    return str(Path(spec.origin).parent / "trainer" / "config")
