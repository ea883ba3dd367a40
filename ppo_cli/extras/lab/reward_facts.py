"""What audits and calibrations ask of a reward's settings: its judges, scale and random parts."""

from __future__ import annotations

from ppo_cli.config.mixture import Judge, judges_of, mixture_of, models_of, rule_settings
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.scoring.sources import asked_judges, reward_kind


def single_judge(settings: RewardSettings) -> Judge | None:
    """The judge of a reward with exactly one judge, else None."""
    judges = judges_of(settings)
    return judges[0] if len(judges) == 1 else None


def has_open_scale(settings: RewardSettings) -> bool:
    """Whether scores may lie outside 0 to 1, where models and scalings put them.

    A rubric's scores do not, but an empty response earns credit there: it avoids all faults.
    """
    kind = reward_kind(settings)
    return kind in ("mixture", "model") or (kind == "judge" and settings.api.rubric is not None)


def random_sources(settings: RewardSettings) -> dict[str, RewardSettings]:
    """The parts that may give other scores when repeated, each as a separate reward.

    Judges and functions may; reward models and built-in rules are deterministic.
    """
    # Without a mixture there is one source, named after the kind of the reward.
    parts = mixture_of(settings)
    if not parts:
        kind = reward_kind(settings)
        steady = kind == "model" or (kind == "rule" and settings.function is None)
        return {} if steady else {kind: settings}
    judges = {judge.part: judge.settings for judge in judges_of(settings)}
    sources: dict[str, RewardSettings] = {}
    for part in parts:
        if part.name in judges:
            sources[part.name] = RewardSettings(api=judges[part.name])
        elif part.kind == "rule" and rule_settings(settings, part).function is not None:
            sources[part.name] = rule_settings(settings, part)
    return sources


def verdicts_per_response(settings: RewardSettings) -> int:
    """The most verdicts that one response takes: each vote of each judge, and each other part."""
    # Each part that is not a judge counts as one verdict.
    votes = sum(api.max_votes for judge in judges_of(settings) for api in asked_judges(judge))
    others = sum(part.kind != "judge" for part in mixture_of(settings))
    return max(1, votes + others)


def criteria_calls_note(settings: RewardSettings) -> str:
    """A sentence for forecasts when a verdict takes several calls, else an empty text."""
    each = [judge.settings for judge in judges_of(settings) if judge.settings.rubric is not None]
    several = any(api.rubric_calls == "each" for api in each)
    return " Each criterion is a separate call." if several else ""


def default_items(settings: RewardSettings) -> str:
    """The name of the bundled tasks for a reward: those of its judge's prompt, else math.

    Rules chosen by data_source only have a rule for math.
    """
    parts = [rule_settings(settings, p) for p in mixture_of(settings) if p.kind == "rule"]
    if any(rule.function is None and rule.rule is None for rule in parts):
        return "math"
    # Judges with different presets have no common set of tasks.
    presets = {judge.settings.prompt_preset for judge in judges_of(settings)}
    if len(presets) == 1:
        return presets.pop()
    return "dialogue" if models_of(settings) and not presets and not parts else "math"
