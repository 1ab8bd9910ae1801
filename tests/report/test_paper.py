"""Files for papers: every figure and table of the report, in formats that a paper takes."""

import csv
import dataclasses
import re
import shutil
import subprocess
import textwrap

import polars as pl
import pytest
import vl_convert
from made_up_parities import operator, parity

from aqnpipe.artifacts.comparisons import ClaimsFile, MachineDifferenceTable
from aqnpipe.artifacts.files import read_json
from aqnpipe.report import claims
from aqnpipe.report.export import claims_panel, export_paper
from aqnpipe.report.inputs import MeasuredMachine
from aqnpipe.report.words import load_words


@pytest.fixture(scope="module")
def written(built, tmp_path_factory):
    folder = tmp_path_factory.mktemp("paper")
    data = built.made.report_data(built.folder)
    return folder, export_paper(built.study, data, load_words("en"), folder, ["pdf", "svg"], ["latex", "csv"])


def test_every_figure_and_table_of_the_report_is_written(written, built):
    folder, paths = written
    assert sorted(paths) == sorted(path for path in folder.rglob("*") if path.is_file())
    sections = built.html.split("<main>")[1]
    pictures = sum(section.count('<svg viewBox="0 0 ') for section in sections.split('<section id="')[1:])
    legends = built.html.count('<svg viewBox="0 0 34 10"')
    strips = 1  # the page draws the claims as a strip each, a paper has them in one picture
    num_figures = pictures - legends + strips
    assert len(list(folder.glob("figures/*.pdf"))) == len(list(folder.glob("figures/*.svg"))) == num_figures
    assert all(path.read_bytes().startswith(b"%PDF") for path in folder.glob("figures/*.pdf"))
    names = {path.stem.split("-", 1)[1] for path in folder.glob("tables/*.csv")}
    on_page = {re.sub(r"[^A-Za-z0-9_.]+", "-", name) for name in re.findall(r'data-table="([^"]*)"', built.html)}
    assert {"verdicts"} | on_page - {"phases"} <= names
    assert len([name for name in names if name.startswith("phases-")]) == built.html.count('data-table="phases"')
    assert {path.stem for path in folder.glob("tables/*.tex")} == {path.stem for path in folder.glob("tables/*.csv")}


def test_the_claims_are_one_picture_with_their_intervals(written, built):
    folder, _ = written
    svg = next(folder.glob("figures/claims-*.svg")).read_text()
    claims = [claim.claim for claim in read_json(built.folder / "claims.json", ClaimsFile).claims if claim.seeds]
    assert len(claims) == 6
    lines = [line for claim in claims for line in textwrap.wrap(claim, 58)]
    assert all(f">{line}</" in svg for line in lines)


def test_a_long_claim_is_broken_into_lines_because_a_picture_cuts_what_is_beyond_its_edge(built):
    data, words = built.made.report_data(built.folder), load_words("en")
    overview = claims.claims_overview(built.study, data, words)
    long = "Noise in training on every operator of every layer raises accuracy at 10 % noise in evaluation"
    rows = [
        row if row.strip is None else dataclasses.replace(row, claim=f"{long} {i}")
        for i, row in enumerate(overview.rows)
    ]
    panel = claims_panel(dataclasses.replace(overview, rows=rows), data.comparisons, words)
    assert ">Noise in training on every operator of every layer raises</" in vl_convert.vegalite_to_svg(
        panel.chart.to_dict()
    )


def test_figures_are_in_colours_of_their_own_with_a_legend(written):
    folder, _ = written
    svg = next(folder.glob("figures/robustness-1-*.svg")).read_text()
    assert "var(--" not in svg
    assert "#0072b2" in svg or "#d55e00" in svg
    assert ">E5b</text>" in svg


def texts_of(folder, pattern):
    svg = next(folder.glob(f"figures/{pattern}.svg")).read_text()
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_figures_are_as_wide_as_the_columns_of_a_journal_and_keep_their_proportions(written):
    folder, _ = written
    widths = {}
    for path in folder.glob("figures/*.svg"):
        width, height, box = re.search(
            r'width="([\d.]+)mm" height="([\d.]+)mm" viewBox="([^"]+)"', path.read_text()
        ).groups()
        widths[path.stem] = float(width)
        _, _, pixels, pixels_high = map(float, box.split())
        assert float(height) / float(width) == pytest.approx(pixels_high / pixels, rel=1e-3)
        media = re.search(rb"/MediaBox \[([^\]]*)\]", path.with_suffix(".pdf").read_bytes())[1].split()
        assert [float(side) / 72 * 25.4 for side in media[2:]] == pytest.approx([float(width), float(height)], abs=0.02)
    assert set(widths.values()) == {89, 183}
    assert widths["claims-1-claims-and-verdicts"] == 183
    assert widths["accuracy-1-without-noise"] == 89


def test_figures_have_no_gridlines_and_those_of_a_group_have_letters(written):
    folder, _ = written
    figures = list(folder.glob("figures/*.svg"))
    assert any("role-axis-label" in path.read_text() for path in figures)
    assert not [path for path in figures if "role-axis-grid" in path.read_text()]
    letters = [texts_of(folder, f"accuracy-{number}-*")[-1] for number in (1, 2, 3)]
    assert letters == ["a", "b", "c"]
    assert "a" not in texts_of(folder, "claims-*")


def test_a_legend_names_what_is_drawn_and_nothing_else(written):
    """The difference to the baseline has no baseline, and without AQN there is no sigma."""
    folder, _ = written
    arms = {"pretrained", "baseline", "E5", "E5b", "srdd_guided"}
    assert arms & set(texts_of(folder, "robustness-1-*")) == {"E5", "E5b", "srdd_guided"}
    assert arms & set(texts_of(folder, "robustness-2-*")) == arms
    assert arms & set(texts_of(folder, "training-*-aqn-sigma-*")) == {"E5b", "srdd_guided"}


def test_captions_have_the_numbers_of_every_figure(written, built):
    folder, _ = written
    captions = (folder / "figures" / "captions.md").read_text().replace("\u00a0", " ")
    size = "(Arms: 4, seeds per arm: 2, optimiser steps: 60, questions: 200, noise levels: 3)"
    assert all(caption.endswith(size) for caption in captions.strip().split("\n\n"))
    assert all(f"{path.stem}: " in captions.replace("\\_", "_") for path in folder.glob("figures/*.svg"))
    arm = built.study.arms["E5b"]
    assert f"E5b: {arm.description}" in next(text for text in captions.split("\n\n") if "robustness-1" in text)
    claims = captions.split("\n\n")[0]
    rows = pl.read_parquet(built.folder / "comparisons.parquet")
    assert claims.count("2 seeds, 200 questions") == len(rows) == 6
    exact = [f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}" for p in rows["p_value"] if p >= 0.001]
    assert exact
    assert all(text in claims for text in exact)


def test_verdicts_come_with_their_reasons(written, built):
    folder, _ = written
    rows = list(csv.reader((folder / "tables" / "claims-verdicts.csv").open()))
    assert rows[0][:3] == ["group", "claim", "verdict"]
    assert len(rows) == 7
    assert all(row[5] for row in rows[1:])


def test_latex_is_escaped(written):
    folder, _ = written
    text = (folder / "tables" / "claims-arms.tex").read_text()
    assert "\\begin{tabular}{llp{7cm}rrr}" in text
    assert "srdd\\_guided" in text
    assert "5 \\% relative noise" in text
    verdicts = (folder / "tables" / "claims-verdicts.tex").read_text()
    assert "\\begin{tabular}{lllrrp{7cm}}" in verdicts, "sentences are broken into lines"
    assert "$-$" in verdicts
    assert not [path for path in folder.glob("tables/*.tex") if "−" in path.read_text().partition("\n")[2]]
    assert all(line.count("&") == 5 for line in verdicts.splitlines() if line.endswith("\\\\"))


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_tables_compile(written, tmp_path):
    folder, _ = written
    tables = sorted((folder / "tables").glob("*.tex"))
    assert len(tables) > 10
    inputs = "\n\n".join(f"\\input{{{path}}}" for path in tables)
    packages = "\\usepackage{booktabs,longtable}"
    (tmp_path / "all.tex").write_text(
        f"\\documentclass{{article}}\n{packages}\n\\begin{{document}}\n{inputs}\n\\end{{document}}\n"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_chinese_titles_do_not_overwrite_each_other(built, tmp_path):
    data = built.made.report_data(built.folder)
    paths = export_paper(built.study, data, load_words("zh"), tmp_path, ["svg"], [])
    assert len(set(paths)) == len(paths) == len(list(tmp_path.glob("figures/*")))


def test_a_cell_that_a_spreadsheet_would_run_is_inert():
    from aqnpipe.report.export import _inert

    assert _inert("=1+1") == "'=1+1"
    assert _inert("@SUM(A1)") == "'@SUM(A1)"
    assert [_inert(cell) for cell in ("+2.4", "−0.3 to +1.2", "-5", "baseline")] == [
        "+2.4",
        "−0.3 to +1.2",
        "-5",
        "baseline",
    ]


def test_measured_machines_and_evaluations_on_machines_are_written_too(built, tmp_path):
    """No file is written twice, although both machines have pictures of the same titles."""
    data = built.made.report_data(built.folder)
    measured = parity([operator("q_proj", 0, relative_rms=0.002), operator("lm_head", relative_rms=0.001)])
    parities = tuple(
        MeasuredMachine("base", name, f"results/parity/base/{name}.json", measured) for name in ("device", "target")
    )
    row = {"model": "base", "arm": "E5b", "step": 1, "machine": "device", "noise_level": 0.0, "num_questions": 10}
    missing = dict.fromkeys(set(MachineDifferenceTable.to_schema().columns) - row.keys())
    machines = pl.DataFrame([row | missing | {"problem": "only a test"}])
    both = dataclasses.replace(data, parities=parities, machines=machines)
    without = export_paper(built.study, data, load_words("en"), tmp_path / "without", ["svg"], ["csv"])
    paths = export_paper(built.study, both, load_words("en"), tmp_path / "with", ["svg"], ["csv"])
    added = {path.name for path in paths} - {path.name for path in without}
    assert added == {
        *("machines-machines.csv", "scale-1-machine-scale.csv", "scale-2-machine-scale.csv"),
        *("scale-1-1-error-of-the-machine-by-layer.svg", "scale-2-1-error-of-the-machine-by-layer.svg"),
    }
