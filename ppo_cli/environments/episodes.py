"""Episodes of several turns, played with an engine: the policy writes, the environment replies.

`EpisodeEngine` is an engine whose rollouts are whole episodes; all verbs but `generate` are those
of the engine inside. Episodes are played in waves: a wave samples the next turn of all episodes
that go on, as continuations of unfinished rollouts, so that no token is tokenised again and each
sampler's cache of prefixes is of use. The environment receives a turn as soon as it is finished.
The next wave starts when all replies are there: which rollouts are sampled together then does not
depend on timing, and a resumed run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from ppo_cli.algo.batch import AnnotatedBatch, Batch
from ppo_cli.config.schema.run import Config
from ppo_cli.data_sets.rows import question_of
from ppo_cli.engine.base import (
    NO_LOGPROBS,
    Engine,
    MiniBatch,
    Sampling,
    Sums,
    start_rollouts,
    stream_key,
)
from ppo_cli.environments.base import Chat, EnvironmentFailure, Environments, Opening, Reply
from ppo_cli.records import Message, Prompt, Rollout, Turn
from ppo_cli.thoughts import Detokenize, count_tokens, find_open_mark

SEED_BITS = 31  # of an episode's seed: some generators take no more


@dataclass(eq=False)
class Episode:
    """An episode under way.

    `played` has all its tokens so far, `unfinished` is what a sampler continues with its next turn:
    its prompt has a uid of its own, because the openings of a prompt's episodes may differ.
    """

    name: str  # for the environments
    row: Prompt
    played: Rollout
    unfinished: Rollout
    messages: list[Message] = field(default_factory=list)
    stopped: bool = False  # the last turn ended by itself
    full: bool = False  # no token is left for another turn
    reply: Future[Reply] = field(default_factory=Future)

    def finish(self, failure: str = "", ended: str = "") -> Rollout:
        """Return the episode as a finished rollout."""
        reason = "stop" if self.stopped and not failure else "length"
        return replace(
            self.played,
            finish_reason=cast("Any", reason),
            failure=failure,
            ended=ended,
            carried=0,
        )


class EpisodeEngine:
    """Plays episodes with the engine inside; see the head of this file."""

    def __init__(
        self,
        inner: Engine,
        environments: Environments,
        chat: Chat,
        config: Config,
        decode: Detokenize,
    ) -> None:
        self._inner = inner
        self._environments = environments
        self._chat = chat
        self._settings = config.environment
        self._longest_opening = config.data.max_prompt_length
        self._decode = decode
        self._rounds = 0

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, begun: Sequence[Rollout] = ()
    ) -> Iterator[Rollout]:
        """Yield `sampling.n` episodes for each prompt, and one for each rollout of `begun`.

        Those of `begun` have no tokens yet: an episode is played in one go.
        """
        self._rounds += 1
        episodes = [
            Episode(f"{self._rounds}/{r.prompt.uid}/{r.sample}", r.prompt, r, r)
            for r in (*start_rollouts(prompts, sampling), *begun)
        ]
        assert not any(e.played.token_ids for e in episodes), "an episode in parts"
        playing = {e.name for e in episodes}
        try:
            for episode, rollout in self._play(episodes, sampling):
                playing.remove(episode.name)
                self._environments.release([episode.name])
                yield rollout
        finally:
            # The consumer stopped early, or the engine failed.
            self._environments.release(sorted(playing))

    def annotate(self, batch: Batch) -> AnnotatedBatch:
        """Add old and reference log-probs, entropy and values."""
        return self._inner.annotate(batch)

    def step(self, minibatch: MiniBatch) -> Sums:
        """Take one optimizer step; the sums have what happened to the environment's processes."""
        events = {name: (value, 1.0) for name, value in self._environments.pop_metrics().items()}
        return self._inner.step(minibatch) | events

    def publish(self) -> None:
        """Send the new weights to the sampler."""
        self._inner.publish()

    def save(self, directory: Path, *, last: bool = False) -> Future[None]:
        """Save the engine inside: between two rounds there are no episodes."""
        return self._inner.save(directory, last=last)

    def load(self, directory: Path) -> None:
        """Restore everything that `save` wrote."""
        self._inner.load(directory)

    def close(self) -> None:
        """Close the engine inside; the environments belong to who made them."""
        self._inner.close()

    def _play(
        self, episodes: Sequence[Episode], sampling: Sampling
    ) -> Iterator[tuple[Episode, Rollout]]:
        """Play episodes in waves; yield each with its rollout when it ends."""
        begun = [(e, self._environments.reset(e.name, _describe_row(e))) for e in episodes]
        failed, playing = list[tuple[Episode, Rollout]](), list[Episode]()
        for episode, opening in begun:
            try:
                self._begin(episode, opening.result())
                playing.append(episode)
            except (EnvironmentFailure, ValueError) as error:
                failed.append((episode, episode.finish(str(error))))
        version = 0
        turn_sampling = replace(sampling, new_tokens=self._settings.max_turn_tokens)
        while playing:
            by_uid = {e.unfinished.prompt.uid: e for e in playing}
            unfinished = [e.unfinished for e in playing]
            # All engines return generators: closing one frees the sampler.
            drawn = cast("Any", self._inner.generate((), turn_sampling, unfinished))
            with closing(drawn):
                for rollout in drawn:
                    episode = by_uid[rollout.prompt.uid]
                    message = self._end_turn(episode, rollout)
                    episode.reply = self._environments.step(episode.name, message)
                    version = rollout.weight_version
            going_on = []
            for episode in playing:
                finished = self._receive(episode, sampling)
                if finished is None:
                    going_on.append(episode)
                else:
                    yield episode, finished
            playing = going_on
        # Those that never began count as being of the same weights.
        for episode, rollout in failed:
            yield episode, replace(rollout, weight_version=version)

    def _begin(self, episode: Episode, opening: Opening) -> None:
        """Set the prompt of an episode: that of its row, unless the opening differs.

        Raises ValueError for an opening that the template refuses, or that is too long.
        """
        prompt, messages = episode.row, opening.messages or episode.row.messages
        if messages != prompt.messages or self._environments.tools:
            rendered, ids = self._chat.open(messages)
            if len(ids) > self._longest_opening:
                raise ValueError(
                    f"its opening has {len(ids)} tokens, more than --max_prompt_length "
                    f"{self._longest_opening}"
                )
            prompt = replace(
                prompt, text=question_of(messages), messages=tuple(messages), rendered=rendered,
                token_ids=tuple(ids), opened=find_open_mark(rendered),
            )  # fmt: skip
        episode.messages = list(messages)
        episode.played = replace(episode.played, prompt=prompt)
        uid = f"{prompt.uid}/{episode.played.sample}"
        episode.unfinished = replace(episode.played, prompt=replace(prompt, uid=uid))

    def _end_turn(self, episode: Episode, drawn: Rollout) -> Message:
        """Add a turn that was sampled to its episode; return the policy's message."""
        before, played = len(episode.unfinished.token_ids), episode.played
        ids, start = drawn.token_ids[before:], len(played.token_ids)
        context = (*drawn.prompt.token_ids, *drawn.token_ids[:before])
        text, cut = self._decode(ids, context), drawn.finish_reason != "stop"
        opened, message = drawn.prompt.opened, self._chat.parse(ids)
        thought = count_tokens(opened, text, ids, self._decode, cut=cut)
        turn = Turn(
            start, start + len(ids), text, message, error=str(message.get("error", "")),
            cut=drawn.finish_reason == "unfinished",
        )  # fmt: skip
        entropies = drawn.entropies
        if entropies is not None:
            entropies = _join(played.entropies, entropies[before:])
        episode.played = replace(
            played,
            token_ids=(*played.token_ids, *ids),
            sampler_logprobs=_join(played.sampler_logprobs, drawn.sampler_logprobs[before:]),
            entropies=entropies,
            text=text,
            weight_version=drawn.weight_version,
            thought_tokens=played.thought_tokens + thought,
            turns=(*played.turns, turn),
        )
        episode.messages.append(message)
        episode.stopped, episode.full = not cut, drawn.finish_reason == "length"
        return message

    def _receive(self, episode: Episode, sampling: Sampling) -> Rollout | None:
        """Wait for the reply to the last turn; return the rollout if the episode is over.

        Otherwise the tokens of the reply are added, for the next turn.
        """
        try:
            reply = episode.reply.result()
            turn = replace(
                episode.played.turns[-1], replies=tuple(reply.messages),
                rewards=dict(reply.rewards), seconds=reply.seconds, tools=tuple(reply.tools),
                error=reply.error or episode.played.turns[-1].error,
            )  # fmt: skip
            episode.played = replace(episode.played, turns=(*episode.played.turns[:-1], turn))
            if reply.done:
                return episode.finish()
            if episode.full:
                return episode.finish(ended="tokens")
            if len(episode.played.turns) == self._settings.max_turns:
                return episode.finish(ended="turns")
            return self._continue(episode, turn, sampling)
        except (EnvironmentFailure, ValueError) as error:
            return episode.finish(str(error))

    def _continue(self, episode: Episode, turn: Turn, sampling: Sampling) -> Rollout | None:
        """Prepare the next turn; returns the rollout if there is no room for it."""
        played = episode.played
        episode.messages += turn.replies
        sampled = played.token_ids[turn.start :]
        ids = self._chat.continue_after(sampled, turn.replies, played.prompt.messages)
        if len(played.token_ids) + len(ids) >= sampling.max_tokens:
            return episode.finish(ended="tokens")
        # Nobody drew the environment's tokens.
        zeros = np.zeros(len(ids), dtype=np.float32)
        episode.played = replace(
            played,
            token_ids=(*played.token_ids, *ids),
            sampler_logprobs=_join(played.sampler_logprobs, zeros),
            entropies=None if played.entropies is None else _join(played.entropies, zeros),
        )
        episode.unfinished = replace(episode.played, prompt=episode.unfinished.prompt, text="")
        return None


def _join(before: np.ndarray | None, new: np.ndarray) -> np.ndarray:
    return np.concatenate([NO_LOGPROBS if before is None else before, new])


def _describe_row(episode: Episode) -> Mapping[str, Any]:
    """Return what an environment's `reset` receives; equal seeds give equal episodes."""
    row, sample = episode.row, episode.played.sample
    return {
        "prompt": row.text,
        "messages": [dict(message) for message in row.messages],
        "ground_truth": row.ground_truth,
        "data_source": row.data_source,
        "extra_info": dict(row.extra_info),
        "seed": stream_key(episode.played.seed, row.uid, sample) >> (64 - SEED_BITS),
    }
