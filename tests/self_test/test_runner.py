"""How checks are run: in processes that may crash or hang; what is proven, printed and recorded."""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ppo_cli.atomic import is_running
from ppo_cli.cli import doctor
from ppo_cli.cli.app import main
from ppo_cli.machine.device_record import FEATURES
from ppo_cli.self_test import runner
from ppo_cli.self_test.checks import collectives, training
from ppo_cli.self_test.declarations import CHECKS, ROOM, Check, list_proven
from ppo_cli.self_test.results import LayerShape, Outcome, Results, Setup
from ppo_cli.self_test.runner import Progress, run_check, run_checks
from tests.settings import complete

SETUP = Setup("cpu", 0, Path())
QUICK = next(check for check in CHECKS if check.name == "optimizer")


@pytest.mark.slow
def test_a_check_runs_in_a_process_of_its_own() -> None:
    outcome = run_check(QUICK, SETUP)
    assert outcome.state == "ok" and outcome.seconds > 0
    assert "22 comparisons" in outcome.detail


def crash(setup: Setup, results: Results) -> None:
    print("about to crash", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(setup: Setup, results: Results) -> None:
    child = os.fork()
    Path(setup.shape.model, "parent" if child else "child").write_text(str(os.getpid()))
    time.sleep(600)


def refuse(setup: Setup, results: Results) -> None:
    results.compare("a gap", 2.0, 1.0)
    raise ValueError("no such thing\nand more")


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the functions above be found as those of a module of checks."""
    monkeypatch.setattr(runner, "_run_in_process", work_here)


def work_here(check: Check, setup: Setup, pipe: Any) -> None:
    """`_work` of the runner, where the functions of this module are checks."""
    module = ModuleType(f"{ROOM}.trial")
    module.__dict__.update(crash=crash, hang=hang, refuse=refuse, share=share)
    sys.modules[module.__name__] = module
    runner_work(check, setup, pipe)


runner_work = runner._run_in_process


def run_trial(name: str, setup: Setup = SETUP, limit_s: float = 60.0) -> Outcome:
    return run_check(Check("trial", f"trial:{name}", "", 1, limit_s=limit_s), setup)


@pytest.mark.usefixtures("functions")
def test_a_crash_fails_with_its_signal_and_last_words() -> None:
    outcome = run_trial("crash")
    assert outcome.state == "failed"
    assert "signal SIGSEGV" in outcome.detail and "about to crash" in outcome.detail


@pytest.mark.usefixtures("functions")
def test_an_error_fails_with_its_first_line() -> None:
    outcome = run_trial("refuse")
    assert (outcome.state, outcome.detail) == ("failed", "ValueError: no such thing")


@pytest.mark.slow
@pytest.mark.usefixtures("functions")
def test_what_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    setup = replace(SETUP, shape=LayerShape(model=str(tmp_path)))
    outcome = run_trial("hang", setup, limit_s=8.0)
    assert outcome.state == "failed" and "no result within 8 s" in outcome.detail
    pids = [int((tmp_path / name).read_text()) for name in ("parent", "child")]
    deadline = time.monotonic() + 60  # the system reaps an orphan after a while
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def test_checks_that_do_not_apply_are_listed_with_their_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress: list[Progress] = []
    needy = replace(QUICK, name="needy", needs="no_such_package")
    on_gpus = replace(QUICK, name="GPUs", devices=("cuda",))
    outcomes = list(run_checks(SETUP, [needy, on_gpus, QUICK], progress.append))
    assert [o.state for o in outcomes] == ["skipped", "skipped", "ok"]
    assert outcomes[0].detail == "needs no_such_package, which is not installed"
    assert outcomes[1].detail == "needs a GPU"
    assert progress == [Progress(3, 3, "optimizer", QUICK.seconds)]


def test_only_parts_without_a_difference_prove_on_gpus() -> None:
    results = Results()
    with results.part("good", "sleep"):
        results.compare("a", 0.1, 1.0)
    with results.part("wrong", "transfer_ipc"):
        results.compare("b", 2.0, 1.0)
    with results.part("broken", "transfer_nccl"):
        raise RuntimeError("no NCCL")
    outcome = results.outcome("x", "cuda")
    assert outcome.proven == ("sleep",)
    assert outcome.state == "failed"
    assert outcome.detail == "broken: RuntimeError: no NCCL; b by 2 (limit 1)"
    assert results.outcome("x", "cpu").proven == ()


@pytest.mark.parametrize(("gap", "proven"), [(0.0, ("keep_gathered",)), (1.0, ())])
def test_gathered_weights_are_proven_where_no_rank_differs(
    gap: float, proven: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").touch()
    parts = [{collectives.KEPT: {"grad_norm": (difference, 0.5)}} for difference in (0.0, gap)]
    reports = [{"parts": part, "figures": {}} for part in parts]
    monkeypatch.setattr(collectives, "run_ranks", lambda *_: reports)
    results = Results()
    collectives.check_collectives(Setup("cuda", 2, tmp_path), results)
    assert results.outcome("collectives", "cuda").proven == proven


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore")  # of the compiler itself
def test_compiled_layers_have_the_numbers_of_the_formulas(tmp_path: Path) -> None:
    results = Results()
    training.check_compiled(Setup("cpu", 0, tmp_path), results)
    outcome = results.outcome("compiled layers", "cuda")
    assert outcome.proven == ("compiled_layers",), outcome.detail


def test_what_is_not_a_number_differs_and_what_is_not_compared_is_skipped() -> None:
    results = Results()
    results.skip("needs two GPUs")
    outcome = results.outcome("x", "cuda")
    assert (outcome.state, outcome.detail) == ("skipped", "needs two GPUs")
    results.compare("loss", math.nan, 1.0)
    assert results.outcome("x", "cpu").state == "differs"


def test_a_feature_needs_each_of_its_checks() -> None:
    attention = Outcome("attention", "ok", "", proven=("packed_attention", "shared_prompts"))
    steps = Outcome("training steps", "ok", "", proven=("packed_attention",))
    assert list_proven([attention, steps]) == ["packed_attention"]
    assert list_proven([attention]) == []


def test_each_feature_has_a_check_and_each_check_a_function() -> None:
    assert {f for check in CHECKS for f in check.proves} == {*FEATURES}
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        module, _, name = check.function.partition(":")
        assert callable(getattr(importlib.import_module(f"{ROOM}.{module}"), name))


@pytest.mark.parametrize("state", ["ok", "differs", "failed", "skipped"])
def test_the_command_prints_a_table_and_writes_a_record(
    state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    outcome = Outcome("optimizer", state, "as it is", 1.25, {"agree_ms": 2})
    monkeypatch.setattr(runner, "run_checks", lambda setup, tell: iter([outcome]))
    code = 2 if state in ("differs", "failed") else 0
    assert main(["doctor", "--self-test"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "check"
    assert lines[1].startswith("optimizer") and doctor.STATES[state] in lines[1]
    assert "1.2" in lines[1] and lines[1].endswith("as it is; agree ms 2")
    (file,) = tmp_path.glob("ppo-cli/self_tests/*.json")
    assert str(file) in lines[-1]
    record = json.loads(file.read_text())
    assert record["checks"][0]["state"] == state and record["key"]["gpus"] == []
    assert main(["doctor", "--self_test", "--json"]) == code
    printed = json.loads(capsys.readouterr().out)
    assert (printed.pop("path"), printed.pop("not_written")) == (str(file), None)
    assert printed == json.loads(file.read_text())


def test_a_record_that_cannot_be_written_is_announced_before_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    early: list[str] = []

    def no_checks(setup: Setup, tell: Any) -> Iterator[Outcome]:
        early.append(capsys.readouterr().err)
        return iter(())

    monkeypatch.setattr(runner, "run_checks", no_checks)
    reason = f"{tmp_path}/file/ppo-cli/self_tests cannot be written: Not a directory"
    assert main(["doctor", "--self-test"]) == 0
    assert reason in early[0]
    assert f"record: not written: {reason}" in capsys.readouterr().out
    assert main(["doctor", "--self-test", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["path"] is None and printed["not_written"].startswith(reason)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, pytest.param(0.5, marks=pytest.mark.weekly), 2.0])
def test_ctrl_c_while_the_server_imports_prints_no_traceback(seconds: float) -> None:
    command = [sys.executable, "-m", "ppo_cli", "doctor", "--self-test"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0)
    assert process.stderr is not None
    begun = process.stderr.readline()
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    rest = process.communicate(timeout=300)[1]
    assert process.returncode == 130 and "self-test 1/" in begun
    assert "Traceback" not in rest and "leaked" not in rest


def share(setup: Setup, results: Results) -> None:
    sys.modules["shared"] = get_context("spawn").Lock()  # type: ignore[assignment]


@pytest.mark.usefixtures("functions")
def test_a_check_may_remove_what_it_shares(capfd: pytest.CaptureFixture[str]) -> None:
    before = {*Path("/dev/shm").glob("sem.*")}
    assert run_trial("share").state == "skipped"
    assert {*Path("/dev/shm").glob("sem.*")} <= before


def test_the_configured_model_gives_the_sizes_of_layers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,
             "num_hidden_layers": 24, "intermediate_size": 4864, "vocab_size": 151936}  # fmt: skip
    config = {"model_type": "qwen2", "hidden_act": "silu"} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = doctor._read_layer_shape(str(tmp_path))
    assert (shape.heads, shape.kv_heads, shape.head_size, shape.vocabulary) == (14, 2, 64, 151_936)
    assert doctor._read_layer_shape(complete({}).model.path).model == "Qwen/Qwen2.5-0.5B"
    assert doctor._read_layer_shape("nobody/knows").model == "Qwen2.5-7B"


def test_what_a_failure_prevents_is_told_as_skipped() -> None:
    results = Results()
    with results.part("new weights"):
        raise RuntimeError("no memory")
    results.skip("sleep: skipped")
    outcome = results.outcome("sampler", "cpu")
    assert outcome.state == "failed" and outcome.detail.endswith("no memory; sleep: skipped")
