"""The reward that lets a judge compare responses: with each other, or with a reference.

All comparisons of the responses to one prompt are a contest, which starts at the end of the round.
Equal texts are compared once, and a text without content loses without a call. A validation
compares each response with the one of the first validation, so that the win rate shows the drift
of the run; training may compare it with the greedy response of the starting model.

Judges prefer a position, so a verdict on a pair counts only together with one in which the two
responses are shown in the opposite order.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo_cli.errors import PpoError
from ppo_cli.records import Part, Prompt, Rollout, Score
from ppo_cli.rewards.base import RoundKind
from ppo_cli.rewards.judge.asker import UNKNOWN_ANSWER
from ppo_cli.rewards.judge.calls import (
    JudgeError,
    Question,
    Usage,
    Verdict,
    gated_score,
    split_answers,
)
from ppo_cli.rewards.judge.client import Counters
from ppo_cli.rewards.judge.monitor import PlacedVerdict
from ppo_cli.rewards.judge.prompt import as_text, build_material, reference_answer
from ppo_cli.rewards.judge.reward import CANARY_REPLIES, JudgeReward
from ppo_cli.rewards.judge.rounds import PendingScore
from ppo_cli.rewards.judge.rubric import win_share
from ppo_cli.rewards.judge.verdict import MAX_REASON_CHARS
from ppo_cli.rewards.judge.visible import Response, restore_response
from ppo_cli.rewards.remote.failures import Failure

Pair = tuple[int, int]
# Weight of an imaginary tie of each response with one of strength 0: strengths stay finite.
PRIOR = 0.5
Request = tuple[tuple[int, ...], int]  # the nodes in the order shown, and the vote


@dataclass(eq=False)
class Contestant(PendingScore):
    """A response, the contest that it is in, and the node of its text there."""

    contest: Contest | None = None
    node: int = 0


@dataclass(eq=False)
class Contest:
    """The comparisons for one prompt; a node is a distinct text, the last one the reference."""

    prompt: Prompt
    entries: Sequence[Contestant]
    gated: int
    texts: Sequence[Response]
    sizes: Sequence[int]  # number of responses with each text
    reference: bool
    requests: Sequence[Request]
    fresh: bool  # ask past the cache
    answers: dict[Request, Verdict | BaseException] = field(default_factory=dict)
    asking: asyncio.Task[None] | None = None


@dataclass
class Tally:
    """The result of a contest; `wins[a, b]` is how often a beat b, a tie counts half for each."""

    wins: NDArray[np.float64]
    compared: int = 0
    tied: int = 0
    followed: int = 0  # comparisons in which the verdict followed the position
    failed: int = 0


class CompareReward(JudgeReward):
    """Scores by comparisons; `ApiReward.compare` says what is compared with what."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._listed = self._api.compare == "list"
        self._arrived: list[Contestant] = []
        self._earlier: dict[str, dict[str, Response]] = {"train": {}, "val": {}}
        self._tallies: dict[Contest, Tally] = {}

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Keep a response, which is compared at the end of the round; returns its future score."""
        if self._closed:
            raise RuntimeError("this reward is closed")
        entry = Contestant(rollout)
        self._arrived.append(entry)
        if self._canaries.pop_due():
            good = rollout.prompt.ground_truth or rollout.answer
            for text in CANARY_REPLIES:
                question = self._request(rollout.prompt, (text, as_text(good)))
                self._loop.submit(self._canaries.ask(question, self.connection.client))
        return entry.future

    def end_round(self, kind: RoundKind = "train") -> None:
        """Start the contests of the round, then treat failures as for single scores."""
        # Responses to one prompt form a contest; samples are sorted so that runs repeat.
        arrived, self._arrived = self._arrived, []
        by_prompt: dict[str, list[Contestant]] = defaultdict(list)
        for entry in sorted(arrived, key=lambda entry: entry.rollout.sample):
            by_prompt[entry.rollout.prompt.uid].append(entry)
        for entries in by_prompt.values():
            judging = self._loop.submit(self._begin(entries, self._reference(entries[0], kind)))
            for entry in entries:
                self._round.add(entry, judging)
        super().end_round(kind)

    def prompts_for_reference(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """Return the prompts that still need a response of the starting model."""
        base_texts = self._earlier["train"]
        candidates = prompts if self._api.compare == "base" else ()
        return [p for p in candidates if p.uid not in base_texts]

    def set_references(self, rollouts: Sequence[Rollout]) -> None:
        """Keep the responses of the starting model."""
        self._earlier["train"] |= {r.prompt.uid: self._visible(r) for r in rollouts}

    def state_dict(self) -> dict[str, Any]:
        """Return the first responses of the run, with which later ones are compared."""
        return {split: dict(texts) for split, texts in self._earlier.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._earlier = {
            split: {uid: restore_response(seen) for uid, seen in state.get(split, {}).items()}
            for split in self._earlier
        }

    def _reference(self, entry: PendingScore, kind: RoundKind = "train") -> Response | None:
        """Return the response that responses are compared with; None: with each other."""
        prompt, text = entry.rollout.prompt, self._visible(entry.rollout)
        if not self._api.of_the_run:
            return reference_answer(self._api, build_material(prompt, ""))
        if kind == "validation":
            return self._earlier["val"].setdefault(prompt.uid, text)
        return None if self._api.within_group else self._earlier["train"][prompt.uid]

    def question(
        self, prompt: Prompt, response: Response, vote: int = 0, rubric: Any = None
    ) -> Question:
        """Return the request that tests the judge: a response against UNKNOWN_ANSWER."""
        return self._request(prompt, (response, UNKNOWN_ANSWER), vote)

    def _request(self, prompt: Prompt, texts: Sequence[Response], vote: int = 0) -> Question:
        return self.template.question(build_material(prompt, *texts), self._api, vote=vote)

    async def _begin(
        self, entries: Sequence[Contestant], reference: Response | None, *, fresh: bool = False
    ) -> None:
        """Set up the contest of the responses that have content, and ask for its verdicts."""
        # Responses without content get the lowest score; equal texts share a node.
        prompt = entries[0].rollout.prompt
        nodes: dict[Response, int] = {}
        for entry in entries:
            text = self._visible(entry.rollout)
            empty = self._gate_reason(entry.rollout, text)
            if empty:
                self._report.gated += 1
                entry.future.set_result(gated_score(empty, self.template.scale))
            else:
                entry.node = nodes.setdefault(text, len(nodes))
        contestants = [entry for entry in entries if entry.open]
        if not contestants:
            return
        # Decide who meets whom, before any call.
        sizes = [sum(entry.node == node for entry in contestants) for node in nodes.values()]
        if reference is None:
            requests = self._requests(prompt, len(nodes))
        else:
            rivals = [(node, len(nodes)) for text, node in nodes.items() if text != reference]
            requests = self._in_both_orders(rivals)
        contest = Contest(
            prompt, contestants, len(entries) - len(contestants),
            [*nodes] if reference is None else [*nodes, reference], sizes, reference is not None,
            requests, fresh,
        )  # fmt: skip
        for entry in contestants:
            entry.contest = contest
        await self._judge(contestants[0])

    def _requests(self, prompt: Prompt, count: int) -> list[Request]:
        """Return the requests for a group: pairs in both orders, or lists and their reverses."""
        votes, max_calls = self._api.votes, self._api.compare_calls
        if not self._listed:
            return self._in_both_orders(
                draw_pairs(count, max_calls and max_calls // (2 * votes), prompt.uid)
            )
        # Lists: a random order per vote, and its reverse.
        order, requests = list(range(count)), list[Request]()
        for vote in range(votes if count > 1 else 0):
            random.Random(f"{prompt.uid}/{vote}").shuffle(order)
            requests += [(tuple(order), vote), (tuple(reversed(order)), vote)]
        return requests

    def _in_both_orders(self, pairs: Sequence[Pair]) -> list[Request]:
        return [
            (shown, vote)
            for vote in range(self._api.votes)
            for a, b in pairs
            for shown in ((a, b), (b, a))
        ]

    async def _judge(self, entry: PendingScore) -> None:
        """Ask for the missing verdicts of an entry's contest; all entries of it share the calls."""
        contest = entry.contest if isinstance(entry, Contestant) else None
        assert contest is not None
        if contest.asking is None or contest.asking.done():
            contest.asking = asyncio.get_running_loop().create_task(self._compare(contest))
        await contest.asking

    async def _compare(self, contest: Contest) -> None:
        """Ask for the missing verdicts of a contest and score it with what came."""
        questions = {
            (shown, vote): self._request(contest.prompt, [contest.texts[k] for k in shown], vote)
            for shown, vote in contest.requests
            if not isinstance(contest.answers.get((shown, vote)), Verdict)
        }
        # Calls run at the same time; answers of earlier attempts are kept.
        answers = await asyncio.gather(
            *(
                self.connection.client.ask(question, fresh=contest.fresh)
                for question in questions.values()
            ),
            return_exceptions=True,
        )
        contest.answers |= zip(questions, answers, strict=True)
        # A stop or a bug ends all entries of the contest.
        try:
            split_answers(answers)
        except PpoError as stop:
            for entry in contest.entries:
                if not entry.future.done():
                    entry.future.set_exception(stop)
            return
        of_node = {entry.node: entry.rollout for entry in contest.entries}
        for ((shown, vote), question), answer in zip(questions.items(), answers, strict=True):
            if not isinstance(answer, Verdict):
                continue
            # Keep a question that was answered, for the test whether the judge is up.
            self._last_judged = question
            texts = [contest.texts[node] for node in shown]
            ask_again = partial(self._ask_again, contest.prompt, texts, vote)
            self._noise.offer(question, (answer.value, ()), ask_again)
            # The second judge reads a share, by a hash of the response that is shown first; where
            # that is the reference, it reads nothing.
            rollout = of_node.get(shown[0])
            if self._monitor is not None and rollout and self._monitor.wants(rollout):
                self._monitor.begin(question, answer.value, {})
        self._score(contest)

    async def _ask_again(
        self, prompt: Prompt, texts: Sequence[Response], vote: int
    ) -> PlacedVerdict:
        """Return a fresh verdict on a comparison."""
        # Built again, so that the request has another nonce, as in another run.
        question = self._request(prompt, texts, vote)
        return (await self.connection.client.ask(question, fresh=True)).value, ()

    def _score(self, contest: Contest) -> None:
        """Set the score of each entry, or the error for which it has none."""
        tally = self._tallies[contest] = self._tally(contest)
        values = _by_reference if contest.reference else _by_strength
        scores = values(contest, tally)
        for entry in contest.entries:
            value, strength = scores.get(entry.node, (None, None))
            if value is None:
                entry.error, entry.score = _explain_missing_score(contest, tally, entry.node), None
                continue
            fresh = entry.score is None
            entry.error, entry.score = None, _build_score(contest, tally, entry, value, strength)
            if fresh:
                self._report.add(entry.rollout, entry.score)
        # A later verdict may change any score of the contest: publish them together.
        if all(entry.score is not None for entry in contest.entries):
            for entry in contest.entries:
                if not entry.future.done() and entry.score is not None:
                    entry.future.set_result(entry.score)

    def _tally(self, contest: Contest) -> Tally:
        """Count wins, ties and failures over all votes of a contest."""
        tally = Tally(np.zeros((len(contest.texts), len(contest.texts))))
        for vote in range(self._api.votes):
            # Verdicts of one vote, and the pairs that it should decide.
            places = {
                shown: answer.info["places"]
                for (shown, v), answer in contest.answers.items()
                if v == vote and isinstance(answer, Verdict)
            }
            pairs = {(min(a, b), max(a, b)) for shown, v in contest.requests if v == vote
                     for a, b in combinations(shown, 2)}  # fmt: skip
            results = pair_outcomes(places)
            tally.failed += len(pairs - results.keys())
            for (a, b), won in results.items():
                if won is None:
                    tally.followed += 1
                    continue
                tally.wins[a, b] += won
                tally.wins[b, a] += 1 - won
                tally.compared += 1
                tally.tied += won == 0.5
        return tally

    async def _repeat(self, rollout: Rollout, votes: int) -> list[Score]:
        """Return the scores of several fresh contests of one response with its reference."""
        entries = [Contestant(rollout) for _ in range(votes)]
        for entry in entries:
            await self._begin([entry], self._reference(entry), fresh=True)
        return [e.future.result() if e.future.done() else Score.failed(str(e.error))
                for e in entries]  # fmt: skip

    def _pop_extra_metrics(
        self, metrics: Mapping[str, float], counters: Sequence[Counters]
    ) -> dict[str, float]:
        """Return ties, failed pairs and the win rate, over the contests since the last call."""
        tallies, self._tallies = list(self._tallies.items()), {}
        compared, followed, failed, tied = (
            sum(getattr(tally, name) for _, tally in tallies)
            for name in ("compared", "followed", "failed", "tied")
        )
        met = [entry for contest, _ in tallies if contest.reference for entry in contest.entries]
        won = [entry.score.value for entry in met if entry.score and entry.score.value is not None]
        extra = {"judge/win_rate": fmean(won)} if won else {}
        shares = {
            "place_followed": (followed, compared + followed), "ties": (tied, compared),
            "failed_pairs": (failed, compared + followed + failed),
        }  # fmt: skip
        return extra | {f"judge/{k}": part / total for k, (part, total) in shares.items() if total}


NodeScores = dict[int, tuple[float, float | None]]  # node -> score and strength


def _by_strength(contest: Contest, tally: Tally) -> NodeScores:
    """Return score and strength of each node: the expected share of the group that it beats.

    Equal responses tie, and responses without content always lose.
    """
    nodes = largest_linked_group(tally.wins + tally.wins.T > 0, contest.sizes)
    # Equal texts count as often as they occur.
    sizes = np.array([contest.sizes[k] for k in nodes])
    rivals = sizes.sum() + contest.gated - 1
    if not nodes or rivals < 1:
        return {}
    strength = bradley_terry(tally.wins[np.ix_(nodes, nodes)])
    won = win_chances(strength) @ sizes - 0.5 + contest.gated  # minus the tie with itself
    return {node: (float(won[i] / rivals), float(strength[i])) for i, node in enumerate(nodes)}


def _by_reference(contest: Contest, tally: Tally) -> NodeScores:
    """Return the share of its comparisons with the reference that each node won."""
    last = len(contest.texts) - 1
    scores: NodeScores = {}
    for node in range(last):
        won, met = tally.wins[node, last], tally.wins[node, last] + tally.wins[last, node]
        if contest.texts[node] == contest.texts[last]:
            scores[node] = (0.5, None)
        elif met:
            scores[node] = (float(won / met), None)
    return scores


def _explain_missing_score(contest: Contest, tally: Tally, node: int) -> JudgeError:
    """Return why a node has no score: a failed call, or verdicts that follow the position."""
    node_answers = [answer for (shown, _), answer in contest.answers.items() if node in shown]
    if (error := split_answers(node_answers)[1]) is not None:
        return error
    if not node_answers:
        return JudgeError(Failure.REFUSED, "alone", "there is no response to compare it with")
    message = (
        f"{tally.followed} of {tally.followed + tally.compared} comparisons follow the place in "
        "which the responses were shown, so too few remain"
    )
    reply = next((answer.text for answer in node_answers if isinstance(answer, Verdict)), "")
    return JudgeError(Failure.UNPARSED, "place", message, reply=reply)


def _build_score(
    contest: Contest, tally: Tally, entry: Contestant, value: float, strength: float | None
) -> Score:
    """Build a score with wins, strength, cost and the judge's reasons for the rollout file."""
    verdicts = [answer for answer in contest.answers.values() if isinstance(answer, Verdict)]
    node_verdicts = [(shown, answer) for (shown, _), answer in contest.answers.items()
           if entry.node in shown and isinstance(answer, Verdict)]  # fmt: skip
    usage, share = sum((v.usage for v in verdicts), Usage()), len(contest.entries)
    # The cost of the contest is shared equally among its entries.
    info: dict[str, Any] = {
        "wins": float(tally.wins[entry.node].sum()),
        "compared": float((tally.wins[entry.node] + tally.wins[:, entry.node]).sum()),
        "cached": all(v.cached for v in verdicts),
        "judge_tokens": usage.total / share,
        "judge_calls": sum(v.calls for v in verdicts) / share,
        "cost_usd": sum(v.cost_usd for v in verdicts) / share,
    }
    if strength is not None:
        info["strength"] = round(strength, 6)
    # Each reason names the responses by their sample numbers, in the order shown.
    names = dict.fromkeys(range(len(contest.texts)), "the reference")
    for other in reversed(contest.entries):
        names[other.node] = f"sample {other.rollout.sample}"
    lines = []
    for shown, verdict in node_verdicts:
        order = ", ".join(
            f"R{i} {'this one' if k == entry.node else names[k]}" for i, k in enumerate(shown, 1)
        )
        places = verdict.info["places"]
        mine = places[shown.index(entry.node)]
        won = win_share([mine, *(p for k, p in zip(shown, places, strict=True)
                                      if k != entry.node)])  # fmt: skip
        head = {1.0: "won", 0.0: "lost"}.get(won, "tied" if len(shown) == 2 else f"place {mine}")
        lines.append(f"{head} ({order}): {verdict.reason}".rstrip(": "))
    parts = {"judge": Part(raw=value, scaled=value)}
    return Score(
        value, reason="\n".join(lines)[:MAX_REASON_CHARS], parts=parts, info=info,
        reply=node_verdicts[0][1].text if node_verdicts else "",
    )  # fmt: skip


# --- strengths ------------------------------------------------------------------------------------


def draw_pairs(count: int, max_pairs: int | None, seed: str) -> list[Pair]:
    """Return which of `count` responses meet: all pairs, or at most `max_pairs`, drawn by a seed.

    The responses are placed on a circle in random order. Neighbours meet first, then pairs at the
    other distances in random order. So count - 1 pairs link all of them, and the
    numbers of their comparisons differ by at most two.
    """
    if max_pairs is None or max_pairs >= count * (count - 1) // 2:
        return list(combinations(range(count), 2))
    dice = random.Random(seed)
    circle, steps = list(range(count)), list(range(2, count // 2 + 1))
    dice.shuffle(circle)
    dice.shuffle(steps)
    rings = [(i, (i + step) % count, step) for step in (1, *steps) for i in range(count)]
    met = {tuple(sorted((circle[i], circle[k]))): None for i, k, _ in rings}
    return [(a, b) for a, b in list(met)[:max_pairs]]


def calls_per_prompt(count: int, max_pairs: int | None, *, listed: bool) -> int:
    """Return the number of calls for the responses to one prompt, for one vote."""
    if listed:
        return 2 if count > 1 else 0
    pairs = count * (count - 1) // 2
    return 2 * (pairs if max_pairs is None else min(pairs, max_pairs))


def pair_outcomes(verdicts: Mapping[tuple[int, ...], Sequence[int]]) -> dict[Pair, float | None]:
    """Return what the lower-numbered response of each pair won: 0 to 1, a tie is 0.5.

    `verdicts` maps the responses in the order shown to their places. The result is None where the
    same position won in both orders. A pair that was not shown in both orders is left out.
    """
    seen: dict[Pair, float] = {}
    for shown, places in verdicts.items():
        for (a, place), (b, other) in combinations(zip(shown, places, strict=True), 2):
            seen[a, b] = win_share((place, other))
    results: dict[Pair, float | None] = {}
    for (a, b), won in seen.items():
        if a < b and (b, a) in seen:
            reverse = seen[b, a]
            results[a, b] = None if won == reverse != 0.5 else (won + 1 - reverse) / 2
    return results


def largest_linked_group(met: NDArray[np.bool_], sizes: Sequence[int]) -> list[int]:
    """Return the largest set of nodes linked by comparisons, if it has more than half of all.

    Strengths of nodes without a link cannot be compared. `sizes` counts the responses of a node.
    """
    linked = met | np.eye(len(sizes), dtype=bool)
    for _ in sizes:  # links of twice as many comparisons each time
        linked = linked @ linked
    reached = linked @ np.asarray(sizes)
    best = int(reached.argmax())
    return np.flatnonzero(linked[best]).tolist() if 2 * reached[best] > sum(sizes) else []


def bradley_terry(wins: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return strengths θ with P(i beats k) = 1 / (1 + exp(θ_k - θ_i)) (Bradley & Terry 1952).

    `wins[i, k]` is how often i beat k, a tie counts half for each. Newton's method finds the mode
    under PRIOR ties of each response with one of strength 0; the objective is concave, so there is
    one mode.
    """
    strength = np.zeros(len(wins))
    games = wins + wins.T

    def objective(at: NDArray[np.float64]) -> float:
        # Log posterior: wins, and the imaginary ties.
        gaps = at[:, None] - at
        prior = np.logaddexp(0, at) + np.logaddexp(0, -at)
        return float(-(wins * np.logaddexp(0, -gaps)).sum() - PRIOR / 2 * prior.sum())

    for _ in range(100):
        # Gradient and curvature of the log posterior.
        chance, alone = win_chances(strength), 1 / (1 + np.exp(-strength))
        gradient = (wins - games * chance).sum(1) + PRIOR * (0.5 - alone)
        weight = games * chance * (1 - chance)
        curvature = np.diag(weight.sum(1) + PRIOR * alone * (1 - alone)) - weight
        step = np.linalg.solve(curvature, gradient)
        # Halve the step until it does not overshoot.
        now = objective(strength)
        while objective(strength + step) < now and np.abs(step).max() > 1e-12:
            step = step / 2
        strength = strength + step
        if np.abs(step).max() < 1e-10:
            break
    return strength


def win_chances(strength: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the matrix of P(i beats k)."""
    chances: NDArray[np.float64] = 1 / (1 + np.exp(strength[None, :] - strength[:, None]))
    return chances
