"""Rounds that are sampled ahead of their step, and how a checkpoint keeps them.

`state/ahead.json` holds words and counts, `state/ahead.npz` token ids and log-probs, exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from ppo_cli.engine.base import Sampling
from ppo_cli.errors import ModelError
from ppo_cli.records import Prompt, Rollout

WORDS = "ahead.json"
NUMBERS = "ahead.npz"
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, BadZipFile)


@dataclass(eq=False)
class Round:
    """The rollouts of one step, all sampled under the weights of one publish.

    `begun_at` counts publishes. Once `whole` is set, nothing is added any more; `taken` says
    that the loop has had them.
    """

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    begun_at: int
    rollouts: list[Rollout] = field(default_factory=list)
    whole: bool = False
    taken: bool = False

    @property
    def weight_version(self) -> int:
        """The version of the weights that it was sampled under."""
        return self.rollouts[0].weight_version

    def asks_for(self, prompts: Sequence[Prompt], sampling: Sampling) -> bool:
        """Whether these prompts, in this order, and this sampling are its own."""
        return (
            sampling == self.sampling
            and len(prompts) == len(self.prompts)
            and all(
                theirs.uid == ours.uid and theirs.token_ids == ours.token_ids
                for theirs, ours in zip(prompts, self.prompts, strict=True)
            )
        )

    def complete(self) -> None:
        """Say that all of it is there."""
        assert len(self.rollouts) == len(self.prompts) * self.sampling.n, "a round with gaps"
        assert len({r.weight_version for r in self.rollouts}) == 1, "a round of mixed weights"
        self.whole = True

    def of_prompts(self, prompts: Sequence[Prompt]) -> Iterator[Rollout]:
        """Yield the rollouts with these prompts in them: a checkpoint keeps no more than ids."""
        by_uid = {prompt.uid: prompt for prompt in prompts}
        for rollout in self.rollouts:
            yield replace(rollout, prompt=by_uid[rollout.prompt.uid])


def write_rounds(directory: Path, rounds: Sequence[Round], published: int) -> None:
    """Write whole rounds into the `state/` of a checkpoint; nothing when there are none."""
    if not rounds:
        return
    state = directory / "state"
    state.mkdir(exist_ok=True)
    rollouts = [rollout for kept in rounds for rollout in kept.rollouts]
    ids = [np.asarray(r.token_ids, dtype=np.int64) for r in rollouts]
    logprobs = [np.asarray(r.sampler_logprobs, dtype=np.float32) for r in rollouts]
    np.savez(
        state / NUMBERS,
        lengths=np.array([len(row) for row in ids], dtype=np.int64),
        token_ids=np.concatenate(ids),
        sampler_logprobs=np.concatenate(logprobs),
    )
    words = [_words_of(kept, published) for kept in rounds]
    (state / WORDS).write_text(json.dumps({"rounds": words}))


def read_rounds(directory: Path, published: int) -> list[Round]:
    """Read what `write_rounds` wrote; raises ModelError when it is damaged."""
    path = directory / "state" / WORDS
    if not path.exists():
        return []
    try:
        words = json.loads(path.read_text())["rounds"]
        rows = _rows_of(path.with_name(NUMBERS))
        rounds = [_round_of(told, rows, published) for told in words]
        if next(rows, None) is not None:
            raise ValueError("it has more rows than rollouts")
    except (*DAMAGED, AssertionError, StopIteration) as error:
        raise ModelError(
            f"The checkpoint {directory} is damaged: the rollouts that were sampled ahead cannot "
            f"be read ({error}). Name another one with --resume PATH, or delete "
            f"{path} to sample them anew."
        ) from error
    return rounds


def _words_of(kept: Round, published: int) -> dict[str, Any]:
    return {
        "publishes_ago": published - kept.begun_at,
        "sampling": asdict(kept.sampling),
        "prompts": [{"uid": p.uid, "token_ids": list(p.token_ids)} for p in kept.prompts],
        "rollouts": [
            {
                "uid": r.prompt.uid,
                "sample": r.sample,
                "text": r.text,
                "finish_reason": r.finish_reason,
                "weight_version": r.weight_version,
            }
            for r in kept.rollouts
        ],
    }


Numbers = tuple[NDArray[np.int64], NDArray[np.float32]]


def _rows_of(path: Path) -> Iterator[Numbers]:
    """Token ids and log-probs of each rollout, in the order in which they were written."""
    with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
        ends = np.cumsum(saved["lengths"])[:-1]
        ids = np.split(saved["token_ids"], ends)
        logprobs = np.split(saved["sampler_logprobs"], ends)
    return iter(list(zip(ids, logprobs, strict=True)))


def _round_of(told: Mapping[str, Any], rows: Iterator[Numbers], published: int) -> Round:
    prompts = tuple(
        Prompt(p["uid"], text="", messages=(), rendered="", token_ids=tuple(p["token_ids"]))
        for p in told["prompts"]
    )
    made = Round(prompts, Sampling(**told["sampling"]), published - int(told["publishes_ago"]))
    by_uid = {prompt.uid: prompt for prompt in prompts}
    for words in told["rollouts"]:
        ids, logprobs = next(rows)
        made.rollouts.append(_rollout_of(words, by_uid[words["uid"]], ids, logprobs))
    made.complete()
    return made


def _rollout_of(
    words: Mapping[str, Any], prompt: Prompt, ids: NDArray[np.int64], logprobs: NDArray[np.float32]
) -> Rollout:
    return Rollout(
        prompt=prompt,
        sample=int(words["sample"]),
        token_ids=tuple(ids.tolist()),
        sampler_logprobs=logprobs,
        text=words["text"],
        finish_reason=words["finish_reason"],
        weight_version=int(words["weight_version"]),
    )
