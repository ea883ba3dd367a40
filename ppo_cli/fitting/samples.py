"""Pairs as token ids, in exactly the format by which the model will score later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppo_cli.config.reward_schema import ModelReward
from ppo_cli.errors import DataError, RewardError
from ppo_cli.fitting.preferences import Pair, count
from ppo_cli.report.tracker import Advance
from ppo_cli.rewards.local.base import Encoded, Format, LoadedModel
from ppo_cli.rewards.local.formats import ControlToken, format_for

NO_LIMIT = 10**9


@dataclass(frozen=True)
class EncodedPair:
    """Both samples of a pair."""

    chosen: Encoded
    rejected: Encoded
    margin: float

    @property
    def length(self) -> int:
        """Tokens of the longer sample."""
        return max(len(self.chosen.ids), len(self.rejected.ids))


@dataclass(frozen=True)
class EncodedSet:
    """Pairs that fit, and why the others do not: too long, or refused by the chat template."""

    pairs: tuple[EncodedPair, ...]
    too_long: tuple[str, ...]
    refused: tuple[str, ...]


def whole_format(loaded: LoadedModel, path: str) -> Format:
    """Return the format that will score, without its limit: it would cut prompts to fit.

    Two responses of different length would then be read under different prompts.
    """
    return format_for(loaded.tokenizer, ModelReward(path=path), NO_LIMIT)


def encode_pairs(
    form: Format, pairs: Sequence[Pair], max_length: int, advance: Advance
) -> EncodedSet:
    """Encode all pairs; one with a sample that is too long is left out as a whole."""
    done: list[EncodedPair] = []
    too_long: list[str] = []
    refused: list[str] = []
    for pair in pairs:
        try:
            both = (
                form.encode(pair.messages, pair.chosen),
                form.encode(pair.messages, pair.rejected),
            )
        except (RewardError, ControlToken) as error:
            refused.append(f"{pair.place}: {error}")
        else:
            encoded = EncodedPair(*both, pair.margin)
            if encoded.length > max_length:
                too_long.append(f"{pair.place}: {encoded.length}")
            else:
                done.append(encoded)
        advance(1)
    return EncodedSet(tuple(done), tuple(too_long), tuple(refused))


def tell_left_out(found: EncodedSet, what: str, max_length: int) -> list[str]:
    """Say how many pairs were left out and why; DataError when none is left."""
    told = []
    if found.refused:
        told.append(f"{count(len(found.refused), f'{what} pair')} left out: {found.refused[0]}")
    if found.too_long:
        told.append(
            f"{count(len(found.too_long), f'{what} pair')} left out, longer than {max_length} "
            f"tokens ({found.too_long[0]}); --max_length sets the limit."
        )
    if not found.pairs:
        raise DataError("\n".join([f"No usable {what} pair is left.", *told]))
    return told


def refuse_refused(found: EncodedSet) -> None:
    """Raise a DataError when the chat template cannot render some pairs."""
    if not found.refused:
        return
    raise DataError(
        f"{count(len(found.refused), 'pair')} cannot be rendered, such as {found.refused[0]} Leave "
        "such rows out with --skip_bad_rows, or give another --template."
    )
