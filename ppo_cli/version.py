"""The version of the program: of git's tag in a checkout, as it was built elsewhere.

A build reads it here too (pyproject.toml), so this file imports nothing of the program.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

NEXT = "0.1.0"  # the release that commits without a tag lead to
PACKAGE = Path(__file__).resolve().parent
# `git archive` fills this in (.gitattributes): the nearest tag, if there is one, and the commit.
ARCHIVED = "$Format:%(describe:tags=true,match=v[0-9]*) %h$"
# Output of `git describe`: v0.1.0, v0.1.0-3-gb3156f1b, or b3156f1b; a changed tree adds -dirty.
_DESCRIBED = re.compile(
    r"(?:v(?P<tag>\d[^-]*))?(?:-(?P<commits>\d+)-g)?(?P<hash>[0-9a-f]{7,})?(?P<dirty>-dirty)?"
)


@cache  # git is asked once, not for each page
def read_version() -> str:
    """Return 0.1.0 at the tag v0.1.0, 0.1.0+3.gb3156f1b three commits later.

    Without a tag (of a shallow clone) it is 0.1.0.dev0+gb3156f1b, without git 0.1.0.dev0.
    """
    root = PACKAGE.parent
    if (PACKAGE / "presets").is_dir():  # pip installed a wheel
        return metadata.version("ppo-cli")
    if (root / "PKG-INFO").is_file():  # a source distribution
        return metadata.PathDistribution(root).version
    return format_version(_describe_checkout(root) or ARCHIVED.split()[0])


def _describe_checkout(root: Path) -> str:
    """Return the commit of a checkout as git describes it; "" without git."""
    if not (root / ".git").exists():
        return ""
    command = ["git", "--git-dir", ".git", "--work-tree", ".", "describe", "--tags", "--always"]
    try:
        # Of the tags v0.1.0, v1.0.0rc1 and the like.
        done = subprocess.run(
            [*command, "--dirty", "--match", "v[0-9]*"],
            cwd=root, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError:  # no git here
        return ""
    return done.stdout.strip()


def format_version(described: str) -> str:
    """Return the version (PEP 440) of a commit that `git describe` has named."""
    match = _DESCRIBED.fullmatch(described)
    if match is None:
        return f"{NEXT}.dev0"
    count = match["commits"] and f"{match['commits']}."
    parts = [match["hash"] and f"{count or ''}g{match['hash']}", match["dirty"] and "dirty"]
    local = ".".join(part for part in parts if part)
    return (match["tag"] or f"{NEXT}.dev0") + (f"+{local}" if local else "")
