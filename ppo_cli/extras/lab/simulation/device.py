"""A simulated GPU without memory and numbers: torch's PrivateUse1, registered from Python.

Its tensors are FakeTensors. It has what the learner uses of a GPU: streams and events that do
nothing, the rules of CUDA's autocast, the choice of an attention kernel, and a process group in
which all other ranks behave like this one. Uses private parts of torch, tried with 2.13.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed import fake_pg
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from ppo_cli.extras.lab.simulation.counters import (
    CollectiveCounter,
    MemoryCounter,
    OperationCounter,
    Watch,
)

NAME = "simulated"
DEVICE = torch.device("privateuseone", 0)  # called `NAME` once it is registered
aten = torch.ops.aten

# CUDA's autocast rules (torch 2.13, aten/src/ATen/autocast_mode.h): operations that are computed in
# half precision, in float32, in float32 through their `dtype`, and in the widest argument type.
LOWER = (
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "prelu", "addmm", "addmv",
    "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm",
    "chain_matmul", "linalg_multi_dot", "scaled_dot_product_attention",
)  # fmt: skip
FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p",
    "reciprocal", "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar",
    "softplus", "layer_norm", "native_layer_norm", "group_norm", "cosine_similarity", "nll_loss",
    "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "binary_cross_entropy_with_logits", "dist", "cdist", "renorm", "logsumexp",
)  # fmt: skip
FLOAT32_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum",
    "linalg_vector_norm",
)  # fmt: skip
WIDEST = ("addcdiv", "addcmul", "atan2", "cross", "dot", "index_put", "scatter_add", "tensordot")


class _Event:
    """An event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> _Event:
        return self

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    """A stream that is always empty."""

    device = DEVICE

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def synchronize(self) -> None: ...


class _Scope:
    """The context of a stream or a device."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


class _Module:
    """The device module, like `torch.cuda`; torch registers it as `torch.simulated`."""

    Event, Stream, stream, device = _Event, _Stream, _Scope, _Scope
    _initialized = True

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

    def set_device(self, device: Any) -> None: ...

    def synchronize(self, device: Any = None) -> None: ...

    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream()

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class Simulator(Watch):
    """Makes tensors fake when they move to the device or come from it; other CPU tensors stay real.

    So row lengths and micro-batch plans are computed as in a run. Numbers that the host reads from
    a fake tensor are 1, and masks on the device count as True everywhere.
    """

    def __init__(self) -> None:
        self.device_memory, self.host_memory = MemoryCounter(NAME), FakeHostCounter("cpu")
        self.collectives = CollectiveCounter()
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.operations = OperationCounter(NAME)
        super().__init__((self.device_memory, self.host_memory), self.collectives, self.operations)

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation on shapes only, if an argument is a fake tensor or the device."""
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor derives shapes in a separate mode
        # Operations that fake tensors do not support, one by one.
        values = pytree.tree_leaves((args, kwargs))
        is_fake = any(isinstance(value, FakeTensor) for value in values)
        if func is aten._local_scalar_dense.default and is_fake:
            # Any value will do, of the type that the real tensor would give.
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is aten._pin_memory.default:
            return aten.clone.default(args[0])
        if func is aten.copy_.default and is_fake:
            return args[0]
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == NAME and not is_fake:
            return self._create_fake(func, args, kwargs)
        if is_fake and func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return self._multiply_groups(args, kwargs)
        if is_fake and func in (aten.index.Tensor, aten.nonzero.default):
            args = self._select_all(func, args)
            if func is aten.nonzero.default:
                return args
        return func(*args, **kwargs)

    def like(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a fake tensor of the same shape and dtype on a device."""
        with self.fakes:
            return torch.empty_like(tensor, device=device)

    def _create_fake(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a factory, or a copy to the simulated device; return a tensor without data."""
        with self.fakes:
            if func is aten._to_copy.default:
                source = args[0]
                return torch.empty(
                    source.shape, dtype=kwargs.get("dtype") or source.dtype, device=DEVICE
                )
            # Factories run on the meta device, so nothing is allocated.
            on_meta = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), args)
            return func(*on_meta, **kwargs)

    def _multiply_groups(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run grouped products of experts, whose shapes torch only derives in bfloat16."""
        with self.fakes:
            operands = [torch.empty_like(operand, dtype=torch.bfloat16) for operand in args[:2]]
            product = aten._grouped_mm.default(*operands, *args[2:], **kwargs)
            return torch.empty_like(product, dtype=args[0].dtype)

    def _select_all(self, func: Any, args: Any) -> Any:
        """Return indices, or arguments of an indexing, as if masks were True everywhere."""

        def positions(mask: Tensor) -> list[Tensor]:
            with self.fakes:
                size = (mask.numel(),)
                return [
                    torch.empty(size, dtype=torch.int64, device=mask.device)
                    for _ in range(mask.dim())
                ]

        if func is aten.nonzero.default:
            with self.fakes:
                return torch.stack(positions(args[0]), 1)
        indices: list[Any] = []
        for index in args[1]:
            is_mask = index is not None and index.dtype == torch.bool
            indices += positions(index) if is_mask else [index]
        return (args[0], indices)


class FakeHostCounter(MemoryCounter):
    """Counts host memory of the simulated run: only that of fake tensors."""

    def record(self, tensor: Tensor) -> None:
        """Count a fake tensor."""
        if isinstance(tensor, FakeTensor):
            super().record(tensor)


# Registrations end when their Library objects are freed.
_registered: list[Any] = []


def register() -> torch.device:
    """Register the device in this process, for good."""
    if _registered:
        return DEVICE
    module = _Module()
    _setup_privateuseone_for_python_backend(rename=NAME, backend_module=module)
    # torch's own stream would treat our events as its C++ events, and read invalid memory.
    torch.accelerator.current_stream = module.current_stream  # type: ignore[assignment]
    # torch.tensor(..., device=...) creates CPU tensors first, and moves them at the end.
    torch._C._set_only_lift_cpu_tensors(True)
    beneath = torch.library.Library("_", "IMPL")
    beneath.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    rules = torch.library.Library("aten", "IMPL")
    _registered.extend((beneath, rules))
    # One autocast rule for each operation in the lists above.
    casts = ((LOWER, _cast_lower), (FLOAT32, _cast_float32), (WIDEST, _cast_widest),
             (FLOAT32_RESULT, _ask_for_float32))  # fmt: skip
    for names, cast in casts:
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(aten, packet), overload or "default")
            rules.impl(name, _beneath_autocast(op, cast), "AutocastPrivateUse1")
    rules.impl("scaled_dot_product_attention", _attend, "AutogradPrivateUse1")
    # A single kernel on GPUs; for a device without it, torch decomposes it into six.
    rules.impl("silu_backward", lambda grad, states: torch.empty_like(states), "PrivateUse1")
    dist.Backend.register_backend(
        NAME, fake_pg._create_fake_pg, extended_api=True, devices=["cpu", NAME]
    )
    # torch only clears its own cache at the end of autocast.
    clear = torch.clear_autocast_cache

    def clear_caches() -> None:
        clear()
        _cast_weights.clear()

    torch.clear_autocast_cache = clear_caches
    return DEVICE


Cast = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
keys: Any = torch._C.DispatchKey  # its stubs lack some
AUTOCAST = torch._C.DispatchKeySet(keys.AutocastPrivateUse1)


def _beneath_autocast(op: Callable[..., Any], cast: Cast) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            args, kwargs = cast(args, kwargs)
            return op(*args, **kwargs)

    return run


# Autocast's weight cache, kept until the outermost autocast ends: id of parameter -> its copy.
_cast_weights: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}


def _is_cast(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type == NAME
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _cast_value(value: Any, dtype: torch.dtype) -> Any:
    """Cast a value to `dtype` as autocast does; the copies of weights are cached.

    Returns everything but floating-point tensors on the simulated device, and float64, unchanged.
    """
    if not _is_cast(value) or value.dtype == dtype:
        return value
    # The conditions of torch's own weight cache.
    is_cached = (
        dtype != torch.float32
        and value.dtype == torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
        and torch.is_autocast_cache_enabled()
    )
    if not is_cached:
        return value.to(dtype)
    reference, copy = _cast_weights.get(id(value), (None, None))
    if reference is None or reference() is not value:
        copy = value.to(dtype)
        _cast_weights[id(value)] = weakref.ref(value), copy
    return copy


def _cast_all(args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map(lambda value: _cast_value(value, dtype), (args, kwargs))


def _cast_lower(args: Any, kwargs: Any) -> Any:
    return _cast_all(args, kwargs, torch.get_autocast_dtype(NAME))


def _cast_float32(args: Any, kwargs: Any) -> Any:
    return _cast_all(args, kwargs, torch.float32)


def _cast_widest(args: Any, kwargs: Any) -> Any:
    dtypes = {value.dtype for value in pytree.tree_leaves((args, kwargs)) if _is_cast(value)}
    wide = torch.float32 in dtypes or len(dtypes) > 1
    return _cast_all(args, kwargs, torch.float32) if wide else (args, kwargs)


def _ask_for_float32(args: Any, kwargs: Any) -> Any:
    has_dtype = kwargs.get("dtype") or any(isinstance(value, torch.dtype) for value in args)
    if _is_cast(args[0]) and not has_dtype:
        kwargs = {**kwargs, "dtype": torch.float32}
    return args, kwargs


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attend with the kernel that a GPU of compute capability 8.0 would choose.

    Flash attention for half precision without a mask, if it supports the head size; else the
    memory-efficient kernel.
    """
    size = query.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    if half and attn_mask is None and size <= 256 and size % 8 == 0 and size == value.shape[-1]:
        out = aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return out  # type: ignore[no-any-return]
    # Otherwise the memory-efficient kernel, with repeated keys and an aligned mask.
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(repeats, 1) for states in (key, value))
    if attn_mask is not None:
        attn_mask = _prepare_bias(attn_mask, query, key)
    out = aten._scaled_dot_product_efficient_attention.default(
        query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale
    )[0]
    return out  # type: ignore[no-any-return]


def _prepare_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask as floats in rows of a multiple of 16, as the kernel requires."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(
            mask.logical_not(), -torch.inf
        )
    length = mask.shape[-1]
    if length % 16:
        mask = torch.nn.functional.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


@contextmanager
def fake_ranks() -> Iterator[None]:
    """Context in which `join_ranks` meets simulated ranks that send the same objects."""
    init, new_group = dist.init_process_group, dist.new_group

    def init_process_group(backend: str, *, init_method: str, **options: Any) -> None:
        # torch's fake process group (torch.testing._internal, 2.13).
        store = fake_pg.FakeStore()
        init(f"cpu:{NAME},{NAME}:{NAME}", store=store, **options)

    def make_group(**options: Any) -> Any:
        return new_group(**options | {"backend": f"cpu:{NAME}"})

    def all_gather_object(gathered: list[Any], value: Any, group: Any = None) -> None:
        gathered[:] = [value] * len(gathered)

    with (
        patch.object(dist, "init_process_group", init_process_group),
        patch.object(dist, "new_group", make_group),
        patch.object(dist, "all_gather_object", all_gather_object),
    ):
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
