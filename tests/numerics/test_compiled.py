"""Products in C: each against fp64, the same bits however cut up and on every processor.

The tiles of the variant amx are emulated here (tests/support/emulated.py), whatever the processor is. One that has
tiles multiplies by its own too.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import muonmesh as mm
from muonmesh.numerics import kernels
from muonmesh.numerics.coefficients import coefficient_schedule
from muonmesh.numerics.iteration import CpuIteration
from muonmesh.numerics.kernels import compiled
from muonmesh.numerics.kernels.compiled import compiled_products
from muonmesh.numerics.newton_schulz import Orthogonalizer, orthogonalize
from muonmesh.numerics.normalize import load
from tests.support import emulated
from tests.support.alone import alone, in_child
from tests.support.emulated import RUNS

COVERS = (
    "numerics.kernels.compiled.compiled_products",
    "numerics.iteration.CpuIteration.run",
)

pytestmark = pytest.mark.usefixtures("products")

TABLE = compiled_products(rows=8, cols=8, batch_limit=3)
# Tiles of 12 or 4 rows and 32 or 16 columns, groups of four panels, 3072 elements of depth at a time. amx: tiles of 32
# rows and 16 pairs, groups of eight panels, 2048 elements, and rows that are 4,096 bytes apart.
SIZES = [(1, 1), (13, 1), (1, 13), (3, 50), (12, 32), (37, 39), (128, 128), (130, 259), (40, 3073), (401, 530)]
SIZES += [(32, 64), (33, 2048), (64, 4096), (300, 2100)]


def random_bf16(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def symmetric(rows: int, batch: int, seed: int) -> Tensor:
    x = random_bf16(batch, rows, rows, seed=seed) / rows**0.5
    return x.triu() + x.triu(1).mT


def near(result: Tensor, expected: Tensor, eps: float = 2**-8) -> None:
    """One rounding, and sums in fp32; relative to the largest entry."""
    tolerance = (1.01 * eps + 2**-19) * float(expected.abs().max())
    assert float((result.double() - expected).abs().max()) <= tolerance


def has_tiles() -> bool:
    """Whether this processor, its kernel and the library have AMX."""
    try:
        compiled.library("amx")
    except compiled.NoLibrary:
        return False
    return True


@pytest.fixture(params=["compiled", "amx", *(["amx of this processor"] if has_tiles() else [])])
def name(request: pytest.FixtureRequest) -> Iterator[mm.KernelName]:
    """``kernels`` of both orders of sums."""
    folder = request.getfixturevalue("emulated_amx") if request.param == "amx" else None
    with nullcontext() if folder is None else emulated.using(folder):
        yield "compiled" if request.param == "compiled" else "amx"


@pytest.fixture
def table(name: mm.KernelName) -> kernels.Matmuls:
    return compiled_products(rows=8, cols=8, batch_limit=3, variant="amx" if name == "amx" else "")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# --- products ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_products_against_fp64(rows: int, cols: int, batch: int, table: kernels.Matmuls) -> None:
    x, a, b, c = random_bf16(batch, rows, cols) / cols**0.5, *(symmetric(rows, batch, seed) for seed in (1, 2, 3))
    before = [t.clone() for t in (x, a, b, c)]
    xd, ad, bd, cd = (t.double() for t in (x, a, b, c))
    square, low, long = torch.full_like(a, torch.nan), torch.full_like(a, torch.nan), torch.full_like(x, torch.nan)
    scales = torch.linspace(0.5, 2.0, batch)[:, None, None]

    near(table.multiply(x, None, [], square, scale=scales), scales.double() * (xd @ xd.mT))
    assert torch.equal(square, square.mT)
    near(table.multiply(a, a, [(a, -2.5)], square, alpha=1.25), -2.5 * ad + 1.25 * ad @ ad)
    assert torch.equal(square, square.mT)
    upper = table.multiply(a, b, [(c, 0.75)], square)
    expected = 0.75 * cd + ad @ bd
    near(upper.triu(), expected.triu())
    assert torch.equal(upper, upper.mT), "the lower triangle is the mirror image of the upper one"
    near(table.multiply(a, b, [(c, 0.75)], square, symmetric=False), expected)
    near(table.multiply(a, x, [(x, 1.5)], long, scale=1.0, symmetric=False), 1.5 * xd + ad @ xd)
    near(
        table.multiply(a, x, [(x, scales)], long, scale=scales, symmetric=False),
        scales.double() * (scales * xd + ad @ xd),
    )
    assert table.exact is not None
    combined = table.multiply(a, b, ((c, scales), (a, -3.0)), square, 0.5, low=low, symmetric=False)
    expected = 0.5 * ad @ bd + scales * cd - 3 * ad
    near(combined, expected)
    near(combined.double() + low.double(), expected, eps=2**-16)
    table.multiply(a, b, ((c, scales), (a, -3.0)), square, 0.5, low=low)
    near((square.double() + low.double()).triu(), expected.triu(), eps=2**-16)
    assert torch.equal(square, square.mT)
    assert torch.equal(low, low.mT)
    assert all(map(torch.equal, (x, a, b, c), before))


def test_what_is_added_is_rounded_once(table: kernels.Matmuls) -> None:
    """1 and twice 1.5·2⁻⁹ is 1 + 2⁻⁷ if rounded once; rounded after each sum it would stay 1."""
    a = torch.eye(40, dtype=torch.bfloat16)[None]
    small, out = torch.full_like(a, 1.5 * 2**-9), torch.empty_like(a)
    assert table.exact is not None
    table.multiply(a, torch.ones_like(a), ((small, 1.0), (small, 1.0)), out, 1.0, symmetric=False)
    assert torch.equal(out, torch.full_like(out, 1 + 2**-7))


def all_products(table: kernels.Matmuls, x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    """Every product of a table, bits to be compared."""
    squares, long = [torch.empty_like(a) for _ in range(8)], torch.empty_like(x)
    scales = torch.linspace(0.5, 2.0, len(x))[:, None, None]
    assert table.exact is not None
    return [
        table.multiply(x, None, [], squares[0], scale=scales),
        table.multiply(a, a, [(a, -2.5)], squares[1], alpha=1.25),
        table.multiply(a, b, [(b, 0.75)], squares[2]),
        table.multiply(a, b, [(b, 0.75)], squares[3], symmetric=False),
        table.multiply(x, x.mT, ((a, 0.3), (b, 0.1)), squares[4], 0.7, low=squares[5]),
        squares[5],
        table.multiply(a, b, ((a, 0.3), (b, 0.1)), squares[6], 0.7, low=squares[7], symmetric=False),
        squares[7],
        table.multiply(a, x, [(x, scales)], long, scale=scales, symmetric=False),
        table.exact.row_products(x, long),
    ]


@pytest.mark.parametrize(("rows", "cols"), [(64, 70), (300, 517), (401, 3100)])
def test_bits_depend_neither_on_the_batch_nor_on_threads(
    rows: int, cols: int, threads: None, table: kernels.Matmuls
) -> None:
    x, a, b = random_bf16(3, rows, cols), symmetric(rows, 3, 1), symmetric(rows, 3, 2)
    torch.set_num_threads(1)
    expected = all_products(table, x, a, b)
    for count in (2, 3, 5):
        torch.set_num_threads(count)
        assert all(map(torch.equal, all_products(table, x, a, b), expected)), count
    torch.set_num_threads(1)
    scales = torch.linspace(0.5, 2.0, 3)[:, None, None]
    for n in range(3):
        alone = x[n : n + 1], a[n : n + 1], b[n : n + 1]
        assert torch.equal(
            table.multiply(alone[0], None, [], torch.empty_like(alone[1]), scale=scales[n : n + 1])[0], expected[0][n]
        )
        assert torch.equal(
            table.multiply(alone[1], alone[2], [(alone[2], 0.75)], torch.empty_like(alone[1]))[0], expected[2][n]
        )


def test_every_processor_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All variants that run here, with other tiles; also rows that bf16 instructions take for zero."""
    best = compiled.library().variant
    for rows, cols in ((37, 39), (130, 259)):
        x, a, b = random_bf16(2, rows, cols), symmetric(rows, 2, 1), symmetric(rows, 2, 2)
        tiny = x.clone()
        tiny[:, ::10] *= 2.0**-120
        tiny[:, ::15] *= 2.0**-8
        for y in (x, tiny, x * 2.0**-70):
            results = {}
            for variant in RUNS[best]:
                with monkeypatch.context() as patch:
                    patch.setattr(
                        compiled, "library", lambda _="", other=compiled.library, chosen=variant: other(chosen)
                    )
                    results[variant] = [*all_products(TABLE, y, a, b), *loaded(y)]
            for variant in RUNS[best]:
                assert all(map(torch.equal, results[variant], results[best])), variant


def test_the_mode_of_the_processor_is_given_back(table: kernels.Matmuls) -> None:
    table.multiply(
        random_bf16(1, 40, 50), None, [], torch.empty(1, 40, 40, dtype=torch.bfloat16), scale=torch.ones(1, 1, 1)
    )
    assert torch.tensor(1e-30).mul(1e-10).item() > 0, "numbers below 2^-126 are numbers again"


# --- one pass ---------------------------------------------------------------------------------------------------


def loaded(x: Tensor) -> tuple[Tensor, Tensor]:
    assert TABLE.exact is not None
    out = torch.empty(len(x), *sorted(x.shape[1:]), dtype=x.dtype)
    return out, TABLE.exact.load(x, out)


@pytest.mark.parametrize("exponent", [-133, -126, -100, 0, 60, 125])
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (64, 64), (130, 70), (90, 900)])
def test_load_is_that_of_torch_s_operations(shape: tuple[int, int], exponent: int) -> None:
    x = (random_bf16(3, *shape).clamp(-2, 2).double() * 2.0**exponent).bfloat16()
    x[1] = 0
    expected = torch.empty(3, *sorted(shape), dtype=torch.bfloat16)
    norms = load(x, expected, as_batch=False)
    out, loaded_norms = loaded(x)
    assert loaded_norms[1] == 1
    assert torch.equal(out, expected)
    torch.testing.assert_close(loaded_norms, norms.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_load_says_that_a_matrix_is_not_finite(bad: float) -> None:
    x = random_bf16(3, 20, 31)
    x[1, 19, 30] = bad
    norms = loaded(x)[1].flatten()
    assert norms[1].isnan()
    assert norms[[0, 2]].isfinite().all()


@pytest.mark.parametrize("shape", [(1, 1), (5, 17), (64, 200), (131, 70)])
def test_rows_and_transposes(shape: tuple[int, int]) -> None:
    x, y = random_bf16(2, *shape), random_bf16(2, *shape, seed=1)
    assert TABLE.exact is not None
    expected = (x.double() * y.double()).sum(-1)
    torch.testing.assert_close(TABLE.exact.row_products(x, y).double(), expected, rtol=1e-5, atol=1e-5)
    out = torch.empty(2, *shape[::-1], dtype=x.dtype)
    TABLE.exact.store(x, out)
    assert torch.equal(out, x.mT)


# --- orthogonalization ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coefficients", ["polar_express", "quintic", "deflated"])
@pytest.mark.parametrize("shape", [(5, 8), (2, 64, 70), (200, 90), (384, 400), (400, 1000)])
def test_it_is_as_near_to_the_polar_factor_as_torch_s(
    shape: tuple[int, ...], coefficients: str, name: mm.KernelName
) -> None:
    x = random_bf16(*shape).float()
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    error, torch_error = (
        float(
            (orthogonalize(x, coefficients=coefficients, kernels=products).double() - u @ vh).norm() / (u @ vh).norm()
        )
        for products in (name, "torch")
    )
    assert error < 1.05 * torch_error + 0.003
    wide, tall = (orthogonalize(y, coefficients=coefficients, kernels=name) for y in (x, x.mT))
    assert torch.equal(tall, wide.mT)


SMALL = [(1, 1), (1, 9), (13, 5), (64, 64), (37, 130), (200, 33), (65, 128), (255, 255), (256, 256)]


def step_by_step(whole: Orthogonalizer, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    CpuIteration(whole.prepared, whole.segments, whole.products, whole.dtype).run(x.clone(), out, overwrite=False)
    return out


OWN = [[(1.5, -0.5)], [(2.0, 0.0, -0.5), (1.5, -0.5, 0.0)], [(0.0, 1.0)]]


@pytest.mark.parametrize("coefficients", ["polar_express", "simple", "cans", *OWN])
def test_all_steps_in_one_call_have_the_bits_of_single_steps(
    coefficients: mm.Coefficients, name: mm.KernelName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all variants that run here; with zeros, numbers that are not finite, tiny and huge matrices and rows."""
    options: dict[str, Any] = {"steps": None, "method": "auto", "dtype": torch.bfloat16, "kernels": name}
    variants = ["amx"] if name == "amx" else RUNS[compiled.library().variant]
    for shape in SMALL:
        x = random_bf16(7, *shape).float()
        x[1:4] *= torch.tensor([1e-38, 1e37, 0.0])[:, None, None]
        x[4] *= 10.0 ** torch.linspace(-12, 0, shape[0])[:, None]
        x[5, -1, 0], x[6, 0, -1] = math.inf, math.nan
        x = x.bfloat16()
        for variant in variants:
            with monkeypatch.context() as patch:
                if name != "amx":
                    patch.setattr(
                        compiled, "library", lambda _="", other=compiled.library, chosen=variant: other(chosen)
                    )
                whole = Orthogonalizer.of(*shape, coefficients=coefficients, device=x.device, **options)
                assert whole.products.small is not None
                out = torch.full_like(x, 7.0)
                whole.products.small.run(x, out, whole.quintics)
                for result, expected in ((whole(x), out), (out, step_by_step(whole, x))):
                    assert torch.equal(result.isnan(), expected.isnan())
                    assert torch.equal(result.nan_to_num(), expected.nan_to_num())
                assert not out[5:].isfinite().any()
                assert not out[3].any()
                apart = torch.empty(3, *shape[::-1], dtype=x.dtype).mT.copy_(x[:3])
                assert torch.equal(whole(apart), out[:3])


def test_a_matrix_of_another_batch_does_not_decide_what_is_added() -> None:
    """0 times infinity is NaN, so that a summand whose factor is 0 is left out for each matrix or for none."""
    x, a = random_bf16(2, 5, 9), symmetric(5, 2, 1)
    x[0, 0, 0] = math.inf
    scale = torch.tensor([1.0, math.nan])[:, None, None]
    pair = TABLE.multiply(a, x, [(x, 0.0)], torch.empty_like(x), scale=scale, symmetric=False)
    single = TABLE.multiply(a[:1], x[:1], [(x[:1], 0.0)], torch.empty_like(x[:1]), scale=scale[:1], symmetric=False)
    assert torch.equal(pair[0].nan_to_num(), single[0].nan_to_num())


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak)])
def test_all_steps_on_one_gram_matrix_are_as_accurate_as_one_by_one(seed: int) -> None:
    """Spectra over which bf16 Gram matrices alone would be off; singular values stay below 1.2 (1.37 without `low`)."""
    u, _, vh = torch.linalg.svd(random_bf16(384, 800, seed=seed).double(), full_matrices=False)
    along = torch.linspace(0, 1, 384, dtype=torch.float64)
    for s in (10 ** (-along), 10 ** (-2 * along), 10 ** (-4 * along), (along > 0.1) + 1e-3, (along < 0.02) + 0.01):
        x = ((u * s) @ vh).bfloat16()
        one_by_one, by_gram = (
            orthogonalize(x, coefficients="deflated", kernels="compiled", method=method).double()
            for method in ("standard", "gram")
        )
        errors = [float((y - u @ vh).norm() / 384**0.5) for y in (one_by_one, by_gram)]
        assert errors[1] < 1.08 * errors[0] + 0.002
        assert float(torch.linalg.matrix_norm(by_gram, 2)) < 1.17


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_all_steps_at_once_are_the_polynomials(steps: int) -> None:
    """Against the polynomials in fp64; deflation has little to bring down, since all values are near each other."""
    u, _, vh = torch.linalg.svd(random_bf16(384, 800).double(), full_matrices=False)
    s = torch.linspace(0.9, 1.0, 384, dtype=torch.float64)
    result = orthogonalize(
        ((u * s) @ vh).bfloat16(), coefficients="deflated", steps=steps, kernels="compiled", method="gram"
    )
    values = s / s.pow(8).sum() ** 0.125
    values[-64:] = values[-64]  # at most; by how much hardly shows
    for p in coefficient_schedule("deflated", steps):
        values = sum(c * values ** (2 * k + 1) for k, c in enumerate(p))
    ends = torch.einsum("ij,ik,kj->j", u, result.double(), vh.mT)
    torch.testing.assert_close(ends[:-64], values[:-64], rtol=0.05, atol=0)


@pytest.mark.parametrize("coefficients", ["polar_express", "deflated"])
def test_bits_of_a_matrix_do_not_depend_on_its_surroundings(
    coefficients: str, threads: None, name: mm.KernelName
) -> None:
    def run(y: Tensor) -> Tensor:
        return orthogonalize(y, coefficients=coefficients, kernels=name)

    for shape in ((8, 8), (17, 40), (100, 131), (384, 800)):
        x = random_bf16(5, *shape)
        torch.set_num_threads(1)
        alone = torch.stack([run(matrix.clone()) for matrix in x])
        assert torch.equal(run(x), alone)
        torch.set_num_threads(2)
        assert torch.equal(run(x), alone)
        assert torch.equal(run(x * 2.0**-90), alone)
        assert torch.equal(run(x.mT.contiguous().mT), alone)
        shifted = torch.zeros(x.numel() + 3, dtype=x.dtype)[3:].view_as(x)
        assert torch.equal(run(shifted.copy_(x)), alone)


# --- the library ------------------------------------------------------------------------------------------------


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A package that was built without a C compiler: there is no library beside compiled.py."""
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
    compiled.library.cache_clear()
    kernels.auto_takes.cache_clear()
    yield tmp_path
    compiled.library.cache_clear()
    kernels.auto_takes.cache_clear()


LIBRARY = Path(compiled.__file__).with_name("products.so")
FOREIGN = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 0xF3, 1, 0, 0, 0, 0, 64, 0, 0, 0, 0, 0)  # RISC-V


def is_told(file: str) -> bool:
    compiled.__file__ = file
    compiled.library.cache_clear()
    with pytest.raises(compiled.NoLibrary):
        compiled.library()
    return True


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: None, "No such file"),
        (lambda: b"", "file too short"),
        (lambda: b"\x7fELF", "file too short"),
        (lambda: b"no library" * 9, "invalid ELF header"),
        (lambda: FOREIGN, "cannot open shared object file"),
        (lambda: LIBRARY.read_bytes()[:30_000], "it ends after 30,000 bytes of "),  # the loader would die of SIGBUS
        (
            lambda: LIBRARY.read_bytes().replace(b"muonmesh_row_products_", b"muonmesh_old_products_"),
            "undefined symbol: muonmesh_row_products_",
        ),
    ],
)
def test_without_a_library(no_library: Path, content: Callable[[], bytes | None], message: str) -> None:
    """None, one that is cut off, of another processor or version: torch multiplies, and who asks is told what to write.

    What a loader may kill is tried in a process of its own first.
    """
    if (contents := content()) is not None:
        (no_library / "products.so").write_bytes(contents)
    if message.startswith("it ends"):
        assert alone(is_told, compiled.__file__)
    with pytest.raises(
        ValueError, match=r"found no products.so in the package .* Write kernels=\"auto\", or build"
    ) as e:
        orthogonalize(random_bf16(4, 4), kernels="compiled")
    assert message in str(e.value)
    with pytest.raises(ValueError, match='Write kernels="auto"'):
        mm.Muon([torch.nn.Parameter(torch.ones(3, 3))], kernels="compiled")
    x = random_bf16(100, 130)
    assert torch.equal(orthogonalize(x), orthogonalize(x, kernels="torch"))


def test_nothing_is_compiled_or_loaded_from_elsewhere(tmp_path: Path) -> None:
    """With a home, a cache, a temporary folder and a path of somebody else's."""
    planted = tmp_path / "muonmesh"
    planted.mkdir()
    for name in ("cc", "gcc", "clang"):
        (planted / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
        (planted / name).chmod(0o755)
    variables = ("HOME", "XDG_CACHE_HOME", "TMPDIR", "TEMP", "LD_LIBRARY_PATH")
    environment = {**os.environ, **dict.fromkeys(variables, str(tmp_path)), "CC": str(planted / "cc")}
    environment["PATH"] = f"{planted}:{environment['PATH']}"
    code = "import torch, muonmesh; print(muonmesh.orthogonalize(torch.ones(3, 3), kernels='compiled').sum())"
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.startswith("tensor(")
    assert not (tmp_path / "ran").exists()
    assert {path.name for path in tmp_path.rglob("*")} == {"muonmesh", "cc", "gcc", "clang"}


def forked_differs(name: mm.KernelName, file: str) -> list[int]:
    """Multiply here and in children with so many threads; return how each ended."""
    compiled.__file__ = file
    compiled.library.cache_clear()
    torch.set_num_threads(2)
    matrices = [torch.randn(*shape) for shape in ((5, 40, 90), (400, 900), (900, 900))]

    def run() -> list[Tensor]:
        return [orthogonalize(x, kernels=name, coefficients="deflated") for x in matrices]

    def compare(threads: int) -> None:
        torch.set_num_threads(threads)
        assert all(map(torch.equal, run(), expected))

    expected = run()
    return [in_child(functools.partial(compare, threads)) for threads in (1, 2)]


def test_a_forked_process_multiplies_with_the_same_bits(name: mm.KernelName) -> None:
    """The helpers of its parent are not there."""
    assert alone(forked_differs, name, compiled.__file__, timeout=60) == [0, 0]


def with_a_helper_that_waits() -> tuple[list[int], bool]:
    """The parts in the order in which they were computed, and whether the only helper has waited meanwhile.

    It waits in a part of another caller, as one that is not scheduled would do.
    """
    functions = compiled.library()
    part = ctypes.CFUNCTYPE(None, *functions.multiply.argtypes)
    release, barrier, computed = threading.Event(), threading.Barrier(3), list[int]()

    def share(work: Callable[[int], object], parts: int) -> None:
        # a function of Python's in place of a variant's
        function = part(lambda *arguments: work(arguments[8]) and None)
        address = ctypes.cast(function, ctypes.c_void_p).value
        functions.share(address, 1, 1, 1, 1, compiled._Operands(), 0, None, 0, parts, 2, None, 0)

    def wait(_: int) -> None:
        barrier.wait(30)
        release.wait(60)

    other = threading.Thread(target=share, args=(wait, 2))
    other.start()
    try:
        barrier.wait(30)  # the other caller and the helper have claimed a part each
        share(lambda number: computed.append(number), 5)
        return computed, not release.is_set()
    finally:
        release.set()
        other.join()


def test_nobody_waits_for_a_helper_that_gets_no_core() -> None:
    """In a process in which nobody has asked for more helpers. The longest part comes first."""
    assert alone(with_a_helper_that_waits) == ([4, 3, 2, 1, 0], True)


def test_every_part_is_computed_once_by_as_many_threads_as_asked_for() -> None:
    """Several callers at the same time, each with its own number of threads."""
    functions = compiled.library()
    part = ctypes.CFUNCTYPE(None, *functions.multiply.argtypes)

    def run(threads: int) -> None:
        for parts in (1, 2, 3, 7, 40):
            computed, rooms = list[int](), set[int]()

            def work(*arguments: Any, computed: list[int] = computed, rooms: set[int] = rooms) -> None:
                computed.append(arguments[8])
                rooms.add(arguments[10] or 0)

            function = part(work)
            address = ctypes.cast(function, ctypes.c_void_p).value
            functions.share(address, 1, 1, 1, 1, compiled._Operands(), 0, None, 0, parts, threads, 64, 64)
            assert sorted(computed) == [*range(parts)]
            assert rooms <= {64 * (1 + thread) for thread in range(threads)}

    with ThreadPoolExecutor(4) as callers:
        for future in [callers.submit(run, threads) for threads in (1, 2, 3, 5) * 5]:
            future.result(60)


@pytest.mark.parametrize("wrong", ["dtype", "strides", "shape", "device"])
def test_c_gets_no_address_of_another_kind_of_tensor(wrong: str) -> None:
    x, out = random_bf16(1, 20, 30), torch.empty(1, 20, 20, dtype=torch.bfloat16)
    operands = {
        "dtype": (x, out.float()),
        "strides": (x, torch.empty(1, 20, 40, dtype=torch.bfloat16)[..., ::2]),
        "shape": (x, out[:, :19]),
        "device": (x.to("meta"), out),
    }[wrong]
    with pytest.raises(AssertionError, match="another kind"):
        TABLE.multiply(operands[0], None, [], operands[1], scale=torch.ones(1, 1, 1))


@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("variant", ["avx2", "avx512", "avx512bf16", "neon", "bf16"])
def test_auto_takes_them_where_they_gain(variant: str, amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never in fp32, on processors where nobody has measured it, or for large matrices beside AMX."""
    monkeypatch.setattr(kernels, "library", lambda: SimpleNamespace(variant=variant))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    kernels.auto_takes.cache_clear()

    def takes(rows: int, *, whole: bool = False, dtype: torch.dtype = torch.bfloat16) -> bool:
        return kernels.resolve("auto", device=torch.device("cpu"), dtype=dtype, rows=rows, whole=whole) == "compiled"

    measured, x86 = amx or variant.startswith("avx"), variant.startswith("avx") and not amx
    wide = variant.startswith("avx512") and not amx
    assert not takes(64, dtype=torch.float32)
    assert (takes(1), takes(96)) == (measured, measured)
    assert (takes(128), takes(768), takes(768, whole=True)) == (x86, wide, x86)
    kernels.auto_takes.cache_clear()


def test_auto_has_the_bits_of_the_products_that_it_takes() -> None:
    order, gain = kernels.auto_takes()
    for rows in (16, 40, 128, 400, 600):
        x = random_bf16(2, rows, 610)
        name = "compiled" if order and rows in gain else "torch"
        assert torch.equal(orthogonalize(x), orthogonalize(x, kernels=name)), (rows, name)
    if order and gain.stop > 384:
        x = random_bf16(600, 1210)
        results = (orthogonalize(x, coefficients="deflated", kernels=name) for name in ("auto", "compiled"))
        assert torch.equal(*results)


def test_what_it_is_not_for() -> None:
    with pytest.raises(ValueError, match=r"found torch.float32; needed bf16. Write kernels=\"auto\""):
        orthogonalize(random_bf16(4, 4), kernels="compiled", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"found torch.float32; needed bf16"):
        mm.Muon([torch.nn.Parameter(torch.ones(3, 3))], kernels="compiled", compute_dtype=torch.float32)
    with pytest.raises(ValueError, match="found a matrix on meta; needed one on a CPU"):
        kernels.select("compiled", device=torch.device("meta"), dtype=torch.bfloat16, rows=3, cols=3)
    with pytest.raises(ValueError, match=r"kernels: found 'quick'; needed one of 'auto', 'torch'"):
        mm.Muon([torch.nn.Parameter(torch.ones(3, 3))], kernels="quick")  # type: ignore[arg-type]


# --- the optimizer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coefficients", ["polar_express", "deflated"])
def test_a_step_is_made_of_the_same_products(coefficients: str, name: mm.KernelName) -> None:
    """Small matrices in batches, one large and tall: each weight moves by what `orthogonalize` says."""
    shapes = [(20, 31)] * 5 + [(31, 20)] * 2 + [(900, 390)]
    weights = [torch.nn.Parameter(random_bf16(*shape, seed=n).float()) for n, shape in enumerate(shapes)]
    before = [weight.detach().clone() for weight in weights]
    optimizer = mm.Muon(
        weights,
        lr=0.1,
        weight_decay=0.0,
        nesterov=False,
        momentum=0.0,
        kernels=name,
        ns_coefficients=coefficients,
    )
    for n, weight in enumerate(weights):
        weight.grad = random_bf16(*weight.shape, seed=50 + n).float()
    optimizer.step()
    for n, (weight, was) in enumerate(zip(weights, before, strict=True)):
        update = orthogonalize(random_bf16(*weight.shape, seed=50 + n), coefficients=coefficients, kernels=name).float()
        expected = was - 0.1 * mm.update_scale(*weight.shape, "match_rms_adamw") * update
        torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-6)
