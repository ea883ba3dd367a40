"""What the providers share: one call with a time limit, optional parameters, and clean errors.

A subclass builds the request with the options that are left, sends it through its SDK and reads
the reply. The client is made on the event loop that asks first, SDK retries off.

An option that the model refuses by name is dropped for the life of the provider (or goes on in
its next form). A refusal that names nothing drops options, the most exotic first, until the call
goes through; only before the first success, for after it the text is at fault.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import urlsplit

from ppo_cli.config.models.known_models import JUDGES
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import shorten
from ppo_cli.redact import hide_secret, redact
from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply, UnlimitedCost, Usage
from ppo_cli.rewards.judge.providers.failures import (
    Context,
    Symptoms,
    about_the_filter,
    about_the_form,
    diagnose,
    no_room,
    read_symptoms,
    too_long,
)
from ppo_cli.rewards.judge.providers.lengths import (
    USUAL_ANSWER,
    ReadingCheck,
    fewer_tokens,
)
from ppo_cli.rewards.remote.failures import MESSAGE_LIMIT, Failure, to_one_line
from ppo_cli.rewards.remote.proxies import client_settings, is_socks

logger = logging.getLogger(__name__)

CALL_S = 300.0  # one request that hands in, looks at or fetches a whole batch job
CLOCKS_APART_S = 120.0  # between this machine and a provider, at most
LENGTH_OPTIONS = {"max_tokens", "max_output_tokens"}
MOST_TOKENS = 10_000_000  # of one call: a usage with more is not a count of tokens

T = TypeVar("T")
Form = Mapping[str, str]  # the options of a call by name, each with its form
Rows = Mapping[str, Question]  # of a batch job, by the id that the results carry
Results = Sequence[tuple[str, "Reply | JudgeError"]]  # by the id of the row


@dataclass(frozen=True)
class Progress:
    """How far a batch job is: the provider's word, rows done if it says, and why it failed."""

    state: str
    over: bool
    done: int | None = None
    failed: str = ""


@dataclass(frozen=True)
class Key:
    """A key and the variable that it came from (empty for a server that needs none)."""

    value: str = field(repr=False)
    variable: str


@dataclass(frozen=True)
class Option:
    """An optional parameter: its name, its forms, and the words by which errors may call it."""

    name: str
    forms: tuple[str, ...] = ("on",)
    words: tuple[str, ...] = ()

    def place_in(self, text: str) -> int | None:
        """Where an error message (or its `param`) first speaks of this option; None if nowhere."""
        # A form such as `json` or `OFF` is an everyday word; one with an underscore is a name.
        forms = {form for form in self.forms if "_" in form}
        places = [place_of(text, word) for word in {self.name, *self.words, *forms}]
        return min((place for place in places if place is not None), default=None)

    def called(self, form: str) -> str:
        """How a form of this option is told to people."""
        return self.name if form == "on" else f"{self.name}={form}"


def place_of(text: str, name: str) -> int | None:
    """Where a text has a name as words of their own: a_b, aB, a-b or `a b`; None if nowhere."""
    parts = r"[\s_-]?".join(re.escape(part) for part in re.split(r"[\s_-]", name))
    found = re.search(rf"(?<![A-Za-z]){parts}(?![A-Za-z])", text, re.IGNORECASE)
    return found.start() if found else None


def http_client(url: str, over_aiohttp: Callable[..., T], over_httpx: Callable[..., T]) -> T:
    """An SDK's client for an address, over aiohttp: a call takes a third less CPU time.

    Over httpx where a SOCKS proxy leads there: aiohttp speaks HTTP only.
    """
    settings = client_settings(url)
    return (over_httpx if is_socks(settings.get("proxy")) else over_aiohttp)(**settings)


class SdkProvider(ABC):
    """One judge behind one official SDK."""

    name: str
    package: ClassVar[str]
    module: ClassVar[str]  # of the package
    decisions: ClassVar[str] = ""  # the module with its decision endpoint
    pasted: ClassVar[str]  # the end of a path that people paste along; the SDK adds it itself
    path: ClassVar[str] = ""  # of an address that comes without one
    # Most requests and bytes of a batch job; no requests where there is no batch interface.
    batch_rows: ClassVar[int] = 0
    batch_bytes: ClassVar[int] = 0

    def __init__(self, api: ApiReward, base_url: str, key: Key, flags: str = "--rm") -> None:
        self.api = api
        self.model = (api.model or "").strip()
        self.base_url = base_url
        self._key = key
        hide_secret(key.value)  # a gateway may send it back in any part of a reply
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = Context(f"{self.name} ({self.model})", self.model, key.variable,
                                flags, self.name if api.base_url is None else "")  # fmt: skip
        self._options = [] if api.mode == "decision" else [*self.options()]
        if api.has_budget:  # what limits an answer is the last to be dropped on a guess
            self._options.sort(key=lambda option: option.name in LENGTH_OPTIONS)
        self._dropped: dict[str, str] = {}
        self._worked: Form | None = None  # the last form in which a call went through
        self._answer_room: int | None = None  # the most tokens that its context leaves for answers
        self._told_room = False
        self._reading: ReadingCheck | None = ReadingCheck()  # None once it has found something

    def __repr__(self) -> str:
        return f"Judge(name={self.name!r}, model={self.model!r}, base_url={self.base_url!r})"

    @classmethod
    def home(cls, environ: Mapping[str, str]) -> str:
        """The provider's own address."""
        return JUDGES[cls.name].url

    def sampling(self) -> float | None:
        """Temperature to ask for: 0, or 0.7 with several votes; None: the model's own."""
        if self.api.temperature is not None:
            return self.api.temperature
        return 0.0 if self.api.votes == 1 else 0.7

    @abstractmethod
    def options(self) -> Sequence[Option]:
        """The optional parameters of a text request, the most exotic first."""

    @abstractmethod
    def connect(self, key: str) -> Any:
        """Make the SDK's asynchronous client; imports the SDK."""

    @abstractmethod
    async def judge(self, client: Any, question: Question, form: Form, timeout: float) -> Reply:
        """Ask for a written verdict."""

    async def decide(self, client: Any, question: Question, timeout: float) -> Reply:
        """Ask a decision endpoint for the probability of each level."""
        raise NotImplementedError(f"{self.name} has no decision endpoint")

    def begin(self, tell: Callable[[str], None]) -> None:  # noqa: B027
        """Bring up what stands behind the address, where that is the run's own."""

    def end(self) -> None:  # noqa: B027
        """Take it down again."""

    async def models(self, client: Any) -> list[str] | None:
        """Names of the models that the key may use; None where nothing lists them."""
        return None

    async def submit(self, client: Any, rows: Rows, form: Form, name: str) -> str:
        """Hand in requests as one batch job under a name; returns the job's id."""
        raise NotImplementedError(f"{self.name} has no batch interface")

    async def find(self, client: Any, name: str, since: float, rows: int) -> list[str]:
        """Ids of the jobs that may be the one handed in under a name, so many rows, since then."""
        raise NotImplementedError(f"{self.name} has no batch interface")

    async def look(self, client: Any, job: str) -> Progress:
        """How far a batch job is."""
        raise NotImplementedError(f"{self.name} has no batch interface")

    async def results(self, client: Any, job: str) -> Results:
        """What a job that is over says of its rows; of some nothing, or twice."""
        raise NotImplementedError(f"{self.name} has no batch interface")

    async def disconnect(self, client: Any) -> None:
        """Close the SDK's client."""
        await client.close()

    @property
    def identity(self) -> str:
        """Everything but the question that may change an answer; no key, no dropped options."""
        where = urlsplit(self.base_url)
        known: dict[str, Any] = {
            "provider": self.name,
            "model": self.model,
            "endpoint": f"{where.netloc}{where.path}",
            "mode": self.api.mode,
        }
        if self.api.mode != "decision":
            known["temperature"] = self.sampling()
        return json.dumps(known, sort_keys=True)

    def dropped(self) -> Mapping[str, str]:
        """Parameters that the model did not take, each with the provider's words."""
        return dict(self._dropped)

    def adopt(self, dropped: Mapping[str, str]) -> None:
        """Leave out what an earlier command found to be refused."""
        self._dropped |= dropped

    def form(self, guessed: Collection[str] = ()) -> Form:
        """Options to send, each in its first form that is neither dropped nor guessed to be bad."""
        form: dict[str, str] = {}
        for option in self._options:
            for one in option.forms:
                if option.called(one) not in (*self._dropped, *guessed):
                    form.setdefault(option.name, one)
        return form

    @property
    def answer_room(self) -> int | None:
        """The most tokens of answer that the judge's context has room for; None where all fit."""
        return self._answer_room

    def fitted(self, question: Question) -> Question:
        """The question with no more tokens for the answer than the judge's context had room for."""
        room = min(question.max_tokens, self._answer_room or question.max_tokens)
        return replace(question, max_tokens=room)

    async def ask(self, question: Question, *, timeout: float) -> Reply:
        """Make one call (or a few, while parameters are dropped); raises only JudgeError.

        The reply is as it came: redaction before it is read could break its JSON.
        """

        return await self.within(timeout, lambda client: self._call(client, question, timeout))

    async def within(self, timeout: float, work: Callable[[Any], Awaitable[T]]) -> T:
        """Do something with the SDK's client, in so many seconds; raises only JudgeError."""
        failure: JudgeError | None = None
        try:
            # Importing an SDK takes seconds, which no call should pay for.
            client = self._connected()
            async with asyncio.timeout(timeout):
                return await work(client)
        except JudgeError as error:
            failure = self._cleaned(error)
        except UnlimitedCost:
            raise
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

    async def _call(self, client: Any, question: Question, timeout: float) -> Reply:
        guessed: list[str] = []
        told = too_long_words = ""
        question = self.fitted(question)
        while True:
            form = self.form(guessed)
            self.check_length(form, told)
            try:
                if self.api.mode == "decision":
                    reply = await self.decide(client, question, timeout)
                else:
                    reply = await self.judge(client, question, form, timeout)
            except JudgeError as error:
                if error.kind is not Failure.RETRYABLE:
                    self._settle(form, guessed, told)  # a refusal, too, is an answer to the form
                raise
            except Exception as error:
                symptoms = read_symptoms(error)
                if too_long(symptoms):
                    too_long_words = self._clean(symptoms.message, symptoms.longest)
                    question = self._shortened(question, form, symptoms)
                    continue
                if not about_the_form(symptoms):
                    raise
                told = self._clean(symptoms.message, symptoms.longest)
                if form != self.form(guessed):
                    continue  # another call has dropped something since this one was sent
                if (named := self._named(form, told, symptoms.param)) is not None:
                    self._drop(named.called(form[named.name]), told)
                elif self._worked is None and form:
                    first = next(option for option in self._options if option.name in form)
                    guessed.append(first.called(form[first.name]))
                else:
                    raise
            else:
                self._settle(form, guessed, told)
                if too_long_words:
                    self._learn_room(question.max_tokens, too_long_words)
                self._check_reading(question, reply.usage or Usage())
                return reply

    def check_length(self, form: Form, told: str = "") -> None:
        """Raise UnlimitedCost where there is a budget and nothing limits the answer any more."""
        lengths = {option.name for option in self._options} & LENGTH_OPTIONS
        if self.api.has_budget and not lengths <= form.keys():
            words = f" ({told})" if told else ""
            raise UnlimitedCost(
                f"{self._context.label} takes no limit on the tokens of an answer{words}. What a "
                "call costs has no upper bound then, and no budget can hold, so none was sent. "
                f"Take another {self._context.flags}_model or {self._context.flags}_base_url, or "
                "go without a budget."
            )

    def _shortened(self, question: Question, form: Form, symptoms: Symptoms) -> Question:
        """The question with fewer tokens for the answer; JudgeError where that does not help."""
        told = self._clean(symptoms.message, symptoms.longest)
        lengths = {option.name for option in self._options} & LENGTH_OPTIONS
        is_limited = lengths <= form.keys() and self.api.mode != "decision"
        room = fewer_tokens(question, told) if is_limited else None
        if room is None:
            words = f"{self._context.label} answered {symptoms.status}: {told}"
            advice = no_room(words, question.max_tokens if is_limited else None)
            raise JudgeError(Failure.REFUSED, "too_long", advice, status=symptoms.status)
        return replace(question, max_tokens=room)

    def _learn_room(self, room: int, words: str) -> None:
        """Ask for no more from now on, and say once which setting avoids the refused calls."""
        if not self._told_room:
            self._told_room = True
            logger.warning(
                "%s has no room for --rm_max_tokens %d next to the request, so it is asked for %d. "
                "Set --rm_max_tokens %d, or serve it with a longer context. It said: %s",
                self._context.label, self.api.max_tokens, room, room, words,
            )  # fmt: skip
        if room >= USUAL_ANSWER:
            self._answer_room = min(room, self._answer_room or room)

    def _check_reading(self, question: Question, usage: Usage) -> None:
        """Warn once about a judge that reads less than it is sent."""
        if self._reading is None or not usage.input:
            return
        if (problem := self._reading.find(question, usage.input)) is not None:
            self._reading = None
            logger.warning(
                "%s may read only a part of what it is sent: %s. Its verdicts are then about cut "
                "texts. Raise its context (Ollama: num_ctx, OLLAMA_CONTEXT_LENGTH), or lower "
                "--rm_max_response_chars.",
                self._context.label, problem,
            )  # fmt: skip

    def _named(self, form: Form, told: str, param: str | None) -> Option | None:
        """The option that a refusal names; once this form has worked, only outright."""
        sent = [option for option in self._options if option.name in form]
        by_param = [option for option in sent if param and option.place_in(param) is not None]
        if by_param or form == self._worked:
            return next(iter(by_param), None)
        # The form in use is a better clue than the option's other names.
        ways = ((option, form[option.name]) for option in sent)
        exact = [o for o, way in ways if "_" in way and place_of(told, way) is not None]
        named = exact or [option for option in sent if option.place_in(told) is not None]
        return min(named, key=lambda option: option.place_in(told) or 0, default=None)

    def _settle(self, form: Form, guessed: Sequence[str], told: str) -> None:
        """Keep in mind what has worked, and with it what had to be left out for that."""
        if self._worked is None:
            for called in guessed:
                self._drop(called, told)
        if form == self.form():
            self._worked = form

    def _drop(self, called: str, told: str) -> None:
        self._dropped[called] = told
        name = called.partition("=")[0]
        now = self.form().get(name)
        then = f"trying {now}" if now else "left out"
        logger.info("%s does not take %s, %s: %s", self._context.label, called, then, told)

    def _explain(self, error: Exception) -> JudgeError:
        symptoms = read_symptoms(error)
        symptoms = replace(symptoms, message=self._clean(symptoms.message, symptoms.longest))
        found = diagnose(symptoms, self._context, proven=self._worked is not None)
        if found.cause == "unknown":
            logger.warning("%s", found)
        return found

    def _cleaned(self, error: JudgeError) -> JudgeError:
        return JudgeError(
            error.kind, error.cause, self._clean(str(error)), status=error.status,
            retry_after=error.retry_after, usage=error.usage, reply=self._clean(error.reply),
        )  # fmt: skip

    def _clean(self, text: str, longest: int = MESSAGE_LIMIT) -> str:
        """A text in one line, without secrets and not too long."""
        return shorten(to_one_line(redact(text)), longest)


# --- reading replies ----------------------------------------------------------------------------


def refused(cause: str, told: str, usage: Usage | None) -> JudgeError:
    """The judge, or a filter before it, would not judge this text."""
    return JudgeError(Failure.REFUSED, cause, told, usage=usage, reply=told)


def row_error(word: str, told: str, status: int | None = None) -> JudgeError:
    """A row of a batch that brought no answer; `word` is expired, failed or cancelled.

    It is final, as waiting for another job has no point. What did not run is not billed.
    """
    filtered = about_the_filter(told)
    cause = "content_filter" if filtered else f"batch_{word}"
    return JudgeError(Failure.REFUSED, cause, told, status=status or 0)


def result_lines(content: bytes) -> Iterator[dict[str, Any]]:
    """The objects of a file that has one in each line; a line that is none is passed over.

    Lines end with a line feed only: an answer may hold U+2028 and its like as they are.
    """
    for line in content.split(b"\n"):
        try:
            read = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(read, dict):
            yield read


def read_row(read: Callable[[Any], Reply], body: Any) -> Reply | JudgeError:
    """An answer in the results of a batch, read as one that came directly is."""
    try:
        return read(body)
    except JudgeError as error:
        if error.kind is Failure.RETRYABLE:
            return JudgeError(Failure.REFUSED, "batch_failed", str(error))  # it may be billed
        return error


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

    Without the first of `input` or `output` that number is not reported. What `total` has more
    than both is thought that was billed and not counted as output.
    """

    input: tuple[str, ...]
    output: tuple[str, ...]
    cached: str
    total: str = ""


def read_usage(usage: Any, fields: TokenFields) -> Usage | None:
    """The tokens of a call, 0 where a number is not reported; None where neither is.

    None, too, where one of the numbers cannot be a count of tokens: then no other is believed.
    """
    names = {*fields.input, *fields.output, fields.cached, fields.total} - {""}
    reported = {name: attribute(usage, *name.split(".")) for name in names}
    counts = {name: count for name, count in reported.items() if count is not None}
    if not all(map(_is_count, counts.values())):
        return None
    read, written = (
        sum(int(counts.get(name, 0)) for name in side) if side[0] in counts else 0
        for side in (fields.input, fields.output)
    )
    if read and fields.total in counts:
        written = max(written, int(counts[fields.total]) - read)
    if not (read or written):
        return None
    return Usage(read, written, min(read, int(counts.get(fields.cached, 0))))


def _is_count(count: Any) -> bool:
    number = isinstance(count, int | float) and not isinstance(count, bool)
    return number and 0 <= count <= MOST_TOKENS


def vertex_address(location: str) -> str:
    """The address of Vertex AI in a region, as Google's SDKs have it."""
    place = location.strip()
    if place == "global":
        return "https://aiplatform.googleapis.com"
    if place in ("us", "eu"):
        return f"https://aiplatform.{place}.rep.googleapis.com"
    return f"https://{place}-aiplatform.googleapis.com"


def hush(name: str) -> None:
    """Keep an SDK's own warnings off the screen: what they tell is in our errors."""
    sdk_logger = logging.getLogger(name)
    if sdk_logger.level in {logging.NOTSET, logging.WARNING}:
        sdk_logger.setLevel(logging.ERROR)
