"""The sampler of a run, built from its config: one with weights of its own, in any process."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from ppo_cli.config.bundled import model_folder
from ppo_cli.config.derived import publishes_adapter, sampler_name, sampler_seed
from ppo_cli.config.schema import Config, Transfer
from ppo_cli.engine.device import Compute
from ppo_cli.engine.hf_sampler import HFSampler, LoadAdapter
from ppo_cli.engine.lora import LoRA, adapt, load_adapter
from ppo_cli.engine.models import adapt_policy, decode_text, load_policy, stop_token_ids
from ppo_cli.engine.sampler import Sampler
from ppo_cli.engine.vllm_sampler import VLLMSampler, check_vllm
from ppo_cli.errors import ModelError

# Keys and values on the CPU: enough for all sequences at full length, but no more than this.
CPU_CACHE_BYTES = 2 * 2**30
CPU_BLOCK = 128  # tokens, of which vLLM gives whole blocks


def check_sampler(config: Config) -> None:
    """Raise MissingPart where the run's sampler is not installed. Loads nothing."""
    if sampler_name(config) == "vllm":
        check_vllm()


def build_sampler(config: Config, tokenizer: Any, *, transfer: Transfer = "memory") -> Sampler:
    """Build the run's sampler with a model of its own; vLLM's needs a process of its own too.

    `transfer` is how new weights reach vLLM: as `Weights` or by a `Sender`.
    """
    check_sampler(config)
    if sampler_name(config) == "vllm":
        return _build_vllm(config, tokenizer, transfer)
    return _build_hf(config, tokenizer)


def sample_from(
    model: Any, config: Config, tokenizer: Any, *, load_adapter: LoadAdapter | None = None
) -> HFSampler:
    """The hf sampler on a model that is loaded already, whose weights it reads where they lie."""
    dtype = Compute.choose(config.model.dtype).dtype
    return HFSampler(
        model,
        eos_token_ids=stop_token_ids(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        max_num_seqs=config.rollout.max_num_seqs,
        detokenize=partial(decode_text, tokenizer),
        autocast=None if dtype == torch.float32 else dtype,
        load_adapter=load_adapter,
    )


def _build_hf(config: Config, tokenizer: Any) -> HFSampler:
    settings = config.model
    policy = load_policy(
        model_folder(settings.path),
        trust_remote_code=settings.trust_remote_code,
        attn_implementation=settings.attn_implementation,
    )
    inject = adapt(config) if publishes_adapter(config) else None
    model = adapt_policy(policy, inject).model
    model.requires_grad_(False).eval().to(Compute.choose(settings.dtype).device)
    return sample_from(model, config, tokenizer, load_adapter=load_adapter if inject else None)


def _build_vllm(config: Config, tokenizer: Any, transfer: Transfer) -> VLLMSampler:
    rollout, settings = config.rollout, config.model
    path = model_folder(settings.path)
    model_config = _model_config(path, settings.trust_remote_code)
    dtype = Compute.choose(settings.dtype).dtype
    longest = config.data.max_prompt_length + config.data.max_response_length
    adapter = LoRA(settings.lora_rank, settings.lora_alpha) if publishes_adapter(config) else None
    return VLLMSampler(
        path,
        eos_token_ids=stop_token_ids(_with_generation(path, model_config), tokenizer),
        detokenize=partial(decode_text, tokenizer),
        max_model_len=longest,
        dtype=dtype,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        cpu_cache_bytes=_cache_bytes(model_config, dtype, longest, rollout.max_num_seqs),
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        enforce_eager=rollout.enforce_eager,
        enable_prefix_caching=rollout.enable_prefix_caching,
        seed=sampler_seed(config),
        trust_remote_code=settings.trust_remote_code,
        lora=adapter,
        transfer=transfer,
    )


def _model_config(path: str, trust_remote_code: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"The config of {path} does not load: {error}") from error


def _with_generation(path: str, model_config: Any) -> Any:
    """What `stop_token_ids` reads of a model: the generation config it would be loaded with."""
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:
        generation = GenerationConfig.from_model_config(model_config)
    return SimpleNamespace(generation_config=generation)


def _cache_bytes(model_config: Any, dtype: torch.dtype, longest: int, sequences: int) -> int:
    """Memory for all sequences at full length, within bounds; never less than for one."""
    c = model_config.get_text_config()
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    token = 2 * c.num_hidden_layers * heads * size * dtype.itemsize
    one = token * CPU_BLOCK * (math.ceil(longest / CPU_BLOCK) + 1)
    return int(max(one, min(one * sequences, CPU_CACHE_BYTES)))
