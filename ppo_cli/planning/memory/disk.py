"""Disk space that the checkpoints of a run take: the size of one, and how many exist at once.

`ppo plan` shows it, and `ppo train` warns when the disk of the run folder has too little.
"""

from __future__ import annotations

import math
import os
import shutil
from typing import Any

from ppo_cli.config.models.shape import FLOAT, Shape
from ppo_cli.config.schema.algorithm import Actor, Critic, CriticModel
from ppo_cli.config.schema.run import Config, Trainer
from ppo_cli.paths import user_path
from ppo_cli.planning.memory.devices import ModelShapes, read_shapes
from ppo_cli.planning.memory.model import EIGHT_BITS
from ppo_cli.planning.memory.plan import format_size
from ppo_cli.planning.placement import PlanPart


def plan_disk(config: Config, steps: int | None) -> PlanPart:
    """Return the sizes and numbers of checkpoints, and the free space of the run folder's disk.

    `steps` is the length of the run, None if it is unknown.
    """
    folder = user_path(config.trainer.output_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    free = shutil.disk_usage(existing).free
    validates, pretrains = bool(config.data.val_files), config.pretrain_steps > 0
    at_most = _count_checkpoints(config.trainer, steps, validates, pretrains)
    # Weights and moments of all trained models, if their shapes are known.
    shapes, size = read_shapes(config), None
    if isinstance(shapes, ModelShapes):
        size = _model_bytes(shapes.actor, config.model, config.actor, head=True)
        if config.uses_critic:
            size += _model_bytes(shapes.critic, config.critic.model, config.critic, head=False)
    facts = {"checkpoint_bytes": size, "checkpoints_at_most": at_most, "free_bytes": free}
    if size is None:
        return PlanPart(("checkpoints: of unknown size",), facts)
    # A new checkpoint is complete before an old one is deleted.
    how_many = "all are kept"
    if at_most is not None:
        total = format_size(at_most * size)
        how_many = f"at most {at_most} ({total}) and one that is being written"
    on_disk = f"{format_size(free)} are free for {config.trainer.output_dir}"
    return PlanPart((f"checkpoints: {format_size(size)} each, {how_many}; {on_disk}",), facts)


def find_disk_shortage(disk: PlanPart, folder: str) -> list[str]:
    """Return a remark if the disk of a run folder has too little space for its checkpoints."""
    facts: dict[str, Any] = disk.facts
    size, at_most = facts["checkpoint_bytes"], facts["checkpoints_at_most"] or 1
    existing = len([*user_path(folder).glob("checkpoints/step_*")])
    if size is None or (need := size * max(1, at_most + 1 - existing)) <= facts["free_bytes"]:
        return []
    return [
        f"The disk of {folder} has {format_size(facts['free_bytes'])} free, and checkpoints "
        f"may take {format_size(need)} more: lower trainer.max_ckpt_to_keep, or choose another "
        "--output_dir."
    ]


def _model_bytes(shape: Shape, model: Any, part: Actor | Critic, *, head: bool) -> int:
    """Return the bytes of a model's float32 weights, or of its adapter, and of two moments."""
    rank, targets = model.lora_rank, model.target_modules
    weights = trained = shape.adapter(rank, targets) if rank else shape.parameters(head=head)
    if isinstance(model, CriticModel) and model.freeze_attention:
        trained = shape.layers * shape.mlp
    bits = EIGHT_BITS if part.optim.optimizer == "AdamW8bit" else 1
    return int(FLOAT * (weights + 2 * bits * trained))


def _count_checkpoints(
    trainer: Trainer, steps: int | None, validates: bool, pretrains: bool
) -> int | None:
    """Return how many checkpoints exist at most when none is being written; None if unknown."""
    # The newest ones, and the best of the validations.
    keep = trainer.kept_checkpoints
    if steps is None:
        return None if keep is None else keep + validates
    saves = math.ceil(steps / trainer.save_freq) if trainer.save_freq > 0 else 1
    saves += math.ceil(steps / trainer.test_freq) if validates and trainer.test_freq > 0 else 0
    # One more, before the first step, has the pretrained critic.
    kept = [] if keep is None else [keep + validates]
    return min(steps + pretrains, saves + pretrains, *kept)
