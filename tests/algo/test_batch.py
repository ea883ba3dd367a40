"""Rollouts to a batch: what samplers have given, and what some of them have not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ppo_cli.algo.batch import build_batch
from ppo_cli.records import Prompt, Rollout


def rollout(uid: str, *ids: int) -> Rollout:
    zeros = np.zeros(len(ids), np.float32)
    prompt = Prompt(uid, "", (), "", (1, 2))
    return Rollout(prompt, 0, ids, zeros, "", "stop", entropies=zeros + 0.5)


def test_entropies_are_there_where_every_rollout_has_them() -> None:
    both = (rollout("a", 3, 4), rollout("b", 5))
    entropies = build_batch(both, pad_token_id=0).sampler_entropy_BT
    assert entropies is not None and entropies.tolist() == [[0.5, 0.5], [0.5, 0.0]]
    for number in (0, 1):
        incomplete = [replace(r, entropies=None) if i == number else r for i, r in enumerate(both)]
        assert build_batch(incomplete, pad_token_id=0).sampler_entropy_BT is None
