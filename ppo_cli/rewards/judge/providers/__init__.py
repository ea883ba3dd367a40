"""The providers behind one `ask()`: how one is built from its settings, address and key.

Only the files beside this one import their SDKs, and only when they are used. No key ever stands
in a message or a repr.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from ppo_cli.config.models.known_models import JUDGES, effective_provider, missing_sdk_settings
from ppo_cli.config.schema.reward import ApiReward, check_judge_address
from ppo_cli.errors import MissingPart, RewardError
from ppo_cli.rewards.judge.providers.base import Key, SdkProvider

# What a server without keys is sent: the SDK insists on something.
NO_KEY = "none"


def provider_class(kind: str) -> type[SdkProvider]:
    """The class of a provider: `Judge` in the file of its name, or that of a cloud elsewhere."""
    file, _, name = (JUDGES[kind].platform or f"{kind}.Judge").partition(".")
    found: type[SdkProvider] = getattr(importlib.import_module(f"{__name__}.{file}"), name)
    return found


def build_provider(
    api: ApiReward, *, environ: Mapping[str, str] = os.environ, flags: str = "--rm"
) -> SdkProvider:
    """Return the judge's provider; no call is made, and no SDK is imported yet.

    `flags` is how its flags begin. Raises RewardError for a missing key or setting and for an
    unusable address, MissingPart for an SDK that is not installed.
    """
    kind = effective_provider(api.type, environ)
    known, provider = JUDGES[kind], provider_class(kind)
    if lacking := missing_sdk_settings(kind, environ, base_url=api.base_url, key_env=api.key_env):
        raise RewardError("\n".join(lacking))
    base_url = locate(provider, api, environ, flags)
    own_server = known.keyless and base_url != known.url
    key = api_key(kind, environ, key_env=api.key_env, optional=own_server)
    if not installed(provider.module):
        raise MissingPart(
            f"A judge at {api.type} needs the {provider.package} package: "
            f"pip install {provider.package}"
        )
    if api.mode == "decision" and not installed(provider.decisions):
        raise MissingPart(
            f"--rm_mode decision needs a newer {provider.package}: "
            f"pip install --upgrade {provider.package}"
        )
    return provider(api, base_url, key, flags)


def installed(module: str) -> bool:
    """Whether a module can be imported; only the packages above it are."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def locate(
    provider: type[SdkProvider], api: ApiReward, environ: Mapping[str, str], flags: str = "--rm"
) -> str:
    """The address of the settings, of a variable or of the provider, as the SDK takes it."""
    places = {f"{flags}_base_url": api.base_url}
    for variable in () if api.base_url else JUDGES[provider.name].url_variables:
        places[variable] = environ.get(variable, "").strip()
    for source, given in places.items():
        if given:
            return clean_url(given, provider.pasted, provider.path, source)
    return provider.home(environ)


def api_key(
    kind: str, environ: Mapping[str, str], *, key_env: str | None = None, optional: bool = False
) -> Key:
    """Return the key for a provider; one that is missing or mangled raises RewardError.

    Blank variables count as missing, blanks around a key are dropped. With `optional` (an
    OpenAI-compatible server of one's own) a missing key becomes a placeholder.
    """
    variables = (key_env,) if key_env else JUDGES[kind].keys
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


def monitor_of(api: ApiReward) -> ApiReward:
    """The settings of the judge that is only compared with the first.

    One of the same type without an address of its own is asked where the first one is, with the
    same key: a gateway's key is not for the provider's public address. Temperature, votes, mode
    and prices are the first judge's own.
    """
    given = api.monitor
    base_url, key_env = given.base_url, given.key_env
    if not base_url and given.type == api.type:
        base_url, key_env = api.base_url, key_env or api.key_env
    named = {"type": given.type, "model": given.model, "base_url": base_url, "key_env": key_env}
    usual = ("temperature", "votes", "mode", "price_input", "price_output")
    own = {name: ApiReward.model_fields[name].default for name in usual}
    return api.model_copy(update=named | own)


def clean_url(url: str, pasted: str, path: str, source: str = "--rm_base_url") -> str:
    """Return a base URL as the SDK takes it, from what people type or paste.

    `pasted` finds what is too much at the end, `path` is the path of an address without one.
    """
    try:
        check_judge_address(url)
    except ValueError as error:
        raise RewardError(f"{source} {error}.") from None
    parts = urlsplit(url.strip())
    given = re.sub(pasted, "", re.sub(r"/+", "/", parts.path).rstrip("/"))
    return f"{parts.scheme.lower()}://{parts.netloc}{given or path}"
