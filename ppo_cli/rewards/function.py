"""The reward that a user wrote: `compute_score` from a Python file, run in worker processes."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from ppo_cli.errors import RewardError, did_you_mean
from ppo_cli.records import Part, PlacedReward, Rollout, Score
from ppo_cli.rewards.base import Reward
from ppo_cli.rewards.pool import WorkerPool
from ppo_cli.rewards.returned import STEPS, TOKENS, Returned, Step
from ppo_cli.rewards.rule_reward import DEFAULT_NAME, FunctionTask
from ppo_cli.rewards.worker import Call


class FunctionReward(Reward):
    """Scores with the user's function; whatever it does, the run goes on."""

    name = "function"

    def __init__(
        self,
        spec: str,
        *,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = 10.0,
        num_workers: int = 2,
    ) -> None:
        path, function = find_file(spec)
        check_syntax(path)
        task = FunctionTask(str(path), function, dict(kwargs or {}))
        self._pool = WorkerPool(task, size=num_workers, timeout=timeout)
        try:
            self._pool.start()
        except BaseException:
            self._pool.close()
            raise

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Hand one rollout to a worker."""
        prompt = rollout.prompt
        call = Call(prompt.data_source, rollout.text, prompt.ground_truth, dict(prompt.extra_info))
        return self._pool.submit(call, partial(_score, rollout))

    def close(self) -> None:
        """Stop the workers."""
        self._pool.close()


def _score(rollout: Rollout, returned: Returned) -> Score:
    wrong = _misplaced(returned.steps, rollout)
    if wrong:
        return Score.failed(wrong, **returned.info)
    parts = {name: Part(raw=value, scaled=None) for name, value in returned.parts.items()}
    info = dict(returned.info)
    steps = tuple(PlacedReward(*step) for step in returned.steps)
    return Score(returned.score, returned.failure, returned.reason, parts, info, steps)


def _misplaced(steps: Sequence[Step], rollout: Rollout) -> str:
    """Say why these cannot be placed in a response; empty when they can."""
    tokens = [step for step in steps if step.unit == "token"]
    count = len(rollout.token_ids)
    ends = rollout.finish_reason == "stop"  # its last token is the end of the sequence
    if tokens and len(tokens) not in ((count - 1, count) if ends else (count,)):
        said = f"{count} tokens" + (", its end token included" if ends else "")
        return f"returned {len(tokens)} {TOKENS} for a response of {said}"
    length = len(rollout.text)
    past = next((s.end for s in steps if s.unit == "char" and not 0 < s.end <= length), None)
    if past is None:
        return ""
    return f"returned {STEPS} with offset {past}, outside the response's 1 to {length} characters"


def find_file(spec: str) -> tuple[Path, str]:
    """Split FILE[:NAME] and make sure that the file is there."""
    file, _, name = spec.rpartition(":")
    if not file or os.sep in name or name.endswith(".py"):
        file, name = spec, DEFAULT_NAME
    path = Path(file).expanduser()
    if not name.isidentifier():
        raise RewardError(
            f"--reward_function {spec}: {name!r} cannot be a function's name. "
            "Write FILE.py:NAME, or FILE.py for compute_score."
        )
    if path.is_dir():
        raise RewardError(f"--reward_function {spec}: {path} is a folder; name the Python file.")
    if not path.is_file():
        raise RewardError(f"--reward_function {spec}: there is no file {path}.{_near(path)}")
    return path.resolve(), name


def _near(path: Path) -> str:
    try:
        names = [p.name for p in path.parent.iterdir() if p.suffix == ".py"]
    except OSError:
        return f" The folder {path.parent} does not exist either."
    return did_you_mean(path.name, names)


def check_syntax(path: Path) -> None:
    """Raise with file and line when the file is not Python."""
    try:
        ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        line = (error.text or "").strip()
        shown = f": {line}" if line else ""
        raise RewardError(
            f"The reward function file {path} is not valid Python: line {error.lineno}: "
            f"{error.msg}{shown}"
        ) from error
    except (OSError, ValueError) as error:
        raise RewardError(f"The reward function file {path} cannot be read: {error}") from error
