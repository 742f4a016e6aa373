"""Layouts that readers find on tensors of other frameworks, stepped with the bits of one process; and refusals."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

import muonmesh as mm
from muonmesh.errors import PlanError
from tests.support import problem
from tests.support.meshes import mesh_of
from tests.support.on_ranks import on_ranks
from tests.support.placements import Flat, Making, RaggedShard, dtensor, flex, held_by, megatron, vescale

COVERS = (
    "comm.layout_readers.register_layout_reader",
    "integrations.ragged_shards.read_layout",
    "integrations.megatron_fsdp.read_layout",
)

# Megatron-FSDP pads a buffer to the least common multiple of all rows, so these are only some of the shapes.
SOME = ("square", "qkv", "gate_up", "neox", "few", "embedding", "norm", "bias")


def offsets() -> tuple[dict[str, int], int]:
    """Where parameters begin in a buffer of which each of four ranks gets whole rows of all of them; and its size."""
    rows = {name: math.prod(problem.PARAMETERS[name][0][1:]) for name in SOME}
    first, starts = 0, {}
    for name in SOME:
        starts[name] = -(-first // rows[name]) * rows[name]
        first = starts[name] + math.prod(problem.PARAMETERS[name][0])
    step = 4 * math.lcm(*rows.values())
    return starts, -(-first // step) * step


def making(how: str) -> Making:
    first, size = offsets()
    copies = Replicate()
    return {
        "ragged": lambda: vescale((4,), lambda n: ["ragged"]),
        "ragged beside copies": lambda: vescale((2, 2), lambda n: [copies, "ragged"]),
        "ragged over columns": lambda: vescale((2, 2), lambda n: ["ragged", copies if n == 1 else Shard(n - 1)]),
        "flex": flex,
        "megatron v1": lambda: megatron((4,), [Shard(0)], 1, first, size),
        "megatron v1 beside copies": lambda: megatron((2, 2), [copies, Shard(0)], 1, first, size),
        "megatron v1, both axes": lambda: megatron((2, 2), [Shard(0), Shard(0)], 1, first, size),
        "megatron v2": lambda: megatron((4,), [Flat()], 2, first, size),
        "megatron v2, both axes": lambda: megatron((2, 2), [Flat(), Flat()], 2, first, size),
    }[how]()


HOW = (
    "ragged",
    "ragged beside copies",
    "ragged over columns",
    "flex",
    "megatron v1",
    "megatron v1 beside copies",
    "megatron v1, both axes",
    "megatron v2",
    "megatron v2, both axes",
)


@pytest.mark.parametrize("how", HOW)
@on_ranks(4)
def test_a_published_placement_is_stepped_as_in_one_process(how: str) -> None:
    """Three steps, the last by an optimizer that loads what the first saved."""
    names = SOME if how.startswith("megatron") else tuple(problem.PARAMETERS)
    holding = held_by(making(how), problem.PARAMETERS, {name: problem.initial()[name] for name in names})
    settings = {**problem.SETTINGS, "compute_dtype": torch.float32}
    optimizer = mm.Muon(holding.groups, **settings)
    for step in range(3):
        holding.give({name: problem.gradients(step)[name] for name in names})
        optimizer.step()
        if step == 1:
            saved, optimizer = optimizer.state_dict(), mm.Muon(holding.groups, **settings)
            optimizer.load_state_dict(saved)
    expected = {key: value for key, value in problem.alone(3, **settings).items() if key.split(".")[0] in names}
    assert problem.differing(holding.whole(optimizer), expected) == []


class Unheard(Placement):
    """One that nobody knows; torch's own questions to it would end the process, as it does not call ``__init__``."""

    def __init__(self) -> None:
        pass

    def __repr__(self) -> str:
        return "Unheard()"


class Ours(Shard):
    """A Shard of somebody's own, which may cut otherwise than torch's."""


class Marked:
    """As FlexShard's `GroupedRaggedShard` would be without its units: says nothing that can be read."""


def read_answer(name: str, tensor: Any) -> Any:
    """Read tensors that tests have marked."""
    return getattr(tensor, "answer", None)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown", "Unheard"),
        ("derived", "a Ours of tests.comm.test_layout_readers"),
        ("buffer", "raised by the layout reader muonmesh.integrations.megatron_fsdp.read_layout"),
        ("flex", "Marked"),
        ("answer", "found a DTensor with a mesh from its layout reader; "),
        ("partial", "redistribute"),
        ("uneven", "(4, 4) on rank 1"),
        ("units", "a unit for each rank"),
        ("other units", "on rank"),
        ("inside a row", "a whole part of the dims"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_read_is_an_error_on_every_rank(case: str, words: str) -> None:
    mesh, value = mesh_of((2,)), torch.randn(6, 4)
    if case == "buffer":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("inner",))
    rank = dist.get_rank()
    local = value[rank * 3 :][:3].clone()
    if case == "flex":
        parameter: Any = nn.Parameter(local)
        parameter._placements, parameter._mesh, parameter._global_shape = (Marked(),), mesh, value.shape
    else:
        placement = {
            "unknown": Unheard,
            "derived": lambda: Ours(0),
            "buffer": lambda: Shard(0),
            "answer": lambda: Shard(0),
            "partial": Partial,
            "uneven": lambda: Shard(0),
            "units": lambda: RaggedShard((0,), (1, 1, 1)),
            "other units": lambda: RaggedShard((0,), (1, 2)),
            "inside a row": lambda: RaggedShard((0,), (5, 7)),
        }[case]()
        if case == "uneven":  # the rows of a rank are not those that the placement says; on one of the ranks alone
            local = value[:3].clone() if rank == 0 else value[2:].clone()
        parameter = dtensor(local, mesh, [placement], value)
        if case == "buffer":  # as of a Megatron-FSDP that keeps its buffers elsewhere
            parameter.megatron_fsdp_dist_index = SimpleNamespace(dp_shard_dim="inner", dp_outer_dim="outer")
        if case == "answer":
            mm.register_layout_reader(read_answer)
            parameter.answer = mesh, [Shard(0)]
    groups = [{"params": [("weight", parameter)], "matrices": ["whole"]}]
    parameter.grad = local.clone() if case == "flex" else dtensor(local.clone(), mesh, [placement], value)
    with pytest.raises((mm.LayoutError, PlanError)) as raised:  # of another rank's error a rank says that rank
        mm.Muon(groups, compute_dtype=torch.float32).step()
    assert "weight" in str(raised.value)
    assert words in str(raised.value)


@on_ranks(2)
def test_layouts_may_describe_a_dtensor() -> None:
    """A DTensor of a placement that nobody knows, of which ``layouts=`` says what the ranks hold."""
    mesh, value, rank = mesh_of((2,)), torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), dist.get_rank()
    borders = (0, 12, 24)
    local = value.flatten()[borders[rank] : borders[rank + 1]].clone()
    placement = RaggedShard((0,), (1, 1))
    parameter = dtensor(local, mesh, [placement], value)
    parameter.grad = dtensor(torch.sin(local), mesh, [placement], value)
    alone = nn.Parameter(value.clone())
    alone.grad = torch.sin(value)
    layouts = {"weight": mm.FlatShards.cut((6, 4), (0, 1), borders)}
    sharded = mm.Muon([{"params": [("weight", parameter)]}], layouts=layouts, compute_dtype=torch.float32)
    single = mm.Muon([{"params": [("weight", alone)]}], process_group="local", compute_dtype=torch.float32)
    sharded.step(), single.step()
    assert torch.equal(local, alone.detach().flatten()[borders[rank] : borders[rank + 1]])


class Rows(nn.Parameter):
    """A shard of a framework of one's own: a plain tensor that knows its mesh and the shape of the whole."""


def stepped_by_rows(answer: str) -> str:
    """Three steps of all parameters, of which a registered reader says where they lie; return what differs."""
    assert mm.register_layout_reader(read_answer) is read_answer
    mesh, rank = mesh_of((2,)), dist.get_rank()

    def make(name: str, value: torch.Tensor) -> tuple[torch.Tensor, Any]:
        def cut(whole: torch.Tensor) -> torch.Tensor:
            return whole.tensor_split([-(-len(whole) // 2)])[rank].clone()

        parameter: Any = Rows(cut(value))
        whole = tuple(value.shape)
        parameter.answer = (mesh, [Shard(0)], whole) if answer == "placements" else 7
        return parameter, cut

    holding = held_by(make, problem.PARAMETERS, problem.initial())
    settings = {**problem.SETTINGS, "compute_dtype": torch.float32}
    try:
        optimizer = mm.Muon(holding.groups, **settings)
        for step in range(3):
            holding.give(problem.gradients(step))
            optimizer.step()
    except (mm.LayoutError, PlanError) as error:
        return str(error)
    return str(problem.differing(holding.whole(optimizer), problem.alone(3, **settings)))


def test_a_reader_of_ones_own_says_where_plain_shards_lie(workers: Any) -> None:
    assert workers(2).run(stepped_by_rows, "placements") == ["[]"] * 2
    for message in workers(2).run(stepped_by_rows, "a number"):
        assert "found layout reader's answer 7; needed (mesh, placements)" in message, message


def known_on_rank_1_alone() -> tuple[str, float]:
    """What a rank is told where a reader knows the shards of rank 1 alone, and after how many seconds."""
    mm.register_layout_reader(read_answer)
    mesh, rank = mesh_of((2,)), dist.get_rank()
    shard: Any = Rows(torch.ones(3, 8))
    shard.answer = (mesh, [Shard(0)], (6, 8)) if rank == 1 else None
    shard.grad = torch.ones(3, 8)
    begun = time.monotonic()
    with pytest.raises((mm.LayoutError, PlanError)) as caught:
        mm.Muon([{"params": [("weight", shard)]}]).step()
    outcome = str(caught.value), time.monotonic() - begun
    dist.barrier()
    mm.Muon([{"params": [("weight", nn.Parameter(torch.ones(6, 8)))]}], process_group="world").step()
    return outcome


def test_a_rank_that_cannot_know_with_whom_it_shares_keeps_nobody_waiting(workers: Any) -> None:
    """The other rank waited for the timeout of collectives, half an hour by default, and was told of a dead rank."""
    first, second = workers(2).run(known_on_rank_1_alone)
    assert first[0].startswith("weight: This parameter is a plain tensor while 2 ranks run")
    assert second[0] == f"rank 0: {first[0]}"
    assert max(first[1], second[1]) < 15


def test_what_is_no_reader_is_refused() -> None:
    for reader in (None, "muonmesh.integrations.megatron_fsdp", 7):
        with pytest.raises(TypeError, match=r"^register_layout_reader: found .*needed a function of \(name, tensor\)"):
            mm.register_layout_reader(reader)  # type: ignore[arg-type]
