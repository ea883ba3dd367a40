"""A second device without hardware: tensors that compute on the CPU and are strict like a GPU.

`install()` registers the device "second" (torch's PrivateUse1, written in Python). Its tensors
hold a CPU tensor each; every operation unwraps them, runs there and wraps the results. An error is
raised where a GPU would raise one, and where it would only be slow or no longer reproducible:

- a CPU tensor with dimensions meets one of the device (index tensors too, which CUDA would take);
- a generator of the CPU draws for the device;
- a model computes on the CPU (`Watch`): matrix products and embeddings belong on the device.

`.numpy()` is refused by torch itself. Where the host of a GPU waits for all work under way, a
crossing is counted, by the function that asked, so that a test can hold the list of functions:

- values that go to the CPU: `.cpu()`, `.item()`, `if tensor:`;
- operations whose result has a shape that depends on values: `nonzero`, a mask as an index;
- copies from the CPU that are not `non_blocking`. Whether their source is pinned is not seen.

Registered once a process, for good.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import ppo_cli

NAME = "second"
DEVICE = torch.device("privateuseone", 0)  # called `NAME` once it is installed
PRODUCT = str(Path(ppo_cli.__file__).parent)
aten = torch.ops.aten
CROSSINGS = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default}
# torch tags most operations that look at values. Those that look inside of their kernels it does
# not; found by profiling what the product calls, and by reading what CUDA's kernels do.
WAITS = {aten.is_nonzero, aten.masked_scatter_backward, aten.multinomial, aten.isin}
VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# They look at values only where an index is a mask.
INDEXING = {
    aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index,
    aten._unsafe_index_put,
}  # fmt: skip
MASKS = (torch.bool, torch.uint8)
HEAVY = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.embedding, aten._log_softmax}
# What the half-precision rules of a GPU cast, of what the models here call.
CAST = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "scaled_dot_product_attention")


class SecondTensor(Tensor):
    """A tensor of the device; `inner` holds its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> SecondTensor:
        with torch.inference_mode(False):  # views of weights must be tensors as the weights are
            tensor = Tensor._make_wrapper_subclass(
                cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
                dtype=inner.dtype, device=DEVICE,
            )  # fmt: skip
        tensor.inner = inner
        return tensor  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"second({self.inner})"

    def tolist(self) -> Any:
        """torch refuses it for tensors like these; a GPU's have it."""
        note_crossing("tolist")
        return self.inner.tolist()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Lets `Module.to` exchange weights in place, so that tied ones stay tied."""
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], *_: Any) -> SecondTensor:
        return SecondTensor(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


OUTSIDE = "outside of the product"  # a test asked
crossings: Counter[str] = Counter()  # "file.py:function" of the product -> waits


def note_crossing(what: Any) -> None:
    """Count a wait for the device, under the function of the product that asked.

    A backward pass runs in a thread of torch's own, where only the operation has a name.
    """
    if threading.current_thread() is not threading.main_thread():
        crossings[f"backward: {what}"] += 1
        return
    frame: Any = sys._getframe(1)
    library = ""
    while frame is not None and not frame.f_code.co_filename.startswith(PRODUCT):
        if not library and "/transformers/" in frame.f_code.co_filename:
            library = f" in {Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"
        frame = frame.f_back
    if frame is None:
        crossings[OUTSIDE] += 1
        return
    file = frame.f_code.co_filename[len(PRODUCT) + 1 :]
    crossings[f"{file}:{frame.f_code.co_name}{library}"] += 1


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on what the tensors hold, and wrap what it gives."""
    if torch.is_inference_mode_enabled():  # operations made of others come here whole then
        decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
    flat, spec = pytree.tree_flatten((args, kwargs))
    target = kwargs.get("device")
    leaves_device = func is aten._to_copy.default and target is not None
    leaves_device = leaves_device and torch.device(target).type == "cpu"
    leaves_device |= func is aten.copy_.default and not isinstance(args[0], SecondTensor)
    if leaves_device or looks_at_values(func, args, kwargs) or _comes_blocking(func, args):
        note_crossing(func)
    if func not in CROSSINGS:
        for value in flat:
            if isinstance(value, Tensor) and not isinstance(value, SecondTensor) and value.dim():
                raise RuntimeError(
                    f"{func}: a CPU tensor of shape {tuple(value.shape)} among those of {NAME}"
                )
            if isinstance(value, torch.Generator) and value.device.type == "cpu":
                raise RuntimeError(f"{func}: a generator of the CPU draws for {NAME}")
    inner = [
        value.inner if isinstance(value, SecondTensor)
        else torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME
        else value
        for value in flat
    ]  # fmt: skip
    inner_args, inner_kwargs = pytree.tree_unflatten(inner, spec)
    inner_kwargs.pop("pin_memory", None)
    decomposed = func(*inner_args, **inner_kwargs)
    name = func._schema.name.partition("::")[2]
    if decomposed is None or (name.startswith(("_foreach_", "_fused_")) and name.endswith("_")):
        return None
    if func._schema.is_mutable and args and decomposed is inner_args[0]:
        return args[0]
    if leaves_device:
        return args[0] if func is aten.copy_.default else decomposed
    out = kwargs.get("out")
    if out is not None:
        return out
    return pytree.tree_map_only(Tensor, SecondTensor, decomposed)


def looks_at_values(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the host needs numbers of the device before it can go on."""
    packet = func.overloadpacket
    if packet in INDEXING:
        return any(isinstance(i, Tensor) and i.dtype in MASKS for i in args[1])
    if packet is aten.repeat_interleave:  # told how long the result is, it need not look
        return func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
    return packet in WAITS or not VALUE_TAGS.isdisjoint(func.tags)


def _comes_blocking(func: Any, args: Any) -> bool:
    """Whether values come from the CPU in a copy that waits until it is done."""
    if func is not aten.copy_.default or not isinstance(args[0], SecondTensor):
        return False
    source, non_blocking = args[1], len(args) > 2 and args[2]
    return source.numel() > 0 and not isinstance(source, SecondTensor) and not non_blocking


class Watch(TorchDispatchMode):
    """Refuses what a model computes on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = pytree.tree_leaves((args, kwargs or {}))
        tensors = [v for v in values if isinstance(v, Tensor)]
        if func.overloadpacket in HEAVY and all(t.device.type == "cpu" for t in tensors):
            raise RuntimeError(f"{func}: computed on the CPU")
        return func(*args, **(kwargs or {}))


class _Module:
    """What torch asks of a device's module."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers are the CPU's here."""


_registered: list[Any] = []


def install() -> torch.device:
    """Register the device; returns it. Safe to call twice."""
    if _registered:
        return DEVICE
    # Or `Module.to("cpu")` would make new weights, and those that are tied would be so no more.
    torch.__future__.set_swap_module_params_on_conversion(True)
    _setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Module())
    plain = torch.library.Library("aten", "IMPL")
    _registered.append(plain)
    plain.impl("empty.memory_format", _empty, "PrivateUse1")
    plain.impl("empty_strided", _empty_strided, "PrivateUse1")
    plain.impl("_copy_from", _copy_from, "PrivateUse1")
    beneath = torch.library.Library("_", "IMPL")
    beneath.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    cast = torch.library.Library("aten", "IMPL")
    _registered.extend((beneath, cast))
    for name in CAST:
        cast.impl(name, _casting(getattr(aten, name).default), "AutocastPrivateUse1")
    return DEVICE


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    return SecondTensor(torch.empty(size, dtype=dtype, device="cpu"))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return SecondTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    return compute(aten.copy_.default, (target, source, non_blocking), {})  # type: ignore[no-any-return]


def _casting(op: Callable[..., Any]) -> Callable[..., Any]:
    """Products in half precision, as CUDA's autocast has them."""

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)

        def lower(value: Any) -> Any:
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(dtype) if is_float and value.dtype != torch.float64 else value

        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*pytree.tree_map(lower, args), **pytree.tree_map(lower, kwargs))

    return run
