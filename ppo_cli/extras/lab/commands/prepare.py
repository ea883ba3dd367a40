"""`ppo data prepare`: writes well-known sets as files for training."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Annotated

import typer

from ppo_cli.cli.help import App
from ppo_cli.cli.screen import print_text
from ppo_cli.errors import plural, ppo
from ppo_cli.extras.lab.prepare import RECIPES, PreparedFile
from ppo_cli.extras.lab.prepare import prepare as run_prepare

app = App()


@app.command(
    epilog="ppo data prepare gsm8k --source ./gsm8k --out ./data/gsm8k\n"
    "ppo data prepare reasoning_gym:chain_sum --rows 2000 --out ./data/sums"
)
def prepare(
    name: Annotated[
        str, typer.Argument(help=f"One of: {', '.join(RECIPES)}; reasoning_gym:SET,SET.")
    ],
    out: Annotated[
        str, typer.Option("--out", "--local_save_dir", help="Folder for the parquet files.")
    ],
    source: Annotated[
        str | None,
        typer.Option("--source", help="File or folder with the original rows, or a hub set."),
    ] = None,
    rows: Annotated[
        int, typer.Option("--rows", min=1, help="Training rows of sets that are generated.")
    ] = 1000,
    seed: Annotated[int, typer.Option("--seed", help="Seed of sets that are generated.")] = 42,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a well-known set as verl-style parquet files, ready for --train_files."""
    files = run_prepare(name, source=source, out=out, force=force, rows=rows, seed=seed)
    # Programs need the paths; people also the next command.
    if as_json:
        shown = [
            {"split": f.split, "path": str(f.path), "rows": f.rows}
            | ({"note": f.note} if f.note else {})
            for f in files
        ]
        typer.echo(json.dumps(shown, indent=2))
    else:
        print_prepared(files)


def print_prepared(files: Sequence[PreparedFile]) -> None:
    """Print the files that were written, and the commands that use them."""
    for file in files:
        print_text(f"{file.path}: {plural(file.rows, 'row')}")
    for note in filter(None, (file.note for file in files)):
        print_text(note)
    # The next command, with the flags for the splits that exist.
    paths = {file.split: file.path for file in files}
    flags = ["--train_files", str(paths["train"])] if "train" in paths else []
    # Sets have a validation or a test split, or neither.
    held_out = next((split for split in ("val", "test") if split in paths), None)
    flags += ["--val_files", str(paths[held_out])] if held_out else []
    print_text(f"Next: {ppo('train')} {shlex.join(flags)}")
    # Preference pairs are for a reward model.
    if pairs := next((paths[split] for split in paths if split.startswith("pairs_")), None):
        command = shlex.join(["--data", str(pairs), "--model", "MODEL", "--out", "my_rm"])
        print_text(f"Or:   {ppo('reward fit')} {command}")
