"""The tutorials as notebooks: `python docs/site/notebooks.py` runs docs/tutorials/*.py and writes their outputs.

A tutorial is a Python file in percent format: `# %%` begins a cell of code, `# %% [markdown]` one of text. The cells
run in one namespace, without a kernel of Jupyter; what they print is their output. `tags=["numbers-vary"]` marks a cell
whose numbers depend on the kind of processor.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import nbformat

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))

_MARK = re.compile(r"^# %%(.*)\n", re.MULTILINE)


class Cell(NamedTuple):
    """A cell of a tutorial."""

    kind: str
    source: str
    numbers_vary: bool


def cells_of(text: str) -> list[Cell]:
    """Return the cells of a file in percent format."""
    before, *parts = _MARK.split(text)
    if before.strip():
        raise ValueError(f"expected a cell mark, found {before[:40]!r}")
    return [_cell(mark, body.strip("\n")) for mark, body in zip(parts[::2], parts[1::2], strict=True)]


def _cell(mark: str, body: str) -> Cell:
    if "[markdown]" in mark:
        return Cell("markdown", re.sub(r"^# ?", "", body, flags=re.MULTILINE), numbers_vary=False)
    return Cell("code", body, "numbers-vary" in mark)


def outputs_of(cells: Sequence[Cell]) -> list[str]:
    """Run the cells in an empty folder; return what each prints. Progress bars on stderr are dropped."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed = []
    with tempfile.TemporaryDirectory() as folder, chdir(folder), _commands_of_this_environment():
        for number, cell in enumerate(cells):
            with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()):
                if cell.kind == "code":
                    exec(compile(cell.source, f"cell {number}", "exec"), namespace)  # noqa: S102 - our own tutorial
            printed.append("".join(f"{line.rstrip()}\n" for line in output.getvalue().rstrip().splitlines()))
    return printed


@contextmanager
def _commands_of_this_environment() -> Iterator[None]:
    """Find `aqnpipe` beside this Python first."""
    before = os.environ["PATH"]
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def notebook(cells: Sequence[Cell], outputs: Sequence[str]) -> nbformat.NotebookNode:
    """Return the notebook of cells and their outputs."""
    nodes = []
    for number, (cell, output) in enumerate(zip(cells, outputs, strict=True)):
        if cell.kind == "markdown":
            node = nbformat.v4.new_markdown_cell(cell.source)
        else:
            streams = [nbformat.v4.new_output("stream", name="stdout", text=output)] if output else []
            tags = {"tags": ["numbers-vary"]} if cell.numbers_vary else {}
            node = nbformat.v4.new_code_cell(cell.source, outputs=streams, metadata=tags)
            node.execution_count = sum(each.kind == "code" for each in cells[: number + 1])
        # Ids are drawn at random otherwise, and every notebook would change.
        node.id = f"cell-{number}"
        nodes.append(node)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.v4.new_notebook(cells=nodes, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


if __name__ == "__main__":
    for tutorial in TUTORIALS:
        cells = cells_of(tutorial.read_text(encoding="utf-8"))
        nbformat.write(notebook(cells, outputs_of(cells)), tutorial.with_suffix(".ipynb"))
