"""Digests: of a checkpoint's files, compared whenever it is loaded, and of short texts.

SHA-256 is the fastest collision-resistant hash of Python's library: 1.9 GB/s on a processor with
SHA instructions (notes/lab_book.md). Each rank hashes the files that it has written. The manifest
is written last.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from ppo_cli.atomic import atomic_replace
from ppo_cli.errors import ModelError, replace_flag
from ppo_cli.paths import load_json, read_text

MANIFEST: Final = "digests.json"
# The state of a run names the manifest, so that a missing manifest is noticed.
NAMED_IN: Final = "state/run.json"
# Files that are hashed at the same time.
THREADS: Final = 8
# Added files with these suffixes are damage, because a loader would read them. Others are notes.
LOADABLE_SUFFIXES: Final = {".json", ".safetensors", ".bin", ".jinja", ".model", ".txt", ".py"}
_STEP = re.compile(r"^step_(\d{6,})$")
_PART = ".digests-{}.json"

Digests = dict[str, dict[str, Any]]


def digest_files(folder: Path, names: Iterable[str]) -> Digests:
    """Return size and SHA-256 of files in `folder`; raises OSError."""
    from concurrent.futures import ThreadPoolExecutor

    ordered = sorted(names)
    # Hashing a large file releases the interpreter's lock.
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda name: _digest(folder / name), ordered)
        return dict(zip(ordered, digests, strict=True))


def write_rank_digests(folder: Path, rank: int, names: Iterable[str]) -> None:
    """Write the digests of one rank's files, for `write_manifest`."""
    part = folder / _PART.format(rank)
    part.write_text(json.dumps(digest_files(folder, names)))


def write_manifest(folder: Path) -> None:
    """Write the digests of all files of a complete checkpoint, including those of its ranks."""
    # Ranks have hashed their files; hash the remaining ones.
    digests: Digests = {}
    for part in folder.glob(_PART.format("*")):
        digests |= json.loads(part.read_text())
        part.unlink()
    files = (path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix() for path in files}
    digests |= digest_files(folder, names - digests.keys())
    with atomic_replace(folder / MANIFEST) as fresh:
        fresh.write_text(json.dumps({"files": dict(sorted(digests.items()))}, indent=1))


def find_damage(checkpoint: Path, below: str = "") -> list[str]:
    """Return a sentence for each file of a checkpoint that differs from what was saved.

    `below` limits the comparison to a folder or file of the checkpoint. Checkpoints of versions
    that wrote no digests are not checked.
    """
    try:
        recorded = _read_manifest(checkpoint)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST} cannot be read ({error})"]
    if recorded is None:
        # The state of a run must exist, with or without a manifest.
        if below == NAMED_IN and not (checkpoint / below).is_file():
            return [f"{below} is missing"]
        return [f"{MANIFEST} is missing"] if _names_manifest(checkpoint) else []
    expected = {
        name: entry
        for name, entry in recorded.items()
        if not below or name == below or name.startswith(f"{below}/")
    }
    # Files that were added, files that are missing or cut off, and files with other contents.
    problems, complete = [], []
    for path in sorted((checkpoint / below).rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if (
            path.suffix in LOADABLE_SUFFIXES
            and name not in {MANIFEST, *recorded}
            and path.is_file()
        ):
            problems.append(f"{name} was not saved with it")
    for name, entry in expected.items():
        try:
            size = (checkpoint / name).stat().st_size
        except OSError:
            problems.append(f"{name} is missing")
            continue
        if size == entry["bytes"]:
            complete.append(name)
        else:
            problems.append(f"{name} has {size:,} bytes, and {entry['bytes']:,} were saved")
    try:
        actual = digest_files(checkpoint, complete)
    except OSError as error:
        return [*problems, f"{error.filename} cannot be read ({error.strerror})"]
    for name in complete:
        if actual[name] != expected[name]:
            problems.append(
                f"{name} is not what was saved{_describe_origin(checkpoint, name, actual)}"
            )
    return problems


def require_intact(
    checkpoint: Path,
    retry: Callable[[Path], str] = lambda path: "",
    *,
    below: str = "",
    otherwise: str = "",
) -> None:
    """Raise ModelError if a checkpoint, or the part `below` it, differs from what was saved.

    `retry` returns the command that uses another checkpoint instead; an empty string if no command
    line named this one. `otherwise` is the advice if no other checkpoint is intact.
    """
    checkpoint = checkpoint.resolve()
    problems = find_damage(checkpoint, below)
    if not problems:
        return
    # Another checkpoint counts as intact only if all of it can be loaded.
    scope = "" if below == NAMED_IN else below
    intact = next(
        (other for other in _other_checkpoints(checkpoint) if not find_damage(other, scope)), None
    )
    if intact is None:
        advice = f"No other checkpoint of this run is intact. {otherwise}"
    elif command := retry(intact):
        advice = f"{intact.name} is intact; to use it: {command}"
    else:
        advice = f"{intact} is intact: name it instead."
    message = f"The checkpoint {checkpoint} is damaged: {'; '.join(problems)}. {advice}"
    raise ModelError(message.rstrip())


def require_resumable(checkpoint: Path, command: str, below: str = "") -> None:
    """Raise ModelError like `require_intact`; the advice is `command` with another `--resume`."""

    def resume(value: str) -> str:
        return replace_flag(command, "--resume", shlex.quote(value))

    require_intact(
        checkpoint,
        lambda other: resume(str(other)),
        below=below,
        otherwise=f"Start from the first step with: {resume('never')}",
    )


def require_intact_model(folder: Path, retry: Callable[[Path], str] = lambda path: "") -> None:
    """Raise ModelError like `require_intact` for a model folder in a checkpoint; others pass.

    `retry` gets another model folder.
    """
    folder = folder.resolve()
    require_intact(folder.parent, lambda other: retry(other / folder.name), below=folder.name)


def digest_text(text: str, length: int | None = None) -> str:
    """Return the SHA-256 of a text in hexadecimal, cut to `length` digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:length]


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _read_manifest(checkpoint: Path) -> Digests | None:
    """Return the recorded digests; None without a manifest."""
    path = checkpoint / MANIFEST
    if not path.is_file():
        return None
    files: Digests = load_json(read_text(path))["files"]
    return {name: {key: entry[key] for key in ("bytes", "sha256")} for name, entry in files.items()}


def _names_manifest(checkpoint: Path) -> bool:
    """Whether a checkpoint's state says that it was saved with digests."""
    try:
        return "digests" in load_json(read_text(checkpoint / NAMED_IN))
    except (OSError, ValueError, TypeError):
        return False


def _describe_origin(checkpoint: Path, name: str, actual: Digests) -> str:
    """Say from which other checkpoint a file comes; empty if from none."""
    for other in _other_checkpoints(checkpoint):
        try:
            recorded = _read_manifest(other) or {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if recorded.get(name) == actual[name]:
            return f" but that of {other.name}"
    return ""


def _other_checkpoints(checkpoint: Path) -> Iterator[Path]:
    """Yield the run's other checkpoints: earlier ones, the nearest first, then later ones."""
    this = _STEP.match(checkpoint.name)
    if this is None:
        return
    # Earlier checkpoints are preferred to later ones.
    steps = {int(match[1]): path for path in checkpoint.parent.iterdir()
             if (match := _STEP.match(path.name)) and path != checkpoint}  # fmt: skip
    yield from (steps[step] for step in sorted(steps, reverse=True) if step < int(this[1]))
    yield from (steps[step] for step in sorted(steps) if step > int(this[1]))
