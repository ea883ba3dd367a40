"""Settings of the algorithm and of the trained models, and how a setting is declared.

The names are verl's without the wrapper. A declaration has every fact about a setting: default,
range, help, flag, variable, whether a change makes another run, and when it has no effect. A
section declares what does not fit together (`Conflict`). The command line, the plan, the checks and
the reference page read it from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from ppo_cli.addresses import refuse_address
from ppo_cli.algo.estimators import ESTIMATORS, POLICY_LOSSES, AggregationMode, KlKind
from ppo_cli.config.choices import (
    DEFAULT_PRETRAIN_STEPS,
    choose_aggregation,
    choose_bypass,
    choose_critic_lam,
    choose_estimator,
    choose_gamma_piece,
    choose_importance_weights,
    choose_kl_in_loss,
    choose_kl_in_reward,
    choose_lam,
    choose_pretrain_steps,
)
from ppo_cli.config.schema.unset import Chosen, Fitted, Follows, Rule
from ppo_cli.plugins import Names

# How far a value is fixed. checkpoint: a checkpoint loads with no other value. run: another value
# makes another run. eval: it makes another eval, though a run may continue (an address: the judge
# may move, but rows of two judges are never mixed). start: each start may choose (speed, placement,
# logs, cadence, spending, length).
Identity = Literal["checkpoint", "run", "eval", "start"]


@dataclass(frozen=True)
class Conflict:
    """Settings that do not fit together; a row in the section that has all of them.

    `keys` are their names below the section. `applies` takes the section. `text` takes the section
    and its own name with a dot (`actor.`), and says what is wrong and what to do. `example` and
    `advice` are overrides below the section: an example, and what ends the conflict.
    """

    keys: str
    applies: Callable[[Any], bool]
    text: Callable[[Any, str], str]
    example: str
    advice: str


class Section(BaseModel):
    """A frozen group of settings; unknown keys are refused."""

    # Of settings in this section that do not declare theirs.
    identity: ClassVar[Identity] = "run"
    # Of this class; those of its bases hold as well.
    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def setting(
    default: Any,
    help_text: str,
    *,
    absent: str | None = None,
    flag: str | None = None,
    env: str | None = None,
    usual: tuple[float, float] | None = None,
    identity: Identity | None = None,
    files: bool = False,
    consent: bool = False,
    unused: str | None = None,
    common: bool = False,
    advice: str | None = None,
    **limits: Any,
) -> Any:
    """Declare a setting; `limits` are pydantic's (ge, gt, le, lt, min_length …).

    A rule as `default` says how an unset value is found; its words are part of the help, as those
    of `absent` are, which say what no value means: null is a value, and nothing decides it.
    `flag` is spelt with underscores (`--batch_size`); the dashed spelling comes for free.
    A value outside the `usual` range gets a remark. `identity` defaults to that of the section. A
    list of `files` keeps the commas in names of files that exist. A `consent` is never taken from a
    run folder: people give it again. `unused` names the condition of planning/findings/unused.py
    under which it has no effect; "" means that conditions of its section do not apply to it.
    `common` puts it on the first screen of `--help`. `advice` says when to change it, for `ppo
    explain`.
    """
    rule = default if isinstance(default, Rule) else None
    if rule is not None:
        default, help_text = None, f"{help_text} Unset: {rule.words}."
    if absent is not None:
        help_text = f"{help_text} {'Unset' if default is None else 'null'}: {absent}."
    # Facts for other modules, stored with the field; unset ones are left out.
    facts = {
        "absent": absent, "flag": flag, "env": env, "usual": usual, "identity": identity,
        "files": files or None, "consent": consent or None, "unused": unused,
        "common": common or None, "advice": advice,
    }  # fmt: skip
    extra: Any = {name: fact for name, fact in facts.items() if fact is not None}
    field: Any = Field(default, description=help_text, json_schema_extra=extra or None, **limits)
    if rule is not None:
        field.metadata.append(rule)
    return field


def section(kind: type[Section], *, unused: str | None = None) -> Any:
    """Declare a nested section with its own defaults; `unused` applies to all settings in it."""
    extra: Any = {"unused": unused} if unused else None
    # The first line of the class is the help text of its section.
    summary = (kind.__doc__ or "").splitlines()[0]
    return Field(default_factory=kind, description=summary, json_schema_extra=extra)


def checked(check: Callable[[Any], object]) -> AfterValidator:
    """Return a validator that refuses a value for which `check` raises a ValueError."""

    def refuse(value: Any) -> Any:
        if value is not None:
            check(value)
        return value

    return AfterValidator(refuse)


# A file or folder of this machine.
LocalPath = Annotated[str | None, checked(refuse_address)]


def check_not_zero(number: int) -> None:
    """Refuse 0 where -1 means never or all."""
    if number == 0:
        raise ValueError("0 means nothing; use -1 or 1 and up")


NotZero = Annotated[int, checked(check_not_zero)]


# With a decay of 1 the moments would never change.
def _check_betas(betas: tuple[float, float]) -> None:
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(
            f"must each be at least 0 and below 1, but are {betas[0]:g} and {betas[1]:g}"
        )


_ESTIMATORS = Names(ESTIMATORS, "estimators", files=True)
_LOSSES = Names(POLICY_LOSSES, "losses", files=True)
EstimatorName = Annotated[
    str, _ESTIMATORS, checked(_ESTIMATORS.read), WithJsonSchema(_ESTIMATORS.schema)
]
LossName = Annotated[str, _LOSSES, checked(_LOSSES.read), WithJsonSchema(_LOSSES.schema)]


class Optim(Section):
    """AdamW and its schedule."""

    optimizer: Literal["AdamW", "AdamW8bit"] = setting(
        "AdamW", "Optimizer: AdamW, or AdamW8bit with moments in 8 bits (needs bitsandbytes)."
    )
    lr: float = setting(1e-6, "Peak learning rate.", ge=0.0, le=1.0)
    lr_warmup_steps: int = setting(-1, "Steps of linear warm-up; -1 uses the ratio.", ge=-1)
    lr_warmup_steps_ratio: float = setting(0.0, "Warm-up as a share of all steps.", ge=0.0, le=1.0)
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = setting(
        "constant", "Schedule after the warm-up."
    )
    min_lr_ratio: float = setting(
        0.0, "Final learning rate of cosine and linear, as a share of lr.", ge=0.0, le=1.0
    )
    weight_decay: float = setting(0.01, "Decoupled weight decay.", ge=0.0, le=1.0)
    betas: Annotated[tuple[float, float], checked(_check_betas)] = setting(
        (0.9, 0.999), "AdamW's moment decays."
    )
    eps: float = setting(1e-8, "AdamW's epsilon.", gt=0.0, le=1e-2)
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "min_lr_ratio lr_scheduler_type",
            lambda s: s.lr_scheduler_type == "constant" and s.min_lr_ratio > 0,
            lambda s, at: (
                f"{at}min_lr_ratio is where cosine and linear end; use it with "
                f"{at}lr_scheduler_type=cosine."
            ),
            example="min_lr_ratio=0.1",
            advice="lr_scheduler_type=cosine",
        ),
    )


class ActorOptim(Optim):
    """AdamW of the actor and its schedule."""

    lr: float = setting(
        1e-6, "Peak learning rate of the actor.", flag="--lr", env="PPO_LR", usual=(1e-8, 1e-3),
        ge=0.0, le=1.0, common=True,
        advice="Divide by 3 if KL or clip fraction is above its range, or the reward falls. "
        "Multiply by 3 if KL stays below 0.001 and the reward does not rise. Start with "
        "1e-6, or 1e-5 with LoRA.",
    )  # fmt: skip


class CriticOptim(Optim):
    """AdamW of the critic and its schedule."""

    lr: float = setting(
        1e-5, "Learning rate of the critic.", flag="--critic_lr", env="CRITIC_LR",
        usual=(1e-8, 1e-2), ge=0.0, le=1.0, common=True,
        advice="Raise it if explained variance stays below 0; lower it if the value loss "
        "jumps. About 10 times --lr.",
    )  # fmt: skip


class Sharding(Section):
    """How a model is spread over devices (FSDP2)."""

    identity: ClassVar[Identity] = "start"
    fsdp_size: NotZero = setting(
        -1, "Devices per sharding group; -1 is all of them.", ge=-1, unused="nothing_sharded"
    )
    param_offload: bool = setting(
        False, "Keep parameters in host memory between uses.", unused="nothing_to_offload"
    )
    optimizer_offload: bool = setting(
        False, "Keep optimizer state in host memory between steps.", unused="nothing_to_offload"
    )
    reshard_after_forward: bool = setting(
        Fitted(
            "once per step if memory allows, on GPUs only if the self-test has proven it "
            "(keep_gathered)"
        ),
        "Free gathered parameters after each pass and reduce gradients after each micro-batch; "
        "false: once per step.", unused="nothing_sharded",
    )  # fmt: skip

    @property
    def stays_whole(self) -> bool:
        """Whether weights stay gathered through a step."""
        return self.reshard_after_forward is False


TOKEN_BUDGET_RULE = (
    "2048 on the CPU for one rank, or if weights stay gathered through a step, else 16384"
)


class Trained(Section):
    """Settings that actor and critic share."""

    strategy: Literal["fsdp2", "fsdp", "megatron"] = setting(
        "fsdp2", "Sharding back end.", identity="start"
    )
    # Size of a micro-batch: sequences, or a token budget.
    ppo_micro_batch_size_per_gpu: int | None = setting(
        None, "Sequences per micro-batch.", absent="the token budget decides", ge=1,
        identity="start",
    )  # fmt: skip
    ppo_max_token_len_per_gpu: int = setting(
        Fitted(TOKEN_BUDGET_RULE), "Token budget of a micro-batch, prompts and responses.", ge=16,
        identity="start",
    )  # fmt: skip
    # Rows, gradients and the aggregation of the loss.
    shuffle: bool = setting(True, "Shuffle the rows before each pass over the batch.")
    grad_clip: float = setting(1.0, "Maximum gradient norm; 0 turns clipping off.", ge=0.0)
    clip_grad_value: float | None = setting(
        None, "Maximum size of each gradient element.", absent="no limit", gt=0.0,
    )  # fmt: skip
    loss_agg_mode: AggregationMode = setting(
        "token-mean", "How the losses of tokens are averaged into one number."
    )
    loss_scale_factor: float = setting(
        Follows("data.max_response_length"),
        "Divisor of seq-mean-token-sum-norm.",
        gt=0.0,
        unused="no_scale_factor",
    )
    fsdp_config: Sharding = section(Sharding)


class PolicyLoss(Section):
    """Which policy loss, and parameters of some of them."""

    loss_mode: LossName = setting(
        "vanilla", "Policy loss; vanilla is PPO's clipped surrogate.", flag="--policy_loss"
    )
    # clip_cov and kl_cov: the tokens that they take, and their penalty.
    clip_cov_ratio: float = setting(
        0.0002, "Share of tokens that clip_cov removes from the loss.", gt=0.0, le=1.0,
        unused="not_clip_cov",
    )  # fmt: skip
    clip_cov_lb: float = setting(
        1.0, "Lowest covariance of a token that clip_cov may remove.", unused="not_clip_cov"
    )
    clip_cov_ub: float = setting(
        5.0, "Highest covariance of a token that clip_cov may remove.", unused="not_clip_cov"
    )
    kl_cov_ratio: float = setting(
        0.0002, "Share of tokens to which kl_cov adds a KL penalty.", gt=0.0, le=1.0,
        unused="not_kl_cov",
    )  # fmt: skip
    ppo_kl_coef: float = setting(0.1, "Weight of kl_cov's penalty.", ge=0.0, unused="not_kl_cov")
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "clip_cov_lb clip_cov_ub",
            lambda s: s.clip_cov_lb >= s.clip_cov_ub,
            lambda s, at: (
                f"{at}clip_cov_lb {s.clip_cov_lb:g} must be below clip_cov_ub {s.clip_cov_ub:g}."
            ),
            example="clip_cov_lb=5",
            advice="clip_cov_ub=6",
        ),
    )


class Actor(Trained):
    """The policy and its update."""

    optim: ActorOptim = section(ActorOptim)
    loss_agg_mode: AggregationMode = setting(
        Chosen(
            choose_aggregation, "seq-mean-token-mean with the policy loss gspo, else token-mean"
        ),
        "How the losses of tokens are averaged into one number.",
    )
    ppo_mini_batch_size: int = setting(
        64, "Prompts per optimizer step.", flag="--mini_batch_size", env="PPO_MINI_BATCH_SIZE",
        ge=1, common=True,
        advice="Raise it if clip fraction is high; lower it if learning is slow. A quarter of "
        "--batch_size is usual.",
    )  # fmt: skip
    ppo_epochs: int = setting(
        1, "Passes over the responses of a step, actor.", flag="--ppo_epochs", env="PPO_EPOCHS",
        ge=1, common=True,
        advice="Lower it if clip fraction is above 0.3 or the ratio leaves 0.8 to 1.2. More "
        "than 2 is rarely stable; raise --lr first.",
    )  # fmt: skip
    # The clipped surrogate (arXiv 1707.06347); clip-higher is DAPO's (arXiv 2503.14476).
    clip_ratio: float = setting(
        0.2, "Clip range of the probability ratio.", flag="--clip_ratio", env="CLIP_RATIO",
        usual=(0.05, 0.5), gt=0.0, lt=1.0, unused="no_clip", common=True,
        advice="Lower it (0.1) if KL jumps between steps; raise it if clip fraction is high "
        "while KL stays small. Change --lr first.",
    )  # fmt: skip
    clip_ratio_low: float = setting(
        Follows("actor.clip_ratio"), "Lower clip range.", usual=(0.05, 0.5), gt=0.0,
        unused="no_clip", advice="Rarely changed; see actor.clip_ratio.",
    )  # fmt: skip
    clip_ratio_high: float = setting(
        Follows("actor.clip_ratio"), "Upper clip range (clip-higher).", usual=(0.05, 0.5), gt=0.0,
        unused="no_clip",
        advice="Raise it to 0.28 if the entropy falls early, so that rare tokens can grow.",
    )  # fmt: skip
    clip_ratio_c: float | None = setting(
        3.0, "Dual-clip bound of the ratio for negative advantages, or maximum ratio of dppo_tv "
        "and dppo_kl.", absent="off", gt=1.0, unused="no_dual_clip",
    )  # fmt: skip
    policy_loss: PolicyLoss = section(PolicyLoss)
    # SAPO's gate (arXiv 2511.20347) is narrower for a larger number.
    tau_pos: float = setting(
        1.0, "sapo: steepness of the gate for positive advantages.", gt=0.0, unused="not_sapo"
    )
    tau_neg: float = setting(
        1.05, "sapo: steepness of the gate for other advantages.", gt=0.0, unused="not_sapo"
    )
    # VAPO's likelihood term (arXiv 2504.05118).
    positive_nll_coef: float = setting(
        0.0, "Weight of the negative log-likelihood of right answers.", usual=(0.0, 0.5), ge=0.0
    )
    positive_score: float = setting(
        1.0, "Lowest score of a right answer, after penalties and scaling.",
        unused="no_positive_nll",
    )  # fmt: skip
    entropy_coeff: float = setting(
        0.0, "Weight of the entropy bonus in the loss.", usual=(0.0, 0.1), ge=0.0,
        advice="Raise it to 0.001 to 0.01 if the entropy collapses; lower it if responses "
        "become noise.",
    )  # fmt: skip
    # KL to the reference, in the loss.
    use_kl_loss: bool = setting(
        Chosen(
            choose_kl_in_loss,
            "false with gae or remax, or if algorithm.use_kl_in_reward is set, else true",
        ),
        "Add the KL to the reference model to the actor loss.",
    )  # fmt: skip
    kl_loss_coef: float = setting(
        Follows("algorithm.kl_ctrl.kl_coef"), "Weight of the KL in the actor loss.",
        usual=(0.0, 0.5), ge=0.0, unused="no_kl_loss",
        advice="Raise it if KL is above its range; lower it if reward and KL both stay flat.",
    )  # fmt: skip
    kl_loss_type: KlKind = setting(
        "low_var_kl", "Estimator of the KL in the loss.", unused="no_kl_loss"
    )
    target_kl: float | None = setting(
        None, "Stop the passes of a step when the KL to the old policy exceeds 1.5 times this.",
        absent="all passes", gt=0.0,
    )  # fmt: skip

    # Losses that clip weights, means or divergences have no such order. A dual clip bounds negative
    # advantages, so it is above the clip range (arXiv 1912.09729).
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "clip_ratio_low",
            lambda s: s.clip_ratio_low >= 1 and POLICY_LOSSES[s.policy_loss.loss_mode].around_one,
            lambda s, at: (
                f"the lower clip range {s.clip_ratio_low:g} must be below 1, such as "
                f"{at}clip_ratio_low=0.2."
            ),
            example="clip_ratio_low=1",
            advice="clip_ratio_low=0.2",
        ),
        Conflict(
            "clip_ratio_low clip_ratio_high clip_ratio",
            lambda s: (
                s.clip_ratio_high < s.clip_ratio_low < 1
                and POLICY_LOSSES[s.policy_loss.loss_mode].around_one
            ),
            lambda s, at: (
                f"the lower clip range {s.clip_ratio_low:g} is above the upper one "
                f"{s.clip_ratio_high:g}; "
                f"swap {at}clip_ratio_low and {at}clip_ratio_high."
            ),
            example="clip_ratio_low=0.3 clip_ratio_high=0.2",
            advice="clip_ratio_low=0.2 clip_ratio_high=0.3",
        ),
        Conflict(
            "clip_ratio_c clip_ratio_high clip_ratio",
            lambda s: (
                POLICY_LOSSES[s.policy_loss.loss_mode].dual
                and s.clip_ratio_c is not None
                and s.clip_ratio_high + 1 >= s.clip_ratio_c
            ),
            lambda s, at: (
                f"the dual-clip bound {at}clip_ratio_c {s.clip_ratio_c:g} is inside the clip range "
                f"(1 + {s.clip_ratio_high:g}); use {at}clip_ratio_c={s.clip_ratio_high + 2:g}, "
                "or a smaller range."
            ),
            example="clip_ratio_high=2",
            advice="clip_ratio_c=4",
        ),
    )


class CriticModel(Section):
    """Which backbone the critic starts from."""

    path: Annotated[str, checked(refuse_address)] = setting(
        Follows("model.path"), "Model that the critic starts from; of a reward model with its "
        "head, if that is one number.", flag="--critic_model", env="PPO_CRITIC_MODEL_PATH",
        identity="checkpoint",
    )  # fmt: skip
    enable_gradient_checkpointing: bool = setting(
        Fitted("as model.enable_gradient_checkpointing"),
        "Recompute the critic's activations in the backward pass.", identity="start",
    )  # fmt: skip
    lora_rank: int = setting(
        0, "Rank of the critic's LoRA adapter, trained with the value head; 0 trains all weights.",
        ge=0, identity="checkpoint",
    )  # fmt: skip
    lora_alpha: float = setting(
        16.0, "The scale of the critic's LoRA adapter is alpha / rank.", gt=0,
        unused="no_critic_lora",
    )  # fmt: skip
    target_modules: str | tuple[str, ...] = setting(
        "all-linear", "Modules of the critic that LoRA adapts: all-linear, names, or a pattern.",
        identity="checkpoint", unused="no_critic_lora",
    )  # fmt: skip
    quantization: Literal["nf4"] | None = setting(
        None, "Store the critic's linear layers under its adapter in 4 bits.",
        absent="not in 4 bits", identity="checkpoint",
    )  # fmt: skip
    # SAO (arXiv 2607.07508), section 4.
    freeze_attention: bool = setting(
        False, "Train only MLPs, experts, norms and value head of the critic: attention and "
        "embeddings stay as loaded.", identity="checkpoint",
        advice="True for a large critic that learns too fast from few responses; it also saves "
        "gradients and moments.",
    )  # fmt: skip
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "freeze_attention lora_rank",
            lambda s: s.freeze_attention and s.lora_rank > 0,
            lambda s, at: (
                f"{at}freeze_attention is for a critic that trains its own weights; with "
                f"{at}lora_rank {s.lora_rank} leave it out, and name the modules of the MLPs in "
                f"{at}target_modules."
            ),
            example="freeze_attention=true lora_rank=4",
            advice="lora_rank=0",
        ),
    )


class Critic(Trained):
    """The value model and its update."""

    model: CriticModel = section(CriticModel)
    optim: CriticOptim = section(CriticOptim)
    ppo_mini_batch_size: int = setting(
        Follows("actor.ppo_mini_batch_size"), "Prompts per optimizer step of the critic.", ge=1
    )
    ppo_epochs: int = setting(
        1, "Passes over the responses of a step, critic.", flag="--critic_epochs",
        env="CRITIC_EPOCHS", ge=1, advice="Raise it to 2 to 4 if explained variance stays below 0.",
    )  # fmt: skip
    cliprange_value: float | None = setting(
        0.5, "Clip range of the value loss.", absent="no clipping", flag="--cliprange_value",
        env="CLIPRANGE_VALUE", gt=0.0,
    )  # fmt: skip
    value_loss_coef: float = setting(1.0, "Weight of the value loss.", gt=0.0)
    # Decoupled GAE (arXiv 2503.01491).
    lam: float = setting(
        Chosen(choose_critic_lam, "as algorithm.lam where that is set, else 1"),
        "Lambda of GAE for the critic's targets.", flag="--critic_lam",
        usual=(0.8, 1.0), ge=0.0, le=1.0,
        advice="Keep 1, the rewards themselves, unless they are very noisy: below 1 the targets "
        "have the critic's own errors.",
    )  # fmt: skip
    # Value pretraining (arXiv 2503.01491, section 3.2; 50 steps are those of arXiv 2504.05118).
    pretrain_steps: int = setting(
        Chosen(
            choose_pretrain_steps,
            f"none, or at most {DEFAULT_PRETRAIN_STEPS} with pretrain_until",
        ),
        "Steps before the first one that train only the critic, on the returns of the frozen "
        "policy.", flag="--critic_pretrain_steps", ge=0,
        advice="Set 10 to 50 if explained variance starts below 0 and the reward falls in the "
        "first steps, or for long responses.",
    )  # fmt: skip
    pretrain_until: float | None = setting(
        None, "Explained variance of fresh responses at which pretraining ends before "
        "pretrain_steps.", absent="no target", flag="--critic_pretrain_until", gt=0.0, lt=1.0,
        advice="0.5, if the task can be explained that well; pretrain_steps is the limit.",
    )  # fmt: skip


class Ref(Section):
    """The frozen reference policy."""

    path: Annotated[str, checked(refuse_address)] = setting(
        Follows("model.path"), "Reference model, or the teacher of a distillation.",
        flag="--ref_model", unused="no_reference",
    )  # fmt: skip
    log_prob_max_token_len_per_gpu: int = setting(
        Fitted(TOKEN_BUDGET_RULE), "Token budget of a micro-batch for log-probs.", ge=16,
        identity="start",
    )  # fmt: skip
    param_offload: bool = setting(
        False, "Keep the reference in host memory between uses.", identity="start",
        unused="nothing_to_offload",
    )  # fmt: skip


class KlControl(Section):
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = setting(
        "fixed", "Keep kl_coef fixed, or adapt it towards target_kl.", unused="no_kl_in_reward"
    )
    # The controller multiplies the coefficient towards the target (arXiv 1909.08593).
    kl_coef: float = setting(
        0.001, "Weight of the KL to the reference model. It is in the reward or in the actor loss.",
        flag="--kl_coef", env="KL_COEF", usual=(0.0, 0.5), ge=0.0, unused="no_kl_coef", common=True,
        advice="Raise it (3 times) if KL is above its range or the reward is gamed; lower it "
        "if reward and KL both stay flat.",
    )  # fmt: skip
    horizon: int = setting(
        10000, "Sequences over which the adaptive controller corrects kl_coef.", ge=1,
        unused="kl_is_fixed",
    )  # fmt: skip
    target_kl: float = setting(
        0.1, "Target KL of the adaptive controller.", gt=0.0, unused="kl_is_fixed"
    )


# Level of the sum, and estimator of the divergence (algo/losses.py).
REJECTIONS: Final = (
    *(f"{level}_k{k}" for level in ("token", "seq_sum", "seq_mean") for k in (1, 2, 3)),
    "seq_max_k2",
    "seq_max_k3",
)


class RolloutCorrection(Section):
    """Importance weights and rejection for the mismatch between sampler and trainer."""

    # Which log-probs count as old, and weights for the mismatch.
    bypass_mode: bool = setting(
        Chosen(
            choose_bypass,
            "if the sampler computes with the actor's weights in float32 (one process, hf "
            "sampler), or with the policy loss dis",
        ),
        "Use the sampler's log-probs as old log-probs: the ratio of the loss is then to the "
        "sampler, also with older weights and in other processes.",
    )  # fmt: skip
    rollout_is: Literal["off", "token", "sequence"] = setting(
        Chosen(
            choose_importance_weights,
            "token with vLLM or with trainer.async_steps, unless bypass_mode or the policy loss "
            "dis takes the sampler's log-probs; else off",
        ),
        "Importance weights per token or per sequence.",
    )
    rollout_is_threshold: float = setting(
        2.0, "Upper bound of the importance weights.", gt=0.0, unused="no_importance_weights"
    )
    rollout_is_threshold_lower: float | None = setting(
        None, "Lower threshold: weights outside of both thresholds become 0 (IcePop).",
        absent="none", gt=0.0, unused="no_importance_weights",
    )  # fmt: skip
    rollout_is_batch_normalize: bool = setting(
        False, "Scale the importance weights to mean 1.", unused="no_importance_weights"
    )
    # Rejection: tokens or sequences whose mismatch is too large leave the loss.
    rollout_rs: str | None = setting(
        None, "Statistics by which tokens or sequences are removed from the loss, separated by "
        "commas: token_k1, token_k2, token_k3, seq_sum_ or seq_mean_ (k1 to k3), seq_max_ (k2, "
        "k3).", absent="nothing is removed",
    )  # fmt: skip
    rollout_rs_threshold: str | None = setting(
        None, "Maximum of each rollout_rs statistic, separated by commas, or one for all. For k1 "
        "a ratio, or two: 0.5_2.0.", absent="none",
    )  # fmt: skip
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "rollout_is_threshold_lower rollout_is_threshold",
            lambda s: (s.rollout_is_threshold_lower or 0.0) > s.rollout_is_threshold,
            lambda s, at: (
                f"{at}rollout_is_threshold_lower {s.rollout_is_threshold_lower:g} is above "
                f"{at}rollout_is_threshold {s.rollout_is_threshold:g}; swap them."
            ),
            example="rollout_is_threshold_lower=3",
            advice="rollout_is_threshold_lower=2 rollout_is_threshold=3",
        ),
    )

    def rejections(self) -> list[tuple[str, float | None, float]]:
        """Return name, lowest and highest value of each rejection; ValueError says what is wrong.

        Names and limits are two comma-separated lists: `token_k1,seq_mean_k3` and `0.5_2.0,0.1`. A
        k1 rejection bounds a ratio from both sides, others have a highest value.
        """
        # Two lists in one text each, as verl writes them.
        key = "algorithm.rollout_correction.rollout_rs"
        names = [word.strip() for word in (self.rollout_rs or "").split(",") if word.strip()]
        limits = [w.strip() for w in (self.rollout_rs_threshold or "").split(",") if w.strip()]
        if unknown := [name for name in names if name not in REJECTIONS]:
            raise ValueError(f"{key}: '{unknown[0]}' is not one of {', '.join(REJECTIONS)}.")
        if bool(names) != bool(limits):
            raise ValueError(f"{key} and {key}_threshold belong together; set both, or none.")
        # One limit for all names, or one for each.
        limits = limits * len(names) if len(limits) == 1 else limits
        if len(limits) != len(names):
            raise ValueError(f"{key}_threshold has {len(limits)} values for {len(names)} of {key}.")
        # Read each limit in the form that its name allows, and refuse the others with an example.
        limits_of: list[tuple[str, float | None, float]] = []
        for name, limit in zip(names, limits, strict=True):
            try:
                numbers = [float(word) for word in limit.split("_")]
            except ValueError:
                numbers = []
            # A pair of limits is for ratios (k1); one ratio r means 1/r to r.
            two = len(numbers) == 2 and name.endswith("k1") and numbers[0] <= numbers[1]
            if not (two or len(numbers) == 1) or min(numbers) <= 0:
                form = "0.5_2.0 or 2.0" if name.endswith("k1") else "one number, such as 0.1"
                raise ValueError(
                    f"{key}_threshold: '{limit}' is not a limit of {name}; write {form}."
                )
            low = numbers[0] if two else 1 / numbers[0] if name.endswith("k1") else None
            if low is not None and low > numbers[-1]:
                raise ValueError(f"{key}_threshold: {limit} must be 1 or more; or write 0.5_2.0.")
            limits_of.append((name, low, numbers[-1]))
        return limits_of


class FilterGroups(Section):
    """Dynamic sampling (DAPO): groups that differ in nothing are replaced."""

    enable: bool = setting(
        False, "Replace prompts whose responses all score alike, until the batch is full.",
        flag="--filter_groups",
    )  # fmt: skip
    metric: str | None = setting(
        None, "Value that must differ within a prompt: the score, seq_reward (with penalties), "
        "or a part of the reward, such as acc.", absent="the score", unused="no_filter_groups",
    )  # fmt: skip
    max_num_gen_batches: int = setting(
        0, "Maximum batches sampled per step; 0: one pass over the prompts.", ge=0,
        identity="start", unused="no_filter_groups",
    )  # fmt: skip


class Algorithm(Section):
    """From scores to advantages."""

    adv_estimator: EstimatorName = setting(
        Chosen(
            choose_estimator,
            "gae; with --rm_place an estimator for pieces: piece_group, piece_batch with one "
            "response a prompt, or piece_grpo for criteria",
        ),
        "Advantage estimator; only gae has a critic.", flag="--adv_estimator",
        env="PPO_ADV_ESTIMATOR", identity="checkpoint", common=True,
        advice="grpo (with --rollout_n 4 or more) needs no critic, so about half the memory; "
        "gae learns from single responses.",
    )  # fmt: skip
    # Discount, and GAE's lambda (arXiv 1506.02438).
    gamma: float = setting(
        1.0, "Discount per token.", flag="--gamma", env="GAE_GAMMA", usual=(0.9, 1.0), ge=0.0,
        le=1.0, unused="no_discount",
        advice="Keep 1: the score comes at the last token, and a lower value mostly shortens "
        "responses.",
    )  # fmt: skip
    lam: float = setting(
        Chosen(choose_lam, "0.95, for the advantages alone"),
        "Lambda of GAE, for the advantages and the critic's targets.", flag="--lam",
        env="GAE_LAMBDA", usual=(0.8, 1.0), ge=0.0, le=1.0, unused="no_lam",
        advice="Raise it towards 1 if explained variance is below 0 (trust rewards more than "
        "the critic); lower it to 0.9 if advantages are noisy.",
    )  # fmt: skip
    # Horizons in pieces: one in tokens ends within a piece of more than two or three.
    gamma_piece: float = setting(
        Chosen(choose_gamma_piece, "0.9 if a judge places rewards or pieces are compared, else 1"),
        "Discount per piece of a response with placed rewards, on top of that per token.",
        usual=(0.5, 1.0), ge=0.0, le=1.0, unused="no_pieces",
        advice="0 only where pieces do not depend on each other: with a short horizon an early "
        "piece that spoils later ones is still rewarded.",
    )  # fmt: skip
    lam_piece: float | None = setting(
        None, "Lambda of GAE per piece; it is 1 within one.", absent="lam counts tokens",
        ge=0.0, le=1.0, unused="no_critic",
    )  # fmt: skip
    lam_alpha: float | None = setting(
        None, "Lambda of the advantages by response length, 1 - 1 / (lam_alpha length), instead "
        "of lam.", absent="lam", flag="--lam_alpha", usual=(0.01, 1.0), gt=0.0, unused="no_critic",
    )  # fmt: skip
    subtract_group_mean: bool = setting(
        False, "Subtract the mean reward of a prompt's responses from each.", unused="no_critic"
    )
    whiten_advantages: bool = setting(
        True, "Normalize GAE advantages over the whole batch.", unused="no_critic"
    )
    # Group estimators: GRPO and GDPO.
    norm_adv_by_std_in_grpo: bool = setting(
        True, "Divide advantages by the standard deviation of the group (GRPO and GDPO).",
        unused="not_grpo",
    )  # fmt: skip
    gdpo_reward_keys: tuple[str, ...] = setting(
        (), "Names of the parts of the reward that gdpo normalizes separately."
    )
    gdpo_reward_weights: tuple[float, ...] = setting(
        (), "Weights of gdpo_reward_keys. Unset: 1 for each."
    )
    score_coef: float = setting(
        1.0, "Weight of the score in the reward, next to the KL; 0 learns only from the reference "
        "model (ref.path).", ge=0.0,
    )  # fmt: skip
    # KL to the reference, in the reward.
    use_kl_in_reward: bool = setting(
        Chosen(choose_kl_in_reward, "true with gae or remax and without a KL loss, else false"),
        "Subtract kl_coef times the KL from the rewards of tokens; where the responses of a prompt "
        "are compared, from the advantages, unscaled.",
    )  # fmt: skip
    kl_penalty: KlKind = setting(
        "kl", "Estimator of the KL penalty in the reward.", unused="no_kl_in_reward"
    )
    kl_ctrl: KlControl = section(KlControl)
    rollout_correction: RolloutCorrection = section(RolloutCorrection)
    filter_groups: FilterGroups = section(FilterGroups)

    # gdpo reads the parts of the reward, not their sum. The adaptive controller multiplies the
    # coefficient, so 0 stays 0.
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "gdpo_reward_keys gdpo_reward_weights",
            lambda s: (
                not ESTIMATORS[s.adv_estimator].parts
                and bool(s.gdpo_reward_keys or s.gdpo_reward_weights)
            ),
            lambda s, at: (
                f"parts of the reward are only read by gdpo, but the estimator is "
                f"{s.adv_estimator}; use --adv_estimator gdpo, or leave them out."
            ),
            example="gdpo_reward_keys=[a]",
            advice="adv_estimator=gdpo",
        ),
        Conflict(
            "adv_estimator",
            lambda s: ESTIMATORS[s.adv_estimator].parts and not s.gdpo_reward_keys,
            lambda s, at: (
                f"gdpo needs the names of the parts of the reward: {at}gdpo_reward_keys=[a,b], as "
                "a reward function returns them next to score, or the names of a mixture's parts."
            ),
            example="adv_estimator=gdpo",
            advice="gdpo_reward_keys=[a,b]",
        ),
        Conflict(
            "gdpo_reward_weights gdpo_reward_keys",
            lambda s: (
                ESTIMATORS[s.adv_estimator].parts
                and len(s.gdpo_reward_weights) not in (0, len(s.gdpo_reward_keys))
            ),
            lambda s, at: (
                f"{at}gdpo_reward_weights has {len(s.gdpo_reward_weights)} numbers for "
                f"{len(s.gdpo_reward_keys)} parts."
            ),
            example="adv_estimator=gdpo gdpo_reward_keys=[a,b] gdpo_reward_weights=[1]",
            advice="gdpo_reward_weights=[1,2]",
        ),
        Conflict(
            "score_coef adv_estimator",
            lambda s: ESTIMATORS[s.adv_estimator].parts and s.score_coef != 1.0,
            lambda s, at: (
                f"gdpo normalises the parts of the reward, so {at}score_coef {s.score_coef:g} "
                f"changes nothing; use {at}gdpo_reward_weights, or leave it out."
            ),
            example="adv_estimator=gdpo gdpo_reward_keys=[a] score_coef=2",
            advice="gdpo_reward_weights=[2] score_coef=1",
        ),
        Conflict(
            "lam_piece lam_alpha",
            lambda s: s.lam_piece is not None and s.lam_alpha is not None,
            lambda s, at: (
                f"{at}lam_piece and --lam_alpha both say what lambda counts; keep one of them."
            ),
            example="lam_piece=0.9 lam_alpha=0.1",
            advice="lam_alpha=null",
        ),
        Conflict(
            "filter_groups.metric use_kl_in_reward",
            lambda s: (
                s.filter_groups.enable
                and s.filter_groups.metric == "seq_final_reward"
                and s.use_kl_in_reward
            ),
            lambda s, at: (
                "with the KL in the reward every seq_final_reward differs: use "
                f"{at}filter_groups.metric=seq_reward."
            ),
            example="filter_groups.enable=true filter_groups.metric=seq_final_reward",
            advice="filter_groups.metric=seq_reward",
        ),
        Conflict(
            "kl_ctrl.kl_coef kl_ctrl.type",
            lambda s: (
                s.use_kl_in_reward and s.kl_ctrl.type == "adaptive" and s.kl_ctrl.kl_coef == 0
            ),
            lambda s, at: (
                "an adaptive KL coefficient that starts at 0 stays 0; use --kl_coef 0.001."
            ),
            example="kl_ctrl.type=adaptive kl_ctrl.kl_coef=0",
            advice="kl_ctrl.kl_coef=0.001",
        ),
    )
