"""Two learner ranks and a sampler under Ray against one process; then some of them are killed."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_cli.algo.batch import build_batch
from ppo_cli.cluster.engine import ClusterEngine
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.placement import Placement
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import MiniBatch, Sampling
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.errors import DataError, ModelError, WorkerLost
from ppo_cli.records import Prompt, Rollout
from tests.engine.packed_steps import scored

pytestmark = pytest.mark.slow
PLACEMENT = Placement(1, 0, (0, 1), ((2,),), ())
SAMPLING = Sampling(n=2, max_tokens=24, seed=5)
Verbs = LocalEngine | ClusterEngine


def make_config(**model: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "embedded", "dtype": "float32"} | model,
            "rollout": {"name": "hf"},
            "data": {"max_response_length": SAMPLING.max_tokens},
            "algorithm": {"use_kl_in_reward": True},
            "trainer": {"worker_timeout": 120, "node_timeout": 120},
        }
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(model_folder("embedded"))


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[Prompt]:
    texts = [f"{i} + {7 * i} =" for i in range(12)]
    return [
        Prompt(uid=f"p{i}", text=text, messages=(), rendered=text,
               token_ids=tuple(tokenizer(text).input_ids), extra_info={"row": i})
        for i, text in enumerate(texts)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "logs"


def start_engine(config: Config, tokenizer: Any, logs: Path, address: str) -> ClusterEngine:
    pickled = pickle.dumps(tokenizer)
    return ClusterEngine(
        config, pickled, total_steps=8, placement=PLACEMENT, logs=logs, address=address
    )


@pytest.fixture(scope="module")
def engine(address: str, tokenizer: Any, logs: Path) -> Iterator[ClusterEngine]:
    with closing(start_engine(make_config(), tokenizer, logs, address)) as engine:
        yield engine


@pytest.fixture(scope="module")
def local(tokenizer: Any) -> LocalEngine:
    return LocalEngine(make_config(), tokenizer, total_steps=8)


def sample(engine: Verbs, prompts: list[Prompt], sampling: Sampling = SAMPLING) -> list[Rollout]:
    return sorted(engine.generate(prompts, sampling), key=lambda r: (int(r.key[0][1:]), r.sample))


def train_step(engine: Verbs, prompts: list[Prompt], pad: int) -> tuple[Any, ...]:
    rollouts = sample(engine, prompts)
    annotated = engine.annotate(build_batch(rollouts, pad))
    sums = engine.step(MiniBatch(scored(annotated, seed=3), actor=True, critic=True))
    engine.publish()
    return rollouts, annotated, sums


def assert_same(actual: tuple[Any, ...], expected: tuple[Any, ...], version: int) -> None:
    for mine, other in zip(actual[0], expected[0], strict=True):
        assert mine.key == other.key and mine.token_ids == other.token_ids
        assert mine.text == other.text and mine.finish_reason == other.finish_reason
        assert mine.weight_version == other.weight_version == version
        assert mine.prompt is other.prompt
    names = ("old_logprobs_BT", "ref_logprobs_BT", "entropy_BT", "values_BT", "input_ids_BL")
    for name in names:
        a, b = getattr(actual[1], name), getattr(expected[1], name)
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5, msg=name)
    assert actual[2].keys() - {"perf/weights_by_memory", "perf/agree_s"} == expected[2].keys()
    for name, (total, count) in expected[2].items():
        assert actual[2][name][1] == pytest.approx(count, rel=1e-6), name
        assert actual[2][name][0] == pytest.approx(total, rel=1e-3, abs=1e-4), name


def test_the_verbs_give_what_one_process_gives(
    engine: ClusterEngine, local: LocalEngine, prompts: list[Prompt], tokenizer: Any, tmp_path: Path
) -> None:
    pad = tokenizer.pad_token_id
    for version in range(2):
        assert_same(train_step(engine, prompts, pad), train_step(local, prompts, pad), version)
    folders = [tmp_path / "cluster", tmp_path / "local"]
    for folder, side in zip(folders, (engine, local), strict=True):
        folder.mkdir()
        saving = side.save(folder)
        assert isinstance(saving, Future)
        saving.result(60)
    digests = {".digests-0.json", ".digests-1.json"}  # of each rank, for `digests.json`
    assert {p.name for p in folders[0].iterdir()} == {"actor", "critic", "state"} | digests
    expected = train_step(local, prompts, pad)
    assert_same(train_step(engine, prompts, pad), expected, 2)
    # Each reads what the other wrote, and goes on as before.
    engine.load(folders[1])
    assert_same(train_step(engine, prompts, pad), expected, 2)
    local.load(folders[0])
    assert_same(train_step(local, prompts, pad), expected, 2)


def test_rollouts_stream(engine: ClusterEngine, prompts: list[Prompt]) -> None:
    sampling = Sampling(n=100, max_tokens=24, seed=5)
    call = engine.cluster.ask(engine._samplers[0], "generate", "stream", prompts, sampling, 0)
    pieces = list(engine.cluster.waits.stream([call]))
    assert sum(len(piece) for piece in pieces) == 12 * 100
    assert len(pieces[0]) == 1 and len(pieces) > 2  # the first did not wait for the others


def test_a_users_mistake_in_a_sampler_and_on_all_ranks(
    engine: ClusterEngine, prompts: list[Prompt], tmp_path: Path
) -> None:
    empty = Prompt(uid="p99", text="", messages=(), rendered="", token_ids=())
    with pytest.raises(DataError, match="p99 has no tokens"):
        list(engine.generate([*prompts, empty], SAMPLING))
    with pytest.raises(ModelError, match="nowhere"):
        engine.load(tmp_path / "nowhere")
    assert len(sample(engine, prompts)) == 24


def kill_soon(pid: int) -> None:
    threading.Timer(0.3, os.kill, (pid, 9)).start()


def await_loss(work: Callable[[], object], match: str) -> None:
    """Call until somebody is missed, which has to be soon."""
    started = time.monotonic()
    with pytest.raises(WorkerLost, match=match):
        while time.monotonic() - started < 120:
            work()
    assert time.monotonic() - started < 60


def test_a_killed_sampler_is_named(engine: ClusterEngine, prompts: list[Prompt]) -> None:
    many = Sampling(n=64, max_tokens=24, seed=1)
    kill_soon(engine._samplers[0].pid)
    await_loss(lambda: sample(engine, prompts, many), "Sampler 0 on node .* was killed")


def test_a_killed_rank_is_named_and_what_is_left_ends(
    engine: ClusterEngine, prompts: list[Prompt], tokenizer: Any
) -> None:
    ids = tuple(tokenizer("7").input_ids)
    rollouts = [
        Rollout(prompt, 0, ids * 24, torch.zeros(24 * len(ids)).numpy(), "", "length")
        for prompt in prompts * 4
    ]
    batch = build_batch(rollouts, tokenizer.pad_token_id)
    minibatch = MiniBatch(scored(engine.annotate(batch), seed=3), actor=True, critic=True)
    kill_soon(engine._learners[1].pid)
    await_loss(lambda: engine.step(minibatch), "Learner rank 1 on node .* was killed")
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 60


def test_a_sampler_short_of_memory_samples_fewer_at_once_and_a_checkpoint_remembers(
    address: str,
    prompts: list[Prompt],
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start_short(number: int, *arguments: Any) -> Any:
        from ppo_cli.cluster.workers import SamplerRole

        role = SamplerRole(number, *arguments)
        model: Any = role._sampler._model  # type: ignore[attr-defined]
        forward = model.forward

        def limited(**named: Any) -> Any:
            if number == 0 and named["input_ids"].shape[0] > 3:
                raise MemoryError
            return forward(**named)

        model.forward = limited
        return role

    monkeypatch.setattr("ppo_cli.cluster.engine.SAMPLER", start_short)
    notes: list[str] = []
    engine = ClusterEngine(
        make_config(), pickle.dumps(tokenizer), total_steps=8, logs=tmp_path / "logs",
        address=address,
        placement=Placement(1, 0, (0,), ((0,), (1,)), ()), tell=notes.append,
    )  # fmt: skip
    try:
        rollouts = sample(engine, prompts)
        (tmp_path / "saved").mkdir()
        engine.save(tmp_path / "saved").result(60)
    finally:
        engine.close()
    alone = LocalEngine(make_config(), tokenizer, total_steps=8)
    assert [r.token_ids for r in rollouts] == [r.token_ids for r in sample(alone, prompts)]
    halvings = [text for text in notes if "out of memory" in text]
    assert [text.partition(":")[0] for text in halvings] == ["Sampler 0 ran out of memory"] * 2
    assert halvings[-1].endswith("Set rollout.max_num_seqs=3 to start there next time.")
    alone.load(tmp_path / "saved")
    assert alone._sampler.capacity.halved_rows() == 3
