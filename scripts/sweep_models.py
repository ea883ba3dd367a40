"""Trains a tiny model of each family, compares it with transformers, and writes docs/models.md.

python scripts/sweep_models.py [--jobs 2] [--quick] [--page FILE] [FAMILY...]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["COLUMNS"] = "400"

from families.checks import LIMIT, Outcome, check_family
from families.configs import FAMILIES

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
INTRODUCTION = """# Models

PPO is correct only if sampler, annotation and update compute the same log-probs. For each family
below, `ppo train` trained a small random model on the CPU in float32 with default settings (GAE
with a critic), 64 wide, with every layer type, and biases and norms that differ from their initial
values. Each number was compared with transformers in eager attention, one row at a time:

- log-probs of the sampler and of the annotation, values, and the gradients of the first two
  updates of actor and critic (relative to the largest number in their tensor)
- at the first update: ratio 1, no clipping, no KL
- four steps equal two steps, a resume and two more steps, and transformers loads the exported
  folder, bit for bit
- a LoRA adapter: step 2 samples from the same numbers as the export of step 1
- if rows are packed by default, `model.packing=false` gives the same numbers

A family passes if all its checks hold with gaps of at most {limit:.0e}.
**{passing} of {all}** pass, {refused} more are refused by `ppo plan` and `ppo train` before the
first step.

A family that is not in the table is trained in eager attention on padded rows, which are exact
everywhere.

One limit is known. If Llama 4 scales attention, transformers counts positions by columns of its
cache. The hf sampler is exact for rows of up to half of `floor_scale` (4096 tokens) and refuses
longer ones, which need [vLLM](scaling.md#vllm).

- **attention**: the default kernel (`model.attn_implementation` unset)
- **rows**: packed without padding, or padded; `shared` means that a prompt is computed once for all
  its responses
- **gap**: the largest difference from transformers

Families that fail a check, or lack a sampler, a critic or LoRA, are named below the table.

This page is written by `python scripts/sweep_models.py`.
"""


def sweep(names: Sequence[str], jobs: int, quick: bool) -> list[Outcome]:
    """Check families, `jobs` at a time; prints each as it ends, and the time left."""
    _load_libraries()
    started, outcomes = time.monotonic(), list[Outcome]()
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        for outcome in pool.imap_unordered(partial(check_family, quick=quick), names):
            outcomes.append(outcome)
            seconds = time.monotonic() - started
            left = seconds / len(outcomes) * (len(names) - len(outcomes))
            print(
                f"[{len(outcomes)}/{len(names)}, {left:.0f} s left] {report(outcome)}", flush=True
            )
    return sorted(outcomes, key=lambda outcome: list(FAMILIES).index(outcome.family))


def _load_libraries() -> None:
    """Import what a run needs once, in the process that all others are forked from."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import ppo_cli.cli.app
    import ppo_cli.engine.learner
    import ppo_cli.loop
    import ppo_cli.run.assemble  # noqa: F401


def report(outcome: Outcome) -> str:
    """One line about a family."""
    verdict = "passes" if outcome.passes else "refused" if outcome.refused else "FAILS"
    details = "; ".join([*outcome.problems, *filter(None, [outcome.error])])
    return (
        f"{outcome.family}: {verdict}, gap {outcome.largest_gap:.1e}, {outcome.seconds:.0f} s"
        + (f"; {details}" if details else "")
    )


def remarks(outcome: Outcome) -> str:
    """What differs from a family that passes; empty if nothing does."""
    works = {
        "sampler": outcome.train_code == 0 or outcome.without_critic,
        "critic": outcome.critic,
        "LoRA": outcome.quick or outcome.adapts,
    }
    notes = [f"no {part}" for part, there in works.items() if not there]
    notes += ["only two steps were checked"] * outcome.quick
    return "; ".join(
        [*notes, *filter(None, [outcome.error.removeprefix("error: ")]), *outcome.problems]
    )


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The lines of the table, a row for each kernel and layout, and the remarks."""
    rows: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        gap = f" {outcome.largest_gap:.1e}" if outcome.gaps else ""
        layout = (outcome.kernel or "-", outcome.rows or "-")
        rows.setdefault(layout, []).append(f"`{outcome.family}`{gap}")
    yield from ("| attention | rows | families, each with its gap |", "|---|---|---|")
    for (kernel, layout), families in sorted(rows.items(), key=lambda row: -len(row[1])):
        yield f"| {kernel} | {layout} | {', '.join(families)} |"
    yield ""
    for outcome in outcomes:
        if text := remarks(outcome):
            yield f"- `{outcome.family}`: {' '.join(text.split())}"


def page(outcomes: Sequence[Outcome]) -> str:
    """The whole page."""
    introduction = INTRODUCTION.format(
        limit=LIMIT,
        passing=sum(outcome.passes for outcome in outcomes),
        refused=sum(outcome.refused for outcome in outcomes),
        all=len(outcomes),
    )
    return "\n".join([introduction, *table(outcomes), ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="FAMILY")
    parser.add_argument("--jobs", type=int, default=2, help="families at a time")
    parser.add_argument("--quick", action="store_true", help="two steps and their gaps alone")
    parser.add_argument("--page", type=Path, help="default: docs/models.md for a whole sweep")
    options = parser.parse_args()
    outcomes = sweep(options.names or list(FAMILIES), options.jobs, options.quick)
    target = options.page or (None if options.names or options.quick else PAGE)
    if target:
        target.write_text(page(outcomes), encoding="utf-8")
    print(f"{sum(outcome.passes for outcome in outcomes)} of {len(outcomes)} pass")
