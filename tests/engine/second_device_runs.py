"""Runs the one-process engine and reward models on the CPU and on the second device.

python second_device_runs.py FOLDER        prints one line of JSON; FOLDER takes what is saved

For each scenario: what went wrong, and how far the numbers of both devices are apart.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ppo_cli.algo.batch import AnnotatedBatch, TrainBatch, build_batch
from ppo_cli.config.bundled import model_folder
from ppo_cli.config.reward_schema import ModelReward
from ppo_cli.config.schema import Config
from ppo_cli.engine.base import MiniBatch, Sampling, build_sampler
from ppo_cli.engine.device import Compute
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.records import Prompt, Rollout
from ppo_cli.rewards.local import heads as reward_loading
from ppo_cli.rewards.local.reward import ModelScorer, Sample
from tests.engine.second_device import Watch, crossings, install
from tests.rewards.local import twins

Numbers = dict[str, list[float]]
Watching = Callable[[], AbstractContextManager[Any]]
CPU = torch.device("cpu")
SAMPLINGS = (
    Sampling(n=3, max_tokens=8, seed=1),
    Sampling(temperature=0.7, top_p=0.8, top_k=5, n=2, max_tokens=8, seed=2),
    Sampling(temperature=0.0, max_tokens=8),
)
# Where values may leave the device: for drawn tokens, annotations, metrics, checkpoints. The
# last ones are looks of transformers at masks and positions.
LEAVES = frozenset(
    {
        "engine/actor_critic.py:_loss",
        "engine/hf_sampler.py:_compact",
        "engine/hf_sampler.py:_record",
        "engine/learner.py:widen",
        "engine/optimizer.py:_norm",
        "engine/optimizer.py:_place_moments",
        "engine/packing.py:compare_gradients",
        "engine/sharding.py:awake in modeling_utils.py:to",
        "engine/sharding.py:full_tensor",
        "engine/learner.py:on_host",
        # Before the first step, where no verdict of the trial is kept yet.
        "engine/trial.py:_compare_gradients",
        "engine/trial.py:_compare_outputs",
        "engine/trial.py:_differentiate",
        "engine/trial.py:compute_alone in masking_utils.py:find_packed_sequence_indices",
        "rewards/local/base.py:rows_of",
        "rewards/local/checkpoint.py:pack_left",
        "rewards/local/reward.py:_move",
        "rewards/local/heads.py:hidden_states in masking_utils.py:_ignore_causal_mask_sdpa",
        "rewards/local/heads.py:forward in masking_utils.py:_ignore_bidirectional_mask_sdpa",
        "engine/hf_sampler.py:_prefill in masking_utils.py:_ignore_causal_mask_sdpa",
        "engine/models.py:hidden_BLH in masking_utils.py:find_packed_sequence_indices",
    }
)
KL_LOSS = {"use_kl_loss": True, "kl_loss_type": "full", "entropy_coeff": 0.01}
OFFLOAD = {"fsdp_config": {"param_offload": True, "optimizer_offload": True}}
RUNS: dict[str, dict[str, Any]] = {
    "padded": {"algorithm": {"use_kl_in_reward": True}},
    "packed, full KL, entropy": {
        "model": {"packing": True},
        "algorithm": {"use_kl_in_reward": True, "kl_penalty": "full"},
        "actor": KL_LOSS,
    },
    "LoRA, gradient checkpointing, no critic": {
        "model": {"lora_rank": 4, "enable_gradient_checkpointing": True},
        "algorithm": {"adv_estimator": "grpo"},
        "actor": {"use_kl_loss": True, "kl_loss_type": "low_var_kl"},
    },
    "offload": {"actor": OFFLOAD, "critic": OFFLOAD},
    "half precision": {"model": {"dtype": "bfloat16"}, "actor": KL_LOSS},
    "half precision, packed, LoRA": {
        "model": {"dtype": "bfloat16", "packing": True, "lora_rank": 4},
        "algorithm": {"use_kl_in_reward": True},
    },
}
REWARDS: dict[str, Callable[[Path], Path]] = {
    "ArmoRM": twins.armorm_twin,
    "Starling": twins.starling_twin,
    "DeBERTa": twins.deberta_twin,
    "BERT, pairs": twins.bert_pair_twin,
    "sequence classifier": twins.skywork_llama_twin,
    "GPT-2 classifier": twins.gpt2_twin,
    "TRL value head": twins.trl_twin,
    "OpenRLHF value head": twins.openrlhf_twin,
}


def config_of(change: dict[str, Any]) -> Config:
    """A small run of the bundled model."""
    given: dict[str, Any] = {
        "model": {"path": "embedded", "dtype": "float32", "packing": False},
        "data": {"max_prompt_length": 32, "max_response_length": 8},
        "actor": {"optim": {"lr": 1e-3}, "clip_grad_value": 0.5, "ppo_micro_batch_size_per_gpu": 5},
        "critic": {"optim": {"lr": 1e-3}},
        "trainer": {"engine": "local"},
    }
    for name, values in change.items():
        given[name] = given.get(name, {}) | values
    return Config.model_validate(given)


def prompts_of(tokenizer: Any) -> list[Prompt]:
    texts = [f"{i} + {7 * i} =" for i in range(4)] + ["What is 12 times 12, and why?"]
    return [Prompt(f"p{i}", t, (), t, tuple(tokenizer(t).input_ids)) for i, t in enumerate(texts)]


def rollouts_of(prompts: list[Prompt]) -> list[Rollout]:
    """Responses of several lengths, the same on both devices."""
    made = []
    for i, prompt in enumerate(prompts):
        for sample in range(2):
            ids = tuple(range(5 + i, 8 + 2 * i + sample))[:8]
            logprobs = np.full(len(ids), -2.0, np.float32)
            made.append(Rollout(prompt, sample, ids, logprobs, "", "stop"))
    return made


def scored(annotated: AnnotatedBatch) -> TrainBatch:
    shape = annotated.response_mask_BT.shape
    noise = torch.linspace(-1, 1, shape.numel()).view(shape)
    return TrainBatch(
        **{name: getattr(annotated, name) for name in AnnotatedBatch.__dataclass_fields__},
        scores_B=torch.zeros(shape[0]),
        valid_B=torch.ones(shape[0], dtype=torch.bool),
        token_rewards_BT=torch.zeros(shape),
        advantages_BT=noise,
        returns_BT=noise,
        is_weight_BT=torch.ones(shape),
    )


def train(config: Config, folder: Path, watch: Watching) -> Numbers:
    """Sample, annotate, step, publish, save and load; every number that came of it."""
    tokenizer = load_tokenizer(model_folder("embedded"))
    prompts = prompts_of(tokenizer)
    engine = LocalEngine(config, tokenizer, total_steps=4)
    with watch():
        found = work(engine, prompts, tokenizer.pad_token_id, folder)
        weights = engine._learner.weights()
    assert weights is not None and all(t.device == CPU for t in weights.tensors.values())
    sampler = build_sampler(config, tokenizer)
    with watch():
        sampler.load_weights(weights)
        drawn = sorted(sampler.generate(prompts, SAMPLINGS[2], 2), key=lambda r: r.prompt.uid)
        own = sorted(engine.generate(prompts, SAMPLINGS[2]), key=lambda r: r.prompt.uid)
    assert [r.token_ids for r in drawn] == [r.token_ids for r in own], "other weights were sent"
    engine.close()
    return found


def work(engine: LocalEngine, prompts: list[Prompt], pad_token_id: int, folder: Path) -> Numbers:
    """The verbs of an engine, one after the other."""
    found: Numbers = {}
    for i, sampling in enumerate(SAMPLINGS):
        rollouts = sorted(engine.generate(prompts, sampling), key=lambda r: r.key)
        found[f"sampled {i}"] = [float(t) for r in rollouts for t in r.token_ids]
        found[f"sampler's log-probs {i}"] = [float(p) for r in rollouts for p in r.sampler_logprobs]
    batch = build_batch(rollouts_of(prompts), pad_token_id)
    for turn in range(2):
        annotated = engine.annotate(batch)
        for name in ("old_logprobs_BT", "entropy_BT", "ref_logprobs_BT", "values_BT", "full_kl_BT"):
            if (value := getattr(annotated, name)) is not None:
                assert value.device == CPU, name
                found[f"{name} {turn}"] = value[batch.response_mask_BT].tolist()
        sums = engine.step(MiniBatch(scored(annotated), actor=True, critic=True))
        found |= {f"{name} {turn}": list(both) for name, both in sums.items()}
        engine.publish()
        if turn == 0:
            (folder / "saved").mkdir(parents=True)
            engine.save(folder / "saved").result()
    engine.load(folder / "saved")
    again = engine.annotate(batch)
    found["after loading"] = again.old_logprobs_BT[batch.response_mask_BT].tolist()
    assert found["after loading"] == found["old_logprobs_BT 1"], "load gave other weights"
    return found


def score(path: Path, watch: Watching) -> Numbers:
    """Scores of a reward model, which leaves the device between rounds, in two rounds."""
    question = {"role": "user", "content": "Is 17 a prime number?"}
    samples = [
        Sample(("row", i), (question,), "Yes: nothing but 1 and 17 divides it. "[: 5 * i])
        for i in range(1, 7)
    ]
    settings = ModelReward(path=str(path), self_test="off", offload=True, dtype="float32")
    scorer = ModelScorer(settings)
    scorer.load([])
    found: Numbers = {}
    for turn in range(2):
        with watch():
            begun = scorer.begin(samples, 64)
            assert not any(begun.failures), begun.failures
            while (scored := scorer.next_batch()) is not None:
                batch, _ = scored
                for index, row in zip(batch.indices, batch.rows, strict=True):
                    found[f"{index} {turn}"] = [row.score, *row.objectives.values()]
    scorer.close()
    return found


def not_refused(second: torch.device) -> list[str]:
    """What a GPU would refuse and the second device takes."""
    there, here = torch.ones(3, 4, device=second), torch.ones(3, 4)
    mistakes: dict[str, Callable[[], Any]] = {
        "CPU operand": lambda: there + here,
        "CPU index": lambda: there[torch.tensor([0, 1])],
        "CPU mask": lambda: here[there > 0],
        "CPU generator": lambda: torch.randn(3, device=second, generator=torch.Generator()),
        "numpy": lambda: there.numpy(),
        "in-place from the CPU": lambda: here.add_(there),
    }
    taken = []
    for name, mistake in mistakes.items():
        try:
            mistake()
            taken.append(name)
        except (RuntimeError, TypeError):
            pass
    return taken


def gaps(cpu: Numbers, second: Numbers) -> dict[str, float]:
    assert cpu.keys() == second.keys()
    return {
        name: max((abs(a - b) for a, b in zip(cpu[name], second[name], strict=True)), default=0.0)
        for name in cpu
    }


def main(folder: Path, chosen: list[str]) -> dict[str, Any]:
    """Run everything, or what was chosen, on both devices."""
    second = install()
    present = {"device": CPU}
    dtype_of = Compute.choose
    Compute.choose = classmethod(  # type: ignore[method-assign,assignment]
        lambda cls, dtype: cls(present["device"], dtype_of(dtype).dtype)
    )
    reward_loading.choose_device = lambda name: present["device"]
    both = ((CPU, nullcontext), (second, Watch))

    def compare(name: str, run: Callable[[Path, Watching], Numbers]) -> None:
        found = []
        report[name] = {"wrong": "", "gaps": {}}
        try:
            for device, watch in both:
                present["device"] = device
                found.append(run(folder / f"{name} {device.type}", watch))
            report[name]["gaps"] = gaps(*found)
        except Exception:
            report[name]["wrong"] = traceback.format_exc()

    report: dict[str, Any] = {"not refused": not_refused(second)}
    for name, change in RUNS.items():
        if not chosen or name in chosen:
            compare(name, lambda at, watch, c=change: train(config_of(c), at, watch))
    for name, twin in REWARDS.items():
        if not chosen or name in chosen:
            path = twin(folder / name)
            compare(name, lambda at, watch, p=path: score(p, watch))
    report["hidden"] = sorted(crossings.keys() - LEAVES)
    report["unused"] = sorted(LEAVES - crossings.keys())
    return report


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2:])))
