"""One update of actor and critic by verl's FSDP engine, on the CPU: run in a process of its own.

python tests/extras/migrate/bridge/verl_update.py FOLDER: reads `overrides` and `batch.pt` there and
writes `verl.json` with losses and gradient norms.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform", "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
}  # fmt: skip


def make_data(batch: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Lay our batch out as verl does: prompts padded left, responses right, then unpadded."""
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    longest = int(batch["prompt_len_B"].max())
    width = batch["response_mask_BT"].shape[1]
    rows = len(batch["prompt_len_B"])
    ids = torch.zeros(rows, longest + width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for b in range(rows):
        p, t = int(batch["prompt_len_B"][b]), int(batch["response_len_B"][b])
        ids[b, longest - p : longest + t] = batch["input_ids_BL"][b, : p + t]
        mask[b, longest - p : longest + t] = 1
    tensors = {
        "prompts": ids[:, :longest], "responses": ids[:, longest:], "input_ids": ids,
        "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": batch["loss_mask_BT"].long(),
        "old_log_probs": batch["old_logprobs_BT"], "ref_log_prob": batch["ref_logprobs_BT"],
        "advantages": batch["advantages_BT"], "returns": batch["returns_BT"],
        "values": batch["values_BT"],
    }  # fmt: skip
    data = left_right_2_no_padding(TensorDict(tensors, batch_size=rows))
    tu.assign_non_tensor(data, **settings)
    return data


def without_flash_attention() -> None:
    """verl names that kernel for every critic, whatever the settings; it is for GPUs only."""
    from transformers import AutoModelForTokenClassification

    load = AutoModelForTokenClassification.from_pretrained

    def load_with_sdpa(*args: Any, **named: Any) -> Any:
        return load(*args, **named | {"attn_implementation": "sdpa"})

    AutoModelForTokenClassification.from_pretrained = load_with_sdpa


def plain(value: Any) -> float:
    value = value.aggregate() if hasattr(value, "aggregate") else value
    value = sum(value) if isinstance(value, list) else value
    return float(value)


def make_updates(folder: Path, rows: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """An update of verl's actor and one of its critic, of micro-batches of so many rows."""
    import hydra
    import torch
    import verl
    from verl.trainer.config import CheckpointConfig
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine import EngineRegistry
    from verl.workers.utils.losses import ppo_loss, value_loss

    without_flash_attention()
    meeting = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    files = str(Path(verl.__file__).parent / "trainer" / "config")
    with hydra.initialize_config_dir(files, version_base=None):
        lines = (folder / "overrides").read_text().splitlines()
        config = hydra.compose("ppo_trainer", overrides=lines)
    batch = torch.load(folder / "batch.pt")
    updates: dict[str, Callable[[], dict[str, Any]]] = {}
    parts = {"language_model": config.actor_rollout_ref.actor, "value_model": config.critic}
    for kind, part in parts.items():
        actor = kind == "language_model"
        settings = omega_conf_to_dataclass(part)
        model = omega_conf_to_dataclass(config.actor_rollout_ref.model if actor else part.model)
        model.model_type = kind
        engine = EngineRegistry.new(
            model_type=kind, backend="fsdp2", model_config=model,
            engine_config=settings.engine, optimizer_config=settings.optim,
            checkpoint_config=CheckpointConfig(),
        )  # fmt: skip
        engine.initialize()
        named = {
            "use_dynamic_bsz": False, "micro_batch_size_per_gpu": rows, "use_remove_padding": False,
            "temperature": config.actor_rollout_ref.rollout.temperature,
            "calculate_entropy": actor, "global_batch_size": len(batch["prompt_len_B"]),
        }  # fmt: skip
        loss = partial(ppo_loss if actor else value_loss, config=settings)

        def update(engine: Any = engine, named: Any = named, loss: Any = loss) -> dict[str, Any]:
            with engine.train_mode():
                metrics: dict[str, Any] = engine.train_batch(make_data(batch, named), loss)[
                    "metrics"
                ]
            return metrics

        updates[kind] = update
    return updates


def main(folder: Path) -> None:
    result = {
        f"{kind}/{name}": plain(value)
        for kind, update in make_updates(folder, rows=4).items()
        for name, value in update().items()
    }
    (folder / "verl.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
