"""A whole fit on the embedded model: what is kept, told and saved, also when it is stopped.

A fitted model is whole in its folder or not at all, and nothing else is overwritten.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.engine.device import Compute
from ppo_cli.errors import ConfigError, DataError, Interrupted, UserError
from ppo_cli.extras.lab.fitting import fit as fits
from ppo_cli.extras.lab.fitting.fit import ModelFolder, fit
from ppo_cli.extras.lab.fitting.training import FitSettings, Recipe
from ppo_cli.report.tracker import Screen
from ppo_cli.rewards.models.formats import format_for
from ppo_cli.rewards.models.heads import load_reward_model
from tests.scoring.scripted import Remarks
from tests.settings import complete_reward_model

WriteSums = Callable[[int], Path]


class Interrupting(Remarks):
    """Sends this process a signal at a remark that starts so."""

    def __init__(self, number: signal.Signals, beginning: str) -> None:
        super().__init__()
        self._number, self._beginning = number, beginning

    def note(self, text: str) -> None:
        super().note(text)
        if text.startswith(self._beginning):
            os.kill(os.getpid(), self._number)


def short_fit(data: Path, *, recipe: dict[str, Any] | None = None, **options: Any) -> FitSettings:
    """Settings of a short fit of the embedded model, into the folder `rm` next to the data."""
    quick = {"batch_size": 8, "epochs": 4, "lr": 3e-3}
    base = {"model": "embedded", "out": data.with_name("rm"), "val_share": 0.2}
    return FitSettings(data=(str(data),), recipe=Recipe(**quick | (recipe or {})), **base | options)


def test_a_fit_learns_and_its_folder_scores_as_the_record_says(write_sums: WriteSums) -> None:
    """7 is never the sum: easily learnt, so the held-out pairs must come out right."""
    data = write_sums(40)
    held_out, out = data.with_name("held_out.jsonl"), data.with_name("rm")
    lines = data.read_text().splitlines()
    held_out.write_text("\n".join(lines[:8]))
    record = fit(short_fit(data, val_data=(str(held_out),)), Screen())
    assert record == json.loads((out / "fit.json").read_text())
    assert record["finished"] and record["steps"]["done"] == record["steps"]["all"] == 16
    assert [line["step"] for line in record["history"]] == [4, 8, 12, 16]
    assert record["pairs"] == {"train": 32, "held_out": 8}
    assert record["dropped"] == {"in_val_data": 8}
    assert record["after"]["accuracy"] == 1.0 and record["after"]["loss"] < record["before"]["loss"]

    reward = complete_reward_model(path=str(out), device="cpu")
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
    again = {"model": str(out), "val_data": (str(held_out),), "out": data.with_name("again")}
    resumed = fit(short_fit(data, recipe={"max_steps": 1, "lr": 1e-9}, **again), Screen())
    assert resumed["before"]["accuracy"] == 1.0
    assert resumed["before"]["mean"] == pytest.approx(record["scores"]["mean"], abs=1e-5)


@pytest.mark.slow
def test_the_best_is_kept_not_the_last(write_sums: WriteSums) -> None:
    """A rate that is far too high spoils later what was learnt first."""
    screen, recipe = Remarks(), {"lr": 0.05, "epochs": 6, "seed": 3}
    record = fit(short_fit(write_sums(24), recipe=recipe), screen)
    measured = [(line["accuracy"], -line["loss"]) for line in record["history"]]
    best = measured.index(max(measured))
    assert record["steps"]["kept"] == record["history"][best]["step"]
    assert record["after"]["accuracy"] == max(measured)[0]
    remaining = [text for text in screen.notes if text.endswith("; kept")]
    assert f"step {record['steps']['kept']}/" in remaining[-1]


def test_a_signal_finishes_the_step_and_keeps_a_whole_model(write_sums: WriteSums) -> None:
    settings = short_fit(write_sums(40), recipe={"epochs": 5})
    with pytest.raises(Interrupted) as caught:
        fit(settings, Interrupting(signal.SIGTERM, "step 3/"))
    message = str(caught.value)
    assert "SIGTERM: stopped after 3 of 20 steps." in message and "--overwrite" in message
    record = json.loads((settings.out / "fit.json").read_text())
    assert not record["finished"] and record["steps"]["kept"] == record["steps"]["done"] == 3
    assert load_reward_model(complete_reward_model(path=str(settings.out), device="cpu"))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_before_the_first_step_saves_nothing(write_sums: WriteSums) -> None:
    settings = short_fit(write_sums(10))
    with pytest.raises(Interrupted, match="Nothing was saved"):
        fit(settings, Interrupting(signal.SIGINT, "held out after step 0/"))
    assert not settings.out.exists()


def append_rows(data: Path, *rows: dict[str, Any]) -> None:
    with data.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_pairs_that_are_too_long_are_left_out_as_a_whole(write_sums: WriteSums) -> None:
    data, screen = write_sums(12), Remarks()
    append_rows(data, {"prompt": "Say", "chosen": "1", "rejected": "2" * 300},
                {"prompt": "x" * 300, "chosen": "1", "rejected": "2"})  # fmt: skip
    record = fit(short_fit(data, recipe={"max_steps": 1}, max_length=64), screen)
    assert record["dropped"] == {"too_long": 2} and sum(record["pairs"].values()) == 12
    assert any("longer than 64 tokens" in text for text in screen.notes)


def test_what_the_template_refuses_names_its_row(write_sums: WriteSums) -> None:
    data = write_sums(12)
    template = data.with_name("strict.jinja")
    template.write_text(
        "{% for message in messages %}{% if message['role'] == 'system' %}"
        "{{ raise_exception('no system') }}{% endif %}{{ message['content'] }}{% endfor %}"
    )
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    append_rows(data, {"prompt": messages, "chosen": "1", "rejected": "2"})
    strict = partial(short_fit, data, template=str(template), recipe={"max_steps": 1})
    with pytest.raises(DataError, match=r"sums\.jsonl line 13: .*no system[\s\S]*--skip_bad_rows"):
        fit(strict(), Screen())
    assert fit(strict(skip_bad_rows=True), Screen())["dropped"] == {"refused": 1}


def test_settings_reach_their_part(write_sums: WriteSums, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {}

    def note(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **named: Any) -> Any:
            arguments[name] = (args, named)
            return real(*args, **named)

        return noted

    for name in ("split_by_prompt", "load_to_fit", "score_examples", "Trainer"):
        monkeypatch.setattr(fits, name, note(name, getattr(fits, name)))
    recipe = {
        "batch_size": 4, "batch_tokens": 333, "dtype": "bfloat16", "seed": 9, "freeze_body": True,
        "max_steps": 2, "lr": None, "epochs": 1,
    }  # fmt: skip
    request = short_fit(
        write_sums(12), recipe=recipe, val_share=0.3, max_length=70, template="chatml"
    )
    record = fit(request, Screen())
    assert arguments["split_by_prompt"][0][1:] == (0.3, 9)
    (path,), loading = arguments["load_to_fit"]
    assert path == model_folder("embedded") and loading == {
        "compute": Compute.choose("bfloat16"), "seed": 9, "frozen": True, "template": "chatml",
        "max_length": 70, "objective": None,
    }  # fmt: skip
    assert arguments["score_examples"][0][2] == 333
    assert arguments["Trainer"][0][1:] == (request.recipe, 1e-3, 2)
    assert record["steps"]["all"] == 2 and record["max_length"] == 70
    assert record["recipe"] == asdict(request.recipe) | {"lr": 1e-3}
    assert (record["model"], record["data"]) == ("embedded", list(request.data))


def write(folder: ModelFolder, text: str, record: dict[str, Any] | None = None) -> None:
    folder.write(lambda path: (path / "config.json").write_text(text), record or {"finished": 0})


def test_a_folder_is_made_and_replaced_by_a_better_model(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "rm"
    place.mkdir(parents=True)
    folder = ModelFolder(place)
    write(folder, "first")
    write(folder, "second", {"finished": False})
    folder.finish({"finished": True})
    assert (place / "config.json").read_text() == "second"
    assert json.loads((place / "fit.json").read_text()) == {"finished": True}
    assert [path.name for path in place.parent.iterdir()] == ["rm"]
    with pytest.raises(ConfigError, match="--overwrite"):
        ModelFolder(place)
    folder = ModelFolder(place, overwrite=True)
    assert (place / "config.json").read_text() == "second"
    write(folder, "third")
    assert (place / "config.json").read_text() == "third"


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    def fail_to_write(path: Path) -> None:
        (path / "config.json").write_text("half")
        raise OSError(28, "no space left")

    folder = ModelFolder(tmp_path / "rm")
    write(folder, "first")
    with pytest.raises(UserError, match=r"could not be written.*no space.*--out"):
        folder.write(fail_to_write, {})
    assert (tmp_path / "rm" / "config.json").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["rm"]
