"""Whole runs with a cascade or a panel on loopback: kills, budget, keys, and what is kept."""

from __future__ import annotations

import random
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ppo_cli.run_folder.folder import paid_calls
from ppo_cli.run_folder.lines import read_metrics
from tests.judge_server import JudgeServer
from tests.judge_server.wire import default_score, fenced
from tests.loop.runs import rows, undocumented
from tests.loop.test_judge_runs import (
    KEY,
    PRICE,
    UNCACHED,
    assert_nowhere,
    assert_same_weights,
    command,
    environment,
    run_ppo,
    spent,
    started,
)

pytestmark = pytest.mark.slow
CHEAP_KEY = "key-of-the-cheaper-loopback-judge"
KILLS = 20


def half_sure(system: str, user: str) -> int:
    """The verdict of the other judge, or 5 for about every third response."""
    unsure = random.Random(fenced("response", user) or "").random() < 1 / 3
    return 5 if unsure else default_score(system, user)


@pytest.fixture
def strong() -> Iterator[JudgeServer]:
    with JudgeServer() as running:
        running.keys = {KEY}
        yield running


@pytest.fixture
def cheap() -> Iterator[JudgeServer]:
    with JudgeServer(half_sure) as running:
        running.keys = {CHEAP_KEY}
        yield running


def cascade(strong: JudgeServer, cheap: JudgeServer, out: Path, *args: str) -> list[str]:
    small = f"{{model: s, base_url: {cheap.url('openai')}, key_env: CHEAP_KEY, price_input: 0.2, "
    judges = f"reward.api.judges={{small: {small}price_output: 0.8}}}}"
    flags = (*PRICE, "--rm_cascade", "small", judges, "--rm_max_tokens", "60", *args)
    return command(strong, out, "--max_steps", "3", *flags)


def test_a_run_says_who_decided_and_keeps_both_keys(
    strong: JudgeServer, cheap: JudgeServer, tmp_path: Path
) -> None:
    out, env = tmp_path / "run", environment(tmp_path) | {"CHEAP_KEY": CHEAP_KEY}
    output = run_ppo(env, cascade(strong, cheap, out))
    scored = [line for line in rows(out) if "gated" not in line]
    assert {line["decided_by"] for line in scored} == {"s (openai)", "judge-1 (openai)"}
    for line in scored:
        unsure = line["cheap_score"] == pytest.approx(4 / 9)
        assert line["escalated"] is unsure
        # What the cheaper judge decides is moved by its offset and scale, not to the other side.
        moved = abs(line["score"] - line["cheap_score"])
        assert line["score"] in (0.0, 1.0) if unsure else moved < 0.5
    lines = read_metrics(out)
    assert 0.1 < lines[1]["judge/escalated"] < 0.6 and undocumented(out) == set()
    assert lines[1]["judge/cheap_calls"] > lines[1]["judge/strong_calls"] > 0
    for key in (KEY, CHEAP_KEY):
        assert key not in output.stdout + output.stderr
        assert_nowhere(key, out, tmp_path / "cache")


def test_no_call_is_beyond_the_budget_over_kills_and_resumes(
    strong: JudgeServer, cheap: JudgeServer, tmp_path: Path
) -> None:
    out, env = tmp_path / "run", environment(tmp_path) | {"CHEAP_KEY": CHEAP_KEY}
    limit, dice, ends = 0.2, random.Random(7), Counter[int | None]()
    quick = ("trainer.val_before_train=false", "--rm_concurrency", "4", "--rm_budget_usd")
    args = cascade(strong, cheap, out, *UNCACHED, *quick, f"{limit}")
    for server in (strong, cheap):
        server.state.latency = 0.05
    for _ in range(KILLS):
        begun, calls = strong.count + cheap.count, dice.randint(1, 40)
        with started(env, args) as process:
            while process.poll() is None and strong.count + cheap.count < begun + calls:
                time.sleep(0.005)
            ends[process.poll()] += 1
        assert not (out / "judge_calls.jsonl").exists() or spent(out) <= limit
    assert ends == {None: KILLS}, "each start was killed, with money left"
    run_ppo(env, args, exit_code=3)
    # Each call that reached a judge is booked, those that a kill cut off at their worst case.
    booked = list(paid_calls(out))
    assert len(booked) >= strong.count + cheap.count and 0.5 * limit < spent(out) <= limit
    assert {call["model"] for call in booked} == {"s", "judge-1"}
    assert Counter(call["outcome"] for call in booked)["killed"] >= KILLS


def verdicts_in(cache: Path) -> int:
    with closing(sqlite3.connect(cache)) as db:
        return int(db.execute("SELECT count(*) FROM verdicts").fetchone()[0])


def test_a_killed_panel_ends_the_same_and_pays_for_no_verdict_twice(
    strong: JudgeServer, cheap: JudgeServer, tmp_path: Path
) -> None:
    """But for what no file has yet: calls in flight, and verdicts that are about to be written."""
    concurrency, kills, dice = 4, 3, random.Random(5)
    with JudgeServer(seed=9) as third:
        servers = (strong, cheap, third)

        def panel(out: Path) -> list[str]:
            judges = ", ".join(
                f"{name}: {{model: {name}, base_url: {server.url('openai')}, key_env: CHEAP_KEY, "
                "price_input: 0.2, price_output: 0.8}"
                for name, server in (("second", cheap), ("third", third))
            )
            return command(
                strong, out, "--max_steps", "3", *PRICE, "--rm_panel", "second", "--rm_panel",
                "third", f"reward.api.judges={{{judges}}}", "--rm_concurrency", f"{concurrency}",
                "--rm_noise_responses", "0", "trainer.val_before_train=false",
            )  # fmt: skip

        outs, asked = [tmp_path / "whole" / "run", tmp_path / "killed" / "run"], []
        for out in outs:
            env = environment(out.parent) | {"CHEAP_KEY": CHEAP_KEY}
            before = [server.count for server in servers]
            for server in servers:
                server.state.latency = 0.02
            for _ in range(kills if out is outs[1] else 0):
                begun, calls = strong.count, dice.randint(10, 40)
                with started(env, panel(out)) as process:
                    while strong.count < begun + calls:
                        assert process.poll() is None, process.output()
                        time.sleep(0.002)
            cache = out.parent / "cache" / "ppo-cli" / "judge.sqlite"
            resumed = sum(server.count for server in servers)
            kept = verdicts_in(cache) if cache.exists() else 0
            run_ppo(env, panel(out))
            asked.append([s.count - b for s, b in zip(servers, before, strict=True)])
    assert_same_weights(*outs)
    first, second = ([(r["step"], r["prompt"], r["response"], r["score"]) for r in rows(out)]
                     for out in outs)  # fmt: skip
    assert first == second and len({score for *_, score in first}) > 1
    for whole, killed in zip(*asked, strict=True):
        assert whole <= killed
    # What reached a judge from the last killed process may come in late.
    last = sum(server.count for server in servers) - resumed
    assert kept > 0 and last <= sum(asked[0]) - kept + 3 * concurrency
    outcomes = Counter(call["outcome"] for call in paid_calls(outs[1]))
    assert kills <= outcomes["killed"] <= 3 * kills * concurrency
    assert outcomes.total() >= sum(asked[1])
