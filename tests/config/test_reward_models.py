"""Adapters are chosen by what a checkpoint holds, by an address, or by a known name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_cli.config.models.known_models import (
    choose_adapter,
    hub_cache,
)
from ppo_cli.config.models.weight_files import names_in_pickle, shapes_in_safetensors, tensor_names
from ppo_cli.errors import ModelError, RewardError, UserError
from tests.rewards.models import twins

STARLING = "its tensors v_head.weight and transformer.* are Starling's"
FOUND: list[tuple[Callable[..., Path], dict[str, Any], str, str]] = [
    (twins.armorm_twin, {}, "armorm", "regression_layer.weight, reward_transform_matrix and 9"),
    (twins.armorm_twin, {"form": "bin", "shards": 2}, "armorm", "are ArmoRM's"),
    (twins.starling_twin, {}, "starling", STARLING),
    (twins.starling_twin, {"form": "pt"}, "starling", STARLING),
    (twins.starling_twin, {"form": "safetensors"}, "starling", STARLING),
    (twins.starling_twin, {"config_json": False}, "starling", STARLING),
    (twins.starling_twin, {"drop": ("transformer.",)}, "starling", "model.model.* are Starling's"),
    (twins.deberta_twin, {}, "pair", "is an encoder's (deberta-v2), without a chat template"),
    (twins.bert_pair_twin, {"form": "bin"}, "pair", "is an encoder's (bert)"),
    (twins.roberta_twin, {"chat": True}, "seqcls", "classifier's"),
    (twins.skywork_llama_twin, {}, "seqcls", "its head score.weight is a sequence classifier's"),
    (twins.skywork_qwen3_twin, {"shards": 3}, "seqcls", "score.weight"),
    (twins.gpt2_twin, {}, "seqcls", "score.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "options", "adapter", "reason"), FOUND)
def test_by_what_the_folder_holds(
    build: Callable[..., Path], options: dict[str, Any], adapter: str, reason: str, tmp_path: Path
) -> None:
    choice = choose_adapter(str(build(tmp_path, **options)))
    assert choice.adapter == adapter
    assert reason in choice.reason


def test_a_folders_name_alone_decides_nothing(tmp_path: Path) -> None:
    named = tmp_path / "Starling-RM-7B-alpha"
    assert choose_adapter(str(twins.skywork_llama_twin(named / "score"))).adapter == "seqcls"
    bare = str(twins.openrlhf_twin(named / "bare", head="v_head"))
    assert choose_adapter(bare).reason == "its tensor v_head.weight and its name are Starling's"


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("RLHFlow/ArmoRM-Llama3-8B-v0.1", "armorm"),
        ("berkeley-nest/Starling-RM-7B-alpha", "starling"),
        ("OpenAssistant/reward-model-deberta-v3-large", "pair"),
        ("OpenAssistant/reward-model-deberta-v3-large-v2", "pair"),
        ("Skywork/Skywork-Reward-V2-Qwen3-0.6B", "seqcls"),
        ("Skywork/Skywork-Reward-V2-Llama-3.1-8B", "seqcls"),
    ],
)
def test_by_a_known_name(
    name: str, adapter: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    choice = choose_adapter(name)
    assert choice.adapter == adapter
    assert "known by the name" in choice.reason


def test_an_unknown_name_says_that_it_is_a_guess(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert choose_adapter("someone/some-rm").reason == "by default; its files are not here yet"
    assert choose_adapter("someone/some-rm", "pair").adapter == "pair"


def test_a_snapshot_in_the_cache_says_more_than_a_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--someone--some-rm"
    twins.deberta_twin(repo / "snapshots" / "old")
    twins.armorm_twin(repo / "snapshots" / "new", shards=2)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("old\n")
    assert choose_adapter("someone/some-rm").adapter == "pair"
    (repo / "refs" / "main").write_text("new")
    assert choose_adapter("someone/some-rm").adapter == "armorm"
    next((repo / "snapshots" / "new").glob("*.safetensors")).unlink()  # half fetched
    assert choose_adapter("someone/some-rm").adapter == "pair"


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert hub_cache() == Path.home() / ".cache/huggingface/hub"
    monkeypatch.setenv("XDG_CACHE_HOME", "/a")
    assert hub_cache() == Path("/a/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "/b")
    assert hub_cache() == Path("/b/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "/c")
    assert hub_cache() == Path("/c")


@pytest.mark.parametrize(
    ("url", "adapter"),
    [
        ("http://host:8000/classify", "vllm"),
        ("http://host:8000/pooling/", "vllm"),
        ("http://host:5000/get_reward", "openrlhf"),
        ("https://host/v1/classify?key=abcdefgh", "vllm"),
    ],
)
def test_by_the_address_of_a_server(url: str, adapter: str) -> None:
    choice = choose_adapter(url)
    assert (choice.adapter, choice.reason.split()[:2]) == (adapter, ["its", "address"])


def test_an_address_that_says_nothing() -> None:
    with pytest.raises(RewardError, match="--reward_model_adapter: vllm or openrlhf") as e:
        choose_adapter("http://me:hunter22@host:8000")
    assert "hunter22" not in str(e.value)
    assert choose_adapter("http://host:8000", "vllm").adapter == "vllm"


def test_a_named_adapter_must_be_possible(tmp_path: Path) -> None:
    score = str(twins.openrlhf_twin(tmp_path / "score", head="score"))
    starling = str(twins.starling_twin(tmp_path / "starling"))
    named = choose_adapter(str(twins.roberta_twin(tmp_path / "chat", chat=True)), "pair")
    assert named.adapter == "pair"
    assert "reward.model.adapter says so (by itself: seqcls" in named.reason
    assert choose_adapter(score, "seqcls").reason == choose_adapter(score).reason
    for path, adapter in [(starling, "seqcls"), (score, "armorm"), (score, "pair")]:
        with pytest.raises(ModelError, match=f"{adapter} cannot read"):
            choose_adapter(path, adapter)


@pytest.mark.parametrize(
    ("build", "options"),
    [(twins.trl_twin, {}), (twins.openrlhf_twin, {"head": "v_head"}), (twins.token_value_twin, {})],
)
def test_a_value_head_is_refused_with_what_to_use(
    build: Callable[..., Path], options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"has a value head .*`ppo reward fit`"):
        choose_adapter(str(build(tmp_path, **options)))


def test_no_reward_model_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no reward head: .*`ppo reward fit`"):
        choose_adapter(str(twins.plain_causal_twin(tmp_path)))


INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
SHARDS = {"weight_map": {"a": WEIGHTS, "b": "model-2.safetensors"}}
# What is said, and what was done to the folder before.
HARM: dict[str, Callable[[Path], object]] = {
    "holds no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "is a LoRA adapter": lambda folder: (folder / "config.json").rename(
        folder / "adapter_config.json"
    ),
    "holds no config.json": lambda folder: (folder / "config.json").unlink(),
    "config.json is damaged": lambda folder: (folder / "config.json").write_text("{"),
    "should hold a JSON object": lambda folder: (folder / "config.json").write_text("[]"),
    "its header would be": lambda folder: (folder / WEIGHTS).write_bytes(b"\xff" * 64),
    "model.safetensors is damaged": lambda folder: (folder / WEIGHTS).write_bytes(
        (folder / WEIGHTS).read_bytes()[:100]
    ),
    "pytorch_model.bin is damaged": lambda folder: (
        (folder / WEIGHTS)
        .rename(folder / "pytorch_model.bin")
        .write_bytes(b"<html>not found</html>")
    ),
    "lists no weights": lambda folder: (folder / INDEX).write_text("{}"),
    "lacks 1 of its 2 weight files": lambda folder: (folder / INDEX).write_text(json.dumps(SHARDS)),
}


@pytest.mark.parametrize("expected", HARM)
def test_a_damaged_folder(expected: str, tmp_path: Path) -> None:
    HARM[expected](twins.skywork_llama_twin(tmp_path))
    with pytest.raises(ModelError, match=expected):
        choose_adapter(str(tmp_path))


def test_no_code_of_a_pickle_runs(tmp_path: Path) -> None:
    folder, file = tmp_path / "made", tmp_path / "a.bin"
    call = f"cos\nsystem\n(S'touch {folder}'\ntR.".encode()
    file.write_bytes(call * 4)  # the older layout has several pickles
    assert names_in_pickle(file) == set()
    assert not folder.exists()
    file.write_bytes(call)
    with pytest.raises(ModelError, match="is damaged"):
        names_in_pickle(file)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "reward_model").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"no model folder .*Did you mean 'reward_model'"):
        choose_adapter(str(tmp_path / "reward_modl"))
    with pytest.raises(UserError, match="is a file"):
        choose_adapter(str(tmp_path / "file"))


@pytest.mark.parametrize("new_layout", [True, False])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_names_of_a_pickle(protocol: int, new_layout: bool, tmp_path: Path) -> None:
    shared = torch.ones(3)
    weights = {
        "a.weight": torch.ones(2, 3), "a.bias": torch.nn.Parameter(torch.ones(2)),
        "one": shared, "the same": shared, "storage": torch.ones(1, dtype=torch.bfloat16),
        "torch._utils": torch.ones(2)[:1],
    }  # fmt: skip
    options: dict[str, Any] = {
        "pickle_protocol": protocol,
        "_use_new_zipfile_serialization": new_layout,
    }
    torch.save(weights, tmp_path / "plain.bin", **options)
    assert names_in_pickle(tmp_path / "plain.bin") == set(weights)
    torch.save({"step": 3, "model": weights, "note": "x"}, tmp_path / "nested.bin", **options)
    assert names_in_pickle(tmp_path / "nested.bin") == set(weights)


def test_names_are_those_that_loading_finds(tmp_path: Path) -> None:
    for form in ("safetensors", "bin"):
        for shards in (1, 3):
            folder = twins.starling_twin(tmp_path / f"{form}{shards}", form=form, shards=shards)
            assert tensor_names(folder) == set(twins.read_weights(folder))
    optimizer = tmp_path / "bin1" / "optimizer.pt"
    torch.save({"state": torch.ones(1)}, optimizer)
    assert "state" not in tensor_names(tmp_path / "bin1")
    assert shapes_in_safetensors(tmp_path / "safetensors1" / "model.safetensors")
