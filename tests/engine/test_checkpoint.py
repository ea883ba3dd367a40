"""Snapshots, the files they become, and their way back, in one process."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.algorithm import Optim
from ppo_cli.digests import find_damage, write_manifest
from ppo_cli.engine.checkpoint import (
    RankShare,
    TrainedModel,
    assign_owners,
    build_rank_share,
    restore,
    stored_tensors,
    take_snapshot,
)
from ppo_cli.engine.models import load_policy, load_tokenizer, pad_token_id
from ppo_cli.engine.models.value_models import load_value_model
from ppo_cli.engine.ranks import ALONE, Ranks
from ppo_cli.engine.saved_files import add_older_names, model_files, tokenizer_files, write_files
from ppo_cli.engine.training.optimizer import Optimizer
from ppo_cli.errors import ModelError
from tests.engine.packed_steps import build_optimizer

TINY = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
TIED = model_folder("embedded")


def make(family: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    if family == "tied":
        return load_policy(TIED).model
    if family == "critic":
        return load_value_model(TIED).model
    if family == "experts":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY, **EXPERTS))
    return LlamaForCausalLM(LlamaConfig(**TINY))


def train(model: Any, steps: int = 2) -> Optimizer:
    """Steps on made-up gradients: what is tested is where tensors go, not what is learnt."""
    optimizer = build_optimizer(model, Optim(lr=0.01), grad_clip=1.0)
    for _ in range(steps):
        step(model, optimizer)
    return optimizer


def step(model: Any, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.apply()


def trained(model: Any, optimizer: Optimizer | None = None) -> TrainedModel:
    files = model_files(model, AutoTokenizer.from_pretrained(TIED))
    return TrainedModel("actor", stored_tensors(model), optimizer or train(model), files, model)


def write(folder: Path, *parts: TrainedModel, ranks: int = 1) -> None:
    """Write as so many ranks would that hold whole tensors each."""
    for rank in range(ranks):
        take_snapshot(parts, {"weight_version": 3}, Ranks(rank, ranks)).write(folder)


def equal(actual: dict[str, Any], expected: dict[str, Any]) -> bool:
    same_names = list(actual) == list(expected)
    return same_names and all(torch.equal(actual[n], expected[n]) for n in actual)


def copied(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", ["tied", "untied", "critic", "experts"])
def test_the_folder_is_what_hugging_face_itself_writes(tmp_path: Path, family: str) -> None:
    model = make(family)
    part = trained(model)
    write(tmp_path / "ours", part)
    model.save_pretrained(tmp_path / "theirs")
    AutoTokenizer.from_pretrained(TIED).save_pretrained(tmp_path / "theirs")
    expected_files = {p.name: p.read_bytes() for p in (tmp_path / "theirs").iterdir()}
    expected_files = add_older_names(expected_files)  # the only difference
    assert {p.name: p.read_bytes() for p in (tmp_path / "ours/actor").iterdir()} == expected_files
    assert not list(tmp_path.rglob(".unfinished*"))


def copy_model(folder: Path, file: str, **changes: Any) -> str:
    """The embedded model with some values of a JSON file changed."""
    shutil.copytree(TIED, folder)
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(values | changes))
    return str(folder)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_values_that_transformers_refuses_to_save_stay_as_they_are(
    tmp_path: Path, file: str
) -> None:
    values = {"do_sample": False, "temperature": 0.9, "top_p": 0.6, "num_beams": 1}
    path = copy_model(tmp_path / "model", file, **values)
    if file == "config.json":
        (tmp_path / "model" / "generation_config.json").unlink()
    model = load_policy(path).model
    with pytest.raises(ValueError, match="Fix these issues to save"):
        model.generation_config.save_pretrained(tmp_path)
    saved = json.loads(model_files(model)["generation_config.json"])
    assert (saved["temperature"], saved["top_p"], saved["eos_token_id"]) == (0.9, 0.6, 281)


def test_a_tokenizer_that_cannot_be_saved_is_copied_or_refused(tmp_path: Path) -> None:
    path = copy_model(tmp_path / "model", "tokenizer_config.json", chat_template="\ud800")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(path)
    tools = "additional_chat_templates/tools.jinja"
    write_files(tmp_path / "model", {tools: b"{{ tools }}"})
    files = tokenizer_files(tokenizer)
    assert files == {
        name: (tmp_path / "model" / name).read_bytes()
        for name in ("tokenizer.json", "tokenizer_config.json", tools)
    }
    tokenizer.name_or_path = "some/hub-name"
    with pytest.raises(ModelError, match="The tokenizer of some/hub-name loads but cannot be save"):
        tokenizer_files(tokenizer)


def test_dropout_and_a_pad_token_are_saved_as_the_base_has_them(tmp_path: Path) -> None:
    path = copy_model(tmp_path / "model", "config.json", attention_dropout=0.25)
    tokenizer_file = tmp_path / "model" / "tokenizer_config.json"
    tokenizer_file.write_text(
        json.dumps(json.loads(tokenizer_file.read_text()) | {"pad_token": None})
    )
    tokenizer = load_tokenizer(path)
    assert pad_token_id(tokenizer) == tokenizer.eos_token_id == 281
    files = model_files(load_policy(path).model, tokenizer)
    assert json.loads(files["config.json"])["attention_dropout"] == 0.25
    assert json.loads(files["tokenizer_config.json"])["pad_token"] is None


@pytest.mark.parametrize("family", ["tied", "untied", "critic", "experts"])
def test_two_writers_make_a_folder_that_hugging_face_loads(tmp_path: Path, family: str) -> None:
    model = make(family)
    write(tmp_path, trained(model), ranks=2)
    folder = tmp_path / "actor"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert {n: f for f in files for n in load_file(folder / f)} == index["weight_map"]
    loader = AutoModelForTokenClassification if family == "critic" else AutoModelForCausalLM
    loaded, info = loader.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert equal(loaded.state_dict(), model.state_dict())
    # The same numbers as Hugging Face gives to files of its own.
    model.save_pretrained(tmp_path / "theirs", max_shard_size="2KB")
    expected_index = json.loads((tmp_path / "theirs/model.safetensors.index.json").read_text())
    assert index["metadata"] == expected_index["metadata"]
    assert index["weight_map"].keys() == expected_index["weight_map"].keys()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["tied", "critic", "experts"])
def test_all_comes_back_exactly(tmp_path: Path, family: str, ranks: int) -> None:
    model = make(family)
    optimizer = train(model)
    write(tmp_path, trained(model, optimizer), ranks=ranks)
    restored = make(family, seed=1)
    fresh = train(restored, steps=1)
    assert restore(tmp_path, [trained(restored, fresh)], ALONE) == {"weight_version": 3}
    assert equal(restored.state_dict(), model.state_dict())
    assert equal(fresh.moments(), optimizer.moments())


def test_an_optimizer_that_has_not_stepped_comes_back_so(tmp_path: Path) -> None:
    model = make("tied")
    write(tmp_path, trained(model, train(model, steps=0)), ranks=2)
    optimizer = train(model, steps=1)
    restore(tmp_path, [trained(model, optimizer)], ALONE)
    assert optimizer.moments() == {}


def test_what_is_trained_after_the_snapshot_does_not_leak_into_the_files(tmp_path: Path) -> None:
    model = make("untied")
    optimizer = train(model)
    weights, moments = copied(stored_tensors(model)), copied(optimizer.moments())
    snapshot = take_snapshot([trained(model, optimizer)], {}, ALONE)
    step(model, optimizer)
    written = snapshot.write_in_background(tmp_path)
    step(model, optimizer)
    written.result(timeout=60)
    assert equal(load_file(tmp_path / "actor/model.safetensors"), dict(sorted(weights.items())))
    saved_moments = load_file(tmp_path / "state/actor_optimizer.safetensors")
    assert equal(saved_moments, dict(sorted(moments.items())))


def test_the_last_checkpoint_is_written_from_the_live_tensors() -> None:
    model = make("untied")
    optimizer = train(model)
    live = {tensor.data_ptr() for tensor in stored_tensors(model).values()}
    live |= {tensor.data_ptr() for tensor in optimizer.moments().values()}

    def saved_steps(*, last: bool) -> set[int]:
        shares = take_snapshot([trained(model, optimizer)], {}, ALONE, last=last).shares
        return {tensor.data_ptr() for share in shares for tensor in share.tensors.values()}

    assert saved_steps(last=True) == live
    assert not saved_steps(last=False) & live


def test_what_the_disk_refuses_is_in_the_future(tmp_path: Path) -> None:
    (tmp_path / "actor").write_text("in the way")
    written = take_snapshot([trained(make("tied"))], {}, ALONE).write_in_background(tmp_path)
    assert isinstance(written.exception(timeout=60), OSError)


def test_a_folder_that_was_given_up_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = take_snapshot([trained(make("tied"))], {}, ALONE)
    write_share = RankShare.write

    def give_up(share: RankShare, directory: Path) -> None:
        write_share(share, directory)
        shutil.rmtree(directory)

    monkeypatch.setattr(RankShare, "write", give_up)
    (tmp_path / "gone").mkdir()
    # Another rank's disk was full: whoever waited has removed what was written.
    assert snapshot.write_in_background(tmp_path / "gone").exception(timeout=60) is not None
    assert not (tmp_path / "gone").exists()


def test_each_rank_digests_what_it_wrote_and_the_manifest_joins_them(tmp_path: Path) -> None:
    write(tmp_path, trained(make("untied")), ranks=2)
    # After a rank has hashed its file: the manifest must hold what was written, not what is there.
    second = tmp_path / "actor" / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-1] + b"x")
    write_manifest(tmp_path)
    named = json.loads((tmp_path / "digests.json").read_text())["files"]
    files = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert named.keys() == files - {"digests.json"}
    assert find_damage(tmp_path) == [f"actor/{second.name} is not what was saved"]
    assert find_damage(tmp_path, "state") == []


def test_a_file_that_a_loader_would_read_beside_what_was_saved_is_named(tmp_path: Path) -> None:
    write(tmp_path, trained(make("untied")))
    write_manifest(tmp_path)
    (tmp_path / "actor/NOTES.md").write_text("the best one")
    assert find_damage(tmp_path) == []
    (tmp_path / "actor/adapter_config.json").write_text("{}")
    assert find_damage(tmp_path) == ["actor/adapter_config.json was not saved with it"]
    assert find_damage(tmp_path, "state") == []


def test_an_adapter_is_one_file_whoever_writes(tmp_path: Path) -> None:
    model = make("untied")
    names = {f"base_model.model.{n}": p for n, p in model.named_parameters() if "q_proj" in n}
    part = TrainedModel("actor", names, train(model), {"adapter_config.json": b"{}"})
    write(tmp_path, part, ranks=2)
    files = sorted(path.name for path in (tmp_path / "actor").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    copied_names = copied(names)
    with torch.no_grad():
        for tensor in names.values():
            tensor.zero_()
    restore(tmp_path, [part], ALONE)
    assert equal(copied(names), copied_names)


def test_shares_are_whole_disjoint_and_balanced() -> None:
    tensors = {f"layers.{i}.{part}": torch.randn(i + 1, 8) for i in range(20) for part in "ab"}
    shares = [build_rank_share("x", tensors, Ranks(rank, 4), 3).tensors for rank in range(4)]
    assert shares[3] == {}
    assert sorted(name for share in shares for name in share) == sorted(tensors)
    assert all(torch.equal(t, tensors[name]) for share in shares for name, t in share.items())
    sizes = [sum(t.numel() for t in share.values()) for share in shares[:3]]
    assert max(sizes) - min(sizes) <= 2 * 20 * 8
    owners = assign_owners(tensors, 3)
    assert all(owners[f"layers.{i}.a"] == owners[f"layers.{i}.b"] for i in range(20))


def spoil(path: Path, drop: str = "", add: tuple[str, ...] = ()) -> None:
    """Drop a tensor of a file, or put others of three numbers there."""
    tensors = load_file(path)
    tensors.pop(drop, None)
    tensors.update({name: torch.ones(3) for name in add})
    save_file(tensors, path, metadata={"format": "pt"})


NORM, WEIGHTS, MOMENTS = "model.norm.weight", "actor/model", "state/actor_optimizer"
OTHERS = tuple(f"x.{moment}" for moment in ("step", "exp_avg", "exp_avg_sq"))
DAMAGE: list[tuple[str, Callable[[Path], Any], str]] = [
    (WEIGHTS, lambda p: p.write_bytes(p.read_bytes()[:-9]), "actor/model.safetensors cannot be r"),
    (WEIGHTS, Path.unlink, "actor/model.safetensors is missing"),
    (WEIGHTS, partial(spoil, drop=NORM), f"actor/model.safetensors lacks the tensor {NORM}"),
    (WEIGHTS, partial(spoil, add=(NORM,)), f"actor/model.safetensors holds {NORM} as (3,)"),
    (WEIGHTS, partial(spoil, add=("x",)), "safetensors holds a tensor that the model lacks: x"),
    (MOMENTS, lambda p: p.write_bytes(b"half"), "actor_optimizer.safetensors cannot be read"),
    (MOMENTS, partial(spoil, drop=f"{NORM}.exp_avg"), f"safetensors lacks the tensor {NORM}.e"),
    (MOMENTS, partial(spoil, add=(f"{NORM}.exp_avg_sq",)), f"{NORM}.exp_avg_sq does not fit"),
    (MOMENTS, partial(spoil, add=OTHERS), "other parameters than are trained now (x."),
]


@pytest.mark.parametrize(("stem", "damage", "message"), DAMAGE)
def test_damage_is_named(
    tmp_path: Path, stem: str, damage: Callable[[Path], Any], message: str
) -> None:
    part = trained(make("untied"))
    write(tmp_path, part)
    damage(tmp_path / f"{stem}.safetensors")
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        restore(tmp_path, [part], ALONE)
    assert "--resume never" in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_one_of_several_files_that_is_gone_is_named(tmp_path: Path) -> None:
    part = trained(make("untied"))
    write(tmp_path, part, ranks=2)
    (tmp_path / "actor/model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"actor/model-00001-of-00002\.safetensors is missing"):
        restore(tmp_path, [part], ALONE)
    (tmp_path / "state/engine.json").write_text("{")
    with pytest.raises(ModelError, match=r"engine\.json cannot be read"):
        restore(tmp_path, [part], ALONE)
