"""`ppo reward fit`: fits a reward model to pairs of responses or to labels."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from ppo_cli.cli.app import Crash
from ppo_cli.cli.flags import make_flag, make_switch, set_parameters
from ppo_cli.cli.help import App
from ppo_cli.cli.reward_tables import format_section
from ppo_cli.cli.screen import make_screen, print_result
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.folder import check_folder
from ppo_cli.data_sets.sources import check_present
from ppo_cli.errors import ConfigError, PpoError, collect_problems, ppo
from ppo_cli.extras.lab.commands.calibrate import list_estimate_rows
from ppo_cli.paths import user_path

app = App()
FIT_FLAGS = [
    make_flag(
        "data", list[str], None,
        "Pairs: prompt, chosen, rejected, or two transcripts; repeatable. JSON, JSONL (.gz too), "
        "parquet, or a hub set.", "FILE",
    ),
    make_flag(
        "labels", str, None,
        "Learn labels instead of pairs: the column with a label (true, false, 0 to 1) of each "
        "prompt and response, or with those of --criteria.", "COLUMN",
    ),
    make_flag(
        "criteria", str, None,
        "Criteria as for --rm_rubric; --labels then has {NAME: true, false or level} in each row.",
        "FILE",
    ),
    make_flag(
        "model", str, None,
        "Causal language model to start from: folder, hub name, or `embedded`.", "PATH",
    ),
    make_flag("out", str, "./reward_model", "Folder for the reward model.", "DIR"),
    make_flag("val_data", list[str], None, "Held-out pairs; repeatable.", "FILE"),
    make_flag(
        "val_share", float, None,
        "Share of the pairs that is held out, by prompt; at most 2000 pairs.", "X",
        min=0.0, max=1.0, show_default="0.1",
    ),
    make_flag("epochs", int, 1, "Passes over the pairs.", min=1),
    make_flag("max_steps", int, None, "Maximum number of steps.", min=1),
    make_flag(
        "lr", float, None, "Peak learning rate.", min=0.0, max=1.0,
        show_default="1e-5; 1e-3 for the head alone or a tiny model",
    ),
    make_flag("warmup", float, 0.05, "Share of the steps with a rising rate.", min=0.0, max=1.0),
    make_flag("batch_size", int, 32, "Pairs in a step.", min=1),
    make_flag(
        "batch_tokens", int, 16384, "Tokens in memory at once; does not change the result.", min=16
    ),
    make_flag(
        "max_length", int, None,
        "Maximum tokens of prompt and response; longer pairs are left out, not cut.", min=8,
        show_default="2048, or less if the model reads less",
    ),
    make_switch("freeze_body", "Train only the head: faster, often less accurate."),
    make_flag("center", float, 0.0, "Keep scores around 0; 0.01 is a usual weight.", min=0.0),
    make_flag(
        "dtype", str, None,
        "Precision of the computation: float32 or bfloat16; weights stay float32.", "WORD",
        show_default="bfloat16 on a GPU, else float32",
    ),
    make_flag(
        "template", str, None,
        "Chat template for a model without one: transcript, chatml, or a Jinja file.", "NAME|FILE",
    ),
    make_flag("seed", int, 42, "Seed of head, split and order.", min=0),
    make_switch("skip_bad_rows", "Leave bad rows out instead of stopping."),
    make_switch("overwrite", "Replace the fitted model that --out holds."),
    make_switch("json", "Print JSON."),
]  # fmt: skip


def fit_model(**typed: Any) -> None:
    """Train a reward model from pairs of responses (Bradley-Terry), or a judge from labels."""
    if problems := _find_fit_problems(typed):
        raise ConfigError(problems)
    from ppo_cli.extras.lab.fitting.fit import fit as run_fit
    from ppo_cli.extras.lab.fitting.training import FitSettings, Recipe

    # --val_share has no default in the flag, so that a typed one is recognised next to --val_data.
    names = {field.name for field in fields(Recipe)} & set(typed)
    settings = FitSettings(
        data=tuple(typed["data"]),
        model=typed["model"],
        out=user_path(typed["out"]),
        recipe=Recipe(**{name: typed[name] for name in names}),
        val_data=tuple(typed["val_data"] or ()),
        val_share=0.1 if typed["val_share"] is None else typed["val_share"],
        **{n: typed[n] for n in ("max_length", "template", "skip_bad_rows", "overwrite",
                                 "labels", "criteria")},
    )  # fmt: skip
    screen = make_screen(sys.stderr)  # stdout is for the result
    try:
        record = run_fit(settings, screen)
    except (PpoError, OSError):
        raise
    except Exception as bug:
        raise Crash(Path()) from bug
    finally:
        screen.close()
    print_result(record, lambda: format_fit(record), as_json=typed["json"])


def _find_fit_problems(typed: Mapping[str, Any]) -> list[str]:
    """Return all problems of the flags; called before heavy imports."""
    problems = []
    if not typed["data"]:
        problems.append("Name the pairs with --data FILE: JSON, JSONL or parquet, or a hub set.")
    if not typed["model"]:
        problems.append(
            "Name the model to start from with --model PATH: a folder, a hub name, or `embedded`."
        )
    models = [typed["model"]] if typed["model"] else []
    problems += collect_problems(
        [
            *(partial(check_folder, model_folder(model), "--model") for model in models),
            *(
                partial(check_present, file)
                for file in (*(typed["data"] or ()), *(typed["val_data"] or ()))
            ),
        ]
    )
    if typed["criteria"] and not typed["labels"]:
        problems.append("--criteria needs the column with their labels: name it with --labels.")
    if typed["labels"] and typed["center"]:
        problems.append("--center keeps the scores of pairs around 0; leave it out with --labels.")
    if typed["val_data"] and typed["val_share"] is not None:
        problems.append("--val_data and --val_share both choose the held-out pairs; keep one.")
    if typed["lr"] == 0:
        problems.append("--lr 0: give a rate above 0, or leave it out.")
    if typed["dtype"] not in (None, "float32", "bfloat16"):
        problems.append(f"--dtype {typed['dtype']}: give float32 or bfloat16.")
    return problems


def format_fit(record: dict[str, Any]) -> str:
    """Return the result of a fit as text: scores before and after, and how to use the model."""
    before, after, labelled = record["before"], record["after"], "labels" in record
    held_out = record["rows" if labelled else "pairs"]["held_out"]
    mean, std = record["scores"]["mean"], record["scores"]["std"]
    kept = "measured on {} held-out rows" if labelled else "the best on {} held-out pairs"
    # Scores that follow labels are between 0 and 1 already.
    affine = f"scaling: affine, mean: {mean:.4g}, std: {std:.4g}"
    scaling = "scaling: none, clip: 1" if labelled else affine
    lines = [
        f"Reward model in {record['out']} (step {record['steps']['kept']} of "
        f"{record['steps']['all']}, {kept.format(held_out)})",
        "              before    after",
        *(
            f"  {name:<10}{before[name]:>8.3f} {after[name]:>8.3f}"
            for name in ("accuracy", "loss", "margin")
        ),
        f"Scores of held-out responses: mean {mean:.4g}, std {std:.4g}.",
        f"Use it:  {ppo('train')} --reward_model {record['out']}",
        f"In a mixture, set for its part: {scaling}",
    ]
    if labelled:
        score, policy = record["seconds"]["score"], record["seconds"]["policy"]
        lines[5:5] = [
            *format_section(
                "How often the better of two held-out rows scores higher (chance: 0.5)",
                list_estimate_rows(record["agreement"]),
            ),
            f"A score takes {1000 * score:.3g} ms a response, {score / policy:.0%} of the "
            f"{1000 * policy:.3g} ms in which {record['model']} writes one.",
        ]
        if (record["agreement"]["score"]["low"] or 0.0) <= 0.5:
            lines.insert(1, "  Doubtful: guessing can give that. More rows or steps may help.")
    elif warning := warn_if_like_guessing(after["accuracy"], held_out):
        lines.insert(1, warning)
    return "\n".join(lines)


def warn_if_like_guessing(accuracy: float, held_out: int) -> str | None:
    """Return a warning if an accuracy may come from guessing (two standard errors), else None."""
    # Half of the pairs are right by chance, with this standard error.
    if accuracy - 0.5 > 2 * math.sqrt(0.25 / held_out):
        return None
    return (
        f"  Doubtful: an accuracy of {accuracy:.3f} on {held_out} pairs is what guessing can give. "
        "More pairs, more steps, or a larger model may help."
    )


app.command(
    "fit", epilog="ppo reward fit --data pairs.jsonl --model Qwen/Qwen2.5-0.5B --out my_rm"
)(set_parameters(fit_model, FIT_FLAGS))
