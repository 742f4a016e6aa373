"""Rules: what a step computes from gradients, in parts that cannot see how a matrix is sharded. One rule a file."""

from muonmesh.numerics.rules.adamuon import AdaMuonRule
from muonmesh.numerics.rules.adamw import AdamWRule
from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.rules.normuon import NorMuonRule
from muonmesh.numerics.rules.registry import RULES, is_matrix_rule, register_rule, rule_of
from muonmesh.numerics.rules.rule import DecayMode, Hyperparameters, Kept, Rule

__all__ = [
    "RULES",
    "AdaMuonRule",
    "AdamWRule",
    "DecayMode",
    "Hyperparameters",
    "Kept",
    "MuonRule",
    "NorMuonRule",
    "Rule",
    "is_matrix_rule",
    "register_rule",
    "rule_of",
]
