"""A gloo group beside all others: whole tensors from the trainer to samplers, as bytes.

Nothing global is touched, so that a process may have its own default group. The meeting place
listens on one address only, and each side talks from the address that leads there.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

GLOO = "ppo_gloo"  # the name of this way among vLLM's own
c10d: Any = torch.distributed  # its type stubs leave out what is used here


def open_store(address: str, timeout_s: float) -> Any:
    """Listen at this address, on a free port (the store's `port`)."""
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
    """Reach the store that another process has opened."""
    return c10d.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class GlooGroup:
    """The processes that met at a store; rank 0 sends, all others receive."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_own_address(store))]
        self._store = store  # lives as long as the group: the first rank's is the meeting place
        self._group: Any = c10d.ProcessGroupGloo(store, rank, size, options)

    def send(self, tensor: Tensor) -> None:
        """Send a tensor to all; blocks until it has left. RuntimeError when one is gone."""
        self._broadcast(tensor.detach().cpu().contiguous())

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Wait for the next tensor, which must be of this kind."""
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        self._broadcast(tensor)
        return tensor

    def _broadcast(self, tensor: Tensor) -> None:
        if tensor.numel():
            self._group.broadcast(
                [tensor.view(-1).view(torch.uint8)], c10d.BroadcastOptions()
            ).wait()


def _own_address(store: Any) -> str:
    """The address of this machine from which the store is reached; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((store.host, store.port))
        return str(asking.getsockname()[0])
