"""The golden file messages.txt: commands, and what they print.

tests/cli/test_messages.py compares it with what they print today; scripts/write_messages.py
rewrites it. The form of the file is described at its top.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from pytest import MonkeyPatch

from ppo_cli.cli.app import main

ROOT = Path(__file__).resolve().parents[1]
MESSAGES = ROOT / "tests" / "messages.txt"
INPUTS = ROOT / "tests" / "messages"
# Variables of every command; a message may depend on no other.
ENVIRON = {
    "PATH": os.environ["PATH"],
    "PPO_COMMAND": "ppo",
    "COLUMNS": "80",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
# Optional packages, which count as missing on every machine.
MISSING_PACKAGES = ("bitsandbytes", "flash_attn", "kernels", "lm_eval", "verl", "vllm", "wandb")
ENTRY = re.compile(r"((?:#.*\n|\n)*)((?:\$ .*\n)+)((?:(?![#$] ).*\n?)*)")


class Entry(NamedTuple):
    """Comments above the entry, its commands, and what each of them prints after its exit code."""

    comments: str
    commands: tuple[str, ...]
    outcome: str


def read_entries(text: str) -> list[Entry]:
    """Return the entries of the golden file."""
    return [
        Entry(comments, tuple(re.findall(r"^\$ (.*)", commands, re.M)), outcome.strip("\n"))
        for comments, commands, outcome in ENTRY.findall(text)
    ]


def run_command(command: str) -> str:
    """Run `[NAME=value ...] ppo ARGS [| grep WORD]`; return `exit CODE` and what it prints.

    That is stderr and stdout; of a command that fails with a message on stderr, the message alone;
    with a WORD, the lines that have it. The command runs in a copy of the folder tests/messages,
    and files that it writes although it fails are listed.
    """
    line, _, word = command.partition(" | grep ")
    words = shlex.split(line)
    start = words.index("ppo")
    variables = dict(assignment.split("=", 1) for assignment in words[:start])
    out, err = StringIO(), StringIO()
    folder = copy_inputs()
    with (
        tempfile.TemporaryDirectory() as home,
        MonkeyPatch.context() as patch,
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        for name in list(os.environ):
            patch.delenv(name)
        for name, value in {**ENVIRON, "HOME": home, **variables}.items():
            patch.setenv(name, value)
        for name in MISSING_PACKAGES:
            patch.setitem(sys.modules, name, None)
        patch.setattr("ppo_cli.machine.machine.matmul_library", lambda environ: "onednn")
        patch.setattr("ppo_cli.planning.memory.plan.find_jemalloc", lambda: None)
        patch.setattr(sys, "argv", words[start:])
        patch.setattr(sys, "stdin", StringIO())
        patch.chdir(folder)
        code = main(words[start + 1 :])
    written = read_folder(folder).items() ^ read_folder(INPUTS).items()
    if written:
        copy_inputs.cache_clear()
    message = err.getvalue() if code and not word else ""
    text = message or err.getvalue() + out.getvalue()
    files = {path for path, content in written if code and content is not None}
    text += "".join(f"(writes {path})\n" for path in sorted(files))
    marks = {folder: "<cwd>", sys.executable: "<python>", sys.prefix: "<venv>", ROOT: "<ppo-cli>"}
    for value, mark in marks.items():
        text = text.replace(str(value), mark)
    # Durations, and the random part of the tags in a judge's request.
    text = re.sub(r"\b(time|seconds)( +)\d[\d.]*", r"\1\2<time>", text)
    text = re.sub(r"-[0-9a-f]{16}\b", "-<random>", text)
    lines = [row.rstrip() for row in text.splitlines() if "".join(shlex.split(word)) in row]
    if word:  # A column is as wide as its widest value, which may be a path of this machine.
        lines = [re.sub(" {2,}", "  ", row) for row in lines]
    return "\n".join([f"exit {code}", *lines])


@cache
def copy_inputs() -> Path:
    """Copy the folder tests/messages, for commands that leave it as it is."""
    folder = Path(tempfile.mkdtemp(), "folder").resolve()
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    shutil.copytree(INPUTS, folder)
    return folder


def read_folder(folder: Path) -> dict[Path, bytes | None]:
    """Return what is under a folder by its path in there: the bytes of files."""
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.suffix != ".pyc" and path.name != "__pycache__"
    }
