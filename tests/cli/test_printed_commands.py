"""Every command of README and docs that needs no hub, key, GPU or minutes runs as it is printed."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.test_documents import ROW, blocks, lines, words_of
from tests.forked import PPO, Forked
from tests.judge_server import JudgeServer

# Why a command is not run here: a part of the line -> the reason.
LEFT_OUT = {
    " view ": "serves until Ctrl-C: tests/report/page",
    " serve ": "serves until Ctrl-C: tests/extras/serve",
    "Qwen/": "needs the hub",
    "gsm8k": "needs the hub",
    "--self-test": "takes minutes: tests/self_test",
    "--report ": "needs a record of the self-test: tests/cli/test_notebook.py",
    "--self_test": "needs a record of the self-test: tests/self_test",
    "--tasks": "needs lm-eval",
    "--nnodes": "needs another machine",
    "earlier_1": "needs a run that went back: tests/loop/test_restraints.py",
    "bridge": "needs GPUs: tests/extras/migrate/bridge",
    "prompts rubric": "needs a judge that drafts criteria: tests/extras/lab/test_prompts.py",
    "NAME": "names nothing",
}
# Pages that are run from top to bottom: two in test_documents.py, the quickstart by hand,
# as it installs a package with a model and trains for minutes.
WHOLE_PAGES = {"tutorial.md", "environments.md", "quickstart.md"}
# What stands for the reader's own run, file or model.
STAND_INS = {
    "RUN": "outputs", "RUN/labels.jsonl": "outputs/labels.jsonl",
    "RUN/config.yaml": "outputs/config.yaml", "BASE": "embedded", "qwen-plus": "embedded",
    "FILE": "answers.jsonl", "KEY": "correct", "N": "20", "OTHER": "m", "DIR": "other-run",
}  # fmt: skip
ANSWERS = (("The answer is 5.", 1), ("The answer is 6.", 0), ("5", 1), ("I do not know.", 0))


def commands() -> list[tuple[str, list[str]]]:
    """Line and arguments of each command of ours but `train` and `plan`, once each."""
    arguments_by_line: dict[str, list[str]] = {}
    for page, line in lines():
        arguments = words_of(line)[1]
        if page not in WHOLE_PAGES and arguments and arguments[0].endswith("ppo"):
            arguments_by_line.setdefault(
                " ".join(line.removeprefix(".venv/bin/").split()), arguments[1:]
            )
    return [
        (line, arguments)
        for line, arguments in arguments_by_line.items()
        if arguments[0] not in ("train", "plan")
    ]


def fill_in(arguments: Sequence[str]) -> list[str]:
    """Put stand-ins for placeholders; a judge's model and a folder to write differ."""
    judged = any(word.startswith("--rm_") or word == "--use_api_reward" for word in arguments)
    filled = list(arguments)
    for place, word in enumerate(arguments):
        before = arguments[place - 1] if place else ""
        if before == "--rm_model":
            filled[place] = "m"
        elif (before, word) == ("--model", "DIR"):
            filled[place] = "embedded"
        elif before == "--reward_function":
            filled[place] = "my_reward.py"
        elif before != "--out":
            filled[place] = STAND_INS.get(word, word)
    if judged and arguments[0] != "prompts":
        filled += ["--rm_api_type", "openai"] * ("openai" not in arguments)
        filled += ["--rm_model", "m"] * ("--rm_model" not in arguments)
    return filled


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with the files that the pages name."""
    (code,) = (text for page, text in blocks("python") if page == "README.md")
    (tmp_path / "my_reward.py").write_text(code)
    rows = [ROW | {"response": text, "correct": right, "score": right} for text, right in ANSWERS]
    pairs = [
        {"prompt": f"{n} + 1 = ?", "chosen": str(n + 1), "rejected": str(n)} for n in range(40)
    ]
    labelled = [
        {
            "prompt": pair["prompt"], "response": pair[side], "good": side == "chosen",
            "marks": {"correct": side == "chosen"},
        }
        for pair in pairs
        for side in ("chosen", "rejected")
    ]  # fmt: skip
    (tmp_path / "criteria.yaml").write_text("- {name: correct, text: The sum is right.}\n")
    task = {
        "task_id": "HumanEval/0", "prompt": "def add(a, b):\n", "entry_point": "add",
        "canonical_solution": "    return a + b\n",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    }  # fmt: skip
    for name, content in (
        ("train.jsonl", [ROW] * 64), ("answers.jsonl", rows * 4), ("pairs.jsonl", pairs),
        ("labelled.jsonl", labelled),
        ("HumanEval.jsonl", [task]),
    ):  # fmt: skip
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    packed = gzip.compress((tmp_path / "HumanEval.jsonl").read_bytes())
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(packed)
    return tmp_path


def run_ppo(arguments: Sequence[str], folder: Path, judge: JudgeServer) -> tuple[int, str]:
    variables = os.environ | {
        "OPENAI_API_KEY": "sk-loopback", "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    if "openai" in arguments:
        arguments = [*arguments, "--rm_base_url", judge.url("openai")]
    process = Forked(PPO, arguments, variables, folder=folder)
    try:
        return process.wait(timeout=600), process.output()
    finally:
        process.kill()


@pytest.mark.slow
def test_every_command_runs_as_printed(desk: Path) -> None:
    small = ["--batch_size", "8", "--mini_batch_size", "8", "data.val_max_samples=8"]
    often = ["--max_steps", "40", "--save_freq", "10", "--test_freq", "40", "--resume", "never"]
    keep = ["trainer.max_ckpt_to_keep=9", "--output_dir", "outputs"]
    failed, count = [], 0
    with JudgeServer() as judge:
        code, text = run_ppo(["train", "--preset", "embedded", *small, *often, *keep], desk, judge)
        assert code == 0, text
        for name in ("other-run", "run_a", "run_b"):
            shutil.copytree(desk / "outputs", desk / name)
        label_responses(desk / "outputs")
        for line, arguments in commands():
            if any(part in f"{line} " for part in LEFT_OUT):
                continue
            for out in re.findall(r"--out (\S+)", line):
                shutil.rmtree(desk / out, ignore_errors=True)
                (desk / out).unlink(missing_ok=True)
            count += 1
            code, text = run_ppo(fill_in(arguments), desk, judge)
            if code and "checks failed" not in text:  # the audit of the tests' judge ends so
                failed.append(f"$ {line}\n{code}: {text[-600:]}")
    assert failed == [], "\n\n".join(failed)
    assert count > 40


def label_responses(run: Path) -> None:
    """Write labels as `ppo view` does, for the responses of one step."""
    text = (run / "rollouts/step_000020.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    labels = [{**row, "label": row["score"]} for row in rows]
    (run / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labels))


def test_each_reason_to_leave_a_command_out_is_needed() -> None:
    shown = [f"{line} " for line, _ in commands()]
    assert [part for part in LEFT_OUT if not any(part in line for line in shown)] == []
