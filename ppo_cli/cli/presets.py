"""`ppo presets list`, `ppo presets show NAME` and `ppo presets copy NAME FILE`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from ppo_cli.config.bundled import ALIASES, preset_names, preset_path
from ppo_cli.errors import ConfigError, ppo

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="List the presets, show one, or copy one to edit.",
    epilog="Example: ppo presets show gsm8k",
)


@app.command("list", epilog="Example: ppo presets list")
def list_presets(
    as_json: bool = typer.Option(False, "--json", help="Machine-readable, to stdout."),
) -> None:
    """List the presets with what each is for."""
    found = {name: _first_comment(name) for name in preset_names()}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    width = max(len(name) for name in found)
    for name, said in found.items():
        short = [alias for alias, full in ALIASES.items() if full == name]
        also = f" (also: {', '.join(short)})" if short else ""
        print(f"{name:<{width}}  {said}{also}")


@app.command(epilog="Example: ppo presets show embedded > mine.yaml")
def show(name: str = typer.Argument(help="Name of a preset.")) -> None:
    """Print a preset's file, comments and all."""
    print(preset_path(name).read_text(encoding="utf-8"), end="")


@app.command(epilog="Example: ppo presets copy embedded mine.yaml")
def copy(
    name: Annotated[str, typer.Argument(help="Name of a preset.")],
    file: Annotated[Path, typer.Argument(help="File to write; one that is there is kept.")],
    as_json: bool = typer.Option(False, "--json", help="Machine-readable, to stdout."),
) -> None:
    """Copy a preset to a file of your own, comments and all, to edit and use with --config."""
    text = preset_path(name).read_text(encoding="utf-8")
    try:
        with file.open("x", encoding="utf-8") as fresh:
            fresh.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} is there already; name another file.") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}.") from error
    line = ppo(shlex.join(["train", "--config", str(file)]))
    print(json.dumps({"preset": name, "file": str(file)}) if as_json else f"Use it: {line}")


def _first_comment(name: str) -> str:
    first = preset_path(name).read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()
