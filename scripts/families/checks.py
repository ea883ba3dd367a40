"""The checks of one family: real runs of `ppo` in forked processes, compared with the oracle."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from families import oracle
from families.configs import write_model
from families.recorder import Recording, record_run

LIMIT = 1e-5  # nats of a log-prob, values, and gradients as a share of their tensor's largest
RUN_SECONDS = 300
SETTINGS = """
data: {train_files: [rows.jsonl], train_batch_size: 4, max_prompt_length: 64,
  max_response_length: 24}
model: {dtype: float32}
actor: {optim: {lr: 1.0e-3}, ppo_mini_batch_size: 4}
critic: {optim: {lr: 1.0e-2}}
reward: {function: reward.py}
rollout: {n: 2, stop: [e, "7", t, Q, z, "3", k, r]}
trainer: {engine: local, total_training_steps: 4, save_freq: 2, test_freq: -1,
  val_before_train: false}
"""
PROMPTS = ("12 + 30 = ?", "Add 5 and 6, then take 7 away.", "1 + 1", "What is 7 + 8?")
REWARD = '''"""A score that differs from response to response."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return (sum(solution_str.encode()) % 13) / 12.0
'''
# Times, and what compares the responses of a step with those of the first steps in its run folder:
# the folder of a run that goes on elsewhere has fewer.
INCOMPARABLE = ("time/", "perf/", "exploit/")


@dataclass
class Outcome:
    """What one family does: exit codes, gaps, and what is wrong; `error` is the first sentence."""

    family: str
    quick: bool = False  # two steps and their gaps alone
    plan_code: int = -1
    train_code: int = -1
    error: str = ""
    plan_error: str = ""
    critic: bool = False
    without_critic: bool = False
    kernel: str = ""
    rows: str = ""
    adapts: bool = False  # trains with LoRA
    gaps: dict[str, float] = field(default_factory=dict)  # to the oracle
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passes(self) -> bool:
        """Whether the family trains by default and every check holds."""
        return self.train_code == 0 and self.critic and not self.problems

    @property
    def refused(self) -> bool:
        """Whether plan and train both refuse it, and nothing else is wrong."""
        return self.train_code == 2 and self.plan_code == 2 and not self.problems

    @property
    def largest_gap(self) -> float:
        """The largest of all gaps to the oracle."""
        return max(self.gaps.values(), default=float("nan"))


def check_family(family: str, *, quick: bool = False) -> Outcome:
    """Run all checks of a family; `quick` leaves out resume, rate 0, export and LoRA."""
    started = time.monotonic()
    outcome = Outcome(family, quick)
    folder = Path(tempfile.mkdtemp(prefix=f"family-{family}-"))
    try:
        with _working_in(folder):
            _check_in(outcome, quick)
    except Exception:
        outcome.problems.append(f"the check failed: {traceback.format_exc(limit=-2)}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outcome.seconds = time.monotonic() - started
    return outcome


def _check_in(outcome: Outcome, quick: bool) -> None:
    _write_inputs(outcome.family)
    outcome.plan_code, output = run_ppo("plan", "--config", "settings.yaml", "--model", "model")
    outcome.plan_error = last_error(output) if outcome.plan_code else ""
    few = ("--max_steps", "2") if quick else ()
    outcome.train_code, output, recording = _train("run", *few)
    if outcome.train_code == 0:
        _compare(outcome, recording, "run")
        for check in () if quick else CHECKS:
            check(outcome, recording)
        return
    outcome.error = last_error(output)
    if outcome.train_code != 2:
        outcome.problems.append(f"train ends with exit code {outcome.train_code}")
    if outcome.plan_code != 2:
        outcome.problems.append("plan does not refuse what train refuses")
    # What a run without a critic does is worth a line of the table.
    code, output, recording = _train("run", "--adv_estimator", "grpo", *few)
    if code == 0:
        _compare(outcome, recording, "run")
        outcome.without_critic = True


def _write_inputs(family: str) -> None:
    import ppo_cli

    Path("settings.yaml").write_text(SETTINGS)
    Path("reward.py").write_text(REWARD)
    rows = [{"prompt": p, "ground_truth": "1", "data_source": "sums"} for p in PROMPTS]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_model(family, Path("model"), Path(ppo_cli.__file__).parent / "embedded" / "model")


def _train(run: str, *words: str, record: str = "all") -> tuple[int, str, Recording]:
    code, output, recording = fork(partial(_run_recorded, run, words, record))
    return code, output, recording


def _run_recorded(run: str, words: tuple[str, ...], record: str) -> tuple[int, str, Recording]:
    recording = record_run(adapter=record == "adapter") if record else Recording()
    code, output = _call_ppo(
        "train", "--config", "settings.yaml", "--model", "model", "--output_dir", run, *words
    )
    return code, output, recording


def _compare(outcome: Outcome, recording: Recording, run: str, kind: str = "") -> None:
    """Compare the first two steps with the oracle, and look at the first update's metrics."""
    if not kind:
        packed = "packed, shared" if recording.shares_prompts else "packed"
        outcome.kernel, outcome.rows = (
            recording.kernel.split("_")[0],
            packed if recording.packing else "padded",
        )
    gaps, problems = fork(partial(_compare_steps, recording))
    for name, (gap, tensor) in gaps.items():
        outcome.gaps[kind + name] = gap
        outcome.critic |= name == "critic"
        if not gap <= LIMIT:
            problems.append(f"{name} {gap:.1e} off" + (f" ({tensor})" if tensor else ""))
    first = read_metrics(run)[0]
    if first["clip_fraction"] or not _is_still(first):
        problems.append(f"first update: {_describe(first)}")
    outcome.problems += [kind + problem for problem in problems]


def _compare_steps(recording: Recording) -> tuple[dict[str, tuple[float, str]], list[str]]:
    """The largest gap of each kind to the oracle with its tensor, and other problems."""
    import torch

    gaps: dict[str, tuple[float, str]] = {}
    problems: list[str] = []

    def note(name: str, gap: Any, tensor: str = "") -> None:
        if not float(gap) <= gaps.get(name, (-1.0,))[0]:  # NaN counts as farthest
            gaps[name] = float(gap), tensor

    model = oracle.load(Path("model"))
    if names := different_tensors(model.state_dict(), recording.steps[0].state):
        problems.append(f"other weights than the files': {names[:3]}")
    for step in recording.steps:
        model.load_state_dict(step.state)
        with torch.no_grad():
            logprobs_BT = oracle.response_logprobs(model, step.rows)
        mask_BT = step.rows.mask_BT
        note("sampler", (step.sampler_logprobs_BT - logprobs_BT)[mask_BT].abs().max())
        note("annotation", (step.annotated_logprobs_BT - logprobs_BT)[mask_BT].abs().max())
        if step.actor:
            model.load_state_dict(step.actor.state)
            gradients = oracle.actor_gradients(model, step.actor)
            note("actor gradients", *oracle.gradient_gap(step.actor.gradients, gradients))
        if step.critic:
            names = step.critic.state.keys()
            backbone = next(m for m in model.modules() if m.state_dict().keys() == names)
            backbone.load_state_dict(step.critic.state)
            values_BT, gradients = oracle.critic_gradients(backbone, step.critic)
            mask_BT = step.critic.rows.mask_BT
            note("critic", (step.critic.old_BT - values_BT)[mask_BT].abs().max())
            note("critic gradients", *oracle.gradient_gap(step.critic.gradients, gradients))
    return gaps, problems


def _is_still(row: dict[str, Any]) -> bool:
    """Whether the policy of a step is the one that sampled, and that of the start."""
    return abs(row["ppo_ratio"] - 1) <= LIMIT and abs(row["kl_divergence"]) <= LIMIT


def _describe(row: dict[str, Any]) -> str:
    return (
        f"ratio {row['ppo_ratio']:.6f}, clip {row['clip_fraction']:.3f}, "
        f"KL {row['kl_divergence']:.1e}"
    )


def _check_padded(outcome: Outcome, _: Recording) -> None:
    """Where rows are packed by default, padded ones give the same."""
    if outcome.rows == "padded":
        return
    code, output, recording = _train("padded", "--max_steps", "2", "model.packing=false")
    if code:
        outcome.problems.append(f"padded: {last_error(output)}")
        return
    _compare(outcome, recording, "padded", "padded ")


def _check_resume(outcome: Outcome, _: Recording) -> None:
    """Steps 3 and 4 after a resume are those of the whole run, bit for bit."""
    code, output, _ = _train("resumed", "--resume", "run/checkpoints/step_000002", record="")
    if code:
        outcome.problems.append(f"resume: {last_error(output)}")
        return
    last = Path("checkpoints/step_000004")
    whole, resumed = (Path(run) / last for run in ("run", "resumed"))
    files = sorted(path.relative_to(whole) for path in whole.rglob("*.safetensors"))
    different = [str(f) for f in files if (whole / f).read_bytes() != (resumed / f).read_bytes()]
    rows = ([_comparable(row) for row in read_metrics(run)[-2:]] for run in ("run", "resumed"))
    if different or next(rows) != next(rows):
        outcome.problems.append(f"resume differs: {', '.join(different[:2]) or 'metrics'}")


def _check_rate_0(outcome: Outcome, _: Recording) -> None:
    """With a learning rate of 0 nothing moves: ratio 1 and KL 0 in three steps."""
    code, output, _ = _train(
        "rate-0", "--lr", "0", "--max_steps", "3", "trainer.save_freq=-1", record=""
    )
    if code:
        outcome.problems.append(f"rate 0: {last_error(output)}")
        return
    moved = [row for row in read_metrics("rate-0") if not _is_still(row)]
    if moved:
        outcome.problems.append(f"rate 0, step {moved[0]['step']}: {_describe(moved[0])}")


def _check_export(outcome: Outcome, recording: Recording) -> None:
    """The exported folder loads in transformers, every tensor as it was trained."""
    code, output = run_ppo("export", "run", "--out", "exported")
    if code:
        outcome.problems.append(f"export: {last_error(output)}")
        return
    state, info = fork(_load_exported)
    if info:
        outcome.problems.append(f"export: {info}")
    if names := different_tensors(state, recording.last_state):
        outcome.problems.append(f"export differs: {names[:3]}")


def different_tensors(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of the tensors that only one side has, or that differ in a bit."""
    different = one.keys() ^ other.keys()
    different |= {name for name in one.keys() & other.keys() if not one[name].equal(other[name])}
    return sorted(different)


def _load_exported() -> tuple[dict[str, Any], dict[str, int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        "exported", dtype=torch.float32, output_loading_info=True
    )
    return model.state_dict(), {name: len(keys) for name, keys in info.items() if keys}


def _check_lora(outcome: Outcome, _: Recording) -> None:
    """An adapter trains, and step 2 samples as the export of step 1 computes."""
    code, output, recording = _train(
        "lora", "--lora_rank", "4", "--max_steps", "2", "trainer.save_freq=1", record="adapter"
    )
    if code:
        outcome.problems.append(f"LoRA: {last_error(output)}")
        return
    code, output = run_ppo("export", "lora/checkpoints/step_000001", "--out", "merged")
    if code:
        outcome.problems.append(f"LoRA export: {last_error(output)}")
        return
    outcome.adapts = True
    outcome.gaps["LoRA"] = gap = fork(partial(_compare_merged, recording))
    if not gap <= LIMIT:
        outcome.problems.append(f"LoRA: {gap:.1e} from its export")


def _compare_merged(recording: Recording) -> float:
    import torch

    step = recording.steps[1]
    with torch.no_grad():
        logprobs_BT = oracle.response_logprobs(oracle.load(Path("merged")), step.rows)
    return float((step.sampler_logprobs_BT - logprobs_BT)[step.rows.mask_BT].abs().max())


CHECKS = (_check_padded, _check_resume, _check_rate_0, _check_export, _check_lora)


def run_ppo(*words: str) -> tuple[int, str]:
    """Run a command of ppo in a forked process; returns its exit code and what it wrote."""
    code, output = fork(partial(_call_ppo, *words))
    return code, output


def _call_ppo(*words: str) -> tuple[int, str]:
    from ppo_cli.cli.app import main

    with tempfile.TemporaryFile() as log:
        sys.stdout.flush()
        sys.stderr.flush()
        streams = [os.dup(fd) for fd in (1, 2)]
        for fd in (1, 2):
            os.dup2(log.fileno(), fd)
        try:
            code = main(list(words))
        except SystemExit as end:
            code = int(end.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, stream in zip((1, 2), streams, strict=True):
            os.dup2(stream, fd)
        return code, os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")


def fork(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a forked process.

    Raises RuntimeError where it raises, or takes longer than RUN_SECONDS.
    """
    with tempfile.TemporaryFile() as report:
        pid = os.fork()
        if not pid:
            try:
                signal.alarm(RUN_SECONDS)
                result = pickle.dumps((True, work()))
            except BaseException:
                result = pickle.dumps((False, traceback.format_exc(limit=-3)))
            report.write(result)
            report.flush()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        report.seek(0)
        if status:
            raise RuntimeError(f"a process ended with {os.waitstatus_to_exitcode(status)}")
        done, value = pickle.load(report)
    if not done:
        raise RuntimeError(value)
    return value


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def read_metrics(run: str) -> list[dict[str, Any]]:
    """The steps of a run."""
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def _comparable(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(INCOMPARABLE)}


def last_error(output: str) -> str:
    """The error that a command ended with."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    starts = [
        i for i, line in enumerate(lines) if line.startswith(("Error", "ppo: ", "This is a bug"))
    ]
    return " ".join(lines[starts[-1] if starts else -1 :])[:900]
