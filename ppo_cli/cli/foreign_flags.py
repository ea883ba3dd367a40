"""Flags that people know from TRL, Hugging Face's Trainer, OpenRLHF and torchrun.

Where a flag means the same here it is an alias; where it does not, a sentence says what to use.
Meanings as documented for TRL 1.12 (PPOConfig, GRPOConfig, ScriptArguments, ModelConfig),
transformers 5 (TrainingArguments) and OpenRLHF up to 0.9 (openrlhf.cli.train_ppo_ray).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from ppo_cli.errors import ppo

NEAR = 0.75  # below this share of equal letters a suggestion only confuses

# Flag -> the flag or the setting that means the same.
ALIASES = {
    "learning_rate": "--lr",
    "actor_learning_rate": "--lr",
    "critic_learning_rate": "--critic_lr",
    "num_train_epochs": "--epochs",
    "num_episodes": "--epochs",
    "max_new_tokens": "--max_response_length",
    "max_completion_length": "--max_response_length",
    "response_length": "--max_response_length",
    "generate_max_len": "--max_response_length",
    "prompt_max_len": "--max_prompt_length",
    "num_generations": "--rollout_n",
    "n_samples_per_prompt": "--rollout_n",
    "rollout_batch_size": "--batch_size",
    "init_kl_coef": "--kl_coef",
    "num_iterations": "--ppo_epochs",
    "cliprange": "--clip_ratio",
    "epsilon": "--clip_ratio",
    "epsilon_high": "actor.clip_ratio_high",
    "eps_clip": "--clip_ratio",
    "value_clip": "--cliprange_value",
    "lambd": "--lam",
    "kl_estimator": "algorithm.kl_penalty",
    "advantage_estimator": "--adv_estimator",
    "warmup_ratio": "actor.optim.lr_warmup_steps_ratio",
    "lr_warmup_ratio": "actor.optim.lr_warmup_steps_ratio",
    "warmup_steps": "actor.optim.lr_warmup_steps",
    "weight_decay": "actor.optim.weight_decay",
    "model_path": "--model",
    "model_name_or_path": "--model",
    "sft_model_path": "--model",
    "pretrain": "--model",
    "critic_pretrain": "--critic_model",
    "reward_model_path": "--reward_model",
    "reward_pretrain": "--reward_model",
    "dataset_name": "--train_files",
    "data_path": "data.path",
    "prompt_data": "--train_files",
    "eval_dataset": "--val_files",
    "input_key": "data.prompt_key",
    "max_samples": "data.train_max_samples",
    "lora_r": "--lora_rank",
    "lora_target_modules": "model.target_modules",
    "attn_implementation": "model.attn_implementation",
    "vllm_gpu_memory_utilization": "--gpu_memory_utilization",
    "vllm_tensor_parallel_size": "--rollout_tp",
    "save_total_limit": "trainer.max_ckpt_to_keep",
    "max_ckpt_num": "trainer.max_ckpt_to_keep",
    "resume_from_checkpoint": "--resume",
    "run_name": "trainer.experiment_name",
    "wandb_run_name": "trainer.experiment_name",
    "wandb_project": "trainer.project_name",
    "save_steps": "--save_freq",
    "eval_steps": "--test_freq",
}

_BOTH_EPOCHS = "--ppo_epochs N sets the actor's passes over a batch, --critic_epochs N the critic's"
_MICRO = (
    "actor.ppo_micro_batch_size_per_gpu=N sets the responses of one forward and backward pass, "
    "critic.ppo_micro_batch_size_per_gpu=N the critic's; --batch_size counts the prompts of a "
    "step on all devices"
)
_ACCUMULATION = (
    "it follows from --mini_batch_size (prompts in an optimizer step) and "
    "actor.ppo_micro_batch_size_per_gpu"
)
_LOGGERS = "use --logger console,wandb or --logger console,tensorboard"
_EXPORT = "use --output_dir DIR for the run folder; `{ppo} export` writes the model elsewhere"
_REWARD = "use --reward_function FILE[:NAME], --rule NAME, or several with --reward KIND:WEIGHT"
_SHARDING = "models are sharded with FSDP2; leave it out, or see actor.fsdp_config"
_DEVICES = "use --n_gpus N, and --placement train:0-3,rollout:4-7 to split the GPUs"

# Flag -> what to do instead.
POINTERS = {
    "per_device_train_batch_size": _MICRO,
    "micro_train_batch_size": _MICRO,
    "train_batch_size": (
        "--mini_batch_size sets the prompts of an optimizer step; times --rollout_n it is the "
        "number of responses"
    ),
    "per_device_eval_batch_size": "the sampler batches by itself; see rollout.max_num_seqs",
    "micro_rollout_batch_size": "see rollout.max_num_seqs and ref.log_prob_max_token_len_per_gpu",
    "local_rollout_forward_batch_size": "see ref.log_prob_max_token_len_per_gpu",
    "gradient_accumulation_steps": _ACCUMULATION,
    "num_mini_batches": "--mini_batch_size sets the size of one: --batch_size / their number",
    "num_ppo_epochs": _BOTH_EPOCHS,
    "max_epochs": _BOTH_EPOCHS,
    "total_episodes": "use --max_steps N; a step has --batch_size times --rollout_n episodes",
    "beta": (
        "the weight of a KL term in the loss is actor.kl_loss_coef=X with actor.use_kl_loss=true; "
        "--kl_coef weighs the KL in the reward"
    ),
    "kl_target": "use algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=X",
    "target_kl": (
        "actor.target_kl=X ends the epochs of a step early; algorithm.kl_ctrl.target_kl=X steers "
        "the adaptive KL coefficient"
    ),
    "use_kl_loss": "use actor.use_kl_loss=true",
    "vf_coef": (
        "the critic is a model with an optimizer of its own: set --critic_lr, or "
        "critic.value_loss_coef=X"
    ),
    "whiten_rewards": "use --reward_normalize batch; advantages are whitened anyway",
    "normalize_reward": "use --reward_normalize running",
    "max_grad_norm": "use actor.grad_clip=X and critic.grad_clip=X",
    "lr_scheduler_type": "use actor.optim.lr_scheduler_type=constant or cosine",
    "max_len": "use --max_prompt_length and --max_response_length",
    "max_length": "use --max_prompt_length and --max_response_length",
    "label_key": "the answer is read from the column ground_truth or answer",
    "logging_steps": "every step is logged; leave it out",
    "logging_dir": "TensorBoard files lie in --output_dir, under tensorboard/",
    "report_to": _LOGGERS,
    "use_wandb": f"{_LOGGERS}; the key is read from WANDB_API_KEY",
    "use_tensorboard": _LOGGERS,
    "eval_strategy": "--test_freq N validates every N steps",
    "save_strategy": "--save_freq N saves every N steps",
    "load_checkpoint": "the same command again resumes; --resume never starts afresh",
    "overwrite_output_dir": "--resume never starts afresh and keeps the earlier run",
    "save_path": _EXPORT,
    "ckpt_path": _EXPORT,
    "push_to_hub": "`{ppo} export` writes a folder that `hf upload` takes",
    "reward_funcs": _REWARD,
    "reward_weights": _REWARD,
    "remote_rm_url": "use --reward_model URL with --reward_model_adapter openrlhf",
    "use_peft": "--lora_rank 16 trains a LoRA adapter",
    "lora_dropout": "LoRA has no dropout here; leave it out",
    "load_in_4bit": "quantised training is not offered; --lora_rank 16 saves memory",
    "bf16": "use --dtype bfloat16",
    "fp16": "use --dtype bfloat16, or float32",
    "torch_dtype": "use --dtype bfloat16 or float32; weights are kept in float32",
    "gradient_checkpointing": "it is on; model.enable_gradient_checkpointing=false turns it off",
    "trust_remote_code": "use model.trust_remote_code=true",
    "packing_samples": "use model.packing=true",
    "apply_chat_template": "it is on; data.apply_chat_template=false turns it off",
    "use_vllm": "use --rollout_name vllm",
    "vllm_num_engines": _DEVICES,
    "actor_num_gpus_per_node": _DEVICES,
    "critic_num_gpus_per_node": _DEVICES,
    "colocate_all_models": "models share the GPUs unless --placement says otherwise",
    "nproc_per_node": "use --n_gpus N, or --num_workers N without GPUs",
    "deepspeed": _SHARDING,
    "zero_stage": _SHARDING,
    "fsdp": _SHARDING,
}


def translate(words: Sequence[str]) -> list[str]:
    """Replace each alias by what it stands for; a setting without a flag becomes KEY=VALUE."""
    out: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*out, word, *rest]
        name, equals, value = word[2:].partition("=")
        target = ALIASES.get(name.replace("-", "_")) if word.startswith("--") else None
        if target is None:
            out.append(word)
        elif target.startswith("--"):
            out.append(f"{target}{equals}{value}")
        elif equals or rest:
            out.append(f"{target}={value if equals else rest.pop(0)}")
        else:
            out.append(word)
    return out


def unknown_flag(flag: str, known: Iterable[str]) -> str:
    """Say that a flag does not exist, and what to use: a known one, or nothing that is far off."""
    name = flag.lstrip("-").replace("-", "_")
    names = {word.lstrip("-"): word for word in known}
    near = difflib.get_close_matches(name, [*names, *ALIASES, *POINTERS], n=1, cutoff=NEAR)
    said = f"there is no flag --{name}"
    if not near:
        return f"{said}."
    if near[0] in POINTERS:
        return f"{said}: {POINTERS[near[0]].format(ppo=ppo())}."
    return f"{said}. Did you mean '{names.get(near[0]) or ALIASES[near[0]]}'?"
