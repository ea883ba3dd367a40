"""A mixture over real threads: gates, rounds, failures, and what a resumed run remembers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppo_cli.config.mixture import MixPart
from ppo_cli.errors import Interrupted, PpoError
from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.rewards.base import Reward, RoundKind
from ppo_cli.rewards.mixture import CompositeReward

PATIENCE = 20


class Source(Reward):
    """Scores by a function: at once, or after a while on another thread, or at `end_round`."""

    def __init__(
        self, name: str, score: Callable[[Rollout], Score], *, when: str = "now", stage: str = ""
    ) -> None:
        self.name = name
        self.asked: list[str] = []
        self.rounds: list[tuple[str, int]] = []
        self.closed = 0
        self._score, self._when, self._stage = score, when, stage or name
        self._object: list[tuple[Rollout, Future[Score]]] = []
        self._fresh = 0

    def submit(self, rollout: Rollout) -> Future[Score]:
        self.asked.append(rollout.text)
        self._fresh += 1
        future: Future[Score] = Future()
        if self._when == "settled":
            self._object.append((rollout, future))
        elif self._when == "later":
            delay = (len(self.asked) * 7 % 5) / 500  # out of order
            threading.Timer(delay, self._answer, (rollout, future)).start()
        else:
            self._answer(rollout, future)
        return future

    def end_round(self, kind: RoundKind = "train") -> None:
        self.rounds.append((kind, self._fresh))
        self._fresh = 0
        held, self._object = self._object, []
        for rollout, future in held:
            self._answer(rollout, future)

    def _answer(self, rollout: Rollout, future: Future[Score]) -> None:
        try:
            future.set_result(self._score(rollout))
        except PpoError as stop:
            future.set_exception(stop)

    def pop_metrics(self) -> dict[str, float]:
        return {f"{self._stage}/asked": float(len(self.asked))}

    def state_dict(self) -> dict[str, Any]:
        return {"asked": len(self.asked)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.asked = ["?"] * int(state["asked"])

    def close(self) -> None:
        self.closed += 1


def by_length(rollout: Rollout) -> Score:
    return Score(float(len(rollout.text)))


def has_a(rollout: Rollout) -> Score:
    return Score(float("a" in rollout.text), reason="looked for a")


def rollouts(*texts: str, n: int = 1) -> list[Rollout]:
    prompts = [Prompt(f"p{i // n:03d}", "", (), "", (1,)) for i in range(len(texts))]
    return [
        Rollout(prompt, i % n, (1,), np.zeros(1, np.float32), text, "stop")
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]


@pytest.fixture
def mixture() -> Iterator[Callable[..., CompositeReward]]:
    made: list[CompositeReward] = []

    def build(*sources: Source, **settings: dict[str, Any]) -> CompositeReward:
        parts = [
            MixPart(
                **{"name": s.name, "kind": "rule", "scaling": "none"} | settings.get(s.name, {})
            )
            for s in sources
        ]
        made.append(CompositeReward(list(zip(parts, sources, strict=True))))
        return made[-1]

    yield build
    for one in made:
        one.close()


def score(reward: CompositeReward, made: list[Rollout], kind: RoundKind = "train") -> list[Score]:
    futures = [reward.submit(r) for r in made]
    reward.end_round(kind)
    return [f.result(PATIENCE) for f in futures]


Build = Callable[..., CompositeReward]


def test_parts_that_answer_at_any_time_are_summed(mixture: Build) -> None:
    sources = [
        Source("now", by_length), Source("later", has_a, when="later"),
        Source("held", by_length, when="settled"),
    ]  # fmt: skip
    reward = mixture(*sources, later={"weight": 10.0})
    found = score(reward, rollouts("a", "bb", "ccc"))
    assert [s.value for s in found] == [12.0, 4.0, 6.0]
    assert found[0].reason == "later: looked for a"


def test_the_order_of_arrival_changes_no_bit(mixture: Build) -> None:
    texts = [chr(97 + i % 5) * (i * 13 % 11 + 1) for i in range(40)]
    settings = {name: {"scaling": "zscore", "weight": 0.3} for name in ("x", "y")}
    runs = []
    for when, order in (("now", 1), ("later", -1), ("settled", 1)):
        reward = mixture(Source("x", by_length, when=when), Source("y", has_a), **settings)
        made = rollouts(*texts)[::order]
        values = [s.value for s in score(reward, made)][::order]
        runs.append((values, reward.state_dict()["running"]))
    assert runs[0] == runs[1] == runs[2]


def test_a_gated_part_is_asked_only_where_the_gate_is_open(mixture: Build) -> None:
    judge = Source("judge", by_length, when="later")
    reward = mixture(Source("format", has_a, when="later"), judge, judge={"only_if": "format >= 1"})
    found = score(reward, rollouts("xx", "aaa", "yy", "aaaaa"))
    assert sorted(judge.asked) == ["aaa", "aaaaa"]
    assert [s.value for s in found] == [0.0, 4.0, 0.0, 6.0]
    metrics = reward.pop_metrics()
    assert [metrics[f"reward/judge/{name}"] for name in ("gated_share", "failed")] == [0.5, 0.0]


def test_gates_may_hang_on_gates(mixture: Build) -> None:
    sources = [Source("c", by_length), Source("b", by_length, when="settled"), Source("a", has_a)]
    reward = mixture(*sources, c={"only_if": "b > 3"}, b={"only_if": "a == 1"})
    found = score(reward, rollouts("x" * 9, "aa", "aaaa"))
    assert [s.value for s in found] == [0.0, 1.0 + 2.0, 1.0 + 4.0 + 4.0]
    assert sources[1].asked == ["aa", "aaaa"] and sources[0].asked == ["aaaa"]


def test_a_gate_that_failed_fails_what_hangs_on_it(mixture: Build) -> None:
    fails = Source("format", lambda r: Score.failed("timeout"))
    reward = mixture(fails, Source("judge", by_length), judge={"only_if": "format >= 1"})
    [found] = score(reward, rollouts("a"))
    assert (found.value, found.failure) == (None, "format: timeout")
    reward = mixture(
        fails, Source("judge", by_length), Source("other", by_length),
        format={"on_failure": "renormalise"}, judge={"only_if": "format >= 1"},
    )  # fmt: skip
    [found] = score(reward, rollouts("a"))
    assert found.failure == "judge: its gate format failed: timeout"


def test_every_part_is_settled_once_a_round_with_its_own_rollouts(mixture: Build) -> None:
    gate = Source("gate", has_a, when="settled")
    judge = Source("judge", by_length, when="settled")
    reward = mixture(gate, judge, judge={"only_if": "gate >= 1"})
    first = [reward.submit(r) for r in rollouts("a", "b", "aa")]
    reward.end_round("train")
    second = [reward.submit(r) for r in rollouts("aaa", "c")]
    reward.end_round("baseline")
    values = [f.result(PATIENCE).value for f in (*first, *second)]
    assert values == [2.0, 0.0, 3.0, 4.0, 0.0]
    assert gate.rounds == [("train", 3), ("baseline", 2)]
    assert judge.rounds == [("train", 2), ("baseline", 1)]


def test_a_part_that_stops_the_run_stops_every_open_future_and_leaves_no_trace(
    mixture: Build,
) -> None:
    def stop(rollout: Rollout) -> Score:
        if rollout.text == "stop":
            raise Interrupted("the judge is down")
        return by_length(rollout)

    reward = mixture(
        Source("x", by_length), Source("y", stop, when="later"), x={"scaling": "zscore"}
    )
    before = reward.state_dict()["running"]
    futures = [reward.submit(r) for r in rollouts("a", "stop", "cc")]
    reward.end_round()
    with pytest.raises(Interrupted, match="the judge is down"):
        for future in futures:
            future.result(PATIENCE)
    for future in futures:
        assert future.exception(PATIENCE) is None or isinstance(future.exception(), Interrupted)
    assert reward.state_dict()["running"] == before
    time.sleep(0.05)  # late answers of the broken round
    assert [s.value for s in score(reward, rollouts("aa", "bbbb"))] == [1.0, 5.0]


def test_a_killed_run_goes_on_with_the_same_scales_bit_for_bit(mixture: Build) -> None:
    settings = {"x": {"scaling": "zscore"}, "y": {"scaling": "group", "weight": 0.3}}
    rounds = [rollouts(*("ab" * (i * j % 17 + 1) for j in range(1, 9)), n=2) for i in range(1, 7)]

    def fresh() -> CompositeReward:
        return mixture(Source("x", by_length), Source("y", has_a, when="later"), **settings)

    whole = fresh()
    score(whole, rounds[0], "validation")
    expected = [[s.value for s in score(whole, made)] for made in rounds]
    first = fresh()
    score(first, rounds[0], "validation")
    for made in rounds[:3]:
        score(first, made)
    saved = json.loads(json.dumps(first.state_dict()))
    resumed = fresh()
    resumed.load_state_dict(saved)
    assert resumed.state_dict() == saved
    assert [[s.value for s in score(resumed, made)] for made in rounds[3:]] == expected[3:]
    assert resumed.state_dict()["running"] == whole.state_dict()["running"]
    after = [s.value for s in score(resumed, rounds[5], "validation")]
    assert after == [s.value for s in score(whole, rounds[5], "validation")]


def test_two_judges_report_under_their_own_names(mixture: Build) -> None:
    reward = mixture(Source("a", by_length, stage="judge"), Source("b", by_length, stage="judge"))
    score(reward, rollouts("a"))
    metrics = reward.pop_metrics()
    assert metrics["judge/asked"] == metrics["judge_b/asked"] == 1.0
    assert reward.pop_metrics().keys() == {"judge/asked", "judge_b/asked"}
    named = mixture(Source("a", by_length, stage="judge"), Source("judge", has_a))
    assert named.pop_metrics().keys() == {"judge_a/asked", "judge/asked"}


def test_a_steps_metrics_are_of_its_round_and_not_of_its_greedy_baselines(mixture: Build) -> None:
    def measured(*rounds: RoundKind) -> dict[str, float]:
        reward = mixture(Source("x", by_length), Source("y", has_a))
        for kind in rounds:
            score(reward, rollouts("a", "bbb", "cc") if kind == "train" else rollouts("d"), kind)
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
    future = reward.submit(rollouts("a")[0])
    reward.end_round()
    with pytest.raises(RuntimeError, match="no such thing"):
        future.result(PATIENCE)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_nothing_left_to_renormalise_is_a_failure_and_nobody_waits(
    mixture: Build, weight: float
) -> None:
    fails = Source("judge", lambda r: Score.failed("timeout"))
    reward = mixture(
        Source("gate", has_a), fails, gate={"weight": weight},
        judge={"only_if": "gate >= 1", "on_failure": "renormalise"},
    )  # fmt: skip
    [found] = score(reward, rollouts("a"))
    assert found.value == (None if not weight else 2.0)


def test_a_step_that_is_undone_teaches_nothing_even_if_its_scores_come_late(mixture: Build) -> None:
    slow = Source("x", by_length, when="settled")
    held: list[RoundKind] = []
    real, slow.end_round = slow.end_round, held.append  # type: ignore[method-assign]
    reward = mixture(slow, x={"scaling": "zscore"})
    before = reward.state_dict()
    futures = [reward.submit(r) for r in rollouts("a", "bbb")]
    reward.end_round()
    reward.load_state_dict(before)
    real(held[0])
    assert [f.cancelled() for f in futures] == [True, True]
    slow.end_round = real  # type: ignore[method-assign]
    assert [s.value for s in score(reward, rollouts("aa", "bbbb"))] == [-1.0, 1.0]
    assert reward.state_dict()["running"]["x"]["count"] == 2


def test_closing_leaves_nobody_waiting(mixture: Build) -> None:
    reward = mixture(Source("x", by_length, when="settled"))
    future = reward.submit(rollouts("a")[0])
    reward.close()
    assert future.done()


def test_closing_closes_every_part_and_may_be_repeated(mixture: Build, tmp_path: Path) -> None:
    class Broken(Source):
        def close(self) -> None:
            super().close()
            raise OSError("busy")

    parts = [Broken("x", by_length), Source("y", by_length)]
    reward = mixture(*parts)
    with pytest.raises(OSError, match="busy"):
        reward.close()
    reward.close()
    assert [p.closed for p in parts] == [1, 1]
    with pytest.raises(RuntimeError, match="closed"):
        reward.submit(rollouts("a")[0])


def test_every_part_hears_of_the_start_of_each_step_and_of_the_folder(
    mixture: Build, tmp_path: Path
) -> None:
    class Listening(Source):
        def __init__(self, name: str, waits: str | None = None) -> None:
            super().__init__(name, lambda r: Score(1.0))
            self.heard: list[Any] = []
            self._waits = waits

        def start(self, prompts: Any, *, patient: bool = False, tell: Any = None) -> None:
            tell(self.name)
            self.heard.append((len(prompts), patient))

        def begin_step(self, step: int) -> None:
            self.heard.append(step)

        def attach(self, folder: Path) -> None:
            self.heard.append(folder)

        def waiting_for(self) -> str | None:
            return self._waits

    parts = [Listening("a"), Listening("b", "b waits"), Listening("c", "c waits")]
    reward, told = mixture(*parts), list[str]()
    reward.start([one.prompt for one in rollouts("x", "y")], patient=True, tell=told.append)
    reward.begin_step(7)
    reward.attach(tmp_path)
    assert told == ["a", "b", "c"]
    assert [part.heard for part in parts] == [[(2, True), 7, tmp_path]] * 3
    assert reward.waiting_for() == "b waits"
    assert mixture(Listening("d")).waiting_for() is None
