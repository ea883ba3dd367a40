"""A plan ends as the run would: the same sentences, the same exit code, and no batch too large."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from ppo_cli.cli.app import main
from ppo_cli.config.models.bundled import bundled_path
from ppo_cli.planning.batches import fit_batches
from ppo_cli.rewards.code import sandboxes
from ppo_cli.run import refusals
from tests.cli.mistakes import ROW, TRAIN, set_desk

FILES = {
    "forty.jsonl": "".join(
        json.dumps(ROW | {"prompt": f"What is 1 + {n}?"}) + "\n" for n in range(40)
    ),
    "tiny.yaml": "data: {train_files: [forty.jsonl], val_files: []}\n",
}


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return set_desk(tmp_path, FILES, monkeypatch)


def problems(line: str, capfd: pytest.CaptureFixture[str]) -> str:
    capfd.readouterr()
    assert main(line.split()) == 2, line
    return capfd.readouterr().err


REFUSING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)
USER, SYSTEM = {"role": "user", "content": "1 + 1?"}, {"role": "system", "content": "Add."}


@pytest.mark.parametrize(
    ("template", "prompt", "extra_args", "fragment"),
    [
        (REFUSING, "1 + 1?", ["--system_prompt", "Add."], "No system role.*leave --system_prompt"),
        (REFUSING, [SYSTEM, USER], [], "8 bad rows:.*line 1, .*without its system.*3 more"),
        (REFUSING, [USER, USER], [], "8 bad rows:.*line 1, .*Roles must alternate .also line 2"),
        (None, "1 + 1?", ["--system_prompt", "Add."], "--system_prompt .*no chat template"),
        (None, [USER], [], "8 bad rows:.*is a message list, but the tokenizer has no chat templa"),
    ],
)
def test_what_a_chat_template_refuses_a_plan_refuses(
    desk: Path,
    capfd: pytest.CaptureFixture[str],
    template: str | None,
    prompt: object,
    extra_args: list[str],
    fragment: str,
) -> None:
    shutil.copytree(bundled_path("embedded", "model"), desk / "odd")
    (desk / "odd" / "chat_template.jinja").unlink()
    if template is not None:
        (desk / "odd" / "chat_template.jinja").write_text(template)
    (desk / "rows.jsonl").write_text((json.dumps(ROW | {"prompt": prompt}) + "\n") * 8)
    outcomes = []
    for command in ("plan", "train"):
        typed = TRAIN.replace("train", command, 1).split()
        capfd.readouterr()
        assert main([*typed, "--model", "odd", "--train_files", "rows.jsonl", *extra_args]) == 2
        outcomes.append(capfd.readouterr().err)
    refused = [text[text.index("error: ") :] for text in outcomes]
    assert refused[0] == refused[1]
    assert re.search(fragment, refused[0], re.DOTALL)


def test_a_placeholder_without_an_embedding_is_refused_where_a_prompt_uses_it(
    desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(bundled_path("embedded", "model"), desk / "odd")
    tokenizer = json.loads((desk / "odd" / "tokenizer.json").read_text())
    placeholder = dict(tokenizer["added_tokens"][-1], id=282, content="<extra>")
    tokenizer["added_tokens"].append(placeholder)
    tokenizer["model"]["vocab"]["<extra>"] = 282
    (desk / "odd" / "tokenizer.json").write_text(json.dumps(tokenizer))
    rows = [ROW] * 7 + [ROW | {"prompt": "What is on <extra>?"}]
    (desk / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = f"{TRAIN} --model odd --train_files rows.jsonl"
    refused = problems(line, capfd)
    assert "rows.jsonl line 8, column prompt: it holds <extra> (token 282)" in refused
    assert "its vocab_size is 282" in refused
    assert problems(line.replace("train", "plan", 1), capfd) == refused
    assert main(f"plan {line.partition(' ')[2]} data.train_max_samples=7".split()) == 0


def test_a_plan_needs_a_sandbox_that_works(
    desk: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"prompt": "Return 1.", "test_list": ["assert 1"]}
    (desk / "code.jsonl").write_text((json.dumps(row) + "\n") * 8)
    broken = desk / "bin/bwrap"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 7\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(broken.parent), prepend=os.pathsep)
    monkeypatch.setattr(sandboxes, "_FAULTS", {})
    line = f"{TRAIN} --train_files code.jsonl --rule code --code_sandbox bwrap".replace(
        "train", "plan", 1
    )
    assert "exit code 7" in problems(line, capfd)
    assert main([*line.split(), "--allow_unsandboxed"]) == 0


def test_a_plan_reads_the_first_rows_of_large_files_and_says_so(
    desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [json.dumps(ROW)] * 4_000 + ["{"]
    (desk / "many.jsonl").write_text("\n".join(rows))
    (desk / "many.json").write_text(json.dumps([ROW] * 4_000 + [{"prompt": 7}]))
    table = pyarrow.Table.from_pylist([ROW] * 4_000 + [ROW | {"prompt": ""}])
    parquet.write_table(table, desk / "many.parquet", row_group_size=999)
    for name in ("many.jsonl", "many.json", "many.parquet"):
        line = f"{TRAIN.replace('train', 'plan', 1)} --train_files {name}"
        capfd.readouterr()
        assert main(line.split()) == 0
        output = capfd.readouterr().out
        assert "Only the first 4,000 of 4,001 rows were read for this plan" in output
        assert f"data check {name}` checks them all" in output
        assert problems(line.replace("plan", "train", 1), capfd)
    (desk / "few.jsonl").write_text("{\n")
    line = f"{TRAIN.replace('train', 'plan', 1)} --train_files many.jsonl --train_files few.jsonl"
    assert "few.jsonl line 1" in problems(line, capfd)


def test_a_plan_of_a_large_file_estimates_the_prompts_that_are_too_long(
    desk: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "MAX_PLAN_ROWS", 4)
    monkeypatch.setattr(refusals, "EAGER_ROWS", 11)
    rows = [ROW, *[ROW | {"prompt": "long " * 20}] * 3, *[ROW] * 8]
    (desk / "large.jsonl").write_text("\n".join(map(json.dumps, rows)))
    line = f"{TRAIN.replace('train', 'plan', 1)} --train_files large.jsonl --max_prompt_length"
    estimate = "About 9 of 12 prompts are longer than 60 tokens and will be"
    for options, words in (
        ("data.filter_overlong_prompts=true", f"{estimate} dropped, as estimated"),
        ("data.truncation=left", f"{estimate} cut to 60 tokens, as estimated"),
    ):
        capfd.readouterr()
        assert main([*line.split(), "60", options]) == 0
        assert words in capfd.readouterr().out
    assert "(3 such rows among the first 4, about 9 of 12 as estimated" in problems(
        f"{line} 60", capfd
    )
    assert main([*line.split(), "20", "data.filter_overlong_prompts=true"]) == 0
    assert "About 12 of 12 prompts" in capfd.readouterr().out


def test_fitting_batches_always_fit() -> None:
    for rows in range(1, 300):
        for batch, mini in ((256, 64), (64, 32), (1024, 1024), (12, 4)):
            fits, part = fit_batches(rows, batch, mini)
            assert 1 <= part <= fits <= rows and fits % part == 0, (rows, batch, mini)
