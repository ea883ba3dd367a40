"""What the four providers share: one call with a time limit, negotiation, and clean errors.

A subclass builds the request for a form (which options are in it), sends it through its SDK and
reads the reply. The client is made on the event loop that asks first, SDK retries off.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

from ppo_cli.config.known_models import JUDGES
from ppo_cli.redact import hide, redact
from ppo_cli.rewards.judge.calls import Failure, JudgeError, Question, Reply, Usage
from ppo_cli.rewards.judge.providers.endpoint import Endpoint, Key, clean_url
from ppo_cli.rewards.judge.providers.failures import (
    LONGEST,
    Context,
    about_the_form,
    diagnose,
    one_line,
    read_symptoms,
    shorten,
)
from ppo_cli.rewards.judge.providers.negotiation import Form, Negotiation, Option

logger = logging.getLogger(__name__)


class SdkProvider(ABC):
    """One judge behind one official SDK."""

    name: str
    package: ClassVar[str]
    module: ClassVar[str]  # of the package
    decisions: ClassVar[str] = ""  # the module with its decision endpoint
    pasted: ClassVar[str]  # the end of a path that people paste along; the SDK adds it itself
    path: ClassVar[str] = ""  # of an address that comes without one

    def __init__(self, endpoint: Endpoint, key: Key) -> None:
        self.endpoint = endpoint
        self.model = endpoint.named_model()
        self.base_url = str(endpoint.base_url)
        self._key = key
        hide(key.value)  # a gateway may send it back in any part of a reply
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = Context(f"{self.name} ({self.model})", self.model, key.variable,
                                endpoint.flags)  # fmt: skip
        options = [] if endpoint.mode == "decision" else self.options()
        self._negotiation = Negotiation(self._context.label, options)

    def __repr__(self) -> str:
        return f"Judge(name={self.name!r}, model={self.model!r}, base_url={self.base_url!r})"

    @classmethod
    def home(cls, environ: Mapping[str, str]) -> str:
        """The provider's own address."""
        return JUDGES[cls.name].url

    @classmethod
    def locate(cls, endpoint: Endpoint, environ: Mapping[str, str]) -> Endpoint:
        """The same endpoint with a base_url that is set and in the form that the SDK takes."""
        places = {f"{endpoint.flags}_base_url": endpoint.base_url}
        for variable in () if endpoint.base_url else JUDGES[cls.name].url_variables:
            places[variable] = environ.get(variable, "").strip()
        for source, given in places.items():
            if given:
                return replace(endpoint, base_url=clean_url(given, cls.pasted, cls.path, source))
        return replace(endpoint, base_url=cls.home(environ))

    def sampling(self) -> float | None:
        """Temperature to ask for: 0, or 0.7 with several votes; None: the model's own."""
        if self.endpoint.temperature is not None:
            return self.endpoint.temperature
        return 0.0 if self.endpoint.votes == 1 else 0.7

    @abstractmethod
    def options(self) -> Sequence[Option]:
        """The optional parameters of a text request, the most exotic first."""

    @abstractmethod
    def connect(self, key: str) -> Any:
        """Make the SDK's asynchronous client; imports the SDK."""

    @abstractmethod
    async def judge(self, client: Any, question: Question, form: Form, timeout: float) -> Reply:
        """Ask for a written verdict."""

    @abstractmethod
    async def decide(self, client: Any, question: Question, timeout: float) -> Reply:
        """Ask a decision endpoint for the probability of each level."""

    @abstractmethod
    async def disconnect(self, client: Any) -> None:
        """Close the SDK's client."""

    def settings(self) -> Mapping[str, Any]:
        """Configured parameters that may change an answer; part of the identity."""
        return {"temperature": self.sampling()}

    @property
    def identity(self) -> str:
        """Everything but the question that may change an answer; no key, no negotiated state."""
        where = urlsplit(self.base_url)
        known = {
            "provider": self.name,
            "model": self.model,
            "endpoint": f"{where.netloc}{where.path}",
            "mode": self.endpoint.mode,
            **(self.settings() if self.endpoint.mode == "text" else {}),
        }
        return json.dumps(known, sort_keys=True)

    def dropped(self) -> Mapping[str, str]:
        """Parameters that the model did not take, each with the provider's words."""
        return self._negotiation.dropped()

    async def ask(self, question: Question, *, timeout: float) -> Reply:
        """Make one call (or a few, while parameters are negotiated); raises only JudgeError."""
        failure: JudgeError | None = None
        try:
            # Importing an SDK takes seconds, which no call should pay for.
            client = self._connected()
            async with asyncio.timeout(timeout):
                reply = await self._negotiate(client, question, timeout)
            return replace(reply, text=redact(reply.text))
        except JudgeError as error:
            failure = self._cleaned(error)
        except TimeoutError:
            told = f"{self._context.label} did not answer within {timeout:g} s"
            failure = JudgeError(Failure.RETRYABLE, "timeout", told)
        except Exception as error:
            failure = self._explain(error)
        # Raised here, outside the handlers: an SDK's exception, kept as the context, could
        # carry the key into a traceback.
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

    def _connected(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._client, self._loop = self._connect(), loop
        return self._client

    def _connect(self) -> Any:
        try:
            return self.connect(self._key.value)
        except Exception as error:  # a broken install or proxy setting: no retry mends it
            told = f"{self._context.label}: the {self.package} package does not start: "
            said = self._clean(f"{type(error).__name__}: {error}")
            raise JudgeError(Failure.FATAL, "sdk", told + said) from None

    async def _negotiate(self, client: Any, question: Question, timeout: float) -> Reply:
        form = self._negotiation.begin()
        refused: list[Form] = []
        while True:
            try:
                reply = await self._call(client, question, form, timeout)
            except JudgeError as error:
                if error.kind is not Failure.RETRYABLE:
                    # A refusal, too, is an answer to the form.
                    self._negotiation.succeed(form, refused)
                raise
            except Exception as error:
                symptoms = read_symptoms(error)
                told = self._clean(symptoms.message, symptoms.longest)
                refused.append(form)
                other = None
                if about_the_form(symptoms):
                    other = self._negotiation.refuse(form, told, symptoms.param)
                if other is None:
                    raise
                form = other
            else:
                self._negotiation.succeed(form, refused)
                return reply

    async def _call(self, client: Any, question: Question, form: Form, timeout: float) -> Reply:
        if self.endpoint.mode == "decision":
            return await self.decide(client, question, timeout)
        return await self.judge(client, question, form, timeout)

    def _explain(self, error: Exception) -> JudgeError:
        symptoms = read_symptoms(error)
        symptoms = replace(symptoms, message=self._clean(symptoms.message, symptoms.longest))
        found = diagnose(symptoms, self._context, proven=self._negotiation.proven)
        if found.cause == "unknown":
            logger.warning("%s", found)
        return found

    def _cleaned(self, error: JudgeError) -> JudgeError:
        return JudgeError(
            error.kind, error.cause, self._clean(str(error)), status=error.status,
            retry_after=error.retry_after, usage=error.usage, reply=self._clean(error.reply),
        )  # fmt: skip

    def _clean(self, text: str, longest: int = LONGEST) -> str:
        """A text in one line, without secrets and not too long."""
        return shorten(one_line(redact(text)), longest)


# --- reading replies ----------------------------------------------------------------------------


def bad_body(what: str) -> JudgeError:
    """A reply with status 200 that is no reply: transport, not verdict."""
    return JudgeError(Failure.RETRYABLE, "bad_body", f"The reply is not an answer: {what}")


def refused(cause: str, told: str, usage: Usage | None) -> JudgeError:
    """The judge, or a filter before it, would not judge this text."""
    return JudgeError(Failure.REFUSED, cause, told, usage=usage, reply=told)


def finish(text: str | None, usage: Usage | None, *, truncated: bool) -> Reply:
    """The reply, or UNPARSED when it is empty without having been cut."""
    if not (text or "").strip() and not truncated:
        raise JudgeError(Failure.UNPARSED, "empty", "The judge's answer is empty.", usage=usage)
    return Reply(text or "", usage, truncated)


def attribute(value: Any, *names: str | int) -> Any:
    """Follow attributes, keys and indices; None as soon as one is not there."""
    for name in names:
        if isinstance(name, int):
            fits = isinstance(value, list | tuple) and len(value) > name
            value = value[name] if fits else None
        elif isinstance(value, Mapping):
            value = value.get(name)
        else:
            value = getattr(value, name, None)
    return value


class TokenFields(NamedTuple):
    """Where a provider tells the tokens of a call, as dotted names; those of one kind are added.

    The first of `input` and of `output` are the ones whose absence means that nothing is told.
    """

    input: tuple[str, ...]
    output: tuple[str, ...]
    cached: str


def read_usage(usage: Any, fields: TokenFields) -> Usage | None:
    """The tokens of a call; None when they are not told, as by many gateways and local servers."""
    if _count(usage, fields.input[0]) is None and _count(usage, fields.output[0]) is None:
        return None
    kinds = (fields.input, fields.output, (fields.cached,))
    return Usage(*(sum(_count(usage, name) or 0 for name in names) for names in kinds))


def _count(usage: Any, name: str) -> int | None:
    found = attribute(usage, *name.split("."))
    if not isinstance(found, int | float) or not math.isfinite(found):
        return None
    return max(0, int(found))


def hush(name: str) -> None:
    """Keep an SDK's own warnings off the screen: what they tell is in our errors."""
    sdk_logger = logging.getLogger(name)
    if sdk_logger.level in {logging.NOTSET, logging.WARNING}:
        sdk_logger.setLevel(logging.ERROR)
