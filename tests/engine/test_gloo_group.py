"""A group beside the default one: who is sent what, and what a loss comes to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from ppo_cli.engine.ranks import GlooGroup, join_store, open_store

WAIT_S = 20.0
SENT = [
    torch.arange(12.0).reshape(3, 4).T,  # not contiguous
    torch.tensor(1.5, dtype=torch.bfloat16),
    torch.zeros(0, 4),
    torch.tensor([[1, -2]], dtype=torch.int64),
    torch.ones(2, 2, requires_grad=True),
]


def meet(size: int, timeout_s: float = WAIT_S) -> list[GlooGroup]:
    """Make a group of so many ranks, each in a thread of this process."""
    local_store = open_store("127.0.0.1", WAIT_S)
    groups: dict[int, GlooGroup] = {}

    def join(rank: int) -> None:
        store = local_store if rank == 0 else join_store(local_store.host, local_store.port, WAIT_S)
        groups[rank] = GlooGroup(store, rank, size, timeout_s)

    in_threads([partial(join, rank) for rank in range(size)])
    assert not torch.distributed.is_initialized()
    return [groups[rank] for rank in range(size)]


def in_threads(works: list[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)


def test_all_get_what_the_first_sends() -> None:
    groups = meet(3)
    got: dict[int, list[torch.Tensor]] = {}

    def take(rank: int) -> None:
        got[rank] = [groups[rank].receive(tuple(t.shape), t.dtype) for t in SENT]

    def send() -> None:
        for tensor in SENT:
            groups[0].send(tensor)

    in_threads([send, partial(take, 1), partial(take, 2)])
    for rank in (1, 2):
        for tensor, sent in zip(got[rank], SENT, strict=True):
            assert tensor.dtype == sent.dtype and torch.equal(tensor, sent.detach())
            assert not tensor.requires_grad


def test_a_rank_that_is_gone_is_missed() -> None:
    first, *others = meet(2)
    others.clear()
    with pytest.raises(RuntimeError):
        first.send(torch.ones(3))


def test_a_rank_that_takes_nothing_is_waited_for_as_long_as_was_set() -> None:
    first, _ = meet(2, timeout_s=1.0)
    messages: list[str] = []

    def send() -> None:
        with pytest.raises(RuntimeError) as missed:
            first.send(torch.ones(1 << 22))  # more than the connection buffers
        messages.append(str(missed.value))

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    sending.join(WAIT_S)
    assert messages and "imed out" in messages[0]


def test_a_store_listens_at_its_address_alone() -> None:
    store = open_store("127.0.0.1", WAIT_S)
    with pytest.raises(RuntimeError):
        join_store("127.0.0.2", store.port, 0.5)
    assert join_store("127.0.0.1", store.port, WAIT_S)
