"""Weights and moments in host memory: allocated once, copied once, pinned for a GPU alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ppo_cli.engine.sharding import host_memory
from ppo_cli.engine.sharding.host_memory import HostCopies, allocate_host
from ppo_cli.engine.sharding.tensors import gather_copy
from tests.forked import run_ranks

WORKER = Path(__file__).with_name("host_copies.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("copies")
    run_ranks(WORKER, 1, str(folder))
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def check_copies(steps: dict[str, Any], out: int, home: int) -> None:
    """Each step copies as often, and tensors stay where they are."""
    assert {(copies["out"], copies["home"]) for copies in steps["copies"]} == {(out, home)}
    assert steps["places"][0] == steps["places"][1] == steps["places"][2]


def test_moments_keep_their_places_and_are_copied_once_each_way(report: dict[str, Any]) -> None:
    """Two of each of two trained parameters; the norm of the gradients sends a tensor, too."""
    check_copies(report["optimizer"], out=4 + 1, home=4)
    assert report["optimizer"]["moments"] == pytest.approx(report["on_cpu"])


def test_weights_keep_their_places_and_only_trained_ones_are_copied_back(
    report: dict[str, Any],
) -> None:
    check_copies(report["hosted"], out=4, home=2)


def test_a_whole_tensor_is_copied_once(report: dict[str, Any]) -> None:
    assert report["full_tensor"] == {"home": 1}
    live = torch.ones(3)
    assert gather_copy(live).data_ptr() != live.data_ptr()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The sizes of what is allocated, and whether it is pinned; there is no GPU to pin for."""
    allocations: list[tuple[int, bool]] = []
    empty = torch.empty

    def note(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = empty(*size, **options)
        allocations.append((tensor.numel(), pin_memory))
        return tensor

    monkeypatch.setattr(torch, "empty", note)
    return allocations


def test_pinned_tensors_share_slabs(
    requests: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "SLAB_BYTES", 1024)
    shapes = [((10, 3), torch.float32), ((7,), torch.bfloat16), ((300,), torch.float32),
              ((), torch.float32), ((100,), torch.uint8)]  # fmt: skip
    like = [torch.zeros(shape, dtype=dtype) for shape, dtype in shapes]
    places = allocate_host(like, pinned=True)
    assert requests == [(128 + 64, True), (1216, True), (64 + 128, True)]
    for number, (place, (shape, dtype)) in enumerate(zip(places, shapes, strict=True)):
        assert (place.shape, place.dtype) == (torch.Size(shape), dtype)
        place.fill_(number)
    assert [place.unique().tolist() for place in places] == [[0], [1], [2], [3], [4]]


def test_the_host_waits_once_for_all_copies_from_a_gpu(
    requests: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors say that they are on a GPU, and copy nothing."""
    waits: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("synchronize"))
    with FakeTensorMode():
        tensors = {name: torch.zeros(16, device="cuda") for name in ("a", "b", "c")}
        requests.clear()
        copies = HostCopies()
        first = copies.store(tensors)
        copies_again = copies.store(tensors)
    assert requests == [(3 * 64, True)] and len(waits) == 2
    for name in tensors:
        assert first[name] is copies_again[name] and first[name].device.type == "cpu"
