"""`ppo show` prints steps or responses of a run folder; `ppo runs` lists the runs in a folder."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from ppo_cli.cli.flags import make_argument, make_flag, make_switch, set_parameters
from ppo_cli.cli.help import App, HelpCommand
from ppo_cli.cli.passages import list_passages
from ppo_cli.cli.screen import (
    COLUMNS,
    align_columns,
    format_metric,
    format_number,
    print_result,
    titled_table,
)
from ppo_cli.config.settle import settle_defaults
from ppo_cli.errors import (
    ConfigError,
    DataError,
    ExhaustedBudget,
    Interrupted,
    UserError,
    plural,
    ppo,
)
from ppo_cli.planning.batches import batch_arithmetic
from ppo_cli.records import format_call, text_of
from ppo_cli.report.critic import describe_critic
from ppo_cli.report.judge_card import format_dollars
from ppo_cli.report.metrics import estimate_budget, extend_budget, recent_statistics, summarise
from ppo_cli.report.page.run_data import (
    answer_questions,
    describe_fork_of,
    describe_verdict,
    read_run_config,
)
from ppo_cli.report.side_by_side import RECENT, put_side_by_side, tabulate_groups
from ppo_cli.report.validation import list_validations
from ppo_cli.run_folder.checkpoints import CheckpointStore
from ppo_cli.run_folder.folder import check_run_folder, paid_calls, run_settings, run_state
from ppo_cli.run_folder.lines import (
    METRICS_FILE,
    plain,
    read_lines,
    read_metrics,
    rollout_file,
    rollout_steps,
)
from ppo_cli.run_folder.store import localise

# Rows that are shown unless a flag says otherwise.
DEFAULT_STEPS = 20
DEFAULT_PROMPTS = 3
FOLDED_CHARS = 100  # of the first line of a thought or a tool's result
Line = Mapping[str, Any]


def show(
    runs: list[str] | None,
    step: int | None,
    worst: int | None,
    best: int | None,
    failed: bool,
    unscored: bool,
    val: bool,
    last: int,
    summary: bool,
    json: bool,
    csv: str | None,
    full: bool,
) -> None:
    """Show the steps of a run, or the responses of one step with their scores.

    --worst, --best, --failed and --unscored read the newest step unless --step names one;
    responses without a score come last. With several runs: settings that differ, metrics side by
    side, and answers to the same prompts.
    """
    folders = [localise(run, small=True) for run in runs or ["outputs"]]
    for folder in folders:
        check_run_folder(folder)
    run = folders[0]
    # The flags choose what is shown: a comparison, means, responses, CSV, or the table of steps.
    if len(folders) > 1:
        if csv is not None or summary:
            raise ConfigError("--csv and --summary take one run; name one.")
        compared = compare_runs(folders, step, val, worst or DEFAULT_PROMPTS)
        print_result(compared, lambda: format_comparison(compared), as_json=json)
    elif summary:
        means = recent_statistics(read_metrics(run))
        print_result(means, lambda: format_statistics(means), as_json=json)
    elif val or failed or unscored or {step, worst, best} != {None}:
        lines = read_rollouts(run, step, "val" if val else "train")
        chosen = choose_rollouts(lines, worst, best, failed, unscored)
        none = "No response of this step is one of these."
        shown = (format_rollout(line, full=full) for line in chosen)
        print_result(chosen, lambda: "\n\n".join(shown) or none, as_json=json)
    elif csv is not None:
        typer.echo(write_steps_csv(read_metrics(run), csv))
    else:
        history = read_metrics(run)
        steps = history[-last:]
        print_result(steps, lambda: format_steps(run, steps, history), as_json=json)


def compare_runs(
    folders: Sequence[Path], step: int | None, val: bool, max_prompts: int
) -> dict[str, Any]:
    """Return settings that differ, means of the last 10 steps, and answers to the same prompts.

    The prompts are those whose scores differ most; see `pair_answers` for the answers.
    """
    compared = put_side_by_side(folders)
    histories = [read_metrics(run) for run in folders]
    validated = [_list_values(history, "val/reward_mean") for history in histories]
    metrics = [recent_statistics(history, RECENT) for history in histories]
    names = sorted({name for run_means in metrics for name in run_means if name.endswith("_mean")})
    return {
        "runs": [str(run) for run in folders],
        "settings": compared.varied | compared.other,
        "groups": tabulate_groups(compared, histories),
        "validation": [values[-1] if values else None for values in validated],
        "metrics": {
            n.removesuffix("_mean"): [run_means.get(n) for run_means in metrics] for n in names
        },
        "prompts": pair_answers(folders, step, val)[:max_prompts],
    }


def _list_values(history: Sequence[Line], name: str) -> list[float]:
    """Return the values of a metric, without steps that did not measure it."""
    return [line[name] for line in history if line.get(name) is not None]


def pair_answers(folders: Sequence[Path], step: int | None, val: bool) -> list[dict[str, Any]]:
    """Pair the newest responses of the runs that have the same prompt and sample number.

    They are of each run's last validation, else of its last training steps, else of the last step
    that all have; `step` and `val` choose others. Returns a dict for each pairing, the largest
    difference of scores first; empty if the runs have no prompt in common.
    """
    shared = set.intersection(*(set(rollout_steps(run)) for run in folders))
    choices = [("val", None), ("train", None), ("train", max(shared, default=None))]
    if val or step is not None:
        choices = [("val" if val else "train", step)]
    for split, at in choices:
        answers = [read_newest_answers(run, split, at) for run in folders]
        if common := [key for key in answers[0] if all(key in of_run for of_run in answers)]:
            break
    rows = []
    for key in common:
        lines = [of_run[key] for of_run in answers]
        scores = [line["score"] for line in lines if line.get("score") is not None]
        rows.append({
            "step": lines[0]["step"] if len({line["step"] for line in lines}) == 1 else None,
            "split": split,
            "prompt": lines[0].get("prompt"),
            "apart": max(scores) - min(scores) if scores else None,
            "answers": [
                {"step": x["step"], "response": x.get("response"), "score": x.get("score")}
                for x in lines
            ],
        })  # fmt: skip
    return sorted(rows, key=lambda row: (-(row["apart"] or 0.0), is_equal(row)))


def read_newest_answers(run: Path, split: str, step: int | None) -> dict[Any, Line]:
    """Return the newest response of a run, or that of `step`, by prompt and sample number."""
    # A validation has all its prompts; training sees a prompt again after an epoch.
    steps = rollout_steps(run, split)
    chosen = steps[-RECENT if split == "train" else -1 :] if step is None else {step} & {*steps}
    return {
        (line.get("uid"), line.get("sample"), line.get("prompt")): {**line, "step": at}
        for at in chosen
        for line in read_rollouts(run, at, split)
    }


def is_equal(row: Mapping[str, Any]) -> bool:
    """Whether all runs gave the same answer with the same score."""
    first, *others = ((answer["response"], answer["score"]) for answer in row["answers"])
    return all(answer == first for answer in others)


def format_comparison(compared: Mapping[str, Any]) -> str:
    """Return the result of `compare_runs` as text."""
    runs = compared["runs"]
    lines = []
    # Tables with a column for each run, then the answers below each other.
    if compared["groups"]:
        lines += [*align_columns(compared["groups"], left_aligned=1), ""]
    for title, part in (
        ("Settings that differ", compared["settings"]),
        ("Newest validation", {"val": compared["validation"]}),
        (f"Means of the last {RECENT} steps", compared["metrics"]),
    ):
        rows = [["", *runs]]
        for name, values in part.items():
            cells = (
                format_number(v) if isinstance(v, float | int) else str(v or "-") for v in values
            )
            rows.append([name, *cells])
        lines += (
            [*titled_table(title, rows, left_aligned=1), ""] if part else [f"{title}: none", ""]
        )
    if not compared["prompts"]:
        lines.append("The runs have no step in which all answer the same prompts.")
    for row in compared["prompts"]:
        steps = [f"step {x['step']} of {run}" for run, x in zip(runs, row["answers"], strict=True)]
        head = ", ".join(steps) if row["step"] is None else f"step {row['step']}"
        if is_equal(row):
            score = format_number(row["answers"][0]["score"])
            lines.append(f"--- {head}, {row['split']}: equal answers, score {score}")
            lines += indent_block("prompt", row["prompt"])
            continue
        lines += [f"--- {head}, {row['split']}", *indent_block("prompt", row["prompt"])]
        for run, answer in zip(runs, row["answers"], strict=True):
            lines += indent_block(
                f"{run}, score {format_number(answer['score'])}", answer["response"]
            )
    return "\n".join(lines)


class ShowCommand(HelpCommand):
    """A typer command whose --csv may have no file: then the CSV goes to stdout."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `-` after a --csv that no FILE.csv follows, then parse as usual."""
        tokens: list[str] = []
        for word, following in pairwise([*args, ""]):
            tokens.append(word)
            if word == "--csv" and following != "-" and not following.endswith(".csv"):
                tokens.append("-")
        return super().parse_args(ctx, tokens)


def read_rollouts(run: Path, step: int | None, split: str) -> list[dict[str, Any]]:
    """Return the responses of a step (None: the newest) as dictionaries.

    Raises DataError if there are none, or if a field has the wrong type.
    """
    steps = rollout_steps(run, split)
    kind = "validation responses" if split == "val" else "responses"
    if not steps:
        raise DataError(f"{run} has no {kind} yet.")
    chosen_step = steps[-1] if step is None else step
    if chosen_step not in steps:
        near = min(steps, key=lambda s: abs(s - chosen_step))
        raise DataError(
            f"{run} has no {kind} of step {chosen_step}; it has {len(steps)} steps from {steps[0]} "
            f"to {steps[-1]}. The nearest is --step {near}."
        )
    file = rollout_file(run, chosen_step, split)
    # Other programs may have written the file.
    lines = read_lines(file)
    for at, line in enumerate(lines, start=1):
        if wrong := _find_wrong_type(line):
            raise DataError(f"{file}, response {at}: {wrong}.")
    return [{"step": chosen_step} | line for line in lines]


# Fields that responses are sorted, matched and counted by; other fields may have any type.
FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "score": (int, float), "parts": (dict,), "uid": (str, int), "sample": (int,), "prompt": (str,),
    "turns": (list,), "token_details": (dict,),
}  # fmt: skip


def _find_wrong_type(line: Line) -> str:
    """Return a message about the first field of a wrong type; empty if all are right."""
    # Scores of parts are nested: parts.NAME.raw.
    parts = line.get("parts")
    inner = (
        {f"parts.{name}": part for name, part in parts.items()} if isinstance(parts, dict) else {}
    )
    raw = {f"{name}.raw": part.get("raw") for name, part in inner.items() if isinstance(part, dict)}
    turns = line.get("turns")
    # All fields to check: of the response, of its parts, of their scores.
    fields = [(name, line.get(name), kinds) for name, kinds in FIELD_TYPES.items()]
    fields += [(name, part, (dict,)) for name, part in inner.items()]
    for number, turn in enumerate(turns if isinstance(turns, list) else ()):
        where, message = f"turns.{number}", turn.get("message") if isinstance(turn, dict) else turn
        fields += [(where, turn, (dict,)), (f"{where}.message", message or "missing", (dict,))]
    fields += [(name, value, (int, float)) for name, value in raw.items()]
    for name, value, kinds in fields:
        if value is not None and not isinstance(value, kinds):
            return f"{name} is {json.dumps(value)}, which has the wrong type"
    return ""


def choose_rollouts(
    lines: Sequence[Line], worst: int | None, best: int | None, failed: bool, unscored: bool
) -> list[Line]:
    """Return the responses that the flags choose; both ends with --worst and --best together."""
    chosen = [
        line
        for line in lines
        if not (failed and not line.get("failure"))
        and not (unscored and line.get("score") is not None)
    ]
    if worst is None and best is None:
        return chosen
    scored = [line for line in sort_worst_first(chosen) if line.get("score") is not None]
    lowest = sort_worst_first(chosen)[:worst] if worst else []
    return [*lowest, *(scored[::-1][:best] if best else [])]


def sort_worst_first(lines: Sequence[Line]) -> list[Line]:
    """Return responses by score, lowest first; those without a score come last."""
    return sorted(lines, key=lambda x: (x.get("score") is None, x.get("score") or 0.0))


def format_steps(run: Path, steps: Sequence[Line], history: Sequence[Line]) -> str:
    """Return the table of steps, and below it the card of the judges, and the critic."""
    config, _ = read_run_config(run)
    settings = config or settle_defaults()
    summary, calls = summarise(history, run, settings), paid_calls(run)
    blocks = [
        format_steps_table(steps),
        *(
            "\n".join(titled_table(title, card))
            for title, card in (("The judge", summary.judge), ("The episodes", summary.episodes))
            if card
        ),
    ]
    # The first lines of the page: verdict, step to keep, gain, findings, what next.
    if history:
        total = batch_arithmetic(config)["total_steps"] if config else None
        saved = CheckpointStore(run / "checkpoints", 1).steps()
        usd = math.fsum(float(call["usd"]) for call in calls)
        validations = list_validations(history)
        findings = [{"text": text, "key": "", "now": True} for text in summary.warnings]
        verdict = describe_verdict(summary, total, validations, findings, usd)
        answers = answer_questions(summary, settings, saved, validations)
        rows = align_columns([row[:2] for row in answers])
        blocks += [
            "\n".join(["".join(text for text, _ in verdict), *rows]),
            *(f"warning: {text}" for text in summary.warnings),
            "\n".join(titled_table("What next", summary.next_steps)),
        ]
    blocks += [*format_critic(run), *filter(None, (describe_fork_of(run), summary.pretraining))]
    # Paid judge calls without a finished step: say how to use them.
    if not any(line["step"] > 0 for line in history) and calls:
        blocks.append(describe_resume(run, history))
    return "\n\n".join(blocks)


def format_critic(run: Path) -> list[str]:
    """Return the explained variance by position and the mean return by value; [] if not measured.

    They are of the first and the last tenth of the steps.
    """
    ends = describe_critic(run)
    if not ends:
        return []
    names = dict.fromkeys(name for end in ends for name, _, _ in end["positions"])
    found = [{name: value for name, _, value in end["positions"]} for end in ends]
    rows = [["explained variance at token", *names]]
    for end, values in zip(ends, found, strict=True):
        rows.append([end["name"], *(format_number(values.get(name)) for name in names)])
    tenths = ends[-1]["tenths"]
    fit = [
        [f"{ends[-1]['name']}: value of a token", *(format_number(row[1]) for row in tenths)],
        ["mean return there", *(format_number(row[2]) for row in tenths)],
    ]
    tables = [rows, fit] if names else [fit]
    return ["\n".join(align_columns(table, left_aligned=1)) for table in tables]


def describe_resume(run: Path, history: Sequence[Line]) -> str:
    """Return how to resume a run that has paid for judge calls but has no step.

    A budget that is too small to finish the run is raised in the command.
    """
    file = run / "config.yaml"
    if not file.exists():
        return "Paid verdicts are reused when the command of this run is run again."
    config = run_settings(run)
    arguments = ["train", "--config", str(file), "--output_dir", str(run), "--resume", "auto"]
    arguments += [f"trainer.store={config.trainer.store}"] if config.trainer.store else []
    command, api, calls = ppo(shlex.join(arguments)), config.reward.api, paid_calls(run)
    # Compare what is left of each budget with what the whole run needs.
    sums = batch_arithmetic(config)
    tokens = sum(call["input"] + call["output"] for call in calls)
    for flag, limit, spent in (
        ("--rm_budget_usd", api.budget_usd, sum(call["usd"] for call in calls)),
        ("--rm_budget_tokens", api.budget_tokens, tokens),
    ):
        used = ExhaustedBudget(flag, spent, len(calls), 0.0)
        steps, rows = sums["total_steps"] or 0, sums["validation_rows"] or 0
        if limit and spent and estimate_budget(used, config, history, steps, rows) > limit:
            stop = Interrupted("", used_up=used)
            command = extend_budget(command, stop, config, history, steps, rows)
    return f"Go on with: {command}"


def write_steps_csv(history: Sequence[Line], file: str) -> str:
    """Write steps as CSV, a column per metric; return a summary, or the CSV for the file `-`."""
    import pandas

    frame = pandas.DataFrame(plain(list(history)))
    if file == "-":
        return str(frame.to_csv(index=False)).rstrip("\n")
    try:
        frame.to_csv(file, index=False)
    except OSError as error:
        raise DataError(f"--csv {file} cannot be written: {error.strerror or error}.") from error
    return f"{file}: {len(frame)} steps, {len(frame.columns)} columns"


def format_steps_table(steps: Sequence[Line]) -> str:
    """Return steps as aligned columns; metrics that no step has are left out."""
    if not steps:
        return "No step is finished yet."
    names = COLUMNS | {"val/reward_mean": "val"}
    keys = [k for k in names if any(line.get(k) is not None for line in steps)]
    rows = [["step", *(names[k] for k in keys)]]
    rows += [[str(line["step"]), *(format_metric(line.get(k)) for k in keys)] for line in steps]
    return "\n".join(align_columns(rows, left_aligned=0))


def format_statistics(means: Mapping[str, float]) -> str:
    """Return the result of `recent_statistics` as a table of metric, mean and deviation."""
    names = [key.removesuffix("_std") for key in means if key.endswith("_std")]
    if not names:
        return "No step is finished yet."
    rows = [["metric", f"{'mean':>8}", f"{'std':>8}"]]
    rows += [
        [name, *(format_metric(means[f"{name}_{what}"]) for what in ("mean", "std"))]
        for name in names
    ]
    return "\n".join(align_columns(rows, left_aligned=1))


def format_rollout(line: Line, *, full: bool = False) -> str:
    """Return a response as text: score, prompt, response or turns, reason, ground truth, parts.

    Without `full`, thoughts and tool results of an episode are folded to their first lines.
    """
    score = line.get("score")
    scored = "no score" if score is None else f"score {format_number(score)}"
    # A heading with the facts, then blocks of text; empty ones are left out.
    head = [f"step {line['step']}", scored, f"{line.get('tokens', '?')} tokens"]
    turns: Sequence[Line] = line.get("turns") or ()
    if turns:
        errors = sum(bool(turn.get("error")) for turn in turns)
        head += [plural(len(turns), "turn"), *([plural(errors, "tool error")] if errors else [])]
    if ended := line.get("ended"):
        head.append(f"ended by the limit of {ended}")
    elif line.get("finish_reason") == "length" and not (turns and line.get("failure")):
        head.append("cut off")
    head += [f"data_source {line['data_source']}"] if line.get("data_source") else []
    blocks = [("failure", "failure"), ("reason", "reason"), ("ground truth", "ground_truth")]
    lines = ["--- " + ", ".join(head), *indent_block("prompt", line.get("prompt"))]
    for number, turn in enumerate(turns, start=1):
        lines += format_turn(number, turn, full=full)
    if not turns:
        lines += indent_block("response", line.get("response"))
    lines += indent_block("placed rewards and advantages", "\n".join(list_passages(line)))
    lines += [row for name, key in blocks for row in indent_block(name, line.get(key))]
    # The parts of a mixture; with a single part it is the score itself.
    parts = {n: p.get("raw") for n, p in (line.get("parts") or {}).items()}
    if len(parts) > 1:
        lines += indent_block(
            "parts", ", ".join(f"{n} {format_number(v)}" for n, v in parts.items())
        )
    return "\n".join(lines)


def format_turn(number: int, turn: Line, *, full: bool) -> list[str]:
    """Return a turn of an episode: the policy's message, its calls, and the replies to it."""
    message = turn["message"]
    facts = [
        f"{name} {format_number(value)}" for name, value in (turn.get("rewards") or {}).items()
    ]
    facts += [f"{name} {seconds:.2g} s" for name, seconds in turn.get("tools") or ()]
    facts += ["cut off"] if turn.get("cut") else []
    lines = [f"turn {number}" + (f" ({', '.join(facts)})" if facts else "") + ":"]
    rows = [("thought", str(message.get("reasoning_content") or ""), not full)]
    rows += [("", text_of(message), False)]
    rows += [("call", format_call(call), False) for call in message.get("tool_calls") or ()]
    rows += [("error", str(turn.get("error") or ""), False)]
    for reply in turn.get("replies") or ():
        rows.append((str(reply.get("role")), text_of(reply), not full))
    for name, text, folded in rows:
        start, _, rest = text.partition("\n")
        if folded and (rest or len(start) > FOLDED_CHARS):
            text = f"{start[:FOLDED_CHARS]} … ({len(text):,} characters, --full shows them)"
        if text:
            first, *others = text.split("\n")
            lines += [
                f"  {name}: {first}" if name else f"  {first}",
                *(f"    {row}" for row in others),
            ]
    return lines


def indent_block(name: str, value: Any) -> list[str]:
    """Return a heading and the indented lines of a text; empty for an empty value."""
    if value is None or value == "":
        return []
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return [f"{name}:", *(f"  {row}" for row in text.split("\n"))]


SHOW_FLAGS = [
    make_argument(
        "runs", "[RUN]...", "Run folder: the --output_dir of a run; several are compared.",
        several=True, shown="outputs",
    ),
    make_flag("step", int, None, "Show the responses of this step.", min=0),
    make_flag("worst", int, None, "Show the N responses with the lowest scores.", min=1),
    make_flag("best", int, None, "Show the N responses with the highest scores.", min=1),
    make_switch("failed", "Show responses whose scoring failed, with the cause."),
    make_switch("unscored", "Show responses without a score."),
    make_switch("val", "Show validation responses."),
    make_flag("last", int, DEFAULT_STEPS, "Rows of the table of steps.", min=1),
    make_switch("summary", "Show mean and deviation over the last 100 steps."),
    make_switch("full", "Show thoughts and tool results of episodes in full."),
    make_switch("json", "Print JSON."),
    make_flag("csv", str, None, "All steps as CSV, to stdout or into a file.", "[FILE.csv]"),
]  # fmt: skip
show_app = App()
show_app.command(cls=ShowCommand, epilog="ppo show outputs --worst 5")(
    set_parameters(show, SHOW_FLAGS)
)


MAX_VARIED = 4  # settings with a column in the list of runs
MAX_DEPTH = 3  # levels of folders below DIR in which runs are searched


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder that contains run folders.")
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the runs in a folder and its subfolders, the newest first."""
    run_list: list[dict[str, Any]] = []
    histories: dict[str, list[dict[str, Any]]] = {}
    folder = localise(folder, small=True)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder. Name one that contains run folders.")
    for run in find_runs(folder):
        try:
            histories[str(run)] = read_metrics(run)
            run_list.append(collect_run_facts(run, histories[str(run)]))
        except DataError as error:  # of one run; the others are listed
            typer.echo(f"note: {error}", err=True)
    run_list.sort(key=lambda run: -run["changed"])
    folders = [Path(run["run"]) for run in run_list]
    compared = put_side_by_side(folders)
    for number, group in enumerate(compared.groups):
        for index in group:
            varied = {key: values[index] for key, values in compared.varied.items()}
            run_list[index] |= {"varied": varied, "group": number}
    if not run_list and not as_json:
        raise DataError(f"{folder} holds no run: none has a config.yaml and a {METRICS_FILE}.")
    groups = tabulate_groups(compared, [histories[run["run"]] for run in run_list])
    print_result(run_list, lambda: format_runs(run_list, groups), as_json=as_json)


def find_runs(folder: Path, depth: int = 0) -> list[Path]:
    """Return the run folders in a folder and below it; inside a run, only its earlier runs."""
    if (folder / METRICS_FILE).exists():
        return [folder, *(p.parent for p in sorted(folder.glob(f"earlier_*/{METRICS_FILE}")))]
    if depth == MAX_DEPTH:
        return []
    inner: list[Path] = []
    with suppress(OSError):
        inner = sorted(p for p in folder.iterdir() if p.is_dir() and p.name[0] != ".")
    return [run for path in inner for run in find_runs(path, depth + 1)]


def collect_run_facts(run: Path, lines: Sequence[Line]) -> dict[str, Any]:
    """Return state, steps, rewards, dollars and last change (Unix time) of a run from its lines."""
    file = run / "config.yaml"
    # Settings of an old version may not be readable; then the total is unknown.
    total = None
    with suppress(UserError):
        if file.exists():
            total = batch_arithmetic(run_settings(run))["total_steps"]
    step = max((int(line["step"]) for line in lines), default=0)
    rewards, validations = (_list_values(lines, k) for k in ("reward_mean", "val/reward_mean"))
    return {
        "run": str(run),
        "state": run_state(run, step, total),
        "step": step,
        "total_steps": total,
        "saved_step": CheckpointStore(run / "checkpoints", 1).newest_step(),  # --resume's start
        "reward": rewards[-1] if rewards else None,
        "validation": validations[-1] if validations else None,
        "cost_usd": sum(float(call["usd"]) for call in paid_calls(run)),
        "changed": (run / METRICS_FILE).stat().st_mtime,
    }


def format_runs(run_list: list[dict[str, Any]], groups: list[list[str]]) -> str:
    """Return runs as aligned columns, those of a few varied settings first, then their groups."""
    varied = list(run_list[0]["varied"])
    columns = varied if len(varied) <= MAX_VARIED else []
    leaves = [key.rpartition(".")[2] for key in columns]
    # Unknown numbers are dashes; the time is local.
    rows = [["run", *leaves, "state", "step", "saved", "reward", "val", "cost", "changed"]]
    for run in run_list:
        total = f"/{run['total_steps']}" if run["total_steps"] else ""
        rows.append([
            run["run"], *(run["varied"][key] or "-" for key in columns), run["state"],
            f"{run['step']}{total}", str(run["saved_step"] or "-"),
            format_number(run["reward"]), format_number(run["validation"]),
            format_dollars(run["cost_usd"]) if run["cost_usd"] else "-",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run["changed"])),
        ])  # fmt: skip
    lines = align_columns(rows, left_aligned=2 + len(columns))
    return "\n".join([*lines, *([""] if groups else []), *align_columns(groups, left_aligned=1)])


runs_app = App()
runs_app.command(epilog="ppo runs experiments")(runs)
