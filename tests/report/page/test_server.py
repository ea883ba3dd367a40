"""`ppo view` as a server: who is answered, what is refused, rows by query, labels on the disk."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from ppo_cli.report.page import server as page_server
from ppo_cli.report.page.server import PageServer
from ppo_cli.run_folder.lines import read_lines, replace_lines, rollout_file
from ppo_cli.scoring.rows import read_labels, read_responses
from tests.report.page.runs import make_run, serve


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    with serve(make_run(tmp_path_factory.mktemp("view") / "run", steps=6)) as server:
        yield server


def call(
    server: PageServer, path: str, *, body: Any = None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    sent = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, sent, headers)
    reply = connection.getresponse()
    response = reply.status, reply.read().decode(), dict(reply.getheaders())
    connection.close()
    return response


def ask(server: PageServer, path: str, body: Any = None, **query: Any) -> Any:
    query_text = urlencode({"token": server.token, **query})
    status, text, _ = call(server, f"{path}?{query_text}", body=body)
    assert status == 200, text
    return json.loads(text)


def test_only_the_token_opens_it(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, _, headers = call(server, f"/?token={server.token}")
    assert (status, headers["Location"]) == (303, "/")
    cookie = headers["Set-Cookie"].split(";")[0]
    assert "HttpOnly" in headers["Set-Cookie"]
    assert "SameSite=Strict" in headers["Set-Cookie"]
    status, text, headers = call(server, "/", Cookie=cookie)
    assert (status, text[:15]) == (200, "<!doctype html>")
    assert server.token not in text
    assert "unsafe-eval" not in headers["Content-Security-Policy"]
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    wrong = server.token[:-1] + ("A" if server.token[-1] != "A" else "B")
    for path in (
        "/",
        "/api/runs",
        "/api/index",
        "/api/texts?ids=train:1:0",
        "/api/search?pattern=a",
        "/other",
    ):
        for sent_cookie in ("", f"token={wrong}", "token=", "token=%ff"):
            status, text, _ = call(server, path + ("&" if "?" in path else "?") + sent_cookie)
            assert (status, "answer" in text) == (403, False), (path, sent_cookie)
    assert call(server, "/api/runs", Cookie=f"ppo_view_{server.port}={wrong}")[0] == 403
    assert call(server, "/api/label", body={"id": "train:1:0"})[0] == 403


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.test", 403),
        ("127.0.0.1.evil.test", 403), ("localhost.evil.test:80", 403), ("10.0.0.1", 403),
        ("", 403), ("[", 403),
    ],
)  # fmt: skip
def test_another_name_of_the_machine_is_refused(server: PageServer, host: str, status: int) -> None:
    """A name of somebody else that resolves to 127.0.0.1 (DNS rebinding)."""
    assert call(server, f"/api/runs?token={server.token}", Host=host)[0] == status


def test_paths_lead_nowhere_else(server: PageServer, tmp_path: Path) -> None:
    for path in ("/../config.yaml", "/config.yaml", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd"):
        assert call(server, f"{path}?token={server.token}")[0] == 404, path
    for name in ("train:../../x:0", "x:1:0", "train:1:-1", "train:1:99", "train:²:0", "", ":::"):
        status, text, _ = call(
            server, "/api/texts?" + urlencode({"token": server.token, "ids": name})
        )
        assert (status, text) == (400, f"There is no response '{name}'."), name
    for number in ("1", "-1", "x", "²"):
        path = "/api/index?" + urlencode({"token": server.token, "run": number})
        assert call(server, path)[0] == 400, number
    folder = make_run(tmp_path / "run", steps=2)
    outside = tmp_path / "outside.jsonl"
    outside.write_text(rollout_file(folder, 2).read_text())
    rollout_file(folder, 2).unlink()
    rollout_file(folder, 2).symlink_to(outside)
    with serve(folder) as other:
        status, text, _ = call(other, f"/api/index?token={other.token}")
    assert status == 400
    assert "leads out of the run folder" in text


def test_the_index_has_all_rows_once_and_then_what_changed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=6)
    with serve(folder) as server:
        reply = ask(server, "/api/index")
        while reply["left"]:
            more = ask(server, "/api/index", since=reply["since"])
            reply = more | {"steps": reply["steps"] + more["steps"]}
        assert [(split, step) for split, step, _ in reply["steps"]] == [
            ("train", step) for step in (6, 5, 4, 3, 2, 1)
        ]
        rows = {
            (step, row[0]): dict(zip(reply["fields"], row, strict=True))
            for _, step, rows in reply["steps"]
            for row in rows
        }
        assert len(rows) == 48
        assert rows[6, 5] == {
            "line": 5, "uid": "train:5", "sample": 0, "data_source": "add", "score": 11 / 14,
            "cause": "", "tokens": 6, "disputed": pytest.approx(11 / 14 - 0.5, abs=1e-6),
            "detailed": 0, "turn_count": 0, "tool_errors": 0,
        }  # fmt: skip
        assert (rows[2, 3]["score"], rows[2, 3]["cause"]) == (None, "timeout after 10 s")
        assert rows[3, 5]["disputed"] == 0.9, "between two judges"
        assert ask(server, "/api/index", since=reply["since"])["steps"] == []
        # The run goes on from step 4: a step is gone, another one is written again.
        rollout_file(folder, 6).unlink()
        lines = read_lines(rollout_file(folder, 5))
        replace_lines(rollout_file(folder, 5), lines[:2])
        changed = ask(server, "/api/index", since=reply["since"])["steps"]
        assert {step: len(rows) for _, step, rows in changed} == {5: 2, 6: 0}


def test_texts_are_searched_by_a_pattern(server: PageServer) -> None:
    cases: list[tuple[dict[str, Any], int]] = [
        ({"pattern": r"answer \d at 4"}, 8), ({"pattern": "ANSWER 5"}, 6),
        ({"pattern": "answer", "where": "prompt"}, 0),
        ({"pattern": "because", "where": "reason"}, 47), ({"pattern": "question 1"}, 6),
    ]  # fmt: skip
    for query, total in cases:
        assert len(ask(server, "/api/search", **query)) == total, query
    assert ask(server, "/api/search", pattern="answer 5 at 6") == ["train:6:5"]
    query_text = urlencode({"token": server.token, "pattern": "(a|a)*$" * 9})
    assert call(server, f"/api/search?{query_text}")[0] in {200, 400}


def test_texts_come_by_ids_and_are_cut_where_asked(server: PageServer) -> None:
    row, other = ask(server, "/api/texts", ids="train:6:5,train:1:0")
    assert (row["response"], row["ground_truth"]) == ("answer 5 at 6 of the run", {"a": 5})
    assert row["parts"]["judge"]["raw"] == pytest.approx(110 / 14)
    assert (other["step"], other["uid"]) == (1, "train:0")
    (row,) = ask(server, "/api/texts", ids="train:6:5", chars=6)
    assert (row["response"], row["cut"]["response"]) == ("answer", 24)


def test_a_label_lands_in_the_run_folder_as_calibrate_reads_it(server: PageServer) -> None:
    folder = server.runs[0].folder
    for place, label in enumerate((1, 0, 1, 0.0)):
        label_request = {"id": f"train:5:{place}", "label": label, "comment": f"no. {place} <b>"}
        assert ask(server, "/api/label", body=label_request)["label"] == label
    ask(server, "/api/label", body={"id": "train:5:4", "label": None, "comment": "look again"})
    ask(server, "/api/label", body={"id": "train:5:1", "label": 1, "comment": ""})
    ask(server, "/api/label", body={"id": "train:5:0", "label": None, "comment": ""})
    lines = {line["id"]: line for line in read_lines(folder / "labels.jsonl")}
    assert set(lines) == {f"train:5:{n}" for n in (1, 2, 3, 4)}
    assert lines["train:5:2"]["response"] == "answer 2 at 5 of the run"
    labelled = read_labels(read_responses(str(folder / "labels.jsonl")), "label")
    assert sorted(labelled.values) == [0, 1, 1]
    assert ask(server, "/api/runs")["labels"][0]["train:5:4"]["comment"] == "look again"
    token = f"/api/label?token={server.token}"
    good = {"id": "train:5:1", "label": 0, "comment": ""}
    wrong: dict[str, Any]
    for wrong in (
        {"label": "x"}, {"label": float("nan")}, {"label": []}, {"label": True}, {"label": 10**400},
        {"id": "train:9:1"}, {"id": None}, {"comment": 1}, {"response_id": "of another response"},
    ):  # fmt: skip
        assert call(server, token, body=good | wrong)[0] == 400, wrong
    for body in ({}, [], 1):
        assert call(server, token, body=body)[0] == 400, body
    for origin in ("http://127.0.0.1:1", "http://[", "null"):
        assert call(server, token, body=good, Origin=origin)[0] == 403, origin
    assert {line["id"] for line in read_lines(folder / "labels.jsonl")} == set(lines)


def test_what_a_page_has_seen_is_not_sent_again(server: PageServer) -> None:
    seen = ask(server, "/api/runs")["seen"]
    assert ask(server, "/api/runs", seen=seen) == {}


HOST = b"Host: 127.0.0.1\r\n"
MALFORMED: list[tuple[bytes, int]] = [
    *((b"%s / HTTP/1.1\r\n" % method + HOST, 405)
      for method in (b"PUT", b"HEAD", b"OPTIONS", b"get", b"X-Y")),
    (b"GET /api/label?TOKEN HTTP/1.1\r\n" + HOST, 405),
    (b"POST /api/index?TOKEN HTTP/1.1\r\n" + HOST, 405),
    *((line + b"\r\n", 400)
      for line in (b"\x16\x03\x01", b"GET / HTTP/9.9", b"GET / x HTTP/1.1", b"GET / FOO")),
    (b"GET /%s HTTP/1.1\r\n" % (b"a" * 70_000), 414),
    (b"GET / HTTP/1.1\r\nX: %s\r\n" % (b"a" * 70_000), 431),
    *((b"GET /%s?TOKEN HTTP/1.1\r\n" % path + HOST, 404)
      for path in (b"../../etc/passwd", b"%2e%2e/config.yaml", b"api/index/", b"%00")),
    (b"GET http://[/?TOKEN HTTP/1.1\r\n" + HOST, 400),
    (b"GET /api/index HTTP/1.1\r\n" + HOST, 403),
    *((b"GET /api/index?TOKEN&%s HTTP/1.1\r\n" % query + HOST, 400)
      for query in (b"since=x", b"since=-1", b"since=" + b"9" * 6000, b"run=" + b"9" * 6000)),
    *((b"GET /api/search?TOKEN&pattern=%s HTTP/1.1\r\n" % pattern + HOST, 400)
      for pattern in (b"%ff", b"\xe9", b"%28", b"(" * 20_000, b"%28%3FR%29")),
    *((b"GET /api/texts?TOKEN&ids=%s HTTP/1.1\r\n" % name + HOST, 400)
      for name in (b"train:1:" + b"9" * 6000, b"train:" + b"9" * 6000 + b":0", b"x", b"")),
    (b"GET /api/texts?TOKEN&ids=train:1:0&chars=x HTTP/1.1\r\n" + HOST, 400),
]  # fmt: skip
BODIES: list[tuple[bytes, bytes, int]] = [
    (b"Content-Length: 2", b"{", 400),  # and the client ends there
    *((b"Content-Length: %d" % len(body), body, 400)
      for body in (b"{", b"[" * 50_000, b'{"id":"\xff"}', b'{"label":%s}' % (b"9" * 5000))),
    *((length, b"{}", 400)
      for length in (b"Content-Length: -1", b"Content-Length: many", b"Content-Length:", b"X: y",
                     b"Transfer-Encoding: chunked", b"Content-Length: 2\r\nContent-Length: 3")),
    (b"Content-Length: 20000000", b"x" * 20_000_000, 413),
    (b"Content-Length: %s" % (b"9" * 5000), b"{}", 413),
]  # fmt: skip


def status_of(server: PageServer, request: bytes) -> int:
    """Send bytes as they are; the status of the answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(request.replace(b"TOKEN", b"token=" + server.token.encode()))
        connection.shutdown(socket.SHUT_WR)
        line = connection.makefile("rb").readline()
    assert line.startswith(b"HTTP/1.1 "), line
    return int(line.split()[1])


def test_a_request_that_cannot_be_read_is_refused_and_the_next_one_answered(
    server: PageServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for head, status in MALFORMED:
        assert status_of(server, head + b"\r\n") == status, head[:80]
    post = b"POST /api/label?TOKEN HTTP/1.1\r\n" + HOST
    for header, body, status in BODIES:
        assert status_of(server, post + header + b"\r\n\r\n" + body) == status, (header, body[:80])
    assert len(ask(server, "/api/search", pattern="answer")) == 48
    assert capfd.readouterr().err == ""


def test_a_body_that_does_not_come_is_not_waited_for(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "BODY_S", 0.1)
    head = b"POST /api/label?token=%s HTTP/1.1\r\n" % server.token.encode() + HOST
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head + b"Content-Length: 500\r\n\r\n{}")
        assert connection.makefile("rb").readline() == b"HTTP/1.1 400 Bad Request\r\n"
