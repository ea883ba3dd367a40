"""What all reward models share: scoring in batches, and the self-test.

A model is a tokenizer, a format for samples, and a network. Samples of similar length form a batch
within a token budget, which is lowered when memory runs out. In the self-test before a run, good
answers must score above bad ones; local and served models are tested with the same pairs and the
same rule.

Legend: B samples, L tokens (right-padded), O objectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ppo_cli.errors import RewardError, is_out_of_memory, shorten
from ppo_cli.records import Message, Prompt
from ppo_cli.rewards.base import Tell


@dataclass(frozen=True)
class Encoded:
    """One sample as token ids; `type_ids` for models that mark question and answer with them."""

    ids: tuple[int, ...]
    type_ids: tuple[int, ...] | None = None


class TooLong(Exception):
    """A sample that is too long even after cutting the prompt; the message has the numbers."""


class Format(Protocol):
    """Encodes a conversation and a response in the form that a model was trained on.

    `prompts_cut` counts the prompts that were shortened to `max_length` tokens.
    """

    prompts_cut: int
    max_length: int

    def encode(self, messages: Sequence[Message], response: str) -> Encoded:
        """Encode one sample; raises TooLong. Control tokens in `response` stay plain text."""
        ...


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of a batch: `score_B` in float32, and optional named objectives."""

    score_B: Tensor
    objectives: Mapping[str, Tensor] = field(default_factory=dict)  # name -> (B,)


class Network(Protocol):
    """A loaded reward model: body in its dtype, head in float32, eval mode, no dropout."""

    module: nn.Module

    def score(self, ids_BL: Tensor, mask_BL: Tensor, type_ids_BL: Tensor | None = None) -> Scores:
        """Score a batch padded on either side; pooling uses the mask, never the pad id."""
        ...


@dataclass(frozen=True)
class LoadedModel:
    """A reward model in memory.

    `adapter` names the way it is read, and `reason` why it was chosen, in one sentence.
    `max_length` is the model's limit in tokens; `pad_token_id` is any valid token.
    """

    adapter: str
    reason: str
    network: Network
    tokenizer: Any
    max_length: int
    pad_token_id: int


@dataclass(frozen=True)
class Row:
    """The score of one sample, and its named objectives."""

    score: float
    objectives: dict[str, float]


@dataclass
class Budget:
    """The limit of a batch in tokens, padding included; lowered when memory runs out."""

    tokens: int

    def lower_to(self, tokens: int) -> None:
        """Lower the limit, because a larger batch did not fit into memory."""
        self.tokens = min(self.tokens, tokens)


@dataclass(frozen=True)
class Batch:
    """A scored batch: indices of its samples, their rows, tokens without and with padding."""

    indices: tuple[int, ...]
    rows: tuple[Row, ...]
    tokens: int
    padded: int


def plan_batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Group neighbours into batches of at most `tokens`; a longer sample is a batch by itself.

    The lengths must be sorted, the longest first, so that the first batch is the largest.
    """
    batches: list[list[int]] = []
    for index in range(len(lengths)):
        batch = batches[-1] if batches else []
        # The first sample is the longest of its batch, so all rows are padded to its length.
        if batch and (len(batch) + 1) * lengths[batch[0]] <= tokens:
            batch.append(index)
        else:
            batches.append([index])
    return batches


def pad(
    samples: Sequence[Encoded], pad_token_id: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Right-pad samples to ids, mask and type ids of one shape."""
    # Padding is masked, so its id does not matter.
    shape = len(samples), max(len(sample.ids) for sample in samples)
    ids_BL = torch.full(shape, pad_token_id, dtype=torch.long)
    mask_BL = torch.zeros(shape, dtype=torch.bool)
    types_BL = torch.zeros(shape, dtype=torch.long)
    for i, sample in enumerate(samples):
        ids_BL[i, : len(sample.ids)] = torch.tensor(sample.ids)
        mask_BL[i, : len(sample.ids)] = True
        if sample.type_ids is not None:
            types_BL[i, : len(sample.ids)] = torch.tensor(sample.type_ids)
    # A tokenizer marks types in all samples or in none, so the first one answers for the batch.
    typed = samples[0].type_ids is not None
    return ids_BL.to(device), mask_BL.to(device), types_BL.to(device) if typed else None


def score_batches(
    loaded: LoadedModel, samples: Sequence[Encoded], budget: Budget
) -> Iterator[Batch]:
    """Score samples, which must be sorted, the longest first.

    When memory runs out, the batch is halved, and the budget is lowered for good.
    """
    lengths = [len(sample.ids) for sample in samples]
    waiting = plan_batches(lengths, budget.tokens)
    while waiting:
        batch = waiting.pop(0)
        scores = _score_or_none(loaded, [samples[i] for i in batch])
        if scores is None:
            longest, start = lengths[batch[0]], batch[0]
            if len(batch) == 1:
                raise RewardError(
                    f"The reward model ran out of memory with a single sample of {longest} tokens. "
                    "Lower --reward_model_max_length, give it another --reward_model_device, or "
                    "set --reward_model_offload."
                )
            # Plan the rest again, from the first sample of the batch that did not fit.
            budget.lower_to(len(batch) // 2 * longest)
            plan = plan_batches(lengths[start:], budget.tokens)
            waiting = [[start + i for i in part] for part in plan]
            continue
        tokens = sum(lengths[i] for i in batch)
        yield Batch(tuple(batch), tuple(rows_of(scores)), tokens, len(batch) * lengths[batch[0]])


def rows_of(scores: Scores) -> list[Row]:
    """Copy scores to the CPU in one transfer, a row for each sample."""
    # The score in the first column, then the objectives in their order.
    columns = [scores.score_B.float(), *(each_B.float() for each_B in scores.objectives.values())]
    return [
        Row(score, dict(zip(scores.objectives, others, strict=True)))
        for score, *others in torch.stack(columns, dim=1).tolist()
    ]


def body_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of most weights, which is the body's; the head is float32."""
    sizes: dict[torch.dtype, int] = {}
    for weight in module.parameters():
        sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def _score_or_none(loaded: LoadedModel, samples: Sequence[Encoded]) -> Scores | None:
    """Score one batch; None when memory ran out.

    Returning frees the tensors that the error's traceback refers to; then the cache is emptied.
    """
    device = next(loaded.network.module.parameters()).device
    try:
        with torch.inference_mode():
            return loaded.network.score(*pad(samples, loaded.pad_token_id, device))
    # Only running out of memory is handled; other errors are the model's.
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # Outside the `except`, because the traceback keeps the batch's tensors alive until here.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


Sample = TypeVar("Sample")

MAX_PAIRS = 16  # pairs made from the run's rows
MAX_ANSWER_CHARS = 200  # a longer ground truth is not an answer
MAX_SEARCHED_ROWS = 2000  # rows that are searched for them
NO_ANSWER = "I do not know."  # the worse answer if all rows have the same ground truth
TURN_OFF = "To start anyway: --reward_model_self_test warn."

# (question, better answer, worse answer)
BUILT_IN = (
    (
        "What is the capital of France?",
        "The capital of France is Paris.",
        "I like trains. The the the of purple, and so nineteen.",
    ),
    (
        "How can I boil an egg?",
        "Put the egg into boiling water, wait about nine minutes for a hard yolk or six for a "
        "soft one, then cool it in cold water.",
        "No. Go away, that is a stupid question.",
    ),
    (
        "What is 7 times 8?",
        "7 times 8 is 56.",
        "qwkj zxv lorp 9#!! ghhh mmm vvv",
    ),
    (
        "Please explain in one sentence why the sky is blue.",
        "Air scatters short, blue wavelengths of sunlight much more than long, red ones, so blue "
        "light reaches our eyes from every direction.",
        "My uncle sells used cars on Sundays, call him now and buy buy buy!",
    ),
    (
        "Can you suggest a name for my grey kitten?",
        "How about Misty? It fits a soft grey coat, and is short and easy to call.",
        "Kittens are worthless, and so is anyone who keeps one.",
    ),
)


@dataclass(frozen=True)
class Pair:
    """A prompt with an answer that is better than another."""

    prompt: Prompt
    good: str
    bad: str


def get_messages(prompt: Prompt) -> tuple[Message, ...]:
    """Return the messages of a prompt; a prompt without messages is one user message."""
    return prompt.messages or ({"role": "user", "content": prompt.text},)


def first_of_each_kind(prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
    """Return the first prompt of each sequence of roles: a template may refuse some."""
    kinds: dict[tuple[str, ...], int] = {}
    for number, prompt in enumerate(prompts):
        kinds.setdefault(tuple(m["role"] for m in get_messages(prompt)), number)
    return tuple(prompts[number] for number in kinds.values())


def prompt_like(prompts: Sequence[Prompt], question: str, number: int = 0) -> Prompt:
    """Return a prompt with another question, rendered like the run's first prompt if possible."""
    # Replace the question inside the chat template, if it occurs exactly once.
    rendered = question
    for prompt in prompts[:1]:
        if prompt.text and prompt.rendered.count(prompt.text) == 1:
            rendered = prompt.rendered.replace(prompt.text, question)
    messages = ({"role": "user", "content": question},)
    return Prompt(f"self-test-{number}", question, messages, rendered, ())


def choose_pairs(prompts: Sequence[Prompt]) -> tuple[Pair, ...]:
    """Pair the ground truth of each of the first rows with another row's ground truth.

    Built-in pairs of plain English are used only if the rows have no short ground truths, because
    a model for one narrow task may not know anything else.
    """
    # Different questions with a short ground truth, from the first rows.
    rows: list[tuple[Prompt, str]] = []
    for prompt in prompts[:MAX_SEARCHED_ROWS]:
        truth = _short_truth(prompt)
        if truth is not None and all(prompt.text != row.text for row, _ in rows):
            rows.append((prompt, truth))
        if len(rows) == MAX_PAIRS:
            break
    truths = [truth for _, truth in rows]
    # The worse answer is the next different ground truth, cyclically.
    pairs = []
    for i, (prompt, truth) in enumerate(rows):
        others = (other for other in truths[i + 1 :] + truths[:i] if other != truth)
        pairs.append(Pair(prompt, truth, next(others, NO_ANSWER)))
    return tuple(pairs) or tuple(
        Pair(prompt_like(prompts, question, n), good, bad)
        for n, (question, good, bad) in enumerate(BUILT_IN)
    )


def encode_pairs(
    pairs: Sequence[Pair], encode: Callable[[Prompt, str], Sample | None], max_tokens: object
) -> tuple[list[Pair], list[Sample]]:
    """Encode good and bad answer of each pair, in turn; pairs above `max_tokens` are left out.

    `encode` returns None for a sample that does not fit; RewardError if no pair fits.
    """
    usable: list[Pair] = []
    samples: list[Sample] = []
    for pair in pairs:
        good, bad = encode(pair.prompt, pair.good), encode(pair.prompt, pair.bad)
        if good is not None and bad is not None:
            # A pair needs both answers: its direction is a comparison.
            usable.append(pair)
            samples += [good, bad]
    if not usable:
        raise RewardError(
            f"The reward model could not be tested: no sample fits into {max_tokens} tokens. Raise "
            f"--reward_model_max_length. {TURN_OFF}"
        )
    return usable, samples


def check_direction(pairs: Sequence[Pair], scores: Sequence[float], doubt: str) -> str:
    """Return a line to show; RewardError unless most good answers score above the bad ones.

    `scores` are in the order of `encode_pairs`; `doubt` is a further question in the error.
    """
    # Ties count as wrong; NaN compares as wrong, too.
    results = list(zip(pairs, scores[::2], scores[1::2], strict=True))
    wrong = [result for result in results if not result[1] > result[2]]
    right = len(results) - len(wrong)
    if 2 * right > len(results):
        return f"Reward model tested: {right} of {len(results)} good answers above bad ones."
    # The first wrong pair as an example: the user can judge it by reading.
    pair, good, bad = wrong[0]
    last_message = str(get_messages(pair.prompt)[-1]["content"])
    question, better, worse = (shorten(text, 80) for text in (last_message, pair.good, pair.bad))
    raise RewardError(
        f"The reward model put only {right} of {len(results)} good answers above bad ones. Asked "
        f"{question!r}, {better!r} got {good:.4g} and {worse!r} got "
        f"{bad:.4g}. Is it a reward model for such prompts, is higher better, {doubt}? {TURN_OFF}"
    )


@contextmanager
def raise_if_strict(mode: str, tell: Tell) -> Iterator[None]:
    """Raise a RewardError of the `with` block if `mode` is strict, else print its message."""
    try:
        yield
    except RewardError as failed:
        if mode == "strict":
            raise
        tell(str(failed))


def _short_truth(prompt: Prompt) -> str | None:
    """Return the ground truth of a row as an answer; None if it is not short and plain."""
    truth = prompt.ground_truth
    # Python's bool is an int, and "True" is not an answer that a model could prefer.
    if isinstance(truth, bool) or not isinstance(truth, (str, int, float)):
        return None
    text = str(truth).strip()
    # JSON (tests, rubrics) is not an answer.
    return text if 0 < len(text) <= MAX_ANSWER_CHARS and text[0] not in "{[" else None
