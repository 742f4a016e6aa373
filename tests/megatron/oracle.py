"""One process that trains the whole model: the judge of every way of cutting it up, with groups written by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import muonmesh as mm

# The end of a name: how the whole parameter splits into matrices. 4 heads of 8 in 2 query groups.
MATRICES: dict[str, Any] = {
    "linear_qkv.weight": ("interleaved", (16, 8, 8), 0),
    "linear_proj.weight": "whole",
    "linear_fc1.weight": "halves",
    "linear_fc2.weight": "whole",
    "eh_proj.weight": "whole",
    "linear_q_down_proj.weight": "whole",
    "linear_q_up_proj.weight": "whole",
    "linear_kv_down_proj.weight": ("rows", 8, 4),
    "linear_kv_up_proj.weight": ("interleaved", (8, 8), 0),
    "mixer.in_proj.weight": ("rows", 64, 64, 8, 8, 8),
    "in_proj.weight": ("rows", 16, 16, 32, 32, 4, 4),
    "out_proj.weight": "whole",
}


class Oracle:
    """Steps whole parameters with whole gradients.

    Args:
        wholes: Initial parameters by name.
        settings: Of `muonmesh.Muon`, such as ``lr``.
        muon: Settings of Muon's groups.
        rules: The end of a name: the rule of this parameter, if it is not Muon; or a dict with its ``"matrices"``.
    """

    def __init__(
        self,
        wholes: dict[str, Tensor],
        *,
        muon: dict[str, Any] | None = None,
        rules: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        group_settings = {end: rule for end, rule in (rules or {}).items() if isinstance(rule, dict)}
        self._table = {**MATRICES, **{end: rule["matrices"] for end, rule in group_settings.items()}}
        self.parameters = {name: nn.Parameter(value.clone()) for name, value in sorted(wholes.items())}
        kinds: dict[str, list[str]] = {"muon": [], "matrices": [], "vectors": []}
        for name, value in self.parameters.items():
            kind = (
                "muon" if any(name.endswith(end) for end in MATRICES) else "vectors" if value.ndim < 2 else "matrices"
            )
            kind = next(
                (rule for end, rule in (rules or {}).items() if name.endswith(end) and end not in group_settings), kind
            )
            kinds.setdefault(kind, []).append(name)
        groups = []
        for kind, names in kinds.items():
            group: dict[str, Any] = {"name": kind, "params": [(name, self.parameters[name]) for name in names]}
            group["algorithm"] = "adamw" if kind in ("matrices", "vectors") else kind
            if group["algorithm"] != "adamw":
                group |= {"matrices": [self._matrices(name) for name in names], **(muon or {})}
            if kind == "vectors":
                group["weight_decay"] = 0.0
            groups += [group] if names else []
        self.optimizer = mm.Muon(groups, gradients=_Given(), **{"process_group": "local", **settings})

    def _matrices(self, name: str) -> Any:
        matrices = next((value for end, value in self._table.items() if name.endswith(end)), "whole")
        rows = len(self.parameters[name])
        return ("rows", rows // 2, rows // 2) if matrices == "halves" else matrices

    def step(self, gradients: dict[str, Tensor], max_norm: float = 1.0, **options: Any) -> float:
        """Take a step, clipped with these options; return the norm before clipping."""
        for name, parameter in self.parameters.items():
            parameter.oracle_gradient = gradients[name].clone()  # type: ignore[attr-defined]
        norms = self.optimizer.clip_grad_norm_(max_norm, **options)
        self.optimizer.step()
        return float(norms)

    def differing(self, wholes: dict[str, Tensor]) -> dict[str, float]:
        """By how much parameters differ from these, where they do."""
        assert wholes.keys() == self.parameters.keys()
        return {
            name: float((wholes[name].float() - parameter.detach().float()).abs().max())
            for name, parameter in self.parameters.items()
            if not torch.equal(wholes[name], parameter)
        }


class _Given(mm.GradientSource):
    """A gradient may have another dtype than its parameter, as ``main_grad`` has."""

    def gradient(self, parameter: Tensor) -> Tensor | None:
        return getattr(parameter, "oracle_gradient", None)

    def write(self, parameter: Tensor, gradient: Tensor | None) -> None:
        parameter.oracle_gradient = gradient  # type: ignore[attr-defined]
