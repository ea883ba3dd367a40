"""`ppo bridge verl`, `ppo bridge read`, and `--engine verl`: files, words, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo_cli.cli.app import main
from ppo_cli.extras.migrate.bridge.rewards import decode_row, read_prompts
from ppo_cli.run_folder.folder import run_settings
from tests.cli.mistakes import ROW, TINY, set_desk

ROWS = [ROW | {"prompt": f"What is 1 + {n}?", "ground_truth": str(1 + n)} for n in range(6)]
LINE = "--preset embedded --config tiny.yaml --n_gpus 8"


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = "".join(json.dumps(row) + "\n" for row in ROWS)
    files = {"good.jsonl": rows, "tiny.yaml": TINY}
    return set_desk(tmp_path, files, monkeypatch)


def run(line: str, capfd: pytest.CaptureFixture[str], code: int = 0) -> str:
    capfd.readouterr()
    assert main(line.split()) == code
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    return err if code else out


def test_the_folder_has_all_that_verl_needs(desk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = run(f"bridge verl --out there {LINE} --nnodes 4 --system_prompt Brief.", capfd)
    assert "bash " in output and "node_3.sh" in output
    names = {path.name for path in (desk / "there").iterdir()}
    assert names == {
        "config.yaml", "data", "overrides", "reward.py",
        "node_0.sh", "node_1.sh", "node_2.sh", "node_3.sh",
    }  # fmt: skip
    lines = (desk / "there" / "overrides").read_text().splitlines()
    assert "trainer.nnodes=4" in lines and "algorithm.use_kl_in_reward=true" in lines
    assert f'data.train_files="{desk}/there/data/train.parquet"' in lines
    assert "trainer.test_freq=-1" in lines  # there is nothing to validate on
    assert run_settings(desk / "there").trainer.nnodes == 4
    prompts = read_prompts(desk / "there")
    assert [p.text for p in prompts] == [row["prompt"] for row in ROWS]
    assert [m["role"] for m in prompts[0].messages] == ["system", "user"]


def test_a_begun_run_is_not_continued_with_other_settings(
    desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = f"bridge verl --out there {LINE}"
    run(line, capfd)
    run(f"{line} --clip_ratio 0.1", capfd)  # not begun yet
    (desk / "there" / "verl").mkdir()
    before = (desk / "there" / "overrides").read_bytes()
    output = run(f"{line} --clip_ratio 0.1 actor.clip_ratio_high=0.3", capfd, 2)
    assert "another actor.clip_ratio_high (was 0.1, now 0.3). Name another folder" in output
    assert (desk / "there" / "overrides").read_bytes() == before
    run(f"{line} --clip_ratio 0.1 --max_steps 7 --save_freq 3", capfd)
    run(f"{line} --clip_ratio 0.3 --resume never", capfd)


def test_rows_are_verls_and_hold_what_scoring_needs(
    desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import pyarrow.parquet as pq

    document = json.loads(run(f"bridge verl --out there {LINE} --json", capfd))
    assert str(desk / "there" / "node_0.sh") in document["files"]
    assert "actor_rollout_ref.rollout.n=1" in document["overrides"]
    row = pq.read_table(desk / "there" / "data" / "train.parquet").to_pylist()[2]
    assert row["prompt"] == [{"role": "user", "content": "What is 1 + 2?"}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "3"}
    prompt, split = decode_row(row["extra_info"]["ppo_cli"])
    assert (prompt.ground_truth, prompt.data_source, split) == ("3", ROW["data_source"], "train")


def test_a_plan_for_verl_prints_the_same_overrides(
    desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    written = json.loads(run(f"bridge verl --out outputs {LINE} --json", capfd))["overrides"]
    for line in (f"plan --engine verl {LINE}", f"train --engine verl {LINE} --dry_run"):
        assert [s for s in run(line, capfd).splitlines() if s[0] != "#"] == written


@pytest.mark.parametrize(
    ("extra_args", "name"),
    [
        ("actor_rollout_ref.actor.strategy=megatron", "actor.strategy"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "actor.megatron."),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "rollout.multi_turn.enable"),
        ("trainer.device=npu", "trainer.device"),
        ("--rollout_name sglang", "rollout.name"),
        ("rollout.name=trtllm", "rollout.name"),
    ],
)
def test_settings_that_only_verl_has_reach_it(
    extra_args: str, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = " model_engine=megatron" if "megatron" in extra_args else ""
    written = run(f"bridge verl --out there {LINE} {extra_args}{engine} --json", capfd)
    value = extra_args.rpartition("=")[2].rpartition(" ")[2]
    assert [w for w in json.loads(written)["overrides"] if name in w and value in w]


def test_what_verl_logged_is_a_run_that_can_be_shown(
    desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(f"bridge verl --out there {LINE} --rule arithmetic", capfd)
    output = run("bridge read there", capfd, code=2)
    assert "verl has not logged a step yet" in output
    verl = desk / "there" / "verl"
    (verl / "rollouts").mkdir(parents=True)
    logged = {
        "critic/score/mean": 0.25, "actor/pg_loss": 0.1, "critic/vf_loss": 0.2,
        "actor/pg_clipfrac": 0.05, "response_length/mean": 9.0, "timing_s/step": 3.5, "x/y": 1.0,
    }  # fmt: skip
    lines = [json.dumps({"step": s, "data": logged | {"x/y": s}}) for s in (1, 2)]
    (verl / "metrics_20260101_000000.jsonl").write_text("\n".join(lines) + '\n{"step": 3, "da')
    line = json.dumps({"step": 2, "data": logged | {"critic/score/mean": 0.5}})
    (verl / "metrics_20260102_000000.jsonl").write_text(line + "\n")
    dumped = {"input": "user\nWhat is 1 + 2?", "output": "3", "gts": "3", "step": 1}
    dumps = [dumped | {"score": 1.0}, dumped | {"output": "4", "score": 0.5}]
    (verl / "rollouts" / "1.jsonl").write_text("".join(json.dumps(d) + "\n" for d in dumps))
    row = {
        "uid": "train:good:3", "sample": 0, "prompt": "What is 1 + 2?", "ground_truth": "3",
        "data_source": "d", "reason": "It is right.", "failure": "", "failed": 0.0,
        "own_score": 1.0, "own_parts": {"judge": {"raw": 10.0, "scaled": 1.0}}, "facts": {"a": 1},
        "score": 1.0, "response": "3",
    }  # fmt: skip
    lost = row | {"response": "4", "own_score": None, "failed": 1.0, "failure": "timeout",
                   "score": 0.5, "own_parts": {}}  # fmt: skip
    (verl / "scores.jsonl").write_text("".join(json.dumps(d) + "\n" for d in (row, lost)))
    (verl / "judge.jsonl").write_text('{"step": 1, "judge/calls": 2}\n')

    assert json.loads(run("bridge read there --json", capfd)) == {"steps": 2, "responses": 2}
    shown = json.loads(run("show there --json", capfd))
    assert "reward_mean" in json.dumps(shown)
    metrics = [json.loads(x) for x in (desk / "there" / "metrics.jsonl").read_text().splitlines()]
    assert [(m["step"], m["reward_mean"]) for m in metrics] == [(1, 0.25), (2, 0.5)]
    assert metrics[0]["judge/calls"] == 2 and metrics[0]["x/y"] == 1
    assert metrics[0]["policy_loss"] == 0.1 and metrics[0]["time/step_s"] == 3.5
    worst = run("show there --step 1 --worst 2", capfd)
    assert "It is right." in worst and "timeout" in worst
    rows = (desk / "there" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    first, second = map(json.loads, rows)
    assert (first["score"], first["parts"]["judge"]["raw"], first["a"]) == (1.0, 10.0, 1)
    assert (second["score"], second["imputed"], second["failure"]) == (None, 0.5, "timeout")
