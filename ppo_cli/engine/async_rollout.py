"""Asynchronous rollouts: an engine that samples ahead of training, with the same seven verbs.

While step s trains, the rollouts of the steps up to s + `steps` are sampled in the background,
all of a round under the weights that were published when it began. From then on a round is
trained `steps` publishes later, the first ones sooner; importance weights correct the mismatch.

Which weights a round is sampled under must not depend on timing, or equal runs would differ.
So rounds begin when a step is annotated (all its own rollouts are there by then), and its
`publish` waits for every round that has begun. A checkpoint keeps the rounds.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from ppo_cli.algo.batch import AnnotatedBatch, Batch
from ppo_cli.engine.base import Engine, MiniBatch, Sampling, Sums
from ppo_cli.errors import ModelError
from ppo_cli.records import Prompt, Rollout

WORDS = "ahead.json"
NUMBERS = "ahead.npz"
# Of a rollout, beside its prompt and its numbers.
TOLD: dict[str, Callable[..., Any]] = {
    "sample": int, "text": str, "finish_reason": str, "weight_version": int,
    "thought_tokens": int,
}  # fmt: skip
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
        rounds = [_round_of(saved, rows, published) for saved in words]
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
            {"uid": r.prompt.uid} | {name: getattr(r, name) for name in TOLD} for r in kept.rollouts
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


def _round_of(saved: Mapping[str, Any], rows: Iterator[Numbers], published: int) -> Round:
    prompts = tuple(
        Prompt(p["uid"], text="", messages=(), rendered="", token_ids=tuple(p["token_ids"]))
        for p in saved["prompts"]
    )
    sampling = Sampling(**saved["sampling"] | {"stop": tuple(saved["sampling"].get("stop", ()))})
    made = Round(prompts, sampling, published - int(saved["publishes_ago"]))
    by_uid = {prompt.uid: prompt for prompt in prompts}
    for words in saved["rollouts"]:
        ids, logprobs = next(rows)
        told = {name: kind(words[name]) for name, kind in TOLD.items()}
        prompt, token_ids = by_uid[words["uid"]], tuple(ids.tolist())
        made.rollouts.append(
            Rollout(prompt=prompt, token_ids=token_ids, sampler_logprobs=logprobs, **told)
        )
    made.complete()
    return made


Upcoming = Callable[[int], tuple[Sequence[Prompt], Sampling] | None]
# For a round to notice that it should stop, before its sampler is taken away, and after.
SECONDS_TO_STOP = 2.0
SECONDS_TO_LEAVE = 10.0


class AheadEngine:
    """Samples up to `steps` training rounds beyond the step in training.

    `upcoming(k)` tells prompts and sampling of the k-th training step after the one that was
    last taken, and None past the end of the run. The inner engine must be able to sample in one
    thread while it annotates, steps and saves in another, and raise the weight version by one
    at a publish; it is never asked for two rounds at a time, nor for a publish during a round.
    """

    def __init__(self, engine: Engine, upcoming: Upcoming, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"sampling runs ahead by at least 1 step, not {steps}")
        self._inner = engine
        self._upcoming = upcoming
        self._steps = steps
        self._published = 0  # since this object was made: a round that was loaded began before
        self._first_version: int | None = None  # the inner engine's, when none was published
        self._rounds: list[Round] = []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # the thread's, for the main thread to raise
        self._stopping = threading.Event()
        self._closed = False

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Rollout]:
        """Yield a round that was sampled ahead; anything else is sampled now.

        Other rounds are the first of a run, greedy baselines and validations.
        """
        found = self._find(prompts, sampling, ahead=0)
        if found is None or not found.whole:
            self._wait()  # one round at a time
        if found is None:
            for rollout in self._inner.generate(prompts, sampling):
                self._check_version(rollout.weight_version, self._published)
                yield rollout
            return
        self._check_version(found.weight_version, found.begun_at)
        # Kept until its step is published: a step that is undone takes it once more.
        found.taken = True
        yield from found.of_prompts(prompts)

    def annotate(self, batch: Batch) -> AnnotatedBatch:
        """Begin the next rounds in the background, then annotate this one."""
        if self._first_version is not None:
            present = self._first_version + self._published
            staleness = present - int(batch.weight_version_B.min())
            assert staleness <= self._steps, f"rollouts are {staleness} steps old"
        self._begin_rounds()
        return self._inner.annotate(batch)

    def step(self, minibatch: MiniBatch) -> Sums:
        """Take one optimizer step while rollouts are sampled."""
        return self._inner.step(minibatch)

    def publish(self) -> None:
        """Wait for the rounds that have begun, then hand the new weights to the sampler."""
        self._wait()
        self._inner.publish()
        self._published += 1
        self._rounds = [r for r in self._rounds if not r.taken]

    def save(self, directory: Path) -> Future[None]:
        """Save the inner engine, and every whole round that no published step has used.

        A round under way began under the very weights that are saved here, so a resumed run
        samples it again, the same. What stopped such a round does not keep a checkpoint from
        being written: it is raised by the next `publish` or `generate`.
        """
        write_rounds(directory, [r for r in self._rounds if r.whole], self._published)
        return self._inner.save(directory)

    def load(self, directory: Path) -> None:
        """Take back what `save` wrote.

        A checkpoint of a run that sampled less far ahead, or not at all, has fewer rounds, and
        the missing ones are sampled now. Rounds that are too old for `steps`, or whose prompts
        or sampling the run no longer asks for, are dropped and sampled anew.
        """
        self._wait()
        self._inner.load(directory)
        self._first_version = None
        self._rounds = read_rounds(directory, self._published)

    def close(self) -> None:
        """Stop the round under way in bounded time, and close the inner engine."""
        if self._closed:
            return
        self._closed = True
        self._stopping.set()
        thread = self._thread
        if thread is not None:
            thread.join(SECONDS_TO_STOP)
        try:
            self._inner.close()  # a sampler that is gone ends its round
        finally:
            if thread is not None:
                thread.join(SECONDS_TO_LEAVE)
            self._rounds, self._thread = [], None

    def _find(self, prompts: Sequence[Prompt], sampling: Sampling, ahead: int) -> Round | None:
        """A round of these prompts that is fresh enough for the step so many ahead."""
        for known in self._rounds:
            # A step is trained under the weights of all publishes before it.
            staleness = self._published + ahead - known.begun_at
            if staleness <= self._steps and known.asks_for(prompts, sampling):
                return known
        return None

    def _check_version(self, version: int, published: int) -> None:
        """See that a sampler really has the weights of so many publishes."""
        first = version - published
        assert self._first_version in (None, first), (
            f"weights {version} after {published} publishes"
        )
        self._first_version = first

    def _begin_rounds(self) -> None:
        """Keep the rounds of the next steps, and begin those that are missing."""
        kept = [known for known in self._rounds if known.taken]
        missing: list[Round] = []
        for ahead in range(1, self._steps + 1):
            asked = self._upcoming(ahead)
            if asked is None:
                break
            known = self._find(*asked, ahead)
            if known is None:
                prompts, sampling = asked
                known = Round(tuple(prompts), sampling, self._published)
                missing.append(known)
            kept.append(known)
        if missing:
            self._wait()
            self._thread = threading.Thread(
                target=self._sample, args=(missing,), name="sampling-ahead", daemon=True
            )
            self._thread.start()
        self._rounds = kept

    def _sample(self, rounds: Sequence[Round]) -> None:
        """Sample rounds one after the other, in the background."""
        try:
            for begun in rounds:
                if not self._sample_round(begun):
                    return
        except BaseException as error:
            self._error = error

    def _sample_round(self, begun: Round) -> bool:
        """Sample a round; returns False when it should stop before its end."""
        drawn = self._inner.generate(begun.prompts, begun.sampling)
        # A generator, as all engines' are: closing it frees the sampler.
        with closing(cast("Generator[Rollout, None, None]", drawn)):
            for rollout in drawn:
                if self._stopping.is_set():
                    return False
                begun.rollouts.append(rollout)
        begun.complete()
        return True

    def _wait(self) -> None:
        """Wait for the background; raises what went wrong there, once and as itself."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            self._rounds = [known for known in self._rounds if known.whole]
            raise error
