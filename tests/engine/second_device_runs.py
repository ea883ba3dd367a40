"""Runs the one-process engine and reward models on the CPU and on the second device.

python second_device_runs.py FOLDER        prints one line of JSON; FOLDER takes what is saved

For each scenario: what went wrong, and how far the numbers of both devices are apart.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.masking_utils import find_packed_sequence_indices

from ppo_cli.algo.batch import build_batch
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import MiniBatch, Sampling, build_sampler
from ppo_cli.engine.device import Compute
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.records import Prompt, Rollout
from ppo_cli.rewards.models import heads as reward_loading
from ppo_cli.rewards.models.local import ModelScorer, Sample
from tests.engine.packed_steps import merge_settings, scored
from tests.engine.second_device import OUTSIDE, Watch, crossings, install
from tests.rewards.models import twins
from tests.settings import complete_reward_model

Numbers = dict[str, list[float]]
Watching = Callable[[], AbstractContextManager[Any]]
CPU = torch.device("cpu")
SAMPLINGS = (
    Sampling(n=3, max_tokens=8, seed=1),
    Sampling(temperature=0.7, top_p=0.8, top_k=5, n=2, max_tokens=8, seed=2),
    Sampling(temperature=0.0, max_tokens=8),
)
# Where the host may wait for the device.
PLACES = Path(__file__).with_name("second_device_waits.txt").read_text().splitlines()
LEAVES = {line for line in PLACES if not line.startswith("#")}
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
}


def config_of(change: dict[str, Any]) -> Config:
    """A small run of the bundled model."""
    # eps: otherwise the first update of a weight is the sign of its gradient, which half
    # precision turns round where the gradient is small.
    optim = {"lr": 1e-3, "eps": 1e-3}
    actor = {"optim": optim, "clip_grad_value": 0.5, "ppo_micro_batch_size_per_gpu": 5}
    defaults: dict[str, dict[str, Any]] = {
        "model": {"path": "embedded", "dtype": "float32", "packing": False},
        "data": {"max_prompt_length": 32, "max_response_length": 8},
        "actor": actor, "critic": {"optim": optim}, "trainer": {"engine": "local"},
    }  # fmt: skip
    return merge_settings(defaults, change)


def prompts_of(tokenizer: Any) -> list[Prompt]:
    texts = [f"{i} + {7 * i} =" for i in range(4)] + ["What is 12 times 12, and why?"]
    return [Prompt(f"p{i}", t, (), t, tuple(tokenizer(t).input_ids)) for i, t in enumerate(texts)]


def rollouts_of(prompts: list[Prompt]) -> list[Rollout]:
    """Responses of several lengths, the same on both devices."""
    rollouts = []
    for i, prompt in enumerate(prompts):
        for sample in range(2):
            ids = tuple(range(5 + i, 8 + 2 * i + sample))[:8]
            logprobs = np.full(len(ids), -2.0, np.float32)
            rollouts.append(Rollout(prompt, sample, ids, logprobs, "", "stop"))
    return rollouts


def train(config: Config, folder: Path, watch: Watching) -> Numbers:
    """Sample, annotate, step, publish, save and load; every number that came of it."""
    tokenizer = load_tokenizer(model_folder("embedded"))
    prompts = prompts_of(tokenizer)
    engine = LocalEngine(config, tokenizer, total_steps=4)
    with watch():
        results = work(engine, prompts, tokenizer.pad_token_id, folder)
        weights = engine._learner.weights()
    assert weights is not None and all(t.device == CPU for t in weights.tensors.values())
    sampler = build_sampler(config, tokenizer)
    with watch():
        sampler.load_weights(weights)
        drawn = sorted(sampler.generate(prompts, SAMPLINGS[2], 2), key=lambda r: r.prompt.uid)
        own_rollouts = sorted(engine.generate(prompts, SAMPLINGS[2]), key=lambda r: r.prompt.uid)
    assert [r.token_ids for r in drawn] == [r.token_ids for r in own_rollouts], "other weights"
    engine.close()
    return results


def work(engine: LocalEngine, prompts: list[Prompt], pad_token_id: int, folder: Path) -> Numbers:
    """The verbs of an engine, one after the other."""
    results: Numbers = {}
    for i, sampling in enumerate(SAMPLINGS):
        rollouts = sorted(engine.generate(prompts, sampling), key=lambda r: r.key)
        results[f"sampled {i}"] = [float(t) for r in rollouts for t in r.token_ids]
        logprobs = [r.sampler_logprobs.tolist() for r in rollouts]
        results[f"sampler's log-probs {i}"] = [*chain(*logprobs)]
    batch = build_batch(rollouts_of(prompts), pad_token_id)
    mask_BT = batch.response_mask_BT
    noise_BT = torch.linspace(-1, 1, mask_BT.numel()).view(mask_BT.shape)
    for turn in range(2):
        annotated = engine.annotate(batch)
        for name in ("old_logprobs_BT", "entropy_BT", "ref_logprobs_BT", "values_BT", "full_kl_BT"):
            if (value := getattr(annotated, name)) is not None:
                assert value.device == CPU, name
                results[f"{name} {turn}"] = value[mask_BT].tolist()
        train_batch = scored(annotated, 0, advantages_BT=noise_BT, returns_BT=noise_BT)
        sums = engine.step(MiniBatch(train_batch, actor=True, critic=True))
        results |= {f"{name} {turn}": list(both) for name, both in sums.items()}
        engine.publish()
        if turn == 0:
            (folder / "saved").mkdir(parents=True)
            engine.save(folder / "saved").result()
    engine.load(folder / "saved")
    results["after loading"] = engine.annotate(batch).old_logprobs_BT[mask_BT].tolist()
    assert results["after loading"] == results["old_logprobs_BT 1"], "load gave other weights"
    return results


def score(path: Path, watch: Watching) -> Numbers:
    """Scores of a reward model, which leaves the device between rounds, in two rounds."""
    question = {"role": "user", "content": "Is 17 a prime number?"}
    samples = [
        Sample(("row", i), (question,), "Yes: nothing but 1 and 17 divides it. "[: 5 * i])
        for i in range(1, 7)
    ]
    settings = complete_reward_model(path=str(path), self_test="off", offload=True, dtype="float32")
    scorer = ModelScorer(settings)
    scorer.load([])
    results: Numbers = {}
    for turn in range(2):
        with watch():
            begun = scorer.begin(samples, 64)
            assert not any(begun.failures), begun.failures
            while (scored := scorer.next_batch()) is not None:
                batch, _ = scored
                for index, row in zip(batch.indices, batch.rows, strict=True):
                    results[f"{index} {turn}"] = [row.score, *row.objectives.values()]
    scorer.close()
    return results


def not_refused(second: torch.device) -> list[str]:
    """What a GPU would refuse and the second device takes."""
    device_tensor, cpu_tensor = torch.ones(3, 4, device=second), torch.ones(3, 4)
    mistakes: dict[str, Callable[[], Any]] = {
        "CPU operand": lambda: device_tensor + cpu_tensor,
        "CPU index": lambda: device_tensor[torch.tensor([0, 1])],
        "CPU mask": lambda: cpu_tensor[device_tensor > 0],
        "CPU generator": lambda: torch.randn(3, device=second, generator=torch.Generator()),
        "numpy": lambda: device_tensor.numpy(),
        "in-place from the CPU": lambda: cpu_tensor.add_(device_tensor),
    }
    accepted = []
    for name, mistake in mistakes.items():
        with suppress(RuntimeError, TypeError):
            mistake()
            accepted.append(name)
    return accepted


Trials = dict[str, Callable[[Tensor, Tensor, Tensor], Any]]  # of numbers, a mask and indices
WAITS: Trials = {
    "item": lambda x, m, i: x[0].item(),
    "condition": lambda x, m, i: bool((x > 0).any()),
    "list": lambda x, m, i: x.tolist(),
    "to the CPU": lambda x, m, i: x.cpu(),
    "mask as an index": lambda x, m, i: x[m],
    "bytes as an index": lambda x, m, i: x[m.byte()],
    "mask written at": lambda x, m, i: x.clone().__setitem__(m, 0.0),
    "nonzero": lambda x, m, i: x.nonzero(),
    "unique": lambda x, m, i: x.unique(),
    "repeat_interleave": lambda x, m, i: x.repeat_interleave(i, dim=0),
    "equal": lambda x, m, i: torch.equal(x, x + 1),
    "multinomial": lambda x, m, i: x.abs().multinomial(1),
    "isin": lambda x, m, i: torch.isin(i, i),
    "a mask in transformers": lambda x, m, i: find_packed_sequence_indices(i[None]),
    "list to the device": lambda x, m, i: torch.tensor([1.0], device=x.device),
    "from the CPU": lambda x, m, i: torch.ones(3).to(x.device),
    "copied from the CPU": lambda x, m, i: torch.empty_like(x).copy_(torch.ones(4)),
}
# torch tags the other operations that look at values. What a backward pass waits for:
WAITS_BACKWARD: Trials = {
    "masked_scatter": lambda x, m, i: torch.zeros_like(x).masked_scatter(m, x),
    "mask as an index": lambda x, m, i: x[m],
}
NO_WAITS: Trials = {
    "indices": lambda x, m, i: x[i],
    "written at indices": lambda x, m, i: x.clone().index_put((i,), x[i]),
    "where": lambda x, m, i: torch.where(m, x, 0.0),
    "repeat_interleave": lambda x, m, i: x.repeat_interleave(2),
    "repeat_interleave of known length": lambda x, m, i: x.index_select(
        0, torch.repeat_interleave(i, output_size=6)
    ),
    "queued from the CPU": lambda x, m, i: x + torch.ones(4).to(x.device, non_blocking=True),
}


def miscounted(second: torch.device) -> list[str]:
    """Waits that are not counted, and operations that do not wait and are."""
    mask = torch.tensor([True, False, True, False]).to(second)
    index = torch.tensor([3, 0, 2, 1]).to(second)

    def count(work: Callable[..., Any], *, forward: bool = True, backward: bool = False) -> int:
        numbers = torch.tensor([0.5, -1.0, 0.25, 2.0]).to(second).requires_grad_(backward)
        crossings.clear()
        out = work(numbers, mask, index)
        if not forward:
            crossings.clear()
        if backward:
            out.sum().backward()
        return crossings.total()

    wrong = [name for name, work in WAITS.items() if not count(work)]
    with torch.inference_mode():
        wrong += [f"{name} in inference mode" for name, work in WAITS.items() if not count(work)]
    for name, work in WAITS_BACKWARD.items():
        if not count(work, forward=False, backward=True):
            wrong.append(f"{name} backward")
    wrong += [f"no {name}" for name, work in NO_WAITS.items() if count(work, backward=True)]
    crossings.clear()
    return wrong


def gaps(cpu: Numbers, second: Numbers) -> dict[str, float]:
    assert cpu.keys() == second.keys()
    return {
        name: max((abs(a - b) for a, b in zip(cpu[name], second[name], strict=True)), default=0.0)
        for name in cpu
    }


def main(folder: Path) -> dict[str, Any]:
    """Run everything on both devices."""
    second = install()
    present = {"device": CPU}
    dtype_of = Compute.choose
    Compute.choose = classmethod(  # type: ignore[method-assign,assignment]
        lambda cls, dtype: cls(present["device"], dtype_of(dtype).dtype)
    )
    reward_loading.open_device = lambda name: present["device"]
    both = ((CPU, nullcontext), (second, Watch))

    def compare(name: str, run: Callable[[Path, Watching], Numbers]) -> None:
        problems = []
        report[name] = {"wrong": "", "gaps": {}}
        try:
            for device, watch in both:
                present["device"] = device
                problems.append(run(folder / f"{name} {device.type}", watch))
            report[name]["gaps"] = gaps(*problems)
        except Exception:
            report[name]["wrong"] = traceback.format_exc()

    report: dict[str, Any] = {"not refused": not_refused(second), "miscounted": miscounted(second)}
    for name, change in RUNS.items():
        compare(name, lambda at, watch, c=change: train(config_of(c), at, watch))
    for name, twin in REWARDS.items():
        path = twin(folder / name)
        compare(name, lambda at, watch, p=path: score(p, watch))
    report["hidden"] = sorted(crossings.keys() - LEAVES - {OUTSIDE})
    report["unused"] = sorted(LEAVES - crossings.keys())
    report["waits"] = dict(crossings)
    return report


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
