"""What is packed comes back: every type of tensor, records in records, views and empties."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from ppo_cli.engine.cluster.serialise import pack, rejoin_prompt, shed_prompt, unpack
from ppo_cli.engine.responses import Annotations
from ppo_cli.engine.sampler import Weights
from ppo_cli.records import Prompt, Rollout

TENSORS: dict[str, Callable[[], Tensor]] = {
    "float": lambda: torch.randn(3, 4),
    "bfloat16": lambda: torch.randn(3, 4).bfloat16(),
    "bool": lambda: torch.tensor([[True, False]]),
    "int": lambda: torch.arange(6).reshape(2, 3),
    "view": lambda: torch.randn(4, 6).T[1:],
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.zeros(0, 5, dtype=torch.int64),
    "parameter": lambda: torch.nn.Parameter(torch.randn(2)),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("copy", [True, False])
def test_tensors_come_back(name: str, copy: bool) -> None:
    tensor = TENSORS[name]()
    back = unpack(pickle.loads(pickle.dumps(pack({"x": tensor}))), copy=copy)["x"]
    assert back.dtype == tensor.dtype and back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_records_come_back() -> None:
    weights = Weights({"a": torch.randn(2), "b": torch.ones(3).bfloat16()}, 7, adapter=True)
    back = unpack(pickle.loads(pickle.dumps(pack(weights))), copy=False)
    assert isinstance(back, Weights) and back.version == 7 and back.adapter
    assert torch.equal(back.tensors["a"], weights.tensors["a"])
    none = unpack(pack(Annotations(torch.zeros(0, dtype=torch.int64), {})))
    assert none.found == {} and none.row_R.shape == (0,)
    assert pack(None) is None


def test_a_copy_may_be_written_to() -> None:
    packed = pack(torch.zeros(3))
    packed.bytes_.flags.writeable = False
    unpack(packed).add_(1)
    assert unpack(packed).sum() == 0


def test_rollouts_travel_without_their_prompt() -> None:
    prompt = Prompt(
        uid="p", text="t", messages=(), rendered="t", token_ids=(1,), extra_info={"a": 1}
    )
    logprobs = np.ones(1, dtype=np.float32)
    logprobs.flags.writeable = False
    sent = pickle.loads(
        pickle.dumps(shed_prompt(Rollout(prompt, 2, (5,), logprobs, "x", "stop", 4)))
    )
    assert sent[1].prompt is None
    back = rejoin_prompt(sent, {"p": prompt})
    assert back.prompt is prompt and back.key == ("p", 2) and back.weight_version == 4
    assert back.sampler_logprobs.flags.writeable
