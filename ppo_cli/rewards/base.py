"""The interface of every reward, and what a reward function receives and may return.

`submit` returns immediately. Its future resolves to a `Score`; a response that could not be scored
is a `Score` with the value None. The future raises only errors that must stop the run (a
`PpoError`); after an `Interrupted` a resumed run submits the same responses again. Callers submit
from one thread only; the work happens in other threads and processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from ppo_cli.errors import WorkerLost
from ppo_cli.records import Part, PlacedReward, Prompt, Rollout, Score

RoundKind = Literal["train", "baseline", "validation"]


class RunLength(NamedTuple):
    """The steps of a run and of a pass over its rows; one of each outside of runs."""

    total_steps: int = 1
    steps_per_epoch: int = 1


LabelledRollouts = Sequence[tuple[Rollout, float]]
Tell = Callable[[str], None]  # shows the user a line


def tell_nobody(text: str) -> None:
    """Discard a line; the default where the caller shows nothing."""


class Reward(Protocol):
    """Scores rollouts, each as soon as it is finished."""

    name: str

    def start(
        self, prompts: Sequence[Prompt], *, patient: bool = False, tell: Tell = tell_nobody
    ) -> None:
        """Test the reward before any rollout, on prompts that it will have to score.

        `patient` waits for a judge that is down (for a resumed run) instead of failing at once.
        Raises RewardError with what is wrong.
        """
        return

    def prompts_for_reference(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """Return the prompts for which it needs the initial model's greedy response."""
        return ()

    def set_references(self, rollouts: Sequence[Rollout]) -> None:
        """Receive the initial model's responses to `prompts_for_reference`."""
        return

    def set_labelled(self, labelled: Mapping[str, LabelledRollouts]) -> None:
        """Receive human-labelled responses, by the file name in the settings."""
        return

    def check_format(self, tell: Tell) -> None:
        """Ask a judge questions with known answers, and show a warning for a wrong verdict."""
        return

    def read_wishes(
        self, text: str, features: Sequence[str], tell: Tell
    ) -> Mapping[str, int] | None:
        """Ask a judge of which features a text wants more (1) or less (-1); None without one.

        A judge with `canary_every` 0 is not asked.
        """
        return None

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Start scoring one rollout without waiting for the score.

        What a user's code raises is a failed score.
        """
        ...

    def begin_run(self, length: RunLength) -> None:
        """Receive how many steps the run has, before the first one."""
        return

    def begin_step(self, step: int) -> None:
        """Announce that everything submitted from now on belongs to `step`."""
        return

    def end_round(self, kind: RoundKind = "train") -> None:
        """Announce that the whole round is submitted, so that its failures can be decided.

        A round is the rollouts of a step, their greedy baselines, or a validation. Running
        statistics learn only from the rollouts of a step. Returns immediately. A reward may keep
        failed rollouts open until this call, to retry all of them if too many failed.
        """
        return

    def waiting_for(self) -> str | None:
        """Return one sentence about why scoring is paused at the moment, or None."""
        return None

    def pop_metrics(self) -> dict[str, float]:
        """Return metrics of the scores since the last call, under flat names (`judge/calls`)."""
        return {}

    def attach(self, folder: Path) -> None:
        """Receive the run's folder, to write what must survive a killed process."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know (JSON-serialisable); {} for nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        return

    def close(self) -> None:
        """Free processes, threads and connections. Safe to call twice."""
        ...


def submit_rollout(reward: Reward, rollout: Rollout) -> Future[Score]:
    """Submit a rollout; the score of an episode that its environment could not finish is failed."""
    return resolved(Score.failed(rollout.failure)) if rollout.failure else reward.submit(rollout)


def resolved(score: Score) -> Future[Score]:
    """Return the future of a score that is there already."""
    future: Future[Score] = Future()
    future.set_result(score)
    return future


# A reward that needs a device passes a picklable factory of an object, and calls its methods by
# name. It does not know whether the object is in this process or in a separate one.
Factory = Callable[[], Any]


class Host(Protocol):
    """An object created by a factory, in this or another process; takes one call at a time."""

    @property
    def alive(self) -> bool:
        """Whether it can still be called: its process is alive, and nothing is closed."""
        ...

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object; arguments and result must be picklable.

        Raises a PpoError of the method unchanged. Raises WorkerLost when the object's process
        died, does not answer in time or was closed, at any moment of the call.
        """
        ...

    def close(self) -> None:
        """Close the object and end its process, even a lost one. Safe to call twice."""
        ...


# Called with a factory and the name of the reward.
HostMaker = Callable[[Factory, str], Host]


class InProcess:
    """A host in this process, the default: calls the object directly."""

    def __init__(self, factory: Factory, name: str = "") -> None:
        self._object = factory()
        self._closed = False

    @property
    def alive(self) -> bool:
        """True until it is closed."""
        return not self._closed

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object."""
        if self._closed:
            raise WorkerLost("This reward was closed.")
        return getattr(self._object, method)(*args)

    def close(self) -> None:
        """Close the object."""
        if not self._closed:
            self._closed = True
            self._object.close()


# Keys of a returned dict, and of the dicts in its list of step rewards.
TOKENS = "token_rewards"
STEPS = "step_rewards"
ENDS = ("offset", "end")
VALUES = ("value", "score", "reward")
MAX_MAGNITUDE = 1e30  # the squares of larger scores overflow in sums


@dataclass(frozen=True)
class Call:
    """The arguments of a reward function for one response."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


def read_placed(form: str, value: Any) -> tuple[PlacedReward, ...]:
    """Read `token_rewards` or `step_rewards`; ValueError says what is wrong."""
    # Tensors and arrays count as lists.
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise ValueError(f"{form} is {type(value).__name__}, not a list")
    if form == TOKENS:
        return tuple(
            PlacedReward(place, _number(f"{form}[{place - 1}]", item), "token")
            for place, item in enumerate(items, start=1)
        )
    return tuple(_step(f"{form}[{place}]", item) for place, item in enumerate(items))


def _step(where: str, item: Any) -> PlacedReward:
    """Return the placed reward of a pair (offset, value) or a dict with both.

    Raises ValueError, which starts with `where`, for any other item or an offset that is not whole.
    """
    if isinstance(item, Mapping):
        end, value = _first(item, ENDS), _first(item, VALUES)
    elif isinstance(item, list | tuple) and len(item) == 2:
        end, value = item
    else:
        raise ValueError(f"{where} is neither a pair (offset, value) nor a dict with both")
    place = _number(f"{where} offset", end)
    if place != int(place) or place < 0:
        raise ValueError(f"{where} offset {place:g} is not a whole number of characters from 0 up")
    return PlacedReward(int(place), _number(where, value))


def _first(item: Mapping[Any, Any], names: Sequence[str]) -> Any:
    return next((item[name] for name in names if name in item), None)


def _number(where: str, value: Any) -> float:
    """Return a finite float; ValueError, which starts with `where`, for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, str | bytes) or not abs(number) <= MAX_MAGNITUDE:
        raise ValueError(f"{where} is {value!r}, not a finite number of a usable size"[:200])
    return number


# What the records keep of a function's texts and nested values.
MAX_TEXT_CHARS = 2000
MAX_DEPTH = 6


class CannotScore(Exception):
    """A rule cannot score this row; the message becomes the failure of the score."""


@dataclass(frozen=True)
class BatchScore(Score):
    """What a function returned for several responses: a score of each, in order."""

    scores: tuple[Score, ...] = ()


def describe_episode(rollout: Rollout) -> dict[str, Any]:
    """Return what a function reads of an episode in `extra_info`; {} for a single response.

    `messages` is the conversation. `num_turns` counts the opening, the turns and the rounds of
    replies, as in verl. `turn_rewards` has the environment's reward of each turn.
    """
    if not rollout.turns:
        return {}
    return {
        "messages": [dict(message) for message in rollout.messages],
        "num_turns": 1 + sum(2 if turn.replies else 1 for turn in rollout.turns),
        "turn_rewards": [math.fsum(turn.rewards.values()) for turn in rollout.turns],
    }


def read_returned(value: Any) -> Score:
    """Read a float, int, bool, numpy number, list of placed rewards or dict; never raises.

    A dict has `score`, or `token_rewards` or `step_rewards` (see `read_placed`), whose sum is the
    default of the score. A `Score` stays as it is.
    """
    if isinstance(value, Score):
        return value
    try:
        if isinstance(value, list) and value:
            # A list without a key: pairs and dicts are step rewards, numbers are token rewards.
            form = STEPS if isinstance(value[0], Mapping | list | tuple) else TOKENS
            return _summed(read_placed(form, value))
        if isinstance(value, Mapping):
            return _read_mapping(value)
    except ValueError as problem:
        return Score.failed(f"returned {problem}")
    return Score(*_finite(value, "returned"))


def _read_mapping(value: Mapping[Any, Any]) -> Score:
    """Return the score of a dict from a reward function; ValueError for malformed placed rewards.

    Without `score`, it is the sum of `token_rewards` and `step_rewards`. Without all three, or with
    a score that is not a finite number, it is a failure. Except for `reason`, other keys become
    parts (numbers) or information.
    """
    # Both forms may be given together.
    steps = tuple(
        placed
        for form in (TOKENS, STEPS)
        if value.get(form) is not None
        for placed in read_placed(form, value[form])
    )
    if "score" not in value and not steps:
        keys = ", ".join(repr(k) for k in list(value)[:8]) or "nothing"
        if value.get(TOKENS) is not None or value.get(STEPS) is not None:
            keys += ", which is empty"
        return Score.failed(f"returned a dict without 'score' (it has {keys})")
    # Other keys: numbers are parts of the score, anything else is recorded as information.
    parts: dict[str, Part] = {}
    info: dict[str, Any] = {}
    for key, item in value.items():
        if key in ("score", TOKENS, STEPS) or (key == "reason" and isinstance(item, str)):
            continue
        number, problem = _finite(item, "")
        if number is not None or problem.strip() in ("nan", "inf", "-inf"):
            parts[str(key)] = Part(number, None)
        else:
            info[str(key)] = as_plain(item)
    reason = value.get("reason")
    text = reason[:MAX_TEXT_CHARS] if isinstance(reason, str) else ""
    if "score" not in value:
        return _summed(steps, reason=text, parts=parts, info=info)
    score, failure = _finite(value["score"], "returned score")
    return Score(score, failure, text, parts, info, steps if score is not None else ())


def _summed(steps: tuple[PlacedReward, ...], **fields: Any) -> Score:
    """Return a score whose value is the sum of the placed rewards."""
    return Score(math.fsum(step.value for step in steps), steps=steps, **fields)


def as_plain(value: Any, depth: int = 0) -> Any:
    """Return a value that JSON can represent; long texts are cut, other objects become text."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value[:MAX_TEXT_CHARS]
    if depth < MAX_DEPTH and isinstance(value, Mapping):
        return {str(k): as_plain(v, depth + 1) for k, v in value.items()}
    if depth < MAX_DEPTH and isinstance(value, (list, tuple, set, frozenset)):
        return [as_plain(v, depth + 1) for v in value]
    # numpy scalars, fractions and the like.
    number, _ = _finite(value, "")
    if number is not None:
        return number
    try:
        return repr(value)[:MAX_TEXT_CHARS]
    except Exception:
        return f"<{type(value).__name__}>"


def _finite(value: Any, verb: str) -> tuple[float | None, str]:
    """Return (number, ""), or (None, problem); `verb` begins the problem ("returned score")."""
    if value is None:
        return None, f"{verb} None (is a `return` missing?)"
    if isinstance(value, (str, bytes)):
        return None, f"{verb} text {value[:40]!r}, not a number"
    try:
        number = float(value.item()) if hasattr(value, "item") else float(value)
    except OverflowError:
        return None, f"{verb} a number too large for a float"
    except Exception:
        return None, f"{verb} {type(value).__name__}, not a number"
    if not abs(number) <= MAX_MAGNITUDE:
        return None, f"{verb} {number}" + (", too large" if math.isfinite(number) else "")
    return number, ""
