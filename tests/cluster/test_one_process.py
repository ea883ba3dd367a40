"""What reaches the workers: the cluster engine over real workers that are all in this process."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from ppo_cli.cluster import driver, driver_process, worker_process, workers
from ppo_cli.cluster import engine as cluster_engine
from ppo_cli.cluster.driver import Answer, DriverEngine
from ppo_cli.cluster.members import (
    Call,
    Cluster,
    WorkerFault,
    WorkerHandle,
    unpack_failure,
    worker_lost,
)
from ppo_cli.cluster.serialise import dumps
from ppo_cli.cluster.worker_process import Outcome, Worker, _failure
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import Sampling
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.ranks import ALONE
from ppo_cli.errors import DISK_ERRNOS, FULL_DISK_ERRNOS, WorkerLost, exit_code_of
from ppo_cli.planning.placement import Placement
from ppo_cli.processes.channel import PART
from ppo_cli.records import Prompt
from tests.cluster.whole_engine import WholeEngine, train_step
from tests.settings import complete

SAMPLING = Sampling(n=2, max_tokens=8, seed=5)
PLACEMENT = Placement(1, 0, (0,), ((1,), (2,)), ())
TRAINER = {
    "worker_timeout": 33.0, "node_timeout": 44.0, "threads": 3, "seed": 5,
}  # fmt: skip


def make_config() -> Config:
    optim = {"lr": 0.01, "lr_scheduler_type": "cosine"}
    return complete(
        {
            "model": {"path": "embedded", "dtype": "float32"},
            "rollout": {"name": "hf", "max_num_seqs": 9},
            "data": {"max_response_length": 8},
            "algorithm": {"rollout_correction": {"bypass_mode": False}},
            "actor": {"optim": optim, "fsdp_config": {"fsdp_size": 1}},
            "trainer": TRAINER,
        }
    )


class Here:
    """A cluster whose workers are objects of this process."""

    seat = Cluster.seat

    def __init__(self, placement: Placement, logs: Path, **settings: Any) -> None:
        self._placement, self.settings = placement, settings
        self.waits, self.timeout_s = self, settings["worker_timeout"]
        self.limits: list[float | None] = []

    def start(self, seats: Sequence[Any]) -> list[WorkerHandle]:
        return [WorkerHandle(seat.title, Path(), Worker(), "127.0.0.1") for seat in seats]

    def share(self, value: Any) -> Any:
        return value

    def ask(self, member: WorkerHandle, name: str, method: str = "call", *args: Any) -> Call:
        arguments = (name, *args) if method in ("call", "stream") else args
        return Call(member, name, getattr(member.handle, method)(*arguments))

    def call(
        self, members: Sequence[WorkerHandle], name: str, *args: Any, seconds: float | None = None
    ) -> list[Any]:
        return self.collect([self.ask(m, name, "call", *args) for m in members], seconds)

    def collect(self, calls: Any, seconds: float | None = None, may_stop: bool = False) -> Any:
        self.limits.append(seconds)
        return [self._open(request.member, request.ref) for request in calls]

    def stream(self, calls: Sequence[Call]) -> Iterator[Any]:
        for request in calls:
            for outcome in request.ref:
                yield self._open(request.member, outcome)

    def close(self, polite: Sequence[WorkerHandle] = ()) -> None:
        self.collect([self.ask(member, "close") for member in polite])

    def _open(self, member: WorkerHandle, outcome: Outcome) -> Any:
        if outcome.failure is not None:
            raise unpack_failure(member, outcome.failure)
        return outcome.value


@pytest.fixture
def joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """How the ranks were asked to join; there is only one, so that it need not."""
    requests: list[dict[str, Any]] = []

    def join(rank: int, size: int, **settings: Any) -> Any:
        requests.append({"rank": rank, "size": size} | settings)
        return ALONE

    monkeypatch.setattr(cluster_engine, "Cluster", Here)
    monkeypatch.setattr(workers, "join_ranks", join)
    monkeypatch.setattr("ppo_cli.cluster.serialise.send_tensors_as_arrays", lambda: None)
    monkeypatch.setattr(worker_process, "create_folder", lambda kind: tmp_path / kind)
    monkeypatch.setattr(cluster_engine, "POLL_S", 0.01)
    monkeypatch.setattr("ppo_cli.engine.learner.set_threads", lambda count: None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    return requests


def assert_same(actual: tuple[Any, ...], expected: tuple[Any, ...], version: int) -> None:
    assert [r.token_ids for r in actual[0]] == [r.token_ids for r in expected[0]]
    assert {r.weight_version for r in actual[0]} == {version}
    for mine, other in zip(actual[0], expected[0], strict=True):
        assert mine.prompt is other.prompt
        assert mine.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=1e-5)
    for name in ("old_logprobs_BT", "ref_logprobs_BT", "entropy_BT", "values_BT"):
        assert torch.equal(getattr(actual[1], name), getattr(expected[1], name)), name
    assert actual[2] == expected[2] | {"perf/weights_by_memory": (1.0, 1.0)}


def test_settings_weights_and_state_reach_every_worker(
    joined: list[dict[str, Any]], tmp_path: Path
) -> None:
    config, tokenizer = make_config(), load_tokenizer(model_folder("embedded"))
    texts = [f"{i} + {7 * i} =" for i in range(5)]
    prompts = [
        Prompt(f"p{i}", text, (), text, tuple(tokenizer(text).input_ids))
        for i, text in enumerate(texts)
    ]
    notes: list[str] = []
    engine = WholeEngine(
        config, pickle.dumps(tokenizer), total_steps=3, insists_on_transfer=True,
        placement=PLACEMENT,
        logs=tmp_path / "logs", address="there", tell=notes.append,
    )  # fmt: skip
    cluster: Any = engine.cluster
    del cluster.settings["tell"], cluster.settings["stop_requested"]
    assert cluster.settings == {
        "threads": 3, "address": "there", "worker_timeout": 33.0, "node_timeout": 44.0
    }  # fmt: skip
    assert joined == [
        {"rank": 0, "size": 1, "init_method": f"file://{tmp_path}/ranks/meet", "shard_size": 1,
         "device": torch.device("cpu"), "tensor_size": 1, "timeout_s": 33.0 + 60.0}
    ]  # fmt: skip
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert notes == ["Starting 1 learner rank and 2 samplers"]
    roles = [member.handle._object for member in engine._samplers]
    assert [role._sampler.capacity.rows for role in roles] == [9, 9]
    profilers = [
        member.handle._object._profiler for member in (*engine._learners, *engine._samplers)
    ]
    names = ("rank_0", "sampler_0", "sampler_1")
    assert [(p._trainer, p._folder, p._process) for p in profilers] == [
        (config.trainer, tmp_path / "profile", name) for name in names
    ]

    alone = LocalEngine(config, tokenizer, total_steps=3)
    pad = tokenizer.pad_token_id
    for version in range(2):
        assert_same(
            train_step(engine, prompts, SAMPLING, pad),
            train_step(alone, prompts, SAMPLING, pad),
            version,
        )

    roles[1]._sampler.capacity.halve(8)
    list(engine.generate(prompts, Sampling(max_tokens=2)))
    assert notes[1].startswith("Sampler 1 ran out of memory: at most 4 responses")
    (tmp_path / "saved").mkdir()
    engine.save(tmp_path / "saved").result(60)
    state = json.loads((tmp_path / "saved" / "state" / "engine.json").read_text())
    assert state["weight_version"] == 2 and state["room"] == [None, 4]
    expected = train_step(alone, prompts, SAMPLING, pad)
    assert_same(train_step(engine, prompts, SAMPLING, pad), expected, 2)

    fresh = WholeEngine(
        config, pickle.dumps(tokenizer), total_steps=3, insists_on_transfer=True,
        placement=PLACEMENT,
        logs=tmp_path / "logs", address="there",
    )  # fmt: skip
    fresh.load(tmp_path / "saved")
    capacities = [member.handle._object._sampler.capacity for member in fresh._samplers]
    assert [room.rows for room in capacities] == [9, 4] and fresh._room == [None, 4]
    assert_same(train_step(fresh, prompts, SAMPLING, pad), expected, 2)
    fresh.close()
    engine.close()


def answer(verb: str, *args: Any) -> Answer:
    """Answer a request at once."""
    reply = Answer(verb)
    reply.parts.put(pickle.dumps(("done", "gloo" if verb == "build" else None)))
    return reply


@pytest.mark.parametrize("address", [None, "there:6379"])
def test_all_that_builds_the_engine_crosses_to_the_other_process(
    address: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_client, start_ray = Mock(), Mock()
    client, ray = start_client.return_value, start_ray.return_value
    client.ask.side_effect = answer
    ray.await_address.return_value, ray.failure.return_value = "here:1", None
    monkeypatch.setattr(driver, "Client", start_client)
    monkeypatch.setattr(driver, "RayProcess", start_ray)
    config, tokenizer, notes = make_config(), {"a": "tokenizer"}, []
    placement = Placement(1, 4, (0, 1), ((2,), (3,)), ())
    engine = DriverEngine(
        config, tokenizer, total_steps=7, placement=placement, logs=tmp_path / "logs",
        address=address, tell=notes.append,
    )  # fmt: skip
    command, environ = start_client.call_args.args
    log = tmp_path / "logs" / "ray.log"
    assert command[-1] == str(log)
    assert engine._patience_s == 2 * 44.0 + 8 * 33.0 and engine.weight_transfer == "gloo"
    assert (driver.LOCAL_ONLY.items() <= environ.items()) == (address is None)
    if address is None:
        (options,), settings = start_ray.call_args
        assert (options.num_gpus, settings["log"]) == (4, log)
        assert settings["environ"] == os.environ | environ
        assert ray.await_address.call_args.args[0] == 44.0 and notes == ["Starting Ray"]
    else:
        assert not start_ray.called and notes == ["Joining the Ray cluster at there:6379"]

    # At the other end of the connection the engine is built from what was sent.
    verb, options = client.ask.call_args.args
    assert verb == "build" and pickle.loads(options["tokenizer"]) == tokenizer
    build = Mock(return_value=Mock(weight_transfer="ipc"))
    monkeypatch.setattr(driver_process, "ClusterEngine", build)
    channel = Mock()
    service = driver_process.Service(channel)
    assert service.build(options, 12) == "ipc"
    arguments = build.call_args.kwargs
    stop_requested = arguments.pop("stop_requested")
    assert stop_requested() is None
    service.stop("Ctrl-C")
    assert stop_requested() == "Ctrl-C"
    tell = arguments.pop("tell")
    tell("a line")
    channel.send.assert_called_once_with(12, dumps(("tell", "a line")), PART)
    # While it samples, notes go to the request for these responses.
    build.return_value.generate.return_value = []
    assert [*service.generate([], Sampling(), [], 13)] == []
    tell("another")
    channel.send.assert_called_with(13, dumps(("tell", "another")), PART)
    assert arguments == {
        "config": config, "tokenizer": options["tokenizer"], "total_steps": 7,
        "placement": placement, "logs": tmp_path / "logs", "address": address or "here:1",
        "insists_on_transfer": True,
    }  # fmt: skip

    client.reset_mock()
    engine.publish()
    engine.load(Path("saved"))
    hosted = engine.host(dict, role="reward", devices=[3])
    hosted.call("keys", 1)
    hosted.close()
    for _ in range(2):
        engine.close()
    assert client.mock_calls == [
        call.ask("publish"), call.ask("load", Path("saved").absolute()),
        call.ask("host", dict, "reward", (3,)), call.ask("call", None, "keys", 1),
        call.ask("dismiss", None), call.ask("stop", "closing"), call.ask("close"),
        call.close(driver.LEAVES_S),
    ]  # fmt: skip
    assert ray.close.called == (address is None) and not hosted.alive


def test_of_a_disk_only_that_it_is_full_comes_out_as_itself() -> None:
    travelling = {
        n for n in DISK_ERRNOS if _failure(OSError(n, "x", "some/file")).pickled is not None
    }
    assert travelling == FULL_DISK_ERRNOS == DISK_ERRNOS - {errno.EACCES, errno.EPERM}


def test_a_fault_of_a_gpu_is_no_bug_of_ours(tmp_path: Path) -> None:
    fault = RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might be …")
    member = WorkerHandle("learner rank 1", tmp_path / "rank.log", None)
    error = unpack_failure(member, _failure(fault))
    assert isinstance(error, WorkerLost) and exit_code_of(fault) == error.exit_code
    for words in ("learner rank 1", "unspecified launch", "rank.log", "CUDA_LAUNCH_BLOCKING"):
        assert words in str(error)
    assert "kernel errors" not in str(error)
    for text in ("shape '[2]' is invalid", "CUDA error: no kernel image is available"):
        assert isinstance(unpack_failure(member, _failure(RuntimeError(text))), WorkerFault)


def test_one_that_ended_by_itself_was_not_killed(tmp_path: Path) -> None:
    ray_message = "Worker exits unexpectedly. Worker exits with an exit code 5.\nTraceback"
    message = str(
        worker_lost(WorkerHandle("sampler 0", tmp_path / "log", None), "start", ray_message)
    )
    assert message.startswith("Sampler 0 ended by itself (exit code 5) during `start`.")
