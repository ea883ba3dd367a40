"""Divide rows into micro-batches with little padding and even work, within a memory budget.

All ranks plan the same micro-batches of the whole mini-batch and take turns in choosing, so that
each rank gets the same number (collectives must match) of about the same size. When memory runs
out, the budget is halved and the work is done again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.distributed import DistError

from ppo_cli.engine.base import explain_out_of_memory
from ppo_cli.engine.models.policy import WeightsContext
from ppo_cli.engine.ranks import ALONE, OutOfMemoryElsewhere, Ranks, explain_collective_errors
from ppo_cli.errors import UserError, is_out_of_memory

# Padded micro-batches are made smaller to reduce padding, but not below a size that keeps a device
# busy.
MOST_PADDING = 0.1
LEAST_TOKENS = 1024


Advise = Callable[[Literal["sequence", "weights"]], str]


@dataclass
class Budget:
    """The size limit of micro-batches; halved for good when memory runs out.

    `tokens` counts padded tokens (rows x longest row), or real tokens when rows are `packed`;
    `rows` caps the rows. With `shared`, rows of one prompt stay in one micro-batch.
    `row` names a row in errors. `advise` returns what to do when a single row does not fit
    ("sequence"), or when the gathered weights leave no room for it ("weights").
    """

    tokens: int
    rows: int | None = None
    halvings: int = 0
    packed: bool = False
    shared: bool = False
    row: str = "sequence of {} tokens"
    advise: Advise = field(default=lambda cause: "Take a smaller --model.", compare=False)

    def size(self, rows: int, longest: int, real: int) -> int:
        """Return what rows count against `tokens`, from their longest length and real tokens."""
        return real if self.packed else rows * longest

    def halve(
        self, longest: int, most_rows: int, most_tokens: int = 0, *, gathering: bool = False
    ) -> None:
        """Halve the size that was just tried; raises UserError if that was a single row.

        `most_rows` is the largest number of rows in a micro-batch. For packed rows, where memory
        depends on tokens, it is the rows of the heaviest one, and `most_tokens` its tokens.
        `gathering`: memory ran out while weights were gathered.
        """
        if most_rows <= 1:
            if gathering:
                raise UserError(
                    "Out of memory: the weights that a rank gathers leave no room for a single "
                    f"sequence of {longest} tokens. {self.advise('weights')}"
                )
            raise UserError(
                f"Out of memory with a single {self.row.format(longest)}. {self.advise('sequence')}"
            )
        if self.packed:
            self.tokens = most_tokens // 2
        else:
            self.rows = most_rows // 2
        self.halvings += 1

    def current_limit(self) -> tuple[str, int]:
        """Return the unit of the limit after halvings ("tokens" or "rows"), and its value."""
        return ("tokens", self.tokens) if self.packed else ("rows", self.rows or 0)

    def state(self) -> list[Any]:
        """Return the state for a checkpoint."""
        return [self.packed, self.halvings, self.current_limit()[1]]

    def load_state(self, state: list[Any]) -> None:
        """Restore the halvings of a checkpoint, if it had any in the same unit."""
        packed, halvings, limit = state
        if packed != self.packed or not halvings:
            return
        self.halvings = halvings
        if self.packed:
            self.tokens = min(limit, self.tokens)
        else:
            self.rows = min(limit, self.rows or limit)


def plan_micro_batches(
    lengths: Sequence[int], budget: Budget, at_least: int = 0
) -> list[list[int]]:
    """Group row indices by length, longest first, within the budget.

    The budget and `MOST_PADDING` determine the number of micro-batches (or `at_least`, if there
    are enough rows). Then the smallest token limit that needs no more of them is used, so that all
    have about the same size. A row longer than the token budget is alone in its micro-batch.
    """
    if not lengths:
        return []
    # Longest first, so that a group's first row gives its width.
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    tokens = budget.tokens
    groups = _group_rows(order, lengths, tokens, budget)
    # Lower the token limit until padding is small enough.
    while tokens > LEAST_TOKENS and _padding(groups, lengths, budget) > MOST_PADDING:
        tokens = max(LEAST_TOKENS, tokens * 3 // 4)
        groups = _group_rows(order, lengths, tokens, budget)
    count = max(at_least, len(groups))
    # Binary search for the smallest limit with the same number of groups.
    low, high = 1, tokens
    while low < high:
        middle = (low + high) // 2
        if len(_group_rows(order, lengths, middle, budget)) <= count:
            high = middle
        else:
            low = middle + 1
    even = _group_rows(order, lengths, low, budget)
    # Rows of equal length can need fewer groups (4 rows in 3 groups become 2 and 2): split some.
    while len(even) < min(at_least, len(lengths)):
        fullest = max(even, key=len)
        even.append([fullest.pop()])
    most_padding = max(MOST_PADDING, _padding(groups, lengths, budget))
    if len(groups) >= at_least and _padding(even, lengths, budget) > most_padding:
        return groups
    return even


def _padding(groups: list[list[int]], lengths: Sequence[int], budget: Budget) -> float:
    """Return the share of computed tokens that are padding."""
    real = sum(lengths)
    sizes = (
        budget.size(len(group), lengths[group[0]], sum(lengths[i] for i in group))
        for group in groups
    )
    return 1.0 - real / sum(sizes)


def plan_rank_micro_batches(
    lengths: Sequence[int], budget: Budget, ranks: Ranks, prompts: Sequence[Hashable] = ()
) -> list[list[int]]:
    """Return this rank's micro-batches; all ranks have the same number, some may be empty.

    The k-th ones of all ranks run at the same time, so they are close in size; the order of the
    ranks is reversed each turn, so that no rank always has the largest.
    """
    planned, size = _plan_all_ranks(lengths, budget, ranks, prompts), ranks.data_size
    places = (ranks.data_rank, size - 1 - ranks.data_rank)
    return [planned[turn * size + places[turn % 2]] for turn in range(len(planned) // size)]


def _plan_all_ranks(
    row_lengths: Sequence[int], budget: Budget, ranks: Ranks, prompts: Sequence[Hashable]
) -> list[list[int]]:
    """Return the micro-batches of all ranks, largest first; each turn has one per rank."""
    # Rows of a shared prompt are planned as one unit.
    units = [[row] for row in range(len(row_lengths))]
    if budget.shared:
        units = _group_by_prompt(row_lengths, prompts, budget.tokens, ranks.data_size)
    lengths = [sum(row_lengths[row] for row in unit) for unit in units]
    groups = plan_micro_batches(lengths, budget)
    turns = -(-len(groups) // ranks.data_size)
    if len(groups) % ranks.data_size:
        groups = plan_micro_batches(lengths, budget, at_least=turns * ranks.data_size)
        turns = -(-len(groups) // ranks.data_size)
    groups.sort(
        key=lambda group: (
            -budget.size(len(group), lengths[group[0]], sum(lengths[i] for i in group))
        )
    )
    planned = [[row for unit in group for row in units[unit]] for group in groups]
    return planned + [[]] * (turns * ranks.data_size - len(groups))


def _group_by_prompt(
    lengths: Sequence[int], prompts: Sequence[Hashable], tokens: int, ranks: int
) -> list[list[int]]:
    """Group rows by prompt, split where the budget or an even share of the ranks needs it."""
    row_limit = max(1, len(lengths) // ranks)
    of_prompt: dict[Hashable, list[list[int]]] = {}
    for row, prompt in enumerate(prompts):
        units = of_prompt.setdefault(prompt, [[]])
        unit_tokens = sum(lengths[other] for other in units[-1])
        if units[-1] and (len(units[-1]) == row_limit or unit_tokens + lengths[row] > tokens):
            units.append([])
        units[-1].append(row)
    return [unit for units in of_prompt.values() for unit in units]


def _group_rows(
    order: Sequence[int], lengths: Sequence[int], tokens: int, budget: Budget
) -> list[list[int]]:
    """Group row indices greedily: a row joins the last group, or starts another if that is full.

    `order` has the indices, longest row first. A group is full at `tokens` by the budget's own
    measure (padded or packed), or at the budget's number of rows. A row that is too long gets its
    own group.
    """
    groups: list[list[int]] = []
    # Greedy: rows come in decreasing length.
    real = 0  # tokens of the last group
    for index in order:
        real += lengths[index]
        group = groups[-1] if groups else None
        full = group is None or (
            budget.size(len(group) + 1, lengths[group[0]], real) > tokens
            or len(group) == budget.rows
        )
        if full or group is None:
            groups.append([index])
            real = lengths[index]
        else:
            group.append(index)
    return groups


@contextmanager
def explain_step_errors(role: str, ranks: Ranks, advise: Callable[[], str]) -> Iterator[None]:
    """Add the model and the rank to errors of an optimizer step: out of memory, or NCCL."""
    where = "" if ranks.alone else f" on learner rank {ranks.rank}"
    what = f"An optimizer step of the {role}{where}"
    with explain_collective_errors(ranks.rank), explain_out_of_memory(what, advise):
        yield


# Functions of FSDP2 (torch 2.13) that allocate gathered weights and unreduced gradients.
GATHERS = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")


def is_gather_error(error: BaseException) -> bool:
    """Whether an error was raised while FSDP2 gathered weights or reduced gradients."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(code.co_name in GATHERS and "_fully_shard" in code.co_filename for code in codes)


Work = Callable[[Sequence[int], bool], None]


def run_within_memory(
    lengths: Sequence[int],
    budget: Budget,
    work: Work,
    restart: Callable[[], None],
    ranks: Ranks = ALONE,
    prompts: Sequence[Hashable] = (),
    contexts: Sequence[WeightsContext] = (),
) -> None:
    """Do `work` on each micro-batch; when memory runs out, `restart` with half the budget.

    `work` gets the rows (none on an idle rank) and whether they are the last, and runs models in
    these `contexts`.
    After a halving all micro-batches are done again, because an interrupted backward pass may have
    added a part of a gradient.

    After each micro-batch the ranks exchange whether one has failed (`Ranks.exchange_failures`);
    all of them then restart together with the same halved budget. A rank that runs out of memory
    must not leave the others waiting in a collective: it replays the micro-batch with one short
    row and joins the collectives that remain. Tensor-parallel ranks cannot do that, because each
    computes a part of the other's rows: there the run ends with advice.
    """
    while True:
        plan = plan_rank_micro_batches(lengths, budget, ranks, prompts)
        last = False
        try:
            for turn, rows in enumerate(plan):
                last = turn == len(plan) - 1
                for context in contexts:
                    context.begin_micro_batch()
                work(rows, last)
                ranks.exchange_failures()
            return
        except Exception as error:
            if isinstance(error, DistError):  # FSDP2's all-reduce, which we cannot wrap
                with explain_collective_errors(ranks.rank):
                    raise
            if not is_out_of_memory(error):
                raise
            # The plan says what the failed size was, which all ranks halve.
            planned = _plan_all_ranks(lengths, budget, ranks, prompts)
            heaviest = max(planned, key=lambda group: sum(lengths[i] for i in group))
            most_rows = len(heaviest) if budget.packed else max(len(group) for group in planned)
            if ranks.tensor_size > 1:
                raise UserError(
                    f"Learner rank {ranks.rank} ran out of memory with micro-batches of up to "
                    f"{most_rows} sequences. Lower actor.ppo_max_token_len_per_gpu, "
                    "critic.ppo_max_token_len_per_gpu and ref.log_prob_max_token_len_per_gpu "
                    f"(now {budget.tokens} here), then start the same command again."
                ) from error
            elsewhere = isinstance(error, OutOfMemoryElsewhere)
            gathering = is_gather_error(error)
        # Outside of the except block: the traceback kept tensors alive until here.
        _start_over(contexts, restart)
        if not elsewhere and not ranks.alone:
            _stand_in(contexts, work, last, ranks, budget)
            ranks.exchange_failures(failed=True)
            _start_over(contexts, restart)
        # All ranks compute the same halving.
        tokens = sum(lengths[i] for i in heaviest)
        budget.halve(max(lengths), most_rows, tokens, gathering=gathering)


def _start_over(contexts: Sequence[WeightsContext], restart: Callable[[], None]) -> None:
    for context in contexts:
        context.reset()
    restart()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _stand_in(
    contexts: Sequence[WeightsContext], work: Work, last: bool, ranks: Ranks, budget: Budget
) -> None:
    """Replay the interrupted micro-batch as an idle rank; its results are dropped."""
    for context in contexts:
        context.begin_replay()
    try:
        work((), last)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"Learner rank {ranks.rank} ran out of memory with its shortest sequence alone: the "
            f"gathered weights leave no room. {budget.advise('weights')}"
        ) from error
