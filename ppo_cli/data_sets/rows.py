"""Turn records into rows: find the columns, check the types, accept flat rows and verl rows.

Flat: `{"prompt": text or messages, "ground_truth", "data_source", "extra_info"}`.
verl: the same with `reward_model.ground_truth` instead of the flat `ground_truth`.
A prompt is text or chat messages. Values of parquet and hub rows become plain JSON values for the
rollout log.
"""

from __future__ import annotations

import datetime
import decimal
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from ppo_cli.data_sets.files import (
    Place,
    Record,
    Records,
    RowError,
    RowProblem,
    name_type,
)
from ppo_cli.errors import DataError, did_you_mean, list_some
from ppo_cli.records import Message, Prompt

PLAIN_TYPES = frozenset({type(None), int, float, bool})
LEAVES = PLAIN_TYPES | {str}
CONTAINERS = (dict, list, tuple, Mapping)


class NotUtf8Error(ValueError):
    """A text that cannot be encoded as UTF-8, or bytes that are not UTF-8."""


def as_plain(value: Any, *, strict: bool = False) -> Any:
    """Convert a value to dict, list, str, int, float, bool and None.

    With `strict`, half of a surrogate pair or bytes that are not UTF-8 raise NotUtf8Error;
    otherwise such bytes become escapes.
    """
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, str):
        return _require_utf8(value) if strict else value
    if isinstance(value, (dict, Mapping)):
        return {str(key): as_plain(inner, strict=strict) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(inner, strict=strict) for inner in value]
    if hasattr(value, "tolist"):  # numpy, which is not imported for JSON
        return as_plain(value.tolist(), strict=strict)
    # Types of parquet that JSON does not have.
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            if strict:
                raise NotUtf8Error(f"is not UTF-8 (byte 0x{value[error.start]:02x})") from None
            return value.decode("utf-8", errors="backslashreplace")
    return value


def _require_utf8(text: str) -> str:
    """Return the text unchanged; raises NotUtf8Error if it contains half of a surrogate pair."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise NotUtf8Error(
            f"holds {half}, half of a surrogate pair, which is not a character"
        ) from None
    return text


# Columns with images, videos and sounds in the data sets of verl, LLaVA, MMMU and others.
MEDIA_COLUMN = re.compile(
    r"(?:image|img|picture|photo|screenshot|video|audio)s?_?\d*"
    r"|(?:image|img|video|audio)s?_(?:path|filepath|url|uri|file|bytes|base64|data)s?"
    r"|multi_?modal_(?:data|inputs?)|media|pixel_values",
    re.IGNORECASE,
)
PLACEHOLDER = re.compile(
    r"<(?:image|video|audio|speech|sound|IMAGE|VIDEO|AUDIO)s?"
    r"(?:[ _]?\d+|_placeholder|_soft_token)?>"
    r"|<image ?/>|!\[[^\]]{0,200}\]\(data:image/"
    r"|<\|(?i:image|video|audio|vision)[a-z_]*\d*\|>|<start_of_image>|<ImageHere>|\[IMG\]"
)
# Names of placeholders that are HTML elements as well.
HTML_ELEMENTS = ("<video>", "<audio>")
# After a name such as <video>, these say that the question is about HTML.
ABOUT_MARKUP = re.compile(r"\s*(?:tags?\b|elements?\b|标签|元素|タグ|要素)", re.IGNORECASE)


@lru_cache(1024)
def is_media(name: str) -> bool:
    """Whether a column is named after images, videos or sounds."""
    return MEDIA_COLUMN.fullmatch(name) is not None


def refuse_media(record: Record) -> None:
    """Raise RowError for a row with images, videos or sounds, which are not supported."""
    # A media column may be present and empty.
    for name, value in record.items():
        if is_media(name) and holds_content(value):
            raise RowError(
                name,
                "holds content that the model never sees: only text is read. Remove the row, or "
                f"the column '{name}' if the prompts make sense without it",
            )


# Texts of empty cells.
NOTHING = ("", "[]", "{}", "null", "none", "nan", b"")


def holds_content(value: Any) -> bool:
    """Whether a cell has content; a single number is a flag or an id."""
    if isinstance(value, str | bytes):
        return value.strip().lower() not in NOTHING
    if isinstance(value, Mapping):
        return any(map(holds_content, value.values()))
    if isinstance(value, Iterable):
        return any(isinstance(item, int | float) or holds_content(item) for item in value)
    return False


def refuse_placeholder(text: str, column: str) -> None:
    """Raise RowError for a placeholder of an image, a video or a sound, such as <image>."""
    if "<" not in text and "[" not in text:  # each placeholder has one of them
        return
    for match in PLACEHOLDER.finditer(text):
        mark = match.group()
        # A closing tag or backticks show that the text is about markup.
        markup = f"</{mark[1:]}" in text or f"`{mark}`" in text
        markup = markup or (mark in HTML_ELEMENTS and "html" in text.lower())
        if not markup and not ABOUT_MARKUP.match(text, match.end()):
            raise RowError(
                column,
                f"holds {mark}, which stands for content that the model never sees: only text is "
                "read. Remove the row, or the mark if the question makes sense without it",
            )


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


# More levels of lists and objects are a mistake, and too many for what writes them later.
MAX_NESTING = 64


def is_nested_deep(value: Any) -> bool:
    """Whether a value has lists or objects in more than MAX_NESTING levels."""
    level = [value]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for item in level
            if type(item) not in LEAVES and isinstance(item, CONTAINERS)
            for inner in (item if isinstance(item, list | tuple) else item.values())
        ]
        if not level:
            return False
    return True


def read_plain(value: Any, column: str) -> Any:
    """Return the plain value of a column; RowError for text that is not UTF-8, or deep nesting."""
    if type(value) in PLAIN_TYPES:
        return value
    if type(value) is not str and is_nested_deep(value):
        raise RowError(column, f"has lists or objects in more than {MAX_NESTING} levels")
    try:
        return as_plain(value, strict=True)
    except NotUtf8Error as error:
        raise RowError(column, str(error)) from None


def read_prompt(value: Any, column: str) -> str | tuple[Message, ...]:
    """Return a prompt as text or as checked messages; RowError for anything else."""
    plain = read_plain(value, column)
    if plain is None:
        raise RowError(column, "is missing or null")
    if isinstance(plain, str):
        return read_text_prompt(plain, column)
    if isinstance(plain, list):
        return read_messages(plain, column)
    raise RowError(column, f"is {name_type(plain)}, not text or a list of messages")


MESSAGE_LIST = re.compile(
    r"\s*(?:array\()?\[?\s*\{\s*(?=['\"](?:role|content)['\"]\s*:)(?=.*['\"]role['\"]\s*:).*\}\s*\]?"
    r"(?:\s*,\s*dtype=object)?\)?\s*",
    re.DOTALL,
)


def read_text_prompt(text: str, column: str) -> str:
    """Return a text prompt; RowError if it is blank or a message list in the form of text."""
    if not text.strip():
        raise RowError(column, "is empty")
    refuse_placeholder(text, column)
    # A CSV export turns message lists into text: JSON, or what Python and numpy print.
    if MESSAGE_LIST.fullmatch(text):
        raise RowError(
            column,
            "is a message list written as text; store it as a list (text that must stay "
            "text goes into the content of one user message)",
        )
    return text


def read_messages(items: list[Any], column: str) -> tuple[Message, ...]:
    """Return the messages of a prompt; RowError if one is malformed.

    There must be a user message, and the last message must not be the assistant's.
    """
    if not items:
        raise RowError(column, "is an empty list of messages")
    messages = tuple(read_message(item, f"{column}[{i}]") for i, item in enumerate(items))
    if not any(message["role"] == "user" for message in messages):
        raise RowError(column, "has no user message")
    if messages[-1]["role"] == "assistant":
        raise RowError(
            column, "ends with an assistant message; leave the answer out, the model writes it"
        )
    return messages


def read_message(item: Any, column: str) -> Message:
    """Return one message without null fields (parquet adds them)."""
    if not isinstance(item, dict):
        raise RowError(column, f'is {name_type(item)}, not {{"role": …, "content": …}}')
    message = {key: value for key, value in item.items() if value is not None}
    # ShareGPT's format.
    if "role" not in message and {"from", "value"} <= set(message):
        raise RowError(column, "has from/value; rename them to role/content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        other = OTHER_ROLES.get(str(role))
        near = f" Did you mean '{other}'?" if other else did_you_mean(str(role), ROLES)
        raise RowError(f"{column}.role", f"is {role!r}, not one of {', '.join(ROLES)}.{near}")
    # The content has to be text.
    refuse_media(message)
    content = read_content(message.get("content"), f"{column}.content")
    refuse_placeholder(content, f"{column}.content")
    if role == "user" and not content.strip():
        raise RowError(f"{column}.content", "is empty")
    if not content and not ({"tool_calls", "function_call"} & set(message)):
        raise RowError(f"{column}.content", "is empty")
    return {**message, "content": content}


def read_content(value: Any, column: str) -> str:
    """Return the text of a message; a list of text parts is joined."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RowError(column, f"is {name_type(value)}, not text")
    return "".join(read_part(part, column) for part in value)


def read_part(part: Any, column: str) -> str:
    """Return the text of one part; images and sounds are refused, never dropped."""
    kind = part.get("type") if isinstance(part, Mapping) else name_type(part)
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        refuse_media(part)
        return str(part["text"])
    raise RowError(
        column, f"has a part of kind {kind!r}: only text is read. Remove the row, or that part"
    )


def question_of(prompt: str | tuple[Message, ...]) -> str:
    """Return the user's question: the text, or the last user message, "" without one."""
    if isinstance(prompt, str):
        return prompt
    return next((str(m["content"]) for m in reversed(prompt) if m["role"] == "user"), "")


# Column names that other data sets use.
PROMPT_ALIASES = ("messages", "question", "problem", "instruction", "query")
TRUTH_ALIASES = (
    "answer", "target", "reference_answer", "final_answer", "expected_answer", "correct_answer",
    "gold_answer", "label",
)  # fmt: skip
# Worked solutions, which are read where no column has the answer alone.
SOLUTIONS = ("solution", "reference_solution")
# Columns that may have it inside.
NESTING = ("reward_model", "extra_info", "metadata", "info", "verification_info")
LAST_TURN = "[-1].content"  # after the prompt column: its last message is the answer
# Columns that a message names where no ground truth is read.
ANSWER_LIKE = re.compile(
    r"(?:.*[._ -]|.*[a-z](?=[A-Z]))?"
    r"(?i:answers?|solutions?|labels?|targets?|gold|truth|references?|responses?|outputs?"
    r"|completions?|chosen|gt|verification)(?:[._ -].*|[A-Z].*)?"
)
Item = TypeVar("Item")
OWN_COLUMNS = ("ground_truth", "reward_model", "extra_info", "ability")
# Columns of code data sets with tests; they are added to the extra_info of their row.
TEST_COLUMNS = (
    "test", "test_list", "test_setup_code", "test_imports", "entry_point", "fn_name",
    "starter_code", "input_output", "public_tests", "private_tests", "generated_tests",
    "public_test_cases", "private_test_cases", "metadata",
)  # fmt: skip


_TESTS = frozenset(TEST_COLUMNS)


RowPrompt = str | tuple[Message, ...]


@dataclass(frozen=True)
class Row:
    """One usable row; a text prompt stays text until it is rendered.

    Without messages, the environment opens the episode.
    """

    place: Place
    prompt: RowPrompt
    ground_truth: Any
    data_source: str
    extra_info: Mapping[str, Any]
    columns: Mapping[str, Any] = field(default_factory=dict)  # all of the row's, if they are kept


@dataclass(frozen=True)
class Columns:
    """The columns of a file by their meaning; an empty name: there is no such column."""

    prompt: str
    ground_truth: str
    data_source: str
    unused: tuple[str, ...]
    # Columns that look like an answer, if no row has a ground truth.
    answers: tuple[str, ...] = ()


def prompt_of(label: str, row: Row) -> Prompt:
    """Build the prompt of a row, not yet rendered and tokenised."""
    messages = row.prompt
    if isinstance(messages, str):
        messages = ({"role": "user", "content": messages},)
    return Prompt(
        uid=f"{label}:{row.place.number}",
        text=question_of(row.prompt),
        messages=messages,
        rendered="",
        token_ids=(),
        data_source=row.data_source,
        ground_truth=row.ground_truth,
        extra_info=row.extra_info,
        columns=row.columns,
    )


def read_records(
    raw: Records, read: Callable[[Place, Record], Item]
) -> tuple[list[Item], list[RowProblem]]:
    """Read each record with a function; records for which it raises RowError become problems."""
    items: list[Item] = []
    problems = list(raw.problems)
    for place, record in raw.records:
        try:
            items.append(read(place, record))
        except RowError as error:
            problems.append(RowProblem(place, error.column, str(error)))
    problems.sort(key=lambda problem: problem.place.number)
    return items, problems


def find_value(record: Record, name: str) -> Any:
    """Return the value of a column; a dotted name that is no column names a key inside one."""
    if name in record or "." not in name:
        return record.get(name)
    value: Any = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def find_columns(
    raw: Records,
    prompt_key: str = "prompt",
    source_key: str = "data_source",
    answer_key: str | None = None,
    verdicts: Collection[str] = (),
) -> Columns:
    """Choose the columns of a file by the names that occur in any of its rows.

    `verdicts` are columns that judge a response, which are never taken as its ground truth.
    """
    names = raw.names
    prompt = find_prompt_column(raw, names, prompt_key)
    source = source_key if source_key in names else ""
    if not source and source_key != "data_source":
        raise DataError(
            f"{raw.source}: no column '{source_key}' (data.reward_fn_key). "
            f"Its columns: {list_names(names)}.{did_you_mean(source_key, names)}"
        )
    if answer_key is None:
        truth = find_truth_column(raw, names, prompt, verdicts)
    elif has_column(raw, truth := answer_key):
        pass
    else:
        near = list_names(filter(ANSWER_LIKE.fullmatch, _list_paths(raw)))
        raise DataError(
            f"{raw.source}: no column '{answer_key}' (data.answer_key). Its columns: "
            f"{list_names(names)}. Like an answer look {near}."
        )
    used = {prompt, source, truth, *OWN_COLUMNS, *TEST_COLUMNS}
    used |= {name.partition(".")[0] for name in (prompt, truth) if name not in names}
    unused = tuple(name for name in names if name not in used)
    return Columns(prompt, truth or "ground_truth", source, unused)


def has_column(raw: Records, name: str) -> bool:
    """Whether a row has something in a column, or under a dotted name inside one."""
    return any(name in record or find_value(record, name) is not None for _, record in raw.records)


def find_truth_column(
    raw: Records, names: Sequence[str], prompt: str, verdicts: Collection[str] = ()
) -> str:
    """Return the column of the ground truth under another name, if it can be no other; or ""."""
    models = raw.records if "reward_model" in names else ()
    if "ground_truth" in names or any(_nested_truth(r) is not None for _, r in models):
        return ""
    aliases = [name for name in TRUTH_ALIASES if name not in verdicts]
    flat = [name for name in aliases if name in names and _holds_answer(raw, name)]
    paths = [f"{outer}.{key}" for outer in NESTING for key in ("ground_truth", *aliases)]
    nested = [path for path in _list_paths(raw) if path in paths and _holds_answer(raw, path)]
    # Tests are what code is compared with, not a solution.
    has_tests = not set(TEST_COLUMNS[:-1]).isdisjoint(names)
    solutions = [name for name in SOLUTIONS if name not in verdicts]
    worked = [] if has_tests else [name for name in solutions if _holds_answer(raw, name)]
    for candidates in (flat, nested, worked):
        if candidates:
            return candidates[0] if len(candidates) == 1 else ""
    turns: Iterable[Any] = (r.get(prompt) for _, r in raw.records)
    conversations = filter(_is_conversation, turns if prompt != "prompt" else ())
    ends = {turn[-1].get("role") == "assistant" for turn in conversations}
    return f"{prompt}{LAST_TURN}" if ends == {True} else ""


def _is_conversation(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 1 and isinstance(value[-1], Mapping)


def _holds_answer(raw: Records, name: str, besides: type = bool) -> bool:
    """Whether a column has a text, a number or a list in some row.

    Yes and no may judge a response that the row has, so they are not taken unasked.
    """
    values = (find_value(record, name) for _, record in raw.records)
    return any(
        (isinstance(v, str) and bool(v)) or not isinstance(v, str | besides | Mapping | None)
        for v in values
    )


def _list_paths(raw: Records) -> list[str]:
    """Return the names of columns, and the dotted ones of keys inside them."""
    names: dict[str, None] = {}
    for _, record in islice(raw.records, 1000):
        for name, value in record.items():
            inner = value if isinstance(value, Mapping) else {}
            names |= dict.fromkeys([name, *(f"{name}.{key}" for key in inner)])
    return list(names)


def list_answer_like(raw: Records, columns: Columns) -> Iterator[str]:
    """Yield the columns that look like an answer, and are not read."""
    for name in _list_paths(raw):
        unread = name not in (columns.prompt, "ground_truth", "reward_model.ground_truth")
        if unread and ANSWER_LIKE.fullmatch(name) and _holds_answer(raw, name, str):
            yield name


def find_prompt_column(raw: Records, names: list[str], prompt_key: str) -> str:
    """Return the prompt column; another name is taken only when it can be no other."""
    if prompt_key in names or ("." in prompt_key and has_column(raw, prompt_key)):
        return prompt_key
    aliases = [name for name in PROMPT_ALIASES if name in names]
    if prompt_key == "prompt" and len(aliases) == 1 and "input" not in names:
        return aliases[0]
    aliases = ["prompt"] * ("prompt" in names) or aliases
    near = f" It may be one of {list_names(aliases)}." if aliases else ""
    near = near or did_you_mean(prompt_key, names)
    advice = "Set data.prompt_key to the column that holds the prompt."
    if len(aliases) == 1:
        use = f"Use data.prompt_key={aliases[0]}"
        if any(isinstance(record.get(aliases[0]), list) for _, record in islice(raw.records, 1)):
            use += ", and data.apply_chat_template=true for its messages"
        near, advice = "", f"{use}, if that holds the prompt."
    raise DataError(
        f"{raw.source}: no column '{prompt_key}'. Its columns: {list_names(names)}.{near} {advice}"
    )


def sole(aliases: Iterable[str], names: Iterable[str]) -> str:
    """Return the one alias that is among the names; none or several: an empty string."""
    columns = [name for name in aliases if name in set(names)]
    return columns[0] if len(columns) == 1 else ""


def list_names(names: Iterable[str]) -> str:
    """Return the names in quotes, cut after the first dozen."""
    return list_some([f"'{name}'" for name in names], 12) or "none"


def alias_notes(source: str, columns: Columns, prompt_key: str) -> list[str]:
    """Say which columns were taken under another name than the contract's."""
    notes = []
    file = Path(source).name
    if columns.prompt != prompt_key:
        notes.append(f"{file}: the prompt is read from column '{columns.prompt}'.")
    if columns.ground_truth != "ground_truth":
        notes.append(f"{file}: the ground truth is read from column '{columns.ground_truth}'.")
    return notes


# Columns of other data sets whose text belongs to the question that the model is asked.
QUESTION_COLUMNS = re.compile(
    r"tools?|functions|system(?:_prompt|_message)?|choices|options|contexts?|passages?|documents?"
    r"|input|history|instructions?|chat_history|messages|background|article|table|hint",
    re.IGNORECASE,
)


def column_notes(raw: Records, columns: Columns, prompt_key: str) -> list[str]:
    """Return `alias_notes`, and what else a person may expect to count and does not."""
    notes = alias_notes(raw.source, columns, prompt_key)
    file = Path(raw.source).name
    unread = [
        name
        for name in filter(QUESTION_COLUMNS.fullmatch, columns.unused)
        if any(holds_content(record.get(name)) for _, record in raw.records)
    ]
    if unread:
        notes.append(
            f"{file}: {list_names(unread)} may belong to the question, but the model only sees "
            f"'{columns.prompt}': add their text to the prompt, or leave the columns out."
        )
    return notes


def is_nan(value: Any) -> bool:
    """Whether a value is the number NaN, which JSON files and data frames have for nothing."""
    return isinstance(value, float) and value != value


def has_nan_truth(record: Record, column: str) -> bool:
    """Whether the number NaN stands for a missing ground truth."""
    return is_nan(find_value(record, column)) or is_nan(_nested_truth(record))


def _nested_truth(record: Record) -> Any:
    model = record.get("reward_model")
    return model.get("ground_truth") if isinstance(model, Mapping) else None


def read_row(place: Place, record: Record, columns: Columns, *, keep_columns: bool = False) -> Row:
    """Turn one record into a row; RowError if anything is wrong with it."""
    refuse_media(record)
    turns: Any = find_value(record, columns.prompt)
    if columns.ground_truth == f"{columns.prompt}{LAST_TURN}" and _is_conversation(turns):
        record = {
            **record,
            columns.ground_truth: read_content(turns[-1].get("content"), columns.prompt),
        }
        turns = turns[:-1]
    prompt = read_prompt(turns, columns.prompt)
    ground_truth = read_ground_truth(record, columns.ground_truth)
    # Missing columns are allowed, except the prompt.
    named = record.get(columns.data_source) if columns.data_source else None
    source = read_plain(named, columns.data_source)
    if source is not None and not isinstance(source, str):
        raise RowError(columns.data_source, f"is {name_type(source)}, not text")
    extra_info = read_plain(record.get("extra_info"), "extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise RowError("extra_info", f"is {name_type(extra_info)}, not an object")
    # Tests of code data sets; a key of extra_info wins over a column of the same name.
    present = [] if _TESTS.isdisjoint(record) else [n for n in TEST_COLUMNS if record.get(n)]
    tests = {name: read_plain(record[name], name) for name in present}
    kept_columns = {**as_plain(record), "prompt": as_plain(turns)} if keep_columns else {}
    info = {**tests, **(extra_info or {})}
    return Row(place, prompt, ground_truth, source or "", info, kept_columns)


def read_ground_truth(record: Record, column: str) -> Any:
    """Return the flat ground truth or verl's nested one; None when the row has neither.

    RowError if both are present and differ, or if `reward_model` is not an object.
    """
    flat = read_plain(find_value(record, column), column)
    flat = None if is_nan(flat) else flat
    model = read_plain(record.get("reward_model"), "reward_model")
    if model is None or column != "ground_truth":
        return flat
    if not isinstance(model, dict):
        raise RowError(
            "reward_model", f'is {name_type(model)}, not an object such as {{"ground_truth": …}}'
        )
    # Both may be present if they agree.
    nested = None if is_nan(model.get("ground_truth")) else model.get("ground_truth")
    if flat is not None and nested is not None and flat != nested:
        raise RowError(column, f"is {flat!r} but reward_model.ground_truth is {nested!r}; keep one")
    return nested if flat is None else flat
