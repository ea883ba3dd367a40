"""Our rewards as verl's reward function: one server for the whole job, called by its workers.

verl runs `reward.num_workers` processes on all nodes, and each would have separate limits. Here
all call one named Ray actor on the head node, which holds the reward, so there is one limiter, one
cache, one budget and one pause in an outage.

verl cannot leave out a sample. A sample without a verdict gets the mean of the others of its
prompt, else of all so far, and `failed` marks it. An error that must stop the run is raised, and
written to the file `stopped`, which the script of node 0 polls.

verl's logs are read back into the run folder as metrics.jsonl and rollouts/, under our names.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np

from ppo_cli.config.mixture import has_mixture
from ppo_cli.errors import DataError, PpoError, RewardError
from ppo_cli.extras.migrate.bridge.overrides import TRAIN, VAL, score_columns
from ppo_cli.moments import Moments
from ppo_cli.planning.batches import count_steps, train_rows
from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.rewards.base import Reward, RunLength
from ppo_cli.run_folder.folder import run_settings
from ppo_cli.run_folder.lines import (
    METRICS_FILE,
    append_line,
    read_lines,
    replace_lines,
    rollout_file,
    to_json,
)
from ppo_cli.secrets.redact import redact

NAME = "ppo_cli_reward"
ROW = "ppo_cli"  # key in extra_info for data that verl does not pass to reward functions
KEYS_FILE = ".judge_keys"  # lines NAME=VALUE, mode 0600, deleted when the server has read it
STOPPED = "stopped"  # file with the reason why the run must end
SCORES, MEASURED = "verl/scores.jsonl", "verl/judge.jsonl"
# Above any batch: a call may wait until its whole round is complete.
MAX_CONCURRENT_CALLS = 100_000  # concurrent calls of the server
QUIET_S = 2.0  # without a new response, before the round is closed and failures are imputed
# Longer for parts that are scaled over a whole step: verl's samplers may pause.
QUIET_MIXED_S = 30.0
HEAD = "node:__internal_head__"  # Ray's name for the first node

Function = Callable[..., Awaitable[dict[str, Any]]]


def reward_function(folder: Path, where: str) -> Function:
    """Return verl's reward function; relative paths in the settings start at `where`."""
    server: Any = None

    async def compute_score(
        # The names of these parameters are verl's; it passes them by keyword.
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        """Return the score of a response, and its parts, from the reward server.

        Raises RewardError if the row was not prepared by the bridge.
        """
        nonlocal server
        row = (extra_info or {}).get(ROW)
        if row is None:
            raise RewardError(f"a row without extra_info.{ROW}: train on the rows in {folder}/data")
        if server is None:
            server = _connect_server(folder, where)
        answer: dict[str, Any] = await server.score.remote(row, solution_str)
        return answer

    return compute_score


def _connect_server(folder: Path, where: str) -> Any:
    """Return the job's server; the first caller starts it, on the head node if there is one."""
    import ray

    # Any amount of the head's resource places the actor there; it uses no CPU of the job.
    at_head = {HEAD: 0.001} if HEAD in ray.cluster_resources() else {}
    options: dict[str, Any] = {
        "name": NAME, "get_if_exists": True, "num_cpus": 0, "resources": at_head,
        "max_concurrency": MAX_CONCURRENT_CALLS,
    }  # fmt: skip
    return ray.remote(RewardServer).options(**options).remote(str(folder), where)


class RewardServer:
    """The Ray actor with the reward of a job; all its methods run on one event loop."""

    def __init__(self, folder: str, where: str) -> None:
        self._folder = Path(folder)
        # Relative paths and keys must be in place before the settings are read.
        os.chdir(where)
        os.environ.update(read_and_delete_keys(self._folder))
        self._config = run_settings(self._folder)
        self._imputation = ScoreImputation(
            score_columns(self._config.reward, self._config.algorithm)
        )
        self._step_size = self._config.data.train_batch_size * self._config.rollout.n
        self._quiet_s = QUIET_MIXED_S if has_mixture(self._config.reward) else QUIET_S
        self._samples: Counter[str] = Counter()
        self._open: set[Any] = set()
        self._split, self._step, self._trained, self._last = "train", 0, 0, 0.0
        self._watching: asyncio.Task[None] | None = None
        self._reward: Reward | None = None
        (self._folder / SCORES).parent.mkdir(exist_ok=True)
        # No fsync per line: it would delay all waiting calls.
        self._scores = (self._folder / SCORES).open("a", encoding="utf-8", buffering=1)
        # Only the server imports the judges' libraries.
        from ppo_cli.rewards.registry import build_reward

        try:
            prompts = read_prompts(self._folder)
            sources = {prompt.data_source for prompt in prompts}
            self._reward = build_reward(self._config.reward, sources=sources)
            self._reward.attach(self._folder)
            per_epoch = (train_rows(self._config.data) or 0) // self._config.data.gen_batch_size
            self._reward.begin_run(
                RunLength(count_steps(self._config.data, self._config.trainer) or 1, per_epoch or 1)
            )
            self._reward.start(prompts, patient=True, tell=print)
        except PpoError as error:
            self._stop(error)

    async def score(self, row: str, response: str) -> dict[str, Any]:
        """Score one response for verl; the result has the same keys for every sample."""
        stopped = self._folder / STOPPED
        if stopped.exists():
            raise RuntimeError(stopped.read_text(encoding="utf-8").strip())
        assert self._reward is not None
        if self._watching is None:
            self._watching = asyncio.create_task(self._end_round_when_quiet())
        # Submit, and end the round when the step's batch is complete.
        prompt, split = decode_row(row)
        self._count_response(split)
        rollout = Rollout(prompt, self._samples[prompt.uid], (), np.empty(0, np.float32),
                          response, "stop")  # fmt: skip
        self._samples[prompt.uid] += 1
        future = asyncio.wrap_future(self._reward.submit(rollout))
        self._open.add(future)
        self._last = time.monotonic()
        if split == "train" and self._trained % self._step_size == 0:
            self._end_round()
        # An error of the reward stops the whole run; a failed score is imputed.
        try:
            score = await future
        except PpoError as error:
            self._stop(error)
            raise RuntimeError(str(error)) from None
        finally:
            self._open.discard(future)
        answer = self._imputation.fill(prompt.uid, score)
        line = {"split": split, **score_line(rollout, score), **answer}
        self._scores.write(to_json(line) + "\n")
        return answer

    def _count_response(self, split: str) -> None:
        """Count a response that arrives.

        A change of split ends the open round. The first training response of each verl batch starts
        the next step and writes the metrics of the last one.
        """
        if split != self._split:
            self._end_round()
            self._split = split
        if split != "train":
            return
        # The first response of a batch starts the next step.
        if self._trained % self._step_size == 0:
            self._log_measurements()
            self._step += 1
            self._samples.clear()
            self._imputation.start_step()
            assert self._reward is not None
            self._reward.begin_step(self._step)
        self._trained += 1

    async def _end_round_when_quiet(self) -> None:
        """End the round when no new response has arrived for a while."""
        # Poll, because verl does not announce the end of a batch that is not full (validation, the
        # last one).
        while True:
            await asyncio.sleep(0.2)
            if self._open and time.monotonic() - self._last > self._quiet_s:
                self._end_round()

    def _end_round(self) -> None:
        assert self._reward is not None
        self._reward.end_round("train" if self._split == "train" else "validation")
        self._last = time.monotonic()

    def _log_measurements(self) -> None:
        assert self._reward is not None
        measured = self._reward.pop_metrics()
        if self._step and measured:
            append_line(self._folder / MEASURED, {"step": self._step, **measured})

    def _stop(self, error: PpoError) -> None:
        # Only the first reason is written; later errors usually follow from it.
        if not (self._folder / STOPPED).exists():
            (self._folder / STOPPED).write_text(f"{redact(str(error))}\n", encoding="utf-8")


def read_and_delete_keys(folder: Path) -> dict[str, str]:
    """Return the keys in the file from node 0's script, and delete the file."""
    path = folder / KEYS_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


class ScoreImputation:
    """Replaces failed scores by means of the scores so far."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = ("score", *names)
        self._of_all = dict.fromkeys(self._names, Moments())
        self._of_prompt: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def start_step(self) -> None:
        """Start a step: its prompt groups are new."""
        self._of_prompt.clear()

    def fill(self, uid: str, score: Score) -> dict[str, Any]:
        """Return a score for verl; `imputed` marks a value that is a mean of other samples."""
        raw = {name: part.raw for name, part in score.parts.items()} | {"score": score.value}
        values: dict[str, float] = {}
        put_in = False
        # Fill in each column: verl needs a number in all of them, for every sample.
        for name in self._names:
            value = raw.get(name)
            if value is None:
                same_prompt = self._of_prompt[uid][name]
                values[name] = fmean(same_prompt) if same_prompt else self._of_all[name].mean
                put_in = put_in or name == "score"
                continue
            values[name] = float(value)
            # Only judged scores enter the means; imputed ones would repeat them.
            if score.judged:
                self._of_prompt[uid][name].append(values[name])
                self._of_all[name] = self._of_all[name].merge(Moments.from_values([values[name]]))
        failure = redact(score.failure or score.imputed)
        return {
            **values,
            "failed": float(not score.judged),
            "imputed": float(put_in or bool(score.imputed)),
            "gated": float(score.gated),
            "failure": failure,
            "reason": redact(score.reason),
            "parts": json.dumps({n: [p.raw, p.scaled] for n, p in score.parts.items()}),
        }


def score_line(rollout: Rollout, score: Score) -> dict[str, Any]:
    """The fields of a line in scores.jsonl that verl does not get; joined with its dump later."""
    prompt = rollout.prompt
    parts = {name: {"raw": p.raw, "scaled": p.scaled} for name, p in score.parts.items()}
    return {
        "uid": prompt.uid, "sample": rollout.sample, "prompt": prompt.text,
        "response": rollout.text, "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source, "own_score": score.value, "own_parts": parts,
        "facts": score.facts,
    }  # fmt: skip


def read_prompts(folder: Path) -> list[Prompt]:
    """Return verl's training and validation prompts."""
    import pyarrow.parquet as pq

    rows: list[str] = []
    # Both files, because the reward checks its rows when it starts.
    for name in (TRAIN, VAL):
        if (folder / name).exists():
            column = pq.read_table(folder / name, columns=["extra_info"]).column("extra_info")
            rows += [info[ROW] for info in column.to_pylist()]
    return [decode_row(row)[0] for row in rows]


def encode_row(prompt: Prompt, split: str) -> str:
    """Encode everything that scoring needs of a prompt, for a row's extra_info."""
    messages = [dict(message) for message in prompt.messages]
    return json.dumps(
        {
            "split": split, "uid": prompt.uid, "text": prompt.text, "messages": messages,
            "data_source": prompt.data_source, "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info, "opened": prompt.opened,
        },
        ensure_ascii=False,
    )  # fmt: skip


def decode_row(row: str) -> tuple[Prompt, str]:
    """Decode a text of `encode_row`: the prompt and its split, train or val."""
    fields = json.loads(row)
    split = fields.pop("split")
    messages = tuple(fields.pop("messages"))
    fields["validation"] = split != "train"
    return Prompt(**fields, messages=messages, rendered="", token_ids=()), split


# verl's metric name -> ours; other metrics keep verl's name.
NAMES: Final = {
    "critic/score/mean": "reward_mean", "critic/score/max": "reward/max",
    "critic/score/min": "reward/min", "actor/reward_kl_penalty": "kl_divergence",
    "actor/reward_kl_penalty_coeff": "kl/coef", "actor/kl_loss": "kl/loss",
    "actor/pg_loss": "policy_loss", "actor/pg_clipfrac": "clip_fraction",
    "actor/ppo_kl": "actor/kl_to_old", "actor/entropy": "entropy", "actor/grad_norm": "grad_norm",
    "critic/vf_loss": "value_loss", "critic/grad_norm": "critic_grad_norm",
    "critic/vf_explained_var": "explained_variance", "response_length/mean": "response_length_mean",
    "perf/throughput": "perf/tokens_per_s_per_gpu", "timing_s/step": "time/step_s",
    "timing_s/gen": "time/rollout_s", "timing_s/old_log_prob": "time/old_log_probs_s",
    "timing_s/update_actor": "time/update_actor_s",
    "timing_s/update_critic": "time/update_critic_s",
}  # fmt: skip
LOGS: Final = "verl/metrics_*.jsonl"  # one file per start, named by its time
DUMPS: Final = "verl/rollouts"


def read_back(folder: Path) -> tuple[int, int]:
    """Rewrite metrics.jsonl and rollouts/ from verl's logs; returns counts of steps and responses.

    Raises DataError if verl has not logged anything in the folder.
    """
    if not (folder / "overrides").exists():
        raise DataError(f"{folder} is not a folder of `ppo bridge verl`: it has no file overrides.")
    # Metrics: one line per step, the latest start wins.
    steps = {int(line["step"]): line for line in _metric_lines(folder)}
    if not steps:
        raise DataError(f"{folder}: verl has not logged a step yet ({LOGS} has none).")
    replace_lines(folder / METRICS_FILE, [steps[number] for number in sorted(steps)])
    # Scores by response and ground truth, because verl's dump has no ids.
    scores: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    # Reversed, so that pop() takes the earliest of equal responses.
    for line in reversed(read_lines(folder / SCORES)):
        truth = "" if line["ground_truth"] is None else str(line["ground_truth"])
        scores[line["response"], truth].append(line)
    count = 0
    for dump in sorted((folder / DUMPS).glob("*.jsonl"), key=lambda path: int(path.stem)):
        lines = [_rollout_line(line, scores) for line in read_lines(dump)]
        replace_lines(rollout_file(folder, int(dump.stem)), lines)
        count += len(lines)
    return len(steps), count


def _metric_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the metrics of each step under our names; later starts come last and win."""
    measured: dict[int, dict[str, Any]] = defaultdict(dict)
    for line in read_lines(folder / MEASURED):
        measured[line["step"]] |= line
    for log in sorted(folder.glob(LOGS)):
        for line in read_lines(log):
            values = {NAMES.get(name, name): value for name, value in line["data"].items()}
            yield measured[line["step"]] | values | {"step": line["step"]}


def _rollout_line(
    dumped: dict[str, Any], scores: dict[tuple[str, str], list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return a response of verl's dump with our score, parts and facts, if we scored it."""
    truth = str(dumped.get("gts") or "")
    # verl's own fields first; they remain where we did not score the response.
    line = {
        "step": dumped["step"], "uid": dumped.get("uid", ""), "sample": 0,
        "prompt": dumped["input"], "response": dumped["output"], "ground_truth": truth,
        "score": dumped["score"], "failure": "", "reason": "", "parts": {},
    }  # fmt: skip
    same = scores.get((dumped["output"], truth))
    if not same:
        return line
    scored = same.pop() if len(same) > 1 else same[0]
    copied = ("uid", "sample", "prompt", "ground_truth", "data_source", "reason", "failure")
    line |= {name: scored[name] for name in copied}
    line |= {"parts": scored["own_parts"], **scored["facts"]}
    if scored["failed"]:  # verl trained on an imputed value
        line |= {"score": None, "imputed": scored["score"]} if scored["own_score"] is None else {}
    return line
