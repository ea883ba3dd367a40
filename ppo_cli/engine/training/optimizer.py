"""AdamW with learning-rate schedule and clipping; it skips steps with non-finite gradients.

8-bit moments use bitsandbytes (Dettmers et al. 2022, arXiv 2110.02861): each block of 256 numbers
has a scale and codes for numbers in [-1, 1]. In checkpoints moments are always float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ppo_cli.config.schedule import lr_factor
from ppo_cli.config.schema.algorithm import Optim
from ppo_cli.engine.device import send
from ppo_cli.engine.models.loading import import_bitsandbytes
from ppo_cli.engine.ranks import ALONE, Ranks, sum_over_ranks
from ppo_cli.engine.sharding.host_memory import HostCopies
from ppo_cli.engine.sharding.tensors import scatter_from_rank0
from ppo_cli.engine.training.loss_scale import LossScale
from ppo_cli.errors import ModelError

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
EIGHT_BITS = "optim.optimizer AdamW8bit"
BLOCK = 256  # numbers of an 8-bit moment that share a scale; fixed in bitsandbytes
LEAST_IN_8_BITS = 4096  # elements; the moments of smaller pieces stay float32


class Optimizer:
    """AdamW over the float32 weights of one model, or over this rank's shards of them.

    AdamW works elementwise, so each rank updates its own shards. Only the gradient norm is
    computed over all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        optim: Optim,
        *,
        total_steps: int,
        grad_clip: float,
        clip_grad_value: float | None,
        ranks: Ranks = ALONE,
        offload: bool = False,
        scales_losses: bool = False,
    ) -> None:
        self.loss_scale = LossScale(dynamic=scales_losses)
        self._parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._pieces = {name: _piece(p) for name, p in self._parameters.items()}
        # No weight decay for norm weights and biases, which have one axis.
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self._pieces.values() if p.ndim >= 2]},
            {"params": [p for p in self._pieces.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._settings = optim
        self._total_steps = total_steps
        self._grad_clip = grad_clip
        self._clip_grad_value = clip_grad_value
        self._ranks = ranks
        self._offload = offload
        self._host = HostCopies()
        adamw: Any = partial(torch.optim.AdamW, fused=True)
        self._in_8_bits = optim.optimizer == "AdamW8bit"
        if self._in_8_bits:
            adamw = partial(
                import_bitsandbytes(EIGHT_BITS).optim.AdamW8bit, min_8bit_size=LEAST_IN_8_BITS
            )
        self._adamw: torch.optim.Optimizer = adamw(
            [g for g in groups if g["params"]], lr=optim.lr, betas=optim.betas, eps=optim.eps,
            weight_decay=optim.weight_decay,
        )  # fmt: skip
        self._stepped: set[str] = set()  # parameters that had a step, so that moments are not zero
        if not self._in_8_bits:
            # Allocated now: if allocated in the first step, moments would fill the memory of its
            # activations, and later activations would need new memory.
            pieces = [*self._pieces.values()]
            if offload:
                self._reserve_host(pieces)
            self._adamw.state.update((piece, self._zero_moments(piece)) for piece in pieces)
        self.set_progress(0)

    @property
    def lr(self) -> float:
        """Return the current learning rate."""
        return float(self._adamw.param_groups[0]["lr"])

    def set_progress(self, step: int | None) -> None:
        """Set the learning rate of training step `step`, counted from 0; None: the peak."""
        lr = self._settings.lr
        if step is not None:
            lr *= lr_factor(step, self._total_steps, self._settings)
        for group in self._adamw.param_groups:
            group["lr"] = lr

    def configure(
        self, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, clip: float
    ) -> None:
        """Set the numbers of the next steps, for a program that steps by itself; `clip` 0: none."""
        self._grad_clip = clip
        for group in self._adamw.param_groups:
            group |= {"lr": lr, "betas": betas, "eps": eps}
            if group["params"][0].ndim >= 2:
                group["weight_decay"] = weight_decay

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in (*self._parameters.values(), *self._pieces.values()):
            parameter.grad = None

    @torch.no_grad()
    def apply(self) -> tuple[float, bool]:
        """Clip and step; returns the gradient norm before clipping, and whether it stepped.

        Gradients are those of the loss times `loss_scale`; the norm is without the scale. If it is
        not finite, weights and moments stay unchanged on all ranks.
        """
        graded = []
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._pieces[name].grad = _local(parameter.grad)
                graded.append(name)
        # Measured before clipping by value, which would turn an infinity into a number.
        scale = self.loss_scale.value
        norm = self._norm() / scale
        stepped = math.isfinite(norm)
        if stepped:
            self._clip_gradients(norm, scale)
            self._place_moments(at_work=True)
            self._adamw.step()
            self._stepped.update(graded)
            self._place_moments(at_work=False)
        self.zero_grad()
        self.loss_scale.update(finite=stepped)
        return norm, stepped

    def moments(self) -> dict[str, Tensor]:
        """Return AdamW's state: "<parameter>.exp_avg", ".exp_avg_sq" and ".step".

        Live tensors, sharded like the parameters; empty before the first step. 8-bit moments are
        returned as float32 copies in host memory.
        """
        moments: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if name in self._stepped:
                state: Mapping[str, Any] = self._adamw.state[self._pieces[name]]
                for what, tensor in (dequantise(state) if self._in_8_bits else state).items():
                    moments[f"{name}.{what}"] = (
                        tensor if what == "step" else _as_layout_of(parameter, tensor)
                    )
        return moments

    def load_moments(self, names: Collection[str], read: Callable[[str], Tensor | None]) -> None:
        """Restore the moments with these `names`, not the learning rate; all ranks call.

        `read` returns the whole tensor of a name on the first rank, None on the others. Raises
        ModelError if the names are not those of the trained parameters.
        """
        expected = {f"{name}.{what}" for name in self._parameters for what in MOMENTS}
        if unknown := sorted(set(names) - expected):
            raise ModelError(
                f"The optimizer state is of other parameters than are trained now ({unknown[0]} "
                f"and {len(unknown) - 1} more)."
            )
        # From here on a failure leaves the optimizer unusable; the run ends.
        self._adamw.state.clear()
        self._stepped.clear()
        for name, parameter in self._parameters.items():
            stored = [what for what in MOMENTS if f"{name}.{what}" in names]
            if not stored:
                continue
            self._stepped.add(name)
            piece = self._pieces[name]
            state = self._zero_moments(piece)
            for what in stored:
                target = state[what] if what == "step" else _as_layout_of(parameter, state[what])
                scatter_from_rank0(target, read(f"{name}.{what}"), self._ranks)
            self._adamw.state[piece] = _to_8_bits(state) if self._in_8_bits else state
        if self._in_8_bits:
            self._place_moments(at_work=False)

    def _norm(self) -> float:
        """Return the norm of all gradients, the same on every rank."""
        # Squares of a shard that several ranks hold count once.
        graded = {n: p.grad for n, p in self._pieces.items() if p.grad is not None}
        squares = 0.0
        if graded:
            # `_foreach_*` of torch 2.13: one kernel for all tensors.
            norms = torch.stack(torch._foreach_norm(list(graded.values()))).double()
            copies = send(torch.tensor([self._copies(name) for name in graded]), norms.device)
            squares = float((norms**2 / copies).sum())
        return math.sqrt(sum_over_ranks(self._ranks, squares))

    def _copies(self, name: str) -> float:
        """Return how many ranks hold the same shard of a parameter."""
        parameter = self._parameters[name]
        pieces = 1
        if isinstance(parameter, DTensor):
            for axis, placement in enumerate(parameter.placements):
                if not placement.is_replicate():
                    pieces *= parameter.device_mesh.size(axis)
        return self._ranks.size / pieces

    def _clip_gradients(self, norm: float, scale: float) -> None:
        """Divide gradients by `scale` and clip them in place: each value, if set, then the norm.

        `norm` is the norm of all gradients before clipping, without the scale.
        """
        grads = [p.grad for p in self._pieces.values() if p.grad is not None]
        if scale != 1.0 and grads:
            torch._foreach_div_(grads, scale)  # exact: the scale is a power of two
        # First by value, then by the norm that is left.
        if self._clip_grad_value is not None:
            for grad in grads:
                grad.clamp_(-self._clip_grad_value, self._clip_grad_value)
            norm = self._norm()
        if 0 < self._grad_clip < norm and grads:
            torch._foreach_mul_(grads, self._grad_clip / norm)

    def _place_moments(self, *, at_work: bool) -> None:
        """Move moments to the device of the weights for a step, or offload them after it.

        The step counts stay on the device.
        """
        states = self._adamw.state
        if at_work:
            for piece, state in states.items():
                for what, tensor in state.items():
                    if isinstance(tensor, Tensor):
                        state[what] = tensor.to(piece.device, non_blocking=True)
        elif self._offload:
            away = {
                (piece, what): tensor
                for piece, state in states.items()
                for what, tensor in state.items()
                if isinstance(tensor, Tensor) and tensor.dim() and tensor.device.type != "cpu"
            }
            for (piece, what), place in self._host.store(away).items():
                states[piece][what] = place

    def _reserve_host(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return host buffers for moments, pinned only if they are copied to a GPU."""
        on_gpu = any(piece.device.type == "cuda" for piece in pieces)
        on_gpu |= self._ranks.alone and torch.cuda.is_available()  # weights are offloaded too
        moments = {(piece, what): piece for piece in pieces for what in MOMENTS[1:]}
        return [*self._host.reserve(moments, pinned=on_gpu).values()]

    def _zero_moments(self, piece: Tensor) -> dict[str, Tensor]:
        """Return AdamW's state of a piece (a shard) before its first step: zeros in float32.

        Offloaded moments are in host memory. With an 8-bit optimizer they are on the piece's
        device, until `_to_8_bits` converts them.
        """
        step = torch.zeros((), dtype=torch.float32, device=piece.device)
        if self._offload and not self._in_8_bits:
            zeros = [place.zero_() for place in self._reserve_host([piece])]
        else:
            zeros = [torch.zeros_like(piece), torch.zeros_like(piece)]
        return {"step": step} | dict(zip(MOMENTS[1:], zeros, strict=True))


def _piece(parameter: Tensor) -> nn.Parameter:
    """Return this rank's shard of a parameter; it shares the parameter's memory."""
    if isinstance(parameter, DTensor):
        return nn.Parameter(_local(parameter.detach()))
    return parameter  # type: ignore[return-value]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def dequantise(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the moments of bitsandbytes' state by AdamW's names, in float32 in host memory."""
    if not state:
        return {}
    moments = {"step": torch.tensor(float(state["step"]))}
    for number, what in enumerate(MOMENTS[1:], 1):
        moment = state[f"state{number}"].cpu()
        if moment.dtype == torch.uint8:
            sizes = state[f"absmax{number}"].cpu().repeat_interleave(BLOCK)[: moment.numel()]
            codes = state[f"qmap{number}"].cpu()[moment.int()]
            moment = codes * sizes.view_as(codes)
        moments[what] = moment
    return moments


def _to_8_bits(moments: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return bitsandbytes' state for the moments of one piece; the inverse of `dequantise`.

    Exact when the blocks are cut as they were; otherwise values are rounded again.
    """
    functional = import_bitsandbytes(EIGHT_BITS).functional
    state: dict[str, Any] = {"step": int(moments["step"])}
    for number, what in enumerate(MOMENTS[1:], 1):
        moment = moments[what]
        state[f"state{number}"] = moment
        if moment.numel() >= LEAST_IN_8_BITS:
            code = functional.create_dynamic_map(signed=what == "exp_avg").to(moment.device)
            codes, sizes = quantise(moment, code)
            state |= {f"state{number}": codes, f"qmap{number}": code, f"absmax{number}": sizes}
    return state


def quantise(values: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest codes in the shape of `values`, and the scales of their blocks."""
    missing = -values.numel() % BLOCK
    blocks = nn.functional.pad(values.flatten(), (0, missing)).view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    # The largest number of a block is its scale, or, if negative, was rounded to the first code,
    # about -0.993. The code of squares has no negative numbers.
    size = largest / code[0].abs() if code[0] < 0 else largest
    borders = (code[1:] + code[:-1]) / 2
    up, down = (torch.nextafter(size, torch.full_like(size, to)) for to in (math.inf, 0.0))
    sizes, codes = largest, _nearest(blocks, largest, borders)
    # Try the scale and its neighbours, because of rounding; the last exact one counts.
    for tried in (up, down, size):
        nearest = _nearest(blocks, tried, borders)
        exact = (code[nearest] * tried[:, None] == blocks).all(1)
        codes, sizes = torch.where(exact[:, None], nearest, codes), torch.where(exact, tried, sizes)
    all_codes = codes.flatten()[: values.numel()].view_as(values)
    return all_codes.to(torch.uint8), sizes


def _nearest(blocks: Tensor, sizes: Tensor, borders: Tensor) -> Tensor:
    scaled = blocks / sizes.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    return torch.bucketize(scaled, borders, out_int32=True)


def _as_layout_of(parameter: Tensor, piece: Tensor) -> Tensor:
    """Return a rank's shard, on whichever device, as a tensor sharded like the parameter."""
    if not isinstance(parameter, DTensor):
        return piece
    # `from_local` would copy an offloaded shard to the device. Private constructor of torch 2.13.
    return DTensor(piece, parameter._spec, requires_grad=False)
