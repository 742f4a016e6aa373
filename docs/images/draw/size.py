"""How much a reader has to understand: lines of code, nouns of the architecture page, and what one step passes through.

    python docs/images/draw/size.py

Lines are those of src/ without docstrings, comments and blanks; functions are counted without their docstrings. The
step is the third of one fused q, k, v weight in one process, when all that is worked out once has been; changes of file
are counted along the calls of the package's own functions.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import muonmesh as mm

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "muonmesh"
PAGE = ROOT / "docs" / "internals" / "architecture.md"
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines of a file that are code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        for statement in getattr(node, "body", None) or () if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                lines.difference_update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return lines


def functions(text: str) -> Iterator[tuple[str, int]]:
    """Yield the functions of a file with their lines of code, signatures left out."""
    lines = code_lines(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0].lineno
            yield node.name, sum(first <= line <= (node.end_lineno or 0) for line in lines)


def nouns() -> list[str]:
    """Return what the first table of the architecture page names."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [row.split("|")[1].strip() for row in rows[1:]]
    return [noun.strip() for cell in cells if cell for noun in cell.replace(";", ",").split(",")]


def walked() -> tuple[set[str], set[tuple[str, str]], int]:
    """Return the files and functions that a steady step passes, and how often the file changes."""
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.randn(96, 32))
    optimizer = mm.Muon(
        [{"params": [weight], "param_names": ["qkv"], "matrices": [("rows", 32, 32, 32)]}], process_group="local"
    )
    weight.grad = torch.randn(96, 32)
    files: set[str] = set()
    seen: set[tuple[str, str]] = set()
    changes, last = 0, ""

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal changes, last
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(SOURCE)):
            files.add(name)
            seen.add((name, frame.f_code.co_qualname))
            changes += name != last
            last = name

    for step in range(3):
        sys.setprofile(note if step == 2 else None)
        optimizer.step()
        sys.setprofile(None)
    return files, seen, changes


def main() -> None:
    """Print all of it."""
    texts = {path: path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    lines = {path: len(code_lines(text)) for path, text in texts.items()}
    tools = sum(count for path, count in lines.items() if "tools" in path.parts)
    print(f"{sum(lines.values()):,} lines of code in {len(texts)} files, {tools:,} of them in tools")
    found = nouns()
    print(f"{len(found)} nouns: {', '.join(found)}")
    files, seen, changes = walked()
    print(f"a steady step passes {len(files)} files, {len(seen)} functions and {changes} changes of file")
    long = [
        (count, f"{path.relative_to(SOURCE)}: {name}")
        for path, text in texts.items()
        for name, count in functions(text)
    ]
    for count, name in sorted(long, reverse=True):
        if count > 60:
            print(f"{count} lines without signature and docstring: {name}")


if __name__ == "__main__":
    main()
