"""Fetch a reward model from the hub: its weights in one format, and no code."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from ppo_cli.config.known_models import has_weights
from ppo_cli.errors import ModelError

SMALL = ("*.json", "*.txt", "*.model", "*.jinja")
FORMATS = ("*.safetensors", "*.bin", "*.pt")
# Copies for other programs and states of a training run lie in folders of their own.
ELSEWHERE = ("*/*", "optimizer*", "scheduler*", "training_args*", "rng_state*")


def fetch(name: str, revision: str | None) -> Path:
    """Download (or find in the cache) a hub model; the folder of its snapshot comes back."""
    for pattern in FORMATS:
        try:
            folder = Path(
                snapshot_download(
                    name,
                    revision=revision,
                    allow_patterns=[*SMALL, pattern],
                    ignore_patterns=list(ELSEWHERE),
                )
            )
        except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
            raise ModelError(_message(name, revision, error)) from error
        if has_weights(folder):  # an index may come without the shards that it lists
            return folder
    raise ModelError(f"The hub's {name} holds no weights (*.safetensors, *.bin or *.pt).")


def _message(name: str, revision: str | None, error: Exception) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(" .:")
    at = f" at revision {revision}" if revision else ""
    return (
        f"The reward model {name}{at} could not be loaded: there is no such folder here, and the "
        f"hub did not give it ({first}). Give a local folder with --reward_model, or check the "
        "name and the connection."
    )
