"""What was spent is known to the token, and the budget is never passed."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_cli.errors import EXIT_RESUMABLE, ExhaustedBudget, Interrupted, RewardError
from ppo_cli.rewards.judge.calls import (
    REQUEST_OVERHEAD,
    JudgeError,
    Question,
    Reply,
    Scale,
    UnlimitedCost,
    Usage,
    billed_usage,
    estimate_tokens,
    worst_case,
)
from ppo_cli.rewards.judge.connection import connect_judge
from ppo_cli.rewards.judge.costs import Ledger, Spending
from ppo_cli.rewards.judge.prices import Price
from ppo_cli.rewards.remote.failures import Failure
from ppo_cli.run_folder.folder import paid_calls
from ppo_cli.spending import in_flight_file
from tests.settings import complete_judge

PRICE = Price(1.0, 10.0, 0.1, "test")


def question(user: str = "x", max_tokens: int = 100) -> Question:
    return Question("", user, user, Scale(1, 10), max_tokens=max_tokens)


def ledger(usd: float | None = None, tokens: int | None = None) -> Ledger:
    return Ledger(PRICE, budget_usd=usd, budget_tokens=tokens, provider="openai", model="m")


def attached(path: Path, usd: float | None = None, tokens: int | None = None) -> Ledger:
    """A ledger with its file."""
    book = ledger(usd, tokens)
    book.attach(path)
    return book


async def call(book: Ledger, usage: Usage, outcome: str = "ok") -> float:
    return (await book.reserve(question())).settle(usage, outcome, 0.5)


def test_calls_in_batches_are_booked_under_the_same_names(tmp_path: Path) -> None:
    api = complete_judge(
        type="openai", model="gpt-4o-mini", batch_wait=9, cache=str(tmp_path / "c.db")
    )
    connection = connect_judge(api, {"OPENAI_API_KEY": "sk-0123456789abcdef"})
    calls = [
        asyncio.run(client._ledger.reserve(question()))
        for client in (connection.direct, connection.client)
    ]
    names = {"provider": "openai", "model": "gpt-4o-mini"}
    assert calls[1].shared is not None and [call.model for call in calls] == [names, names]


def test_calls_add_up_and_the_new_ones_are_taken() -> None:
    book = ledger()

    async def settle_twice() -> None:
        reservation = await book.reserve(question())
        reservation.settle(Usage(), "timeout")
        assert reservation.settle(Usage(10, 1), "ok") == 0.0, "a second time"

    asyncio.run(call(book, Usage(1000, 100, 400)))
    first = Spending(1, Usage(1000, 100, 400), pytest.approx(0.00164))
    assert [book.pop_spending(), book.pop_spending()] == [first, Spending()]
    asyncio.run(settle_twice())
    assert book.pop_spending() == Spending(1)
    assert book.total == replace(first, calls=2)
    assert (book.reserved_usd, book.reserved_tokens) == (0, 0)


def test_without_a_price_tokens_are_counted_and_dollars_are_not() -> None:
    book = Ledger(None, budget_usd=None, budget_tokens=10_000)
    asyncio.run(call(book, Usage(500, 50)))
    assert book.total == Spending(1, Usage(500, 50), 0.0)


def test_of_two_budgets_the_one_that_is_used_up_is_named() -> None:
    named = []
    for usd, tokens in ((0.0045, 10_000), (1.0, 2500)):
        book = ledger(usd, tokens)
        asyncio.run(call(book, Usage(1000, 100)))
        with pytest.raises(Interrupted, match="is used up") as caught:
            asyncio.run(call(book, Usage(2000, 100)))
            asyncio.run(call(book, Usage(10, 10)))
        assert caught.value.exit_code == EXIT_RESUMABLE and caught.value.used_up is not None
        assert f"raise {caught.value.used_up.flag} and resume" in str(caught.value)
        named.append(caught.value.used_up)
    dollars, counted = named
    assert dollars == ExhaustedBudget(
        "--rm_budget_usd", pytest.approx(0.005), 2, pytest.approx(0.003)
    )
    assert counted == ExhaustedBudget("--rm_budget_tokens", 3200, 2, 2100)


def test_a_cancelled_wait_leaves_nothing_held() -> None:
    need = REQUEST_OVERHEAD + estimate_tokens("x") + 100
    book = ledger(tokens=need + 50)

    async def story() -> None:
        first = await book.reserve(question())
        waiting = [asyncio.create_task(book.reserve(question())) for _ in range(2)]
        await asyncio.sleep(0)
        first.settle(Usage(), "ok")
        waiting[0].cancel()  # woken or not, it may not keep anything
        reservation = await asyncio.wait_for(waiting[1], 5)
        reservation.settle(Usage(1, 1), "ok")

    asyncio.run(story())
    assert book.reserved_tokens == 0
    assert book.total.calls == 2


ACTIONS = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 200), st.floats(0, 1), st.floats(0, 1)),
    min_size=1, max_size=40,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS, budget=st.integers(100, 5000), width=st.integers(1, 8))
def test_settled_and_held_stay_within_any_budget(
    actions: list[tuple[int, int, float, float]], budget: int, width: int
) -> None:
    book = ledger(tokens=budget, usd=budget * 3e-6)
    gate = asyncio.Semaphore(width)

    async def send(length: int, max_tokens: int, read: float, written: float) -> None:
        async with gate:
            try:
                reservation = await book.reserve(question("ab " * length, max_tokens))
            except Interrupted:
                return
            check()
            await asyncio.sleep(0)
            reservation.settle(
                Usage(int((reservation.tokens - max_tokens) * read), int(max_tokens * written)),
                "ok",
            )
            check()

    def check() -> None:
        usage = book.total.usage
        assert usage.input + usage.output + book.reserved_tokens <= budget
        assert book.total.usd + book.reserved_usd <= budget * 3e-6 + 1e-8

    async def run() -> None:
        await asyncio.wait_for(asyncio.gather(*(send(*action) for action in actions)), 20)

    asyncio.run(run())
    assert book.reserved_tokens == 0


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_call_is_a_line_of_the_file_and_earlier_ones_follow(tmp_path: Path) -> None:
    book, path = ledger(), tmp_path / "run" / "judge_ledger.jsonl"
    asyncio.run(call(book, Usage(10, 1)))
    book.attach(path)
    asyncio.run(call(book, Usage(20, 2, 5), "http_429"))
    first, second = lines(path)
    assert (first["input"], second["input"]) == (10, 20)
    assert abs(float(str(second.pop("time"))) - time.time()) < 3600.0
    assert second.pop("id") != first["id"]
    assert second == {
        "provider": "openai", "model": "m", "outcome": "http_429", "input": 20, "output": 2,
        "cached_input": 5, "usd": pytest.approx(35.5e-6), "latency_s": 0.5,
    }  # fmt: skip
    with pytest.raises(RewardError, match=r"already kept in .*judge_ledger"):
        book.attach(tmp_path / "another.jsonl")


def test_a_resumed_run_remembers_what_it_spent(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    before = attached(path, tokens=400)
    asyncio.run(call(before, Usage(60, 90, 30)))
    after = ledger(tokens=400)
    asyncio.run(call(after, Usage(20, 1)))  # of the first probe, before there is a folder
    first = after.pop_spending()
    after.attach(path)
    after.attach(path)
    assert after.total == before.total + first
    assert after.pop_spending() == Spending()
    asyncio.run(call(after, Usage(60, 90)))
    with pytest.raises(Interrupted):
        asyncio.run(call(after, Usage(10, 1)))
    assert len(lines(path)) == 3


def test_a_torn_last_line_is_passed_over_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    before = attached(path)
    for _ in range(2):
        asyncio.run(call(before, Usage(10, 1)))
    path.write_bytes(path.read_bytes()[:-20])
    for calls in (1, 2):
        after = attached(path)
        assert after.total.calls == calls
        asyncio.run(call(after, Usage(10, 1)))


def test_a_file_that_cannot_be_kept_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RewardError, match=r"ledger in .*file"):
        ledger().attach(tmp_path / "file" / "ledger.jsonl")


@pytest.mark.parametrize(
    ("text", "true_tokens"),
    [
        # Counted with a byte-level vocabulary of 49,152 tokens that splits digits.
        ("The quick brown fox jumps over the lazy dog.", 10), ("今天天气很好，我们去公园吧。", 27),
        ("def f(x):\n    return x ** 2\n", 12), ("Привет, как дела?", 13), ("🙂🙂🙂", 6),
        ("\\frac{1}{2} + \\sqrt{3}", 13), ("antidisestablishmentarianism", 5),
        ("aGVsbG8gd29ybGQhIQ==", 17), ("3.14159265358979", 16), ("", 0),
    ],
)  # fmt: skip
def test_the_estimate_is_an_upper_one_and_no_fantasy(text: str, true_tokens: int) -> None:
    assert true_tokens <= estimate_tokens(text) <= 4 * true_tokens


@given(st.text(max_size=200), st.text(max_size=200))
def test_estimates_hardly_depend_on_where_a_text_is_cut(first: str, second: str) -> None:
    apart = estimate_tokens(first) + estimate_tokens(second)
    assert abs(estimate_tokens(first + second) - apart) <= 12


REPORTED, WORST, FREE = Usage(20, 2), Usage(100, 50), Usage()
LONG = "as long an answer has more tokens"
# Causes, statuses and messages of failed calls that may have been billed, and of others.
BILLED: tuple[tuple[str, int | None, str], ...] = (
    ("timeout", None, ""), ("bad_body", None, ""), ("bad_body", None, "ConnectTimeout"),
    ("connection", None, "(ReadError)"), ("http_500", 500, ""), ("http_503", 503, ""),
    ("http_408", 408, ""), ("http_499", 499, ""), ("content_filter", 400, ""),
    ("business_error", 200, ""), ("refusal", None, ""), ("empty", None, ""),
)  # fmt: skip
UNBILLED: tuple[tuple[str, int | None, str], ...] = (
    ("connection", None, "(ConnectionRefusedError)"), ("connection", None, "(gaierror)"),
    ("batch_expired", 0, ""), ("http_429", 429, ""), ("credentials", None, ""),
    ("http_401", 401, ""), ("bad_request", 400, ""), ("http_300", 300, ""),
)  # fmt: skip


def failed(cause: str, status: int | None = None, message: str = "", **fields: Any) -> JudgeError:
    return JudgeError(Failure.RETRYABLE, cause, message, status=status, **fields)


@pytest.mark.parametrize(
    ("outcome", "usage"),
    [
        (Reply("7", REPORTED), REPORTED), (Reply("seven", Usage(500, 70)), Usage(500, 70)),
        # A number that is missing, or too small for the text, counts at its worst case.
        (Reply("seven"), WORST), (Reply("seven", Usage()), WORST), (None, WORST),
        (Reply("seven", Usage(20, 0)), Usage(20, 50)), (Reply("seven", Usage(0, 7)), Usage(100, 7)),
        (Reply("seven", Usage(1, 7)), Usage(100, 7)), (Reply(LONG, Usage(20, 1)), Usage(20, 50)),
        (Reply("", Usage(20, 0), probabilities=[{1: 1.0}]), Usage(20, 0)),
        (failed("bad_body", usage=REPORTED), REPORTED),
        *((failed(*failure), WORST) for failure in BILLED),
        *((failed(*failure), FREE) for failure in UNBILLED),
    ],
)  # fmt: skip
def test_what_is_not_reported_is_booked_at_its_worst_case(
    outcome: Reply | JudgeError | None, usage: Usage
) -> None:
    request = question("word " * ((100 - REQUEST_OVERHEAD) // 2), 50)
    assert worst_case(request) == WORST
    is_bound = usage != FREE and 100 in (usage.input, 2 * usage.output)
    assert billed_usage(outcome, request) == (usage, "upper bound" if is_bound else "")


def test_calls_in_flight_at_a_kill_count_at_their_worst_case(tmp_path: Path) -> None:
    path = tmp_path / "judge_calls.jsonl"
    killed = attached(path, usd=1.0)

    async def send_three_and_settle_one() -> None:
        reserved = [await killed.reserve(question()) for _ in range(3)]
        reserved[1].settle(Usage(10, 1), "ok")

    asyncio.run(send_three_and_settle_one())
    worst = PRICE.cost(worst_case(question()))
    spent = PRICE.cost(Usage(10, 1)) + 2 * worst
    assert sum(call["usd"] for call in paid_calls(tmp_path)) == pytest.approx(spent)
    for in_flight in (2, 0):  # settled once
        resumed = attached(path, usd=1.0)
        assert (resumed.total.calls, resumed.interrupted.calls) == (3, in_flight)
        assert resumed.unreported.calls == 2
        assert resumed.unreported.usd == pytest.approx(2 * worst)
        assert resumed.total.usd == pytest.approx(spent)
    assert [line["outcome"] for line in lines(path)] == ["ok", "killed", "killed"]
    assert sum(call["usd"] for call in paid_calls(tmp_path)) == pytest.approx(spent)
    asyncio.run(resumed.reserve(question())).settle(Usage(10, 1), "timeout", note="upper bound")
    resumed.budget_usd = resumed.total.usd
    with pytest.raises(Interrupted, match="tokens of that are an upper bound for 3 calls"):
        asyncio.run(resumed.reserve(question()))


def test_a_reservation_is_in_the_file_before_the_call_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "judge_calls.jsonl"
    book = ledger()

    async def story() -> None:
        early = await book.reserve(question())
        book.attach(path)
        assert len(paid_calls(tmp_path)) == 1
        reservation = await book.reserve(question())
        assert {call["outcome"] for call in paid_calls(tmp_path)} == {"in_flight"}
        early.settle(Usage(10, 1), "ok")
        reservation.settle(Usage(10, 1), "ok")
        assert [call["outcome"] for call in paid_calls(tmp_path)] == ["ok", "ok"]

    asyncio.run(story())
    assert in_flight_file(path).read_text() == ""
    assert len(path.read_text().split("\n")) == 3  # no blank line before, between or after


def test_a_call_that_cannot_be_recorded_is_not_sent_under_a_budget(tmp_path: Path) -> None:
    path = tmp_path / "judge_calls.jsonl"
    book, free = attached(path, usd=1.0), attached(path)
    in_flight_file(path).unlink(missing_ok=True)
    in_flight_file(path).mkdir()
    with pytest.raises(Interrupted, match=r"cannot be written, so the call was not sent"):
        asyncio.run(book.reserve(question()))
    assert book.reserved_usd == 0
    asyncio.run(free.reserve(question()))


def test_calls_that_could_not_be_recorded_are_written_with_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "judge_calls.jsonl"
    book, resumed = attached(path, usd=1.0), ledger(usd=1.0)
    path.unlink(missing_ok=True)
    path.mkdir()  # as good as a full disk
    for _ in range(2):
        asyncio.run(call(book, Usage(5, 1)))
        assert caplog.messages == ["cannot write the judge's ledger: Is a directory"]
    path.rmdir()
    asyncio.run(call(book, Usage(20, 1)))
    resumed.attach(path)
    assert resumed.total == book.total == Spending(3, Usage(30, 3), pytest.approx(60e-6))


def test_a_call_whose_end_cannot_be_written_still_counts_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "judge_calls.jsonl"
    book = attached(path, usd=1.0)

    async def story() -> None:
        reservation = await book.reserve(question())
        path.unlink(missing_ok=True)
        path.mkdir()
        reservation.settle(Usage(10, 1), "ok")

    asyncio.run(story())
    assert [line["outcome"] for line in lines(in_flight_file(path))] == ["in_flight"]


def test_a_tokenizer_that_makes_more_tokens_than_estimated_is_learned(tmp_path: Path) -> None:
    """For good: a later call of few tokens says nothing about the next."""
    path = tmp_path / "judge_calls.jsonl"
    book, resumed = attached(path, usd=1.0), ledger(usd=1.0)
    for read in (1000, 2000, 10):
        asyncio.run(call(book, Usage(read, 100)))
    resumed.attach(path)
    for each in (book, resumed):
        assert asyncio.run(each.reserve(question())).usage == Usage(2000, 100)


def test_no_call_is_sent_to_a_judge_that_does_not_keep_to_the_token_limit() -> None:
    book = ledger(usd=1.0)
    asyncio.run(call(book, Usage(10, 109)))
    asyncio.run(call(book, Usage(10, 110)))
    with pytest.raises(UnlimitedCost, match=r"m does not keep to the limit.*wrote 110.*rm_max_tok"):
        asyncio.run(call(book, Usage(10, 1)))
    free = ledger()
    asyncio.run(call(free, Usage(10, 110)))
    asyncio.run(call(free, Usage(10, 110)))


def test_the_message_of_a_used_up_budget_has_what_was_not_reported() -> None:
    book = ledger(tokens=200)

    async def story() -> None:
        reservation = await book.reserve(question())
        usage, note = billed_usage(None, question())
        reservation.settle(usage, "timeout", note=note)
        await book.reserve(question())

    upper = worst_case(question()).total
    with pytest.raises(Interrupted, match=rf"calls used {upper} \({upper} tokens of that are an"):
        asyncio.run(story())


def test_a_start_that_is_refused_before_its_first_call_leaves_no_file(tmp_path: Path) -> None:
    book = attached(tmp_path / "judge_calls.jsonl", usd=1.0)
    assert list(tmp_path.iterdir()) == []
    asyncio.run(call(book, Usage(5, 1)))
    assert {file.name for file in tmp_path.iterdir()} == {
        "judge_calls.jsonl", "judge_calls.in_flight",
    }  # fmt: skip
