"""Addresses (s3://bucket/run, any scheme of fsspec): which are served, and the folders for them."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from ppo_cli.atomic import atomic_replace
from ppo_cli.digests import digest_text
from ppo_cli.errors import DataError, first_line, is_address
from ppo_cli.paths import user_path

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # scheme -> extra of this package
# Where a user name is part of the address, and says nothing of a password.
WITH_USER = {"abfs", "abfss", "hdfs", "sftp", "ssh"}
_BUCKET = re.compile(r"[\w.-]{1,255}|arn:[\w.:-]+", re.ASCII)
NO_STORES = {
    "memory": "is gone when this process ends",
    **dict.fromkeys(("http", "https", "data", "zip", "tar", "github"), "cannot be written"),
}
COPY = {
    "s3": "aws s3 cp --recursive",
    "gs": "gcloud storage cp --recursive",
    "hdfs": "hdfs dfs -get",
}


def cache_root() -> str:
    """Return the folder for files that can be computed or fetched again; ~ stands for home."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    return f"{folder if folder.startswith('/') else '~/.cache'}/ppo-cli"


def cache_folder(kind: str, url: str) -> str:
    """Return the folder for a `kind` of copy (runs, files …) of an address; ~ stands for home."""
    scheme, _, path = url.partition("://")
    return "/".join([cache_root(), kind, scheme, *filter(None, path.split("/"))])


def check_address(url: str) -> None:
    """Raise ValueError for an address that fsspec cannot open here, or with a password."""
    from fsspec.core import url_to_fs
    from fsspec.registry import get_filesystem_class, known_implementations

    scheme, separator, path = url.partition("://")
    names = path.split("/")
    user, at, _ = names[0].partition("@")
    if (at and (scheme not in WITH_USER or ":" in user)) or "?" in path or "#" in path:
        raise ValueError(
            "holds a user name, a password or a query; leave them out: credentials are read from "
            "the environment and its files, such as AWS_ACCESS_KEY_ID or ~/.aws"
        )
    if (
        not (separator and any(names) and url.isprintable())
        or "::" in url or {".", ".."} & {*names} or scheme not in known_implementations
        or (scheme in EXTRAS and not _BUCKET.fullmatch(names[0]))
    ):  # fmt: skip
        raise ValueError(f"{url} is no address that fsspec opens; write it as s3://BUCKET/NAME")
    try:
        get_filesystem_class(scheme)
        if scheme == "hdfs":  # its libraries belong to no package
            url_to_fs(url)
    except (ImportError, OSError) as error:
        package = shlex.quote(f"ppo-cli[{EXTRAS.get(scheme)}]")
        command = f": pip install {package}" if scheme in EXTRAS else ""
        raise ValueError(f"{url} cannot be opened here: {first_line(error)}{command}") from error


def check_store(url: str) -> None:
    """Raise ValueError for an address that no run folder can be copied to."""
    if not is_address(url):
        raise ValueError(f"{url} is no address; a folder is named with --output_dir")
    check_address(url)
    if reason := NO_STORES.get(url.partition(":")[0]):
        raise ValueError(f"{url} {reason}; write it as s3://BUCKET/NAME")


def download(url: str) -> Path:
    """Return a local copy of the file at an address; a changed file is copied again.

    Raises DataError if it cannot be read.
    """
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(url)
        state = digest_text(system.ukey(path), 16)  # by its tag, or by size and time
        file = user_path(cache_folder("files", url)) / state / Path(path).name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_replace(file) as fresh:
                system.get_file(path, str(fresh))
    except FileNotFoundError as error:
        raise DataError(f"{url} cannot be read: there is no such file.") from error
    except Exception as error:  # each file system raises errors of its own
        raise DataError(f"{url} cannot be read: {first_line(error)}.") from error
    return file


def check_data_files(names: tuple[str, ...]) -> None:
    """Raise ValueError for the first address among data files that cannot be read."""
    for name in filter(is_address, names):
        check_address(name)


def restore(path: object) -> str:
    """Return an address as it was written: a `Path` of it has lost its second slash."""
    return re.sub(r"^([A-Za-z][\w+.-]*):/(?!/)", r"\1://", str(path))


def refuse_address(path: object) -> None:
    """Raise ValueError for s3://… and the like where a local folder or file is expected."""
    text = restore(path)
    if not is_address(text):
        return
    scheme, _, rest = text.partition(":")
    if scheme == "file":
        raise ValueError(f"{text} is an address; write it as /{rest.lstrip('/')}")
    command = f": {COPY[scheme]} {shlex.quote(text)} DIR" if scheme in COPY else ""
    raise ValueError(
        f"{text} is an address, and files are read from a disk of this machine: copy it there, "
        f"and name that{command}"
    )
