"""A walk over made-up run folders: no headline contradicts a figure on its own page.

The rules are the sentences of docs/page.md, not the code that writes the lines.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from ppo_cli.report.page.run_data import RunData

NUMBER = r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?"
RUNS = 200


def make_folder(folder: Path, dice: random.Random) -> None:
    """A run of some shape: rewards, KL, clips and validations that rise, fall or stand still."""
    steps, every = dice.randint(1, 14), dice.choice([0, 1, 2, 5])
    trends = {
        "reward_mean": (dice.random(), dice.choice([0.0, 0.03, -0.03, 0.3])),
        "kl_divergence": (dice.choice([0.0, 0.02, 0.09]), dice.choice([0.0, 0.004, 0.05])),
        "clip_fraction": (dice.choice([0.0, 0.15, 0.5]), 0.0),
        "entropy": (1.0, dice.choice([0.0, -0.08])),
        "score/failed_share": (dice.choice([0.0, 0.0, 0.2]), dice.choice([0.0, 0.02])),
        "response_length/clip_ratio": (dice.choice([0.0, 0.7]), 0.0),
        "environment/tool_error_share": (dice.choice([0.0, 0.3]), 0.0),
        "rubric/polite": (dice.choice([0.0, 0.5, 1.0]), 0.0),
    }
    names = [n for n in trends if n == "reward_mean" or dice.random() < 0.6]
    right = dice.randint(2, 14)
    drift = dice.choice([-1, 0, 1, 3])
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"trainer: {{total_training_steps: {steps}}}\ndata: {{val_files: [v.jsonl]}}\n"
        f"reward: {{{dice.choice(['function: f.py', 'rule: exact'])}}}\n"
    )
    lines: list[dict[str, Any]] = []
    for step in range(steps + 1):
        line: dict[str, Any] = {"step": step}
        if step:
            noise = dice.choice([0.0, 0.02])
            for name in names:
                start, slope = trends[name]
                line[name] = max(0.0, start + slope * step + dice.gauss(0, noise))
            line["score/std"] = 0.3
        if every and (step % every == 0 or step == steps):
            count = min(max(right + drift * len(lines) // 2 + dice.randint(-1, 1), 0), 16)
            scores = [float(row < count) for row in range(16)]
            dice.shuffle(scores)
            line |= {"val/reward_mean": fmean(scores), "val/accuracy": fmean(scores)}
            rows = [json.dumps({"uid": f"v{i}", "score": score}) for i, score in enumerate(scores)]
            (folder / "rollouts" / f"val_{step:06d}.jsonl").write_text("\n".join(rows) + "\n")
        if len(line) > 1:
            lines.append(line)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in range(1, steps + 1):
        if dice.random() < 0.3:
            (folder / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)


def list_contradictions(page: dict[str, Any]) -> list[str]:
    """Return the figures of a page that its first lines contradict."""
    headline, wrong = "".join(text for text, _ in page["verdict"]), []
    steps, series = page["steps"], page["series"]
    scores = series.get("val/accuracy") or []
    validations = [(s, v) for s, v in zip(steps, scores, strict=False) if v is not None]
    rewards = [v for v in series["reward_mean"] if v is not None]
    # "Nothing to check" is said exactly when no finding holds in the last step.
    present = [span for span in page["findings"] if span["now"]]
    if ("Nothing to check." in headline) == bool(present):
        wrong.append("findings")
    wrong += [s["kind"] for s in present if s["text"].split(". ")[0].rstrip(".") not in headline]
    # Cards with a finding come first, and show no other.
    marked = [bool(card["findings"]) for card in page["cards"]]
    if marked != sorted(marked, reverse=True) or any(marked) > bool(present):
        wrong.append("cards")
    # A KL that stays above the healthy range of its card is said, and none within it.
    kl = next((card for card in page["cards"] if card["lines"][0][0] == "kl_divergence"), None)
    if kl and not any(span["kind"] == "collapsed" for span in present):
        values = [value for value in series["kl_divergence"] if value is not None]
        high, told = kl["band"][1], any(span["kind"] == "kl_high" for span in present)
        wrong += ["kl"] * (told != (min(values[-2:]) > high and len(values) > 1))
    # The measures are the first and the last figure, and the word follows from them.
    first, last = (validations[0][1], validations[-1][1]) if validations else (None, None)
    if match := re.search(rf"validation accuracy ({NUMBER}) to ({NUMBER})", headline):
        shown = [float(match[1]), float(match[2])]
        wrong += ["validation"] * (shown != pytest.approx([first, last], abs=0.006))
    few = max(1, len(rewards) // 10)
    change = fmean(rewards[-few:]) - fmean(rewards[:few])
    if len(validations) > 1:
        change = last - first
    wrong += ["learned"] * (headline.startswith("Learned") and change <= 0)
    wrong += ["got worse"] * (headline.startswith("Got worse") and change >= 0)
    # The step to keep has the highest validation; whether the gain is real follows from it.
    (_, keep, _), (_, gain, _) = page["answers"]
    if len(validations) > 1:
        best = max(value for _, value in validations)
        match = re.match(rf"step (\d+): validation accuracy ({NUMBER})", keep)
        assert match, keep
        wrong += ["step to keep"] * (dict(validations)[int(match[1])] != best)
        saved = int(match[1]) in page["marks"]["checkpoints"]
        wrong += ["saved"] * (("saved as checkpoint" in keep) != saved)
        wrong += ["gain"] * (gain.startswith("yes") and best <= first)
        if interval := re.search(rf"interval ([+]?{NUMBER}) to ([+]?{NUMBER})", gain):
            low, high = float(interval[1]), float(interval[2])
            chance = gain.startswith("it may be chance")
            wrong += ["chance"] * (chance != (low <= 0 <= high))
    return wrong


@pytest.mark.slow
def test_no_headline_contradicts_a_figure_on_its_page(tmp_path: Path) -> None:
    words, contradictions = set[str](), {}
    for number in range(RUNS):
        folder = tmp_path / str(number)
        make_folder(folder, random.Random(number))
        page = RunData(folder, "run").read()
        words.add(page["verdict"][0][0])
        if wrong := list_contradictions(page):
            headline = "".join(text for text, _ in page["verdict"])
            contradictions[number] = (wrong, headline, page["answers"])
    assert contradictions == {}
    assert {"Learned: ", "Got worse: ", "No clear change: "} <= words
