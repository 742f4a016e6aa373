"""Stochastic rounding: exact in expectation, and the same random number wherever an element lies."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import muonmesh as mm
from muonmesh.layout.region import Block, Piece, Region, number_in_whole, overlap
from muonmesh.numerics.coefficients import coefficient_schedule
from muonmesh.numerics.stochastic import Rounding, keys_of
from tests.support import problem, saving
from tests.support.reference import reference_step

COVERS = (
    "numerics.stochastic.Rounding",
    "step.parameter_steps.StateCodec",
)


def rounded(exact: Tensor, step: int, seed: int = 0) -> Tensor:
    into = torch.empty_like(exact, dtype=torch.bfloat16)
    strides = torch.empty(exact.shape, device="meta").stride()
    Rounding(keys_of(seed, step, "w"), 0, strides).write(exact, into)
    return into


def test_the_expectation_is_exact_and_neighbors_are_the_only_values() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(40, 50, generator=generator) * torch.logspace(-30, 30, 50)
    exact[0, :3] = torch.tensor([1.0, -0.0, 3e38])  # a number of bf16's, zero, the last binade
    low = (exact.view(torch.int32) & -0x10000).view(torch.float32)  # towards zero
    high = ((exact.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    draws, mean = 1000, torch.zeros_like(exact, dtype=torch.float64)
    for step in range(draws):
        result = rounded(exact, step).float()
        assert bool(((result == low) | (result == high)).all())
        mean += (result.double() - low.double()) / (high.double() - low.double()) / draws
    chance = (exact.double() - low.double()) / (high.double() - low.double())
    # Each is binomial: 6 standard deviations for one of 2,000, and the mean of all within 6 of its own.
    deviation = (chance * (1 - chance) / draws).sqrt()
    assert bool(((mean - chance).abs() <= 6 * deviation + 1e-12).all())
    assert abs(float((mean - chance).mean())) < 6 * float(deviation.square().mean().sqrt()) / 2000**0.5


def test_what_bf16_has_and_what_is_not_finite_stays() -> None:
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    exact[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-40]).bfloat16().float()
    for step in range(20):
        torch.testing.assert_close(rounded(exact, step).float(), exact, rtol=0, atol=0, equal_nan=True)


def test_random_numbers_of_elements_steps_and_parameters_are_independent() -> None:
    draws = torch.stack([Rounding(keys_of(0, step, "w"), 0, (1,))._random(torch.empty(4096)) for step in range(64)])
    bits = torch.stack([(draws >> bit) & 1 for bit in range(16)]).double() * 2 - 1  # (bit, step, element)
    assert float(bits.mean((1, 2)).abs().max()) < 6 / (64 * 4096) ** 0.5
    for pairs in (bits[:, :, 1:] * bits[:, :, :-1], bits[:, 1:] * bits[:, :-1], bits[1:] * bits[:-1]):
        assert float(pairs.mean((1, 2)).abs().max()) < 6 / (63 * 4095) ** 0.5
    assert len({keys_of(seed, step, name) for seed in range(9) for step in range(9) for name in "abc"}) == 243


@pytest.mark.parametrize("seed", range(30))
def test_an_element_has_its_number_in_whatever_piece_it_lies(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    shape = tuple(draw(1, 6) for _ in range(draw(1, 4)))
    offset = tuple(draw(0, size - 1) for size in shape)
    extent = tuple(draw(1, size - low) for size, low in zip(shape, offset, strict=True))
    strides = torch.empty(extent, device="meta").stride()
    storage = Block(Region.box(offset, extent), draw(0, 9), strides)
    first, step = tuple(draw(0, size - 1) for size in shape), tuple(draw(1, 2) for _ in shape)
    count = tuple((size - 1 - low) // by + 1 for size, low, by in zip(shape, first, step, strict=True))
    piece = overlap(storage, Block(Region(first, count, step), 0, torch.empty(count, device="meta").stride()))
    if piece is None:
        return
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    local = torch.full((storage.start + 999,), -1)
    box = tuple(slice(low, low + size) for low, size in zip(offset, extent, strict=True))
    local.as_strided(extent, strides, storage.start).copy_(numbers[box])
    expected = local.as_strided(piece.shape, piece.storage_strides, piece.storage_start)
    start, along = number_in_whole(piece, [Block(Region.box(offset, extent), 500, strides), storage], shape)
    result = torch.full(piece.shape, start)
    for dim, (size, stride) in enumerate(zip(piece.shape, along, strict=True)):
        result += (torch.arange(size) * stride).view([-1 if other == dim else 1 for other in range(len(shape))])
    assert torch.equal(result, expected)


def test_a_piece_of_no_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="needed one within a block"):
        number_in_whole(Piece((2,), 7, (1,), 0, (1,)), [Block(Region.box((0,), (3,)), 0, (1,))], (3,))


def test_the_mean_of_many_seeds_is_the_step_in_fp64() -> None:
    """Muon's half; a step that rounding to nearest loses altogether."""
    generator = torch.Generator().manual_seed(0)
    start, gradient = torch.randn(12, 20, generator=generator).bfloat16(), torch.randn(12, 20, generator=generator)
    settings: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.0, "compute_dtype": torch.float32}
    results = []
    for seed in [None, *range(400)]:
        w = nn.Parameter(start.clone())
        optimizer = mm.Muon([("w", w)], stochastic_rounding=seed, master_dtype=None, **settings)
        w.grad = gradient.bfloat16()
        optimizer.step()
        results.append(w.detach().double())
    nearest, draws = results[0], torch.stack(results[1:])
    rule = {"algorithm": "muon", "lr": 1e-3, "weight_decay": 0.0}
    options = {"w": {**rule, "coefficients": coefficient_schedule("polar_express", 5)}}
    exact = reference_step({"w": start}, {"w": gradient.bfloat16()}, {}, options)[0]["w"]
    spread = draws.std(0) / 400**0.5
    unseen = exact.abs() * 2**-8 / 40  # a neighbor with a chance below 1/40 may be seen in none of 400 draws
    assert bool(((draws.mean(0) - exact).abs() < 6 * spread + unseen).all())
    assert float((nearest - exact).abs().mean()) > 5 * float((draws.mean(0) - exact).abs().mean())


def trained_in_bfloat16(count: int, gradients: Any = problem.gradients, **settings: Any) -> tuple[nn.Module, mm.Muon]:
    values = {name: value.bfloat16() for name, value in problem.initial().items()}
    *_, last = problem.steps("local", count, values, gradients, None, **settings)
    return last


@pytest.mark.parametrize("how", ["a state dict", "torch's checkpoint"])
def test_a_resumed_run_has_the_same_bits(how: str, tmp_path: Path) -> None:
    """A state dict brings the seed. Torch's loads the keys that the fresh optimizer has after its step at rate 0."""
    model, optimizer = trained_in_bfloat16(2, stochastic_rounding=5)
    twin, saved = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    settings = {} if how == "a state dict" else {"stochastic_rounding": 5}
    fresh = mm.Muon(problem.groups(twin), process_group="local", **problem.SETTINGS, **settings)
    if how == "a state dict":
        fresh.load_state_dict(saved)
    else:
        saving.save(tmp_path, model, optimizer, "torch's")
        saving.load(tmp_path, twin, fresh, "torch's")
    assert [(g["stochastic_rounding"], g["steps_taken"]) for g in fresh.param_groups] == [(5, 2)] * 2
    problem.advance(twin, fresh, 2, 3)
    expected = problem.result(*trained_in_bfloat16(3, stochastic_rounding=5))
    assert problem.differing(problem.result(twin, fresh), expected) == []
    assert problem.differing(problem.result(*trained_in_bfloat16(3, stochastic_rounding=6)), expected) != []


def test_asking_for_state_before_the_first_step_changes_no_random_number() -> None:
    """torch's functions take a step at learning rate 0 to have state made, which counts as none."""
    values = {name: value.bfloat16() for name, value in problem.initial().items()}
    model, _ = problem.hold("local", values)
    optimizer = mm.Muon(problem.groups(model), process_group="local", **problem.SETTINGS, stochastic_rounding=5)
    get_optimizer_state_dict(model, optimizer)
    problem.advance(model, optimizer, 0, 1)
    assert (
        problem.differing(
            problem.result(model, optimizer), problem.result(*trained_in_bfloat16(1, stochastic_rounding=5))
        )
        == []
    )


def test_matrices_that_are_left_alone_keep_their_bits() -> None:
    before = problem.result(*trained_in_bfloat16(2, problem.zeroed, stochastic_rounding=5))
    after = problem.result(*trained_in_bfloat16(3, problem.zeroed, stochastic_rounding=5))
    assert torch.equal(before["even"], after["even"])
    assert torch.equal(before["experts"][1], after["experts"][1])
    assert not torch.equal(before["experts"][0], after["experts"][0])


def test_what_it_does_not_fit_is_refused() -> None:
    w = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="stochastic_rounding with masters"):
        mm.Muon([("w", w)], stochastic_rounding=0, master_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"stochastic_rounding with torch\.float16"):
        mm.Muon([("w", nn.Parameter(w.detach().half()))], stochastic_rounding=0)
    with pytest.raises(ValueError, match="stochastic_rounding: found True; needed a seed"):
        mm.Muon([("w", w)], stochastic_rounding=True)
