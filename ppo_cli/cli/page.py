"""`ppo view` serves the page about runs on this machine; `ppo report` writes it to a file."""

from __future__ import annotations

import html
import json
import shlex
import socket
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ppo_cli.cli.help import App
from ppo_cli.errors import DataError, UserError, ppo
from ppo_cli.machine.device_record import require_record
from ppo_cli.run_folder.folder import check_run_folder
from ppo_cli.run_folder.lines import METRICS_FILE, read_metrics, to_json
from ppo_cli.run_folder.store import localise

# On another --host the page is open to the network.
LOOPBACK = ("127.0.0.1", "localhost", "::1")
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def view(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Run folders.", show_default="outputs"),
    ] = None,
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=65535, help="Port.", show_default="a free one"),
    ] = 0,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; this machine only by default.")
    ] = "127.0.0.1",
    as_json: Json = False,
) -> None:
    """Serve a page about runs: curves, responses, settings, findings; Ctrl-C ends it.

    The page follows a running run. Labels that you give to responses are saved in the run folder,
    for `ppo reward calibrate`. The address contains a token: whoever has it can read the runs.
    """
    # Refuse wrong folders before the import of the server.
    folders = [localise(run, small=True) for run in runs or [Path("outputs")]]
    check_runs(folders, begun=True)
    from ppo_cli.report.page.server import PageServer, find_bokeh_files, open_runs
    from ppo_cli.run.machine_report import find_user

    find_bokeh_files()
    try:
        server = PageServer(open_runs(folders), host, port)
    except OSError as error:
        raise UserError(
            f"The server cannot listen on --host {host} --port {port} ({error.strerror or error}). "
            "Choose another --port, or leave it out for a free one."
        ) from error
    # For a browser on another machine: ssh forwards the same port, so that the token's cookie
    # fits.
    target = f"{find_user()}@{socket.gethostname()}"
    tunnel = f"ssh -N -L {server.port}:127.0.0.1:{server.port} {target}"
    with server:
        # Print the address before serving, which blocks.
        if as_json:
            lines = [json.dumps({"url": server.url, "tunnel": tunnel})]
        else:
            lines = [f"Open {server.url}"]
            if host in LOOPBACK:
                lines.append(f"From another machine first: {tunnel}")
            else:
                lines.append(
                    "Anyone with this address can read the runs, and nothing is encrypted."
                )
            lines.append("Ctrl-C ends it.")
        typer.echo("\n".join(lines))
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="File to write.", show_default="RUN/report.html"
        ),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self_test", help="Add the record of this machine's self-test.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the page about runs as one HTML file, to keep or to send.

    It needs no network and no other file. For a long run it has a sample of the responses, and
    says so; `ppo view` has all of them.
    """
    from ppo_cli.cli.screen import print_result

    runs = [localise(run, small=True) for run in runs]
    check_runs(runs, begun=False)
    # One run has an obvious place for its report.
    if out is None:
        if len(runs) > 1:
            raise UserError("The page about several runs needs a file: name it with --out FILE.")
        out = runs[0] / "report.html"
    from ppo_cli.report.page.server import open_runs
    from ppo_cli.report.page.server import render_report as page_of
    from ppo_cli.scoring.rows import check_out, write_out

    check_out(out, str(runs[0]))
    section = make_self_test_section() if self_test else ""
    data = open_runs(runs)
    write_out(out, page_of(data).replace("</body>", f"{section}</body>"))
    # The result: how each run went, and where the page is.
    sentences = {run.name: "".join(text for text, _ in run.read()["verdict"]) for run in data}
    size = out.stat().st_size
    names = [
        f"{n}: {sentence}" if len(sentences) > 1 else sentence for n, sentence in sentences.items()
    ]
    lines = [*names, f"{out} ({size / 1e6:.1f} MB)"]
    summary = {"out": str(out), "bytes": size, "runs": sentences}
    print_result(summary, lambda: "\n".join(lines), as_json=as_json)


def make_self_test_section() -> str:
    """Return this machine's self-test record as HTML, without secrets and names of the machine.

    Raises UserError if there is no record, or a damaged one.
    """
    from ppo_cli.run.machine_report import remove_names

    # Reports are sent to others.
    text = to_json(remove_names(asdict(require_record("--self_test"))), indent=1)
    return f"<details><summary>Self-test</summary><pre>{html.escape(text)}</pre></details>\n"


def check_runs(folders: list[Path], *, begun: bool) -> None:
    """Raise one DataError that names every folder that is not a run, or has no step yet.

    With `begun`, a run that has written its settings but no step is accepted.
    """
    problems = []
    for folder in folders:
        if begun and (folder / "config.yaml").is_file():
            continue
        try:
            check_run_folder(folder)
        except DataError as error:
            problems.append(str(error))
            continue
        if not begun and not read_metrics(folder):
            problems.append(
                f"{folder}: its {METRICS_FILE} has no step yet. Watch it with "
                f"`{ppo(f'view {shlex.quote(str(folder))}')}`."
            )
    if problems:
        raise DataError("\n".join(problems))


view_app = App()
view_app.command(epilog="ppo view outputs")(view)
report_app = App()
report_app.command(epilog="ppo report outputs --out run.html")(report)
