"""Builds the provider of a judge from its settings, address and key.

Only the modules of this package import SDKs, and only when they are used. No message or repr
contains a key.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from ppo_cli.config.choices import usual_temperature
from ppo_cli.config.models.known_models import JUDGES, effective_provider, missing_sdk_settings
from ppo_cli.config.schema.reward import ApiReward, check_judge_address
from ppo_cli.errors import MissingPart, RewardError
from ppo_cli.plugins import load
from ppo_cli.rewards.judge.providers.base import Key, SdkProvider
from ppo_cli.secrets.redact import redact_url

# The key for a server without keys: SDKs require one.
NO_KEY = "none"


def provider_class(kind: str) -> type[SdkProvider]:
    """Return the class of a provider: `Judge` in the module of its name, a cloud's, a package's."""
    if kind not in JUDGES:
        plugin: type[SdkProvider] = load("providers", kind)
        return plugin
    file, _, name = (JUDGES[kind].platform or f"{kind}.Judge").partition(".")
    provider: type[SdkProvider] = getattr(importlib.import_module(f"{__name__}.{file}"), name)
    return provider


def build_provider(
    api: ApiReward, *, environ: Mapping[str, str] = os.environ, flags: str = "--rm_"
) -> SdkProvider:
    """Return the judge's provider; no call is made, and no SDK is imported yet.

    `flags` is how its flags begin. Raises RewardError for a missing key or setting and for an
    unusable address, MissingPart for an SDK that is not installed.
    """
    kind = effective_provider(api.type, environ)
    declaration, provider = JUDGES[kind], provider_class(kind)
    if lacking := missing_sdk_settings(kind, environ, base_url=api.base_url, key_env=api.key_env):
        raise RewardError("\n".join(lacking))
    base_url = resolve_base_url(provider, api, environ, flags)
    # A private OpenAI-compatible server may do without a key.
    own_server = declaration.keyless and base_url != declaration.url
    key = read_api_key(kind, environ, key_env=api.key_env, optional=own_server)
    if not is_installed(provider.module):
        raise MissingPart(
            f"A judge at {api.type} needs the {provider.package} package: "
            f"pip install {provider.package}"
        )
    if api.mode == "decision" and not is_installed(provider.decision_module):
        raise MissingPart(
            f"--rm_mode decision needs a newer {provider.package}: "
            f"pip install --upgrade {provider.package}"
        )
    return provider(api, base_url, key, flags)


def is_installed(module: str) -> bool:
    """Whether a module can be imported; only the packages above it are."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def resolve_base_url(
    provider: type[SdkProvider], api: ApiReward, environ: Mapping[str, str], flags: str = "--rm_"
) -> str:
    """Return the address from the settings, a variable or the provider, as the SDK takes it."""
    # The setting wins over the variables of the SDK.
    places = {f"{flags}base_url": api.base_url}
    for variable in () if api.base_url else JUDGES[provider.name].url_variables:
        places[variable] = environ.get(variable, "").strip()
    for source, url in places.items():
        if url:
            return clean_url(url, provider.redundant_path, provider.default_path, source)
    return provider.default_url(environ)


def find_key_variable(variables: Iterable[str], environ: Mapping[str, str]) -> str:
    """Return the first of the variables that is set, "" if none is."""
    return next((name for name in variables if environ.get(name, "").strip()), "")


def describe_endpoint(api: ApiReward, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the address that a judge's calls go to, and the variable with the key.

    "" for what is not known: settings are missing, the run starts the server, no key is set.
    """
    kind = effective_provider(api.type, environ)
    lacking = missing_sdk_settings(kind, environ, base_url=api.base_url, key_env=api.key_env)
    is_known = kind != "local" and not lacking
    variables = (api.key_env,) if api.key_env else JUDGES[kind].keys
    return {
        "address": redact_url(resolve_base_url(provider_class(kind), api, environ))
        if is_known
        else "",
        "key_variable": find_key_variable(variables, environ),
    }


def read_api_key(
    kind: str, environ: Mapping[str, str], *, key_env: str | None = None, optional: bool = False
) -> Key:
    """Return the key for a provider; raises RewardError if it is missing or malformed.

    Blank variables count as missing, blanks around a key are dropped. With `optional` (a private
    OpenAI-compatible server) a missing key becomes a placeholder.
    """
    variables = (key_env,) if key_env else JUDGES[kind].keys
    if variable := find_key_variable(variables, environ):
        return Key(check_key(environ[variable].strip(), variable), variable)
    if optional and not key_env:
        return Key(NO_KEY, "")
    named = " or ".join(variables)
    raise RewardError(
        f"The judge at {kind} needs a key, and {named} is not set. "
        f"Set it before the run: export {variables[0]}=YOUR_KEY"
    )


def check_key(value: str, variable: str) -> str:
    """Return the key; raises RewardError if a request header cannot contain it."""
    if not value.isascii():
        raise RewardError(
            f"The key in {variable} contains characters that no key has (curly quotes, a letter "
            "with an accent?). Copy it again from the provider's page."
        )
    if any(char.isspace() or not char.isprintable() for char in value):
        raise RewardError(
            f"The key in {variable} has a blank or a line break inside. "
            "Set the key alone, without quotes or comments."
        )
    return value


def monitor_settings(api: ApiReward) -> ApiReward:
    """Return the settings of the second judge, which is only compared with the first.

    If it has the same type and no address, it uses the address and key of the first one: a
    gateway's key is not for the provider's public address. Temperature, votes, mode and prices of
    the first judge do not apply to it.
    """
    monitor = api.monitor
    base_url, key_env = monitor.base_url, monitor.key_env
    if not base_url and monitor.type == api.type:
        base_url, key_env = api.base_url, key_env or api.key_env
    changes = {
        "type": monitor.type, "model": monitor.model, "base_url": base_url, "key_env": key_env,
    }  # fmt: skip
    alone = {
        "temperature": usual_temperature(monitor.type, 1), "votes": 1, "max_votes": 1,
        "mode": "text", "price_input": None, "price_output": None,
    }  # fmt: skip
    return api.model_copy(update=changes | alone)


def clean_url(url: str, redundant_path: str, path: str, source: str = "--rm_base_url") -> str:
    """Return a base URL as the SDK takes it, from what people type or paste.

    The regex `redundant_path` finds what to remove from the end; `path` is the path of an address
    without one.
    """
    try:
        check_judge_address(url)
    except ValueError as error:
        raise RewardError(f"{source} {error}.") from None
    parts = urlsplit(url.strip())
    base_path = re.sub(redundant_path, "", re.sub(r"/+", "/", parts.path).rstrip("/"))
    return f"{parts.scheme.lower()}://{parts.netloc}{base_path or path}"
