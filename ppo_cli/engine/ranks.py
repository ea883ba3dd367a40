"""This process's place among the learner ranks, their mesh, and collectives with clear errors.

Ranks are laid out (replicate, shard, tensor), the last varying fastest: `tensor_size`
neighbours share each layer, `shard` ranks hold the shards of one model (FSDP2), and `replicate`
such groups hold copies (HSDP). A separate `GlooGroup` sends whole tensors from the trainer to
samplers, as bytes; it leaves the process's default group alone. Its store listens on one address
only, and each side connects from the local address that leads there.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ppo_cli.config.models.shape import FLOAT
from ppo_cli.errors import WorkerLost, first_line, is_out_of_memory, is_picklable

Result = TypeVar("Result")


class OutOfMemoryElsewhere(MemoryError):
    """Another rank has run out of memory in work that all ranks do at the same time."""


@dataclass(frozen=True)
class Ranks:
    """This process among all learner processes; the default is one process alone.

    `mesh` has the dimensions "replicate", "shard" and "tensor"; it is None for a single process.
    `flags` is a CPU group of all ranks for `exchange_failures`; `waits_s` collects the seconds of
    its calls until `pop_wait_seconds`.
    """

    rank: int = 0
    size: int = 1
    tensor_size: int = 1
    mesh: DeviceMesh | None = None
    flags: dist.ProcessGroup | None = None
    waits_s: list[float] = field(default_factory=list)

    def exchange_failures(self, *, failed: bool = False) -> None:
        """Tell all ranks whether this one ran out of memory; all call after each micro-batch.

        Raises OutOfMemoryElsewhere if another rank has failed, and not this one.
        """
        # A single process, or tensor parallelism.
        if self.flags is None:
            return
        started = time.perf_counter()
        flag = torch.tensor([int(failed)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.flags)
        self.waits_s.append(time.perf_counter() - started)
        if flag.item() and not failed:
            raise OutOfMemoryElsewhere("another rank ran out of memory")

    def pop_wait_seconds(self) -> float:
        """Return the seconds spent in `exchange_failures` since the last call."""
        total = sum(self.waits_s)
        self.waits_s.clear()
        return total

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.mesh is None

    @property
    def data_size(self) -> int:
        """How many ranks share the rows of a mini-batch."""
        return self.size // self.tensor_size

    @property
    def data_rank(self) -> int:
        """Return which share of the rows this rank has."""
        return self.rank // self.tensor_size

    @property
    def reports_results(self) -> bool:
        """Whether this rank reports results: its tensor-parallel neighbours have the same ones."""
        return self.rank % self.tensor_size == 0


ALONE = Ranks()


def join_ranks(
    rank: int,
    size: int,
    *,
    init_method: str,
    device: torch.device,
    tensor_size: int = 1,
    shard_size: int = -1,
    timeout_s: float = 1800.0,
) -> Ranks:
    """Meet the other ranks at `init_method` (tcp://host:port) and lay out the mesh.

    `shard_size` ranks hold the pieces of one model; -1 is all that tensor parallelism leaves.
    Raises ValueError when the sizes do not divide.
    """
    # The mesh: replicas x shards x tensor-parallel neighbours.
    data_size, rest = divmod(size, tensor_size)
    shards = data_size if shard_size == -1 else shard_size
    if rest or data_size % shards:
        raise ValueError(f"{size} ranks cannot be {shards} shards of {tensor_size}")
    if size == 1:
        return ALONE  # models cut into one piece took 1.6 times as long as whole ones
    # Without this the mesh would guess the GPU from LOCAL_RANK, which we do not set.
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    with explain_collective_errors(rank, FREE_DEVICE):
        mesh = init_device_mesh(
            device.type,
            (data_size // shards, shards, tensor_size),
            mesh_dim_names=("replicate", "shard", "tensor"),
        )
        # The groups of a mesh have their back end's timeout, 10 or 30 minutes. Private in torch
        # 2.13; a public way would split the communicators of NCCL by options of each dimension.
        for group in mesh.get_all_groups():
            c10d.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
        # Tensor-parallel ranks cannot recover together: see `run_within_memory`.
        flags = None
        if tensor_size == 1:
            flags = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        _warm_up_collectives(mesh, device)
    return Ranks(rank=rank, size=size, tensor_size=tensor_size, mesh=mesh, flags=flags)


# NCCL chooses its protocol by size: one number takes the low-latency one, this many bytes the
# high-bandwidth one.
WIDE_BYTES = 16 << 20


def _warm_up_collectives(mesh: DeviceMesh, device: torch.device) -> None:
    """Use each kind of collective once in each group that will use it.

    A communicator allocates its buffers (NCCL: hundreds of MB) at the first use of a kind. Doing
    that now makes free memory measurable, and avoids running out of it inside a collective later.
    """
    for count in (1, WIDE_BYTES // FLOAT):
        for group in (None, *mesh.get_all_groups()):
            size = dist.get_world_size(group)
            piece = torch.zeros(-(-count // size), device=device)
            buffer = piece.new_zeros(piece.numel() * size)
            c10d.all_gather_single(buffer, piece, group=group)
            c10d.reduce_scatter_single(piece, buffer, group=group)
            dist.all_reduce(buffer, group=group)
        dist.broadcast(buffer, 0)
    dist.all_gather_object([None] * dist.get_world_size(), None)


def gather_objects(ranks: Ranks, value: Any) -> list[Any]:
    """Return the value of each rank, in rank order, on every rank."""
    if ranks.alone:
        return [value]
    values: list[Any] = [None] * ranks.size
    dist.all_gather_object(values, value)
    return values


def sum_over_ranks(ranks: Ranks, value: float) -> float:
    """Return the sum of a number over all ranks, on every rank; NaN and infinity propagate."""
    if ranks.mesh is None:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=ranks.mesh.device_type)
    dist.all_reduce(total)
    return float(total)


LEAVE_MEMORY = (
    "Leave more memory to it: lower actor.ppo_max_token_len_per_gpu, "
    "critic.ppo_max_token_len_per_gpu or rollout.gpu_memory_utilization."
)
FREE_DEVICE = (  # no model is loaded yet
    "Other programs or samplers hold the memory of its device: end them (nvidia-smi lists them), "
    "or lower rollout.gpu_memory_utilization."
)


@contextmanager
def explain_collective_errors(rank: int, advice: str = LEAVE_MEMORY) -> Iterator[None]:
    """Turn running out of memory inside a collective, and NCCL's errors, into WorkerLost.

    No rank can recover there: the others wait in the collective for this one, and end with it.
    """
    try:
        yield
    except Exception as error:
        nccl = isinstance(error, dist.DistBackendError)
        log = " NCCL_DEBUG=INFO logs what NCCL does." if nccl else ""
        if nccl and "shared memory" in str(error):
            log = (
                f" Containers have little of it: start them with --shm-size 8g or --ipc=host.{log}"
            )
        if is_out_of_memory(error):
            what = f"ran out of memory inside of a collective: {_nccl_words(error)}. {advice}{log}"
        elif nccl:
            what = f"failed inside of a collective of NCCL: {_nccl_words(error)}.{log}"
        else:
            raise
        raise WorkerLost(f"Learner rank {rank} {what}") from error


def _nccl_words(error: Exception) -> str:
    """Return the error's first line and NCCL's "Last error", which is on a separate line."""
    _, _, last = str(error).partition("Last error:")
    lines = last.strip().splitlines()[:1]
    return "; ".join((first_line(error), *(line.rstrip(" .:") for line in lines)))


def run_on_all_ranks(ranks: Ranks, work: Callable[[], Result]) -> Result:
    """Do `work` on this rank and wait for the others; an error on one rank is raised on all.

    `work` must not contain a collective: ranks may do different things. If several ranks fail,
    the error of the lowest one is raised.
    """
    if ranks.alone:
        return work()
    result: list[Result] = []
    own_error: Exception | None = None
    try:
        result.append(work())
    except Exception as error:
        own_error = error
    # An error that cannot be pickled is sent as its text.
    sent = own_error
    if own_error is not None and not is_picklable(own_error):
        sent = RuntimeError(f"{type(own_error).__name__}: {own_error}")
    # Every rank learns all errors and raises the same one.
    errors = gather_objects(ranks, sent)
    for rank, rank_error in enumerate(errors):
        if rank_error is not None:
            raise (own_error if own_error is not None and rank == ranks.rank else rank_error)
    return result[0]


GLOO = "ppo_gloo"  # the name of this back end in vLLM's registry of weight transfers
c10d: Any = torch.distributed  # its type stubs leave out what is used here


def open_store(address: str, timeout_s: float) -> Any:
    """Open a store that listens at this address on a free port (its `port`)."""
    listening = socket.create_server((address, 0))
    return c10d.TCPStore(
        address,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),  # the store's from now on
    )


def join_store(address: str, port: int, timeout_s: float) -> Any:
    """Connect to the store that another process has opened."""
    return c10d.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class GlooGroup:
    """A group of the processes that joined a store; rank 0 sends, all others receive."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        # Private options (torch 2.13): the public constructor listens on the default interface.
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_own_address(store))]
        self._store = store  # lives as long as the group: the first rank's is the meeting place
        self._group: Any = c10d.ProcessGroupGloo(store, rank, size, options)

    def send(self, tensor: Tensor) -> None:
        """Send a tensor to all; blocks until it is sent. RuntimeError when a receiver is gone."""
        self._broadcast(tensor.detach().cpu().contiguous())

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Wait for the next tensor, which must have this shape and dtype."""
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        self._broadcast(tensor)
        return tensor

    def _broadcast(self, tensor: Tensor) -> None:
        if tensor.numel():
            self._group.broadcast(
                [tensor.view(-1).view(torch.uint8)], c10d.BroadcastOptions()
            ).wait()


def _own_address(store: Any) -> str:
    """Return this machine's address towards the store; nothing is sent."""
    # Connecting a UDP socket only selects the route.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((store.host, store.port))
        return str(asking.getsockname()[0])
