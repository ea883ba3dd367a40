"""Translate a config to overrides of verl's main_ppo, with every value written out.

Names come from config/verl/verl.toml, the table that translates verl's command lines, read in
the other direction as far as verl 0.9.1 has the names. `WRITERS` holds the settings that differ by
more than their name, `REFUSED` those that verl does not have, and `OUR_ENGINE_ONLY` those that only
concern our engine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any, Final

from ppo_cli.algo.estimators import ESTIMATORS
from ppo_cli.config.mixture import judges_of, mixture_of, models_of
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.known_models import is_url
from ppo_cli.config.schema.algorithm import Actor, Algorithm, Critic, Ref
from ppo_cli.config.schema.keys import find_key, offered_choices, table, value_of
from ppo_cli.config.schema.reward import Reward
from ppo_cli.config.schema.run import Config, Data, Model, Rollout, Trainer
from ppo_cli.config.settle import settle
from ppo_cli.extras.migrate.verl.translations import TRANSLATIONS
from ppo_cli.extras.migrate.verl.translator import WRAPPER, foreign_names, read_verl_defaults
from ppo_cli.machine.machine import Machine
from ppo_cli.paths import user_path
from ppo_cli.planning.memory.plan import fit_memory

VERSION: Final = "0.9.1"
NEVER: Final = 1_000_000_000  # a step interval longer than any run
NO_LIMIT: Final = 1e9  # for limits that we can turn off and verl cannot
TRAIN, VAL = "data/train.parquet", "data/val.parquet"
Values = dict[str, Any]
# Engines of verl besides FSDP, which appear as groups in the names of its settings.
GROUPS: Final = ("megatron", "veomni", "torchtitan", "automodel", "mindspeed")


@cache
def verl_names() -> frozenset[str]:
    """Return the full names of verl 0.9.1's settings that have a value."""
    names: set[str] = set()
    # Each version lists the settings that it adds and drops; `main` is not released.
    for version, row in read_verl_defaults()["versions"].items():
        if version != "main":
            names = (names | row["set"].keys()) - set(row["gone"])
    return frozenset(names)


@cache
def verl_names_by_key() -> dict[str, tuple[str, ...]]:
    """Return verl's names for each of our settings; an empty tuple where verl 0.9.1 has none."""
    names = foreign_names()
    names_by_key: dict[str, list[str]] = {}
    for key in table():
        # All names that verl's configs use for this key: the same one, tied ones and renamed ones.
        olds = [key, *(old for old, target in names.tied.items() if target == key)]
        for old, news in names.renamed.items():
            if key in news:
                olds.append(old)
            groups = [new[:-1] for new in news if new.endswith(".*") and key.startswith(new[:-1])]
            olds += [old[:-1] + key.removeprefix(group) for group in groups]
        # Names with and without the wrapper; only those that verl 0.9.1 has count.
        verl = [name for old in olds for name in (WRAPPER + old, old) if name in verl_names()]
        names_by_key[key] = [
            name for name in dict.fromkeys(verl) if not name.endswith("warmup_style")
        ]
    return {key: tuple(verl) for key, verl in names_by_key.items()}


# Our setting -> the function that writes it for verl, if more than the name differs. Its
# parameters are the sections of the settings that it reads.
Writer = Callable[..., Values]
WRITERS: Final[dict[str, Writer]] = {}


def _register_writer(names: str) -> Callable[[Writer], Writer]:
    """Decorator: register a function in WRITERS for the settings in `names`."""

    def declare(write: Writer) -> Writer:
        WRITERS.update(dict.fromkeys(names.split(), write))
        return write

    return declare


def _repeat_sharding(part: str, value: Any) -> Values:
    """Return the same sharding setting for actor, critic and reference."""
    return {
        f"actor_rollout_ref.actor.fsdp_config.{part}": value,
        f"actor_rollout_ref.ref.fsdp_config.{part}": value,
        f"critic.fsdp.{part}": value,
    }


@_register_writer("model.path critic.model.path")
def _write_models(model: Model, critic: Critic) -> Values:
    """Write models as absolute paths; all use the actor's tokenizer."""
    path = _resolve_model_path(model.path)
    return {
        "actor_rollout_ref.model.path": path,
        "actor_rollout_ref.model.tokenizer_path": path,
        "critic.model.path": _resolve_model_path(critic.model.path),
        "critic.model.tokenizer_path": path,
        "data.tokenizer": path,
    }


def _resolve_model_path(path: str) -> str:
    """Return a model's folder as an absolute path, and a hub name unchanged."""
    folder = user_path(model_folder(path))
    return str(folder.resolve()) if folder.is_dir() else path


@_register_writer("model.dtype")
def _write_precision(model: Model) -> Values:
    """Compute in the configured precision, keep weights in float32. verl only runs on GPUs."""
    dtype = model.dtype or "bfloat16"
    computed = {"param_dtype": dtype, "reduce_dtype": "float32", "buffer_dtype": "float32"}
    return (
        _repeat_sharding("dtype", dtype)
        | _repeat_sharding("model_dtype", "float32")
        # The engine uses this group; verl's files omit it, and its default is bf16.
        | {
            name: value
            for part, precision in computed.items()
            for name, value in _repeat_sharding(f"mixed_precision.{part}", precision).items()
        }
        | {"actor_rollout_ref.rollout.dtype": dtype}
    )


@_register_writer("model.attn_implementation model.packing")
def _write_attention(model: Model) -> Values:
    """Write the attention kernel; rows are packed if set, by default with flash attention."""
    kernel = model.attn_implementation or "sdpa"
    packed = model.packing
    packed = kernel == "flash_attention_2" if packed is None else packed
    return {
        f"{at}.{name}": value
        for at in ("actor_rollout_ref.model", "critic.model")
        for name, value in (
            ("override_config.attn_implementation", kernel),
            ("use_remove_padding", packed),
        )
    }


@_register_writer("model.enable_gradient_checkpointing critic.model.enable_gradient_checkpointing")
def _write_checkpointing(model: Model, critic: Critic) -> Values:
    """Write gradient checkpointing; the actor's is on when unset, the critic's as the actor's."""
    actors = model.enable_gradient_checkpointing
    # Unset means that our engine decides by memory; verl needs a value.
    critics = critic.model.enable_gradient_checkpointing
    actors = True if actors is None else actors
    return {
        "actor_rollout_ref.model.enable_gradient_checkpointing": actors,
        "critic.model.enable_gradient_checkpointing": actors if critics is None else critics,
    }


@_register_writer(
    "actor.ppo_micro_batch_size_per_gpu critic.ppo_micro_batch_size_per_gpu "
    "actor.ppo_max_token_len_per_gpu critic.ppo_max_token_len_per_gpu "
    "ref.log_prob_max_token_len_per_gpu"
)
def _write_micro_batches(actor: Actor, critic: Critic, ref: Ref) -> Values:
    """Micro-batches by tokens if no size is set, else by size; log-probs always by tokens.

    verl requires a size for log-probs if the actor has one, although it does not use it.
    """
    values: Values = {}
    for name, part in (("actor_rollout_ref.actor", actor), ("critic", critic)):
        size = part.ppo_micro_batch_size_per_gpu
        values[f"{name}.ppo_micro_batch_size_per_gpu"] = size
        values[f"{name}.use_dynamic_bsz"] = size is None
        budget = part.ppo_max_token_len_per_gpu
        values[f"{name}.ppo_max_token_len_per_gpu"] = budget
    size = actor.ppo_micro_batch_size_per_gpu
    budget = ref.log_prob_max_token_len_per_gpu
    for name in ("actor_rollout_ref.ref", "actor_rollout_ref.rollout"):
        values[f"{name}.log_prob_use_dynamic_bsz"] = True
        values[f"{name}.log_prob_micro_batch_size_per_gpu"] = size
        values[f"{name}.log_prob_max_token_len_per_gpu"] = budget
    values["critic.forward_max_token_len_per_gpu"] = budget
    return values


@_register_writer(
    "actor.clip_ratio actor.clip_ratio_low actor.clip_ratio_high actor.clip_ratio_c "
    "critic.cliprange_value"
)
def _write_clip_ratios(actor: Actor, critic: Critic) -> Values:
    """Write both clip ranges, the dual-clip bound and the clip of values."""
    at = "actor_rollout_ref.actor"
    bound, reach = actor.clip_ratio_c, critic.cliprange_value
    # verl always applies the dual clip, so "none" becomes a bound that is never reached.
    return {
        f"{at}.clip_ratio": actor.clip_ratio,
        f"{at}.clip_ratio_low": actor.clip_ratio_low,
        f"{at}.clip_ratio_high": actor.clip_ratio_high,
        f"{at}.clip_ratio_c": NO_LIMIT if bound is None else bound,
        "critic.cliprange_value": NO_LIMIT if reach is None else reach,
    }


@_register_writer("model.lora_rank model.lora_alpha critic.model.lora_alpha")
def _write_lora(model: Model, critic: Critic) -> Values:
    """With LoRA the sampler loads the base weights; otherwise the trainer sends all weights."""
    rank = model.lora_rank
    return {
        "actor_rollout_ref.model.lora_rank": rank,
        "actor_rollout_ref.model.lora_alpha": _as_whole_number(model.lora_alpha),
        "actor_rollout_ref.rollout.load_format": "safetensors" if rank else "dummy",
        "critic.model.lora_alpha": _as_whole_number(critic.model.lora_alpha),
    }


@_register_writer(
    "actor.optim.optimizer critic.optim.optimizer actor.optim.eps critic.optim.eps "
    "actor.grad_clip critic.grad_clip actor.loss_scale_factor critic.loss_scale_factor"
)
def _write_optimizers(actor: Actor, critic: Critic) -> Values:
    """Write each optimizer's package and epsilon, the gradient clipping and the loss scale."""
    # The package in which verl finds each of our optimizers.
    impl = {"AdamW": "torch.optim", "AdamW8bit": "bitsandbytes.optim"}
    values: Values = {}
    for name, part in (("actor_rollout_ref.actor", actor), ("critic", critic)):
        values[f"{name}.optim.optimizer_impl"] = impl[part.optim.optimizer]
        values[f"{name}.optim.override_optimizer_config.eps"] = part.optim.eps
        values[f"{name}.grad_clip"] = values[f"{name}.optim.clip_grad"] = part.grad_clip or NO_LIMIT
        values[f"{name}.loss_scale_factor"] = _as_whole_number(part.loss_scale_factor)
    return values


@_register_writer(
    "data.val_files data.val_max_samples trainer.save_freq trainer.test_freq "
    "trainer.val_before_train"
)
def _write_validation(trainer: Trainer, data: Data) -> Values:
    """Translate "only at the end", 0 and save_freq's -1, for which verl has no number."""
    often, has_files = trainer.test_freq, bool(data.val_files)
    save = trainer.save_freq
    return {
        "trainer.test_freq": (often or NEVER) if has_files else -1,
        "trainer.val_before_train": trainer.val_before_train and has_files,
        "trainer.save_freq": NEVER if save == -1 else save,
        # verl requires validation rows even if it never validates
        "data.val_files": VAL if has_files else TRAIN,
        "data.val_max_samples": -1 if has_files else 1,
    }


@_register_writer("trainer.resume_mode")
def _write_resume(trainer: Trainer) -> Values:
    """Write the resume mode; a path becomes resume_path with the checkpoint."""
    mode = trainer.resume_mode
    # A path that is neither word is a checkpoint to resume from.
    word = {"auto": "auto", "never": "disable"}.get(mode, "resume_path")
    path = str(user_path(mode).resolve()) if word == "resume_path" else None
    return {"trainer.resume_mode": word, "trainer.resume_from_path": path}


@_register_writer(
    "algorithm.filter_groups.metric algorithm.gdpo_reward_keys algorithm.gdpo_reward_weights "
    "algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_is_threshold "
    "algorithm.rollout_correction.rollout_is_threshold_lower "
    "algorithm.rollout_correction.bypass_mode"
)
def _write_algorithm(algorithm: Algorithm, actor: Actor) -> Values:
    """verl's `reward` includes penalties; its `score` is the reward function's value."""
    correction = algorithm.rollout_correction
    metric = algorithm.filter_groups.metric or "score"
    low, high = correction.rollout_is_threshold_lower, correction.rollout_is_threshold
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    parts = {"gdpo_reward_keys": keys, "gdpo_reward_weights": weights}
    # verl has the loss dis as reinforce with weights that are 0 outside of a window.
    bypass: Values = {}
    if actor.policy_loss.loss_mode == "dis" and correction.bypass_mode:
        low, high = 1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high
        bypass = {
            "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
            "algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.loss_type": "reinforce",
        }
    return {
        "algorithm.filter_groups.metric": "reward" if metric == "seq_reward" else metric,
        "algorithm.rollout_correction.rollout_is": (
            None if correction.rollout_is == "off" else correction.rollout_is
        ),
        "algorithm.rollout_correction.rollout_is_threshold": (
            high if low is None else f"{round(low, 9)}_{round(high, 9)}"
        ),
        "algorithm.rollout_correction.bypass_mode": bool(correction.bypass_mode),
        **bypass,
        **{f"algorithm.{name}": list(value) for name, value in parts.items() if value},
    }


@_register_writer("reward.shaping.overlong_buffer reward.shaping.overlong_penalty")
def _write_overlong(reward: Reward, data: Data) -> Values:
    """Write the penalty of long responses: verl's dapo manager, which counts tokens.

    Without the penalty, the manager is `naive` and nothing else is written.
    """
    shaping = reward.shaping
    if shaping.overlong_buffer is None:
        return {"reward.reward_manager.name": "naive"}
    below = "reward.reward_kwargs.overlong_buffer_cfg"
    return {
        "reward.reward_manager.name": "dapo",
        f"{below}.enable": True,
        f"{below}.len": shaping.overlong_buffer,
        f"{below}.penalty_factor": shaping.overlong_penalty,
        f"{below}.log": False,
        "reward.reward_kwargs.max_resp_len": data.max_response_length,
    }


def _as_whole_number(number: float | None) -> float | None:
    """Return an integral float as int, as verl expects integers."""
    return int(number) if number is not None and float(number).is_integer() else number


@_register_writer(
    "data.train_files data.train_max_samples data.prompt_key data.answer_key data.reward_fn_key "
    "rollout.name rollout.seed rollout.val_kwargs.temperature critic.ppo_mini_batch_size "
    "trainer.logger "
    "trainer.critic_warmup trainer.output_dir "
    "data.apply_chat_template_kwargs rollout.engine_kwargs.vllm"
)
def _write_others(rollout: Rollout, data: Data, trainer: Trainer, critic: Critic) -> Values:
    """One-line translations: files, columns, filled-in defaults, and free-form groups."""
    sampler, temperature = "actor_rollout_ref.rollout", rollout.val_kwargs.temperature
    template, vllm = data.apply_chat_template_kwargs, rollout.engine_kwargs.vllm
    warmup = trainer.critic_warmup
    return {
        "data.train_files": TRAIN,
        "data.train_max_samples": -1,
        "data.prompt_key": "prompt",
        "data.reward_fn_key": "data_source",
        f"{sampler}.name": rollout.name,
        f"{sampler}.seed": rollout.seed,
        f"{sampler}.val_kwargs.temperature": temperature,
        f"{sampler}.val_kwargs.do_sample": temperature > 0,
        "critic.ppo_mini_batch_size": critic.ppo_mini_batch_size,
        # verl's actor starts training at step N, counted from 1.
        "trainer.critic_warmup": warmup + 1 if warmup else 0,
        "trainer.default_local_dir": "verl/checkpoints",
        "trainer.logger": ["file", *trainer.logger],
        **{f"data.apply_chat_template_kwargs.{name}": value for name, value in template.items()},
        **{f"{sampler}.engine_kwargs.vllm.{name}": value for name, value in vllm.items()},
    }


# verl's settings that the bridge always needs.
ALWAYS: Final[Values] = {
    "trainer.rollout_data_dir": "verl/rollouts",
    "reward.custom_reward_function.path": "reward.py",
    "reward.custom_reward_function.name": "compute_score",
    "reward.reward_model.enable": False,
}
# Settings above with a file in the folder as their value.
FILES: Final = frozenset(
    {"data.train_files", "data.val_files", "trainer.default_local_dir", "trainer.rollout_data_dir",
     "reward.custom_reward_function.path"}
)  # fmt: skip
# Settings that only concern our engine: verl works differently with the same results.
OUR_ENGINE_ONLY: Final = frozenset(
    f"{group}.{name}"
    for group, names in {
        "model": "compile_layers float32_matmul share_prompts spread_weights",
        "rollout": "num_samplers sleep weight_transfer",
        "data": "system_prompt",  # is in the rows of the folder
        "environment": "kwargs python num_workers timeout max_reply_chars max_turns "
        "max_turn_tokens history gamma_turn seed_per isolation memory_gb max_starts mcp_scope",
        "trainer": "engine node_rank master_addr master_port threads max_restarts worker_timeout "
        "node_timeout max_nonfinite_steps token_details",
    }.items()
    for name in names.split()
)
EPISODES = "episodes are played here only; verl's own tools are set with rollout.multi_turn"
# Settings that verl does not have: (allowed value, why or what to do instead).
REFUSED: Final[dict[str, tuple[Any, str]]] = {
    "environment.path": (None, EPISODES),
    "environment.tools": (None, EPISODES),
    "environment.mcp": ((), EPISODES),
    "environment.mcp_config": (None, EPISODES),
    "environment.pass_env": ((), EPISODES),
    "data.apply_chat_template": (True, "verl always renders with the chat template"),
    "trainer.alert": (None, "verl's loggers have alerts of their own"),
    "rollout.stop": ((), "verl's rollout has no stop strings"),
    "model.float32_head": (False, "verl's heads compute as their other layers"),
    "model.quantization": (None, "verl's FSDP engine has no 4-bit weights"),
    "critic.model.quantization": (None, "verl's FSDP engine has no 4-bit weights"),
    "actor.clip_grad_value": (None, "verl clips by norm only"),
    "critic.clip_grad_value": (None, "verl clips by norm only"),
    "actor.target_kl": (None, "verl always runs all epochs"),
    "critic.value_loss_coef": (1.0, "verl has none; change critic.optim.lr and critic.grad_clip"),
    "algorithm.whiten_advantages": (True, "verl always whitens them"),
    "algorithm.lam_alpha": (None, "verl has one lambda for all lengths"),
    "algorithm.gamma_piece": (None, "verl has one discount for all tokens"),
    "algorithm.lam_piece": (None, "verl has one lambda for all tokens"),
    "reward.api.place": (None, "verl puts the whole score at the end"),
    "reward.rule_place": (False, "verl puts the whole score at the end"),
    "algorithm.subtract_group_mean": (False, "verl's GAE reads the rewards as they are"),
    "algorithm.score_coef": (1.0, "verl adds the score as it is; change kl_ctrl.kl_coef"),
    "critic.lam": (None, "verl has one lambda for actor and critic"),
    "critic.model.freeze_attention": (False, "verl trains all weights of the critic"),
    "critic.pretrain_steps": (None, "verl has trainer.critic_warmup only, with the actor's lambda"),
    "critic.pretrain_until": (None, "it belongs to critic.pretrain_steps"),
    "actor.positive_nll_coef": (0.0, "verl's losses have no such term"),
    "actor.positive_score": (1.0, "it belongs to actor.positive_nll_coef"),
    "ref.path": (None, "verl's reference is the initial actor"),
    "reward.shaping.missing_eos_penalty": (None, "verl's reward functions do not get it"),
    "reward.shaping.repetition_penalty": (None, "verl's reward functions get no tokens"),
    "reward.shaping.thought_budget": (None, "verl's reward functions get no tokens"),
    "reward.shaping.answer_budget": (None, "verl's reward functions get no tokens"),
    "reward.shaping.budget_penalty": (1.0, "it belongs to the budgets of reward.shaping"),
    "reward.shaping.repetition_ngram": (4, "it belongs to reward.shaping.repetition_penalty"),
    "reward.shaping.reward_clip": (None, "scale the parts of a mixture instead"),
    "reward.shaping.normalize": ("off", "scale the parts of a mixture instead (zscore)"),
    "reward.api.monitor.labels": (None, "verl's reward functions do not know the step"),
    "reward.api.monitor.labels_every": (50, "it belongs to reward.api.monitor.labels"),
    "trainer.patience": (None, "verl always runs all steps"),
    "trainer.store": (None, "verl saves to its own folder only; name one with --output_dir"),
    "trainer.on_hacking": (None, "verl always runs all steps"),
    "trainer.stop_on_hacking": (False, "verl always runs all steps"),
    "trainer.num_workers": (None, "verl trains on GPUs only; name them with --n_gpus"),
    "trainer.placement": (None, "verl puts everything on all GPUs, or see trainer.v1.* of verl"),
    "trainer.async_steps": (0, "use verl's own trainer.v1.trainer_mode=separate_async"),
    "rollout.partial_tokens": (None, "it belongs to trainer.async_steps"),
    "trainer.profile_steps": ((), "use verl's own global_profiler.*"),
    "trainer.tensor_parallel_size": (1, "use verl's own model_engine=megatron"),
}


@dataclass(frozen=True)
class VerlOverrides:
    """verl's overrides in order; or the problems of settings that it does not have."""

    values: Values
    verl_words: tuple[str, ...]
    problems: tuple[str, ...]

    def lines(self, folder: Path) -> list[str]:
        """Return the arguments of `main_ppo`; files are paths in `folder`."""
        below = {k: str(folder / v) if k in FILES else v for k, v in self.values.items()}
        # Hydra needs ++ for a setting that is not in verl's own files.
        added = {name: "" if name in verl_names() else "++" for name in below}
        return [*(f"{added[k]}{k}={to_hydra(v)}" for k, v in below.items()), *self.verl_words]


def build_overrides(
    requested: Config, machine: Machine, verl_words: Sequence[str] = ()
) -> VerlOverrides:
    """Translate what was set for verl; `verl_words` are overrides of settings that only verl has.

    What is unset is decided as for our engine, since verl would decide otherwise.
    """
    config = fit_memory(settle(requested, machine)).config
    values, problems = dict(ALWAYS), list(_find_refusals(config, verl_words))
    # Our settings one by one: renamed, refused, or left to a writer.
    for key in table():
        value, given = value_of(config, key), value_of(requested, key)
        if key in REFUSED:
            allowed, reason = REFUSED[key]
            if given != allowed:
                problems.append(f"{key} {_display(given)} is not available on verl: {reason}.")
        elif key in OUR_ENGINE_ONLY or (key.startswith("reward.") and key not in WRITERS):
            continue  # only for our engine, or read by the reward function
        elif verl_names_by_key()[key] or key in WRITERS:
            # An unset number of steps is left out: verl computes it itself.
            values |= {
                name: value
                for name in verl_names_by_key()[key]
                if value is not None or not name.endswith("optim.total_training_steps")
            }
        elif given != table()[key].default:
            problems.append(
                f"{key} {_display(given)} is not available on verl: it has no such setting."
            )
    # Settings that need a function; then verl's other engines; explicit overrides win.
    for write in dict.fromkeys(WRITERS.values()):
        values |= write(**{name: getattr(config, name) for name in signature(write).parameters})
    # An override of the user's wins over the same setting of ours.
    words_by_name = {word.lstrip("+~").partition("=")[0]: word for word in verl_words}
    other = re.sub(".*=", "", words_by_name.get("model_engine", "dp"))
    if other not in ("dp", "fsdp"):
        values = dict(_rename_for_engine(values, other))
    remaining = {name: value for name, value in values.items() if name not in words_by_name}
    return VerlOverrides(dict(sorted(remaining.items())), tuple(verl_words), tuple(problems))


# Megatron's names for settings of FSDP and its optimizer.
MEGATRON_NAMES: Final = {
    "lr_scheduler_type": "lr_decay_style", "min_lr_ratio": "min_lr", "eps": "adam_eps",
    "param_offload": "param_offload", "optimizer_offload": "optimizer_offload", "dtype": "dtype",
    "seed": "seed",
}  # fmt: skip


def _rename_for_engine(values: Values, engine: str) -> Iterator[tuple[str, Any]]:
    """Drop settings that only FSDP has; rename those that Megatron has under other names."""
    # Sort each setting: kept as it is, renamed for Megatron, or dropped.
    for name, value in values.items():
        group, _, leaf = name.rpartition(".")
        sharding = ".fsdp_config" in group or group.startswith("critic.fsdp")
        optim = leaf in ("lr_scheduler_type", "min_lr_ratio", "eps", "optimizer", "optimizer_impl")
        if not (sharding or optim or leaf in ("strategy", "grad_clip")):
            yield name, value
        elif engine == "megatron" and leaf in MEGATRON_NAMES:
            # Megatron takes the minimum as a rate, and we have it as a share of the peak rate.
            lr = values.get(f"{group}.lr", 0.0)
            of = f"{group.rpartition('.')[0]}.megatron" if sharding else group
            yield f"{of}.{MEGATRON_NAMES[leaf]}", value * lr if leaf == "min_lr_ratio" else value


def _find_refusals(config: Config, verl_words: Sequence[str]) -> Iterator[str]:
    """Yield what must be set for verl, and what verl does not support."""
    # GPUs and engine first; then judges and reward models that would need a GPU.
    if not config.trainer.n_gpus_per_node:
        yield "verl trains on GPUs: name how many each node has with --n_gpus 8."
    bare_words = {word.lstrip("+").removeprefix(WRAPPER) for word in verl_words}
    megatron = config.actor.strategy == "megatron" or "actor.strategy=megatron" in bare_words
    if megatron and "model_engine=megatron" not in bare_words:
        yield "actor.strategy megatron needs verl's own model_engine=megatron as well."
    parts = ("actor", config.actor.optim), ("critic", config.critic.optim)
    for part, optim in () if megatron else parts:
        if optim.lr_scheduler_type == "linear":
            yield f"{part}.optim.lr_scheduler_type linear: verl has constant and cosine."
    if config.rollout.name == "hf":
        yield "rollout.name hf is not available on verl, which has vllm, sglang and trtllm."
    bypass = config.algorithm.rollout_correction.bypass_mode
    if config.actor.policy_loss.loss_mode == "dis" and not bypass:
        yield "actor.policy_loss.loss_mode dis is available on verl with bypass_mode only."
    if ESTIMATORS[config.algorithm.adv_estimator].pieces:
        yield f"algorithm.adv_estimator {config.algorithm.adv_estimator} is not available on verl."
    if any(judge.settings.type == "local" for judge in judges_of(config.reward)):
        yield (
            "reward.api.type local: on verl no GPU is left for a judge. Serve it yourself "
            "(`vllm serve MODEL`) and name it with type openai and --rm_base_url."
        )
    if any(judge.settings.of_the_run for judge in judges_of(config.reward)):
        yield (
            "reward.api.mode compare is not available on verl, which scores each response "
            "separately; use --rm_compare ground_truth, or --rm_mode text."
        )
    for model in models_of(config.reward):
        if not is_url(model.settings.path or "") and model.settings.device != "cpu":
            yield (
                f"reward.model.path {model.settings.path}: on verl no GPU is left for it. Serve it "
                "(vLLM or SGLang) and name its URL, or set --reward_model_device cpu."
            )
    for word in verl_words:
        if re.match(r"\+*reward\.custom_reward_function\.(path|name)=", word):
            yield f"{word}: the reward function is written by this program; leave it out."


def to_hydra(value: Any) -> str:
    """Write a value in Hydra's override grammar."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else "-inf" if value < 0 else "nan"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{to_hydra(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(to_hydra(v) for v in value) + "]"
    # A backslash only escapes a quote, and `${` starts an interpolation even inside quotes.
    text = re.sub(r'(\\*)"', r'\1\1\\"', str(value)).replace("${", r"\${")
    tail = re.search(r"\\*$", text)
    return f'"{text}{tail[0] if tail else ""}"'


def _display(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()


def is_verl_only(word: str) -> bool:
    """Whether an override is for a setting that only verl has; it is passed on unchanged."""
    # A key of ours is verl's only if its value is one that we do not offer.
    name, equals, value = word.partition("=")
    bare = name.lstrip("+")
    unwrapped = bare.removeprefix(WRAPPER)
    if not equals:
        return False
    key = find_key(unwrapped)
    known_there = bare in verl_names() or WRAPPER + unwrapped in verl_names()
    if key is not None:
        words = key.names.offered if key.names else offered_choices(key.choices)
        choices = [*words, "null", "none", ""]
        other = bool(key.choices) and not key.is_list and value.strip("'\"").lower() not in choices
        return other and known_there
    if unwrapped == "trainer.device" or unwrapped.startswith("rollout.multi_turn."):
        return True
    # Settings that we translate are ours, in their old names too.
    names = foreign_names()
    translated = unwrapped in TRANSLATIONS or unwrapped in names.tied or unwrapped in names.renamed
    if translated or unwrapped.startswith(
        ("custom_reward_function.", "reward.custom_reward_function.")
    ):
        return False
    # Otherwise it is verl's if verl has the name, if the user adds it, or if it is of another
    # engine.
    known_there |= bare == "model_engine"
    return known_there or name.startswith("+") or any(f".{g}." in f".{unwrapped}." for g in GROUPS)


def score_columns(reward: Reward, algorithm: Algorithm) -> tuple[str, ...]:
    """Return the parts of a score that are separate columns of verl's extra info in all rows."""
    # Without a mixture the only part is named after its kind.
    parts = [part.name for part in mixture_of(reward)]
    if not parts:
        parts = ["judge"] if reward.api.enable else ["model"] if reward.model.path else []
    metric = algorithm.filter_groups.metric
    names = [*parts, *algorithm.gdpo_reward_keys, *([metric] if metric else [])]
    return tuple(dict.fromkeys(name for name in names if name not in ("score", "seq_reward")))
