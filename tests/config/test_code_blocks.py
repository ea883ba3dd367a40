"""The code blocks of the documents behind the project: each does what its text says.

Settings are given with --config, command lines as `plan` calls on a machine with 8 GPUs, data and
reward functions to `ppo data check` and `ppo reward score`. Skipped where they are not at hand.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from os.path import expandvars
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppo_cli.cli.app import main
from ppo_cli.config.schema.keys import table
from ppo_cli.machine.machine import Machine
from tests.config.settling import load_table
from tests.settings import with_gpus

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "asked_for"
GPUS = 8
LARGEST_BATCH = 1024  # every plan reads so many rows
Values = dict[str, Any]
# By block: `settings` of a YAML file (`beside`: flags that its text takes for granted), `lines`
# with the values of each plan or what its refusal says, or what kind of block it is.
BLOCKS: dict[str, Any] = load_table("code_blocks.yaml")
SETTINGS = {block: kind for block, kind in BLOCKS.items() if "settings" in kind}
LINES = {block: kind["lines"] for block, kind in BLOCKS.items() if "lines" in kind}


def read(block: str) -> str:
    (path,) = FOLDER.glob(f"{block}.*")
    return path.read_text(encoding="utf-8")


def plans(text: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield the variables and arguments of each plan: a command line, or settings in a row."""
    exported: dict[str, str] = {}
    loose: list[str] = []
    for line in [*re.sub(r"\\\n|\n(?=[ \t]+\w[\w.]*=)", " ", text).splitlines(), ""]:
        arguments = shlex.split(line, comments=True) if line.count('"') % 2 == 0 else []
        arguments = [expandvars(word) for word in arguments]
        if arguments and re.match(r"[a-z_]+\.[\w.]+=", arguments[0]):
            loose += arguments
            continue
        if loose:
            yield {}, loose
            loose = []
        if arguments[:1] == ["export"]:
            exported |= dict(word.split("=", 1) for word in arguments[1:])
        variables = dict(exported)
        while arguments and re.fullmatch(r"[A-Z_]+=\S+", arguments[0]):
            name, _, value = arguments.pop(0).partition("=")
            variables[name] = value
        script = arguments[:1] == ["bash"] or arguments[:1] == ["./train.sh"]
        module = arguments[:1] in (["python"], ["python3"]) and arguments[1:2] == ["-m"]
        if script or module:
            yield variables, arguments[1 if arguments[0] == "./train.sh" else 2 if script else 3 :]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the documents' data, 8 visible GPUs, and no variable of a setting."""
    if not FOLDER.is_dir():
        pytest.skip("the documents' code blocks are not at hand")
    row = {"prompt": "What is 1 + 1?", "ground_truth": "2", "data_source": "openai/gsm8k"}
    for folder in ("data/gsm8k", "data/hh_rlhf", "data/gsm8k_processed"):
        (tmp_path / folder).mkdir(parents=True)
        for split, count in (("train", LARGEST_BATCH), ("test", 1)):
            rows = pa.Table.from_pylist([row] * count)
            pq.write_table(rows, tmp_path / folder / f"{split}.parquet")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "ppo_config.yaml").write_text(read("000_00"), encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Machine, "here", lambda environ=None: with_gpus(GPUS))
    for name in ("CUDA_VISIBLE_DEVICES", *(key.env for key in table().values() if key.env)):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def planned(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Values, str]:
    """Return the values of a plan, or none and what the refusal says."""
    code = main(["plan", "--json", *args])
    out, err = capsys.readouterr()
    assert code in (0, 2), err
    if code == 2:
        return {}, err
    return {k: v["value"] for k, v in json.loads(out)["values"].items()}, ""


def differs(expected: Values | str, loaded: Values, refusal: str) -> str:
    """Say how an outcome is not the expected one; empty where it is."""
    if isinstance(expected, str):
        return "" if expected in refusal else f"not refused with {expected!r}: {refusal}"
    wrong = {k: loaded.get(k, refusal) for k, v in expected.items() if loaded.get(k) != v}
    return refusal or (f"{wrong}" if wrong else "")


def test_no_block_is_left_out() -> None:
    if not FOLDER.is_dir():
        pytest.skip("the documents' code blocks are not at hand")
    assert {path.stem for path in FOLDER.iterdir()} - {"README"} == set(BLOCKS)


def test_settings_plan_with_the_values_of_their_block(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {}
    for block, kind in SETTINGS.items():
        (desk / "block.yaml").write_text(read(block), encoding="utf-8")
        values = planned(["--config", "block.yaml", *kind.get("beside", ())], capsys)
        if wrong := differs(kind["settings"], *values):
            failed[block] = wrong
    assert failed == {}


def test_the_critics_settings_plan_without_a_gpu(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (desk / "block.yaml").write_text(read("002_11"), encoding="utf-8")
    assert planned(["--config", "block.yaml"], capsys)[1] == ""


def test_command_lines_plan_or_are_refused_for_the_right_reason(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {}
    for block, outcomes in LINES.items():
        calls = list(plans(read(block)))
        if len(calls) != len(outcomes):
            failed[block] = f"{len(calls)} lines"
        for number, (call, expected) in enumerate(zip(calls, outcomes, strict=False)):
            variables, args = call
            with monkeypatch.context() as around:
                for name, value in variables.items():
                    around.setenv(name, value)
                values = planned(args, capsys)
            if wrong := differs(expected, *values):
                failed[f"{block} line {number + 1}"] = wrong
    assert failed == {}


def test_megatron_is_named_and_no_setting_of_the_sampler_is_suggested(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, args = list(plans(read("002_19")))[1]
    _, refusal = planned(args, capsys)
    keys = [arg.partition("=")[0] for arg in args if "megatron" in arg]
    assert len(keys) == 5
    named = [key.removeprefix("actor_rollout_ref.") for key in keys]
    assert [key for key in named if key not in refusal] == []
    assert "Did you mean" not in refusal and "rollout." not in refusal


def test_other_programs_and_texts_ask_nothing_of_this_one(desk: Path) -> None:
    quiet = [block for block, kind in BLOCKS.items() if kind in ("text", "other programs")]
    assert {block: calls for block in quiet if (calls := list(plans(read(block))))} == {}


def test_sketches_are_classes_and_functions(desk: Path) -> None:
    for block in [block for block, kind in BLOCKS.items() if kind == "sketch"]:
        bodies = ast.parse(read(block)).body
        assert {type(node) for node in bodies} <= {ast.ClassDef, ast.FunctionDef}, block


def test_the_rows_are_read_and_the_function_scores_them(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads(read("004_00"))
    (desk / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    assert main(["data", "check", "rows.json"]) == 0
    answered = [{**rows[0], "response": text} for text in ("so 42", "so 41")]
    (desk / "answered.json").write_text(json.dumps(answered), encoding="utf-8")
    function = "\n\ndef extract_final_answer(text):\n    return text.split()[-1]\n"
    (desk / "reward_functions.py").write_text(read("004_05") + function, encoding="utf-8")
    capsys.readouterr()
    line = "reward score answered.json --reward_function reward_functions.py --out scored.jsonl"
    assert main(line.split()) == 0
    scored = [json.loads(line) for line in Path("scored.jsonl").read_text().splitlines()]
    assert [row["score"] for row in scored] == [1.0, 0.0]
