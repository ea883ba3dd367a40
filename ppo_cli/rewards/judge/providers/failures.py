"""One taxonomy for everything that goes wrong at a provider: fatal, retryable, refused.

`read_symptoms` reads any SDK's exception and error body without knowing the SDK; `diagnose`
turns what it found into a JudgeError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ppo_cli.errors import ppo
from ppo_cli.rewards.judge.calls import JudgeError
from ppo_cli.rewards.judge.prices import model_hint
from ppo_cli.rewards.judge.providers.lengths import about_length
from ppo_cli.rewards.remote.failures import (
    MESSAGE_LIMIT,
    Failure,
    is_html,
    parse_retry_after,
    parse_seconds,
    read_message,
)

_FILTER_CODES = {
    "content_filter", "content_policy_violation", "datainspectionfailed",
    "data_inspection_failed", "contentfilter", "contentfiltererror",
}  # fmt: skip
_FATAL_CODES = {
    "invalidapikey", "invalid_api_key", "api_key_invalid", "arrearage", "modelnotfound",
    "model_not_found", "model.notexist", "accessdenied", "accessdenied.unpurchased",
    "insufficient_quota", "exceeded_current_quota_error", "billing_hard_limit_reached",
    "billing_error", "account_deactivated",
    "authentication_error", "permission_error", "invalid_authentication",
}  # fmt: skip
_MONEY = re.compile(
    r"(?i)credit (balance|limit)|\b(insufficient|not enough|no|out of)\b.{0,20}?"
    r"(credits?|balance|funds)\b|insufficient[_ ]quota|arrear|overdue|\bbilling\b"
    r"|payment required|credits? (are |is )?(exhausted|used up|too low)"
)
_QUOTA = re.compile(r"(?i)\bquota")
_MODEL = re.compile(
    r"(?i)\bmodel\b.{0,80}?\b(not (exist|found)|does not exist|is (unknown|retired|discontinued"
    r"|decommissioned)|(has|have) been (retired|discontinued|decommissioned)|no longer available)"
    r"|\b(unknown|no such|invalid|not a valid) model\b(?! \w+ parameter)"
)
# A passing state, whoever says it; the second only where nothing speaks of the request.
_PACE = re.compile(r"(?i)per (second|minute|hour|day)|rate[ _-]?limit|throttl|too many requests")
_BUSY = re.compile(r"(?i)overload|temporar(y|il)|at capacity|\bbusy\b")
_AGAIN = re.compile(r"(?i)try(ing)? again|\bretry\b|\brate\b")
_REQUEST = re.compile(
    r"(?i)parameter|argument|support|not (enabled|allowed)|invalid|unknown|unrecogni[sz]ed"
    r"|unexpected|remove|rephrase|shorten|reduce|schema|\b(prompt|input|content|text|format|mode)\b"
)
_FILTERED = re.compile(r"(?i)blocked by content filtering|inappropriate content")
_RETRYABLE = {408, 409, 425, 429, 529}
_EXCERPT = 200  # of a page, or of a text that no provider wrote


@dataclass(frozen=True)
class Symptoms:
    """What an exception says.

    `what` is status, timeout, connection, credentials, body, request or unknown.
    """

    what: str
    message: str
    status: int | None = None
    codes: frozenset[str] = frozenset()
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    wait: float | None = None
    longest: int = MESSAGE_LIMIT


@dataclass(frozen=True)
class Context:
    """What a message may name: the provider, its model, the variable of the key, its flags.

    `kind` is the provider's type, or empty where an own address has models of its own.
    """

    label: str
    model: str
    key_variable: str
    flags: str
    kind: str = ""


def read_symptoms(error: BaseException) -> Symptoms:
    """Take an exception apart, whichever SDK raised it."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = str(getattr(error, "message", None) or error) or type(error).__name__
    status = read_status(error)
    if "APIResponseValidationError" in kinds:
        return Symptoms("body", text)
    if status is not None:
        found = _from_status(error, status, text)
        wordless = status < 300 and not found.codes
        return Symptoms("body", text) if wordless else found
    lost = _lost_connection(error)
    if lost is None and kinds & {"APITimeoutError", "TimeoutException", "TimeoutError"}:
        return Symptoms("timeout", text)
    module = type(error).__module__
    if module == "google.auth.exceptions" or "AWS credentials" in text:
        passing = "TransportError" in kinds or getattr(error, "retryable", False)
        return Symptoms("connection" if passing else "credentials", text)
    root = module.split(".")[0]
    undecoded = {"DecodingError", "ContentEncodingError"}
    if any(type(inner).__name__ in undecoded for inner in _chain(error)):
        return Symptoms("body", "its content-encoding is not that of the body")
    if "APIConnectionError" in kinds or isinstance(error, OSError):
        return Symptoms("connection", f"{lost or text} ({_root_cause(error)})")
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return Symptoms("body", f"the reply is not JSON: {text}")
    if root in {"aiohttp", "httpx", "httpx2", "httpcore"}:
        return Symptoms("connection", f"{type(error).__name__}: {text}")
    if isinstance(error, TypeError) and "unexpected keyword" in text:
        return Symptoms("request", text)
    if "ValidationError" in kinds:
        return Symptoms("body", text)
    return Symptoms("unknown", f"{type(error).__name__}: {text}")


def read_status(error: BaseException) -> int | None:
    """The HTTP status that an SDK's exception carries, under whichever name."""
    for name in ("status_code", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int) and 100 <= value < 600:
            return value
    return None


def _root_cause(error: BaseException) -> str:
    return type([*_chain(error)][-1]).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _lost_connection(error: BaseException) -> str | None:
    """What aiohttp says of a connection that failed: its adapter to httpx calls that a timeout."""
    for inner in _chain(error):
        kinds = {kind.__name__ for kind in type(inner).__mro__}
        if "ClientConnectionError" in kinds and "TimeoutError" not in kinds:
            return str(inner)
    return None


def _from_status(error: BaseException, status: int, text: str) -> Symptoms:
    body = _body(error)
    response = getattr(error, "response", None)
    headers = getattr(response, "headers", None) or getattr(error, "headers", None) or {}
    codes = {body.get("code"), body.get("type"), body.get("status"), getattr(error, "code", None)}
    details = [item for item in body.get("details") or () if isinstance(item, dict)]
    codes |= {item.get("reason") for item in details}
    told, longest = _words(error, text)
    param = body.get("param") or getattr(error, "param", None)
    delays = [parse_seconds(str(item.get("retryDelay", "")).removesuffix("s")) for item in details]
    return Symptoms(
        "status", told, status, frozenset(c.lower() for c in codes if isinstance(c, str)),
        param if isinstance(param, str) else None, {k.lower(): v for k, v in headers.items()},
        next((delay for delay in delays if delay is not None), None), longest,
    )  # fmt: skip


def _words(error: BaseException, text: str) -> tuple[str, int]:
    """What the body of a reply says, or else the exception, and how much of it is worth showing."""
    body = getattr(error, "body", None) or getattr(error, "details", None)
    if isinstance(body, str):  # one SDK hands over `error` alone, even where it is no object
        sent = getattr(getattr(error, "response", None), "text", None)
        body = _parsed(sent) or body
    for said in (body, text):
        if words := read_message(said):
            # Another SDK puts a plain text into an object of these two.
            wrapped = isinstance(said, dict) and said.keys() == {"message", "status"}
            inside = said.get("message") if isinstance(said, dict) else said
            plain = wrapped or isinstance(said, str) or is_html(inside)
            return words, _EXCERPT if plain else MESSAGE_LIMIT
    return text, MESSAGE_LIMIT


def _parsed(sent: Any) -> Any:
    try:
        return json.loads(sent)
    except (TypeError, ValueError, RecursionError):
        return None


def _body(error: BaseException) -> dict[str, Any]:
    """The error object of a reply: some SDKs hand over its inside, some the whole."""
    for name in ("body", "details"):
        found = getattr(error, name, None)
        if isinstance(found, list) and len(found) == 1:
            found = found[0]
        if isinstance(found, dict):
            inner = found.get("error")
            return inner if isinstance(inner, dict) else found
    return {}


def about_the_form(symptoms: Symptoms) -> bool:
    """Whether a refusal may be about a parameter, so that another form is worth a try."""
    if symptoms.what == "request":
        return True
    if symptoms.what != "status" or symptoms.status not in {400, 422}:
        return False
    known = (_filtered, _hopeless, too_long, _passing)
    return not any(is_so(symptoms) for is_so in known)


def about_the_filter(told: str) -> bool:
    """Whether a message says that a filter withheld the text or the answer."""
    return bool(_FILTERED.search(told)) or any(code in told.lower() for code in _FILTER_CODES)


def _filtered(symptoms: Symptoms) -> bool:
    return bool(symptoms.codes & _FILTER_CODES or _FILTERED.search(symptoms.message))


def _hopeless(symptoms: Symptoms) -> bool:
    text, status = symptoms.message, symptoms.status
    if symptoms.codes & _FATAL_CODES or status in {401, 402, 403, 404}:
        return True
    if status not in {400, 422}:
        return False
    spent = _QUOTA.search(text) and not _PACE.search(text)
    return bool(spent or _MONEY.search(text) or _MODEL.search(text))


def _passing(symptoms: Symptoms) -> bool:
    """Whether a refusal of the request speaks of load or limits, as some gateways' do."""
    text = symptoms.message
    if symptoms.status not in {400, 422} or symptoms.param:
        return False
    if _PACE.search(text) or _BUSY.search(text):
        return True
    return bool(_AGAIN.search(text)) and not _REQUEST.search(text)


def too_long(symptoms: Symptoms) -> bool:
    """Whether a refusal says that the request does not fit the judge's context."""
    if symptoms.what != "status" or _filtered(symptoms) or _hopeless(symptoms):
        return False
    return about_length(symptoms.status, symptoms.codes, symptoms.message)


def no_room(told: str, limit: int | None) -> str:
    """What to do about a request that does not fit; `limit` tokens were asked for last."""
    answer = f", even with only {limit} tokens for the answer" if limit else ""
    return (
        f"{_sentence(told)} The request does not fit the judge's context{answer}: a lower "
        "--rm_max_tokens does not help. Serve the judge with a longer context (vLLM "
        "--max-model-len, llama.cpp -c, Ollama num_ctx), choose another --rm_model, or shorten "
        "what it reads: --rm_max_response_chars, shorter prompts."
    )


def _sentence(words: str) -> str:
    stop = "" if words.rstrip().endswith((".", "!", "?", "…")) else "."
    return f"{words.rstrip()}{stop}"


def diagnose(symptoms: Symptoms, context: Context, *, proven: bool) -> JudgeError:
    """Say of which kind a failure is; `proven`: a call in this form has succeeded before."""
    if symptoms.what != "status":
        return _without_status(symptoms, context)
    status = symptoms.status or 0
    told = f"{context.label} answered {status}: {symptoms.message}"
    cause = f"http_{status}"
    if _filtered(symptoms):
        return _error(Failure.REFUSED, "content_filter", told, symptoms)
    if not _hopeless(symptoms):
        if status < 300:
            throttled = any("throttling" in code for code in symptoms.codes)
            cause = "http_429" if throttled else "business_error"
        if too_long(symptoms):
            return _error(Failure.REFUSED, "too_long", told, symptoms)
        if status in _RETRYABLE or status >= 500 or status < 300 or _passing(symptoms):
            return _error(Failure.RETRYABLE, cause, told, symptoms)
        if proven:
            return _error(Failure.REFUSED, "bad_request", told, symptoms)
    told = f"{_sentence(told)} {_hint(symptoms, context)}"
    return _error(Failure.FATAL, cause, told, symptoms)


def wrong_version(context: Context, status: int | None, served: str) -> JudgeError:
    """The error of an address that serves another version of the API only."""
    told = (
        f"{context.label} answered {status} at this address, but it answers at {served}. "
        f"Set {context.flags}_base_url {served}"
    )
    return JudgeError(Failure.FATAL, f"http_{status}", told, status=status)


def _without_status(symptoms: Symptoms, context: Context) -> JudgeError:
    if symptoms.what == "credentials":
        told = f"{context.label}: there are no credentials that work: {symptoms.message}"
        return _error(Failure.FATAL, "credentials", told, symptoms)
    causes = {"body": "bad_body", "request": "unknown"}
    words = {
        "timeout": "did not answer in time",
        "connection": "could not be reached",
        "body": "sent something that is not an answer",
    }
    what = words.get(symptoms.what, "failed in an unknown way")
    return _error(
        Failure.RETRYABLE, causes.get(symptoms.what, symptoms.what),
        f"{context.label} {what}: {symptoms.message}", symptoms,
    )  # fmt: skip


def _error(kind: Failure, cause: str, message: str, symptoms: Symptoms) -> JudgeError:
    wait = parse_retry_after(symptoms.headers)
    retryable = kind is Failure.RETRYABLE
    return JudgeError(
        kind, cause, message, status=symptoms.status,
        retry_after=(symptoms.wait if wait is None else wait) if retryable else None,
    )  # fmt: skip


def _hint(symptoms: Symptoms, context: Context) -> str:
    """What to look at when no later call will do better."""
    status, codes = symptoms.status, symptoms.codes
    words = f"{symptoms.message} {' '.join(codes)}"
    if status == 402 or _MONEY.search(words) or _QUOTA.search(words):
        return "Check the balance and the limits of the account."
    if status == 404 or _MODEL.search(symptoms.message) or any("model" in c for c in codes):
        near = model_hint(context.kind, context.model) if context.kind else ""
        return (
            f"The model may be retired or misspelt: check {context.flags}_model "
            f"(now '{context.model}'), and {context.flags}_base_url if you set it.{near} "
            f"`{ppo('reward models')}` lists what the key may use."
        )
    if status == 403:
        return (
            "The key may not use this model or this region: check the account, "
            f"{context.flags}_model (now '{context.model}') and {context.flags}_base_url."
        )
    if status == 401 or any("key" in code for code in codes):
        where = f"the key in {context.key_variable}" if context.key_variable else "the key"
        return f"Check {where}; keys belong to one provider, and often to one region."
    return f"Check {context.flags}_model (now '{context.model}') and {context.flags}_base_url."
