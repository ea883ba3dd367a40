"""What the health checks and the alarm about exploits need to know of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ppo_cli.config.mixture import Watched
from ppo_cli.report.drift import Opinion


@dataclass(frozen=True)
class Limits:
    """The ranges of a healthy run, and the settings on which the advice depends."""

    # Usual ranges in PPO on language models: (lowest, highest) healthy value.
    kl: tuple[float, float] = (0.001, 0.1)  # without what a rising reward allows: adapt_kl
    extreme_kl: float = 1.0  # too far for any reward
    clip_fraction: tuple[float, float] = (0.1, 0.3)
    ppo_ratio: tuple[float, float] = (0.8, 1.2)
    entropy_share: float = 0.1
    truncated_share: float = 0.5
    critic_steps: int = 20  # after which a critic should explain something
    tool_error_share: float = 0.25  # of the turns
    spike: float = 10.0
    grad_clip: float = 1.0
    updates_per_step: int = 4
    max_response_length: int = 512
    has_episodes: bool = False  # responses are episodes of several turns
    warmup_steps: int = 0
    kl_setting: str = "--kl_coef"
    logprob_diff: float = 1e-3
    async_steps: int = 0
    # For messages.
    reward_advice: str = "check --reward_function or --rule"
    run_dir: str = "outputs"  # quoted for a shell
    saved: tuple[int, ...] = ()  # steps with a checkpoint
    lr: float = 1e-6
    # Scored by a judge, a model or the user's function, and not only by built-in rules.
    can_be_gamed: bool = True
    has_judge: bool = True
    total_steps: int | None = None  # of the whole run; None: not known
    folder: Path | None = None  # with the rollouts, for causes and examples
    watched: Watched | None = None  # a part of the mixture, and a rule that is a second opinion
    people: tuple[Opinion, ...] = ()  # labels given in the page
    holds_out: bool = False  # a judge has criteria that training does not ask about
