"""Settings of the reward: rules, functions, reward models, judges and their mixtures."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ppo_cli.config.fields import Section, section, setting


class Monitor(Section):
    """A second judge that is only compared with the first; it rewards nothing."""

    type: Literal["dashscope", "openai", "gemini", "claude"] = setting(
        "openai", "Provider of the monitoring judge.", flag="--rm_monitor_type"
    )
    model: str | None = setting(
        None, "Model of a second judge that only monitors.", flag="--rm_monitor_model"
    )
    base_url: str | None = setting(
        None, "Endpoint of the monitoring judge.", flag="--rm_monitor_base_url"
    )
    key_env: str | None = setting(None, "Variable that holds the monitoring judge's key.")
    share: float = setting(
        0.1, "Share of the responses that the second judge reads too.",
        flag="--rm_monitor_share", gt=0.0, le=1.0,
    )  # fmt: skip


class ApiReward(Section):
    """An LLM judge behind a provider's API."""

    enable: bool = setting(False, "Let an LLM judge score responses.", flag="--use_api_reward")
    type: Literal["dashscope", "openai", "gemini", "claude"] = setting(
        "dashscope", "Provider of the judge.", flag="--rm_api_type", env="RM_API_TYPE"
    )
    model: str | None = setting(
        None, "Model name at the provider, such as qwen-plus.", flag="--rm_model", env="RM_MODEL"
    )
    base_url: str | None = setting(
        None, "Endpoint to use instead of the provider's own.", flag="--rm_base_url",
        env="RM_BASE_URL",
    )  # fmt: skip
    key_env: str | None = setting(
        None, "Variable that holds the key, if not the provider's usual one.",
        flag="--rm_key_env",
    )  # fmt: skip
    prompt_preset: Literal["math", "code", "dialogue", "safety"] = setting(
        "dialogue", "Bundled judge prompt.", flag="--rm_prompt_preset", env="RM_PROMPT_PRESET"
    )
    prompt_file: str | None = setting(
        None, "Judge prompt of your own: a YAML file like those in reward_prompts/.",
        flag="--rm_prompt_file",
    )  # fmt: skip
    system_prompt: str | None = setting(
        None, "Own system prompt of the judge.", flag="--rm_system_prompt"
    )
    scoring_prompt: str | None = setting(
        None, "Own scoring prompt: {prompt}, {response}, {ground_truth}, {extra_info.*}.",
        flag="--rm_scoring_prompt",
    )  # fmt: skip
    scale: str | None = setting(
        None, "Lowest and highest score, LOW-HIGH; unset, what the prompt says, else 1-10.",
        flag="--rm_scale",
    )  # fmt: skip
    mode: Literal["text", "decision"] = setting(
        "text", "Read a written verdict, or ask a decision endpoint for probabilities.",
        flag="--rm_mode",
    )  # fmt: skip
    reasoning: Literal["strip", "keep"] = setting(
        "strip", "Reasoning blocks of a response: strip or keep them.", flag="--rm_reasoning"
    )
    max_response_chars: int = setting(
        24_000, "Longer responses are cut in the middle, and the judge is told.",
        flag="--rm_max_response_chars", ge=200,
    )  # fmt: skip
    gate: bool = setting(
        True, "Give responses without content the lowest score, without a call.", flag="--rm_gate"
    )
    temperature: float | None = setting(
        None, "Sampling temperature of the judge; unset: 0, or 0.7 with several votes.",
        flag="--rm_temperature", ge=0.0, le=2.0,
    )  # fmt: skip
    max_tokens: int = setting(
        1024, "Most tokens of a judge's answer.", flag="--rm_max_tokens", ge=1
    )
    votes: int = setting(1, "Independent verdicts a response.", flag="--rm_votes", ge=1, le=64)
    timeout: float = setting(60.0, "Seconds that one call may take.", flag="--rm_timeout", gt=0.0)
    deadline: float | None = setting(
        None, "Seconds that one verdict may take, retries included; unset: 3 x timeout.",
        flag="--rm_deadline", gt=0.0,
    )  # fmt: skip
    concurrency: int = setting(32, "Most calls under way at once.", flag="--rm_concurrency", ge=1)
    max_rpm: int | None = setting(None, "Requests a minute, whole job.", flag="--rm_max_rpm", ge=1)
    max_tpm: int | None = setting(None, "Tokens a minute, whole job.", flag="--rm_max_tpm", ge=1)
    hedge_after: float | None = setting(
        None, "Seconds after which a slow call is asked a second time; unset: never.",
        flag="--rm_hedge_after", gt=0.0,
    )  # fmt: skip
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
    cache: str | None = setting(
        None, "File of the verdict cache, or `off`; unset: one for all runs of this user.",
        flag="--rm_cache", env="RM_CACHE",
    )  # fmt: skip
    budget_usd: float | None = setting(
        None, "Most to spend, in US dollars.", flag="--rm_budget_usd", gt=0.0
    )
    budget_tokens: int | None = setting(
        None, "Most judge tokens to use.", flag="--rm_budget_tokens", ge=1
    )
    prices: str | None = setting(
        None, "YAML file with prices of your own.", flag="--rm_prices", env="RM_PRICES"
    )
    price_input: float | None = setting(
        None, "US dollars for a million input tokens.", flag="--rm_price_input", ge=0.0
    )
    price_output: float | None = setting(
        None, "US dollars for a million output tokens.", flag="--rm_price_output", ge=0.0
    )
    canary_every: int = setting(
        50, "Steps between two tests of the judge with worthless replies; 0: never.",
        flag="--rm_canary_every", ge=0,
    )  # fmt: skip
    monitor: Monitor = section(Monitor)


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
        None, "YAML file that sets up the judge, or another reward.", flag="--reward_config"
    )
    api: ApiReward = section(ApiReward)
    model: ModelReward = section(ModelReward)
