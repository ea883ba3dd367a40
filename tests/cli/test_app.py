"""`ppo` as people run it: what it prints, and the exit code."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from ppo_cli.cli import app as app_module
from ppo_cli.cli.app import Crash, main, print_error
from ppo_cli.cli.flags import UNKNOWN_FLAGS
from ppo_cli.cli.help import HelpGroup
from ppo_cli.config.schema.keys import table
from ppo_cli.errors import ConfigError, Interrupted, MissingPart
from ppo_cli.errors import exit_code_of as node_exit_code
from ppo_cli.planning.resolved import Resolved

PRESET = ["--preset", "embedded"]


def test_streams_that_are_closed_keep_their_numbers_to_themselves(tmp_path: Path) -> None:
    code = (
        "import os, sys; from ppo_cli.cli.app import main; main(['--version']);"
        "print(sys.stdin.read(), sys.stdout.isatty(), file=sys.stderr);"
        "found = [os.get_inheritable(number) for number in (0, 1, 2)];"
        f"open({str(tmp_path / 'found')!r}, 'w').write(repr(found))"
    )
    closing = 'exec "$0" -c "$1" <&- >&- 2>&-'
    subprocess.run(["sh", "-c", closing, sys.executable, code], check=True, timeout=120)
    assert (tmp_path / "found").read_text() == "[True, True, True]"


def list_commands() -> list[tuple[str, ...]]:
    """The words of every command and group: `()` is `ppo` itself."""
    program: Any = typer.main.get_command(app_module.app)
    context = typer.Context(program, info_name="ppo")
    commands: list[tuple[str, ...]] = [()]
    for name in program.list_commands(context):
        _, command, _ = program.resolve_command(context, [name])
        commands.append((name,))
        if isinstance(command, HelpGroup):
            below = typer.Context(command, parent=context, info_name=name)
            commands += ((name, inner) for inner in command.list_commands(below))
    return commands


def test_help_is_one_screen_with_examples_that_parse(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    commands = list_commands()
    assert {(), ("reward", "score"), ("data", "check"), ("train",)} <= {*commands}
    for args in commands:
        assert main([*args, "--help"]) == 0
        out = capsys.readouterr().out
        lines = out.splitlines()
        assert len(lines) <= 60 and max(map(len, lines)) <= 80, (args, len(lines))
        examples = out.partition("\nExample")[2].splitlines()[1:]
        assert examples and all(line.startswith("  ppo ") for line in examples), args
        for line in examples:
            parse(shlex.split(re.split(" > | && ", line)[0], comments=True)[1:])
        assert main([*args, "--help-all"]) == 0
        flags = r"^  (--\w+)"
        every = set(re.findall(flags, capsys.readouterr().out, re.M))
        assert set(re.findall(flags, out, re.M)) <= every, args
    assert main(["reward", "models", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--rm_api_type" in out and "--rm_votes" not in out


def parse(args: list[str]) -> None:
    """Read a command line as `ppo` would, and run nothing; raises what is wrong with it."""
    context = typer.Context(
        typer.main.get_command(app_module.app), info_name="ppo",
        token_normalize_func=app_module.normalize_flag,
    )  # fmt: skip
    command = context.command
    while hasattr(command, "resolve_command") and args:
        name, command, args = command.resolve_command(context, args)
        if hasattr(command, "commands"):
            context = typer.Context(command, parent=context, info_name=name)
    if not hasattr(command, "commands") and "--help" not in args:
        unknown = command.make_context(name, args, parent=context).meta.get(UNKNOWN_FLAGS, ())
        assert unknown == ()


def test_help_and_version_are_words_too(capsys: pytest.CaptureFixture[str]) -> None:
    for word, flag in ((["help"], ["--help"]), (["help", "data", "check"], ["data", "check", "-h"]),
                       (["version"], ["--version"])):  # fmt: skip
        assert main(word) == main(flag) == 0
        text = capsys.readouterr().out
        assert text[: len(text) // 2] == text[len(text) // 2 :]
    assert main(["help", "trian"]) == 2
    assert "Did you mean 'train'" in capsys.readouterr().err


def test_all_shows_the_defaults_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--all", "--model", "a/b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["model.path", "a/b", "flag", "--model"]
    origins = [line.partition("  default")[2] for line in lines if "  default" in line]
    assert len(origins) == len(table()) - 3  # model, prompts
    assert all(why == "" or why.startswith(": ") for why in origins)


def test_plan_json_has_the_documented_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    parts = {"values", "arithmetic", "placement", "memory", "disk", "reward", "notes", "problems"}
    assert set(document) == parts | {"findings"}
    assert set(document["values"]) == set(table())
    assert "No GPU and no --model" in document["notes"][0]


def end_with(error: BaseException, monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """Run `ppo train` with an assembly that ends in `error`."""

    def train(resolved: Resolved, screen: object, cluster: object) -> None:
        raise error

    fake = types.SimpleNamespace(train=train)
    monkeypatch.setitem(sys.modules, "ppo_cli.run.assemble", fake)
    return main(["train", *PRESET, *args])


def test_a_bug_keeps_its_traceback_in_the_run_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "very-secret-key")
    code = end_with(KeyError("very-secret-key"), monkeypatch, "--output_dir", "run")
    err = capsys.readouterr().err
    (traceback_file,) = Path("run/logs").glob("crash-*.txt")
    assert code == 1
    assert str(traceback_file) in err
    assert "Traceback" not in err
    assert "Traceback" in traceback_file.read_text()
    assert "very-secret" not in err + traceback_file.read_text()


def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_with(ConfigError("no such luck"), monkeypatch, "--debug") == 2
    assert "Traceback" in capsys.readouterr().err
    for args in (["show", "nowhere", "--debug"], ["--debug", "show", "nowhere"]):
        assert main(args) == 2
        output = capsys.readouterr().err
        assert "Traceback" in output and "nowhere" in output and "there is no flag" not in output
    assert main(["show", "--", "--debug"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("one line"), 2, "error: one line\n"),
        (MissingPart("no such part"), 2, "error: no such part\n"),
        (Interrupted("Stopped. Go on: ppo train"), 3, "Stopped. Go on: ppo train\n"),
        (OSError(errno.ENOSPC, "full", "out/x"), 2, "out/x: no space left on device. Free some"),
        (
            PermissionError(errno.EACCES, "no", "out"),
            2,
            "out: permission denied. Choose a writable",
        ),
        (KeyboardInterrupt(), 130, "Stopped.\n"),
    ],
)
def test_each_kind_of_end_has_its_code(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert end_with(error, monkeypatch) == code
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not Path("outputs").exists()


def test_who_trains_and_who_joins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Node 0 opens the cluster and trains in it, the others join, and one process needs none."""
    done: list[object] = []
    nodes = types.SimpleNamespace()

    @contextmanager
    def open_cluster(resolved: Resolved, environ: object, tell: object) -> Iterator[object]:
        done.append("open")
        yield nodes
        done.append("close")

    def join_cluster(resolved: Resolved, environ: object, tell: object) -> int:
        done.append(f"join {resolved.config.trainer.node_rank}")
        return 3

    def train(resolved: Resolved, screen: object, cluster: object = None) -> None:
        done.append(cluster is nodes)

    launch = types.SimpleNamespace(open_cluster=open_cluster, join_cluster=join_cluster)
    monkeypatch.setitem(sys.modules, "ppo_cli.cluster.nodes", launch)
    monkeypatch.setitem(sys.modules, "ppo_cli.run.assemble", types.SimpleNamespace(train=train))
    two = ("--nnodes", "2", "--master_addr", "127.0.0.1", "--node_rank")
    for args, address, code, expected in (
        ((), "", 0, [False]),
        ((), "10.0.0.1:6379", 0, [False]),
        (("--engine", "ray"), "", 0, [False]),
        (("--engine", "ray"), "10.0.0.1:6379", 0, ["open", True, "close"]),
        ((*two, "0"), "", 0, ["open", True, "close"]),
        ((*two, "1"), "", 3, ["join 1"]),
    ):
        monkeypatch.setenv("RAY_ADDRESS", address)
        done.clear()
        assert main(["train", *PRESET, *args]) == code, args
        assert done == expected, args
    assert "Traceback" not in capsys.readouterr().err


def test_a_traceback_that_cannot_be_kept_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    crash = Crash(Path("file"))
    crash.__cause__ = ZeroDivisionError("x")
    assert print_error(crash) == 1
    assert "ZeroDivisionError: x" in capsys.readouterr().err


def run_program(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    root = Path(app_module.__file__).parents[2]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(root), **environ}, capture_output=True,
        text=True, timeout=100, check=False,
    )  # fmt: skip


def test_the_package_runs_as_a_module() -> None:
    done = run_program(sys.executable, "-m", "ppo_cli", "train", "--batch_sise", "3", PATH="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: there is no flag --batch_sise. Did you mean '--batch_size'? "
        f"See `{sys.executable} -m ppo_cli train --help`.\n"
    )


@pytest.mark.parametrize("limit_kib", [60_000, 850_000])
def test_too_little_address_space_is_a_matter_of_memory(limit_kib: int) -> None:
    """Libraries end in their own words: an import, a thread or a product that cannot be made."""
    train = "-m ppo_cli train --preset embedded --output_dir out trainer.total_training_steps=1"
    done = run_program("sh", "-c", f"ulimit -v {limit_kib}; exec {sys.executable} {train}")
    assert done.returncode == 2, done.stderr
    assert "address space" in done.stderr.lower()
    assert f"limited to {limit_kib / 2**20:.2f} GiB here: run `ulimit -v unlimited`" in done.stderr
    assert "bug" not in done.stderr


def test_a_full_memory_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")):
        assert print_error(error) == node_exit_code(error) == 2
        output = capsys.readouterr().err
        assert output.startswith("error: out of memory") and "a smaller model" in output
    assert print_error(RuntimeError("could not create a primitive")) == 1
    fault = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with")
    assert print_error(fault) == node_exit_code(fault) == 3
    assert "a bug" not in capsys.readouterr().err.rpartition("error: ")[2]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ppo tr", "train"),
        ("ppo presets sh", "show"),
        ("ppo train --adv_est", "--adv_estimator"),
        ("ppo train --adv_estimator grp", "grpo"),
        ("ppo plan --preset embedded-t", "embedded-tools"),
    ],
)
def test_bash_completes_commands_flags_and_values(line: str, words: str) -> None:
    script = (
        "source <(ppo --show-completion bash); COMP_WORDS=($0); "
        'COMP_CWORD=$((${#COMP_WORDS[@]}-1)); _ppo_completion ppo; echo "${COMPREPLY[@]}"'
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script, line], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PATH": path},
    )  # fmt: skip
    assert done.stdout.split() == words.split()
