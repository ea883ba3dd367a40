"""verl 0.9.1's own reward loop, with our judge behind it: limits, failures, extra info."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.extras.migrate.bridge.settled import verl_config_dir, write_judged_run
from tests.judge_server.server import JudgeServer

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.slow,  # Ray, and a limit of calls a minute
    pytest.mark.filterwarnings("ignore"),
]
SAMPLES, WORKERS, AT_ONCE, A_MINUTE = 256, 8, 12, 240
UNLUCKY = "unspeakable"  # the judge refuses these rows for good: one in 16


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    with JudgeServer(latency=3.0, score=lambda system, user: 8) as server:
        server.fail("refusal", said=UNLUCKY)
        server.fail(500, share=1 / 16)
        yield server


def composed(folder: Path, url: str) -> Any:
    """Write the folder of a run with this judge, and compose verl's own configuration from it."""
    config_dir = verl_config_dir()
    import hydra

    rows = [
        {"prompt": f"{UNLUCKY if i % 16 == 3 else 'What'} is number {i}?", "ground_truth": str(i)}
        for i in range(SAMPLES // 4)
    ]
    write_judged_run(
        folder, rows, url, "data.train_batch_size=64", "rollout.n=4",
        f"reward.api.concurrency={AT_ONCE}", f"reward.api.max_rpm={A_MINUTE}",
    )  # fmt: skip
    with hydra.initialize_config_dir(config_dir, version_base=None):
        lines = (folder / "overrides").read_text().splitlines()
        return hydra.compose("ppo_trainer", overrides=lines)


def sampled(config: Any) -> Any:
    """Four responses to each row, as verl's rollout hands them to the reward loop."""
    import numpy as np
    import pyarrow.parquet as pq
    import torch
    from verl.protocol import DataProto
    from verl.utils import hf_tokenizer

    rows = [r for r in pq.read_table(config.data.train_files).to_pylist() for _ in range(4)]
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    texts = [f"{k}: it is {row['reward_model']['ground_truth']}." for k, row in enumerate(rows)]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    longest = max(map(len, ids))
    responses = torch.tensor([row + [tokenizer.pad_token_id or 0] * (longest - len(row))
                              for row in ids])  # fmt: skip
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
    ones = torch.ones_like(responses)
    tensors = {
        "prompts": ones, "responses": responses, "input_ids": torch.cat([ones, responses], 1),
        "attention_mask": torch.cat([ones, mask], 1),
    }  # fmt: skip
    names = ("data_source", "reward_model", "extra_info")
    others = {name: np.array([row[name] for row in rows], dtype=object) for name in names}
    return DataProto.from_dict(tensors=tensors, non_tensors=others)


def most_in_a_minute(times: list[float]) -> int:
    return max(sum(start <= t < start + 60.0 for t in times) for start in times)


def test_limits_hold_for_all_workers_and_failures_are_flagged(
    tmp_path: Path, judge: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "for-the-loopback")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    config = composed(tmp_path, judge.url("openai"))
    import ray
    from verl.experimental.reward_loop.reward_loop import RewardLoopManager

    assert config.reward.num_workers == WORKERS
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    try:
        loop = RewardLoopManager(config)
        scored = loop.compute_rm_score(sampled(config))
    finally:
        ray.shutdown()

    busiest_minute = most_in_a_minute([call.time for call in judge.calls])
    assert AT_ONCE - 2 <= judge.state.most_in_flight <= AT_ONCE
    assert busiest_minute <= A_MINUTE
    assert judge.count > SAMPLES  # failed calls were asked again
    assert judge.rejected == 0
    output = scored.non_tensor_batch
    values = scored.batch["rm_scores"].sum(-1).tolist()
    assert len(values) == SAMPLES and {len(column) for column in output.values()} == {SAMPLES}
    unlucky = [i // 4 % 16 == 3 for i in range(SAMPLES)]
    assert [bool(failed) for failed in output["failed"]] == unlucky
    assert sum(unlucky) == SAMPLES // 16
    # Nothing that failed is a 0: it has the mean of what was judged, and says so.
    judged = 7 / 9  # 8 on a scale from 1 to 10
    assert values == pytest.approx([judged] * SAMPLES)
    assert all(output["imputed"][i] == 1.0 for i in range(SAMPLES) if unlucky[i])
    assert all(("refus" in output["failure"][i]) == unlucky[i] for i in range(SAMPLES))
    assert output["judge"].tolist() == pytest.approx([8.0] * SAMPLES)
    lines = (tmp_path / "verl" / "scores.jsonl").read_text().splitlines()
    assert len(lines) == SAMPLES
    print(
        f"at once {judge.state.most_in_flight}, in a minute {busiest_minute}, calls {judge.count}"
    )
