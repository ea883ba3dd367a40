"""A reward model in another place: the same scores to the bit, and what happens when it is lost."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from ppo_cli.config.mixture import MixPart
from ppo_cli.config.schema.reward import ModelReward
from ppo_cli.errors import ModelError, RewardError, WorkerLost
from ppo_cli.records import Rollout, Score
from ppo_cli.rewards.base import Factory, Host, InProcess
from ppo_cli.rewards.mixture import CompositeReward
from ppo_cli.rewards.models.base import LoadedModel, Scores
from ppo_cli.rewards.models.local import LocalModelReward
from tests.rewards.models.rounds import rollouts_of
from tests.rewards.models.spawned import Spawned
from tests.rewards.models.twins import armorm_twin
from tests.rewards.scoring import score_all
from tests.settings import complete_reward_model
from tests.waiting import wait_until

RewardOf = Callable[..., LocalModelReward]


def submit_all(reward: LocalModelReward, rollouts: Sequence[Rollout]) -> list[Future[Score]]:
    return [reward.submit(rollout) for rollout in rollouts]


class Posted(InProcess):
    """A host whose arguments, results and errors are pickled, as between processes."""

    def call(self, method: str, *args: Any) -> Any:
        try:
            return _post(super().call(method, *_post(args)))
        except Exception as error:
            raise _post(error) from None


def _post(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def post(factory: Factory, name: str) -> Posted:
    return Posted(factory)


class Frail(InProcess):
    """A host that can be lost: in a call that was named, or with the cluster under it."""

    def __init__(self, factory: Factory) -> None:
        super().__init__(factory)
        self.dies_in = ""
        self.cluster_is_there = True
        self.methods: list[str] = []

    @property
    def alive(self) -> bool:
        return super().alive and self.cluster_is_there

    def call(self, method: str, *args: Any) -> Any:
        self.methods.append(method)
        if method == self.dies_in or not self.cluster_is_there:
            raise WorkerLost(f"reward on node b died in {method}")
        return super().call(method, *args)


class Hosts(list[Frail]):
    """Makes frail hosts for rewards, and keeps them in the order of their making."""

    def __call__(self, factory: Factory, name: str) -> Frail:
        self.append(Frail(factory))
        return self[-1]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Named before `reward_of` in a test, so that all rewards are closed when it ends."""
    frail = Hosts()
    yield frail
    assert not any(host.alive for host in frail)


@pytest.mark.slow
def test_the_same_scores_in_another_process_and_after_it_was_lost(tmp_path: Path) -> None:
    settings = complete_reward_model(
        path=str(armorm_twin(tmp_path / "twin")), device="cpu", offload=True, batch_tokens=300,
        max_length=200, self_test="warn",
    )  # fmt: skip
    rollouts = rollouts_of(15)
    long = rollouts_of(1)[0]
    rollouts.append(Rollout(long.prompt, 7, (1,), long.sampler_logprobs, "word " * 900, "length"))
    hosts: list[Host] = []

    def host(factory: Factory, name: str) -> Host:
        hosts.append(InProcess(factory) if hosts else Spawned(factory, f"reward {name}"))
        return hosts[-1]

    local, remote = LocalModelReward(settings), LocalModelReward(settings, host=host)
    with closing(local), closing(remote):
        lines: tuple[list[str], list[str]] = ([], [])
        for reward, tell in zip((local, remote), lines, strict=True):
            reward.start([r.prompt for r in rollouts], tell=tell.append)
        assert lines[0] == lines[1]
        assert len(lines[0]) == 2
        for _ in range(2):
            expected, scores = score_all(local, rollouts), score_all(remote, rollouts)
            assert scores == expected
            assert scores[-1].value is None
            assert len({score.value for score in scores}) > 8
            assert _steady(remote) == _steady(local)
        # The round releases its host once there is no batch left.
        wait_until(lambda: not remote._rounds)
        futures = submit_all(remote, rollouts)
        assert isinstance(hosts[0], Spawned)
        hosts[0].kill()
        remote.end_round()
        for future in futures:
            with pytest.raises(WorkerLost, match="reward model died in begin"):
                future.result(timeout=60)
        assert score_all(remote, rollouts) == expected
        assert len(hosts) == 2
    assert not any(host.alive for host in hosts)


def _steady(reward: LocalModelReward) -> dict[str, float]:
    """Metrics without the clock."""
    metrics = reward.pop_metrics()
    return {k: v for k, v in metrics.items() if not k.endswith(("seconds", "tokens_per_s"))}


def test_what_goes_wrong_there_comes_out_here_as_itself(reward_of: RewardOf) -> None:
    def refuse(settings: ModelReward) -> LoadedModel:
        raise ModelError("no such model")

    def break_(ids: Tensor, mask: Tensor) -> Scores:
        raise IndexError("index 7 is out of range")

    with closing(
        LocalModelReward(complete_reward_model(path="nowhere"), load=refuse, host=post)
    ) as reward:
        with pytest.raises(ModelError, match="no such model"):
            reward.start([])
        with pytest.raises(ModelError, match="no such model"):
            score_all(reward, rollouts_of(1))
    with pytest.raises(RewardError, match=r"made/model failed while scoring: IndexError: index 7"):
        score_all(reward_of(host=post, answer=break_), rollouts_of(1))


@pytest.mark.parametrize("method", ["begin", "next_batch"])
def test_a_lost_host_stops_its_round_and_the_next_round_has_a_new_one(
    hosts: Hosts, reward_of: RewardOf, method: str
) -> None:
    rollouts = rollouts_of(8)
    expected = score_all(reward_of(), rollouts)
    reward = reward_of(host=hosts)
    assert score_all(reward, rollouts) == expected
    hosts[0].dies_in = method
    futures = submit_all(reward, rollouts)
    reward.end_round()
    for future in futures:
        with pytest.raises(WorkerLost, match=f"died in {method}"):
            future.result(timeout=300)
    assert score_all(reward, rollouts) == expected
    assert len(hosts) == 2 and not hosts[0].alive


def test_a_host_that_went_with_its_cluster_is_replaced_with_its_batch_size(
    hosts: Hosts, reward_of: RewardOf
) -> None:
    """No second loss is reported; a budget that running out of memory has lowered stays."""
    sizes: list[int] = []

    def answer(ids: Tensor, mask: Tensor) -> Scores:
        sizes.append(len(ids))
        if len(ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Scores(mask.sum(1).float())

    reward = reward_of(host=hosts, answer=answer)
    expected = score_all(reward, rollouts_of(12))
    state = reward.state_dict()
    assert max(sizes) > 3
    hosts[0].cluster_is_there = False
    sizes.clear()
    assert score_all(reward, rollouts_of(12)) == expected
    assert max(sizes) <= 3
    assert reward.state_dict() == state
    assert len(hosts) == 2 and hosts[0].methods[-1] == "next_batch"


def test_a_step_that_is_taken_again_has_separate_batches(reward_of: RewardOf) -> None:
    rollouts = rollouts_of(12)
    expected = score_all(reward_of(batch_tokens=200), rollouts)
    reward = reward_of(batch_tokens=200)
    score_all(reward, rollouts_of(3, seed=5))
    left_over = submit_all(reward, rollouts_of(5, seed=8))
    reward.load_state_dict({})
    assert score_all(reward, rollouts) == expected
    assert reward.pop_metrics()["model/samples"] == 12
    for future in left_over:
        with pytest.raises(CancelledError):
            future.result(timeout=1)


def test_a_cancelled_round_is_not_scored_to_its_end(reward_of: RewardOf) -> None:
    started, proceed, sizes = Event(), Event(), []

    def answer(ids: Tensor, mask: Tensor) -> Scores:
        sizes.append(len(ids))
        started.set()
        assert proceed.wait(60)
        return Scores(mask.sum(1).float())

    reward = reward_of(answer=answer, batch_tokens=16)
    futures = submit_all(reward, rollouts_of(6))
    reward.end_round()
    assert started.wait(60)
    reward.load_state_dict({})
    proceed.set()
    assert all(future.cancelled() for future in futures)
    assert len(score_all(reward, rollouts_of(3))) == 3
    assert len(sizes) == 1 + 3
    assert reward.pop_metrics()["model/samples"] == 3


def test_a_mixture_that_takes_a_step_again_forgets_the_first_time(reward_of: RewardOf) -> None:
    def mixture() -> CompositeReward:
        parts = [MixPart(name=name, kind="model", weight=0.5) for name in ("a", "b")]
        return CompositeReward([(p, reward_of(batch_tokens=200)) for p in parts])

    def values(reward: CompositeReward) -> list[float | None]:
        return [score.value for score in score_all(reward, rollouts_of(10))]

    with closing(mixture()) as calm, closing(mixture()) as stopped:
        expected = [values(calm) for _ in range(2)]
        first = values(stopped)
        state = stopped.state_dict()
        left_over = [stopped.submit(rollout) for rollout in rollouts_of(7, seed=8)]
        stopped.load_state_dict(state)
        assert [first, values(stopped)] == expected
        assert all(future.done() for future in left_over)
