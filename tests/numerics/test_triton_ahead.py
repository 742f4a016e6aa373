"""Triton's kernels compiled ahead of time for devices that are not there: what fits, what is used, what is copied how.

A part of benchmarks/results/compiled_kernels.md, which `benchmarks/kernels.py` makes with the functions used here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from muonmesh.numerics.kernels.rows import MEASURED
from tests.support.samples import one_in

COVERS = ("numerics.kernels.tiles.tile_for",)

REPOSITORY = Path(__file__).parents[2]
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The script, with a cache of its own: nothing that was compiled before is taken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield importlib.import_module("kernels")
        del sys.modules["kernels"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_large_product_fits_and_uses_tensor_cores(script: ModuleType, architecture: str) -> None:
    kernel = script.compiled(architecture, "large", "Q X")
    assert (kernel.spilled, kernel.lanes) == (0, 0)
    assert kernel.registers <= 255
    assert kernel.shared <= 1024 * script.SHARED[architecture]
    assert kernel.tensor > 0
    assert kernel.wide > 0
    assert kernel.asynchronous > 0 or architecture == "gfx942"


@pytest.mark.parametrize(
    ("architecture", "kind", "name", "spilled"),
    [
        ("sm_90", "large", "(q + W)(p + Z)", 88),
        ("sm_100", "large", "(q + W)(p + Z)", 0),
        ("sm_90", "large", "X Xᵀ", 0),
        ("gfx942", "large", "b·A + c·A²", 0),
        ("sm_120", "fp32", "X Xᵀ", 0),
    ],
)
def test_a_symmetric_product_fits(script: ModuleType, architecture: str, kind: str, name: str, spilled: int) -> None:
    kernel = script.compiled(architecture, kind, name)
    assert (kernel.spilled, kernel.lanes) == (spilled, 0)
    assert kernel.shared <= 1024 * script.SHARED[architecture]
    assert (kernel.tensor > 0) == (kind == "large")  # fp32 is not multiplied as TF32
    assert kernel.wide >= (16 if kind == "large" else 0)  # both triangles are stored 16 bytes at a time


def test_a_matrix_that_is_not_aligned_fits(script: ModuleType) -> None:
    kernel = script.compiled("sm_80", "odd", "b·A + c·A²")
    assert kernel.spilled == 0
    assert kernel.tensor > 0


@pytest.mark.parametrize("name", ["fold", "apply, masters"])
def test_the_elementwise_pair_moves_sixteen_bytes_at_a_time(script: ModuleType, name: str) -> None:
    kernel = script.compiled("sm_90", "pieces", name)
    assert kernel.spilled == 0
    assert kernel.wide >= 20  # also of a matrix whose direction lies transposed


def test_all_steps_of_a_small_matrix_fit(script: ModuleType) -> None:
    """Four programs on a multiprocessor: 1,000 matrices are two turns of 132 of them."""
    kernel = script.compiled("sm_90", "all steps", "64×64")
    assert kernel.spilled == 0
    assert kernel.programs >= 4
    assert kernel.tensor > 0


@pytest.mark.parametrize(("architecture", "spilled"), [("sm_90", 24), ("sm_100", 40), ("sm_120", 0)])
def test_functions_of_small_squares_fit(script: ModuleType, architecture: str, spilled: int) -> None:
    """By operands in memory; with all of them in registers thousands of bytes are spilled."""
    kernel = script.compiled(architecture, "beside", "soften")
    assert kernel.spilled <= spilled
    assert kernel.tensor == 0  # fp32 is not multiplied as TF32


@pytest.mark.parametrize(("architecture", "name"), [("sm_90", "norms of parts"), ("gfx942", "any not zero")])
def test_what_is_beside_products_fits(script: ModuleType, architecture: str, name: str) -> None:
    kernel = script.compiled(architecture, "beside", name)
    assert (kernel.spilled, kernel.lanes) == (0, 0)
    assert kernel.wide > 0 or name == "any not zero"  # which hardly reads anything


PAGE = (REPOSITORY / "benchmarks" / "results" / "compiled_kernels.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("<!-- table -->")[2].partition("<!-- end of table -->")[0].splitlines()[3:]
]


@pytest.mark.parametrize("row", one_in(9, ROWS), ids=lambda row: " ".join(row[:2]))
def test_the_page_says_what_the_compiler_makes(script: ModuleType, row: list[str]) -> None:
    """Registers, spills, shared memory and instructions for sm_80, sm_90 and sm_100."""
    import triton

    name, kind, *cells = row
    assert f"Triton {triton.__version__}." in PAGE, "python -m benchmarks.kernels --page makes the table"
    for architecture, cell in zip(ARCHITECTURES[:3], cells, strict=False):
        assert script._cell(script.compiled(architecture, kind, name)) == cell, architecture


def test_odd_sizes_do_not_each_ask_for_a_kernel(script: ModuleType) -> None:
    """One for all that is aligned, one for all that is not."""
    import torch

    with script.compiling_for("sm_90"):

        def compiled(rows: int, cols: int) -> object:
            return script.products(rows, cols, torch.bfloat16)["Q X"]().compile()

        assert compiled(512, 1024) is compiled(768, 3072) is compiled(272, 272)
        assert compiled(4096, 4096) is compiled(512, 1024)  # matrices that are far apart have rows that are not
        assert compiled(511, 1023) is compiled(513, 2049) is compiled(511, 1024) is compiled(1, 16)
        assert compiled(512, 1024) is not compiled(511, 1023)


@pytest.mark.parametrize("name", ["norms of parts", "powers of two"])
def test_places_in_a_large_matrix_are_told_in_64_bits(script: ModuleType, name: str) -> None:
    """A matrix of 2³¹ elements or more: where a part of it begins does not fit in 32."""
    with script.compiling_for("sm_90"):
        code = script.beside()[name]().compile().asm["ttir"]
    assert f"arith.constant {MEASURED} : i64" in code
    assert not [line for line in code.splitlines() if "arith.muli" in line and f"%c{MEASURED}_i32" in line]
