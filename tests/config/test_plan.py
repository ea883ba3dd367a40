"""The arithmetic of a step and of a run, and the rows it is counted from."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ppo_cli.data_sets.files import count_rows
from ppo_cli.planning.batches import batch_arithmetic
from ppo_cli.planning.memory.disk import plan_disk
from ppo_cli.planning.run_plan import RunPlan, make_plan
from tests.config.settling import settle


def jsonl(path: Path, rows: int) -> Path:
    path.write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(rows)) + "\n")
    return path


def test_a_run_is_counted_from_rows_to_optimizer_steps(tmp_path: Path) -> None:
    train, val = jsonl(tmp_path / "t.jsonl", 1000), jsonl(tmp_path / "v.jsonl", 50)
    resolved = settle(
        f"data.train_files={train}", f"data.val_files={val}", "data.val_max_samples=30",
        "data.train_batch_size=96", "actor.ppo_mini_batch_size=32", "actor.ppo_epochs=2",
        "critic.ppo_mini_batch_size=48", "critic.ppo_epochs=3", "rollout.n=5",
        "rollout.val_kwargs.n=2", "trainer.total_epochs=4", "trainer.test_freq=15",
        "data.max_prompt_length=100", "data.max_response_length=28",
        "actor.ppo_max_token_len_per_gpu=1280", "critic.ppo_micro_batch_size_per_gpu=7",
    )  # fmt: skip
    assert make_plan(resolved).arithmetic == {
        "prompts_per_step": 96,
        "responses_per_prompt": 5,
        "responses_per_step": 480,
        "train_rows": 1000,
        "total_steps": 40,  # 4 epochs of 10 full batches
        "actor_mini_batches_per_epoch": 3,
        "actor_mini_batch_responses": 160,
        "actor_micro_batches_at_most": 16,  # 10 of the longest fit
        "actor_epochs": 2,
        "actor_optimizer_steps_per_step": 6,
        "critic_mini_batches_per_epoch": 2,
        "critic_mini_batch_responses": 240,
        "critic_micro_batches_at_most": 35,
        "critic_epochs": 3,
        "critic_optimizer_steps_per_step": 6,
        "actor_optimizer_steps": 240,
        "critic_optimizer_steps": 240,
        "reward_calls_per_step": 480,
        "validation_rows": 30,
        "validation_rounds": 4,  # before, at 15 and 30, at the end
        "reward_calls_validation": 240,
        "reward_calls": 40 * 480 + 240,
    }


def test_without_local_files_steps_are_unknown() -> None:
    plan = make_plan(settle("data.train_files=openai/gsm8k"))
    assert plan.arithmetic["total_steps"] is None
    assert plan.arithmetic["reward_calls"] is None
    assert any("unknown steps" in line for line in plan.sentences)


def test_max_steps_needs_no_rows_and_remax_scores_a_baseline() -> None:
    sums = batch_arithmetic(
        settle(
            "trainer.total_training_steps=3", "algorithm.adv_estimator=remax", "data.val_files=[]"
        ).config,
    )
    assert sums["reward_calls"] == 3 * (256 + 256)
    assert "critic_epochs" not in sums


def test_critic_pretraining_is_counted() -> None:
    config = settle(
        "trainer.total_training_steps=3", "data.val_files=[]", "critic.pretrain_until=0.5",
        "model.path=embedded",
    ).config  # fmt: skip
    sums = batch_arithmetic(config)
    assert sums["reward_calls_pretraining"] == 50 * 256
    assert sums["reward_calls"] == (50 + 3) * 256
    assert plan_disk(config, 3).facts["checkpoints_at_most"] == 2  # with the pretrained critic


def test_one_of_a_thing_is_singular() -> None:
    lines = "\n".join(make_plan(settle("trainer.total_training_steps=1")).sentences)
    assert "x 1 epoch =" in lines
    assert "1 step," in lines
    assert "4 mini-batches of 64 responses" in lines


def test_too_few_rows_are_remarked_on(tmp_path: Path) -> None:
    plan = make_plan(settle(f"data.train_files={jsonl(tmp_path / 'a.jsonl', 9)}"))
    assert plan.notes == (
        "There are 9 training rows: --batch_size is lowered to 8 and --mini_batch_size to 2.",
    )
    chosen = settle(f"data.train_files={tmp_path / 'a.jsonl'}", "data.train_batch_size=256").config
    assert chosen.data.train_batch_size == 256  # refused once the rows have been read


def test_the_plan_hides_secrets() -> None:
    plan = make_plan(settle("data.system_prompt=https://me:hunter2@host/v1?api_key=abc"))
    text = json.dumps(plan.as_dict())
    assert "hunter2" not in text
    assert "abc" not in text


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.jsonl", b"{}\n\n{}\n", 2),
        ("a.ndjson", b"{}\n{}", 2),
        ("a.json", b"[1, 2, 3]", 3),
        ("a.json", b'{"data": [1, 2]}', 2),
        ("a.json", b'{"rows": 3}', None),
        ("a.json", b"[1, 2", None),
        ("a.txt", b"x\n", None),
        ("a.parquet", b"no parquet", None),
        ("a.jsonl.gz", gzip.compress(b"{}\n{}\n", mtime=0), 2),
        ("a.jsonl.gz", b"no gzip", None),
    ],
)
def test_rows_are_counted(tmp_path: Path, name: str, content: bytes, rows: int | None) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert count_rows(str(path)) == rows


def test_parquet_rows_are_read_from_the_footer(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"prompt": ["a", "b", "c"]}), tmp_path / "a.parquet")
    assert count_rows(str(tmp_path / "a.parquet")) == 3
    assert count_rows(str(tmp_path)) is None


def scored(*overrides: str, mix: tuple[str, ...] = ()) -> RunPlan:
    """Return the plan of a run of 3 steps of 4 responses, without validation."""
    run = "data.train_batch_size=4 actor.ppo_mini_batch_size=4 data.val_files=[]"
    settings = (*run.split(), "trainer.total_training_steps=3", *overrides)
    return make_plan(settle(*settings, mix=mix))


def test_a_plain_reward_adds_nothing_to_the_plan() -> None:
    assert scored().reward.sentences == ()
    empty = {"total": None, "parts": [], "models": [], "judge_calls": {}}
    assert scored().as_dict()["reward"] == empty


def test_a_reward_model_is_shown_with_how_it_is_read() -> None:
    name = "berkeley-nest/Starling-RM-7B-alpha"
    plan = scored(f"reward.model.path={name}")
    (line,) = plan.reward.sentences
    assert line.startswith(f"reward model: {name} is read as starling (")
    (model,) = plan.as_dict()["reward"]["models"]
    assert (model["path"], model["adapter"], model["part"]) == (name, "starling", None)
    forced = scored(f"reward.model.path={name}", "reward.model.adapter=pair")
    assert "is read as pair (reward.model.adapter says so" in forced.reward.sentences[0]


def test_a_reward_model_that_is_not_there_is_told_in_the_plan() -> None:
    plan = scored("reward.model.path=./no_such")
    (line,) = plan.reward.sentences
    assert line.startswith("reward model: ./no_such cannot be read")
    assert "problem" in plan.as_dict()["reward"]["models"][0]
    assert any("no_such" in note for note in plan.notes)


def test_a_mixture_is_shown_in_a_line_with_its_judges_calls() -> None:
    plan = scored(
        "reward.composite.parts.helpful={only_if: rule >= 1, judge: {votes: 3}}",
        "reward.api.model=m",
        mix=("judge:0.7", "judge:helpful:0.2", "rule:0.1"),
    )
    assert list(plan.reward.sentences) == [
        "total = 0.7 x zscore(judge) + 0.2 x zscore(helpful) (if rule >= 1) + 0.1 x zscore(rule)",
        "judge: 12 calls for responses in the run",
        "judge 'helpful': 36 calls for responses in the run at most: it is asked only if rule >= 1",
    ]
    reward = plan.as_dict()["reward"]
    assert reward["judge_calls"] == {"judge": 12, "helpful": 36}
    assert [(p["name"], p["weight"]) for p in reward["parts"]] == [
        ("judge", 0.7), ("helpful", 0.2), ("rule", 0.1),
    ]  # fmt: skip
    assert json.dumps(reward)
