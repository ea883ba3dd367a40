"""The ledger of a judge: what its calls cost and what they may cost at most; prices: `prices`.

Before a call is sent its worst case is reserved, in a file too; afterwards the call is settled by
its reported usage. So settled and reserved together stay within the budget, and a call that was in
flight when the process was killed counts at its worst case. Lines are not synced to disk: they
survive the process, but a power cut may lose the last ones. Reservations are made on one event
loop; totals may be read, and the file attached, from any thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import ExhaustedBudget, Interrupted, RewardError
from ppo_cli.paths import read_json_lines
from ppo_cli.rewards.judge.calls import (
    Question,
    UnlimitedCost,
    Usage,
    quick_worst_case,
    worst_case,
)
from ppo_cli.rewards.judge.prices import Price, find_price, model_hint
from ppo_cli.spending import IN_FLIGHT, UPPER_BOUND, in_flight_file, merge_calls

logger = logging.getLogger(__name__)

OTHER = "a further judge's"  # in messages
# Rounding errors of a sum of many small amounts, in dollars.
_ROUNDING = 1e-9
# Lines kept for a file that may be attached later; beyond that the oldest are dropped.
_MAX_UNWRITTEN = 4096
# How far an answer may exceed its token limit: servers count end-of-text tokens differently.
_MAX_EXCESS, _MAX_EXCESS_TOKENS = 1.01, 8


@dataclass(frozen=True)
class Spending:
    """Number of calls, the tokens that they were billed for, and US dollars."""

    calls: int = 0
    usage: Usage = field(default_factory=Usage)
    usd: float = 0.0

    def __add__(self, other: Spending) -> Spending:
        return Spending(self.calls + other.calls, self.usage + other.usage, self.usd + other.usd)


@dataclass(eq=False)
class SharedLedger:
    """A second model that spends from the same ledger at its own price."""

    ledger: Ledger
    price: Price | None
    provider: str
    model: str
    spent: Spending = field(default_factory=Spending)

    async def reserve(self, question: Question) -> Reservation:
        """Reserve the worst case of one call; see `Ledger.reserve`."""
        return await self.ledger.reserve(question, shared=self)

    def check_output_limit(self) -> None:
        """Raise UnlimitedCost as `Ledger.check_output_limit` does."""
        self.ledger.check_output_limit(self)

    def pop_spending(self) -> Spending:
        """Return what was booked for this model since the last call of this method."""
        spent, self.spent = self.spent, Spending()
        return spent


@dataclass(eq=False)
class Reservation:
    """The worst case of one call, reserved until the call is settled."""

    ledger: Ledger
    usage: Usage
    usd: float
    shared: SharedLedger | None = None
    id: str = ""
    input_ratio: float = 1.0  # reserved / estimated input tokens

    def settle(self, usage: Usage, outcome: str, latency_s: float = 0.0, note: str = "") -> float:
        """Book the usage, free the budget that was reserved, and return the cost in dollars."""
        return self.ledger.settle(self, usage, outcome, latency_s, note)

    @property
    def tokens(self) -> int:
        """The most tokens that the call may be billed for."""
        return self.usage.total

    @property
    def model(self) -> dict[str, str]:
        """Provider and model of the call, as in the ledger's file."""
        spender = self.shared or self.ledger
        return {"provider": spender.provider, "model": spender.model}


class Ledger:
    """Counts what a judge costs and keeps its calls within the budget."""

    def __init__(
        self,
        price: Price | None,
        *,
        budget_usd: float | None,
        budget_tokens: int | None,
        provider: str = "",
        model: str = "",
    ) -> None:
        if budget_usd is not None and price is None:
            near = model_hint(provider, model) if provider and model else ""
            raise RewardError(
                f"A budget of ${budget_usd:.2f} needs the price of the judge's model"
                f"{f' {model}' if model else ''}, which is not known.{near} Give it "
                "in US dollars for a million tokens, such as `--rm_price_input 0.4 "
                "--rm_price_output 1.2`, or in a file with --rm_prices, or limit tokens with "
                "--rm_budget_tokens."
            )
        self.price = price
        self.budget_usd = budget_usd
        self.budget_tokens = budget_tokens
        self.provider, self.model = provider, model
        self.total = Spending()  # everything booked, by earlier starts of the run too
        self.unreported = Spending()  # the part of the total that is an upper bound
        self.interrupted = Spending()  # the part that was in flight when the run was killed
        self._new = Spending()
        # By model: the largest ratio of billed to estimated input tokens so far.
        self._input_ratios: dict[str, float] = {}
        self._over_limit: dict[str, Usage] = {}  # by model: an answer above its token limit
        self._session, self._number = secrets.token_hex(4), 0
        self._open: set[Reservation] = set()
        self._settled = asyncio.Event()  # replaced after each settled call
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._unwritten: deque[str] = deque(maxlen=_MAX_UNWRITTEN)
        self._complained = False

    @property
    def has_budget(self) -> bool:
        """Whether dollars or tokens are limited."""
        return (self.budget_usd, self.budget_tokens) != (None, None)

    @property
    def reserved_usd(self) -> float:
        """The most that calls in flight may cost."""
        return math.fsum(call.usd for call in self._open)

    @property
    def reserved_tokens(self) -> int:
        """The most tokens that calls in flight may use."""
        return sum(call.tokens for call in self._open)

    def pop_spending(self) -> Spending:
        """Return what was booked since the last call of this method."""
        with self._lock:
            spent, self._new = self._new, Spending()
        return spent

    async def reserve(
        self, question: Question, *, shared: SharedLedger | None = None
    ) -> Reservation:
        """Reserve the worst case of one call; waits while calls in flight may turn out cheaper.

        Raises Interrupted when the call no longer fits into the budget, UnlimitedCost when the
        model writes more tokens than its limit allows.
        """
        # The worst case is set again after each wait, since a call may raise the input ratio.
        reservation, spender = Reservation(self, Usage(), 0.0, shared), shared or self
        while True:
            self.check_output_limit(shared)
            # Estimated more closely when there is a budget.
            worst = worst_case(question) if self.has_budget else quick_worst_case(question)
            reservation.input_ratio = self._input_ratios.get(spender.model, 1.0)
            read = math.ceil(reservation.input_ratio * worst.input)
            reservation.usage = Usage(read, worst.output)
            reservation.usd = spender.price.cost(reservation.usage) if spender.price else 0.0
            if self._fits(reservation):
                break
            if not self._fits(reservation, alone=True):
                raise self._build_budget_error(reservation)
            await self._settled.wait()
        # Write the reservation down before the call is sent: a killed process cannot settle it.
        self._number += 1
        reservation.id = f"{self._session}-{self._number}"
        self._open.add(reservation)
        with self._lock:
            if not self._write_in_flight([reservation]) and self.has_budget:
                self._open.discard(reservation)
                raise Interrupted(
                    f"The judge's ledger {self._path} cannot be written, so the call was not sent: "
                    "after a kill it would not count. Make room or permit it, then resume."
                )
        return reservation

    def check_output_limit(self, shared: SharedLedger | None = None) -> None:
        """Raise UnlimitedCost when a budget is set and the model exceeded its token limit."""
        model = (shared or self).model
        if self.has_budget and (usage := self._over_limit.get(model)) is not None:
            raise UnlimitedCost(
                f"The judge {model} does not keep to the limit on the tokens of an answer: it "
                f"wrote {usage.output:,}. The cost of a call has no upper bound then, so no budget "
                "can be kept. Raise --rm_max_tokens above what it writes, choose another "
                "--rm_model or --rm_base_url, or go without a budget."
            )

    def attach(self, path: Path) -> None:
        """Write settled calls to this file; calls that are in it already count as spent."""
        with self._lock:
            if self._path == path:
                return
            if self._path is not None:
                raise RewardError(f"The judge's ledger is already kept in {self._path}.")
            try:
                self._open_file(path)
            except OSError as problem:
                raise RewardError(
                    f"Cannot keep the judge's ledger in {path}: {problem.strerror}."
                ) from None

    def _fits(self, need: Reservation, *, alone: bool = False) -> bool:
        """Return whether a call fits into both budgets with the calls that are reserved.

        `alone` leaves out the reserved calls.
        """
        tokens = self.total.usage.total + need.tokens
        usd = self.total.usd + need.usd
        if not alone:
            tokens, usd = tokens + self.reserved_tokens, usd + self.reserved_usd
        return (self.budget_tokens is None or tokens <= self.budget_tokens) and (
            self.budget_usd is None or usd <= self.budget_usd + _ROUNDING
        )

    def _build_budget_error(self, need: Reservation) -> Interrupted:
        """Return the exception for a call that no longer fits into the budget.

        It names the budget that is used up (dollars or tokens), what was spent, and the most that
        the call may take.
        """
        # Part of the total may be an upper bound, which explains a difference to the bill.
        unreported = ""
        if (upper := self.unreported).calls:
            usd = f"${upper.usd:.3g}, " if self.budget_usd is not None else ""
            unreported = (
                f" ({usd}{upper.usage.total:,} tokens of that are an upper bound for {upper.calls} "
                "calls that failed, were cut off or whose usage the judge did not report)"
            )
        # Of two budgets the one that is used up is named.
        if self.budget_usd is not None and self.total.usd + need.usd > self.budget_usd:
            return Interrupted(
                f"The judge budget of ${self.budget_usd:g} is used up: {self.total.calls} calls "
                f"cost ${self.total.usd:.3g}{unreported}, and the next may cost up to "
                f"${need.usd:.2g}. To go on, raise --rm_budget_usd and resume.",
                used_up=ExhaustedBudget(
                    "--rm_budget_usd", self.total.usd, self.total.calls, need.usd
                ),
            )
        assert self.budget_tokens is not None
        used = self.total.usage.total
        return Interrupted(
            f"The judge budget of {self.budget_tokens:,} tokens is used up: {self.total.calls} "
            f"calls used {used:,}{unreported}, and the next may use up to "
            f"{need.tokens:,}. To go on, raise --rm_budget_tokens and resume.",
            used_up=ExhaustedBudget("--rm_budget_tokens", used, self.total.calls, need.tokens),
        )

    def settle(
        self, reservation: Reservation, usage: Usage, outcome: str, latency_s: float, note: str
    ) -> float:
        """Book a call and wake those that wait for the budget; see `Reservation.settle`."""
        # Settling twice counts once.
        if reservation not in self._open:
            return 0.0
        self._open.discard(reservation)
        self._settled.set()  # they run after this method has ended
        self._settled = asyncio.Event()
        shared = reservation.shared
        spender = shared or self
        usd = spender.price.cost(usage) if spender.price else 0.0
        # Later reservations allow for a call that used more than was reserved for it.
        ratio = reservation.input_ratio * usage.input / reservation.usage.input
        self._input_ratios[spender.model] = max(ratio, self._input_ratios.get(spender.model, 1.0))
        if usage.output > _MAX_EXCESS * reservation.usage.output + _MAX_EXCESS_TOKENS:
            self._over_limit[spender.model] = usage
        # One line per call, from which summaries and `ppo show` are made.
        line = {
            "time": round(time.time(), 3), **reservation.model, "id": reservation.id,
            "outcome": outcome, "input": usage.input, "output": usage.output,
            "cached_input": usage.cached_input, "usd": usd, "latency_s": round(latency_s, 4),
        }  # fmt: skip
        line |= {"note": note} if note else {}
        if (ratio := self._input_ratios[spender.model]) > 1.0:
            line["input_ratio"] = ratio
        with self._lock:
            # Totals and the file are updated together.
            spent = Spending(1, usage, usd)
            self.total, self._new = self.total + spent, self._new + spent
            if note == UPPER_BOUND:
                self.unreported = self.unreported + spent
            if shared:
                shared.spent = shared.spent + spent
            self._unwritten.append(json.dumps(line))
            self._write()
        return usd

    def _open_file(self, path: Path) -> None:
        """Count what earlier starts spent, and settle the calls that they left in flight."""
        path.parent.mkdir(parents=True, exist_ok=True)
        sent, settled = read_lines(in_flight_file(path)), read_lines(path)
        # Calls of earlier starts; those without an end were in flight at a kill.
        ends: list[str] = []
        for call in merge_calls(sent, settled):
            with suppress(ValueError, KeyError, TypeError):
                read, written, cached = (int(call[n]) for n in ("input", "output", "cached_input"))
                spent = Spending(1, Usage(read, written, cached), float(call["usd"]))
                self.total = self.total + spent
                if call.get("note") == UPPER_BOUND:
                    self.unreported = self.unreported + spent
                model, ratio = str(call.get("model")), float(call.get("input_ratio", 1.0))
                self._input_ratios[model] = max(ratio, self._input_ratios.get(model, 1.0))
                if call["outcome"] == IN_FLIGHT:
                    self.interrupted = self.interrupted + spent
                    ends.append(json.dumps(call | {"outcome": "killed"}))
        # A kill may have cut the last line: start a new one.
        torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        if torn or ends:  # a run that is refused before its first call leaves no file
            with path.open("a", encoding="utf-8") as file:
                file.write("\n" * torn + "".join(f"{end}\n" for end in ends))
        in_flight_file(path).unlink(missing_ok=True)
        self._path = path
        self._write_in_flight(self._open)
        self._write()

    def _write_in_flight(self, calls: Iterable[Reservation]) -> bool:
        """Append calls that are about to be sent; return whether they are in the file."""
        # A call counts at its worst case until it is settled.
        lines = [
            {"time": round(time.time(), 3)}
            | call.model
            | {"id": call.id, "outcome": IN_FLIGHT, "input": call.usage.input}
            | {"output": call.usage.output, "cached_input": 0, "usd": call.usd}
            | {"note": UPPER_BOUND}
            for call in calls
        ]
        if self._path is None:
            return True
        return self._append(in_flight_file(self._path), [json.dumps(line) for line in lines])

    def _write(self) -> None:
        """Append the settled calls; empty the in-flight file when no call is in flight.

        Lines that cannot be written are written with the next ones: until then the in-flight
        file still has their calls.
        """
        if self._path is None or not self._append(self._path, self._unwritten):
            return
        self._unwritten.clear()
        if not self._open:
            with suppress(OSError):
                os.truncate(in_flight_file(self._path), 0)

    def _append(self, path: Path, lines: Collection[str]) -> bool:
        """Append lines, if any, in one write; return whether that worked."""
        if not lines:
            return True
        # A write that failed before may have ended in the middle of a line.
        start = "\n" if self._complained else ""
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(start + "".join(f"{line}\n" for line in lines))
        except OSError as problem:
            if not self._complained:
                logger.warning("cannot write the judge's ledger: %s", problem.strerror)
            self._complained = True
            return False
        return True


def build_ledger(api: ApiReward) -> Ledger:
    """Return a judge's ledger; RewardError for a budget in dollars without a known price."""
    return Ledger(
        find_price(api),
        budget_usd=api.budget_usd,
        budget_tokens=api.budget_tokens,
        provider=api.type,
        model=(api.model or "").strip(),
    )


def share_ledger(
    ledger: Ledger, judge: ApiReward, whose: str = "the monitoring judge's"
) -> SharedLedger:
    """Let another judge spend from a ledger; RewardError as for `build_ledger`."""
    price, model = find_price(judge), (judge.model or "").strip()
    if price is None and judge.budget_usd is not None:
        raise RewardError(
            f"A budget in dollars needs the price of {whose} model {model}, which "
            f"is not known.{model_hint(judge.type, model)} Give it in a file with --rm_prices."
        )
    return SharedLedger(ledger, price, judge.type, model)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a file; a line that a kill cut off is skipped."""
    return read_json_lines(path) if path.exists() else []
