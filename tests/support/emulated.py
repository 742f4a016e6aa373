"""The library of products with a variant amx whose tiles are emulated in C (emulated_tiles.h), for processors without.

Only the tile instructions are emulated; all other code of the variant is what the package has. It needs AVX-512.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from muonmesh.numerics import kernels
from muonmesh.numerics.kernels import compiled

HEADER = Path(__file__).with_name("emulated_tiles.h")
SOURCES = Path(compiled.__file__).parent
FLAGS = {
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4"],
    "avx512bf16": ["-march=x86-64-v4", "-mavx512bf16"],
    "amx": ["-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
    "emulated amx": ["-march=x86-64-v4", "-include", str(HEADER)],
    "neon": ["-march=armv8-a"],
    "bf16": ["-march=armv8.2-a+bf16"],
}
"""Options of the compiler for each variant, whose name is the last word."""
RUNS = {"avx2": ["avx2"], "avx512": ["avx2", "avx512"], "avx512bf16": ["avx2", "avx512", "avx512bf16"]}
RUNS |= {"neon": ["neon"], "bf16": ["neon", "bf16"]}
"""The variants of one order of sums that a processor runs, by the best of them."""


def compiler() -> str:
    """The compiler of C that the fixture `products` has seen."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))


def compile_c(target: Path, variant: str, sources: Sequence[Path], *more: str) -> Path:
    """Compile and link files, one of which may be products.c, for a variant."""
    options = [*FLAGS[variant], f"-DVARIANT={variant.split()[-1]}", "-ffp-contract=off", "-w", *more]
    subprocess.run([compiler(), *options, *map(str, sources), "-lm", "-o", str(target)], check=True)
    return target


def emulates() -> bool:
    """Whether this processor runs what is not emulated of the variant amx."""
    return compiled.library().variant.startswith("avx512")


def build_library(folder: Path) -> None:
    """Build products.so as setup.py does, with emulated tiles, for which nobody is asked."""
    best, objects = compiled.library().variant, list[Path]()
    for variant in (best, "emulated amx"):
        name = folder / f"{variant.split()[-1]}.o"
        objects.append(compile_c(name, variant, [SOURCES / "products.c"], "-O2", "-fPIC", "-c"))
    dispatch, granted = folder / "dispatch.o", folder / "granted.c"
    granted.write_text('const char *muonmesh_tiles(void) { return ""; }\n')
    names = (f"-DWITH_{name}={int(name in (best, 'amx'))}" for name in FLAGS if " " not in name)
    options = ("-Dmuonmesh_tiles=muonmesh_tiles_of_this_processor", *names, "-fPIC", "-c")
    compile_c(dispatch, best, [SOURCES / "dispatch.c"], *options)
    threads = SOURCES / "threads.c"
    compile_c(folder / "products.so", best, [*objects, dispatch, granted, threads], "-fPIC", "-pthread", "-shared")


@contextmanager
def using(folder: Path) -> Iterator[None]:
    """Let the package load its library of products from a folder."""
    compiled_file = compiled.__file__
    try:
        compiled.__file__ = str(folder / "compiled.py")
        compiled.library.cache_clear()
        kernels.auto_takes.cache_clear()
        yield
    finally:
        compiled.__file__ = compiled_file
        compiled.library.cache_clear()
        kernels.auto_takes.cache_clear()
