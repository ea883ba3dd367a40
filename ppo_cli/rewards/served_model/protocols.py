"""The three protocols: how a request is written for some samples, and how its reply is read.

vLLM's `/classify`, the `get_reward` of OpenRLHF's servers, and `/rerank` as the servers of text
embeddings have it. Each asks for raw scores, and none lets the server cut a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

from ppo_cli.config.reward_schema import ModelReward
from ppo_cli.rewards.served_model.answers import as_list, in_order, row_of, unreadable, weighed
from ppo_cli.rewards.served_model.exchange import Row, Sample

# What vLLM's switch for raw scores is called, newest first; unknown names are not refused.
RAW_SWITCHES = ("use_activation", "activation", "softmax")


class Wire(Protocol):
    """One protocol at one address."""

    url: str
    may_batch: bool

    def write(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Build the body of a request."""
        ...

    def read(self, reply: Any, count: int) -> list[Row]:
        """Read the reply, in the order of the samples; raises ServerFault."""
        ...


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


def endpoint(address: str, path: str, drop: tuple[str, ...] = ()) -> str:
    """Put `path` behind an address, unless it stands there; endings in `drop` go first."""
    parts = urlsplit(address)
    base = parts.path.rstrip("/")
    for ending in (*drop, path):
        base = base.removesuffix(ending)
    return urlunsplit((parts.scheme, parts.netloc, base.rstrip("/") + path, parts.query, ""))


def _unwrapped(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value
