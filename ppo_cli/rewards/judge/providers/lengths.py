"""Requests that do not fit a judge's context: refused ones, and those that it reads in part.

Servers refuse a request whose prompt and `max_tokens` together exceed the context (vLLM, SGLang,
TGI, OpenAI), or whose `max_tokens` alone exceeds what the model may write (Anthropic, DeepSeek,
DashScope). Most name the numbers, each in its own words, so the numbers are told apart by size.
Ollama and others cut what is too long without a word; only the tokens that they count show it.
"""

from __future__ import annotations

import re

from ppo_cli.rewards.judge.calls import Question, estimate_tokens

LEAST_ANSWER = 96  # tokens in which a reason of a sentence or two and the verdict fit
LEAST_CRITERION = 30
USUAL_ANSWER = 160  # a limit below this is learned from one long text, not for all requests
STATUSES = {400, 413, 422, 500}  # llama.cpp answered 500 before it had a word for it
_CODES = {"context_length_exceeded", "exceed_context_size_error", "contextwindowexceedederror"}
_ANSWER = (
    r"(?:max(?:imum)?[_ ]?(?:completion|output|new|gen)?[_ ]?tokens|maximum tokens you requested"
    r"|n_predict|completion tokens)"
)
_SIZE = (
    r"(?:too (?:large|big|high|many)|exceed|greater than|larger than|at most|less than|no more than"
    r"|up to|range|maximum value|lower|limit|[<>]=? ?`?\d|\[1, ?\d)"
)
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
# What one request needs of a rate per minute; more than all of it never fits.
_RATE = re.compile(r"tokens\b.*?\blimit:? (\d[\d,]*)\b.*?\brequested:? (\d[\d,]*)", re.I | re.S)
_NUMBER = re.compile(r"(?<![\w.,-])\d{1,3}(?:,\d{3})+(?![\w.])|(?<![\w.-])\d+(?![\w]|\.\d)")


def about_length(status: int | None, codes: frozenset[str], words: str) -> bool:
    """Whether a refusal says that prompt, answer or both are too long for the judge."""
    if status == 413 or codes & _CODES:
        return True
    if status == 429 and (rate := _RATE.search(words)):
        limit, requested = (int(number.replace(",", "")) for number in rate.groups())
        return requested > limit
    return status in STATUSES and _names_length(words)


def _names_length(words: str) -> bool:
    if _TOO_LONG.search(words):
        return True
    numbered = re.search(r"\d", words) and not _UNSUPPORTED.search(words)
    return bool(numbered and _TOO_MUCH.search(words))


def least_answer(question: Question) -> int:
    """The fewest tokens that are worth asking for."""
    criteria = len(question.rubric.criteria) if question.rubric else 0
    return min(question.max_tokens, LEAST_ANSWER + LEAST_CRITERION * criteria)


def fewer_tokens(question: Question, words: str) -> int | None:
    """Return the tokens of answer that may fit after a refusal; None where too few would.

    Of two numbers the smaller one is the prompt if the text can have so many tokens, and the
    larger one the context if it is exceeded by the request. A single number is the most that the
    model may write. Without a number that helps, half as much is tried. Where only the prompt is
    blamed, one call with the fewest tokens shows whether that is all.
    """
    sent, least = question.max_tokens, least_answer(question)
    if not _names_length(words):  # such as a proxy's limit on the size of bodies
        return None
    if _INPUT.search(words) and not _OUTPUT.search(words):
        return least if least < sent else None
    numbers = {int(match.replace(",", "")) for match in _NUMBER.findall(words)} - {sent}
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


CEILING_LENGTHS = 4  # requests of different lengths with one count
CEILING_SPREAD = 1.1  # the longest of them over the shortest
_WORD = re.compile(r"[A-Za-z]+|[0-9]+")
_IDEOGRAPH = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


def fewest_tokens(text: str) -> int:
    """Return fewer tokens than any usual tokenizer makes of a text: half a token for a word."""
    return len(_WORD.findall(text)) // 2 + len(_IDEOGRAPH.findall(text)) // 6


class ReadingCheck:
    """Compares the tokens that a judge says it has read with what it was sent."""

    def __init__(self) -> None:
        self._most = 0
        self._lengths: set[int] = set()  # of the requests with that count

    def find(self, question: Question, read: int) -> str | None:
        """Say what is wrong with a count of tokens; None where it may be right."""
        text = f"{question.system}\n{question.user}"
        if read < (fewest := fewest_tokens(text)):
            return f"it counted {read} tokens of a request that has at least {fewest}"
        if read > self._most:
            self._most, self._lengths = read, set()
        if read == self._most:
            self._lengths.add(len(text))
        spread = max(self._lengths) / max(1, min(self._lengths))
        if len(self._lengths) < CEILING_LENGTHS or spread < CEILING_SPREAD:
            return None
        low, high = min(self._lengths), max(self._lengths)
        return (
            f"it counted {read} tokens, and never more, of requests of {low} to {high} characters"
        )
