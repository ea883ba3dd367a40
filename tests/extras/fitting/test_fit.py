"""A whole fit on the embedded model: what is kept, told and saved, also when it is stopped."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.reward import ModelReward
from ppo_cli.engine.device import Compute
from ppo_cli.errors import DataError, Interrupted
from ppo_cli.extras.fitting import fit as fits
from ppo_cli.extras.fitting.fit import fit
from ppo_cli.extras.fitting.training import FitSettings, Recipe
from ppo_cli.report.tracker import Screen
from ppo_cli.rewards.models.formats import format_for
from ppo_cli.rewards.models.heads import load_reward_model

WriteSums = Callable[[int], str]


class Listener(Screen):
    """Keeps what is said, and may act on it."""

    def __init__(self, act: Callable[[str], None] = lambda text: None) -> None:
        self.heard: list[str] = []
        self._act = act

    def note(self, text: str) -> None:
        self.heard.append(text)
        self._act(text)


def settings(
    data: str, out: Path, *, recipe: dict[str, Any] | None = None, **extra_args: Any
) -> Any:
    """A short fit of the embedded model."""
    quick = {"batch_size": 8, "epochs": 4, "lr": 3e-3}
    return FitSettings(
        **{
            "data": (data,), "model": "embedded", "out": out, "val_share": 0.2,
            "recipe": Recipe(**{**quick, **(recipe or {})}), **extra_args,
        }
    )  # fmt: skip


def test_a_fit_learns_and_its_folder_scores_as_the_record_says(
    write_sums: WriteSums, tmp_path: Path
) -> None:
    """7 is never the sum: easily learnt, so the held-out pairs must come out right."""
    data, held_out, out = write_sums(40), tmp_path / "held_out.jsonl", tmp_path / "rm"
    lines = Path(data).read_text().splitlines()
    held_out.write_text("\n".join(lines[:8]))
    record = fit(settings(data, out, val_data=(str(held_out),)), Screen())
    assert record == json.loads((out / "fit.json").read_text())
    assert record["finished"] and record["steps"]["done"] == record["steps"]["all"] == 16
    assert [line["step"] for line in record["history"]] == [4, 8, 12, 16]
    assert record["pairs"] == {"train": 32, "held_out": 8}
    assert record["dropped"] == {"in_val_data": 8}
    assert record["after"]["accuracy"] == 1.0 and record["after"]["loss"] < record["before"]["loss"]

    reward = ModelReward(path=str(out), device="cpu")
    loaded = load_reward_model(reward)
    assert loaded.adapter == "seqcls"
    form = format_for(loaded.tokenizer, reward, loaded.max_length)
    result = []
    for row in map(json.loads, lines[:8]):
        for name in ("chosen", "rejected"):
            sample = form.encode([{"role": "user", "content": row["prompt"]}], row[name])
            ids = torch.tensor([sample.ids])
            result.append(loaded.network.score(ids, torch.ones_like(ids)).score_B.item())
    scores = torch.tensor(result, dtype=torch.float64)
    assert scores.mean().item() == pytest.approx(record["scores"]["mean"], abs=1e-5)
    assert scores.std(correction=0).item() == pytest.approx(record["scores"]["std"], abs=1e-5)
    extra = {"model": str(out), "val_data": (str(held_out),)}
    recipe = {"max_steps": 1, "lr": 1e-9}
    resumed = fit(settings(data, tmp_path / "again", recipe=recipe, **extra), Screen())
    assert resumed["before"]["accuracy"] == 1.0
    assert resumed["before"]["mean"] == pytest.approx(record["scores"]["mean"], abs=1e-5)


def test_the_best_is_kept_not_the_last(write_sums: WriteSums, tmp_path: Path) -> None:
    """A rate that is far too high spoils later what was learnt first."""
    listener = Listener()
    recipe = {"lr": 0.05, "epochs": 6, "seed": 3}
    record = fit(settings(write_sums(24), tmp_path / "rm", recipe=recipe), listener)
    measured = [(line["accuracy"], -line["loss"]) for line in record["history"]]
    best = measured.index(max(measured))
    assert record["steps"]["kept"] == record["history"][best]["step"]
    assert record["after"]["accuracy"] == max(measured)[0]
    remaining = [text for text in listener.heard if text.endswith("; kept")]
    assert f"step {record['steps']['kept']}/" in remaining[-1]


def test_a_signal_finishes_the_step_and_keeps_a_whole_model(
    write_sums: WriteSums, tmp_path: Path
) -> None:
    def stop(text: str) -> None:
        if text.startswith("step 3/"):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as caught:
        fit(settings(write_sums(40), tmp_path / "rm", recipe={"epochs": 5}), Listener(stop))
    message = str(caught.value)
    assert "SIGTERM: stopped after 3 of 20 steps." in message and "--overwrite" in message
    record = json.loads((tmp_path / "rm" / "fit.json").read_text())
    assert not record["finished"] and record["steps"]["kept"] == record["steps"]["done"] == 3
    assert load_reward_model(ModelReward(path=str(tmp_path / "rm"), device="cpu"))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_before_the_first_step_saves_nothing(
    write_sums: WriteSums, tmp_path: Path
) -> None:
    def stop(text: str) -> None:
        if text.startswith("held out after step 0/"):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="Nothing was saved"):
        fit(settings(write_sums(10), tmp_path / "rm"), Listener(stop))
    assert not (tmp_path / "rm").exists()


def test_pairs_that_are_too_long_are_left_out_as_a_whole(
    write_sums: WriteSums, tmp_path: Path
) -> None:
    data = Path(write_sums(12))
    rows = [
        {"prompt": "Say", "chosen": "1", "rejected": "2" * 300},
        {"prompt": "x" * 300, "chosen": "1", "rejected": "2"},
    ]
    data.write_text(data.read_text() + "".join(json.dumps(row) + "\n" for row in rows))
    listener = Listener()
    recipe = {"max_steps": 1}
    record = fit(
        settings(str(data), tmp_path / "rm", recipe=recipe, max_length=64), listener
    )  # fmt: skip
    assert record["dropped"] == {"too_long": 2} and sum(record["pairs"].values()) == 12
    assert any("longer than 64 tokens" in text for text in listener.heard)
    with pytest.raises(DataError, match=r"no usable training pair\.[\s\S]*--max_length"):
        fit(settings(str(data), tmp_path / "none", max_length=8), Screen())


def test_what_the_template_refuses_names_its_row(write_sums: WriteSums, tmp_path: Path) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{% for message in messages %}{% if message['role'] == 'system' %}"
        "{{ raise_exception('no system') }}{% endif %}{{ message['content'] }}{% endfor %}"
    )
    data = Path(write_sums(12))
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    row = {"prompt": messages, "chosen": "1", "rejected": "2"}
    data.write_text(data.read_text() + json.dumps(row) + "\n")
    extra = {"template": str(template), "recipe": {"max_steps": 1}}
    with pytest.raises(DataError, match=r"sums\.jsonl line 13: .*no system[\s\S]*--skip_bad_rows"):
        fit(settings(str(data), tmp_path / "rm", **extra), Screen())
    record = fit(settings(str(data), tmp_path / "rm", skip_bad_rows=True, **extra), Screen())
    assert record["dropped"] == {"refused": 1}


def test_every_setting_reaches_the_part_that_it_is_for(
    write_sums: WriteSums, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {}

    def note(name: str, real: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def noted(*args: Any, **named: Any) -> Any:
            arguments[name] = (args, named)
            return named if real is None else real(*args, **named)

        return noted

    for name in ("split_by_prompt", "load_to_fit", "measure", "Trainer"):
        monkeypatch.setattr(fits, name, note(name, getattr(fits, name)))
    recipe = {
        "batch_size": 4, "batch_tokens": 333, "dtype": "bfloat16", "seed": 9, "freeze_body": True,
        "max_steps": 2, "lr": None, "epochs": 1,
    }  # fmt: skip
    request = settings(
        write_sums(12), tmp_path / "rm", recipe=recipe, val_share=0.3, max_length=70,
        template="chatml",
    )  # fmt: skip
    record = fit(request, Screen())
    assert arguments["split_by_prompt"][0][1:] == (0.3, 9)
    (path,), loading = arguments["load_to_fit"]
    assert path == model_folder("embedded") and loading == {
        "compute": Compute.choose("bfloat16"), "seed": 9, "frozen": True, "template": "chatml",
        "max_length": 70,
    }  # fmt: skip
    assert arguments["measure"][0][2] == 333
    assert arguments["Trainer"][0][1:] == (request.recipe, 1e-3, 2)
    assert record["steps"]["all"] == 2 and record["max_length"] == 70
    assert record["recipe"] == asdict(request.recipe) | {"lr": 1e-3}
    assert (record["model"], record["data"]) == ("embedded", list(request.data))
