"""Supervised training of the embedded model: first how to add, then how pupils answer.

Stage one learns the sums from right answers. Stage two imitates sloppy pupils, so that the
model still can add but mostly does as they do: a policy with something to gain.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from embedded.task import PHRASES, Sum, ask_pupil

Answer = Callable[[Sum, random.Random], str]
Pairs = Sequence[tuple[int, int]]
IGNORED = -100


@dataclass(frozen=True)
class Stage:
    """One stretch of supervised training, with a cosine from `lr` to a tenth of it."""

    name: str
    steps: int
    lr: float
    batch: int
    answer: Callable[..., Any]


def right_answer(question: Sum, _: random.Random) -> str:
    """Answer without a mistake."""
    return question.answer


STAGES = (
    Stage("sums", steps=1000, lr=2e-3, batch=128, answer=right_answer),
    Stage("pupils", steps=200, lr=5e-4, batch=128, answer=ask_pupil),
)


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int, context: int) -> Qwen2ForCausalLM:
    """Make the untrained model: Qwen2's architecture, tied embeddings."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def render(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """Put a question into the chat template, up to where the answer begins."""
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


class Draws(Protocol):
    """Draws a seeded batch at a time."""

    def draw(self, size: int, answer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return input ids and labels."""
        ...


class Teacher:
    """Draws questions and turns them into padded ids and labels, one seeded batch at a time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pairs: Pairs, seed: int) -> None:
        self.tokenizer = tokenizer
        self.pairs = pairs
        self.rng = random.Random(seed)

    def draw(self, size: int, answer: Answer) -> tuple[torch.Tensor, torch.Tensor]:
        """Return input ids and labels; only answer and end token are learnt."""
        rows = []
        for _ in range(size):
            question = Sum(*self.rng.choice(self.pairs), self.rng.choice(PHRASES))
            prompt = self.tokenizer.encode(render(self.tokenizer, question.question))
            reply = self.tokenizer.encode(answer(question, self.rng))
            rows.append([(prompt, False), ([*reply, self.tokenizer.eos_token_id], True)])
        return collate(rows, int(self.tokenizer.pad_token_id))


def collate(
    rows: Sequence[Sequence[tuple[list[int], bool]]], pad: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded ids and labels of rows of spans, each with whether it is learnt."""
    width = max(sum(len(span) for span, _ in row) for row in rows)
    ids = torch.full((len(rows), width), pad)
    labels = torch.full((len(rows), width), IGNORED)
    for i, row in enumerate(rows):
        start = 0
        for span, learnt in row:
            end = start + len(span)
            ids[i, start:end] = torch.tensor(span)
            if learnt:
                labels[i, start:end] = torch.tensor(span)
            start = end
    return ids, labels


def train_stage(model: Qwen2ForCausalLM, teacher: Draws, stage: Stage) -> None:
    """Run one stage and print its loss now and then."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, stage.lr, total_steps=stage.steps, pct_start=0.05, cycle_momentum=False
    )
    began = time.monotonic()
    model.train()
    for step in range(1, stage.steps + 1):
        ids, labels = teacher.draw(stage.batch, stage.answer)
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        learnt = labels[:, 1:] != IGNORED
        loss = cross_entropy(model.lm_head(hidden[learnt]), labels[:, 1:][learnt])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == stage.steps:
            took = time.monotonic() - began
            print(f"{stage.name} {step}/{stage.steps}: loss {loss.item():.3f}, {took:.0f} s")


@torch.no_grad()
def measure(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[tuple[str, str]],
    temperature: float,
    seed: int = 0,
) -> float:
    """Return the share of right answers; temperature 0 is greedy."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    right = 0
    by_length: dict[int, list[tuple[list[int], str]]] = {}
    for question, answer in questions:
        ids = tokenizer.encode(render(tokenizer, question))
        by_length.setdefault(len(ids), []).append((ids, answer))
    for rows in by_length.values():
        ids = torch.tensor([r[0] for r in rows])
        start = ids.shape[1]
        for _ in range(5):
            logits = model(input_ids=ids).logits[:, -1]
            if temperature:
                odds = torch.softmax(logits / temperature, dim=-1)
                token = torch.multinomial(odds, 1, generator=generator)
            else:
                token = logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, token], dim=1)
        for i, (_, answer) in enumerate(rows):
            reply = ids[i, start:].tolist()
            if tokenizer.eos_token_id in reply:
                reply = reply[: reply.index(tokenizer.eos_token_id)]
                right += tokenizer.decode(reply) == answer
    return right / len(questions)
