"""Take the pictures of docs/images from a report: `python docs/images/take_screenshots.py results/report.html`.

Needs Chromium and the Playwright package of the dev extra. They show the top of the report in light and dark, on a
phone and on paper.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

FOLDER = Path(__file__).parent


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
    arguments = parser.parse_args()
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        sys.exit("ERROR: no Chromium on this machine; on Debian: apt-get install chromium")
    report, flags = arguments.report, ["--no-sandbox"] if os.geteuid() == 0 else []
    desktop, phone, paper = ({"width": width, "height": 800} for width in (1280, 390, 718))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=flags)
        take(browser, report, "report", 1180, viewport=desktop, color_scheme="light")
        take(browser, report, "report-dark", 1680, viewport=desktop, color_scheme="dark")
        take(browser, report, "report-phone", 1500, viewport=phone, color_scheme="light")
        take(browser, report, "report-print", 1016, viewport=paper, color_scheme="light")
        browser.close()


if __name__ == "__main__":
    main()
