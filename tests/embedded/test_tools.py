"""The tools model: its files are what the script makes, and its template is Qwen's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ppo_cli
from ppo_cli.config.models.bundled import EMBEDDED_TOOLS, model_folder, prompt_files

TOOLS = Path(ppo_cli.__file__).parent / "embedded" / "tools"


def read_rows(name: Any) -> list[dict[str, Any]]:
    (file,) = prompt_files([EMBEDDED_TOOLS], name)
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


def numbers(row: dict[str, Any]) -> tuple[int, ...]:
    words = row["prompt"].replace("?", " ").replace(".", " ").split()
    return tuple(int(word) for word in words if word.isdigit())


def test_all_files_together_are_small() -> None:
    assert sum(f.stat().st_size for f in TOOLS.rglob("*") if f.is_file()) < 2_000_000


def test_no_pair_of_numbers_is_in_both_splits() -> None:
    train, validation = read_rows("train"), read_rows("val")
    assert (len(train), len(validation)) == (2400, 256)
    for row in (*train, *validation):
        a, b = numbers(row)
        assert row["ground_truth"] == str(a * b)
    assert not {frozenset(numbers(r)) for r in train} & {frozenset(numbers(r)) for r in validation}


def test_an_episode_is_rendered_as_qwen_writes_it() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder(EMBEDDED_TOOLS))
    function = {"name": "multiply", "arguments": {"a": 12, "b": 34}}
    schema = {"name": "multiply", "parameters": {"properties": {"a": {}, "b": {}}}}
    text = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "12 * 34 = ?"},
            {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": "408"},
            {"role": "tool", "content": "409"},
        ],
        tools=[{"type": "function", "function": schema}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == (
        "<|im_start|>system\nTools: multiply(a, b)<|im_end|>\n"
        "<|im_start|>user\n12 * 34 = ?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "multiply", "arguments": {"a": 12, "b": 34}}'
        "\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n408\n</tool_response>\n"
        "<tool_response>\n409\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(tokenizer.encode(text)) == text
