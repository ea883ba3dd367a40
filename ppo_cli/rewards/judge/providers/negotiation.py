"""Find out which optional parameters a model takes, from its first refusals.

Each option has one or more forms, best first. A refusal moves an option to its next form, and
after the last one it is left out. What was found holds for the provider's life.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Option:
    """An optional parameter: its name, its forms, and the words by which errors may call it."""

    name: str
    forms: tuple[str, ...] = ("on",)
    words: tuple[str, ...] = ()

    def named_in(self, text: str) -> bool:
        """Whether an error message (or its `param`) speaks of this option."""
        # A form such as `json` or `OFF` is an everyday word; one with an underscore is a name.
        forms = {form for form in self.forms if "_" in form}
        return any(speaks_of(text, word) for word in {self.name, *self.words, *forms})

    def form_named_in(self, form: str, text: str) -> bool:
        """Whether a message speaks of this very form."""
        return "_" in form and speaks_of(text, form)


Form = Mapping[str, str]


def speaks_of(text: str, name: str) -> bool:
    """Whether a text has a parameter's name as a word of its own, in snake or camel case."""
    camel = re.sub(r"_(\w)", lambda match: match.group(1).upper(), name)
    either = "|".join(re.escape(word) for word in {name, camel})
    return bool(re.search(rf"(?<![A-Za-z])(?:{either})(?![A-Za-z])", text, re.IGNORECASE))


class Negotiation:
    """The options of one model, the most exotic first, and how far each was moved."""

    def __init__(self, label: str, options: Sequence[Option]) -> None:
        self._label = label
        self._options = tuple(options)
        self._positions = {option.name: 0 for option in options}
        self._dropped: dict[str, str] = {}
        self._proven: dict[str, int] | None = None

    def form(self) -> Form:
        """Options to send now, each with its form; those left out are not in it."""
        return {
            option.name: option.forms[self._positions[option.name]]
            for option in self._options
            if self._positions[option.name] < len(option.forms)
        }

    @property
    def proven(self) -> bool:
        """Whether a call has succeeded at all."""
        return self._proven is not None

    def dropped(self) -> Mapping[str, str]:
        """Options and forms that were refused, each with the provider's words."""
        return dict(self._dropped)

    def succeed(self) -> None:
        """Remember that a call went through."""
        self._proven = dict(self._positions)

    def refuse(self, sent: Form, message: str, param: str | None) -> bool:
        """Take in a refusal of a call that was sent in this form; True: send it again.

        A call that was sent before the others moved on is simply repeated. One that names no
        option costs, until a call has gone through, the most exotic one.
        """
        if sent != self.form():
            return True
        option = self._blamed(sent, message, param)
        if option is None:
            return False
        self._advance(option, message)
        return True

    def _blamed(self, sent: Form, message: str, param: str | None) -> Option | None:
        here = [option for option in self._options if option.name in sent]
        if param:
            named = [option for option in here if option.named_in(param)]
            if named:
                return named[0]
        if self._proven == self._positions:
            return None  # this very form has worked: the refusal is about the text
        # The form in use is a better clue than the option's other names.
        exact = [option for option in here if option.form_named_in(sent[option.name], message)]
        named = exact or [option for option in here if option.named_in(message)]
        if named:
            return named[0]
        return here[0] if here and not self.proven else None

    def _advance(self, option: Option, message: str) -> None:
        position = self._positions[option.name]
        form = option.forms[position]
        self._positions[option.name] = position + 1
        what = option.name if form == "on" else f"{option.name}={form}"
        self._dropped[what] = message
        if position + 1 < len(option.forms):
            instead = option.forms[position + 1]
            logger.info("%s does not take %s, trying %s: %s", self._label, what, instead, message)
        else:
            logger.warning("%s does not take %s, left out: %s", self._label, what, message)
