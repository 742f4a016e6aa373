"""The matrix products: each against fp64, the symmetric ones exactly symmetric, none writing its operands."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from muonmesh.numerics import kernels
from muonmesh.numerics.coefficients import coefficient_schedule
from muonmesh.numerics.kernels import Matmuls, blocked
from muonmesh.numerics.kernels.batched import torch_products
from muonmesh.numerics.kernels.blocked import BLOCK, BLOCKED
from muonmesh.numerics.kernels.dense import dense
from muonmesh.numerics.kernels.threads import scratch
from muonmesh.numerics.newton_schulz import orthogonalize
from tests.support.tensors import commuting_operands

COVERS = (
    "numerics.kernels.select",
    "numerics.kernels.blocked.BLOCKED",
    "numerics.kernels.dense.widened",
    "numerics.kernels.multiple.add_multiple",
    "numerics.kernels.product_table.Matmuls",
    "numerics.square_matrices.symmetric_part",
)

CPU = torch.device("cpu")
EPS = {torch.bfloat16: 2**-8, torch.float32: 2**-23, torch.float64: 2**-52}
TABLES = {
    "blocked": (BLOCKED, 1),
    "dense": (dense(batch_limit=3), 3),
    "device": (torch_products(batch_limit=3), 3),
}


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 50), (BLOCK, BLOCK), (BLOCK + 1, 200), (400, 411)])
@pytest.mark.parametrize("table", TABLES)
def test_products_against_fp64(table: str, rows: int, cols: int, dtype: torch.dtype) -> None:
    matmuls, batch = TABLES[table]
    x, a, b = commuting_operands(rows, cols, batch, dtype)
    before = [t.clone() for t in (x, a, b)]
    xd, ad, bd = (t.double() for t in (x, a, b))
    square, long = torch.full_like(a, torch.nan), torch.full_like(x, torch.nan)
    per_matrix = torch.linspace(0.5, 2.0, batch)[:, None, None]

    def close(result: Tensor, expected: Tensor) -> None:
        # One rounding of the result, and those of sums in at least fp32; relative to the largest entry.
        sums = 8 * cols**0.5 * max(EPS[dtype] if dtype != torch.bfloat16 else 0, 2**-52)
        tolerance = (2 * EPS[dtype] + sums) * float(expected.abs().max())
        assert float((result.double() - expected).abs().max()) <= tolerance

    for result, expected in (
        (matmuls.multiply(x, None, [], square.clone(), scale=per_matrix), per_matrix.double() * (xd @ xd.mT)),
        (matmuls.multiply(a, a, [(a, -2.5)], square.clone(), alpha=1.25), -2.5 * ad + 1.25 * ad @ ad),
        (matmuls.multiply(a, b, [(b, 0.75)], square.clone()), 0.75 * bd + ad @ bd),
    ):
        close(result, expected)
        assert table != "blocked" or torch.equal(result, result.mT)
    close(matmuls.multiply(a, x, [(x, 1.5)], long, scale=1.0, symmetric=False), 1.5 * xd + ad @ xd)
    close(
        matmuls.multiply(a, x, [(x, per_matrix)], long, scale=1.0, symmetric=False), per_matrix.double() * xd + ad @ xd
    )
    close(
        matmuls.multiply(a, x, [(x, per_matrix)], long, scale=per_matrix, symmetric=False),
        per_matrix.double() * (per_matrix * xd + ad @ xd),
    )
    assert all(torch.equal(t, was) for t, was in zip((x, a, b), before, strict=True))


def test_kept_views_are_of_the_square_at_hand() -> None:
    """Squares come and go, more than are remembered; one memory holds matrices of two sizes, as scratch memory does."""
    memory = torch.empty(400 * 400, dtype=torch.bfloat16)
    for number in range(2 * blocked._KEPT):
        rows = 390 if number % 3 == 0 else 400
        _, a, b = commuting_operands(rows, number, 1, torch.bfloat16)
        shared = memory[: rows * rows].view(1, rows, rows)
        out = shared if number % 2 else torch.empty_like(a)
        shared.copy_(b) if out is not shared else out.fill_(torch.nan)
        other = b if out is shared else shared
        expected = 0.5 * other.double() + a.double() @ other.double()
        product = BLOCKED.multiply(a, other, [(other, 0.5)], out)
        assert (product.double() - expected).abs().max() < 0.02 * expected.abs().max()


def test_blocked_multiplies_little_more_than_half() -> None:
    counted = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal counted
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                first, second = args[-2:]
                counted += first.shape[0] * first.shape[1] * second.shape[1]
            return func(*args, **(kwargs or {}))

    rows = 6 * BLOCK
    x = torch.randn(1, rows, 100)
    with Count():
        BLOCKED.multiply(x, None, [], torch.empty(1, rows, rows), scale=torch.tensor(1.0))
    assert counted / (rows * rows * 100) == pytest.approx((1 + 1 / 6) / 2)


class Multiples(torch.utils._python_dispatch.TorchDispatchMode):
    """Collects what summands are multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: set[float] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.baddbmm):
            self.factors.add((kwargs or {}).get("beta", 1))
        return func(*args, **(kwargs or {}))


@pytest.mark.own_ambient  # one thread, this one, which the mode watches
@pytest.mark.parametrize(("rows", "cols", "batch"), [(384, 768, 1), (384, 400, 1), (256, 1024, 1)])
def test_matrices_of_any_norm_are_multiplied_by_kernels_that_exist(
    rows: int, cols: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "multiplies_bf16", lambda: True)
    # oneDNN compiles a kernel for each multiple of a summand: those of two octaves are 32, of no two steps the same.
    constants = {number for polynomial in coefficient_schedule("polar_express", 5) for number in polynomial}
    constants |= {0, 1} | {p + q for p in constants for q in constants}
    with Multiples() as multiples:
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(batch, rows, cols, generator=generator) * torch.rand(rows, 1, generator=generator)
            orthogonalize(x, kernels="torch")
    fresh = {
        number for number in multiples.factors if not any(number == pytest.approx(c, rel=1e-12) for c in constants)
    }
    assert fresh
    assert all(16 * math.log2(number) == pytest.approx(round(16 * math.log2(number)), abs=1e-9) for number in fresh)


@pytest.mark.own_ambient  # one thread, this one, which the mode watches
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("rows", "cols", "batch"), [(384, 512, 1), (384, 400, 1), (256, 512, 2)])
def test_a_matrix_that_is_not_finite_does_not_take_seconds(
    rows: int, cols: int, batch: int, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With NaN as the multiple of a bf16 summand, oneDNN takes 1.4 to 5.5 s for one product of twice this size.
    monkeypatch.setattr(kernels, "multiplies_bf16", lambda: True)
    x = torch.randn(batch, rows, cols)
    x[-1, 2, 3] = bad
    with Multiples() as multiples:
        assert orthogonalize(x, kernels="torch")[-1].isnan().all()
    assert all(map(math.isfinite, multiples.factors))


def chosen(rows: int, cols: int, dtype: torch.dtype, device: torch.device = CPU) -> Matmuls:
    return kernels.select("torch", device=device, dtype=dtype, rows=rows, cols=cols)


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16-instructions", "none"])
@pytest.mark.parametrize(("rows", "cols", "batch"), [(384, 500, 1), (40, 100, 3)])
def test_both_kinds_of_cpu_compute_bf16_alike(
    rows: int, cols: int, batch: int, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "multiplies_bf16", lambda: bf16)
    x = torch.randn(batch, rows, cols, generator=torch.Generator().manual_seed(3))
    exactly = orthogonalize(x.double(), dtype=torch.float64)
    assert float((orthogonalize(x, kernels="torch") - exactly).norm() / exactly.norm()) < 0.03
    x[-1, 2, 3] = math.inf
    results = orthogonalize(x, kernels="torch")
    assert results[-1].isnan().all()
    assert batch == 1 or results[0].isfinite().all()


@pytest.mark.parametrize(
    ("machine", "onednn", "instructions", "expected"),
    [
        ("x86_64", True, True, True),
        ("x86_64", True, False, False),  # AVX-512 alone: 2.7 times the time of fp32 for 768 rows, where oneDNN says yes
        ("x86_64", False, True, False),  # ONEDNN_MAX_CPU_ISA=AVX2: 40 times
        ("aarch64", True, False, True),
        ("aarch64", False, False, False),
    ],
)
def test_bf16_is_multiplied_as_such_where_that_is_no_slower(
    machine: str, onednn: bool, instructions: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    assert kernels.multiplies_bf16.__wrapped__() == expected


def test_without_bf16_instructions_products_are_those_of_fp32_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "multiplies_bf16", lambda: False)
    table = chosen(390, 500, torch.bfloat16)
    x, a, _ = commuting_operands(390, 500, 1, torch.bfloat16)
    assert torch.equal(
        table.multiply(x, None, [], torch.empty_like(a), scale=torch.tensor(0.5)),
        BLOCKED.multiply(
            x.float(), None, [], torch.empty_like(a, dtype=torch.float32), scale=torch.tensor(0.5)
        ).bfloat16(),
    )


def test_select(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "multiplies_bf16", lambda: False)
    assert chosen(768, 768, torch.bfloat16) is not BLOCKED
    monkeypatch.setattr(kernels, "multiplies_bf16", lambda: True)
    assert chosen(768, 768, torch.bfloat16) is BLOCKED
    assert chosen(768, 3072, torch.float32) is BLOCKED
    for bf16 in (True, False):
        monkeypatch.setattr(kernels, "multiplies_bf16", lambda bf16=bf16: bf16)
        for rows, dtype in ((8, torch.bfloat16), (17, torch.bfloat16), (128, torch.bfloat16), (64, torch.float64)):
            small = chosen(rows, rows, dtype)
            assert small.batch_limit >= 20
    # A second matrix would not begin at a multiple of 64 bytes.
    monkeypatch.setattr(kernels, "multiplies_bf16", lambda: True)
    assert chosen(17, 17, torch.float32).batch_limit == chosen(97, 98, torch.bfloat16).batch_limit == 1
    # Elsewhere than on a CPU same-shaped matrices go together.
    meta = chosen(1024, 4096, torch.bfloat16, torch.device("meta"))
    assert meta.batch_limit > 50


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16-instructions", "none"])
def test_a_batch_of_small_matrices_takes_as_many_calls_as_one(bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python is what small matrices wait for, so nothing but a product may be called for each of them."""
    monkeypatch.setattr(kernels, "multiplies_bf16", lambda: bf16)

    class Calls(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func not in (torch.mm, torch.addmm, Tensor.mT.__get__)
            return func(*args, **(kwargs or {}))

    def calls(batch: int, rows: int) -> int:
        x = torch.randn(batch, rows, rows)
        with Calls() as counted:
            orthogonalize(x, kernels="torch")
        return counted.count

    for rows in (8, 16, 64):
        calls(20, rows)  # takes its memory
        assert calls(20, rows) <= calls(2, rows)


def test_a_batch_of_small_matrices_takes_no_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page of fresh memory is a fault: 24 matrices of 128 × 128 took twice as long with it."""
    monkeypatch.setattr(kernels, "multiplies_bf16", lambda: True)
    x = torch.randn(4, 64, 64).bfloat16()
    out = torch.empty_like(x)
    orthogonalize(x, kernels="torch", out=out)  # takes the memory that is kept
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        orthogonalize(x, kernels="torch", out=out)
    allocations = [(event.name, event.self_cpu_memory_usage) for event in profiled.events()]
    assert [allocation for allocation in allocations if allocation[1] >= x.numel() * x.element_size()] == []


def test_select_refuses_unknown_kernels() -> None:
    with pytest.raises(ValueError, match="kernels: found 'cuda'; needed one of 'auto', 'torch', 'triton'"):
        kernels.select("cuda", device=CPU, dtype=torch.float32, rows=4, cols=4)  # type: ignore[arg-type]


def test_scratch_memory_is_used_again_in_whatever_shape() -> None:
    small = scratch("a test's", (3, 4), dtype=torch.float32, device=CPU)
    assert scratch("a test's", (3, 4), dtype=torch.float32, device=CPU) is small
    assert scratch("a test's", [2, 5], dtype=torch.float32, device=CPU).data_ptr() == small.data_ptr()
    assert scratch("a test's", (3, 4), dtype=torch.float64, device=CPU).dtype == torch.float64
    large = scratch("a test's", (5, 4), dtype=torch.float32, device=CPU)
    assert scratch("a test's", (3, 4), dtype=torch.float32, device=CPU).data_ptr() == large.data_ptr()
