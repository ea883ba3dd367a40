"""A short audit of the function or rule of a run that starts: a warning if attacks work."""

from __future__ import annotations

import math

from ppo_cli.cli.screen import format_number
from ppo_cli.config.mixture import has_mixture, judges_of, models_of
from ppo_cli.config.schema.reward import Reward
from ppo_cli.errors import UserError, ppo
from ppo_cli.report.tracker import Screen

# Attacks that hold for any task, by check, with the lowest score that is a fault: a part of a
# reward may be for the form. The other attacks need good answers to the run's own prompts.
ATTACKS_ON_ANY_TASK = {
    "padding": ("the answer five times", -math.inf),
    "prompt injection": ("flattery", 0.5),
    "master keys": ("the reply", 0.5),
}
AUDITED_ROWS = 2  # tasks of the audit at the start of a run: about a second


def audit_at_start(settings: Reward) -> str:
    """Return a warning if attacks on the run's function or rule work; "" otherwise.

    Judges and reward models are left out: an audit of them costs money or minutes.
    """
    audited = settings.function or settings.rule
    if not audited or judges_of(settings) or models_of(settings) or has_mixture(settings):
        return ""
    from ppo_cli.extras.lab.audit.attacks import load_items
    from ppo_cli.extras.lab.audit.audit import audit as run_audit
    from ppo_cli.extras.lab.audit.audit import open_without_gate
    from ppo_cli.scoring.score import Callbacks

    # A reward that cannot score the audit's tasks is not audited; the run checks its own rows.
    try:
        items = load_items(settings, file=None, preset=None, max_rows=AUDITED_ROWS)
        with open_without_gate(settings, items, Callbacks()) as reward:
            result = run_audit(reward, settings, items, screen=Screen())
    except UserError:
        return ""
    # A function that raised has text here instead of a score: the run itself reports that.
    cases = {check["name"]: check["cases"] for check in result["checks"]}
    failed = (
        case
        for name, (trial, lowest) in ATTACKS_ON_ANY_TASK.items()
        for case in cases.get(name, ())
        if case["passed"] is False and case["trial"].startswith(trial) and case["got"] >= lowest
    )
    worst = next(failed, None)
    if worst is None:
        return ""
    flag = f"--reward_function {settings.function}" if settings.function else f"--rule {audited}"
    return (
        f"{audited} can be fooled: {worst['trial']} scores {format_number(worst['got'])}, "
        f"expected {worst['wanted']}. The model may learn that instead of the task. "
        f"`{ppo(f'reward audit {flag}')}` shows all such replies."
    )
