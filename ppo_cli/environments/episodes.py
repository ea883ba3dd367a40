"""Episodes of several turns: the policy writes, the environment replies.

Episodes are played in waves: a wave samples the next turn of all episodes that go on, as
continuations of unfinished rollouts, so that no token is tokenised again and a sampler's cache of
prefixes is of use. The environment receives a turn as soon as it is finished. The next wave starts
when all replies are there: which rollouts are sampled together then does not depend on timing, and
a resumed run gives the same bits.

With a split history the model reads each turn's own context, as the chat template renders it then,
and the tokens of an episode are those of the policy alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ppo_cli.algo.batch import AnnotatedBatch, Batch
from ppo_cli.config.schema.environment import Environment
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
from ppo_cli.environments.base import EnvironmentFailure, Opening, Reply
from ppo_cli.environments.chat import Chat
from ppo_cli.environments.pool import EnvironmentPool
from ppo_cli.records import Message, Prompt, Rollout, Turn, format_tool
from ppo_cli.thoughts import Detokenize, count_tokens, find_open_mark
from ppo_cli.waits import await_result

SEED_BITS = 31  # of an episode's seed: some generators take no more
# Continues unfinished rollouts, each until it ends or reaches the limits of the sampling.
Draw = Callable[[Sequence[Rollout], Sampling], Iterator[Rollout]]


@dataclass(eq=False)
class Episode:
    """An episode under way.

    `played` has all its tokens so far, `unfinished` is what a sampler continues with its next turn.
    The prompt of the latter has another uid: those of a prompt's episodes may differ.
    """

    name: str  # for the environments
    row: Prompt
    played: Rollout
    unfinished: Rollout
    messages: list[Message] = field(default_factory=list)
    finish_reason: str = "length"  # of the last turn
    reply: Future[Reply] = field(default_factory=Future)
    ended: str = ""  # the limit that ended it

    def finish(self, failure: str = "") -> Rollout:
        """Return the episode as a finished rollout."""
        reason: Any = "stop" if self.finish_reason == "stop" else "length"
        ended = "" if failure else self.ended
        return replace(self.played, finish_reason=reason, failure=failure, ended=ended)


class Episodes:
    """Plays the episodes of a run: its environments, the chat format, and the limits."""

    def __init__(
        self, environments: EnvironmentPool, chat: Chat, settings: Environment,
        longest_prompt: int, decode: Detokenize,
    ) -> None:  # fmt: skip
        self.environments = environments
        self._chat = chat
        self._settings = settings
        self._splits = settings.history == "split"
        self._longest_prompt = longest_prompt
        self._decode = decode
        self._rounds = 0

    def play(
        self,
        draw: Draw,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        begun: Sequence[Rollout] = (),
    ) -> Iterator[Rollout]:
        """Yield `sampling.n` episodes for each prompt, and one for each rollout of `begun`.

        Those of `begun` have no tokens yet: an episode is played in one go.
        """
        self._rounds += 1
        rollouts = [*start_rollouts(prompts, sampling), *begun]
        assert not any(r.token_ids for r in rollouts), "an episode in parts"
        episodes = [
            Episode(f"{self._rounds}/{r.prompt.uid}/{r.sample}", r.prompt, r, r) for r in rollouts
        ]
        playing = {episode.name for episode in episodes}
        try:
            for episode, rollout in self._play(draw, episodes, sampling):
                playing.remove(episode.name)
                self.environments.release([episode.name])
                yield rollout
        finally:
            # The consumer stopped early, or the engine failed.
            self.environments.release(sorted(playing))

    def _play(
        self, draw: Draw, episodes: Sequence[Episode], sampling: Sampling
    ) -> Iterator[tuple[Episode, Rollout]]:
        """Play episodes in waves; yield each with its rollout when it ends."""
        per = self._settings.seed_per
        begun = [(e, self.environments.reset(e.name, _describe_row(e, per))) for e in episodes]
        failed, playing = list[tuple[Episode, Rollout]](), list[Episode]()
        for episode, opening in begun:
            try:
                self._begin(episode, await_result(opening, "the environment"))
                playing.append(episode)
            except (EnvironmentFailure, ValueError) as error:
                failed.append((episode, episode.finish(str(error))))
        version = 0
        turn_sampling = replace(sampling, new_tokens=self._settings.max_turn_tokens)
        while playing:
            by_uid = {e.unfinished.prompt.uid: e for e in playing}
            # All samplers return generators: closing one frees it.
            drawn = cast("Any", draw([e.unfinished for e in playing], turn_sampling))
            with closing(drawn):
                for rollout in drawn:
                    episode = by_uid[rollout.prompt.uid]
                    message = self._end_turn(episode, rollout)
                    episode.reply = self.environments.step(episode.name, message)
                    version = rollout.weight_version
            ended = set[Episode]()
            for episode in playing:
                finished = self._receive(episode, sampling)
                if finished is not None:
                    ended.add(episode)
                    yield episode, finished
            for episode in playing:  # asked side by side
                if episode.ended:
                    ended.add(episode)
                    yield episode, self._finish_cut(episode)
            playing = [episode for episode in playing if episode not in ended]
        # Those that never began count as being of the same weights.
        for episode, rollout in failed:
            yield episode, replace(rollout, weight_version=version)

    def _begin(self, episode: Episode, opening: Opening) -> None:
        """Set the prompt of an episode: that of its row, unless the opening has to differ.

        Raises ValueError for an opening that the template refuses, or that is too long.
        """
        prompt, messages = episode.row, opening.messages or episode.row.messages
        differs = messages != prompt.messages or self.environments.tools
        if differs or self._chat.breaks(messages):
            rendered, ids = self._chat.open(messages)
            if len(ids) > self._longest_prompt:
                raise ValueError(
                    f"its opening has {len(ids)} tokens, more than --max_prompt_length "
                    f"{self._longest_prompt}"
                )
            prompt = replace(
                prompt, text=question_of(messages), messages=tuple(messages), rendered=rendered,
                token_ids=ids, opened=find_open_mark(rendered),
                tools="\n".join(map(format_tool, self.environments.tools)),
            )  # fmt: skip
        episode.messages = list(messages)
        episode.played = replace(episode.played, prompt=prompt)
        uid = f"{prompt.uid}/{episode.played.sample}"
        episode.unfinished = replace(episode.played, prompt=replace(prompt, uid=uid))

    def _end_turn(self, episode: Episode, drawn: Rollout) -> Message:
        """Add a turn that was sampled to its episode; return what the environment receives."""
        before, played = len(episode.unfinished.token_ids), episode.played
        ids, start = drawn.token_ids[before:], len(played.token_ids)
        context = (*drawn.prompt.token_ids, *drawn.token_ids[:before])
        text, cut = self._decode(ids, context), drawn.finish_reason != "stop"
        received = self._chat.parse(ids)
        message = {key: value for key, value in received.items() if key != "error"}
        thought = count_tokens(drawn.prompt.opened, text, ids, self._decode, cut=cut)
        turn = Turn(
            start, start + len(ids), text, message, error=str(received.get("error", "")),
            cut=drawn.finish_reason == "unfinished" or (self._splits and cut),
            context=context if self._splits else (),
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
        episode.finish_reason = drawn.finish_reason
        return received

    def _receive(self, episode: Episode, sampling: Sampling) -> Rollout | None:
        """Wait for the reply to the last turn; return the rollout if the environment is done.

        Otherwise the next turn is prepared, or the environment is told that a limit ends it.
        """
        *earlier, turn = episode.played.turns
        try:
            reply = await_result(episode.reply, "the environment")
            turn = replace(
                turn, replies=tuple(reply.messages), rewards=dict(reply.rewards),
                error=turn.error or reply.error, seconds=reply.seconds, tools=tuple(reply.tools),
                metrics=dict(reply.metrics),
            )  # fmt: skip
            episode.played = replace(episode.played, turns=(*earlier, turn))
            if reply.done:
                return episode.finish()
            continue_episode = self._split if self._splits else self._append
            ended = ""
            if episode.finish_reason == "length" and not self._splits:
                ended = "tokens"
            elif len(episode.played.turns) == self._settings.max_turns:
                ended = "turns"
            elif not continue_episode(episode, turn, sampling):
                ended = "tokens"
        except (EnvironmentFailure, ValueError) as error:
            return episode.finish(str(error))
        if ended:
            episode.ended, episode.reply = ended, self.environments.finish(episode.name)
        return None

    def _finish_cut(self, episode: Episode) -> Rollout:
        """Return an episode that a limit has ended, with the rewards that were still due."""
        *earlier, turn = episode.played.turns
        try:
            reply = await_result(episode.reply, "the environment")
        except EnvironmentFailure as error:
            return episode.finish(str(error))
        rewards = Counter(turn.rewards)
        rewards.update(reply.rewards)
        metrics = {**turn.metrics, **reply.metrics}
        seconds = turn.seconds + reply.seconds
        turn = replace(turn, rewards=dict(rewards), metrics=metrics, seconds=seconds)
        episode.played = replace(episode.played, turns=(*earlier, turn))
        return episode.finish()

    def _append(self, episode: Episode, turn: Turn, sampling: Sampling) -> bool:
        """Append the reply to an episode; returns whether there is room for another turn."""
        played = episode.played
        sampled = played.token_ids[turn.start :]
        ids = self._chat.continue_after(sampled, turn.replies, played.prompt.messages)
        if len(played.token_ids) + len(ids) >= sampling.max_tokens:
            return False
        episode.messages += [turn.message, *turn.replies]
        # Nobody drew the environment's tokens.
        zeros = np.zeros(len(ids), dtype=np.float32)
        episode.played = replace(
            played,
            token_ids=(*played.token_ids, *ids),
            sampler_logprobs=_join(played.sampler_logprobs, zeros),
            entropies=None if played.entropies is None else _join(played.entropies, zeros),
        )
        episode.unfinished = replace(episode.played, prompt=episode.unfinished.prompt, text="")
        return True

    def _split(self, episode: Episode, turn: Turn, sampling: Sampling) -> bool:
        """Begin the next turn as a response to its own context; returns whether that fits.

        A turn may have as many tokens as a response, its context as many as a prompt.
        """
        episode.messages += [turn.message, *turn.replies]
        rendered, ids = self._chat.open(episode.messages)
        if len(ids) > self._longest_prompt:
            return False
        # Another uid: its random numbers must not be those of the turn before.
        number = len(episode.played.turns)
        uid = f"{episode.row.uid}/{episode.played.sample}/{number}"
        opened = find_open_mark(rendered)
        prompt = replace(
            episode.played.prompt, uid=uid, rendered=rendered, token_ids=ids, opened=opened
        )
        episode.unfinished = replace(
            episode.unfinished, prompt=prompt, token_ids=(), sampler_logprobs=NO_LOGPROBS
        )
        return True


class EpisodeEngine:
    """An engine whose rollouts are whole episodes, played with the engine inside."""

    def __init__(self, inner: Engine, episodes: Episodes) -> None:
        self._inner = inner
        self._episodes = episodes

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, begun: Sequence[Rollout] = ()
    ) -> Iterator[Rollout]:
        """Yield episodes as they end; see `Episodes.play`."""

        def draw(unfinished: Sequence[Rollout], turn_sampling: Sampling) -> Iterator[Rollout]:
            return self._inner.generate((), turn_sampling, unfinished)

        return self._episodes.play(draw, prompts, sampling, begun)

    def annotate(self, batch: Batch) -> AnnotatedBatch:
        """Add old and reference log-probs, entropy and values."""
        return self._inner.annotate(batch)

    def step(self, minibatch: MiniBatch) -> Sums:
        """Take one optimizer step; the sums have what happened to the environment processes."""
        events = self._episodes.environments.pop_metrics()
        return self._inner.step(minibatch) | {name: (x, 1.0) for name, x in events.items()}

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
        """Close the engine inside; the environments belong to who started them."""
        self._inner.close()


def _join(before: NDArray[np.float32] | None, new: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.concatenate([NO_LOGPROBS if before is None else before, new])


def _describe_row(episode: Episode, seed_per: str) -> Mapping[str, Any]:
    """Return what an environment's `reset` receives; equal seeds give equal episodes.

    The samples of a prompt share the seed: an estimator that compares their rewards would otherwise
    compare the luck of different games.
    """
    row, sample = episode.row, episode.played.sample if seed_per == "sample" else 0
    return {
        "prompt": row.text,
        "messages": [dict(message) for message in row.messages],
        "ground_truth": row.ground_truth,
        "data_source": row.data_source,
        "extra_info": dict(row.extra_info),
        "seed": stream_key(episode.played.seed, row.uid, sample) >> (64 - SEED_BITS),
    }
