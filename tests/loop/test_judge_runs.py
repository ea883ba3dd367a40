"""Whole PPO runs with a judge as the only reward: real SDKs against a judge on loopback."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ppo_cli.run_folder.folder import paid_calls
from ppo_cli.run_folder.lines import read_lines, read_metrics
from tests.forked import PPO, Forked, run_forked
from tests.judge_server import JudgeServer
from tests.loop.runs import ROOT, rows, stored, undocumented, wait_for

KEY = "key-of-the-loopback-judge"
RUN = (
    "--preset", "embedded", "--batch_size", "16", "--mini_batch_size", "8", "--rollout_n", "4",
    "--save_freq", "2", "--test_freq", "0", "data.val_max_samples=32", "--use_api_reward",
    "--rm_model", "judge-1", "--rm_prompt_preset", "math", "--rm_canary_every", "0",
)  # fmt: skip
FOUR, UNCACHED = ("--max_steps", "4"), ("--rm_cache", "off")
PRICE = ("--rm_price_input", "1", "--rm_price_output", "4")
OUTAGE = "does not answer"
# The reward rises: shown once, as it takes longer than to see that the scores are right.
PROVIDERS = (
    ("openai", "OPENAI_API_KEY", 10, 32),
    ("claude", "CLAUDE_API_KEY", 3, 16),
    *(pytest.param(*provider, marks=pytest.mark.weekly) for provider in (
        ("gemini", "GOOGLE_API_KEY", 3, 16), ("dashscope", "DASHSCOPE_API_KEY", 3, 16),
    )),
)  # fmt: skip
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class FullRun:
    """A run of four steps with a judge that never fails, and how often that judge answered."""

    out: Path
    answered: int


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> FullRun:
    folder = tmp_path_factory.mktemp("whole")
    with JudgeServer() as server:
        server.keys = {KEY}
        args = command(server, folder / "run", *FOUR, *PRICE, *UNCACHED)
        done = run_ppo(environment(folder), args)
        assert "judge: noise" in done.stdout
        return FullRun(folder / "run", server.state.answered)


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer() as running:
        running.keys = {KEY}
        yield running


def environment(tmp_path: Path, variable: str = "OPENAI_API_KEY") -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.endswith("_API_KEY")}
    return env | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        variable: KEY,
    }


def command(server: JudgeServer, out: Path, *args: str, provider: str = "openai") -> list[str]:
    where = ("--rm_api_type", provider, "--rm_base_url", server.url(provider))
    return ["train", *RUN, *where, *args, "--output_dir", str(out)]


def run_ppo(
    env: dict[str, str], args: list[str], exit_code: int = 0
) -> subprocess.CompletedProcess[str]:
    done = run_forked(args, env, timeout=800)
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done


@contextmanager
def started(env: dict[str, str], args: list[str]) -> Iterator[Forked]:
    """A run, which is killed when the block ends."""
    process = Forked(PPO, args, env)
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def await_end(process: Forked, exit_code: int = 0) -> str:
    output = process.communicate(timeout=800)[0]
    assert process.returncode == exit_code, output
    return output


def judged_right(line: dict[str, Any]) -> float:
    """The loopback judge's verdict, scaled: 1 when the answer is in the response, else 0."""
    result = re.search(rf"(?<!\w){re.escape(line['ground_truth'])}(?!\w)", line["response"])
    return 1.0 if result else 0.0


def assert_same_weights(a: Path, b: Path) -> None:
    for model in ("actor", "critic"):
        actual, reference = (stored(out / "checkpoints" / "latest", f"{model}/") for out in (a, b))
        assert all(torch.equal(actual[name], reference[name]) for name in actual), model


def assert_nowhere(secret: str, *places: Path) -> None:
    for place in places:
        for path in place.rglob("*"):
            if path.is_file():
                assert secret.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(("provider", "variable", "steps", "batch"), PROVIDERS)
def test_scores_are_right_with_each_provider_and_the_reward_rises(
    server: JudgeServer, tmp_path: Path, provider: str, variable: str, steps: int, batch: int
) -> None:
    out = tmp_path / "run"
    args = command(
        server, out, "--max_steps", str(steps), "--batch_size", str(batch),
        "--mini_batch_size", str(batch // 2), "--logger", "console,tensorboard", provider=provider,
    )  # fmt: skip
    output = run_ppo(environment(tmp_path, variable), args)
    lines = read_metrics(out)
    assert lines[-1]["step"] == steps
    assert undocumented(out) == set()
    if steps == 10:
        assert lines[-1]["val/reward_mean"] > lines[0]["val/reward_mean"] + 0.1
    scored = rows(out)
    assert len(scored) == steps * batch * 4
    assert all(line["score"] == judged_right(line) for line in scored if "gated" not in line)
    assert all(line["judge_reply"] and line["reason"] for line in scored if "gated" not in line)
    assert lines[3]["judge/calls"] > 0 and lines[3]["judge/tokens_in"] > 0
    assert_nowhere(KEY, out, tmp_path / "cache")
    assert KEY not in output.stdout + output.stderr


def test_every_trouble_at_once_harms_nobody(server: JudgeServer, tmp_path: Path) -> None:
    # Three refusals in a row would rightly end the run: 401 and 404 stand far from each other.
    kinds: tuple[str | int, ...] = (
        500, 401, 503, 502, 529, "cut", "html", "empty", "hang", "truncated", "not_json", "prose",
        "out_of_range", 404, "no_content",
    )  # fmt: skip
    out = tmp_path / "run"
    flags = ("--max_steps", "4", "--rm_timeout", "5", "--rm_deadline", "120")
    with started(environment(tmp_path), command(server, out, *flags)) as process:
        wait_for(out / "metrics.jsonl", process)
        server.fail("refusal", times=3)
        server.fail("content_filter", times=3)
        server.fail(429, times=6, retry_after=0.2)
        for kind in kinds:
            server.fail(kind, times=2)
        await_end(process)
    scored = rows(out)
    failed = [line for line in scored if line["score"] is None]
    assert 1 <= len({(line["prompt"], line["response"]) for line in failed}) <= 6
    assert {line["failure"].split(":")[0] for line in failed} <= {"refusal", "content_filter"}
    for line in scored:
        if line["score"] is not None and "gated" not in line:
            assert line["score"] == judged_right(line)
    lines = [line for line in read_metrics(out) if line["step"] > 0]
    for step, line in enumerate(lines, start=1):
        values = [x["score"] for x in scored if x["step"] == step and x["score"] is not None]
        assert line["reward_mean"] == pytest.approx(sum(values) / len(values))
    causes = {key for line in lines for key in line if key.startswith("judge/errors/")}
    assert {"judge/errors/timeout", "judge/errors/http_503"} <= causes


def await_outage(server: JudgeServer, out: Path, process: Forked) -> None:
    """Stop the judge after step 2, and return once the run has noticed."""
    wait_for(out / "rollouts" / "step_000002.jsonl", process)
    output = len(process.output())
    server.pause()
    end = time.monotonic() + 600
    while OUTAGE not in process.output()[output:]:
        assert process.poll() is None and time.monotonic() < end, process.output()
        time.sleep(0.05)


def test_a_stumbling_judge_and_an_outage_change_nothing(
    full_run: FullRun, server: JudgeServer, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    server.fail(503, share=0.3)
    with started(environment(tmp_path), command(server, out, *FOUR, *UNCACHED)) as process:
        await_outage(server, out, process)
        server.resume()
        await_end(process)
    assert_same_weights(full_run.out, out)
    assert all(line["score"] is not None for line in rows(out))
    # What was cut off in its flight is asked again, and nothing else.
    assert server.state.answered <= full_run.answered + 32


@pytest.mark.parametrize("killed", [True, False])
def test_ended_in_an_outage_and_resumed_ends_the_same(
    full_run: FullRun, server: JudgeServer, tmp_path: Path, killed: bool
) -> None:
    """Killed, or after a limited wait, which saves and tells how to go on."""
    out = tmp_path / "run"
    args = command(server, out, *FOUR, "--rm_outage_wait", "600" if killed else "3")
    with started(environment(tmp_path), args) as process:
        await_outage(server, out, process)
        if killed:
            process.kill()
        output = await_end(process, -signal.SIGKILL if killed else 3)
    assert killed or ("Go on with:" in output and "Traceback" not in output)
    server.resume()
    run_ppo(environment(tmp_path), args)
    assert_same_weights(full_run.out, out)
    # Eight responses of the first step are asked about twice more, in both sessions together.
    repeats = read_lines(out / "judge_repeats.jsonl")
    assert Counter(Counter(line["response"] for line in repeats).values()) == {2: 8}


def test_dynamic_sampling_stopped_within_a_refill_asks_nothing_twice(tmp_path: Path) -> None:
    """A step samples 16 prompts, 64 responses, and others for those that scored alike."""
    filtered = (
        "--filter_groups", "--adv_estimator", "grpo", "--max_steps", "1", "--rm_outage_wait", "2",
        "trainer.val_before_train=false", "--rm_noise_responses", "0",
    )  # fmt: skip
    outs, answered = [], []
    for stop in (False, True):
        folder = tmp_path / f"stop {stop}"
        folder.mkdir()
        with JudgeServer() as server:
            server.keys = {KEY}
            args = command(server, folder / "run", *filtered)
            if stop:
                server.fail(503, after=66)  # beyond the first batch
                run_ppo(environment(folder), args, exit_code=3)
                server.heal()
            run_ppo(environment(folder), args)
            request = {json.dumps(call.body, sort_keys=True) for call in server.calls}
            assert stop or len(request) == server.count == server.state.answered
            outs.append(folder / "run")
            answered.append(server.state.answered)
    (line,) = [line for line in read_metrics(outs[0]) if line["step"] == 1]
    assert line["filter/gen_batches"] > 1 and line["judge/calls"] > 66
    assert answered[0] == answered[1]
    actors = [load_file(out / "checkpoints/latest/actor/model.safetensors") for out in outs]
    assert all(torch.equal(actors[0][name], actors[1][name]) for name in actors[0])


def test_a_budget_is_kept_resumed_and_a_second_run_is_free(
    full_run: FullRun, server: JudgeServer, tmp_path: Path
) -> None:
    out, second = tmp_path / "run", tmp_path / "again"
    env = environment(tmp_path)
    calls = (full_run.out / "judge_calls.jsonl").read_text().splitlines()
    limit = 100 * spent(full_run.out) / len(calls)
    budget = ("--rm_budget_usd", f"{limit:.6f}")
    for _ in range(2):  # the same command again cannot spend more
        output = run_ppo(env, command(server, out, *FOUR, *PRICE, *budget), exit_code=3)
        assert "budget" in output.stderr and "Go on with:" in output.stderr
        assert 0.5 * limit < spent(out) <= limit
    enough = shlex.split(output.stderr.split("Go on with: ")[1])[-2:]
    assert enough[0] == "--rm_budget_usd"
    run_ppo(env, command(server, out, *FOUR, *PRICE, *enough))
    assert spent(out) < float(enough[1]) < 5 * spent(out)
    assert_same_weights(full_run.out, out)
    before = server.count
    # Only its own measurement of the noise asks past the cache.
    run_ppo(env, command(server, second, *FOUR, *PRICE, "--rm_noise_responses", "0"))
    assert server.count == before
    assert all(line.get("judge/cost_usd", 0.0) == 0.0 for line in read_metrics(second))
    assert_same_weights(full_run.out, second)


def test_calls_in_flight_at_a_kill_count_against_the_budget(
    server: JudgeServer, tmp_path: Path
) -> None:
    out, env = tmp_path / "run", environment(tmp_path)
    server.state.latency = 1.0
    limits = ("--rm_budget_usd", "0.1", "--rm_concurrency", "4")
    args = command(server, out, *FOUR, *PRICE, *UNCACHED, *limits)
    for _ in range(3):
        before = server.count
        with started(env, args) as process:
            while server.count < before + 3:
                assert process.poll() is None
                time.sleep(0.02)
    server.state.latency = 0.0
    output = run_ppo(env, args, exit_code=3)
    assert "judge calls were in flight when the run was killed" in output.stdout
    assert "is used up" in output.stderr
    assert spent(out) <= 0.1
    outcomes = Counter(call["outcome"] for call in paid_calls(out))
    assert outcomes["killed"] >= 6 and outcomes.total() >= server.count


def spent(out: Path) -> float:
    lines = (out / "judge_calls.jsonl").read_text().splitlines()
    return sum(json.loads(line)["usd"] for line in lines)


# A tool server whose arguments and variables hold keys, which it repeats in its replies.
KEYED_SERVER = """
import os, sys
from pathlib import Path
from mcp.server import MCPServer

server = MCPServer("keyed")
Path(__file__).with_name(f"seen-{sys.argv[1]}").write_text(str(dict(os.environ)))

def multiply(a: int, b: int) -> str:
    "Multiply two numbers."
    return f"{a * b} {os.environ.get('SEARCH_KEY')} {os.environ.get('SERVER_TOKEN')} {sys.argv[2:]}"

multiply.__name__ = sys.argv[1]
server.tool()(multiply)
server.run("stdio")
"""
# Each is the value of a variable, of an argument, or of an address: none looks like a known key.
NAMES = (
    "OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "WANDB_API_KEY",
    "SLACK_WEBHOOK_URL", "MY_AUTH", "SENTRY_DSN", "SEARCH_KEY", "SERVER_TOKEN",
)  # fmt: skip


def test_no_key_of_a_run_reaches_a_child_a_prompt_a_judge_a_file_or_the_screen(
    server: JudgeServer, tmp_path: Path
) -> None:
    pytest.importorskip("mcp.server")
    variables = {name: f"{name.lower()[:4]}Rk2LmX9vTb4NcW" for name in NAMES}
    variables["DATABASE"] = "postgres://me:dataRk2LmX9vTb4NcW@127.0.0.1/db"
    arguments = {name: f"argu{name}Rk2LmX9vTb4NcW" for name in ("first", "second", "third")}
    canaries = [*variables.values(), *arguments.values(), "dataRk2LmX9vTb4NcW"]
    file = tmp_path / "keyed.py"
    file.write_text(KEYED_SERVER)
    tools = tmp_path / "tools.py"
    tools.write_text(
        "import os\nfrom pathlib import Path\n"
        "Path(__file__).with_name('seen-tools').write_text(str(dict(os.environ)))\n\n\n"
        'def look(name: str) -> str:\n    "Look."\n    return name\n'
    )
    entry = {
        "command": sys.executable, "env": {"SERVER_TOKEN": "${SERVER_TOKEN}"},
        "args": [str(file), "multiply", "--api-key", arguments["first"]],
    }  # fmt: skip
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"keyed": entry}}))
    program = shlex.join([sys.executable, str(file)])
    line = f"{program} add --token={arguments['second']} X_KEY={arguments['third']}"
    server.keys = {variables["OPENAI_API_KEY"]}
    env = environment(tmp_path) | variables
    args = [
        "--preset", "embedded-tools", "--max_steps", "2", "--batch_size", "8", "--save_freq", "1",
        "--tools", str(tools), "--mcp_config", str(tmp_path / "mcp.json"), "--mcp", line,
        "--mcp", "keyed", "--pass_env", "SEARCH_KEY", "--max_prompt_length", "512",
        "--max_response_length", "512", "--use_api_reward", "--rm_model", "judge-1",
        "--rm_prompt_preset", "math", "--rm_api_type", "openai", "--rm_base_url",
        server.url("openai"), "data.val_max_samples=8", "environment.num_workers=1",
    ]  # fmt: skip
    out, screens = tmp_path / "run", ""
    for command_line in (["plan", *args], ["train", *args, "--output_dir", str(out)]):
        done = run_ppo(env, command_line)
        screens += done.stdout + done.stderr
    for view in (["show", str(out), "--worst", "2"], ["report", str(out)]):
        screens += run_ppo(env, view).stdout
    texts = {"the screen": screens, "the judge": str([call.body for call in server.state.calls])}
    for path in out.rglob("*"):
        if path.is_file():
            texts[str(path)] = path.read_bytes().decode(errors="replace")
    passed = {"multiply": {"SEARCH_KEY", "SERVER_TOKEN"}, "add": {"SEARCH_KEY"}}
    for child in ("tools", "multiply", "add"):
        seen = ast.literal_eval((tmp_path / f"seen-{child}").read_text())
        names = passed.get(child, {"SEARCH_KEY"})
        assert {name for name in variables if name in seen} == names
        texts[child] = str({name: value for name, value in seen.items() if name not in names})
    leaks = [
        (place, canary) for place, text in texts.items() for canary in canaries if canary in text
    ]
    assert not leaks
    # The server's replies, with its keys hidden, have reached the policy and the judge.
    turns = [turn for row in rows(out) for turn in row["turns"]]
    replies = [message["content"] for turn in turns for message in turn.get("replies", ())]
    assert any(re.match(r"\d+ \*\*\* \*\*\* ", reply) for reply in replies)
    assert " *** *** " in texts["the judge"]
