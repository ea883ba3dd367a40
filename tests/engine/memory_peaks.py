"""Peaks of resident memory of short runs, one forked process after another; prints JSON lines.

    python tests/engine/memory_peaks.py FOLDER    # FOLDER takes the models

A process first trains the bundled model for a step, so that what libraries take for themselves is
there before the baseline.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft  # noqa: F401  (imported before the baseline)
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from ppo_cli.algo.batch import TrainBatch
from ppo_cli.config.memory.devices import ModelShapes, count_memory, read_shapes
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import MiniBatch, Sampling
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.records import Prompt

PROMPT, RESPONSE, ROWS = 16, 48, 4
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 256}
MODELS: dict[str, Any] = {
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=8192, hidden_size=384, intermediate_size=1536, num_hidden_layers=4,
            num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True, **SPECIAL,
        )
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=12000, hidden_size=320, intermediate_size=896, num_hidden_layers=6,
            num_attention_heads=5, tie_word_embeddings=False, **SPECIAL,
        )
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(
            vocab_size=8192, hidden_size=384, intermediate_size=512, num_hidden_layers=4,
            num_attention_heads=6, num_key_value_heads=2, num_local_experts=8,
            num_experts_per_tok=2, tie_word_embeddings=True, **SPECIAL,
        )
    ),
    # What libraries take and give back between two runs is little beside it, even with an adapter.
    "wide": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16000, hidden_size=640, intermediate_size=1792, num_hidden_layers=6,
            num_attention_heads=10, tie_word_embeddings=False, **SPECIAL,
        )
    ),
}  # fmt: skip
# Model, tokens of a micro-batch, and settings that differ from the usual ones.
CASES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("qwen2", 256, {}),
    ("qwen2", 128, {"model.packing": False, "model.enable_gradient_checkpointing": True}),
    ("qwen2", 256, {"model.lora_rank": 8}),
    ("qwen2", 128, {"model.packing": False, "algorithm.adv_estimator": "rloo"}),
    ("qwen2", 256, {"model.dtype": "bfloat16"}),
    ("llama", 256, {}),
    ("llama", 128, {"model.enable_gradient_checkpointing": True}),
    ("llama", 128, {"algorithm.adv_estimator": "rloo", "actor.use_kl_loss": False}),
    ("mixtral", 128, {"model.enable_gradient_checkpointing": True}),
    ("mixtral", 256, {}),
    (
        "wide", 256,
        {
            "algorithm.adv_estimator": "rloo", "model.lora_rank": 8, "model.packing": False,
            "model.enable_gradient_checkpointing": True,
        },
    ),
)  # fmt: skip


def settings(path: str, tokens: int, others: dict[str, Any]) -> Config:
    alone = others.get("algorithm.adv_estimator") == "rloo"
    prompts = ROWS // (2 if alone else 1)
    report: dict[str, Any] = {
        # oneDNN, the default from Zen 5 on, keeps 0.6 MB for each shape that it multiplies, of up
        # to 1,024; these lie between freed blocks, which are then of no use to larger tensors.
        "model": {
            "path": path, "enable_gradient_checkpointing": False, "dtype": "float32",
            "float32_matmul": "blas",
        },
        "data": {
            "max_prompt_length": PROMPT, "max_response_length": RESPONSE,
            "train_batch_size": prompts,
        },
        "algorithm": {"use_kl_in_reward": False},
        "actor": {
            "ppo_mini_batch_size": prompts, "ppo_max_token_len_per_gpu": tokens,
            "use_kl_loss": True,
        },
        "critic": {"ppo_max_token_len_per_gpu": tokens},
        "ref": {"log_prob_max_token_len_per_gpu": tokens},
        "rollout": {"name": "hf", "n": ROWS // prompts},
        "trainer": {"engine": "local"},
    }  # fmt: skip
    for key, value in others.items():
        section, name = key.split(".")
        report[section][name] = value
    return Config.model_validate(report)


def batch() -> TrainBatch:
    """Rows of full length with made-up advantages, returns and old values."""
    shape = (ROWS, RESPONSE)
    noise = ("values_BT", "advantages_BT", "returns_BT", "token_rewards_BT")
    flat = ("sampler_logprobs_BT", "old_logprobs_BT", "ref_logprobs_BT")
    return TrainBatch(
        **{name: torch.randn(shape) for name in noise},
        **{name: torch.full(shape, -9.0) for name in flat},
        input_ids_BL=torch.randint(5, 100, (ROWS, PROMPT + RESPONSE)),
        prompt_len_B=torch.full((ROWS,), PROMPT),
        response_len_B=torch.full((ROWS,), RESPONSE),
        response_mask_BT=torch.ones(shape, dtype=torch.bool),
        group_B=torch.arange(ROWS),
        weight_version_B=torch.zeros(ROWS, dtype=torch.int64),
        entropy_BT=torch.zeros(shape),
        full_kl_BT=None,
        scores_B=torch.zeros(ROWS),
        valid_B=torch.ones(ROWS, dtype=torch.bool),
        is_weight_BT=torch.ones(shape),
    )


def train(config: Config, steps: int) -> None:
    """Sample, annotate and update, all rows of full length."""
    engine = LocalEngine(config, load_tokenizer(str(model_folder("embedded"))), total_steps=steps)
    engine._sampler._eos_ids = engine._sampler._eos_ids[:0]  # responses do not end early
    rows = batch()
    ids = [tuple(row[:PROMPT]) for row in rows.input_ids_BL.tolist()]
    prompts = [
        Prompt(uid=str(i), text="", messages=None, rendered="", token_ids=row, extra_info={})
        for i, row in enumerate(ids)
    ]
    for step in range(steps):
        sampling = Sampling(
            n=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=RESPONSE, seed=step
        )
        assert len(list(engine.generate(prompts, sampling))) == ROWS
        engine.annotate(rows)
        engine.step(MiniBatch(rows, actor=True, critic=True))
        engine.publish()


def status(line: str) -> int:
    """A figure of this process in bytes: VmRSS now, VmHWM at its highest."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{line}:")[1].split()[0]) << 10


def measure(config: Config) -> dict[str, int]:
    train(settings("embedded", 512, {"model.lora_rank": 2}), 1)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what that step freed is not there for the next ones
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    baseline = status("VmRSS")
    train(config, 2)
    shapes = read_shapes(config)
    assert isinstance(shapes, ModelShapes)
    (host,) = count_memory(config, shapes, None)
    return {"measured": status("VmHWM") - baseline, "counted": host.needed}


def main(folder: Path, chosen: set[int]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, build in MODELS.items():
        if not (folder / name).exists():
            # What a model leaves on the heap would be there for the runs that are measured.
            apart(lambda name=name, build=build: build().save_pretrained(folder / name))
    for number, (model, tokens, others) in enumerate(CASES):
        if not chosen or number in chosen:
            apart(lambda case=(model, tokens, others): show(folder, *case))


def apart(work: Callable[[], object]) -> None:
    """Do it in a forked process."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        work()
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def show(folder: Path, model: str, tokens: int, others: dict[str, Any]) -> None:
    results = measure(settings(str(folder / model), tokens, others))
    report = {"case": f"{model}, {tokens} tokens, {others}", **results}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), {int(word) for word in sys.argv[2:]})
