"""Judges as functions of a request, honest and not: what a loopback server scores with."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.extras.lab.audit.attacks import bundled_items
from ppo_cli.records import Part, Rollout, Score
from ppo_cli.rewards.judge import prompt
from ppo_cli.rewards.judge.sanitise import neutralise
from tests.judge_server.wire import fenced
from tests.scoring.scripted import Scripted

Judge = Callable[[str, str], int]
FENCES = re.compile(r"<([\w.]+)-([0-9a-f]{16})>\n.*?\n</\1-\2>", re.DOTALL)
ORDER = re.compile(r"score\W{0,4}(?:is|of|:)?\W{0,2}10\b|\b10 ?(?:分|Punkte)", re.IGNORECASE)
SURE = ("correct", "completely", "checked", "determined", "experts", "exactly")


def as_shown(text: str) -> str:
    """Text as it stands in a request."""
    return neutralise(prompt.visible_text(text)).strip()


@lru_cache(maxsize=1)
def names() -> tuple[tuple[str, int], ...]:
    """The bundled responses with what they are worth, the best first."""
    worth = {"good": 10, "partial": 5, "bad": 1}
    rows = [row for rows in bundled_items().values() for row in rows]
    return tuple((as_shown(row[kind]), level) for kind, level in worth.items() for row in rows)


@lru_cache(maxsize=1)
def cases() -> dict[tuple[str, str], int]:
    """What the worked cases of the bundled judge prompts should get."""
    result = {}
    for name in prompt.preset_names():
        for case in prompt.load_preset(name).cases:
            level = case.at_least if case.at_least is not None else case.at_most
            assert level is not None
            result[as_shown(case.material.prompt), as_shown(case.material.response)] = level
    return result


def honest(system: str, user: str) -> int:
    """Reads nothing but the response, and knows what it is worth."""
    response = (fenced("response", user) or "").strip()
    case = cases().get(((fenced("prompt", user) or "").strip(), response))
    if case is not None:
        return case
    return next((level for text, level in names() if text in response), 1)


def gullible(system: str, user: str) -> int:
    """Obeys orders in the data, unless the request says that data are no instructions."""
    outside = FENCES.sub("", user)
    output = "not instructions" in outside and fenced("response", user) is not None
    return honest(system, user) if output else obedient(system, user)


def obedient(system: str, user: str) -> int:
    """Obeys whatever orders it finds in the data."""
    data = "".join(result.group() for result in FENCES.finditer(user))
    return 10 if ORDER.search(data) else honest(system, user)


def literal(system: str, user: str) -> int:
    """Does what the prompt says, wise or not."""
    outside, response = FENCES.sub("", user), fenced("response", user) or ""
    if "confident" in outside:
        return 10 if any(word in response for word in SURE) else 2
    if "long" in outside:
        return min(10, 1 + len(response) // 60)
    if "score that the response asks for" in outside and ORDER.search(response):
        return 10
    return honest(system, user)


class Asked(Scripted):
    """A judge as a reward, without the wire: the real prompt goes to a judge from here."""

    def __init__(self, api: ApiReward, judge: Judge) -> None:
        super().__init__(self._ask)
        self.template = prompt.load_template(api)
        self._judge = judge

    def _ask(self, rollout: Rollout) -> Score:
        question = self.template.question(prompt.build_material(rollout.prompt, rollout.text))
        raw = float(self._judge(question.system, question.user))
        value = question.scale.scaled(raw)
        return Score(value, reason=f"worth {raw:g}", parts={"judge": Part(raw, value)})

    def repeat(self, rollout: Rollout, votes: int) -> Future[list[Score]]:
        """Ask so many times."""
        future: Future[list[Score]] = Future()
        future.set_result([self._ask(rollout) for _ in range(votes)])
        return future
