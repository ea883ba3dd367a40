"""vLLM as a sampler: real engines, asked once in a process of their own (`vllm_probe.py`)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.engine import vllm_sampler
from ppo_cli.engine.adapter_files import LoRA
from ppo_cli.errors import MissingPart, ModelError

TOLERANCE = 1e-4
ROOT = Path(__file__).parents[2]
real = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed (scripts/setup vllm)",
    ),
]


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the probe found, and what it left behind."""
    folder = tmp_path_factory.mktemp("probe")
    ours = tmp_path_factory.mktemp("tmp")
    shared = Path("/dev/shm")
    before = set(shared.iterdir()) if shared.is_dir() else set()
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("vllm_probe.py")), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(ours)},
        capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    left = [*ours.glob("vllm*"), *ours.glob("ppo*")]
    if shared.is_dir():
        left += [path for path in set(shared.iterdir()) - before if path.name.startswith("ppo-")]
    found["left"] = [path.name for path in left]
    found["stdout lines"] = len(done.stdout.strip().splitlines())
    return found


class TestReal:
    pytestmark = real

    def test_greedy_tokens_are_those_of_the_hf_sampler(self, probe: dict[str, Any]) -> None:
        assert probe["bundled"]["greedy"]

    def test_a_response_ends_with_its_end_token_or_is_cut(self, probe: dict[str, Any]) -> None:
        assert probe["bundled"]["finish"] == ["stop"]
        assert probe["bundled"]["ends"] and probe["bundled"]["cut"]

    def test_logprobs_are_under_the_temperature_and_untruncated(
        self, probe: dict[str, Any]
    ) -> None:
        gaps = probe["bundled"]["gaps"]
        assert len(gaps) == 6
        assert max(gaps.values()) < TOLERANCE, gaps

    def test_a_draw_does_not_depend_on_the_batch(self, probe: dict[str, Any]) -> None:
        assert all(probe["bundled"]["alike"].values()), probe["bundled"]["alike"]

    def test_samples_of_a_prompt_differ_unless_greedy(self, probe: dict[str, Any]) -> None:
        spread = probe["bundled"]["spread"]
        assert spread.pop("greedy") <= 8 < min(spread.values())

    def test_a_caller_may_walk_away(self, probe: dict[str, Any]) -> None:
        assert probe["bundled"]["after a break"] == 32

    @pytest.mark.parametrize("model", ["bundled", "untied", "lora"])
    def test_new_weights_are_the_ones_that_sample(self, probe: dict[str, Any], model: str) -> None:
        found = probe[model]
        found = found.get("publishing", found)
        assert len(found["new"]) == len(found["old"]) == 3
        assert max(found["new"]) < TOLERANCE, found
        assert min(found["old"]) > 100 * TOLERANCE, found

    def test_versions_are_kept_and_stamped(self, probe: dict[str, Any]) -> None:
        assert probe["bundled"]["publishing"]["versions"] == [5, 6, 7]
        assert probe["bundled"]["publishing"]["stamps"] == [7]

    def test_an_adapter_starts_as_the_base_model(self, probe: dict[str, Any]) -> None:
        assert probe["lora"]["base"] < TOLERANCE

    def test_samplers_are_led_together_through_an_exchange(self, probe: dict[str, Any]) -> None:
        assert probe["client"]["calls"] == [
            [
                "init_weight_transfer",
                [
                    [{"rank_offset": 1, "world_size": 5}],
                    [{"rank_offset": 3, "world_size": 5}],
                ],
            ],
            ["start_weight_update", [[], []]],
            ["update_weights", [[["w"]], [["w"]]]],
            ["finish_weight_update", [[9], [9]]],
        ]
        assert probe["client"]["largest"] == 8

    def test_weights_that_come_by_gloo_are_the_ones_that_sample(
        self, probe: dict[str, Any]
    ) -> None:
        found = probe["gloo"]
        assert len(found["new"]) == 3 and max(found["new"]) < TOLERANCE, found
        assert len(found["old"]) == 3 and min(found["old"]) > 100 * TOLERANCE, found
        assert found["version"] == 3

    @pytest.mark.parametrize(
        ("mistake", "words"),
        [
            ("too long", "(1000000) is greater than"),
            ("architecture", "['NoSuchModelForCausalLM'] are not supported"),
            ("no weights", "Cannot find any model weights"),
            ("no folder", "nowhere"),
        ],
    )
    def test_what_vllm_does_not_take_is_one_sentence(
        self, probe: dict[str, Any], mistake: str, words: str
    ) -> None:
        said = probe["mistakes"][mistake]
        assert said.startswith("ModelError: vLLM cannot sample from ")
        assert words in said and said.endswith("(--rollout_name hf).") and "\n" not in said

    def test_mistakes_while_sampling_are_told(self, probe: dict[str, Any]) -> None:
        assert "The prompt p0 has 21 tokens; with 128" in probe["bundled"]["too long"]
        assert "logits are not finite" in probe["bundled"]["nan"]

    def test_nothing_is_left_behind_and_nothing_chatters(self, probe: dict[str, Any]) -> None:
        assert probe["left"] == []
        assert probe["stdout lines"] == 1


def test_without_vllm_the_command_that_brings_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPart, match="run scripts/setup vllm"):
        vllm_sampler.check_vllm()


def test_adapters_are_padded_to_a_rank_that_vllm_has() -> None:
    assert [LoRA(rank, 16).padded_rank() for rank in (1, 2, 8, 9, 512)] == [1, 8, 8, 16, 512]
    with pytest.raises(ModelError, match=r"up to rank 512.*lora_merge"):
        LoRA(513, 16).padded_rank()
