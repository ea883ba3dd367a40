"""Rules behind the Reward protocol: at once where text decides, in workers where it may hang."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from ppo_cli.processes.reaper import descendants
from ppo_cli.records import Part
from ppo_cli.rewards.base import Reward
from ppo_cli.rewards.rule_reward import RuleReward
from ppo_cli.rewards.rules import RULES
from tests.rewards.scoring import make_rollout

Build = Callable[..., Reward]
PATIENCE = 90


def test_text_rules_answer_before_submit_returns(build: Build) -> None:
    future = build({"openai/gsm8k"}).submit(make_rollout("#### 72"))
    assert future.done()
    score = future.result()
    assert score.value == 1.0
    assert score.parts == {"gsm8k": Part(1.0, 1.0)}
    assert score.info == {"extracted": "72", "rule": "gsm8k"}


def test_each_row_goes_to_its_own_rule_or_to_one_for_all(build: Build) -> None:
    reward = build({"openai/gsm8k", "exact", "math"})
    for source, rule in (("openai/gsm8k", "gsm8k"), ("exact", "exact"), ("MATH", "math")):
        score = reward.submit(make_rollout("#### 72", "#### 72", source)).result()
        assert (score.info["rule"], score.value) == (rule, 1.0)
    same = build({"my/own"}, rule="contains").submit(make_rollout("It is 72.", "72", "my/own"))
    assert same.result().value == 1.0


def test_algebra_is_done_in_workers(build: Build) -> None:
    reward = build({"math"})
    replies = (r"\boxed{\frac{1}{2}}", r"\boxed{\frac{1}{3}}")
    right, wrong = (reward.submit(make_rollout(reply, "0.5", "math")) for reply in replies)
    assert (right.result(PATIENCE).value, wrong.result(PATIENCE).value) == (1.0, 0.0)
    assert right.result().info == {"extracted": r"\frac{1}{2}", "rule": "math"}


def test_expressions_that_never_end_fail_alone() -> None:
    hostile = ["9^{9^{9^{9}}}", "(10^9)!", "(" * 140 + "x" + ")" * 140]
    reward = RuleReward(num_workers=2, cpu_seconds=0.7)
    killers = [reward.submit(make_rollout(rf"\boxed{{{text}}}", "1.5", "math")) for text in hostile]
    after = reward.submit(make_rollout(r"\boxed{\frac{3}{2}}", "1.5", "math"))
    for killer in killers:
        score = killer.result(PATIENCE)
        assert (score.value, score.failure) == (None, "timeout: took more than 0.7 s of computing")
    assert after.result(PATIENCE).value == 1.0
    reward.close()


def test_the_settings_of_a_rule_reach_its_workers() -> None:
    reward = RuleReward(RULES["format"], settings={"pattern": r"\d+"}, num_workers=1)
    replies = ("42", "<think>a</think><answer>b</answer>")
    scores = [reward.submit(make_rollout(reply)) for reply in replies]
    assert [score.result(PATIENCE).value for score in scores] == [1.0, 0.0]
    reward.close()


def test_rows_that_cannot_be_scored_fail_with_the_reason(build: Build) -> None:
    reward = build({"openai/gsm8k"})
    for row, failure in (
        (make_rollout("#### 1", None), "the row has no ground_truth"),
        (make_rollout("#### 1", "many"), "ground_truth 'many' is not a number"),
        (make_rollout("1", data_source="other"), "no rule for data_source 'other'"),
    ):
        assert reward.submit(row).result().failure == failure


def test_a_rule_that_raises_or_says_nan_fails() -> None:
    def raises(*_: object) -> None:
        raise ZeroDivisionError("oh")

    for score_reply, failure in (
        (raises, "raised ZeroDivisionError: oh"),
        (lambda *_: {"score": float("nan")}, "returned score nan"),
    ):
        reward = RuleReward(replace(RULES["gsm8k"], score=score_reply))
        score = reward.submit(make_rollout("#### 72")).result()
        assert (score.value, score.failure) == (None, failure)
        reward.close()


def test_closing_leaves_no_process_and_no_open_answer() -> None:
    before = set(_children())  # of other tests
    reward = RuleReward(num_workers=2)
    hang = [make_rollout(r"\boxed{(10^9)!}", "1.5", "math") for _ in range(4)]
    futures = [reward.submit(rollout_) for rollout_ in hang]
    time.sleep(0.3)
    reward.close()
    reward.close()
    assert [f.result(0).value for f in futures] == [None] * 4
    assert set(_children()) <= before
    with pytest.raises(RuntimeError, match="closed"):
        reward.submit(make_rollout("#### 72"))


def _children() -> list[str]:
    lists = Path("/proc/self/task").glob("*/children")
    return [pid for path in lists for pid in path.read_text().split()]


def test_workers_start_only_when_something_is_slow(build: Build) -> None:
    reward = build({"math", "openai/gsm8k"})
    before = len(_children())
    reward.submit(make_rollout("#### 72")).result()
    reward.submit(make_rollout(r"\boxed{7}", "7", "math")).result()
    assert len(_children()) == before


def test_the_limits_of_the_settings_reach_the_workers(build: Build) -> None:
    before = set(_children())
    reward = build({"format"}, num_workers=3, timeout=1.0)
    hang = make_rollout("a" * 60 + "!", None, "format", format="(a+)+")
    scores = [reward.submit(hang) for _ in range(3)]
    until, most_workers, memory = time.monotonic() + PATIENCE, 0, set[str]()
    while not all(score.done() for score in scores) and time.monotonic() < until:
        workers = set(_children()) - before
        most_workers = max(most_workers, len(workers))
        # Each worker runs under a process that ends it.
        for worker in chain.from_iterable(descendants(int(pid)) for pid in workers):
            with suppress(OSError):
                memory |= set(
                    re.findall(r"address space +(\S+)", Path(f"/proc/{worker}/limits").read_text())
                )
        time.sleep(0.01)
    assert (most_workers, memory - {"unlimited"}) == (3, {str(4 << 30)})
    assert {s.result().failure for s in scores} == {"timeout: took longer than 1 s"}
