"""Turns the exception of any SDK into a JudgeError: by HTTP status and a table of error codes.

`read_error` reads exceptions without knowing the SDK; `classify` makes the JudgeError.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ppo_cli.errors import ppo
from ppo_cli.rewards.judge.calls import JudgeError
from ppo_cli.rewards.judge.prices import model_hint
from ppo_cli.rewards.judge.providers.lengths import is_about_length
from ppo_cli.rewards.remote.failures import (
    MESSAGE_LIMIT,
    Failure,
    is_html,
    kind_of_status,
    parse_retry_after,
    parse_seconds,
    read_message,
)

FILTERED = 451  # here: a filter withheld the text or the answer
UNREADABLE = 460  # here: the judge did not write the JSON that it was asked for
# Error codes of providers, by the HTTP status that means the same. A code is in this table where
# its provider sends it with another status, such as 400 for a wrong key.
_CODES = {
    401: "invalidapikey invalid_api_key api_key_invalid authentication_error "
    "invalid_authentication",
    402: "arrearage insufficient_quota exceeded_current_quota_error billing_hard_limit_reached "
    "billing_error",
    403: "accessdenied permission_error account_deactivated",
    404: "modelnotfound model_not_found model.notexist",
    413: "context_length_exceeded exceed_context_size_error contextwindowexceedederror",
    429: "throttling",
    FILTERED: "content_filter content_policy_violation datainspectionfailed contentfilter "
    "data_inspection_failed contentfiltererror",
    UNREADABLE: "json_validate_failed output_parse_failed",
}
_MEANINGS = {code: status for status, codes in _CODES.items() for code in codes.split()}
# Anthropic sends the first two as plain 400s, without a code; gateways do so with Groq's.
_MESSAGES = {
    "content filtering": FILTERED, "credit balance is too low": 402,
    "failed to generate json": UNREADABLE, "failed to validate json": UNREADABLE,
}  # fmt: skip
# Some gateways and local servers send a passing overload as a plain 400, without a code.
_OVERLOAD = re.compile(
    r"overload|too many (?:concurrent )?requests|rate limit|\bbusy\b|at (?:full |max\w* )?capacity"
    r"|temporarily unavailable|queue is full",
    re.I,
)
# Modules of their errors of connections; google-genai 2 and openai 2 have httpx2.
_HTTP_LIBRARIES = {"httpx", "httpx2", "httpcore", "httpcore2", "h11", "aiohttp"}
_EXCERPT = 200  # characters of a page, or of a text that did not come from the provider

What = Literal["status", "timeout", "connection", "credentials", "body", "request", "unknown"]


@dataclass(frozen=True)
class ErrorReport:
    """Facts read from an SDK's exception.

    `meaning` is the HTTP status, or the status that its error code means. `param` is the parameter
    that the reply blames, `retry_after` the wait that it asks for.
    """

    what: What
    message: str
    status: int | None = None
    meaning: int = 0
    param: str | None = None
    retry_after: float | None = None
    limit: int = MESSAGE_LIMIT  # characters of the message that are worth showing

    @property
    def is_too_long(self) -> bool:
        """Whether the request does not fit the judge's context."""
        if self.what != "status" or self.meaning in (FILTERED, UNREADABLE, 401, 402, 403, 404):
            return False
        return self.meaning == 413 or is_about_length(self.status, self.message)

    @property
    def may_blame_option(self) -> bool:
        """Whether the refusal may be about a parameter, so that other options are worth a try."""
        if self.what == "status":
            return self.meaning in (400, 422) and not self.is_too_long
        return self.what == "request"


@dataclass(frozen=True)
class Context:
    """What a message may name: the provider, its model, the variable of the key, its flags.

    `kind` is the provider's type, or empty where a custom address may serve other models.
    """

    label: str
    model: str
    key_variable: str
    flags: str
    kind: str = ""


# --- reading exceptions ---------------------------------------------------------------------------


def read_error(error: BaseException) -> ErrorReport:
    """Read an exception, whichever SDK raised it."""
    message = str(getattr(error, "message", None) or error) or type(error).__name__
    status = _read_status(error)
    if status is not None:
        return _read_reply(error, status, message)
    # Credentials of clouds; boto3 raises a plain RuntimeError (anthropic 0.79).
    if type(error).__module__ == "google.auth.exceptions" or "AWS credentials" in message:
        lost = any(isinstance(inner, OSError) for inner in _chain(error))
        may_pass = lost or getattr(error, "retryable", False)
        return ErrorReport("connection" if may_pass else "credentials", message)
    if isinstance(error, TypeError) and "unexpected keyword" in message:
        return ErrorReport("request", message)  # this version of the SDK does not know an option
    # SDKs wrap the errors of their HTTP library: the innermost one that is known decides.
    for inner in reversed([*_chain(error)]):
        if isinstance(inner, zlib.error):
            return ErrorReport("body", "its content-encoding is not that of the body")
        if isinstance(inner, ValueError):  # JSON or UTF-8 that cannot be decoded
            return ErrorReport("body", message)
        if isinstance(inner, TimeoutError):  # an OSError, too
            return ErrorReport("timeout", message)
        if isinstance(inner, OSError) or type(inner).__module__.split(".")[0] in _HTTP_LIBRARIES:
            return ErrorReport("connection", f"{str(inner) or message} ({type(inner).__name__})")
    return ErrorReport("unknown", f"{type(error).__name__}: {message}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _read_status(error: BaseException) -> int | None:
    """Return the HTTP status that an SDK's exception carries under either name."""
    for name in ("status_code", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int) and 100 <= value < 600:
            return value
    return None


def _read_reply(error: BaseException, status: int, text: str) -> ErrorReport:
    """Read the exception of a reply with an error status, or with an error in its body."""
    body = _error_object(error)
    details = [item for item in body.get("details") or () if isinstance(item, dict)]
    codes = [body.get("code"), body.get("type"), body.get("status"), getattr(error, "code", None)]
    codes += [item.get("reason") for item in details]
    names = [code.lower() for code in codes if isinstance(code, str)]
    # DashScope's codes have parts: Throttling.RateQuota, AccessDenied.Unpurchased.
    names += [name.partition(".")[0] for name in names]
    meanings = [_MEANINGS[name] for name in names if name in _MEANINGS]
    message, limit = _read_words(error, text)
    if status < 400:  # DashScope sends errors with status 200
        if not names:
            return ErrorReport("body", text)
    elif not meanings:
        meanings = [m for part, m in _MESSAGES.items() if part in message.lower()]
        if status == 400 and not meanings and _OVERLOAD.search(message):
            meanings = [503]
    response = getattr(error, "response", None)
    headers = getattr(response, "headers", None) or getattr(error, "headers", None) or {}
    wait = parse_retry_after({name.lower(): value for name, value in headers.items()})
    if wait is None:  # Gemini says it in the body
        delays = (str(item.get("retryDelay", "")).removesuffix("s") for item in details)
        wait = next((s for s in map(parse_seconds, delays) if s is not None), None)
    param = body.get("param") or getattr(error, "param", None)
    return ErrorReport(
        "status", message, status, meanings[0] if meanings else status,
        param if isinstance(param, str) else None, wait, limit,
    )  # fmt: skip


def _read_words(error: BaseException, text: str) -> tuple[str, int]:
    """Return the message of a reply or of the exception, and how much of it is worth showing."""
    body = getattr(error, "body", None) or getattr(error, "details", None)
    if isinstance(body, str):  # openai passes the `error` of a body alone, even if it is a string
        body = _parse_json(getattr(getattr(error, "response", None), "text", None)) or body
    for source in (body, text):
        if message := read_message(source):
            # google-genai wraps a plain text in an object of these two keys.
            wrapped = isinstance(source, dict) and source.keys() == {"message", "status"}
            inside = source.get("message") if isinstance(source, dict) else source
            is_plain = wrapped or isinstance(source, str) or is_html(inside)
            return message, _EXCERPT if is_plain else MESSAGE_LIMIT
    return text, MESSAGE_LIMIT


def _parse_json(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None


def _error_object(error: BaseException) -> Mapping[str, Any]:
    """Return the error object of a reply: some SDKs pass on its inside, some the whole."""
    for name in ("body", "details"):
        value = getattr(error, name, None)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, dict):
            inner = value.get("error")
            return inner if isinstance(inner, dict) else value
    return {}


# --- from a report to an error --------------------------------------------------------------------


# Cause and message of errors without an HTTP status.
_WITHOUT_STATUS = defaultdict(
    lambda: ("unknown", "failed in an unknown way"),
    timeout=("timeout", "did not answer in time"),
    connection=("connection", "could not be reached"),
    body=("bad_body", "sent something that is not an answer"),
    credentials=("credentials", "has no credentials that work"),
)


def classify(report: ErrorReport, context: Context, *, proven: bool) -> JudgeError:
    """Return the error of a failed call; `proven`: a call with these options succeeded before."""
    if report.what != "status":
        cause, problem = _WITHOUT_STATUS[report.what]
        kind = Failure.FATAL if report.what == "credentials" else Failure.RETRYABLE
        return JudgeError(kind, cause, f"{context.label} {problem}: {report.message}")
    status = report.status or 0
    cause = f"http_{status}"
    message = f"{context.label} answered {status}: {report.message}"
    if report.meaning == UNREADABLE:  # without a status, since the answer may be billed
        return JudgeError(Failure.UNPARSED, "form", message)
    kind = kind_of_status(report.meaning)
    if report.meaning == FILTERED:
        kind, cause = Failure.REFUSED, "content_filter"
    elif report.is_too_long:
        kind, cause = Failure.REFUSED, "too_long"
    elif status < 300 and (kind is Failure.RETRYABLE or report.meaning == status):
        # An error object in a reply with status 200.
        kind, cause = Failure.RETRYABLE, "http_429" if report.meaning == 429 else "business_error"
    elif kind is Failure.REFUSED:
        # Before any success the request itself is wrong, after it this text is.
        kind, cause = (Failure.REFUSED, "bad_request") if proven else (Failure.FATAL, cause)
    if kind is Failure.FATAL:
        message = f"{_end_sentence(message)} {_hint(report, context)}"
    wait = report.retry_after if kind is Failure.RETRYABLE else None
    return JudgeError(kind, cause, message, status=status, retry_after=wait)


def is_about_filter(message: str) -> bool:
    """Whether a message says that a filter withheld the text or the answer."""
    lowered = message.lower()
    codes = [*_CODES[FILTERED].split(), *(m for m, s in _MESSAGES.items() if s == FILTERED)]
    return any(code in lowered for code in codes)


def too_long_message(message: str, limit: int | None) -> str:
    """Return the provider's message and what to do: the request does not fit the judge's context.

    `limit` is the last number of tokens tried for the answer; None if it was not limited.
    """
    answer = f", even with only {limit} tokens for the answer" if limit else ""
    return (
        f"{_end_sentence(message)} The request does not fit the judge's context{answer}: a lower "
        "--rm_max_tokens does not help. Serve the judge with a longer context (vLLM "
        "--max-model-len, llama.cpp -c, Ollama num_ctx), choose another --rm_model, or shorten "
        "what it reads: --rm_max_response_chars, shorter prompts."
    )


def _end_sentence(text: str) -> str:
    stop = "" if text.rstrip().endswith((".", "!", "?", "…")) else "."
    return f"{text.rstrip()}{stop}"


def _hint(report: ErrorReport, context: Context) -> str:
    """Return what to check when no later call will succeed."""
    flags = context.flags
    if report.meaning == 402:
        return "Check the balance and the limits of the account."
    if report.meaning == 404:
        near = model_hint(context.kind, context.model) if context.kind else ""
        return (
            f"The model may be retired or misspelt: check {flags}model (now '{context.model}'), "
            f"and {flags}base_url if you set it.{near} `{ppo('reward models')}` lists the models "
            "of this key."
        )
    if report.meaning == 403:
        return (
            "The key may not use this model or this region: check the account, "
            f"{flags}model (now '{context.model}') and {flags}base_url."
        )
    if report.meaning == 401:
        key = f"the key in {context.key_variable}" if context.key_variable else "the key"
        return f"Check {key}; keys belong to one provider, and often to one region."
    return f"Check {flags}model (now '{context.model}') and {flags}base_url."
