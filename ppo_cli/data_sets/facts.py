"""What a run needs to know of the rows of large sources, found by column.

A row that is not certainly usable is left to `rows.read_row`, which says what is wrong with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ppo_cli.data_sets.files import Place, Record, RowError, StoredRecords
from ppo_cli.data_sets.rows import (
    MAX_NESTING,
    ROLES,
    TEST_COLUMNS,
    Columns,
    Row,
    is_media,
    read_text_prompt,
    refuse_placeholder,
)

MAX_TURNS = 20  # whose roles are written as the digits of a number in 64 bits
OTHER_MARKS = r"[<\[{]"  # with which a placeholder or a message list begins
CONTROL_MARKS = r"[<\[]"  # with which control tokens begin
GROWTH = 3  # at most, of composed characters that a normaliser takes apart
FACTS = 6  # of a row


class RowFacts:
    """The facts of each row of a source, in 19 bytes a row.

    `first` has the first row of each kind: the prompts of one kind are texts, or messages with the
    same roles and keys. `kind` and `size` have the number of a row's kind, and an upper bound of
    the bytes of its contents, normalised by any tokenizer. `marked` rows have a character with
    which control tokens begin. `source` has the number of a row's data_source in `sources`.
    `answered` rows have a ground truth, and `plain` ones a prompt that is usable as it is stored.
    """

    def __init__(self) -> None:
        self.kinds: dict[Any, int] = {}
        self.first: list[Row] = []
        self.sources: dict[str, int] = {}
        self.kind, self.size, self.marked = array("i"), array("q"), array("b")
        self.source, self.answered, self.plain = array("i"), array("b"), array("b")

    def describe(self, row: Row) -> tuple[int, ...]:
        """Return the facts of a row that columns do not show to be usable."""
        prompt = row.prompt
        if isinstance(prompt, str):
            shape, text = None, prompt
        else:
            shape = tuple((m["role"], *sorted(m.keys() - {"role", "content"})) for m in prompt)
            text = "".join([m["content"] for m in prompt])
        if shape not in self.kinds:
            self.add_kind(shape, row)
        size = len(text) if text.isascii() else GROWTH * len(text.encode())
        source = self.sources.setdefault(row.data_source, len(self.sources))
        answered = row.ground_truth is not None
        return self.kinds[shape], size, "<" in text or "[" in text, source, answered, 0

    def add_kind(self, shape: Any, row: Row) -> None:
        """Note the first row of a kind."""
        self.kinds[shape] = len(self.first)
        self.first.append(row)

    def extend(self, descriptions: Any) -> None:
        """Note the next rows, from a numpy array with the facts of one in each line."""
        arrays = self.kind, self.size, self.marked, self.source, self.answered, self.plain
        for values, column in zip(arrays, descriptions.T, strict=True):
            values.frombytes(column.astype(values.typecode).tobytes())


def check_records(
    records: StoredRecords, columns: Columns, read: Callable[[Place, Record], Row | None]
) -> tuple[RowFacts, array[int], bool]:
    """Return the facts of usable rows, their numbers, and whether columns show a ground truth.

    `read` returns a row, or None for one that is not usable. It reads only the rows that are not
    certainly usable, and the first of each kind.
    """
    import numpy as np

    facts, usable, answered = RowFacts(), array("q"), False
    for numbers, batch in records.batches():
        count = len(numbers)
        checked = check_batch(batch, columns) if batch is not None else None
        fine = np.zeros(count, dtype=bool)
        descriptions = np.zeros((count, FACTS), dtype=np.int64)
        if checked is not None:
            fine = checked.usable
            answered = answered or bool((checked.answered & fine).any())
            kinds = np.zeros(len(checked.shapes), dtype=np.int64)
            for number, shape in enumerate(checked.shapes):
                rows = np.flatnonzero(fine & (checked.shape == number))
                if len(rows) and shape not in facts.kinds:
                    index = numbers.start + int(rows[0])
                    if first := read(*records[index]):
                        facts.add_kind(shape, first)
                kinds[number] = facts.kinds.get(shape, 0)
            sources = [facts.sources.setdefault(s, len(facts.sources)) for s in checked.sources]
            source = np.asarray(sources)[checked.source]
            found = kinds[checked.shape], checked.size, checked.marked, source, checked.answered
            descriptions = np.stack([*found, fine], axis=1)
        unclear = np.flatnonzero(~fine)
        indices = (unclear + numbers.start).tolist()
        decoded = records.decode_some(indices)
        for position, index, record in zip(unclear, indices, decoded, strict=True):
            row = read(records.place(index), record)
            if row is not None:
                fine[position] = True
                descriptions[position] = facts.describe(row)
        facts.extend(descriptions[fine])
        usable.extend((np.flatnonzero(fine) + numbers.start).tolist())
    return facts, usable, answered


@dataclass(frozen=True)
class BatchFacts:
    """The facts of the rows of a batch, as `RowFacts` has them; they hold where `usable` is True.

    `shape` is the number of a row's entry in `shapes`.
    """

    usable: Any
    shape: Any
    shapes: Sequence[tuple[tuple[str], ...] | None]
    size: Any
    marked: Any
    sources: Sequence[str]
    source: Any
    answered: Any


def check_batch(batch: Any, columns: Columns) -> BatchFacts | None:
    """Return the facts of a batch; None if its rows have to be read one by one."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    names = batch.schema.names
    by_name = columns.prompt in names and "." not in columns.prompt
    prompts = batch.column(columns.prompt) if by_name else None
    model = batch.column("reward_model") if "reward_model" in names else None
    others = [batch.column(n) for n in ("extra_info", *TEST_COLUMNS) if n in names]
    truth = _find_column(batch, columns.ground_truth)
    source = pa.nulls(len(batch))
    if columns.data_source and columns.data_source in names:
        source = batch.column(columns.data_source)
    read = [column for column in (model, truth, *others) if column is not None]
    if (
        prompts is None
        or truth is None
        or not all(_is_plain(column.type) for column in read)
        or not (_is_text(source.type) or pa.types.is_null(source.type))
        or not all(
            pa.types.is_struct(batch.column(name).type) or pa.types.is_null(batch.column(name).type)
            for name in ("extra_info", "reward_model")
            if name in names
        )
    ):
        return None
    usable = np.ones(len(batch), dtype=bool)
    for name in filter(is_media, names):
        usable &= _as_mask(pc.is_null(batch.column(name)))
    # The ground truth: one of the flat and the nested column.
    answered, is_number = _as_mask(pc.is_valid(truth)), _is_number(truth)
    usable &= is_number
    if model is not None and columns.ground_truth == "ground_truth":
        nested = _find_column(batch, "reward_model.ground_truth")
        both = _as_mask(pc.is_valid(nested))
        usable &= ~(answered & both) & _is_number(nested)
        answered |= both
    check = _check_texts if _is_text(prompts.type) else _check_messages
    facts = check(prompts, columns.prompt)
    if facts is None:
        return None
    fine, shape, shapes, size, marked = facts
    encoded = source.cast(pa.string()).fill_null("").dictionary_encode()
    return BatchFacts(
        usable & fine, shape, shapes, size, marked,
        encoded.dictionary.to_pylist(), _as_array(encoded.indices), answered,
    )  # fmt: skip


def _find_column(batch: Any, name: str) -> Any:
    """Return what `rows.find_value` finds in all rows; None if columns do not show it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names = batch.schema.names
    if name in names:
        return None if "." in name else batch.column(name)
    outer, *inner = name.split(".")
    if "[" in name or outer not in names:
        return None if "[" in name else pa.nulls(len(batch))
    column = batch.column(outer)
    for part in inner:
        if not pa.types.is_struct(column.type) or column.type.get_field_index(part) < 0:
            return pa.nulls(len(batch))
        column = pc.struct_field(column, part)
    return column


def _is_text(column_type: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_string(column_type) or types.is_large_string(column_type))


def _is_list(column_type: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(column_type) or types.is_large_list(column_type))


def _is_plain(column_type: Any, levels: int = MAX_NESTING) -> bool:
    """Whether each value of a column is plain JSON, or becomes it without an error."""
    import pyarrow.types as types

    if types.is_struct(column_type):
        inner = [column_type.field(i).type for i in range(column_type.num_fields)]
    elif _is_list(column_type):
        inner = [column_type.value_type]
    elif types.is_timestamp(column_type):
        return bool(column_type.unit == "s" and column_type.tz is None)  # texts of JSON
    else:
        tests = types.is_integer, types.is_floating, types.is_boolean, types.is_null
        return _is_text(column_type) or any(test(column_type) for test in tests)
    return levels > 1 and all(_is_plain(item, levels - 1) for item in inner)


def _is_number(column: Any) -> Any:
    """Return which values are not NaN."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_floating(column.type):
        return np.ones(len(column), dtype=bool)
    return ~_as_mask(pc.is_nan(column).fill_null(False))


def _as_array(column: Any) -> Any:
    return column.to_numpy(zero_copy_only=False)


def _as_mask(column: Any) -> Any:
    return _as_array(column.fill_null(False)).astype(bool)


def _measure(texts: Any) -> tuple[Any, Any, Any]:
    """Return the bytes of texts, which are ASCII, and which have a mark of control tokens."""
    import numpy as np
    import pyarrow.compute as pc

    lengths = _as_array(pc.binary_length(texts).fill_null(0)).astype(np.int64)
    marked = _as_mask(pc.match_substring_regex(texts, CONTROL_MARKS))
    return lengths, _as_mask(pc.string_is_ascii(texts)), marked


def _find_usable(texts: Any, check: Callable[[str], object]) -> Any:
    """Return which texts are usable; only those that are not plainly so are read."""
    import numpy as np
    import pyarrow.compute as pc

    usable = _as_mask(pc.match_substring_regex(texts, r"[!-~]"))  # not blank
    usable &= ~_as_mask(pc.match_substring_regex(texts, OTHER_MARKS))
    unclear = np.flatnonzero(~usable & _as_mask(pc.is_valid(texts)))
    for index, text in zip(unclear.tolist(), texts.take(unclear).to_pylist(), strict=True):
        try:
            check(text)
        except RowError:
            continue
        usable[index] = bool(text.strip())
    return usable


def _check_texts(prompts: Any, name: str) -> Any:
    import numpy as np

    usable = _find_usable(prompts, lambda text: read_text_prompt(text, name))
    lengths, is_ascii, marked = _measure(prompts)
    size = np.where(is_ascii, lengths, GROWTH * lengths)
    return usable, np.zeros(len(prompts), dtype=np.int64), [None], size, marked


def _check_messages(prompts: Any, name: str) -> Any:
    """Check prompts of messages, whose fields other than the role and the content are null."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if not _is_list(prompts.type) or not pa.types.is_struct(prompts.type.value_type):
        return None
    ends = _as_array(prompts.offsets)
    messages = prompts.values.slice(ends[0], ends[-1] - ends[0])
    fields = {field.name: field.type for field in messages.type}
    if not all(_is_text(fields.get(part, pa.null())) for part in ("role", "content")):
        return None
    ends = ends - ends[0]
    roles, contents = (pc.struct_field(messages, part) for part in ("role", "content"))
    role = _as_array(pc.index_in(roles, pa.array(ROLES, roles.type)).fill_null(-1)).astype(np.int64)
    fine = role >= 0
    for part in fields.keys() - {"role", "content"}:
        fine &= _as_mask(pc.is_null(pc.struct_field(messages, part)))
    fine &= _find_usable(contents, lambda text: refuse_placeholder(text, name))
    lengths, is_ascii, marked = _measure(contents)

    def add_up(values: Any) -> Any:
        """Return the sums of the messages of each row."""
        sums = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
        return sums[ends[1:]] - sums[ends[:-1]]

    turns = np.diff(ends)
    usable = _as_mask(pc.is_valid(prompts)) & (turns > 0) & (turns <= MAX_TURNS)
    usable &= (add_up(~fine) == 0) & (add_up(role == ROLES.index("user")) > 0)
    last = role[np.maximum(ends[1:] - 1, 0)] if len(role) else np.zeros(len(turns))
    usable &= last != ROLES.index("assistant")
    # The roles of a row as the digits of a number.
    position = np.arange(len(role)) - np.repeat(ends[:-1], turns)
    digits = (role + 1) * (len(ROLES) + 1) ** np.minimum(position, MAX_TURNS - 1)
    numbers = np.where(usable, add_up(digits), -1)
    _, rows, shape = np.unique(numbers, return_index=True, return_inverse=True)
    shapes = [tuple((ROLES[number],) for number in role[ends[row] : ends[row + 1]]) for row in rows]
    size = np.where(add_up(~is_ascii) == 0, 1, GROWTH) * add_up(lengths)
    return usable, shape, shapes, size, add_up(marked) > 0
