"""Take the pictures of docs/images from a report: `python docs/images/take_screenshots.py results/report.html`.

Needs Chromium and the Playwright package of the dev extra. `overview.png` opens the README: the answer and the
verdicts beside the differences over noise and the diagnosis of the machines. The other pictures show the top of the
report in light and dark, on a phone and on paper.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

FOLDER = Path(__file__).parent

OVERVIEW_WIDTH = 1240
# Nothing is drawn for the picture: this hides parts of the report and puts three of its sections side by side.
OVERVIEW_STYLE = """
nav, footer, .caption, .tool, main > :not(.answer, #robustness, #diagnosis), section > details,
.panels > div:not([data-kept]), [data-table="diagnosis-verdicts"] :is(th, td):nth-child(n+5) { display: none }
main { display: grid; grid-template-columns: minmax(0, 1fr) 400px; grid-template-rows: auto 1fr; gap: 14px }
header { max-width: none; padding: 16px 18px 0 }
main { max-width: none; padding: 0 18px 18px }
section { margin: 0; padding: 12px 18px }
.answer { grid-row: 1 / 3; padding: 14px 0 0 }
.answer .caption { display: block; font-size: .8rem }
.claims summary, .axis { grid-template-columns: 6.9rem minmax(0, 1fr) 190px 7.4rem; gap: 0 14px }
.claims summary { min-height: 56px }
.panels { grid-template-columns: 1fr; margin: 0 }
.panels svg { max-width: 300px }
.panels h3 button, #diagnosis .panels ~ .legend { display: none }
.limits { columns: 1 }
.scroll { overflow: visible; margin: 0 0 8px; background: none }
.scroll.arms { max-height: none; margin: 0 18px 8px }
.scroll.arms td.long { min-width: 9em }
.scroll.arms th button::after { content: none }
[data-table="diagnosis-verdicts"] td { white-space: normal; padding-right: 10px; min-width: 0 }
"""


def keep_panel(page: Page, section: str, title: str) -> None:
    """Mark the panel of a section with that title, so that the overview shows it alone; exit if there is none."""
    panels = page.locator(f"#{section} .panels > div")
    # The first text of a title: the script of the page puts its buttons behind it.
    titles = panels.locator("h3").evaluate_all("titles => titles.map(title => title.firstChild.textContent)")
    if title not in titles:
        sys.exit(f"ERROR: the report has no panel {title!r} in section {section}; it has {', '.join(titles)}")
    panels.nth(titles.index(title)).evaluate("panel => panel.setAttribute('data-kept', '')")


def take_overview(browser: Browser, report: Path, difference: str, metric: str) -> None:
    """Write overview.png: verdicts, differences to one arm, and what was found on each machine with one metric."""
    # The report forbids every style but its own; the browser may pass over that.
    context = browser.new_context(
        viewport={"width": OVERVIEW_WIDTH, "height": 600}, device_scale_factor=1.5, bypass_csp=True
    )
    page = context.new_page()
    page.goto(report.resolve().as_uri())
    keep_panel(page, "robustness", difference)
    keep_panel(page, "diagnosis", metric)
    page.add_style_tag(content=OVERVIEW_STYLE)
    page.screenshot(path=FOLDER / "overview.png", full_page=True)
    context.close()


def take(browser: Browser, report: Path, name: str, height: int, **options: object) -> None:
    """Write docs/images/<name>.png: the upper `height` pixels of the report."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.goto(report.resolve().as_uri())
    if name == "report-print":
        page.emulate_media(media="print")
    width = options["viewport"]["width"]  # type: ignore[index]
    page.screenshot(
        path=FOLDER / f"{name}.png", full_page=True, clip={"x": 0, "y": 0, "width": width, "height": height}
    )
    context.close()


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="report.html of a finished study in English")
    parser.add_argument(
        "--difference", default="Difference to baseline", help="panel of the robustness that the overview shows"
    )
    parser.add_argument("--metric", default="Exact zeros", help="panel of the diagnosis that the overview shows")
    arguments = parser.parse_args()
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        sys.exit("ERROR: no Chromium on this machine; on Debian: apt-get install chromium")
    report, flags = arguments.report, ["--no-sandbox"] if os.geteuid() == 0 else []
    desktop, phone, paper = ({"width": width, "height": 800} for width in (1280, 390, 718))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=flags)
        take_overview(browser, report, arguments.difference, arguments.metric)
        take(browser, report, "report", 1180, viewport=desktop, color_scheme="light")
        take(browser, report, "report-dark", 1680, viewport=desktop, color_scheme="dark")
        take(browser, report, "report-phone", 1500, viewport=phone, color_scheme="light")
        take(browser, report, "report-print", 1016, viewport=paper, color_scheme="light")
        browser.close()


if __name__ == "__main__":
    main()
