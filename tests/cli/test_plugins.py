"""Plug-ins: the package of docs/plugins.md, installed, and packages that clash or do not load."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from ppo_cli import plan, train
from ppo_cli.cli.app import main
from ppo_cli.cli.train import _check_reward
from ppo_cli.config.schema.keys import describe_range, table
from ppo_cli.environments.pool import EnvironmentPool, check_environment
from ppo_cli.errors import ConfigError, RewardError
from ppo_cli.plugins import read_metadata
from ppo_cli.rewards.function import check_callable
from ppo_cli.rewards.rules import get_rule
from ppo_cli.run.identity import describe_changes, setting_values
from tests.environments.conftest import ROW
from tests.settings import complete, complete_environment

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")


def install(site: Path, name: str, points: Mapping[str, Mapping[str, str]]) -> None:
    """Write the metadata of an installed package."""
    info = site / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    groups = (
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in names.items())
        for group, names in points.items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))


@pytest.fixture
def site(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's package, as `pip install` leaves it."""
    site = desk / "site"
    project = tomllib.loads(re.findall(r"^```toml\n(.*?)^```", PAGE, re.S | re.M)[0])["project"]
    install(site, project["name"], project["entry-points"])
    modules = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
    for name, text in zip(("acme_ppo", "acme_commands", "acme_judge"), modules, strict=True):
        (site / f"{name}.py").write_text(text)
    # For this process and those that it starts.
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{ROOT}")
    read_metadata.cache_clear()
    yield site
    read_metadata.cache_clear()


@pytest.mark.slow
def test_the_package_of_the_page_adds_its_names(site: Path) -> None:
    run = train(
        preset="embedded", max_steps=1, batch_size=8, mini_batch_size=8, rule="acme_short",
        policy_loss="acme_reinforce", adv_estimator="acme_centred", output_dir="run",
        overrides={"reward.function_kwargs.most": 2},
    )  # fmt: skip
    step = run.metrics.loc[1]
    assert step["grad_norm"] > 0 and "values/mean" not in step and 0 < step["reward_mean"] <= 1
    forecast = plan(
        preset="judge", rm_api_type="acme", train_files=["embedded"], rm_price_input=1,
        rm_price_output=4,
    )  # fmt: skip
    assert forecast.values["reward.api.type"][0] == "acme"
    # A file that the module opens when it is imported stays open in its episodes.
    module = site / "acme_ppo.py"
    text = module.read_text().replace("return [], True", "OPENED.read(); return [], True")
    module.write_text(f"{text}\nOPENED = open(__file__)\n")
    with closing(EnvironmentPool(complete_environment(path="acme_echo", num_workers=1))) as pool:
        pool.start()
        pool.reset("a", ROW).result(60)
        assert pool.step("a", {"role": "assistant", "content": "x"}).result(60).done


def test_names_are_offered_and_problems_name_the_package(site: Path) -> None:
    # Another version of the package makes another run.
    identity = setting_values(complete({"algorithm": {"adv_estimator": "acme_centred"}}))
    assert identity["plugins"] == {"acme-ppo": "0.1"}
    changes = describe_changes(identity | {"plugins": {"acme-ppo": "0.0"}}, identity)
    assert changes == "plugins.acme-ppo (was 0.0, now 0.1)"
    install(site, "other", {
        "ppo_cli.losses": {"acme_reinforce": "acme_ppo:reinforce", "gspo": "acme_ppo:reinforce"},
        "ppo_cli.estimators": {"broken": "no_such_module:x", "unfit": "acme_ppo:short"},
    })  # fmt: skip
    read_metadata.cache_clear()
    for settings, *expected in [
        (
            {"policy_loss": "gspo", "adv_estimator": "broken", "rm_api_type": "acne"},
            "in ppo-cli and the package other: uninstall",
            "the package other (no_such_module:x) does not load: ModuleNotFoundError",
            "Did you mean 'acme'?",
        ),
        (
            {"policy_loss": "acme_reinforce", "adv_estimator": "unfit"},
            "in the package acme-ppo and the package other",
            "estimator unfit: 'reply' is not an input.",
        ),
    ]:
        with pytest.raises(ConfigError) as caught:
            plan(preset="embedded", **settings)
        text = str(caught.value)
        assert [words for words in expected if words not in text] == [], text
    with pytest.raises(RewardError, match="Did you mean 'acme_short'"):
        get_rule("acme_shrt")
    with pytest.raises(ConfigError, match="Did you mean 'acme_echo'"):
        check_environment(complete_environment(path="acme_ecko"))
    assert "acme_reinforce" in describe_range(table()["actor.policy_loss.loss_mode"])


def test_a_package_adds_commands(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "other", {
        "ppo_cli.commands": {
            "reward.acme-greet": "acme_ppo:greet", "train": "acme_ppo:greet",
            "broken": "no_such_module:x",
        },
    })  # fmt: skip
    read_metadata.cache_clear()
    # The help lists them, and imports no app; a command that does not load stops no other.
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^Plug-ins:\n +acme-greet +Say hello\.\n +broken .*", out, re.M), out
    assert "acme_commands" not in sys.modules
    assert main(["reward", "--help"]) == 0 and "Say hello." in capsys.readouterr().out
    for line in (["acme-greet", "Ada"], ["reward", "acme-greet", "Ada"]):
        assert main(line) == 0 and capsys.readouterr().out == "Hello, Ada\n"
    for name, problem in (("broken", "does not load"), ("train", "in ppo-cli and the package")):
        assert main([name]) == 2 and problem in capsys.readouterr().err


def test_a_check_of_a_reward_that_fails_is_a_warning(site: Path) -> None:
    # The function of a rule takes other arguments.
    install(site, "other", {"ppo_cli.reward_checks": {"acme": "acme_ppo:short", "lost": "no:x"}})
    read_metadata.cache_clear()
    warnings = [text for text in _check_reward(complete({}).reward) if text]
    assert [re.findall("'(acme|lost)'", text) for text in warnings] == [["acme"], ["lost"]]


READER = """
from ppo_cli.config.layers import Entry
from ppo_cli.plugins import Line, Reader

reader = Reader(line="acme_lines:read_line", layers="acme_lines:read_layers")


def read_line(args):
    return Line([a.replace("--acme_rate", "--lr") for a in args], ["acme's line."])


def read_layers(layers, environ):
    for layer in layers.layers:
        for at, entry in enumerate(layer):
            name = entry.name.replace("acme.steps", "trainer.total_training_steps")
            layer[at] = Entry(name, entry.raw, entry.origin)
"""


def test_a_package_reads_what_was_written_for_another_program(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "other", {
        "ppo_cli.readers": {"acme": "acme_lines:reader", "broken": "no_such_module:x"},
    })  # fmt: skip
    (site / "acme_lines.py").write_text(READER)
    read_metadata.cache_clear()
    line = ["plan", "--preset", "embedded", "--acme_rate", "0.5", "acme.steps=3", "--json"]
    assert main(line) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["values"]["actor.optim.lr"] == {"value": 0.5, "origin": "flag --lr"}
    assert planned["values"]["trainer.total_training_steps"]["value"] == 3
    # One that does not load is a note, so that other lines work.
    notes = " ".join(planned["notes"])
    assert "acme's line." in notes and "'broken' of the package other" in notes


def test_forms_of_rewards_that_are_none_stop_only_functions_that_need_them(site: Path) -> None:
    install(site, "other", {"ppo_cli.reward_forms": {"acme": "acme_ppo:short"}})
    read_metadata.cache_clear()
    check_callable(lambda solution_str, ground_truth, **kwargs: 1.0, {})
    check_callable(lambda **kwargs: 1.0, {})
    with pytest.raises(ConfigError, match=r"'acme' of the package other .* not a tuple of"):
        check_callable(lambda completions: [1.0], {})
