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
from functools import partial
from pathlib import Path
from typing import Any

import peft  # noqa: F401  (imported before the baseline)
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ppo_cli.algo.batch import TrainBatch
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import MiniBatch, Sampling
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.planning.memory.devices import ModelShapes, RunNeeds, read_shapes
from ppo_cli.planning.memory.plan import with_settings
from ppo_cli.records import Prompt
from tests.engine.packed_steps import annotated, make_batch, scored
from tests.settings import CPU, complete

PROMPT, RESPONSE, ROWS = 16, 48, 4
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {
        "vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 4,
        "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }),
    "llama": ("llama", {
        "vocab_size": 12000, "hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 6,
        "num_attention_heads": 5, "tie_word_embeddings": False,
    }),
    "mixtral": ("mixtral", {
        "vocab_size": 8192, "hidden_size": 384, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 6, "num_key_value_heads": 2, "num_local_experts": 8,
        "num_experts_per_tok": 2, "tie_word_embeddings": True,
    }),
    # What libraries take and give back between two runs is little beside it, even with an adapter.
    "wide": ("llama", {
        "vocab_size": 16000, "hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 6,
        "num_attention_heads": 10, "tie_word_embeddings": False,
    }),
}  # fmt: skip
CHECKPOINTING = {"model.enable_gradient_checkpointing": True}
UNPACKED = {"model.packing": False}
RLOO = {"algorithm.adv_estimator": "rloo"}
# Model, tokens of a micro-batch, and settings that differ from the usual ones.
CASES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("qwen2", 256, {}),
    ("qwen2", 128, UNPACKED | CHECKPOINTING),
    ("qwen2", 256, {"model.lora_rank": 8}),
    ("qwen2", 128, UNPACKED | RLOO),
    ("qwen2", 256, {"model.dtype": "bfloat16"}),
    ("llama", 256, {}),
    ("llama", 128, CHECKPOINTING),
    ("llama", 128, RLOO | {"actor.use_kl_loss": False}),
    ("mixtral", 128, CHECKPOINTING),
    ("mixtral", 256, {}),
    ("wide", 256, RLOO | UNPACKED | CHECKPOINTING | {"model.lora_rank": 8}),
)


def settings(path: str, tokens: int, others: dict[str, Any]) -> Config:
    alone = others.get("algorithm.adv_estimator") == "rloo"
    prompts = ROWS // (2 if alone else 1)
    sections = {
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
    return complete(with_settings(Config.model_validate(sections), others))


def batch() -> TrainBatch:
    """Rows of full length with made-up advantages, returns and old values."""
    rows = make_batch(((PROMPT, RESPONSE),) * ROWS, 0, vocabulary=100)
    logprobs, values = torch.full((ROWS, RESPONSE), -9.0), torch.randn(ROWS, RESPONSE)
    with_logprobs = annotated(
        rows, old_logprobs_BT=logprobs, ref_logprobs_BT=logprobs, values_BT=values
    )
    return scored(with_logprobs, 0, valid_B=torch.ones(ROWS, dtype=torch.bool))


def train(config: Config, steps: int) -> None:
    """Sample, annotate and update, all rows of full length."""
    engine = LocalEngine(config, load_tokenizer(str(model_folder("embedded"))), total_steps=steps)
    engine._sampler._eos_ids = engine._sampler._eos_ids[:0]  # responses do not end early
    rows = batch()
    ids = rows.input_ids_BL[:, :PROMPT].tolist()
    prompts = [Prompt(str(i), "", (), "", tuple(row)) for i, row in enumerate(ids)]
    for step in range(steps):
        sampling = Sampling(max_tokens=RESPONSE, seed=step)
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
    (host,) = RunNeeds(config, shapes, CPU).devices()
    return {"measured": status("VmHWM") - baseline, "counted": host.needed}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, (kind, sizes) in MODELS.items():
        # What a model leaves on the heap would be there for the runs that are measured.
        apart(partial(save, folder / name, kind, sizes))
    for case in CASES:
        apart(partial(show, folder, *case))


def save(folder: Path, kind: str, sizes: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[kind](**sizes, **SPECIAL)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


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
    main(Path(sys.argv[1]))
