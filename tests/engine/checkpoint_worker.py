"""One rank of a few that writes a checkpoint, reads one, or both.

Run as `python checkpoint_worker.py RANK SIZE FOLDER write` or `... FOLDER read TENSOR SHARD`, where
the last two are sizes of the layout; the ranks meet over files.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from ppo_cli.config.schema.algorithm import Optim, Sharding
from ppo_cli.engine.checkpoint import TrainedModel, restore, stored_tensors, take_snapshot
from ppo_cli.engine.device import Compute
from ppo_cli.engine.models import load_policy
from ppo_cli.engine.models.value_models import load_value_model
from ppo_cli.engine.ranks import Ranks, join_ranks
from ppo_cli.engine.sharding.load import load_sharded
from ppo_cli.engine.sharding.tensors import gather_copy
from ppo_cli.errors import ModelError
from tests.engine.packed_steps import build_optimizer

CPU = Compute(torch.device("cpu"), torch.float32)


def join(
    rank: int, size: int, folder: Path, name: str, tensor_size: int = 1, shard_size: int = -1
) -> Ranks:
    return join_ranks(
        rank, size, init_method=f"file://{folder / name}", device=CPU.device,
        tensor_size=tensor_size, shard_size=shard_size, timeout_s=60,
    )  # fmt: skip


def load(folder: Path, ranks: Ranks) -> list[TrainedModel]:
    """An actor and a critic in pieces, with fresh optimizers."""
    parts = []
    for name, loader in (("actor", load_policy), ("critic", load_value_model)):
        model = load_sharded(loader, str(folder / "model"), ranks, Sharding(), CPU).model
        optimizer = build_optimizer(model, Optim(lr=0.01), grad_clip=1.0, ranks=ranks)
        parts.append(TrainedModel(name, stored_tensors(model), optimizer, {}, model))
    return parts


def move(part: TrainedModel) -> None:
    """An optimizer step on gradients that are other in every element."""
    for tensor in part.weights.values():
        tensor.grad = (tensor.detach() * 3 + 1).clone()
    part.optimizer.apply()


def write(rank: int, size: int, folder: Path) -> None:
    ranks = join(rank, size, folder, "meet-write")
    parts = load(folder, ranks)
    for part in parts:
        move(part)
        move(part)
    snapshot = take_snapshot(parts, {"weight_version": 7}, ranks)
    truth = {
        f"{part.name}.{n}": gather_copy(t)
        for part in parts
        for n, t in (*part.weights.items(), *part.optimizer.moments().items())
    }
    for part in parts:  # after the snapshot: must not be seen in the files
        move(part)
    snapshot.write_in_background(folder / "written").result(60)
    if rank == 0:
        torch.save(truth, folder / "truth.pt")
    refuse_damage(folder, ranks, parts)
    torch.distributed.destroy_process_group()
    # The same checkpoint, read by ranks that hold every layer together.
    ranks = join(rank, size, folder, "meet-tensor", tensor_size=2)
    copy(folder, ranks, "tensor")
    torch.distributed.destroy_process_group()


def refuse_damage(folder: Path, ranks: Ranks, parts: list[TrainedModel]) -> None:
    """Every rank is told what the first has seen, and none waits for another."""
    torch.distributed.barrier()
    if ranks.rank == 0:
        shutil.copytree(folder / "written", folder / "damaged")
        (folder / "damaged/critic/model-00002-of-00002.safetensors").write_bytes(b"half")
    with pytest.raises(ModelError, match=r"critic/model-00002-of-00002\.safetensors cannot be"):
        restore(folder / "damaged", parts, ranks)


def copy(folder: Path, ranks: Ranks, name: str) -> None:
    """Read the checkpoint and write it again: all of it must be there, from wherever it was."""
    parts = load(folder, ranks)
    # The others may be on nodes that do not see the folder.
    seen = folder / ("nowhere" if ranks.rank else "written")
    assert restore(seen, parts, ranks) == {"weight_version": 7}
    take_snapshot(parts, {}, ranks, writers=2).write(folder / name)


def main(rank: int, size: int, folder: Path, what: str, *layout: str) -> None:
    if what == "write":
        write(rank, size, folder)
        return
    name = "-".join((str(size), *layout))
    ranks = join(rank, size, folder, f"meet-{name}", *map(int, layout))
    copy(folder, ranks, name)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
