"""Rules: what a step computes from gradients, in parts that cannot see how a matrix is sharded. One rule a file."""

from muonmesh.numerics.rules.adamuon import AdaMuonRule
from muonmesh.numerics.rules.adamw import AdamWRule, step_count
from muonmesh.numerics.rules.elementwise import ElementwiseRule
from muonmesh.numerics.rules.hyperball import HyperballRule
from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.rules.muon_plus import MuonPlusRule
from muonmesh.numerics.rules.muoneq import MuonEqRule
from muonmesh.numerics.rules.normuon import NorMuonRule
from muonmesh.numerics.rules.registry import (
    RULES,
    check_keeps,
    is_known,
    is_matrix_rule,
    never_negative,
    register_rule,
    rule_of,
)
from muonmesh.numerics.rules.rule import DecayMode, Hyperparameters, KeptAs, Rule
from muonmesh.numerics.rules.scion_row_norm import ScionRowNormRule
from muonmesh.numerics.rules.scion_sign import ScionSignRule

__all__ = [
    "RULES",
    "AdaMuonRule",
    "AdamWRule",
    "DecayMode",
    "ElementwiseRule",
    "HyperballRule",
    "Hyperparameters",
    "KeptAs",
    "MuonEqRule",
    "MuonPlusRule",
    "MuonRule",
    "NorMuonRule",
    "Rule",
    "ScionRowNormRule",
    "ScionSignRule",
    "check_keeps",
    "is_known",
    "is_matrix_rule",
    "never_negative",
    "register_rule",
    "rule_of",
    "step_count",
]
