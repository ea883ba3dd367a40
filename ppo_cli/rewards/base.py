"""The interface of every reward, and of a reward function: what it is given and may return.

`submit` returns at once; the future it returns always resolves to a `Score`, and a failure to
judge is a `Score` whose value is None. The future raises only what must stop the run
(a `PpoError`); after an `Interrupted` a resumed run asks for the same scores again. Callers may
submit from one thread only; the work happens elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from ppo_cli.errors import WorkerLost
from ppo_cli.records import Part, PlacedReward, Prompt, Rollout, Score

RoundKind = Literal["train", "baseline", "validation"]
LabelledRollouts = Sequence[tuple[Rollout, float]]
Tell = Callable[[str], None]  # shows the user a line


def tell_nobody(text: str) -> None:
    """Show a line to nobody."""


class Reward(Protocol):
    """Scores rollouts, one by one, as they finish."""

    name: str

    def start(
        self, prompts: Sequence[Prompt], *, patient: bool = False, tell: Tell = tell_nobody
    ) -> None:
        """Try the reward out before any rollout, on prompts that it will have to score.

        `patient` waits for a judge that is down (a run that goes on) instead of giving up at
        once. Raises RewardError with what is wrong.
        """
        return

    def prompts_for_reference(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """Of which prompts it needs the starting model's greedy response, before any score."""
        return ()

    def set_references(self, rollouts: Sequence[Rollout]) -> None:
        """Take these responses."""
        return

    def set_labelled(self, labelled: Mapping[str, LabelledRollouts]) -> None:
        """Take responses that people have labelled, by the file that settings name."""
        return

    def check_format(self, tell: Tell) -> None:
        """Ask questions with known answers, and report a judge that gets one wrong."""
        return

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Start scoring one rollout; never blocks on the answer."""
        ...

    def begin_step(self, step: int) -> None:
        """Say that what is submitted from now on belongs to `step`."""
        return

    def end_round(self, kind: RoundKind = "train") -> None:
        """Say that all of this round is submitted: now decide what becomes of failed ones.

        A round is the rollouts of a step, the greedy baselines beside them, or a validation;
        running statistics learn from the first kind only.
        Returns at once. A reward may hold back the futures of rollouts that it could not score
        until this is called, to ask again for all of them when too many failed.
        """
        return

    def waiting_for(self) -> str | None:
        """Say in one sentence why nothing moves at the moment, or return None."""
        return None

    def pop_metrics(self) -> dict[str, float]:
        """Metrics of what was scored since the last call, under flat names (`judge/calls`)."""
        return {}

    def attach(self, folder: Path) -> None:
        """Take the run's folder, for what must outlive a killed process."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run must remember (JSON-serialisable); {} when nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        return

    def close(self) -> None:
        """Free processes, threads and connections. Safe to call twice."""
        ...


# A reward that needs a device says what is to be made, by a factory that pickles, and talks to it
# by method names. It does not know who makes it, or where: in this process, or in one of its own.
Factory = Callable[[], Any]


class Host(Protocol):
    """An object that was made by a factory, wherever it lives; one call at a time."""

    @property
    def alive(self) -> bool:
        """Whether it can still be called: not lost, not closed, nor the cluster under it."""
        ...

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object; arguments and result pickle.

        A PpoError that the method raises comes out as itself. Raises WorkerLost when the
        object's process died, does not answer in time or was closed, at any moment of the call.
        """
        ...

    def close(self) -> None:
        """Close the object and end its process, also one that is lost. Safe to call twice."""
        ...


# Takes a factory and the name of the reward that it is for.
HostMaker = Callable[[Factory, str], Host]


class InProcess:
    """The object lives here, where nothing else was arranged, and its errors are its own."""

    def __init__(self, factory: Factory, name: str = "") -> None:
        self._made = factory()
        self._closed = False

    @property
    def alive(self) -> bool:
        """Until it is closed."""
        return not self._closed

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object."""
        if self._closed:
            raise WorkerLost("This reward was closed.")
        return getattr(self._made, method)(*args)

    def close(self) -> None:
        """Close the object."""
        if not self._closed:
            self._closed = True
            self._made.close()


TOKENS = "token_rewards"
STEPS = "step_rewards"
ENDS = ("offset", "end")
VALUES = ("value", "score", "reward")
LARGEST = 1e30  # beyond this the sums and squares of scores are no numbers any more


@dataclass(frozen=True)
class Call:
    """One response to score."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


def read_placed(form: str, value: Any) -> tuple[PlacedReward, ...]:
    """Read one of the two forms; ValueError says in words what is wrong."""
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
    if isinstance(item, Mapping):
        end, value = _first(item, ENDS), _first(item, VALUES)
    elif isinstance(item, list | tuple) and len(item) == 2:
        end, value = item
    else:
        raise ValueError(f"{where} is neither a pair (offset, value) nor a dict with both")
    place = _number(f"{where} offset", end)
    if place != int(place):
        raise ValueError(f"{where} offset {place:g} is not a whole number of characters")
    return PlacedReward(int(place), _number(where, value))


def _first(item: Mapping[Any, Any], names: Sequence[str]) -> Any:
    return next((item[name] for name in names if name in item), None)


def _number(where: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, str | bytes) or not abs(number) <= LARGEST:
        raise ValueError(f"{where} is {value!r}, not a finite number of a usable size"[:200])
    return number


LONGEST_TEXT = 2000
DEEPEST = 6


class CannotScore(Exception):
    """A rule has no way to score this row; the message becomes the failure."""


def read_returned(value: Any) -> Score:
    """Read a float, int, bool, numpy number, list of placed rewards or dict; never raises.

    A dict has `score`, or `token_rewards` or `step_rewards` (see `read_placed`), whose sum is the
    score where none is given.
    """
    try:
        if isinstance(value, list) and value:
            # By itself: of pairs by step, of numbers by token.
            form = STEPS if isinstance(value[0], Mapping | list | tuple) else TOKENS
            return _summed(read_placed(form, value))
        if isinstance(value, Mapping):
            return _read_mapping(value)
    except ValueError as problem:
        return Score.failed(f"returned {problem}")
    return Score(*_finite(value, "returned"))


def _read_mapping(value: Mapping[Any, Any]) -> Score:
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
    text = reason[:LONGEST_TEXT] if isinstance(reason, str) else ""
    if "score" not in value:
        return _summed(steps, reason=text, parts=parts, info=info)
    score, failure = _finite(value["score"], "returned score")
    return Score(score, failure, text, parts, info, steps if score is not None else ())


def _summed(steps: tuple[PlacedReward, ...], **fields: Any) -> Score:
    """The score of placed rewards that come without one: their sum."""
    return Score(math.fsum(step.value for step in steps), steps=steps, **fields)


def as_plain(value: Any, depth: int = 0) -> Any:
    """Return a value that JSON can hold; long texts are cut, strange objects become text."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value[:LONGEST_TEXT]
    if depth < DEEPEST and isinstance(value, Mapping):
        return {str(k): as_plain(v, depth + 1) for k, v in value.items()}
    if depth < DEEPEST and isinstance(value, (list, tuple, set, frozenset)):
        return [as_plain(v, depth + 1) for v in value]
    number, _ = _finite(value, "")
    if number is not None:
        return number
    try:
        return repr(value)[:LONGEST_TEXT]
    except Exception:
        return f"<{type(value).__name__}>"


def describe_error(error: BaseException) -> str:
    """Return `ValueError: text` for an error, its text cut and on one line."""
    try:
        text = " ".join(str(error).split())[:300]
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _finite(value: Any, verb: str) -> tuple[float | None, str]:
    """Return the number, or None and what is wrong with it."""
    if value is None:
        return None, f"{verb} None; is a `return` missing?"
    if isinstance(value, (str, bytes)):
        return None, f"{verb} text {value[:40]!r}, not a number"
    try:
        number = float(value.item()) if hasattr(value, "item") else float(value)
    except OverflowError:
        return None, f"{verb} a number too large for a float"
    except Exception:
        return None, f"{verb} {type(value).__name__}, not a number"
    if not abs(number) <= LARGEST:
        return None, f"{verb} {number}" + (", too large" if math.isfinite(number) else "")
    return number, ""
