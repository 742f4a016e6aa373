"""The variant amx of the products in C: its order of sums, who gets it, and where in the library its instructions are.

What it computes is in test_compiled.py and test_compiled_sanitized.py, with emulated tiles.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import muonmesh as mm
from muonmesh.numerics import kernels
from muonmesh.numerics.kernels import compiled
from muonmesh.numerics.kernels.compiled import compiled_products
from muonmesh.tools.cli.installation import products_here
from tests.support import emulated

pytestmark = pytest.mark.usefixtures("products")

CPU = torch.device("cpu")
TILES = re.compile(r"\b(tdp\w+|tile(?:load|store|zero|release)\w*|(?:ld|st)tilecfg)\b")


def missing() -> str:
    """Why this processor cannot run it; empty: it can."""
    try:
        return "" if compiled.library("amx") else "?"
    except compiled.NoLibrary as error:
        return str(error)


def test_it_adds_even_and_odd_members_of_pairs_apart(emulated_amx: Path) -> None:
    """2²⁴ + 1 + 1: fp32 keeps neither 1 that is added to 2²⁴, and the 2 that they are together."""
    a, b = torch.zeros(1, 40, 40, dtype=torch.bfloat16), torch.zeros(1, 40, 40, dtype=torch.bfloat16)
    a[0, 3, :4], b[0, :4, 5] = torch.tensor([4096.0, 1.0, 0.0, 1.0]), torch.tensor([4096.0, 1.0, 0.0, 1.0])
    sums = {}
    with emulated.using(emulated_amx):
        for variant in ("", "amx"):
            out, low = torch.empty_like(a), torch.empty_like(a)
            compiled_products(rows=40, cols=40, variant=variant).multiply(a, b, [], out, symmetric=False, low=low)
            sums[variant] = float(out[0, 3, 5].double() + low[0, 3, 5].double())
            assert out.count_nonzero() == 1
    assert sums == {"": 2.0**24, "amx": 2.0**24 + 2}


def in_order_2(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product in order of sums number 2, by torch in fp32. The products of bf16 numbers are exact there."""
    rest = -a.shape[1] % 32
    a, b = torch.nn.functional.pad(a.float(), (0, rest)), torch.nn.functional.pad(b.float(), (0, 0, 0, rest))
    total = torch.zeros(len(a), b.shape[1], dtype=torch.float32)
    for first in range(0, len(b), 32):
        even, odd = torch.zeros_like(total), torch.zeros_like(total)
        for k in range(first, first + 32, 2):
            even += a[:, k, None] * b[k]
            odd += a[:, k + 1, None] * b[k + 1]
        total += even + odd
    return total


@pytest.mark.parametrize("transposed", [False, True])
def test_its_order_of_sums_is_number_2(emulated_amx: Path, transposed: bool) -> None:
    """Across instructions and what is packed at once (2,048 of k), at edges too. Another order needs another number."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=draw, dtype=torch.float32).bfloat16() for shape in ((70, 2100), (2100, 41)))
    laid = b.mT.contiguous().mT if transposed else b
    out, low = torch.empty(1, 70, 41, dtype=torch.bfloat16), torch.empty(1, 70, 41, dtype=torch.bfloat16)
    with emulated.using(emulated_amx):
        multiply = compiled_products(rows=8, cols=8, variant="amx").multiply
        multiply(a[None], laid[None], [], out, symmetric=False, low=low)
    total = in_order_2(a, b)
    assert torch.equal(out[0], total.bfloat16())
    assert torch.equal(low[0], (total - total.bfloat16().float()).bfloat16())


@pytest.mark.parametrize(("rows", "cols"), [(33, 70), (100, 1000), (300, 4096), (900, 900)])
def test_the_library_has_the_bits_of_the_emulation(emulated_amx: Path, rows: int, cols: int) -> None:
    """As setup.py builds it; test_compiled_sanitized.py compares builds with sanitizers, at -O1."""
    if reason := missing():
        pytest.skip(reason)
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows), dtype=torch.float32)
    result = mm.orthogonalize(x, kernels="amx", coefficients="deflated")
    with emulated.using(emulated_amx):
        assert torch.equal(result, mm.orthogonalize(x, kernels="amx", coefficients="deflated"))


def test_its_order_of_sums_has_a_number_of_its_own() -> None:
    products = {name: kernels.told_products(name, device=CPU, dtype=torch.bfloat16) for name in compiled.ORDER_OF_SUMS}
    assert products == {"compiled": "compiled 1", "amx": "amx 2"}


def test_it_is_refused_where_the_processor_or_the_kernel_has_no_tiles() -> None:
    """By name it is an error; what nobody asked for by name goes on with the next variant, and doctor says why."""
    report = products_here().result
    assert report.startswith(f"variant {compiled.library().variant}. ")
    if reason := missing():
        for call in (
            lambda: mm.orthogonalize(torch.ones(3, 4), kernels="amx"),
            lambda: mm.Muon([torch.nn.Parameter(torch.ones(3, 3))], kernels="amx"),
        ):
            with pytest.raises(ValueError, match=r"kernels='amx': found .*; needed .* Write kernels=\"auto\"") as error:
                call()
            assert reason in str(error.value)
        assert report.endswith(f'kernels="amx" is not possible: {reason}')
    else:
        assert report.endswith('kernels="amx" is possible too')
        assert mm.orthogonalize(torch.eye(3), kernels="amx").isfinite().all()
    with pytest.raises(ValueError, match=r"kernels='amx': found torch\.float32; needed bf16"):
        mm.orthogonalize(torch.ones(3, 4), kernels="amx", dtype=torch.float32)
    assert mm.orthogonalize(torch.ones(3, 4)).isfinite().all()


BUILD = ", or build the package where there is a C compiler (pip install . in a clone)"
REASONS = ["a processor without tiles", "a kernel that refuses", "a thread whose stack", "a library without"]


@pytest.mark.parametrize("lacking", ["", *REASONS])
def test_building_is_the_advice_where_it_helps(tmp_path: Path, lacking: str) -> None:
    """Not for what a processor, its kernel or a thread lacks; "": a processor that runs no variant."""
    functions = {"variant": "avx2" if lacking else "", "tiles": lacking}
    lines = [f'const char *muonmesh_{name}(void) {{ return "{answer}"; }}' for name, answer in functions.items()]
    (tmp_path / "none.c").write_text("\n".join(lines))
    options = [emulated.compiler(), "-fPIC", "-shared", tmp_path / "none.c", "-o", tmp_path / "products.so"]
    subprocess.run(options, check=True)
    name = "amx" if lacking else "compiled"
    with emulated.using(tmp_path):
        with pytest.raises(ValueError, match=f"found {lacking or 'a processor without AVX2 and FMA'}; needed") as error:
            mm.orthogonalize(torch.ones(3, 4), kernels=name)
        advice = BUILD if lacking.startswith("a library") else ""
        assert str(error.value).endswith(f'Write kernels="auto"{advice}')
        if not lacking:
            assert products_here().result == "none. Found a processor without AVX2 and FMA. torch multiplies."


def test_doctor_says_that_it_is_possible(emulated_amx: Path) -> None:
    with emulated.using(emulated_amx):
        assert products_here().result.endswith('kernels="amx" is possible too')


def test_auto_does_not_take_it(emulated_amx: Path) -> None:
    with emulated.using(emulated_amx):
        x = torch.randn(200, 300)
        kernel_name = kernels.resolve("auto", device=CPU, dtype=torch.bfloat16, rows=200)
        amx, auto, by_name = (mm.orthogonalize(x, kernels=name) for name in ("amx", "auto", kernel_name))
        assert torch.equal(auto, by_name)
        assert not torch.equal(amx, by_name)


ON_LINUX = pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="AMX is of x86-64")
ASKED = ['strcmp(muonmesh_variant(), "avx512bf16")', "!(d & BF16) || !(d & TILE)", "(saved & TILES) != TILES"]
TOLD = ["a processor without the instructions AMX", "a kernel that saves no registers", "a kernel that refuses the reg"]


@ON_LINUX
@pytest.mark.parametrize(("passed", "message"), [(0, TOLD[0]), (2, TOLD[1]), (3, TOLD[2])])
def test_who_lacks_them_is_told(tmp_path: Path, passed: int, message: str) -> None:
    """As if the first questions were answered well. The answers to the others are those of this machine."""
    text = (emulated.SOURCES / "dispatch.c").read_text()
    for question in ASKED[:passed]:
        assert text.count(question) == 1
        text = text.replace(question, "0")
    (tmp_path / "dispatch.c").write_text(text)
    defines = [f"-DWITH_{name}=1" for name in ("avx2", "avx512", "avx512bf16", "amx")]
    built = emulated.compile_c(tmp_path / "d.so", "avx2", [tmp_path / "dispatch.c"], *defines, "-fPIC", "-shared")
    ask = ctypes.CDLL(str(built)).muonmesh_tiles
    ask.restype = ctypes.c_char_p
    answer, lacking, of_kernels = ask().decode(), missing(), (*TOLD[1:], "a thread whose stack")
    if not lacking or any(text in lacking for text in of_kernels):  # a processor with them, whose kernel may refuse
        assert not answer or (lacking and answer.startswith(of_kernels))
    else:
        assert answer.startswith(message)


def compiler_knows_tiles(folder: Path) -> bool:
    (folder / "empty.c").write_text("int nothing;")
    options = [emulated.compiler(), *emulated.FLAGS["amx"], "-c", "empty.c"]
    return not subprocess.run(options, cwd=folder, capture_output=True, check=False).returncode


@ON_LINUX
def test_the_library_has_its_instructions_in_its_functions_alone(tmp_path: Path) -> None:
    """Those end in its name, and nothing else calls them: `library("amx")` does, which asks for the registers first."""
    objdump = shutil.which("objdump")
    assert objdump, "binutils, which come with the compiler"
    library = Path(compiled.__file__).with_name("products.so")
    code = subprocess.run([objdump, "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True)
    function, instructions, callers = "", dict[str, set[str]](), set[str]()
    for line in code.stdout.splitlines():
        if name := re.fullmatch(r"[0-9a-f]+ <([^>]+)>:", line):
            function = name[1]
        elif instruction := TILES.search(line):
            instructions.setdefault(function, set()).add(instruction[1])
        elif re.search(r"<\w+_amx\b", line):
            callers.add(function)
    if not compiler_knows_tiles(tmp_path):
        assert not instructions
        assert missing() == "a library that was built without AMX"
        return
    assert any(name.startswith("multiply_amx") and "tdpbf16ps" in used for name, used in instructions.items()), (
        instructions
    )
    assert {"sttilecfg", "ldtilecfg", "tilerelease"} <= instructions["muonmesh_multiply_amx"]
    of_plt = {name for name in callers if name.endswith("@plt") or name.endswith("@plt.sec")}
    assert all(re.search(r"_amx\b", name) for name in {*instructions, *callers} - of_plt), (instructions, callers)
