"""Stepwise sessions: the bits of `train`, how they are left and resumed, and what they refuse."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ppo_cli import plan, session, train
from ppo_cli.errors import ConfigError, Interrupted, ModelError, RewardError, UserError
from ppo_cli.records import Score
from tests.forked import Forked
from tests.loop.runs import ROOT, assert_same_run, environment, metrics, rows, stored

SMALL: dict[str, Any] = {
    "preset": "embedded", "batch_size": 8, "mini_batch_size": 4, "rollout_n": 2, "max_steps": 4,
    "save_freq": 2, "max_response_length": 8,
}  # fmt: skip
FEW = {"data.val_max_samples": 8, "data.train_max_samples": 36}
# All that a resume must bring back: critic, pretraining, controllers, moments, scaled parts.
RICH = SMALL | {
    "ppo_epochs": 2, "test_freq": 2, "critic_pretrain_steps": 2,
    "reward": ["rule:exact:0.4", "rule:math:0.6"],
    "overrides": FEW | {
        "algorithm.kl_ctrl.type": "adaptive", "actor.optim.lr_scheduler_type": "cosine",
        "reward.shaping.normalize": "running",
    },
}  # fmt: skip
# For scores of the caller: the rows are for no rule.
OWN = SMALL | {"adv_estimator": "grpo", "train_files": ["rows.jsonl"], "val_files": []}
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    digits = sum(character in ground_truth for character in solution_str)
    return {"score": digits / 8, "length": len(solution_str)} if solution_str else None
"""
PROGRAM = """
import json, os, signal, time
from ppo_cli import session
from score import compute_score
with session(**json.loads(os.environ["SETTINGS"])) as s:
    for batch in s:
        if s.step == 3:
            while not os.path.isdir("session/checkpoints/step_000002"):  # it is being written
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        s.update(batch, [compute_score("", r.text, r.prompt.ground_truth) for r in batch])
"""


def drive(out: Path, settings: dict[str, Any], leave: Callable[[int], Any] = lambda _: 0) -> None:
    """Train a session with the scores of its reward; `leave` is called with each trained step."""
    with session(**settings, output_dir=out) as s:
        for batch in s:
            scores = s.reward(batch)
            leave(s.step)
            s.update(batch, scores)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with prompts without a data_source, and a reward function."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "ppo_cli" / "embedded" / "train.jsonl").read_text().splitlines()[:24]
    lines = [json.dumps(json.loads(line) | {"data_source": ""}) for line in text]
    Path("rows.jsonl").write_text("\n".join(lines))
    Path("score.py").write_text(SCORE)
    return tmp_path


def test_left_by_an_exception_and_resumed_it_is_the_run_of_train(tmp_path: Path) -> None:
    train(**RICH, output_dir=tmp_path / "train")
    out = tmp_path / "session"
    with pytest.raises(ZeroDivisionError):
        drive(out, RICH, lambda step: 1 / (2 - step))
    assert len(metrics(out)) == 3  # a validation and two steps
    # Again, in a thread without signals, then inside a running event loop as in Jupyter.
    with session(**RICH, output_dir=out) as s:
        assert (s.step, s.total_steps, s.done) == (2, 4, False)
        thread = threading.Thread(target=lambda: s.update(b := s.sample(), s.reward(b)))
        thread.start()
        thread.join()
        assert s.step == 3

    async def in_a_notebook() -> None:
        drive(out, RICH)

    asyncio.run(in_a_notebook())
    assert_same_run(tmp_path / "train", out)


@pytest.mark.slow
def test_scores_of_the_caller_after_a_kill(desk: Path) -> None:
    settings = OWN | {"reward_function": "score.py"}
    train(**settings, output_dir="train")
    text = json.dumps(settings | {"output_dir": "session"})
    process = Forked(PROGRAM, ["run"], environment() | {"SETTINGS": text})
    output = process.communicate()[0]
    assert process.returncode == -signal.SIGKILL, output
    scope: dict[str, Any] = {}
    exec(SCORE, scope)
    with session(**settings, output_dir="session") as s:
        assert s.step == 2
        for batch in s:
            pairs = [(r.text, r.prompt.ground_truth) for r in batch]
            s.update(batch, (scope["compute_score"]("", *pair) for pair in pairs))
    a, b = Path("train"), Path("session")
    assert metrics(a) == metrics(b)
    for stem in ("actor/model", "state/actor_opt"):
        x, y = (stored(out / "checkpoints" / "latest", stem) for out in (a, b))
        assert x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x)


def test_what_update_takes_and_refuses(desk: Path) -> None:
    settings = OWN | {"val_files": ["rows.jsonl"], "max_steps": 2, "output_dir": "run"}
    with pytest.warns(UserWarning, match="does not validate, as it has no reward. The prompts ha"):
        s = session(**settings)
    batch = s.sample()
    assert len(batch) == 16 and batch[0].prompt is batch[1].prompt
    assert batch[0].sampler_logprobs.shape == (len(batch[0].token_ids),)
    with pytest.raises(UserError, match="The last batch has no scores"):
        s.sample()
    with pytest.raises(UserError, match="got 3 scores for 16 responses"):
        s.update(batch, [1.0] * 3)
    for scores in (None, dict.fromkeys(range(16)), "1" * 16):
        with pytest.raises(UserError, match=r"got a \w+; give a list with a score per response"):
            s.update(batch, scores)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"has no reward. The prompts have no data_source"):
        s.reward(batch)
    with pytest.raises(UserError, match="belongs to a run that is still active"):
        session(**settings)
    values = [1, np.float32(0.5), torch.tensor(0.25), None, math.nan, "1", {"score": 2, "part": 3}]
    line = s.update(batch, (*values, [0.0] * len(batch[7].token_ids), *[0.0] * 8))
    assert line["reward_mean"] == pytest.approx(3.75 / 13) and s.step == 1
    written = rows(Path("run"), 1)
    assert [row["score"] for row in written[:8]] == [1, 0.5, 0.25, None, None, None, 2, 0]
    assert "returned nan" in written[4]["failure"]
    with pytest.raises(UserError, match=r"not the batch of the last sample\(\), or it has its"):
        s.update(batch, torch.zeros(16))
    assert s.update(s.sample(), torch.zeros(16))["step"] == 2 and s.done
    with pytest.raises(UserError, match="This session is over, 2 of 2 steps are trained"):
        s.sample()
    s.close()
    s.close()
    assert not Path("run/.lock").exists()
    with pytest.raises(RewardError, match=r"Critic pretraining needs a reward\. The prompts"):
        session(**OWN | {"adv_estimator": "gae"}, critic_pretrain_steps=1, output_dir="run")
    # What a message says to change is an argument.
    Path("run/checkpoints/step_000002/actor/config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"with: the same call of session\(\) with resume='never'"):
        session(**settings)


@pytest.mark.slow
def test_what_ends_a_session_early(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ctrl-C is the caller's between steps; other signals end the session after a step.
    settings = SMALL | {"overrides": FEW, "save_freq": 4}
    with pytest.raises(KeyboardInterrupt):
        drive(desk / "run", settings, lambda step: step and signal.raise_signal(signal.SIGINT))
    assert sorted(os.listdir("run/checkpoints")) == ["latest", "step_000001"]
    with pytest.raises(Interrupted, match=r"Stopped after step 2 .*the same call of session\(\)"):
        drive(desk / "run", settings, lambda _: signal.raise_signal(signal.SIGTERM))
    with session(**settings, output_dir=desk / "run") as s:
        batch = s.sample()
        s.update(batch, [0.5] * len(batch))
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted, match="Stopped after step 3 "):
            s.sample()
    # A budget that ends while the reward scores: the step is undone and sampled again.
    s = session(**settings, output_dir=desk / "run")
    batch, failed = s.sample(), Future[Score]()
    failed.set_exception(Interrupted("The budget is used up."))
    monkeypatch.setattr(s._job.reward, "submit", lambda _: failed)
    with pytest.raises(Interrupted, match=r"up\. Everything up to step 3 of 4 is saved\. Go on w"):
        s.reward(batch)
    s.close()
    with session(**settings, output_dir=desk / "run") as s:
        assert s.step == 3
        assert [r.text for r in s.sample()] == [r.text for r in batch]

    # A program that ends without closing it frees the folder quietly.
    program = (
        f"from ppo_cli import session; s = session(**{settings}, output_dir='run'); s.sample()"
    )
    process = Forked(program, ["run"], environment())
    assert process.communicate()[0] == "" and process.returncode == 0
    assert not Path("run/.lock").exists()


def test_what_cannot_be_stepped_is_refused_by_plan_and_session() -> None:
    settings = SMALL | {
        "adv_estimator": "remax", "overrides": {"algorithm.filter_groups.enable": True},
    }  # fmt: skip
    for call in (session, lambda **s: plan(stepwise=True, **s)):
        with pytest.raises(ConfigError, match="enable needs scores while it samples") as error:
            call(**settings)
        assert "remax needs scores of greedy responses" in str(error.value)


@pytest.mark.slow
def test_the_page_runs_as_it_stands(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8").partition("## Step by step")
    block, *_ = re.findall(r"^```python\n(.*?)^```", page[2], re.DOTALL | re.MULTILINE)
    exec(compile(block, "library.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[1].startswith("2 ")
