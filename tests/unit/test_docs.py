"""What the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_documents_name_exists() -> None:
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    defined = set(re.findall(r"def (test_\w+)", written)) | {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named = {name for path in documents for name in re.findall(r"`(?:[\w/]*/)?(test_\w+)", path.read_text())}
    assert len(named) > 20
    assert sorted(named - defined) == []


def test_links_between_documents_lead_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in documents
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text())
        if not target.startswith("http") and not (path.parent / target).exists()
    ]
    assert broken == []
