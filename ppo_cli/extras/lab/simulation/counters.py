"""Count the bytes of storages that are alive on a device, and the collectives between ranks.

Nothing here knows the learner: any code that computes on tensors of one device type can run in
`Watch`, whether they are fake or hold numbers.

    memory, collectives = MemoryCounter("cuda"), CollectiveCounter()
    with Watch((memory,), collectives):
        memory.restart()
        step()
    print(memory.peak_bytes, memory.at_peak, collectives.summarise())
"""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

# Function on the stack -> kind of memory that it allocates; the innermost one in the list counts.
# Names of functions in torch 2.13's FSDP2 and in this package.
MAKERS: Mapping[str, str] = {
    "foreach_all_gather": "all-gather buffers",
    "_get_param_all_gather_inputs": "all-gather buffers",
    "init_all_gather_outputs": "gathered weights",
    "foreach_all_gather_copy_out": "gathered weights",
    "init_unsharded_param": "gathered weights",
    "alloc_storage": "gathered weights",
    "foreach_reduce": "reduce-scatter buffers",
    "foreach_reduce_scatter_copy_in": "reduce-scatter buffers",
    "accumulate_unsharded_grad_if_needed": "whole gradients",
    "_zero_moments": "moments",
    "_place_moments": "moments",
    "_norm": "optimizer",
    "Optimizer.apply": "optimizer",
    "gather_logprobs_entropy": "logits",
    "one_chunk": "logits",
    "full_kl": "logits",
    "_init_sharded_param": "parameters",
    "_broadcast_weight": "parameters",
}
# Part of an operation's name -> the collective.
KINDS: Mapping[str, str] = {
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
}
FORWARD, BACKWARD, AGAIN = "activations", "backward pass", "activations, computed again"


class MemoryCounter:
    """Counts live bytes on devices of one type, by kind, and remembers the peak."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.total_bytes = 0
        self.by_maker: Counter[str] = Counter()
        self.peak_bytes = 0
        self.at_peak: Counter[str] = Counter()
        self._alive: dict[int, tuple[int, str]] = {}  # storage -> its bytes, its maker
        self._watchers: dict[int, Any] = {}
        self._lock = threading.RLock()  # autograd allocates in another thread

    def restart(self) -> None:
        """Reset the peak to the current bytes."""
        self.peak_bytes, self.at_peak = self.total_bytes, Counter(self.by_maker)

    def record(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is on such a device and not counted yet."""
        if tensor.device.type != self.device_type:
            return
        # Views share a storage, which is counted once.
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            # torch keeps a storage's Python object alive as long as the storage itself.
            self._watchers[key] = weakref.ref(storage, lambda _: self._forget(key))
            self._count_storage(key, storage.nbytes(), find_maker())

    def resize(self, storage: Any) -> None:
        """Update the count of a storage that was resized in place."""
        if storage._cdata in self._alive:
            self._count_storage(storage._cdata, storage.nbytes(), self._alive[storage._cdata][1])

    def rename(self, tensors: Iterator[Tensor], maker: str) -> None:
        """Assign the memory of these tensors to another kind."""
        for tensor in tensors:
            local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            key = local.untyped_storage()._cdata
            if key in self._alive:
                self._count_storage(key, self._alive[key][0], maker)

    def _count_storage(self, key: int, size: int, maker: str) -> None:
        """Set the size in bytes and the kind (`maker`) of a storage, and update totals and peak.

        `key` identifies the storage; one that is not counted yet is added.
        """
        with self._lock:
            before, old_maker = self._alive.get(key, (0, maker))
            self._alive[key] = (size, maker)
            self.by_maker[old_maker] -= before
            self.by_maker[maker] += size
            # A new peak keeps the kinds at that moment.
            self.total_bytes += size - before
            if self.total_bytes > self.peak_bytes:
                self.restart()

    def _forget(self, key: int) -> None:
        with self._lock:
            size, maker = self._alive.pop(key)
            del self._watchers[key]
            self.by_maker[maker] -= size
            self.total_bytes -= size


def find_maker() -> str:
    """Return the kind of memory that the running code allocates, from the stack and `MAKERS`."""
    frame: Any = sys._getframe(2)
    # Without a listed function it is an activation, in the forward or backward pass.
    computed_again = False
    while frame is not None:
        for name in (frame.f_code.co_name, frame.f_code.co_qualname):
            if name in MAKERS:
                return MAKERS[name]
        computed_again |= frame.f_code.co_name == "recompute_fn"
        frame = frame.f_back
    if computed_again:
        return AGAIN
    return FORWARD if threading.current_thread() is threading.main_thread() else BACKWARD


class CollectiveCounter:
    """Counts the collectives of this rank: kind -> number, and bytes of their largest tensors."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def record(self, func: Any, values: Sequence[Any]) -> None:
        """Count an operation of torch.distributed if it starts a collective."""
        namespace, _, name = func._schema.name.partition("::")
        if namespace not in ("c10d", "_c10d_functional") or "wrap" in name or "wait" in name:
            return
        # The larger of input and output is what travels.
        tensors = [value for value in values if isinstance(value, Tensor)]
        kind = next((word for part, word in KINDS.items() if part in name), name)
        if tensors and tensors[0].is_cpu:
            kind += " on the CPU"
        self.calls[kind] += 1
        self.bytes[kind] += max((t.numel() * t.element_size() for t in tensors), default=0)

    def clear(self) -> None:
        """Reset all counts to 0."""
        self.calls.clear()
        self.bytes.clear()

    def summarise(self) -> dict[str, dict[str, int]]:
        """Return kind -> {"calls", "bytes"}."""
        return {kind: {"calls": n, "bytes": self.bytes[kind]} for kind, n in self.calls.items()}


# Operations that read only the rows that they return, and those that start no kernel.
PICKS = {"aten::embedding", "aten::gather", "aten::index", "aten::index_select"}
NO_KERNEL = re.compile(
    r"(prim|c10d|_c10d_functional)::|aten::(empty|new_empty|_unsafe_view|detach|lift|set_|resize_|"
    r"_local_scalar_dense|alias)"
)


def is_product(func: Any) -> bool:
    """Whether torch knows how many FLOPs an operation takes; the others move memory."""
    return func._overloadpacket in flop_registry


class OperationCounter:
    """Counts the kernels that operations on devices of one type start, their FLOPs and bytes.

    `products` are operations for which torch knows a number of FLOPs; the others move memory. Bytes
    are those of all inputs and outputs.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.launches = 0
        self.flops = 0
        self.product_bytes = 0
        self.other_bytes = 0

    def record(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Count an operation, unless it only makes a view."""
        if func.is_view or NO_KERNEL.match(func._schema.name):
            return
        outputs = self._sizes(result)
        picks = func._schema.name in PICKS
        inputs = {} if picks else self._sizes((args, kwargs))
        size = sum((inputs | outputs).values()) + picks * sum(outputs.values())
        if not size:
            return
        self.launches += 1
        if not is_product(func):
            self.other_bytes += size
            return
        self.flops += flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)
        self.product_bytes += size

    def count_bytes(self, values: Any) -> None:
        """Count what a fused kernel reads or writes."""
        self.other_bytes += sum(self._sizes(values).values())

    def clear(self) -> None:
        """Reset all counts to 0."""
        self.launches = self.flops = self.product_bytes = self.other_bytes = 0

    def _sizes(self, values: Any) -> dict[int, int]:
        """Return the bytes of each tensor on the device, by its id."""
        return {
            id(tensor): tensor.numel() * tensor.element_size()
            for tensor in pytree.tree_leaves(values)
            if isinstance(tensor, Tensor) and tensor.device.type == self.device_type
        }


class Watch(TorchDispatchMode):
    """A dispatch mode that passes every operation inside it to the counters."""

    def __init__(
        self,
        memories: Sequence[MemoryCounter],
        collectives: CollectiveCounter,
        operations: OperationCounter | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = operations
        self._memories = memories
        self._collectives = collectives
        self._resizing: Any = None
        self._muted = [False, False]  # operations, memory

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Watch where no mode, or this one already, is active."""
        with _disable_current_modes():
            super().__enter__()  # type: ignore[no-untyped-call]
            try:
                yield
            finally:
                super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @contextmanager
    def muted(self, *, memory: bool) -> Iterator[None]:
        """Count no operations, and with `memory` no results either."""
        self._muted = [True, memory]
        try:
            yield
        finally:
            self._muted = [False, False]

    def __enter__(self) -> Watch:
        """Also watch resized storages: FSDP2 frees and allocates memory without an operation."""
        self._resizing = resizing(self._memories)
        self._resizing.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._resizing.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count its results."""
        # DTensor dispatches again with local tensors.
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it is called again, for the local shards
        kwargs = kwargs or {}
        self._collectives.record(func, pytree.tree_leaves((args, kwargs)))
        result = self.compute(func, args, kwargs)
        quiet, forgotten = self._muted
        if self._operations is not None and not quiet:
            self._operations.record(func, args, kwargs, result)
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor) and not forgotten:
                for memory in self._memories:
                    memory.record(value)
        return result

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation; subclasses can replace it."""
        return func(*args, **kwargs)


@contextmanager
def resizing(memories: Sequence[MemoryCounter]) -> Iterator[None]:
    """Context in which the counters learn of resized storages."""
    storages: Any = torch.UntypedStorage
    resize = storages.resize_

    def resize_and_count(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        for memory in memories:
            memory.resize(storage)
        return result

    storages.resize_ = resize_and_count
    try:
        yield
    finally:
        storages.resize_ = resize
