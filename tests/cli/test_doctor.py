"""`ppo doctor`: every part has its line, what is wrong has its mend, and judges are asked."""

from __future__ import annotations

import json
import resource
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from ppo_cli.cli.app import main
from ppo_cli.cli.doctor import FINDING_STATES
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import WorkerLost
from ppo_cli.machine import machine as machine_module
from ppo_cli.machine.device_record import Feature
from ppo_cli.machine.gpus import Gpu
from ppo_cli.machine.machine import Machine
from ppo_cli.machine.torch_build import TorchBuild
from ppo_cli.machine.versions import VersionFault
from ppo_cli.planning.resolved import Resolved
from ppo_cli.run.doctor import CHECKS, Subject, examine
from tests import settings
from tests.config.settling import settle
from tests.judge_server import JudgeServer
from tests.judge_server.asking import SECRET
from tests.nvml import DRIVER, H100, T4
from tests.nvml import Machine as NvmlMachine
from tests.settings import CPU

JUDGE = ("--use_api_reward", "--rm_api_type", "openai", "--rm_model", "m")


def looked_at(
    capsys: pytest.CaptureFixture[str], *args: str, code: int = 0
) -> dict[str, dict[str, str]]:
    assert main(["doctor", "--json", *args]) == code
    return {finding["part"]: finding for finding in json.loads(capsys.readouterr().out)}


def check(
    part: str, *, gpus: tuple[Gpu, ...] = (), machine: Machine | None = None, probe: bool = False,
    **environ: str,
) -> list[Any]:  # fmt: skip
    return states(part, Subject(resolved(machine or Machine(gpus=gpus)), environ, probe))


def states(part: str, subject: Subject) -> list[Any]:
    """State, text and advice of each finding about a part."""
    return [(FINDING_STATES[f.kind], f.text, f.advice) for f in CHECKS[part](subject)]


def resolved(here: Machine = CPU, *overrides: str) -> Resolved:
    return settle(*overrides, machine=here)


def test_every_part_of_this_machine_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[6:21].strip() for line in lines if not line.startswith(" ")] == list(CHECKS)
    assert all(line.startswith(("ok ", "warn ", f"{'':<20} -> ")) for line in lines)
    findings = looked_at(capsys)
    assert list(findings) == list(CHECKS)
    for part, version in {"torch": "torch", "ray": "ray"}.items():
        assert metadata.version(version) in findings[part]["found"]
    assert findings["judge"]["found"].startswith("no key is set")


def test_what_fails_ends_with_2_and_names_its_mend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").write_text("")
    findings = looked_at(capsys, *JUDGE, "--output_dir", "file/run", code=2)
    assert findings["disk"]["state"] == findings["judge"]["state"] == "fail"
    assert "file cannot be written to" in findings["disk"]["found"]
    assert findings["judge"]["fix"] == "export OPENAI_API_KEY=YOUR_KEY"
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
    machine: NvmlMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    machine.set("driver|535.183.01|12020", T4)
    monkeypatch.setattr(machine_module, "read_build", lambda: TorchBuild("2.13.0", (13, 0)))
    ((state, finding, fix),) = check("torch", machine=machine_module.Machine.here())
    assert state == "fail" and finding.startswith(
        "Tesla T4 (compute capability 7.5, driver 535.183"
    )
    assert finding.endswith("built for CUDA 13.0, which needs driver 580 or newer")
    assert fix.startswith("run `")
    machine.set(DRIVER, T4)
    ((state, finding, fix),) = check("torch", machine=machine_module.Machine.here())
    assert (state, "nvidia-modprobe" in fix) == ("fail", True), finding
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    installed, old = check("torch", machine=machine_module.Machine.here())
    assert installed[0] == "ok" and installed[1].endswith("driver 580.95.05: Tesla T4 16 GiB")
    assert old[0] == "warn" and old[1].startswith("Tesla T4 has no bfloat16")
    ((state, finding, _),) = check("torch")
    assert state == "fail" and "management library (NVML) does not show" in finding
    monkeypatch.setattr("ppo_cli.machine.versions.version_of", lambda name: f"of {name}")
    for part in ("vllm", "python"):
        here = Machine(version_faults=(VersionFault(part, "too old", "run `that`"),))
        assert check(part, machine=here) == [("fail", "too old", "run `that`")]


@pytest.mark.parametrize(
    ("tool", "install"),
    [("apt-get", "sudo apt-get install -y gcc python{v}-dev;"), ("dnf", "sudo dnf install -y gcc"),
     (None, "install both;")],
)  # fmt: skip
def test_what_compiles_kernels_is_looked_for(
    tool: str | None, install: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check("compiler") == [("ok", "only vLLM on GPUs needs one", "")]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    for name in filter(None, (tool,)):
        make_program(tmp_path / name)
    ((state, finding, fix),) = check("compiler", gpus=(H100,))
    assert state == "warn" and "no C compiler (gcc)" in finding and "Python.h" in finding
    assert fix.startswith(install.format(v=f"{sys.version_info.major}.{sys.version_info.minor}"))
    assert "rollout.enforce_eager=true" in fix
    make_program(tmp_path / "gcc")
    ((state, finding, _),) = check("compiler", gpus=(H100,))
    assert state == "warn" and "compiler" not in finding
    (tmp_path / "Python.h").touch()
    ((state, finding, _),) = check("compiler", gpus=(H100,))
    assert state == "ok" and str(tmp_path / "gcc") in finding


def make_program(path: Path) -> None:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def test_expandable_segments_are_proven_first() -> None:
    def state(*proven: Feature, **environ: str) -> tuple[str, str]:
        machine = Machine(gpus=(H100,), proven=frozenset(proven))
        ((state, finding, fix),) = check("gpu memory", machine=machine, **environ)
        assert (state == "ok") == (fix == "")
        return state, finding

    on = "max_split_size_mb:64,expandable_segments:True"
    assert state() == ("ok", "torch's own settings")
    assert state(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False")[0] == "ok"
    assert state(PYTORCH_CUDA_ALLOC_CONF=on)[0] == "warn"
    both = state(PYTORCH_ALLOC_CONF="max_split_size_mb:64", PYTORCH_CUDA_ALLOC_CONF=on)
    assert both == ("ok", "PYTORCH_ALLOC_CONF=max_split_size_mb:64")
    assert state("expandable_segments", PYTORCH_ALLOC_CONF=on)[0] == "ok"


@pytest.mark.parametrize(
    ("hard", "advised"), [(3000, "3000"), (10**6, "65536"), (resource.RLIM_INFINITY, "unlimited")]
)
def test_no_more_open_files_are_advised_than_the_hard_limit_allows(
    hard: int, advised: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (1024, hard))
    ((state, _, fix),) = check("open files")
    assert (state, fix) == ("warn", f"ulimit -n {advised}")


def test_nodes_need_the_folders_and_ports() -> None:
    def nodes(*, probe: bool = True, model: str = "embedded", **trainer: Any) -> Any:
        values = {"model": {"path": model}, "trainer": {"nnodes": 2, **trainer}}
        asked = Config.model_validate(values)
        subject = Subject(settings.resolved(asked), {}, probe)
        return states("nodes", subject)[0]

    assert check("nodes") == [("ok", "one (--nnodes)", "")]
    assert nodes(master_addr="127.0.0.1", node_rank=0)[1].startswith("2; nodes must reach each")
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        node_settings = {"master_addr": "127.0.0.1", "master_port": port, "node_rank": 1}
        assert nodes(**node_settings) == ("ok", f"MASTER_ADDR 127.0.0.1, port {port} answers", "")
        assert nodes(**node_settings, probe=False)[1].startswith("2; nodes must reach each")
    assert nodes(**node_settings)[1].endswith("can be reached; node 0 is not started")
    state, finding, fix = nodes(**node_settings | {"master_addr": "no-such-host.invalid"})
    assert state == "fail" and "security group" in fix, finding
    lost = nodes(model="/no/such/model")
    assert lost[0] == "fail" and "/no/such/model" in lost[1] and "same path" in lost[2]


def test_a_judge_is_asked_only_with_probe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with JudgeServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url("openai"))
        line = (*JUDGE, "--rm_base_url", server.url("openai"))
        findings = looked_at(capsys, *line)
        assert "OPENAI_API_KEY; not called without --probe" in findings["judge"]["found"]
        assert server.count == 0
        findings = looked_at(capsys, *line, "--probe")
        assert findings["judge"]["found"].startswith("openai m answered in ")
        assert findings["judge"]["found"].endswith("; the key may use 5 models, including m")
        assert findings["hub"]["found"].endswith(" answers")
        server.keys = {"another"}
        findings = looked_at(capsys, *line, "--probe", code=2)
        assert findings["judge"]["state"] == "fail" and SECRET not in str(findings)
        assert findings["judge"]["fix"] == "another key or --rm_model"
    findings = looked_at(capsys, *line, "--probe", code=2)
    assert findings["judge"]["fix"] == "--rm_base_url, or the network"
    assert findings["hub"]["state"] == "warn" and "HF_ENDPOINT" in findings["hub"]["fix"]


def test_what_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(subject: Subject) -> Any:
        raise OSError(f"libcudart.so.13: no such file (key {SECRET})")

    monkeypatch.setitem(CHECKS, "torch", broken)
    findings = dict(examine(resolved(), {"OPENAI_API_KEY": SECRET}, probe=False))
    failure = "the check failed: OSError: libcudart.so.13: no such file (key"
    torch = findings["torch"]
    assert torch.kind == "missing" and torch.text.startswith(failure) and SECRET not in torch.text


def test_a_run_names_the_doctor_where_it_may_be_the_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ppo_cli.cli.app import print_error

    monkeypatch.setenv("PPO_COMMAND", "ppo")
    for error, named in (
        (WorkerLost("Learner 1 died."), True),
        (RuntimeError("CUDA error: no kernel image is available"), True),
        (ImportError("libnccl.so.2: cannot open shared object file"), True),
        (ValueError("7 is no number"), False),
    ):
        print_error(error)
        assert ("`ppo doctor`" in capsys.readouterr().err) is named, error
