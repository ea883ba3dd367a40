"""The table of metrics for the page: plot, description, unit, healthy range, advice outside of it.

A new metric is one entry in METRICS. The ranges are those of the health checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ppo_cli.report.drift import DRIFTED
from ppo_cli.report.limits import Limits

Series = Sequence[float | None]
Band = tuple[float | None, float | None]  # lowest and highest healthy value


@dataclass(frozen=True)
class Metric:
    """One metric, or all metrics that match a pattern. Metrics with the same plot share a card.

    `band` computes the healthy range from the run's limits and the metric's values. `axis` has the
    values that the plot shows at least. `label` names the metric in a plot of several.
    """

    key: str
    plot: str
    what: str = ""
    change: str = ""
    band: Callable[[Limits, Series], Band] | None = None
    unit: str = ""
    axis: Band = (None, None)
    label: str = ""
    stacked: bool = False

    def matches(self, key: str) -> bool:
        """Whether a metric's key matches this entry's pattern; `*` does not match a `/`."""
        return self.key.count("/") == key.count("/") and fnmatchcase(key, self.key)


def _entropy_band(limits: Limits, values: Series) -> Band:
    """Return the healthy range of the entropy: at least a share of its first three values."""
    early = [v for v in values[:3] if v is not None]
    return (limits.entropy_share * sum(early) / len(early), None) if early else (None, None)


def _critic_band(limits: Limits, values: Series) -> Band:
    """Return the healthy range of the explained variance: a critic needs some steps to learn."""
    return (None, None) if 0 < len(values) < limits.critic_steps else (0.0, 1.0)


# Units with the values that their plots show at least.
SHARE: dict[str, Any] = {"axis": (0.0, 1.0)}
COUNT: dict[str, Any] = {"axis": (0.0, None)}  # small shares too
TOKENS = {"unit": "tokens", **COUNT}
CORRELATION: dict[str, Any] = {"axis": (-1.0, 1.0)}
_TASK = "If it falls while the reward rises, the model learns the reward and not the task."
# Phases of a step in words, for the page and the terminal.
PHASES = {
    "first_responses": "sampling references", "rollout": "sampling",
    "baseline_rollout": "sampling baselines", "annotate": "computing log-probs",
    "reward_wait": "waiting for rewards", "baseline_reward": "baselines: waiting for rewards",
    "advantages": "computing advantages", "update_critic": "updating the critic",
    "update_actor": "updating the actor", "publish": "publishing weights",
    "validate": "validating", "validate_reward": "validating: waiting for rewards",
    "save": "saving",
}  # fmt: skip
# In the order of the page. Fields: key, plot, description, advice, band.
DECIDING = (
    # What matters most.
    Metric("reward_mean", "Reward", "Mean score of the responses of a step.",
           "Should rise. If not: look at the worst responses, then --lr and the reward."),
    Metric("val/accuracy", "Validation accuracy", "Share of right answers.", _TASK, **SHARE),
    Metric("val/reward_mean", "Validation reward", "Mean score in validation.", _TASK),
    Metric("kl_divergence", "KL to the reference", "Distance from the starting model. While the "
           f"reward of built-in rules alone rises, up to {Limits.extreme_kl:g} is healthy.",
           "lower --lr or raise {kl_setting}", lambda limits, _: limits.kl, unit="nats a token",
           **COUNT),
    Metric("response_length_mean", "Response length", "Mean tokens of a response.",
           "If it grows without reward: --overlong_buffer; the judge may like length.",
           label="mean", **TOKENS),
    Metric("response_length/max", "Response length", label="longest", **TOKENS),
    Metric("entropy", "Entropy", "How varied the responses are.",
           "raise actor.entropy_coeff or --temperature, or lower --lr", _entropy_band,
           unit="nats a token", **COUNT),
    # Rewards and what they pay for.
    Metric("reward/*", "Parts of the reward, raw"),
    Metric("pieces/count_mean", "Pieces of a response with a reward"),
    Metric("rubric/*", "Credit of each criterion", "1 if it is met, or its fault is avoided.",
           **SHARE),
    Metric("val/reward/*", "Parts of the reward in validation"),
    Metric("score/length_correlation", "What the score depends on",
           "Correlations within a step.", label="length", **CORRELATION),
    Metric("score/repetition_correlation", "What the score depends on", label="repetition",
           **CORRELATION),
    Metric("score/word_correlation", "What the score depends on", label="one word", **CORRELATION),
    Metric("exploit/explained", "What explains the rise of the reward",
           "Shares: of the rise since the start that features nobody asked for explain; of the "
           "scores within a step; and of the features' worth that the low scores lack.",
           "If most is explained, and little else counts, the model learns the form and not the "
           "task.", label="explained", **COUNT),
    Metric("exploit/fit", "What explains the rise of the reward", label="within a step", **COUNT),
    Metric("exploit/spread", "What explains the rise of the reward", label="left open", **COUNT),
    Metric("exploit/confirmed", "Rise of the reward by form, and the second judge",
           "What features of the texts add to the reward: the part that the second judge's "
           "scores confirm, and the rest with its standard error.", label="confirmed", **COUNT),
    Metric("exploit/unconfirmed", "Rise of the reward by form, and the second judge",
           label="not confirmed", **COUNT),
    Metric("exploit/unconfirmed_error", "Rise of the reward by form, and the second judge",
           label="error", **COUNT),
    Metric("exploit/by/*", "Rise of the reward by feature", "What features and single words that "
           "nobody asked for add to the reward since the start."),
    Metric("exploit/asked/*", "Rise of the reward by what was asked for"),
    Metric("score/failed_share", "Without a score", "Share of responses without one.",
           "filter the responses below by `failed`: the reasons are there", lambda *_: (None, 0.0),
           **SHARE),
    # Critic.
    Metric("explained_variance", "Explained variance",
           "How much of the returns the critic predicts; 1 is all.",
           "raise --critic_lr or --critic_epochs, or start with --critic_pretrain_steps 20",
           _critic_band, **SHARE),
    # Texts and thoughts.
    Metric("response_length/clip_ratio", "Cut off", "Share of responses that hit the "
           "length limit.", "raise --max_response_length",
           lambda limits, _: (None, limits.truncated_share), **SHARE),
    Metric("thought/length_mean", "Thought and answer length",
           "Mean tokens of a thought.", "If it grows without reward: --thought_budget.",
           label="thought", **TOKENS),
    Metric("answer_length/mean", "Thought and answer length", label="answer", **TOKENS),
    Metric("thought/length_max", "Thought and answer length", label="longest thought", **TOKENS),
    Metric("thought/unclosed_share", "Thoughts not closed",
           "Share of responses that end inside a thought, so have no answer.",
           "raise --max_response_length, or set --thought_budget",
           lambda limits, _: (None, limits.truncated_share), label="not closed", **SHARE),
    Metric("thought/share", "Thoughts not closed", label="with a thought", **SHARE),
    # Episodes of several turns.
    Metric("environment/turns_mean", "Turns of an episode", "Mean turns of the policy.", **COUNT),
    Metric("environment/failed_share", "Failed episodes",
           "Share of episodes that their environment could not finish.",
           "filter the responses below: the errors are there", lambda *_: (None, 0.0), **SHARE),
    Metric("environment/tool_error_share", "Tool errors",
           "Share of turns whose tool calls the environment could not act on.",
           "filter the responses below: the errors are there",
           lambda limits, _: (None, limits.tool_error_share), **SHARE),
    Metric("environment/cut_*_share", "Episodes cut by limits", "Share that each limit cut.",
           "raise --max_turns, --max_turn_tokens or --max_response_length", **SHARE),
    Metric("environment/metric.*", "Figures of the environment", "Mean over the episodes."),
    # Judges; `judge*` also matches the second judge of a mixture, judge_NAME.
    Metric("judge*/error_rate", "Judge errors", "Share of calls that failed.",
           "the cause is in judge/errors: rate limit, time-out or key", lambda *_: (None, 0.05),
           label="failed", **SHARE),
    Metric("judge*/unread", "Judge errors", label="not read", **SHARE),
    Metric("judge*/place_followed", "Verdicts that follow the position",
           "Share of comparisons in which the same place won in both orders.",
           "try another --rm_model, or say in the prompt what decides",
           lambda *_: (None, 0.5), **SHARE),
    Metric("judge*/win_rate", "Win rate", "Share of comparisons with a reference that were "
           "won, or in validation with the first validation's response.", label="training",
           **SHARE),
    Metric("val/judge*/win_rate", "Win rate", label="validation", **SHARE),
    Metric("judge*/cost_usd_total", "Judge cost", "Dollars so far.",
           "Lower --rm_votes, take a cheaper --rm_model, or set --rm_budget_usd.", unit="$",
           label="cost", **COUNT),
    Metric("judge/drift", "Drift of the judge",
           "How much more the judge's scores have risen than people's labels, a second judge "
           "or a rule.",
           "The model learns to please the judge: use an earlier checkpoint or another prompt",
           lambda *_: (None, DRIFTED)),
)  # fmt: skip
# Shown below the responses, unless there is a finding.
DETAILS = (
    # Updates of policy and critic.
    Metric("value_loss", "Value loss", "Error of the critic.",
           "Should fall, then follow the reward. If it rises, lower --critic_lr.", **COUNT),
    Metric("clip_fraction", "Clip fraction", "Share of tokens whose update was clipped.",
           "lower --lr or --ppo_epochs", lambda limits, _: (None, limits.clip_fraction[1]),
           label="actor", **COUNT),
    Metric("critic/clip_fraction", "Clip fraction", label="critic", **COUNT),
    Metric("ppo_ratio", "Ratio", "New probability of a token over the old one.",
           "lower --lr or --ppo_epochs", lambda limits, _: limits.ppo_ratio, axis=(0.8, 1.2)),
    Metric("grad_norm", "Gradient norm", "Before clipping.",
           "A single jump by ten is harmless; if it happens again, lower --lr.", label="actor",
           **COUNT),
    Metric("critic_grad_norm", "Gradient norm", label="critic", **COUNT),
    Metric("policy_loss", "Policy loss", "Near 0 by construction."),
    Metric("actor/lr", "Learning rate", label="actor", **COUNT),
    Metric("critic/lr", "Learning rate", label="critic", **COUNT),
    Metric("response/repetition", "Repetition",
           "Share of the words of a response that occurred in it before.",
           "--repetition_penalty lowers the score of repeated text", **COUNT),
    Metric("rollout/logprob_diff", "Sampler against trainer",
           "Log-probability gap between sampler and trainer.",
           "compare with --rollout_name hf and --dtype float32",
           lambda limits, _: (None, limits.logprob_diff), unit="nats a token", **COUNT),
    Metric("rollout/is_weight_mean", "Importance weights",
           "Mean of trainer over sampler probability, truncated; 1 where both agree.",
           "the gap above shows how far the sampler is from the trainer", lambda *_: (0.9, 1.1),
           axis=(0.8, 1.2)),
    # Judges.
    Metric("judge*/calls", "Judge calls", **COUNT),
    Metric("judge*/cached", "Judge calls", **COUNT),
    Metric("judge*/retries", "Judge calls", **COUNT),
    Metric("judge*/escalated", "Decided by the judge, not the cheaper one", **SHARE),
    Metric("judge*/ties", "Ties, failed comparisons", "Shares of comparisons.", **SHARE),
    Metric("judge*/failed_pairs", "Ties, failed comparisons", label="without a verdict", **SHARE),
    Metric("judge*/noise", "Noise of the judge",
           "Standard deviation of repeated verdicts on the same response.",
           "If it is near the spread of the scores: more votes, a clearer prompt, or criteria",
           **COUNT),
    Metric("judge*/monitor_gap", "Lead of the judge over its monitor", label="gap"),
    Metric("judge*/label_drift", "Judge on the same labelled responses",
           "How much its scores of the same responses have changed since the first reading.",
           "The model behind the judge's name has changed: name a fixed version",
           lambda *_: (-DRIFTED, DRIFTED), label="drift"),
    Metric("judge*/label_gap", "Judge on the same labelled responses", label="gap to the labels"),
    Metric("judge*/label_correlation", "Judge and labels",
           "Correlation of the judge's scores with the labels that people gave.",
           label="correlation", **CORRELATION),
    # Episodes.
    Metric("environment/seconds_mean", "Time of the environment", "Mean time of its calls in an "
           "episode.", unit="s", **COUNT),
    Metric("environment/restarts", "Environment processes", "Restarts, time-outs and "
           "crashes in a step.", **COUNT),
    *(Metric(f"environment/{event}", "Environment processes", **COUNT)
      for event in ("timeouts", "crashes")),
    # Time and speed.
    *(Metric(f"time/{phase}_s", "Time by phase", "Where a step spends its time.", unit="s",
             label=label, stacked=True, **COUNT) for phase, label in PHASES.items()),
    Metric("perf/agree_s", "Waiting between micro-batches", "Ranks wait for each other.", unit="s",
           **COUNT),
    Metric("perf/tokens_per_s", "Tokens a second", "Prompt and response tokens.",
           "The longest phase shows what to change", unit="tokens/s", **COUNT),
)  # fmt: skip
METRICS = DECIDING + DETAILS
MIN_CONSTANT = 3  # equal values from which a metric counts as constant
MAIN_CARDS = 9  # cards above the responses: three rows on a laptop


def find_position(key: str) -> int:
    """Return the index in METRICS of a key's entry, or the length of METRICS without one."""
    return next((i for i, m in enumerate(METRICS) if m.matches(key)), len(METRICS))


def list_cards(
    series: Mapping[str, Series], limits: Limits, findings: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the cards of a run in the order of METRICS; those with a present finding come first.

    Metrics that are not in METRICS come last, each with its own card. A card's `place` is `main`,
    `more` (below the responses) or `other`. A constant card needs no plot: each of its metrics has
    had the same value in several steps.
    """
    cards: dict[tuple[str, str], dict[str, Any]] = {}
    for position, key in sorted((find_position(key), key) for key in series):
        metric, place = Metric(key, key), "other"
        if position < len(METRICS):
            metric, place = METRICS[position], "main" if position < len(DECIDING) else "more"
        card = cards.setdefault((place, metric.plot), {
            "title": metric.plot, "what": metric.what, "unit": metric.unit, "axis": metric.axis,
            "band": metric.band(limits, series[key]) if metric.band else (None, None),
            "stacked": metric.stacked, "place": place, "constant": not metric.stacked,
            "lines": [], "findings": [],
        })  # fmt: skip
        card["lines"].append((key, _label_line(metric, key)))
        values = [value for value in series[key] if value is not None]
        card["constant"] &= len(values) >= MIN_CONSTANT and len(set(values)) == 1
        card["findings"] += [span for span in findings if span["now"] and span["key"] == key]
        if card["findings"]:
            card["place"] = "main"
    ordered = sorted(cards.values(), key=lambda card: not card["findings"])
    shown = [card for card in ordered if card["findings"] or not card["constant"]]
    for card in [card for card in shown if card["place"] == "main"][MAIN_CARDS:]:
        card["place"] = "more"
    return ordered


def _label_line(metric: Metric, key: str) -> str:
    """Return the name of a metric in a plot of several; judges besides the first add theirs."""
    judge = key.removeprefix("val/").partition("/")[0].partition("judge_")[2]
    label = metric.label or key.rpartition("/")[2].replace("_", " ")
    return f"{label}, {judge}" if judge else label
