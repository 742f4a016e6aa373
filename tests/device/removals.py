"""What is taken out of the package, one at a time: each wait, event, guard and copy without waiting.

``python -m tests.device.removals`` prints what docs/internals/simulated.md counts, from one process for each.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
WAITS = ("wait_event", "wait_stream", "record_stream", "synchronize")
SKIPPED = ("tools/",)  # the device itself, and programs that may wait
CASES = (
    "bf16",
    "masters on the host",
    "metrics, state on the host",
    "another device, state on the host",
    "scaler, state on the host",
)


class Site(NamedTuple):
    """A place of the package: its file and line, what stands there, and the text without it."""

    file: str
    line: int
    code: str
    without: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def sites(package: Path = ROOT / "src" / "muonmesh") -> Iterator[Site]:
    """Find each of them in the sources."""
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if name.startswith(SKIPPED):
            continue
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            for removed, instead in _removed(node):
                yield Site(
                    name, removed.lineno, ast.get_source_segment(source, removed) or "", _cut(source, removed, instead)
                )


def _removed(node: ast.AST) -> Iterator[tuple[ast.expr | ast.keyword, str]]:
    """Yield what may go of a node, and what stands there then."""
    if isinstance(node, ast.Expr) and getattr(getattr(node.value, "func", None), "attr", "") in WAITS:
        yield node.value, "None"
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == "non_blocking":
                yield keyword, "non_blocking=False"
    if isinstance(node, ast.Return) and node.value and ast.unparse(node.value).startswith("torch.cuda.device("):
        yield node.value, "__import__('contextlib').nullcontext()"
    if isinstance(node, ast.With):
        for item in node.items:
            call = item.context_expr
            text = ast.unparse(call)
            if text.startswith(("torch.cuda.device(", "torch.cuda.stream(")):
                yield call, "__import__('contextlib').nullcontext()"


def _cut(source: str, node: ast.expr | ast.keyword, instead: str) -> str:
    lines = source.splitlines(keepends=True)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    before = "".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    return before + instead + lines[node.end_lineno - 1][node.end_col_offset :] + "".join(lines[node.end_lineno :])


def complaints_of(site: Site | None) -> list[str]:
    """Step without it in a process of its own, and return what the simulated device says."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "muonmesh"
        shutil.copytree(ROOT / "src" / "muonmesh", package, ignore=shutil.ignore_patterns("__pycache__"))
        if site is not None:
            (package / site.file).write_text(site.without)
        path = os.pathsep.join([folder, str(ROOT)])
        command = [sys.executable, "-W", "ignore", "-m", "tests.device.removals", "step"]
        ran = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, cwd=folder
        )
        if ran.returncode:
            return [ran.stderr.strip().splitlines()[-1].partition(":")[0]]
        complaints: list[str] = json.loads(ran.stdout.splitlines()[-1])
        return complaints


def said_of_this_package() -> list[str]:
    """Return what the simulated device says of the package that is imported."""
    from tests.device.stepping import CASES as CASE
    from tests.device.stepping import differing, simulated

    complaints = list[str]()
    for name in CASES:
        for seed in range(2):
            ran = simulated(CASE[name], seed)
            complaints += [f"race on {race.kind}" for race in ran.races]
            complaints += ["the host waits" for _ in ran.waits]
            complaints += [f"the host waits in the first step | {line}" for line in ran.waited_at_first]
            complaints += ["other numbers" for _ in differing(CASE[name], ran)]
    return sorted(set(complaints))


def objections() -> Iterator[tuple[Site, list[str]]]:
    """Take each out, and yield what the simulated device says that it does not say of the package as it is."""
    usual = set(complaints_of(None))
    for site in sites():
        yield site, sorted({line.partition(" | ")[0] for line in set(complaints_of(site)) - usual})


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield from ("| taken out | where | what the simulated device says |", "|---|---|---|")
    for site, objected in objections():
        yield f"| `{' '.join(site.code.split())}` | {site} | {'; '.join(objected) or 'nothing'} |"


if __name__ == "__main__":
    if sys.argv[1:] == ["step"]:
        print(json.dumps(said_of_this_package()))
    else:
        for row in table():
            print(row, flush=True)
