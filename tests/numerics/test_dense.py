"""torch's products on a CPU see each matrix in one form, whatever is beside it.

Which bits a product has may depend on the number of matrices in a call, on strides, on addresses and on threads, and on
which of these it does depends on the processor: with AMX oneDNN sums a batch otherwise than one matrix. So what is
compared are the calls themselves. Where they are the same, the bits are on every processor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import muonmesh as mm
from muonmesh import orthogonalize
from muonmesh.numerics import kernels

COVERS = (
    "numerics.kernels.batched.torch_products",
    "numerics.kernels.dense.dense",
)

pytestmark = pytest.mark.own_ambient

ATEN = torch.ops.aten
PRODUCTS = {ATEN.mm, ATEN.addmm, ATEN.bmm, ATEN.baddbmm, ATEN.addbmm, ATEN.mv, ATEN.addmv, ATEN.dot, ATEN.linalg_qr}
PRODUCTS |= {ATEN._linalg_eigh, ATEN.addmm_, ATEN.baddbmm_}
MIXED = ((1.5, -0.5), (2.0, -1.5, 0.5), (2.4609, -3.2813, 2.9531, -1.4063, 0.2734))


class Forms(TorchDispatchMode):
    """Counts products by what they are given: sizes, strides, dtypes, addresses modulo 64, numbers, threads."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = [*args, *(value for _, value in sorted((kwargs or {}).items()))]
        if func.overloadpacket in PRODUCTS:
            self.counts[str(func), torch.get_num_threads(), *map(form, arguments)] += 1
        return func(*args, **(kwargs or {}))


def form(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return tuple(argument.shape), argument.stride(), argument.dtype, argument.data_ptr() % 64


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What other threads call is not seen."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_matrices(count: int, rows: int, cols: int) -> Tensor:
    return torch.randn(count, rows, cols, generator=torch.Generator().manual_seed(rows + cols))


@pytest.mark.parametrize(
    ("dtype", "bf16"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True), (torch.float64, True)]
)
@pytest.mark.parametrize("coefficients", ["polar_express", "deflated", MIXED], ids=str)
def test_a_matrix_in_a_batch_is_multiplied_as_alone(
    coefficients: Any, dtype: torch.dtype, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny, thin, no multiple of 64 bytes, large; and memory that begins elsewhere."""
    monkeypatch.setattr(kernels, "multiplies_bf16", lambda: bf16)
    for number, (rows, cols) in enumerate(((4, 8), (17, 300), (30, 61), (64, 64), (97, 104), (384, 390))):
        method = ("gram", "standard")[number % 2]
        x = random_matrices(2, rows, cols)

        def run(y: Tensor) -> tuple[Tensor, Counter[Any]]:
            with Forms() as forms:
                result = orthogonalize(y, coefficients=coefficients, method=method, dtype=dtype, kernels="torch")  # noqa: B023
            return result, forms.counts

        alone = [run(matrix.clone()) for matrix in x]
        expected = sum((counts for _, counts in alone), Counter[Any]())
        shifted = torch.zeros(x.numel() + 3)[3:].view(x.shape).copy_(x)
        for batch in (x, shifted):
            results, forms = run(batch)
            assert forms == expected, (rows, cols)
            assert torch.equal(results, torch.stack([result for result, _ in alone])), (rows, cols)
        assert not any(name.startswith(("aten.bmm", "aten.baddbmm")) for name, *_ in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_matrix_among_others_of_an_optimizer_is_multiplied_as_alone(dtype: torch.dtype) -> None:
    def stepped(*shapes: tuple[int, int]) -> tuple[list[Tensor], Counter[Any]]:
        weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        optimizer = mm.Muon(weights, lr=0.1, compute_dtype=dtype, kernels="torch")
        for weight in weights:
            weight.grad = random_matrices(1, *weight.shape)[0]
        with Forms() as forms:
            optimizer.step()
        return [weight.detach() for weight in weights], forms.counts

    for shape in ((17, 4100), (64, 64), (300, 130), (400, 410)):
        (alone,), expected = stepped(shape)
        (first, again, *_), forms = stepped(shape, shape, shape)
        assert torch.equal(first, alone)
        assert torch.equal(again, alone)
        assert forms == sum([expected] * 3, Counter())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    """With AMX, oneDNN divides a long sum among threads. So each product has one, also where there are more."""
    for shape, method in (
        ((3, 17, 1100), "standard"),
        ((2, 97, 128), "gram"),
        ((400, 900), "gram"),
        ((390, 391), "auto"),
    ):
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(
                orthogonalize(random_matrices(*(1, *shape)[-3:]), dtype=dtype, method=method, kernels="torch")
            )  # type: ignore[arg-type]
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
