"""Places of a judge's score in a response: how it is cut, what is asked, where rewards land.

The judge scores the numbered pieces of a response, and the whole, in one call. The whole score says
how much, the pieces say where: it is shared out over the pieces by their scores, so that neither
more pieces nor shorter ones earn more. A response of one piece is asked about as without places.

With a rubric (`criterion`) the judge quotes the passage that fulfils or breaks each criterion.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.records import PlacedReward, Rollout, Score
from ppo_cli.rewards.judge.calls import Scale
from ppo_cli.rewards.judge.rubric import Placing, Rubric
from ppo_cli.rewards.judge.sanitise import INVISIBLE, clean
from ppo_cli.rewards.judge.splitting import load_split
from ppo_cli.rewards.judge.visible import Passage, Response, visible_response

# More pieces do not fit into one answer of a judge; neighbours are one piece then.
MAX_PIECES = 60

# Responses may be thousands of full stops: no pattern below reads a run of them more than once.
# The end of a sentence: full stops of many scripts with what closes after them, and a blank if
# the stop is one that numbers and names have too.
_STOP = re.compile(
    r"(?:(?<![.!?…])[.!?…]++(?:[\"'”’»)\]*_`]|[ \u00a0\u202f]»)*+(?=\s|$)"
    r"|(?:[。！？｡।॥؟۔።፧։။။។།]|．(?!\d))+[\"'”’»」』）)\]]*)\s*"
    r"|\n\s*"
)
# Where a sentence goes on behind a full stop; \0 stands behind the stop and its blank.
_GOES_ON = re.compile(
    # Initials and abbreviations.
    r"[\s(](?:(?![ap]\.m|т\.[дп])(?:[^\W\d_]\.)+[^\W\d_]|[A-ZÀ-ÞА-ЯЁ]|z\. B|d\. h|u\. a|p\. e[jx]"
    r"|т\. [ек]|cf|vs|approx|ca|bzw|vgl|Nr|Hr|Mr|Mrs|Ms|Mme|Mlle|Sra?|EE|UU|Dr|Prof|Ph\.D|St|Fig|Eq"
    r"|No|Sec|[Сс]м|ул)\.\)?\0"
    # The first of two initials with a blank between them.
    r"|[\s(][^\W\d_]\.\0[^\W\d_]{1,2}\."
    # Abbreviations that end sentences too, before a small letter; others before a number.
    r"|[\s(](?:[ap]\. ?m|т\. ?[дп]|др|etc|usw|al|Inc|Ltd|Co|Corp|Jr)\.\0[a-zß-öø-ÿа-яё]"
    r"|[\s(](?:pp?|vol|ch|pág|[Aa]rt|Abs|env|aprox|rd|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec"
    r"|[дгс]|стр?|рис)\.\0\d"
    # A quotation within a sentence.
    r"|[\"'”’»]\0[a-zß-öø-ÿа-яё]|[」』]\0と"
    # A day before its month, in German; the number of a list's item.
    r"|\s\d{1,2}\.\0(?:Januar|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November"
    r"|Dezember)\b"
    r"|(?:\n|[.!?;:]\s)[ \t]*(?:[-*>#]+[ \t]*)?\(?\d{1,3}\.\0"
)
# Judges write the plain forms of these.
_MARKS = str.maketrans("“”„‘’", '"""\'\'')
_LINE = re.compile(r"\n\s*")
# A step is a paragraph, or begins with its number or a bullet of a list.
_STEP = re.compile(
    r"\n[ \t\r]*\n\s*"
    r"|\n(?=[ \t]*+(?:[*#]{0,3}[ \t]*(?:step|schritt|étape|paso)\b|\(?\d{1,3}[.):]\s))",
    re.I,
)


@dataclass(frozen=True)
class Piece:
    """A piece of a response: what the judge reads, and the number of characters or tokens up to it.

    `unit` is that of a placed reward: characters of `Rollout.text`, or tokens of an episode.
    """

    text: str
    end: int
    unit: Literal["char", "token"] = "char"


def cut_response(rollout: Rollout, api: ApiReward) -> list[Piece]:
    """Return the pieces of a response that the judge scores; [] if it scores the whole alone.

    Of an episode that it reads whole, only turns are pieces. Thoughts that the judge does not see
    belong to the piece after them.
    """
    if api.place is None or api.place == "criterion":
        return []
    if rollout.turns and (api.scope == "episode") != (api.place == "turn"):
        return []
    if api.place == "turn":
        return [Piece(turn.text, turn.end, "token") for turn in rollout.turns]
    return _cut(rollout.full_text, _seen_spans(rollout, api), len(rollout.prompt.opened), api.place)


def _cut(text: str, shown: Sequence[tuple[int, int]], opened: int, place: str) -> list[Piece]:
    """Return the pieces of a text of which the judge sees the spans `shown`; [] if it is one."""
    ends = sorted(_list_ends(text, shown, opened, place))
    # Of too many pieces neighbours are joined, as evenly as possible.
    count = min(len(ends), MAX_PIECES)
    ends = [ends[len(ends) * (k + 1) // count - 1] for k in range(count)]
    # The last piece goes to the end of the text: nothing lies behind all pieces.
    ends[-1:] = [len(text)] if ends else []
    pieces, start = list[Piece](), 0
    for end in ends:
        parts = (text[max(start, a) : min(end, b)] for a, b in shown)
        pieces.append(Piece(clean("".join(parts)), end - opened))
        start = end
    return pieces if len(pieces) > 1 else []


def show_pieces(pieces: Sequence[Piece]) -> Response:
    """Return what the judge sees of a response in pieces."""
    return tuple(Passage("piece", k, piece.text) for k, piece in enumerate(pieces, start=1))


def show_response(rollout: Rollout, api: ApiReward) -> Response:
    """Return what the judge sees of a response, before it is shortened."""
    pieces = () if api.place == "turn" else cut_response(rollout, api)
    return show_pieces(pieces) if pieces else visible_response(rollout, api)


def show_example(text: str, api: ApiReward, second: str = "") -> Response:
    """Return what the judge sees of a made-up response; `second` is a piece after a single one."""
    if api.place in (None, "criterion"):
        return f"{text} {second}".rstrip()
    if api.place == "turn":
        return tuple(
            Passage("assistant", k, part) for k, part in enumerate((text, second), 1) if part
        )
    pieces = _cut(text, [(0, len(text))], 0, api.place) or [Piece(text, 0)]
    if second and len(pieces) == 1:
        pieces.append(Piece(second, 0))
    return show_pieces(pieces) if len(pieces) > 1 else text


def _seen_spans(rollout: Rollout, api: ApiReward) -> list[tuple[int, int]]:
    """Return the parts of `full_text` that the judge sees."""
    hidden = rollout.thoughts if api.reasoning == "strip" else ()
    starts = [0, *(span.end for span in hidden)]
    ends = [*(span.start for span in hidden), len(rollout.full_text)]
    return list(zip(starts, ends, strict=True))


def _list_ends(
    full_text: str, shown: Sequence[tuple[int, int]], opened: int, place: str
) -> Iterator[int]:
    """Yield where pieces end in a text; a piece has a letter or a digit."""
    for start, end in shown:
        text = full_text[start:end]
        ends = list[int]()
        # The mark of a thought that the prompt opened is no piece.
        read = max(0, opened - start)
        for cut in [*_cuts(text, place), len(text)]:
            if any(character.isalnum() for character in text[read:cut]):
                ends.append(cut)
            elif ends:  # a separator belongs to the piece before it
                ends[-1] = cut
            read = max(read, cut)
        yield from (start + end for end in ends)


def _cuts(text: str, place: str) -> Iterator[int]:
    """Yield where sentences, lines, steps or the pieces of a split of the user's end."""
    if place == "sentence":
        yield from _sentence_ends(text)
    elif place in ("line", "step"):
        yield from (match.end() for match in (_LINE if place == "line" else _STEP).finditer(text))
    else:
        yield from accumulate(map(len, load_split(place)(text)))


def _sentence_ends(text: str) -> Iterator[int]:
    padded = f"\n{text}"
    for match in _STOP.finditer(text):
        stop = match[0].rstrip()
        before = padded[max(0, match.start() - 12) : match.start() + 1 + len(stop)]
        window = f"{before}\0{text[match.end() : match.end() + 10]}"
        if "\n" not in match[0] and _GOES_ON.search(window):
            continue
        yield match.end()


def request_places(response: Response, api: ApiReward, scale: Scale) -> Placing | None:
    """Return the request for a response as the judge sees it; None for one of a single piece."""
    if api.place in (None, "criterion") or isinstance(response, str):
        return None
    # The passages of an episode are turns; they are pieces where turns are what is scored.
    noun, kinds = ("turn", ("assistant",)) if api.place == "turn" else ("piece", ("piece",))
    count = max((passage.turn for passage in response if passage.kind in kinds), default=0)
    return Placing(count, scale.low, scale.high, scale.key, noun) if count > 1 else None


def place_score(score: Score, rollout: Rollout, api: ApiReward, rubric: Rubric | None) -> Score:
    """Return a judge's score with its shares placed in the response.

    Piece k gets value * p_k / sum(p), with its score p_k in [0, 1]; all get the same where every
    piece has the lowest score. So the shares add up to the value. A criterion of weight w with
    credit g in [0, 1] gets w g / sum(w) at the passage that the judge quoted, a fault
    w (g - 1) / sum(w): it is punished there, and its weight is at the end with or without it. So
    the end never earns what a passage lost. A quotation that is not there belongs to the end.
    """
    if score.value is None:
        return score
    if rubric is not None and rubric.quoted:
        return _place_criteria(score, rollout, api, rubric.restore())
    shares: Sequence[float] = score.info.get("pieces", ())
    return _share_out(score, cut_response(rollout, api), shares) if shares else score


def place_evenly(score: Score, rollout: Rollout, api: ApiReward) -> Score:
    """Return a score without a verdict, shared out over the pieces alike.

    At the end alone it would be worth more than a verdict, whose shares are discounted.
    """
    pieces = cut_response(rollout, api)
    return _share_out(score, pieces, ()) if pieces else score


def _share_out(score: Score, pieces: Sequence[Piece], shares: Sequence[float]) -> Score:
    total = math.fsum(shares)
    weights = [share / total for share in shares] if total else [1 / len(pieces)] * len(pieces)
    placed = tuple(
        PlacedReward(piece.end, score.number * weight, piece.unit)
        for piece, weight in zip(pieces, weights, strict=True)
    )
    return replace(score, steps=placed)


def _place_criteria(score: Score, rollout: Rollout, api: ApiReward, rubric: Rubric) -> Score:
    """Place the credit of each criterion at its quotation; `quotes_lost` counts those not found."""
    total = math.fsum(criterion.weight for criterion in rubric.criteria)
    placed, lost = list[PlacedReward](), 0
    for criterion, quote in zip(rubric.criteria, score.info["quotes"], strict=True):
        place = _find_quote(quote, rollout, api)
        lost += place is None and bool(quote.strip())
        credit = score.info["criteria"][criterion.name]
        if place is not None and criterion.weight:
            value = criterion.weight * (credit - criterion.fault) / total
            placed.append(replace(place, value=value))
    return replace(score, steps=tuple(placed), info={**score.info, "quotes_lost": lost})


def _find_quote(quote: str, rollout: Rollout, api: ApiReward) -> PlacedReward | None:
    """Return a reward of 0 where a quotation ends, None if it is not there.

    What differs between a response and what a judge reads and copies may differ: blanks, invisible
    and composed characters, the form of quotation marks, and last the case of letters. Whole words
    are looked for first. In an earlier turn of an episode, the place is the end of the turn.
    """
    parts = _fold(quote)[0].strip(" \t\n\"'«»").split()
    if not parts:
        return None
    body = r"\s*".join(map(re.escape, parts))
    patterns = (re.compile(form % body) for form in (r"(?<!\w)%s(?!\w)", "%s", "(?i)%s"))
    places = (_find_pattern(pattern, rollout, api) for pattern in patterns)
    return next((place for place in places if place is not None), None)


def _find_pattern(
    pattern: re.Pattern[str], rollout: Rollout, api: ApiReward
) -> PlacedReward | None:
    for turn in rollout.turns[:-1] if api.scope == "episode" else ():
        if pattern.search(_fold(turn.text)[0]):
            return PlacedReward(turn.end, 0.0, "token")
    for start, end in _seen_spans(rollout, api):
        text, origins = _fold(rollout.full_text[start:end])
        if match := pattern.search(text):
            end = start + origins[match.end() - 1] + 1
            return PlacedReward(end - len(rollout.prompt.opened), 0.0)
    return None


@lru_cache(maxsize=64)
def _fold(text: str) -> tuple[str, list[int]]:
    """Return a text in one form, and the index of the character that each of its own is of."""
    pairs = [
        (part, at)
        for at, character in enumerate(text)
        if not INVISIBLE.match(character)
        for part in unicodedata.normalize("NFD", character).translate(_MARKS)
    ]
    return "".join(part for part, _ in pairs), [at for _, at in pairs]
