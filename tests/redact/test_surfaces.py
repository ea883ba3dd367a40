"""Runs whose texts are code and JSON with keys: each surface shows all of it but the keys."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from ppo_cli.cli.screen import print_json
from ppo_cli.cli.show import show_app
from ppo_cli.records import Prompt, Rollout, Score, Scored
from ppo_cli.report.page.run_data import RunData
from ppo_cli.report.page.server import PageServer, render_report
from ppo_cli.report.tracker import Screen, Tracker
from ppo_cli.run.export import write_card
from ppo_cli.run_folder.lines import METRICS_FILE, read_metrics, rollout_file
from tests.settings import complete

SECRETS = {
    "known": 'a-known "word\\',
    "openai": "sk-proj-q7Rk2LmX9vTb4NcW8sYd1Zg5",
    "hub": "hf_q7Rk2LmX9vTb4NcW8sYd1Zg5q7Rk2LmX9v",
    "query": "q7Rk2LmX9vTb4NcW",
}
SNIPPETS = [
    '<img src="https://maps.example.com/staticmap?center=Paris&key=YOUR_API_KEY">',
    'print(requests.get("http://api?api_key=K1").json())',
    "curl \"https://h/?sig=1\" -H 'Authorization: Bearer $TOKEN'",
    '{"url": "https://h/?x=1&password=p"}',
    "from huggingface_hub import hf_hub_download  # ?donkey=brown",
    'echo "\\u0022" && cat <<EOF\n{"a": "\\\\"}\nEOF',
    '<script>fetch("/?token=x")</script></html>',
    f'{{"key": "{SECRETS["openai"]}", "n": 1}}',
    json.dumps({"known": SECRETS["known"], SECRETS["known"]: ["\n" + SECRETS["hub"]]}),
    f'<a href="https://h/?a=b&amp;access_token={SECRETS["query"]}">x</a>',
    f"export A='{SECRETS['known']}'",
    f'fetch("https://h/?key={SECRETS["query"]}")',
]


def hidden(text: str) -> str:
    """The snippet as it may be shown, worked out by hand: JSON escapes are a part of the key."""
    for secret in SECRETS.values():
        text = text.replace(json.dumps(secret)[1:-1], "***").replace(secret, "***")
    return text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("secrets") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOME_SERVICE_API_KEY", SECRETS["known"])
        tracker = Tracker(folder, Screen(), (), total_steps=1, config=complete({}))
        rows = [
            Scored(
                Rollout(
                    Prompt(f"u{n}", text, (), "", (1,), "code", {"answer": text}), 0, (5,),
                    np.zeros(1, np.float32), text, "stop",
                ),
                Score(0.5, reason=text, reply=json.dumps({"reason": text}), info={text: [text]}),
            )
            for n, text in enumerate(SNIPPETS)
        ]  # fmt: skip
        tracker.rollouts(1, rows)
        tracker.step(1, {"reward_mean": 0.5, f"reward/{SECRETS['known']}": 0.5})
        tracker.close()
        yield folder


def check_rows(rows: list[dict[str, Any]]) -> None:
    assert [row["response"] for row in rows] == [hidden(text) for text in SNIPPETS]
    assert [row["prompt"] for row in rows] == [row["response"] for row in rows]


def test_line_files_hold_the_texts_without_the_keys(run: Path) -> None:
    lines = [json.loads(line) for line in rollout_file(run, 1).read_text().splitlines()]
    check_rows(lines)
    for line in lines:
        assert line["ground_truth"] == {"answer": line["response"]}
        assert line[line["response"]] == [line["response"]]
    assert read_metrics(run)[0]["reward/***"] == 0.5
    files = (run / METRICS_FILE).read_text() + rollout_file(run, 1).read_text()
    assert not [name for name, secret in SECRETS.items() if secret in files]


def test_a_page_of_files_that_hold_keys_is_whole_without_them(run: Path, tmp_path: Path) -> None:
    """Files of another program, or of a run without the key: the page is the last to hide it."""
    (tmp_path / METRICS_FILE).write_text((run / METRICS_FILE).read_text())
    file = rollout_file(tmp_path, 1)
    file.parent.mkdir()
    rows = [
        {"uid": f"u{n}", "sample": 0, "prompt": t, "response": t} for n, t in enumerate(SNIPPETS)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = render_report([RunData(tmp_path, "run")])
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert block
    check_rows(json.loads(block[1])["rows"][0])
    result = CliRunner().invoke(show_app, [str(tmp_path), "--step", "1", "--json"])
    check_rows(json.loads(result.stdout))
    with PageServer([RunData(tmp_path, "run")]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def ask(path: str, body: Any = None, **query: str) -> Any:
            parameters = urlencode({"token": server.token, **query})
            address = f"http://127.0.0.1:{server.port}{path}?{parameters}"
            sent = None if body is None else json.dumps(body).encode()
            with urlopen(Request(address, sent), timeout=20) as reply:
                return reply.read().decode()

        ids = ",".join(f"train:1:{n}" for n in range(len(SNIPPETS)))
        check_rows(json.loads(ask("/api/texts", ids=ids)))
        assert not [name for name, secret in SECRETS.items() if secret in ask("/api/index")]
        for n in range(len(SNIPPETS)):
            body = {"id": f"train:1:{n}", "label": 1, "comment": SNIPPETS[n]}
            assert json.loads(ask("/api/label", body))["comment"] == hidden(SNIPPETS[n])
        labels = json.loads(ask("/api/runs"))["labels"][0]
        assert [line["response"] for line in labels.values()] == [hidden(t) for t in SNIPPETS]
        server.shutdown()


def test_json_of_commands_is_json_without_keys(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_json({"texts": SNIPPETS, "delete": "\x7f\x9b", SECRETS["openai"]: float("nan")})
    shown = json.loads(capsys.readouterr().out)
    texts = [hidden(text) for text in SNIPPETS]
    assert shown == {"texts": texts, "delete": "\x7f\x9b", "***": None}


def test_a_card_s_front_matter_stays_yaml(run: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text(f"---\nlicense_name: {SECRETS['hub']}\n---\n")
    (base / "config.json").write_text("{}")
    (run / "config.yaml").write_text(f'model:\n  path: "{base}"  # flag --model\n')
    write_card(run, tmp_path, name="model", step=1, critic=False, checked="equal")
    card = (tmp_path / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["license_name"] == "***"
