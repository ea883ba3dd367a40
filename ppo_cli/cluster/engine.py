"""The seven verbs over N learner ranks and M samplers, each in a process of its own.

Prompts are spread over samplers by a fixed rule, balanced by length.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ppo_cli.algo.batch import AnnotatedBatch, Annotations, Batch, merge_annotations
from ppo_cli.cluster.members import (
    USE_MEMORY,
    Call,
    Cluster,
    ExchangePlan,
    Halved,
    Member,
    late,
)
from ppo_cli.cluster.ray_session import node_answers
from ppo_cli.cluster.serialise import rejoin_prompt
from ppo_cli.cluster.worker_process import load_code, meeting_point
from ppo_cli.config.placement import Placement, sleep_mode, weight_transfer
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import MiniBatch, Sampling, Sums, describe_halving, merge_sums
from ppo_cli.errors import ConfigError, UserError, WorkerLost
from ppo_cli.records import Prompt, Rollout


def deal_prompts(
    prompts: Sequence[Prompt], samplers: int, max_tokens: int
) -> list[tuple[Prompt, ...]]:
    """Deal prompts, the longest first, each to the sampler with the least to do.

    Nobody knows yet how long responses become, so each counts as `max_tokens`. Within a
    sampler the order stays; what is sampled does not depend on who does it.
    """
    hands = _deal([len(prompt.token_ids) + max_tokens for prompt in prompts], samplers)
    return [tuple(prompts[i] for i in sorted(hand)) for hand in hands]


def deal_begun(
    begun: Sequence[Rollout], samplers: int, sampling: Sampling
) -> list[tuple[Rollout, ...]]:
    """Deal unfinished rollouts in the same way; those of one prompt and round stay together."""
    groups: dict[tuple[int, str], list[Rollout]] = {}
    for one in begun:
        groups.setdefault((one.seed, one.prompt.uid), []).append(one)
    dealt = list(groups.values())
    costs = [
        sum(len(one.prompt.token_ids) + sampling.length_limit(len(one.token_ids)) for one in group)
        for group in dealt
    ]
    hands = _deal(costs, samplers)
    return [tuple(one for i in sorted(hand) for one in dealt[i]) for hand in hands]


def _deal(costs: Sequence[int], samplers: int) -> list[list[int]]:
    work = [0] * samplers
    hands: list[list[int]] = [[] for _ in range(samplers)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = min(range(samplers), key=lambda s: (work[s], s))
        hands[least].append(i)
        work[least] += costs[i]
    return hands


# The first rank waits for the samplers, and can say whose fault it is, so it gives up first.
AFTER_RANK_S = 5.0


class Publisher:
    """Keeps the samplers' weights equal to the learner's; `sleepers` sleep while it trains.

    They wake in two parts: the weights before new ones are sent, and the cache, which is the larger
    part, before something is sampled. So a transfer, which needs memory itself, meets no cache.
    """

    def __init__(
        self,
        cluster: Cluster,
        learners: Sequence[Member],
        samplers: Sequence[Member],
        *,
        sleepers: Sequence[Member],
    ) -> None:
        self._cluster = cluster
        self._learners = learners
        self._samplers = samplers
        self._sleepers = sleepers
        self._asleep: set[str] = set()  # parts of the sleepers: "weights", "cache"
        self._connected = False
        self._in_place = False  # samplers read the memory that the first rank writes

    def connect(self, plan: ExchangePlan) -> None:
        """Have learner and samplers meet; from now on weights go from process to process."""
        self._ask_learners("connect", plan)
        self._connected = True

    def wake(self) -> None:
        """Make sure that samplers can sample: what slept gets its weights again."""
        if "weights" in self._asleep:
            self.send()
        self._rouse("cache")

    def sleep(self) -> None:
        """Leave the devices to the learner, where they are shared."""
        if self._sleepers and len(self._asleep) < 2:
            self._cluster.call(self._sleepers, "sleep")
            self._asleep = {"weights", "cache"}

    def send(self) -> None:
        """Bring the present weights to all samplers."""
        if self._connected:
            self._rouse("weights")
            self._ask_learners("send_weights")
            return
        ask = self._cluster.ask
        calls = [ask(learner, "weights") for learner in self._learners]
        self._rouse("weights")
        # The reference travels: samplers read what the first rank laid down, when it has.
        told = [] if self._in_place else self._samplers
        loads = [ask(one, "load_weights", "call", calls[0].ref) for one in told]
        found = self._cluster.waits.collect([*calls, *loads])
        self._in_place = self._in_place or all(found[len(calls) :])

    def _rouse(self, part: str) -> None:
        if part in self._asleep:
            # On shared devices samplers cannot have what the learner's allocator only keeps.
            self._ask_learners("spare_memory")
            self._cluster.call(self._sleepers, f"wake_{part}")
            self._asleep.remove(part)

    def _ask_learners(self, name: str, *args: object) -> None:
        limit = self._cluster.waits.timeout_s + AFTER_RANK_S
        self._cluster.call(self._learners, name, *args, seconds=limit)


# What runs in the workers, by name: this process imports no models.
WORKERS = "ppo_cli.cluster.workers"
LEARNER, SAMPLER = f"{WORKERS}:LearnerRole", f"{WORKERS}:SamplerRole"
POLL_S = 0.2
LOOPBACK = "127.0.0.1"


class ClusterEngine:
    """Leads the workers; holds no model itself. `cluster` may host other things too.

    The tokenizer comes pickled: it is only passed on, and to open it takes all of transformers.
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
        tell: Callable[[str], None] = lambda text: None,
        stop_requested: Callable[[], str | None] = lambda: None,
    ) -> None:
        trainer = config.trainer
        self._weight_version = 0
        self.weight_transfer = weight_transfer(config)
        self._profiles = logs.absolute().parent / "profile"
        self._tell = tell
        self._room: list[int | None] = [None] * len(placement.rollout)
        self._one_node = placement.nodes == 1
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="ppo-save")
        self._learners: list[Member] = []
        self._samplers: list[Member] = []
        self.cluster = Cluster(
            placement, logs, threads=trainer.threads, address=address,
            worker_timeout=trainer.worker_timeout, node_timeout=trainer.node_timeout,
            tell=tell, stop_requested=stop_requested,
        )  # fmt: skip
        try:
            ranks = _counted(len(placement.train), "learner rank")
            tell(f"Starting {ranks} and {_counted(len(placement.rollout), 'sampler')}")
            self._start(config, tokenizer, total_steps, placement)
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, begun: Sequence[Rollout] = ()
    ) -> Iterator[Rollout]:
        """Yield rollouts of all samplers as they finish."""
        own = {prompt.uid: prompt for prompt in (*prompts, *(one.prompt for one in begun))}
        for sent in self.sample(prompts, sampling, begun):
            yield from (rejoin_prompt(item, own) for item in sent)

    def sample(
        self, prompts: Sequence[Prompt], sampling: Sampling, begun: Sequence[Rollout] = ()
    ) -> Iterator[list[tuple[str, Rollout]]]:
        """Yield rollouts without their prompts, as many together as came together."""
        self._publisher.wake()
        count = len(self._samplers)
        hands = zip(
            deal_prompts(prompts, count, sampling.max_tokens),
            deal_begun(begun, count, sampling),
            strict=True,
        )
        calls: list[Call] = []
        for sampler, (new, old) in zip(self._samplers, hands, strict=True):
            if new or old:
                words = (new, sampling, self._weight_version, old)
                calls.append(self.cluster.ask(sampler, "generate", "stream", *words))
        for sent in self.cluster.waits.stream(calls):
            for halved in (item for item in sent if isinstance(item, Halved)):
                self._room[halved.sampler] = halved.rows
                self._tell(describe_halving(halved.rows, f"Sampler {halved.sampler}"))
            yield [item for item in sent if not isinstance(item, Halved)]

    def annotate(self, batch: Batch) -> AnnotatedBatch:
        """Add old and reference log-probs, entropy and values."""
        return merge_annotations(batch, self.find_annotations(batch))

    def find_annotations(self, batch: Batch) -> list[Annotations]:
        """What each rank found of its rows."""
        self._publisher.sleep()
        return self._learn("annotate", self.cluster.share(batch))

    def step(self, minibatch: MiniBatch) -> Sums:
        """Take one optimizer step on all ranks."""
        self._publisher.sleep()
        sums = merge_sums(self._learn("step", self.cluster.share(minibatch)))
        return sums | {f"perf/weights_by_{self.weight_transfer}": (1.0, 1.0)}

    def publish(self) -> None:
        """Raise the weight version and bring the new weights to all samplers."""
        # Workers do one thing after the other: nobody has to wait in between.
        published = [self.cluster.ask(learner, "publish") for learner in self._learners]
        self._weight_version += 1
        self._publisher.send()
        self.cluster.waits.collect(published)

    def save(self, directory: Path, *, last: bool = False) -> Future[None]:
        """Keep what is to be saved and return; the future is done when all ranks have written."""
        directory = directory.absolute()
        writers = len(self._learners) if self._one_node else self._count_writers(directory)
        self._learn("start_saving", directory, writers, self._room, last)
        return self._saver.submit(self._await_saved, time.monotonic())

    def load(self, directory: Path) -> None:
        """Take back all that was saved, and bring it to the samplers."""
        saved = self._learn("load", directory.absolute())[0]
        limits = [(i, rows) for i, rows in enumerate(saved[: len(self._room)]) if rows is not None]
        for i, rows in limits:
            self._room[i] = rows
            self.cluster.call([self._samplers[i]], "resume_room", rows)
        self._weight_version = self._learn("version")[0]
        self._publisher.send()

    def close(self) -> None:
        """End all workers, and Ray if we started it. Safe to call twice."""
        self._saver.shutdown(wait=False, cancel_futures=True)
        samplers, self._samplers = self._samplers, []
        self.cluster.close(samplers)

    def _start(
        self, config: Config, tokenizer: bytes, total_steps: int, placement: Placement
    ) -> None:
        """Start all workers, and a second time where weights cannot travel the way `auto` chose.

        What the first attempt left (a collective that hangs, half of a model) ends with it.
        """
        while True:
            self._start_workers(placement)
            self._build_models(config, tokenizer, total_steps, placement)
            try:
                self._send_first_weights(config)
                return
            except (UserError, WorkerLost) as error:
                way = config.rollout.weight_transfer
                if way != "auto" or self.weight_transfer == "memory" or self._lost_node():
                    raise
                what = str(error).splitlines()[0].removesuffix(USE_MEMORY).rstrip(" .:")
                self._tell(
                    f"{what}. The workers start again, and rollout.weight_transfer=auto takes "
                    "memory from now on."
                )
            self.cluster.end_workers(self._samplers)
            self.weight_transfer = "memory"

    def _lost_node(self) -> bool:
        nodes = {member.node_id for member in (*self._learners, *self._samplers)}
        return not all(map(node_answers, nodes))

    def _start_workers(self, placement: Placement) -> None:
        seat = self.cluster.seat
        train, rollout = placement.train, placement.rollout
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

    def _build_models(
        self, config: Config, tokenizer: bytes, total_steps: int, placement: Placement
    ) -> None:
        cluster, collect = self.cluster, self.cluster.waits.collect
        # Chosen once: other nodes may have another record of what works.
        rollout = config.rollout.model_copy(update={"sleep": sleep_mode(config)})
        config = config.model_copy(update={"rollout": rollout})
        given = cluster.share(config), cluster.share(tokenizer), self.weight_transfer
        loading = [
            cluster.ask(sampler, "start", "build_streaming", SAMPLER, i, *given, self._profiles)
            for i, sampler in enumerate(self._samplers)
        ]
        self._publisher = Publisher(
            cluster, self._learners, self._samplers,
            sleepers=[self._samplers[i] for i in placement.sleepers],
        )  # fmt: skip
        if placement.sleepers:
            # Samplers measure the memory that is free, so they come before the learner's models.
            collect([loading[i] for i in placement.sleepers], may_stop=True)
            loading = [c for i, c in enumerate(loading) if i not in placement.sleepers]
            self._publisher.sleep()
        first, size = self._learners[0], len(self._learners)
        collect(
            [cluster.ask(one, "start", "run", load_code, WORKERS) for one in self._learners],
            may_stop=True,
        )
        (point,) = collect(
            [cluster.ask(first, "meet", "run", meeting_point, first.node, self._one_node)]
        )
        joining = [
            cluster.ask(
                one, "join", "build", LEARNER, *given[:2], total_steps, self._profiles, size,
                rank, one.node, point,
            )
            for rank, one in enumerate(self._learners)
        ]  # fmt: skip
        collect([*joining, *loading], may_stop=True)
        for remark in self._learn("noted")[0]:
            self._tell(remark)

    def _send_first_weights(self, config: Config) -> None:
        if self.weight_transfer != "memory":
            workers = config.rollout.tensor_model_parallel_size
            address = LOOPBACK if self._one_node else self._learners[0].node
            self._publisher.connect(
                ExchangePlan(
                    self.weight_transfer, tuple(self._samplers), workers, address,
                    config.trainer.worker_timeout,
                )
            )  # fmt: skip
        # What a model's folder lacks is random, and would be another in each process.
        self._publisher.send()

    def _learn(self, name: str, *args: Any) -> list[Any]:
        """Call a method of every learner rank."""
        return self.cluster.call(self._learners, name, *args)

    def _count_writers(self, directory: Path) -> int:
        """How many of the first ranks see the folder: nodes may have disks of their own."""
        mark = directory / f".seen-{uuid.uuid4().hex}"
        mark.touch()
        try:
            asked = [
                self.cluster.ask(one, "sees", "run", Path.exists, mark) for one in self._learners
            ]
            sees = self.cluster.waits.collect(asked)
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
        """Wait until no rank writes any more, then raise what went wrong first."""
        waits = self.cluster.waits
        writing = list(self._learners)
        errors: list[Exception] = []
        while writing:
            writing = [one for one in writing if not self._has_saved(one, errors)]
            if writing and time.monotonic() - since > waits.timeout_s:
                raise late(writing, "save", waits.timeout_s)
            time.sleep(POLL_S if writing else 0)
        if errors:
            raise errors[0]

    def _has_saved(self, learner: Member, errors: list[Exception]) -> bool:
        """Whether a rank has done with writing, well or not."""
        try:
            return bool(self.cluster.call([learner], "saved")[0])
        except WorkerLost:
            raise
        except Exception as error:
            errors.append(error)
            return True


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
