"""`ppo reward audit`: tests a reward with worthless and hostile responses."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

from ppo_cli.cli.flags import Arguments, add_command, make_flag
from ppo_cli.cli.help import App
from ppo_cli.cli.reward import COMMON_FLAGS, print_reward_result, resolve_settings
from ppo_cli.cli.reward_tables import Facts, cost_rows
from ppo_cli.cli.screen import format_number
from ppo_cli.errors import Interrupted, RewardError, plural

app = App()


def audit(arguments: Arguments) -> None:
    """Test a reward with worthless and hostile responses; exit 2 if a check fails."""
    config, screen = resolve_settings(arguments)
    from ppo_cli.extras.lab.audit.attacks import load_items
    from ppo_cli.extras.lab.audit.audit import audit as run_audit
    from ppo_cli.extras.lab.audit.audit import open_without_gate
    from ppo_cli.scoring.score import Callbacks, resume_advice

    # Questions with right answers, from which attacks are built.
    items = load_items(
        config.reward,
        file=arguments.extras["data"],
        preset=arguments.extras["items"],
        max_rows=int(arguments.extras["rows"]),
        **config.data.keys,
    )
    with (
        closing(screen),
        open_without_gate(config.reward, items, Callbacks(note=screen.note)) as reward,
    ):
        result = run_audit(reward, config.reward, items, screen=screen)
    print_reward_result(arguments, result, format_audit)
    if result["stopped"]:
        raise Interrupted(f"{result['stopped']} {resume_advice(config.reward)}")
    # A failed check is an error, so that scripts notice.
    failed = [check["name"] for check in result["checks"] if check["passed"] is False]
    check_count = sum(check["passed"] is not None for check in result["checks"])
    if failed:
        raise RewardError(f"{len(failed)} of {check_count} checks failed: {', '.join(failed)}.")


def format_audit(result: Facts) -> list[str]:
    """Return the result of `ppo reward audit` as lines: each check with its worst case."""
    # Checks that do not apply to this reward are skipped.
    verdicts = {True: "PASS", False: "FAIL", None: "skip"}
    lines = [f"Audit of {result['reward']}", ""]
    for check in result["checks"]:
        lines.append(f"{verdicts[check['passed']]}  {check['name']}: {check['said']}")
        # The worst case: all facts of it if the check failed, else what was the closest.
        worst = check["worst"] or {}
        if check["passed"] is False:
            facts = {name: value for name, value in worst.items() if value != ""}
            lines += [f"      {name}: {_format_value(value)}" for name, value in facts.items()]
        elif worst:
            got, sent = _format_value(worst["got"]), _format_value(worst["sent"])
            lines.append(f"      closest: {got} for {sent}")
    spent = ", ".join(f"{word} {value}" for word, value in cost_rows(result["spent"]))
    return [*lines, "", f"{plural(result['asked'], 'verdict')}; {spent}."]


def _format_value(value: Any) -> str:
    """Return a number with three digits, a text as it is, anything else as JSON."""
    if isinstance(value, float):
        return format_number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


add_command(
    app, audit, "ppo reward audit --use_api_reward --rm_prompt_preset math",
    [
        make_flag("data", str, None, "Rows to build attacks from; unset, bundled ones.", "FILE"),
        make_flag("rows", int, 6, "Maximum number of rows to build attacks from.", "N"),
        make_flag("items", str, None, "Bundled rows: math, code, dialogue or safety.", "NAME"),
        *COMMON_FLAGS,
    ],
    ("reward.",),
)  # fmt: skip
