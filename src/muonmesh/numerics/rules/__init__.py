"""Rules: compute the update from gradients, in parts that do not depend on how a matrix is sharded. One rule a file."""

from muonmesh.numerics.rules.adamw import step_count
from muonmesh.numerics.rules.elementwise import ElementwiseRule
from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.rules.registry import (
    RULES,
    Algorithm,
    by_defaults,
    is_known,
    is_matrix_rule,
    never_negative,
    register_rule,
    rule_of,
)
from muonmesh.numerics.rules.rule import DecayMode, Hyperparameters, KeptAs, Rule, check_keeps

__all__ = [
    "RULES",
    "Algorithm",
    "DecayMode",
    "ElementwiseRule",
    "Hyperparameters",
    "KeptAs",
    "MuonRule",
    "Rule",
    "by_defaults",
    "check_keeps",
    "is_known",
    "is_matrix_rule",
    "never_negative",
    "register_rule",
    "rule_of",
    "step_count",
]
