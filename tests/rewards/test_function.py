"""A user's reward function: the run continues after any fault of it, or refuses to start."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ppo_cli.atomic import is_running
from ppo_cli.errors import RewardError
from ppo_cli.records import Part, PlacedReward, Score
from ppo_cli.rewards.base import Call, Reward
from ppo_cli.rewards.function import check_source, load_function
from ppo_cli.rewards.pool import WorkerPool
from ppo_cli.rewards.worker import Task
from tests.rewards.scoring import make_rollout, sum_episode
from tests.rewards.tables import read_blocks, table
from tests.waiting import wait_until

Build = Callable[..., Reward]
Write = Callable[[str], str]
Scores = Callable[..., list[Score]]
PATIENCE = 60

FILES = read_blocks("reward_functions")
MOODS = FILES["moods"]


@pytest.fixture
def scores(build: Build, reward_file: Write) -> Scores:
    """Score replies with a function written in the test."""

    def run(code: str, *replies: str, name: str = "", **settings: object) -> list[Score]:
        reward = build(function=reward_file(code) + name, **settings)
        return [f.result(PATIENCE) for f in [reward.submit(make_rollout(r)) for r in replies]]

    return run


HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
ASYNC_HEAD = f"async {HEAD}"


def test_arguments_result_output_and_parts_of_a_call(build: Build, reward_file: Write) -> None:
    code = f"""{HEAD}
    print("scoring", solution_str)
    names = ("finish_reason", "truncated", "response_tokens", "num_turns", "rollout_reward_scores")
    facts = [extra_info.pop(name) for name in names]
    seen = f"{{data_source}} {{solution_str}} {{ground_truth!r}} {{extra_info!r}} {{facts!r}}"
    return {{"score": 0.5, "style": 0.25, "reason": "terse", "seen": seen, "imputed": "y"}}
    """
    reward = build(function=reward_file(code))
    score = reward.submit(make_rollout("reply", ["a", 1], "here", tier=2)).result(PATIENCE)
    assert (score.value, score.failure, score.reason, score.judged) == (0.5, "", "terse", True)
    assert score.parts == {"style": Part(raw=0.25, scaled=None)}
    assert score.info.pop("latency_s") >= 0
    seen = "here reply ['a', 1] {'tier': 2} ['stop', False, 1, 2, {}]"
    assert score.info == {"output": "scoring reply\n", "seen": seen, "imputed": "y"}


def test_an_episode_is_the_last_turn_and_a_conversation(build: Build, reward_file: Write) -> None:
    code = f"""{HEAD}
    roles = [m["role"] for m in extra_info["messages"]]
    seen = (solution_str, roles, extra_info["num_turns"], extra_info["turn_rewards"])
    return {{"token_rewards": [0.0, 0.0, 1.0], "seen": seen}}
    """
    reward = build(function=reward_file(code))
    score = reward.submit(sum_episode(1)).result(PATIENCE)
    roles = ["user", "assistant", "tool", "assistant"]
    assert score.info["seen"] == ["It is 2.", roles, 4, [0.25, 0.0]]
    # The last turn has the tokens 9 to 11 of the episode.
    assert [step.end for step in score.steps] == [10, 11, 12]


@pytest.mark.slow
def test_bad_answers_fail_alone(scores: Scores) -> None:
    failures = {
        "hang": "timeout: took longer than 3 s",
        "spin": "timeout: took longer than 3 s",
        "raise": "raised ValueError: no such mood (my_reward.py, line 11)",
        "exit": "raised SystemExit: 3 (my_reward.py, line 13)",
        "die": "the worker process ended with exit code 3",
        "nan": "returned nan",
        "none": "returned None (is a `return` missing?)",
        "text": "returned text '1', not a number",
    }
    replies = [word for mood in failures for word in (mood, "three")]
    results = scores(MOODS, *replies, timeout=3.0, num_workers=1)
    assert {m: (s.value, s.failure) for m, s in zip(failures, results[::2], strict=True)} == {
        mood: (None, failure) for mood, failure in failures.items()
    }
    assert [score.value for score in results[1::2]] == [5.0] * len(failures)


def test_a_segmentation_fault_fails_alone_and_at_once(scores: Scores, tmp_path: Path) -> None:
    code = FILES["a segmentation fault fails alone and at once"]
    bad, good = scores(code, "crash", "fine")
    assert "signal SIGSEGV" in bad.failure
    assert good.value == 1.0
    assert (tmp_path / "my_reward.py.log").read_text() == "x"


def test_coroutines_run_side_by_side(scores: Scores) -> None:
    code = FILES["coroutines run side by side"]
    results = scores(code, *map(str, range(40)), num_workers=1)
    assert [s.failure for s in results] == [""] * 40
    assert [s.info["said"] for s in results] == [s.info["output"].strip() for s in results]


def test_coroutines_have_deadlines(scores: Scores) -> None:
    code = FILES["coroutines have deadlines"]
    bad, late, good = scores(code, "hang", "late", "fine", name=":judge", timeout=1.5)
    assert bad.failure == "timeout: took longer than 1.5 s"
    assert late.failure == "raised TimeoutError: the server slept (my_reward.py, line 6)"
    assert good.value == 1.0


@pytest.mark.slow
def test_a_blocked_event_loop_is_killed_and_its_neighbours_tried_again(
    build: Build, reward_file: Write, tmp_path: Path
) -> None:
    code = FILES["a blocked event loop is killed and its neighbours tried again"]
    reward = build(function=reward_file(code), timeout=1.0, num_workers=1)
    blocked = [reward.submit(make_rollout("block")) for _ in range(2)]
    time.sleep(0.7)
    beside = reward.submit(make_rollout("fine"))
    assert all("it blocked the event loop" in future.result(PATIENCE).failure for future in blocked)
    assert beside.result(PATIENCE).value == 1.0
    assert (tmp_path / "my_reward.py.log").read_text() == "x"  # the other is late, too


def test_calls_that_kill_their_worker_are_tried_twice(scores: Scores, tmp_path: Path) -> None:
    code = FILES["calls that kill their worker are tried twice"]
    results = scores(code, "a", "b", num_workers=1)
    assert {score.failure for score in results} == {"the worker process ended with exit code 3"}
    assert (tmp_path / "my_reward.py.log").read_text() == "xxxx"


def test_callable_objects_lambdas_and_neighbouring_files_work(
    scores: Scores, tmp_path: Path
) -> None:
    (tmp_path / "neighbour.py").write_text("bonus = 7\n")
    code = FILES["callable objects lambdas and neighbouring files work"]
    assert scores(code, "a", name=":judge")[0].value == 14.0
    assert scores(code, "abc", name=":short")[0].value == 3.0
    assert scores(code, "a", name=":extra", function_kwargs={"bonus": 0.5})[0].value == 0.5


def test_output_of_any_kind_harms_nothing(
    scores: Scores, capfd: pytest.CaptureFixture[str]
) -> None:
    code = FILES["output of any kind harms nothing"]
    results = scores(code, *"abcdef")
    assert [s.value for s in results] == [1.0] * 6
    assert all(len(s.info["output"]) <= 2000 for s in results)
    assert capfd.readouterr() == ("", "")


def test_workers_use_one_thread_and_are_clean(scores: Scores) -> None:
    code = FILES["workers use one thread and are clean"]
    infos = [score.info for score in scores(code, *"abc", num_workers=3)]
    assert [info["heavy"] for info in infos] == [[]] * 3
    assert [info["fixed"] for info in infos] == [["1", "1", "1", "1", "0"]] * 3
    # Each leads a separate session, which is killed as a whole.
    assert all(pid == session for pid, session in (info["pids"] for info in infos))
    assert len({pid for info in infos for pid in info["pids"]}) == 3


def test_children_of_a_killed_worker_die_with_it(scores: Scores, tmp_path: Path) -> None:
    code = FILES["children of a killed worker die with it"]
    [score] = scores(code, "a", timeout=1.5)
    assert score.failure.startswith("timeout")
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_running(pid))


def test_a_worker_has_the_memory_of_its_task_and_no_more(reward_file: Write) -> None:
    code = FILES["a worker has the memory of its task and no more"]
    load = partial(load_function, reward_file(code), "compute_score", {})
    pool = WorkerPool(Task("sized", load, memory_limit=1 << 30), size=1, timeout=PATIENCE)
    sizes = (2 << 30, 5)
    scores = [pool.submit(Call("", str(size), None, {}), lambda score: score) for size in sizes]
    greedy, modest = (score.result(PATIENCE) for score in scores)
    pool.close()
    assert greedy.value is None and "MemoryError" in greedy.failure
    assert modest.value == 1.0


def test_a_reward_is_closed_twice_and_keeps_no_state(build: Build, reward_file: Write) -> None:
    reward = build(function=reward_file(MOODS), timeout=100.0)
    open_ended = reward.submit(make_rollout("hang"))
    assert reward.state_dict() == {}
    reward.load_state_dict({})
    reward.close()
    reward.close()
    assert open_ended.result(0).failure == "the run ended before this response was scored"


LATER = "def compute_score(**row): ...\n"


@pytest.mark.parametrize(("code", "name", "fragments"), table(__file__, "refused"))
def test_a_file_that_cannot_work_is_refused_before_anything_runs(
    code: str, name: str, fragments: list[str], build: Build, reward_file: Write
) -> None:
    file = reward_file(code)
    with pytest.raises(RewardError) as caught:
        build(function=file + name)
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in [*fragments, "my_reward.py"]), text


def test_keyword_arguments_that_it_does_not_take_are_refused(
    build: Build, reward_file: Write
) -> None:
    with pytest.raises(RewardError, match="also gets: bonus"):
        build(function=reward_file(MOODS), function_kwargs={"bonus": 1})


@pytest.mark.parametrize(
    ("path", "message"),
    [("my_rewards.py", r"no file .* Did you mean 'my_reward.py'"), (".", "is a folder"),
     ("none/my_reward.py", "does not exist either")],
)  # fmt: skip
def test_a_missing_file_is_told_with_its_nearest(
    path: str, message: str, build: Build, reward_file: Write, tmp_path: Path
) -> None:
    reward_file(MOODS)
    with pytest.raises(RewardError, match=message):
        build(function=str(tmp_path / path))


def test_rewards_within_the_response_are_kept_where_they_fit(
    build: Build, reward_file: Write
) -> None:
    reward = build(function=reward_file(f"{HEAD}    return eval(solution_str)\n"))

    def score(text: str, finish: str = "stop") -> Score:
        longer = replace(make_rollout(text, finish_reason=finish), token_ids=(0, 1, 2))
        return reward.submit(longer).result(PATIENCE)

    assert score("[1.0, 2.0, 3.0]").steps[2] == PlacedReward(3, 3.0, "token")
    assert score("[1.0, 2.0]").value == 3.0  # without the end token
    assert "2 token_rewards for a response of 3" in score("[1.0, 2.0]", "length").failure
    assert score("[(3, 0.5), (8, 1)]").steps == (PlacedReward(3, 0.5), PlacedReward(8, 1.0))
    assert score("[(8, 1)]").steps == (PlacedReward(8, 1.0),)  # at the last character
    assert "offset 99, outside the response's 1 to 9 characters" in score("[(99, 1)]").failure
    assert "offset 0, outside" in score("[(0, 1)]").failure


@pytest.mark.parametrize("text", table(__file__, "passes"))
def test_a_file_that_may_work_passes_the_check_of_its_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "reward.py").write_text(text)
    (tmp_path / "helper.py").touch()
    check_source(tmp_path / "reward.py", "compute_score", {})


@pytest.mark.parametrize("text", [
    "import no_such_package\n" + HEAD, "X = 1\nimport os, no_such_package\n" + HEAD,
    "from no_such_package.sub import f\n" + HEAD, "from . import f\n" + HEAD,
    "async def compute_score(a): ...\n", "compute_score = lambda a: 1\n", "compute_score = {}\n",
    "def compute_score(*args): ...\n",
])  # fmt: skip
def test_the_check_of_the_text_has_the_words_of_the_worker(tmp_path: Path, text: str) -> None:
    file = tmp_path / "r.py"
    file.write_text(f"{text}    return 1.0\n" if text.endswith(HEAD) else text)
    with pytest.raises(RewardError) as by_text:
        check_source(file, "compute_score", {})
    task = Task("the file", partial(load_function, str(file), "compute_score", {}))
    pool = WorkerPool(task, size=1, timeout=PATIENCE)
    with closing(pool), pytest.raises(RewardError) as by_worker:
        pool.start()
    assert str(by_text.value) == str(by_worker.value)


def test_the_text_is_checked_with_the_keyword_arguments_of_the_settings(tmp_path: Path) -> None:
    head = "def f(data_source, solution_str, ground_truth, extra_info, bonus): ...\n"
    (tmp_path / "r.py").write_text(head)
    check_source(tmp_path / "r.py", "f", {"bonus": 1})
    for kwargs in ({}, {"bonus": 1, "malus": 2}):
        with pytest.raises(RewardError, match=r"r.py, line 1 cannot be called with data_source"):
            check_source(tmp_path / "r.py", "f", kwargs)
