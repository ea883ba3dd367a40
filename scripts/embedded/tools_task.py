"""The game of the embedded tools model: a product that only the tool knows.

The prompt asks for the product of two two-digit numbers. An episode has two turns: a call of the
tool `multiply`, then the answer. Pupils know the game but are sloppy: they guess without a call,
write calls that cannot be read, swap the digits of a number, and mostly round the result. After an
error they try again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from embedded.task import DATA_SOURCE, TRAIN_ROWS, split_pairs
from embedded.warm_up import Stage, collate

PHRASES = (
    "What is {a} * {b}?",
    "{a} * {b} = ?",
    "Multiply {a} and {b}.",
    "How much is {a} times {b}?",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CALL = '<tool_call>\n{{"name": "{name}", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'
# What the tools environment answers to a call that cannot be read, and to an unknown tool.
NOT_JSON = (
    "Error: The tool call is not valid JSON (Expecting ',' delimiter at character 54). "
    'Write < tool_call>{"name": "…", "arguments": {…}}< /tool_call>.'
)
UNKNOWN = "Error: there is no tool 'times'. The tools are: multiply."
REPLY = (
    "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)

# How often a pupil makes each mistake.
GUESSES = 0.10
DROPS_BRACE = 0.10
RENAMES_TOOL = 0.08
SWAPS_DIGITS = 0.15
ROUNDS = 0.60
MAX_TURNS = 3

# What the policy writes and what the tool replies, in turns; the reply to the last one is "".
Turns = list[tuple[str, str]]
Player = Callable[[int, int, random.Random], Turns]


def build_rows(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the prompt rows for PPO: training and validation."""
    splits = split_pairs(seed)
    rng = random.Random(f"{seed} products")
    train, validation = rng.sample(splits.warm_up, TRAIN_ROWS), splits.validation
    return [_row(a, b, rng) for a, b in train], [_row(a, b, rng) for a, b in validation]


def _row(a: int, b: int, rng: random.Random) -> dict[str, Any]:
    return {
        "prompt": rng.choice(PHRASES).format(a=a, b=b),
        "ground_truth": str(a * b),
        "data_source": DATA_SOURCE,
    }


def play_well(a: int, b: int, _: random.Random) -> Turns:
    """Call the tool and repeat its result."""
    return [(CALL.format(name="multiply", a=a, b=b), str(a * b)), (str(a * b), "")]


def play_as_pupil(a: int, b: int, rng: random.Random) -> Turns:
    """Play with mistakes; an unreadable call is followed by another attempt."""
    turns: Turns = []
    while len(turns) < MAX_TURNS:
        luck = rng.random()
        if luck < GUESSES:
            return [*turns, (str(rng.randrange(100, 10_000)), "")]
        x, y = a, b
        if rng.random() < SWAPS_DIGITS:
            x = int(str(a)[::-1])
        call = CALL.format(name="multiply", a=x, b=y)
        if luck < GUESSES + DROPS_BRACE:
            turns.append((call.replace("}}", "}"), NOT_JSON))
        elif luck < GUESSES + DROPS_BRACE + RENAMES_TOOL:
            turns.append((CALL.format(name="times", a=x, b=y), UNKNOWN))
        else:
            result = str(x * y)
            answer = f"{result[:-1]}0" if rng.random() < ROUNDS else result
            return [*turns, (call, result), (answer, "")]
    return turns


def list_texts(seed: int) -> list[str]:
    """Return texts from which the tokenizer learns its words."""
    rng = random.Random(f"{seed} texts")
    texts = ["system", "user", "assistant", "Tools: multiply(a, b)"] * 200
    for _ in range(400):
        for turn in play_as_pupil(rng.randint(10, 99), rng.randint(10, 99), rng):
            texts += turn
    return texts


class ToolsTeacher:
    """Draws episodes and turns them into padded ids and labels; only the policy's are learnt."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, pairs: list[tuple[int, int]], seed: int
    ) -> None:
        self.tokenizer = tokenizer
        self.pairs = pairs
        self.rng = random.Random(f"{seed} episodes")

    def draw(self, size: int, player: Player) -> tuple[torch.Tensor, torch.Tensor]:
        """Return input ids and labels of so many episodes."""
        rows = []
        for _ in range(size):
            a, b = self.rng.choice(self.pairs)
            prompt = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": self.rng.choice(PHRASES).format(a=a, b=b)}],
                tools=[TOOL],
                add_generation_prompt=True,
                return_dict=False,
            )
            spans = [(prompt, False)]
            for text, reply in player(a, b, self.rng):
                ids = self.tokenizer.encode(text)
                spans.append(([*ids, self.tokenizer.eos_token_id], True))
                if reply:
                    spans.append((self.tokenizer.encode(REPLY.format(reply)), False))
            rows.append(spans)
        return collate(rows, int(self.tokenizer.pad_token_id))


STAGES = (
    Stage("tools", steps=800, lr=2e-3, batch=64, answer=play_well),
    Stage("tools, pupils", steps=160, lr=5e-4, batch=64, answer=play_as_pupil),
)
