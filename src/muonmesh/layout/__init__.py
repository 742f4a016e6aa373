"""The layouts of matrices, and the plan with the owner of each matrix: plain Python data without torch.

Region → Layout → Matrix → Plan; nothing flows back. See ``docs/internals/architecture.md``.
"""

from muonmesh.layout.budget import Budget
from muonmesh.layout.cost import cost
from muonmesh.layout.flat import Declared, FlatParameter, FlatShards, Interval, Layout, occupied
from muonmesh.layout.layout import MeshLayout, Placement, Replicate, Shard
from muonmesh.layout.matrix import Matrix, MatrixSpec, split_matrices
from muonmesh.layout.parameter import Elementwise, Parameter
from muonmesh.layout.plan import Plan, make_plan
from muonmesh.layout.region import Piece

__all__ = [
    "Budget",
    "Declared",
    "Elementwise",
    "FlatParameter",
    "FlatShards",
    "Interval",
    "Layout",
    "Matrix",
    "MatrixSpec",
    "MeshLayout",
    "Parameter",
    "Piece",
    "Placement",
    "Plan",
    "Replicate",
    "Shard",
    "cost",
    "make_plan",
    "occupied",
    "split_matrices",
]
