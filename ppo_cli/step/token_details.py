"""What is kept of single tokens of a few responses: text, reward, value, advantage, return …

The loop passes them to the tracker, which writes them into the rollout file of the step; the page
shows them.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from ppo_cli.algo.batch import TrainBatch
from ppo_cli.algo.kl import token_kl
from ppo_cli.records import Rollout
from ppo_cli.run_folder.lines import Encoded
from ppo_cli.thoughts import Detokenize, count_shared, decode_piece

LARGEST = float(np.finfo(np.float16).max)


def list_token_details(
    batch: TrainBatch, rollouts: Sequence[Rollout], decode: Detokenize, count: int
) -> dict[int, dict[str, Any]]:
    """Return the details of `count` rows of a batch by row, those to be kept first in front.

    The numbers are those that trained: rewards with the KL penalty, if they have one, values and
    entropies before the updates, advantages after whitening. An episode has its whole text as well,
    and the [start, end) of the environment's tokens. The KL of a token is that of `kl_divergence`
    (k3, in nats), or the exact one over the vocabulary if the run computes it. Values and returns
    are absent without a critic.
    """
    numbers_BT = {
        "reward": batch.token_rewards_BT, "advantage": batch.advantages_BT,
        "entropy": batch.entropy_BT,
    }  # fmt: skip
    if batch.values_BT is not None:
        numbers_BT |= {"value": batch.values_BT, "return": batch.returns_BT}
    if batch.full_kl_BT is not None:
        numbers_BT["kl"] = batch.full_kl_BT
    elif batch.ref_logprobs_BT is not None:
        numbers_BT["kl"] = token_kl(batch.old_logprobs_BT, batch.ref_logprobs_BT, "k3")
    details: dict[int, dict[str, Any]] = {}
    for row in choose_rows(batch, count):
        rollout = rollouts[row]
        size, ids, context = (
            int(batch.response_len_B[row]),
            rollout.token_ids,
            rollout.prompt.token_ids,
        )
        # The text of an episode as a record is that of its last turn; here it has all tokens.
        text, episode = rollout.text, dict[str, Any]()
        if rollout.turns:
            text = decode(ids, context)
            replies = [[turn.end, after.start] for turn, after in pairwise(rollout.turns)]
            episode = {"text": text, "environment": replies}
        pieces = split_text(text, ids, context, decode)
        masked = (~batch.loss_mask_BT[row, :size]).nonzero().squeeze(1).tolist()
        details[row] = {
            "lengths": " ".join(str(len(piece)) for piece in pieces),
            **{name: encode_numbers(x_BT[row, :size]) for name, x_BT in numbers_BT.items()},
            **({"masked": masked} if masked else {}),
            **episode,
        }
    return details


def choose_rows(batch: TrainBatch, count: int) -> list[int]:
    """Return at most `count` rows that train: the highest score, the lowest, and so on in turn.

    Each is of a prompt with the fewest rows so far, so that they are spread over the prompts.
    """
    scores, groups = batch.scores_B.tolist(), batch.group_B.tolist()
    rows = batch.loss_mask_BT.any(1).nonzero().squeeze(1).tolist()
    ranked = sorted(rows, key=lambda row: -scores[row])
    chosen: list[int] = []
    chosen_per_group: Counter[int] = Counter()
    while ranked and len(chosen) < count:
        from_end = ranked if len(chosen) % 2 == 0 else ranked[::-1]
        row = min(from_end, key=lambda row: chosen_per_group[groups[row]])
        ranked.remove(row)
        chosen.append(row)
        chosen_per_group[groups[row]] += 1
    return chosen


def split_text(
    text: str, token_ids: Sequence[int], prompt_ids: Sequence[int], decode: Detokenize
) -> list[str]:
    """Split a response's text into the pieces that its tokens add; joined they are the text.

    A character of several tokens belongs to the last of them. End tokens add nothing, but for those
    between turns.
    """
    pieces: list[str] = []
    ids, done = (*prompt_ids, *token_ids), 0
    for place in range(len(prompt_ids), len(ids)):
        # Nearly every token adds the same text everywhere; decoding it in its place takes longer.
        piece = decode_piece(decode, ids[place])
        if not piece or "\ufffd" in piece or not text.startswith(piece, done):
            piece = decode(ids[place : place + 1], ids[:place])
            if not piece:  # the end of a turn, which is decoded in front of other tokens alone
                both = decode(ids[place : place + 2], ids[:place])
                following = decode(ids[place + 1 : place + 2], ids[: place + 1])
                piece = both.removesuffix(following) if following else ""
            piece = piece[: count_shared(piece, text[done:])]
        pieces.append(piece)
        done += len(piece)
    pieces[-1] += text[done:]
    return pieces


def encode_numbers(numbers: Tensor) -> Encoded | float:
    """Return numbers as base64 of little-endian float16 (three digits), or one if all are equal."""
    halves = numbers.float().numpy().clip(-LARGEST, LARGEST).astype("<f2")
    if (halves == halves[0]).all():
        return float(f"{halves[0]:.4g}")
    return Encoded(base64.b64encode(halves.tobytes()).decode())
