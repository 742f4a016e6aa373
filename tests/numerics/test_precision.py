"""fp32 is IEEE fp32 inside of ours, whatever the user has set, and afterwards what the user has set is set."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from muonmesh.numerics.newton_schulz import orthogonalize
from muonmesh.numerics.precision import exact_products

COVERS = ("numerics.precision.exact_products",)

MATMUL: Any = torch.backends.cuda.matmul
BACKENDS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


def levels() -> tuple[str, ...]:
    return (torch.backends.fp32_precision, *(backend.fp32_precision for backend in BACKENDS))


def allow_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def allow_everywhere() -> None:
    torch.backends.fp32_precision = "tf32"


WAYS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": allow_tf32,
    "everywhere": allow_everywhere,
}


@pytest.fixture(params=WAYS)
def before(request: pytest.FixtureRequest) -> Iterator[tuple[str, ...]]:
    WAYS[request.param]()
    yield levels()
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for backend in BACKENDS:
        backend.fp32_precision = "none"


class Products(TorchDispatchMode):
    """Collects what is set while matrices are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.precisions: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func):
            self.precisions.update(backend.fp32_precision for backend in BACKENDS)
        return func(*args, **(kwargs or {}))


def slab() -> Tensor:
    return torch.randn(5, 9, generator=torch.Generator().manual_seed(0))


CALLS: dict[str, Callable[[], object]] = {
    "orthogonalize": lambda: orthogonalize(slab(), dtype=torch.float32),
    "in the Gram form": lambda: orthogonalize(slab(), dtype=torch.float32, method="gram"),
}


@pytest.mark.own_ambient  # one thread, this one, which the mode watches
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_fp32_is_exact_inside_and_what_was_set_is_set_afterwards(
    call: Callable[[], object], before: tuple[str, ...]
) -> None:
    with Products() as products:
        call()
    assert products.precisions
    assert products.precisions <= {"ieee", "none"}  # none is torch's own default, which is IEEE
    assert levels() == before


def test_what_holds_everywhere_still_does_afterwards() -> None:
    try:
        torch.backends.fp32_precision = "tf32"
        with exact_products(torch.float32):
            assert {backend.fp32_precision for backend in BACKENDS} == {"ieee"}
        torch.backends.fp32_precision = "ieee"
        assert {backend.fp32_precision for backend in BACKENDS} == {"ieee"}  # not what was read inside
    finally:
        torch.backends.fp32_precision = "none"


def test_threads_that_overlap_leave_what_was_set() -> None:
    """The second enters while the first is inside, and leaves after it."""
    inside, outside = threading.Event(), threading.Event()
    precisions = []

    def second() -> None:
        with exact_products(torch.float32):
            inside.set()
            outside.wait(10)
            precisions.append(BACKENDS[0].fp32_precision)

    torch.set_float32_matmul_precision("high")
    try:
        thread = threading.Thread(target=second)
        with exact_products(torch.float32):
            thread.start()
            assert inside.wait(10)
        outside.set()
        thread.join()
        assert precisions == ["ieee"]
        assert (torch.get_float32_matmul_precision(), BACKENDS[0].fp32_precision) == ("high", "tf32")
    finally:
        torch.set_float32_matmul_precision("highest")


def test_an_error_inside_leaves_what_was_set() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ZeroDivisionError), exact_products(torch.float32):
            1 / 0  # noqa: B018
        assert (torch.get_float32_matmul_precision(), BACKENDS[0].fp32_precision) == ("high", "tf32")
    finally:
        torch.set_float32_matmul_precision("highest")


def test_fp16_is_added_up_in_fp32_inside_and_all_that_was_set_is_set_afterwards() -> None:
    def fp16_settings() -> tuple[object, ...]:
        return torch._C._get_cublas_allow_fp16_reduced_precision_reduction(), MATMUL.allow_fp16_accumulation

    default = fp16_settings()
    try:
        for reduced, in_fp16 in (((False, False), True), ((True, True), True), ((True, True), False)):
            MATMUL.allow_fp16_reduced_precision_reduction, MATMUL.allow_fp16_accumulation = reduced, in_fp16
            before = fp16_settings()
            with exact_products(torch.float16):
                assert not MATMUL.allow_fp16_reduced_precision_reduction
                assert not MATMUL.allow_fp16_accumulation
            assert fp16_settings() == before
    finally:
        MATMUL.allow_fp16_reduced_precision_reduction, MATMUL.allow_fp16_accumulation = default
