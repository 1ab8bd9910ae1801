"""The tutorials run, and their notebooks are what they print."""

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "tutorials"
MOST_LINES = 60


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def notebooks():
    return load("notebooks")


def words_of(text):
    """The text without numbers, and without the spaces and lines of tables that depend on their widths."""
    return re.sub(r"[-+−]?\d[\d.,e-]*|[─═]+", "#", " ".join(text.split()))


def is_same(cell, printed, written):
    return words_of(printed) == words_of(written) if cell.numbers_vary else printed == written


def printed_in(node):
    return "".join(output.text for output in node.get("outputs", ()))


def test_there_are_three_and_each_is_short():
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert names == {"train_with_aqn", "robust_checkpoints", "node_health"}
    assert names == {path.stem for path in FOLDER.glob("*.ipynb")}
    for path in FOLDER.glob("*.py"):
        assert len(path.read_text().splitlines()) <= MOST_LINES, path


@pytest.mark.parametrize("name", ["train_with_aqn", "robust_checkpoints", "node_health"])
def test_a_notebook_has_the_cells_of_its_source(notebooks, name):
    cells = notebooks.cells_of((FOLDER / f"{name}.py").read_text())
    found = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(found)
    assert [(node.cell_type, node.source) for node in found.cells] == [(cell.kind, cell.source) for cell in cells]
    tags = [node.metadata.get("tags", []) == ["numbers-vary"] for node in found.cells]
    assert tags == [cell.numbers_vary for cell in cells]
    # A notebook without outputs is one that did not run.
    assert sum(bool(printed_in(node)) for node in found.cells) >= 2


@pytest.mark.parametrize(
    "name",
    [
        "node_health",
        pytest.param("robust_checkpoints", marks=pytest.mark.slow),
        pytest.param("train_with_aqn", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("offline")
def test_a_tutorial_prints_what_its_notebook_shows(notebooks, name):
    cells = notebooks.cells_of((FOLDER / f"{name}.py").read_text())
    written = [printed_in(node) for node in nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells]
    for cell, now, before in zip(cells, notebooks.outputs_of(cells), written, strict=True):
        assert is_same(cell, now, before), f"{cell.source}\nprinted\n{now}\nand its notebook has\n{before}"


def test_other_words_are_noticed_and_other_numbers_where_they_do_not_vary(notebooks):
    exact, varies = notebooks.cells_of('# %%\nprint(1)\n# %% tags=["numbers-vary"]\nprint(2)\n')
    assert is_same(exact, "5 of 10\n", "5 of 10\n")
    assert not is_same(exact, "6 of 10\n", "5 of 10\n")
    assert is_same(varies, "│ 26.2 (17.9 to 36.8)  −0.5\n", "│ 9  (1 to 7)    +1e-05\n")
    assert not is_same(varies, "6 of 10, shown\n", "6 of 10, not shown\n")


def test_cells_share_names_and_a_notebook_has_what_they_print(notebooks):
    text = '# %% [markdown]\n# # Title\n#\n# text\n# %%\nnumber = 2\n# %% tags=["numbers-vary"]\nprint(number * 3)  \n'
    cells = notebooks.cells_of(text)
    assert cells == [
        ("markdown", "# Title\n\ntext", False),
        ("code", "number = 2", False),
        ("code", "print(number * 3)  ", True),
    ]
    outputs = notebooks.outputs_of(cells)
    assert outputs == ["", "", "6\n"]
    made = notebooks.notebook(cells, outputs)
    nbformat.validate(made)
    assert [printed_in(node) for node in made.cells] == outputs
    assert [node.get("execution_count") for node in made.cells] == [None, 1, 2]


def test_an_error_in_a_cell_ends_the_run_and_a_file_without_cells_is_refused(notebooks):
    with pytest.raises(ZeroDivisionError):
        notebooks.outputs_of(notebooks.cells_of("# %%\n1 / 0\n"))
    with pytest.raises(ValueError, match="expected a cell mark, found 'import sys"):
        notebooks.cells_of("import sys\n# %%\n")


def test_the_site_has_each_tutorial_with_its_outputs(tmp_path):
    load("generated_pages").write_generated_pages(tmp_path / "generated", ROOT)
    page = (tmp_path / "generated" / "node_health.md").read_text()
    assert page.startswith("# Is this node healthy?\n")
    assert "```text\nfault\nlayer 3, layer_output: saturation of magnitude 0.30\n" in page
    assert "](../../how-to/diagnosing-a-node.md)" in page
    assert "](../../tutorials/node_health.ipynb)" in page
