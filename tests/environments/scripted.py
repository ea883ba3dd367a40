"""An environment in this process, the embedded model's chat format, and an engine to play with."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.pretrained import load_tokenizer
from ppo_cli.engine.samplers.text import decode_text
from ppo_cli.environments.base import EnvironmentFailure, Opening, Reply, Schema
from ppo_cli.environments.chat import Chat
from ppo_cli.environments.episodes import EpisodeEngine, Episodes
from ppo_cli.records import Message, Prompt, Rollout
from tests.settings import complete


class Counting:
    """Answers each message with its length, for as many turns as the seed says."""

    def reset(self, row: Mapping[str, Any]) -> list[Message] | None:
        self.seed, self.turn = row["seed"], 0
        return None

    def step(self, message: Message) -> tuple[list[Message], bool, dict[str, float]]:
        self.turn += 1
        length = len(message["content"])
        done = self.turn == 2 + self.seed % 3
        reply: list[Message] = [{"role": "user", "content": f"{length} + {self.seed % 9} = ?"}]
        return reply, done, {"turns": 1.0, "length": length / 10}


class Scripted:
    """Environments whose episodes live in this process; each call takes a random time."""

    def __init__(self, make: Callable[[], Any] = Counting, pause_s: float = 0.0) -> None:
        self.make, self.pause_s = make, pause_s
        self.tools: tuple[Schema, ...] = ()
        self.episodes: dict[str, Any] = {}
        self.released: list[str] = []
        self.rows: dict[str, Mapping[str, Any]] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="scripted")

    def start(self) -> None:
        pass

    def reset(self, episode: str, row: Mapping[str, Any]) -> Future[Opening]:
        self.rows[episode] = row
        self.episodes[episode] = self.make()
        return self._threads.submit(self._call, lambda: self._open(episode, row))

    def step(self, episode: str, message: Message) -> Future[Reply]:
        return self._threads.submit(self._call, lambda: self._step(episode, message))

    def finish(self, episode: str) -> Future[Reply]:
        return self._threads.submit(self._call, lambda: self._finish(episode))

    def release(self, episodes: Sequence[str]) -> None:
        for episode in episodes:
            assert self.episodes.pop(episode, None) is not None, "released twice"
        self.released += episodes

    def pop_metrics(self) -> dict[str, float]:
        return {"environment/restarts": 0.0}

    def close(self) -> None:
        self._threads.shutdown()

    def _call(self, call: Callable[[], Any]) -> Any:
        time.sleep(random.random() * self.pause_s)
        try:
            return call()
        except Exception as error:
            raise EnvironmentFailure(f"raised {type(error).__name__}: {error}") from error

    def _open(self, episode: str, row: Mapping[str, Any]) -> Opening:
        return Opening(tuple(self.episodes[episode].reset(row) or ()))

    def _finish(self, episode: str) -> Reply:
        finish = getattr(self.episodes[episode], "finish", dict)
        return Reply(done=True, rewards=finish())

    def _step(self, episode: str, message: Message) -> Reply:
        messages, done, rewards = self.episodes[episode].step(message)
        return Reply(tuple(messages), done, rewards)


@cache
def tokenizer() -> Any:
    return load_tokenizer(str(model_folder("embedded")))


END = "<|im_end|>"


def make_chat() -> Chat:
    return Chat(tokenizer(), {}, (), frozenset({tokenizer().eos_token_id}))


def config(**groups: dict[str, Any]) -> Config:
    defaults: dict[str, dict[str, Any]] = {
        "model": {"path": "embedded"}, "environment": {"path": "scripted.py:Counting"},
        "data": {"max_prompt_length": 64, "max_response_length": 120}, "rollout": {"name": "hf"},
    }  # fmt: skip
    return complete(
        {name: defaults.get(name, {}) | groups.get(name, {}) for name in {**defaults, **groups}}
    )


def prompts(count: int = 4) -> list[Prompt]:
    rows = []
    for i in range(count):
        messages = ({"role": "user", "content": f"What is {i} + {2 * i}?"},)
        text, ids = make_chat().open(messages)
        rows.append(Prompt(f"row:{i}", messages[0]["content"], messages, text, ids, "sums", 3 * i))
    return rows


def make_engine(environments: Scripted, settings: Config, inner: Any = None) -> EpisodeEngine:
    inner = inner or LocalEngine(settings, tokenizer(), total_steps=4)
    decode = partial(decode_text, tokenizer())
    environment, longest = settings.environment, settings.data.max_prompt_length
    return EpisodeEngine(inner, Episodes(environments, make_chat(), environment, longest, decode))


def by_key(rollouts: Sequence[Rollout]) -> dict[tuple[str, int], Rollout]:
    return {rollout.key: rollout for rollout in rollouts}
