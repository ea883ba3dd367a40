"""vLLM is sent the tensors of the model's files: their names, shapes and values."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families.configs import write_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.models import load_tokenizer
from tests.engine.packed_steps import settings
from tests.engine.published_ranks import KINDS, make_learner
from tests.engine.tiny_families import save_model
from tests.forked import run_ranks

FAMILIES = (
    "mixtral", "phimoe", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "qwen3_next",
    "qwen2", "qwen3_5",
)  # fmt: skip
WORKER = Path(__file__).with_name("published_ranks.py")


def save_family(folder: Path, kind: str) -> str:
    """A random model with the tokenizer of the bundled one; qwen3_5 is for images as well."""
    if kind in ("qwen3_5", "glm4_moe"):
        write_model(kind, folder / kind, Path(model_folder("embedded")))
        return str(folder / kind)
    AutoTokenizer.from_pretrained(model_folder("embedded")).save_pretrained(folder / kind)
    return save_model(folder, kind, **({"tie_word_embeddings": True} if kind == "qwen2" else {}))


def stored(path: str | Path) -> dict[str, Tensor]:
    """The tensors in the file of a model, without those for images."""
    tensors = load_file(Path(path) / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if "visual" not in name}


def assert_equal(tensors: dict[str, Tensor], files: dict[str, Tensor]) -> None:
    assert {n: (t.shape, t.dtype) for n, t in tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in files.items()
    }
    assert [n for n in files if not torch.equal(tensors[n], files[n])] == []


@pytest.mark.parametrize("kind", FAMILIES)
def test_all_weights_are_those_of_the_files(kind: str, tmp_path: Path) -> None:
    path = save_family(tmp_path, kind)
    learner = make_learner(path)
    assert_equal(dict(learner.published()), stored(path))
    weights = learner.weights()
    assert weights is not None
    assert_equal(dict(weights.tensors), stored(path))


@pytest.mark.parametrize(
    ("sampler", "adapter", "dtype"),
    [
        ("vllm", {}, torch.bfloat16),
        ("vllm", {"lora_rank": 2, "lora_merge": True}, torch.bfloat16),
        ("vllm", {"lora_rank": 2, "lora_merge": False}, torch.float32),  # vLLM casts it itself
        ("hf", {}, torch.float32),
    ],
)
def test_weights_by_memory_have_the_precision_in_which_vllm_computes(
    sampler: str, adapter: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    path = save_family(tmp_path, "mixtral")
    config = settings(
        model={"path": path, "dtype": "bfloat16", **adapter}, trainer={"engine": "ray"},
        algorithm={"adv_estimator": "grpo"}, actor={"use_kl_loss": False},
        rollout={"n": 2, "name": sampler},
    )  # fmt: skip
    weights = Learner(config, load_tokenizer(path), total_steps=1).weights()
    assert weights is not None and {t.dtype for t in weights.tensors.values()} == {dtype}
    if dtype == torch.bfloat16:
        assert_equal(dict(weights.tensors), {n: t.to(dtype) for n, t in stored(path).items()})


@pytest.mark.parametrize("kind", ["mixtral", "granitemoe", "olmoe", "qwen3_5"])
def test_merged_weights_are_what_transformers_would_save(kind: str, tmp_path: Path) -> None:
    path = save_family(tmp_path, kind)
    learner = make_learner(path, lora_rank=2)
    for name, tensor in learner.policy.model.named_parameters():
        if "lora_" in name:
            tensor.data.normal_(std=0.1)
    hf = make_learner(path, name="hf", lora_rank=2)
    hf.policy.model.load_state_dict(learner.policy.model.state_dict())
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.load_state_dict(dict(hf.published()), strict=False)
    model.save_pretrained(tmp_path / "merged")
    tensors = dict(learner.published())
    assert_equal(tensors, stored(tmp_path / "merged"))
    assert any(not torch.equal(tensors[n], t) for n, t in stored(path).items())


def test_buffers_of_routers_travel_too_and_are_not_cast(tmp_path: Path) -> None:
    """vLLM would leave the bias of a router as it was in memory, which a reload does not fill."""
    path = save_family(tmp_path, "glm4_moe")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    for adapter in ({}, {"lora_rank": 2, "target_modules": "all-linear"}):
        learner = make_learner(path, **adapter)
        half = partial(torch.Tensor.to, dtype=torch.bfloat16)
        tensors = dict(learner.published(half, torch.Tensor.detach))
        files = stored(path)
        assert torch.equal(tensors.pop(bias), files.pop(bias))
        assert_equal(tensors, {n: t.to(torch.bfloat16) for n, t in files.items()})


@pytest.mark.parametrize("adapter", [{}, {"lora_rank": 2}], ids=["whole", "merged"])
def test_what_will_come_is_declared_and_one_layer_is_in_memory(
    adapter: dict[str, Any], tmp_path: Path
) -> None:
    learner = make_learner(save_family(tmp_path, "mixtral"), **adapter)
    gathered: list[str] = []
    names = {id(t): n for n, t in learner.policy.model.named_parameters()}

    def gather(tensor: Tensor) -> Tensor:
        gathered.append(names.get(id(tensor), ""))
        return tensor.detach().clone()

    declared = [
        (n, t.shape) for n, t in learner.published(partial(torch.empty_like, device="meta"))
    ]
    sent = []
    for name, tensor in learner.published(gather):
        sent.append((name, tensor.shape))
        if name.startswith("model.layers.0."):
            # The tensor behind a layer tells that it has ended.
            assert len([n for n in gathered if ".layers.1." in n and "lora_" not in n]) <= 1
    assert sent == declared
    assert len([n for n in gathered if ".layers.1." in n and "lora_" not in n]) > 5


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for kind in KINDS:
        save_family(folder, kind)
    run_ranks(WORKER, 2, str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [0, 1], ids=["whole", "merged"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_publish_the_tensors_of_the_files(
    kind: str, adapter: int, two_ranks: Path
) -> None:
    """A fresh adapter changes nothing, so that merged weights are the files' too."""
    files = stored(two_ranks / kind)
    for rank in range(2):
        tensors = load_file(two_ranks / kind / f"published-{rank}-{adapter}.safetensors")
        assert_equal(tensors, files)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_files_of_two_ranks_have_the_names_of_the_files_that_were_loaded(
    kind: str, two_ranks: Path
) -> None:
    folder = two_ranks / kind / "checkpoint" / "actor"
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    assert len(files) == 2
    assert places == {name: file for file, tensors in files.items() for name in tensors}
    assert places.keys() == stored(two_ranks / kind).keys()
