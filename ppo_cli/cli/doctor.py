"""`ppo doctor`: what this machine has and lacks for training."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

import typer

from ppo_cli.cli.flags import Given, add_command, switch
from ppo_cli.cli.screen import clean, fit
from ppo_cli.errors import EXIT_USER

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def doctor(given: Given) -> None:
    """Look at Python, packages, GPUs, vLLM, Ray, memory, disk, hub, sandboxes and judges.

    Each line says ok, warn or fail, and what mends it. The exit code is 2 where one fails.
    The flags of a training run are taken too: then its output folder and judges are looked at.
    """
    config = given.resolve().config
    from ppo_cli.run.doctor import examine

    found, as_json = [], given.extras["json"]
    for one in examine(config, os.environ, probe=given.extras["probe"]):
        found.append(one)
        if not as_json:
            lines = [f"{one.state:<5} {one.part:<14} {one.found}"]
            lines += [f"{'':<20} -> {one.fix}"] * bool(one.fix)
            print(fit(clean("\n".join(lines)), sys.stdout.encoding), flush=True)
    if as_json:
        print(json.dumps([asdict(one) for one in found], ensure_ascii=False, indent=2))
    if any(one.state == "fail" for one in found):
        raise typer.Exit(EXIT_USER)


add_command(
    app,
    doctor,
    "Example: ppo doctor --use_api_reward --rm_api_type openai --probe",
    [
        switch("probe", "Also call the model hub, and each judge for a few tokens."),
        switch("json", "Machine-readable, to stdout."),
    ],
    ("trainer.default_local_dir", "trainer.output_dir", "reward.api."),
)
