"""Settings for the tests of the bridge: every preset, and configurations drawn at random."""

from __future__ import annotations

import random
from typing import Any

from ppo_cli.config.resolve import resolve
from ppo_cli.config.schema.keys import Key, offered_choices, table
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import ConfigError
from ppo_cli.extras.bridge.overrides import OUR_ENGINE_ONLY, REFUSED

# The model is one that is here, since verl's own checks load its tokenizer.
GPUS = (
    "trainer.n_gpus_per_node=8", "trainer.engine=verl", "data.train_files=p.jsonl",
    "model.path=embedded", "critic.model.path=null",
)  # fmt: skip
# Drawn from what is not free text; those of rewards go to verl as a file of ours.
NUMBERS: dict[str, tuple[Any, ...]] = {
    "actor.clip_ratio": (0.1, 0.3), "actor.clip_ratio_low": (0.05, None),
    "actor.clip_ratio_high": (0.28, None), "actor.clip_ratio_c": (5.0, None),
    "actor.grad_clip": (0.0, 0.5), "critic.grad_clip": (0.0, 2.0),
    "actor.optim.lr": (1e-6, 3e-7), "critic.optim.lr": (1e-5, 2.5e-6),
    "actor.optim.eps": (1e-6, 1e-8), "actor.optim.betas": ((0.9, 0.95), (0.8, 0.999)),
    "actor.optim.lr_warmup_steps": (-1, 10), "actor.optim.min_lr_ratio": (0.0, 0.1),
    "actor.ppo_micro_batch_size_per_gpu": (None, 4), "critic.ppo_micro_batch_size_per_gpu": (2,),
    "critic.ppo_mini_batch_size": (None, 128), "actor.ppo_mini_batch_size": (32, 64),
    "actor.ppo_epochs": (1, 2), "critic.ppo_epochs": (1, 4), "actor.entropy_coeff": (0.01,),
    "actor.loss_scale_factor": (None, 1024.0), "algorithm.gamma": (1.0, 0.99),
    "algorithm.lam": (1.0, 0.9), "algorithm.kl_ctrl.kl_coef": (0.01, 1e-4),
    "algorithm.kl_ctrl.horizon": (5000,), "critic.cliprange_value": (0.2,),
    "algorithm.rollout_correction.rollout_is_threshold": (2.0, 5.0),
    "algorithm.rollout_correction.rollout_is_threshold_lower": (None, 0.5),
    "algorithm.rollout_correction.rollout_rs": (None, "token_k1"),
    "algorithm.rollout_correction.rollout_rs_threshold": ("0.5_2.0",),
    "data.train_batch_size": (128, 256), "data.max_prompt_length": (256, 1024),
    "data.max_response_length": (128, 2048), "data.apply_chat_template_kwargs":
    ({"enable_thinking": False}, {"note": "it's \"so\" \\ ${x}"}),
    "data.val_files": (("v.jsonl",),),
    "model.lora_rank": (0, 16), "critic.model.lora_rank": (0, 8),
    "model.lora_alpha": (32.0, 16.0), "model.packing": (True, None),
    "model.dtype": ("float32", None), "model.target_modules": ("all-linear", ("q_proj", "v_proj")),
    "rollout.n": (1, 8), "rollout.temperature": (0.7, 1.0), "rollout.top_p": (0.9,),
    "rollout.top_k": (20,), "rollout.tensor_model_parallel_size": (1, 4),
    "rollout.gpu_memory_utilization": (0.6,), "rollout.seed": (None, 7),
    "rollout.engine_kwargs.vllm": ({"max_num_partial_prefills": 2},),
    "rollout.val_kwargs.temperature": (0.0, 0.7), "rollout.val_kwargs.n": (4,),
    "reward.shaping.overlong_buffer": (64,), "reward.shaping.overlong_penalty": (0.5,),
    "trainer.critic_warmup": (0, 5), "trainer.total_training_steps": (None, 100),
    "trainer.save_freq": (-1, 10), "trainer.test_freq": (-1, 5), "trainer.seed": (1, 42),
    "trainer.max_ckpt_to_keep": (None, 2), "trainer.nnodes": (1, 4),
    "trainer.resume_mode": ("auto", "never", "/runs/global_step_4"),
    "trainer.experiment_name": ("a b's \"run\"", "ends in \\"),
    "algorithm.filter_groups.metric": (None, "seq_reward", "acc"),
}  # fmt: skip


def settled(*overrides: str, preset: str | None = None, **flags: Any) -> Config:
    """Resolve settings as `ppo bridge verl` does."""
    arguments = {name: (value, "drawn") for name, value in flags.items()}
    return resolve(
        flags=arguments, preset=preset, config_files=[], overrides=[*GPUS, *overrides], environ={}
    ).config


def choices(key: Key) -> tuple[Any, ...]:
    """Return values to draw from: words that work, both switches, or the numbers above."""
    if key.name in NUMBERS:
        return NUMBERS[key.name]
    if key.kind is bool:
        return (True, False)
    return () if key.is_list else tuple(offered_choices(key.choices))


FIXED = ("reward.", "trainer.engine", "trainer.logger", "rollout.name", "rollout.weight_transfer")


def drawn(seed: int) -> Config:
    """Draw a configuration that holds together; each setting is changed one time in three."""
    dice = random.Random(seed)
    while True:
        flags: dict[str, Any] = {}
        for name, key in table().items():
            apart = name in REFUSED or name in OUR_ENGINE_ONLY or name.startswith(FIXED)
            if (name in NUMBERS or not apart) and choices(key) and dice.random() < 1 / 3:
                value = dice.choice(choices(key))
                if value is not None or key.optional:
                    flags[name] = value
        try:
            return settled(**flags)
        except ConfigError as error:  # a clash: draw again
            assert "there is no setting" not in str(error)
