"""The page about runs: one HTML text with scripts, styles and data inside, as a file or served.

The server answers who has its token; rows come when asked for.
"""

from __future__ import annotations

import base64
import hashlib
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
from importlib.resources import files
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ppo_cli import __version__
from ppo_cli.errors import UserError, ppo
from ppo_cli.report.page.rollouts import MOST_TEXT, SAMPLE_TEXT, Rollouts, brief, labels_of, sample
from ppo_cli.report.page.rollouts import set_label as write_label
from ppo_cli.report.page.run_data import RunData
from ppo_cli.run_folder import LABELS_FILE, plain

MOST_BYTES = 12_000_000  # of responses in a report, for all its runs
SCRIPTS = ("base.js", "curves.js", "rollouts.js")


def report(runs: Sequence[RunData], most_bytes: int = MOST_BYTES) -> str:
    """The page as one file: it needs no server, no network and no other file."""
    rows, notes = [], []
    for run in runs:
        rollouts = Rollouts(run.folder)
        total = len(rollouts.rows())
        chosen = sample(rollouts, most_bytes // len(runs))
        rows.append(rollouts.read(chosen, SAMPLE_TEXT))
        notes.append(
            f"{len(chosen):,} of {total:,} responses are in this file: whole histories of the "
            "prompts that changed most, the best, worst, most disputed and failed, and some of "
            f"every part of the run. All are in `ppo view {run.name}`."
            if len(chosen) < total
            else ""
        )
    return page({
        "live": False,
        "runs": [run.read() for run in runs],
        "rows": rows,
        "notes": notes,
        "labels": [labels_of(run.folder) for run in runs],
    })  # fmt: skip


def page(data: Mapping[str, Any]) -> str:
    """The HTML of the page for this data; text of the data stays text."""
    here = files("ppo_cli.report.page")
    # The pictures of the overview come before Bokeh is read, which takes a moment.
    scripts = [here.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS]
    ours, later = scripts[0], "\n".join(scripts[1:])
    blocks = [ours, *(path.read_text(encoding="utf-8") for path in bokeh_files()), later]
    told = {"version": __version__} | dict(data)
    values = {
        "CSP": policy(blocks, live=bool(data["live"])),
        "STYLE": here.joinpath("page.css").read_text(encoding="utf-8"),
        "DATA": as_json(told),
        "SCRIPTS": "\n".join(f"<script>{block}</script>" for block in blocks),
    }
    text = here.joinpath("page.html").read_text(encoding="utf-8")
    head, *rest = text.split("{{")
    return head + "".join(
        values[name] + tail for name, _, tail in (part.partition("}}") for part in rest)
    )


def as_json(value: Any) -> str:
    """JSON that is safe within a script element: without `<`, `>`, `&` and line separators."""
    text = json.dumps(plain(value), ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # A character that a sampler cut in half has no UTF-8: as \udXXX it is JSON all the same.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def policy(blocks: Sequence[str], *, live: bool) -> str:
    """The Content-Security-Policy: these scripts and nothing else run, nothing is loaded."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'"
        for block in blocks
    )
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def bokeh_files() -> list[Path]:
    """The JavaScript of the installed Bokeh: the library and its plotting interface."""
    from bokeh.util.paths import bokehjs_path

    folder = Path(bokehjs_path()) / "js"
    return [folder / "bokeh.min.js", folder / "bokeh-api.min.js"]


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
