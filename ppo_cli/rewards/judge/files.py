"""YAML files that a person writes for a judge (prompts, prices), checked by pydantic models."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ppo_cli.config.keys import load_yaml
from ppo_cli.config.layers import read_settings_text
from ppo_cli.errors import RewardError, did_you_mean

M = TypeVar("M", bound=BaseModel)


class FromFile(BaseModel):
    """A group of keys in such a file; nothing is converted, and no key may be unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, given: Any) -> Any:
        known = list(cls.model_fields)
        if not isinstance(given, dict):
            raise ValueError(f"there must be keys here: {', '.join(known)}")
        unknown = [key for key in given if key not in known]
        if unknown:
            told = [f"'{key}'.{did_you_mean(str(key), known)}" for key in unknown]
            raise ValueError(
                f"there is no key {' And no key '.join(told)} Known: {', '.join(known)}"
            )
        return given


def read_file(path: Path, model: type[M], label: str) -> M:
    """Read such a file; RewardError names the file (by `label`) and every mistake in it."""
    try:
        return model.model_validate(load_yaml(read_settings_text(path)))
    except FileNotFoundError:
        beside = [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else []
        near = did_you_mean(path.name, beside)
        raise RewardError(f"{label}: there is no such file.{near}") from None
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "not a text file in UTF-8"
        raise RewardError(f"{label}: cannot be read ({said}).") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        why = getattr(error, "problem", None) or error
        raise RewardError(f"{label}{line}: not valid YAML: {why}.") from None
    except ValidationError as error:
        problems = [_problem(label, **one) for one in error.errors()]
        raise RewardError("\n".join(problems)) from None
    except ValueError as error:
        raise RewardError(f"{label}: {error}") from None


def _problem(label: str, *, type: str, loc: tuple[Any, ...], msg: str, input: Any, **_: Any) -> str:
    where = ".".join(str(part + 1 if isinstance(part, int) else part) for part in loc)
    place = f"{label}, key {where}" if where else label
    if type == "missing":
        return f"{place}: the key is missing."
    if type == "value_error":
        return f"{place}: {msg.removeprefix('Value error, ')}."
    return f"{place}: {msg.replace('Input should be', 'must be')}, but is {input!r}."
