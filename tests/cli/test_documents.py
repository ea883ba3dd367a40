"""What README and docs show works as written: every command line, and every block of code."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import pytest
import typer
import yaml

from ppo_cli.cli.app import app, main, normalize_flag
from ppo_cli.cli.help import HelpGroup
from ppo_cli.config.schema.keys import find_key
from ppo_cli.machine.machine import Machine
from tests.cli.test_app import parse
from tests.settings import with_gpus

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")})
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:(?:\.venv/bin/)?ppo|\./train\.sh) [^`]+)`")
VARIABLE = re.compile(r"[A-Z_]+=\S*")
# Programs of others; what follows is theirs.
FOREIGN = {
    "ray", "pip", ".venv/bin/pip", ".venv/bin/python", "export", "tensorboard", "hf", "python",
    "srun", "git", "cd", "cat", "#!/bin/bash", ".venv-tinker/bin/python",
}  # fmt: skip
# What a reader has and a test has not: keys, GPUs, a hub, the files of another section.
LACKS = (
    "no such file",
    "is not a checkpoint",
    "state/run.json is missing",
    "there is no file",
    "there is no model folder",
    "there is no program",
    "API_KEY",
    "are wrong",
)
# Flags of other programs, and of this project's scripts and benchmarks.
FOREIGN_FLAGS = {
    "--index-url", "--repo-type", "--no-deps", "--logdir", "--gpus", "--ipc", "--nv", "--shm-size",
    "--override-generation-config", "--nodes", "--ntasks-per-node", "--gpus-per-node",
    "--cpus-per-task", "--head", "--address", "--write", "--trl", "--quick", "--help", "--verl",
    "--name", "--headless", "--print-to-pdf", "--help-all", "--install-completion", "--signal",
    "--open-mode",
}  # fmt: skip
PLACES = {"DIR_OR_HUB_OR_URL": "DIR", "MODEL": "qwen-plus", "RUN": "outputs"}
ROW = {"prompt": "What is 2 + 3?", "ground_truth": "5", "data_source": "arithmetic"}


def blocks(kind: str) -> Iterator[tuple[str, str]]:
    """Page and text of each block of code of one kind."""
    for page in PAGES:
        for name, text in BLOCK.findall(page.read_text(encoding="utf-8")):
            if name == kind:
                yield page.name, text


def lines() -> list[tuple[str, str]]:
    """Page and text of each command line, in blocks and between backticks."""
    commands = []
    for name, text in blocks("bash"):
        joined = re.sub(r"<<'?(\w+)'?\n.*?^\1$", "", text.replace("\\\n", " "), flags=re.M | re.S)
        commands += [(name, line.partition(" #")[0].strip()) for line in joined.splitlines()]
    for page in PAGES:
        rest = BLOCK.sub("", page.read_text(encoding="utf-8"))
        inline = [" ".join(line.split()) for line in INLINE.findall(rest)]
        commands += [(page.name, line) for line in inline if line.count(" ") > 2]  # no mere name
    return list(
        dict.fromkeys(pair for pair in commands if pair[1] and not pair[1].startswith("#SB"))
    )


def words_of(line: str) -> tuple[dict[str, str], list[str]]:
    """The variables before a command, and its words; `…` and `...` stand for what is left out."""
    args = [PLACES.get(word, word) for word in shlex.split(re.sub(r"--\w+ …|…|\.\.\.", "", line))]
    count = next((i for i, word in enumerate(args) if not VARIABLE.fullmatch(word)), len(args))
    variables = dict(word.split("=", 1) for word in args[:count])
    return variables, args[count:]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the lines name, where every package is installed."""
    monkeypatch.chdir(tmp_path)
    for name, count in (("train.jsonl", 1100), ("val.jsonl", 20)):
        (tmp_path / name).write_text(count * (json.dumps(ROW) + "\n"))
    (tmp_path / "outputs/checkpoints/step_000020/state").mkdir(parents=True)
    (code,) = (text for page, text in blocks("python") if page == "README.md")
    (tmp_path / "my_reward.py").write_text(code)
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    for file in (ROOT / "examples").glob("*.py"):  # the page shows how to write them
        assert file.read_text(encoding="utf-8") in page
        shutil.copy(file, tmp_path)
    (servers,) = re.findall(r"^cat > mcp.json <<'END'\n(.*?)^END$", page, flags=re.M | re.S)
    (tmp_path / "mcp.json").write_text(servers)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("PPO_VLLM_PYTHON", sys.executable)
    return tmp_path


@pytest.mark.slow
def test_every_line_of_a_run_can_be_planned(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, count = [], 0
    for line, page in {line: page for page, line in lines()}.items():  # pages share lines
        variables, args = words_of(line)
        head, *rest = args or [""]
        if head == "srun":
            head, *rest = rest
        if head.endswith("ppo") and rest[:1] in (["train"], ["plan"]):
            rest = [word for word in rest[1:] if word != "--simulate"]  # it takes minutes
        elif head != "./train.sh":
            continue
        count += 1
        own_judge = "local" in rest and "--placement" not in rest
        gpus = 0 if "--num_workers" in rest or own_judge else 8
        with monkeypatch.context() as patch:
            here = with_gpus(gpus)
            patch.setattr(Machine, "here", lambda environ=None, here=here: here)
            for name, value in variables.items():
                patch.setenv(name, value)
            main(["plan", *rest])
        captured = capsys.readouterr()
        unexpected = [
            text for text in captured.err.splitlines() if not any(lack in text for lack in LACKS)
        ]
        shown = "trainer.nnodes=" if "verl" in rest else "Devices"
        if unexpected or shown not in captured.out:
            wrong.append(f"{page}: {line}\n{captured.err or captured.out}")
    assert wrong == [], "\n".join(wrong)
    assert count > 25


def test_every_other_command_is_one_of_ours(place: Path) -> None:
    wrong, count = [], 0
    for page, line in lines():
        _, args = words_of(line)
        head = args[0] if args else "export"
        if head in FOREIGN or head == "./train.sh":
            continue
        if head.startswith("scripts/"):
            if not (ROOT / head).is_file():
                wrong.append((page, line, "no such script"))
        elif not head.endswith("ppo"):
            wrong.append((page, line, "unknown program"))
        elif args[1] not in ("train", "plan"):
            count += 1
            try:
                parse(args[1:])
            except Exception as error:
                wrong.append((page, line, str(error)))
    assert wrong == []
    assert count > 30


def flags_of_all_commands() -> set[str]:
    """The flags of every command and sub-command, with underscores."""
    root = typer.Context(typer.main.get_command(app), info_name="ppo")
    groups, flags = [root], set()
    while groups:
        context = groups.pop()
        for name in context.command.list_commands(context):
            command = context.command.resolve_command(context, [name])[1]
            if isinstance(command, HelpGroup):
                groups.append(typer.Context(command, parent=context, info_name=name))
            flags |= {
                normalize_flag(o) for p in command.params for o in (*p.opts, *p.secondary_opts)
            }
    return flags


def test_every_flag_and_setting_exists() -> None:
    flags = flags_of_all_commands() | {normalize_flag(flag) for flag in FOREIGN_FLAGS}
    for file in (ROOT / "benchmarks").glob("*.py"):
        flags |= set(map(normalize_flag, re.findall(r'"(--[a-z][\w-]+)"', file.read_text("utf-8"))))
    unknown = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if page.name == "moving.md":  # flags and keys of other trainers, from the code
            continue
        if page.name == "platforms.md":  # what stands before the command is Docker's and others'
            text = "\n".join(re.findall(r"\b(?:train|view) .*", text))
        named = re.findall(r"(?<![\w-])--[a-z][\w-]+", text)
        unknown += [(page.name, flag) for flag in named if normalize_flag(flag) not in flags]
        keys = re.findall(r"`([a-z_]+\.[a-z_.]+)=[^`]*`", text)
        unknown += [(page.name, key) for key in keys if find_key(key) is None]
    assert unknown == []


def test_every_block_of_data_and_code_is_well_formed(place: Path) -> None:
    for _, text in blocks("json"):
        for row in text.splitlines():
            json.loads(row)
    for _, text in blocks("yaml"):
        yaml.safe_load(text)
    for text, name in {text: name for name, text in blocks("python")}.items():  # pages share some
        # tests/extras/serve runs one, where the SDK is installed, test_library.py the other.
        if name in ("tinker.md", "library.md"):
            continue
        body = f"def shown():\n{indent(text, '    ')}" if text.startswith("return") else text
        exec(compile(body, name, "exec"), {"__name__": "shown"})
    languages = {"bash", "json", "yaml", "python", "text", "toml"}
    kinds = {kind for page in PAGES for kind, _ in BLOCK.findall(page.read_text(encoding="utf-8"))}
    assert kinds <= languages


@pytest.mark.slow
def test_the_tutorial_runs_as_it_is_written(tmp_path: Path) -> None:
    output = run_page("tutorial.md", tmp_path)
    assert "step 4/4" in output and "step 3/3" in output and "step 5/5" in output
    assert "reason" in output and "wrong" in output
    assert (tmp_path / "first.html").stat().st_size > 1_000_000
    assert (tmp_path / "my-model" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("steps", [3, pytest.param(20, marks=pytest.mark.weekly)])
def test_the_page_of_environments_runs_as_it_is_written(steps: int, tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    output = run_page("environments.md", tmp_path, PPO_MAX_STEPS=str(steps))
    assert f"step {steps}/{steps}" in output and "step 6/6" in output
    if steps == 20:
        before, after = map(float, re.findall(r"  reward +([\d.]+) → ([\d.]+)", output)[0])
        assert after > before + 0.3


def run_page(name: str, folder: Path, **variables: str) -> str:
    """Run the bash blocks of a page from top to bottom; what pip installs is there already."""
    script = "".join(text for page, text in blocks("bash") if page == name)
    script = re.sub(r"^pip install .*\n", "", script, flags=re.M)
    variables |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=folder,
        env=os.environ | variables, timeout=600, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    return run.stdout
