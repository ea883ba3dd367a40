"""Why nothing scored: from a step whose scores are all zero or failed to a likely cause."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppo_cli.errors import ppo, shorten
from ppo_cli.records import Scored
from ppo_cli.rewards.rules import RULES
from ppo_cli.rewards.values import accepted

MOST = 0.5
LONGEST_GOLD = 100


@dataclass(frozen=True)
class Commands:
    """Commands that look into a run, as they are typed."""

    show: str
    render: str
    check: str


def commands(run: Path = Path("outputs"), train_files: Sequence[str] = ("embedded",)) -> Commands:
    """Return the commands that look into the run in this folder and at its prompts."""
    folder, files = shlex.quote(str(run)), [shlex.quote(name) for name in train_files]
    config = shlex.quote(str(run / "config.yaml"))
    return Commands(
        show=ppo(f"show {folder} --worst 20"),
        render=ppo(f"prompts render {files[0]} --config {config}"),
        check=ppo(f"data check {' '.join(files)}"),
    )


def explain_no_reward(scored: Sequence[Scored], look: Commands | None = None) -> str | None:
    """Name the likely cause in one paragraph with an example; None when something scored."""
    if not scored or any(response.score.value for response in scored):
        return None
    look = look or commands()
    failed = [response for response in scored if response.score.value is None]
    if _most(failed, scored):
        cause, example = _failed(failed, len(scored), look)
    else:
        cause, example = _zero(scored, look)
    return f"{cause} {_example(example)}"


def _most(part: Sequence[Scored], everything: Sequence[Scored]) -> bool:
    return len(part) > MOST * len(everything)


def _failed(failed: Sequence[Scored], total: int, look: Commands) -> tuple[str, Scored]:
    reason, count = Counter(response.score.failure for response in failed).most_common(1)[0]
    example = next(response for response in failed if response.score.failure == reason)
    message = reason.removesuffix(".")
    error = message.removeprefix("raised ")
    message = f"{': ' if error == message else ' with '}{error}"
    if count == total:
        text = f"All {total} responses failed{message}."
    else:
        count_note = "" if count == len(failed) else f", {count} of them"
        text = f"{len(failed)} of {total} responses failed{count_note}{message}."
    return f"{text}{_mend_failure(reason, look)}", example


def _mend_failure(reason: str, look: Commands) -> str:
    if "no rule for data_source" in reason:
        return " Give --reward_function FILE:NAME, or --rule NAME for every row."
    if "ground_truth" in reason:
        return f" Check that column with `{look.check}`, or choose another --rule."
    if reason.startswith("timeout"):
        return " Make the function faster, or raise reward.timeout."
    if reason.startswith(("raised", "returned")):
        return f" Correct the reward function; `{look.show}` names the failure of each response."
    return ""


def _zero(scored: Sequence[Scored], look: Commands) -> tuple[str, Scored]:
    """All zero: empty replies, nothing extracted, a strange ground truth, or plainly wrong."""
    judged = [response for response in scored if response.score.value is not None]
    empty = [response for response in judged if not response.rollout.text.strip()]
    if _most(empty, judged):
        return (
            f"The reward is 0 because {len(empty)} of {len(judged)} responses are empty: the model "
            "ends at once. Check that it knows this chat template.",
            empty[0],
        )
    nothing = [response for response in judged if response.score.info.get("extracted", "") is None]
    if _most(nothing, judged):
        return _nothing_found(nothing, judged), nothing[0]
    strange = [response for response in judged if _gold_problem(response)]
    if _most(strange, judged):
        return (
            f"The reward is 0, likely for the ground_truth: {_gold_problem(strange[0])} in "
            f"{len(strange)} of {len(judged)} rows. Bring the answer alone into that column.",
            strange[0],
        )
    if any(response.score.reply or response.score.gated for response in judged):
        return (
            f"The judge gave the lowest score to all {len(judged)} responses. Its reasons are in "
            f"rollouts/ (`{look.show}`); see what it is asked with `{look.render}`.",
            judged[0],
        )
    if any(response.score.mixture for response in judged):
        return _mixture_of_nothing(judged, look), judged[0]
    if not any("rule" in response.score.info for response in judged):
        return (
            f"The reward function gave 0 to all {len(judged)} responses. Try it by hand on the "
            "example, and see that data_source and ground_truth are what it expects.",
            judged[0],
        )
    return (
        f"The reward is 0 although an answer was found in {len(judged) - len(nothing)} of "
        f"{len(judged)} responses: all are wrong. The task may be too hard for this model: try "
        "easier prompts, more samples (--rollout_n) or a stronger model.",
        next(response for response in judged if response not in nothing),
    )


def _mixture_of_nothing(judged: Sequence[Scored], look: Commands) -> str:
    """Scaled by mean and spread, parts that never vary come to 0."""
    same = [
        f"{name} ({values.pop():g})"
        for name in judged[0].score.parts
        if len(values := {response.score.parts[name].raw for response in judged} - {None}) == 1
    ]
    return (
        f"The mixture comes to 0 for all {len(judged)} responses. Parts that say the same of each: "
        f"{', '.join(same) or 'none'}. Look at the parts with `{look.show}`, and try each alone."
    )


def _nothing_found(nothing: Sequence[Scored], judged: Sequence[Scored]) -> str:
    names = Counter(str(response.score.info.get("rule", "")) for response in nothing)
    name = names.most_common(1)[0][0]
    rule = RULES.get(name)
    looks_for = f"the rule {name} looks for {rule.looks_for}" if rule else "nothing was extracted"
    cut = sum(response.rollout.finish_reason == "length" for response in nothing)
    if cut > MOST * len(nothing):
        mend = (
            f"{cut} of them were cut off at --max_response_length before an answer: raise it, "
            "or ask for shorter replies."
        )
    else:
        mend = "Ask for that form in the prompts, or choose a rule that fits with --rule NAME."
    return (
        f"The reward is 0 because extraction found nothing in {len(nothing)} of {len(judged)} "
        f"responses: {looks_for}. {mend}"
    )


def _gold_problem(response: Scored) -> str:
    """Say what is odd about a ground truth that its rule compares with an answer."""
    golds = accepted(response.rollout.prompt.ground_truth)
    if not golds:
        return ""
    rule = RULES.get(str(response.score.info.get("rule", "")))
    if rule and rule.has_answer and len(golds[0]) > LONGEST_GOLD:
        return f"it holds {len(golds[0])} characters, a whole text rather than an answer,"
    return ""


def _example(response: Scored) -> str:
    prompt = response.rollout.prompt
    extracted = response.score.info.get("extracted")
    shown = (
        f", extracted {_cut(str(extracted))!r}" if extracted is not None else ", extracted nothing"
    )
    return (
        f"Example ({prompt.data_source or 'no data_source'}): prompt {_cut(prompt.text)!r}, "
        f"response {_cut_middle(response.rollout.text)!r}, ground_truth "
        f"{_cut(str(prompt.ground_truth))!r}{shown if 'extracted' in response.score.info else ''}."
    )


def _cut(text: str, max_chars: int = 120) -> str:
    return shorten(" ".join(text.split()), max_chars)


def _cut_middle(text: str, max_chars: int = 160) -> str:
    """Keep the beginning and the end, where answers stand."""
    plain = " ".join(text.split())
    if len(plain) <= max_chars:
        return plain
    return f"{plain[: max_chars // 3]} … {plain[-(max_chars * 2 // 3) :]}"
