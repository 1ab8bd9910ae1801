"""The documentation points at things that exist: code on the reading page, files and headings behind every link."""

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
READING_PAGE = ROOT / "docs" / "following-a-noise-spec.md"
MOST_FILES_TO_READ = 12
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "config").glob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
    ]
)

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
READING_ROW = re.compile(r"\[`(?P<path>[^`]+)`\]\([^)]+\) \| (?P<names>`[^|]+`) \|")
NUMBERED_ROW = re.compile(r"^\| (\d+) \|", re.MULTILINE)


def python_names(path: Path) -> set[str]:
    """Functions, classes and methods (as `Class.method`) of a module; of an adapter also what it imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
        if isinstance(node, ast.ImportFrom) and path.parent.name == "scripts":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def names_in(path: Path) -> set[str]:
    """What a reader can look at in a file, in the words of the reading page."""
    match path.suffix:
        case ".py":
            return python_names(path)
        case ".smk":
            return set(re.findall(r"^rule \w+", path.read_text(), re.MULTILINE))
        case ".yaml":
            return set(yaml.safe_load(path.read_text())["arms"])
    raise ValueError(path)


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(page: Path) -> list[str]:
    """Links of a page to files or headings that do not exist."""
    dead = []
    for target in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        # Sphinx writes these pages and checks links to them, in tests/docs/test_site.py.
        if linked.parent == ROOT / "docs" / "site" / "generated":
            continue
        if not linked.exists() or (anchor and anchor not in headings(linked)):
            dead.append(target)
    return dead


READING_ROWS = [(row["path"], row["names"]) for row in READING_ROW.finditer(READING_PAGE.read_text())]


def test_a_noise_specification_is_followed_in_few_files():
    numbers = [int(number) for number in NUMBERED_ROW.findall(READING_PAGE.read_text())]
    assert numbers == list(range(1, len(numbers) + 1))
    assert 0 < len(numbers) <= MOST_FILES_TO_READ
    assert len(READING_ROWS) == READING_PAGE.read_text().count("[`")


@pytest.mark.parametrize(("path", "names"), READING_ROWS)
def test_what_the_reading_page_names_exists(path, names):
    file = ROOT / path
    assert file.is_file()
    assert set(re.findall(r"`([^`]+)`", names)) <= names_in(file)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert dead_links(page) == []


def test_a_dead_link_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One page\n[a](#one-page) [b](#two) [c](gone.md) [d](page.md#one-page) [e](https://example.org)\n"
    )
    assert dead_links(page) == ["#two", "gone.md"]
