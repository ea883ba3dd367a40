"""FLOPs that models need for a batch, and what GPUs can do.

MFU is what the models need over what the device could do (Chowdhery et al. 2022, arXiv 2204.02311,
appendix B): a forward pass takes 2 FLOPs a weight and token, and 4 a layer, width and pair of
tokens for attention, of which a causal one has half; logits are needed at response tokens only. A
backward pass takes twice the forward one. Recomputation, AdamW and entropies are not counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ppo_cli.config.models.shape import Shape


@dataclass(frozen=True)
class GpuSpeed:
    """Dense TFLOP/s in half precision and GB/s of the memory, by NVIDIA's data sheets."""

    tflops: float
    gb_per_s: float


# The first name that a GPU's own name has as words counts; laptops and the D have other speeds.
GPU_SPEEDS = {
    "GB200": GpuSpeed(2500, 8000), "B200": GpuSpeed(2250, 8000), "GH200": GpuSpeed(989, 4000),
    "H200 NVL": GpuSpeed(835, 4800), "H200": GpuSpeed(989, 4800),
    "H100 PCIe": GpuSpeed(756, 2000), "H100 NVL": GpuSpeed(835, 3900),
    "H100": GpuSpeed(989, 3350), "H20": GpuSpeed(148, 4000), "A100": GpuSpeed(312, 2039),
    "A10G": GpuSpeed(70, 600), "A10": GpuSpeed(125, 600), "L40S": GpuSpeed(362, 864),
    "L40": GpuSpeed(181, 864), "L4": GpuSpeed(121, 300), "RTX 4090": GpuSpeed(165, 1008),
    "T4": GpuSpeed(65, 320), "V100": GpuSpeed(125, 900), "P100": GpuSpeed(21, 732),
}  # fmt: skip


def find_speed(name: str) -> GpuSpeed | None:
    """Return what a GPU of this name can do; None for one that is not listed."""
    for part, speed in GPU_SPEEDS.items():
        if re.search(rf"\b{part}\b(?! Laptop| D\b)", name):
            return speed
    return None


# Shares of the data sheet that large products and long copies usually reach, and the seconds that
# the host takes to start a kernel. Guesses, compared with one H100 (notes/lab_book.md).
PRODUCT_SHARE, TRAFFIC_SHARE, LAUNCH_S = 0.6, 0.7, 8e-6


@dataclass(frozen=True)
class Prediction:
    """Seconds of a piece of work on a GPU, and which of its parts take them."""

    products_s: float
    traffic_s: float
    launches_s: float

    @classmethod
    def make(
        cls,
        speed: GpuSpeed,
        flops: float,
        product_bytes: float,
        other_bytes: float,
        launches: float,
    ) -> Prediction:
        """Predict with a roofline (Williams et al. 2009): products, and all other kernels."""
        rate = TRAFFIC_SHARE * speed.gb_per_s * 1e9
        products_s = max(flops / (PRODUCT_SHARE * speed.tflops * 1e12), product_bytes / rate)
        return cls(products_s, other_bytes / rate, launches * LAUNCH_S)

    @property
    def seconds(self) -> float:
        """The device works off kernels one by one, while the host starts the next ones."""
        return max(self.products_s + self.traffic_s, self.launches_s)

    @property
    def bound(self) -> str:
        """What takes most of the time."""
        if self.launches_s > self.products_s + self.traffic_s:
            return "the host, which starts kernels"
        return "products" if self.products_s > self.traffic_s else "memory traffic between products"


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of a forward pass over a batch: of all layers, and of the head."""

    body: float
    head: float

    @classmethod
    def count(cls, shape: Shape, tokens: float, pairs: float, responses: float) -> ForwardFlops:
        """Count a plain decoder's; `pairs` are those of a token and one before it, or itself.

        `responses` are the response tokens, which need logits.
        """
        body = 2 * shape.layers * (shape.layer * tokens + 2 * shape.queries * pairs)
        return cls(body, 2.0 * shape.embedding * responses)

    def annotate(self, policies: int, critics: int) -> float:
        """Return the FLOPs of an annotation by some models of this shape."""
        return (policies + critics) * self.body + policies * self.head

    def update(self, *, critic: bool) -> float:
        """Return the FLOPs of a pass over all rows that trains the actor, and a critic if any."""
        return 3 * ((2 if critic else 1) * self.body + self.head)
