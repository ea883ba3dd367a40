"""Health checks on metrics: which one has left its range, and what to change.

A new check is one function and one line in _CHECKS. A check returns its warning, or "" if all is
well. Terminal, summary and page all show what `find_troubles` returns.

`find_troubles` looks at the last step; `HealthWatch` limits repeated warnings.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import correlation, fmean, median, pvariance

from ppo_cli.config.mixture import find_watched, is_watched, judges_of, models_of
from ppo_cli.config.schema.reward import Reward
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import plural, ppo
from ppo_cli.moments import TINY
from ppo_cli.paths import user_path
from ppo_cli.planning.batches import batch_arithmetic
from ppo_cli.report.drift import DRIFTED, History, Opinion, measure_held_out
from ppo_cli.report.episode_card import CUT_SHARE, count_tool_errors
from ppo_cli.report.exploits import describe_failures
from ppo_cli.report.hacking import find_hacking, reward_rises
from ppo_cli.report.limits import Limits

# Steps and thresholds of the checks.
SETTLE_STEPS = 5  # the first steps are too noisy to judge
SETTLED_STEPS = 8  # after which a criterion that hardly any response meets is told
LOST_CREDIT = 0.1  # fall of a criterion's mean credit that is told
SAME_CREDIT = 0.05  # mean credit of such a criterion, or its distance from 1
MANY_CUT_EPISODES = 0.1  # share of episodes that a limit cuts
STUCK_STEPS = 20  # steps after which something slow counts as stuck
HALVED_STEPS = 5  # steps with a halved loss scale; a scale that only starts too high needs fewer
SAME_STEPS = 3  # steps of equal rewards after which there is nothing to learn from
NO_TREND = 0.38  # correlation with time below which 9 of 10 series of 20 random numbers are
LOST_REWARD = 0.1  # share of its best reward below which a policy has collapsed
REPEAT_AFTER = 50  # steps between two lines about the same trouble
REPEAT_UNSCORED_AFTER = 5  # the same for responses without a score, which cost data in every step
EXPLAINS_NOTHING = 0.05  # explained variance of a critic that does not learn
# Checks that a collapse also triggers; they are not reported next to it.
SIGNS_OF_COLLAPSE = ("kl_high", "entropy", "ratio", "clip_high", "reward_same", "grad_norm")
# Troubles that put a rise of the reward in doubt.
EXPLOITS = ("collapsed", "hacking", "judge_fooled")
FEWER_PIECES = 0.6  # share of the first steps' pieces per response at which they are too few
CALM_STEPS = 5  # steps without a trouble after which it counts as new


def make_limits(config: Config) -> Limits:
    """Return the limits for the settings of a run."""
    actor, algorithm = config.actor, config.algorithm
    mini_batches = math.ceil(config.data.train_batch_size / actor.ppo_mini_batch_size)
    # bfloat16 and old weights make sampler and trainer differ more. An unset type depends on the
    # machine, which need not be the one that shows the run.
    rough = config.model.dtype != "float32"
    in_loss_only = actor.use_kl_loss and not algorithm.use_kl_in_reward
    # Masks of tokens that are far from the sampler are meant to be rare.
    rarely_clips = actor.policy_loss.loss_mode == "dis"
    return Limits(
        clip_fraction=(0.0, 0.3) if rarely_clips else Limits.clip_fraction,
        grad_clip=actor.grad_clip,
        updates_per_step=actor.ppo_epochs * mini_batches,
        max_response_length=config.data.max_response_length,
        has_episodes=config.environment.is_set,
        warmup_steps=config.trainer.critic_warmup,
        kl_setting="actor.kl_loss_coef" if in_loss_only else "--kl_coef",
        logprob_diff=0.2 if config.trainer.async_steps else 0.05 if rough else 1e-3,
        async_steps=config.trainer.async_steps,
        reward_advice=_reward_advice(config.reward),
        run_dir=shlex.quote(config.trainer.output_dir),
        lr=actor.optim.lr,
        can_be_gamed=is_watched(config.reward),
        has_judge=bool(judges_of(config.reward)),
        total_steps=batch_arithmetic(config)["total_steps"],
        folder=user_path(config.trainer.output_dir),
        watched=find_watched(config.reward),
        holds_out=any(j.settings.rubric_held_out is not None for j in judges_of(config.reward)),
    )


def _reward_advice(reward: Reward) -> str:
    """Return advice for a reward that gives every response the same score."""
    kinds = [
        "--rm_prompt_preset, --rm_scale and --rm_model" if judges_of(reward) else "",
        "--reward_model" if models_of(reward) else "",
        "--reward_function" if reward.function else "",
    ]
    flags = [kind for kind in kinds if kind] or ["--rule"]
    return f"check {', and '.join(flags)}"


def find_troubles(history: History, limits: Limits) -> dict[str, str]:
    """Run all checks for the last step of `history`; return warnings by kind of trouble.

    A metric that is missing or not finite gives no warning.
    """
    steps = [line for line in history if line["step"] > 0]
    if not steps:
        return {}
    limits = adapt_kl(steps, limits)
    findings = {kind: check(steps, limits) for kind, check in _CHECKS.items()}
    if findings["collapsed"]:  # it is the cause of these as well
        findings |= dict.fromkeys(SIGNS_OF_COLLAPSE, "")
    if findings["hacking"]:  # it explains long responses: other advice would be wrong
        findings["too_long"] = ""
    if findings["criterion_against"]:  # it says the same, and more
        findings["criterion_lost"] = ""
    if findings["kl_high"]:
        findings["clip_low"] = ""  # it asks for the opposite
    return {kind: line for kind, line in findings.items() if line}


def adapt_kl(steps: History, limits: Limits) -> Limits:
    """Return the limits with the range of KL that is healthy after these steps.

    What a built-in rule pays for is a gain: while its reward rises, only an extreme KL is too high.
    What a judge pays for may be flattery, so there the range stays.
    """
    rewards = [float(s["reward_mean"]) for s in steps if s.get("reward_mean") is not None]
    if limits.can_be_gamed or len(set(rewards)) < 2:
        return limits
    # Rewards without a trend are above the first one by chance in half of all steps. The bound for
    # a correlation narrows with the root of the number of values.
    trend = correlation(range(len(rewards)), rewards)
    clear = trend > NO_TREND * math.sqrt(STUCK_STEPS / len(rewards))
    rises = clear and fmean(rewards[-SETTLE_STEPS:]) > rewards[0]
    return replace(limits, kl=(limits.kl[0], limits.extreme_kl)) if rises else limits


class HealthWatch:
    """Reports each trouble when it appears, again after REPEAT_AFTER steps, and when it returns."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._reported: dict[str, int] = {}
        self._seen: dict[str, int] = {}

    def check(
        self, history: History, saved: Sequence[int] = (), people: Sequence[Opinion] = ()
    ) -> dict[str, str]:
        """Return the warnings to print after the last step, by kind; `saved` are checkpoints."""
        if not history:
            return {}
        step, lines = int(history[-1]["step"]), dict[str, str]()
        limits = replace(self._limits, saved=tuple(saved), people=tuple(people))
        for kind, line in find_troubles(history, limits).items():
            # A trouble is new if some calm steps came before it.
            is_new = step - self._seen.get(kind, -REPEAT_AFTER) > CALM_STEPS
            pause = REPEAT_UNSCORED_AFTER if kind == "failed" else REPEAT_AFTER
            if is_new or step - self._reported.get(kind, -pause) >= pause:
                lines[kind] = line
                self._reported[kind] = step
            self._seen[kind] = step
        return lines


def _last_values(steps: History, key: str, count: int) -> list[float]:
    """Return the last `count` values of a metric; empty unless all of them are finite."""
    values = [line.get(key) for line in steps[-count:]]
    finite = [float(v) for v in values if v is not None and math.isfinite(v)]
    return finite if len(finite) == count else []


def _format_beyond(value: float, limit: float) -> str:
    """Return a value with three digits, or with as many as show that it is beyond the limit."""
    texts = (f"{value:.{digits}g}" for digits in range(3, 17))
    return next((t for t in texts if (float(t) - limit) * (value - limit) > 0), f"{value}")


def _reward_is_flat(steps: History) -> bool:
    """Whether the reward of the last 20 steps has no trend: it correlates with time by chance."""
    rewards = _last_values(steps, "reward_mean", STUCK_STEPS)
    if not rewards or min(rewards) == max(rewards):
        return bool(rewards)
    return abs(correlation(range(STUCK_STEPS), rewards)) <= NO_TREND


def _check_collapse(steps: History, limits: Limits) -> str:
    """Warn if the reward is lost and the KL is extreme or the entropy near 0."""
    # One of two signs that the policy has changed completely.
    now, earlier = steps[-1], steps[:-1]
    reward, kl, entropy = (now.get(k) for k in ("reward_mean", "kl_divergence", "entropy"))
    had = max((float(s.get("entropy") or 0.0) for s in earlier), default=0.0)
    silent = entropy is not None and entropy < limits.entropy_share * had
    far = kl is not None and kl > limits.extreme_kl
    if not (silent or far):
        return ""
    # The reward must have been above the lowest score, and be near it again.
    before = [float(s["reward_mean"]) for s in earlier if s.get("reward_mean") is not None]
    lowest = [float(s["score/min"]) for s in steps if s.get("score/min") is not None]
    if reward is None or not before or not lowest:
        return ""
    best, floor = max(before), min(lowest)
    if best <= floor or reward - floor > LOST_REWARD * (best - floor):
        return ""
    # Advise to resume from the last checkpoint before the best reward.
    signs = [f"kl is {kl:.2g}"] if far else []
    signs += [f"entropy fell from {had:.2g} to {entropy:.2g}"] if silent else []
    good = max(s["step"] for s in earlier if s.get("reward_mean") == best)
    saved = max((step for step in limits.saved if step <= good), default=None)
    restart = "start from scratch with --resume never"
    if saved is not None:
        path = f"{limits.run_dir}/checkpoints/step_{saved:06d}"
        restart = f"resume from step {saved} with --resume {path}"
    return (
        f"The policy has collapsed: reward fell from {best:.3f} to {reward:.3f}, "
        f"{' and '.join(signs)}. Lower --lr (now {limits.lr:g}) and {restart}."
    )


def _check_kl_high(steps: History, limits: Limits) -> str:
    """Warn if the KL is extreme, or stays above the limit."""
    kl = _last_values(steps, "kl_divergence", 1)
    two = _last_values(steps, "kl_divergence", 2) or [0.0]
    if not kl or (kl[0] <= limits.extreme_kl and min(two) <= limits.kl[1]):
        return ""
    above = f"kl {_format_beyond(kl[0], limits.kl[1])} is above {limits.kl[1]:g}"
    paid = limits.can_be_gamed and kl[0] <= limits.extreme_kl and reward_rises(steps)
    if paid and not find_hacking(steps, limits):
        return (
            f"{above} while the reward rises: read responses of the last step, or ask a second "
            f"judge, before you trust the gain. {limits.kl_setting} holds it back."
        )
    return (
        f"{above}: the model moves far from where it started. Raise {limits.kl_setting} or lower "
        "--lr."
    )


def _check_kl_low(steps: History, limits: Limits) -> str:
    """Warn if KL and reward do not move, so the model hardly changes."""
    kl = _last_values(steps, "kl_divergence", STUCK_STEPS)
    # During the critic's warm-up the policy does not move at all.
    learning = len(steps) > limits.warmup_steps + STUCK_STEPS
    if not (learning and kl and max(kl) < limits.kl[0] and _reward_is_flat(steps)):
        return ""
    return (
        f"kl {_format_beyond(kl[-1], limits.kl[0])} stays below {limits.kl[0]:g} and reward does "
        f"not move: the model hardly changes. Raise --lr, or lower {limits.kl_setting}."
    )


def _check_clip_high(steps: History, limits: Limits) -> str:
    """Warn if too many tokens were clipped in two steps."""
    clipped = _last_values(steps, "clip_fraction", 2)
    if not clipped or min(clipped) <= limits.clip_fraction[1]:
        return ""
    return (
        f"clip {_format_beyond(clipped[-1], limits.clip_fraction[1])} is above "
        f"{limits.clip_fraction[1]:g}: updates are so large that much of them is cut off. "
        "Lower --lr or --ppo_epochs."
    )


def _check_clip_low(steps: History, limits: Limits) -> str:
    """Warn if few tokens are clipped while the reward does not move."""
    # With one update per step training is on-policy: nothing can be clipped.
    clipped = (
        _last_values(steps, "clip_fraction", STUCK_STEPS) if limits.updates_per_step > 1 else []
    )
    low = bool(clipped) and max(clipped) < limits.clip_fraction[0]
    # A reward that has risen and rises no more is a run that has learned.
    stuck = len(steps) > limits.warmup_steps + STUCK_STEPS and _reward_is_flat(steps)
    if not (low and stuck) or reward_rises(steps):
        return ""
    return (
        f"clip {_format_beyond(clipped[-1], limits.clip_fraction[0])} has stayed below "
        f"{limits.clip_fraction[0]:g} while "
        "reward does not move: there may be room for a higher --lr or more --ppo_epochs."
    )


def _check_ratio(steps: History, limits: Limits) -> str:
    """Warn if the probability ratio of new and old policy leaves its range."""
    ratio, (low, high) = _last_values(steps, "ppo_ratio", 1), limits.ppo_ratio
    if not ratio or low <= ratio[0] <= high:
        return ""
    limit = low if ratio[0] < low else high
    return (
        f"ppo_ratio {_format_beyond(ratio[0], limit)} is outside {low:g}-{high:g}: the new "
        "policy has left the one that sampled. Lower --lr or --ppo_epochs."
    )


def _check_sampler_mismatch(steps: History, limits: Limits) -> str:
    """Return what is wrong and what to change if the last rollout/logprob_diff is too high.

    It returns "" if the value is missing or within its limit.
    """
    gap = _last_values(steps, "rollout/logprob_diff", 1)
    if not gap or gap[0] <= limits.logprob_diff:
        return ""
    value = _format_beyond(gap[0], limits.logprob_diff)
    finding = f"rollout/logprob_diff {value} is above {limits.logprob_diff:g}: "
    if limits.async_steps:
        return f"{finding}the responses come from weights too old. Lower --async_steps or --lr."
    return (
        f"{finding}sampler and trainer disagree on the same tokens, so the sampler lacks the "
        "newest weights or computes differently. Compare with --rollout_name hf and --dtype "
        "float32; algorithm.rollout_correction.rollout_is corrects for small gaps alone."
    )


def _check_reward_same(steps: History, limits: Limits) -> str:
    """Warn if all responses of several steps got the same reward."""
    mean = _last_values(steps, "reward_mean", 1)
    # Rewards that are all 0 are common at the start: wait longer, but not until a short run ends.
    half = (limits.total_steps or 4 * SETTLE_STEPS) // 2
    count = SAME_STEPS if mean and mean[0] else max(SAME_STEPS, min(2 * SETTLE_STEPS, half))
    spread, means = (_last_values(steps, key, count) for key in ("score/std", "reward_mean"))
    if not spread or not means or max(*spread, max(means) - min(means)) > TINY:
        return ""
    return (
        f"All scored responses of the last {count} steps got the same reward ({means[-1]:g}), so "
        "there is nothing to learn from. Look at some with "
        f"`{ppo(f'show {limits.run_dir} --worst 5')}`, and {limits.reward_advice}, or raise "
        "--temperature."
    )


def _check_entropy(steps: History, limits: Limits) -> str:
    """Warn if the entropy fell to a small share of its start without full success."""
    early, late = _last_values(steps[:3], "entropy", 3), _last_values(steps, "entropy", 3)
    if len(steps) < 2 * SETTLE_STEPS or not early or not late:
        return ""
    if fmean(late) >= limits.entropy_share * fmean(early):
        return ""
    # Compare with the scores of this step only: the scale is not known here.
    mean, low, high = (_last_values(steps, n, 1) for n in ("reward_mean", "score/min", "score/max"))
    # Where nearly all responses get the best reward, low entropy is success.
    if mean and low and high and mean[0] >= high[0] - 0.1 * (high[0] - low[0]):
        return ""
    return (
        f"entropy fell from {fmean(early):.2g} to {fmean(late):.2g}: the model says nearly the "
        "same each time and stops exploring. Raise actor.entropy_coeff (0.001 is a start), "
        f"--temperature or {limits.kl_setting}, or lower --lr."
    )


def _check_critic(steps: History, limits: Limits) -> str:
    """Warn if the critic has explained nearly nothing for many steps."""
    explained = _last_values(steps, "explained_variance", limits.critic_steps)
    if not explained or max(explained) > EXPLAINS_NOTHING:
        return ""
    spread = _last_values(steps, "score/std", SAME_STEPS)
    if spread and max(spread) <= TINY:  # of equal rewards there is nothing to explain
        return ""
    usual = median(explained)
    how = "worse than" if usual < -EXPLAINS_NOTHING else "no better than"
    return (
        f"explained_variance was {max(explained):z.3g} at most in {limits.critic_steps} steps "
        f"(the median is {usual:z.3g}): the critic predicts {how} the mean. Raise --critic_lr or "
        "--critic_epochs, start with --critic_pretrain_steps 20, or use an estimator without a "
        "critic (--adv_estimator rloo)."
    )


def _make_grad_spike_check(key: str, flag: str) -> Callable[[History, Limits], str]:
    """Return a check that warns if a gradient norm jumps; `flag` is the learning rate to lower."""

    def check(steps: History, limits: Limits) -> str:
        """Return a warning if the newest gradient norm is far above the usual one, "" if not."""
        norm, before = _last_values(steps, key, 1), _last_values(steps[:-1], key, 2 * SETTLE_STEPS)
        if not norm or not before:
            return ""
        # Early in a run norms vary, so a jump must also exceed the clip limit.
        usual = median(before)
        if norm[0] <= max(limits.spike * usual, limits.grad_clip):
            return ""
        return (
            f"{key} jumped to {norm[0]:.3g} (usually {usual:.2g}). Once is harmless; if it comes "
            f"again, lower {flag}."
        )

    return check


def _check_not_finite(steps: History, limits: Limits) -> str:
    """Warn if optimizer steps were skipped because of infinite or NaN gradients."""
    names = ("actor/skipped_steps", "critic/skipped_steps")
    skipped = sum(int(steps[-1].get(name) or 0) for name in names)
    if not skipped:
        return ""
    return (
        f"Gradients were not finite in {skipped} of this step's updates, which were left out. "
        "Lower --lr and --critic_lr, or use --dtype float32."
    )


def _check_loss_scale(steps: History, limits: Limits) -> str:
    """Warn if the loss scale of float16 was halved in many steps in a row."""
    for model in ("actor", "critic"):
        halvings = _last_values(steps, f"{model}/loss_scale_halvings", HALVED_STEPS)
        if halvings and min(halvings) > 0:
            return (
                f"The {model}'s gradients were not finite in float16 in {HALVED_STEPS} steps in a "
                "row, though its loss scale was halved each time: if that goes on, it is not the "
                "scale. Lower --lr and --critic_lr, or use --dtype float32."
            )
    return ""


def _check_cut_off(steps: History, limits: Limits) -> str:
    """Warn if most responses hit the length limit in three steps."""
    cut = _last_values(steps, "response_length/clip_ratio", 3)
    if not cut or min(cut) <= limits.truncated_share:
        return ""
    if limits.has_episodes:
        return (
            f"The last turn of {cut[-1]:.0%} of the episodes is cut off. Raise --max_turn_tokens, "
            "or --max_response_length, which counts all turns and replies "
            f"({limits.max_response_length} tokens)."
        )
    return (
        f"{cut[-1]:.0%} of the responses are cut off at {limits.max_response_length} tokens, "
        "perhaps before the answer. Raise --max_response_length, or ask for shorter answers in "
        "the prompt."
    )


def _check_pieces(steps: History, limits: Limits) -> str:
    """Warn if responses have far fewer pieces with a reward than in the first steps."""
    first = [line["pieces/count_mean"] for line in steps if "pieces/count_mean" in line]
    last = _last_values(steps, "pieces/count_mean", 3)
    if len(first) < SETTLE_STEPS + 3 or not last:
        return ""
    before, now = fmean(first[:SETTLE_STEPS]), fmean(last)
    if now > FEWER_PIECES * before:
        return ""
    return (
        f"Responses have {now:.3g} pieces with a reward of their own, in the first steps "
        f"{before:.3g}: the policy may leave out what scores badly. Say in the judge's prompt what "
        "a response must have, or use --adv_estimator piece_grpo, which adds the whole score."
    )


def _check_unclosed_thoughts(steps: History, limits: Limits) -> str:
    """Warn if most responses of three steps end inside a thought."""
    open_ = _last_values(steps, "thought/unclosed_share", 3)
    if not open_ or min(open_) <= limits.truncated_share:
        return ""
    return (
        f"{open_[-1]:.0%} of the responses end within a thought, so they have no answer. Raise "
        "--max_response_length, set --thought_budget, or switch thinking off: "
        "data.apply_chat_template_kwargs.enable_thinking=false, if the template supports it."
    )


def _check_tool_errors(steps: History, limits: Limits) -> str:
    """Warn if many turns of three steps have a tool error."""
    errors = _last_values(steps, "environment/tool_error_share", 3)
    if not errors or min(errors) <= limits.tool_error_share:
        return ""
    causes = count_tool_errors(limits.folder, steps[-1]["step"]) if limits.folder else ""
    return (
        f"{errors[-1]:.0%} of the turns have a tool error{causes and f' ({causes})'}. `error` in "
        "the responses of the last step says which: describe the tool's arguments, or raise "
        "--tool_timeout if it is slow."
    )


def _check_cut_episodes(steps: History, limits: Limits) -> str:
    """Warn if a limit cuts many episodes of three steps."""
    for key in steps[-1]:
        limit = CUT_SHARE.fullmatch(key)
        cut = _last_values(steps, key, 3) if limit else []
        if limit and cut and min(cut) > MANY_CUT_EPISODES:
            return (
                f"{cut[-1]:.0%} of the episodes are cut by the limit of "
                f"{limit[1].replace('_', ' ')}: they end before the task does. Raise "
                "--max_turns, --max_turn_tokens or --max_response_length."
            )
    return ""


def _check_failed_scores(steps: History, limits: Limits) -> str:
    """Warn about responses without a score."""
    failed = int(steps[-1].get("score/failed") or 0)
    if not failed:
        return ""
    causes = describe_failures(limits.folder, steps[-1]["step"]) if limits.folder else ""
    look = ppo(f"show {limits.run_dir} --failed")
    return (
        f"{causes or f'{failed} responses have no score'}. They are left out of the update; "
        f"`{look}` shows them."
    )


def _check_canary(steps: History, limits: Limits) -> str:
    """Warn if the judge gave a good score to an empty test reply (a canary)."""
    worst = _last_values(steps, "judge/canary_max", 1)
    if not worst or worst[0] <= 0.3:
        return ""
    return (
        f"The judge gave {worst[0]:.2f} to a reply without any content: the model may learn to say "
        f"nothing. Try another --rm_model or prompt; `{_audit_command(limits)}` shows which ones "
        "resist."
    )


def _audit_command(limits: Limits) -> str:
    """Return the command that tests the judge of this run with attacks."""
    return ppo(f"reward audit --config {limits.run_dir}/config.yaml")


# Cause of a reply that could not be parsed -> advice.
UNREAD_ADVICE = {
    "truncated": "Raise --rm_max_tokens, or take an --rm_model that does not think aloud.",
    "thought": (
        "Switch the judge's thinking off, start its server with a reasoning parser, or take "
        "another --rm_model."
    ),
    "out_of_range": "Name one scale in --rm_scoring_prompt, the one of --rm_scale.",
    "ambiguous": "Ask in --rm_scoring_prompt for one score only.",
    "empty": "Raise --rm_max_tokens, or take another --rm_model.",
    "unparsed": "Take another --rm_model.",
    "form": (
        "Use an --rm_model (or a server) that follows a JSON schema, ask for no other format in "
        "--rm_scoring_prompt, or set --rm_output text."
    ),
}


def _check_unread_replies(steps: History, limits: Limits) -> str:
    """Warn if many replies of a judge could not be parsed, with advice for the main cause."""
    line = steps[-1]
    for key in line:
        # Up to a tenth is normal, as unreadable replies are asked again.
        share = line[key] if key.startswith("judge") and key.endswith("/unread") else 0
        if share and share > 0.1:
            causes = {k[len(key) + 1 :]: line[k] for k in line if k.startswith(f"{key}/")}
            # The most frequent cause decides the advice.
            cause = max(causes, key=lambda name: float(causes[name] or 0.0), default="form")
            return (
                f"{share:.0%} of the judge's replies could not be read (most often: {cause}) and "
                f"were asked again. {UNREAD_ADVICE.get(cause, UNREAD_ADVICE['unparsed'])}"
            )
    return ""


def _check_monitor(steps: History, limits: Limits) -> str:
    """Warn if the second judge, which only monitors, gave no verdict in two steps."""
    failed = _last_values(steps, "judge/monitor_failed", 2)
    if not failed or not min(failed):
        return ""
    if any(line.get("judge/monitor_mean") is not None for line in steps[-2:]):
        return ""
    return (
        f"The monitoring judge gave no verdict ({failed[-1]:g} failed in this step). Training goes "
        "on without it; check --rm_monitor_model."
    )


def _check_judge_changed(steps: History, limits: Limits) -> str:
    """Warn if the judge now scores the same labelled responses differently than at first."""
    if not limits.has_judge:
        return ""
    keys = ((line, key) for line in reversed(steps) for key in line if key.endswith("/label_drift"))
    line, key = next(((line, key) for line, key in keys if line[key] is not None), ({}, ""))
    moved, noise = line.get(key, 0.0), line.get(key.replace("drift", "noise")) or 0.0
    if abs(moved) <= max(DRIFTED, 3 * noise):
        return ""
    return (
        f"The judge's scores of the same labelled responses have moved by {moved:+.2f} since they "
        "were first read: the model behind its name has changed. Name a fixed version of the "
        f"model (--rm_model); `{_audit_command(limits)}` tests it."
    )


def _check_dominated_part(steps: History, limits: Limits) -> str:
    """Warn if a part of a mixture has much less influence than its weight says.

    Only in the first steps: a part that is solved later rightly has no spread.
    """
    if len(steps) > SETTLE_STEPS:
        return ""
    line = steps[-1]
    # Names of the parts, from keys such as reward/NAME/share.
    names = [k[7:-6] for k in line if k.startswith("reward/") and k.endswith("/share")]
    for name in names:
        share, weight, std = (
            float(line.get(f"reward/{name}/{what}") or 0.0) for what in ("share", "weight", "std")
        )
        if std <= 1e-6 or share >= weight / 2:
            continue
        # Advise to rescale whichever of the two has the more unusual scale.
        loud = max(names, key=lambda n: float(line.get(f"reward/{n}/share") or 0.0))
        scaled = {n: float(line.get(f"reward/{n}/scaled_std") or 0.0) for n in (loud, name)}
        raw = max(scaled, key=lambda n: abs(math.log(max(1e-9, scaled[n]))))
        return (
            f"The reward's part '{name}' is dominated: it makes {share:.0%} of the total's spread, "
            f"its weight says {weight:.0%}. Set the scaling of '{raw}' to zscore (or affine)."
        )
    return ""


def _check_lost_criterion(steps: History, limits: Limits) -> str:
    """Warn about criteria that are met less than in the first steps, or never in validation."""
    texts = []
    for name, values in _criterion_credits(steps, SETTLE_STEPS).items():
        # Until a criterion has settled, the first and last steps are the same ones.
        first = [float(line.get(f"rubric/{name}") or 0.0) for line in steps[:SETTLE_STEPS]]
        if len(steps) < 2 * SETTLE_STEPS:
            continue
        error = math.sqrt((pvariance(first) + pvariance(values)) / SETTLE_STEPS)
        fall = fmean(first) - fmean(values)
        if fall > max(LOST_CREDIT, 3 * error):
            texts.append(f"'{name}' (credit {fmean(first):.2g} to {fmean(values):.2g})")
    validations = [line for line in steps if "val/reward_mean" in line]
    for key in validations[-1] if len(validations) > 1 else ():
        series = [float(line.get(key) or 0.0) for line in validations]
        name = key.removeprefix("val/rubric/")
        # Training does not ask about a held-out criterion, so its weight would change nothing.
        if name == key or key.endswith("/hurdle_missed") or f"rubric/{name}" not in steps[-1]:
            continue
        if max(series) < SAME_CREDIT:
            texts.append(f"'{name}' (never met in validation)")
        elif series[0] - series[-1] > 2 * LOST_CREDIT:
            texts.append(f"'{name}' (validation credit {series[0]:.2g} to {series[-1]:.2g})")
    if not texts:
        return ""
    return (
        f"Criteria that are met less than before, or never: {', '.join(texts)}. Raise their "
        "weight in --rm_rubric, give them levels, or make them a must."
    )


def _check_held_out(steps: History, limits: Limits) -> str:
    """Warn if validations credit criteria that training asks about, and not the held-out ones."""
    drift = measure_held_out(limits.folder, steps[-1]["step"]) if limits.holds_out else None
    if drift is None or not drift.alarming:
        return ""
    look = ppo(f"show {limits.run_dir} --val")
    return (
        f"In validation the credit of the criteria that training asks about has risen by "
        f"{drift.amount + drift.rise:.2f}, while {drift.movement}: the model may learn the "
        f"words of the rubric, not what is meant. Read the responses: `{look}`."
    )


def _criterion_credits(steps: History, count: int) -> dict[str, list[float]]:
    """Return the mean credits of each rubric criterion in the last `count` steps."""
    # The share of missed hurdles is not a criterion.
    keys = [k for k in steps[-1] if k.startswith("rubric/") and k != "rubric/hurdle_missed"]
    return {key[7:]: values for key in keys if (values := _last_values(steps, key, count))}


def _check_stuck_criterion(steps: History, limits: Limits) -> str:
    """Warn about criteria without credit, or with nearly all of it from the start.

    A fault has credit where it is absent, so none of them is called met.
    """
    unmet, always = [], []
    for name, values in _criterion_credits(steps, SETTLED_STEPS).items():
        credits = [float(line.get(f"rubric/{name}") or 0.0) for line in steps]
        if fmean(values) < SAME_CREDIT:
            unmet.append(f"'{name}' hardly ever has credit (mean {fmean(values):.2g})")
        elif min(credits) > 1 - SAME_CREDIT:
            always.append(f"'{name}' had nearly full credit from the start ({fmean(credits):.3g})")
    if not unmet and not always:
        return ""
    return (
        f"Criteria that tell no responses apart in the last {SETTLED_STEPS} steps: "
        f"{', '.join([*unmet, *always])}. Reword them in --rm_rubric, give them levels, or remove "
        "them."
    )


def _check_opposed_criterion(steps: History, limits: Limits) -> str:
    """Warn about a criterion whose credit falls while the reward rises."""
    rewards = _last_values(steps, "reward_mean", STUCK_STEPS)
    for name, values in _criterion_credits(steps, STUCK_STEPS).items():
        # Means of the first and of the last quarter say which of the two rises.
        few = STUCK_STEPS // 4
        fall = fmean(values[:few]) - fmean(values[-few:])
        rise = fmean(rewards[-few:]) - fmean(rewards[:few]) if rewards else 0.0
        if min(fall, rise) > 0.1 and (coefficient := correlation(values, rewards)) < -0.6:
            return (
                f"The criterion '{name}' falls while the reward rises "
                f"(correlation {coefficient:.2f} over {STUCK_STEPS} steps): the others "
                "are learned at its cost. Raise its weight in --rm_rubric, or make it a must."
            )
    return ""


def _check_failing_part(steps: History, limits: Limits) -> str:
    """Warn about a part of a mixture that gives many responses no score."""
    line = steps[-1]
    for key in line:
        share = line.get(key) if key.startswith("reward/") and key.endswith("/failed_share") else 0
        if share and share > 0.2:
            return (
                f"The reward's part '{key[7:-13]}' failed for {share:.0%} of the responses. The "
                f"reasons are in rollouts/step_{line['step']:06d}.jsonl, under `mixture`."
            )
    return ""


def _check_cut_prompts(steps: History, limits: Limits) -> str:
    """Warn if prompts were shortened to fit a reward model."""
    cut_counts = [int(v) for k, v in steps[-1].items() if k.endswith("/prompts_cut") and v]
    if not cut_counts:
        return ""
    return (
        f"Cut to fit the reward model, from the left: {plural(sum(cut_counts), 'prompt')}. Raise "
        "--reward_model_max_length if it can read more, or shorten them (--max_prompt_length)."
    )


def _check_memory(steps: History, limits: Limits) -> str:
    """Return notes on micro-batches that were halved after an out-of-memory error."""
    lines = []
    for name in ("actor", "critic", "annotate"):
        # The setting that starts the next run with the smaller size.
        tokens = f"{'ref.log_prob' if name == 'annotate' else f'{name}.ppo'}_max_token_len_per_gpu"
        keys = {
            "rows": f"a smaller {tokens}"
            if name == "annotate"
            else f"{name}.ppo_micro_batch_size_per_gpu={{:g}}",
            "tokens": f"{tokens}={{:g}}",
        }
        for unit, key in keys.items():
            for limit in _last_values(steps, f"{name}/micro_batch_{unit}", 1):
                lines.append(
                    f"Memory ran out: {name} micro-batches now hold {limit:g} {unit}. Set "
                    f"{key.format(limit)} to start there next time."
                )
    return " ".join(lines)


# Kind of trouble -> check. The kinds are also keys of the page's findings.
_CHECKS: dict[str, Callable[[History, Limits], str]] = {
    # Policy and critic.
    "collapsed": _check_collapse,
    "loss_scale": _check_loss_scale,
    "not_finite": _check_not_finite,
    "memory": _check_memory,
    "kl_high": _check_kl_high,
    "kl_low": _check_kl_low,
    "clip_high": _check_clip_high,
    "clip_low": _check_clip_low,
    "ratio": _check_ratio,
    "sampler": _check_sampler_mismatch,
    "reward_same": _check_reward_same,
    "entropy": _check_entropy,
    "critic": _check_critic,
    "grad_norm": _make_grad_spike_check("grad_norm", "--lr"),
    "critic_grad_norm": _make_grad_spike_check("critic_grad_norm", "--critic_lr"),
    # Responses and scores.
    "too_long": _check_cut_off,
    "never_answers": _check_unclosed_thoughts,
    "tool_errors": _check_tool_errors,
    "cut_episodes": _check_cut_episodes,
    "fewer_pieces": _check_pieces,
    "failed": _check_failed_scores,
    "hacking": find_hacking,
    # Judges.
    "judge_fooled": _check_canary,
    "judge_unread": _check_unread_replies,
    "judge_changed": _check_judge_changed,
    "monitor_silent": _check_monitor,
    # Mixtures and rubrics.
    "part_dominated": _check_dominated_part,
    "part_fails": _check_failing_part,
    "criterion_stuck": _check_stuck_criterion,
    "criterion_against": _check_opposed_criterion,
    "criterion_lost": _check_lost_criterion,
    "held_out": _check_held_out,
    # Reward models.
    "prompts_cut": _check_cut_prompts,
}
