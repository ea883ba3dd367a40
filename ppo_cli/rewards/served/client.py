"""The client of a served reward model: samples in, rows out, over httpx.

A request that fails for a moment is sent again. One that the server will not take, or that
fails while others pass, is cut in halves until only the sample at fault has no score. When the
server itself is down, the client waits, and at last gives up.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from ppo_cli.errors import Interrupted, PpoError, RewardError
from ppo_cli.redact import hide, redact, redact_url
from ppo_cli.rewards.base import Tell
from ppo_cli.rewards.remote.failures import parse_retry_after, read_message
from ppo_cli.rewards.remote.proxies import client_settings
from ppo_cli.rewards.served.protocols import (
    EXCERPT,
    Kind,
    Row,
    Sample,
    ServerFault,
    Wire,
    read_json,
)

if TYPE_CHECKING:
    import httpx


@dataclass
class Counters:
    """Requests that were sent, those sent again, samples, and how long requests took."""

    requests: int = 0
    retries: int = 0
    samples: int = 0
    failed: int = 0
    latencies: list[float] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """Return everything under short names."""
        counts = asdict(self)
        taken = counts.pop("latencies")
        return counts | ({"latency_p50_s": median(taken)} if taken else {})


FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
FIRST_ANSWER_S = 1.5  # at the start of a run, where nobody waits for a server that is not there
MOST_HOPELESS = 3  # a proxy says 403 or 404 for a moment, too, while a server starts again
ADVICE = (
    "Check the address of --reward_model, that this server serves a reward model, "
    "reward.model.adapter, reward.model.model_name and the key in reward.model.key_env."
)


Ask = Callable[[], Awaitable[None]]  # a request; raises ServerFault


class Outage:
    """What is known of the server's health; lives on one event loop, read from any thread."""

    def __init__(self, url: str, outage_wait: float, witness: Ask) -> None:
        self.down = False
        self._url = url
        self._outage_wait = outage_wait
        self._witness = witness
        self._asking = asyncio.Lock()
        self._last_success = float("-inf")
        self._back_at = float("-inf")
        self._gave_up: PpoError | None = None
        self._fault: ServerFault | None = None
        self._next_try = self._gives_up_at = 0.0

    @property
    def proven(self) -> bool:
        """Whether the server gave scores at any time."""
        return self._last_success > float("-inf")

    def success(self) -> None:
        """Note that the server gave scores."""
        self._last_success = time.monotonic()

    def sentence(self) -> str | None:
        """What is waited for, in words; None while all is well."""
        fault = self._fault
        if not self.down or fault is None:
            return None
        now = time.monotonic()
        again, left = max(0.0, self._next_try - now), max(0.0, self._gives_up_at - now)
        more = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
        return (
            f"The reward model's server does not answer ({fault}); trying again in "
            f"{again:.0f} s, for up to {more} more."
        )

    async def first_answer(self, ask: Ask, *, patient: bool, tell: Tell) -> None:
        """Ask until there is an answer: as in an outage if `patient`, else for a moment."""
        try:
            wait, told = (self._outage_wait, tell) if patient else (FIRST_ANSWER_S, None)
            await self._ask(ask, wait, told)
        except Interrupted as silent:
            raise silent if patient else RewardError(f"{silent} {ADVICE}") from None
        finally:
            self.down = False

    async def passed(self) -> None:
        """Wait until the server is not known to be down."""
        if self._gave_up is not None:
            raise self._gave_up
        if self.down:
            await self.is_well(time.monotonic())

    async def is_well(self, since: float) -> bool:
        """Whether the server was up all along, so that a request failed on its own account.

        False: it was down and is back. `since` is when the request was first sent. Raises what
        must stop the run when the server stays down.
        """
        async with self._asking:
            if self._gave_up is not None:
                raise self._gave_up
            if self._back_at >= since:
                return False
            if self._last_success >= since:
                return True
            try:
                return await self._ask(self._witness, self._outage_wait)
            except PpoError as stop:
                self._gave_up = stop
                raise
            finally:
                self.down = False

    async def _ask(self, ask: Ask, most_s: float, tell: Tell | None = None) -> bool:
        """Ask until there is an answer, for so many seconds; True when it came at once."""
        pause, hopeless = FIRST_PAUSE_S, 0
        self._gives_up_at = time.monotonic() + most_s
        while True:
            try:
                await ask()
            except ServerFault as error:
                fault = error
            else:
                self._back_at = time.monotonic() if self.down else self._back_at
                return not self.down
            hopeless = 0 if fault.kind is Kind.DOWN else hopeless + 1
            if hopeless >= MOST_HOPELESS:
                raise self._refused(fault)
            left = self._gives_up_at - time.monotonic()
            if left <= 0 and not hopeless:
                raise Interrupted(
                    f"The reward model's server at {self._url} did not answer for {most_s:,.0f} s "
                    f"({fault})."
                )
            wait = max(pause, fault.retry_after or 0.0)
            wait = min(wait, max(left, 0.0)) if not hopeless else pause
            self._fault, self._next_try = fault, time.monotonic() + wait
            if tell is not None and not self.down:
                tell(f"The reward model's server does not answer yet ({fault}); trying again.")
            self.down = True
            await asyncio.sleep(wait)
            pause = min(2.0 * pause, LONGEST_PAUSE_S)

    def _refused(self, fault: ServerFault) -> PpoError:
        said = f"The reward model's server at {self._url} rejects every request ({fault})."
        return Interrupted(said) if self.proven else RewardError(f"{said} {ADVICE}")


FIRST_BACKOFF_S = 0.2
LONGEST_BACKOFF_S = 5.0
LONG_PAUSE_S = 10.0  # a server that asks for more is down, not just busy
TRIES_OF_MANY = 2  # then halves: one of the samples may be what the server stumbles over
TRIES_OF_FORM = 2  # for JSON that is not an answer, which hardly ever changes
TRIES_OF_ONE = 10  # a third of all requests may fail, and still no score is lost
MOST_OUTAGES = 3  # of one request, after which it is taken for what brings the server down
_PASSING = {408, 409, 424, 425, 429}
_REJECTED = {400, 411, 413, 414, 422, 431}
_FINAL_5XX = {501, 505}


class ServedModelClient:
    """Asks one server; every method but `waiting_for` runs on one event loop."""

    def __init__(
        self, wire: Wire, *, witness: Sample, timeout: float, concurrency: int,
        outage_wait: float, key: str = "",
    ) -> None:  # fmt: skip
        self._wire = wire
        self._witness = witness
        self._timeout = timeout
        self._key = key
        hide(key)
        self._slots = asyncio.Semaphore(concurrency)
        self._most_rows: int | None = None
        self._http: httpx.AsyncClient | None = None
        self.counters = Counters()
        self.outage = Outage(redact_url(wire.url), outage_wait, self.ask_witness)

    async def score(self, samples: Sequence[Sample]) -> list[Row]:
        """Score samples of one group; raises only what must stop the run."""
        if self._most_rows is not None and len(samples) > self._most_rows:
            return await self._halves(samples)
        found = await self._persist(samples)
        if isinstance(found, list):
            return found
        fault = found
        if len(samples) == 1:
            return [Row(None, f"{fault.cause}: {fault.words}")]
        rows = await self._halves(samples)
        if fault.kind is Kind.REJECTED and all(row.value is not None for row in rows):
            # None of the samples was to blame, so it was their number.
            self._most_rows = min(self._most_rows or len(samples), len(samples) // 2)
        return rows

    async def ask_witness(self) -> None:
        """Make one tiny request past every queue; raises ServerFault."""
        await self.send([self._witness])

    async def send(self, samples: Sequence[Sample]) -> list[Row]:
        """Make one request and read its rows; raises ServerFault, and tells of success."""
        began = time.monotonic()
        self.counters.requests += 1
        wire = self._wire
        reply = await self._call("POST", wire.url, wire.write(samples))
        rows = wire.read(reply, len(samples))
        self.counters.latencies.append(time.monotonic() - began)
        self.outage.success()
        return rows

    async def get(self, url: str) -> Any:
        """Fetch a JSON document from the server; raises ServerFault."""
        return await self._call("GET", url, None)

    async def close(self) -> None:
        """Close the connections. Safe to call twice."""
        if self._http is not None:
            await self._http.aclose()

    # --- persistence --------------------------------------------------------------------------

    async def _halves(self, samples: Sequence[Sample]) -> list[Row]:
        middle = len(samples) // 2
        parts = [self.score(samples[:middle]), self.score(samples[middle:])]
        first, second = await asyncio.gather(*parts)
        return first + second

    async def _persist(self, samples: Sequence[Sample]) -> list[Row] | ServerFault:
        """Send until there is an answer; the last fault when the server is well and gives none."""
        tries = outages = 0
        since: float | None = None
        while True:
            await self.outage.passed()
            try:
                async with self._slots:
                    since = time.monotonic() if since is None else since
                    return await self.send(samples)
            except ServerFault as error:
                fault = error
            tries += 1
            enough = tries >= _most_tries(fault, len(samples))
            if fault.kind is Kind.REJECTED and len(samples) > 1:
                return fault
            long = (fault.retry_after or 0.0) > LONG_PAUSE_S
            if enough or fault.kind is Kind.HOPELESS or long:
                if await self.outage.is_well(since or 0.0):
                    if enough:
                        return fault
                else:
                    outages, tries, since = outages + 1, 0, None
                    if outages >= MOST_OUTAGES:
                        return fault
            self.counters.retries += 1
            await asyncio.sleep(_pause(tries, fault.retry_after))

    # --- one call -----------------------------------------------------------------------------

    async def _call(self, method: str, url: str, body: Mapping[str, Any] | None) -> Any:
        import httpx

        # Escaped, so that half a surrogate pair in a response is the server's to refuse.
        content = None if body is None else json.dumps(body).encode()
        if self._http is None:
            headers = {"Content-Type": "application/json"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            settings = {"verify": _trusted()} | client_settings(self._wire.url)
            try:
                self._http = httpx.AsyncClient(
                    headers=headers,
                    timeout=self._timeout,
                    limits=httpx.Limits(max_connections=None),
                    **settings,
                )
            except (ImportError, ValueError) as error:  # a SOCKS proxy, or an unknown kind of proxy
                raise ServerFault(Kind.HOPELESS, "proxy", redact(str(error))) from None
        try:
            # httpx counts the silence between two bytes; this counts the whole request.
            async with asyncio.timeout(self._timeout):
                response = await self._http.request(method, url, content=content)
                text = response.text
        except (TimeoutError, httpx.TimeoutException):
            words = f"no answer within {self._timeout:g} s"
            raise ServerFault(Kind.DOWN, "timeout", words) from None
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise ServerFault(Kind.HOPELESS, "address", redact(str(error))) from None
        except httpx.RequestError as error:
            words = redact(str(error) or type(error).__name__)
            raise ServerFault(Kind.DOWN, "connection", words) from None
        if response.status_code != 200:
            raise self._fault_of(response.status_code, text, response.headers)
        return read_json(text)

    def _fault_of(self, status: int, text: str, headers: Mapping[str, str]) -> ServerFault:
        headers = {name.lower(): value for name, value in headers.items()}
        words = redact(read_message(text))[:EXCERPT] or "empty body"
        cause = f"http_{status}"
        if 300 <= status < 400:
            where = headers.get("location")
            words = redact(f"redirect to {where}" if where else "redirect without a Location")
        if status in _PASSING or (status >= 500 and status not in _FINAL_5XX):
            return ServerFault(Kind.DOWN, cause, words, retry_after=parse_retry_after(headers))
        if status in _REJECTED:
            return ServerFault(Kind.REJECTED, cause, words)
        return ServerFault(Kind.HOPELESS, cause, words)


@functools.cache
def _trusted() -> ssl.SSLContext:
    """The certificates to trust: read once, which takes longer than many a request."""
    import httpx

    return httpx.create_ssl_context()


def _most_tries(fault: ServerFault, count: int) -> int:
    if fault.kind is Kind.REJECTED:
        return 1
    if fault.kind is Kind.UNREADABLE:
        return TRIES_OF_FORM
    return TRIES_OF_MANY if count > 1 else TRIES_OF_ONE


def _pause(tries: int, retry_after: float | None) -> float:
    """Seconds until the next try: growing, spread, and not less than what the server asks for."""
    backoff = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** max(0, tries - 1))
    asked = min(retry_after or 0.0, LONG_PAUSE_S)
    return max(asked, backoff * random.uniform(0.5, 1.0))
