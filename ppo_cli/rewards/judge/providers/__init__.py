"""The providers behind one `ask()`; only here are their SDKs imported, and only when used."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping

from ppo_cli.config.known_models import JUDGES
from ppo_cli.config.reward_schema import ApiReward
from ppo_cli.errors import MissingPart
from ppo_cli.rewards.judge.providers.base import SdkProvider
from ppo_cli.rewards.judge.providers.endpoint import Endpoint, Key, api_key

__all__ = ["Endpoint", "Key", "api_key", "build_provider", "provider_class"]


def provider_class(kind: str) -> type[SdkProvider]:
    """The class of a provider: `Judge` in the file of its name."""
    found: type[SdkProvider] = importlib.import_module(f"{__name__}.{kind}").Judge
    return found


def build_provider(
    api: ApiReward | Endpoint, *, environ: Mapping[str, str] = os.environ
) -> SdkProvider:
    """Return the judge's provider; no call is made, and no SDK is imported yet.

    Raises RewardError for a missing key or an unusable address, MissingPart for an SDK that is
    not installed.
    """
    given = api if isinstance(api, Endpoint) else Endpoint.of(api)
    known, provider = JUDGES[given.type], provider_class(given.type)
    endpoint = provider.locate(given, environ)
    own_server = known.keyless and endpoint.base_url != known.url
    key = api_key(given.type, environ, key_env=given.key_env, optional=own_server)
    if not installed(provider.module):
        raise MissingPart(
            f"A judge at {given.type} needs the {provider.package} package: "
            f"pip install {provider.package}"
        )
    if given.mode == "decision" and not installed(provider.decisions):
        raise MissingPart(
            f"--rm_mode decision needs a newer {provider.package}: "
            f"pip install --upgrade {provider.package}"
        )
    return provider(endpoint, key)


def installed(module: str) -> bool:
    """Whether a module can be imported; only the packages above it are."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
