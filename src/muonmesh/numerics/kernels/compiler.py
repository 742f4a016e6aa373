"""The user's C compiler: a source file of the package becomes a library of functions, once for each kind of machine.

The library is kept in ``$XDG_CACHE_HOME/muonmesh`` (``~/.cache/muonmesh``) under a name that follows from the source,
the command and the processor's instructions, so it is never out of date, and machines that share a home do not meet.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path

# No contraction: a product and a sum that the source rounds one after the other stay two, with every compiler.
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC", "-w")


class CompilerError(RuntimeError):
    """There is no compiler, or it cannot compile the source; the message says what was run and what it answered."""


@cache
def compiled(source: str, *flags: str) -> ctypes.CDLL:
    """Return the library of a C file of this package, compiling it where this machine has not done so before.

    Args:
        source: Its name, beside this module.
        flags: For the compiler, besides those for the instructions of this processor.

    Raises:
        CompilerError: see there.
    """
    code = files(__package__).joinpath(source).read_bytes()
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    command = [*_compiler(), *_FLAGS, native, *flags]
    said = hashlib.sha256(b"\0".join([code, *map(str.encode, command), _instructions()])).hexdigest()
    name = f"{Path(source).stem}-{said[:16]}.so"
    for folder in _folders():
        library = folder / name
        try:
            if not library.exists():
                folder.mkdir(parents=True, exist_ok=True)
                _compile(command, code, library)
            return ctypes.CDLL(str(library))
        except OSError:  # a folder that cannot be written, or from which nothing may be run
            continue
    raise CompilerError(
        f"no folder for {name} that can be written and run from among {', '.join(map(str, _folders()))}"
    )


def _compiler() -> list[str]:
    """Return the command of ``$CC``, or of the first compiler that is installed."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise CompilerError("no C compiler: neither $CC nor cc, gcc or clang")


def _compile(command: list[str], code: bytes, library: Path) -> None:
    # Ranks may do this at the same time: each writes a file of its own, and the last to rename it wins.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        run = [*command, "-x", "c", "-", "-o", str(built), "-lm"]
        try:
            done = subprocess.run(run, input=code, capture_output=True, check=False)
        except FileNotFoundError as error:
            raise CompilerError(f"no C compiler {command[0]}") from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise CompilerError(f"{shlex.join(run)} ended with {done.returncode}: {' '.join(said[:3])}")
        built.replace(library)


def _folders() -> list[Path]:
    kept = os.environ.get("XDG_CACHE_HOME")
    return [
        (Path(kept) if kept else Path.home() / ".cache") / "muonmesh",
        Path(tempfile.gettempdir()) / f"muonmesh-{os.getuid()}",
    ]


def _instructions() -> bytes:
    """Return what tells this processor from others that may use the same folder."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))
