"""HH-RLHF: dialogues with a chosen and a rejected last reply, to pairs and to prompts.

The pairs, as they were written, are for `ppo reward fit`; the prompts, each once, for `ppo train`.
"""

from __future__ import annotations

from typing import Any

from ppo_cli.data_sets.files import Record, split_sources
from ppo_cli.data_sets.messages import is_transcript, split_transcript
from ppo_cli.data_sets.problems import Built, Place, RowError, RowProblem, raise_problems
from ppo_cli.data_sets.rows import read_records, read_source
from ppo_cli.records import Message

HUB = "Anthropic/hh-rlhf"
SIDES = ("chosen", "rejected")
# The published files hold a few dialogues that end with the human, or part early.
MOST_ODD = 0.01


def build_hh_rlhf(source: str) -> Built:
    """Return prompts and pairs of each split, read from a file, a folder or the hub."""
    splits: dict[str, list[dict[str, Any]]] = {}
    odd: list[RowProblem] = []
    for split, files in split_sources(source).items():
        found: list[tuple[Record, tuple[Message, ...]]] = []
        problems: list[RowProblem] = []
        for file in files:
            good, bad = read_records(read_source(file), read_pair)
            found += good
            problems += bad
        if len(problems) > MOST_ODD * (len(found) + len(problems)):
            raise_problems(problems)
        odd += problems
        pairs = [{side: record[side] for side in SIDES} for record, _ in found]
        prompts = [prompt for _, prompt in found]
        splits |= {split: prompt_rows(prompts, split), f"pairs_{split}": pairs}
    return Built(splits, tuple(odd))


def read_pair(place: Place, record: Record) -> tuple[Record, tuple[Message, ...]]:
    """Return two dialogues that differ in the last reply, and what stands before it."""
    chosen, rejected = (read_dialogue(record.get(column), column) for column in SIDES)
    if chosen[:-1] != rejected[:-1]:
        raise RowError("rejected", "is another dialogue than `chosen`, not another last reply")
    return record, chosen[:-1]


def read_dialogue(value: Any, column: str) -> tuple[Message, ...]:
    """Split a transcript that ends with a reply to something."""
    if not isinstance(value, str) or not is_transcript(value):
        raise RowError(column, 'is no transcript "\\n\\nHuman: …\\n\\nAssistant: …"')
    messages = split_transcript(value)
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise RowError(column, "does not end with a reply of the assistant")
    return messages


def prompt_rows(prompts: list[tuple[Message, ...]], split: str) -> list[dict[str, Any]]:
    """Return each prompt once, in verl's layout; a reward model or a judge scores the replies."""
    distinct = {str(prompt): prompt for prompt in prompts}
    return [
        {
            "data_source": HUB,
            "prompt": [dict(message) for message in prompt],
            "ability": "alignment",
            "reward_model": {"style": "model", "ground_truth": ""},
            "extra_info": {"split": split, "index": index},
        }
        for index, prompt in enumerate(distinct.values())
    ]
