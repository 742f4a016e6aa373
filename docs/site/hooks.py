"""What the site adds to the pages: those outside of docs/, and links that lead there.

The pages are written to be read in the repository too, so their links are relative to the files. Here a link to a page
outside of docs/ becomes one to its copy, and a link to any other file, which the site does not have, becomes text. A
picture leads to its file, whose text a phone can enlarge.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
COPIES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "benchmarks/README.md": "benchmarks.md",
    **{f"benchmarks/reports/{file.name}": f"reports/{file.name}" for file in ROOT.glob("benchmarks/reports/*.md")},
}
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
PICTURE = re.compile(r'<img [^>]*\bsrc="([^"]+)"[^>]*>')
CODE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand outside of docs/, and the decisions and the reports to the navigation."""
    for source, page in COPIES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    pages = sorted(file.src_uri for file in files.documentation_pages())
    for section, title, folder in (("Internals", "Decisions", "decisions/"), ("Figures", "Reports", "reports/")):
        entries = next(found[section] for found in config.nav if section in found)
        if not any(title in entry for entry in entries):
            entries.append({title: [page for page in pages if page.startswith(folder)]})
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page, but nothing in code."""
    uri = page.file.src_uri
    source = next((root for root, copy in COPIES.items() if copy == uri), f"docs/{uri}")

    def rewritten(match: re.Match[str]) -> str:
        label, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        full = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / full).exists():
            return match[0]  # `mkdocs build --strict` names it
        if full in COPIES:
            place = COPIES[full]
        elif full.startswith("docs/") and (ROOT / full).is_file() and not full.endswith(".py"):
            place = full.removeprefix("docs/")
        else:
            return label.strip("![]")
        return f"{label}({posixpath.relpath(place, posixpath.dirname(uri) or '.')}{hash_}{anchor})"

    parts = CODE.split(markdown)
    return "".join(part if CODE.fullmatch(part) else LINK.sub(rewritten, part) for part in parts)


def on_page_content(html: str, **_: Any) -> str:
    """Make each picture a link to its file."""
    return PICTURE.sub(r'<a href="\1">\g<0></a>', html)
