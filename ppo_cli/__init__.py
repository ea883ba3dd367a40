"""ppo-cli: train language models with PPO, with an LLM judge as the reward.

As a library: `from ppo_cli import train, plan, load_run`; see docs/library.md.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_cli.library import Run, load_run, plan, train

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "load_run", "plan", "train"]


def __getattr__(name: str) -> Any:
    """Import what the library offers when it is asked for: `import ppo_cli` alone is quick."""
    if name in ("Run", "load_run", "plan", "train"):
        from ppo_cli import library

        return getattr(library, name)
    raise AttributeError(f"module 'ppo_cli' has no attribute '{name}'")


class _Package(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        # `ppo_cli.train` is the function, also once the modules in train/ are imported.
        if name != "train" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
