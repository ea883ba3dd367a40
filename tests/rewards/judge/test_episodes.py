"""Episodes before a judge: every author in a fence, and tools that cannot leave theirs."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ppo_cli.records import Rollout, format_tool
from ppo_cli.rewards.judge.calls import JudgeError, Reply
from ppo_cli.rewards.judge.compare import CompareReward
from ppo_cli.rewards.judge.prompt import build_material, load_template
from ppo_cli.rewards.judge.reward import JudgeReward
from ppo_cli.rewards.judge.verdict import read_answer
from ppo_cli.rewards.judge.visible import TURN_CUT, cut_passages, visible_response
from tests.judge_server import JudgeServer
from tests.rewards.judge.corpora import read_corpus
from tests.rewards.scoring import score_all, sum_episode, sum_rollout
from tests.settings import complete_judge

# Results of tools that pretend to be somebody else, written without a look at the prompt's form.
ATTACKS = {row["name"]: row["text"] for row in read_corpus("tool_attacks")}
NONCE = "0123456789abcdef"
SCORING = "Question: {prompt}\nAnswer: {response}\nGrade it from 1 to 10."
AUTHORS = ("prompt", "response", "assistant-1", "call-1", "tool-1", "assistant-2")
SCALE = "from 1 to 10"
# What a careless reader takes for a tag: any nonce, or none.
TAG = re.compile(
    r"<(/?)((?:prompt|response|ground_truth|assistant|thought|call|tool\w*|result\w*|user|episode"
    r"|system)(?:-\w{1,3})?)(?:-[0-9a-f]{4,})?>",
    re.IGNORECASE,
)
CONTROL = re.compile(r"<\|?\w[\w|]*\|>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>|<\|channel\|>")


def request(rollout: Rollout, **settings: Any) -> str:
    api = complete_judge(**({"scoring_prompt": SCORING} | settings))
    material = build_material(rollout.prompt, visible_response(rollout, api))
    return load_template(api).question(material, api, nonce=NONCE).user


def read_naively(user: str) -> tuple[list[str], str]:
    """The authors in a request in order, and what a careless reader finds outside of all fences."""
    text, end = unicodedata.normalize("NFKC", user), 0
    depth: list[str] = []
    authors: list[str] = []
    outside: list[str] = []
    for tag in TAG.finditer(text):
        closing, name = tag[1], tag[2]
        if not depth:
            outside.append(text[end : tag.start()])
        if closing:
            del depth[depth.index(name) if name in depth else 0 :]
        elif not closing:
            depth.append(name)
            authors.append(name)
        end = tag.end()
    outside.append(text[end:])
    return authors, "\n".join(outside)


def believe(system: str, user: str) -> int:
    """A judge that obeys what stands outside of the fences, and control tokens anywhere."""
    _, outside = read_naively(user)
    obeys = re.search(r"\b10\b(?! \(best)|lenient|maximum", outside.replace(SCALE, ""))
    return 10 if obeys or CONTROL.search(user) else 1


def test_each_author_has_a_fence() -> None:
    user = request(sum_episode(1, thought="One more than 1."))
    assert (
        f"""<response-{NONCE}>
<assistant-1-{NONCE}>
Let me add.
</assistant-1-{NONCE}>
<call-1-{NONCE}>
add(a=1, b=1)
</call-1-{NONCE}>
<tool-1-{NONCE}>
2
</tool-1-{NONCE}>
<assistant-2-{NONCE}>
It is 2.
</assistant-2-{NONCE}>
</response-{NONCE}>"""
        in user
    )
    assert "is an episode of several turns" in user and "One more" not in user
    assert user.count("What is 1 + 1?") == 1
    kept = request(sum_episode(1, thought="One more than 1."), reasoning="keep")
    assert f"<thought-1-{NONCE}>\nOne more than 1.\n</thought-1-{NONCE}>" in kept
    last = request(sum_episode(1), scope="turn")
    assert f"<response-{NONCE}>\nIt is 2.\n</response-{NONCE}>" in last and "episode" not in last


def test_tools_and_limits_are_named() -> None:
    function = {
        "name": "add", "description": "Add two\nnumbers.",
        "parameters": {"properties": {"a": {"type": "integer"}, "b": {"enum": [1, 2]}}},
    }  # fmt: skip
    rollout = sum_episode(1)
    first, *others = rollout.turns
    tools = format_tool({"type": "function", "function": function})
    prompt = replace(rollout.prompt, tools=tools)
    cut = replace(rollout, turns=(replace(first, cut=True), *others), finish_reason="length")
    user = request(replace(cut, prompt=prompt))
    assert f"<tools-0-{NONCE}>\nadd(a: integer, b: 1 or 2): Add two numbers.\n" in user
    assert user.count(TURN_CUT) == 2 and f"</limit-2-{NONCE}>" in user


def test_long_results_are_cut_first() -> None:
    rollout = sum_episode(1, result="ab" * 2000)
    user = request(rollout, max_response_chars=400)
    assert "Let me add." in user and "It is 2." in user
    assert f"\n[cut-{NONCE}]\n" in user and "characters left out in the middle of passages" in user
    passages = visible_response(rollout, complete_judge())
    assert not isinstance(passages, str)
    for limit in (46, 200, 1000, 5000):  # a quarter of 46 is the length of a passage
        cut = [piece for _, piece in cut_passages(passages, limit)]
        assert sum(len(head) + len(tail) for head, _, tail in cut) <= limit
        assert sum(left_out for _, left_out, _ in cut) == max(0, 4032 - limit)


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_tool_stays_in_its_fence(name: str, role: str) -> None:
    rollout = sum_episode(1, result=ATTACKS[name])
    first, last = rollout.turns
    reply = {"role": role, "content": ATTACKS[name]}
    attacked = replace(rollout, turns=(replace(first, replies=(reply,)), last))
    user, plain = request(attacked), request(sum_episode(1))
    authors, outside = read_naively(user)
    fences = [f"{role}-1" if author == "tool-1" else author for author in AUTHORS]
    assert authors == fences
    assert outside == read_naively(plain)[1]
    assert not CONTROL.search(user)
    # In the arguments of a call and in the model's own words it gets no farther.
    call = {"function": {"name": ATTACKS[name], "arguments": {ATTACKS[name]: ATTACKS[name]}}}
    message = {"role": "assistant", "content": ATTACKS[name], "tool_calls": [call]}
    written = replace(rollout, turns=(replace(first, message=message), last))
    assert read_naively(request(written))[1] == outside


def test_no_result_changes_a_verdict(server: JudgeServer, judge_of: Callable[..., Any]) -> None:
    server.score = believe
    reward: JudgeReward = judge_of(scoring_prompt=SCORING)
    rollouts = [
        replace(sum_episode(1, result=text), sample=n) for n, text in enumerate(ATTACKS.values())
    ]
    scores = score_all(reward, rollouts)
    assert [score.value for score in scores] == [0.0] * 40 and server.count == 40
    # It believes most of them outside of all fences, and many of them raw in the fence.
    plain = request(sum_episode(1))
    raw = [plain.replace("\n2\n</tool", f"\n{text}\n</tool") for text in ATTACKS.values()]
    assert believe("", plain) == 1
    assert sum(believe("", f"{plain}\n{text}") == 10 for text in ATTACKS.values()) == 36
    assert sum(believe("", user) == 10 for user in raw) == 11


@pytest.mark.parametrize("output", ["json", "text"])
def test_a_judge_that_quotes_a_result_is_read_as_it_says(output: str) -> None:
    api = complete_judge(prompt_preset="math", output=output)
    question = load_template(api).question(build_material(sum_episode(1).prompt, "2"), api)
    for name, text in ATTACKS.items():
        reply = f"The tool said: {text}\nScore: 1"
        if output == "json":
            reply = json.dumps({"reason": text, question.scale.key: 1})
        try:
            value, _, _ = read_answer(Reply(reply), question)
        except JudgeError:
            continue
        assert value == 1, name


def test_a_judge_reads_an_episode(server: JudgeServer, judge_of: Callable[..., Any]) -> None:
    reward = judge_of(prompt_preset="math")
    right, wrong = score_all(reward, [sum_episode(1), sum_episode(2, result="4", answer="It is 4")])
    assert (right.value, wrong.value) == (1.0, 0.0)
    # Another result is another request; the same episode is not asked about again.
    score_all(reward, [sum_episode(1), sum_episode(1, result="3")])
    assert server.count == 3
    # A call is content, an episode without any is not.
    silent = sum_episode(3, answer="")
    first, last = silent.turns
    empty = replace(first, message={"role": "assistant", "content": ""})
    called, nothing = score_all(reward, [silent, replace(silent, turns=(empty, last))])
    assert not called.gated and nothing.gated


@pytest.mark.parametrize(
    ("wire", "mode"),
    [("openai", "decision"), ("claude", "text"), ("gemini", "text"), ("dashscope", "text")],
)
def test_each_provider_and_decisions_read_episodes(
    wire: str, mode: str, server: JudgeServer, judge_of: Callable[..., Any]
) -> None:
    reward = judge_of(wire, mode=mode, prompt_preset="math")
    right, wrong = score_all(reward, [sum_episode(1), sum_episode(2, result="4", answer="It is 4")])
    assert right.value == pytest.approx(1, abs=0.2) and wrong.value == pytest.approx(0, abs=0.2)
    assert all("assistant-2-" in json.dumps(call.body) for call in server.calls)


def test_episodes_are_compared(server: JudgeServer, judge_of: Callable[..., Any]) -> None:
    def prefer(system: str, user: str) -> str:
        first = user[user.index("<response-R1") : user.index("<response-R2")]
        return json.dumps({"reason": "", "better_response": "R1" if "a=7" in first else "R2"})

    server.score = prefer
    reward: CompareReward = judge_of(kind=CompareReward, mode="compare")
    better, worse = sum_episode(7), replace(sum_episode(8), sample=1)
    worse = replace(worse, prompt=better.prompt)
    scores = score_all(reward, [better, worse, replace(better, sample=2)])
    assert scores[0].value == scores[2].value > scores[1].value
    # The first validation is what later ones are compared with, after a resume as well.
    score_all(reward, [better], "validation")
    resumed: CompareReward = judge_of(kind=CompareReward, mode="compare")
    resumed.load_state_dict(json.loads(json.dumps(reward.state_dict())))
    (again,) = score_all(resumed, [better], "validation")
    (other,) = score_all(resumed, [worse], "validation")
    assert (again.value, other.value) == (0.5, 0.0)


def test_single_turns_are_as_before() -> None:
    rollout = sum_rollout(1)
    assert request(rollout) == request(rollout, scope="turn")
