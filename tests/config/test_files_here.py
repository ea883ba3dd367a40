"""Files that are found without being named: reward files in the current folder, data folders."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from ppo_cli.cli.app import main
from ppo_cli.config.layers import (
    JUDGE_FILE,
    MODEL_FILE,
    read_reward_file,
)
from ppo_cli.config.schema.keys import value_of
from tests.config.settling import settle

EXAMPLES = Path(__file__).parents[2] / "examples"
JUDGE, MODEL = ("reward.api.enable=true",), ("reward.model.path=rm",)


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with both files and another reward file, where the test runs."""
    Path(tmp_path / JUDGE_FILE).write_text("api:\n  type: openai\n  model: mine\n  votes: 3\n")
    Path(tmp_path / MODEL_FILE).write_text("reward_model:\n  path: own\n  max_length: 99\n")
    Path(tmp_path / "other.yaml").write_text("api:\n  type: openai\n  model: other\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "mix", "expected"),
    [
        (JUDGE, (), {"reward.api.model": "mine", "reward.api.votes": 3}),
        ((), ("judge:0.5", "rule:0.5"), {"reward.api.model": "mine"}),
        ((*JUDGE, "reward.api.model=typed"), (), {"reward.api.model": "typed"}),
        (MODEL, (), {"reward.model.path": "rm", "reward.model.max_length": 99}),
        ((), ("model:0.5", "rule:0.5"), {"reward.model.path": "own"}),
        ((*JUDGE, *MODEL), ("judge:0.5", "model:0.5"),
         {"reward.api.model": "mine", "reward.model.max_length": 99}),
        ((), (), {"reward.api.model": None, "reward.model.max_length": None}),
        ((*JUDGE, "reward.config_file=other.yaml"), (),
         {"reward.api.model": "other", "reward.api.votes": 1}),
        ((*JUDGE, "reward.config_file=null"), (), {"reward.api.model": "qwen-plus"}),
    ],
)  # fmt: skip
def test_a_file_here_is_read_when_its_scorer_is_asked_for(
    arguments: tuple[str, ...], mix: tuple[str, ...], expected: dict[str, object]
) -> None:
    settled = settle(*arguments, mix=mix)
    assert {key: value_of(settled.config, key) for key in expected} == expected
    used = {origin.partition(" ")[0] for origin in settled.origins.values()}
    for file in (JUDGE_FILE, MODEL_FILE):
        notes = [note for note in settled.notes if f"read from {file}" in note]
        assert len(notes) == int(file in used)


def test_origins_name_the_line_and_a_settings_file_lies_above(desk: Path) -> None:
    (desk / "mine.yaml").write_text("reward:\n  api:\n    votes: 5\n")
    settled = settle(*JUDGE, files=[desk / "mine.yaml"], preset="judge")
    assert settled.origins["reward.api.model"] == f"{JUDGE_FILE} line 3"
    assert settled.config.reward.api.votes == 5


def test_a_mistake_in_the_file_is_told_once(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (desk / JUDGE_FILE).write_text("api:\n  votse: 3\n")
    assert main(["plan", "--use_api_reward"]) == 2
    err = capsys.readouterr().err
    assert err.count(f"{JUDGE_FILE} line 2: ") == 1 and "'votes'" in err


@pytest.mark.parametrize(
    ("name", "flags"),
    [(JUDGE_FILE, ["--use_api_reward"]), (MODEL_FILE, ["--reward_model", "some/rm"])],
)
def test_the_shipped_examples_plan_as_they_are_and_with_all_that_is_commented_out(
    name: str, flags: list[str], desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    uncommented = re.sub(r"^  # (\w+: )", r"  \1", text, flags=re.M)
    assert uncommented.count("\n  #") < text.count("\n  #")
    for content in (text, uncommented):
        (desk / name).write_text(content, encoding="utf-8")
        assert read_reward_file(Path(name), name)
        assert main(["plan", *flags]) == 0
        captured = capsys.readouterr()
        assert f"{name} line" in captured.out and f"read from {name} in this folder" in captured.out


def test_the_shipped_examples_are_not_read_from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    assert settle(*JUDGE).origins["reward.api.votes"] == "default"


def test_a_data_folder_gives_training_and_validation_prompts(desk: Path) -> None:
    folder = desk / "set"
    folder.mkdir()
    for name in ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "README.md"):
        (folder / name).touch()
    train = tuple(str(folder / f"train-0000{i}-of-00002.parquet") for i in (0, 1))
    data = settle(f"data.path={folder}").config.data
    assert (data.train_files, data.val_files) == (train, ())
    (folder / "test.jsonl").touch()
    settled = settle(f"data.path={folder}")
    assert settled.config.data.val_files == (str(folder / "test.jsonl"),)
    assert settled.origins["data.val_files"] == "override" and settled.notes == ()
    by_flag = {"data.val_files": (("mine.jsonl",), "flag --val_files")}
    settled = settle(f"data.path={folder}", flags=by_flag)
    assert (settled.config.data.train_files, settled.config.data.val_files) == (
        train,
        ("mine.jsonl",),
    )
    preset = settle(f"data.path={folder}", preset="gsm8k").config.data
    assert preset.val_files == (str(folder / "test.jsonl"),)
    own_file = desk / "own.yaml"
    own_file.write_text(f"data: {{path: {folder}, val_files: [mine.jsonl]}}\n")
    assert settle(files=[own_file]).config.data.val_files == ("mine.jsonl",)
    shutil.rmtree(folder)
    assert settle(f"data.path={folder}").config.data.train_files == (str(folder),)


def test_a_critic_counts_as_a_model() -> None:
    """The bundled model and another critic never belong together."""
    settled = settle("critic.model.path=a/b", env={"MODEL_PATH": ""})
    assert settled.config.model.path == "Qwen/Qwen2.5-0.5B"
    assert settled.config.data.train_batch_size == 256
