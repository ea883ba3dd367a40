"""Checks of judges and mixtures: clashes, missing keys, remarks."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from ppo_cli.algo.estimators import ESTIMATORS
from ppo_cli.config.mixture import (
    PARTS,
    SCALINGS,
    Judge,
    Mixture,
    find_watched,
    has_mixture,
    judges_of,
    model_settings,
    other_judge,
    other_judges,
    read_mixture,
)
from ppo_cli.config.models.known_models import (
    JUDGES,
    effective_provider,
    missing_sdk_settings,
    shutdown_date,
)
from ppo_cli.config.schema.finding import Finding
from ppo_cli.config.schema.keys import find_conflicts
from ppo_cli.config.schema.reward import ApiReward, Monitor, Reward
from ppo_cli.errors import ConfigError, did_you_mean
from ppo_cli.planning.findings.scene import Scene

# Limits that each of several judges gets in full.
LIMITS = ("budget_usd", "budget_tokens", "max_rpm", "max_tpm")
# Settings that may define the parts of a mixture.
MIXTURE = ("reward.parts", "reward.composite.parts", "reward.composite.weights")


def check_judges(scene: Scene) -> Iterator[Finding]:
    """Return every clash of the judges that score; a part's judge has the run's settings too."""
    for judge in judges_of(scene.config.reward):
        for clash in find_conflicts(judge.settings, f"{judge.key}."):
            yield Finding(judge.keys(*clash.keys), clash.text)
        if not (api := judge.settings).model or not api.model.strip():
            keys = judge.keys("enable", "model")
            yield Finding(
                keys if judge.part is None else (*keys, "reward.api.type", *MIXTURE),
                f"{judge.name} has no model: name one of {api.type}'s with --rm_model, such as "
                f"--rm_model {JUDGES[api.type].example} ({judge.key}.model).",
            )
        yield from _check_others(judge)
        yield from _check_monitor(judge)
        if judge.settings.within_group:
            yield from _check_groups(
                judge, scene.config.rollout.n, scene.config.algorithm.adv_estimator
            )


def missing_keys(reward: Reward, environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each judge whose key is not in the environment."""
    problems = [_missing_key(*judge, environ) for judge in _required_judges(reward)]
    return [sentence for sentence in dict.fromkeys(problems) if sentence]


def _required_judges(reward: Reward) -> Iterator[tuple[str, str, ApiReward | Monitor]]:
    """Yield each judge that a run must reach: its name, how to name its key, its settings."""
    for judge in judges_of(reward):
        of_part, monitor = judge.key != "reward.api", judge.settings.monitor
        mend = f"{judge.key}.key_env=NAME" if of_part else "--rm_key_env NAME"
        yield judge.name, mend, judge.settings
        if monitor.model is not None and monitor.required:
            yield "the monitoring judge", f"{judge.key}.monitor.key_env=NAME", monitor
        for other in _find_others(judge):
            mend = f"{judge.key}.judges.NAME.key_env=NAME"
            yield f"the judge {other.model}", mend, other


def missing_for_sdks(reward: Reward, environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable or package, keys aside, that a judge's SDK lacks."""
    problems: list[str] = []
    for _, _, judge in _required_judges(reward):
        kind = effective_provider(judge.type, environ)
        problems += missing_sdk_settings(
            kind, environ, base_url=judge.base_url, key_env=judge.key_env
        )
    return list(dict.fromkeys(problems))


def judge_remarks(
    reward: Reward, estimator: str, *, plays: bool, today: datetime.date | None = None
) -> list[str]:
    """Return remarks on judges: default models, shutdowns, votes, limits for each of several.

    `plays`: responses are episodes.
    """
    day = today or datetime.date.today()
    remarks: list[str] = []
    if reward.rule_place and not ESTIMATORS[estimator].uses_places:
        remarks.append(
            f"{estimator} adds the rewards of a response up, so where --rule_place puts them makes "
            "no difference; use --adv_estimator gae, or piece_group with --rollout_n above 1."
        )
    for judge in judges_of(reward):
        api = judge.settings
        # A part of a mixture took the default model without a word.
        unnamed = judge.part is not None and not reward.api.model
        if unnamed and api.model == JUDGES[api.type].default:
            who = judge.name.capitalize()
            remarks.append(f"{who} is {api.model} ({api.type}); --rm_model names another.")
        named: list[ApiReward | Monitor] = [api, api.monitor, *_find_others(judge)]
        remarks += (_shutdown_remark(settings, day) for settings in named)
        if api.place and not ESTIMATORS[estimator].uses_places:
            remarks.append(
                f"{estimator} adds the rewards of a response up, so where "
                "--rm_place puts them makes no difference; leave --adv_estimator out."
            )
        episodes = plays and api.scope == "episode"
        if api.place not in (None, "criterion") and episodes != (api.place == "turn"):
            read = "one turn; use sentence, line or step."
            if episodes:
                read = "whole episodes; use turn, or --rm_scope turn."
            remarks.append(f"--rm_place {api.place} gives no places: the judge reads {read}")
        if api.votes > 1 and api.temperature == 0:
            remarks.append(
                f"{api.votes} votes at temperature 0 will hardly differ; leave --rm_temperature "
                "out (then it is 0.7), or use --rm_votes 1."
            )
    # Limits are for each judge, which matters with several.
    count, run = len(judges_of(reward)), reward.api
    limits = [f"reward.api.{name}" for name in LIMITS if getattr(run, name) is not None]
    if count > 1 and limits:
        remarks.append(
            f"{' and '.join(limits)} hold for each of {count} judges; set others below "
            "reward.composite.parts.NAME.judge."
        )
    return [sentence for sentence in dict.fromkeys(remarks) if sentence]


def scale_labels(values: Sequence[float], low: float, high: float) -> list[float]:
    """Bring labels to [0, 1], where scores are: thumbs and shares are there already.

    Others are on the judge's scale, or else go from the lowest to the highest of them.
    """
    if all(0 <= value <= 1 for value in values):
        return list(values)
    if not all(low <= value <= high for value in values):
        low, high = min(values), max(values)
    return [(value - low) / ((high - low) or 1) for value in values]


def _find_others(judge: Judge) -> list[ApiReward]:
    """Return the further judges of a cascade or a panel; none if one is wrong."""
    try:
        return other_judges(judge.settings)
    except ConfigError:
        return []


def _check_others(judge: Judge) -> Iterator[Finding]:
    """The further judges of a cascade or a panel must be usable, and all different."""
    api, cascade, panel = judge.settings, judge.settings.cascade, judge.settings.panel
    keys = judge.keys("panel.judges" if panel.judges else "cascade.model", "judges")
    names = [*([cascade.model] if cascade.model else []), *panel.judges]
    itself = api.model_copy(update={"judges": {"itself": {}}})
    different = [other_judge(itself, "itself")] if names and (api.model or "").strip() else []
    for name in names:
        if "," in name:
            yield Finding(keys, f"{name!r} is not one model; name one at a time, such as "
                        "--rm_cascade CHEAPER --rm_model MODEL.")  # fmt: skip
            continue
        try:
            other = other_judge(api, name)
        except ConfigError as error:
            yield Finding(keys, str(error))
            continue
        for clash in find_conflicts(other, f"{judge.key}."):
            yield Finding(keys, f"the judge {name}: {clash.text}")
        if other.type == "local":
            yield Finding(
                keys,
                f"a run does not start further judges ({name}); serve it yourself, and set type: "
                f"openai, model and base_url in {judge.key}.judges.",
            )
        if other in different or name == "judge":
            text = f"{name} is asked already as the judge itself or as another one"
            yield Finding(keys, f"{text}; name a different judge, or leave it out.")
        different.append(other)
        if cascade.spread is not None and not other.has_spread:
            yield Finding(
                judge.keys("cascade.spread", "votes", "mode"),
                f"{other.model} gives one written score, which has no spread; use "
                "--rm_cascade_band 0.2-0.8, or set its votes to 3 (--rm_votes, or "
                f"{judge.key}.judges).",
            )
    if panel.judges and (panel.least or 1) > 1 + len(panel.judges):
        yield Finding(
            judge.keys("panel.least", "panel.judges"),
            f"--rm_panel_least {panel.least} is more than the {1 + len(panel.judges)} judges of "
            "the panel; lower it, or name more with --rm_panel.",
        )


def _check_monitor(judge: Judge) -> Iterator[Finding]:
    """The second judge must not be one that scores: it would make the same mistakes."""
    monitor = judge.settings.monitor
    for api in (judge.settings, *_find_others(judge)):
        at_same_address = monitor.base_url is None or monitor.base_url == api.base_url
        same = (monitor.type, monitor.model) == (api.type, api.model)
        if monitor.model and same and at_same_address:
            yield Finding(
                (f"{judge.key}.monitor.model", *judge.keys("model")),
                f"the second judge is {api.model}, which scores already: both make the same "
                "mistakes. Name a model of another family with --rm_monitor_model, or leave it "
                "out.",
            )


def _check_groups(judge: Judge, n: int, kind: str) -> Iterator[Finding]:
    """Scores within the `n` responses to a prompt need several, and an estimator of that kind."""
    api = judge.settings
    if n < 2:
        yield Finding(
            (*judge.keys("mode", "compare"), "rollout.n"),
            f"--rm_compare {api.compare} compares the responses to a prompt with each other, but "
            f"rollout.n is {n}. Use --rollout_n 4, or --rm_compare ground_truth.",
        )
    if not ESTIMATORS[kind].grouped:
        usable = ", ".join(name for name, estimator in ESTIMATORS.items() if estimator.grouped)
        yield Finding(
            (*judge.keys("mode", "compare"), "algorithm.adv_estimator"),
            f"--rm_compare {api.compare} gives scores within the responses to one prompt, which "
            f"{kind} would compare between prompts. Use --adv_estimator with one of {usable}, or "
            "--rm_compare ground_truth.",
        )
    # A chain of pairs links all responses; each pair is judged in both orders.
    least = 2 * api.votes * (n - 1)
    if api.compare == "pairs" and (api.compare_calls or least) < least:
        yield Finding(
            (*judge.keys("compare_calls", "votes"), "rollout.n"),
            f"{judge.key}.compare_calls is {api.compare_calls}: to link {n} responses in both "
            f"orders takes {least} calls (2 x votes x {n - 1}).",
        )


def _missing_key(
    who: str, mend: str, judge: ApiReward | Monitor, environ: Mapping[str, str]
) -> str:
    """Return a sentence if no variable holds the API key of a judge that needs one, else ""."""
    if judge.key_env is not None:
        if environ.get(judge.key_env, "").strip():
            return ""
        return f"There is no key for {who}: set {judge.key_env}, as key_env says."
    provider = JUDGES[effective_provider(judge.type, environ)]
    # A server at another address may work without a key.
    moved = any(environ.get(name, "").strip() for name in provider.url_variables)
    keyless = provider.keyless and (judge.base_url or moved or not provider.url)
    if keyless or any(environ.get(name, "").strip() for name in provider.keys):
        return ""
    return (
        f"There is no key for {who} ({judge.type}): set {' or '.join(provider.keys)}, or name "
        f"another variable with {mend}."
    )


def _shutdown_remark(judge: ApiReward | Monitor, today: datetime.date) -> str:
    """Remark on a model that its provider shuts down; at a separate address, names are free."""
    if judge.model is None or judge.base_url is not None:
        return ""
    day = shutdown_date(judge.type, judge.model)
    if day is None:
        return ""
    # A day without a leading zero.
    what = f"{judge.model} down on {day.day} {day:%b %Y}"
    text = f"{judge.type} shuts {what}; a run that goes on after that day needs"
    if day <= today:
        text = f"{judge.type} has shut {what}; if it does not answer, name"
    return f"{text} another model, such as {JUDGES[judge.type].example}."


def check_mixture(scene: Scene) -> Iterator[Finding]:
    """Return everything that is wrong with a mixture, whose parts are read from three settings."""
    reward = scene.config.reward
    if reward.composite.enable and not has_mixture(reward):
        yield Finding(
            ("reward.composite.enable",),
            "reward.composite.enable is on, but the mixture has no parts: add --reward "
            "judge:0.7 --reward rule:0.3, or composite weights.",
        )
    # Problems from reading the parts, then of each part, then of all together.
    mixture = read_mixture(reward)
    yield from mixture.clashes
    for part in mixture.parts:
        for clash in find_conflicts(part, f"{PARTS}.{part.name}."):
            keys = (f"{PARTS}.{part.name}.{key}" for key in clash.keys)
            yield Finding(tuple(keys), clash.text)
        n = scene.config.rollout.n
        if SCALINGS[part.scaling].grouped and n < 2:
            yield Finding(
                (f"{PARTS}.{part.name}.scaling", "rollout.n"),
                f"part {part.name} is scaled by {part.scaling}, which compares several responses "
                f"to a prompt, but rollout.n is {n}. Use --rollout_n 4, or scaling zscore.",
            )
        if part.kind == "model" and model_settings(reward, part).path is None:
            yield Finding(
                mixture.set_by[part.name],
                f"part {part.name} is a reward model, and none is named: --reward_model PATH, or "
                f"{PARTS}.{part.name}.model.path.",
            )
        if part.kind == "environment" and scene.config.environment.path is None:
            yield Finding(
                mixture.set_by[part.name],
                f"part {part.name} is the reward of an environment, and none is named: add "
                "--environment FILE.py:NAME, or leave the part out.",
            )
    yield from _check_gates(mixture)
    # A weight of 0 is for parts that another one waits for, and for the second opinion.
    gates = {part.gate.part for part in mixture.parts if part.gate is not None}
    watched = find_watched(reward)
    opinions = {watched.rule} if watched else set()
    for part in mixture.parts:
        if part.weight == 0 and part.name not in gates | opinions:
            yield Finding(
                mixture.set_by[part.name],
                f"part {part.name} has the weight 0 and would be scored without counting; leave it "
                "out, or let another part wait for it with only_if. As a second opinion one rule "
                "may weigh nothing, where a judge, reward model or function pays most.",
            )
    kinds = {part.kind for part in mixture.parts}
    if reward.api.enable and mixture.parts and not mixture.clashes and "judge" not in kinds:
        yield Finding(
            ("reward.api.enable",),
            "a judge is on (reward.api.enable), but the mixture has no part of kind judge, so it "
            "would score nothing; add --reward judge:0.5, or switch it off: --no_use_api_reward.",
        )


def mixture_remarks(reward: Reward) -> list[str]:
    """Return remarks on a mixture: raw scores of a reward model."""
    parts = read_mixture(reward).parts
    # A raw reward-model score may be hundreds of times larger than a rule's.
    raw = [p.name for p in parts if p.kind == "model" and p.scaling == "none" and p.clip is None]
    remarks = []
    if raw and len(parts) > 1:
        remarks.append(
            f"{', '.join(raw)}: scores of a reward model have no fixed scale, and with scaling "
            "none they may dominate the other parts; leave the scaling out (zscore), or use affine "
            "or sigmoid."
        )
    return remarks


def _check_gates(mixture: Mixture) -> Iterator[Finding]:
    """Each only_if must name another part, and no two parts may wait for each other."""
    names = list(mixture.set_by)
    # Part -> the part that its gate reads; a cycle would never open.
    opens: dict[str, str] = {}
    for part in mixture.parts:
        key, condition = f"{PARTS}.{part.name}.only_if", part.gate
        if condition is None:
            continue
        others = [name for name in names if name != part.name]
        if condition.part in others:
            opens[part.name] = condition.part
            continue
        problem = "a part cannot wait for its own score; name another one."
        if condition.part != part.name:
            near = did_you_mean(condition.part, others)
            choices = ", ".join(others) or "no other"
            problem = f"there is no part '{condition.part}'.{near} Parts: {choices}."
        yield Finding((key,), f"{key}: {problem}")
    try:
        TopologicalSorter({name: [other] for name, other in opens.items()}).prepare()
    except CycleError as error:
        circle = error.args[1][::-1]
        yield Finding(
            tuple(f"{PARTS}.{name}.only_if" for name in circle[:-1]),
            f"the gates form a cycle: {' waits for '.join(circle)}; take one only_if out.",
        )
