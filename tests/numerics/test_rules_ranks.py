"""Rules with a part on whole matrices: the same bits whatever holds the matrix, state that travels and reshards."""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate

import muonmesh as mm
from muonmesh.comm.storage import local_of
from muonmesh.numerics import rules
from muonmesh.numerics.rules import register_rule
from muonmesh.step.connection import placed_members
from muonmesh.step.runtime import Driver
from muonmesh.testing import prove_rule
from tests.support import layouts, problem, saving, soap
from tests.support.meshes import mesh_of
from tests.support.on_ranks import on_ranks
from tests.support.pages import run as run_page

COVERS = (
    "comm.factored_exchange.FactoredExchange",
    "comm.matrix_sums.MatrixSums",
    "tools.testing.prove_rule",
    "step.stored_factored.StoredFactored",
    "step.stored_factored.RuleSums",
    "step.state_placement.with_owners",
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
    "gram": {"algorithm": "gram-average"},  # below
}
FP32: dict[str, Any] = {"compute_dtype": torch.float32}
EXAMPLES = int(os.environ.get("FUZZ", "2000")) // 50
"""Generated layouts a rule in `make soak`; `make fuzz N=` sets it."""
FEW = max(1, EXAMPLES // 12)
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


def train_in(holding: layouts.Held, rule: str, settings: dict[str, Any]) -> mm.Muon:
    optimizer = mm.Muon(ruled(holding.groups, rule), **{**problem.SETTINGS, **FP32, **holding.settings, **settings})
    for number in range(STEPS):
        holding.give(problem.gradients(number))
        optimizer.step()
    return optimizer


def alone_with_rule(rule: str, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Weights and state of one process, by name; a rank computes them once for all of its tests."""
    layout = ("shard_state", "memory_budget_mb")
    return _alone(rule, tuple((key, value) for key, value in settings.items() if key not in layout))


@functools.cache
def _alone(rule: str, settings: tuple[tuple[str, Any], ...]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    holding = problem.holding("local")
    optimizer = train_in(holding, rule, dict(settings))
    state = {name: dict(optimizer.state[p]) for name, p in holding.tensors.items()}
    return {name: p.detach() for name, p in holding.tensors.items()}, state


def differing_blocks(optimizer: mm.Muon, rule: str, settings: dict[str, Any]) -> list[str]:
    """What this rank stores of weights and state, by the layouts' own blocks, against one process."""
    weights, state = alone_with_rule(rule, settings)
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
    explanation = optimizer.explain()
    assert sum(row.state for row in explanation.rows) == explanation.state_bytes > 0
    promise, did = problem.promised_and_counted(optimizer)
    return promise == did


BF16: dict[str, Any] = {"compute_dtype": torch.bfloat16, "memory_budget_mb": 0.08}
ROUNDS = {"memory_budget_mb": 0.016}  # sums are taken when the owner's replica has its shards, before others have
SHARED = {"shard_state": True}
LAYOUTS = [
    *problem.LAYOUTS,
    *layouts.MESHES,
    *(f"declared {name}" for name in layouts.MESHES),
    *("flat", "flat of tensor parallel"),
]
TRIED: list[tuple[int, str, str, dict[str, Any]]] = [
    *((4, layout, "both", {}) for layout in ("ddp", "fsdp", "shard1")),
    *((4, layout, "adamuon", {}) for layout in ("fsdp", "shard-last")),
    (4, "shard1", "normuon", BF16),
    (4, "fsdp", "adamuon", BF16),
    (4, "fsdp", "cautious", {"compute_dtype": torch.bfloat16}),
    (2, "shard1", "rows", {"compute_dtype": torch.float64}),
    (2, "fsdp", "adamuon", {"state_dtype": torch.float64}),
    (2, "shard-last", "adamuon", {"state_dtype": torch.bfloat16}),
    # Of AdaMuon it fails if a sum is taken over a shard, or if copies of an element count.
    *((4, mesh, "both", {}) for mesh in ("hsdp, shard 1", "declared fsdp over colwise", "strided alone", "experts")),
    *((4, mesh, "adamuon", {}) for mesh in ("declared replicate inside", "fsdp over colwise", "four axes")),
    (4, "hsdp", "adamuon", ROUNDS),
    (4, "all replicated", "hyperball", ROUNDS),
    (4, "hsdp, shard 1", "normuon", SHARED),
    (4, "three axes", "adamuon", SHARED),
    (4, "ddp", "both", SHARED),
    (4, "flat", "normuon", {}),
    (4, "flat", "hyperball", {}),
    *((4, "flat of tensor parallel", rule, {}) for rule in ("normuon", "adamuon", "soap", "gram")),
    *((4, layout, "soap", {}) for layout in ("ddp", "shard-last", "fsdp over colwise")),
    (2, "fsdp", "soap", {}),
    *((4, layout, "gram", {}) for layout in ("ddp", "shard1", "flat", "fsdp over colwise", "experts")),
    (2, "fsdp", "gram", {}),
]


@pytest.mark.parametrize(
    ("ranks", "layout", "rule", "settings"),
    cases(
        *TRIED,
        of=[
            *itertools.product((4,), LAYOUTS, ("normuon", "both", "adamuon"), ({}, BF16)),
            *itertools.product((4,), ("hsdp", "replicate inside", "experts"), ("adamuon", "hyperball"), (ROUNDS,)),
            *itertools.product((4,), ("hsdp", "replicate inside", "all replicated"), ("normuon", "adamuon"), (SHARED,)),
            *((4, layout, "gram", {}) for layout in ("shard-last", "hsdp, shard 1", "four axes")),
        ],
    ),
)
@on_ranks()
def test_bit_for_bit(layout: str, rule: str, settings: dict[str, Any]) -> None:
    optimizer = train_in(problem.holding(layout), rule, settings)
    assert differing_blocks(optimizer, rule, settings) == []
    assert promised(optimizer)


@pytest.mark.parametrize(
    ("layout", "rule", "settings"),
    [("fsdp over colwise", "normuon", {}), ("hsdp, shard 1", "adamuon", SHARED), ("strided alone", "adamuon", {})],
)
@on_ranks(4)
def test_what_is_kept_is_a_dtensor_like_any_other(layout: str, rule: str, settings: dict[str, Any]) -> None:
    """What torch itself makes of it: whole tensors."""
    holding = problem.holding(layout)
    optimizer = train_in(holding, rule, settings)
    weights, state = alone_with_rule(rule, settings)
    expected = weights | {f"{name}.{key}": value for name in state for key, value in state[name].items()}
    assert problem.differing(holding.whole(optimizer), expected) == []


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
@on_ranks(2)
def test_matrices_that_are_left_alone_keep_everything(layout: str, waits: bool, rule: str) -> None:
    """Without waiting, as on CUDA, every write is masked by the flags on the device.

    Matrices have no gradient or a zero one, in turns: they keep all that their rule keeps.
    """
    results = []
    for holding in (problem.holding(layout), problem.holding("local")):
        optimizer = mm.Muon(ruled(holding.groups, rule), **problem.SETTINGS, **FP32, **holding.settings)
        optimizer._runtime.driver = Driver(waits or bool(results))
        for number in range(STEPS):
            kinds = {name: (order + number) % 3 for order, name in enumerate(problem.PARAMETERS)}
            gradients = problem.gradients(number)
            holding.give({name: None if kinds[name] == 2 else gradients[name] * kinds[name] for name in gradients})
            optimizer.step()
        results.append(holding.whole(optimizer))
    assert problem.differing(*results) == []


# ------------------------------------------------------------------ checkpoints


def build_ruled(layout: str, rule: str = "normuon") -> tuple[nn.Module, mm.Muon]:
    """``-shared`` after the name of a layout stores momentum, and what follows it, sharded over its replicas."""
    model, group = problem.hold(layout.removesuffix("-shared"), problem.initial())
    settings = {**problem.SETTINGS, **FP32, "shard_state": layout.endswith("-shared"), "process_group": group}
    return model, mm.Muon(ruled(problem.groups(model), rule), **settings)


def save_in_the_middle(layout: str, path: str, how: saving.How, rule: str) -> None:
    model, optimizer = build_ruled(layout, rule)
    problem.advance(model, optimizer, 0, 2)
    saving.save(path, model, optimizer, how)


def resume_in_the_middle(layout: str, path: str, how: saving.How, rule: str) -> list[str]:
    model, optimizer = build_ruled(layout, rule)
    saving.load(path, model, optimizer, how)
    problem.advance(model, optimizer, 2, STEPS)
    return differing_blocks(optimizer, rule, FP32)


RESHARDINGS = {
    "4-to-2": ((4, "fsdp"), (2, "fsdp")),
    "other-dim": ((2, "fsdp"), (4, "shard1")),
    "shared-to-fsdp": ((4, "ddp-shared"), (2, "fsdp")),
    "to-ddp": ((4, "shard-last"), (2, "ddp")),
    "from-one": ((1, "ddp"), (3, "fsdp")),
    "to-one": ((2, "ddp"), (1, "ddp")),
    "3-to-2": ((3, "fsdp"), (2, "ddp")),
    "2-to-3": ((2, "shard-last"), (3, "replicate")),
}


@pytest.mark.parametrize(
    ("resharding", "how", "rule"),
    cases(
        ("other-dim", "torch's", "normuon"),
        ("shared-to-fsdp", "flat", "adamuon"),
        ("4-to-2", "torch's", "hyperball"),
        *((resharding, "ours", "gram") for resharding in ("from-one", "to-one", "3-to-2", "2-to-3")),
        ("3-to-2", "ours", "soap"),
        of=[
            *itertools.product([*RESHARDINGS][:4], ("torch's", "flat"), ("normuon", "adamuon", "hyperball")),
            ("2-to-3", "ours", "soap"),
        ],
    ),
)
def test_resharding_continues_bit_for_bit(workers, tmp_path: Path, resharding: str, how: str, rule: str) -> None:
    (ranks, layout), (later, other) = RESHARDINGS[resharding]
    workers(ranks).run(save_in_the_middle, layout, str(tmp_path / "saved"), how, rule)
    assert workers(later).run(resume_in_the_middle, other, str(tmp_path / "saved"), how, rule) == [[]] * later


@pytest.mark.parametrize(
    ("layout", "rule"), [("shard1", "normuon"), ("ddp-shared", "normuon"), ("ddp", "gram"), ("shard1", "gram")]
)
@on_ranks(2)
def test_a_state_dict_of_each_rank_brings_it_back(layout: str, rule: str) -> None:
    """Into an optimizer that has not met the other ranks yet."""
    model, optimizer = build_ruled(layout, rule)
    problem.advance(model, optimizer, 0, 2)
    fresh, other = build_ruled(layout, rule)
    fresh.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    problem.advance(fresh, other, 2, STEPS)
    assert differing_blocks(other, rule, FP32) == []


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("missing", "needed 'row_second_moment'"),
        ("shape", r"needed a DTensor of shape \(66, 1\)"),
        ("element", "a negative number in second_moment"),
        ("negative", "a negative number in row_second_moment"),
    ],
)
@on_ranks(2)
def test_what_does_not_fit_is_refused(kind: str, pattern: str) -> None:
    model, optimizer = build_ruled("shard0", "adamuon" if kind == "element" else "normuon")
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
    with pytest.raises(mm.StateError, match=pattern):
        optimizer.load_state_dict(saved)


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


@on_ranks(2, timeout=180.0)
def test_the_rule_of_the_page_is_proved() -> None:
    """The rule that docs/rules.md shows."""
    model = nn.ModuleDict({"embed": nn.Embedding(4, 4), "linear": nn.Linear(4, 4)})
    for _ in run_page("docs/rules.md", {"model": model}, {}, {}, {}):
        pass
    prove_rule("even-rows", examples=FEW, seed=1, settings={"row_beta": 0.5})
    prove_rule("as-large-as-the-weights", examples=FEW, seed=1)
    prove_rule("lion", examples=FEW, seed=3)
    prove_rule("sign-sgd", examples=FEW, seed=5, settings={"decay_mode": "cautious"})


PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


def installed(folder: Path, name: str, source: str, *entry_points: str) -> None:
    """A module and its entry points, as an installed package has them."""
    (folder / f"{name}.py").write_text(source)
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join(["[muonmesh.rules]", *entry_points]))


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
    page = (Path(__file__).parents[2] / "docs/rules.md").read_text()
    (rule,) = [block for block in PYTHON.findall(page) if '"even-rows")' in block]
    assert len(rule.splitlines()) < 30
    source = "import muonmesh as mm\n" + rule.replace('"even-rows"', '"packaged-rows"')
    entry_points = [f"{name}-rows = even_rows:EvenRows" for name in ("packaged", "other")]
    installed(tmp_path, "even_rows", source, *entry_points, "no-rows = even_rows:NotThere")
    assert workers(2).run(from_a_package, str(tmp_path)) == ["even_rows"] * 2


@register_rule("test-sees-its-rank")
@dataclass(frozen=True)
class SeesItsRank(mm.MuonRule):
    def whole(self, update: Tensor, state: Any) -> Tensor:
        return update * (1 + dist.get_rank())


@register_rule("test-scales-by-rank")
@dataclass(frozen=True)
class ScalesByRank(mm.MuonRule):
    """What a rank applies to what it stores then agrees with one process on this rank, and with no other rank."""

    def scale(self, rows: int, cols: int) -> float:
        return 1.0 + dist.get_rank()


@register_rule("test-elements-by-rank")
@dataclass(frozen=True)
class ElementsByRank(mm.ElementwiseRule):
    def update(self, gradient: Tensor, state: Any, count: Tensor) -> Tensor:
        return gradient.sign() * (1.0 + dist.get_rank())


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


@register_rule("test-divides")
@dataclass(frozen=True)
class Divides(mm.MuonRule):
    def whole(self, update: Tensor, state: Any) -> Tensor:
        return update / update.norm(dim=-1, keepdim=True)  # of a row of zeros too


@register_rule("test-writes")
@dataclass(frozen=True, slots=True)
class Writes(mm.ElementwiseRule):
    def update(self, gradient: Tensor, state: Any, count: Tensor) -> Tensor:
        return gradient.mul_(0.5)


@register_rule("test-sees-the-shape")
@dataclass(frozen=True)
class SeesTheShape(mm.MuonRule):
    def apply(self, weights: Tensor, update: Tensor, size: Any, state: Any, sums: Any = ()) -> None:
        super().apply(weights, update * (2 if weights.ndim == 1 else 1), size, state)


@register_rule("test-sees-many")
@dataclass(frozen=True)
class SeesMany(mm.MuonRule):
    def apply(self, weights: Tensor, update: Tensor, size: Any, state: Any, sums: Any = ()) -> None:
        super().apply(weights, update * (2 if weights.numel() > 32768 else 1), size, state)


@register_rule("test-grows")
@dataclass(frozen=True)
class Grows(mm.MuonRule):
    orthogonalizes: ClassVar[bool] = False


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
@on_ranks()
def test_a_rule_is_proved_on_generated_layouts(rule: str, examples: int) -> None:
    prove_rule(rule, examples=examples, settings=PROVED[rule])


@pytest.mark.parametrize(
    ("rule", "pattern"),
    [
        ("test-sees-its-rank", "weights differ from one process"),
        ("test-normalises-gradients", r"NormalisesGradients\.fold: .* belongs into whole"),
        ("test-sees-the-shape", r"SeesTheShape\.apply: .* other bits than as a matrix of .*, in any shape"),
        ("test-sees-many", r"SeesMany\.apply: 40000 elements together have other bits"),
        ("test-centres-weights", r"CentresWeights\.apply: .* belongs into whole"),
        ("test-normalises-summands", r"NormalisesSummands\.summands: .* belongs into whole"),
        ("test-counts-twice", r"CountsTwice\.summands: .* written"),
        ("test-elements-by-their-norm", r"ElementsByTheirNorm\.step: .* element by element"),
        ("test-divides", "weights are not finite in one process, as after a division"),
        ("test-writes", "Writes: the gradient has been written"),
        ("test-grows", r"Grows\.scale_invariant: True, but gradients times 1024 change"),
        ("test-scales-by-rank", "one process has other results on rank 1 than on rank 0"),
        ("test-elements-by-rank", "one process has other results on rank 1 than on rank 0"),
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


def cost(layout: str) -> tuple[list[Any], int, int]:
    """What a step under the rule sent, and one under Muon; how many numbers are kept here, and of all matrices."""
    sent, stored, whole = [], 0, 0
    for rule in ("gram", "cautious"):
        model, optimizer = build_ruled(layout, rule)
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
    return prove_rule(GramAverage, examples=FEW, seed=1)  # of more than one layout


def test_prove_rule_shows_it(workers) -> None:
    """With steps that leave the matrix alone, on hosts that wait for the flags and on such as do not."""
    (report,) = set(workers(3).run(proved_kept))
    assert re.search(rf": 3 ranks have the bits of one process in all {FEW} cases \(.* on a mesh, .* shapes\)$", report)


@on_ranks(2)
def test_a_state_dict_comes_back_where_ranks_have_different_matrices() -> None:
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

    def train_in(parameters: list[nn.Parameter], optimizer: mm.Muon, seed: int) -> None:
        torch.manual_seed(seed)
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
            parameter.grad.to_local().normal_()
        optimizer.step()

    (parameters, optimizer), (others, fresh) = build_half(), build_half()
    train_in(parameters, optimizer, 1)
    owned = [optimizer.state[parameter]["row_gram"].numel() for parameter in parameters[:3]]
    assert all(owned) if dist.get_rank() == 0 else not any(owned)
    with torch.no_grad():
        for other, parameter in zip(others, parameters, strict=True):
            other.copy_(parameter)
    fresh.load_state_dict(optimizer.state_dict())
    train_in(parameters, optimizer, 2)
    train_in(others, fresh, 2)
    assert all(torch.equal(p.to_local(), other.to_local()) for p, other in zip(parameters, others, strict=True))


@on_ranks(2)
def test_torchs_functions_refuse_what_they_would_keep_one_ranks_of() -> None:
    model, optimizer = build_ruled("fsdp", "gram")
    problem.advance(model, optimizer, 0, 1)
    with pytest.raises(mm.StateError, match=r"'gram' of rule 'gram-average'.*muonmesh\.checkpoint\.save"):
        get_optimizer_state_dict(model, optimizer)


def grown() -> list[Any]:
    """A larger matrix that joins later would be given away first, and so move the others."""
    torch.manual_seed(0)
    first = [nn.Parameter(torch.randn(6, 10)) for _ in range(3)]
    larger = nn.Parameter(torch.randn(30, 40))
    settings = {"algorithm": "gram-average", "lr": 0.01}
    optimizer = mm.Muon([{"params": first, **settings}], process_group="world")

    def train_in(parameters: list[nn.Parameter]) -> dict[str, int]:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter) * torch.arange(parameter.shape[1])
        optimizer.step()
        plan = optimizer._runtime.connected.plan
        return {plan.parameters[assignment.parameter].name: assignment.owner for assignment in plan.assignments}

    before = train_in(first)
    optimizer.add_param_group({"params": [larger], **settings, "param_names": ["late"]})
    after = train_in([*first, larger])
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


# ------------------------------------------------------------------ a rule in a file of its own


@pytest.fixture
def shampoo(tmp_path: Path) -> str:
    """The folder of the rule of examples/shampoo.py, installed."""
    source = (Path(__file__).parents[2] / "examples/shampoo.py").read_text()
    installed(tmp_path, "shampoo", source, "shampoo = shampoo:Shampoo")
    return str(tmp_path)


@on_ranks(3)
def test_shampoo_in_one_file_gives_the_same_bits_in_every_layout(shampoo: str) -> None:
    sys.path.insert(0, shampoo)
    try:
        prove_rule("shampoo", examples=FEW, seed=6, settings={"shampoo_every": 2})
        assert rules.RULES["shampoo"].__module__ == "shampoo"
    finally:
        sys.path.remove(shampoo)


def test_shampoo_is_its_formulas(shampoo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of facebookresearch/optimizers, in fp64, the roots by an SVD; Adam's step until the first turn."""
    monkeypatch.syspath_prepend(shampoo)
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
