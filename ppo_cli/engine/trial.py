"""A trial at the start of a run: do sampler, annotation and update compute what the model does?

A small random model of the run's architecture is sampled from, annotated and differentiated as in
a run. Its log-probs, values and gradients must match transformers with eager attention on each row
alone, without a cache. The run uses the first mode that matches: SDPA on packed rows, SDPA on
padded rows, eager attention. Verdicts are cached on disk per config and code version.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ppo_cli.algo.batch import Batch, build_batch
from ppo_cli.atomic import atomic_replace
from ppo_cli.config.models.bundled import MODELS, model_folder
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import Sampler, Sampling
from ppo_cli.engine.batches.packing import choose_attention
from ppo_cli.engine.batches.rows import build_micro_batch
from ppo_cli.engine.cpu.lean_layers import use_lean_layers
from ppo_cli.engine.device import Compute
from ppo_cli.engine.models import Policy, ValueModel
from ppo_cli.engine.models.attention import Packing
from ppo_cli.engine.models.gradient_checkpointing import checkpoint_blocks
from ppo_cli.engine.models.policy import split_model
from ppo_cli.engine.models.small_models import (
    MOST_PARAMETERS,
    SPECIAL,
    count_parameters,
    draw_weights,
    shrink_config,
)
from ppo_cli.engine.models.value_models import CRITIC_FLAG, build_value_model
from ppo_cli.engine.pretrained import DAMAGED, load_config
from ppo_cli.engine.ranks import Ranks, gather_objects, run_on_all_ranks
from ppo_cli.engine.training.actor_critic import compute_token_stats
from ppo_cli.errors import ModelError, first_line, is_out_of_memory
from ppo_cli.machine.device_record import cache_folder
from ppo_cli.records import Prompt, Rollout

# The first prompt crosses a shrunk window, the short ones cross it while they are sampled.
PROMPT_TOKENS = (26, 3, 17)
RESPONSES = 2  # to a prompt
RESPONSE_TOKENS = 12
ROWS_AT_ONCE = 4  # in the sampler: fewer than rollouts, so that some prompts join running rows
ENDS = frozenset(range(SPECIAL, SPECIAL + 3))  # ids that end a response
# Largest difference of a log-prob or value, and of a gradient as a share of its norm.
LIMIT = 1e-3
# A gradient below this share of the norm of all gradients is only rounding error.
FAINT = 1e-3


# The difference that is reported when transformers lacks a kernel.
NO_KERNEL = "transformers has no {} attention for this family"


@dataclass(frozen=True)
class TrialConditions:
    """What a verdict depends on besides the model: settings (None: free to choose), and use."""

    kernel: str | None = None
    packing: bool | None = None
    share_prompts: bool = True
    checkpointing: bool = False
    sampler: Callable[..., Sampler] | None = None  # of this process, reading the same weights
    trains: bool = True
    critic: bool = False
    lean: bool = False  # `use_lean_layers` is applied
    remote_code: bool = False
    device: str = "cpu"
    longest_row: int = 0  # tokens; windows that are longer are not tried


@dataclass(frozen=True)
class RunMode:
    """How a model is run: its attention kernel, and packed or padded rows."""

    kernel: str
    packed: bool


@dataclass(frozen=True)
class Verdict:
    """The mode in which a model is run, and what still differs in it: part -> description.

    `rejected` says what is wrong with the modes before it, by "packing" or the kernel's name.
    """

    mode: RunMode
    differences: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    untried: str = ""  # why no small model could be made


@dataclass(frozen=True)
class Numbers:
    """Log-probs or values of response tokens, and the gradient of a weighted sum of them."""

    outputs_BT: Tensor
    gradients: dict[str, Tensor]


def run_trial(config: PreTrainedConfig, conditions: TrialConditions) -> Verdict:
    """Try run modes on a small random model of this config; return the first exact one.

    The fastest mode comes first. If none is exact, the verdict has the last mode and its
    differences; without a small model, a default mode and `untried`, the reason. The caller caches
    verdicts.
    """
    try:
        # A family whose sizes cannot be shrunk runs in the safest mode.
        small, oracle = _build_oracle(config, conditions)
    except Exception as error:  # a family's own code may raise anything at sizes that do not fit
        if is_out_of_memory(error):
            raise
        mode = RunMode(conditions.kernel or "eager", conditions.packing is True)
        return Verdict(mode, untried=first_line(error))
    # The first mode without differences wins; otherwise the last one is reported.
    rejected: dict[str, str] = {}
    for mode in (modes := _list_ways(conditions)):
        differences = try_mode(small, oracle, mode, conditions)
        if not differences:
            return Verdict(mode, rejected=rejected)
        rejected[mode.kernel] = text = "; ".join(differences.values())
        if mode.packed:
            rejected["packing"] = text
    return Verdict(modes[-1], differences, rejected)


def _list_ways(conditions: TrialConditions) -> list[RunMode]:
    """Return the modes to try; modes against a setting come last, to show what is wrong with it."""
    # A set kernel comes first; eager attention always works.
    kernels = dict.fromkeys([conditions.kernel or "sdpa", "eager"])
    layouts = [False] if conditions.packing is False else [True, False]
    modes = [RunMode(kernel, packed) for kernel in kernels for packed in layouts]
    if conditions.packing:
        return sorted(modes, key=lambda mode: not mode.packed)
    # With eager attention, packing needs masks over all tokens and costs more than padding.
    return [mode for mode in modes if not (mode.packed and mode.kernel == "eager")]


def _build_oracle(
    config: PreTrainedConfig, conditions: TrialConditions
) -> tuple[PreTrainedConfig, Policy | ValueModel]:
    """Return a small config and its model with eager attention; raises an error if none works."""
    # First with narrow layers, then with the family's own widths.
    errors: list[Exception] = []
    for narrow in (True, False):
        try:
            small = shrink_config(config, conditions.longest_row, narrow=narrow)
            with torch.device("meta"):
                size = count_parameters(_build_model(small, "eager", conditions).model)
            if size > MOST_PARAMETERS:
                raise ValueError(f"its smallest layers have {size / 1e6:.0f} million parameters")
            oracle = _build_model(small, "eager", conditions)
            draw_weights(oracle.model)
            batch = build_batch(draw_rollouts(oracle)[:1], pad_token_id=0)
            if not compute_alone(oracle, batch).outputs_BT.isfinite().all():
                raise ArithmeticError("random weights do not give it finite numbers")
        except Exception as error:
            errors.append(error)
        else:
            return small, oracle
    raise errors[0]


def _build_model(
    config: PreTrainedConfig, kernel: str, conditions: TrialConditions
) -> Policy | ValueModel:
    """Return an untrained model of a config, in evaluation mode, with attention `kernel`.

    It is a value model if the conditions are those of a critic. On the meta device it stays there.
    """
    options = {"attn_implementation": kernel, "trust_remote_code": conditions.remote_code}
    config = copy.deepcopy(config)  # building a model writes the kernel into its config
    loaded = (
        build_value_model(config, **options)
        if conditions.critic
        else split_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options))
    )
    loaded.model.eval()
    if loaded.model.device.type != "meta":
        loaded.model.to(conditions.device)
    return loaded


def draw_rollouts(loaded: Policy | ValueModel) -> list[Rollout]:
    """Draw random prompts and responses without special tokens."""
    size = loaded.model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)

    def draw_ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2 * SPECIAL, size, (count,), generator=generator).tolist())

    prompts = [Prompt(f"{i}", "", (), "", draw_ids(count)) for i, count in enumerate(PROMPT_TOKENS)]
    return [
        Rollout(prompt, sample, ids, torch.zeros(len(ids)).numpy(), "", "length")
        for prompt in prompts
        for sample in range(RESPONSES)
        for ids in [draw_ids(RESPONSE_TOKENS - 3 * sample)]
    ]


def try_mode(
    small: PreTrainedConfig, oracle: Policy | ValueModel, mode: RunMode, conditions: TrialConditions
) -> dict[str, str]:
    """Return what differs from the oracle in this mode: part -> description."""
    try:
        loaded = _build_model(small, mode.kernel, conditions)
    except DAMAGED as error:
        if "does not support" in str(error):
            return {"model": NO_KERNEL.format(mode.kernel)}
        return {"model": f"it cannot be built ({first_line(error)})"}
    # The same weights, prepared as in a run.
    loaded.model.load_state_dict(oracle.model.state_dict())
    if conditions.lean:
        use_lean_layers(loaded.model)
    if conditions.checkpointing:
        checkpoint_blocks(loaded.model)
    if mode.packed:
        kind = choose_attention(loaded.model)
        if kind is Packing.MASKED and conditions.packing is None:
            return {"packing": "its attention needs masks"}
        shares = conditions.share_prompts and kind is Packing.BY_ROWS
        loaded = replace(loaded, packing=kind, shares_prompts=shares)
    # Compare sampler, annotation and update, each on what the one before gave.
    differences: dict[str, str] = {}
    rollouts = draw_rollouts(oracle)
    if conditions.sampler is not None:
        with _catching_errors("sampler", differences):
            rollouts = _sample_rollouts(conditions.sampler, loaded.model, rollouts)
    batch = build_batch(rollouts, pad_token_id=0)
    exact = compute_alone(oracle, batch)
    if conditions.sampler is not None and not differences:
        _compare_outputs(differences, "sampler", batch.sampler_logprobs_BT, exact, batch)
    if conditions.trains:
        with _catching_errors("annotation", differences), torch.no_grad():
            outputs_BT = _compute_outputs(loaded, batch).detach()
            _compare_outputs(differences, "annotation", outputs_BT, exact, batch)
        with _catching_errors("update", differences):
            numbers = _differentiate(loaded, _compute_outputs(loaded, batch))
            _compare_outputs(differences, "update", numbers.outputs_BT, exact, batch)
            compare_gradients(differences, numbers.gradients, exact.gradients)
    return differences


def compute_alone(oracle: Policy | ValueModel, batch: Batch) -> Numbers:
    """Compute the reference numbers: each row alone, through the model's own forward pass."""
    rows = []
    for i, (prompt, response) in enumerate(
        zip(batch.prompt_len_B.tolist(), batch.response_len_B.tolist(), strict=True)
    ):
        ids_1L = batch.input_ids_BL[i : i + 1, : prompt + response].to(oracle.model.device)
        at = slice(prompt - 1, prompt + response - 1)
        if isinstance(oracle, ValueModel):
            outputs_T = oracle.values_BL(ids_1L)[0, at]
        else:
            logits_TV = oracle.model(input_ids=ids_1L, use_cache=False).logits[0, at].float()
            # Log-probs of the response tokens from the full logits.
            targets_T1 = ids_1L[0, prompt:, None]
            outputs_T = logits_TV.log_softmax(-1).gather(-1, targets_T1)[:, 0]
        rows.append(pad(outputs_T, (0, batch.response_mask_BT.shape[1] - response)))
    return _differentiate(oracle, torch.stack(rows))


def _compute_outputs(loaded: Policy | ValueModel, batch: Batch) -> Tensor:
    """Compute the same numbers as a learner does, in one micro-batch."""
    compute = Compute(loaded.model.device, torch.float32)
    packed = loaded.packing is not None
    micro_batch = build_micro_batch(
        batch, range(len(batch)), compute.device, packed=packed, shared=loaded.shares_prompts
    )
    if isinstance(loaded, ValueModel):
        return micro_batch.scatter(
            micro_batch.gather_states(
                loaded.values_BL(micro_batch.input_ids_BL, micro_batch.packed)
            )
        )
    tokens = compute_token_stats(loaded, micro_batch, compute, temperature=1.0, with_entropy=False)
    return micro_batch.scatter(tokens.logprobs_N)


def _differentiate(loaded: Policy | ValueModel, outputs_BT: Tensor) -> Numbers:
    """Return the outputs, and the gradients of their sum with random weights."""
    # Random weights, so that errors of different tokens cannot cancel.
    weights_BT = torch.randn(outputs_BT.shape, generator=torch.Generator().manual_seed(0))
    loaded.model.zero_grad()
    (outputs_BT * weights_BT.to(outputs_BT)).sum().backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in loaded.model.named_parameters()
    }
    loaded.model.zero_grad()
    return Numbers(outputs_BT.detach().cpu(), gradients)


def _sample_rollouts(
    build: Callable[..., Sampler], model: Any, rollouts: Sequence[Rollout]
) -> list[Rollout]:
    """Return rollouts that a sampler draws with `model`, for the prompts of `rollouts`.

    `build` constructs the sampler.
    """
    sampler = build(
        model, eos_token_ids=ENDS, pad_token_id=0, max_num_seqs=ROWS_AT_ONCE,
        detokenize=lambda before, ids: "", compute=Compute(model.device, torch.float32),
    )  # fmt: skip
    prompts = list({rollout.prompt.uid: rollout.prompt for rollout in rollouts}.values())
    sampling = Sampling(n=RESPONSES, max_tokens=RESPONSE_TOKENS)
    return [*sampler.generate(prompts, sampling, weight_version=0)]


@contextmanager
def _catching_errors(part: str, differences: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a model's own code may raise anything
        if isinstance(error, ModelError) or is_out_of_memory(error):
            raise
        differences[part] = f"the {part} fails ({first_line(error)})"


def _compare_outputs(
    differences: dict[str, str], part: str, outputs_BT: Tensor, exact: Numbers, batch: Batch
) -> None:
    gap_BT = (outputs_BT.cpu() - exact.outputs_BT)[batch.response_mask_BT].abs()
    if not gap_BT.max() <= LIMIT:
        differences[part] = f"numbers of the {part} are {gap_BT.max():.2g} off"


def compare_gradients(
    differences: dict[str, str], gradients: dict[str, Tensor], exact: dict[str, Tensor]
) -> None:
    """Note the first gradient that is off as a share of its own norm."""
    total_norm = torch.stack([gradient.norm() for gradient in exact.values()]).norm()
    for name, gradient in exact.items():
        share = (gradients[name] - gradient).norm() / (gradient.norm() + FAINT * total_norm)
        if not share <= LIMIT:
            differences.setdefault("update", f"the gradient of {name} is {share:.0%} off")


# The bundled models, of one architecture, need no trial with the versions that a test has tried.
BUNDLED_VERDICT = Verdict(RunMode("sdpa", packed=True))
BUNDLED_VERSIONS = ("5.19.0", "2.13.0")  # of transformers and torch
# Part of the trial -> advice when it differs.
ADVICE = {
    "sampler": "Sample with vLLM (rollout.name=vllm), or choose another model.",
    "model": "Choose another model.",
    "annotation": "Choose another model.",
    "update": "Choose another model.",
    "critic": "Choose another --critic_model, or train without one: --adv_estimator grpo.",
}


def choose_run_mode(
    path: str,
    config: Config,
    ranks: Ranks,
    *,
    sampler: Callable[..., Sampler] | None = None,
    trains: bool = True,
    critic: bool = False,
    checkpointing: bool = False,
) -> tuple[Verdict, list[str]]:
    """Return the verdict on a model of the run and remarks for the user; all ranks call.

    Only the first rank tries. Raises ModelError if no mode is exact, or not the mode that was set.
    """
    flag = CRITIC_FLAG if critic else "--model"
    model, device = config.model, Compute.choose(config.model.dtype).device.type
    # All settings that the verdict depends on.
    conditions = TrialConditions(
        kernel=model.attn_implementation,
        packing=model.packing,
        share_prompts=config.model.share_prompts,
        checkpointing=checkpointing,
        sampler=sampler,
        trains=trains,
        critic=critic,
        lean=trains and device == "cpu" and ranks.tensor_size == 1,
        remote_code=model.trust_remote_code,
        device=device,
        longest_row=config.data.max_prompt_length + config.data.max_response_length,
    )

    def judge() -> Verdict | None:
        if ranks.rank:
            return None
        if is_bundled(path, conditions):
            return BUNDLED_VERDICT
        verdict = _find_verdict(load_config(path, flag, model.trust_remote_code), conditions)
        _require_exact(path, verdict, conditions)
        return verdict

    verdict: Verdict = gather_objects(ranks, run_on_all_ranks(ranks, judge))[0]
    return verdict, list(_describe_verdict(path, verdict, conditions))


def _require_exact(path: str, verdict: Verdict, conditions: TrialConditions) -> None:
    """Raise ModelError if the verdict has differences, or if it rejects what the settings ask for.

    The settings may ask for an attention kernel and for packing. `path` names the model in
    messages.
    """
    mode, kernel = verdict.mode, conditions.kernel
    if verdict.differences:
        part, difference = next(iter(verdict.differences.items()))
        named, advice = ("critic", ADVICE["critic"]) if conditions.critic else (part, ADVICE[part])
        raise ModelError(
            f"The {named} does not compute what {path} computes: {difference}, in a trial with "
            f"small random weights, against each row alone in eager attention. {advice}"
        )
    if kernel is not None and mode.kernel != kernel:
        raise ModelError(
            f"model.attn_implementation={kernel} does not compute what {path} computes "
            f"({verdict.rejected[kernel]}). Leave model.attn_implementation out, or set it to "
            f"{mode.kernel}."
        )
    if conditions.packing and not mode.packed:
        raise ModelError(
            f"{path} cannot be trained on packed rows ({verdict.rejected['packing']}). Leave "
            "model.packing out, or take another model."
        )


def _describe_verdict(path: str, verdict: Verdict, conditions: TrialConditions) -> Iterator[str]:
    """Yield remarks for the user on a model that was not tried or runs in a slower mode."""
    if verdict.untried:
        yield (
            f"{path} was not tried: no small model of its architecture can be built "
            f"({verdict.untried}). Rows are padded and attention is {verdict.mode.kernel}; "
            "model.packing and model.attn_implementation change that."
        )
        return
    if conditions.kernel is None and verdict.mode.kernel != "sdpa":
        reason = verdict.rejected["sdpa"]
        # Without figures, so that the remarks on actor and critic of one model are equal.
        reason = reason if reason == NO_KERNEL.format("sdpa") else "sdpa computes something else"
        yield f"Attention of {path} is {verdict.mode.kernel}: {reason}."
    if conditions.packing is None and not verdict.mode.packed and conditions.trains:
        yield f"Rows of {path} are padded: packing does not suit its attention."


def is_bundled(path: str, conditions: TrialConditions) -> bool:
    """Whether this is a bundled model with free choice, in the versions that a test has tried."""
    is_open = conditions.kernel is None and conditions.packing is None
    versions = (transformers.__version__, torch.__version__.partition("+")[0])
    is_ours = path in map(model_folder, MODELS)
    return is_open and is_ours and versions == BUNDLED_VERSIONS


def _find_verdict(config: PreTrainedConfig, conditions: TrialConditions) -> Verdict:
    """Return the verdict on disk, or that of a new trial, which is then stored."""
    # The digest does not cover a model's own code, so such verdicts are not stored.
    file = None if conditions.remote_code else _verdict_file(config, conditions)
    with suppress(OSError, ValueError, KeyError, TypeError):
        if file is not None:
            fields = json.loads(file.read_text())
            return Verdict(**fields | {"mode": RunMode(**fields["mode"])})
    # The trial must not change the run's random state.
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        verdict = run_trial(config, conditions)
    with suppress(OSError):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_replace(file) as fresh:
                fresh.write_text(json.dumps(asdict(verdict)))
    return verdict


def _verdict_file(config: PreTrainedConfig, conditions: TrialConditions) -> Path | None:
    """Return the verdict's file, named by a digest of all inputs and of the engine's code."""
    if (folder := cache_folder()) is None:
        return None
    # The path of the model is not part of its identity.
    digest = hashlib.sha256(_digest_code())
    text = re.sub(r'"_name_or_path": "[^"]*"', "", config.to_json_string(use_diff=False))
    parts = (text, asdict(conditions), torch.__version__,
             transformers.__version__)  # fmt: skip
    digest.update(repr(parts).encode())
    return folder / "trials" / f"{digest.hexdigest()[:32]}.json"


@cache
def _digest_code() -> bytes:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.digest()
