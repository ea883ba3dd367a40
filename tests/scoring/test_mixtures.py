"""Mixtures and reward models by the same path: parts, scales, early stops, what was spent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppo_cli.config.mixture import judges_of, mixture_of
from ppo_cli.config.schema.reward import ApiReward, Composite, ModelReward
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.scoring.score import MONITORS_OFF
from ppo_cli.scoring.sources import describe_reward, override_all, random_sources, single_judge
from tests.extras.trust.judges import honest
from tests.judge_server import JudgeServer
from tests.reward_server import RewardServer
from tests.rewards.models.twins import skywork_qwen3_twin
from tests.scoring.commands import Run, judge_at, read, score_until_ctrl_c
from tests.scoring.scripted import write_rows

Told = dict[str, Any]

pytestmark = pytest.mark.usefixtures("few_resamples")


@pytest.fixture
def judge(server: JudgeServer, tmp_path: Path) -> list[str]:
    return [*judge_at(server, tmp_path), "--reward", "judge:0.5", "--reward", "rule:0.5"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = skywork_qwen3_twin(tmp_path_factory.mktemp("model") / "rm")
    return ["--reward_model", str(folder), "--reward_model_self_test", "off"]


def sums(tmp_path: Path, count: int = 8) -> str:
    """Two answers to each sum, the second one wrong."""
    rows = [
        {
            "prompt": f"{n // 2} + 1 = ?", "ground_truth": f"{n // 2 + 1}",
            "data_source": "gsm8k", "good": n % 2 == 0,
            "response": f"{'so ' * (n % 3)}It is #### {n // 2 + 1 + n % 2}",
        }
        for n in range(20, 20 + count)
    ]  # fmt: skip
    return write_rows(tmp_path / "a.jsonl", *rows)


def spread(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return float((sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5)


def test_a_reward_model_alone(model: list[str], tmp_path: Path, run: Run) -> None:
    code, out, _ = run("score", sums(tmp_path), *model)
    assert code == 0
    rows = read(tmp_path / "a.scored.jsonl")
    assert all(row["parts"]["model"]["raw"] == row["score"] for row in rows)
    output = [line.strip() for line in out.splitlines()]
    (line,) = [line for line in output if line.startswith("model: {")]
    pasted = yaml.safe_load(line)["model"]
    values = [row["score"] for row in rows]
    assert pasted["mean"] == pytest.approx(sum(values) / len(values), abs=0.01 * spread(values))
    assert pasted["std"] == pytest.approx(spread(values), rel=0.01)
    composite = Composite(parts={"model": pasted, "rule": {}})
    (part, _) = mixture_of(RewardSettings(composite=composite))
    assert (part.scaling, part.mean) == ("affine", pasted["mean"])


def test_a_served_reward_model(tmp_path: Path, run: Run) -> None:
    file = sums(tmp_path)
    with RewardServer() as served:
        flags = ["--reward_model", served.url("/classify"), "--reward", "model:2"]
        code, out, err = run("score", file, *flags, "--reward", "rule:1", "--json")
        summary = json.loads(out)
        assert code == 0, err
        assert summary["parts"]["model"]["scored"] == 8
        assert summary["parts"]["model"]["mean"] > 5.0
        assert summary["parts"]["model"]["share"] == pytest.approx(2 / 3)
        config = RewardSettings(model=ModelReward(path=served.url("/classify")))
        assert describe_reward(config).endswith("/classify, read as vllm")
    shown = [row["parts"]["model"]["raw"] for row in read(tmp_path / "a.scored.jsonl")]
    assert len(set(shown)) == 8


def test_a_reward_model_that_fails_its_test_is_told_and_scores_all_the_same(
    tmp_path: Path, run: Run
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", {"prompt": "hi", "response": "hello"})
    args = [file, "--json", "reward.composite.parts.model.model.timeout=9"]
    with RewardServer(score=lambda text: 20.0) as server:
        address = ["--reward_model", server.url("/get_reward"), "--reward", "model:1"]
        code, out, err = run("score", *args, *address)
    assert code == 0
    assert json.loads(out)["scored"] == 1
    assert "only 0 of 5 good answers" in err and "--reward_model_self_test warn" in err


def test_a_mixture_is_on_the_scale_of_the_file(model: list[str], tmp_path: Path, run: Run) -> None:
    config = tmp_path / "mix.yaml"
    config.write_text(
        "composite_reward:\n  enable: true\n  weights: {rm_score: 0.7, rule_score: 0.3}\n"
    )
    file = sums(tmp_path)
    code, out, _ = run("score", file, *model, "--reward_config", str(config), "--json")
    summary = json.loads(out)
    assert code == 0
    rows = read(tmp_path / "a.scored.jsonl")
    assert [row["response"] for row in rows] == [row["response"] for row in read(Path(file))]
    for row in rows:
        parts = row["parts"]
        total = 0.7 * parts["model"]["scaled"] + 0.3 * parts["rule"]["scaled"]
        assert row["score"] == pytest.approx(total)
    for name, weight in (("model", 0.7), ("rule", 0.3)):
        facts = summary["parts"][name]
        assert spread([row["parts"][name]["scaled"] for row in rows]) == pytest.approx(1.0)
        assert facts["std"] == pytest.approx(spread([row["parts"][name]["raw"] for row in rows]))
        assert (facts["scored"], facts["failed"]) == (8, 0)
        assert facts["share"] == pytest.approx(facts["weight"]) == pytest.approx(weight)
    assert summary["parts"]["rule"]["mean"] == 0.5
    assert [c["parts"] for c in summary["correlations"]] == [["model", "rule"]]
    assert summary["remarks"] == []
    code, out, _ = run("score", file, *model, "--reward_config", str(config))
    assert "70%" in out and "model with rule" in out


def test_answers_to_one_prompt_are_a_group(tmp_path: Path, run: Run) -> None:
    flags = ["--reward", "rule:1", "--reward", "rule:length:1"]
    grouped = "reward.composite.parts.rule={scaling: group}"
    code, _, err = run("score", sums(tmp_path), *flags, grouped)
    assert code == 0, err
    scaled = [row["parts"]["rule"]["scaled"] for row in read(tmp_path / "a.scored.jsonl")]
    assert scaled == pytest.approx([2**-0.5, -(2**-0.5)] * 4, abs=1e-4)


def test_a_dominated_part_is_reported(tmp_path: Path, run: Run) -> None:
    function = tmp_path / "mine.py"
    function.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 40.0 * len(solution_str)\n"
    )
    parts = f"{{loud: {{function: {function}, scaling: none}}, rule: {{scaling: none}}}}"
    code, out, err = run("score", sums(tmp_path), f"reward.composite.parts={parts}")
    assert code == 0, err
    assert "rule is dominated: it makes 0% of the spread, its weight is 50%." in out
    assert "Set the scaling of loud to zscore or affine." in out


def test_a_failed_part_fails_its_row_and_says_which(
    server: JudgeServer, judge: list[str], tmp_path: Path, run: Run
) -> None:
    server.score = lambda system, user: "I like it." if "11 + 1" in user else 10
    code, out, _ = run("score", sums(tmp_path), *judge, "--json")
    summary = json.loads(out)
    assert (code, summary["scored"], summary["failed"]) == (0, 6, {"judge: form": 2})
    assert (summary["parts"]["judge"]["failed"], summary["parts"]["rule"]["failed"]) == (2, 0)
    row = read(tmp_path / "a.scored.jsonl")[2]
    assert row["score"] is None and row["failure"].startswith("judge: form")
    assert row["parts"]["rule"]["raw"] == 1.0
    assert summary["remarks"] == [
        "judge gives every row the same score, so it decides nothing here."
    ]


def test_ctrl_c_keeps_the_rows_that_are_whole(
    server: JudgeServer, judge: list[str], tmp_path: Path
) -> None:
    rows = score_until_ctrl_c(server, sums(tmp_path, 40), *judge, calls=6)
    assert 0 < sum(row["score"] is not None for row in rows) < 40


def test_calibrate_looks_at_each_part_and_asks_its_judge_afresh(
    server: JudgeServer, judge: list[str], tmp_path: Path, run: Run
) -> None:
    file = sums(tmp_path, 12)
    server.score = lambda system, user: 5
    code, out, err = run("calibrate", file, "--labels", "good", *judge, "--json")
    summary = json.loads(out)
    assert code == 0, err
    assert summary["kind"] == "mixture"
    assert summary["agreement"]["AUC"]["value"] == 1.0
    assert summary["parts"]["rule"]["agreement"]["AUC"]["value"] == 1.0
    assert summary["parts"]["judge"]["agreement"]["AUC"]["why"] == "every score is the same"
    assert summary["parts"]["judge"]["repeated"]["verdicts"] == 3
    assert summary["parts"]["rule"]["repeated"] is None
    assert server.count >= 12 + 36
    assert summary["spent"]["calls"] >= 48
    assert summary["agreement"]["accuracy at 0.5"]["value"] is None
    _, out, _ = run("calibrate", file, "--labels", "good", *judge)
    assert "Part rule alone" in out and "Repeated verdicts of judge" in out


def test_fresh_verdicts_keep_to_the_budget(
    server: JudgeServer, judge: list[str], tmp_path: Path, run: Run
) -> None:
    file = sums(tmp_path, 12)
    limited = ["--rm_max_tokens", "50", "--rm_budget_tokens", "12000", "--json"]
    code, out, err = run("calibrate", file, "--labels", "good", *judge, *limited)
    summary = json.loads(out)
    assert (code, summary["scored"]) == (3, 12), err
    assert "budget" in summary["stopped"]
    assert summary["spent"]["tokens_in"] + summary["spent"]["tokens_out"] <= 12_000


def audited(run: Run, *flags: str) -> tuple[int, dict[str, Told], Told]:
    code, out, _ = run("audit", *flags, "--json")
    summary = json.loads(out)
    return code, {check["name"]: check for check in summary["checks"]}, summary


@pytest.mark.parametrize("gate", ["", "reward.composite.parts.judge={only_if: rule >= 1}"])
def test_audit_of_a_mixture_with_an_honest_judge(
    server: JudgeServer, judge: list[str], run: Run, gate: str
) -> None:
    server.score = honest
    code, checks, args = audited(run, *judge, "--rows", "3", *([gate] if gate else []))
    assert code == 0, {n: c["worst"] for n, c in checks.items() if c["passed"] is False}
    assert args["reward"].startswith("total = 0.5 x zscore(judge)")
    assert "judge a-judge with prompt math" in args["reward"]
    passed = {name: check["passed"] for name, check in checks.items()}
    assert all(passed.values()) or gate
    assert passed["content-free gate"] and passed["ground truth in the request"]
    assert "of judge differ" in checks["same answer twice"]["said"]
    assert passed["worked cases"] is (None if gate else True)


def test_mistakes_cost_one_message(tmp_path: Path, run: Run) -> None:
    file = sums(tmp_path)
    for args, arguments in (
        (["--reward_model", str(tmp_path / "nowhere")], "there is no model folder"),
        (["--reward_model", str(tmp_path)], "holds no weights"),
        (["--reward", "jugde:1"], "Did you mean 'judge'?"),
        (["--reward", "rule:1", "--reward", "rule:gsm8:1"], "gsm8"),
    ):
        code, out, err = run("score", file, *args)
        assert (code, out) == (2, ""), args
        assert arguments in err and "Traceback" not in err
        assert len(err.strip().splitlines()) == 1


JUDGES = RewardSettings(
    api=ApiReward(model="m", canary_every=9),
    parts=("judge:0.5", "judge:style:0.2", "rule:0.3"),
    composite=Composite(
        parts={
            "style": {
                "clip": 2.0,
                "judge": {"model": "other", "canary_every": 3, "monitor": {"model": "watcher"}},
            },
            "rule": {"function": "mine.py"},
        }
    ),
)


def test_every_judge_is_quiet() -> None:
    quiet = override_all(JUDGES, "judge", MONITORS_OFF)
    for arguments in judges_of(quiet):
        api = arguments.settings
        assert (api.canary_every, api.monitor.model, api.max_failure_rate) == (0, None, 1.0)
    assert [judge.settings.model for judge in judges_of(quiet)] == ["m", "other"]
    assert mixture_of(quiet) == tuple(
        part if part.name != "style" else part.model_copy(update={"judge": {"model": "other"}})
        for part in mixture_of(JUDGES)
    )
    single = RewardSettings(api=ApiReward(enable=True, gate=True))
    alone = override_all(single, "judge", {"gate": False})
    assert alone.api.gate is False


def test_what_may_answer_otherwise() -> None:
    assert list(random_sources(JUDGES)) == ["judge", "style", "rule"]
    assert single_judge(JUDGES) is None
    assert random_sources(RewardSettings(rule="gsm8k")) == {}
    assert list(random_sources(RewardSettings(function="mine.py"))) == ["rule"]
    assert describe_reward(RewardSettings(function="mine.py")) == "function mine.py"
