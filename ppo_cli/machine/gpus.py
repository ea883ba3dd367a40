"""The NVIDIA GPUs that this process may use, and their driver, from NVML, without a CUDA context.

NVML lists cards in the order of the PCI bus and ignores CUDA's variables. `list_gpus` reproduces
the order and the selection of CUDA:

- Unless CUDA_DEVICE_ORDER is PCI_BUS_ID, the fastest card comes first. CUDA does not publish how
  it estimates the speed; here it is cores times clock. Equal cards keep the order of the bus.
- CUDA_VISIBLE_DEVICES has numbers in that order, or prefixes of UUIDs. The list ends at the first
  entry that names no device; a device named twice leaves none.
- A card that is split (MIG) is used through one of its slices, and a process sees one slice only:
  the first, unless CUDA_VISIBLE_DEVICES names another. Other cards are hidden then.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path("/")  # of the file system; tests have others
AMPERE = (8, 0)  # compute capability
# Where Windows puts NVML for Linux under WSL, relative to the root.
WSL_LIBRARY = "usr/lib/wsl/lib/libnvidia-ml.so.1"


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a slice of one (its UUID starts with `MIG-`)."""

    name: str
    uuid: str
    memory_bytes: int
    compute_capability: tuple[int, int] | None


@dataclass(frozen=True)
class Card:
    """A GPU as NVML lists it; `slices` is None unless the card is split."""

    gpu: Gpu
    speed: int
    slices: tuple[Gpu, ...] | None


@dataclass(frozen=True)
class Inventory:
    """NVML's answer: cards in the order of the PCI bus, the driver, the newest CUDA it runs."""

    cards: tuple[Card, ...] = ()
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    fault: str | None = None  # why NVML does not answer although the machine has NVIDIA devices


NO_GPUS = Inventory()


def list_gpus(environ: Mapping[str, str] | None = None, root: Path = ROOT) -> tuple[Gpu, ...]:
    """Return the GPUs that a process with this environment may use, in CUDA's order."""
    environ = os.environ if environ is None else environ
    cards = _order_cards(environ, root)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        gpus = [gpu for card in cards for gpu in _usable_gpus(card)]
    else:
        gpus = list(_select_visible(visible, cards))
    # CUDA shows no GPU if one is named twice, and only one slice to a process.
    if len({gpu.uuid for gpu in gpus}) < len(gpus):
        return ()
    slices = [gpu for gpu in gpus if gpu.uuid.startswith("MIG-")]
    return tuple(slices[:1] or gpus)


def hides_all_gpus(environ: Mapping[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides all GPUs on purpose: it is empty, or -1 comes first."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "all").strip()
    return not visible or visible.startswith("-")


def explain_hidden_gpus(environ: Mapping[str, str]) -> str | None:
    """Explain which GPUs a mistake in CUDA_VISIBLE_DEVICES hides, or lack a MIG instance."""
    cards = _order_cards(environ)
    if not cards or hides_all_gpus(environ):
        return None
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return next((_describe_missing_slice(card) for card in cards if card.slices == ()), None)
    # The first entry that names no device ends the list.
    entries = [word.strip() for word in visible.rstrip(", ").split(",")]
    selected = list(_select_visible(visible, cards))
    end = next(iter(entries[len(selected) :]), None)
    if end is None and len(set(selected)) == len(selected):
        return None
    if end is not None and end.startswith("-"):
        return None
    # The entry may name a card in MIG mode that has no slice.
    for number, card in enumerate(cards):
        names_card = end and (end == str(number) or card.gpu.uuid.startswith(end))
        if card.slices == () and names_card:
            return _describe_missing_slice(card)
    # The list ends early, or names a device twice.
    setting = f"CUDA_VISIBLE_DEVICES={visible}"
    of_these = f"of the {len(cards)} GPUs here" if len(cards) > 1 else "of the GPUs here (1)"
    if gpus := list_gpus(environ):
        what = f'{setting} names {len(gpus)} {of_these}: it ends at "{end}", which names none'
    elif end is None:
        what = f"{setting} names none {of_these}, since it names one twice: CUDA shows no GPU"
    else:
        what = f"{setting} names none {of_these}: CUDA shows no GPU"
    return f'{what}. `nvidia-smi -L` lists them; CUDA_VISIBLE_DEVICES="" asks for the CPU.'


def _describe_missing_slice(card: Card) -> str:
    index = read_inventory(ROOT).cards.index(card)
    return (
        f"GPU {index} ({card.gpu.name}) is in MIG mode without an instance, so nothing can use it: "
        f"`sudo nvidia-smi mig -cgi 0 -C -i {index}` makes one of the whole GPU."
    )


def _order_cards(environ: Mapping[str, str], root: Path = ROOT) -> tuple[Card, ...]:
    cards = read_inventory(root).cards
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        cards = tuple(sorted(cards, key=lambda card: card.speed, reverse=True))
    return cards


def has_bfloat16(gpus: Sequence[Gpu]) -> bool:
    """Whether these GPUs compute in bfloat16 (Ampere and newer); older ones emulate it."""
    return all((gpu.compute_capability or AMPERE) >= AMPERE for gpu in gpus)


def pin_gpu_order(environ: MutableMapping[str, str]) -> None:
    """Set CUDA's variables to the order of `list_gpus`, if cards differ.

    Programs that inherit the variables then number the GPUs in the same order.
    """
    cards = [card.gpu for card in read_inventory(ROOT).cards]
    gpus = list_gpus(environ)
    if "CUDA_DEVICE_ORDER" in environ or len({card.name for card in cards}) < 2:
        return
    if all(gpu in cards for gpu in gpus):  # a slice is named by its UUID
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(cards.index(gpu)) for gpu in gpus)
        environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None without a driver."""
    return read_inventory(ROOT).driver


def _usable_gpus(card: Card) -> Sequence[Gpu]:
    return (card.gpu,) if card.slices is None else card.slices[:1]


def _select_visible(visible: str, cards: Sequence[Card]) -> Iterator[Gpu]:
    """Yield the GPUs that CUDA_VISIBLE_DEVICES names, up to the first entry that names none."""
    # Numbers count cards, UUIDs also name slices.
    every = [gpu for card in cards for gpu in (card.slices or _usable_gpus(card))]
    for word in map(str.strip, visible.split(",")):
        if number := re.match(r"\d+", word):
            index = int(number[0])
            matches = list(_usable_gpus(cards[index])) if index < len(cards) else []
        else:
            named = word.startswith(("GPU-", "MIG-"))
            matches = [gpu for gpu in every if named and gpu.uuid.startswith(word)]
        if len(matches) != 1:
            return
        yield matches[0]


@cache
def read_inventory(root: Path) -> Inventory:
    """Query NVML, once in a process; empty without NVIDIA's driver."""
    is_wsl = (root / WSL_LIBRARY).exists()
    has_wsl_gpu = is_wsl and (root / "dev/dxg").exists()
    has_cards = any(re.fullmatch(r"nvidia\d+", p.name) for p in (root / "dev").glob("nvidia*"))
    # Without devices and library there is nobody to ask.
    if not (has_cards or is_wsl or _has_library()):
        return NO_GPUS
    import pynvml

    try:
        return _query_nvml(pynvml, root)
    except pynvml.NVMLError as error:
        # A machine without NVIDIA devices has no fault: NVML is not expected to answer.
        return Inventory(fault=str(error) if has_cards or has_wsl_gpu else None)


def _has_library() -> bool:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def _query_nvml(nvml: Any, root: Path) -> Inventory:
    """Read the inventory with the module pynvml; raise its errors."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        if not (root / WSL_LIBRARY).exists():
            raise
        # WSL has it outside of the loader's path; once loaded, NVML finds it by its short name.
        ctypes.CDLL(str(root / WSL_LIBRARY))
        nvml.nvmlInit()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return Inventory(
            tuple(_read_card(nvml, handle) for handle in handles),
            nvml.nvmlSystemGetDriverVersion(),
            (number // 1000, number % 1000 // 10),
        )
    finally:
        nvml.nvmlShutdown()


def _read_card(nvml: Any, handle: Any) -> Card:
    capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    slices = None
    if _is_mig(nvml, handle):
        slices = tuple(_read_gpu(nvml, part, capability) for part in _list_slices(nvml, handle))
    return Card(_read_gpu(nvml, handle, capability), _estimate_speed(nvml, handle), slices)


def _is_mig(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    except nvml.NVMLError_NotSupported:
        return False


def _list_slices(nvml: Any, handle: Any) -> Iterator[Any]:
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError_NotFound:  # the numbers of slices have gaps
            continue


def _read_gpu(nvml: Any, handle: Any, capability: Any) -> Gpu:
    try:
        memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError_NotSupported:  # CPU and GPU share the memory, as in GB10
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
    return Gpu(name, uuid, memory_bytes, capability)


def _estimate_speed(nvml: Any, handle: Any) -> int:
    try:
        clock_mhz = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
        return int(nvml.nvmlDeviceGetNumGpuCores(handle) * clock_mhz)
    except nvml.NVMLError:  # not supported by virtual GPUs and old drivers
        return 0
