"""What a judge will take is counted from the run's own rows, and told before it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ppo_cli
from ppo_cli.cli.app import main
from ppo_cli.cli.train import make_prompt_reader
from ppo_cli.config.models.known_models import JUDGES
from ppo_cli.config.resolve import resolve
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import DataError, RewardError
from ppo_cli.scoring.forecast import SAMPLE, VERDICT_TOKENS, Forecast, forecast

ENV = {"MODEL_PATH": "some/model", "CUDA_VISIBLE_DEVICES": ""}
PROMPT = "reward.api.scoring_prompt=Q: {prompt} A: {response} 1-10"


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (key for api in JUDGES.values() for key in api.keys):
        monkeypatch.delenv(name, raising=False)


def write(name: str, rows: int, prompt: str = "What is 1 + 1?") -> str:
    row = {"prompt": prompt, "ground_truth": "2", "extra_info": {"rubric": "be brief"}}
    Path(name).write_text("".join(f"{json.dumps(row)}\n" for _ in range(rows)))
    return name


def config(*overrides: str) -> Config:
    base = [
        "reward.api.enable=true", "reward.api.type=openai", "reward.api.model=gpt-4o-mini",
        "data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "rollout.n=2", PROMPT,
        "data.max_response_length=100", "data.train_files=t.jsonl",
    ]  # fmt: skip
    arguments = [*base, *overrides]
    return resolve(flags={}, preset=None, config_files=(), overrides=arguments, environ=ENV).config


def foretell(*overrides: str) -> Forecast:
    settings = config(*overrides)
    return forecast(settings, make_prompt_reader(settings))


def test_calls_are_the_plans_times_the_votes() -> None:
    write("t.jsonl", 12)
    write("v.jsonl", 5)
    settings = ["data.val_files=v.jsonl", "reward.api.votes=3", "trainer.test_freq=1"]
    forecast = foretell(*settings, "reward.api.monitor.model=m", "reward.api.monitor.share=0.25")
    assert forecast.steps == 3
    assert forecast.a_step.calls == 4 * 2 * 3
    assert forecast.run is not None
    assert forecast.run.calls == (3 * 8 + 4 * 5) * 3  # before, at each of three steps
    assert (forecast.rows, forecast.sampled) == (17, 17)
    output = "\n".join(forecast.lines())
    assert "25% of the responses are also sent to openai: 11 calls, " in output
    assert "for the second judge m are added" in output


def test_labelled_responses_are_read_at_the_start_and_every_so_often() -> None:
    write("t.jsonl", 40)
    row = {"prompt": "What is 1 + 1?", "response": "2", "label": 1}
    rows = [row | {"response": f"{n}", "label": n % 2} for n in range(9)]
    Path("l.jsonl").write_text("".join(f"{json.dumps(first)}\n" for first in rows))
    settings = ["reward.api.monitor.labels=l.jsonl", "reward.api.monitor.labels_every=4"]
    forecast, without = foretell(*settings), foretell()
    assert forecast.run is not None and without.run is not None
    assert forecast.steps == 10
    assert forecast.run.calls - without.run.calls == 9 * 3, "before the first step, and at 4 and 8"
    assert forecast.a_step == without.a_step
    assert (
        "27 of the verdicts are on labelled responses, scored again (l.jsonl)" in forecast.lines()
    )


def test_tokens_grow_with_prompts_and_responses() -> None:
    write("t.jsonl", 12)
    short, twice = foretell(), foretell("data.max_response_length=200")
    assert short.a_step.low.output == 8 * VERDICT_TOKENS[0]
    assert short.a_step.high.output == 8 * VERDICT_TOKENS[1]
    assert twice.a_step.low.input - short.a_step.low.input == pytest.approx(8 * 50, abs=8)
    assert twice.a_step.high.input - short.a_step.high.input == pytest.approx(8 * 100, abs=8)
    write("t.jsonl", 12, prompt="word " * 400)
    long = foretell()
    assert long.a_step.low.input - short.a_step.low.input == pytest.approx(8 * 500, rel=0.02)
    write("t.jsonl", 12, prompt="值" * 400)
    assert foretell().a_step.high.input > 8 * 400


def test_a_call_is_what_training_would_send() -> None:
    """The longest response is cut like any other, and no verdict is longer than it may be."""
    write("t.jsonl", 4)
    cut = foretell("data.max_response_length=4000", "reward.api.max_response_chars=400")
    assert cut.a_step.high.input / cut.a_step.calls < 1000
    brief = foretell("reward.api.max_tokens=10")
    assert brief.a_step.low.output == brief.a_step.high.output == 8 * 10
    assert foretell("reward.api.mode=decision").a_step.high.output == 0


def test_validation_rows_have_their_own_length() -> None:
    write("t.jsonl", 4)
    write("v.jsonl", 4, prompt="word " * 400)
    plain = foretell().run
    both = foretell("data.val_files=v.jsonl", "trainer.val_before_train=false").run
    assert plain is not None and both is not None
    extra = both.low.input - plain.low.input
    assert extra / (both.calls - plain.calls) > 500


def test_many_rows_are_sampled_the_same_each_time() -> None:
    rows = [json.dumps({"prompt": "why " * (1 + n % 50)}) for n in range(1000)]
    Path("t.jsonl").write_text("\n".join(rows))
    forecast = foretell()
    assert (forecast.rows, forecast.sampled) == (1000, SAMPLE)
    assert forecast.a_step == foretell().a_step != foretell("trainer.seed=7").a_step
    assert f"{SAMPLE} of 1,000 rows" in forecast.assumptions()
    assert foretell("data.train_max_samples=10").rows == 10


def test_cost_is_tokens_times_price() -> None:
    write("t.jsonl", 4)
    forecast = foretell("reward.api.price_input=2", "reward.api.price_output=10")
    low, high = forecast.a_step.costs(forecast.price) or (0.0, 0.0)
    bill = forecast.a_step
    assert low == pytest.approx((bill.low.input * 2 + bill.low.output * 10) / 1e6, rel=1e-3)
    assert high == pytest.approx((bill.high.input * 2 + bill.high.output * 10) / 1e6, rel=1e-3)
    assert "(gpt-4o-mini: $2 in, $10 out per M; the settings)" in forecast.lines()[0]
    assert "$0.15 in, $0.6 out per M; genai-prices " in foretell().lines()[0]
    forecast = foretell("reward.api.model=mine", "reward.api.base_url=http://127.0.0.1:1/v1")
    assert "$0" in "\n".join(forecast.lines()), "a judge on this machine costs nothing"


def test_what_genai_prices_knows_of_a_model_is_told() -> None:
    from genai_prices import __version__

    write("t.jsonl", 4)
    at_openai = ["reward.api.type=openai", "reward.api.model=o3-pro"]
    (first, *forecast) = foretell(*at_openai).lines()
    assert f"per M; genai-prices {__version__})" in first
    assert not [line for line in forecast if "reads" in line]
    Path("t.jsonl").write_text(json.dumps({"prompt": "why not " * 100_000}))
    output = "\n".join(foretell(*at_openai).lines())
    assert "tokens, and o3-pro reads 200,000 at most, by genai-prices" in output


def test_a_budget_is_enough_or_ends_the_run_at_a_step() -> None:
    write("t.jsonl", 4)
    long = ["trainer.total_training_steps=1000", "reward.api.price_input=1"]
    long += ["reward.api.price_output=1"]
    bill = foretell(*long).run
    assert bill is not None
    low, high = bill.low.total / 1e6, bill.high.total / 1e6
    assert foretell(*long, f"reward.api.budget_usd={high * 1.01}").stops_at() is None
    half = foretell(*long, f"reward.api.budget_usd={high / 2}")
    first, last = half.stops_at() or (0, 0)
    assert first == pytest.approx(500, abs=1)
    assert last == pytest.approx(min(1000, 500 * high / low), abs=1)
    tight = foretell(*long, f"reward.api.budget_tokens={int(bill.low.total / 10)}")
    assert (tight.stops_at() or (0, 0))[1] == pytest.approx(100, abs=1)
    output = "\n".join(tight.lines())
    assert "the run would stop at about step" in output and "of 1,000" in output
    between = foretell(*long, f"reward.api.budget_usd={(low + high) / 2}")
    assert "may not be enough" in "\n".join(between.lines())
    fine = foretell(*long, f"reward.api.budget_usd={high * 2}")
    assert "is enough" in "\n".join(fine.lines())
    both = foretell(*long, "reward.api.budget_usd=1000", "reward.api.budget_tokens=9000")
    assert both.stops_at() is not None, "the tightest budget counts"
    assert "--rm_budget_usd 1,000 and --rm_budget_tokens 9,000" in "\n".join(both.lines())


def test_without_a_price_it_says_how_to_give_one() -> None:
    write("t.jsonl", 4)
    forecast = foretell("reward.api.model=of-nobody")
    output = "\n".join(forecast.lines())
    assert "price of of-nobody is unknown" in output
    assert "--rm_price_input" in output and "--rm_prices" in output
    assert "$" not in output.replace("US $", "")
    assert forecast.as_dict()["run"]["cost_usd"] is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("data.train_files=none.jsonl", "none.jsonl"),
        ("data.train_files=openai/gsm8k", "not downloaded"),
        ("data.train_files=[]", "No prompt files"),
    ],
)
def test_without_rows_there_is_no_forecast(files: str, message: str) -> None:
    write("t.jsonl", 4)
    with pytest.raises(DataError, match=message):
        foretell(files)


def test_a_prompt_that_asks_for_what_rows_lack_is_told() -> None:
    write("t.jsonl", 4)
    assert foretell("reward.api.scoring_prompt={response} {extra_info.rubric} 1-10")
    with pytest.raises(RewardError, match="rubrik"):
        foretell("reward.api.scoring_prompt={response} {extra_info.rubrik} 1-10")


TYPED = [
    "plan", "--train_files", "t.jsonl", "--model", "m", "--batch_size", "4", "--mini_batch_size",
    "4", "--use_api_reward", "--rm_model", "qwen-plus", "--rm_prompt_preset", "math",
]  # fmt: skip


def test_the_plan_tells_the_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    write("t.jsonl", 8)
    assert main([*TYPED, "--rm_budget_usd", "20"]) == 0
    out = capsys.readouterr().out
    assert "\nJudge\n  judge: 10 calls, " in out
    assert "--rm_budget_usd 20 is enough" in out
    assert "DASHSCOPE_API_KEY" in out  # the missing key is a note here
    assert main([*TYPED, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)["judge"]
    assert output["model"] == "qwen-plus"
    assert output["run"]["calls"] == 10
    assert output["run"]["cost_usd"][0] < output["run"]["cost_usd"][1]


def test_a_forecast_imports_nothing_heavy() -> None:
    write("t.jsonl", 8)
    program = f"import sys; from ppo_cli.cli.app import main; main({TYPED!r}); "
    program += "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    root = Path(ppo_cli.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "judge: 10 calls" in done.stdout
    heavy = {"torch", "transformers", "datasets", "pyarrow", "sympy", "openai", "anthropic"}
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "ppo_cli" in loaded and loaded & (heavy | {"dashscope", "google", "aiohttp"}) == set()


def test_a_plan_that_cannot_tell_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TYPED, "--json"]) == 2
    assert "t.jsonl" in json.loads(capsys.readouterr().out)["judge"]["problem"]
    assert main(TYPED) == 2
    output = capsys.readouterr()
    assert "t.jsonl: no such file" in output.err and "no forecast" not in output.out  # told once
    assert main(["plan", "--preset", "embedded", "--json"]) == 0
    assert "judge" not in json.loads(capsys.readouterr().out), "without a judge there is none"


def test_an_address_with_secrets_is_refused_without_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write("t.jsonl", 8)
    for url in ("https://me:hush@host/v1", "https://host/v1?key=hush"):
        for form in ([], ["--json"], ["--all"]):
            assert main([*TYPED, "--rm_base_url", url, *form]) == 2
            output = capsys.readouterr()
            assert "hush" not in output.out + output.err
            assert "flag --rm_base_url" in output.err


def test_comparisons_are_counted_by_pairs_lists_and_references() -> None:
    write("t.jsonl", 12)
    write("v.jsonl", 5)
    compare = ["reward.api.mode=compare", "rollout.n=4", "algorithm.adv_estimator=grpo"]
    compare += ["algorithm.use_kl_in_reward=false"]
    pairs, lists = foretell(*compare), foretell(*compare, "reward.api.compare=list")
    assert (pairs.a_step.calls, lists.a_step.calls) == (4 * 12, 4 * 2)
    assert lists.a_step.high.input / 8 > 1.3 * pairs.a_step.high.input / 48
    few = ["reward.api.compare_calls=18", "reward.api.votes=3"]
    assert foretell(*compare, *few).a_step.calls == 4 * 18
    truth = foretell(*compare, "reward.api.compare=ground_truth", "reward.api.votes=2")
    assert truth.a_step.calls == 4 * 4 * 2 * 2
    with_val = foretell(*compare, "data.val_files=v.jsonl", "trainer.test_freq=1")
    assert (
        with_val.run is not None and with_val.run.calls == 3 * 48 + 4 * 5 * 2 + 2
    )  # two with a known answer
    with pytest.raises(RewardError, match="extra_info\\.best is missing"):
        foretell(*compare, "reward.api.compare=extra_info.best")
