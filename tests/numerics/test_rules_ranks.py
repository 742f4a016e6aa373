"""Rules with a part on whole matrices: the same bits whatever holds the matrix, state that travels and reshards."""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Placement, Replicate

import muonmesh as mm
from muonmesh.comm.storage import local_of
from muonmesh.numerics import rules
from muonmesh.numerics.rules import register_rule
from muonmesh.step.connection import placed_members
from muonmesh.step.runtime import Driver
from muonmesh.testing import prove_rule
from tests.support import layouts, problem, soap
from tests.support.meshes import mesh_of
from tests.support.pages import run as run_page

COVERS = (
    "comm.factored_exchange.FactoredExchange",
    "comm.matrix_sums.MatrixSums",
    "tools.testing.prove_rule",
    "step.stored_factored.StoredFactored",
    "step.stored_factored.RuleSums",
    "layout.factored_plan.FactoredPlan",
)

STEPS = 4
RULES: dict[str, dict[str, Any]] = {
    "normuon": {"algorithm": "normuon", "normuon_side": "longer", "normuon_beta2": 0.8},
    "rows": {"algorithm": "normuon"},
    "cautious": {"decay_mode": "cautious", "weight_decay": 3.0},
    "both": {"algorithm": "normuon", "decay_mode": "cautious", "weight_decay": 3.0},
    "hyperball": {"algorithm": "hyperball"},
    "adamuon": {"algorithm": "adamuon", "adamuon_beta2": 0.8, "decay_mode": "cautious", "weight_decay": 3.0},
    "soap": {"algorithm": "soap", "soap_every": 2},
}
EXAMPLES = int(os.environ.get("FUZZ", "2000")) // 50
"""Generated layouts a rule in `make soak`; `make fuzz N=` sets it."""
FEW = max(1, EXAMPLES // 8)
"""In `make test`, where a rule steps through the layouts below too."""


def cases(*tried: tuple[Any, ...], of: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Cases of `make test`, and all others of a kind for `make soak`."""
    others = [case for case in of if case not in tried]
    return [pytest.param(*case) for case in tried] + [pytest.param(*case, marks=pytest.mark.soak) for case in others]


def ruled(groups: list[dict[str, Any]], rule: str) -> list[dict[str, Any]]:
    """The same groups under a rule; AdamW's decay cautiously where it does."""
    settings = RULES[rule]
    adamw_settings = {
        key: value for key, value in settings.items() if not key.startswith(("algorithm", "normuon", "adamuon", "soap"))
    }
    return [{**group, **(adamw_settings if group["algorithm"] == "adamw" else settings)} for group in groups]


def stepped(groups: list[dict[str, Any]], give: Any, rule: str, settings: dict[str, Any]) -> mm.Muon:
    optimizer = mm.Muon(ruled(groups, rule), **{**problem.SETTINGS, **settings})
    for step in range(STEPS):
        give(problem.gradients(step))
        optimizer.step()
    return optimizer


def alone(rule: str, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Weights and state of one process, by name; a rank computes them once for all of its tests."""
    layout = ("shard_state", "memory_budget_mb")
    return _alone(rule, tuple((key, value) for key, value in settings.items() if key not in layout))


@functools.cache
def _alone(rule: str, settings: tuple[tuple[str, Any], ...]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    model = problem.Bag(problem.initial())

    def give(gradients: dict[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            model.get_parameter(name).grad = gradient

    optimizer = stepped(problem.groups(model), give, rule, {**dict(settings), "process_group": "local"})
    state = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
    return {name: p.detach() for name, p in model.named_parameters()}, state


def differing(optimizer: mm.Muon, rule: str, settings: dict[str, Any]) -> list[str]:
    """What this rank stores of weights and state, by the layouts' own blocks, against one process."""
    weights, state = alone(rule, settings)
    wrong = []
    for member in placed_members(optimizer):
        stored = {"weights": member.tensor.detach(), **optimizer.state[member.tensor]}
        expected = {"weights": weights[member.name], **state[member.name]}
        assert stored.keys() == expected.keys()
        for key, value in stored.items():
            if key == "step":  # neither sharded nor of a rule
                continue
            layout = (member.state_layouts[key].storage if key in member.state_layouts else member.storage).layout
            assert layout is not None
            whole, local = expected[key].reshape(layout.shape), local_of(value)
            for block in layout.blocks(dist.get_rank()):
                region = block.region
                box = tuple(slice(low, low + size) for low, size in zip(region.offset, region.shape, strict=True))
                if not torch.equal(local.as_strided(region.shape, block.strides, block.start), whole[box]):
                    wrong.append(f"{member.name}.{key}")
    return wrong


def promised(optimizer: mm.Muon) -> bool:
    """Whether a step did what explain() says, whose rows have all the state between them."""
    explanation, did = optimizer.explain(), optimizer.counts
    assert sum(row.state for row in explanation.rows) == explanation.state_bytes > 0
    return (
        explanation.orthogonalizations,
        explanation.collectives,
        explanation.bytes_sent,
        explanation.bytes_received,
    ) == (
        did.orthogonalized,
        did.collectives,
        did.bytes_sent,
        did.bytes_received,
    )


def in_a_module(layout: str, rule: str, settings: dict[str, Any]) -> tuple[list[str], bool]:
    model, group = problem.hold(layout, problem.initial())

    def give(gradients: dict[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            parameter = model.get_parameter(name)
            parameter.grad = problem.placed_like(parameter, gradient)

    optimizer = stepped(problem.groups(model), give, rule, {**settings, "process_group": group})
    return differing(optimizer, rule, settings), promised(optimizer)


def on_mesh(name: str, how: str, rule: str, settings: dict[str, Any]) -> tuple[list[str], bool]:
    sizes, placements_of = layouts.MESHES[name]
    hold = layouts.declared if how == "declared" else layouts.dtensors

    def placements(_: str, shape: tuple[int, ...]) -> Sequence[Placement]:
        return placements_of(len(shape))

    holding = hold(problem.PARAMETERS, problem.initial(), mesh_of(sizes), placements)
    optimizer = stepped(holding.groups, holding.give, rule, {**settings, **holding.settings})
    return differing(optimizer, rule, settings), promised(optimizer)


def flat(tensor_parallel: int, seed: int, rule: str, settings: dict[str, Any]) -> tuple[list[str], bool]:
    holding = layouts.flat(problem.PARAMETERS, problem.initial(), tensor_parallel=tensor_parallel, seed=seed)
    optimizer = stepped(holding.groups, holding.give, rule, {**settings, **holding.settings})
    return differing(optimizer, rule, settings), promised(optimizer)


FP32: dict[str, Any] = {"compute_dtype": torch.float32}


def check(outcomes: Sequence[tuple[list[str], bool]]) -> None:
    assert outcomes == [([], True)] * len(outcomes)


@pytest.mark.parametrize(
    ("ranks", "layout", "rule"),
    cases(
        (4, "ddp", "both"),
        (4, "fsdp", "both"),
        (4, "shard1", "both"),
        (4, "fsdp", "adamuon"),
        (4, "shard-last", "adamuon"),
        of=itertools.product((2, 4), problem.LAYOUTS, ("normuon", "both", "adamuon")),
    ),
)
def test_bit_for_bit(workers, ranks: int, layout: str, rule: str) -> None:
    check(workers(ranks).run(in_a_module, layout, rule, FP32))


@pytest.mark.parametrize(
    ("layout", "rule"),
    cases(
        ("shard1", "normuon"),
        ("fsdp", "adamuon"),
        of=itertools.product(("ddp", "fsdp", "shard1"), ("normuon", "adamuon")),
    ),
)
def test_bit_for_bit_in_bf16(workers, layout: str, rule: str) -> None:
    check(workers(4).run(in_a_module, layout, rule, {"memory_budget_mb": 0.08}))


@pytest.mark.parametrize(
    ("layout", "dtype", "rule"),
    cases(
        ("shard1", "compute_dtype", "rows"),
        ("fsdp", "state_dtype", "adamuon"),
        of=itertools.product(("fsdp", "shard1"), ("compute_dtype", "state_dtype"), ("rows", "adamuon")),
    ),
)
def test_bit_for_bit_in_fp64(workers, layout: str, dtype: str, rule: str) -> None:
    check(workers(2).run(in_a_module, layout, rule, {**FP32, dtype: torch.float64}))


def test_bit_for_bit_with_moments_in_bf16(workers) -> None:
    check(workers(2).run(in_a_module, "shard-last", "adamuon", {**FP32, "state_dtype": torch.bfloat16}))


@pytest.mark.parametrize("layout", ["fsdp", *(pytest.param(x, marks=pytest.mark.soak) for x in ("ddp", "shard-last"))])
def test_cautious_decay_is_bit_for_bit_too(workers, layout: str) -> None:
    check(workers(4).run(in_a_module, layout, "cautious", {}))


@pytest.mark.parametrize(
    ("name", "how", "rule"),
    cases(
        ("hsdp, shard 1", "dtensor", "both"),
        ("fsdp over colwise", "declared", "both"),
        ("strided alone", "dtensor", "both"),
        ("experts", "dtensor", "both"),
        ("replicate inside", "declared", "adamuon"),
        ("fsdp over colwise", "dtensor", "adamuon"),
        ("four axes", "dtensor", "adamuon"),
        of=itertools.product(layouts.MESHES, ("dtensor", "declared"), ("both", "adamuon")),
    ),
)
def test_bit_for_bit_on_any_mesh(workers, name: str, how: str, rule: str) -> None:
    """Of AdaMuon it fails if a sum is taken over a shard, or if copies of an element count."""
    check(workers(4).run(on_mesh, name, how, rule, FP32))


@pytest.mark.parametrize(
    ("name", "rule"),
    cases(
        ("hsdp", "adamuon"),
        ("all replicated", "hyperball"),
        of=itertools.product(("hsdp", "replicate inside", "experts"), ("adamuon", "hyperball")),
    ),
)
def test_bit_for_bit_where_results_travel_in_rounds(workers, name: str, rule: str) -> None:
    """Sums are taken when the owner's replica has its shards, before other replicas have theirs."""
    check(workers(4).run(on_mesh, name, "dtensor", rule, {**FP32, "memory_budget_mb": 0.016}))


@pytest.mark.parametrize(
    ("name", "rule"),
    cases(
        ("hsdp, shard 1", "normuon"),
        ("three axes", "adamuon"),
        of=itertools.product(
            ("hsdp", "hsdp, shard 1", "replicate inside", "all replicated", "three axes"), ("normuon", "adamuon")
        ),
    ),
)
def test_bit_for_bit_where_replicas_share_the_state(workers, name: str, rule: str) -> None:
    check(workers(4).run(on_mesh, name, "dtensor", rule, {**FP32, "shard_state": True}))


def test_bit_for_bit_where_ddp_shares_the_state(workers) -> None:
    check(workers(4).run(in_a_module, "ddp", "both", {**FP32, "shard_state": True}))


@pytest.mark.parametrize(
    ("ranks", "parallel", "seed", "rule"),
    cases(
        (4, 1, 0, "normuon"),
        (4, 2, 0, "normuon"),
        (4, 2, 1, "adamuon"),
        (4, 1, 1, "hyperball"),
        of=itertools.product((2, 4), (1, 2), range(2), ("normuon", "adamuon")),
    ),
)
def test_bit_for_bit_in_flat_buffers(workers, ranks: int, parallel: int, seed: int, rule: str) -> None:
    """Of whole parameters, or of their tensor-parallel shards."""
    check(workers(ranks).run(flat, parallel, seed, rule, FP32))


def gathered(name: str, shared: bool, rule: str) -> list[str]:
    """What torch itself makes of the state: DTensors, whole."""
    sizes, placements_of = layouts.MESHES[name]
    holding = layouts.dtensors(
        problem.PARAMETERS, problem.initial(), mesh_of(sizes), lambda _, shape: placements_of(len(shape))
    )
    optimizer = stepped(holding.groups, holding.give, rule, {**FP32, "shard_state": shared})
    _, state = alone(rule, FP32)
    return [
        f"{name}.{key}"
        for name, parameter in holding.tensors.items()
        for key, value in optimizer.state[parameter].items()
        if not torch.equal(problem.whole(value), state[name][key])
    ]


@pytest.mark.parametrize(
    ("name", "rule"),
    cases(
        ("fsdp over colwise", "normuon"),
        ("hsdp, shard 1", "adamuon"),
        of=itertools.product(("fsdp over colwise", "strided alone", "hsdp, shard 1"), ("normuon", "adamuon")),
    ),
)
def test_what_is_kept_is_a_dtensor_like_any_other(workers, name: str, rule: str) -> None:
    assert workers(4).run(gathered, name, name.startswith("hsdp"), rule) == [[]] * 4


def zeroed(layout: str, waits: bool, rule: str) -> list[str]:
    """Steps in which matrices have no gradient or a zero one, in turns: they keep all that their rule keeps."""
    optimizers = []
    for storage in (layout, "local"):
        model, group = problem.hold(storage, problem.initial())
        settings = {**problem.SETTINGS, **FP32, "process_group": group}
        optimizer = mm.Muon(ruled(problem.groups(model), rule), **settings)
        optimizer._runtime.driver = Driver(waits if storage == layout else True)
        for step in range(STEPS):
            for number, (name, gradient) in enumerate(problem.gradients(step).items()):
                parameter = model.get_parameter(name)
                kind = (number + step) % 3
                scaled = gradient if kind else gradient * 0
                parameter.grad = None if kind == 2 else problem.placed_like(parameter, scaled)
            optimizer.step()
        optimizers.append((model, optimizer))
    return problem.differing(*[problem.result(*pair) for pair in optimizers])


@pytest.mark.parametrize(
    ("layout", "waits", "rule"),
    cases(
        ("fsdp", True, "both"),
        ("shard1", False, "both"),
        ("fsdp", False, "adamuon"),
        ("shard1", False, "hyperball"),
        of=itertools.product(("ddp", "fsdp", "shard1"), (True, False), ("both", "adamuon")),
    ),
)
def test_matrices_that_are_left_alone_keep_everything(workers, layout: str, waits: bool, rule: str) -> None:
    """Without waiting, as on CUDA, every write is masked by the flags on the device."""
    assert workers(2).run(zeroed, layout, waits, rule) == [[], []]


# ------------------------------------------------------------------ checkpoints


def build(layout: str, rule: str = "normuon") -> tuple[nn.Module, mm.Muon]:
    """``-shared`` after the name of a layout stores momentum, and what follows it, sharded over its replicas."""
    model, group = problem.hold(layout.removesuffix("-shared"), problem.initial())
    settings = {**problem.SETTINGS, **FP32, "shard_state": layout.endswith("-shared"), "process_group": group}
    return model, mm.Muon(ruled(problem.groups(model), rule), **settings)


def states(model: nn.Module, optimizer: mm.Muon, options: StateDictOptions) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def save(layout: str, path: str, flat: bool, rule: str) -> None:
    model, optimizer = build(layout, rule)
    problem.advance(model, optimizer, 0, 2)
    dcp.save(states(model, optimizer, StateDictOptions(flatten_optimizer_state_dict=flat)), checkpoint_id=path)


def load(layout: str, path: str, flat: bool, rule: str) -> list[str]:
    model, optimizer = build(layout, rule)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = states(model, optimizer, options)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    problem.advance(model, optimizer, 2, STEPS)
    return differing(optimizer, rule, FP32)


RESHARDINGS = {
    "4-to-2": ((4, "fsdp"), (2, "fsdp")),
    "other-dim": ((2, "fsdp"), (4, "shard1")),
    "shared-to-fsdp": ((4, "ddp-shared"), (2, "fsdp")),
    "to-ddp": ((4, "shard-last"), (2, "ddp")),
}


@pytest.mark.parametrize(
    ("how", "flat", "rule"),
    cases(
        ("other-dim", False, "normuon"),
        ("shared-to-fsdp", True, "adamuon"),
        ("4-to-2", False, "hyperball"),
        of=itertools.product(RESHARDINGS, (False, True), ("normuon", "adamuon", "hyperball")),
    ),
)
def test_resharding_continues_bit_for_bit(workers, tmp_path: Path, how: str, flat: bool, rule: str) -> None:
    (ranks, layout), (later, other) = RESHARDINGS[how]
    workers(ranks).run(save, layout, str(tmp_path), flat, rule)
    for wrong in workers(later).run(load, other, str(tmp_path), flat, rule):
        assert wrong == []


def reloaded(layout: str) -> list[str]:
    """Through torch's own state_dict and load_state_dict, in the middle."""
    model, optimizer = build(layout)
    problem.advance(model, optimizer, 0, 2)
    fresh, other = build(layout)
    fresh.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    problem.advance(fresh, other, 2, STEPS)
    return differing(other, "normuon", FP32)


@pytest.mark.parametrize("layout", ["shard1", "ddp-shared", pytest.param("ddp", marks=pytest.mark.soak)])
def test_a_state_dict_brings_it_back(workers, layout: str) -> None:
    assert workers(2).run(reloaded, layout) == [[], []]


def refused(kind: str) -> str:
    model, optimizer = build("shard0", "adamuon" if kind == "element" else "normuon")
    problem.advance(model, optimizer, 0, 1)
    saved = optimizer.state_dict()
    entry = saved["state"][4]
    if kind == "element":
        entry["second_moment"] = entry["second_moment"] - 1
    elif kind == "missing":
        del entry["row_second_moment"]
    elif kind == "shape":
        entry["row_second_moment"] = entry["momentum_buffer"]
    else:
        entry["row_second_moment"] = entry["row_second_moment"] - 1
    with pytest.raises(mm.StateError) as error:
        optimizer.load_state_dict(saved)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("missing", "needed 'row_second_moment'"),
        ("shape", r"needed a DTensor of shape \(66, 1\)"),
        ("element", "a negative number in second_moment"),
        ("negative", "a negative number in row_second_moment"),
    ],
)
def test_what_does_not_fit_is_refused(workers, kind: str, pattern: str) -> None:
    for message in workers(2).run(refused, kind):
        assert re.search(pattern, message), message


# ------------------------------------------------------------------ rules of one's own


@register_rule("test-all-kinds")
@dataclass(frozen=True)
class AllKinds(mm.MuonRule):
    """Keeps something in every way there is."""

    beta: float = 0.9

    def keeps(self) -> dict[str, Any]:
        return {
            "momentum_buffer": "momentum",
            "second": "momentum",
            "by_row": "rows",
            "by_col": "cols",
            "by_matrix": "matrix",
            "mean": "weights",
        }

    def fold(self, gradient: Tensor, state: Any) -> None:
        super().fold(gradient, state)
        state["second"].lerp_(gradient.to(state["second"].dtype).sign().mul_(0.25), 1 - self.beta)

    def direction(self, gradient: Tensor, state: Any) -> Tensor:
        return super().direction(gradient, state) + state["second"] * 0

    def whole(self, update: Tensor, state: Any) -> Tensor:
        state["by_row"].lerp_(update.norm(dim=-1, keepdim=True), 1 - self.beta)
        state["by_col"].lerp_(update.norm(dim=-2, keepdim=True), 1 - self.beta)
        state["by_matrix"].add_(update.norm(dim=(-2, -1), keepdim=True))
        return update / (1 + state["by_row"]) / (1 + state["by_col"]) / (1 + state["by_matrix"])

    def apply(self, weights: Tensor, update: Tensor, size: Any, state: Any, sums: Any = ()) -> None:
        super().apply(weights, update, size, state)
        state["mean"].lerp_(weights, 1 - self.beta)


@register_rule("test-sphere")
@dataclass(frozen=True)
class Sphere(mm.MuonRule):
    """Steps along the update as it is tangent to the sphere that the weights are on; counts elements and steps."""

    def keeps(self) -> dict[str, Any]:
        return {"momentum_buffer": "momentum", "steps": "weights"}

    def summands(self, weights: Tensor, update: Tensor, size: Any, state: Any) -> tuple[Tensor, ...]:
        u, w = update.double(), weights.double()
        return w.square(), w * u, torch.ones_like(update) + state["steps"] * 0

    def apply(self, weights: Tensor, update: Tensor, size: Any, state: Any, sums: Any = ()) -> None:
        along = torch.where(sums[0] == 0, 0.0, sums[1] / sums[0])
        weights.sub_((update - weights * along).mul_(size / sums[2].sqrt()))
        state["steps"].add_(1)


@register_rule("test-sign-sgd")
@dataclass(frozen=True)
class SignSGD(mm.ElementwiseRule):
    """Signs, which keep nothing (Bernstein et al., arXiv 1802.04434)."""

    def update(self, gradient: Tensor, state: Any, count: Tensor) -> Tensor:
        return gradient.sign()


@register_rule("test-elements-by-their-norm")
@dataclass(frozen=True)
class ElementsByTheirNorm(mm.ElementwiseRule):
    """A rule for single elements that looks at all elements of a shard."""

    def update(self, gradient: Tensor, state: Any, count: Tensor) -> Tensor:
        return gradient / gradient.norm().clamp(min=1e-8)


def on_the_page() -> None:
    """The rule that docs/rules.md shows."""
    model = nn.ModuleDict({"embed": nn.Embedding(4, 4), "linear": nn.Linear(4, 4)})
    for _ in run_page("docs/rules.md", {"model": model}, {}, {}, {}):
        pass
    prove_rule("even-rows", examples=FEW, seed=1, settings={"row_beta": 0.5})
    prove_rule("as-large-as-the-weights", examples=FEW, seed=2)
    prove_rule("lion", examples=FEW, seed=3)
    prove_rule("sign-sgd", examples=FEW, seed=5, settings={"decay_mode": "cautious"})


def test_the_rule_of_the_page_is_proved(workers) -> None:
    workers(2).run(on_the_page, timeout=180.0)


PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


def packaged(folder: Path) -> None:
    """The page's rule as an installed package has it: a module, and metadata with an entry point."""
    page = (Path(__file__).parents[2] / "docs/rules.md").read_text()
    (rule,) = [block for block in PYTHON.findall(page) if '"even-rows")' in block]
    assert len(rule.splitlines()) < 30
    (folder / "even_rows.py").write_text("import muonmesh as mm\n" + rule.replace('"even-rows"', '"packaged-rows"'))
    metadata = folder / "even_rows-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: even-rows\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[muonmesh.rules]\npackaged-rows = even_rows:EvenRows\nother-rows = even_rows:EvenRows\n"
        "no-rows = even_rows:NotThere\n"
    )


def from_a_package(folder: str) -> str:
    sys.path.insert(0, folder)
    try:
        optimizer = mm.Muon([{"params": [nn.Parameter(torch.ones(4, 4))], "algorithm": "packaged-rows"}])
        prove_rule("packaged-rows", examples=FEW, settings={"row_beta": 0.5})
        with pytest.raises(ValueError, match="entry point other-rows = even_rows:EvenRows: found no such rule"):
            prove_rule("other-rows")
        with pytest.raises(ValueError, match=r"the entry point no-rows = even_rows:NotThere: found module .*NotThere"):
            prove_rule("no-rows")
        return rules.RULES[optimizer.param_groups[0]["algorithm"]].__module__
    finally:
        sys.path.remove(folder)
        sys.modules.pop("even_rows", None)
        rules.RULES.pop("packaged-rows", None)


def test_a_rule_of_another_package_is_found_by_its_entry_point(workers, tmp_path: Path) -> None:
    packaged(tmp_path)
    assert workers(2).run(from_a_package, str(tmp_path)) == ["even_rows"] * 2


@register_rule("test-sees-its-rank")
@dataclass(frozen=True)
class SeesItsRank(mm.MuonRule):
    def whole(self, update: Tensor, state: Any) -> Tensor:
        return update * (1 + dist.get_rank())


@register_rule("test-normalises-gradients")
@dataclass(frozen=True)
class NormalisesGradients(mm.MuonRule):
    def fold(self, gradient: Tensor, state: Any) -> None:
        super().fold(gradient / gradient.norm(), state)


@register_rule("test-centres-weights")
@dataclass(frozen=True)
class CentresWeights(mm.MuonRule):
    def apply(self, weights: Tensor, update: Tensor, size: Any, state: Any, sums: Any = ()) -> None:
        super().apply(weights, update, size, state)
        weights.sub_(weights.mean())


@register_rule("test-normalises-summands")
@dataclass(frozen=True)
class NormalisesSummands(Sphere):
    def summands(self, weights: Tensor, update: Tensor, size: Any, state: Any) -> tuple[Tensor, ...]:
        return (*super().summands(weights, update, size, state)[:2], update / update.norm())


@register_rule("test-counts-twice")
@dataclass(frozen=True)
class CountsTwice(Sphere):
    def summands(self, weights: Tensor, update: Tensor, size: Any, state: Any) -> tuple[Tensor, ...]:
        state["steps"].add_(1)
        return super().summands(weights, update, size, state)


CAUTIOUS = {"decay_mode": "cautious", "weight_decay": 3.0}
PROVED: dict[str, dict[str, Any]] = {
    "adamw": {},
    "test-sign-sgd": {"decay_mode": "cautious"},
    "muon": {},
    "normuon": {**CAUTIOUS, "normuon_side": "longer"},
    "adamuon": CAUTIOUS,
    "hyperball": {},
    "muoneq": {},
    "muon_plus": {},
    "dynmuon": {"dynmuon_power": 0.25},
    "soap": {"soap_every": 2},
    "scion_sign": {"scion_layer": "embedding"},
    "scion_row_norm": {"scale_mode": "unit_rms_norm"},
    "test-all-kinds": {},
    "test-sphere": {},
}


def prove(rule: str, **options: Any) -> None:
    """`prove_rule` on ranks that have read this file, which registers the rules above."""
    prove_rule(rule, **options)


@pytest.mark.parametrize(
    ("ranks", "rule", "examples"),
    cases(*((4, rule, FEW) for rule in PROVED), of=((ranks, rule, EXAMPLES) for ranks in (2, 4) for rule in PROVED)),
)
def test_a_rule_is_proved_on_generated_layouts(workers, ranks: int, rule: str, examples: int) -> None:
    workers(ranks).run(prove, rule, examples=examples, settings=PROVED[rule])


@pytest.mark.parametrize(
    ("rule", "pattern"),
    [
        ("test-sees-its-rank", "weights differ from one process"),
        ("test-normalises-gradients", r"NormalisesGradients\.fold: .* belongs into whole"),
        ("test-centres-weights", r"CentresWeights\.apply: .* belongs into whole"),
        ("test-normalises-summands", r"NormalisesSummands\.summands: .* belongs into whole"),
        ("test-counts-twice", r"CountsTwice\.summands: .* written"),
        ("test-elements-by-their-norm", r"ElementsByTheirNorm\.step: .* element by element"),
    ],
)
def test_a_rule_that_sees_sharding_is_found(workers, rule: str, pattern: str) -> None:
    for outcome in workers(2).run_expecting_errors(prove, rule, examples=20, timeout=60.0):
        assert outcome.error is AssertionError
        assert re.search(pattern, outcome.message), outcome.message


def test_one_process_proves_its_parts() -> None:
    report = prove_rule(AllKinds, examples=5)
    assert re.search(
        r"agree up to rounding in all [1-4] cases in fp32, and their results are .* in all 5 cases", report
    )
    assert "Sharding was not tried" in report
    with pytest.raises(AssertionError, match=r"NormalisesGradients\.fold"):
        prove_rule("test-normalises-gradients")
    with pytest.raises(ValueError, match="register_rule"):
        prove_rule("unheard of")


# ------------------------------------------------------------------ what the owner of a matrix keeps of it

BETA, DAMPING = 0.8, 0.1
FP64: dict[str, Any] = {"compute_dtype": torch.float64, "state_dtype": torch.float64}


@mm.register_rule("gram-average")
@dataclass(frozen=True)
class GramAverage(mm.MuonRule):
    """Muon of momentum that is divided by a running mean of its Gram matrix; counts the steps of each matrix."""

    def keeps(self) -> Mapping[str, str]:
        return {**super().keeps(), "gram": "rows×rows", "steps": "cols×2"}

    def balance(self, direction: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        assert (
            state["gram"].data_ptr() % 64 == 0
        )  # or products would have other bits where other matrices lie before it
        gram = state["gram"].lerp_(direction @ direction.mT, 1 - BETA)
        size = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        damped = gram + DAMPING * size * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        return torch.linalg.solve(torch.where(size > 0, damped, torch.ones_like(damped).tril()), direction)

    def whole(self, update: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        state["steps"].add_(1)
        return update


RULES["gram"] = {"algorithm": "gram-average"}


def test_it_is_what_plain_torch_makes_of_it() -> None:
    """Four steps in fp64; one leaves the second matrix alone, which keeps everything."""
    torch.manual_seed(0)
    start = torch.randn(12, 20, dtype=torch.float64)
    weight = nn.Parameter(start.clone())
    group = {"params": [weight], "param_names": ["w"], "algorithm": "gram-average", "matrices": [("rows", 5, 7)]}
    rate = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "nesterov": False, "scale_mode": "none"}
    optimizer = mm.Muon([{**group, **rate, "ns_coefficients": "polar_express", "ns_steps": 30}], **FP64)
    expected, momentum = start.clone(), torch.zeros_like(start)
    grams = [torch.zeros(5, 5, dtype=torch.float64), torch.zeros(7, 7, dtype=torch.float64)]
    for step in range(4):
        weight.grad = torch.randn(12, 20, dtype=torch.float64)
        weight.grad[5:] *= step != 2
        optimizer.step()
        for number, rows in enumerate((slice(0, 5), slice(5, 12))):
            if not weight.grad[rows].any():
                continue
            momentum[rows] = 0.9 * momentum[rows] + 0.1 * weight.grad[rows]
            part, count = momentum[rows], rows.stop - rows.start
            grams[number] = BETA * grams[number] + (1 - BETA) * part @ part.T
            damped = grams[number] + DAMPING * grams[number].trace() / count * torch.eye(count, dtype=torch.float64)
            u, _, vh = torch.linalg.svd(damped.inverse() @ part, full_matrices=False)
            expected[rows] -= 0.1 * u @ vh
    state = optimizer.state[weight]
    torch.testing.assert_close(state["gram"], torch.cat([gram.flatten() for gram in grams]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-7, atol=1e-7)
    assert state["steps"].tolist() == [4.0] * 40 + [3.0] * 40


@pytest.mark.parametrize(("ranks", "layout"), [(4, "ddp"), (2, "fsdp"), (4, "shard1"), (4, "shard-last")])
def test_bit_for_bit_what_owners_keep(workers, ranks: int, layout: str) -> None:
    check(workers(ranks).run(in_a_module, layout, "gram", FP32))


@pytest.mark.parametrize("name", ["hsdp, shard 1", "fsdp over colwise", "experts", "four axes"])
def test_bit_for_bit_on_any_mesh_what_owners_keep(workers, name: str) -> None:
    check(workers(4).run(on_mesh, name, "dtensor", "gram", FP32))


@pytest.mark.parametrize(("parallel", "seed"), [(1, 0), (2, 1)])
def test_bit_for_bit_in_flat_buffers_what_owners_keep(workers, parallel: int, seed: int) -> None:
    check(workers(4).run(flat, parallel, seed, "gram", FP32))


def cost(layout: str) -> tuple[list[Any], int, int]:
    """What a step under the rule sent, and one under Muon; how many numbers are kept here, and of all matrices."""
    sent, stored, whole = [], 0, 0
    for rule in ("gram", "cautious"):
        model, optimizer = build(layout, rule)
        problem.advance(model, optimizer, 0, 1)
        sent.append((optimizer.counts.collectives, optimizer.counts.bytes_sent, optimizer.counts.bytes_received))
        for member in placed_members(optimizer):
            if "gram" in member.state_layouts:
                stored += optimizer.state[member.tensor]["gram"].numel()
                whole += torch.Size(member.state_layouts["gram"].storage.shape).numel()
    return sent, stored, whole


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_what_owners_keep_does_not_travel_and_is_kept_once(workers, layout: str) -> None:
    everyone = workers(4).run(cost, layout)
    for (gram_sent, muon_sent), _, _ in everyone:
        assert gram_sent == muon_sent
        assert gram_sent[1] > 0
    assert sum(stored for _, stored, _ in everyone) == everyone[0][2] > 0


def proved_kept() -> str:
    return prove_rule(GramAverage, examples=FEW)


def test_prove_rule_shows_it(workers) -> None:
    """With steps that leave the matrix alone, on hosts that wait for the flags and on such as do not."""
    (report,) = set(workers(3).run(proved_kept))
    assert re.search(rf": 3 ranks have the bits of one process in all {FEW} cases \(.* on a mesh, .* shapes\)$", report)


def save_kept(layout: str, path: str, rule: str = "gram") -> None:
    model, optimizer = build(layout, rule)
    problem.advance(model, optimizer, 0, 2)
    mm.checkpoint.save(path, model, optimizer)


def load_kept(layout: str, path: str, rule: str = "gram") -> list[str]:
    model, optimizer = build(layout, rule)
    mm.checkpoint.load(path, model, optimizer)
    problem.advance(model, optimizer, 2, STEPS)
    return differing(optimizer, rule, FP32)


@pytest.mark.parametrize(
    ("ranks", "layout", "later", "other"),
    [(1, "ddp", 3, "fsdp"), (3, "fsdp", 2, "ddp"), (2, "ddp", 1, "ddp"), (2, "shard-last", 3, "replicate")],
)
def test_any_layout_goes_on(workers, tmp_path: Path, ranks: int, layout: str, later: int, other: str) -> None:
    path = str(tmp_path / "saved")
    workers(ranks).run(save_kept, layout, path)
    for wrong in workers(later).run(load_kept, other, path):
        assert wrong == []


def reloaded_kept(layout: str) -> list[str]:
    """Through a file a rank, with an optimizer that has not met the others yet."""
    model, optimizer = build(layout, "gram")
    problem.advance(model, optimizer, 0, 2)
    fresh, other = build(layout, "gram")
    fresh.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    problem.advance(fresh, other, 2, STEPS)
    return differing(other, "gram", FP32)


@pytest.mark.parametrize("layout", ["ddp", "shard1"])
def test_a_state_dict_of_each_rank_brings_it_back(workers, layout: str) -> None:
    assert workers(2).run(reloaded_kept, layout) == [[], []]


def reloaded_beside_other_matrices() -> bool:
    """Rank 1 has a large matrix of its own, so rank 0 owns all that both have, which no rank knows by itself."""
    shared, alone = mesh_of((2,)), mesh_of((1,), (1,))

    def build_half() -> tuple[list[nn.Parameter], mm.Muon]:
        torch.manual_seed(0)
        sizes = [(shared, 8, 6)] * 3 + [(alone, 40, 30)] * dist.get_rank()
        parameters = [
            nn.Parameter(DTensor.from_local(torch.randn(rows, cols), mesh, [Replicate()], run_check=False))
            for mesh, rows, cols in sizes
        ]
        return parameters, mm.Muon([{"params": parameters, "algorithm": "soap"}], lr=0.01)

    def step(parameters: list[nn.Parameter], optimizer: mm.Muon, seed: int) -> None:
        torch.manual_seed(seed)
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
            parameter.grad.to_local().normal_()
        optimizer.step()

    (parameters, optimizer), (others, fresh) = build_half(), build_half()
    step(parameters, optimizer, 1)
    owned = [optimizer.state[parameter]["row_gram"].numel() for parameter in parameters[:3]]
    assert all(owned) if dist.get_rank() == 0 else not any(owned)
    with torch.no_grad():
        for other, parameter in zip(others, parameters, strict=True):
            other.copy_(parameter)
    fresh.load_state_dict(optimizer.state_dict())
    step(parameters, optimizer, 2)
    step(others, fresh, 2)
    return all(torch.equal(p.to_local(), other.to_local()) for p, other in zip(parameters, others, strict=True))


def test_a_state_dict_comes_back_where_ranks_have_different_matrices(workers) -> None:
    assert workers(2).run(reloaded_beside_other_matrices) == [True, True]


def refused_kept() -> str:
    model, optimizer = build("fsdp", "gram")
    problem.advance(model, optimizer, 0, 1)
    with pytest.raises(mm.StateError) as caught:
        get_optimizer_state_dict(model, optimizer)
    return str(caught.value)


def test_torchs_functions_refuse_what_they_would_keep_one_ranks_of(workers) -> None:
    for message in workers(2).run(refused_kept):
        assert "'gram' of rule 'gram-average'" in message
        assert "muonmesh.checkpoint.save" in message


def grown() -> list[Any]:
    """A larger matrix that joins later would be given away first, and so move the others."""
    torch.manual_seed(0)
    first = [nn.Parameter(torch.randn(6, 10)) for _ in range(3)]
    larger = nn.Parameter(torch.randn(30, 40))
    settings = {"algorithm": "gram-average", "lr": 0.01}
    optimizer = mm.Muon([{"params": first, **settings}], process_group="world")

    def step(parameters: list[nn.Parameter]) -> dict[str, int]:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter) * torch.arange(parameter.shape[1])
        optimizer.step()
        plan = optimizer._runtime.connected.plan
        return {plan.parameters[assignment.parameter].name: assignment.owner for assignment in plan.assignments}

    before = step(first)
    optimizer.add_param_group({"params": [larger], **settings, "param_names": ["late"]})
    after = step([*first, larger])
    counts = [optimizer.state[parameter]["steps"].unique().tolist() for parameter in first]
    return [before, {name: owner for name, owner in after.items() if name in before}, counts]


def test_who_keeps_something_of_a_matrix_stays_its_owner(workers) -> None:
    everyone = workers(2).run(grown)
    for before, after, _ in everyone:
        assert before == after
    counts = [steps for *_, all_counts in everyone for steps in all_counts]
    assert sorted(counts) == [[]] * 3 + [[2.0]] * 3


# ------------------------------------------------------------------ SOAP-Muon, and rules that take turns


@pytest.mark.parametrize("every", [1, 3])
def test_soap_is_what_its_authors_code_makes_of_it(every: int) -> None:
    """Their functions in fp64, matrix by matrix, with an SVD in the place of Newton-Schulz; matrices take turns.

    They are square: of others the first Gram matrices have null spaces, whose bases are rounding alone.
    """
    torch.manual_seed(6)
    start = torch.randn(14, 7, dtype=torch.float64)
    weight = nn.Parameter(start.clone())
    group = {"params": [weight], "param_names": ["layers.4.w"], "algorithm": "soap", "matrices": [("rows", 7, 7)]}
    rate = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "scale_mode": "none", "soap_every": every}
    optimizer = mm.Muon([{**group, **rate, "ns_coefficients": "polar_express", "ns_steps": 30}], **FP64)
    expected, states = start.clone(), [soap.fresh(7, 7) for _ in range(2)]
    turns = [zlib.crc32(b"layers..w") + 4 + number for number in range(2)]
    for step in range(7):
        weight.grad = torch.randn(14, 7, dtype=torch.float64)
        optimizer.step()
        for number, rows in enumerate((slice(0, 7), slice(7, 14))):
            states[number]["soap_step"] = step + turns[number] if step else 0  # 0 is never a turn
            update = soap.step(weight.grad[rows], states[number], mu=0.9, precondition_frequency=every)
            u, values, vh = torch.linalg.svd(update, full_matrices=False)
            assert values[0] < 1e4 * values[-1]  # what Newton-Schulz reaches
            expected[rows] -= 0.1 * u @ vh
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-10, atol=1e-10)
    state = optimizer.state[weight]
    for key, soap_key in {"row_basis": "q_row", "col_basis": "q_col"}.items():
        bases = torch.stack([matrix_state[soap_key] for matrix_state in states])
        torch.testing.assert_close(state[key].view(2, 7, 7), bases, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("ranks", "layout"), [(4, "ddp"), (2, "fsdp"), (4, "shard-last")])
def test_bit_for_bit_under_soap(workers, ranks: int, layout: str) -> None:
    check(workers(ranks).run(in_a_module, layout, "soap", FP32))


def test_bit_for_bit_under_soap_on_a_mesh_and_in_flat_buffers(workers) -> None:
    check(workers(4).run(on_mesh, "fsdp over colwise", "dtensor", "soap", FP32))
    check(workers(4).run(flat, 2, 1, "soap", FP32))


@pytest.mark.parametrize(("ranks", "layout", "later", "other"), [(3, "fsdp", 2, "ddp"), (2, "shard-last", 3, "fsdp")])
def test_soap_goes_on_in_any_layout_at_the_same_turn(
    workers, tmp_path: Path, ranks: int, layout: str, later: int, other: str
) -> None:
    path = str(tmp_path / "saved")
    workers(ranks).run(save_kept, layout, path, "soap")
    for wrong in workers(later).run(load_kept, other, path, "soap"):
        assert wrong == []


# ------------------------------------------------------------------ a rule in a file of its own


def with_an_entry_point(folder: Path) -> None:
    (folder / "shampoo.py").write_text((Path(__file__).parents[2] / "examples/shampoo.py").read_text())
    metadata = folder / "shampoo-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shampoo\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[muonmesh.rules]\nshampoo = shampoo:Shampoo\n")


def proved_shampoo(folder: str) -> str:
    sys.path.insert(0, folder)
    try:
        prove_rule("shampoo", examples=FEW, seed=6, settings={"shampoo_every": 2})
        return rules.RULES["shampoo"].__module__
    finally:
        sys.path.remove(folder)


def test_shampoo_in_one_file_gives_the_same_bits_in_every_layout(workers, tmp_path: Path) -> None:
    with_an_entry_point(tmp_path)
    assert workers(3).run(proved_shampoo, str(tmp_path)) == ["shampoo"] * 3


def test_shampoo_is_its_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of facebookresearch/optimizers, in fp64, the roots by an SVD; Adam's step until the first turn."""
    with_an_entry_point(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(8)
    start, every, beta2 = torch.randn(7, 7, dtype=torch.float64), 3, 0.95
    weight = nn.Parameter(start.clone())
    group = {"params": [weight], "param_names": ["proj"], "algorithm": "shampoo", "shampoo_every": every}
    optimizer = mm.Muon([group], lr=0.01, weight_decay=0.2, momentum=0.9, **FP64)
    expected, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    grams, roots = [torch.zeros(n, n, dtype=torch.float64) for n in start.shape], list[Tensor]()
    shown = []
    for step in range(8):
        g = weight.grad = torch.randn(7, 7, dtype=torch.float64)
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g, beta2 * v + (1 - beta2) * g * g
        grams = [beta2 * old + (1 - beta2) * new for old, new in zip(grams, (g @ g.T, g.T @ g), strict=True)]
        missing = 1 - beta2 ** (step + 1)
        filtered = m / (1 - 0.9 ** (step + 1))
        if (step + zlib.crc32(b"proj")) % every == 0:
            svds = [torch.linalg.svd(gram / missing) for gram in grams]
            roots = [(u * (s + 1e-12) ** -0.25) @ u.T for u, s, _ in svds]
        adam = filtered / ((v / missing).sqrt() + 1e-10)
        update = adam
        if roots:
            update = roots[0] @ filtered @ roots[1]
            update = update * adam.norm() / update.norm()
        shown.append(bool(roots))
        expected = expected * (1 - 0.01 * 0.2) - 0.01 * update
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-9, atol=1e-9)
    assert shown[0] != shown[-1]
