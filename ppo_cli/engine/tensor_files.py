"""Tensors in one safetensors file or several, written whole or not at all, read one by one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ppo_cli.errors import ModelError

NUMBERED = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")


def file_name(stem: str, number: int, of: int) -> str:
    """Name of file `number`, counted from 0, of so many."""
    part = "" if of == 1 else f"-{number + 1:05d}-of-{of:05d}"
    return f"{stem}{part}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file as Hugging Face does, and bring it to the disk."""
    unfinished = _hidden(path)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, unfinished, metadata={"format": "pt"})
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file and bring it to the disk."""
    unfinished = _hidden(path)
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint under one stem, each read when it is asked for.

    Raises ModelError when a file is missing or is none.
    """

    def __init__(self, directory: Path, stem: str) -> None:
        self._stem = stem
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        self._closing = ExitStack()
        for path in _find_files(directory, stem):
            try:
                file = self._closing.enter_context(safe_open(path, "pt"))
            except (OSError, SafetensorError) as error:
                self.close()
                raise ModelError(f"{_told(path)} cannot be read ({error}).") from error
            for name in file.keys():  # noqa: SIM118 - no mapping
                self._files[name], self._paths[name] = file, path

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def require(self, names: Iterable[str]) -> None:
        """Raise ModelError for the first name that is missing."""
        for name in names:
            if name not in self._files:
                raise ModelError(f"{self._stem}.safetensors lacks the tensor {name}.")

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ModelError for the first tensor that is missing, misshapen or unknown."""
        self.require(shapes)
        for name, file in self._files.items():
            where = _told(self._paths[name])
            if name not in shapes:
                raise ModelError(f"{where} holds a tensor that the model lacks: {name}.")
            found = tuple(file.get_slice(name).get_shape())
            if found != shapes[name]:
                raise ModelError(
                    f"{where} holds {name} as {found}, but the model takes {shapes[name]}."
                )

    def close(self) -> None:
        """Let go of the files."""
        self._closing.close()


def _find_files(directory: Path, stem: str) -> list[Path]:
    """The file of `stem`, or all of several; raises ModelError when one is missing."""
    alone = directory / file_name(stem, 0, 1)
    if alone.exists():
        return [alone]
    found = sorted((directory / stem).parent.glob(f"{Path(stem).name}-*.safetensors"))
    numbered = [match for path in found if (match := NUMBERED.search(path.name))]
    if not numbered:
        raise ModelError(f"{_told(alone)} is missing.")
    count = int(numbered[0].group(2))
    paths = [directory / file_name(stem, number, count) for number in range(count)]
    for path in paths:
        if not path.exists():
            raise ModelError(f"{_told(path)} is missing.")
    return paths


def _hidden(path: Path) -> Path:
    """The name to write under until the file is whole."""
    return path.with_name(f".unfinished-{path.name}")


def _told(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
