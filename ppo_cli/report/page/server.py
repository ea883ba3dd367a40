"""The page about runs: one HTML text with scripts, styles and data, as a file or served.

The server answers only requests with its token, and sends rows on request.
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

from ppo_cli.errors import UserError, ppo
from ppo_cli.report.labels import read_labels_by_place
from ppo_cli.report.page.rollouts import (
    MAX_REPORT_TEXT_CHARS,
    Rollouts,
    Row,
    choose_sample,
    parse_whole_number,
    set_label,
)
from ppo_cli.report.page.run_data import RunData
from ppo_cli.report.side_by_side import compare_for_page, name_runs
from ppo_cli.run_folder.lines import LABELS_FILE, to_json
from ppo_cli.version import read_version

MAX_REPORT_BYTES = 12_000_000  # of responses in a report, over all its runs
SCRIPTS = ("base.js", "critic.js", "curves.js", "tokens.js", "turns.js", "rollouts.js")


def render_report(runs: Sequence[RunData], most_bytes: int = MAX_REPORT_BYTES) -> str:
    """Return the page as the HTML of one file that needs no server, network or other file."""
    # Each run gets an equal share of the bytes.
    rows, notes = [], []
    for run in runs:
        rollouts = Rollouts(run.folder)
        total = len(rollouts.rows())
        chosen = choose_sample(rollouts, most_bytes // len(runs))
        rows.append(rollouts.read(chosen, MAX_REPORT_TEXT_CHARS))
        notes.append(
            f"{len(chosen):,} of {total:,} responses are in this file: the histories of the "
            "prompts that changed most, the best, worst, most disputed and failed ones, and some "
            f"from every part of the run. `ppo view {run.name}` has all of them."
            if len(chosen) < total
            else ""
        )
    return render_page({
        "live": False,
        "runs": [run.read() for run in runs],
        "compared": compare_for_page([run.folder for run in runs]),
        "rows": rows,
        "notes": notes,
        "labels": [read_labels_by_place(run.folder) for run in runs],
    })  # fmt: skip


def render_page(data: Mapping[str, Any]) -> str:
    """Return the HTML of the page for this data; texts in the data cannot become HTML."""
    package = files("ppo_cli.report.page")
    # The overview is drawn before Bokeh is loaded, which takes a moment.
    scripts = [package.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS]
    overview, later = scripts[0], "\n".join(scripts[1:])
    blocks = [overview, *(path.read_text(encoding="utf-8") for path in find_bokeh_files()), later]
    facts = {"version": read_version()} | dict(data)
    # Fill the {{NAME}} places of the template.
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
    """Return JSON that is safe in a script element: `<`, `>`, `&`, line separators are escaped."""
    text = to_json(value, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # Half of a surrogate pair, which a sampler may cut, is not valid UTF-8: escape it as \udXXX.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def make_security_policy(blocks: Sequence[str], *, live: bool) -> str:
    """Return the Content-Security-Policy: only these scripts run, and nothing is loaded."""
    # Scripts are allowed by their hash, so injected ones cannot run. Style attributes of Bokeh and
    # the page need 'unsafe-inline'.
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'"
        for block in blocks
    )
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def find_bokeh_files() -> list[Path]:
    """Return the JavaScript files of the installed Bokeh: the library and its plotting API."""
    # Not in Bokeh's documented interface (tried with 3.9).
    from bokeh.util.paths import bokehjs_path

    folder = Path(bokehjs_path()) / "js"
    return [folder / "bokeh.min.js", folder / "bokeh-api.min.js"]


ANSWER_S = 0.5  # after which a reply has the steps read so far, and the page asks again
MAX_BODY_BYTES = 100_000  # bytes of a label with its comment
BODY_S = 5.0  # for a client to send what it has announced
ALLOW = {"Allow": "GET, POST"}
# Headers of every reply: nothing is cached, and other sites can neither embed nor read the page.
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class PageServer(ThreadingHTTPServer):
    """HTTP server for the page; every request needs the token, in its address or its cookie."""

    daemon_threads = True

    def __init__(self, runs: Sequence[RunData], host: str = "127.0.0.1", port: int = 0) -> None:
        self.runs = list(runs)
        self.rollouts = [Rollouts(run.folder) for run in runs]
        # Other users of this machine can connect to the port, but do not have the token.
        self.token = secrets.token_urlsafe(24)
        self.host = host
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without looking up this machine's name, which may take seconds without a network."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.host, self.port

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that the browser has closed; print other errors."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """The address to open, with the token."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/?token={self.token}"

    def allows_host(self, header: str) -> bool:
        """Whether a Host header is allowed: localhost, --host, or an IP address of this machine.

        Other names are refused even if they resolve to this machine (DNS rebinding).
        """
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
        # On a loopback address only loopback names are right; else any IP address is.
        listens_on = ipaddress.ip_address(str(self.server_address[0]))
        return address.is_loopback or not listens_on.is_loopback


class _Handler(BaseHTTPRequestHandler):
    """Handles a request: checks host, token and origin, then calls the route of the path."""

    server: PageServer
    # Settings of the base class: keep connections open, and do not send Python's version.
    protocol_version = "HTTP/1.1"
    server_version = "ppo-cli"
    sys_version = ""
    timeout = 60

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, as addresses contain the token."""

    def do_GET(self) -> None:
        """Answer with the page or its data."""
        self._handle()

    def do_POST(self) -> None:
        """Save a label."""
        self._handle()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that the base class cannot parse, always with a status of 4xx."""
        # Methods other than GET and POST.
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._send(405, "The page is read with GET, and labels are sent with POST.", ALLOW)
        else:
            self._send(code if code < 500 else 400, message or HTTPStatus(code).phrase)

    def _handle(self) -> None:
        """Check the request and call its route; refusals and user errors become replies."""
        try:
            # DNS rebinding would come with another name.
            if not self.server.allows_host(self.headers.get("Host", "")):
                raise _HttpRefusal(403, "This server answers only to localhost and its address.")
            path, query = self._read_target()
            if path not in ROUTES:
                raise _HttpRefusal(404, "There is nothing at this address.")
            method, route = ROUTES[path]
            if self.command != method:
                raise _HttpRefusal(405, f"{path} takes {method} only.")
            # Another site may send a form with the cookie; only the page may write.
            if method == "POST" and not self._same_origin():
                raise _HttpRefusal(403, "Labels are taken from the page itself only.")
            route(self, query)
        except _HttpRefusal as refusal:
            self._send(refusal.status, str(refusal), ALLOW if refusal.status == 405 else None)
        except UserError as error:
            self._send(400, str(error))

    def _read_target(self) -> tuple[str, dict[str, str]]:
        """Return path and query of a request; refuse it without the token."""
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
        """Whether the query or the cookie has the token, compared in constant time."""
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
        """Whether the request comes from this page; programs send no Origin."""
        origin = self.headers.get("Origin")
        try:
            return origin is None or urlsplit(origin).netloc == self.headers.get("Host")
        except ValueError:
            return False

    def _serve_page(self, query: dict[str, str]) -> None:
        """Send the page; an address with the token is first replaced by a cookie."""
        if "token" in query:  # so that the address in the browser does not show it
            cookie = f"{self._cookie_name}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._send(303, "", {"Location": "/", "Set-Cookie": cookie})
            return
        text = render_page({"live": True, **self._collect_state()})
        # A header can also forbid frames, which the page's meta element cannot.
        policy = text.split('http-equiv="Content-Security-Policy" content="', 1)[1].split('"')[0]
        self._send(
            200, text, {"Content-Security-Policy": f"{policy}; frame-ancestors 'none'"}, "text/html"
        )

    def _collect_state(self) -> dict[str, Any]:
        """Return the data of all runs but their responses."""
        runs = self.server.runs
        return {
            "seen": repr([run.version() for run in runs]),
            "runs": [run.read() for run in runs],
            "compared": compare_for_page([run.folder for run in runs]),
            "labels": [read_labels_by_place(run.folder) for run in runs],
            "calibrate": [_calibrate_command(run.folder) for run in runs],
        }

    def _serve_runs(self, query: dict[str, str]) -> None:
        """Send the data of all runs but their responses; an empty object if nothing is new."""
        same = query.get("seen") == repr([run.version() for run in self.server.runs])
        self._send_json({} if same else self._collect_state())

    def _serve_index(self, query: dict[str, str]) -> None:
        """Send the steps of the index that are new after `since` changes, and what is left."""
        since = _parse_count(query, "since")
        changed, since, left = self._select_rollouts(query).changes(since, ANSWER_S)
        steps = [(*place, [row[2:-1] for row in rows]) for place, rows in changed.items()]
        self._send_json({"fields": Row._fields[2:-1], "steps": steps, "since": since, "left": left})

    def _serve_texts(self, query: dict[str, str]) -> None:
        """Send the responses with these ids; texts are cut to `chars` characters, 0 means whole.

        Details of tokens come if `tokens` is 1.
        """
        rollouts = self._select_rollouts(query)
        rows = rollouts.rows_of_ids(query.get("ids", "").split(","))
        chars = _parse_count(query, "chars") or None
        self._send_json(rollouts.read(rows, chars, tokens=_parse_count(query, "tokens") > 0))

    def _serve_search(self, query: dict[str, str]) -> None:
        """Send the ids of the responses whose texts match a pattern."""
        rollouts = self._select_rollouts(query)
        found = rollouts.search(query.get("pattern", ""), query.get("where", ""))
        self._send_json([row.id for row in found])

    def _take_label(self, query: dict[str, str]) -> None:
        """Save the label in the request's body, and send its line back."""
        body = self._read_body()
        try:
            sent = json.loads(body)
            label, comment, name = sent["label"], sent["comment"], sent["id"]
            response = sent.get("response_id")
            # `type`, as True and False are ints for isinstance.
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
        # Several different lengths are a sign of request smuggling.
        lengths = set(self.headers.get_all("Content-Length", []))
        size = lengths.pop() if len(lengths) == 1 else ""
        if not re.fullmatch("[0-9]+", size):
            raise _HttpRefusal(400, "A label comes with one Content-Length.")
        if len(size) > 9 or int(size) > MAX_BODY_BYTES:
            raise _HttpRefusal(413, f"A label may have {MAX_BODY_BYTES:,} bytes with its comment.")
        # A client that sends less than it announced must not block the thread.
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
        """Return the responses of the run with the query's number."""
        number = _parse_count(query, "run")
        if number >= len(self.server.rollouts):
            raise UserError(f"There is no run '{number}'.")
        return self.server.rollouts[number]

    def _send_json(self, value: Any) -> None:
        """Send a value as JSON."""
        self._send(200, encode_json(value), {}, "application/json")

    def _send(
        self,
        status: int,
        text: str,
        headers: Mapping[str, str] | None = None,
        kind: str = "text/plain",
    ) -> None:
        """Send a reply; after an error the connection is closed."""
        # Texts of models may have half surrogate pairs.
        body = text.encode("utf-8", "backslashreplace")
        self.request_version = self.protocol_version  # malformed requests get a status line as well
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
        """Stop sending, and read the rest of a refused request for at most BODY_S seconds.

        Closing at once would reset the connection, and the client might lose the answer.
        """
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(1.0)
        ends = time.monotonic() + BODY_S
        with suppress(OSError):
            while time.monotonic() < ends and self.rfile.read1(1 << 16):
                pass


class _HttpRefusal(Exception):
    """A refused request: its HTTP status and the text of the reply."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


# Path -> (method, handler).
_Route = Callable[[_Handler, dict[str, str]], None]
ROUTES: Mapping[str, tuple[str, _Route]] = {
    "/": ("GET", _Handler._serve_page),
    "/api/runs": ("GET", _Handler._serve_runs),
    "/api/index": ("GET", _Handler._serve_index),
    "/api/texts": ("GET", _Handler._serve_texts),
    "/api/search": ("GET", _Handler._serve_search),
    "/api/label": ("POST", _Handler._take_label),
}


def _parse_count(query: Mapping[str, str], name: str) -> int:
    """Return a whole number of the query, 0 if it is missing; UserError for anything else."""
    number = parse_whole_number(query.get(name, "0"))
    if number is None:
        raise UserError(f"'{query[name]}' is not a whole number ({name}).")
    return number


def _calibrate_command(folder: Path) -> str:
    """Return the command that compares the reward of a run with the labels from the page."""
    labels, config = (shlex.quote(str(folder / n)) for n in (LABELS_FILE, "config.yaml"))
    return ppo(f"reward calibrate {labels} --labels label --config {config}")


def open_runs(folders: Sequence[Path]) -> list[RunData]:
    """Return the runs of these folders, each with a unique name."""
    return list(map(RunData, folders, name_runs(folders)))
