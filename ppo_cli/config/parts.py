"""What a run cannot have: parts that are not there yet, and inputs it cannot start without."""

from __future__ import annotations

from ppo_cli.config.schema import Config


def missing_parts(config: Config) -> list[str]:
    """Return one sentence for each part that is asked for and not there yet."""
    return [*_missing_engines(config), *_missing_rewards(config)]


def missing_inputs(config: Config) -> list[str]:
    """Return what a run cannot start without."""
    if config.data.train_files:
        return []
    return [
        "There are no prompts to train on: name them with --train_files FILE. "
        "`ppo data prepare gsm8k --source openai/gsm8k --out data/gsm8k` makes a set, "
        "and --preset embedded trains on the bundled one."
    ]


def _missing_engines(config: Config) -> list[str]:
    said = []
    trainer = config.trainer
    if trainer.engine in ("ray", "verl"):
        said.append(f"The engine '{trainer.engine}' is not there yet; use --engine local.")
    elif trainer.nnodes > 1:
        said.append("Training on several nodes is not there yet; leave --nnodes out.")
    elif (trainer.n_gpus_per_node or 1) > 1:
        said.append("Training on several GPUs is not there yet; use --n_gpus 1.")
    elif (trainer.num_workers or 1) > 1:
        said.append("Several learner processes are not there yet; leave --num_workers out.")
    if trainer.placement is not None:
        said.append("Placing work on devices is not there yet; leave --placement out.")
    if config.rollout.name == "vllm":
        said.append("The vLLM sampler is not there yet; use --rollout_name hf.")
    elif config.rollout.tensor_model_parallel_size > 1:
        said.append("A sampler over several GPUs is not there yet; use --rollout_tp 1.")
    if config.model.lora_rank > 0:
        said.append("LoRA is not there yet; leave --lora_rank out to train all weights.")
    return said


def _missing_rewards(config: Config) -> list[str]:
    said = []
    if config.reward.api.enable:
        said.append("LLM judges are not there yet; leave --use_api_reward out.")
    if config.reward.model.path is not None:
        said.append("Reward models are not there yet; leave --reward_model out.")
    if config.reward.parts:
        said.append("Mixed rewards are not there yet; leave --reward out.")
    return said
