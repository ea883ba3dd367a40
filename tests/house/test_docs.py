"""The pages under docs/: what is made from the code equals it, links lead somewhere."""

from __future__ import annotations

import ast
import json
import re
import runpy
from pathlib import Path

import pytest

import ppo_cli.algo
from ppo_cli.algo.estimators import ESTIMATORS, POLICY_LOSSES
from ppo_cli.cli.explain import build_schema
from ppo_cli.rewards.rules import RULES

LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)\s]*)\)")
# A page that a comment names: `docs/plugins.md`.
NAMED = re.compile(r"(?:docs|notes)/[\w/-]+\.md(?:#[\w-]+)?")


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and most viewers make them."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def missing(target: Path, anchor: str) -> bool:
    if not target.is_file():
        return not target.is_dir()
    return bool(anchor) and anchor not in anchors(target.read_text(encoding="utf-8"))


def test_schema_of_presets_follows_from_the_settings(root: Path) -> None:
    written = (root / "presets" / "schema.json").read_text(encoding="utf-8")
    assert json.loads(written) == build_schema(), "run: ppo presets schema > presets/schema.json"


@pytest.mark.slow  # half a minute
def test_memory_page_is_what_its_script_writes(root: Path) -> None:
    page = runpy.run_path(str(root / "scripts" / "write_memory.py"))["page"]
    written = (root / "docs" / "memory.md").read_text(encoding="utf-8")
    assert written == page(), "run: python scripts/write_memory.py"


def test_links_lead_somewhere(root: Path, files: list[Path]) -> None:
    """Those of pages, and the pages that comments name."""
    pages = [path for path in files if path.suffix == ".md" or path.name == "llms.txt"]
    sources = [path for path in files if path.suffix == ".py" and path.parts[0] == "ppo_cli"]
    broken = []
    for path in pages + sources:
        pattern, start = (LINK, path.parent) if path in pages else (NAMED, Path())
        for link in pattern.findall((root / path).read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            if missing(root / start / name if name else root / path, anchor):
                broken.append(f"{path}: {link}")
    assert broken == []


def test_every_page_can_be_reached_from_the_readme(root: Path) -> None:
    reached, waiting = set[Path](), [root / "README.md"]
    while waiting:
        page = waiting.pop()
        if page.suffix != ".md" or page in reached:
            continue
        reached.add(page)
        links = LINK.findall(page.read_text(encoding="utf-8"))
        waiting += [(page.parent / link.partition("#")[0]).resolve() for link in links if link]
    assert {page for page in (root / "docs").glob("*.md") if page not in reached} == set()


def test_llms_txt_lists_every_page(root: Path) -> None:
    listed = LINK.findall((root / "llms.txt").read_text(encoding="utf-8"))
    pages = {f"docs/{page.name}" for page in (root / "docs").glob("*.md")}
    assert pages - set(listed) == set()


def messages(source: str) -> list[str]:
    """The strings of a module, without docstrings."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node) is not None
        if isinstance(node.body[0], ast.Expr)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node not in docstrings
    ]


def test_messages_name_no_file_that_pip_does_not_install(root: Path, files: list[Path]) -> None:
    sources = [path for path in files if path.suffix == ".py" and path.parts[0] == "ppo_cli"]
    named = [
        f"{path}: {text}"
        for path in sources
        for text in messages((root / path).read_text(encoding="utf-8"))
        if NAMED.search(text)
    ]
    assert named == []
    assert messages('"""docs/a.md."""\nx = f"see docs/{1} b"\n') == ["see docs/", " b"]


def names_in_table(page: str, title: str) -> list[str]:
    """The names in backticks of the first column of the table that begins with `title`."""
    table = page[page.index(f"| {title} |") :].split("\n\n")[0]
    return [n for row in table.splitlines()[2:] for n in re.findall(r"`(\S+?)`", row.split("|")[1])]


def test_the_pages_name_every_rule_and_preset(root: Path) -> None:
    rewards = (root / "docs/rewards.md").read_text(encoding="utf-8")
    assert sorted(names_in_table(rewards, "rule")) == sorted(RULES)
    presets = sorted(path.stem for path in (root / "presets").glob("*.yaml"))
    configuration = (root / "docs/configuration.md").read_text(encoding="utf-8")
    assert sorted(names_in_table(configuration, "preset")) == presets


def test_the_table_of_papers_has_each_estimator_and_loss_as_it_is_computed(
    root: Path,
) -> None:
    """Names, papers (in the docstring of each formula), and how a loss is averaged by default."""
    page = (root / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    part = page.split("### As in which paper")[1].split("\n### ")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| `")]
    header = next(i for i, row in enumerate(rows) if "`--policy_loss`" in row[0])
    folder = Path(ppo_cli.algo.__file__ or "").parent
    formulas = " ".join(
        (folder / name).read_text(encoding="utf-8")
        for name in ("advantages.py", "losses.py", "piece_estimators.py")
    )
    formulas = " ".join(formulas.split())
    for declared, lines in ((ESTIMATORS, rows[1:header]), (POLICY_LOSSES, rows[header + 1 :])):
        named = {name: row for row in lines for name in re.findall(r"`(\w+)`", row[0])}
        assert list(named) == list(declared)
        for name, row in named.items():
            papers = set(re.findall(r"\d{4}\.\d{5}", row[1]))
            assert papers or "#estimators-for-pieces" in row[1]
            assert all(f"arXiv {paper}" in formulas for paper in papers), name
    for name, row in named.items():
        loss = POLICY_LOSSES[name]
        forced = "seq-mean-token-mean, whatever is set"
        assert row[2].startswith(forced if loss.per_sequence else loss.aggregation), name
        assert loss.per_sequence or "whatever" not in row[2]
