"""Ways to get it wrong: each one message that names the thing and the mend, exit 2, no traces."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from ppo_cli.cli.app import main
from ppo_cli.step.stages import FORMAT
from tests.cli.mistakes import (
    ROW,
    TINY,
    TRAIN,
    Mistake,
    assert_told_once,
    contents,
    set_desk,
)
from tests.forked import PPO, run_forked

SCORE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"


def rows(*rows_of_file: object) -> str:
    """Return rows as JSONL; text stands as it is."""
    return "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows_of_file)


FILES = {
    "tiny.yaml": TINY,
    "good.jsonl": rows(*[ROW | {"prompt": f"What is 1 + {n}?"} for n in range(6)]),
    "seven.jsonl": rows(*[ROW] * 6, '{"prompt": "2 + 2?", "ground_truth"'),
    "object.json": '{"prompt": "1 + 1?"}',
    "role.jsonl": rows(ROW | {"prompt": [{"rol": "user", "content": "hi"}]}),
    "source.jsonl": rows(*[ROW | {"data_source": "openai/gsm8kk"}] * 4),
    "long.jsonl": rows(ROW | {"prompt": "why " * 200}, *[ROW] * 4),
    "alllong.jsonl": rows(*[ROW | {"prompt": "why " * 200}] * 4),
    "bad.parquet": "PAR1 and no more",
    "reward.py": SCORE + "    return 1.0\n",
    "other.py": "def compute_scores(a, b, c):\n    return 1.0\n",
    "syntax.py": "def compute_score(a, b, c)\n    return 1.0\n",
    "signature.py": "def compute_score(text):\n    return 1.0\n",
    "imports.py": "import no_such_package\n\n" + SCORE + "    return 1.0\n",
    "value.py": "compute_score = 3\n",
    "broken.yaml": "actor:\n  clip_ratio: [0.1\n",
    "file": "",
    "model/tokenizer.json": "{}",
    "broken_model/config.json": "{not json",
    "kind/config.json": '{"model_type": "qwen22"}',
    "begun/metrics.jsonl": "",
    "done/metrics.jsonl": '{"step": 1, "reward_mean": 0.5}\n',
    "done/rollouts/step_000001.jsonl": "{}\n",
    "checkpoint/notes.txt": "",
}


# One or a few of each kind; what settings refuse by themselves is in tests/config.
MISTAKES = {
    # Words
    "command": Mistake("trian", "'trian'", "'train'"),
    "no command of data": Mistake("data chek good.jsonl", "'chek'", "'check'"),
    "flag": Mistake("train --batch_sise 3", "no flag --batch_sise", "mean .--batch_size'"),
    "flag without value": Mistake("train --lr", "--lr. requires an argument", "COMMAND --help"),
    "flag of show": Mistake(
        "show done --wurst 3", "no flag --wurst", "mean .--worst'.*ppo show --help"
    ),
    "text for a count of show": Mistake(
        "show done --worst few", "'--worst': this is not a valid integer", "ppo show --help"
    ),
    "preset": Mistake("train --preset embeded", "flag --preset.*'embeded'", "'embedded'"),
    "key": Mistake("train rolout.n=3", "'rolout.n'", "'rollout.n'"),
    "override without =": Mistake("train lr", "'lr'", "key=value|--lr"),
    "rule": Mistake(f"{TRAIN} --rule gsm8kk", "--rule gsm8kk", "'gsm8k'"),
    # Values
    "text for a number": Mistake("train --lr fast", "--lr.*'fast'", "number"),
    "variable": Mistake("train", "env CRITIC_LR", "at most 1", {"CRITIC_LR": "5"}),
    "two at once": Mistake(
        "train --lr x --seed y", "^2 things.*--lr.*--seed", "number", several=True
    ),
    # Settings that clash
    "batch not divisible": Mistake(f"{TRAIN} --mini_batch_size 3", "divisible.*3", "Use .* 2"),
    # Devices, ranks, nodes
    "GPUs that are not there": Mistake(f"{TRAIN} --n_gpus 2", "n_gpus_per_node is 2", "leave"),
    # Parts that are not there
    # YAML
    "missing settings": Mistake("train --config tinny.yaml", "tinny.yaml", "'tiny.yaml'"),
    "bad YAML": Mistake("train --config broken.yaml", "broken.yaml line", "YAML"),
    # Models
    "model path": Mistake(f"{TRAIN} --model ./modell", "modell", "--model.*'model'"),
    "model is a file": Mistake(f"{TRAIN} --model file", "file", "folder that holds config.json"),
    "broken config.json": Mistake(f"{TRAIN} --model broken_model", "broken_model", "save it again"),
    "no weights": Mistake(
        f"{TRAIN} --model kind", "no weights in kind", "name another with --model"
    ),
    # Data
    "no data": Mistake("train --model embedded data.train_files=[]", "no prompts", "--train_files"),
    "data is a folder": Mistake(f"{TRAIN} --train_files model", "model", "file|folder"),
    "bad JSON": Mistake(f"{TRAIN} --train_files seven.jsonl", "seven.jsonl line 7", "JSON"),
    "not rows": Mistake(f"{TRAIN} --train_files object.json", "object.json", "list of rows"),
    "message without role": Mistake(
        f"{TRAIN} --train_files role.jsonl", "role.jsonl line 1, column prompt", "role"
    ),
    "broken parquet": Mistake(f"{TRAIN} --train_files bad.parquet", "bad.parquet", "parquet"),
    "too long": Mistake(
        f"{TRAIN} --train_files long.jsonl data.truncation=error",
        "long.jsonl line 1",
        "--max_prompt_length",
    ),
    "all too long": Mistake(
        f"{TRAIN} --train_files alllong.jsonl data.filter_overlong_prompts=true",
        "All 4 prompts are longer than 64",
        "--max_prompt_length",
    ),
    "unknown data_source": Mistake(
        f"{TRAIN} --train_files source.jsonl", "'openai/gsm8kk'", "'openai/gsm8k'.*--rule"
    ),
    "data check": Mistake("data check seven.jsonl --model no/such", "no/such", "--model"),
    "recipe": Mistake("data prepare gsm8 --out new", "'gsm8'", "gsm8k"),
    "recipe's source": Mistake(
        "data prepare gsm8k --source model --out new", "model", "train|parquet|jsonl"
    ),
    "recipe into a file": Mistake("data prepare gsm8k --out file", "--out file", "folder"),
    # Reward functions
    "reward file": Mistake(f"{TRAIN} --reward_function rewrd.py", "rewrd.py", "'reward.py'"),
    "no such function": Mistake(
        f"{TRAIN} --reward_function other.py", "other.py.*compute_score", "compute_scores"
    ),
    "named function": Mistake(f"{TRAIN} --reward_function reward.py:scor", "scor", "compute_score"),
    "syntax": Mistake(f"{TRAIN} --reward_function syntax.py", "syntax.py", "line 1: expected ':'"),
    "signature": Mistake(
        f"{TRAIN} --reward_function signature.py", "signature.py", "data_source, solution_str"
    ),
    "import": Mistake(f"{TRAIN} --reward_function imports.py", "imports.py", "no_such_package"),
    "not a function": Mistake(f"{TRAIN} --reward_function value.py", "value.py", "function"),
    # Folders
    "output is a file": Mistake(f"{TRAIN} --output_dir file", "--output_dir file", "another"),
    "output under a file": Mistake(f"{TRAIN} --output_dir file/x", "--output_dir", "another"),
    "unwritable output": Mistake(f"{TRAIN} --output_dir /proc/x", "/proc/x", "another"),
    "no checkpoint": Mistake(f"{TRAIN} --resume checkpoint", "--resume checkpoint", "step_000010"),
    "resume misspelt": Mistake(f"{TRAIN} --resume atuo", "--resume atuo", "auto"),
    "show without run": Mistake("show", "outputs", "--output_dir"),
    "show no run": Mistake("show model", "model", "--output_dir"),
    "report no run": Mistake("report model", "model", "--output_dir"),
    "report before a step": Mistake("report begun", "begun.*no step yet", "ppo view begun"),
    "report into no folder": Mistake("report done --out no/x.html", "no/x.html", "no folder no"),
    "report of two": Mistake("report done done", "several runs needs a file", "--out FILE"),
    "view no run": Mistake("view model", "model", "--output_dir"),
    "view on a port": Mistake("view done --host 192.0.2.1", "--host 192.0.2.1", "another --port"),
    "eval of nothing": Mistake("eval", "Name a model", "ppo eval outputs"),
    "eval without rows": Mistake("eval kind", "Name the rows", "--data"),
    "eval of no model": Mistake("eval ./modell", "./modell", "MODEL|folder"),
    "eval of no run": Mistake("eval model --data good.jsonl", "model", "neither a run"),
    "eval before a checkpoint": Mistake(
        "eval done", "done has no complete checkpoint", "--save_freq"
    ),
    "eval of missing rows": Mistake("eval embedded --data god.jsonl", "god.jsonl", "'good.jsonl'"),
    "eval into a file": Mistake(
        "eval embedded --data good.jsonl --out file", "--out file: a file", "another folder"
    ),
    "greedy and several": Mistake("eval embedded --greedy --n 2", "--greedy", "or --n"),
    "runs of no folder": Mistake("runs no/such", "no/such", "run folders"),
    "runs without any": Mistake("runs model", "model holds no run", "config.yaml"),
    "a set not made yet": Mistake(
        "data check sets/math/test.parquet", "sets/math does not", "prepare math --out sets/math"
    ),
    "a group alone": Mistake("presets", "list, show, copy", "presets --help"),
    "explain nothing": Mistake("explain clip_ratoi", "'clip_ratoi'", "'actor.clip_ratio'"),
    "copy over a file": Mistake("presets copy embedded file", "file exists", "another"),
    "copy no preset": Mistake("presets copy embeded new.yaml", "'embeded'", "'embedded'"),
    "fork of no run": Mistake(f"{TRAIN} --fork embedded", "--fork embedded", "RUN@STEP"),
    "fork before a checkpoint": Mistake(
        "train --fork done", "no complete checkpoint", "--save_freq"
    ),
    "generate with nothing": Mistake("generate", "Name a model", "ppo generate outputs"),
    "generate twice": Mistake("generate embedded hi --data good.jsonl", "--data", "keep one"),
    "generate into no folder": Mistake(
        "generate embedded --data good.jsonl --out no/x", "no/x", "no folder no"
    ),
    "CSV of two runs": Mistake("show done done --csv", "--csv", "one"),
    "show a step": Mistake("show done --step 9", "step 9", "--step 1"),
}


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return set_desk(tmp_path, FILES, monkeypatch)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_once_with_its_mend(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_told_once(MISTAKES[name], monkeypatch, capfd)


def test_data_check_names_the_bad_row(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "seven.jsonl"]) == 2
    out, err = capfd.readouterr()
    assert "seven.jsonl line 7: not JSON" in out
    assert "correct or remove them" in out
    assert err == ""


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


def test_other_settings_in_the_same_folder_are_a_new_run(
    desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    typed = [*TRAIN.split(), "--output_dir", "old"]
    assert main(typed) == 0
    first = (desk / "old" / "metrics.jsonl").read_bytes()
    capfd.readouterr()
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


@pytest.mark.parametrize(
    ("largest_file", "thing", "remaining_files"),
    [
        (1000, "--output_dir outputs cannot be written: File too large", []),
        (
            500_000,
            "checkpoint of step 1 could not be written to outputs/checkpoints: File too large",
            ["config.yaml", "metrics.jsonl", "rollouts/step_000001.jsonl"],
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
