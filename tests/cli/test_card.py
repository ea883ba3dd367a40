"""The model card that `ppo export` writes for a run, and `--push` against a hub on loopback."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from ppo_cli.cli.app import main
from ppo_cli.config.models.bundled import bundled_path, prompt_files
from ppo_cli.report.judge_card import format_dollars
from ppo_cli.report.page.run_data import RunData
from ppo_cli.run.export import _describe_base
from ppo_cli.run_folder.lines import read_lines, read_metrics, rollout_file
from tests.hub_server import HubServer, Repository
from tests.judge_server import JudgeServer

ROOT = Path(__file__).parents[2]
KEY = "key-of-the-loopback-judge"
TOKEN = "hf_token-for-these-tests-only"
OWN_CARD = "---\nlicense: apache-2.0\nbase_model: someone/original\n---\n# A base\n"
SETTINGS = """\
model: {path: BASE, dtype: float32}
data: {train_files: [FOLDER/train.jsonl], val_files: [FOLDER/val.jsonl], train_batch_size: 4,
  max_response_length: 16}
actor: {ppo_mini_batch_size: 4}
rollout: {n: 2}
trainer: {total_training_steps: 2, test_freq: 1, save_freq: 1}
"""
JUDGED = (
    "--use_api_reward", "--rm_api_type", "openai", "--rm_model", "a-judge", "--rm_price_input", "1",
    "--rm_price_output", "4", "--rm_canary_every", "0", "--reward", "judge:0.75",
    "--reward", "rule:exact:0.25",
)  # fmt: skip
# Its own PUT of a large file passes what httpx calls outdated.
OF_THE_PACKAGE = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, judged for money; base, data and judge's prompt lie on this machine."""
    folder = tmp_path_factory.mktemp("of-this-machine")
    base = folder / "a-base"
    shutil.copytree(bundled_path("embedded", "model"), base)
    (base / "README.md").write_text(OWN_CARD)
    rows = Path(prompt_files(["embedded"], "val")[0]).read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(rows[:8]))
    (folder / "val.jsonl").write_text("".join(rows[8:12]))
    shutil.copy(ROOT / "reward_prompts" / "math.yaml", folder / "my_judge.yaml")
    text = SETTINGS.replace("BASE", str(base)).replace("FOLDER", str(folder))
    (folder / "c.yaml").write_text(text)
    with JudgeServer() as judge:
        args = [
            "train", "--config", str(folder / "c.yaml"), "--output_dir", str(folder / "run"),
            "--rm_base_url", judge.url("openai"), "--rm_prompt_file", str(folder / "my_judge.yaml"),
            *JUDGED,
        ]  # fmt: skip
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("OPENAI_API_KEY", KEY)
            assert main(args) == 0
    return folder / "run"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with HubServer(TOKEN) as server:
        # What HF_ENDPOINT and the others set is read as the package is imported.
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield server


ReadOutput = Callable[..., tuple[int, str]]


@pytest.fixture
def read_output(capfd: pytest.CaptureFixture[str]) -> ReadOutput:
    """Run `ppo export`; returns its exit code and all that it said, which is no secret."""

    def export(*args: object) -> tuple[int, str]:
        capfd.readouterr()
        code = main(["export", *map(str, args)])
        text = "".join(capfd.readouterr())
        assert TOKEN not in text and "Traceback" not in text
        return code, text

    return export


def card_of(folder: Path) -> tuple[dict[str, object], str]:
    _, front, body = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_card_says_what_was_trained_on_what_and_to_what_end(
    run: Path, tmp_path: Path, read_output: ReadOutput
) -> None:
    code, text = read_output(run / "checkpoints/step_000002", "--out", tmp_path / "my-model")
    assert code == 0 and "card        README.md" in text
    front, body = card_of(tmp_path / "my-model")
    assert front == {
        "base_model": "someone/original", "license": "apache-2.0", "library_name": "transformers",
        "tags": ["ppo", "reinforcement-learning"], "pipeline_tag": "text-generation",
    }  # fmt: skip
    history = read_metrics(run)
    cost = history[-1]["judge/cost_usd_total"]
    assert cost > 0
    for fact in (
        "# my-model",
        "The model after step 2 of PPO training (advantage estimator: gae).",
        "- Name: a-base, itself made from someone/original",
        "- Licence: apache-2.0",
        "- Training: train.jsonl, 8 rows",
        "- Validation: val.jsonl, 4 rows",
        "- LLM judge: a-judge (openai), prompt my_judge.yaml, votes a response: 1",
        "- Rule: exact",
        f"| reward | 0 | {history[-1]['reward_mean']:.4g} |",
        f"| validation judge | {history[0]['val/reward/judge']:.4g} |",
        "![Reward by step](curve.svg)",
        f"${cost:.2g}",
        'data.train_files: ["train.jsonl"]',
        "rollout.n: 2",
    ):
        assert fact in body, (fact, body)
    assert "max_prompt_length" not in body  # a default
    curve = (tmp_path / "my-model" / "curve.svg").read_text()
    for name in ("reward judge", "reward exact", "validation"):
        assert f">{name}</text>" in curve


def test_the_card_tells_no_path_and_no_secret_of_this_machine(
    run: Path, tmp_path: Path, read_output: ReadOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "run"
    shutil.copytree(run, other, symlinks=True)
    lines = (other / "config.yaml").read_text()
    for key, value in (
        ("base_url", "https://me:a-password@judge.example/v1?api_key=abcdef"),
        ("path", "~/secret-project/a-base/"),
        ("master_addr", "node-7.of-this-machine"),
        ("system_prompt", f"My key is {KEY}."),
    ):
        lines = re.sub(rf"^( +{key}:).*$", rf'\1 "{value}"  # flag', lines, count=1, flags=re.M)
    (other / "config.yaml").write_text(lines)
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    assert read_output(other, "--out", tmp_path / "m")[0] == 0
    written = "".join((tmp_path / "m" / name).read_text() for name in ("README.md", "curve.svg"))
    for fragment in (
        'base_url: "(private address)"',
        "- Name: a-base",
        'model.path: "a-base/"',
        "My key is ***.",
    ):
        assert fragment in written
    for hidden in (
        "judge.example",
        "of-this-machine",
        str(tmp_path),
        "secret-project",
        KEY,
        "a-password",
        "abcdef",
    ):
        assert hidden not in written


RUBRIC = "- {name: short, text: The response is short., weight: 2}\n"
RUBRIC += "- {name: rude, text: It is rude., weight: -1}\n"


@pytest.mark.slow
def test_the_card_of_a_fork_counts_from_the_base_model(
    run: Path, tmp_path: Path, read_output: ReadOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its judge scores by a rubric; the steps before the fork are part of cost and results."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    Path("kind.yaml").write_text(RUBRIC)
    answer = '{"c1": {"reason": "", "met": true}, "c2": {"reason": "", "present": false}}'
    with JudgeServer(lambda system, user: answer) as judge:
        args = ["train", "--fork", f"{run}@1", "--output_dir", str(tmp_path / "fork")]
        args += ["--rm_rubric", "kind.yaml", "--rm_base_url", judge.url("openai")]
        assert main([*args, "reward.api.prompt_file=null", "--max_steps", "3"]) == 0
    # Card and page need neither the folder in which the run started nor the rubric's file.
    Path("kind.yaml").unlink()
    monkeypatch.chdir("/")
    assert read_output(tmp_path / "fork", "--out", tmp_path / "m", "--checkpoint", "latest")[0] == 0
    (asked,) = RunData(tmp_path / "fork", "fork").read()["reward"]["judges"]
    assert (asked["summary"], asked["problem"]) == ("2 criteria", "")
    assert [row["text"] for row in asked["criteria"]] == ["The response is short.", "It is rude."]
    _, body = card_of(tmp_path / "m")
    first, last = read_metrics(run), read_metrics(tmp_path / "fork")
    before = math.fsum(
        v for line in first[:2] for k, v in line.items() if k.endswith("judge/cost_usd")
    )
    after = math.fsum(c["usd"] for c in read_lines(tmp_path / "fork" / "judge_calls.jsonl"))
    assert before > 0 and after > 0
    for fact in (
        "(advantage estimator: gae). The run is a fork of run at step 1; it differs in",
        "reward.api.rubric, trainer.total_training_steps.",
        "a-judge (openai), rubric kind.yaml, votes a response: 1",
        "  - short (weight 2): The response is short.\n  - rude (weight -1): It is rude.",
        f"| reward | 0 | {last[-1]['reward_mean']:.4g} |",
        "for the validation,\nthe base model and the last one.",
        f"| validation judge | {first[0]['val/reward/judge']:.4g} | 1 |",
        f"{format_dollars(before)}; {format_dollars(before + after)} in all.",
        "## Findings of the last step",
        'ppo generate m "Your prompt"',
    ):
        assert fact in body, (fact, body)
    settings = body.partition("## Settings that differ")[2].partition("\n## ")[0]
    assert "trainer.total_training_steps" in settings and "rollout.seed" not in settings
    # The same prompt before training and after it.
    rows = {
        at: read_lines(rollout_file(folder, at, "val"))[0]
        for folder, at in ((run, 0), (tmp_path / "fork", 3))
    }
    _, _, examples = body.partition("## Examples")
    for row, title in ((rows[0], "Step 0, score"), (rows[3], "Step 3, score")):
        assert f"    {row['response']}" in examples and title in examples
    assert examples.count("Prompt:") == 2 and f"    {rows[0]['prompt']}" in examples
    # Others on this machine can read all of it.
    modes = {path.stat().st_mode & 0o444 for path in (tmp_path / "m").iterdir()}
    assert modes == {(tmp_path / "m").stat().st_mode & 0o444}


@pytest.mark.parametrize(
    ("file", "text", "licence"),
    [
        ("LICENSE", "                 Apache License\n  Version 2.0", "apache-2.0"),
        ("LICENSE.txt", "MIT License\n\nCopyright", "mit"),
        ("LICENCE", "You may look at it.", "other"),
        ("config.json", '{"license": "gemma"}', "gemma"),
        ("notes", "", "not known"),
    ],
)
def test_the_licence_is_read_from_the_files_of_the_base(
    tmp_path: Path, file: str, text: str, licence: str
) -> None:
    (tmp_path / file).write_text(text)
    assert _describe_base(str(tmp_path))[1][-1] == f"- Licence: {licence}"


def test_a_run_without_curves_and_settings_of_another_version(
    run: Path, tmp_path: Path, read_output: ReadOutput
) -> None:
    other = tmp_path / "run"
    shutil.copytree(run, other, symlinks=True)
    (other / "metrics.jsonl").write_text("")
    (other / "judge_calls.jsonl").unlink()
    with (other / "config.yaml").open("a") as file:
        file.write("actor.policy_loss: of_the_future\n")
    assert read_output(other, "--out", tmp_path / "m", "--critic")[0] == 0
    front, body = card_of(tmp_path / "m")
    assert "pipeline_tag" not in front
    assert "The critic after step 2" in body and "- Licence: apache-2.0" in body
    assert "No step has a reward." in body and "Judges of the entire run: none asked." in body
    assert body.count("cannot be read by this version of ppo-cli") == 2
    assert "curve.svg" not in body and not (tmp_path / "m" / "curve.svg").exists()


@OF_THE_PACKAGE
@pytest.mark.parametrize("by_lfs", [True, False])
def test_the_folder_is_uploaded_to_a_private_repository(
    run: Path,
    hub: HubServer,
    read_output: ReadOutput,
    by_lfs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not by_lfs:  # as the package uploads where hf_xet is installed
        hub.large = 2**40
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    code, text = read_output(run, "--out", "m", "--push", "mine", "--json")
    assert code == 0 and json.loads(text)["pushed"] == f"{hub.url}/someone/mine"
    (repository,) = hub.repositories.values()
    assert repository.private and repository.commits == ["Upload by ppo export"]
    assert repository.files == {p.name: p.read_bytes() for p in Path("m").iterdir()}
    assert {"README.md", "curve.svg", "model.safetensors"} <= repository.files.keys()
    assert any(call.startswith("PUT /lfs/") for call in hub.calls) == by_lfs
    if by_lfs:  # another step to the same place: what is there is private, and is replaced
        before = dict(repository.files)
        code, text = read_output(run, "--out", "n", "--push", "someone/mine")
        assert code == 0 and f"uploaded to {hub.url}/someone/mine" in text
        assert repository.files != before
        assert repository.files["README.md"] == Path("n/README.md").read_bytes()


@OF_THE_PACKAGE
def test_only_public_makes_it_public(run: Path, hub: HubServer, read_output: ReadOutput) -> None:
    assert read_output(run, "--out", "m", "--push", "ours/shown", "--public")[0] == 0
    assert not hub.repositories["ours/shown"].private
    hub.repositories["ours/shown"] = before = Repository(private=False)
    code, text = read_output(run, "--out", "n", "--push", "ours/shown")
    assert code == 2 and before.files == {}
    assert "The model is in n, but it was not uploaded to ours/shown" in text
    assert "everybody can read it. Add --public, or give another name." in text
    assert read_output(run, "--out", "o", "--push", "ours/shown", "--public")[0] == 0
    assert "README.md" in before.files


@pytest.mark.parametrize(
    ("name", "variables", "reason"),
    [
        ("mine", {"HF_TOKEN": ""}, "needs a token of the hub"),
        ("a/b/c", {}, "--push a/b/c: Repo id must be in the form"),
        ("a..b", {}, "--push a..b: Cannot have -- or .."),
        ("", {}, "--push : Repo id must use alphanumeric chars"),
        ("mine", {"offline": "1"}, "unset HF_HUB_OFFLINE"),
        (None, {}, "add --push NAME"),
    ],
)
def test_what_cannot_be_uploaded_is_refused_before_anything_is_written(
    run: Path, hub: HubServer, read_output: ReadOutput, monkeypatch: pytest.MonkeyPatch,
    name: str | None, variables: dict[str, str], reason: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "no-such-file")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", "offline" in variables)
    monkeypatch.setenv("HF_TOKEN", variables.get("HF_TOKEN", TOKEN))
    push = ["--public"] if name is None else ["--push", name]
    code, text = read_output(run, "--out", "m", *push)
    assert code == 2 and reason in text
    assert list(Path().iterdir()) == [] and hub.repositories == {} and hub.calls == []


@OF_THE_PACKAGE
@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ({"create": 500}, "the hub answered 500, no create today."),
        ({"create": 403}, "answered 403, no create today. Give it a token that may write"),
        ({"commit": 500}, "the hub answered 500, no commit today."),
        (None, "onnect"),
    ],
)
def test_an_upload_that_fails_says_where_the_model_is_and_how_to_try_again(
    run: Path, hub: HubServer, read_output: ReadOutput, fails: dict[str, int] | None, reason: str
) -> None:
    hub.fails = fails or {}
    if fails is None:
        hub.pause()
    code, text = read_output(run, "--out", "my model", "--push", "mine")
    assert code == 2 and text.startswith("error: The model is in my model, but it was not uploaded")
    assert reason in text and len(text.splitlines()) == 1
    _, *args = shlex.split(text.partition("To try again: ")[2])
    assert args == ["upload", "mine", "my model", "--private"]
    if fails == {"create": 500}:
        hub.fails = {}
        variables = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        program = [sys.executable, "-m", "huggingface_hub.cli.hf", *args]
        done = subprocess.run(
            program, env=os.environ | variables, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        repository = hub.repositories["someone/mine"]
        assert repository.private
        assert repository.files == {p.name: p.read_bytes() for p in Path("my model").iterdir()}
