"""Open every page of a built site in headless Chromium, from the disk, on a phone's width and on a desktop's.

    python docs/site/browser.py site

Prints what is wrong, a line each: what is wider than the page, a table for users that a desktop cuts, an error, a
picture that does not load, a search without results, or a picture that the dark makes illegible. Ends with
1 if anything is. Where there is no Chromium it says so.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

WIDTHS = (390, 1280)
NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDER = """() => document.documentElement.scrollWidth <= innerWidth ? [] : ["something", ...[...document
    .querySelectorAll(".md-content *")].filter(e => e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => `${e.tagName.toLowerCase()} ${e.textContent.trim().replace(/\\s+/g, " ").slice(0, 40)}`)].slice(-1)"""
UNLOADED = """() => [...document.images].filter(i => i.loading !== "lazy" && !(i.complete && i.naturalWidth))
    .map(i => i.src)"""
CUT = """() => [...document.querySelectorAll(".md-typeset__scrollwrap")].filter(e => e.scrollWidth > e.clientWidth + 1)
    .map(e => e.textContent.trim().replace(/\\s+/g, " ").slice(0, 40))"""
BACKGROUND = """() => [...document.querySelectorAll(".md-typeset img")].map(i => getComputedStyle(i).backgroundColor)"""


def faults_of_pages(browser: Browser, site: Path) -> Iterator[str]:
    """Yield what is wrong with a page at a width."""
    for width in WIDTHS:
        page = browser.new_page(viewport={"width": width, "height": 900})
        found: list[str] = []
        page.on("pageerror", lambda error, found=found: found.append(f"error: {error}"))
        page.on("console", lambda told, found=found: found.append(told.text) if told.type == "error" else None)
        page.on("requestfailed", lambda asked, found=found: found.append(f"{asked.failure}: {asked.url}"))
        for file in sorted(site.rglob("*.html")):
            if file.name == "404.html":  # whose addresses begin at the root of a server
                continue
            page.goto(file.as_uri())
            found += [f"wider than the page: {element}" for element in page.evaluate(WIDER)]
            if width == max(WIDTHS) and file.parent.name != "internals":
                found += [f"table wider than its column: {start}" for start in page.evaluate(CUT)]
            found += [f"picture not loaded: {address}" for address in page.evaluate(UNLOADED)]
            told = [fault for fault in found if not fault.startswith("net::ERR_ABORTED")]  # by the next page
            yield from (f"{file.relative_to(site)} at {width}: {fault}" for fault in told)
            found.clear()
        page.close()


def faults_of_site(browser: Browser, site: Path) -> Iterator[str]:
    """Yield what is wrong with the search, the footer and the pictures in the dark."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="dark")
    page = context.new_page()
    page.goto((site / "plan.html").as_uri())
    colours = page.evaluate(BACKGROUND)
    if not colours or set(colours) != {"rgb(255, 255, 255)"}:
        yield f"plan.html in the dark: pictures on {colours}; needed white"
    if page.locator(".md-footer__link--next, .md-footer__link--prev").count() != 2:
        yield "plan.html: found no link to the previous and the next page"
    try:
        page.locator("[data-md-component=search-query]").first.click()
        page.keyboard.type("owner")
        page.locator(".md-search-result__item").first.wait_for(state="attached", timeout=30_000)
    except Exception as error:
        yield f"search from a disk: found nothing for 'owner' ({type(error).__name__})"
    context.close()


def main() -> None:
    """Check the site that is named."""
    site = Path(sys.argv[1]).resolve()
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    if chromium is None:
        print(f"No Chromium ({', '.join(NAMES)}): the pages were not opened. On Debian: apt-get install chromium")
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        found = [*faults_of_site(browser, site), *faults_of_pages(browser, site)]
        browser.close()
    print("\n".join(found) or f"every page opens at widths {' and '.join(map(str, WIDTHS))}, and the search finds")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
