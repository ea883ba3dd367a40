"""Find the key of a provider in the environment; no key ever stands in a message or a repr."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ppo_cli.config.known_models import KEY_VARIABLES
from ppo_cli.errors import RewardError

# What a server without keys is sent: the SDK insists on something.
NO_KEY = "none"


@dataclass(frozen=True)
class Key:
    """A key and the variable that it came from (empty for a server that needs none)."""

    value: str = field(repr=False)
    variable: str


def api_key(
    kind: str, environ: Mapping[str, str], *, key_env: str | None = None, optional: bool = False
) -> Key:
    """Return the key for a provider; one that is missing or mangled raises RewardError.

    Blank variables count as missing, blanks around a key are dropped. With `optional` (an
    OpenAI-compatible server of one's own) a missing key becomes a placeholder.
    """
    variables = (key_env,) if key_env else KEY_VARIABLES[kind]
    for variable in variables:
        value = environ.get(variable, "").strip()
        if value:
            return Key(check_key(value, variable), variable)
    if optional and not key_env:
        return Key(NO_KEY, "")
    named = " or ".join(variables)
    raise RewardError(
        f"The judge at {kind} needs a key, and {named} is not set. "
        f"Set it before the run: export {variables[0]}=YOUR_KEY"
    )


def check_key(value: str, variable: str) -> str:
    """Return the key; one that could not stand in a request header raises RewardError."""
    if not value.isascii():
        raise RewardError(
            f"The key in {variable} holds characters that no key has (curly quotes, a letter "
            "with an accent?). Copy it again from the provider's page."
        )
    if any(char.isspace() or not char.isprintable() for char in value):
        raise RewardError(
            f"The key in {variable} has a blank or a line break inside. "
            "Set the key alone, without quotes or comments."
        )
    return value
