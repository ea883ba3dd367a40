"""Turn the judge's settings into a provider, or say at once what is missing."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

from ppo_cli.config.reward_schema import ApiReward
from ppo_cli.errors import MissingPart, RewardError
from ppo_cli.rewards.judge.providers.base import SdkProvider
from ppo_cli.rewards.judge.providers.claude import ClaudeJudge
from ppo_cli.rewards.judge.providers.dashscope_judge import DashScopeJudge
from ppo_cli.rewards.judge.providers.endpoint import DEFAULT_BASES, Endpoint, api_key
from ppo_cli.rewards.judge.providers.gemini import GeminiJudge
from ppo_cli.rewards.judge.providers.openai_judge import OpenAIJudge
from ppo_cli.rewards.judge.providers.verdict_schema import lacking

PROVIDERS: dict[str, type[SdkProvider]] = {
    "dashscope": DashScopeJudge,
    "openai": OpenAIJudge,
    "gemini": GeminiJudge,
    "claude": ClaudeJudge,
}
_MODULES = {
    "dashscope": "dashscope",
    "openai": "openai",
    "gemini": "google.genai",
    "claude": "anthropic",
}
# Where each SDK keeps its decision endpoint.
_DECISIONS = {
    "dashscope": "dashscope.v2.resources.decision",
    "openai": "openai.resources.decisions",
    "gemini": "google.genai.decisions",
}


def build_provider(
    api: ApiReward | Endpoint, *, environ: Mapping[str, str] = os.environ
) -> SdkProvider:
    """Return the judge's provider; no call is made, and no SDK is imported yet.

    Raises RewardError for a missing key or model or an unusable address, MissingPart for an SDK
    that is not installed.
    """
    given = api if isinstance(api, Endpoint) else Endpoint.of(api)
    given.named_model()
    if given.mode == "decision" and given.type not in _DECISIONS:
        raise RewardError(
            f"{given.type} has no decision endpoint: leave {given.flags}_mode at text."
        )
    endpoint = given.located(environ)
    own_server = given.type == "openai" and endpoint.base_url != DEFAULT_BASES["openai"]
    key = api_key(given.type, environ, key_env=given.key_env, optional=own_server)
    provider = PROVIDERS[given.type]
    if not installed(_MODULES[given.type]):
        raise MissingPart(
            f"A judge at {given.type} needs the {provider.package} package: "
            f"pip install {provider.package}"
        )
    if given.mode == "decision" and not installed(_DECISIONS[given.type]):
        raise lacking(provider.package)
    return provider(endpoint, key)


def installed(module: str) -> bool:
    """Whether a module can be imported; only the packages above it are."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
