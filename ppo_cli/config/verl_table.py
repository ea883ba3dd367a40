"""verl's settings that are not ours by name: renamed, the same anyway, tied, told or refused.

Names stand without the `actor_rollout_ref.` wrapper; `x.*` covers everything below x.
"""

from __future__ import annotations

from typing import Final

OFF: Final = ("false", "null", "none", "0")
ON: Final = ("true", "1")
SANDBOX: Final = "code runs in the built-in sandbox: --rule code, with settings under reward.code"
NO_REMOTE_CODE: Final = "reward models run no code of their own; see reward.model.adapter"
GDPO: Final = (
    "GDPO is a mixture here: --reward KIND:NAME:WEIGHT for each key, scaled with "
    "reward.composite.parts.NAME.scaling=group"
)
OF_MODEL: Final = (
    "a reward model is set under reward.model: path, adapter, max_length, batch_tokens"
)
NOT_OFFERED: Final = (
    "not offered: models are sharded with FSDP2, and layers split with --tensor_parallel_size; "
    "leave it out"
)
OVERLAP: Final = "sampling overlaps with training by --async_steps; leave it out"
OWN_DEVICES: Final = "give reward models devices of their own with --placement"
IN_BACKGROUND: Final = "a checkpoint is written while training goes on, and counts once whole"
CLUSTER: Final = (
    "set the cluster with --nnodes, --node_rank and --master_addr, or name one in RAY_ADDRESS"
)
MEGATRON: Final = f"it is a setting of Megatron, which is {NOT_OFFERED}"
TORCH_PROFILER: Final = (
    "the profiler is torch's, for every process, and writes to profile/ of the run folder; choose "
    "steps with --profile STEPS"
)
BUDGET: Final = "ref.log_prob_max_token_len_per_gpu"

RENAMED: Final[dict[str, tuple[str, ...]]] = {
    "model.lora.merge": ("model.lora_merge",),
    "model.use_remove_padding": ("model.packing",),
    "actor.use_remove_padding": ("model.packing",),
    "critic.model.use_remove_padding": ("model.packing",),
    "model.gradient_checkpointing": ("model.enable_gradient_checkpointing",),
    "actor.fsdp_config.gradient_checkpointing": ("model.enable_gradient_checkpointing",),
    "actor.gradient_checkpointing": ("model.enable_gradient_checkpointing",),
    "actor.optim.warmup_steps": ("actor.optim.lr_warmup_steps",),
    "critic.optim.warmup_steps": ("critic.optim.lr_warmup_steps",),
    "actor.optim.warmup_style": ("actor.optim.lr_scheduler_type",),
    "critic.optim.warmup_style": ("critic.optim.lr_scheduler_type",),
    "actor.optim.clip_grad": ("actor.grad_clip",),
    "critic.optim.clip_grad": ("critic.grad_clip",),
    "critic.model.fsdp_config.*": ("critic.fsdp_config.*",),
    "ref.fsdp_config.param_offload": ("ref.param_offload",),
    "ref.model.path": ("ref.path",),
    "rollout.log_prob_max_token_len_per_gpu": (BUDGET,),
    "critic.forward_max_token_len_per_gpu": (BUDGET,),
    "custom_reward_function.reward_kwargs.*": ("reward.function_kwargs.*",),
    "reward.custom_reward_function.reward_kwargs.*": ("reward.function_kwargs.*",),
    "reward_model.path": ("reward.model.path",),
    "reward_model.model.path": ("reward.model.path",),
    "reward.reward_model.path": ("reward.model.path",),
    "reward.reward_model.model_path": ("reward.model.path",),
    "reward.reward_model.model.path": ("reward.model.path",),
    "reward_model.max_length": ("reward.model.max_length",),
    "reward.reward_model.max_length": ("reward.model.max_length",),
    "reward_model.forward_max_token_len_per_gpu": ("reward.model.batch_tokens",),
    "reward_model.model.fsdp_config.param_offload": ("reward.model.offload",),
    "reward.reward_model.model.fsdp_config.param_offload": ("reward.model.offload",),
    "global_profiler.steps": ("trainer.profile_steps",),
    "trainer.default_local_dir": ("trainer.output_dir",),
    "trainer.max_actor_ckpt_to_keep": ("trainer.max_ckpt_to_keep",),
    "trainer.max_critic_ckpt_to_keep": ("trainer.max_ckpt_to_keep",),
}

# Must be what the setting on the right comes to: one thing is set in one place.
TIED: Final[dict[str, str]] = {
    "actor.rollout_n": "rollout.n",
    "critic.rollout_n": "rollout.n",
    "ref.rollout_n": "rollout.n",
    "rollout.prompt_length": "data.max_prompt_length",
    "rollout.response_length": "data.max_response_length",
    "rollout.dtype": "model.dtype",
    "data.gen_batch_size": "data.train_batch_size",
    "data.seed": "trainer.seed",
    "data.tokenizer": "model.path",
    "data.trust_remote_code": "model.trust_remote_code",
    "actor.data_loader_seed": "trainer.seed",
    "critic.data_loader_seed": "trainer.seed",
    "actor.fsdp_config.seed": "trainer.seed",
    "critic.fsdp_config.seed": "trainer.seed",
    "actor.fsdp_config.strategy": "actor.strategy",
    "critic.fsdp_config.strategy": "critic.strategy",
    "ref.strategy": "actor.strategy",
    "actor.optim.total_training_steps": "trainer.total_training_steps",
    "critic.optim.total_training_steps": "trainer.total_training_steps",
    "model.tokenizer_path": "model.path",
    "critic.model.tokenizer_path": "model.path",
    "critic.model.trust_remote_code": "model.trust_remote_code",
    "ref.fsdp_config.fsdp_size": "actor.fsdp_config.fsdp_size",
    "ref.fsdp_config.reshard_after_forward": "actor.fsdp_config.reshard_after_forward",
    # verl's name for the tokenizer that wrote the responses, not for the reward model's own.
    "reward_model.input_tokenizer": "model.path",
    "reward_model.model.input_tokenizer": "model.path",
    "reward.reward_model.input_tokenizer": "model.path",
    "reward.reward_model.model.input_tokenizer": "model.path",
    "reward_model.reward_kwargs.max_resp_len": "data.max_response_length",
    "reward.reward_kwargs.max_resp_len": "data.max_response_length",
}

# What we do already: any other value is refused with the words beside it.
_SAME_ONCE: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "hybrid_engine": (ON, "give samplers devices of their own with --placement"),
    "algorithm.use_pf_ppo": (OFF, "PF-PPO is not offered; leave it off"),
    "algorithm.filter_groups.enable": (OFF, "group filtering is not offered; leave it off"),
    "algorithm.filter_groups.max_num_gen_batches": (OFF, "group filtering is not offered"),
    "algorithm.filter_groups.metric": (OFF, "group filtering is not offered"),
    "algorithm.rollout_correction.bypass_mode": (
        OFF,
        "old log-probs are always computed by the trainer; correct the mismatch with "
        "algorithm.rollout_correction.rollout_is=token",
    ),
    "algorithm.rollout_correction.loss_type": (("ppo_clip",), "the loss is the clipped surrogate"),
    "algorithm.rollout_correction.rollout_rs": (
        OFF,
        "rejection by mismatch is not offered; use algorithm.rollout_correction.rollout_is",
    ),
    "algorithm.rollout_correction.rollout_rs_threshold": (OFF, "rejection is not offered"),
    "algorithm.rollout_correction.rollout_rs_threshold_lower": (OFF, "rejection is not offered"),
    "algorithm.rollout_correction.rollout_token_veto_threshold": (OFF, "vetoes are not offered"),
    "actor.policy_loss.loss_mode": (
        ("vanilla",),
        "the policy loss is the clipped surrogate (vanilla); shape it with actor.clip_ratio_low, "
        "clip_ratio_high and clip_ratio_c",
    ),
    "actor.calculate_entropy": (ON, "the entropy is always computed and reported"),
    "actor.entropy_from_logits_with_chunking": (ON, "the entropy is always computed in chunks"),
    "ref.entropy_from_logits_with_chunking": (ON, "the entropy is always computed in chunks"),
    "actor.optim.optimizer": (("adamw",), "the optimizer is torch's AdamW"),
    "critic.optim.optimizer": (("adamw",), "the optimizer is torch's AdamW"),
    "actor.optim.optimizer_impl": (("torch.optim",), "the optimizer is torch's AdamW"),
    "critic.optim.optimizer_impl": (("torch.optim",), "the optimizer is torch's AdamW"),
    "actor.optim.override_optimizer_config": (OFF, "set optim.betas, eps or weight_decay"),
    "critic.optim.override_optimizer_config": (OFF, "set optim.betas, eps or weight_decay"),
    "actor.optim.num_cycles": (("0.5",), "the cosine falls once, from lr to its floor"),
    "critic.optim.num_cycles": (("0.5",), "the cosine falls once, from lr to its floor"),
    "model.external_lib": (OFF, "no outside module is imported; leave it out"),
    "model.hdfs_path": (OFF, "copy the model to a local folder and name it with --model"),
    "model.use_shm": (OFF, "models are read from where they lie"),
    "model.custom_chat_template": (OFF, "put the template into the model's tokenizer"),
    "model.lora_adapter_path": (OFF, "merge the adapter into the model first"),
    "model.exclude_modules": (OFF, "name what LoRA adapts in model.target_modules"),
    "model.enable_activation_offload": (
        OFF,
        "activations are not moved to the host; model.enable_gradient_checkpointing saves more",
    ),
    "model.use_liger": (OFF, "Liger kernels are not used; log-probs are chunked already"),
    "model.use_fused_kernels": (OFF, "fused kernels are not used; log-probs are chunked already"),
    "model.tiled_mlp.enabled": (OFF, "use a smaller actor.ppo_max_token_len_per_gpu"),
    "model.mtp.enable": (OFF, "multi-token prediction is not trained"),
    "critic.model.lora_rank": (OFF, "LoRA adapts the actor; the critic trains all its weights"),
    "critic.model.external_lib": (OFF, "no outside module is imported; leave it out"),
    "critic.model.enable_activation_offload": (OFF, "use model.enable_gradient_checkpointing"),
    "critic.model.use_liger": (OFF, "Liger kernels are not used"),
    "actor.use_fused_kernels": (OFF, "fused kernels are not used; log-probs are chunked already"),
    "actor.freeze_vision_tower": (OFF, "models here read text only"),
    "actor.use_prefix_grouper": (OFF, "prefixes are not grouped in training"),
    "rollout.do_sample": (ON, "PPO needs sampled responses; set rollout.temperature"),
    "rollout.ignore_eos": (OFF, "a response ends where the model ends it"),
    "rollout.calculate_log_probs": (ON, "the sampler always gives its log-probs"),
    "rollout.logprobs_mode": (("processed_logprobs",), "log-probs are those after temperature"),
    "rollout.skip_rollout": (OFF, "rollouts are never skipped"),
    "rollout.multi_turn.enable": (OFF, "one prompt, one response: several turns are not offered"),
    "rollout.agent.default_agent_loop": (("single_turn_agent",), "several turns are not offered"),
    "rollout.data_parallel_size": (
        ("1",),
        "samplers follow from the devices and rollout.tensor_model_parallel_size; leave it out",
    ),
    "rollout.expert_parallel_size": (("1",), "experts are not spread over devices; leave it out"),
    "rollout.pipeline_model_parallel_size": (("1",), f"pipelines are {NOT_OFFERED}"),
    "rollout.quantization": (OFF, "the sampler runs in model.dtype"),
    "rollout.full_determinism": (OFF, "runs on the CPU are exact; GPU kernels may differ"),
    "data.custom_cls.path": (OFF, "write the rows to a JSONL or parquet file instead"),
    "data.custom_cls.name": (OFF, "write the rows to a JSONL or parquet file instead"),
    "data.sampler.class_path": (OFF, "the order is seeded by trainer.seed; see data.shuffle"),
    "data.sampler.class_name": (OFF, "the order is seeded by trainer.seed; see data.shuffle"),
    "data.datagen.path": (OFF, "write the rows to a file instead"),
    "data.datagen.name": (OFF, "write the rows to a file instead"),
    "data.tool_config_path": (OFF, "tools are not offered"),
    "data.return_raw_input_ids": (OFF, "rows are not changed"),
    "data.return_raw_chat": ((*ON, *OFF), "messages are always kept"),
    "data.return_full_prompt": (OFF, "the rendered prompt is in rollouts/"),
    "data.return_multi_modal_inputs": (OFF, "models here read text only"),
    "data.validation_shuffle": (OFF, "validation goes through its rows in order"),
    "data.use_shm": (OFF, "files are read from where they lie"),
    "data.val_batch_size": (OFF, "validation is cut to what the sampler takes"),
    "reward_model.launch_reward_fn_async": (ON, "responses are always scored while others sample"),
    "reward_model.use_reward_loop": (ON, "responses are always scored while others sample"),
    "reward_model.enable_resource_pool": (OFF, OWN_DEVICES),
    "reward.reward_model.enable_resource_pool": (OFF, OWN_DEVICES),
    "reward_model.sandbox_fusion.url": (OFF, SANDBOX),
    "reward.sandbox_fusion.url": (OFF, SANDBOX),
    "reward_model.trust_remote_code": (OFF, NO_REMOTE_CODE),
    "reward_model.model.trust_remote_code": (OFF, NO_REMOTE_CODE),
    "reward.reward_manager.source": (("register",), "use --reward_function FILE"),
    "trainer.balance_batch": (ON, "micro-batches are always balanced by tokens"),
    "trainer.val_only": (
        OFF,
        "runs train; a run validates before its first step, see trainer.val_before_train",
    ),
    "trainer.log_val_generations": (OFF, "every response is in the run folder: rollouts/"),
    "trainer.rollout_data_dir": (OFF, "every response is in the run folder: rollouts/"),
    "trainer.validation_data_dir": (OFF, "the run folder holds what a run writes"),
    "trainer.default_hdfs_dir": (OFF, "checkpoints are written below trainer.output_dir"),
    "trainer.del_local_ckpt_after_load": (OFF, "a checkpoint is never deleted by resuming"),
    "trainer.esi_redundant_time": (OFF, "send SIGTERM: the run saves and exits with 3"),
    "trainer.v1.trainer_mode": (("sync",), OVERLAP),
    "global_profiler.tool": ((*OFF, "torch"), TORCH_PROFILER),
    "ray_kwargs.timeline_json_file": (OFF, "no Ray timeline is written"),
    "transfer_queue.enable": (OFF, "there is one driver and no queue"),
}


def _for_part(part: str) -> dict[str, tuple[tuple[str, ...], str]]:
    """What is the same for the actor, the critic and the reference."""
    return {
        f"{part}.ulysses_sequence_parallel_size": (("1",), "sequence parallelism is not offered"),
        f"{part}.fsdp_config.ulysses_sequence_parallel_size": (
            ("1",),
            "sequence parallelism is not offered; use a smaller ppo_max_token_len_per_gpu",
        ),
        f"{part}.fsdp_config.offload_policy": (
            OFF,
            "use fsdp_config.param_offload and optimizer_offload",
        ),
        f"{part}.fsdp_config.model_dtype": (
            ("fp32", "float32"),
            "weights are kept in float32; set the computing precision with --dtype",
        ),
        f"{part}.fsdp_config.mixed_precision.reduce_dtype": (
            ("fp32", "float32"),
            "gradients are summed in float32",
        ),
        f"{part}.fsdp_config.mixed_precision.buffer_dtype": (
            ("fp32", "float32"),
            "buffers are kept in float32",
        ),
        f"{part}.fsdp_config.pad_to_length": (OFF, "micro-batches are padded to their longest"),
        f"{part}.fsdp_config.use_torch_compile": (OFF, "models are not compiled"),
        f"{part}.fsdp_config.full_determinism": (OFF, "runs on the CPU are exact"),
        f"{part}.fsdp_config.use_orig_params": (OFF, "parameters are sharded one by one"),
        f"{part}.fsdp_config.forward_only": (OFF, "set by the program itself"),
        f"{part}.use_torch_compile": (OFF, "models are not compiled; leave it out"),
        f"{part}.entropy_checkpointing": (OFF, "the entropy is computed in chunks"),
        f"{part}.profiler.enable": ((*OFF, *ON), TORCH_PROFILER),
        f"{part}.router_replay.mode": (("disabled", *OFF), "routers are not replayed"),
    }


SAME: Final = _SAME_ONCE | _for_part("actor") | _for_part("critic") | _for_part("ref")

# Speed only, the result is the same: taken with a remark about what happens instead.
TOLD: Final[dict[str, str]] = {
    "ray_init.num_cpus": "Ray takes the cores that are there",
    "ray_kwargs.ray_init.num_cpus": "Ray takes the cores that are there",
    "rollout.free_cache_engine": "the sampler frees its cache when the trainer needs the room",
    "rollout.enable_chunked_prefill": "the sampler plans its prefill by itself",
    "rollout.load_format": "the sampler takes its weights from the trainer",
    "rollout.layered_summon": "weights go to the sampler piece by piece as it takes them",
    "rollout.mode": "results are the same however requests reach the sampler",
    "rollout.disable_log_stats": "the sampler's own statistics are not printed",
    "rollout.log_prob_use_dynamic_bsz": f"log-prob passes are cut by {BUDGET}",
    "ref.log_prob_use_dynamic_bsz": f"log-prob passes are cut by {BUDGET}",
    "rollout.agent.num_workers": "the sampler serves all prompts of a step at once",
    "rollout.update_weights_bucket_megabytes": "weights are handed over as the engine needs",
    "rollout.checkpoint_engine.*": "weights are handed over as the engine needs",
    "actor.checkpoint.async_save": IN_BACKGROUND,
    "critic.checkpoint.async_save": IN_BACKGROUND,
    "ref.checkpoint.async_save": IN_BACKGROUND,
    "actor.fsdp_config.forward_prefetch": "FSDP prefetches by its own plan",
    "critic.fsdp_config.forward_prefetch": "FSDP prefetches by its own plan",
    "ref.fsdp_config.forward_prefetch": "FSDP prefetches by its own plan",
    "data.dataloader_num_workers": "prompts are read once, before training",
    "data.filter_overlong_prompts_workers": "prompts are measured once, before training",
    "reward_model.use_dynamic_bsz": "batches are always cut by reward.model.batch_tokens",
    "reward_model.model.use_remove_padding": "samples of like length share a batch",
    "reward_model.reward_kwargs.overlong_buffer_cfg.log": "penalties are always in the metrics",
    "reward.reward_kwargs.overlong_buffer_cfg.log": "penalties are always in the metrics",
    "trainer.ray_wait_register_center_timeout": "nodes are waited for: --node_timeout",
    "critic.model.lora_alpha": "the critic has no adapters",
    "critic.model.target_modules": "the critic has no adapters",
    "trainer.use_v1": "there is one trainer here",
    "trainer.use_legacy_worker_impl": "there is one trainer here",
}

# Understood, and not to be had: why, and what to use.
REFUSED: Final[dict[str, str]] = {
    "actor.policy_loss.*": "other policy losses than vanilla are not offered",
    "actor.checkpoint.*": "a checkpoint always holds weights, optimizer and state; "
    "see trainer.max_ckpt_to_keep",
    "critic.checkpoint.*": "a checkpoint always holds weights, optimizer and state",
    "actor.fsdp_config.wrap_policy.*": "each decoder layer is a sharding unit",
    "critic.fsdp_config.wrap_policy.*": "each decoder layer is a sharding unit",
    "ref.fsdp_config.wrap_policy.*": "each decoder layer is a sharding unit",
    "actor.profiler.*": TORCH_PROFILER,
    "critic.profiler.*": TORCH_PROFILER,
    "ref.profiler.*": TORCH_PROFILER,
    "rollout.profiler.*": TORCH_PROFILER,
    "actor.qat.*": "quantisation-aware training is not offered",
    "actor.fsdp_config.qat.*": "quantisation-aware training is not offered",
    "actor.router_replay.*": "routers are not replayed",
    "algorithm.pf_ppo.*": "PF-PPO is not offered",
    "algorithm.filter_groups.*": "group filtering is not offered",
    "algorithm.gdpo_reward_keys": GDPO,
    "algorithm.gdpo_reward_weights": GDPO,
    "algorithm.rollout_correction.*": "only truncated importance weights are offered",
    "rollout.multi_turn.*": "one prompt, one response: several turns are not offered",
    "rollout.agent.*": "one prompt, one response: agent loops are not offered",
    "rollout.engine_kwargs.*": "engine arguments are not passed through; see rollout.enforce_eager",
    "rollout.max_model_len": "it follows from data.max_prompt_length and data.max_response_length",
    "rollout.skip.*": "rollouts are never skipped",
    "rollout.trace.*": "every response is in the run folder: rollouts/",
    "rollout.prometheus.*": "metrics are in metrics.jsonl; see --logger",
    "rollout.limit_images": "models here read text only",
    "model.override_config.*": "edit config.json of the model folder; the attention kernel is "
    "model.attn_implementation",
    "critic.model.override_config.*": "edit config.json of the critic's folder",
    "model.tiled_mlp.*": "use a smaller actor.ppo_max_token_len_per_gpu",
    "model.fused_kernel_options.*": "fused kernels are not used",
    "model.lora.*": "set model.lora_rank, lora_alpha and target_modules",
    "model.mtp.*": "multi-token prediction is not trained",
    "model.target_parameters": "name what LoRA adapts in model.target_modules",
    "data.image_key": "models here read text only",
    "data.video_key": "models here read text only",
    "data.image_patch_size": "models here read text only",
    "reward.max_rpm": "limits belong to the judge: set reward.api.max_rpm (--rm_max_rpm)",
    "reward.max_tpm": "limits belong to the judge: set reward.api.max_tpm (--rm_max_tpm)",
    "reward.max_concurrent": "set reward.api.concurrency (--rm_concurrency)",
    "reward.reward_manager.*": "rules are chosen by data_source; use --reward_function FILE",
    "reward.reward_model.*": OF_MODEL,
    "reward_model.*": OF_MODEL,
    "reward.sandbox_fusion.*": SANDBOX,
    "reward_model.sandbox_fusion.*": SANDBOX,
    "reward_model.reward_kwargs.*": "arguments of a function go to reward.function_kwargs",
    "reward.reward_kwargs.*": "arguments of a function go to reward.function_kwargs",
    "custom_reward_function.*": "use --reward_function FILE[:NAME]",
    "reward.custom_reward_function.*": "use --reward_function FILE[:NAME]",
    "trainer.v1.*": OVERLAP,
    "trainer.controller_nsight_options.*": TORCH_PROFILER,
    "trainer.worker_nsight_options.*": TORCH_PROFILER,
    "global_profiler.*": TORCH_PROFILER,
    "ray_init.*": CLUSTER,
    "ray_kwargs.*": CLUSTER,
    "transfer_queue.*": "there is one driver and no queue",
    "async_training.*": OVERLAP,
    "actor_rollout_ref.nccl_timeout": "a worker's time is --worker_timeout",
    "nccl_timeout": "a worker's time is --worker_timeout",
    "model_engine": "models are sharded with FSDP2 (actor.strategy)",
    "hydra.*": "there is no Hydra here; set the run folder with --output_dir",
}
