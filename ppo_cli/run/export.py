"""`ppo export`: writes the model of a checkpoint as one folder, atomically; uploads it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppo_cli.atomic import replacing
from ppo_cli.config.bundled import model_folder
from ppo_cli.errors import ConfigError, UserError, first_line, on_path
from ppo_cli.redact import redact
from ppo_cli.report.card import write_card
from ppo_cli.run_folder import STEP_NAME, find_model, holds_model

CRITIC_HEAD = "ForTokenClassification"


def export(
    source: Path,
    out: Path,
    *,
    checkpoint: str | None = None,
    critic: bool = False,
    dtype: str | None = None,
    base: str | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
    push: str | None = None,
    public: bool = False,
) -> dict[str, Any]:
    """Write the actor (or critic) of a run or checkpoint to `out` as one Hugging Face folder.

    `checkpoint` is best, latest, a step's folder or a path; None is the latest. The model of a run
    gets a card. `push` names the hub's repository that it is uploaded to, private unless `public`.
    Returns what was written, and from where, as JSON takes it; `step` is None where it is not
    known.
    """
    if public and push is None:
        raise ConfigError("--public says who can read what --push uploads: add --push NAME.")
    if push is not None:
        _check_hub(push)
    folder = find_model(source.expanduser(), checkpoint, critic=critic).resolve()
    found = STEP_NAME.match(folder.parent.name)
    step = int(found.group(1)) if found else None
    run = folder.parents[2]
    card = step is not None and (run / "config.yaml").is_file()
    with _placing(out.expanduser(), folder, force=force) as fresh:
        from ppo_cli.engine.export import write_model  # torch, which takes seconds

        written = write_model(
            folder,
            fresh,
            dtype=dtype,
            base=model_folder(base) if base else None,
            trust_remote_code=trust_remote_code,
        )
        if card and step is not None:
            write_card(run, fresh, name=out.resolve().name, step=step, critic=critic)
    return {
        "out": str(out),
        "use_as": "--critic_model" if _is_critic(out.expanduser(), folder) else "--model",
        "source": str(folder),
        "step": step,
        "base": written.base,
        "dtype": written.dtype,
        "parameters": written.parameters,
        "bytes": written.bytes,
        "files": list(written.files),
        "card": card,
        "pushed": None if push is None else _push(out.expanduser(), push, public=public),
    }


def _check_hub(name: str) -> None:
    """Refuse a name or a machine that cannot upload, before anything is written."""
    from huggingface_hub import get_token
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    problems = []
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        said = str(error).partition(":")[0].rstrip(".")
        problems.append(f"--push {name}: {said}.")
    if get_token() is None:
        problems.append("--push needs a token of the hub: run `hf auth login`, or set HF_TOKEN.")
    if is_offline_mode():
        problems.append("--push needs the hub: unset HF_HUB_OFFLINE.")
    if problems:
        raise ConfigError(problems)


def _push(folder: Path, name: str, *, public: bool) -> str:
    """Upload a folder; returns the address of the repository."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    kept = f"The model is in {folder}, but it was not uploaded to {name}"
    try:
        made = api.create_repo(name, private=not public, exist_ok=True)
        exposed = not public and not api.repo_info(made.repo_id).private
        if not exposed:
            api.upload_folder(
                repo_id=made.repo_id, folder_path=folder, commit_message="Upload by ppo export"
            )
    except Exception as failure:  # HTTP, LFS and Xet have errors of their own
        error: BaseException = failure
        while error.__cause__ and not isinstance(error, HfHubHTTPError):
            error = error.__cause__
        why = first_line(error)
        if isinstance(error, HfHubHTTPError):
            said = error.server_message or error.response.reason_phrase
            why = f"the hub answered {error.response.status_code}, {said}"
            if error.response.status_code in (401, 403):
                why = f"{why.rstrip('.')}. Give it a token that may write there (HF_TOKEN)"
        hf = Path(sys.executable).with_name("hf")
        again = [] if public else ["--private"]
        again = ["upload", name, str(folder), *again]
        raise UserError(
            f"{kept}: {redact(why).rstrip('.')}. To try again: "
            f"{on_path(hf) if hf.exists() else 'hf'} {shlex.join(again)}"
        ) from failure
    if exposed:
        raise UserError(
            f"{kept}: that repository exists and everybody can read it. Add --public, or give "
            "another name."
        )
    return str(made)


def _is_critic(out: Path, source: Path) -> bool:
    """Tell whether a written model is a critic, by its head or by the folder it came from."""
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    heads = config.get("architectures") or []
    return source.name == "critic" or any(name.endswith(CRITIC_HEAD) for name in heads)


@contextmanager
def _placing(out: Path, source: Path, *, force: bool) -> Iterator[Path]:
    """Give a hidden folder to fill; on leaving, it takes the place of `out`."""
    place = out.resolve()
    _check_place(out, place, source, force=force)
    try:
        with replacing(place) as fresh:
            fresh.mkdir(parents=True)
            yield fresh
    except OSError as error:
        raise UserError(
            f"The model could not be written to {out}: {error.strerror or error}. Free some "
            "space, or choose another --out."
        ) from error


def _check_place(out: Path, place: Path, source: Path, *, force: bool) -> None:
    if place.exists() and not place.is_dir():
        raise ConfigError(f"--out {out} is a file; name a folder.")
    if source.is_relative_to(place) or place.is_relative_to(source):
        raise ConfigError(f"--out {out}: that is where {source} lies. Name another folder.")
    if place.is_dir() and any(place.iterdir()):
        if not force:
            raise ConfigError(
                f"--out {out} is not empty. Name another folder, or replace all of it with --force."
            )
        if not holds_model(place):
            raise ConfigError(
                f"--out {out} holds no model but other files, and --force would delete them all. "
                "Name another folder."
            )
    parent = next(folder for folder in place.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(f"--out {out}: the folder {parent} cannot be written.")
