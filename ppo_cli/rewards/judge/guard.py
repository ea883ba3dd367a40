"""Pure text guards: what a policy wrote may be read by a judge, but never obeyed by its machine.

Invisible characters go, what has the form of a control token or of a fence is broken,
over-long text is cut in the middle. Every scan is linear.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

import regex

# By Unicode property: default-ignorable (zero-width, bidi controls, variation selectors, tags,
# fillers), other format and control characters, halves of surrogate pairs, noncharacters.
INVISIBLE = regex.compile(
    r"[[\p{Default_Ignorable_Code_Point}\p{Cc}\p{Cf}\p{Cs}\p{Noncharacter_Code_Point}]--[\n\t]]",
    regex.VERSION1,
)
LINE_ENDS = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
# The full-width forms count too: some tokenizers fold them first.
LESS, MORE, BAR = "[<＜﹤]", "[>＞﹥]", "[|｜]"
# The forms that control tokens of chat models have; a space goes behind the first character.
CONTROL_TOKENS = re.compile(
    rf"{LESS}(?={BAR}(?:[^\s<>]{{1,120}}|[^\s<>][^<>\n]{{0,120}}(?<!\s){BAR}){MORE})"  # <|im_end|>
    rf"|{LESS}(?=(?![|｜\s])[^<>\n]{{1,120}}(?<!\s){BAR}{MORE})"  # <turn|>
    rf"|{LESS}(?={LESS}/?[A-Z]+{MORE}{MORE})"  # <<SYS>>
    rf"|[\[［](?={BAR}/?\w\w[\w.:-]{{0,80}}{BAR}[\]］])"  # [|endofturn|]
    r"|[\[［](?=/?(?:[a-z]{1,2}MASK|unused_?\d+)[\]］])"  # [gMASK]
    r"|｜(?=[A-Za-z0-9_▁]{2,80}｜)"  # ｜DSML｜
    r"|◁(?=/?\w+▷)"
    r"|\](?=~!?b[\[\]]|![pd]~\[|<\])|\[(?=e~\[|>\[)"  # ]~b]
    r"|>(?=>[A-Z]{3,40}<<)"  # >>ANSWER<<
    # Words that switch the thinking of a judge on or off: /no_think
    r"|/(?=(?i:no[_-]?think|set (?:no)?think|system_override))"
    r"|(?<!\S)/(?=(?i:think)(?![\w>＞﹥/.\]-]))"
)
# One word in brackets. Which of them are ordinary is known better than which are tokens.
TAGS = re.compile(
    rf"{LESS}(?=/?(?P<word>[^\W\d][\w-]{{0,80}}(?:[:=][\w.-]{{1,80}})?|0x\w\w){MORE})"
)
CAPITALS = re.compile(r"[\[［](?=/?(?P<word>[A-ZＡ-Ｚ][A-Z0-9_Ａ-Ｚ]{2,60})[\]］])")
PLAIN_TAGS = frozenset(
    re.findall(
        r"\w+",
        """
    a abbr address article aside b base bdi bdo big blockquote body br button canvas caption
    center cite code col colgroup dd del details dfn dialog dir div dl dt em fieldset figcaption
    figure font footer form frame h1 h2 h3 h4 h5 h6 head header hgroup hr html i iframe input ins
    kbd label legend li link main map mark math menu meta meter mfrac mi mn mo mrow ms msqrt msub
    msup mtext nav noscript ol optgroup option output p param pre progress q rp rt ruby samp script
    section select small span strike strong style sub summary sup svg table tbody td template
    textarea tfoot th thead time title tr tt u ul var wbr
    any array auto bool boolean byte char complex decimal double dynamic float half i8 i16 i32 i64
    i128 int int8 int16 int32 int64 integer isize long never number short
    sbyte str string u8 u16 u32 u64 u128 uint uint8 uint16 uint32 uint64 ulong unit
    ushort usize f16 f32 f64 float16 float32 float64 void wchar
    algorithm atomic bitset cassert cctype chrono climits cmath complex cstdint cstdio cstdlib
    cstring ctime deque exception fstream functional future iomanip ios iostream istream iterator
    limits list locale map memory mutex numeric optional ostream queue random ratio regex set
    sstream stack stdexcept streambuf system_error thread tuple type_traits typeinfo unordered_map
    unordered_set utility valarray variant vector
    """,
    )
)
_TYPE = re.compile(r"[A-Z]|[a-z]\w*_t")
_MIXED_CASE = re.compile(r"[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)*")
PLAIN_CAPITALS = frozenset(
    re.findall(
        r"\w+",
        """
    ALERT AND API BUG CRITICAL DEBUG DEPRECATED DONE ERR ERROR EXCEPTION FAIL FAILED FAILURE FALSE
    FATAL FIXED FIXME HACK HTML HTTP INFO JSON LOG MISSING NEW NONE NOT NOTE NOTICE NULL NUM
    OPTIONAL PASS PASSED REQUIRED RESULT SEVERE SKIP SKIPPED SQL SUCCESS TEST TIP TODO TRACE TRUE
    URL VERBOSE WARN WARNING XML XXX YES
    """,
    )
)
TAG_NAMES = r"prompt|response|ground[_ -]?truth|extra_info(?:\.[\w-]{1,80}){0,8}"
# Whatever a reader takes for a dash: hyphens, dashes, minus signs, full-width and small forms.
DASHES = (
    r"\-\u00ad\u02d7\u058a\u05be\u06d4\u1400\u1806\u2010-\u2015\u2043\u207b\u208b\u2212\u23af"
    r"\u2500\u2501\u2796\u2e1a\u2e3a\u2e3b\u301c\u3030\u30a0\u30fc\ufe31\ufe32\ufe58\ufe63\uff0d\uff70"
)
FENCES = re.compile(
    rf"[<＜﹤‹〈⟨](\s?[/／∕⁄]?\s?(?:{TAG_NAMES})\s?[{DASHES}]\s?\w{{1,80}}\s?)[>＞﹥›〉⟩]",
    re.IGNORECASE,
)
CUT_MARKS = re.compile(r"\[(?=cut-\w)", re.IGNORECASE)


class Cut(NamedTuple):
    """A text cut in the middle; `left_out` is 0, and `tail` empty, when it was short enough."""

    head: str
    left_out: int
    tail: str


def clean(text: str) -> str:
    """Return the text without invisible characters, its line ends as newlines, in NFC."""
    return unicodedata.normalize("NFC", INVISIBLE.sub("", LINE_ENDS.sub("\n", text)))


def neutralise(text: str) -> str:
    """Break whatever has the form of a control token or of a fence; the rest stays as it is.

    `<|im_end|>` becomes `< |im_end|>`, `[ARGS]` becomes `[ ARGS]`, `</response-1f…>` becomes
    `[/response-1f…]`: a reader still sees what was there, a tokenizer sees letters. A word in
    angle brackets is broken unless it is an element of HTML, a type or a header of a programming
    language; one in capitals and square brackets, unless it is a word of logs and comments.
    """
    shown = FENCES.sub(r"[\1]", text)
    shown = CUT_MARKS.sub("[ ", shown)
    shown = CONTROL_TOKENS.sub(_broken, shown)
    shown = TAGS.sub(lambda tag: tag[0] if _is_plain_tag(tag) else _broken(tag), shown)
    return CAPITALS.sub(lambda it: it[0] if it["word"] in PLAIN_CAPITALS else _broken(it), shown)


def _broken(found: re.Match[str]) -> str:
    return f"{found[0]} "


def _is_plain_tag(tag: re.Match[str]) -> bool:
    """Tell whether a word in angle brackets is markup or code that no chat model reserves.

    A name in mixed case behind an identifier is a type parameter, as in `Promise<Response>`.
    """
    word, text, at = tag["word"], tag.string, tag.start()
    if word in PLAIN_TAGS:
        return True
    if text[tag.end()] == "/":
        return False
    behind_a_name = text[max(0, at - 1) : at].isidentifier()
    return bool(_TYPE.fullmatch(word) or (behind_a_name and _MIXED_CASE.fullmatch(word)))


def cut_middle(text: str, most: int) -> Cut:
    """Keep at most `most` characters: two thirds of them head, one third tail.

    The head shows what the response set out to do and how, which needs room; the tail holds
    its conclusion, which is short but must not be lost.
    """
    if len(text) <= most:
        return Cut(text, 0, "")
    tail = most // 3
    head = most - tail
    return Cut(text[:head], len(text) - most, text[len(text) - tail :] if tail else "")
