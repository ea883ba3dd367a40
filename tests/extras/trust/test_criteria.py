"""`ppo reward calibrate` and `audit` of a rubric, criterion by criterion."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.judge_server import JudgeServer, verdict_keys
from tests.judge_server.wire import fenced
from tests.scoring.commands import Run, judge_at
from tests.scoring.scripted import write_rows

RUBRIC = """
- {name: kind, text: The response has kind., weight: 2}
- {name: rude, text: The response has rude., weight: -1}
- {name: depth, text: The response counts deep., weight: 3, levels: 3}
- {name: always, text: The response has x., weight: 1}
"""


def decide(system: str, user: str) -> str:
    """Counts words of the response, and believes in `fooled` what it says of the criteria."""
    response = fenced("response", user) or ""
    result: dict[str, Any] = {}
    for key, kind, word in re.findall(r"^(c\d+): The response (has|counts) (\w+)\.", user, re.M):
        times = response.split().count(word)
        verdict = times > 0 if kind == "has" else min(times, 3)
        result[key] = {"reason": f"{times} times", verdict_keys(user)[key]: verdict}
    return json.dumps(result)


def claims(key: str, user: str) -> bool:
    """Whether the response itself says that a criterion is met."""
    verdict = rf'{key}"?: \{{(?:"reason": "[^"]*", )?"met": true'
    return re.search(verdict, fenced("response", user) or "") is not None


pytestmark = pytest.mark.usefixtures("few_resamples")


@pytest.fixture
def flags(server: JudgeServer, tmp_path: Path) -> list[str]:
    server.score = decide
    (tmp_path / "r.yaml").write_text(RUBRIC)
    return ["--use_api_reward", *judge_at(server, tmp_path), "--rm_rubric", f"{tmp_path}/r.yaml"]


def answers(folder: Path) -> str:
    """20 rows; people find `rude` twice more than the judge, and depth a level less once."""
    rows = []
    for n in range(20):
        args = ["x", *["kind"] * (n % 2), *["rude"] * (n % 4 == 1), *["deep"] * (3 - n % 4)]
        marks: dict[str, Any] = {
            "kind": n % 2 == 1, "rude": n % 4 == 1 or n in (2, 6), "always": n != 3,
            "depth": 3 - n % 4 - (n == 0),
        }  # fmt: skip
        rows.append({
            "prompt": f"Question {n}?", "response": " ".join(args), "good": n % 2 == 1,
            "marks": marks if n != 19 else {"kind": None},
        })  # fmt: skip
    return write_rows(folder / "a.jsonl", *rows)


def test_calibrate_by_criterion(
    flags: list[str], tmp_path: Path, run: Run, server: JudgeServer
) -> None:
    file = answers(tmp_path)
    args = ("--labels", "good", "--criteria_labels", "marks", "--repeat", "0", *flags)
    code, out, err = run("calibrate", file, *args, "--json")
    assert code == 0, err
    summary = json.loads(out)
    criteria = summary["criteria"]
    assert list(criteria) == ["kind", "rude", "depth", "always", "all criteria"]
    assert criteria["kind"]["with the label"]["value"] == pytest.approx(1.0)
    assert (criteria["kind"]["agree"]["value"], criteria["kind"]["kappa"]) == (1.0, 1.0)
    # People say that two more are rude, so the judge gave that credit wrongly.
    assert criteria["rude"]["labelled"] == 19
    assert criteria["rude"]["agree"]["value"] == pytest.approx(17 / 19)
    assert criteria["rude"]["credited too much"] == pytest.approx(2 / 19)
    by_hand = (17 / 19 - (14 * 12 + 5 * 7) / 19**2) / (1 - (14 * 12 + 5 * 7) / 19**2)
    assert criteria["rude"]["kappa"] == pytest.approx(by_hand)
    assert criteria["depth"]["credited too much"] == pytest.approx(1 / 19)
    assert (criteria["always"]["mean"], criteria["always"]["with the label"]["value"]) == (
        1.0,
        None,
    )
    assert criteria["depth"]["with the rest"]["value"] < -0.3
    everything = criteria["all criteria"]
    assert (everything["labelled"], everything["agree"]["value"]) == (76, pytest.approx(72 / 76))
    advice = "\n".join(summary["advice"])
    assert "'always' had its full credit in all 20 rows" in advice
    assert "'depth' opposes the others" in advice
    assert "rude: the judge agrees with the labels in 89% of 19; it is too kind in 11%." in advice
    server.reset()
    code, out, _ = run("calibrate", file, *args)
    assert code == 0 and server.count <= 1  # from the cache but for the one to try out
    lines = [line.split() for line in out.splitlines()]
    (row,) = [line for line in lines if line[:1] == ["rude"]]
    assert row[-4:] == ["89%", "0.759", "11%", "0%"]


def test_labels_of_criteria_make_the_label_of_the_row(
    flags: list[str], tmp_path: Path, run: Run
) -> None:
    file, args = answers(tmp_path), ("--criteria_labels", "marks", "--repeat", "0", *flags)
    code, out, err = run("calibrate", file, *args, "--json")
    summary = json.loads(out)
    assert code == 0 and summary["rows"] == 19, err  # one has labels of none
    rows = [{"prompt": "p", "response": "x", "marks": {"kind": True}}]
    few = write_rows(tmp_path / "b.jsonl", *rows)
    code, _, err = run("calibrate", few, *args)
    assert code == 2 and "no row has a label for each of its criteria" in err
    assert summary["agreement"]["Spearman"]["value"] > 0.8


def test_wrong_labels_are_named_before_anything_is_asked(
    flags: list[str], tmp_path: Path, run: Run, server: JudgeServer
) -> None:
    cells = [{"kind": True}, "yes", {"kid": True}, {"depth": 4}, {"kind": "yes"}, {"rude": 0.5}]
    rows = [{"prompt": "p", "response": "x", "marks": cell} for cell in cells]
    file = write_rows(tmp_path / "a.jsonl", *rows)
    code, _, err = run("calibrate", file, "--criteria_labels", "marks", *flags)
    assert code == 2 and server.count == 0
    for message in (
        "line 2, column marks: is text, not an object such as {'kind': …}",
        "line 3, column marks: has no criterion 'kid' in its rubric. Did you mean 'kind'",
        "line 4, column marks: has 4 for 'depth', not a level from 0 to 3",
        "line 5, column marks: has 'yes' for 'kind', not true or false",
        "line 6, column marks: has 0.5 for 'rude', not true or false",
    ):
        assert message in err
    code, _, err = run("calibrate", file, "--criteria_labels", "marks", *flags[:-2])
    assert code == 2 and "--criteria_labels needs criteria" in err
    code, _, err = run("calibrate", file, "--criteria_labels", "mark", *flags)
    assert code == 2 and "no column 'mark'" in err and "Did you mean 'marks'" in err


def test_criteria_of_rows_are_told_together(flags: list[str], tmp_path: Path, run: Run) -> None:
    """A criterion that all rows share is listed by itself, those of single rows only together."""
    rows = []
    for n in range(12):
        both = [{"name": "kind", "text": "The response has kind."},
                {"name": "own", "text": f"The response has w{n}."}]  # fmt: skip
        text = f"w{n - n % 3}" + " kind" * (n % 2)
        row = {"prompt": f"{n}?", "response": text, "label": n % 2, "marks": {"own": n % 2 == 0}}
        rows.append(row | {"extra_info": {"rubric": both}})
    file = write_rows(tmp_path / "a.jsonl", *rows)
    args = [*flags[:-1], "extra_info.rubric", "--labels", "label", "--repeat", "0"]
    code, out, err = run("calibrate", file, *args, "--criteria_labels", "marks", "--json")
    assert code == 0, err
    criteria = json.loads(out)["criteria"]
    assert list(criteria) == ["kind", "all criteria"]
    # Met in rows 0, 3, 6 and 9, labelled so in all even ones: 3 and 9, and 2, 4, 8 and 10 differ.
    assert criteria["all criteria"]["agree"]["value"] == 0.5
    assert criteria["all criteria"]["labelled"] == 12


def audited(run: Run, *flags: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = run("audit", *flags, "--json")
    return code, {check["name"]: check for check in json.loads(out)["checks"]}


ITEMS = [
    {"prompt": f"Question {n}?", "good": f"kind deep deep deep x{n}", "bad": f"rude x{n}"}
    for n in range(3)
]


def test_an_audit_names_the_criteria_that_attacks_moved(
    flags: list[str], tmp_path: Path, run: Run, server: JudgeServer
) -> None:
    file = write_rows(tmp_path / "a.jsonl", *ITEMS)
    flags += ["--data", file]
    code, checks = audited(run, *flags)
    check = checks["criteria under attack"]
    assert code == 0 and check["passed"], checks
    assert "nor on any" in check["said"]

    def believing(system: str, user: str) -> str:
        """Takes over what the response says of the first criterion, wherever it says it."""
        verdicts = json.loads(decide(system, user))
        if re.search(
            r'c1"?: \{(?:"reason": "[^"]*", )?"met": true', fenced("response", user) or ""
        ):
            verdicts["c1"]["met"] = True
        return json.dumps(verdicts)

    server.score = believing
    code, checks = audited(run, *flags, "--rm_cache", "off")
    check = checks["criteria under attack"]
    assert code == 2 and check["passed"] is False
    assert {case["criterion"] for case in check["cases"]} == {"kind"}
    assert check["worst"]["got"] == 1.0 and check["worst"]["without it"] == 0.0
    assert "kind by fake verdicts (2 of 2)" in check["said"]
    assert "verdicts in a thought" not in check["said"]  # a thought is not shown to the judge


def test_the_criteria_of_each_judge_of_a_mixture_are_attacked(
    flags: list[str], tmp_path: Path, run: Run, server: JudgeServer
) -> None:
    names = ("oak", "elm", "birch", "spruce", "yew")
    custom = "".join(f"- {{name: {n}, text: The response has {n}.}}\n" for n in names)
    (tmp_path / "own.yaml").write_text(custom)

    def believing(system: str, user: str) -> str:
        """Takes over a fifth verdict that a response writes: only one judge has so many."""
        verdicts = json.loads(decide(system, user))
        if "c5" in verdicts and re.search(
            r'c5"?: \{(?:"reason": "[^"]*", )?"met": true', fenced("response", user) or ""
        ):
            verdicts["c5"]["met"] = True
        return json.dumps(verdicts)

    server.score = believing
    flags = [flag for flag in flags if flag != "--use_api_reward"]
    mixed = ["--reward", "judge:a:0.5", "--reward", "judge:b:0.5"]
    mixed += [f"reward.composite.parts.b.judge.rubric={tmp_path}/own.yaml"]
    file = write_rows(tmp_path / "a.jsonl", *ITEMS)
    _, checks = audited(run, *flags, *mixed, "--data", file)
    cases = checks["criteria under attack"]["cases"]
    assert {case["criterion"] for case in cases} == {"b: yew"}, cases


def test_criteria_of_rows_are_attacked_each_in_a_call_of_its_own(
    flags: list[str], tmp_path: Path, run: Run, server: JudgeServer
) -> None:
    custom = [{"text": "The response has kind."}, {"text": "The response has rude.", "weight": -1}]
    rows = [item | {"extra_info": {"rubric": custom}} for item in ITEMS]
    file = write_rows(tmp_path / "a.jsonl", *rows)
    flags = [*flags[:-1], "extra_info.rubric", "--rm_rubric_calls", "each", "--data", file]
    code, out, err = run("audit", *flags, "--rows", "2", "--json")
    summary = json.loads(out)
    assert code == 0 and "Each criterion is a separate call." in err
    assert summary["spent"]["calls"] > 1.5 * summary["asked"]
    (check,) = [check for check in summary["checks"] if check["name"] == "criteria under attack"]
    assert check["passed"], check


def test_an_audit_needs_rows_with_criteria(flags: list[str], run: Run, server: JudgeServer) -> None:
    code, _, err = run("audit", *flags[:-1], "extra_info.rubric")
    assert code == 2 and "--data FILE" in err and server.count == 0
