"""Reads command lines of other programs: TRL, OpenRLHF, Hugging Face's Trainer, their launchers.

flags.toml says what each of their flags is here. What has an equal is replaced, what
changes no result is left out with a note, and for the others a sentence says what to use. What a
whole line of theirs leaves out has their default.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path, PurePath
from typing import Any

from ppo_cli.cli.flags import SUGGESTION_CUTOFF, is_override
from ppo_cli.config.layers import DEFAULT
from ppo_cli.config.schema.keys import table
from ppo_cli.errors import plural, ppo
from ppo_cli.extras.migrate.tools import name_tool
from ppo_cli.extras.migrate.verl.translator import VERSION
from ppo_cli.machine.gpus import list_gpus
from ppo_cli.paths import user_path
from ppo_cli.plugins import Line

# Programs that start another one.
LAUNCHER = re.compile(
    r"(\S*/)?(accelerate|bash|conda|deepspeed|docker|env|exec|mpirun|nohup|numactl|nsys|poetry|"
    r"python[\w.]*|ray|sh|srun|sudo|time|torchrun|trl|uv)$"
)
# Those whose own flags count processes, and their modules.
COUNTING = re.compile(
    r"(\S*/)?(accelerate|deepspeed|torchrun)$|torch\.distributed\.(run|launch)$|accelerate\.commands"
)
MODULE = re.compile(r"(openrlhf|verl|trl|recipe)(\.\w+)+$|\S+\.py$")  # without a launcher
LIBRARY = re.compile(r"(openrlhf|trl|verl)\.|(grpo|ppo|rloo)$")  # their flags are all known
SHELL = re.compile(r"(?:\w+=\S* )*(?:(?:ba|z)?sh )?(\S+\.sh)( |$)")  # with its variables in front
# What only the estimator gae uses.
CRITIC = re.compile(r"(--)?critic[._]|--cliprange_value|--lam$|trainer\.critic_warmup")
VARIABLE = re.compile(r"[A-Z][A-Za-z0-9_]*=")  # in front of a command
OFF = frozenset({"false", "0", "no", "off"})
Flag = tuple[str, list[str] | None]  # a flag with its values, or another argument with None


@cache
def load_foreign_flags() -> dict[str, dict[str, Any]]:
    """Read flags.toml; its comments say what each table is."""
    import tomllib

    read = tomllib.loads(Path(__file__).with_name("flags.toml").read_text("utf-8"))
    for rows in ("ignored", "pointers"):  # a sentence, and the flags that it is for
        read[rows] = {name: text for text, names in read[rows].items() for name in names.split()}
    return read


# The tables whose rows are flags, without those of dotted names.
NAMING = ("aliases", "switches", "several", "pairs", "computed", "values", "ignored", "pointers")


@cache
def own_flags() -> Mapping[str, str]:
    """Return the keys of our settings by their flags."""
    return {key.flag: key.name for key in table().values() if key.flag}


@cache
def foreign_flags() -> frozenset[str]:
    """Return the names of all flags of other programs, but for dotted ones."""
    return frozenset(name for rows in NAMING for name in load_foreign_flags()[rows])


def explain_flag(flag: str) -> tuple[str, list[str]]:
    """Return what has the meaning of another program's flag here, and what is to be said of it."""
    tables, name = load_foreign_flags(), find_name(flag)
    lines = list(_describe_meanings(name, tables))
    for condition, rows in tables["with"].items():
        lines += [f"with {condition}: {meaning}" for meaning in _describe_meanings(name, rows)]
    return str(tables["aliases"].get(flag.lstrip("-").lower(), "")), lines


def _describe_meanings(name: str, tables: Mapping[str, Any]) -> Iterator[str]:
    """Yield what some tables say about a flag."""
    for rows in ("aliases", "several", "pairs"):
        for word in tables.get(rows, {}).get(name, "").split():
            yield word if "=" in word else f"{word} with its value"
    if settings := tables.get("switches", {}).get(name):
        yield f"sets {settings}"
    if keys := tables.get("computed", {}).get(name):
        yield f"computed from the whole line: {keys}"
    for value, settings in tables.get("values", {}).get(name, {}).items():
        yield f"{value}: {settings or 'the default'}"
    for rows, label in (("ignored", "left out"), ("pointers", "no equivalent")):
        if reason := tables.get(rows, {}).get(name):
            yield f"{label}: {reason.format(ppo=ppo())}"


@dataclass
class Translation(Line):
    """A line of another program under our own names.

    `program` is the script (`path` with its folder), the module or the command of trl that a
    launcher would start; `values` has those of the line's flags, by their names in the tables of
    flags.toml.
    """

    program: str = ""
    path: str = ""
    values: dict[str, list[str]] = field(default_factory=dict)
    tables: Mapping[str, Any] = field(default_factory=load_foreign_flags)

    def number(self, name: str, default: float = 1) -> float:
        """Return the value of a flag as a number above 0; NaN for any other text."""
        try:
            value = float("".join(self.values.get(name, [])) or default)
        except ValueError:
            return math.nan
        return value if value > 0 else math.nan

    def advise(self, flag: str, names: Mapping[str, str]) -> str:
        """Return what to use in place of an unknown flag, or a similar flag; "" without either."""
        aliases, pointers = self.tables["aliases"], self.tables["pointers"]
        name = find_name(flag)
        if name in pointers:
            return f": {pointers[name].format(ppo=ppo())}."
        # In a line of another program an unknown flag is rather the script's own than mistyped.
        script = "" if LIBRARY.match(self.path) else self.program
        candidates = [*names, *foreign_flags(), *self.tables["renamed"]]
        cutoff = 0.9 if script else SUGGESTION_CUTOFF
        near = difflib.get_close_matches(name.rpartition(".")[2], candidates, n=1, cutoff=cutoff)
        meant = [names.get(n) or aliases.get(n) or f"--{n}" for n in near]
        # A setting without a flag may have this name.
        meant = [key for key in table() if key.rpartition(".")[2] == name][:1] or meant
        if script:
            unless = f", unless '{meant[0]}' is meant" if meant else ""
            return f", which only {script} has{unless}; see `{ppo('explain')} NAME`."
        return f". Did you mean '{meant[0]}'?" if meant else ""


def translate(args: Sequence[str]) -> Translation:
    """Replace flags of other programs by ours, or by KEY=VALUE for a setting without a flag.

    A launcher in front (`accelerate launch train.py`) is left out. Everything after a `--` stays.
    """
    done = Translation()
    if tool := name_tool(args):
        done.problems.append(f"{tool}.")
        return done
    if script := SHELL.match(" ".join(args)):
        path = user_path(script[1])
        readable = path.is_file() and os.access(path, os.R_OK)
        tool = name_tool(path.read_text("utf-8", "replace").split()) if readable else ""
        tool += ". " * bool(tool)
        done.problems.append(
            f"{tool}{script[1]} is a shell script, which is not run here: put the command in it, "
            f"with its variables filled in, behind `{ppo('train')}`."
        )
        return done
    line = _skip_launcher(args, done)
    if done.program.endswith(".py") and not names_prompts(line):
        done.problems.append(f"{replace_script(line, done)}.")
        return done
    for pattern, reason in done.tables["programs"].items():
        if re.search(pattern, done.program.lower()):
            done.problems.append(f"{done.program} {reason.format(ppo=ppo())}.")
            return done
    flags = [part for flag in _split(line) for part in _open_file(*flag, done)]
    done.values = {find_name(flag): values for flag, values in flags if values is not None}
    estimator = _estimator(done)
    method = _method(estimator, flags, done)
    defaults = _list_defaults(estimator, method, done)
    done.values = {find_name(flag): values or [] for flag, values in defaults} | done.values
    for flag in filter({*done.values, estimator, method}.__contains__, done.tables["with"]):
        rows = done.tables["with"][flag]
        done.tables = {**done.tables, **{name: done.tables[name] | rows[name] for name in rows}}
    # What the line leaves out is in one note, and below everything that somebody set.
    done.foreign = bool(done.program or defaults)
    if defaults:
        left_out = " ".join(" ".join([flag, *(values or [])]) for flag, values in defaults)
        label = done.tables["defaults_of"].get(method or estimator)
        whole = f"What the line leaves out is as in {label}: {left_out}"
        done.notes.append(f"{whole if method else f'{left_out}: the line has flags of {label}'}.")
        silent = Translation(values=done.values, tables=done.tables)
        for word, values in _split(_translate_flags(defaults, estimator, silent)):
            name, _, value = word.partition("=")
            raw = " ".join(values) if values else value
            done.defaults[own_flags().get(name, name)] = (raw, f"{DEFAULT} of {label}")
    # The program's name or a flag says which estimator it is: no default.
    if chosen := done.defaults.pop("algorithm.adv_estimator", None):
        done.args = ["--adv_estimator", chosen[0]]
    done.args += _translate_flags(flags, estimator, done)
    return done


def _translate_flags(flags: Iterable[Flag], estimator: str, done: Translation) -> list[str]:
    """Return the arguments for flags; without those of a critic if the estimator has none."""
    args: list[str] = []
    for flag, values in flags:
        words = None if values is None else _translate_flag(flag.partition("=")[0], values, done)
        if words is None:
            words = [flag, *([] if "=" in flag else values or [])]
        elif estimator not in ("", "gae"):
            if CRITIC.match("".join(words[:1])):
                done.notes.append(f"{flag} is left out: only the estimator gae uses it.")
                continue
            words = [word for word in words if not word.startswith("critic.")]
        # The flag as it was typed is named in messages.
        typed = flag.partition("=")[0]
        for name in (word.partition("=")[0] for word in words if word[:2] == "--" or "=" in word):
            setting = own_flags().get(name, name)
            done.origins.pop(setting, None)
            if typed not in (name, setting):
                done.origins[setting] = f"flag {typed}"
        args += words
    return args


def _split(args: Sequence[str]) -> Iterator[Flag]:
    """Yield each flag with its values, and each other argument with None.

    `learning_rate=1e-6,`, as Python's calls have it, is a flag with its value.
    """
    end = args.index("--") if "--" in args else len(args)
    rest = list(args[:end])
    while rest:
        # A web page makes one long dash of two.
        argument = re.sub("^[\u2013\u2014]-?", "--", rest.pop(0))
        name, equals, value = argument.partition("=")
        if not argument.strip():
            continue  # a variable without a value, or a space after a backslash
        if not argument.startswith("--"):
            keyword = equals and name != VERSION and "." not in name and is_known(name)
            yield (f"--{name}", [value.rstrip(",")]) if keyword else (argument, None)
        elif equals:
            yield argument, [value]
        else:  # its values end at the next flag or override
            values = list(takewhile(lambda a: a[:2] != "--" and not is_override(a), rest))
            yield argument, values
            del rest[: len(values)]
    yield from ((argument, None) for argument in args[end:])


def _open_file(argument: str, values: list[str] | None, done: Translation) -> Iterator[Flag]:
    """Yield the flags of TRL's YAML file for `--config FILE`; any other argument as it is."""
    path = Path("".join(values or []))
    flags = None
    if argument.partition("=")[0] == "--config" and os.path.isfile(path):
        import yaml

        # Reported with our own files.
        with suppress(ValueError, yaml.YAMLError, RecursionError):
            flags = yaml.safe_load(path.read_text("utf-8"))
    if not isinstance(flags, dict) or "model_name_or_path" not in flags:
        yield argument, values
        return
    done.notes.append(f"{path} has flags of TRL.")
    for name, value in flags.items():
        if isinstance(value, list):
            yield f"--{name}", [str(item) for item in value]
        elif value is not None:
            yield f"--{name}={value}", [str(value)]


def find_name(flag: str) -> str:
    """Return the name of a flag in flags.toml.

    A dotted name of OpenRLHF is found there with underscores, or without its groups.
    """
    typed = flag.partition("=")[0].lstrip("-").replace("-", "_")
    renamed = load_foreign_flags()["renamed"]
    inner = typed.partition(".")[2].replace(".", "_")
    for name in (typed, typed.replace(".", "_"), inner, typed.rpartition(".")[2]):
        if is_known(name):
            return str(renamed.get(name, name))
    return typed


def is_known(name: str) -> bool:
    """Whether a flag of this name, ours or another program's, is taken or answered."""
    renamed = load_foreign_flags()["renamed"]
    return name in renamed or name in foreign_flags() or f"--{name}" in own_flags()


def _translate_flag(flag: str, values: list[str], done: Translation) -> list[str] | None:
    """Return the arguments for a flag and its values; None to leave them as they are."""
    flags, name = done.tables, find_name(flag)
    value = values[0] if len(values) == 1 else ""
    weights = done.values.get("reward_weights", [])
    if name == "reward_funcs" and (mixture := _mix_functions(values, weights, done)):
        return mixture
    if name in flags["values"]:
        meanings = flags["values"][name]
        for pattern, settings in meanings.items():
            if match := re.fullmatch(pattern, value, re.IGNORECASE):
                return list(settings.format(value, *match.groups()).split())
        if not any(name in flags[t] for t in ("aliases", "several")):
            if name in flags["pointers"] or f"--{name}" in own_flags() or not values:
                return None
            offered = ", ".join(meanings)
            done.problems.append(f"{flag} {' '.join(values)} is not offered; there are {offered}.")
            return []
    if name in flags["remarks"]:
        done.notes.append(f"{flag}: {flags['remarks'][name]}.")
    if name in flags["ignored"]:
        done.notes.append(f"{flag} is left out: {flags['ignored'][name].format(ppo=ppo())}.")
        return []
    if name in flags["switches"]:
        return [] if value.lower() in OFF else list(flags["switches"][name].split())
    if name in COMPUTED and values:
        return COMPUTED[name](flag, done)
    if name in flags["pointers"] and value.lower() == "false":
        return []
    if name in flags["pairs"]:
        return [f"{k}={v}" for k, v in zip(flags["pairs"][name].split(), values, strict=False)]
    targets = str(flags["several"].get(name) or flags["aliases"].get(name, "")).split()
    if targets and not values:
        done.problems.append(f"{flag} needs a value.")
        return []
    if targets:
        return [arg for target in targets for arg in _set(target, values)]
    # A flag that has our name, but for the dots.
    renamed = name != flag[2:].replace("-", "_") and name not in flags["pointers"]
    return [f"--{name}", *values] if renamed else None


def _set(word: str, values: Sequence[str]) -> list[str]:
    """Return a flag with its values, or an override; several values are a list, commas or not."""
    if word.startswith("--"):
        return [word, *values]
    if len(values) > 1:
        return [f"{word}=[{','.join(value.strip(',') for value in values)}]"]
    return [word if "=" in word else f"{word}={values[0]}"]


def _count_prompts(flag: str, done: Translation) -> list[str] | None:
    """Return OpenRLHF's responses of an optimizer step as prompts, if they divide."""
    samples, responses = done.number("n_samples_per_prompt"), done.number("train_batch_size")
    if "rollout_batch_size" not in done.values or not (responses / samples).is_integer():
        return None
    prompts = str(int(responses / samples))
    done.notes.append(f"{flag} {responses:g} is --mini_batch_size {prompts}: {samples:g} to each.")
    return ["--mini_batch_size", prompts]


def _count_responses(done: Translation) -> tuple[float, float]:
    """Return the responses of TRL's optimizer step, and the optimizer steps of a batch.

    TRL counts them on each process. Where the line does not say how many there are, the GPUs of
    this machine count.
    """
    nodes = done.number("nnodes", done.number("num_machines"))
    count = next((n for n in ("nproc_per_node", "num_gpus", "n_gpus") if n in done.values), "")
    a_node = done.number(count, math.nan)
    processes = nodes * (max(1, len(list_gpus())) if math.isnan(a_node) else a_node)
    if "num_processes" in done.values:
        processes = done.number("num_processes")
    accumulated = done.number("gradient_accumulation_steps")
    responses = done.number("per_device_train_batch_size") * accumulated * processes
    if "generation_batch_size" in done.values:
        return responses, done.number("generation_batch_size") / responses
    steps = done.number("steps_per_generation", accumulated) / accumulated
    return responses, (1 if steps < 1 else steps) * done.number("num_mini_batches")


def _count_batches(flag: str, done: Translation) -> list[str] | None:
    """Return the prompts of TRL's batch and mini-batch, if its responses divide."""
    samples = done.number("rloo_k", done.number("num_generations", done.number("rollout_n")))
    responses, steps = _count_responses(done)
    mini, batch = responses / samples, responses * steps / samples
    if not (mini.is_integer() and batch.is_integer() and batch >= mini):
        return None
    sizes = ["--batch_size", f"{batch:.0f}", "--mini_batch_size", f"{mini:.0f}"]
    done.notes.append(
        f"{flag}: {responses:g} responses in an optimizer step, {samples:g} to a prompt, are "
        f"{' '.join(sizes)}."
    )
    part = f"ppo_micro_batch_size_per_gpu={done.number('per_device_train_batch_size'):.0f}"
    return [*sizes, f"actor.{part}", f"critic.{part}"]


def _count_steps(flag: str, done: Translation) -> list[str] | None:
    """Return the steps that TRL's number of episodes takes."""
    responses, steps = _count_responses(done)
    count = done.number("total_episodes") / (responses * steps)
    if "per_device_train_batch_size" not in done.values or not math.isfinite(count):
        return None
    return ["--max_steps", str(math.ceil(count))]


def _count_gpus(flag: str, done: Translation) -> list[str] | None:
    """Return accelerate's number of processes as GPUs of a node."""
    a_node = done.number("num_processes") / done.number("num_machines")
    return ["--n_gpus", f"{a_node:.0f}"] if a_node.is_integer() else None


def _split_length(flag: str, done: Translation) -> list[str] | None:
    """Return the prompt's share of OpenRLHF's `max_len`, which counts prompt and response."""
    response = done.number("max_new_tokens", done.number("generate_max_len", math.nan))
    prompt = done.number("max_len") - response
    if not prompt > 0:
        return None
    return [] if "prompt_max_len" in done.values else ["--max_prompt_length", f"{prompt:.0f}"]


def _join_betas(flag: str, done: Translation) -> list[str]:
    """Return both of Adam's betas, with transformers' default for one that is left out."""
    defaults = {"adam_beta1": ["0.9"], "adam_beta2": ["0.999"]} | done.values
    betas = f"betas=[{','.join(''.join(defaults[name]) for name in ('adam_beta1', 'adam_beta2'))}]"
    return [f"actor.optim.{betas}", f"critic.optim.{betas}"]


def _name_sets(flag: str, done: Translation) -> list[str]:
    """Return data sets with configuration and split, `NAME/CONFIG:SPLIT`; files have neither."""
    target, *names = done.tables["splits"][find_name(flag)].split()
    configuration, split, test = ("".join(done.values.get(name, [])) for name in names)
    sources = [s for value in done.values[find_name(flag)] for s in value.split(",")]

    def name(split: str) -> list[str]:
        """Return the sources with their configuration and a split; `train` is the default."""
        ends = (f"/{configuration}" if configuration else "") + (f":{split}" if split else "")
        return [source if PurePath(source).suffix else f"{source}{ends}" for source in sources]

    args = [target, *name("" if split == "train" else split)]
    if test and "".join(done.values.get("eval_strategy", ["no"])) != "no":
        args += ["--val_files", *name(test)]
    return args


def _mix_functions(values: Sequence[str], weights: Sequence[str], done: Translation) -> list[str]:
    """Return TRL's sum of several reward functions, or of one with a weight, as a mixture."""
    meanings, args = done.tables["values"]["reward_funcs"], list[str]()
    if weights and len(weights) != len(values):
        done.problems.append(
            f"--reward_weights has {len(weights)} for {plural(len(values), 'function')}: name one "
            "weight for each."
        )
        return []
    names = Counter[str]()
    for at, value in enumerate(values if len(values) > 1 or weights else ()):
        matches = ((re.fullmatch(pattern, value), meanings[pattern]) for pattern in meanings)
        match, meaning = next((pair for pair in matches if pair[0]), (None, ""))
        if match is None:
            return []
        setting = meaning.removeprefix("--").replace("reward_", "").format(value, *match.groups())
        name = re.split("[.:]", value)[-1]
        names[name] += 1
        # Functions of two files may have one name.
        part = f"reward.composite.parts.{name}" + f"_{names[name]}" * (names[name] > 1)
        args += [f"{part}.kind=rule", f"{part}.{setting}", f"{part}.scaling=none"]
        args += [f"{part}.weight={weight}" for weight in weights[at : at + 1]]
    return args


COMPUTED: Mapping[str, Callable[[str, Translation], list[str] | None]] = {
    "train_batch_size": _count_prompts,
    "per_device_train_batch_size": _count_batches,
    "total_episodes": _count_steps,
    "num_processes": _count_gpus,
    "max_len": _split_length,
    "adam_beta1": _join_betas,
    "adam_beta2": _join_betas,
    "dataset_name": _name_sets,
    "prompt_data": _name_sets,
    "eval_dataset": _name_sets,
    # Read with the functions.
    "reward_weights": lambda flag, done: [] if "reward_funcs" in done.values else None,
}


def _estimator(done: Translation) -> str:
    """Return the estimator that OpenRLHF's flag or TRL's script stands for; "" if none does."""
    values, program = done.values, done.program.lower()
    if named := values.get("advantage_estimator") or values.get("adv_estimator"):
        return "gae" if named[0] == "ppo" else named[0]
    if "rloo" in program or "rloo_k" in values:
        return "rloo"
    # What only the configuration of TRL's GRPO has.
    return "grpo" if "grpo" in program or values.keys() & set(done.tables["marks"]["grpo"]) else ""


def _method(estimator: str, flags: Iterable[Flag], done: Translation) -> str:
    """Return whose defaults a whole line of another program has, a table of `defaults`; or ""."""
    values, program = done.values, done.program.lower()
    # In a line of verl, whose defaults the package verl has, and with a file of ours.
    if any(v is None and "." in flag.partition("=")[0] for flag, v in flags) or "config" in values:
        return ""
    if "pretrain" in values or "openrlhf" in program or "train_ppo" in program:
        return "openrlhf"
    if not (program or {"model_name_or_path", "sft_model_path"} & values.keys()):
        return ""
    marked = values.keys() & set(done.tables["marks"]["ppo"])
    if marked or re.search(r"^ppo(_\w+)?(\.py)?$", program):
        return "rloo_old" if estimator == "rloo" else "ppo"
    return estimator if estimator in done.tables["defaults"] else ""


def _list_defaults(estimator: str, method: str, done: Translation) -> list[Flag]:
    """Return the flags, or the settings of ours, that a line of another program leaves out."""
    rows = dict(done.tables["defaults"].get(method, {}))
    if estimator in ("grpo", "rloo"):
        rows = {"adv_estimator": estimator} | rows
    typed = set().union(*(_targets(name) for name in done.values))
    aliases = done.tables["aliases"]
    critic = {n for n in rows if CRITIC.match(aliases.get(n, n))} if estimator != "gae" else set()
    rows = {
        n: v for n, v in rows.items() if not (_targets(n) & typed or (estimator and n in critic))
    }
    adapter = "".join(done.values.get("use_peft", ["no"])).lower() not in OFF
    if not adapter and not {"lora_r", "lora_rank"} & done.values.keys():
        rows = {name: value for name, value in rows.items() if not name.startswith("lora_")}
    # A batch that does not divide stays ours.
    counted = Translation(values={n: v.split() for n, v in rows.items()} | done.values)
    if "per_device_train_batch_size" in rows and not _count_batches("", counted):
        del rows["per_device_train_batch_size"]
    return [
        (f"{name}={value}", None) if "." in name else (f"--{name}", value.split())
        for name, value in rows.items()
    ]


def _targets(name: str) -> set[str]:
    """Return the settings that a flag of another program may set, and its own name."""
    tables = load_foreign_flags()
    texts = [str(tables[rows].get(name, "")) for rows in NAMING[:5]]
    texts += tables["values"].get(name, {}).values()
    words = {word.partition("=")[0] for text in texts for word in text.split()}
    return {own_flags().get(word, word) for word in {*words, name, f"--{name}"}}


def names_prompts(line: Sequence[str]) -> bool:
    """Whether a line says what to train on; a file or a preset may."""
    flags = {find_name(word) for word in line if "=" in word or word.startswith("--")}
    settings = {own_flags().get(f"--{name}", name) for name in flags}
    for name in flags:
        settings |= _targets(name)
    sources = {"data.train_files", "data.path", "--train_files", "config", "preset"}
    return bool(settings & sources or {"dataset_name", "prompt_data"} & flags)


def replace_script(line: Sequence[str], done: Translation) -> str:
    """Return why a script is refused whose settings are inside it, and the line that replaces it.

    What it sets is a line of TRL, so that what it leaves out is as in TRL.
    """
    from ppo_cli.extras.migrate.scripts import BUILT_ROWS, read_script

    library, method, flags = read_script(done.path)
    program = ["trl", method] if method else []
    functions, weights = (
        [value for name, values in flags if name == flag for value in values]
        for flag in ("--reward_funcs", "--reward_weights")
    )
    flags = [(name, values) for name, values in flags if is_known(find_name(name))]
    every = [word for name, values in flags for word in (name, *values)]
    unread = set(translate([*program, *every, "--train_files", "FILE"]).args) - own_flags().keys()
    # What has no equal here is left out, and so is what the line sets itself.
    words = [word for word in line if word.strip()]
    for name, values in flags:
        if name not in {*words, *unread, "--reward_funcs", "--reward_weights"}:
            words += [name, *values]
    if not names_prompts(words):
        words += ["--train_files", "FILE"]
    if "model.path" not in {target for word in words for target in _targets(word.strip("-"))}:
        words += ["--model", "MODEL"]
    built = f'    Its rows are built with map(): write them with dataset.to_json("{BUILT_ROWS}").\n'
    built *= BUILT_ROWS in words
    mixed = _mix_functions(functions, weights, done)
    words += mixed or ["--reward_function", *(functions[:1] or ["FILE.py:NAME"])]
    return (
        f"{done.program} is not read, and its settings are inside{library and f' ({library})'}. "
        f"{'What it sets is' if flags else 'What it sets has to be'} on this line:\n"
        f"    {ppo('train')} {shlex.join([*program, *words])}\n{built}"
        "    Copy reward functions into a file of their own, FILE.py: naming the script would run "
        "it. A judge scores with --use_api_reward, a rule with --rule NAME.\n"
        f"    `{ppo('plan')}` with the same arguments prints every value that the line leaves out"
    )


def _skip_launcher(args: Sequence[str], done: Translation) -> list[str]:
    """Return the arguments after a launcher and its program, with its counts of processes.

    `accelerate launch --num_processes 8 train.py`, `CUDA_VISIBLE_DEVICES=0 python3 -m verl…`,
    `trl grpo`, `ray job submit … -- python3 …`, `srun … bash -c "…"`, `openrlhf.cli.train_ppo`.
    """
    line = list(args)[args[:1] == ["$"] :]  # a pasted prompt
    start = next((i for i, argument in enumerate(line) if not VARIABLE.match(argument)), 0)
    if not line or not (LAUNCHER.match(line[start]) or MODULE.match(line[start])):
        return line
    for shell, dash, script in zip(line, line[1:], line[2:], strict=False):
        if shell.endswith("sh") and dash in ("-c", "-lc"):
            words = shlex.split(script)
            if at := max((i for i, word in enumerate(words) if word == "&&"), default=0):
                done.notes.append(f"`{' '.join(words[:at])}` is left out: run it before.")
            return _skip_launcher(words[at and at + 1 :], done)
    # The program is a script, a module, or a command of trl.
    ends = (
        count
        for count, (before, argument) in enumerate(pairwise(["", *line]), 1)
        if argument.endswith(".py")
        or (before in ("-m", "--module", "trl") and not COUNTING.match(argument))
        or (re.search(r"python[\w.]*$", before) and not argument.startswith("-"))
        or MODULE.match(argument)
    )
    end = next(ends, 0)
    if end == 0:
        return line
    done.path, done.program = line[end - 1], PurePath(line[end - 1]).name
    while line[end:] and line[end].isalpha():  # a command of the script
        end += 1
    at = next((i for i in range(start, end) if line[i].startswith("--")), end)
    unread = f", and {done.program} is not read" if done.program.endswith(".py") else ""
    launcher = " ".join(line[start:at])
    done.notes.append(f"`{launcher}` is left out: this program starts itself{unread}.")
    for variable in filter(VARIABLE.match, line[:end]):
        done.notes.append(f"{variable} is left out: write it in front of the command.")
    counting = max((i for i in range(end) if COUNTING.match(line[i])), default=end)
    flags: list[str] = []
    for flag, values in _split(line[counting:end]):
        if values is not None and is_known(find_name(flag)):
            flags += [flag, *([] if "=" in flag else values[:1])]
        elif values is not None and flag != "--module":
            done.notes.append(f"{flag} is left out: it is the launcher's.")
    return [*flags, *line[end:]]
