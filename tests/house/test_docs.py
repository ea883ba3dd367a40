"""The pages under docs/: the settings are the schema's, links lead somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from ppo_cli.rewards.rules import RULES

LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)\s]*)\)")
# A page that a message names, with its section: `docs/troubleshooting.md#kl-explodes`.
NAMED = re.compile(r"docs/[\w-]+\.md(?:#[\w-]+)?")


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and most viewers make them."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def missing(root: Path, target: Path, anchor: str) -> bool:
    if not (root / target).is_file():
        return True
    return bool(anchor) and anchor not in anchors((root / target).read_text(encoding="utf-8"))


def test_settings_page_is_the_schema(root: Path) -> None:
    page = runpy.run_path(str(root / "scripts" / "write_settings.py"))["page"]
    written = (root / "docs" / "settings.md").read_text(encoding="utf-8")
    assert written == page(), "run: python scripts/write_settings.py"


def test_links_lead_somewhere(root: Path, files: list[Path]) -> None:
    broken = []
    for path in (p for p in files if p.suffix == ".md"):
        for link in LINK.findall((root / path).read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            target = Path(path.parent / name) if name else path
            resolved = (root / target).resolve()
            if resolved.is_dir():
                continue
            if missing(root, resolved, anchor):
                broken.append(f"{path}: {link}")
    assert broken == []


def test_pages_that_messages_name_exist(root: Path, package_files: list[Path]) -> None:
    broken = []
    for path in package_files:
        for link in NAMED.findall((root / path).read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            if missing(root, Path(name), anchor):
                broken.append(f"{path}: {link}")
    assert broken == []


def names_in_table(page: str, title: str) -> list[str]:
    """The names in backticks of the first column of the table that begins with `title`."""
    table = page[page.index(f"| {title} |") :].split("\n\n")[0]
    return [n for row in table.splitlines()[2:] for n in re.findall(r"`(\S+?)`", row.split("|")[1])]


def test_readme_names_every_rule_and_preset(root: Path) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert sorted(names_in_table(readme, "rule")) == sorted(RULES)
    presets = sorted(path.stem for path in (root / "presets").glob("*.yaml"))
    assert sorted(names_in_table(readme, "preset")) == presets
