"""`ppo reward … --batch`: the providers' batch interfaces, the same verdicts as by direct calls."""

from __future__ import annotations

import signal

import pytest

from tests.judge_server.faults import Fault
from tests.scoring.commands import ONE_QUICK, PROVIDERS, Bench

pytestmark = pytest.mark.usefixtures("few_resamples", "quick_batches")


def by_batch(bench: Bench, kind: str = "openai") -> list[str]:
    return [*bench.priced(kind), "--batch"]


@pytest.mark.parametrize("kind", PROVIDERS)
def test_verdicts_are_those_of_direct_calls_at_half_the_price(bench: Bench, kind: str) -> None:
    file, votes, batches = bench.sums(12), 3 if kind == "claude" else 1, bench.server.batches
    costs, outcomes = [], []
    for name, flags in (("direct", ()), ("batch", ("--batch",))):
        judge = bench.priced(kind, cache=f"{name}.db")
        bench.reward("score", file, *judge, "--rm_votes", str(votes), *flags)
        costs.append(sum(row["info"]["cost_usd"] for row in bench.scored()))
        outcomes.append([(r["score"], r["reason"], r["failure"]) for r in bench.scored()])
    assert outcomes[0] == outcomes[1] and costs[1] == pytest.approx(costs[0] / 2)
    assert len(batches.jobs) == 1 and len(batches.rows) == 12 * votes
    assert not list((bench.folder / "batch.batches").glob("*")), "the job is read to its end"


@pytest.mark.parametrize("kind", ONE_QUICK)
def test_rows_that_fail_are_told_and_can_be_asked_directly(bench: Bench, kind: str) -> None:
    file, server = bench.sums(8), bench.server
    fates = ("expired", "errored", "missing", "garbled")
    server.batches.spoil = {f"{11 + n} + 1": fate for n, fate in enumerate(fates)}
    server.batches.late = kind != "claude"
    err = bench.reward("score", file, *by_batch(bench, kind)).err
    assert "4 of 8 rows could not be scored" in err and "without --batch" in err
    causes = [row["failure"].split(":")[0] for row in bench.scored()[1:5]]
    lost = "batch_failed" if kind == "claude" else "batch_expired"
    assert causes == ["batch_expired", "batch_failed", lost, "batch_failed"]
    calls = server.count
    assert bench.reward("score", file, *bench.priced(kind)).err == ""
    assert server.count - calls == 4
    assert all(row["score"] is not None for row in bench.scored())


@pytest.mark.slow
def test_a_killed_command_goes_on_with_its_job(bench: Bench) -> None:
    args, server = ["score", bench.sums(12), *by_batch(bench)], bench.server
    server.batches.looks = 10**6

    def looked() -> bool:
        return any(job.looks < 10**6 for job in server.batches.jobs.values())

    bench.signal_when(looked, signal.SIGKILL, "reward", *args)
    calls, server.batches.looks = server.count, 1
    assert bench.reward(*args, "--json").summary["scored"] == 12
    assert len(server.batches.rows) == 12 and server.count == calls, "nothing is asked twice"


def kill_while_handing_in(bench: Bench, *args: str) -> None:
    batches = bench.server.batches
    batches.reply_s = 100.0
    bench.signal_when(lambda: bool(batches.jobs), signal.SIGKILL, "reward", *args)
    batches.reply_s, batches.looks = 0.0, 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONE_QUICK)
@pytest.mark.parametrize("stored", [True, False], ids=["taken", "not taken"])
def test_a_job_is_found_after_a_kill_before_its_id(bench: Bench, kind: str, stored: bool) -> None:
    args = ["score", bench.sums(6), *by_batch(bench, kind)]
    kill_while_handing_in(bench, *args)
    if not stored:
        bench.server.batches.jobs.clear()
    assert bench.reward(*args, "--json").summary["scored"] == 6
    assert len(bench.server.batches.rows) == (6 if stored else 12)


@pytest.mark.slow
def test_a_job_that_may_be_at_the_provider_is_not_asked_again(bench: Bench) -> None:
    args = ["score", bench.sums(6), *by_batch(bench)]
    kill_while_handing_in(bench, *args)
    bench.server.batches.faults = [Fault(404, paths=("/batches",))]
    err = bench.reward(*args, code=3).err
    (job,) = (bench.folder / "v.batches").glob("*.json")
    assert f"to ask again, delete {job}" in err
    assert len(bench.server.batches.rows) == 6


@pytest.mark.parametrize("kind", ONE_QUICK)
def test_a_job_that_was_taken_with_an_error_is_not_handed_in_twice(bench: Bench, kind: str) -> None:
    bench.server.batches.lost = 1
    bench.reward("score", bench.sums(6), *by_batch(bench, kind))
    assert len(bench.server.batches.rows) == 6


def test_an_answer_that_does_not_count_goes_into_the_next_job(bench: Bench) -> None:
    def score(system: str, user: str) -> int | str:
        return "I like it." if "12 + 1" in user and "last answer" not in user else 10

    bench.server.score = score
    bench.reward("score", bench.sums(6), *by_batch(bench))
    assert [len(job.rows) for job in bench.server.batches.jobs.values()] == [6, 1]
    assert all(row["score"] == 1.0 for row in bench.scored())


@pytest.mark.parametrize("kind", ["claude", pytest.param("gemini", marks=pytest.mark.slow)])
def test_trouble_is_waited_out_and_a_long_job_is_left_for_later(bench: Bench, kind: str) -> None:
    args, batches = ["score", bench.sums(4), *by_batch(bench, kind)], bench.server.batches
    batches.looks = 10**6
    batches.faults = [Fault(503, times=2, paths=("atches", "batchG"))]
    err = bench.reward(*args, "--batch_hours", "0.0005", code=3).err
    assert "It goes on at the provider" in err and len(batches.rows) == 4
    batches.looks = 0
    batches.faults = [Fault(503, times=1, paths=("atches", "batchG"))]
    bench.reward(*args)
    assert len(batches.rows) == 4


def test_a_job_that_failed_or_is_gone_stops_the_command_and_is_asked_anew(bench: Bench) -> None:
    args, batches = ["score", bench.sums(2), *by_batch(bench)], bench.server.batches
    batches.refuse = "billing_hard_limit_reached"
    assert "failed: billing_hard_limit_reached" in bench.reward(*args, code=3).err
    batches.refuse, batches.looks = "", 10**6
    bench.reward(*args, "--batch_hours", "0.0001", code=3)
    batches.jobs.clear()
    assert "no longer has the batch" in bench.reward(*args, code=3).err
    batches.looks = 0
    bench.reward(*args)
    assert len(batches.rows) == 6


def test_a_budget_holds_over_jobs(bench: Bench) -> None:
    limit = ("--rm_budget_tokens", "3500")
    assert "budget" in bench.reward("score", bench.sums(6), *by_batch(bench), *limit, code=3).err
    scored = [row for row in bench.scored() if row["score"] is not None]
    assert 0 < len(scored) < 6 and len(scored) == len(bench.server.batches.rows)


def test_repeats_and_attacks_go_by_batch_too(bench: Bench) -> None:
    server, flags = bench.server, [*by_batch(bench, "claude"), "--json"]
    labels = ("--labels", "good", "--repeat", "2")
    summary = bench.reward("calibrate", bench.sums(8), *labels, *flags).summary
    assert summary["repeated"]["rows"] == 8
    assert [len(job.rows) for job in server.batches.jobs.values()] == [8, 16]
    assert server.count == 1, "one call finds the form that works"
    assert bench.reward("audit", "--rows", "1", *flags, code=2).summary["asked"] > 5
    assert server.count == 2
