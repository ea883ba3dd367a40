"""Judges that place their score: cuts, what is asked, strict replies, and where rewards land."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppo_cli.errors import RewardError
from ppo_cli.records import Prompt, Rollout, Score, Turn
from ppo_cli.rewards.judge import splitting
from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply, Scale, Usage
from ppo_cli.rewards.judge.panel import PanelReward
from ppo_cli.rewards.judge.placing import (
    Piece,
    cut_response,
    place_score,
    request_places,
    show_example,
    show_response,
)
from ppo_cli.rewards.judge.prompt import load_preset
from ppo_cli.rewards.judge.rubric import Criterion, Placing, Rubric
from ppo_cli.rewards.judge.verdict import read_answer
from tests.judge_server import JudgeServer
from tests.rewards.scoring import score_all
from tests.settings import complete_judge

Make = Callable[..., Any]


def respond(text: str, *, opened: str = "") -> Rollout:
    prompt = Prompt("q", "Tell me.", ({"role": "user", "content": "Tell me."},), "", (1,),
                    ground_truth="x", opened=opened)  # fmt: skip
    ids = tuple(range(len(text)))
    return Rollout(prompt, 0, ids, np.zeros(len(ids), np.float32), text, "stop")


def cut(text: str, place: str, *, opened: str = "", reasoning: str = "strip") -> list[str]:
    """The pieces as the judge reads them; the ends must cut the text without a gap."""
    api = complete_judge(model="m", place=place, reasoning=reasoning)
    pieces = cut_response(respond(text, opened=opened), api)
    ends = [piece.end for piece in pieces]
    assert ends == sorted(set(ends)) and ends[-1:] in ([], [len(text)])
    return [piece.text for piece in pieces]


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("One. Two!  Three?", "sentence", ["One. ", "Two!  ", "Three?"]),
        ("It is 3.14 m, e.g. here. Dr. No left.", "sentence",
         ["It is 3.14 m, e.g. here. ", "Dr. No left."]),
        ("The U.S. Army left at 5 p.m. on Monday. At 6 p.m. J. R. Roe (Ph.D.) came.", "sentence",
         ["The U.S. Army left at 5 p.m. on Monday. ", "At 6 p.m. ", "J. R. Roe (Ph.D.) came."]),
        ("Am 3. Mai gab es z. B. Obst usw. Dann Nr. 2, d. h. Tee. Um 3. Ende.", "sentence",
         ["Am 3. Mai gab es z. B. Obst usw. ", "Dann Nr. 2, d. h. Tee. ", "Um 3. ", "Ende."]),
        ("El Sr. Gil va a EE. UU. a las 3 p. m. y M. Roy, p. ex., dort. Fin.", "sentence",
         ["El Sr. Gil va a EE. UU. a las 3 p. m. y M. Roy, p. ex., dort. ", "Fin."]),
        ("А. С. Пушкин и т. д. и др. И т. д. Потом, т.е. сейчас.", "sentence",
         ["А. С. Пушкин и т. д. и др. ", "И т. д. ", "Потом, т.е. сейчас."]),
        ('On Jan. 5 (p. 12, Art. 1) she asked, "Why?" and left. « Oui. » dit-il.', "sentence",
         ['On Jan. 5 (p. 12, Art. 1) she asked, "Why?" and left. ', "« Oui. » dit-il."]),
        ("「行く。」と彼は言った。次。", "sentence", ["「行く。」と彼は言った。", "次。"]),
        ("値は３．１４だ．次．", "sentence", ["値は３．１４だ．", "次．"]),
        ("So says Dr.\nNo left.\n        12. Last.", "sentence",
         ["So says Dr.\n", "No left.\n        ", "12. Last."]),
        # Behind more than ten blanks it is no number of a list.
        (f"No left.\n{' ' * 10}12. Last.", "sentence", ["No left.\n          ", "12. Last."]),
        (f"No left.\n{' ' * 11}12. Last.", "sentence", ["No left.\n           ", "12. ", "Last."]),
        ("彼は来た。彼女も来た。", "sentence", ["彼は来た。", "彼女も来た。"]),
        ("দুই। চার॥ ہاں۔ نعم؟ ሁለት። Երկու։ နှစ်။ ពីរ។ x", "sentence",
         ["দুই। ", "চার॥ ", "ہاں۔ ", "نعم؟ ", "ሁለት። ", "Երկու։ ", "နှစ်။ ", "ពីរ។ ", "x"]),
        ('He said "No." Then he left…\n\n- a\n- b', "sentence",
         ['He said "No." ', "Then he left…\n\n", "- a\n", "- b"]),
        ("1. First one. 2. Second one.", "sentence", ["1. First one. ", "2. Second one."]),
        ("a\n\n\nb\n---\nc", "line", ["a\n\n\n", "b\n---\n", "c"]),
        ("First,\nso.\n\nThen\nthis.\n\n", "step", ["First,\nso.\n\n", "Then\nthis.\n\n"]),
        ("Step 1: a\nmore\nStep 2: b", "step", ["Step 1: a\nmore\n", "Step 2: b"]),
        # One piece is no place, and what has no letter belongs to a neighbour.
        ("Only this.", "sentence", []),
        ("Yes. ... !!! ?", "sentence", []),
        ("", "line", []),
        ("<think>Hm. So.</think>A. b. It is a.", "sentence", ["A. b. ", "It is a."]),
        ("One. Two.<think>Hm.</think>", "sentence", ["One. ", "Two."]),
        ("One. Two. !!!<think>Hm.</think>Three.", "sentence", ["One. ", "Two. !!!", "Three."]),
    ],
)  # fmt: skip
def test_cuts(text: str, place: str, expected: list[str]) -> None:
    assert cut(text, place) == expected


def test_thoughts_are_cut_only_where_the_judge_sees_them() -> None:
    text = "I think. Then I write.</think>First. Second."
    assert cut(text, "sentence", opened="<think>") == ["First. ", "Second."]
    assert len(cut(text, "sentence", opened="<think>", reasoning="keep")) == 3
    lines = cut("One.\nTwo.", "line", opened="<think>\n", reasoning="keep")
    assert lines == ["<think>\nOne.\n", "Two."]  # the model did not write the mark


@pytest.mark.parametrize("text", ["." * 60_000 + "x y", ". " * 30_000 + "x", "\n" + " " * 60_000])
@pytest.mark.parametrize("place", ["sentence", "step"])
def test_degenerate_responses_are_cut_in_one_pass(text: str, place: str) -> None:
    assert cut(text, place) == []  # quadratic, each took a minute


def test_an_episode_that_the_judge_reads_whole_is_not_cut_within_its_turns() -> None:
    text = "One. Two."
    message = {"role": "assistant", "content": text}
    episode = replace(
        respond(text), turns=(Turn(0, 3, "A. B.", message), Turn(5, 9, text, message))
    )
    for scope, place, pieces in (
        ("episode", "turn", [Piece("A. B.", 3, "token"), Piece(text, 9, "token")]),
        ("turn", "sentence", [Piece("One. ", 5), Piece("Two.", 9)]),
        ("turn", "criterion", []),
        ("turn", None, []),
    ):
        api = complete_judge(place=place, scope=scope)
        assert cut_response(episode, api) == pieces
        placing = request_places(show_response(episode, api), api, Scale(1, 10))
        noun = "turn" if place == "turn" else "piece"
        assert placing == (Placing(2, 1, 10, "score_1_to_10", noun) if pieces else None)
    # The turns of an episode are no sentences.
    api = complete_judge(place="sentence", scope="episode")
    assert cut_response(episode, api) == []
    assert request_places(show_response(episode, api), api, Scale(1, 10)) is None


def test_more_pieces_than_fit_into_an_answer_are_joined() -> None:
    pieces = cut("".join(f"line {i}\n" for i in range(301)), "line")
    assert len(pieces) == 60
    assert {piece.count("\n") for piece in pieces} == {5, 6}
    # An example gets a second piece only where it has one.
    for place, text in (("sentence", "One. Two."), ("turn", "One.")):
        assert len(show_example(text, complete_judge(place=place), "Three.")) == 2


def reply(*pieces: Any, whole: Any = 7, **more: Any) -> str:
    named = {f"piece_{k}": piece for k, piece in enumerate(pieces, start=1)}
    return json.dumps({"reason": "so", **named, "score_1_to_10": whole, **more})


def judge_once(make: Make, server: JudgeServer, text: str, answer: str, **changes: Any) -> Score:
    server.score = lambda system, user: answer
    return score_all(make(place="sentence", **changes), [respond(text)])[0]


def test_the_whole_says_how_much_and_the_pieces_say_where(
    judge_of: Make, server: JudgeServer
) -> None:
    score = judge_once(judge_of, server, "Good one. Bad one. Fair one.", reply(10, 1, 4, whole=5))
    assert score.value == pytest.approx(4 / 9)
    assert score.info["pieces"] == pytest.approx([1, 0, 1 / 3])
    assert [step.end for step in score.steps] == [10, 19, 28]
    assert [step.value for step in score.steps] == pytest.approx([1 / 3, 0, 1 / 9])
    request = server.calls[-1].body["messages"][-1]["content"]
    assert re.findall(r"<piece-(\d)-\w+>\n(.*)", request) == [
        ("1", "Good one. "), ("2", "Bad one. "), ("3", "Fair one."),
    ]  # fmt: skip


def test_pieces_that_are_all_worthless_share_the_score(judge_of: Make, server: JudgeServer) -> None:
    score = judge_once(judge_of, server, "One. Two.", reply(1, 1, whole=10))
    assert [step.value for step in score.steps] == [0.5, 0.5]
    score = judge_once(judge_of, server, "Two. Three.", reply(4, 1, whole=1))
    assert [step.value for step in score.steps] == [0, 0]


def test_a_score_without_a_verdict_is_shared_out_too(judge_of: Make, server: JudgeServer) -> None:
    server.score = lambda system, user: reply(10, 4, whole=10) if "Good one" in user else "none"
    judge = judge_of(place="sentence", on_failure="batch_mean")
    responses = [respond("Good one. Bad one."), respond("Two. More. Pieces. Here.")]
    imputed = score_all(judge, responses)[1]
    assert imputed.imputed and [step.value for step in imputed.steps] == [0.25] * 4


def test_a_response_of_one_piece_is_asked_about_as_without_places(
    judge_of: Make, server: JudgeServer
) -> None:
    bodies = []
    for place in (None, "sentence"):
        server.score = lambda system, user: 7
        (score,) = score_all(judge_of(place=place), [respond("Only this.")])
        assert score.value == pytest.approx(6 / 9) and not score.steps
        text = json.dumps(server.calls[0].body)
        bodies.append(re.sub(r"-[0-9a-f]{16}\b", "", text))
    assert bodies[0] == bodies[1] and len(server.calls) == 1  # the second is in the cache


def read_table() -> list[tuple[int, str, str]]:
    """Pieces, what a careful reader takes, and reply, written before the code that reads them.

    `9 1 5 = 5` are the scores of the pieces and of the whole; with `?` asking again is right too.
    """
    text = (Path(__file__).parent / "placed_replies.txt").read_bytes().decode()
    rows = re.findall(r"^== (\d+): (.*)\n((?:(?!== ).*\n)*)", text, re.M)
    return [(int(count), expected, answer[:-1]) for count, expected, answer in rows]


@pytest.mark.parametrize(("count", "expected", "answer"), read_table())
def test_a_reply_scores_each_piece_once_or_is_no_verdict(
    count: int, expected: str, answer: str
) -> None:
    placing = Placing(count, 1, 10, "score_1_to_10") if count > 1 else None
    question = Question("", "", "", Scale(1, 10), placing=placing)
    try:
        value, _, info = read_answer(Reply(answer, Usage()), question)
    except JudgeError:
        assert expected == "no verdict" or expected.endswith("?")
        return
    pieces = [1 + 9 * share for share in info["pieces"]] if placing else [value][:count]
    assert f"{' '.join(f'{piece:g}' for piece in pieces)} = {value:g}" == expected.rstrip("?")


def test_scores_that_the_response_shows_itself_may_be_quotations(
    judge_of: Make, server: JudgeServer
) -> None:
    text = 'Right. "piece_1": 10, "piece_2": 10, "score_1_to_10": 10.'
    answer = '{"reason": "It ends with ", "piece_1": 10, "piece_2": 10, "score_1_to_10": 10}'
    assert judge_once(judge_of, server, text, answer).value is None


def test_votes_and_panels_combine_piece_by_piece(judge_of: Make, server: JudgeServer) -> None:
    answers = iter([reply(10, 1, whole=10), reply(10, 10, whole=10), reply(1, 1, whole=1)])
    server.score = lambda system, user: next(answers)
    (score,) = score_all(judge_of(place="sentence", votes=3), [respond("One. Two.")])
    assert score.info["pieces"] == pytest.approx([2 / 3, 1 / 3])
    assert sum(step.value for step in score.steps) == pytest.approx(score.value)
    first = [reply(10, 1, whole=10), reply(10, 4, whole=10), reply(1, 1, whole=1)]
    answers = iter(first + [reply(10, 4, whole=10)] * 6)
    usual = {"model": "m2", "base_url": server.url("openai")}
    panel = judge_of(
        kind=PanelReward, place="sentence", cache="off", noise_responses=1,
        judges={"a": usual, "b": {**usual, "model": "m3"}},
        panel={"judges": ("a", "b"), "least": 3},
    )  # fmt: skip
    panel.begin_step(1)
    (score,) = score_all(panel, [respond("One. Two.")])
    assert score.value == 1.0 and score.info["pieces"] == [1.0, 0.0]
    # Asked twice more, the panel gives the second piece 1/3.
    assert panel.pop_metrics()["judge/place_noise"] == pytest.approx(math.sqrt(1 / 54))


def test_criteria_are_placed_at_their_quotations(
    judge_of: Make, server: JudgeServer, tmp_path: Path
) -> None:
    """What fulfils a criterion earns its weight there, what breaks it loses it; 0 has no place."""
    rows = [
        {"text": "It greets.", "weight": 1}, {"text": "It insults.", "weight": 2, "fault": True},
        {"text": "It thanks.", "weight": 1}, {"text": "It ends.", "weight": 0},
    ]  # fmt: skip
    (tmp_path / "rubric.json").write_text(json.dumps(rows))
    quotes = "Hello  there!", "You fool.", "never said", "Hello"
    verdicts = {"met": True}, {"present": True}, {"met": False}, {"met": True}
    answer = {
        f"c{k}": {"reason": "so", "quote": quote, **verdict}
        for k, (quote, verdict) in enumerate(zip(quotes, verdicts, strict=True), start=1)
    }
    texts = [row["text"] for row in rows]

    def reply(system: str, user: str) -> str:
        keys = re.findall(r"(c\d): (It \w+\.)", user)
        return json.dumps({key: answer[f"c{texts.index(text) + 1}"] for key, text in keys})

    server.score = reply
    judge = judge_of(
        rubric=str(tmp_path / "rubric.json"), rubric_order="shuffled", place="criterion"
    )  # fmt: skip
    (score,) = score_all(judge, [respond("Hello there! You fool. Bye.")])
    assert score.value == 0.25 and score.info["quotes_lost"] == 1
    assert [(step.end, step.value) for step in score.steps] == [(12, 0.25), (22, -0.5)]
    # An unmet criterion earns nothing where it is broken, and nothing at the end.
    answer["c3"]["quote"] = "Bye?"
    (score,) = score_all(judge, [respond("Hello there! You fool. Bye?")])
    assert [(step.end, step.value) for step in score.steps] == [(12, 0.25), (22, -0.5), (27, 0.0)]
    # In an episode a passage of an earlier turn is placed at the end of that turn.
    message = {"role": "assistant", "content": "Bye?"}
    turns = Turn(0, 4, "Hello there! You fool.", message), Turn(5, 9, "Bye?", message)
    (score,) = score_all(judge, [replace(respond("Bye?"), turns=turns)])
    places = [(step.end, step.unit, step.value) for step in score.steps]
    assert places == [(4, "token", 0.25), (4, "token", -0.5), (4, "char", 0.0)]
    del answer["c2"]["quote"]
    (score,) = score_all(judge, [respond("Hello there! You fool. Bye now.")])
    assert score.value is None


@pytest.mark.parametrize(
    ("text", "quote", "end"),
    [
        ("It quotes nothing.", " ", None),
        ("It is so. Yes.", '"It is so."\n', 9),  # as a quotation is written
        ("Le cafe\u0301 est bon. Oui.", "Le caf\xe9 est bon.", 17),
        ("Use <custom> here. Yes.", "< custom> here.", 18),  # as a tag is shown
        ("a\u200bb is.\r\nFine.", "ab is.\nFine.", 14),
        ("He said \u201cyes, it\u2019s\u201d. No.", 'He said "yes, it\'s".', 20),
        ("Concatenate. A cat.", "cat", 18),  # a word before a part of one
        ("Concatenate. A dog.", "cat", 6),
        ("So It Is. Yes.", "so it is.", 9),
    ],
)
def test_a_quotation_is_found_as_a_judge_read_it(text: str, quote: str, end: int | None) -> None:
    api = complete_judge(place="criterion", rubric="extra_info.r")
    score = Score(1.0, info={"quotes": [quote], "criteria": {"a": 1.0}})
    placed = place_score(
        score, respond(text), api, Rubric((Criterion("a", "It is."),), quoted=True)
    )
    assert [step.end for step in placed.steps] == ([end] if end else [])
    assert not placed.info["quotes_lost"]


@pytest.mark.parametrize(("first", "second", "right"), [(10, 1, "3 of 3"), (1, 10, "only 2 of 3")])
def test_the_start_asks_for_places_and_checks_a_known_one(
    judge_of: Make, server: JudgeServer, first: int, second: int, right: str
) -> None:
    """The trial, two sums of which one is wrong, and the worked cases, in pieces like training."""
    counts = list[int]()
    bad = [str(case.material.response) for case in load_preset("math").cases if case.at_most]

    def answer(system: str, user: str) -> Any:
        counts.append(len(re.findall(r"<piece-\d+-", user)))
        value = 1 if any(text[-20:].strip() in user for text in bad) else 10
        scores = ([first, second] * counts[-1])[: counts[-1]]
        return reply(*scores, whole=value) if scores else value

    server.score = answer
    notes = list[str]()
    judge = judge_of(place="sentence", prompt_preset="math", canary_every=9, cache="off")
    judge.start([respond("").prompt], tell=notes.append)
    assert counts[0] == 2 and any(right in note for note in notes), notes


OWN_SPLIT = """
import re
def clauses(text): return re.findall("[^,]*,?", text)
def half(text): return [text[: len(text) // 2]]
def bent(text): return [text.upper()]
def drawn(text, calls=[]): calls.append(0); k = len(calls) % 9; return [text[:k], text[k:]]
def boom(text): return text.split(None, 1)[1].index("§")
def numbers(text): return [1]
def whole(text): return text
def nothing(text): return None
def lines(text): yield from re.findall("[^,]*,?", text)
class Words: ...
"""


def test_a_function_that_does_not_return_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitting, "SPLIT_S", 0.3)
    (tmp_path / "split.py").write_text(
        "import time\ndef slow(text):\n    time.sleep(60 * (text[0] == '1'))\n    return [text]\n"
    )
    spec = f"{tmp_path}/split.py:slow"
    assert cut("No. Yes.", spec) == []
    with pytest.raises(RewardError, match=r"slow does not return within 0\.3 s for '1\. Yes"):
        cut("1. Yes.", spec)


def test_pieces_of_a_function_are_the_text_in_order_or_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "split.py"
    file.write_text(OWN_SPLIT)
    for function in ("clauses", "lines"):
        pieces = cut("One, two. Three, four.", f"{file}:{function}")
        assert pieces == ["One,", " two. Three,", " four."]
    problems = {
        "half": "no piece has the end of the text, .* (split.py, line 4)",
        "bent": "piece 1 is 'ONE .* (split.py, line 5)",
        "drawn": "a second call .* returns other pieces (split.py, line 6)",
        "boom": "fails on 'One .*ValueError: .* (split.py, line 7)",
        "numbers": "piece 1 is of type int (split.py, line 8)",
        "whole": "it returns a value of type str (split.py, line 9)",
        "nothing": "it returns a value of type NoneType (split.py, line 10)",
        "Words": "has no function 'Words'",
        "clause": "has no function 'clause'. Did you mean 'clauses'",
    }
    for function, problem in problems.items():
        pattern = re.escape(problem).replace(r"\.\*", ".*")
        with pytest.raises(RewardError, match=pattern):
            cut("One, two.", f"{file}:{function}")


def test_a_split_that_fails_on_a_response_is_a_failed_score(
    judge_of: Make, server: JudgeServer, tmp_path: Path
) -> None:
    file = tmp_path / "split.py"
    file.write_text("def words(text):\n    return text.split('|') if '|' in text else [text]\n")
    (score,) = score_all(judge_of(place=f"{file}:words"), [respond("One|two")])
    assert score.value is None and "split.py, line 1" in score.failure and not server.calls
