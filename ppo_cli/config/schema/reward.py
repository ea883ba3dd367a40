"""Settings of the reward: rules, functions, reward models, judges and mixtures."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, WithJsonSchema

from ppo_cli.config.choices import (
    JUDGE_CONTEXT,
    choose_cache,
    choose_cascade_band,
    choose_cascade_spread,
    choose_deadline,
    choose_judge_context,
    choose_mixture,
    choose_output,
    choose_panel_least,
    choose_reward_device,
    choose_reward_dtype,
    choose_reward_length,
    choose_rubric_order,
    choose_sandbox,
    choose_scale,
    choose_temperature,
)
from ppo_cli.config.models.known_models import HEADS, JUDGES, SERVED
from ppo_cli.config.schema.algorithm import (
    Conflict,
    Identity,
    LocalPath,
    Section,
    checked,
    section,
    setting,
)
from ppo_cli.config.schema.unset import Chosen, Follows
from ppo_cli.errors import did_you_mean
from ppo_cli.plugins import Names
from ppo_cli.secrets.redact import redact, redact_url

# Choices come from the table of adapters; type checkers see plain text.
if TYPE_CHECKING:
    Adapter = str
else:
    Adapter = Literal[(*HEADS, *SERVED)]
_PROVIDERS = Names(JUDGES, "providers")
JudgeType = Annotated[str, _PROVIDERS, checked(_PROVIDERS.read), WithJsonSchema(_PROVIDERS.schema)]


# Blanks and control characters, which urlsplit drops without an error.
_NOT_IN_URL = re.compile(r"[\s\x00-\x1f\x7f\\<>\"^`{|}]")
# `1-10`, `1 to 10`, `0..5`: two integers and a separator.
_SCALE = re.compile(r"\s*(-?\d{1,6})\s*(?:-|–|—|~|:|to|\.\.\.?)\s*(-?\d{1,6})\s*")
# `0.2-0.8`: two numbers without a sign.
_BAND = re.compile(r"\s*(\d*\.?\d+)\s*(?:-|–|to)\s*(\d*\.?\d+)\s*")
# Every level is named to the judge; more than this is a slip of the keyboard.
_MOST_LEVELS = 1001
# What responses are compared with, other than a column of the row.
COMPARED = ("pairs", "list", "base", "ground_truth")
# Text of the row, such as extra_info.reference; and devices as torch names them.
_OF_ROW = re.compile(r"extra_info(\.[\w-]{1,80})+")
DEVICE = re.compile(r"cpu|cuda(?::(\d+))?")


def check_address(url: str) -> None:
    """Raise ValueError for a malformed address: blanks, no host, a colon without a port."""
    try:
        # Scheme, host, and a port if there is a colon.
        parts = urlsplit(url.strip())
        complete = bool(parts.hostname) and parts.port != 0 and not parts.netloc.endswith(":")
        fits = parts.scheme in ("http", "https") and complete
    except ValueError:
        fits = False
    if not fits or _NOT_IN_URL.search(url.strip()):
        shown = redact_url(url).rpartition("@")[2]
        raise ValueError(
            f"{shown!r} is not an address; write it with http:// or https:// and without blanks, "
            "such as http://localhost:8000/v1"
        )


def check_judge_address(url: str) -> None:
    """Raise ValueError for an address that SDKs refuse, or that holds a secret (not shown)."""
    check_address(url)
    # Credentials and queries would end up in logs.
    parts = urlsplit(url.strip())
    if "@" in parts.netloc:
        raise ValueError(
            "holds a user name or password; leave them out of the address: the key is read from "
            "the environment (see --rm_key_env)"
        )
    if parts.query or parts.fragment:
        raise ValueError(
            "has something after a '?' or '#'; leave it out: keys come from the environment, and "
            "the provider's library adds the rest"
        )


def check_variable_name(name: str) -> None:
    """Raise ValueError for what is not the name of a variable; a key is not shown."""
    # A text that the redactor would hide is a key, not the name of a variable.
    if not re.fullmatch(r"[A-Za-z_]\w*", name) or redact(name) != name:
        raise ValueError("takes the name of a variable, such as OPENAI_API_KEY, not the key itself")


def parse_scale_bounds(text: str) -> tuple[int, int]:
    """Return the ends of a scale such as `1-10`; ValueError says what is wrong."""
    match = _SCALE.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is not LOW-HIGH in whole numbers, such as 1-10")
    low, high = int(match[1]), int(match[2])
    if low >= high:
        raise ValueError(f"'{text}' does not rise; write the lower number first, such as 1-10")
    if high - low >= _MOST_LEVELS:
        raise ValueError(f"'{text}' has more than {_MOST_LEVELS} levels; take a shorter one")
    return low, high


def parse_band(text: str) -> tuple[float, float]:
    """Return the ends of a band of scores such as `0.2-0.8`; ValueError says what is wrong."""
    match = _BAND.fullmatch(text)
    low, high = (float(match[1]), float(match[2])) if match else (1.0, 0.0)
    if not 0.0 <= low <= high <= 1.0:
        raise ValueError(f"'{text}' is not LOW-HIGH with numbers from 0 to 1, such as 0.2-0.8")
    return low, high


def _check_compared(word: str) -> None:
    if word not in COMPARED and not _OF_ROW.fullmatch(word):
        near = did_you_mean(word, COMPARED)
        choices = ", ".join(COMPARED)
        raise ValueError(f"'{word}' is not one of {choices} and extra_info.NAME.{near}")


def _check_not_blank(name: str) -> None:
    if not name.strip():
        raise ValueError("is blank; name a model, or none for no second judge")


def _check_template(template: str) -> None:
    # The prompt may be left out, the response may not.
    if "{response}" not in template:
        raise ValueError(
            "has no {response}, so every response would get one score; write it as '{prompt} "
            "{response}'"
        )


def _check_device_name(name: str) -> None:
    if not DEVICE.fullmatch(name):
        raise ValueError(f"'{name}' is not a device; use cpu, cuda or cuda:1")


# A key's variable for a provider that takes no key; of a judge, and of the second one.
_KEYLESS = Conflict(
    "key_env",
    lambda s: s.model is not None and s.key_env is not None and not JUDGES[s.type].keys,
    lambda s, at: (
        f"{at}key_env is set, and a judge at {s.type} takes no key, but Google's credentials: "
        "GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login."
    ),
    example="type=vertex model=m key_env=MINE",
    advice="key_env=null",
)


def _lone_price(named: str, absent: str) -> Conflict:
    """Return the conflict of one price without the other."""
    return Conflict(
        "price_input price_output",
        lambda s: (
            getattr(s, f"price_{named}") is not None and getattr(s, f"price_{absent}") is None
        ),
        lambda s, at: (
            f"one price is given, and --rm_price_{absent} is missing; give both, in US dollars "
            f"for a million tokens ({at}price_input and price_output)."
        ),
        example=f"price_{named}=1",
        advice=f"price_{absent}=1",
    )


# Types of settings that several sections share.
Address = Annotated[str | None, checked(check_judge_address)]
Variable = Annotated[str | None, checked(check_variable_name)]


class Monitor(Section):
    """A second judge that is only compared with the first; its scores reward nothing."""

    identity: ClassVar[Identity] = "start"
    # Which second judge, and whether a run needs it.
    type: JudgeType = setting(
        "openai", "Provider of the monitoring judge.", flag="--rm_monitor_type", unused="no_monitor"
    )
    model: Annotated[str | None, checked(_check_not_blank)] = setting(
        None, "Second judge that only monitors. none: no second judge.",
        absent="a cheap model of another provider whose key is set, if there is no budget",
        flag="--rm_monitor_model",
    )  # fmt: skip
    required: bool = setting(
        True, "Stop at the start if the second judge cannot be used. Unset: only if it was named.",
        unused="no_monitor",
    )  # fmt: skip
    base_url: Address = setting(
        None, "Endpoint of the monitoring judge.",
        absent="the provider's own, or the judge's if that has the same provider",
        flag="--rm_monitor_base_url", unused="no_monitor",
    )  # fmt: skip
    key_env: Variable = setting(
        None, "Environment variable with the key of the monitoring judge.",
        absent="the provider's usual one, or the judge's if that has the same provider",
        unused="no_monitor",
    )  # fmt: skip
    # What the second judge reads, and what the judge itself reads again.
    share: float = setting(
        0.1, "Share of the responses that the second judge scores too.", flag="--rm_monitor_share",
        gt=0.0, le=1.0, unused="no_monitor",
    )  # fmt: skip
    labels: LocalPath = setting(
        None, "File of labelled responses (columns prompt, response, label) that the judge "
        "scores again from time to time; up to 32 rows.", absent="none", flag="--rm_monitor_labels",
    )  # fmt: skip
    labels_every: int = setting(
        50, "Steps between two scorings of the labelled responses; the first is at the start.",
        flag="--rm_monitor_labels_every", ge=1, unused="no_labels",
    )  # fmt: skip
    conflicts: ClassVar[tuple[Conflict, ...]] = (_KEYLESS,)


class LocalJudge(Section):
    """The vLLM server of a judge that the run starts itself (type local)."""

    # Where its server runs, and how much of the machine it takes.
    devices: tuple[int, ...] = setting(
        (), "GPUs of the judge. Unset: those of judge in --placement.", identity="start"
    )
    gpu_memory_utilization: float = setting(
        0.85, "Share of GPU memory for the judge's server.", gt=0.0, lt=1.0, identity="start"
    )
    max_model_len: int | None = setting(
        Chosen(choose_judge_context, f"{JUDGE_CONTEXT}, or the model's maximum"),
        "Maximum tokens of a request with its answer.", ge=64,
    )  # fmt: skip
    start_timeout: float = setting(
        900.0, "Maximum seconds for the server to start.", gt=0.0, identity="start"
    )
    engine_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of vLLM's server, such as {reasoning_parser: qwen3}.",
    )


class Cascade(Section):
    """A cheaper judge that is asked first; the judge itself decides where that one is unsure."""

    model: Annotated[str | None, checked(_check_not_blank)] = setting(
        None, "Cheaper judge, asked first: MODEL, TYPE/MODEL or a name in reward.api.judges. The "
        "judge of --rm_model is asked where this one is unsure; CHEAPER,JUDGE names both.",
        absent="no cheaper judge", flag="--rm_cascade",
    )  # fmt: skip
    # When it is unsure: one of two.
    spread: float | None = setting(
        Chosen(choose_cascade_spread, "0.15, if it has several votes or probabilities"),
        "Spread of its votes or probabilities from which it is unsure, on scores from 0 to 1.",
        flag="--rm_cascade_spread",
        ge=0.0, le=0.5, unused="no_cascade",
    )  # fmt: skip
    band: Annotated[str | None, checked(parse_band)] = setting(
        Chosen(choose_cascade_band, "0.2-0.8, if it has neither votes nor probabilities"),
        "Scores from 0 to 1 at which it is unsure, LOW-HIGH.", flag="--rm_cascade_band",
        unused="no_cascade",
    )  # fmt: skip
    share: float = setting(
        0.3, "Share of the responses that the judge is expected to decide, for forecasts; "
        "`ppo reward calibrate` measures it.", flag="--rm_cascade_share", gt=0.0, le=1.0,
        identity="start", unused="no_cascade",
    )  # fmt: skip
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "spread band",
            lambda s: s.spread is not None and s.band is not None,
            lambda s, at: (
                "--rm_cascade_spread and --rm_cascade_band both say when the cheaper judge is "
                "unsure; keep one."
            ),
            example="model=small spread=0.1 band=0.2-0.8",
            advice="spread=null",
        ),
    )


class Panel(Section):
    """Further judges that score each response as well; the median of all scores counts."""

    judges: tuple[str, ...] = setting(
        (), "Further judge that scores each response as well, repeatable: MODEL, TYPE/MODEL or a "
        "name in reward.api.judges.", flag="--rm_panel",
    )  # fmt: skip
    least: int | None = setting(
        Chosen(choose_panel_least, "more than half"),
        "Judges of a panel that must give a verdict on a response.",
        flag="--rm_panel_least", ge=1, unused="no_panel",
    )  # fmt: skip


# How a response is cut into the pieces that a judge scores.
PLACES = ("sentence", "line", "step", "turn", "criterion")


def _check_place(text: str) -> None:
    file, _, function = text.rpartition(":")
    if text not in PLACES and not (file.endswith(".py") and function.isidentifier()):
        near = did_you_mean(text, PLACES)
        raise ValueError(f"'{text}' is not one of {', '.join(PLACES)} and FILE.py:FUNCTION.{near}")


class ApiReward(Section):
    """An LLM judge behind a provider's API."""

    # Which judge, and how it is reached.
    enable: bool = setting(
        False, "Score responses with an LLM judge.", flag="--use_api_reward", unused="", common=True
    )
    type: JudgeType = setting(
        "dashscope",
        "Provider of the judge.",
        flag="--rm_api_type",
        env="PPO_RM_API_TYPE",
        common=True,
    )
    model: LocalPath = setting(
        None, "Model of the judge, such as qwen-plus. For local: a folder or hub name.",
        absent="the provider's default, if it has one", flag="--rm_model", env="PPO_RM_MODEL",
        common=True,
    )  # fmt: skip
    base_url: Address = setting(
        None, "Endpoint, if not the provider's own.",
        absent="the provider's own, or that of its SDK's variable",
        flag="--rm_base_url", env="PPO_RM_BASE_URL", identity="eval",
    )  # fmt: skip
    key_env: Variable = setting(
        None, "Environment variable with the key, if not the provider's usual one.",
        absent="the first of the provider's usual ones that is set",
        flag="--rm_key_env", identity="start",
    )  # fmt: skip
    # What the judge is asked.
    prompt_preset: Literal["math", "code", "dialogue", "safety"] = setting(
        "dialogue", "Bundled judge prompt.",
        flag="--rm_prompt_preset", env="PPO_RM_PROMPT_PRESET", unused="own_judge_prompt",
        common=True,
    )  # fmt: skip
    prompt_file: LocalPath = setting(
        None, "Your judge prompt: a YAML file like those in reward_prompts/.", absent="the preset",
        flag="--rm_prompt_file",
    )  # fmt: skip
    system_prompt: str | None = setting(
        None, "System prompt of the judge, instead of the preset's.", absent="the prompt's",
        flag="--rm_system_prompt",
    )  # fmt: skip
    scoring_prompt: str | None = setting(
        None, "Scoring prompt, instead of the preset's, with {prompt}, {response}, "
        "{ground_truth}, {extra_info.*}.", absent="the prompt's", flag="--rm_scoring_prompt",
    )  # fmt: skip
    rubric: LocalPath = setting(
        None, "Criteria, judged separately: a YAML file. Or extra_info.NAME for criteria of each "
        "row.", absent="no criteria", flag="--rm_rubric",
    )  # fmt: skip
    place: Annotated[LocalPath, checked(_check_place)] = setting(
        None, "Let the judge score each sentence, line, step or turn of a response as well, in the "
        "same call, or the pieces of your FILE.py:FUNCTION, or quote the passage that decides each "
        "criterion: the rewards land there.",
        absent="one score for the whole", flag="--rm_place",
        advice="Set it where the judge can tell which part of a response is good: training then "
        "needs fewer judge calls. Leave it out where its scores of pieces are mostly noise.",
    )  # fmt: skip
    rubric_calls: Literal["one", "each"] = setting(
        "one",
        "Judge all criteria in one call, or each in a separate call: more expensive, and harder "
        "to fool.", flag="--rm_rubric_calls", unused="no_rubric",
    )  # fmt: skip
    rubric_order: Literal["fixed", "shuffled"] = setting(
        Chosen(choose_rubric_order, "shuffled in a panel, else fixed"),
        "Order of the criteria in a request: that of the rubric, or another one for each row, vote "
        "and judge.", flag="--rm_rubric_order",
        unused="no_rubric",
    )  # fmt: skip
    rubric_held_out: float | None = setting(
        None, "Share of the criteria that training does not ask about and validations report: a "
        "second opinion.", absent="all are trained on", flag="--rm_rubric_held_out", gt=0.0,
        lt=1.0, unused="no_rubric",
    )  # fmt: skip
    rubric_seed: int = setting(
        Follows("trainer.seed"), "Seed that draws the criteria to hold out.", ge=0,
        unused="none_held_out",
    )  # fmt: skip
    scale: Annotated[str | None, checked(parse_scale_bounds)] = setting(
        Chosen(choose_scale, "the prompt's, else 1-10"), "Lowest and highest score, LOW-HIGH.",
        flag="--rm_scale", unused="fixed_scale",
    )  # fmt: skip
    output: Literal["json", "text"] | None = setting(
        Chosen(choose_output, "that of the prompt file, else json"),
        "Format of the answer: a JSON object, or a last line with the score.",
        flag="--rm_output", unused="fixed_output",
    )  # fmt: skip
    # How it answers.
    mode: Literal["text", "decision", "compare"] = setting(
        "text", "Read a written verdict, ask a decision endpoint for probabilities, or compare "
        "responses with each other.", flag="--rm_mode",
    )  # fmt: skip
    compare: Annotated[str, checked(_check_compared)] = setting(
        "pairs",
        "What is compared: pairs of responses to a prompt, a list of all of them, or each with "
        "the starting model's greedy response (base), the row's ground_truth or "
        "extra_info.NAME.", flag="--rm_compare", unused="no_comparison",
    )  # fmt: skip
    compare_calls: int | None = setting(
        None, "Maximum calls to compare the responses to one prompt in pairs.",
        absent="no maximum: each pair in both orders", flag="--rm_compare_calls", ge=2,
        unused="not_in_pairs",
    )  # fmt: skip
    # What the judge sees of a response.
    scope: Literal["episode", "turn"] = setting(
        "episode", "What the judge reads of an episode of several turns: all of it, or its last "
        "turn.", flag="--rm_scope", unused="no_episodes",
    )  # fmt: skip
    reasoning: Literal["strip", "keep"] = setting(
        "strip", "Remove (strip) or keep the reasoning blocks of a response.", flag="--rm_reasoning"
    )
    max_response_chars: int = setting(
        24_000,
        "Maximum characters of a response; longer ones are cut in the middle, and the judge is "
        "told.", flag="--rm_max_response_chars", ge=200,
    )  # fmt: skip
    gate: bool = setting(
        True, "Give empty responses the lowest score without a call.", flag="--rm_gate"
    )
    # Sampling of the verdict.
    temperature: float | None = setting(
        Chosen(choose_temperature, "0, or 0.7 with several votes; none for Claude"),
        "Sampling temperature of the judge.",
        flag="--rm_temperature", ge=0.0, le=2.0, unused="decision_endpoint",
    )  # fmt: skip
    max_tokens: int = setting(
        1024, "Maximum tokens of a judge's answer.", flag="--rm_max_tokens", ge=1,
        unused="decision_endpoint",
    )  # fmt: skip
    votes: int = setting(
        1, "Independent verdicts per response.", flag="--rm_votes", ge=1, le=64,
        advice="Raise it to 3 if `ppo reward calibrate` shows that repeated verdicts differ; "
        "the cost rises with it.",
    )  # fmt: skip
    max_votes: int = setting(
        Follows("reward.api.votes"),
        "Further verdicts, one at a time, while no score has more than half of them, up to this "
        "number in all.", flag="--rm_max_votes", ge=1, le=64,
    )  # fmt: skip
    # Time and rate of calls.
    timeout: float = setting(
        60.0, "Maximum seconds of one call.", flag="--rm_timeout", gt=0.0, identity="start"
    )
    deadline: float = setting(
        Chosen(choose_deadline, "3 x timeout"), "Maximum seconds of one verdict, retries included.",
        flag="--rm_deadline", gt=0.0, identity="start",
    )  # fmt: skip
    concurrency: int = setting(
        32, "Maximum calls at once.", flag="--rm_concurrency", ge=1, identity="start"
    )
    max_rpm: int | None = setting(
        None, "Maximum requests per minute, for the whole job.", absent="no limit",
        flag="--rm_max_rpm", ge=1, identity="start",
    )  # fmt: skip
    max_tpm: int | None = setting(
        None, "Maximum tokens per minute, for the whole job.", absent="no limit",
        flag="--rm_max_tpm", ge=1, identity="start",
    )  # fmt: skip
    hedge_after: float | None = setting(
        None, "Seconds after which a slow call is sent a second time.", absent="never",
        flag="--rm_hedge_after", gt=0.0, identity="start", unused="hedge_after_timeout",
    )  # fmt: skip
    # Failures and outages.
    on_failure: Literal["mask", "batch_mean", "stop"] = setting(
        "mask", "Treatment of a response without a verdict.", flag="--rm_on_failure"
    )
    max_failure_rate: float = setting(
        0.2, "Share of failed verdicts per step above which the run pauses.",
        flag="--rm_max_failure_rate", ge=0.0, le=1.0, identity="start",
    )  # fmt: skip
    outage_wait: float = setting(
        1800.0, "Seconds to wait for a judge that is down.", flag="--rm_outage_wait", ge=0.0,
        identity="start",
    )  # fmt: skip
    cache: LocalPath = setting(
        Chosen(choose_cache, "one file for all runs of this user, or in a run folder with a copy"),
        "File of cached verdicts, or `off`.",
        flag="--rm_cache", env="PPO_RM_CACHE", identity="start",
    )  # fmt: skip
    # Spending.
    budget_usd: float | None = setting(
        None, "Maximum cost, in US dollars.", absent="no limit", flag="--rm_budget_usd", gt=0.0,
        identity="start", common=True,
    )  # fmt: skip
    budget_tokens: int | None = setting(
        None, "Maximum tokens of the judge.", absent="no limit", flag="--rm_budget_tokens", ge=1,
        identity="start",
    )  # fmt: skip
    prices: LocalPath = setting(
        None, "YAML file with your prices.", absent="the bundled prices", flag="--rm_prices",
        env="PPO_RM_PRICES", identity="start", unused="own_prices",
    )  # fmt: skip
    price_input: float | None = setting(
        None, "US dollars per million input tokens.", absent="as listed", flag="--rm_price_input",
        ge=0.0, identity="start",
    )  # fmt: skip
    price_output: float | None = setting(
        None, "US dollars per million output tokens.", absent="as listed", flag="--rm_price_output",
        ge=0.0, identity="start",
    )  # fmt: skip
    # Monitoring.
    canary_every: int = setting(
        50,
        "Steps between two tests of the judge with worthless replies; 0: no tests, at the start "
        "neither.", flag="--rm_canary_every", ge=0, identity="start",
    )  # fmt: skip
    noise_responses: int = setting(
        8,
        "Responses of the first step that the judge scores two more times, which shows how much "
        "repeated verdicts differ; 0: none.", flag="--rm_noise_responses", ge=0, identity="start",
        unused="votes_show_noise",
    )  # fmt: skip
    batch_wait: float | None = setting(
        None, "Seconds to wait for batch jobs instead of calls; --batch of ppo reward sets it.",
        absent="calls", gt=0.0, identity="start",
    )  # fmt: skip
    # Further judges, and what they are for.
    judges: dict[str, Any] = setting(
        {}, "Further judges by name: the settings of each that differ from this judge's.",
        unused="no_other_judge",
    )  # fmt: skip
    cascade: Cascade = section(Cascade)
    panel: Panel = section(Panel)
    local: LocalJudge = section(LocalJudge, unused="judge_elsewhere")
    monitor: Monitor = section(Monitor)
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        _lone_price("input", "output"),
        _lone_price("output", "input"),
        # A decision endpoint returns the probability of each level of the scale.
        Conflict(
            "mode type",
            lambda s: s.mode == "decision" and JUDGES[s.type].decides is None,
            lambda s, at: (
                f"{s.type} has no decision endpoint; use --rm_mode text, or the decision model of "
                f"{' or '.join(name for name, api in JUDGES.items() if api.decides)}."
            ),
            example="mode=decision type=claude",
            advice="mode=text",
        ),
        Conflict(
            "mode rubric",
            lambda s: s.mode == "compare" and s.rubric is not None,
            lambda s, at: (
                "criteria are decided for each response by itself, and --rm_mode compare decides "
                "which one is better; leave --rm_rubric out, or use --rm_mode text."
            ),
            example="mode=compare compare=ground_truth rubric=extra_info.r",
            advice="mode=text",
        ),
        Conflict(
            "place mode",
            lambda s: s.place is not None and s.mode != "text",
            lambda s, at: (
                f"--rm_place {s.place} asks for a written score of each piece, and --rm_mode "
                f"{s.mode} has none; use --rm_mode text, or leave --rm_place out."
            ),
            example="place=line mode=compare compare=ground_truth",
            advice="mode=text",
        ),
        Conflict(
            "place rubric",
            lambda s: (s.place == "criterion") != (s.rubric is not None) and s.place is not None,
            lambda s, at: (
                f"--rm_place {s.place} has pieces scored, and criteria (--rm_rubric) are placed by "
                "quotation: use --rm_place criterion."
                if s.rubric is not None
                else "--rm_place criterion needs criteria: name them with --rm_rubric FILE."
            ),
            example="place=criterion",
            advice="place=null",
        ),
        Conflict(
            "max_votes votes mode",
            lambda s: (
                s.max_votes not in (None, s.votes)
                and (s.mode == "compare" or not 2 <= s.votes < s.max_votes)
            ),
            lambda s, at: (
                f"--rm_max_votes {s.max_votes} asks on while the verdicts on a response differ: it "
                "needs at least two to begin with, more in the end, and no --rm_mode compare; set "
                f"--rm_votes 2 ({at}votes is {s.votes})."
            ),
            example="max_votes=5",
            advice="votes=2",
        ),
        Conflict(
            "mode monitor.labels",
            lambda s: s.mode == "compare" and s.monitor.labels is not None,
            lambda s, at: (
                "labelled responses (--rm_monitor_labels) are scored one by one, and --rm_mode "
                "compare gives no such score; leave them out, or use --rm_mode text."
            ),
            example="mode=compare compare=ground_truth monitor.labels=f.jsonl",
            advice="mode=text",
        ),
        Conflict(
            "mode cascade.model panel.judges",
            lambda s: s.mode == "compare" and (s.cascade.model is not None or bool(s.panel.judges)),
            lambda s, at: (
                "--rm_cascade and --rm_panel need scores of single responses, and --rm_mode "
                "compare gives none; use --rm_mode text, or leave them out."
            ),
            example="mode=compare compare=ground_truth cascade.model=small",
            advice="mode=text",
        ),
        Conflict(
            "panel.judges cascade.model",
            lambda s: bool(s.panel.judges) and s.cascade.model is not None,
            lambda s, at: (
                "--rm_panel asks all judges about each response, and --rm_cascade the judge only "
                "where a cheaper one is unsure; keep one of them."
            ),
            example="panel.judges=[other] cascade.model=small",
            advice="cascade.model=null",
        ),
        # Batch APIs answer within hours; a step cannot wait for that.
        Conflict(
            "batch_wait",
            lambda s: s.batch_wait is not None,
            lambda s, at: (
                f"{at}batch_wait: a run never waits for a batch; give --batch to "
                "`ppo reward score`, calibrate or audit."
            ),
            example="batch_wait=9",
            advice="batch_wait=null",
        ),
        _KEYLESS,
    )

    @property
    def has_budget(self) -> bool:
        """Whether the worst case of each call must be known."""
        return self.budget_usd is not None or self.budget_tokens is not None

    @property
    def has_spread(self) -> bool:
        """Whether verdicts on one response show how sure the judge is."""
        return self.mode == "decision" or self.votes > 1

    @property
    def asks_on(self) -> bool:
        """Whether a response gets further verdicts while the first ones differ."""
        return self.max_votes > self.votes

    @property
    def repeats(self) -> bool:
        """Whether further verdicts are needed to see its noise: votes on a response show it."""
        return self.votes == 1 or self.mode == "compare" or bool(self.panel.judges)

    @property
    def within_group(self) -> bool:
        """Whether scores come from comparing the responses to a prompt with each other."""
        return self.mode == "compare" and self.compare in ("pairs", "list")

    @property
    def of_the_run(self) -> bool:
        """Whether responses are compared with others of the same run, which rows do not have."""
        return self.within_group or (self.mode == "compare" and self.compare == "base")


class ModelReward(Section):
    """A local or served reward model."""

    # Which model, and how it is read.
    path: str | None = setting(
        None, "Reward model: folder, hub name or URL.", absent="no reward model",
        flag="--reward_model", env="REWARD_MODEL_PATH", unused="every_model_its_own", common=True,
    )  # fmt: skip
    adapter: Adapter | None = setting(
        None, "Kind of the reward model.", absent="detected from its config and tensor names",
        flag="--reward_model_adapter",
    )  # fmt: skip
    revision: str | None = setting(
        None, "Commit, tag or branch of a hub model.", absent="the main branch",
        unused="model_is_served",
    )  # fmt: skip
    tokenizer: LocalPath = setting(
        None, "Tokenizer, if it is not in the model's folder; for served models, that of the "
        "template.", absent="the model's",
    )  # fmt: skip
    # Where it computes, and how much at once.
    dtype: Literal["float32", "bfloat16"] = setting(
        Chosen(choose_reward_dtype, "bfloat16 on a GPU, else float32"),
        "Precision of the body; the head is float32.", unused="model_is_served",
    )  # fmt: skip
    device: Annotated[str, checked(_check_device_name)] = setting(
        Chosen(choose_reward_device, "a GPU if there is one"), "Device: cpu, cuda or cuda:1.",
        flag="--reward_model_device", identity="start", unused="model_is_served",
    )  # fmt: skip
    offload: bool = setting(
        False, "Keep the reward model in host memory between steps.", flag="--reward_model_offload",
        identity="start", unused="model_is_served",
    )  # fmt: skip
    max_length: int | None = setting(
        Chosen(choose_reward_length, "the maximum of its kind of model, and of its positions"),
        "Maximum tokens of prompt and response.",
        flag="--reward_model_max_length", ge=8,
    )  # fmt: skip
    batch_tokens: int = setting(
        16384, "Token budget of a batch, padding included.", ge=16, identity="start",
        unused="model_is_served",
    )  # fmt: skip
    # How a sample is rendered.
    system_prompt: Literal["keep", "drop"] = setting(
        "keep", "Show the system message of a prompt to the reward model, or drop it."
    )
    turns: Literal["all", "last"] = setting(
        "all", "Show the whole conversation, or only the last question and its response."
    )
    template: Annotated[str | None, checked(_check_template)] = setting(
        None, "Text with {prompt} and {response}, instead of the chat template.",
        absent="the chat template",
    )  # fmt: skip
    outputs: tuple[float, ...] = setting((), "Weights of the outputs of a head that has several.")
    self_test: Literal["strict", "warn", "off"] = setting(
        "strict", "Check before the run that good answers score above bad ones; warn: only warn.",
        flag="--reward_model_self_test", identity="start",
    )  # fmt: skip
    # A served model: key, name and requests.
    key_env: Variable = setting(
        None, "Environment variable with the key of a served model.", absent="no key",
        identity="start", unused="model_is_local",
    )  # fmt: skip
    model_name: str | None = setting(
        None, "Name of the model at its server.", absent="the name that the server gives",
        unused="model_is_local",
    )  # fmt: skip
    timeout: float = setting(
        60.0, "Maximum seconds of one request to a served model.", gt=0.0, identity="start",
        unused="model_is_local",
    )  # fmt: skip
    concurrency: int = setting(
        8, "Maximum requests to a served model at once.", ge=1, identity="start",
        unused="model_is_local",
    )  # fmt: skip
    request_rows: int = setting(
        16, "Samples per request to a served model.", ge=1, identity="start",
        unused="model_is_local",
    )  # fmt: skip
    outage_wait: float = setting(
        1800.0, "Seconds to wait for a served model that is down.", ge=0.0, identity="start",
        unused="model_is_local",
    )  # fmt: skip


class Code(Section):
    """How the rule `code` runs the tests of a row."""

    # How tests become a score, and in which sandbox they run.
    score: Literal["all", "share"] = setting(
        "all", "Score 1 if all tests pass, or the share of tests that pass.", flag="--code_score"
    )
    sandbox: Literal["bwrap", "sandlock"] | None = setting(
        Chosen(choose_sandbox, "bubblewrap if it works, else sandlock"), "Sandbox.",
        flag="--code_sandbox", identity="start",
    )  # fmt: skip
    allow_unsandboxed: bool = setting(
        False, "Run code without a sandbox, with limits only: not safe.",
        flag="--allow_unsandboxed", identity="start", consent=True,
    )  # fmt: skip
    # Limits of one test, then of one response; a row's `time_limit` may allow its tests more.
    timeout: float = setting(
        10.0, "Maximum seconds of one input, or of all asserts of a row.", gt=0.0
    )
    cpu_seconds: int = setting(
        10, "Maximum CPU seconds of one input, or of all asserts of a row.", ge=1
    )
    response_timeout: float = setting(
        120.0, "Maximum seconds of all tests of one response.", gt=0.0
    )
    memory_mb: int = setting(512, "Maximum memory of one response, in MiB.", ge=64)
    output_kb: int = setting(64, "Maximum output of one response that is read, in KiB.", ge=1)
    processes: int = setting(16, "Maximum processes and threads of one response.", ge=1)


class Composite(Section):
    """A mixture: each part scaled, weighed and summed (see MixPart in config/mixture.py)."""

    enable: bool = setting(Chosen(choose_mixture, "if parts are set"), "Mix several rewards.")
    weights: dict[str, Any] = setting(
        {}, "Weight by name of part: judge, model, rule, environment.", unused="mixture_off"
    )
    parts: dict[str, Any] = setting(
        {}, "Settings by name of part: weight, scaling, clip and more.", unused="mixture_off"
    )


class Shaping(Section):
    """Penalties and scaling of scores before advantages; validation scores stay raw."""

    # Penalties by length, by a cut response and by repetition.
    overlong_buffer: int | None = setting(
        None, "Tokens before max_response_length in which a penalty grows (DAPO).", absent="off",
        flag="--overlong_buffer", ge=1,
    )  # fmt: skip
    overlong_penalty: float = setting(
        1.0, "Penalty of a response with max_response_length tokens.", flag="--overlong_penalty",
        ge=0.0, unused="no_overlong_buffer",
    )  # fmt: skip
    missing_eos_penalty: float | None = setting(
        None, "Penalty of a response that was cut off.", absent="off", flag="--missing_eos_penalty",
        ge=0.0,
    )  # fmt: skip
    repetition_penalty: float | None = setting(
        None, "Penalty at full repetition, in proportion to the share of repeated n-grams.",
        absent="off", flag="--repetition_penalty", ge=0.0,
    )  # fmt: skip
    repetition_ngram: int = setting(
        4, "Tokens per n-gram of the repetition penalty.", ge=1, unused="no_repetition_penalty"
    )
    thought_budget: int | None = setting(
        None, "Tokens of a thought above which a penalty grows, full at twice as many.",
        absent="off", flag="--thought_budget", ge=1,
    )  # fmt: skip
    answer_budget: int | None = setting(
        None, "Tokens of an answer above which a penalty grows, full at twice as many.",
        absent="off", flag="--answer_budget", ge=1,
    )  # fmt: skip
    budget_penalty: float = setting(
        1.0, "Penalty at twice the budget of a thought or an answer.", flag="--budget_penalty",
        ge=0.0, unused="no_budget",
    )  # fmt: skip
    # Clipping and normalisation, after the penalties.
    reward_clip: float | None = setting(
        None, "Limit rewards to the range from minus this to plus this.", absent="off",
        flag="--reward_clip", gt=0.0,
    )  # fmt: skip
    normalize: Literal["off", "batch", "running"] = setting(
        "off", "Normalize rewards to mean 0 and standard deviation 1, over the step (batch) or the "
        "run.", flag="--reward_normalize",
    )  # fmt: skip


class Reward(Section):
    """Where scores come from; unset, rules chosen by each row's data_source."""

    # Rules and functions, and the processes that run them.
    function: LocalPath = setting(
        None, "Python file with compute_score, FILE[:NAME].", absent="no function",
        flag="--reward_function", env="PPO_REWARD_FUNCTION", unused="every_rule_its_own",
        common=True,
    )  # fmt: skip
    function_kwargs: dict[str, Any] = setting(
        {}, "Keyword arguments of the reward function.", unused="no_rule"
    )
    rule: str | None = setting(
        None, "Built-in rule for every row. data_source is ignored.",
        absent="by the data_source of each row", flag="--rule", unused="every_rule_its_own",
        common=True,
    )  # fmt: skip
    rule_place: bool = setting(
        False, "A rule takes reward away where the response goes wrong, if that is certain: at the "
        "first equation that does not hold (gsm8k, number, arithmetic, math), or at the line that "
        "raises (code).", flag="--rule_place", unused="no_built_in_rule",
    )  # fmt: skip
    timeout: float = setting(
        10.0, "Maximum seconds of a rule or function for one row.", gt=0.0, identity="start",
        unused="no_rule",
    )  # fmt: skip
    num_workers: int = setting(
        2, "Processes for slow rules and functions.", ge=1, identity="start", unused="no_rule"
    )
    # Mixtures and files.
    parts: tuple[str, ...] = setting(
        (), "Part of a mixture, KIND[:NAME]:WEIGHT, repeatable (judge, model, rule, environment).",
        flag="--reward", unused="mixture_off",
    )  # fmt: skip
    config_file: LocalPath = setting(
        None, "YAML file with the settings of a judge or another reward.", absent="no file",
        flag="--reward_config", identity="start",
    )  # fmt: skip
    # Sections of each kind of source.
    api: ApiReward = section(ApiReward, unused="no_judge")
    model: ModelReward = section(ModelReward, unused="no_reward_model")
    code: Code = section(Code, unused="no_code")
    composite: Composite = section(Composite)
    shaping: Shaping = section(Shaping)

    # Free-form values have no hash; caches of mixtures are keyed by the object.
    __hash__ = object.__hash__
