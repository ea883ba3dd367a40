"""The card of a run's episodes: turns, errors, limits and tools, as rows of text.

Summary, `ppo show` and page all print what `describe_episodes` returns.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ppo_cli.errors import plural
from ppo_cli.run_folder.lines import read_lines, rollout_file, rollout_steps

RECENT = 10  # steps whose means are shown
MAX_TOOLS = 8
CUT_SHARE = re.compile(r"environment/cut_(\w+)_share")


def describe_episodes(run_dir: Path, history: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (measure, value) rows about the episodes of the last steps; [] without episodes."""
    recent = [line for line in history if line.get("environment/turns_mean") is not None][-RECENT:]
    if not recent:
        return []
    means = {
        key: fmean(values)
        for key in recent[-1]
        if key.startswith("environment/")
        and (values := [line[key] for line in recent if line.get(key) is not None])
    }
    rows = [
        ("means of", f"the last {plural(len(recent), 'step')}"),
        ("turns", f"{means['environment/turns_mean']:.3g} an episode"),
    ]
    if (share := means.get("environment/tool_error_share")) is not None:
        causes = count_tool_errors(run_dir, int(recent[-1]["step"]))
        last = f" (step {int(recent[-1]['step'])}: {causes})" if causes else ""
        rows.append(("tool errors", f"{share:.1%} of the turns{last}"))
    if (share := means.get("environment/failed_share")) is not None:
        rows.append(("failed", f"{share:.1%} of the episodes"))
    cuts = {
        m[1]: share for key, share in means.items() if (m := CUT_SHARE.fullmatch(key)) and share
    }
    if cuts:
        each = (f"{name.replace('_', ' ')} {share:.1%}" for name, share in cuts.items())
        rows.append(("cut by limits", ", ".join(each)))
    if (seconds := means.get("environment/seconds_mean")) is not None:
        rows.append(("environment", f"{seconds:.3g} s an episode"))
    if tools := _describe_tools(run_dir):
        rows.append(("tools", tools))
    return rows


# Of the text of a turn's error; another error was raised by a tool.
_CAUSES = (
    (re.compile(r"timeout: took longer"), "timed out"),
    (re.compile(r"[Tt]here is no tool|unknown tool"), "unknown tool"),
    (re.compile(r"^(?:The (?:tool call|arguments of|value)|An argument of)|\. It takes "),
     "unreadable call"),
)  # fmt: skip


def count_tool_errors(run_dir: Path, step: int) -> str:
    """Return the errors of a step's turns by cause, such as `12 raised, 3 timed out`."""
    turns = _read_turns(run_dir, step)
    causes = Counter(
        next((cause for pattern, cause in _CAUSES if pattern.search(error)), "raised")
        for error in (str(turn["error"]) for turn in turns if turn.get("error"))
    )
    return ", ".join(f"{number:,} {cause}" for cause, number in causes.most_common())


def _read_turns(run_dir: Path, step: int) -> Iterator[Mapping[str, Any]]:
    """Yield the turns of all episodes of a step."""
    for line in read_lines(rollout_file(run_dir, step)):
        yield from line.get("turns") or ()


def _describe_tools(run_dir: Path) -> str:
    """Return the mean time of the tools called in the newest step, the slowest in all first."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for step in rollout_steps(run_dir)[-1:]:
        for turn in _read_turns(run_dir, step):
            for name, duration in turn.get("tools") or ():
                seconds[name].append(duration)
    slowest = sorted(seconds.items(), key=lambda item: -math.fsum(item[1]))[:MAX_TOOLS]
    return ", ".join(f"{n} {fmean(s):.2g} s ({plural(len(s), 'call')})" for n, s in slowest)
