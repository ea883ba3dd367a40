"""Pure text guards: what a policy wrote may be read by a judge, but never obeyed by its machine.

Invisible characters go, words that a tokenizer or our fences would act on are spelt apart,
over-long text is cut in the middle. Every scan is linear.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

# Letters and marks that show nothing, beside the categories of INVISIBLE_KINDS.
INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\ufe00-\ufe0f\U000e0100-\U000e01ef]"
)
INVISIBLE_KINDS = {"Cc", "Cf", "Cs"}  # control, format (zero-width, bidi, tags), surrogates
LINE_ENDS = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
ANGLED = (
    r"s|pad|unk|bos|eos|mask|cls|sep|think|thinking|start_of_turn|end_of_turn|start_of_image|"
    r"end_of_image|image_soft_token|tool_call|tool_calls|tool_response|tool_result|tools|sop|eop|"
    r"endoftext|im_start|im_end|fim_prefix|fim_middle|fim_suffix|fim_pad|file_sep|repo_name|"
    r"reponame|filename|gh_stars|unused_?\d+|extra_id_\d+|reserved_\d+"
)
SQUARED = (
    "INST|SYSTEM_PROMPT|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS|THINK|IMG|gMASK|sMASK|MASK|CLS|"
    "SEP|PAD|UNK|BOS|EOS"
)
# Tags without a nonce are spelt apart too; `Promise<Response>` in code is left alone.
BARE = "prompt|response|ground_truth"
# Each alternative matches one character, and a space is put behind it.
CHAT_TOKENS = re.compile(
    rf"<(?=[|｜][^<>|｜\n]{{0,80}}[|｜]>)"
    rf"|<(?=/?(?:{ANGLED})>)"
    r"|<(?=</?SYS>>)"
    rf"|(?-i:\[(?=/?(?:{SQUARED})\]))"
    r"|\](?=~!?b[\[\]])|\[(?=e~\[)"
    rf"|<(?=/(?:{BARE})>)|(?<!\w)<(?=(?:{BARE})>)",
    re.IGNORECASE,
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
    lines = INVISIBLE.sub("", LINE_ENDS.sub("\n", text))
    hidden = [c for c in set(lines) - {"\n", "\t"} if unicodedata.category(c) in INVISIBLE_KINDS]
    return unicodedata.normalize("NFC", lines.translate(dict.fromkeys(map(ord, hidden))))


def neutralise(text: str) -> str:
    """Spell chat tokens apart, and turn whatever looks like a fence into plain brackets.

    `<|im_end|>` becomes `< |im_end|>`, `</response-1f…>` becomes `[/response-1f…]`: a reader
    still sees what was there, a tokenizer sees letters.
    """
    told = FENCES.sub(r"[\1]", text)
    told = CUT_MARKS.sub("[ ", told)
    return CHAT_TOKENS.sub(lambda found: f"{found[0]} ", told)


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
