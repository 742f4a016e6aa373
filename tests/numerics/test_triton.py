"""Triton's kernels in its interpreter: against fp64, their one rounding, symmetry, and what they leave alone."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import muonmesh as mm
from muonmesh.numerics import deflation, device_deflation, kernels, newton_schulz
from muonmesh.numerics.device_deflation import deflate
from muonmesh.numerics.kernels import batched, fused, recording, toolchain, triton
from muonmesh.numerics.kernels.batched import torch_products
from muonmesh.numerics.kernels.pinned_copies import download
from muonmesh.numerics.kernels.rows import SEARCHED, PieceRows, in_three_dims
from muonmesh.numerics.kernels.triton import triton_products
from muonmesh.numerics.newton_schulz import orthogonalize
from muonmesh.numerics.rules import MuonRule, register_rule
from muonmesh.numerics.working_memory import deflation_at_once
from muonmesh.step import by_kernel
from muonmesh.step.parameters import Snapshot
from muonmesh.step.runtime import Driver
from tests.device.pretended import Event, pretended_cuda
from tests.support.interpreter import interpreting
from tests.support.pieces import pieces_of
from tests.support.tensors import commuting_operands

Interpreter = Callable[..., Any]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALF = {BF16: 2**-8, FP16: 2**-11, FP32: 2**-24}
"""The largest error of one rounding, relative."""

COVERS = (
    "numerics.kernels.triton.triton_products",
    "numerics.kernels.fused.fold",
    "numerics.kernels.norms.measure",
    "numerics.kernels.pinned_copies.download",
    "numerics.kernels.pieces.fold",
    "numerics.kernels.recording.Recording",
    "numerics.kernels.rows.PieceRows",
    "numerics.kernels.roots.whiten",
    "numerics.kernels.small.orthogonalize",
    "numerics.kernels.toolchain.is_interpreted",
    "step.by_kernel.ByKernel",
)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with interpreting() as run:
        yield run


# ------------------------------------------------------------------ in the interpreter's process


def started_again(method: newton_schulz.Method) -> tuple[list[str], list[bool], float]:
    """What is kept of four orthogonalizations, whether each has the bits of one alone, and their largest error.

    Through Gram matrices, others of as many rows are orthogonalized with them.
    """
    torch.manual_seed(0)
    options: dict[str, Any] = {"coefficients": "polar_express", "steps": 5, "method": method, "kernels": "triton"}
    orthogonalizer = newton_schulz.Orthogonalizer.of(20, 48, **options, dtype=BF16, device=torch.device("cpu"))
    same, errors = [], []
    for power in range(4):
        x = torch.randn(2, 20, 48, dtype=BF16) * 10.0**power
        u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
        exact = u @ vh
        batches = [x] if method == "standard" else [x, torch.randn(1, 20, 30, dtype=BF16), x.mT.contiguous()[:1]]
        alone = [orthogonalize(matrices, dtype=BF16, **options) for matrices in batches]
        outputs = [torch.empty_like(matrices) for matrices in batches]
        with torch.no_grad():
            orthogonalizer.orthogonalize_batches([matrices.clone() for matrices in batches], outputs, overwrite=True)
        same += map(torch.equal, outputs, alone)
        output = outputs[0]
        errors.append(float((output.double() - exact).norm() / exact.norm()))
    return [type(entry).__name__ for entry in orthogonalizer._recordings.values()], same, max(errors)


def by_torch() -> tuple[list[float], set[bool], int, int]:
    """Errors of large plain products, whether torch may add up in fp16 in them, and how many there are in five steps.

    Also how many batches were started again.
    """
    flags, products = [], torch.addmm

    def noted(*arguments: Any, **options: Any) -> Tensor:
        flags.append(torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction)
        result: Tensor = products(*arguments, **options)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "addmm", noted)
        patch.setattr(triton, "TORCH_FROM", {FP16: 24})
        x, a, _ = commuting_operands(24, 136, 2, FP16)
        errors, exact = [], 0.5 * a.double() @ x.double()
        for summands, dtype in (((), FP16), ([(x, 0.0)], FP16), ((), BF16)):  # the first alone by torch
            result = triton_products(batch_limit=2).multiply(
                a, x, summands, torch.full_like(x, torch.nan, dtype=dtype), 0.5, symmetric=False
            )
            errors.append(excess(result, exact, 24))
        assert len(flags) == 2
        flags.clear()
        weights = [nn.Parameter(torch.randn(24, 136)) for _ in range(2)]
        optimizer = mm.Muon(weights, kernels="triton", process_group="local", ns_coefficients="quintic")
        optimizer._runtime.driver = Driver(False)
        for weight in weights:
            weight.grad = torch.randn(24, 136)
        for _ in range(5):
            optimizer.step()
        recordings = optimizer._runtime.planned.collected.work._recordings.values()
    return errors, set(flags), len(flags), sum(isinstance(entry, recording.Recording) for entry in recordings)


def stepped_again() -> tuple[list[bool], int]:
    """Whether pieces that are used again have the bits of new ones while memory moves, and how often it has moved."""
    torch.manual_seed(0)
    memory = [torch.randn(2, 4, 6, dtype=FP32) for _ in range(3)]
    weights = [torch.nn.Parameter(torch.randn(4, 6, dtype=FP32)) for _ in range(2)]
    momenta, into = torch.ones(2, 4, 6, dtype=FP32), torch.empty(2, 4, 6, dtype=BF16)
    reused, uploads, same = pieces_of(list(momenta), list(into)), set[int](), list[bool]()

    def step(pieces: PieceRows, gradients: list[Tensor], m: Tensor, p: list[Tensor], d: Tensor) -> None:
        fused.fold(pieces, gradients, list(m), list(d), active, momentum=0.9, nesterov=True)
        fused.apply(pieces, p, [], list(d), active, keep=keep, size=size)

    for number in range(12):
        gradients = list(memory[number // 2 % 3])
        active, keep, size = torch.tensor([number % 5 > 0, True]), *(torch.rand(2, 2) + 0.5)[:, :, None].unbind()
        keep, size = keep[:, 0], size[:, 0]
        expected = [momenta.clone(), [weight.detach().clone() for weight in weights], torch.empty_like(into)]
        step(pieces_of(list(momenta), list(into)), gradients, *expected)
        step(reused, gradients, momenta, weights, into)
        last, *_ = reused._last.values()
        uploads.add(last.bases.data_ptr())
        same += [torch.equal(momenta, expected[0]), torch.equal(into, expected[2])]
        same += [torch.equal(weight, other) for weight, other in zip(weights, expected[1], strict=True)]
    return same, len(reused._tables)


def trained_by(change: str, waits: bool, by: str) -> tuple[list[Tensor], int]:
    """Weights and momenta after steps in which something moves, and how many batches and searches were started again.

    ``by``: "repeats"; or "steps", each of which looks at everything again; or "parts", by which no kernel folds either.
    """
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(8, 12, dtype=BF16)) for _ in range(3)] + [nn.Parameter(torch.randn(12, 20))]
    groups = [{"params": weights[:3], "lr": 0.1}, {"params": weights[3:], "lr": 0.2, "weight_decay": 0.1}]
    options: dict[str, Any] = {"ns_coefficients": "quintic", "ns_steps": 3, "process_group": "local"}
    master = FP32 if change == "masters" else None
    optimizer, again = mm.Muon(groups, kernels="triton", master_dtype=master, **options), 0
    optimizer._runtime.driver = Driver(waits)
    memory = [torch.empty_like(weight) for weight in weights]
    with pytest.MonkeyPatch.context() as patch:
        if by != "repeats":
            patch.setattr(Snapshot, "is_current", lambda self, state: False)
        if by == "parts":
            patch.setattr(by_kernel, "is_usable", lambda device: False)
        for step in range(7):
            fresh = (
                change in ("gradients", "zeros elsewhere") and step > 3
            )  # elsewhere in each step, in memory that is not given back
            memory += [torch.empty_like(weight) for weight in weights] if fresh else []
            if change == "gradients freed":  # by zero_grad(); a backward pass takes other memory
                freed, memory = memory, [torch.empty_like(weight) for weight in weights]
                for gradient in freed:
                    gradient.fill_(math.nan)
            for number, (weight, gradient) in enumerate(zip(weights, memory[-len(weights) :], strict=True)):
                zero = change in ("zeros", "zeros elsewhere") and step % 3 == 0 and number == 1
                weight.grad = gradient.zero_() if zero else gradient.normal_()
            if change == "rates":
                groups[step % 2]["lr"] = optimizer.param_groups[step % 2]["lr"] = 0.1 / (step + 1)
            if change == "momentum":
                optimizer.param_groups[0]["momentum"] = 0.9 - 0.05 * step
            if change == "nesterov" and step > 3:
                optimizer.param_groups[0]["nesterov"] = False
            if change == "weights" and step == 4:
                weights[1].data = weights[1].data.clone()
            if change == "metrics" and step == 4:
                optimizer.metrics()
            optimizer.step()
        planned = optimizer._runtime.planned
        search = planned.vectors.get("nonzero")  # where the CPU does not wait
        recordings = [*planned.collected.work._recordings.values(), *(search.recordings.values() if search else ())]
        again = sum(isinstance(entry, recording.Recording) for entry in recordings)
    results = [weight.detach() for weight in weights] + [
        value for w in weights for value in optimizer.state[w].values()
    ]
    if change == "metrics":
        results.append(torch.tensor([*optimizer.metrics().values()]))
    return results, again


once_trained_by = functools.cache(trained_by)


def repeated(change: str, waits: bool) -> tuple[bool, float, list[int]]:
    """Whether bits are equal, how far fp32 weights are from those of the rule's parts, and what was started again.

    Both are compared with what a host that does not wait makes without repeats; but a host that waits has metrics of
    its own, which differ in their last bits.
    """
    same_host = waits and change == "metrics"
    others = [once_trained_by(change, same_host, by) for by in ("steps", "parts")]
    runs = [trained_by(change, waits, "repeats"), *others]
    (result, _), (expected, _), (near, _) = runs
    return (
        all(map(torch.equal, result, expected)),
        float((result[3] - near[3]).abs().max()),
        [again for _, again in runs],
    )


def excess(result: Tensor, exact: Tensor, terms: int) -> float:
    """The error beyond one rounding, in roundings of an fp32 sum of that many terms of the largest magnitude."""
    if not result.isfinite().all():
        return math.inf  # and not NaN, which a maximum may pass over
    allowed = HALF[result.dtype] * exact.abs() + 2**-133  # half of bf16's smallest denormal number
    beyond = ((result.double() - exact).abs() - allowed).clamp(min=0).max()
    return float(beyond / (2**-24 * terms**0.5 * exact.abs().max()))


def upper(x: Tensor) -> Tensor:
    """The upper triangle and its mirror image: rounded A and B commute only nearly."""
    return x.triu() + x.triu(1).mT


def products_of(rows: int, cols: int, batch: int, dtype: torch.dtype) -> dict[str, float]:
    """The excess of every product; raises where one wrote an operand or is not symmetric."""
    matmuls = triton_products(batch_limit=3)
    x, a, b = commuting_operands(rows, cols, batch, dtype)
    before = [t.clone() for t in (x, a, b)]
    xd, ad, bd = (t.double() for t in (x, a, b))
    s = torch.linspace(0.7, 1.9, batch)[:, None, None]  # no power of two: multiplying by them has to round
    sd = s.double()

    def square() -> Tensor:
        return torch.full_like(a, torch.nan)

    def long() -> Tensor:
        return torch.full_like(x, torch.nan)

    symmetric = {
        "gram": (matmuls.multiply(x, None, [], square(), scale=s), sd * (xd @ xd.mT)),
        "polynomial": (matmuls.multiply(a, a, [(a, -2.5)], square(), alpha=1.25), -2.5 * ad + 1.25 * ad @ ad),
        "product": (matmuls.multiply(a, b, [(b, 0.75)], square()), upper(0.75 * bd + ad @ bd)),
    }
    for name, (result, _) in symmetric.items():
        assert torch.equal(result, result.mT), name
    others = {
        "full": (matmuls.multiply(a, b, [(b, 0.75)], square(), symmetric=False), 0.75 * bd + ad @ bd),
        "full without C": (
            matmuls.multiply(a, b, [(torch.full_like(b, torch.nan), 0.0)], square(), symmetric=False),
            ad @ bd,
        ),
        "apply, numbers": (
            matmuls.multiply(a, x, [(x, 1.5)], long(), scale=0.5, symmetric=False),
            0.5 * (1.5 * xd + ad @ xd),
        ),
        "apply, a tensor": (
            matmuls.multiply(a, x, [(x, s)], long(), scale=0.5, symmetric=False),
            0.5 * (sd * xd + ad @ xd),
        ),
        "apply, s tensor": (
            matmuls.multiply(a, x, [(x, 1.5)], long(), scale=s, symmetric=False),
            sd * (1.5 * xd + ad @ xd),
        ),
        "apply, tensors": (
            matmuls.multiply(a, x, [(x, s)], long(), scale=s, symmetric=False),
            sd * (sd * xd + ad @ xd),
        ),
        "apply, 0-d": (
            matmuls.multiply(a, x, [(x, s[0, 0, 0])], long(), scale=s[0, 0, 0], symmetric=False),
            sd[0] * (sd[0] * xd + ad @ xd),
        ),
    }
    assert all(torch.equal(t, was) for t, was in zip((x, a, b), before, strict=True))
    # The coefficients used here make sums of a few times the largest entry of the result.
    return {name: excess(result, exact, max(rows, cols)) for name, (result, exact) in (symmetric | others).items()}


def strided(rows: int, cols: int, dtype: torch.dtype) -> dict[str, float]:
    """Products of matrices that lie in memory in every other way."""
    matmuls = triton_products(batch_limit=3)
    x, a, _ = commuting_operands(rows, cols, 2, dtype)
    xd, ad = x.double(), a.double()
    s = torch.tensor([0.5, 2.0])[:, None, None]
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": lambda t: t.mT.contiguous().mT,
        "every other column": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
        "rows apart": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
        "two bytes off": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
        "batch last": lambda t: t.permute(1, 2, 0).contiguous().permute(2, 0, 1),
        "one for all": lambda t: t[:1].expand(2, -1, -1),
    }
    errors = {}
    for name, layout in layouts.items():
        gram = matmuls.multiply(
            layout(x), None, [], layout(torch.full_like(a, torch.nan)) if name != "one for all" else a.clone(), scale=s
        )
        reference = layout(xd)
        errors[f"gram, {name}"] = excess(gram, s.double() * (reference @ reference.mT), cols)
        long = matmuls.multiply(
            layout(a), layout(x), [(layout(x), s)], torch.full_like(x, torch.nan), scale=s, symmetric=False
        )
        exact = s.double() * (s.double() * reference + layout(ad) @ reference)
        errors[f"apply, {name}"] = excess(long, exact, cols)
    return errors


def around() -> list[bool]:
    """Whether zeros stay zeros, a matrix that is not finite becomes NaN, and the one between them is untouched."""
    x, _, _ = commuting_operands(40, 72, 4, BF16)
    alone = orthogonalize(x[1], dtype=BF16, kernels="triton", steps=3)
    x[0], x[2, 3, 4], x[3, 5, 6] = 0, math.nan, -math.inf
    result = orthogonalize(x, dtype=BF16, kernels="triton", steps=3)
    return [not result[0].any(), torch.equal(result[1], alone), bool(result[2:].isnan().all())]


def far_apart() -> dict[str, float]:
    """The excess of a product with strides that need 64 bits; the memory between the rows is never touched."""
    memory = torch.empty(3 << 30, dtype=torch.bfloat16)
    x = memory.as_strided((1, 3, 20), (0, 1 << 30, 1))
    x.copy_(commuting_operands(3, 20, 1, torch.bfloat16)[0])
    gram = triton_products(batch_limit=1).multiply(
        x, None, [], torch.empty(1, 3, 3, dtype=torch.bfloat16), scale=torch.ones(1, 1, 1)
    )
    return {"gram": excess(gram, x.double() @ x.double().mT, 20)}


TRANSPOSED, APART, ODD = "transposed", "rows apart", "two bytes off"


def laid(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor]:
    """Memory full of sevens, and a tensor in it."""
    memory = torch.full((2 * math.prod(shape) + 64,), 7.0, dtype=dtype)
    if layout == TRANSPOSED:
        return memory, memory[: math.prod(shape)].view(*shape[:-2], shape[-1], shape[-2]).mT
    if layout == APART:
        wide = (*shape[:-1], 2 * shape[-1])
        return memory, memory[: math.prod(wide)].view(wide)[..., : shape[-1]]
    first = 1 if layout == ODD else 0
    return memory, memory[first : first + math.prod(shape)].view(shape)


# Shape, dtypes of the three tensors, ways in which they lie, whether the piece is active.
Piece = tuple[tuple[int, ...], tuple[torch.dtype, torch.dtype, torch.dtype], tuple[str, str, str], bool]
PIECES: list[Piece] = [
    ((37, 70), (FP32, FP32, BF16), ("", "", ""), True),
    ((37, 70), (FP32, FP32, BF16), ("", "", TRANSPOSED), True),
    ((2, 33, 65), (BF16, FP32, BF16), (APART, "", TRANSPOSED), True),
    ((40, 64), (FP32, FP32, BF16), ("", "", ""), False),
    ((70, 37), (FP32, FP32, FP32), (TRANSPOSED, APART, ODD), False),
    ((40, 64), (BF16, BF16, FP32), ("", "", ""), True),
    ((0, 4), (FP32, FP32, BF16), ("", "", ""), True),
    ((1, 66), (FP32, FP32, BF16), (ODD, "", APART), True),
    ((4100,), (FP16, FP32, FP16), ("", "", ""), True),
    ((9001,), (FP32, FP32, BF16), ("", "", ""), True),
    ((96, 80), (FP32, FP32, BF16), ("", "", TRANSPOSED), True),
    ((2, 80, 48), (BF16, FP32, BF16), (APART, "", TRANSPOSED), True),
    ((80, 48), (FP32, BF16, BF16), ("", "", TRANSPOSED), False),
    ((80, 48), (FP32, FP32, BF16), (TRANSPOSED, TRANSPOSED, ""), True),
    ((2, 80, 48), (FP32, FP32, BF16), (TRANSPOSED, "", ""), True),
    ((48, 32), (BF16, FP32, FP32), (TRANSPOSED, "", APART), False),
    ((48, 32), (FP32, FP32, BF16), (TRANSPOSED, TRANSPOSED, TRANSPOSED), True),
    ((70, 37), (FP32, FP32, BF16), ("", APART, TRANSPOSED), True),
    ((3, 4, 3, 3), (FP32, FP32, BF16), (ODD, "", ""), True),
    ((4, 4, 5, 5), (FP32, FP32, BF16), ("", "", ""), True),
]


def launches() -> list[list[int]]:
    """Pieces by dtypes, and by whether all addresses are aligned, as launches take them."""
    groups: dict[object, list[int]] = {}
    for number, (_, dtypes, layouts, _) in enumerate(PIECES):
        groups.setdefault((dtypes, ODD in layouts[1:]), []).append(number)
    return list(groups.values())


def folds(momentum: float, nesterov: bool, directs: bool, masked: bool) -> dict[str, float]:
    """The excess of momenta and directions; raises where something else was written."""
    torch.manual_seed(0)
    memories, tensors, exact, errors = [], [], [], []
    for shape, dtypes, layouts, active in PIECES:
        # A gradient lies as its momentum does.
        (_, g), (m_memory, m), (d_memory, d) = map(laid, [shape] * 3, dtypes, (layouts[1], *layouts[1:]))
        on = active or not masked
        g.copy_(torch.randn(shape) if on else torch.full(shape, torch.nan))
        m.copy_(torch.randn(shape))
        m.view(-1)[:1].fill_(0) if m.is_contiguous() else None
        old = m.double()
        new = old + (1 - momentum) * (g.to(m.dtype).double() - old) if on else old
        stored = new.to(m.dtype).double()
        direction = g.to(m.dtype).double().lerp(stored, momentum) if on and nesterov else stored
        memories.append((m_memory, m.clone(), d_memory))
        tensors.append((g, m, d))
        exact.append((new, direction.to(m.dtype).double() if m.dtype != d.dtype else direction, on))
    gradients, momenta, directions = (list(column) for column in zip(*tensors, strict=True))
    mask = torch.tensor([active or not masked for *_, active in PIECES])
    versions = [m._version for m in momenta]
    entries = list(range(len(PIECES)))
    if masked:  # some other order than that of the pieces, and an entry that is nobody's
        mask, entries = torch.cat([mask.flip(0), ~mask[:1]]), list(range(len(PIECES)))[::-1]
    for numbers in launches():
        pieces = pieces_of(*([column[n] for n in numbers] for column in (momenta, directions, entries)))
        g, m, d = ([column[n] for n in numbers] for column in (gradients, momenta, directions))
        if len(pieces):
            fused.fold(pieces, g, m, d if directs else [], mask, momentum=momentum, nesterov=nesterov)
    assert all(m._version > version for m, version in zip(momenta, versions, strict=True) if m.numel())
    for (m_memory, before, d_memory), (g, m, d), (new, direction, on) in zip(memories, tensors, exact, strict=True):
        assert on or torch.equal(m, before)
        assert momentum or torch.equal(m, g.to(m.dtype))  # lerp is exact at both ends
        if not m.numel():
            continue
        errors.append(excess(m, new, 1))
        if directs:
            # The formula is that of the momentum as it was stored, which may differ in its last bit.
            slack = float((m.double() - new).abs().max()) / (2**-24 * float(direction.abs().max()))
            errors.append(excess(d, direction, 1) - slack)
        else:
            assert (d_memory == 7).all()
        for memory, tensor in ((m_memory, m), (d_memory, d)):
            tensor.fill_(7)
            assert (memory == 7).all()  # nothing else was written
    return {"momenta and directions": max(errors)}


def denormals() -> list[list[float]]:
    """Momenta after a fold in which some would become denormal: three ways through the kernel."""
    values = torch.tensor([2**-126, 1.5 * 2**-126, -(2**-126), 1e-20, 2**-140, math.nan])
    momenta = [values.clone(), values.repeat(400), values.repeat(3, 1).mT.contiguous().mT]
    gradients, active = [torch.zeros_like(m) for m in momenta], torch.ones(len(momenta), dtype=torch.bool)
    fused.fold(pieces_of(momenta, momenta), gradients, momenta, [], active, momentum=0.9, nesterov=True)
    return [m.flatten()[: len(values)].tolist() for m in momenta]


def applies(masters: bool, masked: bool) -> None:
    """Raises where weights or masters differ from torch's operations in fp32, or something else was written."""
    torch.manual_seed(0)
    memories, weights, wide, updates, expected = [], [], [], [], []
    keep, size = torch.rand(2 * len(PIECES))[::2], torch.rand(len(PIECES))
    for (shape, (w_type, p_type, u_type), (_, p_way, u_way), active), k, s in zip(PIECES, keep, size, strict=True):
        for tensors, dtype, layout in ((weights, w_type, p_way), (wide, p_type, p_way)):
            memory, tensor = laid(shape, dtype, layout)
            tensors.append(tensor.copy_(torch.randn(shape)))
            memories.append((memory, tensor))
        updates.append(laid(shape, u_type, u_way)[1].copy_(torch.randn(shape)))
        rounded, written = wide[-1].to(w_type), torch.rand(shape) < 0.3  # these by other code since the last step
        weights[-1].copy_(torch.where(written, weights[-1], rounded))
        before = torch.where(weights[-1] == rounded, wide[-1], weights[-1].to(p_type)) if masters else weights[-1]
        steps = active or not masked
        after = (before.float() * k - updates[-1].float() * s).to(before.dtype)
        weight = after.to(w_type) if steps else weights[-1].clone()
        expected.append((weight, after if masters and steps else wide[-1].clone()))
    mask = torch.tensor([active or not masked for *_, active in PIECES])
    entries = list(range(len(PIECES)))
    if masked:
        mask, keep, size, entries = mask.flip(0), keep.flip(0), size.flip(0), list(range(len(PIECES)))[::-1]
    for numbers in launches():
        pieces = pieces_of(*([column[n] for n in numbers] for column in (weights, updates, entries)))
        w, p, u = ([column[n] for n in numbers] for column in (weights, wide, updates))
        if len(pieces):
            fused.apply(pieces, w, p if masters else [], u, mask, keep=keep, size=size)
    for number, (weight, master) in enumerate(expected):
        assert torch.equal(weights[number], weight), PIECES[number]
        assert torch.equal(wide[number], master), PIECES[number]
    for memory, tensor in memories:
        tensor.fill_(7)
        assert (memory == 7).all()  # nothing else was written


def normalized(dtype: torch.dtype, rows: int, cols: int) -> dict[str, Any]:
    """What is wrong with norms and powers of two of matrices of every magnitude; empty if nothing is."""
    torch.manual_seed(0)
    wrong: dict[str, Any] = {}
    magnitudes = (1.0, 2.0**-31, 2.0**30, 2.0**-100, 2.0**110, 1e-33, 0.0)
    x = torch.stack([(torch.randn(rows, cols).double() * size).to(dtype) for size in magnitudes])
    before = x.clone()
    for size, norm, exact in zip(magnitudes, triton.norm(x).flatten().tolist(), x.double(), strict=True):
        if not (abs(norm / float(exact.norm()) - 1) < 1e-6 if size else norm > 0):
            wrong[f"{size}, norm alone"] = norm, float(exact.norm())
    out = x if dtype == torch.float32 else torch.empty_like(x, dtype=FP16)
    inverse, inverse_square = triton.normalize(x, out)
    for number, size in enumerate(magnitudes):
        old, new = before[number].double(), out[number].double()
        norm = float(new.norm()) or 1.0
        if size and (abs(float(inverse[number]) * norm - 1) > 1e-6 or not 2**12 <= norm * 1.0001 < 1.001 * 2**13):
            wrong[f"{size}, norm"] = float(inverse[number]), norm
        if abs(float(inverse_square[number]) / float(inverse[number]) ** 2 - 1) > 1e-6:
            wrong[f"{size}, square"] = float(inverse_square[number])
        factor = 2.0 ** round(math.log2(float(new.norm() / old.norm()))) if size else 1.0
        if not torch.equal(new, old * factor):  # also of fp16, whose numbers these all are
            wrong[f"{size}, not a power of two"] = float((new - old * factor).abs().max())
    alone = torch.empty_like(out[:1])
    triton.normalize(before[2:3].clone(), alone)
    if not torch.equal(alone, out[2:3]):
        wrong["alone"] = alone
    x = before
    for number, bad in enumerate((math.nan, math.inf, -math.inf)):
        x[number, rows // 2, cols - 1] = bad
    inverse, inverse_square = triton.normalize(x, out)
    if not bool(inverse[:3].isnan().all() & inverse_square[:3].isnan().all() & inverse[3:].isfinite().all()):
        wrong["not finite"] = inverse
    return wrong


def deflated_by_products() -> tuple[float, list[bool]]:
    """The largest singular value of what is deflated; whether bits are those alone, zeros stay, the memory suffices."""
    torch.manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(40, 56, dtype=torch.float64), full_matrices=False)
    x = ((u * torch.where(torch.arange(40) < 3, 1.0, 0.01)) @ vh).to(BF16)[None]
    x = torch.cat([torch.zeros_like(x), x])
    table, loaded = triton_products(batch_limit=2), torch.empty_like(x, dtype=FP16)
    inverse, _ = triton.normalize(x, loaded)
    out, alone = loaded.clone(), loaded[1:].clone()
    sizes = list[int]()

    def memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        sizes.append(-(-math.prod(shape) * dtype.itemsize // 64) * 64)
        return torch.full(shape, math.nan, dtype=dtype)

    deflate([out], inverse, 8, table, memory)
    fits = sum(sizes) <= 2 * deflation_at_once(((2, 40, 56),), 8)
    deflate([alone], inverse[1:], 8, table, memory)
    values = [torch.linalg.svdvals(matrix[1].double()) for matrix in (loaded, out)]
    return float(values[1][0] / values[0][0]), [torch.equal(alone, out[1:]), not bool(out[0].any()), fits]


def functions_in_one_launch(vectors: int) -> dict[str, float]:
    """How far functions of Gram matrices are from what products make of them, relative; and what else is wrong."""
    torch.manual_seed(0)
    x = torch.randn(3, vectors, 96, dtype=torch.float64) * torch.logspace(0, -3, vectors)[:, None]
    x[1] *= 2.0**20
    gram, wrong = (x @ x.mT).to(FP32), dict[str, float]()
    inverse = (1.1 * x.flatten(1).norm(dim=1)).reciprocal()[:, None, None].float() * device_deflation._UNIT
    memory = lambda shape, dtype: torch.full(shape, math.nan, dtype=dtype)  # noqa: E731
    table = triton_products(batch_limit=3)
    results, exact = {}, {}
    for name, matmuls, dtype in (("one", table, FP32), ("products", torch_products(batch_limit=3), torch.float64)):
        of, into = device_deflation._Functions.of, results if name == "one" else exact
        for row in device_deflation._FROM_SHIFT, device_deflation._FROM_FLOOR:
            g = gram.to(dtype, copy=True)
            into["whiten", len(row)] = of(matmuls, g, memory).whiten(g, row)
        g = gram.to(dtype, copy=True)
        into["soften", 0] = of(matmuls, g, memory).soften(g, inverse.to(dtype), 200)
    for name, result in results.items():
        for number, (found, expected) in enumerate(zip(result.double(), exact[name], strict=True)):
            wrong[f"{name}, {number}"] = float((found - expected).norm() / expected.norm())
    bad = torch.cat([torch.zeros_like(gram[:1]), gram[:2]])
    bad[2, 0, 0] = math.nan
    results = device_deflation._Functions.of(table, bad, memory).whiten(bad, device_deflation._FROM_SHIFT)
    wrong["zeros"] = 0.0 if bool(results[0].isfinite().all()) else 1.0
    wrong["not finite"] = 0.0 if bool(results[2].isnan().all()) else 1.0
    wrong["bits of a matrix alone"] = float(results[1].ne(whitened_alone(table, gram[:1].clone())[0]).sum())
    found = torch.full((5, vectors), math.nan, dtype=FP16)
    triton._signs(found)
    wrong["signs"] = float(found.ne(deflation.signs(5, vectors)).sum())
    return wrong


def whitened_alone(table: kernels.Matmuls, gram: Tensor) -> Tensor:
    memory = lambda shape, dtype: torch.empty(shape, dtype=dtype)  # noqa: E731
    return device_deflation._Functions.of(table, gram, memory).whiten(gram, device_deflation._FROM_SHIFT)


def in_one_launch(rows: int, cols: int, dtype: torch.dtype) -> dict[str, Any]:
    """What is wrong with small matrices of every magnitude, all steps of which are one launch; empty if nothing is."""
    torch.manual_seed(0)
    wrong: dict[str, Any] = {}
    options: dict[str, Any] = {"coefficients": "polar_express"}
    sizes = torch.tensor([1.0, 2.0**-80, 2.0**90, 0.0])[:, None, None] if dtype != FP16 else torch.ones(4, 1, 1)
    matrix = torch.randn(rows, cols)
    x = (matrix * sizes).to(dtype)
    launched, run = [], triton.small
    triton.small = lambda *arguments: (launched.append(arguments[0].shape), run(*arguments))
    output = orthogonalize(x, kernels="triton", **options)
    expected = orthogonalize(x.double(), kernels="torch", dtype=torch.float64, **options)
    separate = orthogonalize(x, kernels="torch", **options)
    norm = expected.norm()
    error, torch_error = ((result.double() - expected).norm() / norm for result in (output, separate))
    if not error < 1.05 * torch_error + 2**-9:
        wrong["error"] = float(error), float(torch_error)
    if launched != [(4, rows, cols)]:
        wrong["launched"] = launched
    if dtype != FP16 and not (torch.equal(output[0], output[1]) and torch.equal(output[0], output[2])):
        wrong["a power of two"] = output
    if dtype != FP16 and output[3].any():
        wrong["zeros"] = output[3]
    if not torch.equal(orthogonalize(x[1:2], kernels="triton", **options), output[1:2]):
        wrong["alone"] = output
    apart = torch.full((2, cols + 3, rows + 5), 7.0).to(dtype).mT[:, 2 : rows + 2, 1 : cols + 1]
    apart.copy_(x[:2])
    if not torch.equal(orthogonalize(apart, kernels="triton", **options), output[:2]):
        wrong["strides"] = output
    x[1, -1, 0], x[2, 0, -1] = math.nan, math.inf
    output = orthogonalize(x, kernels="triton", **options)
    if output[1:3].isfinite().any() or not output[[0, 3]].isfinite().all():
        wrong["not finite"] = output
    triton.small = run
    return wrong


def nonzeros() -> list[int]:
    """Which of some gradients have an element that is not zero, each by its entry; entry 1 is nobody's."""
    long = torch.zeros(2 * 2**17 + 5, dtype=torch.float32)
    last, nan, negative = long.clone(), torch.zeros(40, 3, dtype=BF16), torch.zeros(1, dtype=FP16)
    last[-1], nan[7, 1], negative[0] = 2.0**-149, math.nan, -0.0
    flags = torch.zeros(11, dtype=torch.bool)
    first, apart = torch.ones(5000), torch.ones(2, 64, 96)
    apart[:, :, :64] = 0
    strided, turned = apart[0, :, :64], apart[1, :, :50].mT
    gradients = [long, last, nan, negative, first, torch.zeros(0), first[:3].contiguous(), first[:3] * 0]
    gradients += [strided, turned, strided.clone(), turned.clone()]
    gradients[-2][-1, -1], gradients[-1][-1, -1] = 1.0, 1.0
    entries = [0, 2, 3, 4, 5, 6, 6, 6, 7, 8, 9, 10]
    for dtype in {gradient.dtype for gradient in gradients}:
        pairs = [(g, entry) for g, entry in zip(gradients, entries, strict=True) if g.dtype == dtype and g.numel()]
        tensors, numbers = [g for g, _ in pairs], [entry for _, entry in pairs]
        fused.mark_nonzero(pieces_of(tensors, tensors, numbers, SEARCHED), tensors, flags)
    return [*map(int, flags)]


def joined(rows: int, dtype: torch.dtype, symmetric: bool) -> dict[str, float]:
    """The excess of (q + W)(p + Z), with the identity inside; raises where it is not symmetric."""
    _, z, w = commuting_operands(rows, 2 * rows, 2, dtype)
    p, q = 1.75, 0.625
    out = torch.full_like(z, torch.nan)
    triton.multiply(w, z, ((z, q), (w, p)), out, symmetric=symmetric, identity=p * q)
    zd, wd = z.double(), w.double()
    exact = wd @ zd + q * zd + p * wd + p * q * torch.eye(rows)
    exact = upper(exact) if symmetric else exact
    assert not symmetric or torch.equal(out, out.mT)
    return {"factor": excess(out, exact, rows)}


def stepped_on_shapes(dtype: torch.dtype, *, moves: bool = False) -> tuple[list[Tensor], int]:
    """Weights, momenta and masters after steps as on a device; how many rows kernels have folded.

    Sizes that are aligned and that are not, experts, a fused weight; gradients of zeros, of an expert too, and one that
    is missing at first.
    """
    torch.manual_seed(0)
    shapes = [(16, 16)] * 3 + [(3, 5)] * 3 + [(5, 3), (32, 8), (32, 8), (12, 12)]
    shapes += [(3, 8, 16), (2, 16, 8), (2, 3, 7), (24, 16)]
    matrices: list[Any] = [*[None] * 10, "stack", "stack", "stack", ("rows", 8, 8, 8), None]
    weights = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    weights.append(nn.Parameter(torch.randn(8, 24).to(dtype).t()))
    groups = [{"params": weights, "matrices": matrices}]
    optimizer = mm.Muon(groups, lr=0.1, master_dtype=None if dtype == FP32 else FP32)
    optimizer._runtime.driver = Driver(False)
    folded = 0
    fold = by_kernel.ByKernel.fold

    def counted(self: by_kernel.ByKernel, elements: Any) -> Any:
        nonlocal folded
        rest = fold(self, elements)
        folded += len(elements.table.rows) - len(rest)
        return rest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_kernel.ByKernel, "fold", counted)
        for step in range(4):
            for weight in weights:
                gradient = torch.randn_like(weight)
                if weight.grad is None or moves or step < 2:
                    weight.grad = gradient
                else:
                    weight.grad.copy_(gradient)
            weights[1].grad.zero_()
            weights[10].grad[step % 3] = 0
            if step == 0:
                weights[9].grad = None
            if moves and step > 2:
                for weight, state in optimizer.state.items():
                    weight.data = weight.data.clone()
                    state.update({key: value.clone() for key, value in state.items()})
            optimizer.step()
    states = [optimizer.state[weight] for weight in weights]
    return [*weights, *(value.clone() for state in states for value in state.values())], folded


def still_and_moving(dtype: torch.dtype) -> tuple[bool, int]:
    """Whether tensors that move have the bits of those that stay, and how many rows kernels have folded."""
    (still, folded), (moved, _) = stepped_on_shapes(dtype), stepped_on_shapes(dtype, moves=True)
    return len(still) == len(moved) and all(map(torch.equal, still, moved)), folded


def boosted() -> list[float]:
    """How long steps are, over the first: of a rule whose scale reads a setting of its own, which changes twice."""

    @mm.register_rule("test-boosted")
    @dataclass(frozen=True)
    class Boosted(mm.MuonRule):
        boost: float = 1.0

        def scale(self, rows: int, cols: int) -> float:
            return self.boost

    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(16, 24))
    groups = [{"params": [weight], "algorithm": "test-boosted", "boost": 1.0}]
    optimizer = mm.Muon(groups, lr=0.1, weight_decay=0.0, momentum=0.0)
    optimizer._runtime.driver = Driver(False)
    weight.grad, steps = torch.randn(16, 24), list[float]()
    for boost in (1.0, 1.0, 3.0, 0.5):
        before = weight.detach().clone()
        optimizer.param_groups[0]["boost"] = boost
        optimizer.step()
        steps.append(float((weight.detach() - before).norm()))
    return [step / steps[0] for step in steps]


def changed_rule() -> tuple[float, bool]:
    """How far weights are from those without kernels, if a steady step's rule decays as no kernel does."""

    def weights() -> tuple[Tensor, bool]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(12, 20))
        optimizer = mm.Muon([("w", weight)], lr=0.1, weight_decay=0.5, process_group="local", compute_dtype=FP32)
        for step in range(6):
            if step == 4:
                optimizer.param_groups[0]["decay_mode"] = "cautious"
            weight.grad = torch.randn(12, 20)
            optimizer.step()
        return weight.detach(), optimizer._runtime.planned.collected is not None

    result, steady = weights()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_kernel, "is_usable", lambda device: False)
        expected, _ = weights()
    return float((result - expected).abs().max()), steady


def sees_direction_later() -> float:
    """How far weights are from those of torch's products, if a class that sees the direction takes a rule's name."""

    @dataclass(frozen=True)
    class Adds(MuonRule):
        def whole(self, update: Tensor, state: Any) -> Tensor:
            return update + state["direction"] if "direction" in state else update

    @dataclass(frozen=True)
    class SeesAndAdds(Adds):
        sees_direction = True

    def weights(products: Any) -> Tensor:
        torch.manual_seed(0)
        register_rule("adds")(Adds)
        weight = nn.Parameter(torch.randn(16, 32))
        group = {"params": [weight], "algorithm": "adds"}
        optimizer = mm.Muon([group], lr=0.1, kernels=products, ns_steps=3, compute_dtype=FP32)
        for step in range(4):
            if step == 2:
                register_rule("adds")(SeesAndAdds)
            weight.grad = torch.randn(16, 32)
            optimizer.step()
        return weight.detach()

    return float((weights("triton") - weights("torch")).abs().max())


def messages_of_refusals() -> dict[str, str]:
    """What is said where Triton is asked for what it cannot do."""
    messages = {}
    for name, device, dtype in (("dtype", "cpu", torch.float64), ("device", "meta", torch.bfloat16)):
        with pytest.raises(ValueError, match="kernels") as caught:
            kernels.select("triton", device=torch.device(device), dtype=dtype, rows=4, cols=4)
        messages[name] = str(caught.value)
    return messages


# ------------------------------------------------------------------ tests


def test_a_steady_step_asks_whether_kernels_still_do_what_a_rule_does(interpreter: Interpreter) -> None:
    apart, steady = interpreter(changed_rule)
    assert steady, "launches last from step to step"
    assert apart < 1e-5


def test_a_batch_keeps_its_direction_for_a_rule_that_comes_to_see_it(interpreter: Interpreter) -> None:
    """Results lie in the memory of the matrices only where nothing reads these afterwards."""
    assert interpreter(sees_direction_later) < 1e-5


MOVES = [
    "nothing",
    "gradients",
    "gradients freed",
    "rates",
    "momentum",
    "nesterov",
    "zeros",
    "zeros elsewhere",
    "weights",
    "metrics",
    "masters",
]


@pytest.mark.parametrize("waits", [False, True], ids=["waits not", "waits"])
@pytest.mark.parametrize("change", MOVES)
def test_a_batch_that_is_started_again_has_the_bits_of_one_that_is_not(
    interpreter: Interpreter, change: str, waits: bool
) -> None:
    """So has a search for gradients of zero, which a CPU that waits makes itself."""
    same, apart, (again, *others) = interpreter(repeated, change, waits)
    assert same
    assert apart < 0.02
    assert again >= (0 if change == "weights" else 1) + (not waits)  # batches were given up when a weight moved
    assert others == [0, 0]


def by_name(value: Any) -> str:
    return getattr(value, "__name__", str(value))


BOUNDED = [
    # Smaller than a tile, larger with rows that are not aligned, tiles of 128 that do not divide the matrix.
    *((products_of, size) for size in ((1, 1, 1, BF16), (65, 130, 2, BF16), (3, 50, 2, FP16), (3, 50, 2, FP32))),
    *(
        pytest.param(products_of, size, marks=pytest.mark.soak)
        for size in ((3, 50, 2, BF16), (288, 304, 1, BF16), (64, 80, 1, FP16), (65, 130, 2, FP32))
    ),
    *((strided, (*size, dtype)) for size in ((48, 80), (33, 70)) for dtype in (BF16, FP32)),
    (far_apart, ()),
    *((joined, case) for case in ((48, FP16, True), (33, FP16, False), (70, FP32, True))),
    # Momentum; whether it is Nesterov's, whether directions are written, whether pieces are masked.
    (folds, (0.95, True, True, True)),
    (folds, (0.3, True, True, False)),
    (folds, (0.0, True, True, False)),
    (folds, (0.95, False, True, True)),
    (folds, (0.95, True, False, True)),
]


@pytest.mark.parametrize(("function", "arguments"), BOUNDED, ids=by_name)
def test_products_and_folds_round_once(interpreter: Interpreter, function: Any, arguments: tuple[Any, ...]) -> None:
    errors = interpreter(function, *arguments)
    assert max(errors.values()) < 4, errors


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        # One part of a matrix and several, of every magnitude, to norms from 2¹² on; bf16 becomes fp16.
        *((normalized, arguments) for arguments in ((BF16, 33, 70), (FP32, 130, 300))),
        # Against fp64's polynomials, with the bits of a matrix alone, however it lies in memory.
        *((in_one_launch, size) for size in ((64, 64, BF16), (33, 100, BF16), (50, 7, FP32), (1, 1, FP16))),
    ],
    ids=by_name,
)
def test_norms_and_small_matrices_in_one_launch(
    interpreter: Interpreter, function: Any, arguments: tuple[Any, ...]
) -> None:
    assert interpreter(function, *arguments) == {}


def test_deflation_has_the_bits_of_a_matrix_alone(interpreter: Interpreter) -> None:
    largest, same = interpreter(deflated_by_products)
    assert largest < 0.12
    assert same == [True, True, True]


@pytest.mark.parametrize("vectors", [64, 24])
def test_functions_of_gram_matrices_in_one_launch_are_what_products_make(
    interpreter: Interpreter, vectors: int
) -> None:
    """Of eigenvalues down to 10⁻⁶ of the largest, in fp32 against fp64."""
    assert max(interpreter(functions_in_one_launch, vectors).values()) < 1e-4


def test_zero_nan_and_inf_stay_where_they_are(interpreter: Interpreter) -> None:
    assert interpreter(around) == [True, True, True]


def test_what_triton_cannot_do_is_refused(interpreter: Interpreter) -> None:
    assert interpreter(messages_of_refusals) == {
        "dtype": "kernels='triton': found torch.float64; needed bf16, fp16 or fp32. Write kernels=\"auto\"",
        "device": "kernels='triton': found a matrix on meta; needed one on a CUDA or ROCm device. "
        'Write kernels="auto"',
    }


def test_fold_flushes_denormals(interpreter: Interpreter) -> None:
    for momenta in interpreter(denormals):
        zero, small, negative, large, tiny, nan = momenta
        assert (zero, negative, tiny) == (0, 0, 0)
        assert small == pytest.approx(0.9 * 1.5 * 2**-126)
        assert large == pytest.approx(0.9e-20)
        assert math.isnan(nan)


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_what_is_started_again_computes_on_what_is_given_now(interpreter: Interpreter, method: str) -> None:
    kinds, same, error = interpreter(started_again, method)
    assert kinds == ["Recording"]
    assert all(same)
    assert error < 0.2


def test_large_plain_products_are_torchs_and_are_started_again(interpreter: Interpreter) -> None:
    """One matrix at a time, in all steps but the last, which divides each by its norm; never added up in fp16."""
    errors, flags, count, again = interpreter(by_torch)
    assert max(errors) < 4
    assert flags == {False}
    assert count == 2 * 4 * 5
    assert again == 1


def test_a_table_is_made_once_however_its_tensors_move(interpreter: Interpreter) -> None:
    same, tables = interpreter(stepped_again)
    assert all(same)
    assert tables <= 2  # aligned or not


def test_gradients_that_are_exactly_zero(interpreter: Interpreter) -> None:
    assert interpreter(nonzeros) == [0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(("masters", "masked"), [(False, False), (True, True)])
def test_apply(interpreter: Interpreter, masters: bool, masked: bool) -> None:
    interpreter(applies, masters, masked)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_kernels_take_all_matrices_of_a_rank_wherever_their_tensors_move(
    interpreter: Interpreter, dtype: torch.dtype
) -> None:
    """In all steps, one of them without a gradient in the first, also where weights, state and gradients move."""
    same, folded = interpreter(still_and_moving, dtype)
    assert same
    assert folded == 20 + 3 * 21


def test_a_scale_of_a_rule_s_own_is_read_at_every_step(interpreter: Interpreter) -> None:
    assert interpreter(boosted) == pytest.approx([1.0, 1.0, 3.0, 0.5], rel=1e-5)


@pytest.mark.parametrize("dim", range(4))
def test_shards_of_a_convolution_have_three_dims(dim: int) -> None:
    whole = torch.arange(9 * 4 * 3 * 3).view(9, 4, 3, 3)
    for shard in whole.chunk(2, dim):
        dims = in_three_dims(tuple(shard.shape), shard.contiguous().stride(), shard.stride())
        assert dims is not None
        shape, compact, spread = dims
        assert len(shape) <= 3
        assert torch.equal(shard.contiguous().as_strided(shape, compact).flatten(), shard.flatten())
        assert torch.equal(shard.as_strided(shape, spread).flatten(), shard.flatten())
    assert in_three_dims((9, 3, 2, 2), (36, 9, 3, 1)) is None


# ------------------------------------------------------------------ as torch sees them, without Triton


class Launches(TorchDispatchMode):
    """Names of the operations in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_each_kernel_is_one_launch_to_whoever_watches() -> None:
    with FakeTensorMode(), torch.device("cuda"):
        tensors = [torch.empty(6, 7) for _ in range(5)]
        vector = torch.empty(5)
        active = torch.empty(5, dtype=torch.bool)
        with Launches() as launches:
            pieces = pieces_of(tensors, tensors)
            fused.fold(pieces, tensors, tensors, tensors, active, momentum=0.9, nesterov=True)
            fused.apply(pieces, tensors, [], tensors, active, keep=vector, size=vector)
        assert launches.names == ["muonmesh.fold.default", "muonmesh.apply.default"]
        a, x, number = torch.empty(3, 16, 16), torch.empty(3, 16, 32), torch.empty(3, 1, 1)
        with Launches() as launches:
            assert (
                triton.multiply(a, x, [(x, number)], out := torch.empty_like(x), scale=number, symmetric=False) is out
            )
            assert triton.multiply(a, a, [(a, 1.0)], square := torch.empty_like(a), alpha=2.0) is square
        assert launches.names.count("muonmesh.multiply.default") == 2
        assert {name.split(".")[0] for name in launches.names} == {"muonmesh", "aten"}
        assert not any("mm" in name for name in launches.names if name.startswith("aten"))


def test_kernels_run_on_devices_alone() -> None:
    assert toolchain.is_usable(torch.device("cuda"))
    assert not toolchain.is_usable(torch.device("cpu"))  # outside of the interpreter's process


def test_select_takes_triton_for_fp16_on_devices() -> None:
    def chosen(name: kernels.KernelName, dtype: torch.dtype) -> Any:
        return kernels.select(name, device=torch.device("cuda"), dtype=dtype, rows=64, cols=64).multiply

    assert chosen("auto", FP16) is triton.multiply
    assert chosen("auto", FP32) is batched.multiply
    assert chosen("triton", FP32) is triton.multiply
    assert chosen("torch", FP16) is batched.multiply


def test_a_machine_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    is_installed = toolchain.is_installed.__wrapped__
    is_usable = toolchain.is_usable.__wrapped__
    monkeypatch.setattr(toolchain, "is_installed", is_installed)
    monkeypatch.setattr(kernels, "is_installed", is_installed)
    monkeypatch.setattr(kernels, "is_usable", is_usable)
    cuda = torch.device("cuda")
    assert kernels.select("auto", device=cuda, dtype=BF16, rows=64, cols=64).multiply is batched.multiply
    with pytest.raises(ValueError, match=r"found no package triton; .* Write pip install .muonmesh\[triton\]."):
        kernels.select("triton", device=cuda, dtype=BF16, rows=64, cols=64)


def test_an_event_is_recorded_on_the_device_of_what_is_on_its_way() -> None:
    """Not on the current device's stream, which is device 0's."""
    with pretended_cuda(), FakeTensorMode():
        _, arrived = download(torch.empty(3, device="cuda:1"))
    assert isinstance(arrived, Event)
    assert arrived.stream is not None
    assert arrived.stream.device == torch.device("cuda:1")


BROKEN = """
import warnings, torch
import muonmesh as mm
from muonmesh.step.runtime import Driver
from torch import nn
weights = [nn.Parameter(torch.full((n, 20), 0.5)) for n in (12, 30)]
optimizer = mm.Muon(weights, lr=0.1)
optimizer._runtime.driver = Driver(False)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.eye(len(weight), 20)
        optimizer.step()
(told,) = [str(one.message) for one in told if "triton" in str(one.message)]
assert "runs no kernel on cpu (ImportError: no libtriton here)" in told, told
assert all(bool((weight != 0.5).any() and weight.isfinite().all()) for weight in weights)
"""


def test_a_triton_that_runs_no_kernel_is_told_of_once_and_left_out(tmp_path: Path) -> None:
    """A real package that can be found and does not load; the interpreter's switch stands for a device."""
    package = tmp_path / "triton"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('no libtriton here')")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", BROKEN], env=environment, check=True, timeout=120)
