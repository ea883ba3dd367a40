"""Random small models, prompts of random ids, and what a Hugging Face sampler draws from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from families.configs import FAMILIES as SWEPT
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ppo_cli.engine.base import Sampling
from ppo_cli.engine.samplers.hf import HFSampler
from ppo_cli.records import Prompt, Rollout

EOS, PAD, VOCAB = 1, 0, 48
IDS: dict[str, Any] = {
    "vocab_size": VOCAB, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": 2,
}  # fmt: skip
SHAPE = IDS | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.4,
}  # fmt: skip
SLIDING = {
    "head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
PLAIN: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True}, "llama": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 8}, "gemma2": SLIDING, "gemma3_text": SLIDING, "gpt2": {},
}  # fmt: skip
# Other families are those of scripts/families, with what makes mistakes of states show.
FAST = {"time_step_limit": (0.5, 0.9)}
STATES: dict[str, dict[str, Any]] = {
    "qwen3_next": {}, "qwen3_5_text": {}, "granitemoehybrid": {}, "bamba": {}, "jamba": {},
    "mamba": {}, "falcon_mamba": {}, "mamba2": FAST, "falcon_h1": FAST, "lfm2_moe": {},
    "lfm2": {"conv_bias": True},  # with biases, padding would not stay zero
    "nemotron_h": {"time_step_min": 0.6}, "zamba2": {"time_step_min": 0.6},
}  # fmt: skip
KEYS: dict[str, dict[str, Any]] = {
    "llama4_text": {}, "deepseek_v3": {}, "gemma4_text": {}, "bloom": {},
    "deepseek_v32": SWEPT["deepseek_v3"] | IDS | {
        "index_n_heads": 16, "index_head_dim": 16, "index_topk": 12,
    },
    "doge": {},  # its masks differ from head to head
}  # fmt: skip
# States in the modules, a cache class of the family, positions by columns or by ids.
WHOLE: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {}, "minimax": {}, "rwkv": {"attention_hidden_size": 32},
    "bart": {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "decoder_ffn_dim": 48,
             "decoder_attention_heads": 4, "encoder_attention_heads": 4},
    "roberta": {"is_decoder": True},
}  # fmt: skip
LENGTHS = (3, 19, 9, 5, 14, 1, 9, 12)


def build_model(family: str = "qwen2", attention: str = "", **changes: Any) -> Any:
    """A random model whose norms and biases are not what they start as."""
    usual = SHAPE | PLAIN.get(family, {})
    if family not in PLAIN:
        usual = SWEPT.get(family, SHAPE) | IDS | (STATES | KEYS | WHOLE)[family]
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**usual | changes), dtype=torch.float32,
        attn_implementation=attention or ("sdpa" if family in PLAIN else "eager"),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.eval()


def make_prompts(lengths: Sequence[int] = LENGTHS) -> list[Prompt]:
    draws = np.random.default_rng(3)
    return [
        Prompt(f"row-{i}", "", (), "", token_ids=tuple(draws.integers(3, VOCAB, length).tolist()))
        for i, length in enumerate(lengths)
    ]


def detokenize(ids: Iterable[int], context: Sequence[int] = ()) -> str:
    return "".join(f"{i} " for i in ids if i != EOS)


def make_sampler(model: Any, max_num_seqs: int = 64, **changes: Any) -> HFSampler:
    usual: dict[str, Any] = {
        "eos_token_ids": frozenset({EOS}), "pad_token_id": PAD, "detokenize": detokenize,
    }  # fmt: skip
    return HFSampler(model, max_num_seqs=max_num_seqs, **(usual | changes))


def sample(
    model: Any, prompts: list[Prompt], max_num_seqs: int = 64, **sampling: Any
) -> dict[tuple[str, int], Rollout]:
    """Rollouts by their keys, which must differ."""
    sampler = make_sampler(model, max_num_seqs)
    rollouts = list(sampler.generate(prompts, Sampling(**({"max_tokens": 12} | sampling)), 5))
    rollouts_by_key = {rollout.key: rollout for rollout in rollouts}
    assert len(rollouts_by_key) == len(rollouts)
    return rollouts_by_key


def tokens_of(rollouts: dict[tuple[str, int], Rollout]) -> dict[tuple[str, int], tuple[int, ...]]:
    return {key: rollout.token_ids for key, rollout in rollouts.items()}


@torch.no_grad()
def forward_logprobs(model: Any, rollout: Rollout, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of the response in a forward pass of this row alone, without a cache."""
    start = len(rollout.prompt.token_ids)
    ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].float()
    logprobs = (logits / temperature).log_softmax(-1)
    picked: np.ndarray = logprobs.gather(-1, ids[0, start:, None])[:, 0].numpy()
    return picked


def logprob_gap(model: Any, rollouts: Iterable[Rollout], temperature: float = 1.0) -> float:
    """The largest difference between the sampler's log-probs and those of each row alone."""
    return max(
        float(np.abs(r.sampler_logprobs - forward_logprobs(model, r, temperature)).max())
        for r in rollouts
    )
