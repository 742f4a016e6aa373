"""Where matrices live and who orthogonalizes them: plain Python data, never torch.

Region → Layout → Matrix → Plan; nothing flows back. See ``docs/internals/architecture.md``.
"""

from muonmesh.layout.companion import Companion, Side, companion_matrices
from muonmesh.layout.cost import cost
from muonmesh.layout.flat import FlatParameter, FlatShards, Interval, Layout
from muonmesh.layout.layout import MeshLayout, Placement, Replicate, Shard, StridedShard
from muonmesh.layout.matrix import Matrix, MatrixSpec, split_matrices
from muonmesh.layout.parameter import Elementwise, Parameter, listed_by
from muonmesh.layout.plan import Plan, make_plan
from muonmesh.layout.region import Piece, Region, overlap
from muonmesh.layout.routes import Routes

__all__ = [
    "Companion",
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
    "Region",
    "Replicate",
    "Routes",
    "Shard",
    "Side",
    "StridedShard",
    "companion_matrices",
    "cost",
    "listed_by",
    "make_plan",
    "overlap",
    "split_matrices",
]
