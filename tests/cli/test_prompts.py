"""`ppo prompts list`, `show` and `render`, as they are typed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppo_cli.cli.app import main
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import DataError
from ppo_cli.extras.trust.prompts import render_row

ROWS = [
    {"prompt": "2 + 2 = ?", "ground_truth": "4", "response": "It is 4."},
    {"prompt": [{"role": "user", "content": "3 + 3 = ?"}], "ground_truth": "6"},
    {"prompt": "x?", "extra_info": {"rubric": "be brief"}, "response": "<think>hm</think>y"},
    {"prompt": "x?", "response": 4},
]


@pytest.fixture
def rows(tmp_path: Path) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return str(file)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["prompts", *args])
    out, err = capsys.readouterr()
    return code, out, err


def rendered(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    code, out, err = run(capsys, "render", *args, "--json")
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    return err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert [line.split()[:3] for line in out.splitlines()] == [
        [name, "v1", "0-1" if name == "compare" else "1-10"]
        for name in ("code", "compare", "dialogue", "math", "safety")
    ]


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list", "--json")
    assert code == 0
    prompts = {row["name"]: row for row in json.loads(out)}
    assert prompts["math"]["variables"] == ["prompt", "ground_truth", "response"]
    assert prompts["math"]["scale"] == "1-10"
    assert all(row["description"] for row in prompts.values())
    assert all(row["cases"] >= 6 for name, row in prompts.items() if name != "compare")


def test_show_prints_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "math")
    assert code == 0
    assert out.startswith("# ")
    assert yaml.safe_load(out)["name"] == "math"


def test_what_show_prints_is_a_file_of_ones_own(
    rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(run(capsys, "show", "math")[1], encoding="utf-8")
    other_prompts = rendered(capsys, rows, "--rm_prompt_preset", "math")
    mine = rendered(capsys, rows, "--rm_prompt_file", "mine.yaml")
    assert mine["system"] == other_prompts["system"]


def test_show_of_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean 'safety'?" in refused(capsys, "show", "safty")


def test_render_for_people(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rm_prompt_preset", "math", "--rm_api_type", "openai", "--rm_model", "some-model"]
    code, out, _ = run(capsys, "render", rows, "--row", "1", *flags)
    assert code == 0
    assert out.startswith("Judge prompt math v1, scale 1-10, for openai (some-model)\n")
    assert out.index(" system\n") < out.index(" user\n") < out.index("It is 4.")
    assert out.rstrip().endswith('"score_1_to_10": N}')


def test_render_as_json(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = rendered(capsys, rows, "--rm-scoring-prompt", r"Q {prompt}\nA {response}\nScore 0-5")
    assert (shown["prompt"], shown["scale"], shown["model"]) == ("own", "0-5", None)
    assert shown["user"].startswith("Q <prompt-")
    assert "\nIt is 4.\n" in shown["user"]
    assert shown["answered_without_a_call"] is None


@pytest.mark.parametrize(
    ("kind", "host", "method", "fragment"),
    [
        ("openai", "https://api.openai.com/v1", "chat.completions.create", '"json_schema"'),
        ("claude", "https://api.anthropic.com", "messages.create", '"max_tokens": 77'),
        ("gemini", "https://generativelanguage.googleapis.com", "aio.models.generate_content",
         '"HARM_CATEGORY_'),
        ("dashscope", "https://dashscope.aliyuncs.com/api/v1", "chat.completions.create",
         '"enable_thinking": false'),
    ],
)  # fmt: skip
def test_render_shows_the_request_as_it_is_made(
    rows: str, capsys: pytest.CaptureFixture[str], kind: str, host: str, method: str, fragment: str
) -> None:
    flags = ["--rm_api_type", kind, "--rm_model", "some-model", "--rm_max_tokens", "77"]
    shown = rendered(capsys, rows, *flags, "--rm_temperature", "0.25")
    sent = shown["request"]
    assert (sent["endpoint"], sent["method"], sent["mode"]) == (host, method, "text")
    assert sent["arguments"]["model"] == "some-model"
    wire = json.dumps(sent["arguments"])
    assert fragment in wire
    assert '"temperature": 0.25' in wire
    assert '"score_1_to_10"' in wire
    assert "It is 4." in wire
    code, out, _ = run(capsys, "render", rows, *flags)
    assert code == 0
    assert fragment in out
    assert out.count("It is 4.") == 1
    assert f"{host}  {method}  mode text\n" in out


def test_render_never_shows_a_key(
    rows: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret-0123456789")
    code, out, _ = run(capsys, "render", rows, "--rm_api_type", "openai", "--rm_model", "m")
    assert code == 0
    assert "very-secret" not in out
    assert '"seed": 0' in out


def test_render_of_a_decision(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rm_api_type", "openai", "--rm_model", "m", "--rm_mode", "decision"]
    sent = rendered(capsys, rows, *flags)["request"]
    assert (sent["mode"], sent["method"]) == ("decision", "decisions.create")


def test_render_of_a_comparison(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    user = rendered(capsys, rows, "--rm_mode", "compare", "--rm_compare", "ground_truth")["user"]
    assert re.search(r"<response-R1-(\w+)>\nIt is 4.\n</response-R1-\1>", user)
    assert re.search(r"<response-R2-(\w+)>\n4\n</response-R2-\1>", user)
    pair = rendered(capsys, rows, "--rm_mode", "compare")["user"]
    assert "another response to the same prompt" in pair


def test_render_takes_a_placeholder(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = rendered(capsys, rows, "--row", "2", "--response", "Six?")
    assert "\n3 + 3 = ?\n" in shown["user"]
    assert "\nSix?\n" in shown["user"]
    other = rendered(capsys, rows, "--row", "1", "--response", "Five?")
    assert "\nFive?\n" in other["user"]
    assert "It is 4." not in other["user"]


def test_render_shows_what_settings_do(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = rendered(capsys, rows, "--row", "3")
    assert "\ny\n" in shown["user"]
    with_thoughts = rendered(
        capsys, rows, "--row", "3", "--rm_reasoning", "keep", "--rm_max_tokens", "77"
    )
    assert "< think>hm< / think>y" in with_thoughts["user"]
    assert with_thoughts["max_tokens"] == 77
    rubric = rendered(
        capsys, rows, "--row", "3", "--rm_scoring_prompt", "{response} by {extra_info.rubric}"
    )
    assert "\nbe brief\n" in rubric["user"]


def test_render_says_when_the_gate_answers(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "render", rows, "--response", "Solution:")
    assert code == 0
    assert "without a call: a lead-in without an answer." in out
    shown = rendered(capsys, rows, "--response", "Solution:", "--no_rm_gate")
    assert shown["answered_without_a_call"] is None


def test_render_reads_settings_from_a_file(
    rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "judge.yaml").write_text("reward: {api: {prompt_preset: code}}\n")
    assert rendered(capsys, rows, "--config", "judge.yaml")["prompt"] == "code"
    assert rendered(capsys, rows, "reward.api.prompt_preset=safety")["prompt"] == "safety"


def test_render_of_the_embedded_rows(capsys: pytest.CaptureFixture[str]) -> None:
    shown = rendered(capsys, "embedded", "--row", "3", "--response", "5")
    assert "\n5\n" in shown["user"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--row", "2"], "line 2 has no column 'response': set a response with --response"),
        (["--row", "9"], "has no row 9; it has 1 to 4"),
        (["--row", "4"], "line 4, column response: is a number, not text"),
        (["--row", "3", "--rm_prompt_preset", "math"], "{ground_truth}, which 1 of 1 rows lack"),
        (["--rm_scoring_prompt", "{prompt}"], "--rm_scoring_prompt: {response} is missing"),
        (["--rm_scale", "ten"], "--rm_scale: reward.api.scale 'ten' is not LOW-HIGH"),
        (["--rm_prompt_file", "none.yaml"], "there is no such file"),
        (["--rm_prompt_preset", "mth"], "reward.api.prompt_preset"),
    ],
)
def test_render_refuses(
    rows: str, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert message in refused(capsys, "render", rows, *args)


def test_render_of_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such file" in refused(capsys, "render", "nothing.jsonl")


def test_rows_are_named_as_everywhere_else(rows: str) -> None:
    question = render_row(ApiReward(), rows, 1).question
    assert "\n2 + 2 = ?\n" in question.user
    with pytest.raises(DataError, match="no row 0"):
        render_row(ApiReward(), rows, 0)
