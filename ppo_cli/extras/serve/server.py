"""The HTTP side of `ppo serve --tinker`: sessions, queued requests and saved models.

Requests that compute wait in a queue for the one thread that owns the models; clients read their
results by id. A seed that a request does not give comes from the server's seed and the counters of
the SDK, so that the same program gets the same samples.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import socket
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from math import inf, nan
from pathlib import Path
from time import monotonic
from typing import Any

from aiohttp import web

from ppo_cli.atomic import delete, sweep_unfinished
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.data_sets.files import Place, RowError
from ppo_cli.data_sets.rows import Columns
from ppo_cli.engine.base import Sampling, stream_key
from ppo_cli.engine.pretrained import load_tokenizer
from ppo_cli.errors import EXIT_USER, UserError, exit_code_of, first_line
from ppo_cli.extras.serve.models import FACTS, ServedModel
from ppo_cli.extras.serve.wire import (
    TOKENS_ALONE,
    check_ranges,
    read_batch,
    write_logprobs,
    write_samples,
)
from ppo_cli.paths import user_path
from ppo_cli.planning.resolved import Resolved
from ppo_cli.scoring.rows import read_response_row
from ppo_cli.scoring.score import Callbacks, open_reward, score_all, scored_row

POLL_S = 30.0  # the SDK waits 45 s for the reply to a poll
AWAY_S = 300.0  # whoever sends nothing for so long is gone; the SDK sends a heartbeat every 10 s
FINISHED = re.compile(r"sessions/([^/]+)/finish")
KEPT_MODELS = 8
KEPT_RESULTS = 1000  # that clients have read, in case a reply was lost
KEPT_SAMPLERS = 4  # unnamed sampler weights of a model
LOOPBACK = ("127.0.0.1", "localhost")
# Names are those of folders, so that they have at most 255 bytes.
PATH = re.compile(r"tinker://(\w[\w.:-]{0,59})/(weights|sampler_weights)/(\w[\w.:-]{0,59})")
# A chunk of a batch is sent when the one before it is queued, so that they add up in order.
CONSTANT_REPLIES: Mapping[str, Any] = {
    "client/config": {"parallel_fwdbwd_chunks": False}, "client/dynamic_config": {},
    "telemetry": {"status": "accepted"}, "healthz": {"status": "ok"}, "session_heartbeat": {},
}  # fmt: skip
# Fields of `asample` that are refused, and why.
UNSERVED = dict.fromkeys(
    ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs",
     "prompt_alt_tokens_k"), ""
) | {"record_stability_info": ", as the objective of stable_reinforce is not published: choose "
     "loss_fn=importance_sampling, ppo, cispo or gspo"}  # fmt: skip
# A sampler has neither critic nor reference.
SAMPLER_SETTINGS = {
    "algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False,
    "actor.use_kl_loss": False,
}  # fmt: skip
Body = Mapping[str, Any]


class TinkerServer:
    """Serves one base model, by its name and by `served_name`, with the reward of the settings.

    Each model decides what is unset for itself: its rank is the client's.
    """

    def __init__(self, resolved: Resolved, served_name: str | None) -> None:
        config = resolved.config
        model = config.model
        self._resolved, self._config = resolved, config
        # The SDK and the cookbook load the tokenizer from this machine.
        self._tokenizer_folder = str(Path(model_folder(model.path)).resolve())
        names = (model.path, self._tokenizer_folder, served_name or model.path)
        self._names = [*dict.fromkeys(names)]
        self._tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        self._root = user_path(config.trainer.output_dir).resolve()
        for folder in self._root.glob("*/*weights"):  # what a killed server was writing
            sweep_unfinished(folder)
        self._models: dict[str, ServedModel] = {}
        self._samplers: dict[str, str | None] = {}  # id -> path of its weights; None: base model
        self._results: dict[str, Future[Any]] = {}
        self._read: dict[str, None] = {}  # ids of results that clients have, oldest first
        self._last_signs: dict[str, float] = {}  # of each session; -inf: it is closed
        self._worker, self._judge = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._open = lru_cache(maxsize=2)(self._open_sampler)
        self._direct: dict[str, Callable[[Body], Any]] = {
            "create_session": lambda body: {"session_id": secrets.token_hex(4)},
            "get_server_capabilities": lambda body: {
                "supported_models": [{"model_name": name} for name in self._names]
            },
            "create_sampling_session": self._create_sampler,
            "get_info": self._describe,
        }
        self._queued: dict[str, Callable[[Any], Any]] = {
            "create_model": self._create_model, "load_weights": self._load,
            "forward_backward": self._run_batch, "optim_step": self._step, "asample": self._sample,
            "save_weights": self._save, "save_weights_for_sampler": self._save,
        }  # fmt: skip
        # Calls beside the protocol, answered when they are done.
        self._extra: dict[str, Callable[[Body], Any]] = {
            "ppo/annotate": lambda body: self._model(body).annotate(body["rows"]),
            "ppo/train_critic": lambda body: self._model(body).train_critic(body["rows"]),
            "ppo/score": self._score,
        }

    def serve(self, listener: socket.socket, note: Callable[[str], None]) -> None:
        """Start the reward, say the address, and answer requests until Ctrl-C or SIGTERM."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        with open_reward(self._config.reward, [], Callbacks(note=note)) as self._reward:
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            note(f"Serving {' and '.join(self._names)} on {address}. Ctrl-C ends it.")
            web.run_app(app, sock=listener, print=None, access_log=None, shutdown_timeout=1.0)
            for executor in (self._worker, self._judge):
                executor.shutdown(cancel_futures=True)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request; a client's mistake is a 4xx with a sentence, which is not retried."""
        route = request.path.removeprefix("/api/v1/")
        # A page in a browser cannot send this header to another site, nor, when a name of its own
        # leads here, this host.
        if "X-API-Key" not in request.headers or request.url.host not in LOOPBACK:
            detail = f"Ask {' or '.join(LOOPBACK)}, with the header X-API-Key and any value."
            return _reply({"detail": detail}, 401)
        try:
            data = await request.read()
            body = read_batch(data) if route == "forward_backward" else json.loads(data or b"{}")
            self._note_sign(body)
            if route in CONSTANT_REPLIES:
                return _reply(CONSTANT_REPLIES[route])
            if route == "retrieve_future":
                return await self._retrieve(body["request_id"])
            if route in self._queued:
                return _reply(self._queue(route, body))
            if route in self._direct:
                return _reply(self._direct[route](body))
            if route in self._extra:
                executor = self._judge if route == "ppo/score" else self._worker
                return _reply(await asyncio.wrap_future(executor.submit(self._extra[route], body)))
            if finished := FINISHED.fullmatch(route):
                self._last_signs[finished[1]] = -inf
                self._worker.submit(self._finish, finished[1])
                return _reply({})
            if (name := route.removeprefix("samplers/")) in self._samplers:
                return _reply({"sampler_id": name, "base_model": self._names[-1]})
        except (UserError, RowError) as error:
            return _reply({"detail": str(error)}, 422)
        except (KeyError, TypeError, ValueError) as error:
            return _reply({"detail": f"{route} cannot be read: {error!r}."}, 422)
        return _reply({"detail": f"{request.method} {request.path} is not served."}, 404)

    def _note_sign(self, body: Body) -> None:
        """Keep the time at which a session that is open has sent a request."""
        names = ("session_id", "model_id", "sampling_session_id", "request_id")
        session = next((str(body[name]).partition(":")[0] for name in names if body.get(name)), "")
        if self._last_signs.get(session) != -inf:
            self._last_signs[session] = monotonic()

    def _check_presence(self, session: str) -> None:
        """Raise UserError if nobody waits for what the session has asked for."""
        if monotonic() - self._last_signs.get(session, inf) > AWAY_S:
            raise UserError(
                f"Sampling stopped: session {session} is closed, or has sent nothing for "
                f"{AWAY_S:g} s."
            )

    def _queue(self, route: str, body: Body) -> Body:
        """Queue a request once: when the SDK repeats it, it has the same owner and number."""
        check_ranges(body)
        owner = body.get("model_id") or body.get("sampling_session_id") or body["session_id"]
        number = body.get("seq_id", body.get("model_seq_id", secrets.token_hex(4)))
        name = f"{owner}:{route}:{number}"
        if name not in self._results:
            self._results[name] = self._worker.submit(self._queued[route], body)
        samples = [f"{name}:{i}" for i in range(body.get("num_samples") or 1)]
        return {"request_id": name, "sample_sequence_ids": samples}

    async def _retrieve(self, name: str) -> web.Response:
        """Return a result; after `POLL_S` the client is told to poll again."""
        if name not in self._results:
            raise UserError(f"This server has no request {name}: it was started anew.")
        result = asyncio.wrap_future(self._results[name])
        done, _ = await asyncio.wait([result], timeout=POLL_S)
        if not done:
            return _reply({"type": "try_again", "request_id": name, "queue_state": "active"}, 408)
        self._read[name] = None
        for oldest in [*self._read][:-KEPT_RESULTS]:
            del self._read[oldest]
            self._results.pop(oldest, None)
        if (error := result.exception()) is None:
            return _reply(result.result())
        # A full disk or memory that runs out is for the user, too.
        if exit_code_of(error) == EXIT_USER:
            return _reply({"error": str(error), "category": "user"})
        traceback.print_exception(error)  # others are still served
        return _reply({"error": f"bug in ppo-cli: {first_line(error)}", "category": "server"})

    def _model(self, body: Body) -> ServedModel:
        name: str = body["model_id"]
        if name not in self._models:
            raise UserError(f"There is no model {name}: create it, or load its state.")
        # The model whose last call is longest ago makes room for a new one.
        self._models[name] = self._models.pop(name)
        return self._models[name]

    def _finish(self, session: str) -> None:
        """Free the models of a session that its client has closed."""
        for name in [name for name in self._models if name.startswith(f"{session}:")]:
            del self._models[name]

    def _describe(self, body: Body) -> Body:
        model, name = self._model(body), self._names[-1]
        data = {"model_name": name, "tokenizer_id": self._tokenizer_folder}
        lora = {"is_lora": model.rank > 0, "lora_rank": model.rank}
        return {"model_id": body["model_id"], "model_name": name, "model_data": data, **lora}

    def _check_base(self, name: str | None) -> None:
        if name not in self._names:
            raise UserError(f"This server has {' and '.join(self._names)}, not {name}.")

    def _create_model(self, body: Body) -> Body:
        """Build a model for training; rank 0 trains all weights."""
        self._check_base(body["base_model"])
        lora = {"rank": 0, "train_mlp": True, "train_attn": True} | (body.get("lora_config") or {})
        if not (lora["train_mlp"] and lora["train_attn"]):
            raise UserError("Adapters go to all linear layers: leave train_mlp, train_attn out.")
        return {"model_id": self._add_model(body, lora["rank"], lora.get("seed"))}

    def _add_model(self, body: Body, rank: int, seed: int | None = None) -> str:
        name = f"{body['session_id']}:train:{body['model_seq_id']}"
        seed = self._config.trainer.seed if seed is None else seed
        self._models[name] = ServedModel(self._resolved, self._tokenizer, rank, seed)
        for oldest in [*self._models][:-KEPT_MODELS]:
            del self._models[oldest]
        return name

    def _run_batch(self, body: Body) -> bytes:
        logprobs, loss = self._model(body).run_batch(
            body["data"], body["loss"], body["config"], backward=body["backward"]
        )
        return write_logprobs(logprobs, {"loss:sum": loss})

    def _step(self, body: Body) -> Body:
        if "adam_params" not in body:
            raise UserError("The optimizer is AdamW: give optim_step AdamParams.")
        return {"metrics": self._model(body).step(body["adam_params"])}

    def _save(self, body: Body) -> Body:
        """Save a state, or weights for samplers; with unnamed ones comes a sampler."""
        sampler = body["type"] == "save_weights_for_sampler"
        if body.get("kind") == "inflight":
            raise UserError("Samplers with weights that change are not served: take snapshots.")
        kind, model = "sampler_weights" if sampler else "weights", self._model(body)
        name = body.get("path") or f"unnamed.{body['seq_id']:08}"
        path = f"tinker://{body['model_id']}/{kind}/{name}"
        folder = self._folder(path, kind)
        # A sampler may have loaded the old weights.
        if folder.exists() and (sampler or not body.get("overwrite")):
            raise UserError(f"{path} is there already: choose another name.")
        # Another server may have another served name.
        facts = {"base_model": self._names[0], "user_metadata": body.get("user_metadata")}
        model.save(folder, facts, sampler=sampler)
        if body.get("path") or not sampler:
            return {"path": path, "type": body["type"]}
        for old in sorted(folder.parent.glob("unnamed.*"))[:-KEPT_SAMPLERS]:
            delete(old)
        session = {"session_id": body["model_id"].split(":")[0], "model_path": path}
        return {"type": body["type"], **self._create_sampler({**body, **session})}

    def _load(self, body: Body) -> Body:
        """Load a state into a model, or into a new one."""
        folder, rank = self._find(body["path"], "weights")
        name = self._add_model(body, rank) if body.get("session_id") else body["model_id"]
        model = self._model({"model_id": name})
        if model.rank != rank:
            raise UserError(f"{body['path']} has rank {rank}, the model {model.rank}.")
        model.load(folder, optimizer=body["optimizer"])
        return {"path": body["path"], "model_id": name, "type": "load_weights"}

    def _folder(self, path: str, kind: str) -> Path:
        """Return the folder of a path such as tinker://RUN/weights/NAME."""
        if not (parts := PATH.fullmatch(path)) or parts[2] != kind:
            raise UserError(
                f"'{path}' is not a path such as tinker://RUN/{kind}/NAME, where NAME has at most "
                "60 letters, digits, dots, colons and dashes."
            )
        return self._root.joinpath(*parts.groups())

    def _find(self, path: str, kind: str) -> tuple[Path, int]:
        """Return the folder and the rank of something saved of this base model."""
        folder = self._folder(path, kind)
        if not (folder / FACTS).exists():
            raise UserError(f"There is no {path} in {self._root}.")
        facts = json.loads((folder / FACTS).read_text())
        self._check_base(facts["base_model"])
        return folder, facts["rank"]

    def _create_sampler(self, body: Body) -> Body:
        if path := body.get("model_path"):
            self._find(path, "sampler_weights")
        else:
            self._check_base(body.get("base_model"))
        name = f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"
        self._samplers[name] = path
        return {"sampling_session_id": name}

    def _open_sampler(self, path: str | None) -> ServedModel:
        """Return a model with saved weights, or the base model; it has no critic."""
        resolved, seed = self._resolved.amend(SAMPLER_SETTINGS), self._config.trainer.seed
        folder, rank = self._find(path, "sampler_weights") if path else (None, 0)
        if folder and not rank:
            resolved = resolved.amend({"model.path": str(folder)})
        return ServedModel(resolved, self._tokenizer, rank, seed, folder if rank else None)

    def _sample(self, body: Body) -> bytes:
        """Draw samples, and score the prompt if the request asks for it."""
        if unserved := [name for name in UNSERVED if body.get(name)]:
            raise UserError(f"{unserved[0]} is not served{UNSERVED[unserved[0]]}.")
        name, settings = body["sampling_session_id"], body["sampling_params"]
        if name not in self._samplers:
            raise UserError(f"There is no sampler {name}: create it again.")
        chunks = body["prompt"]["chunks"]
        if not all("tokens" in chunk for chunk in chunks):
            raise UserError(TOKENS_ALONE)
        tokens = [token for chunk in chunks for token in chunk["tokens"]]
        stop, seed = settings.get("stop"), settings.get("seed")
        stop = [stop] if isinstance(stop, str) else stop
        # Decoded responses end before a token such as <|im_end|>.
        tokens_by_text = self._tokenizer.get_added_vocab()
        stop = stop and [tokens_by_text.get(end, end) for end in stop]
        if seed is None:
            seed = stream_key(self._config.trainer.seed, name.split(":")[-1], body["seq_id"])
        sampling = Sampling(
            settings["temperature"], settings["top_p"], settings["top_k"], body["num_samples"],
            settings.get("max_tokens") or self._config.data.max_response_length, seed,
            tuple(text for text in stop or () if text and isinstance(text, str)),
        )  # fmt: skip
        model, logprobs = self._open(self._samplers[name]), None
        if body.get("prompt_logprobs"):
            logprobs = model.score_prompt(tokens)
            logprobs[: -(body.get("prompt_logprobs_last_n") or len(tokens))] = nan
        end_ids = None if stop == [] else [token for token in stop or () if isinstance(token, int)]
        check = partial(self._check_presence, name.partition(":")[0])
        return write_samples(model.sample(tokens, sampling, end_ids, check), logprobs)

    def _score(self, body: Body) -> list[Body]:
        """Score rows (`prompt`, `response`, perhaps `ground_truth`) with the server's reward."""
        columns = Columns("prompt", "ground_truth", "data_source", ())
        rows = [
            read_response_row("request", Place("rows", number), record, columns)
            for number, record in enumerate(body["rows"], 1)
        ]
        if not all(row.has_response for row in rows):
            raise UserError("Each row needs a 'response'.")
        scores = score_all(self._reward, [row.rollout for row in rows], Callbacks()).scores
        return [scored_row(row, score) for row, score in zip(rows, scores, strict=True)]


def _reply(body: Any, status: int = 200) -> web.Response:
    """Return a reply of JSON, or of protobuf for bytes."""
    if isinstance(body, bytes):
        return web.Response(body=body, content_type="application/x-protobuf")
    return web.json_response(body, status=status)
