r"""Extracts the answer of a response, in the same way for all rules.

The answer is the complete content of the last `<answer>…</answer>`, or else of the last other
mark: `\boxed{…}`, `####`, or an announcement such as "the answer is" in a dozen languages. A
response without a mark has an answer only if its last sentence ends in a complete expression.
Nothing is taken out of the middle of a text. Patterns that run over the whole response have bounded
repeats, so that long hostile text is read in linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ppo_cli.rewards.values import NOT_A_UNIT, clean, read_quantity, unwrap_text
from ppo_cli.thoughts import strip_reasoning

LAST_CHARS = 1000  # how much of a long text patterns without bounded repeats read
MAX_MARKS = 20  # marks that are tried, from the last one backwards
NO_ANSWER = (
    "no answer: no <answer>, \\boxed{}, #### or 'the answer is', and the closing sentence does not "
    "end in a whole expression"
)
UNCLOSED = "no answer: <answer> is not closed"


class Extraction(NamedTuple):
    """The answer of a response, or None with the reason."""

    text: str | None
    reason: str = ""


# Announcements of an answer by language, up to the colon, the equals sign or the verb.
_ANNOUNCEMENTS = {
    "en": r"(?<![\w-])(?:final\s)?(?:answer|ans)(?![\w-])\.?"
    r"(?:\s(?:to|for|of|in|here|choice|option|letter|number)\b[^.\n:=?]{0,60}?)?"
    r"[\s*_]{0,9}(?:[:=]|\b(?:is|are|was|equals|(?:would|should|must|will|has\sto)\sbe)(?!\w|n't))",
    "zh": r"(?:答案|答)(?:就|便)?(?:应该|應該|应|應)?(?:是|为|為|[:=】])",
    "ja": r"(?:答え|解答|正解|回答)(?:は|[:=】])",
    "ko": r"(?:정답|답변|해답|답)(?:은|는|[:=])",
    "de": r"(?:antwort|lösung)[\s*_]{0,9}(?:ist|lautet|[:=])",
    "fr": r"r[ée]ponse(?:\s(?:finale|correcte|exacte))?[\s*_]{0,9}(?:est|[:=])",
    "es": r"respuesta(?:\s(?:final|correcta))?[\s*_]{0,9}(?:es(?:\s(?:la|el))?(?!\w)|[:=])",
    "pt": r"resposta(?:\s(?:final|correta))?[\s*_]{0,9}(?:é|[:=])",
    "it": r"risposta(?:\s(?:finale|corretta))?[\s*_]{0,9}(?:è|[:=])",
    "ru": r"ответ[\s*_]{0,9}(?:равен|[-—:=])",
    "sw": r"jibu\s(?:ni|[:=])",
    "th": r"คำตอบ(?:คือ|[:=])",
}
# A heading on a separate line, in Markdown or bold: `### Final Answer`.
_HEADING = r"^[ \t]{0,9}(?:#{1,6}|\*\*)[ \t*]{0,9}(?:final\s)?(?:answer|答案|答え)[ \t*:]{0,9}$"
_ANNOUNCED = re.compile(
    rf"(?:{'|'.join(_ANNOUNCEMENTS.values())}|{_HEADING})", re.IGNORECASE | re.MULTILINE
)
# `some people say the answer is`
_HEARSAY = (
    r"\b(?:some|many|most|others|people|students|you|they)\b[^.\n]{0,20}"
    r"\b(?:say|think|believe|claim|argue|guess)\b"
)
# Before an announcement: `the wrong answer is`, `if the answer is`, `Tom's answer is`.
_NOT_ANNOUNCED = re.compile(
    r"(?:\b(?:wrong|incorrect|false|if|whether|what|suppose|assume|unless|not|previous|earlier|his|her"
    r"|their|most|some|many|others|people|students)|(?:(?-i:\b(?!Let|That|It|Here|There|What)[A-Z][a-z]+)"
    rf"|student|teacher|friend)'s|错误|如果|[不别勿]|{_HEARSAY}(?:\sthat)?)"
    r"\s?(?:the\s|an?\s|your\s|that\s|my\s){0,2}(?:correct\s|right\s|final\s)?$",
    re.IGNORECASE,
)
# After an announcement: `the answer is not 5`.
_NOT_CONTENT = re.compile(r"\s?(?:not\b|n't|never\b|neither\b|不是|没有)", re.IGNORECASE)
# `\boxed{5} is wrong`
_REFUTED = re.compile(
    r".{0,20}?\}[}$\s)\\\]]{0,9}(?:is|was)\s(?:wrong|incorrect|false|not)\b", re.IGNORECASE
)
# `5 is the answer`
_AFTERWARDS = re.compile(
    r"\bis\s(?:therefore\s|thus\s|indeed\s|clearly\s)?(?:the|our|my)\s(?:(?:final|correct|right|best|only"
    r"|required|desired)\s){0,2}(?:answer|option|choice|solution)\b(?!\s(?:to\sa|of\san?)\b)",
    re.IGNORECASE,
)
# `the correct option is B`, `I would choose B`; for choices only.
_CHOSEN = re.compile(
    r"(?<![\w-])(?:(?:correct|right|best|appropriate)\s(?:option|choice|statement|one)\s{0,3}(?:is\b|:)"
    r"|(?:i|we|i'd|i'll|would|to|must|should)\s(?:choose|select|pick|go\swith|opt\sfor)\b)"
    r"|正[确確]的?[选選][项項](?:是|为|為|:)|(?:故|应|應|因此|所以|我|本题|本題|正确|正確)?(?:选|選)(?:择|擇)?(?:是|为|為|:)?(?=\s?[(*]{0,3}[A-J])",
    re.IGNORECASE,
)
# `option B is correct`, `(B) is right`; for choices only.
_IS_RIGHT = re.compile(
    r"(?<![Ii]f )(?<![Ww]hether )(?<![Ee]ither )(?<!nor )"
    r"(?:(?i:option|choice|statement|answer|选项|選項|選択肢)\s{0,3}[(*]{0,3}([A-J])[)*]{0,3}|[(]([A-J])[)])\s{0,3}"
    r"(?:is\s(?:the\s)?(?:right|correct|best|true)\b|(?:是|が|は)?(?:正确|正確|对|正しい|正解))"
    r"|(?:\A|[.,;\n]\s?)([A-J])\sis\s(?:right|correct)\b"
)  # fmt: skip

# Tags may have attributes: `<answer type="final">`.
TAG = re.compile(r"<(/?)answer(?:\s[^<>]{0,200})?>", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# An escaped brace is a sign, not a bracket.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# `]0,1[`, or several with a sign between them.
_INTERVALS = re.compile(r"(?:(?:\\cup|∪|\s)*[\[\]][^\[\]]{1,60}[,;][^\[\]]{1,60}[\[\]])+")
# `\boxed 5`, without braces.
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$\\.,;]+)")
# Text between two boxes of one answer: `\boxed{1}$ and $y = \boxed{2}`.
_JOINT = re.compile(
    r"(?:\s|\$|\\[()\[\]]|\\quad|\\text|[{}])*(?:[,;、]|[^.\n\d\\]{0,30}\b(?:and|or)\b|[和或])"
    r"(?:\s|\$|\\[()\[\],; ]|\\q?quad|[{}]|and\b|[A-Za-z]\w?(?:_\{?\w{1,3}\}?)?\s*=)*|\s*"
)
# `#### 5`, but not a heading with more or fewer of them.
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*\n?([^\n]*)")

# Maths between $…$, $$…$$, \(…\) or \[…\]; `$5 and $6` are prices.
_DELIMITED = (
    r"\$\$[^$]+\$\$|\$(?=[^$\n]*\$(?!\d))[^$]+\$(?!\d)"
    r"|\\\((?:[^\\]|\\(?![()]))*\\\)|\\\[(?:[^\\]|\\(?![\[\]]))*\\\]"
)
# Ends of sentences; group 1 is maths, with full stops inside. Then maths at the end of a text.
_SENTENCE_END = re.compile(rf"({_DELIMITED})|\n|。|[.!?](?=\s|$)(?<!\bapprox\.)")
_DISPLAY = re.compile(r"(?:\$\$([^$]+)\$\$|\\\[((?:[^\\]|\\(?![\[\]]))*)\\\])[\s.*]*$")
# The tokens of a sentence; \u3040 to \u9fff are Japanese and Chinese characters.
_TOKEN = re.compile(
    rf"(?P<delimited>{_DELIMITED})"
    r"|(?P<text>\\(?:text\w*|mbox|math\w+|operatorname)\s*\{[^{}]*\})"
    r"|(?P<command>\\(?:[A-Za-z]+|.))"
    r"|(?P<number>\d+(?:[.,]\d+)*|\.\d+)"
    r"|(?P<word>[^\W\d_\u3040-\u9fff]+(?:['-][^\W\d_]{2,})*|[\u3040-\u9fff]+)"
    r"|(?P<sign>[-+*/^=<>≤≥≠≈()\[\]{}|!,;:'_&%°√∞×÷·±∪∩∈∅$€£¥₹~…])"
    r"|(?P<space>\s+)|(?P<other>.)",
    re.DOTALL,
)
# Words that may be part of an expression, and words that join two expressions.
_FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "lg", "exp", "sqrt", "pi", "theta",
    "alpha", "beta", "gamma", "lambda", "mod", "min", "max", "gcd", "lcm", "arcsin", "arccos",
    "arctan", "infinity", "inf",
}  # fmt: skip
_JOINERS = {"and", "or", "und", "oder", "et", "ou", "y", "o", "и", "или", "或", "和", "または"}
# Words before an answer that do not belong to it: `about 5`.
_HEDGES = re.compile(
    r"\A(?:[\s*_`\"':]|\\quad|(?:about|approximately|roughly|exactly|simply|just|only|therefore|thus"
    r"|indeed|clearly|probably|likely|equal to|given by|as follows|option|choice|letter|number"
    r"|选项|選項|大约|约|約)(?![\w-]))+",
    re.IGNORECASE,
)  # fmt: skip
# An explanation after a complete answer: `42, because …`. A condition would belong to the answer.
_EXPLANATION = re.compile(
    r"\s{0,9}(?:[,;(—。]|\s-+\s|(?:because|since|so|which|rather|instead|by|after|given|due|hence|but)\b"
    r"|因为|因為)",
    re.IGNORECASE,
)
# `18 clips in April`
_CIRCUMSTANCE = re.compile(r"\b(?:in|for|at|as|with|when|where|from|on)\b", re.IGNORECASE)
# Verbs at the end of a sentence in Japanese, Korean and Thai.
_ENDINGS = re.compile(
    r"(?:です|でした|だ|である|となります|になります|입니다|이다|이에요|예요|ครับ|ค่ะ)[\s。.]*$"
)
# Such as `</response>`, which some models write around their answer.
_CLOSING_TAGS = re.compile(r"</[A-Za-z_]{1,20}>")
# A list that was cut off after an item's number, which is not an answer.
_OPEN_ITEM = re.compile(r"^\s*\d{1,2}\.\s[^\n]*\n\s*\d{1,2}\.\Z", re.MULTILINE)
# What may come before the expression at the end of a text: `=`, `so`, `she has`, `是`.
_LEADS_IN = re.compile(
    r"(?:^|[=:→⇒≈]|\banswer|\bthat|\bit's|\\(?:approx|implies|Rightarrow|to|therefore)|(?:^|[,;}]\s?)(?:so|hence|thus|therefore|then|finally),?"
    r"|\b(?:is|are|was|were|be|equals?|gets?|got|gives?|giving|ha[sd]|have|obtain(?:s|ed)?|find|found|concludes?|yields?"
    r"|becomes?|makes?|takes?(?:\s(?:him|her|it|them))?|receives?|costs?|earns?|pays?|needs?|totals?|leaves?|remains?|sold|sells?"
    r"|(?:equal|simplif\w+|reduc\w+|evaluat\w+|amounts?|comes?|adds? up|sums?|round\w*) to"
    r"|(?:in|de)creases by"
    r"|ist|sind|beträgt|ergibt|hat|est|sont|vaut|égale? à|es|son|tiene|é|è|равно|составляет)"
    r"|是|为|為|等于|等於|得|有|共|は|は、|은|는|이|คือ)"
    r"[\s*_\"]*(?:(?:now|then|exactly|about|approximately|simply|just|only|also|therefore|thus"
    r"|a total of|indeed|equal to|given by)\s)?[\s*_\"]*$",
    re.IGNORECASE,
)  # fmt: skip
# `is not 5`, `if x is 5`
_NEGATED = re.compile(
    r"(?:\bnot|n't|\bnever|\bcannot)\s(?:(?!which|but|it)\S+\s){0,2}\S*\s*$|(?:不|不是|并非)$"
    rf"|\b(?:if|let|suppose|assume|whether|wrong|incorrect|false)\b|{_HEARSAY}",
    re.IGNORECASE,
)
# `a is 3 and b is 5`: the last one is not the whole answer.
_TWO_CLAUSES = re.compile(
    r"\b(?:is|are|has|have|gets?)\b.*\band\b.*\b(?:is|are|has|have|gets?)\s*$"
    r"|=[^,;=]*\band\b[^,;=]*=\s*$",
    re.IGNORECASE,
)

# Choices A to J. `I` before a small letter is the pronoun.
_LONE_CHOICE = re.compile(r"[(\[]{0,2}([A-Ja-j])[)\]]{0,2}[.:]?")
_LETTER = r"(?:[A-HJ]|I(?!\s+[a-z]))"
_LEADING_CHOICE = re.compile(
    rf"\s*(?:[(\[]{{1,2}}\s?([A-Ja-j])\s?[)\]]{{1,2}}|({_LETTER}))(?![A-Za-z0-9_]|'[a-z])(.*)",
    re.DOTALL,
)
# `A or B`, `A/B`, `A (B)`: no single choice; nor is `A ではない` (not A).
_SECOND_CHOICE = re.compile(
    rf"\s*(?:[,(]?\s*\b(?:and|or|as well as|plus|und|oder|et|ou|или)\b(?:\s(?:maybe|possibly))?"
    rf"|[/&+×→∪∩;或和、]|または|또는)\s*(?:option\s|choice\s)?[(\[]?{_LETTER}(?![A-Za-z'])"
    rf"|\s*[-,]\s*[(\[]?{_LETTER}[)\]]?\s*(?:$|[.,;/&。\n]|(?:and|or)\b)"
    rf"|\s*\({_LETTER}\)|\s*か\s?{_LETTER}|\s*(?:では(?:ない|なく|ありま)|じゃ|[이가]\s?아[니닙]|不(?:对|對|正|是)|错|錯)"
)  # fmt: skip
# What may follow a bare letter that is a choice; another word (`A cat`) makes it an article.
_AFTER_CHOICE = re.compile(
    r"\s*(?:$|\n|[.,;:!)\]}\"'。;:、(—]|\s-+\s|[^\x00-\x7f]"
    r"|(?:because|since|as|for|due|rather|not|instead|which|where|that|with|in|of|among|from|by|on|at"
    r"|while|when|but|is|though|although|even|given|according|based|only|here|so|and|option|choice|\\)(?![\w-]))"
)
# `B. 12` or `(B) 12` at the start of a line; then words before a closing letter that name a choice.
_OPTION_LINE = re.compile(r"^\s*[(\[]?[A-J](?:[)\].:]|\s-)\s*\S", re.MULTILINE)
_NAMES_CHOICE = re.compile(
    r"(?:(?:^|[,;:}]\s?)(?:so|hence|thus|therefore|then|finally),?|:|(?:^|[,;]|\b(?:so|that|think))\s?"
    r"(?:it|this|that|which)(?:'s|\s(?:is|must be|should be|has to be))"
    r"|→|\b(?:choice|answer|option)\sis|[是选選は为為])\s*$",
    re.IGNORECASE,
)
_MARKUP = re.compile(r"[*$`\"]|\\[()\[\]]")


def extract_answer(reply: str, *, choice: bool = False) -> Extraction:
    """Return the answer of a response without its thoughts; with `choice` a letter from A to J.

    A closed `<answer>` wins over all other marks, also later ones. If the last one is not closed,
    only the other marks are read.
    """
    text = clean(strip_reasoning(reply)).replace('\\"', '"')
    tagged, unclosed = find_tagged(text)
    if unclosed:
        # The response was cut off, so the content of the open tag may be incomplete.
        content = find_marked_answer(text, choice=choice)
        return Extraction(content, "" if content else UNCLOSED)
    if tagged is not None:
        content = _read_tagged(tagged, choice)
        return Extraction(content, "" if content else NO_ANSWER)
    content = find_marked_answer(text, choice=choice)
    if content is None:
        content = _find_closing_choice(text) if choice else find_closing_expression(text)
    return Extraction(content, "" if content else NO_ANSWER)


def find_tagged(text: str) -> tuple[str | None, bool]:
    """Return the content of the last `<answer>…</answer>`, and whether a later tag is unclosed."""
    content, start = None, -1
    for tag in TAG.finditer(text):
        if not tag[1]:
            start = tag.end()
        elif start >= 0:
            content, start = text[start : tag.start()].strip(), -1
    return content, start >= 0


def _read_tagged(content: str, choice: bool) -> str | None:
    """Return the answer in the content of `<answer>`, which may be a sentence or another mark."""
    if choice:
        return (
            read_choice(content)
            or find_marked_answer(content, choice=True)
            or read_leading_choice(content)
            or _find_closing_choice(content)
        )
    bare = strip_delimiters(content)
    if _is_expression(content) and "\\boxed" not in content:
        return bare
    return find_marked_answer(content) or find_closing_expression(content) or bare or None


def list_boxes(text: str) -> list[tuple[int, str]]:
    r"""Return start and content of every \boxed{…} whose braces balance.

    Boxes with only a comma or an "and" between them are joined: they are one answer. Empty boxes
    do not count if another one has content.
    """
    # Match braces with a stack; only those after \boxed are kept.
    starts = {match.end(): match.start() for match in _BOX.finditer(text)}
    opened: list[int] = []
    spans: list[tuple[int, int, str]] = []
    for match in _BRACE.finditer(text) if starts else ():
        if match.group() == "{":
            opened.append(match.end())
        elif match.group() == "}" and opened:
            start = opened.pop()
            if start in starts:
                spans.append((starts[start], match.start(), text[start : match.start()].strip()))
    # Outer boxes first; a box inside another one is not joined to it.
    boxes: list[tuple[int, str]] = []
    end = -1
    filled = [span for span in spans if strip_delimiters(span[2])]
    for start, stop, content in sorted(filled or spans):
        gap = text[end + 1 : start] if end >= 0 else None
        if gap is not None and start > end and len(gap) <= 60 and _JOINT.fullmatch(gap):
            parts = boxes[-1][1].split(", ")
            joined = boxes[-1][1] if content in parts else f"{boxes[-1][1]}, {content}"
            boxes[-1] = (start, joined)
        else:
            boxes.append((start, content))
        end = stop
    boxes += [(match.start(), match[1]) for match in _BARE_BOX.finditer(text)]
    return sorted(boxes)


def find_after_hashes(text: str) -> str | None:
    """Return the answer at the start of the line of the last `####`, or None."""
    lines = _HASHES.findall(text)
    return _read_sentence_start(lines[-1])[0] if lines else None


def find_marked_answer(text: str, *, choice: bool = False) -> str | None:
    """Return the content of the last mark; `<answer>` tags are read elsewhere.

    An announcement or `####` with words in it, such as the heading `#### Step 2`, counts only if no
    other mark does. A box always counts, unless it is empty and another one is not.
    """
    wordy_answer: str | None = None
    for kind, content in _list_marks(text, choice):
        if choice:
            letter = read_leading_choice(content) if kind != "box" else _read_boxed_choice(content)
            if letter:
                return letter
        elif kind == "box":
            return strip_delimiters(content) or None
        else:
            answer, is_expression = _read_sentence_start(content)
            if is_expression:
                return answer
            closing = _find_closing_run(content, leads_in=True)
            if closing:
                return closing
            wordy_answer = wordy_answer or answer
    return wordy_answer


def _list_marks(text: str, choice: bool) -> Iterator[tuple[str, str]]:
    """Yield kind and content of the marks of an answer in a text, the last one first.

    Marks are boxes, `####` and announcements, with `choice` also announced letters. Those that the
    text refutes are left out, and so are `<answer>` tags, which `find_tagged` reads.
    """
    # All marks with their position; of an announcement only its end, as text, until it is read.
    marks = [(start, "box", content) for start, content in list_boxes(text)]
    marks += [(match.start(), "hashes", match[1]) for match in _HASHES.finditer(text)]
    patterns = {"announced": _ANNOUNCED, "afterwards": _AFTERWARDS}
    for kind, pattern in (patterns | ({"chosen": _CHOSEN} if choice else {})).items():
        for match in pattern.finditer(text):
            place = match.start() if kind == "afterwards" else match.end()
            marks.append((match.start(), kind, str(place)))
    if choice:
        marks += [(m.start(), "right", m[1] or m[2] or m[3]) for m in _IS_RIGHT.finditer(text)]
    # Drop marks that are refuted or hypothetical, and read what announcements announce.
    for start, kind, content in sorted(marks, reverse=True)[:MAX_MARKS]:
        if kind == "box" and _REFUTED.match(text, start + len(content)):
            continue
        if kind in ("box", "hashes", "right"):
            yield kind, content
        elif kind == "afterwards":
            run = _find_closing_run(
                _last_sentence(text[max(0, start - 300) : start]), leads_in=False
            )
            if run and "\\boxed" not in run:
                yield kind, run
        elif not _NOT_ANNOUNCED.search(text[max(0, start - 40) : start]):
            after = text[int(content) : int(content) + LAST_CHARS]
            if not _NOT_CONTENT.match(after):
                yield kind, _first_sentence(after) if kind == "announced" else after[:200]


def _first_sentence(text: str) -> str:
    """Return the sentence after an announcement, which may start on the next line."""
    text = re.sub(r"^(?:[\s*_:`]|<br>)+", "", text)
    for end in _SENTENCE_END.finditer(text[:LAST_CHARS]):
        if end[1] is None:
            return text[: end.start()] + ("?" if end.group() == "?" else "")
    return text[:LAST_CHARS]


def _last_sentence(text: str) -> str:
    text = text[-LAST_CHARS:].strip()
    start = 0
    for end in _SENTENCE_END.finditer(text):
        if end[1] is None and text[end.end() :].strip(" \n\t*_`)\"'"):
            start = end.end()
    return text[start:].strip()


def _read_sentence_start(sentence: str) -> tuple[str | None, bool]:
    """Return the answer at the start of a sentence, and whether it is a complete expression.

    `42, because …` and `42 apples` are; `3 more than x` and `the red house` are words.
    """
    sentence = _ENDINGS.sub("", _HEDGES.sub("", _CLOSING_TAGS.sub(" ", sentence)))
    sentence = sentence.strip().strip('*_`"').strip()
    letter = read_leading_choice(sentence)
    if letter and not _is_expression(sentence):
        return letter, True
    # The longest run of maths tokens at the start.
    tokens = _tokenise(sentence)
    size = next((place for place, token in enumerate(tokens) if not token.maths), len(tokens))
    end = tokens[size - 1].end if size else 0
    run = _trim_punctuation(sentence[:end])
    if not run or (
        size < len(tokens)
        and tokens[size].start == end
        and sentence[end].isascii()
        and sentence[end - 1].isalnum()
    ):
        return strip_delimiters(sentence) or None, False
    # What follows: nothing, an explanation, or a unit with a circumstance.
    rest = sentence[sentence.find(run) + len(run) :]
    if not rest.strip(" .,;:!*_") or _EXPLANATION.match(rest):
        return strip_delimiters(run), True
    unit = _EXPLANATION.split(_CIRCUMSTANCE.split(rest, maxsplit=1)[0], maxsplit=1)[0].strip(" .*_")
    circumstance = rest[rest.find(unit) + len(unit) :]
    if re.search(r"[\d<>=?\\^]", circumstance if not _EXPLANATION.match(circumstance) else "") or (
        unit and not _is_unit(unit)
    ):
        return strip_delimiters(sentence), False
    quantity = f"{strip_delimiters(run)} {unit}".strip()
    return quantity if read_quantity(quantity) else strip_delimiters(run), True


def _is_unit(phrase: str) -> bool:
    """Whether a few words can be the unit of a number, such as `apples` or `km per hour`."""
    return (
        not re.search(r"[\d=<>+*/?]", phrase.replace("/", "", 1))
        and len(phrase.split()) <= 5
        and not NOT_A_UNIT.search(phrase)
    )


def find_closing_expression(text: str) -> str | None:
    """Return the expression at the end of a text without marks; None if it ends in words."""
    text = re.sub(r"\s*<\|[\w|]{1,30}\|?>\w*\s*$", "", text[-LAST_CHARS:]).strip()
    text = _CLOSING_TAGS.sub(" ", text).strip()
    if _OPEN_ITEM.search(text):
        return None
    display = _DISPLAY.search(text)
    if display is not None:
        content = (display[1] or display[2] or "").strip()
        return strip_delimiters(_last_line(content)) or None
    return _find_closing_run(_ENDINGS.sub("", _last_sentence(text).strip("*_`# ")), leads_in=True)


def _last_line(maths: str) -> str:
    """Return the last line of an aligned derivation; other texts unchanged."""
    if "\\begin{align" not in maths and "\\begin{aligned" not in maths:
        return maths
    body = re.sub(r"\\(?:begin|end)\{aligned\}|\\(?:begin|end)\{align\*?\}", "", maths)
    lines = [line for line in body.split("\\\\") if line.strip()]
    return lines[-1].replace("&", " ").strip() if lines else ""


def _find_closing_run(sentence: str, *, leads_in: bool) -> str | None:
    """Return the expression at the end of a sentence; `leads_in` requires a word such as `is`."""
    sentence = sentence.strip()
    if sentence.endswith("?"):
        return None
    sentence = re.sub(r"\A[A-Z]: |[\s.。!*_`\"]+$", "", sentence)
    if _is_expression(sentence):
        return strip_delimiters(sentence) or None
    # The last maths token; only a unit may follow it.
    tokens = _tokenise(sentence)
    last = next((p for p in range(len(tokens) - 1, -1, -1) if tokens[p].maths), None)
    if last is None:
        return None
    unit = _cut_circumstance(sentence[tokens[last].end :].strip(" ."))
    ends = (
        tokens[last].kind in ("number", "delimited", "sign")
        and sentence[tokens[last].start] not in ",;:"
    )
    if unit and not (_is_unit(unit) and ends):
        return None
    # The run of maths tokens that ends there, and the text before it.
    first = last
    while first and tokens[first - 1].maths:
        first -= 1
    start = tokens[first].start
    run = _trim_punctuation(sentence[start : tokens[last].end])
    before = sentence[: sentence.rfind(run, start)] if run else sentence
    if not run or (before[-1:].isalnum() and before[-1:].isascii()):
        return None
    if run.startswith("="):
        run, before = run[1:].strip(), f"{before}="
    if leads_in and not _LEADS_IN.search(before[-200:]):
        # `30% of 50 = 15`: a calculation leads to its result.
        calculation, _, run = run.rpartition("=")
        if not re.search(r"(?<!_)\d", calculation):
            return None
    if _NEGATED.search(before[-60:]) or _TWO_CLAUSES.search(before[-300:]):
        return None
    quantity = f"{strip_delimiters(run)} {unit}".strip()
    if unit and read_quantity(quantity.rpartition("=")[2]) is None:
        return strip_delimiters(run) if tokens[last].kind == "delimited" else None
    return quantity or None


def _cut_circumstance(phrase: str) -> str:
    """Return `clips` of `clips in April and May`."""
    unit, *circumstance = _CIRCUMSTANCE.split(phrase, maxsplit=1)
    short = circumstance and len(circumstance[0].split()) <= 4
    if not short or NOT_A_UNIT.search(circumstance[0].replace("and", "")):
        return phrase
    return unit.strip()


class _Token(NamedTuple):
    """A token of a sentence; `maths`: it may be part of an expression."""

    kind: str
    start: int
    end: int
    maths: bool


def _tokenise(text: str) -> list[_Token]:
    """Return the tokens of a sentence without spaces."""
    tokens: list[_Token] = []
    for match in _TOKEN.finditer(text[:LAST_CHARS]):
        kind = str(match.lastgroup)
        maths = kind != "other" and (kind != "word" or _is_maths_word(match))
        if kind == "space":
            continue
        tokens.append(_Token(kind, match.start(), match.end(), maths))
    # `1 and 2` is one expression. An article before a token is not a variable.
    for place, token in enumerate(tokens[1:-1], start=1):
        if token.kind == "word" and text[token.start : token.end].casefold() in _JOINERS:
            between = tokens[place - 1].maths and tokens[place + 1].maths
            tokens[place] = token._replace(maths=between)
    article = len(tokens) > 1 and text[tokens[0].start : tokens[0].end] in ("a", "A", "I")
    if article and tokens[1].kind in ("number", "word", "command", "delimited"):
        tokens[0] = tokens[0]._replace(maths=False)
    return tokens


def _is_maths_word(match: re.Match[str]) -> bool:
    """Whether letters are a variable, a function, or a product such as xy in `2xy`."""
    word, text = match.group(), match.string
    if len(word) == 1:
        return word.isascii() or "α" <= word <= "ω" or "Α" <= word <= "Ω"
    if word.casefold() in _FUNCTIONS:
        return True
    before, after = text[match.start() - 1 : match.start()], text[match.end() : match.end() + 1]
    return (
        len(word) <= 3
        and word.isascii()
        and (
            (before != "" and (before.isdigit() or before in "^*+-/=|_}"))
            or (after != "" and after in "^=+*/_|")
        )
    )


def _is_expression(text: str) -> bool:
    """Whether a text is one expression and nothing else."""
    plain = re.sub(r"[\s.*_`\"]+$", "", text.strip())
    tokens = _tokenise(plain)
    return bool(tokens) and all(token.maths for token in tokens) and bool(_trim_punctuation(plain))


def _trim_punctuation(run: str) -> str:
    """Return a run of tokens without the punctuation around it; "" for a run of mere signs."""
    if _INTERVALS.fullmatch(run.strip()):
        return run.strip()
    for _ in range(3):
        run = re.sub(r"^(?:[\s,;:)\]}*_]|\.(?!\d))+|[\s,;:(\[{*_&=]+$", "", run)
        # In `(see 5` or `5 (as` a bracket belongs to the words; `[0, 1)` is an interval.
        surplus = sum(map(run.count, "([")) - sum(map(run.count, ")]"))
        if surplus > 0 and run.rfind("(") > 0:
            run = run[: run.rfind("(")]
        elif surplus < 0 and run.endswith(")"):
            run = run[:-1]
        else:
            break
    return run if re.search(r"\w|\\[A-Za-z]|[∅∞%]", run) else ""


def strip_delimiters(text: str) -> str:
    r"""Return maths without `$`, `\(`, `\[`, quotes, emphasis and an ending full stop."""
    text = re.sub(r"(?<!\\)\\[()\[\]]|\$\$|\*\*|[`\"]", "", text).strip()
    dollars = len(re.findall(r"(?<!\\)\$", text))
    if dollars and dollars % 2 == 0:
        text = re.sub(r"(?<!\\)\$", "", text)
    return re.sub(r"[\s,;:]*(?:(?<!\.)\.|。)?\s*$", "", text.strip()).strip()


def read_choice(text: str) -> str | None:
    """Return the letter when the whole text is one choice such as `B`, `(b)` or `B.`."""
    match = _LONE_CHOICE.fullmatch(unwrap_text(clean(text)).strip(" $*\n"))
    return match.group(1).upper() if match else None


def read_leading_choice(text: str) -> str | None:
    """Return the letter of `(B) 12`, `B. 12` or `B because …`; None for `B or C` and `A cat`."""
    plain = _MARKUP.sub("", unwrap_text(text).replace("\\ ", " ")).strip()
    match = _LEADING_CHOICE.match(_HEDGES.sub("", plain))
    if match is None or _SECOND_CHOICE.match(match[3]):
        return None
    if match[2] and not _AFTER_CHOICE.match(match[3]):
        return None
    return (match[1] or match[2]).upper()


def _read_boxed_choice(content: str) -> str | None:
    """Return the choice in a box: the letter alone, or a letter with the option's text."""
    content = _HEDGES.sub("", _MARKUP.sub("", unwrap_text(content).replace("\\ ", " ")))
    has_text = _OPTION_LINE.match(content)
    return read_choice(content) or (read_leading_choice(content) if has_text else None)


def _find_closing_choice(text: str) -> str | None:
    """Return the choice of a response without marks: its whole text, first line or last word."""
    text = text.strip()
    letter = read_choice(text)
    if letter:
        return letter
    first = text.partition("\n")[0]
    if (
        read_leading_choice(first)
        and len(_OPTION_LINE.findall(text)) <= 1
        and (
            read_choice(first)
            or _OPTION_LINE.match(_MARKUP.sub("", first))
            or first.lstrip("*").startswith("(")
        )
    ):
        return read_leading_choice(first)
    sentence = re.sub(r"[\s.!*_`\"]+$", "", _last_sentence(text))
    match = re.search(r"(?:[(\[]([A-Ja-j])[)\]]|(?<![\w'(])([A-J]))\**$", sentence)
    if match is None:
        return None
    named = re.search(
        r"\b(?:option|choice|answer)\s*\**$", sentence[: match.start()], re.IGNORECASE
    )
    before = sentence[: named.start() if named else match.start()].rstrip("*")
    # A bare letter may be a variable: `the force is F`.
    if match[2] and not named and not _NAMES_CHOICE.search(before[-60:]):
        return None
    if re.search(r"\b(?:or|and)\s*$|[/&]\s*$", before) or _NEGATED.search(before[-60:]):
        return None
    return (match[1] or match[2]).upper() if _LEADS_IN.search(before[-200:]) else None
