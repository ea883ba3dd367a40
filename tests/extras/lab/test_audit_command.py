"""`ppo reward audit` as typed, the audit at the start of a run, and repeated verdicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.config.schema.reward import Composite
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.errors import Interrupted, UserError
from ppo_cli.extras.lab.audit.attacks import user_prompt
from ppo_cli.extras.lab.audit.start import audit_at_start
from ppo_cli.extras.lab.repeats import remaining_budget, repeat_verdicts
from ppo_cli.extras.lab.reward_facts import random_sources, single_judge
from ppo_cli.records import Score
from ppo_cli.scoring.rows import rollout_of
from ppo_cli.scoring.score import Callbacks
from tests.extras.lab.judges import honest
from tests.scoring.commands import Bench, run_reward
from tests.scoring.scripted import Scripted, write_rows
from tests.settings import complete, complete_judge

ROW: dict[str, Any] = {
    "prompt": "1 + 1 = ?", "ground_truth": "2", "data_source": "gsm8k", "response": "#### 2",
}  # fmt: skip


@pytest.fixture
def judge(bench: Bench) -> list[str]:
    return ["--use_api_reward", *bench.judge()]


def test_repeats_have_what_is_left_of_each_budget() -> None:
    judge = complete_judge(enable=True, budget_usd=2.0, budget_tokens=100)
    spent = {"cost_usd": 0.5, "tokens_in": 30.0, "tokens_out": 20.0}
    before = {f"judge_strict/{name}": value for name, value in spent.items()}
    rest = remaining_budget(judge, "strict", before)
    assert (rest.budget_usd, rest.budget_tokens) == (1.5, 50)
    with pytest.raises(Interrupted, match="budget of the judge 'strict' is used up"):
        remaining_budget(judge, "strict", before | {"judge_strict/cost_usd": 2.0})


def test_audit_keeps_to_the_budget(bench: Bench, judge: list[str]) -> None:
    bench.server.score = honest
    args = ("audit", *judge, "--rm_max_tokens", "50", "--json")
    outcome = bench.reward(*args, "--rm_budget_tokens", "20000", code=3)
    summary = outcome.summary
    assert summary["checks"] == [] and "budget" in summary["stopped"] and "budget" in outcome.err
    assert 0 < summary["spent"]["tokens_in"] + summary["spent"]["tokens_out"] <= 20_000
    checks = bench.reward(*args).checks
    assert {check["passed"] for check in checks.values()} == {True}


def test_repeats_are_asked_for_each_row_and_counted() -> None:
    seen = list[int]()
    rollouts = [rollout_of(user_prompt("p", "q", "", "", {}), text) for text in ("a", "bb")]
    repeated = repeat_verdicts(
        Scripted(lambda rollout: Score(float(len(rollout.text)))),
        rollouts,
        3,
        Callbacks(seen.append),
    )
    assert (repeated, seen) == (("", [[1.0] * 3, [2.0] * 3]), [1, 1])


@pytest.mark.parametrize("gate", [(), ("reward.composite.parts.judge={only_if: rule >= 1}",)])
@pytest.mark.usefixtures("few_resamples")
def test_audit_with_an_honest_judge(judge: list[str], bench: Bench, gate: tuple[str, ...]) -> None:
    mixed = ("--reward", "judge:0.5", "--reward", "rule:0.5")
    bench.server.score = honest
    outcome = bench.reward("audit", *judge, *mixed, "--rows", "3", *gate, "--json")
    reward, checks = outcome.summary["reward"], outcome.checks
    assert reward.startswith("total = 0.5 x zscore(judge)")
    assert "judge a-judge with prompt math" in reward
    assert all(check["passed"] for check in checks.values()) or gate
    assert checks["content-free gate"]["passed"]
    assert checks["ground truth in the request"]["passed"]
    assert "of judge differ" in checks["same answer twice"]["said"]
    assert checks["worked cases"]["passed"] is (None if gate else True)


@pytest.mark.slow
def test_a_run_is_warned_of_a_reward_that_can_be_fooled(tmp_path: Path) -> None:
    """Functions that pay for length or praise; not those that look for the answer or its form."""
    body = (
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return "
    )
    (tmp_path / "long.py").write_text(f"{body}min(1.0, len(solution_str) / 12)\n")
    (tmp_path / "longer.py").write_text(f"{body}min(1.0, len(solution_str) / 400)\n")
    (tmp_path / "kind.py").write_text(f"{body}float('wonderful' in solution_str)\n")
    (tmp_path / "right.py").write_text(f"{body}float(str(ground_truth) in solution_str)\n")
    (tmp_path / "form.py").write_text(
        f"{body}(solution_str.endswith('!') + (solution_str.count('.') < 2)) / 3\n"
    )

    def audit(**reward: str) -> str:
        return audit_at_start(complete({"reward": reward}).reward)

    warning = audit(function=str(tmp_path / "long.py"))
    assert "can be fooled: the reply" in warning and "reward audit --reward_function" in warning
    assert "the answer five times scores" in audit(function=str(tmp_path / "longer.py"))
    assert "flattery scores 1.000" in audit(function=str(tmp_path / "kind.py"))
    assert audit(function=str(tmp_path / "form.py")) == ""
    assert audit(function=str(tmp_path / "right.py")) == audit(rule="code") == audit() == ""
    # The run itself reports a missing function, and one that always raises.
    (tmp_path / "raises.py").write_text(f"{body}float(answer == ground_truth)\n")
    assert audit(function=str(tmp_path / "nothing.py")) == ""
    assert audit(function=str(tmp_path / "raises.py")) == ""


def test_tasks_are_read_from_columns_of_any_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def keep(name: str) -> Callable[..., Any]:
        def record_call(*args: Any, **options: Any) -> Any:
            seen[name] = (*args, options)
            raise UserError("enough")

        return record_call

    names = {"prompt": "q", "data_source": "kind", "response": "said"}
    row = {names.get(key, key): value for key, value in ROW.items()} | {"good": "yes"}
    other = {**row, "q": "2 + 2 = ?", "ground_truth": "4", "said": "#### 5", "good": "no"}
    file = write_rows(tmp_path / "a.jsonl", row, other)
    keys = ("data.prompt_key=q", "data.reward_fn_key=kind")
    monkeypatch.setattr("ppo_cli.extras.lab.audit.audit.audit", keep("audit"))
    for args, prompts in (
        (("--data", file, *keys), ["1 + 1 = ?", "2 + 2 = ?"]),
        (("--data", file, *keys, "--rows", "1"), ["1 + 1 = ?"]),
    ):
        run_reward(capsys, "audit", *args)
        assert [item.prompt.text for item in seen["audit"][2]] == prompts
    bundled = []
    for name in ("math", "safety"):
        run_reward(capsys, "audit", "--items", name, "--rule", "exact")
        bundled.append([item.prompt.text for item in seen["audit"][2]])
    assert bundled[0] != bundled[1]


def test_judges_and_functions_may_answer_otherwise() -> None:
    parts = ("judge:0.5", "judge:style:0.2", "rule:0.3")
    composite = Composite(parts={"rule": {"function": "mine.py"}})
    mixed = RewardSettings(api=complete_judge(model="m"), parts=parts, composite=composite)
    assert list(random_sources(mixed)) == ["judge", "style", "rule"]
    assert single_judge(mixed) is None
    assert random_sources(RewardSettings(rule="gsm8k")) == {}
    assert list(random_sources(RewardSettings(function="mine.py"))) == ["rule"]
