"""`ppo prompts`: shows judge prompts and the exact request to a judge, and drafts criteria."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import replace
from typing import Any

import typer

from ppo_cli.cli.flags import Arguments, add_command, make_argument, make_flag, make_switch
from ppo_cli.cli.help import App
from ppo_cli.cli.screen import align_columns, make_screen, print_result
from ppo_cli.config.models.bundled import prompt_files
from ppo_cli.errors import ConfigError, Interrupted, RewardError, plural
from ppo_cli.paths import user_path

app = App(
    help="Show judge prompts, render the request for a data row, or have criteria drafted.",
    epilog="ppo prompts show math",
)
# Settings that the help of `render` and `rubric` lists.
SHOWN_FLAGS = ("reward.api.", "data.prompt_key", "data.answer_key", "data.reward_fn_key")
SEPARATOR = "─" * 30
ROWS_FILE = make_argument("file", "FILE", "Data rows, or `embedded`.", required=True)


@app.command("list", epilog="ppo prompts list")
def list_prompts(
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the bundled judge prompts with their version and scale."""
    from ppo_cli.rewards.judge.prompt import load_preset, preset_names

    # JSON has everything, the table only what helps to choose.
    prompts = [load_preset(name) for name in preset_names()]
    rows = [
        {
            "name": t.name, "version": t.version, "scale": str(t.scale),
            "variables": list(t.variables), "cases": len(t.cases), "description": t.description,
        }
        for t in prompts
    ]  # fmt: skip
    cells = [[t.name, f"v{t.version}", f"{t.scale!s:<5}", t.description] for t in prompts]
    print_result(rows, lambda: "\n".join(align_columns(cells, left_aligned=4)), as_json=as_json)


@app.command(epilog="ppo prompts show math > mine.yaml")
def show(name: str = typer.Argument(help="Name of a judge prompt.")) -> None:
    """Print the file of a judge prompt with its comments, as a start for your own."""
    from ppo_cli.rewards.judge.prompt import preset_path

    print(preset_path(name).read_text(encoding="utf-8"), end="")


def render(arguments: Arguments) -> None:
    """Show the exact request to a judge for one data row, without sending it."""
    resolved = arguments.resolve()
    from ppo_cli.extras.lab.prompts import provider_call, render_row

    # Fill the judge prompt with the row and the response.
    config = resolved.config
    file = prompt_files([str(arguments.extras["file"])], "train")[0]
    shown = render_row(
        config.reward.api,
        file,
        int(arguments.extras["row"]),
        response=arguments.extras["response"],
        **config.data.keys,
    )
    # The request as the provider's SDK receives it.
    facts: dict[str, Any] = {
        "prompt": shown.template.name,
        "version": shown.template.version,
        "scale": str(shown.template.scale),
        "type": config.reward.api.type,
        "model": config.reward.api.model,
        "max_tokens": shown.question.max_tokens,
        "answered_without_a_call": shown.gated,
        "system": shown.question.system,
        "user": shown.question.user,
        "request": provider_call(config.reward.api, shown.question),
    }
    print_result(facts, lambda: format_request(facts), as_json=arguments.extras["json"])


def rubric(arguments: Arguments) -> None:
    """Let a judge draft criteria from questions and reference answers, for you to edit."""
    if not arguments.extras["out"]:
        raise ConfigError("Name the file for the drafts with --out FILE.")
    # This command always uses a judge, so --use_api_reward is not needed.
    judged = {"reward.api.enable": ("true", "ppo prompts rubric"), **arguments.flags}
    # A draft is free text: settings for scores and votes do not apply.
    plain = {"mode": "text", "rubric": None, "votes": 1, "max_votes": 1}
    resolved = replace(arguments, flags=judged).resolve()
    config = resolved.amend({f"reward.api.{name}": value for name, value in plain.items()}).config
    from ppo_cli.extras.lab.prompts import draft_for_run, draft_rows
    from ppo_cli.scoring.rows import check_out, read_responses

    file = prompt_files([str(arguments.extras["file"])], "train")[0]
    responses = read_responses(file, response_key=None, **config.data.keys)
    out = user_path(str(arguments.extras["out"]))
    check_out(out, file)
    api, max_criteria = config.reward.api, int(arguments.extras["criteria"])
    # One rubric for all rows, or one for each row.
    for_whole_run = bool(arguments.extras["one"])
    draft = draft_for_run if for_whole_run else draft_rows
    with closing(make_screen(sys.stderr)) as screen:
        result = {
            **draft(api, responses.rows, out, max_criteria, screen),
            "out": str(out),
            "one": for_whole_run,
        }
    print_result(result, lambda: format_draft_summary(result), as_json=arguments.extras["json"])
    if result["stopped"]:
        raise Interrupted(
            f"{result['stopped']} Run the same command again: finished drafts are kept."
        )
    if result["failed"] and not result["written"]:
        raise RewardError("No draft could be parsed; try a stronger --rm_model.")


def format_draft_summary(result: dict[str, Any]) -> str:
    """Return the result of drafting as text: failures, cost, and the flag that uses the drafts."""
    cost = "" if result["cost_usd"] is None else f", ${result['cost_usd']:.4f}"
    usage = f"{plural(result['calls'], 'call')}, {plural(result['tokens'], 'token')}{cost}"
    lines = [f"{failure['row']}: left out, {failure['why']}" for failure in result["failed"]]
    if not result["written"]:
        return "\n".join([*lines, f"{usage}; no draft can be used, and nothing was written."])
    written = f"{plural(result['written'], 'draft')} written to {result['out']}"
    lines.append(f"{usage}; {written}. Edit before use:")
    use = result["out"] if result["one"] else "extra_info.rubric"
    return "\n".join([*lines, f"  --rm_rubric {use}"])


def format_request(facts: dict[str, Any]) -> str:
    """Return a rendered request as text: parameters, system prompt and user prompt."""
    model, sent = facts["model"] or "no model chosen", facts["request"]
    lines = [
        f"Judge prompt {facts['prompt']} v{facts['version']}, scale {facts['scale']}, for "
        f"{facts['type']} ({model})"
    ]
    if facts["answered_without_a_call"]:
        lines.append(
            f"This response gets the lowest score (--rm_gate), without a call: "
            f"{facts['answered_without_a_call']}."
        )
    # Long texts follow below the parameters.
    texts = {facts["system"]: "(below)", facts["user"]: "(below)"}
    parameters = json.dumps(_replace_texts(sent["arguments"], texts), ensure_ascii=False, indent=2)
    where = f"{sent['endpoint']}  {sent['method']}  mode {sent['mode']}"
    lines += [f"{SEPARATOR} request", where, parameters]
    lines += [
        f"{SEPARATOR} system",
        facts["system"] or "(none)",
        f"{SEPARATOR} user",
        facts["user"],
    ]
    return "\n".join(lines)


def _replace_texts(value: Any, texts: dict[str, str]) -> Any:
    """Return a nested value in which each string that is a key of `texts` is replaced."""
    if isinstance(value, dict):
        return {key: _replace_texts(item, texts) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_texts(item, texts) for item in value]
    return texts.get(value, value) if isinstance(value, str) and value else value


add_command(
    app,
    render,
    "ppo prompts render rows.jsonl --row 3 --rm_prompt_preset math",
    [
        ROWS_FILE,
        make_flag("row", int, 1, "Line or row of the file.", "INTEGER", min=1),
        make_flag("response", str, None, "Response, if the row has no column.", "TEXT"),
        make_switch("json", "Print JSON."),
    ],
    SHOWN_FLAGS,
)
add_command(
    app,
    rubric,
    "ppo prompts rubric rows.jsonl --out rubrics.jsonl --rm_model qwen-plus",
    [
        ROWS_FILE,
        make_flag("out", str, None, "Rows with extra_info.rubric; with --one a YAML file.", "FILE"),
        make_switch("one", "One rubric for the whole run, from some of the rows."),
        make_flag("criteria", int, 8, "Maximum criteria.", "N", min=1, max=20),
        make_switch("json", "Print JSON."),
    ],
    SHOWN_FLAGS,
)
