"""Run the programs of docs/thirty-ways.md, and compare what they print with the comments behind their `print`.

    python -m benchmarks.studies.ways                                          # those whose packages are installed
    PYTHONPATH=DION:KELLER_JORDAN python -m benchmarks.studies.ways --json benchmarks/results/ways.json   # adds

DION and KELLER_JORDAN are checkouts. A comment holds a line, or several between `;;`. Numbers may differ by 5 %.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "thirty-ways.md"
NUMBER = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"


def programs() -> dict[str, str]:
    """The program of each way, by its title."""
    matches = re.finditer(
        r"^### (\d+\. [^\n]*)\n(?:(?!^##).)*?^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.M
    )
    return {match[1]: match[2] for match in matches}


def expected(program: str) -> list[str]:
    """The lines that the comments of a program say it prints."""
    comments = re.findall(r"^ *print\(.*\)  # (.*)$", program, re.MULTILINE)
    return [line for comment in comments for line in comment.split(" ;; ")]


def packages(program: str) -> set[str]:
    """The packages that a program imports and Python does not have."""
    nodes = list(ast.walk(ast.parse(program)))
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


FORKS = """import contextlib, os, runpy, sys
import torch.distributed
for path in sys.argv[1:]:
    if (child := os.fork()) == 0:
        with open(path + ".out", "w") as out, contextlib.redirect_stdout(out):
            runpy.run_path(path, run_name="__main__")
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise SystemExit(open(path).read())
"""


def printed(*programs: str) -> list[list[str]]:
    """Run each program in a process of its own, or in two, and return what its first rank prints.

    Those of one process are forked from one that has imported torch, which takes longer than what they do.
    """
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
        free.close()
        paths = [Path(folder, f"way{number}.py") for number in range(len(programs))]
        for path, program in zip(paths, programs, strict=True):
            path.write_text(program)
        two = [path for path in paths if path.read_text().startswith("# on two ranks")]
        for path in two:
            launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path))
            path.with_name(f"{path.name}.out").write_text(_run(*launch))
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        _run("-c", FORKS, *(str(path) for path in paths if path not in two), **alone)
        outs = [path.with_name(f"{path.name}.out").read_text().splitlines() for path in paths]
    noise = re.compile(r"\[(INFO|WARNING)\]|built successfully")
    return [[line for line in out if not noise.search(line)] for out in outs]


def _run(*arguments: str, **environment: str) -> str:
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", **environment}
    run = [sys.executable, "-W", "ignore", *arguments]
    process = subprocess.run(run, env=settings, capture_output=True, text=True, check=False, timeout=600)
    if process.returncode:
        raise SystemExit(process.stderr[-4000:])
    return process.stdout


def same(recorded: list[str], printed_lines: list[str]) -> bool:
    """Whether lines have the same words, and numbers that differ by 5 % at most, or by one in the last place."""

    def near(a: str, b: str) -> bool:
        last = 10.0 ** -len(a.partition(".")[2]) if "e" not in a else 0.0
        return math.isclose(float(a), float(b), rel_tol=0.05, abs_tol=1.01 * last)

    if [re.sub(NUMBER, "#", line) for line in recorded] != [re.sub(NUMBER, "#", line) for line in printed_lines]:
        return False
    numbers = (re.findall(NUMBER, "\n".join(lines)) for lines in (recorded, printed_lines))
    return all(near(a, b) for a, b in zip(*numbers, strict=True))


def installed(name: str) -> str:
    """The version of a package; of a checkout, its commit."""
    spec = find_spec(name)
    folder = Path(spec.origin).parent if spec and spec.origin else ROOT
    commit = subprocess.run(["git", "-C", folder, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    try:
        return version(name)
    except PackageNotFoundError:
        return commit.stdout.strip()


def main() -> int:
    """Run what can be run here; return 1 if a program prints something else than its comment says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="a record to add what was printed to")
    parser.add_argument("--only", nargs="*", type=int, help="numbers of ways")
    arguments = parser.parse_args()
    record = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    wrong = 0
    for title, program in programs().items():
        needed = packages(program)
        chosen = arguments.only is None or int(title.partition(".")[0]) in arguments.only
        if not chosen or not all(find_spec(name) for name in needed):
            continue
        (printed_lines,) = printed(program)
        right = same(expected(program), printed_lines)
        wrong += not right
        print(f"{'as told' if right else 'OTHERWISE'}  {title}: {' ;; '.join(printed_lines)}", flush=True)
        record[title] = {"printed": printed_lines, "versions": {name: installed(name) for name in sorted(needed)}}
        if arguments.json:
            arguments.json.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
