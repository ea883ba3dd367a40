"""Sample from a Hugging Face causal LM with our own key-value cache and continuous batching.

At most `max_num_seqs` rows are sampled together. When a quarter of the cache is idle, finished rows
are dropped and waiting prompts join, longest first, so that a later prompt always fits next to the
running rows. When memory runs out, unfinished rows are sampled again, half as many at once, with
the same results.
Each rollout has its own stream of random numbers, so a draw does not depend on the other rows of
the batch. All rows of the cache end at the same column; shorter rows start later (`starts`). If we
cannot cache a model, its rows are recomputed for each token.
Shapes: R rows, P prompts, C columns, V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.limits import column_problem, require_length
from ppo_cli.config.schema.run import Config, Transfer
from ppo_cli.engine.base import (
    SamplerCapacity,
    Sampling,
    Weights,
    extend_rollout,
    non_finite_error,
    start_rollouts,
    stream_key,
)
from ppo_cli.engine.batches.micro_batches import LEAST_TOKENS, MOST_PADDING
from ppo_cli.engine.batches.packing import choose_attention, choose_run_mode
from ppo_cli.engine.cpu.bfloat16 import (
    CastLayer,
    cast_frozen_weights,
    cast_layers,
    round_embeddings,
)
from ppo_cli.engine.cpu.products import set_matmul_library, use_blas
from ppo_cli.engine.device import Compute, send
from ppo_cli.engine.models import count_embeddings, load_policy, pad_token_id, stop_token_ids
from ppo_cli.engine.models.attention import BY_ROWS
from ppo_cli.engine.models.lora import adapt, load_adapter
from ppo_cli.engine.models.policy import adapted, use_float32_head
from ppo_cli.engine.pretrained import load_config
from ppo_cli.engine.samplers.kv_cache import KVCache, limit_time_steps, plan_cache
from ppo_cli.engine.samplers.text import decode_text, find_stop, run_end_ids
from ppo_cli.errors import DataError, ModelError, is_out_of_memory
from ppo_cli.planning.memory.devices import PREFILL_TOKENS
from ppo_cli.records import Prompt, Rollout
from ppo_cli.thoughts import Detokenize

BUSY_SHARE = 0.75  # new prompts join, and finished rows leave, below this share of busy rows


@dataclass(frozen=True)
class Job:
    """A rollout to sample: `token_ids` are its prompt and the tokens drawn in earlier calls."""

    begun: Rollout
    token_ids: tuple[int, ...]
    key: int


@dataclass
class Rows:
    """The tokens drawn so far, with their log-probs and entropies, for the rows of a cache."""

    jobs: list[Job]
    keys_R: NDArray[np.uint64]
    counts_R: NDArray[np.int64]
    alive_R: NDArray[np.bool_]
    stopped_R: NDArray[np.bool_]
    last_R: NDArray[np.int64]
    most_R: NDArray[np.int64]
    tokens_RT: NDArray[np.int32]
    logprobs_RT: NDArray[np.float32]
    entropies_RT: NDArray[np.float32]

    @classmethod
    def begin(cls, jobs: list[Job], sampling: Sampling) -> Rows:
        """Start rows with only the tokens of earlier calls."""
        counts_R = np.array([len(job.begun.token_ids) for job in jobs], dtype=np.int64)
        shape = (len(jobs), sampling.max_tokens)
        rows = cls(
            jobs=jobs,
            keys_R=np.array([job.key for job in jobs], dtype=np.uint64),
            counts_R=counts_R,
            alive_R=np.ones(len(jobs), dtype=np.bool_),
            stopped_R=np.zeros(len(jobs), dtype=np.bool_),
            last_R=np.zeros(len(jobs), dtype=np.int64),
            most_R=np.array([sampling.length_limit(int(count)) for count in counts_R]),
            tokens_RT=np.empty(shape, dtype=np.int32),
            logprobs_RT=np.empty(shape, dtype=np.float32),
            entropies_RT=np.empty(shape, dtype=np.float32),
        )
        for i, job in enumerate(jobs):
            rows.tokens_RT[i, : counts_R[i]] = job.begun.token_ids
        return rows

    def select(self, indices: NDArray[np.int64]) -> Rows:
        """Return only the rows at these indices."""
        arrays = {name: getattr(self, name)[indices] for name in ARRAYS}
        return Rows(jobs=[self.jobs[i] for i in indices], **arrays)

    def list_ids(self) -> list[tuple[int, ...]]:
        """Return the ids of each row, those of its prompt first."""
        return [
            (*job.begun.prompt.token_ids, *ids[:count].tolist())
            for job, ids, count in zip(self.jobs, self.tokens_RT, self.counts_R, strict=True)
        ]

    def alive_jobs(self) -> list[Job]:
        """Return the jobs of unfinished rows."""
        return [job for job, alive in zip(self.jobs, self.alive_R, strict=True) if alive]

    def join(self, other: Rows) -> Rows:
        """Return these rows followed by the other's."""
        arrays = {n: np.concatenate([getattr(self, n), getattr(other, n)]) for n in ARRAYS}
        return Rows(jobs=self.jobs + other.jobs, **arrays)


ARRAYS = (
    "keys_R", "counts_R", "alive_R", "stopped_R", "last_R", "most_R", "tokens_RT", "logprobs_RT",
    "entropies_RT",
)  # fmt: skip


@dataclass
class RunningRows:
    """The running rows, their cache, its number of columns, and the column where each row starts.

    Without a cache, rows are recomputed for each token.
    """

    rows: Rows
    cache: KVCache | None
    width: int
    starts_R: Tensor
    # The attention mask; rebuilt when rows join or leave, not needed without padding.
    mask_RC: Tensor | None = None


class HFSampler:
    """Samples rollouts from a causal LM, using the model's live weights."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: frozenset[int],
        pad_token_id: int,
        max_num_seqs: int,
        detokenize: Detokenize,
        compute: Compute | None = None,
        with_entropies: bool = False,
    ) -> None:
        self._model = model
        # transformers cannot compute router losses for a single new token: the mask is longer.
        outputs_router_logits = getattr(
            model.config.get_text_config(), "output_router_logits", False
        )
        self._options = {"output_router_logits": False} if outputs_router_logits else {}
        self._with_entropies = with_entropies
        # Rows are administered in numpy on the host.
        self._eos_ids = np.array(sorted(eos_token_ids), dtype=np.int64)
        self._pad_id = pad_token_id
        self._weight_version = 0
        self.capacity = SamplerCapacity(max_num_seqs)
        self._detokenize = detokenize
        self._autocast = nullcontext if compute is None else compute.autocast
        self._dtype = torch.float32 if compute is None else compute.dtype
        self._plan = plan_cache(model)
        attention = model.config._attn_implementation
        # `attend_by_rows` itself leaves small products to BLAS; other attention does not.
        self._decoding = nullcontext if attention == BY_ROWS else use_blas
        slides = self._plan is not None and self._plan.slides
        self._takes_ready_mask = not slides and attention in ("sdpa", BY_ROWS)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        weight_version: int,
        begun: Sequence[Rollout] = (),
    ) -> Iterator[Rollout]:
        """Yield `sampling.n` rollouts for each prompt, each as soon as it finishes.

        Rollouts in `begun` continue as if there had been no pause: token t of a response is drawn
        with number t of its stream.
        """
        rollouts = [*start_rollouts(prompts, sampling), *begun]
        for rollout in rollouts:
            if not rollout.prompt.token_ids:
                raise DataError(
                    f"The prompt {rollout.prompt.uid} has no tokens; give it some text."
                )
        return self._generate(rollouts, sampling, weight_version)

    @torch.no_grad()
    def load_weights(self, weights: Weights) -> bool:
        """Copy new weights into the model, or use them in place if they are persistent."""
        if weights.adapter:
            load_adapter(self._model, weights.tensors)
            return False
        # Weights in the same dtype on the same device are used in place.
        parameters = dict(self._model.named_parameters())
        if parameters.keys() != weights.tensors.keys():
            odd = sorted(parameters.keys() ^ weights.tensors.keys())
            raise RuntimeError(f"weights are not those of this model: {odd[:3]} on one side only")
        pairs = [(tensor, weights.tensors[name]) for name, tensor in parameters.items()]
        in_place = weights.persistent and all(mine.type() == new.type() for mine, new in pairs)
        for mine, new in pairs:
            if in_place:
                mine.data = new
            else:
                mine.copy_(new)
        return in_place

    def sleep(self) -> None:
        """Release the allocator's cached memory."""
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_weights(self) -> None:
        """Does nothing: the weights stay on the device."""

    def wake_cache(self) -> None:
        """Does nothing: cache memory is allocated when rows arrive."""

    def close(self) -> None:
        """Does nothing: all memory ends with the process."""

    def _generate(
        self, begun: Sequence[Rollout], sampling: Sampling, weight_version: int
    ) -> Iterator[Rollout]:
        """Continue the rollouts; yield each one when it ends or reaches the limit of `sampling`."""
        self._weight_version = weight_version
        # Weights of linear layers are cast once for the whole call.
        waiting = _list_jobs(begun)
        running: RunningRows | None = None
        cast = [] if self._dtype == torch.float32 else cast_layers(self._model, self._dtype)
        while waiting or running is not None:
            # No context may stay open at a yield: it would leak into the consumer's code.
            with self._sampling_mode(cast):
                running, finished = self._advance(waiting, running, sampling)
            for rows, i in finished:
                yield self._build_rollout(rows, i, sampling, weight_version)
            finished = []

    def _advance(
        self, waiting: list[Job], running: RunningRows | None, sampling: Sampling
    ) -> tuple[RunningRows | None, list[tuple[Rows, int]]]:
        """Sample until a rollout finishes; return the running rows and the finished ones."""
        finished: list[tuple[Rows, int]] = []
        while not finished and (waiting or running is not None):
            # Admit waiting prompts when enough rows are free.
            under_way = [] if running is None else running.rows.alive_jobs()
            admitted: list[Job] = []
            if waiting and len(under_way) <= BUSY_SHARE * self.capacity.rows:
                equal = self._plan is not None and self._plan.keeps_states
                admitted = _next_jobs(waiting, self.capacity.rows - len(under_way), equal=equal)
            try:
                running = _compact(running, at_once=bool(admitted))
                if admitted:
                    running, finished = self._admit(running, admitted, sampling)
                elif running is not None:
                    finished = self._decode(running, sampling)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if running is not None and running.cache is not None:
                    running.cache.layers.clear()  # other references then hold no memory
                running, finished = None, []
            else:
                if running is not None and not running.rows.alive_R.any():
                    running = None
                continue
            # Outside of the except block, because the error's traceback keeps tensors alive.
            waiting += [*under_way, *admitted]
            waiting.sort(key=lambda job: len(job.token_ids))  # as in `_list_jobs`
            self.capacity.halve(len(under_way) + len(admitted))
        return running, finished

    def _admit(
        self, running: RunningRows | None, jobs: list[Job], sampling: Sampling
    ) -> tuple[RunningRows | None, list[tuple[Rows, int]]]:
        """Run the prompts of these jobs, draw their first tokens, and join the unfinished rows."""
        # Each distinct prompt is run once for all its responses.
        rows = Rows.begin(jobs, sampling)
        places: dict[tuple[int, ...], int] = {}
        prompt_index = [places.setdefault(job.token_ids, len(places)) for job in jobs]
        prompts = list(places)
        cache, starts_P, logits_PV = self._prefill(prompts)
        # Responses to one prompt share its logits for the first token.
        index_R = send(torch.tensor(prompt_index), self._model.device)
        done = self._record(rows, logits_PV[index_R], sampling)
        alive = np.flatnonzero(rows.alive_R)
        if not len(alive):
            return running, done
        index_R = index_R[send(torch.from_numpy(alive), index_R.device)]
        # Rows that ended with their first token never enter the cache.
        rows, width, starts_R = rows.select(alive), max(map(len, prompts)), starts_P[index_R]
        if running is None:
            if cache is not None and (len(index_R) != len(prompts) or len(alive) != len(jobs)):
                cache.batch_select_indices(index_R)
            return RunningRows(rows, cache, width, starts_R), done
        # Right-align the new rows with the running ones.
        if running.cache is not None and cache is not None:
            running.cache.append_rows(cache, index_R)
        starts_R = torch.cat([running.starts_R, starts_R + running.width - width])
        return RunningRows(running.rows.join(rows), running.cache, running.width, starts_R), done

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[KVCache | None, Tensor, Tensor]:
        """Run left-padded prompts; return their cache, start columns and last logits."""
        device = self._model.device
        lengths_P = np.array([len(prompt) for prompt in prompts])
        width = int(lengths_P.max())
        starts_P = send(torch.from_numpy(width - lengths_P), device)
        if self._plan is None:
            return None, starts_P, self._compute_without_cache(prompts)
        # Prompts are padded on the left, so that all end at the same column.
        ids_PC = np.full((len(prompts), width), self._pad_id, dtype=np.int64)
        for i, prompt in enumerate(prompts):
            ids_PC[i, width - lengths_P[i] :] = prompt
        offsets_PC = torch.arange(width, device=device) - starts_P[:, None]
        cache = KVCache(self._plan)
        out = self._model(
            input_ids=send(torch.from_numpy(ids_PC), device),
            attention_mask=None if (lengths_P == width).all() else (offsets_PC >= 0).long(),
            position_ids=offsets_PC.clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
            **{self._plan.parameter: cache},
            **self._options,
        )
        return cache, starts_P, out.logits[:, -1]

    def _decode(self, running: RunningRows, sampling: Sampling) -> list[tuple[Rows, int]]:
        """Run the last tokens and draw the next ones; return the rows that finish."""
        if self._plan is None:
            logits_RV = self._compute_without_cache(running.rows.list_ids())
            return self._record(running.rows, logits_RV, sampling)
        # One new column for all rows.
        last_R1 = send(torch.from_numpy(running.rows.last_R), self._model.device)[:, None]
        running.width += 1
        with self._decoding():
            out = self._model(
                input_ids=last_R1,
                attention_mask=self._mask(running, running.width) if self._plan.attends else None,
                position_ids=(running.width - 1 - running.starts_R)[:, None],
                use_cache=True,
                logits_to_keep=1,
                **{self._plan.parameter: running.cache},
                **self._options,
            )
        return self._record(running.rows, out.logits[:, -1], sampling)

    def _compute_without_cache(self, rows: Sequence[tuple[int, ...]]) -> Tensor:
        """Return the last logits of rows without a cache, rows of equal length together."""
        logits_R: list[Tensor] = [torch.empty(0)] * len(rows)
        for length in {len(ids) for ids in rows}:
            places = [i for i, ids in enumerate(rows) if len(ids) == length]
            ids_PC = torch.tensor([rows[i] for i in places], device=self._model.device)
            out = self._model(input_ids=ids_PC, use_cache=False, logits_to_keep=1, **self._options)
            for i, logits_V in zip(places, out.logits[:, -1], strict=True):
                logits_R[i] = logits_V
        return torch.stack(logits_R)

    def _mask(self, running: RunningRows, length: int) -> Tensor | None:
        if running.mask_RC is None or running.mask_RC.shape[1] < length:
            columns_C = torch.arange(length + 64, device=running.starts_R.device)
            running.mask_RC = columns_C >= running.starts_R[:, None]
        mask_RC = running.mask_RC[:, :length]
        return mask_RC[:, None, None] if self._takes_ready_mask else mask_RC.long()

    def _record(self, rows: Rows, logits_RV: Tensor, sampling: Sampling) -> list[tuple[Rows, int]]:
        """Draw and record a token for each row, and return the rows that end with it."""
        uniforms_R = compute_uniforms(rows.keys_R, rows.counts_R)
        drawn_R, logprob_R, entropy_R = draw_tokens(
            logits_RV, sampling, uniforms_R, self._with_entropies
        )
        # One copy, so that the host waits for the device once; float64 holds all three exactly.
        numbers_3R = (
            torch.stack([x.double() for x in (drawn_R, logprob_R, entropy_R)]).cpu().numpy()
        )
        tokens_R = numbers_3R[0].astype(np.int64)
        logprobs_R, entropies_R = numbers_3R[1:].astype(np.float32)
        if not np.isfinite(logprobs_R[rows.alive_R]).all():
            raise non_finite_error(self._weight_version)
        live = np.flatnonzero(rows.alive_R)
        rows.tokens_RT[live, rows.counts_R[live]] = tokens_R[live]
        rows.logprobs_RT[live, rows.counts_R[live]] = logprobs_R[live]
        rows.entropies_RT[live, rows.counts_R[live]] = entropies_R[live]
        rows.counts_R[live] += 1
        rows.last_R = np.where(rows.alive_R, tokens_R, self._pad_id)
        rows.stopped_R[live] = np.isin(tokens_R[live], self._eos_ids)
        # Stop strings need the decoded text.
        for i in live if sampling.stop else ():
            begun = rows.jobs[i].begun
            start = begun.turn_start  # a reply may contain a stop string
            ids: list[int] = rows.tokens_RT[i, start : rows.counts_R[i]].tolist()
            before = (*begun.prompt.token_ids, *begun.token_ids[:start])
            if find_stop(ids, sampling.stop, self._detokenize, len(ids) - 1, before) is not None:
                rows.stopped_R[i] = True
        # A row ends with an end token, a stop string or at its maximal length.
        ends_R = rows.stopped_R | (rows.counts_R >= rows.most_R)
        done = np.flatnonzero(ends_R & rows.alive_R)
        rows.alive_R[done] = False
        return [(rows, int(i)) for i in done]

    def _build_rollout(
        self, rows: Rows, i: int, sampling: Sampling, weight_version: int
    ) -> Rollout:
        """Return the rollout of row `i`, extended by the row's sampled tokens and log-probs.

        Entropies are added if the sampler records them.
        """
        begun = rows.jobs[i].begun
        new = slice(len(begun.token_ids), int(rows.counts_R[i]))
        rollout = extend_rollout(
            begun,
            rows.tokens_RT[i, new].tolist(),
            rows.logprobs_RT[i, new],
            stopped=bool(rows.stopped_R[i]),
            sampling=sampling,
            weight_version=weight_version,
            detokenize=self._detokenize,
        )
        if not self._with_entropies:
            return rollout
        before = np.empty(0, np.float32) if begun.entropies is None else begun.entropies
        return replace(rollout, entropies=np.concatenate([before, rows.entropies_RT[i, new]]))

    @contextmanager
    def _sampling_mode(self, cast: Sequence[CastLayer]) -> Iterator[None]:
        """Context for sampling: no gradients, the sampling precision, cast weights."""
        for layer in cast:
            layer.install()
        try:
            states = self._plan is not None and self._plan.keeps_states
            limits = limit_time_steps(self._model) if states else nullcontext()
            with torch.inference_mode(), self._autocast(), limits:
                yield
        finally:
            for layer in cast:
                layer.uninstall()


def _list_jobs(begun: Sequence[Rollout]) -> list[Job]:
    """Return one job per rollout, shortest first: jobs are taken from the end."""
    jobs = [
        Job(
            rollout,
            rollout.prompt.token_ids + rollout.token_ids,
            stream_key(rollout.seed, *rollout.key),
        )
        for rollout in begun
    ]
    return sorted(jobs, key=lambda job: len(job.token_ids))


def _next_jobs(waiting: list[Job], room: int, *, equal: bool) -> list[Job]:
    """Take jobs from the end of the list that fit the free rows and one pass with little padding.

    With `equal`, only jobs of equal length are taken together, because padding is not allowed.
    """
    width = len(waiting[-1].token_ids)
    jobs: list[Job] = []
    prompts: set[tuple[int, ...]] = set()
    tokens = 0
    while waiting and len(jobs) < room:
        prompt = waiting[-1].token_ids
        if equal and len(prompt) != width:
            break
        if prompts and prompt not in prompts:
            padded = (len(prompts) + 1) * width
            padding = padded - tokens - len(prompt)
            if padded > (PREFILL_TOKENS if padding <= MOST_PADDING * padded else LEAST_TOKENS):
                break
        if prompt not in prompts:
            prompts.add(prompt)
            tokens += len(prompt)
        jobs.append(waiting.pop())
    return jobs


def _compact(running: RunningRows | None, *, at_once: bool = False) -> RunningRows | None:
    """Drop finished rows and unused columns when enough rows are idle, or `at_once`."""
    if running is None:
        return None
    alive_R = running.rows.alive_R
    if alive_R.all() or (alive_R.sum() > BUSY_SHARE * len(alive_R) and not at_once):
        return running
    # Columns before the first start are unused.
    alive = np.flatnonzero(alive_R)
    index_R = send(torch.from_numpy(alive), running.starts_R.device)
    starts_R = running.starts_R[index_R]
    unused = int(starts_R.min())
    if running.cache is not None:
        running.cache.trim(unused)
        running.cache.batch_select_indices(index_R)
    width = running.width - unused
    return RunningRows(running.rows.select(alive), running.cache, width, starts_R - unused)


def build_shared_sampler(
    model: Any, config: Config, tokenizer: Any, *, with_entropies: bool = False,
    end_ids: frozenset[int] | None = None,
) -> HFSampler:  # fmt: skip
    """Build the hf sampler on a loaded model; it uses the model's live weights.

    `end_ids` are the tokens that end a response; None: those of the model and of a run.
    """
    if problem := column_problem(model.config.to_dict(), config.model.path, config.data):
        raise ModelError(problem)
    if end_ids is None:
        end_ids = run_end_ids(stop_token_ids(model, tokenizer), config, tokenizer)
    return HFSampler(
        model,
        eos_token_ids=end_ids,
        pad_token_id=pad_token_id(tokenizer, count_embeddings(model)),
        max_num_seqs=config.rollout.max_num_seqs,
        detokenize=partial(decode_text, tokenizer, end_ids=end_ids),
        compute=Compute.choose(config.model.dtype),
        with_entropies=with_entropies,
    )


def build(config: Config, tokenizer: Any, transfer: Transfer) -> HFSampler:
    """Build a sampler that loads its own copy of the model."""
    settings = config.model
    set_matmul_library(settings.float32_matmul)
    path = model_folder(settings.path)
    model_config = load_config(path, "--model", settings.trust_remote_code)
    mode, _ = choose_run_mode(path, model_config, settings)
    policy = load_policy(
        path,
        trust_remote_code=settings.trust_remote_code,
        attn_implementation=mode.kernel,
    )
    require_length(policy.model.config.to_dict(), settings.path, config.data)
    inject = adapt(settings, config.trainer.seed) if config.model.publishes_adapter else None
    model = adapted(policy, inject).model
    if mode.packed:
        choose_attention(model)
    compute = Compute.choose(settings.dtype)
    on_cpu = compute.device.type == "cpu"
    round_embeddings(model.requires_grad_(False).eval(), compute.dtype, untied=not on_cpu)
    if not on_cpu:
        cast_frozen_weights(model, compute.dtype)
    # After the cast, which knows plain layers: the widened one holds operands of that type too.
    if settings.widens_head:
        use_float32_head(model, compute.dtype)
    model.to(compute.device)
    return build_shared_sampler(model, config, tokenizer)


# Constants of SplitMix64.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_A = np.uint64(0xBF58476D1CE4E5B9)
MIX_B = np.uint64(0x94D049BB133111EB)


def compute_uniforms(
    keys_R: NDArray[np.uint64], positions_R: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return number `position` of each stream, in [0, 1): SplitMix64 (Steele et al., 2014)."""
    x = keys_R + (positions_R.astype(np.uint64) + np.uint64(1)) * GOLDEN
    x = (x ^ (x >> np.uint64(30))) * MIX_A
    x = (x ^ (x >> np.uint64(27))) * MIX_B
    x ^= x >> np.uint64(31)
    # 24 bits are what float32 holds without rounding up to 1.
    uniforms_R: NDArray[np.float32] = (x >> np.uint64(40)).astype(np.float32)
    return uniforms_R * np.float32(2.0**-24)


def draw_tokens(
    logits_RV: Tensor,
    sampling: Sampling,
    uniforms_R: NDArray[np.float32],
    with_entropies: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, and their log-probs and entropies under the temperature, before top-k, top-p.

    Temperature 0 takes the most likely token; its log-prob is that of temperature 1. Entropies
    are zeros unless `with_entropies`.
    """
    logits_RV = logits_RV.float()
    # Temperature, then a draw by inverting the cumulative distribution.
    if sampling.temperature not in (0, 1):
        logits_RV = logits_RV / sampling.temperature
    probs_RV = logits_RV.softmax(-1)
    if sampling.temperature == 0:
        chosen_R1 = logits_RV.argmax(-1, keepdim=True)
    else:
        uniforms_R1 = send(torch.from_numpy(uniforms_R), logits_RV.device)[:, None]
        chosen_R1 = _draw_tokens(probs_RV, sampling, uniforms_R1)
    chosen_R = chosen_R1[:, 0]
    logprobs_R = probs_RV.gather(-1, chosen_R1)[:, 0].log()
    if not with_entropies:
        return chosen_R, logprobs_R, torch.zeros_like(logprobs_R)
    logsumexp_R = logits_RV.gather(-1, chosen_R1)[:, 0] - logprobs_R
    return chosen_R, logprobs_R, logsumexp_R - torch.linalg.vecdot(probs_RV, logits_RV)


def _draw_tokens(probs_RV: Tensor, sampling: Sampling, uniforms_R1: Tensor) -> Tensor:
    """Draw one token id per row, (R, 1), after top-k and top-p, by inverting the cumulative sum.

    `uniforms_R1` are random numbers in [0, 1), one per row.
    """
    top_k = min(sampling.top_k, probs_RV.shape[-1])
    if top_k <= 0 and sampling.top_p >= 1:
        return _invert(probs_RV, uniforms_R1)
    if top_k > 0:
        probs_RK, ids_RK = probs_RV.topk(top_k, dim=-1)
        probs_RK = probs_RK / probs_RK.sum(-1, keepdim=True)
    else:
        probs_RK, ids_RK = probs_RV.sort(dim=-1, descending=True)
    # A candidate stays if the probability of those before it is below top_p; the first always.
    if sampling.top_p < 1:
        before_RK = probs_RK.cumsum(-1) - probs_RK
        before_RK[:, 0] = 0
        probs_RK = probs_RK.masked_fill(before_RK >= sampling.top_p, 0.0)
    return ids_RK.gather(-1, _invert(probs_RK, uniforms_R1))


def _invert(probs_RK: Tensor, uniforms_R1: Tensor) -> Tensor:
    """Return the first place where the running sum passes the uniform's share of the total."""
    sums_RK = probs_RK.cumsum(-1)
    total_R1 = sums_RK[:, -1:]
    # Rounding must not raise the target to the total: no sum is larger.
    target_R1 = torch.minimum(
        uniforms_R1 * total_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1))
    )
    place_R1 = torch.searchsorted(sums_RK, target_R1, right=True)
    return place_R1.clamp_(max=probs_RK.shape[-1] - 1)
