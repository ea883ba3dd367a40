"""`ppo bridge verl`, `ppo bridge read`, and `--engine verl` of `ppo train` and `ppo plan`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ppo_cli.cli.flags import Arguments, add_command, make_flag, make_switch
from ppo_cli.cli.help import App
from ppo_cli.config.schema.keys import value_of
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import (
    ConfigError,
    MissingPart,
    UserError,
    collect_problems,
    list_some,
    plural,
    ppo,
    refuse_out_address,
)
from ppo_cli.paths import user_path
from ppo_cli.planning.findings.models import damaged_models
from ppo_cli.planning.findings.rules import find_findings, list_texts
from ppo_cli.planning.resolved import Resolved
from ppo_cli.run_folder.contents import ROWS
from ppo_cli.run_folder.folder import run_settings
from ppo_cli.secrets.redact import redact

if TYPE_CHECKING:
    from ppo_cli.extras.migrate.bridge.overrides import VerlOverrides

app = App(
    help="Train on verl with the same settings and rewards, and read its results back.",
    epilog="ppo bridge verl --out runs/on-verl --preset gsm8k --n_gpus 8",
)


def verl(arguments: Arguments) -> None:
    """Write the scripts for verl 0.9.1 with these settings; settings of verl pass through."""
    if arguments.extras["out"] is None:
        raise ConfigError("Name the folder to write: ppo bridge verl --out DIR ...")
    refuse_out_address(arguments.extras["out"])
    resolved, bridged = resolve_for_verl(arguments)
    files = _write_folder(user_path(arguments.extras["out"]), resolved, bridged)
    # Programs get the overrides, people the commands to run next.
    if arguments.extras["json"]:
        from ppo_cli.cli.screen import print_json

        lines = bridged.lines(files[0].parent)
        print_json({"files": [str(f) for f in files], "overrides": lines})
        return
    from ppo_cli.extras.migrate.bridge.folder import next_steps

    print("\n".join([*resolved.notes, *next_steps(files, resolved.config.trainer.nnodes)]))


add_command(
    app,
    verl,
    "ppo bridge verl --out DIR --preset gsm8k --n_gpus 8 --nnodes 4",
    [
        make_flag("out", str, None, "Folder to write; all nodes must see it.", "DIR"),
        make_switch("json", "Print JSON."),
    ],
)


@app.command(epilog="ppo bridge read DIR && ppo show DIR")
def read(
    folder: str = typer.Argument(metavar="DIR", help="Folder written by `ppo bridge verl`."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Convert verl's logs to metrics.jsonl and rollouts/, for ppo show and ppo view."""
    from ppo_cli.extras.migrate.bridge.rewards import read_back

    steps, responses = read_back(user_path(folder))
    if as_json:
        from ppo_cli.cli.screen import print_json

        print_json({"steps": steps, "responses": responses}, indent=None)
    else:
        read = f"{plural(steps, 'step')}, {plural(responses, 'response')}"
        print(f"{folder}: {read}. See them: ppo show {folder}")


def print_verl_plan(arguments: Arguments) -> None:
    """Print the settings of a command line as overrides for verl, one per line."""
    from ppo_cli.cli.screen import print_result

    resolved, bridged = resolve_for_verl(arguments)
    lines = bridged.lines(user_path(resolved.config.trainer.output_dir).resolve())
    print_result(
        {"overrides": lines},
        lambda: "\n".join([*lines, *(f"# {note}" for note in resolved.notes)]),
        as_json=bool(arguments.extras.get("json")),
    )


def train_on_verl(arguments: Arguments) -> None:
    """Run this node's script for verl and exit with its code; node 0 writes the scripts first.

    Raises MissingPart if verl or vLLM is missing (node 0 has then written the scripts), and
    UserError if node 0 writes no script in time.
    """
    resolved, bridged = resolve_for_verl(arguments)
    from ppo_cli.extras.migrate.bridge.folder import missing_verl, next_steps

    trainer = resolved.config.trainer
    folder, rank = user_path(trainer.output_dir).resolve(), trainer.node_rank or 0
    script = folder / f"node_{rank}.sh"
    # Node 0 writes the scripts of all nodes to the shared disk.
    if rank == 0:
        files = _write_folder(folder, resolved, bridged)
        print("\n".join([*resolved.notes, next_steps(files, trainer.nnodes)[0]]), flush=True)
    if missing := missing_verl([name for name in ("verl", "vllm") if find_spec(name)]):
        raise MissingPart(f"{missing} {folder} is written; start the training with: bash {script}")
    # The other nodes wait for the file.
    ends = time.monotonic() + trainer.node_timeout
    while not script.exists():
        if time.monotonic() > ends:
            raise UserError(
                f"{script} did not appear in time: node 0 writes it to a disk that all nodes share."
            )
        time.sleep(1.0)
    environ = {"PYTHON": sys.executable, "MASTER_PORT": str(trainer.master_port), **os.environ}
    raise typer.Exit(subprocess.call(["bash", str(script)], env=environ))


def suggest_verl(arguments: Arguments, problems: Sequence[str]) -> Iterator[str]:
    """Yield advice to run on verl, if a refused line has settings that only verl knows."""
    from ppo_cli.extras.migrate.bridge.overrides import is_verl_only
    from ppo_cli.extras.migrate.verl.translator import WRAPPER

    # Only settings that the problems mention: the others were accepted.
    text = " ".join(problems)
    flags = (f"{name}={value}" for name, (value, _) in arguments.flags.items())
    verl_words = [word for word in (*flags, *arguments.overrides) if is_verl_only(word)]
    names = [word.partition("=")[0].lstrip("+").removeprefix(WRAPPER) for word in verl_words]
    # A mistyped value is none of verl's either, nor are estimators that a translation names.
    ours = " ".join(p for p in problems if "Did you mean" in p or "algorithm.adv_estimator:" in p)
    verl_names = [n for n in dict.fromkeys(names) if n in text and f"{n}: '" not in ours]
    if verl_names:
        line, folder = ppo("train --engine verl"), ppo("bridge verl --out DIR")
        yield (
            f"verl has {list_some(verl_names, 2)}: `{line} ...` runs this line on verl, "
            f"and `{folder} ...` writes the scripts for it."
        )


def resolve_for_verl(arguments: Arguments) -> tuple[Resolved, VerlOverrides]:
    """Return the settings of a line and verl's overrides for them.

    Raises one ConfigError with all problems.
    """
    from ppo_cli.extras.migrate.bridge.overrides import build_overrides, is_verl_only

    # Settings that only verl has are passed on as they are.
    verl_overrides = tuple(word for word in arguments.overrides if is_verl_only(word))
    rest = tuple(word for word in arguments.overrides if word not in verl_overrides)
    # Rules of other engines, such as limits on GPUs, do not apply.
    flags = {**arguments.flags, "trainer.engine": ("verl", "--engine verl")}
    resolved = replace(arguments, flags=flags, overrides=rest).resolve_node()
    bridged = build_overrides(resolved.requested, resolved.machine, verl_overrides)
    problems = [*bridged.problems, *_find_missing_inputs(resolved)]
    if problems:
        raise ConfigError([redact(line) for line in dict.fromkeys(problems)])
    return resolved, bridged


def _find_missing_inputs(resolved: Resolved) -> Iterator[str]:
    """Yield the files and packages that the rewards miss.

    API keys may be missing: they may be set only on the machine that trains.
    """
    from ppo_cli.scoring.sources import file_checks

    config = resolved.config
    # Everything but keys must be present here, as verl starts the reward in its own processes.
    yield from list_texts(find_findings(resolved), "missing")
    yield from damaged_models(config.training_models, config.reward)
    yield from collect_problems(file_checks(config.reward))


def _write_folder(folder: Path, resolved: Resolved, bridged: VerlOverrides) -> Sequence[Path]:
    """Write the scripts of all nodes and return their paths; refuses a folder of another run."""
    from ppo_cli.extras.migrate.bridge.folder import write_folder

    folder = user_path(folder)
    # verl resumes from its own checkpoints even if the settings have changed.
    if resolved.config.trainer.resume_mode == "auto" and (folder / "verl").is_dir():
        _check_same_run(folder, resolved.config)
    return write_folder(folder, resolved, bridged)


def _check_same_run(folder: Path, config: Config) -> None:
    """Raise ConfigError if the folder holds a verl run that was started with other settings."""
    from ppo_cli.run.identity import describe_changes, setting_values

    before, now = (
        setting_values(settings) | {name: value_of(settings, name) for name in ROWS}
        for settings in (run_settings(folder), config)
    )
    if other := describe_changes(before, now):
        raise ConfigError(
            f"{folder} holds a run on verl with another {other}. Name another folder, or start "
            "from scratch in this one with --resume never."
        )
