"""Run folders for the tests of the page: one of 40 steps that learns, with texts that attack it."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ppo_cli.planning.resolve import resolve
from ppo_cli.records import Part, Prompt, Rollout, Score, Scored
from ppo_cli.report.page.run_data import RunData
from ppo_cli.report.page.server import PageServer
from ppo_cli.report.tracker import Screen, Tracker, make_episode_fields
from ppo_cli.run_folder.lines import append_line, read_lines, replace_lines, rollout_file
from tests.rewards.scoring import sum_episode
from tests.settings import config_yaml

RAN = "window.ran=(window.ran||0)+1"
HOSTILE = [
    f"<script>{RAN}</script>", f"</script><script>{RAN}</script>", f"<img src=x onerror={RAN}>",
    f"<svg onload={RAN}>", f"<svg><script>{RAN}</script></svg>", f"<iframe src='javascript:{RAN}'>",
    f"<body onload={RAN}>", f"<details open ontoggle={RAN}>x</details>",
    f"<a href='javascript:{RAN}'>x</a>", f"<form action='javascript:{RAN}'><input type=submit>",
    f"<input autofocus onfocus={RAN}>", f"<style>@import 'javascript:{RAN}'</style>",
    f"<object data='javascript:{RAN}'>", f"<embed src='javascript:{RAN}'>",
    f"<meta http-equiv=refresh content='0;url=javascript:{RAN}'>", "<base href='//evil.test/'>",
    f"<math><mtext><img src=x onerror={RAN}></mtext></math>", f"<template><img onerror={RAN}>",
    f"<noscript><p title='</noscript><img src=x onerror={RAN}>'>", "<!-- <script>", "<!--><script>",
    "-->", "]]>", "</style>", "</textarea>", "</title>", f"</title><script>{RAN}</script>",
    f"`${{{RAN}}}`", f"\"+{RAN}+\"", f"\\u003cscript\\u003e{RAN}", f"&lt;script&gt;{RAN}",
    "&#60;b&#62;", "a\u2028b\u2029c", "\u202egnp.exe\u202c after", "\u2066\u2067mixed\u2069", 
    "\ufeffbom \u200ezero",
    "\x00\x01\x1b[31m\x7f", "half \ud83d and \udc00", "{{DATA}} {{SCRIPTS}}",
    "<think>hidden <b>thought</b></think>shown", "x" * 5_000_000,
]  # fmt: skip


def scored(row: int, step: int, text: str, value: float | None) -> Scored:
    source = text[:80] if text.startswith("<img") else "add" if row % 2 else "sub"
    prompt = Prompt(f"train:{row}", f"question {row}", (), "", (1,), source, {"a": row})
    rollout = Rollout(prompt, 0, (5,) * (row + 1), np.zeros(row + 1, np.float32), text, "stop")
    if value is None:
        return Scored(rollout, Score.failed("timeout after 10 s"))
    parts = {"judge": Part(10 * value, value), "rule": Part(1.0, 0.5)}
    info: dict[str, Any] = {"cost_usd": 0.001, "cached": False}
    if (row, step) == (5, 3):  # what another judge says of it
        info |= {"monitor": 0.0, "monitor_gap": 0.9}
    line: Any = {"reason": f"because of {text[:90]}", "parts": parts, "info": info}
    line["reply"] = '{"score": 7}'
    return Scored(rollout, Score(value, **line))


def make_run(
    folder: Path, steps: int = 40, hostile: bool = False, overrides: Sequence[str] = ()
) -> Path:
    """A run whose reward rises from 0.4875 by 0.01 a step, and whose KL is high from step 16 on."""
    folder.mkdir(parents=True)
    flags = {"reward.api.enable": (True, "--use_api_reward")}
    resolved = resolve(flags=flags, preset="embedded", config_files=[],
                    overrides=[f"trainer.total_training_steps={steps}", *overrides],
                    environ={"DASHSCOPE_API_KEY": "sk-secretsecretsecret"})  # fmt: skip
    (folder / "config.yaml").write_text("# Written by ppo-cli 9\n" + config_yaml(resolved))
    tracker = Tracker(folder, Screen(), (), total_steps=steps, config=resolved.config)
    for step in range(1, steps + 1):
        count = len(HOSTILE) if hostile and step == steps else 8
        rows = [
            scored(r, step, HOSTILE[r] if count > 8 else f"answer {r} at {step} of the run",
                   None if r == 3 and step == 2 else (r + step) / (8 + steps))
            for r in range(count)
        ]  # fmt: skip
        tracker.rollouts(step, rows)
        parts = {"reward/rule": 0.4, f"reward/<img src=x onerror={RAN}>": 0.5} if hostile else {}
        tracker.step(step, parts | {
            "reward_mean": 0.4775 + 0.01 * step, "kl_divergence": 0.14 if step >= 16 else 0.05,
            "score/std": 0.9,  # so large that the rise of the reward does not excuse a high KL
            "score/failed": float(step == 2), "time/step_s": 1.0, "time/rollout_s": 0.5,
            "judge/calls": 8.0, "entropy": 1.0, "val/reward_mean": 0.5,
        })  # fmt: skip
    tracker.close()
    call = {"model": "m", "outcome": "ok", "input": 10, "output": 2, "usd": 0.35}
    for _ in range(2):
        append_line(folder / "judge_calls.jsonl", call)
    return folder


@contextmanager
def serve(run: Path) -> Iterator[PageServer]:
    """A server of the page about one run, on a thread."""
    with PageServer([RunData(run, "run")]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)


PIECES = ["The", " sum", "", "日本", " is", "\n", "🎉", " 4", "</b>", "."]
TOKENS = {
    "value": [0.1, 0.2, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.8, 0.9],
    "advantage": [0.5, -1.0, 0.25, 0.0, 2.0, -0.125, 1.5, -0.75, 0.0625, 0.03],
    "return": 1.0,
    "kl": [0.0, 0.001, 0.02, 0.3, 0.0, 0.005, 0.0, 1.25, 0.1, 0.0],
    "entropy": [2.5, 0.1, 0.0, 0.4, 0.003, 1.0, 0.2, 0.7, 0.01, 0.0],
}
LIKE_A_KEY = "AIzaSyA1B2C3D4E5F6G7H8I9J0KLMN"  # numbers may look so as base64


def encode(numbers: Any) -> Any:
    if isinstance(numbers, float):
        return numbers
    return base64.b64encode(np.array(numbers, "<f2").tobytes()).decode()


def add_tokens(run: Path, step: int) -> None:
    """Give the responses 1 and 5 of a step details of ten tokens, of which 5 and 6 are masked."""
    lines = read_lines(rollout_file(run, step))
    details = {"lengths": " ".join(str(len(piece)) for piece in PIECES), "masked": [4, 5]}
    details |= {name: encode(numbers) for name, numbers in TOKENS.items()}
    for row in (1, 5):
        lines[row] |= {"response": "".join(PIECES), "tokens": 10, "token_details": details}
    replace_lines(rollout_file(run, step), lines)


def add_episodes(run: Path, step: int) -> None:
    """Make the response 1 of a step an episode with a tool error, 2 a good and 3 a failed one."""
    lines = read_lines(rollout_file(run, step))
    good = sum_episode(1, thought="One more\nthan 1.", result="2\n" + HOSTILE[0])
    first, last = good.turns
    wrong = replace(first, error="add: b is not a number", cut=True)
    episodes = {
        1: replace(good, turns=(wrong, last), ended="turns"), 2: good,
        3: replace(good, turns=(first,), failure="the environment took longer than 30 s"),
    }  # fmt: skip
    for row, episode in episodes.items():
        lines[row] |= make_episode_fields(episode)
    lines[3] |= {"score": None, "failure": episodes[3].failure}
    # The tokens 3 and 4 are the environment's.
    details: dict[str, Any] = {"text": "".join(PIECES), "environment": [[2, 4]]}
    details["lengths"] = " ".join(str(len(piece)) for piece in PIECES)
    details |= {name: encode(numbers) for name, numbers in TOKENS.items()} | {"masked": [2, 3, 5]}
    lines[1]["token_details"] = details
    replace_lines(rollout_file(run, step), lines)
    history = [
        line | {"environment/turns_mean": 2.0, "environment/tool_error_share": 0.25,
                "environment/failed_share": 0.125, "environment/seconds_mean": 0.5,
                "environment/cut_turns_share": 0.125}
        for line in read_lines(run / "metrics.jsonl")
    ]  # fmt: skip
    replace_lines(run / "metrics.jsonl", history)


def add_critic(run: Path, steps: int) -> None:
    """Write a critic that learns: nothing in the first step, all but a half in the last."""
    for step in range(1, steps + 1):
        errors = 10 - 5 * (step - 1) / (steps - 1)
        positions = [[9, 9, 10.0, errors], [9, 9, 10.0, errors + 2], [3, 6, 1.0, 1.0]]
        tenths = [[2, t / 10, t / 20 + step / 100] for t in range(10)]
        append_line(run / "critic.jsonl", {"step": step, "positions": positions, "tenths": tenths})
