"""A judge fitted to labels: what is read, learnt, measured on held-out prompts, and scored."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import tensor

from ppo_cli.errors import DataError, ModelError
from ppo_cli.extras.lab.commands.fit import format_fit
from ppo_cli.extras.lab.fitting.fit import fit
from ppo_cli.extras.lab.fitting.preferences import EncodedExample, Labels, load_pairs
from ppo_cli.extras.lab.fitting.training import GradeObjective, rank_agreement
from ppo_cli.report.tracker import Screen
from ppo_cli.rewards.judge.rubric import Criterion, Rubric
from ppo_cli.rewards.models.base import Encoded
from ppo_cli.rewards.models.formats import format_for
from ppo_cli.rewards.models.heads import load_reward_model
from tests.extras.lab.fitting.test_fit import short_fit
from tests.scoring.scripted import write_rows
from tests.settings import complete_reward_model

Write = Callable[..., str]
RUBRIC = Rubric(
    (
        Criterion("right", "It is right.", 2.0, must=True),
        Criterion("seven", "It says 7.", 1.0, fault=True),
        Criterion("size", "How large it is.", levels=3),
    ),
    fixed=True,
)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return lambda *rows: write_rows(tmp_path / "rows.jsonl", *rows)


@pytest.fixture
def rubric_file(tmp_path: Path) -> str:
    (tmp_path / "r.yaml").write_text(json.dumps(RUBRIC.as_rows()))
    return str(tmp_path / "r.yaml")


def row(label: Any, prompt: str = "2 + 2?", response: str = "4") -> dict[str, Any]:
    return {"prompt": prompt, "response": response, "label": label}


def test_a_label_is_a_grade_and_a_row_without_one_is_left_out(write: Write) -> None:
    file = write(row(True), row(0.25, response="5"), row(None), row(0))
    loaded = load_pairs([file], labels=Labels.of("label", None))
    assert [labelled.targets for labelled in loaded.pairs] == [(1.0,), (0.25,), (0.0,)]
    assert loaded.dropped == {"unlabelled": 1}
    assert any("1 row left out: without a label" in note for note in loaded.notes)


def test_labels_of_criteria_may_lack_some(write: Write, rubric_file: str) -> None:
    rows = [row({"right": True, "seven": False, "size": 2}), row({"size": 0, "seven": None})]
    loaded = load_pairs([write(*rows)], labels=Labels.of("label", rubric_file))
    first, second = (labelled.targets for labelled in loaded.pairs)
    assert first == (1.0, 0.0, 2 / 3)
    assert second[2] == 0.0 and all(map(math.isnan, second[:2]))


@pytest.mark.parametrize(
    ("label", "criteria", "message"),
    [
        (7, None, "has 7 for 'label', not true, false or a number from 0 to 1"),
        ("yes", None, "has 'yes' for 'label', not true, false or a number"),
        (math.nan, None, "has nan for 'label', not true, false"),
        (True, RUBRIC, "not an object such as"),
        ({"rigth": True}, RUBRIC, "has no criterion 'rigth' in its rubric. Did you mean 'right'?"),
        ({"size": 4}, RUBRIC, "has 4 for 'size', not a level from 0 to 3"),
    ],
)
def test_a_wrong_label_is_named_with_its_row(
    label: Any, criteria: Rubric | None, message: str, write: Write, rubric_file: str
) -> None:
    file = rubric_file if criteria else None
    labels = Labels.of("label", file)
    with pytest.raises(DataError) as caught:
        load_pairs([write(row({"size": 1} if file else True), row(label))], labels=labels)
    assert "rows.jsonl line 2, column label: " in str(caught.value)
    assert message in str(caught.value) and '"response": text, "label":' in str(caught.value)
    with pytest.raises(DataError, match=r"no column 'good'.*\"good\": "):
        load_pairs([write(row(True))], labels=Labels.of("good", file))


def test_the_loss_is_the_cross_entropy_of_the_labels_that_are_there() -> None:
    rows = [
        EncodedExample((Encoded((1,)),), (1.0, math.nan, 0.25), "a"),
        EncodedExample((Encoded((1,)),), (0.0, 1.0, math.nan), "b"),
    ]
    scores = tensor([[[0.0, 5.0, math.log(3.0)], [math.log(3.0), 0.0, -9.0]]])
    losses = GradeObjective(RUBRIC).losses(scores, rows, 0.0)
    # sigmoid(log 3) = 3/4
    first = (math.log(2) - (0.25 * math.log(0.75) + 0.75 * math.log(0.25))) / 2
    assert losses.tolist() == pytest.approx([first, (math.log(4) + math.log(2)) / 2])


def test_agreement_counts_pairs_and_its_interval_is_over_prompts() -> None:
    created = np.random.default_rng(0)
    labels = created.integers(0, 3, 60) / 2
    scores = np.round(labels + created.normal(0, 0.7, 60), 1)
    prompts = [f"p{i // 4}" for i in range(60)]
    pairs = [(i, j) for i in range(60) for j in range(60) if labels[i] > labels[j]]
    right = sum((scores[i] > scores[j]) + 0.5 * (scores[i] == scores[j]) for i, j in pairs)
    figure = rank_agreement(scores, labels, prompts)
    assert figure.value == pytest.approx(right / len(pairs))
    assert figure.low is not None and figure.high is not None
    assert 0.5 < figure.low < figure.value < figure.high < 1.0
    # Four copies of each row are no more evidence than one.
    single = rank_agreement(labels[::4], scores[::4], prompts[::4])
    copies = rank_agreement(np.repeat(labels[::4], 4), np.repeat(scores[::4], 4), prompts)
    assert (copies.low, copies.high) == pytest.approx((single.low, single.high))
    assert rank_agreement(scores, np.ones(60), prompts).value is None


def labelled_sums(count: int) -> list[dict[str, Any]]:
    """Two responses to each prompt, the right sum and 7."""
    dice = random.Random(4)
    rows = []
    for a in dice.sample(range(10, 90), count):
        prompt, size = f"What is {a} + 20?", min(3, (a + 20) // 30)
        marks = {"right": True, "seven": False, "size": size}
        rows.append({"prompt": prompt, "response": str(a + 20), "marks": marks, "value": 0.9})
        marks = {"right": False, "seven": True, "size": 0}
        rows.append({"prompt": prompt, "response": "7", "marks": marks, "value": 0.2})
    return rows


@pytest.mark.slow
def test_criteria_are_learnt_measured_and_scored_as_the_rubric_says(
    write: Write, tmp_path: Path, rubric_file: str
) -> None:
    settings = short_fit(Path(write(*labelled_sums(40))), labels="marks", criteria=rubric_file)
    record = fit(settings, Screen())
    assert record == json.loads((tmp_path / "rm/fit.json").read_text())
    assert record["rows"]["train"] + record["rows"]["held_out"] == 80
    assert record["rows"]["held_out"] == 16, "both responses to a prompt"
    assert set(record["agreement"]) == {"score", "right", "seven", "size"}
    for name in ("score", "right", "seven"):
        figure = record["agreement"][name]
        assert figure["value"] > 0.9 and 0.5 < figure["low"] <= figure["value"] <= figure["high"]
    assert record["steps"]["kept"] == record["steps"]["done"], "the last: nothing was chosen"
    assert record["seconds"]["score"] > 0 and record["seconds"]["policy"] > 0

    reward = complete_reward_model(path=str(tmp_path / "rm"), device="cpu")
    loaded = load_reward_model(reward)
    form = format_for(loaded.tokenizer, reward, loaded.max_length)
    weights = load_reward_model(reward.model_copy(update={"outputs": (1.0, 0.0, 0.0)}))
    for response in ("40", "7"):
        sample = form.encode([{"role": "user", "content": "What is 20 + 20?"}], response)
        ids = torch.tensor([sample.ids])
        scores = loaded.network.score(ids, torch.ones_like(ids))
        outputs = weights.network.score(ids, torch.ones_like(ids)).objectives
        grades = [1 / (1 + math.exp(-outputs[one.name].item())) for one in RUBRIC.criteria]
        assert scores.score_B.item() == pytest.approx(RUBRIC.value(grades), abs=1e-5)
        pairs = zip(RUBRIC.criteria, grades, strict=True)
        credits = {f"rubric/{c.name}": c.credit(grade) for c, grade in pairs}
        result = {name: credit.item() for name, credit in scores.objectives.items()}
        assert result == pytest.approx(credits, abs=1e-5)
    assert scores.score_B.item() == 0.0, "7 misses the hurdle"
    (tmp_path / "rm/criteria.json").write_text('{"criteria": ["only one"]}')
    with pytest.raises(ModelError, match=r"has 3 outputs, but criteria\.json has other criteria"):
        load_reward_model(reward)


@pytest.mark.slow
def test_one_label_becomes_a_score_from_0_to_1(write: Write, tmp_path: Path) -> None:
    file = write(*labelled_sums(40))
    record = fit(short_fit(Path(file), labels="value"), Screen())
    assert set(record["agreement"]) == {"score"} and record["agreement"]["score"]["low"] > 0.5
    assert record["scores"]["mean"] == pytest.approx(0.55, abs=0.1)
    assert "In a mixture, set for its part: scaling: none, clip: 1" in format_fit(record)
    loaded = load_reward_model(complete_reward_model(path=str(tmp_path / "rm"), device="cpu"))
    ids = torch.tensor([[5, 6, 7]])
    scores = loaded.network.score(ids, torch.ones_like(ids))
    assert 0.0 < scores.score_B.item() < 1.0 and not scores.objectives


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([True] * 8, "rows.jsonl: 8 rows with only the label 1 in column 'label'"),
        ([0] + [1] * 7, "2 held-out rows with only the label .* nothing to measure.*--val_share"),
        ([None] * 8, "--data .*rows.jsonl has no usable rows. 8 rows left out: without a label."),
    ],
)
def test_labels_that_teach_or_measure_nothing_are_refused(
    labels: list[Any], message: str, write: Write
) -> None:
    rows = [row(label, prompt=f"{n}?") for n, label in enumerate(labels)]
    with pytest.raises(DataError, match=message):
        fit(short_fit(Path(write(*rows)), labels="label"), Screen())
