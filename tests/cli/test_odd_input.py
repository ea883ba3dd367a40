"""Odd files, flags and model folders: refused in a sentence, in bounded time, without a trace."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.cli.app import main
from ppo_cli.config.models.bundled import bundled_path
from tests.cli.mistakes import ROW, TINY, set_desk

CONFIGS = {
    "deep.yaml": "a: " + "[" * 500 + "]" * 500 + "\n",
    "large.yaml": "# " + "x" * 2**21,
    "deep.json": '{"a": ' * 3000 + "1" + "}" * 3000,
}
GOOD = "".join(json.dumps(ROW | {"prompt": f"What is 1 + {n}?"}) + "\n" for n in range(6))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {"tiny.yaml": TINY, "good.jsonl": GOOD, **CONFIGS}
    folder = set_desk(tmp_path, files, monkeypatch)
    os.mkfifo(folder / "fifo")
    os.mkfifo(folder / "fifo.jsonl")
    (folder / "zero").symlink_to("/dev/zero")
    return folder


def wrongly_told(
    typed: Mapping[str, tuple[list[str], str]], capfd: pytest.CaptureFixture[str]
) -> dict[str, str]:
    """Type each command; return those that are not refused with exit code 2 and these words."""
    wrong = {}
    folders = {path for path in Path.cwd().rglob("*") if path.is_dir()}
    for name, (args, fragment) in typed.items():
        code = main(args)
        err = capfd.readouterr().err
        created = {path for path in Path.cwd().rglob("*") if path.is_dir()} - folders
        once = err.count("error: ") + err.count("things are wrong") == 1
        if code != 2 or fragment not in err or "Traceback" in err or not once or created:
            wrong[name] = f"{code} {err} {created or ''}"
    return wrong


def test_settings_and_flags(desk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mistakes: dict[str, tuple[list[str], str]] = {
        "a pipe": (["--config", "fifo"], "a pipe or a device"),
        "a device": (["--config", "zero"], "a pipe or a device"),
        "servers": (["--tools", "t.py", "--mcp_config", "zero"], "a pipe or a device"),
        "a script": (["zero"], "zero"),
        "depth": (["--config", "deep.yaml"], "nested too deeply"),
        "size": (["--config", "large.yaml"], "bytes, more than"),
        "a folder's bytes": (["--output_dir", "o/\udcff"], "'o/\\udcff' is not text in UTF-8."),
    }
    for address in ("http://a\nb", "http://h/\tv1", "http://h\x00/"):
        mistakes[repr(address)] = (
            ["--use_api_reward", "--rm_base_url", address],
            "is not an address" if "\0" not in address else "is not text",
        )
    commands = {
        f"{name} ({word})": ([word, *args], fragment)
        for name, (args, fragment) in mistakes.items()
        for word in ("plan", "train")
        if word == "plan" or name == "a pipe"  # they read settings alike
    }
    commands["a long name"] = (
        ["generate", "embedded", "--data", "good.jsonl", "--out", "x" * 5000], "at most 255 bytes"
    )  # fmt: skip
    assert wrongly_told(commands, capfd) == {}


def test_rows(desk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    bad = b"caf\xe9"
    text = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0\6\0\0\0"), pa.py_buffer(b"ok" + bad)]
    )
    pq.write_table(pa.table({"prompt": text}), "text.parquet")
    pq.write_table(pa.table({"prompt": [b"ok", bad]}), "bytes.parquet")
    fragments = {
        "text.parquet": "row 2, column prompt: is not UTF-8 (byte 0xe9)",
        "bytes.parquet": "row 2, column prompt: is not UTF-8 (byte 0xe9)",
        "fifo.jsonl": "a pipe or a device",
        "deep.json": "nested too deep",
    }
    wrong = {}
    for name, fragment in fragments.items():
        code = main(["data", "check", name])
        out = "".join(capfd.readouterr())
        if code != 2 or fragment not in out or "Traceback" in out:
            wrong[f"check {name}"] = f"{code} {out}"
    train = ["train", "--preset", "embedded", "--config", "tiny.yaml", "--output_dir", "new/run"]
    typed = {name: ([*train, "--train_files", name], args) for name, args in fragments.items()}
    assert wrong | wrongly_told(typed, capfd) == {}


def make_model(
    name: str, change: Mapping[str, Any] | list[Any] | None = None, without: str = ""
) -> Path:
    """Copy the bundled model; `change` goes into its config.json, or stands in its place."""
    folder = Path(shutil.copytree(bundled_path("embedded", "model"), name))
    config = json.loads((folder / "config.json").read_text())
    new = change if isinstance(change, list) else config | dict(change or {})
    (folder / "config.json").write_text(json.dumps(new))
    for file in without.split():
        (folder / file).unlink()
    return folder


def point_index_at(name: str, file: str) -> None:
    folder = make_model(name)
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_model_folders(desk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_model("list", [])
    make_model("words", {"vocab_size": 10})
    make_model("hidden", {"hidden_size": 0})
    make_model("sizes", {"intermediate_size": {"a": 1}})
    make_model("kind", {"model_type": ["qwen2"]})
    os.mkfifo(make_model("pipe") / "notes")
    make_model("layers", {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    point_index_at("passwd", "../../etc/passwd")
    point_index_at("beside", "../elsewhere.safetensors")
    point_index_at("absolute", "/etc/passwd")
    make_model("no_tokenizer", without="tokenizer.json")
    make_model("no_tokenizer_at_all", without="tokenizer.json tokenizer_config.json")
    fragments = {
        "list": "should hold a JSON object",
        "words": "vocab_size 10, but the tokenizer",
        "hidden": "hidden_size 0",
        "sizes": "intermediate_size {'a': 1}",
        "kind": "has no model_type",
        "pipe": "pipe/notes is a pipe",
        "layers": "missing tensors: model.layers.2.*",
        "passwd": "'../../etc/passwd'",
        "beside": "'../elsewhere.safetensors'",
        "absolute": "'/etc/passwd'",
        "no_tokenizer": "There is no tokenizer in no_tokenizer",
        "no_tokenizer_at_all": "There is no tokenizer in",
    }
    run = ["--config", "tiny.yaml", "--output_dir", "new/run", "--model"]
    typed = {
        f"{word} {name}": ([word, *run, name], fragment)
        for name, fragment in fragments.items()
        for word in ("plan", "train")
    }
    typed["export"] = (["export", "pipe", "--out", "exported"], fragments["pipe"])
    assert wrongly_told(typed, capfd) == {}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "the chat template refuses it"),
        ("{{ 'x' * 10**10 }}", "does not end"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "does not end",
        ),
        ("{{ '' }}", "renders it as an empty text"),
        ("{{ 1 // 0 }}", "the chat template refuses it"),
        ("{{ messages[7].content.x.y }}", "the chat template refuses it"),
    ],
)
def test_templates(
    desk: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    message: str,
) -> None:
    monkeypatch.setattr("ppo_cli.data_sets.prompts.TEMPLATE_S", 0.5)
    (make_model("model") / "chat_template.jinja").write_text(template)
    run = ["train", "--config", "tiny.yaml", "--output_dir", "new/run", "--model", "model"]
    assert wrongly_told({template: (run, message)}, capfd) == {}


def test_a_model_without_a_template_is_told_of(
    desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_model("none", without="chat_template.jinja")
    (make_model("empty") / "chat_template.jinja").write_text("")
    for name in ("none", "empty"):
        assert main(["plan", "--config", "tiny.yaml", "--model", name]) == 0
        assert f"The tokenizer in {name} has no chat template" in capfd.readouterr().out


def test_training_without_a_template_says_so(desk: Path) -> None:
    from ppo_cli.data_sets.table import load_prompts
    from ppo_cli.engine.models import load_tokenizer

    tokenizer = load_tokenizer(str(make_model("model")))
    notes = []
    for template in (tokenizer.chat_template, None, ""):
        tokenizer.chat_template = template
        notes.append(" ".join(load_prompts(["good.jsonl"], tokenizer, max_prompt_length=64).notes))
    assert ["no chat template" in note for note in notes] == [False, True, True]


def test_run_folders(desk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("good", "odd", "shut"):
        (desk / "all" / name).mkdir(parents=True)
    (desk / "all" / "good" / "metrics.jsonl").write_text('{"step": 1, "reward_mean": 0.5}\n')
    (desk / "all" / "shut" / "metrics.jsonl").mkdir()
    odd = '{"step": 3, "reward_mean": {"a": 1}, "kl_divergence": "high"}\n[1]\n{"step": "x"}\n{"st'
    (desk / "all" / "odd" / "metrics.jsonl").write_text(odd)
    (desk / "all" / "odd" / "rollouts").mkdir()
    line = '{"score": "x", "uid": 3, "prompt": 4, "parts": [1], "sample": "q", "tokens": "many"}\n7'
    (desk / "all" / "odd" / "rollouts" / "step_000003.jsonl").write_text(line)
    for command in ("show", "report"):
        assert main([command, "all/shut"]) == 2
        assert (
            "metrics.jsonl cannot be read: it is a folder, a pipe or a device."
            in capfd.readouterr().err
        )
        assert main([command, "all/odd"]) == 0  # what is no number is no metric
    capfd.readouterr()
    assert main(["runs", "all"]) == 0
    captured = capfd.readouterr()
    assert "all/good" in captured.out and "all/odd" in captured.out
    assert "all/shut/metrics.jsonl cannot be read" in captured.err
