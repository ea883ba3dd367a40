"""Functions that were written for other trainers are called as those call them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.errors import RewardError
from ppo_cli.extras.migrate.forms import FORMS
from ppo_cli.processes.user_code import import_file
from ppo_cli.records import Rollout, Score
from ppo_cli.rewards.base import BatchScore, read_returned
from ppo_cli.rewards.forms import Responses, describe_response
from ppo_cli.rewards.function import FunctionReward, load_function
from ppo_cli.rewards.pool import RUN_ENDED
from ppo_cli.rewards.worker import wait_for
from tests.rewards.foreign_callers import CALLERS, LENGTH
from tests.rewards.scoring import make_rollout
from tests.rewards.tables import read_blocks

PATIENCE = 60.0
STEP = 7
FUNCTIONS = read_blocks("reward_forms")
EXPECTED = [line.split() for line in FUNCTIONS["expected"].splitlines()]
# Two responses: the second one was cut off, and its row has messages.
TASK = ({"role": "user", "content": "1+1"},)


def list_rollouts() -> list[Rollout]:
    rows: tuple[dict[str, Any], ...] = (
        {"prompt": "1+1", "solution": "2", "level": 3, "info": '{"unit": "cm"}'},
        {"prompt": list(TASK), "solution": "3", "level": 4, "info": {"unit": "km"}},
    )
    rollouts = []
    for number, (row, token_ids) in enumerate(zip(rows, ((50, 0), (50,)), strict=True)):
        rollout = make_rollout(
            "2", row["solution"], finish_reason=("stop", "length")[number], level=row["level"]
        )
        prompt = replace(
            rollout.prompt, uid=f"rows:{number}", messages=TASK, rendered="<1+1>",
            token_ids=tuple(map(ord, "<1+1>")),
            columns=row | {"metadata": {"unit": "m" * (number + 1)}},
        )  # fmt: skip
        rollouts.append(replace(rollout, prompt=prompt, token_ids=token_ids))
    return rollouts


def call(file: Path, name: str, **kwargs: Any) -> list[Score]:
    """Return the scores of both responses from the function as a worker loads it."""
    function, rollouts = load_function(str(file), name, kwargs), list_rollouts()
    form = next((form for form in FORMS if form.name == getattr(function, "form", "")), None)
    scores: list[Score] = []
    for part in [rollouts] if form and form.unit == "round" else [rollouts[:1], rollouts[1:]]:
        responses = tuple(map(describe_response, part))
        if form is not None:
            arguments = vars(Responses(responses, STEP, LENGTH, form.name))
        else:
            (row,) = responses
            fields = ("data_source", "ground_truth", "extra_info")
            arguments = {name: getattr(row, name) for name in fields} | {"solution_str": row.text}
        score = read_returned(wait_for(function(**arguments)))
        scores += score.scores if isinstance(score, BatchScore) else [score]
    return scores


def format_values(values: Iterable[float | None]) -> str:
    return ",".join("-" if value is None else f"{value:g}" for value in values)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("forms") / "forms.py"
    path.write_text(FUNCTIONS["functions"])
    return path


@pytest.mark.parametrize(("name", "form", "values"), EXPECTED)
def test_a_function_for_another_trainer_gets_what_that_hands_over(
    file: Path, name: str, form: str, values: str
) -> None:
    if "raises" in name:
        with pytest.raises(ZeroDivisionError):
            call(file, name)
    else:
        assert format_values(score.value for score in call(file, name)) == values
    assert getattr(load_function(str(file), name, {}), "form", "verl") == form.replace("_", " ")


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the trainers' own
@pytest.mark.parametrize("form", CALLERS)
def test_the_trainer_itself_calls_the_functions_so(file: Path, form: str) -> None:
    module = import_file(str(file))
    rows = [row for row in EXPECTED if row[1].replace("_", " ") == form]
    assert rows == [
        [name, marker, format_values(CALLERS[form](getattr(module, name), list_rollouts(), STEP))]
        for name, marker, _ in rows
    ]


def test_what_a_function_logs_is_recorded_and_settings_are_arguments(file: Path) -> None:
    logged = [{"note": "2", "mean": 1.0}, {"note": "3", "mean": 1.0}]
    assert [score.info for score in call(file, "trl_logs")] == logged
    assert [score.value for score in call(file, "verl_batch", bonus=2)] == [3.0, 2.0]


def test_two_forms_at_once_are_asked_about_unless_all_is_ours(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not hasattr(load_function(str(file), "verl", {}), "form")
    assert getattr(load_function(str(file), "mixed", {"queries": 1}), "form", "") == "TRL"
    with pytest.raises(RewardError, match="of TRL and of OpenRLHF: which one"):
        FunctionReward(f"{file}:mixed")
    # As in an environment that was installed before there were forms.
    monkeypatch.setattr("ppo_cli.plugins.read_metadata", dict)
    with pytest.raises(RewardError, match="install ppo-cli again"):
        FunctionReward(f"{file}:trl")


def test_a_batch_without_usable_scores_fails_as_a_whole(file: Path) -> None:
    for name, message in (("short", "it returned 1 scores for 2"), ("broken", "broken")):
        with pytest.raises(ValueError, match=message):
            call(file, name)


def test_a_round_is_one_call_of_a_module_and_a_missing_column_is_refused(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    monkeypatch.chdir(file.parent)
    with pytest.raises(RewardError, match=r"there is no module no\.such"):
        FunctionReward("no.such:f")
    lines = list[str]()
    # With a column `states` the function is TRL's, else one of verifiers' groups.
    prompts = [rollout.prompt for rollout in list_rollouts()]
    columns = [{**prompt.columns, "states": prompt.columns["solution"]} for prompt in prompts]
    prompts = [replace(p, columns=c) for p, c in zip(prompts, columns, strict=True)]
    rollouts = [replace(r, prompt=p) for r, p in zip(list_rollouts(), prompts, strict=True)]
    with closing(FunctionReward("forms:rubric_or_trl")) as reward:
        reward.start(prompts, tell=lines.append)
        reward.begin_step(STEP)
        futures = [reward.submit(rollout) for rollout in reversed(rollouts)]
        reward.end_round()
        first, second = (future.result(PATIENCE) for future in reversed(futures))
        assert (first.value, second.value) == (613, 602)
        assert first.info["output"] == "scoring ['2', '3']\n" and "output" not in second.info
        unscored = reward.submit(rollouts[0])
    assert unscored.result(PATIENCE).failure == RUN_ENDED
    assert [line.partition(":")[0] for line in lines] == ["forms"]
    missing = pytest.raises(RewardError, match="needs colour, and the rows have no such column")
    with closing(FunctionReward(f"{file}:lacks")) as reward, missing:
        reward.start(prompts)


def test_the_documents_have_a_row_for_each_form() -> None:
    page = Path(__file__).parents[2].joinpath("docs/rewards.md").read_text()
    assert [
        form.name for form in FORMS if f"| {form.name} | `{form.signature}` |" not in page
    ] == []
    names = {form.replace("_", " ") for _, form, _ in EXPECTED}
    assert names == {"verl", *(form.name for form in FORMS)}


def test_an_info_that_is_no_json_is_no_info() -> None:
    (form,) = (form for form in FORMS if form.name == "verifiers")
    for text in ("from chapter 3", "", "3"):
        response = replace(describe_response(list_rollouts()[0]), columns={"info": text})
        arguments = form.arguments(Responses((response,), STEP, LENGTH, form.name))
        assert arguments["info"] == response.extra_info
