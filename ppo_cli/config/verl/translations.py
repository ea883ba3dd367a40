"""Names of verl whose translation is more than another name.

A translation reads one entry and sets settings of ours, records an expectation about the whole
configuration, or reports why the entry is refused. `TranslationState` collects all three.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ppo_cli.algo.estimators import ESTIMATORS
from ppo_cli.config.layers import Entry
from ppo_cli.config.placement import default_gpus, gpu_count, read_placement
from ppo_cli.config.schema.keys import table
from ppo_cli.config.schema.values import NO, YES, is_unset, parse_list, read_switch

Lookup = Callable[[str], Any]  # dotted name -> value of the whole configuration


@dataclass(frozen=True)
class DerivedValue:
    """A raw value that depends on other settings; computed once all layers are translated.

    One that `yields` gives way to a plain value for the same setting in the same layer.
    """

    compute: Callable[[Lookup], Any]
    yields: bool = False


@dataclass(frozen=True)
class Expectation:
    """Something that must hold for the whole configuration, because an entry demands it."""

    origin: str
    holds: Callable[[Lookup], bool]
    otherwise: str


def normalize(raw: Any) -> str:
    """Return a value in one spelling: 1e-3 and 0.001 are the same, as are None and nothing."""
    text = re.sub(r"[\s'\"]", "", str(raw)).lower()
    if text in ("", "none", "[]", "{}"):
        return "null"
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def _tighter_limit(first: DerivedValue, second: DerivedValue) -> DerivedValue:
    """Of two limits on one thing the tighter one holds; an unset one is no limit."""

    def tighter(value: Lookup) -> Any:
        limits = [late.compute(value) for late in (first, second)]
        return min((limit for limit in limits if limit is not None), default=None)

    return DerivedValue(tighter)


class TranslationState:
    """What the layers that were read so far have come to; remembers what spans several."""

    def __init__(
        self,
        environ: Mapping[str, str],
        problems: list[str],
        notes: list[str],
        verl: bool = False,
    ) -> None:
        self.environ, self.verl = environ, verl
        self.problems, self.notes = problems, notes
        self.expectations: list[Expectation] = []
        self.resume_path: str | None = None
        self.resume_by_path = False
        self.overlong_on = False
        self.function: dict[str, Entry] = {}  # of a layer: path and name of a reward function
        self.dynamic: dict[str, bool] = {}  # by model, whether token budgets cut micro-batches
        self.sized: dict[str, Entry] = {}  # by model, what sets the size of a micro-batch
        self._refused: dict[tuple[str, str], list[str]] = {}
        self._remarks: dict[tuple[str, str], list[str]] = {}
        self._on: set[str] = {""}  # switches of verl's that a layer turned on
        self.entry_name = ""
        self._settings: dict[str, tuple[str, Entry]] = {}

    def put(self, entry: Entry, name: str, raw: Any) -> None:
        """Set one of our settings; two names for it in one layer must agree."""
        new = Entry(name, raw, entry.origin)
        earlier_name, old = self._settings.pop(name, (self.entry_name, new))
        if earlier_name != self.entry_name:
            if isinstance(raw, DerivedValue) and isinstance(old.raw, DerivedValue):
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
        """Remark on a key that was taken; keys with one remark are told in one sentence."""
        self._remarks.setdefault((entry.origin, remark), []).append(entry.name)

    def note(self, entry: Entry, text: str) -> None:
        """Remark on an entry that was taken."""
        self.notes.append(f"{entry.origin}: {entry.name}: {text}.")

    def demand(self, entry: Entry, holds: Callable[[Lookup], bool], otherwise: str) -> None:
        """Ask for something that can be seen only when all settings are known."""
        self.expectations.append(Expectation(entry.origin, holds, otherwise))


BUDGET: Final = "ref.log_prob_max_token_len_per_gpu"
PRECISIONS: Final = {"bf16": "bfloat16", "fp32": "float32", "float": "float32"}
TRANSLATIONS: Final[
    dict[str, Callable[[TranslationState, Entry], None]]
] = {}  # by name, without the wrapper
Translation = Callable[[TranslationState, Entry, Any], None]


def _count(raw: Any) -> int:
    try:
        number = int(str(raw))
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"'{raw}' is not a whole number of 1 or more")
    return number


def _translates(
    names: str, read: Callable[[Any], Any] = lambda raw: raw, *, null: bool = True
) -> Callable[[Translation], Translation]:
    """Declare what turns settings of these names; PART stands for actor and critic.

    The turn is given what `read` makes of the raw value; its ValueError is a problem of the entry.
    Without `null` a null asks for nothing.
    """

    def declare(turn: Translation) -> Translation:
        def take(reading: TranslationState, entry: Entry) -> None:
            if is_unset(entry.raw) and not null:
                return
            try:
                value = read(entry.raw)
            except ValueError as error:
                reading.problem(entry, f"{entry.name}: {error}.")
            else:
                turn(reading, entry, value)

        for name in names.split():
            for part in ("actor", "critic") if "PART" in name else ("",):
                TRANSLATIONS[name.replace("PART", part)] = take
        return turn

    return declare


def _rename_values(names: str, values: Mapping[str, Any], target: str = "") -> None:
    """Declare names of `own`, or of the same setting here, with other words for some values."""

    @_translates(names)
    def put(reading: TranslationState, entry: Entry, raw: Any) -> None:
        word = "null" if is_unset(raw) else str(raw).strip().lower()
        reading.put(entry, target or entry.name, values.get(word, raw))


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


@_translates("PART.use_dynamic_bsz training.use_dynamic_batchsize", read_switch)
def _dynamic(reading: TranslationState, entry: Entry, on: bool) -> None:
    """Token budgets are what a micro-batch is cut by, unless its size is set."""
    named = entry.name.partition(".")[0]
    for part in ("actor", "critic") if named == "training" else (named,):
        reading.dynamic[part] = on
        size = f"{part}.ppo_micro_batch_size_per_gpu"
        if on:
            reading.put(entry, size, DerivedValue(lambda value: None))
        else:
            problem = f"without dynamic batches set the size of a micro-batch: {size}=4."
            reading.demand(entry, partial(_is_set, size), problem)


def _is_set(name: str, value: Lookup) -> bool:
    return value(name) is not None


@_translates("PART.ppo_micro_batch_size_per_gpu")
def _micro(reading: TranslationState, entry: Entry, raw: Any) -> None:
    """Take the size of a micro-batch; with token budgets it does not count, as in verl."""
    part = entry.name.partition(".")[0]
    reading.put(
        entry, entry.name, DerivedValue(lambda value: None if reading.dynamic.get(part) else raw)
    )
    reading.sized[part] = entry


@_translates("PART.ppo_micro_batch_size", _count, null=False)
def _global_micro(reading: TranslationState, entry: Entry, total: int) -> None:
    """Share the deprecated size over all ranks, as verl did."""
    part = entry.name.partition(".")[0]
    target = f"{part}.ppo_micro_batch_size_per_gpu"

    def per_gpu(value: Lookup) -> int | None:
        if reading.dynamic.get(part):
            return None
        ranks = _ranks(value, reading.environ)
        if total % ranks:
            raise ValueError(
                f"{entry.name} {total} is not divisible by {ranks} ranks; set {target} instead."
            )
        return total // ranks

    reading.put(entry, target, DerivedValue(per_gpu))


def _budget_of(part: str) -> str:
    return "reward.model.batch_tokens" if part == "reward_model" else BUDGET


@_translates(
    "rollout.log_prob_max_token_len_per_gpu ref.log_prob_max_token_len_per_gpu "
    "critic.forward_max_token_len_per_gpu reward_model.forward_max_token_len_per_gpu",
    _count, null=False,
)  # fmt: skip
def _tokens(reading: TranslationState, entry: Entry, count: int) -> None:
    """A token budget: of several the smallest holds."""
    reading.put(entry, _budget_of(entry.name.partition(".")[0]), DerivedValue(lambda value: count))


@_translates(
    "rollout.log_prob_micro_batch_size_per_gpu rollout.log_prob_micro_batch_size "
    "ref.log_prob_micro_batch_size_per_gpu ref.log_prob_micro_batch_size "
    "critic.forward_micro_batch_size_per_gpu critic.forward_micro_batch_size "
    "reward_model.micro_batch_size_per_gpu reward_model.micro_batch_size",
    _count, null=False,
)  # fmt: skip
def _rows(reading: TranslationState, entry: Entry, count: int) -> None:
    """A count of sequences becomes the token budget that as many of the longest need.

    With token budgets it does not count, as in verl.
    """
    part, shared = entry.name.partition(".")[0], not entry.name.endswith("_per_gpu")
    target = _budget_of(part)

    def budget(value: Lookup) -> int | None:
        if target == BUDGET and reading.dynamic.get("critic" if part == "critic" else "actor"):
            return None
        longest = value("data.max_prompt_length") + value("data.max_response_length")
        if target != BUDGET:
            longest = value("reward.model.max_length") or longest
        rows = max(1, count // _ranks(value, reading.environ)) if shared else count
        return rows * int(longest)

    if target == BUDGET:
        reading.note(
            entry,
            f"it sets {BUDGET} here, to the tokens of {entry.raw} of the longest sequences"
            f"{' over all ranks' if shared else ''}; of several such sizes the smallest holds",
        )
    reading.put(entry, target, DerivedValue(budget))


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
            a_node = default_gpus(gpu_count(environ), *(int(value(span)) for span in spans))
        ranks = max(1, int(a_node)) * int(value("trainer.nnodes"))
    return max(1, ranks // int(value("trainer.tensor_parallel_size")))


@_translates("distributed.data_parallel_size", _count)
def _data_parallel(reading: TranslationState, entry: Entry, size: int) -> None:
    """The ranks that share the rows; times those that split each layer, all that train.

    They are GPUs where some are visible or asked for, else worker processes.
    """
    on_gpus = gpu_count(reading.environ) > 0

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

    key = f"trainer.{'n_gpus_per_node' if on_gpus else 'num_workers'}"
    reading.put(entry, key, DerivedValue(devices, yields=True))
    reading.demand(
        entry,
        fits,
        f"{entry.name} {entry.raw} times trainer.tensor_parallel_size is not the number of "
        "devices of the run; leave it out, or change --n_gpus (without GPUs --num_workers).",
    )


@_translates("rollout.val_kwargs.do_sample", read_switch)
def _greedy_validation(reading: TranslationState, entry: Entry, on: bool) -> None:
    if not on:
        reading.put(entry, "rollout.val_kwargs.temperature", "0")
        return
    reading.demand(
        entry,
        lambda value: value("rollout.val_kwargs.temperature") > 0,
        "sampled validation needs a temperature: rollout.val_kwargs.temperature=0.7.",
    )


@_translates("trainer.logger", parse_list)
def _logger(reading: TranslationState, entry: Entry, loggers: list[Any]) -> None:
    """Drop `file`: metrics.jsonl is always written."""
    reading.put(entry, entry.name, [word for word in loggers if word != "file"])


@_translates("trainer.resume_mode")
def _resume_mode(reading: TranslationState, entry: Entry, raw: Any) -> None:
    word = str(raw).strip()
    if word == "resume_path":
        reading.resume_by_path = True

        def path(value: Lookup) -> str:
            if reading.resume_path is None:
                raise ValueError("name the checkpoint as well: --resume PATH.")
            return reading.resume_path

        raw = DerivedValue(path)
    reading.put(entry, entry.name, "never" if word == "disable" else raw)


@_translates("trainer.resume_from_path", null=False)
def _resume_from(reading: TranslationState, entry: Entry, raw: Any) -> None:
    if str(raw).strip().lower() == "false":
        return
    reading.resume_path = str(raw)
    reading.demand(
        entry,
        lambda value: reading.verl or reading.resume_by_path,
        "a checkpoint to go on from is taken with trainer.resume_mode=resume_path, or simply "
        f"--resume {raw}.",
    )


@_translates("reward_model.enable reward.reward_model.enable", read_switch, null=False)
def _reward_model_on(reading: TranslationState, entry: Entry, on: bool) -> None:
    reading.demand(
        entry,
        lambda value: (value("reward.model.path") is not None) == on,
        "a reward model is on, but none is named: --reward_model PATH."
        if on
        else "the reward model is off, but reward.model.path names one; leave one of them out.",
    )


@_translates("critic.enable", read_switch, null=False)
def _critic_on(reading: TranslationState, entry: Entry, on: bool) -> None:
    """A critic is trained exactly when the estimator is gae."""
    reading.demand(
        entry,
        lambda value: on == ESTIMATORS[value("algorithm.adv_estimator")].critic,
        f"critic.enable={entry.raw} goes against algorithm.adv_estimator: only gae trains a "
        "critic, and always does. Leave critic.enable out and choose with --adv_estimator.",
    )


@_translates("reward_model.reward_manager reward.reward_manager reward.reward_manager.name")
def _reward_manager(reading: TranslationState, entry: Entry, raw: Any) -> None:
    name = str(raw).strip()
    if name == "dapo":
        reading.note(entry, "the over-long penalty of dapo is reward.shaping.overlong_buffer")
    elif name not in ("naive", "gdpo", "None", "null"):
        reading.problem(
            entry,
            f"the reward manager '{raw}' is not offered. Rules are chosen by data_source "
            "(naive); --reward_function FILE takes one of your own, --rm_max_rpm limits a judge.",
        )


# DAPO's settings of the over-long penalty stand in groups of several names.
_OVERLONG = (
    "reward_model.overlong_buffer.{0} reward_model.reward_kwargs.overlong_buffer_cfg.{0} "
    "reward.overlong_buffer.{0} reward.reward_kwargs.overlong_buffer_cfg.{0}"
)


@_translates(_OVERLONG.format("enable"), read_switch)
def _overlong_on(reading: TranslationState, entry: Entry, on: bool) -> None:
    reading.overlong_on = on
    reading.demand(
        entry,
        lambda value: not on or value("reward.shaping.overlong_buffer") is not None,
        "the over-long penalty is on without the length of its buffer: set "
        f"{entry.name.removesuffix('enable')}len=64, or --overlong_buffer 64.",
    )


@_translates(_OVERLONG.format("len"))
def _overlong_buffer(reading: TranslationState, entry: Entry, raw: Any) -> None:
    """The length of the buffer counts once the penalty is switched on, wherever that is said."""
    late = DerivedValue(lambda value: raw if reading.overlong_on else None)
    reading.put(entry, "reward.shaping.overlong_buffer", late)


@_translates(_OVERLONG.format("penalty_factor"))
def _overlong_penalty(reading: TranslationState, entry: Entry, raw: Any) -> None:
    key = "reward.shaping.overlong_penalty"
    late = DerivedValue(lambda value: raw if reading.overlong_on else table()[key].default)
    reading.put(entry, key, late)


@_translates(
    "custom_reward_function.path reward.custom_reward_function.path "
    "custom_reward_function.name reward.custom_reward_function.name",
    null=False,
)
def _function(reading: TranslationState, entry: Entry, raw: Any) -> None:
    reading.function[entry.name.rpartition(".")[2]] = entry


@_translates(
    "PART.checkpoint.contents PART.checkpoint.save_contents PART.checkpoint.load_contents",
    parse_list,
)
def _saved(reading: TranslationState, entry: Entry, contents: list[Any]) -> None:
    if not {"model", "optimizer", "extra"} <= set(map(str, contents)):
        remark = "a checkpoint always holds model (as a Hugging Face folder), optimizer and extra"
        reading.note(entry, remark)


@_translates("trainer.device")
def _device(reading: TranslationState, entry: Entry, raw: Any) -> None:
    device = "cuda" if gpu_count(reading.environ) else "cpu"
    if str(raw).strip() != device:
        reading.problem(
            entry,
            f"trainer.device is '{raw}', but a run finds its device by itself, an NVIDIA GPU or "
            f"the CPU, and here that is {device} (CUDA_VISIBLE_DEVICES= hides GPUs); leave it out.",
        )


@_translates("trainer.critic_warmup")
def _critic_warmup(reading: TranslationState, entry: Entry, raw: Any) -> None:
    """verl counts steps from 1 and trains the actor from step N on: N-1 steps are the critic's."""
    if reading.verl and str(raw).strip().isdigit() and int(raw) > 0:
        reading.note(entry, f"the actor trains from step {raw} on, as in verl")
        raw = int(raw) - 1
    reading.put(entry, entry.name, raw)


@_translates(
    "model.use_remove_padding actor.use_remove_padding critic.model.use_remove_padding", read_switch
)
def _packing(reading: TranslationState, entry: Entry, on: bool) -> None:
    """Rows are packed where all models that say something ask for it."""
    reading.put(entry, "model.packing", DerivedValue(lambda value: on))


@_translates("trainer.save_freq trainer.test_freq")
def _frequency(reading: TranslationState, entry: Entry, raw: Any) -> None:
    """Read `False`, and verl's 0, as never."""
    off = ("false", "null", "none", *(("0",) if reading.verl else ()))
    never = str(raw).strip().lower() in off
    reading.put(entry, entry.name, "-1" if never else raw)


@_translates("model.lora_alpha critic.model.lora_alpha")
def _lora_alpha(reading: TranslationState, entry: Entry, raw: Any) -> None:
    """Read verl's `lora_alpha=0` beside `lora_rank=0` as LoRA left out."""
    off = reading.verl and str(raw).strip() in ("0", "0.0")
    usual = table()[entry.name].default
    rank = entry.name.replace("alpha", "rank")
    late = DerivedValue(lambda value: raw if int(value(rank)) else usual)
    reading.put(entry, entry.name, late if off else raw)


@_translates("model.exclude_modules critic.model.exclude_modules", null=False)
def _exclude_modules(reading: TranslationState, entry: Entry, raw: Any) -> None:
    model = entry.name.removesuffix("exclude_modules")
    reading.demand(
        entry,
        lambda value: value(f"{model}lora_rank") == 0,
        f"{entry.name} is not offered; name what LoRA adapts in {model}target_modules.",
    )


@_translates("rollout.max_model_len rollout.engine_kwargs.vllm.max_model_len", _count, null=False)
def _sampler_length(reading: TranslationState, entry: Entry, length: int) -> None:
    """The sampler takes the longest prompt and response; verl may leave it more room."""
    reading.demand(
        entry,
        lambda value: length >= value("data.max_prompt_length") + value("data.max_response_length"),
        f"{entry.name} {length} is less than data.max_prompt_length and data.max_response_length "
        "together; lower one of these.",
    )


@_translates(
    "rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache "
    "rollout.engine_kwargs.vllm.mm_processor_cache_gb"
)
def _text_only(reading: TranslationState, entry: Entry, raw: Any) -> None:
    reading.tell(entry, "models here read text only, so it changes nothing")


@_translates("rollout.dtype ref.fsdp_config.dtype")
def _same_dtype(reading: TranslationState, entry: Entry, raw: Any) -> None:
    """Trainer, reference and sampler compute alike: in bfloat16, without a GPU in float32."""
    word = PRECISIONS.get(str(raw), str(raw))
    if word not in ("bfloat16", "float32", "auto"):
        allowed = "--dtype takes bfloat16 or float32 for both trainer and sampler"
        reading.problem(entry, f"{entry.name}={word} is not offered; {allowed}.")
        return
    usual = "bfloat16" if gpu_count(reading.environ) else word
    reading.demand(
        entry,
        lambda value: word in ("auto", value("model.dtype") or usual),
        f"{entry.name}={word}: trainer, reference and sampler compute alike; set --dtype {word}.",
    )


# Estimators and losses of verl that are not ours: refused without a guess.
_VERLS_OWN: Final = (
    "grpo_passk", "optimal_token_baseline", "tir_optimal_token_baseline",
    "sapo", "dppo_tv", "dppo_kl", "dro", "bypass_mode",
)  # fmt: skip


@_translates("algorithm.adv_estimator actor.policy_loss.loss_mode")
def _method(reading: TranslationState, entry: Entry, raw: Any) -> None:
    """Take estimators and policy losses, by verl's other names too."""
    name = str(raw).strip()
    if name in _VERLS_OWN:
        choices = ", ".join(table()[entry.name].choices)
        reading.problem(entry, f"{entry.name} '{name}' is not offered; there are {choices}.")
        return
    if name == "dr_grpo":  # arXiv 2503.20783: no division by the spread, nor by the length
        plain, summed = "algorithm.norm_adv_by_std_in_grpo", "actor.loss_agg_mode"
        reading.put(entry, plain, DerivedValue(lambda value: "false", yields=True))
        reading.put(
            entry, summed, DerivedValue(lambda value: "seq-mean-token-sum-norm", yields=True)
        )
    reading.put(entry, entry.name, "grpo" if name in ("dr_grpo", "grpo_vectorized") else raw)


@_translates("PART.optim.optimizer_impl")
def _optimizer_package(reading: TranslationState, entry: Entry, raw: Any) -> None:
    """Take the packages that compute what is computed here: torch has no 8-bit AdamW."""
    key = entry.name.removesuffix("_impl")
    if raw not in ("torch.optim", "bitsandbytes.optim"):
        allowed = f"{key} takes AdamW (torch.optim) or AdamW8bit (bitsandbytes.optim)"
        reading.problem(entry, f"{entry.name}={raw} is not offered; {allowed}.")
        return
    reading.demand(
        entry,
        lambda value: raw == "bitsandbytes.optim" or value(key) == "AdamW",
        f"{entry.name}=torch.optim has no AdamW8bit: write bitsandbytes.optim.",
    )


@_translates("algorithm.filter_groups.metric")
def _group_metric(reading: TranslationState, entry: Entry, raw: Any) -> None:
    """verl's `reward`, which it takes where none is named, has the penalties in it."""
    is_default = reading.verl and (is_unset(raw) or raw == "reward")
    reading.put(entry, entry.name, "seq_reward" if is_default else raw)


@_translates("algorithm.rollout_correction.rollout_is_threshold", null=False)
def _window(reading: TranslationState, entry: Entry, raw: Any) -> None:
    low, window, high = str(raw).partition("_")
    reading.put(entry, entry.name, high if window else raw)
    if window:
        reading.put(entry, f"{entry.name}_lower", low)
