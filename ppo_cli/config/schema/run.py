"""The schema of a run: every key with its default, range, help, flag and variable.

The names are verl's without the `actor_rollout_ref.` wrapper. Defaults are declared here alone.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, WithJsonSchema

from ppo_cli.addresses import check_data_files, check_store, refuse_address
from ppo_cli.algo.estimators import ESTIMATORS
from ppo_cli.config.choices import (
    choose_compiled,
    choose_dtype,
    choose_engine,
    choose_gpus,
    choose_matmul,
    choose_on_hacking,
    choose_sampler,
    choose_samplers,
    choose_save_freq,
    choose_shared_prompts,
    choose_spread,
    choose_threads,
    choose_transfer,
    choose_workers,
)
from ppo_cli.config.schema.algorithm import (
    Actor,
    Algorithm,
    Conflict,
    Critic,
    Identity,
    NotZero,
    Ref,
    Section,
    Sharding,
    checked,
    section,
    setting,
)
from ppo_cli.config.schema.environment import Environment
from ppo_cli.config.schema.reward import Reward, check_address, check_variable_name
from ppo_cli.config.schema.unset import Chosen, Fitted, Follows
from ppo_cli.plugins import Names, runs_elsewhere
from ppo_cli.secrets.patterns import is_mixed

# The model that a run trains when none is named and a GPU is there.
DEFAULT_MODEL = "Qwen/Qwen2.5-0.5B"
# How weights travel to vLLM, and where they are while a shared GPU trains.
Transfer = Literal["memory", "gloo", "nccl", "ipc"]
Sleep = Literal["keep", "offload", "discard"]


def _check_alert(text: str) -> None:
    """Raise ValueError for what is neither an address to post to nor the name of a variable."""
    if "://" not in text:
        return check_variable_name(text)
    check_address(text)
    path = text.partition("://")[2].partition("/")[2]
    # The path of a webhook is its password, and settings are written to files.
    if "@" in text or any(len(part) >= 8 and is_mixed(part) for part in re.split(r"[/?&=]", path)):
        raise ValueError(
            "holds a secret: put the address into a variable, and give the variable's name, such "
            "as --alert ALERT_URL"
        )
    return None


class Model(Section):
    """The model to train."""

    # The model and the precision that it computes in.
    path: Annotated[str, checked(refuse_address)] = setting(
        DEFAULT_MODEL, "Model folder or hub name.", flag="--model", env="MODEL_PATH", min_length=1,
        identity="checkpoint", common=True,
    )  # fmt: skip
    dtype: Literal["float32", "bfloat16", "float16"] = setting(
        Chosen(
            choose_dtype,
            "bfloat16 on a GPU that has it, and for a wide model in one process on a CPU with "
            "AVX512-BF16 or AMX; float16 on an older GPU if the self-test has proven it; else "
            "float32",
        ),
        "Precision of the computation.", flag="--dtype",
    )  # fmt: skip
    float32_matmul: Literal["blas", "onednn"] = setting(
        Chosen(
            choose_matmul,
            "onednn on AMD CPUs with full-width AVX-512 (Zen 5 and later), where torch's BLAS "
            "(MKL) reaches half the speed; else blas",
        ),
        "Library that multiplies float32 matrices on the CPU.", identity="start",
        unused="nothing_in_float32",
    )  # fmt: skip
    spread_weights: bool = setting(
        Chosen(choose_spread, "on the CPU"),
        "Vary trained weights within bfloat16 rounding, so that small updates count from the "
        "first step.", unused="nothing_to_spread",
    )  # fmt: skip
    float32_head: bool = setting(
        False,
        "Compute logits in float32, in trainer and sampler: a smaller gap between both, for a "
        "slower output layer.", unused="nothing_in_bfloat16",
    )  # fmt: skip
    enable_gradient_checkpointing: bool = setting(
        Fitted("if memory is short"),
        "Recompute activations in the backward pass to save memory.", identity="start",
    )  # fmt: skip
    trust_remote_code: bool = setting(
        False, "Run Python code that comes with the model.", identity="start", consent=True
    )
    # LoRA.
    lora_rank: int = setting(
        0, "Rank of the LoRA adapter; 0 trains all weights.", flag="--lora_rank", ge=0,
        identity="checkpoint", common=True,
    )  # fmt: skip
    lora_alpha: float = setting(
        16.0, "The scale of the LoRA adapter is alpha / rank.", flag="--lora_alpha", gt=0,
        unused="no_lora",
    )  # fmt: skip
    target_modules: str | tuple[str, ...] = setting(
        "all-linear",
        "Modules that LoRA adapts: all-linear, names (of experts and routers too), or a "
        "pattern.", identity="checkpoint", unused="no_lora",
    )  # fmt: skip
    quantization: Literal["nf4"] | None = setting(
        None, "Store the linear layers under the adapter in 4 bits (QLoRA); needs bitsandbytes.",
        absent="not in 4 bits", flag="--quantization", identity="checkpoint",
    )  # fmt: skip
    lora_merge: bool = setting(
        False, "Send merged weights to the sampler instead of the adapter.", identity="start",
        unused="no_adapter_sent",
    )  # fmt: skip
    # How a learner computes.
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] | None = setting(
        Fitted("sdpa for families in which it gives the same numbers as eager, else eager"),
        "Attention kernel.", identity="start",
    )  # fmt: skip
    packing: bool | None = setting(
        Fitted(
            "for families with plain attention; on a GPU after a passed self-test (ppo doctor "
            "--self-test)"
        ),
        "Concatenate the rows of a micro-batch without padding.", identity="start",
    )  # fmt: skip
    share_prompts: bool = setting(
        Chosen(choose_shared_prompts, "on the CPU, and on GPUs if the self-test has proven it"),
        "Compute a prompt once for all its responses in a packed micro-batch, except in "
        "attention.", identity="start", unused="nothing_to_share",
    )  # fmt: skip
    compile_layers: bool = setting(
        Chosen(choose_compiled, "on GPUs if the self-test has proven it"),
        "Fuse the kernels of each layer with torch.compile; the first step takes longer.",
        identity="start",
    )  # fmt: skip

    @property
    def widens_head(self) -> bool:
        """Whether the output layer computes in more precision than the others."""
        return self.float32_head and self.dtype != "float32"

    @property
    def publishes_adapter(self) -> bool:
        """Whether samplers receive the LoRA adapter alone."""
        return self.lora_rank > 0 and not self.lora_merge


class Data(Section):
    """Prompts in."""

    # Files and batches.
    train_files: Annotated[tuple[str, ...], checked(check_data_files)] = setting(
        (), "Training prompts: files or hub sets.", flag="--train_files", env="PPO_TRAIN_FILES",
        files=True, identity="checkpoint", common=True,
    )  # fmt: skip
    val_files: Annotated[tuple[str, ...], checked(check_data_files)] = setting(
        (), "Validation prompts: files or hub sets.", flag="--val_files", env="PPO_VAL_FILES",
        files=True, common=True,
    )  # fmt: skip
    train_batch_size: int = setting(
        256, "Prompts per step.", flag="--batch_size", env="PPO_BATCH_SIZE", ge=1,
        identity="checkpoint", common=True,
        advice="Raise it if the reward curve is noisy; lower it if steps take too long. 128 to "
        "512 is usual.",
    )  # fmt: skip
    gen_batch_size: int = setting(
        Follows("data.train_batch_size"),
        "Prompts sampled at once with algorithm.filter_groups.",
        ge=1,
    )
    # Lengths in tokens, and prompts that are too long.
    max_prompt_length: int = setting(
        512, "Maximum prompt, in tokens.", flag="--max_prompt_length", env="PPO_MAX_PROMPT_LENGTH",
        ge=1, common=True,
        advice="`ppo data check FILE` prints the lengths of your prompts; take the largest, or "
        "drop longer prompts with data.filter_overlong_prompts=true.",
    )  # fmt: skip
    max_response_length: int = setting(
        512, "Maximum response, in tokens.", flag="--max_response_length",
        env="PPO_MAX_RESPONSE_LENGTH", ge=1, common=True,
        advice="Raise it if responses are cut off and good answers need the length; lower it "
        "if sampling takes too long or only length grows.",
    )  # fmt: skip
    filter_overlong_prompts: bool = setting(
        False, "Drop prompts longer than max_prompt_length, with a note."
    )
    truncation: Literal["error", "left", "right"] = setting(
        "error",
        "Treatment of a prompt that is too long: stop, or cut its start (left) or end (right).",
    )  # fmt: skip
    shuffle: bool = setting(
        True, "Shuffle the prompts in each epoch, by the seed.", identity="checkpoint"
    )
    system_prompt: str | None = setting(
        None, "System message for prompts without one.", absent="none is added",
        flag="--system_prompt",
    )  # fmt: skip
    # How a row becomes a prompt.
    prompt_key: str = setting(
        "prompt", "Column that holds the prompt; a dotted name is a key inside a column."
    )
    answer_key: str | None = setting(
        None, "Column that holds the ground truth, as prompt_key; unset: found by its name.",
        absent="ground_truth, reward_model.ground_truth, answer, solution, label and others",
        flag="--answer_key",
    )  # fmt: skip
    reward_fn_key: str = setting("data_source", "Column that selects the rule.")
    apply_chat_template: bool = setting(True, "Render prompts with the chat template.")
    apply_chat_template_kwargs: dict[str, Any] = setting(
        {}, "Arguments of the chat template, such as {enable_thinking: false}."
    )
    # Less than all rows, for trials.
    train_max_samples: NotZero = setting(
        -1, "Use only the first N training rows; -1 is all.", ge=-1
    )
    val_max_samples: int = setting(
        -1, "Use only the first N validation rows; -1 is all.", ge=-1, unused="no_validation"
    )

    @property
    def keys(self) -> dict[str, Any]:
        """The names of columns, as what reads rows takes them."""
        return {
            "prompt_key": self.prompt_key,
            "source_key": self.reward_fn_key,
            "answer_key": self.answer_key,
        }


class ValSampling(Section):
    """How validation samples."""

    temperature: float = setting(
        0.0, "Sampling temperature in validation; 0 is greedy.", ge=0.0, le=10.0
    )
    top_p: float = setting(
        1.0, "Nucleus sampling in validation: share of the probability; 1 is off.", gt=0.0, le=1.0
    )
    top_k: int = setting(-1, "Candidates per token in validation; -1 is off.", ge=-1)
    n: int = setting(1, "Responses per prompt in validation.", ge=1)


def _drop_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """Drop arguments that are null: verl's files write unset arguments like that."""
    return {name: value for name, value in values.items() if value is not None}


class EngineKwargs(Section):
    """Arguments of the samplers' own engines."""

    vllm: Annotated[dict[str, Any], AfterValidator(_drop_nulls)] = setting(
        {}, "Further arguments of vLLM's EngineArgs, such as {max_num_partial_prefills: 2}.",
        unused="hf_sampler",
    )  # fmt: skip


def _check_stop_texts(stop: tuple[str, ...]) -> None:
    if "" in stop:
        raise ValueError("has an empty text, which would end every response at once")


class Rollout(Section):
    """How training samples."""

    # Which sampler, and how it draws.
    name: Literal["hf", "vllm", "sglang", "trtllm"] = setting(
        Chosen(choose_sampler, "vllm on GPUs if it is installed and there are several, else hf"),
        "Sampler.", flag="--rollout_name",
    )  # fmt: skip
    n: int = setting(
        1, "Responses per prompt.", flag="--rollout_n", env="ROLLOUT_N", ge=1, common=True,
        advice="With a critic 1 is enough; grpo and other group estimators need 4 to 16. Raise "
        "it if few responses are right; lower it if sampling takes too long.",
    )  # fmt: skip
    temperature: float = setting(
        1.0, "Sampling temperature.", flag="--temperature", env="ROLLOUT_TEMPERATURE",
        usual=(0.3, 1.5), gt=0.0, le=10.0,
        advice="Keep 1.0. Raise it if all responses to a prompt are alike; lower it if "
        "responses are noise.",
    )  # fmt: skip
    top_p: float = setting(
        1.0, "Nucleus sampling: share of the probability; 1 is off.", flag="--top_p", gt=0.0, le=1.0
    )
    top_k: int = setting(-1, "Candidates per token; -1 is off.", flag="--top_k", ge=-1)
    stop: Annotated[tuple[str, ...], checked(_check_stop_texts)] = setting(
        (), "Texts that end a response, in validation too, such as [Observation:]. The response "
        "keeps the text.",
    )  # fmt: skip
    partial_tokens: int | None = setting(
        None, "Maximum tokens of a response sampled ahead between two updates; longer ones "
        "continue with newer weights.", absent="updates wait until all responses are complete",
        flag="--partial_tokens", ge=1,
    )  # fmt: skip
    tensor_model_parallel_size: int = setting(
        1, "GPUs per sampler.", flag="--rollout_tp", env="ROLLOUT_TP_SIZE", ge=1, identity="start"
    )
    # Speed and memory of the sampler.
    gpu_memory_utilization: float = setting(
        0.5, "Share of GPU memory for the sampler.", flag="--gpu_memory_utilization",
        env="GPU_MEMORY_UTILIZATION", gt=0.0, le=1.0, identity="start", unused="hf_sampler",
    )  # fmt: skip
    num_samplers: int | None = setting(
        Chosen(choose_samplers, "one"), "Sampler processes on CPUs.", flag="--num_samplers", ge=1,
        identity="start", unused="on_gpus",
    )  # fmt: skip
    max_num_seqs: int = setting(256, "Maximum sequences sampled at once.", ge=1, identity="start")
    max_num_batched_tokens: int = setting(
        8192, "Token budget of a sampler's batch.", ge=16, identity="start", unused="hf_sampler"
    )
    enforce_eager: bool = setting(
        False, "Do not use compiled graphs in the sampler.", identity="start", unused="hf_sampler"
    )
    enable_prefix_caching: bool = setting(
        True, "Share the key-value cache of equal prompts.", identity="start", unused="hf_sampler"
    )
    # How the sampler gets new weights.
    weight_transfer: Transfer = setting(
        Chosen(
            choose_transfer,
            "nccl, or ipc on shared GPUs, if the self-test has proven it; else memory",
        ),
        "How new weights reach vLLM.", identity="start",
    )  # fmt: skip
    sleep: Sleep = setting(
        Fitted("discard if the self-test has passed, else keep if they fit, else offload"),
        "Place of vLLM's weights while a shared GPU trains: keep (on the GPU), offload (host "
        "memory), discard (sent again later).", identity="start",
    )  # fmt: skip
    engine_kwargs: EngineKwargs = section(EngineKwargs)
    seed: int = setting(Follows("trainer.seed"), "Seed of the sampler.", ge=0)
    val_kwargs: ValSampling = section(ValSampling)


# Steps are checked as text, because ranges are kept as they are written.
def _check_steps(steps: tuple[str, ...]) -> None:
    """Raise ValueError for words that are neither a step nor a range of steps."""
    for word in steps:
        first, dash, last = word.partition("-")
        numbers = [first, last] if dash else [first]
        readable = all(n.isascii() and n.isdigit() and int(n) > 0 for n in numbers)
        if not readable or int(numbers[-1]) < int(first):
            raise ValueError(
                f"{word!r} names no steps; use a number from 1, a list (2,5) or a range (2-4)"
            )


_ENGINES = Names({"local": "one process", "ray": "several"}, "engines")
EngineName = Annotated[str, _ENGINES, checked(_ENGINES.read), WithJsonSchema(_ENGINES.schema)]


class Trainer(Section):
    """The run: how long, where to, on what."""

    identity: ClassVar[Identity] = "start"
    # Length of the run.
    total_epochs: int = setting(
        1, "Passes over the training prompts.", flag="--epochs", env="PPO_TOTAL_EPOCHS", ge=1,
        common=True,
    )  # fmt: skip
    total_training_steps: int | None = setting(
        None, "Stop after this number of steps.", absent="all epochs", flag="--max_steps",
        env="PPO_MAX_STEPS", ge=1, common=True,
    )  # fmt: skip
    critic_warmup: int = setting(
        0, "First steps that train only the critic.", ge=0, identity="run",
        advice="critic.pretrain_steps does this before the first step, with unbiased targets.",
    )  # fmt: skip
    # The run folder, and what happens to an earlier run in it.
    output_dir: str = setting(
        "./outputs", "Run folder, or s3://NAME of a copy.", flag="--output_dir",
        env="PPO_OUTPUT_DIR", min_length=1, common=True,
    )  # fmt: skip
    store: Annotated[str | None, checked(check_store)] = setting(
        None, "Address that keeps a copy of the run folder. --output_dir s3://bucket/run sets it.",
        absent="no copy",
    )  # fmt: skip
    resume_mode: Annotated[str, checked(refuse_address)] = setting(
        "auto", "auto, never, or a checkpoint folder.", flag="--resume", common=True
    )
    seed: int = setting(
        42, "Seed of sampling, order and new weights.", flag="--seed", env="PPO_SEED", ge=0,
        lt=2**31, identity="checkpoint", common=True,
    )  # fmt: skip
    # Cadence of checkpoints and validations.
    save_freq: NotZero = setting(
        Chosen(choose_save_freq, "50, with --on_hacking restrain a twentieth of the run"),
        "Steps between checkpoints; -1: only at the end. A new best is saved too.",
        flag="--save_freq", ge=-1, common=True,
    )  # fmt: skip
    test_freq: int = setting(
        0, "Steps between validations; 0: at the end; -1: none. Each but -1 also validates at the "
        "end.", flag="--test_freq", ge=-1, common=True,
    )  # fmt: skip
    val_before_train: bool = setting(True, "Validate before the first step.")
    max_ckpt_to_keep: int | None = setting(
        3, "Newest checkpoints to keep, in addition to the best; --on_hacking restrain keeps all.",
        absent="all", ge=1, unused="all_kept",
    )  # fmt: skip
    patience: int | None = setting(
        None, "Stop after this number of validations without a new best.", absent="never",
        flag="--patience", ge=1,
    )  # fmt: skip
    on_hacking: Literal["warn", "stop", "restrain"] = setting(
        Chosen(choose_on_hacking, "stop with --stop_on_hacking, else warn"),
        "When the model begins to exploit its reward: warn, stop, or restrain: go back to the last "
        "checkpoint before, and on with a higher KL coefficient; at most twice, then stop.",
        flag="--on_hacking", unused="not_watched",
    )  # fmt: skip
    stop_on_hacking: bool = setting(
        False, "The same as --on_hacking stop.", flag="--stop_on_hacking", unused="not_watched"
    )
    logger: tuple[
        Literal["console", "tensorboard", "wandb", "trackio", "mlflow", "swanlab"], ...
    ] = setting(("console",), "Trackers, besides metrics.jsonl.", flag="--logger", common=True)
    alert: Annotated[str | None, checked(_check_alert)] = setting(
        None, "Where changes of the run are posted as JSON, in the form of Slack's webhooks: "
        "warnings, 80 % of a judge's budget, the end. An address, or the name of a variable that "
        "holds it.", absent="nowhere", flag="--alert", identity="start",
    )  # fmt: skip
    token_details: int = setting(
        8, "Responses of a step whose tokens are kept with value, advantage and KL; fewer if they "
        "would take more than a fifth of the step's file. 0: none.", ge=0,
    )  # fmt: skip
    # Names for trackers.
    project_name: str = setting("ppo-cli", "Project name for trackers.")
    experiment_name: str = setting("ppo", "Run name for trackers.")
    max_nonfinite_steps: int = setting(
        3, "Consecutive non-finite gradients after which the run stops.", ge=1
    )
    # Devices, nodes and processes.
    engine: EngineName = setting(
        Chosen(choose_engine, "local for one device, else ray"),
        "Engine: local (one process), ray (several), or that of a package, such as verl.",
        flag="--engine",
    )  # fmt: skip
    n_gpus_per_node: int = setting(
        Chosen(choose_gpus, "one, or as many as one sampler or layer needs"), "GPUs per node.",
        flag="--n_gpus", env="N_GPUS", ge=0, le=1024, common=True,
    )  # fmt: skip
    nnodes: int = setting(1, "Number of nodes.", flag="--nnodes", env="NNODES", ge=1, le=4096)
    node_rank: int | None = setting(
        None, "Rank of this node.", absent="by the launcher", flag="--node_rank", env="NODE_RANK",
        ge=0, unused="one_node",
    )  # fmt: skip
    master_addr: str | None = setting(
        None, "Address of node 0.", absent="this node", flag="--master_addr", env="MASTER_ADDR",
        unused="one_node",
    )  # fmt: skip
    master_port: int = setting(
        6379, "Port of node 0.", flag="--master_port", env="MASTER_PORT", ge=1, le=65535,
        unused="one_node",
    )  # fmt: skip
    num_workers: int | None = setting(
        Chosen(choose_workers, "one per node"), "Learner processes on CPUs, over all nodes.",
        flag="--num_workers", ge=1,
    )  # fmt: skip
    tensor_parallel_size: int = setting(
        1, "Learner processes that share each layer.", flag="--tensor_parallel_size", ge=1
    )
    placement: str | None = setting(
        None, "Devices of each role, such as train:0-5,rollout:6,reward:5,judge:7.",
        absent="by the numbers of GPUs and workers", flag="--placement",
    )  # fmt: skip
    profile_steps: Annotated[tuple[str, ...], checked(_check_steps)] = setting(
        (), "Steps to profile, such as 3, 2,5 or 2-4; traces and tables are in profile/.",
        flag="--profile",
    )  # fmt: skip
    threads: int | None = setting(
        Chosen(
            choose_threads,
            "OMP_NUM_THREADS, else one per core; a Ray worker uses one, or on GPUs its share of "
            "the node's cores",
        ),
        "CPU threads per process. Maximum: 4 per core.", ge=1,
    )  # fmt: skip
    async_steps: int = setting(
        0, "Steps by which sampling may run ahead of training.", flag="--async_steps", ge=0, le=16,
        identity="run",
    )  # fmt: skip
    # What a run survives.
    max_restarts: int = setting(
        3, "Maximum restarts after lost workers or nodes.", flag="--max_restarts", ge=0,
        unused="no_workers",
    )  # fmt: skip
    worker_timeout: int = setting(
        1800, "Maximum seconds of one task of a worker.", flag="--worker_timeout", ge=1,
        unused="no_workers",
    )  # fmt: skip
    node_timeout: int = setting(
        300, "Seconds to wait for nodes, at the start and after a loss.", flag="--node_timeout",
        ge=1, unused="no_workers",
    )  # fmt: skip

    @property
    def kept_checkpoints(self) -> int | None:
        """How many of the newest checkpoints are kept; None keeps all, to go back to any."""
        return None if self.on_hacking == "restrain" else self.max_ckpt_to_keep

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "critic_warmup total_training_steps",
            lambda s: (
                s.total_training_steps is not None and 0 < s.total_training_steps <= s.critic_warmup
            ),
            lambda s, at: (
                f"{at}critic_warmup {s.critic_warmup} leaves no step to train the actor in "
                f"{s.total_training_steps} step(s); use {at}critic_warmup="
                f"{s.total_training_steps - 1} or less, or more --max_steps."
            ),
            example="critic_warmup=3 total_training_steps=3",
            advice="critic_warmup=2",
        ),
        Conflict(
            "patience test_freq",
            lambda s: s.patience is not None and s.test_freq < 1,
            lambda s, at: (
                "--patience counts validations during the run, but there are none; set "
                "--test_freq 10."
            ),
            example="patience=2",
            advice="test_freq=10",
        ),
        Conflict(
            "on_hacking stop_on_hacking",
            lambda s: s.stop_on_hacking and s.on_hacking != "stop",
            lambda s, at: f"--stop_on_hacking is --on_hacking stop, not {s.on_hacking}; keep one.",
            example="on_hacking=restrain stop_on_hacking=true",
            advice="on_hacking=restrain stop_on_hacking=false",
        ),
        Conflict(
            "on_hacking save_freq",
            lambda s: s.on_hacking == "restrain" and s.save_freq < 1,
            lambda s, at: (
                "--on_hacking restrain goes back to a checkpoint, and --save_freq -1 saves none "
                "during the run; set --save_freq 5, or --on_hacking stop."
            ),
            example="on_hacking=restrain save_freq=-1",
            advice="save_freq=5",
        ),
        # The engine of a package checks its nodes and devices itself.
        Conflict(
            "node_rank nnodes",
            lambda s: not runs_elsewhere(s.engine) and (s.node_rank or 0) >= s.nnodes,
            lambda s, at: (
                f"{at}node_rank {s.node_rank} does not exist among {s.nnodes} node(s); ranks go "
                f"from 0 to {s.nnodes - 1}."
            ),
            example="nnodes=2 node_rank=2 master_addr=host",
            advice="node_rank=1",
        ),
    )

    def is_profiled(self, step: int) -> bool:
        """Whether `profile_steps` contains a training step."""
        spans = (word.partition("-") for word in self.profile_steps)
        return any(int(first) <= step <= int(last or first) for first, _, last in spans)


def _megatron(who: str) -> Conflict:
    """Return the conflict of a trained model's strategy with what is offered."""
    return Conflict(
        f"{who}.strategy",
        lambda c: not runs_elsewhere(c.trainer.engine) and getattr(c, who).strategy == "megatron",
        lambda c, at: (
            f"{who}.strategy megatron is not offered: models are sharded with FSDP2, and layers "
            f"split with --tensor_parallel_size. Use {who}.strategy=fsdp2."
        ),
        example=f"{who}.strategy=megatron",
        advice=f"{who}.strategy=fsdp2",
    )


class Pretraining(NamedTuple):
    """The most steps that train the critic alone, and the explained variance that ends them."""

    max_steps: int
    target: float | None


class Config(Section):
    """Everything that a run depends on."""

    model: Model = section(Model)
    data: Data = section(Data)
    algorithm: Algorithm = section(Algorithm)
    actor: Actor = section(Actor)
    critic: Critic = section(Critic, unused="no_critic")
    ref: Ref = section(Ref)
    rollout: Rollout = section(Rollout)
    environment: Environment = section(Environment, unused="no_episodes")
    reward: Reward = section(Reward)
    trainer: Trainer = section(Trainer)

    @property
    def uses_critic(self) -> bool:
        """Whether a critic is trained: only for an estimator that reads values."""
        return ESTIMATORS[self.algorithm.adv_estimator].critic

    @property
    def pretrain_steps(self) -> int:
        """How many steps pretrain the critic at most; 0 for none."""
        return self.critic.pretrain_steps if self.uses_critic else 0

    @property
    def pretraining(self) -> Pretraining:
        """How long the critic is pretrained."""
        return Pretraining(self.pretrain_steps, self.critic.pretrain_until)

    @property
    def uses_reference(self) -> bool:
        """Whether a reference policy is needed, for the reward or for the loss."""
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss

    @property
    def training_models(self) -> dict[str, str]:
        """The models that this run loads for training, by the settings that name them."""
        models = {"model.path": self.model.path}
        if self.uses_critic:
            models["critic.model.path"] = self.critic.model.path
        if self.uses_reference:
            models["ref.path"] = self.ref.path
        return models

    @property
    def full_kls(self) -> list[str]:
        """The settings that ask for a KL over the whole vocabulary."""
        full = {
            "algorithm.kl_penalty": self.algorithm.use_kl_in_reward
            and self.algorithm.kl_penalty == "full",
            "actor.kl_loss_type": self.actor.use_kl_loss and self.actor.kl_loss_type == "full",
        }
        return [key for key, applies in full.items() if applies]

    @property
    def reference_sharding(self) -> Sharding:
        """How the reference is sharded: as the actor, with its own offloading."""
        offload = {"param_offload": self.ref.param_offload}
        return self.actor.fsdp_config.model_copy(update=offload)

    @property
    def shares_reference(self) -> bool:
        """Whether the reference is the actor with its adapter disabled."""
        return self.model.lora_rank > 0 and self.ref.path == self.model.path

    @property
    def loads_reference_once(self) -> bool:
        """Whether a reference in host memory stays on the device for all of a step."""
        return self.ref.param_offload and not self.actor.fsdp_config.param_offload

    @property
    def quantised(self) -> list[str]:
        """The settings that hold a model's frozen weights in 4 bits."""
        bits_of = {
            "model.quantization": self.model.quantization,
            "critic.model.quantization": self.uses_critic and self.critic.model.quantization,
        }
        return [key for key, bits in bits_of.items() if bits]

    @property
    def kl_weights(self) -> dict[str, float]:
        """The settings that weigh the KL to the reference in this run, with their values."""
        weights = {
            "algorithm.kl_ctrl.kl_coef": (
                self.algorithm.use_kl_in_reward, self.algorithm.kl_ctrl.kl_coef
            ),
            "actor.kl_loss_coef": (self.actor.use_kl_loss, self.actor.kl_loss_coef),
        }  # fmt: skip
        return {key: weight for key, (is_used, weight) in weights.items() if is_used and weight}

    # Conflicts of settings in different sections.
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "trainer.on_hacking algorithm.use_kl_in_reward actor.use_kl_loss",
            lambda c: c.trainer.on_hacking == "restrain" and not c.kl_weights,
            lambda c, at: (
                "--on_hacking restrain raises the weight of the KL to the reference, and this run "
                "has none; set actor.use_kl_loss=true and --kl_coef 0.001, or --on_hacking stop."
            ),
            example="trainer.on_hacking=restrain algorithm.use_kl_in_reward=false",
            advice="actor.use_kl_loss=true",
        ),
        Conflict(
            "trainer.on_hacking algorithm.kl_ctrl.type",
            lambda c: c.trainer.on_hacking == "restrain" and c.algorithm.kl_ctrl.type == "adaptive",
            lambda c, at: (
                "--on_hacking restrain raises a fixed KL coefficient, and an adaptive one would "
                "be moved back to its target; set algorithm.kl_ctrl.type=fixed."
            ),
            example="trainer.on_hacking=restrain algorithm.kl_ctrl.type=adaptive "
            "algorithm.use_kl_in_reward=true",
            advice="algorithm.kl_ctrl.type=fixed",
        ),
        # The estimator: groups of responses, a critic, parts of the reward in place of their sum.
        Conflict(
            "algorithm.adv_estimator rollout.n",
            lambda c: ESTIMATORS[c.algorithm.adv_estimator].grouped and c.rollout.n < 2,
            lambda c, at: (
                f"the estimator {c.algorithm.adv_estimator} compares several responses to a "
                f"prompt, but rollout.n is {c.rollout.n}. Use --rollout_n 4, or --adv_estimator "
                f"{'piece_batch' if ESTIMATORS[c.algorithm.adv_estimator].pieces else 'gae'}."
            ),
            example="algorithm.adv_estimator=grpo",
            advice="rollout.n=4",
        ),
        Conflict(
            "algorithm.subtract_group_mean rollout.n",
            lambda c: c.algorithm.subtract_group_mean and c.rollout.n < 2,
            lambda c, at: (
                "algorithm.subtract_group_mean needs several responses to a prompt, not "
                f"{c.rollout.n}. Use --rollout_n 4."
            ),
            example="algorithm.subtract_group_mean=true",
            advice="rollout.n=4",
        ),
        Conflict(
            "algorithm.lam_alpha data.max_response_length",
            lambda c: (
                c.algorithm.lam_alpha is not None
                and c.algorithm.lam_alpha * c.data.max_response_length <= 1
            ),
            lambda c, at: (
                f"with algorithm.lam_alpha {c.algorithm.lam_alpha:g} the lambda of "
                f"{c.data.max_response_length} tokens and fewer (data.max_response_length) is 0. "
                f"Use --lam_alpha {8 / c.data.max_response_length:.2g} or more."
            ),
            example="algorithm.lam_alpha=0.05 data.max_response_length=16",
            advice="algorithm.lam_alpha=0.5",
        ),
        # Without the score, a teacher has to be there.
        Conflict(
            "algorithm.score_coef ref.path",
            lambda c: (
                c.algorithm.score_coef == 0
                and (
                    c.ref.path in (None, c.model.path)
                    or not (c.algorithm.use_kl_in_reward or c.actor.use_kl_loss)
                )
            ),
            lambda c, at: (
                "with algorithm.score_coef 0 the KL to a teacher is all there is to learn from: "
                "name one with --ref_model, and leave algorithm.use_kl_in_reward on."
            ),
            example="algorithm.score_coef=0",
            advice="ref.path=a/b",
        ),
        Conflict(
            "trainer.critic_warmup algorithm.adv_estimator",
            lambda c: (
                c.trainer.critic_warmup > 0 and not ESTIMATORS[c.algorithm.adv_estimator].critic
            ),
            lambda c, at: (
                f"the estimator {c.algorithm.adv_estimator} trains no critic, so "
                f"trainer.critic_warmup {c.trainer.critic_warmup} would leave steps without any "
                "update. Use 0."
            ),
            example="trainer.critic_warmup=2 algorithm.adv_estimator=reinforce_plus_plus",
            advice="trainer.critic_warmup=0",
        ),
        Conflict(
            "critic.pretrain_steps critic.pretrain_until trainer.profile_steps",
            lambda c: (
                bool(c.critic.pretrain_steps)
                and any(word.partition("-")[0] == "1" for word in c.trainer.profile_steps)
            ),
            lambda c, at: (
                "a profile of step 1 would have all of critic pretraining in it; profile another "
                "one: --profile 2."
            ),
            example="critic.pretrain_steps=2 trainer.profile_steps=[1]",
            advice="trainer.profile_steps=[2]",
        ),
        Conflict(
            "reward.shaping algorithm.adv_estimator",
            lambda c: (
                ESTIMATORS[c.algorithm.adv_estimator].parts
                and c.reward.shaping != type(c.reward.shaping)()
            ),
            lambda c, at: (
                "gdpo reads the parts of the reward, not their shaped sum; leave reward.shaping "
                "out."
            ),
            example="algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[a] rollout.n=2 "
            "reward.shaping.reward_clip=5",
            advice="reward.shaping.reward_clip=null",
        ),
        # Dynamic sampling: groups that can differ, and scores before the next step.
        Conflict(
            "data.gen_batch_size algorithm.filter_groups.enable",
            lambda c: (
                not c.algorithm.filter_groups.enable
                and c.data.gen_batch_size != c.data.train_batch_size
            ),
            lambda c, at: (
                f"data.gen_batch_size {c.data.gen_batch_size} is not data.train_batch_size "
                f"{c.data.train_batch_size}, and only dynamic sampling samples other prompts than "
                "it trains on: set algorithm.filter_groups.enable=true, or leave it out."
            ),
            example="data.gen_batch_size=512 rollout.n=2",
            advice="algorithm.filter_groups.enable=true",
        ),
        Conflict(
            "algorithm.filter_groups.enable rollout.n",
            lambda c: c.algorithm.filter_groups.enable and c.rollout.n < 2,
            lambda c, at: (
                "algorithm.filter_groups.enable compares several responses to a prompt, not "
                f"{c.rollout.n}. Use --rollout_n 4."
            ),
            example="algorithm.filter_groups.enable=true",
            advice="rollout.n=4",
        ),
        Conflict(
            "algorithm.filter_groups.enable trainer.async_steps",
            lambda c: c.algorithm.filter_groups.enable and c.trainer.async_steps > 0,
            lambda c, at: (
                "algorithm.filter_groups.enable waits for scores, so sampling cannot run ahead; "
                "leave --async_steps out."
            ),
            example="algorithm.filter_groups.enable=true rollout.n=2 trainer.async_steps=1",
            advice="trainer.async_steps=0",
        ),
        Conflict(
            "trainer.patience data.val_files",
            lambda c: c.trainer.patience is not None and not c.data.val_files,
            lambda c, at: (
                "--patience watches validation, but there are no validation prompts: --val_files "
                "FILE."
            ),
            example="trainer.patience=2 trainer.test_freq=5 data.val_files=[]",
            advice="data.val_files=x.jsonl",
        ),
        # The over-long penalty leaves some responses without a penalty.
        Conflict(
            "reward.shaping.overlong_buffer data.max_response_length",
            lambda c: (c.reward.shaping.overlong_buffer or 0) > c.data.max_response_length,
            lambda c, at: (
                f"reward.shaping.overlong_buffer {c.reward.shaping.overlong_buffer} is longer than "
                f"the longest response ({c.data.max_response_length} tokens), so every response "
                f"gets a penalty; use --overlong_buffer {max(1, c.data.max_response_length // 4)}."
            ),
            example="reward.shaping.overlong_buffer=33 data.max_response_length=32",
            advice="reward.shaping.overlong_buffer=8",
        ),
        # Models and samplers; the engine of a package checks its own.
        _megatron("actor"),
        _megatron("critic"),
        Conflict(
            "rollout.name",
            lambda c: (
                not runs_elsewhere(c.trainer.engine) and c.rollout.name in ("sglang", "trtllm")
            ),
            lambda c, at: (
                f"rollout.name {c.rollout.name} is not offered here. Use "
                "--rollout_name vllm, or hf."
            ),
            example="rollout.name=trtllm",
            advice="rollout.name=vllm",
        ),
        Conflict(
            "rollout.partial_tokens trainer.async_steps",
            lambda c: (
                not runs_elsewhere(c.trainer.engine)
                and c.rollout.partial_tokens is not None
                and c.trainer.async_steps == 0
            ),
            lambda c, at: (
                f"rollout.partial_tokens {c.rollout.partial_tokens} is for responses that are "
                "sampled ahead of training, and none are; use --async_steps 2, or leave it out."
            ),
            example="rollout.partial_tokens=64",
            advice="trainer.async_steps=2",
        ),
        # A discarded base model never comes back when only the LoRA adapter is sent.
        Conflict(
            "rollout.sleep model.lora_merge",
            lambda c: (
                not runs_elsewhere(c.trainer.engine)
                and c.rollout.sleep == "discard"
                and c.model.lora_rank > 0
                and not c.model.lora_merge
            ),
            lambda c, at: (
                "rollout.sleep discard gives up the base model, and only the LoRA adapter is sent "
                "again; use keep or offload, or model.lora_merge=true."
            ),
            example="rollout.sleep=discard model.lora_rank=8",
            advice="model.lora_merge=true",
        ),
    )
