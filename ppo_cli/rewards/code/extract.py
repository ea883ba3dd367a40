"""The code of a response: which part of the text is the program.

Text work only. Nothing foreign is parsed as Python here, for even that can crash an interpreter.
"""

from __future__ import annotations

import re
import textwrap

from ppo_cli.rewards.checkers import after_thinking

_FENCE = re.compile(r"[ \t]*(```+|~~~+)[ \t]*([\w.+#-]*)")
_PYTHON = ("python", "python3", "py", "py3")
_NEW_BLOCK = re.compile(r"\n(?=[^\s#)\]}])")


def find_code(text: str, entry_point: str = "") -> str:
    """Return the code of a response, or an empty text when there is none.

    Of several fenced blocks it is the last in Python (else the last of any kind) that defines
    the entry point; where none does, the last. Without any it is the whole text.
    """
    answer = after_thinking(text)
    blocks = _list_blocks(answer)
    filled = [(language, code) for language, code in blocks if code.strip()]
    if not filled:
        return "" if blocks else answer.strip("\n").rstrip()
    codes = [code for language, code in filled if language in _PYTHON]
    codes = codes or [code for _, code in filled]
    defining = [code for code in codes if defines(code, entry_point)]
    return (defining or codes)[-1].strip("\n").rstrip()


def _list_blocks(text: str) -> list[tuple[str, str]]:
    """Return language and code of every fenced block; the last one may lack its end.

    Goes line by line: on a long line of fence characters or blanks, a single pattern would go
    back and forth for hours.
    """
    blocks: list[tuple[str, list[str]]] = []
    fence = ""
    for line in text.split("\n"):
        opening = None if fence else _FENCE.match(line)
        if opening is not None:
            fence = opening[1]
            blocks.append((opening[2].lower(), []))
        elif fence and line.strip(" \t") == fence:
            fence = ""
        elif fence:
            blocks[-1][1].append(line)
    return [(language, "\n".join(code)) for language, code in blocks]


def defines(code: str, name: str) -> bool:
    """Say whether the code has a line that makes this name at its outermost level."""
    if not name:
        return False
    made = rf"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+{re.escape(name)}\b"
    assigned = rf"^{re.escape(name)}[ \t]*(?::[^=\n]+)?=[^=]"
    return re.search(f"{made}|{assigned}", code, re.MULTILINE) is not None


def list_attempts(code: str, prompt: str, entry_point: str) -> list[str]:
    """Return what to compile, best first: the code alone, or what it makes with the prompt.

    A body without its `def` line goes on where the prompt has stopped; what a model adds
    behind it (another function, an explanation) is left out where it is no Python.
    """
    alone = textwrap.dedent(code)
    if not prompt or not entry_point or defines(code, entry_point):
        return [alone]
    start = prompt.rstrip() + "\n"
    body = code if code[:1] in (" ", "\t") else textwrap.indent(code, "    ")
    bodies = (body, _NEW_BLOCK.split(body, maxsplit=1)[0])
    # The first line of a completion has often lost its indent.
    mended = [f"    {code}", _NEW_BLOCK.split(f"    {code}", maxsplit=1)[0]]
    return list(dict.fromkeys([*(start + one for one in (*bodies, *mended)), alone]))
