"""ppo-cli: train language models with PPO, with an LLM judge as the reward.

As a library: `from ppo_cli import train, session, plan, load_run`; see docs/library.md.
"""

TYPE_CHECKING = False  # that of `typing`, which takes ten times as long to import as this file
if TYPE_CHECKING:
    from typing import Any

    from ppo_cli.library import Run, load_run, plan, session, train

    __version__: str

__all__ = ["Run", "__version__", "load_run", "plan", "session", "train"]


def __getattr__(name: str) -> "Any":
    """Import what the library offers when it is asked for: `import ppo_cli` alone is quick."""
    # The version asks git in a checkout, and the library imports most of the program: both wait
    # until they are used.
    if name == "__version__":
        from ppo_cli.version import read_version

        return read_version()
    if name in ("Run", "load_run", "plan", "session", "train"):
        from ppo_cli import library

        return getattr(library, name)
    raise AttributeError(f"module 'ppo_cli' has no attribute '{name}'")
