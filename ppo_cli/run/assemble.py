"""From a config to a running job: `prepare` reads, `_open_job` builds; engines and restarts.

Cheap checks come first. An engine is built when it is first needed. After a loss, `renew` builds
another one, and the run continues from its last checkpoint. The current engine hosts reward models
that run in the cluster.
"""

from __future__ import annotations

import gc
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol

from ppo_cli.allocator import has_jemalloc
from ppo_cli.config.mixture import judges_of, rules_of
from ppo_cli.config.models.folder import vocabulary_size
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.config.schema.run import Config, Data
from ppo_cli.data_sets.prompts import PromptOrder, PromptSet
from ppo_cli.data_sets.table import fingerprint_of, join_prompts, load_prompts, pick
from ppo_cli.digests import require_resumable
from ppo_cli.engine.base import Engine, Sampling
from ppo_cli.engine.device import require_gpus
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.pretrained import load_tokenizer, pad_token_id
from ppo_cli.engine.samplers.text import decode_text
from ppo_cli.errors import (
    SAME_CALL,
    DataError,
    Interrupted,
    UserError,
    WentBack,
    WorkerLost,
    plural,
    ppo,
    replace_flag,
)
from ppo_cli.loop import run
from ppo_cli.machine.versions import SUPPORTED, installed_editions
from ppo_cli.paths import user_path
from ppo_cli.planning.batches import DataSplit, describe_missing_rows, split_files
from ppo_cli.planning.config_file import config_yaml
from ppo_cli.planning.memory.plan import cpu_plan
from ppo_cli.planning.placement import placement_of
from ppo_cli.planning.resolved import Resolved
from ppo_cli.planning.run_plan import RunPlan
from ppo_cli.planning.second_judge import restore_second_judge
from ppo_cli.records import Prompt, data_sources, mark_validation
from ppo_cli.report.alerts import send_alerts
from ppo_cli.report.features import FEATURES, Wish, find_asked_judge, read_requests
from ppo_cli.report.metrics import extend_budget, find_lr_jumps, refuse_unscored, summarise
from ppo_cli.report.tracker import Screen, Tracker
from ppo_cli.rewards.base import Host, HostMaker, Reward, RunLength
from ppo_cli.rewards.diagnosis import commands, explain_no_reward
from ppo_cli.rewards.registry import build_reward
from ppo_cli.run.identity import (
    describe_new_run,
    find_changes,
    is_by_files,
    keep_decisions,
    run_identity,
)
from ppo_cli.run.network import find_network
from ppo_cli.run_folder.checkpoints import STEP_NAME, CheckpointStore, find_resume, step_of
from ppo_cli.run_folder.folder import FORK_LINE, SPENT, WRITTEN_BY, RunFolder, read_fork
from ppo_cli.run_folder.lines import JUDGES_FILE, read_metrics, replace_lines
from ppo_cli.run_folder.restraints import (
    RESTRAINTS_FILE,
    end_return,
    go_back,
    read_restraints,
)
from ppo_cli.run_folder.store import mirrored
from ppo_cli.scoring.sources import read_labelled_rollouts
from ppo_cli.secrets.redact import redact
from ppo_cli.signals import LEAVE_S, StopOnSignal, forget_signals
from ppo_cli.step.sampling import train_sampling
from ppo_cli.step.saving import load
from ppo_cli.step.state import Job, RunState
from ppo_cli.version import read_version

if TYPE_CHECKING:
    from ppo_cli.environments.episodes import Episodes

Build = Callable[[], Engine]
WENT_BACK = "the run went back"  # origin of `--resume auto` in place of what was typed
MakeReward = Callable[[RewardSettings, Sequence[Prompt], HostMaker | None], Reward]


def describe_machine() -> str:
    """Return the versions that a run uses, and the machine that it starts on."""
    import torch

    versions = [f"ppo-cli {read_version()}"]
    for package in SUPPORTED:
        versions += [f"{name} {version}" for name, version in installed_editions(package).items()]
    # GPUs as torch counts them, because it computes on them.
    gpus = torch.cuda.device_count()
    devices = f"{os.cpu_count()} CPUs, {plural(gpus, 'GPU')}" if gpus else f"{os.cpu_count()} CPUs"
    return f"{', '.join(versions)} on {platform.platform()}, {devices}"


def run_with_restarts(
    job: Job,
    begin: Callable[[Job], RunState],
    *,
    build: Build,
    max_restarts: int,
    gather: Callable[[], None] = lambda: None,
    origin: Path | None = None,
) -> None:
    """Run to the end, with at most `max_restarts` new starts after lost workers.

    `begin` returns the state to start from. After a lost engine is closed, `gather` waits until all
    nodes are back and `build` builds another; both may raise WorkerLost. Without a checkpoint the
    run starts again from `origin`, the checkpoint that it started from, or from the first step.
    Raises Interrupted after too many losses, or if a lost node does not come back.
    """
    # What a start from the first step restores.
    initial = job.order.state_dict(), job.reward.state_dict()
    lost: WorkerLost | None = None
    for restarts in range(max_restarts + 1):
        try:
            if lost is None:
                state = begin(job)
            else:
                # Continue from the newest checkpoint if it is intact.
                newest = job.store.newest() or origin
                if newest is not None:
                    require_resumable(newest, job.resume_command)
                where = f"{newest.name}, the last checkpoint" if newest else "the first step"
                restart_note = f"Starting again ({restarts} of {max_restarts}) from {where}."
                job.tracker.screen.health(_describe_loss(lost, restart_note))
                _close_lost_engine(job)
                job = replace(job, engine=_renew_engine(job, gather, build))
                state = _restart_from_scratch(job, initial) if newest is None else load(job, newest)
            return run(job, state)
        except WorkerLost as error:
            lost = error
    refusal = f"That is one loss more than --max_restarts {max_restarts} allows."
    raise interrupt_run(job, _describe_loss(lost, refusal)) from lost


def start_engine(
    build: Build,
    *,
    max_restarts: int,
    patience_s: float,
    gather: Callable[[], None],
    tell: Callable[[str], None],
    resume_command: str,
) -> Engine:
    """Build the first engine; a worker that dies meanwhile counts as a restart.

    A start that fails after more than `patience_s` is not repeated: it waited in vain.
    """
    for restarts in range(max_restarts + 1):
        started = time.monotonic()
        try:
            return build()
        except Interrupted as stop:
            raise Interrupted(f"{stop} Start again with: {resume_command}") from stop
        except WorkerLost as lost:
            if restarts == max_restarts or time.monotonic() - started > patience_s:
                raise Interrupted(
                    _describe_loss(lost, f"Start again with: {resume_command}")
                ) from lost
            tell(_describe_loss(lost, f"Starting again ({restarts + 1} of {max_restarts})."))
            gather()
    raise AssertionError("the last attempt returns or raises")


def _describe_loss(lost: WorkerLost | None, consequence: str) -> str:
    """Return the message of a loss and its consequence, on a separate line after a log."""
    text = str(lost)
    return f"{text}\n{consequence}" if "\n" in text else f"{text} {consequence}"


def _renew_engine(job: Job, gather: Callable[[], None], build: Build) -> Engine:
    """Wait until the cluster is complete, then build another engine in place of the lost one.

    Raises Interrupted, with the saved step and the command to resume, if either fails or is
    stopped.
    """
    try:
        gather()
    except (WorkerLost, Interrupted) as gone:
        raise interrupt_run(job, str(gone)) from gone
    try:
        return build()
    except Interrupted as stop:
        raise interrupt_run(job, str(stop)) from stop


def _close_lost_engine(job: Job) -> None:
    """Close the engine, and wait for pending scores.

    They are paid for and go into the judge's cache; and they must not change the statistics of a
    reward after these were restored.
    """
    job.engine.close()
    job.reward.end_round("train")
    # A request to stop ends the waiting.
    pending: list[Future[Any]] = [f for f in job.in_flight if not f.done()]
    noted = False
    while pending and not job.stop_requested():
        wait(pending, timeout=0.5)
        pending = [f for f in pending if not f.done()]
        wait_note = job.reward.waiting_for() if pending and not noted else None
        if wait_note is not None:
            job.tracker.screen.health(wait_note)
            noted = True
    job.in_flight.clear()
    job.reward.pop_metrics()  # counts of a step that will be repeated


def _restart_from_scratch(job: Job, initial: tuple[dict[str, Any], dict[str, Any]]) -> RunState:
    """Restore the initial states of order and reward; return the state of the first step."""
    job.order.load_state_dict(initial[0])
    job.reward.load_state_dict(initial[1])
    job.tracker.resume_at(0)
    return RunState(kl_coef=job.config.algorithm.kl_ctrl.kl_coef)


def interrupt_run(job: Job, reason: str) -> Interrupted:
    """Return the error of a run that cannot go on, with what is saved and how to resume."""
    saved = job.store.newest_step()
    progress = f"Step {saved} of {job.total_steps} is saved." if saved else "Nothing is saved yet."
    return Interrupted(f"{reason} {progress} Go on with: {job.resume_command}")


@dataclass
class EngineFactory:
    """Builds the engine of a run, and another one after a loss."""

    config: Config
    insists_on_transfer: bool  # rollout.weight_transfer was set, not chosen
    tokenizer: Any
    prompts: Sequence[Prompt]
    order: PromptOrder
    total_steps: int
    logs: Path
    tell: Callable[[str], None]
    stop_requested: Callable[[], str | None]
    # The Ray cluster of several nodes; None: start one if it is needed.
    address: str | None = None
    episodes: Episodes | None = None
    weight_transfer: str | None = field(default=None, init=False)  # to vLLM, as it has worked
    _engine: Engine | None = field(default=None, init=False)
    _base: Any = field(default=None, init=False)  # without episodes and async rollouts
    # Rewards ask for hosts in other threads, perhaps while an engine is rebuilt.
    _lock: RLock = field(default_factory=RLock, init=False)

    def get(self) -> Engine:
        """Return the engine; the first call builds it."""
        with self._lock:
            if self._engine is None:
                self.tell(f"Loading {self.config.model.path}")
                self._base = self._build_engine()
                # Episodes wrap the engine of the run, and async rollouts wrap them.
                engine: Engine = self._base
                if self.episodes is not None:
                    from ppo_cli.environments.episodes import EpisodeEngine

                    engine = EpisodeEngine(engine, self.episodes)
                if steps := self.config.trainer.async_steps:
                    from ppo_cli.engine.async_rollout import AheadEngine

                    tokens = self.config.rollout.partial_tokens
                    engine = AheadEngine(engine, self._upcoming, steps, tokens)
                self._engine = engine
            return self._engine

    def renew(self) -> Engine:
        """Build another engine to replace a lost one."""
        with self._lock:
            self.close()
            return self.get()

    def close(self) -> None:
        """Close the engine, if there is one."""
        # Closed once, even if closing raises.
        engine, self._engine, self._base = self._engine, None, None
        if engine is not None:
            engine.close()

    def hosts_rewards(self) -> bool:
        """Whether reward models run in separate workers."""
        return self.config.trainer.engine != "local"

    def host(self, factory: Callable[[], Any], name: str) -> Host:
        """Build an object in a worker of the cluster; return its proxy."""
        with self._lock:
            self.get()
            devices = placement_of(self.config).reward
            hosted: Host = self._base.host(factory, role=f"reward {name}", devices=devices)
            return hosted

    def _build_engine(self) -> Engine:
        """Build the engine that the settings ask for: in this process, or under Ray."""
        if self.config.trainer.engine == "local":
            return LocalEngine(
                self.config, self.tokenizer, total_steps=self.total_steps, tell=self.tell,
                profiles=self.logs.absolute().parent / "profile",
            )  # fmt: skip
        # Several processes, under Ray.
        placement = placement_of(self.config)
        if placement.nodes > 1 and placement.devices_per_node:
            network = find_network(os.environ)
            self.tell(f"Between nodes: {network.text}" + (network.advice and " (ppo doctor)"))
        from ppo_cli.cluster.driver import DriverEngine

        engine = DriverEngine(
            self.config,
            self.tokenizer,
            total_steps=self.total_steps,
            placement=placement,
            logs=self.logs,
            address=self.address,
            insists_on_transfer=self.insists_on_transfer,
            tell=self.tell,
            stop_requested=self.stop_requested,
        )
        self.weight_transfer = engine.weight_transfer
        return engine

    def _upcoming(self, ahead: int) -> tuple[Sequence[Prompt], Sampling] | None:
        """Return prompts and sampling of a future training step; None after the last step."""
        step = self.order.batches_taken + ahead
        if step > self.total_steps:
            return None
        chosen = pick(self.prompts, self.order.peek(ahead))
        return chosen, train_sampling(self.config, step)


class Cluster(Protocol):
    """The nodes of a run on several machines."""

    address: str

    def wait_until_whole(self, *, stop_requested: Callable[[], str | None]) -> None:
        """Return when all nodes are connected; raise WorkerLost if one does not come back."""
        ...

    def stop_asked(self) -> str | None:
        """Return the signal that asked another node to stop, if any."""
        ...


def train(plan: RunPlan, screen: Screen, cluster: Cluster | None = None) -> None:
    """Run a training from the first check to the summary."""
    trainer, reward = plan.settings.trainer, plan.settings.reward
    with send_alerts(trainer.alert, reward, user_path(trainer.output_dir), screen) as screen:
        # A run that went back is resumed as after a kill, so that it is the same to the bit.
        while _goes_back(plan, screen, cluster):
            if plan.settings.trainer.resume_mode != "auto":
                plan = plan.amend({"trainer.resume_mode": "auto"}, WENT_BACK)


def _goes_back(plan: RunPlan, screen: Screen, cluster: Cluster | None) -> bool:
    """Start or resume a run; return whether it went back, and not to its end."""
    with open_run(plan, screen, cluster) as (job, begin, stop, restarts):
        try:
            run_with_restarts(job, begin, **restarts)
        except WentBack as restrained:
            screen.health(str(restrained), "restrained")
            if reason := stop.reason():
                command = job.resume_command
                raise Interrupted(f"Stopped ({reason}). Go on with: {command}") from None
            return True
        _show_summary(screen, job, user_path(job.config.trainer.output_dir))
    return False


@dataclass(frozen=True)
class Start:
    """What one start of a run reads before any engine or reward exists.

    `checkpoint` is the newest one of the run folder, or that of --resume; `changed` describes how
    its run differs from this one (for that of --resume: in what a checkpoint depends on), and is
    empty if it does not.
    """

    folder: RunFolder
    store: CheckpointStore
    plan: RunPlan
    tokenizer: Any
    prompts: Sequence[Prompt]
    val_prompts: Sequence[Prompt]
    order: PromptOrder
    identity: dict[str, Any]
    total_steps: int
    checkpoint: Path | None
    changed: str

    @property
    def config(self) -> Config:
        """The settings that hold."""
        return self.plan.settings

    @property
    def resume_from(self) -> Path | None:
        """The checkpoint to continue from, if there is one."""
        return None if self.changed else self.checkpoint

    @property
    def replaces_run(self) -> bool:
        """Whether an earlier run in the folder is set aside: --resume never, or other settings."""
        return self.config.trainer.resume_mode == "never" or bool(self.changed)


def prepare(folder: RunFolder, plan: RunPlan, screen: Screen) -> Start:
    """Read prompts and the last checkpoint, and decide whether the run continues or is new."""
    config = plan.settings
    store = CheckpointStore(folder.checkpoints, config.trainer.kept_checkpoints)
    checkpoint = find_resume(store, config.trainer.resume_mode)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    render_all = checkpoint is not None and not is_by_files(checkpoint)
    prompts, val_prompts = load_prompt_sets(config, tokenizer, screen, render_all=render_all)
    mini = config.actor.ppo_mini_batch_size
    if problem := describe_missing_rows(config.data, mini, len(prompts)):
        raise DataError(problem)
    order = PromptOrder(
        len(prompts),
        config.data.gen_batch_size,
        config.trainer.seed,
        config.data.shuffle,
        fingerprint=fingerprint_of(prompts),
    )
    identity = run_identity(config, prompts, val_prompts)
    command, changed = _resume_command(plan.resolved), ""
    # A run that went back to its start has no checkpoint.
    if checkpoint or (config.trainer.resume_mode == "auto" and read_restraints(folder.path)):
        # What the run decided holds here too; `free` are settings that cannot be kept here.
        kept, free, notes = keep_decisions(
            plan, checkpoint.parents[1] if checkpoint else folder.path, step_of(checkpoint)
        )
        same = run_identity(kept.settings, prompts, val_prompts)
        bound = {key: value for key, value in same.items() if key not in free}
        changed = find_changes(
            checkpoint, kept.settings.trainer, kept.settings.pretrain_steps, bound, command
        )
        if not changed:
            if checkpoint:
                require_resumable(checkpoint, command)
                kept = restore_second_judge(kept, checkpoint, screen.note)
            plan, identity = kept, same
            screen.note_all(notes)
    trainer = plan.settings.trainer
    return Start(
        folder, store, plan, tokenizer, prompts, val_prompts, order, identity,
        # --max_steps wins over --epochs.
        trainer.total_training_steps or trainer.total_epochs * order.steps_per_epoch,
        checkpoint, changed,
    )  # fmt: skip


def reward_for(
    settings: RewardSettings, prompts: Sequence[Prompt], host: HostMaker | None
) -> Reward:
    """Return the reward of the settings for these prompts."""
    return build_reward(settings, sources=data_sources(prompts), host=host)


@contextmanager
def open_run(
    plan: RunPlan, screen: Screen, cluster: Cluster | None = None,
    make_reward: MakeReward = reward_for,
) -> Iterator[tuple[Job, Callable[[Job], RunState], StopOnSignal, dict[str, Any]]]:  # fmt: skip
    """Lock the run folder and build a run; close all of it at the end.

    Yields the job, the function that loads its state, its signals, and the arguments of
    `run_with_restarts`.
    """
    config = plan.settings
    if "RAY_ADDRESS" not in os.environ:  # in a running cluster each worker checks its node
        require_gpus(plan.resolved.machine, config.trainer.n_gpus_per_node)
    gc.freeze()  # loaded modules are not scanned for garbage in every step
    # An empty folder of a run that failed at the start is removed again.
    folder = RunFolder(user_path(config.trainer.output_dir))
    try:
        folder.prepare()
        copy = mirrored(
            config.trainer.store, folder, screen.note, _resume_command(plan.resolved, begun=False)
        )
        # Everything that is opened is closed at the end, the engine last.
        with folder.alone(), copy, ExitStack() as closing:
            start = prepare(folder, plan, screen)
            config = start.config
            stop = _stop_on_signal(screen, cluster)
            episodes = None
            if config.environment.is_set:
                from ppo_cli.run.episodes import start_episodes

                episodes = start_episodes(config, start.tokenizer, folder.logs, closing)
            engines = EngineFactory(
                config, "rollout.weight_transfer" not in start.plan.why, start.tokenizer,
                start.prompts, start.order, start.total_steps,
                logs=folder.logs, tell=screen.note, stop_requested=stop.reason,
                address=cluster.address if cluster else None,
                episodes=episodes,
            )  # fmt: skip
            closing.callback(engines.close)
            restarts: dict[str, Any] = {
                "max_restarts": config.trainer.max_restarts,
                "gather": partial(cluster.wait_until_whole, stop_requested=stop.reason)
                if cluster
                else lambda: None,
            }
            job = _open_job(start, engines, stop, screen, closing, restarts, make_reward)
            begin = partial(_load_initial_state, resume_from=start.resume_from, screen=screen)
            yield job, begin, stop, restarts | {"build": engines.renew, "origin": start.resume_from}
    except UserError:
        folder.drop_if_empty()
        raise
    finally:
        forget_signals()  # a notebook may go on


def _open_job(
    start: Start, engines: EngineFactory, stop: StopOnSignal, screen: Screen, closing: ExitStack,
    restarts: Mapping[str, Any], make_reward: MakeReward,
) -> Job:  # fmt: skip
    """Start the reward and the engine, then claim the run folder; `closing` ends all of them."""
    config, folder = start.config, start.folder
    # The reward first: a wrong key or address is cheap to find. (A reward model on a worker of the
    # engine starts the engine as well.)
    all_prompts = join_prompts(start.prompts, start.val_prompts)
    host = engines.host if engines.hosts_rewards() else None
    reward = make_reward(config.reward, all_prompts, host)
    closing.callback(reward.close)
    if not start.replaces_run:
        reward.attach(folder.path)  # the budget includes the spending of earlier starts
    wishes = _start_reward(reward, all_prompts, start, screen)
    # A cluster's start handles a first signal itself; while one process loads, Ctrl-C ends it.
    if engines.hosts_rewards():
        closing.enter_context(stop)
    engine = start_engine(
        engines.get, **restarts, patience_s=config.trainer.node_timeout,
        tell=screen.health, resume_command=_resume_command(start.plan.resolved, begun=False),
    )  # fmt: skip
    # The planned way of weights may have failed: a restart does not try it again.
    if engines.weight_transfer not in (None, config.rollout.weight_transfer):
        used = {"rollout.weight_transfer": engines.weight_transfer}
        start = replace(start, plan=start.plan.amend(used, "the planned way failed at the start"))
        config = engines.config = start.config
    # Everything has started: from here on the run folder belongs to this run.
    planned = start.plan
    cpu = cpu_plan(
        planned.resolved.requested.model, config.model, config.trainer, jemalloc=has_jemalloc()
    )
    # How this machine computes: for config.yaml, and for the screen with --debug.
    details = [f"Memory: {line}" for line in planned.memory.facts.get("choices", ())]
    details += [f"CPU: {line}" for line in cpu]
    screen.note_all(details if screen.debug else ())
    _claim_folder(start, screen, details)
    # Not before: the spending of the earlier run has just been set aside with it.
    if start.replaces_run:
        reward.attach(folder.path)
    tracker = Tracker(folder.path, screen, config.trainer.logger, start.total_steps, config, wishes)
    closing.callback(tracker.close)
    # One process has loaded: from here on the first Ctrl-C saves.
    if not engines.hosts_rewards():
        closing.enter_context(stop)
    return Job(
        config=config,
        engine=engine,
        reward=reward,
        prompts=start.prompts,
        val_prompts=start.val_prompts,
        order=start.order,
        tracker=tracker,
        store=start.store,
        pad_token_id=pad_token_id(start.tokenizer, vocabulary_size(config.model.path)),
        total_steps=start.total_steps,
        decode=partial(decode_text, start.tokenizer),
        diagnose=partial(explain_no_reward, look=commands(folder.path, config.data.train_files)),
        stop_requested=stop.reason,
        resume_command=_resume_command(start.plan.resolved),
        fingerprint=start.identity,
    )


def _claim_folder(start: Start, screen: Screen, details: Sequence[str]) -> None:
    """Set an earlier run aside, unless this one continues it; write what describes this one."""
    folder, resume_from = start.folder, start.resume_from
    fork = read_fork(folder.path)
    resumes = start.config.trainer.resume_mode == "auto" and not start.replaces_run
    if resumes and (evidence := go_back(folder.path, start.store.delete_after)):
        screen.note(f"The steps that the run went back from are in {evidence}.")
    if resume_from is None or resume_from.resolve().parent != folder.checkpoints.resolve():
        # Without a checkpoint, the same command again is the same run: its spending counts.
        lasting = (SPENT,) if resume_from else (SPENT, RESTRAINTS_FILE)
        earlier = folder.set_aside(spared=() if start.replaces_run else lasting)
        if earlier and start.changed:
            checkpoint = start.checkpoint
            moved = earlier / "checkpoints" / checkpoint.name if checkpoint else None
            screen.note(describe_new_run(start.changed, earlier, moved, start.identity))
        # The run goes on from a checkpoint of another one, or is a new one.
        match = resume_from and STEP_NAME.match(resume_from.name)
        fork = (resume_from.parents[1], int(match[1])) if resume_from and match else None
    end_return(folder.path)  # somebody has named a checkpoint of this run to go on from
    head = f"{WRITTEN_BY}{describe_machine()}\n" + (FORK_LINE.format(*fork) if fork else "")
    head += "".join(f"# {line}\n" for line in details)
    # The files of the judges may change later, and relative paths to them lead nowhere elsewhere.
    if judges := judges_of(start.config.reward):
        from ppo_cli.rewards.judge.prompt import describe_request

        requests = ({"part": j.part} | describe_request(j.settings, time.time()) for j in judges)
        replace_lines(folder.path / JUDGES_FILE, requests)
    folder.write_config(head + config_yaml(start.plan.resolved, start.config, start.plan.why))
    folder.write_plan(start.plan.as_dict())


def _show_summary(screen: Screen, job: Job, run_dir: Path) -> None:
    """Show the summary; raises UserError if no response was scored."""
    history, command = job.tracker.history, job.resume_command
    refuse_unscored(history, run_dir, command)
    session = job.tracker.session
    screen.summary(summarise(history, run_dir, job.config, session=session, resume_command=command))


def _stop_on_signal(screen: Screen, cluster: Cluster | None) -> StopOnSignal:
    def tell(name: str) -> None:
        named, how = ("Ctrl-C", "Press") if name == "SIGINT" else (name, "Send it")
        screen.note(
            f"{named}: will save and stop; a step that is not sampled and scored within "
            f"{LEAVE_S:g} s is undone, an update ends first. {how} again to stop immediately."
        )

    return StopOnSignal(tell, cluster.stop_asked if cluster else lambda: None)


def _start_reward(
    reward: Reward, prompts: Sequence[Prompt], start: Start, screen: Screen
) -> Iterable[Wish]:  # fmt: skip
    """Start the reward; an interruption gets the command to continue with.

    Returns the features that the reward asks for, as a judge reads its prompts and rubrics.
    """
    config = start.config
    reward.set_labelled(read_labelled_rollouts(config.reward))
    reward.begin_run(RunLength(start.total_steps, start.order.steps_per_epoch))
    try:
        reward.start(prompts, patient=start.resume_from is not None, tell=screen.note)
        if find_asked_judge(config.reward) is None:
            return ()
        text = read_requests(config.reward)
        return (reward.read_wishes(text, FEATURES, screen.note) or {}).items()
    except (Interrupted, WorkerLost) as stop:
        command = _resume_command(start.plan.resolved, begun=False)
        if isinstance(stop, Interrupted):
            history = [] if start.replaces_run else read_metrics(start.folder.path)
            rows = len(start.val_prompts)
            command = extend_budget(command, stop, config, history, start.total_steps, rows)
        raise Interrupted(f"{stop} Go on with: {command}") from stop


def _load_initial_state(job: Job, resume_from: Path | None, screen: Screen) -> RunState:
    """Return the state to start from, with a note on it if it is not the first step."""
    if resume_from is None:
        return RunState(kl_coef=job.config.algorithm.kl_ctrl.kl_coef)
    state = load(job, resume_from)
    if state.step >= job.total_steps and state.unfinished is None:
        screen.note(
            f"This run is complete: {state.step} of {job.total_steps} steps. To go on, raise "
            "--max_steps or --epochs; to start again, use --resume never or another --output_dir."
        )
        return state
    # Another --lr is another run. A rate jumps where the run is now longer, or where --resume names
    # a checkpoint.
    optims = job.config.actor.optim, job.config.critic.optim
    jumps = find_lr_jumps(*optims, resume_from, job.total_steps)
    screen.note("; ".join([f"Going on after step {state.step}, from {resume_from}", *jumps]))
    return state


def load_prompt_sets(
    config: Config, tokenizer: Any, screen: Screen, *, render_all: bool = True
) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """Read training and validation prompts, and show the notes on them.

    Without `render_all`, many training prompts become a table: their rows are checked now, and
    rendered when a step takes them.
    """

    def read(split: DataSplit) -> Sequence[Prompt]:
        files, max_rows = split_files(config.data, split)
        in_full = render_all or split == "val"
        prompt_set = read_prompts(config, tokenizer, files, max_rows, render_all=in_full)
        screen.note_all(prompt_set.notes)
        return prompt_set.prompts if split == "train" else mark_validation(prompt_set.prompts)

    return read("train"), read("val") if config.data.val_files else ()


def read_prompts(
    config: Config, tokenizer: Any, files: Sequence[str], max_rows: int, *, render_all: bool = True
) -> PromptSet:
    """Read at most `max_rows` rows of prompt files, as the settings say; -1 is all."""
    return load_prompts(
        files,
        tokenizer,
        **config.data.keys,
        keep_columns=any(rules.function for rules in rules_of(config.reward)),
        max_samples=max_rows,
        render_all=render_all,
        vocabulary_size=vocabulary_size(config.model.path),
        **prompt_settings(config.data),
    )


def prompt_settings(data: Data) -> dict[str, Any]:
    """Return the settings that turn prompts into the model's input."""
    return {
        "max_prompt_length": data.max_prompt_length,
        "truncation": data.truncation,
        "filter_overlong": data.filter_overlong_prompts,
        "system_prompt": data.system_prompt,
        "apply_chat_template": data.apply_chat_template,
        "template_arguments": data.apply_chat_template_kwargs,
    }


def _resume_command(resolved: Resolved, *, begun: bool = True) -> str:
    """Return the command line that continues this run, or the call of the Python function.

    After the run has begun, `--resume auto` replaces an older checkpoint or "never".
    """
    # Where the run went back, the command line still has what was typed.
    went_back = resolved.origins["trainer.resume_mode"] == WENT_BACK
    elsewhere = went_back or (begun and resolved.config.trainer.resume_mode != "auto")
    if resolved.function:
        call = f"{SAME_CALL}{resolved.function}()"
        return replace_flag(call, "--resume", "auto") if elsewhere else call
    # Settings from variables are included: another shell may not have them.
    names = sorted({o.removeprefix("env ") for o in resolved.origins.values() if o[:4] == "env "})
    variables = [f"{n}={shlex.quote(os.environ[n])}" for n in names if n in os.environ]
    arguments = [*shlex.split(ppo()), *sys.argv[1:]]
    if elsewhere:
        # "never" or an older checkpoint would discard what is saved by now.
        arguments = [w for w in arguments if not w.startswith("trainer.resume_mode=")]
        arguments += ["--resume", "auto"]
    return redact(" ".join([*variables, shlex.join(arguments)]))
