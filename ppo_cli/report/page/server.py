"""Serves the page about runs on this machine, for who has its token; rows come when asked for."""

from __future__ import annotations

import ipaddress
import json
import math
import re
import secrets
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ppo_cli.errors import UserError, ppo
from ppo_cli.report.page.document import as_json, page
from ppo_cli.report.page.rollouts import MOST_TEXT, SAMPLE_TEXT, Rollouts, brief, labels_of
from ppo_cli.report.page.rollouts import set_label as write_label
from ppo_cli.report.page.run_data import RunData
from ppo_cli.run_folder import LABELS_FILE

ROWS = 50  # of a page of the table
ANSWER_S = 0.5  # then the table shows what is read so far, and the page asks again
MOST_BODY = 100_000  # bytes of a label with its comment
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class PageServer(ThreadingHTTPServer):
    """Serves runs on `host`; every request needs the token, in its address or its cookie."""

    daemon_threads = True

    def __init__(self, runs: Sequence[RunData], host: str = "127.0.0.1", port: int = 0) -> None:
        self.runs = list(runs)
        self.rollouts = [Rollouts(run.folder) for run in runs]
        self.token = secrets.token_urlsafe(24)
        self.host = host
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking for this machine's name, which may take seconds without a network."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.host, self.port

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing where a browser has gone away before its answer."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """The address to open, with the token."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/?token={self.token}"

    def allows_host(self, header: str) -> bool:
        """Whether a Host header names this machine; a name that only resolves to it does not."""
        try:
            name = (urlsplit(f"//{header}").hostname or "").lower()
        except ValueError:
            return False
        if name in {"localhost", self.host.lower()}:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        listens_on = ipaddress.ip_address(str(self.server_address[0]))
        return address.is_loopback or not listens_on.is_loopback


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version = "ppo-cli"
    sys_version = ""
    timeout = 60

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: addresses hold the token."""

    def do_GET(self) -> None:
        """Answer with the page or with the rows that it asks for."""
        self._answer({
            "/": self._page, "/api/runs": self._runs, "/api/rows": self._rows,
            "/api/row": self._row, "/api/prompt": self._prompt,
        })  # fmt: skip

    def do_POST(self) -> None:
        """Take a label."""
        self._answer({"/api/label": self._label})

    def _answer(self, routes: Mapping[str, Callable[[dict[str, str]], None]]) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        route = routes.get(parts.path)
        if not self.server.allows_host(self.headers.get("Host", "")):
            self._send(403, "This server answers only under the name of its own machine.")
        elif not self._knows_token(query):
            self._send(403, "Open the address that `ppo view` printed: it holds a token.")
        elif self.command == "POST" and not self._same_origin():
            self._send(403, "Labels are taken from the page itself only.")
        elif route is None:
            self._send(404, "There is nothing at this address.")
        else:
            try:
                route(query)
            except UserError as error:
                self._send(400, str(error))

    def _knows_token(self, query: Mapping[str, str]) -> bool:
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            cookies = SimpleCookie()
        cookie = cookies.get(self._cookie)
        given = [query.get("token", ""), cookie.value if cookie else ""]
        token = self.server.token.encode()
        return any(secrets.compare_digest(word.encode(), token) for word in given)

    @property
    def _cookie(self) -> str:
        return f"ppo_view_{self.server.port}"  # cookies are shared by the ports of a machine

    def _same_origin(self) -> bool:
        origin = self.headers.get("Origin")
        return origin is None or urlsplit(origin).netloc == self.headers.get("Host")

    def _page(self, query: dict[str, str]) -> None:
        if "token" in query:  # the address without it may be shown, copied and kept
            cookie = f"{self._cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._send(303, "", {"Location": "/", "Set-Cookie": cookie})
            return
        text = page({"live": True, **self._state()})
        policy = text.split('http-equiv="Content-Security-Policy" content="', 1)[1].split('"')[0]
        self._send(
            200, text, {"Content-Security-Policy": f"{policy}; frame-ancestors 'none'"}, "text/html"
        )

    def _state(self) -> dict[str, Any]:
        runs = self.server.runs
        return {
            "seen": repr([run.version() for run in runs]),
            "runs": [run.read() for run in runs],
            "labels": [labels_of(run.folder) for run in runs],
            "calibrate": [_calibrate(run.folder) for run in runs],
        }

    def _runs(self, query: dict[str, str]) -> None:
        """All about the runs but their responses; nothing where the page has seen it."""
        same = query.get("seen") == repr([run.version() for run in self.server.runs])
        self._json({} if same else self._state())

    def _rows(self, query: dict[str, str]) -> None:
        rollouts = self._rollouts(query)
        chosen = rollouts.select(query, ANSWER_S)
        offset = int(query["offset"]) if query.get("offset", "").isdecimal() else 0
        shown = [brief(x) for x in rollouts.read(chosen[offset : offset + ROWS], None) if x]
        sources = sorted({row.source for row in rollouts.known})
        self._json({
            "total": len(chosen), "all": len(rollouts.known), "rows": shown, "sources": sources,
            "unread": rollouts.unread,
        })  # fmt: skip

    def _row(self, query: dict[str, str]) -> None:
        rollouts = self._rollouts(query)
        most = None if query.get("whole") else MOST_TEXT
        self._json(rollouts.read([rollouts.one(query.get("id", ""))], most)[0])

    def _prompt(self, query: dict[str, str]) -> None:
        rollouts = self._rollouts(query)
        rows = rollouts.through_time(rollouts.one(query.get("id", "")))
        self._json(rollouts.read(rows, SAMPLE_TEXT))

    def _label(self, query: dict[str, str]) -> None:
        size = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", size) or int(size) > MOST_BODY:
            raise UserError(f"A label may have {MOST_BODY:,} bytes with its comment.")
        try:
            given = json.loads(self.rfile.read(int(size)))
            value, comment = given["label"], str(given["comment"])
            label = None if value is None else float(value)
            if label is not None and not math.isfinite(label):
                raise ValueError
        except (ValueError, TypeError, KeyError) as error:
            raise UserError("A label is a number or null, with a comment.") from error
        self._json(write_label(self._rollouts(query), str(given.get("id")), label, comment))

    def _rollouts(self, query: Mapping[str, str]) -> Rollouts:
        number = query.get("run", "0")
        if not number.isdecimal() or int(number) >= len(self.server.rollouts):
            raise UserError(f"There is no run '{number}'.")
        return self.server.rollouts[int(number)]

    def _json(self, value: Any) -> None:
        self._send(200, as_json(value), {}, "application/json")

    def _send(
        self,
        status: int,
        text: str,
        headers: Mapping[str, str] | None = None,
        kind: str = "text/plain",
    ) -> None:
        body = text.encode("utf-8", "backslashreplace")
        if status >= 400:  # what came with the request may not have been read
            self.close_connection = True
        self.send_response(status)
        for name, value in {**HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _calibrate(folder: Path) -> str:
    """The command that compares the reward of a run with the labels given in the page."""
    labels, config = (shlex.quote(str(folder / n)) for n in (LABELS_FILE, "config.yaml"))
    return ppo(f"reward calibrate {labels} --labels label --config {config}")


def open_runs(folders: Sequence[Path]) -> list[RunData]:
    """The runs of these folders, each with a name that tells it from the others."""
    names = [folder.resolve().name for folder in folders]
    return [
        RunData(folder, name if names.count(name) == 1 else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]
