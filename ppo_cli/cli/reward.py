"""`ppo reward`: scores files; packages add commands to it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

from ppo_cli.cli.flags import Arguments, add_command, make_argument, make_flag, make_switch
from ppo_cli.cli.help import App, keep_group
from ppo_cli.cli.reward_tables import format_scores
from ppo_cli.cli.screen import make_printable, make_screen, print_result
from ppo_cli.config.layers import EMBEDDED_NOTE, EMBEDDED_NOTE_GPUS
from ppo_cli.config.mixture import models_of
from ppo_cli.config.models.known_models import find_model_folder, is_url
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import ConfigError, Interrupted
from ppo_cli.paths import user_path
from ppo_cli.report.tracker import Screen

reward_app = App(
    help="Score files with a reward, compare it with labels, or test it with attacks.",
    epilog="ppo reward score outputs --rule math\nppo reward audit --reward_function my_reward.py",
    callback=keep_group,
)


def score(arguments: Arguments) -> None:
    """Score the responses of a file or a run with the same code as in training."""
    config, screen = resolve_settings(arguments)
    from ppo_cli.data_sets.files import find_saved
    from ppo_cli.scoring.rows import (
        check_out,
        default_out,
        read_responses,
        read_run_responses,
        write_rows,
    )
    from ppo_cli.scoring.score import (
        Callbacks,
        open_reward,
        resume_advice,
        score_all,
        scored_row,
        summarise_scores,
    )
    from ppo_cli.scoring.statistics import compare_rankings

    # Read the responses: from a run folder, or from any file with a column of responses.
    file, steps = str(arguments.extras["file"]), arguments.extras["step"] or ()
    run = user_path(file)
    if steps and not run.is_dir():
        raise ConfigError(f"--step needs the folder of a run, and {file} is not one.")
    if run.is_dir() and find_saved(file) is None:
        responses = read_run_responses(run, steps)
    else:
        responses = read_responses(
            file,
            **config.data.keys,
            response_key=arguments.extras["response_key"],
        )
    # Check that the result can be written before paying for verdicts.
    out = user_path(arguments.extras["out"] or default_out(file))
    check_out(out, file)
    with closing(screen):
        screen.note_all(responses.notes)
        prompts = [row.rollout.prompt for row in responses.rows]
        with (
            open_reward(
                config.reward, prompts, Callbacks(note=screen.note), check_format=True
            ) as reward,
            screen.phase("score", len(prompts)) as advance,
        ):
            scoring = score_all(reward, responses.rollouts, Callbacks(advance, screen.note))
    # Write the scores even if scoring stopped early; then report.
    write_rows(out, [scored_row(r, s) for r, s in zip(responses.rows, scoring.scores, strict=True)])
    summary = {
        "file": responses.source,
        "out": str(out),
        **summarise_scores(responses.rows, scoring, config.reward),
        "rankings": compare_rankings(responses.rows, scoring.scores),
    }
    print_reward_result(arguments, summary, format_scores)
    # Exit code 3 if it can be continued; failed rows are only a warning.
    if scoring.stopped:
        done = f"{summary['scored']} of {summary['rows']} rows have a score in {out}."
        raise Interrupted(f"{scoring.stopped} {done} {resume_advice(config.reward)}")
    if summary["scored"] < summary["rows"]:
        lost = summary["rows"] - summary["scored"]
        warning = (
            f"{lost} of {summary['rows']} rows could not be scored; the column `failure` says why."
        )
        if arguments.extras["batch"]:
            warning += " Run the same command without --batch to ask for them directly."
        print(make_printable(warning), file=sys.stderr)


def resolve_settings(arguments: Arguments) -> tuple[Config, Screen]:
    """Return the checked settings and a screen on stderr; stdout is for the result."""
    resolved = arguments.resolve()
    # The parser cannot require these arguments, because overrides may be in their place.
    if "file" in arguments.extras and not arguments.extras["file"]:
        raise ConfigError("Name the FILE with the responses: JSON, JSONL or parquet.")
    config = resolved.config
    for model in models_of(config.reward):  # before the imports, which take seconds
        if not is_url(path := str(model.settings.path)):
            find_model_folder(path)
    if arguments.extras["batch"]:
        from ppo_cli.scoring.sources import use_batch_api

        reward = use_batch_api(config.reward, arguments.extras["batch_hours"])
        config = config.model_copy(update={"reward": reward})
    screen = make_screen(sys.stderr)
    of_training = (EMBEDDED_NOTE, EMBEDDED_NOTE_GPUS)  # no model is trained here
    screen.note_all(note for note in resolved.notes if note not in of_training)
    return config, screen


def print_reward_result(
    arguments: Arguments, result: dict[str, Any], lines: Callable[[dict[str, Any]], list[str]]
) -> None:
    """Print a result as JSON for --json, else as the lines that `lines` returns."""
    print_result(result, lambda: "\n".join(lines(result)), as_json=arguments.extras["json"])


# Flags of several commands.
COMMON_FLAGS = (
    make_switch(
        "batch", "Use the provider's batch interface: half the price, results within a day."
    ),
    make_flag("batch_hours", float, 25.0, "Hours to wait for a batch.", "X", min=0.0001),
    make_switch("json", "Print JSON."),
)
RESPONSES_FILE = make_argument(
    "file", "FILE", "Rows with a `response`: JSON, JSONL (.gz too), parquet, or a hub set."
)
RESPONSE_KEY = make_flag(
    "response_key", str, "response", "Column that holds the responses.", "COLUMN"
)
add_command(
    reward_app, score, "ppo reward score answers.jsonl --use_api_reward --rm_model qwen-plus",
    [
        RESPONSES_FILE,
        make_flag("out", str, None, "File for the scores; unset, FILE.scored.jsonl.", "OUT"),
        make_flag("step", list[int], None, "Steps of a run; unset, the last.", "N"),
        RESPONSE_KEY,
        *COMMON_FLAGS,
    ],
    ("reward.",),
)  # fmt: skip
