"""A private judge: `vllm serve`, started by the run and asked through OpenAI's protocol.

A server that dies is started again on the same port, and its calls are repeated like any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.known_models import JUDGES
from ppo_cli.config.models.weight_files import weight_files
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import MissingPart, ModelError, RewardError
from ppo_cli.machine.gpus import list_gpus
from ppo_cli.machine.machine import Machine
from ppo_cli.machine.processor import has_bfloat16
from ppo_cli.machine.versions import VLLM_SETUP
from ppo_cli.paths import user_path
from ppo_cli.planning.findings.judge_server import (
    judge_fault,
    server_environment,
    vllm_python,
)
from ppo_cli.processes.program import Program
from ppo_cli.rewards.judge.providers import openai
from ppo_cli.rewards.judge.providers.base import Key
from ppo_cli.rewards.judge.providers.options import Option
from ppo_cli.secrets.redact import redact

Tell = Callable[[str], None]
LOOPBACK = "127.0.0.1"
POLL_S = 0.5
ANNOUNCE_S = 30.0
# Give up after so many starts in a row without an answer.
MAX_STARTS = 3
TAIL_LINES = 8  # of its log, in an error message
# A small model may write blanks between the parts of the JSON until it is cut off.
COMPACT = '{"backend": "xgrammar", "disable_any_whitespace": true}'


class Judge(openai.Judge):
    """The protocol of OpenAI, and the server behind it."""

    name = "local"
    batches = ""

    def __init__(self, api: ApiReward, base_url: str, key: Key, flags: str = "--rm_") -> None:
        # A random key, so that other users of this machine cannot use the server.
        server_key = key if key.variable else Key(secrets.token_hex(16), "")
        super().__init__(api, base_url, server_key, flags)
        self._server: Server | None = None

    @classmethod
    def default_url(cls, environ: Mapping[str, str]) -> str:
        """Return an address with a free port of this machine."""
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            return f"http://{LOOPBACK}:{probe.getsockname()[1]}/v1"

    @property
    def identity(self) -> str:
        """The identity with the model's files instead of the address, whose port is random."""
        parts = json.loads(super().identity)
        folder = user_path(model_folder(self.model))
        files: list[tuple[str, int, int]] = []
        with contextlib.suppress(ModelError, OSError):
            states = [(file.name, file.stat()) for file in weight_files(folder)]
            files = [(name, state.st_size, state.st_mtime_ns) for name, state in states]
        changes = {"endpoint": "", "model": str(folder.resolve()) if files else self.model}
        return json.dumps(parts | changes | {"files": files}, sort_keys=True)

    def options(self) -> Sequence[Option]:
        """Thinking is switched off by the usual argument of chat templates."""
        options = [option for option in super().options() if option.name != "thinking"]
        return [Option("thinking", ("chat_template_kwargs",), ("enable_thinking",)), *options]

    def start_server(self, tell: Tell) -> None:
        """Start the server and wait until it answers; RewardError if it does not."""
        if self._server is None:
            self._server = Server(
                self.command(os.environ), self.environment(os.environ), self.base_url
            )
            self._server.start(tell, self.api.local.start_timeout)

    def stop_server(self) -> None:
        """Stop the server."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def command(self, environ: Mapping[str, str]) -> list[str]:
        """Return the command that serves the model."""
        python = vllm_python(environ)
        if python is None:
            raise MissingPart(f"A judge that the run starts needs vLLM: run `{VLLM_SETUP}`.")
        local, model = self.api.local, str(user_path(model_folder(self.model)))
        arguments: dict[str, object] = {
            "served_model_name": self.model,
            "host": LOOPBACK,
            "port": urlsplit(self.base_url).port,
            "structured_outputs_config": COMPACT,
            "max_model_len": local.max_model_len,
        }
        machine = Machine.here(environ)
        if fault := judge_fault(machine, environ):
            raise MissingPart(str(fault))
        # On the CPU: no CUDA graphs, and float32 where the processor lacks bfloat16.
        if local.devices or machine.gpus:
            arguments["gpu_memory_utilization"] = local.gpu_memory_utilization
            arguments["tensor_parallel_size"] = max(1, len(local.devices))
        else:
            arguments |= {"enforce_eager": True, "dtype": "auto" if has_bfloat16() else "float32"}
        # Not the script `vllm` of PATH, which may belong to another Python.
        script = str(Path(__file__).with_name("vllm_serve.py"))
        command = [python, "-P", script, "serve", model]
        # Flags of vLLM: True has no value, False and None leave the flag out.
        for name, value in (arguments | local.engine_kwargs).items():
            if value is None or value is False:
                continue
            command.append("--" + name.replace("_", "-"))
            if value is not True:
                command.append(json.dumps(value) if isinstance(value, dict | list) else str(value))
        return [*command, "--disable-uvicorn-access-log"]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the server's variables: GPUs and what vLLM needs, without keys of providers."""
        keys = {name for judge in JUDGES.values() for name in judge.keys}
        variables = {name: text for name, text in environ.items() if name not in keys}
        variables |= {
            "VLLM_API_KEY": self._key.value,
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        # A server runs its engine in a separate process.
        variables.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        if user_path(model_folder(self.model)).is_dir():
            variables |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if devices := self.api.local.devices:
            visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            names = [visible[d] if d < len(visible) and visible[d] else str(d) for d in devices]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(names)
        elif not list_gpus(environ):
            variables |= server_environment(environ)
        return variables


class Server:
    """A command that serves an address; it is started again when it ends, until it is stopped."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], base_url: str) -> None:
        self._command, self._environ = list(command), dict(environ)
        parts = urlsplit(base_url)
        self._health = f"{parts.scheme}://{parts.netloc}/health"
        self._folder = Path(tempfile.mkdtemp(prefix="ppo-judge-"))
        self._log = self._folder / "server.log"
        self._stopped = threading.Event()
        self._process: Program | None = None
        self._watch: threading.Thread | None = None

    def start(self, tell: Tell, limit_s: float) -> None:
        """Start it, wait until it answers, and watch it; RewardError if it does not answer."""
        tell("The judge's server is starting; this takes a minute or more.")
        try:
            self._launch()
            self._wait(tell, limit_s)
        except BaseException:
            self.stop()
            raise
        self._watch = threading.Thread(target=self._keep_running, args=(tell,), daemon=True)
        self._watch.start()

    def stop(self) -> None:
        """Stop it and all its child processes."""
        # First the watcher, or it would start the server again.
        self._stopped.set()
        if self._watch is not None:
            self._watch.join(POLL_S * 4)
        if self._process is not None:
            self._process.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _launch(self) -> None:
        with self._log.open("wb") as log:
            self._process = Program(
                self._command, environ=self._environ, log=log, folder=self._folder
            )

    def _wait(self, tell: Tell, limit_s: float) -> None:
        """Wait until the server answers, and print progress.

        Raises RewardError, with the last lines of its log, if it ends or does not answer in time.
        """
        began = announced = time.monotonic()
        while not self._answers():
            now = time.monotonic()
            if self._ended() or now - began > limit_s:
                why = "ended" if self._ended() else f"does not answer after {limit_s:g} s"
                raise RewardError(f"The judge's server {why}. Its last log lines:\n{self._tail()}")
            if now - announced > ANNOUNCE_S:
                announced = now
                tell(f"The judge's server is loading its model ({now - began:.0f} s).")
            time.sleep(POLL_S)
        tell(f"The judge's server answers after {time.monotonic() - began:.0f} s.")

    def _keep_running(self, tell: Tell) -> None:
        """Restart the server whenever it ends, until it is stopped; runs in a thread.

        After MAX_STARTS restarts in a row without an answer, reports the log's end and returns.
        """
        starts = 0
        while not self._stopped.wait(POLL_S):
            if not self._ended():
                starts = 0 if starts and self._answers() else starts
                continue
            if starts == MAX_STARTS:
                tell(f"The judge's server ended {starts} times as it started:\n{self._tail()}")
                return
            starts += 1
            tell("The judge's server ended; it is started again.")
            self._launch()

    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _answers(self) -> bool:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            return bool(direct.open(self._health, timeout=5).status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _tail(self) -> str:
        with contextlib.suppress(OSError):
            lines = [x for x in self._log.read_text(errors="replace").splitlines() if x.strip()]
            return redact("\n".join(line[:300] for line in lines[-TAIL_LINES:]), self._environ)
        return "(none)"
