"""`ppo plan` shows what a run would do and why it would be refused; `ppo train` runs it."""

from __future__ import annotations

import os
import shlex
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ppo_cli.allocator import pause_garbage_collection
from ppo_cli.cli.app import Crash
from ppo_cli.cli.flags import Arguments, add_command, make_flag, make_switch
from ppo_cli.cli.help import App
from ppo_cli.config.layers import DEFAULT, INHERITED, RUN_ORIGIN, describe_fork
from ppo_cli.config.mixture import describe_reward, judges_of
from ppo_cli.config.schema.finding import Finding
from ppo_cli.config.schema.keys import value_of
from ppo_cli.config.schema.reward import Composite, ModelReward, Reward
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import (
    ConfigError,
    Interrupted,
    PpoError,
    UserError,
    command_line,
    format_duration,
    is_address,
    ppo,
)
from ppo_cli.paths import user_path
from ppo_cli.planning.batches import count_steps, split_files
from ppo_cli.planning.findings.rules import find_findings, list_texts
from ppo_cli.planning.memory.devices import read_memory_size
from ppo_cli.planning.memory.disk import find_disk_shortage
from ppo_cli.planning.placement import PlanPart
from ppo_cli.planning.resolved import Resolved
from ppo_cli.planning.run_plan import RunPlan, make_plan
from ppo_cli.planning.second_judge import add_second_judge
from ppo_cli.planning.text import format_plan
from ppo_cli.plugins import PlanSection, entry_points, import_name, load, load_all
from ppo_cli.run_folder.checkpoints import find_resume
from ppo_cli.run_folder.folder import run_settings
from ppo_cli.run_folder.lines import METRICS_FILE, read_metrics
from ppo_cli.run_folder.store import find_source_anywhere
from ppo_cli.secrets.redact import redact

if TYPE_CHECKING:
    from ppo_cli.report.tracker import Screen
    from ppo_cli.run.refusals import FirstRows

NO_FORECAST = "no forecast: "  # start of a line about a judge whose cost is unknown
# Sentences of the plan at the start of a run.
SHOWN_COUNTS = ("a step:", "critic pretraining:", "the run:", "time: about")


def plan(arguments: Arguments) -> None:
    """Show what a run would do, and what would stop it: memory, time, cost."""
    if arguments.engine:
        import_name(arguments.engine.plan)(arguments)
        return
    from ppo_cli.run.refusals import FirstRows, find_all_refusals, plan_resume

    resolved = add_second_judge(resolve_with_fork(arguments), os.environ)
    if (size := arguments.extras.get("device_memory")) is not None:
        assumed = resolved.machine.assume_memory(read_memory_size(size))
        resolved = replace(resolved, machine=assumed)
    rows = FirstRows(resolved.config)
    findings = find_findings(resolved)
    refusals = find_all_refusals(resolved, findings, rows)
    try:
        run_plan = make_plan(resolved, findings)
    except ConfigError as error:  # these settings have no plan
        raise ConfigError(refusals) from error
    notes, resume_problems = plan_resume(run_plan, command_line())
    run_plan = replace(run_plan, notes=(*notes, *run_plan.notes))
    problems = list(dict.fromkeys([*resume_problems, *refusals]))
    # Print the plan even if the run would be refused.
    _show_plan(run_plan, rows, arguments, problems)
    if problems:
        raise ConfigError(problems)


def _show_plan(
    run_plan: RunPlan, rows: FirstRows, arguments: Arguments, problems: Sequence[str]
) -> None:
    """Print the plan as JSON or text, with the sections of plug-ins that switches ask for.

    Problems are printed later, so they are left out of the text.
    """
    notes = (*run_plan.notes, *describe_unread_rows(rows), *rows.notes())
    plan_of_run, judge = _add_forecasts(replace(run_plan, notes=notes), rows)
    extras = arguments.extras  # `ppo train --dry_run` has none of a plan's
    sections = [section for section in PLAN_SECTIONS if extras.get(section.flag)]
    if extras.get("json"):
        from ppo_cli.cli.screen import print_json

        facts = plan_of_run.as_dict() | judge.facts
        for section in sections:
            facts[section.key] = import_name(section.measure)(run_plan.resolved)[0]
        print_json(facts | {"problems": problems})
        return
    left_out = {*problems, *(NO_FORECAST + problem for problem in problems)}
    every = bool(extras.get("all"))
    lines = format_plan(plan_of_run, judge, every=every, debug=arguments.debug, left_out=left_out)
    print("\n".join(lines), flush=True)
    for section in sections:  # one may take minutes
        lines = import_name(section.measure)(run_plan.resolved)[1]
        print("\n".join([f"\n{section.key.capitalize()}", *(f"  {line}" for line in lines)]))


def resolve_with_fork(arguments: Arguments) -> Resolved:
    """Resolve the arguments; `--fork RUN[@STEP]` adds that run's settings, checkpoint, new folder.

    Once the fork has its own checkpoint, `--resume auto` continues from that one. Raises
    ConfigError if the word is not a run, or if the fork has no steps to do.
    """
    word = arguments.extras["fork"]
    if word is None:
        # A refusal of settings that another engine has comes with its advice.
        try:
            return arguments.resolve_node()
        except ConfigError as error:
            advice = (
                line
                for engine in load_all("engines")[0]
                if engine.advise
                for line in import_name(engine.advise)(arguments, error.problems)
            )
            raise ConfigError([*error.problems, *advice]) from error
    if not word.strip():
        raise ConfigError("--fork has no run: name one, or RUN@STEP, or leave --fork out.")
    source = find_source_anywhere(word)
    if source.run is None:
        raise ConfigError(f"--fork {word} is not a run with a config.yaml; name one, or RUN@STEP.")
    # Flags and overrides of the line win over the fork's checkpoint and folder.
    checkpoint = Path(source.path).parent
    beside = source.run.name if is_address(word) else source.run
    flags = {
        "trainer.resume_mode": (str(checkpoint), f"--fork {word}"),
        "trainer.output_dir": (f"{beside}-{checkpoint.name}", f"--fork {word}"),
        **arguments.flags,
    }
    resolved = replace(arguments, flags=flags, run=source.run).resolve_node()
    if user_path(resolved.config.trainer.output_dir).resolve() == source.run:
        raise ConfigError(f"--fork {word} needs another folder: set another --output_dir.")
    # Checkpoint folders are called step_NNNNNN.
    total = count_steps(resolved.config.data, resolved.config.trainer)
    done = int(checkpoint.name[5:])
    if total and total <= done:
        raise ConfigError(
            f"--fork {word} starts after step {done}, but this run ends with step {total}: raise "
            f"--max_steps (or --epochs) above {done}."
        )
    # Only what differs from the run was set for this fork.
    before = run_settings(source.run)
    origins = {
        key: INHERITED
        if origin.startswith(RUN_ORIGIN)
        or (origin != DEFAULT and value_of(resolved.config, key) == value_of(before, key))
        else origin
        for key, origin in resolved.origins.items()
    }
    note = f"This run is a {describe_fork(str(source.run), done, origins)}."
    return replace(resolved, origins=origins, notes=(note, *resolved.notes))


def describe_unread_rows(rows: FirstRows) -> list[str]:
    """Return a note for each split of which the plan has read only the first rows."""
    from ppo_cli.run.refusals import MAX_PLAN_ROWS, SPLITS

    notices = []
    for split in SPLITS:
        if (count := rows.count(split)) > MAX_PLAN_ROWS:
            files, _ = split_files(rows.config.data, split)
            line = ppo(shlex.join(["data", "check", *files]))
            notices.append(
                f"Only the first {MAX_PLAN_ROWS:,} of {count:,} rows were read for this "
                f"plan; `{line}` checks them all."
            )
    return notices


def _add_forecasts(plan_of_run: RunPlan, rows: FirstRows) -> tuple[RunPlan, PlanPart]:
    """Return the plan of a run with a time forecast, and the judges' forecast."""
    config = plan_of_run.settings
    time = _forecast_step_time(config, plan_of_run.arithmetic["total_steps"])
    plan_of_run = replace(
        plan_of_run,
        arithmetic=plan_of_run.arithmetic | time.facts,
        sentences=(*plan_of_run.sentences, *time.sentences),
    )
    return plan_of_run, _forecast_judges(config, rows)


def _forecast_step_time(config: Config, steps: int | None) -> PlanPart:
    """Forecast the seconds of a step from an earlier run of the same model in the output folder."""
    run = user_path(config.trainer.output_dir)
    # Without such a run the time is unknown.
    unknown = PlanPart(
        (f"time: unknown, {config.trainer.output_dir} has no earlier run of this model",),
        {"step_seconds": None},
    )
    if not (run / METRICS_FILE).is_file() or not (run / "config.yaml").is_file():
        return unknown
    try:
        then = run_settings(run)
    except UserError:  # the file is not from this version
        return unknown
    seconds = [m["time/step_s"] for m in read_metrics(run) if m.get("time/step_s") is not None]
    if not seconds or then.model.path != config.model.path:
        return unknown
    # Scale the median by the number of responses in a step.
    before = then.data.train_batch_size * then.rollout.n
    now = config.data.train_batch_size * config.rollout.n
    step = statistics.median(seconds) * now / before
    per_step = f"{step:.2g} s" if step < 10 else format_duration(step)
    most = config.pretrain_steps
    pretraining = " and critic pretraining" if most else ""
    total = ""
    if steps is not None:
        total = f", {format_duration(step * (most + steps))} for {steps:,} steps{pretraining}"
    sentence = (
        f"time: about {per_step} per step{total}, from the median of {len(seconds)} steps of "
        f"{before} responses in {config.trainer.output_dir}"
    )
    return PlanPart((sentence,), {"step_seconds": step})


def _forecast_judges(config: Config, rows: FirstRows) -> PlanPart:
    """Forecast calls, tokens and cost of the judges, or say why not; empty without judges."""
    judges = judges_of(config.reward)
    if not judges:
        return PlanPart((), {})
    from ppo_cli.report.features import find_asked_judge
    from ppo_cli.scoring.forecast import first_request, forecast

    asked = find_asked_judge(config.reward)
    forecasts: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    # Forecast each judge as if it were the only reward.
    for judge in judges:
        only = {
            "api": judge.settings, "parts": (), "composite": Composite(), "model": ModelReward(),
        }  # fmt: skip
        alone = config.model_copy(update={"reward": config.reward.model_copy(update=only)})
        try:
            estimate = forecast(alone, rows.prompts, wishes=int(judge is asked))
            sentences, facts = estimate.lines(), estimate.as_dict()
            request = first_request(judge.settings, rows.prompts("train"))
            sentences += ["the request about the first row:", *(f"  {s}" for s in request)]
            facts["request"] = "\n".join(request)
        except UserError as error:
            facts = {"problem": redact(str(error))}
            sentences = [f"{NO_FORECAST}{facts['problem']}"]
        if judge.only_if:
            sentences.append(f"it is asked only if {judge.only_if}, so this is the maximum")
            facts["only_if"] = judge.only_if
        several = judge.part not in (None, "judge")
        lines += [f"{judge.part}: {line}" for line in sentences] if several else sentences
        forecasts[judge.part or "judge"] = facts
    # JSON keeps the form of a single judge; several are listed as well.
    first = next(iter(forecasts.values()))
    facts_of_all = first if len(judges) == 1 else first | {"judges": forecasts}
    return PlanPart(tuple(lines), {"judge": facts_of_all})


FORK = make_flag(
    "fork", str, None, "Start a new run from a checkpoint of another run.",
    "RUN[@STEP]",
)  # fmt: skip
# What packages add to a plan; those that do not load are left out.
PLAN_SECTIONS: list[PlanSection] = load_all("plan_sections")[0]
plan_app = App()
add_command(
    plan_app,
    plan,
    "ppo plan --preset gsm8k --batch_size 128",
    [
        make_switch("all", "Also show settings at their default."),
        FORK,
        make_switch("json", "Print JSON."),
        *(make_switch(section.flag, section.help) for section in PLAN_SECTIONS),
        make_flag(
            "device_memory", str, None, "Plan for GPUs with this memory, such as 80GB.",
            "SIZE",
        ),
    ],
)  # fmt: skip


def train(arguments: Arguments) -> None:
    """Train a model with PPO."""
    if arguments.extras["dry_run"]:
        plan(arguments)
        return
    if arguments.engine:
        import_name(arguments.engine.train)(arguments)
        return
    from ppo_cli.run.refusals import find_refusals

    resolved = add_second_judge(resolve_with_fork(arguments), os.environ)
    findings = find_findings(resolved)
    problems = find_refusals(resolved, findings)
    # Unlike a plan, a run needs its GPUs and keys here.
    if not resolved.config.trainer.node_rank:
        problems = [*list_texts(findings, "elsewhere"), *problems]
    if problems:
        raise ConfigError(problems)
    _run_training(resolved, findings, arguments)


def _run_training(resolved: Resolved, findings: tuple[Finding, ...], arguments: Arguments) -> None:
    """Run a training with a screen; nodes other than the first join its cluster and exit.

    Raises Interrupted if the output was closed, and Crash for bugs.
    """
    from ppo_cli.cli.screen import OutputClosed, align_columns, make_screen
    from ppo_cli.run.refusals import checkpoints_of

    screen = make_screen(quiet=bool(arguments.extras["quiet"]))
    screen.debug = arguments.debug
    if resolved.config.trainer.node_rank:
        from ppo_cli.cluster.nodes import join_cluster

        raise typer.Exit(join_cluster(resolved, os.environ, screen.note))
    # Notes that `ppo plan` shows in its last section.
    run_plan = make_plan(resolved, findings)
    start = align_columns(_describe_start(run_plan))
    remarks = list_texts(run_plan.findings, "no_effect", "remark")
    shortages = find_disk_shortage(run_plan.disk, run_plan.settings.trainer.output_dir)
    screen.note_all([*start, *resolved.notes, *(text for text in remarks if text not in shortages)])
    for shortage in shortages:
        screen.health(shortage)
    trainer = resolved.config.trainer
    if find_resume(checkpoints_of(trainer), trainer.resume_mode) is None:
        for warning in filter(None, _check_reward(resolved.config.reward)):
            screen.health(warning)
    try:
        _train_on_nodes(run_plan, screen)
    except OutputClosed as error:
        raise Interrupted(
            f"{error} Continue from the last checkpoint with --resume auto."
        ) from error
    except Exception as error:
        # click exits silently on any BrokenPipeError, so that one is wrapped as well.
        expected = isinstance(error, (PpoError, OSError)) and not isinstance(error, BrokenPipeError)
        if expected:
            raise
        raise Crash(user_path(resolved.config.trainer.output_dir)) from error


def _check_reward(reward: Reward) -> Iterator[str]:
    """Yield what plug-ins say against a reward; one that fails is reported and stops no run."""
    for name in sorted(entry_points("reward_checks")):
        try:
            check = load("reward_checks", name)
        except ConfigError as error:
            yield str(error)
            continue
        try:
            yield check(reward)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            yield f"The check of a reward '{name}' does not work ({problem}): it is left out."


def _describe_start(run_plan: RunPlan) -> list[Sequence[str]]:
    """Return what a run will do: names and facts, for the head of its output."""
    from ppo_cli.run.refusals import FirstRows

    config, folder = run_plan.settings, run_plan.settings.trainer.output_dir
    plan_of_run, judge = _add_forecasts(run_plan, FirstRows(config))
    counts = [line for line in plan_of_run.sentences if line.startswith(SHOWN_COUNTS)]
    # What a judge will cost, and whether its budget is enough.
    bill = [line for line in judge.sentences if "judge: " in line or "--rm_budget" in line]
    return [
        ("model", config.model.path),
        ("data", ", ".join(dict.fromkeys([*config.data.train_files, *config.data.val_files]))),
        ("reward", describe_reward(config.reward)),
        *(("", line) for line in bill),
        *(line.split(": ", 1) for line in counts),
        ("memory", plan_of_run.memory.sentences[0].removeprefix("this machine needs ")),
        ("run folder", folder),
        ("to look at it", ppo(f"view {shlex.quote(folder)}")),
    ]


def _train_on_nodes(run_plan: RunPlan, screen: Screen) -> None:
    """Start the training loop; on a Ray cluster for several nodes or with RAY_ADDRESS."""
    screen.note("Importing torch and transformers")  # takes seconds, in which nothing else is shown
    config = run_plan.settings
    several = config.trainer.nnodes > 1 or os.environ.get("RAY_ADDRESS", "").strip()
    cluster: AbstractContextManager[Any] = nullcontext()
    # A local engine ignores the cluster.
    if several and config.trainer.engine != "local":
        from ppo_cli.cluster.nodes import open_cluster

        cluster = open_cluster(run_plan.resolved, os.environ, screen.note)
    with cluster as nodes:
        with pause_garbage_collection():
            from ppo_cli.run.assemble import train as train_now
        train_now(run_plan, screen, nodes)


train_app = App()
add_command(
    train_app,
    train,
    "ppo train --model Qwen/Qwen2.5-0.5B --train_files train.jsonl --rule math\n"
    "ppo train --preset gsm8k --lr 1e-6 actor.clip_ratio_high=0.28",
    [
        make_switch("dry_run", "Print the plan and stop."),
        make_switch("quiet", "Print warnings and the summary only."),
        FORK,
    ],
)
