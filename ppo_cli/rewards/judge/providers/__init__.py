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
from ppo_cli.rewards.judge.providers.endpoint import Key, api_key, monitor_of

__all__ = ["Key", "api_key", "build_provider", "monitor_of", "provider_class"]


def provider_class(kind: str) -> type[SdkProvider]:
    """The class of a provider: `Judge` in the file of its name."""
    found: type[SdkProvider] = importlib.import_module(f"{__name__}.{kind}").Judge
    return found


def build_provider(
    api: ApiReward, *, environ: Mapping[str, str] = os.environ, flags: str = "--rm"
) -> SdkProvider:
    """Return the judge's provider; no call is made, and no SDK is imported yet.

    `flags` is how its flags begin. Raises RewardError for a missing key or an unusable address,
    MissingPart for an SDK that is not installed.
    """
    known, provider = JUDGES[api.type], provider_class(api.type)
    base_url = provider.locate(api, environ, flags)
    own_server = known.keyless and base_url != known.url
    key = api_key(api.type, environ, key_env=api.key_env, optional=own_server)
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
