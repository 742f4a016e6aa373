"""Muon for PyTorch that computes the same update whatever holds the matrix."""

from muonmesh.errors import LayoutError, MuonMeshError, PlanError, StateError
from muonmesh.groups import split_params
from muonmesh.layout import FlatParameter, FlatShards, Rates
from muonmesh.numerics.newton_schulz import orthogonalize
from muonmesh.numerics.rules import MuonRule, NorMuonRule, Rule, register_rule
from muonmesh.numerics.scale import update_scale
from muonmesh.optimizer import Muon, from_model
from muonmesh.report.explain import Explanation

__all__ = [
    "Explanation",
    "FlatParameter",
    "FlatShards",
    "LayoutError",
    "Muon",
    "MuonMeshError",
    "MuonRule",
    "NorMuonRule",
    "PlanError",
    "Rates",
    "Rule",
    "StateError",
    "from_model",
    "orthogonalize",
    "register_rule",
    "split_params",
    "update_scale",
]
