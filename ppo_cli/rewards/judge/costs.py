"""What a judge costs: the price of its tokens, what was spent, and what calls may cost at most.

A price comes from the settings, a file, the bundled list, or genai-prices, a package of its own
(pip install "ppo-cli[prices]") that lists models of many providers, with prices and limits. What
the bundled list knows, that list decides.

The worst case of a call is reserved before it is sent and settled by its true usage after, so
that settled and reserved together stay within the budget. Reservations live on one event loop;
totals may be read, and the file attached, from any thread.
"""

from __future__ import annotations

import asyncio
import fnmatch
import importlib.util
import ipaddress
import json
import logging
import math
import re
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field

from ppo_cli.config.known_models import JUDGES
from ppo_cli.config.reward_schema import ApiReward, JudgeType
from ppo_cli.errors import Interrupted, RewardError, UsedUp, did_you_mean
from ppo_cli.rewards.judge.cache import cache_path, default_cache_path
from ppo_cli.rewards.judge.calls import Question, Usage, worst_case
from ppo_cli.rewards.judge.written import FromFile, read_file

BUNDLED = Path(__file__).with_name("prices.yaml")
_VERSION = re.compile(r"-(?:20\d\d-?\d\d-?\d\d|latest)$")


@dataclass(frozen=True)
class Price:
    """US dollars for a million tokens, and where the figures come from."""

    input: float
    output: float
    cached_input: float | None
    source: str

    def cost(self, usage: Usage) -> float:
        """Return what these tokens cost, in US dollars."""
        cached = min(usage.cached_input, usage.input)
        cheap = self.input if self.cached_input is None else self.cached_input
        millionths = (usage.input - cached) * self.input + cached * cheap
        return (millionths + usage.output * self.output) / 1e6


def find_price(api: ApiReward) -> Price | None:
    """Return the price of a judge's model, or None when nobody knows it.

    The settings are asked first, then the user's file, the bundled list and genai-prices.
    """
    if api.price_input is not None and api.price_output is not None:
        return Price(api.price_input, api.price_output, None, "the settings")
    for file in _files(api):
        if (price := _from_file(file, api)) is not None:
            return price
    if (listed := second_list(api)) is not None and listed.price is not None:
        return listed.price
    if api.type == "local":
        return Price(0.0, 0.0, None, "the run's own judge")
    # With a budget in dollars, free is for the user to say: a local proxy may cost.
    if not api.counts_dollars and api.base_url is not None and is_local(api.base_url):
        return Price(0.0, 0.0, None, "a judge on this machine")
    return None


def batch_price(price: Price | None, api: ApiReward) -> Price | None:
    """Return what the same tokens cost in a batch: the share that the price files name."""
    shares = [read_prices(file).batch.get(api.type) for file in _files(api)]
    share = next((share for share in shares if share is not None), 1.0)
    if price is None:
        return None
    cached = None if price.cached_input is None else share * price.cached_input
    return Price(share * price.input, share * price.output, cached, price.source)


def is_local(base_url: str) -> bool:
    """Say whether an endpoint lies on this machine."""
    host = urlsplit(base_url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _from_file(file: Path, api: ApiReward) -> Price | None:
    content = read_prices(file)
    table = content.prices.get(api.type, {})
    if api.model is None:
        return None
    source = "the bundled list" if file == BUNDLED else str(file)
    if content.checked is not None:
        source += f" of {content.checked}"
    # A gateway's name (openai/gpt-4o-mini) and a dated one cost what the plain one does.
    plain = api.model.rsplit("/", 1)[-1]
    for name in (api.model, plain, _VERSION.sub("", plain)):
        fitting = [pattern for pattern in table if fnmatch.fnmatchcase(name, pattern)]
        if fitting:
            found = table[max(fitting, key=lambda pattern: _specificity(pattern, name))]
            return Price(found.input, found.output, found.cached_input, source)
    return None


def _specificity(pattern: str, name: str) -> tuple[bool, int, int]:
    literal = re.sub(r"\[[^]]*\]|[*?]", "", pattern)
    return pattern == name, len(literal), -pattern.count("*")


Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Amounts(FromFile):
    input: Dollars
    output: Dollars
    cached_input: Dollars | None = None


class PriceFile(FromFile):
    """Prices by provider and model (or pattern), and the share of them that batches cost."""

    prices: dict[JudgeType, dict[str, _Amounts]]
    batch: dict[JudgeType, Dollars] = Field(default_factory=dict)
    checked: Any = None


def _files(api: ApiReward) -> list[Path]:
    return [BUNDLED] if api.prices is None else [Path(api.prices).expanduser(), BUNDLED]


def read_prices(file: Path) -> PriceFile:
    """Read a price file; RewardError names what is wrong."""
    return read_file(file, PriceFile, f"--rm_prices {file}")


@dataclass(frozen=True)
class Listed:
    """What genai-prices has of a model; `context` is how many tokens it reads at most."""

    price: Price | None
    context: int | None


def second_list(api: ApiReward) -> Listed | None:
    """What genai-prices has of a judge's model; None without the package or the model.

    Behind an address of one's own a model is looked for at the provider that has the address.
    """
    provider, every = _shelf(api.type, api.base_url)
    if provider is None or api.model is None:
        return None
    names = dict.fromkeys((api.model, api.model.rsplit("/", 1)[-1]))
    found = [provider.find_model(name, all_providers=every) for name in names]
    model = next((one for one in found if one is not None), None)
    return None if model is None else Listed(_list_price(model), model.context_window)


def disagreement(api: ApiReward) -> str:
    """Say that the bundled list and genai-prices differ about a model; empty where they do not."""
    ours, listed = _from_file(BUNDLED, api), second_list(api)
    theirs = None if listed is None else listed.price
    if ours is None or theirs is None or (ours.input, ours.output) == (theirs.input, theirs.output):
        return ""
    return (
        f"two prices of {api.model}: {_said(ours)} by {ours.source}, which counts, and "
        f"{_said(theirs)} by {theirs.source}; --rm_price_input and --rm_price_output decide"
    )


def near_models(kind: str, model: str) -> str:
    """Return ` Did you mean 'x'?` for a name that no list knows; empty where one knows it."""
    api = ApiReward(type=kind, model=model)
    if _from_file(BUNDLED, api) is not None or second_list(api) is not None:
        return ""
    provider, _ = _shelf(kind, None)
    listed = read_prices(BUNDLED).prices.get(api.type, {})
    names = [name for name in listed if not re.search(r"[*?[]", name)]
    names += [one.id for one in provider.models] if provider else []
    return did_you_mean(model.rsplit("/", 1)[-1], dict.fromkeys([JUDGES[kind].example, *names]))


def _shelf(kind: str, base_url: str | None) -> tuple[Any, list[Any]]:
    """A provider's models in genai-prices, or None, and all of its providers."""
    if importlib.util.find_spec("genai_prices") is None:
        return None, []
    from genai_prices.data_snapshot import get_snapshot

    lists = get_snapshot()
    wanted = None if base_url else JUDGES[kind].listed
    if not (base_url or wanted):
        return None, []
    try:
        return lists.find_provider(None, wanted, base_url), lists.providers
    except LookupError:
        return None, []


def _list_price(model: Any) -> Price | None:
    """The price at the smallest context tier and the dearest hour of the day."""
    from genai_prices import __version__

    now = datetime.now(UTC)
    hours = [model.get_prices(now.replace(hour=hour)) for hour in range(24)]
    beside = [getattr(prices, name, None) for prices in hours for name in _NOT_ONLY_TOKENS]
    read, written, cached = (
        max((_base(getattr(prices, f"{side}_mtok")) for prices in hours), key=lambda x: x or 0.0)
        for side in ("input", "output", "cache_read")
    )
    if read is None or written is None or any(amount is not None for amount in beside):
        return None
    return Price(read, written, cached, f"genai-prices {__version__}")


# What a call costs beside its tokens, or instead of them.
_NOT_ONLY_TOKENS = ("requests_kcount", "output_reasoning_mtok", "output_citation_mtok")


def _base(amount: Any) -> float | None:
    """The first step of a price that rises with the length of the prompt, or the price."""
    found = getattr(amount, "base", amount)
    return None if found is None else float(found)


def _said(price: Price) -> str:
    return f"${price.input:g} in, ${price.output:g} out"


logger = logging.getLogger(__name__)

# Sums of many small floats may be off by this much, in dollars.
_ROUNDING = 1e-9
# Lines kept for a file that may be attached later; without one they are dropped one by one.
_MOST_UNWRITTEN = 4096


@dataclass(frozen=True)
class Spent:
    """Calls that were made, the tokens they were billed for, and US dollars."""

    calls: int = 0
    usage: Usage = field(default_factory=Usage)
    usd: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.calls + other.calls, self.usage + other.usage, self.usd + other.usd)


@dataclass(eq=False)
class Guest:
    """Another model's calls on the same budget, at their own price."""

    ledger: Ledger
    price: Price | None
    provider: str
    model: str
    spent: Spent = field(default_factory=Spent)

    async def reserve(self, question: Question) -> Reservation:
        """Set aside the worst case of one call; see `Ledger.reserve`."""
        return await self.ledger.reserve(question, guest=self)

    def take(self) -> Spent:
        """Return what this model was booked for since the last call of this method."""
        taken, self.spent = self.spent, Spent()
        return taken


@dataclass(eq=False)
class Reservation:
    """The worst case of one call, held until the call is settled."""

    ledger: Ledger
    tokens: int
    usd: float
    guest: Guest | None = None
    day: str = ""  # whose budget holds it

    def settle(self, usage: Usage, outcome: str, latency_s: float = 0.0, note: str = "") -> float:
        """Book what the call was billed for, free the rest and return the cost; once only."""
        return self.ledger.settle(self, usage, outcome, latency_s, note)


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
        """The budget that the settings ask for; its file lies beside the cache."""
        if api.budget_usd_day is None:
            return None
        cache = cache_path(api, environ) or default_cache_path(environ)
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
            near = near_models(provider, model) if provider and model else ""
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
        self._named = {"provider": provider, "model": model}
        self.total = Spent()  # everything booked, by earlier runs in the same file too
        self._new = Spent()
        self._open: set[Reservation] = set()
        self._settled = asyncio.Event()  # a new one after each settled call
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._unwritten: deque[str] = deque(maxlen=_MOST_UNWRITTEN)
        self._complained = False

    @property
    def reserved_usd(self) -> float:
        """What calls under way may still cost at most."""
        return math.fsum(held.usd for held in self._open)

    @property
    def reserved_tokens(self) -> int:
        """How many tokens calls under way may still use at most."""
        return sum(held.tokens for held in self._open)

    def take(self) -> Spent:
        """Return what was booked since the last call of this method."""
        with self._lock:
            taken, self._new = self._new, Spent()
        return taken

    async def reserve(self, question: Question, *, guest: Guest | None = None) -> Reservation:
        """Set aside the worst case of one call, waiting while others may settle lower.

        Raises Interrupted when the call can no longer fit into the budget.
        """
        held = Reservation(self, 0, 0.0, guest)
        if (self.budget_usd, self.budget_tokens, self.budget_day) != (None, None, None):
            usage = worst_case(question)
            price = guest.price if guest else self.price
            held.tokens = usage.total
            held.usd = price.cost(usage) if price else 0.0
        day = self.budget_day
        while not (fits := self._fits(held)) or not (day is None or day.take(held)):
            if not self._fits(held, alone=True) or (fits and not self._open):
                raise self._used_up(held)
            await self._settled.wait()
        self._open.add(held)
        return held

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
        if self.budget_usd is not None and self.total.usd + need.usd > self.budget_usd:
            return Interrupted(
                f"The judge budget of ${self.budget_usd:g} is used up: {self.total.calls} calls "
                f"cost ${self.total.usd:.3g}, and the next may cost up to ${need.usd:.2g}. "
                "To go on, raise --rm_budget_usd and resume.",
                used_up=UsedUp("--rm_budget_usd", self.total.usd, self.total.calls, need.usd),
            )
        assert self.budget_tokens is not None
        used = self.total.usage.total
        return Interrupted(
            f"The judge budget of {self.budget_tokens:,} tokens is used up: {self.total.calls} "
            f"calls used {used:,}, and the next may use up to "
            f"{need.tokens:,}. To go on, raise --rm_budget_tokens and resume.",
            used_up=UsedUp("--rm_budget_tokens", used, self.total.calls, need.tokens),
        )

    def settle(
        self, held: Reservation, usage: Usage, outcome: str, latency_s: float, note: str
    ) -> float:
        """Book a call and let those that wait look at the budget again; see `Reservation`."""
        if held not in self._open:
            return 0.0
        self._open.discard(held)
        self._settled.set()  # wakes them when this has run to its end
        self._settled = asyncio.Event()
        guest = held.guest
        price = guest.price if guest else self.price
        usd = price.cost(usage) if price else 0.0
        if self.budget_day is not None:
            self.budget_day.settle(held, usd)
        named = {"provider": guest.provider, "model": guest.model} if guest else self._named
        line = json.dumps(
            {"time": round(time.time(), 3)}
            | named
            | {"outcome": outcome, "input": usage.input, "output": usage.output}
            | {"cached_input": usage.cached_input, "usd": usd, "latency_s": round(latency_s, 4)}
            | ({"note": note} if note else {})
        )
        with self._lock:
            spent = Spent(1, usage, usd)
            self.total, self._new = self.total + spent, self._new + spent
            if guest:
                guest.spent = guest.spent + spent
            self._unwritten.append(line)
            self._write()
        return usd

    def _open_file(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        earlier = Spent()
        torn = False
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace")
            torn = bool(text) and not text.endswith("\n")
            for spent in _booked(text):
                earlier = earlier + spent
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" if torn else "")
        self._path = path
        self.total = self.total + earlier
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in self._unwritten))
        except OSError as problem:
            if not self._complained:
                logger.warning("cannot write the judge's ledger: %s", problem.strerror)
            self._complained = True
        self._unwritten.clear()


def ledger_of(api: ApiReward, environ: Mapping[str, str]) -> Ledger:
    """A judge's ledger; RewardError where it has a budget in dollars and no known price."""
    return Ledger(
        find_price(api),
        budget_usd=api.budget_usd,
        budget_tokens=api.budget_tokens,
        budget_day=DayBudget.of(api, environ),
        provider=api.type,
        model=(api.model or "").strip(),
    )


def guest_of(ledger: Ledger, judge: ApiReward) -> Guest:
    """Another judge's calls on a ledger; RewardError as above."""
    price, model = find_price(judge), (judge.model or "").strip()
    if price is None and judge.counts_dollars:
        raise RewardError(
            f"A budget in dollars needs the price of the monitoring judge's model {model}, which "
            f"is not known.{near_models(judge.type, model)} Give it in a file with --rm_prices."
        )
    return Guest(ledger, price, judge.type, model)


def _booked(text: str) -> Iterator[Spent]:
    """Read the calls of an earlier run; a line that was torn by a kill is passed over."""
    for line in text.splitlines():
        try:
            entry: Any = json.loads(line)
            usage = Usage(*(int(entry[name]) for name in ("input", "output", "cached_input")))
            usd = float(entry["usd"])
        except (ValueError, KeyError, TypeError):
            continue
        yield Spent(1, usage, usd)
