"""Whose log-probs a learner takes: the sampler's, or those that the actor computes again."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_cli.algo.batch import merge_annotations
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.models import load_policy, load_tokenizer
from tests.engine.packed_steps import make_batch, settings

ROWS = ((3, 4), (2, 6))


@pytest.fixture(scope="module")
def learner() -> Learner:
    tokenizer = load_tokenizer(str(model_folder("embedded")))
    learner_of_kl = Learner(settings(algorithm={"kl_penalty": "kl"}), tokenizer, total_steps=1)
    learner_of_kl.publish()
    return learner_of_kl


@pytest.mark.parametrize(
    ("versions", "entropies", "annotate_again"),
    [
        ([1, 1], True, False),
        ([1, 0], True, True),  # a row of older weights
        ([0, 1], True, True),
        ([0, 0], True, True),
        ([1, 1], False, True),
    ],
)
def test_the_actor_is_asked_unless_all_rows_are_of_its_present_weights(
    learner: Learner, versions: list[int], entropies: bool, annotate_again: bool
) -> None:
    batch: Any = make_batch(ROWS, seed=0)
    batch = replace(
        batch,
        weight_version_B=torch.tensor(versions),
        sampler_entropy_BT=torch.zeros(2, 6) if entropies else None,
    )
    names = learner.annotate(batch).tensors.keys()
    assert {"ref_logprobs_BT", "values_BT"} <= names
    assert ({"old_logprobs_BT", "entropy_BT"} <= names) is annotate_again


def test_separate_samplers_logprobs_are_the_old_ones_if_bypassed() -> None:
    """Those of older weights too; without entropies -log p estimates them."""
    config = settings(
        trainer={"engine": "ray"}, actor={"policy_loss": {"loss_mode": "dis"}},
        algorithm={"kl_penalty": "kl"},
    )  # fmt: skip
    tokenizer = load_tokenizer(str(model_folder("embedded")))
    batch = make_batch(ROWS, seed=0)
    batch = replace(batch, sampler_logprobs_BT=-torch.rand(batch.response_mask_BT.shape))
    annotated = merge_annotations(
        batch, [Learner(config, tokenizer, total_steps=1).annotate(batch)]
    )
    assert annotated.old_logprobs_BT is batch.sampler_logprobs_BT
    assert torch.equal(annotated.entropy_BT, -batch.sampler_logprobs_BT)
    assert annotated.values_BT is not None and annotated.ref_logprobs_BT is not None


def test_an_adapters_reference_is_the_model_that_ref_path_names(tmp_path: Path) -> None:
    other = load_policy(str(model_folder("embedded"))).model
    torch.nn.init.zeros_(other.get_output_embeddings().weight)
    other.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(model_folder("embedded")))
    config = settings(
        algorithm={"kl_penalty": "kl"},
        model={"lora_rank": 2},
        critic={"model": {"path": "embedded"}},
        ref={"path": str(tmp_path)},
    )
    tensors = Learner(config, tokenizer, total_steps=1).annotate(make_batch(ROWS, seed=0)).tensors
    # With a head of zeros every token is as likely.
    likely = -math.log(other.config.vocab_size)
    mask_BT = tensors["ref_logprobs_BT"] != 0
    torch.testing.assert_close(tensors["ref_logprobs_BT"], likely * mask_BT)
    assert mask_BT.sum() == sum(response for _, response in ROWS)
