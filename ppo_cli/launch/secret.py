"""The secret that the nodes of a run may share, so that no stranger joins or hears Ray's token.

PPO_CLUSTER_SECRET, the same on all nodes, never travels: each side proves that it has it by an
HMAC over what both have just made up, and Ray's token is made from it. Without it a node is
let in by the run's name alone.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

from ppo_cli.errors import ConfigError
from ppo_cli.launch.lines import Broken, Line, Message, words

VARIABLE = "PPO_CLUSTER_SECRET"
# Whoever meets a node may try words against its proof, as many as it likes: no short ones.
SHORTEST = 16
ANSWER_S = 10.0


class Secret:
    """What is in PPO_CLUSTER_SECRET; false where that is not set."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        text = environ.get(VARIABLE, "").strip()
        if text and len(text) < SHORTEST:
            raise ConfigError(
                f"{VARIABLE} has {len(text)} characters and needs {SHORTEST}: make one with "
                "`openssl rand -hex 32`, and give it to all nodes."
            )
        self._key = text.encode(errors="surrogateescape")

    def __bool__(self) -> bool:
        return bool(self._key)

    def proof(self, *parts: str) -> str:
        """Return what only those can say of these parts who have the secret."""
        # Lengths keep ("a", "bc") and ("ab", "c") apart.
        text = "".join(f"{len(part)}:{part}" for part in parts)
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()

    def proves(self, said: object, *parts: str) -> bool:
        """Whether this is the proof of these parts."""
        return hmac.compare_digest(self.proof(*parts).encode(), words(said).encode())

    def token(self, seed: str, address: str) -> str:
        """Return the token of the Ray at an address; without a secret it is the seed itself."""
        return self.proof("ray token", seed, address) if self else seed


def fresh() -> str:
    """Return something that was never said before."""
    return secrets.token_hex(32)


def examine_node(line: Line, secret: Secret, hello: Message) -> str | None:
    """On node 0: have a node prove the secret, and prove it in turn; returns why it may not in."""
    raw, theirs = hello.get("facts"), words(hello.get("nonce") or "")
    rank = raw.get("rank") if isinstance(raw, dict) else None
    who = f"node {rank}" if isinstance(rank, int) else "a node"
    if bool(theirs) != bool(secret):
        having = ("has no", "has one") if secret else ("has a", "has none")
        return f"{who} {having[0]} {VARIABLE}, node 0 {having[1]}: set the same on all nodes."
    if not secret:
        return None
    ours = fresh()
    parts = words(hello.get("run")), str(rank), theirs, ours
    line.send("challenge", nonce=ours)
    answer = line.read(ANSWER_S) or {}
    if not secret.proves(answer.get("proof"), "node", *parts):
        return f"{who} has another {VARIABLE} than node 0: set the same on all nodes."
    line.send("proof", proof=secret.proof("head", *parts))
    return None


def examine_head(line: Line, secret: Secret, run: str, rank: int, nonce: str) -> None:
    """On a node that said hello: prove the secret, and see that node 0 has it too."""
    if not secret:
        return
    challenge = _answer(line, "challenge", rank)
    parts = run, str(rank), nonce, words(challenge.get("nonce"))
    line.send("proof", proof=secret.proof("node", *parts))
    if not secret.proves(_answer(line, "proof", rank).get("proof"), "head", *parts):
        raise ConfigError(f"node {rank} has another {VARIABLE} than node 0 ({line.there}).")


def _answer(line: Line, kind: str, rank: int) -> Message:
    message = line.read(ANSWER_S)
    if message is None:
        raise Broken(f"has been silent for {ANSWER_S:g} s")
    if message["type"] == "refused":
        raise ConfigError(words(message.get("why"), 500))
    if message["type"] != kind:
        raise ConfigError(
            f"node {rank} has a {VARIABLE}, and what answers at {line.there} does not ask for it: "
            "set the same on all nodes."
        )
    return message
