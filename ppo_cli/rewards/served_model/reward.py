"""The reward that asks a served reward model: rollouts in, raw scores out.

Everything that waits runs on one background event loop. Samples of a request are gathered in
the order in which they were submitted; what is left over goes out when the round is settled.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ppo_cli.config.known_models import find_adapter
from ppo_cli.config.reward_schema import ModelReward
from ppo_cli.errors import Interrupted, RewardError
from ppo_cli.records import Part, Prompt, Rollout, Score
from ppo_cli.redact import redact
from ppo_cli.rewards.base import Reward, RoundKind
from ppo_cli.rewards.judge.loop_thread import LoopThread
from ppo_cli.rewards.served_model.client import ServedModelClient
from ppo_cli.rewards.served_model.counters import Counters
from ppo_cli.rewards.served_model.exchange import Row, Sample
from ppo_cli.rewards.served_model.protocols import OpenRlhf, Rerank, Vllm
from ppo_cli.rewards.served_model.self_test import (
    PAIRS,
    check_raw,
    check_scores,
    like,
    until_answered,
)
from ppo_cli.rewards.served_model.writing import UnfitError, Writer

LINGER_S = 1.0  # a request that does not fill leaves after this, whether settled or not
_CLOSED = "The run ended before the reward model's server had answered."


@dataclass(eq=False)
class _Entry:
    sample: Sample
    future: Future[Score]


class ServedModelReward(Reward):
    """Scores by a reward model behind an address; see ModelReward for every setting."""

    def __init__(
        self, settings: ModelReward, *, name: str = "model",
        environ: Mapping[str, str] = os.environ,
    ) -> None:  # fmt: skip
        self.name = name
        self._settings = settings
        found = find_adapter(settings.path or "", settings.adapter)
        self.adapter, self.reason = found.adapter, found.reason
        self._writer = Writer(settings, self.adapter)
        self._wire = _wire_for(settings, self.adapter, chat=self._writer.chat)
        self._rows = settings.request_rows if self._wire.may_batch else 1
        self._key = _key_from(settings, environ)
        self._pending: dict[str, list[_Entry]] = {}
        self._under_way: dict[asyncio.Task[None], list[_Entry]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._client = self._new_client(None)
        self._closed = False
        self._loop = LoopThread(f"served-{name}")

    def start(
        self,
        prompts: Sequence[Prompt],
        *,
        patient: bool = False,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Ask for one tiny score, then see that scores are raw and that good is above bad."""
        for remark in self._writer.remarks():
            tell(remark)
        first = prompts[0] if prompts else None
        self._client = self._new_client(first)
        # One of each order of roles: a template may refuse some.
        for prompt in {tuple(m["role"] for m in p.messages): p for p in reversed(prompts)}.values():
            self._written(prompt, "I do not know.")
        self._loop.call(self._start(first, patient=patient, tell=tell))

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Put one rollout into the next request, which leaves when it is full."""
        if self._closed:
            raise RuntimeError("this reward is closed")
        future: Future[Score] = Future()
        self._loop.submit(self._take(rollout, future))
        return future

    def settle(self, kind: RoundKind = "train") -> None:
        """Send what is left over."""
        if not self._closed:
            self._loop.submit(self._flush_all())

    def waiting_for(self) -> str | None:
        """Say what the server is waited for, when it is down."""
        return self._client.outage.sentence()

    def measure(self) -> dict[str, float]:
        """`model/…` metrics since the last call."""
        return self._loop.call(self._measure(), timeout=60.0)

    def close(self) -> None:
        """Stop requests under way, and free connections and the thread."""
        if self._closed:
            return
        self._closed = True
        try:
            self._loop.call(self._close(), timeout=20.0)
        finally:
            self._loop.close()

    # --- the start ----------------------------------------------------------------------------

    def _new_client(self, first: Prompt | None) -> ServedModelClient:
        question, good, _ = PAIRS[0]
        settings = self._settings
        return ServedModelClient(
            self._wire, witness=self._written(like(first, question), good),
            timeout=settings.timeout, concurrency=settings.concurrency,
            outage_wait=settings.outage_wait, key=self._key,
        )  # fmt: skip

    def _written(self, prompt: Prompt, response: str) -> Sample:
        """Write a sample that has to fit."""
        try:
            return self._writer.write(prompt, response)
        except UnfitError as error:
            raise RewardError(
                f"A short answer to “{prompt.text[:60]}” does not fit the served reward model "
                f"({error}). Raise reward.model.max_length, or leave long prompts out."
            ) from None

    async def _start(
        self, first: Prompt | None, *, patient: bool, tell: Callable[[str], None]
    ) -> None:
        await until_answered(
            self._client, self._wire, redact(self._wire.url),
            outage_wait=self._settings.outage_wait, patient=patient, tell=tell,
        )  # fmt: skip
        asked = [like(first, question, n) for n, (question, _, _) in enumerate(PAIRS)]
        good = [self._written(p, PAIRS[n][1]) for n, p in enumerate(asked)]
        bad = [self._written(p, PAIRS[n][2]) for n, p in enumerate(asked)]
        if isinstance(self._wire, Vllm):
            await check_raw(self._client, self._wire, [*good[:2], *bad[:2]], tell)
        if self._settings.self_test != "off":
            try:
                await check_scores(self._client, good, bad, tell)
            except RewardError as failed:
                if self._settings.self_test == "strict":
                    raise
                tell(str(failed))
        self._client.counters = Counters()
        self._writer.take_counts()

    # --- scoring ------------------------------------------------------------------------------

    async def _take(self, rollout: Rollout, future: Future[Score]) -> None:
        self._client.counters.samples += 1
        try:
            sample = self._writer.write(rollout.prompt, rollout.text)
        except UnfitError as error:
            self._finish(future, Row(None, str(error)))
            return
        except RewardError as error:  # the template refuses this conversation
            self._finish(future, Row(None, f"not readable by the reward model: {error}"))
            return
        except Exception as error:
            future.set_exception(error)
            return
        waiting = self._pending.setdefault(sample.group, [])
        waiting.append(_Entry(sample, future))
        if len(waiting) >= self._rows:
            self._send(self._pending.pop(sample.group))
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._flush)

    async def _flush_all(self) -> None:
        self._flush()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._pending = self._pending, {}
        for entries in waiting.values():
            self._send(entries)

    def _send(self, entries: list[_Entry]) -> None:
        task = asyncio.get_running_loop().create_task(self._score(entries))
        self._under_way[task] = entries
        task.add_done_callback(lambda done: self._under_way.pop(done, None))

    async def _score(self, entries: list[_Entry]) -> None:
        """Bring every future to its end; `_close` does so for those that are cancelled."""
        try:
            rows = await self._client.score([entry.sample for entry in entries])
        except Exception as error:
            _end(entries, error)
            return
        for entry, row in zip(entries, rows, strict=True):
            self._finish(entry.future, row)

    def _finish(self, future: Future[Score], row: Row) -> None:
        if row.value is None:
            self._client.counters.failed += 1
            score = Score.failed(row.failure)
        else:
            info = {"outputs": list(row.outputs)} if len(row.outputs) > 1 else {}
            parts = {self.name: Part(raw=row.value, scaled=row.value)}
            score = Score(row.value, parts=parts, info=info)
        if future.set_running_or_notify_cancel():
            future.set_result(score)

    async def _measure(self) -> dict[str, float]:
        counters, self._client.counters = self._client.counters, Counters()
        metrics = counters.metrics() | self._writer.take_counts()
        return {f"{self.name}/{name}": float(value) for name, value in metrics.items()}

    async def _close(self) -> None:
        self._flush()
        cut_short = dict(self._under_way)
        for task in cut_short:
            task.cancel()
        await asyncio.gather(*cut_short, return_exceptions=True)
        for entries in cut_short.values():
            _end([e for e in entries if not e.future.done()], Interrupted(_CLOSED))
        await self._client.close()


def _end(entries: Sequence[_Entry], error: Exception) -> None:
    for entry in entries:
        if entry.future.set_running_or_notify_cancel():
            entry.future.set_exception(error)


def _wire_for(settings: ModelReward, adapter: str, *, chat: bool) -> Vllm | OpenRlhf | Rerank:
    if adapter == "vllm":
        return Vllm(settings, chat=chat)
    return OpenRlhf(settings) if adapter == "openrlhf" else Rerank(settings)


def _key_from(settings: ModelReward, environ: Mapping[str, str]) -> str:
    if settings.key_env is None:
        return ""
    key = environ.get(settings.key_env, "").strip()
    if not key:
        raise RewardError(
            f"reward.model.key_env names {settings.key_env}, but no such variable is set."
        )
    return key
