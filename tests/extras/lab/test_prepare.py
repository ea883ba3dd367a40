"""Preparing known sets: from their own files, in every layout, to verl's rows and to pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from ppo_cli.data_sets.files import SETS
from ppo_cli.data_sets.row_sets import load_rows
from ppo_cli.errors import DataError
from ppo_cli.extras.lab.prepare import (
    GSM8K_INSTRUCTION,
    HUMANEVAL_INSTRUCTION,
    MATH_INSTRUCTION,
    RECIPES,
    boxed_answer,
    final_answer,
    prepare,
)
from ppo_cli.rewards.rule_reward import load_rule_function
from ppo_cli.rewards.rules import RULES, compare_algebra, find_rule, score_math
from tests.data_sets.lines import write_rows

REAL = Path(__file__).resolve().parents[3].parent / "shared" / "data"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "source"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "out"


def counts(name: str, source: Path, out: Path) -> list[tuple[str, int, str]]:
    """Prepare a set; the split, the rows and the note of each file."""
    files = prepare(name, source=str(source), out=str(out))
    assert [file.path for file in files] == [out / f"{file.split}.parquet" for file in files]
    return [(file.split, file.rows, file.note) for file in files]


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


def refusal(name: str, source: Path, out: Path) -> str:
    """Why a set cannot be prepared; nothing is written then."""
    with pytest.raises(DataError) as caught:
        prepare(name, source=str(source), out=str(out))
    assert not out.exists()
    return str(caught.value)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_names_of_the_recipes_are_those_that_messages_list() -> None:
    assert sorted(RECIPES) == list(SETS)


def test_places_without_a_split_are_told(source: Path, out: Path) -> None:
    source.mkdir()
    for name, message in {
        "humaneval": "holds no HumanEval file",
        "hh_rlhf": "holds no file of a split; expected train",
        "math": "holds no file of a split; expected train",
    }.items():  # fmt: skip
        assert message in refusal(name, source, out)
    for name in ("gsm8k", "hh_rlhf", "math"):
        assert "did not load" in refusal(name, Path("no-such-owner/no-such-set"), out)


@pytest.mark.skipif(not REAL.is_dir(), reason="the real sets are not at hand")
@pytest.mark.parametrize(
    ("name", "splits"),
    [("gsm8k", {"train": 7473, "test": 1319}), ("humaneval", {"test": 164}),
     ("hh_rlhf", {"test": 2310, "pairs_test": 2312})],
)  # fmt: skip
def test_the_real_set(name: str, splits: dict[str, int], tmp_path: Path) -> None:
    expected = [(split, rows, "") for split, rows in splits.items()]
    assert counts(name, REAL / name, tmp_path) == expected
    row_set = load_rows(str(tmp_path / "test.parquet"))
    assert (len(row_set.rows), row_set.problems) == (splits["test"], ())
    if name == "gsm8k":
        assert all(row.ground_truth.lstrip("-").replace(".", "").isdigit() for row in row_set.rows)
    if name == "hh_rlhf":
        assert len(rows_of(tmp_path / "pairs_test.parquet")) == 2312


@pytest.fixture
def gsm8k(source: Path) -> Path:
    for split in ("train", "test"):
        rows = [
            {"question": f"{split} {i}?", "answer": f"So it is {i}.\n#### {i},000"} for i in (1, 2)
        ]
        write_rows(source / f"{split}.jsonl", *rows)
    return source


def test_sums_become_verl_rows(gsm8k: Path, out: Path) -> None:
    assert counts("gsm8k", gsm8k, out) == [("train", 2, ""), ("test", 2, "")]
    assert names(out) == ["test.parquet", "train.parquet"]
    answer = "So it is 2.\n#### 2,000"
    assert rows_of(out / "test.parquet")[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"test 2?\n\n{GSM8K_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2000"},
        "extra_info": {"split": "test", "index": 1, "question": "test 2?", "answer": answer},
    }
    row_set = load_rows(str(out / "train.parquet"))
    assert [row.ground_truth for row in row_set.rows] == ["1000", "2000"]
    assert (row_set.problems, row_set.notes, row_set.columns.unused) == ((), (), ())


def test_shards_are_joined_in_order(gsm8k: Path, out: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone" / "main"
    for shard, line in enumerate((gsm8k / "train.jsonl").read_text().splitlines()):
        write_rows(clone / f"train-0000{shard}-of-00002.jsonl", json.loads(line))
    (clone / "test.jsonl").write_bytes((gsm8k / "test.jsonl").read_bytes())
    counts("gsm8k", gsm8k, out)
    counts("gsm8k", clone.parent, tmp_path / "second")
    assert rows_of(out / "train.parquet") == rows_of(tmp_path / "second" / "train.parquet")


def test_files_that_are_there_stay_without_force(gsm8k: Path, tmp_path: Path) -> None:
    (tmp_path / "test.parquet").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"already holds test\.parquet\. Add --force"):
        prepare("gsm8k", source=str(gsm8k), out=str(tmp_path))
    assert not (tmp_path / "train.parquet").exists()
    prepare("gsm8k", source=str(gsm8k), out=str(tmp_path), force=True)
    assert len(load_rows(str(tmp_path / "test.parquet")).rows) == 2


def test_no_file_remains_when_writing_fails(
    gsm8k: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = parquet.write_table

    def full_disk(table: object, path: Path) -> None:
        write(table, path)
        if "test" in path.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet, "write_table", full_disk)
    with pytest.raises(DataError, match="No space left on device"):
        prepare("gsm8k", source=str(gsm8k), out=str(out))
    assert names(out) == []


def test_bad_rows_are_told_together(gsm8k: Path, out: Path) -> None:
    with (gsm8k / "train.jsonl").open("a") as file:
        file.write('{"question": "q", "answer": "no mark"}\n{"answer": "#### 1"}\nno\n')
        file.write('{"question": "q \\ud800", "answer": "#### 1"}\n')
    message = refusal("gsm8k", gsm8k, out)
    for fragment in (
        "4 bad rows", "line 3, column answer: has no final '#### NUMBER'",
        "line 4, column question: is missing", "train.jsonl line 5: not JSON",
        "line 6, column question: holds \\ud800, half of a surrogate pair",
    ):  # fmt: skip
        assert fragment in message


def test_wrong_places_are_told(gsm8k: Path, out: Path) -> None:
    train = gsm8k / "train.jsonl"
    assert "cannot be written (Not a directory)" in refusal("gsm8k", gsm8k, train / "out")
    assert "takes the folder of both splits" in refusal("gsm8k", train, out)
    (gsm8k / "test.jsonl").unlink()
    assert "holds no 'test' split" in refusal("gsm8k", gsm8k, out)


@pytest.mark.parametrize(
    ("answer", "final"),
    [("so\n#### 18", "18"), ("#### 1,234 ", "1234"), ("#### -3.5", "-3.5"),
     ("a #### 1\n#### 2", "2"), ("none", ""), ("####", "")],
)  # fmt: skip
def test_final_answer(answer: str, final: str) -> None:
    assert final_answer(answer) == final


TASK = {
    "task_id": "HumanEval/0",
    "prompt": 'def twice(n):\n    """Return twice n."""\n',
    "entry_point": "twice",
    "canonical_solution": "    return 2 * n\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
}


@pytest.mark.parametrize("place", [".", "HumanEval.jsonl.gz"])
def test_functions_become_rows_that_the_rule_code_can_test(
    place: str, source: Path, out: Path
) -> None:
    write_rows(source / "HumanEval.jsonl.gz", TASK, {**TASK, "task_id": "HumanEval/1"})
    assert counts("humaneval", source / place, out) == [("test", 2, "")]
    first, second = load_rows(str(out / "test.parquet")).rows
    tests = {key: TASK[key] for key in ("test", "entry_point", "prompt")}
    assert json.loads(first.ground_truth) == tests
    assert first.data_source == "openai_humaneval"
    assert second.extra_info == {"split": "test", "index": 1, "task_id": "HumanEval/1"}
    assert isinstance(first.prompt, tuple)
    question = str(first.prompt[0]["content"])
    assert question.startswith(HUMANEVAL_INSTRUCTION)
    assert question.endswith('```python\ndef twice(n):\n    """Return twice n."""\n```')
    assert "return 2" not in question


def test_functions_without_tests_are_told(source: Path, out: Path) -> None:
    bad = ({**TASK, "test": "assert True"}, {**TASK, "entry_point": ""}, {**TASK, "prompt": None})
    write_rows(source / "HumanEval.jsonl.gz", TASK, *bad)
    message = refusal("humaneval", source, out)
    assert "3 bad rows" in message
    assert "line 2, column test: has no function check(candidate)" in message
    assert "line 3, column entry_point: is missing" in message


OPENING = "\n\nHuman: How do I boil an egg?"
TALK = f"{OPENING}\n\nAssistant: Eight minutes.\n\nHuman: Thanks!\n\nAssistant: "
PAIR = {"chosen": f"{TALK}Enjoy.", "rejected": f"{TALK}No."}
SHORT = {"chosen": f"{OPENING}\n\nAssistant: In water.", "rejected": f"{OPENING}\n\nAssistant: "}
ENDS_EARLY = {"chosen": OPENING, "rejected": OPENING}
PARTS_EARLY = {"chosen": SHORT["chosen"], "rejected": "\n\nHuman: Hi\n\nAssistant: Hello"}


def test_dialogues_become_pairs_and_each_prompt_once(source: Path, out: Path) -> None:
    write_rows(source / "helpful-base" / "train.jsonl.gz", PAIR, SHORT)
    write_rows(source / "harmless-base" / "train.jsonl.gz", SHORT)
    write_rows(source / "harmless-base" / "test.jsonl.gz", PAIR)
    write_rows(source / "red-team-attempts" / "red_team_attempts.jsonl.gz", {"transcript": "x"})
    assert counts("hh_rlhf", source, out) == [
        ("train", 2, ""), ("pairs_train", 3, ""), ("test", 1, ""), ("pairs_test", 1, ""),
    ]  # fmt: skip
    question = {"role": "user", "content": "How do I boil an egg?"}
    talk = [
        question, {"role": "assistant", "content": "Eight minutes."},
        {"role": "user", "content": "Thanks!"},
    ]  # fmt: skip
    assert rows_of(out / "pairs_test.parquet") == [PAIR]
    assert rows_of(out / "test.parquet")[0]["prompt"] == talk
    assert rows_of(out / "train.parquet")[0]["prompt"] == [question]
    assert rows_of(out / "train.parquet")[1]["extra_info"] == {"split": "train", "index": 1}
    prompts = load_rows(str(out / "train.parquet"))
    assert (len(prompts.rows), prompts.problems, prompts.notes) == (2, (), ())
    assert {row.data_source for row in prompts.rows} == {"Anthropic/hh-rlhf"}


def test_a_single_file_is_one_split(tmp_path: Path) -> None:
    for name, split in (("harmless-base-test.jsonl", "test"), ("mine.jsonl", "train")):
        write_rows(tmp_path / name, PAIR)
        splits = [split for split, *_ in counts("hh_rlhf", tmp_path / name, tmp_path / split)]
        assert splits == [split, f"pairs_{split}"]


def test_a_few_odd_dialogues_are_left_out_and_many_are_told(tmp_path: Path, out: Path) -> None:
    source = tmp_path / "train.jsonl"
    write_rows(source, PAIR, PARTS_EARLY, {"chosen": "bare", "rejected": "text"})
    message = refusal("hh_rlhf", source, out)
    assert "line 2, column rejected: is another dialogue" in message
    assert "line 3, column chosen: is not a transcript" in message
    write_rows(source, *[PAIR] * 200, ENDS_EARLY, PARTS_EARLY)
    _, rows, note = counts("hh_rlhf", source, out)[-1]
    assert rows == 200 and note.startswith("2 rows left out, such as ")
    assert "line 201, column chosen: does not end with a reply" in note


PROBLEM = {
    "problem": "What is half of $3$?", "level": "Level 1", "type": "Algebra",
    "solution": r"We find $3/2=\boxed{\frac{3}{2}}$.",
}  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    ["{}.jsonl", "MATH/{}/algebra/12.json", "algebra/{}-00000-of-00001.jsonl.gz"],
)
def test_problems_of_every_layout_become_rows_that_the_rule_scores(
    layout: str, source: Path, out: Path
) -> None:
    for split in ("train", "test"):
        write_rows(source / layout.format(split), PROBLEM)
    assert counts("math", source, out) == [("train", 1, ""), ("test", 1, "")]
    (row,) = rows_of(out / "test.parquet")
    assert row == {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [{"role": "user", "content": f"What is half of $3$?\n\n{MATH_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": r"\frac{3}{2}"},
        "extra_info": {"split": "test", "index": 0, **PROBLEM},
    }
    (loaded,) = load_rows(str(out / "test.parquet")).rows
    for reply, right in ((r"so \boxed{1.5}", 1.0), (r"so \boxed{2}", 0.0)):
        truth = loaded.ground_truth
        score = score_math(reply, truth, {}) or compare_algebra(reply, truth, {})
        assert score is not None and score["score"] == right


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{5}", "5"), (r"first \boxed{1}, then \boxed{2}.", "2"), (r"$\boxed 7$.", "7"),
        (r"\boxed{\frac{1}{\sqrt{2}}} done", r"\frac{1}{\sqrt{2}}"), (r"\fbox{12}", "12"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed{ \text{A} }", r"\text{A}"),
        (r"\boxed{x \in \left\{1\right]}", r"x \in \left\{1\right]"), (r"\boxed{open", ""),
        ("none", ""),
    ],
)  # fmt: skip
def test_the_answer_in_the_last_box(solution: str, answer: str) -> None:
    assert boxed_answer(solution) == answer


def test_problems_without_an_answer_are_told_together(tmp_path: Path, out: Path) -> None:
    rows = [PROBLEM, PROBLEM | {"solution": "It is 2."}, {"solution": r"\boxed{1}"}]
    write_rows(tmp_path / "train.jsonl", *rows)
    message = refusal("math", tmp_path / "train.jsonl", out)
    assert "2 bad rows" in message
    assert r"line 2, column solution: has no final answer in \boxed{…}" in message
    assert "line 3, column problem: is missing or not text" in message


CHAT = [{"role": "user", "content": "1+1?"}]
CALLS = [{"function_name": "add", "function_declaration": "def add(a, b):"}]


@pytest.mark.parametrize(
    ("name", "row", "split"),
    [
        ("aime", {"problem": "1+1?", "answer": "2", "solution": "s", "year": 2024}, "test"),
        ("big_math", {"problem": "1+1?", "answer": "2", "llama8b_solve_rate": 0.5}, "train"),
        ("dapo", {"prompt": CHAT, "reward_model": {"ground_truth": "2"}}, "train"),
        ("deepmath", {"question": "1+1?", "final_answer": "2", "r1_solution_1": "s"}, "train"),
        (
            "kodcode",
            {"question": "1+1?", "test": "t", "test_info": CALLS, "solution": "s"},
            "train",
        ),
        ("math_500", {"problem": "1+1?", "solution": "s", "answer": "2", "level": 1}, "test"),
        ("polaris", {"problem": "1+1?", "answer": "2", "difficulty": "3/8"}, "train"),
        ("skywork", {"prompt": CHAT, "reward_model": {"ground_truth": '["2"]'}}, "train"),
        ("ultrafeedback", {"prompt": "1+1?", "chosen": CHAT, "score_chosen": 8.5}, "train"),
    ],
)
def test_a_set_with_one_split_is_a_row_of_the_table(
    name: str, row: dict[str, Any], split: str, tmp_path: Path, out: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file, row, row)
    assert counts(name, file, out) == [(split, 2, "")]
    (first, second) = load_rows(str(out / f"{split}.parquet")).rows
    truth = {"ultrafeedback": "", "kodcode": '{"test": "t"}'}.get(name, "2")
    assert first.ground_truth == second.ground_truth == truth
    assert "1+1?" in str(first.prompt) and first.extra_info["split"] == split
    if truth:
        assert find_rule(first.data_source) is RULES["code" if name == "kodcode" else "math"]
    write_rows(file, {"other": 1}, row | {"test_info": "text"}, row | {"test_info": [{}]})
    refused = refusal(name, file, tmp_path / "none")
    assert "is missing or" in refused
    assert ("function_declaration (also line 3)" in refused) is (name == "kodcode")


# A set of the package: entries with tuples, keys that are numbers, and no answer.
PACKAGE = """
DATASETS = {"sums": None, "maps": None, "ends": None}

def create_dataset(name, size, seed):
    for index in range(size):
        number = (seed + index) % 40
        answer = str(number) if name == "sums" else None
        metadata = {"pair": (number, {number: 1}), "end": float("inf") if name == "ends" else 1}
        yield {"question": f"{name} {number}?", "answer": answer, "metadata": metadata}

def get_score_answer_fn(name):
    def score(answer, entry):
        number, keys = entry["metadata"]["pair"]
        return float(answer == str(number) and keys == {number: 1}) / (2 if name == "maps" else 1)
    return score
"""


def test_generated_sets_are_scored_by_the_scorer_of_their_package(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "reasoning_gym"
    package.mkdir()
    (package / "__init__.py").write_text(PACKAGE)
    (package / "factory.py").write_text("from reasoning_gym import DATASETS\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "reasoning_gym:sums,maps"
    files = prepare(name, out=str(out), rows=60, seed=7)
    # Questions repeat after 40: of 33 for each set, the last three are for the test.
    assert [(file.split, file.rows) for file in files] == [("train", 60), ("test", 6)]
    rows = load_rows(str(out / "train.parquet")).rows
    assert {row.data_source for row in rows} == {"reasoning_gym:sums", "reasoning_gym:maps"}
    score = load_rule_function("reasoning_gym", {})
    for row, right in ((rows[0], 1.0), (rows[-1], 0.5)):
        number = str(row.prompt[0]["content"]).split()[1].rstrip("?")  # type: ignore[index]
        for reply in (number, f"It is <answer> {number} </answer>."):
            assert score(reply, row.ground_truth, row.extra_info)["score"] == right
        assert score("It is", row.ground_truth, row.extra_info)["score"] == 0
        prepare(name, out=str(out), rows=60, seed=7, force=True)
        assert load_rows(str(out / "train.parquet")).rows == rows
    with pytest.raises(DataError, match=r"no set 'sum'.*mean 'sums'"):
        prepare("reasoning_gym:sum", out=str(out))
    for name, problem in {",": "names no set", "sums,ends": "ends, row 0: .*inf"}.items():
        with pytest.raises(DataError, match=problem):
            prepare(f"reasoning_gym:{name}", out=str(out), force=True)
    (train,) = prepare("reasoning_gym:sums", out=str(out), rows=80, force=True)
    assert train.rows == 80 and train.note.startswith("8 rows left out")  # none is new
