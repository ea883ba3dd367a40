"""Functions and rows in Python: the same run as from files, the same file in each process."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ppo_cli import plan, train
from ppo_cli.algo.advantages import compute_advantages, rloo
from ppo_cli.algo.losses import policy_loss
from ppo_cli.callables import write_rows
from ppo_cli.errors import ConfigError, UserError
from ppo_cli.library import Run

ROOT = Path(__file__).resolve().parents[2]
ROWS = [{"prompt": f"{i}+{i}=", "ground_truth": str(2 * i)} for i in range(8)]
SMALL = {
    "preset": "embedded", "batch_size": 8, "mini_batch_size": 8, "rollout_n": 2, "rows": ROWS,
    "val_rows": ROWS[:2], "max_steps": 2, "save_freq": 1,
}  # fmt: skip
FIRST = frozenset("123456")


@functools.lru_cache
def share(text: str) -> float:
    return sum(letter in FIRST for letter in text) / max(1, len(text))


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return share(solution_str)


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(letter in "123456" for letter in solution_str) / max(1, len(solution_str))
"""
LOSS = """
def clipped(new_logprobs_BT, old_logprobs_BT, advantages_BT, clip_high):
    ratio_BT = (new_logprobs_BT - old_logprobs_BT).exp()
    return -advantages_BT * ratio_BT.clamp(max=1 + clip_high)
"""


def clipped(
    new_logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, clip_high: float
) -> Tensor:
    ratio_BT = (new_logprobs_BT - old_logprobs_BT).exp()
    return -advantages_BT * ratio_BT.clamp(max=1 + clip_high)


def results(run: Run) -> dict[str, Any]:
    names = ("reward_mean", "policy_loss", "grad_norm", "entropy", "clip_fraction")
    return run.metrics.loc[1:, names].to_dict()


@pytest.mark.slow
def test_a_run_is_that_of_files_and_resumes(desk: Path) -> None:
    Path("reward.py").write_text(REWARD)
    Path("loss.py").write_text(LOSS)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    plain = {k: v for k, v in SMALL.items() if k not in ("rows", "val_rows")}
    plain |= {"reward_function": "reward.py", "policy_loss": "loss.py:clipped"}
    of_files = train(**plain, train_files="rows.jsonl", adv_estimator="rloo", output_dir="files")
    mine: dict[str, Any] = SMALL | {"reward": score, "loss": clipped, "estimator": rloo}
    train(**mine | {"max_steps": 1}, output_dir="mine")
    run = train(**mine, output_dir="mine")
    assert results(run) == results(of_files)
    assert not (desk / "mine" / "earlier_1").exists()
    # The settings of the run are those of a command line.
    spec = run.config.reward.function
    assert spec is not None and spec.startswith(f"{desk}/mine/inputs/score_")
    assert "#     return share(solution_str)" in Path(spec.partition(":")[0]).read_text()
    # Another function makes another run.
    edited = mine | {"reward": lambda data_source, solution_str, ground_truth, extra_info: 0.5}
    train(**edited, output_dir="mine")
    assert (desk / "mine" / "earlier_1" / "checkpoints").is_dir()


@pytest.mark.slow
def test_workers_under_ray_get_the_loss(desk: Path) -> None:
    calls: dict[str, Any] = SMALL | {"max_steps": 1, "reward": score, "loss": clipped}
    alone = results(train(**calls, output_dir="alone"))
    ray = results(train(**calls, engine="ray", num_workers=1, output_dir="ray"))
    assert ray == {
        name: pytest.approx(values, rel=1e-4, abs=1e-6) for name, values in alone.items()
    }


SCRIPT = """{gap}
from pathlib import Path
from ppo_cli.callables import write_function

WORDS, LIMIT = {{"one", "two", "three", "four"}}, {limit}

class Scorer:
    def __init__(self): self.words = frozenset(WORDS)
    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        return sum(word in self.words for word in solution_str.split()[:LIMIT])

print(write_function(Path(), "reward", Scorer()))
"""


def test_a_file_is_named_after_what_its_function_does(desk: Path) -> None:
    def name(seed: int, **changes: Any) -> str:
        Path("script.py").write_text(SCRIPT.format(**{"gap": "", "limit": 2} | changes))
        env = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "script.py"]
        return subprocess.check_output(command, env=env, text=True, timeout=60)

    first = name(1)
    assert first.startswith("Scorer_")
    assert name(2, gap="# a line" + 5 * "\n") == first
    assert name(3, limit=3) != first


def test_both_refuse_what_cannot_cross(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "k-5f2b8c1d9e7a4063"
    monkeypatch.setenv("ACME_API_KEY", key)
    opened, lock = Path("x").open("w"), threading.Lock()  # noqa: SIM115

    def logs(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> int:
        return opened.write(solution_str)

    def locks(a: str) -> float:
        with lock:
            return 0.0

    def asks(a: str) -> float:
        return float(key in a)

    def scores(new_logprobs_BT: Tensor, advantage_BT: Tensor) -> Tensor:
        return advantage_BT

    rows = [*ROWS, {"prompt": "a", "ground_truth": {1}}, "text"]
    for arguments, pattern in [
        ({"reward": logs}, r"reward=logs .* holds an open file 'x' \(variable opened\)"),
        ({"reward_function": locks}, r"=locks .* a _thread.lock \(variable lock\)"),
        ({"reward": asks}, r"reward=asks holds the value of a secret variable"),
        ({"reward": lambda a: 1.0}, r"cannot be called with data_source"),
        ({"reward": str}, r"'str' .* is a class, not a function"),
        (
            {"loss": scores},
            r"loss=scores: 'advantage_BT' is not an input. Did you mean 'advantages_BT'",
        ),
        ({"environment": lambda: 3}, r"^environment=<lambda> has no method reset\(self, row\)"),
        ({"environment": ROWS}, r"environment is an object of type list: give a function or cl"),
        ({"overrides": {"reward.function": lambda a: 1}}, r"<lambda>\(a\) .* cannot be called"),
        ({"rows": rows}, r"(?s)row 9, key 'ground_truth': .* set .*row 10 is of type str"),
        ({"rows": ROWS, "train_files": "f"}, r"argument rows and argument train_files both set"),
        ({"lr": abs, "loss": "gspoo"}, r"(?s)lr takes no function, .*Did you mean 'gspo'"),
    ]:
        texts = set()
        for call in (plan, train):
            with pytest.raises(ConfigError, match=pattern) as caught:
                call(preset="embedded", output_dir="run", **arguments)
            texts.add(str(caught.value))
        assert len(texts) == 1
    assert not Path("run").exists()
    opened.close()


WRONG = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Scale:  # its hints are read from its module
    factor: float = 1.0

def nan(token_rewards_BT, mask_BT): return token_rewards_BT / 0, token_rewards_BT
def one(token_rewards_BT): return token_rewards_BT
def mean(new_logprobs_BT): return new_logprobs_BT.mean()
def three(new_logprobs_BT): return new_logprobs_BT, 1, 2
def short(new_logprobs_BT, advantages_BT):
    return new_logprobs_BT[:, 1:] * advantages_BT
def written(new_logprobs_BT, advantages_BT):
    advantages_BT += 1
    return -new_logprobs_BT * advantages_BT
def flat(new_logprobs_BT): return new_logprobs_BT.detach()
"""


def test_wrong_losses_and_estimators_are_named(desk: Path) -> None:
    Path("wrong.py").write_text(WRONG)
    new_BT, mask_BT = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3).bool()
    for name, pattern in [
        ("nan", "returned advantages_BT with NaN or inf for 6 of 6 tokens"),
        ("one", r"must return \(advantages_BT, returns_BT\)"),
    ]:
        with pytest.raises(ConfigError, match=f"estimator wrong.py:{name} {pattern}"):
            compute_advantages(
                f"wrong.py:{name}", token_rewards_BT=new_BT.detach(), values_BT=None,
                mask_BT=mask_BT, group_B=torch.zeros(2).long(), gamma=1.0, lam=1.0,
            )  # fmt: skip
    for name, pattern in [
        ("mean", r"returned loss_BT \(\); return a tensor \(2, 3\)"),
        ("flat", "has no gradient"),
        ("three", r"must return loss_BT or \(loss_BT, clip_BT\)"),
        ("short", r"raised RuntimeError: The size .*wrong.py, line 14: return new_logprobs_BT\["),
    ]:
        with pytest.raises(ConfigError, match=f"^The policy loss wrong.py:{name} {pattern}"):
            policy_loss(
                new_BT, new_BT.detach(), new_BT.detach(), mask_BT, kind=f"wrong.py:{name}",
                clip_low=0.2, clip_high=0.2, global_tokens=6, global_sequences=2,
            )  # fmt: skip
    # A function that writes to its inputs has copies of them.
    advantages_BT = torch.zeros(2, 3)
    policy_loss(
        new_BT, new_BT.detach(), advantages_BT, mask_BT, kind="wrong.py:written",
        clip_low=0.2, clip_high=0.2, global_tokens=6, global_sequences=2,
    )  # fmt: skip
    assert not advantages_BT.any()
    # A file that was edited is imported again when its name is read in settings.
    assert plan(preset="embedded", loss="wrong.py:flat")
    Path("wrong.py").write_text("def flat(x): return x")
    with pytest.raises(ConfigError, match="'x' is not an input"):
        plan(preset="embedded", loss="wrong.py:flat")


def test_rows_of_frames_and_data_sets_are_those_of_a_list(desk: Path) -> None:
    import datasets
    import pandas

    rows = [row | {"n": i, "note": None} for i, row in enumerate(ROWS)]
    numbered = [row | {"n": np.int64(i), "note": None} for i, row in enumerate(ROWS)]
    frame = pandas.DataFrame(rows).assign(note=math.nan)
    kinds = (rows, numbered, frame, datasets.Dataset.from_list(rows), np.array(rows))
    files = []
    for n, kind in enumerate(kinds):
        Path(f"{n}").mkdir()
        files.append(Path(write_rows(Path(f"{n}"), "rows", kind)).read_text())
    assert set(files) == {files[0]}
    for kind in (iter(rows), {"prompt": ["a"]}, "rows.jsonl", []):
        with pytest.raises(ConfigError, match=r"rows is .*; give a list of dicts, a data"):
            write_rows(desk, "rows", kind)


@pytest.mark.slow
def test_plan_refuses_files_and_rows_as_train_does(desk: Path) -> None:
    Path("bad.py").write_text("class Env: pass")
    Path("bad.jsonl").write_text('{"prompt": 5}')
    few: dict[str, Any] = {"preset": "embedded", "reward": score}
    for arguments, pattern in [
        ({"environment": "bad.py:Env"}, "no method reset"),
        ({"reward": None, "reward_function": "none.py"}, "no file none.py"),
        ({"train_files": ["bad.jsonl"], "batch_size": 1}, r"bad.jsonl line 1, column prompt"),
        ({"rows": ROWS[:1], "batch_size": 8}, "1 prompts cannot fill a batch of 8"),
        ({"rows": ROWS, "batch_size": 8, "reward": None}, "no data_source, which chooses the rule"),
    ]:
        for call in (plan, train):
            with pytest.raises(UserError, match=pattern):
                call(**few | arguments, output_dir="run")
    assert plan(stepwise=True, preset="embedded", rows=ROWS, batch_size=8, val_rows=[])
