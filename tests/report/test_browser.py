"""The page in a real browser: requests, numbers, and use by keyboard, phone, printer and screen reader."""

import re
from pathlib import Path
from xml.etree import ElementTree

import polars as pl
import pytest

from aqnpipe.artifacts.comparisons import ClaimsFile
from aqnpipe.artifacts.files import read_json

AXE = "axe_playwright_python"
ARMS = ["baseline", "E5", "E5b", "srdd_guided"]


class Visit:
    """A page opened in the browser, with its console messages and requests."""

    def __init__(self, browser, path, **options):
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        self.page = self.context.new_page()
        self.messages, self.requests = [], []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.messages.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(Path(path).as_uri())

    def open_all(self):
        self.page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true })")

    def rows(self, table):
        """Cells of the body of a table, as shown."""
        return self.page.eval_on_selector_all(
            f"table[data-table='{table}'] tbody tr", "rows => rows.map(row => [...row.cells].map(c => c.innerText))"
        )

    def width_needed(self):
        return self.page.evaluate("document.documentElement.scrollWidth")


@pytest.fixture
def visit(browser):
    """Function (path, options) -> Visit; everything is closed afterwards."""
    visits = []

    def open_page(path, **options):
        visits.append(Visit(browser, path, **options))
        return visits[-1]

    yield open_page
    for opened in visits:
        opened.context.close()


def number(text):
    """The number that a cell shows."""
    return float(text.replace("−", "-").replace(",", "").replace("%", "").replace("\u00a0", ""))


def interval(text):
    return [number(part) for part in text.split(" to ")]


def shows(text, fraction, digits=1):
    """Whether `text` is 100 * fraction rounded to `digits`, or a dash if there is no fraction."""
    if fraction is None:
        return text == "–"
    return abs(number(text) - 100 * fraction) <= 0.5 * 10**-digits + 1e-9


def claims_of(built):
    return read_json(built.folder / "claims.json", ClaimsFile).claims


def shows_p(text, p):
    if p is None:
        return text == "–"
    if p < 0.001:
        return p < 1e-15 if text.startswith("<") else abs(float(text.replace("−", "-")) / p - 1) < 0.051
    return abs(number(text) - p) <= (0.0005 if p < 0.1 else 0.005) + 1e-12


@pytest.mark.parametrize(
    "options", [{"color_scheme": "light"}, {"color_scheme": "dark"}, {"java_script_enabled": False}]
)
def test_the_page_logs_nothing_and_requests_nothing(visit, built, options):
    seen = visit(built.page, **options)
    assert seen.messages == []
    assert seen.requests == [built.page.as_uri()]
    assert seen.page.locator("ol.claims > li").count() == 6
    assert seen.page.locator("table[data-table='arms'] tbody tr").count() == 5
    assert seen.page.locator("#answer h2").first.inner_text().startswith("Of 6 claims:")


def test_the_answer_the_arms_and_the_decided_claims_are_on_the_first_screen(visit, built):
    page = visit(built.page).page
    decided = page.locator("#claims > ol.claims > li")
    assert decided.count() == sum(claim.verdict != "not_shown" for claim in claims_of(built)) > 0
    for selector in (
        ".question",
        "#answer h2 >> nth=0",
        "#arm-srdd_guided",
        "#claims > ol.claims > li:last-child .amount",
    ):
        box = page.locator(selector).bounding_box()
        assert box["y"] + box["height"] <= 800, selector
    arms = page.locator("table[data-table='arms']").bounding_box()
    assert arms["y"] < decided.first.bounding_box()["y"], "arms are explained before they are used"
    assert page.locator(".limits li").last.bounding_box()["y"] < 1000


def test_open_claims_are_folded_and_nothing_else_is(visit, built):
    page = visit(built.page).page
    not_shown = [claim for claim in claims_of(built) if claim.verdict == "not_shown"]
    assert page.locator("details.open li").count() == len(not_shown) > 0
    assert not page.locator("details.open li").first.is_visible()
    page.locator("details.open > summary").click()
    assert page.locator("details.open li").first.is_visible()


@pytest.mark.parametrize("opened", [False, True])
def test_a_phone_scrolls_only_down(visit, built, opened):
    seen = visit(built.page, viewport={"width": 390, "height": 740})
    if opened:
        seen.open_all()
    assert seen.width_needed() == 390


def test_the_accuracies_of_all_levels_are_seen_on_a_phone_and_the_ranges_beside_it(visit, built):
    phone = visit(built.page, viewport={"width": 390, "height": 740}).page
    heads = phone.locator("table[data-table='arms'] thead th")
    assert heads.nth(3).inner_text().startswith("10")
    box = heads.nth(3).bounding_box()
    assert box["x"] + box["width"] <= 390
    wide = visit(built.page).page
    texts = [
        page.locator("table[data-table='arms']").locator("caption, #arm-E5b td:nth-child(4)").all_inner_texts()
        for page in (phone, wide)
    ]
    means = pl.read_parquet(built.folder / "accuracy.parquet").filter(
        pl.col("arm") == "E5b", pl.col("noise_level") == 0.1
    )["accuracy"]
    assert texts[0][0].endswith("mean over seeds")
    assert texts[1][0].endswith("mean over seeds (lowest to highest)")
    assert shows(texts[0][1], means.mean())
    assert texts[1][1].startswith(f"{texts[0][1]} (")


@pytest.mark.parametrize(
    ("scheme", "rules"), [("light", None), pytest.param("dark", ["color-contrast"], marks=pytest.mark.slow)]
)
def test_axe_finds_nothing(visit, built, scheme, rules):
    script = pytest.importorskip(AXE).__path__[0]
    seen = visit(built.page, color_scheme=scheme)
    if rules is None:
        seen.open_all()
    seen.page.evaluate(Path(script, "axe.min.js").read_text(encoding="utf-8"))
    options = {"resultTypes": ["violations"]} | ({"runOnly": rules} if rules else {})
    found = seen.page.evaluate("options => axe.run(options).then(result => result.violations)", options)
    assert [(violation["id"], violation["nodes"][0]["html"]) for violation in found] == []


def test_the_keyboard_skips_to_the_answer_and_opens_it(visit, built):
    page = visit(built.page).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('ol')?.className") == "claims":
            break
    page.keyboard.press("Enter")
    assert page.locator("#claims > ol.claims > li").first.locator(".sentence").is_visible()


@pytest.mark.slow
def test_the_keyboard_reaches_everything_in_order(visit, built):
    """Every control and every part that scrolls takes the focus, in the order of the page, and shows it."""
    seen = visit(built.page)
    page = seen.page
    seen.open_all()
    expected = page.eval_on_selector_all(
        "a[href], summary, button, input, select, [tabindex='0']",
        "all => all.filter(e => e.checkVisibility()).map((element, n) => (element.dataset.n = n))",
    )
    reached = []
    for _ in expected:
        page.keyboard.press("Tab")
        reached.append(page.evaluate("+document.activeElement.dataset.n"))
    assert reached == expected
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_parts_that_scroll_sideways_can_be_reached(visit, built):
    seen = visit(built.page, viewport={"width": 360, "height": 740})
    seen.open_all()
    stuck = seen.page.evaluate(
        """() => [...document.querySelectorAll('body *')].filter(element =>
        element.scrollWidth > element.clientWidth + 1
        && ['auto', 'scroll'].includes(getComputedStyle(element).overflowX)
        && element.tabIndex < 0 && !element.querySelector('a[href], button')).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert stuck == []


def test_print_shows_the_sentences_in_light_colours(visit, built):
    seen = visit(built.page, color_scheme="dark")
    dark = seen.page.evaluate("getComputedStyle(document.body).color")
    seen.page.emulate_media(media="print")
    assert seen.page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 33, 41)" != dark
    assert not seen.page.locator("nav").is_visible()
    sentences = seen.page.locator(".sentence")
    boxes = [sentences.nth(n).bounding_box() for n in range(sentences.count())]
    assert len(boxes) == 6
    assert all(box["height"] > 10 for box in boxes)
    assert seen.page.pdf(format="A4").startswith(b"%PDF")


def test_figures_follow_the_colour_scheme(visit, built):
    colours = [
        visit(built.page, color_scheme=scheme).page.evaluate(
            "getComputedStyle(document.querySelector('#accuracy .panels svg text')).fill"
        )
        for scheme in ("light", "dark")
    ]
    assert colours[0] != colours[1]


def test_the_answer_shows_the_numbers_of_the_artifacts(visit, built):
    page = visit(built.page).page
    rows = pl.read_parquet(built.folder / "comparisons.parquet")
    claims = read_json(built.folder / "claims.json", ClaimsFile).claims
    assert page.locator("ol.claims > li").count() == len(claims) == len(rows)
    page.locator("details.open > summary").click()
    for claim, row in zip(claims, rows.iter_rows(named=True), strict=True):
        item = page.locator("ol.claims > li", has_text=claim.claim)
        assert item.get_attribute("class") == claim.verdict
        assert item.locator(".claim").inner_text() == claim.claim
        assert shows(item.locator(".amount b").inner_text(), row["difference"])
        low, high = interval(item.locator(".amount").inner_text().split("\n")[-1])
        assert (low, high) == pytest.approx((100 * row["ci_low"], 100 * row["ci_high"]), abs=0.0500001)


def test_the_strips_are_drawn_to_the_scale_of_their_axis(visit, built):
    """Positions of ticks and dots, measured in the browser, against the differences in the artifact."""
    page = visit(built.page).page
    ticks = page.eval_on_selector_all(
        ".axis text",
        "all => all.map(t => [t.textContent, t.getBoundingClientRect()].map((v, i) => i ? v.x + v.width / 2 : v))",
    )
    (first, x0), (last, x1) = ticks[0], ticks[-1]
    per_pixel = (number(last) - number(first)) / (x1 - x0)
    page.locator("details.open > summary").click()
    drawn = page.eval_on_selector_all(
        "ol.claims > li",
        """all => all.map(item => { const svg = item.querySelector('.strip svg'), box = svg.getBoundingClientRect();
        const at = /^M([\\d.]+) 13h0$/.exec([...svg.querySelectorAll('path')].at(-1).getAttribute('d'))[1];
        return [item.querySelector('.claim').textContent, box.x + box.width * at / 100] })""",
    )
    table = pl.read_parquet(built.folder / "comparisons.parquet")
    texts = {claim.claim: claim.comparison_id for claim in claims_of(built)}
    for claim, x in drawn:
        difference = table.row(by_predicate=pl.col("comparison_id") == texts[claim], named=True)["difference"]
        assert number(first) + (x - x0) * per_pixel == pytest.approx(100 * difference, abs=0.25)


def test_accuracy_dots_are_drawn_to_the_scale_of_their_axis(visit, built):
    page = visit(built.page).page
    accuracy = pl.read_parquet(built.folder / "accuracy.parquet")
    panels = page.locator("#accuracy .panels > div")
    for panel, level in enumerate((0.0, 0.05, 0.1)):
        texts, dots = panels.nth(panel).evaluate(
            """div => {
                const middle = element => { const box = element.getBoundingClientRect(); return box.x + box.width / 2 }
                const circles = [...div.querySelectorAll('circle')]
                return [[...div.querySelectorAll('text')].map(t => [t.textContent, middle(t)]), circles.map(middle)]
            }"""
        )
        # Labels inside the axis are centred on their ticks; those at its ends may be moved inwards.
        ticks = [(float(text), x) for text, x in texts if text.isdigit()][1:-1]
        (v0, x0), (v1, x1) = ticks[0], ticks[-1]
        shown = sorted(v0 + (x - x0) * (v1 - v0) / (x1 - x0) for x in dots)
        expected = sorted(100 * accuracy.filter(pl.col("noise_level") == level)["accuracy"])
        assert shown == pytest.approx(expected, abs=0.35)


def test_every_accuracy_in_the_tables_is_the_artifacts(visit, built):
    seen = visit(built.page)
    seen.open_all()
    expected = pl.read_parquet(built.folder / "accuracy.parquet").rows(named=True)
    shown = seen.rows("accuracy")
    assert len(shown) == len(expected)
    for cells, row in zip(shown, expected, strict=True):
        assert cells[:3] == [row["arm"], str(row["seed"]), str(row["step"])]
        assert number(cells[3]) == pytest.approx(100 * row["noise_level"])
        assert interval(cells[5]) == pytest.approx([100 * row["ci_low"], 100 * row["ci_high"]], abs=0.0500001)
        names = (
            "accuracy",
            None,
            "accuracy_strict",
            "accuracy_last_number",
            "truncated_fraction",
            "parse_failure_fraction",
        )
        assert all(shows(cell, row[name]) for cell, name in zip(cells[4:10], names, strict=True) if name)
        counts = [row[name] for name in ("num_questions", "num_noise_seeds", "num_samples")]
        assert [number(cell) for cell in cells[10:]] == counts


def test_every_comparison_in_the_tables_is_the_artifacts(visit, built):
    seen = visit(built.page)
    seen.open_all()
    expected = pl.read_parquet(built.folder / "comparisons.parquet").rows(named=True)
    for cells, row in zip(seen.rows("comparisons"), expected, strict=True):
        assert cells[0] == row["comparison_id"]
        names = {3: "treatment_accuracy", 4: "control_accuracy", 5: "difference", 9: "minimum_detectable_difference"}
        assert all(shows(cells[at], row[name]) for at, name in names.items())
        assert interval(cells[6]) == pytest.approx([100 * row["ci_low"], 100 * row["ci_high"]], abs=0.0500001)
        assert shows_p(cells[7], row["p_value"])
        assert shows_p(cells[8], row["p_holm"])
        assert [number(cell) for cell in cells[10:]] == [row["num_seeds"], row["num_questions"]]
    for cells, row in zip(seen.rows("checks"), expected, strict=True):
        assert cells[1] == (row["family"] or "–")
        for cell, name in zip(cells[2:5], ("p_looks", "p_equivalence", "p_equivalence_holm"), strict=True):
            assert (cell == "–") if row[name] is None else shows_p(cell, row[name])
        for cell, name in ((cells[5], "seeds_needed"), (cells[6], "questions_needed")):
            assert (cell == "–") if row[name] is None else (number(cell) == row[name])


def test_paired_tables_are_the_claims(visit, built):
    seen = visit(built.page)
    seen.open_all()
    for claim in read_json(built.folder / "claims.json", ClaimsFile).claims:
        shown = seen.rows(f"paired-{claim.comparison_id}")
        assert len(shown) == len(claim.seeds) > 0
        for cells, seed in zip(shown, claim.seeds, strict=True):
            counts = [seed.seed, seed.treatment_better, seed.control_better, seed.equal]
            assert [number(cell) for cell in cells[:4]] == counts
            assert shows(cells[4], seed.difference)
            assert shows_p(cells[6], seed.p_value)


def test_curves_have_the_numbers_of_the_runs(visit, built):
    seen = visit(built.page)
    seen.open_all()
    for column in ("reward_mean", "kl", "validation_accuracy", "sigma_requested", "sigma_measured"):
        shown = {int(row[0]): row[1:] for row in seen.rows(f"curve-{column}")}
        assert max(shown) == 60
        for position, run in enumerate(built.made.runs):
            for step, value in pl.read_parquet(run.metrics).select("step", column).iter_rows():
                if step in shown and value is not None:
                    assert number(shown[step][position]) == pytest.approx(value, rel=6e-4, abs=1e-12)


def test_numbers_link_to_their_runs(visit, built):
    seen = visit(built.page)
    seen.open_all()
    links = seen.page.eval_on_selector_all(
        "table[data-table='accuracy'] tbody tr, table[data-table='receipts'] tbody tr",
        """rows => rows.map(row => {
            const link = row.querySelector('a')
            return [row.innerText, link && document.querySelector(link.hash).innerText]
        })""",
    )
    trained = [(text, target) for text, target in links if not text.startswith("pretrained")]
    assert len(trained) == 8 * 3 + 8
    for text, target in trained:
        arm, seed = text.split("\t")[:2] if "seed" not in text else (text.split()[0], text.split()[2])
        assert f"/{arm}/seed{seed}/run.json" in target


def test_hostile_texts_do_nothing_but_show(visit, hostile):
    seen = visit(hostile.page, viewport={"width": 360, "height": 740})
    seen.open_all()
    seen.page.wait_for_timeout(100)
    assert seen.messages == []
    assert seen.requests == [hostile.page.as_uri()]
    assert seen.page.evaluate("document.querySelectorAll('img, iframe, object, embed, link').length") == 0
    assert seen.page.evaluate("document.querySelectorAll('script').length") == 1
    assert seen.width_needed() == 360
    text = seen.page.locator("body").inner_text()
    assert "<script>alert(1)</script>" in text
    assert "⟨U+202E⟩" in text
    assert "⟨U+001B⟩[31m" in text


def test_a_click_on_a_head_sorts_by_number_and_a_filter_finds_rows(visit, built):
    page = visit(built.page).page
    table = page.locator("table[data-table='arms']")
    column = "rows => rows.map(row => parseFloat(row.cells[1].textContent))"
    before = table.locator("tbody tr").evaluate_all(column)
    head = table.locator("thead th").nth(1)
    head.locator("button").click()
    assert table.locator("tbody tr").evaluate_all(column) == sorted(before) != sorted(before, reverse=True)
    assert head.get_attribute("aria-sort") == "ascending"
    head.locator("button").click()
    assert table.locator("tbody tr").evaluate_all(column) == sorted(before, reverse=True)
    page.locator("#accuracy details > summary").click()
    page.locator("#accuracy .tool input").fill("E5b 10")
    shown = page.locator("table[data-table='accuracy'] tbody tr:visible")
    assert shown.count() > 0
    assert all("E5b" in text and "10" in text for text in shown.all_inner_texts())
    page.locator("#accuracy .tool input").fill("no such row")
    assert shown.count() == 0


def test_a_mark_shows_its_value_on_hover_and_on_focus(visit, built):
    page = visit(built.page).page
    picture = page.locator("#robustness .panels svg").first
    picture.scroll_into_view_if_needed()
    rows = pl.read_parquet(built.folder / "differences.parquet").filter(pl.col("arm") == "E5")
    expected = rows.row(by_predicate=pl.col("noise_level") == 0.0, named=True)["difference"]
    picture.locator("circle[data-s='E5']").first.hover()
    text = page.locator("#tip").inner_text()
    assert text.startswith("E5 minus baseline at 0")
    assert shows(text.split(": ")[1].split(" points")[0], expected)
    page.mouse.move(0, 0)
    picture.focus()
    texts = set()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
        texts.add(page.locator("#tip").inner_text())
    assert len(texts) == 4
    assert all("minus baseline" in text for text in texts)
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()


def test_without_scripts_the_marks_tell_their_values_themselves(visit, built):
    page = visit(built.page, java_script_enabled=False).page
    titles = page.locator("#robustness .panels svg title").all_text_contents()
    assert any("E5 minus baseline" in title for title in titles)
    assert page.locator("button, input").count() == 0


def test_an_arm_is_switched_off_in_all_pictures_together(visit, built):
    page = visit(built.page).page
    marks = page.locator(".panels [data-s='E5b']:visible")
    sections = "all => [...new Set(all.map(mark => mark.closest('section').id))]"
    assert {"accuracy", "robustness", "training"} <= set(marks.evaluate_all(sections))
    others = page.locator(".panels [data-s='E5']:visible").count()
    button = page.locator("#robustness .legend [data-s='E5b'] button")
    assert button.inner_text() == f"{built.study.arms['E5b'].description} (E5b)"
    button.click()
    assert marks.count() == 0
    assert page.locator(".panels [data-s='E5']:visible").count() == others
    assert button.get_attribute("aria-pressed") == "false"
    assert page.locator("#training .legend [data-s='E5b'] button").get_attribute("aria-pressed") == "false"
    page.get_by_role("button", name="Show all arms").click()
    assert marks.count() > 0


@pytest.mark.parametrize("scripts", [True, False])
def test_a_link_to_a_claim_or_a_question_opens_it(visit, built, scripts):
    page = visit(built.page, java_script_enabled=scripts).page
    for selector in ("details.open li", ".sides details"):
        anchor = page.locator(selector).last.get_attribute("id")
        page.goto(f"{built.page.as_uri()}#{anchor}")
        target = page.locator(f"[id='{anchor}']")
        assert target.is_visible() or not scripts
        if scripts:
            box = target.bounding_box()
            assert 0 <= box["y"] < 800
    assert page.locator("#arm-E5").count() == 1


def test_any_two_arms_are_chosen(visit, built):
    page = visit(built.page).page
    table = page.locator('[data-table="outcomes"]')
    page.locator("#explorer details", has=table).locator("> summary").click()
    all_rows = table.locator("tbody tr:visible").count()
    first, second = (page.locator("#explorer .tool select").nth(n) for n in (0, 1))
    first.select_option(label="E5b")
    assert table.locator("tbody tr:visible").count() == all_rows
    second.select_option(label="E5")
    heads = [head.text_content() for head in table.locator("th:visible").all()]
    assert heads[2:] == ["E5", "E5b"]
    rows = [row.locator("td:visible").all_text_contents()[2:] for row in table.locator("tbody tr:visible").all()]
    assert 0 < len(rows) < all_rows
    assert all(left != right for left, right in rows)
    better = sum(right > left for left, right in rows)
    said = page.locator("#explorer .tool", has=page.locator("select")).locator("span").text_content()
    assert said == f"E5b > E5: {better}, E5 > E5b: {len(rows) - better}"
    second.select_option(index=0)
    assert table.locator("tbody tr:visible").count() == all_rows


def test_questions_are_searched_in_question_and_responses(visit, built):
    page = visit(built.page).page
    wanted = page.locator(".sides details").first.text_content()
    page.locator("#explorer .tool input").fill(" ".join(wanted.split()[:2]))
    assert 0 < page.locator(".sides details:visible").count() < page.locator(".sides details").count()


def test_a_table_that_is_cut_off_on_a_phone_has_a_cue(visit, built):
    page = visit(built.page, viewport={"width": 390, "height": 740}).page
    region = page.locator(".scroll.arms")
    assert region.evaluate("e => e.scrollWidth > e.clientWidth")
    assert "gradient" in region.evaluate("e => getComputedStyle(e).backgroundImage")


def test_reasons_of_diagnoses_are_folded_below_their_verdicts(visit, built):
    seen = visit(built.page)
    assert [row[:4] for row in seen.rows("diagnosis-verdicts")] == [
        ["device", "none", "healthy", "right"],
        [
            "target",
            "dead zone (layer 3, site layer_output, magnitude 0.05, sparsity 1.0)",
            "dead zone, layer 3",
            "right",
        ],
    ]
    reasons = seen.page.locator("table[data-table='diagnosis-reasons']")
    assert not reasons.is_visible()
    seen.page.locator("#diagnosis details > summary").first.click()
    assert reasons.is_visible()
    assert seen.rows("diagnosis-reasons") == [
        ["device", "no scan passed its threshold"],
        ["target", "21 % of the outputs of layer 3 are exactly 0"],
    ]


def test_ticks_of_steps_are_whole(visit, built):
    page = visit(built.page).page
    titles = page.locator("#training .panels > div").evaluate_all(
        """all => all.map(div => [...div.querySelectorAll('text')]
        .map(text => [text.textContent, text.getBoundingClientRect().y]))"""
    )
    for texts in titles:
        bottom = max(y for text, y in texts if text.replace(".", "").isdigit())
        steps = [text for text, y in texts if abs(y - bottom) < 2 and text.replace(".", "").isdigit()]
        assert len(steps) >= 3
        assert all(text.isdigit() for text in steps)


@pytest.mark.slow
def test_sixty_arms_answer_on_the_first_screen(visit, synthetic, make_report, tmp_path, monkeypatch):
    """Most claims are open, a few are decided: those and the answer are seen without scrolling."""
    arms = {f"E5-{number:02}": synthetic.ARMS["E5"] for number in range(59)}
    monkeypatch.setattr(synthetic, "ARMS", synthetic.ARMS | arms)
    comparisons = [
        {
            "kind": "arms",
            "treatment": name,
            "control": "baseline",
            "expected": "lower",
            "claim": f"{name} costs accuracy",
        }
        for name in arms
    ] + [
        {
            "kind": "levels",
            "arm": "baseline",
            "noise_level": 0.1,
            "claim": "Noise hurts the baseline",
            "family": "noise",
        }
    ]
    study = synthetic.study(arms=["baseline", *arms], seeds=[0, 1], comparisons=comparisons)
    built = make_report(tmp_path, study, 100)
    page = visit(built.page).page
    decided = [claim.claim for claim in claims_of(built) if claim.verdict in ("supported", "refuted")]
    assert "Noise hurts the baseline" in decided
    for claim in decided[:5]:
        box = page.locator("#claims > ol.claims > li", has_text=claim).bounding_box()
        assert box["y"] + box["height"] <= 800
    assert page.evaluate("document.documentElement.scrollHeight") < 40_000


def test_a_figure_is_enlarged_by_the_keyboard_and_put_back(visit, built):
    page = visit(built.page).page
    button = page.locator("#training .panels > div h3 button").first
    small = page.locator("#training .panels svg").first.bounding_box()["width"]
    count = page.locator("#training .panels svg").count()
    button.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.getElementById('zoom').open")
    assert button.get_attribute("aria-label").startswith("Enlarge: ")
    picture = page.locator("#zoom svg")
    enlarged = picture.bounding_box()["width"]
    assert enlarged > 2 * small
    page.keyboard.press("+")
    assert picture.bounding_box()["width"] == pytest.approx(1.5 * enlarged, rel=0.03)
    assert page.evaluate("document.documentElement.scrollWidth") == 1280
    picture.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#zoom #tip").inner_text(), "values are shown above the dialog"
    page.keyboard.press("Escape")
    assert not page.evaluate("document.getElementById('zoom').open")
    # A browser tells a page that a dialog was closed in a task of its own, which a busy machine runs later.
    page.wait_for_function("!document.querySelector('#zoom svg')")
    assert page.locator("#training .panels svg").count() == count
    assert page.locator("#training .panels svg").first.bounding_box()["width"] == pytest.approx(small)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Enlarge: ")
    assert not page.locator("#tip").is_visible()


@pytest.mark.parametrize(("scheme", "card", "blue"), [("light", "#fff", "#0072b2"), ("dark", "#1b2027", "#5aafe6")])
def test_a_figure_is_downloaded_in_the_colours_of_the_page_with_the_legend_of_what_it_shows(
    visit, built, tmp_path, scheme, card, blue
):
    seen = visit(built.page, color_scheme=scheme)
    seen.page.locator("#training .legend [data-s='E5b'] button").click()
    panel = seen.page.locator("#training .panels > div").first
    button = panel.locator("h3 button").nth(1)
    assert button.get_attribute("aria-label").startswith("Download as SVG: ")
    with seen.page.expect_download() as download:
        button.click()
    assert download.value.suggested_filename == "Reward-mean-of-5-steps.svg"
    download.value.save_as(tmp_path / "figure.svg")
    assert seen.messages == [], "the policy of the page allows it"
    assert {url.partition(":")[0] for url in seen.requests} <= {"file", "blob"}
    root = ElementTree.parse(tmp_path / "figure.svg").getroot()
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    named = [found for text in texts if (found := re.fullmatch(r"(.+) \((\w+)\)", text)) and found[2] in ARMS]
    assert [found[2] for found in named] == ["baseline", "E5", "srdd_guided"]
    assert named[0][1] == "no noise in training"
    attributes = [value for node in root.iter() for value in node.attrib.values()]
    assert {card, blue} <= set(attributes)
    assert not [value for value in attributes if "var(" in value or value == "E5b"]
    width, height = map(float, panel.locator("svg").get_attribute("viewBox").split()[2:])
    assert float(root.get("height")) == height + 3 * 16 + 8
    longest = max(len(found[0]) for found in named)
    assert float(root.get("width")) == pytest.approx(max(width, 50 + 6.2 * longest)), "the legend has room"
    assert panel.locator("[data-s='E5b']").count() > 0, "the page keeps what the file leaves out"


@pytest.mark.slow
def test_axe_finds_nothing_in_an_enlarged_figure(visit, built):
    script = pytest.importorskip(AXE).__path__[0]
    seen = visit(built.page, viewport={"width": 390, "height": 740})
    seen.page.locator("#robustness .panels > div h3 button").first.click()
    seen.page.evaluate(Path(script, "axe.min.js").read_text(encoding="utf-8"))
    found = seen.page.evaluate("axe.run('#zoom', {resultTypes: ['violations']}).then(result => result.violations)")
    assert [(violation["id"], violation["nodes"][0]["html"]) for violation in found] == []
    box = seen.page.locator("#zoom").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
