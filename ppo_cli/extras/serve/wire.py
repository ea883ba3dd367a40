"""Requests and replies of the Tinker SDK: ranges of JSON fields, and protobuf messages.

The messages are declared in `messages.textproto`.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory, text_format
from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict

from ppo_cli.errors import UserError
from ppo_cli.records import Rollout

PACKAGE = "ppo_cli.tinker"
DTYPES = {1: np.float32, 2: np.int64}  # of a Tensor
TOKENS_ALONE = "An input has an image or a sound; this server reads tokens alone."
Size = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Numbers(TypedDict, total=False):
    """The numbers of requests by name; the SDK sends any."""

    num_samples: PositiveInt
    max_tokens: PositiveInt | None
    temperature: Size
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: Annotated[int, Field(ge=-1)]
    rank: NonNegativeInt
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None
    learning_rate: Size
    beta1: Decay
    beta2: Decay
    eps: Size
    weight_decay: Size
    grad_clip_norm: Size


def check_ranges(body: Mapping[str, Any]) -> None:
    """Raise UserError that names each number of a request that is out of range."""
    parts = (body.get(name) or {} for name in ("sampling_params", "adam_params", "lora_config"))
    try:
        TypeAdapter(Numbers).validate_python(dict(body, **ChainMap(*parts)))
    except ValidationError as error:
        problems = (f"{e['loc'][0]} is {e['input']}: {e['msg']}" for e in error.errors())
        raise UserError(f"{'; '.join(problems)}.") from None


class Datum(NamedTuple):
    """A row of a batch: the tokens that the model reads, and the inputs of its loss by name."""

    tokens: Sequence[int]
    inputs: Mapping[str, Tensor]


@cache
def message_type(name: str) -> Any:
    """Return the class of a message."""
    declared = Path(__file__).with_name("messages.textproto").read_text()
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(declared, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def read_batch(body: bytes) -> dict[str, Any]:
    """Return the fields of a ForwardBackwardRequest, its rows as `Datum`."""
    request = message_type("ForwardBackwardRequest")()
    try:
        request.ParseFromString(body)
        rows = [_read_datum(datum) for datum in request.data]
    except (message.DecodeError, KeyError, ValueError) as error:
        raise UserError(f"The batch is not one of the SDK tinker 0.38: {error!r}.") from error
    return {
        "model_id": request.model_id, "seq_id": request.seq_id, "data": rows,
        "loss": request.loss_fn, "backward": not request.forward_only,
        "config": {entry.key: entry.value for entry in request.loss_fn_config},
    }  # fmt: skip


def _read_datum(datum: Any) -> Datum:
    if not all(chunk.HasField("encoded_text") for chunk in datum.model_input):
        raise UserError(TOKENS_ALONE)
    tokens = np.frombuffer(b"".join(c.encoded_text.tokens for c in datum.model_input), np.int32)
    inputs = {
        entry.key: torch.tensor(np.frombuffer(entry.value.dense, DTYPES[entry.value.dtype]))
        for entry in datum.loss_fn_inputs
    }
    return Datum(tokens.tolist(), inputs)


def write_logprobs(rows: Sequence[Tensor], metrics: Mapping[str, float]) -> bytes:
    """Return a ForwardBackwardOutput with the log-probs of each row."""
    offsets = np.cumsum([0, *(4 * len(row) for row in rows)], dtype=np.int64)
    data = b"".join(row.numpy().tobytes() for row in rows)
    field = {"key": "logprobs", "value": {"data": data, "offsets": offsets.tobytes(), "dtype": 1}}
    output = message_type("ForwardBackwardOutput")(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[{"fields": [field], "num_datums": len(rows)}],
        metrics=[{"key": name, "value": number} for name, number in metrics.items()],
    )
    return bytes(output.SerializeToString())


def write_samples(rollouts: Sequence[Rollout], prompt_logprobs: Tensor | None) -> bytes:
    """Return a SampleResponse; `prompt_logprobs` has NaN where there is none."""
    sequences = [
        {
            "stop_reason": int(rollout.finish_reason == "length"),
            "tokens": np.array(rollout.token_ids, np.int32).tobytes(),
            "logprobs": rollout.sampler_logprobs.tobytes(),
        }
        for rollout in rollouts
    ]
    scored = None if prompt_logprobs is None else prompt_logprobs.numpy().tobytes()
    response = message_type("SampleResponse")(sequences=sequences, prompt_logprobs=scored)
    return bytes(response.SerializeToString())
