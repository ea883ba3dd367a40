"""What a judge costs: what was spent, and what calls may cost at most; `prices` has the prices.

The worst case of a call is reserved, in a file too, before it is sent and settled by its usage
after, so that settled and reserved together stay within the budget, and calls that were in flight
when the process was killed count at their worst case. Lines are not synced to the disk: they
survive the process, and a power cut may lose the last ones. Reservations live on one event loop;
totals may be read, and the file attached, from any thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import secrets
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import Interrupted, RewardError, UsedUp
from ppo_cli.rewards.judge.cache import default_cache_path
from ppo_cli.rewards.judge.calls import (
    Question,
    UnlimitedCost,
    Usage,
    quick_worst_case,
    worst_case,
)
from ppo_cli.rewards.judge.prices import Price, find_price, model_hint
from ppo_cli.spending import IN_FLIGHT, UPPER_BOUND, all_calls, in_flight_file

logger = logging.getLogger(__name__)

# Sums of many small floats may be off by this much, in dollars.
_ROUNDING = 1e-9
# Lines kept for a file that may be attached later; without one they are dropped one by one.
_MOST_UNWRITTEN = 4096
# An answer may be this much longer than its limit: servers count the ends of answers differently.
_MOST_EXCESS, _MOST_EXCESS_TOKENS = 1.01, 8


@dataclass(frozen=True)
class Spending:
    """Calls that were made, the tokens they were billed for, and US dollars."""

    calls: int = 0
    usage: Usage = field(default_factory=Usage)
    usd: float = 0.0

    def __add__(self, other: Spending) -> Spending:
        return Spending(self.calls + other.calls, self.usage + other.usage, self.usd + other.usd)


@dataclass(eq=False)
class SharedLedger:
    """Another model's calls on the same budget, at their own price."""

    ledger: Ledger
    price: Price | None
    provider: str
    model: str
    spent: Spending = field(default_factory=Spending)

    async def reserve(self, question: Question) -> Reservation:
        """Set aside the worst case of one call; see `Ledger.reserve`."""
        return await self.ledger.reserve(question, shared=self)

    def check_output_limit(self) -> None:
        """Raise UnlimitedCost as `Ledger.check_output_limit` does."""
        self.ledger.check_output_limit(self)

    def take(self) -> Spending:
        """Return what this model was booked for since the last call of this method."""
        spent, self.spent = self.spent, Spending()
        return spent


@dataclass(eq=False)
class Reservation:
    """The worst case of one call, held until the call is settled."""

    ledger: Ledger
    usage: Usage
    usd: float
    shared: SharedLedger | None = None
    day: str = ""  # whose budget holds it
    id: str = ""
    input_ratio: float = 1.0  # of the tokens that are reserved to those estimated

    def settle(self, usage: Usage, outcome: str, latency_s: float = 0.0, note: str = "") -> float:
        """Book what the call was billed for, free the rest and return the cost; once only."""
        return self.ledger.settle(self, usage, outcome, latency_s, note)

    @property
    def tokens(self) -> int:
        """Most tokens that the call may be billed for."""
        return self.usage.total

    @property
    def model(self) -> dict[str, str]:
        """Provider and model of the call, as its lines name them."""
        who = self.shared or self.ledger
        return {"provider": who.provider, "model": who.model}


class DayBudget:
    """What a user's runs spend in a day, in one SQLite file for all of them.

    A call is booked at its worst case before it is sent and corrected after, so that runs side by
    side stay within the budget. The calls of a killed run stay booked as they are.
    """

    def __init__(self, path: Path, most_usd: float) -> None:
        self.most_usd = most_usd
        self._path = path
        self._db: sqlite3.Connection | None = None  # opened by the first call, not by a plan

    @classmethod
    def of(cls, api: ApiReward, environ: Mapping[str, str]) -> DayBudget | None:
        """The budget that the settings ask for; its file is the same for every `--rm_cache`."""
        if api.budget_usd_day is None:
            return None
        cache = default_cache_path(environ)
        return cls(cache.with_name(f"{cache.stem}.spent.sqlite"), api.budget_usd_day)

    def take(self, held: Reservation) -> bool:
        """Book a call on this day if it fits."""
        held.day = datetime.now(UTC).date().isoformat()
        self._do("INSERT OR IGNORE INTO spent VALUES (?, 0.0)", held.day)
        book = "UPDATE spent SET usd = usd + ? WHERE day = ? AND usd + ? <= ?"
        return self._do(book, held.usd, held.day, held.usd, self.most_usd + _ROUNDING) == 1

    def settle(self, held: Reservation, usd: float) -> None:
        """Put what a call cost in the place of its worst case."""
        self._do("UPDATE spent SET usd = usd + ? WHERE day = ?", usd - held.usd, held.day)

    def _do(self, order: str, *values: str | float) -> int:
        """Change the file, and return how many rows that were."""
        try:
            if self._db is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._db = sqlite3.connect(self._path, timeout=30.0, check_same_thread=False)
                self._db.execute("PRAGMA synchronous=OFF")
                with self._db:
                    table = "spent (day TEXT PRIMARY KEY, usd REAL)"
                    self._db.execute(f"CREATE TABLE IF NOT EXISTS {table}")
            with self._db:
                return self._db.execute(order, values).rowcount
        except (OSError, sqlite3.Error) as problem:
            raise RewardError(
                f"Cannot count what is spent in a day (--rm_budget_usd_day) in {self._path}: "
                f"{problem}."
            ) from None


class Ledger:
    """Counts what a judge costs and keeps its calls within the budget."""

    def __init__(
        self,
        price: Price | None,
        *,
        budget_usd: float | None,
        budget_tokens: int | None,
        budget_day: DayBudget | None = None,
        provider: str = "",
        model: str = "",
    ) -> None:
        most = budget_day.most_usd if budget_usd is None and budget_day else budget_usd
        if most is not None and price is None:
            near = model_hint(provider, model) if provider and model else ""
            raise RewardError(
                f"A budget of ${most:.2f} needs the price of the judge's model"
                f"{f' {model}' if model else ''}, which is not known.{near} Give it with "
                "--rm_price_input and --rm_price_output (US dollars for a million tokens) or in a "
                "file with --rm_prices, or limit tokens with --rm_budget_tokens."
            )
        self.price = price
        self.budget_usd = budget_usd
        self.budget_tokens = budget_tokens
        self.budget_day = budget_day
        self.provider, self.model = provider, model
        self.total = Spending()  # everything booked, by earlier runs in the same file too
        self.unreported = Spending()  # the part of it that is an upper bound
        self.interrupted = Spending()  # the part of it that was in flight when a run was killed
        self._new = Spending()
        # By model: its tokenizer may make more tokens of a text than is estimated.
        self._input_ratios: dict[str, float] = {}
        self._too_long: dict[str, Usage] = {}
        self._session, self._number = secrets.token_hex(4), 0
        self._open: set[Reservation] = set()
        self._settled = asyncio.Event()  # a new one after each settled call
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._unwritten: deque[str] = deque(maxlen=_MOST_UNWRITTEN)
        self._complained = False

    @property
    def has_budget(self) -> bool:
        """Whether there is any limit on what calls may take."""
        return (self.budget_usd, self.budget_tokens, self.budget_day) != (None, None, None)

    @property
    def reserved_usd(self) -> float:
        """What calls under way may still cost at most."""
        return math.fsum(call.usd for call in self._open)

    @property
    def reserved_tokens(self) -> int:
        """How many tokens calls under way may still use at most."""
        return sum(call.tokens for call in self._open)

    def take(self) -> Spending:
        """Return what was booked since the last call of this method."""
        with self._lock:
            spent, self._new = self._new, Spending()
        return spent

    async def reserve(
        self, question: Question, *, shared: SharedLedger | None = None
    ) -> Reservation:
        """Set aside the worst case of one call, waiting while others may settle lower.

        Raises Interrupted when the call can no longer fit into the budget, UnlimitedCost when
        the model writes more than it may.
        """
        reservation = Reservation(self, Usage(), 0.0, shared)
        day = self.budget_day
        while True:
            self.check_output_limit(shared)
            self._set_worst_case(reservation, question)
            if (fits := self._fits(reservation)) and (day is None or day.take(reservation)):
                break
            if not self._fits(reservation, alone=True) or (fits and not self._open):
                raise self._used_up(reservation)
            await self._settled.wait()
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
        """Raise UnlimitedCost where the model has written more tokens than it was allowed."""
        who = shared or self
        if self.has_budget and (usage := self._too_long.get(who.model)) is not None:
            raise UnlimitedCost(
                f"The judge {who.model} does not keep to the limit on the tokens of an answer: it "
                f"wrote {usage.output:,}. What a call costs has no upper bound then, and no budget "
                "can hold. Raise --rm_max_tokens above what it writes, take another --rm_model or "
                "--rm_base_url, or go without a budget."
            )

    def _set_worst_case(self, reservation: Reservation, question: Question) -> None:
        """Set what a call may take at most; measured closely where a budget depends on it."""
        worst = worst_case(question) if self.has_budget else quick_worst_case(question)
        who = reservation.shared or self
        reservation.input_ratio = self._input_ratios.get(who.model, 1.0)
        reservation.usage = Usage(math.ceil(reservation.input_ratio * worst.input), worst.output)
        reservation.usd = who.price.cost(reservation.usage) if who.price else 0.0

    def attach(self, path: Path) -> None:
        """Write each settled call to this file; what it already holds counts as spent."""
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
        tokens = self.total.usage.total + need.tokens
        usd = self.total.usd + need.usd
        if not alone:
            tokens, usd = tokens + self.reserved_tokens, usd + self.reserved_usd
        return (self.budget_tokens is None or tokens <= self.budget_tokens) and (
            self.budget_usd is None or usd <= self.budget_usd + _ROUNDING
        )

    def _used_up(self, need: Reservation) -> Interrupted:
        if self.budget_day is not None and self._fits(need, alone=True):
            return Interrupted(
                f"The judge budget of ${self.budget_day.most_usd:g} for this day (UTC) is used up, "
                f"and the next call may cost up to ${need.usd:.2g}. Go on tomorrow, or raise "
                "--rm_budget_usd_day and resume."
            )
        unreported = ""
        if (upper := self.unreported).calls:
            usd = f"${upper.usd:.3g}, " if self.budget_usd is not None else ""
            unreported = (
                f" ({usd}{upper.usage.total:,} tokens of that are an upper bound for {upper.calls} "
                "calls that failed, were cut off or whose usage the judge did not report)"
            )
        if self.budget_usd is not None and self.total.usd + need.usd > self.budget_usd:
            return Interrupted(
                f"The judge budget of ${self.budget_usd:g} is used up: {self.total.calls} calls "
                f"cost ${self.total.usd:.3g}{unreported}, and the next may cost up to "
                f"${need.usd:.2g}. To go on, raise --rm_budget_usd and resume.",
                used_up=UsedUp("--rm_budget_usd", self.total.usd, self.total.calls, need.usd),
            )
        assert self.budget_tokens is not None
        used = self.total.usage.total
        return Interrupted(
            f"The judge budget of {self.budget_tokens:,} tokens is used up: {self.total.calls} "
            f"calls used {used:,}{unreported}, and the next may use up to "
            f"{need.tokens:,}. To go on, raise --rm_budget_tokens and resume.",
            used_up=UsedUp("--rm_budget_tokens", used, self.total.calls, need.tokens),
        )

    def settle(
        self, reservation: Reservation, usage: Usage, outcome: str, latency_s: float, note: str
    ) -> float:
        """Book a call and let those that wait look at the budget again; see `Reservation`."""
        if reservation not in self._open:
            return 0.0
        self._open.discard(reservation)
        self._settled.set()  # wakes them when this has run to its end
        self._settled = asyncio.Event()
        shared = reservation.shared
        price = (shared or self).price
        usd = price.cost(usage) if price else 0.0
        self._compare(reservation, usage)
        line = (
            {"time": round(time.time(), 3)}
            | reservation.model
            | {
                "id": reservation.id,
                "outcome": outcome,
                "input": usage.input,
                "output": usage.output,
            }
            | {"cached_input": usage.cached_input, "usd": usd, "latency_s": round(latency_s, 4)}
            | ({"note": note} if note else {})
        )
        if (ratio := self._input_ratios[reservation.model["model"]]) > 1.0:
            line["input_ratio"] = ratio
        with self._lock:
            spent = Spending(1, usage, usd)
            self.total, self._new = self.total + spent, self._new + spent
            if note == UPPER_BOUND:
                self.unreported = self.unreported + spent
            if shared:
                shared.spent = shared.spent + spent
            self._unwritten.append(json.dumps(line))
            self._write()
        if self.budget_day is not None:  # last: its file may fail
            self.budget_day.settle(reservation, usd)
        return usd

    def _compare(self, reservation: Reservation, usage: Usage) -> None:
        """Learn from a call that took more than was reserved for it."""
        model = (reservation.shared or self).model
        ratio = reservation.input_ratio * usage.input / reservation.usage.input
        self._input_ratios[model] = max(ratio, self._input_ratios.get(model, 1.0))
        if usage.output > _MOST_EXCESS * reservation.usage.output + _MOST_EXCESS_TOKENS:
            self._too_long[model] = usage

    def _open_file(self, path: Path) -> None:
        """Count what earlier sessions spent, and settle what they left in flight."""
        path.parent.mkdir(parents=True, exist_ok=True)
        sent, over = _read(in_flight_file(path)), _read(path)
        ends: list[str] = []
        for call in all_calls(sent, over):
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
        torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * torn + "".join(f"{end}\n" for end in ends))
        in_flight_file(path).unlink(missing_ok=True)
        self._path = path
        self._write_in_flight(self._open)
        self._write()

    def _write_in_flight(self, calls: Iterable[Reservation]) -> bool:
        """Append calls that are about to be sent; whether they are in the file."""
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
        return self._append(in_flight_file(self._path), map(json.dumps, lines))

    def _write(self) -> None:
        """Append the calls that are over; with none in flight, that file is empty again.

        Lines that cannot be written come with the next ones: until then the file of those in
        flight has their calls.
        """
        if self._path is None or not self._append(self._path, self._unwritten):
            return
        self._unwritten.clear()
        if not self._open:
            with suppress(OSError):
                os.truncate(in_flight_file(self._path), 0)

    def _append(self, path: Path, lines: Iterable[str]) -> bool:
        """Append lines in one write; whether they are there."""
        # What failed before may have been cut in the middle of a line.
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


def build_ledger(api: ApiReward, environ: Mapping[str, str]) -> Ledger:
    """A judge's ledger; RewardError where it has a budget in dollars and no known price."""
    return Ledger(
        find_price(api),
        budget_usd=api.budget_usd,
        budget_tokens=api.budget_tokens,
        budget_day=DayBudget.of(api, environ),
        provider=api.type,
        model=(api.model or "").strip(),
    )


def share_ledger(ledger: Ledger, judge: ApiReward) -> SharedLedger:
    """Another judge's calls on a ledger; RewardError as above."""
    price, model = find_price(judge), (judge.model or "").strip()
    if price is None and judge.counts_dollars:
        raise RewardError(
            f"A budget in dollars needs the price of the monitoring judge's model {model}, which "
            f"is not known.{model_hint(judge.type, model)} Give it in a file with --rm_prices."
        )
    return SharedLedger(ledger, price, judge.type, model)


def _read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; one that was torn by a kill is passed over."""
    lines: list[dict[str, Any]] = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for row in text.splitlines():
        with suppress(ValueError):
            line = json.loads(row)
            if isinstance(line, dict):
                lines.append(line)
    return lines
