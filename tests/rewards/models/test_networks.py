"""Each adapter's scores equal a straight re-computation, however a sample is padded."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.rewards.models import straight as plain
from tests.rewards.models import twins
from tests.rewards.models.twin_tokenizers import llama3_tokenizer
from tests.rewards.tables import table

HEADER = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
HEADER_IDS: list[int] = llama3_tokenizer()(HEADER, add_special_tokens=False)["input_ids"]


@dataclass(frozen=True)
class Case:
    """A twin, how it should be read, and what its scores are compared with."""

    adapter: str
    build: Callable[..., Path]
    reference: list[Any]
    options: dict[str, Any]


CASES = {
    name: Case(adapter, getattr(twins, twin), reference, options)
    for name, adapter, twin, reference, options in table(__file__, "cases")
}


class Ready:
    """A loaded twin, and the straight way to its scores."""

    def __init__(self, name: str, folder: Path, **settings: Any) -> None:
        self.name, case = name, CASES[name]
        self.adapter = case.adapter
        case.build(folder, **case.options | settings.pop("options", {}))
        self.loaded = twins.load(folder, **settings)
        kind, *arguments = case.reference
        if kind == "armorm":
            self.straight = plain.armorm(folder, HEADER_IDS)
        elif kind == "linear":
            self.straight = plain.last_linear(folder, *arguments)
        else:
            network, types = arguments
            self.straight = plain.own_class(folder, getattr(transformers, network), types=types)

    @cached_property
    def expected(self) -> Tensor:
        """The straight way's outputs for `samples`."""
        return torch.stack([self.straight(ids, types) for ids, types in samples(self)])


@pytest.fixture(scope="module", params=CASES)
def ready(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ready:
    return Ready(request.param, tmp_path_factory.mktemp("twin"))


def samples(ready: Ready) -> list[tuple[list[int], list[int]]]:
    """Token ids and types of five samples, two of which hold the pad token as text."""
    draw = random.Random(1)
    pad = ready.loaded.pad_token_id
    rows = []
    for length in (3, 17, 9, 26, 14):
        ids = [draw.randrange(2, 256) for _ in range(length)]
        if ready.adapter == "armorm":
            ids = [*ids, *HEADER_IDS, *ids[::-1], *HEADER_IDS, *ids[: length // 2], HEADER_IDS[0]]
        elif "roberta" not in ready.name and length > 10:
            ids[4] = ids[-1] = pad
        half = len(ids) // 2
        rows.append((ids, [0] * half + [1] * (len(ids) - half)))
    return rows


def padded(rows: Sequence[Sequence[int]], fill: int, side: str) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    ids, masks = [], []
    for row in rows:
        gap = [fill] * (longest - len(row))
        on, off = [1] * len(row), [0] * len(gap)
        ids.append([*row, *gap] if side == "right" else [*gap, *row])
        masks.append([*on, *off] if side == "right" else [*off, *on])
    return torch.tensor(ids), torch.tensor(masks)


def all_outputs(ready: Ready, ids: Tensor, mask: Tensor, types: Tensor) -> Tensor:
    scores = ready.loaded.network.score(ids, mask, types)
    assert scores.score_B.dtype == torch.float32
    return torch.stack([scores.score_B, *scores.objectives.values()], dim=1).double()


def padded_outputs(ready: Ready, fill: int, side: str) -> Tensor:
    """All outputs for the samples in one padded batch."""
    rows = samples(ready)
    ids, mask = padded([ids for ids, _ in rows], fill, side)
    types, _ = padded([types for _, types in rows], 0, side)
    return all_outputs(ready, ids, mask, types)


def test_the_adapter_is_found(ready: Ready) -> None:
    assert ready.loaded.adapter == ready.adapter
    assert not ready.loaded.network.module.training
    assert not any(p.requires_grad for p in ready.loaded.network.module.parameters())


def test_alone_and_unpadded(ready: Ready) -> None:
    rows = samples(ready)
    alone = [
        all_outputs(ready, torch.tensor([ids]), torch.ones(1, len(ids)), torch.tensor([types]))
        for ids, types in rows
    ]
    assert ready.expected[:, 0].std() > 0.01
    torch.testing.assert_close(torch.cat(alone), ready.expected, atol=1e-5, rtol=0)


def test_padded_in_a_batch(ready: Ready) -> None:
    last_token = samples(ready)[1][0][-1]
    for fill, side in product((ready.loaded.pad_token_id, last_token, 7), ("left", "right")):
        actual = padded_outputs(ready, fill, side)
        torch.testing.assert_close(actual, ready.expected, atol=1e-5, rtol=0)


def test_padded_alone_and_with_a_boolean_mask(ready: Ready) -> None:
    ids, types = samples(ready)[2]
    for side in ("left", "right"):
        rows, mask = padded([ids, [7] * (len(ids) + 6)], ready.loaded.pad_token_id, side)
        type_rows, _ = padded([types, [0] * (len(ids) + 6)], 0, side)
        actual = all_outputs(ready, rows[:1], mask[:1].bool(), type_rows[:1])
        torch.testing.assert_close(actual, ready.expected[2:3], atol=1e-5, rtol=0)


def test_a_row_of_padding_alone_is_no_sample(ready: Ready) -> None:
    ids = torch.full((2, 4), 7)
    with pytest.raises(ValueError, match="without a token"):
        ready.loaded.network.score(ids, torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]]))


@pytest.mark.parametrize(
    "name", ["armorm", "starling-bin", "deberta", "skywork-qwen3", "bert-pair"]
)
def test_the_body_may_be_bfloat16_and_the_head_is_not(name: str, tmp_path: Path) -> None:
    ready = Ready(name, tmp_path, dtype="bfloat16")
    body = ("body.", "model.deberta.", "model.bert.")
    inside = dict(ready.loaded.network.module.named_parameters())
    head = {n: p for n, p in inside.items() if not n.startswith(body)}
    assert {p.dtype for n, p in inside.items() if n not in head} == {torch.bfloat16}
    assert {p.dtype for p in head.values()} == {torch.float32}
    saved = twins.read_weights(tmp_path).values()
    for parameter in head.values():  # not rounded on the way
        assert any(p.shape == parameter.shape and torch.equal(p, parameter) for p in saved)
    differences = padded_outputs(ready, 7, "right") - ready.expected
    assert 1e-5 < differences.abs().max() < 0.25


def test_a_bfloat16_checkpoint_is_scored_in_float32(tmp_path: Path) -> None:
    ready = Ready("skywork-llama", tmp_path, options={"dtype": torch.bfloat16})
    actual = padded_outputs(ready, 7, "left")
    torch.testing.assert_close(actual, ready.expected, atol=1e-5, rtol=0)
