"""Value models of families with and without a token classifier in transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families.configs import FAMILIES as SIZES
from families.configs import build_model
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.algorithm import CriticModel
from ppo_cli.engine.base import MiniBatch
from ppo_cli.engine.checkpoint import TrainedModel, restore, stored_tensors, take_snapshot
from ppo_cli.engine.export import write_model
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.models import ValueModel, pad_token_id
from ppo_cli.engine.models.lora import adapt, merged_tensors
from ppo_cli.engine.models.policy import adapted
from ppo_cli.engine.models.value_models import (
    freeze_attention,
    load_value_model,
)
from ppo_cli.engine.ranks import ALONE
from ppo_cli.engine.saved_files import model_files
from ppo_cli.errors import ModelError
from ppo_cli.planning.findings.models import broken_models, critic_remarks
from tests.engine.adapted_models import save_adapter, trained
from tests.engine.packed_steps import make_batch, scored, settings
from tests.engine.test_checkpoint import train
from tests.marks import quick_only
from tests.settings import complete

FAMILIES = (
    "gpt2",  # transformers has a token classifier for it, and none for most others
    "olmo2",
    "opt",  # embeddings are narrower than states
    "llama4_text",  # its prefix is not that of its files
    "gpt_neox",  # its head has another name
    "phimoe",
    "mamba",
    "gemma3",  # text and images
    "qwen3_5",  # AutoModelForCausalLM would build the text part alone
)
SOME_QUICK = quick_only(FAMILIES, "gpt2", "phimoe", "gemma3")
IDS = torch.arange(3, 27)[None]


def build(folder: Path, family: str, **changes: Any) -> Path:
    """A random model with the bundled tokenizer."""
    build_model(family, **changes).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder("embedded")).save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> ValueModel:
    return load_value_model(str(folder), attn_implementation="eager", **options)


def draw_head(value_model: ValueModel) -> None:
    torch.manual_seed(1)
    nn.init.normal_(value_model.head.weight)
    nn.init.normal_(value_model.head.bias)


@torch.no_grad()
def values(value_model: ValueModel) -> Tensor:
    return value_model.values_BL(IDS)


@pytest.mark.parametrize("family", SOME_QUICK)
def test_values_are_a_head_on_what_the_output_layer_reads(tmp_path: Path, family: str) -> None:
    value_model = load(build(tmp_path, family))
    assert not values(value_model).any()
    draw_head(value_model)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    seen: list[Tensor] = []
    output_layer = model.get_output_embeddings()
    output_layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)
        expected = nn.functional.linear(seen[0], *value_model.head.parameters()).squeeze(-1)
    torch.testing.assert_close(values(value_model), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "olmo2"])  # its head there, or another's name
def test_the_head_of_a_reward_model_becomes_the_value_head(tmp_path: Path, family: str) -> None:
    config = CONFIG_MAPPING[family](**SIZES[family], num_labels=1)
    torch.manual_seed(2)
    reward_model = AutoModelForSequenceClassification.from_config(config).eval()
    nn.init.normal_(reward_model.score.weight)
    reward_model.save_pretrained(tmp_path)
    with torch.no_grad():
        score = reward_model(input_ids=IDS).logits
    assert score.any()
    torch.testing.assert_close(values(load(tmp_path))[:, -1:], score, rtol=1e-5, atol=1e-5)


def test_a_head_of_another_size_is_replaced(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["gpt2"](**SIZES["gpt2"], num_labels=3)
    AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path)
    value_model = load(tmp_path)
    assert value_model.head.weight.shape == (1, 64) and not values(value_model).any()
    (remark,) = critic_remarks(str(tmp_path))
    assert "classifier.weight has 3 labels" in remark and "Values start at 0" in remark
    config.num_labels = 1
    AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path)
    assert load(tmp_path).head.weight.any() and not [*critic_remarks(str(tmp_path))]


@pytest.mark.parametrize("family", SOME_QUICK)
def test_a_critic_comes_back_exactly(tmp_path: Path, family: str) -> None:
    value_model = load(build(tmp_path / "base", family))
    draw_head(value_model)
    model = value_model.model
    files = model_files(model, AutoTokenizer.from_pretrained(model_folder("embedded")))
    part = TrainedModel("critic", stored_tensors(model), train(model, steps=1), files, model)
    take_snapshot([part], {}, ALONE).write(tmp_path)
    expected = values(value_model)
    assert torch.equal(values(load(tmp_path / "critic")), expected)
    resumed = load(tmp_path / "base")
    part = TrainedModel(
        "critic", stored_tensors(resumed.model), train(resumed.model), {}, resumed.model
    )
    restore(tmp_path, [part], ALONE)
    assert torch.equal(values(resumed), expected)
    if type(model.config) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        reference, info = AutoModelForTokenClassification.from_pretrained(
            tmp_path / "critic", output_loading_info=True, attn_implementation="eager"
        )
        assert not any(info.values()), info
        with torch.no_grad():
            logits = reference.eval()(input_ids=IDS).logits
        torch.testing.assert_close(logits.squeeze(-1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", SOME_QUICK)
def test_a_critic_without_weights_has_the_same_tensors(tmp_path: Path, family: str) -> None:
    full, empty = load(build(tmp_path, family)).model, load(tmp_path, empty=True).model
    assert [n for n, _ in empty.named_buffers()] == [n for n, _ in full.named_buffers()]
    layout = [{n: t.shape for n, t in stored_tensors(m).items()} for m in (empty, full)]
    assert list(layout[0].items()) == list(layout[1].items())
    assert {p.device.type for p in empty.parameters()} == {"meta"}


@pytest.mark.parametrize("part", ["critic", "reference"])
@pytest.mark.parametrize("size", [281, 282])
def test_a_model_without_the_policys_tokens_is_refused(
    part: str, size: int, tmp_path: Path
) -> None:
    path = build(tmp_path, "olmo2", vocab_size=size)
    settings: dict[str, Any] = {
        "critic": {"critic": {"model": {"path": str(path)}}},
        "reference": {"ref": {"path": str(path)}, "actor": {"use_kl_loss": True}},
    }[part]
    # Embeddings for all tokens, but the ids of tokens are others.
    description = json.loads((path / "tokenizer.json").read_text())
    ids = description["model"]["vocab"]
    description["model"]["vocab"] = dict(zip(ids, reversed(ids.values()), strict=True))
    (path / "tokenizer.json").write_text(json.dumps(description))
    config = complete({"model": {"path": "embedded"}} | settings)
    tokenizer = AutoTokenizer.from_pretrained(model_folder("embedded"))
    problem = "has 282 tokens and the model .* only 281" if size == 281 else "another tokenizer"
    with pytest.raises(ModelError, match=problem) as refusal:
        LocalEngine(config, tokenizer, total_steps=1)
    # A plan refuses it too, from the files.
    assert str(refusal.value) in broken_models(config)


def test_a_full_kl_needs_a_reference_of_the_same_vocabulary(tmp_path: Path) -> None:
    """Rows that only pad the embeddings count: the KL is over all of them."""
    settings: dict[str, Any] = {
        "model": {"path": "embedded"},
        "ref": {"path": str(build(tmp_path, "olmo2", vocab_size=320))},
        "algorithm": {"kl_penalty": "full", "use_kl_in_reward": True},
    }
    config = complete(settings)
    tokenizer = AutoTokenizer.from_pretrained(model_folder("embedded"))
    with pytest.raises(ModelError, match=r"has 282 tokens and the reference .* 320") as refusal:
        LocalEngine(config, tokenizer, total_steps=1)
    assert str(refusal.value) in broken_models(config)
    sampled = complete(settings | {"algorithm": {"kl_penalty": "kl"}})
    assert not broken_models(sampled)


def test_a_model_of_images_is_refused_as_a_critic(tmp_path: Path) -> None:
    CONFIG_MAPPING["vit"]().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no causal language model of the type vit.*--critic"):
        load(tmp_path)


def test_a_critic_needs_no_embeddings_that_only_pad_those_of_the_policy(tmp_path: Path) -> None:
    policy = build(tmp_path / "policy", "olmo2", vocab_size=320)
    critic = build(tmp_path / "critic", "olmo2")
    settings = {"model": {"path": str(policy)}, "critic": {"model": {"path": str(critic)}}}
    tokenizer = AutoTokenizer.from_pretrained(model_folder("embedded"))
    LocalEngine(complete(settings), tokenizer, total_steps=1)


def test_rows_are_padded_with_a_token_that_the_model_has_an_embedding_for() -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder("embedded"))
    assert pad_token_id(tokenizer, 282) == tokenizer.pad_token_id
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert pad_token_id(tokenizer, 283) == 282
    assert pad_token_id(tokenizer, 282) == 0


@pytest.mark.parametrize("family", ["olmo2", "gemma3"])
def test_an_adapted_critic_is_exported_with_its_adapter_merged(tmp_path: Path, family: str) -> None:
    base, source, out = build(tmp_path / "base", family), tmp_path / "source", tmp_path / "out"
    value_model = adapted(load(base), adapt(CriticModel(lora_rank=2), seed=1))
    draw_head(value_model)
    save_adapter(trained(value_model.model), source, base)
    out.mkdir()
    write_model(source, out)
    merged = load(out)
    expected = dict(merged_tensors(value_model.model, lambda tensor: tensor.detach()))
    actual_tensors = stored_tensors(merged.model)
    assert actual_tensors.keys() == expected.keys()
    for name, tensor in actual_tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    torch.testing.assert_close(values(merged), values(value_model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "phimoe", "mamba", "jamba", "granitemoehybrid"])
def test_only_what_mixes_no_tokens_is_trained_with_frozen_attention(
    family: str, tmp_path: Path
) -> None:
    CONFIG_MAPPING[family](**SIZES[family]).save_pretrained(tmp_path)
    model = load_value_model(str(tmp_path), empty=True).model
    freeze_attention(model)
    mixes = re.compile(r"attn\.|attention\.|mamba\.|mixer\.|(embed\w*|wte|wpe)\.weight")
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad is not bool(mixes.search(name)), name


def test_a_model_without_attention_that_is_known_is_refused() -> None:
    model = nn.Sequential()
    model.config = SimpleNamespace(model_type="gpt2")
    with pytest.raises(ModelError, match="freeze_attention: a gpt2 model has no layer"):
        freeze_attention(model)


def test_frozen_attention_has_no_moments_and_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    config = settings(critic={"model": {"freeze_attention": True}, "cliprange_value": None})
    tokenizer = AutoTokenizer.from_pretrained(model_folder("embedded"))
    batch = make_batch(((3, 4), (2, 6)), seed=0)

    def build() -> tuple[LocalEngine, dict[str, Tensor]]:
        engine = LocalEngine(config, tokenizer, total_steps=2)
        critic = engine._learner._critic
        assert critic is not None
        return engine, dict(critic.value_model.model.named_parameters())

    def step(engine: LocalEngine) -> None:
        engine.step(MiniBatch(scored(engine.annotate(batch), 0), actor=False, critic=True))

    engine, weights = build()
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    step(engine)
    step(engine)  # with the head at zero the first step moves the head alone
    moved = {name for name, weight in weights.items() if not torch.equal(weight, before[name])}
    assert moved == {name for name in weights if not re.search("attn|embed", name)}
    engine.save(tmp_path).result()
    resumed, loaded = build()
    resumed.load(tmp_path)
    for each in (engine, resumed):
        step(each)
    assert all(torch.equal(weight, loaded[name]) for name, weight in weights.items())
    # Moments in the file: two and a count for each trained weight.
    assert len(resumed._learner._critic.optimizer.moments()) == 3 * len(moved)
