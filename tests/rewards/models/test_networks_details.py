"""Gates, lengths, pad tokens and what a loaded reward model says of itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

from ppo_cli.rewards.models import checkpoint
from ppo_cli.rewards.models.checkpoint import pack_left
from ppo_cli.rewards.models.heads import OBJECTIVES, find_last
from tests.rewards.models import twins
from tests.rewards.models.straight import armorm
from tests.rewards.models.twins import load
from tests.rewards.tables import table

CHAT = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4."}]


def test_a_row_without_a_header_has_no_gate_and_harms_no_other(tmp_path: Path) -> None:
    loaded = load(twins.armorm_twin(tmp_path))
    ids = loaded.tokenizer.apply_chat_template(CHAT, return_dict=False)
    cut = ids[-len(ids) + 60 :] if len(ids) > 70 else ids[:5]
    rows = torch.tensor([ids, cut + [0] * (len(ids) - len(cut))])
    mask = torch.tensor([[1] * len(ids), [1] * len(cut) + [0] * (len(ids) - len(cut))])
    scores = loaded.network.score(rows, mask)
    assert scores.score_B[1].isnan()
    header = loaded.tokenizer(
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", add_special_tokens=False
    )["input_ids"]
    expected = armorm(tmp_path, header)(ids, [])
    assert scores.score_B[0].item() == pytest.approx(expected[0].item(), abs=1e-5)
    assert tuple(scores.objectives) == OBJECTIVES


def test_the_gate_reads_where_the_last_prompt_ends() -> None:
    rows = ["15625635", "56111560", "12341256"]
    ids = torch.tensor([[int(token) for token in row] for row in rows])
    mask = torch.tensor([[1] * 8, [1] * 6 + [0] * 2, [1] * 7 + [0]])
    assert find_last(ids, mask, (5, 6)).tolist() == [4, 0, -1]
    assert find_last(ids[:, :1], mask[:, :1], (5, 6)).tolist() == [-1, -1, -1]


def test_rows_are_packed_to_the_left_and_cut_to_the_longest() -> None:
    ids = torch.tensor([[9, 1, 2, 9, 3, 9], [9, 9, 9, 9, 4, 5]])
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 1, 1]])
    packed, packed_mask, types = pack_left(ids, mask, ids + 10)
    assert packed.tolist()[0] == [1, 2, 3] and packed.tolist()[1][:2] == [4, 5]
    assert packed_mask.tolist() == [[True] * 3, [True, True, False]]
    assert types is not None and types.tolist()[0] == [11, 12, 13]


@pytest.mark.parametrize(("twin", "made_for", "limit"), table(__file__, "lengths"))
def test_lengths(twin: str, made_for: int, limit: int, tmp_path: Path) -> None:
    folder = getattr(twins, twin)(tmp_path)
    assert load(folder).max_length == made_for
    assert load(folder, max_length=100).max_length == 100
    assert load(folder, max_length=10**6).max_length == limit


def test_a_sample_of_full_length_is_scored(tmp_path: Path) -> None:
    for build in (twins.roberta_twin, twins.gpt2_twin):
        loaded = load(build(tmp_path / build.__name__))
        ids = torch.full((1, loaded.max_length), 65)
        assert loaded.network.score(ids, torch.ones_like(ids)).score_B.isfinite().all()


def test_the_adapter_is_told_with_its_reason_or_named(tmp_path: Path) -> None:
    starling = load(twins.starling_twin(tmp_path / "starling"))
    assert starling.reason == "its tensors v_head.weight and transformer.* are Starling's"
    folder = twins.roberta_twin(tmp_path / "roberta", chat=True)
    assert [load(folder).adapter, load(folder, adapter="pair").adapter] == ["seqcls", "pair"]


def test_a_model_from_the_hubs_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    repo = tmp_path / "models--RLHFlow--ArmoRM-Llama3-8B-v0.1"
    twins.armorm_twin(repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert load(Path("RLHFlow/ArmoRM-Llama3-8B-v0.1")).adapter == "armorm"


@pytest.mark.parametrize(
    ("form", "shards"), [("safetensors", 2), ("bin", 2), ("bin", 1), ("pt", 1)]
)
def test_weights_are_fetched_in_one_format_and_code_is_not(
    form: str, shards: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = twins.starling_twin(tmp_path / "there", form=form, shards=shards)
    target = tmp_path / "here"
    target.mkdir()
    for stray in ("modeling_custom.py", "optimizer.bin", "original/consolidated.pt"):
        (source / stray).parent.mkdir(exist_ok=True)
        (source / stray).touch()

    def download(name: str, *, revision: str | None, **patterns: list[str]) -> str:
        assert (name, revision) == ("someone/rm", "v2")
        files = [str(p.relative_to(source)) for p in source.rglob("*") if p.is_file()]
        for file in filter_repo_objects(files, **patterns):
            shutil.copy(source / file, target / file)
        return str(target)

    monkeypatch.setattr(checkpoint, "snapshot_download", download)
    assert checkpoint.fetch("someone/rm", "v2") == target
    assert {p.suffix for p in target.iterdir()} - {".json", ".jinja"} == {f".{form}"}
    assert load(target).adapter == "starling"
