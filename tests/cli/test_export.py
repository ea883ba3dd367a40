"""`ppo export` as people run it: which checkpoint, where to, what it says, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
)

from ppo_cli.cli.app import main
from ppo_cli.cli.evaluate import format_count
from ppo_cli.config.models.bundled import bundled_path
from ppo_cli.config.schema.run import Data
from ppo_cli.report.validation import describe_choice
from ppo_cli.run.export import choose_checkpoint
from ppo_cli.run_folder.lines import replace_lines
from ppo_cli.run_folder.sources import recorded_quantization

ROOT = Path(__file__).parents[2]
TINY = {
    "vocab_size": 260, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
STEPS = (10, 20, 30)


def actor(step: int) -> Any:
    torch.manual_seed(step)
    return LlamaForCausalLM(LlamaConfig(**TINY))


@pytest.fixture(scope="module")
def base_run(tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Any) -> Path:
    """A run folder with three checkpoints, the second the best, each in several files."""
    run = tmp_path_factory.mktemp("runs") / "run"
    for step in STEPS:
        folder = run / "checkpoints" / f"step_{step:06d}"
        actor(step).save_pretrained(folder / "actor", max_shard_size="10kB")
        critic = LlamaForTokenClassification(LlamaConfig(**TINY, num_labels=1))
        critic.save_pretrained(folder / "critic")
        make_tokenizer().save_pretrained(folder / "actor")
        (folder / "state").mkdir()
    (run / "checkpoints" / "best").symlink_to("step_000020")
    (run / "checkpoints" / "latest").symlink_to("step_000030")
    (run / "metrics.jsonl").write_text("")
    return run


@pytest.fixture
def run(base_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return base_run


def run_json(capsys: pytest.CaptureFixture[str], *args: Any) -> str:
    assert main(["export", *map(str, args)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *args: Any) -> str:
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    assert main(["export", *map(str, args)]) == 2
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err


def is_actor(folder: str | Path, step: int) -> bool:
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = actor(step).state_dict()
    return all(torch.equal(expected[name], t) for name, t in model.state_dict().items())


def test_the_latest_checkpoint_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_json(capsys, run, "--out", "deep/model")
    assert out.splitlines()[0] == "Model in deep/model"
    assert f"{(run / 'checkpoints/step_000030/actor').resolve()} (step 30)" in out
    assert "parameters  10.7 k, float32" in out
    assert "size        43.9 kB in 1 file; --dtype bfloat16 takes half" in out
    assert "ppo generate deep/model 'Your prompt'" in out
    assert is_actor("deep/model", 30)
    assert AutoTokenizer.from_pretrained("deep/model").chat_template
    assert [path.name for path in Path("deep").iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("where", "which", "step"),
    [
        ("", ["--checkpoint", "best"], 20),
        ("", ["--checkpoint", "latest"], 30),
        ("", ["--checkpoint=step_000010"], 10),
        ("checkpoints", [], 30),
        ("checkpoints/best", [], 20),
        ("checkpoints/step_000010", [], 10),
        ("checkpoints/step_000010/actor", [], 10),
    ],
)
def test_what_may_be_named(
    where: str, which: list[str], step: int, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads(run_json(capsys, run / where, "--out", "m", "--json", *which))
    assert record["step"] == step
    assert is_actor("m", step)


def test_json_counts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(run_json(capsys, run, "--out", "m", "--json", "--dtype", "bfloat16"))
    parameters = sum(p.numel() for p in actor(30).parameters())
    assert "64 log-probs equal the checkpoint's" in record.pop("checked")
    assert record == {
        "out": "m",
        "use_as": "--model",
        "source": str((run / "checkpoints/step_000030/actor").resolve()),
        "step": 30,
        "choice": "",
        "base": None,
        "merged": None,
        "dtype": "bfloat16",
        "parameters": parameters,
        "bytes": Path("m/model.safetensors").stat().st_size,
        "files": ["model.safetensors"],
        "card": False,
        "pushed": None,
    }
    assert 0 < record["bytes"] - 2 * parameters < 2000


@pytest.mark.parametrize(
    ("scores", "checkpoint", "choice"),
    [
        ({10: 0.2, 20: 0.9, 30: 0.4}, "step_000020", "the best of 3 validations"),
        ({5: 0.9, 30: 0.4}, "step_000010", "the nearest to step 5"),
        ({10: 0.2, 35: 0.4}, "step_000030", "the nearest to step 35"),  # killed before it was saved
        ({10: 0.2, 30: 0.4}, "step_000030", ""),
        ({20: 0.9}, None, ""),
    ],
)
def test_the_recommended_step_is_exported(
    tmp_path: Path, scores: dict[int, float], checkpoint: str | None, choice: str
) -> None:
    for step in (10, 20, 30):
        (tmp_path / f"checkpoints/step_{step:06d}").mkdir(parents=True)
    lines = [{"step": step, "val/reward_mean": score} for step, score in scores.items()]
    replace_lines(tmp_path / "metrics.jsonl", lines)
    chosen, remark = choose_checkpoint(tmp_path)
    assert chosen == checkpoint and choice in remark and bool(choice) == bool(remark)
    on_page = describe_choice(lines, tmp_path, Data(), [10, 20, 30])
    assert checkpoint is None or on_page.endswith(checkpoint)


def test_the_critic(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_json(capsys, run, "--out", "c", "--critic")
    assert "ppo train --critic_model c" in out
    weights = AutoModelForTokenClassification.from_pretrained("c").state_dict()
    saved = load_file(run / "checkpoints/step_000030/critic/model.safetensors")
    assert all(torch.equal(saved[name], t) for name, t in weights.items())


def test_force_replaces_a_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("m").mkdir()  # an empty folder is no obstacle
    run_json(capsys, run, "--out", "m", "--checkpoint", "best")
    Path("m/old").write_text("x")
    assert "m is not empty" in refused(capsys, run, "--out", "m")
    run_json(capsys, run, "--out", "m", "--force")
    assert is_actor("m", 30)
    assert not Path("m/old").exists()
    assert [path.name for path in Path().iterdir()] == ["m"]


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_told_in_one_sentence(tmp_path: Path) -> None:
    adapter = {"base_model_name_or_path": "gone/away", "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    # A hub at a port where nobody listens is tried again and again, here without the pauses.
    quick = "import sys, time; time.sleep = lambda s: None; from ppo_cli.cli.app import main; "
    command = ["export", str(tmp_path), "--out", str(tmp_path.with_name("m")), "--base", "no/where"]
    done = subprocess.run(
        [sys.executable, "-c", f"{quick} sys.exit(main(sys.argv[1:]))", *command],
        env={
            **os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hub"),
            "HF_ENDPOINT": "http://127.0.0.1:1", "HF_HUB_OFFLINE": "0", "NO_PROXY": "*",
        },
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    asked, message = done.stderr.splitlines()
    assert asked == "asking the hub for 'no/where' …"
    assert message.startswith(f"error: {tmp_path} is an adapter of no/where, which does not")
    assert "connect" in message


def test_an_adapter_is_merged_into_the_model_it_names(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import LoraConfig, get_peft_model

    base = bundled_path("embedded", "model")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False),
    )
    model.peft_config["default"].base_model_name_or_path = "gone/away"
    model.save_pretrained("ckpt/actor", save_embedding_layers=False)
    err = refused(capsys, "ckpt", "--out", "m")
    assert "adapter of gone/away" in err and "--base" in err
    out = run_json(capsys, "ckpt", "--out", "m", "--base", "embedded")
    assert f"merged with {base}" in out
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained("m")(input_ids=ids).logits
        torch.testing.assert_close(merged, model(input_ids=ids).logits, atol=1e-4, rtol=0)
    assert AutoTokenizer.from_pretrained("m").eos_token_id is not None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["RUN", "--out", "m", "--checkpoint", "step_000011"], "Did you mean 'step_000010'?"),
        (["RUN", "--out", "m", "--checkpoint", "bset"], "Did you mean 'best'?"),
        (["RUN/checkpoints/latest", "--out", "m", "--checkpoint", "best"], "is not a run"),
        (["RUN/checkpoints/latest/actor", "--out", "m", "--critic"], "leave --critic out"),
        (["RUN", "--out", "RUN/checkpoints/step_000030/actor", "--force"], "Name another folder"),
        (["RUN", "--out", "RUN", "--force"], "or is in it"),
        (["RUN", "--out", "full"], "full is not empty"),
        (["RUN", "--out", "full", "--force"], "full holds no model but other files"),
        (["RUN", "--out", "full/file"], "full/file is a file"),
        (["RUN", "--out", "m", "--base", "x"], "leave --base out"),
    ],
)
def test_mistakes(
    args: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("full").mkdir()
    Path("full/file").write_text("x")
    command = [arg.replace("RUN", str(run)) for arg in args]
    assert message in refused(capsys, *command)


@pytest.mark.parametrize("name", ["critic", "value"])
def test_a_critic_named_by_its_folder_is_used_as_one(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(name).absolute()
    shutil.copytree(run / "checkpoints/step_000030/critic", folder)
    assert "ppo train --critic_model c" in run_json(capsys, folder, "--out", "c")
    assert (
        json.loads(run_json(capsys, folder, "--out", "d", "--json"))["use_as"] == "--critic_model"
    )
    actor_folder = run / "checkpoints/latest/actor"
    assert json.loads(run_json(capsys, actor_folder, "--out", "e", "--json"))["use_as"] == "--model"


def test_a_run_without_critic_or_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    actor(1).save_pretrained(tmp_path / "checkpoints" / "step_000001" / "actor")
    out = tmp_path / "m"
    assert main(["export", str(tmp_path), "--out", str(out), "--critic"]) == 2
    assert "has no critic" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--out", str(out), "--checkpoint", "best"]) == 2
    assert "no best checkpoint: only validation" in capsys.readouterr().err
    assert not out.exists()


def test_damage_leaves_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad/actor").mkdir(parents=True)
    Path("bad/actor/config.json").write_text("{}")
    save_file({"a": torch.zeros(9)}, "bad/actor/model.safetensors")
    weights = Path("bad/actor/model.safetensors").read_bytes()
    Path("bad/actor/model.safetensors").write_bytes(weights[:-8])
    assert "is damaged: actor/model.safetensors" in refused(capsys, "bad", "--out", "m")


def test_a_full_disk_is_told(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    from ppo_cli.engine import export

    def no_space(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(export, "save_file", no_space)
    err = refused(capsys, run, "--out", "m")
    assert "could not be written to m: I/O error: No space left" in err
    assert "choose another --out" in err


def test_counts_are_said_as_people_do() -> None:
    assert [format_count(n) for n in (999, 1_500, 494_032_768, 7_615_616_512)] == [
        "999 ", "1.5 k", "494 M", "7.62 B",
    ]  # fmt: skip
    assert format_count(988_000_000_000, "G") + "B" == "988 GB"


def test_a_run_says_what_its_adapters_were_trained_on(run: Path, tmp_path: Path) -> None:
    step = tmp_path / "checkpoints" / "step_000010"
    shutil.copytree(run / "checkpoints" / "step_000010", step)
    assert recorded_quantization(step / "actor") is None  # no settings
    adapted = "model: {lora_rank: 8, quantization: nf4}"
    (tmp_path / "config.yaml").write_text(adapted)
    assert recorded_quantization(step / "actor") == "nf4"
    assert recorded_quantization(step / "critic") == "none"
    (tmp_path / "config.yaml").write_text(f"critic: {{{adapted}}}")
    assert recorded_quantization(step / "critic") == "nf4"
    shutil.copytree(step / "actor", tmp_path / "actor")
    assert recorded_quantization(tmp_path / "actor") is None  # in no run
