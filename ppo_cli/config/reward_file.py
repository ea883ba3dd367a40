"""The file behind --reward_config: judges, reward models and mixtures in people's own words.

Taken are the schema's tree (`reward:`, `api:`), sections such as `api_reward:`, `reward_model:`
and `composite_reward:`, and flat keys, each under the schema's names, the flags' names or an
alias. A file that sets up a judge turns it on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ppo_cli.config.judge_models import KEY_VARIABLES
from ppo_cli.config.keys import find, table
from ppo_cli.config.rewarding import Reward
from ppo_cli.config.scorers import judges_of, models_of
from ppo_cli.config.values import listed
from ppo_cli.config.yaml_file import Entry, read_yaml
from ppo_cli.errors import ConfigError, did_you_mean

API = "reward.api."
SWITCH = f"{API}enable"
FILE = "reward.config_file"
SECTIONS = ("api", "api_reward", "api_reward_config")
ALIASES = {
    "api_type": "type",
    "provider": "type",
    "model_name": "model",
    "api_base": "base_url",
    "endpoint": "base_url",
    "api_key_env": "key_env",
    "preset": "prompt_preset",
    "prompt": "scoring_prompt",
    "rpm": "max_rpm",
    "tpm": "max_tpm",
    "max_concurrency": "concurrency",
    "num_votes": "votes",
    "enabled": "enable",
}
# Sections beside the judge's: what they stand for, and other words for their settings.
GROUPS = {
    "composite": "composite",
    "composite_reward": "composite",
    "reward_model": "model",
    "shaping": "shaping",
    "reward_shaping": "shaping",
    "code": "code",
    "code_reward": "code",
}
OTHER_WORDS = {
    "composite": {"enabled": "enable"},
    "model": {
        "model_path": "path",
        "name": "path",
        "model": "path",
        "api_key_env": "key_env",
    },
}
EXAMPLES = {
    "composite": "weights: {judge: 0.7, rule: 0.3}",
    "model": "path: DIR",
    "shaping": "overlong_buffer: 64",
    "code": "score: share",
}
# Files that are read where a run starts, once it has a judge or a reward model.
JUDGE_FILE, MODEL_FILE = "api_reward_config.yaml", "reward_model_config.yaml"
MODEL_SWITCH = "reward_model.enable"
_SECRET = re.compile(r"(?:^|_)(?:api_?keys?|key|token|secret|password)$|^authorization$")
_VARIABLE = re.compile(r"\$\{?(?:oc\.env:)?([A-Za-z_]\w*)\}?")


def reward_files_here(reward: Reward, *, named: bool) -> list[str]:
    """Return the reward files in the current folder that concern a reward; `named` takes none."""
    wanted = {JUDGE_FILE: bool(judges_of(reward)), MODEL_FILE: bool(models_of(reward))}
    return [file for file, used in wanted.items() if used and not named and Path(file).is_file()]


def read_reward_file(path: Path, label: str) -> list[Entry]:
    """Return the entries of a reward file under the schema's names; all problems at once."""
    given = read_yaml(path.expanduser(), label, example="api:")
    if not given:
        raise ConfigError(f"{label}: the file holds no setting. Write settings such as 'api:'.")
    problems: list[str] = []
    found: dict[str, Entry] = {}
    rules = any(_plain(e.name) in ("function", "rule", "reward_function") for e in given)
    for entry in given:
        try:
            name = _own_name(entry, given, rules=rules)
        except ValueError as error:
            problems.append(f"{entry.origin}: {error}")
            continue
        if entry.raw == {} and name in ("reward.composite.parts", "reward.composite.weights"):
            example = "weights: {judge: 0.7, rule: 0.3}"
            problems.append(f"{entry.origin}: {entry.name} is empty; write {example}.")
        if earlier := found.get(name):
            line = earlier.origin.rsplit(" ", 1)[-1]
            problems.append(f"{entry.origin}: {name} was set on line {line} already; keep one.")
        found[name] = Entry(name, _value(name, entry), entry.origin)
    if problems:
        raise ConfigError(problems)
    return [*_turned_on(found), *found.values()]


def _turned_on(found: dict[str, Entry]) -> Iterator[Entry]:
    """Switch the judge on where a file sets one up and does not say whether."""
    first = next((e for name, e in found.items() if name.startswith(API)), None)
    if first is not None and SWITCH not in found:
        yield Entry(SWITCH, "true", first.origin)


def _own_name(entry: Entry, given: list[Entry], *, rules: bool) -> str:
    """Return the schema's name of an entry; ValueError says why it has none."""
    parts = entry.name.split(".")
    path = [_plain(part) for part in parts]
    rooted = path[0] == "reward" and len(path) > 1
    if rooted:
        parts, path = parts[1:], path[1:]
    if "function_kwargs" not in path and any(_SECRET.search(part) for part in _words(path)):
        raise ValueError(_no_secrets(entry, given))
    if path[0] in GROUPS and len(path) > 1:
        return _in_group(entry, GROUPS[path[0]], path[1:], parts[1:])
    inside = path[0] in SECTIONS and len(path) > 1
    name = _api_name(path[1:]) if inside else _name(path, parts, rooted=rooted, rules=rules)
    if name is None or (path[0] in ("reward", *GROUPS) and not entry.raw):
        raise ValueError(_unknown(entry, path[1:] if inside else path))
    return name


def _words(path: list[str]) -> list[str]:
    """Return the words of a key that name settings; names of parts are free."""
    in_parts = GROUPS.get(path[0]) == "composite" and path[1:2] in (["parts"], ["weights"])
    return path[3:] if in_parts else path


def _in_group(entry: Entry, group: str, path: list[str], parts: list[str]) -> str:
    """Return the setting of a key inside a section such as `reward_model:`."""
    if group == "model" and path in (["enable"], ["enabled"]):
        return MODEL_SWITCH
    inside = f"reward.{group}."
    leaf = OTHER_WORDS.get(group, {}).get(path[0], path[0])
    name = f"{inside}{'.'.join([leaf, *parts[1:]])}"
    if find(name) is not None and (name in table() or group == "composite"):
        return name
    known = _by_flag(path, inside=inside)
    if known is None:
        raise ValueError(_unknown_in(entry, group, path))
    return known


def _unknown_in(entry: Entry, group: str, path: list[str]) -> str:
    own = [name.rsplit(".", 1)[-1] for name in table() if name.startswith(f"reward.{group}.")]
    near = did_you_mean(path[0], [*own, *OTHER_WORDS.get(group, {})])
    if group == "composite" and not near:
        near = " Parts are named below weights or parts, such as weights: {judge: 0.7}."
    elif not near:
        near = f" Known: {', '.join(own)}."
    return f"there is no setting '{path[0]}' in {entry.name.rsplit('.', 1)[0]}.{near}"


def _plain(word: str) -> str:
    """Read `--RM-Model` as `rm_model`."""
    return word.lower().replace("-", "_").strip("_")


def _name(path: list[str], parts: list[str], *, rooted: bool, rules: bool) -> str | None:
    """Return the setting that a key outside the judge's sections stands for."""
    own = ".".join(["reward", path[0], *parts[1:]])
    if path == ["timeout"] and rules and not rooted:
        raise ValueError(
            "timeout may be the judge's or the rule's; write api.timeout or reward.timeout."
        )
    known = own if own != FILE and find(own) is not None else None
    judge = None if path[0] == "function_kwargs" else _api_name(path)
    return (known or judge if rooted else judge or known) or _by_flag(path)


def _api_name(path: list[str]) -> str | None:
    """Return the judge's setting under a schema name, an alias or a flag's name."""
    leaf = ALIASES.get(path[0], path[0]) if len(path) == 1 else ".".join(path)
    return f"{API}{leaf}" if f"{API}{leaf}" in table() else _by_flag(path, inside=API)


def _by_flag(path: list[str], inside: str = "reward.") -> str | None:
    own = (k for k in table().values() if k.name.startswith(inside) and k.name != FILE)
    return next((k.name for k in own if [k.flag] == [f"--{word}" for word in path]), None)


def _value(name: str, entry: Entry) -> object:
    """Return the raw value; a scale may be a list of its two ends."""
    if name == f"{API}scale" and isinstance(entry.raw, list) and len(entry.raw) == 2:
        return "-".join(str(end) for end in listed(entry.raw))
    return entry.raw


def _no_secrets(entry: Entry, given: list[Entry]) -> str:
    """Say where a key belongs; its value is shown nowhere."""
    said = {_plain(e.name.rsplit(".", 1)[-1]): str(e.raw) for e in given}
    kind = next((said[k] for k in ("type", "api_type", "rm_api_type") if k in said), "")
    usual = KEY_VARIABLES.get(kind) or tuple(names[0] for names in KEY_VARIABLES.values())
    variable = _VARIABLE.fullmatch(str(entry.raw))
    other = variable[1] if variable else "NAME"
    return (
        f"'{entry.name}' holds a secret, and keys belong into the environment: set "
        f"{' or '.join(usual)} there, or name another variable with key_env: {other} "
        "(reward.api.key_env, --rm_key_env)."
    )


def _unknown(entry: Entry, path: list[str]) -> str:
    if path[0] in (*SECTIONS, *GROUPS, "reward", "monitor") and len(path) == 1:
        example = EXAMPLES.get(GROUPS.get(path[0], ""), "model: NAME")
        return f"{entry.name} is a group of settings; write them below it, such as {example}."
    owner = _api_name(path[:1]) or _by_flag(path[:1])
    if owner is not None and len(path) > 1:
        return f"{entry.name}: {owner} is one value, not a group."
    if find(entry.name) is not None and not entry.name.startswith("reward."):
        return f"{entry.name} is no setting of the reward; it belongs into a --config file."
    known = [k for k in table().values() if k.name.startswith("reward.")]
    words = [k.name.rsplit(".", 1)[-1] for k in known]
    flags = [k.flag.removeprefix("--") for k in known if k.flag]
    near = did_you_mean(path[-1], [*words, *flags, *ALIASES, *SECTIONS, *GROUPS])
    return f"there is no setting '{entry.name}' of the reward.{near}"
