"""The command line, ``muonmesh`` or ``python -m muonmesh``. Needs the extra ``train``.

The optimizer itself never imports it.
"""

from __future__ import annotations

import gc
import platform
import sys
from importlib.metadata import version
from importlib.util import find_spec

# What the extra brings beside torch. `pip install muonmesh` alone has none of it.
REQUIRED = ("typer", "rich", "numpy", "tokenizers", "transformers", "matplotlib", "filelock")


def versions() -> str:
    """Return the versions of the package and of what decides its bits, without importing torch."""
    return f"muonmesh {version('muonmesh')} (torch {version('torch')}, Python {platform.python_version()})"


def main() -> None:
    """Entry point of the ``muonmesh`` script; exits with 1 where its output was lost, but for a training's."""
    from muonmesh.cli.terminal import complain, print_plainly

    print_plainly()
    try:
        run_command()
    finally:
        sys.stdout.flush()
        if getattr(sys.stdout, "full", False) and sys.argv[1:2] != ["train"]:  # whose directory has all of it
            raise SystemExit(complain("", "stdout could not be written: the disk is full. Free some space", code=1))


def run_command() -> None:
    """Run what the arguments say; exits with 2 and a remedy where the extra is missing."""
    if sys.argv[1:] == ["--version"]:  # without the extra, and without torch
        print(versions())
        return
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        print(
            f"muonmesh: the command line needs {', '.join(missing)}. Write: pip install 'muonmesh[train]'",
            file=sys.stderr,
        )
        raise SystemExit(2)
    gc.disable()  # this process starts others and waits: looking for cycles in what it imports is a tenth of its work
    from muonmesh.cli.app import app

    app(prog_name="muonmesh")
