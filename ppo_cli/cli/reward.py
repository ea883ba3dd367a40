"""`ppo reward`: score a file, hold scores against labels, attack a judge before training."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from ppo_cli.cli.flags import Given, SettingsCommand, flag_keys, switch, takes_settings
from ppo_cli.cli.reward_fit import EXAMPLE as FIT_EXAMPLE
from ppo_cli.cli.reward_fit import fit as run_fit
from ppo_cli.cli.reward_screen import audit_lines, calibration_lines, score_lines
from ppo_cli.cli.screen import PlainScreen, TerminalScreen
from ppo_cli.cli.wording import clean, fit
from ppo_cli.config.layers import EMBEDDED_NOTE, EMBEDDED_NOTE_GPUS
from ppo_cli.config.schema import Config
from ppo_cli.errors import ConfigError, Interrupted, RewardError
from ppo_cli.report.tracker import Screen

reward_app = typer.Typer(
    help="Score files with a reward, hold it against labels, or attack it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
SHOWN_GROUP = "reward."


def score(given: Given) -> None:
    """Score the responses of a file, by the same path as training."""
    config, screen = _settings(given)
    from ppo_cli.trust.rows import check_out, read_answered, scored_file, write_rows
    from ppo_cli.trust.score import Watch, score_all, scored_row, started, to_go_on
    from ppo_cli.trust.summary import summarise

    file = str(given.extras["file"])
    found = read_answered(
        file,
        prompt_key=config.data.prompt_key,
        source_key=config.data.reward_fn_key,
        response_key=given.extras["response_key"],
    )
    out = Path(given.extras["out"] or scored_file(file)).expanduser()
    check_out(out, file)
    with closing(screen):
        for note in found.notes:
            screen.note(note)
        prompts = [row.rollout.prompt for row in found.rows]
        with (
            started(config.reward, prompts, Watch(note=screen.note)) as reward,
            screen.phase("score", len(prompts)) as advance,
        ):
            scoring = score_all(reward, found.rollouts, Watch(advance, screen.note))
    write_rows(out, [scored_row(r, s) for r, s in zip(found.rows, scoring.scores, strict=True)])
    summary = {
        "file": found.source,
        "out": str(out),
        **summarise(found.rows, scoring, config.reward),
    }
    _print(given, summary, score_lines)
    if scoring.stopped:
        done = f"{summary['scored']} of {summary['rows']} rows have a score in {out}."
        raise Interrupted(f"{scoring.stopped} {done} {to_go_on(config.reward)}")
    if summary["scored"] < summary["rows"]:
        lost = summary["rows"] - summary["scored"]
        _say(f"{lost} of {summary['rows']} rows could not be scored; `failure` says why.")


def calibrate(given: Given) -> None:
    """Hold a reward's scores against labels that people gave."""
    config, screen = _settings(given)
    from ppo_cli.trust.calibrate import calibrate as run_calibration
    from ppo_cli.trust.labels import read_labels
    from ppo_cli.trust.rows import read_answered
    from ppo_cli.trust.score import Watch, started, to_go_on

    found = read_answered(
        str(given.extras["file"]),
        prompt_key=config.data.prompt_key,
        source_key=config.data.reward_fn_key,
        response_key=given.extras["response_key"],
    )
    labelled = read_labels(found, given.extras["labels"], given.extras["positive"])
    repeat = int(given.extras["repeat"])
    with closing(screen):
        for note in (*found.notes, *labelled.notes):
            screen.note(note)
        prompts = [row.rollout.prompt for row in labelled.rows]
        with started(config.reward, prompts, Watch(note=screen.note)) as reward:
            result = run_calibration(reward, config.reward, labelled, repeat=repeat, screen=screen)
    _print(given, {"file": found.source, **result}, calibration_lines)
    if result["stopped"]:
        raise Interrupted(f"{result['stopped']} {to_go_on(config.reward)}")


def audit(given: Given) -> None:
    """Attack a reward with worthless and hostile replies; exit 2 when a check fails."""
    config, screen = _settings(given)
    from ppo_cli.trust.audit import audit as run_audit
    from ppo_cli.trust.audit import under_attack
    from ppo_cli.trust.items import load_items
    from ppo_cli.trust.score import Watch, to_go_on

    items = load_items(
        config.reward,
        file=given.extras["data"],
        preset=given.extras["items"],
        most=int(given.extras["rows"]),
        prompt_key=config.data.prompt_key,
        source_key=config.data.reward_fn_key,
    )
    with closing(screen), under_attack(config.reward, items, Watch(note=screen.note)) as reward:
        result = run_audit(reward, config.reward, items, screen=screen)
    _print(given, result, audit_lines)
    if result["stopped"]:
        raise Interrupted(f"{result['stopped']} {to_go_on(config.reward)}")
    failed = [check["name"] for check in result["checks"] if check["passed"] is False]
    asked = sum(check["passed"] is not None for check in result["checks"])
    if failed:
        raise RewardError(f"{len(failed)} of {asked} checks failed: {', '.join(failed)}.")


def _settings(given: Given) -> tuple[Config, Screen]:
    """The checked settings, and a screen on stderr: stdout is for the result."""
    resolved = given.resolve()
    if "file" in given.extras and not given.extras["file"]:
        raise ConfigError("Name the FILE with the responses: JSON, JSONL or parquet.")
    if "labels" in given.extras and not given.extras["labels"]:
        raise ConfigError("Name the column that holds the labels with --labels COLUMN.")
    screen: Screen = PlainScreen(sys.stderr)
    if sys.stderr.isatty():
        screen = TerminalScreen(Console(file=sys.stderr, highlight=False))
    for note in resolved.notes:
        if note not in (EMBEDDED_NOTE, EMBEDDED_NOTE_GPUS):  # no model is trained here
            screen.note(note)
    return resolved.config, screen


def _print(
    given: Given, result: dict[str, Any], lines: Callable[[dict[str, Any]], list[str]]
) -> None:
    encoding = sys.stdout.encoding
    if given.extras["json"]:
        typer.echo(fit(json.dumps(result, ensure_ascii=False, indent=2), encoding))
    else:
        typer.echo(fit("\n".join(clean(line) for line in lines(result)), encoding))


def _say(text: str) -> None:
    print(clean(text), file=sys.stderr)


def _own(name: str, kind: type, default: Any, said: str, metavar: str) -> inspect.Parameter:
    option = typer.Option(
        default, f"--{name}", help=said, metavar=metavar, show_default=default is not None
    )
    annotation: Any = kind if default is not None else kind | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation
    )


def _file() -> inspect.Parameter:
    said = "Rows with a `response`: JSON, JSONL (.gz too), parquet, or a hub set."
    return inspect.Parameter(
        "file",
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Argument(None, metavar="FILE", help=said, show_default=False),
        annotation=str | None,
    )


def _add(run: Callable[[Given], None], example: str, *extras: inspect.Parameter) -> None:
    """Register a command: its own flags, then those of the schema that concern a reward."""
    command = takes_settings(run, [*extras, switch("json", "Print JSON.")])
    keys = flag_keys()
    signature = inspect.signature(command)
    for name, parameter in signature.parameters.items():
        if name in keys and not keys[name].name.startswith(SHOWN_GROUP):
            parameter.default.hidden = True  # accepted, so that a training line can be reused
    # The file comes before the overrides, which take every word that is left.
    first = inspect.Parameter.POSITIONAL_OR_KEYWORD
    found = [p.replace(kind=first) for name, p in signature.parameters.items() if name == "file"]
    ordered = [*found, *(p for name, p in signature.parameters.items() if name != "file")]
    command.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
    reward_app.command(run.__name__, cls=SettingsCommand, epilog=example)(command)


_RESPONSE_KEY = _own("response_key", str, "response", "Column that holds the responses.", "COLUMN")
_add(
    score,
    "Example: ppo reward score answers.jsonl --use_api_reward --rm_model qwen-plus",
    _file(),
    _own("out", str, None, "Where the scores go; unset, FILE.scored.jsonl beside it.", "OUT"),
    _RESPONSE_KEY,
)
_add(
    calibrate,
    "Example: ppo reward calibrate answers.jsonl --labels good --use_api_reward",
    _file(),
    _own("labels", str, None, "Column that holds the labels.", "COLUMN"),
    _own("positive", str, None, "Which of two labels is the good one.", "VALUE"),
    _own("repeat", int, 3, "Fresh verdicts on each of up to 50 rows; 0: none.", "N"),
    _RESPONSE_KEY,
)
_add(
    audit,
    "Example: ppo reward audit --use_api_reward --rm_prompt_preset math",
    _own("data", str, None, "Rows to attack with, in place of the bundled ones.", "FILE"),
    _own("rows", int, 6, "Most rows to attack with.", "N"),
    _own("items", str, None, "Bundled rows: math, code, dialogue or safety.", "NAME"),
)
reward_app.command("fit", epilog=FIT_EXAMPLE)(run_fit)
