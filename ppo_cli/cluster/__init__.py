"""The engine over many processes and machines: the only room that imports Ray.

Ray reads its settings from the environment when it is imported. So they are set here, before any
module of this room imports it.
"""

from __future__ import annotations

import os
import secrets

from ppo_cli.errors import MissingPart

USER_TOKEN_VARIABLES = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}


def prepare_ray() -> bool:
    """Set Ray's variables in this process, unless the user has set them.

    Returns False if the user's variables name a token, else True. A Ray that ppo starts gets a
    token: without one anybody in the network could run code in it.
    """
    # Ray would end a driver whose cluster is gone for a minute. We report that and start again.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "86400")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Only we start Ray: a call after its end would start another one by itself.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    from_variable = bool(USER_TOKEN_VARIABLES & os.environ.keys())
    if "RAY_AUTH_MODE" in os.environ:
        return not from_variable
    # `ray start` saves a token there. Without a home the path does not exist.
    has_token = from_variable or os.path.exists(os.path.expanduser("~/.ray/auth_token"))
    if "RAY_ADDRESS" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        if not has_token:
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    elif has_token:
        os.environ["RAY_AUTH_MODE"] = "token"
    return not from_variable


RANDOM_TOKEN = prepare_ray()

try:
    import ray  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingPart(
        "Training on several devices needs Ray, which is not installed: pip install ray. Or "
        "train on one device with --engine local."
    ) from error
