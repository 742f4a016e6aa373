"""The command line, ``muonmesh`` or ``python -m muonmesh``. It needs the extra ``train``.

The optimizer never imports this package.
"""

from __future__ import annotations

import gc
import platform
import sys
from importlib.metadata import version
from importlib.util import find_spec

from muonmesh.tools.cli.terminal import complain, print_plainly

# The packages of the extra besides torch. A plain `pip install muonmesh` installs none of them.
REQUIRED = ("typer", "rich", "numpy", "tokenizers", "transformers", "matplotlib", "filelock")


def versions() -> str:
    """Return the versions of muonmesh, torch and Python, without importing torch."""
    return f"muonmesh {version('muonmesh')} (torch {version('torch')}, Python {platform.python_version()})"


def main() -> None:
    """Run the ``muonmesh`` script; exit with 1 if a full disk has lost its output, except for ``train``.

    Ctrl-C while Python still imports, which takes seconds, exits with 130 as it does later.
    """
    print_plainly()
    try:
        run_command()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        sys.stdout.flush()
        if getattr(sys.stdout, "full", False) and sys.argv[1:2] != ["train"]:  # its run directory has all figures
            raise SystemExit(complain("", "stdout could not be written: the disk is full. Free some space", code=1))


def run_command() -> None:
    """Run the command of the arguments; if packages of the extra are missing, exit with 2 and the line to write."""
    if sys.argv[1:] == ["--version"]:  # without the extra, and without torch
        print(versions())
        return
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        needed = f"the command line needs {', '.join(missing)}. Write: pip install 'muonmesh[train]'"
        raise SystemExit(complain("", needed, code=2))
    gc.disable()  # garbage collection would take a tenth of this process's time, and gains nothing
    from muonmesh.tools.cli.app import app

    app(prog_name="muonmesh")
