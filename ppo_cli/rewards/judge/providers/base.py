"""What the providers share: calls with a time limit, options that are negotiated, clean errors.

A subclass builds the request with the options that are left, sends it through its SDK and reads the
reply. The SDK's client is made on the event loop that asks first, and the SDK's retries are off.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

from ppo_cli.config.models.known_models import JUDGES
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import shorten
from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply, UnlimitedCost, Usage
from ppo_cli.rewards.judge.providers.failures import (
    Context,
    ErrorReport,
    classify,
    read_error,
    too_long_message,
)
from ppo_cli.rewards.judge.providers.lengths import ContextRoom, fit_answer_tokens
from ppo_cli.rewards.judge.providers.options import Forms, Option, OptionSet
from ppo_cli.rewards.judge.providers.replies import ReplyFields, read_reply
from ppo_cli.rewards.remote.failures import MESSAGE_LIMIT, Failure, to_one_line
from ppo_cli.rewards.remote.proxies import client_settings, is_socks
from ppo_cli.secrets.known import hide_secret
from ppo_cli.secrets.redact import redact

logger = logging.getLogger(__name__)

LENGTH_OPTIONS = {"max_tokens", "max_output_tokens"}

T = TypeVar("T")


@dataclass(frozen=True)
class Key:
    """A key and the variable that it came from (empty for a server without keys)."""

    value: str = field(repr=False)
    variable: str


def http_client(url: str, over_aiohttp: Callable[..., T], over_httpx: Callable[..., T]) -> T:
    """Return an SDK's client for an address, over aiohttp: a call takes a third less CPU time.

    Over httpx where a SOCKS proxy leads to the address: aiohttp speaks HTTP only.
    """
    settings = client_settings(url)
    return (over_httpx if is_socks(settings.get("proxy")) else over_aiohttp)(**settings)


class SdkProvider(ABC):
    """One judge behind one official SDK."""

    name: str
    package: ClassVar[str]
    module: ClassVar[str]  # of the package
    decision_module: ClassVar[str] = ""  # the module with its decision endpoint
    redundant_path: ClassVar[str]  # regex: the end of a pasted path that the SDK adds itself
    default_path: ClassVar[str] = ""  # of an address that comes without one
    client_class: ClassVar[str]  # the SDK's client, where `connect` makes it
    reply_fields: ClassVar[ReplyFields]
    batches: ClassVar[str] = ""  # the entry point of its batch interface, if it has one
    noisy_logger: ClassVar[str] = ""  # the SDK's, which repeats what our errors say
    lists_models: ClassVar[bool] = True
    uses_aiohttp: ClassVar[bool] = True  # where `connect` makes the client

    def __init__(self, api: ApiReward, base_url: str, key: Key, flags: str = "--rm_") -> None:
        self.api = api
        self.model = (api.model or "").strip()
        self.base_url = base_url
        self._key = key
        hide_secret(key.value)  # a gateway may repeat it in any part of a reply
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = Context(
            f"{self.name} ({self.model})", self.model, key.variable, flags,
            self.name if api.base_url is None else "",
        )  # fmt: skip
        options = [] if api.mode == "decision" else [*self.options()]
        if api.has_budget:  # the limit of an answer is the last to be dropped on a guess
            options.sort(key=lambda option: option.name in LENGTH_OPTIONS)
        self._options = OptionSet(options, self._context.label)
        self._room = ContextRoom(self._context.label, api.max_tokens)

    def __repr__(self) -> str:
        return f"Judge(name={self.name!r}, model={self.model!r}, base_url={self.base_url!r})"

    # --- what a subclass says and does --------------------------------------------------------

    @classmethod
    def default_url(cls, environ: Mapping[str, str]) -> str:
        """Return the provider's public address."""
        return JUDGES[cls.name].url

    @abstractmethod
    def options(self) -> Sequence[Option]:
        """Return the optional parameters of a text request, the most exotic first."""

    @abstractmethod
    def arguments(self, question: Question, forms: Forms) -> dict[str, Any]:
        """Return the arguments of the SDK's call for a written verdict.

        What the SDK does not check or does not know is in `extra_body`.
        """

    @abstractmethod
    async def send(self, client: Any, arguments: dict[str, Any], timeout: float) -> Any:
        """Make the call for a written verdict; returns its reply, decoded."""

    def connect(self, key: str) -> Any:
        """Make the SDK's asynchronous client without retries; imports the SDK."""
        sdk = importlib.import_module(self.module)
        over_httpx = sdk.DefaultAsyncHttpxClient
        over_aiohttp = sdk.DefaultAioHttpClient if self.uses_aiohttp else over_httpx
        http = http_client(self.base_url, over_aiohttp, over_httpx)
        client = getattr(sdk, self.client_class)
        return client(max_retries=0, http_client=http, **self.credentials(key))

    def credentials(self, key: str) -> dict[str, Any]:
        """Return the address and the credentials as the SDK's client takes them."""
        return {"api_key": key, "base_url": self.base_url}

    async def request_decision(self, client: Any, question: Question, timeout: float) -> Reply:
        """Ask the decision endpoint for the probability of each level of a score or of criteria.

        The reply has no text and no score. Providers without this endpoint keep this method.
        """
        raise NotImplementedError(f"{self.name} has no decision endpoint")

    def start_server(self, tell: Callable[[str], None]) -> None:
        """Start the server behind the address, if the run owns it."""
        return

    def stop_server(self) -> None:
        """Stop it again."""
        return

    async def list_models(self, client: Any) -> list[str] | None:
        """Return the names of the models that the key may use; None where nothing lists them."""
        if not self.lists_models:
            return None
        return [model.id async for model in client.models.list()]

    async def disconnect(self, client: Any) -> None:
        """Close the SDK's client."""
        await client.close()

    # --- what its requests share --------------------------------------------------------------

    def plain_fields(self, question: Question, forms: Forms) -> dict[str, Any]:
        """Return seed, temperature and the limit of the answer, as far as `forms` has them."""
        fields = {"seed": question.vote, "temperature": self.api.temperature}
        fields |= dict.fromkeys(LENGTH_OPTIONS, question.max_tokens)
        # Forms of the limit are its names.
        names = {name: name if form == "on" else form for name, form in forms.items()}
        return {names[name]: value for name, value in fields.items() if name in forms}

    async def request_verdict(
        self, client: Any, question: Question, forms: Forms, timeout: float
    ) -> Reply:
        """Ask for a written verdict."""
        reply = await self.send(client, self.arguments(question, forms), timeout)
        return read_reply(reply, self.reply_fields)

    # --- what others ask ----------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """Everything but the question that may change an answer; no key, no dropped options."""
        # Another address may serve another model under the same name.
        where = urlsplit(self.base_url)
        parts: dict[str, Any] = {
            "provider": self.name,
            "model": self.model,
            "endpoint": f"{where.netloc}{where.path}",
            "mode": self.api.mode,
        }
        if self.api.mode != "decision":
            parts["temperature"] = self.api.temperature
        return json.dumps(parts, sort_keys=True)

    def dropped(self) -> Mapping[str, str]:
        """Return the parameters that the model did not take, each with the provider's message."""
        return dict(self._options.dropped)

    def adopt_dropped(self, dropped: Mapping[str, str]) -> None:
        """Leave out the parameters that an earlier command found to be refused."""
        self._options.dropped |= dropped

    def forms(self) -> Forms:
        """Return the options that a call would send now."""
        return self._options.forms()

    @property
    def max_answer(self) -> int | None:
        """The most tokens of answer that fit the judge's context; None where all fit."""
        return self._room.max_answer

    def fit_answer(self, question: Question) -> Question:
        """Return the question with no more tokens for the answer than the context has room for."""
        return self._room.fit(question)

    def check_answer_limit(self, forms: Forms, message: str = "") -> None:
        """Raise UnlimitedCost if there is a budget, but nothing limits the answer any more."""
        if self.api.has_budget and not self._length_options() <= forms.keys():
            reason = f" ({message})" if message else ""
            raise UnlimitedCost(
                f"{self._context.label} takes no limit on the tokens of an answer{reason}. The "
                "cost of a call then has no upper bound, and no budget can hold, so none was sent. "
                f"Take another {self._context.flags}model or {self._context.flags}base_url, or "
                "go without a budget."
            )

    async def ask(self, question: Question, *, timeout: float) -> Reply:
        """Make one call (or a few, while parameters are dropped); raises only JudgeError.

        The reply is not redacted: that could break its JSON before it is read.
        """
        return await self.run_with_client(
            timeout, lambda client: self._negotiate(client, question, timeout)
        )

    async def run_with_client(self, timeout: float, work: Callable[[Any], Awaitable[T]]) -> T:
        """Use the SDK's client for at most `timeout` seconds; raises only JudgeError."""
        failure: JudgeError | None = None
        try:
            # Importing an SDK takes seconds, which must not count as the call's time.
            client = self._connected()
            async with asyncio.timeout(timeout):
                return await work(client)
        except JudgeError as error:
            failure = error.rewritten(self._clean(str(error)), reply=self._clean(error.reply))
        except UnlimitedCost:
            raise
        except TimeoutError:
            message = f"{self._context.label} did not answer within {timeout:g} s"
            failure = JudgeError(Failure.RETRYABLE, "timeout", message)
        except Exception as error:
            failure = self._classify(read_error(error))
        # Raised here, outside the handlers: an SDK's exception, kept as the context, could carry
        # the key into a traceback.
        raise failure

    async def close(self) -> None:
        """Close connections. Safe to call twice."""
        client, self._client = self._client, None
        if client is None:
            return
        try:
            await self.disconnect(client)
        except Exception as error:
            logger.warning("closing %s: %s", self._context.label, self._clean(repr(error)))

    # --- one call -----------------------------------------------------------------------------

    def _connected(self) -> Any:
        """Return the SDK's client for this event loop, which is created on first use.

        Raises JudgeError FATAL if the SDK does not start.
        """
        loop = asyncio.get_running_loop()
        if self._client is not None and self._loop is loop:
            return self._client
        try:
            sdk_logger = logging.getLogger(self.noisy_logger)
            if self.noisy_logger and sdk_logger.level in {logging.NOTSET, logging.WARNING}:
                sdk_logger.setLevel(logging.ERROR)
            self._client, self._loop = self.connect(self._key.value), loop
        except Exception as error:  # a broken install or proxy setting: a retry does not help
            reason = self._clean(f"{type(error).__name__}: {error}")
            message = f"{self._context.label}: the {self.package} package does not start: {reason}"
            raise JudgeError(Failure.FATAL, "sdk", message) from None
        return self._client

    async def _negotiate(self, client: Any, question: Question, timeout: float) -> Reply:
        """Ask until the options and the length of the answer are what the model accepts."""
        options, guesses = self._options, list[str]()
        message = length_message = ""
        question = self.fit_answer(question)
        while True:
            forms = options.forms(guesses)
            self.check_answer_limit(forms, message)
            try:
                if self.api.mode == "decision":
                    reply = await self.request_decision(client, question, timeout)
                else:
                    reply = await self.request_verdict(client, question, forms, timeout)
            except JudgeError as error:
                if error.kind is not Failure.RETRYABLE:
                    options.accept(forms, guesses, message)  # a refused text accepts the options
                raise
            except Exception as error:
                report = read_error(error)
                if report.is_too_long:
                    length_message = self._clean(report.message, report.limit)
                    question = self._shorten_answer(question, forms, report)
                    continue
                message = self._clean(report.message, report.limit)
                # llama.cpp answers 500 where its template or grammar refuses an option, others 501.
                if report.status in (500, 501) and options.blames(message):
                    report = replace(report, meaning=400)
                if not report.may_blame_option:
                    raise
                # Another call may have dropped something since this one was sent.
                if forms != options.forms(guesses):
                    continue
                if not options.drop_named(forms, message, report.param):
                    if (guess := options.guess(forms)) is None:
                        tried = ", ".join([*options.dropped, *guesses])
                        note = (
                            f" (also without {tried})"
                            if tried and (report.status or 0) >= 500
                            else ""
                        )
                        raise self._classify(replace(report, message=message + note)) from None
                    guesses.append(guess)
            else:
                options.accept(forms, guesses, message)
                if length_message:
                    self._room.remember(question.max_tokens, length_message)
                self._room.check_reading(question, reply.usage or Usage())
                return reply

    def _length_options(self) -> set[str]:
        return {option.name for option in self._options.options} & LENGTH_OPTIONS

    def _shorten_answer(self, question: Question, forms: Forms, report: ErrorReport) -> Question:
        """Return the question with fewer tokens for the answer; JudgeError if none would do."""
        message = self._clean(report.message, report.limit)
        is_limited = self._length_options() <= forms.keys() and self.api.mode != "decision"
        room = fit_answer_tokens(question, message) if is_limited else None
        if room is None:
            message = f"{self._context.label} answered {report.status}: {message}"
            message = too_long_message(message, question.max_tokens if is_limited else None)
            raise JudgeError(Failure.REFUSED, "too_long", message, status=report.status)
        return replace(question, max_tokens=room)

    def _classify(self, report: ErrorReport) -> JudgeError:
        """Return the JudgeError for an exception of the SDK, without secrets.

        An unknown kind of exception is logged.
        """
        report = replace(report, message=self._clean(report.message, report.limit))
        proven = self._options.accepted is not None
        error = classify(report, self._context, proven=proven)
        if error.cause == "unknown":
            logger.warning("%s", error)
        return error

    def _clean(self, text: str, limit: int = MESSAGE_LIMIT) -> str:
        """Return a text in one line, without secrets and not too long."""
        return shorten(to_one_line(redact(text)), limit)
