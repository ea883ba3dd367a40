"""Checkpoints of several ranks: written by two, read by one, two and three."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_cli.engine.checkpoint import TrainedModel, restore, stored_tensors
from ppo_cli.engine.models import load_policy
from ppo_cli.engine.models.value_models import load_value_model
from ppo_cli.engine.ranks import ALONE
from tests.engine.packed_steps import build_optimizer
from tests.forked import run_ranks

WORKER = Path(__file__).with_name("checkpoint_worker.py")
PARTS = ("actor", "critic")


def read_all(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by model and name, from as many files as there are."""
    tensors: dict[str, Tensor] = {}
    for part in PARTS:
        moments = (folder / "state").glob(f"{part}_optimizer*.safetensors")
        for path in (*(folder / part).glob("*.safetensors"), *moments):
            tensors |= {f"{part}.{n}": t for n, t in load_file(path).items()}
    return tensors


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in actual if not torch.equal(actual[name], expected[name])]
    assert not different, different


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two ranks wrote, and the tensors that they held together."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 46, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = LlamaConfig(vocab_size=63, pad_token_id=0, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    run_ranks(WORKER, 2, str(folder), "write")
    return folder


def truth(desk: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = torch.load(desk / "truth.pt")
    return tensors


@pytest.mark.slow
def test_two_ranks_write_one_folder(desk: Path) -> None:
    assert_equal(read_all(desk / "written"), truth(desk))
    names = {p.relative_to(desk / "written").as_posix() for p in (desk / "written").rglob("*.*")}
    both = [f"{stem}-0000{n}-of-00002.safetensors" for n in (1, 2) for stem in (
        "actor/model", "critic/model", "state/actor_optimizer", "state/critic_optimizer",
    )]  # fmt: skip
    index = [f"{part}/model.safetensors.index.json" for part in PARTS]
    parts = {f".digests-{rank}.json" for rank in (0, 1)}
    assert names == {*both, *index, *parts, "state/engine.json"}
    small, large = sorted(path.stat().st_size for path in (desk / "written/state").glob("actor*"))
    assert small > 0.6 * large


@pytest.mark.slow
def test_tensor_parallel_ranks_read_it(desk: Path) -> None:
    assert_equal(read_all(desk / "tensor"), truth(desk))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "tensor", "shard"),
    [
        pytest.param(3, 1, -1, id="three ranks, two of which write"),
        pytest.param(4, 2, 2, id="two axes cut the same"),
        pytest.param(4, 2, 1, id="two copies of two"),
    ],
)
def test_other_ranks_read_it(desk: Path, ranks: int, tensor: int, shard: int) -> None:
    run_ranks(WORKER, ranks, str(desk), "read", str(tensor), str(shard))
    folder = desk / f"{ranks}-{tensor}-{shard}"
    assert_equal(read_all(folder), truth(desk))
    assert json.loads((folder / "state/engine.json").read_text()) == {}
    assert len(list((folder / "actor").glob("*.safetensors"))) == 2


@pytest.mark.slow
def test_one_process_reads_it(desk: Path) -> None:
    models = {"actor": load_policy(str(desk / "model")).model}
    models["critic"] = load_value_model(str(desk / "model")).model
    saved: dict[str, Tensor] = {}
    for name, model in models.items():
        optimizer = build_optimizer(model)
        part = TrainedModel(name, stored_tensors(model), optimizer, {}, model)
        restore(desk / "written", [part], ALONE)
        for tensors in (part.weights, optimizer.moments()):
            saved |= {f"{name}.{n}": t.detach() for n, t in tensors.items()}
    assert_equal(saved, truth(desk))
