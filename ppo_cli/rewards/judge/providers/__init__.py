"""The four providers behind one `ask()`; only here are their SDKs imported, and only when used."""

from ppo_cli.rewards.judge.providers.build import build_provider
from ppo_cli.rewards.judge.providers.endpoint import Endpoint, Key, api_key

__all__ = ["Endpoint", "Key", "api_key", "build_provider"]
