"""Files for papers: every figure and table of the report, in formats that a paper takes."""

import csv

import pytest

from aqnpipe.report.inputs import read_inputs
from aqnpipe.report.paper import export_paper
from aqnpipe.report.words import load_words


@pytest.fixture(scope="module")
def written(built, tmp_path_factory):
    folder = tmp_path_factory.mktemp("paper")
    data = read_inputs(built.made.report_inputs(built.folder))
    return folder, export_paper(built.study, data, load_words("en"), folder, ["pdf", "svg"], ["latex", "csv"])


def test_every_figure_and_table_of_the_report_is_written(written, built):
    folder, paths = written
    assert sorted(paths) == sorted(path for path in folder.rglob("*") if path.is_file())
    sections = built.html.split("<main>")[1]
    pictures = sum(section.count('<svg viewBox="0 0 ') for section in sections.split('<section id="')[1:])
    legends = built.html.count('<svg viewBox="0 0 34 10"')
    assert len(list(folder.glob("figures/*.pdf"))) == len(list(folder.glob("figures/*.svg"))) == pictures - legends
    assert all(path.read_bytes().startswith(b"%PDF") for path in folder.glob("figures/*.pdf"))
    names = {path.stem.split("-", 1)[1] for path in folder.glob("tables/*.csv")}
    assert {"verdicts", "arms", "accuracy", "differences", "robustness", "comparisons", "checks", "layers"} <= names


def test_figures_are_in_colours_of_their_own_with_a_legend(written):
    folder, _ = written
    svg = next(folder.glob("figures/robustness-1-*.svg")).read_text()
    assert "var(--" not in svg
    assert "#fe0" not in svg
    assert "#0072b2" in svg or "#d55e00" in svg
    assert ">E5b</text>" in svg


def test_verdicts_come_with_their_reasons(written, built):
    folder, _ = written
    rows = list(csv.reader((folder / "tables" / "claims-verdicts.csv").open()))
    assert rows[0][:3] == ["family", "claim", "verdict"]
    assert len(rows) == 7
    assert all(row[5] for row in rows[1:])


def test_latex_is_escaped(written):
    folder, _ = written
    text = (folder / "tables" / "claims-arms.tex").read_text()
    assert "\\begin{tabular}{lll" in text
    assert "srdd\\_guided" in text
    assert "5 \\% relative noise" in text


def test_chinese_titles_do_not_overwrite_each_other(built, tmp_path):
    data = read_inputs(built.made.report_inputs(built.folder))
    paths = export_paper(built.study, data, load_words("zh"), tmp_path, ["svg"], [])
    assert len(set(paths)) == len(paths) == len(list(tmp_path.glob("figures/*")))


def test_a_cell_that_a_spreadsheet_would_run_is_inert():
    from aqnpipe.report.paper import _inert

    assert _inert("=1+1") == "'=1+1"
    assert _inert("@SUM(A1)") == "'@SUM(A1)"
    assert [_inert(cell) for cell in ("+2.4", "−0.3 to +1.2", "-5", "baseline")] == [
        "+2.4",
        "−0.3 to +1.2",
        "-5",
        "baseline",
    ]
