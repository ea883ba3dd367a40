"""Runs that refuse what is in their output folder, or a disk that is full."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from ppo_cli.cli.app import main
from ppo_cli.run_folder.checkpoints import FORMAT
from tests.cli.mistakes import ROW, TINY, TRAIN, contents, set_desk
from tests.forked import PPO, run_forked

FILES = {
    "tiny.yaml": TINY,
    "good.jsonl": "".join(
        json.dumps(ROW | {"prompt": f"What is 1 + {n}?"}) + "\n" for n in range(6)
    ),
    "source.jsonl": (json.dumps(ROW | {"data_source": "openai/gsm8kk"}) + "\n") * 4,
}


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return set_desk(tmp_path, FILES, monkeypatch)


@pytest.mark.slow
def test_what_is_there_already(desk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    typed = [*TRAIN.split(), "--output_dir", "old"]
    assert main(typed) == 0
    before = contents(desk)
    capfd.readouterr()
    saved = "--resume old/checkpoints/step_000001"
    for extra_args, message in {
        f"--seed 7 {saved}": "is of another run, which differs in trainer.seed (was 42, now 7)",
        f"--batch_size 2 --mini_batch_size 2 {saved}": "data.train_batch_size (was 4, now 2)",
        f"--train_files source.jsonl --rule exact {saved}": "data.train_files (other rows)",
        f"--adv_estimator rloo --rollout_n 2 {saved}": "Leave --resume out",
        "--logger wandb --resume never": "leave it out of --logger",
    }.items():
        assert main([*typed, *extra_args.split()]) == 2
        err = capfd.readouterr().err
        assert err.startswith("error: ") and err.count("error: ") == 1
        assert message in err
        assert contents(desk) == before
    checkpoint = desk / "old" / "checkpoints" / "step_000001"
    (checkpoint / "state" / "actor_optimizer.safetensors").write_bytes(b"half")
    assert main([*typed, "--max_steps", "2"]) == 2
    err = capfd.readouterr().err
    assert re.search("error: .*step_000001.*damaged.*--resume never", err, re.DOTALL)


@pytest.mark.slow
def test_other_settings_in_the_same_folder_are_a_new_run(
    desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    typed = [*TRAIN.split(), "--output_dir", "old"]
    assert main(typed) == 0
    first = (desk / "old" / "metrics.jsonl").read_bytes()
    # What a plan says of the folder is what the runs below do.
    for extra_args, note in {
        "": "is complete: 1 of 1 steps",
        "--max_steps 2": "The run resumes after step 1, from old/checkpoints/step_000001",
        "--lr 2e-4 --seed 7": "A new run: the one before had another actor.optim.lr",
        "--resume never": "A new run; the earlier one is moved to a folder in old",
    }.items():
        capfd.readouterr()
        assert main(["plan", *typed[1:], *extra_args.split()]) == 0
        assert note in " ".join(capfd.readouterr().out.split())
    assert main([*typed, "--max_steps", "2", "--logger", "console,tensorboard"]) == 0
    assert "Going on after step 1" in capfd.readouterr().out
    metrics = (desk / "old" / "metrics.jsonl").read_bytes()
    assert metrics.startswith(first)
    assert main([*typed, "--lr", "2e-4", "--seed", "7"]) == 0
    out = capfd.readouterr().out
    assert "trainer.seed (was 42, now 7)" in out and "It is in old/earlier_1." in out
    assert "actor.optim.lr (was 0.0001, now 0.0002)" in out
    assert (desk / "old" / "earlier_1" / "metrics.jsonl").read_bytes() == metrics
    steps = (desk / "old" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == [1]


@pytest.mark.slow
def test_a_checkpoint_of_another_version_is_refused_and_still_exported(
    desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    typed = [*TRAIN.split(), "--output_dir", "old"]
    assert main(typed) == 0
    checkpoint = "old/checkpoints/step_000001"
    state, engine = (desk / checkpoint / "state" / name for name in ("run.json", "engine.json"))
    # What the version before wrote: no number, and two words on each budget.
    unnumbered = json.loads(state.read_text())
    assert unnumbered.pop("format") == FORMAT and unnumbered.pop("digests")
    (desk / checkpoint / "digests.json").unlink()
    older = json.loads(engine.read_text())
    older["budgets"] = {name: [0, None] for name in older["budgets"]}
    engine.write_text(json.dumps(older))
    for number, form in {1: unnumbered, FORMAT + 1: {"format": FORMAT + 1}}.items():
        state.write_text(json.dumps(form))
        before = contents(desk)
        capfd.readouterr()
        assert main([*typed, "--max_steps", "2"]) == 2
        err = capfd.readouterr().err
        assert err.startswith("error: ") and err.count("error: ") == 1 and "Traceback" not in err
        assert f"{checkpoint} has format {number}, and this version" in err
        assert f"format {FORMAT}: start again in another --output_dir" in err
        assert f"`ppo export {checkpoint} --out DIR`" in err
        assert contents(desk) == before
    assert main(["export", checkpoint, "--out", "saved"]) == 0
    assert main([*TRAIN.split(), "--model", "saved", "--output_dir", "new"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("largest_file", "thing", "remaining_files"),
    [
        (1000, "--output_dir outputs cannot be written: File too large", []),
        (
            500_000,
            "checkpoint of step 1 could not be written to outputs/checkpoints: File too large",
            [
                "config.yaml",
                "critic.jsonl",
                "metrics.jsonl",
                "plan.json",
                "rollouts/step_000001.jsonl",
            ],
        ),
        (2_000_000, "checkpoint of step 1 could not be written.*File too large", None),
    ],
)
def test_a_disk_that_takes_no_more(
    largest_file: int, thing: str, remaining_files: list[str] | None, desk: Path
) -> None:
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({largest_file},) * 2)"
    done = run_forked(TRAIN.split(), os.environ, timeout=240, program=f"{limit}\n{PPO}")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error: ") == 1
    assert re.search(thing, done.stderr)
    assert re.search("[Ff]ree some space", done.stderr)
    file_names = sorted(contents(desk / "outputs"))
    assert remaining_files is None or file_names == remaining_files
    assert not any("step_000001/" in name or "unfinished" in name for name in file_names)
