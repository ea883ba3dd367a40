"""Settings of the reward that would change nothing in a run: the rows of the table in effects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ppo_cli.config.clash import Idle
from ppo_cli.config.mixture import mixture_of
from ppo_cli.config.mixture_reading import has_mixture
from ppo_cli.config.reward_models import is_url
from ppo_cli.config.rewarding import ApiReward
from ppo_cli.config.schema import Config
from ppo_cli.config.scorers import judges_of, models_of, rules_of


def _every_judge(true: Callable[[ApiReward], bool]) -> Callable[[Config], bool]:
    """Tell whether something is true of all judges, and there are some."""

    def when(config: Config) -> bool:
        judges = judges_of(config.reward)
        return bool(judges) and all(true(judge.settings) for judge in judges)

    return when


def _every_model(served: bool) -> Callable[[Config], bool]:
    """Tell whether all reward models are served, or all are on this machine."""

    def when(config: Config) -> bool:
        models = models_of(config.reward)
        return bool(models) and all(is_url(model.settings.path or "") is served for model in models)

    return when


def _own_prompt(api: ApiReward) -> bool:
    return api.prompt_file is not None or api.scoring_prompt is not None


def _own_prices(api: ApiReward) -> bool:
    return api.price_input is not None and api.price_output is not None


def _all_paths_own(config: Config) -> bool:
    """Tell whether a mixture never uses the run's reward model."""
    reward = config.reward
    parts = mixture_of(reward)
    return bool(parts) and not any(p.kind == "model" and "path" not in p.model for p in parts)


def _all_rules_own(config: Config) -> bool:
    """Tell whether a mixture never uses the run's rule or function."""
    parts = [p for p in mixture_of(config.reward) if p.kind == "rule"]
    own = all(p.rule is not None or p.function is not None for p in parts)
    return has_mixture(config.reward) and own


def _no_code(config: Config) -> bool:
    """Tell whether surely no rule runs code; a rule chosen by data_source may."""
    rules = rules_of(config.reward)
    return all(r.function is not None or r.rule not in (None, "code") for r in rules)


def _mixture_off(config: Config) -> bool:
    return config.reward.composite.enable is False


_JUDGE = Idle(
    lambda c: not judges_of(c.reward),
    "no LLM judge scores this run (reward.api.enable is off); leave it out",
    absent=True,
)
_MODEL = Idle(
    lambda c: not models_of(c.reward),
    "no reward model scores this run; name one with --reward_model, or leave it out",
    absent=True,
)
_MONITOR = Idle(
    _every_judge(lambda api: api.monitor.model is None),
    "no second judge is named; set --rm_monitor_model, or leave it out",
)
_RULES = Idle(
    lambda c: not rules_of(c.reward),
    "rules and functions use it, and none of them scores this run; judges and reward models have "
    "settings under reward.api and reward.model, or leave it out",
)
_DECISION = Idle(
    _every_judge(lambda api: api.mode == "decision"),
    "a decision endpoint writes no text (reward.api.mode decision); leave it out",
)
_OTHER_RULES = Idle(
    _all_rules_own,
    "no part of the mixture is scored by it; add --reward rule:0.5, or leave it out",
    absent=True,
)
_LOCAL = Idle(
    _every_model(served=True),
    "the reward model runs at its server, which has settings of its own; leave it out",
)
_AT_SERVER = Idle(
    _every_model(served=False),
    "only a served reward model (--reward_model http://HOST) uses it; leave it out",
)
_MIXTURE = Idle(
    _mixture_off,
    "the mixture is off (reward.composite.enable false); leave that out, or this",
)

REWARD_EFFECTS: Final[dict[str, Idle]] = {
    "reward.api.*": _JUDGE,
    "reward.api.monitor.*": _MONITOR,
    "reward.api.output": _DECISION,
    "reward.api.temperature": _DECISION,
    "reward.api.max_tokens": _DECISION,
    "reward.api.prompt_preset": Idle(
        _every_judge(_own_prompt),
        "the judge has a prompt of your own (reward.api.prompt_file or scoring_prompt); leave "
        "one of them out",
    ),
    "reward.api.prices": Idle(
        _every_judge(_own_prices),
        "reward.api.price_input and price_output say what a token costs; leave one of them out",
    ),
    "reward.api.hedge_after": Idle(
        _every_judge(lambda api: (api.hedge_after or 0) >= api.timeout),
        "a call has ended by then (reward.api.timeout); set a shorter time, or leave it out",
    ),
    "reward.timeout": _RULES,
    "reward.num_workers": _RULES,
    "reward.function_kwargs": _RULES,
    "reward.function": _OTHER_RULES,
    "reward.rule": _OTHER_RULES,
    "reward.model.path": Idle(
        _all_paths_own,
        "no part of the mixture is scored by it; add --reward model:0.5, or leave it out",
        absent=True,
    ),
    "reward.model.*": _MODEL,
    **dict.fromkeys(
        [f"reward.model.{k}" for k in ("dtype", "device", "offload", "batch_tokens", "outputs")],
        _LOCAL,
    ),
    "reward.model.revision": _LOCAL,
    **dict.fromkeys(
        [f"reward.model.{k}" for k in ("timeout", "concurrency", "request_rows", "outage_wait")],
        _AT_SERVER,
    ),
    "reward.model.model_name": _AT_SERVER,
    "reward.model.key_env": _AT_SERVER,
    "reward.code.*": Idle(
        _no_code,
        "no rule runs code in this run; set --rule code, or leave it out",
    ),
    "reward.parts": _MIXTURE,
    "reward.composite.weights": _MIXTURE,
    "reward.composite.parts": _MIXTURE,
    "reward.shaping.overlong_penalty": Idle(
        lambda c: c.reward.shaping.overlong_buffer is None,
        "the over-long penalty is off; set --overlong_buffer TOKENS, or leave it out",
    ),
    "reward.shaping.repetition_ngram": Idle(
        lambda c: c.reward.shaping.repetition_penalty is None,
        "the repetition penalty is off; set --repetition_penalty, or leave it out",
    ),
}
