"""The seven verbs over N learner ranks and M samplers, each in a separate process.

Prompts are spread over samplers by a fixed rule, balanced by length.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ppo_cli.algo.batch import Annotations, Batch
from ppo_cli.cluster.members import (
    USE_MEMORY,
    Call,
    Cluster,
    ExchangePlan,
    Halved,
    WorkerHandle,
    no_answer,
)
from ppo_cli.cluster.ray_session import node_answers
from ppo_cli.cluster.worker_process import import_code, rendezvous_url
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import MiniBatch, Sampling, Sums, describe_halving, merge_sums
from ppo_cli.errors import ConfigError, UserError, WorkerLost, plural
from ppo_cli.planning.placement import Placement
from ppo_cli.records import Prompt, Rollout


def deal_prompts(
    prompts: Sequence[Prompt], samplers: int, max_tokens: int
) -> list[tuple[Prompt, ...]]:
    """Deal prompts, the longest first, each to the sampler with the least to do.

    The length of responses is not known yet, so each counts as `max_tokens`. Within a
    sampler the order stays; what is sampled does not depend on who does it.
    """
    hands = _deal([len(prompt.token_ids) + max_tokens for prompt in prompts], samplers)
    return [tuple(prompts[i] for i in sorted(hand)) for hand in hands]


def deal_unfinished(
    begun: Sequence[Rollout], samplers: int, sampling: Sampling
) -> list[tuple[Rollout, ...]]:
    """Return for each sampler unfinished rollouts of about the same cost.

    Rollouts of one prompt and seed, which began in the same round of sampling, stay together.
    """
    groups: dict[tuple[int, str], list[Rollout]] = {}
    for rollout in begun:
        groups.setdefault((rollout.seed, rollout.prompt.uid), []).append(rollout)
    dealt = list(groups.values())
    costs = [
        sum(
            len(rollout.prompt.token_ids) + sampling.length_limit(len(rollout.token_ids))
            for rollout in group
        )
        for group in dealt
    ]
    hands = _deal(costs, samplers)
    return [tuple(rollout for i in sorted(hand) for rollout in dealt[i]) for hand in hands]


def _deal(costs: Sequence[int], samplers: int) -> list[list[int]]:
    """Return for each sampler the indices of its prompts, so that the sums of costs are similar."""
    # Longest first, each to the sampler with the least work: close to the optimum.
    work = [0] * samplers
    hands: list[list[int]] = [[] for _ in range(samplers)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = min(range(samplers), key=lambda s: (work[s], s))
        hands[least].append(i)
        work[least] += costs[i]
    return hands


# The first rank waits for the samplers and knows which one failed. So it must give up first.
AFTER_RANK_S = 5.0


class Publisher:
    """Keeps the samplers' weights equal to the learner's; `sleepers` sleep while it trains.

    They wake in two parts: the weights before new ones are sent, and the cache, which is the larger
    part, before something is sampled. So a transfer, which needs memory itself, meets no cache.
    """

    def __init__(
        self,
        cluster: Cluster,
        learners: Sequence[WorkerHandle],
        samplers: Sequence[WorkerHandle],
        *,
        sleepers: Sequence[WorkerHandle],
    ) -> None:
        self._cluster = cluster
        self._learners = learners
        self._samplers = samplers
        self._sleepers = sleepers
        self._asleep: set[str] = set()  # parts of the sleepers: "weights", "cache"
        self._connected = False
        self._in_place = False  # samplers read the memory that the first rank writes

    def connect(self, plan: ExchangePlan) -> None:
        """Connect learner and samplers; from now on weights go directly between them."""
        self._call_learners_slowly("connect", plan)
        self._connected = True

    def wake(self) -> None:
        """Wake sleeping samplers and give them the current weights."""
        if "weights" in self._asleep:
            self.send()
        self._wake_part("cache")

    def sleep(self) -> None:
        """Free shared devices for the learner."""
        if self._sleepers and len(self._asleep) < 2:
            self._cluster.call(self._sleepers, "sleep")
            self._asleep = {"weights", "cache"}

    def send(self) -> None:
        """Send the current weights to all samplers."""
        if self._connected:
            self._wake_part("weights")
            self._call_learners_slowly("send_weights")
            return
        ask = self._cluster.ask
        calls = [ask(learner, "weights") for learner in self._learners]
        self._wake_part("weights")
        # A sampler's call begins when the first rank has stored the weights: only then may it be
        # late. Only a reference travels.
        self._cluster.waits.collect(calls)
        samplers = [] if self._in_place else self._samplers
        loads = [ask(sampler, "load_weights", "call", calls[0].ref) for sampler in samplers]
        self._in_place = self._in_place or all(self._cluster.waits.collect(loads))

    def _wake_part(self, part: str) -> None:
        if part in self._asleep:
            # On shared devices the learner's allocator must give back its unused memory first.
            self._call_learners_slowly("spare_memory")
            self._cluster.call(self._sleepers, f"wake_{part}")
            self._asleep.remove(part)

    def _call_learners_slowly(self, name: str, *args: object) -> None:
        # Learners wait for samplers in these calls, so the driver waits a little longer.
        limit = self._cluster.waits.timeout_s + AFTER_RANK_S
        self._cluster.call(self._learners, name, *args, seconds=limit)


# Classes that run in the workers, by name: this process does not import models.
WORKERS = "ppo_cli.cluster.workers"
LEARNER, SAMPLER = f"{WORKERS}:LearnerRole", f"{WORKERS}:SamplerRole"
POLL_S = 0.2
LOOPBACK = "127.0.0.1"


class ClusterEngine:
    """The workers of `DriverEngine`, which puts their rollouts and annotations together.

    It has no model itself. `cluster` may host other objects too.

    The tokenizer stays pickled here, because unpickling it would import transformers.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: bytes,
        *,
        total_steps: int,
        placement: Placement,
        logs: Path,
        address: str,
        insists_on_transfer: bool,
        tell: Callable[[str], None] = lambda text: None,
        stop_requested: Callable[[], str | None] = lambda: None,
    ) -> None:
        trainer = config.trainer
        self._config = config
        self._tokenizer = tokenizer
        self._total_steps = total_steps
        self._placement = placement
        self._weight_version = 0
        self.weight_transfer = config.rollout.weight_transfer
        self._insists_on_transfer = insists_on_transfer
        self._profiles = logs.absolute().parent / "profile"
        self._tell = tell
        self._room: list[int | None] = [None] * len(placement.rollout)
        self._one_node = placement.nodes == 1
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="ppo-save")
        self._learners: list[WorkerHandle] = []
        self._samplers: list[WorkerHandle] = []
        self.cluster = Cluster(
            placement, logs, threads=trainer.threads, address=address,
            worker_timeout=trainer.worker_timeout, node_timeout=trainer.node_timeout,
            tell=tell, stop_requested=stop_requested,
        )  # fmt: skip
        try:
            ranks = plural(len(placement.train), "learner rank")
            tell(f"Starting {ranks} and {plural(len(placement.rollout), 'sampler')}")
            self._start()
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, begun: Sequence[Rollout] = ()
    ) -> Iterator[list[tuple[str, Rollout]]]:
        """Yield rollouts without their prompts, as many together as came together."""
        self._publisher.wake()
        count = len(self._samplers)
        hands = zip(
            deal_prompts(prompts, count, sampling.max_tokens),
            deal_unfinished(begun, count, sampling),
            strict=True,
        )
        # One streaming call for each sampler that has something to do.
        calls: list[Call] = []
        for sampler, (new, old) in zip(self._samplers, hands, strict=True):
            if new or old:
                arguments = (new, sampling, self._weight_version, old)
                calls.append(self.cluster.ask(sampler, "generate", "stream", *arguments))
        # Items are rollouts without prompts and, between them, notes about memory.
        for sent in self.cluster.waits.stream(calls):
            for halved in (item for item in sent if isinstance(item, Halved)):
                self._room[halved.sampler] = halved.rows
                self._tell(describe_halving(halved.rows, f"Sampler {halved.sampler}"))
            yield [item for item in sent if not isinstance(item, Halved)]

    def annotate(self, batch: Batch) -> list[Annotations]:
        """The annotations of each rank's rows."""
        self._publisher.sleep()
        return self._call_learners("annotate", self.cluster.share(batch))

    def step(self, minibatch: MiniBatch) -> Sums:
        """Take one optimizer step on all ranks."""
        self._publisher.sleep()
        sums = merge_sums(self._call_learners("step", self.cluster.share(minibatch)))
        return sums | {f"perf/weights_by_{self.weight_transfer}": (1.0, 1.0)}

    def publish(self) -> None:
        """Raise the weight version and bring the new weights to all samplers."""
        # A worker runs its calls in order, so no wait is needed in between.
        published = [self.cluster.ask(learner, "publish") for learner in self._learners]
        self._weight_version += 1
        self._publisher.send()
        self.cluster.waits.collect(published)

    def save(self, directory: Path, *, last: bool = False) -> Future[None]:
        """Take a snapshot and return; the future is done when all ranks have written."""
        directory = directory.absolute()
        writers = len(self._learners) if self._one_node else self._count_writers(directory)
        self._call_learners("start_saving", directory, writers, self._room, last)
        return self._saver.submit(self._await_saved, time.monotonic())

    def load(self, directory: Path) -> None:
        """Load everything that was saved, and send the weights to the samplers."""
        saved = self._call_learners("load", directory.absolute())[0]
        # Samplers that ran out of memory start with the number of responses that fitted then.
        limits = [(i, rows) for i, rows in enumerate(saved[: len(self._room)]) if rows is not None]
        for i, rows in limits:
            self._room[i] = rows
            self.cluster.call([self._samplers[i]], "resume_room", rows)
        self._weight_version = self._call_learners("version")[0]
        self._publisher.send()

    def close(self) -> None:
        """End all workers, and Ray if we started it. Safe to call twice."""
        # Not waited for: what the saver's thread waits for ends with the workers.
        self._saver.shutdown(wait=False, cancel_futures=True)
        samplers, self._samplers = self._samplers, []
        self.cluster.close(samplers)

    def _start(self) -> None:
        """Start all workers; a second time where weights cannot travel the chosen way.

        New processes, because the first attempt may hang in a collective.
        """
        while True:
            self._start_workers()
            self._build_models()
            try:
                self._send_first_weights()
                return
            except (UserError, WorkerLost) as error:
                fixed = self._insists_on_transfer or self.weight_transfer == "memory"
                if fixed or self._lost_node():
                    raise
                what = str(error).splitlines()[0].removesuffix(USE_MEMORY).rstrip(" .:")
                self._tell(
                    f"{what}. The workers start again, and new weights travel by memory from now "
                    "on (rollout.weight_transfer)."
                )
            self.cluster.end_workers(self._samplers)
            self.weight_transfer = "memory"

    def _lost_node(self) -> bool:
        nodes = {member.node_id for member in (*self._learners, *self._samplers)}
        return not all(map(node_answers, nodes))

    def _start_workers(self) -> None:
        """Start a worker for each learner rank and each sampler of the placement."""
        seat = self.cluster.seat
        train, rollout = self._placement.train, self._placement.rollout
        # Learners first: their index is their rank.
        seats = [
            seat(f"learner rank {rank}", [device], rank, len(train))
            for rank, device in enumerate(train)
        ]
        seats += [
            seat(f"sampler {i}", devices, i, len(rollout)) for i, devices in enumerate(rollout)
        ]
        members = self.cluster.start(seats)
        self._learners = members[: len(train)]
        self._samplers = members[len(train) :]

    def _build_models(self) -> None:
        """Build the models in all workers, and print the remarks of the learners.

        Returns when every worker is ready. Raises the first error of one, and Interrupted if the
        user wants to stop meanwhile.
        """
        cluster, collect = self.cluster, self.cluster.waits.collect
        config, tokenizer = cluster.share(self._config), cluster.share(self._tokenizer)
        # Samplers load while learners import; only their results are waited for below.
        loading = [
            cluster.ask(
                sampler, "start", "build_streaming", SAMPLER, i, config, tokenizer,
                self.weight_transfer, self._profiles,
            )
            for i, sampler in enumerate(self._samplers)
        ]  # fmt: skip
        sleepers = self._placement.sleepers
        self._publisher = Publisher(
            cluster, self._learners, self._samplers,
            sleepers=[self._samplers[i] for i in sleepers],
        )  # fmt: skip
        if sleepers:
            # Samplers measure the memory that is free, so they come before the learner's models.
            collect([loading[i] for i in sleepers], may_stop=True)
            loading = [c for i, c in enumerate(loading) if i not in sleepers]
            self._publisher.sleep()
        # Learners import their code first, then meet: a slow import is not a lost rank.
        first, size = self._learners[0], len(self._learners)
        collect(
            [
                cluster.ask(learner, "start", "run", import_code, WORKERS)
                for learner in self._learners
            ],
            may_stop=True,
        )
        (point,) = collect(
            [cluster.ask(first, "meet", "run", rendezvous_url, first.node, self._one_node)]
        )
        joining = [
            cluster.ask(
                learner, "join", "build", LEARNER, config, tokenizer, self._total_steps,
                self._profiles, size, rank, learner.node, point,
            )
            for rank, learner in enumerate(self._learners)
        ]  # fmt: skip
        collect([*joining, *loading], may_stop=True)
        for remark in self._call_learners("noted")[0]:
            self._tell(remark)

    def _send_first_weights(self) -> None:
        """Connect learners and samplers, and send the samplers the learner's weights."""
        if self.weight_transfer != "memory":
            workers = self._config.rollout.tensor_model_parallel_size
            address = LOOPBACK if self._one_node else self._learners[0].node
            self._publisher.connect(
                ExchangePlan(
                    self.weight_transfer, tuple(self._samplers), workers, address,
                    self._config.trainer.worker_timeout,
                )
            )  # fmt: skip
        # Weights that are missing in a model's folder are random, and differ between processes.
        self._publisher.send()

    def _call_learners(self, name: str, *args: Any) -> list[Any]:
        """Call a method of every learner rank."""
        return self.cluster.call(self._learners, name, *args)

    def _count_writers(self, directory: Path) -> int:
        """Return how many of the first ranks see `directory`: nodes may have separate disks.

        Raises ConfigError if the first rank does not see it.
        """
        mark = directory / f".seen-{uuid.uuid4().hex}"
        mark.touch()
        try:
            calls = [
                self.cluster.ask(learner, "sees", "run", Path.exists, mark)
                for learner in self._learners
            ]
            sees = self.cluster.waits.collect(calls)
        finally:
            mark.unlink()
        if not sees[0]:
            raise ConfigError(
                f"{self._learners[0]} does not see the run folder, in which it has to write "
                f"{directory}. Put --output_dir on a file system that all nodes share, or let "
                "training begin on the first node (--placement)."
            )
        return next((rank for rank, seen in enumerate(sees) if not seen), len(sees))

    def _await_saved(self, since: float) -> None:
        """Wait until all ranks have written, then raise the first error."""
        waits = self.cluster.waits
        writing = list(self._learners)
        errors: list[Exception] = []
        while writing:
            writing = [learner for learner in writing if not self._has_saved(learner, errors)]
            if writing and time.monotonic() - since > waits.timeout_s:
                raise no_answer(writing, "save", waits.timeout_s)
            time.sleep(POLL_S if writing else 0)
        if errors:
            raise errors[0]

    def _has_saved(self, learner: WorkerHandle, errors: list[Exception]) -> bool:
        """Whether a rank has finished writing, with or without an error."""
        try:
            return bool(self.cluster.call([learner], "saved")[0])
        except WorkerLost:
            raise
        except Exception as error:
            errors.append(error)
            return True
