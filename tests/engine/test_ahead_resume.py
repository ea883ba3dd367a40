"""Sampling ahead over stops: saved, undone, taken again, with other settings, damaged."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ppo_cli.errors import ModelError, WorkerLost
from tests.engine.ahead_runs import Run, fail_with
from tests.waiting import wait_until

Start = Callable[..., Run]


def same_end(a: Run, b: Run) -> None:
    """The same rollouts, bit for bit, in the last steps of both, and the same weights."""
    shared = min(len(a.trained), len(b.trained))
    assert a.trained[len(a.trained) - shared :] == b.trained[len(b.trained) - shared :]
    assert (a.inner.weights, a.inner.version) == (b.inner.weights, b.inner.version)


WAYS = [(1, None), (2, None), (3, None), (1, 3), (2, 3), (3, 2)]  # steps ahead, partial tokens
Way = tuple[int, int | None]


@pytest.mark.parametrize("way", [(0, None), *WAYS])
@pytest.mark.parametrize("stop", [1, 2, 4, 7])
def test_a_run_with_a_stop_is_the_same_run(
    start: Start, tmp_path: Path, way: Way, stop: int
) -> None:
    unbroken = start(*way).train(8)
    folder = start(*way).train(stop).save(tmp_path / "saved")
    resumed = start(*way).load(folder).train(8 - stop)
    assert len(resumed.trained) == 8 - stop
    same_end(resumed, unbroken)


@pytest.mark.parametrize("way", [(2, None), (2, 3), (3, 1)])
def test_a_stop_at_every_step(start: Start, tmp_path: Path, way: Way) -> None:
    unbroken = start(*way).train(8)
    run = start(*way)
    for step in range(8):
        folder = run.train(1).save(tmp_path / f"step_{step}")
        run = start(*way).load(folder)
    same_end(run, unbroken)


def test_the_same_engine_may_go_back_to_a_checkpoint(start: Start, tmp_path: Path) -> None:
    unbroken, run = start(2).train(8), start(2).train(3)
    folder = run.save(tmp_path / "saved")
    run.train(2).load(folder).trained.clear()
    same_end(run.train(5), unbroken)


def test_what_was_sampled_is_not_sampled_again(start: Start, tmp_path: Path) -> None:
    folder = start(2).train(3).save(tmp_path / "saved")
    resumed = start(2).load(folder)
    resumed.train(1)
    assert [call for call in resumed.inner.calls if call.startswith("gen")] == ["generate 1006"]


@pytest.mark.parametrize("way", [(1, None), (2, None), (2, 3)])
def test_an_undone_step_is_taken_again_with_the_same_rollouts(start: Start, way: Way) -> None:
    unbroken, run = start(*way).train(8), start(*way).train(3)
    drawn = run.inner.rounds_drawn
    for _ in range(3):
        run.begin_step()
        run.undo_step()
    run.train(1)
    assert run.inner.rounds_drawn == drawn + 1 + (way[1] is not None)  # and the ends of its own
    same_end(run.train(4), unbroken)


def test_the_first_step_may_be_undone(start: Start) -> None:
    unbroken, run = start(1).train(8), start(1)
    run.begin_step()
    run.undo_step()
    same_end(run.train(8), unbroken)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("done", [0, 1, 4])
def test_saved_while_a_step_is_undone(start: Start, tmp_path: Path, way: Way, done: int) -> None:
    """The round under way is not waited for: it is sampled again, the same."""
    unbroken, run = start(*way).train(8), start(*way).train(done)
    never, begun = threading.Event(), threading.Event()

    def pause() -> None:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            run.inner.wait_in_round(never)()

    run.inner.pause = pause
    run.begin_step()
    assert begun.wait(60)
    run.undo_step()
    folder = run.save(tmp_path / "saved")
    assert run.inner.is_sampling
    run.inner.closed.set()
    resumed = start(*way).load(folder).train(8 - done)
    same_end(resumed, unbroken)
    assert resumed.inner.rounds_drawn <= unbroken.inner.rounds_drawn - done


@pytest.mark.parametrize("pauses", [0, 1, 3])
def test_saved_when_a_step_is_undone_among_its_own_rollouts(
    start: Start, tmp_path: Path, pauses: int
) -> None:
    """What was drawn by then of the ends of carried responses is drawn again, the same."""
    unbroken, run = start(2, 2).train(8), start(2, 2).train(3)
    pauses_left = iter(range(pauses))

    def fail() -> None:
        if next(pauses_left, None) is None:
            raise WorkerLost("sampler 0")

    run.inner.pause = fail
    with pytest.raises(WorkerLost):
        run.begin_step()
    run.inner.pause = lambda: None
    run.undo_step()
    folder = run.save(tmp_path / "saved")
    same_end(start(2, 2).load(folder).train(5), unbroken)


def test_a_checkpoint_is_written_though_the_sampler_is_lost(start: Start, tmp_path: Path) -> None:
    unbroken, run = start(1).train(8), start(1).train(3)
    run.inner.pause = fail_with(WorkerLost("sampler 0"))
    run.begin_step()
    wait_until(lambda: not run.inner.is_sampling)
    run.undo_step()
    folder = run.save(tmp_path / "saved")
    with pytest.raises(WorkerLost):
        run.engine.publish()
    same_end(start(1).load(folder).train(5), unbroken)


@pytest.mark.parametrize("partial", [(None, None), (2, None), (None, 2), (2, 5)])
@pytest.mark.parametrize(("before", "after"), [(0, 1), (0, 3), (1, 0), (1, 2), (3, 1), (2, 0)])
def test_another_distance_goes_on_within_its_own_bound(
    start: Start, tmp_path: Path, before: int, after: int, partial: tuple[int | None, int | None]
) -> None:
    folder = start(before, partial[0]).train(4).save(tmp_path / "saved")
    resumed = start(after, partial[1]).load(folder).train(4)
    stale = [t.staleness for t in resumed.trained]
    assert max(stale) <= after
    assert stale[-1] == after
    assert stale[0] == (before if before <= after else 0)


def test_rounds_of_another_sampling_are_sampled_anew(start: Start, tmp_path: Path) -> None:
    folder = start(2).train(4).save(tmp_path / "saved")
    resumed = start(2, temperature=0.5).load(folder).train(4)
    assert [t.staleness for t in resumed.trained] == [0, 1, 2, 2]


def test_logprobs_come_back_exactly(start: Start, tmp_path: Path) -> None:
    run = start(1).train(2)
    (ahead,) = run.engine._rounds  # type: ignore[attr-defined]
    odd = np.array([np.float32(0.1), -np.inf, np.float32(1e-45), -0.0], dtype=np.float32)
    object.__setattr__(ahead.rollouts[0], "sampler_logprobs", odd)
    object.__setattr__(ahead.rollouts[0], "token_ids", (1, 2, 3, 2**40))
    folder = run.save(tmp_path / "saved")
    (back,) = start(1).load(folder).engine._rounds  # type: ignore[attr-defined]
    assert back.rollouts[0].sampler_logprobs.dtype == np.float32
    assert back.rollouts[0].sampler_logprobs.tobytes() == odd.tobytes()
    assert back.rollouts[0].token_ids == (1, 2, 3, 2**40)
    assert [r.text for r in back.rollouts] == [r.text for r in ahead.rollouts]


def test_a_checkpoint_from_before_partial_rollouts_is_read(start: Start, tmp_path: Path) -> None:
    unbroken, folder = start(2).train(8), start(2).train(3).save(tmp_path / "saved")
    state_file = folder / "state" / "ahead.json"
    state = json.loads(state_file.read_text())
    for saved in state["rounds"]:
        del saved["moved_ago"], saved["sampling"]["new_tokens"]
        for rollout in saved["rollouts"]:
            del rollout["seed"], rollout["carried"]
    state_file.write_text(json.dumps(state))
    same_end(start(2).load(folder).train(5), unbroken)


def test_the_last_checkpoint_keeps_nothing(start: Start, tmp_path: Path) -> None:
    folder = start(2).train(8).save(tmp_path / "saved")
    assert sorted(p.name for p in (folder / "state").iterdir()) == ["engine.json"]


def drop_rollout(text: bytes) -> bytes:
    state = json.loads(text)
    state["rounds"][0]["rollouts"].pop()
    return json.dumps(state).encode()


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "numbers cut off": ("ahead.npz", lambda numbers: numbers[:-300]),
    "text cut off": ("ahead.json", lambda text: b'{"rounds": [{'),
    "fewer rollouts": ("ahead.json", drop_rollout),
}


@pytest.mark.parametrize("damage", [*DAMAGE, "missing numbers"])
def test_damage_is_named(start: Start, tmp_path: Path, damage: str) -> None:
    folder = start(1).train(3).save(tmp_path / "saved")
    name, spoil = DAMAGE.get(damage, ("ahead.npz", None))
    file = folder / "state" / name
    file.write_bytes(spoil(file.read_bytes())) if spoil else file.unlink()
    with pytest.raises(ModelError, match=r"sampled ahead cannot be read .* delete .*ahead\.json"):
        start(1).load(folder)
