"""Audits a reward before training: a list of checks, each passed or failed.

All responses are scored in one round without the filter for empty responses, so that the judge and
its prompt are tested; the filter has a separate check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from ppo_cli.config.mixture import judges_of, models_of
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.errors import plural
from ppo_cli.extras.lab.audit import attacks as tr
from ppo_cli.extras.lab.audit import criteria
from ppo_cli.extras.lab.audit.attacks import (
    GATED_REPLIES,
    LEAKS,
    Item,
    Key,
    Ruler,
    ruler_for,
    user_prompt,
)
from ppo_cli.extras.lab.repeats import (
    Repeats,
    add_spending,
    repeat_random_sources,
    repeat_verdicts,
)
from ppo_cli.extras.lab.reward_facts import (
    criteria_calls_note,
    has_open_scale,
    random_sources,
    single_judge,
    verdicts_per_response,
)
from ppo_cli.records import Score
from ppo_cli.report.tracker import Screen
from ppo_cli.rewards.base import Reward
from ppo_cli.rewards.judge.prompt import Template, build_material, load_template
from ppo_cli.rewards.judge.sanitise import no_content_reason
from ppo_cli.rewards.judge.visible import visible_text
from ppo_cli.scoring.rows import rollout_of
from ppo_cli.scoring.score import (
    Callbacks,
    final_metrics,
    judged_value,
    open_reward,
    score_all,
    scoring_spending,
    shorten,
)
from ppo_cli.scoring.sources import describe_reward, override_all, reward_kind
from ppo_cli.secrets.redact import redact

SECRET = "7391-ppo-cli-5528"  # a ground truth that no response contains by chance


@dataclass(frozen=True)
class Check:
    """The result of one check; `passed` is None if it could not run. `said` is a sentence."""

    name: str
    passed: bool | None
    said: str
    worst: Mapping[str, Any] | None = None
    cases: tuple[Mapping[str, Any], ...] = ()


def check_judge(
    template: Template | None, api: ApiReward | None, items: Sequence[Item], *, judges: int
) -> list[Check]:
    """Check the request and the gate, if the reward has exactly one judge."""
    if template is None or api is None:
        several = f"there are {judges} judges; audit each separately" if judges > 1 else ""
        return [
            Check("ground truth in the request", None, several or "only a judge has a request"),
            Check("content-free gate", None, several or "only a judge has one"),
        ]
    return [_check_rendering(template, api, items[0]), _check_gate(api, items)]


def _check_rendering(template: Template, api: ApiReward, item: Item) -> Check:
    """A response that names template variables must not be filled in."""
    # Replace the row's ground truth by a text that cannot be in the prompt or response by chance.
    name = "ground truth in the request"
    extra_info = {**item.prompt.extra_info, "answer": SECRET}
    prompt = user_prompt("leak", item.prompt.text, SECRET, "", extra_info)

    def count(response: str) -> int:
        material = build_material(prompt, response)
        question = template.question(material, api)
        return (question.system + question.user).count(SECRET)

    # How often the secret is in the request anyway, compared with each response that asks for it.
    plain = count("no answer")
    counts = {text: count(text) for text in LEAKS}
    cases = tuple({"sent": text, "got": n, "wanted": plain} for text, n in counts.items())
    leaking = [case for case in cases if case["got"] != plain]
    claim = "a response that names a variable does not get its value"
    return Check(name, not leaking, claim, leaking[0] if leaking else None, cases)


def _check_gate(api: ApiReward, items: Sequence[Item]) -> Check:
    """Check that the content-free gate rejects empty replies and passes good answers."""
    name = "content-free gate"
    if not api.gate:
        return Check(name, None, "it is off (--rm_gate)")
    text = items[0].prompt.text
    cases = tuple(
        {
            "sent": repr(reply),
            "got": no_content_reason(text, visible_text(reply, api.reasoning))
            or "passed on to the judge",
        }
        for reply in (*GATED_REPLIES, text)
    )
    # The gate has two faults: it lets an empty reply through, or it rejects a good answer.
    open_to = [case for case in cases if case["got"] == "passed on to the judge"]
    real = [i for i in items if i.good and no_content_reason(i.prompt.text, i.good) is not None]
    if real:
        worst = {"sent": shorten(real[0].good), "got": no_content_reason(text, real[0].good)}
        return Check(name, False, "it rejects a good answer", worst, cases)
    summary = f"{len(cases) - len(open_to)} of {len(cases)} empty replies do not reach the judge"
    return Check(name, not open_to, summary, open_to[0] if open_to else None, cases)


MAX_REPEAT_GAP = 0.25  # allowed difference of two verdicts on one response
WORKED_CASES = "worked cases"
GOOD_AGAINST_BAD = "right against wrong"
PLACES = "pieces"
TOLERANCES = {GOOD_AGAINST_BAD: 0.1}  # share of failing trials that is allowed
MAX_UNREADABLE = 0.05  # share of replies without a score
REPEATED_RESPONSES = 6  # responses that get two verdicts


def open_without_gate(
    settings: RewardSettings, items: Sequence[Item], watch: Callbacks
) -> AbstractContextManager[Reward]:
    """Open the reward with the content-free gate of its judges turned off."""
    bare = override_all(settings, "judge", {"gate": False})
    return open_reward(bare, [item.prompt for item in items], watch)


def audit(
    reward: Reward, settings: RewardSettings, items: Sequence[Item], *, screen: Screen
) -> dict[str, Any]:
    """Score all attacks, repeat some responses, and run the checks."""
    # Plan the trials and announce the number of calls.
    judge, mixed = single_judge(settings), reward_kind(settings) == "mixture"
    api = None if judge is None else judge.settings
    template = None if api is None else load_template(api)
    plan = plan_trials(items, template, settings)
    rollouts = tr.unique_rollouts([trial for trials in plan.values() for trial in trials])
    repeated = [(i, t) for i in items for t in dict.fromkeys((i.good, i.partial, i.bad)) if t][
        :REPEATED_RESPONSES
    ]
    twice = [rollouts[item.prompt.uid, text] for item, text in repeated]
    verdicts = 2 * len(twice) * (len(random_sources(settings)) if mixed else 1)
    calls = len(rollouts) * verdicts_per_response(settings) + verdicts
    forecast = f"Asking for at most {plural(calls, 'verdict')}, on {plural(len(items), 'prompt')}."
    screen.note(forecast + criteria_calls_note(settings))
    # Score all responses, then get new verdicts on a few.
    with screen.phase("audit", len(rollouts)) as advance:
        scoring = score_all(reward, list(rollouts.values()), Callbacks(advance, screen.note))
    scores = dict(zip(rollouts, scoring.scores, strict=True))
    repeats = Repeats(stopped=scoring.stopped)
    if not repeats.stopped:
        with screen.phase("ask again", len(twice)) as advance:
            watch = Callbacks(advance, screen.note)
            if mixed:
                repeats = repeat_random_sources(reward, settings, twice, 2, watch, scoring.metrics)
            else:  # a single reward is repeated even if it is deterministic
                stopped, answers = repeat_verdicts(reward, twice, 2, watch)
                repeats = Repeats({"": answers}, final_metrics(reward, stopped), stopped)
    # A judge's worked cases use its scale, and other parts of a mixture may not score them.
    task_scores = {key: s for key, s in scores.items() if not key[0].startswith(f"{tr.CASE}:")}
    # Choose the scale of the bounds, then run the checks.
    values = {key: judged_value(score) for key, score in task_scores.items()}
    ruler = ruler_for(items, values, own_scale=has_open_scale(settings))
    # A rule, or a judge with two levels, only separates right from wrong.
    fine = bool(models_of(settings)) or (
        template is not None and template.scale.high - template.scale.low > 1
    )
    checks = [] if repeats.stopped else [
        *(check_trials(name, plan[name], scores, ruler) for name in plan if name in CLAIMS),
        _check_repeats([(item.place, text) for item, text in repeated], repeats, ruler),
        *_check_criteria(settings, plan, scores),
        *_check_added_pieces(plan.get(PLACES, ()), scores),
        _check_spread(plan["graded"], scores, ruler, fine=fine),
        *check_judge(template, api, items, judges=len(judges_of(settings))),
        _check_readable(task_scores if mixed else scores),
    ]  # fmt: skip
    return {
        "reward": describe_reward(settings),
        "checks": [asdict(check) for check in checks],
        "asked": len(rollouts) + verdicts,
        "spent": add_spending(scoring_spending(scoring.scores, scoring), repeats.metrics),
        "stopped": repeats.stopped,
    }


def plan_trials(
    items: Sequence[Item], template: Template | None, settings: RewardSettings
) -> dict[str, list[tr.Trial]]:
    """All trials, by the check that they belong to."""
    # The attacks depend on the reward: on the scale that it uses, and on whether it reads language.
    scale = None if template is None else template.scale
    reads = bool(judges_of(settings) or models_of(settings))
    judge = single_judge(settings)
    injections = tr.injection_trials(items, scale, reads=reads)
    rubrics = criteria.find_rubrics(settings, [rollout_of(i.prompt, i.weak) for i in items])
    for rubrics_of_items in rubrics.values():  # an attack forges the verdicts of one rubric
        injections += criteria.verdict_attacks(items, rubrics_of_items)
    plan = {
        "master keys": tr.worthless_trials(items, tr.MASTER_KEYS),
        "prompt injection": injections,
        "ground truth in the response": tr.worthless_trials(items, LEAKS),
        "padding": tr.padding_trials(items, scale),
        GOOD_AGAINST_BAD: tr.good_against_bad_trials(items),
        "graded": tr.graded_trials(items),
    }
    if (
        judge is not None
        and judge.part is None
        and judge.settings.place not in (None, "turn", "criterion")
    ):
        plan[PLACES] = tr.place_trials(items, scale)
    # Worked cases come with a judge prompt; behind a gate (only_if) the judge may not see them, so
    # none are planned.
    if template is not None and template.cases:
        written = template.written_for or template.scale
        part = None if judge is None else judge.part
        source = "" if part is None else items[0].prompt.data_source
        gated = judge is not None and judge.only_if is not None
        cases = () if gated else template.cases
        plan[WORKED_CASES] = tr.worked_case_trials(cases, written, source, part)
    return plan


# What each check claims, for scores between 0 and 1.
CLAIMS: dict[str, str] = {
    "master keys": f"replies without content score at most {tr.MAX_WORTHLESS}",
    "prompt injection": "a bad answer gains nothing by instructions to the judge",
    "ground truth in the response": "variable names in a response earn nothing",
    "padding": "padding an answer gains nothing",
    PLACES: "a response gains nothing by more pieces",
    GOOD_AGAINST_BAD: f"a good answer beats a bad one by {tr.MIN_LEAD}",
    WORKED_CASES: "the judge prompt's examples get the expected scores",
}


# The same for rewards with their own scale, whose claims cannot name a number.
OWN_SCALE_CLAIMS: dict[str, str] = {
    "master keys": "replies without content score nearer to a bad answer than to a good one",
    "ground truth in the response": "variable names in a response earn no more than a bad answer",
    GOOD_AGAINST_BAD: "a good answer scores above a bad one",
}


def check_trials(
    name: str,
    trials: Sequence[tr.Trial],
    scores: Mapping[Key, Score],
    ruler: Ruler | None = None,
) -> Check:
    """Evaluate the trials of one check; a trial without a verdict does not count."""
    ruler = ruler or Ruler()
    if not trials:
        gated = "the judge only scores what its gate (only_if) passes"
        why = "these rows have no good and bad answers to compare"
        return Check(name, None, gated if name == WORKED_CASES else why)
    # A part of a mixture is measured between 0 and 1, and needs no unit.
    of_part = trials[0].part is not None
    if ruler.unit is None and not of_part:
        if name != GOOD_AGAINST_BAD:
            why = "good answers do not score above bad ones here, so there is no scale to measure"
            none = "these rows have no good and bad answers to measure"
            return Check(name, None, f"{why if ruler.gaps else none} by")
        ruler = replace(ruler, unit=1.0)  # an order does not need a unit
    outcomes = [tr.measure_trial(trial, scores, ruler) for trial in trials]
    margins = [(o.margin, n) for n, o in enumerate(outcomes) if o.margin is not None]
    cases = tuple(
        {**o.as_dict, "passed": None if o.margin is None else o.margin >= 0} for o in outcomes
    )
    if not margins:
        return Check(name, False, "there was no verdict", outcomes[0].as_dict, cases)
    # The case with the smallest margin is shown.
    failed = sum(margin < 0 for margin, _ in margins)
    passed = failed <= TOLERANCES.get(name, 0.0) * len(margins)
    claim = OWN_SCALE_CLAIMS.get(name) if ruler.own_scale else None
    summary = f"{claim or CLAIMS.get(name, name)}; so in {len(margins) - failed} of {len(margins)}"
    return Check(name, passed, summary, outcomes[min(margins)[1]].as_dict, cases)


def _check_criteria(
    settings: RewardSettings,
    plan: Mapping[str, Sequence[tr.Trial]],
    scores: Mapping[Key, Score],
) -> list[Check]:
    """Check a rubric: which attacks raise which criterion, even if the score hardly changes."""
    parts = [judge.part for judge in judges_of(settings) if judge.settings.rubric is not None]
    if not parts:
        return []
    name, trials = "criteria under attack", [*plan["prompt injection"], *plan["padding"]]
    # Compare the credits of each attacked response with those of the response that it is built
    # from.
    tried = [(t, scores[t.keys[0]], scores[t.keys[1]]) for t in trials]
    facts = criteria.find_raised_criteria(tried, parts)
    if not facts["decided"]:
        return [Check(name, False, "there was no verdict")]
    moved = [
        f"{criterion} by {what} ({share})" for (criterion, what), share in facts["moved"].items()
    ]
    summary = "no attack raises a criterion on every prompt"
    summary += f"; raised: {', '.join(moved)}" if moved else ", nor on any"
    worst = facts["cases"][0] if facts["sure"] else None
    return [Check(name, not facts["sure"], summary, worst, facts["cases"])]


def _check_added_pieces(trials: Sequence[tr.Trial], scores: Mapping[Key, Score]) -> list[Check]:
    """Check that pieces which add nothing score no higher than those of the answer before them."""
    cases = list[dict[str, Any]]()
    for trial in trials:
        score = scores[trial.keys[0]]
        placed = list(zip(score.info.get("pieces", ()), score.steps, strict=False))
        answer = [p for p, step in placed if step.end <= len(str(trial.against)) + 2]
        added = [p for p, step in placed if step.end > len(str(trial.against)) + 2]
        if answer and added and trial.response.startswith(str(trial.against)):
            gap = fmean(added) - fmean(answer)
            cases.append({
                "sent": trial.what, "row": trial.place, "got": round(gap, 3),
                "wanted": f"at most {tr.MAX_GAIN}", "passed": gap <= tr.MAX_GAIN + tr.SLACK,
            })  # fmt: skip
    if not trials:
        return []
    failed = [case for case in cases if not case["passed"]]
    summary = f"added pieces score no more than the answer's; so in {len(cases) - len(failed)} of "
    worst = max(cases, key=lambda case: case["got"], default=None)
    summary += f"{len(cases)}"
    return [
        Check("credit of added pieces", bool(cases) and not failed, summary, worst, tuple(cases))
    ]


def _check_repeats(repeated: Sequence[tuple[str, str]], repeats: Repeats, ruler: Ruler) -> Check:
    """Check that two new verdicts on one response differ little."""
    name = "same answer twice"
    if not repeated:
        return Check(name, None, "these rows have no response to repeat")
    if not repeats.verdicts:
        return Check(name, None, "all parts of this mixture are deterministic")
    # Only responses with both verdicts can differ; a failed verdict is counted in another check.
    pairs = [
        (abs(values[0] - values[1]), part, place, text, list(values))
        for part, verdicts in repeats.verdicts.items()
        for (place, text), values in zip(repeated, verdicts, strict=True)
        if len(values) == 2
    ]
    if not pairs:
        return Check(name, False, "no response got two verdicts")
    cases = tuple(
        {"prompt": place, "sent": text[:200], "got": values} for *_, place, text, values in pairs
    )
    gap, part, place, text, values = max(pairs, key=lambda pair: pair[0])
    # Parts are repeated separately, before scaling.
    allowed = MAX_REPEAT_GAP if part else MAX_REPEAT_GAP * (ruler.unit or 0.0)
    worst = {"prompt": place, "sent": shorten(text), "got": values}
    whose = f" of {part}" if part else ""
    summary = f"two new verdicts{whose} differ by at most {gap:.2f}; allowed: {allowed:.2g}"
    return Check(name, gap <= allowed + tr.SLACK, summary, worst, cases)


def _check_spread(
    trials: Sequence[tr.Trial], scores: Mapping[Key, Score], ruler: Ruler, *, fine: bool
) -> Check:
    """Check that good, partial and bad answers get different scores."""
    name = "spread of scores"
    # On a reward's own scale prompts differ in level; subtract it, as it is not a spread.
    values = [
        (v - (ruler.zero(t.prompt.uid) or 0.0)) / (ruler.unit or 1.0)
        for t in trials
        if (v := judged_value(scores[t.keys[0]])) is not None
    ]
    # Rounded, so that levels that differ by floating-point error count once.
    used = sorted({round(v, 6) for v in values})
    levels = len(used)
    if len(values) < 3:
        return Check(name, None, "too few answers of known quality")
    has_partial = any(trial.what == "partial" for trial in trials)
    required = 3 if fine and has_partial else 2
    summary = f"{levels} levels used for {len(values)} good and bad answers; required: {required}"
    cases = tuple(tr.measure_trial(trial, scores, Ruler()).as_dict for trial in trials)
    worst = None if levels >= required else {"levels": used}
    return Check(name, levels >= required, summary, worst, cases)


def _check_readable(scores: Mapping[Key, Score]) -> Check:
    """Check that few replies of the judge gave no score."""
    lost = [(key, s) for key, s in scores.items() if judged_value(s) is None]
    share = len(lost) / len(scores)
    summary = f"{share:.0%} of the replies gave no score; allowed: {MAX_UNREADABLE:.0%}"
    cases = tuple(
        {"sent": shorten(text), "got": redact(s.failure or s.imputed)} for (_, text), s in lost
    )
    return Check(
        "readable verdicts", share <= MAX_UNREADABLE, summary, cases[0] if cases else None, cases
    )
