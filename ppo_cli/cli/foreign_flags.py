"""Flags that people know from TRL, Hugging Face's Trainer, OpenRLHF and torchrun.

Where a flag means the same here it is an alias; where it does not, a sentence says what to use.
Both are listed in foreign_flags.toml.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from ppo_cli.errors import ppo

NEAR = 0.75  # below this share of equal letters a suggestion only confuses


@cache
def listed() -> dict[str, dict[str, str]]:
    """Return `aliases` and `pointers`: by flag what means the same, and what to do instead."""
    import tomllib

    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def translate(words: Sequence[str]) -> list[str]:
    """Replace each alias by what it stands for; a setting without a flag becomes KEY=VALUE."""
    out: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*out, word, *rest]
        name, equals, value = word[2:].partition("=")
        known = word.startswith("--") and listed()["aliases"].get(name.replace("-", "_"))
        if not known:
            out.append(word)
        elif known.startswith("--"):
            out.append(f"{known}{equals}{value}")
        elif equals or rest:
            out.append(f"{known}={value if equals else rest.pop(0)}")
        else:
            out.append(word)
    return out


def unknown_flag(flag: str, known: Iterable[str]) -> str:
    """Say that a flag does not exist, and what to use: a known one, or nothing that is far off."""
    name = flag.lstrip("-").replace("-", "_")
    names = {word.lstrip("-"): word for word in known}
    aliases, pointers = listed()["aliases"], listed()["pointers"]
    near = difflib.get_close_matches(name, [*names, *aliases, *pointers], n=1, cutoff=NEAR)
    said = f"there is no flag {flag}"
    if not near:
        return f"{said}."
    if near[0] in pointers:
        return f"{said}: {pointers[near[0]].format(ppo=ppo())}."
    return f"{said}. Did you mean '{names.get(near[0]) or aliases[near[0]]}'?"
