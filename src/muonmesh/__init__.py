"""Muon for PyTorch that computes the same update whatever holds the matrix."""

from muonmesh.build import from_model, split_params
from muonmesh.clip import ClipPolicy, GradNorms
from muonmesh.comm.gradients import GradientSource
from muonmesh.errors import LayoutError, MuonMeshError, PlanError, StateError
from muonmesh.groups import HeadPart, ParamGroups
from muonmesh.integrations.qk_clip import QKClip
from muonmesh.layout import FlatParameter, FlatShards, Rates, Teams
from muonmesh.migration import PackageName, convert_settings
from muonmesh.numerics.coefficients import CoefficientName
from muonmesh.numerics.newton_schulz import Method, orthogonalize
from muonmesh.numerics.rules import (
    AdaMuonRule,
    DecayMode,
    HyperballRule,
    MuonEqRule,
    MuonPlusRule,
    MuonRule,
    NorMuonRule,
    Rule,
    ScionRowNormRule,
    ScionSignRule,
    register_rule,
)
from muonmesh.numerics.scale import ScaleMode, update_scale
from muonmesh.optimizer import Muon
from muonmesh.report.explain import Explanation
from muonmesh.settings import Algorithm, ExchangeMode

__all__ = [
    "AdaMuonRule",
    "Algorithm",
    "ClipPolicy",
    "CoefficientName",
    "DecayMode",
    "ExchangeMode",
    "Explanation",
    "FlatParameter",
    "FlatShards",
    "GradNorms",
    "GradientSource",
    "HeadPart",
    "HyperballRule",
    "LayoutError",
    "Method",
    "Muon",
    "MuonEqRule",
    "MuonMeshError",
    "MuonPlusRule",
    "MuonRule",
    "NorMuonRule",
    "PackageName",
    "ParamGroups",
    "PlanError",
    "QKClip",
    "Rates",
    "Rule",
    "ScaleMode",
    "ScionRowNormRule",
    "ScionSignRule",
    "StateError",
    "Teams",
    "convert_settings",
    "from_model",
    "orthogonalize",
    "register_rule",
    "split_params",
    "update_scale",
]
