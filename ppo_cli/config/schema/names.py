"""The type of settings whose names packages may add to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core.core_schema import no_info_after_validator_function

from ppo_cli.errors import did_you_mean
from ppo_cli.plugins import entry_points, find_plugin


@dataclass(frozen=True, eq=False)
class Names:
    """The type of a setting that takes a name of a table, of a plug-in, or FILE.py:NAME.

    `kind` is that of plugins.py. Functions of files, where there are `file_inputs`, and of packages
    must take no others.
    """

    table: Mapping[str, Any]
    kind: str
    file_inputs: tuple[str, ...] = ()

    @property
    def offered(self) -> list[str]:
        """The names of the table and those of plug-ins."""
        return [*self.table, *entry_points(self.kind)]

    def read(self, text: str) -> str:
        """Return a name, FILE with its absolute path; ValueError says what is wrong with it."""
        file, _, name = text.rpartition(":")
        if self.file_inputs and file.endswith(".py"):
            text = f"{Path(file).expanduser().absolute()}:{name}"
        elif find_plugin(self.kind, text, self.table) is None:
            if text in self.table:
                return text
            form = ", a plug-in or FILE.py:NAME" if self.file_inputs else " or a plug-in"
            raise ValueError(
                f"'{text}' is not one of {', '.join(self.offered)}{form}."
                f"{did_you_mean(text, self.offered)}"
            )
        # The declaration of another name is made from its function, which must exist and fit.
        self.table[text]
        return text

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Check a value as `read` does."""
        return no_info_after_validator_function(self.read, handler(source))
