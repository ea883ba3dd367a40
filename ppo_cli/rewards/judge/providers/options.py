"""Optional parameters of a request, and which of them a model turns out to accept.

An option that the model refuses by name is dropped for the life of the provider, or sent in its
next form. A refusal that names nothing drops options on a guess, the most exotic first, until a
call succeeds; only before the first success, because after it the text is at fault.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

logger = logging.getLogger(__name__)

Forms = Mapping[str, str]  # the options of a call by name, each with its form


@dataclass(frozen=True)
class Option:
    """An optional parameter: its name, its forms in order of preference, other names in errors."""

    name: str
    forms: tuple[str, ...] = ("on",)
    aliases: tuple[str, ...] = ()

    def find_in(self, text: str) -> int | None:
        """Return where an error message (or its `param`) first names this option, or None."""
        # A form such as `json` or `OFF` is an everyday word; one with an underscore is a name.
        forms = {form for form in self.forms if "_" in form}
        places = [find_name(text, name) for name in {self.name, *self.aliases, *forms}]
        return min((place for place in places if place is not None), default=None)

    def label(self, form: str) -> str:
        """Return the name of a form of this option for messages and for `dropped`."""
        return self.name if form == "on" else f"{self.name}={form}"


def find_name(text: str, name: str) -> int | None:
    """Return where a text has a name as separate words (a_b, aB, a-b or `a b`), or None."""
    parts = r"[\s_-]?".join(re.escape(part) for part in re.split(r"[\s_-]", name))
    match = re.search(rf"(?<![A-Za-z]){parts}(?![A-Za-z])", text, re.IGNORECASE)
    return match.start() if match else None


class OptionSet:
    """The options that a model accepts, as far as is known."""

    def __init__(self, options: Sequence[Option], label: str) -> None:
        self.options = list(options)
        self.dropped: dict[str, str] = {}  # label of an option -> the provider's message
        self.accepted: Forms | None = None  # the forms of the last call that succeeded
        self._label = label

    def forms(self, guesses: Collection[str] = ()) -> Forms:
        """Return the options to send, each in its first form that is not dropped or guessed bad."""
        forms: dict[str, str] = {}
        for option in self.options:
            for form in option.forms:
                if option.label(form) not in (*self.dropped, *guesses):
                    forms.setdefault(option.name, form)
        return forms

    def drop_named(self, forms: Forms, message: str, param: str | None) -> bool:
        """Drop the option that a refusal names; once these forms worked, only by `param`."""
        # A refusal can only be about options that were sent.
        sent = [option for option in self.options if option.name in forms]
        by_param = [option for option in sent if param and option.find_in(param) is not None]
        if by_param or forms == self.accepted:
            named = next(iter(by_param), None)
        else:
            # The form in use is a better clue than the option's other names.
            exact = [
                option for option in sent
                if "_" in forms[option.name] and find_name(message, forms[option.name]) is not None
            ]  # fmt: skip
            candidates = exact or [option for option in sent if option.find_in(message) is not None]
            named = min(candidates, key=lambda option: option.find_in(message) or 0, default=None)
        if named is None:
            return False
        self._drop(named.label(forms[named.name]), message)
        return True

    def blames(self, message: str) -> bool:
        """Whether a message names an option, before any call has shown that all are accepted."""
        return self.accepted is None and any(o.find_in(message) is not None for o in self.options)

    def guess(self, forms: Forms) -> str | None:
        """Return the most exotic option, to try a call without it; None once a call succeeded."""
        if self.accepted is not None or not forms:
            return None
        first = next(option for option in self.options if option.name in forms)
        return first.label(forms[first.name])

    def accept(self, forms: Forms, guesses: Sequence[str], message: str) -> None:
        """Record that a call with these forms succeeded.

        After the first success the options that were dropped by guess for it stay dropped.
        """
        # What had to be left out for the first success is not tried again.
        if self.accepted is None:
            for label in guesses:
                self._drop(label, message)
        if forms == self.forms():
            self.accepted = forms

    def _drop(self, label: str, message: str) -> None:
        self.dropped[label] = message
        next_form = self.forms().get(label.partition("=")[0])
        action = f"trying {next_form}" if next_form else "left out"
        logger.info("%s does not take %s, %s: %s", self._label, label, action, message)
