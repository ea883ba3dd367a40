"""The checks of the self-test: each is one row here.

To add one, write its function in `ppo_cli/self_test/checks/` and add a row to `CHECKS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppo_cli.machine.device_record import FEATURES, Feature
from ppo_cli.self_test.results import Outcome

# Devices that a check applies to.
BOTH, GPUS = ("cpu", "cuda"), ("cuda",)
# The package of the checks, in which MODULE:NAME is looked up.
ROOM = "ppo_cli.self_test.checks"


@dataclass(frozen=True)
class Check:
    """A check: `function` is MODULE:NAME in `checks`; `compares` is for the documentation.

    `seconds` is its usual time on two CPU cores; after `limit_s` its process is killed. On GPUs it
    `proves` features.
    """

    name: str
    function: str
    compares: str
    seconds: float
    devices: tuple[str, ...] = BOTH
    proves: tuple[Feature, ...] = ()
    needs: str = ""  # package
    limit_s: float = 180.0


# In order of what they prove: a later check relies on the parts of earlier ones.
CHECKS = (
    Check(
        "devices", "devices:check_devices",
        "GPUs by NVML, by CUDA and in the plan; free memory", 5,
    ),
    Check(
        "products", "kernels:check_products",
        "matrix products, log-probs over the vocabulary and embedding gradients with float64", 4,
    ),
    Check(
        "attention", "kernels:check_attention",
        "packed rows with each row in float64, forward and backward, for each head size", 2,
        proves=("packed_attention", "shared_prompts"),
    ),
    Check(
        "training steps", "training:check_training",
        "PPO steps (critic, KL loss, LoRA, checkpointing, float16) and the weights that samplers "
        "get with their formulas in float64", 12,
        proves=("packed_attention", "shared_prompts", "float16"),
    ),
    Check(
        "compiled layers", "training:check_compiled",
        "PPO steps of compiled layers, also with LoRA and checkpointing, with the same formulas",
        60, devices=GPUS, proves=("compiled_layers",), limit_s=600.0,
    ),
    Check(
        "optimizer", "kernels:check_optimizer",
        "fused AdamW, clipping and schedule with the formulas in float64", 1,
    ),
    Check(
        "out of memory", "memory:check_out_of_memory",
        "a step that is too large is halved, finishes and leaves no memory behind", 10,
        devices=GPUS,
    ),
    Check(
        "allocator", "memory:check_expandable_segments",
        "a step and memory shared between processes with expandable segments", 15,
        devices=GPUS, proves=("expandable_segments",),
    ),
    Check(
        "collectives", "collectives:check_collectives",
        "every collective with the numbers it must give; steps by FSDP, HSDP and tensor "
        "parallelism with one process", 20,
        proves=("keep_gathered",),
    ),
    Check(
        "save and resume", "training:check_resume",
        "a resumed run and an offloaded one with one that went on, bit for bit on a CPU", 6,
    ),
    Check(
        "sampler", "samplers:check_hf_sampler",
        "tokens, their end and log-probs with the model in float64; seeds; new weights", 5,
    ),
    Check(
        "vLLM sampler", "samplers:check_vllm_sampler",
        "the same, and prompts of three blocks of its cache after new weights; on GPUs sleep, "
        "wake-up and LoRA adapters, with compiled graphs", 35, proves=("sleep",), needs="vllm",
        limit_s=600.0,
    ),
    Check(
        "Ray ranks", "clusters:check_ray",
        "two steps of learner ranks and a sampler under Ray with one process", 25,
    ),
    Check(
        "weight transfer", "clusters:check_transfers",
        "log-probs of vLLM and of the trainer after each publish: CUDA IPC, NCCL; memory and "
        "gloo on a CPU", 90,
        proves=("transfer_ipc", "transfer_nccl"), needs="vllm", limit_s=900.0,
    ),
    Check(
        "publish memory", "clusters:check_publish_memory",
        "the peak of GPU memory while weights are published with the plan", 45,
        devices=GPUS, needs="vllm", limit_s=600.0,
    ),
    Check(
        "code sandbox", "sandbox:check_sandbox",
        "programs that read, write, connect or fork inside the sandbox, with what they may do", 3,
    ),
)  # fmt: skip


def list_proven(outcomes: list[Outcome]) -> list[Feature]:
    """Return the features that all of their checks have proven."""
    # A feature may have several checks, and needs all of them.
    proven_by = {outcome.check: outcome.proven for outcome in outcomes}
    # Which checks must prove each feature.
    provers = {f: [check.name for check in CHECKS if f in check.proves] for f in FEATURES}
    return [f for f in FEATURES if all(f in proven_by.get(name, ()) for name in provers[f])]
