"""Muon for PyTorch that computes the same update in every layout of the matrices."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any

from muonmesh.comm.layout_readers import register_layout_reader as register_layout_reader

if TYPE_CHECKING:
    from muonmesh.build import from_model as from_model
    from muonmesh.build import split_params as split_params
    from muonmesh.clip.limits import ClipPolicy as ClipPolicy
    from muonmesh.clip.limits import GradNorms as GradNorms
    from muonmesh.comm.gradients import GradientSource as GradientSource
    from muonmesh.errors import FileError as FileError
    from muonmesh.errors import LayoutError as LayoutError
    from muonmesh.errors import MuonMeshError as MuonMeshError
    from muonmesh.errors import PlanError as PlanError
    from muonmesh.errors import StateError as StateError
    from muonmesh.groups import ParamGroups as ParamGroups
    from muonmesh.integrations.qk_clip import QKClip as QKClip
    from muonmesh.layout import FlatParameter as FlatParameter
    from muonmesh.layout import FlatShards as FlatShards
    from muonmesh.numerics.coefficients import CoefficientName as CoefficientName
    from muonmesh.numerics.coefficients import CoefficientSet as CoefficientSet
    from muonmesh.numerics.coefficients import register_coefficients as register_coefficients
    from muonmesh.numerics.kernels import KernelName as KernelName
    from muonmesh.numerics.newton_schulz import Method as Method
    from muonmesh.numerics.newton_schulz import orthogonalize as orthogonalize
    from muonmesh.numerics.rules import Algorithm as Algorithm
    from muonmesh.numerics.rules import DecayMode as DecayMode
    from muonmesh.numerics.rules import ElementwiseRule as ElementwiseRule
    from muonmesh.numerics.rules import MuonRule as MuonRule
    from muonmesh.numerics.rules import Rule as Rule
    from muonmesh.numerics.rules import register_rule as register_rule
    from muonmesh.numerics.scale import ScaleMode as ScaleMode
    from muonmesh.numerics.scale import update_scale as update_scale
    from muonmesh.optimizer import Muon as Muon
    from muonmesh.report.explain import Explanation as Explanation
    from muonmesh.tools.auditing.audit import Audit as Audit
    from muonmesh.tools.auditing.audit import AuditRow as AuditRow
    from muonmesh.tools.auditing.audit import audit as audit
    from muonmesh.tools.migration import PackageName as PackageName
    from muonmesh.tools.migration import convert_settings as convert_settings

# The module of each public name. A name is imported at its first use: half the time of importing everything is torch's
# DTensor and its compiler, and `muonmesh plan` needs neither.
_HOMES = {
    "build": "from_model split_params",
    "clip.limits": "ClipPolicy GradNorms",
    "comm.gradients": "GradientSource",
    "comm.layout_readers": "register_layout_reader",
    "errors": "FileError LayoutError MuonMeshError PlanError StateError",
    "groups": "ParamGroups",
    "integrations.qk_clip": "QKClip",
    "layout": "FlatParameter FlatShards",
    "numerics.coefficients": "CoefficientName CoefficientSet register_coefficients",
    "numerics.kernels": "KernelName",
    "numerics.newton_schulz": "Method orthogonalize",
    "numerics.rules": "Algorithm DecayMode ElementwiseRule MuonRule Rule register_rule",
    "numerics.scale": "ScaleMode update_scale",
    "optimizer": "Muon",
    "report.explain": "Explanation",
    "tools.auditing.audit": "Audit AuditRow audit",
    "tools.migration": "PackageName convert_settings",
}
__all__ = sorted(" ".join(_HOMES.values()).split())

for _reader in ("megatron_fsdp", "ragged_shards"):
    register_layout_reader(f"{__name__}.integrations.{_reader}:read_layout")


def __getattr__(name: str) -> Any:
    """Import a public name, or a part of the package, at its first use."""
    home = next((part for part, names in _HOMES.items() if name in names.split()), None)
    value: Any
    if name == "__version__":
        value = importlib.metadata.version(__name__)
    elif home is not None:
        value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
