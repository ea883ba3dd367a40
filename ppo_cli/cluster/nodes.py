"""The nodes of a run: node 0 starts Ray's head on MASTER_PORT, the others join it.

`open_cluster` on node 0 returns `Nodes`, which watches the others. `join_cluster` on another node
works until node 0 ends, and returns its exit code. With RAY_ADDRESS nothing is started.

Nodes exchange a few JSON values in the key-value store of Ray's head (`HeadStore`):

    head        facts of node 0
    node:RANK   facts of a node, from its arrival until it leaves
    stop        the node that received a signal
    end         the exit code of node 0

A node compares its facts with those of node 0 before it starts Ray, because Ray refuses to join
another version of itself, and node 0 would not learn why. Ray's token authenticates everything: it
is derived from PPO_CLUSTER_SECRET and the name of the run. Traffic is not encrypted, so the nodes
must be in a trusted network.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

from ray import _raylet  # private; tried with Ray 2.60
from ray.exceptions import AuthenticationError, RpcError

from ppo_cli import cluster
from ppo_cli.cluster.addresses import (
    CONNECT_TIMEOUT_S,
    accepts_connections,
    answers,
    check_port,
    connection_error,
    head_address,
    join_address,
    node_address,
    resolve_host,
)
from ppo_cli.cluster.node_facts import (
    NodeFacts,
    check_node,
    collect_facts,
    compare_facts,
    describe_node,
    read_facts,
    run_key,
)
from ppo_cli.cluster.ray_process import SECRET_VARIABLE, RayOptions, RayProcess
from ppo_cli.config.schema.run import Config, Trainer
from ppo_cli.config.slurm import outside_step, slurm_hosts
from ppo_cli.digests import digest_text
from ppo_cli.errors import (
    EXIT_RESUMABLE,
    ConfigError,
    Interrupted,
    WorkerLost,
    exit_code_of,
)
from ppo_cli.planning.resolved import Resolved
from ppo_cli.processes.reaper import STOP_S
from ppo_cli.signals import StopOnSignal
from ppo_cli.waits import REACH_S, NoAnswer, await_result, run_in_thread

# Starting Ray takes under 10 s on a quiet machine.
RAY_START_S = 180.0
POLL_S = 0.2
NOTE_EVERY_S = 15.0
# Ray tells the head nothing of a node with another token, so node 0 can only say what to check.
SAME_ON_ALL = (
    "the output there says why it cannot join; all nodes need the same PPO_CLUSTER_SECRET, "
    "output_dir, project_name and experiment_name"
)
SILENT = (
    "accepts connections but does not answer. It is stopped or overloaded, or a firewall holds "
    "its answers back:"
)
# When a node does not fit, node 0 waits this long for the others, to report all problems at once.
GRACE_S = 20.0
# Timeout of a request to the head, and how long it may not answer before it counts as gone.
REQUEST_S = 3.0
HEAD_GONE_S = 10.0
# Anybody in the network can guess secrets against the head, so short ones are refused.
MIN_SECRET_LENGTH = 16
# The label that marks a node of Ray as a node of the run.
RANK_LABEL = "ppo-rank"
NAMESPACE = b"ppo"

Tell = Callable[[str], None]


class HeadStore:
    """The key-value store and the list of nodes that Ray's head keeps."""

    def __init__(self, address: str) -> None:
        """Connect; raises RpcError where something else listens, or never answers."""
        self.address = address
        client = run_in_thread(lambda: _raylet.GcsClient(address=address))  # type: ignore[attr-defined]
        try:
            self._client: Any = await_result(client, f"the Ray head at {address}", REACH_S)
        except NoAnswer as late:
            raise RpcError(str(late), rpc_code=None) from late

    def get(self, key: str) -> Any:
        """Return the value of a key, or None. Raises RpcError where the head does not answer."""
        try:
            value = self._client.internal_kv_get(key.encode(), NAMESPACE, timeout=REQUEST_S)
        except AuthenticationError as error:  # the port now belongs to another Ray
            raise RpcError(str(error), rpc_code=None) from error
        return None if value is None else json.loads(value)

    def put(self, key: str, value: Any) -> None:
        """Set the value of a key."""
        data = json.dumps(value).encode()
        self._client.internal_kv_put(key.encode(), data, True, NAMESPACE, timeout=REQUEST_S)

    def delete(self, key: str) -> None:
        """Remove a key."""
        self._client.internal_kv_del(key.encode(), False, NAMESPACE, timeout=REQUEST_S)

    def facts(self, rank: int) -> NodeFacts | None:
        """Return the facts that a node has written, or None."""
        raw = self.get(f"node:{rank}" if rank else "head")
        return None if raw is None else read_facts(raw)

    def working_nodes(self) -> list[tuple[int, str]]:
        """Return rank and address of each node on which Ray runs.

        Ray notices a killed node only after seconds, so this also connects to each node.
        """
        nodes = self._client.get_all_node_info(timeout=REQUEST_S).values()
        return [
            (int(node.labels[RANK_LABEL]), node.node_manager_address)
            for node in nodes
            if node.state == 0  # alive
            and RANK_LABEL in node.labels
            and accepts_connections(join_address(node.node_manager_address, node.node_manager_port))
        ]


class Nodes:
    """The nodes of a run, seen from node 0. Close it, or use it as a context."""

    def __init__(
        self,
        address: str,
        timeout_s: float,
        tell: Tell,
        *,
        facts: NodeFacts | None = None,
        ray: RayProcess | None = None,
        store: HeadStore | None = None,
        hosts: list[str] | None = None,
    ) -> None:
        self.address = address
        self._timeout_s, self._tell = timeout_s, tell
        self._facts, self._ray, self._store = facts, ray, store
        self._hosts = hosts or []

    def lost(self) -> str | None:
        """Describe the first node that does not work, or None while all work."""
        if self._ray is None or self._store is None:
            return None
        if failure := self._ray.failure():
            return failure
        try:
            working = dict(self._store.working_nodes())
            for rank in self._other_ranks():
                facts = self._store.facts(rank)
                if facts is not None and facts.trouble:
                    return f"{facts.label} does not work: {facts.trouble}"
                if rank not in working:
                    # It may have come back with other versions or settings.
                    problems = compare_facts(self._facts, facts) if facts and self._facts else []
                    return " ".join(problems) or (
                        f"{self._label(rank)} is gone: Ray does not run there."
                    )
        except RpcError:
            return "Ray on node 0 does not answer."
        return None

    def stop_asked(self) -> str | None:
        """Name the node that was asked to stop by a signal, when one was."""
        if self._store is None:
            return None
        with suppress(RpcError):
            node: str | None = self._store.get("stop")
            return f"{node} was asked to stop" if node else None
        return None

    def wait_until_whole(self, *, stop_requested: Callable[[], str | None] = lambda: None) -> None:
        """Wait until all nodes work.

        Raises WorkerLost when that takes too long, Interrupted when a stop is requested.
        """
        deadline, next_note = time.monotonic() + self._timeout_s, 0.0
        while (lost := self.lost()) is not None:
            if reason := stop_requested():
                raise Interrupted(f"Stopped while waiting for a node ({reason}).")
            # Nodes cannot come back to a head that is gone.
            if self._ray is not None and self._ray.failure():
                raise WorkerLost(
                    f"{lost} The other nodes depend on it: start the same command again on all."
                )
            now = time.monotonic()
            if now > deadline:
                raise WorkerLost(
                    f"{lost} It did not come back within {self._timeout_s:g} s "
                    "(trainer.node_timeout)."
                )
            if now > next_note:
                self._tell(f"{lost} Waiting for it: start the same command there again.")
                next_note = now + NOTE_EVERY_S
            time.sleep(POLL_S)

    def gather(self, environ: Mapping[str, str], deadline: float) -> None:
        """Wait until all nodes are here, fit together and work; else raise ConfigError."""
        assert self._facts is not None and self._store is not None
        head, grace_ends, last_state, next_note = self._facts, deadline, "", 0.0
        total = head.nnodes
        while True:
            arrived = {rank: self._store.facts(rank) for rank in self._other_ranks()}
            nodes = [facts for facts in arrived.values() if facts is not None]
            working = self._store.working_nodes()
            missing = [self._label(rank) for rank, facts in arrived.items() if facts is None]
            now = time.monotonic()

            # A node that does not fit ends the run, once the others had time to arrive.
            problems = check_node(head)
            for node in nodes:
                problems += [*check_node(node), *compare_facts(head, node)]
            problems += _repeated_ranks(working)
            if problems:
                grace_ends = min(grace_ends, now + GRACE_S)
                if not missing or now > grace_ends:
                    raise ConfigError(
                        [*problems, *(f"{name} is not here yet." for name in missing)]
                    )

            idle = [node for node in nodes if node.rank not in dict(working)]
            if not missing and not idle and not problems:
                break

            # Report what is missing when that changes, and at intervals.
            state = f"{total - len(missing)} of {total} nodes are connected; " + (
                f"waiting for {', '.join(missing)}" if missing else "starting Ray on the others"
            )
            if now > deadline:
                late = missing or [f"{node.label} {node.trouble}".strip() for node in idle]
                raise ConfigError(_too_late(state.partition(";")[0], late, environ))
            if state != last_state or now > next_note:
                waits_in_vain = state == last_state and missing
                self._tell(f"{state}: {SAME_ON_ALL}" if waits_in_vain else state)
                last_state, next_note = state, now + NOTE_EVERY_S
            time.sleep(POLL_S)
        # All nodes are here: print what each one has.
        for node in (head, *nodes):
            self._tell(describe_node(node))
        self._tell(f"{total} of {total} nodes are connected")

    def close(self, exit_code: int) -> None:
        """End the other nodes with this exit code, then Ray on this one. Safe to call twice."""
        ray, store, self._ray, self._store = self._ray, self._store, None, None
        if ray is None or store is None:
            return
        try:
            # They leave while the head still runs, so that they see the exit code.
            with suppress(RpcError):
                store.put("end", exit_code)
                deadline = time.monotonic() + STOP_S
                while ray.failure() is None and time.monotonic() < deadline:
                    if not any(store.facts(rank) for rank, _ in store.working_nodes() if rank):
                        break
                    time.sleep(POLL_S)
        finally:
            ray.close()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(exit_code_of(error))

    def _other_ranks(self) -> range:
        assert self._facts is not None
        return range(1, self._facts.nnodes)

    def _label(self, rank: int) -> str:
        """Return a node's name for messages: its own label, or its rank and SLURM's host name."""
        assert self._facts is not None and self._store is not None
        facts = self._store.facts(rank)
        if facts is not None:
            return facts.label
        # SLURM lists the hosts in the order of the ranks.
        has_host = len(self._hosts) == self._facts.nnodes
        return f"node {rank} ({self._hosts[rank]})" if has_host else f"node {rank}"


def _repeated_ranks(working: list[tuple[int, str]]) -> list[str]:
    """Describe ranks that several nodes have, which were started at the same time."""
    problems = []
    for rank in {rank for rank, _ in working}:
        addresses = [address for other, address in working if other == rank]
        if len(addresses) > 1:
            problems.append(
                f"NODE_RANK {rank} is used by {' and '.join(addresses)}: each node needs its own."
            )
    return problems


def _too_late(state: str, late: list[str], environ: Mapping[str, str]) -> str:
    hint = (
        " Under SLURM start it on every node: srun --ntasks-per-node=1 ./train.sh …"
        if outside_step(environ)
        else f" Is the same command started there, with its own NODE_RANK? If so, {SAME_ON_ALL}."
    )
    return f"{state}; did not connect in time (trainer.node_timeout): {', '.join(late)}.{hint}"


def open_cluster(resolved: Resolved, environ: Mapping[str, str], tell: Tell) -> Nodes:
    """Start Ray's head on node 0, and return when all nodes work."""
    config, trainer = resolved.config, resolved.config.trainer
    if address := _given_cluster(trainer.node_rank, environ):
        return _use_given_cluster(address, trainer.node_timeout, tell)
    # Mistakes in addresses and ports are reported before Ray starts.
    own_address = node_address(environ.get("NODE_ADDR"))
    own_address = own_address or head_address(trainer.master_addr)
    check_port(trainer.master_port)
    set_token(trainer, environ)
    deadline = time.monotonic() + trainer.node_timeout
    host = socket.gethostname()
    tell("starting Ray on node 0")
    options = replace(_offer(config, own_address), port=trainer.master_port)
    ray = RayProcess(options, label=f"node 0 ({host})", environ=environ)
    # From here on a failure must end Ray.
    try:
        at = ray.await_address(RAY_START_S)
        store = HeadStore(at)
        facts = collect_facts(resolved, environ, host, at.rpartition(":")[0].strip("[]"))
        nodes = Nodes(
            at, trainer.node_timeout, tell, facts=facts, ray=ray, store=store,
            hosts=slurm_hosts(environ),
        )  # fmt: skip
        store.put("head", asdict(facts))
    except BaseException:
        ray.close()
        raise
    # From here on a failure must also end the other nodes.
    try:
        nodes.gather(environ, deadline)
    except BaseException as error:
        nodes.close(exit_code_of(error))
        raise
    return nodes


def join_cluster(resolved: Resolved, environ: Mapping[str, str], tell: Tell) -> int:
    """Work for node 0 until the run ends; return node 0's exit code."""
    config, trainer = resolved.config, resolved.config.trainer
    _given_cluster(trainer.node_rank, environ)
    assert trainer.node_rank and trainer.master_addr is not None
    address = node_address(environ.get("NODE_ADDR"))
    set_token(trainer, environ)
    store, local_address = find_head(trainer, address, tell)
    facts = collect_facts(resolved, environ, socket.gethostname(), address or local_address)
    options = replace(_offer(config, facts.address), head_address=store.address)

    def start_ray() -> RayProcess:
        return RayProcess(options, label=f"node {facts.rank} ({facts.host})", environ=environ)

    return Membership(store, facts, start_ray, trainer.max_restarts, tell).run()


def find_head(trainer: Trainer, address: str | None, tell: Tell) -> tuple[HeadStore, str]:
    """Connect to node 0, which may still be starting; return its store and this node's address.

    Raises ConfigError when it does not come in time, or is not node 0 of this run.
    """
    head = resolve_host(trainer.master_addr or ""), trainer.master_port
    at, deadline, next_note = join_address(*head), time.monotonic() + trainer.node_timeout, 0.0
    # Node 0 may be started after this one: wait until its port is open.
    while True:
        try:
            source = (address, 0) if address else None
            with socket.create_connection(head, CONNECT_TIMEOUT_S, source_address=source) as line:
                local_address = str(line.getsockname()[0])
            break
        except OSError as error:
            reason = connection_error(error)
        now = time.monotonic()
        if now > deadline:
            raise ConfigError(
                f"node 0 is not there: {at} says '{reason}' for {trainer.node_timeout:g} s. Is the "
                "same command started on node 0, is MASTER_ADDR its address, is the port open?"
            )
        if now > next_note:
            tell(f"waiting for node 0 at {at} ({reason})")
            next_note = now + NOTE_EVERY_S
        time.sleep(POLL_S)
    # It may be another program, or another run.
    try:
        return HeadStore(at), local_address
    except AuthenticationError as error:
        raise ConfigError(
            f"node 0 at {at} refuses node {trainer.node_rank}: {SECRET_VARIABLE}, output_dir, "
            "project_name or experiment_name differ, or it is another run. Set the same on all "
            "nodes, or another MASTER_PORT."
        ) from error
    except RpcError as error:
        if not answers(at):
            advice = "start the same command again on all nodes"
            raise ConfigError(f"node 0 at {at} {SILENT} {advice}.") from error
        raise ConfigError(
            f"the server at {at} is not node 0 of this run: it is not a Ray head. Is "
            "MASTER_PORT the port of another program there?"
        ) from error


class Membership:
    """One node's part in the run, from its arrival to node 0's exit code."""

    def __init__(
        self,
        store: HeadStore,
        facts: NodeFacts,
        start_ray: Callable[[], RayProcess],
        restarts: int,
        tell: Tell,
    ) -> None:
        self._store, self._facts, self._tell = store, facts, tell
        self._start_ray, self._restarts = start_ray, restarts
        self._ray: RayProcess | None = None
        self._head_seen = time.monotonic()
        self._signal_sent = False

    def run(self) -> int:
        """Work until the end; returns node 0's exit code."""
        try:
            with StopOnSignal(lambda name: None) as stop:
                self._arrive()
                self._join(stop)
                while (code := self._exit_code(stop)) is None:
                    self._watch_ray(stop)
                    time.sleep(POLL_S)
                return self._leave(code)
        except KeyboardInterrupt:
            with suppress(RpcError):
                self._report("it left on a signal.")
            return EXIT_RESUMABLE
        except RpcError as error:
            raise WorkerLost(
                f"node 0 ({self._store.address}) does not answer, and no run continues without "
                "it: start the same command again on all nodes."
            ) from error
        finally:
            if self._ray is not None:
                self._ray.close()

    def _arrive(self) -> None:
        """Exchange facts with node 0. Raises ConfigError where this node does not fit."""
        facts, rank = self._facts, self._facts.rank
        while (head := self._store.facts(0)) is None:  # Ray answers before node 0 has written them
            time.sleep(POLL_S)
        # A rank and, with GPUs, a machine belong to one node.
        working = self._store.working_nodes()
        for other, address in working:
            if other == rank:
                host = (self._store.facts(rank) or facts).host
                raise ConfigError(
                    f"NODE_RANK {rank} is used by {host} ({address}): each node needs its own."
                )
            if address == facts.address and facts.wanted_gpus:
                raise ConfigError(
                    f"node {other} runs on {facts.host} ({address}) already: ppo is started once "
                    "per node, and takes all its GPUs by N_GPUS."
                )
        # Facts are written even where they do not fit: node 0 then reports the same problems.
        self._store.put(f"node:{rank}", asdict(facts))
        if problems := [*check_node(facts), *compare_facts(head, facts)]:
            raise ConfigError(problems)
        self._tell(f"{facts.label} is with {head.label}")

    def _join(self, stop: StopOnSignal) -> None:
        """Start Ray, unless node 0 ends meanwhile."""

        def over() -> str | None:
            return None if self._exit_code(stop) is None else "node 0 ended"

        self._ray = self._start_ray()
        try:
            self._ray.await_address(RAY_START_S, over)
        except Interrupted:
            return
        except WorkerLost as error:
            self._report(str(error))
            raise
        self._report("")
        self._tell(f"node {self._facts.rank} has joined node 0 ({self._store.address})")

    def _exit_code(self, stop: StopOnSignal) -> int | None:
        """Return node 0's exit code once it ends, and pass on a signal meanwhile."""
        name = stop.reason()
        try:
            code: int | None = self._store.get("end")
            if name and not self._signal_sent:
                self._store.put("stop", self._facts.label)  # node 0 saves first
                self._signal_sent = True
                with suppress(Interrupted):  # nobody reads the output any more
                    self._tell(f"{name}: node 0 is asked to stop. Press again to stop immediately.")
        except RpcError:
            # A busy head may miss a request; only a long silence means that it is gone.
            if time.monotonic() - self._head_seen > HEAD_GONE_S:
                raise
            return None
        self._head_seen = time.monotonic()
        return code

    def _watch_ray(self, stop: StopOnSignal) -> None:
        """Start Ray again when it died on this node, at most `max_restarts` times."""
        # Ray also ends when node 0 is gone; `_exit_code` detects that first.
        if self._ray is None or time.monotonic() - self._head_seen > REQUEST_S:
            return
        failure = self._ray.failure()
        if failure is None:
            return
        self._report(failure)
        self._tell(failure)
        self._ray.close()
        # Restart it while restarts remain.
        if self._restarts <= 0:
            raise WorkerLost(f"{failure} It died too often (trainer.max_restarts).")
        self._restarts -= 1
        self._join(stop)

    def _report(self, trouble: str) -> None:
        facts = replace(self._facts, trouble=trouble)
        self._store.put(f"node:{facts.rank}", asdict(facts))

    def _leave(self, code: int) -> int:
        """Stop Ray on this node, delete the node's facts from the store, and return `code`.

        `code` is node 0's exit code; a line is printed if it is not 0.
        """
        if self._ray is not None:
            self._ray.close()
        with suppress(RpcError):
            self._store.delete(f"node:{self._facts.rank}")
        if code:
            self._tell(
                f"node 0 ({self._store.address}) ended with exit code {code}; so does this one"
            )
        return code


def set_token(trainer: Trainer, environ: Mapping[str, str]) -> None:
    """Set Ray's token in this process: the user's own, or one that all nodes can derive."""
    secret = environ.get(SECRET_VARIABLE, "").strip()
    if secret and len(secret) < MIN_SECRET_LENGTH:
        raise ConfigError(
            f"{SECRET_VARIABLE} has {len(secret)} characters and needs {MIN_SECRET_LENGTH}: make "
            "one with `openssl rand -hex 32`, and give it to all nodes."
        )
    os.environ["RAY_AUTH_MODE"] = "token"
    if secret or cluster.RANDOM_TOKEN:
        token = digest_text(json.dumps(["ppo token", run_key(trainer), secret]))
        os.environ["RAY_AUTH_TOKEN"] = token
    _raylet.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]


def _given_cluster(rank: int | None, environ: Mapping[str, str]) -> str:
    """Return RAY_ADDRESS. Raises ConfigError where this machine should also join as a node."""
    address = environ.get("RAY_ADDRESS", "").strip()
    if address and rank:
        raise ConfigError(
            f"RAY_ADDRESS {address} names a running cluster, so ppo is started once, "
            f"not as node {rank}: leave out NODE_RANK, or RAY_ADDRESS."
        )
    return address


def _use_given_cluster(address: str, timeout_s: float, tell: Tell) -> Nodes:
    """Return the nodes of the Ray cluster at RAY_ADDRESS.

    Raises ConfigError if the address is malformed, if no Ray head answers there, or if its token is
    missing.
    """
    # "auto" is looked up by Ray on this machine.
    if address != "auto":
        if re.fullmatch(r"(\[[^\[\]/]+\]|[^\[\]/:]+):\d{1,5}", address) is None:
            raise ConfigError(
                f"RAY_ADDRESS '{address}' is not HOST:PORT of a Ray head (such as 10.0.0.1:6379); "
                "run ppo on a machine of that cluster."
            )
        if not accepts_connections(address):
            raise ConfigError(f"nothing answers at RAY_ADDRESS {address}; is that cluster running?")
        try:
            HeadStore(address)
        except AuthenticationError as error:
            raise ConfigError(
                f"the Ray cluster at RAY_ADDRESS {address} needs its token: copy ~/.ray/auth_token "
                "of its head to this machine, or set RAY_AUTH_TOKEN."
            ) from error
        except RpcError as error:
            if not answers(address):
                raise ConfigError(
                    f"the server at RAY_ADDRESS {address} {SILENT} try `ray status` there."
                ) from error
            raise ConfigError(
                f"the server at RAY_ADDRESS {address} is not a Ray head. "
                "Give the HOST:PORT that `ray start --head` printed."
            ) from error
    tell(f"using the Ray cluster at {address}")
    return Nodes(address, timeout_s, tell)


def _offer(config: Config, address: str | None) -> RayOptions:
    """Return what this node offers; without GPUs enough logical CPUs for all ranks and samplers."""
    gpus = config.trainer.n_gpus_per_node
    workers = (config.trainer.num_workers or 1) + (config.rollout.num_samplers or 1)
    return RayOptions(
        num_cpus=max(os.cpu_count() or 1, 0 if gpus else workers + 2),
        num_gpus=gpus,
        node_address=address,
        labels={RANK_LABEL: str(config.trainer.node_rank or 0)},
    )
