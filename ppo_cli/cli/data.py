"""`ppo data`: look at prompt files before training, and prepare well-known sets."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from ppo_cli.cli.data_screen import print_prepared, print_report
from ppo_cli.config.algorithm_schema import Actor
from ppo_cli.config.bundled import EMBEDDED, prompt_files
from ppo_cli.config.rows import lowered_batches
from ppo_cli.config.schema import Data
from ppo_cli.data_sets.check import Report
from ppo_cli.data_sets.check import check as run_check
from ppo_cli.data_sets.prepare import RECIPES
from ppo_cli.data_sets.prepare import prepare as run_prepare
from ppo_cli.data_sets.render import Renderer
from ppo_cli.errors import EXIT_USER

data_app = typer.Typer(
    help="Check prompt files, or prepare well-known sets.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Files = Annotated[
    list[str],
    typer.Argument(help="JSON, JSONL (.gz too) or parquet files, or hub sets.", show_default=False),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Model whose tokenizer and chat template are used; the bundled one by default.",
    ),
]
MaxPromptLength = Annotated[
    int, typer.Option("--max_prompt_length", min=1, help="Longest prompt, in tokens.")
]
PromptKey = Annotated[str, typer.Option("--prompt_key", help="Column that holds the prompt.")]
SourceKey = Annotated[
    str, typer.Option("--reward_fn_key", help="Column that chooses the reward rule.")
]
SystemPrompt = Annotated[
    str | None,
    typer.Option("--system_prompt", help="Put in front of prompts without a system message."),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="No chat template: prompts are used as they stand.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_DEFAULTS = Data()


@data_app.command(
    "check",
    epilog="Example: ppo data check train.jsonl --model Qwen/Qwen2.5-0.5B --max_prompt_length 1024",
)
def check(
    files: Files,
    model: Model = None,
    max_prompt_length: MaxPromptLength = _DEFAULTS.max_prompt_length,
    prompt_key: PromptKey = _DEFAULTS.prompt_key,
    reward_fn_key: SourceKey = _DEFAULTS.reward_fn_key,
    system_prompt: SystemPrompt = None,
    raw: Raw = False,
    as_json: Json = False,
) -> None:
    """Count rows, sources and lengths, name bad rows, show one prompt; exit 2 on bad rows."""
    from ppo_cli.run.assemble import load_tokenizer

    report = run_check(
        prompt_files(files, "train"),
        Renderer(load_tokenizer(model or EMBEDDED), system_prompt, apply_chat_template=not raw),
        max_prompt_length=max_prompt_length,
        prompt_key=prompt_key,
        source_key=reward_fn_key,
    )
    if as_json:
        typer.echo(report.to_json())
    else:
        print_report(report, model or EMBEDDED, _training(report, model), sys.stdout.isatty())
    if report.bad:
        raise typer.Exit(EXIT_USER)


def _training(report: Report, model: str | None) -> list[str]:
    """What `ppo train` would say of these rows with its defaults."""
    from ppo_cli.trust.sources import without_a_rule

    lines = []
    if model is None:
        lines.append(
            "Tokens are counted with the model that ships with ppo-cli; name yours with --model."
        )
    if 0 < report.usable < _DEFAULTS.train_batch_size:
        mini = Actor().ppo_mini_batch_size
        lines.append(lowered_batches(report.usable, _DEFAULTS.train_batch_size, mini))
    if refused := without_a_rule(report.data_sources):
        lines.append(f"Training by rules refuses these rows. {refused} A judge needs neither.")
    return lines


@data_app.command(
    "prepare", epilog="Example: ppo data prepare gsm8k --source ./gsm8k --out ./data/gsm8k"
)
def prepare(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(RECIPES)}.")],
    out: Annotated[
        str, typer.Option("--out", "--local_save_dir", help="Folder for the parquet files.")
    ],
    source: Annotated[
        str | None,
        typer.Option("--source", help="File or folder with the original rows, or a hub set."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    as_json: Json = False,
) -> None:
    """Write a well-known set as verl-style parquet files, ready for --train_files."""
    files = run_prepare(name, source=source, out=out, force=force)
    if as_json:
        shown = [
            {"split": f.split, "path": str(f.path), "rows": f.rows}
            | ({"note": f.note} if f.note else {})
            for f in files
        ]
        typer.echo(json.dumps(shown, indent=2))
    else:
        print_prepared(files)
