"""`ppo presets list` and `ppo presets show NAME`."""

from __future__ import annotations

import json

import typer

from ppo_cli.config.bundled import ALIASES, preset_names, preset_path

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="List the presets, or show one.",
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


def _first_comment(name: str) -> str:
    first = preset_path(name).read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()
