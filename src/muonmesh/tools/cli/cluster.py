"""Cluster: a planned set of ranks, from ``--mesh`` and ``--experts``, and the layouts of parameters on it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

from muonmesh.errors import FileError
from muonmesh.layout import MatrixSpec, MeshLayout, Placement, Replicate, Shard

HYBRID = ("ddp", "fsdp")  # the two axes of hsdp=REPLICASxSHARDS
MOST_RANKS = 2**20
FORMS = {"ddp": "ddp=8", "fsdp": "fsdp=64", "hsdp": "hsdp=8x32", "tp": "tp=8", "ep": "ep=32"}
ROWWISE = re.compile(r"(^|\.)(o_proj|out_proj|down_proj|c_proj|wo|w2|dense_4h_to_h)(\.weight)?$")
# Small factors of latent attention, which tensor parallelism does not cut: the next layer needs their whole output.
NOT_CUT = re.compile(r"(^|\.)(q_a_proj|kv_a_proj_with_mqa)\.weight$")
EXPERTS = re.compile(r"(^|\.)experts\.")

Axes = tuple[tuple[str, int], ...]  # "ddp", "fsdp", "tp" or "ep", and the number of ranks


@dataclass(frozen=True)
class Cluster:
    """The axes of a mesh, the outermost first; ranks are numbered row by row.

    Tensor parallelism cuts first: input projections of attention and MLP by rows, output projections by columns,
    vocabularies by rows. FSDP2 then cuts dim 0. With axes for experts, the ranks of an expert axis ("ep") get whole
    experts, and FSDP2 cuts each expert. Only FSDP2 cuts vectors.

    Attributes:
        mesh: The axes for all parameters except experts; for experts too if ``experts`` is empty.
        experts: The axes for stacks of experts, over the same ranks; empty means the axes of ``mesh``.
    """

    mesh: Axes
    experts: Axes = ()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(math.prod(size for _, size in self.mesh)))

    def layout(self, name: str, shape: tuple[int, ...], matrices: MatrixSpec | None) -> MeshLayout:
        """Return the layout of a parameter, from its name, its shape, and its split into matrices."""
        stack = EXPERTS.search(name) is not None and len(shape) > 1
        axes = self.experts if stack and self.experts else self.mesh
        cut = self._tensor_dim(name, shape, matrices, stack=stack)
        placements = tuple(self._placement(axes, place, cut, stack=stack) for place in range(len(axes)))
        return MeshLayout(shape, tuple(size for _, size in axes), self.ranks, placements)

    def _placement(self, axes: Axes, place: int, cut: int | None, *, stack: bool) -> Placement:
        kind = axes[place][0]
        if kind == "ddp":
            return Replicate()
        if kind == "ep":
            return Shard(0)
        if kind == "tp":
            return Replicate() if cut is None else Shard(cut)
        dim = 1 if stack and any(other == "ep" for other, _ in axes) else 0
        inner = math.prod(size for other, size in axes[place + 1 :] if other == "tp")
        return Shard(dim, inner) if inner > 1 and cut == dim else Shard(dim)

    @staticmethod
    def _tensor_dim(name: str, shape: tuple[int, ...], matrices: MatrixSpec | None, *, stack: bool) -> int | None:
        """Return the dim that tensor parallelism cuts; None if every tensor-parallel rank holds the whole parameter."""
        first = 1 if stack else 0
        if len(shape) < first + 2 or NOT_CUT.search(name) or re.search(r"(^|\.)(gate|router)\.weight$", name):
            return None
        inner = matrices[1] if stack and isinstance(matrices, tuple) else matrices
        transposed = isinstance(inner, tuple) and inner[0] == "transposed"  # stored in × out
        return first + ((ROWWISE.search(name) is not None) != transposed)


def parse_cluster(mesh: str, experts: str | None = None) -> Cluster:
    """Return the cluster of ``--mesh`` and ``--experts``, such as ``hsdp=8x32,tp=8`` and ``ddp=8,ep=32,fsdp=8``.

    Raises:
        FileError: an axis is unknown or given twice, a size is no valid number, or the two options have different
            numbers of ranks.
    """
    axes = _axes("--mesh", mesh, known=("ddp", "fsdp", "hsdp", "tp"))
    if experts is None:
        return Cluster(axes)
    other = _axes("--experts", experts, known=("ddp", "fsdp", "hsdp", "ep"))
    found, needed = (math.prod(size for _, size in some) for some in (other, axes))
    if found != needed:
        raise FileError(
            f"--experts {experts}: found {found:,} ranks; needed {needed:,}, the ranks of --mesh {mesh} in another "
            "order. Correct a size"
        )
    return Cluster(axes, other)


def _axes(option: str, text: str, *, known: tuple[str, ...]) -> Axes:
    def fault(found: str, needed: str) -> FileError:
        forms = ", ".join(FORMS[name] for name in known)
        write = f"Write one or more of {forms}, with commas between them"
        return FileError(f"{option} {text}: found {found}; needed {needed}. {write}")

    axes: list[tuple[str, int]] = []
    for part in text.split(","):
        name, _, sizes = part.strip().partition("=")
        if name not in known:
            beside = ". Plan each pipeline stage by itself, with the ranks of that stage" if name == "pp" else ""
            raise fault(repr(part), f"axes of {', '.join(known)}{beside}")
        kinds = HYBRID if name == "hsdp" else (name,)
        numbers = sizes.split("x")
        if len(numbers) != len(kinds) or not all(re.fullmatch(r"[1-9]\d{0,6}", number) for number in numbers):
            needed = "replicas x shards, two whole numbers" if len(kinds) == 2 else "a whole number"
            raise fault(repr(part), f"{needed} from 1 to {MOST_RANKS:,}")
        axes += zip(kinds, map(int, numbers), strict=True)
    doubles = [kind for number, (kind, _) in enumerate(axes) if kind in (other for other, _ in axes[:number])]
    if doubles:
        raise fault(f"two axes of {doubles[0]}", "one of each")
    ranks = math.prod(size for _, size in axes)
    if ranks > MOST_RANKS:
        raise fault(f"{ranks:,} ranks", f"at most {MOST_RANKS:,}")
    return tuple(axes)
