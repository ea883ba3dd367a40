"""The one checker: all rules about a run, by the kind of what they find.

What does not fit together within a section is a row of that section (`Conflict`), settings without
effect are declared with the settings (`unused`). What several sections, files or the machine decide
is a function next to its subject (run, devices, models, rewards, judge_server), with its line here.
plan, train and the library show and refuse what `find_clashes` and `find_findings` yield.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ppo_cli.config.schema.finding import Finding, Kind
from ppo_cli.config.schema.keys import find_conflicts, range_remarks, table
from ppo_cli.errors import ppo
from ppo_cli.planning.findings import devices, judge_server, models, rewards, run
from ppo_cli.planning.findings.scene import Scene
from ppo_cli.planning.findings.unused import find_unused
from ppo_cli.planning.resolved import Resolved

# Rules that only compare settings: `resolve` raises what they find, with all other mistakes.
CLASHES: Final[tuple[Callable[[Scene], Iterable[Finding]], ...]] = (
    lambda s: find_conflicts(s.config),
    run.check_batches,
    run.check_episodes,
    run.check_reward_sources,
    devices.check_devices,
    models.check_heads,
    models.check_reward_models,
    rewards.check_judges,
    rewards.check_mixture,
)


@dataclass(frozen=True)
class Rule:
    """A function that yields sentences, and the kind of what it finds."""

    kind: Kind
    find: Callable[[Scene], Iterable[str]]


def _missing_prompts(scene: Scene) -> Iterator[str]:
    if not scene.config.data.train_files:
        yield (
            "There are no prompts to train on: name them with --train_files FILE. "
            f"`{ppo('data prepare gsm8k --source openai/gsm8k --out data/gsm8k')}` makes a set, "
            "and --preset embedded trains on the bundled one."
        )


RULES: Final = (
    # What the run needs: models, keys and packages of judges, prompts, GPUs, packages.
    Rule("missing", lambda s: models.broken_models(s.config)),
    Rule("elsewhere", lambda s: rewards.missing_keys(s.config.reward, s.environ)),
    Rule("elsewhere", lambda s: run.missing_alert(s.config.trainer.alert, s.environ)),
    Rule("missing", lambda s: rewards.missing_for_sdks(s.config.reward, s.environ)),
    Rule("missing", lambda s: models.missing_models(s.config.reward, s.environ)),
    Rule("missing", judge_server.missing_for_judge_server),
    Rule("missing", _missing_prompts),
    Rule("elsewhere", devices.missing_gpus),
    Rule("elsewhere", devices.missing_addresses),
    Rule("missing", devices.unusable_gpus),
    Rule("missing", devices.missing_packages),
    # What may surprise.
    Rule("remark", lambda s: range_remarks(s.config, s.resolved.origins)),
    Rule("remark", lambda s: run.kl_remarks(s.config.actor, s.config.algorithm)),
    Rule("remark", lambda s: run.loss_remarks(s.config.actor, bypass=s.bypass)),
    Rule(
        "remark",
        lambda s: run.sampler_remarks(
            s.config.trainer.engine, s.config.rollout.name, bypass=s.bypass
        ),
    ),
    Rule(
        "remark",
        lambda s: rewards.judge_remarks(
            s.config.reward, s.config.algorithm.adv_estimator, plays=s.config.environment.is_set
        ),
    ),
    Rule(
        "remark", lambda s: judge_server.judge_server_remarks(s.config.reward, s.config.model.path)
    ),
    Rule("remark", lambda s: rewards.mixture_remarks(s.config.reward)),
    Rule("remark", devices.device_remarks),
    Rule(
        "remark", lambda s: models.critic_remarks(s.config.training_models.get("critic.model.path"))
    ),
    Rule(
        "remark",
        lambda s: (
            models.template_remarks(s.config.model.path)
            if s.config.data.apply_chat_template
            else ()
        ),
    ),
)


def find_clashes(scene: Scene) -> Iterator[Finding]:
    """Yield every clash between settings."""
    for find in CLASHES:
        yield from find(scene)


def find_findings(
    resolved: Resolved, environ: Mapping[str, str] = os.environ
) -> tuple[Finding, ...]:
    """Return all else that is found about resolved settings on their machine, each once."""
    scene = Scene(resolved, environ)
    found = [*find_unused(resolved), *run.unsupported_settings(scene)]
    for rule in RULES:
        texts = rule.find(scene)
        if rule.kind != "remark":
            texts = (_name_typed(text, resolved.origins) for text in texts)
        found += (Finding((), text, rule.kind) for text in texts)
    return tuple(dict.fromkeys(found))


def _name_typed(text: str, origins: Mapping[str, str]) -> str:
    """Return a message, and which flags of another program set what it names."""
    for name, origin in origins.items():
        _, is_flag, typed = origin.partition("flag ")
        ours = (name in table() and table()[name].flag) or name
        if is_flag and typed not in text and re.search(rf"(?<!\S){re.escape(ours)}\b", text):
            text += f" Here {typed} sets {ours}."
    return text


def list_texts(findings: Iterable[Finding], *kinds: Kind) -> list[str]:
    """Return the sentences of the findings of these kinds."""
    return [finding.text for finding in findings if finding.kind in kinds]
