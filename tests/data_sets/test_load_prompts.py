"""Prompt sets: uids, limits, counts, notes, fingerprints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.data_sets.prompts import PromptSet, fingerprint
from ppo_cli.data_sets.table import load_prompts
from ppo_cli.errors import DataError
from ppo_cli.run.assemble import load_prompt_sets
from tests.data_sets.lines import write_rows
from tests.loop.scripted import Screen
from tests.settings import complete

# Options of `load_prompts` that the settings call by another name.
TRANSLATED = {"filter_overlong", "template_arguments"}
FRAME = len("user\n\nassistant\n") + 4


def asks(*texts: str) -> list[dict[str, Any]]:
    return [{"prompt": text, "ground_truth": text, "data_source": "s"} for text in texts]


def load(tokenizer: Any, *sources: str, limit: int = 1000, **options: Any) -> PromptSet:
    return load_prompts(sources, tokenizer, max_prompt_length=limit, **options)


def refusal(tokenizer: Any, *sources: str, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(tokenizer, *sources, **options)
    return str(caught.value)


def test_a_prompt_holds_all_of_its_row(tokenizer: Any, tmp_path: Path) -> None:
    turns = (("user", "first"), ("assistant", "yes?"), ("user", "1+1?"))
    messages = [{"role": role, "content": content} for role, content in turns]
    row = {"prompt": messages, "reward_model": {"ground_truth": "2"}, "data_source": "sums"}
    file = write_rows(tmp_path / "a.jsonl", row | {"extra_info": {"index": 9}})
    (prompt,) = load(tokenizer, file).prompts
    assert (prompt.uid, prompt.text, prompt.data_source) == ("a:1", "1+1?", "sums")
    assert (prompt.messages, prompt.ground_truth) == (tuple(messages), "2")
    assert prompt.extra_info == {"index": 9}
    assert tokenizer.decode(prompt.token_ids) == prompt.rendered
    assert prompt.rendered.endswith("1+1?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("files", "uids"),
    [
        (("a.jsonl", "b.jsonl.gz"), ["a:1", "b:1"]),
        (("x/train.jsonl", "y/train.jsonl"), ["x/train.jsonl:1", "y/train.jsonl:1"]),
        (("train.jsonl", "train.ndjson"), ["train.jsonl:1", "train.ndjson:1"]),
        (("train.jsonl", "train.jsonl"), ["train.jsonl:1", "train.jsonl#2:1"]),
        (("a.jsonl", "x/b.jsonl", "y/b.jsonl"), ["a:1", "x/b.jsonl:1", "y/b.jsonl:1"]),
        (("a/d/t.jsonl", "b/d/t.jsonl"), ["a/d/t.jsonl:1", "b/d/t.jsonl:1"]),
    ],
)
def test_uids_differ_over_files_of_one_name(
    tokenizer: Any, tmp_path: Path, files: tuple[str, ...], uids: list[str]
) -> None:
    paths = [write_rows(tmp_path / name, *asks("q")) for name in files]
    prompt_set = load(tokenizer, *paths)
    assert [p.uid.removeprefix(f"{tmp_path}/") for p in prompt_set.prompts] == uids
    assert prompt_set.notes == ()


def test_overlong_names_the_row_the_lengths_and_three_mends(tokenizer: Any, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", *asks("a", "b" * 30, "c" * 40))
    message = refusal(tokenizer, file, limit=40)
    begin = f"{file} line 2: the prompt has {FRAME + 30} tokens, the limit is 40 "
    assert message.startswith(begin)
    for fragment in (
        f"(2 such rows, the longest has {FRAME + 40})", "--max_prompt_length",
        "filter_overlong_prompts=true", "data.truncation=left",
    ):  # fmt: skip
        assert fragment in message
    file_b = write_rows(tmp_path / "b.jsonl", *asks("b" * 30))
    assert load(tokenizer, file_b, limit=FRAME + 30).notes == (), "just the limit fits"
    assert "the limit is" in refusal(tokenizer, file_b, limit=FRAME + 29)
    assert "(the longest has 50)" in refusal(tokenizer, file_b, limit=9, filter_overlong=True)


def test_filter_drops_and_counts(tokenizer: Any, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", *asks("a", "b" * 30, "c"))
    none = write_rows(tmp_path / "b.jsonl", *asks("b" * 99))
    prompt_set = load(tokenizer, file, none, limit=40, filter_overlong=True, truncation="left")
    assert [p.uid for p in prompt_set.prompts] == ["a:1", "a:3"]
    assert prompt_set.notes == ("2 of 4 prompts are longer than 40 tokens and were dropped.",)


@pytest.mark.parametrize(("side", "expected"), [("left", "end"), ("right", "start")])
def test_truncation_keeps_one_side(
    tokenizer: Any, tmp_path: Path, side: str, expected: str
) -> None:
    file = write_rows(tmp_path / "a.jsonl", *asks("abcdefgh" * 5, "x"))
    uncut = load(tokenizer, file).prompts[0]
    prompt_set = load(tokenizer, file, limit=30, truncation=side)
    ids = uncut.token_ids[-30:] if side == "left" else uncut.token_ids[:30]
    assert prompt_set.prompts[0].token_ids == ids
    assert prompt_set.prompts[0].rendered == tokenizer.decode(ids)
    assert prompt_set.prompts[0].text == uncut.text
    assert prompt_set.notes == (
        f"1 of 2 prompts were cut to 30 tokens; their {expected} was kept.",
    )


@pytest.mark.parametrize(("limit", "uids"), [
    (-1, ["a:1", "a:2", "b:1", "b:2"]), (1, ["a:1"]), (2, ["a:1", "a:2"]),
    (3, ["a:1", "a:2", "b:1"]), (99, ["a:1", "a:2", "b:1", "b:2"]),
])  # fmt: skip
def test_the_first_samples_over_all_files(
    tokenizer: Any, tmp_path: Path, limit: int, uids: list[str]
) -> None:
    files = [write_rows(tmp_path / f"{name}.jsonl", *asks("1", "2")) for name in "ab"]
    assert [p.uid for p in load(tokenizer, *files, max_samples=limit).prompts] == uids


def test_no_prompts_at_all_is_told(tokenizer: Any, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", *asks("1"))
    assert "Name some with --train_files" in refusal(tokenizer)
    assert "The sample limit 0 leaves no prompts" in refusal(tokenizer, file, max_samples=0)


def test_episodes_are_prompts_without_text(tokenizer: Any, tmp_path: Path) -> None:
    prompts = load(tokenizer, "episodes:3", max_samples=2, system_prompt="Play.").prompts
    assert [p.uid for p in prompts] == ["episodes:1", "episodes:2"]
    assert [p.extra_info["task"] for p in prompts] == [0, 1]
    assert {(p.text, p.token_ids, p.messages[0]["content"]) for p in prompts} == {("", (), "Play.")}
    assert "no such file" in refusal(tokenizer, "episodes:0")


def test_control_words_and_other_columns_are_noted(tokenizer: Any, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", {"question": "a"}, {"question": "b<|im_end|>"})
    assert load(tokenizer, file).notes == (
        "a.jsonl: the prompt is read from column 'question'.",
        "1 prompt with text that the model reads as control tokens, first "
        f"{file} line 2: <|im_end|>.",
    )


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ({}, {"truncation": "left", "system_prompt": "Be brief."}),
        ({"filter_overlong_prompts": True},
         {"filter_overlong": True, "apply_chat_template": False}),
        ({"apply_chat_template_kwargs": {"bos_token": "X"}},
         {"truncation": "right", "template_arguments": {"bos_token": "X"}}),
    ],
)  # fmt: skip
def test_a_run_reads_both_of_its_sets_by_its_settings(
    tokenizer: Any, tmp_path: Path, data: dict[str, Any], options: dict[str, Any]
) -> None:
    rows = [{"q": "more " * 60 * (n % 2) + str(n), "kind": f"k{n}"} for n in range(8)]
    files = [write_rows(tmp_path / name, *rows) for name in ("train.jsonl", "val.jsonl")]
    data_settings = {"train_files": files[:1], "val_files": files[1:], "prompt_key": "q"}
    data_settings |= {"reward_fn_key": "kind", "max_prompt_length": 50, "train_max_samples": 5}
    same = {name: options[name] for name in options if name not in TRANSLATED}
    data_settings |= {"val_max_samples": 3} | data | same
    config = complete({"data": data_settings})
    screen = Screen()
    prompt_set = load_prompt_sets(config, tokenizer, screen)
    options |= {"limit": 50, "prompt_key": "q", "source_key": "kind"}
    expected = [
        load(tokenizer, file, max_samples=limit, **options)
        for file, limit in zip(files, (5, 3), strict=True)
    ]
    held_out = [replace(prompt, validation=True) for prompt in expected[1].prompts]
    assert prompt_set == (expected[0].prompts, held_out)
    assert screen.notes == [note for file_b in expected for note in file_b.notes] != []


def test_the_fingerprint_sees_what_matters(tokenizer: Any, tmp_path: Path) -> None:
    prompts = load(tokenizer, write_rows(tmp_path / "a.jsonl", *asks("1", "2"))).prompts
    first, second = prompts
    changes: list[dict[str, Any]] = [
        {"ground_truth": "3"}, {"data_source": "t"}, {"uid": "b:2"},
        {"token_ids": second.token_ids[1:]},
    ]  # fmt: skip
    others = [(second, first), (first,), *((first, replace(second, **c)) for c in changes)]
    prints = {fingerprint(prompts), *(fingerprint(other) for other in others)}
    assert len(prints) == 1 + len(others)
    elsewhere = load(tokenizer, write_rows(tmp_path / "b" / "a.jsonl", *asks("1", "2"))).prompts
    assert fingerprint(prompts) == fingerprint(elsewhere)


def test_a_template_that_drops_the_system_prompt_is_noted(
    make_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    file = write_rows(tmp_path / "a.jsonl", *asks("1+1?"))
    users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    for template, dropped in ((users, True), ("{{ messages[0].content }}", False)):
        notes = load(make_tokenizer(template=template), file, system_prompt="Be brief.").notes
        assert any("leaves --system_prompt out" in note for note in notes) is dropped
