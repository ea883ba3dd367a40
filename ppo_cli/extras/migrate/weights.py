"""Weights of a mixture by the name of a score, an older spelling: `weights: {rm_score: 0.7}`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ppo_cli.config.layers import Entry, Layers, merge_layers, read_entry
from ppo_cli.config.mixture import KINDS, SOURCE_KINDS, WEIGHTS
from ppo_cli.config.schema.keys import find_key, nest_values
from ppo_cli.extras.migrate.verl.translations import normalize

# Name of a score -> kind of the part; one of a model may also be the judge's.
SCORE_NAMES = {
    "judge_score": "judge", "api_score": "judge", "rule_score": "rule", "function_score": "rule",
    "rm_score": "model", "model_score": "model",
}  # fmt: skip


def translate(layers: Layers, environ: Mapping[str, str]) -> None:
    """Put the names of parts in place of the names of scores in composite.weights."""
    for layer in layers.layers:
        layer[:] = [single for entry in layer for single in _spread(entry)]
    weights = [
        (layer, at, word)
        for layer in layers.layers
        for at, entry in enumerate(layer)
        for word in (entry.name.removeprefix(f"{WEIGHTS}."),)
        if word in SCORE_NAMES
    ]
    if not weights:
        return
    reward = _read_reward(layers)
    named: dict[tuple[int, str], Entry] = {}
    for layer, at, word in weights:
        entry = layer[at]
        part, problem = _find_part(word, reward)
        # Two names of one score in the same layer must agree.
        earlier = named.setdefault((id(layer), part), entry)
        if normalize(earlier.raw) != normalize(entry.raw):
            problem = f"{earlier.name} is another weight of the same part; keep one."
        if problem:
            layers.problems.append(f"{entry.origin}: {entry.name}: {problem}")
            layers.broken.add(f"{WEIGHTS}.{part}")
        if SCORE_NAMES[word] == "model" and part == "judge":
            layers.notes.append(
                f"No reward model is named, so {word} is the judge's score; --reward_model PATH "
                "takes a reward model."
            )
        layer[at] = Entry(f"{WEIGHTS}.{part}", entry.raw, entry.origin)


def _spread(entry: Entry) -> list[Entry]:
    """Return an entry of all weights as one for each, if names of scores are among them."""
    if entry.name == WEIGHTS:
        with suppress(ValueError):
            weights = read_entry(entry)
            if weights.keys() & SCORE_NAMES.keys():
                return [Entry(f"{WEIGHTS}.{w}", raw, entry.origin) for w, raw in weights.items()]
    return [entry]


def _read_reward(layers: Layers) -> dict[str, Any]:
    """Return what all layers set of the reward; what cannot be read is reported later."""
    values: dict[str, Any] = {}
    for entry in merge_layers(layers.layers).values():
        if entry.name.startswith("reward.") and find_key(entry.name):
            with suppress(ValueError):
                values[entry.name] = read_entry(entry)
    reward: dict[str, Any] = nest_values(values).get("reward", {})
    return reward


def _find_part(word: str, reward: Mapping[str, Any]) -> tuple[str, str]:
    """Return the part that a score's name means, and what is wrong with it."""
    kinds = _list_kinds(reward)
    if word in kinds:  # a part's name wins
        return word, ""
    kind = SCORE_NAMES[word]
    problem = ""
    if kind == "model" and not (reward.get("model", {}).get("path") or "model" in kinds.values()):
        kind = "judge"
        is_off = reward.get("composite", {}).get("enable") is False
        if not (is_off or reward.get("api", {}).get("enable") or "judge" in kinds.values()):
            problem = (
                "neither a reward model nor a judge is named; add --reward_model PATH, or "
                "--use_api_reward for a judge."
            )
    names = [name for name, other in kinds.items() if other == kind]
    if len(names) > 1:
        problem = f"{word} may be {' or '.join(names)}; use the part's own name."
    return (names or [kind])[0], problem


def _list_kinds(reward: Mapping[str, Any]) -> dict[str, str]:
    """Return the kinds of the parts that --reward and composite.parts name."""
    kinds: dict[str, str] = {}
    for text in reward.get("parts", ()):
        kind, *rest = (piece.strip() for piece in text.split(":"))
        kinds[rest[0] if len(rest) == 2 else kind] = kind
    for name, settings in reward.get("composite", {}).get("parts", {}).items():
        inner = settings if isinstance(settings, Mapping) else {}
        sources = {kind for word, kind in SOURCE_KINDS.items() if word in inner}
        usual = name if name in KINDS or len(sources) != 1 else sources.pop()
        kinds.setdefault(name, inner.get("kind") or usual)
    return kinds
