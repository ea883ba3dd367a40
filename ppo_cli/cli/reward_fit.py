"""`ppo reward fit`: the flags of a fit, and what is printed at its end."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from ppo_cli.cli.crash import Crash
from ppo_cli.cli.flags import own_flag, switch
from ppo_cli.cli.screen import clean, make_screen
from ppo_cli.cli.screen import fit as fit_words
from ppo_cli.errors import ConfigError, PpoError, ppo

EXAMPLE = "Example: ppo reward fit --data pairs.jsonl --model Qwen/Qwen2.5-0.5B --out my_rm"

FLAGS = [
    own_flag(
        "data", list[str], None,
        "Pairs: prompt, chosen, rejected, or two transcripts; repeatable. JSON, JSONL (.gz too), "
        "parquet, or a hub set.", "FILE",
    ),
    own_flag(
        "model", str, None,
        "Causal language model to start from: folder, hub name, or `embedded`.", "PATH",
    ),
    own_flag("out", str, "./reward_model", "Folder for the reward model.", "DIR"),
    own_flag("val_data", list[str], None, "Held-out pairs; repeatable.", "FILE"),
    own_flag(
        "val_share", float, None,
        "Share of the pairs that is held out, by prompt; at most 2000 pairs.", "X",
        min=0.0, max=1.0, show_default="0.1",
    ),
    own_flag("epochs", int, 1, "Passes over the pairs.", min=1),
    own_flag("max_steps", int, None, "Most steps.", min=1),
    own_flag(
        "lr", float, None, "Peak learning rate.", min=0.0, max=1.0,
        show_default="1e-5; 1e-3 for the head alone or a tiny model",
    ),
    own_flag("warmup", float, 0.05, "Share of the steps with a rising rate.", min=0.0, max=1.0),
    own_flag("batch_size", int, 32, "Pairs in a step.", min=1),
    own_flag(
        "batch_tokens", int, 16384, "Tokens in memory at once; does not change the result.", min=16
    ),
    own_flag(
        "max_length", int, None,
        "Most tokens of prompt and response; longer pairs are left out, never cut.", min=8,
        show_default="2048, or less if the model reads less",
    ),
    switch("freeze_body", "Train the head alone: quick, and often less good."),
    own_flag("center", float, 0.0, "Keep scores around 0; 0.01 is a usual weight.", min=0.0),
    own_flag(
        "dtype", str, None,
        "Precision of the computation: float32 or bfloat16; weights stay float32.", "WORD",
        show_default="bfloat16 on a GPU, else float32",
    ),
    own_flag(
        "template", str, None,
        "Chat template for a model without one: transcript, chatml, or a Jinja file.", "NAME|FILE",
    ),
    own_flag("seed", int, 42, "Seed of head, split and order.", min=0),
    switch("skip_bad_rows", "Leave bad rows out instead of stopping."),
    switch("overwrite", "Replace the fitted model that --out holds."),
    switch("json", "Print JSON."),
    switch("debug", "Show tracebacks."),
]  # fmt: skip
RECIPE = (
    "epochs", "max_steps", "lr", "warmup", "batch_size", "batch_tokens", "center", "freeze_body",
    "dtype", "seed",
)  # fmt: skip


def fit(**typed: Any) -> None:
    """Train a reward model from pairs of responses (Bradley-Terry)."""
    if problems := _problems(typed):
        raise ConfigError(problems)
    from ppo_cli.fitting.fit import fit as run_fit
    from ppo_cli.fitting.training import FitSettings, Recipe

    settings = FitSettings(
        data=tuple(typed["data"]),
        model=typed["model"],
        out=Path(typed["out"]),
        recipe=Recipe(**{name: typed[name] for name in RECIPE}),
        val_data=tuple(typed["val_data"] or ()),
        val_share=0.1 if typed["val_share"] is None else typed["val_share"],
        **{n: typed[n] for n in ("max_length", "template", "skip_bad_rows", "overwrite")},
    )
    screen = make_screen(sys.stderr)  # stdout is for the result
    try:
        record = run_fit(settings, screen)
    except (PpoError, OSError):
        raise
    except Exception as bug:
        raise Crash(Path()) from bug
    finally:
        screen.close()
    as_json = json.dumps(record, ensure_ascii=False, indent=2)
    text = as_json if typed["json"] else clean(fit_text(record))
    typer.echo(fit_words(text, sys.stdout.encoding))


def _problems(typed: Mapping[str, Any]) -> list[str]:
    """Say what is missing, before anything heavy is imported; all at once."""
    problems = []
    if not typed["data"]:
        problems.append("Name the pairs with --data FILE: JSON, JSONL or parquet, or a hub set.")
    if not typed["model"]:
        problems.append(
            "Name the model to start from with --model PATH: a folder, a hub name, or `embedded`."
        )
    if typed["val_data"] and typed["val_share"] is not None:
        problems.append("--val_data and --val_share both say what is held out; keep one.")
    if typed["lr"] == 0:
        problems.append("--lr 0: give a rate above 0, or none.")
    if typed["dtype"] not in (None, "float32", "bfloat16"):
        problems.append(f"--dtype {typed['dtype']}: give float32 or bfloat16.")
    return problems


def fit_text(record: dict[str, Any]) -> str:
    """Return what the fit came to, and what to do with it."""
    before, after, pairs = record["before"], record["after"], record["pairs"]
    mean, std = record["scores"]["mean"], record["scores"]["std"]
    lines = [
        f"Reward model in {record['out']} (step {record['steps']['kept']} of "
        f"{record['steps']['all']}, the best on {pairs['held_out']} held-out pairs)",
        "              before    after",
        *(
            f"  {name:<10}{before[name]:>8.3f} {after[name]:>8.3f}"
            for name in ("accuracy", "loss", "margin")
        ),
        f"Scores of held-out responses: mean {mean:.4g}, std {std:.4g}.",
        f"Use it:  {ppo('train')} --reward_model {record['out']}",
        f"In a mixture, under its part: scaling: affine, mean: {mean:.4g}, std: {std:.4g}",
    ]
    if warning := doubt_warning(after["accuracy"], pairs["held_out"]):
        lines.insert(1, warning)
    return "\n".join(lines)


def doubt_warning(accuracy: float, held_out: int) -> str | None:
    """Say when an accuracy is within what guessing gives (two standard errors)."""
    if accuracy - 0.5 > 2 * math.sqrt(0.25 / held_out):
        return None
    return (
        f"  Doubtful: an accuracy of {accuracy:.3f} on {held_out} pairs is what guessing can give. "
        "More pairs, more steps, or a larger model may help."
    )
