"""`ppo eval` and `ppo generate` as people run them: models, runs, a judge that is asked once."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ppo_cli.cli.app import main
from ppo_cli.config.models.bundled import model_folder, prompt_files
from ppo_cli.planning.resolve import resolve
from ppo_cli.run.evaluate import SampledModel
from ppo_cli.run_folder.lines import read_lines, read_metrics
from ppo_cli.run_folder.sources import find_source
from tests.forked import PPO, Forked
from tests.judge_server import JudgeServer
from tests.waiting import wait_until

KEY = "sk-only-for-tests-1234"
ROWS = Path(prompt_files(["embedded"], "val")[0]).read_text().splitlines()[:12]
TRAINED = """\
model: {path: embedded, dtype: float32}
data: {train_files: [t.jsonl], val_files: [v.jsonl], train_batch_size: 4, max_response_length: 16}
actor: {ppo_mini_batch_size: 4, optim: {lr: 1.0e-3}}
rollout: {n: 2}
trainer: {total_training_steps: 2, save_freq: 1, test_freq: 1}
reward: {rule: exact}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two steps, and what it was trained on."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "t.jsonl").write_text("\n".join(ROWS[:4]))
    (folder / "v.jsonl").write_text("\n".join(ROWS))
    (folder / "c.yaml").write_text(TRAINED)
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert main(["train", "--config", "c.yaml", "--output_dir", "run"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def workdir(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    return trained


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", *args, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def arithmetic(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The facts of each model about its one data source."""
    return [model["sources"]["ppo-cli/arithmetic"] for model in report["models"]]


def test_an_eval_of_a_run_is_its_validation(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_json(capsys, "run", "run@1", "embedded")
    lines = {line["step"]: line["val/reward_mean"] for line in read_metrics(workdir / "run")}
    means = [facts["mean"]["value"] for facts in arithmetic(report)]
    assert means[:2] == [lines[2], lines[1]]
    assert [model["name"] for model in report["models"]] == ["run", "run@1", "embedded"]
    assert [gap["from"] for gap in report["differences"]] == ["run@1", "embedded"]
    rows = read_lines(Path(report["models"][0]["rows"]))
    assert len(rows) == 12 and {row["score"] for row in rows} <= {0.0, 1.0}
    assert main(["eval", "run", "embedded"]) == 0
    out = capsys.readouterr().out
    assert "mean@1" in out and "run less embedded" in out
    assert max(map(len, out.splitlines())) <= 80
    assert read_lines(Path(report["models"][0]["rows"])) == rows  # nothing was sampled again


def test_several_responses_are_drawn(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, "embedded", "--data", "v.jsonl", "--n", "3", "--out", "several")
    assert report["sampling"]["temperature"] == 1.0
    (facts,) = arithmetic(report)
    assert (facts["responses"], list(facts["pass"])) == (36, ["2", "3"])
    rows = read_lines(workdir / "several" / Path(report["models"][0]["rows"]).name)
    assert facts["mean"]["value"] == pytest.approx(sum(row["score"] for row in rows) / 36)
    # Half of the rows go, and one is torn: they are sampled again, the same.
    file = Path(report["models"][0]["rows"])
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:18]) + lines[20][:40])
    report_again = run_json(capsys, "embedded", "--data", "v.jsonl", "--n", "3", "--out", "several")
    assert report_again["models"] == report["models"]
    assert sorted(file.read_bytes().splitlines(keepends=True)) == sorted(lines)
    assert main(["eval", "embedded", "--data", "v.jsonl", "--n", "2", "--out", "several"]) == 2
    assert "--out several holds an eval with another sampling.n" in capsys.readouterr().err


def test_a_limit_of_rows_is_one_of_those_that_are_answered(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("--max_samples", "data.val_max_samples=3"):
        args = [name, "3"] if name.startswith("--") else [name]
        report = run_json(capsys, "embedded", "--data", "v.jsonl", "--out", name.strip("-"), *args)
        assert arithmetic(report)[0]["prompts"] == 3, name


FUNCTION = """
from pathlib import Path

def score(data_source, solution_str, ground_truth, extra_info=None):
    if Path(DOWN).exists() and solution_str == ground_truth:
        raise ValueError("the checker does not answer")
    return WORTH
"""


@pytest.mark.slow
def test_a_reward_function_with_another_text_is_another_eval(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluated(worth: float) -> dict[str, Any]:
        (workdir / "worth.py").write_text(
            FUNCTION.replace("DOWN", "'no'").replace("WORTH", str(worth))
        )
        # The stop texts are a list, which JSON gives back as another type than the settings'.
        args = ["run", "~reward.rule", "--reward_function", "worth.py:score", "rollout.stop=[+,-]"]
        return run_json(capsys, *args)

    first, second = evaluated(1.0), evaluated(0.5)
    assert first["out"] != second["out"]
    assert [arithmetic(report)[0]["mean"]["value"] for report in (first, second)] == [1.0, 0.5]
    file = Path(first["models"][0]["rows"])
    before = file.read_bytes()
    assert evaluated(1.0) == first and file.read_bytes() == before
    assert first["sampling"]["stop"] == ["+", "-"]


def test_rows_are_used_again_where_nothing_that_decides_them_changed(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_json(capsys, "run")["out"]
    args = ["--reward_clip", "2", "reward.timeout=9", "--rm_concurrency", "3"]
    assert run_json(capsys, "run", *args)["out"] == folder
    assert run_json(capsys, "run", "--system_prompt", "Brief.")["out"] != folder


def test_rows_without_a_score_are_asked_again(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    down = workdir / "down"
    text = FUNCTION.replace("DOWN", repr(str(down))).replace("WORTH", "1.0")
    (workdir / "out.py").write_text(text)
    down.touch()
    args = ["run", "~reward.rule", "--reward_function", "out.py:score", "--out", "asked"]
    report = run_json(capsys, *args)
    (facts,) = arithmetic(report)
    assert 0 < facts["failed"] < 12 == facts["responses"]
    down.unlink()
    assert arithmetic(run_json(capsys, *args))[0]["failed"] == 0
    rows = read_lines(Path(report["models"][0]["rows"]))
    assert len(rows) == 12 and all(row["score"] == 1.0 for row in rows)


def test_parts_of_a_mixture_that_answers_would_scale_count_as_they_are(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["eval", "embedded", "--data", "v.jsonl", "--reward_config", "mix.yaml", "--json"]
    reports = {}
    for scaling in ("none", "zscore, clip: 2"):
        (workdir / "mix.yaml").write_text(
            "composite_reward:\n  parts:\n    a: {kind: rule, rule: length, scaling: none}\n"
            f"    b: {{kind: rule, rule: gsm8k, scaling: {scaling}}}\n"
        )
        assert main(args) == 0
        out, err = capsys.readouterr()
        (model,) = json.loads(out)["models"]
        reports[scaling] = model["sources"]
        assert ("Training scales b by the model's responses" in err) is (scaling != "none")
        assert {row["parts"]["b"]["scaled"] for row in read_lines(Path(model["rows"]))} <= {0, 1}
    assert reports["none"] == reports["zscore, clip: 2"]


@pytest.mark.slow
def test_an_adapter_is_evaluated_with_its_base(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--lora_rank", "4", "--lr", "0.02", "--output_dir", "lora", "--max_steps", "3"]
    assert main(["train", "--config", "c.yaml", *args]) == 0
    assert main(["eval", "lora", "embedded", "--data", "v.jsonl", "--rule", "arithmetic"]) == 0
    assert "its weights as they are, as in training" in capsys.readouterr().err
    report = run_json(capsys, "lora", "embedded")
    means = [facts["mean"]["value"] for facts in arithmetic(report)]
    assert means[0] == read_metrics(workdir / "lora")[-1]["val/reward_mean"] != means[1]
    assert run_json(capsys, "lora", "embedded") == report


@pytest.mark.parametrize("adapter", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_that_was_written_again_is_evaluated_again(
    adapter: bool, workdir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(model_folder("embedded"), base)
    model = base
    if adapter:
        model = tmp_path / "lora"
        args = ["--model", str(base), "--lora_rank", "2", "--output_dir", str(model)]
        assert main(["train", "--config", "c.yaml", *args]) == 0
    args = [str(model), "--data", "v.jsonl", "--rule", "length", "--out", str(tmp_path / "rows")]
    first = run_json(capsys, *args)
    rows = Path(first["models"][0]["rows"])
    before = rows.read_bytes()
    assert run_json(capsys, *args) == first and rows.read_bytes() == before
    file = base / "model.safetensors"
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})  # of the same size, under the same path
    report_again = run_json(capsys, *args)["models"][0]
    assert Path(report_again["rows"]) != rows and rows.read_bytes() == before
    answers = {row["response"] for row in read_lines(Path(report_again["rows"]))}
    assert len(answers) == 1, "a model of zeros answers every prompt alike"


TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{ground_truth}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.filterwarnings("default")  # lm-eval's own
def test_a_plan_knows_the_disk_that_checkpoints_take(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["--fork", "run@1", "--max_steps", "4"]
    capsys.readouterr()
    assert main(["plan", *line, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    files = [p for p in (workdir / "run/checkpoints/step_000002").rglob("*") if p.is_file()]
    size = sum(file.stat().st_size for file in files)
    assert plan["disk"]["checkpoint_bytes"] == pytest.approx(size, rel=0.05)
    # Three and the best of the validations; then the run is longer than that.
    assert plan["disk"]["checkpoints_at_most"] == 4 and not any("disk" in n for n in plan["notes"])
    full = shutil._ntuple_diskusage(10**9, 10**9, 4 * size)
    monkeypatch.setattr("shutil.disk_usage", lambda path: full)
    assert main(["plan", *line]) == 0
    text = capsys.readouterr().out
    assert "Disk\n  checkpoints: 9.8" in text and "at most 4 (39" in text
    warning = "MiB free, and checkpoints may take 49.1 MiB more: lower trainer.max_ckpt_to_keep"
    assert warning in text
    assert main(["train", *line, "--output_dir", "full"]) == 0
    assert warning in capsys.readouterr().out


def test_tasks_of_lm_eval(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    (workdir / "sums.yaml").write_text(TASK.replace("FILE", str(workdir / "v.jsonl")))
    report = run_json(capsys, "run", "embedded", "--tasks", "sums.yaml")
    own_report = run_json(capsys, "run", "embedded", "--data", "v.jsonl")
    for model, facts in zip(report["models"], arithmetic(own_report), strict=True):
        measured = model["tasks"]["sums"]["exact_match"]
        assert measured["value"] == pytest.approx(facts["mean"]["value"])
        assert 0 < measured["stderr"] < 0.2
    assert main(["eval", "run", "--tasks", "sums.yaml"]) == 0
    value = f"{report['models'][0]['tasks']['sums']['exact_match']['value']:.4f}"
    assert ["run", "sums", "exact_match", value] in [
        line.split()[:4] for line in capsys.readouterr().out.splitlines()
    ]
    (workdir / "gone.yaml").write_text(TASK.replace("FILE", str(workdir / "gone.jsonl")))
    assert main(["eval", "run", "--tasks", "gone.yaml"]) == 2
    assert "error: lm-eval failed with gone.yaml: " in capsys.readouterr().err


def rows_in(files: Iterable[Path]) -> int:
    return sum(len(read_lines(file)) for file in files)


@pytest.mark.slow
def test_a_judge_is_asked_once_for_each_response_of_a_killed_eval(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with JudgeServer(lambda system, user: 7) as server:
        args = [
            "eval", "embedded", "--data", "v.jsonl", "--out", "judged",
            "--use_api_reward", "--rm_api_type", "openai", "--rm_model", "a-judge",
            "--rm_base_url", server.url("openai"), "--rm_prompt_preset", "math",
            "--rm_cache", "off", "--rm_concurrency", "1",
        ]  # fmt: skip
        server.fail("hang", after=6)
        process = Forked(PPO, args, os.environ, folder=workdir, merged=False)
        judged = (workdir / "judged").glob
        wait_until(lambda: server.count == 7 and rows_in(judged("*.jsonl")) >= 4, 120)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        server.heal()
        (file,) = judged("embedded-*.jsonl")
        rows = read_lines(file)
        assert 0 < len(rows) < 12
        before = server.count
        report = run_json(capsys, *args[1:])
        after = server.count
    (facts,) = arithmetic(report)
    assert facts["responses"] == 12 and facts["failed"] == 0
    assert read_lines(file)[: len(rows)] == rows
    # Each start tries the judge out once; lost is what was under way as it was killed.
    assert after - before == 12 - len(rows) + 1
    assert before - 1 - len(rows) <= 2


def test_generate(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["generate", "run", "12 + 30 = ?", "--greedy", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["prompt"], row["finish_reason"]) == ("12 + 30 = ?", "stop")
    assert main(["generate", "run", "12 + 30 = ?", "--greedy"]) == 0
    assert capsys.readouterr().out == row["response"] + "\n"
    assert main(["generate", "run@1", "--data", "v.jsonl", "--out", "a.jsonl", "--n", "2"]) == 0
    rows = read_lines(workdir / "a.jsonl")
    prompts = [json.loads(line)["prompt"] for line in ROWS]
    assert [row["prompt"] for row in rows] == [prompt for prompt in prompts for _ in range(2)]
    capsys.readouterr()
    # Later lines are read with what was said before, as far as it fits into 64 tokens.
    monkeypatch.setattr("sys.stdin", io.StringIO("12 + 30 = ?\n\n12 + 30 = ?\n1 + 1 = ?\n"))
    limit = ["--max_prompt_length", "64"]
    assert main(["generate", "run", "--greedy", "--json", *limit]) == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["prompt"] for line in lines] == ["12 + 30 = ?", "12 + 30 = ?", "1 + 1 = ?"]
    assert lines[0] == row
    assert err == "(The oldest turn is left out: --max_prompt_length.)\n"


def test_the_history_of_a_chat_is_what_the_model_reads(workdir: Path) -> None:
    resolved = resolve(flags={}, preset="embedded", config_files=[], overrides=[], environ={})
    with closing(SampledModel(resolved.config, resolved.machine, find_source("run"))) as sampled:
        turns = [("user", "1 + 1 = ?"), ("assistant", "2"), ("user", "2 + 2 = ?")]
        prompt = sampled.prompt([{"role": role, "content": content} for role, content in turns])
    assert all(content in prompt.rendered for _, content in turns)
    assert prompt.text == "2 + 2 = ?"


@pytest.mark.slow
def test_a_fork_goes_on_elsewhere_with_other_settings(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.stat().st_mtime_ns for p in (workdir / "run").rglob("*")}
    args = ["train", "--fork", "run@1", "--lr", "2e-3", "--max_steps", "3"]
    assert main(args) == 0
    fork = workdir / "run-step_000001"
    assert [line["step"] for line in read_metrics(fork)] == [2, 3]
    config = resolve(
        flags={}, preset=None, config_files=[fork / "config.yaml"], overrides=[], environ={}
    ).config
    assert (config.actor.optim.lr, config.reward.rule) == (2e-3, "exact")
    assert {p: p.stat().st_mtime_ns for p in (workdir / "run").rglob("*")} == before
    # What it is a fork of, and the only settings of its own, also after another start.
    of_run = f"fork of {workdir / 'run'} at step 1; differs in "
    of_run += "actor.optim.lr, trainer.total_training_steps"
    assert f"This run is a {of_run}" in (text := capsys.readouterr().out)
    assert "  steps                2 to 3 in " in text and "this session" not in text
    assert main([*args, "--resume", "auto", "--max_steps", "3"]) == 0
    assert "This run is complete: 3 of 3 steps" in capsys.readouterr().out
    assert main(["show", str(fork)]) == 0
    assert capsys.readouterr().out.rstrip().endswith(of_run)
    assert main(["plan", *args[1:]]) == 0
    settings, _, rest = capsys.readouterr().out.partition("\n\n")
    assert [line.split()[0] for line in settings.split("\n")[1:-1]] == [
        "actor.optim.lr", "trainer.total_training_steps", "trainer.output_dir",
        "trainer.resume_mode",
    ]  # fmt: skip
    assert "at their default or as in the forked run" in settings and of_run in rest
    # Its first step starts from the same weights; later ones do not.
    assert main(["show", "run", str(fork), "--step", "2"]) == 0
    assert "--- step 2, train: equal answers, score" in capsys.readouterr().out
    assert main(["show", "run", str(fork), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["settings"].keys() == {"actor.optim.lr", "trainer.total_training_steps"}
    steps = {x["step"] for row in compared["prompts"] for x in row["answers"][1:]}
    assert steps <= {2, 3} and 3 in steps
    assert main(["train", "--fork", "run", "--output_dir", "run"]) == 2
    assert "--fork run needs another folder" in capsys.readouterr().err
    for command in ("train", "plan"):
        assert main([command, "--fork", "run", "--output_dir", "longer"]) == 2
        assert "raise --max_steps (or --epochs) above 2" in capsys.readouterr().err
