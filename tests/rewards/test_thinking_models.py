"""Families of thinking models: their prompts, texts, answers and lengths; no thought is scored."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AddedToken

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.data_sets.table import load_prompts
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.samplers.text import decode_text
from ppo_cli.records import Prompt, Rollout, Scored
from ppo_cli.report.metrics import score_metrics
from ppo_cli.rewards.judge.prompt import visible_text
from ppo_cli.rewards.rule_reward import RuleReward
from ppo_cli.rewards.rules import RULES
from ppo_cli.thoughts import count_tokens
from tests.rewards.thinking_models import CORPUS, RIGHT, THINKERS, WRONG, Reply, Thinker

ANSWERING = ("number", "arithmetic", "gsm8k", "math", "contains")


def rollout_of(reply: Reply, truth: str = RIGHT) -> Rollout:
    prompt = Prompt("0", "What is 6 times 7?", (), "", (1,), "", truth, {}, reply.opened)
    ends = "length" if reply.cut else "stop"
    return Rollout(prompt, 0, (1,), np.zeros(1, np.float32), reply.text, ends)  # type: ignore[arg-type]


def tokenizer_of(thinker: Thinker) -> Any:
    """The bundled tokenizer with a family's template and tokens."""
    tokenizer = load_tokenizer(model_folder("embedded"))
    special = [AddedToken(word, special=True) for word in (*thinker.special, thinker.end)]
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens([AddedToken(word, special=False) for word in thinker.plain])
    tokenizer.chat_template = thinker.template
    return tokenizer


@pytest.mark.parametrize("thinker", THINKERS, ids=lambda family: family.name)
def test_prompt_text_and_lengths_of_a_family(thinker: Thinker, tmp_path: Path) -> None:
    tokenizer, file = tokenizer_of(thinker), tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "Is <think> a tag? 6 * 7 = ?"}))
    end_ids = frozenset({tokenizer.convert_tokens_to_ids(thinker.end)})
    decode = partial(decode_text, tokenizer, end_ids=end_ids)
    for arguments, opened in thinker.opened:
        loaded = load_prompts([str(file)], tokenizer, max_prompt_length=500,
                             template_arguments=arguments)  # fmt: skip
        assert (arguments, loaded.prompts[0].opened) == (arguments, opened)
    thought = f"{'' if thinker.opened[0][1] else thinker.opening}I think 41.{thinker.closing}"
    parts = [tokenizer(text)["input_ids"] for text in (thought, f"It is 42.{thinker.end}")]
    ids, opened = [*parts[0], *parts[1]], thinker.opened[0][1]
    text = decode(ids, ())
    assert text == f"{thought}It is 42."
    count = partial(count_tokens, opened, decode=decode)
    assert count(text, ids, cut=False) == len(parts[0])
    assert count(decode(parts[0], ()), parts[0], cut=False) == len(parts[0])
    begun = parts[0][: len(parts[0]) // 2]
    assert count(decode(begun, ()), begun, cut=True) == len(begun)
    alone = tokenizer("42")["input_ids"]
    assert count(decode(alone, ()), alone, cut=False) == (len(alone) if opened else 0)


def test_only_answers_are_left_of_replies() -> None:
    wrong = [
        (r.of.name, r.shape, rollout_of(r).answer)
        for r in CORPUS
        if rollout_of(r).answer != r.answer.strip()
    ]
    assert wrong == []


@pytest.mark.parametrize("rule", ANSWERING)
def test_no_thought_is_scored_as_an_answer(rule: str) -> None:
    reward, wrong = RuleReward(RULES[rule]), []
    for reply in CORPUS:
        for truth, right in ((WRONG, False), (RIGHT, bool(reply.answer))):
            if rule == "gsm8k" and f"#### {RIGHT}" not in reply.answer:
                right = False
            score = reward.submit(rollout_of(reply, truth)).result(10)
            if score.value != float(right) or WRONG in str(score.info["extracted"]):
                wrong.append((reply.of.name, reply.shape, truth, score.value))
            if not reply.answer and "no answer" not in score.reason and rollout_of(reply).unclosed:
                wrong.append((reply.of.name, reply.shape, score.reason))
    reward.close()
    assert wrong == []


def test_a_judge_reads_answers_alone_unless_it_is_to_see_thoughts() -> None:
    for reply in CORPUS:
        rollout = rollout_of(reply)
        assert WRONG not in visible_text(rollout.answer)
        if WRONG in reply.text:
            assert WRONG in visible_text(rollout.full_text, "keep")


def test_the_format_is_one_closed_thought_and_an_answer_in_its_tags() -> None:
    reward = RuleReward(RULES["format"])
    for thinker in THINKERS:
        opened = thinker.opened[0][1]
        start = "" if opened else thinker.opening
        for text, fits in [
            (f"{start}a{thinker.closing}<answer>b</answer>", 1.0),
            (f"{start}a{thinker.closing}b", 0.0),
            (f"{start}a<answer>b</answer>", 0.0),
            (f"{start}a{thinker.closing}<answer>b</answer>{thinker.opening}", 0.0),
            ("<answer>b</answer>", 0.0),
        ]:
            reply = Reply(thinker, "", text, "b", opened=opened)
            assert (thinker.name, text, reward.submit(rollout_of(reply)).result(5).value) == (
                thinker.name, text, fits,
            )  # fmt: skip


def test_lengths_and_open_thoughts_are_metrics() -> None:
    def scored(text: str, tokens: int, thought: int) -> Scored:
        prompt = Prompt("0", "", (), "", (1,), opened="<think>\n")
        ids, logprobs = tuple(range(tokens)), np.zeros(tokens, np.float32)
        sample = Rollout(prompt, 0, ids, logprobs, text, "stop", thought_tokens=thought)
        return Scored(sample, RuleReward(RULES["repetition"]).submit(sample).result(5))

    metrics = score_metrics([scored("a</think>4", 9, 6), scored("a a", 12, 12)], "val/")
    assert {k: v for k, v in metrics.items() if "thought" in k or "answer_length" in k} == {
        "val/thought/length_mean": 9.0, "val/thought/length_max": 12.0, "val/thought/share": 1.0,
        "val/thought/unclosed_share": 0.5, "val/answer_length/mean": 3.0,
    }  # fmt: skip
    plain = rollout_of(Reply(THINKERS[0], "", "42", "42"))
    score = RuleReward(RULES["repetition"]).submit(plain).result(5)
    assert not any("thought" in name for name in score_metrics([Scored(plain, score)]))
