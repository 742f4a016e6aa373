"""A forecast counts what the plan says, and what it models is near what the real step does on fake tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import muonmesh as mm
from muonmesh import layout
from muonmesh.tools.forecasts.device_rates import DeviceRates
from muonmesh.tools.forecasts.forecast import Weight, forecast
from tests.device.dry_run import dry_run
from tests.support.figures import bag, optimizer_of

COVERS = ("tools.forecasts.forecast.forecast",)

LAYERS = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)] * 4

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


def forecast_weights(
    mesh: dict[str, int], placements: Sequence[Any], shapes: Sequence[tuple[int, int]]
) -> list[Weight]:
    splits = tuple(layout.Shard(p.dim) if isinstance(p, Shard) else layout.Replicate() for p in placements)
    sizes, ranks = tuple(mesh.values()), tuple(range(math.prod(mesh.values())))
    layouts = [layout.MeshLayout(shape, sizes, ranks, splits) for shape in shapes]
    return [Weight(f"weight{number}", placed, "whole") for number, placed in enumerate(layouts)]


@pytest.mark.parametrize(
    ("mesh", "placements", "shapes"),
    [
        ({"shard": 8}, (Shard(0),), LAYERS),
        ({"replicate": 2, "shard": 4}, (Replicate(), Shard(0)), LAYERS),
        ({"one": 1}, (Replicate(),), LAYERS),
        pytest.param(  # whole matrices in many rounds, of many elements
            {"replicate": 8}, (Replicate(),), LAYERS * 4, marks=pytest.mark.soak
        ),
    ],
    ids=["fsdp", "hsdp", "one device", "ddp"],
)
def test_a_forecast_is_near_a_dry_run(
    mesh: dict[str, int], placements: tuple[Shard | Replicate, ...], shapes: list[tuple[int, int]]
) -> None:
    spread = {"world": math.prod(mesh.values()), "mesh": mesh, "placements": lambda name, parameter: placements}
    run = dry_run(bag(*shapes), optimizer_of, steps=1, **(spread if mesh != {"one": 1} else {}))
    modelled = forecast(forecast_weights(mesh, placements, shapes), rank=0)

    assert modelled.bytes_sent == run.bytes_sent
    assert modelled.collectives == run.collectives
    assert modelled.flops == pytest.approx(run.flops, rel=0.1)
    assert modelled.stored["weights"] == run.elements * 4
    assert modelled.launches == pytest.approx(run.launches, rel=0.15)
    assert modelled.elementwise_bytes == pytest.approx(run.elementwise_bytes, rel=0.25)
    assert modelled.exchange == pytest.approx(run.peak_bytes, rel=0.35)
    assert modelled.messages == run.messages
    assert modelled.kernels == pytest.approx(run.kernels, rel=0.15)
    assert modelled.views == pytest.approx(run.views, rel=0.35)
    assert modelled.slow_flops == pytest.approx(run.slow_flops, rel=0.1)
    assert modelled.seconds == pytest.approx(run.seconds, rel=0.25)
    assert modelled.best_seconds == pytest.approx(run.best_seconds, rel=0.25)
    assert modelled.best_seconds <= modelled.seconds  # where the wire takes longer, it alone counts


@pytest.mark.parametrize("rule", ["soap", "normuon", "adamuon", "scion_sign"])
def test_a_forecast_of_a_rule_is_what_the_real_step_does(rule: str) -> None:
    """Three ranks' state, traffic and FLOPs by rank, on fake tensors."""
    shapes = [(96, 64), (64, 64), (64, 200)] * 2
    explanations: list[mm.Explanation] = []

    def step(optimizer: mm.Muon) -> None:
        optimizer.step()
        explanations.append(optimizer.explain())

    make = lambda model: mm.Muon([{"params": list(model.named_parameters()), "algorithm": rule}])  # noqa: E731
    spread = {"world": 4, "mesh": {"shard": 4}, "placements": lambda name, parameter: (Shard(0),)}
    run = dry_run(bag(*shapes), make, steps=1, step=step, **spread)
    weights = forecast_weights({"shard": 4}, (Shard(0),), shapes)
    modelled = forecast(weights, rank=0, rule=rule)
    assert modelled.plan.loads == explanations[-1].flops
    assert (modelled.bytes_sent, modelled.collectives) == (run.bytes_sent, run.collectives)
    assert modelled.bytes_received == explanations[-1].bytes_received
    assert modelled.stored["momentum"] == explanations[-1].state_bytes
    with pytest.raises(ValueError, match="rule: found 'adamw'; needed one of muon, normuon"):
        forecast(weights, rule="adamw")


def test_the_busiest_rank_is_told_of_unless_another_is_asked_for() -> None:
    whole = layout.MeshLayout.replicated((64, 64), (0, 1))
    weights = [Weight(f"weight{number}", whole, "whole") for number in range(3)]
    busiest = forecast(weights)
    assert len(busiest.owned) == 2
    assert len(forecast(weights, rank=1 - busiest.rank).owned) == 1
    assert busiest.imbalance == pytest.approx(4 / 3)


def test_the_modelled_time_follows_the_rates() -> None:
    weights = [Weight("weight", layout.MeshLayout.replicated((512, 512), (0, 1)), "whole")]
    free = dict.fromkeys(("kernel", "operation", "view", "matrix", "collective", "message"), 0.0)
    modelled = forecast(weights, rates=DeviceRates(flops=1e6, published=1e5, bytes=math.inf, wire=math.inf, **free))
    assert modelled.best_seconds == pytest.approx(modelled.flops / 1e6)
    assert modelled.seconds == pytest.approx(modelled.slow_flops / 1e5)
    assert modelled.slow_flops == pytest.approx(modelled.flops * (3000 / 512) ** 1.2)


def test_what_torch_would_take_is_what_a_dry_run_of_it_takes() -> None:
    """One process. Small matrices are the host's time, of which ours costs less."""
    for shapes in ([(768, 768)] * 3, [(64, 64)] * 200, LAYERS):
        run = dry_run(bag(*shapes), lambda model: torch.optim.Muon(list(model.parameters()), lr=0.02), steps=1)
        layouts = [layout.MeshLayout.replicated(shape, (0,)) for shape in shapes]
        modelled = forecast([Weight(f"weight{number}", placed, "whole") for number, placed in enumerate(layouts)])
        assert modelled.seconds_of_torch() == pytest.approx(run.seconds, rel=0.25)
        assert modelled.seconds_of_torch(published=False) == pytest.approx(run.best_seconds, rel=0.25)
        assert modelled.seconds < modelled.seconds_of_torch()


def test_what_adamw_would_take_is_what_a_dry_run_of_it_takes() -> None:
    """That counts gradients as written too, eight numbers an element instead of seven."""
    run = dry_run(bag((8192, 8192)), lambda model: torch.optim.AdamW(list(model.parameters()), fused=True), steps=1)
    modelled = forecast([Weight("weight", layout.MeshLayout.replicated((8192, 8192), (0,)), "whole")])
    assert modelled.seconds_of_adamw() == pytest.approx(run.seconds * 7 / 8, rel=0.05)


def test_small_products_are_as_slow_as_published_ones() -> None:
    """Milliseconds of X Xᵀ on an H800 by flash-muon's kernel and by cuBLAS, from the README of nil0x9/flash-muon."""
    published = {1024: (0.0124, 0.0112), 2048: (0.0322, 0.0384), 4096: (0.1838, 0.2955), 8192: (1.4528, 2.2643)}
    for rows, times in published.items():
        for by_triton, milliseconds in zip((True, False), times, strict=True):
            flops = rows**3 * (1 if by_triton else 2)
            seconds = flops * DeviceRates.weight_of(rows**2, by_triton=by_triton) / DeviceRates().published
            assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.25)


def test_vectors_and_embeddings_are_stored_and_not_computed() -> None:
    weights = [Weight("embedding", layout.MeshLayout((100, 8), (4,), (0, 1, 2, 3), (layout.Shard(0),)), None)]
    modelled = forecast(weights, itemsize=2)
    assert (modelled.flops, modelled.owned, modelled.bytes_sent) == (0, (), 0)
    assert modelled.stored["weights"] == modelled.stored["gradients"] == 25 * 8 * 2
    assert (modelled.stored["momentum"], modelled.stored["AdamW's moments"]) == (0, 2 * 25 * 8 * 2)


def test_a_matrix_with_more_copies_than_others_goes_to_one_owner_too() -> None:
    """One that tensor parallelism leaves whole lies on each of its ranks: of 8 copies for 2 that are averaged."""
    mesh, ranks = (2, 4), tuple(range(8))
    cut = layout.MeshLayout((256, 64), mesh, ranks, (layout.Replicate(), layout.Shard(0)))
    whole = layout.MeshLayout((64, 48), mesh, ranks, (layout.Replicate(), layout.Replicate()))
    for names in (("cut", "whole"), ("whole", "cut")):
        weights = [Weight(name, {"cut": cut, "whole": whole}[name], "whole") for name in names]
        by_rank = [forecast(weights, rank=rank, to_owners=True) for rank in ranks]
        sent = [modelled.gradients.bytes_sent for modelled in by_rank]
        # of each of the two, one replica of the four shards sends what the other one owns
        assert sent == [64 * 48 * 4] * 4 + [64 * 64 * 4] * 4
        sizes = [math.prod(p.momentum_storage.local_shape(rank)) for rank in ranks for p in by_rank[0].plan.parameters]
        assert sum(sizes) == 256 * 64 + 64 * 48
