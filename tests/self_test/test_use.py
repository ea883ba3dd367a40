"""What runs on GPUs do with the record of a self-test, and how it is sent."""

from __future__ import annotations

import json
import pwd
from pathlib import Path

import pytest
import torch

from ppo_cli.cli.app import main
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.engine.batches import packing
from ppo_cli.engine.batches.packing import enable_packing
from ppo_cli.engine.device import Compute
from ppo_cli.engine.models import load_policy
from ppo_cli.engine.ranks import ALONE
from ppo_cli.machine import device_record
from ppo_cli.machine.device_record import CheckRecord, DeviceKey, DeviceRecord, Feature
from ppo_cli.planning.resolved import Resolved
from ppo_cli.run.machine_report import describe_run, remove_names
from ppo_cli.run_folder.lines import read_metrics, replace_lines
from tests.config.settling import device_notes, settle
from tests.report.page.runs import make_run
from tests.settings import with_gpus

SECRET = "sk-proj-4f8a1c9e7b2d6053e8f7a1b4c9d2e6f0"


def settle_on(gpus: int, *overrides: str, proven: tuple[Feature, ...] = ()) -> Resolved:
    return settle(*overrides, machine=with_gpus(gpus, proven=proven))


@pytest.mark.parametrize(
    ("name", "feature", "on_cpu"),
    [("share_prompts", "shared_prompts", True), ("compile_layers", "compiled_layers", False)],
)
def test_a_faster_way_is_taken_on_gpus_only_where_proven(
    name: str, feature: Feature, on_cpu: bool
) -> None:
    def holds(*overrides: str, gpus: int = 1, proven: tuple[Feature, ...] = ()) -> bool:
        return bool(getattr(settle_on(gpus, *overrides, proven=proven).config.model, name))

    assert holds(gpus=0) is on_cpu and not holds()
    assert holds(proven=(feature,))
    assert not holds(f"model.{name}=false", proven=(feature,))


def test_one_line_names_the_command() -> None:
    def lines(gpus: int, proven: tuple[Feature, ...] = ()) -> list[str]:
        hf = ("rollout.name=hf", "rollout.n=4", "trainer.engine=ray")
        resolved = settle_on(gpus, *hf, proven=proven)
        return [line for line in device_notes(resolved, {}) if "self-test" in line]

    (line,) = lines(1)
    assert "each response computes its prompt again and rows are padded" in line
    assert line.endswith("doctor --self-test` tries the faster ways.")
    assert not lines(1, ("shared_prompts", "packed_attention")) and not lines(0)


@pytest.mark.parametrize("proven", [True, False])
def test_rows_on_a_gpu_are_packed_after_a_passed_self_test(
    proven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_try_gradients", lambda *values: "")
    monkeypatch.setattr(packing, "is_proven", lambda feature: proven)
    on_gpu = Compute(torch.device("cuda"), torch.bfloat16)
    policy = load_policy(model_folder("embedded"), attn_implementation="sdpa")
    assert (enable_packing(policy, "m", on_gpu, ALONE, None).packing is not None) is proven
    policy = load_policy(model_folder("embedded"), attn_implementation="sdpa")
    assert enable_packing(policy, "m", on_gpu, ALONE, True).packing is not None


def test_a_report_carries_the_record_without_names_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setattr("socket.gethostname", lambda: "node-of-mine")
    run = make_run(tmp_path / "run")
    out = tmp_path / "page.html"
    command = ["report", str(run), "--out", str(out), "--self_test"]
    assert main(command) == 2
    assert "doctor --self-test" in capsys.readouterr().err
    detail = f"node-of-mine: {Path.home()}/runs/x <b> {SECRET}"
    check = CheckRecord("products", "ok", detail, 1.0, {})
    record = DeviceRecord(DeviceKey.of_this_machine(), "2026-01-01", [check], [])
    path = device_record.write_record(record)
    text = path.read_text()
    path.write_text("null")
    assert main(command) == 2
    assert f"the record {path} is damaged" in capsys.readouterr().err
    path.write_text(text)
    assert main(command) == 0
    text = out.read_text()
    assert "<summary>Self-test</summary>" in text and "HOST: x &lt;b&gt;" in text
    assert "node-of-mine" not in text.rpartition("<details>")[2] and SECRET not in text
    assert device_record.read_record() == record


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("error:@alice/secret-project/model", "error:model"),
        ("PYTHONPATH=/a/b:@alice/secret/x", "PYTHONPATH=b:x"),
        ("file://@alice/proj/x, file:@alice/y", "x, y"),
        ("sqlite:///@alice/proj/x.db and unix:///run/alice/y", "x.db and y"),
        ("../acme-secret/model7/x.json ./acme/y ../../z", "x.json y z"),
        ("~/acme/x ~alice/acme/y $HOME/acme/z ${HOME}/acme/w", "x y z w"),
        ("'@alice/My Project/secret/x'", "'x'"),
        ("@alice/a,b/it's/c:d/x.py:12: wrong", "x.py:12: wrong"),
        ("@bob", "USER"),
        ("of /srv/Users/bob/ and (/mnt/users/carol)", "of  and (USER)"),
        (
            "cc -isystem@alice/x/std -I@alice/acme/include -L/opt/acme/lib",
            "cc -isystemstd -Iinclude -Llib",
        ),
        ("in ['/ext//acme/x', \"/ext/acme/y\"]", "in ['x', \"y\"]"),
        ("NODE7: node7.acme.example.org:29500 on node7.", "HOST: HOST:29500 on HOST."),
        ("alice, ray_alice and malice", "USER, ray_USER and malice"),
        ("12 tokens/s and/or 3/4 of 1 GiB/s, ratio 1 / 2", None),
        ("https://pytorch.org/docs/stable and Qwen/Qwen3-0.6B", None),
    ],
)
def test_a_text_to_send_has_no_path_host_and_user(
    text: str, cleaned: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "alice")
    monkeypatch.setattr("socket.gethostname", lambda: "node7.acme.example.org")
    text = text.replace("@", "/home" + "/")
    assert remove_names([{"detail": text}]) == [{"detail": text if cleaned is None else cleaned}]


def test_a_user_without_an_entry_sends_a_report_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    device_record.write_record(DeviceRecord(DeviceKey.of_this_machine(), "2026-01-01", [], []))
    run = make_run(tmp_path / "run", steps=3)
    measured = {"perf/tokens_per_s": 9.0, "response_length_mean": 5.0, "time/update_actor_s": 1.0}
    lines = [
        {"step": 0, "val/reward_mean": 0.25},
        *(measured | line for line in read_metrics(run)),
    ]
    replace_lines(run / "metrics.jsonl", lines)
    report = tmp_path / "report.json"
    command = ["doctor", "--json", "--report", str(report), "--output_dir", str(run)]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["run"] == str(run)
    figures = json.loads(report.read_text())["run"]
    assert (figures["steps"], figures["validation"]) == (3, [0.25, 0.5, 0.5, 0.5])
    # The MFU is that of the GPU which the run had, wherever the report is made.
    (run / "config.yaml").write_text("trainer: {n_gpus_per_node: 1}")
    assert describe_run(run)["mfu"] is None
    plan = {"values": {}, "placement": {"gpus": ["NVIDIA H100 80GB HBM3"]}}
    (run / "plan.json").write_text(json.dumps(plan))
    assert describe_run(run)["mfu"] is not None
    # What the report lacks is said before the self-test, which takes minutes.
    replace_lines(run / "metrics.jsonl", lines[:2])
    assert main([*command, "--self_test"]) == 2
    assert "1 step" in capsys.readouterr().err
