"""A plan ends as the run would: the same sentences, the same exit code, and no batch too large."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from ppo_cli.cli.app import main
from ppo_cli.config.checks import devices
from ppo_cli.config.derived import fit_batches
from ppo_cli.config.models.bundled import bundled_path
from ppo_cli.config.placement import has_package
from tests.cli.mistakes import ROW, TRAIN, set_desk

FILES = {
    "forty.jsonl": "".join(
        json.dumps(ROW | {"prompt": f"What is 1 + {n}?"}) + "\n" for n in range(40)
    ),
    "tiny.yaml": "data: {train_files: [forty.jsonl], val_files: []}\n",
    "model/tokenizer.json": "{}",
    "t5/config.json": '{"model_type": "t5", "is_encoder_decoder": true}',
    "oss/config.json": '{"model_type": "gpt_oss"}',
    "gpt/config.json": '{"model_type": "gpt2", "n_positions": 32}',
    "phi/config.json": json.dumps(
        {
            "model_type": "phi3",
            "rope_scaling": {"type": "longrope"},
            "original_max_position_embeddings": 48,
        }
    ),
    "other.py": "def compute_scores(data_source, solution_str): ...\n",
    "few.py": "def compute_score(text): ...\n",
    "class.py": "class compute_score: ...\n",
    "number.py": "compute_score = 3\n",
    "judge.yaml": "system: You judge.\nscoring: 'Rate {respnse} from 0 to 10.'\n",
}


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return set_desk(tmp_path, FILES, monkeypatch)


def problems(line: str, capfd: pytest.CaptureFixture[str]) -> str:
    capfd.readouterr()
    assert main(line.split()) == 2, line
    return capfd.readouterr().err


def test_what_a_run_refuses_a_plan_refuses_in_the_same_words(
    desk: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        devices, "has_package", lambda name: name != "bitsandbytes" and has_package(name)
    )
    for extra_args, fragment in {
        "--train_files nope.jsonl": "nope.jsonl: no such file",
        "--val_files nope.jsonl": "nope.jsonl: no such file",
        "--model ./mymodel": "--model: there is no model folder ./mymodel",
        "--model model": "model holds no config.json",
        "--model gpt": "gpt has a table of positions for 32 tokens (n_positions)",
        "--model t5": "t5 is a t5 model with an encoder (is_encoder_decoder): name a decoder",
        "--model oss model.attn_implementation=sdpa": "oss needs the eager kernel: set model.attn",
        "--critic_model phi": "phi has rotary positions (longrope) that depend on the longest row",
        "--critic_model ./mymodel": "--critic_model: there is no model folder",
        "--reward_model ./rm": "rm",
        "--reward_function x.py": "there is no file x.py",
        "--reward_function other.py": "has no 'compute_score'. Did you mean 'compute_scores'?",
        "--reward_function few.py": "compute_score(text) in ",
        "--reward_function class.py": "is a class, not a function",
        "--reward_function number.py": "is of type int, not a function",
        "--output_dir s3://bucket/run": "s3://bucket/run is an address, and files are written to",
        "--use_api_reward --rm_scoring_prompt {respnse}": "respnse",
        "--use_api_reward --rm_model qwen-pluss --rm_budget_usd 1": "Did you mean 'qwen-plus'?",
        "--use_api_reward --rm_budget_usd 1 --rm_monitor_model gpt-6-lunna": "'gpt-6-luna'?",
        "--use_api_reward --rm_api_type azure --rm_model m": "azure needs OPENAI_API_VERSION: the",
        "--use_api_reward --rm_monitor_type vertex --rm_monitor_model m": "GOOGLE_CLOUD_PROJECT: ",
        "--use_api_reward --rm_monitor_labels nope.jsonl": "nope.jsonl",
        "--fork=": "--fork has no run: name one, or RUN@STEP, or leave --fork out.",
        "--logger wandb": "--logger wandb needs the package wandb",
        "critic.optim.optimizer=AdamW8bit": "pip install bitsandbytes",
        "--quantization nf4 --lora_rank 8": "model.quantization nf4 needs the package bitsandbytes",
        "model.attn_implementation=flash_attention_2": "flash_attention_2",
    }.items():
        messages = problems(f"{TRAIN.replace('train', 'plan', 1)} {extra_args}", capfd)
        assert fragment in messages and "Traceback" not in messages
        if "--use_api" not in extra_args:  # a run needs a key as well
            assert problems(f"{TRAIN} {extra_args}", capfd) == messages
        assert problems(f"{TRAIN} {extra_args} --dry_run", capfd) == messages
    assert not (desk / "outputs").exists()


@pytest.mark.parametrize("command", ["generate gpt 1+1?", "eval gpt --data embedded"])
def test_what_samples_refuses_rows_that_the_model_has_no_positions_for(
    command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    messages = problems(f"{command} --max_prompt_length 16 --max_response_length 20", capfd)
    assert "gpt has a table of positions for 32 tokens" in messages
    assert "use --max_response_length 16." in messages


ROWS = {
    "no data_source": ({"prompt": "a"}, "", "The prompts have no data_source"),
    "no rule": (ROW | {"data_source": "mine"}, "", "No rule for data_source 'mine'"),
    "no truth": ({"prompt": "a"}, "--rule gsm8k", "None of 8 prompts for the rule gsm8k"),
    "no number": (ROW | {"ground_truth": "x"}, "--rule number", "ground_truth 'x' is not a number"),
    "no tests": (ROW, "--rule code", "None of 8 prompts for the rule code"),
    "no prompt": ({"text": "a"}, "", "no column 'prompt'"),
    "no column": (ROW, "data.reward_fn_key=kind", "no column 'kind'"),
    "not text": (ROW | {"prompt": 7}, "", "8 bad rows:"),
    "null": (ROW | {"prompt": None}, "--rule gsm8k", "is missing or null"),
    "pictures": (ROW | {"images": ["a.png"]}, "", "column images: holds content"),
    "a mark for a video": (
        ROW | {"prompt": "<video>What next?"},
        "",
        "column prompt: holds <video>",
    ),
    "a part that is sound": (
        ROW | {"prompt": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "",
        "has a part of kind 'input_audio': only text is read",
    ),
    "truths for the judge": (
        {"prompt": "a"},
        "--use_api_reward --rm_prompt_preset math",
        "{ground_truth}",
    ),
}


@pytest.mark.parametrize("kind", ["train", "val"])
def test_a_plan_refuses_the_rows_that_a_run_refuses(
    desk: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("DASHSCOPE_API_KEY", "a-key-of-nobody")
    failed = []
    for name, (row, extra_args, fragment) in ROWS.items():
        (desk / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
        if kind == "val" and ("None of 8" in fragment or "not a number" in fragment):
            continue  # the training rows can be scored
        line = f"{TRAIN} --{kind}_files rows.jsonl {extra_args}"
        messages = [problems(line.replace("train", "plan", 1), capfd), problems(line, capfd)]
        same = all(line.removeprefix("error: ") in messages[0] for line in messages[1].splitlines())
        if fragment not in messages[0] or not same or "Traceback" in messages[0]:
            failed.append((name, messages))
    assert not failed


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
    assert main(f"{line} data.train_max_samples=7".split()) == 0


def test_only_rows_that_a_run_would_use_are_held_against_it(
    desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "a"}] * 4 + [ROW] * 4
    (desk / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (desk / "bare.jsonl").write_text((json.dumps({"prompt": "a"}) + "\n") * 8)
    plan = TRAIN.replace("train", "plan", 1)
    line = f"{plan} --train_files rows.jsonl --rule gsm8k"
    assert main(line.split()) == 0
    assert "None of 4 prompts" in problems(f"{line} data.train_max_samples=4", capfd)
    line = f"{plan} --rule gsm8k --train_files bare.jsonl"
    assert "None of 8 prompts" in problems(line, capfd)
    assert main(f"{line} openai/gsm8k".split()) == 0  # nobody knows what that set holds


def test_all_that_is_wrong_with_the_rows_is_told_at_once(
    desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (desk / "bad.jsonl").write_text("{\n")
    (desk / "few.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    line = f"{TRAIN} --train_files few.jsonl --val_files bad.jsonl --batch_size 8 --dry_run"
    messages = problems(line, capfd)
    for fragment in (
        "no column 'prompt'",
        "bad.jsonl line 1",
        "1 prompts cannot fill a batch of 8",
    ):
        assert fragment in messages


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


def test_a_plan_for_programs_holds_its_problems(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--train_files", "nope.jsonl", "--json"]) == 2
    document = json.loads(capfd.readouterr().out)
    assert "nope.jsonl: no such file." in document["problems"][0]


def test_batches_that_nobody_chose_fit_the_rows(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TRAIN.replace("train", "plan", 1).split(), "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    sizes = {k: document["values"][k]["value"] for k in ("data.train_batch_size",
                                                     "actor.ppo_mini_batch_size")}  # fmt: skip
    assert sizes == {"data.train_batch_size": 40, "actor.ppo_mini_batch_size": 20}
    assert document["values"]["data.train_batch_size"]["origin"] == "40 training rows"
    assert any("40 training rows: --batch_size is lowered to 40" in n for n in document["notes"])
    for max_rows, batch in ((1000, 40), (30, 30)):
        line = f"{TRAIN.replace('train', 'plan', 1)} --json data.train_max_samples={max_rows}"
        assert main(line.split()) == 0
        document = json.loads(capfd.readouterr().out)
        assert document["values"]["data.train_batch_size"]["value"] == batch


def test_batches_that_were_asked_for_are_refused_with_a_line_that_works(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for command in ("plan", "train"):
        line = f"{TRAIN.replace('train', command, 1)} --batch_size 64"
        messages = problems(line, capfd)
        assert "40 prompts cannot fill a batch of 64" in messages
        assert "Use --batch_size 40 --mini_batch_size 20," in messages
    assert (
        main(
            [
                *TRAIN.replace("train", "plan", 1).split(),
                *["--batch_size", "40", "--mini_batch_size", "20"],
            ]
        )
        == 0
    )


def test_fitting_batches_always_fit() -> None:
    for rows in range(1, 300):
        for batch, mini in ((256, 64), (64, 32), (1024, 1024), (12, 4)):
            fits, part = fit_batches(rows, batch, mini)
            assert 1 <= part <= fits <= rows and fits % part == 0, (rows, batch, mini)
