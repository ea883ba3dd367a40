"""Time the judge's client against what its server allows at best.

Run: python benchmarks/judge_traffic.py [--verl PYTHON] [--turns 3]
The server is a process of its own on this machine and speaks OpenAI's protocol; the client goes
through the official SDK. `--verl` names a Python with verl 0.9.1: its reward loop then scores the
same number of responses on the same server (see benchmarks/verl_reward_loop.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.rewards.judge.calls import Question, Scale, Verdict
from ppo_cli.rewards.judge.client import JudgeClient
from ppo_cli.rewards.judge.costs import Ledger
from ppo_cli.rewards.judge.providers import build_provider
from ppo_cli.rewards.remote.limits import Limits

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Case:
    """A server, a number of calls, and the time below which nobody can make them."""

    name: str
    server: tuple[str, ...]
    calls: int
    concurrency: int
    ideal_s: float
    allowed: float


def bucket(name: str, rps: float, burst: int, calls: int, hint: str) -> Case:
    """A server that takes `rps` calls a second and saves up `burst` of them."""
    server = ("--latency", "0.1", "--rps", f"{rps}", "--burst", f"{burst}", "--hint", hint)
    return Case(f"{name}, hint: {hint}", server, calls, 128, (calls - burst) / rps, 1.15)


CASES = (
    *(bucket("50 calls/s, burst 20", 50, 20, 600, hint)
      for hint in ("seconds", "ms", "ratelimit", "none")),
    bucket("10 calls/s, burst 200", 10, 200, 350, "seconds"),
    *(Case(f"100 calls a minute, hint: {hint}",
           ("--latency", "0.1", "--per-minute", "100", "--hint", hint), 150, 128, 60.1, 1.15)
      for hint in ("seconds", "none")),
    *(Case(f"{slots} calls at once, 0.5 s, hint: {hint}",
           ("--latency", "0.5", "--concurrency-limit", f"{slots}", "--hint", hint),
           16 * slots, 128, 8.0, 1.15)
      for slots in (4, 16, 64) for hint in ("seconds", "none")),
    Case("1 s latency, 64 at once", ("--latency", "1.0"), 512, 64, 512 / 64, 1.15),
)  # fmt: skip


@contextmanager
def serve(case: Case) -> Iterator[str]:
    """Run the server of a case; gives its base URL."""
    command = [sys.executable, "-m", "tests.judge_server", *case.server]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        yield str(json.loads(process.stdout.readline())["url"]["openai"])
    finally:
        process.terminate()
        process.wait(10)


def counts(base_url: str) -> dict[str, int]:
    with urllib.request.urlopen(base_url.removesuffix("/v1") + "/_control", timeout=10) as reply:
        return dict(json.load(reply))


def ask_for(number: int) -> Question:
    text = f"Question: what is {number} + {number}? Answer: {2 * number}."
    return Question("You are a strict judge.", text, text, Scale(1, 10), max_tokens=128)


async def run_ours(case: Case, base_url: str) -> tuple[float, int]:
    """Return seconds from the first call to the last verdict, and how many verdicts were lost."""
    api = ApiReward(
        enable=True, type="openai", model="m", base_url=base_url, concurrency=case.concurrency
    )
    ledger = Ledger(None, budget_usd=None, budget_tokens=None)
    provider = build_provider(api, environ={"OPENAI_API_KEY": "for-the-loopback"})
    client = JudgeClient(provider, limits=Limits.of(api), ledger=ledger, cache=None)
    # A run asks once at its start too; it also pays for importing the SDK.
    await client.probe(ask_for(-1))
    await asyncio.sleep(0.5)
    began = time.perf_counter()
    questions = [ask_for(number) for number in range(case.calls)]
    answers = await asyncio.gather(*map(client.ask, questions), return_exceptions=True)
    took = time.perf_counter() - began
    await client.close()
    return took, sum(not isinstance(answer, Verdict) for answer in answers)


def run_verl(python: str, case: Case, base_url: str, way: str) -> None:
    """Run verl's reward loop in its own Python and print what it says."""
    script = ROOT / "benchmarks" / "verl_reward_loop.py"
    command = [python, str(script), "--url", base_url, "--calls", str(case.calls), "--way", way]
    command += ["--concurrency", str(case.concurrency)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    except subprocess.TimeoutExpired:
        print(f"  verl {way:22s} not done after 240 s")
        return
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        print(f"  verl {way:22s} failed: {done.stderr.strip().splitlines()[-1:]}")
        return
    told = json.loads(lines[-1])
    words = f"  verl {way:22s} {told['seconds']:6.2f} s = {told['seconds'] / case.ideal_s:.2f} x"
    failed = f", it raised {told['error']}" if told["error"] else ""
    print(f"{words} ideal, scored {told['scored']} of {case.calls}{failed}; "
          f"server: {counts(base_url)}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verl", metavar="PYTHON", help="a Python that has verl 0.9.1")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", default="", help="servers whose name holds this text")
    options = parser.parse_args()
    for case in (case for case in CASES if options.only in case.name):
        print(f"{case.name}: {case.calls} calls, ideal {case.ideal_s:.1f} s, load "
              f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")  # fmt: skip
        for _ in range(options.turns):
            with serve(case) as url:
                seconds, lost = asyncio.run(run_ours(case, url))
                ratio = seconds / case.ideal_s
                verdict = "ok" if ratio <= case.allowed and not lost else "MISSED"
                print(f"  ours {seconds:6.2f} s = {ratio:.2f} x ideal (allowed {case.allowed}), "
                      f"lost {lost}: {verdict}; server: {counts(url)}", flush=True)  # fmt: skip
        for way in ("rate_limited", "rate_limited_tuned", "naive") if options.verl else ():
            with serve(case) as url:
                run_verl(options.verl, case, url, way)


if __name__ == "__main__":
    main()
