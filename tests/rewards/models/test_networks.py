"""Each adapter's scores equal a straight re-computation, however a sample is padded."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ppo_cli.config.schema.reward import ModelReward
from ppo_cli.rewards.models.base import LoadedModel
from ppo_cli.rewards.models.heads import load_reward_model
from tests.rewards.models import straight as plain
from tests.rewards.models import twins
from tests.rewards.models.twin_tokenizers import llama3_tokenizer
from tests.rewards.tables import table

HEADER = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
HEADER_IDS: list[int] = llama3_tokenizer()(HEADER, add_special_tokens=False)["input_ids"]


@dataclass(frozen=True)
class Case:
    """A twin, how it should be read, and how its scores are computed without us."""

    adapter: str
    build: Callable[..., Path]
    straight: Callable[[Path], plain.Straight]
    options: dict[str, Any]


def reference(kind: list[Any], folder: Path) -> plain.Straight:
    """The straight computation that a row of the table names."""
    what, *arguments = kind
    if what == "armorm":
        return plain.armorm(folder, HEADER_IDS)
    if what == "linear":
        return plain.last_linear(folder, *arguments)
    name, types = arguments
    return plain.own_class(folder, getattr(twins, name), types=types)


CASES = {
    name: Case(adapter, getattr(twins, twin), partial(reference, kind), options)
    for name, adapter, twin, kind, options in table(__file__, "cases")
}


@dataclass(frozen=True)
class Ready:
    """A loaded twin beside the straight way to its scores."""

    case: Case
    loaded: LoadedModel
    straight: plain.Straight


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def ready(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ready:
    case: Case = request.param
    folder = case.build(tmp_path_factory.mktemp("twin"), **case.options)
    settings = ModelReward(path=str(folder), device="cpu")
    return Ready(case, load_reward_model(settings), case.straight(folder))


def samples(ready: Ready, seed: int = 1) -> list[tuple[list[int], list[int]]]:
    """Token ids and types of five samples, two of which hold the pad token as text."""
    draw = random.Random(seed)
    pad = ready.loaded.pad_token_id
    rows = []
    for length in (3, 17, 9, 26, 14):
        ids = [draw.randrange(2, 256) for _ in range(length)]
        if ready.case.adapter == "armorm":
            ids = [*ids, *HEADER_IDS, *ids[::-1], *HEADER_IDS, *ids[: length // 2], HEADER_IDS[0]]
        elif "roberta" not in ready.case.build.__name__ and length > 10:
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


def expected(ready: Ready, rows: list[tuple[list[int], list[int]]]) -> Tensor:
    return torch.stack([ready.straight(ids, types) for ids, types in rows])


def test_the_adapter_is_found(ready: Ready) -> None:
    assert ready.loaded.adapter == ready.case.adapter
    assert not ready.loaded.network.module.training
    assert not any(p.requires_grad for p in ready.loaded.network.module.parameters())


def test_alone_and_unpadded(ready: Ready) -> None:
    rows = samples(ready)
    alone = [
        all_outputs(ready, torch.tensor([ids]), torch.ones(1, len(ids)), torch.tensor([types]))
        for ids, types in rows
    ]
    reference = expected(ready, rows)
    assert reference[:, 0].std() > 0.01
    torch.testing.assert_close(torch.cat(alone), reference, atol=1e-5, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("filler", ["pad", "last token", "something"])
def test_padded_in_a_batch(ready: Ready, side: str, filler: str) -> None:
    rows = samples(ready)
    fill = {"pad": ready.loaded.pad_token_id, "last token": rows[1][0][-1], "something": 7}[filler]
    ids, mask = padded([ids for ids, _ in rows], fill, side)
    types, _ = padded([types for _, types in rows], 0, side)
    actual = all_outputs(ready, ids, mask, types)
    torch.testing.assert_close(actual, expected(ready, rows), atol=1e-5, rtol=0)


def test_padded_alone_and_with_a_boolean_mask(ready: Ready) -> None:
    (ids, types), _ = both = samples(ready)[2:4]
    for side in ("left", "right"):
        rows, mask = padded([ids, [7] * (len(ids) + 6)], ready.loaded.pad_token_id, side)
        type_rows, _ = padded([types, [0] * (len(ids) + 6)], 0, side)
        actual = all_outputs(ready, rows[:1], mask[:1].bool(), type_rows[:1])
        torch.testing.assert_close(actual, expected(ready, both)[:1], atol=1e-5, rtol=0)


def test_a_row_of_padding_alone_is_no_sample(ready: Ready) -> None:
    ids = torch.full((2, 4), 7)
    with pytest.raises(ValueError, match="without a token"):
        ready.loaded.network.score(ids, torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]]))


def test_the_body_may_be_bfloat16_and_the_head_is_not(tmp_path: Path) -> None:
    for name in ("armorm", "starling-bin", "deberta", "skywork-qwen3", "bert-pair"):
        case = CASES[name]
        folder = case.build(tmp_path / name, **case.options)
        settings = ModelReward(path=str(folder), device="cpu", dtype="bfloat16")
        ready = Ready(case, load_reward_model(settings), case.straight(folder))
        inside = dict(ready.loaded.network.module.named_parameters())
        body = ("body.", "model.deberta.", "model.bert.")
        head = {n: p for n, p in inside.items() if not n.startswith(body)}
        assert {p.dtype for n, p in inside.items() if n not in head} == {torch.bfloat16}
        assert {p.dtype for p in head.values()} == {torch.float32}
        saved = twins.read_weights(folder).values()
        for parameter in head.values():  # not rounded on the way
            assert any(p.shape == parameter.shape and torch.equal(p, parameter) for p in saved)
        rows = samples(ready)
        ids, mask = padded([ids for ids, _ in rows], 7, "right")
        types, _ = padded([types for _, types in rows], 0, "right")
        actual, reference = all_outputs(ready, ids, mask, types), expected(ready, rows)
        assert 1e-5 < (actual - reference).abs().max() < 0.25


def test_a_bfloat16_checkpoint_is_scored_in_float32(tmp_path: Path) -> None:
    case = CASES["skywork-llama"]
    folder = case.build(tmp_path, dtype=torch.bfloat16)
    ready = Ready(
        case, load_reward_model(ModelReward(path=str(folder), device="cpu")), case.straight(folder)
    )
    rows = samples(ready)
    ids, mask = padded([ids for ids, _ in rows], 7, "left")
    actual = all_outputs(ready, ids, mask, torch.zeros_like(ids))
    torch.testing.assert_close(actual, expected(ready, rows), atol=1e-5, rtol=0)
