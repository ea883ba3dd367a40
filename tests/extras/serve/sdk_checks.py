"""Run in .venv-tinker: python sdk_checks.py URL. What the SDK itself makes of the server."""

from __future__ import annotations

import sys
import time
from typing import Any

import tinker
import torch
from tinker import types

BASE = "embedded"


def datum(ids: list[int]) -> types.Datum:
    weights = torch.ones(len(ids) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": torch.tensor(ids[1:]), "weights": weights},
    )


def refused(call: Any, kind: type[Exception], text: str) -> None:
    begun = time.time()
    try:
        call().result()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"not refused: {text}")
    assert time.time() - begun < 20, "the SDK tried again"


def main(url: str) -> None:
    client = tinker.ServiceClient(base_url=url)
    trainer = client.create_lora_training_client(base_model=BASE, rank=8, seed=1).result()
    tokenizer = trainer.get_tokenizer()
    ids = tokenizer.encode("What is 3+4? 7")
    adam = types.AdamParams(learning_rate=1e-2)
    # A loss of one's own has the gradient of the server's loss.
    norms = []
    for custom in (False, True):
        if custom:
            future = trainer.forward_backward_custom(
                [datum(ids)], lambda data, logprobs: (-logprobs[0].sum(), {"mine:sum": 1.0})
            )
        else:
            future = trainer.forward_backward([datum(ids)], "cross_entropy")
        result = future.result()
        still = types.AdamParams(learning_rate=0.0)
        norms.append((result.metrics["loss:sum"], trainer.optim_step(still).result().metrics))
    assert abs(norms[0][0] - norms[1][0]) < 1e-3, norms
    assert abs(norms[0][1]["grad_norm"] - norms[1][1]["grad_norm"]) < 1e-3, norms
    # Batches of many chunks, and steps without waiting in between.
    rows = [datum(ids[: 3 + n % 8]) for n in range(2500)]
    futures = [trainer.forward_backward(rows, "cross_entropy"), trainer.optim_step(adam)]
    assert len(futures[0].result().loss_fn_outputs) == len(rows) and futures[1].result()
    # States, sampler weights, and samplers of both kinds.
    path = trainer.save_state("a").result().path
    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompt, params = types.ModelInput.from_ints(ids), types.SamplingParams(max_tokens=5, seed=3)
    drawn = sampler.sample(prompt, 3, params, include_prompt_logprobs=True).result()
    assert len({sequence.sequence_id for sequence in drawn.sequences}) == 3
    assert drawn.prompt_logprobs[0] is None and drawn.prompt_logprobs[1] < 0
    twin = client.create_training_client_from_state_with_optimizer(path).result()
    saved = twin.save_weights_for_sampler("a").result().path
    again = client.create_sampling_client(model_path=saved).result()
    assert [s.tokens for s in again.sample(prompt, 3, params).result().sequences] == [
        s.tokens for s in drawn.sequences
    ]
    before = client.create_sampling_client(base_model=BASE).result()
    assert before.compute_logprobs(prompt).result() != again.compute_logprobs(prompt).result()
    # Mistakes are exceptions of the SDK, at once.
    failed = tinker.RequestFailedError
    refused(lambda: twin.forward_backward([datum(ids)], "stable_reinforce"), failed, "not served")
    refused(lambda: client.create_lora_training_client("Qwen/Qwen3-8B"), failed, "has embedded")
    refused(lambda: twin.save_state("a/b"), failed, "not a path")
    refused(lambda: before.sample(types.ModelInput.from_ints([9999]), 1, params), failed, "282")
    missing = "tinker://x/sampler_weights/y"
    refused(lambda: client.create_sampling_client(missing), tinker.APIStatusError, "There is no")
    refused(lambda: twin.save_weights_external("x"), tinker.APIStatusError, "is not served")
    print("all checks passed")


def sample_for_ever(url: str) -> None:
    client = tinker.ServiceClient(base_url=url)
    sampler = client.create_sampling_client(base_model=BASE).result()
    prompt = types.ModelInput.from_ints([5, 6])
    params = types.SamplingParams(max_tokens=400, stop=[])
    while True:
        futures = [sampler.sample(prompt, 4, params) for _ in range(8)]
        print("sampling", flush=True)
        for future in futures:
            future.result()


if __name__ == "__main__":
    (main if len(sys.argv) == 2 else sample_for_ever)(sys.argv[1])
