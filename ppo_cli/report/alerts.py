"""Posts changes of a run to an address, for people who are away.

The body is JSON with a `text`, as the webhooks of Slack and Mattermost read it, and with `event`,
`run` and `step` for programs. Secrets are redacted. A post never holds up the run: it has a thread
of its own, and one that fails is said once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppo_cli.config.schema.reward import Reward
from ppo_cli.errors import Interrupted, UserError, first_line
from ppo_cli.report.judge_card import Spent, list_spent
from ppo_cli.report.tracker import Screen, Summary
from ppo_cli.secrets.known import hide_secret
from ppo_cli.secrets.redact import redact
from ppo_cli.waits import await_result, run_in_thread

POST_S = 10.0  # for a server to answer
END_S = 15.0  # for the last posts when the run ends
# Kinds of findings that are more than a warning.
EVENTS = {"hacking": "alarm", "judge_fooled": "alarm", "restrained": "restrained"}
BUDGET_SHARE = 0.8  # of a judge's budget, from which on it is told


@contextmanager
def send_alerts(
    name: str | None, reward: Reward, run_dir: Path, screen: Screen
) -> Iterator[Screen]:
    """Return the screen that posts what it shows to --alert, and post how the run ended.

    `name` is the address, or the variable that has it; None for no alerts.
    """
    if name is None:
        yield screen
        return
    address = name if "://" in name else os.environ[name].strip()
    hide_secret(address)
    alerts = AlertScreen(screen, address, reward, run_dir)
    try:
        yield alerts
    except (Interrupted, UserError) as stop:
        alerts.post("stopped", first_line(stop))
        raise
    except Exception as error:
        alerts.post("failed", f"{type(error).__name__}: {first_line(error)}")
        raise
    finally:
        alerts.finish()


class AlertScreen(Screen):
    """Shows everything on another screen; posts warnings, a budget nearly spent, and the end."""

    def __init__(self, screen: Screen, address: str, reward: Reward, run_dir: Path) -> None:
        self._screen = screen
        self.debug = screen.debug
        for name in ("begin", "phase", "pretraining", "responses", "note", "close"):
            setattr(self, name, getattr(screen, name))  # what is only shown
        self._address = address
        self._run_dir = run_dir
        self._reward = reward
        self._step = 0
        self._told: set[str] = set()  # judges whose budget is nearly spent
        self._posts: list[Future[str]] = []

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        """Show a step; post once that a judge's budget is nearly spent."""
        self._step = step
        self._screen.step(step, total_steps, metrics)
        for judge in list_spent(self._reward, [metrics]):
            if judge.name not in self._told and (text := _describe_budget(judge)):
                self._told.add(judge.name)
                self.post("budget", text)

    def health(self, text: str, kind: str = "") -> None:
        """Show a warning, and post it."""
        self._screen.health(text, kind)
        self.post(EVENTS.get(kind, "warning"), text)

    def summary(self, summary: Summary) -> None:
        """Show the summary, and post its title."""
        self._screen.summary(summary)
        measures = (f"{name} {value:.3g}" for name, _, value in summary.measures[:3])
        self.post("ended", f"{summary.title}: {', '.join(measures)}")

    def post(self, event: str, text: str) -> None:
        """Post an event in a thread of its own; an earlier post that failed is said, once."""
        body = {
            "text": redact(f"{self._run_dir}, step {self._step}: {text}"),
            "event": event, "run": str(self._run_dir), "step": self._step,
        }  # fmt: skip
        self._posts.append(run_in_thread(lambda: _post(self._address, body)))

    def finish(self) -> None:
        """Wait for the last posts, at most END_S; say what was not delivered."""
        failures = []
        for post in self._posts:
            try:
                failures.append(await_result(post, "the address of --alert", END_S))
            except Interrupted as late:
                failures.append(str(late))
                break
        if failure := next(filter(None, failures), ""):
            self._screen.note(f"An alert was not delivered ({redact(failure)}).")


def _describe_budget(judge: Spent) -> str:
    """Say that a budget of a judge is nearly spent; empty if it is not."""
    if judge.max_usd is not None and judge.usd >= BUDGET_SHARE * judge.max_usd:
        return f"{judge.name}: ${judge.usd:.2f} of its budget of ${judge.max_usd:g} are spent."
    if judge.max_tokens is not None and judge.tokens >= BUDGET_SHARE * judge.max_tokens:
        tokens = f"{judge.tokens:,} of its budget of {judge.max_tokens:,} tokens"
        return f"{judge.name}: {tokens} are spent."
    return ""


def _post(address: str, body: Mapping[str, Any]) -> str:
    """Post JSON; return why it was not delivered, empty if it was."""
    import httpx

    try:
        # Not redirected: the address may be a secret, and the body is for its server alone.
        reply = httpx.post(address, json=body, timeout=POST_S)
    except Exception as error:  # an address may be wrong in many ways, and a run never ends by it
        return first_line(error) or type(error).__name__
    return "" if reply.is_success else f"HTTP {reply.status_code}"
