"""Large sets: their prompts are built when a step needs them, and are the same as built at once."""

from __future__ import annotations

import gzip
import json
import resource
from collections.abc import Callable, Mapping
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.cli.data import Report, examine_files
from ppo_cli.data_sets import files, row_sets, table
from ppo_cli.data_sets.prompts import PromptSet, Renderer
from ppo_cli.data_sets.table import PromptTable, join_prompts, load_prompts
from ppo_cli.errors import DataError
from ppo_cli.records import data_sources
from ppo_cli.run.identity import run_identity
from tests.settings import complete

COUNT = 40
TEXT = [
    {"prompt": f"Größe {n} " + "x <3 " * (n % 7), "answer": n, "extra_info": {"n": n}}
    for n in range(COUNT)
]
TURNS = [
    {
        "prompt": [{"role": "system", "content": "Brief."}] * (n % 3 == 0)
        + [{"role": "user", "content": f"{n}" * (n % 5 + 1)}],
        "reward_model": {"ground_truth": str(n)}, "data_source": f"s{n % 2}", "level": n,
    }
    for n in range(COUNT)
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (files, table):
        monkeypatch.setattr(module, "EAGER_ROWS", 6)
    monkeypatch.setattr(files, "BLOCK_BYTES", 200)
    monkeypatch.setattr(table, "FIRST_ROWS", 4)
    monkeypatch.setattr(files, "LARGE_BYTES", 64)


@pytest.fixture
def sources(tmp_path: Path) -> Mapping[str, str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = [json.dumps(row) for row in TEXT]
    lines.insert(9, "")
    (tmp_path / "text.jsonl").write_text("\ufeff" + "\n".join(lines))
    (tmp_path / "text.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    pq.write_table(pa.Table.from_pylist(TURNS), tmp_path / "turns.parquet")
    # Rows that columns do not show to be usable, and what Arrow reads otherwise than JSON.
    odd: list[Any] = [
        row | {"image": None, "n": n, "metadata": {"date": "2020-01-01"}}
        for n, row in enumerate(TURNS)
    ]
    odd[11]["prompt"] = [{"role": "user", "content": "<3 [a]", "name": "x"}]
    odd[12] |= {"ground_truth": 1.5, "reward_model": None}
    odd[13]["prompt"] = [
        *odd[0]["prompt"],
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    (tmp_path / "odd.jsonl").write_text("\r\n".join(map(json.dumps, odd)))
    odd[14]["image"], odd[15]["prompt"], odd[16]["data_source"] = "a.png", [{"role": "human"}], 3
    odd[17]["prompt"][-1]["content"], odd[18]["ground_truth"] = "an <image>", "other"
    wrong = [
        *map(json.dumps, odd),
        '{"prompt": "a"}{"prompt": "b"}',
        '{"prompt": Inf}',
        '{"prompt":',
        '"a"}',
    ]
    (tmp_path / "wrong.jsonl").write_text("\n".join(wrong))
    views = pa.Table.from_pylist(TEXT)
    views = views.set_column(0, "prompt", views["prompt"].cast(pa.string_view()))
    with pa.ipc.new_file(tmp_path / "views.arrow", views.schema) as writer:
        writer.write_table(views)
    lines[20], lines[30] = '{"prompt": "a", "prompt": "b"}', '{"prompt": 5}'
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    return {path.name: str(path) for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["text.jsonl"], {}),
        (["text.jsonl.gz"], {"apply_chat_template": False, "max_samples": 20}),
        (["turns.parquet"], {"system_prompt": "Think.", "keep_columns": True}),
        (["text.jsonl", "turns.parquet"], {"max_prompt_length": 75, "filter_overlong": True}),
        (["text.jsonl"], {"max_prompt_length": 75, "truncation": "left"}),
        (["text.jsonl"], {"max_prompt_length": 75}),
        (["text.jsonl"], {"max_prompt_length": 9, "filter_overlong": True}),
        (["turns.parquet"], {"apply_chat_template": False}),
        (["odd.jsonl"], {}),
        (["bad.jsonl"], {}),
        (["wrong.jsonl"], {}),
        (["views.arrow"], {}),
    ],
)
def test_a_table_has_the_prompts_notes_and_errors_of_all_rows_together(
    tokenizer: Any, sources: Mapping[str, str], names: list[str], options: dict[str, Any]
) -> None:
    def load(render_all: bool) -> PromptSet | str:
        how = {"max_prompt_length": 400} | options
        try:
            return load_prompts(
                [sources[n] for n in names], tokenizer, render_all=render_all, **how
            )
        except DataError as error:
            return str(error)

    together, later = load(True), load(False)
    if isinstance(together, str) or isinstance(later, str):
        assert later == together
        return
    prompts = later.prompts
    assert data_sources(prompts) == {prompt.data_source for prompt in together.prompts}
    assert isinstance(prompts, PromptTable) and len(prompts) == len(together.prompts)
    assert (list(prompts), later.notes) == (list(together.prompts), together.notes)
    order = [5, 0, len(prompts) - 1]
    assert prompts.pick(order) == [together.prompts[i] for i in order]
    # A reward's start: rows are checked unrendered, and those read by number are built.
    joined, whole = join_prompts(prompts, together.prompts[:2]), together.prompts
    assert joined[-3:] == [whole[-1], *whole[:2]]
    unbuilt = [
        replace(prompt, messages=(), rendered="", token_ids=(), opened="") for prompt in whole
    ]
    assert [replace(prompt, messages=()) for prompt in joined][:-2] == unbuilt


@pytest.mark.parametrize(
    "names", [["text.jsonl", "turns.parquet"], ["odd.jsonl"], ["wrong.jsonl"], ["views.arrow"]]
)
@pytest.mark.parametrize("how", [{}, {"apply_chat_template": False, "vocabulary_size": 200}])
def test_a_check_of_a_large_set_reports_what_that_of_a_small_one_does(
    tokenizer: Any, sources: Mapping[str, str], names: list[str], how: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def check() -> Report:
        paths = [sources[name] for name in names]
        return examine_files(paths, Renderer(tokenizer, **how), max_prompt_length=75)

    monkeypatch.setattr(row_sets, "BLOCK_ROWS", 3)
    report = check()
    monkeypatch.setattr(files, "EAGER_ROWS", COUNT)
    assert check() == report


def test_rows_that_are_too_long_are_refused_from_the_first_unless_they_are_dropped(
    tokenizer: Any, sources: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(limit: int, **options: Any) -> Any:
        how = {"max_prompt_length": limit, "render_all": False} | options
        return load_prompts([sources["text.jsonl"]], tokenizer, **how).prompts

    monkeypatch.setattr(table, "BATCH_ROWS", 7)
    monkeypatch.setattr(row_sets, "BLOCK_ROWS", 3)
    with pytest.raises(DataError, match=r"line 1: .* [(]9 such rows among the first 9, "):
        load(9)
    # One that fits is enough.
    lengths = [len(prompt.token_ids) for prompt in load(400)]
    assert len(load(min(lengths), filter_overlong=True)) == lengths.count(min(lengths)) < COUNT
    with pytest.raises(DataError, match="All 40 prompts are longer than 9 tokens"):
        load(9, filter_overlong=True)


def test_a_large_set_counts_by_the_content_of_its_files(
    make_tokenizer: Callable[..., Any], sources: Mapping[str, str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def identify(*names: str, folder: Path = Path(), **options: Any) -> Any:
        files = [str(folder / name) for name in names]
        rows = load_prompts(
            files, make_tokenizer(), max_prompt_length=400, render_all=False, **options
        )
        return run_identity(complete({}), rows.prompts, ())["data.train_files"]

    monkeypatch.chdir(tmp_path)
    Path("some.jsonl").write_text(json.dumps(TEXT[0]))  # too few to stay as they are stored
    names = "text.jsonl", "some.jsonl"
    before = identify(*names)
    with monkeypatch.context() as patch:
        patch.chdir("/")
        assert identify(*names, folder=tmp_path) == before
    before = identify("text.jsonl")
    assert before == identify("text.jsonl") != identify("text.jsonl", system_prompt="Think.")
    file = Path(sources["text.jsonl"])
    file.write_text(file.read_text().replace("39 x", "93 x"))
    assert identify("text.jsonl") != before


def test_a_slice_of_stored_records_is_that_of_a_list(sources: Mapping[str, str]) -> None:
    stored = files.read_file(sources["text.jsonl"]).records
    assert isinstance(stored, files.StoredRecords)
    assert stored[1:9:3] == [*stored][1:9:3] and stored[-3:] == [*stored][-3:]


def test_a_file_that_changes_during_a_run_is_an_error(
    tokenizer: Any, sources: Mapping[str, str]
) -> None:
    rows = load_prompts([sources["text.jsonl"]], tokenizer, max_prompt_length=400, render_all=False)
    file, last = Path(sources["text.jsonl"]), rows.prompts[COUNT - 1]
    stored = files.read_file(str(file)).records
    text = file.read_text()
    file.write_text(text + "{}\n")  # lines that are added do no harm
    assert rows.prompts[COUNT - 1] == last
    assert isinstance(stored, files.StoredRecords) and len([*stored.batches()])
    for changed in (text.replace('"prompt"', '"tpmorp"'), text.replace("39", "93"), "{}\n"):
        file.write_text(changed)
        with pytest.raises(DataError, match="line 41: the file was changed"):
            rows.prompts[COUNT - 1]
    with pytest.raises(DataError, match="line 1: the file was changed"):
        next(stored.batches())


@pytest.mark.parametrize(
    "end",
    [
        b'{"\xff": 1}',
        b'{"x": [-NaN]}',
        b'{"x": %s}' % (b"1" * 4301),
        b'{"x": %s}' % (b"[" * 600 + b"]" * 600),
        b"\n".join(b'{"x": {"%d": 1}}' % n for n in range(300)),
        b"\n".join(b'{"x": {"%d": {"%d": 1}}}' % divmod(n, 20) for n in range(400)),
        b"\n" * files.SCHEMA_LINES[-1] + b'{"y": 1}',
    ],
)
def test_arrow_reads_no_block_with_what_json_refuses_or_with_free_keys(end: bytes) -> None:
    lines = b'{"prompt": "q", "x": null}\n' * 3
    assert files.read_as_arrow(lines, 3).num_rows == 3
    assert files.read_as_arrow(lines + end, 3 + end.count(b"{") - end.count(b": {")) is None


def test_only_the_memory_that_is_in_use_limits_the_rows(
    sources: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files.read_file(sources["text.jsonl"])  # what reading loads once is in use from here on
    # More was in use before, as in a training that ended; the allocator keeps none of it.
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    with mmap(-1, 1 << 29) as before:
        while before.tell() < len(before):
            before.write(b"x" * (1 << 20))
    monkeypatch.setattr(files, "ROWS_SHARE", files.host_memory() / (resident + (1 << 28)))
    assert len(files.read_file(sources["text.jsonl"]).records) == COUNT
