"""The MCP servers of a run: those of `--mcp`, and those of a file in the form of other hosts."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping
from typing import Any

from ppo_cli.config.schema.environment import Environment
from ppo_cli.data_sets.files import name_type
from ppo_cli.errors import did_you_mean
from ppo_cli.paths import load_json, read_text, user_path
from ppo_cli.secrets.known import hide_command, hide_named, hide_settings

ADDRESS = re.compile("https?://")
# ${NAME}, ${env:NAME}, ${NAME:-what stands for it}; other forms have no group.
VARIABLE = re.compile(r"\$\{(?:(?:env:)?(\w+)(?::-([^}]*))?\}|[^}]*\})")
FORM = '{"mcpServers": {"NAME": {"command": "PROGRAM", "args": […]}}}'
_TEXT, _LIST, _OBJECT = (str, "text"), (list, "a list of texts"), (dict, "an object of texts")
TEXTS: dict[str, tuple[type, str]] = {
    "command": _TEXT, "args": _LIST, "env": _OBJECT, "cwd": _TEXT, "url": _TEXT, "headers": _OBJECT,
}  # fmt: skip
# Of a server, and what they are if not given.
SWITCHES = {"disabled": False, "enabled": True}
# JSON of editors, which JSON does not allow.
COMMENT = re.compile(r"(^|[{\[,])\s*(//|/\*)|,\s*[}\]]", re.MULTILINE)


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
    servers_of_run = [*(chosen or servers.values()), *others]
    for server in servers_of_run:
        _hide_keys(server)
    return servers_of_run, problems


def _hide_keys(server: Mapping[str, Any]) -> None:
    """Make every later `redact` of this process remove the keys of a server."""
    hide_command([server.get("command", ""), *server.get("args", ())])
    hide_settings(server.get("url", ""))
    for name, value in {**server.get("env", {}), **server.get("headers", {})}.items():
        hide_named(name, value)
        hide_command([value])


def _read_file(path: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the servers of a file by name, and what is wrong with it."""
    label, text = f"--mcp_config {path}", ""
    try:
        text = read_text(user_path(path))
        content = load_json(text)
        listed = content.get("mcpServers") or content["servers"]
        entries = {str(name): dict(fields) for name, fields in listed.items()}
    except OSError as error:
        return {}, [f"{label}: {error.strerror or error}."]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f" ({error})" if isinstance(error, ValueError) else ""
        if COMMENT.search(text):
            why = f"{why}: JSON has no comments, and no comma after the last entry"
        return {}, [f"{label} is not a list of servers{why}; write {FORM}."]
    servers, problems = {}, []
    for name, fields in entries.items():
        where = f"{label}: server {name!r}"
        switches = {key: fields.get(key, usual) for key, usual in SWITCHES.items()}
        problems += [
            f"{where}: {key} is {name_type(value)}, not true or false."
            for key, value in switches.items()
            if type(value) is not bool
        ]
        if switches["disabled"] is True or switches["enabled"] is False:
            continue
        problems += [
            f"{where}: {key} is not read; choose tools by --mcp {name}:TOOL,TOOL."
            for key in fields
            if key.lower().endswith("tools") and fields[key] not in ([], ["*"])
        ]
        kind = fields.get("type", "stdio" if "command" in fields else "http")
        if kind not in ("stdio", "http", "streamable-http", "streamableHttp"):
            problems.append(f"{where} has the type {kind!r}; stdio and http can be used.")
        elif ("command" in fields) == ("url" in fields):
            problems.append(f"{where} needs either command or url.")
        given = [key for key in TEXTS if key in fields]
        wrong = [key for key in given if not _is_flat(fields[key], TEXTS[key][0])]
        problems += [
            f"{where}: {key} is {name_type(fields[key])}, not {TEXTS[key][1]}; write {FORM}."
            for key in wrong
        ]
        mistakes: list[str] = []
        used = {key: _expand(fields[key], mistakes) for key in given if key not in wrong}
        command, folder = used.get("command", ""), used.get("cwd", ".")
        if " " in command and not shutil.which(command):
            mistakes.append(f"command {command!r} is more than a program; move its words to args")
        if not user_path(folder).is_dir():
            mistakes.append(f"cwd {folder!r} is no folder")
        problems += [f"{where}: {mistake}." for mistake in dict.fromkeys(mistakes)]
        servers[name] = {"name": name, "label": f"{label} ({name})", **used}
    if not (servers or problems):
        problems.append(f"{label} has no server; write {FORM}.")
    return servers, problems


def _is_flat(value: Any, kind: Any) -> bool:
    """Whether a value is of this kind, without lists or objects inside."""
    if type(value) is not kind:
        return False
    items = value.values() if isinstance(value, dict) else value
    return not any(isinstance(item, (list, dict)) for item in items)


def _expand(value: Any, mistakes: list[str]) -> Any:
    """Return a value with the variables that it names; those that do not exist are `mistakes`."""
    if isinstance(value, Mapping):
        return {key: _expand(item, mistakes) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, mistakes) for item in value]

    def find(match: re.Match[str]) -> str:
        if match[1] is None:
            mistakes.append(f"{match[0]} is no variable; write ${{NAME}} or ${{NAME:-DEFAULT}}")
            return ""
        text = os.environ.get(match[1], match[2])
        if text is None:
            mistakes.append(f"there is no variable {match[1]}")
        return text or ""

    return VARIABLE.sub(find, str(value))
