"""The engine of a run over Ray. The process that talks to Ray, the driver, is a child of the run.

Ray ends a driver without a word, by `_exit(1)`: when shared memory does not answer (at any put,
get or release of an array, in `connection.cc`), when the raylet does not and our parent is
process 1 (`raylet_ipc_client.cc`), or when a thread still asks something as Ray shuts down
(`core_worker_process.cc`). A raylet that dies causes the first within milliseconds. No setting
turns that off. So the driver is a separate process (`driver_process.py`) that may end at any time.
This process then reports the cause and starts another driver."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ray import cloudpickle

from ppo_cli.algo.batch import AnnotatedBatch, Batch, merge_annotations
from ppo_cli.cluster.addresses import is_on_loopback
from ppo_cli.cluster.ray_process import LOCAL_ONLY, RayOptions, RayProcess, import_paths
from ppo_cli.cluster.serialise import dumps, lighten_prompt, prompts_by_uid, rejoin_prompt
from ppo_cli.cluster.worker_process import KILLED, read_tail
from ppo_cli.config.schema.run import Config, Transfer
from ppo_cli.engine.base import MiniBatch, Sampling, Sums
from ppo_cli.errors import Interrupted, PpoError, WorkerLost
from ppo_cli.planning.placement import Placement
from ppo_cli.processes.child import Child, ChildEnded
from ppo_cli.processes.event_loop import LoopThread
from ppo_cli.records import Prompt, Rollout
from ppo_cli.signals import note_end_of_work, shorten_wait, time_left

STOP = "stop"
BEAT, BEAT_S = b"", 2.0  # a request that is answered at once, and the pause between two
GONE = "gone"
STARTING, SAMPLING = "starting", "sampling"  # what a signal may end before it is done
# From the end of the connection to that of the process.
LEAVES_S = 5.0
UNHEARD_S = 2.0  # after the time for it, a start that goes on in spite of a stop is left
SILENT_S = 180.0  # it may take long to start on a busy machine
MAX_PART_BYTES = 1 << 40  # of an answer: batches may be as large as memory


class Answer:
    """The answer to a request of this name, which arrives in parts: items, then its end."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.parts: SimpleQueue[bytes] = SimpleQueue()
        self.request: Future[bytes] | None = None

    def take(self, timeout: float) -> tuple[str, Any]:
        """Return the next kind and value; raises queue.Empty when there is none in time."""
        part = self.parts.get(timeout=timeout)
        kind, value = pickle.loads(part) if part else (GONE, None)
        return kind, value

    def finish(self, request: Future[bytes]) -> None:
        """Put the last part; it is empty when the process is gone."""
        lost = request.cancelled() or request.exception() is not None
        self.parts.put(b"" if lost else request.result())

    def drop(self) -> None:
        """Tell the process that the rest is not needed."""
        if self.request is not None:
            self.request.cancel()


class Client:
    """The driver process: takes requests from any thread; it does not know what they mean."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._loop = LoopThread("driver")
        start = Child.start(
            command, kind="driver", environ=environ, max_answer_bytes=MAX_PART_BYTES
        )
        self._child = self._loop.call(start)
        self._silent = False
        self.pid = 0  # of the driver itself, below its reaper; 0 until it answers
        self._loop.submit(self._watch())

    def last_words(self, log: Path) -> str:
        """Return the end of the process's log; what it printed where it has not opened it yet."""
        return read_tail(log, self.pid) if self.pid else self._child.last_line()

    def ending(self) -> str:
        """Describe how the process ended, after a reply says that it is gone."""
        if self._silent:
            return f"said nothing for {SILENT_S:g} s"
        return KILLED if self._child.exit_code == -signal.SIGKILL else "ended"

    def ask(self, verb: str, *args: Any) -> Answer:
        """Send a request."""
        answer = Answer(verb)
        data = dumps(args, head=f"{verb}\n".encode())
        work = self._child.request(data, math.inf, answer.parts.put)
        try:
            answer.request = self._loop.submit(work)
        except RuntimeError:  # it is closed
            answer.parts.put(b"")
        else:
            answer.request.add_done_callback(answer.finish)
        return answer

    def close(self, patience_s: float = LEAVES_S) -> None:
        """Let the process end, and see to it that it does."""
        self._loop.call(self._child.close("the run has ended", patience_s))
        self._loop.close()

    async def _watch(self) -> None:
        """Ask for a sign of life again and again; a process that gives none is killed."""
        try:
            with suppress(ChildEnded):
                while True:
                    self.pid = int(await self._child.request(BEAT, SILENT_S))
                    await asyncio.sleep(BEAT_S)
        except TimeoutError:
            self._silent = True


# -P: a file in the current folder may be named like a module.
SERVICE = (sys.executable, "-P", "-m", "ppo_cli.cluster.driver_process")
TICK_S = 0.2
FAREWELL_S = 45.0
# Workers are lost before the supervisor of Ray knows which part of Ray failed.
CAUSE_S, CAUSE_OF_END_S = 0.5, 10.0


class DriverEngine:
    """Forwards the methods of `Engine` to the driver process, which has `ClusterEngine`."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        *,
        total_steps: int,
        placement: Placement,
        logs: Path,
        address: str | None = None,
        insists_on_transfer: bool = True,
        tell: Callable[[str], None] = lambda text: None,
        stop_requested: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._log = logs.absolute() / "ray.log"
        self._tell = tell
        self._stop_requested = stop_requested
        self._told_to_stop = False
        # The driver has deadlines for its calls, several for some verbs. This is its own.
        self._patience_s = 2 * config.trainer.node_timeout + 8 * config.trainer.worker_timeout
        self._closing = threading.Lock()
        self._closed = False
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="ppo-save")
        self._client: Client | None = None
        self._joins = False
        self._ray_process: RayProcess | None = None
        try:
            additions = import_paths()
            if address is None:
                tell("Starting Ray")
                # As many logical CPUs as cores, so that as many workers start at the same time.
                options = RayOptions(os.cpu_count() or 1, placement.devices_per_node)
                additions |= LOCAL_ONLY
                environ = os.environ | additions
                self._ray_process = RayProcess(options, log=self._log, environ=environ)
            else:
                tell(f"Joining the Ray cluster at {address}")
                if is_on_loopback(address):
                    additions |= LOCAL_ONLY
            # It imports Ray while Ray starts.
            self._client = Client([*SERVICE, str(self._log)], additions)
            if self._ray_process is not None:
                address = self._ray_process.await_address(
                    config.trainer.node_timeout, stop_requested
                )
            arguments = {
                "config": config, "tokenizer": cloudpickle.dumps(tokenizer), "logs": logs,
                "total_steps": total_steps, "placement": placement, "address": address,
                "insists_on_transfer": insists_on_transfer,
            }  # fmt: skip
            self._joins = True
            self.weight_transfer: Transfer = self._call("build", arguments, doing=STARTING)
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, begun: Sequence[Rollout] = ()
    ) -> Iterator[Rollout]:
        """Yield rollouts of all samplers as they finish."""
        # Only what a sampler reads travels; the prompts are put back into the rollouts below.
        prompt_by_uid = prompts_by_uid(prompts, begun)
        light = {uid: lighten_prompt(prompt) for uid, prompt in prompt_by_uid.items()}
        new = [light[prompt.uid] for prompt in prompts]
        old = [replace(rollout, prompt=light[rollout.prompt.uid]) for rollout in begun]
        answer = self._ask("generate", new, sampling, old)
        try:
            while True:
                kind, value = self._take(answer, SAMPLING)
                if kind == "done":
                    return
                yield from (rejoin_prompt(item, prompt_by_uid) for item in value)
        finally:
            # The consumer stopped early, or a signal did: the driver need not sample the rest.
            answer.drop()

    def annotate(self, batch: Batch) -> AnnotatedBatch:
        """Add old and reference log-probs, entropy and values."""
        return merge_annotations(batch, self._call("annotate", batch))

    def step(self, minibatch: MiniBatch) -> Sums:
        """Take one optimizer step on all ranks."""
        sums: Sums = self._call("step", minibatch)
        return sums

    def publish(self) -> None:
        """Raise the weight version and bring the new weights to all samplers."""
        self._call("publish")

    def save(self, directory: Path, *, last: bool = False) -> Future[None]:
        """Keep what is to be saved and return; the future is done when all ranks have written."""
        answer = self._ask("save", directory.absolute(), last)
        # The first part of the answer: the snapshot is taken, and training may go on.
        self._take(answer)
        return self._saver.submit(self._finish, answer)

    def load(self, directory: Path) -> None:
        """Take back all that was saved, and bring it to the samplers."""
        self._call("load", directory.absolute())

    def host(self, factory: Callable[[], Any], *, role: str, devices: Sequence[int] = ()) -> Hosted:
        """Host what a picklable factory makes in a separate process, on these devices."""
        if self._closed:
            raise WorkerLost(f"The {role} cannot start: its cluster has ended.")
        # Starting a worker and what it hosts takes long: a stop is heard meanwhile.
        number = self._call("host", factory, role, tuple(devices), doing=STARTING)
        return Hosted(self, role, number)

    def close(self) -> None:
        """End all workers, and Ray if we started it. Safe to call twice, and from two threads."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._saver.shutdown(wait=False, cancel_futures=True)
            # In this order: the driver leaves Ray, its process ends, Ray ends.
            with ExitStack() as last:  # each step, even when a signal interrupts another
                if self._ray_process is not None:
                    last.callback(self._ray_process.close)
                if self._client is not None:
                    # A driver that has not joined Ray may still be importing; it can be killed.
                    last.callback(self._client.close, LEAVES_S if self._joins else 0)
                    if self._joins:
                        with suppress(PpoError):
                            self._part(self._client)

    @property
    def closed(self) -> bool:
        """Whether it takes no requests any more."""
        return self._closed

    def _part(self, client: Client) -> None:
        """Stop what the driver process builds, ask it to close, and wait FAREWELL_S at most."""
        client.ask(STOP, "closing")  # if it still builds the engine
        answer = client.ask("close")
        deadline = time.monotonic() + shorten_wait(FAREWELL_S)
        while time.monotonic() < deadline and self._failure() is None:
            with suppress(Empty):
                answer.take(TICK_S)
                return

    def _call(self, verb: str, *args: Any, doing: str = "") -> Any:
        return self._finish(self._ask(verb, *args), doing)

    def _ask(self, verb: str, *args: Any) -> Answer:
        if self._closed or self._client is None:
            raise WorkerLost("The cluster is closed.")
        return self._client.ask(verb, *args)

    def _finish(self, answer: Answer, doing: str = "") -> Any:
        return self._take(answer, doing)[1]

    def _take(self, answer: Answer, doing: str = "") -> tuple[str, Any]:
        """Wait for the next part of an answer; raises the driver's error, or that of Ray.

        `doing` is STARTING or SAMPLING where a signal ends the wait: it raises Interrupted.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                kind, value = answer.take(TICK_S)
            except Empty:
                self._look_up(doing)
                if time.monotonic() > deadline:
                    raise WorkerLost(self._silent(answer.verb)) from None
                continue
            # A reply is a note for the user, an error, the driver's end, an item or the result.
            if kind == "tell":
                self._tell(value)
            elif kind == "error":
                raise self._explained(value)
            elif kind == GONE:
                raise WorkerLost(self._cause(CAUSE_OF_END_S) or self._ended(answer.verb))
            else:
                return kind, value

    def _look_up(self, doing: str) -> None:
        if not self._closed and (failure := self._failure()):
            raise WorkerLost(failure)
        if not doing or not (reason := self._stop_requested()):
            return
        if doing == STARTING and not self._told_to_stop:
            self._told_to_stop = True
            assert self._client is not None
            self._client.ask(STOP, reason)
        # What starts hears it itself, unless it is inside a call that never ends.
        if time_left() <= (-UNHEARD_S if doing == STARTING else 0):
            note_end_of_work()
            raise Interrupted(f"Stopped while {doing} ({reason}).")

    def _failure(self) -> str | None:
        return self._ray_process.failure() if self._ray_process is not None else None

    def _explained(self, error: BaseException) -> BaseException:
        """Replace the error of a lost worker when Ray itself was lost."""
        if isinstance(error, WorkerLost) and (cause := self._cause(CAUSE_S)):
            return WorkerLost(cause)
        return error

    def _cause(self, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        while self._ray_process is not None and not self._closed and time.monotonic() < deadline:
            if failure := self._failure():
                return failure
            time.sleep(TICK_S / 4)
        return None

    def _silent(self, verb: str) -> str:
        assert self._client is not None
        tail = self._client.last_words(self._log)
        waited = f"has not answered `{verb}` for {self._patience_s:g} s"
        return f"The process that talks to Ray {waited}. {tail}"

    def _ended(self, verb: str) -> str:
        if self._closed:
            return f"The cluster was closed during `{verb}`."
        assert self._client is not None
        ending, tail = self._client.ending(), self._client.last_words(self._log)
        return f"The process that talks to Ray {ending} during `{verb}`. {tail}"


class Hosted:
    """An object in a worker, called through the driver process. Usable from any thread."""

    def __init__(self, engine: DriverEngine, role: str, number: int) -> None:
        self._engine = engine
        self._role = role
        self._number = number
        self._ended = False

    @property
    def alive(self) -> bool:
        """Whether it can still be called: not lost, not closed, nor the cluster under it."""
        return not self._ended and not self._engine.closed

    def call(self, name: str, *args: Any) -> Any:
        """Call a method and wait for what it gives; raises what it raised.

        Raises WorkerLost when the worker died, hangs, or was closed, at any moment of the call.
        """
        if not self.alive:
            raise WorkerLost(f"The {self._role} has ended.")
        try:
            return self._engine._call("call", self._number, name, *args)
        except WorkerLost:
            self._ended = True
            raise
        except Exception as error:
            if self.alive:
                raise
            raise WorkerLost(f"The {self._role} was closed meanwhile.") from error

    def close(self) -> None:
        """End the worker. Safe to call twice."""
        self._ended = True
        with suppress(WorkerLost):  # gone with the others
            self._engine._call("dismiss", self._number)
