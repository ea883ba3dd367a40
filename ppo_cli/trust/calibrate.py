"""How far a reward can be trusted: agreement with labels, with itself, biases and cost."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo_cli.errors import Interrupted
from ppo_cli.records import Rollout, Score
from ppo_cli.redact import redact
from ppo_cli.rewards.base import Reward
from ppo_cli.tracker import Screen
from ppo_cli.trust import statistics as st
from ppo_cli.trust.advice import advise
from ppo_cli.trust.labels import Labelled
from ppo_cli.trust.score import (
    Scoring,
    Watch,
    add_spending,
    cause_of,
    judged,
    score_all,
    spending,
)

FEWEST = 10
SAMPLE = 50
Rows = NDArray[np.intp]


@dataclass(frozen=True)
class Columns:
    """The rows that got a score, as columns."""

    scores: st.Floats
    labels: st.Floats
    positive: NDArray[np.bool_] | None
    lengths: st.Floats
    order: st.Floats
    prompts: tuple[str, ...]


def calibrate(
    reward: Reward, labelled: Labelled, *, repeat: int, votes: int, screen: Screen
) -> dict[str, Any]:
    """Score the rows, ask a sample again, and hold everything against the labels."""
    rollouts = [row.rollout for row in labelled.rows]
    again = _sample(rollouts) if repeat > 1 else []
    calls = len(rollouts) * votes + len(again) * repeat
    screen.note(
        f"Asking for at most {calls:,} verdicts: {len(rollouts):,} rows"
        + (f" x {votes} votes" if votes > 1 else "")
        + (f", and {len(again)} of them {repeat} times again" if again else "")
        + "."
    )
    with screen.phase("score", len(rollouts)) as advance:
        scoring = score_all(reward, rollouts, Watch(advance, screen.note))
    columns = _columns(labelled, scoring)
    stopped = scoring.stopped
    verdicts: list[list[float]] = []
    before = time.monotonic()
    if not stopped and again:
        with screen.phase("repeat", len(again)) as advance:
            stopped, verdicts = repeat_all(reward, again, repeat, Watch(advance, screen.note))
    took = time.monotonic() - before
    spent = add_spending(spending(scoring.scores, scoring), reward.measure())
    result: dict[str, Any] = {
        "rows": len(rollouts),
        "scored": len(columns.scores),
        "failed": dict(
            Counter(cause_of(s) for s in scoring.scores if judged(s) is None).most_common()
        ),
        "labels": labelled.said,
        "agreement": agreement_of(columns),
        "bias": bias_of(columns),
        "repeated": _repeated(verdicts, repeat),
        "spent": spent,
        "per_1000": per_thousand(
            scoring, spent | {"seconds": scoring.seconds + took}, sum(map(len, verdicts)), votes
        ),
        "stopped": redact(stopped),
    }
    return {**result, "advice": advise(result)}


def _sample(rollouts: Sequence[Rollout]) -> list[Rollout]:
    if len(rollouts) <= SAMPLE:
        return list(rollouts)
    chosen = np.random.default_rng(0).choice(len(rollouts), SAMPLE, replace=False)
    return [rollouts[i] for i in sorted(chosen)]


def repeat_all(
    reward: Reward, rollouts: Sequence[Rollout], times: int, watch: Watch
) -> tuple[str, list[list[float]]]:
    """Ask for fresh verdicts on each rollout; returns why it stopped, and the verdicts so far."""
    asked: list[list[Future[Any]]] = []
    found: list[list[float]] = []
    try:
        reward.begin_step(1)
        asked = [fresh(reward, rollout, times) for rollout in rollouts]
        reward.settle()
        for futures in asked:
            while wait(futures, timeout=1.0).not_done:
                pass
            scores = [score for future in futures for score in as_scores(future.result())]
            found.append([value for s in scores if (value := judged(s)) is not None])
            watch.advance(1)
    except Interrupted as reason:
        return str(reason), found
    except KeyboardInterrupt:
        return "Stopped by Ctrl-C.", found
    return "", found


def fresh(reward: Reward, rollout: Rollout, times: int) -> list[Future[Any]]:
    """Ask a judge past its cache; anything else is simply asked again."""
    ask: Callable[[Rollout, int], Future[Any]] | None = getattr(reward, "repeat", None)
    if ask is not None:
        return [ask(rollout, times)]
    return [reward.submit(rollout) for _ in range(times)]


def as_scores(answer: Score | Sequence[Score]) -> Sequence[Score]:
    """One score or several, as several."""
    return [answer] if isinstance(answer, Score) else answer


def _columns(labelled: Labelled, scoring: Scoring) -> Columns:
    values = {
        i: value for i, score in enumerate(scoring.scores) if (value := judged(score)) is not None
    }
    kept = list(values)
    rows = [labelled.rows[i].rollout for i in kept]
    return Columns(
        scores=st.as_floats(list(values.values())),
        labels=labelled.values[kept],
        positive=None if labelled.positive is None else labelled.positive[kept],
        lengths=st.as_floats([len(row.text) for row in rows]),
        order=st.as_floats(kept),
        prompts=tuple(row.prompt.text for row in rows),
    )


def agreement_of(columns: Columns) -> dict[str, dict[str, Any]]:
    """Accuracy, AUC and correlations with the labels, each with its interval."""
    x, y, good = columns.scores, columns.labels, columns.positive
    found: dict[str, dict[str, Any]] = {}
    classes = "labels of two classes are needed" if good is None else ""
    flags = np.zeros(len(x), dtype=bool) if good is None else good
    level, labels = st.coded(x), st.coded(y)

    def best(rows: Rows) -> float | None:
        chosen = st.best_threshold(level[rows], flags[rows])
        return None if chosen is None else chosen[1]

    unfit = classes or _one_class(flags) or _flat("score", x)
    threshold = st.best_threshold(x, flags)
    found["accuracy at the best threshold"] = _estimate(columns, best, unfit) | {
        "at": None if unfit or threshold is None else min(threshold[0], 1e9)
    }
    found["accuracy at 0.5"] = _estimate(
        columns, lambda rows: st.accuracy_at(x[rows], flags[rows], 0.5), classes
    )
    found["AUC"] = _estimate(columns, lambda rows: st.auc(level[rows], flags[rows]), unfit)
    flat = _flat("score", x) or _flat("label", y)
    found["Spearman"] = _estimate(
        columns, lambda rows: st.spearman(level[rows], labels[rows]), flat
    )
    found["Pearson"] = _estimate(columns, lambda rows: st.pearson(x[rows], y[rows]), flat)
    return found


def bias_of(columns: Columns) -> dict[str, dict[str, Any]]:
    """Rank correlations of the score with what should not matter."""
    x, y = st.coded(columns.scores), st.coded(columns.labels)
    size, order = st.coded(columns.lengths), st.coded(columns.order)
    same_score = _flat("score", columns.scores)
    flat = same_score or _flat("response's length", columns.lengths)
    found = {
        "length": _estimate(columns, lambda rows: st.spearman(x[rows], size[rows]), flat),
        "length, labels held equal": _estimate(
            columns,
            lambda rows: st.partial_spearman(x[rows], size[rows], y[rows]),
            flat or _flat("label", columns.labels),
        ),
    }
    groups = _groups(columns.prompts)
    if not groups:
        found["position in the file"] = _estimate(
            columns, lambda rows: st.spearman(x[rows], order[rows]), same_score
        )
        return found
    scores, places = _within_groups(columns.scores, groups)
    within, place = st.coded(np.round(scores, 9)), st.coded(places)
    found["position among answers to one prompt"] = _estimate(
        columns,
        lambda rows: st.spearman(within[rows], place[rows]),
        _flat("score within a prompt", scores),
        len(scores),
    )
    return found


def _groups(prompts: Sequence[str]) -> list[list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        found[prompt].append(index)
    return [rows for rows in found.values() if len(rows) > 1]


def _within_groups(
    scores: st.Floats, groups: Sequence[Sequence[int]]
) -> tuple[st.Floats, st.Floats]:
    """Scores less their group's mean, and places less theirs, of all rows in groups."""
    values = [scores[i] - np.mean(scores[list(rows)]) for rows in groups for i in rows]
    places = [k - (len(rows) - 1) / 2 for rows in groups for k in range(len(rows))]
    return st.as_floats(values), st.as_floats(places)


def _estimate(
    columns: Columns,
    statistic: Callable[[Rows], float | None],
    why_not: str,
    count: int | None = None,
) -> dict[str, Any]:
    rows = len(columns.scores) if count is None else count
    if rows < FEWEST:
        why_not = f"{rows} rows with a score; at least {FEWEST} are needed"
    if why_not:
        return {"value": None, "low": None, "high": None, "why": why_not}
    made = st.bootstrap(statistic, rows)
    why = "it is not defined for these rows" if made.value is None else ""
    return {**asdict(made), "why": why}


def _one_class(flags: NDArray[np.bool_]) -> str:
    return "every scored row has the same label" if flags.all() or not flags.any() else ""


def _flat(what: str, values: st.Floats) -> str:
    return f"every {what} is the same" if len(values) and np.ptp(values) == 0 else ""


def _repeated(verdicts: Sequence[Sequence[float]], times: int) -> dict[str, Any] | None:
    found = st.agreement(verdicts)
    return None if found is None else {**asdict(found), "verdicts": times}


def per_thousand(
    scoring: Scoring, spent: Mapping[str, float], repeats: int = 0, votes: int = 1
) -> Mapping[str, float]:
    """Cost, tokens and seconds for 1,000 responses of `votes` verdicts each.

    They rest on the verdicts that were asked for here, repeats past the cache included; how
    many calls these took is `paid_calls`.
    """
    fresh = [s for s in scoring.scores if judged(s) is not None and not s.info.get("cached")]
    asked = len(fresh) + repeats / votes
    if not asked:
        return {}
    found = {k: v * 1000.0 / asked for k, v in spent.items() if k != "cached"}
    return found | ({"paid_calls": spent["calls"]} if "calls" in spent else {})
