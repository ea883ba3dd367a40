"""Writes docs/machines.md: a row for each report that somebody has sent.

python scripts/write_machines.py [REPORT...]   # new reports are copied to docs/machines/ first

A report is the file of `ppo doctor --self-test --report FILE`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "machines.md"
REPORTS = PAGE.parent / "machines"
INTRODUCTION = """# Machines

What people have reported, a row for each file in `docs/machines/`. To add yours, run
[the notebook](../notebooks/try_on_a_gpu.ipynb), or these two commands, and attach `report.json` to
an issue. The file has no secrets, names of the machine or paths; read it before you send it.

```bash
ppo train --output_dir my-run …
ppo doctor --self-test --report report.json --output_dir my-run
```

"""
COLUMNS = (
    "GPUs", "driver, torch, vLLM", "self-test", "proven", "model and run", "seconds a step", "MFU",
    "reward, first to last step",
)  # fmt: skip
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"
BEFORE = """
Before there were such files, one H100 and one H200 were used once, on 2026-11-26, without vLLM:
ten checks of the self-test passed there, runs of the embedded model learned, and a 0.5B step had an
MFU of 14.4 % ([lab book](../notes/lab_book.md)). Never run on GPUs: several GPUs with NCCL, vLLM
and its weight transfer, float16, GPUs older than Ampere, other vendors.
"""


def main() -> None:
    """Add the reports that are named, and write the page."""
    for name in sys.argv[1:]:
        report = json.loads(Path(name).read_text(encoding="utf-8"))
        stamp = report["self_test"]["time"][:19].replace(":", "")
        REPORTS.mkdir(exist_ok=True)
        (REPORTS / f"{stamp}.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    PAGE.write_text(page(REPORTS), encoding="utf-8")


def page(folder: Path) -> str:
    """Return the page about the reports in a folder, oldest first."""
    reports = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))
    ]
    table = HEAD + "".join(map(row, reports)) if reports else "Reported so far: none yet.\n"
    return INTRODUCTION + table + BEFORE


def row(report: dict[str, Any]) -> str:
    """Return the row of a report."""
    names = [f"{gpu['name']}, {gpu['memory_gib']:.0f} GiB" for gpu in report["gpus"]]
    test, run = report["self_test"], report["run"]
    versions = [test["key"]["driver"], *(test["key"]["versions"][p] for p in ("torch", "vllm"))]
    states = [check["state"] for check in test["checks"]]
    wrong = [check["check"] for check in test["checks"] if check["state"] in ("differs", "failed")]
    cells = [
        "; ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none (CPU)",
        ", ".join(version or "-" for version in versions),
        f"{states.count('ok')} ok" + (f", wrong: {', '.join(wrong)}" if wrong else ""),
        ", ".join(test["proven"]) or "-",
    ]
    if run is None:
        cells += ["-"] * 4
    else:
        reward = run["reward"]
        cells += [
            f"{run['model']}, {run['dtype']}, {run['estimator']}, {run['sampler']}, "
            f"{run['responses_per_step']} responses a step, {run['steps']} steps",
            f"{run['step_s']:g}",
            "-" if run["mfu"] is None else f"{run['mfu']:.1%}",
            f"{reward[0]:.3f} to {reward[-1]:.3f}" if reward else "-",
        ]
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    main()
