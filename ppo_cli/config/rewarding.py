"""Settings of the reward: rules, functions, reward models, judges and their mixtures."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ppo_cli.config.fields import Section, section, setting


class ApiReward(Section):
    """An LLM judge behind a provider's API."""

    enable: bool = setting(False, "Let an LLM judge score responses.", flag="--use_api_reward")
    type: Literal["dashscope", "openai", "gemini", "claude"] = setting(
        "dashscope", "Provider of the judge.", flag="--rm_api_type", env="RM_API_TYPE"
    )
    model: str | None = setting(
        None, "Model name at the provider.", flag="--rm_model", env="RM_MODEL"
    )
    prompt_preset: Literal["math", "code", "dialogue", "safety"] = setting(
        "dialogue", "Bundled judge prompt.", flag="--rm_prompt_preset"
    )
    system_prompt: str | None = setting(
        None, "Own system prompt of the judge.", flag="--rm_system_prompt"
    )
    scoring_prompt: str | None = setting(
        None, "Own scoring prompt: {prompt}, {response}, {ground_truth}.",
        flag="--rm_scoring_prompt",
    )  # fmt: skip
    base_url: str | None = setting(
        None, "Endpoint to use instead of the provider's own.", flag="--rm_base_url"
    )
    timeout: float = setting(60.0, "Seconds that one call may take.", flag="--rm_timeout", gt=0.0)
    concurrency: int = setting(32, "Most calls under way at once.", flag="--rm_concurrency", ge=1)
    max_rpm: int | None = setting(None, "Requests a minute, whole job.", flag="--rm_max_rpm", ge=1)
    max_tpm: int | None = setting(None, "Tokens a minute, whole job.", flag="--rm_max_tpm", ge=1)
    votes: int = setting(1, "Independent verdicts a response.", flag="--rm_votes", ge=1, le=64)
    on_failure: Literal["mask", "batch_mean", "stop"] = setting(
        "mask", "What becomes of a response without a verdict.", flag="--rm_on_failure"
    )
    max_failure_rate: float = setting(
        0.2, "Share of failed verdicts in a step above which the run pauses.",
        flag="--rm_max_failure_rate", ge=0.0, le=1.0,
    )  # fmt: skip
    outage_wait: float = setting(
        1800.0, "Seconds to wait for a judge that is down.", flag="--rm_outage_wait", ge=0.0
    )
    budget_usd: float | None = setting(
        None, "Most to spend, in US dollars.", flag="--rm_budget_usd", gt=0.0
    )
    budget_tokens: int | None = setting(
        None, "Most judge tokens to use.", flag="--rm_budget_tokens", ge=1
    )


class ModelReward(Section):
    """A local or served reward model."""

    path: str | None = setting(
        None, "Reward model: folder, hub name or URL.", flag="--reward_model",
        env="REWARD_MODEL_PATH",
    )  # fmt: skip


class Reward(Section):
    """Where scores come from; unset, rules chosen by each row's data_source."""

    function: str | None = setting(
        None, "Python file with compute_score: FILE[:NAME].", flag="--reward_function",
        env="REWARD_FUNCTION",
    )  # fmt: skip
    function_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments handed to the reward function."
    )
    rule: str | None = setting(
        None, "Built-in rule for every row, whatever its data_source.", flag="--rule"
    )
    timeout: float = setting(10.0, "Seconds that a rule or function may take for one row.", gt=0.0)
    num_workers: int = setting(2, "Processes that run slow rules and functions.", ge=1)
    parts: tuple[str, ...] = setting(
        (), "Mixture KIND[:NAME]:WEIGHT, repeatable (judge, model, rule).", flag="--reward"
    )
    config_file: str | None = setting(
        None, "YAML file with the reward's settings.", flag="--reward_config"
    )
    api: ApiReward = section(ApiReward)
    model: ModelReward = section(ModelReward)
