"""Asynchronous rollouts: an engine that samples ahead of training, with the same seven verbs.

While step s trains, the rollouts of the steps up to s + `steps` are sampled in the background, one
round per step, under the weights that were published when the round began. A round is trained
`steps` publishes later, the first ones sooner; importance weights correct the mismatch.

The weights under which a token is drawn must not depend on timing, or equal runs would differ.
Therefore rounds begin when a step is annotated (all its own rollouts exist by then), and its
`publish` waits for every round that has begun. Checkpoints contain the rounds.

One long response would delay the weights for all others. Partial rollouts (Kimi k1.5,
arXiv:2501.12599, section 2.6.2) therefore get a limited number of tokens between two publishes.
Unfinished ones continue under the newer weights, together with new rounds, and without a limit
when their round is needed. Each token keeps the log-prob with which it was drawn.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from ppo_cli.algo.batch import AnnotatedBatch, Batch
from ppo_cli.engine.base import Engine, MiniBatch, Sampling, Sums, start_rollouts
from ppo_cli.errors import ModelError
from ppo_cli.records import Prompt, Rollout, Turn

FIELDS_FILE = "ahead.json"
ARRAYS_FILE = "ahead.npz"
# Fields of a rollout in the JSON file; its prompt and its arrays are stored separately.
ROLLOUT_FIELDS: dict[str, Callable[..., Any]] = {
    "sample": int, "text": str, "finish_reason": str, "weight_version": int,
    "thought_tokens": int, "seed": int, "carried": int,
}  # fmt: skip
# Those of an episode, and of the prompt with which its environment began.
EPISODE_FIELDS, OPENING_FIELDS = ("failure", "ended"), ("text", "rendered", "opened", "tools")
# What reading a damaged file can raise.
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, BadZipFile)


@dataclass(eq=False)
class Round:
    """The rollouts of one step, all begun under the weights of one publish.

    `begun_at` and `updated_at` are numbers of publishes: when the round began, and when tokens
    were last drawn (None: not yet). `consumed`: the loop has received the rollouts.
    """

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    begun_at: int
    rollouts: list[Rollout] = field(default_factory=list)
    updated_at: int | None = None
    consumed: bool = False

    def __post_init__(self) -> None:
        self.rollouts = self.rollouts or start_rollouts(self.prompts, self.sampling)

    @property
    def is_complete(self) -> bool:
        """Whether all rollouts are finished."""
        return not self.unfinished

    @property
    def unfinished(self) -> list[Rollout]:
        """Return the unfinished rollouts."""
        return [rollout for rollout in self.rollouts if rollout.finish_reason == "unfinished"]

    @property
    def weight_versions(self) -> set[int]:
        """Return the version of the weights under which the rollouts began: one at most.

        An episode that failed before its first token has none.
        """
        return {r.weight_version for r in self.rollouts if r.token_ids or not r.failure}

    def matches(self, prompts: Sequence[Prompt], sampling: Sampling) -> bool:
        """Whether the round has these prompts, in this order, and this sampling."""
        return (
            sampling == self.sampling
            and len(prompts) == len(self.prompts)
            and all(
                other.uid == prompt.uid and other.token_ids == prompt.token_ids
                for other, prompt in zip(prompts, self.prompts, strict=True)
            )
        )

    def update(self, drawn: Sequence[Rollout], published: int) -> None:
        """Replace unfinished rollouts by their continuations, drawn after a publish."""
        by_key = {rollout.key: rollout for rollout in drawn if rollout.seed == self.sampling.seed}
        assert by_key.keys() == {rollout.key for rollout in self.unfinished}, "a round with gaps"
        self.rollouts = [by_key.get(rollout.key, rollout) for rollout in self.rollouts]
        self.updated_at = published
        self.check()

    def check(self) -> None:
        """Assert that no rollout is missing, and that all began under the same weights."""
        assert len(self.rollouts) == len(self.prompts) * self.sampling.n, "a round with gaps"
        assert len(self.weight_versions) <= 1, "a round of mixed weights"

    def set_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Set the full prompts: a checkpoint only stores their ids."""
        by_uid = {prompt.uid: prompt for prompt in prompts}
        self.prompts = tuple(prompts)
        self.rollouts = [
            replace(r, prompt=_with_opening(by_uid[r.prompt.uid], r)) for r in self.rollouts
        ]


def _with_opening(prompt: Prompt, rollout: Rollout) -> Prompt:
    """Return the prompt of a rollout: that of its row, with the opening of its episode."""
    if not rollout.turns:
        return prompt
    names = ("messages", "token_ids", *OPENING_FIELDS)
    opening: dict[str, Any] = {name: getattr(rollout.prompt, name) for name in names}
    return replace(prompt, **opening)


def write_rounds(directory: Path, rounds: Sequence[Round], published: int) -> None:
    """Write rounds into the `state/` of a checkpoint; nothing when there are none."""
    if not rounds:
        return
    state = directory / "state"
    state.mkdir(exist_ok=True)
    # Numbers go into one array file, all other fields into JSON.
    rollouts = [rollout for round_ in rounds for rollout in round_.rollouts]
    ids = [np.asarray(r.token_ids, dtype=np.int64) for r in rollouts]
    logprobs = [np.asarray(r.sampler_logprobs, dtype=np.float32) for r in rollouts]
    np.savez(
        state / ARRAYS_FILE,
        lengths=np.array([len(row) for row in ids], dtype=np.int64),
        token_ids=np.concatenate(ids),
        sampler_logprobs=np.concatenate(logprobs),
    )
    saved = [_round_to_dict(round_, published) for round_ in rounds]
    (state / FIELDS_FILE).write_text(json.dumps({"rounds": saved}))


def read_rounds(directory: Path, published: int) -> list[Round]:
    """Return the rounds in a checkpoint, none if it has no such file; ModelError if it is damaged.

    `published` is the number of publishes so far: files store how long ago each round began.
    """
    path = directory / "state" / FIELDS_FILE
    if not path.exists():
        return []
    try:
        saved_rounds = json.loads(path.read_text())["rounds"]
        rows = _read_arrays(path.with_name(ARRAYS_FILE))
        rounds = [_round_from_dict(saved, rows, published) for saved in saved_rounds]
        if next(rows, None) is not None:
            raise ValueError("it has more rows than rollouts")
    except (*DAMAGED, AssertionError, StopIteration) as error:
        raise ModelError(
            f"The checkpoint {directory} is damaged: the rollouts that were sampled ahead cannot "
            f"be read ({error}). Name another one with --resume PATH, or delete "
            f"{path} to sample them anew."
        ) from error
    return rounds


def _round_to_dict(round_: Round, published: int) -> dict[str, Any]:
    """Return the part of a round that is saved as JSON: all but the responses' ids and log-probs.

    `published` is the number of publishes so far; the round's own are stored relative to it.
    """
    assert round_.updated_at is not None
    return {
        "publishes_ago": published - round_.begun_at,
        "moved_ago": published - round_.updated_at,
        "sampling": asdict(round_.sampling),
        "prompts": [{"uid": p.uid, "token_ids": list(p.token_ids)} for p in round_.prompts],
        "rollouts": [
            {"uid": r.prompt.uid}
            | {name: getattr(r, name) for name in ROLLOUT_FIELDS}
            | _episode_to_dict(r)
            for r in round_.rollouts
        ],
    }


def _episode_to_dict(rollout: Rollout) -> dict[str, Any]:
    """Return what an episode has besides a response's fields, as JSON values."""
    saved = {name: value for name in EPISODE_FIELDS if (value := getattr(rollout, name))}
    if rollout.turns:
        prompt = rollout.prompt
        saved |= {f"opening_{name}": getattr(prompt, name) for name in OPENING_FIELDS}
        saved |= {"messages": prompt.messages, "opening": prompt.token_ids}
        saved["turns"] = [asdict(turn) for turn in rollout.turns]
    return saved


Numbers = tuple[NDArray[np.int64], NDArray[np.float32]]


def _read_arrays(path: Path) -> Iterator[Numbers]:
    """Return an iterator over (token ids, log-probs) of the rollouts, in the written order."""
    with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
        ends = np.cumsum(saved["lengths"])[:-1]
        ids = np.split(saved["token_ids"], ends)
        logprobs = np.split(saved["sampler_logprobs"], ends)
    return iter(list(zip(ids, logprobs, strict=True)))


def _round_from_dict(saved: Mapping[str, Any], rows: Iterator[Numbers], published: int) -> Round:
    """Build a round from a checkpoint's JSON, and check it; the reverse of `_round_to_dict`.

    Takes token ids and log-probs of each rollout from `rows`. The prompts have ids but no text.
    """
    prompts = tuple(
        Prompt(p["uid"], text="", messages=(), rendered="", token_ids=tuple(p["token_ids"]))
        for p in saved["prompts"]
    )
    sampling = Sampling(**saved["sampling"] | {"stop": tuple(saved["sampling"].get("stop", ()))})
    by_uid = {prompt.uid: prompt for prompt in prompts}
    rollouts: list[Rollout] = []
    for saved_rollout in saved["rollouts"]:
        ids, logprobs = next(rows)
        saved_rollout = {
            "seed": sampling.seed,
            "carried": 0,
        } | saved_rollout  # older checkpoints lack them
        fields = {name: kind(saved_rollout[name]) for name, kind in ROLLOUT_FIELDS.items()}
        prompt, token_ids = by_uid[saved_rollout["uid"]], tuple(ids.tolist())
        fields |= {name: str(saved_rollout.get(name, "")) for name in EPISODE_FIELDS}
        if turns := saved_rollout.get("turns"):
            fields["turns"] = tuple(map(_read_turn, turns))
            opening: dict[str, Any] = {
                name: str(saved_rollout.get(f"opening_{name}", "")) for name in OPENING_FIELDS
            }
            messages, opening_ids = saved_rollout["messages"], saved_rollout["opening"]
            prompt = replace(
                prompt, messages=tuple(messages), token_ids=tuple(opening_ids), **opening
            )
        rollouts.append(
            Rollout(prompt=prompt, token_ids=token_ids, sampler_logprobs=logprobs, **fields)
        )
    # Publishes are stored relative to the checkpoint.
    ago = int(saved["publishes_ago"])
    moved_ago = int(saved.get("moved_ago", ago))
    round_ = Round(prompts, sampling, published - ago, rollouts, published - moved_ago)
    round_.check()
    return round_


def _read_turn(saved: Mapping[str, Any]) -> Turn:
    """Build a turn from a checkpoint's JSON, which has lists for tuples."""
    tools = tuple((str(name), float(seconds)) for name, seconds in saved["tools"])
    lists = {name: tuple(saved[name]) for name in ("replies", "context")}
    return Turn(**{**saved, **lists, "tools": tools})


Upcoming = Callable[[int], tuple[Sequence[Prompt], Sampling] | None]
# How long `close` waits for the thread: before it closes the inner engine, and after.
SECONDS_TO_STOP = 2.0
SECONDS_TO_LEAVE = 10.0


class AheadEngine:
    """Samples up to `steps` training rounds ahead of the step in training.

    Draws at most `partial_tokens` tokens of a response between two publishes. `upcoming(k)`
    returns prompts and sampling of the k-th step after the last one, None past the end of the run.
    The inner engine must be able to sample in one thread while it annotates, steps and saves in
    another, and raise the weight version by one at a publish. It never gets two rounds at a time,
    nor a publish during a round.
    """

    def __init__(
        self, engine: Engine, upcoming: Upcoming, steps: int, partial_tokens: int | None = None
    ) -> None:
        if steps < 1:
            raise ValueError(f"sampling runs ahead by at least 1 step, not {steps}")
        self._inner = engine
        self._upcoming = upcoming
        self._steps = steps
        self._partial_tokens = partial_tokens
        self._published = 0  # since this object was made: a round that was loaded began before
        self._first_version: int | None = None  # the inner engine's, when none was published
        self._rounds: list[Round] = []
        self._moving: list[Round] = []  # those that the thread samples
        self._lock = threading.Lock()  # a round moves in one go
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # the thread's, for the main thread to raise
        self._stopping = threading.Event()
        self._closed = False

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, begun: Sequence[Rollout] = ()
    ) -> Iterator[Rollout]:
        """Yield a round that was sampled ahead, or sample now.

        Sampled now are the first rounds of a run, greedy baselines and validations.
        """
        assert not begun, "what goes on here began here"
        # A complete round is returned; an unfinished one is finished now, without a limit.
        round_ = self._find(prompts, sampling, ahead=0)
        if round_ is None or not round_.is_complete:
            self._wait()  # one round at a time
        if round_ is None:
            for rollout in self._inner.generate(prompts, sampling):
                if rollout.token_ids:
                    self._check_version(rollout.weight_version, self._published)
                yield rollout
            return
        for version in round_.weight_versions:
            self._check_version(version, round_.begun_at)
        # Kept until its step is published: a step that is repeated uses it again.
        round_.consumed = True
        round_.set_prompts(prompts)
        unfinished = round_.unfinished
        yield from [rollout for rollout in round_.rollouts if rollout.finish_reason != "unfinished"]
        if unfinished:
            drawn: list[Rollout] = []
            for rollout in self._inner.generate((), sampling, unfinished):
                drawn.append(rollout)
                yield rollout
            round_.update(drawn, self._published)

    def annotate(self, batch: Batch) -> AnnotatedBatch:
        """Begin the next rounds in the background, then annotate this one."""
        # A round must not be older than `steps` publishes.
        version_R = batch.weight_version_B[batch.response_mask_BT.any(1)]
        if self._first_version is not None and len(version_R):
            present = self._first_version + self._published
            staleness = present - int(version_R.min())
            assert staleness <= self._steps, f"rollouts are {staleness} steps old"
        self._begin_rounds()
        return self._inner.annotate(batch)

    def step(self, minibatch: MiniBatch) -> Sums:
        """Take one optimizer step while rollouts are sampled."""
        return self._inner.step(minibatch)

    def publish(self) -> None:
        """Wait for the rounds that have begun, then send the new weights to the sampler."""
        self._wait()
        self._inner.publish()
        self._published += 1
        self._rounds = [round_ for round_ in self._rounds if not round_.consumed]

    def save(self, directory: Path, *, last: bool = False) -> Future[None]:
        """Save the inner engine, and the rounds of rollouts that no published step has used.

        What is being sampled now is not saved: a new round is left out, a partial one is saved as
        it was before, and a resumed run samples the rest with the same results. An error of the
        sampling thread does not prevent a checkpoint: the next `publish` or `generate` raises it.
        For `last` see `Engine.save`.
        """
        with self._lock:
            rounds = [copy(round_) for round_ in self._rounds if round_.updated_at is not None]
        write_rounds(directory, rounds, self._published)
        return self._inner.save(directory, last=last)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote.

        Missing rounds, as in the checkpoint of a run that sampled less far ahead, are sampled now.
        Rounds that are too old for `steps`, or with prompts or sampling that the run no longer
        needs, are dropped and sampled again.
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
        # The thread checks the flag after each rollout.
        self._stopping.set()
        thread = self._thread
        if thread is not None:
            thread.join(SECONDS_TO_STOP)
        try:
            self._inner.close()  # closing the sampler ends a running round
        finally:
            if thread is not None:
                thread.join(SECONDS_TO_LEAVE)
            self._rounds, self._thread = [], None

    def _find(self, prompts: Sequence[Prompt], sampling: Sampling, ahead: int) -> Round | None:
        """Return a round with these prompts that is fresh enough for the step `ahead`, or None."""
        for round_ in self._rounds:
            # The step `ahead` is trained after so many further publishes.
            staleness = self._published + ahead - round_.begun_at
            if staleness <= self._steps and round_.matches(prompts, sampling):
                return round_
        return None

    def _check_version(self, version: int, published: int) -> None:
        """Assert that the sampler has the weights of `published` publishes."""
        first = version - published
        assert self._first_version in (None, first), (
            f"weights {version} after {published} publishes"
        )
        self._first_version = first

    def _begin_rounds(self) -> None:
        """Start missing rounds of the next steps in the background; continue unfinished ones."""
        # Consumed rounds stay until their step is published.
        rounds = [round_ for round_ in self._rounds if round_.consumed]
        moving: list[Round] = []
        for ahead in range(1, self._steps + 1):
            upcoming = self._upcoming(ahead)
            if upcoming is None:
                break
            round_ = self._find(*upcoming, ahead)
            if round_ is None:
                round_ = Round(tuple(upcoming[0]), upcoming[1], self._published)
            rounds.append(round_)
            under_way = round_ in self._moving or round_.updated_at == self._published
            if not (round_.is_complete or under_way):
                round_.set_prompts(upcoming[0])
                moving.append(round_)
        # One thread at a time: the sampler is not reentrant.
        if moving:
            self._wait()
            self._moving = moving
            self._thread = threading.Thread(
                target=self._sample, args=(moving,), name="sampling-ahead", daemon=True
            )
            self._thread.start()
        self._rounds = rounds

    def _sample(self, rounds: Sequence[Round]) -> None:
        """Sample rounds in the background: partial ones together, others one by one."""
        together = [rounds] if self._partial_tokens else [[round_] for round_ in rounds]
        try:
            for group in together:
                if not self._sample_rounds(group):
                    return
        except BaseException as error:
            self._error = error

    def _sample_rounds(self, rounds: Sequence[Round]) -> bool:
        """Continue rounds; returns False if it was told to stop before their end."""
        begun = [rollout for round_ in rounds for rollout in round_.unfinished]
        # Rounds only differ in their seed, which each rollout has.
        sampling = replace(rounds[0].sampling, new_tokens=self._partial_tokens)
        drawn: list[Rollout] = []
        # All rollouts are continuations, also those without tokens.
        rollouts = self._inner.generate((), sampling, begun)
        # All engines return generators: closing one frees the sampler.
        with closing(cast("Generator[Rollout, None, None]", rollouts)):
            for rollout in rollouts:
                if self._stopping.is_set():
                    return False
                drawn.append(rollout)
        with self._lock:
            for round_ in rounds:
                round_.update(drawn, self._published)
        return True

    def _wait(self) -> None:
        """Wait for the sampling thread; raises its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._moving = []
        error, self._error = self._error, None
        if error is not None:
            self._rounds = [round_ for round_ in self._rounds if round_.updated_at is not None]
            raise error
