"""`ppo reward … --batch`: the providers' batch interfaces, the same verdicts as by direct calls."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.forked import PPO, Forked
from tests.judge_server import JudgeServer
from tests.judge_server.faults import Fault
from tests.scoring.commands import Run, priced_judge, read
from tests.scoring.scripted import write_rows

PROVIDERS = ("openai", "claude", "gemini")


def sums(tmp_path: Path, count: int) -> str:
    rows = [
        {"prompt": f"{n} + 1 = ?", "ground_truth": f"{n + 1}", "response": f"It is {n + n % 3}."}
        for n in range(100, 100 + count)
    ]
    return write_rows(tmp_path / "a.jsonl", *rows)


@pytest.mark.parametrize("kind", PROVIDERS)
def test_verdicts_are_those_of_direct_calls_at_half_the_price(
    server: JudgeServer, kind: str, tmp_path: Path, run: Run
) -> None:
    file, rows, votes = sums(tmp_path, 40), {}, 3 if kind == "claude" else 1
    for way in ("direct", "batch"):
        extra = ["--batch"] if way == "batch" else []
        out = str(tmp_path / f"{way}.jsonl")
        flags = [*priced_judge(server, kind, tmp_path / f"{way}.db"), "--rm_votes", str(votes)]
        flags += ["--out", out, *extra]
        code, _, err = run("score", file, *flags)
        assert code == 0, err
        rows[way] = read(Path(out))
    outcomes = [[(r["score"], r["reason"], r["failure"]) for r in rows[way]] for way in rows]
    assert outcomes[0] == outcomes[1]
    costs = [sum(r["info"]["cost_usd"] for r in rows[way]) for way in rows]
    assert costs[1] == pytest.approx(costs[0] / 2)
    assert len(server.batches.jobs) == 1 and len(server.batches.rows) == 40 * votes
    assert not list((tmp_path / "batch.batches").glob("*")), "the job is read to its end"
    assert not [line for line in err.splitlines() if "Traceback" in line]


@pytest.mark.parametrize("kind", PROVIDERS)
def test_rows_that_fail_are_told_and_can_be_asked_directly(
    server: JudgeServer, kind: str, tmp_path: Path, run: Run
) -> None:
    file = sums(tmp_path, 8)
    fates = ("expired", "errored", "missing", "garbled")
    server.batches.spoil = {f"{101 + n} + 1": fate for n, fate in enumerate(fates)}
    server.batches.late = kind != "claude"
    flags = priced_judge(server, kind, tmp_path / "v.db")
    code, _, err = run("score", file, *flags, "--batch")
    assert code == 0, err
    assert "4 of 8 rows could not be scored" in err and "without --batch" in err
    causes = [row["failure"].split(":")[0] for row in read(tmp_path / "a.scored.jsonl")[1:5]]
    lost = "batch_failed" if kind == "claude" else "batch_expired"
    assert causes == ["batch_expired", "batch_failed", lost, "batch_failed"]
    calls = server.count
    code, _, err = run("score", file, *flags)
    assert (code, err) == (0, "")
    assert server.count - calls == 4
    assert all(row["score"] is not None for row in read(tmp_path / "a.scored.jsonl"))


def test_a_killed_command_goes_on_with_its_job(
    server: JudgeServer, tmp_path: Path, run: Run
) -> None:
    file = sums(tmp_path, 12)
    server.batches.looks = 10**6
    flags = [*priced_judge(server, "openai", tmp_path / "v.db"), "--batch"]
    process = Forked(PPO, ["reward", "score", file, *flags], os.environ, folder=tmp_path)
    until = time.monotonic() + 120
    while not any(job.looks < 10**6 for job in server.batches.jobs.values()):
        assert time.monotonic() < until, process.communicate(timeout=10)
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    calls, server.batches.looks = server.count, 1
    code, out, err = run("score", file, *flags, "--json")
    assert code == 0, err
    assert json.loads(out)["scored"] == 12
    assert len(server.batches.rows) == 12 and server.count == calls, "nothing is asked twice"


def kill_while_handing_in(server: JudgeServer, file: str, flags: list[str]) -> None:
    server.batches.reply_s = 100.0
    arguments = ["reward", "score", file, *flags]
    process = Forked(PPO, arguments, os.environ, folder=Path(file).parent)
    until = time.monotonic() + 120
    while not server.batches.jobs:
        assert time.monotonic() < until, process.communicate(timeout=10)
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    server.batches.reply_s, server.batches.looks = 0.0, 0


@pytest.mark.parametrize("kind", PROVIDERS)
@pytest.mark.parametrize("stored", [True, False], ids=["taken", "not taken"])
def test_a_job_whose_id_a_killed_command_did_not_hear_is_found(
    server: JudgeServer, kind: str, tmp_path: Path, run: Run, stored: bool
) -> None:
    file = sums(tmp_path, 6)
    flags = [*priced_judge(server, kind, tmp_path / "v.db"), "--batch"]
    kill_while_handing_in(server, file, flags)
    if not stored:
        server.batches.jobs.clear()
    code, out, err = run("score", file, *flags, "--json")
    assert code == 0, err
    assert json.loads(out)["scored"] == 6
    assert len(server.batches.rows) == (6 if stored else 12)


def test_a_job_that_may_be_at_the_provider_is_not_asked_again(
    server: JudgeServer, tmp_path: Path, run: Run
) -> None:
    file = sums(tmp_path, 6)
    flags = [*priced_judge(server, "openai", tmp_path / "v.db"), "--batch"]
    kill_while_handing_in(server, file, flags)
    server.batches.faults = [Fault(404, paths=("/batches",))]
    code, _, err = run("score", file, *flags)
    (job,) = (tmp_path / "v.batches").glob("*.json")
    assert code == 3 and f"to ask again, delete {job}" in err
    assert len(server.batches.rows) == 6


@pytest.mark.parametrize("kind", PROVIDERS)
def test_a_job_that_was_taken_with_an_error_is_not_handed_in_twice(
    server: JudgeServer, kind: str, tmp_path: Path, run: Run
) -> None:
    file, server.batches.lost = sums(tmp_path, 6), 1
    flags = [*priced_judge(server, kind, tmp_path / "v.db"), "--batch"]
    code, _, err = run("score", file, *flags)
    assert code == 0, err
    assert len(server.batches.rows) == 6


def test_an_answer_that_does_not_count_goes_into_the_next_job(
    server: JudgeServer, tmp_path: Path, run: Run
) -> None:
    file, flags = sums(tmp_path, 6), priced_judge(server, "openai", tmp_path / "v.db")
    reply = "last answer"

    def score(system: str, user: str) -> int | str:
        return "I like it." if "102 + 1" in user and reply not in user else 10

    server.score = score
    code, _, err = run("score", file, *flags, "--batch")
    assert code == 0, err
    assert [len(job.rows) for job in server.batches.jobs.values()] == [6, 1]
    assert all(row["score"] == 1.0 for row in read(tmp_path / "a.scored.jsonl"))


@pytest.mark.parametrize("kind", ("claude", "gemini"))
def test_a_server_in_trouble_is_waited_for_and_a_long_job_is_left_for_later(
    server: JudgeServer, kind: str, tmp_path: Path, run: Run
) -> None:
    file = sums(tmp_path, 4)
    flags = [*priced_judge(server, kind, tmp_path / "v.db"), "--batch"]
    server.batches.looks = 10**6
    server.batches.faults = [Fault(503, times=2, paths=("atches", "batchG"))]
    code, _, err = run("score", file, *flags, "--batch_hours", "0.001")
    assert code == 3 and "It goes on at the provider" in err
    assert len(server.batches.rows) == 4
    server.batches.looks = 0
    server.batches.faults = [Fault(503, times=1, paths=("atches", "batchG"))]
    code, _, err = run("score", file, *flags)
    assert code == 0, err
    assert len(server.batches.rows) == 4


def test_a_job_that_failed_or_is_gone_stops_the_command_and_is_asked_anew(
    server: JudgeServer, tmp_path: Path, run: Run
) -> None:
    file = sums(tmp_path, 2)
    flags = [*priced_judge(server, "openai", tmp_path / "v.db"), "--batch"]
    server.batches.refuse = "billing_hard_limit_reached"
    code, _, err = run("score", file, *flags)
    assert code == 3 and "failed: billing_hard_limit_reached" in err
    server.batches.refuse, server.batches.looks = "", 10**6
    assert run("score", file, *flags, "--batch_hours", "0.0001")[0] == 3
    server.batches.jobs.clear()
    code, _, err = run("score", file, *flags)
    assert code == 3 and "no longer has the batch" in err
    server.batches.looks = 0
    assert run("score", file, *flags)[0] == 0
    assert len(server.batches.rows) == 6


def test_a_budget_holds_over_jobs(server: JudgeServer, tmp_path: Path, run: Run) -> None:
    file = sums(tmp_path, 6)
    flags = [
        *priced_judge(server, "openai", tmp_path / "v.db"),
        "--batch",
        "--rm_budget_tokens",
        "3500",
    ]
    code, _, err = run("score", file, *flags)
    scored = [row for row in read(tmp_path / "a.scored.jsonl") if row["score"] is not None]
    assert code == 3 and "budget" in err
    assert 0 < len(scored) < 6 and len(scored) == len(server.batches.rows)


def test_repeats_and_attacks_go_by_batch_too(server: JudgeServer, tmp_path: Path, run: Run) -> None:
    rows = [
        {"prompt": f"{n} + 1 = ?", "ground_truth": f"{n + 1}", "response": f"It is {n + n % 2}.",
         "good": n % 2}
        for n in range(10, 18)
    ]  # fmt: skip
    file = write_rows(tmp_path / "a.jsonl", *rows)
    flags = [*priced_judge(server, "claude", tmp_path / "v.db"), "--batch", "--json"]
    code, out, err = run("calibrate", file, "--labels", "good", "--repeat", "2", *flags)
    assert code == 0, err
    assert json.loads(out)["repeated"]["rows"] == 8
    assert [len(job.rows) for job in server.batches.jobs.values()] == [8, 16]
    assert server.count == 1, "one call finds the form that works"
    code, out, _ = run("audit", "--rows", "1", *flags)
    assert code in (0, 2) and json.loads(out)["asked"] > 5
    assert server.count == 2


@pytest.mark.parametrize(
    ("extra", "fragment"),
    [
        (["--rm_api_type", "dashscope"], "no batch API for dashscope"),
        (["--rm_api_type", "bedrock"], "no batch API for bedrock"),
        (["--rm_cache", "off"], "next to the cache"),
        (["--rm_mode", "decision"], "does not support --rm_mode decision"),
    ],
)
def test_what_no_batch_can_do_is_refused(
    extra: list[str], fragment: str, server: JudgeServer, tmp_path: Path,
    run: Run,
) -> None:  # fmt: skip
    flags = [*priced_judge(server, "openai", tmp_path / "v.db"), *extra, "--batch"]
    code, _, err = run("score", sums(tmp_path, 1), *flags)
    assert code == 2 and fragment in err
    assert not server.count and not server.batches.jobs
