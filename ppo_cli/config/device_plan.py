"""Who works where, as `ppo plan` and the start of a run tell it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ppo_cli.config.effective import (
    data_ranks,
    engine_name,
    learner_ranks,
    sampler_name,
    weight_transfer,
)
from ppo_cli.config.placement import Placement, describe, placement_of
from ppo_cli.config.schema import Config


@dataclass(frozen=True)
class DevicePlan:
    """The devices of a run: where it runs, who samples, and the sentences about it."""

    engine: str
    sampler: str
    learner_ranks: int
    data_ranks: int
    placement: Placement
    sentences: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON takes it."""
        told = asdict(self)
        where = told.pop("placement") | {"sleepers": self.placement.sleepers}
        return {"engine": told.pop("engine"), **where, **told}


def device_plan(config: Config, gpus: int | None = None) -> DevicePlan:
    """Work out who works where; `gpus` are those visible on this node, None looks."""
    placement = placement_of(config, gpus)
    engine, sampler = engine_name(config, gpus), sampler_name(config, gpus)
    said = describe(placement)
    if engine == "ray":
        said += [*_layout(config, gpus), f"the sampler is {sampler}, the processes are Ray's"]
    if sampler == "vllm":
        said.append(f"new weights travel by {weight_transfer(config, gpus)}")
    ranks = learner_ranks(config, gpus)
    return DevicePlan(engine, sampler, ranks, data_ranks(config, gpus), placement, tuple(said))


def _layout(config: Config, gpus: int | None) -> list[str]:
    """Tell how several ranks hold the models and share the rows."""
    ranks, rows = learner_ranks(config, gpus), data_ranks(config, gpus)
    tensor, size = config.trainer.tensor_parallel_size, config.actor.fsdp_config.fsdp_size
    shards = rows if size == -1 else size
    said = []
    if shards > 1:
        said.append(f"each model is sharded over {shards} ranks")
    if tensor > 1:
        said.append(f"each layer is split over {tensor} ranks")
    if shards < rows:
        said.append(f"there are {rows // shards} copies of each model")
    if 1 < rows < ranks:
        said.append(f"{rows} groups of ranks share the rows")
    elif rows > 1:
        said.append(f"{rows} ranks share the rows")
    return [", ".join(said)] if said else []
