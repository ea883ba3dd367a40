"""Control tokens of chat models in text: one pattern for judges and for served reward models.

A server turns such a token in a response into a real one unless it is broken.
"""

from __future__ import annotations

import re

# Full-width forms count too, since some tokenizers convert them first.
LESS, MORE, BAR = "[<＜﹤]", "[>＞﹥]", "[|｜]"
# Names of tokens without bars: <s>, </s>, <pad>, <end_of_turn>, <unused12>; [INST], [MASK].
_NAMES = (
    r"(?i:s|bos|eos|pad|unk|mask|sep|cls|sop|eop|start_of_turn|end_of_turn|end_of_text|turn"
    r"|(?:extra_id_|unused|reserved_special_token_)\d+)"
)
# Capitals only: `arr[mask]` is code.
_BRACKETED = (
    r"/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)"
    r"|CLS|SEP|PAD|MASK|UNK|BOS|EOS"
)
# The character after which a space breaks the token.
CONTROL_TOKENS = re.compile(
    rf"{LESS}(?={BAR}(?:[^\s<>]{{1,120}}|[^\s<>][^<>\n]{{0,120}}(?<!\s){BAR}){MORE})"  # <|im_end|>
    rf"|{LESS}(?=(?![|｜\s])[^<>\n]{{1,120}}(?<!\s){BAR}{MORE})"  # <turn|>
    rf"|{LESS}(?={LESS}/?[A-Z]+{MORE}{MORE})"  # <<SYS>>
    rf"|{LESS}(?=/?{_NAMES}{MORE})"
    rf"|[\[［](?={BAR}/?\w\w[\w.:-]{{0,80}}{BAR}[\]］])"  # [|endofturn|]
    rf"|[\[［](?=(?:{_BRACKETED}|/?[a-z]{{1,2}}MASK)[\]］])"
    r"|[\[［](?=(?i:(?:[a-z]+_)?(?:control|unused|reserved|extra|special|dummy|sentinel)"
    r"(?:_token|_id)?[_-]?\d+[\]］]))"  # [control_12]
    r"|｜(?=[A-Za-z0-9_▁]{2,80}｜)"  # ｜DSML｜
    r"|◁(?=/?\w+▷)"
    r"|\](?=~!?b[\[\]]|![pd]~\[|<\])|\[(?=e~\[|>\[)"  # ]~b]
    r"|>(?=>[A-Z]{3,40}<<)"  # >>ANSWER<<
)


def break_control_tokens(text: str) -> tuple[str, int]:
    """Return the text with a space inside each control token, and the number of tokens."""
    return CONTROL_TOKENS.subn(r"\g<0> ", text)
