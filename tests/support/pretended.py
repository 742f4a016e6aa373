"""A processor that tests pretend to have: MUONMESH_TEST_PROCESSOR=amx, avx512 (no bf16 instructions), avx2 or no-amx.

`environment` is what torch and oneDNN read when they are loaded. `install` makes torch and the package's own library of
products say the same. Ranks of a pool import this file, and other processes do through `sitecustomize`, so all of them
pretend too. With "amx" products are computed as here: it is what the package chooses that changes.
"""

from __future__ import annotations

import functools
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

VARIABLE = "MUONMESH_TEST_PROCESSOR"
HERE = Path(__file__).parent / "pretending"

# What torch and oneDNN read in the environment, whether torch says AMX and bf16 instructions (None: as it is), and the
# variant of the products in C.
PROCESSORS: dict[str, tuple[dict[str, str], bool, bool | None, str]] = {
    "amx": ({}, True, None, ""),
    "no-amx": ({}, False, None, ""),
    "avx512": ({"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, False, False, "avx512"),
    "avx2": ({"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, False, False, "avx2"),
}


def environment(processor: str) -> dict[str, str]:
    """The environment of a process that starts and pretends to have this processor, whatever this one pretends."""
    limits = PROCESSORS["avx2"][0]
    inherited = {name: value for name, value in os.environ.items() if name not in limits}
    paths = [str(HERE), str(HERE.parents[2]), *filter(None, [inherited.get("PYTHONPATH")])]
    return {**inherited, **PROCESSORS[processor][0], VARIABLE: processor, "PYTHONPATH": os.pathsep.join(paths)}


def install() -> None:
    """Pretend in this process, as soon as the package loads its products."""
    if VARIABLE in os.environ and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds one module as Python does, and has it pretend once it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "muonmesh.numerics.kernels.compiled" else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_pretend(module: Any) -> None:
                load(module)
                _pretend(module)

            spec.loader.exec_module = load_and_pretend  # type: ignore[method-assign]
        return spec


def _pretend(compiled: Any) -> None:
    import torch

    _, amx, bf16, variant = PROCESSORS[os.environ[VARIABLE]]
    torch.cpu._is_amx_tile_supported = lambda: amx
    if bf16 is not None:
        torch.cpu._is_avx512_bf16_supported = lambda: bf16
    whole = compiled.library

    @functools.wraps(whole)
    def library(wanted_variant: str = "") -> Any:
        return whole(wanted_variant or variant)

    library.cache_clear = whole.cache_clear  # type: ignore[attr-defined]
    compiled.library = library
