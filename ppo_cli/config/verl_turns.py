"""What verl's settings turn into that are more than another name for one of ours.

A turn reads one entry, and puts settings of ours, asks for something of the whole, or says why not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from ppo_cli.algo.estimators import ESTIMATORS, POLICY_LOSSES
from ppo_cli.config.derived import gpu_count, read_placement, usual_gpus
from ppo_cli.config.keys import NO, YES, is_unset, listed, table
from ppo_cli.config.layers import Entry
from ppo_cli.config.reading import Late, Lookup, Reading

BUDGET: Final = "ref.log_prob_max_token_len_per_gpu"
PRECISIONS: Final = {"bf16": "bfloat16", "fp32": "float32", "float": "float32"}
Turn = Callable[[Reading, Entry], None]


def _switch(translator: Reading, entry: Entry) -> bool | None:
    """Read a switch; None, and a problem, when it is neither on nor off."""
    text = str(entry.raw).strip().lower()
    if text not in YES | NO:
        translator.problem(entry, f"{entry.name}: '{entry.raw}' is neither true nor false.")
        return None
    return text in YES


def _dynamic(part: str, translator: Reading, entry: Entry) -> None:
    """Token budgets are what a micro-batch is cut by, unless its size is set."""
    size = f"{part}.ppo_micro_batch_size_per_gpu"
    on = _switch(translator, entry)
    translator.dynamic[part] = on is True
    if on:
        translator.put(entry, size, Late(lambda value: None))
    elif on is False:
        translator.demand(
            entry,
            lambda value: value(size) is not None,
            f"without dynamic batches set the size of a micro-batch: {size}=4.",
        )


def _micro(part: str, translator: Reading, entry: Entry) -> None:
    """Take the size of a micro-batch; with token budgets it does not count, as in verl."""
    late = Late(lambda value: None if translator.dynamic.get(part) else entry.raw)
    translator.put(entry, entry.name, late)
    translator.sized[part] = entry


def _global_micro(part: str, translator: Reading, entry: Entry) -> None:
    """Share the deprecated size over all ranks, as verl did."""

    def per_gpu(value: Lookup) -> int | None:
        if translator.dynamic.get(part):
            return None
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


def _tokens(own: str, translator: Reading, entry: Entry) -> None:
    """A token budget: of several the smallest holds."""
    if not is_unset(entry.raw):
        translator.put(entry, own, Late(lambda value: _count(entry)))


def _log_prob_rows(shared: bool, translator: Reading, entry: Entry) -> None:
    """A count of sequences becomes the token budget that as many of the longest need.

    With token budgets it does not count, as in verl.
    """

    def budget(value: Lookup) -> int | None:
        rows = _count(entry)
        if translator.dynamic.get("critic" if entry.name.startswith("critic.") else "actor"):
            return None
        rows = max(1, rows // _ranks(value, translator.environ)) if shared else rows
        return rows * int(value("data.max_prompt_length") + value("data.max_response_length"))

    if not is_unset(entry.raw):
        translator.note(
            entry,
            f"it sets {BUDGET} here, to the tokens of {entry.raw} of the longest sequences"
            f"{' over all ranks' if shared else ''}; of several such sizes the smallest holds",
        )
        translator.put(entry, BUDGET, Late(budget))


def _reward_rows(shared: bool, translator: Reading, entry: Entry) -> None:
    """A count of responses to score becomes the token budget that as many of the longest need."""

    def budget(value: Lookup) -> int:
        rows = _count(entry)
        rows = max(1, rows // _ranks(value, translator.environ)) if shared else rows
        longest = value("data.max_prompt_length") + value("data.max_response_length")
        return rows * int(value("reward.model.max_length") or longest)

    if not is_unset(entry.raw):
        translator.put(entry, "reward.model.batch_tokens", Late(budget))


def _profile_steps(translator: Reading, entry: Entry) -> None:
    translator.put(entry, "trainer.profile_steps", [] if is_unset(entry.raw) else entry.raw)


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


def _adaptive(translator: Reading, entry: Entry) -> None:
    on = _switch(translator, entry)
    if on is not None:
        translator.put(entry, "algorithm.kl_ctrl.type", "adaptive" if on else "fixed")


def _old_dynamic(translator: Reading, entry: Entry) -> None:
    for part in ("actor", "critic"):
        _dynamic(part, translator, entry)


def _data_parallel(translator: Reading, entry: Entry) -> None:
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


def _greedy_validation(translator: Reading, entry: Entry) -> None:
    on = _switch(translator, entry)
    if on is False:
        translator.put(entry, "rollout.val_kwargs.temperature", "0")
    elif on:
        translator.demand(
            entry,
            lambda value: value("rollout.val_kwargs.temperature") > 0,
            "sampled validation needs a temperature: rollout.val_kwargs.temperature=0.7.",
        )


def _logger(translator: Reading, entry: Entry) -> None:
    """Drop `file`: metrics.jsonl is always written."""
    try:
        words = listed(entry.raw)
    except ValueError as error:
        translator.problem(entry, f"{entry.name}: {error}.")
        return
    translator.put(entry, entry.name, [word for word in words if word != "file"])


def _resume_mode(translator: Reading, entry: Entry) -> None:
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


def _resume_from(translator: Reading, entry: Entry) -> None:
    if is_unset(entry.raw) or str(entry.raw).strip().lower() == "false":
        return
    translator.resume_path = str(entry.raw)
    if translator.verl:
        return
    translator.demand(
        entry,
        lambda value: translator.resume_by_path,
        "a checkpoint to go on from is taken with trainer.resume_mode=resume_path, or simply "
        f"--resume {entry.raw}.",
    )


def _reward_model_on(translator: Reading, entry: Entry) -> None:
    on = None if is_unset(entry.raw) else _switch(translator, entry)
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


def _critic_on(translator: Reading, entry: Entry) -> None:
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


def _reward_manager(translator: Reading, entry: Entry) -> None:
    name = str(entry.raw).strip()
    if name == "dapo":
        translator.note(entry, "the over-long penalty of dapo is reward.shaping.overlong_buffer")
    elif name not in ("naive", "gdpo", "None", "null"):
        translator.problem(
            entry,
            f"the reward manager '{entry.raw}' is not offered. Rules are chosen by data_source "
            "(naive); --reward_function FILE takes one of your own, --rm_max_rpm limits a judge.",
        )


def _overlong_on(translator: Reading, entry: Entry) -> None:
    on = _switch(translator, entry)
    translator.overlong_on = on is True
    if on:
        translator.demand(
            entry,
            lambda value: value("reward.shaping.overlong_buffer") is not None,
            "the over-long penalty is on without the length of its buffer: set "
            f"{entry.name.removesuffix('enable')}len=64, or --overlong_buffer 64.",
        )


def _overlong_buffer(translator: Reading, entry: Entry) -> None:
    """The length of the buffer counts once the penalty is switched on, wherever that is said."""
    late = Late(lambda value: _count(entry) if translator.overlong_on else None)
    translator.put(entry, "reward.shaping.overlong_buffer", late)


def _overlong_penalty(translator: Reading, entry: Entry) -> None:
    usual = table()["reward.shaping.overlong_penalty"].default
    late = Late(lambda value: entry.raw if translator.overlong_on else usual)
    translator.put(entry, "reward.shaping.overlong_penalty", late)


def _function_file(translator: Reading, entry: Entry) -> None:
    if not is_unset(entry.raw):
        translator.function_file = entry


def _function_name(translator: Reading, entry: Entry) -> None:
    translator.function_name = entry


def _saved(translator: Reading, entry: Entry) -> None:
    raw = entry.raw.strip("[]() ").split(",") if isinstance(entry.raw, str) else entry.raw or []
    words = {str(word).strip(" '\"") for word in raw}
    if not {"model", "optimizer", "extra"} <= words:
        said = "a checkpoint always holds model (as a Hugging Face folder), optimizer and extra"
        translator.note(entry, said)


def _device(translator: Reading, entry: Entry) -> None:
    if str(entry.raw).strip() == "npu":
        translator.problem(
            entry,
            "trainer.device is 'npu': NPUs are not offered; a run uses NVIDIA GPUs or the CPU.",
        )
        return
    here = "cuda" if gpu_count(translator.environ) else "cpu"
    if str(entry.raw).strip() != here:
        translator.problem(
            entry,
            f"trainer.device is '{entry.raw}', but this machine has "
            f"{'a GPU' if here == 'cuda' else 'no GPU'}; the device is found by itself "
            "(CUDA_VISIBLE_DEVICES= hides GPUs).",
        )


def _critic_warmup(translator: Reading, entry: Entry) -> None:
    """verl counts steps from 1 and trains the actor from step N on: N-1 steps are the critic's."""
    raw = entry.raw
    if translator.verl and str(raw).strip().isdigit() and int(raw) > 0:
        translator.note(entry, f"the actor trains from step {raw} on, as in verl")
        raw = int(raw) - 1
    translator.put(entry, entry.name, raw)


def _packing(translator: Reading, entry: Entry) -> None:
    """Rows are packed where all models that say something ask for it."""
    on = _switch(translator, entry)
    if on is not None:
        translator.put(entry, "model.packing", Late(lambda value: on))


def _frequency(translator: Reading, entry: Entry) -> None:
    """Read `False`, and verl's 0, as never."""
    off = ("false", "null", "none", *(("0",) if translator.verl else ()))
    never = str(entry.raw).strip().lower() in off
    translator.put(entry, entry.name, "-1" if never else entry.raw)


def _unset_is(usual: str, translator: Reading, entry: Entry) -> None:
    """Read null as the value that verl takes for it."""
    translator.put(entry, entry.name, usual if is_unset(entry.raw) else entry.raw)


def _lora_alpha(translator: Reading, entry: Entry) -> None:
    """Read verl's `lora_alpha=0` beside `lora_rank=0` as LoRA left out."""
    off = translator.verl and str(entry.raw).strip() in ("0", "0.0")
    usual = table()[entry.name].default
    rank = entry.name.replace("alpha", "rank")
    late = Late(lambda value: entry.raw if int(value(rank)) else usual)
    translator.put(entry, entry.name, late if off else entry.raw)


def _exclude_modules(translator: Reading, entry: Entry) -> None:
    model = entry.name.removesuffix("exclude_modules")
    if not is_unset(entry.raw):
        translator.demand(
            entry,
            lambda value: value(f"{model}lora_rank") == 0,
            f"{entry.name} is not offered; name what LoRA adapts in {model}target_modules.",
        )


def _sampler_length(translator: Reading, entry: Entry) -> None:
    """The sampler takes the longest prompt and response; verl may leave it more room."""
    if is_unset(entry.raw):
        return
    try:
        length = _count(entry)
    except ValueError as error:
        translator.problem(entry, str(error))
        return
    translator.demand(
        entry,
        lambda value: length >= value("data.max_prompt_length") + value("data.max_response_length"),
        f"{entry.name} {length} is less than data.max_prompt_length and data.max_response_length "
        "together; lower one of these.",
    )


def _text_only(translator: Reading, entry: Entry) -> None:
    translator.tell(entry, "models here read text only, so it changes nothing")


def _same_dtype(translator: Reading, entry: Entry) -> None:
    """Trainer, reference and sampler compute alike: in bfloat16, without a GPU in float32."""
    word = PRECISIONS.get(str(entry.raw), str(entry.raw))
    if word not in ("bfloat16", "float32", "auto"):
        said = "--dtype takes bfloat16 or float32 for both trainer and sampler"
        translator.problem(entry, f"{entry.name}={word} is not offered; {said}.")
        return
    usual = "bfloat16" if gpu_count(translator.environ) else word
    translator.demand(
        entry,
        lambda value: word in ("auto", value("model.dtype") or usual),
        f"{entry.name}={word}: trainer, reference and sampler compute alike; set --dtype {word}.",
    )


def _constant(raw: str, value: Lookup) -> str:
    return raw


def _estimator(translator: Reading, entry: Entry) -> None:
    """Estimators by other names; those of verl that are not ours are refused without a guess."""
    name = str(entry.raw).strip()
    if name == "dr_grpo":
        translator.put(entry, entry.name, "grpo")
        without_std, summed = (Late(partial(_constant, raw), yields=True) for raw in DR_GRPO)
        translator.put(entry, "algorithm.norm_adv_by_std_in_grpo", without_std)
        translator.put(entry, "actor.loss_agg_mode", summed)
    elif name in OTHER_ESTIMATORS:
        known = ", ".join(ESTIMATORS)
        translator.problem(entry, f"the estimator '{name}' is not offered; there are {known}.")
    else:
        translator.put(entry, entry.name, "grpo" if name == "grpo_vectorized" else entry.raw)


# Dr. GRPO (arXiv 2503.20783): no division by the spread, nor by the length of a response.
DR_GRPO: Final = ("false", "seq-mean-token-sum-norm")
OTHER_ESTIMATORS: Final = frozenset(
    {"grpo_passk", "optimal_token_baseline", "tir_optimal_token_baseline"}
)


def _policy_loss(translator: Reading, entry: Entry) -> None:
    """verl's policy losses that are not ours, refused without a guess."""
    name = str(entry.raw).strip()
    if name in ("sapo", "dppo_tv", "dppo_kl", "dro", "bypass_mode"):
        known = ", ".join(POLICY_LOSSES)
        translator.problem(entry, f"the policy loss '{name}' is not offered; there are {known}.")
    else:
        translator.put(entry, entry.name, entry.raw)


def _optimizer(translator: Reading, entry: Entry) -> None:
    names = {"adamw": "AdamW", "adamw8bit": "AdamW8bit"}
    translator.put(entry, entry.name, names.get(str(entry.raw).lower(), entry.raw))


def _optimizer_package(part: str, translator: Reading, entry: Entry) -> None:
    """Take the packages that compute what is computed here: torch has no 8-bit AdamW."""
    word, key = str(entry.raw), f"{part}.optim.optimizer"
    if word not in ("torch.optim", "bitsandbytes.optim"):
        said = f"{key} takes AdamW (torch.optim) or AdamW8bit (bitsandbytes.optim)"
        translator.problem(entry, f"{entry.name}={word} is not offered; {said}.")
        return
    translator.demand(
        entry,
        lambda value: word == "bitsandbytes.optim" or value(key) == "AdamW",
        f"{entry.name}=torch.optim has no AdamW8bit: write bitsandbytes.optim.",
    )


def _precision(translator: Reading, entry: Entry) -> None:
    translator.put(entry, "model.dtype", PRECISIONS.get(str(entry.raw), entry.raw))


def _group_metric(translator: Reading, entry: Entry) -> None:
    """verl's `reward`, which it takes where none is named, has the penalties in it."""
    theirs = translator.verl and (is_unset(entry.raw) or entry.raw == "reward")
    translator.put(entry, entry.name, "seq_reward" if theirs else entry.raw)


def _window(translator: Reading, entry: Entry) -> None:
    if is_unset(entry.raw):
        return
    low, window, high = str(entry.raw).partition("_")
    translator.put(entry, entry.name, high if window else entry.raw)
    if window:
        translator.put(entry, f"{entry.name}_lower", low)


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
    "actor.ppo_micro_batch_size_per_gpu": partial(_micro, "actor"),
    "critic.ppo_micro_batch_size_per_gpu": partial(_micro, "critic"),
    "rollout.log_prob_max_token_len_per_gpu": partial(_tokens, BUDGET),
    "ref.log_prob_max_token_len_per_gpu": partial(_tokens, BUDGET),
    "critic.forward_max_token_len_per_gpu": partial(_tokens, BUDGET),
    "reward_model.micro_batch_size_per_gpu": partial(_reward_rows, False),
    "reward_model.micro_batch_size": partial(_reward_rows, True),
    "algorithm.adv_estimator": _estimator,
    "actor.policy_loss.loss_mode": _policy_loss,
    "reward_model.forward_max_token_len_per_gpu": partial(_tokens, "reward.model.batch_tokens"),
    "trainer.profile_steps": _profile_steps,
    "global_profiler.steps": _profile_steps,
    "model.use_remove_padding": _packing,
    "actor.use_remove_padding": _packing,
    "critic.model.use_remove_padding": _packing,
    "trainer.critic_warmup": _critic_warmup,
    "trainer.save_freq": _frequency,
    "trainer.test_freq": _frequency,
    "actor.optim.lr_warmup_steps": partial(_unset_is, "-1"),
    "critic.optim.lr_warmup_steps": partial(_unset_is, "-1"),
    "actor.optim.optimizer": _optimizer,
    "critic.optim.optimizer": _optimizer,
    "actor.optim.optimizer_impl": partial(_optimizer_package, "actor"),
    "critic.optim.optimizer_impl": partial(_optimizer_package, "critic"),
    "actor.optim.min_lr_ratio": partial(_unset_is, "0.0"),
    "critic.optim.min_lr_ratio": partial(_unset_is, "0.0"),
    "model.lora_alpha": _lora_alpha,
    "critic.model.lora_alpha": _lora_alpha,
    "model.exclude_modules": _exclude_modules,
    "critic.model.exclude_modules": _exclude_modules,
    "model.torch_dtype": _precision,
    "algorithm.filter_groups.metric": _group_metric,
    "rollout.max_model_len": _sampler_length,
    "rollout.engine_kwargs.vllm.max_model_len": _sampler_length,
    "rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache": _text_only,
    "rollout.engine_kwargs.vllm.mm_processor_cache_gb": _text_only,
    "rollout.dtype": _same_dtype,
    "ref.fsdp_config.dtype": _same_dtype,
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
    **_overlong("reward_model.overlong_buffer."),
    **_overlong("reward.overlong_buffer."),
    "custom_reward_function.path": _function_file,
    "reward.custom_reward_function.path": _function_file,
    "custom_reward_function.name": _function_name,
    "reward.custom_reward_function.name": _function_name,
    "actor.checkpoint.contents": _saved,
    "critic.checkpoint.contents": _saved,
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
