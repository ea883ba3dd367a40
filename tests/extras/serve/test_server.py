"""`ppo serve --tinker` in its wire format: losses, gradients, samples, files, extra calls."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_cli.config.models.bundled import model_folder
from tests.extras.serve.conftest import Client, serving

FOLDER = model_folder("embedded")
Row = dict[str, list[float]]
Connect = Callable[[str], Client]


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER)


def encode(text: str) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(FOLDER).encode(text)
    return ids


def target_logprobs(row: Row) -> Tensor:
    """transformers' own log-probs of a row's targets, one row at a time, with gradients."""
    logits = model()(input_ids=torch.tensor([row["tokens"]])).logits[0]
    targets = torch.tensor(row["target_tokens"], dtype=torch.int64)
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def make_rows(*names: str, count: int = 3) -> list[Row]:
    """Rows of different lengths, with targets that are not the next tokens, and other inputs."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in range(5, 5 + 4 * count, 4):
        row: Row = {
            name: torch.randint(0, 270, (length,), generator=generator).tolist()
            for name in ("tokens", "target_tokens")
        }
        row |= {name: torch.randn(length, generator=generator).tolist() for name in names}
        if "logprobs" in row:  # near the model's own, so that some ratios are clipped
            near = target_logprobs(row).detach() + 0.3 * torch.tensor(row["logprobs"])
            row["logprobs"] = near.tolist()
        if "sequence_ratio_mask" in row:
            row["sequence_ratio_mask"] = [0.0, 0.0] + [1.0] * (length - 2)
            row["advantages"][:2] = [0.0, 0.0]
        rows.append(row)
    return rows


# Each loss of a row by hand: p the log-probs, q those of the sampler, A the advantages.
Formula = Callable[[Tensor, Tensor, Tensor], Tensor]
HAND: dict[str, tuple[dict[str, float], Formula]] = {
    "importance_sampling": ({}, lambda p, q, A: -((p - q).exp() * A)),
    "ppo": (
        {"clip_high_threshold": 1.1},
        lambda p, q, A: -torch.minimum((p - q).exp() * A, (p - q).exp().clamp(0.8, 1.1) * A),
    ),
    "cispo": (
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.2},
        lambda p, q, A: -((p - q).exp().clamp(0.9, 1.2).detach() * A * p),
    ),
    "gspo": (
        {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05},
        lambda p, q, A: (
            -torch.minimum(
                ((p - q)[2:].mean().detach() + p - p.detach()).exp() * A,
                ((p - q)[2:].mean().detach() + p - p.detach()).exp().clamp(0.95, 1.05) * A,
            )
        ),
    ),
    "dro": ({"beta": 0.2}, lambda p, q, A: -(p * A - 0.1 * (p - q) ** 2)),
}


@pytest.mark.parametrize("loss", HAND)
def test_losses_and_gradients_are_those_of_the_formulas(client: Client, loss: str) -> None:
    config, formula = HAND[loss]
    rows = make_rows("logprobs", "advantages", *["sequence_ratio_mask"] * (loss == "gspo"))
    name = client.create(0)
    total, logprobs = client.batch(name, rows, loss, **config)
    model().zero_grad()
    hand = torch.zeros(())
    for row, got in zip(rows, logprobs, strict=True):
        new = target_logprobs(row)
        assert np.abs(new.detach().numpy() - got).max() < 1e-5
        old, advantages = torch.tensor(row["logprobs"]), torch.tensor(row["advantages"])
        hand = hand + formula(new, old, advantages).sum()
    hand.backward()
    # Processors round the log-prob of a token differently.
    tokens = sum(len(row["advantages"]) for row in rows)
    assert total == pytest.approx(hand.item(), abs=1e-5 * tokens)
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in model().parameters()))
    assert client.step(name)["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_gradients_of_calls_add_up_and_steps_are_those_of_adamw(client: Client) -> None:
    rows = make_rows("weights")
    results = []
    for split in (1, 3):
        name = client.create(8, seed=3)
        for _ in range(2):
            losses = [client.batch(name, rows[:split])[0]]
            losses += [client.batch(name, rows[split:])[0]] if split < 3 else []
            client.batch(name, rows, forward_only=True)
            norm = client.step(name)["grad_norm"]
        results.append((sum(losses), norm, client.batch(name, rows, forward_only=True)[0]))
    assert results[0] == pytest.approx(results[1], rel=1e-4)
    # All weights: one step of torch's AdamW.
    name = client.create(0)
    client.batch(name, rows)
    client.step(name)
    twin = AutoModelForCausalLM.from_pretrained(FOLDER)
    adamw = torch.optim.AdamW(
        twin.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0
    )
    for row in rows:
        logits = twin(input_ids=torch.tensor([row["tokens"]])).logits[0].log_softmax(-1)
        picked = logits.gather(1, torch.tensor(row["target_tokens"])[:, None])[:, 0]
        (-(picked * torch.tensor(row["weights"])).sum()).backward()
    adamw.step()
    logits = twin(input_ids=torch.tensor([rows[0]["tokens"]])).logits[0].log_softmax(-1)
    picked = logits.gather(1, torch.tensor(rows[0]["target_tokens"])[:, None])[:, 0]
    after = client.batch(name, rows, forward_only=True)[1][0]
    assert np.abs(picked.detach().numpy() - after).max() < 1e-3


def test_samples_have_seeds_ends_and_the_log_probs_of_the_model(client: Client) -> None:
    prompt = encode("What is 3+4?")
    sampler = client.post(
        "create_sampling_session", session_id=client.session, sampling_session_seq_id=0,
        base_model="embedded",
    )["sampling_session_id"]  # fmt: skip
    samples, scored = client.sample(sampler, prompt, seed=5, num_samples=4, prompt_logprobs=True)
    assert samples[0][0] == client.sample(sampler, prompt, seed=5, num_samples=4)[0][0][0]
    # Each token's log-prob, and those of the prompt but for its first token.
    for tokens, logprobs, _ in samples:
        ids = prompt + tokens
        expected = target_logprobs({"tokens": ids[:-1], "target_tokens": ids[1:]}).detach().numpy()
        assert np.abs(expected[len(prompt) - 1 :] - logprobs).max() < 1e-4
    assert math.isnan(scored[0]) and np.abs(expected[: len(prompt) - 1] - scored[1:]).max() < 1e-4
    last = client.sample(sampler, prompt, prompt_logprobs=True, prompt_logprobs_last_n=2)[1]
    assert np.isnan(last[:-2]).all() and (last[-2:] == scored[-2:]).all()
    # What ends a response: the model's own token, a token, a string, or with [] nothing.
    greedy = {"temperature": 0.0, "num_samples": 1}
    (tokens, _, reason), *_ = client.sample(sampler, prompt, **greedy)[0]
    assert reason == 0 and tokens[-1] == model().generation_config.eos_token_id
    (whole, _, reason), *_ = client.sample(sampler, prompt, stop=[], **greedy)[0]
    assert (len(whole), reason) == (8, 1) and whole[: len(tokens)] == tokens
    first = AutoTokenizer.from_pretrained(FOLDER).decode(tokens[:1])
    assert client.sample(sampler, prompt, stop="", **greedy)[0][0][0] == tokens
    for stop in ([tokens[0]], first, [first]):
        assert client.sample(sampler, prompt, stop=stop, **greedy)[0][0][0] == tokens[:1]


def test_requests_without_a_seed_repeat_with_the_counters_of_the_client(
    url: str, connect: Connect
) -> None:
    drawn = []
    for _ in range(2):
        client = connect(url)
        name = client.create(8)
        client.batch(name, make_rows("weights"))
        client.step(name)
        saved = client.queue("save_weights_for_sampler", model_id=name, sampling_session_seq_id=0)
        sampler = saved["sampling_session_id"]
        drawn.append([client.sample(sampler, encode("2+2?"), num_samples=3)[0] for _ in range(2)])
    assert repr(drawn[0]) == repr(drawn[1])
    assert repr(drawn[0][0]) != repr(drawn[0][1])


@pytest.mark.slow
def test_a_new_server_continues_from_states_that_a_killed_one_saved(
    tmp_path: Path, connect: Connect
) -> None:
    rows = make_rows("weights")

    def train(client: Client, name: str) -> list[float]:
        return [client.batch(name, rows)[0] + client.step(name)["grad_norm"] for _ in range(2)]

    saved = {}
    with serving(tmp_path, end=signal.SIGKILL) as (url, _):
        client = connect(url)
        for rank in (0, 8):
            name = client.create(rank)
            train(client, name)
            paths = [
                client.queue(route, model_id=name, path="half")["path"]
                for route in ("save_weights", "save_weights_for_sampler")
            ]
            again = client.queue("save_weights", model_id=name, path="half")
            assert "already" in again["error"] and again["category"] == "user"
            saved[rank] = (*paths, train(client, name))
    # What it was writing when it was killed; no process has this number.
    (tmp_path / name / "weights" / f".unfinished-{2**22 + 1}.1-half").mkdir()
    with serving(tmp_path) as (url, _):
        client = connect(url)
        for rank, (state, policy, expected) in saved.items():
            names = [
                client.wait(client.post(
                    "load_weights", session_id=client.session, model_seq_id=10 * rank + i,
                    path=state, optimizer=i == 0,
                ))["model_id"]
                for i in range(2)
            ]  # fmt: skip
            # With the moments of the optimizer to the last bit, without them not.
            assert train(client, names[0]) == expected
            assert train(client, names[1]) != expected
            assert client.post("get_info", model_id=names[0])["lora_rank"] == rank
            sampler = client.post(
                "create_sampling_session", session_id=client.session,
                sampling_session_seq_id=rank, model_path=policy,
            )["sampling_session_id"]  # fmt: skip
            assert len(client.sample(sampler, encode("2+2?"))[0]) == 2
            # The weights for samplers are a folder that others load.
            folder = tmp_path.joinpath(*policy.removeprefix("tinker://").split("/"))
            if rank:
                assert load_file(folder / "adapter_model.safetensors")
            else:
                AutoModelForCausalLM.from_pretrained(folder)
    assert not list(tmp_path.rglob(".unfinished*"))


def test_mistakes_are_answered_with_a_sentence(client: Client) -> None:
    name, rows = client.create(8), make_rows("weights", count=1)
    state = client.queue("save_weights", model_id=name, path="state")["path"]
    sampler = client.post(
        "create_sampling_session", session_id=client.session, sampling_session_seq_id=0,
        base_model="embedded",
    )["sampling_session_id"]  # fmt: skip
    wrong = {
        "take one of cross_entropy": client.batch(name, rows, "stable_reinforce"),
        "'target_tokens', 'weights'": client.batch(name, make_rows("mask", count=1)),
        "has ['beta'], not ['gamma']": client.batch(
            name, make_rows("logprobs", "advantages", count=1), "dro", gamma=1.0
        ),
        "below 282": client.batch(name, [{**rows[0], "tokens": [999] * 5}]),
        "no model": client.batch("nobody", rows),
        "embedded/model, not Qwen": client.wait(client.post(
            "create_model", session_id="s", model_seq_id=1, base_model="Qwen")),
        "1 to 128": client.wait(client.post(
            "create_model", session_id="s", model_seq_id=2, base_model="embedded",
            lora_config={"rank": 129})),
        "no tinker://x/weights/y": client.queue(
            "load_weights", model_id=name, path="tinker://x/weights/y", optimizer=True),
        "is not a path": client.queue("save_weights", model_id=name, path="../../x"),
        "4098 tokens; the model reads 4096": client.sample(sampler, [1] * 4090, max_tokens=8),
        "tokens alone": client.sample(sampler, [], prompt={"chunks": [{"type": "image"}]}),
        "has rank 8, the model 0": client.queue(
            "load_weights", model_id=client.create(0), path=state, optimizer=True),
        "not served, as": client.sample("s:sample:0", [1], record_stability_info=True),
        "at most 60 letters": client.queue("save_weights", model_id=name, path="x" * 61),
        "not integers": client.batch(name, rows, float_targets=True),
    }  # fmt: skip
    for text, reply in wrong.items():
        assert text in reply["error"] and reply["category"] == "user", (text, reply)
    assert client.sample(sampler, [1] * 4088, max_tokens=8)[0]  # all that the model reads
    refused = {
        ("save_weights_external", 404): {}, ("get_info", 422): {"model_id": "nobody"},
        ("create_model", 422): {}, ("retrieve_future", 422): {"request_id": "x"},
        ("create_sampling_session", 422): {"model_path": "tinker://x/sampler_weights/y"},
    }  # fmt: skip
    for (route, status), body in refused.items():
        reply = client.http.post(route, json=body)
        assert (reply.status_code, bool(reply.json()["detail"])) == (status, True), route
    for route, part, number, value in [
        ("asample", "sampling_params", "temperature", -1), ("asample", "", "num_samples", 0),
        ("asample", "sampling_params", "max_tokens", 0), ("asample", "sampling_params", "top_p", 0),
        ("optim_step", "adam_params", "learning_rate", None),
        ("create_model", "lora_config", "rank", -1),
    ]:  # fmt: skip
        body = {part: {number: value}} if part else {number: value}
        reply = client.http.post(route, json=body | {"session_id": "s", "base_model": "embedded"})
        assert reply.status_code == 422 and f"{number} is {value}" in reply.json()["detail"], number
    assert client.http.post("healthz", headers={"X-API-Key": "x"}).json() == {"status": "ok"}
    foreign = client.http.post("create_session", headers={"Host": "rebound.example"})
    del client.http.headers["X-API-Key"]
    assert foreign.status_code == client.http.post("create_session").status_code == 401


def test_the_model_in_use_stays_and_a_closed_session_frees_its_models(
    url: str, connect: Connect
) -> None:
    client, rows = connect(url), make_rows("weights", count=1)
    sampler = client.post(
        "create_sampling_session", session_id=client.session, sampling_session_seq_id=0,
        base_model="embedded",
    )["sampling_session_id"]  # fmt: skip
    first, *others = [client.create(2) for _ in range(2)]
    for _ in range(7):
        client.batch(first, rows, forward_only=True)
        client.create(2)
    assert len(client.batch(first, rows, forward_only=True)[1]) == len(rows)
    assert "no model" in client.batch(others[0], rows)["error"]
    # Hours of sampling end with the session that has asked for them.
    sampling = client.post(
        "asample", sampling_session_id=sampler, seq_id=0, prompt={"chunks": [{"tokens": [5]}]},
        num_samples=5000,
        sampling_params={"max_tokens": 4000, "temperature": 1, "top_p": 1, "top_k": -1, "stop": []},
    )  # fmt: skip
    assert client.http.post(f"sessions/{client.session}/finish", json={}).json() == {}
    assert "no model" in client.batch(first, rows)["error"]
    assert "Sampling stopped" in client.wait(sampling)["error"]


def test_critic_reference_and_reward_are_calls_beside_the_protocol(client: Client) -> None:
    name = client.create(8)
    client.batch(name, make_rows("weights"))
    client.step(name)
    rows = [
        {"prompt": encode(f"{n}+1?"), "response": encode("7 or 8" * n), "rewards": []}
        for n in (1, 2)
    ]
    for row in rows:
        row["rewards"] = [0.0] * (len(row["response"]) - 1) + [1.0]
    annotated = client.post("ppo/annotate", model_id=name, rows=rows)
    for row, columns in zip(rows, annotated, strict=True):
        ids = row["prompt"] + row["response"]
        expected = target_logprobs({"tokens": ids[:-1], "target_tokens": ids[1:]}).detach().numpy()
        ref = np.array(columns["ref_logprobs"])
        # The adapter is off in the reference, which is the base model.
        assert np.abs(expected[len(row["prompt"]) - 1 :] - ref).max() < 1e-4
        assert np.abs(np.array(columns["logprobs"]) - ref).max() > 1e-2
        # GAE by hand, from the end.
        advantage, after = 0.0, 0.0
        for t in reversed(range(len(ref))):
            value = columns["values"][t]
            advantage = row["rewards"][t] + after - value + 0.95 * advantage
            after = value
            assert columns["advantages"][t] == pytest.approx(advantage, abs=1e-5)
            assert columns["returns"][t] == pytest.approx(advantage + value, abs=1e-5)
    wanted = [{**row, "returns": [1.0] * len(row["response"])} for row in rows]
    losses = [
        client.post("ppo/train_critic", model_id=name, rows=wanted)["value_loss"] for _ in range(4)
    ]
    assert losses[-1] < losses[0]
    short = client.post("ppo/train_critic", model_id=name, rows=[{**wanted[0], "returns": [1.0]}])
    assert "one number for each token" in short["detail"]
    scores = client.post("ppo/score", rows=[
        {"prompt": "3+4?", "response": f"#### {n}", "ground_truth": "7"} for n in (7, 8)
    ])  # fmt: skip
    assert [row["score"] for row in scores] == [1.0, 0.0]
