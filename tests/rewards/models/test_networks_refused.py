"""What must not load: a checkpoint without its head, with another one, with holes or code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_cli.errors import ModelError, UserError
from ppo_cli.rewards.models.base import Scores
from tests.rewards.models import twins
from tests.rewards.models.twins import load
from tests.rewards.tables import table

Build = Callable[..., Path]
HIDDEN = twins.HIDDEN


def refused(folder: Path, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(folder, **settings)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def change_config(folder: Path, **fields: Any) -> None:
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | fields))


def score(folder: Path, **settings: Any) -> Scores:
    """Score two rows of three tokens."""
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    return load(folder, **settings).network.score(ids, torch.ones_like(ids))


def rows(section: str) -> list[tuple[Any, ...]]:
    """Rows of a section, with the twin of their name first."""
    return [(getattr(twins, twin), *cells) for twin, *cells in table(__file__, section)]


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_twin_without_its_head(form: str, tmp_path: Path) -> None:
    for build, drop in rows("no head"):
        message = refused(build(tmp_path / build.__name__, drop=tuple(drop), form=form))
        assert "has no reward head" in message and "ppo reward fit" in message, build


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    assert "has no reward head" in refused(twins.plain_causal_twin(tmp_path / "lm"))


# What is done to a checkpoint, and what the message names.
LACKING = [(build, {"drop": (name,)}, name) for build, name in rows("lacks")]
DAMAGED: list[tuple[Build, dict[str, Any], str]] = [
    *LACKING,
    *((build, {"drop": (name,)}, name.removeprefix("model.")) for build, name in rows("body")),
    *((build, {"extra": {name: torch.zeros(1, HIDDEN)}}, name) for build, name in rows("unused")),
    *(
        (build, {"extra": {name: torch.zeros(shape)}}, re.sub(r"\.(weight|bias)$", "", name))
        for build, name, shape in rows("misshapen")
    ),
]


def test_a_checkpoint_with_a_wrong_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    unlike = []
    for number, (build, options, name) in enumerate(DAMAGED):
        message = refused(build(tmp_path / str(number), **options))
        # Of two heads, either may be the odd one.
        named = name in message or ("extra" in options and "v_head.weight" in message)
        if not named or (number < len(LACKING) and "lacks" not in message):
            unlike.append((build.__name__, options, message))
    assert unlike == []


def test_tensors_that_a_reward_model_does_without(tmp_path: Path) -> None:
    for number, (build, name) in enumerate(rows("unneeded")):
        load(build(tmp_path / str(number), extra={name: torch.zeros(4)}))


def test_a_head_that_is_not_finite(tmp_path: Path) -> None:
    bad = torch.full((1, HIDDEN), float("nan"))
    folder = twins.skywork_llama_twin(tmp_path, extra={"score.weight": bad})
    assert "not finite" in refused(folder)


def test_two_copies_of_a_body_that_differ(tmp_path: Path) -> None:
    folder = twins.starling_twin(tmp_path, extra={"transformer.norm.weight": torch.ones(HIDDEN)})
    assert "differ" in refused(folder)


def test_starling_without_a_config_takes_that_of_its_base(tmp_path: Path) -> None:
    whole = twins.starling_twin(tmp_path / "whole")
    bare = twins.starling_twin(tmp_path / "bare", config_json=False)
    assert "config.json of its base model" in refused(bare)
    (bare / "config.json").write_text(json.dumps({"transformers_version": "4.31"}))
    assert "config.json of its base model" in refused(bare)
    borrowed = score(bare, tokenizer=str(whole)).score_B
    torch.testing.assert_close(borrowed, score(whole).score_B, atol=1e-5, rtol=0)


def test_code_beside_a_model_is_never_run(tmp_path: Path) -> None:
    folder = twins.armorm_twin(tmp_path / "twin")
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').write('x')\nclass LlamaForRewardModelWithGating: pass\n"
    (folder / "modeling_custom.py").write_text(code)
    load(folder)
    change_config(folder, model_type="own", auto_map={"AutoConfig": "modeling_custom.Own"})
    assert "never run" in refused(folder)
    assert not ran.exists()


class Bomb:
    """Writes a file when somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("new_layout", [True, False])
def test_code_in_a_pickle_is_never_run(new_layout: bool, tmp_path: Path) -> None:
    folder = twins.starling_twin(tmp_path / "twin")
    weights = twins.read_weights(folder)
    ran = tmp_path / "ran"
    file = folder / "pytorch_model.bin"
    bombed = {**weights, "bomb": Bomb(ran)}
    torch.save(bombed, file, _use_new_zipfile_serialization=new_layout)
    assert "safetensors" in refused(folder)
    assert not ran.exists()


def test_several_outputs_need_their_weights(tmp_path: Path) -> None:
    folder = twins.skywork_llama_twin(tmp_path / "llama", outputs=3)
    assert "has 3 outputs" in refused(folder)
    assert "reward.model.outputs=[1,0,0]" in refused(folder)
    assert "2 weights" in refused(folder, outputs=(1.0, 2.0))
    scores = score(folder, outputs=(0.5, 0.0, -2.0))
    first, _, third = scores.objectives.values()
    assert list(scores.objectives) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    torch.testing.assert_close(scores.score_B, 0.5 * first - 2.0 * third)
    encoder = twins.deberta_twin(tmp_path / "encoder", outputs=2)
    assert "has 2 outputs" in refused(encoder)
    scores = score(encoder, outputs=(1.0, -1.0))
    first, second = scores.objectives.values()
    torch.testing.assert_close(scores.score_B, first - second)


def test_the_weight_of_a_single_output_counts(tmp_path: Path) -> None:
    folder = twins.skywork_llama_twin(tmp_path)
    plain, turned = (score(folder, outputs=outputs).score_B for outputs in ((), (-2.0,)))
    torch.testing.assert_close(turned, -2.0 * plain)


def test_one_output_with_a_config_that_counts_two(tmp_path: Path) -> None:
    weight = torch.full((1, HIDDEN), 0.5)
    folder = twins.skywork_llama_twin(tmp_path, outputs=2, extra={"score.weight": weight})
    assert score(folder).objectives == {}


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    folder = twins.skywork_llama_twin(tmp_path)
    for file in (*folder.glob("tokenizer*"), *folder.glob("*.jinja")):
        file.unlink()
    assert "reward.model.tokenizer" in refused(folder)


def test_a_tokenizer_without_llama_3s_tokens_cannot_gate(tmp_path: Path) -> None:
    folder = twins.armorm_twin(tmp_path / "armorm")
    other = twins.skywork_qwen3_twin(tmp_path / "qwen")
    with pytest.raises(ModelError, match=r"<\|eot_id\|>"):
        load(folder, tokenizer=str(other))


def test_a_quantised_checkpoint(tmp_path: Path) -> None:
    folder = twins.skywork_llama_twin(tmp_path)
    change_config(folder, quantization_config={"quant_method": "awq"})
    assert "is quantised" in refused(folder)


def test_a_hub_model_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="could not be loaded: there is no such folder"):
        load(Path("nobody/no-such-reward-model"))
