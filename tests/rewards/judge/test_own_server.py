"""The server that a run starts for its judge: started, watched, ended; vLLM in a whole run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.atomic import is_running
from ppo_cli.errors import RewardError
from ppo_cli.processes.reaper import descendants
from ppo_cli.rewards.judge.prices import find_price
from ppo_cli.rewards.judge.providers import build_provider
from ppo_cli.rewards.judge.providers.local import Judge, Server
from tests.settings import complete_judge
from tests.waiting import free_port, wait_until

# Answers /health, and says its process in a file; its grandchild outlives a careless end.
FAKE = """
import http.server, os, pathlib, subprocess, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *words): pass
subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path(sys.argv[2]).write_text(str(os.getpid()))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    port, says = free_port(), tmp_path / "pid"
    command = [sys.executable, "-c", FAKE, str(port), str(says)]
    server = Server(command, os.environ, f"http://127.0.0.1:{port}/v1")
    yield server, says
    server.stop()


def test_a_server_that_dies_is_started_again_and_nothing_is_left_at_the_end(
    fake: tuple[Server, Path],
) -> None:
    (server, says), notes = fake, []
    before = set(descendants(os.getpid()))
    server.start(notes.append, 30.0)
    first = int(says.read_text())
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: says.read_text() not in ("", str(first)))
    wait_until(server._answers)
    started = set(descendants(os.getpid())) - before
    server.stop()
    assert not [pid for pid in started if is_running(pid)]
    assert len(started) >= 3, "reaper, server and its child"
    assert notes[1].startswith("The judge's server answers")
    assert notes[2:] == ["The judge's server ended; it is started again."]
    assert not server._folder.exists()


@pytest.mark.parametrize(
    ("code", "limit", "why"),
    [("print('no such model'); raise SystemExit(3)", 30.0, "ended. Its last log lines:\nno"),
     ("print('here'); import time; time.sleep(60)", 2.0, "does not answer after 2 s")],
)  # fmt: skip
def test_a_server_that_does_not_come_up_is_told_with_its_last_words(
    code: str, limit: float, why: str
) -> None:
    server = Server([sys.executable, "-uc", code], os.environ, f"http://127.0.0.1:{free_port()}/v1")
    with pytest.raises(RewardError) as caught:
        server.start(lambda note: None, limit)
    assert why in str(caught.value)


def local_judge(**settings: Any) -> Judge:
    api = complete_judge(type="local", model="embedded", **settings)
    provider = build_provider(api, environ={})
    assert isinstance(provider, Judge)
    return provider


def test_the_command_and_its_variables() -> None:
    judge = local_judge(local={"max_model_len": 99, "engine_kwargs": {"reasoning_parser": "qwen3"}})
    command = judge.command({"PPO_VLLM_PYTHON": "/py"})
    assert command[:2] == ["/py", "-P"] and command[2].endswith("/vllm_serve.py")
    assert command[3] == "serve" and command[4].endswith("model"), "vllm serve MODEL"
    options = {name: command[command.index(name) + 1] for name in command[:-1] if name[:2] == "--"}
    assert (options["--max-model-len"], options["--reasoning-parser"]) == ("99", "qwen3")
    assert options["--served-model-name"] == "embedded"
    variables = judge.environment({"OPENAI_API_KEY": "secret", "HOME": "/h"})
    assert "OPENAI_API_KEY" not in variables and len(variables["VLLM_API_KEY"]) == 32
    placed = local_judge(local={"devices": (2, 3)})
    variables = placed.environment({"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert variables["CUDA_VISIBLE_DEVICES"] == "6,7"
    command = placed.command({"PPO_VLLM_PYTHON": "/py"})
    assert command[command.index("--tensor-parallel-size") + 1] == "2"


def test_the_port_of_the_server_does_not_change_the_identity_of_a_judge() -> None:
    first, second = local_judge(), local_judge()
    assert first.base_url != second.base_url and first.identity == second.identity
    assert "files" in json.loads(first.identity)
    price = find_price(complete_judge(type="local", model="embedded", budget_usd=1.0))
    assert price is not None and (price.input, price.output) == (0.0, 0.0)


def instruct_model(folder: Path) -> Path:
    """A model whose next token depends on nothing: it closes what it opened, and likes 7.

    All embeddings are alike and no layer adds to them, so each row of the head is one constant.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from ppo_cli.config.models.bundled import model_folder
    from ppo_cli.engine.models import load_tokenizer

    tokenizer = load_tokenizer(model_folder("embedded"))
    tokenizer.chat_template = "{{ messages[-1]['content'] }}\n"
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=8192,
        tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        for liking, text in ((1.0, "7"), (2.0, '"'), (3.0, None)):
            token = tokenizer.eos_token_id if text is None else tokenizer(text)["input_ids"][-1]
            model.lm_head.weight[token] = liking / 8
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_run_starts_its_judge_goes_on_when_it_is_killed_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    pytest.importorskip("vllm")
    folder, out = instruct_model(tmp_path / "judge"), tmp_path / "run"
    command = [
        sys.executable, "-m", "ppo_cli", "train", "--preset", "embedded", "--use_api_reward",
        "--rm_api_type", "local", "--rm_model", str(folder), "--rm_prompt_preset", "math",
        "--rm_max_tokens", "64", "--rm_timeout", "60", "--rm_cache", "off", "--max_steps", "4",
        "--batch_size", "4", "--mini_batch_size", "4", "--rollout_n", "2", "data.val_max_samples=4",
        "--output_dir", str(out),
    ]  # fmt: skip
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PPO_", "OPENAI_"))}
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
    log_file, seen = tmp_path / "log", set()
    try:
        metrics = out / "metrics.jsonl"
        wait_until(
            lambda: run.poll() is not None or (metrics.exists() and metrics.read_text()), 300
        )
        below = descendants(run.pid)
        seen |= set(below)
        serving = [
            pid for pid in below
            if b"vllm_serve.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]  # fmt: skip
        assert serving, log_file.read_text()[-3000:]
        os.kill(serving[-1], signal.SIGKILL)
        while run.poll() is None:
            seen |= set(descendants(run.pid))
            time.sleep(0.2)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 0, log_file.read_text()[-3000:]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line["reward_mean"] == pytest.approx(2 / 3) for line in steps)
    assert sum(line["judge/cost_usd_total"] for line in steps) == 0
    assert sum(line.get("judge/errors/connection") or 0 for line in steps) > 0
    assert "it is started again" in log_file.read_text()
    wait_until(lambda: not [pid for pid in seen if is_running(pid)])
