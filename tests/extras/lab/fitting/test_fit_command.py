"""`ppo reward fit`, as it is typed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ppo_cli.cli.app import main
from ppo_cli.extras.lab.commands.fit import warn_if_like_guessing
from ppo_cli.extras.lab.fitting.training import FitSettings, Recipe


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["reward", "fit", *args])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    file = tmp_path / "pairs.jsonl"
    rows = ({"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(10, 40))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_a_fit_from_the_command_line(
    pairs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir = str(tmp_path / "rm")
    args = ["--data", pairs, "--model", "embedded", "--out", out_dir, "--lr", "0.003"]
    code, out, err = run(capsys, *args, "--epochs", "3", "--batch-size", "8")
    assert code == 0
    assert "27 pairs to train on, 3 held out; 12 steps of 8, 430,592 weights, lr 0.003." in err
    assert "step 12/12  loss " in err and "held out after step 0/12" in err
    assert out.startswith(f"Reward model in {out_dir} (step ")
    for fragment in ("before    after", "accuracy", f"ppo train --reward_model {out_dir}",
                  "scaling: affine, mean: "):  # fmt: skip
        assert fragment in out
    recipe = {
        "epochs": 2, "max_steps": 1, "lr": 0.002, "warmup": 0.3, "batch_size": 6,
        "batch_tokens": 4096, "center": 0.5, "freeze_body": True, "dtype": "float32", "seed": 7,
    }  # fmt: skip
    fragment = [
        w for k, v in recipe.items() for w in ([f"--{k}"] if v is True else [f"--{k}", str(v)])
    ]
    code, out, err = run(capsys, *args, "--json", "--overwrite", *fragment)
    assert code == 0, err
    assert json.loads(out)["steps"]["all"] == 1
    assert json.loads(out)["recipe"].items() >= recipe.items()


def test_what_is_typed_reaches_the_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ppo_cli.errors import UserError
    from ppo_cli.extras.lab.fitting import fit as fitting

    seen: list[FitSettings] = []

    def fit(settings: FitSettings, screen: object) -> None:
        seen.append(settings)
        raise UserError("enough")

    monkeypatch.setattr(fitting, "fit", fit)
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "v.jsonl", "w.jsonl"):
        Path(name).touch()
    both = ("--data", "a.jsonl", "--data", "b.jsonl", "--model", "embedded", "--out", "o")
    fit_args = ("--max_length", "99", "--template", "chatml", "--skip_bad_rows", "--overwrite")
    assert run(capsys, *both)[0] == 2
    run(capsys, *both, *fit_args, "--val_data", "v.jsonl", "--val_data", "w.jsonl")
    run(capsys, *both, "--val_share", "0.3")
    usual, first, second = seen
    assert usual == FitSettings(("a.jsonl", "b.jsonl"), "embedded", Path("o"), Recipe())
    assert first == replace(
        usual, val_data=("v.jsonl", "w.jsonl"), max_length=99, template="chatml",
        skip_bad_rows=True, overwrite=True,
    )  # fmt: skip
    assert second == replace(usual, val_share=0.3)


@pytest.mark.parametrize(
    ("accuracy", "held_out", "doubt"),
    [(0.5, 1000, True), (0.6, 90, True), (0.6, 110, False), (0.9, 5, True), (1.0, 30, False)],
)
def test_an_accuracy_like_that_of_guessing_is_doubted(
    accuracy: float, held_out: int, doubt: bool
) -> None:
    assert (warn_if_like_guessing(accuracy, held_out) is not None) == doubt
