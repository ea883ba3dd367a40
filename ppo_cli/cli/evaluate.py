"""`ppo eval`, `ppo generate`, `ppo export`: score a model, sample from it, write it to a folder."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ppo_cli.allocator import pause_garbage_collection
from ppo_cli.cli.flags import (
    Arguments,
    add_command,
    make_argument,
    make_flag,
    make_switch,
    set_parameters,
)
from ppo_cli.cli.help import App
from ppo_cli.config.layers import EMBEDDED_NOTE, EMBEDDED_NOTE_GPUS, PROMPTS_NOTE
from ppo_cli.config.models.bundled import MODELS, prompt_files
from ppo_cli.config.schema.keys import find_key
from ppo_cli.data_sets.sources import check_present
from ppo_cli.digests import require_intact_model
from ppo_cli.errors import (
    ConfigError,
    DataError,
    Interrupted,
    MissingPart,
    RewardError,
    plural,
    ppo,
    replace_path,
)
from ppo_cli.machine.machine import require_supported
from ppo_cli.paths import user_path
from ppo_cli.planning.resolved import Resolved
from ppo_cli.records import Message, Prompt
from ppo_cli.run_folder.sources import ModelSource
from ppo_cli.run_folder.store import find_source_anywhere, localise

if TYPE_CHECKING:
    from ppo_cli.run.evaluate import SampledModel

# Notes about training, which are not shown here.
TRAINING_NOTES = (EMBEDDED_NOTE, EMBEDDED_NOTE_GPUS, PROMPTS_NOTE)
# If one of these is set on the command line, it holds for evaluation too.
SAMPLING_KEYS = ("rollout.temperature", "rollout.top_p", "rollout.top_k")

# A run's model may be sampled on other devices than it was trained on.
DROP_DEVICE_SETTINGS = tuple(f"~trainer.{name}" for name in (
    "engine", "n_gpus_per_node", "nnodes", "node_rank", "num_workers", "placement",
))  # fmt: skip


def evaluate(arguments: Arguments) -> None:
    """Score the responses of models to prompts; two or more models are compared.

    The settings of the first RUN are the defaults: reward, prompts, sampling, template.
    """
    extras = arguments.extras
    names, overrides = split_models_and_overrides(arguments.overrides)
    if not names:
        raise ConfigError(f"Name a model or a run: {ppo('eval outputs')}.")
    sources = [_find_intact_model(word) for word in names]
    arguments = replace(arguments, overrides=overrides)
    if extras["data"]:
        files = tuple(extras["data"])
        arguments = replace(
            arguments, flags={**arguments.flags, "data.val_files": (files, "flag --data")}
        )
    resolved = resolve_model_settings(arguments, sources)
    config = resolved.config
    problems = describe_repeated_models(sources)
    # lm-eval brings its own rows and scores, so the other flags have no meaning.
    if extras["tasks"]:
        others = [name for name in ("data", "n", "greedy", "right", "out") if extras[name]]
        if others:
            problems.append(f"--tasks uses lm-eval's rows and scores: leave --{others[0]} out.")
        if problems:
            raise ConfigError(problems)
        _run_lm_eval(arguments, resolved, sources)
        return
    # Everything that is wrong with the flags, before anything heavy is imported.
    if extras["right"] is not None and not math.isfinite(extras["right"]):
        problems.append(f"--right {extras['right']}: give a score, such as 0.5.")
    if not config.data.val_files or resolved.origins["data.val_files"].startswith("bundled"):
        problems.append("Name the rows to answer with --data FILE; `--data embedded` has sums.")
    several = extras["n"] or config.rollout.val_kwargs.n
    if extras["greedy"] and several > 1:
        problems.append("--greedy gives one response per prompt: leave out --greedy or --n.")
    if problems:
        raise ConfigError(problems)
    for file in prompt_files(config.data.val_files, "val"):
        check_present(file)
    from ppo_cli.cli.screen import make_screen, print_result

    # Importing torch creates many objects; collecting garbage meanwhile would only slow it down.
    with pause_garbage_collection():
        from ppo_cli.run.evaluate import eval_sampling, evaluate

    as_trained = any(
        resolved.origins[key].startswith(("flag", "override")) for key in SAMPLING_KEYS
    )
    sampling = eval_sampling(
        config.rollout,
        config.data.max_response_length,
        extras["n"],
        greedy=extras["greedy"],
        as_trained=as_trained,
    )
    screen = make_screen(sys.stderr)  # stdout is for the result
    with closing(screen):
        screen.note_all(note for note in resolved.notes if note not in TRAINING_NOTES)
        out = user_path(extras["out"]) if extras["out"] else None
        report = evaluate(
            config, resolved.machine, sources, sampling, screen, out=out,
            threshold=extras["right"],
        )  # fmt: skip
    print_result(report, lambda: format_evaluation(report), as_json=extras["json"])
    if report["stopped"]:
        raise Interrupted(
            f"{report['stopped']} Scores are saved: run the same command to continue."
        )
    for model in report["models"]:
        # The last entry is the sum over all data sources.
        every = list(model["sources"].values())[-1]
        if every["failed"] == every["responses"]:
            raise RewardError(
                f"No response of {model['name']} has a score: {next(iter(model['failures']))}. "
                f"Each row in {model['rows']} says why; run the same command to try again."
            )


def _run_lm_eval(arguments: Arguments, resolved: Resolved, sources: Sequence[ModelSource]) -> None:
    """Evaluate the models on lm-eval's tasks and print a table, or JSON."""
    if not find_spec("lm_eval"):  # before the imports, which take seconds
        raise MissingPart(
            "--tasks needs the package lm-eval. Install it with "
            f"`{shlex.quote(sys.executable)} -m pip install lm-eval`."
        )
    from ppo_cli.cli.screen import align_columns, make_screen, print_result
    from ppo_cli.run.evaluate import evaluate_tasks

    names = [name for text in arguments.extras["tasks"] for name in text.split(",") if name]
    screen = make_screen(sys.stderr)
    with closing(screen):
        report = evaluate_tasks(resolved.config, resolved.machine, sources, names, screen)
    # One row for each model, task and metric.
    rows = [["", "task", "metric", "value", "stderr"]]
    for model in report["models"]:
        for task, metrics in model["tasks"].items():
            for name, facts in metrics.items():
                error = facts["stderr"]
                shown = "-" if error is None else f"{error:.4f}"
                rows.append([model["name"], task, name, f"{facts['value']:.4f}", shown])
    lines = align_columns(rows, left_aligned=3)
    print_result(report, lambda: "\n".join(lines), as_json=arguments.extras["json"])


def _find_intact_model(word: str) -> ModelSource:
    """Return the model of a word (folder, hub name, run); ModelError if its files are damaged."""
    source = find_source_anywhere(word)

    # The advice of the error is this command line with another model.
    def retry(model: Path) -> str:
        return replace_path(word, str(model if source.run is None else model.parent))

    require_intact_model(user_path(source.path), retry)
    return source


def describe_repeated_models(sources: Sequence[ModelSource]) -> list[str]:
    """Return a problem for each model that is named twice, even by different names."""
    name_of_path: dict[str, str] = {}
    problems = []
    for source in sources:
        folder = user_path(source.path)
        path = str(folder.resolve()) if folder.is_dir() else source.path
        if path in name_of_path:
            problems.append(
                f"{name_of_path[path]} and {source.name} are the same model; name it once."
            )
        name_of_path.setdefault(path, source.name)
    return problems


def split_models_and_overrides(args: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split a line's arguments into models and overrides.

    An override is KEY=VALUE or ~KEY, unless a path with that name exists.
    """

    def is_override(word: str) -> bool:
        # Path.expanduser would raise for ~reward.rule, as no user has that name.
        is_path = os.path.exists(os.path.expanduser(word.rpartition("@")[0] or word))
        return not is_path and ("=" in word or (word.startswith("~") and "/" not in word))

    return (
        [word for word in args if not is_override(word)],
        tuple(word for word in args if is_override(word)),
    )


def resolve_model_settings(arguments: Arguments, sources: Sequence[ModelSource]) -> Resolved:
    """Resolve a command line over the settings of the first run, or for the first model.

    Settings of devices are not taken from the run. `data.train_max_samples` is read as
    `data.val_max_samples`, as nothing is trained.
    """
    require_supported()
    run = next((source.run for source in sources if source.run is not None), None)
    flags = {**arguments.flags, "model.path": (sources[0].path, f"model {sources[0].name}")}
    preset = arguments.preset
    # Users limit rows by the setting they know from training.
    rows = "data.train_max_samples=", "data.val_max_samples="
    arguments = replace(
        arguments, overrides=tuple(text.replace(*rows) for text in arguments.overrides)
    )
    if run is not None:
        arguments = replace(
            arguments, overrides=(*DROP_DEVICE_SETTINGS, *arguments.overrides), run=run
        )
    elif sources[0].name in MODELS and not arguments.config_files:
        preset = preset or sources[0].name  # the preset has the name of its model
    return replace(arguments, flags=flags, preset=preset).resolve()


def format_evaluation(report: Mapping[str, Any]) -> str:
    """Return an evaluation as text: a table for each model, then the differences between models."""
    from ppo_cli.cli.screen import format_number, titled_table

    s = report["sampling"]
    drawn = f"temperature {s['temperature']:g}" if s["temperature"] else "greedy"
    lines = [f"Rows in {report['out']}; {s['n']} per prompt, {drawn}; 95 % intervals over prompts."]
    for model in report["models"]:
        rows = [["", "prompts", "", "value", "95 %"]]
        for source, facts in model["sources"].items():
            # The name of the data source and its prompts are only in its first row.
            measures = {f"mean@{s['n']}": facts["mean"]}
            measures |= {f"pass@{k}": of_k for k, of_k in facts["pass"].items()}
            for i, (name, estimate) in enumerate(measures.items()):
                about = ["", ""] if i else [source, f"{facts['prompts']:,}"]
                rows.append([*about, name, *_format_interval(estimate)])
        lines += ["", *titled_table(model["name"], rows, left_aligned=1)]
        facts = list(model["sources"].values())[-1]
        if facts["failed"]:
            why = next(iter(model["failures"]))
            lines.append(f"  {facts['failed']} of {facts['responses']} have no score: {why}")
        if spent := ", ".join(f"{k} {format_number(v)}" for k, v in model["spent"].items()):
            lines.append(f"  judge: {spent}")
    # Paired differences of each two models on the same prompts.
    for gap in report["differences"]:
        rows = [["", "prompts", "difference", "95 %", "p"]]
        for source, facts in gap["sources"].items():
            p = facts["p"]
            shown = "-" if p is None else "<0.001" if p < 1e-3 else f"{p:.3f}"
            rows.append([source, f"{facts['prompts']:,}", *_format_interval(facts, "+"), shown])
        lines += ["", *titled_table(f"{gap['of']} less {gap['from']}", rows, left_aligned=1)]
    return "\n".join(lines)


def _format_interval(facts: Mapping[str, Any], sign: str = "") -> list[str]:
    """Return two cells, value and confidence interval; `sign` "+" shows plus signs."""
    value, low, high = (facts[name] for name in ("value", "low", "high"))
    within = "" if low is None else f"[{low:{sign}.3f}, {high:{sign}.3f}]"
    return ["-" if value is None else f"{value:{sign}.3f}", within]


def generate(arguments: Arguments) -> None:
    """Let a model answer one prompt, a file of prompts, or you in a chat (Ctrl-D ends it)."""
    extras = arguments.extras
    model, prompt = extras["source"], extras["prompt"]
    # The argument after the model may be a prompt or the first override.
    if prompt and "=" in prompt and find_key(prompt.partition("=")[0]) is not None:
        arguments, prompt = replace(arguments, overrides=(prompt, *arguments.overrides)), None
    problems = []
    if not model:
        problems.append(f"Name a model or a run: {ppo('generate outputs')}.")
    if prompt and extras["data"]:
        problems.append("A prompt and --data FILE cannot be combined; keep one.")
    if extras["out"] and not extras["data"]:
        problems.append("--out is for the answers to --data FILE; name that file too.")
    if problems:
        raise ConfigError(problems)
    # Check the model and --out before the imports, which take seconds.
    source = _find_intact_model(model)
    resolved = resolve_model_settings(arguments, [source])
    config = resolved.config
    from ppo_cli.scoring.rows import check_out, write_rows

    for file in prompt_files([extras["data"]] if extras["data"] else [], "val"):
        check_present(file)
    if extras["out"]:
        out = user_path(extras["out"])
        check_out(out, extras["data"])
    from ppo_cli.cli.screen import make_screen
    from ppo_cli.run.evaluate import SampledModel, eval_sampling, generate_answers

    sampling = eval_sampling(
        config.rollout,
        config.data.max_response_length,
        extras["n"] or 1,
        greedy=extras["greedy"],
        as_trained=True,
    )
    screen = make_screen(sys.stderr)  # stdout is for the answers
    # A file of prompts, one prompt, or a chat.
    with closing(screen), closing(SampledModel(config, resolved.machine, source)) as sampled:
        screen.note_all(sampled.notes)
        if extras["data"]:
            prompts, notes = sampled.read(prompt_files([extras["data"]], "val"))
            screen.note_all(notes)
            with screen.phase("generate", len(prompts) * sampling.n) as advance:
                rows = generate_answers(sampled, prompts, sampling, advance)
            if extras["out"]:
                write_rows(out, rows)
                return
            _print_rows(rows, as_json=True)
        elif prompt is not None:
            user_prompt = read_text(sys.stdin.read) if prompt == "-" else prompt
            rows = generate_answers(sampled, [sampled.prompt(user_prompt)], sampling)
            _print_rows(rows, as_json=extras["json"])
        else:
            for row in chat(
                sampled, lambda prompt: generate_answers(sampled, [prompt], sampling)[0]
            ):
                _print_rows([row], as_json=extras["json"])


def chat(
    sampled: SampledModel, answer: Callable[[Prompt], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Read prompts from stdin line by line and yield each answer as a row, until the input ends.

    With a chat template earlier turns are part of the prompt; the oldest ones are dropped when it
    gets too long.
    """
    history: list[Message] = []
    if not sampled.uses_template:
        print(
            "This model has no chat template: it continues each line separately.", file=sys.stderr
        )
    while True:
        try:
            line = read_text(lambda: input("> " if sys.stdin.isatty() else ""))
        except EOFError:
            return
        if not line.strip():
            continue
        prompt = None if sampled.uses_template else sampled.prompt(line)
        history.append({"role": "user", "content": line})
        # Drop the oldest question with its answer until the prompt fits.
        while prompt is None:
            try:
                prompt = sampled.prompt(history)
            except DataError:
                if len(history) < 3:
                    raise
                del history[:2]
                print("(The oldest turn is left out: --max_prompt_length.)", file=sys.stderr)
        row = answer(prompt)
        history.append({"role": "assistant", "content": row["response"]})
        yield row


def read_text(read: Callable[[], str]) -> str:
    """Return the text that `read` returns; DataError if the input is not valid text."""
    try:
        return read()
    except UnicodeDecodeError as error:
        raise DataError(f"The input is not {error.encoding.upper()}: {error.reason}.") from None


def _print_rows(rows: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Print the responses, or the entire rows as JSON lines."""
    from ppo_cli.cli.screen import print_json, print_text

    for row in rows:
        if as_json:
            print_json(row, indent=None)
        else:
            print_text(row["response"])


# Settings that a model's answers depend on; their scores also depend on those of the reward.
_ANSWERS = (
    "data.max_", "data.system_prompt", "rollout.temperature", "rollout.top_", "rollout.name",
    "model.dtype", "trainer.n_gpus", "trainer.seed",
)  # fmt: skip
_GREEDY = make_switch("greedy", "Take the most likely token each time.")
_JSON = make_switch("json", "Print JSON.")
eval_app = App()
add_command(
    eval_app,
    evaluate,
    "ppo eval outputs embedded --n 4\nppo eval outputs@20 outputs@40",
    [
        make_argument(
            "overrides", "MODEL|RUN[@STEP]... [KEY=VALUE]...",
            "Folders, hub names, `embedded`, or runs: their latest step, or RUN@20, RUN@best.",
            several=True,
        ),
        make_flag("data", list[str], None, "Rows to answer; repeatable.", "FILE"),
        make_flag(
            "tasks", list[str], None, "lm-eval's tasks, such as gsm8k,arc_easy; without --data.",
            "NAMES",
        ),
        make_flag(
            "n", int, None, "Responses per prompt; several are sampled as in training.", "N", min=1
        ),
        _GREEDY,
        make_flag("right", float, None, "Score from which a response is right for pass@k.", "X"),
        make_flag("out", str, None, "Folder for the rows; unset, a folder in ./evals.", "DIR"),
        _JSON,
    ],
    ("data.val_files", "reward.", *_ANSWERS),
)  # fmt: skip
generate_app = App()
add_command(
    generate_app,
    generate,
    'ppo generate outputs "What is 12 + 30?"\nppo generate outputs   # a chat',
    [
        make_argument("source", "MODEL|RUN[@STEP]", "Folder, hub name, `embedded`, or a run."),
        make_argument("prompt", "[PROMPT]", "What to answer; `-` reads it from the input."),
        make_flag("data", str, None, "Rows to answer, instead of a prompt.", "FILE"),
        make_flag("out", str, None, "JSONL file for the answers to --data.", "FILE"),
        make_flag("n", int, 1, "Responses per prompt.", "N", min=1),
        _GREEDY,
        _JSON,
    ],
    _ANSWERS,
)


def export(source: str, out: Path, json: bool, **options: Any) -> None:
    """Write a trained model as one Hugging Face folder, tokenizer and chat template included.

    A LoRA adapter is merged into its base. Weights stay in float32 unless --dtype says otherwise.
    The model of a run gets a README.md: base model, data, reward, settings, results, cost.
    """
    require_supported()
    from ppo_cli.cli.screen import print_result
    from ppo_cli.run.export import export as run_export

    record = run_export(localise(source), out, **options)
    print_result(record, lambda: format_export(record), as_json=json)


def format_export(record: dict[str, Any]) -> str:
    """Return a summary of an export: folder, source, size, and the command that uses it."""
    step = "" if record["step"] is None else f" (step {record['step']})"
    files = len(record["files"])
    lines = [
        f"Model in {record['out']}",
        f"  from        {record['source']}{step}",
        f"  parameters  {format_count(record['parameters']).strip()}, {record['dtype']}",
        f"  size        {format_count(record['bytes'], 'G')}B in {plural(files, 'file')}",
        f"  checked     {record['checked']}",
    ]
    # Lines that only some exports have.
    if record["card"]:
        lines.append("  card        README.md")
    if record["pushed"]:
        lines.append(f"  uploaded to {record['pushed']}")
    if record["choice"]:
        lines.append(f"  step        {record['choice']}")
    if record["base"]:
        lines[2:2] = [f"  merged with {record['base']}", f"              {record['merged']}"]
    if record["dtype"] == "float32":
        lines[3 + 2 * bool(record["base"])] += "; --dtype bfloat16 takes half"
    use = ["generate", record["out"], "Your prompt"]
    if record["use_as"] != "--model":
        use = ["train", record["use_as"], record["out"]]
    return "\n".join([*lines, f"Use it:  {ppo(shlex.join(use))}"])


def format_count(count: int, billions: str = "B") -> str:
    """Return a count with three digits and a unit: `494 M`."""
    for size, unit in ((1e9, billions), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} "


EXPORT_FLAGS = [
    make_argument(
        "source", "RUN_OR_CHECKPOINT",
        "Run folder (for the step that its page recommends), checkpoint, or a model folder.",
        required=True,
    ),
    make_flag("out", Path, ..., "Folder to write; new or empty.", "DIR", show_default=False),
    make_flag(
        "checkpoint", str, None,
        "Checkpoint of the run: best, latest, step_000010, or a folder.", "WHICH",
        show_default="the best validation",
    ),
    make_flag(
        "dtype", Literal["float32", "bfloat16"], None,
        "Type of the weights; bfloat16 takes half the space, and servers compute in it.",
        show_default="as it was saved: float32",
    ),
    make_switch("critic", "Export the critic, not the actor."),
    make_flag(
        "base", str, None, "Base model, folder or hub name, that a LoRA adapter is merged into.",
        "MODEL", show_default="what the adapter names",
    ),
    make_flag(
        "quantization", Literal["nf4", "none"], None,
        "What the weights of the base were held in while the adapter was trained.", "WHICH",
        show_default="what the adapter or its run says",
    ),
    make_switch("force", "Replace the model that DIR holds."),
    make_switch("trust_remote_code", "Run Python code that comes with the base."),
    make_flag(
        "push", str, None,
        "Upload the folder to this repository of the Hugging Face hub: NAME or OWNER/NAME.", "NAME",
    ),
    make_switch("public", "Make the repository of --push public; private by default."),
    _JSON,
]  # fmt: skip
export_app = App()
export_app.command(epilog="ppo export outputs --out my_model --dtype bfloat16")(
    set_parameters(export, EXPORT_FLAGS)
)
