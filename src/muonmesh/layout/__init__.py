"""Where matrices live and who orthogonalizes them: plain Python data, never torch.

Region → Layout → Matrix → Plan; nothing flows back. See ``docs/internals/architecture.md``.
"""

from muonmesh.layout.cost import cost as cost
from muonmesh.layout.flat import (
    FlatParameter as FlatParameter,
    FlatShards as FlatShards,
    Interval as Interval,
    Layout as Layout,
)
from muonmesh.layout.layout import (
    MeshLayout as MeshLayout,
    Placement as Placement,
    Replicate as Replicate,
    Shard as Shard,
    StridedShard as StridedShard,
)
from muonmesh.layout.matrix import Matrix as Matrix, MatrixSpec as MatrixSpec, split_matrices as split_matrices
from muonmesh.layout.parameter import Elementwise as Elementwise, Parameter as Parameter
from muonmesh.layout.plan import Plan as Plan, make_plan as make_plan
from muonmesh.layout.region import Piece as Piece
