"""What a run is built from: each setting reaches the part that uses it. Nothing is trained here."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from ppo_cli.data_sets.prompts import PromptOrder, fingerprint
from ppo_cli.engine import async_rollout
from ppo_cli.errors import ExhaustedBudget, Interrupted, WorkerLost
from ppo_cli.planning.placement import placement_of
from ppo_cli.planning.resolve import resolve
from ppo_cli.planning.run_plan import make_plan
from ppo_cli.run import assemble
from ppo_cli.run.assemble import EngineFactory, start_engine
from ppo_cli.step.state import RunState
from tests.loop.scripted import Screen, ScriptedReward

WHOLE = (
    "data.train_batch_size=4", "actor.ppo_mini_batch_size=2", "data.train_max_samples=10",
    "data.val_max_samples=3", "trainer.total_epochs=3", "trainer.total_training_steps=null",
    "algorithm.kl_ctrl.kl_coef=0.25",
)  # fmt: skip


class Cluster:
    """Nodes that are all there; node 1 was asked to stop."""

    address = "10.0.0.1:6379"

    def __init__(self) -> None:
        self.waited: list[Callable[[], str | None]] = []

    def wait_until_whole(self, *, stop_requested: Callable[[], str | None]) -> None:
        self.waited.append(stop_requested)

    def stop_asked(self) -> str | None:
        return "SIGTERM on node 1"


@pytest.fixture
def assembled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Build a run with these settings and stop short of its engine."""
    load = assemble.load_tokenizer
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def build(
        *overrides: str, cluster: Cluster | None = None, environ: Sequence[str] = (),
        transfer: str | None = None,
    ) -> SimpleNamespace:  # fmt: skip
        seen = SimpleNamespace(screen=Screen())

        def load_tokenizer(path: str, **options: Any) -> Any:
            seen.tokenizer = options
            return load(path, **options)

        def start(build: Any, **options: Any) -> str:
            seen.engines, seen.start = build.__self__, options
            seen.engines.weight_transfer = transfer
            return "engine"

        def run(job: Any, begin: Any, **options: Any) -> None:
            seen.job, seen.begin, seen.restarts = job, begin, options
            seen.on_signal = signal.getsignal(signal.SIGTERM)

        monkeypatch.setattr(assemble, "load_tokenizer", load_tokenizer)
        monkeypatch.setattr(assemble, "start_engine", start)
        monkeypatch.setattr(assemble, "run_with_restarts", run)
        args = (*WHOLE, f"trainer.output_dir={tmp_path / 'run'}", *overrides)
        resolved = resolve(
            flags={}, preset="embedded", config_files=(), overrides=args,
            environ={name: os.environ[name] for name in environ},
        )  # fmt: skip
        assemble.train(make_plan(resolved), seen.screen, cluster)
        return seen

    return build


def test_settings_of_a_run_reach_what_it_is_built_from(
    assembled: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    seen = assembled(
        "trainer.seed=7", "data.shuffle=false", "trainer.max_ckpt_to_keep=2",
        "trainer.max_restarts=5", "trainer.node_timeout=77", "model.trust_remote_code=true",
        "trainer.engine=ray",
    )  # fmt: skip
    job, engine = seen.job, seen.engines
    assert seen.tokenizer == {"trust_remote_code": True}
    assert (len(job.prompts), len(job.val_prompts), job.total_steps) == (10, 3, 3 * 2)
    order = PromptOrder(10, 4, 7, False, fingerprint(job.prompts))
    assert job.order.state_dict() == order.state_dict()
    assert job.order.take() == [0, 1, 2, 3]
    done: Future[None] = Future()
    done.set_result(None)
    for step in (1, 2, 3):
        job.store.begin_save(step, lambda folder: done)
    assert job.store.steps() == [2, 3] and job.store.directory == tmp_path / "run" / "checkpoints"
    job.tracker.validation(0, {"reward_mean": 1.0})
    assert job.tracker.history == [{"step": 0, "reward_mean": 1.0}]
    assert job.pad_token_id == engine.tokenizer.pad_token_id is not None
    assert job.decode(job.prompts[0].token_ids, ()).count("user") == 1
    assert (seen.start["max_restarts"], seen.start["patience_s"]) == (5, 77)
    assert (seen.restarts["max_restarts"], seen.restarts["origin"]) == (5, None)
    assert seen.restarts["build"] == engine.renew
    assert (engine.total_steps, engine.logs) == (6, tmp_path / "run" / "logs")
    assert engine.order is job.order and engine.prompts is job.prompts
    assert engine.config is job.config and engine.address is None and engine.hosts_rewards()
    state = seen.begin(job)
    assert (state.step, state.kl_coef) == (0, 0.25)
    steps = assembled("trainer.total_training_steps=5", "trainer.resume_mode=never").job
    assert steps.total_steps == 5


class Judge(ScriptedReward):
    """A reward that keeps what it was asked, in order; it may refuse to start."""

    def __init__(self, log: list[Any], stop: Interrupted | None) -> None:
        super().__init__(lambda rollout, step: 1.0)
        self._log, self._stop = log, stop

    def start(self, prompts: Any, *, patient: bool = False, tell: Any = print) -> None:
        self._log.append(("start", len(prompts), patient))
        tell("The judge is tested.")
        if self._stop is not None:
            raise self._stop

    def begin_run(self, length: Any) -> None:
        self._log.append((length.total_steps, length.steps_per_epoch))

    def attach(self, folder: Path) -> None:
        self._log.append(("attach", folder.name))

    def close(self) -> None:
        self._log.append("close")


def test_a_reward_is_started_and_knows_what_it_has_spent(
    assembled: Callable[..., SimpleNamespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[Any] = []
    stops: list[Interrupted] = []

    def build_reward(config: Any, *, sources: set[str], host: Any) -> Judge:
        assert sources == {"ppo-cli/arithmetic"} and host is None
        return Judge(log, stops.pop() if stops else None)

    def build(*overrides: str, **options: Any) -> SimpleNamespace:
        log.clear()
        return assembled(*overrides, **options)

    monkeypatch.setattr(assemble, "build_reward", build_reward)
    first, attached = build(), ("attach", "run")
    assert log == [attached, (6, 2), ("start", 13, False), "close"]
    assert first.screen.notes[-1] == "The judge is tested."
    spent = tmp_path / "run" / "judge_calls.jsonl"
    spent.write_text("")
    build()
    assert spent.exists(), "a run that has no checkpoint yet has spent all the same"
    done: Future[None] = Future()
    done.set_result(None)

    def fill(folder: Path) -> Future[None]:
        job = first.job
        job.order.take()
        RunState(kl_coef=0.5, step=1).write(
            folder, order=job.order, reward=job.reward, fingerprint=job.fingerprint
        )
        return done

    first.job.store.begin_save(1, fill)
    second = build()
    assert log == [attached, (6, 2), ("start", 13, True), "close"]
    checkpoint = second.job.store.newest()
    assert second.restarts["origin"] == checkpoint == first.job.store.directory / "step_000001"
    monkeypatch.setattr("sys.argv", ["ppo", "train", "--rm_budget_usd=1", "--lr", "1 2"])
    monkeypatch.delenv("PPO_COMMAND", raising=False)
    monkeypatch.setenv("PPO_SEED", "42")
    stops.append(Interrupted("Spent.", used_up=ExhaustedBudget("--rm_budget_usd", 1.3, 13, 0.0)))
    with pytest.raises(Interrupted) as stopped:  # 13 of 3 x 2 x 4 x n responses and 2 validations
        build("rollout.n=2", "rollout.val_kwargs.n=1", environ=("PPO_SEED",))
    assert str(stopped.value).startswith("Spent. Go on with: PPO_SEED=42 ppo train --lr '1 2' --")
    assert str(stopped.value).endswith("--rm_budget_usd 6.5")
    stops.append(Interrupted("Down."))
    monkeypatch.setattr("sys.argv", ["ppo", "train", "--resume", "never"])
    with pytest.raises(Interrupted, match=r"^Down. Go on with: ppo train --resume never$"):
        build("trainer.resume_mode=never")  # which has not begun: auto would be the run before
    for arguments, notes in (("trainer.seed=7", 1), ("trainer.resume_mode=never", 0)):
        other = build(arguments)
        assert not spent.exists()
        assert log == [(6, 2), ("start", 13, False), attached, "close"]
        assert sum("A new run: " in note for note in other.screen.notes) == notes
        assert other.restarts["origin"] is None and other.job.store.steps() == []


def test_a_run_that_has_to_start_again_is_given_its_tries() -> None:
    notes: list[str] = []
    lost: list[Exception] = []
    gathered: list[int] = []

    def build() -> Any:
        if lost:
            raise lost.pop(0)
        return "engine"

    def started(limit: int, *errors: Exception, patience_s: float = 60.0) -> Any:
        lost[:] = errors
        notes.clear()
        gathered.clear()
        return start_engine(
            build, max_restarts=limit, patience_s=patience_s,
            gather=lambda: gathered.append(len(lost)),
            tell=notes.append, resume_command="ppo train -x",
        )  # fmt: skip

    assert started(0) == "engine"
    assert started(2, WorkerLost("A died."), WorkerLost("B died.")) == "engine"
    assert notes == ["A died. Starting again (1 of 2).", "B died. Starting again (2 of 2)."]
    assert gathered == [1, 0]
    for limit, patience in ((1, 60.0), (9, -1.0)):  # too often, or after too long a wait
        with pytest.raises(Interrupted, match=r"^.* died\. Start again with: ppo train -x$"):
            started(limit, WorkerLost("A died."), WorkerLost("B died."), patience_s=patience)
        assert len(gathered) == (1 if limit == 1 else 0)
    with pytest.raises(Interrupted, match=r"^Stopped\. Start again with: ppo train -x$"):
        started(5, Interrupted("Stopped."))
    assert gathered == []


def test_a_cluster_engine_is_given_all_that_it_needs(
    assembled: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ppo_cli.cluster import driver

    engines = [Mock(weight_transfer="memory") for _ in range(2)]
    build = Mock(side_effect=engines)
    monkeypatch.setattr(driver, "DriverEngine", build)
    cluster = Cluster()
    seen = assembled("trainer.engine=ray", "trainer.num_workers=3", cluster=cluster)
    factory: EngineFactory = seen.engines
    assert factory.get() is factory.get() is engines[0]
    settled = seen.job.config
    assert settled.model.enable_gradient_checkpointing is False
    options = build.call_args.kwargs
    assert build.call_args.args == (settled, factory.tokenizer)
    assert (options["total_steps"], options["logs"]) == (seen.job.total_steps, factory.logs)
    assert options["placement"] == placement_of(seen.job.config)
    assert options["placement"].train == (0, 1, 2)
    assert options["address"] == Cluster.address
    assert options["stop_requested"]() == seen.job.stop_requested() == "SIGTERM on node 1"
    for start in (seen.start, seen.restarts):  # each waits for the nodes, and can be stopped
        start["gather"]()
    assert [ask() for ask in cluster.waited] == ["SIGTERM on node 1"] * 2
    options["tell"]("Hello")
    assert seen.screen.notes[-2:] == ["Loading embedded", "Hello"]
    # What failed once need not be tried again by another start.
    assert factory.renew() is engines[1] and engines[0].close.called
    assert build.call_args.args[0].rollout.weight_transfer == "memory"
    assert factory.host(dict, "judge") is engines[1].host.return_value
    reward_devices = options["placement"].reward
    assert engines[1].host.mock_calls == [call(dict, role="reward judge", devices=reward_devices)]
    factory.close()
    assert engines[1].close.called


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_signal_asks_a_run_to_stop(
    engine: str, assembled: Callable[..., SimpleNamespace]
) -> None:
    seen = assembled(f"trainer.engine={engine}", "trainer.num_workers=1")
    assert seen.job.stop_requested() is None
    seen.on_signal(signal.SIGTERM, None)
    assert seen.job.stop_requested() == "SIGTERM"


def test_a_way_of_weights_that_fails_at_the_start_changes_the_plan(
    assembled: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    seen = assembled("trainer.engine=ray", transfer="gloo")
    assert seen.job.config.rollout.weight_transfer == "gloo"
    assert seen.engines.config is seen.job.config
    written = json.loads((tmp_path / "run" / "plan.json").read_text())["values"]
    assert written["rollout.weight_transfer"]["value"] == "gloo"


def test_sampling_ahead_is_told_of_steps_that_are_still_to_come(
    assembled: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = ("trainer.async_steps=2", "rollout.partial_tokens=6")
    seen = assembled(*ahead, "trainer.num_workers=1", "rollout.n=2")
    engine: EngineFactory = seen.engines
    monkeypatch.setattr(async_rollout, "AheadEngine", lambda *arguments: arguments)
    monkeypatch.setattr(EngineFactory, "_build_engine", lambda factory: "inner")
    inner, upcoming, *arguments = engine.get()  # type: ignore[misc]
    assert (inner, arguments) == ("inner", [2, 6])
    job = seen.job
    job.order.take()
    expected = [job.prompts[i] for i in job.order.peek(2)]
    prompts, sampling = upcoming(2)
    assert (prompts, sampling.n) == (expected, 2)
    assert sampling.seed not in (upcoming(1)[1].seed, upcoming(3)[1].seed)
    assert upcoming(job.total_steps - 1) is not None and upcoming(job.total_steps) is None
