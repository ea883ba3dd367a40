"""Which sampler samples which prompts: a fixed rule, balanced by length."""

from __future__ import annotations

from collections.abc import Sequence

from ppo_cli.records import Prompt


def deal_prompts(
    prompts: Sequence[Prompt], samplers: int, max_tokens: int
) -> list[tuple[Prompt, ...]]:
    """Deal prompts, the longest first, each to the sampler with the least to do.

    Nobody knows yet how long responses become, so each counts as `max_tokens`. Within a
    sampler the order stays; what is sampled does not depend on who does it.
    """
    work = [0] * samplers
    hands: list[list[int]] = [[] for _ in range(samplers)]
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i].token_ids), i))
    for i in order:
        least = min(range(samplers), key=lambda s: (work[s], s))
        hands[least].append(i)
        work[least] += len(prompts[i].token_ids) + max_tokens
    return [tuple(prompts[i] for i in sorted(hand)) for hand in hands]
