"""The verdict of a reply in plain text: a labelled line such as "Score: 8", or a lone number.

A number somewhere in free text is never a verdict, and neither is one that the reply quotes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ppo_cli.rewards.judge.exchange import Scale
from ppo_cli.rewards.judge.verdict_value import (
    NUMBER,
    Unreadable,
    is_range,
    number_of,
    read_number,
    read_written_value,
)

_FINAL = r"final|overall|最终|最後|综合|總|最终的|итоговая"
_NOUN = (
    r"score|rating|grade|mark|评分|評分|分数|分數|得分|打分|スコア|評価|点数|得点|점수|평점"
    r"|оценка|puntuación|puntuacion|puntaje|calificación|bewertung|punktzahl|pontuação|punteggio"
)
# These words mean other things too, so the value must name the scale as well.
_VAGUE = r"total|total\s+score|总分|總分|note|nota|verdict|voto"
_LEAD = r"(?:(?:therefore|thus|so|hence|overall|in\s+conclusion|综上|因此)\s*[,，]?\s*)?"
_LABEL = re.compile(
    rf"""{_LEAD}(?P<quote>["']?)(?:(?:the|my|your)\s+)?(?:(?P<final>{_FINAL})\s*)?
    (?:(?P<noun>{_NOUN})|(?P<vague>{_VAGUE}))(?:结果)?(?P=quote)\s*
    (?:\(\s*(?P<scale>[^()]{{1,30}})\s*\)\s*)?(?:[:=]|\bis\b|为|是|は)\s*""",
    re.I | re.X,
)
_LOOSE = re.compile(
    rf"(?:{_NOUN})(?:>|[\"'\s]*(?:\([^()]*\)\s*)?(?:[:=|]|\bis\b|为|是|は))[\"'\s\[(]*({NUMBER})",
    re.I,
)
_HEDGES = re.compile(
    r"\b(?:would|too|maybe|perhaps|or|but|not|no|however|wait|actually|minus|plus|half|above"
    r"|below|less|more|if|unless|should|could|might|at\s+(?:most|least))\b|如果|但|或|左右|以上|以下",
    re.I,
)
_QUOTING = re.compile(
    r"\b(?:sa(?:ys|id|ying)|claim\w*|wr(?:ites?|ote|itten|iting)|contain\w*|includ\w*|stat(?:es|ed|ing)"
    r"|instruct\w*|inject\w*|manipulat\w*|attempt\w*|trick\w*|tr(?:ies|ied|ying)|asks?|demand\w*"
    r"|quot\w*|embed\w*|print\w*|returns|returned|outputs|append\w*|ends|ended|begins|starts"
    r"|example|e\.g|for\s+instance|such\s+as|like|format|schema|expected|reply|respond|answer\s+with"
    r"|would|should|could|instead|tells?|told|orders?|text|line|reads|prompt"
    r"|ignor(?:e|ing)|disregard|fake|placeholder)\b"
    r"|\b(?:user|student|candidate|human)\b|写道|写着|声称|包含|要求|试图|例如|比如|格式|说",
    re.I,
)
# "Response:" alone announces the response; "Here is my view of the response:" does not.
_NAMES_DATA = re.compile(
    r"(?:the\s+)?(?:(?!final\b|my\b|your\b)\w+\s+)?"
    r"(?:response|answer|submission|solution|completion|回答|答案)\s*[:：`\"]*",
    re.I,
)
_ABOUT_ITSELF = re.compile(
    r"evaluat|assess|verdict|result|judg|final|overall|scor|rating|conclu|summary|here|评|结", re.I
)
# What disowns a verdict, or says whose words it was, needs no other number.
_SOURCE = (
    r"(?:response|answer|student|user|candidate|submission|solution|author|text|prompt"
    r"|it|he|she|they)"
)
_SAYING = (
    r"(?:sa(?:ys|id)|claim\w*|wr(?:ites?|ote)|want\w*|ask\w*|demand\w*|request\w*|instruct\w*"
    r"|told|tells?|tri(?:es|ed)|contain\w*|output|includ\w*|end(?:s|ed)|suggest\w*|propos\w*"
    r"|g[ai]ve[sn]?)"
)
_DISOWNED = re.compile(
    r"\b(?:inject\w*|manipulat\w*|cheat\w*|the\s+above|(?:line|score)\s+above|above\s+(?:line|score)"
    r"|kidding|joking|sarcas\w*|never\s*mind|scratch\s+that|disregard|oops|placeholder|hallucinat\w*"
    r"|(?:this|that|which|these|those)\s+(?:is|was|are|were)\s+(?:just\s+|only\s+|exactly\s+)?(?:what|how)"
    rf"|(?:what|as|because|since)\s+(?:the\s+)?{_SOURCE}\s+(?:\w+\s+)?(?:want|ask|demand|request|instruct|told|tells|order)\w*"
    rf"|(?:so\s+)?{_SAYING}\s+the\s+{_SOURCE}|according\s+to\s+(?:the\s+)?{_SOURCE}"
    rf"|(?:it|(?:this|that|the)(?:\s+\w+)?)\s+(?:is|was|comes?|came)"
    rf"\s+(?:\w+\s+)?(?:from|in|part\s+of|inside)\s+(?:the\s+)?{_SOURCE}"
    r"|(?:me|us|judge|grader|evaluator|model)\s+to\s+(?:out|g|pr|s|wr|ret|as|aw)\w+"
    r"|(?:not|isn't|never)\s+(?:be\s+)?(?:my|mine|the\s+real|the\s+final|the\s+actual|a\s+real)"
    r"|(?:quoted|copied|taken|pasted|repeated|copying|quoting|repeating)\b"
    r"|(?:do|does|did|will|would|can|could)(?:\s+not|n't|not)\s+(?:agree|follow|comply|accept|count|obey|endorse|stand)"
    r"|disagree|refuse|withdraw\w*|retract\w*|take\s+(?:it|that)\s+back|ignor(?:e|ed|ing)\s+(?:this|that|it|the)"
    r"|too\s+(?:generous|harsh|kind|lenient|high|low|strict|severe|much|nice|soft|hard|optimistic)"
    r"|(?:an?|the)\s+(?:mere\s+)?(?:example|sample|template|draft|format)\b"
    r"|(?:score|rating|verdict|number|json)\s+(?:is|was|seems)\s+(?:wrong|incorrect|fake|invalid|a\s+mistake)"
    r")|(?:^|\n)[^\w\n]{0,20}(?:if|unless|provided|assuming|only\s+if|no|not|wait|hmm+)\b"
    r"|\bi(?:'d)?\s+(?:would\s+|should\s+|will\s+)?(?:lower|raise|change|reconsider|misread|overlook"
    r"|miss|take)|before\s+i\s+(?:saw|noticed|read)|end\s+of\s+(?:the\s+)?(?:response|submission)"
    rf"|[(—–-]\s?(?:from\s+)?the\s+{_SOURCE}\W{{0,9}}(?:\n|$)|\(\s?from\b|(?:^|\n)correction\b"
    r"|part\s+of\s+the\s+\w+|\A[\s`'\")]{0,9}[,;]?\s?(?:is|was|appears|stands|it|he|she|says|said)\s"
    r"|</?(?:response|submission|student|quote|blockquote|user|candidate)\b"
    r"|作废|不算|太高|太低|开玩笑|是(?:回答|学生|用户)",
    re.I,
)
_OWN_WORDS = re.compile(
    r"\b(?:but|and|so|final|overall|the|my|our|thus|therefore|hence|i\s+give)\b|最终|综合|但", re.I
)
_TOLD = re.compile(rf"\b{_SAYING}\b", re.I)
# These change a verdict when another number stands in the same line.
_REVISION = re.compile(
    r"\b(?:wait|actually|correct(?:ed|ion)|revis\w*|on\s+(?:second\s+thought|reflection)|should\s+be"
    r"|lower\w*|rais(?:e|ing)|chang\w+|adjust\w*|instead|downgrad\w*|upgrad\w*|mistaken\w*|mistake"
    r"|giv\w+|gave|award\w*|assign\w*|deserv\w*|merit\w*|warrant\w*|rat(?:e|ed|ing)|scor\w+|grad\w+"
    r"|settle|closer|fair\w*|make\s+(?:it|that)|call\s+it|worth|go(?:ing)?\s+with|(?:down|up)\s+to"
    r"|more\s+like|rather|better|hmm+|sorry|let\s+me|meant|mean|typo|hence|thus|therefore|so|overall"
    r"|total|final\w*|net|minus|plus|deduct\w*|subtract\w*|penal\w*|less|points?|otherwise|unless|if"
    r"|no|not|ok|okay|oh|well|maybe|perhaps|or|become\w*|yield\w*|result\w*|cap\w*|drop\w*|reduc\w*"
    r"|times|divid\w*|multipl\w*|half|double|knock\w*|dock\w*|take|off|then|but|however|yet|now)\b"
    r"|更正|改为|修正|重新|不对|扣|应该|应为|其实|最终|总分|分",
    re.I,
)
_FOREIGN_TAG = re.compile(r"<(?:response|submission|student|quote|user|candidate)\b", re.I)
_SURE = re.compile(r"(?:confidence|certainty|置信度)\b", re.I)
_TOTAL = (
    r"(?:final|overall|total|net|adjusted|actual|real|revised|corrected|updated|new|最终|综合|总)"
)
_TOTAL_LABEL = re.compile(
    rf"^\W*(?:the\s+|my\s+)?{_TOTAL}(?:\s*\w+){{0,2}}\s*(?:[:=|]|\bis\b|为|是)\W*?(-?[0-9.]+)"
    r"(?:\s*(?:/|out\s+of)\s*[0-9]+)?\s*(?:points?|分)?\s*(?:[.!(。]|$)",
    re.I,
)
_ANY_NUMBER = re.compile(r"(?<![A-Za-z0-9_.])[-+]?[0-9]+(?:\.[0-9]+)?(?![0-9]|\.[0-9])")
_WORD = r"(?:two|three|four|five|six|seven|eight|nine|ten|zero(?=\W*$)|one(?=\W*$))"
_WRITTEN = re.compile(rf"\b{_WORD}\b|[零一二三四五六七八九十](?=分|\W*$)", re.I)
_TAG = re.compile(r"<(score|rating|final_score)>\s*([^<>]{1,40}?)\s*</\1>", re.I)
_FRAMES = frozenset(["xml", "root", "output", "grading", "p", "div", "body", "html"])
_INLINE_TAGS = re.compile(r"</?(?:b|strong|em|i|u|span|code)>", re.I)
_BLOCK_TAGS = re.compile(r"</?(?:p|div|li|ul|h[1-6])>|<br\s*/?>", re.I)


@dataclass(frozen=True)
class Line:
    """One labelled verdict: which line of the reply, its value, and how sure its label is."""

    place: int
    value: float
    final: bool


def quotes_something(before: str) -> bool:
    """Say whether the words that lead to a verdict announce somebody else's words."""
    parts = before.rstrip().rsplit("\n", 1)
    lead = parts[-1].strip()
    blank = before.rstrip(" \t").endswith("\n\n")
    on_line = not before.rstrip(" \t").endswith("\n")
    lead = re.split(r"[.!?。！？]\s+|[。！？]", lead)[-1] if on_line else lead
    if not on_line and not lead.endswith((":", "：", "`", '"')):
        if blank or re.search(r"[.!?。！？)}\]]$", lead) or lead[:1] in "-*•|#>":
            return False
        lead = " ".join(lead.split()[-3:])
    return bool(lead) and bool(_QUOTING.search(lead) or _NAMES_DATA.fullmatch(lead))


def takes_back(after: str, value: float, scale: Scale) -> bool:
    """Say whether the lines after a verdict seem to change it, or to say that it was quoted."""
    if _DISOWNED.search(after):
        return True
    expected = 1
    for line in (_bare(raw).strip() for raw in after.split("\n")):
        mark = re.match(r"([0-9]{1,2})[.)]\s+(?=[^\W\d])", line)
        if mark and int(mark[1]) == expected:
            expected, line = expected + 1, line[mark.end() :]
        if _gives_another(_in_digits(line), value, scale):
            return True
    return False


def _in_digits(line: str) -> str:
    return _WRITTEN.sub(lambda word: f" {number_of(word[0])} ", line)


def _gives_another(line: str, value: float, scale: Scale) -> bool:
    """Say whether a line after the verdict may be another one."""
    high = rf"(?:/|\bout\s+of\b|满分)\s*{scale.high}(?![0-9.])"
    if _SURE.match(line) or re.fullmatch(
        rf"\W*(?:(?:score\s+)?(?:scale|range)\W*{scale.low}\s*(?:-|–|to)\s*{scale.high}"
        rf"|max\w*\s*(?:score)?\W*{scale.high})\W*",
        line,
        re.I,
    ):
        return False
    plain = re.sub(high, " ", line)
    numbers = [n for n in _ANY_NUMBER.finditer(plain) if float(n[0]) != value or n[0][0] in "+-"]
    if not numbers:
        return False
    ends = not re.search(r"\w", plain[numbers[-1].end() :].replace("points", ""))
    starts = not re.search(r"\w", plain[: numbers[0].start()])
    label = re.search(r"(?:[:：=|>→;；,，–—]|-\s|\bis\b)\W{0,20}$", plain[: numbers[-1].start()])
    alone = starts and re.match(r"\s*[.,;:!?)]", plain[numbers[0].end() :])
    terse = alone or ((starts or ends) and len(plain.split()) <= 4)
    return bool(terse or (ends and label) or plain != line or _REVISION.search(plain))


def named_otherwise(before: str, value: float, scale: Scale) -> bool:
    """Say whether a line before a verdict calls another number on the scale the final one."""
    found = (_TOTAL_LABEL.match(_bare(line).strip()) for line in before.split("\n"))
    numbers = [read_number(label[1]) for label in found if label]
    return any(n is not None and n != value and scale.low <= n <= scale.high for n in numbers)


def labelled_values(text: str, scale: Scale) -> list[Line]:
    """Return every line that is a labelled verdict and stands outside quotations."""
    return list(_labelled(_lines(text), scale))


def read_text(text: str, scale: Scale) -> tuple[float, str]:
    """Read the score and the rest of a plain reply; Unreadable when there is no clear one."""
    lines = _lines(text)
    if len(lines) == 1 and (value := _lone(lines[0], scale)) is not None:
        return value, ""
    found = list(_labelled(lines, scale))
    if not found:
        chinese = lines[-1:] and _with_named_scale(lines[-1], scale)
        if not chinese:
            raise Unreadable("unparsed", "no labelled score")
        found = [Line(len(lines) - 1, chinese, False)]
    last = found[-1]
    before, after = lines[: last.place], lines[last.place + 1 :]
    _check_agreement(last, found, "\n".join(after) if last.final else _bare(text))
    if len(after) > 2 and len(before) > 1:
        raise Unreadable("unparsed", "the score is neither at the start nor at the end")
    stray = any(_FOREIGN_TAG.search(line) or _lone_other(line, last.value) for line in before)
    named = not last.final and named_otherwise("\n".join(before), last.value, scale)
    if stray or named or takes_back("\n".join(after), last.value, scale):
        raise Unreadable("ambiguous", "what follows the score seems to change it")
    reason = "\n".join(line for line in before + after if not line.startswith("```"))
    return last.value, re.sub(r"^(?:reason|explanation|理由)\s*[:：]\s*", "", reason, flags=re.I)


def _lone_other(line: str, value: float) -> bool:
    number = re.fullmatch(r"\W*?(-?[0-9.]+)\W*", line)
    return number is not None and read_number(number[1]) not in (None, value)


def stated_values(text: str) -> set[float]:
    """Return the values that a text names as its own score, wherever on a line that is."""
    found = set()
    for label in _LOOSE.finditer(text):
        lead = re.split(r"[.!?。！？\n]", text[: label.start()])[-1].strip()
        named = re.search(r"[^\W\d_]", _OWN_WORDS.sub("", lead))
        if not named and lead[:1] != ">" and lead[-1:] not in ('"', "'", "“", "‘", "«", "`"):
            found.add(float(label[1]))
    return found


def _check_agreement(last: Line, found: list[Line], text: str) -> None:
    finals = {line.value for line in found if line.final}
    others = {float(value) for value in _LOOSE.findall(text)}
    others |= set() if last.final else {line.value for line in found}
    if len(finals) > 1 or others - {last.value}:
        raise Unreadable("ambiguous", "the reply names several different scores")


def _labelled(lines: list[str], scale: Scale) -> list[Line]:
    found, fenced = [], False
    for place, line in enumerate(lines):
        if line.startswith("```"):
            fenced = not fenced
            continue
        line = re.sub(r"^(?:- |#+\s*)", "", line)
        label = _LABEL.match(line)
        if fenced or not label or line.startswith(">"):
            continue
        earlier = lines[place - 1] if place else ""
        if quotes_something(f"{earlier}\n") or _heads_a_part(earlier):
            raise Unreadable("unparsed", "the score seems to be quoted from the response")
        found.append(_read_line(line, label, place, scale))
    return found


def _read_line(line: str, label: re.Match[str], place: int, scale: Scale) -> Line:
    value_text = re.sub(
        r"^(?:\[\[|\\boxed\{|\$)+\s*|\s*(?:\]\]|\}|\$)+(?=\.?$)", "", line[label.end() :]
    )
    value, rest, named = read_written_value(value_text, scale)
    stated = label["scale"]
    if stated is not None:
        numbers = re.findall(r"[0-9]+", stated)
        if not numbers or numbers[-1] != str(scale.high):
            raise Unreadable("unparsed", f"the label names another scale than {scale}")
    if numbers_differ(stated, scale):
        raise Unreadable("unparsed", f"the label names another scale than {scale}")
    if label["vague"] and not named:
        raise Unreadable("unparsed", f"{line[:40]!r} may be a sum or a note, not the score")
    if not _tail_is_harmless(rest):
        raise Unreadable("unparsed", f"{line[:60]!r} says more than a score")
    return Line(place, value, bool(label["final"]))


def numbers_differ(stated: str | None, scale: Scale) -> bool:
    """Say whether a scale written as LOW-HIGH is not the judge's own."""
    both = re.fullmatch(r"\s*(-?[0-9]+)\s*(?:-|–|to|至|到)\s*([0-9]+)\s*", stated or "")
    return both is not None and (int(both[1]), int(both[2])) != (scale.low, scale.high)


def _tail_is_harmless(rest: str) -> bool:
    rest = rest.strip()
    if not rest or re.fullmatch(r"[.!,;。！，；✅⭐★\ufe0f\s]+", rest):
        return True
    opens = re.match(r"[.,;(。，；（–—]|-\s|because\b|since\b|as\b", rest)
    harmless = not (
        re.search(r"[0-9?%]", rest)
        or _HEDGES.search(rest)
        or _DISOWNED.search(rest)
        or _TOLD.search(rest)
        or _WRITTEN.search(rest)
    )
    return bool(opens) and harmless and len(rest) <= 300


def _heads_a_part(line: str) -> bool:
    # "Accuracy:" and then "Score: 3" is a score of one criterion.
    return bool(re.fullmatch(r"[\w ]{1,40}[:：]", line)) and not _ABOUT_ITSELF.search(line)


def _lone(line: str, scale: Scale) -> float | None:
    """Read a reply that is a number and nothing else; None when it is something else."""
    text = re.sub(r"^\[\[\s*(.*?)\s*\]\]$", r"\1", line)
    text = re.sub(r"^\$?\\boxed\{([^{}]*)\}\$?$", r"\1", text)
    if is_range(text) and re.fullmatch(r"[0-9.\s/–—~～-]+|[0-9.\s]+(?:to|or)[0-9.\s]+", text):
        raise Unreadable("ambiguous", f"{text[:40]!r} is a range, not a score")
    if not re.match(r"-?[0-9]", text):
        return None
    value, rest, _ = read_written_value(text, scale)
    if rest.strip() not in ("", ".", "。"):
        raise Unreadable("unparsed", "no labelled score")
    return value


def _with_named_scale(line: str, scale: Scale) -> float | None:
    """Read "8分(满分10分)" on a line of its own."""
    found = re.fullmatch(
        rf"({NUMBER})\s*分\s*\(\s*(?:满分|滿分|总分)\s*({NUMBER})\s*分?\s*\)[.。]?", line
    )
    if not found:
        return None
    return read_written_value(f"{found[1]}/{found[2]}", scale)[0]


def _lines(text: str) -> list[str]:
    """Split into bare, non-empty lines; tables, score tags and a closing sentence get their own."""
    if (whole := re.fullmatch(r"\s*```\w*\n(.*?)\n?```\s*", text, re.S)) and "```" not in whole[1]:
        text = whole[1]
    text = _TAG.sub(lambda tag: _tag_as_line(text, tag), text)
    text = _BLOCK_TAGS.sub("\n", _INLINE_TAGS.sub("", text))
    lines = [line for raw in text.split("\n") if (line := _bare(raw).strip())]
    if len(lines) > 1 and _LABEL.fullmatch(lines[-2]):
        lines[-2:] = [f"{lines[-2]} {lines[-1]}"]
    return lines[:-1] + _last_sentence(lines[-1]) if lines else []


def _tag_as_line(text: str, tag: re.Match[str]) -> str:
    """Turn a score tag into a labelled line if it stands alone and under no tag of a criterion."""
    before, after = text[: tag.start()].rstrip(" \t"), text[tag.end() :].lstrip(" \t")
    open_tags: list[str] = []
    for close, name in re.findall(r"<(/?)([a-z_]{1,30})>", _INLINE_TAGS.sub("", before), re.I):
        if not close:
            open_tags.append(name)
        elif name in open_tags:
            del open_tags[open_tags.index(name) :]
    alone = before[-1:] in ("", "\n", ">") and after[:1] in ("", "\n", "<")
    if alone and all(_ABOUT_ITSELF.search(name) or name in _FRAMES for name in open_tags):
        return f"\nScore: {tag[2]}\n"
    return tag[0]


def _bare(raw: str) -> str:
    """Take the markdown off a line; a blockquote keeps its mark."""
    if "```" in raw:
        return raw.strip()
    cells = [cell.strip() for cell in raw.strip().strip("|").split("|")]
    if raw.strip().startswith("|") and len(cells) == 2:
        raw = f"{cells[0]}: {cells[1]}"
    return re.sub(r"\*\*|__|\*|`", "", re.sub(r"^\s*(?:[-*•+]\s+)", "- ", raw))


def _last_sentence(line: str) -> list[str]:
    if re.search(r"[\"'“”‘’«»`>]", line) or _QUOTING.search(line):
        return [line]
    before, mark, last = re.match(r"(?s)(?:(.*[.!。！;])(\s+|(?<=[。！])))?(.*)", line).groups()  # type: ignore[union-attr]
    return [before, last] if mark is not None and last and _LABEL.match(last) else [line]
