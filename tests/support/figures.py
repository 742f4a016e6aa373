"""Steps whose figures a dry run models and a GPU measures: the same code for both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import muonmesh as mm
from tests.device.dry_run import DryRun, dry_run

GPT2 = [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 3
LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]


def bag(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Parameters that lie nowhere."""
    model = nn.Module()
    for number, shape in enumerate(shapes):
        weight = nn.Parameter(torch.empty(shape, device="meta", dtype=dtype))
        model.register_parameter(f"weight{number}", weight)
    return model


def optimizer_of(model: nn.Module, **settings: Any) -> mm.Muon:
    if isinstance(model, Model):
        return mm.from_model(model, lr=0.02, **settings)
    return mm.Muon(list(model.named_parameters()), lr=0.02, **settings)


class Model(nn.Module):
    """Matrices and vectors for both halves."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embed = nn.Embedding(50, 64, dtype=dtype)
            self.layers = nn.ModuleList(nn.Linear(64, 64, dtype=dtype) for _ in range(3))


def clipped(policy: Any, skip_above: float | str = 10.0) -> Callable[[mm.Muon], None]:
    def step(optimizer: mm.Muon) -> None:
        optimizer.clip_grad_norm_(1.0, policy=policy, skip_above=skip_above)
        optimizer.step()

    return step


def without_a_gradient(optimizer: mm.Muon) -> None:
    parameter = optimizer.param_groups[0]["params"][0]
    gradient, parameter.grad = parameter.grad, None
    optimizer.step()
    parameter.grad = gradient


def scaled(optimizer: mm.Muon) -> None:
    """As GradScaler does it."""
    device = optimizer.param_groups[0]["params"][0].device
    optimizer.grad_scale = torch.full((), 2.0, device=device)
    optimizer.found_inf = torch.zeros((), device=device)
    optimizer.step()


def measured(optimizer: mm.Muon) -> None:
    """Every step, as a logger would; nothing is read."""
    optimizer.step()
    for name, figure in optimizer.metrics().items():
        assert isinstance(figure, Tensor), name
        assert figure.is_cuda, name
        assert not figure.ndim, name


STEPS: dict[str, Callable[[mm.Muon], Any]] = {
    "step": lambda optimizer: optimizer.step(),
    "missing gradient": without_a_gradient,
    "grad scaler": scaled,
    "metrics": measured,
    **{f"clip {policy}": clipped(policy) for policy in ("adamw_only", "all", "separate")},
    "skip by the mean": clipped("separate", "4x"),
}


# ------------------------------------------------------------------ modelled beside measured


class Row(NamedTuple):
    """What one step takes."""

    launches: int
    peak_mib: float
    milliseconds: float


@dataclass(frozen=True)
class Case:
    """A step of one process.

    Attributes:
        shapes: Of the parameters, fp32.
        step: What is called with the optimizer.
    """

    shapes: list[tuple[int, ...]]
    step: Callable[[mm.Muon], Any]

    def modelled(self) -> DryRun:
        """The third step, on fake tensors."""
        return dry_run(bag(*self.shapes), optimizer_of, step=self.step)

    def optimizer(self, device: str) -> mm.Muon:
        """An optimizer of real parameters with gradients."""
        model = bag(*self.shapes).to_empty(device=device)
        for parameter in model.parameters():
            parameter.data.normal_()
            parameter.grad = torch.randn_like(parameter)
        return optimizer_of(model)


CASES = {
    "3 layers of GPT-2 small": Case(GPT2, STEPS["step"]),
    "1,000 of 64 × 64": Case([(64, 64)] * 1000, STEPS["step"]),
    "a layer of Llama 8B": Case(LLAMA, STEPS["step"]),
    "GPT-2, clipped": Case(GPT2, STEPS["clip all"]),
    "GPT-2, skipped by the mean": Case(GPT2, STEPS["skip by the mean"]),
    "GPT-2, under a GradScaler": Case(GPT2, STEPS["grad scaler"]),
    "GPT-2, metrics every step": Case(GPT2, STEPS["metrics"]),
}
"""What `make test-gpu` measures. Layouts of several ranks are modelled only."""


def row(run: DryRun) -> Row:
    """Return the figures of a dry run."""
    return Row(run.launches, run.peak_bytes / 2**20, run.seconds * 1e3)


def table(rows: Mapping[str, tuple[Row, Row | None]]) -> str:
    """Return modelled and measured figures beside each other as a Markdown table."""
    lines = [
        "| | launches, modelled | measured | peak MiB, modelled | measured | ms, modelled for an H100 | measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (modelled, measured) in rows.items():
        cells = [f"{modelled.launches:,}", "", f"{modelled.peak_mib:,.0f}", "", f"{modelled.milliseconds:.2f}", ""]
        if measured is None:
            cells[1::2] = ["not measured", "", ""]
        else:
            cells[1::2] = [f"{measured.launches:,}", f"{measured.peak_mib:,.0f}", f"{measured.milliseconds:.2f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
