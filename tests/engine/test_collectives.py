"""How often ranks talk to each other: FSDP's collectives and `exchange_failures`, of a micro-batch.

torch's fake process group answers at once: this process is rank 0 of eight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification

from ppo_cli.config.schema.algorithm import Sharding
from ppo_cli.engine.device import Compute
from ppo_cli.engine.models import Policy, ValueModel
from ppo_cli.engine.models.policy import split_model
from ppo_cli.engine.ranks import Ranks, join_ranks
from ppo_cli.engine.sharding import load as sharding
from ppo_cli.engine.sharding.load import load_sharded
from ppo_cli.engine.training.actor_critic import ActorLearner
from ppo_cli.errors import WorkerLost
from tests.engine.packed_steps import annotated, build_optimizer, make_batch, scored
from tests.settings import complete

LAYERS, SIZE, MICRO_BATCHES = 3, 8, 3


@pytest.fixture
def fake_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All ranks but this one are made up, and say what this one says."""
    monkeypatch.setattr(sharding, "gather_objects", lambda ranks, value: [value] * ranks.size)
    monkeypatch.setattr(sharding, "run_on_all_ranks", lambda ranks, work: work())
    dist.init_process_group("fake", rank=0, world_size=SIZE, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`join_ranks` meets ranks that are made up."""
    begin = dist.init_process_group
    monkeypatch.setattr(
        dist, "init_process_group",
        lambda *_, **__: begin("fake", rank=0, world_size=SIZE, store=FakeStore()),
    )  # fmt: skip
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda *_: None)
    yield
    dist.destroy_process_group()


class Collectives(TorchDispatchMode):
    """Counts what goes through a process group."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d":
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def lay_out(shards: int) -> Ranks:
    mesh = init_device_mesh(
        "cpu", (SIZE // shards, shards, 1), mesh_dim_names=("replicate", "shard", "tensor")
    )
    return Ranks(rank=0, size=SIZE, mesh=mesh, flags=dist.new_group())


def load(path: str, *, empty: bool = False) -> Policy:
    torch.manual_seed(0)
    return split_model(LlamaForCausalLM(CONFIG).eval())


CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS,
    num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False, num_labels=1,
)  # fmt: skip


def take_step(ranks: Ranks, keep_gathered: bool, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Take an optimizer step of three micro-batches."""
    collectives = Collectives()
    note = lambda *_, **__: collectives.counts.update(["exchange_failures"])  # noqa: E731
    monkeypatch.setattr(Ranks, "exchange_failures", note)
    compute = Compute(torch.device("cpu"), torch.float32)
    policy = load_sharded(
        load, "made up", ranks, Sharding(reshard_after_forward=not keep_gathered), compute,
        gradient_checkpointing=True,
    )  # fmt: skip
    optimizer = build_optimizer(policy.model, ranks=ranks)
    actor = ActorLearner(policy, None, complete({}).actor, 16, optimizer, compute, 1.0, ranks)
    batch = make_batch(((4, 4),) * (SIZE * 6), 0)
    with collectives:
        actor.step(scored(annotated(batch), 0))
    return collectives.counts


@pytest.mark.usefixtures("fake_ranks")
@pytest.mark.parametrize(("shards", "copies"), [(8, 1), (4, 2)])
@pytest.mark.parametrize(("keep_gathered", "passes"), [(False, MICRO_BATCHES), (True, 1)])
def test_ranks_agree_once_a_micro_batch(
    shards: int, copies: int, keep_gathered: bool, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer and the root are gathered for each pass, and reduced after the backward one."""
    counts = take_step(lay_out(shards), keep_gathered, monkeypatch)
    groups = LAYERS + 1
    assert counts["exchange_failures"] == MICRO_BATCHES
    assert counts["_allgather_base_"] == passes * groups * (1 if keep_gathered else 2)
    assert counts["_reduce_scatter_base_"] == passes * groups
    assert counts["allreduce_"] == passes * groups * (copies - 1) + 1  # the gradient's norm


@pytest.mark.usefixtures("fake_ranks")
@pytest.mark.parametrize("trained", [True, False])
def test_a_critic_gathers_an_embedding_that_it_trains_by_itself(trained: bool) -> None:
    """The root is whole for all of a pass, and a frozen embedding has no backward pass."""

    def freeze(critic: ValueModel) -> ValueModel:
        critic.model.requires_grad_(trained)
        critic.head.requires_grad_(True)
        return critic

    model = LlamaForTokenClassification(CONFIG)
    critic = load_sharded(
        lambda path, *, empty: ValueModel(model, model.model, model.score), "made up",
        lay_out(SIZE), Sharding(), Compute(torch.device("cpu"), torch.float32), prepare=freeze,
    )  # fmt: skip
    embedding = critic.model.get_input_embeddings()
    assert isinstance(embedding, FSDPModule) is trained


MEMORY = "Failed to CUDA calloc 10485760 bytes: Cuda failure 2 'out of memory'"


@pytest.mark.usefixtures("meeting")
@pytest.mark.parametrize(
    ("cause", "fragment"),
    [
        (MEMORY, "rank 0 ran out of memory .*calloc.*nvidia-smi.*NCCL_DEBUG=INFO"),
        ("Failed to CUDA calloc async 608 bytes", "rank 0 ran out of memory .*calloc async 608"),
        ("Cuda failure 'invalid'", "rank 0 failed .*unhandled cuda error; Cuda failure 'invalid'"),
        ("Error while creating shared memory segment /dev/shm/nccl-1 (size 9)", "--shm-size"),
    ],
)
def test_nccl_that_fails_when_ranks_meet_ends_the_rank(
    cause: str, fragment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise dist.DistBackendError(f"NCCL error in: x, unhandled cuda error\nLast error:\n{cause}")

    monkeypatch.setattr(dist, "all_gather_single", fail)
    with pytest.raises(WorkerLost, match=fragment):
        join_ranks(0, SIZE, init_method="", device=torch.device("cpu"))


@pytest.mark.usefixtures("meeting")
def test_each_kind_of_collective_is_used_when_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before memory is measured: NCCL takes its buffers with the first of a kind in a group."""
    used: Counter[tuple[str, int]] = Counter()

    def note(name: str, use: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            used[name, dist.get_world_size(kwargs.get("group"))] += 1
            return None if "object" in name else use(*args, **kwargs)

        return called

    kinds = ("all_gather_single", "reduce_scatter_single", "all_reduce")
    for name in (*kinds, "broadcast", "all_gather_object"):
        monkeypatch.setattr(dist, name, note(name, getattr(dist, name)))
    join_ranks(0, SIZE, init_method="", device=torch.device("cpu"), shard_size=4)
    assert {kind for kind, _ in used} == {*kinds, "broadcast", "all_gather_object"}
    assert all(used[kind, size] >= 2 for kind in kinds for size in (SIZE, 4, 2)), used
