"""The page in a real browser: requests, numbers, and use by keyboard, phone, printer and screen reader."""

from pathlib import Path

import polars as pl
import pytest

from aqnpipe.artifacts.comparisons import ClaimsFile
from aqnpipe.artifacts.files import read_json

AXE = "axe_playwright_python"


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


def shows_p(text, p):
    if p is None:
        return text == "–"
    return p < 0.001 if text.startswith("<") else abs(number(text) - p) <= (0.0005 if p < 0.1 else 0.005) + 1e-12


@pytest.mark.parametrize(
    "options", [{"color_scheme": "light"}, {"color_scheme": "dark"}, {"java_script_enabled": False}]
)
def test_the_page_logs_nothing_and_requests_nothing(visit, built, options):
    seen = visit(built.page, **options)
    assert seen.messages == []
    assert seen.requests == [built.page.as_uri()]
    assert seen.page.locator("ol.claims > li").count() == 6
    assert seen.page.locator("#answer h2").first.inner_text().startswith("Of 6 claims:")


def test_question_answer_and_certainty_are_on_the_first_screen(visit, built):
    page = visit(built.page).page
    for selector in (".question", "ol.claims > li:last-child .amount", ".limits li:last-child"):
        box = page.locator(selector).bounding_box()
        assert box["y"] + box["height"] <= 800, selector


@pytest.mark.parametrize("opened", [False, True])
def test_a_phone_scrolls_only_down(visit, built, opened):
    seen = visit(built.page, viewport={"width": 360, "height": 740})
    if opened:
        seen.open_all()
    assert seen.width_needed() == 360


@pytest.mark.parametrize(("scheme", "rules"), [("light", None), ("dark", ["color-contrast"])])
def test_axe_finds_nothing_serious(visit, built, scheme, rules):
    script = pytest.importorskip(AXE).__path__[0]
    seen = visit(built.page, color_scheme=scheme)
    if rules is None:
        seen.open_all()
    seen.page.evaluate(Path(script, "axe.min.js").read_text(encoding="utf-8"))
    options = {"resultTypes": ["violations"]} | ({"runOnly": rules} if rules else {})
    found = seen.page.evaluate("options => axe.run(options).then(result => result.violations)", options)
    grave = [
        (violation["id"], violation["nodes"][0]["html"])
        for violation in found
        if violation["impact"] in ("serious", "critical")
    ]
    assert grave == []


def test_the_keyboard_skips_to_the_answer_and_opens_it(visit, built):
    page = visit(built.page).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('ol').className") == "claims"
    page.keyboard.press("Enter")
    assert page.locator("ol.claims > li").first.locator(".sentence").is_visible()


def test_the_keyboard_reaches_everything_in_order(visit, built):
    """Every control and every part that scrolls takes the focus, in the order of the page, and shows it."""
    seen = visit(built.page)
    page = seen.page
    seen.open_all()
    expected = page.eval_on_selector_all(
        "a[href], summary, [tabindex='0']", "all => all.map((element, n) => (element.dataset.n = n))"
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
        && element.tabIndex < 0 && !element.querySelector('a[href]')).map(element => element.outerHTML.slice(0, 80))"""
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
    items = page.locator("ol.claims > li")
    assert items.count() == len(claims) == len(rows)
    for number_of, (claim, row) in enumerate(zip(claims, rows.iter_rows(named=True), strict=True)):
        item = items.nth(number_of)
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
    drawn = page.eval_on_selector_all(
        ".strip svg[role]",
        """all => all.map(svg => { const box = svg.getBoundingClientRect(), path = [...svg.querySelectorAll('path')];
        const at = /^M([\\d.]+) 13h0$/.exec(path.at(-1).getAttribute('d'))[1];
        return box.x + box.width * at / 100 })""",
    )
    differences = pl.read_parquet(built.folder / "comparisons.parquet")["difference"]
    shown = [number(first) + (x - x0) * per_pixel for x in drawn]
    assert shown == pytest.approx([100 * value for value in differences], abs=0.25)


def test_accuracy_dots_are_drawn_to_the_scale_of_their_axis(visit, built):
    page = visit(built.page).page
    accuracy = pl.read_parquet(built.folder / "accuracy.parquet")
    panels = page.locator("#accuracy .panels > div")
    for panel, level in enumerate((0.0, 0.05, 0.1)):
        texts, dots = panels.nth(panel).evaluate(
            """div => {
                const middle = element => { const box = element.getBoundingClientRect(); return box.x + box.width / 2 }
                const circles = [...div.querySelectorAll('path')].filter(element => /A/.test(element.getAttribute('d')))
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
        ends = [100 * row["bootstrap_low"], 100 * row["bootstrap_high"]]
        assert cells[1] == row["family"]
        assert interval(cells[2]) == pytest.approx(ends, abs=0.0500001)
        assert shows_p(cells[3], row["p_seed_t"])
        assert shows_p(cells[4], row["p_permutation"])
        for cell, name in ((cells[5], "seeds_needed"), (cells[6], "questions_needed")):
            assert (cell == "–") if row[name] is None else (number(cell) == row[name])


def test_paired_tables_are_the_claims(visit, built):
    seen = visit(built.page)
    seen.open_all()
    for claim in read_json(built.folder / "claims.json", ClaimsFile).claims:
        shown = seen.rows(f"paired-{claim.comparison_id}")
        assert len(shown) == len(claim.seeds) > 0
        for cells, seed in zip(shown, claim.seeds, strict=True):
            counts = [
                seed.seed,
                seed.noise_seed,
                seed.both_correct,
                seed.only_treatment,
                seed.only_control,
                seed.neither,
            ]
            assert [number(cell) for cell in cells[:6]] == counts
            assert shows(cells[6], seed.difference)
            assert shows_p(cells[8], seed.mcnemar_p)


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
    assert seen.page.evaluate("document.querySelectorAll('script, img, iframe, object, embed, link').length") == 0
    assert seen.width_needed() == 360
    text = seen.page.locator("body").inner_text()
    assert "<script>alert(1)</script>" in text
    assert "⟨U+202E⟩" in text
    assert "⟨U+001B⟩[31m" in text
