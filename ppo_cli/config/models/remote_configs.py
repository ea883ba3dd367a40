"""The config.json of a model: in its folder, of the hub's cache, fetched, or from a bundled table.

A plan counts memory with it. Fetched files are kept in the cache folder; weights are not fetched.
"""

from __future__ import annotations

import json
import re
import tomllib
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

from ppo_cli.atomic import atomic_replace
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.weight_files import read_json
from ppo_cli.errors import ModelError
from ppo_cli.machine.device_record import cache_folder
from ppo_cli.paths import load_json, read_text, user_path

DEADLINE_S = 3.0  # of the only attempt: names may take long to resolve behind a firewall
HUB, TABLE = "the hub", "the bundled table"
_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Addresses that did not answer in this process: not tried again for the next model.
_silent: set[str] = set()


def find_config(path: str) -> tuple[dict[str, Any], str]:
    """Return a model's config.json and where it is from, if it is not on this machine.

    It is that of the folder, else of the hub's cache, else what `remote_config` returns.
    """
    folder = user_path(model_folder(path))
    file: object = folder / "config.json"
    try:
        if not folder.is_dir():
            from huggingface_hub import try_to_load_from_cache

            file = try_to_load_from_cache(path, "config.json")
        return (read_json(Path(file)), "") if isinstance(file, str | Path) else remote_config(path)
    except (ModelError, ValueError):  # a damaged file, or what is no name for the hub
        return {}, ""


@cache
def remote_config(name: str) -> tuple[dict[str, Any], str]:
    """Return the fields of a hub model's config.json, and their source: HUB or TABLE.

    Both are empty for a model that neither has. Fine-tunes are not guessed by their names.
    """
    if _NAME.fullmatch(name):
        folder = cache_folder()
        kept = folder and folder / "configs" / f"{name.replace('/', '--')}.json"
        with suppress(OSError, ValueError, TypeError):  # not fetched yet, or damaged
            if kept:
                return dict(load_json(read_text(kept))), HUB
        if fields := _fetch(name):
            with suppress(OSError):  # the next plan fetches it again
                if kept:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    with atomic_replace(kept) as unfinished:
                        unfinished.write_text(json.dumps(fields), encoding="utf-8")
            return fields, HUB
    fields = read_table().get(name, {})
    return fields, TABLE if fields else ""


@cache
def read_table() -> dict[str, dict[str, Any]]:
    """Return the fields of the known models by name."""
    text = Path(__file__).with_name("shapes.toml").read_text(encoding="utf-8")
    return {name: row["config"] for row in tomllib.loads(text)["model"] for name in row["names"]}


def _fetch(name: str) -> dict[str, Any]:
    """Fetch config.json from the hub; empty if the hub does not give it in time."""
    import httpx
    from huggingface_hub import get_token, hf_hub_url
    from huggingface_hub.constants import ENDPOINT, is_offline_mode

    if is_offline_mode() or ENDPOINT in _silent:
        return {}
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url, fields = hf_hub_url(name, "config.json"), dict[str, Any]()

    def download() -> None:
        """Fill in the fields; those of a missing, private or gated model stay empty."""
        try:
            reply = httpx.get(url, headers=headers, timeout=DEADLINE_S, follow_redirects=True)
            if reply.status_code == httpx.codes.OK:
                fields.update(reply.json())
        except httpx.TransportError:
            _silent.add(ENDPOINT)
        except (ValueError, TypeError):  # not JSON, as from a page that asks to sign in
            pass

    # A thread, because no timeout of a client bounds the resolution of a name.
    thread = Thread(target=download, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    if thread.is_alive():
        _silent.add(ENDPOINT)
        return {}
    return fields
