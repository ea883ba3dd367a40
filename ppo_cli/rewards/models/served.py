"""Reward models behind an address: rollouts in, raw scores out.

Everything that waits runs on one background event loop. Requests take samples in the order in which
they were submitted; the rest is sent when the round ends. Before the first rollout a self-test
checks that the server answers, that its scores are raw, and that good responses score above bad.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from ppo_cli.config.models.known_models import choose_adapter
from ppo_cli.config.schema.reward import ModelReward
from ppo_cli.errors import Interrupted, RewardError
from ppo_cli.processes.event_loop import LoopThread
from ppo_cli.records import Part, Prompt, Rollout, Score
from ppo_cli.rewards.base import Reward, RoundKind, Tell, tell_nobody
from ppo_cli.rewards.models.base import (
    BUILT_IN,
    NO_ANSWER,
    TURN_OFF,
    check_direction,
    choose_pairs,
    encode_pairs,
    first_of_each_kind,
    prompt_like,
    raise_if_strict,
)
from ppo_cli.rewards.models.protocols import (
    EXCERPT,
    RAW_SWITCHES,
    OpenRlhf,
    Protocol,
    Row,
    Sample,
    UnfitError,
    Vllm,
    Writer,
    read_json,
)
from ppo_cli.rewards.remote.client import RemoteCall, RemoteClient, reach
from ppo_cli.rewards.remote.failures import (
    Failure,
    RemoteError,
    kind_of_status,
    parse_retry_after,
    read_message,
)
from ppo_cli.rewards.remote.limits import Limits
from ppo_cli.rewards.remote.proxies import client_settings
from ppo_cli.secrets.known import hide_secret
from ppo_cli.secrets.redact import redact, redact_url

if TYPE_CHECKING:
    import httpx

SUBJECT = "The reward model's server"
_CLOSED = "The run ended before the reward model's server had answered."
EQUAL = 1e-3  # scores this close are the same score
ADVICE = (
    "Check the address of --reward_model, that this server serves a reward model, "
    "reward.model.adapter, reward.model.model_name and the key in reward.model.key_env."
)
# Attempts at a request of several samples, before it is cut in halves; one of them may be at fault.
ATTEMPTS_OF_MANY = 2
# Attempts at one sample: no score is lost even when a third of all requests fail.
ATTEMPTS_OF_ONE = 10
# Attempts while the reply is JSON without scores, which hardly ever changes.
ATTEMPTS_OF_FORM = 2


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
        latencies = counts.pop("latencies")
        return counts | ({"latency_p50_s": median(latencies)} if latencies else {})


@dataclass(eq=False, kw_only=True)
class _ServedCall(RemoteCall):
    samples: Sequence[Sample]


class ServedModelClient(RemoteClient[_ServedCall, list[Row]]):
    """Asks one server over httpx; every method but `waiting_for` runs on one event loop.

    A request that the server rejects, or that fails while others succeed, is cut in halves until
    only the sample at fault has no score.
    """

    def __init__(
        self, protocol: Protocol, *, witness: Sample, timeout: float, concurrency: int,
        outage_wait: float, key: str = "",
    ) -> None:  # fmt: skip
        limits = Limits(concurrency, None, None, timeout, 3.0 * timeout, None, outage_wait)
        super().__init__(SUBJECT, f"at {redact_url(protocol.url)}", limits)
        self._protocol = protocol
        self._witness = witness
        self._timeout = timeout
        self._key = key
        hide_secret(key)
        self._max_rows: int | None = None
        self._http: httpx.AsyncClient | None = None
        self.counters = Counters()

    async def score(self, samples: Sequence[Sample]) -> list[Row]:
        """Score samples; raises only what must stop the run."""
        # A limit that an earlier rejection has shown: do not run into it again.
        if self._max_rows is not None and len(samples) > self._max_rows:
            return await self._score_halves(samples)
        attempts = ATTEMPTS_OF_MANY if len(samples) > 1 else ATTEMPTS_OF_ONE
        try:
            return await self._call(_ServedCall(samples=samples, max_attempts=attempts))
        except RemoteError as error:
            if len(samples) == 1:
                return [Row(None, error.summary)]
            rejected = error.kind is Failure.REFUSED
        # Which sample is at fault? Only smaller requests can tell.
        rows = await self._score_halves(samples)
        if rejected and all(row.value is not None for row in rows):
            # No sample is at fault, so the server does not take so many.
            self._max_rows = min(self._max_rows or len(samples), len(samples) // 2)
        return rows

    async def ask_witness(self) -> None:
        """Make one small request past the queue; raises RemoteError."""
        await self._attempt_first(self._known_good_call())

    async def get(self, url: str) -> Any:
        """Fetch a JSON document from the server; raises RemoteError."""
        return await self._request("GET", url, None)

    async def close(self) -> None:
        """Close the connections. Safe to call twice."""
        self._admission.close(_CLOSED)
        if self._http is not None:
            await self._http.aclose()

    async def _score_halves(self, samples: Sequence[Sample]) -> list[Row]:
        middle = len(samples) // 2
        halves = [self.score(samples[:middle]), self.score(samples[middle:])]
        first, second = await asyncio.gather(*halves)
        return first + second

    def _prepare_retry(self, call: _ServedCall, error: RemoteError) -> float:
        """Return the pause before the next attempt; raises the error if there is none."""
        # A malformed reply is tried again at once, without the pauses of an outage.
        if error.kind is Failure.UNPARSED and call.attempts < ATTEMPTS_OF_FORM:
            pause = 0.0
        else:
            pause = super()._prepare_retry(call, error)
        self.counters.retries += 1
        return pause

    async def _attempt(self, call: _ServedCall) -> list[Row]:
        """Send one request and return its rows; raises RemoteError."""
        began = self._clock()
        call.attempts += 1
        self.counters.requests += 1
        protocol = self._protocol
        try:
            reply = await self._request("POST", protocol.url, protocol.write(call.samples))
            rows = protocol.read(reply, len(call.samples))
        finally:
            call.last_attempt_s = self._clock() - began
        self.counters.latencies.append(call.last_attempt_s)
        return rows

    def _rejected_text(self, call: _ServedCall, error: RemoteError) -> str | None:
        if error.kind not in (Failure.REFUSED, Failure.UNPARSED):
            return None
        # Of several samples one may be at fault, or their number: that says nothing.
        return repr(call.samples[0]) if len(call.samples) == 1 else ""

    def _known_good_call(self) -> _ServedCall:
        return _ServedCall(samples=[self._witness])

    async def _request(self, method: str, url: str, body: Mapping[str, Any] | None) -> Any:
        """Return the JSON of a reply; raises RemoteError."""
        import httpx

        # Escaped as ASCII, so that the server and not the encoder rejects half a surrogate pair.
        content = None if body is None else json.dumps(body).encode()
        try:
            client = self._http_client()
        except (ImportError, ValueError) as error:  # a SOCKS proxy, or an unknown kind of proxy
            raise RemoteError(Failure.FATAL, "proxy", redact(str(error))) from None
        try:
            # httpx limits the silence between two bytes; this limits the whole request.
            async with asyncio.timeout(self._timeout):
                response = await client.request(method, url, content=content)
                text = response.text
        except (TimeoutError, httpx.TimeoutException):
            message = f"no answer within {self._timeout:g} s"
            raise RemoteError(Failure.RETRYABLE, "timeout", message) from None
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise RemoteError(Failure.FATAL, "address", redact(str(error))) from None
        except httpx.RequestError as error:
            message = redact(str(error) or type(error).__name__)
            raise RemoteError(Failure.RETRYABLE, "connection", message) from None
        if response.status_code != 200:
            raise _status_error(response.status_code, text, response.headers)
        return read_json(text)

    def _http_client(self) -> httpx.AsyncClient:
        """Return the httpx client, which is created on first use."""
        import httpx

        if self._http is None:
            headers = {"Content-Type": "application/json"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            # The client's own queue limits concurrency, so httpx does not.
            limits = httpx.Limits(max_connections=None)
            self._http = httpx.AsyncClient(
                headers=headers,
                timeout=self._timeout,
                limits=limits,
                **client_settings(self._protocol.url),
            )
        return self._http


def _status_error(status: int, text: str, headers: Mapping[str, str]) -> RemoteError:
    """Return the error of a reply with an HTTP status other than 200."""
    headers = {name.lower(): value for name, value in headers.items()}
    message = redact(read_message(text))[:EXCERPT] or "empty body"
    if 300 <= status < 400:
        location = headers.get("location")
        message = redact(f"redirect to {location}" if location else "redirect without a Location")
    kind = kind_of_status(status)
    wait = parse_retry_after(headers) if kind is Failure.RETRYABLE else None
    return RemoteError(kind, f"http_{status}", message, status=status, retry_after=wait)


def read_model_name(listed: object, tell: Tell) -> str:
    """Return the model's name from the answer of /v1/models."""
    # Accept only a list of objects with names: another server may answer at this path.
    data = listed.get("data") if isinstance(listed, dict) else None
    items = data if isinstance(data, list) else []
    ids = [item.get("id") for item in items if isinstance(item, dict)]
    names = [name for name in ids if isinstance(name, str) and name]
    if not names:
        raise RemoteError(
            Failure.FATAL, "models", "its list of models is empty; set reward.model.model_name"
        )
    if len(names) > 1:
        tell(
            f"The reward model's server has several models ({', '.join(names[:5])}); "
            f"{names[0]} scores. Set reward.model.model_name for another one."
        )
    return names[0]


async def check_raw(
    client: ServedModelClient, protocol: Vllm, samples: Sequence[Sample], tell: Tell
) -> None:
    """Find the switch that makes vLLM return scores without sigmoid or softmax.

    A switch that the server knows makes a difference; its name depends on vLLM's version.
    """
    # Try each name: a switch that changes the outputs is the right one.
    for switch in RAW_SWITCHES:
        protocol.switch = (switch, True)
        on = await score_each(client, samples)
        protocol.switch = (switch, False)
        off = await score_each(client, samples)
        if _outputs_differ(off, on):
            return
    protocol.switch = (RAW_SWITCHES[0], False)
    # No switch changes anything: either the scores are raw, or always activated.
    rows = [row.outputs for row in off]
    if not all(outputs and all(0.0 <= value <= 1.0 for value in outputs) for outputs in rows):
        return
    if all(abs(outputs[0] - 1.0) < 1e-6 and len(outputs) == 1 for outputs in rows):
        raise RewardError(
            "Every score of the reward model's server is exactly 1: it puts a softmax over one "
            f"output. {_SERVE_RAW}"
        )
    tell(
        "The scores of the reward model's server are between 0 and 1 even when raw scores are "
        f"requested: the server seems to apply a sigmoid or softmax. {_SERVE_RAW}"
    )


_SERVE_RAW = "To get raw scores, start vLLM with --pooler-config '{\"use_activation\": false}'."


async def score_each(client: ServedModelClient, samples: Sequence[Sample]) -> list[Row]:
    """Score each sample in a separate request, so that no other sample affects it."""
    rows = await asyncio.gather(*(client.score([sample]) for sample in samples))
    return [row for (row,) in rows]


def _outputs_differ(first: Sequence[Row], second: Sequence[Row]) -> bool:
    """Return whether any output differs by more than EQUAL."""
    pairs = zip(first, second, strict=True)
    return any(
        abs(a - b) > EQUAL * max(1.0, abs(a))
        for row, other in pairs
        for a, b in zip(row.outputs, other.outputs, strict=False)
    )


async def check_scores(
    client: ServedModelClient, samples: Sequence[Sample], tell: Tell
) -> list[float]:
    """Score each sample twice; RewardError unless all have a score and keep it."""
    first, second = await score_each(client, samples), await score_each(client, samples)
    failed = next((row.failure for row in (*first, *second) if row.value is None), None)
    if failed is not None:
        raise RewardError(_test_failure(f"gave no score for a harmless sample ({failed})"))
    scores = [row.value for row in first if row.value is not None]
    repeated = [row.value for row in second if row.value is not None]
    # Servers in bfloat16 may differ a little; much less than samples differ.
    spread = max(scores) - min(scores)
    change = max(abs(a - b) for a, b in zip(scores, repeated, strict=True))
    if change > max(EQUAL, 0.1 * spread):
        raise RewardError(_test_failure(f"scored the same sample {change:.3g} apart in two tries"))
    if change > EQUAL:
        tell(f"The reward model's server scores the same sample up to {change:.2g} apart.")
    return scores


def _test_failure(problem: str) -> str:
    return f"The served reward model {problem}. Look at the server's model and template. {TURN_OFF}"


# A request that does not fill leaves after this, even before the round ends.
LINGER_S = 1.0


@dataclass(eq=False)
class _Entry:
    sample: Sample
    future: Future[Score]


class ServedModelReward(Reward):
    """Scores with a reward model behind an address; see ModelReward for every setting."""

    def __init__(
        self, settings: ModelReward, *, name: str = "model",
        environ: Mapping[str, str] = os.environ,
    ) -> None:  # fmt: skip
        self.name = name
        self._settings = settings
        choice = choose_adapter(settings.path or "", settings.adapter)
        self.adapter, self.reason = choice.adapter, choice.reason
        self._writer = Writer(settings, self.adapter)
        self._protocol: Protocol = (
            Vllm(settings, chat=self._writer.chat) if self.adapter == "vllm" else OpenRlhf(settings)
        )
        self._rows = settings.request_rows if self._protocol.may_batch else 1
        self._key = _read_key(settings, environ)
        self._waiting: list[_Entry] = []
        self._in_flight: dict[asyncio.Task[None], list[_Entry]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._client = self._new_client(())
        self._closed = False
        self._loop = LoopThread(f"served-{name}")

    def start(
        self, prompts: Sequence[Prompt], *, patient: bool = False, tell: Tell = tell_nobody
    ) -> None:
        """Ask for one small score, then check that scores are raw and good is above bad."""
        for remark in self._writer.list_remarks():
            tell(remark)
        # The witness has the form of this run's prompts.
        self._client = self._new_client(prompts)
        # One short answer to each kind of prompt must fit.
        for prompt in first_of_each_kind(prompts):
            self._write(prompt, NO_ANSWER)
        self._reach(patient=patient, tell=tell)
        self._loop.call(self._run_self_test(prompts, tell))

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Put one rollout into the next request, which leaves when it is full."""
        future: Future[Score] = Future()
        self._loop.submit(self._accept_rollout(rollout, future))
        return future

    def end_round(self, kind: RoundKind = "train") -> None:
        """Send what is left over."""
        if not self._closed:
            self._loop.submit(self._flush_all())

    def waiting_for(self) -> str | None:
        """Return a sentence about what the server is waited for, when it is down."""
        return self._client.waiting_for()

    def pop_metrics(self) -> dict[str, float]:
        """`model/…` metrics since the last call, after `close` too."""
        if self._closed:
            return asyncio.run(self._measure())
        return self._loop.call(self._measure(), timeout=60.0)

    def close(self) -> None:
        """Stop requests under way, and free connections and the thread."""
        if self._closed:
            return
        self._closed = True
        try:
            self._loop.call(self._close(), timeout=20.0)
        finally:
            self._loop.close()

    # --- the start ----------------------------------------------------------------------------

    def _new_client(self, prompts: Sequence[Prompt]) -> ServedModelClient:
        """Return a client whose witness is a sample of these prompts."""
        question, good, _ = BUILT_IN[0]
        settings = self._settings
        return ServedModelClient(
            self._protocol, witness=self._write(prompt_like(prompts, question), good),
            timeout=settings.timeout, concurrency=settings.concurrency,
            outage_wait=settings.outage_wait, key=self._key,
        )  # fmt: skip

    def _write(self, prompt: Prompt, response: str) -> Sample:
        """Return a sample that has to fit."""
        try:
            return self._writer.write(prompt, response)
        except UnfitError as error:
            raise RewardError(
                f"A short answer to “{prompt.text[:60]}” does not fit the served reward model "
                f"({error}). Raise reward.model.max_length, or leave long prompts out."
            ) from None

    def _write_if_fits(self, prompt: Prompt, response: str) -> Sample | None:
        with suppress(UnfitError):
            return self._writer.write(prompt, response)
        return None

    def _reach(self, *, patient: bool, tell: Tell) -> None:
        """Wait for a first score; RewardError where a wrong address or model is likely."""
        outage_wait = self._settings.outage_wait
        name = f"{SUBJECT} at {redact_url(self._protocol.url)}"

        def explain(error: RemoteError) -> str:
            return f"{name} gives no scores ({error.summary}). {ADVICE}"

        try:
            reach(
                lambda: self._loop.call(self._ask_first(tell)), subject=name,
                outage_wait=outage_wait, explain=explain, tell=tell, patient=patient,
            )  # fmt: skip
        except RemoteError as error:
            raise RewardError(explain(error)) from None

    async def _run_self_test(self, prompts: Sequence[Prompt], tell: Tell) -> None:
        """Check for raw scores, then that good answers score above bad ones."""
        max_length = self._settings.max_length
        pairs, samples = encode_pairs(choose_pairs(prompts), self._write_if_fits, max_length)
        if isinstance(self._protocol, Vllm):
            await check_raw(self._client, self._protocol, samples[:4], tell)
        if self._settings.self_test != "off":
            with raise_if_strict(self._settings.self_test, tell):
                scores = await check_scores(self._client, samples, tell)
                check_direction(pairs, scores, "are the server's model and template right")
        # The self-test does not count in the metrics.
        self._client.counters = Counters()
        self._writer.pop_counts()

    async def _ask_first(self, tell: Tell) -> None:
        """Find the model's name and score one sample; raises RemoteError."""
        protocol = self._protocol
        if isinstance(protocol, Vllm) and protocol.model is None:
            protocol.model = read_model_name(await self._client.get(protocol.models_url), tell)
        await self._client.ask_witness()

    # --- scoring ------------------------------------------------------------------------------

    async def _accept_rollout(self, rollout: Rollout, future: Future[Score]) -> None:
        """Write a rollout as a sample, and send a request when enough samples wait."""
        self._client.counters.samples += 1
        try:
            sample = self._writer.write(rollout.prompt, rollout.text)
        except UnfitError as error:
            self._resolve_future(future, Row(None, str(error)))
            return
        except RewardError as error:  # the template refuses this conversation
            self._resolve_future(future, Row(None, f"not readable by the reward model: {error}"))
            return
        except Exception as error:
            future.set_exception(error)
            return
        self._waiting.append(_Entry(sample, future))
        if len(self._waiting) >= self._rows:
            entries, self._waiting = self._waiting, []
            self._send(entries)
        # Samples of a round that is never ended must not wait for ever.
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._flush)

    async def _flush_all(self) -> None:
        self._flush()

    def _flush(self) -> None:
        """Send the waiting samples now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        entries, self._waiting = self._waiting, []
        if entries:
            self._send(entries)

    def _send(self, entries: list[_Entry]) -> None:
        task = asyncio.get_running_loop().create_task(self._score(entries))
        self._in_flight[task] = entries
        task.add_done_callback(lambda done: self._in_flight.pop(done, None))

    async def _score(self, entries: list[_Entry]) -> None:
        """Set the result of every future; `_close` does so for those that are cancelled."""
        try:
            rows = await self._client.score([entry.sample for entry in entries])
        except Exception as error:
            _fail_entries(entries, error)
            return
        for entry, row in zip(entries, rows, strict=True):
            self._resolve_future(entry.future, row)

    def _resolve_future(self, future: Future[Score], row: Row) -> None:
        """Set the score of one sample."""
        if row.value is None:
            self._client.counters.failed += 1
            score = Score.failed(row.failure)
        else:
            info = {"outputs": list(row.outputs)} if len(row.outputs) > 1 else {}
            parts = {self.name: Part(raw=row.value, scaled=row.value)}
            score = Score(row.value, parts=parts, info=info)
        if future.set_running_or_notify_cancel():
            future.set_result(score)

    async def _measure(self) -> dict[str, float]:
        counters, self._client.counters = self._client.counters, Counters()
        metrics = counters.metrics() | self._writer.pop_counts()
        return {f"{self.name}/{name}": float(value) for name, value in metrics.items()}

    async def _close(self) -> None:
        """Send or cancel what is left, and close the connections."""
        self._flush()
        # Requests in flight are cancelled; their futures get the reason.
        cut_short = dict(self._in_flight)
        for task in cut_short:
            task.cancel()
        await asyncio.gather(*cut_short, return_exceptions=True)
        for entries in cut_short.values():
            _fail_entries([e for e in entries if not e.future.done()], Interrupted(_CLOSED))
        await self._client.close()


def _fail_entries(entries: Sequence[_Entry], error: Exception) -> None:
    for entry in entries:
        if entry.future.set_running_or_notify_cancel():
            entry.future.set_exception(error)


def _read_key(settings: ModelReward, environ: Mapping[str, str]) -> str:
    """Return the key from its variable; empty if none is named."""
    if settings.key_env is None:
        return ""
    key = environ.get(settings.key_env, "").strip()
    if not key:
        raise RewardError(
            f"reward.model.key_env names {settings.key_env}, but no such variable is set."
        )
    return key
