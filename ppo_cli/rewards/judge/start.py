"""One call before any rollout: is the key right, is the model there, can its reply be read?"""

from __future__ import annotations

import time
from collections.abc import Callable

from ppo_cli.config.reward_schema import ApiReward
from ppo_cli.errors import Interrupted, RewardError, ppo
from ppo_cli.redact import redact
from ppo_cli.rewards.judge.client import JudgeClient
from ppo_cli.rewards.judge.exchange import Failure, JudgeError, Question, Verdict
from ppo_cli.rewards.judge.loop_thread import LoopThread

TRIES = 3  # for a reply that cannot be read
UNREACHABLE_S = 4.0  # an address where nothing listens is a mistake more often than an outage
# Nobody there, or somebody who is no judge: a mistyped address more often than an outage.
_WRONG_ADDRESS = ("connection", "bad_body")


def try_out(
    loop: LoopThread,
    client: JudgeClient,
    question: Question,
    api: ApiReward,
    patient: bool,
    tell: Callable[[str], None],
) -> Verdict:
    """Ask once and return the verdict.

    Raises RewardError when asking is hopeless, Interrupted when the judge stays down, and the
    JudgeError of a refusal: this text will not do, but key and model are right.
    """
    began, pause, unread, told = time.monotonic(), 1.0, 0, False
    while True:
        try:
            return loop.call(client.probe(question), timeout=None)
        except JudgeError as error:
            if error.kind is Failure.FATAL:
                raise RewardError(_refused(error)) from error
            if error.kind is Failure.REFUSED:
                raise
            if error.kind is Failure.UNPARSED:
                unread += 1
                if unread == TRIES:
                    raise RewardError(_unreadable(error, api)) from error
                continue
            waited = time.monotonic() - began
            absent = error.cause in _WRONG_ADDRESS and not patient
            if waited > (UNREACHABLE_S if absent else api.outage_wait):
                raise _gave_up(error, api, waited, absent=absent) from error
            if not told:
                tell(f"The judge does not answer yet ({_words(error)}); trying again.")
                told = True
            left = api.outage_wait - waited
            time.sleep(min(max(pause, error.retry_after or 0.0), max(left, 0.1)))
            pause = min(2 * pause, 30.0)


def _refused(error: JudgeError) -> str:
    return f"The judge cannot be used ({error.cause}): {redact(str(error))}"


def _unreadable(error: JudgeError, api: ApiReward) -> str:
    if error.cause == "truncated":
        return (
            f"The judge {_who(api)} does not come to an end: {TRIES} answers were cut at "
            f"{api.max_tokens} tokens. Raise --rm_max_tokens, or try another --rm_model."
        )
    return (
        f"The judge {_who(api)} answers, but no score can be read from it ({_words(error)}). It "
        'said: "' + redact(error.reply[:200]) + '". Try a stronger --rm_model or another '
        f"--rm_output, or see the request with `{ppo('prompts render embedded')}` and the same "
        "--rm_ flags."
    )


def _gave_up(error: JudgeError, api: ApiReward, waited: float, *, absent: bool) -> Exception:
    if absent:
        where = f" at {redact(api.base_url)}" if api.base_url else ""
        return RewardError(
            f"The judge {_who(api)} cannot be reached{where} ({_words(error)}). Check "
            "--rm_base_url, the network, and that the server is running."
        )
    return Interrupted(
        f"The judge {_who(api)} did not answer for {waited:.0f} s ({_words(error)})."
    )


def _who(api: ApiReward) -> str:
    return f"{api.model} ({api.type})"


def _words(error: JudgeError) -> str:
    return f"{error.cause}: {redact(str(error))}"
