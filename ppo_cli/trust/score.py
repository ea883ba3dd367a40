"""Score rollouts outside training, with the code that training uses.

Whatever stops it (budget, judge unavailable, Ctrl-C), verdicts so far are kept; missing ones say
"not asked", and a judge's cache lets the same command resume.

Repeats ask again, past every cache, what may answer otherwise. In a mixture each judge and each
function is asked by itself: what the others say does not change. A judge then keeps to what the
first scoring left of its budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ppo_cli.config.mixture import judges_of
from ppo_cli.config.reward_schema import ApiReward
from ppo_cli.config.reward_schema import Reward as RewardSettings
from ppo_cli.errors import Interrupted, RewardError
from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.redact import redact
from ppo_cli.rewards.base import Reward, RoundKind
from ppo_cli.rewards.registry import build_reward
from ppo_cli.run_folder import plain
from ppo_cli.trust.rows import Answered
from ppo_cli.trust.sources import kind_of, unsteady, with_all

NOT_ASKED = "not asked"
COUNTED = ("calls", "cost_usd", "tokens_in", "tokens_out")  # by each judge
BY_HAND = "Stopped by Ctrl-C."
POLL_S = 0.2
CUT = 100
# A share of failed verdicts is one of a step's responses, and a file is no step.
QUIET = {"canary_every": 0, "monitor.model": None, "max_failure_rate": 1.0}


@dataclass(frozen=True)
class Watch:
    """Callbacks for progress, for notes on why scoring waits, and for each score as it comes.

    `scored` is called by whatever thread has the score.
    """

    advance: Callable[[int], None] = lambda more: None
    note: Callable[[str], None] = lambda text: None
    scored: Callable[[Rollout, Score], None] = lambda rollout, score: None


@dataclass(frozen=True)
class Scoring:
    """Scores in the order of the rollouts; `stopped` says why some were never asked for."""

    scores: tuple[Score, ...]
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    stopped: str = ""


@contextmanager
def started(
    settings: RewardSettings, prompts: Sequence[Prompt], watch: Watch, folder: Path | None = None
) -> Iterator[Reward]:
    """Build the reward and try it out, as training does before its first rollout.

    What is spent counts with what earlier starts in `folder` have spent.

    What only watches a judge during training (canary replies, a second judge) stays off, in the
    parts of a mixture too; and a reward model that fails its self-test only gives a warning, since
    the scores themselves are shown.
    """
    if any(judge.settings.of_the_run for judge in judges_of(settings)):
        raise RewardError(
            "--rm_mode compare with pairs, list or base compares with other responses of a run, "
            "and there is none here. Use --rm_compare ground_truth, or --rm_mode text."
        )
    sources = {prompt.data_source for prompt in prompts}
    quiet = with_all(settings, "judge", QUIET)
    if settings.model.self_test == "strict":
        quiet = with_all(quiet, "model", {"self_test": "warn"})
    reward = build_reward(quiet, sources=sources)
    try:
        if folder is not None:
            reward.attach(folder)
        reward.start(prompts, tell=watch.note)
        yield reward
    finally:
        reward.close()


def score_all(
    reward: Reward, rollouts: Iterable[Rollout], watch: Watch, kind: RoundKind = "train"
) -> Scoring:
    """Submit every rollout as one step and gather the scores as they come.

    Rollouts may still be sampled meanwhile; those that never came, as it stopped, have no score.
    """
    started = time.monotonic()
    arrived: SimpleQueue[Future[Score]] = SimpleQueue()
    futures: list[Future[Score]] = []
    stopped = ""
    try:
        reward.begin_step(0)
        for rollout in rollouts:
            futures.append(reward.submit(rollout))
            futures[-1].add_done_callback(partial(_tell, watch, rollout, arrived))
        reward.settle(kind)
        _gather(reward, len(futures), arrived, watch)
    except Interrupted as reason:
        stopped = str(reason)
    except KeyboardInterrupt:
        stopped = BY_HAND
    metrics = reward.measure()
    cut = sum(int(value) for name, value in metrics.items() if name.endswith("/prompts_cut"))
    if cut:
        watch.note(f"{cut} prompts were cut to fit the reward model, from the left.")
    if stopped == BY_HAND:
        # A mixture holds its scores back until all of them are there, or no more will come.
        with suppress(KeyboardInterrupt):
            reward.close()
    scores = [_now(future) for future in futures]
    if isinstance(rollouts, Sequence):
        scores += [Score.failed(NOT_ASKED)] * (len(rollouts) - len(futures))
    return Scoring(tuple(scores), time.monotonic() - started, metrics, stopped)


def _tell(
    watch: Watch, rollout: Rollout, arrived: SimpleQueue[Future[Score]], future: Future[Score]
) -> None:
    """Hand a score on; an error in that (a full disk) reaches whoever waits for the score."""
    try:
        if not future.cancelled() and future.exception() is None:
            watch.scored(rollout, future.result())
    except OSError as error:
        future = Future()
        future.set_exception(error)
    arrived.put(future)


def _gather(reward: Reward, left: int, arrived: SimpleQueue[Future[Score]], watch: Watch) -> None:
    """Wait for all that are left; raises what a future raises."""
    noted: str | None = None
    while left:
        try:
            future = arrived.get(timeout=POLL_S)
        except Empty:
            why = reward.waiting_for()
            if why is not None and why != noted:
                watch.note(why)
            noted = why
            continue
        future.result()
        left -= 1
        watch.advance(1)


def _now(future: Future[Score]) -> Score:
    """The score as far as it is there."""
    if not future.done() or future.cancelled() or future.exception() is not None:
        future.cancel()
        return Score.failed(NOT_ASKED)
    return future.result()


def to_go_on(settings: RewardSettings) -> str:
    """What to do after an early stop."""
    if any(judge.settings.cache != "off" for judge in judges_of(settings)):
        return "Run the same command again: the verdicts that are there come from the cache."
    return "Run the same command again."


def scored_row(row: Answered, score: Score) -> dict[str, Any]:
    """The row as it stands in the file, with its score."""
    said: dict[str, Any] = plain(
        {
            "score": score.value,
            "failure": score.failure or None,
            "reason": score.reason,
            "parts": {n: {"raw": p.raw, "scaled": p.scaled} for n, p in score.parts.items()},
            "info": score.facts,
        }
    )
    return {**row.record, **said}


def judged(score: Score) -> float | None:
    """A score that was really given; an imputed one does not count."""
    return score.value if score.judged else None


def cause_of(score: Score) -> str:
    """The short word for a failure: how its text begins."""
    cause = score.failure or score.imputed
    first, _, rest = cause.partition(":")
    if first in score.parts and rest:  # of a mixture: which part, then why
        first = f"{first}: {rest.partition(':')[0].strip()}"
    return redact(first.strip()) or "unknown"


def cut(text: str, most: int = CUT) -> str:
    """The text on one line, its middle left out when it is long."""
    line = " ".join(redact(text).split())
    half = (most - 3) // 2
    return line if len(line) <= most else f"{line[:half]} … {line[-half:]}"


def counted(metrics: Mapping[str, float]) -> dict[str, float]:
    """The sums over all judges; without a cost where that of one is not known."""
    judges = by_judge(metrics).values()
    names = [name for name in COUNTED if any(name in one for one in judges)]
    found = {name: sum(one.get(name, 0.0) for one in judges) for name in names}
    # Tokens that cost nothing have no known price: better no figure than a wrong one.
    if any(one.get("tokens_in") and not one.get("cost_usd") for one in judges):
        found.pop("cost_usd", None)
    return found


def by_judge(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Calls, tokens and cost of each judge; `judge`, and `judge_NAME` for a second one."""
    found: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        stage, _, name = key.partition("/")
        if name in COUNTED and (stage == "judge" or stage.startswith("judge_")):
            found.setdefault(stage, {})[name] = value
    return found


@dataclass
class Repeats:
    """Fresh verdicts on each rollout, by part; `stopped` says why some are missing."""

    verdicts: dict[str, list[list[float]]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    stopped: str = ""


def ask_again(
    reward: Reward,
    settings: RewardSettings,
    rollouts: Sequence[Rollout],
    times: int,
    watch: Watch,
    before: Mapping[str, float],
) -> Repeats:
    """Ask every part that is not steady; `before` is what the first asking was measured at."""
    found, mixed = Repeats(), kind_of(settings) == "mixture"
    prompts = [rollout.prompt for rollout in rollouts]
    for name, alone in unsteady(settings).items():
        try:
            if mixed and alone.api.enable:
                alone = alone.model_copy(update={"api": _left_of(alone.api, name, before)})
            # A reward alone is asked as it is, a part of a mixture is started anew.
            with started(alone, prompts, watch) if mixed else nullcontext(reward) as one:
                found.stopped, found.verdicts[name] = repeat_all(one, rollouts, times, watch)
                for key, value in one.measure().items():
                    # Each judge is counted separately, so that an unknown price stays unknown.
                    stage, _, rest = key.partition("/")
                    own = f"judge_{name}/{rest}" if stage == "judge" else key
                    found.metrics[own] = found.metrics.get(own, 0.0) + value
        except Interrupted as reason:
            found.stopped = str(reason)
        if found.stopped:
            break
    return found


def _left_of(api: ApiReward, name: str, before: Mapping[str, float]) -> ApiReward:
    """A judge's settings with the budget that is left."""
    judges = by_judge(before)
    spent = judges.get(f"judge_{name}") or judges.get("judge", {})
    tokens = spent.get("tokens_in", 0.0) + spent.get("tokens_out", 0.0)
    left: dict[str, Any] = {}
    if api.budget_usd is not None:
        left["budget_usd"] = api.budget_usd - spent.get("cost_usd", 0.0)
    if api.budget_tokens is not None:
        left["budget_tokens"] = api.budget_tokens - round(tokens)
    if any(most <= 0 for most in left.values()):
        raise Interrupted(f"The budget of the judge '{name}' is used up.")
    return api.model_copy(update=left)


def repeat_all(
    reward: Reward, rollouts: Sequence[Rollout], times: int, watch: Watch
) -> tuple[str, list[list[float]]]:
    """Ask for fresh verdicts on each rollout; returns why it stopped, and the verdicts so far."""
    asked: list[list[Future[Any]]] = []
    found: list[list[float]] = []
    try:
        reward.begin_step(1)
        # A judge is asked past its cache; anything else is simply asked again.
        past_cache = getattr(reward, "repeat", None)
        for rollout in rollouts:
            again = [past_cache(rollout, times)] if past_cache else []
            asked.append(again or [reward.submit(rollout) for _ in range(times)])
        reward.settle()
        for futures in asked:
            while wait(futures, timeout=1.0).not_done:
                pass
            answers = [future.result() for future in futures]
            scores = [s for a in answers for s in ([a] if isinstance(a, Score) else a)]
            found.append([value for s in scores if (value := judged(s)) is not None])
            watch.advance(1)
    except Interrupted as reason:
        return str(reason), found
    except KeyboardInterrupt:
        return BY_HAND, found
    return "", found
