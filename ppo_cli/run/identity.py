"""The identity of a run or an eval: settings by their declared `Identity`, and contents of files.

A setting's declaration says whether another value makes another run. Files and rows that a setting
names count by their content. `run/assemble.py` saves the result of `run_identity` in each
checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from ppo_cli.config.layers import AS_BEGUN, DEFAULT
from ppo_cli.config.mixture import (
    OF_REWARD,
    SECTIONS,
    find_declaration,
    further_judges,
    judges_of,
    mixture_of,
    models_of,
    other_judge,
    read_judge,
    rules_of,
)
from ppo_cli.config.schema.keys import keys_of, table, value_of
from ppo_cli.config.schema.reward import ApiReward, ModelReward, Reward
from ppo_cli.config.schema.run import Config, Trainer
from ppo_cli.data_sets.table import BY_FILES, PromptTable, fingerprint_of
from ppo_cli.digests import NAMED_IN, digest_text, require_resumable
from ppo_cli.errors import ConfigError, UserError
from ppo_cli.paths import user_path
from ppo_cli.planning.findings.rules import find_findings
from ppo_cli.planning.findings.unused import has_effect
from ppo_cli.planning.run_plan import RunPlan, make_plan
from ppo_cli.plugins import package_versions
from ppo_cli.records import Prompt
from ppo_cli.report.page.run_data import read_settings
from ppo_cli.run_folder.checkpoints import read_state, refuse_late_pretraining
from ppo_cli.run_folder.contents import CONTENTS, ROWS, digest_contents
from ppo_cli.run_folder.folder import read_decisions, run_settings
from ppo_cli.run_folder.restraints import read_restraints
from ppo_cli.secrets.redact import mask_secrets

# The fingerprint of prompts, and what it does not include.
TRAIN_FILES = "data.train_files"
TRAIN_EXTRA_INFO = "data.train_files: extra_info"
TRAIN_COLUMNS = "data.train_files: columns"
# Decisions of these identities bind a run, and those of these settings, which change its numbers.
BINDING = ("run", "checkpoint")
KEPT = ("model.packing", "model.attn_implementation", "model.float32_matmul")
SHOWN_CHARACTERS = 60  # of a value in a message


def run_identity(
    config: Config, prompts: Sequence[Prompt], val_prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Return the values that identify a run, by key, as they are read back from a checkpoint.

    If one differs, `--resume auto` starts a new run.
    """
    rows = {TRAIN_FILES: fingerprint_of(prompts)}
    if not isinstance(prompts, PromptTable):  # whose fingerprint is that of the whole files
        rows[TRAIN_EXTRA_INFO] = digest_value([prompt.extra_info for prompt in prompts])
        columns = [prompt.columns for prompt in prompts]
        rows |= {TRAIN_COLUMNS: digest_value(columns)} if any(columns) else {}
    return setting_values(config) | rows | {"data.val_files": digest_rows(val_prompts)}


def is_by_files(checkpoint: Path) -> bool:
    """Whether the run of a checkpoint knows its training prompts by their files."""
    with suppress(UserError):  # a damaged one is reported where it is compared
        return str(read_state(checkpoint)["fingerprint"].get(TRAIN_FILES)).startswith(BY_FILES)
    return False


def setting_values(config: Config, *, of_eval: bool = False) -> dict[str, Any]:
    """Return the settings that identify a run, or those that score an eval.

    An eval has those of its environment too, if it plays episodes. Secrets
    are masked. Models and files that the reward reads are included with their digests, and packages
    with plug-ins with their versions.
    """
    free = {"start"} if of_eval else {"start", "eval"}
    # Settings of a free identity do not count; rows count by content.
    values = {
        name: mask_secrets(value_of(config, name))
        for name, key in table().items()
        if key.identity not in free and name not in ROWS
        if name.startswith("reward.")
        or not of_eval
        or (config.environment.is_set and name.startswith("environment."))
    }
    values["reward.composite.parts"] = mask_secrets(_part_settings(config.reward, free))
    values = _without_rules(values) | _list_decisions(config.reward, free)
    named = [
        v
        for k, v in values.items()
        if k.startswith(("reward.", "environment.")) or k.endswith(".path") or ".py:" in str(v)
    ]
    values[CONTENTS] = dict(digest_contents([*named, *_find_modules(config.reward)]))
    values["plugins"] = package_versions(values)
    # Functions and rows of a call in Python are in the run folder, which may move.
    folder = user_path(config.trainer.output_dir).absolute()
    text = json.dumps(values, default=str).replace(json.dumps(f"{folder}/")[1:-1], "")
    plain: dict[str, Any] = json.loads(text)
    return plain


def _find_modules(reward: Reward) -> Iterator[str]:
    """Yield the files of the installed modules that hold the functions of a reward."""
    functions = {rules.function for rules in rules_of(reward) if rules.function}
    if functions:
        from ppo_cli.rewards.function import find_function

        for spec in sorted(functions):
            with suppress(UserError):  # what is missing is reported by the reward
                path, _, module = find_function(spec)
                yield from [str(path)] * bool(module)


def digest_rows(prompts: Iterable[Prompt]) -> str:
    """Return a digest of everything that a model and a reward read of prompts."""
    return digest_value(
        [
            (p.uid, p.messages, p.data_source, p.ground_truth, p.extra_info)
            + ((p.columns,) if p.columns else ())
            for p in prompts
        ]
    )


def digest_value(value: Any) -> str:
    """Return a short digest of a JSON value."""
    text = json.dumps(value, sort_keys=True, default=str)
    return digest_text(text, 12)


def _apply_restraints(plan: RunPlan, run: Path, step: int) -> tuple[RunPlan, set[str]]:
    """Return the plan with what a run has restrained until `step`, and all settings this changes.

    Some follow from another: actor.kl_loss_coef from the coefficient in the reward.
    A setting that somebody has changed since keeps their value. Where the reference is the initial
    model in full, and nobody has named it, it is now the checkpoint of the last return: the KL
    must not undo what was learned before.
    """
    changes, origin, restraints = dict[str, Any](), "", read_restraints(run, step)
    if restraints and "ref.path" in plan.why and not plan.settings.shares_reference:
        to = restraints[-1].to
        checkpoint = run / "checkpoints" / f"step_{to:06d}" / "actor"
        changes["ref.path"] = str(checkpoint) if to else plan.settings.model.path
    for restraint in restraints:
        for key, (before, now) in restraint.changes.items():
            if key in changes or value_of(plan.settings, key) == before:
                changes[key], origin = now, f"restrained after step {restraint.after}"
    if not changes:
        return plan, set()
    restrained = plan.amend(changes, origin)
    values = ((key, value_of(restrained.settings, key)) for key in table())
    return restrained, {key for key, value in values if value != value_of(plan.settings, key)}


def keep_decisions(plan: RunPlan, run: Path, step: int = 0) -> tuple[RunPlan, set[str], list[str]]:
    """Return the plan with what the run that goes on after `step` has decided, and notes on it.

    What nobody has set may be decided otherwise on this machine; the run goes on as it began. The
    set has the settings for which that is not possible here, or which the run has restrained: they
    do not make another run.
    """
    restrained = set[str]()
    # A fork begins without the restraints of the run before it.
    if run.resolve() == user_path(plan.settings.trainer.output_dir).resolve():
        plan, restrained = _apply_restraints(plan, run, step)
    decided = _read_defaults(run) | read_decisions(run)
    before = {
        key: value
        for key, value in decided.items()
        if key in plan.why and _binds(key)
        if value != value_of(plan.settings, key)
    }
    # What is refused here is left to this machine.
    kept, kept_plan = dict(before), plan
    while kept:
        resolved = plan.resolved.amend(kept, AS_BEGUN)
        findings = find_findings(resolved)
        refused = {key for finding in findings if finding.kind == "refuse" for key in finding.keys}
        if refused.isdisjoint(kept):
            kept_plan = make_plan(resolved, findings)
            break
        kept = {key: value for key, value in kept.items() if key not in refused}
    notes = [
        f"{key} is {_format_value(value_of(plan.settings, key))}: {plan.resolved.origins[key]}."
        for key in sorted(restrained & {*plan.settings.kl_weights, "ref.path"})
    ]
    for key, value in before.items():
        if not has_effect(kept_plan.settings, find_declaration(key)):
            continue
        then, now = _format_value(value), _format_value(value_of(plan.settings, key))
        if key in kept:
            notes.append(
                f"{key} is {then}, as this run began; a new run would have {now} ({plan.why[key]})."
            )
        else:
            notes.append(f"{key} was {then}, and is {now}: {plan.why[key]}.")
    return kept_plan, before.keys() - kept.keys() | restrained, notes


def _binds(key: str) -> bool:
    """Whether a decision for a setting belongs to its run."""
    declaration = find_declaration(key)
    return key in KEPT or (declaration is not None and declaration.identity in BINDING)


def _read_defaults(run: Path) -> dict[str, Any]:
    """Return the defaults of a run from its config.yaml: an older version may have had others."""
    values = {
        key: yaml.safe_load(value)
        for key, value, origin in read_settings(run)[0]
        if origin.startswith(DEFAULT) and key in table()
    }
    return {key: value for key, value in values.items() if value not in (None, "auto")}


def find_differences(checkpoint: Path, identity: Mapping[str, Any], *, bound: bool = False) -> str:
    """Describe how the run of a checkpoint differs from this one; empty if it is the same.

    With `bound`, only settings count without which the checkpoint cannot be loaded. Values that an
    older version did not save in the checkpoint are read from the run's config.yaml.
    """
    saved: dict[str, Any] = read_state(checkpoint)["fingerprint"]
    if identity.keys() - saved.keys():
        with suppress(UserError):
            saved = setting_values(run_settings(checkpoint.parents[1])) | saved
    saved = drop_undecided(saved, read_decisions(checkpoint.parents[1]))
    if bound:
        binding = {key for key, setting in table().items() if setting.identity == "checkpoint"}
        identity = {key: value for key, value in identity.items() if key in binding}
    return describe_changes(saved, identity)


def find_changes(
    checkpoint: Path | None, trainer: Trainer, pretrain_steps: int, identity: Mapping[str, Any],
    command: str,
) -> str:  # fmt: skip
    """Describe how the run of a checkpoint differs from this one; empty if this one resumes it.

    Without a checkpoint it is the run that went back to its start in the same folder. A plan's
    `identity` lacks the rows, so they are not compared there. Raises UserError for a damaged
    checkpoint, with `command` in its advice, and for one of another run that --resume names.
    """
    if checkpoint is None:
        restraint = read_restraints(user_path(trainer.output_dir))[-1]
        return describe_changes(restraint.fingerprint, identity)
    # The identity decides whether this is the same run: it has to be intact.
    require_resumable(checkpoint, command, NAMED_IN)
    # A named checkpoint may have other settings, if it can be loaded with them.
    by_name = trainer.resume_mode != "auto"
    other = find_differences(checkpoint, identity, bound=by_name)
    if other and by_name:
        raise UserError(
            f"{checkpoint} is of another run, which differs in {other}. Leave --resume out: a new "
            "run then starts, and the earlier one is kept."
        )
    if not other:
        refuse_late_pretraining(pretrain_steps, checkpoint)
    return other


def describe_new_run(
    other: str, run: Path, checkpoint: Path | None, identity: Mapping[str, Any]
) -> str:
    """Say why a new run starts, where the earlier one is now, and how to continue that one."""
    text = f"A new run: the one before had another {other}. It is in {run}."
    if checkpoint is None or find_differences(checkpoint, identity, bound=True):
        return text
    return f"{text} To go on from there with the new settings: --resume {checkpoint}"


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe which values changed, and from what; keys that only one side has do not count."""
    # Keys that an older version did not save are ignored.
    both = [key for key in now if key in before]
    return ", ".join(text for key in both for text in _describe_change(key, before[key], now[key]))


def drop_undecided(saved: Mapping[str, Any], decided: Container[str]) -> dict[str, Any]:
    """Return a saved identity without what an older version left unset, and which has a rule now.

    `decided` are the settings that the run has decided; what it has saved for them counts.
    """
    declared = table()
    rules = {key for key in saved if key in declared and declared[key].rule is not None}
    undecided = {k for k in rules if k not in decided and saved[k] in (None, "auto")}
    return _without_rules({key: value for key, value in saved.items() if key not in undecided})


def _without_rules(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity whose parts and further judges have no settings with a rule.

    What holds for those has separate keys: `_list_decisions`.
    """
    parts, judges = "reward.composite.parts", "reward.api.judges"
    stripped = dict(values)
    if judges in values:
        stripped[judges] = _strip_judges(values[judges])
    if parts in values:
        stripped[parts] = {}
        flagged = {text.split(":")[-2].strip() for text in values.get("reward.parts") or ()}
        for name, part in values[parts].items():
            groups = {kind: _strip(part[kind]) for kind in SECTIONS if kind in part}
            groups.get("judge", {}).pop("judges", None)
            part = {key: value for key, value in part.items() if key not in groups}
            part |= {kind: group for kind, group in groups.items() if group}
            # A flag that names the part has its kind and its weight.
            if name not in flagged or part.keys() - {"kind", "weight"}:
                stripped[parts][name] = part
    return stripped


def _strip(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a judge or a reward model without those that have a rule."""
    declared = keys_of(ApiReward) | keys_of(ModelReward)
    return {k: v for k, v in group.items() if k not in declared or not declared[k].rule}


def _strip_judges(judges: Mapping[str, Any]) -> dict[str, Any]:
    """Return further judges by name without settings that have a rule, nor those of their name."""
    stripped = {}
    for name in judges:
        try:
            settings = _strip(read_judge(judges, name))
        except ConfigError:  # refused where judges are checked, unless nothing asks it
            settings = judges[name]
        if settings != read_judge({}, name):
            stripped[name] = settings
    return stripped


def _list_decisions(reward: Reward, free: Container[str]) -> dict[str, Any]:
    """Return what holds for each judge and reward model of settings with a rule, by key.

    Of further judges it has all settings, however they are named.
    """
    rules: dict[str, ApiReward | ModelReward] = {m.own_key: m.settings for m in models_of(reward)}
    further: dict[str, ApiReward] = {}
    for judge in judges_of(reward):
        rules[judge.own_key] = judge.settings
        for name in further_judges(judge.settings):
            further[f"{judge.own_key}.judges.{name}"] = other_judge(judge.settings, name)
    return {
        f"{at}.{leaf}": mask_secrets(value_of(section, leaf))
        for at, section in (rules | further).items()
        for leaf, key in keys_of(type(section)).items()
        if key.identity not in free
        and (key.rule is not None or (at in further and leaf.partition(".")[0] not in OF_REWARD))
    }


def _part_settings(reward: Reward, free: Container[str]) -> dict[str, Any]:
    """Return the settings of composite.parts, without those of a `free` identity."""
    parts = {}
    for part in (part for part in mixture_of(reward) if part.name in reward.composite.parts):
        settings = part.model_dump(exclude_unset=True, exclude={"name"})
        for kind, section in (("judge", ApiReward), ("model", ModelReward)):
            if kind in settings:
                keys = keys_of(section)
                settings[kind] = {
                    name: value
                    for name, value in settings[kind].items()
                    if keys[name].identity not in free
                }
        parts[part.name] = settings
    return parts


def _describe_change(key: str, before: Any, now: Any) -> Iterator[str]:
    """Yield a text for each setting or file whose identity differs from that of the checkpoint.

    Mappings are compared entry by entry. Yields nothing if both values are equal.
    """
    if before == now:
        return
    if key in ROWS:
        yield f"{key} (other rows)"
    elif key == TRAIN_EXTRA_INFO:
        yield "data.train_files (other extra_info)"
    elif key == TRAIN_COLUMNS:
        yield "data.train_files (other columns)"
    elif key == CONTENTS:  # a file that only one of them names is another value of its setting
        changed = (file for file in now if before.get(file, now[file]) != now[file])
        yield from (f"{file} (other content)" for file in changed)
    elif isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys([*before, *now]):
            yield from _describe_change(f"{key}.{name}", before.get(name), now.get(name))
    else:
        yield f"{key} (was {_format_value(before)}, now {_format_value(now)})"


def _format_value(value: Any) -> str:
    if value is None or value == []:
        return "unset"
    text = " ".join(str(value).split())
    text = text.lower() if isinstance(value, bool) else text
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
