"""The table of metrics for the page: plot, description, healthy range, advice outside of it.

A new metric is one entry in METRICS. The ranges are those of the health checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ppo_cli.report.drift import DRIFTED
from ppo_cli.report.health import Limits

Series = Sequence[float | None]
Band = tuple[float | None, float | None]  # lowest and highest healthy value


@dataclass(frozen=True)
class Metric:
    """One metric, or all metrics that match a pattern.

    `band` computes the healthy range from the run's limits and the metric's values. A metric with a
    `tile` (its short name) gets a tile, a small chart, at the top of the page.
    """

    key: str
    plot: str
    tile: str = ""
    what: str = ""
    change: str = ""
    band: Callable[[Limits, Series], Band] | None = None
    stacked: bool = False

    def matches(self, key: str) -> bool:
        """Whether a metric's key matches this entry's pattern; `*` does not match a `/`."""
        return self.key.count("/") == key.count("/") and fnmatchcase(key, self.key)


def _entropy_band(limits: Limits, values: Series) -> Band:
    """Return the healthy range of the entropy: at least a share of its first three values."""
    early = [v for v in values[:3] if v is not None]
    return (limits.entropy_share * sum(early) / len(early), None) if early else (None, None)


_JUMP_ADVICE = "A single jump by ten is harmless; if it happens again, lower "
# In the order of the page. Fields: key, plot, tile, description, advice, band.
METRICS = (
    # Rewards.
    Metric("reward_mean", "Reward", "reward", "Mean score of the responses of a step.",
           "Should rise. If not: look at the worst responses, then --lr and the reward."),
    Metric("reward/*", "Parts of the reward, raw"),
    Metric("rubric/*", "Credit of each criterion", "", "1 if it is met, or its fault is avoided."),
    Metric("val/accuracy", "Validation", "validation accuracy", "Share of right answers.",
           "If it falls while the reward rises, the model learns the reward and not the task."),
    Metric("val/reward_mean", "Validation", "validation reward", "Mean score in validation.",
           "If it falls while the reward rises, the model learns the reward and not the task."),
    Metric("val/reward/*", "Parts of the reward in validation"),
    # Policy and critic.
    Metric("kl_divergence", "KL to the reference", "KL", "Distance from the starting model.",
           "lower --lr or raise {kl_setting}", lambda limits, _: limits.kl),
    Metric("clip_fraction", "Clip fraction", "clip fraction",
           "Share of tokens whose update was clipped.", "lower --lr or --ppo_epochs",
           lambda limits, _: (None, limits.clip_fraction[1])),
    Metric("critic/clip_fraction", "Clip fraction"),
    Metric("ppo_ratio", "Ratio", "ratio", "New probability of a token over the old one.",
           "lower --lr or --ppo_epochs", lambda limits, _: limits.ppo_ratio),
    Metric("entropy", "Entropy", "entropy", "How varied the responses are.",
           "raise actor.entropy_coeff or --temperature, or lower --lr", _entropy_band),
    Metric("value_loss", "Value loss", "value loss", "Error of the critic.",
           "Should fall, then follow the reward. If it rises, lower --critic_lr."),
    Metric("explained_variance", "Explained variance", "explained variance",
           "How much of the returns the critic predicts; 1 is all.",
           "raise --critic_lr or --critic_epochs, or set trainer.critic_warmup",
           lambda *_: (0.0, 1.0)),
    Metric("policy_loss", "Policy loss"),
    Metric("grad_norm", "Gradient norm", "gradient norm", "Before clipping.",
           f"{_JUMP_ADVICE}--lr."),
    Metric("critic_grad_norm", "Gradient norm"),
    # Lengths and thoughts.
    Metric("response_length_mean", "Response length", "length", "Mean tokens of a response.",
           "If it grows without reward: --overlong_buffer; the judge may like length."),
    Metric("response_length/max", "Response length"),
    Metric("response/repetition", "Repetition", "repetition",
           "Share of word sequences that a response repeats.",
           "--repetition_penalty lowers the score of repeated text"),
    Metric("score/length_correlation", "What the score depends on", "",
           "Correlation of score and length within a step."),
    Metric("score/repetition_correlation", "What the score depends on"),
    Metric("score/word_correlation", "What the score depends on"),
    Metric("response_length/clip_ratio", "Cut off", "cut off", "Share of responses that hit the "
           "length limit.", "raise --max_response_length",
           lambda limits, _: (None, limits.truncated_share)),
    Metric("thought/length_mean", "Thought and answer length", "thought",
           "Mean tokens of a thought.", "If it grows without reward: --thought_budget."),
    Metric("answer_length/mean", "Thought and answer length"),
    Metric("thought/length_max", "Thought and answer length"),
    Metric("thought/unclosed_share", "Thoughts not closed", "no answer",
           "Share of responses that end inside a thought, so have no answer.",
           "raise --max_response_length, or set --thought_budget",
           lambda limits, _: (None, limits.truncated_share)),
    Metric("thought/share", "Thoughts not closed"),
    # Scores, learning rates, and the sampler.
    Metric("score/failed_share", "Without a score", "no score", "Share of responses without one.",
           "filter the responses below by `failed`: the reasons are there", lambda *_: (None, 0.0)),
    Metric("actor/lr", "Learning rate"),
    Metric("critic/lr", "Learning rate"),
    Metric("rollout/logprob_diff", "Sampler against trainer", "sampler gap",
           "Log-probability gap between sampler and trainer.",
           "compare with --rollout_name hf and --dtype float32",
           lambda limits, _: (None, limits.logprob_diff)),
    # Judges; `judge*` also matches the second judge of a mixture, judge_NAME.
    Metric("judge*/error_rate", "Judge errors", "judge errors", "Share of calls that failed.",
           "the cause is in judge/errors: rate limit, time-out or key", lambda *_: (None, 0.05)),
    Metric("judge*/unread", "Judge errors"),
    Metric("judge*/calls", "Judge calls"),
    Metric("judge*/cached", "Judge calls"),
    Metric("judge*/retries", "Judge calls"),
    Metric("judge*/place_followed", "Verdicts that follow the position", "by place",
           "Share of comparisons in which the same place won in both orders.",
           "try another --rm_model, or say in the prompt what decides",
           lambda *_: (None, 0.5)),
    Metric("judge*/ties", "Ties, failed comparisons", "", "Share of comparisons that were ties."),
    Metric("judge*/failed_pairs", "Ties, failed comparisons", "",
           "Share of comparisons without a verdict."),
    Metric("judge*/win_rate", "Win rate", "", "Share of comparisons with a reference that were "
           "won, or in validation with the first validation's response."),
    Metric("val/judge*/win_rate", "Win rate"),
    Metric("judge*/cost_usd_total", "Judge cost, US dollars", "judge cost", "Dollars so far.",
           "Lower --rm_votes, take a cheaper --rm_model, or set --rm_budget_usd."),
    Metric("judge*/monitor_gap", "Lead of the judge over its monitor"),
    Metric("judge/drift", "Drift of the judge", "drift",
           "How much more the judge's scores have risen than people's labels, a second judge "
           "or a rule.",
           "The model learns to please the judge: use an earlier checkpoint or another prompt",
           lambda *_: (None, DRIFTED)),
    Metric("judge*/label_drift", "Judge on the same labelled responses", "same responses",
           "How much its scores of the same responses have changed since the first reading.",
           "The model behind the judge's name has changed: name a fixed version",
           lambda *_: (-DRIFTED, DRIFTED)),
    Metric("judge*/label_gap", "Judge on the same labelled responses"),
    Metric("judge*/label_correlation", "Judge and labels", "",
           "Correlation of the judge's scores with the labels that people gave."),
    # Time.
    *(Metric(f"time/{phase}_s", "Seconds by phase", stacked=True) for phase in (
        "rollout", "reward_wait", "annotate", "advantages", "update_critic", "update_actor",
        "publish", "validate", "save")),
    Metric("perf/agree_s", "Seconds that ranks wait for each other between micro-batches"),
    # Speed.
    Metric("perf/tokens_per_s", "Tokens a second", "tokens/s", "Prompt and response tokens.",
           "The longest of the seconds by phase shows what to change"),
)  # fmt: skip


def find_position(key: str) -> int:
    """Return the index in METRICS of a key's entry, or the length of METRICS without one."""
    return next((i for i, m in enumerate(METRICS) if m.matches(key)), len(METRICS))


def list_plots(keys: Iterable[str]) -> list[dict[str, Any]]:
    """Return the plots for metric keys in the order of METRICS; unlisted keys come last."""
    plots: dict[str, dict[str, Any]] = {}
    for place, key in sorted((find_position(key), key) for key in keys):
        catalogued = place < len(METRICS)
        title = METRICS[place].plot if catalogued else key
        stacked = catalogued and METRICS[place].stacked
        plot = {"title": title, "keys": [], "stacked": stacked, "other": not catalogued}
        plots.setdefault(f"{catalogued} {title}", plot)["keys"].append(key)
    return list(plots.values())


def make_tiles(
    series: Mapping[str, Series], limits: Limits, findings: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the tiles of a run: newest value, healthy range, and the findings about the metric.

    Tiles with a finding come first, so that a tile and the list of findings agree.
    """
    tiles = []
    for place, key in sorted((find_position(key), key) for key in series):
        if place == len(METRICS) or not METRICS[place].tile:
            continue
        metric, values = METRICS[place], series[key]
        tiles.append({
            "key": key,
            "title": f"{metric.tile}{_judge_suffix(key)}",
            "what": metric.what,
            "band": list(metric.band(limits, values) if metric.band else (None, None)),
            "value": next((v for v in reversed(values) if v is not None), None),
            "findings": [span for span in findings if span["now"] and span["tile"] == key],
        })  # fmt: skip
    return sorted(tiles, key=lambda tile: not tile["findings"])


def _judge_suffix(key: str) -> str:
    """Return a suffix for a title that names the judge: `, style` for `judge_style/calls`."""
    judge = key.partition("/")[0].partition("judge_")[2]
    return f", {judge}" if judge else ""
