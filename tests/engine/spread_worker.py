"""One rank of a few: trains small models spread over ranks, and alone, and says how they differ.

Run as `python spread_worker.py RANK SIZE FOLDER`; writes FOLDER/report-RANK.json.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from ppo_cli.config.schema.algorithm import CriticModel, Sharding
from ppo_cli.config.schema.run import Model
from ppo_cli.engine import learner
from ppo_cli.engine.checkpoint import stored_tensors
from ppo_cli.engine.models import Policy, load_policy
from ppo_cli.engine.models.lora import adapt, merged_tensors
from ppo_cli.engine.models.policy import adapted
from ppo_cli.engine.models.value_models import load_value_model
from ppo_cli.engine.ranks import (
    ALONE,
    Ranks,
    gather_objects,
    join_ranks,
    run_on_all_ranks,
    sum_over_ranks,
)
from ppo_cli.engine.sharding.gathered import CountedGather, CountedReduction, ShardedModel
from ppo_cli.engine.sharding.load import load_sharded
from ppo_cli.engine.sharding.tensors import gather_copy
from ppo_cli.engine.training import actor_critic
from ppo_cli.errors import ConfigError
from ppo_cli.planning.memory.plan import with_settings
from tests.engine.packed_steps import MIXED, Rows, Seen, gaps, settings, take_steps
from tests.engine.published_weights import published
from tests.engine.spread_training import (
    BFLOAT16,
    FLOAT32,
    TrainedModel,
    compare,
    gap,
    policy_loss,
    rows,
    train,
)

CaseReport = dict[str, Any]

WHOLE = Sharding(reshard_after_forward=False)
ALONE_ALREADY: dict[str, TrainedModel] = {}


def load(ranks: Ranks, path: str, sharding: Sharding | None = None, **options: Any) -> Policy:
    return load_sharded(load_policy, path, ranks, sharding or Sharding(), FLOAT32, **options)


def both(
    ranks: Ranks, path: str, *, value: bool = False, sharding: Sharding | None = None, **load: Any
) -> tuple[TrainedModel, TrainedModel | None]:
    """Train the same model spread, and on the first rank alone too."""
    loader: Callable[..., Any] = partial(load_sharded, load_value_model if value else load_policy)
    settings = sharding or Sharding()
    compute = load.pop("compute", FLOAT32)
    spread = train(loader(path, ranks, settings, compute, **load), ranks, compute)
    if ranks.rank > 0:
        return spread, None
    key = f"{path} {value} {compute.dtype} {load.get('prepare')}"
    if key not in ALONE_ALREADY:
        ALONE_ALREADY[key] = train(loader(path, ALONE, settings, compute, **load), ALONE, compute)
    return spread, ALONE_ALREADY[key]


def train_both(ranks: Ranks, models: dict[str, str], *, model: str, **options: Any) -> CaseReport:
    """A case that has nothing to tell but how the two trainings compare."""
    return compare(*both(ranks, models[model], **options))


def drift(spread: TrainedModel, ranks: Ranks) -> float:
    """How far the whole parameters of the ranks are apart: tensor-parallel ones hold copies."""
    return max(gap(spread.parameters, other) for other in gather_objects(ranks, spread.parameters))


def mix(model: Any) -> Any:
    """Freeze all but the norms and the down projections, as an adapter would."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "down_proj" in name)
    return model


MIX = partial(adapted, adapt=mix)


def stored_share(spread: TrainedModel) -> float:
    """The share of the parameters' memory that this rank holds."""
    parameters = list(spread.model.model.parameters())
    local = sum(p.to_local().numel() for p in parameters if isinstance(p, DTensor))
    return local / sum(p.numel() for p in parameters)


def tied_case(ranks: Ranks, models: dict[str, str]) -> CaseReport:
    spread, alone = both(ranks, models["tied"])
    model = spread.model.model
    return compare(spread, alone) | {
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "stored_share": stored_share(spread), "stop": model.generation_config.eos_token_id,
        "drift": drift(spread, ranks),
    }  # fmt: skip


def checkpointed_case(ranks: Ranks, models: dict[str, str]) -> CaseReport:
    """Gradients with and without gradient checkpointing, and how often a block was computed."""
    results: CaseReport = {"gaps": [], "passes": []}
    for sharding in (Sharding(), WHOLE):
        gradients = []
        for checkpointing in (False, True):
            policy = load(ranks, models["untied"], sharding, gradient_checkpointing=checkpointing)
            passes: list[object] = []
            block: Any = policy.backbone.layers[1]  # type: ignore[index]
            block.mlp.register_forward_pre_hook(lambda *_, passes=passes: passes.append(None))
            with policy.awake():
                policy.weights_context.sync_gradients(True)
                policy_loss(policy, rows(0, 60)[ranks.data_rank :: ranks.data_size]).backward()
            gradients.append({n: gather_copy(p.grad) for n, p in policy.model.named_parameters()})
            results["passes"].append(len(passes))
        results["gaps"].append(gap(*gradients))
    return results


def frozen_case(ranks: Ranks, models: dict[str, str]) -> CaseReport:
    spread, alone = both(
        ranks, models["untied"], prepare=MIX, sharding=WHOLE, gradient_checkpointing=True
    )
    with torch.no_grad():
        policy_loss(spread.model, rows(0, 60)[:1])
    pieces = all(isinstance(p, DTensor) for p in spread.model.model.parameters())
    return compare(spread, alone) | {"trained": len(spread.moments) // 3, "pieces": pieces}


def whole_case(ranks: Ranks, models: dict[str, str]) -> CaseReport:
    """Weights are gathered once a step."""
    policy = both(ranks, models["tied"], sharding=WHOLE)
    value = both(ranks, models["untied"], value=True, sharding=WHOLE)
    lora = both(ranks, models["tied"], sharding=WHOLE, prepare=ADAPT)
    mixed = both(ranks, models["untied"], sharding=WHOLE, compute=BFLOAT16)
    return {
        "policy": compare(*policy), "value": compare(*value), "lora": compare(*lora),
        "bfloat16": compare(*mixed),
        "pieces": all(isinstance(p, DTensor) for p in policy[0].model.model.parameters()),
    }  # fmt: skip


def reference_case(ranks: Ranks, models: dict[str, str]) -> CaseReport:
    """A reference in host memory; `moves` is how often its pieces come and go in two steps."""
    place = ShardedModel._place_pieces
    config = settings(model={"path": models["tied"]}, ref={"param_offload": True})
    moves: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ShardedModel, "_place_pieces",
            lambda self, device: (moves.append(bool(self._homes)), place(self, device)),
        )  # fmt: skip
        spread = take_steps(config, ranks, MIXED, steps=2)
    if ranks.rank > 0:
        return {}
    return gaps(spread, padded_alone(models["tied"], 0, MIXED)) | {"moves": sum(moves)}


def bfloat16_case(ranks: Ranks, models: dict[str, str]) -> CaseReport:
    policies = both(ranks, models["untied"], compute=BFLOAT16)
    values = both(ranks, models["untied"], compute=BFLOAT16, value=True)
    dtypes = {str(p.dtype) for p in policies[0].parameters.values()}
    return {
        "policy": compare(*policies), "value": compare(*values), "dtypes": sorted(dtypes),
    }  # fmt: skip


def parted_case(ranks: Ranks, models: dict[str, str]) -> CaseReport:
    """The config ties the output head, the files hold another one: every rank follows them."""
    spread, alone = both(ranks, models["parted"])
    model = spread.model.model
    saved = "lm_head.weight" in stored_tensors(model)
    return compare(spread, alone) | {"saved": saved, "tied": model.config.tie_word_embeddings}


ADAPT = partial(adapted, adapt=adapt(Model(lora_rank=4), 42))
ADAPT_VALUE = partial(adapted, adapt=adapt(CriticModel(lora_rank=4), 42))


def lora_case(ranks: Ranks, models: dict[str, str]) -> CaseReport:
    """Adapters of the first rank on all."""
    spread, alone = both(ranks, models["tied"], prepare=ADAPT)
    value = train_both(ranks, models, model="untied", value=True, prepare=ADAPT_VALUE)
    adapters = sum("lora_" in n for n in spread.parameters)
    return compare(spread, alone) | {"adapters": adapters, "value": value}


def experts_case(ranks: Ranks, models: dict[str, str]) -> CaseReport:
    """Adapters of experts and routers, and what their merged weights are."""
    spread, alone = both(ranks, models["experts"], prepare=ADAPT, gradient_checkpointing=True)
    merged = dict(merged_tensors(spread.model.model, gather_copy))
    if alone is None:
        return {"norms": spread.norms}
    expected = dict(merged_tensors(alone.model.model, gather_copy))
    return compare(spread, alone) | {"merged": gap(merged, expected)}


def broken_off_case(ranks: Ranks, models: dict[str, str]) -> CaseReport:
    """Work that fails in the middle, and a backward that does, leave a model that works."""
    policy = load(ranks, models["untied"])
    ids = rows(0, 60)

    def fail(ids_BL: Tensor) -> tuple[Tensor, ...]:
        policy.backbone.layers[0].register_forward_hook(stop)  # type: ignore[union-attr,operator]
        return (policy.hidden_BLH(ids_BL),)

    def stop(*_: Any) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        policy.run(fail, ids)
    policy.backbone.layers[0]._forward_hooks.popitem()  # type: ignore[union-attr,operator]
    (hidden,) = policy.run(lambda ids_BL: (policy.hidden_BLH(ids_BL),), ids)
    hidden.register_hook(stop)
    with pytest.raises(MemoryError):
        hidden.sum().backward()
    policy.weights_context.reset()
    repeated_loss = policy_loss(policy, ids).item()
    alone_loss = policy_loss(load(ALONE, models["untied"]), ids).item()
    return {"gap": abs(repeated_loss - alone_loss)}


def together_case(ranks: Ranks, models: dict[str, str]) -> CaseReport:
    """An error of the last rank, and one that cannot travel, come out on all of them."""

    class Local(Exception):
        pass

    def work(error: Exception) -> None:
        if ranks.rank == ranks.size - 1:
            raise error

    with pytest.raises(ConfigError, match="two"):
        run_on_all_ranks(ranks, partial(work, ConfigError(["one", "two"])))
    with pytest.raises(Exception, match="three"):
        run_on_all_ranks(ranks, partial(work, Local("three")))
    sums = [sum_over_ranks(ranks, 2.0**-40 + ranks.rank), sum_over_ranks(ranks, float("nan"))]
    return {"results": run_on_all_ranks(ranks, lambda: ranks.rank), "sums": repr(sums)}


def spoilt_case(ranks: Ranks, models: dict[str, str]) -> CaseReport:
    policy = load(ranks, models["untied"])
    before = {n: gather_copy(p) for n, p in policy.model.named_parameters()}
    after = train(policy, ranks, spoilt=True)
    return {"moved": gap(before, after.parameters), "moments": len(after.moments)}


def refused_case(ranks: Ranks, models: dict[str, str]) -> CaseReport:
    """What each rank is told of models that do not load; nobody may hang."""
    results = {}
    for name in ("damaged", "absent", "one_kv_head"):
        try:
            load(ranks, models[name])
            results[name] = ""
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


STAY_WHOLE: dict[str, Any] = dict.fromkeys(
    (f"{part}.fsdp_config.reshard_after_forward" for part in ("actor", "critic")), False
)


def packed_case(
    ranks: Ranks, models: dict[str, str], *, model: str = "tied", lora_rank: int = 0,
    rows: Rows = MIXED, changes: dict[str, Any] | None = None,
) -> CaseReport:  # fmt: skip
    """Packed rows on all ranks against padded ones on the first alone.

    The loss has the KL over the vocabulary, so the reference is asked inside of the policy's work.
    """
    config = settings(model={"path": models[model], "lora_rank": lora_rank, "packing": True})
    spread = take_steps(with_settings(config, changes or {}), ranks, rows, steps=2)
    return {} if ranks.rank else gaps(spread, padded_alone(models[model], lora_rank, rows))


@cache
def padded_alone(path: str, lora_rank: int, rows: Rows) -> Seen:
    config = settings(model={"path": path, "lora_rank": lora_rank})
    return take_steps(config, ALONE, rows, steps=2)


# Where memory runs out: in the middle of a pass, in a buffer of a collective of a later layer, and
# behind the last collective of the forward pass.
PLACES = ("forward", "backward", "gather", "reduction", "logits")


def memory_case(
    ranks: Ranks, models: dict[str, str], *, places: tuple[str, ...] = PLACES,
    changes: dict[str, Any] | None = None,
) -> CaseReport:  # fmt: skip
    """Memory runs out on the second rank alone, in different places of a pass."""
    config = with_settings(settings(tokens=400, model={"path": models["tied"]}), changes or {})
    max_rows = 2 if ranks.size == 2 else 1
    results: CaseReport = {}
    for where in places:
        with out_of_memory(where, above=max_rows if ranks.rank == 1 else 99) as refused:
            spread = take_steps(config, ranks, MIXED, steps=2)
        micro_batches = [sums.pop(n) for sums in spread.sums for n in [*sums] if "micro_batch" in n]
        results[where] = {
            "refused": len(refused), "row_limits": sorted({rows for rows, _ in micro_batches}),
        }  # fmt: skip
        if ranks.rank == 0:
            results[where] |= gaps(spread, roomy_alone(models["tied"]))
    return results


@cache
def roomy_alone(path: str) -> Seen:
    return take_steps(settings(tokens=400, model={"path": path}), ALONE, MIXED, steps=2)


@contextmanager
def out_of_memory(where: str, above: int) -> Iterator[list[int]]:
    """Let micro-batches of more rows than `above` fail in a place."""
    refused: list[int] = []
    now = {"rows": 0, "calls": 0}  # of this micro-batch; calls of the place until now

    def fail(*_: Any) -> None:
        refused.append(now["rows"])
        raise torch.OutOfMemoryError("CUDA out of memory")

    def begin(build_micro_batch: Callable[..., Any]) -> Callable[..., Any]:
        def called(batch: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
            now.update(rows=len(rows), calls=0)
            return build_micro_batch(batch, rows, *args, **kwargs)

        return called

    def failing(function: Callable[..., Any], number: int) -> Callable[..., Any]:
        """Fail in this call of a micro-batch, or in its backward pass."""

        def called(*args: Any, **kwargs: Any) -> Any:
            now["calls"] += 1
            too_many = now["calls"] == number and now["rows"] > above
            in_backward = where == "backward" and torch.is_grad_enabled()
            if too_many and not in_backward:
                fail()
            output = function(*args, **kwargs)
            if too_many:
                output.register_hook(fail)
            return output

        return called

    target, name, number = {
        "forward": (Qwen2DecoderLayer, "forward", 2),
        "backward": (Qwen2DecoderLayer, "forward", 2),
        "gather": (CountedGather, "allocate", 3),
        "reduction": (CountedReduction, "allocate", 3),
        "logits": (actor_critic, "gather_logprobs_entropy", 1),
    }[where]
    with pytest.MonkeyPatch.context() as patch:
        for module in (learner, actor_critic):
            patch.setattr(module, "build_micro_batch", begin(module.build_micro_batch))
        patch.setattr(target, name, failing(getattr(target, name), number))
        yield refused


def published_case(ranks: Ranks, models: dict[str, str]) -> CaseReport:
    return {"sent": [published(ranks, models["tied"], lora_rank) for lora_rank in (0, 4)]}


Case = Callable[..., CaseReport]
# Layout of the ranks -> what is tried in it: (tensor size, shard size).
UNTIED: dict[str, Case] = {"untied": partial(train_both, model="untied")}
OFFLOAD: dict[str, Case] = {
    "offload": partial(train_both, model="untied", sharding=Sharding(param_offload=True))
}
VALUE: dict[str, Case] = {"value": partial(train_both, model="untied", value=True)}
HEADS: dict[str, Case] = {"heads": partial(train_both, model="normed")}
EVERYWHERE: dict[str, Case] = {
    "tied": tied_case, "parted": parted_case, "lora": lora_case, "spoilt": spoilt_case,
    "refused": refused_case, "packed": packed_case,
}  # fmt: skip
PACKED_WHOLE: dict[str, Case] = {"packed_whole": partial(packed_case, changes=STAY_WHOLE)}
# Where gradients of copies are added up.
MEMORY_COPIES: dict[str, Case] = {
    "memory_copies": partial(memory_case, places=("backward", "reduction"))
}
CASES: dict[int, dict[tuple[int, int], dict[str, Case]]] = {
    2: {
        (1, 2): EVERYWHERE | OFFLOAD | VALUE | PACKED_WHOLE | {
            "frozen": frozen_case, "whole": whole_case, "bfloat16": bfloat16_case,
            "checkpointed": checkpointed_case, "experts": experts_case,
            "routers": partial(packed_case, model="routers"), "reference": reference_case,
            "broken_off": broken_off_case, "together": together_case, "published": published_case,
            "idle": partial(packed_case, lora_rank=4, rows=MIXED[1:2]),  # one row for all ranks
            "memory": memory_case,
            "memory_whole": partial(
                memory_case, places=("forward", "backward"), changes=STAY_WHOLE
            ),
        },
        (1, 1): UNTIED | MEMORY_COPIES | PACKED_WHOLE,
        (2, 1): EVERYWHERE | VALUE | HEADS | PACKED_WHOLE | {
            "gathered": partial(train_both, model="fused"),
        },
    },
    4: {
        (2, 2): UNTIED | HEADS | OFFLOAD | {"published": published_case},
        (2, 1): UNTIED,
        (1, 2): MEMORY_COPIES,
    },
}  # fmt: skip


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    models = json.loads((folder / "models.json").read_text())
    results: dict[str, CaseReport] = {}
    for (tensor_size, shard_size), cases in CASES[size].items():
        ranks = join_ranks(
            rank, size, init_method=f"file://{folder}/meet-{tensor_size}-{shard_size}",
            device=torch.device("cpu"), tensor_size=tensor_size, shard_size=shard_size,
            timeout_s=60.0,
        )  # fmt: skip
        assert ranks.mesh is not None
        backends = [g._get_backend(torch.device("cpu")) for g in ranks.mesh.get_all_groups()]
        assert {backend.options._timeout.total_seconds() for backend in backends} == {60.0}
        for case_name, case in cases.items():
            name = f"{case_name}-{tensor_size}-{shard_size}"
            started = time.monotonic()
            try:
                results[name] = case(ranks, models)
                print(name, f"{time.monotonic() - started:.1f} s", flush=True)
            except Exception:
                results[name] = {"error": traceback.format_exc()}
                break
        torch.distributed.destroy_process_group()
    (folder / f"report-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
