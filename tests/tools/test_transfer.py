"""What carries over from a small model to a wider one: against singular values of what real steps do to the weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import muonmesh as mm
from muonmesh.tools.cli.app import app
from tests.reference import split


class Block(nn.Module):
    """Attention with fewer keys than queries, in one weight, and an MLP."""

    muonmesh_matrices: dict[str, Any]

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 2 * width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)
        self.muonmesh_matrices = {"qkv.weight": ("rows", width, width // 2, width // 2)}


class Model(nn.Module):
    def __init__(self, width: int, layers: int = 2, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def changes(optimizer: mm.Muon) -> dict[str, float]:
    """Take a step, and return by matrix its spectral norm over √(rows/cols); of tables and vectors its RMS."""
    found: dict[str, float] = {}
    for group in optimizer.param_groups:
        specs = group.get("matrices") or ["whole"] * len(group["params"])
        for name, weight, spec in zip(group["param_names"], group["params"], specs, strict=True):
            # AdamW's first step is the sign of the gradient: of a gradient of rank one, as large as it may be.
            rows, cols = torch.randn(len(weight)).sign(), torch.randn(weight[0].numel()).sign()
            weight.grad = torch.outer(rows, cols) if "head" in name else torch.randn(weight.shape)
            found[name] = spec
    before = {
        n: p.detach().double()
        for g in optimizer.param_groups
        for n, p in zip(g["param_names"], g["params"], strict=True)
    }
    optimizer.step()
    for group in optimizer.param_groups:
        for name, weight in zip(group["param_names"], group["params"], strict=True):
            spec = found.pop(name)
            moved = weight.detach().double() - before[name]
            if moved.ndim < 2 or "embed" in name:
                found[name] = float(moved.square().mean().sqrt())
                continue
            for number, matrix in enumerate(split(moved, spec)):
                found[f"{name} {number}"] = float(torch.linalg.svdvals(matrix)[0]) / math.sqrt(
                    matrix.shape[0] / matrix.shape[1]
                )
    return found


SETTINGS: dict[str, Any] = {
    "lr": 2e-3,
    "compute_dtype": torch.float32,
    "ns_coefficients": [(1.5, -0.5)] * 40,
}  # to the polar factor


@pytest.mark.parametrize("mode", ["match_rms_adamw", "original", "spectral", "unit_rms_norm", "none"])
def test_with_what_it_says_a_step_has_the_spectral_norm_that_the_condition_asks_for(mode: str) -> None:
    torch.manual_seed(0)
    settings = {**SETTINGS, "scale_mode": mode, "muon": {"lr": 0.03}, "weight_decay": 0.0}
    small, large = Model(24), Model(96)
    found = mm.transfer(mm.from_model(small, **settings), mm.from_model(large, **settings))
    as_it_is = changes(mm.from_model(Model(96), **settings))
    carried = changes(mm.from_model(large, **settings, overrides=found.overrides))
    before = changes(mm.from_model(small, **settings))
    assert carried == pytest.approx(before, rel=2e-3)
    unequal = {name for name, value in as_it_is.items() if value != pytest.approx(before[name], rel=2e-3)}
    assert "head.weight 0" in unequal
    assert ("layers.0.up.weight 0" in unequal) == (mode in ("match_rms_adamw", "spectral"))
    rates = {row.parameter: row.lr for row in found.rows}
    assert rates["head.weight"] == pytest.approx(2e-3 / 4)  # μP: AdamW's rate of an output layer ∝ 1/width
    assert rates["embed.weight"] == rates["norm.weight"] == 2e-3


def test_decay_stays_the_same_fraction_of_the_weights() -> None:
    torch.manual_seed(0)
    settings = {**SETTINGS, "weight_decay": 0.2}
    models = {width: Model(width) for width in (24, 96)}
    found = mm.transfer(*(mm.from_model(model, **settings) for model in models.values()))
    shrunk: dict[int, Tensor] = {}
    for width, model in models.items():
        weight, after = model.layers[1].down.weight, []
        start = weight.detach().clone()
        weight.grad = torch.randn_like(weight)
        for decay in (1.0, 0.0):
            overrides = found.overrides if width == 96 else {}
            own = {name: {**said, "weight_decay": said["weight_decay"] * decay} for name, said in overrides.items()}
            given = {**settings, "weight_decay": 0.2 * decay, "overrides": own}
            with torch.no_grad():
                weight.copy_(start)
            mm.from_model(model, **given).step()
            after.append(weight.detach().double())
        shrunk[width] = ((after[1] - after[0]) / start.double()).median()
    assert float(shrunk[24]) == pytest.approx(2e-3 * 0.2, rel=1e-3)
    assert float(shrunk[96]) == pytest.approx(float(shrunk[24]), rel=1e-3)


def test_what_is_said_of_sizes_is_what_weights_and_steps_have() -> None:
    torch.manual_seed(0)
    small, large = Model(24), Model(96, layers=3)
    settings = {**SETTINGS, "weight_decay": 0.1}
    optimizer = mm.from_model(large, **settings)
    found = mm.transfer(mm.from_model(small, **settings), optimizer)
    rows = {row.parameter: row for row in found.rows}
    assert rows["layers.*.up.weight"].names == tuple(f"layers.{i}.up.weight" for i in range(3))
    weight = large.layers[0].up.weight
    before = weight.detach().double()
    assert rows["layers.*.up.weight"].large.initial == pytest.approx(float(before.square().mean().sqrt()), rel=1e-5)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    moved = weight.detach().double() - before * (1 - 2e-3 * 0.1)
    size = rows["layers.*.up.weight"].large
    assert size.spectral == pytest.approx(float(torch.linalg.svdvals(moved)[0]), rel=1e-3)
    assert size.rms == pytest.approx(float(moved.square().mean().sqrt()), rel=1e-3)
    # An initial matrix of these standard deviations has a spectral norm ∝ √(rows/cols) at both widths.
    for name in ("up", "down", "qkv"):
        row, norms = rows[f"layers.*.{name}.weight"], []
        for size, std in ((row.small, 1.0), (row.large, row.init)):
            drawn = torch.randn(size.shape, dtype=torch.float64) * std
            norms.append(float(torch.linalg.svdvals(drawn)[0]) / math.sqrt(size.shape[0] / size.shape[1]))
        assert norms[1] == pytest.approx(norms[0], rel=0.15)


def test_layers_by_their_kind_tied_embeddings_and_what_is_not_known() -> None:
    with torch.device("meta"):
        small, large = Model(24, tied=True), Model(96, layers=5, tied=True)
        large.more = nn.Linear(96, 96)
    found = mm.transfer(mm.from_model(small), mm.from_model(large))
    text = str(found)
    assert "layers.*.qkv.weight (5)" in text
    assert "also the output layer: multiply the logits by 0.25" in text
    assert found.new == ("more.weight", "more.bias")
    assert "nothing is known: more.weight, more.bias" in text
    again = mm.transfer(mm.from_model(small), mm.from_model(large, overrides=found.overrides))
    assert again.overrides == {}
    unknown = mm.transfer(mm.from_model(small, rule="hyperball"), mm.from_model(large, rule="hyperball"))
    assert "no change, the size of its step is not known" in str(unknown)
    with pytest.raises(TypeError, match=r"large: found a Model; needed a muonmesh\.Muon\. Write transfer\("):
        mm.transfer(mm.from_model(small), large)  # type: ignore[arg-type]


def test_a_rate_that_a_scheduler_has_changed_counts_as_it_was() -> None:
    with torch.device("meta"):
        small, large = Model(24), Model(96)
    optimizer = mm.from_model(small, lr=1e-3)
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-6)
    assert optimizer.param_groups[0]["lr"] < 1e-8
    rows = mm.transfer(optimizer, mm.from_model(large, lr=5.0)).rows
    assert {row.parameter: row.lr for row in rows}["embed.weight"] == 1e-3


SCRIPT = """
import torch, muonmesh

def net(width):
    with torch.device("meta"):
        return torch.nn.ModuleDict({"hidden": torch.nn.Linear(width, width), "head": torch.nn.Linear(width, 8)})

def small():
    return net(16)

def large():
    return net(64)

def made():
    model = net(64)
    return model, muonmesh.from_model(model, lr=0.5)

def nothing():
    return None
"""


def test_the_command(tmp_path: Path) -> None:
    script = tmp_path / "carried.py"
    script.write_text(SCRIPT)

    def run(*line: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["transfer", *line])
        assert result.exit_code == code, result.output
        return result.output

    small, large = f"{script}:small", f"{script}:large"
    assert "lr=0.0005" in run(small, large, "--lr", "0.001")
    told = json.loads(run(small, large, "--scale-mode", "unit_rms_norm", "--json"))
    row = next(row for row in told["rows"] if row["parameter"] == "hidden.weight")
    assert (row["lr"], row["large"]["initial"]) == (3e-4, None)
    assert '"lr": 0.5' in run(small, f"{script}:made", "--json")
    assert "model.layers.*.mlp.up_proj.weight (8)" in run("nano", "medium")
    for line in ((small, f"{script}:nothing"), (small, "no-such-model"), (small, large, "--scale-mode", "muon")):
        assert "muonmesh transfer: " in run(*line, code=2)


def test_models_without_a_common_name_are_refused() -> None:
    large = mm.from_model(nn.ModuleDict({"other": nn.Linear(8, 16)}))
    with pytest.raises(ValueError, match=r"transfer: found no parameter of the large model.*needed models whose param"):
        mm.transfer(mm.from_model(Model(8)), large)
