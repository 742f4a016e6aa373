"""What may not be computed in is refused before anything is built, in the same words everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import muonmesh as mm

COVERS = (
    "numerics.dtypes.dtype_named",
    "numerics.dtypes.master_for",
)

HELD = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
COMPUTE = [torch.bfloat16, torch.float32, torch.float64]
NOT_HELD = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.bool,
    "float32",
    None,
]
ALGORITHMS = pytest.mark.parametrize("algorithm", ["muon", "adamw"])


def build_one_weight(
    algorithm: str, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[nn.Parameter, mm.Muon]:
    weight = nn.Parameter(torch.empty(4, 6, dtype=dtype))
    group = {"params": [weight], "param_names": ["proj.weight"], "algorithm": algorithm}
    return weight, mm.Muon([group], lr=0.1, **settings)


@ALGORITHMS
@pytest.mark.parametrize("dtype", NOT_HELD, ids=str)
def test_a_dtype_without_arithmetic_is_refused_at_construction(dtype: Any, algorithm: str) -> None:
    dtypes = r"torch\.bfloat16, torch\.float16, torch\.float32, torch\.float64"
    for setting in ("state_dtype", "master_dtype"):
        if setting == "state_dtype" or dtype is not None:
            with pytest.raises(ValueError, match=rf"^{setting}: found .*; needed .*{dtypes}"):
                build_one_weight(algorithm, **{setting: dtype})
    with pytest.raises(ValueError, match=r"^compute_dtype: found .*Newton–Schulz"):
        build_one_weight(algorithm, compute_dtype=dtype)
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex):
        if dtype in (torch.complex64, torch.complex128) and algorithm == "adamw":
            build_one_weight(algorithm, dtype)  # stepped by its parts
            return
        needed = (
            r"a real matrix.*torch\.view_as_real" if dtype.is_complex else rf"{dtypes}.* Call requires_grad_\(False\)"
        )
        with pytest.raises(TypeError, match=rf"^proj\.weight: found dtype {dtype}; needed .*{needed}"):
            build_one_weight(algorithm, dtype)


@ALGORITHMS
def test_the_optimizer_and_orthogonalize_compute_in_the_same_dtypes(algorithm: str) -> None:
    for dtype in HELD:
        if dtype in COMPUTE:
            assert mm.orthogonalize(torch.eye(4, 6), dtype=dtype).shape == (4, 6)
            build_one_weight(algorithm, compute_dtype=dtype)
            continue
        with pytest.raises(TypeError) as direct:
            mm.orthogonalize(torch.eye(4, 6), dtype=dtype)
        if dtype == torch.float16:  # devices compute in it; a CPU refuses it when it is known that a matrix lies there
            assert "compute dtype: found torch.float16 on a CPU" in str(direct.value)
            weight = nn.Parameter(torch.eye(4, 6))
            optimizer = mm.Muon([weight], compute_dtype=dtype)
            weight.grad = torch.eye(4, 6)
            with pytest.raises(TypeError) as through:
                optimizer.step()
            assert str(through.value) == str(direct.value)
            assert torch.equal(weight, torch.eye(4, 6))
            continue
        with pytest.raises(ValueError, match="compute_dtype") as through:
            build_one_weight(algorithm, compute_dtype=dtype)
        assert str(through.value).rstrip(".") == str(direct.value).replace("dtype", "compute_dtype").replace(
            "compute_dtypes", "dtypes"
        ).rstrip(".")


@ALGORITHMS
@pytest.mark.filterwarnings("ignore:.*without masters")
@pytest.mark.parametrize("state", HELD, ids=str)
@pytest.mark.parametrize("parameter", HELD, ids=str)
def test_every_dtype_that_is_taken_takes_a_step(parameter: torch.dtype, state: torch.dtype, algorithm: str) -> None:
    for master in (None, *HELD):
        narrow = master is not None and torch.promote_types(parameter, master) != master
        if narrow:
            with pytest.raises(ValueError, match=rf"^proj\.weight: found dtype {parameter} and master_dtype={master}"):
                build_one_weight(algorithm, parameter, state_dtype=state, master_dtype=master)
            continue
        eps = 1e-8
        if algorithm == "adamw" and torch.float16 in (master, parameter if master is None else None):
            # in fp16 1e-8 is 0, and a gradient of 1e-4 squared as well: torch's AdamW writes inf
            with pytest.raises(ValueError, match=r"^proj\.weight: found adamw_eps=1e-08 .* needed an ε above 0"):
                build_one_weight(algorithm, parameter, state_dtype=state, master_dtype=master)
            eps = 1e-4
        weight, optimizer = build_one_weight(
            algorithm, parameter, state_dtype=state, master_dtype=master, adamw_eps=eps
        )
        with torch.no_grad():
            weight.fill_(1)
        weight.grad = torch.randn(4, 6).to(parameter)
        optimizer.clip_grad_norm_(1.0, policy="all")
        optimizer.step()
        assert weight.isfinite().all()
        assert (weight != 1).any()
        tensors = optimizer.state[weight]
        if algorithm == "muon":
            assert tensors["momentum_buffer"].dtype == state
        if master is not None and master != parameter:
            assert tensors["master"].dtype == master


@ALGORITHMS
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool], ids=str)
def test_a_gradient_without_arithmetic_is_refused_and_nothing_is_written(dtype: torch.dtype, algorithm: str) -> None:
    """`grad_dtype = None` lets a gradient be of any dtype."""
    weight, optimizer = build_one_weight(algorithm)
    with torch.no_grad():
        weight.fill_(1)
    weight.grad_dtype = None
    weight.grad = torch.ones(4, 6).to(dtype)
    message = rf"^proj\.weight: found a gradient of dtype {dtype}; needed one of torch\.bfloat16, .*\.grad\.float\(\)"
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0, policy="all")):
        with pytest.raises(TypeError, match=message):
            call()
        assert torch.equal(weight, torch.ones(4, 6))
        assert not optimizer.state[weight]
