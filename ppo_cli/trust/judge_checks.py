"""Checks that need no verdict: what a judge is shown, and what stops before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppo_cli.config.reward_schema import ApiReward
from ppo_cli.rewards.judge.gate import content_free
from ppo_cli.rewards.judge.scoring import material_of
from ppo_cli.rewards.judge.template import Template, readable
from ppo_cli.trust.items import Item, plain_prompt
from ppo_cli.trust.probes import FOR_THE_GATE, LEAKS
from ppo_cli.trust.score import cut

SECRET = "7391-ppo-cli-5528"


@dataclass(frozen=True)
class Check:
    """One question to a reward; `passed` is None when it could not be asked."""

    name: str
    passed: bool | None
    said: str
    worst: Mapping[str, Any] | None = None
    cases: tuple[Mapping[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The check for `--json`."""
        return {
            "name": self.name,
            "passed": self.passed,
            "said": self.said,
            "worst": self.worst,
            "cases": list(self.cases),
        }


def of_judge(
    template: Template | None, api: ApiReward | None, items: Sequence[Item], *, judges: int
) -> list[Check]:
    """Check request and gate, where there is exactly one judge."""
    if template is None or api is None:
        several = f"there are {judges} judges; audit each by itself" if judges > 1 else ""
        return [
            Check("ground truth in the request", None, several or "only a judge gets a request"),
            Check("content-free gate", None, several or "only a judge has one"),
        ]
    return [_rendered(template, api, items[0]), _gated(api, items)]


def _rendered(template: Template, api: ApiReward, item: Item) -> Check:
    """What a response says about variables must stay letters in the request."""
    name = "ground truth in the request"
    known = {**item.prompt.extra_info, "answer": SECRET}
    prompt = plain_prompt("leak", item.prompt.text, SECRET, "", known)

    def count(response: str) -> int:
        material = material_of(prompt, response)
        question = template.question(material, max_response_chars=api.max_response_chars)
        return (question.system + question.user).count(SECRET)

    plain = count("no answer")
    found = {text: count(text) for text in LEAKS}
    cases = tuple({"sent": text, "got": n, "wanted": plain} for text, n in found.items())
    leaking = [case for case in cases if case["got"] != plain]
    said = "a response that names a variable does not get its value"
    return Check(name, not leaking, said, leaking[0] if leaking else None, cases)


def _gated(api: ApiReward, items: Sequence[Item]) -> Check:
    name = "content-free gate"
    if not api.gate:
        return Check(name, None, "it is off (--rm_gate)")
    text = items[0].prompt.text
    cases = tuple(
        {
            "sent": repr(reply),
            "got": content_free(text, readable(reply, api.reasoning)) or "passed on to the judge",
        }
        for reply in (*FOR_THE_GATE, text)
    )
    open_to = [case for case in cases if case["got"] == "passed on to the judge"]
    real = [i for i in items if i.good and content_free(i.prompt.text, i.good) is not None]
    if real:
        worst = {"sent": cut(real[0].good), "got": content_free(text, real[0].good)}
        return Check(name, False, "it stops an answer that is a good one", worst, cases)
    said = f"{len(cases) - len(open_to)} of {len(cases)} empty replies stop before the judge"
    return Check(name, not open_to, said, open_to[0] if open_to else None, cases)
