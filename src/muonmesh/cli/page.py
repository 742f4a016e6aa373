"""Page: an HTML file that needs nothing else: its style is in it, and so are its pictures."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { padding: .3rem .8rem; text-align: right; }
th { border-bottom: 2px solid #999; } td { border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
.lead { font-size: 1.15rem; background: #f3f3f0; padding: .8rem 1rem; border-radius: .4rem; }
img { max-width: 100%; height: auto; } pre { overflow-x: auto; background: #f6f6f6; padding: .8rem; font-size: .8rem; }
.note { color: #555; font-size: .9rem; }
"""


def document(title: str, body: str) -> str:
    """Return a whole page; ``body`` is HTML already, the title is not."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
{body}
</body></html>
"""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of plain text."""
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def embedded(picture: Path, title: str) -> str:
    """Return a picture as a part of the page, under a heading."""
    content = base64.b64encode(picture.read_bytes()).decode("ascii")
    heading = html.escape(title)
    return f'<h2>{heading}</h2><img alt="{heading}" src="data:image/png;base64,{content}">'
