"""Muon for PyTorch that computes the same update whatever holds the matrix."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muonmesh.auditing.audit import Audit, AuditRow, audit
    from muonmesh.build import from_model, split_params
    from muonmesh.clip.limits import ClipPolicy, GradNorms
    from muonmesh.comm.gradients import GradientSource
    from muonmesh.errors import LayoutError, MuonMeshError, PlanError, StateError
    from muonmesh.groups import HeadPart, ParamGroups
    from muonmesh.integrations.qk_clip import QKClip
    from muonmesh.integrations.torch_muon import ExecutedMuon, execute
    from muonmesh.layout import FlatParameter, FlatShards
    from muonmesh.migration import PackageName, convert_settings
    from muonmesh.numerics.coefficients import CoefficientName, CoefficientSet, register_coefficients
    from muonmesh.numerics.kernels import KernelName
    from muonmesh.numerics.newton_schulz import Method, orthogonalize
    from muonmesh.numerics.rules import (
        Algorithm,
        DecayMode,
        ElementwiseRule,
        MuonRule,
        Rule,
        register_rule,
    )
    from muonmesh.numerics.scale import ScaleMode, update_scale
    from muonmesh.optimizer import Muon
    from muonmesh.report.explain import Explanation
    from muonmesh.report.transfer import Transfer, TransferRow, transfer

__all__ = [
    "Algorithm",
    "Audit",
    "AuditRow",
    "ClipPolicy",
    "CoefficientName",
    "CoefficientSet",
    "DecayMode",
    "ElementwiseRule",
    "ExecutedMuon",
    "Explanation",
    "FlatParameter",
    "FlatShards",
    "GradNorms",
    "GradientSource",
    "HeadPart",
    "KernelName",
    "LayoutError",
    "Method",
    "Muon",
    "MuonMeshError",
    "MuonRule",
    "PackageName",
    "ParamGroups",
    "PlanError",
    "QKClip",
    "Rule",
    "ScaleMode",
    "StateError",
    "Transfer",
    "TransferRow",
    "audit",
    "convert_settings",
    "execute",
    "from_model",
    "orthogonalize",
    "register_coefficients",
    "register_rule",
    "split_params",
    "transfer",
    "update_scale",
]

# Where each name is, which is imported when somebody asks for it: half the time of importing all is torch's DTensor and
# its compiler, and `muonmesh plan` needs neither.
_HOMES = {
    "auditing.audit": "Audit AuditRow audit",
    "build": "from_model split_params",
    "clip.limits": "ClipPolicy GradNorms",
    "comm.gradients": "GradientSource",
    "errors": "LayoutError MuonMeshError PlanError StateError",
    "groups": "HeadPart ParamGroups",
    "integrations.qk_clip": "QKClip",
    "integrations.torch_muon": "ExecutedMuon execute",
    "layout": "FlatParameter FlatShards",
    "migration": "PackageName convert_settings",
    "numerics.coefficients": "CoefficientName CoefficientSet register_coefficients",
    "numerics.kernels": "KernelName",
    "numerics.newton_schulz": "Method orthogonalize",
    "numerics.rules": "Algorithm DecayMode ElementwiseRule MuonRule Rule register_rule",
    "numerics.scale": "ScaleMode update_scale",
    "optimizer": "Muon",
    "report.explain": "Explanation",
    "report.transfer": "Transfer TransferRow transfer",
}


def __getattr__(name: str) -> Any:
    """Import a public name, or a part of the package, at its first use."""
    home = next((part for part, names in _HOMES.items() if name in names.split()), None)
    found: Any
    if name == "__version__":
        found = importlib.metadata.version(__name__)
    elif home is not None:
        found = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        found = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
