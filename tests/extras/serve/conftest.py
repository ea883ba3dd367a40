"""A server of `ppo serve --tinker` on loopback, and a client that speaks its wire format."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ppo_cli.extras.serve.wire import message_type
from tests.forked import PPO, Forked
from tests.waiting import wait_until

ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0,
        "grad_clip_norm": 0.0}  # fmt: skip


class Client:
    """Calls of one session, numbered as the SDK numbers them."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1/", timeout=60, headers={"X-API-Key": "x"})
        self.session = self.post("create_session")["session_id"]
        self.count = 0

    def post(self, route: str, **body: Any) -> Any:
        return self.http.post(route, json=body).json()

    def wait(self, request: dict[str, Any]) -> Any:
        assert "request_id" in request, request
        reply = self.http.post("retrieve_future", json={"request_id": request["request_id"]})
        return reply.content if "protobuf" in reply.headers["content-type"] else reply.json()

    def queue(self, route: str, **body: Any) -> Any:
        self.count += 1
        return self.wait(self.post(route, seq_id=self.count, type=route, **body))

    def create(self, rank: int, **fields: Any) -> str:
        self.count += 1
        request = self.post(
            "create_model", session_id=self.session, model_seq_id=self.count,
            base_model="embedded", lora_config={"rank": rank}, **fields,
        )  # fmt: skip
        name: str = self.wait(request)["model_id"]
        return name

    def batch(
        self, model: str, rows: Sequence[dict[str, Sequence[float]]], loss: str = "cross_entropy",
        forward_only: bool = False, float_targets: bool = False, **config: float,
    ) -> Any:  # fmt: skip
        """Run rows, whose key `tokens` is the input; return (loss, log-probs), or the error."""
        self.count += 1
        request = message_type("ForwardBackwardRequest")(
            model_id=model, seq_id=self.count, loss_fn=loss, forward_only=forward_only
        )
        for key, value in config.items():
            request.loss_fn_config.add(key=key, value=value)
        for row in rows:
            datum = request.data.add()
            chunk = datum.model_input.add().encoded_text
            chunk.tokens = np.array(row["tokens"], np.int32).tobytes()
            for key in row.keys() - {"tokens"}:
                value = datum.loss_fn_inputs.add(key=key).value
                kind = key == "target_tokens" and not float_targets
                value.dtype = 1 + kind
                dtype = np.int64 if kind else np.float32
                value.dense = np.array(row[key], dtype).tobytes()
        sent = self.http.post("forward_backward", content=request.SerializeToString())
        result = self.wait(sent.json())
        if not isinstance(result, bytes):
            return result
        output = message_type("ForwardBackwardOutput")()
        output.ParseFromString(result)
        field = output.loss_fn_outputs[0].fields[0].value
        ends = np.frombuffer(field.offsets, np.int64)[1:-1] // 4
        return output.metrics[0].value, np.split(np.frombuffer(field.data, np.float32), ends)

    def step(self, model: str) -> Any:
        return self.queue("optim_step", model_id=model, adam_params=ADAM)["metrics"]

    def sample(self, sampler: str, tokens: Sequence[int], **fields: Any) -> Any:
        """Return [(tokens, log-probs, stop reason)] and the prompt's log-probs, or the error."""
        params = {"max_tokens": 8, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
        names = fields.keys() & {"seed", "stop", "max_tokens", "temperature"}
        params |= {name: fields.pop(name) for name in names}
        fields = {"num_samples": 2, "prompt": {"chunks": [{"tokens": list(tokens)}]}} | fields
        result = self.queue(
            "asample", sampling_session_id=sampler, sampling_params=params, **fields
        )
        if not isinstance(result, bytes):
            return result
        response = message_type("SampleResponse")()
        response.ParseFromString(result)
        samples = [
            (np.frombuffer(s.tokens, np.int32).tolist(),
             np.frombuffer(s.logprobs, np.float32), s.stop_reason)
            for s in response.sequences
        ]  # fmt: skip
        return samples, np.frombuffer(response.prompt_logprobs, np.float32)


@contextmanager
def serving(folder: Path, *flags: str, end: int = signal.SIGINT) -> Iterator[tuple[str, Forked]]:
    args = ["serve", "--tinker", "--model", "embedded", "--port", "0"]
    process = Forked(PPO, [*args, "--output_dir", str(folder), *flags], os.environ)
    try:
        wait_until(lambda: "Serving" in process.output() or process.poll() is not None, 300)
        url = re.search(r"http://[\d.:]+", process.output())
        assert url, process.output()
        yield url[0].rstrip("."), process
        process.send_signal(end)
        assert process.wait(120) == (0 if end == signal.SIGINT else -end), process.output()
    finally:
        process.kill()


@pytest.fixture(scope="package")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("tinker"), "--rule", "number") as (address, _):
        yield address


@pytest.fixture
def connect() -> Iterator[Callable[[str], Client]]:
    with ExitStack() as opened:

        def open_client(url: str) -> Client:
            client = Client(url)
            opened.callback(client.http.close)
            return client

        yield open_client


@pytest.fixture
def client(url: str, connect: Callable[[str], Client]) -> Client:
    return connect(url)
