"""Digests of the files and model folders that settings name: a path says less than its content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppo_cli.run_folder.sources import has_model

# In what identifies a run: settings that count by the rows that are read, and digests by path.
ROWS = ("data.train_files", "data.val_files")
CONTENTS = "contents"
# Files of a model folder that loaders read: not its card, nor logs.
MODEL_SUFFIXES = (".safetensors", ".bin", ".pt", ".json", ".model", ".txt", ".jinja", ".py")
# Training or merging changes every layer, so blocks from all over a large file are enough.
BLOCKS, BLOCK_BYTES = 64, 64 * 1024


def digest_contents(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the files (also of FILE:NAME) and model folders that a value names, with digests."""
    if isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from digest_contents(inner)
    elif isinstance(value, str):
        # Unlike pathlib, os.path accepts texts that are not paths: too long, or with a NUL.
        path = os.path.expanduser(value.partition(":")[0])
        if os.path.isfile(path) or (os.path.isdir(path) and has_model(Path(path))):
            with suppress(OSError):  # an unreadable file is reported when it is loaded
                yield path, _digest_file_or_model(Path(path))


def _digest_file_or_model(path: Path) -> str:
    """Return the digest of a file, or of the files in a model folder that loaders read.

    The digest covers names, sizes and contents of the files with MODEL_SUFFIXES. Of a large file,
    BLOCKS evenly spaced blocks are read.
    """
    files = (
        [path]
        if path.is_file()
        else sorted(p for p in path.glob("*.*") if p.suffix in MODEL_SUFFIXES)
    )
    state = hashlib.sha256()
    for file in files:
        # Small files entirely, large files in evenly spaced blocks.
        size = file.stat().st_size
        state.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            if size <= BLOCKS * BLOCK_BYTES:
                state.update(opened.read())
                continue
            for i in range(BLOCKS):
                opened.seek(i * (size - BLOCK_BYTES) // (BLOCKS - 1))
                state.update(opened.read(BLOCK_BYTES))
    return state.hexdigest()
