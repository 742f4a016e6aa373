"""Momentum in int8: the format against brute force, and what an optimizer keeps, saves and loads of it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import muonmesh as mm
from muonmesh.numerics.blockwise import Codes, decode, encode, largest
from muonmesh.step.int8_momentum import SCALE
from tests.support.tensors import random

COVERS = (
    "numerics.blockwise.encode",
    "numerics.blockwise.decode",
    "step.int8_momentum.Int8Codec",
    "step.int8_momentum.Blocks",
)

SHAPES: list[tuple[tuple[int, ...], object]] = [((40, 600), None), ((600, 40), None), ((9, 70, 3, 3), "flatten")]


def dynamic_tree() -> Tensor:
    """The codes as the paper builds them: means of neighbouring borders of each decade, and 1."""
    values = [1.0]
    for decade in range(7):
        borders = torch.linspace(0.1, 1.0, 2**decade + 1, dtype=torch.float64)
        values += ((borders[1:] + borders[:-1]) / 2 * 10.0 ** (decade - 6)).tolist()
    half = torch.tensor([*sorted(values)[:-2], 1.0], dtype=torch.float64)  # its largest gives way to 1
    return torch.cat([-half.flip(0), torch.zeros(1, dtype=torch.float64), half])


def there_and_back(values: Tensor, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    scales = largest(values, first=first, size=256)
    table = Codes.on(values.device)
    codes = encode(values, scales, table, first=first, size=256)
    return scales, codes, decode(codes, scales, table, first=first, size=256)


def test_each_number_becomes_the_nearest_code_of_its_block() -> None:
    values = random(3, 600) * 10 ** random(3, 600, seed=1)
    scales, _, decoded = there_and_back(values, first=100)  # blocks of 156, 256 and 188 elements
    for block, part, decoded_part in zip(
        scales.T, values.split([156, 256, 188], 1), decoded.split([156, 256, 188], 1), strict=True
    ):
        scale = part.abs().amax(1)
        assert torch.equal(block, scale)
        multiples = dynamic_tree() * scale.double()[:, None]
        nearest = (part.double()[:, :, None] - multiples[:, None]).abs().amin(-1)
        assert torch.allclose((decoded_part.double() - part).abs(), nearest, rtol=0, atol=1e-6 * float(scale.max()))


def test_encoding_what_was_decoded_changes_nothing() -> None:
    values = random(64, 512) * 10.0 ** torch.arange(-32.0, 32).mul(0.9)[:, None]
    values[3], values[4, 0] = 0, torch.nan
    scales, codes, once = there_and_back(values)
    again_scales, again, twice = there_and_back(once)
    assert torch.equal(codes, again)
    assert torch.equal(scales.view(torch.int32), again_scales.view(torch.int32))
    assert torch.equal(once.nan_to_num(7), twice.nan_to_num(7))
    assert not once[3].any()
    assert once[4, :256].isnan().all()
    assert once[4, 256:].isfinite().all()


def optimizer_of(state_dtype: object, **settings: object) -> tuple[list[nn.Parameter], mm.Muon]:
    weights = [nn.Parameter(random(*shape)) for shape, _ in SHAPES]
    group = {"params": weights, "matrices": [spec for _, spec in SHAPES]}
    return weights, mm.Muon([group], lr=0.02, compute_dtype=torch.float32, state_dtype=state_dtype, **settings)


def step_on_random(weights: list[nn.Parameter], optimizer: mm.Muon, steps: range, scale: float = 1.0) -> None:
    for step in steps:
        for number, weight in enumerate(weights):
            weight.grad = random(*weight.shape, seed=10 * step + number) * scale
        optimizer.step()


def test_it_takes_little_more_than_a_byte_an_element_and_moves_weights_as_fp32_does() -> None:
    (start, _), (coded, small), (exact, large) = (optimizer_of(d) for d in ("int8", "int8", torch.float32))
    step_on_random(coded, small, range(5))
    step_on_random(exact, large, range(5))
    for before, weight, exact_weight in zip(start, coded, exact, strict=True):
        codes_and_scales = small.state[weight]["momentum_buffer"], small.state[weight]["momentum_buffer" + SCALE]
        assert codes_and_scales[0].dtype == torch.int8
        bytes_kept = sum(tensor.numel() * tensor.element_size() for tensor in codes_and_scales)
        assert bytes_kept <= weight.numel() * (1 + 4 / 30)  # of 40 columns a scale is a tenth, of thousands a 64th
        assert float((weight - exact_weight).detach().norm() / (exact_weight - before).detach().norm()) < 0.03


def test_a_power_of_two_changes_no_bit() -> None:
    (weights, first), (twins, second) = optimizer_of("int8"), optimizer_of("int8")
    step_on_random(weights, first, range(3))
    step_on_random(twins, second, range(3), 2.0**-60)
    assert all(torch.equal(a, b) for a, b in zip(weights, twins, strict=True))


@pytest.mark.parametrize("source", ["int8", torch.float32], ids=str)
@pytest.mark.parametrize("target", ["int8", torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_does_not_tell_what_momentum_was_kept_in(source: object, target: object) -> None:
    (weights, saved), (twins, loaded) = optimizer_of(source), optimizer_of(target)
    step_on_random(weights, saved, range(2))
    state = copy.deepcopy(saved.state_dict())
    assert all(entry["momentum_buffer"].dtype == torch.float32 for entry in state["state"].values())
    assert not any(SCALE in key for entry in state["state"].values() for key in entry)
    with torch.no_grad():
        for weight, twin in zip(weights, twins, strict=True):
            twin.copy_(weight)
    loaded.load_state_dict(state)
    step_on_random(weights, saved, range(2, 4))
    step_on_random(twins, loaded, range(2, 4))
    if source == target:
        assert all(torch.equal(a, b) for a, b in zip(weights, twins, strict=True))
        assert all(
            torch.equal(saved.state[a][k], loaded.state[b][k])
            for a, b in zip(weights, twins, strict=True)
            for k in saved.state[a]
        )
    dtypes = {loaded.state[twin]["momentum_buffer"].dtype for twin in twins}
    assert dtypes == {torch.int8 if target == "int8" else target}


def test_loaded_momentum_of_a_matrix_that_is_left_alone_is_not_lost() -> None:
    (weights, saved), (twins, loaded) = optimizer_of(torch.float32), optimizer_of("int8")
    step_on_random(weights, saved, range(2))
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    twins[1].grad = random(*twins[1].shape)
    twins[0].grad, twins[2].grad = torch.zeros_like(twins[0]), torch.zeros_like(twins[2])
    loaded.step()
    for number in (0, 2):
        momentum = loaded.state_dict()["state"][number]["momentum_buffer"]
        expected = saved.state_dict()["state"][number]["momentum_buffer"]
        assert 0 < float((momentum - expected).norm() / expected.norm()) < 0.03


def test_scales_of_another_sharding_are_refused() -> None:
    weights, optimizer = optimizer_of("int8")
    step_on_random(weights, optimizer, range(1))
    optimizer.state[weights[0]]["momentum_buffer" + SCALE] = torch.zeros(3)
    with pytest.raises(mm.errors.StateError, match="3 scales of momentum_buffer; needed 120"):
        step_on_random(weights, optimizer, range(1))


def test_metrics_read_what_the_codes_stand_for() -> None:
    (weights, coded), (twins, exact) = optimizer_of("int8"), optimizer_of(torch.float32)
    step_on_random(weights, coded, range(2))
    step_on_random(twins, exact, range(2))
    coded_rms, exact_rms = (optimizer.metrics()["group0/momentum_rms"] for optimizer in (coded, exact))
    assert coded_rms == pytest.approx(exact_rms, rel=1e-2)


@pytest.mark.parametrize("widths", [(200, 100), (150, 75, 75)], ids=["as many scales", "more scales"])
def test_a_parameter_that_is_split_otherwise_is_refused_before_anything_is_written(widths: tuple[int, ...]) -> None:
    """Read by the scales of other matrices, its momentum would be thousands of times too large, without an error."""
    weight, vector = nn.Parameter(torch.randn(4, 300)), nn.Parameter(torch.ones(3))
    groups = [{"params": [("w", weight)], "matrices": [("cols", 100, 200)]}]
    groups.append({"params": [("v", vector)], "algorithm": "adamw"})
    optimizer = mm.Muon(groups, lr=0.02, state_dtype="int8")
    gradient = torch.randn(4, 300)
    gradient[:, :100] *= 1e4

    def give() -> None:
        weight.grad, vector.grad = gradient.clone(), torch.ones(3)

    give()
    optimizer.step()
    before = weight.detach().clone(), vector.detach().clone()
    optimizer.param_groups[0]["matrices"] = [("cols", *widths)]
    give()
    with pytest.raises(mm.StateError, match=r"^w: found .* scales of momentum_buffer"):
        optimizer.step()
    with pytest.raises(mm.StateError, match=r"^w: found .* scales of momentum_buffer"):
        optimizer.state_dict()
    assert torch.equal(before[0], weight)
    assert torch.equal(before[1], vector)
    optimizer.param_groups[0]["matrices"] = [("cols", 100, 200)]
    optimizer.state_dict()
    optimizer.param_groups[0]["matrices"] = [("cols", *widths)]
    optimizer.step()
    momentum = optimizer.state_dict()["state"][0]["momentum_buffer"]
    assert momentum[:, 100:].abs().max() < 1
