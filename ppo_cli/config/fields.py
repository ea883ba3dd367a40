"""How a setting is declared: default, range, one line of help, and its flag and variable.

Everything that the command line, the plan and the reference page know of a setting is read
from here, so that a setting is written down once.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A frozen group of settings that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def setting(
    default: Any,
    help_text: str,
    *,
    flag: str | None = None,
    env: str | None = None,
    usual: tuple[float, float] | None = None,
    **limits: Any,
) -> Any:
    """Declare a setting; `limits` are pydantic's (ge, gt, le, lt, min_length …).

    `flag` is spelt with underscores (`--batch_size`); the dashed spelling comes for free.
    A value outside the `usual` range is taken with a remark.
    """
    extra: Any = {k: v for k, v in (("flag", flag), ("env", env), ("usual", usual)) if v}
    return Field(default, description=help_text, json_schema_extra=extra or None, **limits)


def section(kind: type[Section]) -> Any:
    """Declare a nested section with its own defaults."""
    return Field(default_factory=kind, description=(kind.__doc__ or "").splitlines()[0])
