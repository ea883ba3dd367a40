"""The MCP servers of a run: those of `--mcp`, and those of a file in the form of other hosts."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from typing import Any

from ppo_cli.config.schema.environment import Environment
from ppo_cli.errors import did_you_mean
from ppo_cli.paths import user_path

ADDRESS = re.compile("https?://")
# ${NAME}, ${env:NAME}, ${NAME:-what stands for it}
VARIABLE = re.compile(r"\$\{(?:env:)?(\w+)(?::-([^}]*))?\}")
FORM = '{"mcpServers": {"NAME": {"command": "PROGRAM", "args": […]}}}'
TEXTS: dict[str, Any] = {
    "command": str, "args": list, "env": dict, "cwd": str, "url": str, "headers": dict,
}  # fmt: skip


def read_servers(config: Environment) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what an environment process is told of each server, and what is wrong."""
    servers, problems = _read_file(config.mcp_config) if config.mcp_config else ({}, [])
    chosen, others = list[dict[str, Any]](), list[dict[str, Any]]()
    for entry in config.mcp:
        name, colon, tools = entry.partition(":")
        label = f"--mcp {entry!r}"
        if name in servers:
            chosen.append({**servers[name], "tools": tools.split(",") if colon else None})
        elif ADDRESS.match(entry):
            others.append({"name": "", "label": label, "url": entry})
        elif config.mcp_config and re.fullmatch(r"[\w-]+(:[\w,-]*)?", entry):
            hint = did_you_mean(name, servers)
            problems.append(f"{label}: {config.mcp_config} has no server {name!r}.{hint}")
        else:
            try:
                program, *arguments = shlex.split(entry)
                others.append({"name": "", "label": label, "command": program, "args": arguments})
            except ValueError as error:
                problems.append(f"{label} is not a command: {error}.")
    return [*(chosen or servers.values()), *others], problems


def _read_file(path: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the servers of a file by name, and what is wrong with it."""
    label = f"--mcp_config {path}"
    try:
        content = json.loads(user_path(path).read_bytes())
        listed = content.get("mcpServers") or content["servers"]
        entries = {str(name): dict(fields) for name, fields in listed.items()}
    except OSError as error:
        return {}, [f"{label}: {error.strerror or error}."]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f" ({error})" if isinstance(error, ValueError) else ""
        return {}, [f"{label} is not a list of servers{why}; write {FORM}."]
    servers, problems = {}, []
    for name, fields in entries.items():
        if fields.get("disabled") is True:
            continue
        where = f"{label}: server {name!r}"
        kind = fields.get("type", "stdio" if "command" in fields else "http")
        if kind not in ("stdio", "http", "streamable-http", "streamableHttp"):
            problems.append(f"{where} has the type {kind!r}; stdio and http can be used.")
        elif ("command" in fields) == ("url" in fields):
            problems.append(f"{where} needs either command or url.")
        wrong = [key for key, of in TEXTS.items() if key in fields and type(fields[key]) is not of]
        problems += [f"{where}: {key} is {fields[key]!r}; write {FORM}." for key in wrong]
        missing: list[str] = []
        used = {key: _expand(fields[key], missing) for key in TEXTS if key in fields}
        problems += [f"{where}: there is no variable {n}." for n in dict.fromkeys(missing)]
        servers[name] = {"name": name, "label": f"{label} ({name})", **used}
    if not (servers or problems):
        problems.append(f"{label} has no server; write {FORM}.")
    return servers, problems


def _expand(value: Any, missing: list[str]) -> Any:
    """Return a value with the variables that it names; those that do not exist are `missing`."""
    if isinstance(value, Mapping):
        return {key: _expand(item, missing) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, missing) for item in value]

    def find(match: re.Match[str]) -> str:
        text = os.environ.get(match[1], match[2])
        if text is None:
            missing.append(match[1])
        return text or ""

    return VARIABLE.sub(find, str(value))
