"""`ppo doctor`: every part has its line, what is wrong has its mend, and judges are asked."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from ppo_cli.cli.app import main
from ppo_cli.config.schema import Config
from ppo_cli.errors import WorkerLost
from ppo_cli.run.doctor import CHECKS, Finding, Machine, examine
from tests.judge_server import JudgeServer
from tests.judge_server.asking import SECRET

JUDGE = ("--use_api_reward", "--rm_api_type", "openai", "--rm_model", "m")


def looked_at(
    capsys: pytest.CaptureFixture[str], *words: str, code: int = 0
) -> dict[str, dict[str, str]]:
    assert main(["doctor", "--json", *words]) == code
    return {one["part"]: one for one in json.loads(capsys.readouterr().out)}


def check(part: str, *, gpus: int = 0, probe: bool = False, **environ: str) -> list[Any]:
    return list(CHECKS[part](Machine(Config(), environ, gpus, probe)))


def test_every_part_of_this_machine_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[6:21].strip() for line in lines if not line.startswith(" ")] == list(CHECKS)
    assert all(line.startswith(("ok ", "warn ", f"{'':<20} -> ")) for line in lines)
    found = looked_at(capsys)
    assert list(found) == list(CHECKS)
    for part, version in {"torch": "torch", "ray": "ray"}.items():
        assert metadata.version(version) in found[part]["found"]
    assert found["judge"]["found"].startswith("no key is set")


def test_what_fails_ends_with_2_and_names_its_mend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").write_text("")
    found = looked_at(capsys, *JUDGE, "--output_dir", "file/run", code=2)
    assert found["disk"]["state"] == found["judge"]["state"] == "fail"
    assert "file cannot be written to" in found["disk"]["found"]
    assert found["judge"]["fix"] == "export OPENAI_API_KEY=YOUR_KEY"
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        (answers,) = check("ray", RAY_ADDRESS=f"127.0.0.1:{port}")
    (silent,) = check("ray", RAY_ADDRESS=f"127.0.0.1:{port}")
    assert (answers[0], silent[0]) == ("ok", "fail") and "unset RAY_ADDRESS" in silent[2]
    monkeypatch.setattr(metadata, "requires", lambda name: [
        "numpy<1", "of-nobody>=2; sys_platform != 'x'", "also-not; extra == 'dev'", "ray",
    ])  # fmt: skip
    (packages,) = check("packages")
    assert packages[0] == "fail" and "also-not" not in packages[1]
    assert packages[1].endswith("; of-nobody>=2 is needed, none is here")
    assert packages[2] == f"{sys.executable} -m pip install 'numpy<1' 'of-nobody>=2'"


def test_gpus_without_their_build_or_driver_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    if torch.version.cuda is None:
        ((state, found, _),) = check("torch", gpus=2)
        assert state == "fail" and "built for CPUs, and there are GPUs here (2)" in found
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 535.183.01\n")
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ((state, found, fix),) = check("torch", gpus=1)
    assert state == "fail" and found.endswith("CUDA 13.0: the driver 535.183.01 is too old for it")
    assert fix == "install NVIDIA's driver 580 or newer"
    versions = {"vllm": "0.32.0", "torch": "2.12.0+cu130"}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy", "torch==2.13.0"])
    ((state, found, fix),) = check("vllm", gpus=1)
    assert (state, fix) == ("fail", "scripts/setup vllm")
    assert found == "vllm 0.32.0 is built for torch 2.13.0, and 2.12.0 is here"


def test_a_judge_is_asked_only_with_probe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with JudgeServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url("openai"))
        line = (*JUDGE, "--rm_base_url", server.url("openai"))
        found = looked_at(capsys, *line)
        assert "OPENAI_API_KEY; not called without --probe" in found["judge"]["found"]
        assert server.count == 0
        found = looked_at(capsys, *line, "--probe")
        assert found["judge"]["found"].startswith("openai m answered in ")
        assert found["judge"]["found"].endswith("; the key may use 5 models, this one too")
        assert found["hub"]["found"].endswith(" answers")
        server.keys = {"another"}
        found = looked_at(capsys, *line, "--probe", code=2)
        assert found["judge"]["state"] == "fail" and SECRET not in str(found)
        assert found["judge"]["fix"] == "another key or --rm_model"
    found = looked_at(capsys, *line, "--probe", code=2)
    assert found["judge"]["fix"] == "--rm_base_url, or the network"
    assert found["hub"]["state"] == "warn" and "HF_ENDPOINT" in found["hub"]["fix"]


def test_what_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(machine: Machine) -> Any:
        raise OSError(f"libcudart.so.13: no such file (key {SECRET})")

    monkeypatch.setitem(CHECKS, "torch", broken)
    found = {one.part: one for one in examine(Config(), {"OPENAI_API_KEY": SECRET}, probe=False)}
    said = "cannot be looked at: OSError: libcudart.so.13: no such file (key"
    assert isinstance(found["torch"], Finding) and found["torch"].state == "fail"
    assert found["torch"].found.startswith(said) and SECRET not in found["torch"].found


def test_a_run_names_the_doctor_where_it_may_be_the_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ppo_cli.cli.app import exit_code_of

    monkeypatch.setenv("PPO_COMMAND", "ppo")
    for error, named in (
        (WorkerLost("Learner 1 died."), True),
        (RuntimeError("CUDA error: no kernel image is available"), True),
        (ImportError("libnccl.so.2: cannot open shared object file"), True),
        (ValueError("7 is no number"), False),
    ):
        exit_code_of(error)
        assert ("`ppo doctor`" in capsys.readouterr().err) is named, error
