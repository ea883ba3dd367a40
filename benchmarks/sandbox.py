"""What code rewards cost: the canonical HumanEval solutions, run in each sandbox that works here.

    python benchmarks/sandbox.py HumanEval.jsonl.gz --workers 2

Prints the seconds for all checks and the cost of one, beside how many were right (all must be).
"""

from __future__ import annotations

import argparse
import os
import time

from ppo_cli.config.schema.reward import Code
from ppo_cli.data_sets.sources import read_source
from ppo_cli.extras.lab.prepare import build_humaneval, humaneval_files
from ppo_cli.rewards.base import Call
from ppo_cli.rewards.code.check import CodePool
from ppo_cli.rewards.code.sandboxes import Bubblewrap, Sandbox, Sandlock, find_fault


def main() -> None:
    """Time every sandbox."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="HumanEval.jsonl.gz, or its folder")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    calls = list_calls(arguments.source)
    print(f"{len(calls)} checks, {arguments.workers} workers, {os.cpu_count()} cores")
    for sandbox in (Bubblewrap(), Sandlock()):
        fault = find_fault(sandbox)
        print(f"{sandbox.name:9} {fault or measure(sandbox, calls, arguments.workers)}")


def list_calls(source: str) -> list[Call]:
    """Return each task with its canonical solution."""
    rows = build_humaneval(source).splits["test"]
    records = [record for one in humaneval_files(source) for _, record in read_source(one).records]
    return [
        Call(
            row["data_source"],
            f"```python\n{record['prompt']}{record['canonical_solution']}\n```",
            row["reward_model"]["ground_truth"],
            {},
        )
        for row, record in zip(rows, records, strict=True)
    ]


def measure(sandbox: Sandbox, calls: list[Call], workers: int) -> str:
    """Run all checks and say what they took."""
    pool = CodePool(Code.model_validate({"sandbox": sandbox.name}), size=workers)
    pool.start()
    begin = time.perf_counter()
    futures = [pool.submit(call, lambda returned: returned) for call in calls]
    scores = [future.result().value for future in futures]
    seconds = time.perf_counter() - begin
    pool.close()
    each = 1000 * seconds / len(calls)
    return f"{seconds:6.1f} s, {each:4.0f} ms a check; {scores.count(1.0)} of {len(calls)} right"


if __name__ == "__main__":
    main()
