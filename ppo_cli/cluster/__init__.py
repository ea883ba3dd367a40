"""The seven verbs over many processes and machines: the only room that knows Ray.

Ray reads its settings from the environment when it is imported, so they are made here, before
any module of this room imports it.
"""

from __future__ import annotations

import os
import secrets

from ppo_cli.errors import MissingPart


def _prepare_ray() -> None:
    """Settings of this process; what the user has set stands."""
    # Ray ends a driver whose cluster is gone for so long; we want to report it and start anew.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "86400")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Nobody but us starts a Ray: a call after the end of one would start another by itself.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    if "RAY_AUTH_MODE" in os.environ:
        return
    known = bool({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys())
    # Where nobody knows a home, this path leads nowhere, and that is right.
    known = known or os.path.exists(os.path.expanduser("~/.ray/auth_token"))
    if "RAY_ADDRESS" not in os.environ:
        # A Ray of our own: without a token anybody on the network could run code in it.
        os.environ["RAY_AUTH_MODE"] = "token"
        if not known:
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    elif known:  # `ray start` makes a token, too
        os.environ["RAY_AUTH_MODE"] = "token"


_prepare_ray()

try:
    import ray  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingPart(
        "Training on several devices needs Ray, which is not installed: pip install ray. Or "
        "train on one device with --engine local."
    ) from error
