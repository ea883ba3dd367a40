"""`ppo data`: checks prompt files before training."""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import typer

from ppo_cli.cli.flags import make_argument, make_flag, make_switch, set_parameters
from ppo_cli.cli.help import App, keep_group
from ppo_cli.cli.screen import make_screen, print_text, titled_table
from ppo_cli.config.models.bundled import EMBEDDED, model_folder, prompt_files
from ppo_cli.config.models.folder import check_folder, vocabulary_size
from ppo_cli.config.schema.algorithm import Actor
from ppo_cli.config.schema.run import Data
from ppo_cli.data_sets.files import RowError, RowProblem, group_problems
from ppo_cli.data_sets.row_sets import list_notes, load_rows
from ppo_cli.data_sets.rows import RowPrompt
from ppo_cli.data_sets.sources import check_present
from ppo_cli.errors import EXIT_USER, plural
from ppo_cli.planning.batches import describe_lowered_batches
from ppo_cli.report.tracker import Screen
from ppo_cli.run_folder.lines import to_json

if TYPE_CHECKING:
    from ppo_cli.data_sets.prompts import Renderer

EXAMPLES = 5  # rows that a finding lists
PERCENTILES = (50, 90, 95, 99)  # of lengths
SILENT = Screen()


@dataclass(frozen=True)
class Finding:
    """Number of rows with a property, and a description of the first few."""

    count: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """One prompt as the model reads it, with its place (file and row) and its answer."""

    place: str
    rendered: str
    tokens: int
    data_source: str
    ground_truth: Any


@dataclass(frozen=True)
class Report:
    """Result of a check of prompt files; lengths are None if there is no usable row."""

    files: tuple[str, ...]
    rows: int
    usable: int
    bad_rows: tuple[RowProblem, ...]
    data_sources: Mapping[str, int]
    missing_ground_truth: Finding
    duplicates: Finding
    characters: Mapping[str, int] | None
    tokens: Mapping[str, int] | None
    max_prompt_length: int
    overlong: Finding
    control_words: Finding
    unused_columns: tuple[str, ...]
    notes: tuple[str, ...]
    sample: Sample | None

    @property
    def bad(self) -> int:
        """Number of rows that cannot be used; a row with several problems counts once."""
        return len({problem.place for problem in self.bad_rows})

    def to_json(self, model: str | None) -> str:
        """Return the report as JSON text, with every bad row and what is printed about the rest."""
        shown = asdict(self) | {"stops": list_stops(self), "warnings": list_warnings(self, model)}
        shown["bad_rows"] = [
            {"file": p.place.file, p.place.unit: p.place.number, "column": p.column,
             "problem": p.message}
            for p in self.bad_rows
        ]  # fmt: skip
        return to_json(shown, indent=2)


def examine_files(
    sources: Sequence[str],
    renderer: Renderer,
    *,
    max_prompt_length: int,
    screen: Screen = SILENT,
    **keys: Any,
) -> Report:
    """Check every row of the files; raises DataError only for files that cannot be read.

    `keys` name the columns of the files, as those of `load_rows`.
    """
    import numpy as np

    from ppo_cli.data_sets.table import JoinedRows, find_control_rows

    # First the format of the rows, then the chat template and the tokenizer.
    with screen.phase("reading rows", None):
        sets = [load_rows(source, **keys) for source in sources]
        rows = JoinedRows(sets)
    total = len(rows)
    # Only numbers are kept of each row.
    characters, digests = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.uint64)

    def read_prompts() -> Iterator[Sequence[RowPrompt]]:
        end = 0
        for prompts in rows.prompts(np.ones(total, dtype=bool)):
            start, end = end, end + len(prompts)
            characters[start:end] = list(map(count_characters, prompts))
            digests[start:end] = list(map(digest_prompt, prompts))
            yield prompts

    counts: list[int | RowError] = []
    with screen.phase("checking prompts", total) as advance:
        for block in renderer.measure(read_prompts()):
            counts += block
            advance(len(block))
    refused = {i: count for i, count in enumerate(counts) if isinstance(count, RowError)}
    problems = [problem for row_set in sets for problem in row_set.problems]
    problems += [RowProblem(rows.place(i), e.column, str(e)) for i, e in refused.items()]
    usable = np.delete(np.arange(total), list(refused))
    tokens = np.array([count for count in counts if isinstance(count, int)], dtype=np.int64)
    # The first prompt is shown in full.
    sample = None
    if len(usable):
        (item,) = renderer.render(rows.read(usable[:1].tolist())[1])[0]
        sample = Sample(
            str(item.row.place), item.text, len(item.token_ids), item.row.data_source,
            item.row.ground_truth,
        )  # fmt: skip
    overlong = np.flatnonzero(tokens > max_prompt_length)
    lengths = ((usable[i], f": {tokens[i]} tokens") for i in overlong)
    unanswered = usable[rows.join("answered")[usable] == 0]
    control = find_control_rows(rows, renderer)
    controlled = [(i, f": {', '.join(words)}") for i, words in control if i not in refused]
    _, first, which = np.unique(digests[usable], return_index=True, return_inverse=True)
    repeated = np.flatnonzero(first[which] != np.arange(len(usable)))
    pairs = zip(usable[repeated], usable[first[which[repeated]]], strict=True)
    copies = ((i, f" repeats {rows.place(int(j))}") for i, j in pairs)

    def describe(count: int, examples: Iterable[tuple[int, str]]) -> Finding:
        shown = islice(examples, EXAMPLES)
        return Finding(count, tuple(f"{rows.place(int(i))}{text}" for i, text in shown))

    return Report(
        files=tuple(row_set.source for row_set in sets),
        rows=total + len({p.place for row_set in sets for p in row_set.problems}),
        usable=len(usable),
        bad_rows=tuple(problems),
        data_sources=dict(rows.count_sources(usable).most_common()),
        missing_ground_truth=describe(len(unanswered), ((i, "") for i in unanswered)),
        duplicates=describe(len(repeated), copies),
        characters=compute_percentiles(characters[usable]),
        tokens=compute_percentiles(tokens),
        max_prompt_length=max_prompt_length,
        overlong=describe(len(overlong), lengths),
        control_words=describe(len(controlled), controlled),
        unused_columns=tuple(dict.fromkeys(n for row_set in sets for n in row_set.columns.unused)),
        notes=tuple(list_notes(sets)),
        sample=sample,
    )


def digest_prompt(prompt: RowPrompt) -> int:
    """Return a number by which repeated prompts are counted."""
    # Text and a message list never have the same digest.
    text = repr(prompt if isinstance(prompt, str) else [sorted(m.items()) for m in prompt])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def count_characters(prompt: RowPrompt) -> int:
    """Return the length of a prompt in characters, without the chat template."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(message["content"]) for message in prompt)


def compute_percentiles(lengths: Any) -> dict[str, int] | None:
    """Return minimum, percentiles and maximum of an array by name; None without lengths."""
    if not len(lengths):
        return None
    import numpy as np

    # "higher" gives a length that some row has, not an interpolated one.
    values = np.percentile(lengths, PERCENTILES, method="higher")
    middle = {f"p{p}": int(v) for p, v in zip(PERCENTILES, values, strict=True)}
    return {"min": int(min(lengths)), **middle, "max": int(max(lengths))}


# Limits of the printed report; --json has everything.
MAX_BAD_ROWS = 50
MAX_SOURCES = 20
MAX_TRUTH_CHARS = 1000
Table = Sequence[tuple[str, str]]


def print_report(report: Report, model: str | None) -> None:
    """Print tables, what stops a run, warnings, one rendered prompt and a closing line."""
    tables = {
        "Rows": [
            ("files", ", ".join(report.files)),
            ("rows", f"{report.rows:,}"),
            ("usable", f"{report.usable:,}"),
        ],
        "Rows by data_source": make_source_rows(report.data_sources),
        f"Prompt length (counted by {model or EMBEDDED})": make_length_rows(report),
    }
    # Tables first; one without rows is left out.
    for title, rows in tables.items():
        if rows:
            texts = 2 if len(rows[0]) == 2 else 1  # columns of text; the others hold numbers
            print_text("\n".join([*titled_table(title, rows, texts), ""]))
    stops = [*format_bad_rows(report), *list_stops(report)]
    print_lines("`ppo train` stops at", stops)
    print_lines("`ppo train` starts, but note", list_warnings(report, model))
    # One prompt with all control tokens, so that the template can be checked by eye.
    if report.sample is not None:
        sample = report.sample
        truth = json.dumps(sample.ground_truth, ensure_ascii=False, default=str)
        truth = truth if len(truth) <= MAX_TRUTH_CHARS else f"{truth[:MAX_TRUTH_CHARS]} …"
        print_text(f"First prompt ({sample.place}, {sample.tokens} tokens), as the model reads it:")
        print_text("\n".join(f"  | {line}" for line in sample.rendered.split("\n")))
        print_text(f"  ground truth: {truth}   data_source: {sample.data_source or '(none)'}")
    print_text("")
    print_text(format_verdict(report, stops))


def make_source_rows(sources: Mapping[str, int]) -> Table:
    """Return the number of rows of each data_source, the most frequent first."""
    rows = [(name or "(none)", f"{count:,}") for name, count in sources.items()]
    # Rare sources share one row.
    rest = sum(list(sources.values())[MAX_SOURCES:])
    remainder = [(f"{len(rows) - MAX_SOURCES} more", f"{rest:,}")] if rest else []
    return rows[:MAX_SOURCES] + remainder


def make_length_rows(report: Report) -> Sequence[Sequence[str]]:
    """Return a row of percentiles for tokens and one for characters; empty without rows."""
    if report.characters is None or report.tokens is None:
        return []
    lengths = {"tokens": report.tokens, "characters": report.characters}
    rows = [
        [name, *(f"{count:,}" for count in counts.values())] for name, counts in lengths.items()
    ]
    return [["", *report.tokens], *rows]


def list_stops(report: Report) -> list[str]:
    """Return what `ppo train` refuses in rows that can be read, with the flags that settle it."""
    from ppo_cli.scoring.sources import sources_without_rule

    lines = []
    unknown, rules = sources_without_rule(report.data_sources)
    if unknown:
        names = [repr(source) if source else "(none)" for source in unknown]
        sources = Finding(len(names), tuple(names[:EXAMPLES]))
        lines.append(
            f"{format_finding('no rule for data_source', sources)}. Name one for all rows with "
            f"--rule ({', '.join(rules)}), your function with --reward_function FILE, or a judge "
            "with --use_api_reward."
        )
    if missing := report.missing_ground_truth.count:
        what = f"{plural(missing, 'row')} without ground truth, which rules need: add it, or use "
        what += "--reward_function FILE or --use_api_reward"
        lines.append(format_finding(what, report.missing_ground_truth))
    if count := report.overlong.count:
        what = f"{plural(count, 'prompt')} over {report.max_prompt_length} tokens: raise "
        what += "--max_prompt_length, or set data.filter_overlong_prompts=true or "
        lines.append(format_finding(what + "data.truncation=left|right", report.overlong))
    return lines


def list_warnings(report: Report, model: str | None) -> list[str]:
    """Return remarks on rows that a run accepts but that may surprise, one sentence each."""
    lines = list(report.notes)
    if model is None:
        lines.append("Tokens are counted with the bundled model; name yours with --model.")
    # A training run lowers its batch size to the number of rows.
    if 0 < report.usable < _DEFAULTS.train_batch_size:
        mini = Actor().ppo_mini_batch_size
        lines.append(describe_lowered_batches(report.usable, _DEFAULTS.train_batch_size, mini))
    for finding, noun, what in (
        (report.duplicates, "repeated prompt", ""),
        (report.control_words, "prompt", " with text that this tokenizer reads as control tokens"),
    ):
        if finding.count:
            lines.append(format_finding(f"{plural(finding.count, noun)}{what}", finding))
    if report.unused_columns:
        lines.append(f"Columns that are not read: {', '.join(report.unused_columns)}.")
    return lines


def format_finding(what: str, finding: Finding) -> str:
    """Return `WHAT: first, second, third`."""
    ellipsis = ", …" if finding.count > len(finding.examples) else ""
    return f"{what}: {'; '.join(finding.examples)}{ellipsis}"


def format_bad_rows(report: Report) -> list[str]:
    """Return a line for each kind of problem with its rows; at most MAX_BAD_ROWS lines."""
    lines = group_problems(report.bad_rows, MAX_BAD_ROWS)
    hidden = len(lines) - MAX_BAD_ROWS
    if hidden <= 0:
        return lines
    return [*lines[:MAX_BAD_ROWS], f"and {hidden:,} more; --json lists them all"]


def format_verdict(report: Report, stops: Sequence[str]) -> str:
    """Return the last line of the report: bad rows, flags that are needed, or all is well."""
    if report.bad:
        rows = plural(report.rows, "row")
        return f"{report.bad:,} of {rows} cannot be used; correct or remove them."
    all_rows = f"All {report.rows:,} rows" if report.rows > 1 else "The row"
    return f"{all_rows} can be used{', with the flags named above' * bool(stops)}."


def print_lines(title: str, lines: Iterable[str]) -> None:
    """Print a title and a list; nothing if the list is empty."""
    shown = [f"  - {line}" for line in lines]
    if shown:
        print_text("\n".join([title, *shown, ""]))


data_app = App(
    help="Check prompt files, or prepare well-known sets.",
    epilog="ppo data check train.jsonl\nppo data prepare gsm8k --out data",
    callback=keep_group,
)


# Help texts show the defaults of a training run.
_DEFAULTS = Data()


def check(
    files: list[str],
    model: str | None,
    max_prompt_length: int,
    prompt_key: str,
    answer_key: str | None,
    reward_fn_key: str,
    system_prompt: str | None,
    raw: bool,
    json: bool,
) -> None:
    """Count rows, sources and lengths, list bad rows, show one prompt; exit 2 on bad rows."""
    named = prompt_files(files, "train")
    # Before the import, which takes seconds.
    for file in named:
        check_present(file)
    check_folder(model_folder(model or EMBEDDED), "--model")
    from ppo_cli.data_sets.prompts import Renderer
    from ppo_cli.engine.pretrained import load_tokenizer

    renderer = Renderer(
        load_tokenizer(model or EMBEDDED),
        system_prompt,
        apply_chat_template=not raw,
        vocabulary_size=vocabulary_size(model or EMBEDDED),
    )
    gc.freeze()  # loaded modules are not scanned for garbage in every block of rows
    with closing(make_screen(sys.stderr)) as screen:  # stdout is for the result
        report = examine_files(
            named, renderer, max_prompt_length=max_prompt_length, prompt_key=prompt_key,
            source_key=reward_fn_key, answer_key=answer_key, screen=screen,
        )  # fmt: skip
    if json:
        typer.echo(report.to_json(model))
    else:
        print_report(report, model)
    if report.bad:
        raise typer.Exit(EXIT_USER)


CHECK_FLAGS = [
    make_argument(
        "files", "FILE", "JSON, JSONL (.gz too), parquet or Arrow files, saved or hub sets.",
        required=True, several=True,
    ),
    make_flag(
        "model", str, None,
        "Model whose tokenizer and chat template are used; the bundled one by default.",
    ),
    make_flag(
        "max_prompt_length", int, _DEFAULTS.max_prompt_length, "Longest prompt, in tokens.", min=1
    ),
    make_flag("prompt_key", str, _DEFAULTS.prompt_key, "Column that holds the prompt."),
    make_flag("answer_key", str, None, "Column that holds the ground truth."),
    make_flag(
        "reward_fn_key", str, _DEFAULTS.reward_fn_key, "Column that chooses the reward rule."
    ),
    make_flag("system_prompt", str, None, "Put in front of prompts without a system message."),
    make_switch("raw", "No chat template: prompts are used unchanged."),
    make_switch("json", "Print JSON."),
]  # fmt: skip
data_app.command(epilog="ppo data check train.jsonl --model Qwen/Qwen2.5-0.5B")(
    set_parameters(check, CHECK_FLAGS)
)
