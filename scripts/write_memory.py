"""Writes docs/memory.md: the memory of known models on known GPUs, as `ppo plan` counts it.

python scripts/write_memory.py [FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ppo_cli.config.models.remote_configs import read_table
from ppo_cli.config.models.shape import Shape
from ppo_cli.config.schema.keys import with_settings
from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle
from ppo_cli.machine.machine import Machine
from ppo_cli.planning.memory.devices import RESERVE, ModelShapes
from ppo_cli.planning.memory.plan import estimate_memory

PAGE = Path(__file__).parent.parent / "docs" / "memory.md"
MODELS = {
    "Qwen2.5-0.5B": "Qwen/Qwen2.5-0.5B",
    "Qwen2.5-1.5B": "Qwen/Qwen2.5-1.5B",
    "Qwen2.5-3B": "Qwen/Qwen2.5-3B",
    "Qwen2.5-7B": "Qwen/Qwen2.5-7B",
    "Qwen2.5-14B": "Qwen/Qwen2.5-14B",
    "Qwen2.5-32B": "Qwen/Qwen2.5-32B",
    "Qwen2.5-72B": "Qwen/Qwen2.5-72B",
    "Llama-3-8B": "meta-llama/Meta-Llama-3-8B",
    "Llama-3-70B": "meta-llama/Meta-Llama-3-70B",
}
DEVICES = (1, 2, 4, 8, 16, 32, 64)
SIZES = (8, 12, 16, 24, 40, 80, 141)  # GB, as GPUs are sold
SHARES = (0.4, 0.8)  # of a GPU for the sampler
BUDGET = 4096  # tokens of a micro-batch
# A letter for each way to train, the plainest first.
WAYS: dict[str, dict[str, Any]] = {
    "F": {},
    "O": {
        f"{model}.fsdp_config.{what}": True
        for model in ("actor", "critic")
        for what in ("optimizer_offload", "param_offload")
    }
    | {"ref.param_offload": True},
    "L": {"model.lora_rank": 16, "algorithm.adv_estimator": "grpo", "rollout.n": 4},
}
INTRODUCTION = f"""# Memory

`ppo plan` prints the memory of each role on a device, whether the run fits, and the smallest change
that makes it fit. It reads only `config.json`, so you can ask before you download the weights or
rent the GPU; `--device_memory` plans for another GPU than yours:

```bash
ppo plan --model Qwen/Qwen2.5-7B --n_gpus 8
ppo plan --model Qwen/Qwen2.5-7B --n_gpus 8 --device_memory 40GB
```

`config.json` of a hub model is fetched within three seconds and kept in
`~/.cache/ppo-cli/configs`; `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` apply. Without the hub, a
table of {len(read_table())} known models answers
([shapes.toml](../ppo_cli/config/models/shapes.toml)). The plan says which it was.

| on each device | precision |
|---|---|
| trained weights, gradients and two moments | \
always float32: 16 bytes per trained parameter |
| frozen weights: the reference, the base of an adapter | \
the computing precision (`--dtype`): 2 bytes per parameter in bfloat16 |
| activations and logits of the largest micro-batch | the computing precision |
| the sampler's weights and cache | the computing precision |

- {RESERVE:.0%} of a device stays free for libraries and drivers, at least 0.5 GiB per CUDA context
  and per NCCL group. vLLM's share must have room for its weights and the cache of one row.
- While new weights are sent to the samplers, their weights are in memory but not their cache; the
  learner needs room for the largest tensors and the buffers of the transfer.
- On machines with GPUs, host memory is counted too: offloaded weights and moments, a checkpoint
  while it is written (12 bytes per trained parameter), sleeping samplers, and the model that the
  first rank reads.
- State-space and hybrid models, latent attention (MLA) and embeddings per layer (Gemma 3n, Gemma
  4) are not counted; the plan prints a note.

Frozen weights in bfloat16 do not change results, because products round all weights to bfloat16.

**What was measured.** On the CPU, the counted memory was within 15 % of the measured peak in eleven
runs of models with 12 to 50 million parameters (`tests/engine/test_memory_peaks.py`). On GPUs
nothing was measured: the counts and all tables below are computed. They agree within 10 % with a
[simulation](#simulate-a-step) of the learner in 36 configurations from 0.5B to 72B
(`tests/config/test_simulated_memory.py`).

## GPUs with less than 24 GB

What fits on one GPU, with 512 + 512 tokens and vLLM as the sampler:

| GPU | PPO with all weights, offloaded to host memory between uses | LoRA with GRPO |
|---|---|---|
| 8 GB | - | 0.5B |
| 12 GB | 0.5B (and 23 GiB of host memory) | 1.5B |
| 16 GB | 0.5B | 1.5B, 3B |

Without vLLM, also limit the responses that are sampled at the same time:

```bash
ppo plan --model Qwen/Qwen2.5-0.5B --n_gpus 1 --device_memory 12GB rollout.max_num_seqs=128 \\
  actor.fsdp_config.param_offload=true actor.fsdp_config.optimizer_offload=true \\
  critic.fsdp_config.param_offload=true critic.fsdp_config.optimizer_offload=true \\
  ref.param_offload=true
ppo plan --model Qwen/Qwen2.5-1.5B --n_gpus 1 --device_memory 12GB rollout.max_num_seqs=128 \\
  --lora_rank 16 --adv_estimator grpo --rollout_n 8
```

`--preset lora-low-memory` sets LoRA and GRPO. What else saves memory, in the order to try it:
[out of memory](troubleshooting.md#out-of-memory).

## Simulate a step

```bash
ppo plan --preset qwen2.5-7b-8gpu --simulate --device_memory 80GB
```

With `--simulate` the learner itself runs: it loads the models, annotates and updates as rank 0 of
the planned GPUs, on tensors with a shape, a type and a device but no numbers. Every storage and
every collective is counted. No GPU is needed or used. 0.5B on one GPU takes 20 seconds of one core.
For each phase it prints the peak next to the plan's count, and its parts: parameters and moments,
weights gathered from other ranks, gradients before and after the ranks add them up, activations (of
forward passes, and computed again), logits, the backward pass, and the optimizer.

Each rank has two micro-batches as full as the settings allow, of rows of the maximum length.
`--json` has all results under `simulation`, in bytes. To plan for GPUs of another machine, set
`--n_gpus` (several nodes: `--nnodes 8 --node_rank 0 --master_addr localhost`) and their memory with
`--device_memory`, in GB (10^9 bytes) or GiB.

Each phase also has the work of a micro-batch: kernels that are started, FLOPs of products, bytes
that kernels read and write, and from these the seconds on the GPUs here (else on an H100 and an
A100), the share of their FLOP/s (recomputation counts), and what bounds it. Collectives
are left out. On the one H100 that was measured, packed rows of 0.5B
took 8 % more time than that ([lab book](../notes/lab_book.md)).

**Not simulated**: sampling, publishing and reward models (the plan's count is used); CUDA's context
(about 0.5 GB per process), buffers of NCCL and cuBLAS, and fragmentation; GPUs before compute
capability 8.0. `AdamW8bit` and 4-bit weights are refused.

## What fits where

PPO with a critic of the actor's size, a reference and a vLLM sampler on the same GPUs (8 a node,
40 % of each for the sampler, 80 % where its weights take more), FSDP over all of them, 512 + 512
tokens, micro-batches of {BUDGET} tokens, gradient checkpointing. Sizes are in GB (10^9 bytes), as
GPUs are sold. Each cell has the fewest GPUs, of 1, 2, 4 … 64, for each way to train:

- **F** everything in full on the GPU
- **O** weights and moments of all models offloaded: host memory must hold 60 bytes a parameter of
  the model (24 of them while a checkpoint is written), divided by the nodes, which is not checked
  here
- **L** LoRA of rank 16 with GRPO: no critic, and the reference is the model without its adapter
- **-** none of these; a smaller model or shorter rows

This page is written by `python scripts/write_memory.py` from published shapes.
"""


def shape_of(name: str) -> Shape:
    """The shape of a known model."""
    shape = Shape.from_config(read_table()[MODELS[name]])
    assert shape is not None
    return shape


def settings(name: str, devices: int) -> Config:
    """A run on that many GPUs; a sampler spans as few as hold its weights well."""
    nodes = max(1, devices // 8)
    heads = shape_of(name).heads
    span = 1
    while 2 * span <= min(8, devices) and heads % (2 * span) == 0:
        if 2 * shape_of(name).parameters() / span < 4e9:
            break
        span *= 2
    budget = {"ppo_max_token_len_per_gpu": BUDGET}
    return Config.model_validate(
        {
            "data": {"train_batch_size": 256},
            "actor": {"ppo_mini_batch_size": 256} | budget,
            "critic": budget,
            "ref": {"log_prob_max_token_len_per_gpu": BUDGET},
            "model": {"enable_gradient_checkpointing": True},
            "rollout": {
                "name": "vllm", "tensor_model_parallel_size": span,
                "gpu_memory_utilization": SHARES[0], "weight_transfer": "memory",
                "sleep": "offload",
            },
            "trainer": {"engine": "ray", "n_gpus_per_node": devices // nodes, "nnodes": nodes},
        }
    )  # fmt: skip


def way(name: str, devices: int, size: int) -> str:
    """The first way in which a model trains on these GPUs."""
    shape = shape_of(name)
    shapes, config = ModelShapes(shape, shape, shape), settings(name, devices)
    there = Machine().assume_memory(size * 10**9)

    def fits(changes: dict[str, Any]) -> bool | None:
        changed = settle(with_settings(config, changes), there).config
        return estimate_memory(changed, shapes, there).fits

    found = (
        letter
        for letter, how in WAYS.items()
        for share in SHARES
        if fits(how | {"rollout.gpu_memory_utilization": share})
    )
    return next(found, "-")


def needs(name: str, devices: int) -> str:
    """What the heaviest phase of training takes of each GPU, beside the sampler."""
    shape = shape_of(name)
    config = settle(settings(name, devices), Machine()).config
    (place,) = estimate_memory(config, ModelShapes(shape, shape, shape), Machine()).places
    sampling = ("rollout", "publishing")
    most = max(need for phase, need in place.phases.items() if phase not in sampling)
    return f"{most / 1e9:.0f}"


def fewest(name: str, size: int) -> str:
    """The fewest GPUs of a size for each way in which a model trains on them."""
    counts: dict[str, int] = {}
    for devices in DEVICES:
        counts.setdefault(way(name, devices, size), devices)
    counts.pop("-", None)
    return ", ".join(f"{letter} {devices}" for letter, devices in counts.items()) or "-"


def tables() -> Iterator[str]:
    """The lines of both tables."""
    yield f"| GPUs of | {' | '.join(f'{size} GB' for size in SIZES)} |"
    yield "|---" * (len(SIZES) + 1) + "|"
    for name in MODELS:
        yield f"| {name} | {' | '.join(fewest(name, size) for size in SIZES)} |"
    yield from ("", "GB that training in full takes of each GPU, by the number of GPUs:", "")
    yield f"| model | {' | '.join(map(str, DEVICES))} |"
    yield "|---" * (len(DEVICES) + 1) + "|"
    for name in MODELS:
        yield f"| {name} | {' | '.join(needs(name, n) for n in DEVICES)} |"
    yield ""


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *tables()])


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.write_text(page(), encoding="utf-8")
