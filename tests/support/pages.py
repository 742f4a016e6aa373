"""Running the Python of a page of the docs."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def snippets(page: str) -> list[types.CodeType]:
    """The Python of a page but its whole scripts; errors name the page and its line."""
    text = (ROOT / page).read_text()
    matches = re.finditer(r"^```python\n(?!# \S+\.py\b)(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [compile("\n" * text.count("\n", 0, match.start(1)) + match[1], page, "exec") for match in matches]


def scripts(page: str) -> dict[str, str]:
    """The scripts of a page, by the name of the file that the first line of each tells."""
    text = (ROOT / page).read_text()
    matches = re.finditer(r"^```python\n# (\S+\.py)\b[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return {match[1]: match[2] for match in matches}


def run(page: str, *more_names: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the snippets of a page one after the other, each given the names that the page speaks of; yield the names."""
    names: dict[str, Any] = {}
    for code, more in zip(snippets(page), more_names, strict=True):
        names |= more
        exec(code, names)
        yield names
