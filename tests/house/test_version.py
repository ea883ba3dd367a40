"""The version of a checkout, a shallow clone, an archive, and a folder without git."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ppo_cli.version import NEXT

AUTHOR = {f"GIT_{who}_{what}": "x@y.z" for who in ("AUTHOR", "COMMITTER")
          for what in ("NAME", "EMAIL")}  # fmt: skip
Git = Callable[..., bytes]


def version_in(folder: Path) -> str:
    """What the program in a folder says, each time read again."""
    spec = importlib.util.spec_from_file_location("version", folder / "ppo_cli" / "version.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.read_version())


@pytest.fixture
def git(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """Runs git in a new repository that holds version.py and .gitattributes."""
    for name, value in AUTHOR.items():
        monkeypatch.setenv(name, value)
    repository = tmp_path / "repository"
    (repository / "ppo_cli").mkdir(parents=True)
    shutil.copy(root / "ppo_cli" / "version.py", repository / "ppo_cli")
    shutil.copy(root / ".gitattributes", repository)

    def call(*words: str) -> bytes:
        command = ["git", "-C", str(repository), *words]
        return subprocess.run(command, check=True, capture_output=True).stdout

    call("init", "--quiet")
    call("add", ".")
    call("commit", "--quiet", "--message", "first")
    return call


def unpack_archive(git: Git, folder: Path) -> Path:
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", folder], input=git("archive", "HEAD"), check=True)
    return folder


def test_version_names_the_tag_or_the_commit(
    git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"

    def commit() -> str:
        return git("rev-parse", "--short", "HEAD").decode().strip()

    first = commit()
    assert version_in(repository) == f"{NEXT}.dev0+g{first}"
    assert version_in(unpack_archive(git, tmp_path / "untagged")) == f"{NEXT}.dev0+g{first}"
    git("tag", "v9.8.7")
    assert version_in(repository) == "9.8.7"
    assert version_in(unpack_archive(git, tmp_path / "tagged")) == "9.8.7"
    # Tags of other kinds are not versions; changed files are not those of the tag.
    git("commit", "--quiet", "--allow-empty", "--message", "second")
    git("tag", "experiment")
    second = commit()
    later = f"9.8.7+1.g{second}"
    assert version_in(repository) == later
    assert version_in(unpack_archive(git, tmp_path / "later")) == later
    (repository / ".gitattributes").write_text("# changed")
    assert version_in(repository) == f"{later}.dirty"
    # A shallow clone has no tag, and the repository of a git hook is not this one.
    shallow = tmp_path / "shallow"
    git("clone", "--quiet", "--depth", "1", "--no-tags", repository.as_uri(), str(shallow))
    monkeypatch.setenv("GIT_DIR", os.devnull)
    assert version_in(shallow) == f"{NEXT}.dev0+g{second}"
    # No git to ask.
    monkeypatch.setenv("PATH", str(tmp_path))
    assert version_in(repository) == f"{NEXT}.dev0"


def test_files_about_the_release_name_it(root: Path) -> None:
    assert f"\nversion: {NEXT}\n" in (root / "CITATION.cff").read_text()
    assert f"\n## [{NEXT}]" in (root / "CHANGELOG.md").read_text()
    assert f"image: ppo-cli:{NEXT}\n" in (root / "deploy" / "kuberay.yaml").read_text()
    images = re.findall(r"ppo-cli:(\d[\w.]*)", (root / "docs" / "platforms.md").read_text())
    assert set(images) == {NEXT}
