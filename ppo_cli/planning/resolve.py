"""Resolves layers to one frozen Config with the origin of every value.

Readers of packages rewrite foreign names first, so that only our own settings are merged, read and
checked here. All problems are reported at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ppo_cli.addresses import cache_folder, check_store, restore
from ppo_cli.config.layers import (
    DEFAULT,
    REWARD_FILE,
    RUN_ORIGIN,
    Entry,
    Layers,
    find_reward_files,
    find_run_code,
    merge_layers,
    read_entry,
    read_layers,
)
from ppo_cli.config.mixture import read_judge
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
)
from ppo_cli.config.schema.run import Config
from ppo_cli.config.schema.values import NO
from ppo_cli.config.settle import settle
from ppo_cli.errors import ConfigError, is_address, plural
from ppo_cli.machine.machine import Machine
from ppo_cli.planning.batches import describe_lowered_batches, fit_batches, train_rows
from ppo_cli.planning.findings.rules import find_clashes
from ppo_cli.planning.findings.scene import Scene
from ppo_cli.planning.resolved import Resolved
from ppo_cli.plugins import import_name, load_all
from ppo_cli.secrets.known import hide_settings
from ppo_cli.secrets.redact import redact, redact_url

# Sizes that are lowered to the number of training rows when nobody chose them.
BATCHES = ("data.train_batch_size", "actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size")


def resolve(
    *,
    flags: Mapping[str, tuple[Any, str]],
    preset: str | None,
    config_files: Sequence[Path],
    overrides: Sequence[str],
    environ: Mapping[str, str],
    origins: Mapping[str, str] | None = None,
    run: Path | None = None,
    machine: Machine | None = None,
    foreign: Mapping[str, tuple[str, str]] | None = None,
) -> Resolved:
    """Merge the layers, decide what is unset and has a rule, and check the result.

    Raises one ConfigError with every problem. `machine` is this one unless it is given. The
    settings of a `run` folder come next after a preset's (`read_layers` has the order), without
    those that only people may allow. `origins`
    names where variables in `environ` really come from, such as SLURM. `foreign` has the defaults
    of the program that the line was written for.
    """
    machine = machine or Machine.here(environ)
    sources = (flags, preset, config_files, overrides, environ, machine, origins, foreign)
    draft = _merge_layers(read_layers(*sources, run=run), machine)
    config = _build_config(draft)
    # Only the merged settings tell whether a judge or a reward model wants its file in this folder.
    if files := find_reward_files(config.reward, named=REWARD_FILE in draft.entries):
        draft = _merge_layers(read_layers(*sources, reward_files=files, run=run), machine)
        config = _build_config(draft)
        draft.notes += (f"Settings of the reward are read from {f} in this folder." for f in files)
    # Clashes are looked for in what holds, and secrets are hidden before anything is shown.
    config = _fit_batches(draft, config)
    hide_settings(nest_values(draft.texts))
    settled = settle(config, machine)
    notes = tuple(dict.fromkeys(draft.notes))
    resolved = Resolved(
        requested=config, config=settled.config, origins=_list_origins(draft.entries),
        why=settled.why, machine=machine, notes=notes, foreign=draft.foreign,
    )  # fmt: skip
    # A clash of settings that could not be read would only repeat that problem.
    for clash in find_clashes(Scene(resolved, environ)):
        if not draft.broken.intersection(clash.keys):
            draft.problems.append(f"{_origins_of(draft, clash.keys)}: {clash.text}")
    draft.problems += find_run_code(draft.entries, draft.values, run) if run else ()
    if draft.problems:
        raise ConfigError([redact(line, environ) for line in dict.fromkeys(draft.problems)])
    return resolved


def _fit_batches(draft: _Draft, config: Config) -> Config:
    """Return the config with batch sizes lowered to the rows, and the mini-batch to the batch.

    Only sizes that nobody chose are lowered, with a note.
    """
    rows, batch = train_rows(config.data), config.data.train_batch_size
    mini = config.actor.ppo_mini_batch_size
    # Sizes of a preset or of another program's defaults count as not chosen.
    chosen = {
        name
        for name in BATCHES
        if name in draft.entries and not draft.entries[name].origin.startswith(("preset ", DEFAULT))
    }
    # Few rows: lower both sizes. A small batch: lower the mini-batch.
    if rows and rows < batch and not chosen:
        draft.notes.append(describe_lowered_batches(rows, batch, mini))
        batch, mini = fit_batches(rows, batch, mini)
        sizes = {BATCHES[0]: batch, BATCHES[1]: mini}
        why = plural(rows, "training row")
    else:  # too few rows for a chosen batch are refused once the rows have been read
        if mini <= batch or BATCHES[1] in chosen:
            return config
        sizes, why = {BATCHES[1]: batch}, f"a batch of {batch}"
        draft.notes.append(f"--mini_batch_size is lowered to the batch of {batch} prompts.")
    # The new sizes are entries too, so that the plan shows where they are from.
    for name, size in sizes.items():
        draft.entries[name] = Entry(name, size, why)
    draft.values |= sizes
    return _validate_config(draft)


@dataclass
class _Draft:
    """The merged layers before they are checked as a whole."""

    entries: dict[str, Entry]
    problems: list[str]
    notes: list[str]
    broken: set[str]  # settings whose value was refused
    foreign: bool
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def texts(self) -> dict[str, Any]:
        """The values that may hold a secret: texts, lists and groups."""
        return {name: v for name, v in self.values.items() if isinstance(v, str | tuple | dict)}


def _merge_layers(layers: Layers, machine: Machine) -> _Draft:
    """Let readers rewrite foreign names, then each layer win over those before it."""
    readers, broken = load_all("readers")
    layers.notes += broken
    for reader in readers:
        if reader.layers:
            import_name(reader.layers)(layers, machine)
    entries = merge_layers([list(_accept_entries(layer, layers)) for layer in layers.layers])
    return _Draft(entries, layers.problems, layers.notes, layers.broken, layers.foreign)


def _accept_entries(layer: list[Entry], layers: Layers) -> Iterator[Entry]:
    """Yield the entries that name a setting; leave out consents that come from a run folder."""
    for entry in layer:
        key = find_key(entry.name)
        if key is None and entry.origin.startswith(tuple(layers.of_runs)):
            layers.notes.append(f"{entry.origin}: {entry.name} is no setting any more: left out.")
        elif key is None:
            layers.problems.append(f"{entry.origin}: {_describe_unknown(entry.name)}")
        elif not (key.consent and entry.origin.startswith(RUN_ORIGIN)):
            yield entry
        elif str(entry.raw).lower() not in NO:
            # A consent that the run had: a person must give it again.
            layers.notes.append(
                f"{entry.origin}: {key.name} is not taken from a run. If you allow it, add "
                f"{key.name}={entry.raw} to the command."
            )


def _describe_unknown(name: str) -> str:
    if name in sections():
        example = next(k for k in table() if k.startswith(f"{name}."))
        return f"{name} is a group of settings; set one of them, such as {example}."
    return f"there is no setting '{name}'.{suggest_key(name)}"


def _build_config(draft: _Draft) -> Config:
    """Read all values, fill in defaults that depend on other settings, and validate."""
    # Values first: defaults and validation depend on them.
    for entry in list(draft.entries.values()):
        _read_value(draft, entry)
    _split_cascade(draft)
    _default_judge_model(draft)
    _default_environment_reward(draft)
    _place_run_folder(draft)
    _check_free_keys(draft)
    return _validate_config(draft)


def _check_free_keys(draft: _Draft) -> None:
    """Refuse free-form keys below a setting that another entry made a plain value."""
    tree: dict[str, Any] = {}
    for name, value in list(draft.values.items()):
        if owner := set_nested(tree, name, value):
            problem = f"{owner} has one plain value already and is not a group."
            _reject(draft, name, f"{draft.entries[name].origin}: {name}: {problem}")


def _split_cascade(draft: _Draft) -> None:
    """Read `--rm_cascade CHEAPER,JUDGE`: the second name gives the settings of the judge."""
    key, at = "reward.api.cascade.model", "reward.api"
    cheaper, comma, judge = (name.strip() for name in (draft.values.get(key) or "").partition(","))
    if not comma or "," in judge:
        return
    origin = draft.entries[key].origin
    judges = nest_values(draft.values).get("reward", {}).get("api", {}).get("judges", {})
    try:
        settings = read_judge(judges, judge)
    except ConfigError as error:
        _reject(draft, key, f"{origin}: {error}")
        return
    for name, value in settings.items():
        other = draft.values.setdefault(f"{at}.{name}", value)
        if other != value:
            problem = f"names {judge} as the judge, but {at}.{name} is {other}; keep one of the two"
            _reject(draft, key, f"{origin}: {key} {problem}.")
            draft.broken.add(f"{at}.model")
            return
        draft.entries.setdefault(f"{at}.{name}", Entry(f"{at}.{name}", f"{value}", origin))
    _set_default(draft, key, cheaper, origin)


def _default_judge_model(draft: _Draft) -> None:
    """Choose the provider's default model for a judge that has none."""
    kind = _get_value(draft, "reward.api.type")
    unnamed = _get_value(draft, "reward.api.enable") and not _get_value(draft, "reward.api.model")
    model = JUDGES[kind].default
    if not unnamed or model is None or "reward.api.model" in draft.broken:
        return
    _set_default(draft, "reward.api.model", model, f"default of {kind}")
    draft.notes.append(f"The judge is {model} ({kind}); --rm_model names another.")


# What scores responses: a run with an environment and none of these has the environment's reward.
REWARD_SOURCES = (
    "reward.parts", "reward.composite.", "reward.api.enable", "reward.model.path",
    "reward.function", "reward.rule",
)  # fmt: skip


def _default_environment_reward(draft: _Draft) -> None:
    """Without another reward, that of an environment is the reward."""
    sources = (value for name, value in draft.values.items() if name.startswith(REWARD_SOURCES))
    if _get_value(draft, "environment.path") and not any(sources):
        for name, raw in (("kind", "environment"), ("scaling", "none"), ("weight", "1")):
            key = f"reward.composite.parts.environment.{name}"
            _set_default(draft, key, raw, "default with --environment")


def _place_run_folder(draft: _Draft) -> None:
    """Where an address names the run folder, the run is in a local one with a copy there."""
    folder = "trainer.output_dir"
    url = restore(draft.values.get(folder) or "")
    # A copy belongs to one folder: the settings of a run bring none to another folder.
    origins = [draft.entries[name].origin.partition(" line ")
               for name in ("trainer.store", folder) if name in draft.entries]  # fmt: skip
    if draft.values.get("trainer.store") and origins[0][1] and origins[0][0] != origins[-1][0]:
        del draft.entries["trainer.store"]
        draft.values.pop("trainer.store", None)
    if url.startswith("file://"):  # a folder of this machine
        path = f"/{url.removeprefix('file://').lstrip('/')}"
        _set_default(draft, folder, path, draft.entries[folder].origin)
    elif is_address(url):
        origin = draft.entries[folder].origin
        try:
            if (draft.values.get("trainer.store") or url) != url:
                raise ValueError("and trainer.store name two addresses")
            check_store(url)
        except ValueError as error:
            _reject(draft, folder, f"{origin}: {folder} {error}.")
            return
        _set_default(draft, "trainer.store", url, origin)
        _set_default(draft, folder, cache_folder("runs", url), f"{origin} (local folder)")
    if store := draft.values.get("trainer.store"):
        place = draft.values.get(folder) or table()[folder].default
        draft.notes.append(
            f"The run folder is {place}, and its copy {redact_url(store)}: the newer one goes on."
        )


def _set_default(draft: _Draft, name: str, raw: str, origin: str) -> None:
    draft.entries[name] = entry = Entry(name, raw, origin)
    _read_value(draft, entry)


def _get_value(draft: _Draft, name: str) -> Any:
    return draft.values.get(name, table()[name].default)


def _read_value(draft: _Draft, entry: Entry) -> None:
    """Store the typed value of an entry; report one that cannot be read, with the range.

    A null of a setting with a rule leaves it unset: it is no entry either.
    """
    key = find_key(entry.name)
    assert key is not None
    try:
        draft.values[entry.name] = read_entry(entry)
        if draft.values[entry.name] is None and key.rule is not None:
            del draft.values[entry.name], draft.entries[entry.name]  # unset: the rule decides
    except ValueError as error:
        # The range helps with numbers; choices are in the message already.
        allowed = describe_range(key)
        tail = f" ({allowed})" if allowed and not (key.choices or "UTF-8" in str(error)) else ""
        problem = f"{error}{tail}"
        dot = "" if problem[-1] in ".?" else "."
        _reject(draft, entry.name, f"{entry.origin}: {entry.name}: {problem}{dot}")


def _reject(draft: _Draft, name: str, problem: str) -> None:
    draft.problems.append(problem)
    draft.broken.add(name)
    draft.values.pop(name, None)


def _validate_config(draft: _Draft) -> Config:
    """Return the configuration; values that pydantic refuses are reported and left out."""
    # A second try without the refused values, so that the other checks can still run.
    try:
        return Config.model_validate(nest_values(draft.values))
    except ValidationError as error:
        for name, message in validation_messages(error, table()).items():
            _reject(
                draft,
                name,
                f"{draft.entries[name].origin}: {name} {message}" + "." * (message[-1] not in ".?"),
            )
    return Config.model_validate(nest_values(draft.values))


def _list_origins(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return the origin of every setting by dotted name."""
    origins = dict.fromkeys(table(), DEFAULT)
    # Free-form keys count for the setting that they are below.
    for name, entry in entries.items():
        key = find_key(name)
        assert key is not None
        origins[key.name] = entry.origin
    return origins


def _origins_of(draft: _Draft, names: Sequence[str]) -> str:
    """Return the origins of the settings of a clash; `default` when none of them was set."""
    set_by = [entry.origin for n in names if (entry := _find_entry(draft.entries, n)) is not None]
    return ", ".join(dict.fromkeys(set_by)) or DEFAULT


def _find_entry(entries: Mapping[str, Entry], name: str) -> Entry | None:
    """Return the entry that set a value: by its name, as part of a group, or as a group."""
    # From the full name to its groups, then a value below it.
    parts = name.split(".")
    for cut in range(len(parts), 1, -1):
        if (entry := entries.get(".".join(parts[:cut]))) is not None:
            return entry
    return next((e for n, e in entries.items() if n.startswith(f"{name}.")), None)
