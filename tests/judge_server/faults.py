"""What may go wrong with a judge, how often, and a bucket that limits the rate."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

from tests.loopback import Occasion

ENDS = {"refusal": "refusal", "content_filter": "content_filter", "truncated": "length"}
KINDS = {
    "hang", "cut", "html", "empty", "no_content", "not_json", "prose", "out_of_range",
    "body", "reject_param", "business", "no_usage", "null_usage", *ENDS,
}  # fmt: skip


@dataclass
class Fault(Occasion):
    """One kind of failure (a status code or one of KINDS), and when it strikes.

    It strikes until `until` (on `time.monotonic`), on paths that contain one of `paths` and
    requests that hold the words `said`. `param`
    names the parameter that `reject_param` (or a 400) is about; `code` is the provider's own word.
    `raw` is sent as the whole body of a status, in any form; `body` sends it
    with status 200 and the Content-Type of `headers`.
    """

    until: float | None = None
    paths: tuple[str, ...] = ()
    said: str = ""
    retry_after: float | str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    param: str | None = None
    code: str | None = None
    message: str | None = None
    raw: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, int) and self.kind not in KINDS:
            raise ValueError(f"unknown fault {self.kind!r}: {sorted(KINDS)}")

    def strikes(self, path: str, body: Any, dice: random.Random) -> bool:
        """Say whether this call meets the fault; counts it when it does."""
        if self.paths and not any(part in path for part in self.paths):
            return False
        if self.said and self.said not in str(body):
            return False
        if self.kind == "reject_param" and not holds_key(body, self.param or ""):
            return False
        if self.until is not None and time.monotonic() >= self.until:
            return False
        return self.comes(dice)


def holds_key(body: Any, name: str) -> bool:
    """Whether a parameter of that name is anywhere in a request body."""
    if isinstance(body, dict):
        return name in body or any(holds_key(value, name) for value in body.values())
    return isinstance(body, list) and any(holds_key(item, name) for item in body)


class Bucket:
    """A token bucket: `rate` calls a second, `burst` at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self.rate, self.burst = rate, max(burst, 1.0)
        self._level, self._at = self.burst, time.monotonic()

    def take(self) -> float:
        """Take one call: 0.0 when there was one, else the seconds until the next."""
        now = time.monotonic()
        self._level = min(self.burst, self._level + (now - self._at) * self.rate)
        self._at = now
        if self._level >= 1.0:
            self._level -= 1.0
            return 0.0
        return (1.0 - self._level) / self.rate


class Minute:
    """So many calls in each minute, counted from the first one."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self._began, self._used = time.monotonic(), 0

    def take(self) -> float:
        """Take one call: 0.0 when there was one left, else the seconds until the next minute."""
        now = time.monotonic()
        if now >= self._began + 60.0 or not self._used:
            self._began, self._used = now, 0
        if self._used < self.calls:
            self._used += 1
            return 0.0
        return self._began + 60.0 - now
