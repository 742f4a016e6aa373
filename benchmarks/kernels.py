"""What Triton makes of the kernels for five architectures, none of which has to be there.

    python -m benchmarks.kernels                    # the table; a few minutes
    python -m benchmarks.kernels --page             # into benchmarks/results/compiled_kernels.md

Each kernel is compiled by the code that would start it, then read with the tools that come with Triton: registers, what
does not fit in them and is kept in slower memory, shared memory, instructions for tensor cores and asynchronous copies.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from muonmesh.numerics.coefficients import coefficient_schedule
from muonmesh.numerics.kernels import norms, roots, small
from muonmesh.numerics.kernels import pieces as kernels
from muonmesh.numerics.kernels.rows import SEARCHED, PieceRows, Place
from muonmesh.numerics.kernels.tiles import multiplication
from muonmesh.numerics.kernels.triton_launch import Launch

PAGE = Path(__file__).parent / "results" / "compiled_kernels.md"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
"""KiB of shared memory that one program may have."""
TARGETS = {
    **{f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 90, 100, 120)},
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
ARCHITECTURES = list(TARGETS)
WARPS = {"sm_120": 48}
"""That a multiprocessor may have, other than 64. It also has 65,536 registers, and 1 KiB of shared memory more than one
program may have, of which each program takes 1 KiB beside its own."""
ASKED = {"gfx942": {"stages": 2}, "sm_90": {"warps": 4}}
"""What `numerics.kernels.triton` asks for on a device of this kind."""
COLUMNS = 512
"""Of tensor memory, on sm_100."""


class _NoDevice:
    """Tells Triton what to compile for; nothing can be started."""

    def __init__(self, name: str) -> None:
        self._name = name

    def get_current_device(self) -> int:
        return ARCHITECTURES.index(self._name)  # Triton keeps what it has compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self._name]


@contextmanager
def compiling_for(architecture: str) -> Iterator[None]:
    """Let Triton believe that such a device is there."""
    before = driver._active
    driver.set_active(_NoDevice(architecture))
    try:
        yield
    finally:
        driver._active = before


@dataclass(frozen=True)
class Figures:
    """What a compiled kernel needs.

    Attributes:
        registers: A thread's.
        spilled: Bytes of a thread, or on AMD its registers, that did not fit and are kept in memory.
        lanes: AMD: scalar registers kept in lanes of vector registers.
        shared: Bytes of shared memory of one program.
        tensor: Instructions for tensor cores.
        asynchronous: Copies to shared memory that nobody waits for, NVIDIA.
        wide: Loads and stores of 16 bytes at once.
        programs: NVIDIA: how many programs a multiprocessor holds at once; 0 on AMD.
    """

    registers: int
    spilled: int
    lanes: int
    shared: int
    tensor: int
    asynchronous: int
    wide: int
    programs: int


def _programs(registers: int, metadata: Any) -> int:
    """How many programs a multiprocessor holds: registers are given to four warps at a time, 8 a thread at a time."""
    name = f"sm_{metadata.target.arch}"
    warps = min(WARPS.get(name, 64), 65536 // (-(-registers // 8) * 8 * 32) // 4 * 4)
    by_memory = (SHARED[name] + 1) * 1024 // (metadata.shared + 1024)
    return min(warps // metadata.num_warps, by_memory, COLUMNS // (getattr(metadata, "tmem_size", 0) or 1))


def figures(kernel: Any) -> Figures:
    """Read what a compiled kernel needs."""
    if "amdgcn" in kernel.asm:
        code = kernel.asm["amdgcn"]
        counts = {name: int(re.search(rf"\.{name}:\s+(\d+)", code)[1]) for name in AMD}
        tensor, wide = (
            len(re.findall("v_mfma", code)),
            len(re.findall(r"(?:global|buffer)_(?:load|store)_dwordx4", code)),
        )
        return Figures(*(counts[name] for name in AMD), kernel.metadata.shared, tensor, 0, wide, 0)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output("cuobjdump", "-res-usage", file.name)
        code = _output("nvdisasm", "-c", file.name)
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))
    tensor, copies = len(re.findall(r"\b(?:HMMA|HGMMA|UTCHMMA)\b", code)), len(re.findall(r"\bLDGSTS\b", code))
    wide = len(re.findall(r"\b(?:LDG|STG)\.E(?:\.\w+)*\.128\b", code))
    moved = len(re.findall(r"\b(?:STL|LDL)\b", code))
    spilled, programs = max(stack + local, moved), _programs(registers, kernel.metadata)
    return Figures(registers, spilled, 0, kernel.metadata.shared, tensor, copies, wide, programs)


AMD = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")


def _output(tool: str, *arguments: str) -> str:
    process = subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True)
    return process.stdout + process.stderr


def products(rows: int, cols: int, dtype: torch.dtype) -> dict[str, Callable[..., Launch]]:
    """The products of two matrices of this shape, by name; each is given what an architecture asks for."""
    x, other = (torch.empty(2, rows, cols, dtype=dtype) for _ in range(2))
    a, square = (torch.empty(2, rows, rows, dtype=dtype) for _ in range(2))
    s = torch.empty(2, 1, 1)

    def product(*operands: Any, symmetric: bool) -> Callable[..., Launch]:
        return lambda **options: multiplication(*operands, symmetric=symmetric, **options)

    return {
        "X Xᵀ": product(x, x.mT, None, 1.0, 0.0, s, square, symmetric=True),
        "b·A + c·A²": product(a, a, a, 1.0, 2.0, 1.0, square, symmetric=True),
        "Q X": product(a, x, None, 1.0, 0.0, s, other, symmetric=False),
        "(q + W)(p + Z)": lambda **options: multiplication(
            *(a, a, a, 1.0, 2.0, 1.0, square), symmetric=False, d=a, delta=2.0, identity=3.0, **options
        ),
    }


MATRICES = {
    "large": (512, 1024, torch.bfloat16),
    "small": (64, 1024, torch.bfloat16),
    "odd": (511, 1023, torch.bfloat16),
    "fp32": (512, 1024, torch.float32),
    "odd fp32": (511, 1023, torch.float32),
}


def pairs() -> dict[str, Callable[..., Launch]]:
    """The elementwise kernels by name, with fp32 weights and momentum, bf16 on the wire."""
    wide, narrow = [torch.empty(64, 64)], [torch.empty(64, 64, dtype=torch.bfloat16)]
    active, number = torch.empty(1, dtype=torch.bool), torch.empty(1)
    pieces = PieceRows([Place(0, 0, 0, (64, 64), 0, (64, 1), 0, (64, 1))])

    return {
        "fold": lambda **_: kernels.folding(wide, wide, narrow, pieces.number, active, 0.95, True),
        "apply": lambda **_: kernels.applying(wide, [], narrow, pieces.number, active, number, number),
        "apply, masters": lambda **_: kernels.applying(narrow, wide, narrow, pieces.number, active, number, number),
    }


def beside() -> dict[str, Callable[..., Launch]]:
    """The kernels beside products, by name, for bf16 matrices and fp32 gradients."""
    x, number = torch.empty(2, 64, 64, dtype=torch.bfloat16), torch.empty(2, 1, 1)
    exponents, gradient = torch.empty(2, 1, dtype=torch.int32), [torch.empty(64, 64)]
    pieces = PieceRows([Place(0, 0, 0, (64, 64), 0, (64, 1), 0, (64, 1))], SEARCHED)
    gram, memory, steps = torch.empty(2, 64, 64), torch.empty(3, 2, 64, 64), [0.1 * n for n in range(1, 16)]
    return {
        "norms of parts": lambda **_: norms.measuring(x, exponents, number[:, 0]),
        "norms": lambda **_: norms.finding_norms(exponents, number[:, 0], exponents[:, 0], number, number),
        "powers of two": lambda **_: norms.rescaling(x, x.view(torch.float16), exponents[:, 0]),
        "signs": lambda **_: roots.giving_signs(x.view(torch.float16)),
        "whiten": lambda **_: roots.whitening(gram, memory, 0.1, 0.1, steps),
        "soften": lambda **_: roots.softening(gram, number, memory, 0.1, 0.1, (0.1, 0.2, 0.3, 0.4, 0.5), steps),
        "any not zero": lambda **_: kernels.finding(gradient, pieces.number, exponents[:, 0]),
    }


def whole() -> dict[str, Callable[..., Launch]]:
    """All steps of small matrices, by their shape."""
    polynomials = [number for step in coefficient_schedule("polar_express", 5) for number in step]

    def steps(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> Callable[..., Launch]:
        x = torch.empty(2, rows, cols, dtype=dtype)
        return lambda **_: small.orthogonalizing(x, torch.empty_like(x), polynomials)

    return {"64×64": steps(64, 64), "64×128": steps(64, 128), "63×127": steps(63, 127)}


def compiled(architecture: str, kind: str, name: str) -> Figures:
    """Compile one kernel, a product of one kind of matrices or one of the "pieces", and read what it needs."""
    others = {"pieces": pairs, "beside": beside, "all steps": whole}
    launch = (others[kind]() if kind in others else products(*MATRICES[kind]))[name]
    with compiling_for(architecture):
        return figures(launch(**ASKED.get(architecture, {})).compile())


def table() -> str:
    """The table of the page."""
    head = ["kernel", "matrices", *(f"{name} ({SHARED[name]})" for name in ARCHITECTURES)]
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    kinds = {
        **{kind: list(products(8, 8, torch.bfloat16)) for kind in MATRICES},
        "pieces": list(pairs()),
        "beside": list(beside()),
        "all steps": list(whole()),
    }
    for kind, names in kinds.items():
        for name in names:
            cells = [_cell(compiled(architecture, kind, name)) for architecture in ARCHITECTURES]
            rows.append("| " + " | ".join([name, kind, *cells]) + " |")
            print(rows[-1], flush=True)
    return "\n".join(rows)


def _cell(figures: Figures) -> str:
    spilled = f"{figures.spilled}" + (f" + {figures.lanes}" if figures.lanes else "")
    instructions = f"{figures.tensor} / {figures.asynchronous} / {figures.wide}"
    programs = f"; {figures.programs}" if figures.programs else ""
    return f"{figures.registers}, {spilled}, {figures.shared / 1024:.0f}; {instructions}{programs}"


def main() -> None:
    """Print the table, and put it into the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="replace the recorded table")
    arguments = parser.parse_args()
    rows = table()
    if arguments.page:
        begin, end = "<!-- table -->\n", "\n<!-- end of table -->"
        text = PAGE.read_text()
        PAGE.write_text(text[: text.index(begin) + len(begin)] + rows + text[text.index(end) :])


if __name__ == "__main__":
    main()
