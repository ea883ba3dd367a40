"""A judge on this machine: the script that serves it, and a real vLLM asked end to end.

The tests marked vllm need PPO_VLLM_PYTHON (a Python that has vLLM) and an instruct model:
PPO_JUDGE_MODEL, or models/SmolLM2-135M-Instruct as scripts/get_smollm2.py writes it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply
from ppo_cli.rewards.judge.prompt import Material, load_template
from ppo_cli.rewards.judge.providers import build_provider
from ppo_cli.rewards.judge.providers.local import Judge
from ppo_cli.rewards.judge.verdict import read_answer
from ppo_cli.rewards.remote.failures import Failure
from tests.settings import complete_judge

needs_no_gpu = pytest.mark.skipif(
    any(Path("/dev").glob("nvidia[0-9]*")) or sys.platform != "linux",
    reason="Linux without a GPU only",
)
# Keeps a tiny model from saying one thing for ever; passed to vLLM behind the script's --.
NO_RAMBLING = ("--override-generation-config", '{"repetition_penalty": 1.15}')


@pytest.fixture(scope="module")
def root() -> Path:
    return Path(__file__).parents[3]


def environment(**extra: str) -> dict[str, str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PPO_", "OPENAI_"))}
    return {**environ, "PPO_PYTHON": sys.executable, **extra}


def serve(root: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run the script where it is expected to stop at once."""
    return subprocess.run(
        [str(root / "scripts" / "local_judge.sh"), *arguments],
        env=environment(**extra), capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def free_port() -> int:
    return int(str(urlsplit(Judge.default_url({})).port))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The outside of an instruct model."""
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 2048}')
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def assert_stops(completed: subprocess.CompletedProcess[str], sentence: str) -> None:
    assert completed.returncode == 2, completed.stderr
    assert sentence in completed.stderr
    assert len(completed.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "Name the folder of an instruct model"),
        (("nowhere/at/all",), "There is no folder nowhere/at/all"),
        (("--prt", "8001"), "There is no option --prt"),
        (("--port",), "--port needs a value, for example --port 8001"),
        ((".", ".."), "One model folder is served"),
    ],
)
def test_a_mistyped_command_is_one_sentence(
    root: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    assert_stops(serve(root, *arguments), sentence)


@needs_no_gpu
@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.json", None, "is no model folder"),
        ("config.json", "{", "config.json is damaged"),
        ("model.safetensors", None, "is no model folder"),
        ("chat_template.jinja", None, "has no chat template; a judge must be an instruct model"),
    ],
)
def test_a_folder_that_cannot_judge_is_named(
    root: Path, folder: Path, name: str, content: str | None, sentence: str
) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    assert_stops(serve(root, str(folder)), sentence)


@needs_no_gpu
def test_a_taken_port_is_said_before_anything_is_installed(root: Path, folder: Path) -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = str(occupied.getsockname()[1])
        assert_stops(serve(root, str(folder), "--port", port), f"Port {port} cannot be used")


@needs_no_gpu
@pytest.mark.parametrize("variable", ["PPO_PYTHON", "PPO_VLLM_PYTHON"])
def test_a_python_that_does_not_suit_is_named(root: Path, folder: Path, variable: str) -> None:
    completed = serve(root, str(folder), **{variable: "/bin/false"})
    assert_stops(completed, f"{variable}=/bin/false is not a Python")


@needs_no_gpu
def test_a_folder_with_other_files_is_never_emptied(
    root: Path, folder: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    completed = serve(root, str(folder), "--port", str(free_port()), PPO_JUDGE_VENV=str(mine))
    assert_stops(completed, "holds other files")
    assert (mine / "thesis.txt").read_text() == "years of work"


def vllm_python() -> str:
    python = os.environ.get("PPO_VLLM_PYTHON", "")
    if not python:
        pytest.skip("PPO_VLLM_PYTHON names no Python that has vLLM")
    probe = "import importlib.util as i, sys; sys.exit(not i.find_spec('vllm'))"
    if subprocess.run([python, "-c", probe], capture_output=True).returncode:
        pytest.skip(f"vLLM is not installed in PPO_VLLM_PYTHON={python}")
    return python


@pytest.fixture(scope="module")
def judge(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiReward]:
    """A served model, and the settings that reach it; ended with a SIGTERM to the script."""
    python = vllm_python()
    model = Path(os.environ.get("PPO_JUDGE_MODEL", root / "models" / "SmolLM2-135M-Instruct"))
    if not model.is_dir():
        pytest.skip(f"no instruct model in {model}; scripts/get_smollm2.py makes one")
    port, arguments_file = free_port(), tmp_path_factory.mktemp("judge") / "words"
    command = [
        str(root / "scripts" / "local_judge.sh"), str(model), "--port", str(port),
        "--name", "local", "--cpu", "--", *NO_RAMBLING,
    ]  # fmt: skip
    with arguments_file.open("w") as out:
        script = subprocess.Popen(
            command, stderr=out, env=environment(PPO_VLLM_PYTHON=python, PPO_JUDGE_THREADS="1")
        )
    try:
        end = time.monotonic() + 200
        while "The judge is ready" not in arguments_file.read_text():
            assert script.poll() is None and time.monotonic() < end, arguments_file.read_text()
            time.sleep(0.5)
        address = f"http://127.0.0.1:{port}/v1"
        assert f"--rm_base_url {address}" in arguments_file.read_text()
        yield complete_judge(
            enable=True, type="openai", model="local", base_url=address, prompt_preset="math"
        )
    finally:
        script.send_signal(signal.SIGTERM)
        script.wait(60)


def ask(api: ApiReward, material: Material) -> Reply:
    async def once() -> Reply:
        provider = build_provider(api, environ={})
        question = load_template(api).question(material)
        try:
            reply = await provider.ask(question, timeout=120)
            assert not provider.dropped(), "vLLM takes every parameter that is sent"
            return reply
        finally:
            await provider.close()

    return asyncio.run(once())


@pytest.mark.slow
def test_a_real_server_gives_a_verdict_on_the_scale(judge: ApiReward) -> None:
    reply = ask(judge, Material("What is 2 + 3?", "5", "5", {}))
    question = Question("", "", "", load_template(judge).scale)
    value, reason, _ = read_answer(reply, question)
    assert value in range(1, 11)
    assert reason
    assert reply.usage.input > 500
    assert reply.usage.output > 5


@pytest.mark.slow
def test_a_name_that_is_not_served_is_hopeless(judge: ApiReward) -> None:
    with pytest.raises(JudgeError) as caught:
        ask(judge.model_copy(update={"model": "other"}), Material("2+3?", "5", "5", {}))
    assert caught.value.kind is Failure.FATAL
    assert caught.value.cause == "http_404"
