"""The sources of a reward (judges, models, rules): their checks and descriptions.

Every plan imports this module, so code for files, rules and judges is imported where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from ppo_cli.config.mixture import (
    Judge,
    judges_of,
    mixture_line,
    mixture_of,
    model_settings,
    other_judges,
    override_section,
    rule_settings,
    rules_of,
)
from ppo_cli.config.models.known_models import choose_adapter, effective_provider
from ppo_cli.config.schema.reward import PLACES, ApiReward, Code, Composite, ModelReward
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.errors import ConfigError
from ppo_cli.plugins import entry_points
from ppo_cli.records import Prompt, Rollout
from ppo_cli.secrets.redact import redact_url


def file_checks(settings: RewardSettings) -> Iterator[Callable[[], object]]:
    """Yield checks that raise RewardError for a missing file, rule or price."""
    # Rules and functions first: their checks are the cheapest.
    for rule in rules_of(settings):
        if rule.function is not None:
            yield partial(_check_function, rule.function, rule.function_kwargs)
        else:
            from ppo_cli.rewards.rules import choose_rule

            yield partial(choose_rule, rule)
    if settings.rule_place:
        from ppo_cli.rewards.rules import check_places

        built_in = [rule for rule in rules_of(settings) if rule.function is None]
        yield partial(check_places, built_in)
    # Judges: the prompt, the criteria, the prices, and the labelled responses of a monitor.
    for judge in judges_of(settings):
        from ppo_cli.rewards.judge.prompt import load_template, rubric_reader
        from ppo_cli.rewards.judge.splitting import load_split

        for api in asked_judges(judge):
            yield partial(load_template, api)
            yield partial(rubric_reader, api)
            if api.place not in (None, *PLACES):
                yield partial(load_split, api.place)
        yield partial(_check_prices, judge.settings)
        if judge.settings.monitor.labels is not None:
            yield partial(_check_held_out, judge.settings, judge.settings.monitor.labels)


def read_labelled_rollouts(settings: RewardSettings) -> dict[str, list[tuple[Rollout, float]]]:
    """Return the labelled responses that judges score again during a run, by file."""
    files = {judge.settings.monitor.labels for judge in judges_of(settings)} - {None}
    if not files:
        return {}
    from ppo_cli.scoring.rows import read_held_out

    return {str(file): read_held_out(str(file)) for file in files}


def row_checks(
    settings: RewardSettings, prompts: Sequence[Prompt], *, all_known: bool
) -> Iterator[Callable[[], object]]:
    """Yield checks that raise RewardError for rows that lack columns the reward needs.

    With `all_known` the prompts are all rows; otherwise other rows may have what these lack.
    """
    # Rules chosen by data_source need one for each source; a named rule needs its columns.
    for rules in rules_of(settings):
        from ppo_cli.rewards.rules import RULES, check_prompts, check_sources, get_rule

        if rules.function is None and rules.rule is None:
            yield partial(check_sources, {prompt.data_source for prompt in prompts})
        if rules.function is None and all_known and (rules.rule is None or rules.rule in RULES):
            rule = None if rules.rule is None else get_rule(rules.rule)
            yield partial(check_prompts, rule, rules.function_kwargs, prompts)
    for judge in judges_of(settings):
        for api in asked_judges(judge):
            yield partial(_check_template, api, prompts)


def sandbox_checks(
    settings: RewardSettings, prompts: Sequence[Prompt]
) -> Iterator[Callable[[], object]]:
    """Yield checks that raise RewardError if responses are run as code, and no sandbox works."""
    for rules in rules_of(settings):
        from ppo_cli.rewards.rules import RULES, runs_code

        bundled = rules.function is None and (rules.rule is None or rules.rule in RULES)
        if bundled and runs_code(RULES[rules.rule] if rules.rule else None, prompts):
            yield partial(_try_sandbox, rules.code)


def asked_judges(judge: Judge) -> Iterator[ApiReward]:
    """Yield the settings of a judge, and of the others that its reward asks."""
    yield judge.settings
    yield from other_judges(judge.settings)


def _try_sandbox(settings: Code) -> None:
    """Raise RewardError if no sandbox for the responses' code works on this machine."""
    from ppo_cli.rewards.code.sandboxes import choose_sandbox

    choose_sandbox(settings).close()


def _check_prices(settings: ApiReward) -> None:
    """Raise RewardError if a budget needs a price that is unknown."""
    from ppo_cli.rewards.judge.costs import OTHER, build_ledger, share_ledger
    from ppo_cli.rewards.judge.providers import monitor_settings

    # Building the ledger checks the prices; the second judge needs a price too.
    ledger = build_ledger(settings)
    if settings.monitor.model is not None:
        share_ledger(ledger, monitor_settings(settings))
    for other in other_judges(settings):
        share_ledger(ledger, other, OTHER)


def _check_held_out(settings: ApiReward, file: str) -> None:
    from ppo_cli.scoring.rows import read_held_out

    _check_template(settings, [rollout.prompt for rollout, _ in read_held_out(file)])


def _check_template(settings: ApiReward, prompts: Sequence[Prompt]) -> None:
    from ppo_cli.rewards.judge import prompt as judge

    judge.check_rows(settings, judge.load_template(settings), prompts)


def sources_without_rule(sources: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the values of data_source for which there is no rule, and the names of all rules."""
    from ppo_cli.rewards.rules import RULES, find_rule

    return sorted(source for source in sources if find_rule(source) is None), list(RULES)


def _check_function(spec: str, kwargs: Mapping[str, Any]) -> None:
    from ppo_cli.rewards.function import check_source, find_function

    path, name, module = find_function(spec)
    check_source(path, name, kwargs, module)


def reward_kind(settings: RewardSettings) -> str:
    """The kind of a reward: mixture, judge, model or rule."""
    if mixture_of(settings):
        return "mixture"
    if settings.api.enable:
        return "judge"
    return "model" if settings.model.path is not None else "rule"


def override_all(
    settings: RewardSettings, kind: Literal["judge", "model"], values: Mapping[str, Any]
) -> RewardSettings:
    """Return the reward with `values` set in every judge or model, in mixture parts too."""
    # The settings of a mixture's parts inherit from these.
    section = "api" if kind == "judge" else kind
    update: dict[str, Any] = {section: override_section(getattr(settings, section), values)}
    # The parts are written again as overrides, since a part is resolved from its own settings.
    if parts := mixture_of(settings):
        overrides = {p.name: p.model_dump(exclude={"name"}, exclude_unset=True) for p in parts}
        # A part inherits what it does not set: remove its values, and the new ones apply.
        for part in overrides.values():
            if part.get(kind):
                part[kind] = {k: v for k, v in part[kind].items() if k not in values}
        update |= {"parts": (), "composite": Composite(enable=True, parts=overrides)}
    return settings.model_copy(update=update)


def use_batch_api(settings: RewardSettings, hours: float) -> RewardSettings:
    """Return the reward with judges that use their providers' batch APIs.

    Raises ConfigError if a judge, its provider or a setting does not support that.
    """
    from ppo_cli.rewards.judge.providers import provider_class

    # Collect all problems, so that one error lists them.
    judges, problems = judges_of(settings), []
    if not judges:
        problems.append("--batch needs a judge behind an API; this reward has none.")
    # Each judge needs a provider with a batch API, a mode other than decision, and a cache.
    for judge in judges:
        api = judge.settings
        kind = effective_provider(api.type, os.environ)
        batches = provider_class(kind).batches
        if not batches:
            problems.append(f"--batch: {judge.name}: ppo-cli has no batch API for {kind}.")
        elif batches not in entry_points("batches"):
            problems.append(
                f"--batch: {judge.name}: the batch API of {kind} is in the plug-in "
                "ppo_cli.extras.lab, which is not installed here."
            )
        if api.mode == "decision":
            problems.append(f"--batch: {judge.name}: it does not support --rm_mode decision.")
        if api.cascade.model is not None or api.panel.judges:
            flag = "--rm_panel" if api.panel.judges else "--rm_cascade"
            problems.append(f"--batch: {judge.name}: it does not support {flag}.")
        if (api.cache or "").strip().lower() == "off":
            problems.append(
                f"--batch: {judge.name}: its jobs are stored next to the cache; set --rm_cache."
            )
    if problems:
        raise ConfigError(problems)
    return override_all(settings, "judge", {"batch_wait": 3600.0 * hours})


def describe_reward(settings: RewardSettings) -> str:
    """Describe a reward in one line: the mixture and the source of each part."""
    parts = mixture_of(settings)
    if not parts:
        return _describe_source(reward_kind(settings), settings.api, settings.model, settings)
    # Name what is behind each part: judge and prompt, model and adapter, rule or function.
    judges = {judge.part: judge.settings for judge in judges_of(settings)}
    behind = "; ".join(
        f"{part.name}: "
        + _describe_source(
            part.kind,
            judges.get(part.name, settings.api),
            model_settings(settings, part) if part.kind == "model" else settings.model,
            rule_settings(settings, part) if part.kind == "rule" else settings,
        )
        for part in parts
    )
    return f"{mixture_line(parts)} ({behind})"


def _describe_source(kind: str, api: ApiReward, model: ModelReward, rule: RewardSettings) -> str:
    """Return in a few words what scores: judge, model, function or rule."""
    if kind == "judge":
        from ppo_cli.rewards.judge.prompt import load_template

        template = load_template(api)
        return f"judge {api.model} with prompt {template.name} {template.version}".rstrip()
    if kind == "model":
        path = str(model.path)
        adapter = choose_adapter(path, model.adapter).adapter
        return f"reward model {redact_url(path)}, read as {adapter}"
    if rule.function:
        return f"function {rule.function}"
    return f"rule {rule.rule}" if rule.rule else "the rules chosen by data_source"
