"""Control tokens of the common families become plain text, and other text stays as it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_cli.rewards.control_tokens import break_control_tokens
from ppo_cli.rewards.models.protocols import begins_with_bos, endpoint

CONTROL = [
    "<|im_end|>", "<|im_start|>", "<|eot_id|>", "<|start_header_id|>", "<|endoftext|>", "<s>",
    "</s>", "<bos>", "<eos>", "<pad>", "<unk>", "<start_of_turn>", "<end_of_turn>", "[INST]",
    "[/INST]", "<<SYS>>", "<</SYS>>", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "[gMASK]", "<sop>",
    "<｜User｜>", "<｜end▁of▁sentence｜>", "<|turn>", "<turn|>", "<extra_id_7>", "<unused3>",
    "<|reserved_special_token_5|>", "[TOOL_CALLS]", "[unused12]", "<|EOT|>", "<S>",
]  # fmt: skip


def test_control_tokens_are_broken() -> None:
    for token in CONTROL:
        text, count = break_control_tokens(f"before{token}after {token}")
        assert count >= 2 and token not in text
        assert text.replace(" ", "") == f"before{token}after{token}"


@pytest.mark.parametrize(
    "text",
    [
        "", "1 < 2 and 3 > 2", "if a<b and c>d:", "x = [1, 2][0]", "<div>|</div>", "a | b > c",
        "<think>hm</think>", "vector<int> v; v[INSTANCE];", "f <| g |> h", "std::cout << SYS;",
    ],
)  # fmt: skip
def test_other_text_is_left_alone(text: str) -> None:
    assert break_control_tokens(text) == (text, 0)


@given(st.lists(st.sampled_from([*CONTROL, "<", "|", ">", "[", "/", "im_end", " ", "s", "a"])))
def test_nothing_comes_together_that_was_not_there(pieces: list[str]) -> None:
    text, _ = break_control_tokens("".join(pieces))
    assert not [token for token in CONTROL if token in text]
    assert text.replace(" ", "") == "".join(pieces).replace(" ", "")
    assert break_control_tokens(text) == (text, 0)


def test_a_bos_is_seen_at_the_start_only() -> None:
    assert begins_with_bos("<s>[INST]") and begins_with_bos("<|begin_of_text|>x")
    assert not begins_with_bos("x<s>") and not begins_with_bos("")


@pytest.mark.parametrize(
    ("address", "path", "url"),
    [
        ("http://h:1", "/classify", "http://h:1/classify"),
        ("http://h:1/", "/classify", "http://h:1/classify"),
        ("http://h:1/classify/", "/classify", "http://h:1/classify"),
        ("http://h:1/pooling", "/classify", "http://h:1/classify"),
        ("http://h:1/v1", "/classify", "http://h:1/classify"),
        ("https://h/rm/v1/classify?a=b", "/classify", "https://h/rm/v1/classify?a=b"),
        ("https://h/rm", "/get_reward", "https://h/rm/get_reward"),
    ],
)
def test_addresses_are_completed(address: str, path: str, url: str) -> None:
    assert endpoint(address, path, drop=("/v1", "/v1/models", "/pooling")) == url
