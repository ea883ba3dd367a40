"""The dynamic scale of losses in float16 (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).

Gradients below 6e-8 are 0 in float16. So a loss is multiplied by a power of two before the backward
pass, and the float32 gradients are divided by it before the step. An infinite gradient means that
the scale is too large: the step is skipped, and the scale halved. After many steps without that it
is doubled. The numbers are those of `torch.amp.GradScaler`.
"""

from __future__ import annotations

START = 2.0**16
LEAST = 1.0  # gradients that are still infinite do not come from the scale
GROWTH_STEPS = 2000  # without an infinite gradient, until the scale is doubled


class LossScale:
    """A scale that follows the gradients; constant 1 where losses are not scaled."""

    def __init__(self, *, dynamic: bool) -> None:
        self.dynamic = dynamic
        self.value = START if dynamic else 1.0
        self._steps = 0  # since the last change

    def update(self, *, finite: bool) -> None:
        """Adapt the scale to the gradients of a step."""
        if not self.dynamic:
            return
        self._steps = self._steps + 1 if finite else 0
        if not finite:
            self.value = max(LEAST, self.value / 2)
        elif self._steps == GROWTH_STEPS:
            self.value, self._steps = self.value * 2, 0

    def state(self) -> tuple[float, int]:
        """Return the state for a checkpoint."""
        return self.value, self._steps

    def load_state(self, state: tuple[float, int]) -> None:
        """Restore the state of a checkpoint, unless this run does not scale losses."""
        if self.dynamic:
            self.value, self._steps = state
