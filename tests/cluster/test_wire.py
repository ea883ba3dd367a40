"""What is sent comes back: every type of tensor, views and empties."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from ppo_cli.cluster.serialise import (
    SharedTensors,
    rejoin_prompt,
    shed_prompt,
    to_array,
    to_tensor,
)
from ppo_cli.records import Prompt, Rollout
from tests.forked import run_forked

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
def test_tensors_come_back(name: str) -> None:
    tensor = TENSORS[name]()
    back = to_tensor(pickle.loads(pickle.dumps(to_array(tensor))))
    assert back.dtype == tensor.dtype and back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_a_tensor_is_not_copied_on_its_way() -> None:
    array, *kind = to_array(torch.arange(3.0))
    array.flags.writeable = False  # as shared memory is
    back = to_tensor((array, *kind))  # type: ignore[arg-type]
    assert back.data_ptr() == array.ctypes.data and back.tolist() == [0.0, 1.0, 2.0]


OTHER_PROCESS = """
import pickle, sys
tensors = pickle.loads(bytes.fromhex(sys.argv[1]))
print([(name, str(tensor.dtype), tensor.tolist()) for name, tensor in tensors.items()])
tensors["b"].fill_(7)
"""


@pytest.mark.slow
def test_shared_tensors_are_the_same_memory_in_another_process() -> None:
    tensors = {"a": torch.tensor([[1.5, 2.5]]), "b": torch.ones(3, dtype=torch.bfloat16)}
    shared = SharedTensors.like(tensors)
    for name, tensor in shared.items():
        tensor.copy_(tensors[name])
    other = run_forked([pickle.dumps(shared).hex()], os.environ, 60, OTHER_PROCESS)
    seen = [("a", "torch.float32", [[1.5, 2.5]]), ("b", "torch.bfloat16", [1.0] * 3)]
    assert other.stdout.strip() == str(seen), other.stderr
    assert shared["b"].tolist() == [7.0] * 3


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
