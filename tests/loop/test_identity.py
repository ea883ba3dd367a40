"""Which settings and contents make another run: every setting once, five of them in whole runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml

from ppo_cli.config import settle as config_settle
from ppo_cli.config.layers import AS_BEGUN
from ppo_cli.config.schema.keys import Key, nest_values, table, value_of, with_settings
from ppo_cli.config.schema.run import Config
from ppo_cli.planning.memory.plan import fit_memory
from ppo_cli.planning.resolved import Resolved
from ppo_cli.planning.run_plan import make_plan
from ppo_cli.run.identity import (
    describe_changes,
    find_differences,
    keep_decisions,
    run_identity,
    setting_values,
)
from ppo_cli.run_folder.checkpoints import FORMAT
from ppo_cli.run_folder.contents import ROWS
from tests.config.settling import settle
from tests.loop.runs import metrics, train
from tests.loop.scripted import prompts
from tests.settings import CPU, complete, config_yaml

# Values that differ from the default, where the type alone does not give one.
OTHER_VALUES: dict[str, Any] = {
    "reward.api.cascade.band": "0.1-0.9",
    "actor.optim.betas": (0.8, 0.9),
    "critic.optim.betas": (0.8, 0.9),
    "reward.api.base_url": "http://localhost:1/v1",
    "reward.api.monitor.base_url": "http://localhost:1/v1",
    "reward.api.compare": "list",
    "reward.api.place": "line",
    "reward.api.scale": "0-3",
    "reward.composite.parts": {"rule": {"weight": 2}},
    "reward.composite.weights": {"rule": 2},
    "reward.model.device": "cuda",
    "reward.model.template": "{prompt} {response}",
    "trainer.store": "file:///srv/run",
    "reward.parts": ("rule:1",),
    "trainer.profile_steps": ("2",),
    "trainer.placement": "train:0,rollout:1",
}
DECIDED = complete({})


def other_value(key: Key) -> Any:
    """A valid value of a setting that is not its default."""
    if key.name in OTHER_VALUES:
        return OTHER_VALUES[key.name]
    item = get_args(key.kind)[0] if key.is_list else key.kind
    default = value_of(DECIDED, key.name)
    if key.choices:
        used = default if isinstance(default, tuple) else (default,)
        value: Any = next(c for c in key.choices if c not in used)
    elif item is bool:
        value = not default
    elif item is int:
        value = (key.default or 0) + 100 if not dict(key.limits).get("le") else 7
    elif item is float:
        value = key.default / 2 + 0.001 if key.default else 0.5
    elif get_origin(item) is dict:
        value = {"a": 1}
    else:
        value = "another"
    return (value,) if key.is_list else value


def identity(values: dict[str, Any] | None = None) -> dict[str, Any]:
    return run_identity(complete(nest_values(values or {})), prompts(2), prompts(1))


@pytest.fixture(scope="module")
def default() -> dict[str, Any]:
    return identity()


@pytest.mark.parametrize("name", table())
def test_every_setting_decides_as_it_declares(name: str, default: dict[str, Any]) -> None:
    key = table()[name]
    changes = Config.model_validate(nest_values({name: other_value(key)}))
    fitted = fit_memory(config_settle.settle(changes, CPU))
    assert value_of(fitted.config, name) != value_of(DECIDED, name)
    # Rows count in the place of the files that they come from, and decisions by what they follow.
    by_name = key.identity in ("run", "checkpoint") and name not in ROWS
    values = run_identity(fitted.config, prompts(2), prompts(1))
    changed = describe_changes(default, {k: v for k, v in values.items() if k not in fitted.why})
    assert (f"{name} (was " in changed or f"{name}." in changed) is by_name
    assert bool(changed) is by_name


def test_an_eval_is_bound_to_its_environment(tmp_path: Path) -> None:
    assert not any("environment" in name for name in setting_values(complete({}), of_eval=True))
    file = tmp_path / "game.py"
    config = complete({"environment": {"path": f"{file}:Game"}})
    file.write_text("class Game: pass")
    before = setting_values(config, of_eval=True)
    file.write_text("class Game: level = 2")
    assert "game.py" in describe_changes(before, setting_values(config, of_eval=True))
    other = with_settings(config, {"environment.max_turns": 3})
    assert "environment.max_turns" in describe_changes(before, setting_values(other, of_eval=True))


def test_rows_count_by_what_they_hold() -> None:
    config, first = complete({}), prompts(2)
    same = run_identity(config, first, first)
    other = [replace(first[0], extra_info={"rubric": "Be brief."}), first[1]]
    assert describe_changes(same, run_identity(config, prompts(1), first)) == (
        "data.train_files (other rows), data.train_files (other extra_info)"
    )
    assert describe_changes(same, run_identity(config, other, first)) == (
        "data.train_files (other extra_info)"
    )
    assert (
        describe_changes(same, run_identity(config, first, other)) == "data.val_files (other rows)"
    )
    easy, hard = ([replace(first[0], columns={"level": n}), first[1]] for n in (1, 2))
    assert describe_changes(run_identity(config, easy, easy), run_identity(config, hard, hard)) == (
        "data.train_files (other columns), data.val_files (other rows)"
    )


def test_files_and_models_count_by_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rm").mkdir()
    (tmp_path / "actor").mkdir()
    contents = {
        name: tmp_path / name
        for name in (
            "rubric.yaml", "judge.yaml", "score.py", "table.csv", "part.yaml", "rm/config.json",
            "rm/chat_template.jinja", "actor/config.json", "rules.py",
        )
    }  # fmt: skip
    for file in contents.values():
        file.write_text("first")
    values = {
        "reward.api.rubric": "rubric.yaml",
        "reward.api.prompt_file": "judge.yaml",
        "reward.function": "score.py:score",
        "reward.function_kwargs": {"tables": ["table.csv"]},
        "reward.composite.parts": {
            "judge": {"judge": {"rubric": "part.yaml"}},
            "module": {"kind": "rule", "function": "rules:score"},
        },
        "reward.model.path": "rm",
        "model.path": "actor",
    }
    for name, file in contents.items():
        before = identity(values)
        assert describe_changes(before, identity(values)) == ""
        file.write_text("other")
        path = name.partition("/")[0]
        # A module is named by its whole path.
        changes = describe_changes(before, identity(values))
        assert changes.removeprefix(f"{Path.cwd()}/") == f"{path} (other content)"
    before = identity(values)
    (tmp_path / "rm" / "README.md").write_text("A card.")
    assert describe_changes(before, identity(values)) == ""


def test_a_large_file_counts_from_its_first_to_its_last_byte(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    values = {"reward.model.path": str(tmp_path)}
    size = 6_000_000
    seen = []
    for at in (None, 0, size - 1):
        data = bytearray(size)
        if at is not None:
            data[at] = 1
        weights.write_bytes(data)
        seen.append(json.dumps(identity(values)))
    assert len(set(seen)) == 3


def test_a_part_of_a_mixture_may_change_its_limits() -> None:
    def parts(**judge: Any) -> dict[str, Any]:
        settings = {"weight": 0.5, "judge": {"model": "m", **judge}}
        return identity({"reward.composite.parts": {"judge": settings}})

    first = parts()
    url = "http://localhost:2/v1"
    free = ({"timeout": 9}, {"monitor": {"share": 0.5}}, {"budget_usd": 1.0}, {"base_url": url})
    for same in free:
        assert describe_changes(first, parts(**same)) == "", same
    where = "reward.composite.parts.judge.judge"
    assert describe_changes(first, parts(model="n")) == f"{where}.model (was m, now n)"
    assert describe_changes(first, parts(votes=3)).startswith(f"{where}.votes (was unset, now 3)")


def test_a_judge_at_another_address_is_the_same_run_and_another_eval() -> None:
    api = [{"base_url": f"http://localhost:{port}/v1"} for port in (1, 2)]
    first, second = (complete({"reward": {"api": first}}) for first in api)
    assert describe_changes(setting_values(first), setting_values(second)) == ""
    changed = describe_changes(
        setting_values(first, of_eval=True), setting_values(second, of_eval=True)
    )
    assert changed.startswith("reward.api.base_url (was http://localhost:1/v1, now ")


def test_no_secret_is_kept() -> None:
    values = {
        "reward.function_kwargs": {"api_key": "first-one", "url": "http://u:second-one@host/"}
    }
    remaining = json.dumps(identity(values))
    assert "first-one" not in remaining and "second-one" not in remaining


def test_a_checkpoint_of_an_older_version_goes_on_with_what_its_config_says(
    tmp_path: Path,
) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_000001"
    (checkpoint / "state").mkdir(parents=True)
    old = {key: identity()[key] for key in ("model.path", "trainer.seed", "data.train_files")}
    state = {"format": FORMAT, "run": {"step": 1}, "order": {}, "reward": {}, "fingerprint": old}
    (checkpoint / "state" / "run.json").write_text(json.dumps(state))
    other = identity({"actor.grad_clip": 0.5})
    assert find_differences(checkpoint, other) == ""  # nothing says what it was
    config = complete({"data": {"train_files": ["t"], "val_files": ["v"]}})
    text = config_yaml(Resolved(config, config, {}, CPU, dict.fromkeys(table(), "default")))
    without = yaml.safe_load(text)
    del without["actor"]["policy_loss"]  # a group that is newer than the file
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(without))
    assert find_differences(checkpoint, identity()) == ""
    assert find_differences(checkpoint, other) == "actor.grad_clip (was 1.0, now 0.5)"
    assert find_differences(checkpoint, other, bound=True) == ""


TINY = (
    "--preset", "embedded", "--batch_size", "4", "--mini_batch_size", "4", "--max_steps", "1",
    "--max_response_length", "4", "data.train_max_samples=4", "data.val_max_samples=2",
    "--reward", "rule:exact:1", "--reward", "rule:length:0.5",
)  # fmt: skip
CHANGED = {
    "actor.clip_ratio_high=0.3": "had another actor.clip_ratio_high (was 0.2, now 0.3). ",
    "reward.composite.weights.length=0.5": "reward.composite.weights.length (was unset, now 0.5)",
}


@pytest.mark.slow
def test_a_changed_setting_starts_another_run_and_says_why(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(out, *TINY)
    args = list(TINY)
    for number, (override, reason) in enumerate(CHANGED.items(), 1):
        args.append(override)
        output = " ".join(train(out, *args).stdout.split())
        checkpoint = out / f"earlier_{number}" / "checkpoints" / "step_000001"
        assert "A new run: the one before had" in output and reason in output
        assert output.replace(" ", "").count(f"--resume{checkpoint}") == 1
        assert checkpoint.is_dir()
        assert len(metrics(out)) == len(metrics(out / f"earlier_{number}"))
    # More steps, another cadence: the same run goes on.
    train(out, *args, "--max_steps", "2", "--save_freq", "1", "--logger", "tensorboard")
    assert not (out / f"earlier_{len(CHANGED) + 1}").exists()
    assert metrics(out)[-1]["step"] == 2
    # The advice of the note: go on from the earlier checkpoint with the new settings.
    train(out, *args, "--max_steps", "2", "--resume", str(checkpoint))
    assert [line["step"] for line in metrics(out)][-1] == 2


def decided(folder: Path, **values: Any) -> Path:
    """A run that has decided these values by itself."""
    facts = {key: {"value": v, "origin": "default", "why": "here"} for key, v in values.items()}
    (folder / "plan.json").write_text(json.dumps({"values": facts}))
    return folder


def test_a_resume_keeps_what_another_machine_has_decided(tmp_path: Path) -> None:
    then = {"model.dtype": "bfloat16", "model.packing": False, "rollout.seed": 7}
    run = decided(tmp_path, **then)
    kept, free, notes = keep_decisions(make_plan(settle("model.path=embedded")), run)
    assert {key: value_of(kept.settings, key) for key in then} == then and not free
    assert [note.split()[0] for note in notes] == list(then)
    assert all("as this run began; a new run would have" in note for note in notes)
    # What somebody sets now wins, and is another run if it differs.
    named = make_plan(settle("model.path=embedded", "model.dtype=float32"))
    assert keep_decisions(named, run)[0].settings.model.dtype == "float32"


def test_a_decision_that_cannot_be_kept_here_makes_no_other_run(tmp_path: Path) -> None:
    run = decided(tmp_path, **{"algorithm.rollout_correction.bypass_mode": True})
    with_full_kl = make_plan(settle("model.path=embedded", "algorithm.kl_penalty=full"))
    kept, free, (note,) = keep_decisions(with_full_kl, run)
    assert not kept.settings.algorithm.rollout_correction.bypass_mode
    assert free == {"algorithm.rollout_correction.bypass_mode"} and "full KL" in note
    # The others are kept all the same.
    decided(tmp_path, **{"algorithm.rollout_correction.bypass_mode": True, "rollout.seed": 7})
    kept, free, notes = keep_decisions(with_full_kl, run)
    assert kept.settings.rollout.seed == 7 and len(free) == 1 and len(notes) == 2


def test_a_resume_keeps_the_defaults_of_an_older_version(tmp_path: Path) -> None:
    """It wrote them into config.yaml; what a person set there is no decision of the run."""
    run = decided(tmp_path)
    (tmp_path / "config.yaml").write_text(
        "actor:\n  use_kl_loss: false  # default\n  kl_loss_coef: 0.1  # flag\n"
        "  loss_agg_mode: token-sum  # default\n"
    )
    grpo = ("model.path=embedded", "algorithm.adv_estimator=grpo", "rollout.n=2")
    kept, free, notes = keep_decisions(make_plan(settle(*grpo)), run)
    actor = kept.settings.actor
    assert (actor.use_kl_loss, actor.kl_loss_coef) == (False, 0.001)
    assert actor.loss_agg_mode == "token-sum" and not free and len(notes) == 2


def test_a_decision_is_kept_at_every_resume(tmp_path: Path) -> None:
    run = decided(tmp_path)
    fact = {"value": "bfloat16", "origin": AS_BEGUN}
    (tmp_path / "plan.json").write_text(json.dumps({"values": {"model.dtype": fact}}))
    kept, _, _ = keep_decisions(make_plan(settle("model.path=embedded")), run)
    assert kept.settings.model.dtype == "bfloat16"
