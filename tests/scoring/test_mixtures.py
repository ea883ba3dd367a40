"""Mixtures and reward models by the same path: parts, scales, early stops, what was spent."""

from __future__ import annotations

import signal
from statistics import fmean, pstdev

import pytest
import yaml

from ppo_cli.config.mixture import judges_of, mixture_of
from ppo_cli.config.schema.reward import Composite
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.scoring.score import MONITORS_OFF
from ppo_cli.scoring.sources import describe_reward, override_all
from tests.reward_server import RewardServer
from tests.rewards.models.twins import skywork_qwen3_twin
from tests.scoring.commands import Bench, read
from tests.settings import complete_judge, complete_reward_model

pytestmark = pytest.mark.usefixtures("few_resamples")


@pytest.fixture
def judge(bench: Bench) -> list[str]:
    return [*bench.judge(), "--reward", "judge:0.5", "--reward", "rule:0.5"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = skywork_qwen3_twin(tmp_path_factory.mktemp("model") / "rm")
    return ["--reward_model", str(folder), "--reward_model_self_test", "off"]


def sums(bench: Bench, count: int = 8) -> str:
    """Two answers to each sum, the second one wrong."""
    rows = [
        {
            "prompt": f"{n // 2} + 1 = ?", "ground_truth": f"{n // 2 + 1}",
            "data_source": "gsm8k", "good": n % 2 == 0,
            "response": f"{'so ' * (n % 3)}It is #### {n // 2 + 1 + n % 2}",
        }
        for n in range(20, 20 + count)
    ]  # fmt: skip
    return bench.write(*rows)


def test_a_reward_model_alone(model: list[str], bench: Bench) -> None:
    out = bench.reward("score", sums(bench), *model).out
    rows = bench.scored()
    assert all(row["parts"]["model"]["raw"] == row["score"] for row in rows)
    (line,) = [line for line in out.splitlines() if line.strip().startswith("model: {")]
    pasted, values = yaml.safe_load(line)["model"], [row["score"] for row in rows]
    assert pasted["mean"] == pytest.approx(fmean(values), abs=0.01 * pstdev(values))
    assert pasted["std"] == pytest.approx(pstdev(values), rel=0.01)
    composite = Composite(parts={"model": pasted, "rule": {}})
    (part, _) = mixture_of(RewardSettings(composite=composite))
    assert (part.scaling, part.mean) == ("affine", pasted["mean"])


def test_a_served_reward_model(bench: Bench) -> None:
    with RewardServer() as served:
        url = served.url("/classify")
        flags = ("--reward_model", url, "--reward", "model:2", "--reward", "rule:1", "--json")
        facts = bench.reward("score", sums(bench), *flags).summary["parts"]["model"]
        assert (facts["scored"], facts["share"]) == (8, pytest.approx(2 / 3))
        assert facts["mean"] > 5.0
        config = RewardSettings(model=complete_reward_model(path=url))
        assert describe_reward(config).endswith("/classify, read as vllm")
    assert len({row["parts"]["model"]["raw"] for row in bench.scored()}) == 8


def test_a_reward_model_that_fails_its_test_is_told_and_scores_all_the_same(bench: Bench) -> None:
    file = bench.write({"prompt": "hi", "response": "hello"})
    timeout = "reward.composite.parts.model.model.timeout=9"
    with RewardServer(score=lambda text: 20.0) as server:
        address = ("--reward_model", server.url("/get_reward"), "--reward", "model:1")
        outcome = bench.reward("score", file, "--json", timeout, *address)
    assert outcome.summary["scored"] == 1
    assert "only 0 of 5 good answers" in outcome.err
    assert "--reward_model_self_test warn" in outcome.err


def test_a_mixture_is_on_the_scale_of_the_file(model: list[str], bench: Bench) -> None:
    config, file = bench.folder / "mix.yaml", sums(bench)
    weights = {"rm_score": 0.7, "rule_score": 0.3}
    config.write_text(yaml.safe_dump({"composite_reward": {"enable": True, "weights": weights}}))
    args = ("score", file, *model, "--reward_config", str(config))
    summary, rows = bench.reward(*args, "--json").summary, bench.scored()
    order = [row["response"] for row in read(bench.folder / "a.jsonl")]
    assert [row["response"] for row in rows] == order
    for row in rows:
        parts = row["parts"]
        total = 0.7 * parts["model"]["scaled"] + 0.3 * parts["rule"]["scaled"]
        assert row["score"] == pytest.approx(total)
    for name, weight in (("model", 0.7), ("rule", 0.3)):
        facts = summary["parts"][name]
        assert pstdev([row["parts"][name]["scaled"] for row in rows]) == pytest.approx(1.0)
        assert facts["std"] == pytest.approx(pstdev([row["parts"][name]["raw"] for row in rows]))
        assert (facts["scored"], facts["failed"]) == (8, 0)
        assert facts["share"] == pytest.approx(facts["weight"]) == pytest.approx(weight)
    assert summary["parts"]["rule"]["mean"] == 0.5
    assert [c["parts"] for c in summary["correlations"]] == [["model", "rule"]]
    assert summary["remarks"] == []
    assert "model with rule" in bench.reward(*args).out


def test_answers_to_one_prompt_are_a_group(bench: Bench) -> None:
    flags = ("--reward", "rule:1", "--reward", "rule:length:1")
    grouped = "reward.composite.parts.rule={scaling: group}"
    bench.reward("score", sums(bench), *flags, grouped)
    scaled = [row["parts"]["rule"]["scaled"] for row in bench.scored()]
    assert scaled == pytest.approx([2**-0.5, -(2**-0.5)] * 4, abs=1e-4)


def test_a_failed_part_fails_its_row_and_says_which(judge: list[str], bench: Bench) -> None:
    bench.server.score = lambda system, user: "I like it." if "11 + 1" in user else 10
    summary = bench.reward("score", sums(bench), *judge, "--json").summary
    assert (summary["scored"], summary["failed"]) == (6, {"judge: form": 2})
    assert (summary["parts"]["judge"]["failed"], summary["parts"]["rule"]["failed"]) == (2, 0)
    row = bench.scored()[2]
    assert row["score"] is None and row["failure"].startswith("judge: form")
    assert row["parts"]["rule"]["raw"] == 1.0
    (remark,) = summary["remarks"]
    assert remark == "judge gives every row the same score, so it decides nothing here."


@pytest.mark.slow
def test_ctrl_c_keeps_the_rows_that_are_whole(judge: list[str], bench: Bench) -> None:
    bench.server.state.latency = 0.3
    args = ("reward", "score", sums(bench, 40), *judge, "--rm_concurrency", "1")
    process = bench.signal_when(lambda: bench.server.count >= 6, signal.SIGINT, *args)
    assert process.returncode == 3, process.output()
    assert "Stopped by Ctrl-C." in process.output() and "Traceback" not in process.output()
    assert 0 < sum(row["score"] is not None for row in bench.scored()) < 40


JUDGES = RewardSettings(
    api=complete_judge(model="m", canary_every=9),
    parts=("judge:0.5", "judge:style:0.2", "rule:0.3"),
    composite=Composite(parts={
        "style": {"clip": 2.0, "judge": {"model": "other", "canary_every": 3,
                                         "monitor": {"model": "watcher"}}},
        "rule": {"function": "mine.py"},
    }),
)  # fmt: skip


def test_every_judge_is_quiet() -> None:
    quiet = override_all(JUDGES, "judge", MONITORS_OFF)
    for judge in judges_of(quiet):
        api = judge.settings
        assert (api.canary_every, api.monitor.model, api.max_failure_rate) == (0, None, 1.0)
        assert api.noise_responses == 0
    assert [judge.settings.model for judge in judges_of(quiet)] == ["m", "other"]
    assert mixture_of(quiet) == tuple(
        part if part.name != "style" else part.model_copy(update={"judge": {"model": "other"}})
        for part in mixture_of(JUDGES)
    )
    single = RewardSettings(api=complete_judge(enable=True, gate=True))
    assert override_all(single, "judge", {"gate": False}).api.gate is False


def test_a_function_is_described_by_its_file() -> None:
    assert describe_reward(RewardSettings(function="mine.py")) == "function mine.py"
