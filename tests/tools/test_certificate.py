"""The certificate tells right from wrong, a refusal from an accident, and its page is that of the recorded run."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.studies import certificate
from benchmarks.studies.certificate_cells import Layout, cell, of_module
from torch import nn

from tests.support.workers import Pool

FSDP2 = Layout("fsdp2", 2, "uneven")
Workers = Callable[[int], Pool]


class ShardsAlone(torch.optim.Muon):
    """A Muon that takes each rank's shard for a matrix."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.of = {}
        for parameter in parameters:
            shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            self.of[nn.Parameter(shard.detach())] = parameter
        super().__init__(list(self.of), lr=0.02)

    def step(self, closure: Any = None) -> None:
        for shard, parameter in self.of.items():
            gradient = parameter.grad
            shard.grad = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        super().step()


def shards_alone(layout: Layout, audited: bool) -> Any:
    return of_module(lambda parameters, layout, mesh: ShardsAlone(parameters))(layout, audited)


def raises_on_all() -> None:
    raise ValueError("tests take no DTensor")


def refused_on_one_rank() -> None:
    if dist.get_rank() == 0:
        raise ValueError("tests take no rank 0")


def accident() -> int:
    return {}["nothing"]


def of_ranks_that_differ() -> Any:
    def drifted(parameters: list[nn.Parameter], layout: Layout, mesh: Any) -> Any:
        return torch.optim.SGD(parameters, lr=float(1 + dist.get_rank()))

    return of_module(drifted)(Layout("ddp", 2, "uneven"), False)


@pytest.mark.parametrize(("project", "kind"), [("muonmesh", "fsdp2"), ("muonmesh", "ddp"), ("torch", "ddp")])
def test_equal_to_one_process(workers: Workers, project: str, kind: str) -> None:
    layout = Layout(kind, 2, "uneven")
    package = "muonmesh" if project == "muonmesh" else "torch.optim"
    single = certificate.outcome(workers(1), package, cell, project, layout.alone("one"))
    two = certificate.outcome(workers(2), package, cell, project, layout)
    assert [step.keys() for step in single] == [step.keys() for step in two]
    assert len(single) == 4
    assert certificate.compared(two, single) == {"word": "bits", "relative": 0.0}
    assert not torch.equal(single[0]["layers.tall.weight"], single[1]["layers.tall.weight"])


def test_a_shard_that_is_orthogonalized_alone_is_told(workers: Workers) -> None:
    single = certificate.outcome(workers(1), "tests", shards_alone, FSDP2.alone("one"), False)
    two = certificate.outcome(workers(2), "tests", shards_alone, FSDP2, False)
    result = certificate.compared(two, single)
    assert result["word"] == "differs"
    assert result["relative"] > 0.3
    assert certificate.text_of(result).startswith("differs by ")
    verdicts = certificate.outcome(workers(2), "tests", shards_alone, FSDP2, True)
    assert verdicts["each shard alone"] >= 2


def test_differences_are_in_units_of_one_update() -> None:
    single = [{"w": torch.full((2, 2), float(step))} for step in range(3)]
    for far, word in ((0.0, "bits"), (2.0**-21, "rounding"), (0.25, "differs")):
        two = [*single[:2], {"w": single[2]["w"] + far}]
        result = certificate.compared(two, single)
        assert (result["word"], result["relative"]) == (word, pytest.approx(far, rel=1e-2))


@pytest.mark.parametrize(
    ("run", "word", "message"),
    [
        (raises_on_all, "refuses", "ValueError: tests take no DTensor"),
        (refused_on_one_rank, "fails", "ValueError: tests take no rank 0"),
        (accident, "fails", "KeyError: 'nothing'"),
        (of_ranks_that_differ, "replicas differ", "ReplicasError: the ranks hold different values of "),
    ],
)
def test_errors(workers: Workers, run: Callable[[], Any], word: str, message: str) -> None:
    result = certificate.outcome(workers(2), "tests", run)
    assert result["word"] == word
    assert result["message"].startswith(message)


def test_the_page_is_that_of_the_recorded_run() -> None:
    record = json.loads(certificate.RECORDED.read_text())
    page = certificate.PAGE.read_text()
    assert page == certificate.page(record)
    for row in record["tables"].values():
        assert row["title"] in page


def test_all_cells_of_muonmesh_are_equal_to_one_process() -> None:
    rows = json.loads(certificate.RECORDED.read_text())["tables"]
    for name in ("muonmesh", "muonmesh_deepspeed", "muonmesh_megatron"):
        words = {layout: result["word"] for layout, result in rows[name]["cells"].items()}
        assert len(words) >= 8
        assert {*words.values()} == {"bits"}, words
