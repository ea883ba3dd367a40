"""Names of verl whose translation is more than another name.

A translation reads one entry and sets settings of ours, records an expectation about the whole
configuration, or reports why the entry is refused. `TranslationState` collects all three.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ppo_cli.algo.estimators import ESTIMATORS
from ppo_cli.config.device_roles import read_placement
from ppo_cli.config.layers import Entry
from ppo_cli.config.schema.keys import find_key, table
from ppo_cli.config.schema.values import NO, YES, is_unset, parse_list, read_switch
from ppo_cli.machine.machine import Machine

Lookup = Callable[[str], Any]  # dotted name -> value of the whole configuration


@dataclass(frozen=True)
class DerivedValue:
    """A raw value that depends on other settings; computed once all layers are translated.

    One that `yields` gives way to a plain value for the same setting in the same layer, one that
    `wins` replaces it.
    """

    compute: Callable[[Lookup], Any]
    yields: bool = False
    wins: bool = False


@dataclass(frozen=True)
class Expectation:
    """Something that must hold for the whole configuration, because an entry demands it."""

    origin: str
    holds: Callable[[Lookup], bool]
    otherwise: str


def normalize(raw: Any) -> str:
    """Return a value in one spelling: 1e-3 equals 0.001, and None equals nothing."""
    # The spellings of "nothing" in YAML, Hydra and Python.
    text = re.sub(r"[\s'\"]", "", str(raw)).lower()
    if text in ("", "none", "[]", "{}"):
        return "null"
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def _tighter_limit(first: DerivedValue, second: DerivedValue) -> DerivedValue:
    """Return the smaller of two limits on one thing; an unset limit is none."""

    def tighter(value: Lookup) -> Any:
        limits = [late.compute(value) for late in (first, second)]
        return min((limit for limit in limits if limit is not None), default=None, key=float)

    return DerivedValue(tighter)


class TranslationState:
    """Collects what the translated layers set, demand and remark; it spans several layers."""

    def __init__(
        self,
        machine: Machine,
        problems: list[str],
        notes: list[str],
        verl: bool = False,
    ) -> None:
        self.machine, self.verl = machine, verl
        self.problems, self.notes = problems, notes
        # Of all layers.
        self.expectations: list[Expectation] = []
        self.resume_path: str | None = None
        self.resume_by_path = False
        self.overlong_on = False
        # Of one layer, or by model.
        self.function: dict[str, Entry] = {}  # of a layer: path and name of a reward function
        self.dynamic: dict[str, bool] = {}  # by model, whether token budgets cut micro-batches
        self.sized: dict[str, Entry] = {}  # by model, what sets the size of a micro-batch
        self.correction: dict[str, Any] = {}  # what sets verl's loss in bypass_mode
        self._refused: dict[tuple[str, str], list[str]] = {}
        self._remarks: dict[tuple[str, str], list[str]] = {}
        self.switched_on: set[str] = {""}  # switches of verl that any layer turns on
        # While one layer is translated: the key, and what it has set.
        self.entry_name = ""
        self._settings: dict[str, tuple[str, Entry]] = {}

    def put(self, entry: Entry, name: str, raw: Any) -> None:
        """Set one of our settings; the same verl name again in a layer replaces the value.

        After another name in this layer, two derived values become their lower limit, one that
        `yields` gives way to others, all give way to one that `wins`, and any other difference is
        recorded as a problem.
        """
        # The same setting by another name in this layer: agree, combine, or report.
        new = Entry(name, raw, entry.origin)
        earlier_name, old = self._settings.pop(name, (self.entry_name, new))
        if earlier_name != self.entry_name:
            if isinstance(old.raw, DerivedValue) and old.raw.wins:
                new = old
            elif isinstance(raw, DerivedValue) and raw.wins:
                pass
            elif isinstance(raw, DerivedValue) and isinstance(old.raw, DerivedValue):
                new = Entry(name, _tighter_limit(old.raw, raw), entry.origin)
            elif isinstance(old.raw, DerivedValue) and old.raw.yields:
                pass
            elif isinstance(raw, DerivedValue) and raw.yields:
                new = old
            elif normalize(old.raw) != normalize(raw):
                self.problem(
                    entry,
                    f"{self.entry_name} and {earlier_name} both set {name}, differently; keep one.",
                )
        self._settings[name] = (self.entry_name, new)

    def problem(self, entry: Entry, text: str) -> None:
        """Report what is wrong with an entry."""
        self.problems.append(f"{entry.origin}: {text}")

    def tell(self, entry: Entry, remark: str) -> None:
        """Remark on an accepted key; keys with the same remark share a sentence."""
        self._remarks.setdefault((entry.origin, remark), []).append(entry.name)

    def note(self, entry: Entry, text: str) -> None:
        """Remark on an accepted entry."""
        self.notes.append(f"{entry.origin}: {entry.name}: {text}.")

    def demand(self, entry: Entry, holds: Callable[[Lookup], bool], otherwise: str) -> None:
        """Record something that can only be checked when all settings are known."""
        self.expectations.append(Expectation(entry.origin, holds, otherwise))


# One budget serves all log-prob computations here; verl has one for each.
BUDGET: Final = "ref.log_prob_max_token_len_per_gpu"
# verl's words for precisions.
PRECISIONS: Final = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32",
    "float": "float32",
}  # fmt: skip
TRANSLATIONS: Final[
    dict[str, Callable[[TranslationState, Entry], None]]
] = {}  # by name, without the wrapper
Translation = Callable[[TranslationState, Entry, Any], None]


def _parse_count(raw: Any) -> int:
    """Return a whole number of at least 1; ValueError for anything else."""
    try:
        number = int(str(raw))
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"'{raw}' is not a whole number of 1 or more")
    return number


def _register_translation(
    names: str, read: Callable[[Any], Any] = lambda raw: raw, *, null: bool = True
) -> Callable[[Translation], Translation]:
    """Declare a function that translates these names; PART stands for actor and critic.

    The function receives what `read` makes of the raw value; a ValueError of `read` is a problem of
    the entry. Without `null`, a null value sets nothing. A null of our own files, such as the
    config.yaml of a run, leaves a setting to its rule; what verl means by it counts in its lines.
    """

    def declare(turn: Translation) -> Translation:
        """Register the function for each of the names; returns it unchanged."""

        def take(state: TranslationState, entry: Entry) -> None:
            """Read the raw value and translate it, or record a problem of the entry."""
            if is_unset(entry.raw) and not null:
                return
            key = find_key(entry.name)
            if entry.raw is None and not state.verl and key is not None and key.rule is not None:
                state.put(entry, entry.name, None)
                return
            try:
                value = read(entry.raw)
            except ValueError as error:
                state.problem(entry, f"{entry.name}: {error}.")
            else:
                turn(state, entry, value)

        # One handler for all names of the setting.
        for name in names.split():
            for part in ("actor", "critic") if "PART" in name else ("",):
                TRANSLATIONS[name.replace("PART", part)] = take
        return turn

    return declare


def _rename_values(names: str, values: Mapping[str, Any], target: str = "") -> None:
    """Declare names of `target`, or of our setting of the same name, with other words."""

    @_register_translation(names)
    def put(state: TranslationState, entry: Entry, raw: Any) -> None:
        # Words that have no translation are passed on; the schema then checks them.
        word = "null" if is_unset(raw) else str(raw).strip().lower()
        state.put(entry, target or entry.name, values.get(word, raw))


# Values that only have another name here.
_rename_values("PART.optim.optimizer", {"adamw": "AdamW", "adamw8bit": "AdamW8bit"})
_rename_values("PART.optim.lr_warmup_steps", {"null": "-1"})
_rename_values("PART.optim.min_lr_ratio", {"null": "0.0"})
_rename_values("trainer.profile_steps global_profiler.steps", {"null": []}, "trainer.profile_steps")
_rename_values(
    "model.torch_dtype PART.fsdp_config.dtype PART.fsdp_config.mixed_precision.param_dtype",
    PRECISIONS, "model.dtype",
)  # fmt: skip
_rename_values(
    "ppo.adaptive_kl",
    dict.fromkeys(YES, "adaptive") | dict.fromkeys(NO, "fixed"), "algorithm.kl_ctrl.type",
)  # fmt: skip


@_register_translation("PART.use_dynamic_bsz training.use_dynamic_batchsize", read_switch)
def _translate_dynamic_batches(state: TranslationState, entry: Entry, on: bool) -> None:
    """Token budgets cut micro-batches when dynamic batches are on, unless a size is set."""
    # `training.use_dynamic_batchsize` is for both models.
    named = entry.name.partition(".")[0]
    for part in ("actor", "critic") if named == "training" else (named,):
        state.dynamic[part] = on
        size = f"{part}.ppo_micro_batch_size_per_gpu"
        if on:
            state.put(entry, size, DerivedValue(lambda value: None))
        else:
            problem = f"without dynamic batches set the size of a micro-batch: {size}=4."
            state.demand(entry, partial(_is_set, size), problem)


def _is_set(name: str, value: Lookup) -> bool:
    return value(name) is not None


@_register_translation("PART.ppo_micro_batch_size_per_gpu")
def _translate_micro_batch_size(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Set the size of a micro-batch; with token budgets it is ignored, as in verl."""
    # Known only at the end: another layer may switch dynamic batches on.
    part = entry.name.partition(".")[0]
    state.put(
        entry, entry.name, DerivedValue(lambda value: None if state.dynamic.get(part) else raw)
    )
    state.sized[part] = entry


@_register_translation("PART.ppo_micro_batch_size", _parse_count, null=False)
def _translate_total_micro_batch(state: TranslationState, entry: Entry, total: int) -> None:
    """Divide the deprecated total size by the number of ranks, as verl did."""
    part = entry.name.partition(".")[0]
    target = f"{part}.ppo_micro_batch_size_per_gpu"

    def per_gpu(value: Lookup) -> int | None:
        """Return the rows per rank, None with dynamic batches; ValueError if not divisible."""
        if state.dynamic.get(part):
            return None
        # Known only when all layers are translated.
        ranks = _count_ranks(value, state.machine)
        if total % ranks:
            raise ValueError(
                f"{entry.name} {total} is not divisible by {ranks} ranks; set {target} instead."
            )
        return total // ranks

    state.put(entry, target, DerivedValue(per_gpu))


def _budget_of(part: str) -> str:
    return "reward.model.batch_tokens" if part == "reward_model" else BUDGET


@_register_translation(
    "rollout.log_prob_max_token_len_per_gpu ref.log_prob_max_token_len_per_gpu "
    "critic.forward_max_token_len_per_gpu reward_model.forward_max_token_len_per_gpu",
    _parse_count, null=False,
)  # fmt: skip
def _translate_token_budget(state: TranslationState, entry: Entry, count: int) -> None:
    """Set a token budget; the smallest of several wins."""
    state.put(entry, _budget_of(entry.name.partition(".")[0]), DerivedValue(lambda value: count))


@_register_translation(
    "rollout.log_prob_micro_batch_size_per_gpu rollout.log_prob_micro_batch_size "
    "ref.log_prob_micro_batch_size_per_gpu ref.log_prob_micro_batch_size "
    "critic.forward_micro_batch_size_per_gpu critic.forward_micro_batch_size "
    "reward_model.micro_batch_size_per_gpu reward_model.micro_batch_size",
    _parse_count, null=False,
)  # fmt: skip
def _translate_row_budget(state: TranslationState, entry: Entry, count: int) -> None:
    """Turn the rows of a micro-batch that is only scored into a budget of as many longest rows.

    Names without `_per_gpu` count the rows over all ranks. If verl has dynamic batches, the entry
    is ignored, except for the reward model, whose longest row is its own `max_length` if set.
    """
    part, shared = entry.name.partition(".")[0], not entry.name.endswith("_per_gpu")
    target = _budget_of(part)

    def budget(value: Lookup) -> int | None:
        """Return the token budget of these rows, None if verl has dynamic batches instead."""
        if target == BUDGET and state.dynamic.get("critic" if part == "critic" else "actor"):
            return None
        # The longest sequence: prompt and response, or what the reward model reads.
        longest = value("data.max_prompt_length") + value("data.max_response_length")
        if target != BUDGET:
            longest = value("reward.model.max_length") or longest
        rows = max(1, count // _count_ranks(value, state.machine)) if shared else count
        return rows * int(longest)

    # The budget is shared by several computations, so say what has set it.
    if target == BUDGET:
        state.note(
            entry,
            f"it sets {BUDGET} here, to the tokens of {entry.raw} of the longest sequences"
            f"{' over all ranks' if shared else ''}; of several such sizes the smallest holds",
        )
    state.put(entry, target, DerivedValue(budget))


def _count_ranks(value: Lookup, machine: Machine) -> int:
    """Return the ranks that share rows, from settings that are not yet a whole configuration."""
    gpus, workers = value("trainer.n_gpus_per_node"), value("trainer.num_workers")
    # The same rules as in placement.py, on values that are not validated yet.
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
            a_node = min(len(machine.gpus), math.lcm(*(int(value(span)) for span in spans)))
        ranks = max(1, int(a_node)) * int(value("trainer.nnodes"))
    return max(1, ranks // int(value("trainer.tensor_parallel_size")))


@_register_translation("distributed.data_parallel_size", _parse_count)
def _translate_data_parallel(state: TranslationState, entry: Entry, size: int) -> None:
    """Set the number of devices from the ranks that share rows.

    That number times the ranks that split each layer is all that train: GPUs where some are visible
    or set, else worker processes.
    """
    # GPUs or worker processes, as this machine has them.
    on_gpus = bool(state.machine.gpus)

    # Computed late, because any layer may set devices, nodes or a placement.
    def ranks(value: Lookup) -> int:
        return size * int(value("trainer.tensor_parallel_size"))

    def devices(value: Lookup) -> int | None:
        nodes = int(value("trainer.nnodes")) if on_gpus else 1
        gpus_set = not on_gpus and value("trainer.n_gpus_per_node")
        placed = value("trainer.placement") is not None
        return None if gpus_set or placed or ranks(value) == 1 else max(1, ranks(value) // nodes)

    def fits(value: Lookup) -> bool:
        gpus, workers = value("trainer.n_gpus_per_node"), value("trainer.num_workers")
        device_count = gpus * value("trainer.nnodes") if gpus else workers or 1
        placed = value("trainer.placement") is not None or value("trainer.async_steps")
        return bool(placed) or device_count == ranks(value)

    # A number of devices in the same layer wins over this one.
    key = f"trainer.{'n_gpus_per_node' if on_gpus else 'num_workers'}"
    state.put(entry, key, DerivedValue(devices, yields=True))
    state.demand(
        entry,
        fits,
        f"{entry.name} {entry.raw} times trainer.tensor_parallel_size is not the number of "
        "devices of the run; leave it out, or change --n_gpus (without GPUs --num_workers).",
    )


@_register_translation("rollout.val_kwargs.temperature")
def _translate_validation_temperature(state: TranslationState, entry: Entry, raw: Any) -> None:
    state.put(entry, entry.name, DerivedValue(lambda value: raw))


@_register_translation("rollout.val_kwargs.do_sample", read_switch)
def _translate_validation_sampling(state: TranslationState, entry: Entry, on: bool) -> None:
    """Without sampling, validation has temperature 0."""
    if not on:
        # Of several temperatures the lowest holds: as in verl, this wins over one that is set.
        state.put(entry, "rollout.val_kwargs.temperature", DerivedValue(lambda value: "0"))
        return
    state.demand(
        entry,
        lambda value: value("rollout.val_kwargs.temperature") > 0,
        "sampled validation needs a temperature: rollout.val_kwargs.temperature=0.7.",
    )


@_register_translation("trainer.logger", parse_list)
def _translate_logger(state: TranslationState, entry: Entry, loggers: list[Any]) -> None:
    """Drop `file`: metrics.jsonl is always written."""
    state.put(entry, entry.name, [word for word in loggers if word != "file"])


@_register_translation("trainer.resume_mode")
def _translate_resume_mode(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Translate resume_path (with the path set elsewhere) and disable."""
    word = str(raw).strip()
    # The path comes from another key, perhaps in another layer.
    if word == "resume_path":
        state.resume_by_path = True

        def path(value: Lookup) -> str:
            if state.resume_path is None:
                raise ValueError("name the checkpoint as well: --resume PATH.")
            return state.resume_path

        raw = DerivedValue(path)
    state.put(entry, entry.name, "never" if word == "disable" else raw)


@_register_translation("trainer.resume_from_path", null=False)
def _translate_resume_path(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Remember the checkpoint for trainer.resume_mode=resume_path."""
    # False means no checkpoint.
    if str(raw).strip().lower() == "false":
        return
    state.resume_path = str(raw)
    state.demand(
        entry,
        lambda value: state.verl or state.resume_by_path,
        f"a checkpoint to resume from needs trainer.resume_mode=resume_path, or --resume {raw}.",
    )


@_register_translation("reward_model.enable reward.reward_model.enable", read_switch, null=False)
def _translate_reward_model_switch(state: TranslationState, entry: Entry, on: bool) -> None:
    """The switch of a reward model must agree with its path."""
    state.demand(
        entry,
        lambda value: (value("reward.model.path") is not None) == on,
        "a reward model is on, but none is named: --reward_model PATH."
        if on
        else "the reward model is off, but reward.model.path names one; leave one of them out.",
    )


@_register_translation("critic.enable", read_switch, null=False)
def _translate_critic_switch(state: TranslationState, entry: Entry, on: bool) -> None:
    """A critic is trained exactly when the estimator is gae."""
    state.demand(
        entry,
        lambda value: on == ESTIMATORS[value("algorithm.adv_estimator") or "gae"].critic,
        f"critic.enable={entry.raw} contradicts algorithm.adv_estimator: gae has a critic, "
        "and the others have none. Leave critic.enable out, and choose with --adv_estimator.",
    )


@_register_translation(
    "reward_model.reward_manager reward.reward_manager reward.reward_manager.name"
)
def _translate_reward_manager(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Accept the managers whose behaviour is built in; name the setting for the others."""
    # `dapo` is a switch and a penalty: the penalty has its own setting here.
    name = str(raw).strip()
    if name == "dapo":
        state.note(entry, "the over-long penalty of dapo is reward.shaping.overlong_buffer")
    elif name not in ("naive", "gdpo", "None", "null"):
        state.problem(
            entry,
            f"{entry.name}: '{raw}' is not offered; leave it out. Rules are chosen by data_source "
            "(naive); --reward_function FILE names your function, --rm_max_rpm limits a judge.",
        )


# DAPO's settings of the over-long penalty are in groups with several names.
_OVERLONG = (
    "reward_model.overlong_buffer.{0} reward_model.reward_kwargs.overlong_buffer_cfg.{0} "
    "reward.overlong_buffer.{0} reward.reward_kwargs.overlong_buffer_cfg.{0}"
)


@_register_translation(_OVERLONG.format("enable"), read_switch)
def _translate_overlong_switch(state: TranslationState, entry: Entry, on: bool) -> None:
    """The switch of the over-long penalty needs the length of its buffer."""
    state.overlong_on = on
    state.demand(
        entry,
        lambda value: not on or value("reward.shaping.overlong_buffer") is not None,
        "the over-long penalty needs the length of its buffer: set "
        f"{entry.name.removesuffix('enable')}len=64, or --overlong_buffer 64.",
    )


@_register_translation(_OVERLONG.format("len"))
def _translate_overlong_buffer(state: TranslationState, entry: Entry, raw: Any) -> None:
    """The length counts once the penalty is switched on, in any layer."""
    # Late, because the switch may be in a later layer.
    late = DerivedValue(lambda value: raw if state.overlong_on else None)
    state.put(entry, "reward.shaping.overlong_buffer", late)


@_register_translation(_OVERLONG.format("penalty_factor"))
def _translate_overlong_penalty(state: TranslationState, entry: Entry, raw: Any) -> None:
    """The factor counts once the penalty is switched on, in any layer."""
    key = "reward.shaping.overlong_penalty"
    late = DerivedValue(lambda value: raw if state.overlong_on else table()[key].default)
    state.put(entry, key, late)


@_register_translation(
    "custom_reward_function.path reward.custom_reward_function.path "
    "custom_reward_function.name reward.custom_reward_function.name",
    null=False,
)
def _translate_reward_function(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Remember file and name of a reward function; the translator joins them."""
    state.function[entry.name.rpartition(".")[2]] = entry


@_register_translation(
    "PART.checkpoint.contents PART.checkpoint.save_contents PART.checkpoint.load_contents",
    parse_list,
)
def _translate_checkpoint_contents(
    state: TranslationState, entry: Entry, contents: list[Any]
) -> None:
    """A checkpoint always contains everything that verl lets one choose."""
    # Less than everything is accepted with a remark: nothing is lost by saving more.
    if not {"model", "optimizer", "extra"} <= set(map(str, contents)):
        remark = "a checkpoint always holds model (as a Hugging Face folder), optimizer and extra"
        state.note(entry, remark)


@_register_translation("trainer.device")
def _translate_device(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Accept the device that this machine has."""
    # Only this machine's device is right; another one would be a mistake of the line.
    device = "cuda" if state.machine.gpus else "cpu"
    if str(raw).strip() != device:
        state.problem(
            entry,
            f"trainer.device is '{raw}', but a run selects an NVIDIA GPU or the CPU by "
            f"itself, and here that is {device} (CUDA_VISIBLE_DEVICES= hides GPUs); leave it out.",
        )


@_register_translation("trainer.critic_warmup")
def _translate_critic_warmup(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Subtract 1: verl counts steps from 1 and trains the actor from step N on."""
    if state.verl and str(raw).strip().isdigit() and int(raw) > 0:
        state.note(entry, f"the actor trains from step {raw} on, as in verl")
        raw = int(raw) - 1
    state.put(entry, entry.name, raw)


@_register_translation(
    "model.use_remove_padding actor.use_remove_padding critic.model.use_remove_padding", read_switch
)
def _translate_packing(state: TranslationState, entry: Entry, on: bool) -> None:
    """Rows are packed when every model that sets it asks for it."""
    state.put(entry, "model.packing", DerivedValue(lambda value: on))


@_register_translation("trainer.save_freq trainer.test_freq")
def _translate_frequency(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Read `False`, and verl's 0, as never."""
    word = str(raw).strip().lower()
    # verl's 0 is "never", ours is refused, or "at the end".
    never = word == "false" or (word == "0" and state.verl) or is_unset(word)
    state.put(entry, entry.name, "-1" if never else raw)


@_register_translation("model.lora_alpha critic.model.lora_alpha")
def _translate_lora_alpha(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Read verl's `lora_alpha=0` with `lora_rank=0` as no LoRA."""
    # verl writes both as 0 when LoRA is off.
    off = state.verl and str(raw).strip() in ("0", "0.0")
    usual = table()[entry.name].default
    rank = entry.name.replace("alpha", "rank")
    late = DerivedValue(lambda value: raw if int(value(rank)) else usual)
    state.put(entry, entry.name, late if off else raw)


@_register_translation("model.exclude_modules critic.model.exclude_modules", null=False)
def _translate_excluded_modules(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Excluding modules is not offered; without LoRA it does not matter."""
    model = entry.name.removesuffix("exclude_modules")
    state.demand(
        entry,
        lambda value: value(f"{model}lora_rank") == 0,
        f"{entry.name} is not offered; list the modules that LoRA adapts in {model}target_modules.",
    )


@_register_translation(
    "rollout.max_model_len rollout.engine_kwargs.vllm.max_model_len", _parse_count, null=False
)
def _translate_sampler_length(state: TranslationState, entry: Entry, length: int) -> None:
    """The sampler length follows from prompt and response; verl may allow more."""
    state.demand(
        entry,
        lambda value: length >= value("data.max_prompt_length") + value("data.max_response_length"),
        f"{entry.name} {length} is less than data.max_prompt_length and data.max_response_length "
        "together; lower one of these.",
    )


@_register_translation(
    "rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache "
    "rollout.engine_kwargs.vllm.mm_processor_cache_gb"
)
def _translate_multimodal_caches(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Accept settings of multimodal caches."""
    state.tell(entry, "models here read text only, so it changes nothing")


@_register_translation("rollout.dtype ref.fsdp_config.dtype")
def _translate_sampler_dtype(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Trainer, reference and sampler compute in one precision."""
    # One precision for all, so the value must agree with --dtype.
    word = PRECISIONS.get(str(raw), str(raw))
    if word not in ("bfloat16", "float16", "float32", "auto"):
        allowed = "--dtype takes bfloat16, float16 or float32 for both trainer and sampler"
        state.problem(entry, f"{entry.name}={word} is not offered; {allowed}.")
        return
    # Without --dtype, GPUs compute in bfloat16.
    usual = "bfloat16" if state.machine.gpus else word
    state.demand(
        entry,
        lambda value: word in ("auto", value("model.dtype") or usual),
        f"{entry.name}={word}: trainer, reference and sampler share one precision; --dtype {word}.",
    )


@_register_translation("rollout.multi_turn.enable")
def _require_environment(state: TranslationState, entry: Entry, raw: Any) -> None:
    if read_switch(raw):
        state.demand(
            entry,
            lambda value: any(
                value(f"environment.{name}") for name in ("path", "tools", "mcp", "mcp_config")
            ),
            "rollout.multi_turn.enable: name what the model talks to, with --environment "
            "FILE.py:NAME or --tools FILE.py.",
        )


# Estimators and losses that only verl or its forks have, and what is near to them.
_NOT_OFFERED: Final = {
    "grpo_passk": "", "optimal_token_baseline": "", "tir_optimal_token_baseline": "", "dro": "",
    "bypass_mode": ": set algorithm.rollout_correction.bypass_mode=true",
    "raft": ": near to it is grpo with actor.positive_nll_coef=1",
}  # fmt: skip


@_register_translation("algorithm.adv_estimator actor.policy_loss.loss_mode")
def _translate_method(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Accept estimators and policy losses, also by verl's other names."""
    name = str(raw).strip()
    if name in _NOT_OFFERED:
        choices = ", ".join(table()[entry.name].choices)
        near = _NOT_OFFERED[name]
        text = f"{entry.name}{':' if near else ''} '{name}' is not offered{near}"
        state.problem(entry, f"{text}; there are {choices}.")
        return
    if name == "dr_grpo":  # arXiv 2503.20783: no division by the spread, nor by the length
        plain, summed = "algorithm.norm_adv_by_std_in_grpo", "actor.loss_agg_mode"
        state.put(entry, plain, DerivedValue(lambda value: "false", yields=True))
        state.put(entry, summed, DerivedValue(lambda value: "seq-mean-token-sum-norm", yields=True))
    # The vectorised variant computes the same numbers.
    state.put(entry, entry.name, "grpo" if name in ("dr_grpo", "grpo_vectorized") else raw)


@_register_translation("PART.optim.optimizer_impl")
def _translate_optimizer_package(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Accept the packages with the same optimizers: torch has no 8-bit AdamW."""
    key = entry.name.removesuffix("_impl")
    if raw not in ("torch.optim", "bitsandbytes.optim"):
        allowed = f"{key} takes AdamW (torch.optim) or AdamW8bit (bitsandbytes.optim)"
        state.problem(entry, f"{entry.name}={raw} is not offered; {allowed}.")
        return
    state.demand(
        entry,
        lambda value: raw == "bitsandbytes.optim" or value(key) == "AdamW",
        f"{entry.name}=torch.optim has no AdamW8bit: write bitsandbytes.optim.",
    )


@_register_translation("algorithm.filter_groups.metric")
def _translate_group_metric(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Translate verl's `reward`, its default metric, which includes penalties."""
    # verl's own default is not a choice of the user's.
    is_default = state.verl and (is_unset(raw) or raw == "reward")
    state.put(entry, entry.name, "seq_reward" if is_default else raw)


CORRECTION: Final = "algorithm.rollout_correction"


@_register_translation(f"{CORRECTION}.rollout_is")
def _translate_importance_weights(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Leave weights out in bypass_mode: the ratio of the loss corrects there, as in verl."""
    state.correction["rollout_is"] = raw

    def compute_level(value: Lookup) -> Any:
        # Null is off; in a line of verl, responses of older weights get weights all the same.
        is_open = state.verl and is_unset(raw) and value("trainer.async_steps")
        if value(f"{CORRECTION}.bypass_mode") or is_open:
            return None
        return "off" if is_unset(raw) else raw

    state.put(entry, entry.name, DerivedValue(compute_level))


@_register_translation(f"{CORRECTION}.rollout_is_threshold", null=False)
def _translate_importance_window(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Read `low_high` as the two thresholds of a window."""
    state.correction["rollout_is_threshold"] = raw
    # `0.5_2.0` is a window, a single number its upper end. With reinforce it is a clip range.
    low, window, high = str(raw).partition("_")
    limits = {entry.name: high if window else raw} | (
        {f"{entry.name}_lower": low} if window else {}
    )
    for name, limit in limits.items():
        state.put(entry, name, DerivedValue(partial(_limit_of_weights, state.correction, limit)))


def _limit_of_weights(correction: Mapping[str, Any], limit: Any, value: Lookup) -> Any:
    return None if correction.get("loss_type") == "reinforce" else limit


@_register_translation(f"{CORRECTION}.loss_type", null=False)
def _translate_bypass_loss(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Translate the loss of verl's bypass: ppo_clip is the policy loss, reinforce -w A log p."""
    if raw not in ("ppo_clip", "reinforce"):
        state.problem(entry, f"{entry.name}={raw} is not offered; it takes ppo_clip or reinforce.")
    state.correction["loss_type"] = raw
    if raw != "reinforce":
        return
    settings = ("actor.policy_loss.loss_mode", "actor.clip_ratio_low", "actor.clip_ratio_high")
    for number, name in enumerate(settings):
        late = DerivedValue(partial(_part_of_loss, state.correction, number), wins=True)
        state.put(entry, name, late)
    state.demand(
        entry,
        lambda value: value(f"{CORRECTION}.bypass_mode") is True,
        f"{entry.name}=reinforce is for {CORRECTION}.bypass_mode=true; set that, or leave it out.",
    )


def _part_of_loss(correction: Mapping[str, Any], number: int, value: Lookup) -> Any:
    return _weighted_loss(correction)[number]


def _weighted_loss(correction: Mapping[str, Any]) -> tuple[str, float | None, float | None]:
    """Return the loss with verl's importance weights, and its lower and upper clip range.

    Without weights it is gpg, with truncated ones cispo, which clips above only, and with weights
    that are 0 outside of a window dis. Raises ValueError for weights of sequences.
    """
    level = correction.get("rollout_is")
    if is_unset(level):
        return "gpg", None, None
    if level != "token":
        raise ValueError(f"{CORRECTION}.rollout_is={level} is not offered with reinforce: token.")
    low, window, high = str(correction.get("rollout_is_threshold", 2.0)).partition("_")
    if window:
        return "dis", round(1 - float(low), 9), round(float(high) - 1, 9)
    return "cispo", 1.0, round(float(low) - 1, 9)


@_register_translation("trainer.v1.trainer_mode", null=False)
def _translate_trainer_mode(state: TranslationState, entry: Entry, raw: Any) -> None:
    """Translate sampling on devices of its own, beside training."""
    if raw == "separate_async":
        state.put(entry, "trainer.async_steps", "1")
        state.note(entry, "sampling runs one step ahead (--async_steps); in verl it may be more")
    elif raw != "sync":
        state.problem(
            entry,
            f"{entry.name}={raw} is not offered; it takes sync, or separate_async, which is "
            "--async_steps here.",
        )


@_register_translation("algorithm.kl_ctrl.type")
def _translate_kl_controller(state: TranslationState, entry: Entry, raw: Any) -> None:
    """The adaptive controller multiplies the coefficient: from 0 it stays 0, which is fixed."""
    idle = DerivedValue(lambda value: raw if value("algorithm.kl_ctrl.kl_coef") else "fixed")
    state.put(entry, entry.name, idle if state.verl and raw == "adaptive" else raw)
