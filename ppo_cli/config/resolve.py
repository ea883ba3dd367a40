"""Resolves layers to one frozen Config with the origin of every value.

Here too are the settings that clash, which no single one can tell. All problems are reported at
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ppo_cli.algo.estimators import ESTIMATORS, POLICY_LOSSES
from ppo_cli.config.derived import (
    critic_mini_batch,
    describe_lowered_batches,
    fit_batches,
    gpu_count,
    lower_clip,
    train_rows,
    upper_clip,
    uses_critic,
)
from ppo_cli.config.device_checks import cluster_clashes
from ppo_cli.config.keys import (
    NO,
    Clash,
    describe_range,
    find_key,
    nest_values,
    read_free,
    read_value,
    sections,
    set_nested,
    suggest_key,
    table,
    validation_messages,
    value_of,
)
from ppo_cli.config.layers import (
    FILE,
    RUN_ORIGIN,
    DerivedValue,
    Entry,
    Expectation,
    Layers,
    Reset,
    find_reward_files,
    find_run_code,
    read_layers,
)
from ppo_cli.config.mixture import has_mixture
from ppo_cli.config.model_checks import head_clashes, model_clashes
from ppo_cli.config.models.known_models import JUDGES
from ppo_cli.config.reward_checks import judge_clashes, mixture_clashes
from ppo_cli.config.schema import Config
from ppo_cli.config.verl import Translator, default_layer, describe_defaults, detect_generation
from ppo_cli.errors import ConfigError
from ppo_cli.redact import hide_settings, redact


def cross_checks(config: Config, environ: Mapping[str, str], *, verl: bool) -> list[Clash]:
    """Return every clash between settings; `verl` takes what changes nothing in its lines."""
    return [
        *_batches(config),
        *_estimator(config),
        *_groups(config),
        *_clips(config),
        *_losses(config),
        *([] if verl else _kl(config)),
        *cluster_clashes(config, gpu_count(environ), environ),
        *head_clashes(config),
        *_schedule(config),
        *_reward(config),
        *_shaping(config),
        *mixture_clashes(config),
        *judge_clashes(config),
        *model_clashes(config, gpu_count(environ)),
    ]


def _batches(config: Config) -> Iterator[Clash]:
    batch, mini = config.data.train_batch_size, config.actor.ppo_mini_batch_size
    sizes = [("actor.ppo_mini_batch_size", mini)]
    if uses_critic(config) and config.critic.ppo_mini_batch_size is not None:
        sizes.append(("critic.ppo_mini_batch_size", critic_mini_batch(config)))
    for key, size in sizes:
        keys = (key, "data.train_batch_size")
        if size > batch:
            yield Clash(
                keys,
                f"{key} {size} is larger than data.train_batch_size {batch}; a mini-batch is a "
                f"part of the batch. Use {batch} or less.",
            )
        elif batch % size:
            divisor = next(n for n in range(size, 0, -1) if batch % n == 0)
            yield Clash(
                keys,
                f"data.train_batch_size {batch} is not divisible by {key} {size}. "
                f"Use a mini-batch of {divisor}, or a batch of "
                f"{batch - batch % size}.",
            )


def _estimator(config: Config) -> Iterator[Clash]:
    name = config.algorithm.adv_estimator
    if ESTIMATORS[name].grouped and config.rollout.n < 2:
        yield Clash(
            ("algorithm.adv_estimator", "rollout.n"),
            f"the estimator {name} compares several responses to a prompt, but rollout.n is "
            f"{config.rollout.n}. Use --rollout_n 4, or --adv_estimator gae.",
        )
    keys, weights = config.algorithm.gdpo_reward_keys, config.algorithm.gdpo_reward_weights
    if ESTIMATORS[name].parts:
        yield from _parts(config)
    elif keys or weights:
        yield Clash(
            ("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"),
            f"parts of the reward are named for gdpo, but the estimator is {name}; use "
            "--adv_estimator gdpo, or leave them out.",
        )
    if name == "remax" and config.algorithm.gamma != 1.0:
        yield Clash(
            ("algorithm.gamma", "algorithm.adv_estimator"),
            f"remax knows no discount, but algorithm.gamma is {config.algorithm.gamma:g}. "
            "Use --gamma 1.",
        )
    if not uses_critic(config) and config.trainer.critic_warmup:
        yield Clash(
            ("trainer.critic_warmup", "algorithm.adv_estimator"),
            f"the estimator {name} trains no critic, so trainer.critic_warmup "
            f"{config.trainer.critic_warmup} would leave steps without any update. Use 0.",
        )


def _groups(config: Config) -> Iterator[Clash]:
    """What dynamic sampling needs."""
    groups, n = config.algorithm.filter_groups, config.rollout.n
    size, batch = config.data.gen_batch_size, config.data.train_batch_size
    switch = "algorithm.filter_groups.enable"
    if not groups.enable:
        if size is not None and size != batch:
            yield Clash(
                ("data.gen_batch_size", switch),
                f"data.gen_batch_size {size} is not data.train_batch_size {batch}, and only "
                f"dynamic sampling samples other prompts than it trains on: set {switch}=true, or "
                "leave it out.",
            )
        return
    if n < 2:
        yield Clash(
            (switch, "rollout.n"),
            f"{switch} compares several responses to a prompt, not {n}. Use --rollout_n 4.",
        )
    if config.trainer.async_steps:
        yield Clash(
            (switch, "trainer.async_steps"),
            f"{switch} waits for scores, so sampling cannot run ahead; leave --async_steps out.",
        )
    if groups.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        yield Clash(
            ("algorithm.filter_groups.metric", "algorithm.use_kl_in_reward"),
            "with the KL in the reward every seq_final_reward differs: use metric=seq_reward.",
        )


def _parts(config: Config) -> Iterator[Clash]:
    """What gdpo needs, and what it would not read: it takes the parts, not their total."""
    algorithm, shaping = config.algorithm, config.reward.shaping
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if not keys:
        yield Clash(
            ("algorithm.adv_estimator",),
            "gdpo needs the names of the parts of the reward: algorithm.gdpo_reward_keys=[a,b], as "
            "a reward function returns them beside score, or as the parts of a mixture are called.",
        )
    if weights and len(weights) != len(keys):
        yield Clash(
            ("algorithm.gdpo_reward_weights", "algorithm.gdpo_reward_keys"),
            f"algorithm.gdpo_reward_weights has {len(weights)} numbers for {len(keys)} parts.",
        )
    if algorithm.use_kl_in_reward:
        yield Clash(
            ("algorithm.use_kl_in_reward", "algorithm.adv_estimator"),
            "gdpo reads the parts of the reward, and not the KL in it; use actor.use_kl_loss=true "
            "instead of algorithm.use_kl_in_reward.",
        )
    if shaping != type(shaping)():
        yield Clash(
            ("reward.shaping", "algorithm.adv_estimator"),
            "gdpo reads the parts of the reward, and not what reward.shaping makes of their sum; "
            "leave reward.shaping out.",
        )


def _clips(config: Config) -> Iterator[Clash]:
    actor, kind = config.actor, config.actor.policy_loss.loss_mode
    if lower_clip(actor) >= 1 and kind not in ("cispo", "geo_mean"):
        yield Clash(
            ("actor.clip_ratio_low",),
            f"the lower clip range {lower_clip(actor):g} must be below 1.",
        )
    elif lower_clip(actor) > upper_clip(actor) and kind not in ("cispo", "geo_mean"):
        yield Clash(
            ("actor.clip_ratio_low", "actor.clip_ratio_high", "actor.clip_ratio"),
            f"the lower clip range {lower_clip(actor):g} is above the upper one "
            f"{upper_clip(actor):g}; swap actor.clip_ratio_low and actor.clip_ratio_high.",
        )
    bound = actor.clip_ratio_c if POLICY_LOSSES[kind].dual else None
    if bound is not None and upper_clip(actor) + 1 >= bound:
        yield Clash(
            ("actor.clip_ratio_c", "actor.clip_ratio_high", "actor.clip_ratio"),
            f"the dual-clip bound actor.clip_ratio_c {bound:g} lies inside the clip "
            f"range (1 + {upper_clip(actor):g}); use 3, or a smaller range.",
        )


def _losses(config: Config) -> Iterator[Clash]:
    chosen = config.actor.policy_loss
    if chosen.clip_cov_lb >= chosen.clip_cov_ub:
        yield Clash(
            ("actor.policy_loss.clip_cov_lb", "actor.policy_loss.clip_cov_ub"),
            f"actor.policy_loss.clip_cov_lb {chosen.clip_cov_lb:g} must be below clip_cov_ub "
            f"{chosen.clip_cov_ub:g}.",
        )
    for who, part in (("actor", config.actor), ("critic", config.critic)):
        if part.loss_scale_factor is not None and part.loss_agg_mode != "seq-mean-token-sum-norm":
            yield Clash(
                (f"{who}.loss_scale_factor", f"{who}.loss_agg_mode"),
                f"{who}.loss_scale_factor has a meaning only with {who}.loss_agg_mode="
                f"seq-mean-token-sum-norm, not with {part.loss_agg_mode}.",
            )
        if part.optim.lr_scheduler_type == "constant" and part.optim.min_lr_ratio:
            yield Clash(
                (f"{who}.optim.min_lr_ratio", f"{who}.optim.lr_scheduler_type"),
                f"{who}.optim.min_lr_ratio is the floor of the cosine; use it with "
                f"{who}.optim.lr_scheduler_type=cosine.",
            )


def _kl(config: Config) -> Iterator[Clash]:
    algorithm = config.algorithm
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive":
        if algorithm.kl_ctrl.kl_coef == 0:
            yield Clash(
                ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.type"),
                "an adaptive KL coefficient that starts at 0 stays there; use --kl_coef 0.001.",
            )
    elif algorithm.kl_ctrl.type == "adaptive":
        yield Clash(
            ("algorithm.kl_ctrl.type", "algorithm.use_kl_in_reward"),
            "the adaptive controller steers the KL in the reward, which is off; set "
            "algorithm.use_kl_in_reward=true.",
        )


def _schedule(config: Config) -> Iterator[Clash]:
    warmup, steps = config.trainer.critic_warmup, config.trainer.total_training_steps
    if steps is not None and 0 < steps <= warmup:
        yield Clash(
            ("trainer.critic_warmup", "trainer.total_training_steps"),
            f"trainer.critic_warmup {warmup} never lets the actor train in {steps} step(s); use "
            f"{steps - 1} or less, or more --max_steps.",
        )
    if config.trainer.patience is not None and config.trainer.test_freq < 1:
        yield Clash(
            ("trainer.patience", "trainer.test_freq"),
            "--patience counts validations, but there are none on the way; set --test_freq 10.",
        )
    if config.trainer.patience is not None and not config.data.val_files:
        yield Clash(
            ("trainer.patience", "data.val_files"),
            "--patience watches validation, but there are no validation prompts: --val_files FILE.",
        )


def _reward(config: Config) -> Iterator[Clash]:
    reward = config.reward
    sources = {
        "reward.api.enable": ("judge", reward.api.enable),
        "reward.model.path": ("model", reward.model.path is not None),
        "reward.function": ("rule", reward.function is not None),
        "reward.rule": (f"rule:{reward.rule}", reward.rule is not None),
    }
    keys = tuple(key for key, (_, is_set) in sources.items() if is_set)
    if has_mixture(reward):
        if reward.function is not None and reward.rule is not None:
            yield Clash(
                ("reward.rule", "reward.function"),
                "reward.function and reward.rule each say how a part of kind rule scores; keep "
                f"one, and give the other a part of its own: --reward rule:{reward.rule}:0.2.",
            )
    elif len(keys) > 1:
        share = f"{1 / len(keys):.2g}"
        mix = " ".join(f"--reward {sources[key][0]}:{share}" for key in keys)
        out = " without --rule" if keys[-2:] == ("reward.function", "reward.rule") else ""
        yield Clash(
            keys,
            f"{', '.join(keys[:-1])} and {keys[-1]} each say how every row is scored. Keep one, or "
            f"mix them{out}: {mix}.",
        )


def _shaping(config: Config) -> Iterator[Clash]:
    buffer, longest = config.reward.shaping.overlong_buffer, config.data.max_response_length
    if buffer is not None and buffer > longest:
        yield Clash(
            ("reward.shaping.overlong_buffer", "data.max_response_length"),
            f"reward.shaping.overlong_buffer {buffer} is longer than the longest response "
            f"({longest} tokens), so no response is without a penalty; use {max(1, longest // 4)}.",
        )


DEFAULT = "default"


@dataclass(frozen=True)
class Resolved:
    """A checked configuration, where each value came from, and remarks to print."""

    config: Config
    origins: dict[str, str]
    notes: tuple[str, ...] = ()
    verl: bool = False


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
    if files := find_reward_files(config.reward, named=FILE in draft.entries):
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
