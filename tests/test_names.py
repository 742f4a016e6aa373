"""Canonical names: what wrappers add goes, what a model calls its own stays, in names and in groups alike."""

from __future__ import annotations

import re
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import muonmesh as mm
from muonmesh.names import canonical_name, names_matching, patterns

COVERS = (
    "names.canonical_name",
    "names.names_matching",
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16)])
        self.head = nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


class FabricModule(nn.Module):
    """The children of Lightning Fabric 2.6's `_FabricModule`: what it calls, and what it was given, which is shared."""

    def __init__(self, forward_module: nn.Module, original_module: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = original_module


def fabric(model: nn.Module) -> nn.Module:
    return FabricModule(nn.DataParallel(model), model)


def fabric_alone(model: nn.Module) -> nn.Module:
    return FabricModule(model, model)


def fabric_original_first(model: nn.Module) -> nn.Module:
    wrapper = FabricModule(nn.DataParallel(model), model)
    wrapper._modules = dict(reversed(wrapper._modules.items()))
    return wrapper


def float16_module(model: nn.Module) -> nn.Module:
    """What Megatron puts between its DistributedDataParallel and the model."""

    class Float16Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

    return Float16Module()


WRAPPERS: list[Any] = [
    torch.compile,
    nn.DataParallel,
    checkpoint_wrapper,
    AveragedModel,
    fabric,
    fabric_alone,
    fabric_original_first,
    float16_module,
    lambda model: torch.compile(fabric(torch.compile(model))),
    lambda model: fabric(AveragedModel(model)),
]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_wrappers_leave_no_trace_in_names_groups_and_optimizers(wrap: Any) -> None:
    model = Net()
    plain = mm.split_params(model)
    names = [name for name, _ in model.named_parameters()]
    wrapped = wrap(model)
    assert [canonical_name(name) for name, _ in wrapped.named_parameters()] == names
    groups = mm.split_params(wrapped)
    assert [(g["name"], g["param_names"], g["reasons"]) for g in groups] == [
        (g["name"], g["param_names"], g["reasons"]) for g in plain
    ]
    held = [group["param_names"] for group in mm.Muon(groups).param_groups]
    assert held == [group["param_names"] for group in plain]


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("_forward_module.module.layers.0.weight", "layers.0.weight"),
        ("_original_module.layers.0.weight", "layers.0.weight"),
        ("module._forward_module.module._orig_mod.weight", "weight"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.weight", "layers.0.weight"),
        # a child that a model calls so itself, anywhere but in front
        ("encoder.module.weight", "encoder.module.weight"),
        # peft's are no wrapper: its checkpoints have these names
        ("base_model.model.layers.0.lora_A.default.weight", "base_model.model.layers.0.lora_A.default.weight"),
        ("module.base_model.model.weight", "base_model.model.weight"),
        ("module", "module"),
        ("_forward_module", "_forward_module"),
    ],
)
def test_canonical_name(name: str, canonical: str) -> None:
    assert canonical_name(name) == canonical
    assert canonical_name(canonical) == canonical


def test_two_parameters_of_one_name_are_refused() -> None:
    """Ranks tell each other about parameters by name and holders, so one would be taken for the other."""
    model = nn.ModuleDict(
        {"module": nn.ModuleDict({"a": nn.Linear(4, 4)}), "a": nn.Linear(4, 4), "head": nn.Linear(4, 2)}
    )
    with pytest.raises(ValueError, match=r"^a\.weight: found two parameters of this name.*param_names"):
        mm.from_model(model)
    groups = mm.split_params(model)
    for group in groups:
        group["param_names"] = [f"{group['name']}.{i}" for i in range(len(group["params"]))]
    optimizer = mm.Muon(groups)
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


# ------------------------------------------------------------------ patterns

PARTS = st.sampled_from(["0", "1", "12", "a", "a.0", "b", "w", "w(1)"])


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(st.dictionaries(st.lists(PARTS, min_size=1, max_size=4).map(".".join), st.integers(0, 2), min_size=1))
def test_each_pattern_means_the_parameters_of_its_row_and_no_others(values: dict[str, int]) -> None:
    rows = patterns(values, values)
    met: list[str] = []
    for key, value in rows.items():
        meant = names_matching(key, values)
        assert {values[name] for name in meant} == {value}
        met += meant
    assert sorted(met) == sorted(values)


def test_the_key_of_equal_layers_has_a_star_for_what_differs_alone() -> None:
    """The layers of a Sequential in each block have numbers too, by which they are told apart."""
    names = [f"h.{block}.mlp.{layer}.weight" for block in (0, 1, 12) for layer in (0, 2)]
    assert patterns({name: name.split(".")[3] for name in names}, names) == {
        "h.*.mlp.0.weight": "0",
        "h.*.mlp.2.weight": "2",
    }
    others = [*names, "h.0.x.mlp.2.weight", "h.0.mlp.2.weight.g"]
    assert names_matching("h.*.mlp.2.weight", others) == names[1::2]  # it is no expression
    some = {name: True for name in names if name.split(".")[1] != "12"}
    assert patterns(some, others) == {r"^h\.(0\.mlp\.0|0\.mlp\.2|1\.mlp\.0|1\.mlp\.2)\.weight$": True}


class Deep(nn.Module):
    def __init__(self, widths: list[int], frozen: list[bool]) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, w), "norm": nn.LayerNorm(8)}) for w in widths)
        self.head = nn.Linear(8, 9, bias=False)
        for block, at_rest in zip(self.blocks, frozen, strict=False):
            block["norm"].requires_grad_(not at_rest)  # type: ignore[index]


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.sampled_from([8, 16]), min_size=1, max_size=4), st.lists(st.booleans(), max_size=4))
def test_each_pattern_that_is_printed_can_be_pasted(widths: list[int], frozen: list[bool]) -> None:
    groups = mm.split_params(Deep(widths, frozen), overrides={"blocks.0.up.weight": "adamw"})
    of = {name: group for group in groups for name in group["param_names"]}
    lines = [re.split("  +", line) for line in str(groups).splitlines()[1:]]
    rows = [line for line in lines if len(line) == 6]
    assert len({row[0] for row in rows}) == len(rows)
    assert sum(int(row[1]) for row in rows) == len(of)
    overrides = {key: {"algorithm": "muon" if name == "muon" else "adamw"} for key, _, _, name, *_ in rows}
    pasted = mm.split_params(Deep(widths, frozen), overrides=overrides)
    assert [group["param_names"] for group in pasted] == [group["param_names"] for group in groups]
    for key, count, *_ in rows:
        one = mm.split_params(Deep(widths, frozen), overrides={key: {"lr": 0.5}})
        assert sum(len(group["params"]) for group in one if group.get("lr") == 0.5) == int(count)
