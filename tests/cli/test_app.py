"""`ppo` as people run it: what it prints, and the exit code."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from ppo_cli.cli import app as app_module
from ppo_cli.cli.app import COMMANDS, Crash, main, print_error
from ppo_cli.config.layers import Resolved
from ppo_cli.config.schema.keys import table
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import ConfigError, Interrupted, MissingPart
from ppo_cli.errors import exit_code_of as node_exit_code

PRESET = ["--preset", "embedded"]


def values(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, dict[str, object]]:
    assert main(["plan", "--json", *args]) == 0
    values: dict[str, dict[str, object]] = json.loads(capsys.readouterr().out)["values"]
    return values


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


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    program: Any = typer.main.get_command(app_module.app)
    commands, lacking = [], []
    for name in COMMANDS:
        _, command, _ = program.resolve_command(None, [name])
        commands += [(name, below) for below in getattr(command, "commands", ())] or [(name,)]
    assert {("reward", "score"), ("prompts", "render")} <= {*commands}
    for args in commands:
        assert main([*args, "--help"]) == 0
        out = capsys.readouterr().out
        if f"Example: ppo {args[0]}" not in " ".join(out.split()):
            lacking.append(args)
        if args[-1] in ("score", "calibrate", "audit", "render"):  # flags of rewards alone
            assert "--rm_prompt_preset" in out and "--lora_rank" not in out
    assert lacking == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("ppo-cli ")


@pytest.mark.parametrize(
    ("args", "key", "value", "origin"),
    [
        (["--batch_size", "128"], "data.train_batch_size", 128, "flag --batch_size"),
        (["--batch-size", "128"], "data.train_batch_size", 128, "flag --batch_size"),
        (["--batch-size=128"], "data.train_batch_size", 128, "flag --batch_size"),
        (
            ["--use-api-reward", "--rm-model", "m"],
            "reward.api.enable",
            True,
            "flag --use_api_reward",
        ),
        (["--no_use_api_reward"], "reward.api.enable", False, "flag --use_api_reward"),
        (["--no-use-api-reward"], "reward.api.enable", False, "flag --use_api_reward"),
        (["--train_files", "a", "b"], "data.train_files", ["a", "b"], "flag --train_files"),
        (["--train-files", "a,b"], "data.train_files", ["a", "b"], "flag --train_files"),
        (
            ["--train_files", "a", "--train-files", "b"],
            "data.train_files",
            ["a", "b"],
            "flag --train_files",
        ),
        (["--save_freq", "-1"], "trainer.save_freq", -1, "flag --save_freq"),
        (
            ["--logger", "console,tensorboard"],
            "trainer.logger",
            ["console", "tensorboard"],
            "flag --logger",
        ),
        (["actor.optim.lr=3e-6"], "actor.optim.lr", 3e-6, "override"),
        (["~actor.optim.lr"], "actor.optim.lr", 1e-6, "default"),
    ],
)
def test_flags_and_overrides_reach_the_plan(
    args: list[str], key: str, value: object, origin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert values(capsys, *PRESET, *args)[key] == {"value": value, "origin": origin}


def test_the_plan_of_a_small_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppo_cli.config.memory.plan.matmul_library", lambda requested: "onednn")
    monkeypatch.setattr("ppo_cli.config.memory.plan.find_jemalloc", lambda: None)
    row = {"prompt": "a", "ground_truth": "1", "data_source": "arithmetic"}
    Path("t.jsonl").write_text((json.dumps(row) + "\n") * 20)
    Path("c.yaml").write_text(
        "data:\n  train_files: [t.jsonl]\n  train_batch_size: 8\nactor:\n"
        "  ppo_mini_batch_size: 4\nrollout:\n  n: 2\n"
    )
    assert main(["plan", "--model", "a/b", "--config", "c.yaml", "--epochs", "3"]) == 0
    assert capsys.readouterr().out == GOLDEN
    assert main(["train", "--dry-run", "--model", "a/b", "--config", "c.yaml", "--epochs=3"]) == 0
    assert capsys.readouterr().out == GOLDEN


GOLDEN = f"""\
Settings
  model.path                 a/b      flag --model
  data.train_files           t.jsonl  c.yaml line 2
  data.train_batch_size      8        c.yaml line 3
  actor.ppo_mini_batch_size  4        c.yaml line 5
  rollout.n                  2        c.yaml line 7
  trainer.total_epochs       3        flag --epochs
  and {len(table()) - 6} at their default (--all shows them)

Arithmetic
  a step: 8 prompts x 2 = 16 responses = 16 reward calls
  actor: 2 mini-batches of 8 responses x 1 epoch = 2 optimizer steps a step, each in at most \
4 micro-batches
  critic: 2 mini-batches of 8 responses x 1 epoch = 2 optimizer steps a step, each in at most \
4 micro-batches
  the run: 20 training rows, 6 steps, 12 actor optimizer steps
  reward: 96 calls in all, none of them for validation (--val_files)
  time: unknown, ./outputs has no earlier run of this model

Devices
  one process on the CPU trains and samples

Memory
  memory of a/b: unknown (no config.json here, or not a plain decoder)
  gradient checkpointing: on (the memory of a step is unknown here)
  packing: on if a trial at start-up gives the same numbers as padded rows
  attention: sdpa if the trial gives the same numbers, else eager
  prompt computed once for its packed responses: yes (model.share_prompts)
  old log-probs: from the sampler (it uses the actor's weights)
  matrix products: float32 by oneDNN
"""


def test_time_is_forecast_from_the_run_in_the_output_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(
        "model:\n  path: a/b\ndata:\n  train_batch_size: 8\nrollout:\n  n: 2\n"
    )
    steps = [{"step": i, "time/step_s": s} for i, s in enumerate((9.0, 2.0, 3.0), start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    folder = ["--output_dir", str(tmp_path), "--batch_size", "32", "--mini_batch_size", "32"]
    for model, seconds in (("a/b", 3.0 * 32 * 1 / 16), ("a/c", None)):
        main(["plan", "--json", "--model", model, *folder])
        document = json.loads(capsys.readouterr().out)
        assert document["arithmetic"]["step_seconds"] == seconds
    main(["plan", "--model", "a/b", "--max_steps", "20", *folder])
    output = capsys.readouterr().out
    assert "about 6 s per step, 2 min for 20 steps, from the median of 3 steps of 16" in output


def test_all_shows_the_defaults_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--all", "--model", "a/b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["model.path", "a/b", "flag", "--model"]
    assert sum(line.endswith("  default") for line in lines) == len(table()) - 3  # model, prompts


def test_plan_json_has_the_documented_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {
        "values",
        "arithmetic",
        "placement",
        "memory",
        "reward",
        "notes",
        "problems",
    }
    assert set(document["values"]) == set(table())
    assert "No GPU and no --model" in document["notes"][0]


def end_with(error: BaseException, monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """Run `ppo train` with an assembly that ends in `error`."""
    import types

    def train(resolved: Resolved, screen: object) -> None:
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
        (PermissionError(errno.EACCES, "no", "out"), 2, "error: out: permission denied. Choose a"),
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


def test_ctrl_c_is_a_clean_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_with(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err == "Stopped.\n"


def test_who_trains_and_who_joins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Node 0 opens the cluster and trains in it, the others join, and one process needs none."""
    import types
    from contextlib import contextmanager

    done: list[object] = []
    nodes = types.SimpleNamespace()

    @contextmanager
    def open_cluster(config: Config, environ: object, tell: object) -> Iterator[object]:
        done.append("open")
        yield nodes
        done.append("close")

    def join_cluster(config: Config, environ: object, tell: object) -> int:
        done.append(f"join {config.trainer.node_rank}")
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


def test_the_package_runs_as_a_module() -> None:
    root = Path(app_module.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "ppo_cli", "train", "--batch_sise", "3"],
        env={**os.environ, "PYTHONPATH": str(root), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: there is no flag --batch_sise. Did you mean '--batch_size'? "
        f"See `{sys.executable} -m ppo_cli train --help`.\n"
    )


@pytest.mark.parametrize("limit_kib", [60_000, 150_000, 500_000, 850_000, 1_000_000])
def test_too_little_address_space_is_a_matter_of_memory(limit_kib: int, tmp_path: Path) -> None:
    """Libraries end in their own words: an import, a thread or a product that cannot be made."""
    train = "-m ppo_cli train --preset embedded --output_dir out trainer.total_training_steps=1"
    done = subprocess.run(
        ["sh", "-c", f"ulimit -v {limit_kib}; exec {sys.executable} {train}"],
        env={**os.environ, "PYTHONPATH": str(Path(app_module.__file__).parents[2])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "out of memory" in done.stderr.lower()
    assert f"limited to {limit_kib / 2**20:.2f} GiB here: run `ulimit -v unlimited`" in done.stderr
    assert "bug" not in done.stderr


def test_a_full_memory_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")):
        assert print_error(error) == node_exit_code(error) == 2
        output = capsys.readouterr().err
        assert output.startswith("error: out of memory") and "a smaller model" in output
    assert print_error(RuntimeError("could not create a primitive")) == 1
