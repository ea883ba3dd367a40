"""A mixture over real threads: gates, rounds, failures, and what a resumed run remembers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.config.mixture import MixPart
from ppo_cli.errors import Interrupted, PpoError
from ppo_cli.records import Rollout, Score
from ppo_cli.rewards.base import Reward, RoundKind, RunLength
from ppo_cli.rewards.mixture import CompositeReward
from tests.rewards.scoring import rollouts_of, score_all

PATIENCE = 20


class Source(Reward):
    """Scores by a function: now, later on another thread, or at the end of the round."""

    def __init__(
        self, name: str, score: Callable[[Rollout], Score], *, when: str = "now", stage: str = ""
    ) -> None:
        self.name, self._score, self._when, self._stage = name, score, when, stage or name
        self.texts: list[str] = []
        self.rounds: list[tuple[str, int]] = []
        self.heard: list[Any] = []
        self.waits: str | None = None
        self.closed = self._fresh = 0
        self._open: list[tuple[Rollout, Future[Score]]] = []

    def start(self, prompts: Any, *, patient: bool = False, tell: Any = None) -> None:
        tell(self.name)
        self.heard.append((len(prompts), patient))

    def begin_run(self, length: Any) -> None:
        self.heard.append(length)

    def begin_step(self, step: int) -> None:
        self.heard.append(step)

    def attach(self, folder: Path) -> None:
        self.heard.append(folder)

    def waiting_for(self) -> str | None:
        return self.waits

    def submit(self, rollout: Rollout) -> Future[Score]:
        self.texts.append(rollout.text)
        self._fresh += 1
        future: Future[Score] = Future()
        if self._when == "at the end":
            self._open.append((rollout, future))
        elif self._when == "later":
            delay = (len(self.texts) * 7 % 5) / 500  # out of order
            threading.Timer(delay, self._answer, (rollout, future)).start()
        else:
            self._answer(rollout, future)
        return future

    def end_round(self, kind: RoundKind = "train") -> None:
        self.rounds.append((kind, self._fresh))
        self._fresh = 0
        while self._open:
            self._answer(*self._open.pop(0))

    def _answer(self, rollout: Rollout, future: Future[Score]) -> None:
        try:
            future.set_result(self._score(rollout))
        except PpoError as stop:
            future.set_exception(stop)

    def pop_metrics(self) -> dict[str, float]:
        return {f"{self._stage}/asked": float(len(self.texts))}

    def state_dict(self) -> dict[str, Any]:
        return {"asked": len(self.texts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.texts = ["?"] * int(state["asked"])

    def close(self) -> None:
        self.closed += 1


def by_length(rollout: Rollout) -> Score:
    return Score(float(len(rollout.text)))


def has_a(rollout: Rollout) -> Score:
    return Score(float("a" in rollout.text), reason="looked for a")


@pytest.fixture
def mixture() -> Iterator[Callable[..., CompositeReward]]:
    """Build mixtures of sources, with settings by their names; all of them are closed."""
    with ExitStack() as stack:

        def build(*sources: Source, **settings: dict[str, Any]) -> CompositeReward:
            raw = {"kind": "rule", "scaling": "none"}
            parts = [MixPart(**raw | {"name": s.name} | settings.get(s.name, {})) for s in sources]
            reward = CompositeReward(list(zip(parts, sources, strict=True)))
            stack.callback(reward.close)
            return reward

        yield build


def values(
    reward: CompositeReward, batch: list[Rollout], kind: RoundKind = "train"
) -> list[float | None]:
    return [score.value for score in score_all(reward, batch, kind)]


Build = Callable[..., CompositeReward]


def test_parts_that_answer_at_any_time_are_summed(mixture: Build) -> None:
    later = Source("later", has_a, when="later")
    held = Source("held", by_length, when="at the end")
    reward = mixture(Source("now", by_length), later, held, later={"weight": 10.0})
    scores = score_all(reward, rollouts_of("a", "bb", "ccc"))
    assert [score.value for score in scores] == [12.0, 4.0, 6.0]
    assert scores[0].reason == "later: looked for a"


def test_the_order_of_arrival_changes_no_bit(mixture: Build) -> None:
    texts = [chr(97 + i % 5) * (i * 13 % 11 + 1) for i in range(40)]
    settings = {name: {"scaling": "zscore", "weight": 0.3} for name in ("x", "y")}
    runs = []
    for when, order in (("now", 1), ("later", -1), ("at the end", 1)):
        reward = mixture(Source("x", by_length, when=when), Source("y", has_a), **settings)
        totals = values(reward, rollouts_of(*texts)[::order])[::order]
        runs.append((totals, reward.state_dict()["running"]))
    assert runs[0] == runs[1] == runs[2]


def test_a_gated_part_is_asked_only_where_the_gate_is_open(mixture: Build) -> None:
    judge = Source("judge", by_length, when="later")
    reward = mixture(Source("format", has_a, when="later"), judge, judge={"only_if": "format >= 1"})
    assert values(reward, rollouts_of("xx", "aaa", "yy", "aaaaa")) == [0.0, 4.0, 0.0, 6.0]
    assert sorted(judge.texts) == ["aaa", "aaaaa"]
    metrics = reward.pop_metrics()
    assert [metrics[f"reward/judge/{name}"] for name in ("gated_share", "failed")] == [0.5, 0.0]


def test_gates_may_hang_on_gates(mixture: Build) -> None:
    last, middle = Source("c", by_length), Source("b", by_length, when="at the end")
    gates = {"c": {"only_if": "b > 3"}, "b": {"only_if": "a == 1"}}
    reward = mixture(last, middle, Source("a", has_a), **gates)
    totals = values(reward, rollouts_of("x" * 9, "aa", "aaaa"))
    assert totals == [0.0, 1.0 + 2.0, 1.0 + 4.0 + 4.0]
    assert middle.texts == ["aa", "aaaa"] and last.texts == ["aaaa"]


def test_a_gate_that_failed_fails_what_hangs_on_it(mixture: Build) -> None:
    sources = [
        Source("format", lambda r: Score.failed("timeout")), Source("judge", by_length),
        Source("other", by_length),
    ]  # fmt: skip
    for on_failure, failure in (
        ("fail", "format: timeout"), ("renormalise", "judge: its gate format failed: timeout"),
    ):  # fmt: skip
        settings = {"format": {"on_failure": on_failure}, "judge": {"only_if": "format >= 1"}}
        (score,) = score_all(mixture(*sources, **settings), rollouts_of("a"))
        assert (score.value, score.failure) == (None, failure)


def test_every_part_is_settled_once_a_round_with_its_own_rollouts_of(mixture: Build) -> None:
    gate = Source("gate", has_a, when="at the end")
    judge = Source("judge", by_length, when="at the end")
    reward = mixture(gate, judge, judge={"only_if": "gate >= 1"})
    first = [reward.submit(r) for r in rollouts_of("a", "b", "aa")]
    reward.end_round("train")
    second = [reward.submit(r) for r in rollouts_of("aaa", "c")]
    reward.end_round("baseline")
    totals = [future.result(PATIENCE).value for future in (*first, *second)]
    assert totals == [2.0, 0.0, 3.0, 4.0, 0.0]
    assert gate.rounds == [("train", 3), ("baseline", 2)]
    assert judge.rounds == [("train", 2), ("baseline", 1)]


def test_a_part_that_stops_the_run_stops_every_future_and_leaves_no_trace(mixture: Build) -> None:
    def stop(rollout: Rollout) -> Score:
        if rollout.text == "stop":
            raise Interrupted("the judge is down")
        return by_length(rollout)

    sources = Source("x", by_length), Source("y", stop, when="later")
    reward = mixture(*sources, x={"scaling": "zscore"})
    before = reward.state_dict()["running"]
    futures = [reward.submit(rollout) for rollout in rollouts_of("a", "stop", "cc")]
    reward.end_round()
    errors = [future.exception(PATIENCE) for future in futures]
    assert any(errors) and {type(error) for error in errors if error} == {Interrupted}
    assert reward.state_dict()["running"] == before
    time.sleep(0.05)  # late answers of the broken round
    assert values(reward, rollouts_of("aa", "bbbb")) == [1.0, 5.0]


def test_a_resumed_run_has_the_same_scales_bit_for_bit(mixture: Build) -> None:
    settings = {"x": {"scaling": "zscore"}, "y": {"scaling": "group", "weight": 0.3}}
    texts = [["ab" * (i * j % 17 + 1) for j in range(1, 9)] for i in range(1, 7)]
    rounds = [rollouts_of(*batch, n=2) for batch in texts]

    def fresh() -> CompositeReward:
        return mixture(Source("x", by_length), Source("y", has_a, when="later"), **settings)

    straight, first, resumed = fresh(), fresh(), fresh()
    for reward in (straight, first):
        score_all(reward, rounds[0], "validation")
    expected = [values(straight, batch) for batch in rounds]
    for batch in rounds[:3]:
        score_all(first, batch)
    saved = json.loads(json.dumps(first.state_dict()))
    resumed.load_state_dict(saved)
    assert resumed.state_dict() == saved
    assert [values(resumed, batch) for batch in rounds[3:]] == expected[3:]
    assert resumed.state_dict()["running"] == straight.state_dict()["running"]
    validation = [values(reward, rounds[5], "validation") for reward in (resumed, straight)]
    assert validation[0] == validation[1]


def test_two_judges_report_under_their_own_names(mixture: Build) -> None:
    reward = mixture(Source("a", by_length, stage="judge"), Source("b", by_length, stage="judge"))
    score_all(reward, rollouts_of("a"))
    metrics = reward.pop_metrics()
    assert metrics["judge/asked"] == metrics["judge_b/asked"] == 1.0
    assert reward.pop_metrics().keys() == {"judge/asked", "judge_b/asked"}
    named = mixture(Source("a", by_length, stage="judge"), Source("judge", has_a))
    assert named.pop_metrics().keys() == {"judge_a/asked", "judge/asked"}


def test_a_steps_metrics_are_of_its_round_and_not_of_its_greedy_baselines(mixture: Build) -> None:
    def measured(*rounds: RoundKind) -> dict[str, float]:
        reward = mixture(Source("x", by_length), Source("y", has_a))
        for kind in rounds:
            texts = ("a", "bbb", "cc") if kind == "train" else ("d",)
            score_all(reward, rollouts_of(*texts), kind)
        return {k: v for k, v in reward.pop_metrics().items() if k.startswith("reward/")}

    assert measured("train", "baseline") == measured("train")
    assert measured("train")["reward/x/std"] > 0 and not measured("baseline")
    assert measured("validation")["reward/x/scaled_mean"] == 1.0


def test_a_bug_in_a_part_reaches_who_waits(mixture: Build) -> None:
    class Wrong(Source):
        def end_round(self, kind: RoundKind = "train") -> None:
            raise RuntimeError("no such thing")

    gated = Wrong("judge", by_length)
    reward = mixture(Source("x", has_a), gated, judge={"only_if": "x >= 1"})
    future = reward.submit(rollouts_of("a")[0])
    reward.end_round()
    with pytest.raises(RuntimeError, match="no such thing"):
        future.result(PATIENCE)


@pytest.mark.parametrize(("weight", "total"), [(0.0, None), (1.0, 2.0)])
def test_without_a_weight_to_renormalise_the_sample_fails(
    mixture: Build, weight: float, total: float | None
) -> None:
    judge = {"only_if": "gate >= 1", "on_failure": "renormalise"}
    sources = Source("gate", has_a), Source("judge", lambda r: Score.failed("timeout"))
    assert values(mixture(*sources, gate={"weight": weight}, judge=judge), rollouts_of("a")) == [
        total
    ]


def test_a_step_that_is_undone_teaches_nothing_even_if_its_scores_come_late(mixture: Build) -> None:
    slow = Source("x", by_length, when="at the end")
    ended: list[RoundKind] = []
    real, slow.end_round = slow.end_round, ended.append  # type: ignore[method-assign]
    reward = mixture(slow, x={"scaling": "zscore"})
    before = reward.state_dict()
    futures = [reward.submit(r) for r in rollouts_of("a", "bbb")]
    reward.end_round()
    reward.load_state_dict(before)
    real(ended[0])
    assert [f.cancelled() for f in futures] == [True, True]
    slow.end_round = real  # type: ignore[method-assign]
    assert values(reward, rollouts_of("aa", "bbbb")) == [-1.0, 1.0]
    assert reward.state_dict()["running"]["x"]["count"] == 2


def test_closing_closes_every_part_once_and_leaves_nobody_waiting(mixture: Build) -> None:
    class Broken(Source):
        def close(self) -> None:
            super().close()
            raise OSError("busy")

    parts = [Broken("x", by_length, when="at the end"), Source("y", by_length)]
    reward = mixture(*parts)
    future = reward.submit(rollouts_of("a")[0])
    with pytest.raises(OSError, match="busy"):
        reward.close()
    reward.close()
    assert future.done() and [part.closed for part in parts] == [1, 1]
    with pytest.raises(RuntimeError, match="closed"):
        reward.submit(rollouts_of("a")[0])


def test_every_part_hears_of_the_start_of_each_step_and_of_the_folder(
    mixture: Build, tmp_path: Path
) -> None:
    parts = [Source(name, has_a) for name in "abc"]
    reward, lines = mixture(*parts), list[str]()
    prompts = [rollout.prompt for rollout in rollouts_of("x", "y")]
    reward.start(prompts, patient=True, tell=lines.append)
    reward.begin_run(RunLength(9))
    reward.begin_step(7)
    reward.attach(tmp_path)
    assert lines == ["a", "b", "c"]
    assert [part.heard for part in parts] == [[(2, True), RunLength(9), 7, tmp_path]] * 3
    assert reward.waiting_for() is None
    for part in parts[1:]:
        part.waits = f"{part.name} waits"
    assert reward.waiting_for() == "b waits"
