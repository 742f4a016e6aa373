"""An agreement: every rank reads the same answers, whatever reduction, dtype or other values carry them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.agreement import (
    SILENT,
    STANDING,
    Agreed,
    Agreement,
    Field,
    Said,
    bits,
    bits_of,
    standing,
)
from muonmesh.comm.communicator import Communicator

COVERS = ("comm.agreement.Agreement",)

RANKS = 3
AGREEMENT = Agreement(
    *STANDING,
    Field("alike", 4, "equal"),
    Field("some", 3),
    Field("none", 0),
    Field("number", 64, "equal"),
    Field("one"),
)
REDUCTIONS = ("flags", "sum", "sum of nothing", "largest")


def ask_by(fields: dict[str, Said], reduction: str) -> Agreed:
    """Ask by each way in which the package does: flags alone, or beside other values."""
    communicator = Communicator(tuple(range(RANKS)), dist.group.WORLD)
    if reduction == "flags":
        return communicator.ask(AGREEMENT, fields, torch.device("cpu"), "a test")
    op = dist.ReduceOp.MAX if reduction == "largest" else dist.ReduceOp.SUM
    values = torch.full((0,) if reduction == "sum of nothing" else (2, 3), 1.5 + dist.get_rank(), dtype=torch.float64)
    reduced, agreed = AGREEMENT.ask(fields, values, partial(communicator.reduce, op=op, name="a test"))
    assert torch.equal(reduced, torch.full_like(values, 3.5 if reduction == "largest" else 1.5 * RANKS + 3)), (
        "values are apart"
    )
    return agreed


def answers(per_rank: list[dict[str, Any]], reduction: str, tensors: bool) -> dict[str, Any]:
    fields: dict[str, Said] = per_rank[dist.get_rank()]
    if tensors:
        fields = {name: torch.tensor(value) for name, value in fields.items() if value is not None}
    agreed = ask_by(fields, reduction)
    single = ("error", "replan", "follows", "one", "some", "none")
    tensors_told: dict[str, Tensor] = {name: agreed.any(name) for name in single}
    tensors_told |= {f"each {name}": agreed.answers(name) for name in ("some", "alike")}
    tensors_told |= {f"{name} differs": agreed.differs(name) for name in ("alike", "number")}
    tensors_told |= {"differs": agreed.differs().any(), "error or one": agreed.any("error", "one")}
    assert all(answer.dtype == torch.bool for answer in tensors_told.values())
    assert {name: agreed.says(name) for name in single} == {name: tensors_told[name].item() for name in single}
    assert agreed.says("error", "one") == tensors_told["error or one"].item()
    assert agreed.on_host("some") == tensors_told["each some"].tolist()
    return {name: answer.tolist() for name, answer in tensors_told.items()}


def expected(per_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The same by hand."""

    def columns_of(name: str) -> list[list[int]]:
        rows = [list(AGREEMENT.silence(name)) if fields.get(name) is None else fields[name] for fields in per_rank]
        return [list(column) for column in zip(*([r] if isinstance(r, bool) else list(r) for r in rows), strict=True)]

    yes = {
        name: [1 in column for column in columns_of(name)]
        for name in ("error", "replan", "follows", "one", "some", "none")
    }
    flags: dict[str, Any] = {name: any(columns) for name, columns in yes.items()}
    flags |= {"each some": yes["some"], "each alike": [1 in column for column in columns_of("alike")]}
    differ = {name: [{0, 1} <= set(column) for column in columns_of(name)] for name in ("alike", "number")}
    flags |= {f"{name} differs": columns for name, columns in differ.items()}
    return flags | {"differs": any(map(any, differ.values())), "error or one": flags["error"] or flags["one"]}


def answers_of_ranks() -> list[list[dict[str, Any]]]:
    generator = torch.Generator().manual_seed(0)

    def draw(below: int, count: int) -> list[int]:
        return torch.randint(0, below, (count,), generator=generator).tolist()

    nothing: list[dict[str, Any]] = [{} for _ in range(RANKS)]
    same = [{"number": bits(7), "alike": [0, 1, SILENT, 1], "one": False} for _ in range(RANKS)]
    other = [same[0], {**same[0], "number": bits(7 + 2**63)}, same[0]]
    random = [
        [
            {
                **standing(ValueError() if draw(3, 1) == [0] else None, follows=draw(2, 1) == [0]),
                "alike": draw(3, 4),
                "some": draw(2, 3),
                "none": [],
                "one": draw(2, 1) == [0],
                "number": bits(draw(2, 1)[0]) if draw(2, 1) == [0] else None,
            }
            for _ in range(RANKS)
        ]
        for _ in range(6)
    ]
    return [nothing, same, other, *random]


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_rank_reads_the_same_answers(workers, reduction: str, tensors: bool) -> None:
    for per_rank in answers_of_ranks():
        plain = [{name: list(v) if isinstance(v, bytes) else v for name, v in fields.items()} for fields in per_rank]
        outcomes = workers(RANKS).run(answers, plain if tensors else per_rank, reduction, tensors)
        assert outcomes == [expected(plain)] * RANKS


def stances(changed: list[bool], failed: list[bool], waits: bool) -> bool:
    me = dist.get_rank()
    agreed = ask_by(standing(ValueError() if failed[me] else None, follows=not changed[me]), "sum")
    return agreed.plan_again(waits=waits, follows=not changed[me])


@pytest.mark.parametrize(
    ("changed", "failed", "waits", "again"),
    [
        ([False] * 3, [False] * 3, True, [False] * 3),
        ([False, True, False], [False] * 3, True, [True] * 3),
        # CPUs that do not wait read nothing if they follow the plan. One that has changed plans only with all others.
        ([False, True, False], [False] * 3, False, [False] * 3),
        ([True] * 3, [False] * 3, False, [True] * 3),
        ([True] * 3, [False, False, True], False, [False] * 3),
    ],
)
def test_ranks_plan_again_together(workers, changed, failed, waits: bool, again: list[bool]) -> None:
    assert workers(RANKS).run(stances, changed, failed, waits) == again


def test_silence_says_nothing() -> None:
    assert {name: list(AGREEMENT.silence(name)) for name in ("some", "alike", "none")} == {
        "some": [0] * 3,
        "alike": [SILENT] * 4,
        "none": [],
    }
    fields = {name: AGREEMENT.silence(name) for name in AGREEMENT.ones}
    assert not AGREEMENT.vector(fields, torch.device("cpu")).any()


def test_answers_of_another_number_are_refused() -> None:
    with pytest.raises(ValueError, match="different structures"):
        AGREEMENT.vector({"alike": [0, 1, 0]}, torch.device("cpu"))


def test_hashes_of_texts_are_64_answers() -> None:
    assert len(bits_of("a")) == len(bits(2**64 - 1)) == 64
    assert bits_of("a") != bits_of("b")
    assert bits(5)[-3:] == bytes([1, 0, 1])
    assert set(bits_of("a")) == {0, 1}
