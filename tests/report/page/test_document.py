"""The page as a text: what it says of a run, what it holds of a long one, what it never runs."""

from __future__ import annotations

import fcntl
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.report.catalogue import MAIN_CARDS, METRICS, list_cards
from ppo_cli.report.limits import Limits
from ppo_cli.report.page.rollouts import Rollouts, choose_sample
from ppo_cli.report.page.run_data import RunData
from ppo_cli.report.page.server import render_report
from ppo_cli.report.tracker import Screen, Tracker
from ppo_cli.run_folder.folder import FORK_LINE, LOCK
from ppo_cli.run_folder.lines import (
    METRICS_FILE,
    Encoded,
    read_lines,
    read_metrics,
    replace_lines,
    rollout_file,
)
from tests.report.page.runs import HOSTILE, LIKE_A_KEY, RAN, add_tokens, make_run
from tests.settings import complete


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("page") / "run", hostile=True)


def data_of(text: str) -> dict[str, Any]:
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert block
    data: dict[str, Any] = json.loads(block[1])
    return data


def test_one_sentence_says_how_it_went(run: Path) -> None:
    verdict = RunData(run, "run").read()["verdict"]
    assert "".join(text for text, _ in verdict) == (
        "The reward rose, validation not clearly: validation reward 0.50 to 0.50, reward 0.50 to "
        "0.86 in 40 steps. "
        "Check: kl 0.14 is above 0.1: the model moves far from where it started. Judge $0.70."
    )
    assert [key for _, key in verdict if key] == ["val/reward_mean", "reward_mean", "kl_divergence"]


def test_a_high_kl_that_pays_asks_for_no_change(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    file.write_text("# Written by ppo-cli 9\nreward: {rule: exact}\n")  # no judge any more
    run_data = RunData(tmp_path / "run", "run").read()
    assert not any(text.startswith("kl") for text, _ in run_data["verdict"])
    assert [span["kind"] for span in run_data["findings"]] == ["failed"]
    (kl,) = (card for card in run_data["cards"] if card["title"] == "KL to the reference")
    assert kl["findings"] == []


def test_hostile_texts_and_secrets_stay_out_of_the_markup(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "question 3")  # stands in a prompt, as a key might
    text = render_report([RunData(run, "run")])
    outside = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.DOTALL)
    assert RAN not in outside
    assert "evil.test" not in outside
    assert text.count("<script") == text.count("</script>") == 5
    rows = {row["uid"]: row for row in data_of(text)["rows"][0] if row["step"] == 40}
    for number, hostile in enumerate(HOSTILE):
        shown = rows[f"train:{number}"]["response"]
        assert hostile.startswith(shown) if len(hostile) > 20_000 else shown == hostile
    assert rows[f"train:{len(HOSTILE) - 1}"]["cut"] == {"response": 5_000_000}
    assert rows["train:3"]["prompt"] == "***"
    assert "sk-secret" not in text
    assert len(text) < 4_000_000


def test_settings_come_with_their_origins(run: Path) -> None:
    data = RunData(run, "run").read()
    settings = {key: (value, origin) for key, value, origin in data["settings"]}
    assert settings["reward.api.enable"] == ("true", "--use_api_reward")
    assert settings["algorithm.gamma"] == ("1.0", "default")
    assert data["machine"] == "ppo-cli 9"
    assert [row for row in data["spent"]["rows"] if row[0] == "judge tokens"] == [
        ["judge tokens", "20 in, 4 out"]
    ]


def test_findings_are_those_that_the_run_showed(run: Path) -> None:
    findings = RunData(run, "run").read()["findings"]
    spans = {span["kind"]: (span["from"], span["to"], span["now"]) for span in findings}
    assert spans["failed"] == (2, 2, False)
    assert spans["kl_high"] == (17, 40, True)


def test_what_has_changed_is_read_again(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    data = RunData(folder, "run")
    first = data.read()
    assert data.read() is first
    tracker = Tracker(folder, Screen(), (), 5, complete({}))
    tracker.step(4, {"reward_mean": 0.9, "time/step_s": 1.0})
    assert read_metrics(folder)[-1]["perf/resumed"] == 1
    assert data.read()["steps"] == [1, 2, 3, 4]
    assert data.read()["marks"]["restarts"] == [4]


def test_the_newest_steps_are_read_first_and_the_rest_by_and_by(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    rollouts, all_rollouts = Rollouts(folder), Rollouts(folder)
    index, since, unread = rollouts.changes(0, 0.0)
    assert (list(index), unread) == ([("train", 4)], 3)
    (row,) = rollouts.rows_of_ids(["train:1:0"])  # an older one that is asked for is read
    assert row.step == 1
    assert list(rollouts.changes(since, 0.0)[0]) == [("train", step) for step in (3, 2, 1)]
    assert rollouts.rows() == all_rollouts.rows()
    file = folder / "rollouts" / "step_000004.jsonl"
    file.write_text(file.read_text().replace(f'"score": {4 / 12}', '"score": 0.0'))
    assert all_rollouts.rows(0.0)[-8].score == 0.0  # a step written again is read again


def test_thoughts_are_told_where_they_are(tmp_path: Path) -> None:
    """One that the template opened ends at its mark; one that is open goes on to the end."""
    folder = make_run(tmp_path / "run", steps=1)
    file = rollout_file(folder, 1, "train")
    lines = read_lines(file)
    lines[0] |= {"opened": "<think>\n", "response": "6*7</think>42"}
    lines[1] |= {"response": "<think>6*7"}
    replace_lines(file, lines)
    rollouts = Rollouts(folder)
    thoughts = [line["thoughts"] for line in rollouts.read(rollouts.rows(), None)]
    assert thoughts[:3] == [[(0, 11)], [(0, 10)], []]


def test_a_report_of_a_long_run_is_a_sample_that_says_so(run: Path) -> None:
    rollouts = Rollouts(run)
    rows = rollouts.rows()
    assert choose_sample(rollouts, 10_000_000) == rows
    chosen = choose_sample(rollouts, 80_000)
    assert 0 < len(chosen) < len(rows)
    ids = {row.id for row in chosen}
    ranked = sorted((row for row in rows if row.score is not None), key=lambda r: r.score or 0)
    ranked = [row for row in ranked if row.size < 5000]  # a text of 5 MB would take all the room
    telling = [ranked[0], ranked[-1], *[row for row in rows if row.score is None]]
    assert {row.id for row in telling} <= ids
    assert {row.step for row in chosen} >= {1, 40}
    assert any(len({r.step for r in chosen if r.uid == f"train:{n}"}) == 40 for n in range(8))
    data = data_of(render_report([RunData(run, "run")], most_bytes=80_000))
    assert data["notes"][0].startswith(f"{len(data['rows'][0])} of {len(rows)} responses")


def test_the_responses_follow_three_rows_of_cards() -> None:
    plots = {metric.plot: metric.key.replace("*", "a") for metric in METRICS}
    series = {key: [1.0, 2.0, 3.0] for key in plots.values()}
    finding = {"key": plots["Clip fraction"], "now": True, "text": ""}
    cards = list_cards(series, Limits(), [finding])
    main = [card["title"] for card in cards if card["place"] == "main"]
    assert len(main) == MAIN_CARDS and main[:2] == ["Clip fraction", "Reward"]


def test_cards_follow_the_catalogue() -> None:
    keys = ["new/key", "judge_a/calls", "judge_b/calls", "reward/x", "reward/y", "reward/x/std"]
    series = {key: [1.0, 2.0, 3.0] for key in [*keys, "reward_mean"]}
    series |= {"actor/lr": [0.1] * 3, "critic/lr": [0.2] * 3, "val/accuracy": [0.5, 0.5]}
    cards = {card["title"]: card for card in list_cards(series, Limits(), [])}
    assert next(iter(cards)) == METRICS[0].plot
    assert cards["Judge calls"]["lines"] == [
        ("judge_a/calls", "calls, a"), ("judge_b/calls", "calls, b")
    ]  # fmt: skip
    assert [key for key, _ in cards["Parts of the reward, raw"]["lines"]] == [
        "reward/x", "reward/y"
    ]  # fmt: skip
    places = {
        place: [t for t, c in cards.items() if c["place"] == place] for place in ("more", "other")
    }
    assert places == {
        "more": ["Learning rate", "Judge calls"],
        "other": ["new/key", "reward/x/std"],
    }
    assert [title for title, card in cards.items() if card["constant"]] == ["Learning rate"]
    assert cards["Validation accuracy"]["axis"] == (0.0, 1.0)


def test_a_card_says_what_the_findings_say_and_comes_first(run: Path) -> None:
    data = RunData(run, "run").read()
    first = data["cards"][0]
    assert (first["lines"][0][0], first["band"]) == ("kl_divergence", (0.001, 0.1))
    (finding,) = first["findings"]
    assert finding in data["findings"] and finding["text"].startswith("kl 0.14 is above 0.1")
    assert not any(card["findings"] for card in data["cards"][1:])


def write_validation(run: Path, step: int, right: int) -> None:
    """A validation of 20 prompts, the first `right` of which are answered right."""
    lines = read_lines(run / "metrics.jsonl")
    values = {"val/reward_mean": right / 20, "val/accuracy": right / 20}
    lines[step - 1] |= values
    replace_lines(run / "metrics.jsonl", lines)
    rows = [{"step": step, "uid": f"val:{n}", "score": float(n < right)} for n in range(20)]
    replace_lines(rollout_file(run, step, "val"), rows)


def test_the_step_to_keep_and_the_gain_come_from_the_validations(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=6)
    without = [
        {k: v for k, v in line.items() if k[:3] != "val"} for line in read_lines(run / METRICS_FILE)
    ]
    replace_lines(run / METRICS_FILE, without)
    answers = {question: text for question, text, _ in RunData(run, "run").read()["answers"]}
    assert answers == {
        "step to keep": "not known without validation: --test_freq 10 validates every 10 steps",
        "is the gain real?": "not known without a second validation",
    }
    for step, right in ((1, 4), (3, 16), (6, 15)):
        write_validation(run, step, right)
    (run / "checkpoints" / "step_000004" / "state").mkdir(parents=True)
    keep, gain = (text for _, text, _ in RunData(run, "run").read()["answers"])
    assert re.fullmatch(
        r"step 3: validation accuracy 0.8 \(95 % interval 0.5\d* to 0.9\d*\), the best of 3; not "
        "saved, the nearest checkpoint is step_000004", keep
    )  # fmt: skip
    assert re.fullmatch(
        r"yes: validation accuracy \+0.6 from step 1 to 3 \(95 % interval \+0.3\d? to \+0.8\d?, "
        r"on the same 20 prompts\)", gain
    )  # fmt: skip
    for step, right in ((3, 5), (6, 3)):
        write_validation(run, step, right)
    (run / "checkpoints" / "step_000004").rename(run / "checkpoints" / "step_000003")
    keep, gain = (text for _, text, _ in RunData(run, "run").read()["answers"])
    assert keep.endswith("the best of 3; saved as checkpoint step_000003")
    assert gain.startswith("it may be chance: validation accuracy +0.05 from step 1 to 3")


def test_the_first_lines_state_what_the_run_is(run: Path, tmp_path: Path) -> None:
    facts = dict(RunData(run, "run").read()["facts"])
    assert (facts["step"], facts["state"], facts["judge cost"]) == ("40 of 40", "done", "$0.70")
    assert facts["reward"].startswith("judge ")
    # A fork goes on from a step of another run.
    fork = make_run(tmp_path / "fork", steps=2)
    line = FORK_LINE.format(tmp_path / "other", 6)
    (fork / "config.yaml").write_text(f"{line}reward: {{rule: math}}\n")
    facts = dict(RunData(fork, "fork").read()["facts"])
    assert facts["forked from"] == f"{tmp_path / 'other'} at step 6"
    assert facts["reward"] == "rule math"
    assert facts["state"] == "failed, no checkpoint"
    saved = fork / "checkpoints" / "step_000002"
    saved.mkdir(parents=True)
    assert dict(RunData(fork, "fork").read()["facts"])["state"] == "stopped"
    (fork / LOCK).touch()  # a killed process leaves it
    killed = dict(RunData(fork, "fork").read()["facts"])
    assert killed["state"] == "failed, newest checkpoint: step 2"
    with (fork / LOCK).open("w") as claim:
        fcntl.flock(claim, fcntl.LOCK_EX)
        assert dict(RunData(fork, "fork").read()["facts"])["state"] == "running"


def test_numbers_of_tokens_are_never_taken_for_a_secret(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    add_tokens(run, 2)
    lines = read_lines(rollout_file(run, 2))
    lines[1]["token_details"]["value"] = Encoded(LIKE_A_KEY)
    replace_lines(rollout_file(run, 2), [*lines, {"response": LIKE_A_KEY}])
    assert read_lines(rollout_file(run, 2))[-1]["response"] == "***"
    rows = {row["id"]: row for row in data_of(render_report([RunData(run, "run")]))["rows"][0]}
    assert rows["train:2:1"]["token_details"]["value"] == LIKE_A_KEY
    assert rows["train:2:1"]["detailed"] == 1 and rows["train:2:0"]["detailed"] == 0
    rollouts = Rollouts(run)
    assert not any("token_details" in x for x in rollouts.read(rollouts.rows(), 9, tokens=False))
