"""The page in a real browser: curves are drawn, filters filter, hostile texts stay texts.

The two ways to open it are quick tests; what each part of it shows is left to the slow ones.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.report.page.run_data import RunData
from ppo_cli.report.page.server import render_report
from ppo_cli.report.tracker import Screen, Tracker
from ppo_cli.run_folder.lines import (
    append_line,
    read_lines,
    replace_lines,
    rollout_file,
    rollout_steps,
)
from tests.report.page.runs import (
    HOSTILE,
    PIECES,
    TOKENS,
    add_critic,
    add_episodes,
    add_tokens,
    make_run,
    serve,
)
from tests.settings import complete

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="no chromium: apt-get install chromium chromium-driver (scripts/setup dev does)",
)


def environ_of_chromium() -> dict[str, str]:
    """It does not start where its socket's path is too long, or where its home is read-only."""
    return {**os.environ, "TMPDIR": "/tmp", "HOME": "/tmp"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="scripts/setup dev installs it")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync",
        "disable-background-networking", "disable-component-update", "disable-dev-shm-usage",
        "window-size=1400,1000", f"user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER, env=environ_of_chromium()))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    long = f"reward.api.base_url=https://judge.example/{'a' * 200}"
    return make_run(tmp_path_factory.mktemp("browser") / "run", hostile=True, overrides=[long])


def until(condition: Callable[[], Any]) -> Any:
    """What a page shows in the end; it draws and asks in its own time."""
    end = time.monotonic() + 120
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    assert value
    return value


def errors_of(browser: Any) -> list[str]:
    return [e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE"]


def texts(browser: Any, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
    texts: list[str] = browser.execute_script(script, selector)
    return texts


def fill(browser: Any, name: str, value: str) -> None:
    """Set a field of the filter as a person does, and wait until the table has followed."""
    browser.execute_script(
        "const f = document.getElementById('filter').elements[arguments[0]];"
        "f.value = arguments[1]; f.dispatchEvent(new Event('input', { bubbles: true }));",
        name, value,
    )  # fmt: skip


def count(browser: Any) -> str:
    return texts(browser, "#found")[0]


def look_through(browser: Any, total: int) -> None:
    """What both ways to open the page show: curves, a filtered table, a response."""
    until(lambda: "of" in count(browser))
    sentence = texts(browser, ".sentence")[0]
    assert sentence.startswith(
        "The reward rose, validation not clearly: validation reward 0.50 to 0.50, reward 0.50 to "
    )
    (fault,) = until(lambda: texts(browser, ".card.out"))
    assert fault.startswith("KL to the reference") and "since step 17: kl 0.14 is above" in fault
    assert texts(browser, ".card h3")[0] == "KL to the reference nats a token"
    assert "entropy 1" in texts(browser, "#constant")[0]
    until(lambda: texts(browser, ".card[data-drawn] h3"))
    drawn = "return document.querySelector('.card[data-drawn] .bk-Figure').clientWidth"
    assert browser.execute_script(drawn) > 300
    assert count(browser) == f"{total} of {total} responses"
    sources = texts(browser, "#filter [name=source] option")
    assert sources == ["all", next(t for t in HOSTILE if t[:4] == "<img"), "add", "sub"]
    for name, value, number in (
        ("source", "add", 39 * 4 + len(HOSTILE) // 2), ("max", "0.1", 10), ("why", "unscored", 1),
        ("why", "unscored: timeout after 10 s", 1), ("why", "scored", total - 1),
    ):  # fmt: skip
        fill(browser, name, value)
        until(lambda n=number: count(browser) == f"{n} of {total} responses")
        fill(browser, name, "")
    until(lambda: count(browser) == f"{total} of {total} responses")
    reasons = texts(browser, "#filter [name=why] option")
    assert reasons[2:] == ["without a score (1)", "without a score: timeout after 10 s (1)"]
    fill(browser, "pattern", r"answer 5 at 1\d")
    until(lambda: count(browser) == f"10 of {total} responses")
    fill(browser, "from_step", "15")
    until(lambda: count(browser) == f"5 of {total} responses")
    fill(browser, "pattern", "(")
    until(lambda: "cannot be read" in count(browser))
    fill(browser, "pattern", "answer 5 at")
    until(lambda: count(browser) == f"25 of {total} responses")
    width = "return ['table', 'reader'].map((id) => document.getElementById(id).clientWidth)"
    table, reader = browser.execute_script(width)
    assert table == reader, "the table has the whole width until a response is chosen"
    browser.execute_script("document.querySelector('#table tbody tr').click()")
    until(lambda: "answer 5 at 39" in " ".join(texts(browser, "#pane .text")))
    for name in ("thoughts", "response_id"):
        assert name not in texts(browser, "#pane")[0], "what the page works with is no fact to read"
    until(lambda: texts(browser, "#reading > .text ins") == ["39"])
    assert texts(browser, "#reading > .text del") == ["38"]
    assert texts(browser, "#pane .beside b") == ["step 1", "step 40"]
    browser.find_element("css selector", "body").send_keys("j")
    until(lambda: "answer 5 at 38" in " ".join(texts(browser, "#pane .text")))
    fill(browser, "from_step", "")
    fill(browser, "pattern", "")
    until(lambda: count(browser) == f"{total} of {total} responses")


def write_report(run: Path, folder: Path) -> Path:
    file = folder / "report.html"
    file.write_text(render_report([RunData(run, "run")]), encoding="utf-8")
    return file


@pytest.mark.slow
def test_a_report_is_read_without_a_server(browser: Any, run: Path, tmp_path: Path) -> None:
    file = write_report(run, tmp_path)
    browser.get(file.as_uri())
    look_through(browser, 39 * 8 + len(HOSTILE))
    fill(browser, "from_step", "40")
    until(lambda: len(texts(browser, "#table tbody tr")) == len(HOSTILE))
    shown = ""
    for place in range(len(HOSTILE)):
        script = "document.querySelectorAll('#table tbody tr')[arguments[0]].click()"
        browser.execute_script(script, place)
        until(lambda n=place: f"train:{n} #0" in texts(browser, "#pane p")[0])
        shown += texts(browser, "#pane")[0]
    assert "<img src=x onerror=" in shown
    assert "[U+202E]gnp.exe[U+202C]" in shown
    assert "hidden <b>thought</b>" in texts(browser, "#pane")[0] + shown
    assert "the first 20,000 of 5,000,000 characters" in shown
    assert browser.execute_script("return window.ran === undefined")
    forbidden = 'main img, main iframe, main script, main a[href]:not([href^="#"]), main object'
    assert texts(browser, forbidden) == []
    assert errors_of(browser) == []


@pytest.mark.slow
def test_the_address_keeps_what_is_shown(browser: Any, run: Path, tmp_path: Path) -> None:
    file = write_report(run, tmp_path)
    browser.get(f"{file.as_uri()}#at=curves&from=3&to=9&smooth=0.5")
    until(lambda: browser.execute_script("return cards.some((card) => card.figure)"))
    steps = "const { start, end } = cards.find((card) => card.figure).figure.x_range;"
    assert browser.execute_script(f"{steps} return [start, end, view.smooth]") == [3, 9, 0.5]
    browser.execute_script("document.querySelector('nav a[href=\"#settings\"]').click()")
    until(lambda: "at=settings" in browser.current_url)
    browser.execute_script("document.getElementById('zoom-all').click()")
    assert browser.current_url == f"{file.as_uri()}#at=settings&smooth=0.5"
    assert errors_of(browser) == []


def hover(browser: Any, card: int, share: float, event: str) -> None:
    """Point at a plot, as far from its left end as `share` says."""
    browser.execute_script(
        "const { area } = cards[arguments[0]], box = area.getBoundingClientRect();"
        "const at = { clientX: box.left + box.width * arguments[1], clientY: box.top + 90 };"
        "const mouse = { ...at, bubbles: true, pointerType: 'mouse' };"
        "for (const name of arguments[2].split(' ')) {"
        "  area.dispatchEvent(new PointerEvent(name, mouse));"
        "}", card, share, event,
    )  # fmt: skip


@pytest.mark.slow
def test_a_step_pointed_at_is_read_in_all_cards_and_chosen_by_a_click(
    browser: Any, run: Path, tmp_path: Path
) -> None:
    browser.get(write_report(run, tmp_path).as_uri())
    until(lambda: len(texts(browser, ".card[data-drawn]")) > 2)
    last = texts(browser, ".card .legend")
    hover(browser, 0, 0.5, "pointermove")
    (step,) = {text for text in texts(browser, ".card[data-drawn] .cross") if text}
    number = int(step.removeprefix("step "))
    assert 10 < number < 30
    place = texts(browser, ".card h3").index("Reward ")
    assert texts(browser, ".card .legend")[place] == f"{0.4775 + 0.01 * number:.3g}"
    hover(browser, 0, 0.5, "pointerleave")
    assert texts(browser, ".card .legend") == last
    hover(browser, 0, 0.5, "pointerdown click")
    until(lambda: set(texts(browser, "#table tbody td:first-child")) == {str(number)})
    assert errors_of(browser) == []


@pytest.mark.slow
def test_a_plot_is_saved_as_picture_and_as_table(browser: Any, run: Path, tmp_path: Path) -> None:
    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", where)
    browser.get(write_report(run, tmp_path).as_uri())
    until(lambda: texts(browser, ".card[data-drawn]"))
    browser.execute_script("document.querySelectorAll('.card .head button').forEach((b, i) =>"
                           "{ if (i < 2) b.click(); })")  # fmt: skip
    table = tmp_path / "KL to the reference.csv"
    picture = tmp_path / "KL to the reference.png"
    until(lambda: table.exists() and picture.exists())
    lines = table.read_text().splitlines()
    assert lines[:2] == ["step,KL to the reference", "1,0.05"] and lines[40] == "40,0.14"
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 3000


PLOTS = (
    "kl_divergence", "entropy", "explained_variance", "value_loss", "ppo_ratio", "policy_loss",
    "response/repetition", "response_length/clip_ratio", "perf/tokens_per_s", "judge/drift",
    "rollout/logprob_diff", "judge/monitor_gap",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_paper_shows_every_plot_in_its_column(tmp_path: Path, scheme: str) -> None:
    """Chromium prints as soon as the page is loaded."""
    run = tmp_path / "run"
    changing = [{"step": step, **dict.fromkeys(PLOTS, step / 50)} for step in range(1, 41)]
    replace_lines(run / "metrics.jsonl", changing)
    paper = tmp_path / "page.pdf"
    assert CHROMIUM
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--print-to-pdf={paper}",
        f"--user-data-dir={tmp_path / 'profile'}", write_report(run, tmp_path).as_uri(),
    ]  # fmt: skip
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    subprocess.run(
        [*command, *dark], env=environ_of_chromium(), check=True, capture_output=True, timeout=60
    )
    streams = re.findall(rb"stream\r?\n(x.*?)endstream", paper.read_bytes(), re.DOTALL)
    marks = b"".join(map(zlib.decompress, streams))
    # The line of each plot is one path; there are no dots from 30 steps on, and no legends.
    assert len(re.findall(rb"\.1216 \.5137 \.7686 RG", marks)) == len(PLOTS)


@pytest.mark.slow
def test_on_a_phone_a_chosen_response_comes_into_view(
    browser: Any, run: Path, tmp_path: Path
) -> None:
    file = write_report(run, tmp_path)
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True},
    )
    try:
        browser.get(file.as_uri())
        until(lambda: texts(browser, "#table tbody tr"))
        browser.execute_script("document.querySelectorAll('#table tbody tr')[45].click()")
        top = "return document.getElementById('pane').getBoundingClientRect().top"
        until(lambda: 0 <= browser.execute_script(top) < 400)
        first = texts(browser, "#pane p")[0]
        browser.execute_script("document.querySelectorAll('#pane .narrow button')[1].click()")
        until(lambda: texts(browser, "#pane p")[0] != first)
        wide = "return document.documentElement.scrollWidth"
        assert browser.execute_script(wide) <= 390
        # Keys of settings are broken after dots and underscores only.
        lines = (
            "return [...document.querySelectorAll('.settings td:first-child span')].flatMap("
            "  (key) => [...key.childNodes].filter((node) => node.data).map((node) => {"
            "    const range = new Range(); range.selectNodeContents(node);"
            "    return range.getClientRects().length; }))"
        )
        browser.execute_script(
            "for (const d of document.querySelectorAll('details')) d.open = true"
        )
        narrow = {"width": 320, "height": 640, "deviceScaleFactor": 1, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
        assert set(browser.execute_script(lines)) == {1}
        assert browser.execute_script(wide) <= 320
        # The address of a response leads to it, also one that was made on a wide screen.
        browser.get("about:blank")
        browser.get(f"{file.as_uri()}#at=rollouts&response=train%3A20%3A3")
        until(lambda: len(texts(browser, "#table tbody tr")) == 50)
        until(lambda: 0 <= browser.execute_script(top) < 400)
        assert "train:3 #0" in texts(browser, "#pane p")[0]
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_view_follows_the_run_and_keeps_labels(browser: Any, run: Path) -> None:
    with serve(run) as server:
        browser.get(server.url)
        assert server.token not in browser.current_url
        look_through(browser, 39 * 8 + len(HOSTILE))
        good = "document.querySelector('#label button').click()"
        browser.execute_script(good)
        until(lambda: (run / "labels.jsonl").exists() and texts(browser, "#kept")[0])
        (label,) = read_lines(run / "labels.jsonl")
        assert (label["label"], label["response"]) == (1, "answer 5 at 38 of the run")
        tracker = Tracker(run, Screen(), (), 41, complete({}))
        tracker.step(41, {"reward_mean": 0.9, "kl_divergence": 0.01})
        until(lambda: "in 41 steps" in texts(browser, ".sentence")[0])
        assert "nothing" not in texts(browser, "#state")[0]
        # A pattern that cannot be read is refused with 400, which the console repeats.
        assert [e for e in errors_of(browser) if "status of 400" not in e] == []


@pytest.mark.slow
def test_a_label_is_shown_beside_its_response_only(browser: Any, tmp_path: Path) -> None:
    """Also in a page that was open while the run went on from an earlier step."""
    run = make_run(tmp_path / "run", steps=2)
    with serve(run) as server:
        browser.get(server.url)
        until(lambda: texts(browser, "#table tbody tr"))
        for row, click in enumerate(("good", "bad")):
            script = "document.querySelectorAll('#table tbody tr')[arguments[0]].click()"
            browser.execute_script(script, row)
            until(lambda n=row: f"train:{n} #0" in "".join(texts(browser, "#pane p")[:1]))
            script = "document.querySelectorAll('#label button')[arguments[0]].click()"
            browser.execute_script(script, ("good", "bad").index(click))
            until(lambda n=row: len(labelled(browser)) == n + 1)
        assert texts(browser, "#table .good") == [" ●"]
        assert texts(browser, "#table .bad") == [" ○"]
        lines = read_lines(rollout_file(run, 2))
        lines[1]["response"] = "another response"
        replace_lines(rollout_file(run, 2), lines)
        append_line(run / "labels.jsonl", {"step": 1})  # the page notices that labels changed
        until(lambda: browser.execute_script("return Object.keys(DATA.labels[0]).length") == 1)
        browser.execute_script("load()")
        until(lambda: labelled(browser) == ["answer 0 at 2 of the run"])


def labelled(browser: Any) -> list[str]:
    """The responses that the table marks as labelled."""
    rows = "#table tbody tr:has(td.n [title^='your label'])"
    return [text.split("question")[1][2:] for text in texts(browser, rows)]


def click(browser: Any, selector: str, text: str) -> None:
    """Press the button that says a text."""
    script = (
        "[...document.querySelectorAll(arguments[0])].find((b) => b.textContent === arguments[1])"
        ".click()"
    )
    browser.execute_script(script, selector, text)


@pytest.mark.slow
def test_the_same_prompt_is_compared_with_its_start_and_between_runs(
    browser: Any, tmp_path: Path
) -> None:
    runs = [make_run(tmp_path / name, steps=steps) for name, steps in (("long", 6), ("short", 3))]
    for run in runs:  # prompts that begin alike, and one source
        for step in rollout_steps(run):
            lines = read_lines(rollout_file(run, step))
            for line in lines:
                topic = line["prompt"].replace("question ", "topic")
                line |= {"prompt": f"Write one short sentence about {topic}", "data_source": "own"}
            replace_lines(rollout_file(run, step), lines)
    file = tmp_path / "report.html"
    file.write_text(render_report([RunData(run, run.name) for run in runs]), encoding="utf-8")
    browser.get(file.as_uri())
    until(lambda: count(browser) == "48 of 48 responses")
    assert texts(browser, "#table th") == ["step ↓", "score", "tokens", "prompt", "response"]
    assert texts(browser, "#table tr:first-child .clip")[0] == "… about topic0"
    click(browser, "#views button", "worst now and the first response")
    until(lambda: count(browser) == "8 of 48 responses")
    assert texts(browser, "#table th")[-2:] == ["at step 1", "response at step 1"]
    assert texts(browser, "#table tbody tr:first-child td") == [
        "0.429", "… about topic0", "answer 0 at 6 of the run", "0.0714",
        "answer 0 at 1 of the run",
    ]  # fmt: skip
    browser.execute_script("document.querySelectorAll('#table tbody tr')[3].click()")
    titles = ["step 1", "step 6", "long, step 6", "short, step 3"]
    until(lambda: texts(browser, "#pane .beside b") == titles)
    assert texts(browser, "#pane .beside p")[3] == "short, step 3 · score 0.545"
    heads = texts(browser, "#pane h3")
    assert heads[heads.index("response") + 1] == "the same prompt at the first and the latest step"
    # Who opens the address sees the same.
    address = browser.current_url
    browser.get("about:blank")
    browser.get(address)
    until(lambda: texts(browser, "#pane .beside b") == titles)
    assert count(browser) == "8 of 48 responses"
    assert texts(browser, "#views [aria-pressed=true]") == ["worst now and the first response"]
    # A click in a plot asks for the step of a run.
    browser.execute_script("showStep(1, 2)")
    until(lambda: count(browser) == "8 of 24 responses")
    assert set(texts(browser, "#table tbody td:first-child")) == {"2"}
    assert "run=short" in browser.current_url
    assert errors_of(browser) == []


@pytest.mark.slow
def test_the_first_response_is_shown_with_its_step_however_late_that_is(
    browser: Any, tmp_path: Path
) -> None:
    """As in a fork, whose folder has no steps before the one that it was forked at."""
    run = make_run(tmp_path / "run", steps=9)
    for step in (1, 2, 3, 4, 5, 8):
        rollout_file(run, step).unlink()
    replace_lines(rollout_file(run, 6), read_lines(rollout_file(run, 6))[1:])
    browser.get(write_report(run, tmp_path).as_uri())
    until(lambda: count(browser) == "23 of 23 responses")
    click(browser, "#views button", "worst now and the first response")
    until(lambda: count(browser) == "8 of 23 responses")
    assert texts(browser, "#table th")[-3:] == ["response at step 9", "first", "first response"]
    rows = "#table tbody tr:nth-child(-n + 2) td:nth-last-child(2)"
    assert texts(browser, rows) == ["0.412step 7", "0.412step 6"]
    # Validations have the same prompts each time, so that they are compared where there are two.
    for step in (6, 7):
        shutil.copy(rollout_file(run, step), rollout_file(run, step, "val"))
    browser.get("about:blank")
    browser.get(write_report(run, tmp_path).as_uri())
    until(lambda: count(browser) == "38 of 38 responses")
    click(browser, "#views button", "best now and the first response")
    until(lambda: count(browser) == "8 of 38 responses")
    assert texts(browser, "#table th")[-3] == "response at step 7"
    assert errors_of(browser) == []


@pytest.mark.slow
def test_a_rubric_is_read_as_a_table(browser: Any, tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.yaml"
    rubric.write_text(
        "- {name: short, text: It has <b>one</b> sentence., weight: 3, must: true}\n"
        "- {name: invents, text: It invents a fact., weight: -2}\n"
    )
    run = make_run(tmp_path / "run", steps=2, overrides=[f"reward.api.rubric={rubric}"])
    lines = read_lines(rollout_file(run, 2))
    lines[0] |= {
        # A judge that quotes the response cannot give another criterion its grade.
        "reason": "short: not met. <i>\ninvents: present. </i>\ninvents: not present. All known.",
        "criteria": {"short": 0.0, "invents": 1.0}, "cached": True, "judge_tokens": 404,
        "latency_s": 0.0668, "cost_usd": 0.00012, "constructor": "a fact of a function",
        "parts": {"judge": {"raw": 0.0, "scaled": 0.0}, "rubric/short": {"raw": 0, "scaled": None},
                  "rubric/hurdle_missed": {"raw": 1.0, "scaled": None}},
    }  # fmt: skip
    replace_lines(rollout_file(run, 2), lines)
    with serve(run) as server:
        browser.get(server.url)
        until(lambda: texts(browser, "#table tbody tr"))
        assert texts(browser, "#asked summary") == [
            "What the judge qwen-plus was asked: 2 criteria"
        ]
        assert texts(browser, "#asked tbody td") == [
            "short: It has <b>one</b> sentence.", "3, must be met",
            "invents: It invents a fact.", "-2, a fault",
        ]  # fmt: skip
        browser.execute_script("document.querySelector('#table tbody tr').click()")
        until(lambda: texts(browser, "#pane .criteria"))
        assert texts(browser, "#pane .criteria td") == [
            "short: It has <b>one</b> sentence.", "3, must be met", "not met",
            "<i>",
            "invents: It invents a fact.", "-2, a fault", "not present", "</i>",
        ]  # fmt: skip
        facts = dict(zip(texts(browser, "#pane dt"), texts(browser, "#pane dd"), strict=True))
        assert facts == {
            "verdict": "from the cache", "judge tokens": "404", "time": "0.0668 s",
            "cost": "$0.00012", "constructor": "a fact of a function",
        }  # fmt: skip
        assert "the score is 0" in texts(browser, "#pane .failed")[0]
        # The run has no details of tokens: the page says how to keep them.
        assert "trainer.token_details=8" in texts(browser, "#tokens p")[0]
    rubric.unlink()
    browser.get(write_report(run, tmp_path).as_uri())
    until(lambda: texts(browser, "#table tbody tr"))
    assert "rubric.yaml" in texts(browser, "#asked .error")[0]
    assert errors_of(browser) == []


def point_at(browser: Any, token: int, event: str) -> str:
    """Point at a token, or tap it, and return what is said of it."""
    browser.execute_script(
        "document.querySelectorAll('.tokens [data-token]')[arguments[0]].dispatchEvent("
        "  new PointerEvent(arguments[1], { bubbles: true }))", token, event,
    )  # fmt: skip
    return texts(browser, "#tokens [role=status]")[0]


def read_tokens(browser: Any) -> None:
    """What both ways to open the page show of the tokens of a response, with right numbers."""
    browser.execute_script("read('train:3:1')")
    until(lambda: texts(browser, "#tokens button"))
    names = ["none", "value", "advantage", "return", "KL to the reference", "entropy"]
    assert texts(browser, "#tokens button") == names
    assert texts(browser, "#tokens .tokens") == []
    click(browser, "#tokens button", "advantage")
    assert texts(browser, "#tokens [aria-pressed=true]") == ["advantage"]
    assert texts(browser, ".tokens [data-token]") == PIECES
    assert texts(browser, "#tokens .scale") == [
        "advantage: -22 · hatched: masked, not in the losses"
    ]
    # Blue and orange to both sides of zero, full at the largest of all; hatched where masked.
    styles = browser.execute_script(
        "return [...document.querySelectorAll('.tokens span')].map((s) => s.getAttribute('style'))"
    )
    assert ("c0) 15%" in styles[0], "c3) 30%" in styles[1], "c0) 0%" in styles[3]) == (True,) * 3
    assert [n for n, style in enumerate(styles) if style is None] == [4, 5]
    assert texts(browser, ".tokens .masked") == PIECES[4:6]
    for event, token in (("pointerover", 7), ("click", 1)):
        numbers = {name: x if isinstance(x, float) else x[token] for name, x in TOKENS.items()}
        assert point_at(browser, token, event) == (
            f'token {token + 1} of 10: "{PIECES[token]}" · value {numbers["value"]} · advantage '
            f'{numbers["advantage"]:g} · return 1 · KL to the reference {numbers["kl"]} nats · '
            f'entropy {numbers["entropy"]} nats'
        )  # fmt: skip
    assert point_at(browser, 5, "click").endswith("masked: not in the losses")
    assert "no text" in point_at(browser, 2, "click")
    # Keys move from token to token within one tab stop.
    box = browser.find_element("css selector", ".tokens")
    for key, place in (("\ue014", 4), ("\ue014", 5), ("\ue012", 4)):
        box.send_keys(key)
        assert texts(browser, "#tokens [role=status]")[0].startswith(f"token {place} of 10")
    stops = "return document.querySelectorAll('#tokens :is(button, summary, [tabindex])').length"
    assert browser.execute_script(stops) == len(names) + 2
    # All numbers are in a table.
    browser.execute_script("document.querySelector('#tokens details').open = true")
    until(lambda: texts(browser, "#tokens td"))
    cells = texts(browser, "#tokens td")
    for token, row in enumerate(zip(*[iter(cells)] * 7, strict=True)):
        assert row[0] == f"{token + 1}{' masked' if token in (4, 5) else ''}"
        for cell, numbers in zip(row[2:], TOKENS.values(), strict=True):
            expected = numbers if isinstance(numbers, float) else numbers[token]
            assert float(cell) == pytest.approx(expected, rel=5e-3)
    # Another response is coloured as well; one that was not kept says so.
    browser.execute_script("read('train:3:5')")
    until(lambda: "train:5 #0" in texts(browser, "#pane p")[0] and texts(browser, ".tokens"))
    browser.execute_script("read('train:3:2')")
    note = "2 of the 8 responses of this step are kept token by token, this one is not. list them"
    until(lambda: note in texts(browser, "#tokens p"))
    assert texts(browser, "#tokens .tokens") == []
    click(browser, "#tokens button", "list them")
    until(lambda: count(browser) == "2 of 24 responses")
    assert "token by token (2)" in texts(browser, "#filter [name=why] option")
    assert "tokens=advantage" in browser.current_url
    assert errors_of(browser) == []


@pytest.mark.slow
def test_a_response_is_read_token_by_token(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    add_tokens(run, 3)
    add_critic(run, 3)
    with serve(run) as server:
        browser.get(server.url)
        until(lambda: count(browser) == "24 of 24 responses")
        # Numbers come when a response is opened.
        loaded = (
            "return [DATA, now.rows, indexes[0].rows].map((x) => Object.values(x).some((row) =>"
        )
        loaded += " 'token_details' in Object(row)))"
        assert browser.execute_script(loaded) == [False] * 3
        read_tokens(browser)
    browser.get(write_report(run, tmp_path).as_uri())
    until(lambda: count(browser) == "24 of 24 responses")
    read_tokens(browser)


@pytest.mark.slow
def test_what_the_critic_predicts_is_drawn(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    browser.get(write_report(run, tmp_path).as_uri())
    until(lambda: count(browser) == "24 of 24 responses")
    assert texts(browser, "#critic-plots *") == []  # without a critic there is nothing
    add_critic(run, 3)
    browser.get("about:blank")
    browser.get(write_report(run, tmp_path).as_uri())
    until(lambda: texts(browser, "#critic-plots h3"))
    assert texts(browser, "#critic-plots h3") == [
        "Explained variance by position", "Value against return"
    ]  # fmt: skip
    assert texts(browser, "#critic-plots .legend span b, #critic-plots .legend > span") == [
        "step 1", "step 3", "step 3"
    ]  # fmt: skip
    cells = texts(browser, "#critic-plots td")
    # Three responses are too few for the third place.
    assert cells[:6] == ["1", "0", "0.5", "2", "-0.2", "0.3"]
    assert cells[6:10] == ["step 3", "2", "0", "0.03"] and len(cells) == 6 + 40
    titles = texts(browser, "#critic-plots circle title")
    assert titles[:4] == [
        "token 1: 0, of 9 tokens", "token 2: -0.2, of 9 tokens",
        "token 1: 0.5, of 9 tokens", "token 2: 0.3, of 9 tokens",
    ]  # fmt: skip
    assert titles[4] == "value 0: mean return 0.03, of 2 tokens" and len(titles) == 14
    assert errors_of(browser) == []


def read_episodes(browser: Any) -> None:
    """What both ways to open the page show of episodes."""
    until(lambda: count(browser) == "24 of 24 responses")
    card = browser.find_element("css selector", "#judge").text
    for row in ("2 an episode", "25.0% of the turns", "turns 12.5%", "add 0.5 s (3 calls)"):
        assert row in card
    # Episodes with tool errors are a choice of the filter.
    assert "with tool errors (1)" in texts(browser, "#filter [name=why] option")
    fill(browser, "why", "tool errors")
    until(lambda: count(browser) == "1 of 24 responses")
    assert texts(browser, "#table td .failed")[0] == "2"
    browser.execute_script("read('train:3:1')")
    until(lambda: texts(browser, ".turn"))
    assert texts(browser, ".turn h3") == ["turn 1 · form 0.25 · add 0.5 s · cut off", "turn 2"]
    assert texts(browser, ".turn.wrong .failed") == ["tool error: add: b is not a number"]
    assert texts(browser, ".call") == ["add(a=1, b=1)"]
    assert "ended by the limit of turns" in browser.find_element("css selector", "#reading").text
    # The thought is folded; a result is open next to its error.
    thought, result = browser.find_elements("css selector", ".turn details")
    assert thought.text == "thinking, 16 characters" and HOSTILE[0] in result.text
    thought.find_element("css selector", "summary").click()
    assert "than 1." in thought.text
    # The environment's tokens have no numbers.
    click(browser, "#tokens button", "advantage")
    assert texts(browser, ".tokens .reply") == PIECES[2:4]
    assert texts(browser, ".tokens .masked") == PIECES[5:6]
    assert point_at(browser, 3, "click").endswith("of the environment: not in the losses")
    # Another one without an error: everything from the tool is folded.
    fill(browser, "why", "")
    browser.execute_script("read('train:3:2')")
    until(lambda: len(texts(browser, ".turn:not(.wrong)")) == 2)
    (_, result) = browser.find_elements("css selector", ".turn details")
    assert result.text.startswith("tool, ") and "\n" not in result.text
    browser.execute_script("read('train:3:3')")
    until(lambda: "took longer than 30 s" in browser.find_element("css selector", "#reading").text)
    # Turns are searched.
    fill(browser, "pattern", "Let me add")
    until(lambda: count(browser) == "3 of 24 responses")
    assert browser.execute_script("return window.ran") is None
    assert errors_of(browser) == []


@pytest.mark.slow
def test_an_episode_is_read_as_a_conversation(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    add_episodes(run, 3)
    with serve(run) as server:
        browser.get(server.url)
        read_episodes(browser)
    browser.get(write_report(run, tmp_path).as_uri())
    read_episodes(browser)
