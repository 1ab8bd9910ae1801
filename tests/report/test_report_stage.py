from html.parser import HTMLParser

import altair as alt
import polars as pl
import pytest

from aqnpipe.artifacts import ClaimsFile, ComparisonTable, read_json, read_table, write_json, write_table
from aqnpipe.config.arm import Arm
from aqnpipe.config.study import Study
from aqnpipe.errors import DataError
from aqnpipe.noise.receipt import Receipt
from aqnpipe.report import numbers
from aqnpipe.report.stage import build_report
from aqnpipe.report.svg import render_svg, series_colour
from aqnpipe.statistics.stage import ComparisonOutputs, compare

HOSTILE = '</title></style><script>alert(1)</script>"><img src=x onerror=alert(2)>'
MAX_BYTES = 300_000


class Page(HTMLParser):
    """Collects tags, attributes, table rows and text of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.rows, self.text = [], [], [], []
        self.policy, self.in_cell = "", False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"]
        if tag == "tr":
            self.rows.append([])
        self.in_cell = tag in ("td", "th")
        if self.in_cell:
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self.in_cell = False

    def handle_data(self, data):
        self.text.append(data)
        if self.in_cell:
            self.rows[-1][-1] += data.strip("\n")

    def row(self, *first_cells):
        return next(row for row in self.rows if tuple(row[: len(first_cells)]) == first_cells)

    @property
    def whole_text(self):
        return " ".join(" ".join(self.text).split())


def write_report(synthetic, folder, study, num_questions=200):
    made = synthetic.write_study(folder, study, num_questions)
    compare(
        study,
        made.evaluations,
        ComparisonOutputs(folder / "accuracy.parquet", folder / "comparisons.parquet", folder / "claims.json"),
    )
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def made(synthetic, folder):
    return write_report(synthetic, folder, synthetic.study())


@pytest.fixture(scope="module")
def html(made, folder):
    build_report(made.study, made.report_inputs(folder), folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def test_nothing_is_loaded_and_nothing_runs(page, html):
    assert page.policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert not {"script", "link", "img", "iframe", "object", "embed", "use", "image", "foreignObject"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href", "xlink:href", "action"):
            assert value.startswith("#"), (tag, name, value)
    assert "http://" not in html
    assert "https://" not in html
    assert "url(" not in html


def test_size_and_language(page, html):
    assert len(html.encode()) < MAX_BYTES
    assert ("html", "lang", "en") in page.attributes
    assert html.startswith("<!DOCTYPE html>")


def test_same_artifacts_same_bytes(made, folder, html, tmp_path):
    build_report(made.study, made.report_inputs(folder), tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == html


def test_links_lead_to_sections(page):
    ids = {value for _, name, value in page.attributes if name == "id"}
    links = {value[1:] for _, name, value in page.attributes if name == "href"}
    assert links
    assert links <= ids


def test_claims_are_shown_as_judged(page, folder):
    claims = read_json(folder / "claims.json", ClaimsFile)
    assert "Of 6 claims:" in page.whole_text
    for claim in claims.claims:
        assert claim.claim in page.whole_text
        assert " ".join(claim.sentence.split()) in page.whole_text
    shown = [value for tag, name, value in page.attributes if tag == "li" and name == "class"]
    assert shown == [claim.verdict for claim in claims.claims]


def test_comparison_numbers_are_those_of_the_artifact(page, folder):
    for row in read_table(folder / "comparisons.parquet", ComparisonTable).iter_rows(named=True):
        cells = page.row(row["comparison_id"])
        assert cells[2:11] == [
            numbers.percent(row["treatment_accuracy"]),
            numbers.percent(row["control_accuracy"]),
            numbers.points(row["difference"]),
            f"{numbers.points(row['ci_low'])} to {numbers.points(row['ci_high'])}",
            numbers.p_value(row["p_value"]),
            numbers.p_value(row["p_holm"]),
            numbers.percent(row["minimum_detectable_difference"]),
            str(row["num_seeds"]),
            numbers.count(row["num_questions"]),
        ]


def test_paired_tables_are_those_of_the_artifact(page, folder):
    for claim in read_json(folder / "claims.json", ClaimsFile).claims:
        for seed in claim.seeds:
            counts = (seed.both_correct, seed.only_treatment, seed.only_control, seed.neither)
            assert page.row(str(seed.seed), str(seed.noise_seed), *map(str, counts))


def test_accuracies_are_those_of_the_artifact(page, folder):
    rows = pl.read_parquet(folder / "accuracy.parquet")
    for row in rows.iter_rows(named=True):
        cells = page.row(row["arm"], str(row["seed"]), str(row["step"]), numbers.noise_level(row["noise_level"]))
        assert cells[4] == numbers.percent(row["accuracy"])
        assert cells[5] == f"{numbers.percent(row['ci_low'])} to {numbers.percent(row['ci_high'])}"


def test_training_curves_have_their_numbers(page, made):
    metrics = pl.read_parquet(made.runs[0].metrics)
    assert numbers.metric(metrics["reward_mean"][9]) in page.row("10")[1]


def test_receipts_show_asked_and_measured(page, made):
    receipt = read_json(next(run.receipt for run in made.runs if run.arm == "E5b"), Receipt)
    cells = page.row("E5b seed 0")
    assert cells[1:3] == ["in order", "0.05"]
    assert float(cells[3]) == pytest.approx(0.05, rel=0.01)
    assert cells[6] == str(len(receipt.weight_syncs))
    assert cells[9] == "yes"
    assert page.row("baseline seed 0")[2:4] == ["none", "exactly none"]
    measured, elements = receipt.measured_scale("rollout")
    assert [numbers.scale(measured), numbers.count(elements)] in [
        [row[2], row[5]] for row in page.rows if row[0] == "rollout"
    ]
    assert page.row("E5 seed 1 step 60", "in order", "0")[3] == "exactly none"


def test_diagnosis_is_judged_against_the_simulated_fault(page):
    assert page.row("device", "none")[2:5] == ["healthy", "–", "right"]
    assert page.row("target")[2:5] == ["fault, layer 3", "dead zone", "right"]


def test_every_figure_has_a_picture_with_a_name(page):
    named = [value for tag, name, value in page.attributes if tag == "svg" and name == "aria-label"]
    assert len(named) >= 3 + 5 + 4 + 6
    assert all(named)


def test_a_refused_receipt_is_shown_as_refused(synthetic, tmp_path):
    made = write_report(synthetic, tmp_path, synthetic.study())
    run = next(one for one in made.runs if one.arm == "E5")
    receipt = read_json(run.receipt, Receipt)
    write_json(run.receipt, receipt.model_copy(update={"cells": ()}))
    build_report(made.study, made.report_inputs(tmp_path), tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.row("E5 seed 0")[1] == "refused"
    assert "noise was asked for but never reached layers" in page.whole_text


def test_one_seed_is_said_to_show_nothing_about_arms(synthetic, tmp_path):
    study = synthetic.study(seeds=[0], machines={"device": {}})
    made = write_report(synthetic, tmp_path, study)
    build_report(study, made.report_inputs(tmp_path), tmp_path / "report.html")
    text = Page((tmp_path / "report.html").read_text(encoding="utf-8")).whole_text
    assert "One training run per arm" in text
    assert "dotted rule marks the simulated fault" not in text


def test_hostile_texts_stay_text(synthetic, tmp_path):
    study = synthetic.study()
    made = write_report(synthetic, tmp_path, study)
    claims = read_json(tmp_path / "claims.json", ClaimsFile)
    hostile_claims = [one.model_copy(update={"claim": HOSTILE, "sentence": HOSTILE}) for one in claims.claims]
    write_json(tmp_path / "claims.json", claims.model_copy(update={"claims": tuple(hostile_claims)}))
    comparisons = pl.read_parquet(tmp_path / "comparisons.parquet").with_columns(method=pl.lit(HOSTILE))
    write_table(tmp_path / "comparisons.parquet", comparisons, ComparisonTable)
    content = study.model_dump()
    content["config"]["report"] = {"title": HOSTILE, "question": HOSTILE}
    content["arms"]["E5"]["description"] = HOSTILE
    build_report(Study.model_validate(content), made.report_inputs(tmp_path), tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert not {"script", "img"} & set(page.tags)
    assert page.tags.count("title") == page.tags.count("style") == 1
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert page.whole_text.count("<script>alert(1)</script>") >= 2 + 2 * len(claims.claims)


def test_hostile_arm_names_stay_text_inside_figures():
    chart = alt.Chart(pl.DataFrame({"arm": [HOSTILE], "x": [0.5512]})).mark_point().encode(x="x:Q", y="arm:N")
    page = Page(str(render_svg(chart, HOSTILE)))
    assert set(page.tags) <= {"svg", "g", "path", "line", "text", "rect"}
    assert ("svg", "aria-label", HOSTILE) in page.attributes


def test_pictures_round_positions_but_never_labels():
    rows = pl.DataFrame({"x": [1.0], "label": ['0.12345 #fe0101 width="0.98765"']})
    chart = alt.Chart(rows).mark_text(color=series_colour(1)).encode(x="x:Q", text="label:N")
    svg = str(render_svg(chart, "picture"))
    assert "0.12345 #fe0101" in svg
    assert "0.98765" in svg
    assert 'fill="var(--c1)"' in svg
    assert "#fe0101" not in svg.replace("0.12345 #fe0101", "")


def test_a_damaged_artifact_is_one_clear_error(synthetic, tmp_path):
    made = write_report(synthetic, tmp_path, synthetic.study())
    (tmp_path / "claims.json").write_text("{}")
    with pytest.raises(DataError, match=r"claims\.json: alpha"):
        build_report(made.study, made.report_inputs(tmp_path), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_arms_of_two_models_get_figures_each(synthetic, tmp_path, made, folder):
    accuracy = pl.read_parquet(folder / "accuracy.parquet")
    both = pl.concat([accuracy, accuracy.with_columns(model=pl.lit("large"))])
    both.write_parquet(tmp_path / "accuracy.parquet")
    content = made.study.model_dump()
    content["config"]["models"]["large"] = {"source": "other/model"}
    content["arms"]["E5"] = Arm(description="wider", model="large").model_dump()
    for name in ("comparisons.parquet", "claims.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    build_report(Study.model_validate(content), made.report_inputs(tmp_path), tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "Model large (other/model)" in page.whole_text
