"""Samples in, rows out, whatever happens on the way: one server, asked over httpx.

A request that fails for a moment is sent again. One that the server will not take, or that
fails while others pass, is cut in halves until only the sample that is to blame has no score.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ppo_cli.redact import hide, redact
from ppo_cli.rewards.judge.providers.error_words import read_words
from ppo_cli.rewards.judge.providers.failures import read_retry_after
from ppo_cli.rewards.served_model.answers import EXCERPT, read_json
from ppo_cli.rewards.served_model.counters import Counters
from ppo_cli.rewards.served_model.exchange import Kind, Row, Sample, ServerFault
from ppo_cli.rewards.served_model.outage import Outage
from ppo_cli.rewards.served_model.protocols import Wire

if TYPE_CHECKING:
    import httpx

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


class OwnTroubleError(Exception):
    """A request that fails while the server is well; `fault` is the last thing it met."""

    def __init__(self, fault: ServerFault) -> None:
        super().__init__(str(fault))
        self.fault = fault


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
        self.outage = Outage(redact(wire.url), outage_wait, self.ask_witness)

    async def score(self, samples: Sequence[Sample]) -> list[Row]:
        """Score samples of one group; raises only what must stop the run."""
        if self._most_rows is not None and len(samples) > self._most_rows:
            return await self._halves(samples)
        try:
            return await self._persist(samples)
        except OwnTroubleError as trouble:
            fault = trouble.fault
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

    async def _persist(self, samples: Sequence[Sample]) -> list[Row]:
        """Send until there is an answer; raises OwnTroubleError when it is not the server's."""
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
                raise OwnTroubleError(fault)
            if enough or fault.kind is Kind.HOPELESS or _is_long(fault):
                if await self.outage.is_well(fault, since or 0.0):
                    if enough:
                        raise OwnTroubleError(fault)
                else:
                    outages, tries, since = outages + 1, 0, None
                    if outages >= MOST_OUTAGES:
                        raise OwnTroubleError(fault)
            self.counters.retries += 1
            await asyncio.sleep(_pause(tries, fault.retry_after))

    # --- one call -----------------------------------------------------------------------------

    async def _call(self, method: str, url: str, body: Mapping[str, Any] | None) -> Any:
        import httpx

        # Escaped, so that half a surrogate pair in a response is the server's to refuse.
        content = None if body is None else json.dumps(body).encode()
        if self._http is None:
            self._http = httpx.AsyncClient(
                headers={"Content-Type": "application/json", **self._authorization()},
                timeout=self._timeout,
                limits=httpx.Limits(max_connections=None),
                verify=_trusted(),
            )
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
        return self._read(text)

    def _authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def _read(self, text: str) -> Any:
        try:
            return read_json(text)
        except ServerFault as fault:
            raise ServerFault(fault.kind, fault.cause, redact(fault.words)) from None

    def _fault_of(self, status: int, text: str, headers: Mapping[str, str]) -> ServerFault:
        told = {name.lower(): value for name, value in headers.items()}
        words = redact(read_words(text))[:EXCERPT] or "no words with it"
        cause = f"http_{status}"
        if 300 <= status < 400:
            words = redact(f"it sends us on to {told.get('location', 'nowhere')}")
        if status in _PASSING or (status >= 500 and status not in _FINAL_5XX):
            return ServerFault(Kind.DOWN, cause, words, retry_after=read_retry_after(told))
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


def _is_long(fault: ServerFault) -> bool:
    return fault.retry_after is not None and fault.retry_after > LONG_PAUSE_S


def _pause(tries: int, retry_after: float | None) -> float:
    """Seconds until the next try: growing, spread, and not less than what the server asks for."""
    backoff = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** max(0, tries - 1))
    asked = min(retry_after or 0.0, LONG_PAUSE_S)
    return max(asked, backoff * random.uniform(0.5, 1.0))
