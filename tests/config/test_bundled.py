"""Presets and other files that ship with the program; GPUs that are there."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from ppo_cli.cli.app import main
from ppo_cli.config.models import bundled
from ppo_cli.config.schema.run import Config
from ppo_cli.planning.run_plan import make_plan
from tests.config.settling import settle


@pytest.mark.parametrize("name", [*bundled.preset_names(), *bundled.ALIASES])
def test_a_preset_resolves_and_is_commented(name: str) -> None:
    resolved = settle(preset=name, env={"MODEL_PATH": ""})
    assert any(origin.startswith(f"preset {name} line") for origin in resolved.origins.values())
    text = bundled.preset_path(name).read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert sum("#" in line for line in text.splitlines()) >= 3


def test_an_editor_finds_the_schema_of_a_preset_and_of_its_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["presets", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    check = jsonschema.Draft202012Validator(schema)
    jsonschema.Draft202012Validator.check_schema(schema)
    for name in bundled.preset_names():
        path = bundled.preset_path(name)
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        named = path.parent / first.removeprefix("# yaml-language-server: $schema=")
        assert json.loads(named.read_text(encoding="utf-8")) == schema
        check.validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert main(["presets", "copy", "embedded", str(tmp_path / "mine.yaml")]) == 0
    first = (tmp_path / "mine.yaml").read_text(encoding="utf-8").partition("\n")[0]
    assert json.loads(Path(first.partition("=")[2]).read_text(encoding="utf-8")) == schema
    # Unset settings that have a rule are null.
    check.validate(Config().model_dump(mode="json"))
    for wrong in ({"actor": {"clip_ratios": 1}}, {"rollout": {"n": 0}}, {"modl": {}}):
        assert not check.is_valid(wrong)


@pytest.mark.parametrize(
    ("name", "gpus", "where", "settings"),
    [
        ("qwen2-7b-dynamic", 8, "8 learner ranks on GPUs 0-7, 4 samplers of 2 GPUs",
         {"model.packing": True, "actor.ppo_max_token_len_per_gpu": 24000,
          "data.train_batch_size": 4096}),
        ("reward-model", 8, "reward models on GPU 7 (shares 7 with training and 7 with sampling)",
         {"reward.model.path": "RLHFlow/ArmoRM-Llama3-8B-v0.1"}),
        ("gemma-2-2b", 2, "2 learner ranks on GPUs 0-1, 1 sampler of 2 GPUs",
         {"model.path": "google/gemma-2-2b-it", "actor.ppo_mini_batch_size": 128}),
    ],
)  # fmt: skip
def test_a_preset_for_gpus_plans_and_says_that_it_is_not_measured(
    name: str, gpus: int, where: str, settings: dict[str, object]
) -> None:
    resolved = settle(preset=name, env={"MODEL_PATH": ""})
    plan = make_plan(resolved).as_dict()
    assert {key: plan["values"][key]["value"] for key in settings} == settings
    assert where in " ".join(plan["placement"]["sentences"])
    assert len(plan["placement"]["train"]) == gpus
    head = bundled.preset_path(name).read_text(encoding="utf-8").split("\nmodel:")[0]
    assert "not measured yet" in head.replace("\n# ", " ")


def test_bundled_files_lie_inside_the_package_or_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "ppo_cli"
    monkeypatch.setattr(bundled, "PACKAGE", package)
    (tmp_path / "presets").mkdir()
    assert bundled.bundled_path("presets") == tmp_path / "presets"
    (package / "presets").mkdir(parents=True)
    assert bundled.bundled_path("presets") == package / "presets"


def test_embedded_stands_for_the_bundled_model_and_prompts() -> None:
    assert bundled.model_folder("a/b") == "a/b"
    assert Path(bundled.model_folder("embedded")).parts[-2:] == ("embedded", "model")
    files = bundled.prompt_files(["embedded", "x.jsonl"], "val")
    assert Path(files[0]).name == "val.jsonl"
    assert files[1] == "x.jsonl"
