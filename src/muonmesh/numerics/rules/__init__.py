"""Rules: what a step computes from gradients, in parts that cannot see how a matrix is sharded. One rule a file."""

from muonmesh.numerics.rules.adamw import step_count as step_count
from muonmesh.numerics.rules.elementwise import ElementwiseRule as ElementwiseRule
from muonmesh.numerics.rules.muon import MuonRule as MuonRule
from muonmesh.numerics.rules.registry import (
    RULES as RULES,
    Algorithm as Algorithm,
    by_defaults as by_defaults,
    is_known as is_known,
    is_matrix_rule as is_matrix_rule,
    never_negative as never_negative,
    register_rule as register_rule,
    rule_of as rule_of,
)
from muonmesh.numerics.rules.rule import (
    DecayMode as DecayMode,
    Hyperparameters as Hyperparameters,
    KeptAs as KeptAs,
    Rule as Rule,
    check_keeps as check_keeps,
)
