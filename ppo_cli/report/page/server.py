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
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ppo_cli import __version__
from ppo_cli.errors import UserError, ppo
from ppo_cli.report.labels import read_labels_by_place
from ppo_cli.report.page.rollouts import (
    MAX_REPORT_TEXT_CHARS,
    MAX_TEXT_CHARS,
    Rollouts,
    choose_sample,
    make_table_row,
    parse_whole_number,
    set_label,
)
from ppo_cli.report.page.run_data import RunData
from ppo_cli.run_folder import LABELS_FILE, plain

MAX_REPORT_BYTES = 12_000_000  # of responses in a report, for all its runs
SCRIPTS = ("base.js", "curves.js", "rollouts.js")


def render_report(runs: Sequence[RunData], most_bytes: int = MAX_REPORT_BYTES) -> str:
    """The page as one file: it needs no server, no network and no other file."""
    rows, notes = [], []
    for run in runs:
        rollouts = Rollouts(run.folder)
        total = len(rollouts.rows())
        chosen = choose_sample(rollouts, most_bytes // len(runs))
        rows.append(rollouts.read(chosen, MAX_REPORT_TEXT_CHARS))
        notes.append(
            f"{len(chosen):,} of {total:,} responses are in this file: whole histories of the "
            "prompts that changed most, the best, worst, most disputed and failed, and some of "
            f"every part of the run. All are in `ppo view {run.name}`."
            if len(chosen) < total
            else ""
        )
    return render_page({
        "live": False,
        "runs": [run.read() for run in runs],
        "rows": rows,
        "notes": notes,
        "labels": [read_labels_by_place(run.folder) for run in runs],
    })  # fmt: skip


def render_page(data: Mapping[str, Any]) -> str:
    """The HTML of the page for this data; text of the data stays text."""
    package = files("ppo_cli.report.page")
    # The pictures of the overview come before Bokeh is read, which takes a moment.
    scripts = [package.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS]
    overview, later = scripts[0], "\n".join(scripts[1:])
    blocks = [overview, *(path.read_text(encoding="utf-8") for path in bokeh_files()), later]
    facts = {"version": __version__} | dict(data)
    values = {
        "CSP": make_security_policy(blocks, live=bool(data["live"])),
        "STYLE": package.joinpath("page.css").read_text(encoding="utf-8"),
        "DATA": encode_json(facts),
        "SCRIPTS": "\n".join(f"<script>{block}</script>" for block in blocks),
    }
    text = package.joinpath("page.html").read_text(encoding="utf-8")
    head, *rest = text.split("{{")
    return head + "".join(
        values[name] + tail for name, _, tail in (part.partition("}}") for part in rest)
    )


def encode_json(value: Any) -> str:
    """JSON that is safe within a script element: without `<`, `>`, `&` and line separators."""
    text = json.dumps(plain(value), ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # A character that a sampler cut in half has no UTF-8: as \udXXX it is JSON all the same.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def make_security_policy(blocks: Sequence[str], *, live: bool) -> str:
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
MAX_BODY_BYTES = 100_000  # bytes of a label with its comment
BODY_S = 5.0  # for a client to send what it has announced
ALLOW = {"Allow": "GET, POST"}
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
        self._handle()

    def do_POST(self) -> None:
        """Take a label."""
        self._handle()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that the base class cannot parse; it is never the server's fault."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._send(405, "The page is read with GET, and labels are sent with POST.", ALLOW)
        else:
            self._send(code if code < 500 else 400, message or HTTPStatus(code).phrase)

    def _handle(self) -> None:
        try:
            self._check_host()
            path, query = self._read_target()
            if path not in ROUTES:
                raise _HttpRefusal(404, "There is nothing at this address.")
            method, route = ROUTES[path]
            if self.command != method:
                raise _HttpRefusal(405, f"{path} takes {method} only.")
            if method == "POST" and not self._same_origin():
                raise _HttpRefusal(403, "Labels are taken from the page itself only.")
            route(self, query)
        except _HttpRefusal as refusal:
            self._send(refusal.status, str(refusal), ALLOW if refusal.status == 405 else None)
        except UserError as error:
            self._send(400, str(error))

    def _check_host(self) -> None:
        if not self.server.allows_host(self.headers.get("Host", "")):
            raise _HttpRefusal(403, "This server answers only under the name of its own machine.")

    def _read_target(self) -> tuple[str, dict[str, str]]:
        """The path and the query of a request that has the token."""
        try:
            parts = urlsplit(self.path)
            self.path.encode("ascii")
            if not self._has_token(dict(parse_qsl(parts.query))):
                raise _HttpRefusal(
                    403, "Open the address that `ppo view` printed: it holds a token."
                )
            return parts.path, dict(parse_qsl(parts.query, errors="strict"))
        except ValueError as error:
            raise _HttpRefusal(
                400, f"The address of the request cannot be read: {error}."
            ) from error

    def _has_token(self, query: Mapping[str, str]) -> bool:
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            cookies = SimpleCookie()
        cookie = cookies.get(self._cookie_name)
        tokens = [query.get("token", ""), cookie.value if cookie else ""]
        token = self.server.token.encode()
        return any(secrets.compare_digest(w.encode("utf-8", "replace"), token) for w in tokens)

    @property
    def _cookie_name(self) -> str:
        return f"ppo_view_{self.server.port}"  # cookies are shared by the ports of a machine

    def _same_origin(self) -> bool:
        origin = self.headers.get("Origin")
        try:
            return origin is None or urlsplit(origin).netloc == self.headers.get("Host")
        except ValueError:
            return False

    def _serve_page(self, query: dict[str, str]) -> None:
        if "token" in query:  # the address without it may be shown, copied and kept
            cookie = f"{self._cookie_name}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._send(303, "", {"Location": "/", "Set-Cookie": cookie})
            return
        text = render_page({"live": True, **self._collect_state()})
        policy = text.split('http-equiv="Content-Security-Policy" content="', 1)[1].split('"')[0]
        self._send(
            200, text, {"Content-Security-Policy": f"{policy}; frame-ancestors 'none'"}, "text/html"
        )

    def _collect_state(self) -> dict[str, Any]:
        runs = self.server.runs
        return {
            "seen": repr([run.version() for run in runs]),
            "runs": [run.read() for run in runs],
            "labels": [read_labels_by_place(run.folder) for run in runs],
            "calibrate": [_calibrate_command(run.folder) for run in runs],
        }

    def _serve_runs(self, query: dict[str, str]) -> None:
        """All about the runs but their responses; nothing where the page has seen it."""
        same = query.get("seen") == repr([run.version() for run in self.server.runs])
        self._send_json({} if same else self._collect_state())

    def _serve_rows(self, query: dict[str, str]) -> None:
        rollouts = self._select_rollouts(query)
        chosen = rollouts.select(query, ANSWER_S)
        offset = parse_whole_number(query.get("offset", "0"))
        if offset is None:
            raise UserError(f"'{query['offset']}' is not a whole number (offset).")
        shown = [
            make_table_row(x) for x in rollouts.read(chosen[offset : offset + ROWS], None) if x
        ]
        sources = sorted({row.source for row in rollouts.indexed_rows})
        self._send_json({
            "total": len(chosen), "all": len(rollouts.indexed_rows), "rows": shown,
            "sources": sources,
            "unread": rollouts.unread,
        })  # fmt: skip

    def _serve_row(self, query: dict[str, str]) -> None:
        rollouts = self._select_rollouts(query)
        max_chars = None if query.get("whole") else MAX_TEXT_CHARS
        self._send_json(rollouts.read([rollouts.row_of_id(query.get("id", ""))], max_chars)[0])

    def _serve_prompt(self, query: dict[str, str]) -> None:
        rollouts = self._select_rollouts(query)
        rows = rollouts.through_time(rollouts.row_of_id(query.get("id", "")))
        self._send_json(rollouts.read(rows, MAX_REPORT_TEXT_CHARS))

    def _take_label(self, query: dict[str, str]) -> None:
        body = self._read_body()
        try:
            sent = json.loads(body)
            label, comment, name = sent["label"], sent["comment"], sent["id"]
            response = sent.get("response_id")
            is_label = label is None or (type(label) in (int, float) and math.isfinite(label))
            texts = isinstance(comment, str) and isinstance(name, str)
            if not (is_label and texts and isinstance(response, str | None)):
                raise ValueError
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise UserError(
                'A label is JSON such as {"id": "train:1:0", "label": 1, "comment": ""}; '
                "its label is a number or null."
            ) from error
        self._send_json(set_label(self._select_rollouts(query), name, response, label, comment))

    def _read_body(self) -> bytes:
        """Return the request body; raise `_HttpRefusal` if its length is not as announced."""
        lengths = set(self.headers.get_all("Content-Length", []))
        size = lengths.pop() if len(lengths) == 1 else ""
        if not re.fullmatch("[0-9]+", size):
            raise _HttpRefusal(400, "A label comes with one Content-Length.")
        if len(size) > 9 or int(size) > MAX_BODY_BYTES:
            raise _HttpRefusal(413, f"A label may have {MAX_BODY_BYTES:,} bytes with its comment.")
        self.connection.settimeout(BODY_S)
        try:
            body = self.rfile.read(int(size))
        except TimeoutError:
            body = b""
        if len(body) < int(size):
            raise _HttpRefusal(400, "The body is shorter than its Content-Length.")
        self.connection.settimeout(self.timeout)
        return body

    def _select_rollouts(self, query: Mapping[str, str]) -> Rollouts:
        number = query.get("run", "0")
        place = parse_whole_number(number)
        if place is None or place >= len(self.server.rollouts):
            raise UserError(f"There is no run '{number}'.")
        return self.server.rollouts[place]

    def _send_json(self, value: Any) -> None:
        self._send(200, encode_json(value), {}, "application/json")

    def _send(
        self,
        status: int,
        text: str,
        headers: Mapping[str, str] | None = None,
        kind: str = "text/plain",
    ) -> None:
        body = text.encode("utf-8", "backslashreplace")
        self.request_version = self.protocol_version  # a line that is no request gets a status too
        self.send_response(status)
        for name, value in {**HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if status >= 400:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        if status >= 400:
            self._discard_input()

    def _discard_input(self) -> None:
        """Read what came with a refused request: closing before would take the answer back."""
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(1.0)
        ends = time.monotonic() + BODY_S
        with suppress(OSError):
            while time.monotonic() < ends and self.rfile.read1(1 << 16):
                pass


class _HttpRefusal(Exception):
    """Why a request gets another status than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


_Route = Callable[[_Handler, dict[str, str]], None]
ROUTES: Mapping[str, tuple[str, _Route]] = {
    "/": ("GET", _Handler._serve_page),
    "/api/runs": ("GET", _Handler._serve_runs),
    "/api/rows": ("GET", _Handler._serve_rows),
    "/api/row": ("GET", _Handler._serve_row),
    "/api/prompt": ("GET", _Handler._serve_prompt),
    "/api/label": ("POST", _Handler._take_label),
}


def _calibrate_command(folder: Path) -> str:
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
