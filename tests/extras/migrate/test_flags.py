"""Command lines of TRL and OpenRLHF, and of launchers, mean what they mean there."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from ppo_cli.cli.app import main
from ppo_cli.cli.flags import describe_unknown_flags, list_flag_keys
from ppo_cli.config.layers import DATA_FOLDER
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.keys import table
from ppo_cli.errors import ppo
from ppo_cli.extras.migrate.flags import (
    Translation,
    find_name,
    foreign_flags,
    load_foreign_flags,
    translate,
)
from ppo_cli.extras.migrate.tools import name_tool
from ppo_cli.extras.migrate.verl.translator import VERSION

# Tables with names that others have too.
OVERLAPPING = (
    "renamed", "values", "pointers", "with", "computed", "splits", "remarks", "defaults",
    "defaults_of", "marks", "programs",
)  # fmt: skip
RELEASES = json.loads((Path(__file__).parent / "foreign_releases.json").read_text())


def test_every_flag_of_other_programs_leads_to_what_there_is() -> None:
    known_names = {key.flag for key in table().values() if key.flag} | set(table())
    known_names |= {DATA_FOLDER, VERSION, "--config", "--debug", "--no_rm_gate", "--train_files"}
    flags = load_foreign_flags()
    several = " ".join(flags["several"].values()).split()
    targets = [*flags["aliases"].values(), *(word.partition("=")[0] for word in several)]
    targets += " ".join(flags["pairs"].values()).split()
    meanings = [
        *flags["switches"].values(),
        *(v for d in flags["values"].values() for v in d.values()),
    ]
    targets += [setting.partition("=")[0] for text in meanings for setting in text.split()]
    assert {target for target in targets if target not in known_names} == set()
    sentences = " ".join([*flags["pointers"].values(), *flags["ignored"].values()])
    names = re.findall(r"--\w+|[a-z_]+(?:\.[a-z_]+)+", sentences)
    groups = {name for key in table() for name in (key.rpartition(".")[0],)}
    files = {"metrics.jsonl", "generation_config.json", "chat_template.jinja"}
    unknown = {n for n in names if n not in known_names | groups and not any(n in f for f in files)}
    assert unknown == set()


def test_a_flag_of_another_program_is_in_one_table_and_is_not_ours() -> None:
    flags = load_foreign_flags()
    tables = [set(t) for name, t in flags.items() if name not in OVERLAPPING]
    names = [name for names in (*tables, set(flags["pointers"])) for name in names]
    assert {name for name in names if names.count(name) > 1} == set()
    assert set(names) & set(list_flag_keys()) == set()
    assert set(flags["renamed"].values()) <= {*names, *flags["values"], *list_flag_keys()}


CORRECTION = "algorithm.rollout_correction.rollout_is"


@pytest.mark.parametrize("release", RELEASES)
def test_every_flag_of_a_release_is_taken_or_answered(release: str) -> None:
    flags = load_foreign_flags()
    answered = set(list_flag_keys()).union(*flags.values())
    assert [name for name in RELEASES[release] if find_name(f"--{name}") not in answered] == []


def test_flags_of_huggingfaces_trainer_are_taken_or_answered() -> None:
    from transformers import TrainingArguments

    answered = set(list_flag_keys()).union(*load_foreign_flags().values()) | {"debug"}
    assert [f.name for f in fields(TrainingArguments) if f.name not in answered] == []


def test_what_changes_nothing_is_left_out_with_a_note() -> None:
    done = translate(
        ["--ds.zero_stage", "3", "--ckpt.save_hf", "--loss_type", "luspo", "--lr", "1"]
    )
    assert done.args == ["--lr", "1"]
    assert done.notes == [
        "--ds.zero_stage is left out: models are sharded with FSDP2.",
        "--ckpt.save_hf is left out: every checkpoint is a Hugging Face folder.",
    ]
    assert done.problems == [
        "--loss_type luspo is not offered; there are grpo, dapo, bnpo, dr_grpo, cispo, sapo."
    ]


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("CUDA_VISIBLE_DEVICES=0 python3 -m verl.trainer.main_ppo rollout.n=4", "rollout.n=4"),
        (
            "srun -N 2 accelerate launch --num_processes 8 --multi_gpu --config_file a.yaml ppo.py",
            "--n_gpus 8",
        ),
        (
            "nohup bash -c 'torchrun --nproc_per_node=gpu -m grpo_math --beta 0.04'",
            "actor.use_kl_loss=true actor.kl_loss_coef=0.04",
        ),
        (
            "python -m torch.distributed.run --nproc_per_node 2 t.py train --lr 1",
            "--n_gpus 2 --lr 1",
        ),
        (
            "RAY_ADDRESS=a ray job submit --working-dir . -- python openrlhf.cli.train_ppo_ray"
            " --rollout_batch_size 64 --n_samples_per_prompt 8 --train_batch_size 128",
            "--batch_size 64 --rollout_n 8 --mini_batch_size 16",
        ),
        (
            "--algo.advantage.estimator rloo --use_kl_loss --init_kl_coef 1e-3 --kl_estimator k3"
            " --max_epochs 2 --critic_learning_rate 1 --lambd 1",
            "algorithm.adv_estimator=rloo actor.use_kl_loss=true actor.kl_loss_coef=1e-3"
            " actor.kl_loss_type=k3 actor.ppo_epochs=2",
        ),
        ("--sft_model_path a --model_name_or_path b", "--model a"),
        ("--async_train --dynamic_filtering", "algorithm.filter_groups.enable=true"),
        ("--lora_target_modules q, v --push_to_hub", "model.target_modules=[q,v]"),
        (
            "accelerate launch --num_machines 2 --num_processes 8 grpo.py --num_generations 4"
            " --per_device_train_batch_size 2 --gradient_accumulation_steps 4"
            " --steps_per_generation 8 --beta 0 --loss_type grpo",
            "--nnodes 2 --n_gpus 4 --rollout_n 4 --batch_size 32 --mini_batch_size 16"
            " actor.ppo_micro_batch_size_per_gpu=2"
            " actor.use_kl_loss=false algorithm.use_kl_in_reward=false"
            " algorithm.adv_estimator=grpo actor.loss_agg_mode=seq-mean-token-mean",
        ),
        (
            "torchrun --nproc_per_node 2 ppo.py --per_device_train_batch_size 4"
            " --num_mini_batches 2 --total_episodes 100 --learning_rate 1",
            "--n_gpus 2 --batch_size 16 --mini_batch_size 8 actor.ppo_micro_batch_size_per_gpu=4"
            " critic.ppo_micro_batch_size_per_gpu=4 --max_steps 7 --lr 1 --critic_lr 1",
        ),
        ("--adam_beta2 0.99", "actor.optim.betas=[0.9,0.99] critic.optim.betas=[0.9,0.99]"),
        (
            "--dataset_name a/b --dataset_config c --dataset_train_split train"
            " --dataset_test_split test --eval_strategy steps",
            "--train_files a/b/c --val_files a/b/c:test",
        ),
        ("--prompt_data a.jsonl,b/c --prompt_split x", "--train_files a.jsonl b/c:x"),
        (
            "--remote_rm_url http://h:1/r",
            "reward.model.path=http://h:1/r reward.model.adapter=openrlhf",
        ),
        ("--use_wandb KEY --stop_token eos --label_key a", "--answer_key a"),
        ("--max_len 512 --max_new_tokens 128", "--max_prompt_length 384 --max_response_length 128"),
        ("learning_rate=1e-6, '' \u2014max_steps 5", "--lr 1e-6 --max_steps 5"),
        ("$ openrlhf.cli.train_ppo --actor.adam.lr 1", "--lr 1"),
        (
            "srun -w n bash -c 'pip install ray && ray job submit -- A=1 python x.py --lr 1'",
            "--lr 1",
        ),
        ("--reward.remote_url a/b.py --lr 1", "--reward_function=a/b.py:reward_func --lr 1"),
        ("--reward_funcs my.rewards.f", "--reward_function=my.rewards:f"),
        ("--adv_estimator ppo --critic_lr 1", "--adv_estimator=gae --critic_lr 1"),
        (
            "--reward_funcs my.f accuracy_reward g.f --reward_weights 0.5 2 1",
            "reward.composite.parts.f.kind=rule reward.composite.parts.f.function=my:f "
            "reward.composite.parts.f.scaling=none reward.composite.parts.f.weight=0.5 "
            "reward.composite.parts.accuracy_reward.kind=rule "
            "reward.composite.parts.accuracy_reward.rule=math "
            "reward.composite.parts.accuracy_reward.scaling=none "
            "reward.composite.parts.accuracy_reward.weight=2 reward.composite.parts.f_2.kind=rule "
            "reward.composite.parts.f_2.function=g:f reward.composite.parts.f_2.scaling=none "
            "reward.composite.parts.f_2.weight=1",
        ),
        ("--logger.wandb_project p --freezing_actor_steps -1", "trainer.project_name=p"),
        ("--vllm_importance_sampling_correction false", f"{CORRECTION}=off"),
        (
            "--vllm_importance_sampling_mode sequence_mask",
            f"{CORRECTION}=sequence {CORRECTION}_threshold_lower=1e-9",
        ),
        (
            "--vllm_importance_sampling_mode token_mask --vllm_importance_sampling_clip_min 0.5",
            f"{CORRECTION}=token {CORRECTION}_threshold_lower=0.5",
        ),
    ],
)
def test_a_line_of_another_program_means_what_it_means_there(line: str, arguments: str) -> None:
    # A script that names no prompts is refused.
    done = translate(shlex.split(re.sub(r"\.py\b( train)?", r".py\1 --data_path rows", line)))
    arguments_here = [argument for argument in done.args if argument != "data.path=rows"]
    assert (arguments_here[-len(arguments.split()) :], done.problems) == (arguments.split(), [])


@pytest.mark.parametrize(
    ("line", "arguments", "defaults"),
    [
        (
            "trl grpo --max_completion_length 64 --batch_size 4 --mini_batch_size 4",
            "--adv_estimator grpo --max_response_length 64 --batch_size 4 --mini_batch_size 4",
            "algorithm.rollout_correction.rollout_is_threshold=3"
            " actor.optim.lr_scheduler_type=linear rollout.n=8 actor.use_kl_loss=false"
            " algorithm.use_kl_in_reward=false actor.loss_agg_mode=token-mean"
            " trainer.total_epochs=3 actor.optim.weight_decay=0.0 actor.clip_ratio_c=null",
        ),
        (
            "--pretrain m --advantage_estimator rloo --lr_scheduler constant --l2 0.1"
            " --prompt_max_len 8 --rollout_batch_size 8 --train_batch_size 4 --adam_betas 1 2"
            " --input_key q --apply_chat_template --data.max_len 16 --init_kl_coef 0",
            "--model m algorithm.adv_estimator=rloo"
            " actor.optim.lr_scheduler_type=constant actor.optim.weight_decay=0.1"
            " --max_prompt_length 8 --batch_size 8 --mini_batch_size 4 actor.optim.betas=[1,2]"
            " data.prompt_key=q data.apply_chat_template=true --data.max_len 16"
            " algorithm.use_kl_in_reward=true --kl_coef 0",
            "actor.optim.lr_warmup_steps_ratio=0.03 reward.shaping.reward_clip=10"
            " actor.clip_ratio_c=null",
        ),
        (
            "trl grpo --use_peft --lora_r 8 --beta 0 --loss_type grpo --max_completion_length 1"
            " --num_train_epochs 1 --batch_size 1 --weight_decay 0",
            "--lora_rank 8 actor.use_kl_loss=false"
            " algorithm.use_kl_in_reward=false algorithm.adv_estimator=grpo"
            " actor.loss_agg_mode=seq-mean-token-mean --max_response_length 1 --epochs 1"
            " --batch_size 1 actor.optim.weight_decay=0",
            "algorithm.rollout_correction.rollout_is_threshold=3 model.lora_alpha=32"
            " actor.optim.lr_scheduler_type=linear rollout.n=8 actor.clip_ratio_c=null",
        ),
        (
            "trl ppo --use_peft --lora_alpha 8 --response_length 9 --batch_size 2 --lr 1",
            "--lora_alpha 8 --max_response_length 9 --batch_size 2 --lr 1",
            "algorithm.lam=0.95 model.lora_rank=16 actor.optim.lr_scheduler_type=linear"
            " critic.optim.lr_scheduler_type=linear algorithm.kl_ctrl.kl_coef=0.05"
            " actor.ppo_epochs=4 critic.ppo_epochs=4 rollout.temperature=0.7"
            " critic.cliprange_value=0.2 trainer.total_epochs=3"
            " actor.optim.weight_decay=0.0 critic.optim.weight_decay=0.0 actor.clip_ratio_c=null",
        ),
        ("--num_generations 4", "--adv_estimator grpo --rollout_n 4", ""),
        (
            "python main_grpo.py actor.optim.lr=1 data.path=a",
            "--adv_estimator grpo actor.optim.lr=1 data.path=a",
            "",
        ),
    ],
)
def test_what_a_whole_line_of_another_program_leaves_out_is_as_there(
    line: str, arguments: str, defaults: str
) -> None:
    done = translate(line.split())
    settings = [f"{key}={value}" for key, (value, _) in done.defaults.items()]
    assert (done.args, settings) == (arguments.split(), defaults.split())


def follow_advice(line: list[str], text: str) -> list[str]:
    """Return a line after what its messages say: what they refuse is left out, what they name set.

    The first of two ways is taken; MODEL and FILE, which only users know, are the bundled ones.
    """
    for message in text.splitlines():
        if command := re.search(r"`[^`]* train (--preset [^`]*)`", message):
            return re.sub(r"\b(MODEL|FILE)\b", "embedded", command[1]).split()
        problem, _, advice = message.partition(": use " if ": use " in message else ". Use ")
        name = r"--[\w.]+|\w+(?:\.\w+)+"
        left_out = re.findall(r"leave out (.*)", advice)
        refused = set(re.findall(name, " ".join([problem, *left_out])))
        rest, line = line, []
        while rest:
            word, *rest = rest
            values = list(itertools.takewhile(lambda w: w[:2] != "--" and "=" not in w, rest))
            values = values if word.startswith("--") else []
            rest = rest[len(values) :]
            key = word.partition("=")[0].lstrip("+")
            if key.removeprefix("actor_rollout_ref.") not in refused:
                line += [word, *values]
        both = 2 if re.search(r"=\w+, and \w", advice) else 1
        line += re.findall(r"--\w+ [\d.]+|[\w.]+=[a-z\d.]+|--preset \w+", advice)[:both]
        line = " ".join(line).split()
    return line


TRL = "trl grpo --model_name_or_path embedded --max_completion_length 32"
OPENRLHF = (
    "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path embedded --data.input_key"
    " prompt --data.prompt_dataset embedded --rollout.n_samples_per_prompt 4"
)
VERL = (
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=embedded"
    " data.train_files=embedded data.val_files=embedded"
)
LINES = [
    *(f"{TRL} --loss_type {loss}" for loss in ("grpo", "dr_grpo", "cispo", "sapo --epsilon 0.1")),
    f"{TRL} --importance_sampling_level sequence --loss_type bnpo --delta 5 --use_peft",
    f"{TRL} --scale_rewards none --mask_truncated_completions",
    f"{TRL} --epsilon 1.5 --beta -0.1 --num_train_epochs 0 --adam_beta2 1",
    f"{TRL} --report_to swanlab",
    "python rloo.py --rloo_k 4 --sft_model_path embedded --dataset_name embedded --stop_token eos",
    "distillation.py --model_name_or_path embedded --teacher_model_name_or_path a --beta 1",
    f"{OPENRLHF} --actor.policy_loss_type gspo --algo.advantage.estimator group_norm",
    OPENRLHF.replace(
        "--data.input_key prompt --data.prompt_dataset embedded", "--prompt_data a.jsonl"
    ),
    f"{OPENRLHF} --algo.kl.target 6 --ds.lora.rank 8 --ds.lora.dropout 0.1",
    f"{VERL} algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=gspo"
    " actor_rollout_ref.rollout.n=4",
    f"{VERL} algorithm.adv_estimator=grpo distillation.enabled=true distillation.num_workers=8",
    f"{VERL} reward.reward_model.rollout.prompt_length=8 reward.reward_model.enable=false",
    f"{VERL} trainer.logger=['console','swanlab']",
    f"{VERL} +trainer.logger=[console,mlflow,clearml]",
]


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_another_program_is_planned_after_two_rounds_of_advice(
    line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_folder("embedded"), "TEACHER")
    row = {"prompt": [{"role": "user", "content": "1+1"}], "data_source": "ppo-cli/arithmetic"}
    Path("a.jsonl").write_text(4 * f"{json.dumps(row | {'ground_truth': '2'})}\n")
    arguments = line.split()
    for _ in range(2):
        if main(["plan", *arguments]) == 0:
            return
        arguments = follow_advice(arguments, capsys.readouterr().err)
    assert main(["plan", *arguments]) == 0, arguments


SCRIPT = """
import reward_lib
if short:
    c = GRPOConfig(output_dir="o", learning_rate=1, per_device_train_batch_size=4, beta=-0.0,
        num_generations=2, dataset_num_proc=8, reward_model=policy)
    c.learning_rate = 1e-5
RATE = 1e-6
c.learning_rate = RATE
training_args.num_generations = 4
c.reward_weights = [2.0]
tok.model_name_or_path = "hello"
GRPOTrainer(model="{model}", args=c, reward_funcs=[score], train_dataset={data}).train()
"""


def test_a_script_is_refused_with_the_line_that_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = 'load_dataset("embedded", split="train")'
    Path("a.py").write_text(SCRIPT.format(model="embedded", data=data))
    files = 'load_dataset("json", data_files="rows")'
    Path("b.py").write_text(SCRIPT.format(model="", data=files))
    Path("d.py").write_text(SCRIPT.format(model="", data=f"{files}.map(str)"))
    Path("score.py").write_text("def compute_score(**row): return 1.0")
    for script, names in (
        ("a.py", ""),
        ("b.py", " --dataset_name rows "),
        ("c.py", "--train_files FILE --model MODEL"),
        ("d.py", " --train_files rows.jsonl "),
    ):
        assert main(["plan", "accelerate", "launch", script]) == 2
        message = capsys.readouterr().err
        line = re.search(r"ppo train (.*)", message)
        assert line and f"{script} is not read" in message and names in line[1], message
    assert main(["plan", "python", "a.py"]) == 2
    line = re.search(r"ppo train (.*)", capsys.readouterr().err)
    assert line
    arguments = line[1].replace("FILE.py:score", "score.py").split()
    assert main(["plan", *arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    assert [values[key]["value"] for key in ("actor.optim.lr", "rollout.n", "model.path")] == [
        1e-6, 4, "embedded",
    ]  # fmt: skip
    assert len(translate(["--reward_funcs", "a.f", "--reward_weights", "1", "2"]).problems) == 1


TOOL_LINES = (
    ("uv run -m skyrl_train.entrypoints.main trainer.max_steps=7", "SkyRL", "--max_steps 7"),
    ("uv run examples/run_grpo_math.py grpo.num_prompts_per_step=4", "NeMo-RL", "--batch_size 4"),
    ("--config nemo.yaml", "NeMo-RL", "--lr 5e-06 --max_prompt_length 7 --kl_coef"),
    ("a.py --hf-checkpoint m --advantage-estimator ppo", "slime", "--adv_estimator gae --train"),
    ("a.py --hf-checkpoint m --advantage-estimator none", "slime", "--model m --train_files FILE"),
    ("swift rlhf --rlhf_type grpo --dataset a/b#500", "ms-swift", "--train_files a/b"),
    ("axolotl train axolotl.yml", "axolotl", "--model m --train_files o/d"),
    ("llamafactory-cli train a.yaml", "LLaMA-Factory", "--model MODEL"),
    ("python a.py --stage ppo --finetuning_type full --lr 1", "LLaMA-Factory", "--lr 1"),
    ("uv run rl @ a.toml", "prime-rl", "--model MODEL"),
    (
        "rl @ a.toml --orchestrator.batch-size 256 --orchestrator.group-size=8", "prime-rl",
        "--rollout_n 8 --batch_size 32",
    ),
    ("vf-rl @ vf.toml", "verifiers", "--rollout_n 4 --batch_size 3"),
    (
        "tune run --nproc_per_node 2 grpo_full batch_size=36 grpo_size=4 num_steps=5", "torchtune",
        "--batch_size 72 --rollout_n 4 --max_steps 5 --mini_batch_size 72",
    ),
    ("bash run.sh", "slime", "--model m"),
    ("run.py --config vf.toml", "verifiers", "--model m --rollout_n 4 --batch_size 3"),
    ("unsloth studio", "Unsloth", "--model MODEL"),
    ("soup train --config soup.yaml", "Soup", "--model MODEL"),
    ("tune run --nproc_per_node 2 ppo_full_finetune temperature=0.7", "torchtune", "--temperature"),
    ("RL2.trainer.ppo train_data.path=train@a/b:c", "RL2", "--train_files a/b/c:train"),
    ("open_instruct/grpo.py --num_epochs 9", "open-instruct", "--ppo_epochs 9"),
    ("grpo.py --dataset_mixer_list a/b 1.0 c/d 8", "open-instruct", "--train_files a/b c/d"),
    (
        "python3 -m areal.launcher.local a.py --config nothing.yaml gconfig.n_samples=4"
        " +train_dataset.batch_size=8 actor.path=m", "AReaL", "--rollout_n 4 --batch_size 8",
    ),
    ("a.py allocation_mode=sglang:d2 gconfig.max_new_tokens=9", "AReaL", "--max_response_length 9"),
    ("grpo.py --dataset_mixer_list 1.0", "open-instruct", "--model MODEL --train_files FILE"),
)  # fmt: skip


@pytest.mark.parametrize(("line", "tool", "settings"), TOOL_LINES)
def test_a_line_of_another_tool_is_named_and_its_plain_settings_are_taken(
    line: str, tool: str, settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text("python train.py --hf-checkpoint m")
    Path("nemo.yaml").write_text(
        "policy: {optimizer: {kwargs: {lr: 5.0e-6}}, max_total_sequence_length: 7}\n"
        "data: {max_input_seq_length: '${policy.max_total_sequence_length}', a: '${b}'}\n"
        "loss_fn: {reference_policy_kl_penalty: 0.01}\ncluster: {}\n"
    )
    Path("vf.toml").write_text(
        "model = 'm'\nenv.id = 'e'\n[trainer.args]\nbatch_size = 12\nnum_generations = 4\n"
    )
    Path("axolotl.yml").write_text("base_model: m\ndatasets: [{path: o/d, type: x}]\nrl: grpo\n")
    (problem,) = translate(shlex.split(line)).problems
    assert problem.startswith(f"This is a line of {tool}")
    assert settings in problem and len(problem.splitlines()) < 20
    ready = re.search(r"train (.*)", problem.splitlines()[1])
    assert ready and translate(shlex.split(ready[1])).problems == []


@pytest.mark.parametrize(
    "line",
    [
        "--output_dir runs/llamafactory --lr 1", "--train_files open_instruct/unsloth --lr 1",
        "--reward_function=slime/train.py:f --lr 1", "trainer.experiment_name=axolotl --lr 1",
        "python3 -m verl.trainer.main_ppo --config verl.yaml",
    ],
)  # fmt: skip
def test_the_values_of_our_own_line_are_no_tool(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("verl.yaml").write_text("actor_rollout_ref: {}\nenv: {}\ntrainer: {}\n")
    assert name_tool(line.split()) == ""


@pytest.mark.parametrize(
    ("line", "method"),
    [
        ("swift rlhf --rlhf_type dpo --lr 1", "dpo"), ("NPROC=2 megatron sft --lr 1", "sft"),
        ("llamafactory-cli train --stage sft", "sft"), ("uv run examples/run_dpo.py", "dpo"),
        ("axolotl train axolotl.yml", "sft"), ("tune run --nnodes 1 lora_dpo lr=1", "lora_dpo"),
        ("accelerate launch --multi_gpu open_instruct/finetune.py", "finetune"),
        ("python unsloth-cli.py --r 8", "sft"), ("torchrun -m RL2.trainer.sft", "sft"),
    ],
)  # fmt: skip
def test_another_method_of_another_tool_gets_no_line(
    line: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("axolotl.yml").write_text("base_model: m\ndatasets: [{path: o/d}]\n")
    problem = name_tool(line.split())
    assert f"`{method}` is not offered" in problem and "ppo train" not in problem


@pytest.mark.parametrize("program", ["trl sft", "trl reward", "python dpo_online.py"])
def test_a_program_that_does_something_else_is_refused(program: str) -> None:
    done = translate([*program.split(), "--model_name_or_path", "m"])
    assert (done.args, len(done.problems)) == ([], 1)


def test_a_yaml_file_of_trl_is_read_as_its_flags(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "model_name_or_path: m\nnum_generations: 4\nlora_target_modules: [q, v]\nmax_steps: -1\n"
    )
    args = translate(["trl", "grpo", "--config", f"{tmp_path}/a.yaml", "--seed", "1"]).args
    assert " ".join(args).endswith("--model m --rollout_n 4 model.target_modules=[q,v] --seed 1")


def test_a_flag_of_the_script_alone_is_called_so_and_one_of_a_library_is_mistyped() -> None:
    line = Translation(program="grpo", path="grpo")
    assert describe_unknown_flags(["--use_vlm"], [], [line]) == [
        "there is no flag --use_vlm. Did you mean '--use_vllm'?"
    ]
    assert describe_unknown_flags(["--machine_name"], [], [Translation(program="a.py")]) == [
        f"there is no flag --machine_name, which only a.py has; see `{ppo('explain')} NAME`."
    ]


def test_a_name_that_is_nearly_another_programs_is_only_a_guess() -> None:
    line = Translation(program="a.py")
    assert describe_unknown_flags(["--use_adora", "--kl_loss_coef"], [], [line]) == [
        "there is no flag --use_adora, which only a.py has, unless '--use_dora' is meant; see "
        f"`{ppo('explain')} NAME`.",
        "there is no flag --kl_loss_coef, which only a.py has, unless 'actor.kl_loss_coef' is "
        f"meant; see `{ppo('explain')} NAME`.",
    ]


def test_flags_with_the_same_advice_are_refused_in_one_sentence() -> None:
    unknown = ["--vllm_server_host", "--vllm_server_port", "--algo.advantage.is_correction_mod"]
    first, second = describe_unknown_flags(unknown, [], [Translation()])
    assert first.startswith("there is no flag --vllm_server_host, --vllm_server_port: vLLM is")
    assert second.endswith("Did you mean '--is_correction_mode'?")


def test_every_flag_of_another_program_has_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in sorted(foreign_flags()):
        assert main(["explain", f"--{flag}"]) == 0, flag
    for flag, answer in (
        ("--lr_scheduler", "cosine: actor.optim.lr_scheduler_type=cosine"),
        ("--actor.eps_clip", "--clip_ratio"), ("--zero_stage", "left out"),
    ):  # fmt: skip
        capsys.readouterr()
        main(["explain", flag])
        assert answer in capsys.readouterr().out
