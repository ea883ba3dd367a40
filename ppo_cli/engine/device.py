"""Where the one-process engine computes, and in which precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Compute:
    """A device and the precision of matrix products; weights stay in float32."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def choose(cls, dtype: str | None) -> Compute:
        """Take the GPU if there is one; unset precision is bfloat16 there, else float32."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        name = dtype or ("bfloat16" if device.type == "cuda" else "float32")
        return cls(device, getattr(torch, name))

    def autocast(self) -> AbstractContextManager[object]:
        """Context in which forward passes run."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)
