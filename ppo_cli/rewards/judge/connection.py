"""The connection to one judge: provider, ledger, cache and the clients that use them.

Built by `connect_judge` for a judge reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import RewardError, ppo
from ppo_cli.plugins import load
from ppo_cli.processes.event_loop import LoopThread
from ppo_cli.rewards.base import Tell
from ppo_cli.rewards.judge.cache import VerdictCache, cache_key, cache_path
from ppo_cli.rewards.judge.calls import JudgeError, Question
from ppo_cli.rewards.judge.client import (
    PARSE_ATTEMPTS,
    Answerer,
    JudgeClient,
    judge_label,
    reach_judge,
)
from ppo_cli.rewards.judge.costs import OTHER, Ledger, SharedLedger, build_ledger, share_ledger
from ppo_cli.rewards.judge.prices import batch_price
from ppo_cli.rewards.judge.providers import build_provider
from ppo_cli.rewards.judge.providers.base import SdkProvider
from ppo_cli.rewards.remote.failures import Failure
from ppo_cli.rewards.remote.limits import Limits
from ppo_cli.secrets.redact import redact
from ppo_cli.signals import shorten_wait

DRAIN_S = 20.0  # time for calls in flight to finish when a run ends: they are paid for


class BatchJudge(Answerer, Protocol):
    """Asks a provider through batch jobs, which an earlier command may have submitted."""

    def has_open_job(self) -> bool:
        """Whether an earlier command left an unfinished job of this judge."""

    def waiting_for(self) -> str | None:
        """Return the jobs that are waited for and their states; from any thread."""

    async def stop(self) -> None:
        """Stop waiting for jobs; they go on at the provider."""


@dataclass
class JudgeConnection:
    """What all calls to one judge share; `client` asks in batches where the settings say so."""

    provider: SdkProvider
    ledger: Ledger
    cache: VerdictCache | None
    direct: JudgeClient
    client: JudgeClient
    batch: BatchJudge | None = None
    shared: SharedLedger | None = None  # of a further judge, which spends from the first one's

    def test_question(
        self, question: Question, api: ApiReward, loop: LoopThread, *, patient: bool, tell: Tell
    ) -> None:
        """Ask one question, to show that key, model and reply format are right.

        A question with a cached verdict is not asked. Raises RewardError when the judge cannot be
        used, and JudgeError when it refuses this text or does not fit it into its context.
        """
        key = cache_key(self.provider.identity, question)
        cached = self.cache is not None and self.cache.get(key) is not None
        # A batch needs a request format that a direct call has shown to work.
        if cached and (self.batch is None or self.batch.has_open_job()):
            return
        try:
            verdict = reach_judge(loop, self.direct, question, api, patient=patient, tell=tell)
        except JudgeError as error:
            if error.kind is not Failure.UNPARSED:
                raise
            raise RewardError(_describe_unreadable(error, api, self.provider.max_answer)) from error
        if self.cache is not None:
            self.cache.put(key, verdict)

    async def close(self) -> None:
        """Let calls in flight finish, then close the clients; the cache stays open."""
        if self.batch is not None:
            await self.batch.stop()
        await self.client.close(shorten_wait(DRAIN_S))
        await self.direct.close()


def connect_judge(api: ApiReward, environ: Mapping[str, str]) -> JudgeConnection:
    """Build the connection that the settings describe; sends nothing yet."""
    # Directly: one client within the limits of the settings.
    provider = build_provider(api, environ=environ)
    ledger = build_ledger(api)
    path = cache_path(api)
    cache = None if path is None else VerdictCache(path)
    direct = JudgeClient(provider, limits=Limits.of(api), ledger=ledger, cache=cache)
    if api.batch_wait is None or cache is None:
        return JudgeConnection(provider, ledger, cache, direct, direct)
    # Without limits: a batch job takes all questions at once, at another price.
    batch: BatchJudge = load("batches", provider.batches)(provider, cache, wait_s=api.batch_wait)
    shared = SharedLedger(ledger, batch_price(ledger.price, api), api.type, batch.model)
    unlimited = Limits(concurrency=10**6, timeout=math.inf, deadline=math.inf)
    client = JudgeClient(batch, limits=unlimited, ledger=shared, cache=cache)
    return JudgeConnection(provider, ledger, cache, direct, client, batch)


def connect_other(
    api: ApiReward, environ: Mapping[str, str], connection: JudgeConnection
) -> JudgeConnection:
    """Build the connection of a further judge, which spends from the same ledger."""
    provider = build_provider(api, environ=environ, flags="reward.api.judges.NAME.")
    shared, cache = share_ledger(connection.ledger, api, OTHER), connection.cache
    client = JudgeClient(provider, limits=Limits.of(api), ledger=shared, cache=cache)
    return JudgeConnection(provider, connection.ledger, cache, client, client, shared=shared)


def _describe_unreadable(error: JudgeError, api: ApiReward, answer_room: int | None) -> str:
    """Return the message for a judge of which no first reply can be read."""
    judge = judge_label(api)
    # A context that is too small, a token limit that is too low, or a wrong format.
    if error.cause == "truncated" and answer_room is not None:
        return (
            f"The judge {judge} does not come to an end: its context leaves {answer_room} tokens "
            f"for an answer, and {PARSE_ATTEMPTS} answers were cut there. Serve it with a longer "
            "context, or try another --rm_model."
        )
    if error.cause == "truncated":
        return (
            f"The judge {judge} does not come to an end: {PARSE_ATTEMPTS} answers were cut at "
            f"{api.max_tokens} tokens. Raise --rm_max_tokens, or try another --rm_model."
        )
    return (
        f"The judge {judge} answers, but no score can be read from it ({error.summary}). It "
        f'said: "{redact(error.reply[:200])}". Try a stronger --rm_model or another --rm_output, '
        f"or see the request with `{ppo('prompts render embedded')}` and the same --rm_ flags."
    )
