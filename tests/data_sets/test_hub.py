"""Names of hub sets, and a hub that does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_cli.data_sets.row_sets import load_rows
from ppo_cli.data_sets.sources import HubName, is_hub_name, parse_hub_name
from ppo_cli.errors import DataError


@pytest.mark.parametrize(
    ("source", "parts", "label"),
    [
        ("openai/gsm8k", ("openai/gsm8k", None, "train"), "gsm8k-train"),
        ("openai/gsm8k:test", ("openai/gsm8k", None, "test"), "gsm8k-test"),
        ("openai/gsm8k/main:test", ("openai/gsm8k", "main", "test"), "gsm8k-main-test"),
        ("a/b.c-d_e:train[:10%]", ("a/b.c-d_e", None, "train[:10%]"), "b.c-d_e-train[:10%]"),
    ],
)
def test_names_are_taken_apart(source: str, parts: tuple[str, str | None, str], label: str) -> None:
    assert is_hub_name(source)
    assert parse_hub_name(source) == HubName(*parts)
    assert parse_hub_name(source).label == label


@pytest.mark.parametrize(
    "source",
    ["train.jsonl", "data/train.parquet", "./train", "/data/train", "~/x", "a/b/c/d", "x.csv",
     "a b", "x.jsonl.gz", "x.gz", "squad", "squad:test"],
)  # fmt: skip
def test_what_looks_like_a_file_is_no_hub_name(source: str) -> None:
    assert not is_hub_name(source)


def test_what_else_is_no_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    assert not is_hub_name("openai/gsm8k")
    with pytest.raises(DataError, match="neither a file nor OWNER/NAME"):
        parse_hub_name("a/b/c/d")


def test_a_hub_out_of_reach_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(DataError) as caught:
        load_rows("nobody/no-such-set/main:test")
    message = str(caught.value)
    assert "hub set 'nobody/no-such-set', config 'main', split 'test' did not load (" in message
    assert message.endswith("a local JSON, JSONL or parquet file works without the hub.")
    with pytest.raises(DataError, match=r"no such file. Did you mean 'prompts\.jsonl'\? Data sets"):
        load_rows("prompts-jsonl")


def test_a_set_of_the_hub_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import datasets

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    requests = []

    def load(name: str, config: str | None, split: str) -> datasets.Dataset:
        requests.append((name, config, split))
        rows = [{"prompt": [{"role": "user", "content": c}], "answer": c} for c in "ab"]
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    row_set = load_rows("owner/sums/easy:test")
    assert requests == [("owner/sums", "easy", "test")]
    places = [str(row.place) for row in row_set.rows]
    assert places == ["owner/sums/easy:test row 1", "owner/sums/easy:test row 2"]
    assert [row.ground_truth for row in row_set.rows] == ["a", "b"]
    assert row_set.label == "sums-easy-test"
    assert capsys.readouterr().err == "asking the hub for 'owner/sums' …\n"
    # A name without an owner is one of the hub only if that set is here already.
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "datasets--squad").mkdir()
    assert is_hub_name("squad:test") and not is_hub_name("squads:test")
