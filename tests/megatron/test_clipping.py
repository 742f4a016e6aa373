"""Megatron-LM pull request 5395, point by point: on Megatron's own ChainedOptimizer and on ours.

Its main has no such change, and 0.16.1's Muon needs a package that is not on this machine. So Megatron's side of the
comparison is what all of its optimizers go through: `ChainedOptimizer.step`, which scales every gradient.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import get_megatron_optimizer as megatrons
from torch import Tensor

from muonmesh.integrations.megatron import get_megatron_optimizer
from tests.megatron import gathered, host
from tests.megatron.host import Shape
from tests.megatron.shapes import MOE, MTP, ONE_LAYER
from tests.megatron.training import train

HUGE = 2.0**27  # a power of two, so that what does not depend on magnitudes keeps its bits


def step_with_huge_half(
    shape: Shape, make: Any, huge: str, **settings: Any
) -> tuple[dict[str, float], dict[str, float], Any]:
    """One step with gradients of one half 2²⁷ times as large; how far parameters moved, what is left
    of the gradients relative to what they were, and what `step` returned.
    """
    host.begin(shape)
    chunks = host.chunks_of(shape)
    optimizer = make(host.optimizer_config(shape, **settings.pop("config", {})), chunks, **settings)
    host.backward(shape, chunks, None, 0)
    named = gathered.named(chunks)
    for name, parameter in named.items():
        half = "muon" if "linear" in name else "adamw"
        if half == huge:
            parameter.main_grad.mul_(HUGE)
    before = {name: (p.detach().clone(), p.main_grad.clone()) for name, p in named.items()}
    step_result = optimizer.step()
    moved = {name: float((p.detach() - before[name][0]).float().norm()) for name, p in named.items()}
    remaining = {name: float(p.main_grad.norm() / before[name][1].norm()) for name, p in named.items()}
    return moved, remaining, step_result


def values_of_matrices(values: dict[str, float]) -> list[float]:
    return [value for name, value in values.items() if "linear" in name]


def rest(values: dict[str, float]) -> list[float]:
    return [value for name, value in values.items() if "linear" not in name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flat", [False, True], ids=["whole", "flat"])
def test_a_huge_gradient_in_either_half(workers, flat: bool, dtype: torch.dtype) -> None:
    """Ours: Muon's update stays as it is to the bit, and AdamW's half is clipped by its own norm alone."""
    shape = Shape(tp=2, flat=flat, dtype=dtype)
    once = workers(2).run(step_with_huge_half, shape, get_megatron_optimizer, "none")
    for huge in ("muon", "adamw"):
        for (moved, remaining, (ok, norm, _)), (small, _, _) in zip(
            workers(2).run(step_with_huge_half, shape, get_megatron_optimizer, huge), once, strict=True
        ):
            assert ok
            assert norm > 0.1 * HUGE
            if huge == "muon":
                assert moved == small
            assert all(value == 1 for value in values_of_matrices(remaining))


@pytest.mark.parametrize("huge", ["muon", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_megatrons_own_chain_scales_all_of_them(workers, dtype: torch.dtype, huge: str) -> None:
    """One norm scales both halves; of bf16 parameters it scales the masters' copies, which are gone after the step."""
    for _, remaining, (ok, norm, _) in workers(2).run(step_with_huge_half, Shape(tp=2, dtype=dtype), megatrons, huge):
        assert ok
        assert norm > 0.1 * HUGE
        if dtype == torch.float32:
            assert max(values_of_matrices(remaining)) < 1e-6
            assert max(rest(remaining)) < 1e-6


def crushed(shape: Shape) -> tuple[float, float]:
    """What of the update of AdamW's half is left when Muon's gradients are huge: the threshold is its own."""
    plain, _, _ = step_with_huge_half(shape, get_megatron_optimizer, "none")
    with_huge, _, _ = step_with_huge_half(shape, get_megatron_optimizer, "muon")
    return sum(rest(plain)), sum(rest(with_huge))


@pytest.mark.parametrize("shape", [Shape(tp=2), Shape(ep=2, model=MOE + ONE_LAYER)], ids=["dense", "experts"])
def test_the_threshold_of_the_other_half_is_unpolluted(workers, shape: Shape) -> None:
    """A huge gradient of an expert changes nothing of AdamW's half either: experts are no group of their own."""
    for plain, with_huge in workers(2).run(crushed, shape):
        assert with_huge == plain


def with_limit(config: Any, chunks: Any) -> Any:
    return get_megatron_optimizer(config, chunks, skip_above=1e4)


@pytest.mark.parametrize("flat", [False, True], ids=["whole", "flat"])
def test_a_step_is_skipped_for_the_half_that_is_clipped(workers, flat: bool) -> None:
    shape = Shape(tp=2, flat=flat)
    for moved, _, (ok, _, _) in workers(2).run(step_with_huge_half, shape, with_limit, "muon"):
        assert ok
        assert min(values_of_matrices(moved)) > 0
    for moved, _, (ok, norm, _) in workers(2).run(step_with_huge_half, shape, with_limit, "adamw"):
        assert not ok
        assert norm > 1e4
        assert set(moved.values()) == {0.0}


@contextlib.contextmanager
def counted() -> Iterator[list[Tensor]]:
    """What is added up over ranks in this context."""
    calls: list[Tensor] = []
    real = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor)
        return real(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        yield calls
    finally:
        dist.all_reduce = real


def all_reduces(shape: Shape, policy: Any, settings: dict[str, Any]) -> tuple[int, Any]:
    """How many all-reduces there are in a step, and what it returned."""
    host.begin(shape)
    chunks = host.chunks_of(shape)
    optimizer = get_megatron_optimizer(host.optimizer_config(shape, **settings), chunks, policy=policy)
    host.backward(shape, chunks, optimizer, 0)
    optimizer.step()
    with counted() as calls:
        step_result = optimizer.step()
    return len(calls), step_result


ONLY_MUON = r"^(?!.*linear)"
"""What to freeze."""


@pytest.mark.parametrize(
    ("shape", "policy", "settings", "most", "measured"),
    [
        (Shape(tp=2), "adamw_only", {}, 2, True),
        (Shape(tp=2, flat=True), "adamw_only", {}, 2, True),
        (Shape(ep=2, model=MOE + ONE_LAYER), "adamw_only", {}, 2, True),
        (Shape(tp=2), "adamw_only", {"clip_grad": 0.0}, 1, False),
        (Shape(tp=2, frozen=ONLY_MUON), "adamw_only", {}, 1, False),
        (Shape(tp=2, dtype=torch.float16), "adamw_only", {}, 3, True),
        (Shape(pp=2), "adamw_only", {}, 2, True),
        (Shape(pp=2, tp=2, flat=True), "adamw_only", {}, 2, True),
        (Shape(pp=2), "adamw_only", {"clip_grad": 0.0}, 2, False),
        (Shape(pp=2, tp=2), "separate", {}, 2, True),
    ],
    ids=[
        "TP",
        "flat",
        "experts",
        "not clipped",
        "all Muon's",
        "loss scale",
        "stages",
        "stages, flat",
        "stages, not clipped",
        "stages, separate",
    ],
)
def test_all_reduces_of_a_step(
    workers, shape: Shape, policy: str, settings: dict[str, Any], most: int, measured: bool
) -> None:
    """One of flags and one of the norm, none for a norm by which nothing is clipped; docs/megatron.md has the table."""
    for calls, (ok, norm, _) in workers(4).run(all_reduces, shape, policy, settings):
        assert ok
        assert (norm is not None) == measured
        assert calls == most


@pytest.mark.parametrize(
    "shape",
    [Shape(pp=2, tp=2), Shape(pp=2, ep=2, model=MOE), Shape(pp=2, frozen_stage=0), Shape(tp=2, flat=True)],
    ids=["TP", "experts", "a stage without parameters", "flat"],
)
def test_a_multiple_of_the_mean_skips_on_all_stages(workers, shape: Shape) -> None:
    """As one process with all gradients skips: after the warm-up, norms above a tenth of their mean."""
    for by_rank in workers(4).run(train, shape, 15, policy="all", skip_above="0.1x"):
        assert by_rank.differing == {}
        assert by_rank.norms == pytest.approx(by_rank.expected)
        assert not any(by_rank.skipped[:10])
        assert any(by_rank.skipped[10:]), by_rank.norms


MATRIX = re.compile(r"linear|eh_proj")


def apart(shape: Shape, make: Any, part: str, **settings: Any) -> tuple[dict[str, float], list[float], Any]:
    """One step with a huge gradient in a part of the model, the second layer say, whose norm is one of its own.

    Returns:
        How far parameters moved; the norms of what clipping has left of AdamW's gradients, of what is around that part,
        and of it; and what `step` returned.
    """
    host.begin(shape)
    chunks = host.chunks_of(shape)
    named = gathered.named(chunks)
    for name, parameter in named.items():
        if part in name:
            # As Megatron's main stamps what predicts further tokens (mtp_detach_heads); 0.16.1 does not.
            parameter.grad_norm_group = "mtp"
    optimizer = make(host.optimizer_config(shape, **settings), chunks)
    host.backward(shape, chunks, None, 0)
    for name, parameter in named.items():
        parameter.main_grad.mul_(HUGE if part in name else 1.0)
    before = {name: p.detach().clone() for name, p in named.items()}
    step_result = optimizer.step()
    remaining = gathered.gather(gathered.local_values(named, gathered.gradients(chunks)))
    norms = [
        float(
            torch.cat(
                [g.flatten() for n, g in remaining.items() if not MATRIX.search(n) and (part in n) == second]
            ).norm()
        )
        for second in (False, True)
    ]
    return {name: float((p.detach() - before[name]).norm()) for name, p in named.items()}, norms, step_result


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        (Shape(tp=2), "layers.1."),
        (Shape(tp=2, flat=True), "layers.1."),
        (Shape(pp=2), "layers.1."),
        (Shape(tp=2, model=MTP), "mtp."),
    ],
    ids=["whole", "flat", "on one stage", "layers of multi-token prediction"],
)
def test_a_norm_group_is_clipped_apart(workers, shape: Shape, part: str) -> None:
    """Megatron's ``grad_norm_group`` of versions after 0.16.1: neither norm holds the other's gradients."""
    for moved, (main, other), (ok, norm, _) in workers(2).run(apart, shape, with_limit, part):
        assert ok
        assert norm < 1e3  # main's alone, which is also what `limited` lets no larger
        assert min(moved.values()) > 0
        assert main == pytest.approx(1.0, rel=1e-4)  # each half of AdamW's gradients at the limit, by its own norm
        assert other == pytest.approx(1.0, rel=1e-4)
