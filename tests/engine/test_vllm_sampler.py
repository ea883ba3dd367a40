"""vLLM as a sampler: real engines in processes of their own (`vllm_checks.py`), and none at all."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging.config
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.engine.base import Sampling, Weights, build_sampler, start_rollouts, stream_key
from ppo_cli.engine.leftovers import OWNER
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.models.lora import LoRA
from ppo_cli.engine.samplers import vllm as vllm_sampler
from ppo_cli.engine.samplers.vllm import CPU_CACHE_BYTES, VLLMSampler
from ppo_cli.engine.samplers.worker_errors import VARIABLE, WORKER_LOGGER, log_errors
from ppo_cli.errors import (
    DataError,
    MissingPart,
    ModelError,
    UserError,
    WorkerLost,
    is_out_of_memory,
)
from ppo_cli.records import Prompt, Rollout
from tests.engine.gpu_engine import Gpu, GpuEngine, request_output
from tests.settings import complete

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (scripts/setup vllm)"
)
@pytest.mark.parametrize(
    "part", ["not TestFiles", pytest.param("TestFiles", marks=pytest.mark.weekly)]
)
def test_real_engines_pass_their_checks_and_leave_nothing_behind(part: str, tmp_path: Path) -> None:
    """No files, no text on stdout; their own report is in the output of a failure."""
    checks = [sys.executable, "-m", "pytest", str(Path(__file__).with_name("vllm_checks.py"))]
    options = ["-k", part, "-q", "-s", "-W", "ignore", "-p", "no:cacheprovider", "--tb=short"]
    (tmp_path / "tmp").mkdir()
    with subprocess.Popen(
        [*checks, *options, f"--basetemp={tmp_path / 'pytest'}"],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTEST_ADDOPTS": ""}, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        out, errors = process.communicate(timeout=850)
    assert process.returncode == 0, out + errors[-3000:]
    assert re.fullmatch(r"[.\s]*(\[100%\])?\s*\d+ passed, \d+ deselected in .*\s*", out), out
    shared = [path for path in SHARED_MEMORY.glob("ppo-*") if owner_of(path) == process.pid]
    assert [*(tmp_path / "tmp").glob("vllm*"), *(tmp_path / "tmp").glob("ppo*"), *shared] == []


def owner_of(folder: Path) -> int | None:
    """The process that claimed the folder: others run, and are killed, beside this test."""
    try:
        return int((folder / OWNER).read_text().split()[-1])
    except (FileNotFoundError, PermissionError):  # not claimed yet, gone by now, or of another user
        return None


class SmallEngine(GpuEngine):
    """A step finishes one request at once, or runs out of memory for more than `holds` of them."""

    def __init__(self, holds: int = 100) -> None:
        super().__init__(Gpu(2), weights=1, cache=1)
        self.holds, self.max_requests = holds, 0

    def reset_prefix_cache(self) -> bool:
        self.events.append("reset_prefix_cache")
        return super().reset_prefix_cache()

    def step(self) -> list[Any]:
        if len(self.requests) > self.holds:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.max_requests = max(self.max_requests, len(self.requests))
        return super().step()


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[VLLMSampler, SmallEngine]]:
    """A sampler of a fake engine, which needs no vLLM."""
    monkeypatch.setattr(vllm_sampler, "set_environment", lambda: None)

    def make(holds: int = 100, **options: Any) -> tuple[VLLMSampler, SmallEngine]:
        engine, count = SmallEngine(holds), itertools.count()

        def submit(begun: Rollout, sampling: Sampling) -> str:
            return engine.submit(f"{begun.prompt.uid} {begun.sample} {next(count)}")

        monkeypatch.setattr(VLLMSampler, "_start_engine", lambda self, *_: None)
        sampler = VLLMSampler(
            "m", eos_token_ids=frozenset({1}), detokenize=lambda ids, context: str(ids),
            max_model_len=1024, **options,
        )  # fmt: skip
        sampler._engine = engine
        monkeypatch.setattr(sampler, "_submit_request", submit)
        return sampler, engine

    return make


Make = Callable[..., tuple[VLLMSampler, SmallEngine]]
PROMPTS = [Prompt(f"p{i}", "", (), "", (3, 4)) for i in range(5)]


def test_new_weights_drop_what_was_cached_under_the_old_ones(sampler: Make) -> None:
    vllm_sampler, engine = sampler()
    vllm_sampler.load_weights(Weights({}, 7))
    assert engine.events == [
        "start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache",
    ]  # fmt: skip
    assert vllm_sampler.weight_version == 7
    engine.requests.append("under way")
    with pytest.raises(RuntimeError, match="weights came while responses were under way"):
        vllm_sampler.load_weights(Weights({}, 8))


def test_out_of_memory_halves_the_requests_and_keeps_what_is_finished(sampler: Make) -> None:
    vllm_sampler, engine = sampler(holds=3, max_num_seqs=8)
    notes: list[int] = []
    vllm_sampler.capacity.on_halving = notes.append
    keys = [r.key for r in vllm_sampler.generate(PROMPTS, Sampling(n=3), 0)]
    assert keys == [(f"p{i}", sample) for i in range(5) for sample in range(3)]
    assert notes == [4, 2] and vllm_sampler.capacity.halved_rows() == 2 and engine.max_requests <= 3
    assert len(list(vllm_sampler.generate(PROMPTS, Sampling(n=3), 0))) == 15 and notes == [4, 2]
    engine.holds = 0
    with pytest.raises(UserError, match="ran out of memory, even with one response at a time"):
        list(vllm_sampler.generate(PROMPTS, Sampling(), 0))


def test_a_response_is_cut_where_a_stop_text_ends(
    sampler: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine tells all tokens so far at each step, sometimes several more than before."""
    vllm_sampler, engine = sampler()
    tokens = {"p0": [10, 11, 12, 13, 1], "p1": [20, 21, 22, 23, 24], "p2": [30, 31, 32, 10, 1]}
    counts = dict.fromkeys(tokens, 0)

    def step() -> list[Any]:
        outputs = []
        for request in engine.requests:
            name = request.split()[0]
            counts[name] = seen = min(counts[name] + 2, 5)
            outputs.append(request_output(request, tokens[name][:seen], finished=seen == 5))
        engine.requests = [output.request_id for output in outputs if not output.finished]
        return outputs

    monkeypatch.setattr(engine, "step", step)
    sampling = Sampling(max_tokens=5, stop=("11, 12", "24]"))
    rollouts = {r.prompt.uid: r for r in vllm_sampler.generate(PROMPTS[:3], sampling, 0)}
    assert {name: (r.token_ids, r.finish_reason) for name, r in rollouts.items()} == {
        "p0": ((10, 11, 12), "stop"),
        "p1": ((20, 21, 22, 23, 24), "stop"),
        "p2": ((30, 31, 32, 10, 1), "stop"),
    }
    assert [len(r.sampler_logprobs) for r in rollouts.values()] == [3, 5, 5]
    assert counts["p0"] == 4 and engine.requests == []  # its request was aborted


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The logger of a worker of vLLM, which configures it from a file that it is given."""
    for name in (VARIABLE, "VLLM_CONFIGURE_LOGGING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "CRITICAL")
    logger = logging.getLogger(WORKER_LOGGER)
    yield logger
    for name in ("vllm", WORKER_LOGGER):
        logging.getLogger(name).handlers.clear()


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError, "OutOfMemoryError: CUDA out"),
        pytest.param(
            ModelError("vLLM cannot put new weights"),
            ModelError,
            "vLLM cannot put new weights",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            None, WorkerLost, "is gone, or does not answer (Worker failed", marks=pytest.mark.slow
        ),
    ],
)
def test_an_error_of_a_separate_worker_is_the_one_that_is_raised(
    error: Exception | None, kind: type[Exception], words: str,
    sampler: Make, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Neither asked again, nor hidden behind the words of the engine."""
    vllm_sampler, engine = sampler(holds=0, tensor_parallel_size=2)
    with log_errors(vllm_sampler._memory()):
        logging.config.dictConfig(json.loads(Path(os.environ[VARIABLE]).read_text()))
    assert VARIABLE not in os.environ

    def fail(*_: Any, **__: Any) -> None:
        if error is not None:
            logger.error("It failed.", exc_info=error)
            logger.error("A neighbour is gone.", exc_info=ConnectionError("closed"))
        raise RuntimeError("Worker failed: see the stack trace")

    monkeypatch.setattr(engine, "step", fail)
    monkeypatch.setattr(engine, "collective_rpc", fail)
    for work in (
        lambda: list(vllm_sampler.generate(PROMPTS, Sampling(), 0)),
        lambda: vllm_sampler.start_weight_update(),
    ):
        with pytest.raises(kind, match=re.escape(words)) as raised:
            work()
        assert type(raised.value) is kind and is_out_of_memory(raised.value) == ("CUDA" in words)
    vllm_sampler.close()


SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"path": "embedded", "dtype": "bfloat16", "trust_remote_code": True},
    "data": {"max_prompt_length": 40, "max_response_length": 24},
    "rollout": {
        "name": "vllm", "gpu_memory_utilization": 0.3, "max_num_seqs": 12, "seed": 77,
        "max_num_batched_tokens": 96, "enforce_eager": False, "enable_prefix_caching": False,
    },
}  # fmt: skip


def started(
    monkeypatch: pytest.MonkeyPatch, transfer: Any = "memory", **rollout: Any
) -> tuple[VLLMSampler, dict[str, Any]]:
    """A sampler as a run builds it, and what vLLM is asked for."""
    requests: dict[str, Any] = {}

    def note(self: VLLMSampler, options: dict[str, Any], way: str) -> None:
        requests.update(options, transfer=way)

    monkeypatch.setattr(VLLMSampler, "_start_engine", note)
    monkeypatch.setattr(vllm_sampler, "check_vllm", lambda: None)
    monkeypatch.setattr(vllm_sampler, "set_environment", lambda: None)
    model = SETTINGS["model"] | rollout.pop("model", {})
    parts = {"model": model, "rollout": SETTINGS["rollout"] | rollout}
    tokenizer = load_tokenizer(model_folder("embedded"))
    sampler = build_sampler(complete(SETTINGS | parts), tokenizer, transfer=transfer)
    assert isinstance(sampler, VLLMSampler)
    return sampler, requests


def test_every_setting_of_a_run_reaches_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    sampler, requests = started(monkeypatch, "gloo")
    memory = requests.pop("kv_cache_memory_bytes")
    assert requests == {
        "model": model_folder("embedded"), "trust_remote_code": True, "skip_tokenizer_init": True,
        "generation_config": "vllm", "dtype": "bfloat16", "max_model_len": 64,
        "tensor_parallel_size": 1, "distributed_executor_backend": "uni",
        "gpu_memory_utilization": 0.3, "max_num_seqs": 12, "max_num_batched_tokens": 96,
        "enforce_eager": True, "enable_prefix_caching": False, "enable_sleep_mode": False,
        "seed": 77, "disable_log_stats": True, "use_tqdm_on_load": False,
        "worker_extension_cls": vllm_sampler.EXTENSION, "transfer": "gloo",
    }  # fmt: skip
    assert sampler.capacity.rows == 12
    tokenizer = load_tokenizer(model_folder("embedded"))
    assert tokenizer.eos_token_id in sampler._eos_ids
    assert sampler._detokenize(tokenizer("7 + 8").input_ids, ()) == "7 + 8"
    # Keys and values (2) of two-byte numbers for 12 sequences of two blocks of 128 tokens.
    model = json.loads(Path(model_folder("embedded"), "config.json").read_text())
    size = model["hidden_size"] // model["num_attention_heads"]
    token = 2 * 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * size
    assert memory == 12 * 2 * 128 * token
    assert started(monkeypatch, max_num_seqs=10**6)[1]["kv_cache_memory_bytes"] == CPU_CACHE_BYTES
    # Each sequence of a step needs room for its token.
    assert started(monkeypatch, max_num_seqs=100)[1]["max_num_batched_tokens"] == 100
    several = started(monkeypatch, tensor_model_parallel_size=2)[1]
    assert several["tensor_parallel_size"] == 2 and several["distributed_executor_backend"] == "mp"
    assert several["transfer"] == "memory"
    options = {"block_size": 64, "compilation_config": {"mode": 0}}
    requests = started(monkeypatch, engine_kwargs={"vllm": options | {"swap_space": None}})[1]
    assert options.items() <= requests.items() and "swap_space" not in requests
    overrides = {"vllm": {"hf_overrides": {"rope_theta": 2.0}}}
    wide = started(monkeypatch, model={"float32_head": True}, engine_kwargs=overrides)[1]
    assert wide["hf_overrides"] == {"head_dtype": "float32", "rope_theta": 2.0}
    adapted, requests = started(monkeypatch, model={"lora_rank": 3, "lora_alpha": 6.0})
    assert {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}.items() <= requests.items()
    assert adapted._lora == LoRA(3, 6.0)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert "kv_cache_memory_bytes" not in started(monkeypatch)[1]


def test_every_setting_of_a_request_reaches_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, _ = started(monkeypatch)
    named = SimpleNamespace(
        SamplingParams=dict, TokensPrompt=dict,
        RequestOutputKind=SimpleNamespace(CUMULATIVE=0, FINAL_ONLY=2),
    )  # fmt: skip
    for module in ("vllm", "vllm.inputs", "vllm.sampling_params"):
        monkeypatch.setitem(sys.modules, module, named)  # type: ignore[arg-type]
    requests: list[tuple[Any, ...]] = []

    def add_request(*args: Any, lora_request: Any) -> None:
        requests.append((*args, lora_request))

    sampler._engine = SimpleNamespace(add_request=add_request)
    sampler._adapter = "adapter"
    sampling = Sampling(temperature=0.7, top_p=0.8, top_k=9, n=4, max_tokens=6, seed=3)
    usual = {
        "temperature": 1.0, "top_p": 0.8, "top_k": 9, "max_tokens": 6, "ignore_eos": True,
        "stop_token_ids": sampler._eos_ids, "logprobs": 0, "flat_logprobs": True,
        "detokenize": False, "skip_reading_prefix_cache": False, "output_kind": 2,
    }  # fmt: skip
    greedy = usual | {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    for setting, temperature in (
        (usual, sampling),
        (usual | {"top_k": 0}, replace(sampling, top_k=-1)),
        (greedy, replace(sampling, temperature=0.0)),
        (usual | {"output_kind": 0}, replace(sampling, stop=("END",))),
    ):
        name = sampler._submit_request(start_rollouts(PROMPTS, temperature)[6], temperature)
        seed = stream_key(3, "p1", 2) >> 1
        expected = (name, {"prompt_token_ids": [3, 4]}, setting | {"seed": seed}, "adapter")
        assert requests[-1] == expected and seed < 2**63
    assert len({request[0] for request in requests}) == 4
    begun = replace(start_rollouts(PROMPTS, sampling)[6], token_ids=(7, 8))
    for new_tokens, max_tokens in ((3, 3), (9, 4), (None, 4)):  # of at most 6
        sampler._submit_request(begun, replace(sampling, new_tokens=new_tokens, seed=99))
        seed = stream_key(3, "p1 from 2", 2) >> 1  # of the round that it began in
        assert requests[-1][1] == {"prompt_token_ids": [3, 4, 7, 8]}
        assert requests[-1][2] == usual | {"seed": seed, "max_tokens": max_tokens}


def test_a_stop_text_that_spans_a_pause_is_seen(
    sampler: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_sampler, engine = sampler()
    begun = replace(start_rollouts(PROMPTS[:1], Sampling())[0], token_ids=(10, 11))
    begun = replace(begun, sampler_logprobs=np.full(2, -1, np.float32), weight_version=3)
    monkeypatch.setattr(engine, "step", lambda: [request_output(engine.requests.pop(), [12, 13])])
    stop = Sampling(max_tokens=9, stop=("11, 12",))
    (rollout,) = vllm_sampler.generate((), stop, 5, [begun])
    assert (rollout.token_ids, rollout.finish_reason, rollout.carried) == ((10, 11, 12), "stop", 2)
    assert rollout.sampler_logprobs.tolist() == [-1, -1, -0.5] and rollout.weight_version == 3
    (rollout,) = vllm_sampler.generate((), Sampling(max_tokens=9), 5, [begun])
    assert (rollout.token_ids, rollout.finish_reason) == ((10, 11, 12, 13), "unfinished")


def test_the_temperature_is_told_to_the_workers_before_each_draw(sampler: Make) -> None:
    vllm_sampler, engine = sampler()
    temperatures: list[float] = []
    engine.collective_rpc = lambda method, kwargs: temperatures.append(kwargs["temperature"]) or []  # type: ignore
    for temperature in (1.0, 0.5, 0.5, 0.0, 2.0):
        rollouts = list(vllm_sampler.generate(PROMPTS[:1], Sampling(temperature=temperature), 6))
        assert [rollout.weight_version for rollout in rollouts] == [6]
    assert temperatures == [0.5, 1.0, 2.0]


def test_what_does_not_fit_and_a_second_caller_are_refused(sampler: Make) -> None:
    vllm_sampler, engine = sampler()
    assert len(list(vllm_sampler.generate(PROMPTS, Sampling(max_tokens=1022), 0))) == 5
    with pytest.raises(DataError, match="p0 has 2 tokens; with 1023 for the response"):
        vllm_sampler.generate(PROMPTS, Sampling(max_tokens=1023), 0)
    begun = vllm_sampler.generate(PROMPTS, Sampling(), 0)
    next(begun)
    with pytest.raises(RuntimeError, match="neither used up nor closed"):
        next(vllm_sampler.generate(PROMPTS, Sampling(), 0))
    begun.close()  # type: ignore[attr-defined]
    assert engine.requests == []
    assert len(list(vllm_sampler.generate(PROMPTS, Sampling(), 0))) == 5


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("libcudart.so.13: missing"), "(ImportError: libcudart.so.13: missing)"),
        (RuntimeError("built for another torch"), "(RuntimeError: built for another torch)"),
        (OSError(), "(OSError)"),
        (None, "(ModuleNotFoundError: No module named 'vllm.distributed')"),
    ],
)
def test_a_vllm_that_does_not_load_is_one_sentence(
    error: Exception | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken builds raise anything while they are imported; other versions have other modules."""
    (tmp_path / "vllm" / "v1" / "engine").mkdir(parents=True)
    start = "EngineArgs = None" if error is None else f"raise {error!r}"
    (tmp_path / "vllm" / "__init__.py").write_text(start)
    (tmp_path / "vllm" / "config.py").write_text("WeightTransferConfig = None")
    (tmp_path / "vllm" / "v1" / "engine" / "llm_engine.py").write_text("LLMEngine = None")
    monkeypatch.syspath_prepend(tmp_path)
    # The real one cannot be imported twice.
    loaded = {
        name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "vllm"
    }
    monkeypatch.setattr(vllm_sampler, "set_environment", lambda: None)
    with pytest.raises(MissingPart) as refusal:
        VLLMSampler("m", eos_token_ids=frozenset({1}), detokenize=str, max_model_len=8)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.update(loaded)
    message = str(refusal.value)
    assert message.startswith("vLLM is installed but does not load here ") and words in message
    assert message.endswith("or sample without it (--rollout_name hf).")
