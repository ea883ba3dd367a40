"""`ppo reward`: scores files, compares scores with labels, attacks a judge, fits a reward model."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from ppo_cli.cli.app import Crash
from ppo_cli.cli.flags import (
    Arguments,
    add_command,
    make_file_argument,
    make_flag,
    make_switch,
    set_parameters,
)
from ppo_cli.cli.help import App
from ppo_cli.cli.reward_tables import (
    Facts,
    format_audit,
    format_calibration,
    format_scores,
    format_section,
    list_estimate_rows,
)
from ppo_cli.cli.screen import (
    format_number,
    make_printable,
    make_screen,
    print_result,
    titled_table,
)
from ppo_cli.config.layers import EMBEDDED_NOTE, EMBEDDED_NOTE_GPUS
from ppo_cli.config.mixture import has_mixture, judges_of, models_of
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.folder import check_folder
from ppo_cli.config.models.known_models import find_model_folder, is_url
from ppo_cli.config.schema.run import Config
from ppo_cli.data_sets.sources import check_present
from ppo_cli.errors import (
    ConfigError,
    DataError,
    Interrupted,
    PpoError,
    RewardError,
    UserError,
    collect_problems,
    plural,
    ppo,
)
from ppo_cli.report.tracker import Screen

# Prices are US dollars per million tokens; "reads" is the context length.
MODEL_COLUMNS = ("model", "$ in", "$ out", "reads", "until", "price by")

reward_app = App(
    help="Score files with a reward, compare it with labels, or test it with attacks.",
    epilog="ppo reward score outputs --rule math\nppo reward audit --reward_function my_reward.py",
)


def score(arguments: Arguments) -> None:
    """Score the responses of a file or a run with the same code as in training."""
    config, screen = _resolve_settings(arguments)
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
    run = Path(file).expanduser()
    if steps and not run.is_dir():
        raise ConfigError(f"--step needs the folder of a run, and {file} is not one.")
    if run.is_dir() and find_saved(file) is None:
        responses = read_run_responses(run, steps)
    else:
        responses = read_responses(
            file,
            prompt_key=config.data.prompt_key,
            source_key=config.data.reward_fn_key,
            response_key=arguments.extras["response_key"],
        )
    # Check that the result can be written before paying for verdicts.
    out = Path(arguments.extras["out"] or default_out(file)).expanduser()
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
    _print_result(arguments, summary, format_scores)
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


def calibrate(arguments: Arguments) -> None:
    """Compare a reward's scores with labels from people."""
    config, screen = _resolve_settings(arguments)
    from ppo_cli.extras.lab.calibrate import calibrate as run_calibration
    from ppo_cli.extras.lab.calibrate import calibrate_cascade
    from ppo_cli.extras.lab.cascade import ask_both
    from ppo_cli.extras.lab.criteria import LABEL_VALUE, add_label_values, read_marks
    from ppo_cli.scoring.rows import read_labels, read_responses
    from ppo_cli.scoring.score import Callbacks, open_reward, resume_advice

    responses = read_responses(
        str(arguments.extras["file"]),
        prompt_key=config.data.prompt_key,
        source_key=config.data.reward_fn_key,
        response_key=arguments.extras["response_key"],
    )
    # Labels of criteria add up to a label of the response, if it has none.
    labels, marked = arguments.extras["labels"], arguments.extras["criteria_labels"]
    marks = read_marks(responses, marked, config.reward) if marked else {}
    if marked and not labels:
        labels, responses = LABEL_VALUE, add_label_values(responses, marks, config.reward)
    # Without labels the judge of a cascade takes their place.
    labelled = read_labels(responses, labels, arguments.extras["positive"]) if labels else None
    rows = labelled.rows if labelled else responses.rows
    if labelled and len({*labelled.values}) == 1:  # before the judge is paid
        raise DataError(
            f"{responses.source}: all labels are equal ({plural(len(rows), 'row')}), so there is "
            f"nothing to compare scores with. Add rows with another label (--labels {labels})."
        )
    repeat = int(arguments.extras["repeat"])
    with closing(screen):
        screen.note_all([*responses.notes, *(labelled.notes if labelled else ())])
        prompts = [row.rollout.prompt for row in rows]
        both = ask_both(config.reward)
        with open_reward(both, prompts, Callbacks(note=screen.note)) as reward:
            if labelled is None:
                result = calibrate_cascade(reward, config.reward, rows, screen=screen)
            else:
                result = run_calibration(
                    reward, config.reward, labelled, repeat=repeat, screen=screen, marks=marks
                )
    _print_result(arguments, {"file": responses.source, **result}, format_calibration)
    if result["stopped"]:
        raise Interrupted(f"{result['stopped']} {resume_advice(config.reward)}")


# Attacks that hold for any task, by check, with the lowest score that is a fault: a part of a
# reward may be for the form. The other attacks need good answers to the run's own prompts.
ATTACKS_ON_ANY_TASK = {
    "padding": ("the answer five times", -math.inf),
    "prompt injection": ("flattery", 0.5),
    "master keys": ("the reply", 0.5),
}
AUDITED_ROWS = 2  # tasks of the audit at the start of a run: about a second


def audit_at_start(config: Config) -> str:
    """Return a warning if attacks on the run's function or rule work; "" otherwise.

    Judges and reward models are left out: an audit of them costs money or minutes.
    """
    settings = config.reward
    audited = settings.function or settings.rule
    if not audited or judges_of(settings) or models_of(settings) or has_mixture(settings):
        return ""
    from ppo_cli.scoring.attacks import load_items
    from ppo_cli.scoring.audit import audit as run_audit
    from ppo_cli.scoring.audit import open_without_gate
    from ppo_cli.scoring.score import Callbacks

    # A reward that cannot score the audit's tasks is not audited; the run checks its own rows.
    try:
        items = load_items(settings, file=None, preset=None, max_rows=AUDITED_ROWS)
        with open_without_gate(settings, items, Callbacks()) as reward:
            result = run_audit(reward, settings, items, screen=Screen())
    except UserError:
        return ""
    # A function that raised has text here instead of a score: the run itself reports that.
    cases = {check["name"]: check["cases"] for check in result["checks"]}
    failed = (
        case
        for name, (trial, lowest) in ATTACKS_ON_ANY_TASK.items()
        for case in cases.get(name, ())
        if case["passed"] is False and case["trial"].startswith(trial) and case["got"] >= lowest
    )
    worst = next(failed, None)
    if worst is None:
        return ""
    flag = f"--reward_function {settings.function}" if settings.function else f"--rule {audited}"
    return (
        f"{audited} can be fooled: {worst['trial']} scores {format_number(worst['got'])}, "
        f"expected {worst['wanted']}. The model may learn that instead of the task. "
        f"`{ppo(f'reward audit {flag}')}` shows all such replies."
    )


def audit(arguments: Arguments) -> None:
    """Test a reward with worthless and hostile responses; exit 2 if a check fails."""
    config, screen = _resolve_settings(arguments)
    from ppo_cli.scoring.attacks import load_items
    from ppo_cli.scoring.audit import audit as run_audit
    from ppo_cli.scoring.audit import open_without_gate
    from ppo_cli.scoring.score import Callbacks, resume_advice

    # Questions with right answers, from which attacks are built.
    items = load_items(
        config.reward,
        file=arguments.extras["data"],
        preset=arguments.extras["items"],
        max_rows=int(arguments.extras["rows"]),
        prompt_key=config.data.prompt_key,
        source_key=config.data.reward_fn_key,
    )
    with (
        closing(screen),
        open_without_gate(config.reward, items, Callbacks(note=screen.note)) as reward,
    ):
        result = run_audit(reward, config.reward, items, screen=screen)
    _print_result(arguments, result, format_audit)
    if result["stopped"]:
        raise Interrupted(f"{result['stopped']} {resume_advice(config.reward)}")
    # A failed check is an error, so that scripts notice.
    failed = [check["name"] for check in result["checks"] if check["passed"] is False]
    check_count = sum(check["passed"] is not None for check in result["checks"])
    if failed:
        raise RewardError(f"{len(failed)} of {check_count} checks failed: {', '.join(failed)}.")


def models(arguments: Arguments) -> None:
    """List the models that your judge keys may use, with prices, limits and end dates."""
    resolved = arguments.resolve()
    from ppo_cli.scoring.forecast import list_models

    # Without --rm_api_type every provider with a key is asked.
    chosen = resolved.origins["reward.api.type"] != "default"
    kind = resolved.config.reward.api.type if chosen else None
    models = list(list_models(resolved.config.reward, kind))
    if not models:
        raise ConfigError(
            "No API key of a judge is set: set one, or name a type with --rm_api_type."
        )
    lines = [line for listing in models for line in _format_listing(listing)]
    print_result(models, lambda: "\n".join(lines), as_json=arguments.extras["json"])
    if failed := [
        f"{model['provider']}: {model['problem']}" for model in models if "problem" in model
    ]:
        raise RewardError("\n".join(failed))


def _format_listing(listing: Facts) -> list[str]:
    """Return the models of one provider as a table, with notes below."""
    cells: list[Sequence[str]] = [MODEL_COLUMNS] if listing["models"] else []
    for row in listing["models"] or ():
        prices = ["-" if usd is None else f"{usd:g}" for usd in (row["input"], row["output"])]
        reads = f"{row['context']:,}" if row["context"] else "-"
        cells.append([row["model"], *prices, reads, row["until"] or "-", row["source"] or "-"])
    count = "no list" if listing["models"] is None else plural(len(listing["models"]), "model")
    lines = titled_table(f"{listing['provider']}: {count}", cells, left_aligned=1)
    return lines + [f"  {note}" for note in listing["notes"]]


def _resolve_settings(arguments: Arguments) -> tuple[Config, Screen]:
    """Return the checked settings and a screen on stderr; stdout is for the result."""
    resolved = arguments.resolve()
    # The parser cannot require these arguments, because overrides may be in their place.
    if "file" in arguments.extras and not arguments.extras["file"]:
        raise ConfigError("Name the FILE with the responses: JSON, JSONL or parquet.")
    cascade = any(j.settings.cascade.model for j in judges_of(resolved.config.reward))
    if "labels" in arguments.extras and not any(
        (*(arguments.extras[n] for n in ("labels", "criteria_labels")), cascade)
    ):
        raise ConfigError("Name the column that holds the labels with --labels COLUMN.")
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


def _print_result(
    arguments: Arguments, result: dict[str, Any], lines: Callable[[dict[str, Any]], list[str]]
) -> None:
    """Print a result as JSON for --json, else as the lines that `lines` returns."""
    print_result(result, lambda: "\n".join(lines(result)), as_json=arguments.extras["json"])


# Flags of several commands.
_COMMON = (
    make_switch(
        "batch", "Use the provider's batch interface: half the price, results within a day."
    ),
    make_flag("batch_hours", float, 25.0, "Hours to wait for a batch.", "X", min=0.0001),
    make_switch("json", "Print JSON."),
)
_FILE = make_file_argument("Rows with a `response`: JSON, JSONL (.gz too), parquet, or a hub set.")
_RESPONSE_KEY = make_flag(
    "response_key", str, "response", "Column that holds the responses.", "COLUMN"
)
add_command(
    reward_app, score, "ppo reward score answers.jsonl --use_api_reward --rm_model qwen-plus",
    [
        _FILE,
        make_flag("out", str, None, "File for the scores; unset, FILE.scored.jsonl.", "OUT"),
        make_flag("step", list[int], None, "Steps of a run; unset, the last.", "N"),
        _RESPONSE_KEY,
        *_COMMON,
    ],
    ("reward.",),
)  # fmt: skip
add_command(
    reward_app, calibrate, "ppo reward calibrate answers.jsonl --labels good --use_api_reward",
    [
        _FILE,
        make_flag("labels", str, None, "Column that holds the labels.", "COLUMN"),
        make_flag("criteria_labels", str, None, "Labels of criteria: {name: true}.", "COLUMN"),
        make_flag("positive", str, None, "Which of two labels means good.", "VALUE"),
        make_flag("repeat", int, 3, "Fresh verdicts on each of up to 50 rows; 0: none.", "N"),
        _RESPONSE_KEY,
        *_COMMON,
    ],
    ("reward.",),
)  # fmt: skip
add_command(
    reward_app, audit, "ppo reward audit --use_api_reward --rm_prompt_preset math",
    [
        make_flag("data", str, None, "Rows to build attacks from; unset, bundled ones.", "FILE"),
        make_flag("rows", int, 6, "Maximum number of rows to build attacks from.", "N"),
        make_flag("items", str, None, "Bundled rows: math, code, dialogue or safety.", "NAME"),
        *_COMMON,
    ],
    ("reward.",),
)  # fmt: skip


add_command(
    reward_app,
    models,
    "ppo reward models --rm_api_type openai",
    [make_switch("json", "Print JSON.")],
    ("reward.api.type", "reward.api.base_url", "reward.api.key_env"),
)

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
        out=Path(typed["out"]),
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


reward_app.command(
    "fit", epilog="ppo reward fit --data pairs.jsonl --model Qwen/Qwen2.5-0.5B --out my_rm"
)(set_parameters(fit_model, FIT_FLAGS))
