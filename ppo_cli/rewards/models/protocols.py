"""The two protocols of served reward models: how a request is written, and how its reply is read.

vLLM's `/classify` and the `get_reward` of OpenRLHF's servers. Both ask for raw scores, and neither
lets the server cut a sample. Control tokens in the text of a response are broken up.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ppo_cli.config.schema.reward import ModelReward
from ppo_cli.errors import RewardError, shorten
from ppo_cli.records import Message, Prompt
from ppo_cli.rewards.base import MAX_MAGNITUDE
from ppo_cli.rewards.control_tokens import break_control_tokens
from ppo_cli.rewards.models.base import TooLong, get_messages
from ppo_cli.rewards.models.formats import (
    PLACE,
    ControlToken,
    question_of,
    select_messages,
    served_format,
)
from ppo_cli.rewards.remote.failures import Failure, RemoteError, is_html, read_message
from ppo_cli.secrets.redact import redact


@dataclass(frozen=True)
class Sample:
    """One rollout as it is sent.

    `messages` hold the conversation without the response. `ids` or `text` hold prompt and response
    where the template was applied here. The server gets `rendered` (the prompt) and `label` too.
    """

    messages: tuple[Message, ...]
    response: str
    ids: tuple[int, ...] = ()
    text: str = ""
    add_special_tokens: bool = False
    rendered: str = ""
    label: Any = None


@dataclass(frozen=True)
class Row:
    """The server's answer for one sample: a finite score, or why there is none.

    `outputs` has every row of the model's head, where the server shows them.
    """

    value: float | None
    failure: str = ""
    outputs: tuple[float, ...] = ()


EXCERPT = 200  # characters of a reply that a message shows


def read_json(body: str) -> Any:
    """Parse a reply; raises RemoteError with what came instead of JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        what = "a web page" if is_html(body) else "something that is not JSON"
        excerpt = redact(read_message(body))[:EXCERPT]
        message = f"the reply is {what}: {excerpt}" if excerpt else "the reply is empty"
        raise RemoteError(Failure.RETRYABLE, "bad_body", message) from None


def unreadable(message: str) -> RemoteError:
    """Return the error for a JSON reply that holds no scores."""
    return RemoteError(Failure.UNPARSED, "bad_body", message)


def as_list(value: Any, count: int, where: str) -> list[Any]:
    """Return a list of exactly `count` items, or raise RemoteError."""
    # A reply of another length cannot be matched to the samples.
    if not isinstance(value, list):
        raise unreadable(f"{where} should be a list, but is {shorten_repr(value)}")
    if len(value) != count:
        raise unreadable(f"{where} has {len(value)} items for {count} samples")
    return value


def sort_by_index(value: Any, count: int, where: str) -> list[dict[str, Any]]:
    """Return the items of a list sorted by their `index`: 0 to count-1, each exactly once."""
    items = as_list(value, count, where)
    # Servers may answer out of order.
    placed: dict[int, dict[str, Any]] = {}
    for item in items:
        index = item.get("index") if isinstance(item, dict) else None
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
            raise unreadable(f"{where} has an item without a usable index: {shorten_repr(item)}")
        placed[index] = item
    if len(placed) != count:
        raise unreadable(f"{where} has several items of one index")
    return [placed[index] for index in range(count)]


def read_score(value: Any) -> Row:
    """Return the row of one score."""
    number = finite_float(value)
    if number is None:
        return Row(None, f"no number: the server's score is {shorten_repr(value)}")
    return Row(number, outputs=(number,))


def read_outputs(values: Any, weights: Sequence[float]) -> Row:
    """Return the row of a head's outputs: one output, or the weighted sum of several."""
    if not isinstance(values, list) or not values:
        return Row(None, f"no number: the server's outputs are {shorten_repr(values)}")
    # A wrong number of weights is a wrong setting: stop instead of failing samples.
    if len(values) != max(1, len(weights)):
        raise RewardError(
            f"The served reward model gives {len(values)} outputs, and reward.model.outputs has "
            f"{len(weights)} weights. Give one weight for each (for good/bad classes: [-1, 1])."
        )
    # A head with one output needs no weights.
    if not weights:
        return read_score(values[0])
    numbers = tuple(number for value in values if (number := finite_float(value)) is not None)
    if len(numbers) < len(values):
        return Row(None, f"no number: the server's outputs are {shorten_repr(values)}")
    total = sum(weight * number for weight, number in zip(weights, numbers, strict=True))
    # Finite numbers may still add up to more than a float holds.
    return Row(total, outputs=numbers) if math.isfinite(total) else read_score(total)


def finite_float(value: Any) -> float | None:
    """Return a JSON number as a float, None for anything else."""
    # JSON true is an int in Python, and is not a score.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= MAX_MAGNITUDE else None


def shorten_repr(value: Any) -> str:
    """Return a short form of a value for a message."""
    return shorten(repr(value), EXCERPT)


# A template may write the beginning-of-sequence token itself; the server must not add another.
_BOS = re.compile(r"\s*(?:<s>|<bos>|<\|begin_of_text\|>|<\|startoftext\|>|<[|｜]begin▁of▁sentence)")


def begins_with_bos(text: str) -> bool:
    """Whether a text begins with a beginning-of-sequence token."""
    return bool(_BOS.match(text))


class UnfitError(Exception):
    """A sample that cannot be sent; the message gives the reason."""


class Writer:
    """Makes samples for one protocol, and counts what it had to change."""

    def __init__(self, settings: ModelReward, adapter: str) -> None:
        self._adapter = adapter
        self._settings = settings
        self._format = None if settings.tokenizer is None else served_format(settings)
        self._neutralised = 0

    def pop_counts(self) -> dict[str, int]:
        """Return and reset the counts of responses with control tokens and of shortened prompts."""
        counts = {"neutralised": self._neutralised, "prompts_cut": 0}
        self._neutralised = 0
        if self._format is not None:
            counts["prompts_cut"], self._format.prompts_cut = self._format.prompts_cut, 0
        return counts

    @property
    def chat(self) -> bool:
        """Whether the server applies the chat template (the chat form of vLLM)."""
        return self._adapter == "vllm" and self._format is None and self._settings.template is None

    def list_remarks(self) -> list[str]:
        """Return what the user should know about the text that the server gets."""
        if self._adapter != "openrlhf":
            return []
        remarks = []
        if self._format is None and self._settings.template is None:
            remarks.append(
                "The reward model's server gets the policy's own prompt and response as text, "
                "without an end token; set reward.model.tokenizer to the reward model's tokenizer "
                "to have its chat template."
            )
        if self._settings.max_length is None or self._format is None:
            remarks.append(
                "Servers of this protocol may cut long samples silently; with "
                "reward.model.max_length and reward.model.tokenizer such samples fail instead."
            )
        return remarks

    def write(self, prompt: Prompt, response: str) -> Sample:
        """Return one sample; raises UnfitError."""
        messages = select_messages(self._settings, get_messages(prompt))
        # vLLM takes token ids: nothing has to be escaped.
        if self._format is not None and self._adapter == "vllm":
            try:
                encoded = self._format.encode(messages, response)
            except (TooLong, ControlToken) as error:
                what = "too long" if isinstance(error, TooLong) else "control token"
                raise UnfitError(f"{what}: {error}") from None
            return Sample(messages, response, ids=encoded.ids)
        # The other forms send text, so control tokens in the response are broken up.
        plain, replaced = break_control_tokens(response)
        self._neutralised += replaced > 0
        question = question_of(messages)
        text = "" if self.chat else self._render_text(prompt, messages, question, plain)
        return Sample(
            messages, plain, text=text, add_special_tokens=not begins_with_bos(text),
            rendered=prompt.rendered, label=_to_json_value(prompt.ground_truth),
        )  # fmt: skip

    def _render_text(
        self, prompt: Prompt, messages: Sequence[Message], question: str, response: str
    ) -> str:
        """Return prompt and response as one text; raises UnfitError if it is too long."""
        # Three forms, the most exact first: the tokenizer's template, the user's template, and the
        # policy's own text.
        if self._format is not None:
            tokens, limit = len(self._format.ids_of(messages, response)), self._settings.max_length
            if limit is not None and tokens > limit:
                raise UnfitError(f"too long: {tokens} tokens, and {limit} are allowed")
            return self._format.render(messages, response)
        if self._settings.template is not None:
            values = {"prompt": question, "response": response}
            return PLACE.sub(lambda place: values[place[1]], self._settings.template)
        return prompt.rendered + response


def _to_json_value(value: Any) -> Any:
    """Return a value that JSON can hold: itself, or its text."""
    # A ground truth that is not JSON (NaN, a date) is sent as its text.
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value


# Names of vLLM's switch for raw scores, newest first. vLLM ignores names that it does not know.
RAW_SWITCHES = ("use_activation", "activation", "softmax")


class Vllm:
    """`POST /classify` with token ids or text, or in the chat form with one sample per request."""

    def __init__(self, settings: ModelReward, *, chat: bool) -> None:
        self.url = endpoint(
            settings.path or "", "/classify", drop=("/v1", "/v1/models", "/pooling")
        )
        self.models_url = endpoint(self.url, "/v1/models", drop=("/classify", "/v1"))
        self.model = settings.model_name
        self.may_batch = not chat
        self.switch = (RAW_SWITCHES[0], False)  # name, and whether an activation is wanted
        self._weights = settings.outputs
        self._chat = chat

    def write(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the body of a request for raw scores."""
        switch, on = self.switch
        body: dict[str, Any] = {switch: on}
        if self.model is not None:
            body["model"] = self.model
        if self._chat:
            (sample,) = samples
            answer = {"role": "assistant", "content": sample.response}
            return {**body, "messages": [*map(dict, sample.messages), answer]}
        body["input"] = [list(sample.ids) or sample.text for sample in samples]
        return {**body, "add_special_tokens": samples[0].add_special_tokens}

    def read(self, reply: Any, count: int) -> list[Row]:
        """Return `data[i].probs`, which are raw outputs when no activation is applied."""
        data = reply.get("data") if isinstance(reply, dict) else None
        return [
            read_outputs(item.get("probs"), self._weights)
            for item in sort_by_index(data, count, "data")
        ]


class OpenRlhf:
    """`POST URL {"query", "prompts", "labels"}`, answered with "rewards", or with "scores"."""

    may_batch = True

    def __init__(self, settings: ModelReward) -> None:
        path = settings.path or ""
        # An address without a path is the server's; a full one is used as it is.
        bare = urlsplit(path).path in {"", "/"}
        self.url = endpoint(path, "/get_reward") if bare else path

    def write(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the body of a request."""
        return {
            "query": [sample.text for sample in samples],
            "prompts": [sample.rendered for sample in samples],
            "labels": [sample.label for sample in samples],
        }

    def read(self, reply: Any, count: int) -> list[Row]:
        """Return a row for each sample: its reward, or why it is not a number.

        Some servers wrap each number in a list. RemoteError if there are not `count` of them.
        """
        if not isinstance(reply, dict):
            raise unreadable('the reply is not an object with "rewards"')
        # OpenRLHF renamed the key.
        name = next((key for key in ("rewards", "scores") if reply.get(key) is not None), None)
        if name is None:
            raise unreadable(f'no "rewards" among {", ".join(map(str, reply)) or "nothing"}')
        values = reply[name]
        if count == 1 and not isinstance(values, list):
            values = [values]
        return [read_score(_unwrap(value)) for value in as_list(values, count, name)]


Protocol = Vllm | OpenRlhf


def endpoint(address: str, path: str, drop: tuple[str, ...] = ()) -> str:
    """Append `path` to an address that does not end in it; endings in `drop` are removed first."""
    parts = urlsplit(address)
    # Users give the server's address, its /v1 or the full endpoint: all become the endpoint.
    base = parts.path.rstrip("/")
    for ending in (*drop, path):
        base = base.removesuffix(ending)
    return urlunsplit((parts.scheme, parts.netloc, base.rstrip("/") + path, parts.query, ""))


def _unwrap(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value
