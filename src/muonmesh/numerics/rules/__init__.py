"""Rules: compute the update from gradients, in parts that do not depend on how a matrix is sharded. One rule a file."""

from muonmesh.numerics.rules.adamw import step_count as step_count
from muonmesh.numerics.rules.elementwise import ElementwiseRule as ElementwiseRule
from muonmesh.numerics.rules.muon import MuonRule as MuonRule
from muonmesh.numerics.rules.registry import RULES as RULES
from muonmesh.numerics.rules.registry import Algorithm as Algorithm
from muonmesh.numerics.rules.registry import by_defaults as by_defaults
from muonmesh.numerics.rules.registry import is_known as is_known
from muonmesh.numerics.rules.registry import is_matrix_rule as is_matrix_rule
from muonmesh.numerics.rules.registry import never_negative as never_negative
from muonmesh.numerics.rules.registry import register_rule as register_rule
from muonmesh.numerics.rules.registry import rule_of as rule_of
from muonmesh.numerics.rules.rule import DecayMode as DecayMode
from muonmesh.numerics.rules.rule import Hyperparameters as Hyperparameters
from muonmesh.numerics.rules.rule import KeptAs as KeptAs
from muonmesh.numerics.rules.rule import Rule as Rule
from muonmesh.numerics.rules.rule import check_keeps as check_keeps
