"""Models that think: how their templates end a prompt, and how they write thoughts down.

The templates are cut down to a system line, the user's and the end; the ends are those that the
makers publish. `special` says whether the tokenizer has the marks as special tokens, which
decoding drops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.rewards.tables import table


@dataclass(frozen=True)
class Thinker:
    """A family: template, marks as it writes them, and what its prompt opens by arguments."""

    name: str
    before: str  # of the user's text
    after: str  # up to where the model goes on, Jinja
    opening: str
    closing: str
    end: str
    opened: tuple[tuple[dict[str, Any], str], ...]
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    aside: str = ""  # what the model puts among its thoughts, of marks of its own
    framed: str = "{}"  # the answer as it writes it

    @property
    def template(self) -> str:
        """The chat template."""
        end = "{{ '' }}"  # Jinja drops a newline at the very end
        return f"{self.before}{{{{ messages[0]['content'] }}}}{self.after}{end}"


THINKERS = tuple(Thinker(**fields) for fields in table(__file__, "thinkers"))


@dataclass(frozen=True)
class Reply:
    """What a model wrote; `answer` is what a reader may take from it, empty: nothing."""

    of: Thinker
    shape: str
    text: str
    answer: str
    cut: bool = False
    opened: str = field(default="")


WRONG, RIGHT = "41", "42"
MUSED = (
    "Okay, so the user wants 6 times 7. I first took 6*7 to be 41, so the answer is 41.\n"
    "#### 41\nThat is \\boxed{41}, and the score is 41."
)
AGAIN = "Wait, let me check that again. Alternatively it could be 41. Hmm, \\boxed{41}\n#### 41"


def replies(of: Thinker) -> Iterator[Reply]:
    """Replies of a family, where the prompt opens the thought without its opening mark."""
    opened = of.opened[0][1]
    opening, closing = of.opening, of.closing
    answered = of.framed.format(f"The answer is {RIGHT}\n#### {RIGHT}")

    def reply(shape: str, text: str, answer: str = answered, *, cut: bool = False) -> Reply:
        """Written by the model after its own opening mark."""
        return Reply(of, shape, text if opened else opening + text, answer, cut, opened)

    thought, begun = f"{MUSED}{of.aside}", answered.partition("\n####")[0]
    yield reply("closed", f"{thought}{closing}{answered}")
    yield reply("closed, in two parts", f"{thought}\n\n{AGAIN}{closing}{answered}")
    yield reply("closed, nothing thought", f"{closing}{answered}")
    yield reply("closed, no answer", f"{thought}{closing}", "")
    yield reply("closed, the answer cut", f"{thought}{closing}{begun}", begun, cut=True)
    yield reply("open", thought, "")
    yield reply("cut", thought[: len(thought) * 3 // 4], "", cut=True)
    yield reply("cut, nothing thought", "", "", cut=True)
    yield reply("opened twice", f"{opening}{thought}{closing}{answered}")
    yield reply("names its opening", f"I open with {opening} and go on. {MUSED}{closing}{answered}")
    if "final" not in closing:  # a channel begins where it is named
        yield reply("nested, cut", f"A {opening}{AGAIN}{closing} within. {MUSED}", "", cut=True)
    yield reply("closed twice", f"{thought}{closing}{AGAIN}{closing}{answered}")
    yield reply("thinks again", f"{thought}{closing}{answered}\n{opening}{AGAIN}{closing}")
    yield reply("thinks again, cut", f"{thought}{closing}{answered}\n{opening}{AGAIN}", cut=True)
    mention = f"{answered} (I thought between `{opening.strip()}` marks.)"
    yield reply("the answer names it", f"{thought}{closing}{mention}", mention)
    plain = f"The answer is {RIGHT}"
    yield Reply(of, "no mark at all", plain, "" if opened else plain, opened=opened)


CORPUS = tuple(reply for thinker in THINKERS for reply in replies(thinker))
