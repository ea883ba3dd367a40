"""Requests that do not fit a judge's context: some servers refuse them, others cut them.

Servers refuse a request if its prompt and `max_tokens` together exceed the context (vLLM, SGLang,
TGI, OpenAI), or if `max_tokens` exceeds what the model may write (Anthropic, DeepSeek, DashScope).
Most messages contain the numbers, each in a different form, so the numbers are identified by size.
Ollama and others cut a long request silently; only the tokens that they count show it.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace

from ppo_cli.rewards.judge.calls import Question, Usage, estimate_tokens
from ppo_cli.rewards.judge.rubric import TOKENS_A_PIECE

logger = logging.getLogger(__name__)

# Tokens in which a short reason and the verdict fit; each criterion of a rubric takes some more.
MIN_ANSWER, MIN_CRITERION = 96, 30
# A smaller limit comes from one long text and does not hold for all requests.
USUAL_ANSWER = 160
# llama.cpp answered 500 before it had an error code for this.
STATUSES = {400, 413, 422, 500}
# How messages call the tokens of the answer, and a limit that is exceeded.
_ANSWER = (
    r"(?:max(?:imum)?[_ ]?(?:completion|output|new|gen)?[_ ]?tokens|maximum tokens you requested"
    r"|n_predict|completion tokens)"
)
_SIZE = (
    r"(?:too (?:large|big|high|many)|exceed|greater than|larger than|at most|less than|no more than"
    r"|up to|range|maximum value|lower|limit|[<>]=? ?`?\d|\[1, ?\d)"
)
# Messages that blame the length, collected from the servers above.
_TOO_LONG = re.compile(
    r"context[_ -]?(?:length|window|size|limit)"
    r"|max(?:imum)?[_ ](?:context|model|seq\w*|prompt|input)[_ ]?(?:len\w*|size)"
    r"|(?:prompt|input|request|message|text)s?\b.{0,60}?\btoo (?:long|large)\b"
    r"|(?:range|length) of input|input token count|too many (?:input |prompt )?tokens"
    r"|reduce (?:the length|the number of tokens|your prompt)|number of tokens allowed"
    r"|must have less than \d+ tokens|tokens to keep from the (?:initial )?prompt"
    r"|(?:prompt|input)\b.{0,40}? (?:longer than|exceeds?) |exceeds? the (?:token|model's) limit"
    r"|total number of tokens|at least 1, got -\d|max_num_tokens",
    re.I,
)
_INPUT = re.compile(r"prompt|input|request|messages|\btext\b", re.I)
_OUTPUT = re.compile(rf"{_ANSWER}|max_new|output|completion|requested|total|\bsum\b", re.I)
_TOO_MUCH = re.compile(rf"{_ANSWER}.{{0,80}}?{_SIZE}|{_SIZE}.{{0,40}}?{_ANSWER}", re.I | re.S)
_UNSUPPORTED = re.compile(r"(?:not|un)[ -]?(?:supported|permitted|recogni[sz]ed|expected)", re.I)
# A 429 of OpenAI: one request needs more tokens than a whole minute has.
_RATE = re.compile(r"tokens\b.*?\blimit:? (\d[\d,]*)\b.*?\brequested:? (\d[\d,]*)", re.I | re.S)
_NUMBER = re.compile(r"(?<![\w.,-])\d{1,3}(?:,\d{3})+(?![\w.])|(?<![\w.-])\d+(?![\w]|\.\d)")


def is_about_length(status: int | None, message: str) -> bool:
    """Whether a refusal says that prompt, answer or both are too long for the judge."""
    if status == 413:
        return True
    if status == 429 and (rate := _RATE.search(message)):
        limit, requested = (int(number.replace(",", "")) for number in rate.groups())
        return requested > limit
    return status in STATUSES and _names_length(message)


def _names_length(message: str) -> bool:
    if _TOO_LONG.search(message):
        return True
    numbered = re.search(r"\d", message) and not _UNSUPPORTED.search(message)
    return bool(numbered and _TOO_MUCH.search(message))


def min_answer_tokens(question: Question) -> int:
    """Return the fewest tokens of answer that are worth asking for."""
    criteria = len(question.rubric.criteria) if question.rubric else 0
    pieces = TOKENS_A_PIECE * question.placing.count if question.placing else 0
    return min(question.max_tokens, MIN_ANSWER + MIN_CRITERION * criteria + pieces)


def fit_answer_tokens(question: Question, message: str) -> int | None:
    """Return the tokens of answer that may fit after a refusal; None if too few would.

    Of two numbers the smaller one is the prompt, if the text can have so many tokens, and the
    larger one is the context, if the request exceeds it. A single number is the most that the model
    may write. Without a useful number, half as much is tried. If only the prompt is blamed, one
    call with the fewest tokens shows whether it fits at all.
    """
    sent, least = question.max_tokens, min_answer_tokens(question)
    if not _names_length(message):  # such as a proxy's limit on the size of bodies
        return None
    if _INPUT.search(message) and not _OUTPUT.search(message):
        return least if least < sent else None
    numbers = {int(match.replace(",", "")) for match in _NUMBER.findall(message)} - {sent}
    longest = estimate_tokens(question.system) + estimate_tokens(question.user)
    prompts = [number for number in numbers if longest / 8 <= number <= 1.5 * longest]
    rooms = [
        context - prompt
        for prompt in prompts
        for context in numbers
        if prompt < context < prompt + sent
    ]
    limits = [number for number in numbers if least <= number < sent]
    room = max(rooms or limits or [sent // 2])
    if room >= sent:
        room = sent // 2
    return room if least <= room < sent else None


# Requests of so many lengths with the same count, the longest so much longer than the shortest,
# show that the judge stops reading there.
CEILING_LENGTHS, CEILING_SPREAD = 4, 1.1
_WORD = re.compile(r"[A-Za-z]+|[0-9]+")
_IDEOGRAPH = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


def min_tokens(text: str) -> int:
    """Return fewer tokens than any usual tokenizer makes of a text: half a token per word."""
    return len(_WORD.findall(text)) // 2 + len(_IDEOGRAPH.findall(text)) // 6


class TruncationCheck:
    """Compares the tokens that a judge says it has read with what it was sent."""

    def __init__(self) -> None:
        self._longest_read = 0
        self._lengths: set[int] = set()  # of the requests with that count

    def find(self, question: Question, read: int) -> str | None:
        """Return what is wrong with a count of tokens; None if it may be right."""
        text = f"{question.system}\n{question.user}"
        if read < (fewest := min_tokens(text)):
            return f"it counted {read} tokens of a request that has at least {fewest}"
        if read > self._longest_read:
            self._longest_read, self._lengths = read, set()
        if read == self._longest_read:
            self._lengths.add(len(text))
        spread = max(self._lengths) / max(1, min(self._lengths))
        if len(self._lengths) < CEILING_LENGTHS or spread < CEILING_SPREAD:
            return None
        low, high = min(self._lengths), max(self._lengths)
        return (
            f"it counted {read} tokens, and never more, of requests of {low} to {high} characters"
        )


class ContextRoom:
    """What calls have shown about a judge's context; each warning comes once.

    `max_answer` is the most tokens that it leaves for answers, None where all fit.
    """

    def __init__(self, label: str, max_tokens: int) -> None:
        self.max_answer: int | None = None
        self._label = label
        self._max_tokens = max_tokens  # of the settings
        self._warned_of_length = False
        self._truncation: TruncationCheck | None = TruncationCheck()  # None once it has warned

    def fit(self, question: Question) -> Question:
        """Return the question with no more tokens for the answer than there is room for."""
        room = min(question.max_tokens, self.max_answer or question.max_tokens)
        return replace(question, max_tokens=room)

    def remember(self, room: int, message: str) -> None:
        """Ask for no more from now on, and say which setting avoids the refused calls."""
        if not self._warned_of_length:
            self._warned_of_length = True
            logger.warning(
                "%s has no room for --rm_max_tokens %d next to the request, so it is asked for %d. "
                "Set --rm_max_tokens %d, or serve it with a longer context. It said: %s",
                self._label, self._max_tokens, room, room, message,
            )  # fmt: skip
        # A smaller room comes from one long text, not from the judge.
        if room >= USUAL_ANSWER:
            self.max_answer = min(room, self.max_answer or room)

    def check_reading(self, question: Question, usage: Usage) -> None:
        """Warn about a judge that reads less than it is sent."""
        if self._truncation is None or not usage.input:
            return
        if (problem := self._truncation.find(question, usage.input)) is not None:
            self._truncation = None
            logger.warning(
                "%s may read only a part of what it is sent: %s. Its verdicts are then about cut "
                "texts. Raise its context (Ollama: num_ctx, OLLAMA_CONTEXT_LENGTH), or lower "
                "--rm_max_response_chars.",
                self._label, problem,
            )  # fmt: skip
