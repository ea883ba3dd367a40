"""vLLM's engine as it is on a GPU, without one: who holds how many bytes, and what is lost.

Written from the sources of vLLM 0.32 (`cumem.py`, `sleep_mode_backend.py`, `gpu_worker.py`,
`executor/abstract.py`, `core.py`). What would crash or compute nonsense on a GPU raises here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

TAGS = {"weights", "kv_cache"}


@dataclass
class Gpu:
    """Memory that several processes share: bytes by what they are for."""

    size: int
    used: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.used.values())

    def take(self, name: str, count: int) -> None:
        """Hold so many bytes; an allocator uses again what it has kept under the name."""
        count = max(count, self.used.get(name, 0))
        if self.total - self.used.get(name, 0) + count > self.size:
            raise RuntimeError("CUDA Error: out of memory at /csrc/cumem_allocator.cpp:139")
        self.used[name] = count

    def free(self, name: str) -> None:
        self.used.pop(name, None)


def request_output(name: str, token_ids: list[int], *, finished: bool = True) -> Any:
    """What vLLM tells of a request, with the log-probs -0.5, -0.6, and so on."""
    logprobs = SimpleNamespace(logprobs=[-0.5 - 0.1 * n for n in range(len(token_ids))])
    output = SimpleNamespace(token_ids=token_ids, logprobs=logprobs)
    return SimpleNamespace(finished=finished, request_id=name, outputs=[output])


class GpuEngine:
    """As much of `LLMEngine` as a sampler calls.

    `events` are its calls in their order, `peaks` the most bytes of the GPU during each.
    """

    def __init__(
        self, gpu: Gpu, *, weights: int, cache: int, update: int = 0, batches_ahead: int = 1
    ) -> None:
        self.gpu = gpu
        self.events: list[str] = []
        self.peaks: dict[str, int] = {}
        self.sizes = {"weights": weights, "kv_cache": cache}
        self.pinned = 0  # bytes in host memory while it sleeps
        self._update = update
        self._sleeping: set[str] = set()
        self._paused = False
        self._garbage = False
        self._version = "default"
        self.requests: list[str] = []
        self._batches_ahead = batches_ahead
        self._finished = False  # requests of which the workers have not heard yet
        self._queue: list[None] = []
        core = SimpleNamespace(
            scheduler=SimpleNamespace(has_requests=lambda: bool(self.requests) or self._finished)
        )
        core.batch_queue = self._queue
        self.engine_core = SimpleNamespace(engine_core=core, shutdown=lambda: None)
        for tag, size in self.sizes.items():
            gpu.take(tag, size)

    def sleep(self, level: int = 1) -> None:
        self.events.append(f"sleep {level}")
        self.requests, self._paused = [], True
        if level == 0 or "weights" in self._sleeping:
            return
        self.pinned = self.sizes["weights"] if level == 1 else 0
        self._garbage = self._garbage or level == 2
        self._sleeping = {*TAGS}
        for tag in TAGS:
            self.gpu.free(tag)

    def release_kv_cache_memory(self) -> None:
        self.events.append("release_kv_cache_memory")
        core = self.engine_core.engine_core
        if not self._paused or core.scheduler.has_requests() or core.batch_queue:
            raise RuntimeError("release_kv_cache_memory() requires a completed pause first")
        if self._sleeping:
            raise RuntimeError("release_kv_cache_memory() requires all memory to be resident")
        self._sleeping = {"kv_cache"}
        self.gpu.free("kv_cache")

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self.events.append(f"wake_up {' '.join(tags or ['all'])}")
        for tag in tags or sorted(self._sleeping):
            if tag not in self._sleeping:  # vLLM only warns, and wakes nothing
                return not self._sleeping
        for tag in tags or sorted(self._sleeping):
            self.gpu.take(tag, self.sizes[tag])
            self._sleeping.discard(tag)
        if "weights" not in self._sleeping:
            self.pinned = 0
        self._paused = self._paused and bool(self._sleeping)
        return not self._sleeping

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        self.events.append(method)
        if method.endswith(("_weights", "weight_update")):
            assert "weights" not in self._sleeping, f"{method}: cudaErrorIllegalAddress"
        if method == "update_weights":
            self.gpu.take("update", self._update)
            self._measure(method)
            self.gpu.free("update")
            self._garbage = False
        return []

    def add_lora(self, request: Any) -> bool:
        self.events.append("add_lora")
        assert "weights" not in self._sleeping, "add_lora: cudaErrorIllegalAddress"
        self._measure("update_weights")
        return True

    def remove_lora(self, number: int) -> bool:
        return True

    def set_weight_version(self, version: str) -> None:
        self._version = version

    def get_weight_version(self) -> str:
        return self._version

    def reset_prefix_cache(self) -> bool:
        return not self.requests

    def submit(self, name: str) -> str:
        assert not self._paused, "the scheduler is paused: the request would wait for ever"
        self.requests.append(name)
        return name

    def abort_request(self, names: list[str], internal: bool) -> None:
        self.requests = [name for name in self.requests if name not in names]

    def step(self) -> list[Any]:
        if not self.requests:
            self._finished = False
            del self._queue[:1]
            return []
        self.events.append("step")
        self._measure("step")
        assert not self._sleeping, "a step while memory is asleep: cudaErrorIllegalAddress"
        assert not self._garbage, "a step with weights that were discarded: nonsense"
        self._finished = True
        self._queue[:] = [None] * self._batches_ahead  # async scheduling
        return [request_output(self.requests.pop(0), [1])]

    def _measure(self, event: str) -> None:
        self.peaks[event] = max(self.peaks.get(event, 0), self.gpu.total)
