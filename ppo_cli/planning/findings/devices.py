"""Checks of devices: missing packages and GPUs, settings that clash, and remarks for the plan."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ppo_cli.config.device_roles import Roles, format_devices, read_placement
from ppo_cli.config.schema.finding import Finding
from ppo_cli.config.schema.keys import value_of
from ppo_cli.config.schema.run import Config, Model, Rollout, Trainer
from ppo_cli.config.settle import settle
from ppo_cli.errors import describe_address_space, plural, ppo
from ppo_cli.machine.device_record import FEATURES
from ppo_cli.machine.gpus import has_bfloat16
from ppo_cli.machine.machine import Machine
from ppo_cli.machine.versions import VLLM_SETUP
from ppo_cli.planning.findings.judge_server import check_judge_server
from ppo_cli.planning.findings.scene import Scene
from ppo_cli.planning.memory.plan import fit_memory
from ppo_cli.planning.placement import (
    data_ranks,
    hosts_reward,
    local_judge,
    placement_of,
    shared_samplers,
)
from ppo_cli.plugins import runs_elsewhere


def missing_packages(scene: Scene) -> Iterator[str]:
    """Name the packages that this run needs and that are absent or in an unsupported version.

    Nothing is imported.
    """
    config = scene.config
    if runs_elsewhere(config.trainer.engine):
        return  # the bridge names what verl needs
    # Features of the run that come from optional packages.
    lora = config.model.lora_rank or (config.uses_critic and config.critic.model.lora_rank)
    optims = {"actor": config.actor.optim, "critic": config.critic.optim}
    in_bits = [
        f"{name}.optim.optimizer AdamW8bit"
        for name, optim in optims.items()
        if optim.optimizer == "AdamW8bit"
    ]
    in_bits += [f"{key} nf4" for key in config.quantised]
    span = config.rollout.tensor_model_parallel_size
    vllm = f"`{VLLM_SETUP}`, or use --rollout_"
    # Package, whether this run needs it, who needs it, and what to do.
    needs = (
        ("ray", config.trainer.engine != "local", "Several processes need", "pip install ray"),
        ("peft", lora, "LoRA needs", "pip install peft"),
        ("bitsandbytes", in_bits, f"{' and '.join(in_bits)} needs",
         "pip install bitsandbytes, or leave that out"),
        ("vllm", config.rollout.name == "vllm", "The vLLM sampler needs", f"run {vllm}name hf"),
        ("vllm", config.rollout.name == "hf" and span > 1, f"A sampler of {span} GPUs needs",
         f"run {vllm}tp 1"),
    )  # fmt: skip
    for name, needed, who, mend in needs:
        if needed and name not in scene.machine.packages:
            yield f"{who} the package {name}, which is not installed: {mend}."
    loggers = set(config.trainer.logger) - {"console"} - scene.machine.packages
    if loggers:
        names = sorted(loggers)
        yield (
            f"--logger {','.join(names)} (trainer.logger) is not installed. Run "
            f"`{shlex.quote(sys.executable)} -m pip install {' '.join(names)}`, or leave it out of "
            "--logger."
        )
    # The others are always imported.
    unneeded = {name for name, *_ in needs} - {name for name, needed, *_ in needs if needed}
    yield from (str(f) for f in scene.machine.version_faults if f.package not in unneeded)


def missing_gpus(scene: Scene) -> list[str]:
    """Return why a number of GPUs is not available; the nodes of a Ray cluster are not checked."""
    present = len(scene.machine.gpus)
    configured = scene.requested.trainer.n_gpus_per_node
    if (
        configured is None
        or runs_elsewhere(scene.config.trainer.engine)
        or 0 < configured <= present
        or configured == present
        or scene.environ.get("RAY_ADDRESS")
    ):
        return []
    # With an assumed memory the plan is for GPUs of another machine.
    if configured and scene.machine.gpu_bytes is not None:
        return []
    if configured == 0:
        mend = 'to train on the CPU set CUDA_VISIBLE_DEVICES="" and leave --n_gpus out'
    else:
        mend = f"use {present}" if present else "leave --n_gpus out to train on the CPU"
    visible = f"{present or 'no'} GPU{'s are' if present > 1 else ' is'} visible here"
    return [f"trainer.n_gpus_per_node is {configured}, but {visible}; {mend}."]


# Addresses that a run on the CPU maps before it has a model, and for each thread. Measured with
# torch 2.13 and transformers 5: 0.92 GB, and stacks and arenas of malloc.
BARE_ADDRESSES, THREAD_ADDRESSES = 930_000_000, 64 << 20


def missing_addresses(scene: Scene) -> Iterator[str]:
    """Yield why the address space is too small: libraries would hang or abort without a message."""
    machine, limit = scene.machine, scene.machine.address_bytes
    if limit is None or scene.config.trainer.n_gpus_per_node:
        return
    estimate = fit_memory(scene.resolved).estimate
    needed = BARE_ADDRESSES + THREAD_ADDRESSES * (machine.threads or machine.cores)
    needed += max((place.needed for place in estimate.places), default=0) if estimate else 0
    if limit < needed:
        yield f"This run needs {needed / 2**30:.2f} GiB of addresses. {describe_address_space()}"


def unusable_gpus(scene: Scene) -> Iterator[str]:
    """Yield why torch cannot use the GPUs of this machine; Ray checks those of other nodes."""
    config = scene.config
    if runs_elsewhere(config.trainer.engine) or scene.environ.get("RAY_ADDRESS"):
        return
    used = config.trainer.n_gpus_per_node
    if (fault := scene.machine.gpu_fault(used)) is not None:
        yield str(fault)
    # vLLM refuses bfloat16 on older GPUs, where torch emulates it.
    other = "float16" if "float16" in scene.machine.proven else "float32"
    if config.model.dtype == "bfloat16" and config.rollout.name == "vllm":
        yield from (
            f"vLLM does not compute in bfloat16 on a {gpu.name}: leave --dtype out ({other}), or "
            "sample with --rollout_name hf."
            for gpu in scene.machine.gpus[:used]
            if not has_bfloat16([gpu])
        )


KEY = "rollout.weight_transfer"


def _check_transfer(rollout: Rollout, model: Model, trainer: Trainer) -> Iterator[Finding]:
    """Check `rollout.weight_transfer`; the placement must be readable."""
    way, shared = rollout.weight_transfer, shared_samplers(trainer)
    if way == "memory":
        return
    # Only the first problem is reported: sampler, adapter, devices, sharing.
    if rollout.name != "vllm":
        key = "rollout.name"
        problem = "is a way to vLLM, and the sampler here is hf; use --rollout_name vllm"
    elif model.publishes_adapter:
        key = "model.lora_merge"
        problem = "needs full weights, but only the LoRA adapter is sent; use model.lora_merge=true"
    elif way == "gloo":
        return
    elif trainer.n_gpus_per_node == 0:
        key = "trainer.n_gpus_per_node"
        problem = "goes from GPU to GPU, and none is used; use memory or gloo"
    elif shared != (expected := {"ipc": "all", "nccl": "none"}[way]):
        key = PLACEMENT
        use = {"all": "ipc", "none": "nccl", "some": "memory or gloo"}[shared]
        problem = (
            f"needs {expected} of the samplers on training GPUs, but {shared} of them are; "
            f"use {use}"
        )
    else:
        return
    yield Finding((KEY, key), f"{KEY} {way} {problem}, or leave it out.")


PLACEMENT = "trainer.placement"
SPAN = "rollout.tensor_model_parallel_size"


def check_devices(scene: Scene) -> Iterator[Finding]:
    """Yield the clashes about nodes, workers, devices and ranks, which this machine decides too.

    The engine of a package checks these settings itself, but the plan reads its placement. Checks
    that need a valid placement are skipped if counts or placement clash.
    """
    config, requested = scene.config, scene.requested
    unreadable = [*_check_placement_text(config.trainer)]
    if runs_elsewhere(config.trainer.engine):
        yield from unreadable
        return
    # An existing Ray cluster may have nodes that are not known here.
    joined = scene.environ.get("RAY_ADDRESS", "").strip() != ""
    yield from _check_nodes(config.trainer, joined)
    if not joined:  # nodes of a Ray cluster may have more cores than this one
        yield from _check_threads(config.trainer.threads, scene.machine.cores)
    yield from _check_quantization(config)
    # Checks of ranks and samplers need a placement and counts that make sense.
    broken = [
        *_check_worker_counts(requested.trainer, scene.machine),
        *_check_local_engine(requested.trainer, requested.rollout),
        *(
            unreadable
            or _check_placement(
                config.trainer,
                config.rollout.tensor_model_parallel_size,
                requested.trainer.num_workers,
                requested.rollout.num_samplers,
            )
        ),
    ]
    yield from broken
    if not broken:
        placement = placement_of(config)
        yield from check_judge_server(config.reward, placement, config.trainer.n_gpus_per_node)
        yield from _check_ranks(config, placement.ranks)
        yield from _check_sampler_span(config.rollout, config.trainer)
        yield from _check_async(
            config.trainer, config.rollout.tensor_model_parallel_size, placement.train
        )
        yield from _check_transfer(config.rollout, config.model, config.trainer)


def _check_nodes(trainer: Trainer, joined: bool) -> Iterator[Finding]:
    """Check that each node knows its rank and the first; a `joined` Ray cluster has its nodes."""
    if trainer.nnodes == 1 or trainer.node_rank == 0 or (trainer.node_rank is None and joined):
        return
    # A node of several needs its rank and the address of the first node.
    lacking: dict[str, str] = {}
    if trainer.node_rank is None:
        lacking["the rank of this one"] = "--node_rank 0"
    if trainer.master_addr is None:
        lacking["the address of the first"] = "--master_addr HOST"
    if lacking:
        yield Finding(
            ("trainer.nnodes", "trainer.node_rank", "trainer.master_addr"),
            f"{trainer.nnodes} nodes need {' and '.join(lacking)}: {' '.join(lacking.values())} "
            "(the first has rank 0); or name a Ray cluster that has them in RAY_ADDRESS.",
        )


# With more threads per core than this a machine barely makes progress.
MAX_THREADS_PER_CORE = 4


def _check_threads(threads: int | None, cores: int) -> Iterator[Finding]:
    """Refuse far more threads than cores: they wait for each other at every matrix product."""
    if threads is not None and threads > MAX_THREADS_PER_CORE * cores:
        yield Finding(
            ("trainer.threads",),
            f"trainer.threads {threads} is more than {MAX_THREADS_PER_CORE} for each of the "
            f"{plural(cores, 'core')} that this process may use; use "
            f"trainer.threads={cores}, or leave it out.",
        )


def _check_worker_counts(trainer: Trainer, machine: Machine) -> Iterator[Finding]:
    """Refuse a count of CPU workers together with GPUs."""
    used = len(machine.gpus) if trainer.n_gpus_per_node is None else trainer.n_gpus_per_node
    if trainer.num_workers is not None and used:
        yield Finding(
            ("trainer.num_workers", "trainer.n_gpus_per_node"),
            f"trainer.num_workers counts ranks without GPUs, but {used} GPU(s) are used; leave it "
            'out, or hide them with CUDA_VISIBLE_DEVICES="".',
        )


def _check_local_engine(trainer: Trainer, rollout: Rollout) -> Iterator[Finding]:
    """Refuse settings that need a second process or device with --engine local.

    Both sections are as they were set, before any rule decides.
    """
    if trainer.engine != "local":
        return
    # Settings that ask for a second process or device: counts, then others.
    counts = {
        "trainer.nnodes": trainer.nnodes,
        "trainer.n_gpus_per_node": trainer.n_gpus_per_node,
        "trainer.num_workers": trainer.num_workers,
        "trainer.tensor_parallel_size": trainer.tensor_parallel_size,
        SPAN: rollout.tensor_model_parallel_size,
        "rollout.num_samplers": rollout.num_samplers,
    }
    wanted = {key: f"{count}" for key, count in counts.items() if count is not None and count > 1}
    if rollout.name == "vllm":
        wanted["rollout.name"] = "vllm"
    if trainer.placement is not None:
        wanted[PLACEMENT] = trainer.placement
    if trainer.async_steps:
        wanted["trainer.async_steps"] = f"{trainer.async_steps}"
    if wanted:
        settings = " and ".join(f"{key} {value}" for key, value in wanted.items())
        yield Finding(
            ("trainer.engine", *wanted),
            f"--engine local is one process on one device, without {settings}; use "
            "--engine ray, or leave this out.",
        )


def _check_quantization(config: Config) -> Iterator[Finding]:
    """Check weights in 4 bits: they are frozen, and FSDP2 cannot shard them (two share a byte)."""
    for key in config.quantised:
        # The settings of the same model: LoRA rank and offloading.
        part = key.removesuffix("model.quantization") or "actor."
        rank, away = key.replace("quantization", "lora_rank"), f"{part}fsdp_config.param_offload"
        if value_of(config, rank) == 0:
            yield Finding(
                (key, rank), f"{key} holds frozen weights, and none are without {rank}: set it."
            )
        if config.trainer.engine != "local":
            yield Finding(
                (key,),
                f"{key} works in one process on one device (--engine local): weights in 4 bits "
                "cannot be split over ranks or sent to samplers. Leave it out.",
            )
        if value_of(config, away):
            yield Finding(
                (key, away), f"{away} cannot move weights in 4 bits: leave one of them out."
            )


def _check_placement_text(trainer: Trainer) -> Iterator[Finding]:
    """Yield why --placement cannot be read; one process does not read it."""
    try:
        if trainer.engine != "local":
            read_placement(trainer.placement or "")
    except ValueError as error:
        dot = "" if str(error)[-1] in ".?" else "."
        yield Finding((PLACEMENT,), f"{PLACEMENT}: {error}{dot}")


def _check_placement(
    trainer: Trainer, span: int, workers: int | None, samplers: int | None
) -> Iterator[Finding]:
    """Yield clashes of a readable --placement: missing roles, and devices that do not fit.

    A sampler has `span` GPUs. `workers` and `samplers` are the numbers of processes that were set.
    """
    if trainer.placement is None or trainer.engine == "local":
        return
    roles = read_placement(trainer.placement)
    # Both main roles need devices; reward and judge are optional.
    for role in ("train", "rollout"):
        if role not in roles:
            yield Finding(
                (PLACEMENT,),
                f"{PLACEMENT} has no device for {role}; use train:0-3,rollout:4-7 for separate "
                "devices, or train:0-7,rollout:0-7 for shared ones.",
            )
    if trainer.n_gpus_per_node:
        yield from _check_devices_exist(trainer.n_gpus_per_node, trainer.nnodes, span, roles)
        return
    # On the CPU both the counts and their slots may be set.
    counts = (
        ("trainer.num_workers", workers, roles.get("train", ())),
        ("rollout.num_samplers", samplers, roles.get("rollout", ())),
    )
    for key, count, slots in counts:
        if count is not None and slots and count != len(slots):
            yield Finding(
                (PLACEMENT, key),
                f"{PLACEMENT} has {len(slots)} slot(s), but {key} is {count}; leave {key} out.",
            )


def _check_devices_exist(per_node: int, nodes: int, span: int, roles: Roles) -> Iterator[Finding]:
    """Check that the placement names GPUs of this run and whole samplers on one node."""
    total = per_node * nodes
    # Devices beyond the last GPU of the run.
    highest = max((devices[-1] for devices in roles.values()), default=-1)
    if highest >= total:
        role = next(name for name, devices in roles.items() if devices[-1] == highest)
        least = -(-(highest + 1) // nodes)
        yield Finding(
            (PLACEMENT, "trainer.n_gpus_per_node", "trainer.nnodes"),
            f"{PLACEMENT} names GPU {highest} for {role}, but the last of the run's {total} is GPU "
            f"{total - 1}; use lower numbers, or --n_gpus {least}.",
        )
        return
    # Whole samplers, each on the GPUs of one node.
    rollout = roles.get("rollout", ())
    if len(rollout) % span:
        yield Finding(
            (PLACEMENT, SPAN),
            f"{PLACEMENT} gives rollout {len(rollout)} GPU(s), which do not divide into samplers "
            f"of {span}; change that number, or --rollout_tp.",
        )
        return
    for at in range(0, len(rollout), span):
        sampler = rollout[at : at + span]
        if sampler[0] // per_node != sampler[-1] // per_node:
            yield Finding(
                (PLACEMENT, SPAN),
                f"{PLACEMENT} puts one sampler on GPUs {format_devices(sampler)}, which are on two "
                f"nodes (each has {per_node}); a sampler needs one node.",
            )


def _check_ranks(config: Config, ranks: int) -> Iterator[Finding]:
    """Check that the learner ranks divide into tensor-parallel groups and sharding groups.

    Sharding groups must be equal: actor and critic use one mesh of ranks.
    """
    tensor, rank_keys = config.trainer.tensor_parallel_size, _rank_keys(config.trainer)
    # The next multiple is suggested as well as the divisors.
    if ranks % tensor:
        next_multiple = -(-ranks // tensor) * tensor
        yield Finding(
            ("trainer.tensor_parallel_size", *rank_keys),
            f"{ranks} learner rank(s) cannot be split into groups of "
            f"trainer.tensor_parallel_size {tensor}; use a divisor of {ranks}, or {next_multiple} "
            "ranks (train in --placement, else --n_gpus on each node, or without GPUs "
            "--num_workers).",
        )
        return
    # The critic follows the actor unless its size is set.
    rows = ranks // tensor
    sizes = {"actor.fsdp_config.fsdp_size": config.actor.fsdp_config.fsdp_size}
    if config.uses_critic and config.critic.fsdp_config.fsdp_size != -1:
        sizes["critic.fsdp_config.fsdp_size"] = config.critic.fsdp_config.fsdp_size
    for key, size in sizes.items():
        if size > 0 and rows % size and config.trainer.engine != "local":
            yield Finding(
                (key, "trainer.tensor_parallel_size", *rank_keys),
                f"{rows} rank(s) that share the rows cannot be split into sharding groups of "
                f"{key} {size}; use a divisor of {rows}, or -1 for one group.",
            )
            return
    if len({rows if size == -1 else size for size in sizes.values()}) > 1:
        yield Finding(
            tuple(sizes),
            f"{' and '.join(f'{key} {size}' for key, size in sizes.items())} differ, but both "
            "models share one mesh of ranks; set the same value, or leave the critic's out.",
        )


def _rank_keys(trainer: Trainer) -> tuple[str, ...]:
    """Return the settings that determine the number of learner ranks."""
    if trainer.placement is not None:
        return (PLACEMENT,)
    count = "n_gpus_per_node" if trainer.n_gpus_per_node else "num_workers"
    return (f"trainer.{count}", "trainer.nnodes")


def _check_sampler_span(rollout: Rollout, trainer: Trainer) -> Iterator[Finding]:
    """Check `rollout.tensor_model_parallel_size` against the GPUs and the sampler."""
    span, per_node = rollout.tensor_model_parallel_size, trainer.n_gpus_per_node
    if span == 1:
        return
    # A span above 1 needs GPUs, vLLM, and a number of GPUs that it divides.
    if per_node == 0:
        yield Finding(
            (SPAN, "trainer.n_gpus_per_node"),
            f"a sampler cannot span {SPAN} {span} GPUs: no GPU is used. Use --rollout_tp 1, or "
            "name the GPUs with --n_gpus.",
        )
    elif rollout.name == "hf":
        yield Finding(
            (SPAN, "rollout.name"),
            f"the hf sampler uses one GPU, not {SPAN} {span}; use --rollout_name vllm, or "
            "--rollout_tp 1.",
        )
    elif trainer.placement is None and per_node % span:
        yield Finding(
            (SPAN, "trainer.n_gpus_per_node"),
            f"{per_node} GPU(s) of a node cannot be split into samplers of {span}; use a "
            "--rollout_tp that divides them, or another --n_gpus.",
        )


def _check_async(trainer: Trainer, span: int, train: Sequence[int]) -> Iterator[Finding]:
    """Check that sampling ahead, by samplers of `span` GPUs, leaves devices that train."""
    steps, placement = trainer.async_steps, trainer.placement
    if steps == 0:
        return
    # Roles must not share devices.
    if placement is not None:
        roles = read_placement(placement)
        if shared := tuple(sorted({*roles["train"]} & {*roles["rollout"]})):
            yield Finding(
                ("trainer.async_steps", PLACEMENT),
                f"trainer.async_steps {steps} samples during training, but {PLACEMENT} gives "
                f"{format_devices(shared)} to both; use separate GPUs, or --async_steps 0.",
            )
    # Without a placement, about a quarter of the GPUs sample.
    elif not train:
        yield Finding(
            ("trainer.async_steps", "trainer.n_gpus_per_node"),
            f"trainer.async_steps {steps} needs GPUs for sampling besides those for training; "
            f"use --n_gpus {2 * span} or more, or --async_steps 0.",
        )


def device_remarks(scene: Scene) -> Iterator[str]:
    """Remark on devices and versions that may surprise."""
    config, requested, machine = scene.config, scene.requested, scene.machine
    environ = scene.environ
    if not environ.get("RAY_ADDRESS") and machine.hidden_gpus is not None:
        yield machine.hidden_gpus
    # GPUs that are visible and not used.
    visible, used = len(machine.gpus), config.trainer.n_gpus_per_node
    if visible > 1 and requested.trainer.n_gpus_per_node is None and used < visible:
        yield (
            f"{visible} GPUs are visible, and {'one is' if used == 1 else f'{used} are'} used; "
            f"--n_gpus {visible} uses them all."
        )
    # GPUs without bfloat16.
    old = [gpu for gpu in machine.gpus[:used] if not has_bfloat16([gpu])]
    if old and config.model.dtype == "bfloat16":
        yield f"A {old[0].name} emulates bfloat16: --dtype float16 is faster."
    elif old and config.model.dtype == "float32" and requested.model.dtype is None:
        yield (
            f"A {old[0].name} has no bfloat16: models compute in float32. "
            f"`{ppo('doctor --self-test')}` tries float16, which is faster."
        )
    for who, part in (("actor", config.actor), ("critic", config.critic)):
        if part.strategy == "fsdp":
            yield f"{who}.strategy fsdp is FSDP2 here."
    if config.trainer.engine == "local":
        if environ.get("RAY_ADDRESS"):
            yield (
                "RAY_ADDRESS is set, but this run is one process and needs no Ray; --engine ray "
                "runs it in that cluster."
            )
        return
    # From here on: several processes.
    yield from _rank_remarks(config)
    if used and requested.rollout.name is None and "vllm" not in machine.packages:
        yield (
            "vLLM is not installed, so the hf sampler is used, which is much slower: "
            f"`{VLLM_SETUP}` installs it."
        )
    yield from _partial_remarks(
        config.trainer.async_steps,
        config.rollout.partial_tokens,
        config.data.max_response_length,
    )
    if used:
        yield from _self_test_remarks(requested, config, machine)
    # Roles of the placement that nothing uses.
    roles = read_placement(config.trainer.placement or "")
    if "judge" in roles and local_judge(config.reward) is None:
        yield "--placement names devices for judge, but no judge is started (--rm_api_type local)."
    if "reward" in roles and not hosts_reward(config.reward, used):
        yield "--placement names devices for reward, but no reward model runs on any of them."


def _self_test_remarks(requested: Config, config: Config, machine: Machine) -> Iterator[str]:
    """Name what is slower until the self-test has passed on these GPUs."""
    slow = []
    if config.rollout.name == "vllm":
        fully_proven = replace(machine, proven=frozenset(FEATURES))
        fastest = settle(requested, fully_proven).config.rollout.weight_transfer
        way = config.rollout.weight_transfer
        if way != fastest:
            slow.append(f"new weights travel by {way}, not by {fastest}")
        sleeps = shared_samplers(config.trainer) != "none" and not config.model.publishes_adapter
        if requested.rollout.sleep is None and sleeps and "sleep" not in machine.proven:
            slow.append("vLLM's weights are kept while the learner works")
    if (
        requested.model.share_prompts is None
        and config.rollout.n > 1
        and not config.model.share_prompts
    ):
        slow.append("each response computes its prompt again")
    if config.model.packing is None and "packed_attention" not in machine.proven:
        slow.append("rows are padded")
    if slow:
        yield (
            f"No self-test has passed on these GPUs, so {' and '.join(slow)}: "
            f"`{ppo('doctor --self-test')}` tries the faster ways."
        )


def _partial_remarks(steps: int, partial: int | None, longest: int) -> Iterator[str]:
    """Remark on what sampling `steps` ahead does, with and without partial rollouts."""
    # More steps ahead without partial rollouts.
    if partial is None and steps > 1:
        yield (
            f"--async_steps {steps} makes responses older than --async_steps 1 does, and nothing "
            f"faster: new weights wait for running samples. With --partial_tokens "
            f"{-(-longest // steps)} they wait for at most that many tokens of a response."
        )
    # A limit that no response reaches.
    elif partial is not None and partial >= longest:
        yield (
            f"--partial_tokens {partial} has no effect: no response is longer than "
            f"--max_response_length {longest}."
        )
    elif partial is not None:
        # Tokens that a response can get before its step begins.
        ahead = partial * steps
        rest = (
            f" Responses over {ahead} tokens are completed when their step begins, and training "
            "waits for them."
        )
        yield (
            f"--partial_tokens {partial}: a response that is sampled ahead gets that many tokens "
            f"between two updates, {min(ahead, longest)} in all, and continues with newer weights; "
            f"each token keeps the log-prob of its sampling.{rest * (ahead < longest)}"
        )


def _rank_remarks(config: Config) -> Iterator[str]:
    """Remark on ranks that have no rows, and on layers split over two nodes."""
    # Mini-batches with fewer rows than ranks.
    ranks, tensor = data_ranks(config), config.trainer.tensor_parallel_size
    sizes = {"actor": config.actor.ppo_mini_batch_size}
    if config.uses_critic:
        sizes["critic"] = config.critic.ppo_mini_batch_size
    for who, prompts in sizes.items():
        rows = prompts * config.rollout.n
        if rows < ranks:
            yield (
                f"{who}.ppo_mini_batch_size makes {rows} response(s) for {ranks} ranks: some have "
                "nothing to do in each step. Fewer ranks, or more prompts, use them better."
            )
            break
    per_node = config.trainer.n_gpus_per_node
    if per_node and per_node % tensor:
        yield (
            f"trainer.tensor_parallel_size {tensor} does not divide the {per_node} GPU(s) of a "
            "node, so some layers are split over two nodes, which is slow."
        )
