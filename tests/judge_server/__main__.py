"""`python -m tests.judge_server --port 0 --latency 0.5`: the judge as a separate process.

Its first line is JSON with the port and the base URLs. GET /_control counts its calls.
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
import zlib

from tests.judge_server.server import BASES, HINTS, JudgeServer
from tests.judge_server.wire import default_score


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.judge_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before an answer")
    parser.add_argument("--rps", type=float, default=None, help="calls a second; above: 429")
    parser.add_argument("--burst", type=float, default=1.0, help="calls let in at once")
    parser.add_argument("--concurrency-limit", type=int, default=None)
    parser.add_argument("--per-minute", type=int, default=None, help="calls a minute; above: 429")
    parser.add_argument("--hint", choices=HINTS, default="seconds", help="what a 429 says to wait")
    parser.add_argument("--any", action="store_true", help="scores from 1 to 10 by chance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-seconds", type=float, default=600.0, help="then it stops by itself")
    return parser.parse_args()


def main() -> None:
    """Serve until told to stop, or until --max-seconds are over."""
    options = vars(parse())
    longest = options.pop("max_seconds")
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    score = (lambda _, user: 1 + zlib.crc32(user.encode()) % 10) if options.pop("any") else None
    with JudgeServer(score or default_score, **options, keep_calls=False) as server:
        urls = {name: server.url(name) for name in BASES}
        print(json.dumps({"port": server.port, "url": urls}), flush=True)
        done.wait(longest)


if __name__ == "__main__":
    main()
