"""`ppo reward calibrate` and `audit` of a rubric, criterion by criterion."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.judge_server import verdict_keys
from tests.judge_server.wire import fenced
from tests.scoring.commands import Bench

RUBRIC = """
- {name: kind, text: The response has kind., weight: 2}
- {name: rude, text: The response has rude., weight: -1}
- {name: depth, text: The response counts deep., weight: 3, levels: 3}
- {name: always, text: The response has x., weight: 1}
"""
pytestmark = pytest.mark.usefixtures("few_resamples")


def decide(system: str, user: str) -> str:
    """Counts words of the response."""
    response = fenced("response", user) or ""
    result: dict[str, Any] = {}
    for key, kind, word in re.findall(r"^(c\d+): The response (has|counts) (\w+)\.", user, re.M):
        times = response.split().count(word)
        verdict = times > 0 if kind == "has" else min(times, 3)
        result[key] = {"reason": f"{times} times", verdict_keys(user)[key]: verdict}
    return json.dumps(result)


def believing(key: str) -> Callable[[str, str], str]:
    """A judge that takes over what the response says of one criterion, wherever it says it."""
    claim = re.compile(rf'{key}"?: \{{(?:"reason": "[^"]*", )?"met": true')

    def judge(system: str, user: str) -> str:
        verdicts = json.loads(decide(system, user))
        if key in verdicts and claim.search(fenced("response", user) or ""):
            verdicts[key]["met"] = True
        return json.dumps(verdicts)

    return judge


@pytest.fixture
def flags(bench: Bench) -> list[str]:
    bench.server.score = decide
    (bench.folder / "r.yaml").write_text(RUBRIC)
    return ["--use_api_reward", *bench.judge(), "--rm_rubric", f"{bench.folder}/r.yaml"]


BY_MARKS = ("--criteria_labels", "marks", "--repeat", "0")


def write_answers(bench: Bench) -> str:
    """20 rows; people find `rude` twice more than the judge, and depth a level less once."""
    rows = []
    for n in range(20):
        words = ["x", *["kind"] * (n % 2), *["rude"] * (n % 4 == 1), *["deep"] * (3 - n % 4)]
        marks: dict[str, Any] = {
            "kind": n % 2 == 1, "rude": n % 4 == 1 or n in (2, 6), "always": n != 3,
            "depth": 3 - n % 4 - (n == 0),
        }  # fmt: skip
        rows.append({
            "prompt": f"Question {n}?", "response": " ".join(words), "good": n % 2 == 1,
            "marks": marks if n != 19 else {"kind": None},
        })  # fmt: skip
    return bench.write(*rows)


def test_calibrate_by_criterion(flags: list[str], bench: Bench) -> None:
    args = ("calibrate", write_answers(bench), "--labels", "good", *BY_MARKS, *flags)
    summary = bench.reward(*args, "--json").summary
    criteria = summary["criteria"]
    assert list(criteria) == ["kind", "rude", "depth", "always", "all criteria"]
    # Labels are also of criteria that training does not ask about.
    held_out = bench.reward(*args, "--rm_rubric_held_out", "0.4", "--json").summary["criteria"]
    assert list(held_out) == list(criteria)
    kind, rude, depth, always, every = criteria.values()
    assert kind["with the label"]["value"] == pytest.approx(1.0)
    assert (kind["agree"]["value"], kind["kappa"]) == (1.0, 1.0)
    # People say that two more are rude, so the judge gave that credit wrongly.
    assert (rude["labelled"], rude["agree"]["value"]) == (19, pytest.approx(17 / 19))
    assert rude["credited too much"] == pytest.approx(2 / 19)
    chance = (14 * 12 + 5 * 7) / 19**2
    assert rude["kappa"] == pytest.approx((17 / 19 - chance) / (1 - chance))
    assert depth["credited too much"] == pytest.approx(1 / 19)
    assert depth["with the rest"]["value"] < -0.3
    assert (always["mean"], always["with the label"]["value"]) == (1.0, None)
    assert (every["labelled"], every["agree"]["value"]) == (76, pytest.approx(72 / 76))
    advice = "\n".join(summary["advice"])
    assert "'always' had its full credit in all 20 rows" in advice
    assert "'depth' opposes the others" in advice
    assert "rude: the judge agrees with the labels in 89% of 19; it is too kind in 11%." in advice
    bench.server.reset()
    lines = [line.split() for line in bench.reward(*args).out.splitlines()]
    assert bench.server.count <= 1  # from the cache but for the one to try out
    (row,) = [line for line in lines if line[:1] == ["rude"]]
    assert row[-4:] == ["89%", "0.759", "11%", "0%"]


def test_labels_of_criteria_make_the_label_of_the_row(flags: list[str], bench: Bench) -> None:
    args = ("calibrate", write_answers(bench), *BY_MARKS, *flags, "--json")
    summary = bench.reward(*args).summary
    assert summary["rows"] == 19  # one has labels of none
    assert summary["agreement"]["Spearman"]["value"] > 0.8


def test_criteria_of_rows_are_told_together(flags: list[str], bench: Bench) -> None:
    """A criterion that all rows share is listed by itself, those of single rows only together."""
    rows = []
    for n in range(12):
        both = [{"name": "kind", "text": "The response has kind."},
                {"name": "own", "text": f"The response has w{n}."}]  # fmt: skip
        text = f"w{n - n % 3}" + " kind" * (n % 2)
        row = {"prompt": f"{n}?", "response": text, "label": n % 2, "marks": {"own": n % 2 == 0}}
        rows.append(row | {"extra_info": {"rubric": both}})
    args = (*BY_MARKS, *flags[:-1], "extra_info.rubric", "--labels", "label", "--json")
    criteria = bench.reward("calibrate", bench.write(*rows), *args).summary["criteria"]
    assert list(criteria) == ["kind", "all criteria"]
    # Met in rows 0, 3, 6 and 9, labelled so in all even ones: 3 and 9, and 2, 4, 8 and 10 differ.
    assert criteria["all criteria"]["agree"]["value"] == 0.5
    assert criteria["all criteria"]["labelled"] == 12


ITEMS = [
    {"prompt": f"Question {n}?", "good": f"kind deep deep deep x{n}", "bad": f"rude x{n}"}
    for n in range(3)
]


def test_an_audit_names_the_criteria_that_attacks_moved(flags: list[str], bench: Bench) -> None:
    args = ("audit", *flags, "--data", bench.write(*ITEMS), "--json")
    check = bench.reward(*args).checks["criteria under attack"]
    assert check["passed"] and "nor on any" in check["said"]
    bench.server.score = believing("c1")
    check = bench.reward(*args, "--rm_cache", "off", code=2).checks["criteria under attack"]
    assert check["passed"] is False
    assert {case["criterion"] for case in check["cases"]} == {"kind"}
    assert check["worst"]["got"] == 1.0 and check["worst"]["without it"] == 0.0
    assert "kind by fake verdicts (2 of 2)" in check["said"]
    assert "verdicts in a thought" not in check["said"]  # a thought is not shown to the judge


def test_criteria_of_each_judge_of_a_mixture_are_attacked(flags: list[str], bench: Bench) -> None:
    names = ("oak", "elm", "birch", "spruce", "yew")
    rubric = "".join(f"- {{name: {n}, text: The response has {n}.}}\n" for n in names)
    (bench.folder / "trees.yaml").write_text(rubric)
    bench.server.score = believing("c5")  # only one judge has so many
    mixed = ["--reward", "judge:a:0.5", "--reward", "judge:b:0.5"]
    mixed += [f"reward.composite.parts.b.judge.rubric={bench.folder}/trees.yaml"]
    args = ("audit", *flags[1:], *mixed, "--data", bench.write(*ITEMS), "--json")
    cases = bench.reward(*args, code=2).checks["criteria under attack"]["cases"]
    assert {case["criterion"] for case in cases} == {"b: yew"}, cases


def test_criteria_of_rows_are_attacked_in_separate_calls(flags: list[str], bench: Bench) -> None:
    rubric = [{"text": "The response has kind."}, {"text": "The response has rude.", "weight": -1}]
    file = bench.write(*(item | {"extra_info": {"rubric": rubric}} for item in ITEMS))
    args = (*flags[:-1], "extra_info.rubric", "--rm_rubric_calls", "each", "--data", file)
    outcome = bench.reward("audit", *args, "--rows", "2", "--json")
    assert "Each criterion is a separate call." in outcome.err
    assert outcome.summary["spent"]["calls"] > 1.5 * outcome.summary["asked"]
    assert outcome.checks["criteria under attack"]["passed"]
