"""Count assigned names that say nothing of their role.

    python -m tests.support.vague_names [FILE ...]

Names are variables, arguments, attributes, fields, functions and classes where they are assigned or defined. The list
of vague ones, and the share that may be, stand in pyproject.toml under tool.muonmesh.names.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["muonmesh"]["names"]
VAGUE = frozenset(SETTINGS["vague"])


class AssignedName(NamedTuple):
    """A name where it is assigned: public is that of an attribute, of a field or in a signature."""

    name: str
    line: int
    public: bool

    @property
    def vague(self) -> bool:
        """Whether the list has it."""
        return self.name.strip("_") in VAGUE


def assigned_names(tree: ast.AST) -> Iterator[AssignedName]:
    """Yield every assigned name of a module."""
    lambdas = {id(child) for node in ast.walk(tree) if isinstance(node, ast.Lambda) for child in ast.walk(node.args)}
    fields = {
        id(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield AssignedName(node.id, node.lineno, id(node) in fields)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield AssignedName(node.attr, node.lineno, True)
        elif isinstance(node, ast.arg):
            yield AssignedName(node.arg, node.lineno, id(node) not in lambdas)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield AssignedName(node.name, node.lineno, True)


def python_files() -> list[Path]:
    """Return the files that are counted."""
    return sorted(path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def main(paths: list[Path]) -> int:
    """Print the vague names of the files, or the counts of all; return 1 where there are too many."""
    count, vague, public = 0, Counter[str](), []
    for path in paths or python_files():
        for name in assigned_names(ast.parse(path.read_text())):
            count += 1
            if name.vague:
                vague[name.name.strip("_")] += 1
                if name.public:
                    public.append(f"{path.resolve().relative_to(ROOT)}:{name.line}: {name.name}")
                if paths:
                    print(f"{path}:{name.line}: {name.name}{' (signature or attribute)' if name.public else ''}")
    share = vague.total() / max(count, 1)
    print(f"{vague.total():,} of {count:,} assigned names are vague ({share:.1%})")
    print(f"{len(public)} in signatures or attributes")
    print(", ".join(f"{name} {times}" for name, times in vague.most_common()))
    if not paths and public:
        print("\n".join(public[:20]))
    return int(bool(public) or share > SETTINGS["share"])


if __name__ == "__main__":
    sys.exit(main([Path(path) for path in sys.argv[1:]]))
