"""Whatever settings of a cluster are accepted come to a placement that can be served."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ppo_cli.config.device_roles import format_devices
from ppo_cli.config.schema.keys import nest_values
from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle
from ppo_cli.planning.findings.devices import check_devices
from ppo_cli.planning.findings.scene import Scene
from ppo_cli.planning.placement import (
    data_ranks,
    describe_placement,
    placement_of,
    plan_devices,
)
from ppo_cli.planning.resolved import Resolved
from tests.config.settling import device_notes
from tests.settings import with_gpus

SMALL = st.integers(1, 4)
SIZE = st.sampled_from([1, 1, 2, 2, 3])
DEVICES = st.sets(st.integers(0, 9), max_size=6).map(lambda loaded: tuple(sorted(loaded)))


@st.composite
def placements(draw: st.DrawFn) -> str:
    """Most of them split devices in two, or share them; some do anything."""
    end, cut = draw(st.sampled_from([2, 4, 8])), draw(st.integers(1, 7))
    split = (tuple(range(min(cut, end))), tuple(range(min(cut, end), end)))
    shared = (tuple(range(end)), tuple(range(end)))
    train, rollout = draw(st.one_of(st.just(split), st.just(shared), st.tuples(DEVICES, DEVICES)))
    roles = {"train": train, "rollout": rollout, "reward": draw(DEVICES)}
    return ",".join(
        f"{role}:{format_devices(devices)}" for role, devices in roles.items() if devices
    )


CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "trainer.engine": st.sampled_from(["local", "ray"]),
        "trainer.n_gpus_per_node": st.sampled_from([0, 2, 4, 8]),
        "trainer.nnodes": SIZE,
        "trainer.num_workers": SMALL,
        "trainer.tensor_parallel_size": SIZE,
        "trainer.async_steps": st.integers(0, 2),
        "trainer.placement": placements(),
        "rollout.name": st.sampled_from(["hf", "vllm"]),
        "rollout.tensor_model_parallel_size": SIZE,
        "rollout.num_samplers": SMALL,
        "rollout.weight_transfer": st.sampled_from(["gloo", "nccl", "ipc"]),
        "actor.fsdp_config.fsdp_size": SMALL,
        "reward.model.path": st.just("a/b"),
    },
)


@settings(max_examples=100, deadline=None)
@example({"trainer.engine": "local", "rollout.tensor_model_parallel_size": 2}, 8)
@given(CONFIGS, st.sampled_from([0, 0, 1, 8]))
def test_what_is_accepted_can_be_served(overrides: dict[str, object], gpus: int) -> None:
    requested, machine = Config.model_validate(nest_values(overrides)), with_gpus(gpus)
    settled = settle(requested, machine)
    config = settled.config
    resolved = Resolved(requested, config, settled.why, machine, {})
    clashes = [clash.text for clash in check_devices(Scene(resolved, {}))]
    assert all(text[-1] == "." and "\n" not in text for text in clashes)
    if [text for text in clashes if "nodes need" not in text]:
        return
    placed = placement_of(config)
    assert placed.ranks == len(placed.train)
    assert placed.ranks == data_ranks(config) * config.trainer.tensor_parallel_size
    assert placed.rollout
    sampling = {device for sampler in placed.rollout for device in sampler}
    assert len(sampling) == sum(len(sampler) for sampler in placed.rollout)
    for i, sampler in enumerate(placed.rollout):
        assert (i in placed.sleepers) is not {*sampler}.isdisjoint(placed.train)
    assert not (placed.sleepers and config.trainer.async_steps)
    if config.trainer.engine == "local":
        assert placed.alone and placed.train == (0,)
    if placed.devices_per_node:
        span = config.rollout.tensor_model_parallel_size
        assert (
            max(*placed.train, *sampling, *placed.reward) < placed.nodes * placed.devices_per_node
        )
        assert all(len({placed.node_of(d) for d in sampler}) == 1 for sampler in placed.rollout)
        assert {len(sampler) for sampler in placed.rollout} == {span}
    assert all(describe_placement(placed)) and all(plan_devices(config, machine, {}).sentences)
    assert all(note[-1] == "." for note in device_notes(resolved, {}))
