"""Translates other names for settings: verl's, old and new, and the older YAML style.

Every known name is taken over, tied to the setting that stands for it, taken with a remark, or
refused with the reason. Nothing is dropped in silence. The names are in verl.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from ppo_cli.algo.estimators import ESTIMATORS
from ppo_cli.config.derived import gpu_count, read_placement, usual_gpus
from ppo_cli.config.keys import find, table
from ppo_cli.config.layers import Entry, Reset
from ppo_cli.config.values import NO, YES, is_unset, listed

Lookup = Callable[[str], Any]
WRAPPER = "actor_rollout_ref."
ON: Final = ("true", "1")
OFF: Final = ("false", "null", "none", "0")
BUDGET: Final = "ref.log_prob_max_token_len_per_gpu"
PRECISIONS: Final = {"bf16": "bfloat16", "fp32": "float32", "float": "float32"}


@dataclass(frozen=True)
class ForeignNames:
    """What verl.toml says of names that are not ours; see the remarks there."""

    renamed: dict[str, tuple[str, ...]]
    remarks: dict[str, str]
    tied: dict[str, str]
    same: dict[str, tuple[tuple[str, ...], str]]
    told: dict[str, str]
    refused: dict[str, str]


@cache
def foreign_names() -> ForeignNames:
    """Read verl.toml: a PART stands for three models, `on` and `off` for all their spellings."""
    read = tomllib.loads(Path(__file__).with_name("verl.toml").read_text(encoding="utf-8"))
    words = {"on": ON, "off": OFF}

    def spelt(said: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        for name, text in said.items():
            parts = ("actor", "critic", "ref") if name.startswith("PART.") else ("PART",)
            yield from ((name.replace("PART", part, 1), text) for part in parts)

    return ForeignNames(
        {name: tuple(own) for name, own in read["renamed"].items()},
        read["remarks"],
        read["tied"],
        {
            name: (tuple(w for word in heading.split() for w in words.get(word, (word,))), text)
            for heading, said in read["same"].items()
            for name, text in spelt(said)
        },
        dict(spelt(read["told"])),
        dict(spelt(read["refused"])),
    )


@dataclass(frozen=True)
class Late:
    """A raw value that depends on other settings; computed once these are known.

    One that `yields` gives way to a plain value for the same setting.
    """

    compute: Callable[[Lookup], Any]
    yields: bool = False


@dataclass(frozen=True)
class Demand:
    """Something that must hold of the whole configuration, because a setting said so."""

    origin: str
    holds: Callable[[Lookup], bool]
    otherwise: str


def _smaller(one: Late, other: Late) -> Late:
    """Of two limits on one thing the tighter one holds; an unset one is no limit."""

    def tighter(value: Lookup) -> Any:
        known = [late.compute(value) for late in (one, other)]
        return min((limit for limit in known if limit is not None), default=None)

    return Late(tighter)


Turn = Callable[["Translator", Entry], None]


def _switch(translator: Translator, entry: Entry) -> bool | None:
    """Read a switch; None, and a problem, when it is neither on nor off."""
    text = str(entry.raw).strip().lower()
    if text not in YES | NO:
        translator.problem(entry, f"{entry.name}: '{entry.raw}' is neither true nor false.")
        return None
    return text in YES


def _dynamic(part: str, translator: Translator, entry: Entry) -> None:
    """Token budgets are what a micro-batch is cut by, unless its size is set."""
    size = f"{part}.ppo_micro_batch_size_per_gpu"
    on = _switch(translator, entry)
    if on:
        translator.put(entry, size, None)
    elif on is False:
        translator.demand(
            entry,
            lambda value: value(size) is not None,
            f"without dynamic batches set the size of a micro-batch: {size}=4.",
        )


def _global_micro(part: str, translator: Translator, entry: Entry) -> None:
    """Share the deprecated size over all ranks, as verl did."""

    def per_gpu(value: Lookup) -> int:
        ranks = _ranks(value, translator.environ)
        total = _count(entry)
        if total % ranks:
            raise ValueError(
                f"{entry.name} {total} is not divisible by {ranks} ranks; set "
                f"{part}.ppo_micro_batch_size_per_gpu instead."
            )
        return total // ranks

    if not is_unset(entry.raw):
        translator.put(entry, f"{part}.ppo_micro_batch_size_per_gpu", Late(per_gpu))


def _log_prob_rows(shared: bool, translator: Translator, entry: Entry) -> None:
    """A count of sequences becomes the token budget that as many of the longest need."""

    def budget(value: Lookup) -> int:
        rows = _count(entry)
        rows = max(1, rows // _ranks(value, translator.environ)) if shared else rows
        return rows * int(value("data.max_prompt_length") + value("data.max_response_length"))

    if not is_unset(entry.raw):
        translator.note(
            entry,
            f"it sets {BUDGET} here, to the tokens of {entry.raw} of the longest sequences"
            f"{' over all ranks' if shared else ''}; of several such sizes the smallest holds",
        )
        translator.put(entry, BUDGET, Late(budget))


def _count(entry: Entry) -> int:
    try:
        number = int(str(entry.raw))
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"{entry.name}: '{entry.raw}' is not a whole number of 1 or more.")
    return number


def _ranks(value: Lookup, environ: Mapping[str, str]) -> int:
    """Count the ranks that share rows, from settings that are not a whole configuration yet."""
    gpus, workers = value("trainer.n_gpus_per_node"), value("trainer.num_workers")
    if value("trainer.placement") is not None:
        ranks = len(read_placement(value("trainer.placement")).get("train", ()))
    elif value("trainer.async_steps"):
        raise ValueError("with --async_steps set the size per GPU: ppo_micro_batch_size_per_gpu.")
    elif workers:
        ranks = int(workers)
    else:
        a_node = gpus
        if gpus is None:
            spans = ("rollout.tensor_model_parallel_size", "trainer.tensor_parallel_size")
            a_node = usual_gpus(gpu_count(environ), *(int(value(span)) for span in spans))
        ranks = max(1, int(a_node)) * int(value("trainer.nnodes"))
    return max(1, ranks // int(value("trainer.tensor_parallel_size")))


def _adaptive(translator: Translator, entry: Entry) -> None:
    on = _switch(translator, entry)
    if on is not None:
        translator.put(entry, "algorithm.kl_ctrl.type", "adaptive" if on else "fixed")


def _old_dynamic(translator: Translator, entry: Entry) -> None:
    for part in ("actor", "critic"):
        _dynamic(part, translator, entry)


def _data_parallel(translator: Translator, entry: Entry) -> None:
    """The ranks that share the rows; times those that split each layer, all that train.

    They are GPUs where some are visible or asked for, else worker processes.
    """
    on_gpus = gpu_count(translator.environ) > 0
    try:
        size = _count(entry)
    except ValueError as error:
        translator.problem(entry, str(error))
        return

    def ranks(value: Lookup) -> int:
        return size * int(value("trainer.tensor_parallel_size"))

    def devices(value: Lookup) -> int | None:
        nodes = int(value("trainer.nnodes")) if on_gpus else 1
        asked = not on_gpus and value("trainer.n_gpus_per_node")
        placed = value("trainer.placement") is not None
        return None if asked or placed or ranks(value) == 1 else max(1, ranks(value) // nodes)

    def fits(value: Lookup) -> bool:
        gpus, workers = value("trainer.n_gpus_per_node"), value("trainer.num_workers")
        there = gpus * value("trainer.nnodes") if gpus else workers or 1
        placed = value("trainer.placement") is not None or value("trainer.async_steps")
        return bool(placed) or there == ranks(value)

    key = f"trainer.{'n_gpus_per_node' if on_gpus else 'num_workers'}"
    translator.put(entry, key, Late(devices, yields=True))
    translator.demand(
        entry,
        fits,
        f"{entry.name} {entry.raw} times trainer.tensor_parallel_size is not the number of "
        "devices of the run; leave it out, or change --n_gpus (without GPUs --num_workers).",
    )


def _greedy_validation(translator: Translator, entry: Entry) -> None:
    on = _switch(translator, entry)
    if on is False:
        translator.put(entry, "rollout.val_kwargs.temperature", "0")
    elif on:
        translator.demand(
            entry,
            lambda value: value("rollout.val_kwargs.temperature") > 0,
            "sampled validation needs a temperature: rollout.val_kwargs.temperature=0.7.",
        )


def _logger(translator: Translator, entry: Entry) -> None:
    """Drop `file`: metrics.jsonl is always written."""
    try:
        words = listed(entry.raw)
    except ValueError as error:
        translator.problem(entry, f"{entry.name}: {error}.")
        return
    translator.put(entry, entry.name, [word for word in words if word != "file"])


def _resume_mode(translator: Translator, entry: Entry) -> None:
    word = str(entry.raw).strip()
    if word == "disable":
        translator.put(entry, entry.name, "never")
    elif word == "resume_path":
        translator.resume_by_path = True

        def path(value: Lookup) -> str:
            if translator.resume_path is None:
                raise ValueError("name the checkpoint as well: --resume PATH.")
            return translator.resume_path

        translator.put(entry, entry.name, Late(path))
    else:
        translator.put(entry, entry.name, entry.raw)


def _resume_from(translator: Translator, entry: Entry) -> None:
    if is_unset(entry.raw):
        return
    translator.resume_path = str(entry.raw)
    translator.demand(
        entry,
        lambda value: translator.resume_by_path,
        "a checkpoint to go on from is taken with trainer.resume_mode=resume_path, or simply "
        f"--resume {entry.raw}.",
    )


def _reward_model_on(translator: Translator, entry: Entry) -> None:
    on = _switch(translator, entry)
    if on:
        translator.demand(
            entry,
            lambda value: value("reward.model.path") is not None,
            "a reward model is on, but none is named: --reward_model PATH.",
        )
    elif on is False:
        translator.demand(
            entry,
            lambda value: value("reward.model.path") is None,
            "the reward model is off, but reward.model.path names one; leave one of them out.",
        )


def _critic_on(translator: Translator, entry: Entry) -> None:
    """A critic is trained exactly when the estimator is gae."""
    if is_unset(entry.raw):
        return
    on = _switch(translator, entry)
    translator.demand(
        entry,
        lambda value: on is None or on == ESTIMATORS[value("algorithm.adv_estimator")].critic,
        f"critic.enable={entry.raw} goes against algorithm.adv_estimator: only gae trains a "
        "critic, and always does. Leave critic.enable out and choose with --adv_estimator.",
    )


def _reward_manager(translator: Translator, entry: Entry) -> None:
    name = str(entry.raw).strip()
    if name == "dapo":
        translator.note(entry, "the over-long penalty of dapo is reward.shaping.overlong_buffer")
    elif name == "gdpo":
        gdpo = foreign_names().refused["algorithm.gdpo_reward_keys"]
        translator.problem(entry, f"the reward manager 'gdpo' is not offered: {gdpo}.")
    elif name not in ("naive", "None", "null"):
        translator.problem(
            entry,
            f"the reward manager '{entry.raw}' is not offered. Rules are chosen by data_source "
            "(naive); --reward_function FILE takes one of your own, --rm_max_rpm limits a judge.",
        )


def _overlong_on(translator: Translator, entry: Entry) -> None:
    on = _switch(translator, entry)
    translator.overlong_on = on is True
    if on:
        translator.demand(
            entry,
            lambda value: value("reward.shaping.overlong_buffer") is not None,
            "the over-long penalty is on without the length of its buffer: set "
            f"{entry.name.removesuffix('enable')}len=64, or --overlong_buffer 64.",
        )


def _overlong_buffer(translator: Translator, entry: Entry) -> None:
    """The length of the buffer counts once the penalty is switched on, wherever that is said."""
    late = Late(lambda value: _count(entry) if translator.overlong_on else None)
    translator.put(entry, "reward.shaping.overlong_buffer", late)


def _overlong_penalty(translator: Translator, entry: Entry) -> None:
    usual = table()["reward.shaping.overlong_penalty"].default
    late = Late(lambda value: entry.raw if translator.overlong_on else usual)
    translator.put(entry, "reward.shaping.overlong_penalty", late)


def _function_file(translator: Translator, entry: Entry) -> None:
    if not is_unset(entry.raw):
        translator.function_file = entry


def _function_name(translator: Translator, entry: Entry) -> None:
    translator.function_name = entry


def _saved(translator: Translator, entry: Entry) -> None:
    raw = entry.raw.strip("[]() ").split(",") if isinstance(entry.raw, str) else entry.raw or []
    words = {str(word).strip(" '\"") for word in raw}
    if not {"model", "optimizer", "extra"} <= words <= {"model", "optimizer", "extra", "hf_model"}:
        translator.problem(
            entry,
            f"{entry.name}: a checkpoint always holds model, optimizer and extra, and the model "
            "as a Hugging Face folder; leave it out.",
        )


def _device(translator: Translator, entry: Entry) -> None:
    here = "cuda" if gpu_count(translator.environ) else "cpu"
    if str(entry.raw).strip() != here:
        translator.problem(
            entry,
            f"trainer.device is '{entry.raw}', but this machine has "
            f"{'a GPU' if here == 'cuda' else 'no GPU'}; the device is found by itself "
            "(CUDA_VISIBLE_DEVICES= hides GPUs).",
        )


def _precision(translator: Translator, entry: Entry) -> None:
    translator.put(entry, "model.dtype", PRECISIONS.get(str(entry.raw), entry.raw))


def _window(translator: Translator, entry: Entry) -> None:
    if "_" in str(entry.raw):
        translator.problem(
            entry,
            f"{entry.name}: a window '{entry.raw}' is not offered; weights are truncated at one "
            "number, such as 2.0.",
        )
    else:
        translator.put(entry, entry.name, entry.raw)


def _overlong(prefix: str) -> dict[str, Turn]:
    """Return what DAPO's settings of the over-long penalty turn into."""
    return {
        f"{prefix}enable": _overlong_on,
        f"{prefix}len": _overlong_buffer,
        f"{prefix}penalty_factor": _overlong_penalty,
    }


TURNED: Final[dict[str, Turn]] = {
    "actor.use_dynamic_bsz": partial(_dynamic, "actor"),
    "critic.use_dynamic_bsz": partial(_dynamic, "critic"),
    "actor.ppo_micro_batch_size": partial(_global_micro, "actor"),
    "critic.ppo_micro_batch_size": partial(_global_micro, "critic"),
    "rollout.log_prob_micro_batch_size_per_gpu": partial(_log_prob_rows, False),
    "ref.log_prob_micro_batch_size_per_gpu": partial(_log_prob_rows, False),
    "critic.forward_micro_batch_size_per_gpu": partial(_log_prob_rows, False),
    "rollout.log_prob_micro_batch_size": partial(_log_prob_rows, True),
    "ref.log_prob_micro_batch_size": partial(_log_prob_rows, True),
    "critic.forward_micro_batch_size": partial(_log_prob_rows, True),
    "ppo.adaptive_kl": _adaptive,
    "training.use_dynamic_batchsize": _old_dynamic,
    "distributed.data_parallel_size": _data_parallel,
    "rollout.val_kwargs.do_sample": _greedy_validation,
    "trainer.logger": _logger,
    "trainer.resume_mode": _resume_mode,
    "trainer.resume_from_path": _resume_from,
    "reward_model.enable": _reward_model_on,
    "reward.reward_model.enable": _reward_model_on,
    "critic.enable": _critic_on,
    "reward_model.reward_manager": _reward_manager,
    "reward.reward_manager": _reward_manager,
    "reward.reward_manager.name": _reward_manager,
    **_overlong("reward_model.reward_kwargs.overlong_buffer_cfg."),
    **_overlong("reward.reward_kwargs.overlong_buffer_cfg."),
    "custom_reward_function.path": _function_file,
    "reward.custom_reward_function.path": _function_file,
    "custom_reward_function.name": _function_name,
    "reward.custom_reward_function.name": _function_name,
    "actor.checkpoint.save_contents": _saved,
    "actor.checkpoint.load_contents": _saved,
    "critic.checkpoint.save_contents": _saved,
    "critic.checkpoint.load_contents": _saved,
    "trainer.device": _device,
    "actor.fsdp_config.mixed_precision.param_dtype": _precision,
    "actor.fsdp_config.dtype": _precision,
    "critic.fsdp_config.mixed_precision.param_dtype": _precision,
    "critic.fsdp_config.dtype": _precision,
    "algorithm.rollout_correction.rollout_is_threshold": _window,
}


class Translator:
    """Turns one layer after the other into our names; remembers what spans several."""

    def __init__(self, environ: Mapping[str, str], problems: list[str], notes: list[str]) -> None:
        self.environ = environ
        self.problems, self.notes = problems, notes
        self.demands: list[Demand] = []
        self.resume_path: str | None = None
        self.resume_by_path = False
        self.overlong_on = False
        self.function_file: Entry | None = None
        self.function_name: Entry | None = None
        self.given = ""
        self._by: dict[str, tuple[str, Entry]] = {}

    def put(self, entry: Entry, name: str, raw: Any) -> None:
        """Set one of our settings; two names for it in one layer must agree."""
        new = Entry(name, raw, entry.origin)
        given, old = self._by.pop(name, (self.given, new))
        if given != self.given:
            if isinstance(raw, Late) and isinstance(old.raw, Late):
                new = Entry(name, _smaller(old.raw, raw), entry.origin)
            elif isinstance(old.raw, Late) and old.raw.yields:
                pass
            elif isinstance(raw, Late) and raw.yields:
                new = old
            elif str(old.raw) != str(raw):
                self.problem(
                    entry, f"{self.given} and {given} both set {name}, differently; keep one."
                )
        self._by[name] = (self.given, new)

    def problem(self, entry: Entry, text: str) -> None:
        """Report what is wrong with an entry."""
        self.problems.append(f"{entry.origin}: {text}")

    def note(self, entry: Entry, text: str) -> None:
        """Remark on an entry that was taken."""
        self.notes.append(f"{entry.origin}: {entry.name}: {text}.")

    def demand(self, entry: Entry, holds: Callable[[Lookup], bool], otherwise: str) -> None:
        """Ask for something that can be seen only when all settings are known."""
        self.demands.append(Demand(entry.origin, holds, otherwise))

    def translate(self, layer: Sequence[Entry]) -> list[Entry]:
        """Return the layer in our own names; what has to be said about it is added to the lists."""
        self._by = {}
        self.function_file = self.function_name = None
        for entry in layer:
            self.given = entry.name
            name = entry.name.removeprefix(WRAPPER)
            self._one(Entry(name, entry.raw, entry.origin))
        self._function()
        return [entry for _, entry in self._by.values()]

    def _one(self, entry: Entry) -> None:
        name = entry.name
        if isinstance(entry.raw, str) and "${" in entry.raw:
            self.problem(entry, f"{name}: '{entry.raw}' is not filled in; write the value itself.")
        elif isinstance(entry.raw, Reset):
            # `~key`: only what is a setting of ours, by any of its names, can be taken back.
            for own in _renamed(name) or (name,):
                self.put(entry, own, entry.raw)
        elif name in TURNED:
            TURNED[name](self, entry)
        elif find(name) is not None:
            self.put(entry, name, entry.raw)
        else:
            self._foreign(entry, name, foreign_names())

    def _foreign(self, entry: Entry, name: str, names: ForeignNames) -> None:
        if renamed := _renamed(name):
            for own in renamed:
                if find(own) is None:
                    self._one(Entry(own, entry.raw, entry.origin))
                else:
                    self.put(entry, own, entry.raw)
            if name in names.remarks:
                self.note(entry, names.remarks[name])
        elif name in names.tied:
            self._tie(entry, names.tied[name])
        elif name in names.same:
            self._same(entry, *names.same[name])
        elif ".megatron" in name:
            self.problem(entry, f"{name} cannot be set here: {names.refused['megatron.*']}.")
        elif said := _below(names.told, name):
            self.note(entry, said)
        elif said := _below(names.refused, name):
            self.problem(entry, f"{name} cannot be set here: {said}.")
        else:
            self.put(entry, name, entry.raw)

    def _same(self, entry: Entry, allowed: Sequence[str], said: str) -> None:
        if _plain(entry.raw) not in allowed:
            shown = "null" if entry.raw is None else entry.raw
            self.problem(entry, f"{entry.name}={shown} cannot be honoured: {said}.")

    def _tie(self, entry: Entry, own: str) -> None:
        if is_unset(entry.raw) or str(entry.raw) == "-1":
            return
        wanted = PRECISIONS.get(str(entry.raw), str(entry.raw)).strip().lower()
        self.demand(
            entry,
            lambda value: str(value(own)).lower() == wanted,
            f"{entry.name} is {own} here and cannot differ from it; set {own}={entry.raw} instead.",
        )

    def _function(self) -> None:
        """Join verl's path and name of a reward function."""
        file, name = self.function_file, self.function_name
        if file is not None:
            tail = "" if name is None or is_unset(name.raw) else f":{name.raw}"
            self.given = "custom_reward_function.path"
            self.put(file, "reward.function", f"{file.raw}{tail}")
        elif name is not None and str(name.raw) != "compute_score":
            self.problem(
                name, "a function is named without its file; use --reward_function FILE:NAME."
            )


def _renamed(name: str) -> tuple[str, ...]:
    renamed = foreign_names().renamed
    if name in renamed:
        return renamed[name]
    for old, new in renamed.items():
        if old.endswith(".*") and name.startswith(old[:-1]):
            return tuple(own[:-1] + name[len(old) - 1 :] for own in new)
    return ()


def _below(said: Mapping[str, str], name: str) -> str:
    """Find what is said of a name, or of the nearest group that holds it."""
    if name in said:
        return said[name]
    parts = name.split(".")
    groups = (".".join(parts[:cut]) + ".*" for cut in range(len(parts), 0, -1))
    return next((said[group] for group in groups if group in said), "")


def _plain(raw: Any) -> str:
    return "null" if raw is None or raw in ("", [], {}) else str(raw).strip().lower()
