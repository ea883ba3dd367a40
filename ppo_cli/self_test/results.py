"""The comparisons of a check, and its outcome for people."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ppo_cli.errors import first_line
from ppo_cli.machine.device_record import Feature, State
from ppo_cli.secrets.redact import redact

Figure = float | int | str


@dataclass(frozen=True)
class LayerShape:
    """Sizes of the model to train that kernels depend on."""

    # The defaults are a common model, for a self-test without a model to train.
    heads: int = 28
    kv_heads: int = 4
    head_size: int = 128
    vocabulary: int = 152_064
    model: str = "Qwen2.5-7B"  # the model with these sizes


@dataclass(frozen=True)
class Setup:
    """The devices that checks run on ("cpu" or "cuda"), and a folder for files of one check."""

    device: str
    gpus: int
    folder: Path
    shape: LayerShape = LayerShape()


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check; `detail` says what was compared, differs, failed or was skipped."""

    check: str
    state: State
    detail: str
    seconds: float = 0.0
    figures: dict[str, Figure] = field(default_factory=dict)
    proven: tuple[Feature, ...] = ()


class Results:
    """Collects the comparisons of a check.

    An error inside a `part` ends only that part. Features are proven only on GPUs.
    """

    def __init__(self) -> None:
        self.figures: dict[str, Figure] = {}
        self._differences: list[str] = []
        self._failures: list[str] = []
        self._skips: list[str] = []
        self._proven: list[Feature] = []
        self._largest = ("", 0.0, math.inf)  # name, gap and limit of the gap closest to its limit
        self._count = 0

    def compare(self, name: str, gap: float, limit: float) -> None:
        """Require a gap to be at most `limit`; NaN is a difference."""
        self._count += 1
        # Negated, because NaN compares as false.
        if not gap <= limit:
            self._differences.append(f"{name} by {gap:.2g} (limit {limit:.2g})")
        if limit > 0 and gap / limit >= self._largest[1] / self._largest[2]:
            self._largest = (name, gap, limit)

    def require(self, name: str, holds: bool) -> None:
        """Require that `holds` is true; `name` says what is wrong otherwise."""
        self._count += 1
        if not holds:
            self._differences.append(name)

    def skip(self, reason: str) -> None:
        """Record what was not checked, and why."""
        self._skips.append(reason)

    def prove(self, feature: Feature) -> None:
        """Count a feature as proven by this check."""
        self._proven.append(feature)

    @contextmanager
    def part(self, name: str, *proves: Feature) -> Iterator[None]:
        """Run a part; it proves these features unless a difference or an error occurs in it."""
        # Compare the counts before and after the part.
        before = len(self._differences) + len(self._failures)
        try:
            yield
        except Exception as error:
            self._failures.append(f"{name}: {describe_error(error)}")
        if len(self._differences) + len(self._failures) == before:
            self._proven += proves

    def outcome(self, check: str, device: str) -> Outcome:
        """Return the outcome of the comparisons so far."""
        # Failures first, then differences; parts that were skipped because of them at the end.
        detail = "; ".join(self._failures + self._differences)
        detail += "".join(f"; {reason}" for reason in self._skips if detail)
        state: State = "failed" if self._failures else "differs" if self._differences else "ok"
        if not detail and not self._count:
            state, detail = "skipped", "; ".join(self._skips)
        elif not detail:
            # The comparison closest to its limit shows how much margin is left.
            name, gap, limit = self._largest
            closest = f"; closest to its limit: {name} {gap:.1g} of {limit:.1g}" if name else ""
            skips = "".join(f"; {reason}" for reason in self._skips)
            detail = f"{self._count} comparisons{closest}{skips}"
        # A CPU proves nothing about the features of a GPU.
        proven = tuple(self._proven) if device == "cuda" else ()
        return Outcome(check, state, redact(detail), figures=self.figures, proven=proven)


def describe_error(error: BaseException) -> str:
    """Return one line about an error, without secrets."""
    return redact(f"{type(error).__name__}: {first_line(error)}".rstrip(": "))
