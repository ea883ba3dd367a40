"""The CPU as a device of verl's, which has none; imported by verl itself in verl_update.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

ANSWERS: dict[str, Any] = {
    "is_available": True, "current_device": "cpu", "device_count": 1, "set_device": None,
    "synchronize": None, "manual_seed": None, "manual_seed_all": None, "empty_cache": None,
    "set_allocator_settings": None, "get_device_capability": (None, None),
    "communication_backend_name": "gloo", "visible_devices_envvar": "NO_DEVICES",
    "nvtx_range": nullcontext(), "profiler_start": None, "profiler_stop": None,
    "ray_resource_name": "CPU", "ray_noset_envvars": [], "is_ipc_supported": False, "cudart": None,
}  # fmt: skip


def register_platform(name: str, device_module: Any, **answers: Any) -> None:
    """Tell verl of a platform: what it answers where that differs from `ANSWERS`."""

    def always(answer: Any) -> Any:
        return lambda self, *args, **kwargs: answer

    members = {method: always(answer) for method, answer in (ANSWERS | answers).items()}
    members |= {
        "device_name": property(always(name)), "vendor_name": property(always("none")),
        "device_module": property(always(device_module)),
    }  # fmt: skip
    PlatformRegistry.register(platform=name)(type(f"{name}_platform", (PlatformBase,), members))


register_platform("cpu", torch.cpu)
