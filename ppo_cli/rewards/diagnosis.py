"""Explains a step in which nothing scored: names the likely cause of zero or failed scores."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppo_cli.errors import ppo, shorten
from ppo_cli.records import Scored
from ppo_cli.rewards.rules import RULES
from ppo_cli.rewards.values import accepted_answers

MAJORITY = 0.5
MAX_GOLD_CHARS = 100  # a longer ground truth is hardly an answer


@dataclass(frozen=True)
class Commands:
    """Shell commands that inspect a run."""

    show: str
    render: str
    check: str


def commands(run: Path = Path("outputs"), train_files: Sequence[str] = ("embedded",)) -> Commands:
    """Return the commands that inspect the run in this folder and its prompts."""
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
    # Failures explain a step better than zeros, if they are the majority.
    failed = [response for response in scored if response.score.value is None]
    if _is_majority(failed, scored):
        cause, example = _explain_failures(failed, len(scored), look)
    else:
        cause, example = _explain_zeros(scored, look)
    return f"{cause} {_format_example(example)}"


def _is_majority(part: Sequence[Scored], everything: Sequence[Scored]) -> bool:
    return len(part) > MAJORITY * len(everything)


def _explain_failures(failed: Sequence[Scored], total: int, look: Commands) -> tuple[str, Scored]:
    """Return the most common failure with advice, and one response that has it."""
    # The most common failure, and one response with it.
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
    if example.rollout.failure:
        return f"{text} Correct the environment; its output is in logs/ of the run.", example
    return f"{text}{_advice_for(reason, look)}", example


def _advice_for(reason: str, look: Commands) -> str:
    """Return what to do about a failure of a reward function, "" for an unknown reason."""
    if "no rule for data_source" in reason:
        return " Give --reward_function FILE:NAME, or --rule NAME for every row."
    if "ground_truth" in reason:
        return f" Check that column with `{look.check}`, or choose another --rule."
    if reason.startswith("timeout"):
        return " Make the function faster, or raise reward.timeout."
    if reason.startswith(("raised", "returned")):
        return f" Correct the reward function; `{look.show}` names the failure of each response."
    return ""


def _explain_zeros(scored: Sequence[Scored], look: Commands) -> tuple[str, Scored]:
    """Return the cause of scores that are all 0, and an example."""
    judged = [response for response in scored if response.score.value is not None]
    # From the most specific cause to the most general one.
    empty = [response for response in judged if not response.rollout.text.strip()]
    if _is_majority(empty, judged):
        return (
            f"The reward is 0 because {len(empty)} of {len(judged)} responses are empty: the model "
            "ends at once. Check that it knows this chat template.",
            empty[0],
        )
    # `extracted` is None when a rule has found no answer, and missing for other rewards.
    nothing = [response for response in judged if response.score.info.get("extracted", "") is None]
    if _is_majority(nothing, judged):
        return _explain_no_answer(nothing, judged), nothing[0]
    strange = [response for response in judged if _gold_problem(response)]
    if _is_majority(strange, judged):
        return (
            f"The reward is 0, likely because of the ground_truth: {_gold_problem(strange[0])} in "
            f"{len(strange)} of {len(judged)} rows. Put only the answer into that column.",
            strange[0],
        )
    if any(response.score.reply or response.score.gated for response in judged):
        return (
            f"The judge gave the lowest score to all {len(judged)} responses. Its reasons are in "
            f"rollouts/ (`{look.show}`); see what it is asked with `{look.render}`.",
            judged[0],
        )
    if any(response.score.mixture for response in judged):
        return _explain_mixture(judged, look), judged[0]
    if not any("rule" in response.score.info for response in judged):
        return (
            f"The reward function gave 0 to all {len(judged)} responses. Try it by hand on the "
            "example, and check that data_source and ground_truth are what it expects.",
            judged[0],
        )
    return (
        f"The reward is 0 although an answer was found in {len(judged) - len(nothing)} of "
        f"{len(judged)} responses: all are wrong. The task may be too hard for this model: try "
        "easier prompts, more samples (--rollout_n) or a stronger model.",
        next(response for response in judged if response not in nothing),
    )


def _explain_mixture(judged: Sequence[Scored], look: Commands) -> str:
    """Return the message for a mixture that is 0 for all responses, or for its only part.

    It names parts with one value for all responses: scaling by mean and deviation makes them 0.
    """
    if len(judged[0].score.mixture) == 1:
        (name,) = judged[0].score.mixture
        return (
            f"The reward is 0 for all {len(judged)} responses; it is from {name} alone. Look at "
            f"them with `{look.show}`."
        )
    same = [
        f"{name} ({values.pop():g})"
        for name in judged[0].score.parts
        if len(values := {response.score.parts[name].raw for response in judged} - {None}) == 1
    ]
    return (
        f"The mixture is 0 for all {len(judged)} responses. Parts with one value for all of them: "
        f"{', '.join(same) or 'none'}. Look at the parts with `{look.show}`, and try each alone."
    )


def _explain_no_answer(nothing: Sequence[Scored], judged: Sequence[Scored]) -> str:
    """Return why the reward is 0 and what to do: the rule extracted nothing from responses."""
    names = Counter(str(response.score.info.get("rule", "")) for response in nothing)
    name = names.most_common(1)[0][0]
    rule = RULES.get(name)
    looks_for = f"the rule {name} looks for {rule.looks_for}" if rule else "nothing was extracted"
    # A response that was cut off had no chance to answer.
    cut = sum(response.rollout.finish_reason == "length" for response in nothing)
    if cut > MAJORITY * len(nothing):
        advice = (
            f"{cut} of them were cut off at --max_response_length before an answer: raise it, "
            "or ask for shorter replies."
        )
    else:
        advice = "Ask for that form in the prompts, or choose a rule that fits with --rule NAME."
    return (
        f"The reward is 0 because extraction found nothing in {len(nothing)} of {len(judged)} "
        f"responses: {looks_for}. {advice}"
    )


def _gold_problem(response: Scored) -> str:
    """Return what is wrong with a ground truth that its rule compares with an answer, or ''."""
    golds = accepted_answers(response.rollout.prompt.ground_truth)
    if not golds:
        return ""
    rule = RULES.get(str(response.score.info.get("rule", "")))
    if rule and rule.has_answer and len(golds[0]) > MAX_GOLD_CHARS:
        return f"it has {len(golds[0])} characters, a text rather than an answer,"
    return ""


def _format_example(response: Scored) -> str:
    """Return a line with prompt, response, ground truth and extracted answer of a response."""
    prompt, info = response.rollout.prompt, response.score.info
    note = ""
    if "extracted" in info:
        extracted = info["extracted"]
        shown = "nothing" if extracted is None else repr(_shorten_line(str(extracted)))
        note = f", extracted {shown}"
    return (
        f"Example ({prompt.data_source or 'no data_source'}): "
        f"prompt {_shorten_line(prompt.text)!r}, "
        f"response {_shorten_middle(response.rollout.text)!r}, "
        f"ground_truth {_shorten_line(str(prompt.ground_truth))!r}{note}."
    )


def _shorten_line(text: str) -> str:
    return shorten(" ".join(text.split()), 120)


def _shorten_middle(text: str) -> str:
    """Cut out the middle: answers are at the end of a response."""
    plain = " ".join(text.split())
    return plain if len(plain) <= 160 else f"{plain[:53]} … {plain[-106:]}"
