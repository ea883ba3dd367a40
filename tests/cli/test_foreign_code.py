"""Code that comes with a run folder runs only for those who allow it in the command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import dynamic_module_utils

from ppo_cli.cli.app import main
from ppo_cli.config.models.bundled import model_folder, prompt_files
from ppo_cli.errors import ConfigError
from ppo_cli.planning.resolve import resolve
from ppo_cli.planning.resolved import Resolved
from ppo_cli.run_folder.checkpoints import FORMAT

ROWS = Path(prompt_files(["embedded"], "val")[0]).read_text().splitlines()[:4]
ALLOW = "model.trust_remote_code=true"
# Its first line leaves a mark where the command runs.
CODE = """
from pathlib import Path
Path("ran").touch()
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification
from transformers import Qwen2ForTokenClassification

class ForeignConfig(Qwen2Config):
    model_type = "foreign"

class ForeignModel(Qwen2ForCausalLM):
    config_class = ForeignConfig

class ForeignScore(Qwen2ForSequenceClassification):
    config_class = ForeignConfig

class ForeignValue(Qwen2ForTokenClassification):
    config_class = ForeignConfig
"""
AUTO_MAP = {
    "AutoConfig": "foreign.ForeignConfig",
    "AutoModel": "foreign.ForeignModel",
    "AutoModelForCausalLM": "foreign.ForeignModel",
    "AutoModelForSequenceClassification": "foreign.ForeignScore",
    "AutoModelForTokenClassification": "foreign.ForeignValue",
}
CONFIG = {
    "model": {"path": "RUN/checkpoints/step_000001/actor", "trust_remote_code": True},
    "data": {
        "train_files": ["rows.jsonl"], "val_files": ["rows.jsonl"], "train_batch_size": 4,
        "max_response_length": 4,
    },
    "actor": {"ppo_mini_batch_size": 4},
    "reward": {"rule": "exact", "code": {"allow_unsandboxed": True}},
    "trainer": {"total_training_steps": 2, "old_setting": 1},
}  # fmt: skip


def bring_code(folder: Path) -> None:
    """Let a model folder bring the code of its class."""
    (folder / "foreign.py").write_text(CODE)
    for name, settings in (
        ("config.json", {"auto_map": AUTO_MAP, "model_type": "foreign"}),
        ("tokenizer_config.json", {}),
    ):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | settings))


def adapter_of(base: str) -> str:
    return json.dumps(
        {"base_model_name_or_path": base, "peft_type": "LORA", "task_type": "CAUSAL_LM"}
    )


def resolve_over(run: Path, files: Sequence[Path] = (), *overrides: str) -> Resolved:
    return resolve(
        flags={}, preset=None, config_files=files, overrides=overrides, environ={}, run=run
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another user's run folder: its models bring code, and its settings allow it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    run = Path("theirs")
    actor, scorer = run / "checkpoints" / "step_000001" / "actor", run / "scorer"
    shutil.copytree(model_folder("embedded"), actor)
    bring_code(actor)
    shutil.copytree(actor, scorer)
    tensors = load_file(scorer / "model.safetensors")
    tensors["score.weight"] = torch.zeros(1, tensors["model.norm.weight"].numel())
    save_file(tensors, scorer / "model.safetensors", metadata={"format": "pt"})
    adapter = run / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(adapter_of(str(actor)))
    state = {"format": FORMAT, "run": {"step": 1}, "order": {}, "reward": {}, "fingerprint": {}}
    (actor.parent / "state").mkdir()
    (actor.parent / "state" / "run.json").write_text(json.dumps(state))
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / "config.yaml").write_text(yaml.safe_dump(CONFIG).replace("RUN", str(run)))
    Path("rows.jsonl").write_text("\n".join(ROWS))
    Path("answers.jsonl").write_text(json.dumps({"prompt": "1+1=", "response": "2"}))
    pairs = [{"prompt": f"{i}+1=", "chosen": "2", "rejected": "3"} for i in range(8)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return run


def words_of(line: str, run: Path) -> list[str]:
    actor = run / "checkpoints" / "step_000001" / "actor"
    return line.replace("RUN", str(run)).replace("ACTOR", str(actor)).split()


ASKED = "comes with Python code, which runs only if you allow it"
COMMANDS = {
    "generate RUN 1+1=?": ASKED,
    "eval RUN": ASKED,
    "eval ACTOR --data rows.jsonl --rule exact": ASKED,
    "eval embedded RUN --data rows.jsonl --rule exact": ASKED,
    "eval RUN/adapter --data rows.jsonl --rule exact": ASKED,
    "export RUN/adapter --out model": ASKED,
    "train --fork RUN": ASKED,
    "train --model ACTOR --train_files rows.jsonl --rule exact --batch_size 4": ASKED,
    "train --preset embedded --rule exact --max_steps 1 --critic_model ACTOR": ASKED,
    "train --preset embedded --rule exact --max_steps 1 ref.path=ACTOR": ASKED,
    "train --preset embedded ~reward.rule --max_steps 1 --reward_model RUN/scorer": "never run",
    "reward score answers.jsonl --reward_model RUN/scorer": "never run",
    "reward fit --data pairs.jsonl --model ACTOR --out fitted": ASKED,
}


@pytest.mark.parametrize("line", COMMANDS)
def test_code_of_a_folder_does_not_run_unless_the_command_allows_it(
    line: str, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words_of(line, run)) == 2
    assert not Path("ran").exists()
    err = capfd.readouterr().err
    assert COMMANDS[line] in err.splitlines()[-1] and "Traceback" not in err


@pytest.mark.parametrize("line", ["plan --fork RUN", "export RUN --out model", "show RUN"])
def test_commands_that_load_no_model_run_no_code(line: str, run: Path) -> None:
    assert main(words_of(line, run)) == 0
    assert not Path("ran").exists()


@pytest.mark.parametrize("allowing", [ALLOW, "--config RUN/config.yaml"])
def test_code_runs_for_those_who_allow_it(allowing: str, run: Path) -> None:
    assert main(words_of(f"generate RUN 1+1=? {allowing}", run)) == 0
    assert Path("ran").exists()


def test_consents_are_not_taken_from_a_run(run: Path) -> None:
    resolved = resolve_over(run, (), "rollout.n=2")
    config = resolved.config
    assert config.reward.rule == "exact" and config.trainer.total_training_steps == 2
    assert not config.model.trust_remote_code and not config.reward.code.allow_unsandboxed
    notes = [note for note in resolved.notes if "is not taken from a run" in note]
    assert ["model.trust_remote_code=true" in note for note in notes] == [True, False]
    assert any("trainer.old_setting is no setting any more" in note for note in resolved.notes)


@pytest.mark.parametrize(
    "settings",
    [
        {"function": "theirs/score.py"},
        {"function": "theirs/score.txt:score"},
        {"composite": {"parts": {"own": {"function": "theirs/score.py", "weight": 1}}}},
        {"api": {"local": {"engine_kwargs": {"trust-remote-code": True}}}},
        {"api": {"local": {"engine_kwargs": "{trust_remote_code: true}"}}},
        {"api": {"local": {"engine_kwargs": {"tool_parser_plugin": "theirs/score.py"}}}},
        {"composite": {"parts": {"j": {"kind": "judge", "judge": {
            "type": "local", "model": "m", "local": {"engine_kwargs": "{trust_remote_code: on}"},
        }}}}},
    ],
)  # fmt: skip
def test_code_that_a_run_names_runs_only_if_the_command_names_its_settings(
    settings: dict[str, Any], run: Path
) -> None:
    (run / "config.yaml").write_text(yaml.safe_dump({"reward": settings}))
    with pytest.raises(ConfigError, match=r"would run code that comes with a run.*--config theirs"):
        resolve_over(run)
    assert resolve_over(run, [run / "config.yaml"]).config.reward is not None


def test_a_run_without_a_function_is_taken_from_within_its_folder(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "config.yaml").write_text(yaml.safe_dump({"reward": {"function": None}}))
    monkeypatch.chdir(run)
    resolve_over(Path())


class Pickled:
    """Leaves the mark when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("pytorch_model.bin", "generate plain 1+1=?"),
        ("pytorch_model.bin", "train --model plain --train_files rows.jsonl --rule exact"),
        ("pytorch_model.bin", "reward score answers.jsonl --reward_model plain"),
        ("pytorch_model.bin", "reward fit --data pairs.jsonl --model plain --out fitted"),
        ("adapter_model.bin", "export plain --out model"),
    ],
)
def test_weights_are_not_unpickled(file: str, line: str, run: Path) -> None:
    plain = Path("plain")
    shutil.copytree(model_folder("embedded"), plain)
    if file.startswith("adapter"):
        (plain / "adapter_config.json").write_text(adapter_of("embedded"))
    (plain / "model.safetensors").unlink()
    torch.save({"score.weight": Pickled()}, plain / file)
    assert main(line.split()) == 2
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"actor_rollout_ref": {"model": {"trust_remote_code": True}}},
        {"reward": {"config_file": "theirs/reward.yaml"}},
    ],
)
def test_no_other_spelling_of_a_consent_counts(settings: dict[str, Any], run: Path) -> None:
    (run / "reward.yaml").write_text("code: {allow_unsandboxed: true}\n")
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    config = resolve_over(run).config
    assert not config.model.trust_remote_code and not config.reward.code.allow_unsandboxed
