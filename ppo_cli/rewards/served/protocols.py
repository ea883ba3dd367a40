"""The three protocols: how a request is written for some samples, and how its reply is read.

vLLM's `/classify`, the `get_reward` of OpenRLHF's servers, and `/rerank` as the servers of text
embeddings have it. Each asks for raw scores, and none lets the server cut a sample. In text, a
control token of a response is broken up.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ppo_cli.config.schema.reward import ModelReward
from ppo_cli.errors import RewardError, shorten
from ppo_cli.records import Message, Prompt
from ppo_cli.redact import redact
from ppo_cli.rewards.base import MAX_MAGNITUDE
from ppo_cli.rewards.models.base import TooLong, get_messages
from ppo_cli.rewards.models.formats import (
    PLACE,
    ControlToken,
    question_of,
    select_messages,
    served_format,
)
from ppo_cli.rewards.remote.failures import is_html, read_message


@dataclass(frozen=True)
class Sample:
    """One rollout as it goes on the wire.

    `messages` hold the conversation without the response, `question` the same as plain text.
    `ids` or `text` hold the whole sample where it was put together here. Samples of one `group`
    may share a request.
    """

    messages: tuple[Message, ...]
    response: str
    question: str
    ids: tuple[int, ...] = ()
    text: str = ""
    add_special_tokens: bool = False
    rendered: str = ""
    label: Any = None
    group: str = ""


@dataclass(frozen=True)
class Row:
    """What the server said of one sample: a finite score, or why there is none.

    `outputs` has every row of the model's head, where the server shows them.
    """

    value: float | None
    failure: str = ""
    outputs: tuple[float, ...] = ()


class Kind(Enum):
    """The four ways in which a request goes wrong."""

    HOPELESS = "hopeless"  # no later request will do better: address, key, model
    DOWN = "down"  # transport, overload, a page of a proxy: the same request may pass later
    REJECTED = "rejected"  # the server will not take this request, maybe for one of its samples
    UNREADABLE = "unreadable"  # it answered in JSON, but not with scores for these samples


class ServerFault(Exception):
    """One request without scores; `cause` is a short word such as `timeout` or `http_503`."""

    def __init__(
        self, kind: Kind, cause: str, words: str, *, retry_after: float | None = None
    ) -> None:
        super().__init__(f"{cause}: {words}")
        self.kind = kind
        self.cause = cause
        self.words = words
        self.retry_after = retry_after


EXCERPT = 200


def read_json(body: str) -> Any:
    """Parse a reply; raises ServerFault with what came instead of JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        what = "a web page" if is_html(body) else "something that is not JSON"
        said = redact(read_message(body))[:EXCERPT]
        words = f"the reply is {what}: {said}" if said else "the reply is empty"
        raise ServerFault(Kind.DOWN, "bad_body", words) from None


def unreadable(words: str) -> ServerFault:
    """Build the fault of a JSON reply that holds no scores."""
    return ServerFault(Kind.UNREADABLE, "bad_body", words)


def as_list(value: Any, count: int, where: str) -> list[Any]:
    """Return a list of exactly `count` items, or raise ServerFault."""
    if not isinstance(value, list):
        raise unreadable(f"{where} should be a list, but is {shown(value)}")
    if len(value) != count:
        raise unreadable(f"{where} has {len(value)} items for {count} samples")
    return value


def in_order(value: Any, count: int, where: str) -> list[dict[str, Any]]:
    """Items of `value` by their `index`, each of 0 … count-1 exactly once."""
    items = as_list(value, count, where)
    placed: dict[int, dict[str, Any]] = {}
    for item in items:
        index = item.get("index") if isinstance(item, dict) else None
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
            raise unreadable(f"{where} has an item without a usable index: {shown(item)}")
        placed[index] = item
    if len(placed) != count:
        raise unreadable(f"{where} has several items of one index")
    return [placed[index] for index in range(count)]


def row_of(value: Any) -> Row:
    """Read one score."""
    number = finite(value)
    if number is None:
        return Row(None, f"no number: the server's score is {shown(value)}")
    return Row(number, outputs=(number,))


def weighed(values: Any, weights: Sequence[float]) -> Row:
    """Read one score off a head with one row, or with several and a weight for each."""
    if not isinstance(values, list) or not values:
        return Row(None, f"no number: the server's outputs are {shown(values)}")
    if len(values) != max(1, len(weights)):
        raise RewardError(
            f"The served reward model gives {len(values)} outputs, and reward.model.outputs has "
            f"{len(weights)} weights. Give one weight for each (for good/bad classes: [-1, 1])."
        )
    if not weights:
        return row_of(values[0])
    kept = tuple(number for value in values if (number := finite(value)) is not None)
    if len(kept) < len(values):
        return Row(None, f"no number: the server's outputs are {shown(values)}")
    total = sum(weight * number for weight, number in zip(weights, kept, strict=True))
    return Row(total, outputs=kept) if math.isfinite(total) else row_of(total)


def finite(value: Any) -> float | None:
    """Return a JSON number as a float, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= MAX_MAGNITUDE else None


def shown(value: Any) -> str:
    """A short form of a value for a message."""
    return shorten(repr(value), EXCERPT)


_NAMES = r"s|bos|eos|pad|unk|mask|sep|cls|sop|eop|start_of_turn|end_of_turn|end_of_text|turn"
_CONTROL = re.compile(
    r"<(?="
    r"[|｜][^<>\s]{0,60}>"  # <|im_end|>, <｜User｜>, <|turn>
    r"|[^<>\s|｜]{1,40}[|｜]>"  # <turn|>
    rf"|/?(?:{_NAMES})>"
    r"|</?SYS>>"
    r"|(?:extra_id_|unused|reserved_special_token_)\d+>"
    r")"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]"
    r"|(?:CLS|SEP|PAD|MASK|UNK|BOS|EOS|gMASK|unused\d+)\])",
    re.IGNORECASE,
)
_BOS = re.compile(r"\s*(?:<s>|<bos>|<\|begin_of_text\|>|<\|startoftext\|>|<[|｜]begin▁of▁sentence)")


def neutralise(text: str) -> tuple[str, int]:
    """Return the text with control tokens made harmless, and how many there were."""
    return _CONTROL.subn(lambda found: f"{found.group()} ", text)


def begins_with_bos(text: str) -> bool:
    """Whether a text carries its own beginning-of-sequence token."""
    return bool(_BOS.match(text))


class UnfitError(Exception):
    """A sample that cannot be sent; the message says why."""


class Writer:
    """Writes samples for one protocol, and counts what it had to change."""

    def __init__(self, settings: ModelReward, adapter: str) -> None:
        self._adapter = adapter
        self._settings = settings
        self._format = None if settings.tokenizer is None else served_format(settings)
        self._neutralised = 0

    def take_counts(self) -> dict[str, int]:
        """Responses with control tokens, and prompts that lost their beginning, since last time."""
        counts = {"neutralised": self._neutralised, "prompts_cut": 0}
        self._neutralised = 0
        if self._format is not None:
            counts["prompts_cut"], self._format.prompts_cut = self._format.prompts_cut, 0
        return counts

    @property
    def chat(self) -> bool:
        """Whether the server puts the conversation together (the chat form of vLLM)."""
        return self._adapter == "vllm" and self._format is None and self._settings.template is None

    def remarks(self) -> list[str]:
        """What the user should know about the text that the server gets."""
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
                "Servers of this protocol may cut long samples without a word; with "
                "reward.model.max_length and reward.model.tokenizer those count as failed."
            )
        return remarks

    def write(self, prompt: Prompt, response: str) -> Sample:
        """Write one sample; raises UnfitError."""
        messages = select_messages(self._settings, get_messages(prompt))
        if self._format is not None and self._adapter == "vllm":
            try:
                encoded = self._format.encode(messages, response)
            except (TooLong, ControlToken) as error:
                what = "too long" if isinstance(error, TooLong) else "control token"
                raise UnfitError(f"{what}: {error}") from None
            return Sample(messages, response, "", ids=encoded.ids)
        plain, found = neutralise(response)
        self._neutralised += found > 0
        question = question_of(messages)
        if self._adapter == "rerank":
            return Sample(messages, plain, question, group=prompt.uid)
        text = "" if self.chat else self._text(prompt, messages, question, plain)
        return Sample(
            messages, plain, question, text=text, add_special_tokens=not begins_with_bos(text),
            rendered=prompt.rendered, label=_plain_json(prompt.ground_truth),
        )  # fmt: skip

    def _text(
        self, prompt: Prompt, messages: Sequence[Message], question: str, response: str
    ) -> str:
        if self._format is not None:
            tokens, most = len(self._format.ids_of(messages, response)), self._settings.max_length
            if most is not None and tokens > most:
                raise UnfitError(f"too long: {tokens} tokens, and {most} are allowed")
            return self._format.render(messages, response)
        if self._settings.template is not None:
            values = {"prompt": question, "response": response}
            return PLACE.sub(lambda place: values[place[1]], self._settings.template)
        return prompt.rendered + response


def _plain_json(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value


# What vLLM's switch for raw scores is called, newest first; unknown names are not refused.
RAW_SWITCHES = ("use_activation", "activation", "softmax")


class Vllm:
    """`POST /classify`: token ids or text made here, or else the chat form, a sample a request."""

    def __init__(self, settings: ModelReward, *, chat: bool) -> None:
        self.url = endpoint(
            settings.path or "", "/classify", drop=("/v1", "/v1/models", "/pooling")
        )
        self.models_url = endpoint(self.url, "/v1/models", drop=("/classify", "/v1"))
        self.model = settings.model_name
        self.may_batch = not chat
        self.switch = (RAW_SWITCHES[0], False)  # of the activation, and whether it is asked for
        self._weights = settings.outputs
        self._chat = chat

    def write(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Build the body of a request for raw scores."""
        switch, on = self.switch
        body: dict[str, Any] = {switch: on}
        if self.model is not None:
            body["model"] = self.model
        if self._chat:
            (sample,) = samples
            said = {"role": "assistant", "content": sample.response}
            return {**body, "messages": [*map(dict, sample.messages), said]}
        body["input"] = [list(sample.ids) or sample.text for sample in samples]
        return {**body, "add_special_tokens": samples[0].add_special_tokens}

    def read(self, reply: Any, count: int) -> list[Row]:
        """Read `data[i].probs`, which holds raw outputs when no activation is asked for."""
        data = reply.get("data") if isinstance(reply, dict) else None
        return [weighed(item.get("probs"), self._weights) for item in in_order(data, count, "data")]


class OpenRlhf:
    """`POST URL {"query", "prompts", "labels"}`, answered with "rewards", or with "scores"."""

    may_batch = True

    def __init__(self, settings: ModelReward) -> None:
        path = settings.path or ""
        bare = urlsplit(path).path in {"", "/"}
        self.url = endpoint(path, "/get_reward") if bare else path

    def write(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Build the body of a request."""
        return {
            "query": [sample.text for sample in samples],
            "prompts": [sample.rendered for sample in samples],
            "labels": [sample.label for sample in samples],
        }

    def read(self, reply: Any, count: int) -> list[Row]:
        """Read the list of rewards; some servers wrap each number in a list of its own."""
        if not isinstance(reply, dict):
            raise unreadable('the reply is not an object with "rewards"')
        name = next((key for key in ("rewards", "scores") if reply.get(key) is not None), None)
        if name is None:
            raise unreadable(f'no "rewards" among {", ".join(map(str, reply)) or "nothing"}')
        values = reply[name]
        if count == 1 and not isinstance(values, list):
            values = [values]
        return [row_of(_unwrapped(value)) for value in as_list(values, count, name)]


class Rerank:
    """`POST /rerank {"query", "texts"}`: the responses to one prompt in one request."""

    may_batch = True

    def __init__(self, settings: ModelReward) -> None:
        self.url = endpoint(settings.path or "", "/rerank")

    def write(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Build the body of a request; all samples are of one prompt."""
        return {
            "query": samples[0].question,
            "texts": [sample.response for sample in samples],
            "raw_scores": True,
            "truncate": False,
        }

    def read(self, reply: Any, count: int) -> list[Row]:
        """Read the ranks, which come with the best first."""
        return [row_of(item.get("score")) for item in in_order(reply, count, "the reply")]


Wire = Vllm | OpenRlhf | Rerank


def endpoint(address: str, path: str, drop: tuple[str, ...] = ()) -> str:
    """Put `path` behind an address, unless it stands there; endings in `drop` go first."""
    parts = urlsplit(address)
    base = parts.path.rstrip("/")
    for ending in (*drop, path):
        base = base.removesuffix(ending)
    return urlunsplit((parts.scheme, parts.netloc, base.rstrip("/") + path, parts.query, ""))


def _unwrapped(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value
