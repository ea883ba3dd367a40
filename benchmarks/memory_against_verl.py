"""Peak memory and collectives of one update of a 7B actor and critic on 8 GPUs, ours and verl's.

    # verl/bin/python is an environment with this package and verl; CONTRIBUTING.md says how.
    python benchmarks/memory_against_verl.py --verl verl/bin/python

Both engines run as rank 0 on the simulated device of `ppo plan --simulate`: no GPU, no weights,
no numbers. The settings are those of presets/qwen2.5-7b-8gpu.yaml, and verl gets what
`ppo bridge verl` makes of them. Each update is of two micro-batches of full rows. Counted is what
the model that is updated takes; the other one is at rest in both engines.

What stands in for verl's GPU kernels allocates what they do: flash attention (its output and a
float32 number for each token and head) and flash-attn's cross entropy, which writes the gradient
over the logits. verl computes no entropy, as it does by default. Its loss, a few numbers for each
token, is a sum here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = (ROOT, ROOT / "benchmarks", ROOT / "tests" / "extras" / "bridge")
PRESET = ROOT / "presets" / "qwen2.5-7b-8gpu.yaml"
TURNS = 2
NONE = {"calls": 0, "bytes": 0}
QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
    "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip


def measure_verl(folder: Path) -> dict[str, Any]:
    """Role -> rest, peak and collectives of verl's FSDP2 engine."""
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "HF_HUB_OFFLINE": "1",
        "VERL_USE_EXTERNAL_MODULES": "simulated_platform", "VERL_PLATFORM": "simulated",
        "VERL_ENGINE_DEVICE": "cuda",
    }  # fmt: skip
    import hydra
    import torch

    from ppo_cli.extras.lab.simulation.device import Simulator, fake_ranks, register

    register()  # the platform of verl names the device
    import verl
    from simulated_platform import put_in_kernels
    from verl.trainer.config import CheckpointConfig
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine import EngineRegistry

    files = str(Path(verl.__file__).parent / "trainer" / "config")
    with hydra.initialize_config_dir(files, version_base=None):
        lines = (folder / "overrides").read_text().splitlines()
        config = hydra.compose("ppo_trainer", overrides=lines)
    results: dict[str, Any] = {}
    engines = []  # as in training, the actor stays while the critic is updated
    simulator = Simulator()
    put_in_kernels(simulator)
    parts = {"actor": config.actor_rollout_ref.actor, "critic": config.critic}
    with fake_ranks(), simulator:
        torch.distributed.init_process_group("", init_method="", rank=0, world_size=8)
        for role, part in parts.items():
            settings = omega_conf_to_dataclass(part)
            model = omega_conf_to_dataclass(
                config.actor_rollout_ref.model if role == "actor" else part.model
            )
            model.model_type = "language_model" if role == "actor" else "value_model"
            before = simulator.device_memory.total_bytes
            engine = EngineRegistry.new(
                model_type=model.model_type, backend="fsdp2", model_config=model,
                engine_config=settings.engine, optimizer_config=settings.optim,
                checkpoint_config=CheckpointConfig(),
            )  # fmt: skip
            engine.initialize()
            engines.append(engine)
            tokens = part.ppo_max_token_len_per_gpu
            results[role] = measure_update(
                simulator, before, lambda e=engine, t=tokens: update_verl(e, t, config)
            )
    return results


def measure_update(simulator: Any, before: int, update: Any) -> dict[str, Any]:
    """What the second of two updates takes beside what was there `before` the model."""
    memory, collectives = simulator.device_memory, simulator.collectives
    for _ in range(2):
        memory.restart()
        collectives.clear()
        update()
    return {
        "rest_bytes": memory.total_bytes - before,
        "peak_bytes": memory.peak_bytes - before,
        "collectives": collectives.summarise(),
    }


def update_verl(engine: Any, tokens: int, config: Any) -> None:
    """One `train_batch` of full rows, in `TURNS` micro-batches of so many tokens."""
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    rows = TURNS * (tokens // (prompt + response))
    ids = torch.ones(rows, prompt + response, dtype=torch.int64)
    numbers = torch.zeros(rows, response)
    tensors = {
        "prompts": ids[:, :prompt], "responses": ids[:, prompt:], "input_ids": ids,
        "attention_mask": ids, "position_ids": ids.cumsum(1) - 1,
        "response_mask": ids[:, prompt:], "old_log_probs": numbers, "ref_log_prob": numbers,
        "advantages": numbers, "returns": numbers, "values": numbers,
    }  # fmt: skip
    data = left_right_2_no_padding(TensorDict(tensors, batch_size=rows))
    tu.assign_non_tensor(
        data, use_dynamic_bsz=True, max_token_len_per_gpu=tokens, use_remove_padding=True,
        temperature=1.0, calculate_entropy=False, global_batch_size=rows * 8,
    )  # fmt: skip
    with engine.train_mode():
        engine.train_batch(data, None)


def measure_ours(config: Any) -> dict[str, Any]:
    """Role -> rest, peak and collectives of our learner, as `ppo plan --simulate` measures them."""
    from ppo_cli.config.schema.keys import with_settings

    actor_alone = run_simulation(with_settings(config, {"algorithm.adv_estimator": "grpo"}))
    both = run_simulation(config)
    rest = {"actor": actor_alone["rest_bytes"]}
    rest["critic"] = both["rest_bytes"] - rest["actor"]
    results = {}
    for role, others in (("actor", rest["critic"]), ("critic", rest["actor"])):
        phase = both["phases"][f"update of the {role}"]
        results[role] = {
            "rest_bytes": rest[role],
            "peak_bytes": phase["peak_bytes"] - others,
            "collectives": {
                kind: {what: TURNS * count for what, count in counts.items()}
                for kind, counts in phase["collectives"].items()
            },
        }
    return results


def run_simulation(config: Any) -> dict[str, Any]:
    """The measurements of a run, made in a process of its own."""
    output = subprocess.run(
        [sys.executable, "-m", "ppo_cli.extras.lab.simulation.steps"], check=True, text=True,
        input=config.model_dump_json(), stdout=subprocess.PIPE, cwd=ROOT,
    ).stdout  # fmt: skip
    last = json.loads(output.splitlines()[-1])
    return dict(last["result"])


def show(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """A table, a line for each figure of each role."""
    print(f"{'':32}{'ours':>9}{'verl':>9}{'ratio':>8}")
    for role in ("actor", "critic"):
        figures = {f"{role}, {what}": (ours[role][f"{what}_bytes"] / 1e9,
                                       theirs[role][f"{what}_bytes"] / 1e9)
                   for what in ("rest", "peak")}  # fmt: skip
        for kind in ("all-gather", "reduce-scatter", "all-reduce on the CPU"):
            pair = [of[role]["collectives"].get(kind, NONE) for of in (ours, theirs)]
            figures[f"{role}, {kind}"] = (pair[0]["calls"], pair[1]["calls"])
            if kind != "all-reduce on the CPU":  # of one number
                figures[f"{role}, {kind}, GB"] = (pair[0]["bytes"] / 1e9, pair[1]["bytes"] / 1e9)
        for name, (mine, other) in figures.items():
            ratio = f"{mine / other:8.2f}" if other else f"{'-':>8}"
            print(f"{name:32}{mine:9.2f}{other:9.2f}{ratio}")


def main() -> None:
    """Write the model's config and the settings, run both engines, print the table."""
    if sys.argv[1:2] == ["--as-verl"]:
        print(json.dumps(measure_verl(Path(sys.argv[2]))), flush=True)
        os._exit(0)  # threads of autograd cannot be joined where the device is in Python
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--verl", required=True, help="the Python of an environment with verl")
    options = parser.parse_args()
    from ppo_cli.extras.migrate.bridge.overrides import build_overrides
    from ppo_cli.machine.machine import Machine
    from ppo_cli.planning.resolve import resolve

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "ppo_cli" / "embedded" / "model", folder / "model")
        (folder / "model" / "model.safetensors").unlink()
        (folder / "model" / "config.json").write_text(json.dumps(QWEN_7B))
        lines = [f"model.path={folder / 'model'}", "data.train_files=p.jsonl"]

        def settings(*more: str) -> Any:
            return resolve(
                flags={}, preset=None, config_files=[PRESET], overrides=[*lines, *more], environ={}
            ).config

        overrides = build_overrides(settings("trainer.engine=verl"), Machine.here()).lines(folder)
        (folder / "overrides").write_text("".join(f"{line}\n" for line in overrides))
        output = subprocess.run(
            [options.verl, __file__, "--as-verl", name], check=True, text=True,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PACKAGES))},
        ).stdout  # fmt: skip
        show(measure_ours(settings()), json.loads(output.splitlines()[-1]))


if __name__ == "__main__":
    main()
