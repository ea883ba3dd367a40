"""Two learner ranks and a sampler under Ray give what one process gives, for families of models."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_cli.cluster.engine import ClusterEngine
from ppo_cli.engine.base import Sampling
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.errors import DataError, ModelError
from ppo_cli.planning.placement import Placement
from ppo_cli.records import Prompt
from tests.cluster.whole_engine import WholeEngine, train_step
from tests.engine.tiny_families import save_model
from tests.settings import complete

pytestmark = pytest.mark.slow
SAMPLING = Sampling(n=2, max_tokens=24, seed=5)
FAMILIES = {
    "the bundled model": ("embedded", {}),
    "windows and caps": pytest.param(("gemma2", {}), marks=pytest.mark.weekly),
    "scaled logits and an adapter": pytest.param(
        ("granite", {"lora_rank": 4}), marks=pytest.mark.weekly
    ),
    "experts": pytest.param(("qwen3_moe", {}), marks=pytest.mark.weekly),
}


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES)
def engines(
    request: pytest.FixtureRequest, address: str, tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[WholeEngine, LocalEngine]]:  # fmt: skip
    """One model in a cluster and in this process. A process drives one cluster at a time."""
    kind, adapter = request.param
    folder = tmp_path_factory.mktemp(kind)
    path = kind if kind == "embedded" else save_model(folder, kind)
    config = complete(
        {
            "model": {"path": path, "dtype": "float32"} | adapter,
            "rollout": {"name": "hf"},
            "data": {"max_response_length": SAMPLING.max_tokens},
            "algorithm": {"use_kl_in_reward": True},
            "trainer": {"worker_timeout": 400, "node_timeout": 240},
        }
    )
    cluster = WholeEngine(
        config, pickle.dumps(tokenizer), total_steps=8, insists_on_transfer=True,
        logs=folder / "logs", address=address,
        placement=Placement(1, 0, (0, 1), ((2,),), ()),
    )  # fmt: skip
    with closing(cluster):
        yield cluster, LocalEngine(config, tokenizer, total_steps=8)


def assert_same(actual: tuple[Any, ...], expected: tuple[Any, ...], version: int) -> None:
    for mine, other in zip(actual[0], expected[0], strict=True):
        assert mine.key == other.key and mine.token_ids == other.token_ids
        assert mine.text == other.text and mine.finish_reason == other.finish_reason
        assert mine.weight_version == other.weight_version == version
        assert mine.prompt is other.prompt
    for name in ("old_logprobs_BT", "ref_logprobs_BT", "entropy_BT", "values_BT", "input_ids_BL"):
        a, b = getattr(actual[1], name), getattr(expected[1], name)
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5, msg=name)
    assert actual[2].keys() - {"perf/weights_by_memory", "perf/agree_s"} == expected[2].keys()
    for name, (total, count) in expected[2].items():
        assert actual[2][name][1] == pytest.approx(count, rel=1e-6), name
        assert actual[2][name][0] == pytest.approx(total, rel=1e-3, abs=1e-4), name


def test_the_verbs_give_what_one_process_gives(
    engines: tuple[WholeEngine, LocalEngine], prompts: list[Prompt], tokenizer: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    cluster, local = engines
    pad = tokenizer.pad_token_id
    for version in range(2):
        assert_same(
            train_step(cluster, prompts, SAMPLING, pad),
            train_step(local, prompts, SAMPLING, pad),
            version,
        )
    for name, engine in (("cluster", cluster), ("local", local)):
        (tmp_path / name).mkdir()
        engine.save(tmp_path / name).result(60)
    digests = {".digests-0.json", ".digests-1.json"}  # of each rank, for `digests.json`
    names = {path.name for path in (tmp_path / "cluster").iterdir()}
    assert names == {"actor", "critic", "state"} | digests
    expected = train_step(local, prompts, SAMPLING, pad)
    assert_same(train_step(cluster, prompts, SAMPLING, pad), expected, 2)
    # Each reads what the other wrote, and goes on as before.
    cluster.load(tmp_path / "local")
    assert_same(train_step(cluster, prompts, SAMPLING, pad), expected, 2)
    local.load(tmp_path / "cluster")
    assert_same(train_step(local, prompts, SAMPLING, pad), expected, 2)


def test_rollouts_stream(engines: tuple[WholeEngine, LocalEngine], prompts: list[Prompt]) -> None:
    pieces = list(
        ClusterEngine.generate(engines[0], prompts, Sampling(n=100, max_tokens=24, seed=5))
    )
    assert sum(len(piece) for piece in pieces) == 12 * 100
    assert len(pieces[0]) == 1 and len(pieces) > 2  # the first did not wait for the others


def test_a_mistake_in_a_sampler_and_on_all_ranks_is_reported_and_the_engine_goes_on(
    engines: tuple[WholeEngine, LocalEngine], prompts: list[Prompt], tmp_path: Path
) -> None:
    cluster, _ = engines
    with pytest.raises(DataError, match="p99 has no tokens"):
        list(cluster.generate([*prompts, Prompt("p99", "", (), "", ())], SAMPLING))
    with pytest.raises(ModelError, match="nowhere"):
        cluster.load(tmp_path / "nowhere")
    assert len(list(cluster.generate(prompts, SAMPLING))) == 24
