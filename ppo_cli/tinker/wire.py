"""The protobuf messages of the Tinker SDK, declared in `messages.textproto`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory, text_format
from torch import Tensor

from ppo_cli.errors import UserError
from ppo_cli.records import Rollout

PACKAGE = "ppo_cli.tinker"
DTYPES = {1: np.float32, 2: np.int64}  # of a Tensor


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
    config = {entry.key: entry.value for entry in request.loss_fn_config}
    fields = ("model_id", "seq_id", "loss_fn", "forward_only")
    return {"data": rows, "config": config} | {name: getattr(request, name) for name in fields}


def _read_datum(datum: Any) -> Datum:
    chunks = datum.model_input
    if not all(chunk.HasField("encoded_text") for chunk in chunks):
        raise UserError("An input has an image or a sound; this server reads tokens alone.")
    tokens = np.concatenate([np.frombuffer(c.encoded_text.tokens, np.int32) for c in chunks])
    values = {
        entry.key: torch.from_numpy(
            np.frombuffer(entry.value.dense, DTYPES[entry.value.dtype]).copy()
        )
        for entry in datum.loss_fn_inputs
    }
    return Datum(tokens.tolist(), values)


def write_logprobs(rows: Sequence[Tensor], metrics: Mapping[str, float]) -> bytes:
    """Return a ForwardBackwardOutput with the log-probs of each row."""
    output = message_type("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord")
    for name, number in metrics.items():
        output.metrics.add(key=name, value=number)
    record = output.loss_fn_outputs.add(num_datums=len(rows))
    field = record.fields.add(key="logprobs").value
    field.dtype, field.data = 1, b"".join(row.numpy().tobytes() for row in rows)
    field.offsets = np.cumsum([0, *(4 * len(row) for row in rows)], dtype=np.int64).tobytes()
    written: bytes = output.SerializeToString()
    return written


def write_samples(rollouts: Sequence[Rollout], prompt_logprobs: Tensor | None) -> bytes:
    """Return a SampleResponse; `prompt_logprobs` has NaN where there is none."""
    response = message_type("SampleResponse")()
    for rollout in rollouts:
        tokens = np.array(rollout.token_ids, np.int32).tobytes()
        logprobs = rollout.sampler_logprobs.tobytes()
        stop_reason = int(rollout.finish_reason == "length")
        response.sequences.add(stop_reason=stop_reason, tokens=tokens, logprobs=logprobs)
    if prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs.numpy().tobytes()
    written: bytes = response.SerializeToString()
    return written
