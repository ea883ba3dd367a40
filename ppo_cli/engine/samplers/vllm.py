"""Sample with vLLM, in a separate process: it takes over torch's threads and process groups.

Each response has its own seed, so up to rounding it does not depend on its batch. On CPUs (vLLM's
model runner V1) each request has a generator with that seed; on GPUs (V2) random numbers are a
hash of seed, position and token, so equal seeds give other tokens there. Log-probs are taken under
the sampling temperature and before top-k and top-p: vLLM returns raw log-probs, and its workers
divide the logits first (`weight_transfer.WorkerExtension`). Tried with vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import math
import os
import shutil
import tempfile
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.limits import require_length
from ppo_cli.config.schema.run import Config, Model, Sleep, Transfer
from ppo_cli.engine.base import (
    SamplerCapacity,
    Sampling,
    Weights,
    explain_transfer_out_of_memory,
    extend_rollout,
    non_finite_error,
    start_rollouts,
    stream_key,
)
from ppo_cli.engine.device import Compute
from ppo_cli.engine.leftovers import create_folder, list_rendezvous_files, remove
from ppo_cli.engine.models import read_stop_token_ids
from ppo_cli.engine.models.lora import LoRA, name_as_files, peft_renames, write_adapter
from ppo_cli.engine.pretrained import load_config
from ppo_cli.engine.ranks import GLOO
from ppo_cli.engine.samplers.text import decode_text, find_stop, run_end_ids
from ppo_cli.engine.samplers.worker_errors import log_errors, read_error
from ppo_cli.errors import (
    DataError,
    MissingPart,
    ModelError,
    UserError,
    WorkerLost,
    first_line,
    is_out_of_memory,
)
from ppo_cli.machine.machine import require_supported
from ppo_cli.machine.versions import VLLM_SETUP
from ppo_cli.planning.placement import shared_samplers
from ppo_cli.records import Prompt, Rollout
from ppo_cli.thoughts import Detokenize

EXTENSION = "ppo_cli.engine.samplers.weight_transfer.WorkerExtension"
TRANSFERS = {"memory": "ppo_memory", "gloo": GLOO, "nccl": "nccl", "ipc": "ipc"}
# Substring of a vLLM error message -> advice.
ADVICE = {
    "max_model_len": "Lower --max_prompt_length or --max_response_length",
    "address already in use": "Free that port, or unset VLLM_PORT",
    "not initialized from checkpoint": "Copy the folder again: its weights do not fit config.json",
    "memory": "Free memory, or lower --gpu_memory_utilization or rollout.max_num_seqs",
    "tensor_parallel_size": "Choose another --rollout_tp",
    "attention heads": "Choose another --rollout_tp",
    "architectures": "Take another --model",
    "quantization": "Change quantization in rollout.engine_kwargs.vllm",
}
# Tag of vLLM's memory -> advice when there is not enough device memory on waking.
WAKE_ADVICE = {
    "weights": "keep less there while it trains (actor.fsdp_config.optimizer_offload=true), or "
    "give each model more GPUs (--n_gpus)",
    "kv_cache": "lower --gpu_memory_utilization",
}


def check_vllm() -> None:
    """Raise MissingPart if vLLM is not installed, or in a version that does not fit."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingPart(
            f"--rollout_name vllm needs vLLM, which is not installed: run `{VLLM_SETUP}`, or "
            "sample without it (--rollout_name hf)."
        )
    require_supported("vllm")


def set_environment() -> None:
    """Set vLLM's environment variables before importing it. Variables that are already set win."""
    for name, value in {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # The engine core runs in this process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # With vLLM's own binding each sampler would use the first core of the machine.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Problems are raised as errors.
        "VLLM_LOGGING_LEVEL": "CRITICAL",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        # Otherwise vLLM compiles a few small functions: seconds of time for no gain.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        torch._dynamo.config.disable = True
    # Warnings of vLLM's imports that a user cannot act on.
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.reduce_op` is deprecated")


class VLLMSampler:
    """Samples with vLLM from its own copy of the weights; `engine_kwargs` go to vLLM unchanged.

    `skeleton` is the model without weights, needed if its files use other names for the modules
    of an adapter. With `sleep`, GPU memory can be released while the learner works.
    """

    def __init__(
        self,
        model: str,
        *,
        eos_token_ids: frozenset[int],
        detokenize: Detokenize,
        max_model_len: int,
        dtype: torch.dtype = torch.float32,
        tensor_parallel_size: int = 1,
        cpu_cache_bytes: int = 2**30,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        enforce_eager: bool = False,
        lora: LoRA | None = None,
        skeleton: Any = None,
        transfer: Transfer = "memory",
        sleep: Sleep | None = None,
        **engine_kwargs: Any,
    ) -> None:
        self.capacity = SamplerCapacity(max_num_seqs)
        self._eos_ids = sorted(eos_token_ids)
        self._detokenize = detokenize
        self._max_model_len = max_model_len
        self._lora = lora
        self._skeleton = skeleton
        # One GPU: the engine runs in this process, and tensors are passed directly.
        self._own_process = tensor_parallel_size == 1
        self._folder: Path | None = None
        self._adapter: Any = None
        self._adapters = 0  # how many there have been: ids are never used twice
        self._calls = 0
        self._busy = False
        self._temperature = 1.0
        self._engine: Any = None
        self._rendezvous_files: list[str] = []
        set_environment()
        on_gpu = torch.cuda.is_available()
        self._sleep = sleep if on_gpu else None
        self._asleep: set[str] = set()  # tags of memory that was given back
        self._discarded = False  # no weights have come since they were discarded
        # vLLM's arguments; the user's `engine_kwargs` come last and win.
        options: dict[str, Any] = {
            "model": model,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": max_model_len,
            "tensor_parallel_size": tensor_parallel_size,
            "distributed_executor_backend": "uni" if self._own_process else "mp",
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max(max_num_batched_tokens, max_num_seqs),
            # Compiling for the CPU takes a minute and gains nothing.
            "enforce_eager": enforce_eager or not on_gpu,
            "enable_sleep_mode": self._sleep is not None,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "worker_extension_cls": EXTENSION,
            **engine_kwargs,
        }
        if lora is not None:
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora.padded_rank()}
        if not on_gpu and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            options["kv_cache_memory_bytes"] = cpu_cache_bytes
        self._start_engine(options, transfer)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        weight_version: int,
        begun: Sequence[Rollout] = (),
    ) -> Iterator[Rollout]:
        """Yield `sampling.n` rollouts for each prompt, each as soon as it finishes.

        Rollouts in `begun` continue from a separate seed, so their random numbers differ from
        those without a pause: vLLM's CPU generators start at the beginning and cannot skip. On a
        GPU the same seed could continue, because its hash includes the position, but it is treated
        in the same way. Only one call at a time: exhaust or close its iterator before the next.
        """
        rollouts = [*start_rollouts(prompts, sampling), *begun]
        for prompt in (rollout.prompt for rollout in rollouts):
            if not prompt.token_ids:
                raise DataError(f"The prompt {prompt.uid} has no tokens; give it some text.")
            if len(prompt.token_ids) + sampling.max_tokens > self._max_model_len:
                raise DataError(
                    f"The prompt {prompt.uid} has {len(prompt.token_ids)} tokens; with "
                    f"{sampling.max_tokens} for the response it does not fit the sampler's "
                    f"{self._max_model_len}. Raise --max_prompt_length."
                )
        if self._asleep or self._discarded:
            raise RuntimeError("sampling before the weights have come and the cache is awake")
        return self._generate(rollouts, sampling, weight_version)

    @explain_transfer_out_of_memory()
    def load_weights(self, weights: Weights) -> bool:
        """Load a complete set of new weights, and drop the cache of the old ones."""
        # Adapters go through files, full weights through memory or a shared file.
        if weights.adapter:
            self._require_memory()
            self._load_adapter(weights)
            self._activate_weights(weights.version)
            return False
        self.start_weight_update()
        if self._own_process:
            self.update_weights({"tensors": dict(weights.tensors)})
        else:
            path = self._memory() / "weights.safetensors"
            save_file({name: t.contiguous() for name, t in weights.tensors.items()}, path)
            try:
                self.update_weights({"path": str(path)})
            finally:
                path.unlink()
        self.finish_weight_update(weights.version)
        return False

    def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Connect to a trainer that sends weights between processes (`weight_transfer.Sender`)."""
        self._rpc("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        """Prepare to receive weights."""
        self._require_memory()
        self._rpc("start_weight_update")

    @explain_transfer_out_of_memory()
    def update_weights(self, update_info: Any) -> None:
        """Receive all weights or a part of them."""
        self._rpc("update_weights", update_info=update_info)

    def finish_weight_update(self, version: int) -> None:
        """Activate the received weights."""
        self._rpc("finish_weight_update")
        self._activate_weights(version)

    @property
    def weight_version(self) -> int | None:
        """Return the version of the last loaded weights; None before the first."""
        version = self._engine.get_weight_version()
        return None if version == "default" else int(version)

    def sleep(self) -> None:
        """Release device memory until `wake_weights` and `wake_cache`; does nothing on the CPU.

        With `keep` the weights stay on the device. vLLM copies weights to host memory at level 1
        and discards them at level 2. Its `sleep_preserve_parameter_names` would also copy them,
        but through pageable memory and without the buffers of adapters.
        """
        if self._sleep is None or ("kv_cache" in self._asleep and self._sleep == "keep"):
            return
        self._finish_batches()
        if self._sleep == "keep":
            self._engine.sleep(level=0)  # takes no requests from now on
            self._engine.release_kv_cache_memory()
            self._asleep = {"kv_cache"}
            return
        self._engine.sleep(level=1 if self._sleep == "offload" else 2)
        self._asleep = {"weights", "kv_cache"}
        self._discarded = self._sleep == "discard"

    def wake_weights(self) -> None:
        """Allocate the memory of the weights again, before new weights arrive."""
        self._wake_memory("weights")

    def wake_cache(self) -> None:
        """Allocate the memory of the cache again, before new requests."""
        self._wake_memory("kv_cache")

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        # Twice is safe: the second call finds no engine.
        engine, self._engine = self._engine, None
        if engine is not None:
            from vllm.distributed import cleanup_dist_env_and_memory

            engine.engine_core.shutdown()
            del engine
            gc.collect()
            cleanup_dist_env_and_memory()
        if self._folder is not None:
            remove(self._folder, self._rendezvous_files)
            self._folder = None

    def _start_engine(self, options: dict[str, Any], transfer: str) -> None:
        """Build the vLLM engine from `options`, vLLM's arguments, and a way of weight transfer.

        Raises MissingPart if vLLM does not import, UserError for an argument that vLLM does not
        have, and ModelError if it refuses the model.
        """
        try:
            from vllm import EngineArgs
            from vllm.config import WeightTransferConfig
            from vllm.v1.engine.llm_engine import LLMEngine

            import_module(EXTENSION.rpartition(".")[0])  # fits some versions of vLLM only
        except Exception as error:  # a build for another torch or machine may raise anything
            named, message = type(error).__name__, _first_line(error)
            why = named if message == named else f"{named}: {message}"
            raise MissingPart(
                f"vLLM is installed but does not load here ({why}): install one that fits "
                f"(`{VLLM_SETUP}`), or sample without it (--rollout_name hf)."
            ) from error

        # Unknown arguments are a user's mistake and get a message.
        arguments = {field.name for field in fields(EngineArgs)}
        if unknown := sorted(options.keys() - arguments):
            raise UserError(
                f"vLLM has no argument {', '.join(unknown)} (rollout.engine_kwargs.vllm); leave it "
                "out, or use the name that this version of vLLM has."
            )
        options["weight_transfer_config"] = WeightTransferConfig(backend=TRANSFERS[transfer])
        # All files that vLLM creates go into a folder that `close` removes.
        os.environ["VLLM_RPC_BASE_PATH"] = str(self._memory())
        usual, tempfile.tempdir = tempfile.tempdir, str(self._memory())
        try:
            with nullcontext() if self._own_process else log_errors(self._memory()):
                self._engine = LLMEngine.from_engine_args(EngineArgs(**options))
        except Exception as error:
            cause = self._find_cause(error)
            self.close()
            if isinstance(cause, WorkerLost):
                raise cause from error
            raise ModelError(_refusal_message(options["model"], cause)) from error
        finally:
            tempfile.tempdir = usual
        self._rendezvous_files = list_rendezvous_files(
            self._memory()
        )  # they may be gone before `close`

    def _generate(
        self, begun: Sequence[Rollout], sampling: Sampling, weight_version: int
    ) -> Iterator[Rollout]:
        """Continue the rollouts; yield each one when it ends or reaches the limit of `sampling`.

        Raises RuntimeError while an earlier iterator is still in use. Closing this iterator aborts
        its requests.
        """
        if self._busy:
            raise RuntimeError("the iterator of the last generate() is neither used up nor closed")
        self._busy = True
        waiting = deque(begun)
        jobs: dict[str, Rollout] = {}
        checked: dict[str, int] = {}  # tokens without a stop string
        # Submit up to the capacity, step the engine, yield what finishes or has a stop string.
        try:
            if (temperature := sampling.temperature or 1.0) != self._temperature:
                self._rpc("scale_logits", temperature=temperature)
                self._temperature = temperature
            while waiting or jobs:
                while waiting and len(jobs) < self.capacity.rows:
                    job = waiting.popleft()
                    jobs[self._submit_request(job, sampling)] = job
                for output in self._advance(jobs, waiting):
                    name, drawn = output.request_id, output.outputs[0]
                    if name not in jobs:
                        continue
                    job = jobs[name]
                    start = job.turn_start  # a reply may contain a stop string
                    before = job.token_ids[start:]
                    ids, seen = [*before, *drawn.token_ids], checked.get(name, len(before))
                    checked[name] = len(ids)
                    context = (*job.prompt.token_ids, *job.token_ids[:start])
                    end = find_stop(ids, sampling.stop, self._detokenize, seen, context)
                    if output.finished or end is not None:
                        del jobs[name]
                        if not output.finished:
                            self._engine.abort_request([name], internal=False)
                        new = None if end is None else end - len(before)
                        yield self._build_rollout(job, drawn, new, sampling, weight_version)
        finally:
            self._busy = False
            if jobs and self._engine is not None:
                self._engine.abort_request(list(jobs), internal=False)

    def _advance(self, jobs: dict[str, Rollout], waiting: deque[Rollout]) -> list[Any]:
        """Let vLLM take a step; when memory runs out, restart the requests, half as many at once.

        If vLLM has separate worker processes, it ends when one of them fails; the error is raised.
        """
        try:
            return list(self._engine.step())
        except Exception as error:
            self._raise_cause(error)
            if not is_out_of_memory(error):
                raise
        self._engine.abort_request(list(jobs), internal=False)
        tried = len(jobs)
        waiting.extendleft(reversed(jobs.values()))
        jobs.clear()
        self.capacity.halve(tried)
        return []

    def _submit_request(self, begun: Rollout, sampling: Sampling) -> str:
        """Send vLLM the request that continues a rollout; return the request's id."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        self._calls += 1
        # Request ids are never used twice.
        name = str(self._calls)
        greedy = sampling.temperature == 0
        (uid, sample), drawn = begun.key, len(begun.token_ids)
        stream = f"{uid} from {drawn}" if drawn else uid
        params = SamplingParams(
            # The workers divide logits by the temperature already.
            temperature=0.0 if greedy else 1.0,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=0 if greedy else max(sampling.top_k, 0),
            max_tokens=sampling.length_limit(drawn) - drawn,
            seed=stream_key(begun.seed, stream, sample) >> 1,  # vLLM's are signed
            ignore_eos=True,
            stop_token_ids=self._eos_ids,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            skip_reading_prefix_cache=False,
            # vLLM's stop strings need its tokenizer; ours are searched for after each step.
            output_kind=RequestOutputKind.CUMULATIVE
            if sampling.stop
            else RequestOutputKind.FINAL_ONLY,
        )
        text = TokensPrompt(prompt_token_ids=[*begun.prompt.token_ids, *begun.token_ids])
        self._engine.add_request(name, text, params, lora_request=self._adapter)
        return name

    def _build_rollout(
        self, begun: Rollout, output: Any, end: int | None, sampling: Sampling, weight_version: int
    ) -> Rollout:
        """Extend a rollout by vLLM's output, cut after `end` tokens if a stop string ends there."""
        ids = tuple(output.token_ids)[:end]
        logprobs = np.array(output.logprobs.logprobs, dtype=np.float32)[:end]
        if len(logprobs) != len(ids) or not np.isfinite(logprobs).all():
            raise non_finite_error(weight_version)
        return extend_rollout(
            begun,
            ids,
            logprobs,
            stopped=end is not None or ids[-1] in self._eos_ids,
            sampling=sampling,
            weight_version=weight_version,
            detokenize=self._detokenize,
        )

    def _finish_batches(self) -> None:
        """Let vLLM finish the batches of requests that have ended (private API, tried on 0.32).

        With async scheduling it is one batch ahead, and tells its workers later which have ended.
        """
        core = self._engine.engine_core.engine_core
        while core.scheduler.has_requests() or core.batch_queue:
            self._engine.step()

    def _wake_memory(self, tag: str) -> None:
        """Allocate one part of vLLM's memory again, "weights" or "kv_cache", if it is asleep.

        Raises UserError if it does not fit next to the learner.
        """
        if tag not in self._asleep:
            return
        try:
            self._engine.wake_up(tags=[tag])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"vLLM's {tag.replace('_', ' ')} did not fit next to the learner on waking: "
                f"{WAKE_ADVICE[tag]}, or give vLLM separate GPUs (--placement)."
            ) from error
        self._asleep.remove(tag)

    def _require_memory(self) -> None:
        if "weights" in self._asleep:
            raise RuntimeError("weights came before there was memory for them")

    def _activate_weights(self, version: int) -> None:
        self._engine.set_weight_version(str(version))
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("weights came while responses were under way")
        self._discarded = False

    def _load_adapter(self, weights: Weights) -> None:
        """Replace vLLM's LoRA adapter by these weights, by way of a temporary PEFT folder.

        Raises ModelError if vLLM rejects the adapter.
        """
        if self._lora is None:
            raise RuntimeError("an adapter came, but this sampler was built without LoRA")
        from vllm.lora.request import LoRARequest

        self._adapters += 1
        folder = self._memory() / f"adapter-{self._adapters}"
        tensors = weights.tensors
        if self._skeleton is not None:
            tensors = name_as_files(self._skeleton, tensors)
        write_adapter(folder, self._lora, tensors)
        # vLLM reads adapters from a folder, once.
        fresh = LoRARequest(f"version {weights.version}", self._adapters, str(folder))
        try:
            if self._adapter is not None:
                self._engine.remove_lora(self._adapter.lora_int_id)
            self._engine.add_lora(fresh)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            cause = _first_line(self._find_cause(error))
            raise ModelError(
                f"vLLM does not take this LoRA adapter ({cause}); publish merged "
                "weights with model.lora_merge=true, or use --rollout_name hf."
            ) from error
        finally:
            shutil.rmtree(folder)
        self._adapter = fresh

    def _memory(self) -> Path:
        """Return a private folder that `close` removes, in shared memory if available."""
        if self._folder is None:
            self._folder = create_folder("sampler")
        return self._folder

    def _rpc(self, method: str, **values: Any) -> list[Any]:
        """Call a method of all vLLM workers."""
        try:
            return list(self._engine.collective_rpc(method, kwargs=values))
        except Exception as error:
            self._raise_cause(error)
            raise

    def _raise_cause(self, error: Exception) -> None:
        """Raise the cause of an error, if it is another one: no error may be its own cause."""
        if (cause := self._find_cause(error)) is not error:
            raise cause from error

    def _find_cause(self, error: Exception) -> Exception:
        """Return the error of the worker process that has caused this one, else itself."""
        if self._own_process:
            return error
        if (logged := read_error(self._memory())) is not None:
            return logged
        # Before the engine runs, vLLM raises this type for a worker that is not ready, and others
        # for what it refuses in this process.
        if self._engine is None and type(error) is not Exception:
            return error
        return WorkerLost(
            f"A worker process of vLLM is gone, or does not answer ({first_line(error)}): the "
            "machine may be out of memory. The sampler's log has its last words."
        )


def _refusal_message(model: str, error: Exception) -> str:
    message = _first_line(error)
    mend = next((mend for word, mend in ADVICE.items() if word in message), "Mend that")
    return (
        f"vLLM does not start with {model}: {message}. {mend}, or sample without vLLM "
        "(--rollout_name hf). The sampler's log has the traceback."
    )


def _first_line(error: Exception) -> str:
    """Return the first sentence of an error; pydantic's begin with a count, which is skipped."""
    # A validation error of pydantic has its text in the first entry.
    text = str(error.errors()[0]["msg"] if hasattr(error, "errors") else error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return first.removeprefix("Value error, ").partition(". ")[0].rstrip(" .")


# Largest key-value cache on the CPU; smaller if all sequences fit at full length.
CPU_CACHE_BYTES = 2 * 2**30
CPU_BLOCK = 128  # tokens in a block of vLLM's CPU cache


def build(config: Config, tokenizer: Any, transfer: Transfer) -> VLLMSampler:
    """Build the sampler of a run's settings; it needs a separate process.

    Raises MissingPart if vLLM is not installed, or does not fit.
    """
    check_vllm()
    rollout, settings = config.rollout, config.model
    path = model_folder(settings.path)
    model_config = load_config(path, "--model", settings.trust_remote_code)
    require_length(model_config.to_dict(), settings.path, config.data)
    dtype = Compute.choose(settings.dtype).dtype
    longest = config.data.max_prompt_length + config.data.max_response_length
    end_ids = run_end_ids(read_stop_token_ids(path, model_config, tokenizer), config, tokenizer)
    arguments = dict(rollout.engine_kwargs.vllm)
    if settings.widens_head:
        arguments["hf_overrides"] = {"head_dtype": "float32"} | arguments.get("hf_overrides", {})
    return VLLMSampler(
        path,
        eos_token_ids=end_ids,
        detokenize=partial(decode_text, tokenizer, end_ids=end_ids),
        max_model_len=longest,
        dtype=dtype,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        cpu_cache_bytes=_cache_bytes(model_config, dtype, longest, rollout.max_num_seqs),
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        enforce_eager=rollout.enforce_eager,
        **(_adapter_options(settings, model_config) if config.model.publishes_adapter else {}),
        transfer=transfer,
        sleep=None if shared_samplers(config.trainer) == "none" else config.rollout.sleep,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enable_prefix_caching=rollout.enable_prefix_caching,
        seed=config.rollout.seed,
        trust_remote_code=settings.trust_remote_code,
        **arguments,
    )


def _adapter_options(settings: Model, model_config: Any) -> dict[str, Any]:
    """Return the sampler's options for a LoRA adapter."""
    fused = bool(peft_renames(model_config))
    skeleton = None
    if get_checkpoint_conversion_mapping(model_config.model_type) is not None:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(
                model_config, trust_remote_code=settings.trust_remote_code
            )
    return {
        "lora": LoRA(settings.lora_rank, settings.lora_alpha, fused),
        "skeleton": skeleton,
    }


def _cache_bytes(model_config: Any, dtype: torch.dtype, longest: int, sequences: int) -> int:
    """Return the cache size for all sequences at full length, limited, but at least for one."""
    c = model_config.get_text_config()
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    token = 2 * c.num_hidden_layers * heads * size * dtype.itemsize
    sequence_bytes = token * CPU_BLOCK * (math.ceil(longest / CPU_BLOCK) + 1)
    return int(max(sequence_bytes, min(sequence_bytes * sequences, CPU_CACHE_BYTES)))
