"""Questions with known answers, asked at the start: does the judge mean what its verdicts say?

A judge that confuses a fault and its absence, a place and a score, or the ends of a scale gets
them wrong. A wrong answer is a warning and not an error: a weak judge may still rank responses. A
judge with unreadable replies was refused before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.rewards.judge.calls import Question, Verdict
from ppo_cli.rewards.judge.placing import request_places, show_example
from ppo_cli.rewards.judge.prompt import (
    COMPARE,
    RUBRIC_SCALE,
    Material,
    Template,
    load_preset,
)
from ppo_cli.rewards.judge.rubric import SCORING, SYSTEM, Criterion, Rubric
from ppo_cli.rewards.judge.visible import Passage

_BY_CRITERIA = Template("format check", "1", SYSTEM, SCORING, RUBRIC_SCALE)
_SUM = "What is 2 + 2? Answer with the number."
_COLOURS = Material(
    "Name colours that you like.", "I like blue, red and green. Only an idiot would ask that."
)
_CRITERIA = Rubric((
    Criterion("colour", "The response names at least one colour."),
    Criterion("insult", "The response insults the reader.", fault=True),
    Criterion("price", "The response states a price in euros.", fault=True),
    Criterion("count", "The number of colours that the response names, 3 at most.", levels=3),
))  # fmt: skip
_GRADES = [1.0, 1.0, 0.0, 1.0]  # the fault `insult` is present, the fault `price` is not
_ONE_WRONG = (Passage("piece", 1, "2 + 2 is 4. "), Passage("piece", 2, "3 + 3 is 9."))
_TWO_SUMS = Material("What are 2 + 2 and 3 + 3?", _ONE_WRONG, ground_truth="4 and 6")


@dataclass(frozen=True)
class FormatCheck:
    """A question and its right verdict: grades of criteria, if any, and bounds of the value.

    A response in pieces is right in the first one alone, if `falls`.
    """

    question: Question
    grades: Sequence[float]
    at_least: float
    at_most: float
    falls: bool = False

    def is_passed(self, verdict: Verdict) -> bool:
        """Whether the judge gave the known answer."""
        # A decision endpoint gives mean levels: the nearest level counts.
        pairs = zip(verdict.info.get("grades", ()), _CRITERIA.criteria, strict=False)
        nearest = [round(grade * c.levels) / c.levels for grade, c in pairs]
        pieces = verdict.info.get("pieces", (1.0, 0.0)) if self.falls else (1.0, 0.0)
        right = nearest == list(self.grades) and pieces[0] > pieces[-1]
        return right and self.at_least <= verdict.value <= self.at_most


def format_checks(api: ApiReward, template: Template) -> list[FormatCheck]:
    """Return two questions or, for a scoring prompt without worked cases, none.

    With places of pieces there is one more.
    """
    if api.mode == "compare":
        # The right sum is better; once it is shown first, once second.
        checks = []
        wrong = ["7"] * (2 if api.compare == "list" else 1)
        for texts in (["4", *wrong], ["7", "4", *wrong[1:]]):
            material = Material(_SUM, texts[0], compared=tuple(texts))
            question = load_preset(COMPARE).question(material, api)
            # After a better response the first one may tie with another wrong one, or lose to it.
            bounds = (1.0, 1.0) if texts[0] == "4" else (0.0, 0.0 if len(texts) == 2 else 0.25)
            checks.append(FormatCheck(question, (), *bounds))
        return checks
    if api.rubric is not None:
        criteria = replace(_CRITERIA, quoted=api.place == "criterion")
        question = _BY_CRITERIA.question(_COLOURS, api, rubric=criteria)
        return [FormatCheck(question, _GRADES, 0.0, 1.0)]
    checks = list[FormatCheck]()
    if api.place not in (None, "turn"):
        sums = load_preset("math")
        placing = request_places(_ONE_WRONG, api, sums.scale)
        question = sums.question(_TWO_SUMS, api, placing=placing)
        checks.append(FormatCheck(question, (), sums.scale.low, sums.scale.high, falls=True))
    if template.written_for != template.scale:
        return checks  # the cases are on the scale that the prompt was written for
    # The easiest good case and the easiest bad one.
    best = [case for case in template.cases if case.at_least is not None]
    worst = [case for case in template.cases if case.at_most is not None]
    chosen = [max(best, key=lambda case: case.at_least or 0)] if best else []
    chosen += [min(worst, key=lambda case: case.at_most or 0)] if worst else []
    low, high = template.scale.low, template.scale.high
    for case in chosen:
        at_least = low if case.at_least is None else case.at_least
        at_most = high if case.at_most is None else case.at_most
        response = show_example(str(case.material.response), api)
        placing = request_places(response, api, template.scale)
        material = replace(case.material, response=response)
        question = template.question(material, api, placing=placing)
        checks.append(FormatCheck(question, (), at_least, at_most))
    return checks


def wish_question(api: ApiReward, text: str, features: Sequence[str]) -> Question:
    """Return the question how much of each feature a text asks for: level 0 less, 2 more."""
    wants = "How much {} the instructions ask for in answers: 0 little, 1 they do not say, 2 much."
    criteria = tuple(Criterion(f, wants.format(f), levels=2) for f in features)
    material = Material("Write instructions for an author or a judge of answers.", text)
    return _BY_CRITERIA.question(material, api, rubric=Rubric(criteria))
