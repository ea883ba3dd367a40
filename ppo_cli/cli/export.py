"""`ppo export`: one Hugging Face folder from a run or a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ppo_cli.cli.screen import print_result
from ppo_cli.errors import ppo

Source = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_OR_CHECKPOINT", show_default=False,
        help="Run folder (its latest checkpoint is taken), checkpoint, or model folder in one.",
    ),
]  # fmt: skip
Out = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", show_default=False, help="Folder to write; new or empty."),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint", metavar="WHICH", show_default="latest",
        help="Checkpoint of the run: best, latest, step_000010, or a folder.",
    ),
]  # fmt: skip
Dtype = Annotated[
    Literal["float32", "bfloat16"] | None,
    typer.Option(
        "--dtype", show_default="as it was saved: float32",
        help="Type of the weights; bfloat16 takes half the space, and is what servers compute in.",
    ),
]  # fmt: skip
Critic = Annotated[bool, typer.Option("--critic", help="Export the critic, not the actor.")]
Base = Annotated[
    str | None,
    typer.Option(
        "--base", metavar="MODEL", show_default="what the adapter names",
        help="Base model, folder or hub name, that a LoRA adapter is merged into.",
    ),
]  # fmt: skip
Force = Annotated[bool, typer.Option("--force", help="Replace the model that DIR holds.")]
Trust = Annotated[
    bool, typer.Option("--trust_remote_code", help="Run Python code that comes with the base.")
]
Push = Annotated[
    str | None,
    typer.Option(
        "--push", metavar="NAME", show_default=False,
        help="Upload the folder to this repository of the Hugging Face hub: NAME or OWNER/NAME.",
    ),
]  # fmt: skip
Public = Annotated[
    bool, typer.Option("--public", help="Everybody can read what --push uploads; else private.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def export(
    source: Source,
    out: Out,
    checkpoint: Checkpoint = None,
    dtype: Dtype = None,
    critic: Critic = False,
    base: Base = None,
    force: Force = False,
    trust_remote_code: Trust = False,
    push: Push = None,
    public: Public = False,
    as_json: Json = False,
) -> None:
    """Write a trained model as one Hugging Face folder, tokenizer and chat template included.

    A LoRA adapter is merged into its base. Weights stay in float32 unless --dtype says otherwise.
    The model of a run gets a card, README.md: base model, data, reward, settings, results, cost.
    """
    from ppo_cli.run.export import export as run_export

    record = run_export(
        source, out, checkpoint=checkpoint, critic=critic, dtype=dtype, base=base, force=force,
        trust_remote_code=trust_remote_code, push=push, public=public,
    )  # fmt: skip
    print_result(record, lambda: export_text(record), as_json=as_json)


def export_text(record: dict[str, Any]) -> str:
    """Return what was written, from where, and what to do with it."""
    step = "" if record["step"] is None else f" (step {record['step']})"
    files = len(record["files"])
    lines = [
        f"Model in {record['out']}",
        f"  from        {record['source']}{step}",
        f"  parameters  {amount(record['parameters']).strip()}, {record['dtype']}",
        f"  size        {amount(record['bytes'], 'G')}B in {files} file{'s' * (files > 1)}",
    ]
    if record["card"]:
        lines.append("  card        README.md")
    if record["pushed"]:
        lines.append(f"  uploaded to {record['pushed']}")
    if record["base"]:
        lines.insert(2, f"  merged with {record['base']}")
    if record["dtype"] == "float32":
        lines[3 + bool(record["base"])] += "; --dtype bfloat16 takes half"
    return "\n".join([*lines, f"Use it:  {ppo('train')} {record['use_as']} {record['out']}"])


def amount(count: int, billions: str = "B") -> str:
    """Return a count as people say it: 494 M."""
    for size, unit in ((1e9, billions), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} "


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(epilog="Example: ppo export outputs --out my_model --dtype bfloat16")(export)
