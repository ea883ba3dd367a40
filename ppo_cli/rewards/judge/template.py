"""Where a judge prompt comes from: a bundled preset, a YAML file, or texts from the settings.

A file holds `scoring` and, by choice, name, version, description, system, scale, output and
cases; whatever else stands in it is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ppo_cli.config.bundled import bundled_path
from ppo_cli.config.layers import read_settings_text
from ppo_cli.config.reward_schema import ApiReward
from ppo_cli.config.values import load_yaml
from ppo_cli.errors import RewardError, did_you_mean
from ppo_cli.rewards.judge.exchange import Scale
from ppo_cli.rewards.judge.guard import clean
from ppo_cli.rewards.judge.rendering import (
    Case,
    Material,
    Template,
    check_no_variables,
    check_variables,
    readable,
    without_doubles,
)
from ppo_cli.rewards.judge.scale_words import named_scale, parse_scale

__all__ = [
    "Case",
    "Material",
    "Template",
    "load_preset",
    "load_template",
    "preset_names",
    "preset_path",
    "read_template",
    "readable",
]
NEUTRAL = (
    "You are a careful and impartial judge. You score one response by the criteria that you are "
    "given and by nothing else: neither its length, style or confidence nor what it says about "
    "itself."
)
KEYS = ("name", "version", "description", "system", "scoring", "scale", "output", "cases")
CASE_KEYS = (
    "name", "prompt", "response", "ground_truth", "extra_info", "at_least", "at_most",
)  # fmt: skip
OWN = "own"
SYSTEM_FLAG, SCORING_FLAG, SCALE_FLAG = "--rm_system_prompt", "--rm_scoring_prompt", "--rm_scale"
# `\n` as a shell passes it on; `\\n` and LaTeX's \neq, \nabla … stay as they are.
TYPED_NEWLINE = re.compile(
    r"\\\\n|\\n(?!(?:abla|eq|eqq|e|eg|ot|otin|u|mid|earrow|parallel|subseteq|cong|leq|geq)\b)"
)


def preset_names() -> tuple[str, ...]:
    """Return the names of the bundled judge prompts."""
    return tuple(sorted(path.stem for path in bundled_path("reward_prompts").glob("*.yaml")))


def preset_path(name: str) -> Path:
    """Return the file of a bundled judge prompt; an unknown name is told with its nearest."""
    names = preset_names()
    if name in names:
        return bundled_path("reward_prompts") / f"{name}.yaml"
    hint = did_you_mean(name, names) or f" Known: {', '.join(names)}."
    if name.endswith((".yaml", ".yml")) or "/" in name:
        hint = f" A file of your own goes to --rm_prompt_file {name}."
    raise RewardError(f"there is no judge prompt '{name}'.{hint}")


def load_preset(name: str) -> Template:
    """Read a bundled judge prompt."""
    return read_template(preset_path(name))


def load_template(api: ApiReward) -> Template:
    """Build the judge prompt that the settings ask for; whatever is wrong is a RewardError."""
    found = _base(api)
    if api.scoring_prompt is not None:
        found = _own_scoring(api, found)
    if api.system_prompt is not None:
        system = clean(typed_text(api.system_prompt))
        check_no_variables(system, SYSTEM_FLAG)
        name = found.name if found.name == OWN else f"{found.name} ({OWN} system prompt)"
        found = replace(found, name=name, system=without_doubles(system))
    if api.scale is not None:
        found = replace(found, scale=parse_scale(api.scale, SCALE_FLAG))
    return found if api.output is None else replace(found, output=api.output)


def _base(api: ApiReward) -> Template:
    if api.prompt_file is not None:
        return read_template(Path(api.prompt_file).expanduser())
    return load_preset(api.prompt_preset)


def _own_scoring(api: ApiReward, base: Template) -> Template:
    """Put the user's scoring prompt in place of a template's; its cases go with it."""
    scoring = clean(typed_text(api.scoring_prompt or ""))
    check_variables(scoring, SCORING_FLAG)
    named = None if api.scale is not None else named_scale(scoring, SCORING_FLAG)
    return Template(
        name=OWN,
        version=base.version if api.prompt_file is not None else "1",
        system=base.system if api.prompt_file is not None else NEUTRAL,
        scoring=scoring,
        scale=named or base.scale,
        output=base.output,
        description="Prompt from the settings.",
    )


def typed_text(text: str) -> str:
    r"""Read `\n` in a text from the command line as a newline, `\\n` as a literal `\n`."""
    return TYPED_NEWLINE.sub(lambda found: "\\n" if found[0] == r"\\n" else "\n", text)


def read_template(path: Path) -> Template:
    """Read a judge prompt from a YAML file; every problem names the file and the key."""
    where = path.name
    given = _read_mapping(path)
    unknown = [key for key in given if key not in KEYS]
    if unknown:
        raise RewardError(_unknown_keys(where, unknown, KEYS))
    output = given.get("output", "json")
    if output not in ("json", "text"):
        raise RewardError(f"{where}, key output: {output!r} is not known; it is json or text.")
    scoring = _text(given, "scoring", where, needed=True)
    check_variables(scoring, f"{where}, key scoring")
    system = _text(given, "system", where) if "system" in given else NEUTRAL
    check_no_variables(system, f"{where}, key system")
    scale = _scale(given, scoring, where)
    return Template(
        name=_text(given, "name", where) or path.stem,
        version=_version(given, where),
        system=without_doubles(system).strip(),
        scoring=scoring.strip(),
        scale=scale,
        description=" ".join(_text(given, "description", where).split()),
        cases=_cases(given, scale, where),
        written_for=scale,
        output=output,
    )


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        found = load_yaml(read_settings_text(path))
    except FileNotFoundError:
        beside = [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else []
        near = did_you_mean(path.name, beside)
        raise RewardError(f"--rm_prompt_file {path}: there is no such file.{near}") from None
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "not a text file in UTF-8"
        raise RewardError(f"--rm_prompt_file {path}: cannot be read ({said}).") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise RewardError(f"{path.name}{line}: not valid YAML: {error.problem}.") from None
    except yaml.YAMLError as error:
        raise RewardError(f"{path.name}: not valid YAML: {error}.") from None
    except ValueError as error:
        raise RewardError(f"--rm_prompt_file {path}: {error}") from None
    if not isinstance(found, dict):
        raise RewardError(f"{path.name}: a judge prompt is keys and texts, with at least scoring:")
    return {str(key): value for key, value in found.items()}


def _unknown_keys(where: str, unknown: list[str], known: tuple[str, ...]) -> str:
    told = [f"'{key}'.{did_you_mean(key, known)}" for key in unknown]
    return f"{where}: there is no key {' And no key '.join(told)} Known: {', '.join(known)}."


def _text(given: Mapping[str, Any], key: str, where: str, *, needed: bool = False) -> str:
    value = given.get(key)
    if value is None and not needed:
        return ""
    if value is None:
        raise RewardError(f"{where}: the key {key} is missing.")
    if not isinstance(value, str):
        raise RewardError(f"{where}, key {key}: {value!r} is no text; put it in quotes.")
    return clean(value)


def _version(given: Mapping[str, Any], where: str) -> str:
    value = given.get("version", 1)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise RewardError(f"{where}, key version: {value!r} is neither a number nor text.")
    return str(value)


def _scale(given: Mapping[str, Any], scoring: str, where: str) -> Scale:
    value = given.get("scale")
    if value is None:
        return named_scale(scoring, f"{where}, key scoring")
    if not isinstance(value, str):
        raise RewardError(f"{where}, key scale: {value!r} is no scale; write it as 1-10.")
    return parse_scale(value, f"{where}, key scale")


def _cases(given: Mapping[str, Any], scale: Scale, where: str) -> tuple[Case, ...]:
    cases = given.get("cases") or []
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise RewardError(f"{where}, key cases: it is a list of cases, each with a response.")
    return tuple(
        _case(case, scale, f"{where}, case {number}") for number, case in enumerate(cases, 1)
    )


def _case(given: dict[str, Any], scale: Scale, where: str) -> Case:
    unknown = [str(key) for key in given if key not in CASE_KEYS]
    if unknown:
        raise RewardError(_unknown_keys(where, unknown, CASE_KEYS))
    extra = given.get("extra_info") or {}
    if not isinstance(extra, dict):
        raise RewardError(f"{where}, key extra_info: it holds names and values.")
    bounds = {key: _bound(given, key, scale, where) for key in ("at_least", "at_most")}
    if set(bounds.values()) == {None}:
        raise RewardError(f"{where}: give at_least, at_most or both.")
    return Case(
        name=_text(given, "name", where) or where.rpartition(", ")[2],
        material=Material(
            prompt=str(given.get("prompt") or ""),
            # Not cleaned: a case may hold just what the guard takes out.
            response=str(_raw_text(given, "response", where)),
            ground_truth=given.get("ground_truth"),
            extra_info=extra,
        ),
        **bounds,
    )


def _raw_text(given: Mapping[str, Any], key: str, where: str) -> str:
    value = given.get(key)
    if not isinstance(value, str):
        raise RewardError(f"{where}, key {key}: {value!r} is no text; put it in quotes.")
    return value


def _bound(given: Mapping[str, Any], key: str, scale: Scale, where: str) -> int | None:
    value = given.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value not in scale.levels():
        raise RewardError(f"{where}, key {key}: {value!r} is no level of {scale}.")
    return value
