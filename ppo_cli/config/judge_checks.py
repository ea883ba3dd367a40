"""What a judge's settings must agree on, what it cannot start without, what may surprise."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from ppo_cli.config.clash import Clash
from ppo_cli.config.judge_models import EXAMPLES, KEY_VARIABLES, retirement
from ppo_cli.config.rewarding import ApiReward, Monitor
from ppo_cli.config.schema import Config
from ppo_cli.redact import redact

_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_SCALE = re.compile(r"\s*(-?\d{1,6})\s*(?:-|–|—|~|:|to|\.\.\.?)\s*(-?\d{1,6})\s*")
_MOST_LEVELS = 1001


def judge_clashes(config: Config) -> Iterator[Clash]:
    """Return every clash between a judge's settings; none while no judge scores."""
    if not config.reward.api.enable:
        return
    yield from _one_scorer(config)
    yield from _model(config.reward.api)
    yield from _prices(config.reward.api)
    yield from _scale(config.reward.api)
    yield from _decision(config.reward.api)
    yield from _ends("reward.api", config.reward.api)
    if config.reward.api.monitor.model is not None:
        yield from _ends("reward.api.monitor", config.reward.api.monitor)


def missing_keys(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Return one sentence for each judge whose key is not in the environment."""
    api = config.reward.api
    if not api.enable:
        return []
    said = [_missing_key("the judge", "--rm_key_env NAME", api, environ)]
    if api.monitor.model is not None:
        where = "reward.api.monitor.key_env=NAME"
        said.append(_missing_key("the monitoring judge", where, api.monitor, environ))
    return [sentence for sentence in said if sentence]


def judge_remarks(config: Config, today: datetime.date | None = None) -> list[str]:
    """Return what does not stop a run with a judge, but may surprise."""
    api = config.reward.api
    if not api.enable:
        return []
    day = today or datetime.date.today()
    said = [_retiring(one, day) for one in (api, api.monitor)]
    if api.votes > 1 and api.temperature == 0:
        said.append(
            f"{api.votes} votes at temperature 0 will hardly differ; leave --rm_temperature out "
            "(then it is 0.7), or use --rm_votes 1."
        )
    return [sentence for sentence in said if sentence]


def scale_ends(text: str) -> tuple[int, int]:
    """Return the ends of a scale such as `1-10`; ValueError says what is wrong."""
    found = _SCALE.fullmatch(text)
    if found is None:
        raise ValueError(f"'{text}' is not LOW-HIGH in whole numbers, such as 1-10")
    low, high = int(found[1]), int(found[2])
    if low >= high:
        raise ValueError(f"'{text}' does not rise; write the lower number first, such as 1-10")
    if high - low >= _MOST_LEVELS:
        raise ValueError(f"'{text}' has more than {_MOST_LEVELS} levels; take a shorter one")
    return low, high


def _one_scorer(config: Config) -> Iterator[Clash]:
    reward = config.reward
    if reward.parts:
        return
    for name in ("function", "rule"):
        if getattr(reward, name) is not None:
            yield Clash(
                ("reward.api.enable", f"reward.{name}"),
                f"reward.api.enable (the LLM judge) and reward.{name} each say how every row is "
                "scored. Keep one; mixtures come with --reward.",
            )


def _model(api: ApiReward) -> Iterator[Clash]:
    if not (api.model or "").strip():
        yield Clash(
            ("reward.api.enable", "reward.api.model"),
            f"the judge has no model: name one of {api.type}'s with --rm_model, such as "
            f"--rm_model {EXAMPLES[api.type]} (reward.api.model).",
        )


def _prices(api: ApiReward) -> Iterator[Clash]:
    given = {"input": api.price_input, "output": api.price_output}
    absent = [name for name, price in given.items() if price is None]
    if len(absent) == 1:
        yield Clash(
            ("reward.api.price_input", "reward.api.price_output"),
            f"one price is given, and --rm_price_{absent[0]} is missing; give both, in US "
            "dollars for a million tokens.",
        )


def _scale(api: ApiReward) -> Iterator[Clash]:
    try:
        scale_ends(api.scale or "1-10")
    except ValueError as error:
        yield Clash(("reward.api.scale",), f"reward.api.scale (--rm_scale): {error}.")


def _decision(api: ApiReward) -> Iterator[Clash]:
    if api.mode == "decision" and api.type == "claude":
        yield Clash(
            ("reward.api.mode", "reward.api.type"),
            "claude has no decision endpoint; use --rm_mode text, or the decision model of "
            "openai, gemini or dashscope.",
        )


def _ends(key: str, judge: ApiReward | Monitor) -> Iterator[Clash]:
    """Check what is the same for a judge and its monitor: address and name of the key."""
    if judge.base_url is not None and not _is_address(judge.base_url):
        yield Clash(
            (f"{key}.base_url",),
            f"{key}.base_url '{redact(judge.base_url)}' is no address; write it with http:// or "
            "https://, such as http://localhost:8000/v1.",
        )
    name = judge.key_env
    if name is not None and (not _VARIABLE.fullmatch(name) or redact(name) != name):
        usual = KEY_VARIABLES[judge.type][0]
        yield Clash(
            (f"{key}.key_env",),
            f"{key}.key_env takes the name of a variable, such as {usual}, not the key itself.",
        )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url.strip())
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return False


def _missing_key(
    who: str, mend: str, judge: ApiReward | Monitor, environ: Mapping[str, str]
) -> str:
    if judge.key_env is not None:
        if environ.get(judge.key_env, "").strip():
            return ""
        return f"There is no key for {who}: set {judge.key_env}, as key_env says."
    usual = KEY_VARIABLES[judge.type]
    own_server = judge.base_url or environ.get("OPENAI_BASE_URL", "").strip()
    keyless = judge.type == "openai" and bool(own_server)
    if keyless or any(environ.get(name, "").strip() for name in usual):
        return ""
    return (
        f"There is no key for {who} ({judge.type}): set {' or '.join(usual)}, or name another "
        f"variable with {mend}."
    )


def _retiring(judge: ApiReward | Monitor, today: datetime.date) -> str:
    """Remark on a model that its provider shuts down; behind an own address names are free."""
    if judge.model is None or judge.base_url is not None:
        return ""
    day = retirement(judge.type, judge.model)
    if day is None:
        return ""
    when = f"{day.day} {day:%b %Y}"
    if day <= today:
        return (
            f"{judge.type} has shut {judge.model} down on {when}; if it does not answer, name "
            f"another model, such as {EXAMPLES[judge.type]}."
        )
    return (
        f"{judge.type} shuts {judge.model} down on {when}; a run that goes on after that day "
        f"needs another model, such as {EXAMPLES[judge.type]}."
    )
