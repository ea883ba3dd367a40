"""The model under the fit: loads clean, saves clean, and scores the same everywhere.

And the chat templates that it gets if its tokenizer has none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ppo_cli.config.models.bundled import EMBEDDED, model_folder
from ppo_cli.engine.device import Compute
from ppo_cli.engine.export import write_weights
from ppo_cli.engine.saved_files import model_files, write_files
from ppo_cli.errors import ModelError
from ppo_cli.extras.lab.fitting.training import ScoreNetwork, load_to_fit, set_template
from ppo_cli.rewards.models.base import Encoded

FLOAT32 = Compute(torch.device("cpu"), torch.float32)
EMBEDDED_FOLDER = model_folder(EMBEDDED)
SAMPLES = [Encoded((5, 6, 7, 8)), Encoded((9,)), Encoded((5, 6, 11))]


def load(path: str = EMBEDDED_FOLDER, **options: Any) -> ScoreNetwork:
    return load_to_fit(path, **{"compute": FLOAT32, "seed": 1, **options})


@torch.no_grad()
def scores(network: ScoreNetwork, samples: list[Encoded]) -> list[float]:
    return network.score_samples(samples).tolist()


def save_causal(folder: Path, tokenizer: Any, vocab: int = 300) -> str:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=vocab, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        tie_word_embeddings=False, attention_dropout=0.3,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_network(network: ScoreNetwork, folder: Path) -> None:
    folder.mkdir()
    write_files(folder, model_files(network.module, network.tokenizer))
    write_weights(network.module, folder)


def test_the_head_goes_by_the_seed() -> None:
    heads = [load(seed=seed).module.score.weight for seed in (1, 1, 2)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert heads[0].std().item() == pytest.approx(129**-0.5, rel=0.3)
    assert load(frozen=True).module.score.weight.abs().max() == 0


def test_a_batch_scores_like_its_samples() -> None:
    network = load()
    alone = [scores(network, [sample])[0] for sample in SAMPLES]
    assert scores(network, SAMPLES) == pytest.approx(alone, abs=1e-5)
    assert len({round(score, 4) for score in alone}) == 3


def test_a_frozen_body_is_read_once_and_learns_nothing() -> None:
    network = load(frozen=True)
    torch.nn.init.constant_(network.module.score.weight, 0.1)
    first = scores(network, SAMPLES)
    torch.nn.init.zeros_(network.module.base_model.embed_tokens.weight)
    assert scores(network, SAMPLES) == first  # kept, not read again
    network.score_samples(SAMPLES).sum().backward()
    grads = {name for name, p in network.module.named_parameters() if p.grad is not None}
    assert grads == {"score.weight"}


def test_the_saved_folder_is_a_plain_sequence_classifier(tmp_path: Path) -> None:
    network = load()
    save_network(network, tmp_path / "rm")
    classifier = transformers.AutoModelForSequenceClassification
    model, info = classifier.from_pretrained(tmp_path / "rm", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.num_labels == 1 and model.config.pad_token_id == network.pad_token_id
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "rm")
    assert tokenizer.chat_template == network.tokenizer.chat_template
    batch = tokenizer.pad({"input_ids": [list(s.ids) for s in SAMPLES]}, return_tensors="pt")
    with torch.no_grad():
        reference = model.eval()(**batch).logits[:, 0]
    assert reference.tolist() == pytest.approx(scores(network, SAMPLES), abs=1e-5)
    resumed = load(str(tmp_path / "rm"), seed=9)
    assert torch.equal(resumed.module.score.weight, network.module.score.weight)
    (note,) = resumed.notes
    assert note == f"{tmp_path / 'rm'} already has a score head: the fit continues from it."


def test_the_head_of_a_value_model_is_not_taken(tmp_path: Path, tokenizer: Any) -> None:
    path = save_causal(tmp_path / "lm", tokenizer)
    critic = transformers.AutoModelForTokenClassification.from_pretrained(path, num_labels=1)
    torch.nn.init.constant_(critic.score.weight, 7.0)
    critic.save_pretrained(tmp_path / "critic")
    tokenizer.save_pretrained(tmp_path / "critic")
    head = load(str(tmp_path / "critic")).module.score
    assert head.weight.abs().max() < 2 and head.bias is None


def test_a_network_keeps_its_dropout_and_is_fitted_without(tmp_path: Path, tokenizer: Any) -> None:
    network = load(save_causal(tmp_path / "lm", tokenizer))
    assert network.module.config.attention_dropout == 0.3
    assert not any(module.training for module in network.module.modules())


@pytest.mark.parametrize("vocab", [260, 300])
def test_a_new_pad_token(vocab: int, tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    """Padding that is the end-of-text token would move the place where others read the score."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    path = save_causal(tmp_path / "lm", tokenizer, vocab)
    network = load(path)
    assert network.tokenizer.pad_token != tokenizer.eos_token and network.pad_token_id == 260
    assert network.module.config.pad_token_id == 260
    rows = network.module.get_input_embeddings().weight.shape[0]
    assert rows == max(vocab, 261) == network.module.config.vocab_size
    save_network(network, tmp_path / "rm")
    resumed = load(str(tmp_path / "rm"))
    assert scores(resumed, SAMPLES) == pytest.approx(scores(network, SAMPLES), abs=1e-6)


def test_an_unused_unknown_token_pads(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()
    tokenizer.unk_token = "<pad>"
    tokenizer.pad_token = tokenizer.eos_token
    network = load(save_causal(tmp_path / "lm", tokenizer))
    assert network.tokenizer.pad_token == "<pad>" and network.pad_token_id == 259


def test_the_longest_sample() -> None:
    for expected, length in ((None, 2048), (4096, 4096)):
        assert load(max_length=expected).max_length == length


def test_what_is_no_model_is_told(tmp_path: Path, tokenizer: Any) -> None:
    path = save_causal(tmp_path / "lm", tokenizer)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, num_labels=3)
    model.save_pretrained(tmp_path / "three")
    tokenizer.save_pretrained(tmp_path / "three")
    with pytest.raises(ModelError, match=r"score.weight \[3, 16\] instead of \[1, 16\]"):
        load(str(tmp_path / "three"))
    (tmp_path / "lm" / "model.safetensors").write_bytes(b"\0" * 50)
    with pytest.raises(ModelError, match="is damaged or cut off"):
        load(path)


CHAT = [
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye?"},
]
JINJA = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"


def render(tokenizer: Any, **options: Any) -> str:
    return str(tokenizer.apply_chat_template(CHAT, tokenize=False, **options))


def test_without_a_template_there_is_one_sentence(make_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(ModelError, match=r"base has no chat template.*--template: transcript"):
        set_template(make_tokenizer(None), "base", None)


def test_templates_by_name(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(JINJA)
    set_template(tokenizer, "base", None)
    assert render(tokenizer) == "[Hi?][Hello.][Bye?]"
    set_template(tokenizer, "base", "chatml")
    assert render(tokenizer).startswith("<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant")
    set_template(tokenizer, "base", "transcript")
    text = "\n\nHuman: Hi?\n\nAssistant: Hello.\n\nHuman: Bye?"
    assert render(tokenizer) == text + "<|im_end|>"
    assert render(tokenizer, add_generation_prompt=True) == text + "\n\nAssistant: "


def test_a_file_and_a_text_are_taken(make_tokenizer: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(JINJA)
    for expected in (str(file), JINJA):
        tokenizer = make_tokenizer(None)
        set_template(tokenizer, "base", expected)
        assert render(tokenizer) == "[Hi?][Hello.][Bye?]"
