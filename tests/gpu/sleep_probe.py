"""Greedy responses of vLLM before and after it slept, in a process of its own.

python sleep_probe.py MODE        discard, offload or keep; prints one line of JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.engine.base import Sampling, Weights, build_sampler
from ppo_cli.engine.models import load_policy, load_tokenizer
from ppo_cli.engine.samplers.vllm import VLLMSampler
from ppo_cli.machine.machine import Machine
from tests.engine.second_device_runs import prompts_of
from tests.settings import complete

GREEDY = Sampling(temperature=0.0, max_tokens=16)


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def main(mode: str) -> dict[str, Any]:
    """Sample, sleep, wake with the same weights and then with others."""
    path = model_folder("embedded")
    tokenizer = load_tokenizer(path)
    rollout = {"name": "vllm", "sleep": mode, "enforce_eager": True, "gpu_memory_utilization": 0.3}
    data = {"max_prompt_length": 64, "max_response_length": 16}
    config = complete({"model": {"path": path}, "rollout": rollout, "data": data}, Machine.here())
    sampler = build_sampler(config, tokenizer)
    assert isinstance(sampler, VLLMSampler)
    model = load_policy(path).model
    tensors = {name: p.detach() for name, p in model.named_parameters()}

    def sample(version: int) -> list[tuple[int, ...]]:
        rollouts = sampler.generate(prompts_of(tokenizer), GREEDY, version)
        return [r.token_ids for r in sorted(rollouts, key=lambda r: r.key)]

    def sleep_and_wake(weights: Weights) -> int:
        awake = free_bytes()
        sampler.sleep()
        asleep = free_bytes()
        sampler.wake_weights()
        sampler.load_weights(weights)
        sampler.wake_cache()
        return asleep - awake

    sampler.load_weights(Weights(tensors, 1))
    before = sample(1)
    given_back = sleep_and_wake(Weights(tensors, 2))
    after = sample(2)
    torch.manual_seed(0)
    noise = {
        name: t + 0.5 * t.std(correction=0) * torch.randn_like(t) for name, t in tensors.items()
    }
    sleep_and_wake(Weights(noise, 3))
    changed = sample(3)
    sampler.close()
    return {"before": before, "after": after, "changed": changed, "given back": given_back}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
