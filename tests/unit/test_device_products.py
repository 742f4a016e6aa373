"""What products on devices round, run on the CPU: Gram keeps what it promises, and what that costs in bytes."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from muonmesh.numerics import newton_schulz
from muonmesh.numerics.coefficients import CoefficientName, coefficient_schedule
from muonmesh.numerics.kernels import Matmuls
from muonmesh.numerics.kernels.batched import torch_products
from muonmesh.numerics.newton_schulz import Method, orthogonalize

ROWS, COLS = 384, 768


def mirrored(x: Tensor) -> Tensor:
    return x.triu() + x.triu(1).mT


def like_triton() -> Matmuls:
    """Products rounded as Triton's are: `test_triton` shows that those are these, to the bit or nearly."""

    def multiply(
        a: Tensor, b: Any, terms: Any, out: Tensor, alpha: float = 1.0, scale: Any = 1.0, symmetric: bool = True
    ) -> Tensor:
        result = alpha * (a.float() @ (a.mT if b is None else b).float())
        for c, factor in terms:
            result = factor * c.float() + result
        result = scale * result
        return out.copy_(mirrored(result) if symmetric else result)

    return Matmuls(multiply=multiply, at_once=1, together=True)


TABLES = {"torch": torch_products(at_once=1), "triton": like_triton()}


def decaying(decades: int) -> tuple[Tensor, Tensor]:
    """A matrix, rounded to bf16, with singular values from 1 to 10^-decades, and its exact result."""
    generator = torch.Generator().manual_seed(decades)
    u, _, vh = torch.linalg.svd(torch.randn(ROWS, COLS, dtype=torch.float64, generator=generator), full_matrices=False)
    x = ((u * torch.logspace(0, -decades, ROWS, dtype=torch.float64)) @ vh).bfloat16().float()
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm()
    for polynomial in coefficient_schedule("polar_express", 5):
        s = sum((c * s ** (2 * k + 1) for k, c in enumerate(polynomial)), torch.zeros_like(s))
    return x, (u * s) @ vh


@pytest.mark.parametrize("decades", [pytest.param(2, marks=pytest.mark.soak), 4])
@pytest.mark.parametrize("table", TABLES)
def test_gram_is_as_accurate_with_what_devices_round(table: str, decades: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a·X rounded by itself, and Gram and result twice, it was 1.17 and 1.05 times the standard method's error."""
    monkeypatch.setattr(newton_schulz, "select", lambda *_, **__: TABLES[table])
    x, expected = decaying(decades)

    def error(method: Method) -> float:
        return float((orthogonalize(x, method=method).double() - expected).norm() / expected.norm())

    assert error("gram") < (0.9 if decades == 2 else 0.6) * error("standard")


@pytest.mark.parametrize("name", get_args(CoefficientName))
def test_what_is_left_to_the_last_product_is_multiplied_there(name: CoefficientName, monkeypatch: Any) -> None:
    """Numbers from the data pile up until then: after Gram steps and steps of degree 9."""
    x = (
        torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(1))
        * torch.tensor([1.0, 1e-20, 0.0])[:, None, None]
    )
    methods: tuple[Method, ...] = ("standard", "gram")
    expected = orthogonalize(x, coefficients=name, dtype=torch.float64)
    monkeypatch.setattr(newton_schulz, "select", lambda *_, **__: torch_products(at_once=3))
    for method in methods:
        found = orthogonalize(x, coefficients=name, dtype=torch.float32, method=method)
        assert (found - expected).norm() < 2e-5 * expected.norm()
        assert not found[2].any()


class Bytes(TorchDispatchMode):
    """Adds up what operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in (*args, *(kwargs or {}).values(), result) if isinstance(t, Tensor)]
        if "transpose" not in str(func):
            self.moved += sum(t.nbytes for number, t in enumerate(tensors) if t not in Identity(tensors[:number]))
            if result in Identity(args):
                self.moved += result.nbytes  # read and written
        return result


class Identity:
    """Membership by identity: tensors compare elementwise."""

    def __init__(self, tensors: Any) -> None:
        self._tensors = tensors

    def __contains__(self, one: object) -> bool:
        return any(one is other for other in self._tensors)


def bytes_an_element(*, a: bool, s: bool) -> float:
    """Of one application in bf16, with a and s from the data or known to the host, on a device without memory."""
    with torch.device("meta"):
        x, out = (torch.empty(1, 8, 80000, dtype=torch.bfloat16) for _ in range(2))
        b, number = torch.empty(1, 8, 8, dtype=torch.bfloat16), torch.empty(1, 1, 1)
        with Bytes() as count:
            TABLES["torch"].multiply(
                b, x, [(x, number if a else 1.5)], out, scale=number if s else 1.0, symmetric=False
            )
    return count.moved / x.numel()


def test_what_the_one_rounding_costs_in_bytes() -> None:
    """Triton's kernel moves 6 bytes in each case; with a and s multiplied in fp32, torch moved 6, 14, 22 and 22.

    X is read as a factor and as a summand, which counts once where both are one argument.
    """
    found = {(a, s): round(bytes_an_element(a=a, s=s)) for a in (False, True) for s in (False, True)}
    assert found == {(False, False): 4, (True, False): 8, (False, True): 8, (True, True): 8}
