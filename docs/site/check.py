"""Check a built site: nothing is loaded from elsewhere when a page is read, and every link in it leads somewhere.

    python docs/site/check.py site

Prints what is wrong, a line each, and ends with 1 if anything is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser fetches by itself, by element and attribute; <a> is followed by the reader only.
LOADED = {
    ("script", "src"),
    ("img", "src"),
    ("source", "src"),
    ("source", "srcset"),
    ("iframe", "src"),
    ("audio", "src"),
    ("video", "src"),
    ("object", "data"),
    ("embed", "src"),
}
LOADED_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "manifest", "modulepreload"}
IN_STYLES = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)")


class Page(HTMLParser):
    """What a page loads, where it links to, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.loaded += [given[name] for element, name in LOADED if element == tag and name in given]
        if tag == "link" and LOADED_LINKS & set(given.get("rel", "").split()):
            self.loaded.append(given.get("href", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        self.loaded += IN_STYLES.findall(given.get("style", ""))


def _place(site: Path, page: Path, path: str) -> Path:
    """Where a path in a page leads; one from the root, as the page of a missing address has it, to the site's."""
    return site / unquote(path[1:]) if path.startswith("/") else page.parent / unquote(path)


def faults(site: Path) -> Iterator[str]:
    """What is wrong with a built site, a line each."""
    pages = {file: Page(file.read_text()) for file in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: found no pages; needed a site. Write make docs"
    for file, page in pages.items():
        where = file.relative_to(site)
        for address in page.loaded:
            parts = urlsplit(address)
            if parts.scheme in ("http", "https") or parts.netloc:
                yield f"{where}: loads {address} from elsewhere"
            elif parts.scheme != "data" and not _place(site, file, parts.path).exists():
                yield f"{where}: loads {address}, which is not there"
        for address in page.links:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = _place(site, file, parts.path).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{where}: links to {address}, which is not there"
            elif parts.fragment and target.suffix == ".html":
                known = pages.get(target) or Page(target.read_text())
                if unquote(parts.fragment) not in known.anchors:
                    yield f"{where}: links to {address}, which has no such anchor"
    for style in sorted(site.rglob("*.css")):
        yield from (f"{style.relative_to(site)}: loads {found}" for found in IN_STYLES.findall(style.read_text()))


def main() -> None:
    """Check the site that is named."""
    found = list(faults(Path(sys.argv[1]).resolve()))
    print("\n".join(found) or "nothing is loaded from elsewhere, and every link leads somewhere")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
