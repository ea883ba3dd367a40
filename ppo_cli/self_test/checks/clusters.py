"""Whole engines under Ray: ranks, samplers and the weights that go from one to the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ppo_cli.algo.batch import AnnotatedBatch, build_batch
from ppo_cli.cluster.driver import DriverEngine
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.shape import Device, Shape
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import Engine, MiniBatch, Sampling, Sums
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.planning.memory.devices import GIB
from ppo_cli.planning.memory.publishing import publish_bytes
from ppo_cli.planning.placement import placement_of
from ppo_cli.records import Rollout
from ppo_cli.self_test.checks.runs import LIMITS, largest_gap, make_config, score_rows
from ppo_cli.self_test.checks.samplers import make_prompts
from ppo_cli.self_test.results import Results, Setup

# The second step shows whether the first one reached the samplers.
STEPS = 2
SAMPLING = Sampling(n=2, max_tokens=12, seed=5)
# A step after which old weights give other log-probs even in bfloat16.
FAST = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0}
TRANSFERS = {"transfer_ipc": "ipc", "transfer_nccl": "nccl"}
# Interval of the memory samples, and the tolerated excess over the plan.
WATCH_S = 0.005
OVER_PLAN = 0.10


def check_ray(setup: Setup, results: Results) -> None:
    """Learner ranks and a sampler in processes of Ray, and one process: the same numbers."""
    # The same settings under Ray and in one process.
    trainer: dict[str, Any] = {"engine": "ray", "worker_timeout": 120, "node_timeout": 120}
    trainer |= {"num_workers": 2} if setup.device == "cpu" else {"n_gpus_per_node": setup.gpus}
    parts: dict[str, Any] = {"rollout": {"name": "hf"}, "actor": {"optim": FAST}}
    config = make_config(setup.device, trainer=trainer, **_with_actor(setup.device, parts))
    local = make_config(setup.device, **_with_actor(setup.device, parts))
    tokenizer = load_tokenizer(model_folder(config.model.path))
    # Expected: the steps of one process.
    alone = LocalEngine(local, tokenizer, total_steps=8)
    expected = [_take_step(alone, tokenizer) for _ in range(STEPS)]
    limit = LIMITS[str(config.model.dtype)]
    with _engine(config, tokenizer, setup.folder) as engine:
        for turn, (rollouts, annotated, sums) in enumerate(expected, 1):
            outcome = _take_step(engine, tokenizer)
            tokens = [[r.token_ids for r in side] for side in (outcome[0], rollouts)]
            # In bfloat16 a tie may be broken in another way.
            if setup.device == "cpu":
                results.require(f"step {turn}: Ray samples other tokens", tokens[0] == tokens[1])
            if tokens[0] == tokens[1]:
                mask_BT = annotated.response_mask_BT
                gap = largest_gap(outcome[1].old_logprobs_BT, annotated.old_logprobs_BT, mask_BT)
                results.compare(f"log-probs of ranks, step {turn}", gap, limit)
                for name in ("actor_loss", "grad_norm", "critic_loss"):
                    numbers = [s[name][0] / s[name][1] for s in (outcome[2], sums)]
                    gap = abs(numbers[0] - numbers[1]) / max(1.0, abs(numbers[1]))
                    results.compare(f"{name} of ranks, step {turn}", gap, limit)
            # The sampler must have received the new weights.
            results.compare(f"sampler and trainer, step {turn}", _sampler_gap(outcome[1]), limit)


def check_transfers(setup: Setup, results: Results) -> None:
    """vLLM gets new weights by CUDA IPC and NCCL; on the CPU by memory and over the network."""
    if setup.device == "cpu":
        for way in ("memory", "gloo"):
            with results.part(way):
                check_transfer(setup, way, results)
        return
    for feature, way in TRANSFERS.items():
        if way == "nccl" and setup.gpus < 2:
            results.skip("NCCL needs two GPUs")
            continue
        with results.part(way, feature):  # type: ignore[arg-type]
            check_transfer(setup, way, results)


def check_transfer(setup: Setup, way: str, results: Results) -> None:
    """After each publish the sampler's log-probs are the trainer's."""
    # NCCL needs the sampler on another GPU than the learner; IPC on the same one.
    devices: dict[str, Any] = {"n_gpus_per_node": setup.gpus}
    if way == "nccl":
        devices = {"n_gpus_per_node": 2, "placement": "train:0,rollout:1"}
    if setup.device == "cpu":
        devices = {}
    parts = {
        "actor": {"optim": FAST},
        "algorithm": {"adv_estimator": "grpo"},
        "rollout": _vllm(way) | {"n": 2},
        "trainer": {"engine": "ray", "worker_timeout": 240, "node_timeout": 120, **devices},
    }
    config = make_config(setup.device, **_with_actor(setup.device, parts))
    tokenizer = load_tokenizer(model_folder(config.model.path))
    limit = LIMITS[str(config.model.dtype)] / 6  # of the mean
    with _engine(config, tokenizer, setup.folder / way) as engine:
        for turn in range(STEPS + 1):
            rollouts, annotated = _annotate(engine, tokenizer)
            versions = {rollout.weight_version for rollout in rollouts}
            results.require(f"{way}: weights of version {versions}", versions == {turn})
            results.compare(
                f"sampler and trainer after {turn} publishes by {way}",
                _sampler_gap(annotated, mean=True), limit,
            )  # fmt: skip
            if turn == STEPS:
                break
            # A step has to change the log-probs by more than the limit, or stale weights would
            # pass.
            engine.step(MiniBatch(score_rows(annotated, turn), actor=True, critic=False))
            after_step = engine.annotate(annotated)
            change = after_step.old_logprobs_BT - annotated.old_logprobs_BT
            moved = float(change[annotated.response_mask_BT].abs().mean())
            results.require(f"a step moved log-probs by only {moved:.2g}", moved > 3 * limit)
            engine.publish()
        # The engine may have fallen back to another transfer.
        by = getattr(engine, "weight_transfer", way)
        results.require(f"weights travelled by {by}, not by {way}", by == way)


def check_publish_memory(setup: Setup, results: Results) -> None:
    """GPU memory while a model with the wanted vocabulary is published, and the plan of it."""
    path = setup.folder / "model"
    shape = save_wide_model(setup, path)
    parts = {
        "model": {"path": str(path), "packing": False},
        "actor": {"use_kl_loss": False, "kl_loss_coef": 0.0},
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "rollout": _vllm("ipc") | {"n": 2},
        "trainer": {
            "engine": "ray", "worker_timeout": 240, "node_timeout": 120, "n_gpus_per_node": 1,
        },
    }  # fmt: skip
    config = make_config(setup.device, **_with_actor(setup.device, parts))
    tokenizer = load_tokenizer(str(path))
    with _engine(config, tokenizer, setup.folder) as engine:
        # One cycle first: allocators and graphs reach their steady state.
        _, annotated = _annotate(engine, tokenizer)  # vLLM sleeps from now on
        engine.step(MiniBatch(score_rows(annotated), actor=True, critic=False))
        engine.publish()
        engine.annotate(annotated)
        with _watch_memory() as used:
            engine.publish()
    # Compare the growth with the plan of the same shape.
    grown_bytes = max(used) - used[0]
    device = Device(half=True, gpu=True, shards=1, tensor=1, packed=False, keeps_freed=True)
    plan = publish_bytes(config.model, config.rollout, shape, device)
    planned_bytes = 2 * shape.parameters() + CACHE_BYTES + plan.learner + plan.sampler
    results.figures |= {
        "publish_gib": round(grown_bytes / GIB, 2), "planned_gib": round(planned_bytes / GIB, 2),
    }  # fmt: skip
    results.compare(
        "publishing takes more than planned", max(0.0, grown_bytes / planned_bytes - 1), OVER_PLAN
    )


CACHE_BYTES = 2**27  # of vLLM's keys and values, so that weights are what grows


def _vllm(way: str) -> dict[str, Any]:
    return {
        "name": "vllm", "weight_transfer": way, "enforce_eager": False, "max_num_seqs": 32,
        "gpu_memory_utilization": 0.3,
        "engine_kwargs": {"vllm": {"kv_cache_memory_bytes": CACHE_BYTES}},
    }  # fmt: skip


def save_wide_model(setup: Setup, path: Path) -> Shape:
    """One layer with the wanted heads, under a table of the wanted vocabulary."""
    # The tokenizer of the bundled model fits into any larger vocabulary.
    s = setup.shape
    tokenizer = load_tokenizer(model_folder("embedded"))
    tokenizer.save_pretrained(path)
    config = Qwen2Config(
        vocab_size=s.vocabulary, hidden_size=s.heads * s.head_size, intermediate_size=2048,
        num_hidden_layers=1, num_attention_heads=s.heads, num_key_value_heads=s.kv_heads,
        head_dim=s.head_size, max_position_embeddings=256, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.device(setup.device):  # a CPU draws for a minute
        model = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(path)
    shape = Shape.from_config(config.to_dict())
    assert shape is not None
    return shape


@contextmanager
def _watch_memory() -> Iterator[list[int]]:
    """Bytes in use on the first GPU by all processes, again and again; the first before all."""
    used: list[int] = []
    stop = threading.Event()

    def look() -> None:
        free, total = torch.cuda.mem_get_info(0)
        used.append(total - free)

    def watch() -> None:
        while not stop.wait(WATCH_S):
            # One sample before anything happens, then one every WATCH_S.
            look()

    look()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield used
    finally:
        stop.set()
        thread.join()


def _with_actor(device: str, parts: dict[str, Any]) -> dict[str, Any]:
    """The same parts, with what the run's actor has besides."""
    actor = make_config(device).actor.model_dump(exclude_unset=True)
    return parts | {"actor": actor | parts["actor"]}


@contextmanager
def _engine(config: Config, tokenizer: Any, folder: Path) -> Iterator[Engine]:
    """An engine under a Ray that this process starts."""
    engine = DriverEngine(
        config, tokenizer, total_steps=8, placement=placement_of(config), logs=folder / "logs"
    )
    try:
        yield engine
    finally:
        engine.close()


def _annotate(engine: Engine, tokenizer: Any) -> tuple[Sequence[Rollout], AnnotatedBatch]:
    prompts = make_prompts(tokenizer)
    rollouts = sorted(engine.generate(prompts, SAMPLING), key=lambda r: r.key)
    return rollouts, engine.annotate(build_batch(rollouts, tokenizer.pad_token_id))


def _take_step(engine: Engine, tokenizer: Any) -> tuple[Sequence[Rollout], AnnotatedBatch, Sums]:
    rollouts, annotated = _annotate(engine, tokenizer)
    sums = engine.step(MiniBatch(score_rows(annotated), actor=True, critic=True))
    engine.publish()
    return rollouts, annotated, sums


def _sampler_gap(annotated: AnnotatedBatch, *, mean: bool = False) -> float:
    """How far the log-probs of sampler and trainer are apart."""
    gap_BT = annotated.old_logprobs_BT - annotated.sampler_logprobs_BT
    gaps_N = gap_BT[annotated.response_mask_BT].abs()
    return float(gaps_N.mean() if mean else gaps_N.max())
