"""A panel: several judges score each response, and the median of their scores counts.

One corrupt judge of three cannot move the median far, while it moves the mean by a third of its
error. With criteria, the median of each criterion is shown as well.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median, pstdev
from typing import Any

from ppo_cli.config.mixture import panel_judges
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.records import Part, Rollout, Score
from ppo_cli.rewards.judge.asker import JudgeAsker
from ppo_cli.rewards.judge.calls import JudgeError, Question, list_criteria_parts
from ppo_cli.rewards.judge.client import Counters
from ppo_cli.rewards.judge.reward import JudgeReward
from ppo_cli.rewards.judge.rounds import PendingScore
from ppo_cli.rewards.remote.failures import Failure

_COSTS = ("judge_tokens", "judge_calls", "cost_usd")


# Errors after which a judge may give a verdict when it is asked again, the most hopeful first.
_HOPE = {Failure.RETRYABLE: 0, Failure.UNPARSED: 1}


class PanelReward(JudgeReward):
    """Scores by several judges; the filter for empty replies is that of the first."""

    def __init__(
        self, api: ApiReward, *, name: str = "judge", environ: Mapping[str, str] = os.environ
    ) -> None:
        super().__init__(api, name=name, environ=environ)
        assert api.panel.least is not None, "a panel has more than one judge"
        self._least = api.panel.least
        self._spreads: list[float] = []
        self._failures: Counter[str] = Counter()
        self._panel = {"judge": JudgeAsker(api, self.connection, self._loop)}
        for other, settings in panel_judges(api).items():
            self._panel[other] = self._add_judge(settings, environ)

    async def _ask_judges(
        self, entry: PendingScore, question: Question
    ) -> tuple[Score | None, JudgeError | None]:
        """Return the median of the judges' scores; None and an error if too few came."""
        # When the panel is asked again after a failure, only those that failed are.
        missing = [name for name in self._panel if name not in entry.verdicts]
        answers = await asyncio.gather(
            *(self._panel[name].ask_score(entry.rollout) for name in missing)
        )
        entry.verdicts |= {
            n: score for n, (score, _) in zip(missing, answers, strict=True) if score
        }
        errors = {n: error for n, (_, error) in zip(missing, answers, strict=True) if error}
        self._failures.update(errors.keys())
        verdicts = {n: {"score": s.value, "reason": s.reason} for n, s in entry.verdicts.items()}
        lost = {name: {"failure": error.summary} for name, error in errors.items()}
        entry.info = {"panel": verdicts | lost}
        if len(entry.verdicts) < self._least:
            # So many more verdicts are needed: the least hopeful of the errors that would have to
            # pass says whether asking again may help.
            needed = self._least - len(entry.verdicts)
            hopeful = sorted(errors.values(), key=lambda error: _HOPE.get(error.kind, 2))
            judges = ", ".join(f"{name}: {error}" for name, error in errors.items())
            return None, hopeful[needed - 1].rewritten(
                f"{len(entry.verdicts)} of {len(self._panel)} judges gave a verdict, "
                f"{self._least} are needed by --rm_panel_least ({judges})"
            )
        score = self._combine(entry.verdicts, question)
        self._spreads.append(float(score.info["panel_spread"]))
        return replace(score, info={**score.info, **entry.info}), None

    async def is_up(self) -> bool:
        """Return whether all judges still answer a question that they answered before."""
        return all(await asyncio.gather(*(asker.is_up() for asker in self._panel.values())))

    async def _repeat(self, rollout: Rollout, votes: int) -> list[Score]:
        """Return several fresh scores of the panel."""
        question = self.question(rollout.prompt, self._visible(rollout))
        repeats = await asyncio.gather(*(a._repeat(rollout, votes) for a in self._panel.values()))
        panels = [
            {n: score for n, score in zip(self._panel, scores, strict=True) if score.judged}
            for scores in zip(*repeats, strict=True)
        ]
        few = Score.failed("too few judges gave a verdict")
        return [self._combine(p, question) if len(p) >= self._least else few for p in panels]

    def _combine(self, scores: Mapping[str, Score], question: Question) -> Score:
        """Return one score from those of the judges, by judge."""
        values = {name: score.number for name, score in scores.items()}
        info: dict[str, Any] = {
            name: sum(score.info[name] for score in scores.values()) for name in _COSTS
        }
        info["cached"] = all(score.info["cached"] for score in scores.values())
        info["latency_s"] = max(score.info["latency_s"] for score in scores.values())
        parts = {f"panel/{name}": Part(value, None) for name, value in values.items()}
        value = median(values.values())
        if question.rubric is not None:
            rubric = question.rubric.restore()
            verdicts = [score.info["criteria"] for score in scores.values()]
            info["criteria"] = {
                criterion.name: median(verdict[criterion.name] for verdict in verdicts)
                for criterion in rubric.criteria
            }
            parts |= list_criteria_parts(rubric, info["criteria"])
        if question.placing is not None:
            pieces = zip(*(score.info["pieces"] for score in scores.values()), strict=True)
            info["pieces"] = [median(piece) for piece in pieces]
        nearest = min(scores, key=lambda name: abs(values[name] - value))
        if question.rubric is not None and question.rubric.quoted:
            info["quotes"] = scores[nearest].info["quotes"]
        info["panel_spread"] = pstdev(values.values())
        scale = question.scale
        parts["judge"] = Part(scale.low + value * (scale.high - scale.low), value)
        return Score(
            value, reason=scores[nearest].reason, parts=parts, info=info,
            reply=scores[nearest].reply,
        )  # fmt: skip

    def _pop_extra_metrics(
        self, metrics: Mapping[str, float], counters: Sequence[Counters]
    ) -> dict[str, float]:
        """Return how much the judges disagree, and how often each gave no verdict."""
        panel = {f"judge/panel_failed/{name}": float(n) for name, n in self._failures.items()}
        if self._spreads:
            panel["judge/panel_spread"] = fmean(self._spreads)
        self._spreads = []
        self._failures.clear()
        return panel
