"""One node of a run without training: started by the tests as `ppo train` is on each machine.

Node 0 says `whole`, names each loss, waits for the node to come back and says `whole again` (and
how many nodes Ray counts, where there is a file `count`). SETTINGS are key=value.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from ppo_cli.cluster.nodes import Nodes, join_cluster, open_cluster
from ppo_cli.config.resolve import resolve
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import PpoError


def say(text: str) -> None:
    print(text, flush=True)


def settings() -> Config:
    resolved = resolve(
        flags={}, preset="embedded", config_files=[], overrides=sys.argv[2:], environ=os.environ
    )
    return resolved.config


def count_alive(nodes: Nodes) -> int:
    import ray

    ray.init(address=nodes.address, logging_level="ERROR", log_to_driver=False)
    try:
        deadline = time.monotonic() + 300
        while True:
            alive = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
            if len(alive) == 2 or time.monotonic() > deadline:
                return len(alive)
            time.sleep(0.1)
    finally:
        ray.shutdown()


def drive(nodes: Nodes, folder: Path) -> int:
    say("whole: all nodes work")
    while True:
        lost = nodes.lost()
        if lost:
            say(f"lost: {lost}")
            nodes.wait_until_whole()
            say("whole again")
            if (folder / "count").exists():
                say(f"alive: {count_alive(nodes)}")
        if nodes.stop_asked():
            say(f"stop: {nodes.stop_asked()}")
            return 3
        time.sleep(0.05)


def main() -> int:
    config, folder = settings(), Path(sys.argv[1])
    if config.trainer.node_rank:
        return join_cluster(config, os.environ, say)
    nodes = open_cluster(config, os.environ, say)
    code = 1
    try:
        code = drive(nodes, folder)
    finally:
        nodes.close(code)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PpoError as error:
        say(f"error: {error}")
        sys.exit(error.exit_code)
