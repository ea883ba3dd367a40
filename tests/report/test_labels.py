"""Labels of responses: kept when several write, and beside the response that they were given to."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.errors import UserError
from ppo_cli.report.drift import read_opinions
from ppo_cli.report.labels import read_labels_by_place, read_labels_with_scores, write_label
from ppo_cli.report.page.rollouts import Rollouts, set_label
from ppo_cli.report.tracker import Screen, Tracker
from ppo_cli.run_folder.lines import LABELS_FILE, read_lines, replace_lines, rollout_file
from ppo_cli.scoring.rows import read_responses
from tests.report.page.runs import add_episodes, make_run
from tests.settings import complete

LABEL_STEPS = """
import sys
from pathlib import Path
from ppo_cli.report.page.rollouts import Rollouts, set_label
rollouts = Rollouts(Path("run"))
names = [row.id for row in rollouts.rows()][int(sys.argv[1]):][:50]
print(flush=True)
sys.stdin.readline()
for name in names:
    set_label(rollouts, name, None, 1.0, f"of {sys.argv[1]}")
"""


def test_two_processes_that_label_at_once_lose_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=13)
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LABEL_STEPS, start], cwd=tmp_path, stdin=pipe, stdout=pipe
        )
        for start in ("0", "50")
    ]
    for process in processes:
        assert process.stdout and process.stdout.readline()
    for process in processes:
        assert process.stdin
        process.communicate(b"\n", timeout=300)
        assert process.returncode == 0
    lines = read_lines(tmp_path / "run" / LABELS_FILE)
    assert len(lines) == len({line["id"] for line in lines}) == 100
    assert {line["comment"] for line in lines} == {"of 0", "of 50"}
    assert not list((tmp_path / "run").glob(".unfinished*"))


def test_threads_of_a_process_that_label_at_once_lose_nothing(tmp_path: Path) -> None:
    rollouts = Rollouts(make_run(tmp_path / "run", steps=5))
    names = [row.id for row in rollouts.rows()]
    start = threading.Barrier(len(names))
    errors: list[Exception] = []

    def label(name: str) -> None:
        start.wait()
        try:
            set_label(rollouts, name, None, 1.0, "")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=label, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert {line["id"] for line in read_lines(rollouts.folder / LABELS_FILE)} == set(names)


def label_all(folder: Path) -> Rollouts:
    rollouts = Rollouts(folder)
    for row in rollouts.rows():
        set_label(rollouts, row.id, None, 1.0, "")
    return rollouts


def resume(folder: Path) -> None:
    """Go on from step 3: the run does steps 4 to 6 again, half of whose responses are others."""
    tracker = Tracker(folder, Screen(), (), total_steps=6, config=complete({}))
    earlier = {step: read_lines(rollout_file(folder, step)) for step in (4, 5, 6)}
    tracker.resume_at(3)
    for step, lines in earlier.items():
        for n, line in enumerate(reversed(lines)):  # the same response may be on another line
            line["response"] += " again" * (n % 2)
        replace_lines(rollout_file(folder, step), lines)
        tracker.step(step, {"reward_mean": 0.5})
    tracker.close()


def shown_labels(folder: Path) -> list[tuple[str, str]]:
    """The response of each row that the page marks as labelled, and that of its label."""
    rollouts, labels = Rollouts(folder), read_labels_by_place(folder)
    rows = rollouts.read(rollouts.rows(), None)
    return [(row["response"], labels[row["id"]]["response"]) for row in rows if row["id"] in labels]


def test_labels_stay_with_their_responses_when_a_run_goes_on_from_an_earlier_step(
    tmp_path: Path,
) -> None:
    folder = make_run(tmp_path / "run", steps=6)
    rollouts = label_all(folder)
    assert len(shown_labels(folder)) == 48
    stale = rollouts.read(rollouts.rows_of_ids(["train:6:0"]), None)[0]
    resume(folder)
    pairs = shown_labels(folder)
    assert len(pairs) == 24 + 12
    assert all(shown == labelled for shown, labelled in pairs)
    assert len(read_labels_with_scores(folder)) == 36
    assert len(read_lines(folder / LABELS_FILE)) == 48, "labels of other responses are kept"
    with pytest.raises(UserError, match="no longer in the run"):
        set_label(rollouts, stale["id"], stale["response_id"], 0.0, "")
    set_label(rollouts, "train:6:0", None, 0.0, "")
    assert len(read_lines(folder / LABELS_FILE)) == 49


def test_the_drift_of_a_judge_counts_labels_of_responses_in_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=6)
    label_all(folder)
    config = complete({"reward": {"api": {"enable": True, "model": "m"}}})
    assert [p.step for p in read_opinions(folder, config.reward)].count(5) == 8
    resume(folder)
    assert [p.step for p in read_opinions(folder, config.reward)].count(5) == 4
    lines = read_lines(rollout_file(folder, 1))
    lines[0]["score"] = 0.25  # another judge gave it to the same response
    replace_lines(rollout_file(folder, 1), lines)
    assert read_opinions(folder, config.reward)[0].judge == 0.25


def test_labels_of_earlier_versions_are_read_and_removed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    rollouts = Rollouts(folder)
    for row in rollouts.rows()[:3]:
        set_label(rollouts, row.id, None, 1.0, "")
    lines = read_lines(folder / LABELS_FILE)
    old: list[dict[str, Any]] = [{**line} for line in lines]
    for line in old:
        del line["response_id"]
    by_hand = {"step": 1, "score": 0.5, "label": 1}
    replace_lines(folder / LABELS_FILE, [*old, by_hand])
    assert list(read_labels_by_place(folder).values()) == lines
    set_label(rollouts, lines[1]["id"], lines[1]["response_id"], None, "")
    assert read_lines(folder / LABELS_FILE) == [lines[0], lines[2], by_hand]


def test_a_label_stays_where_an_editor_marked_the_file_as_utf8(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    rollouts = Rollouts(folder)
    set_label(rollouts, "train:1:0", None, 1.0, "")
    file = folder / LABELS_FILE
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    set_label(rollouts, "train:1:1", None, 0.0, "")
    assert set(read_labels_by_place(folder)) == {"train:1:0", "train:1:1"}


def test_a_label_that_cannot_be_written_is_said_to_be_lost(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    (folder / LABELS_FILE).mkdir()
    (line,) = Rollouts(folder).read(Rollouts(folder).rows()[:1], None)
    with pytest.raises(UserError, match="cannot be written"):
        write_label(folder, line, 1.0, "")


def test_a_label_of_an_episode_is_read_with_its_turns(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    add_episodes(run, 1)
    rollouts = Rollouts(run)
    (response,) = rollouts.read(rollouts.rows()[1:2], None)
    write_label(run, response, 1.0, "")
    (labelled,) = read_responses(str(run / "labels.jsonl")).rollouts
    assert labelled.turns[0].error == "add: b is not a number"
    assert [message["role"] for message in labelled.messages] == [
        "user", "assistant", "tool", "assistant"
    ]  # fmt: skip
    # It belongs to these turns alone.
    assert list(read_labels_by_place(run)) == ["train:1:1"]
    lines = read_lines(rollout_file(run, 1))
    lines[1]["turns"][0]["replies"][0]["content"] = "3"
    replace_lines(rollout_file(run, 1), lines)
    assert read_labels_by_place(run) == {}
