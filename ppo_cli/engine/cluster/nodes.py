"""Nodes for a run: a placement group with one bundle a node, waited for with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from ppo_cli.engine.cluster.waits import TICK_S, Waits
from ppo_cli.errors import WorkerLost

TELL_EVERY_S = 10.0


def reserve_nodes(
    count: int, gpus: int, waits: Waits, timeout_s: float, tell: Callable[[str], None]
) -> PlacementGroup:
    """Reserve `gpus` GPUs on each of `count` nodes; bundle i is node i.

    Raises WorkerLost when they are not there in time, Interrupted when the user stops.
    """
    bundles: list[dict[str, float]] = []
    for _ in range(count):
        bundles.append({"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {}))
    if home := _home(gpus):
        bundles[0] |= {f"node:{home}": 0.001}  # the first node is ours: it holds the run folder
    group = placement_group(bundles, strategy="STRICT_SPREAD" if count > 1 else "PACK")
    ready, started, told = group.ready(), time.monotonic(), time.monotonic()
    try:
        while not ray.wait([ready], timeout=TICK_S)[0]:
            waits.check(may_stop=True)
            now = time.monotonic()
            if now - started > timeout_s:
                raise WorkerLost(
                    f"After {timeout_s:g} s still {waiting_for(count, gpus)}. Start the missing "
                    "nodes, or ask for fewer (--nnodes, --n_gpus); --node_timeout sets how long "
                    "to wait."
                )
            if now - told > TELL_EVERY_S:
                tell(waiting_for(count, gpus))
                told = now
    except BaseException:
        if waits.trouble() is None:
            remove_placement_group(group)
        raise
    return group


def waiting_for(count: int, gpus: int) -> str:
    """Say what is wanted and what the cluster has."""
    wanted = f"{count} node{'s' * (count > 1)}" + f" with {gpus} GPUs" * bool(gpus)
    rooms = [_resources(node) for node in ray.nodes() if node["Alive"]]
    fit = sum(1 for room in rooms if room.get("GPU", 0) >= gpus)
    has = f"the cluster has {fit}"
    if fit < len(rooms):
        counts = ", ".join(f"{room.get('GPU', 0):g}" for room in rooms)
        has += f" (GPUs of its {len(rooms)} nodes: {counts})"
    elif fit >= count:
        has += ", which another run may use"
    return f"waiting for {wanted}; {has}"


def _home(gpus: int) -> str | None:
    """The address of this node, if it can take part."""
    ours = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == ours and _resources(node).get("GPU", 0) >= gpus:
            return str(node["NodeManagerAddress"])
    return None


def _resources(node: dict[str, Any]) -> dict[str, float]:
    return dict(node["Resources"])
