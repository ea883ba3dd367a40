"""The reward that asks a served reward model: rollouts in, raw scores out.

Everything that waits runs on one background event loop. Samples of a request are gathered in
the order in which they were submitted; what is left over goes out when the round is settled.
Before the first rollout a self-test asks: does it answer, are scores raw, is good above bad?
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ppo_cli.config.models.known_models import choose_adapter
from ppo_cli.config.schema.reward import ModelReward
from ppo_cli.errors import Interrupted, RewardError
from ppo_cli.records import Part, Prompt, Rollout, Score
from ppo_cli.rewards.base import Reward, RoundKind, Tell, tell_nobody
from ppo_cli.rewards.models.base import (
    BUILT_IN,
    NO_ANSWER,
    TURN_OFF,
    check_direction,
    choose_pairs,
    encode_pairs,
    first_of_each_kind,
    prompt_like,
    raise_if_strict,
)
from ppo_cli.rewards.remote.event_loop import LoopThread
from ppo_cli.rewards.served.client import Counters, ServedModelClient
from ppo_cli.rewards.served.protocols import (
    RAW_SWITCHES,
    Kind,
    OpenRlhf,
    Rerank,
    Row,
    Sample,
    ServerFault,
    UnfitError,
    Vllm,
    Wire,
    Writer,
)

SAME = 1e-3


def model_name(listed: object, tell: Tell) -> str:
    """The name under which the server knows its model, off the answer of /v1/models."""
    data = listed.get("data") if isinstance(listed, dict) else None
    items = data if isinstance(data, list) else []
    names = [item.get("id") for item in items if isinstance(item, dict)]
    known = [name for name in names if isinstance(name, str) and name]
    if not known:
        raise ServerFault(
            Kind.HOPELESS, "models", "its list of models is empty; set reward.model.model_name"
        )
    if len(known) > 1:
        tell(
            f"The reward model's server has several models ({', '.join(known[:5])}); "
            f"{known[0]} scores. Set reward.model.model_name for another one."
        )
    return known[0]


async def check_raw(
    client: ServedModelClient, wire: Vllm, samples: Sequence[Sample], tell: Tell
) -> None:
    """Make sure that no sigmoid or softmax lies over the scores, by whatever name it is put off.

    A switch that the server knows makes a difference; older servers know it by other names.
    """
    for switch in RAW_SWITCHES:
        wire.switch = (switch, True)
        on = await score_each(client, samples)
        wire.switch = (switch, False)
        off = await score_each(client, samples)
        if _differ(off, on):
            return
    wire.switch = (RAW_SWITCHES[0], False)
    rows = [row.outputs for row in off]
    if not all(outputs and all(0.0 <= value <= 1.0 for value in outputs) for outputs in rows):
        return
    if all(abs(outputs[0] - 1.0) < 1e-6 and len(outputs) == 1 for outputs in rows):
        raise RewardError(
            "Every score of the reward model's server is exactly 1: it puts a softmax over one "
            f"output. {_SERVE_RAW}"
        )
    tell(
        "The scores of the reward model's server lie between 0 and 1 whether raw ones are asked "
        f"for or not: they look as if a sigmoid or softmax lay over them. {_SERVE_RAW}"
    )


_SERVE_RAW = "To get raw scores, start vLLM with --pooler-config '{\"use_activation\": false}'."


async def score_each(client: ServedModelClient, samples: Sequence[Sample]) -> list[Row]:
    """Score samples in a request each, so that no other sample has a part in the answer."""
    rows = await asyncio.gather(*(client.score([sample]) for sample in samples))
    return [row for (row,) in rows]


def _differ(some: Sequence[Row], others: Sequence[Row]) -> bool:
    pairs = zip(some, others, strict=True)
    return any(
        abs(a - b) > SAME * max(1.0, abs(a))
        for one, other in pairs
        for a, b in zip(one.outputs, other.outputs, strict=False)
    )


async def check_scores(
    client: ServedModelClient, samples: Sequence[Sample], tell: Tell
) -> list[float]:
    """Score samples, each alone; RewardError unless all have a score, the same when asked twice."""
    first, second = await score_each(client, samples), await score_each(client, samples)
    failed = next((row.failure for row in (*first, *second) if row.value is None), None)
    if failed is not None:
        raise RewardError(_told(f"gave no score for a harmless sample ({failed})"))
    scores = [row.value for row in first if row.value is not None]
    repeated = [row.value for row in second if row.value is not None]
    spread = max(scores) - min(scores)
    change = max(abs(a - b) for a, b in zip(scores, repeated, strict=True))
    if change > max(SAME, 0.1 * spread):
        raise RewardError(_told(f"scored the same sample {change:.3g} apart when asked twice"))
    if change > SAME:
        tell(f"The reward model's server scores the same sample up to {change:.2g} apart.")
    return scores


def _told(what: str) -> str:
    return f"The served reward model {what}. Look at the server's model and template. {TURN_OFF}"


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
        found = choose_adapter(settings.path or "", settings.adapter)
        self.adapter, self.reason = found.adapter, found.reason
        self._writer = Writer(settings, self.adapter)
        self._wire = _wire_for(settings, self.adapter, chat=self._writer.chat)
        self._rows = settings.request_rows if self._wire.may_batch else 1
        self._key = _key_from(settings, environ)
        self._pending: dict[str, list[_Entry]] = {}
        self._under_way: dict[asyncio.Task[None], list[_Entry]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._client = self._new_client(())
        self._closed = False
        self._loop = LoopThread(f"served-{name}")

    def start(
        self, prompts: Sequence[Prompt], *, patient: bool = False, tell: Tell = tell_nobody
    ) -> None:
        """Ask for one tiny score, then see that scores are raw and that good is above bad."""
        for remark in self._writer.remarks():
            tell(remark)
        self._client = self._new_client(prompts)
        for prompt in first_of_each_kind(prompts):
            self._written(prompt, NO_ANSWER)
        self._loop.call(self._start(prompts, patient=patient, tell=tell))

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Put one rollout into the next request, which leaves when it is full."""
        future: Future[Score] = Future()
        self._loop.submit(self._take(rollout, future))
        return future

    def end_round(self, kind: RoundKind = "train") -> None:
        """Send what is left over."""
        if not self._closed:
            self._loop.submit(self._flush_all())

    def waiting_for(self) -> str | None:
        """Say what the server is waited for, when it is down."""
        return self._client.outage.sentence()

    def pop_metrics(self) -> dict[str, float]:
        """`model/…` metrics since the last call, after `close` too."""
        if self._closed:
            return asyncio.run(self._measure())
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

    def _new_client(self, prompts: Sequence[Prompt]) -> ServedModelClient:
        question, good, _ = BUILT_IN[0]
        settings = self._settings
        return ServedModelClient(
            self._wire, witness=self._written(prompt_like(prompts, question), good),
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

    def _fitting(self, prompt: Prompt, response: str) -> Sample | None:
        with suppress(UnfitError):
            return self._writer.write(prompt, response)
        return None

    async def _start(self, prompts: Sequence[Prompt], *, patient: bool, tell: Tell) -> None:
        ask = partial(self._ask_first, tell)
        await self._client.outage.first_answer(ask, patient=patient, tell=tell)
        most = self._settings.max_length
        pairs, samples = encode_pairs(choose_pairs(prompts), self._fitting, most)
        if isinstance(self._wire, Vllm):
            await check_raw(self._client, self._wire, samples[:4], tell)
        if self._settings.self_test != "off":
            with raise_if_strict(self._settings.self_test, tell):
                scores = await check_scores(self._client, samples, tell)
                check_direction(pairs, scores, "are the server's model and template right")
        self._client.counters = Counters()
        self._writer.take_counts()

    async def _ask_first(self, tell: Tell) -> None:
        """Find the model's name and score one sample; raises ServerFault."""
        if isinstance(self._wire, Vllm) and self._wire.model is None:
            self._wire.model = model_name(await self._client.get(self._wire.models_url), tell)
        await self._client.ask_witness()

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


def _wire_for(settings: ModelReward, adapter: str, *, chat: bool) -> Wire:
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
