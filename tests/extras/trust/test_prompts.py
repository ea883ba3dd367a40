"""`ppo prompts rubric`: drafts that --rm_rubric reads; nothing guessed or paid twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppo_cli.cli.app import main
from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply, Scale
from ppo_cli.rewards.judge.prompt import load_rubric
from ppo_cli.rewards.judge.rubric import RubricDraft, read_rubric
from ppo_cli.rewards.judge.verdict import read_answer
from tests.judge_server import JudgeServer
from tests.judge_server.wire import fenced
from tests.scoring.commands import judge_at, read
from tests.scoring.scripted import write_rows

KEPT = {"text": "It says 12.", "name": "twelve", "weight": 5, "fault": False, "must": True}
FAULT = {"text": "It guesses.", "name": "Guess work", "weight": 2, "fault": True, "must": False}


def draft(*criteria: Any) -> str:
    return json.dumps({"criteria": criteria})


@pytest.fixture
def rows(server: JudgeServer, tmp_path: Path) -> str:
    server.score = lambda system, user: draft(KEPT, FAULT)
    request = [{"prompt": f"{n} + 1 = ?", "ground_truth": f"{n + 1}"} for n in range(10, 14)]
    request[3]["extra_info"] = {"source": "a", "rubric": ["Mine."]}  # type: ignore[assignment]
    del request[1]["ground_truth"]
    return write_rows(tmp_path / "a.jsonl", *request)


def run(
    capsys: pytest.CaptureFixture[str], server: JudgeServer, rows: str, *flags: str
) -> tuple[int, str, str]:
    at = judge_at(server, Path(rows).parent)
    code = main(["prompts", "rubric", rows, "--out", f"{rows}.out", *at, *flags])
    return code, *capsys.readouterr()


def test_each_row_gets_criteria_that_can_be_read_and_edited(
    server: JudgeServer, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, server, rows, "--rm_price_input", "1", "--rm_price_output", "2")
    assert code == 0, err
    assert "1 rows already have criteria. Asking for 3 drafts: at most" in err and "$0.0" in err
    assert "4 written to" in out and "--rm_rubric extra_info.rubric" in out
    written = read(Path(f"{rows}.out"))
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
    Path(f"{rows}.out").unlink()  # as after a kill: the drafts are in the cache
    assert run(capsys, server, rows)[0] == 0
    assert read(Path(f"{rows}.out")) == written and server.count == 3


def test_what_is_there_is_neither_asked_again_nor_changed(
    server: JudgeServer, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, server, rows)[0] == 0
    out = Path(f"{rows}.out")
    out.write_text(out.read_text().replace("It says 12.", "Edited."))
    extra = {"prompt": "fresh?", "ground_truth": "yes"}
    Path(rows).write_text(json.dumps(extra) + "\n" + Path(rows).read_text())
    server.reset()
    assert run(capsys, server, rows, "--rm_cache", "off")[0] == 0
    written = read(out)
    texts = [row["extra_info"]["rubric"][0] for row in written]
    assert [t["text"] for t in texts[:4]] == ["It says 12."] + ["Edited."] * 3
    assert server.count == 1


@pytest.mark.parametrize(
    "message",
    [
        "Criteria: be right.",
        json.dumps([KEPT]),
        draft(),
        draft("Be right."),
        draft(*[KEPT] * 9),
        draft(KEPT | {"weight": 6}),
        draft(KEPT | {"weight": True}),
        draft(KEPT | {"must": "yes"}),
        draft(KEPT | {"text": "..."}),
        draft(KEPT | {"text": " "}),
        draft(KEPT | {"score": 3}),
        draft(KEPT)[:-1] + ', "note": "x"}',
    ],
)
def test_an_answer_in_another_form_is_no_draft(message: str) -> None:
    question = Question("", "", "", Scale(0, 1), draft=RubricDraft(8))
    with pytest.raises(JudgeError) as caught:
        read_answer(Reply(message), question)
    assert caught.value.cause == "form"


def test_a_row_without_a_draft_is_named_and_left_out(
    server: JudgeServer, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.score = lambda system, user: draft("Be.") if "\n12 + 1" in user else draft(KEPT)
    code, out, err = run(capsys, server, rows)
    assert code == 0, err
    assert "a.jsonl line 3: left out, form: " in out and "3 written" in out
    written = read(Path(f"{rows}.out"))
    assert [row["prompt"] for row in written] == ["10 + 1 = ?", "11 + 1 = ?", "13 + 1 = ?"]


def test_a_budget_ends_it_and_the_same_line_goes_on(
    server: JudgeServer, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--rm_budget_tokens", "2500", "--rm_concurrency", "1")
    code, _, err = run(capsys, server, rows, *few)
    assert code == 3 and "budget of 2,500 tokens is used up" in err, err
    before = server.count
    assert 1 <= before < 3 and len(read(Path(f"{rows}.out"))) == before + 1
    assert run(capsys, server, rows)[0] == 0
    assert server.count == 3 and len(read(Path(f"{rows}.out"))) == 4


def test_a_wrong_key_ends_it_after_one_call(
    server: JudgeServer, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.keys = {"another"}
    code, _, err = run(capsys, server, rows)
    assert (code, server.count) == (2, 1) and "cannot be used (http_401" in err
    assert not Path(f"{rows}.out").exists()


def test_one_rubric_for_a_run(
    server: JudgeServer, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, server, rows, "--one")
    assert code == 0, err
    file = Path(f"{rows}.out")
    assert f"--rm_rubric {file}" in out and server.count == 1
    assert [c.name for c in load_rubric(file).criteria] == ["twelve", "guess_work"]
    assert yaml.safe_load(file.read_text())[1]["weight"] == -2
    shown = fenced("prompt", server.calls[0].body["messages"][-1]["content"]) or ""
    assert "1. 10 + 1 = ?\nReference answer: 11\n\n2. 11 + 1 = ?\n\n3." in shown
    code, _, err = run(capsys, server, rows, "--one")
    assert code == 2 and "may have been edited" in err


def test_the_file_of_the_drafts_is_named(
    server: JudgeServer, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prompts", "rubric", rows, *judge_at(server, Path(rows).parent)]) == 2
    assert "--out FILE" in capsys.readouterr().err
    Path(f"{rows}.out").write_text("notes\n")
    code, _, err = run(capsys, server, rows)
    assert code == 2 and "line 1 is not an earlier draft" in err and server.count == 0
