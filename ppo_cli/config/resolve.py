"""Resolves layers to one frozen Config with the origin of every value.

All problems are reported at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ppo_cli.algo.estimators import ESTIMATORS
from ppo_cli.config.checks.run import cross_checks
from ppo_cli.config.derived import describe_lowered_batches, fit_batches, train_rows
from ppo_cli.config.layers import (
    DEFAULT,
    REWARD_FILE,
    RUN_ORIGIN,
    DerivedValue,
    Entry,
    Expectation,
    Layers,
    Reset,
    Resolved,
    find_reward_files,
    find_run_code,
    read_layers,
)
from ppo_cli.config.models.known_models import JUDGES
from ppo_cli.config.schema.keys import (
    describe_range,
    find_key,
    nest_values,
    sections,
    set_nested,
    suggest_key,
    table,
    validation_messages,
    value_of,
)
from ppo_cli.config.schema.run import Config
from ppo_cli.config.schema.values import NO, read_free, read_value
from ppo_cli.config.verl.translator import (
    Translator,
    default_layer,
    describe_defaults,
    detect_generation,
)
from ppo_cli.errors import ConfigError
from ppo_cli.redact import hide_settings, redact


def resolve(
    *,
    flags: Mapping[str, tuple[Any, str]],
    preset: str | None,
    config_files: Sequence[Path],
    overrides: Sequence[str],
    environ: Mapping[str, str],
    origins: Mapping[str, str] | None = None,
    run: Path | None = None,
) -> Resolved:
    """Merge the layers and check the result; raises one ConfigError with every problem.

    The settings of a `run` folder are defaults, without what only people may allow. `origins` says
    of variables in `environ` where they really come from, such as SLURM's.
    """
    layers = (flags, preset, config_files, overrides, environ, origins)
    draft = _merge(read_layers(*layers, run=run), environ)
    config = _build(draft)
    if files := find_reward_files(config.reward, named=REWARD_FILE in draft.entries):
        draft = _merge(read_layers(*layers, reward_files=files, run=run), environ)
        config = _build(draft)
        draft.notes += (f"Settings of the reward are read from {f} in this folder." for f in files)
    config = _fit_batches(draft, config)
    hide_settings(config.model_dump())
    for clash in cross_checks(config, environ, verl=draft.verl):
        if not draft.broken.intersection(clash.keys):
            draft.problems.append(f"{_origins_of(draft, clash.keys)}: {clash.text}")
    draft.problems += [
        f"{demand.origin}: {demand.otherwise}"
        for demand in draft.demands
        if not demand.holds(lambda name: value_of(config, name))
    ]
    draft.problems += find_run_code(draft.entries, draft.values, run) if run else ()
    if draft.problems:
        raise ConfigError([redact(line, environ) for line in dict.fromkeys(draft.problems)])
    notes = tuple(dict.fromkeys(draft.notes))
    return Resolved(config, _origins(draft.entries), notes, verl=draft.verl)


BATCHES = ("data.train_batch_size", "actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size")


def _fit_batches(draft: _Draft, config: Config) -> Config:
    """Lower batch sizes that nobody asked for to the rows and the batch there are, and say so."""
    rows, batch = train_rows(config), config.data.train_batch_size
    mini = config.actor.ppo_mini_batch_size
    chosen = {
        name
        for name in BATCHES
        if name in draft.entries and not draft.entries[name].origin.startswith(("preset ", "verl "))
    }
    if rows and rows < batch and not chosen:
        draft.notes.append(describe_lowered_batches(rows, batch, mini))
        batch, mini = fit_batches(rows, batch, mini)
        sizes = {BATCHES[0]: batch, BATCHES[1]: mini}
        why = f"{rows} training rows"
    else:  # too few rows for a batch that was asked for are refused when they have been read
        if mini <= batch or BATCHES[1] in chosen:
            return config
        sizes, why = {BATCHES[1]: batch}, f"a batch of {batch}"
        draft.notes.append(f"--mini_batch_size is lowered to the batch of {batch} prompts.")
    for name, size in sizes.items():
        draft.entries[name] = Entry(name, size, why)
    draft.values |= sizes
    return _validated(draft)


@dataclass
class _Draft:
    """What the layers came to, before it is checked as a whole."""

    entries: dict[str, Entry]
    problems: list[str]
    notes: list[str]
    demands: list[Expectation]
    values: dict[str, Any] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    verl: bool = False


def _merge(gathered: Layers, environ: Mapping[str, str]) -> _Draft:
    verl = detect_generation(gathered.layers, gathered.problems)
    translator = Translator(environ, gathered.problems, gathered.notes, verl is not None)
    draft = _Draft({}, gathered.problems, gathered.notes, translator.demands, verl=verl is not None)
    if verl is not None:
        gathered.layers.insert(0, default_layer(verl))
        gathered.notes.append(describe_defaults(verl))
    for layer in gathered.layers:
        for entry in translator.translate(layer):
            _apply_entry(draft, entry)
    return draft


def _apply_entry(draft: _Draft, entry: Entry) -> None:
    """Put an entry over what lower layers said."""
    key = find_key(entry.name)
    if key is None:
        draft.problems.append(f"{entry.origin}: {_unknown_setting(entry.name, verl=draft.verl)}")
        return
    if key.consent and entry.origin.startswith(RUN_ORIGIN):
        if str(entry.raw).lower() not in NO:
            draft.notes.append(
                f"{entry.origin}: {key.name} is not taken from a run. If you allow it, add "
                f"{key.name}={entry.raw} to the command."
            )
        return
    for name in [n for n in draft.entries if n.startswith(f"{entry.name}.")]:
        del draft.entries[name]
    draft.entries.pop(entry.name, None)
    if not isinstance(entry.raw, Reset):
        draft.entries[entry.name] = entry


def _unknown_setting(name: str, *, verl: bool) -> str:
    if name in sections():
        example = next(k for k in table() if k.startswith(f"{name}."))
        return f"{name} is a group of settings; set one of them, such as {example}."
    return f"there is no setting '{name}'.{suggest_key(name, strict=verl)}"


def _build(draft: _Draft) -> Config:
    late = [e for e in draft.entries.values() if isinstance(e.raw, DerivedValue)]
    late.sort(key=lambda entry: not entry.name.startswith("trainer."))  # others count devices
    for entry in draft.entries.values():
        if not isinstance(entry.raw, DerivedValue):
            _read_entry(draft, entry, entry.raw)
    for entry in late:
        try:
            raw = entry.raw.compute(lambda name: _value(draft, name))
        except ValueError as error:
            _reject(draft, entry.name, f"{entry.origin}: {error}")
            continue
        if raw is not None or table()[entry.name].optional:
            _read_entry(draft, entry, raw)
        else:
            del draft.entries[entry.name]
    _default_judge_model(draft)
    _default_kl_in_reward(draft)
    _check_free_keys(draft)
    return _validated(draft)


def _check_free_keys(draft: _Draft) -> None:
    """Refuse free-form keys below a plain value that another setting gave: it is no group."""
    tree: dict[str, Any] = {}
    for name, value in list(draft.values.items()):
        if owner := set_nested(tree, name, value):
            problem = f"{owner} is one value already, and no group; set it as a group."
            _reject(draft, name, f"{draft.entries[name].origin}: {name}: {problem}")


def _default_judge_model(draft: _Draft) -> None:
    """Give the default provider's judge a model where none is named."""
    kind = _value(draft, "reward.api.type")
    unnamed = _value(draft, "reward.api.enable") and not _value(draft, "reward.api.model")
    model = JUDGES[kind].default
    if not unnamed or model is None or "reward.api.model" in draft.broken:
        return
    _set_default(draft, "reward.api.model", model, f"default of {kind}")
    draft.notes.append(f"The judge is {model} ({kind}); --rm_model names another.")


def _default_kl_in_reward(draft: _Draft) -> None:
    """With a KL loss or gdpo, leave the KL out of the reward unless it is asked for there."""
    name, estimator = "algorithm.use_kl_in_reward", _value(draft, "algorithm.adv_estimator")
    parts = estimator in ESTIMATORS and ESTIMATORS[estimator].parts
    if (_value(draft, "actor.use_kl_loss") or parts) and name not in draft.entries:
        why = f"default with {'gdpo' if parts else 'actor.use_kl_loss'}"
        _set_default(draft, name, "false", why)


def _set_default(draft: _Draft, name: str, raw: str, origin: str) -> None:
    draft.entries[name] = entry = Entry(name, raw, origin)
    _read_entry(draft, entry, raw)


def _value(draft: _Draft, name: str) -> Any:
    return draft.values.get(name, table()[name].default)


def _read_entry(draft: _Draft, entry: Entry, raw: Any) -> None:
    key = find_key(entry.name)
    assert key is not None
    try:
        draft.values[entry.name] = read_value(key, raw) if key.name == entry.name else raw
        if key.name != entry.name:
            draft.values[entry.name] = read_free(raw)
    except ValueError as error:
        allowed = describe_range(key)
        tail = f" ({allowed})" if allowed and not (key.choices or "UTF-8" in str(error)) else ""
        problem = f"{error}{tail}"
        dot = "" if problem[-1] in ".?" else "."
        _reject(draft, entry.name, f"{entry.origin}: {entry.name}: {problem}{dot}")


def _reject(draft: _Draft, name: str, problem: str) -> None:
    draft.problems.append(problem)
    draft.broken.add(name)
    draft.values.pop(name, None)


def _validated(draft: _Draft) -> Config:
    try:
        return Config.model_validate(nest_values(draft.values))
    except ValidationError as error:
        for name, message in validation_messages(error, table()).items():
            _reject(draft, name, f"{draft.entries[name].origin}: {name} {message}.")
    return Config.model_validate(nest_values(draft.values))


def _origins(entries: Mapping[str, Entry]) -> dict[str, str]:
    origins = dict.fromkeys(table(), DEFAULT)
    for name, entry in entries.items():
        key = find_key(name)
        assert key is not None
        origins[key.name] = entry.origin
    return origins


def _origins_of(draft: _Draft, names: Sequence[str]) -> str:
    """Name where the values of a clash were set; with none set, the default."""
    set_by = [entry.origin for n in names if (entry := _find_entry(draft.entries, n)) is not None]
    return ", ".join(dict.fromkeys(set_by)) or DEFAULT


def _find_entry(entries: Mapping[str, Entry], name: str) -> Entry | None:
    """Return the entry that set a value: by its name, as part of a group, or as a group."""
    parts = name.split(".")
    for cut in range(len(parts), 1, -1):
        if (entry := entries.get(".".join(parts[:cut]))) is not None:
            return entry
    return next((e for n, e in entries.items() if n.startswith(f"{name}.")), None)
