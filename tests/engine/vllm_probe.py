"""Asks a real vLLM everything the tests want to know, in a process of its own.

python vllm_probe.py FOLDER        prints one line of JSON; FOLDER takes models made here
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.resolve import resolve
from ppo_cli.config.schema.run import Config, Transfer
from ppo_cli.engine.base import Sampling, Weights, build_sampler
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.models import load_policy, load_tokenizer, stop_token_ids
from ppo_cli.engine.models.lora import adapt, adapter_tensors
from ppo_cli.engine.samplers.hf import HFSampler
from ppo_cli.engine.samplers.text import decode_text
from ppo_cli.engine.samplers.vllm import VLLMSampler
from ppo_cli.errors import DataError, ModelError
from ppo_cli.records import Prompt, Rollout
from tests.engine.tiny_families import save_model

LONGEST = 128
# Sizes that vLLM has kernels for on the CPU.
WIDE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 64, "moe_intermediate_size": 64}
SAMPLINGS = {
    "plain": Sampling(n=4, max_tokens=24),
    "cool": Sampling(temperature=0.7, n=4, max_tokens=24),
    "warm top_p": Sampling(temperature=1.5, top_p=0.8, n=4, max_tokens=24, seed=3),
    "cool top_k": Sampling(temperature=0.5, top_k=3, n=4, max_tokens=24),
    "both": Sampling(temperature=1.2, top_p=0.9, top_k=5, n=4, max_tokens=24),
    "greedy": Sampling(temperature=0.0, top_p=0.5, top_k=2, n=2, max_tokens=24),
}


def make_prompts(tokenizer: Any) -> list[Prompt]:
    results = []
    for i in range(8):
        messages = [{"role": "user", "content": f"{7 * i}+{3 * i}="}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tuple(tokenizer(text)["input_ids"])
        results.append(Prompt(f"p{i}", text, (), text, ids))
    return results


@torch.no_grad()
def gap(model: Any, rollouts: Sequence[Rollout], temperature: float) -> float:
    """Largest difference to the log-probs of a plain forward pass."""
    gaps = []
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids]])
        logits = model(ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1].float()
        logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
        own_logprobs = logprobs.gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0].numpy()
        gaps.append(np.abs(own_logprobs - rollout.sampler_logprobs).max())
    return float(max(gaps))


@torch.no_grad()
def shake(model: Any, size: float = 0.2) -> None:
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight) * size * weight.std(correction=0))


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def same(first: Sequence[Rollout], second: Sequence[Rollout]) -> bool:
    """Whether the rollouts that both hold are equal."""
    rollouts_by_key = {rollout.key: rollout for rollout in first}
    return all(
        rollouts_by_key[r.key].token_ids == r.token_ids and rollouts_by_key[r.key].text == r.text
        for r in second
    )


def sentence(call: Any) -> str:
    try:
        call()
    except (DataError, ModelError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def probe_publishing(sampler: VLLMSampler, model: Any, prompts: list[Prompt]) -> dict[str, Any]:
    """Gaps to the new and to the old weights over several updates."""
    plain = SAMPLINGS["plain"]
    results: dict[str, Any] = {"new": [], "old": [], "versions": []}
    before = snapshot(model)
    for version in (5, 6, 7):
        shake(model)
        sampler.load_weights(Weights(snapshot(model), version))
        results["versions"].append(sampler.weight_version)
        rollouts = list(sampler.generate(prompts, plain, version))
        results["new"].append(gap(model, rollouts, 1.0))
        after = snapshot(model)
        model.load_state_dict(before, strict=False)
        results["old"].append(gap(model, rollouts, 1.0))
        model.load_state_dict(after, strict=False)
        before = after
    results["stamps"] = sorted({rollout.weight_version for rollout in rollouts})
    return results


def probe_bundled(config: Config, tokenizer: Any) -> dict[str, Any]:
    """The bundled model, whose output head is tied to its embedding."""
    results: dict[str, Any] = {}
    prompts = make_prompts(tokenizer)
    model = load_policy(model_folder("embedded")).model
    sampler = build_sampler(config, tokenizer)
    assert isinstance(sampler, VLLMSampler)
    hf = HFSampler(
        model,
        eos_token_ids=stop_token_ids(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        max_num_seqs=64,
        detokenize=partial(decode_text, tokenizer),
    )
    greedy = SAMPLINGS["greedy"]
    vllm_rollouts = list(sampler.generate(prompts, greedy, 2))
    hf_rollouts = list(hf.generate(prompts, greedy, 2))
    results["greedy"] = (
        same(vllm_rollouts, hf_rollouts) and len(vllm_rollouts) == len(hf_rollouts) == 16
    )
    results["finish"] = sorted({rollout.finish_reason for rollout in vllm_rollouts})
    eos = stop_token_ids(model, tokenizer)
    results["ends"] = all(
        (r.token_ids[-1] in eos) == (r.finish_reason == "stop") for r in vllm_rollouts
    )
    cut = list(sampler.generate(prompts, Sampling(n=1, temperature=0.0, max_tokens=1), 2))
    results["cut"] = {(r.finish_reason, len(r.token_ids)) for r in cut} == {("length", 1)}
    stops = Sampling(n=2, temperature=0.0, max_tokens=24, stop=("1", "20"))
    vllm_rollouts, hf_rollouts = (
        list(sampler_of_kind.generate(prompts, stops, 2)) for sampler_of_kind in (sampler, hf)
    )
    results["stops"] = same(vllm_rollouts, hf_rollouts) and any(
        "1" in r.text for r in vllm_rollouts
    )
    results["stopped"] = [r.text for r in vllm_rollouts]
    results["gaps"], results["alike"], results["spread"] = {}, {}, {}
    for name, sampling in SAMPLINGS.items():
        rollouts = list(sampler.generate(prompts, sampling, 2))
        results["gaps"][name] = gap(model, rollouts, sampling.temperature)
        repeated = list(sampler.generate([prompts[6], prompts[1]], sampling, 2))
        results["alike"][name] = same(rollouts, repeated) and len(repeated) == 2 * sampling.n
        results["spread"][name] = len({r.token_ids for r in rollouts})
    windows = Sampling(n=4, max_tokens=24, new_tokens=3)
    begun = list(sampler.generate(prompts, windows, 2))
    results["paused"] = sorted({(r.finish_reason, len(r.token_ids) == 3) for r in begun})
    begun = [r for r in begun if r.finish_reason == "unfinished"]
    complete = list(sampler.generate((), Sampling(max_tokens=24), 3, begun))
    begun_ids = {r.key: r.token_ids for r in begun}
    results["went on"] = len(complete) == len(begun) > 0 and all(
        r.token_ids[:3] == begun_ids[r.key] and len(r.token_ids) > 3 == r.carried for r in complete
    )
    results["gaps"]["went on"] = gap(model, complete, 1.0)
    repeated = list(sampler.generate((), Sampling(max_tokens=24), 3, begun[::-2]))
    results["alike"]["went on"] = (
        same(complete, repeated) and len(repeated) == (len(begun) + 1) // 2
    )
    # A caller that walks away leaves nothing behind.
    stream = sampler.generate(prompts, SAMPLINGS["plain"], 2)
    next(stream)
    stream.close()
    results["after a break"] = len(list(sampler.generate(prompts, SAMPLINGS["plain"], 2)))
    results["too long"] = sentence(
        lambda: sampler.generate(prompts, Sampling(max_tokens=LONGEST), 2)
    )
    results["publishing"] = probe_publishing(sampler, model, prompts)
    weights = snapshot(model)
    weights["model.norm.weight"].fill_(float("nan"))
    sampler.load_weights(Weights(weights, 8))
    results["nan"] = sentence(lambda: list(sampler.generate(prompts, SAMPLINGS["plain"], 8)))
    sampler.close()
    sampler.close()
    return results


def probe_untied(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """A random model with an output head of its own."""
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
        tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(shape).eval()
    model.save_pretrained(folder)
    sampler = VLLMSampler(
        str(folder),
        eos_token_ids=frozenset({tokenizer.eos_token_id}),
        detokenize=partial(decode_text, tokenizer),
        max_model_len=LONGEST,
        max_num_seqs=16,
        gpu_memory_utilization=0.5,
    )
    results = probe_publishing(sampler, model, make_prompts(tokenizer))
    sampler.close()
    return results


def probe_lora(config: Config, tokenizer: Any) -> dict[str, Any]:
    """Only the adapter travels."""
    inject = adapt(config.model, config.trainer.seed)
    assert inject is not None
    prompts, plain = make_prompts(tokenizer), SAMPLINGS["plain"]
    model = load_policy(model_folder("embedded")).model
    sampler = build_sampler(config, tokenizer)
    results: dict[str, Any] = {"new": [], "old": []}
    rollouts = list(sampler.generate(prompts, plain, 0))
    results["base"] = gap(model, rollouts, 1.0)
    inject(model)
    for version in (1, 2, 3):
        for _, tensor in adapter_tensors(model):
            tensor.data.normal_(std=0.2)
        tensors = {name: t.detach().clone() for name, t in adapter_tensors(model)}
        results["old"].append(gap(model, rollouts, 1.0))
        sampler.load_weights(Weights(tensors, version, adapter=True))
        rollouts = list(sampler.generate(prompts, plain, version))
        results["new"].append(gap(model, rollouts, 1.0))
    sampler.close()
    return results


def probe_client() -> dict[str, Any]:
    """How two samplers of two GPUs each are led through an exchange; no GPU takes part."""
    from ppo_cli.engine.samplers.weight_transfer import SamplerClient, Sender, TensorSource

    calls: list[tuple[str, list[tuple[Any, ...]]]] = []

    class Backend:
        """Stands where vLLM's sender does, which needs a GPU."""

        def send_weights(self) -> None:
            client.start_weight_update()
            client.update_weights([m.name for m in source.metadata()])
            client.finish_weight_update()

        def shutdown(self) -> None:
            """Hold nothing."""

    source = TensorSource([("w", torch.float32, (2,))], lambda: iter([("w", torch.ones(2))]))
    client = SamplerClient(lambda *call: calls.append(call), num_samplers=2, gpus_each=2)
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 1 + client.num_gpus})
    sender = Sender(Backend(), client)
    sender.send(9)
    sender.close()
    return {"calls": calls, "largest": source.largest_bytes, "chunks": pack_chunks()}


def pack_chunks() -> list[int]:
    """Sizes of vLLM's chunks by NCCL, of 4 bytes, with tensors that are smaller and larger."""
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    sizes, chunks = (3, 9, 2, 2, 2, 20, 1), []
    tensors = iter([(str(size), torch.zeros(size, dtype=torch.uint8)) for size in sizes])
    while (chunk := pack_tensors(tensors, lambda item: item[1], 4)) is not None:
        chunks.append(chunk.packed_tensor.numel())
    return chunks


def connect_gloo(learner: Learner, sampler: Any) -> Any:
    """A sender of the learner's weights to the sampler, through a group of their own."""
    from ppo_cli.engine.samplers.weight_transfer import SamplerClient, TensorSource, connect

    def ask_all(method: str, arguments: list[tuple[Any, ...]]) -> None:
        getattr(sampler, method)(*arguments[0])

    shapes = [(name, t.dtype, tuple(t.shape)) for name, t in learner.published()]
    source = TensorSource(shapes, learner.published)
    client = SamplerClient(ask_all, num_samplers=1, gpus_each=1)
    return connect("gloo", source, client, rank=0, address="127.0.0.1", port=0, timeout_s=60)


def probe_gloo(config: Config, tokenizer: Any) -> dict[str, Any]:
    """A learner's merged weights go to a sampler over the network."""
    prompts, plain = make_prompts(tokenizer), SAMPLINGS["plain"]
    learner = Learner(config, tokenizer, total_steps=1)
    model = learner.policy.model
    sampler = build_sampler(config, tokenizer, transfer="gloo")
    sender = connect_gloo(learner, sampler)
    results: dict[str, Any] = {"new": [], "old": []}
    rollouts = list(sampler.generate(prompts, plain, 0))
    for version in (1, 2, 3):
        for _, tensor in adapter_tensors(model):
            tensor.data.normal_(std=0.2)
        results["old"].append(gap(model, rollouts, 1.0))
        sender.send(version)
        rollouts = list(sampler.generate(prompts, plain, version))
        results["new"].append(gap(model, rollouts, 1.0))
    results["version"] = sampler.weight_version
    sender.close()
    sampler.close()
    return results


def probe_experts(path: str, tokenizer: Any, transfer: Transfer) -> dict[str, Any]:
    """All weights of a model whose experts are one by one in its files."""
    config = read_config(f"model.path={path}")
    prompts, plain = make_prompts(tokenizer), SAMPLINGS["plain"]
    learner = Learner(config, tokenizer, total_steps=1)
    sampler = build_sampler(config, tokenizer, transfer=transfer)
    sender = connect_gloo(learner, sampler) if transfer == "gloo" else None
    results: dict[str, Any] = {"new": [], "old": []}
    rollouts = list(sampler.generate(prompts, plain, 0))
    results["base"] = gap(learner.policy.model, rollouts, 1.0)
    for version in (1, 2, 3):
        shake(learner.policy.model)
        results["old"].append(gap(learner.policy.model, rollouts, 1.0))
        if sender is None:
            weights = learner.weights()
            assert weights is not None
            sampler.load_weights(replace(weights, version=version))
        else:
            sender.send(version)
        rollouts = list(sampler.generate(prompts, plain, version))
        results["new"].append(gap(learner.policy.model, rollouts, 1.0))
    sampler.close()
    return results


def probe_unloadable(path: str, tokenizer: Any) -> str:
    """Experts that vLLM's loader writes where a reload does not see them."""
    config = read_config(f"model.path={path}")
    weights = Learner(config, tokenizer, total_steps=1).weights()
    assert weights is not None
    sampler = build_sampler(config, tokenizer)
    message = sentence(lambda: sampler.load_weights(weights))
    sampler.close()
    return message


def save_head(folder: Path, noise: float) -> str:
    """The bundled model, which ties its output layer, with one in the files all the same."""
    shutil.copytree(model_folder("embedded"), folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    torch.manual_seed(0)
    change = torch.randn_like(embedding) * embedding.std() * noise
    file.unlink()
    save_file(tensors | {"lm_head.weight": embedding + change}, file, {"format": "pt"})
    return str(folder)


def probe_sleep(config: Config, tokenizer: Any) -> dict[str, Any]:
    """vLLM's own scheduler and executor through sleep and waking; the CPU gives no memory back."""
    prompts, model = make_prompts(tokenizer), load_policy(model_folder("embedded")).model
    sampler = build_sampler(config, tokenizer)
    assert isinstance(sampler, VLLMSampler)
    from vllm.v1.worker.cpu_worker import CPUWorker

    CPUWorker.discard = lambda self, tags: None
    engine, results = sampler._engine, {}
    executor = engine.engine_core.engine_core.model_executor

    def state() -> list[Any]:
        return [sorted(executor.sleeping_tags), engine.is_sleeping()]

    for mode in ("keep", "offload", "discard"):
        sampler._sleep = mode  # type: ignore[assignment]
        before = list(sampler.generate(prompts, SAMPLINGS["plain"], 1))
        states = []
        for _ in range(2):  # the second time with a cache that is still asleep
            sampler.sleep()
            states.append(state())
            sampler.wake_weights()
            states.append(state())
            sampler.load_weights(Weights(snapshot(model), 1))
        sampler.wake_cache()
        states.append(state())
        after = list(sampler.generate(prompts, SAMPLINGS["plain"], 1))
        results[mode] = {"states": states, "same": same(before, after) and len(after) == 32}
    sampler.close()
    return results


def probe_mistakes(folder: Path, tokenizer: Any) -> dict[str, str]:
    """Models that vLLM does not take."""
    odd = folder / "odd"
    GPT2Config(vocab_size=300, n_embd=30, n_head=2, n_layer=1).save_pretrained(odd)
    config = json.loads((odd / "config.json").read_text())
    strange = folder / "strange"
    strange.mkdir()
    (strange / "config.json").write_text(
        json.dumps(config | {"architectures": ["NoSuchModelForCausalLM"]})
    )

    def start(path: Path | str, longest: int = LONGEST) -> Any:
        return VLLMSampler(
            str(path), eos_token_ids=frozenset({1}), detokenize=str, max_model_len=longest,
            gpu_memory_utilization=0.5,
        )  # fmt: skip

    return {
        "too long": sentence(lambda: start(model_folder("embedded"), 1_000_000)),
        "architecture": sentence(lambda: start(strange)),
        "no weights": sentence(lambda: start(odd)),
        "no folder": sentence(lambda: start(folder / "nowhere")),
    }


def read_config(*args: str) -> Config:
    settings = ["rollout.name=vllm", "data.max_prompt_length=64", "data.max_response_length=64",
             "rollout.max_num_seqs=32", "model.path=embedded", *args]  # fmt: skip
    return resolve(flags={}, preset=None, config_files=[], overrides=settings, environ={}).config


def probe_layers(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """Models without experts, and whatever does not depend on the model."""
    return {
        "pid": os.getpid(),
        "bundled": probe_bundled(read_config(), tokenizer),
        "untied": probe_untied(folder / "untied", tokenizer),
        "lora": probe_lora(read_config("model.lora_rank=4", "model.lora_alpha=8"), tokenizer),
        "client": probe_client(),
        "gloo": probe_gloo(
            read_config("model.lora_rank=4", "model.lora_alpha=8", "model.lora_merge=true"),
            tokenizer,
        ),
        "sleep": probe_sleep(read_config(), tokenizer),
        "mistakes": probe_mistakes(folder, tokenizer),
    }


def probe_files(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """Models whose files have other tensors; a process makes groups of experts at its start."""
    mixtral = save_model(folder, "mixtral", **WIDE)
    cases = (
        ("mixtral", mixtral, "memory"),
        ("mixtral", mixtral, "gloo"),
        ("qwen3_moe", save_model(folder, "qwen3_moe", **WIDE), "memory"),
        ("untied files", save_head(folder / "head", 0.3), "memory"),
        ("files with a copy", save_head(folder / "copy", 0.0), "memory"),
    )
    results: dict[str, Any] = {
        f"{kind} by {way}": probe_experts(path, tokenizer, way) for kind, path, way in cases
    }
    return results | {
        "unloadable": probe_unloadable(save_model(folder, "gpt_oss", **WIDE), tokenizer)
    }


if __name__ == "__main__":
    part = {"layers": probe_layers, "files": probe_files}[sys.argv[2]]
    print(json.dumps(part(Path(sys.argv[1]), load_tokenizer(model_folder("embedded")))))
