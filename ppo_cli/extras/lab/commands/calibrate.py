"""`ppo reward calibrate`: compares a reward's scores with labels from people."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

from ppo_cli.cli.flags import Arguments, add_command, make_flag
from ppo_cli.cli.help import App
from ppo_cli.cli.reward import (
    COMMON_FLAGS,
    RESPONSE_KEY,
    RESPONSES_FILE,
    print_reward_result,
    resolve_settings,
)
from ppo_cli.cli.reward_tables import (
    COST_COLUMNS,
    Facts,
    Pairs,
    cost_rows,
    count_rows,
    format_parts,
    format_section,
    parts_table,
)
from ppo_cli.cli.screen import format_number, titled_table
from ppo_cli.config.mixture import judges_of
from ppo_cli.errors import ConfigError, DataError, Interrupted, plural

app = App()
# Columns of the table about criteria: key -> heading.
CRITERIA = {
    "rows": "rows", "mean": "mean", "with the rest": "with the rest",
    "with the label": "with the label", "labelled": "labelled", "agree": "agree",
    "kappa": "kappa", "credited too much": "too kind", "credited too little": "too harsh",
}  # fmt: skip


def calibrate(arguments: Arguments) -> None:
    """Compare a reward's scores with labels from people."""
    config, screen = resolve_settings(arguments)
    cascade = any(judge.settings.cascade.model for judge in judges_of(config.reward))
    if not (arguments.extras["labels"] or arguments.extras["criteria_labels"] or cascade):
        raise ConfigError("Name the column that holds the labels with --labels COLUMN.")
    from ppo_cli.extras.lab.calibrate import calibrate as run_calibration
    from ppo_cli.extras.lab.calibrate import calibrate_cascade
    from ppo_cli.extras.lab.cascade import ask_both
    from ppo_cli.extras.lab.criteria import LABEL_VALUE, add_label_values, read_marks
    from ppo_cli.extras.lab.places import read_place_marks
    from ppo_cli.scoring.rows import read_labels, read_responses
    from ppo_cli.scoring.score import Callbacks, open_reward, resume_advice

    responses = read_responses(
        str(arguments.extras["file"]),
        **config.data.keys,
        response_key=arguments.extras["response_key"],
        labels=arguments.extras["labels"],
    )
    # Labels of criteria add up to a label of the response, if it has none.
    labels, marked = arguments.extras["labels"], arguments.extras["criteria_labels"]
    if marked:  # also of the criteria that only validations ask about
        responses = responses.as_validation()
    marks = read_marks(responses, marked, config.reward) if marked else {}
    if marked and not labels:
        labels, responses = LABEL_VALUE, add_label_values(responses, marks, config.reward)
    placed = arguments.extras["place_labels"]
    place_marks = read_place_marks(responses, placed, config.reward) if placed else {}
    # Without labels the judge of a cascade takes their place.
    labelled = read_labels(responses, labels, arguments.extras["positive"]) if labels else None
    rows = labelled.rows if labelled else responses.rows
    if labelled and len({*labelled.values}) == 1:  # before the judge is paid
        raise DataError(
            f"{responses.source}: all labels are equal ({plural(len(rows), 'row')}), so there is "
            f"nothing to compare scores with. Add rows with another label (--labels {labels})."
        )
    repeat = int(arguments.extras["repeat"])
    with closing(screen):
        screen.note_all([*responses.notes, *(labelled.notes if labelled else ())])
        prompts = [row.rollout.prompt for row in rows]
        both = ask_both(config.reward)
        with open_reward(both, prompts, Callbacks(note=screen.note)) as reward:
            if labelled is None:
                result = calibrate_cascade(reward, config.reward, rows, screen=screen)
            else:
                result = run_calibration(
                    reward, config.reward, labelled, repeat=repeat, screen=screen, marks=marks,
                    place_marks=place_marks,
                )  # fmt: skip
    print_reward_result(arguments, {"file": responses.source, **result}, format_calibration)
    if result["stopped"]:
        raise Interrupted(f"{result['stopped']} {resume_advice(config.reward)}")


def format_calibration(result: Facts) -> list[str]:
    """Return the result of `ppo reward calibrate` as lines: tables, then advice."""
    counts, spent = count_rows(result), cost_rows(result["spent"])
    cascades = [line for facts in result["cascade"].values() for line in _format_cascade(facts)]
    if "labels" not in result:
        return [*titled_table("Rows", [*counts, *spent]), *cascades]
    lines = titled_table("Rows", [*counts, ("labels", result["labels"]), *spent])
    agreement = list_estimate_rows(result["agreement"])
    lines += format_section("Compared with the labels (95 % interval)", agreement)
    for name, facts in result["parts"].items():
        if "agreement" in facts:
            lines += format_section(f"Part {name} alone", list_estimate_rows(facts["agreement"]))
    lines += format_parts(result)
    if result["criteria"]:
        lines += ["", *parts_table("Criteria (credits from 0 to 1)", result["criteria"], CRITERIA)]
    if places := result.get("places"):
        share = f"{places['wrong']:.0%} of {plural(places['pairs'], 'pair')}"
        row = [("in the wrong order", f"{share}, {plural(places['responses'], 'response')}")]
        lines += format_section("Places (pieces with other labels)", row)
    lines += format_section(
        "Bias (rank correlation with the score)", list_estimate_rows(result["bias"])
    )
    # How much the verdicts vary when the judge is asked again.
    if result["repeated"] is not None:
        lines += format_section("Repeated verdicts", _repeated_rows(result["repeated"]))
    for name, facts in result["parts"].items():
        if facts.get("repeated") is not None:
            lines += format_section(
                f"Repeated verdicts of {name}", _repeated_rows(facts["repeated"])
            )
    lines += cascades
    # What a run would pay; cached verdicts cost nothing, so nothing can be extrapolated from them.
    paid = {word: result["per_1000"].get(key) for key, word in COST_COLUMNS.items()}
    costs = [
        (word, f"${value:.3f}" if word == "cost" else format_number(value))
        for word, value in {"seconds": result["per_1000"].get("seconds"), **paid}.items()
        if value is not None
    ]
    unknown = [("unknown", "every verdict came from the cache")]
    lines += format_section("For 1,000 responses", costs if result["per_1000"] else unknown)
    return [*lines, "", "Advice", *(f"  - {line}" for line in result["advice"])]


def _format_cascade(facts: Facts) -> list[str]:
    """Return what a cascade's best rule keeps and saves, and the flags that set it."""
    if "why" in facts:
        return format_section("Cascade", [("not measured", facts["why"])])
    rows = [*list_estimate_rows(facts["figures"])]
    if (cost := facts["cost"]) is not None:
        alone, cascade = cost["judge_usd"], cost["cascade_usd"]
        saved = f"${cascade:.3f} instead of ${alone:.3f}: {1 - cascade / alone:.0%} less"
        rows.append(("cost of 1,000 responses", saved))
    others = plural(facts["measured_on"], "row")
    title = f"Cascade: agreement on {others} that the rule was not chosen on (95 % interval)"
    ranks = [
        (name, ", ".join(f"{measure} {format_number(value)}" for measure, value in by.items()))
        for name, by in facts["ranks"].items()
    ]
    lines = [*format_section(title, rows), *format_section("Order of the scores", ranks)]
    return [*lines, "", f"Set {facts['flags']}"]


def list_estimate_rows(estimates: Mapping[str, Facts]) -> Pairs:
    """Return table rows of estimates with their intervals; without a value they say why."""
    rows = []
    for name, facts in estimates.items():
        if facts["value"] is None:
            rows.append((name, f"- ({facts['why']})"))
            continue
        interval = ""
        if facts["low"] is not None:
            interval = f"  [{format_number(facts['low'])}, {format_number(facts['high'])}]"
        # Agreement with yes-no labels depends on a threshold: show it.
        at = f"  at {format_number(facts['at'])}" if facts.get("at") is not None else ""
        rows.append((name, f"{format_number(facts['value'])}{interval}{at}"))
    return rows


def _repeated_rows(facts: Facts) -> Pairs:
    """Return table rows on how much repeated verdicts on the same rows differ."""
    return [
        ("rows", f"{facts['rows']:,} x {facts['verdicts']}"),
        ("exactly the same", f"{facts['same']:.0%} of pairs"),
        ("mean difference", format_number(facts["mean_gap"])),
        ("largest difference", format_number(facts["largest_gap"])),
    ]


add_command(
    app, calibrate, "ppo reward calibrate answers.jsonl --labels good --use_api_reward",
    [
        RESPONSES_FILE,
        make_flag("labels", str, None, "Column that holds the labels.", "COLUMN"),
        make_flag("criteria_labels", str, None, "Labels of criteria: {name: true}.", "COLUMN"),
        make_flag(
            "place_labels", str, None, "Labels of the pieces of --rm_place: [1, 0, 1].", "COLUMN"
        ),
        make_flag("positive", str, None, "Which of two labels means good.", "VALUE"),
        make_flag("repeat", int, 3, "Fresh verdicts on each of up to 50 rows; 0: none.", "N"),
        RESPONSE_KEY,
        *COMMON_FLAGS,
    ],
    ("reward.",),
)  # fmt: skip
