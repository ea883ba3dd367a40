"""The code blocks of the documents behind the project: each does what its text says.

Settings are given with --config, command lines as `plan` calls on a machine with 8 GPUs, data and
reward functions to `ppo data check` and `ppo reward score`. Skipped where they are not at hand.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import expandvars
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppo_cli.cli.app import main
from ppo_cli.config import derived
from ppo_cli.config.keys import table
from ppo_cli.report import tracker

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "asked_for"
GPUS = 8
LARGEST_BATCH = 1024  # every plan reads so many rows
SMALL, INSTRUCT = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"
DEBERTA = "OpenAssistant/reward-model-deberta-v3-large"
ARMO = "RLHFlow/ArmoRM-Llama3-8B-v0.1"
ACTOR_MICRO = "actor.ppo_micro_batch_size_per_gpu"
CRITIC_MICRO = "critic.ppo_micro_batch_size_per_gpu"
TP, TRAIN_TP = "rollout.tensor_model_parallel_size", "trainer.tensor_parallel_size"
N_GPUS, NODES = "trainer.n_gpus_per_node", "trainer.nnodes"
BATCH, MINI = "data.train_batch_size", "actor.ppo_mini_batch_size"
LR, CRITIC_LR = "actor.optim.lr", "critic.optim.lr"
KL_COEF, REWARD_KL = "algorithm.kl_ctrl.kl_coef", "algorithm.use_kl_in_reward"
JUDGE = {"reward.api.enable": True}
Values = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """A YAML file with what it must come to; `beside` are flags that its text takes for granted."""

    values: Values
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lines:
    """The outcomes of the plans of a block, in order: values, or what a refusal says."""

    outcomes: tuple[Values | str, ...]


TEXT, OTHER, SKETCH, ROWS, FUNCTION = "text", "other programs", "sketch", "rows", "function"
MEGATRON = "sharded with FSDP2"

BLOCKS: dict[str, Settings | Lines | str] = {
    "000_00": Settings(
        {
            LR: 1e-6, BATCH: 32, MINI: 8, "actor.ppo_epochs": 3, "critic.ppo_epochs": 3,
            "actor.clip_ratio": 0.2, "critic.value_loss_coef": 0.5, "actor.entropy_coeff": 0.01,
            "actor.grad_clip": 1.0, "critic.grad_clip": 1.0,
        }
    ),
    "000_01": Lines(
        (
            {
                "model.path": "models/qwen2.5-7b", LR: 1e-6, BATCH: 32,
                "data.train_files": ["data/gsm8k_processed/train.parquet"],
                "data.val_files": ["data/gsm8k_processed/test.parquet"],
            },
        )
    ),
    "000_02": Settings(
        {
            "algorithm.whiten_advantages": True, "algorithm.adv_estimator": "gae",
            "algorithm.lam": 0.95,
        }
    ),
    "000_03": Settings(
        {
            "algorithm.kl_ctrl.target_kl": 0.01, KL_COEF: 0.1,
            "algorithm.kl_ctrl.type": "adaptive", REWARD_KL: True,
        }
    ),
    "000_04": Settings(
        {
            "actor.grad_clip": 1.0, "critic.grad_clip": 1.0, "actor.clip_grad_value": None,
            "critic.clip_grad_value": None,
        }
    ),
    "000_05": Settings(
        {
            "model.enable_gradient_checkpointing": True, ACTOR_MICRO: None,
            "actor.fsdp_config.optimizer_offload": True,
            "critic.fsdp_config.optimizer_offload": True,
        }
    ),
    "000_06": Settings(
        {N_GPUS: 8, TRAIN_TP: 2, TP: 1, "trainer.pipeline_parallel_size": 1}
    ),
    "001_00": Lines(
        (
            {
                N_GPUS: 1, TP: 1, "trainer.logger": ["console"], "critic.model.path": SMALL,
                "model.path": SMALL, BATCH: 256, MINI: 64, ACTOR_MICRO: 2, CRITIC_MICRO: 2,
            },
        )
    ),
    "002_00": TEXT,
    "002_01": OTHER,
    "002_02": OTHER,
    "002_03": OTHER,
    "002_04": Lines(({}, {N_GPUS: 2, "trainer.total_epochs": 20, LR: 5e-7})),
    "002_05": TEXT,
    "002_06": Lines(
        (
            {
                "algorithm.adv_estimator": "gae", BATCH: 256, "model.path": SMALL,
                "critic.model.path": SMALL, MINI: 64, LR: 1e-6, CRITIC_LR: 1e-5, N_GPUS: 2,
                "trainer.total_epochs": 15,
            },
            {},
        )
    ),
    "002_07": Lines(
        ({"model.path": INSTRUCT, "reward.model.path": DEBERTA, N_GPUS: 8}, {})
    ),
    "002_08": Settings(
        {
            "algorithm.gamma": 0.99, "algorithm.lam": 0.95, REWARD_KL: False,
            "algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.type": "fixed", KL_COEF: 0.001,
        }
    ),
    "002_09": Settings(
        {
            BATCH: 512, "data.max_prompt_length": 1024, "data.max_response_length": 512,
            "data.filter_overlong_prompts": True, "data.truncation": "error",
            "data.train_files": ["~/data/gsm8k/train.parquet"],
        }
    ),
    "002_10": Settings(
        {
            LR: 1e-6, "actor.optim.weight_decay": 0.01, "actor.optim.lr_warmup_steps": 0,
            MINI: 128, ACTOR_MICRO: 4, "actor.ppo_epochs": 1, "actor.clip_ratio": 0.2,
            "actor.use_kl_loss": False, "actor.kl_loss_type": "kl",
            "actor.fsdp_config.param_offload": False, "model.enable_gradient_checkpointing": True,
        }
    ),
    "002_11": Settings(
        {
            "critic.model.path": INSTRUCT, "critic.model.enable_gradient_checkpointing": True,
            CRITIC_LR: 1e-5, "critic.ppo_mini_batch_size": 128, CRITIC_MICRO: 4,
            "critic.ppo_epochs": 1,
        }
    ),
    "002_12": Settings(
        {
            "rollout.name": "vllm", TP: 2, "rollout.gpu_memory_utilization": 0.4, N_GPUS: None,
            "rollout.temperature": 1.0, "rollout.top_p": 1.0, "rollout.top_k": -1, "rollout.n": 1,
            "ref.log_prob_max_token_len_per_gpu": 4 * 1024,
        }
    ),
    "002_13": Settings(
        {
            N_GPUS: 2, NODES: 1, "trainer.total_epochs": 15, "trainer.save_freq": 5,
            "trainer.test_freq": 5, "trainer.logger": ["console", "wandb"],
            "trainer.project_name": "verl_ppo", "trainer.experiment_name": "qwen2.5_gsm8k",
            "trainer.critic_warmup": 0,
        }
    ),
    "002_14": Lines(
        ({BATCH: 256, MINI: 64, ACTOR_MICRO: 1, CRITIC_MICRO: 1, N_GPUS: 2},)
    ),
    "002_15": Lines(
        (
            {
                BATCH: 512, "model.path": "Qwen/Qwen2-7B-Instruct", MINI: 128, TP: 2, N_GPUS: 8,
                "trainer.total_epochs": 20,
            },
            {},
        )
    ),
    "002_16": Lines(
        ({"reward.model.path": DEBERTA, REWARD_KL: True, KL_COEF: 0.01, N_GPUS: 8}, {})
    ),
    "002_17": Lines(
        (
            {
                "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.001, REWARD_KL: False,
                "actor.kl_loss_type": "kl",
            },
        )
    ),
    "002_18": Lines(
        (
            {
                BATCH: 1024, TP: 4, N_GPUS: 8, NODES: 4, "trainer.node_rank": 0,
                "trainer.master_addr": "192.168.1.100", "trainer.master_port": 29500,
            },
        )
    ),
    "002_19": Lines(({}, MEGATRON)),
    "002_20": TEXT,
    "002_21": Lines(
        (
            {BATCH: 256, MINI: 64},
            {ACTOR_MICRO: 2, CRITIC_MICRO: 2},
            {
                "model.enable_gradient_checkpointing": True,
                "critic.model.enable_gradient_checkpointing": True,
            },
            {
                "actor.fsdp_config.param_offload": True,
                "actor.fsdp_config.optimizer_offload": True,
            },
            {"rollout.gpu_memory_utilization": 0.3},
            {TP: 4},
        )
    ),
    "002_22": TEXT,
    "002_23": Lines(
        (
            {LR: 5e-7, CRITIC_LR: 5e-6},
            {"actor.clip_ratio": 0.1},
            {"actor.grad_clip": 1.0, "critic.grad_clip": 1.0},
            {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.01, REWARD_KL: False},
            {"actor.ppo_epochs": 1},
        )
    ),
    "002_24": OTHER,
    "002_25": Lines(({CRITIC_LR: 1e-5}, {"trainer.critic_warmup": 10}, {BATCH: 512})),
    "002_26": Lines(
        (
            {"algorithm.gamma": 0.99, "algorithm.lam": 0.95},
            {"algorithm.gamma": 0.95, "algorithm.lam": 0.9},
            {"algorithm.gamma": 0.99, "algorithm.lam": 0.97},
        )
    ),
    "002_27": Lines(({"rollout.name": "vllm"}, "rollout.name sglang is not offered")),
    "002_28": Lines(({"trainer.logger": ["console", "tensorboard"]},)),
    "002_29": Lines(
        (
            {
                "trainer.logger": ["console", "wandb"], "trainer.project_name": "my_ppo_project",
                "trainer.experiment_name": "qwen2.5_gsm8k_v1",
            },
        )
    ),
    "002_30": TEXT,
    "002_31": Lines(({"model.path": SMALL, "critic.model.path": SMALL},)),
    "002_32": Lines(({},)),
    "003_00": TEXT,
    **dict.fromkeys((f"003_{number:02}" for number in range(1, 16)), SKETCH),
    "004_00": ROWS,
    "004_01": Lines(
        (
            {"reward.model.path": None, "reward.api.enable": False},
            {"reward.model.path": ARMO},
            {"model.path": "Qwen/Qwen2.5-7B", "trainer.total_epochs": 20, LR: 5e-7},
        )
    ),
    "004_02": Lines(
        (
            {**JUDGE, "reward.api.type": "dashscope", "reward.api.model": "qwen-plus"},
            {**JUDGE, "reward.api.type": "openai", "reward.api.model": "gpt-4o-mini"},
            {**JUDGE, "reward.api.type": "gemini", "reward.api.model": "gemini-1.5-flash"},
            {**JUDGE, "reward.api.type": "claude", "reward.api.model": "claude-3-haiku-20240307"},
            *(
                {**JUDGE, "reward.api.prompt_preset": preset}
                for preset in ("math", "code", "dialogue", "safety")
            ),
        )
    ),
    "004_03": Lines(
        (
            {
                "reward.api.system_prompt": "你是数学评分专家，请评估解答的正确性...",
                "reward.api.scoring_prompt": "问题：{prompt}\\n解答：{response}\\n"
                "答案：{ground_truth}\\n请评分1-10...",
            },
        )
    ),
    "004_04": Lines(({"reward.model.path": ARMO},)),
    "004_05": FUNCTION,
    "004_06": Settings(
        {"reward.composite.weights": {"rm_score": 0.7, "rule_score": 0.3}},
        ("--reward_model", ARMO),
    ),
    "004_07": TEXT,
    "004_08": TEXT,
    "004_09": Settings({"ref.param_offload": True}),
    "004_10": Lines(({"model.lora_rank": 8, "model.lora_alpha": 16.0},)),
    "004_11": Lines(({BATCH: 128},)),
    "004_12": Lines(
        (
            {N_GPUS: 8},
            {N_GPUS: 8, NODES: 2, "trainer.node_rank": 0, "trainer.master_addr": "192.168.1.1"},
            {N_GPUS: 8, NODES: 2, "trainer.node_rank": 1, "trainer.master_addr": "192.168.1.1"},
        )
    ),
}  # fmt: skip


def read(block: str) -> str:
    (path,) = FOLDER.glob(f"{block}.*")
    return path.read_text(encoding="utf-8")


def plans(text: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield the variables and arguments of each plan: a command line, or settings in a row."""
    exported: dict[str, str] = {}
    loose: list[str] = []
    for line in [*re.sub(r"\\\n|\n(?=[ \t]+\w[\w.]*=)", " ", text).splitlines(), ""]:
        words = shlex.split(line, comments=True) if line.count('"') % 2 == 0 else []
        words = [expandvars(word) for word in words]
        if words and re.match(r"[a-z_]+\.[\w.]+=", words[0]):
            loose += words
            continue
        if loose:
            yield {}, loose
            loose = []
        if words[:1] == ["export"]:
            exported |= dict(word.split("=", 1) for word in words[1:])
        own = dict(exported)
        while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):
            name, _, value = words.pop(0).partition("=")
            own[name] = value
        script = words[:1] == ["bash"] or words[:1] == ["./train.sh"]
        module = words[:1] in (["python"], ["python3"]) and words[1:2] == ["-m"]
        if script or module:
            yield own, words[1 if words[0] == "./train.sh" else 2 if script else 3 :]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the documents' data, 8 visible GPUs, and no variable of a setting."""
    if not FOLDER.is_dir():
        pytest.skip("the documents' code blocks are not at hand")
    row = {"prompt": "What is 1 + 1?", "ground_truth": "2", "data_source": "openai/gsm8k"}
    for folder in ("data/gsm8k", "data/hh_rlhf", "data/gsm8k_processed"):
        (tmp_path / folder).mkdir(parents=True)
        for split, count in (("train", LARGEST_BATCH), ("test", 1)):
            rows = pa.Table.from_pylist([row] * count)
            pq.write_table(rows, tmp_path / folder / f"{split}.parquet")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "ppo_config.yaml").write_text(read("000_00"), encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(derived, "_devices_present", lambda root: GPUS)
    monkeypatch.setattr(tracker, "find_spec", lambda name: name)  # every logger is installed
    for name in ("CUDA_VISIBLE_DEVICES", *(key.env for key in table().values() if key.env)):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def planned(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Values, str]:
    """Return the values of a plan, or none and what the refusal says."""
    code = main(["plan", "--json", *args])
    out, err = capsys.readouterr()
    assert code in (0, 2), err
    if code == 2:
        return {}, err
    return {k: v["value"] for k, v in json.loads(out)["values"].items()}, ""


def differs(expected: Values | str, found: Values, refusal: str) -> str:
    """Say how an outcome is not the expected one; empty where it is."""
    if isinstance(expected, str):
        return "" if expected in refusal else f"not refused with {expected!r}: {refusal}"
    wrong = {k: found.get(k, refusal) for k, v in expected.items() if found.get(k) != v}
    return refusal or (f"{wrong}" if wrong else "")


def test_no_block_is_left_out() -> None:
    if not FOLDER.is_dir():
        pytest.skip("the documents' code blocks are not at hand")
    assert {path.stem for path in FOLDER.iterdir()} - {"README"} == set(BLOCKS)


def test_settings_plan_with_the_values_of_their_block(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {}
    for block, kind in BLOCKS.items():
        if isinstance(kind, Settings):
            (desk / "block.yaml").write_text(read(block), encoding="utf-8")
            found = planned(["--config", "block.yaml", *kind.beside], capsys)
            if wrong := differs(kind.values, *found):
                failed[block] = wrong
    assert failed == {}


def test_the_critics_settings_plan_without_a_gpu(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (desk / "block.yaml").write_text(read("002_11"), encoding="utf-8")
    assert planned(["--config", "block.yaml"], capsys)[1] == ""


def test_command_lines_plan_or_are_refused_for_the_right_reason(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {}
    for block, kind in BLOCKS.items():
        if not isinstance(kind, Lines):
            continue
        calls = list(plans(read(block)))
        if len(calls) != len(kind.outcomes):
            failed[block] = f"{len(calls)} lines"
        for number, (call, expected) in enumerate(zip(calls, kind.outcomes, strict=False)):
            variables, args = call
            with monkeypatch.context() as around:
                for name, value in variables.items():
                    around.setenv(name, value)
                found = planned(args, capsys)
            if wrong := differs(expected, *found):
                failed[f"{block} line {number + 1}"] = wrong
    assert failed == {}


def test_megatron_is_named_and_no_setting_of_the_sampler_is_suggested(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, args = list(plans(read("002_19")))[1]
    _, refusal = planned(args, capsys)
    keys = [arg.partition("=")[0] for arg in args if "megatron" in arg]
    assert len(keys) == 5
    named = [key.removeprefix("actor_rollout_ref.") for key in keys]
    assert [key for key in named if key not in refusal] == []
    assert "Did you mean" not in refusal and "rollout." not in refusal


def test_other_programs_and_texts_ask_nothing_of_this_one(desk: Path) -> None:
    quiet = [block for block, kind in BLOCKS.items() if kind in (TEXT, OTHER)]
    assert {block: calls for block in quiet if (calls := list(plans(read(block))))} == {}


def test_sketches_are_classes_and_functions(desk: Path) -> None:
    for block in [block for block, kind in BLOCKS.items() if kind == SKETCH]:
        bodies = ast.parse(read(block)).body
        assert {type(node) for node in bodies} <= {ast.ClassDef, ast.FunctionDef}, block


def test_the_rows_are_read_and_the_function_scores_them(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads(read("004_00"))
    (desk / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    assert main(["data", "check", "rows.json"]) == 0
    answered = [{**rows[0], "response": text} for text in ("so 42", "so 41")]
    (desk / "answered.json").write_text(json.dumps(answered), encoding="utf-8")
    own = "\n\ndef extract_final_answer(text):\n    return text.split()[-1]\n"
    (desk / "reward_functions.py").write_text(read("004_05") + own, encoding="utf-8")
    capsys.readouterr()
    line = "reward score answered.json --reward_function reward_functions.py --out scored.jsonl"
    assert main(line.split()) == 0
    scored = [json.loads(line) for line in Path("scored.jsonl").read_text().splitlines()]
    assert [row["score"] for row in scored] == [1.0, 0.0]
