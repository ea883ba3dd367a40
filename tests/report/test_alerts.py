"""Alerts are posted while a run goes on, and never hold it up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.cli.app import main
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import UserError
from ppo_cli.report.alerts import send_alerts
from ppo_cli.report.tracker import Screen, Summary
from tests.config.settling import settle

SECRET = "sk-Q7w9Zx31Lm48Vb62"
HIDDEN_PATH = "https://hooks.example.com/services/T0123456/B98ab76c/q1W2e3R4t5"


class Hook(ThreadingHTTPServer):
    """Keeps what is posted, and answers with `status`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.bodies = 200, list[dict[str, Any]]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"

    def settings(self, *mix: str, **flags: str) -> Config:
        values = {"trainer.alert": self.url} | flags
        flag_values = {key: (value, "flag") for key, value in values.items()}
        return settle(flags=flag_values, mix=mix).config


class _Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def hook() -> Iterator[Hook]:
    with Hook() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


class Notes(Screen):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_warnings_budget_and_end_are_posted(
    hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("HOOK", f"{hook.url}\r\n")
    config = hook.settings("judge:style:1", "judge:facts:1", **{
        "trainer.alert": "HOOK", "reward.api.model": "m", "reward.api.budget_usd": "1",
        "reward.composite.parts.facts.judge": "{budget_usd: null, budget_tokens: 1000}",
    })  # fmt: skip
    done = Summary(4, (("reward", 0.1, 0.5),), (), None, tmp_path, 1.0, verdict="Learned")
    with send_alerts(config.trainer.alert, config.reward, tmp_path, Notes()) as screen:
        # The budget of each judge is its own, and is told of once.
        screen.step(2, 9, {"judge/tokens_total": 5e3, "judge_facts/cost_usd_total": 5.0})
        for step, usd in ((3, 0.9), (4, 0.95)):
            spent = {"judge/cost_usd_total": usd, "judge_facts/tokens_total": 1e3 * usd}
            screen.step(step, 9, spent | {"judge_facts/tokens_in": 9.0})
        screen.health(f"The judge answered {SECRET}.")
        screen.health("Its words do not matter.", "hacking")
        screen.summary(done)
    texts = {body["event"]: body["text"] for body in hook.bodies}
    assert sorted(texts) == ["alarm", "budget", "ended", "warning"] and len(hook.bodies) == 5
    budgets = " ".join(sorted(body["text"] for body in hook.bodies if body["event"] == "budget"))
    assert "judge: $0.90 of" in budgets and "judge_facts: 900 of" in budgets
    assert "learned" in texts["ended"]
    assert SECRET not in json.dumps(hook.bodies)
    assert {body["step"] for body in hook.bodies} == {3, 4}


def test_how_a_run_stopped_is_posted(hook: Hook, tmp_path: Path) -> None:
    config = hook.settings()
    alerts = send_alerts(config.trainer.alert, config.reward, tmp_path, Screen())
    with pytest.raises(UserError), alerts:
        raise UserError("The disk is full.\nFree some space.")
    (body,) = hook.bodies
    assert body["event"] == "stopped" and "The disk is full" in body["text"]


@pytest.mark.parametrize("address", ["", "http://127.0.0.1:9/nobody", "HOOK"])
def test_what_is_not_delivered_is_said_once(
    hook: Hook, tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", f"{hook.url}\r/lost")
    hook.status, screen = 404, Notes()
    config = hook.settings(**({"trainer.alert": address} if address else {}))
    with send_alerts(config.trainer.alert, config.reward, tmp_path, screen) as alerts:
        alerts.health("one")
        alerts.health("two")
    assert len(screen.notes) == 1 and "not delivered" in screen.notes[0]


@pytest.mark.parametrize("alert", ["ftp://x", HIDDEN_PATH, "NOT_SET_X"])
def test_an_alert_that_would_reach_nobody_or_tell_a_secret_is_refused(
    alert: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--preset", "embedded", "--alert", alert]) == 2
    message = capsys.readouterr().err
    assert HIDDEN_PATH[-10:] not in message and "alert" in message
