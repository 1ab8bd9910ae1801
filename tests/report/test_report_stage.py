"""The page as text: its content, what it must never do, and odd inputs."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import altair as alt
import polars as pl
import pytest

import aqnpipe
from aqnpipe.artifacts.base import statement
from aqnpipe.artifacts.comparisons import AccuracyTable, ClaimsFile
from aqnpipe.artifacts.files import read_json, write_json, write_table
from aqnpipe.config.arm import Arm
from aqnpipe.config.study import Study
from aqnpipe.errors import DataError
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.report import numbers, tables
from aqnpipe.report.charts import SeriesKey
from aqnpipe.report.claims import answer_text
from aqnpipe.report.markup import described, render_svg, series_colour, small_dot
from aqnpipe.report.stage import model_figures
from aqnpipe.report.training import MAX_DOTS, training_panels
from aqnpipe.report.words import load_words

PACKAGE = Path(aqnpipe.__file__).parent
MAX_BYTES = 400_000
MARKUP = '</title></style><script>alert(1)</script>"><img src=x onerror=alert(2)>'


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
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.in_cell = tag in ("td", "th") or (tag in ("a", "small") and self.in_cell)

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


@pytest.fixture(scope="module")
def page(built):
    return Page(built.html)


def assert_inert(page, html):
    """Nothing is loaded, and nothing runs but the page's own style and script."""
    style = html.split("<style>")[1].split("</style>")[0]
    script = html.rsplit("<script>", 1)[1].split("</script>")[0]
    first, second = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    assert page.policy == (
        f"default-src 'none'; style-src 'sha256-{first}'; script-src 'sha256-{second}'; base-uri 'none'; "
        "form-action 'none'"
    )
    assert page.tags.count("script") == 1
    assert script == (PACKAGE / "report" / "templates" / "report.js").read_text(encoding="utf-8").strip()
    inert = {"link", "img", "iframe", "object", "embed", "use", "image", "foreignobject", "form", "base"}
    assert not inert & set(page.tags)
    assert page.tags.count("style") == 1
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        assert name != "style"
        if name in ("src", "href", "xlink:href", "action"):
            assert value.startswith("#"), (tag, name, value)
    assert "url(" not in style


def test_nothing_is_loaded_and_nothing_runs(page, built):
    assert_inert(page, built.html)


def test_size_and_language(page, built):
    assert len(built.html.encode()) < MAX_BYTES
    assert ("html", "lang", "en") in page.attributes
    assert built.html.lstrip().startswith("<!DOCTYPE html>")


def test_same_artifacts_same_bytes(built, tmp_path):
    again = built.build(into=tmp_path)
    names = ("report.html", "summary.md", "training.parquet", "layers.csv", "flips.parquet")
    assert all((again.folder / name).read_bytes() == (built.folder / name).read_bytes() for name in names)


def test_links_have_targets_and_names_are_unique(page):
    ids = [value for _, name, value in page.attributes if name == "id"]
    links = {value[1:] for _, name, value in page.attributes if name == "href" and value[0] == "#"}
    assert links
    assert links <= set(ids)
    assert len(ids) == len(set(ids))


def test_every_figure_has_a_name_and_its_numbers(page, built):
    named = [value for tag, name, value in page.attributes if tag == "svg" and name == "aria-label"]
    assert len(named) >= 6 + 3 + 2 + 4 + 4 + 1
    assert all(named)
    for section in ("accuracy", "robustness", "training", "diagnosis", "costs"):
        part = built.html.split(f'<section id="{section}">')[1].split("</section>")[0]
        assert part.count("<svg") >= 1
        assert "<table" in part.split("</figure>")[-1]


def test_receipts_show_requested_and_measured(page, built):
    receipt = read_json(next(run.receipt for run in built.made.runs if run.arm == "E5b"), Receipt)
    cells = page.row("E5b seed 0")
    assert cells[1:3] == ["accepted", "0.05"]
    assert float(cells[3]) == pytest.approx(0.05, rel=0.01)
    squares = sum((cell.measured / cell.requested) ** 2 * cell.measured_elements for cell in receipt.cells)
    elements = sum(cell.measured_elements for cell in receipt.cells)
    assert float(cells[4].replace("−", "-")) == pytest.approx(100 * ((squares / elements) ** 0.5 - 1), abs=0.006)
    assert cells[6:8] == [f"{elements:,}", str(len(receipt.weight_syncs))]
    assert cells[10] == "yes"
    assert page.row("baseline seed 0")[2:4] == ["none", "exactly none"]
    measured, elements = receipt.measured_scale("rollout")
    assert [numbers.scale(measured), numbers.count(elements)] in [
        [row[2], row[5]] for row in page.rows if row[0] == "rollout"
    ]
    assert page.row("E5 seed 1 step 60", "accepted", "none")[3] == "exactly none"


def test_diagnosis_is_judged_against_the_simulated_fault(page):
    assert page.row("device", "none")[2:4] == ["healthy", "right"]
    assert page.row("target")[2:4] == ["dead zone, layer 3", "right"]


def test_a_refused_receipt_is_shown_as_refused(make_report, synthetic, tmp_path):
    built = make_report(tmp_path, synthetic.study(arms=["E5"], comparisons=[]))
    run = built.made.runs[0]
    receipt = read_json(run.receipt, Receipt)
    write_json(
        run.receipt, receipt.model_copy(update={"rows": tuple(row for row in receipt.rows if row.error is None)})
    )
    page = Page(built.build().html)
    assert page.row("E5 seed 0")[1] == "invalid"
    assert page.row("E5 seed 1")[1] == "accepted"
    assert "noise was requested but never reached layers" in page.whole_text


def test_one_seed_cannot_show_effects_of_arms(make_report, synthetic, tmp_path):
    study = synthetic.study(seeds=[0], machines={"device": {}}, arms=["baseline", "E5"], comparisons=[])
    text = Page(make_report(tmp_path, study).html).whole_text
    assert "One training run per arm" in text
    assert "dotted line marks the layer of the simulated fault" not in text


def test_hostile_texts_stay_text(hostile):
    page = Page(hostile.html)
    assert_inert(page, hostile.html)
    assert page.whole_text.count("<script>alert(1)</script>") > 20
    assert "{{ 7 * 7 }}" in page.whole_text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", hostile.html)
    assert len(hostile.html.encode()) < 2 * MAX_BYTES


def test_hostile_arm_names_stay_text_inside_figures():
    name = MARKUP + "\u202e\x1b[31m\x00"
    chart = alt.Chart(pl.DataFrame({"arm": [name], "x": [0.5512]})).mark_point().encode(x="x:Q", y="arm:N")
    page = Page(str(render_svg(chart, name)))
    assert set(page.tags) <= {"svg", "g", "path", "line", "text", "rect", "circle"}
    assert ("svg", "aria-label", MARKUP + "⟨U+202E⟩⟨U+001B⟩[31m⟨U+0000⟩") in page.attributes
    assert not re.search(r"[\x00\x1b\u202e]", page.whole_text)


def test_marks_tell_their_values_as_text_and_name_their_series():
    table = pl.DataFrame({"x": [1.0, 2.0], "about": [described("E5", MARKUP), described("E5b", "0.12345")]})
    svg = str(render_svg(alt.Chart(table).mark_point(filled=True).encode(x="x:Q", description="about:N"), "picture"))
    page = Page(svg)
    assert page.tags.count("title") == 2
    assert {"script", "img"}.isdisjoint(page.tags)
    assert [value for _, name, value in page.attributes if name == "data-s"] == ["E5", "E5b"]
    assert "0.12345" in page.whole_text
    dots = table.with_columns(about=pl.Series([small_dot("E5"), small_dot("E5")]))
    chart = alt.Chart(dots).mark_point(filled=True, color=series_colour(1)).encode(x="x:Q", description="about:N")
    joined = str(render_svg(chart, "picture"))
    assert joined.count('data-s="E5"') == 1
    assert joined.count("h0") == 2


def test_pictures_round_positions_but_never_labels():
    rows = pl.DataFrame({"x": [1.0], "label": ['0.12345 width="0.98765"']})
    chart = alt.Chart(rows).mark_text(color=series_colour(1)).encode(x="x:Q", text="label:N")
    svg = str(render_svg(chart, "picture"))
    assert "0.12345" in svg
    assert "0.98765" in svg
    assert 'fill="var(--c1)"' in svg


def test_a_chart_of_more_rows_than_altair_takes_is_drawn_whole():
    rows = pl.DataFrame({"x": range(6000), "y": [0.5] * 6000})
    svg = render_svg(alt.Chart(rows).mark_point().encode(x="x:Q", y="y:Q"), "many")
    assert svg.count("translate(") >= 6000
    assert alt.data_transformers.options == {}


def test_long_training_is_thinned_and_keeps_its_last_step():
    steps = 400
    rows = pl.DataFrame({"step": range(1, steps + 1)}).with_columns(
        *(pl.lit(value).alias(name) for name, value in {"reward_mean": 0.5, "sigma_requested": 0.05}.items()),
        kl=pl.lit(None, pl.Float64),
        sigma_measured=pl.lit(0.05),
        validation_accuracy=pl.when(pl.col("step") == steps).then(0.5),
    )
    runs = pl.concat(rows.with_columns(arm=pl.lit("E5"), seed=pl.lit(seed, pl.Int64)) for seed in range(60))
    assert len(runs) > 5 * MAX_DOTS
    panels = training_panels(runs, [SeriesKey("E5", 1)], load_words("en"))
    assert [panel.title for panel in panels] == [
        "Reward, mean of 7 steps",
        "Validation accuracy",
        "AQN sigma, requested and measured",
    ]
    svg = str(panels[0].svg)
    assert "400" in re.findall(r">(\d+)</text>", svg)
    # 400 steps of 60 runs: 50 dots for each, the mean as one line of 58 points, and no band, because all seeds agree.
    assert svg.count("h0") == 60 * 50 <= MAX_DOTS
    lines = re.findall(r'd="(M[^"]*)"[^>]*stroke="var\(--c1\)"[^>]*data-s="E5"', svg)
    assert [line.count(",") for line in lines] == [58]
    assert "E5, step 400. Reward, mean of 7 steps: 0.5, seeds 0.5 to 0.5" in svg


@pytest.mark.parametrize(("peak", "labels"), [(0.9, False), (90.0, True)])
def test_kl_gets_decades_where_a_peak_would_hide_the_rest(peak, labels):
    """KL 0.1 to 0.5, 0 at the start, and a peak."""
    rows = pl.DataFrame({"step": range(1, 41), "kl": [0.0] * 5 + [0.1, 0.2, 0.5] * 10 + [0.1] * 4 + [peak]})
    runs = rows.with_columns(
        arm=pl.lit("E5"),
        seed=pl.lit(0, pl.Int64),
        reward_mean=pl.lit(0.5),
        sigma_requested=pl.lit(0.0),
        sigma_measured=pl.lit(0.0),
        validation_accuracy=pl.lit(None, pl.Float64),
    )
    kl = str(training_panels(runs, [SeriesKey("E5", 1)], load_words("en"))[1].svg)
    assert (re.search(r">0\.1</text>.*>100</text>|>100</text>.*>0\.1</text>", kl) is not None) is labels


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("claims.json", "{}", r"claims\.json: no checksum in it"),
        ("accuracy.parquet", "no table", r"accuracy\.parquet: not what was written with \S*claims\.json"),
    ],
)
def test_a_damaged_artifact_is_one_clear_error(make_report, synthetic, tmp_path, name, text, message):
    built = make_report(tmp_path, synthetic.study(arms=["baseline"], seeds=[0], comparisons=[]))
    before = built.page.read_bytes()
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        built.build()
    assert built.page.read_bytes() == before


def test_arms_of_two_models_get_figures_each(built, tmp_path):
    accuracy = pl.read_parquet(built.folder / "accuracy.parquet")
    content = built.study.model_dump()
    content["config"]["models"]["large"] = {"source": "other/model"}
    content["arms"]["E5"] = Arm(description="wider", model="large").model_dump()
    for path in built.folder.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    both = pl.concat([accuracy, accuracy.with_columns(model=pl.lit("large"))])
    write_table(tmp_path / "accuracy.parquet", both, AccuracyTable)
    claims = read_json(tmp_path / "claims.json", ClaimsFile)
    write_json(tmp_path / "claims.json", claims.model_copy(update={"tables_sha256": {}}))
    study = Study.model_validate(content)
    page = Page(built.build(study, built.made.report_data(tmp_path, study), tmp_path).html)
    assert "Model large (other/model)" in page.whole_text
    assert "Model base (some/model)" in page.whole_text


def test_named_noises_are_categories_beside_the_curves(built, synthetic):
    evaluation = {"noise_seeds": [0], "noises": {"fp4": "w4a16_nvfp4"}, "max_response_tokens": 40, "batch_size": 250}
    data = built.made.report_data(built.folder)
    clean = data.accuracy.filter(pl.col("noise_level") == 0)
    named = clean.with_columns(noise_level=pl.lit(1.0), accuracy=pl.lit(0.25), ci_low=pl.lit(0.2), ci_high=pl.lit(0.3))
    at_name = data.differences.filter(pl.col("noise_level") == 0).with_columns(
        noise_level=pl.lit(1.0), difference=pl.lit(-0.125), ci_low=pl.lit(-0.25), ci_high=pl.lit(0.0)
    )
    more = replace(data, accuracy=pl.concat([data.accuracy, named]), differences=pl.concat([data.differences, at_name]))
    words = load_words("en", {1.0: "fp4"})
    figure = model_figures(synthetic.study(evaluation=evaluation), more, "base", words, lambda *run: "")["robustness"]
    without = model_figures(built.study, data, "base", load_words("en"), lambda *run: "")["robustness"]
    assert "Named noises have no place on an axis of scales and stand apart" in figure.caption
    assert figure.caption.endswith("without noise: fp4.")
    assert "axis of scales" not in without.caption
    differences, curves, names = figure.groups[0].panels
    assert curves.svg == without.groups[0].panels[1].svg, "a named noise has no place on the axis of scales"
    assert "E5 minus baseline at fp4 noise: −12.5 points (−25.0 to +0.0)" in differences.svg
    assert names.title == "Accuracy under named noises"
    labels = re.findall(r"<text[^>]*>([^<]+)</text>", names.svg)
    assert {"0\N{NO-BREAK SPACE}%", "fp4"} <= set(labels)
    assert "100\N{NO-BREAK SPACE}%" not in labels
    assert "E5, fp4: mean 25.0 %, seeds 25.0 to 25.0" in names.svg
    assert any(row.cells[:2] == ("baseline", "fp4") for row in figure.tables[-1].rows)


def test_tables_of_curves_are_left_out_with_a_note(built, monkeypatch):
    monkeypatch.setattr(tables, "MAX_CURVE_COLUMNS", 3)
    data = built.made.report_data(built.folder)
    figure = model_figures(built.study, data, "base", load_words("en"), lambda *run: "")["training"]
    assert figure.caption.endswith("8 runs are too many for tables of the curves; training.csv has their values.")
    assert not [table for table in figure.tables if table.name.startswith("curve-")]
    assert "too many for tables" not in built.html


def test_claims_are_shown_as_judged(page, built):
    for claim in read_json(built.folder / "claims.json", ClaimsFile).claims:
        assert claim.claim in page.whole_text
        assert " ".join(load_words("en").all_of(claim.statements).split()) in page.whole_text


@pytest.mark.parametrize(("chinese", "shown"), [("有噪声更好", "有噪声更好"), (None, "E5 is better 〔未提供中文〕")])
def test_a_chinese_answer_has_no_english_claim_without_a_mark(built, chinese, shown):
    claims = read_json(built.folder / "claims.json", ClaimsFile)
    reason = "E5 seed 0 is missing"
    primary = claims.claims[0].model_copy(
        update={
            "role": "primary",
            "claim": "E5 is better",
            "claim_zh": chinese,
            "verdict": "invalid",
            "invalid_kind": "missing",
            "invalid_reason": reason,
        }
    )
    answer = statement("answer.invalid", claim="E5 is better", reason=reason)
    refused = claims.model_copy(update={"claims": (primary, *claims.claims[1:]), "answer": answer})
    assert answer_text(refused, load_words("zh")) == f"尚不清楚是否{shown}。英文原因：{reason}。"
    assert answer_text(refused, load_words("en")) == f"Not known whether E5 is better: {reason}."
