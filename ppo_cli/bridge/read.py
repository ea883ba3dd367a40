"""Reads what verl logged back into a run folder: metrics.jsonl and rollouts/, under our names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ppo_cli.bridge.rewards import MEASURED, SCORES
from ppo_cli.errors import DataError
from ppo_cli.run_folder import METRICS_FILE, read_lines, replace_lines, rollout_file

# verl's name of a metric -> ours; the others keep theirs.
NAMES: Final = {
    "critic/score/mean": "reward_mean",
    "critic/score/max": "reward/max",
    "critic/score/min": "reward/min",
    "actor/reward_kl_penalty": "kl_divergence",
    "actor/reward_kl_penalty_coeff": "kl/coef",
    "actor/kl_loss": "kl/loss",
    "actor/pg_loss": "policy_loss",
    "actor/pg_clipfrac": "clip_fraction",
    "actor/ppo_kl": "actor/kl_to_old",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad_norm",
    "critic/vf_loss": "value_loss",
    "critic/grad_norm": "critic_grad_norm",
    "critic/vf_explained_var": "explained_variance",
    "response_length/mean": "response_length_mean",
    "perf/throughput": "perf/tokens_per_s_per_gpu",
    "timing_s/step": "time/step_s",
    "timing_s/gen": "time/rollout_s",
    "timing_s/old_log_prob": "time/old_log_probs_s",
    "timing_s/update_actor": "time/update_actor_s",
    "timing_s/update_critic": "time/update_critic_s",
}
LOGS: Final = "verl/metrics_*.jsonl"  # a file for each start, by its time
DUMPS: Final = "verl/rollouts"


def read_back(folder: Path) -> tuple[int, int]:
    """Write metrics.jsonl and rollouts/ anew; returns how many steps and responses there are.

    Raises DataError for a folder in which verl has not logged anything.
    """
    if not (folder / "overrides").exists():
        raise DataError(f"{folder} is no folder of `ppo bridge verl`: it has no file overrides.")
    steps = {int(line["step"]): line for line in _metrics(folder)}
    if not steps:
        raise DataError(f"{folder}: verl has not logged a step yet ({LOGS} has none).")
    replace_lines(folder / METRICS_FILE, [steps[number] for number in sorted(steps)])
    scores: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in reversed(read_lines(folder / SCORES)):  # of equal ones the first is taken first
        scores[line["response"], _truth(line)].append(line)
    count = 0
    for dump in sorted((folder / DUMPS).glob("*.jsonl"), key=lambda path: int(path.stem)):
        lines = [_rollout(line, scores) for line in read_lines(dump)]
        replace_lines(rollout_file(folder, int(dump.stem)), lines)
        count += len(lines)
    return len(steps), count


def _metrics(folder: Path) -> Iterator[dict[str, Any]]:
    """Give each step as our line; a later start has the last word on a step."""
    measured: dict[int, dict[str, Any]] = defaultdict(dict)
    for line in read_lines(folder / MEASURED):
        measured[line["step"]] |= line
    for log in sorted(folder.glob(LOGS)):
        for line in read_lines(log):
            said = {NAMES.get(name, name): value for name, value in line["data"].items()}
            yield measured[line["step"]] | said | {"step": line["step"]}


def _truth(line: dict[str, Any]) -> str:
    return "" if line["ground_truth"] is None else str(line["ground_truth"])


def _rollout(
    dumped: dict[str, Any], scores: dict[tuple[str, str], list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return a response of verl's dump with what our reward said of it, where it was asked."""
    truth = str(dumped.get("gts") or "")
    line = {
        "step": dumped["step"], "uid": dumped.get("uid", ""), "sample": 0,
        "prompt": dumped["input"], "response": dumped["output"], "ground_truth": truth,
        "score": dumped["score"], "failure": "", "reason": "", "parts": {},
    }  # fmt: skip
    same = scores.get((dumped["output"], truth))
    if not same:
        return line
    told = same.pop() if len(same) > 1 else same[0]
    own = ("uid", "sample", "prompt", "ground_truth", "data_source", "reason", "failure")
    line |= {name: told[name] for name in own}
    line |= {"parts": told["own_parts"], **told["facts"]}
    if told["failed"]:  # what verl learnt from was put in
        line |= {"score": None, "imputed": told["score"]} if told["own_score"] is None else {}
    return line
