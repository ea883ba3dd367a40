"""From a config to a running job: construction only, cheapest checks first; engines and restarts.

An engine is made when it is first needed. After a loss, `renew` gives a new one and the run
continues from its last checkpoint. A reward model that lives in the cluster is hosted by the
current engine.
"""

from __future__ import annotations

import gc
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from threading import RLock
from typing import Any, Protocol

from ppo_cli import __version__
from ppo_cli.allocator import has_jemalloc
from ppo_cli.config.checks.judge_server import with_judge_devices
from ppo_cli.config.derived import DataSplit, describe_missing_rows, gen_batch, split_files
from ppo_cli.config.layers import Resolved
from ppo_cli.config.memory.plan import cpu_plan, fill_dtype, fill_memory_settings
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.folder import vocabulary_size
from ppo_cli.config.placement import engine_name, gpus_per_node, placement_of
from ppo_cli.config.plan import config_yaml, restore_second_judge
from ppo_cli.config.schema.run import Config, Data
from ppo_cli.data_sets.prompts import PromptOrder, PromptSet, fingerprint, load_prompts
from ppo_cli.digests import NAMED_IN, require_resumable
from ppo_cli.engine.async_rollout import AheadEngine
from ppo_cli.engine.base import Engine, Sampling
from ppo_cli.engine.device import require_gpus
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.models import load_tokenizer as _load_tokenizer
from ppo_cli.engine.models import pad_token_id
from ppo_cli.engine.samplers.text import decode_text
from ppo_cli.errors import DataError, Interrupted, UserError, WorkerLost, ppo
from ppo_cli.loop import load, run
from ppo_cli.records import Prompt, Scored
from ppo_cli.redact import redact
from ppo_cli.report.loggers import check_loggers
from ppo_cli.report.metrics import lr_jumps, refuse_unscored, resume_line, summarise
from ppo_cli.report.tracker import Screen, Tracker
from ppo_cli.rewards.base import Host, Reward
from ppo_cli.rewards.diagnosis import commands, explain_no_reward
from ppo_cli.rewards.registry import build_reward
from ppo_cli.run.identity import differences, run_identity
from ppo_cli.run.network import find_network
from ppo_cli.run_folder import (
    WRITTEN_BY,
    CheckpointStore,
    RunFolder,
    find_resume,
    read_metrics,
)
from ppo_cli.scoring.sources import read_labelled_rollouts
from ppo_cli.signals import StopOnSignal
from ppo_cli.step.stages import Job, RunState, train_sampling

Build = Callable[[], Engine]


def machine() -> str:
    """The versions that a run computes with, and the machine that it starts on."""
    import torch

    versions = [f"ppo-cli {__version__}", f"Python {platform.python_version()}"]
    for package in ("torch", "transformers", "ray", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    gpus = torch.cuda.device_count()
    devices = f"{os.cpu_count()} CPUs, {gpus} GPUs" if gpus else f"{os.cpu_count()} CPUs"
    return f"{', '.join(versions)} on {platform.platform()}, {devices}"


def run_with_restarts(
    job: Job,
    begin: Callable[[Job], RunState | None],
    *,
    build: Build,
    most: int,
    gather: Callable[[], None] = lambda: None,
    origin: Path | None = None,
) -> None:
    """Run to the end, with at most `most` new starts.

    `begin` gives the state to start from, None when there is nothing to do. Once a lost engine
    is closed, `gather` waits until all nodes are there again, and `build` makes another; both
    may raise WorkerLost. Without a checkpoint of its own the run begins again at `origin`, the
    one that it started from, or at the first step. Raises Interrupted when there are too many
    losses, or when what was lost does not come back.
    """
    begun = job.order.state_dict(), job.reward.state_dict()
    lost: WorkerLost | None = None
    for restarts in range(most + 1):
        try:
            if lost is None:
                state = begin(job)
            else:
                newest = job.store.newest() or origin
                if newest is not None:
                    require_resumable(newest, job.resume_command)
                where = f"{newest.name}, the last checkpoint" if newest else "the first step"
                again = f"Starting again ({restarts} of {most}) from {where}."
                job.tracker.screen.health(_then(lost, again))
                _leave(job)
                job = replace(job, engine=_make_another(job, gather, build))
                state = _begin_again(job, begun) if newest is None else load(job, newest)
            return None if state is None else run(job, state)
        except WorkerLost as error:
            lost = error
    more = f"That is one loss more than --max_restarts {most} allows."
    raise _given_up(job, _then(lost, more)) from lost


def start_engine(
    build: Build,
    *,
    most: int,
    patience_s: float,
    gather: Callable[[], None],
    tell: Callable[[str], None],
    resume_command: str,
) -> Engine:
    """Make the first engine; a worker that dies meanwhile costs another start, as later.

    What takes longer than `patience_s` to fail is not tried again: it waited for something
    that does not come.
    """
    for restarts in range(most + 1):
        started = time.monotonic()
        try:
            return build()
        except Interrupted as stop:
            raise Interrupted(f"{stop} Start again with: {resume_command}") from stop
        except WorkerLost as lost:
            if restarts == most or time.monotonic() - started > patience_s:
                raise Interrupted(_then(lost, f"Start again with: {resume_command}")) from lost
            tell(_then(lost, f"Starting again ({restarts + 1} of {most})."))
            gather()
    raise AssertionError("every turn ends above")


def _then(lost: WorkerLost | None, more: str) -> str:
    """What was lost, and what comes of it: on a line of its own after lines of a log."""
    text = str(lost)
    return f"{text}\n{more}" if "\n" in text else f"{text} {more}"


def _make_another(job: Job, gather: Callable[[], None], build: Build) -> Engine:
    try:
        gather()
    except (WorkerLost, Interrupted) as gone:
        raise _given_up(job, str(gone)) from gone
    try:
        return build()
    except Interrupted as stop:
        raise _given_up(job, str(stop)) from stop


def _leave(job: Job) -> None:
    """Close the engine, and wait for the scores that are still pending.

    They are paid for and wait in the judge's cache; and they must not reach the statistics of
    a reward after those were put back.
    """
    job.engine.close()
    job.reward.end_round("train")
    pending: list[Future[Any]] = [f for f in job.in_flight if not f.done()]
    noted = False
    while pending and not job.stop_requested():
        wait(pending, timeout=0.5)
        pending = [f for f in pending if not f.done()]
        still = job.reward.waiting_for() if pending and not noted else None
        if still is not None:
            job.tracker.screen.health(still)
            noted = True
    job.in_flight.clear()
    job.reward.pop_metrics()  # counts of a step that is taken again


def _begin_again(job: Job, begun: tuple[dict[str, Any], dict[str, Any]]) -> RunState:
    job.order.load_state_dict(begun[0])
    job.reward.load_state_dict(begun[1])
    job.tracker.resume_at(0)
    return RunState(kl_coef=job.config.algorithm.kl_ctrl.kl_coef)


def _given_up(job: Job, reason: str) -> Interrupted:
    saved = job.store.newest_step()
    kept = f"Step {saved} of {job.total_steps} is saved." if saved else "Nothing is saved yet."
    return Interrupted(f"{reason} {kept} Go on with: {job.resume_command}")


@dataclass
class Engines:
    """Makes the engine of a run, and makes it anew when it was lost."""

    config: Config
    tokenizer: Any
    prompts: Sequence[Prompt]
    order: PromptOrder
    total_steps: int
    logs: Path
    tell: Callable[[str], None]
    stop_requested: Callable[[], str | None]
    # The Ray cluster that several nodes have formed; None starts one where it is needed.
    address: str | None = None
    _engine: Engine | None = field(default=None, init=False)
    _base: Any = field(default=None, init=False)  # the engine without what runs ahead
    # Rewards ask for their hosts in threads of their own, perhaps while an engine is made anew.
    _lock: RLock = field(default_factory=RLock, init=False)

    def get(self) -> Engine:
        """The engine; made at the first call."""
        with self._lock:
            if self._engine is None:
                self.tell(f"Loading {self.config.model.path}")
                self._base = self._make()
                self._engine = self._ahead(self._base)
            return self._engine

    def renew(self) -> Engine:
        """Another engine in the place of one that was lost."""
        with self._lock:
            self.close()
            return self.get()

    def close(self) -> None:
        """Close the engine, if there is one."""
        engine, self._engine, self._base = self._engine, None, None
        if engine is not None:
            engine.close()

    def hosts_rewards(self) -> bool:
        """Whether reward models live in workers of their own."""
        return engine_name(self.config) == "ray"

    def host(self, factory: Callable[[], Any], name: str) -> Host:
        """Let the cluster make an object and keep it."""
        with self._lock:
            self.get()
            devices = placement_of(self.config).reward
            hosted: Host = self._base.host(factory, role=f"reward {name}", devices=devices)
            return hosted

    def _make(self) -> Engine:
        self.config = fill_memory_settings(self.config, self.tell)
        for line in cpu_plan(self.config, jemalloc=has_jemalloc()):
            self.tell(f"CPU: {line}")
        if engine_name(self.config) == "local":
            return LocalEngine(
                self.config, self.tokenizer, total_steps=self.total_steps, tell=self.tell,
                profiles=self.logs.absolute().parent / "profile",
            )  # fmt: skip
        placement = placement_of(self.config)
        if placement.nodes > 1 and placement.devices_per_node:
            network = find_network(os.environ)
            self.tell(f"Between nodes: {network.found}" + (network.repair and " (ppo doctor)"))
        from ppo_cli.cluster.driver import ApartEngine

        engine = ApartEngine(
            fill_dtype(self.config),
            self.tokenizer,
            total_steps=self.total_steps,
            placement=placement,
            logs=self.logs,
            address=self.address,
            tell=self.tell,
            stop_requested=self.stop_requested,
        )
        if engine.weight_transfer == "memory":  # another start need not try what failed here
            rollout = self.config.rollout.model_copy(update={"weight_transfer": "memory"})
            self.config = self.config.model_copy(update={"rollout": rollout})
        return engine

    def _ahead(self, engine: Engine) -> Engine:
        steps, partial = self.config.trainer.async_steps, self.config.rollout.partial_tokens
        return AheadEngine(engine, self._upcoming, steps, partial) if steps else engine

    def _upcoming(self, ahead: int) -> tuple[Sequence[Prompt], Sampling] | None:
        """Prompts and sampling of a training step that is still to come."""
        step = self.order.taken + ahead
        if step > self.total_steps:
            return None
        chosen = [self.prompts[i] for i in self.order.peek(ahead)]
        return chosen, train_sampling(self.config, step)


def load_tokenizer(path: str, *, trust_remote_code: bool = False, flag: str = "--model") -> Any:
    """Load the tokenizer of a model folder or hub name; `embedded` is the bundled model."""
    return _load_tokenizer(model_folder(path), trust_remote_code=trust_remote_code, flag=flag)


class Cluster(Protocol):
    """The nodes of a run that more than one machine shares."""

    address: str

    def wait_until_whole(self, *, stop_requested: Callable[[], str | None]) -> None:
        """Return when all nodes are there; raises WorkerLost when one does not come back."""
        ...

    def stop_asked(self) -> str | None:
        """The signal that asked another node to stop, if one did."""
        ...


def train(resolved: Resolved, screen: Screen, cluster: Cluster | None = None) -> None:
    """Run what the config asks for, from the first check to the summary."""
    config = resolved.config
    if "RAY_ADDRESS" not in os.environ:  # of a running cluster each worker looks at its node
        require_gpus(gpus_per_node(config))
    gc.freeze()  # the modules loaded by now are not searched for garbage at every step
    check_loggers(config.trainer.logger)
    folder = RunFolder(Path(config.trainer.output_dir).expanduser())
    try:
        folder.prepare()
        with folder.alone():
            _train_in(folder, resolved, screen, cluster)
    except UserError:
        folder.drop_if_empty()
        raise


def _train_in(
    folder: RunFolder, resolved: Resolved, screen: Screen, cluster: Cluster | None
) -> None:
    config = resolved.config
    store = CheckpointStore(folder.checkpoints, config.trainer.max_ckpt_to_keep)
    resume_from = find_resume(store, config.trainer.resume_mode)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    prompts, val_prompts = _load_prompt_sets(config, tokenizer, screen)
    order = _prompt_order(config, prompts)
    identity = run_identity(config, prompts, val_prompts)
    other = _changes_since(resume_from, resolved, identity)
    begun, resume_from = resume_from, None if other else resume_from
    config = (resolved := restore_second_judge(resolved, resume_from, screen.note)).config
    total_steps = config.trainer.total_training_steps or (
        config.trainer.total_epochs * order.steps_per_epoch
    )
    with ExitStack() as closing:
        stop = _stop_on_signal(screen, cluster)
        engines = Engines(
            config, tokenizer, prompts, order, total_steps, logs=folder.logs, tell=screen.note,
            stop_requested=stop.reason, address=cluster.address if cluster else None,
        )  # fmt: skip
        closing.callback(engines.close)
        asked = [*prompts, *val_prompts]
        reward = build_reward(
            with_judge_devices(config),
            sources={prompt.data_source for prompt in asked},
            host=engines.host if engines.hosts_rewards() else None,
        )
        closing.callback(reward.close)
        afresh = config.trainer.resume_mode == "never" or bool(other)
        if not afresh:
            reward.attach(folder.path)  # what earlier starts spent counts from the first call
        done_of = ([] if afresh else read_metrics(folder.path), total_steps, len(val_prompts))
        _start_reward(reward, asked, resume_from is not None, screen, resolved, done_of)
        resume_command = _resume_command(resolved)
        losses: dict[str, Any] = {
            "most": config.trainer.max_restarts,
            "gather": partial(cluster.wait_until_whole, stop_requested=stop.reason)
            if cluster
            else lambda: None,
        }
        if engines.hosts_rewards():  # the start of a cluster handles a first signal itself
            closing.enter_context(stop)
        engine = start_engine(
            engines.get, **losses, patience_s=config.trainer.node_timeout,
            tell=screen.health, resume_command=_resume_command(resolved, begun=False),
        )  # fmt: skip
        if resume_from is None or resume_from.resolve().parent != folder.checkpoints.resolve():
            # Without a checkpoint, the same command again is the same run: it has spent already.
            earlier = folder.set_aside(all_of_it=afresh)
            if begun and earlier and other:
                screen.note(_new_run_note(other, earlier / "checkpoints" / begun.name, identity))
        if afresh:
            reward.attach(folder.path)
        folder.write_config(f"{WRITTEN_BY}{machine()}\n{config_yaml(resolved)}")
        tracker = Tracker(folder.path, screen, config.trainer.logger, total_steps, config)
        closing.callback(tracker.close)
        if not engines.hosts_rewards():
            closing.enter_context(stop)
        job = Job(
            config=config,
            engine=engine,
            reward=reward,
            prompts=prompts,
            val_prompts=val_prompts,
            order=order,
            tracker=tracker,
            store=store,
            pad_token_id=pad_token_id(tokenizer, vocabulary_size(config.model.path)),
            total_steps=total_steps,
            decode=partial(decode_text, tokenizer),
            diagnose=_diagnose(folder, config),
            stop_requested=stop.reason,
            resume_command=resume_command,
            fingerprint=identity,
        )
        begin = partial(_begin, resume_from=resume_from, screen=screen)
        run_with_restarts(job, begin, build=engines.renew, origin=resume_from, **losses)
        _say_the_end(screen, tracker, folder.path, config, resume_command)


def _diagnose(folder: RunFolder, config: Config) -> Callable[[Sequence[Scored]], str | None]:
    return partial(explain_no_reward, look=commands(folder.path, config.data.train_files))


def _say_the_end(
    screen: Screen, tracker: Tracker, run_dir: Path, config: Config, resume_command: str
) -> None:
    history, session = tracker.history, tracker.session
    refuse_unscored(history, run_dir, resume_command)
    screen.summary(
        summarise(history, run_dir, config, session=session, resume_command=resume_command)
    )


def _stop_on_signal(screen: Screen, cluster: Cluster | None) -> StopOnSignal:
    def tell(name: str) -> None:
        named, again = ("Ctrl-C", "Press") if name == "SIGINT" else (name, "Send it")
        screen.note(f"{named}: will save after this step. {again} again to stop immediately.")

    return StopOnSignal(tell, cluster.stop_asked if cluster else lambda: None)


def _start_reward(
    reward: Reward,
    prompts: Sequence[Prompt],
    patient: bool,
    screen: Screen,
    resolved: Resolved,
    done_of: tuple[Sequence[Mapping[str, Any]], int, int],
) -> None:
    reward.set_labelled(read_labelled_rollouts(resolved.config.reward))
    try:
        reward.start(prompts, patient=patient, tell=screen.note)
    except (Interrupted, WorkerLost) as stop:
        command = _resume_command(resolved, begun=False)
        if isinstance(stop, Interrupted):
            command = resume_line(command, stop, resolved.config, *done_of)
        raise Interrupted(f"{stop} Go on with: {command}") from stop


def _begin(job: Job, resume_from: Path | None, screen: Screen) -> RunState | None:
    """The state to start from; a run that is complete already says so and has none."""
    if resume_from is None:
        return RunState(kl_coef=job.config.algorithm.kl_ctrl.kl_coef)
    state = load(job, resume_from)
    if state.step >= job.total_steps and state.unfinished is None:
        screen.note(
            f"This run is complete: {state.step} of {job.total_steps} steps. To go on, raise "
            "--max_steps or --epochs; to start again, use --resume never or another --output_dir."
        )
        return None
    jumps = lr_jumps(job.config, resume_from, job.total_steps)
    screen.note("; ".join([f"Going on after step {state.step}, from {resume_from}", *jumps]))
    return state


def _load_prompt_sets(
    config: Config, tokenizer: Any, screen: Screen
) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    def read(split: DataSplit) -> Sequence[Prompt]:
        found = read_prompts(config, tokenizer, *split_files(config, split))
        for note in found.notes:
            screen.note(note)
        return found.prompts

    return read("train"), read("val") if config.data.val_files else ()


def read_prompts(config: Config, tokenizer: Any, files: Sequence[str], most: int) -> PromptSet:
    """Read prompt files as the settings say, at most so many rows; -1 is all."""
    return load_prompts(
        files,
        tokenizer,
        prompt_key=config.data.prompt_key,
        source_key=config.data.reward_fn_key,
        max_samples=most,
        vocabulary_size=vocabulary_size(config.model.path),
        **prompt_settings(config.data),
    )


def prompt_settings(data: Data) -> dict[str, Any]:
    """How prompts become what a model reads."""
    return {
        "max_prompt_length": data.max_prompt_length,
        "truncation": data.truncation,
        "filter_overlong": data.filter_overlong_prompts,
        "system_prompt": data.system_prompt,
        "apply_chat_template": data.apply_chat_template,
        "template_arguments": data.apply_chat_template_kwargs,
    }


def _prompt_order(config: Config, prompts: Sequence[Prompt]) -> PromptOrder:
    if said := describe_missing_rows(config, len(prompts)):
        raise DataError(said)
    return PromptOrder(
        len(prompts),
        gen_batch(config),
        config.trainer.seed,
        config.data.shuffle,
        fingerprint=fingerprint(prompts),
    )


def _changes_since(
    resume_from: Path | None, resolved: Resolved, identity: Mapping[str, Any]
) -> str:
    """Say in what the run that would go on differs.

    Raises UserError for a checkpoint of another run that was named, and for a damaged one.
    """
    if resume_from is None:
        return ""
    command = _resume_command(resolved)
    # Only an intact fingerprint can tell whether this is the same run.
    require_resumable(resume_from, command, NAMED_IN)
    by_name = resolved.config.trainer.resume_mode != "auto"
    other = differences(resume_from, identity, bound=by_name)
    if other and not by_name:
        return other
    if other:
        raise UserError(
            f"{resume_from} is of another run, which differs in {other}. Leave --resume out: a new "
            "run then starts, and the earlier one is kept."
        )
    require_resumable(resume_from, command)
    return ""


def _new_run_note(other: str, checkpoint: Path, identity: Mapping[str, Any]) -> str:
    """Say why a new run starts, where the one before is now, and how it goes on all the same."""
    text = f"A new run: the one before had another {other}. It is in {checkpoint.parents[1]}."
    if differences(checkpoint, identity, bound=True):
        return text
    return f"{text} To go on from there with the new settings: --resume {checkpoint}"


def _resume_command(resolved: Resolved, *, begun: bool = True) -> str:
    """The command line of this run, to be typed again: it goes on where the run stopped.

    Once it has begun, `--resume auto` takes the place of an older checkpoint or of "never".
    """
    # Variables count as settings too, and may be gone in another shell.
    names = sorted({o.removeprefix("env ") for o in resolved.origins.values() if o[:4] == "env "})
    variables = [f"{n}={shlex.quote(os.environ[n])}" for n in names if n in os.environ]
    words = [*shlex.split(ppo()), *sys.argv[1:]]
    if begun and resolved.config.trainer.resume_mode != "auto":
        # Once more "never" or an older checkpoint would throw away what is saved now.
        words = [w for w in words if not w.startswith("trainer.resume_mode=")]
        words += ["--resume", "auto"]
    return redact(" ".join([*variables, shlex.join(words)]))
