"""The rule `code` behind the reward of rules: starting, scoring, closing."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest

from ppo_cli.config.schema.reward import Code
from ppo_cli.config.schema.reward import Reward as Settings
from ppo_cli.errors import RewardError
from ppo_cli.records import Part
from ppo_cli.rewards.code import sandboxes
from ppo_cli.rewards.code.sandboxes import Sandbox
from ppo_cli.rewards.registry import build_reward
from ppo_cli.rewards.rule_reward import RuleReward
from ppo_cli.rewards.rules import RULES
from tests.rewards.scoring import make_rollout

MakeReward = Callable[..., RuleReward]
TESTS = ["assert f(1) == 2", "assert f(2) == 3"]
PATIENCE = 90


@pytest.fixture
def make_reward(any_sandbox: Sandbox) -> Iterator[MakeReward]:
    rewards: list[RuleReward] = []

    def make(**settings: Any) -> RuleReward:
        code = Code(allow_unsandboxed=any_sandbox.name == "none", **settings)
        rewards.append(RuleReward(RULES["code"], code=code))
        return rewards[-1]

    yield make
    for reward in rewards:
        reward.close()


def test_scores_with_its_parts_and_facts(make_reward: MakeReward, any_sandbox: Sandbox) -> None:
    reward = make_reward()
    right = make_rollout("def f(n): return n + 1", TESTS, "mbpp")
    reward.start([right.prompt])
    score = reward.submit(right).result(PATIENCE)
    assert (score.value, score.reason, score.parts) == (1.0, "", {"code": Part(1.0, 1.0)})
    assert score.info == {
        "rule": "code", "extracted": "def f(n): return n + 1", "code_chars": 22,
        "sandbox": any_sandbox.name, "passed": 2, "total": 2,
    }  # fmt: skip
    assert reward.submit(right).result(PATIENCE) == score
    json.dumps(asdict(score))


# Code whose tests fail, and the line that is certainly at fault; "" where none is.
LINES = {
    "def f(n):\n    a = n - 1\n    return 2 / a": "    return 2 / a",
    "def f(n):\n    return g(n)\n\ndef g(n):\n    return [][n]": "    return [][n]",
    "def f(n)\n    return n + 1": "def f(n)",
    "import nothing_of_this_name\ndef f(n): return n + 1": "import nothing_of_this_name",
    "def f(n):\n    raise ValueError(n)": "    raise ValueError(n)",
    "def f(n): return n": "",
    "def g(n): return n": "",
    "def f(n):\n    if n > 1:\n        return 1 / 0\n    return 1 / 0": "    return 1 / 0",
    "def f(n):\n    class E(Exception):\n        __traceback__ = 5\n    raise E": "",
}


@pytest.mark.parametrize("code", LINES)
def test_the_line_that_raises_is_the_place(any_sandbox: Sandbox, code: str) -> None:
    settings = Code(allow_unsandboxed=any_sandbox.name == "none")
    reward = RuleReward(RULES["code"], code=settings, place=True)
    text = f"Here it is.\n```python\n{code}\n```\nDone."
    score = reward.submit(make_rollout(text, TESTS, "mbpp")).result(PATIENCE)
    reward.close()
    assert score.value == 0
    line, once = LINES[code], code.count(LINES[code].strip()) == 1
    ends = [text.index(line), text.index(line) + len(line), len(text)] if line and once else []
    assert [step.end for step in score.steps] == ends


def test_share_and_many_at_once(make_reward: MakeReward) -> None:
    reward = make_reward(score="share")
    replies = ["def f(n): return n + 1", "def f(n): return 2 * n", "def f(n): return 0"] * 3
    futures = [reward.submit(make_rollout(reply, TESTS)) for reply in replies]
    assert [future.result(PATIENCE).value for future in futures] == [1.0, 0.5, 0.0] * 3
    leaves = "import os\ndef f(n):\n    return n + 1 if n == 1 else os._exit(0)"
    assert reward.submit(make_rollout(leaves, TESTS)).result(PATIENCE).value == 0.0


def test_no_code_is_a_zero_at_once_and_no_tests_a_failure(make_reward: MakeReward) -> None:
    reward = make_reward()
    empty = reward.submit(make_rollout("```python\n```", TESTS))
    assert empty.done()
    assert (empty.result().value, empty.result().reason) == (0.0, "no code in the response")
    lost = reward.submit(make_rollout("def f(n): return n", "72")).result(PATIENCE)
    assert lost.value is None
    assert "ground_truth has no tests" in lost.failure


def test_prompts_without_any_tests_stop_the_start(make_reward: MakeReward) -> None:
    with pytest.raises(RewardError, match="None of 2 prompts for the rule code can be scored"):
        make_reward().start([make_rollout("", "72").prompt, make_rollout("", None).prompt])


def test_without_a_sandbox_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "find_fault", lambda sandbox: "it is not there")
    prompt = make_rollout("", TESTS, "mbpp").prompt
    with pytest.raises(RewardError) as caught:
        RuleReward().start([prompt])
    for fragment in ("bwrap: it is", "sandlock: it", "apt-get install", "allow_unsandboxed"):
        assert fragment in str(caught.value)
    RuleReward().start([make_rollout("", "72").prompt])
    lines: list[str] = []
    allowed = build_reward(Settings(code=Code(allow_unsandboxed=True)), sources={"mbpp"})
    allowed.start([prompt], tell=lines.append)
    assert "WITHOUT a sandbox" in lines[0]
    score = allowed.submit(make_rollout("def f(n): return n + 1", TESTS, "mbpp")).result(PATIENCE)
    assert (score.value, score.info["sandbox"]) == (1.0, "none")
    allowed.close()


@pytest.mark.usefixtures("no_trace")
def test_closing_stops_what_runs(make_reward: MakeReward) -> None:
    reward = make_reward(timeout=60, cpu_seconds=60)
    slow = "import time\ndef f(n): time.sleep(50)"
    futures = [reward.submit(make_rollout(slow, TESTS)) for _ in range(4)]
    time.sleep(0.5)
    begin = time.monotonic()
    reward.close()
    reward.close()
    assert time.monotonic() - begin < 45
    assert [future.result(0).value for future in futures] == [None] * 4
    assert "the run ended" in futures[0].result().failure
    with pytest.raises(RuntimeError, match="closed"):
        reward.submit(make_rollout(slow, TESTS))


@pytest.mark.slow
def test_limits_are_those_that_were_set(make_reward: MakeReward) -> None:
    right = "    return n + 1"
    asleep = f"import time\ndef f(n):\n    time.sleep(5)\n{right}"
    flood = f"import os\ndef f(n):\n    os.write(1, bytes(2**19))\n{right}"
    busy = f"def f(n):\n    while True: pass\n{right}"
    strict = make_reward(timeout=3, cpu_seconds=60, output_kb=100)
    patient = make_reward(timeout=60, cpu_seconds=2, output_kb=600)
    futures = {
        (reply, reward): reward.submit(make_rollout(reply, TESTS[:1]))
        for reply, reward in ((asleep, strict), (flood, strict), (asleep, patient),
                              (flood, patient), (busy, patient))
    }  # fmt: skip
    scores = [future.result(PATIENCE) for future in futures.values()]
    assert [(score.value, score.reason) for score in scores] == [
        (0.0, "timed out after 3 s"), (0.0, "wrote more than 100 KB of output"), (1.0, ""),
        (1.0, ""), (0.0, "killed: computed for more than 2 s"),
    ]  # fmt: skip


def test_a_response_may_not_take_more_than_the_address_space(make_reward: MakeReward) -> None:
    prompt = make_rollout("", TESTS).prompt
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    reward = make_reward(memory_mb=1 << 24)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 43, hard))
    try:
        with pytest.raises(RewardError, match=r"ulimit -v.*reward.code.memory_mb=8388608"):
            reward.start([prompt])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
