"""The mixture of a reward: its parts, their settings, and what scores each of them.

It is read from `--reward`, `composite.weights` and `composite.parts`. A setting that a part leaves
out is inherited from the run (reward.api or reward.model), except what belongs to a provider or a
checkpoint when the part names another one.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from pydantic import Field, ValidationError

from ppo_cli.config.models.known_models import JUDGES
from ppo_cli.config.schema.algorithm import Conflict, Section, checked, setting
from ppo_cli.config.schema.finding import Finding
from ppo_cli.config.schema.keys import (
    Key,
    keys_of,
    nest_values,
    table,
    validation_messages,
    with_settings,
)
from ppo_cli.config.schema.reward import ApiReward, Composite, ModelReward, Reward
from ppo_cli.config.schema.values import read_value
from ppo_cli.errors import ConfigError, did_you_mean, ppo
from ppo_cli.secrets.redact import mask_secrets

Kind = Literal["judge", "model", "rule", "environment"]


@dataclass(frozen=True)
class Scaling:
    """A way to scale raw scores.

    `constants` are the settings that it reads, `needed` whether they must be set. A `grouped`
    scaling compares the responses to one prompt. A `relative` one depends on the responses of the
    trained model, so scores of two models cannot be compared. `bound` is the default of `clip`:
    without it, the first hit of a rare rule would dominate the sum.
    """

    help: str
    constants: tuple[str, ...] = ()
    needed: bool = False
    grouped: bool = False
    relative: bool = False
    bound: float | None = None


# A new way is a row here, and its arithmetic in rewards/mixture.py.
SCALINGS = {
    "none": Scaling("raw"),
    "affine": Scaling("(raw - mean) / std", constants=("mean", "std"), needed=True),
    "sigmoid": Scaling("of the affine value", constants=("mean", "std")),
    "zscore": Scaling("by mean and standard deviation of the run so far", relative=True, bound=5.0),
    "group": Scaling("by those of the prompt's responses", grouped=True, relative=True),
}
if TYPE_CHECKING:
    ScalingName = str
else:
    ScalingName = Literal[tuple(SCALINGS)]


# Comparisons of only_if.
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne,
    ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_CONDITION = re.compile(r"\s*([A-Za-z][\w.-]*)\s*(>=|<=|==|!=|>|<)\s*(\S+)\s*")


@dataclass(frozen=True)
class Condition:
    """The condition of `only_if`: the raw score of a part, compared with a number."""

    part: str
    sign: str
    number: float

    def holds(self, raw: float) -> bool:
        """Return whether a raw score of that part opens the gate."""
        return _COMPARE[self.sign](raw, self.number)


def read_condition(text: str) -> Condition:
    """Return the condition in `format >= 1`; ValueError says how to write it."""
    # One comparison only; the number must be finite.
    match = _CONDITION.fullmatch(text)
    number = math.nan
    if match is not None:
        try:
            number = float(match[3])
        except ValueError:
            match = None
    if match is None or not math.isfinite(number):
        raise ValueError(f"'{text}' is not a condition; write PART >= NUMBER, such as format >= 1")
    return Condition(match[1], match[2], number)


class MixPart(Section):
    """A part of a mixture; it contributes weight x clip(scale(raw)).

    `rule`, `function` and `function_kwargs` are for a part of kind rule; `model` (settings of
    reward.model) and `judge` (of reward.api) for the other kinds, as typed values by dotted key.
    """

    name: str
    kind: Kind
    weight: float = setting(1.0, "Weight of the part in the sum.")
    scaling: ScalingName = setting(
        "zscore", "; ".join(f"{name}: {way.help}" for name, way in SCALINGS.items()) + "."
    )
    mean: float | None = setting(None, "Mean of affine, center of sigmoid.")
    std: float | None = setting(None, "Standard deviation of affine, width of sigmoid.", gt=0.0)
    clip: float | None = setting(
        None, "Limit of the scaled value, plus and minus. Unset: 5 with zscore, else off.", gt=0.0
    )
    only_if: Annotated[str | None, checked(read_condition)] = setting(
        None, "Score the part only if another part's raw score is such: `format >= 1`."
    )
    on_failure: Literal["fail", "renormalise"] = setting(
        "fail", "If the part fails: the sample fails, or the other parts share its weight."
    )
    rule: str | None = None
    function: str | None = None
    function_kwargs: dict[str, Any] = Field(default_factory=dict)
    model: dict[str, Any] = Field(default_factory=dict)
    judge: dict[str, Any] = Field(default_factory=dict)
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            "scaling",
            lambda s: SCALINGS[s.scaling].needed and None in (s.mean, s.std),
            lambda s, at: (
                f"part {s.name} is scaled by {s.scaling}, which needs mean and std ({at}mean, "
                f".std): `{ppo('reward score')}` and `{ppo('reward calibrate')}` print them, and "
                f"`{ppo('reward fit')}` writes them to fit.json."
            ),
            example="scaling=affine mean=1",
            advice="std=2",
        ),
        Conflict(
            "mean std",
            lambda s: not SCALINGS[s.scaling].constants and (s.mean, s.std) != (None, None),
            lambda s, at: (
                f"{at}mean and std are for scaling "
                f"{' and '.join(name for name, way in SCALINGS.items() if way.constants)}, not for "
                f"{s.scaling}, which needs none; set {at}scaling=affine, or leave them out."
            ),
            example="mean=1 std=2",
            advice="scaling=affine",
        ),
    )

    @property
    def gate(self) -> Condition | None:
        """The parsed `only_if`."""
        return None if self.only_if is None else read_condition(self.only_if)

    @property
    def bound(self) -> float | None:
        """The limit at which scaled values are cut; None for none."""
        return SCALINGS[self.scaling].bound if self.clip is None else self.clip


S = TypeVar("S", bound=Section)
Problem = tuple[str, str]  # the key below the section, and what is wrong with it


def read_settings(
    kind: type[Section], raw_values: Mapping[str, Any], allowed: Collection[str] = ()
) -> tuple[dict[str, Any], list[Problem]]:
    """Return typed values by dotted key, and a problem for each other one.

    `allowed` restricts the keys of the section; empty allows all.
    """
    # Type by type first, so that each problem has its key.
    keys = {k: v for k, v in keys_of(kind).items() if not allowed or k in allowed}
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, raw in _flatten(raw_values, keys):
        try:
            if name not in keys:
                raise ValueError(_describe_unknown_key(name, keys))
            values[name] = read_value(keys[name], raw)
        except ValueError as error:
            problems.append((name, str(error)))
    try:
        # Then as a section: its validators and ranges. An unset value is decided by its rule.
        unset = {name for name, v in values.items() if v is None and keys[name].rule is not None}
        kind.model_validate(nest_values({k: v for k, v in values.items() if k not in unset}))
    except ValidationError as error:
        wrong = {
            name: message
            for name, message in validation_messages(error, keys).items()
            if name in values
        }
        problems += wrong.items()
        values = {name: value for name, value in values.items() if name not in wrong}
    return values, problems


def override_section(base: S, values: Mapping[str, Any], fresh: Collection[str] = ()) -> S:
    """Return a section with these values replaced; settings in `fresh` return to their defaults."""
    # Reset what belongs to another provider or checkpoint, then put the new values in.
    fields = type(base).model_fields
    defaults = {name: fields[name].get_default(call_default_factory=True) for name in fresh}
    return with_settings(base, defaults | dict(values))


def _flatten(
    raw_values: Mapping[str, Any], keys: Mapping[str, Key], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield each setting with its dotted name; a free-form value stays one value."""
    for word, raw in raw_values.items():
        name = f"{prefix}{word}"
        if isinstance(raw, Mapping) and raw and name not in keys:
            yield from _flatten(raw, keys, f"{name}.")
        else:
            yield name, raw


def _describe_unknown_key(name: str, keys: Mapping[str, Key]) -> str:
    """Return the message for a key that a section does not have, with the nearest one."""
    leaves = {key.rsplit(".", 1)[-1]: key for key in keys}
    # Compare with full names first, then with their last words.
    near = did_you_mean(name, keys) or did_you_mean(name.rsplit(".", 1)[-1], leaves)
    choices = "" if near else f" Known: {', '.join(k for k in keys if '.' not in k)}."
    return f"there is no such setting.{near}{choices}"


# Settings that define the parts.
FLAG = "reward.parts"
WEIGHTS = "reward.composite.weights"
PARTS = "reward.composite.parts"
KINDS = ("judge", "model", "rule", "environment")
# Group of a part -> the settings of the run that it inherits.
SECTIONS = {"judge": "reward.api", "model": "reward.model"}
_OF_PART = re.compile(rf"{re.escape(PARTS)}\.[^.]+\.({'|'.join(SECTIONS)})\.(.+)")
# Setting of a part -> the kind of part that has it.
SOURCE_KINDS = {
    "rule": "rule", "function": "rule", "function_kwargs": "rule", "model": "model",
    "judge": "judge",
}  # fmt: skip
_KIND_ALIASES = {"function": "rule", "api": "judge", "llm": "judge", "rm": "model"}
# Names of parts become metric names and keys.
_NAME = re.compile(r"[a-z][a-z0-9_-]*")


@dataclass(frozen=True)
class Mixture:
    """The parts that could be read, and what is wrong; `set_by` has the keys that set each part."""

    parts: tuple[MixPart, ...] = ()
    clashes: tuple[Finding, ...] = ()
    set_by: dict[str, tuple[str, ...]] = field(default_factory=dict)


@lru_cache(maxsize=8)
def read_mixture(reward: Reward) -> Mixture:
    """Return the mixture of a reward; it is empty when there is none."""
    return Mixture() if reward.composite.enable is False else _MixtureReader(reward).read()


def has_mixture(reward: Reward) -> bool:
    """Return whether parts of a mixture are named and the mixture is not switched off."""
    named = reward.parts or reward.composite.weights or reward.composite.parts
    return bool(named) and reward.composite.enable is not False


@dataclass
class _PartDraft:
    """A part while it is put together from several settings."""

    name: str
    kind: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    weights: list[tuple[float, str, str]] = field(default_factory=list)  # value, words, key
    set_by: list[str] = field(default_factory=list)


class _MixtureReader:
    """Collects the parts from --reward, composite.parts and composite.weights, in this order."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self._parts: dict[str, _PartDraft] = {}
        self._clashes: list[Finding] = []

    def read(self) -> Mixture:
        """Return the mixture: its parts, the clashes, and which keys set each part."""
        # The order decides who names a part first: flags, then parts, then weights.
        for text in self._reward.parts:
            self._read_flag(text)
        for name, raw_settings in self._reward.composite.parts.items():
            self._read_part_settings(str(name), raw_settings)
        for word, raw in self._reward.composite.weights.items():
            self._read_weight(str(word), raw)
        parts = [
            part for draft in self._parts.values() if (part := self._build_part(draft)) is not None
        ]
        set_by = {draft.name: tuple(draft.set_by) for draft in self._parts.values()}
        return Mixture(tuple(parts), tuple(self._clashes), set_by)

    def _report(self, key: str, text: str, *other_keys: str) -> None:
        self._clashes.append(Finding((key, *other_keys), text))

    def _read_flag(self, text: str) -> None:
        """Read one --reward: `judge:0.5` or `rule:format:0.2`."""
        # KIND:WEIGHT or KIND:NAME:WEIGHT.
        kind, *rest = (word.strip() for word in text.split(":"))
        weight = _parse_number(rest[-1]) if 1 <= len(rest) <= 2 else None
        name = rest[0] if len(rest) == 2 else kind
        # The first problem of the text is reported.
        problem = ""
        if kind not in KINDS:
            near = did_you_mean(_KIND_ALIASES.get(kind, kind), KINDS)
            problem = f"'{kind}' is not one of {', '.join(KINDS)}.{near}"
        elif not 1 <= len(rest) <= 2:
            problem = "write KIND:WEIGHT or KIND:NAME:WEIGHT, such as judge:0.5 or rule:format:0.2."
        elif weight is None:
            mend = f"; or is it the name? Then write {kind}:{rest[0]}:1" if len(rest) == 1 else ""
            problem = f"the weight '{rest[-1]}' is not a number{mend}."
        elif name in self._parts and name == kind:
            problem = (
                f"there is a {kind} already; with several of one kind give each a name, such as "
                f"--reward {kind}:NAME:WEIGHT."
            )
        elif name in self._parts:
            problem = f"another part is called {name}; rename one."
        if problem:
            self._report(FLAG, f"--reward {text}: {problem}")
        elif weight is not None and self._check_name(name, FLAG, f"--reward {text}"):
            self._add_weight(self._get_draft(name, FLAG, kind), weight, "--reward", FLAG)

    def _get_draft(self, name: str, key: str, kind: str | None = None) -> _PartDraft:
        """Return what was read about a part, and record that `key` sets it.

        A part is created when it is first mentioned.
        """
        # Parts are in the order of their first mention.
        part = self._parts.setdefault(name, _PartDraft(name, kind))
        part.set_by.append(key)
        return part

    def _add_weight(self, part: _PartDraft, weight: float, where: str, key: str) -> None:
        part.weights.append((weight, f"{weight:g} in {where}", key))

    def _check_name(self, name: str, key: str, where: str) -> bool:
        """Return whether this can name a part; reports a name that cannot."""
        rule = "a small letter first, then small letters, digits, _ or -"
        # A part's name becomes a key of the settings, so it must not look like a secret's.
        if _NAME.fullmatch(name):
            if mask_secrets({name: 1}) == {name: 1}:
                return True
            rule = "values under such a word are hidden as secrets; use another"
        self._report(key, f"{where}: '{name}' is not a name for a part: {rule}.")
        return False

    def _read_part_settings(self, name: str, raw_settings: Any) -> None:
        """Read the settings of one part in composite.parts."""
        key = f"{PARTS}.{name}"
        raw_settings = expand_part(raw_settings)
        if not isinstance(raw_settings, dict):
            self._report(
                key, f"{key}: '{raw_settings}' is not a group of settings such as weight: 0.5."
            )
            return
        if not self._check_name(name, key, PARTS):
            return
        part = self._get_draft(name, key)
        allowed = set(MixPart.model_fields) - {"name"}
        values = self._read_section(MixPart, raw_settings, key, allowed)
        weight, kind = values.pop("weight", None), values.pop("kind", None)
        if weight is not None:
            self._add_weight(part, weight, f"{key}.weight", f"{key}.weight")
        part.settings = values
        # The kind: as set, by the part's name, or by the source that it names.
        sources = sorted({SOURCE_KINDS[word] for word in values if word in SOURCE_KINDS})
        if part.kind is not None and kind not in (None, part.kind):
            problem = f"{key}.kind is {kind}, but --reward says that {part.name} is a {part.kind}"
            self._report(f"{key}.kind", f"{problem}; keep one.", FLAG)
        usual = part.name if part.name in KINDS else None
        part.kind = part.kind or kind or usual or (sources[0] if len(sources) == 1 else None)
        if part.kind is None:
            self._report(
                key,
                f"{key} does not say what {part.name} is: add kind: judge, model or rule, or name "
                "its rule, function, model or judge.",
            )
        else:
            self._check_source(part, key)

    def _read_section(
        self,
        section: type[Section],
        raw_values: Mapping[str, Any],
        key: str,
        allowed: Collection[str],
    ) -> dict[str, Any]:
        """Return the typed settings of a section by dotted key; reports the wrong ones."""
        values, problems = read_settings(section, raw_values, allowed)
        for word, message in problems:
            end = "" if message[-1:] in ".?" else "."
            self._report(f"{key}.{word}", f"{key}.{word}: {message}{end}")
        return values

    def _check_source(self, part: _PartDraft, key: str) -> None:
        """Refuse settings of another kind and two sources; read the part's judge or model."""
        # Each source belongs to one kind of part.
        for word, kind in SOURCE_KINDS.items():
            if word in part.settings and kind != part.kind:
                problem = (
                    f"{part.name} is of kind {part.kind}, and {word} is for parts of kind {kind}"
                )
                self._report(f"{key}.{word}", f"{key}.{word}: {problem}; leave it out.")
        if part.settings.get("rule") and part.settings.get("function"):
            self._report(f"{key}.rule", f"{key} has a rule and a function; keep one.")
        # Read the part's own judge or model as a section, to report its problems by key.
        for word, section in (("judge", ApiReward), ("model", ModelReward)):
            if raw_values := part.settings.get(word):
                allowed = [name for name in keys_of(section) if name != "enable"]
                part.settings[word] = self._read_section(
                    section, raw_values, f"{key}.{word}", allowed
                )

    def _read_weight(self, name: str, raw: Any) -> None:
        """Read one entry of composite.weights, and record mistakes as clashes."""
        key = f"{WEIGHTS}.{name}"
        weight = _parse_number(raw)
        if weight is None:
            self._report(key, f"{key}: '{raw}' is not a number; write a weight such as 0.5.")
        elif name in self._parts or name in KINDS:
            part = self._get_draft(name, key, name if name in KINDS else None)
            self._add_weight(part, weight, key, key)
        else:
            near = did_you_mean(name, [*self._parts, *KINDS])
            self._report(
                key,
                f"{key}: there is no part '{name}'.{near} Set it up below {PARTS}.{name}, or with "
                f"--reward KIND:{name}:WEIGHT.",
            )

    def _build_part(self, part: _PartDraft) -> MixPart | None:
        """Return the finished part; None when its kind is unknown."""
        # A weight may be set in several places if all agree.
        if len({weight for weight, _, _ in part.weights}) > 1:
            weights = " and ".join(text for _, text, _ in part.weights)
            self._report(
                part.weights[-1][2],
                f"the weight of part {part.name} is {weights}; keep one.",
                part.weights[0][2],
            )
        # Weights are all set or none is.
        if not part.weights and any(other.weights for other in self._parts.values()):
            self._report(
                part.set_by[-1],
                f"part {part.name} has no weight, and others have; set "
                f"{PARTS}.{part.name}.weight=0.5.",
            )
        if part.kind is None:
            return None
        settings = dict(part.settings)
        # A rule part without a source is the built-in rule of its name.
        own_source = settings.get("rule") or settings.get("function")
        if part.kind == "rule" and part.name != "rule" and not own_source:
            settings["rule"] = part.name
        weight = part.weights[-1][0] if part.weights else 1.0
        return MixPart.model_validate(
            settings | {"name": part.name, "kind": part.kind, "weight": weight}
        )


def expand_part(raw_settings: Any) -> Any:
    """Return the settings of a part without abbreviations; what is not a group as it is.

    `parts.judge: 0.5` is short for its weight, `model: DIR` and `judge: NAME` for the main setting
    of each.
    """
    if _parse_number(raw_settings) is not None:
        return {"weight": raw_settings}
    if raw_settings is not None and not isinstance(raw_settings, Mapping):
        return raw_settings
    group = dict(raw_settings or {})
    for word, leaf in (("model", "path"), ("judge", "model")):
        if isinstance(group.get(word), str):
            group[word] = {leaf: group[word]}
    return group


def _parse_number(raw: Any) -> float | None:
    """Return a finite number; None for anything else."""
    values, _ = read_settings(MixPart, {"weight": raw}, ("weight",))
    return values.get("weight")


# Settings that a part with another provider, or another checkpoint, does not inherit.
OF_PROVIDER = ("model", "base_url", "key_env", "price_input", "price_output")
OF_CHECKPOINT = (
    "adapter", "revision", "tokenizer", "max_length", "template", "outputs", "key_env",
    "model_name",
)  # fmt: skip


def mixture_of(reward: Reward) -> tuple[MixPart, ...]:
    """Return the parts of a mixture, () without one; ConfigError has every problem."""
    mixture = read_mixture(reward)
    if mixture.clashes:
        raise ConfigError(clash.text for clash in mixture.clashes)
    return mixture.parts


def judge_settings(reward: Reward, part: MixPart) -> ApiReward:
    """Return the settings of a part's judge: those of reward.api unless the part sets them."""
    # Another provider: its model, address, key and prices start from the defaults.
    other = part.judge.get("type", reward.api.type) != reward.api.type
    api = override_section(reward.api, part.judge | {"enable": True}, OF_PROVIDER if other else ())
    if not (api.model or "").strip() and JUDGES[api.type].default:
        return api.model_copy(update={"model": JUDGES[api.type].default})
    return api


# Settings that one of several judges behind a reward does not have itself: the reward has them.
OF_REWARD = (
    "enable", "judges", "cascade", "panel", "noise_responses", "monitor", "local", "budget_usd",
    "budget_tokens", "cache", "on_failure", "max_failure_rate", "batch_wait",
    "rubric_held_out", "rubric_seed",  # all judges of a reward train on the same criteria
)  # fmt: skip


# Settings on which the pieces of a response depend: with --rm_place all judges behind a reward
# score the same ones.
OF_PIECES = ("place", "mode", "rubric", "reasoning", "scope")


def read_judge(judges: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the settings behind a judge's name: a name in `judges`, TYPE/MODEL or MODEL.

    Raises ConfigError with every problem.
    """
    raw_values = judges.get(name, name)
    if isinstance(raw_values, str):
        kind, _, model = raw_values.partition("/")
        named = kind in JUDGES and model
        raw_values = {"type": kind, "model": model} if named else {"model": raw_values}
    at = f"reward.api.judges.{name}"
    if not isinstance(raw_values, Mapping):
        raise ConfigError(f"{at} is not a group of settings such as model: MODEL.")
    allowed = [key for key in keys_of(ApiReward) if key.partition(".")[0] not in OF_REWARD]
    values, problems = read_settings(ApiReward, raw_values, allowed)
    if problems:
        raise ConfigError(
            f"{at}.{key}: {text}" + "." * (text[-1] not in ".?") for key, text in problems
        )
    return values


def other_judge(api: ApiReward, name: str) -> ApiReward:
    """Return the settings of a further judge, by its name as in `read_judge`.

    What it does not set is as in `api`, but for what belongs to another provider or model. Raises
    ConfigError with every problem.
    """
    values = read_judge(api.judges, name)
    # Another provider has other models, addresses and keys, another model other prices.
    fresh: tuple[str, ...] = ("judges", "cascade", "panel", "monitor", "local")
    if values.get("type", api.type) != api.type:
        fresh += OF_PROVIDER
    elif "model" in values:
        fresh += ("price_input", "price_output")
    judge = override_section(api, values, fresh)
    if not (judge.model or "").strip():
        at = f"reward.api.judges.{name}"
        raise ConfigError(f"{at} has no model: set {at}.model.")
    other = [key for key in OF_PIECES if getattr(judge, key) != getattr(api, key)]
    if other and (api.place or judge.place):
        raise ConfigError(
            f"reward.api.judges.{name}.{other[0]} differs from reward.api.{other[0]}. With "
            "--rm_place all judges of a reward score the same pieces: leave it out."
        )
    return judge


def further_judges(api: ApiReward) -> tuple[str, ...]:
    """Return the names of the judges that a judge's reward asks besides it."""
    return (*((api.cascade.model,) if api.cascade.model else ()), *api.panel.judges)


def cheaper_judge(api: ApiReward) -> ApiReward | None:
    """Return the settings of a cascade's cheaper judge, None without one; see `other_judge`."""
    return None if api.cascade.model is None else other_judge(api, api.cascade.model)


def panel_judges(api: ApiReward) -> dict[str, ApiReward]:
    """Return the settings of the further judges of a panel, by name; see `other_judge`."""
    return {name: other_judge(api, name) for name in api.panel.judges}


def other_judges(api: ApiReward) -> list[ApiReward]:
    """Return the settings of all judges that a judge's reward asks besides it."""
    cheap = cheaper_judge(api)
    return [*([] if cheap is None else [cheap]), *panel_judges(api).values()]


def model_settings(reward: Reward, part: MixPart) -> ModelReward:
    """Return the settings of a part's reward model: reward.model unless the part sets them."""
    # Another checkpoint: what describes the checkpoint starts from the defaults.
    other = part.model.get("path", reward.model.path) != reward.model.path
    return override_section(reward.model, part.model, OF_CHECKPOINT if other else ())


def rule_settings(reward: Reward, part: MixPart) -> Reward:
    """Return a reward of one rule or function: the part's own, else the run's."""
    # Without other sources, so that the rule scores alone.
    alone = {"api": ApiReward(), "model": ModelReward(), "composite": Composite(), "parts": ()}
    if part.rule is None and part.function is None:
        kwargs = reward.function_kwargs | part.function_kwargs
        return reward.model_copy(update=alone | {"function_kwargs": kwargs})
    overrides = {
        "rule": part.rule,
        "function": part.function,
        "function_kwargs": part.function_kwargs,
    }
    return reward.model_copy(update=alone | overrides)


def mixture_line(parts: tuple[MixPart, ...]) -> str:
    """Return a mixture in one line: `total = 0.7 x zscore(model) + 0.3 x rule`."""
    formula = ""
    # A negative weight shows as a minus, also at the start.
    for part in parts:
        sign = "-" if part.weight < 0 else "+" if formula else ""
        gap = " " if formula and sign else ""
        formula += f"{gap}{sign}{gap}{abs(part.weight):g} x {_format_scaling(part)}"
    return f"total = {formula}"


def _format_scaling(part: MixPart) -> str:
    """Return how a part's raw score is scaled, cut and gated, as a formula."""
    scaled = part.name if part.scaling == "none" else f"{part.scaling}({part.name})"
    clipped = f"clip({scaled}, {part.clip:g})" if part.clip is not None else scaled
    return f"{clipped} (if {part.only_if})" if part.only_if else clipped


@dataclass(frozen=True)
class Source(Generic[S]):
    """What scores; `key` is where its settings stand, `part` its part of a mixture."""

    part: str | None
    key: str
    settings: S
    only_if: str | None = None

    @property
    def name(self) -> str:
        """The judge or reward model as sentences call it."""
        judge = isinstance(self.settings, ApiReward)
        what = "the judge" if judge else "the reward model"
        is_named = self.part not in (None, "judge" if judge else "model")
        return f"{what} '{self.part}'" if is_named else what

    def keys(self, *leaves: str) -> tuple[str, ...]:
        """Return where settings of it stand: in its part, or else among the run's."""
        run = "reward.api" if isinstance(self.settings, ApiReward) else "reward.model"
        return tuple(dict.fromkeys(f"{at}.{leaf}" for at in (self.key, run) for leaf in leaves))

    @property
    def own_key(self) -> str:
        """Where its own settings are: in its part, also where that sets none."""
        group = "judge" if isinstance(self.settings, ApiReward) else "model"
        return SECTIONS[group] if self.part is None else f"{PARTS}.{self.part}.{group}"


Judge = Source[ApiReward]
Scorer = Source[ModelReward]


@lru_cache(maxsize=8)
def judges_of(reward: Reward) -> tuple[Judge, ...]:
    """Return every judge that scores responses."""
    if not has_mixture(reward):
        return (Judge(None, "reward.api", reward.api),) if reward.api.enable else ()
    return tuple(
        Judge(p.name, _settings_key(p, p.judge, "reward.api"), judge_settings(reward, p), p.only_if)
        for p in read_mixture(reward).parts
        if p.kind == "judge"
    )


@lru_cache(maxsize=8)
def models_of(reward: Reward) -> tuple[Scorer, ...]:
    """Return every reward model that scores responses, with its settings."""
    if not has_mixture(reward):
        return (Scorer(None, "reward.model", reward.model),) if reward.model.path else ()
    return tuple(
        Scorer(p.name, _settings_key(p, p.model, "reward.model"), model_settings(reward, p))
        for p in read_mixture(reward).parts
        if p.kind == "model"
    )


def find_declaration(name: str) -> Key | None:
    """Return the declaration of a setting, also of the judge or reward model of a part."""
    if match := _OF_PART.fullmatch(name):
        name = f"{SECTIONS[match[1]]}.{match[2]}"
    return table().get(name)


def _settings_key(part: MixPart, part_settings: Mapping[str, Any], usual: str) -> str:
    """Return the key of a part's judge or model settings: the part's, else the run's."""
    return f"{PARTS}.{part.name}.{part.kind}" if part_settings else usual


@lru_cache(maxsize=8)
def rules_of(reward: Reward) -> tuple[Reward, ...]:
    """Return the settings of every rule or function that scores responses."""
    if has_mixture(reward):
        parts = read_mixture(reward).parts
        return tuple(rule_settings(reward, part) for part in parts if part.kind == "rule")
    return () if reward.api.enable or reward.model.path is not None else (reward,)


def is_watched(reward: Reward) -> bool:
    """Whether the alarm of exploits watches a reward: its own rules alone are not."""
    parts = read_mixture(reward).parts
    measured = find_measured(parts)
    if parts:
        functions = any(_has_function(reward, part) for part in parts if part not in measured)
    else:
        functions = any(rules.function for rules in rules_of(reward))
    return bool(judges_of(reward) or models_of(reward) or functions)


def _has_function(reward: Reward, part: MixPart) -> bool:
    """Whether a part of a mixture is scored by somebody's function, its own or the run's."""
    return part.kind == "rule" and rule_settings(reward, part).function is not None


class Watched(NamedTuple):
    """A part of a mixture that may be exploited, and the rule that is a second opinion about it."""

    part: str
    rule: str
    is_judge: bool


def find_measured(parts: Sequence[MixPart]) -> list[MixPart]:
    """Return the rules that pay nothing, and that no other part waits for: second opinions."""
    gates = {part.gate.part for part in parts if part.gate is not None}
    return [p for p in parts if p.kind == "rule" and not p.weight and p.name not in gates]


def find_watched(reward: Reward) -> Watched | None:
    """Return what of a mixture a rule watches: a judge, or with a measured rule another part.

    None without both, or if that part does not pay most: what pays less may rise honestly while
    the rule does not. Built-in rules pay beside a judge. A measured rule comes before one that
    pays.
    """
    parts = read_mixture(reward).parts
    measured, judges = find_measured(parts), [part for part in parts if part.kind == "judge"]
    rules = measured or [part for part in parts if part.kind == "rule"]
    gameable = [p for p in parts if p.kind != "rule" or _has_function(reward, p)]
    others = [p for p in gameable if measured and p.kind in ("model", "rule")]
    paying = [p for p in (gameable if judges else parts) if p not in rules]
    watched = max(judges or others, key=lambda part: part.weight, default=None)
    if not rules or watched is None or 2 * watched.weight <= sum(abs(p.weight) for p in paying):
        return None
    return Watched(watched.name, rules[0].name, bool(judges))


def describe_reward(reward: Reward) -> str:
    """Return what scores the responses, such as `judge qwen-plus, rule gsm8k`."""
    sources = [f"judge {judge.settings.model}" for judge in judges_of(reward)]
    sources += [f"reward model {model.settings.path}" for model in models_of(reward)]
    sources += [
        f"function {rule.function}" if rule.function else f"rule {rule.rule or 'of each row'}"
        for rule in rules_of(reward)
    ]
    if any(part.kind == "environment" for part in read_mixture(reward).parts):
        sources.append("the environment")
    return ", ".join(sources)
