"""What the parts of a mixture must agree on: weights, scalings, gates, and their sources."""

from __future__ import annotations

from collections.abc import Iterator

from ppo_cli.config.keys import Clash
from ppo_cli.config.mixture import (
    PARTS,
    SCALINGS,
    MixPart,
    Mixture,
    has_mixture,
    model_settings,
    read_mixture,
)
from ppo_cli.config.reward_schema import Reward
from ppo_cli.config.schema import Config
from ppo_cli.errors import did_you_mean, ppo


def mixture_clashes(config: Config) -> Iterator[Clash]:
    """Return everything that is wrong with a mixture."""
    reward = config.reward
    if reward.composite.enable and not has_mixture(reward):
        yield Clash(
            ("reward.composite.enable",),
            "reward.composite.enable is on, but the mixture has no parts: add --reward "
            "judge:0.7 --reward rule:0.3, or composite weights.",
        )
    found = read_mixture(reward)
    yield from found.clashes
    for part in found.parts:
        yield from _scaling(part, found, config.rollout.n)
        yield from _source(part, found, reward)
    yield from _gates(found)
    yield from _weights(found)
    yield from _unheard(found, reward)


def mixture_remarks(reward: Reward) -> list[str]:
    """Return what does not stop a mixture, but may surprise."""
    parts = read_mixture(reward).parts
    raw = [p.name for p in parts if p.kind == "model" and p.scaling == "none" and p.clip is None]
    said = []
    if raw and len(parts) > 1:
        said.append(
            f"{', '.join(raw)}: scores of a reward model have no fixed scale, and with scaling "
            "none they may dominate the other parts; leave the scaling out (zscore), or use affine "
            "or sigmoid."
        )
    either = [word for word in ("rm_score", "model_score") if word in reward.composite.weights]
    if either and not any(part.kind == "model" for part in parts):
        said.append(
            f"No reward model is named, so {either[0]} is the judge's score; --reward_model PATH "
            "takes a reward model."
        )
    return said


def _scaling(part: MixPart, found: Mixture, n: int) -> Iterator[Clash]:
    key, way = f"{PARTS}.{part.name}", SCALINGS[part.scaling]
    given = [word for word in ("mean", "std") if getattr(part, word) is not None]
    if way.needed and len(given) < len(way.own):
        yield Clash(
            (f"{key}.scaling",),
            f"part {part.name} is scaled by {part.scaling}, which needs mean and std ({key}.mean, "
            f".std): `{ppo('reward score')}` and `{ppo('reward calibrate')}` print them, and "
            f"`{ppo('reward fit')}` writes them to fit.json.",
        )
    if given and not way.own:
        takers = " and ".join(name for name, other in SCALINGS.items() if other.own)
        yield Clash(
            tuple(f"{key}.{word}" for word in given),
            f"{key}: {' and '.join(given)} are for scaling {takers}, not for {part.scaling}, which "
            f"needs none; set {key}.scaling=affine, or leave them out.",
        )
    if way.grouped and n < 2:
        yield Clash(
            (f"{key}.scaling", "rollout.n"),
            f"part {part.name} is scaled by {part.scaling}, which compares several responses to a "
            f"prompt, but rollout.n is {n}. Use --rollout_n 4, or scaling zscore.",
        )


def _source(part: MixPart, found: Mixture, reward: Reward) -> Iterator[Clash]:
    if part.kind == "model" and model_settings(reward, part).path is None:
        yield Clash(
            found.told[part.name],
            f"part {part.name} is a reward model, and none is named: --reward_model PATH, or "
            f"{PARTS}.{part.name}.model.path.",
        )


def _gates(found: Mixture) -> Iterator[Clash]:
    names = list(found.told)
    opens: dict[str, str] = {}
    for part in found.parts:
        key, condition = f"{PARTS}.{part.name}.only_if", part.gate
        if condition is None:
            continue
        if condition.part not in names or condition.part == part.name:
            yield Clash((key,), _stranger(key, part.name, condition.part, names))
        else:
            opens[part.name] = condition.part
    if circle := _circle(opens):
        yield Clash(
            tuple(f"{PARTS}.{name}.only_if" for name in circle[:-1]),
            f"the gates go in a circle: {' waits for '.join(circle)}; take one only_if out.",
        )


def _stranger(key: str, own: str, other: str, names: list[str]) -> str:
    if other == own:
        return f"{key}: a part cannot wait for its own score; name another one."
    others = [name for name in names if name != own]
    near = did_you_mean(other, others)
    return f"{key}: there is no part '{other}'.{near} Parts: {', '.join(others) or 'no other'}."


def _circle(opens: dict[str, str]) -> tuple[str, ...]:
    """Return the names along a circle of gates, the first one again at the end; () for none."""
    for start in opens:
        path = [start]
        while (following := opens.get(path[-1])) is not None:
            if following in path:
                return (*path[path.index(following) :], following)
            path.append(following)
    return ()


def _weights(found: Mixture) -> Iterator[Clash]:
    """Refuse parts that count for nothing; one that opens another part's gate may."""
    gates = {part.gate.part for part in found.parts if part.gate is not None}
    for part in found.parts:
        if part.weight == 0 and part.name not in gates:
            yield Clash(
                found.told[part.name],
                f"part {part.name} has the weight 0 and would be scored for nothing; leave it out, "
                "or let another part wait for it with only_if.",
            )


def _unheard(found: Mixture, reward: Reward) -> Iterator[Clash]:
    """Refuse a judge that is switched on beside a mixture without one."""
    kinds = {part.kind for part in found.parts}
    if reward.api.enable and found.parts and not found.clashes and "judge" not in kinds:
        yield Clash(
            ("reward.api.enable",),
            "a judge is on (reward.api.enable), but the mixture has no part of kind judge, so it "
            "would score nothing; add --reward judge:0.5, or switch it off: --no_use_api_reward.",
        )
