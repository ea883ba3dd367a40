"""`ppo reward fit`: the flags of a fit, and what is printed at its end."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ppo_cli.cli.crash import Crash
from ppo_cli.cli.screen import clean, make_screen
from ppo_cli.cli.screen import fit as fit_words
from ppo_cli.errors import ConfigError, PpoError, ppo

EXAMPLE = "Example: ppo reward fit --data pairs.jsonl --model Qwen/Qwen2.5-0.5B --out my_rm"

Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data", metavar="FILE", show_default=False,
        help="Pairs: prompt, chosen, rejected, or two transcripts; repeatable. JSON, JSONL (.gz "
        "too), parquet, or a hub set.",
    ),
]  # fmt: skip
Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="PATH", show_default=False,
        help="Causal language model to start from: folder, hub name, or `embedded`.",
    ),
]  # fmt: skip
Out = Annotated[str, typer.Option("--out", metavar="DIR", help="Folder for the reward model.")]
ValData = Annotated[
    list[str] | None,
    typer.Option("--val_data", metavar="FILE", help="Held-out pairs; repeatable."),
]
ValShare = Annotated[
    float | None,
    typer.Option(
        "--val_share", metavar="X", min=0.0, max=1.0, show_default="0.1",
        help="Share of the pairs that is held out, by prompt; at most 2000 pairs.",
    ),
]  # fmt: skip
Epochs = Annotated[int, typer.Option("--epochs", min=1, help="Passes over the pairs.")]
MaxSteps = Annotated[int | None, typer.Option("--max_steps", min=1, help="Most steps.")]
Lr = Annotated[
    float | None,
    typer.Option(
        "--lr", min=0.0, max=1.0, show_default="1e-5; 1e-3 for the head alone or a tiny model",
        help="Peak learning rate.",
    ),
]  # fmt: skip
Warmup = Annotated[
    float, typer.Option("--warmup", min=0.0, max=1.0, help="Share of the steps with a rising rate.")
]
BatchSize = Annotated[int, typer.Option("--batch_size", min=1, help="Pairs in a step.")]
BatchTokens = Annotated[
    int,
    typer.Option(
        "--batch_tokens", min=16, help="Tokens in memory at once; does not change the result."
    ),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        "--max_length", min=8, show_default="2048, or less if the model reads less",
        help="Most tokens of prompt and response; longer pairs are left out, never cut.",
    ),
]  # fmt: skip
FreezeBody = Annotated[
    bool, typer.Option("--freeze_body", help="Train the head alone: quick, and often less good.")
]
Center = Annotated[
    float, typer.Option("--center", min=0.0, help="Keep scores around 0; 0.01 is a usual weight.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="WORD", show_default="bfloat16 on a GPU, else float32",
        help="Precision of the computation: float32 or bfloat16; weights stay float32.",
    ),
]  # fmt: skip
Template = Annotated[
    str | None,
    typer.Option(
        "--template", metavar="NAME|FILE",
        help="Chat template for a model without one: transcript, chatml, or a Jinja file.",
    ),
]  # fmt: skip
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of head, split and order.")]
SkipBad = Annotated[
    bool, typer.Option("--skip_bad_rows", help="Leave bad rows out instead of stopping.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the fitted model that --out holds.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def fit(
    data: Data = None,
    model: Model = None,
    out: Out = "./reward_model",
    val_data: ValData = None,
    val_share: ValShare = None,
    epochs: Epochs = 1,
    max_steps: MaxSteps = None,
    lr: Lr = None,
    warmup: Warmup = 0.05,
    batch_size: BatchSize = 32,
    batch_tokens: BatchTokens = 16384,
    max_length: MaxLength = None,
    freeze_body: FreezeBody = False,
    center: Center = 0.0,
    dtype: Dtype = None,
    template: Template = None,
    seed: Seed = 42,
    skip_bad_rows: SkipBad = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a reward model from pairs of responses (Bradley-Terry)."""
    _refuse(data, model, val_data, val_share, lr, dtype)
    from ppo_cli.fitting.fit import fit as run_fit
    from ppo_cli.fitting.training import FitSettings, Recipe

    recipe = Recipe(
        epochs=epochs, max_steps=max_steps, lr=lr, warmup=warmup, batch_size=batch_size,
        batch_tokens=batch_tokens, center=center, freeze_body=freeze_body,
        dtype=dtype,  # type: ignore[arg-type]
        seed=seed,
    )  # fmt: skip
    settings = FitSettings(
        data=tuple(data or ()), model=str(model), out=Path(out), recipe=recipe,
        val_data=tuple(val_data or ()), val_share=0.1 if val_share is None else val_share,
        max_length=max_length, template=template, skip_bad_rows=skip_bad_rows,
        overwrite=overwrite,
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
    text = json.dumps(record, ensure_ascii=False, indent=2) if as_json else fit_text(record)
    typer.echo(fit_words(text if as_json else clean(text), sys.stdout.encoding))


def _refuse(
    data: list[str] | None,
    model: str | None,
    val_data: list[str] | None,
    val_share: float | None,
    lr: float | None,
    dtype: str | None,
) -> None:
    """Stop before anything heavy is imported when something is missing; all at once."""
    problems = []
    if not data:
        problems.append("Name the pairs with --data FILE: JSON, JSONL or parquet, or a hub set.")
    if not model:
        problems.append(
            "Name the model to start from with --model PATH: a folder, a hub name, or `embedded`."
        )
    if val_data and val_share is not None:
        problems.append("--val_data and --val_share both say what is held out; keep one.")
    if lr == 0:
        problems.append("--lr 0: give a rate above 0, or none.")
    if dtype not in (None, "float32", "bfloat16"):
        problems.append(f"--dtype {dtype}: give float32 or bfloat16.")
    if problems:
        raise ConfigError(problems)


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
