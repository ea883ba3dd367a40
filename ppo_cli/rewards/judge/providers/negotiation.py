"""Find out which optional parameters a model takes, from its first refusals.

Each option has one or more forms, best first. A refusal moves an option to its next form, and
after the last one it is left out. What was found holds for the provider's life. A refusal that
names nothing is a guess: once a call goes through, what was dropped before the cure is tried
again, one option at a time, in the calls that come anyway.
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
        return self.place_in(text) is not None

    def place_in(self, text: str) -> int | None:
        """Where a text first speaks of this option, or None."""
        # A form such as `json` or `OFF` is an everyday word; one with an underscore is a name.
        forms = {form for form in self.forms if "_" in form}
        places = [place_of(text, word) for word in {self.name, *self.words, *forms}]
        return min((place for place in places if place is not None), default=None)

    def form_named_in(self, form: str, text: str) -> bool:
        """Whether a message speaks of this very form."""
        return "_" in form and place_of(text, form) is not None

    def called(self, form: str) -> str:
        """How a form of this option is told to people."""
        return self.name if form == "on" else f"{self.name}={form}"


Form = Mapping[str, str]


def place_of(text: str, name: str) -> int | None:
    """Where a text has a name as words of their own: a_b, aB, a-b or `a b`; None if nowhere."""
    parts = r"[\s_-]?".join(re.escape(part) for part in re.split(r"[\s_-]", name))
    found = re.search(rf"(?<![A-Za-z]){parts}(?![A-Za-z])", text, re.IGNORECASE)
    return found.start() if found else None


class Negotiation:
    """The options of one model, the most exotic first, and how far each was moved."""

    def __init__(self, label: str, options: Sequence[Option]) -> None:
        self._label = label
        self._options = {option.name: option for option in options}
        self._positions = {option.name: 0 for option in options}
        self._dropped: dict[str, str] = {}
        self._told: set[str] = set()
        self._proven: dict[str, int] | None = None
        # Options that were moved by guess, each with its position before that; the last of them.
        self._guessed: dict[str, int] = {}
        self._cure: str | None = None
        # Options to be tried again, the first one now, each in the position to try.
        self._trials: dict[str, int] = {}
        self._doubt = ""
        self._in_vain = False

    def begin(self) -> Form:
        """The form of a new call; guesses that led nowhere are taken back first."""
        if self._in_vain:
            for name, before in self._guessed.items():
                self._restore(name, before)
            self._guessed, self._cure, self._in_vain = {}, None, False
        return self.form()

    def form(self) -> Form:
        """Options to send now, each with its form; those left out are not in it."""
        return self._form_of({**self._positions, **dict([*self._trials.items()][:1])})

    @property
    def proven(self) -> bool:
        """Whether a call has succeeded at all."""
        return self._proven is not None

    def dropped(self) -> Mapping[str, str]:
        """Options and forms that were refused, each with the provider's words."""
        return dict(self._dropped)

    def succeed(self, sent: Form, refused: Sequence[Form] = ()) -> None:
        """Take in that a call went through in this form, after it was refused in others."""
        self._in_vain = False
        if self._proven is None:
            self._settle(sent)
        elif self._trials and sent == self.form():
            name = next(iter(self._trials))
            self._restore(name, self._trials.pop(name))
        elif self._trials and sent == self._base() and self.form() in refused:
            self._end_trial(self._doubt)
        if sent == self._base():
            self._proven = dict(self._positions)

    def refuse(self, sent: Form, message: str, param: str | None) -> Form | None:
        """Take in a refusal of a call that was sent in this form; the form to send next, or None.

        A call that was sent before the others moved on is simply repeated. One that names no
        option costs, until a call has gone through, the most exotic one.
        """
        if self._trials and sent == self.form():
            return self._refuse_trial(sent, message, param)
        if sent != self._base():
            return self.form()
        option = self._blamed(sent, message, param)
        if option is None and not self.proven and sent:
            option = self._options[next(iter(sent))]
            self._guessed.setdefault(option.name, self._positions[option.name])
            self._cure = option.name
            self._advance(option, message)
        elif option is not None:
            self._guessed.pop(option.name, None)
            self._cure = None
            self._tell(option, self._advance(option, message))
        else:
            self._in_vain = not self.proven
            return None
        return self.form()

    # --- what follows from a reply --------------------------------------------------------------

    def _settle(self, sent: Form) -> None:
        """After the first success: the last guess was the cure, the others are to be tried."""
        reached = {name: self._position(name, sent) for name in self._options}
        for name, before in self._guessed.items():
            option = self._options[name]
            if reached[name] < self._positions[name]:  # an earlier call's form has worked
                self._restore(name, reached[name])
            elif name == self._cure:
                for form in option.forms[before : self._positions[name]]:
                    self._tell(option, form)
            else:
                self._trials[name] = before
                self._forget(option, before)
        self._guessed, self._cure = {}, None
        self._proven = reached

    def _refuse_trial(self, sent: Form, message: str, param: str | None) -> Form:
        """Drop what is named; without a name the call goes out once more without the trial."""
        trial = self._options[next(iter(self._trials))]
        blamed = self._by_param(sent, param)
        if blamed is trial or (blamed is None and trial.named_in(message)):
            self._end_trial(message)
        elif blamed is not None:
            self._tell(blamed, self._advance(blamed, message))
        else:
            self._doubt = message
            return self._base()
        return self.form()

    def _end_trial(self, message: str) -> None:
        name = next(iter(self._trials))
        option, position = self._options[name], self._trials[name]
        form = option.forms[position]
        self._dropped[option.called(form)] = message
        self._tell(option, form)
        if position + 1 < self._positions[name]:
            self._trials[name] = position + 1
        else:
            del self._trials[name]

    def _blamed(self, sent: Form, message: str, param: str | None) -> Option | None:
        """The option that a refusal names."""
        if by_param := self._by_param(sent, param):
            return by_param
        if self._proven == self._positions:
            return None  # this very form has worked: the refusal is about the text
        here = [option for name, option in self._options.items() if name in sent]
        # The form in use is a better clue than the option's other names.
        exact = [option for option in here if option.form_named_in(sent[option.name], message)]
        named = exact or [option for option in here if option.named_in(message)]
        return min(named, key=lambda option: option.place_in(message) or 0, default=None)

    def _by_param(self, sent: Form, param: str | None) -> Option | None:
        here = (option for name, option in self._options.items() if name in sent)
        return next((option for option in here if param and option.named_in(param)), None)

    # --- positions ------------------------------------------------------------------------------

    def _base(self) -> Form:
        return self._form_of(self._positions)

    def _form_of(self, positions: Mapping[str, int]) -> Form:
        return {
            name: option.forms[positions[name]]
            for name, option in self._options.items()
            if positions[name] < len(option.forms)
        }

    def _position(self, name: str, sent: Form) -> int:
        forms = self._options[name].forms
        return forms.index(sent[name]) if name in sent else len(forms)

    def _advance(self, option: Option, message: str) -> str:
        form = option.forms[self._positions[option.name]]
        self._positions[option.name] += 1
        self._dropped[option.called(form)] = message
        return form

    def _restore(self, name: str, position: int) -> None:
        self._positions[name] = position
        self._forget(self._options[name], position)

    def _forget(self, option: Option, position: int) -> None:
        for form in option.forms[position:]:
            self._dropped.pop(option.called(form), None)

    def _tell(self, option: Option, form: str) -> None:
        """Log a dropped form, once; what the user should know stands in `dropped()`."""
        what = option.called(form)
        if what in self._told:
            return
        self._told.add(what)
        later = option.forms[option.forms.index(form) + 1 :]
        then = f"trying {later[0]}" if later else "left out"
        logger.info("%s does not take %s, %s: %s", self._label, what, then, self._dropped[what])
