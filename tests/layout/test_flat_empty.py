"""Ranks that hold nothing of a flat parameter, or of any: they list an empty tensor and take part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import muonmesh as mm
from muonmesh.comm.storage import this_rank, world_size
from tests.support import layouts
from tests.support.on_ranks import on_ranks

COVERS = (
    "comm.ranks.device_without_parameters",
    "layout.flat.FlatParameter",
)

SHAPES = {"first": (5, 7), "second": (8, 4), "third": (6, 6), "bias": (3,), "embedding": (9, 2)}
SPECS = {"first": "whole", "second": ("rows", 4, 4), "third": "whole"}
# Rank 3 holds nothing at all, rank 2 nothing of Muon's half but some of "third", rank 0 nothing of "second".
BORDERS = {
    "first": (0, 10, 35, 35, 35),
    "second": (0, 0, 32, 32, 32),
    "third": (0, 1, 1, 36, 36),
    "bias": (0, 0, 0, 3, 3),
    "embedding": (0, 5, 18, 18, 18),
}
RULES: dict[str, dict[str, Any]] = {
    "muon": {"algorithm": "muon"},
    "normuon": {"algorithm": "normuon"},
    "hyperball": {"algorithm": "hyperball"},  # sums over the matrix, and a number of it
}


def number(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """The parameters of `SHAPES`, on one rank or cut over four, with an optimizer of what this rank holds."""

    def __init__(self, rule: str, *, others: bool = True, views: bool = False, **settings: Any) -> None:
        cut = world_size() > 1
        self.layouts = {
            name: mm.FlatShards.cut(shape, range(4) if cut else (0,), BORDERS[name] if cut else BORDERS[name][::4])
            for name, shape in SHAPES.items()
            if others or name in SPECS
        }
        self.model = nn.Module()
        for seed, (name, shape) in enumerate(SHAPES.items()):
            if name in self.layouts:
                self.model.register_parameter(name, nn.Parameter(self.local_part(name, number(seed, shape))))
        # Views of parameters are what Megatron's distributed optimizer lists; torch takes only leaves of autograd.
        parameters = {name: p.view(-1)[:] if views else p for name, p in self.model.named_parameters()}
        self.listed = parameters
        names = [name for name in SPECS if name in parameters]
        muon = {"params": [(name, parameters[name]) for name in names], "matrices": [SPECS[name] for name in names]}
        rest = [(name, parameters[name]) for name in parameters if name not in SPECS]
        groups = [{**muon, **RULES[rule], "name": "matrices"}]
        groups += [{"params": rest, "algorithm": "adamw", "name": "others"}] if others else []
        settings = {"compute_dtype": torch.float32, "lr": 0.1, **settings}
        self.optimizer = mm.Muon(groups, layouts=self.layouts, **settings)

    def local_part(self, name: str, whole: Tensor) -> Tensor:
        return layouts.cut(whole, self.layouts[name], this_rank())

    def advance(self, first: int, last: int) -> list[float]:
        norms = []
        for step in range(first, last):
            for seed, (name, shape) in enumerate(SHAPES.items()):
                if name in self.listed:
                    self.listed[name].grad = self.local_part(name, number(100 * step + seed, shape))
            norms.append(float(self.optimizer.clip_grad_norm_(1.0, policy="all", skip_above="4x")))
            self.optimizer.step()
            self.optimizer.metrics()
        return norms

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


def trained_case(rule: str, settings: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps; the norms, and what this rank holds then."""
    case = Case(rule, **settings)
    str(case.optimizer.explain())  # plans before any rank is met
    norms = case.advance(0, 3)
    return norms, case.weights()


def check_joined(parts: list[dict[str, Tensor]], whole: dict[str, Tensor]) -> None:
    for name, expected in whole.items():
        joined = torch.cat([part[name] for part in parts if name in part])
        assert torch.equal(joined, expected.flatten()), name


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ("muon", {}),
        ("normuon", {}),
        ("hyperball", {}),
        ("muon", {"state_dtype": "int8"}),
        ("muon", {"others": False}),
        ("muon", {"views": True}),
    ],
    ids=["muon", "normuon", "hyperball", "int8", "without AdamW's half", "views"],
)
def test_ranks_that_hold_nothing_list_an_empty_tensor(workers, rule: str, settings: dict[str, Any]) -> None:
    """Weights and norms are bit for bit those of one process."""
    norms, whole = trained_case(rule, settings)
    outcomes = workers(4).run(trained_case, rule, settings, timeout=30.0)
    for rank_norms, _ in outcomes:  # fp64 sums, which round by the order of their summands
        assert rank_norms == pytest.approx(norms, rel=1e-14)
    check_joined([part for _, part in outcomes], whole)


def save_two_steps(path: str) -> None:
    case = Case("normuon")
    case.advance(0, 2)
    mm.checkpoint.save(path, case.model, case.optimizer)


def load_and_step(path: str) -> dict[str, Tensor]:
    case = Case("normuon")
    for parameter in case.model.parameters():
        parameter.data.zero_()
    mm.checkpoint.load(path, case.model, case.optimizer)
    case.advance(2, 3)
    return case.weights()


def test_their_checkpoints_move_to_one_process_and_back(workers, tmp_path: Path) -> None:
    whole = trained_case("normuon", {})[1]
    workers(4).run(save_two_steps, str(tmp_path / "four"), timeout=30.0)
    for name, value in load_and_step(str(tmp_path / "four")).items():
        assert torch.equal(value, whole[name]), name
    save_two_steps(str(tmp_path / "one"))
    check_joined(workers(4).run(load_and_step, str(tmp_path / "one"), timeout=30.0), whole)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("forgotten", r"layouts: found \['first'\]; needed names of parameters in the groups of this rank"),
        ("unlisted", r"found \['bias', 'embedding'\].*of which this rank holds nothing, list an empty tensor"),
        ("rate", r"first: found lr=0.1 on rank 0 and lr=0.2 on rank 2"),
    ],
    ids=["a part is not listed", "an empty tensor is not listed", "a rate differs"],
)
@on_ranks(4, timeout=20.0)
def test_what_is_wrong_on_one_rank_ends_on_all(fault: str, message: str) -> None:
    """A rank does otherwise than its layouts say, or than others; ranks that hold nothing take part too."""
    case = Case("muon")
    rank, groups = dist.get_rank(), case.optimizer.param_groups
    if fault == "forgotten" and rank == 1:
        del groups[0]["params"][0], groups[0]["param_names"][0], groups[0]["matrices"][0]
    if fault == "unlisted" and rank == 3:
        groups[1]["params"].clear(), groups[1]["param_names"].clear()
    if fault == "rate" and rank == 2:
        groups[0]["lr"] = 0.2
    with pytest.raises((mm.MuonMeshError, ValueError), match=message):
        case.advance(0, 1)
