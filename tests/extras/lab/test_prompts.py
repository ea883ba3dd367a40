"""`ppo prompts rubric`: drafts that --rm_rubric reads; nothing guessed or paid twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply, Scale
from ppo_cli.rewards.judge.prompt import load_rubric
from ppo_cli.rewards.judge.rubric import RubricDraft, read_rubric
from ppo_cli.rewards.judge.verdict import read_answer
from tests.judge_server.wire import fenced
from tests.scoring.commands import Bench, Outcome, read

TWELVE = {"text": "It says 12.", "name": "twelve", "weight": 5, "fault": False, "must": True}
FAULT = {"text": "It guesses.", "name": "Guess work", "weight": 2, "fault": True, "must": False}


def draft(*criteria: Any) -> str:
    return json.dumps({"criteria": criteria})


class Drafts:
    """Four rows, of which the last has criteria already, and the file of the drafts."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.server = bench, bench.server
        self.server.score = lambda system, user: draft(TWELVE, FAULT)
        rows = [{"prompt": f"{n} + 1 = ?", "ground_truth": f"{n + 1}"} for n in range(10, 14)]
        rows[3]["extra_info"] = {"source": "a", "rubric": ["Mine."]}  # type: ignore[assignment]
        del rows[1]["ground_truth"]
        self.rows = Path(bench.write(*rows))
        self.out = bench.folder / "drafts.jsonl"

    def make(self, *flags: str, code: int = 0) -> Outcome:
        """Type `ppo prompts rubric FILE --out FILE`, which must end with this exit code."""
        args = (str(self.rows), "--out", str(self.out), *self.bench.judge(), *flags)
        return self.bench.ppo("prompts", "rubric", *args, code=code)

    def written(self) -> list[dict[str, Any]]:
        return read(self.out)


@pytest.fixture
def drafts(bench: Bench) -> Drafts:
    return Drafts(bench)


def test_each_row_gets_criteria_that_can_be_read_and_edited(drafts: Drafts) -> None:
    out, err = drafts.make("--rm_price_input", "1", "--rm_price_output", "2")
    assert "1 row already with criteria. Asking for 3 drafts: at most" in err and "$0.0" in err
    assert "4 drafts written to" in out and "--rm_rubric extra_info.rubric" in out
    written, server = drafts.written(), drafts.server
    assert [row["prompt"] for row in written] == [f"{n} + 1 = ?" for n in range(10, 14)]
    assert written[0]["extra_info"]["rubric"] == [
        {"name": "twelve", "text": "It says 12.", "weight": 5, "must": True},
        {"name": "guess_work", "text": "It guesses.", "weight": -2},
    ]
    result = read_rubric(written[0]["extra_info"]["rubric"], "row").criteria
    assert [(c.weight, c.fault, c.must) for c in result] == [(5, False, True), (2, True, False)]
    assert written[3]["extra_info"] == {"source": "a", "rubric": ["Mine."]} and server.count == 3
    users = [call.body["messages"][-1]["content"] for call in server.calls]
    assert sorted(fenced("ground_truth", user) or "" for user in users) == ["", "11", "13"]
    drafts.out.unlink()  # as after a kill: the drafts are in the cache
    drafts.make()
    assert drafts.written() == written and server.count == 3


def test_what_is_there_is_neither_asked_again_nor_changed(drafts: Drafts) -> None:
    drafts.make()
    drafts.out.write_text(drafts.out.read_text().replace("It says 12.", "Edited."))
    extra = {"prompt": "fresh?", "ground_truth": "yes"}
    drafts.rows.write_text(json.dumps(extra) + "\n" + drafts.rows.read_text())
    drafts.server.reset()
    drafts.make("--rm_cache", "off")
    criteria = [row["extra_info"]["rubric"][0] for row in drafts.written()]
    assert [c["text"] for c in criteria[:4]] == ["It says 12."] + ["Edited."] * 3
    assert drafts.server.count == 1


@pytest.mark.parametrize(
    "message",
    [
        "Criteria: be right.",
        json.dumps([TWELVE]),
        draft(),
        draft("Be right."),
        draft(*[TWELVE] * 9),
        draft(TWELVE | {"weight": 6}),
        draft(TWELVE | {"weight": True}),
        draft(TWELVE | {"must": "yes"}),
        draft(TWELVE | {"text": "..."}),
        draft(TWELVE | {"text": " "}),
        draft(TWELVE | {"score": 3}),
        draft(TWELVE)[:-1] + ', "note": "x"}',
    ],
)
def test_an_answer_in_another_form_is_no_draft(message: str) -> None:
    question = Question("", "", "", Scale(0, 1), draft=RubricDraft(8))
    with pytest.raises(JudgeError) as caught:
        read_answer(Reply(message), question)
    assert caught.value.cause == "form"


def test_a_row_without_a_draft_is_named_and_left_out(drafts: Drafts) -> None:
    drafts.server.score = lambda s, user: draft("Be.") if "\n12 + 1" in user else draft(TWELVE)
    out = drafts.make().out
    assert "a.jsonl line 3: left out, form: " in out and "3 drafts written" in out
    prompts = [row["prompt"] for row in drafts.written()]
    assert prompts == ["10 + 1 = ?", "11 + 1 = ?", "13 + 1 = ?"]


def test_a_budget_ends_it_and_the_same_line_goes_on(drafts: Drafts) -> None:
    err = drafts.make("--rm_budget_tokens", "2500", "--rm_concurrency", "1", code=3).err
    assert "budget of 2,500 tokens is used up" in err
    before = drafts.server.count
    assert 1 <= before < 3 and len(drafts.written()) == before + 1
    drafts.make()
    assert drafts.server.count == 3 and len(drafts.written()) == 4


def test_a_wrong_key_ends_it_after_one_call(drafts: Drafts) -> None:
    drafts.server.keys = {"another"}
    assert "cannot be used (http_401" in drafts.make(code=2).err
    assert drafts.server.count == 1 and not drafts.out.exists()


def test_one_rubric_for_a_run(drafts: Drafts) -> None:
    assert f"--rm_rubric {drafts.out}" in drafts.make("--one").out and drafts.server.count == 1
    assert [c.name for c in load_rubric(drafts.out).criteria] == ["twelve", "guess_work"]
    assert yaml.safe_load(drafts.out.read_text())[1]["weight"] == -2
    shown = fenced("prompt", drafts.server.calls[0].body["messages"][-1]["content"]) or ""
    assert "1. 10 + 1 = ?\nReference answer: 11\n\n2. 11 + 1 = ?\n\n3." in shown
    assert "may have been edited" in drafts.make("--one", code=2).err
