"""What a judge's settings must agree on, what it cannot start without, what may surprise."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from ppo_cli.config.keys import Clash
from ppo_cli.config.known_models import JUDGES, retirement
from ppo_cli.config.mixture import Judge, judges_of
from ppo_cli.config.reward_schema import ApiReward, Monitor
from ppo_cli.config.schema import Config
from ppo_cli.redact import redact

VARIABLE = re.compile(r"[A-Za-z_]\w*")
_SCALE = re.compile(r"\s*(-?\d{1,6})\s*(?:-|–|—|~|:|to|\.\.\.?)\s*(-?\d{1,6})\s*")
# Blanks and control characters, which a parser of addresses may pass over in silence.
_NOT_IN_URL = re.compile(r"[\s\x00-\x1f\x7f\\<>\"^`{|}]")
_MOST_LEVELS = 1001
LIMITS = ("budget_usd", "budget_tokens", "max_rpm", "max_tpm")
MIXTURE = ("reward.parts", "reward.composite.parts", "reward.composite.weights")


def judge_clashes(config: Config) -> Iterator[Clash]:
    """Return every clash between a judge's settings; none while no judge scores."""
    for judge in judges_of(config.reward):
        yield from _model(judge)
        yield from _prices(judge)
        yield from _scale(judge)
        yield from _decision(judge)
        yield from _ends(judge.key, "", judge.settings)
        if judge.settings.monitor.model is not None:
            yield from _ends(judge.key, "monitor.", judge.settings.monitor)


def missing_keys(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Return one sentence for each judge whose key is not in the environment."""
    said = []
    for judge in judges_of(config.reward):
        api, own = judge.settings, judge.key != "reward.api"
        mend = f"{judge.key}.key_env=NAME" if own else "--rm_key_env NAME"
        said.append(_missing_key(judge.name, mend, api, environ))
        if api.monitor.model is not None:
            where = f"{judge.key}.monitor.key_env=NAME"
            said.append(_missing_key("the monitoring judge", where, api.monitor, environ))
    return [sentence for sentence in dict.fromkeys(said) if sentence]


def judge_remarks(config: Config, today: datetime.date | None = None) -> list[str]:
    """Return what does not stop a run with a judge, but may surprise."""
    day = today or datetime.date.today()
    said = []
    for judge in judges_of(config.reward):
        api = judge.settings
        said += [_by_default(judge, config), *(_retiring(one, day) for one in (api, api.monitor))]
        if api.votes > 1 and api.temperature == 0:
            said.append(
                f"{api.votes} votes at temperature 0 will hardly differ; leave --rm_temperature "
                "out (then it is 0.7), or use --rm_votes 1."
            )
    said.append(_each(config))
    return [sentence for sentence in dict.fromkeys(said) if sentence]


def _each(config: Config) -> str:
    """Say that limits of money and traffic are each judge's own."""
    api, judges = config.reward.api, judges_of(config.reward)
    given = [f"reward.api.{name}" for name in LIMITS if getattr(api, name) is not None]
    if len(judges) < 2 or not given:
        return ""
    return (
        f"{' and '.join(given)} hold for each of {len(judges)} judges; set others below "
        "reward.composite.parts.NAME.judge."
    )


def _by_default(judge: Judge, config: Config) -> str:
    """Name the judge of a part that names none itself."""
    api = judge.settings
    if judge.part is None or config.reward.api.model or api.model != JUDGES[api.type].default:
        return ""
    return f"{judge.name.capitalize()} is {api.model} ({api.type}); --rm_model names another."


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


def _model(judge: Judge) -> Iterator[Clash]:
    api = judge.settings
    if not (api.model or "").strip():
        keys = judge.keys("enable", "model")
        yield Clash(
            keys if judge.part is None else (*keys, "reward.api.type", *MIXTURE),
            f"{judge.name} has no model: name one of {api.type}'s with --rm_model, such as "
            f"--rm_model {JUDGES[api.type].example} ({judge.key}.model).",
        )


def _prices(judge: Judge) -> Iterator[Clash]:
    given = {"input": judge.settings.price_input, "output": judge.settings.price_output}
    absent = [name for name, price in given.items() if price is None]
    if len(absent) == 1:
        yield Clash(
            judge.keys("price_input", "price_output"),
            f"one price is given, and --rm_price_{absent[0]} is missing; give both, in US "
            f"dollars for a million tokens ({judge.key}.price_input and price_output).",
        )


def _scale(judge: Judge) -> Iterator[Clash]:
    try:
        scale_ends(judge.settings.scale or "1-10")
    except ValueError as error:
        yield Clash(judge.keys("scale"), f"{judge.key}.scale (--rm_scale): {error}.")


def _decision(judge: Judge) -> Iterator[Clash]:
    kind = judge.settings.type
    if judge.settings.mode == "decision" and JUDGES[kind].decides is None:
        yield Clash(
            judge.keys("mode", "type"),
            f"{kind} has no decision endpoint; use --rm_mode text, or the decision model of "
            f"{' or '.join(name for name, api in JUDGES.items() if api.decides)}.",
        )


def _ends(place: str, group: str, judge: ApiReward | Monitor) -> Iterator[Clash]:
    """Check what is the same for a judge and its monitor: address and name of the key."""
    key = f"{place}.{group}"
    if judge.base_url is not None and not is_address(judge.base_url):
        yield Clash(
            (f"{key}base_url", f"reward.api.{group}base_url"),
            f"{key}base_url {redact(judge.base_url)!r} is no address; write it with http:// or "
            "https:// and without blanks, such as http://localhost:8000/v1.",
        )
    name = judge.key_env
    if name is not None and (not VARIABLE.fullmatch(name) or redact(name) != name):
        usual = JUDGES[judge.type].keys[0]
        yield Clash(
            (f"{key}key_env", f"reward.api.{group}key_env"),
            f"{key}key_env takes the name of a variable, such as {usual}, not the key itself.",
        )


def is_address(url: str) -> bool:
    """Tell whether a text is the address of a server: no blanks, a host, a port if a colon."""
    try:
        parts = urlsplit(url.strip())
        whole = bool(parts.hostname) and parts.port != 0 and not parts.netloc.endswith(":")
        return parts.scheme in ("http", "https") and whole and not _NOT_IN_URL.search(url.strip())
    except ValueError:
        return False


def _missing_key(
    who: str, mend: str, judge: ApiReward | Monitor, environ: Mapping[str, str]
) -> str:
    if judge.key_env is not None:
        if environ.get(judge.key_env, "").strip():
            return ""
        return f"There is no key for {who}: set {judge.key_env}, as key_env says."
    known = JUDGES[judge.type]
    moved = any(environ.get(name, "").strip() for name in known.url_variables)
    keyless = known.keyless and (judge.base_url or moved)
    if keyless or any(environ.get(name, "").strip() for name in known.keys):
        return ""
    return (
        f"There is no key for {who} ({judge.type}): set {' or '.join(known.keys)}, or name another "
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
            f"another model, such as {JUDGES[judge.type].example}."
        )
    return (
        f"{judge.type} shuts {judge.model} down on {when}; a run that goes on after that day "
        f"needs another model, such as {JUDGES[judge.type].example}."
    )
