"""A judge on the loopback interface that speaks the four wire protocols, with faults on demand."""

from tests.judge_server.server import Call, JudgeServer
from tests.judge_server.wire import default_score, verdict_keys

__all__ = ["Call", "JudgeServer", "default_score", "verdict_keys"]
