"""What a judge will take is counted from the run's own rows, and told before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo_cli.cli.app import main
from ppo_cli.config.models.known_models import JUDGES
from ppo_cli.errors import RewardError
from ppo_cli.planning.resolve import resolve
from ppo_cli.report.features import find_asked_judge
from ppo_cli.rewards.judge.prompt import EPISODE
from ppo_cli.run.refusals import FirstRows
from ppo_cli.scoring.forecast import (
    SAMPLE,
    TOOLS_CHARS,
    VERDICT_TOKENS,
    Forecast,
    UsageRange,
    forecast,
)
from tests.scoring.scripted import write_rows

ENV = {"MODEL_PATH": "some/model", "CUDA_VISIBLE_DEVICES": ""}
PROMPT = "reward.api.scoring_prompt=Q: {prompt} A: {response} 1-10"


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with four prompts, and no keys."""
    monkeypatch.chdir(tmp_path)
    for name in (key for api in JUDGES.values() for key in api.keys):
        monkeypatch.delenv(name, raising=False)
    write("t.jsonl", 4)


def write(name: str, rows: int, prompt: str = "What is 1 + 1?") -> None:
    row = {"prompt": prompt, "ground_truth": "2", "extra_info": {"rubric": "be brief"}}
    write_rows(Path(name), *[row] * rows)


def foretell(*overrides: str) -> Forecast:
    base = (
        "reward.api.enable=true", "reward.api.type=openai", "reward.api.model=gpt-4o-mini",
        "data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "rollout.n=2", PROMPT,
        "data.max_response_length=100", "data.train_files=t.jsonl",
    )  # fmt: skip
    settings = resolve(
        flags={}, preset=None, config_files=(), overrides=[*base, *overrides], environ=ENV
    ).config
    wishes = int(find_asked_judge(settings.reward) is not None)
    return forecast(settings, FirstRows(settings).prompts, wishes)


def whole_run(forecast: Forecast) -> UsageRange:
    assert forecast.run is not None
    return forecast.run


def test_calls_are_the_plans_times_the_votes() -> None:
    write("t.jsonl", 12)
    write("v.jsonl", 5)
    settings = ["data.val_files=v.jsonl", "reward.api.votes=3", "trainer.test_freq=1"]
    forecast = foretell(*settings)
    assert forecast.steps == 3
    assert forecast.a_step.calls == 4 * 2 * 3
    calls = (3 * 8 + 4 * 5) * 3  # before, at each of three steps
    assert whole_run(forecast).calls == calls + 1  # what the prompt wants of responses
    assert any("which style the prompt or rubric asks for" in line for line in forecast.lines())
    assert whole_run(foretell(*settings, "reward.api.canary_every=0")).calls == calls
    assert (forecast.rows, forecast.sampled) == (17, 17)


def test_held_out_criteria_are_named_and_priced_in_validation_alone() -> None:
    write("v.jsonl", 4)
    rubric = [{"name": name, "text": f"It is {name}."} for name in ("red", "green", "blue")]
    Path("r.yaml").write_text(json.dumps(rubric))
    settings = ["reward.api.rubric=r.yaml", "data.val_files=v.jsonl", "trainer.test_freq=1"]
    without, forecast = (foretell(*settings, *s) for s in ([], ["reward.api.rubric_held_out=0.3"]))
    bill, run = forecast.criteria_bill, whole_run(forecast)
    assert bill is not None and bill.calls == 0 and run.calls == whole_run(without).calls
    # The eight calls of two validations cost more, all others less; the rows are the same.
    saved = without.a_step.low - forecast.a_step.low
    assert (saved > 0).all() and bill.low == pytest.approx(saved)
    assert whole_run(without).low - run.low == pytest.approx(saved * (run.calls - 8) / 8)
    (line,) = (line for line in forecast.lines() if line.startswith("held out: "))
    assert "(1 of 3 criteria)" in line and any(row["name"] in line for row in rubric)


def test_labelled_responses_are_read_at_the_start_and_every_so_often() -> None:
    write("t.jsonl", 40)
    rows = [{"prompt": "1 + 1?", "response": f"{n}", "label": n % 2} for n in range(9)]
    write_rows(Path("l.jsonl"), *rows)
    settings = ["reward.api.monitor.labels=l.jsonl", "reward.api.monitor.labels_every=4"]
    forecast, without = foretell(*settings), foretell()
    assert forecast.steps == 10
    assert forecast.a_step.as_dict(None) == without.a_step.as_dict(None)
    added = whole_run(forecast).calls - whole_run(without).calls
    assert added == 9 * 3, "before the first step, and at 4 and 8"


def test_tokens_grow_with_prompts_and_responses() -> None:
    write("t.jsonl", 12)
    short, twice = foretell(), foretell("data.max_response_length=200")
    assert short.a_step.low[1] == 8 * VERDICT_TOKENS[0]
    assert short.a_step.high[1] == 8 * VERDICT_TOKENS[1]
    assert twice.a_step.low[0] - short.a_step.low[0] == pytest.approx(8 * 50, abs=8)
    assert twice.a_step.high[0] - short.a_step.high[0] == pytest.approx(8 * 100, abs=8)
    write("t.jsonl", 12, prompt="word " * 400)
    long = foretell()
    assert long.a_step.low[0] - short.a_step.low[0] == pytest.approx(8 * 500, rel=0.02)
    write("t.jsonl", 12, prompt="值" * 400)
    assert foretell().a_step.high[0] > 8 * 400


def test_a_call_is_what_training_would_send() -> None:
    """The longest response is cut like any other, and no verdict is longer than it may be."""
    cut = foretell("data.max_response_length=4000", "reward.api.max_response_chars=400")
    assert cut.a_step.high[0] / cut.a_step.calls < 1000
    brief = foretell("reward.api.max_tokens=10")
    assert brief.a_step.low[1] == brief.a_step.high[1] == 8 * 10
    assert foretell("reward.api.mode=decision").a_step.high[1] == 0


def test_an_episode_has_the_fences_of_all_its_passages() -> None:
    write("t.jsonl", 12)
    tools = ("environment.tools=t.py", "environment.max_turns=4", "environment.max_turn_tokens=20")
    Path("t.py").write_text('def add(a: int, b: int) -> int:\n    """Add."""\n    return a + b\n')
    single, episode = foretell(), foretell(*tools)
    fences = 13 * len("<assistant-1-0123456789abcdef>\n\n</assistant-1-0123456789abcdef>\n")
    added = episode.a_step.high[0] - single.a_step.high[0]
    assert added == pytest.approx(8 * (fences + len(EPISODE) + TOOLS_CHARS) / 3, rel=0.2)
    last = foretell(*tools, "reward.api.scope=turn")
    assert last.a_step.high[0] == pytest.approx(single.a_step.high[0] - 8 * 80, abs=8)


def test_all_criteria_are_decided_in_one_request() -> None:
    Path("r.yaml").write_text(json.dumps([f"It names colour {n}." for n in range(9)]))
    criteria = ("reward.api.mode=decision", "reward.api.rubric=r.yaml")
    few, one = foretell(*criteria), foretell("reward.api.mode=decision")
    assert few.a_step.calls == one.a_step.calls == 4 * 2
    assert few.a_step.high[1] == 0 and few.a_step.low[0] > one.a_step.low[0]
    each = foretell(*criteria, "reward.api.rubric_calls=each")
    assert each.a_step.calls == 9 * few.a_step.calls


def test_pieces_are_fenced_and_scored_one_by_one() -> None:
    whole, placed = (
        foretell("data.max_response_length=1000", *more).a_step
        for more in ((), ("reward.api.place=sentence",))
    )
    # 2,000 characters of half a response are 25 pieces, 3,000 of a whole one 37.
    assert (placed.low - whole.low)[1] == 8 * 25 * 14
    assert (placed.high - whole.high)[1] == 8 * 37 * 14
    assert (placed.low - whole.low)[0] > 8 * 25 * 5  # a mark


def test_validation_rows_have_their_own_length() -> None:
    write("v.jsonl", 4, prompt="word " * 400)
    plain = whole_run(foretell())
    both = whole_run(foretell("data.val_files=v.jsonl", "trainer.val_before_train=false"))
    assert (both.low[0] - plain.low[0]) / (both.calls - plain.calls) > 500


def test_many_rows_are_sampled_the_same_each_time() -> None:
    write_rows(Path("t.jsonl"), *({"prompt": "why " * (1 + n % 50)} for n in range(1000)))
    forecast = foretell()
    assert (forecast.rows, forecast.sampled) == (1000, SAMPLE)
    a_step, again, other = (
        each.a_step.as_dict(None) for each in (forecast, foretell(), foretell("trainer.seed=7"))
    )
    assert a_step == again != other
    assert f"{SAMPLE} of 1,000 rows" in forecast.assumptions()
    assert foretell("data.train_max_samples=10").rows == 10


def test_cost_is_tokens_times_price() -> None:
    forecast = foretell("reward.api.price_input=2", "reward.api.price_output=10")
    bill = forecast.a_step
    by_hand = [(count[0] * 2 + count[1] * 10) / 1e6 for count in (bill.low, bill.high)]
    assert bill.costs(forecast.price) == pytest.approx(by_hand, rel=1e-3)
    unknown = foretell("reward.api.model=of-nobody").as_dict()["run"]
    assert unknown["cost_usd"] is None
    assert "$0.15 in, $0.6 out per M; genai-prices " in foretell().lines()[0]


def test_what_genai_prices_knows_of_a_model_is_told() -> None:
    from genai_prices import __version__

    at_openai = ["reward.api.type=openai", "reward.api.model=o3-pro"]
    (first, *others) = foretell(*at_openai).lines()
    assert f"per M; genai-prices {__version__})" in first
    assert not [line for line in others if "reads" in line]
    write("t.jsonl", 1, prompt="why not " * 100_000)
    lines = "\n".join(foretell(*at_openai).lines())
    assert "tokens, and o3-pro reads 200,000 at most, by genai-prices" in lines


def test_a_budget_is_enough_or_ends_the_run_at_a_step() -> None:
    long = ("trainer.total_training_steps=1000", "reward.api.price_input=1",
            "reward.api.price_output=1")  # fmt: skip
    bill = whole_run(foretell(*long))
    low, high = bill.low.sum() / 1e6, bill.high.sum() / 1e6
    assert foretell(*long, f"reward.api.budget_usd={high * 1.01}").stops_at() is None
    half = foretell(*long, f"reward.api.budget_usd={high / 2}").stops_at()
    assert half == (pytest.approx(500, abs=1), pytest.approx(min(1000, 500 * high / low), abs=1))
    tight = foretell(*long, f"reward.api.budget_tokens={int(bill.low.sum() / 10)}")
    assert (tight.stops_at() or (0, 0))[1] == pytest.approx(100, abs=1)
    both = foretell(*long, "reward.api.budget_usd=1000", "reward.api.budget_tokens=9000")
    assert both.stops_at() is not None, "the tightest budget counts"


def test_repeated_verdicts_and_further_votes_are_counted() -> None:
    once = whole_run(foretell("reward.api.noise_responses=0"))
    repeated = foretell("reward.api.noise_responses=3")
    assert whole_run(repeated).calls == once.calls + 2 * 3
    assert "6 of the verdicts are repeated" in "\n".join(repeated.lines())
    # Votes show the noise themselves; further ones are counted at most, and as expected.
    two = whole_run(foretell("reward.api.votes=2"))
    further = foretell("reward.api.votes=2", "reward.api.max_votes=5")
    responses = two.calls - once.calls
    assert whole_run(further).calls == two.calls + 3 * responses
    expected = (0.136 + 0.136**2 + 0.136**3) * (two.low[1] - once.low[1])
    assert whole_run(further).low[1] - two.low[1] == pytest.approx(expected)
    assert "up to 5 a response" in "\n".join(further.lines())


def test_critic_pretraining_is_paid_for_before_the_first_step() -> None:
    run = (
        "trainer.total_training_steps=10", "critic.pretrain_until=0.5", "critic.pretrain_steps=30",
        "reward.api.price_input=1", "reward.api.price_output=1", "reward.api.noise_responses=0",
    )  # fmt: skip
    bill = whole_run(foretell(*run))
    assert bill.calls == (30 + 10) * 8 + 1
    high = bill.high.sum() / 1e6
    early = foretell(*run, f"reward.api.budget_usd={bill.low.sum() / 2e6}")
    assert early.stops_at() == (0, 0)
    assert any("stop in critic pretraining, before its first" in line for line in early.lines())
    late = foretell(*run, f"reward.api.budget_usd={high * 0.876}").stops_at()
    assert late is not None and late[0] == 5  # 30 of pretraining and 5 of 40 are seven eighths


TYPED = [
    "plan", "--train_files", "t.jsonl", "--model", "o/m", "--batch_size", "4", "--mini_batch_size",
    "4", "--use_api_reward", "--rm_model", "qwen-plus", "--rm_prompt_preset", "math",
]  # fmt: skip


def test_the_plan_tells_the_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    write("t.jsonl", 8)
    assert main([*TYPED, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)["judge"]
    assert (output["model"], output["run"]["calls"]) == ("qwen-plus", 2 + 8 + 2 * 4)
    assert output["run"]["cost_usd"][0] < output["run"]["cost_usd"][1]
    # In a mixture, the first judge with canaries says what the prompts want.
    parts = "a: {kind: judge, judge: {canary_every: 0}}, b: {kind: judge}, c: {kind: judge}"
    mixture = f"reward.composite.parts={{{parts}}}"
    assert main([*TYPED, "--rm_system_prompt", "Be brief.", "--json", mixture]) == 0
    judges = json.loads(capsys.readouterr().out)["judge"]["judges"]
    calls = [judges[part]["run"]["calls"] for part in "abc"]
    assert [number - calls[0] for number in calls] == [0, 2 + 1, 2]
    assert main(["plan", "--preset", "embedded", "--json"]) == 0
    assert "judge" not in json.loads(capsys.readouterr().out), "without a judge there is none"


@pytest.mark.parametrize("kind", ["cascade.model=small", "panel.judges=[small]"])
def test_the_plan_tells_where_each_judge_is_asked(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("OPENAI_API_KEY", "SMALL_KEY", "WATCH_KEY"):
        monkeypatch.setenv(variable, "sk-0123456789abcdef")
    small = "{type: openai, model: s, base_url: 'http://small/v1', key_env: SMALL_KEY}"
    watch = {"type": "openai", "model": "w", "base_url": "http://watch/v1", "key_env": "WATCH_KEY"}
    asked = foretell(
        f"reward.api.{kind}", f"reward.api.judges={{small: {small}}}",
        *(f"reward.api.monitor.{name}={value}" for name, value in watch.items()),
    )  # fmt: skip
    places = [line for line in asked.lines() if line.startswith("asked at")]
    hosts = [("api.openai.com", "OPENAI_API_KEY"), ("small", "SMALL_KEY"), ("watch", "WATCH_KEY")]
    assert places == [
        f"asked at http{'s' * ('.' in host)}://{host}/v1, key in {key}" for host, key in hosts
    ]
    output = asked.as_dict()
    further = output["cheaper"] if "cascade" in kind else output["panel"][0]
    keys = [judge["key_variable"] for judge in (output, further, output["second_judge"])]
    assert keys == [key for _, key in hosts]


def test_comparisons_are_counted_by_pairs_lists_and_references() -> None:
    write("t.jsonl", 12)
    write("v.jsonl", 5)
    compare = ["reward.api.mode=compare", "rollout.n=4", "algorithm.adv_estimator=grpo"]
    compare += ["algorithm.use_kl_in_reward=false"]
    pairs, lists = foretell(*compare), foretell(*compare, "reward.api.compare=list")
    assert (pairs.a_step.calls, lists.a_step.calls) == (4 * 12, 4 * 2)
    assert lists.a_step.high[0] / 8 > 1.3 * pairs.a_step.high[0] / 48
    few = ["reward.api.compare_calls=18", "reward.api.votes=3"]
    assert foretell(*compare, *few).a_step.calls == 4 * 18
    truth = foretell(*compare, "reward.api.compare=ground_truth", "reward.api.votes=2")
    assert truth.a_step.calls == 4 * 4 * 2 * 2
    with_val = foretell(*compare, "data.val_files=v.jsonl", "trainer.test_freq=1")
    known_answers, wish, repeated = 2, 1, 2 * 8
    assert whole_run(with_val).calls == 3 * 48 + 4 * 5 * 2 + known_answers + wish + repeated
    with pytest.raises(RewardError, match="extra_info\\.best is missing"):
        foretell(*compare, "reward.api.compare=extra_info.best")
