"""Planning: the cluster that ``muonmesh plan`` describes, and a forecast for it as plain data.

A cluster is a planned set of ranks, from ``--mesh`` and ``--experts``, with the layouts of parameters on it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from muonmesh.checkpoint.form import POSITIVE, check_form, only
from muonmesh.errors import FileError
from muonmesh.files import read_json
from muonmesh.layout import MatrixSpec, MeshLayout, Placement, Replicate, Shard
from muonmesh.layout.plan import Plan
from muonmesh.names import starred
from muonmesh.tools.forecasts.device_rates import DeviceRates
from muonmesh.tools.forecasts.forecast import WIRE, Forecast, Weight

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
        placements = tuple(self._placement(axes, axis, cut, stack=stack) for axis in range(len(axes)))
        return MeshLayout(shape, tuple(size for _, size in axes), self.ranks, placements)

    def _placement(self, axes: Axes, axis: int, cut: int | None, *, stack: bool) -> Placement:
        kind = axes[axis][0]
        if kind == "ddp":
            return Replicate()
        if kind == "ep":
            return Shard(0)
        if kind == "tp":
            return Replicate() if cut is None else Shard(cut)
        dim = 1 if stack and any(other == "ep" for other, _ in axes) else 0
        inner = math.prod(size for other, size in axes[axis + 1 :] if other == "tp")
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
    axes = _axes("--mesh", mesh, names=("ddp", "fsdp", "hsdp", "tp"))
    if experts is None:
        return Cluster(axes)
    other = _axes("--experts", experts, names=("ddp", "fsdp", "hsdp", "ep"))
    expert_ranks, needed = (math.prod(size for _, size in option_axes) for option_axes in (other, axes))
    if expert_ranks != needed:
        raise FileError(
            f"--experts {experts}: found {expert_ranks:,} ranks; needed {needed:,}, the ranks of --mesh {mesh} in "
            "another order. Correct a size"
        )
    return Cluster(axes, other)


def _axes(option: str, text: str, *, names: tuple[str, ...]) -> Axes:
    def fault(problem: str, needed: str) -> FileError:
        forms = ", ".join(FORMS[name] for name in names)
        write = f"Write one or more of {forms}, with commas between them"
        return FileError(f"{option} {text}: found {problem}; needed {needed}. {write}")

    axes: list[tuple[str, int]] = []
    for part in text.split(","):
        name, _, sizes = part.strip().partition("=")
        if name not in names:
            beside = ". Plan each pipeline stage by itself, with the ranks of that stage" if name == "pp" else ""
            raise fault(repr(part), f"axes of {', '.join(names)}{beside}")
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


def least_imbalance(plan: Plan) -> float:
    """Return a ratio below which no plan is: the rank that owns the largest matrix does at least its work."""
    largest = max((assignment.flops for assignment in plan.assignments), default=0)
    return max(1.0, largest * len(plan.ranks) / max(1, sum(plan.loads.values())))


def at_home(plan: Plan) -> float:
    """Return the share of matrices whose owner holds them whole, so that they need no gathering; 1 without any."""
    stays = [not plan.travels(number, gather=True) for number in range(len(plan.assignments))]
    return sum(stays) / len(stays) if stays else 1.0


def figures_of(weights: Sequence[Weight], cost: Forecast) -> dict[str, Any]:
    """Return all figures of a forecast, with exact figures under "counted" and estimates under "modelled".

    Seconds, bytes, FLOPs and elements are plain numbers. ``flops_by_rank`` is in the order of the ranks. ``owners`` has
    for each parameter the owner of each of its matrices, the rank that orthogonalizes the matrix.
    """
    plan = cost.plan
    owners: dict[str, list[int]] = {}
    for assignment in plan.assignments:
        owners.setdefault(plan.parameters[assignment.parameter].name, []).append(assignment.owner)
    return {
        "ranks": len(plan.ranks),
        "elements": sum(math.prod(weight.layout.shape) for weight in weights),
        "matrices": len(plan.assignments),
        "buckets": len(plan.buckets),
        "balance": {
            "busiest rank over mean": cost.imbalance,
            "no plan is below": least_imbalance(plan),
            "share of matrices stored whole by their owner": at_home(plan),
        },
        "rank": cost.rank,
        "counted": {
            "matrices": len(cost.owned),
            "flops": cost.flops,
            "bytes sent": cost.bytes_sent,
            "bytes received": cost.bytes_received,
            "collectives": cost.collectives,
            "messages": cost.messages,
            "bytes of gradients sent": cost.gradients.bytes_sent,
            "bytes of gradients received": cost.gradients.bytes_received,
            "collectives of gradients": cost.gradients.collectives,
            **{f"bytes of {kind}": size for kind, size in cost.stored.items()},
            "bytes stored in total": sum(cost.stored.values()),
            "bytes stored in total, with AdamW for all": 4 * cost.stored["weights"],  # with gradients and two moments
        },
        "modelled": {
            "limited by": cost.limited_by,
            **_seconds(cost),
            "bytes of buffers in the step": cost.exchange,
            "bytes of NCCL's buffers": cost.nccl,
            "bytes in total": sum(cost.stored.values()) + cost.exchange + cost.nccl,
            "kernel launches": cost.launches,
            "bytes that elementwise kernels move": cost.elementwise_bytes,
        },
        "rates": asdict(cost.rates),
        "kinds": _kinds(weights, cost, owners),
        "flops_by_rank": [plan.loads[rank] for rank in plan.ranks],
        "owners": owners,
    }


def load_rates(path: Path) -> DeviceRates:
    """Return the rates of a device from a JSON file; missing rates are an H100's.

    Raises:
        FileError: the file is no JSON object, a name is unknown, or a rate is no positive number.
    """
    defaults = asdict(DeviceRates())
    content = {**defaults, **read_json(path, needed='rates such as {"flops": 4e14, "wire": 2.5e10}')}
    form = only(dict.fromkeys(defaults, POSITIVE))
    check_form(str(path), content, form, "Correct the file or leave --rates out", kind=FileError)
    return DeviceRates(**content)


def _seconds(cost: Forecast) -> dict[str, dict[str, float]]:
    """Return the times of a step, of its parts, and of torch's optimizers, each with slow and with fast products."""
    published, best = cost.parts(), cost.parts(published=False)
    ends = {"seconds": (cost.seconds, cost.best_seconds)}
    ends |= {f"seconds of the {part}": (published[part], best[part]) for part in best}
    torchs = cost.seconds_of_torch(), cost.seconds_of_torch(published=False)
    ends["seconds of torch.optim.Muon, without communication"] = torchs
    ends["seconds of torch.optim.AdamW for all parameters"] = 2 * (cost.seconds_of_adamw(),)
    return {name: {"products as published": slow, "products at best": fast} for name, (slow, fast) in ends.items()}


def _kinds(weights: Sequence[Weight], cost: Forecast, owners: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Return one entry for each kind of parameters: equal names, apart from the layer's number, and equal shapes."""
    numbers = {parameter.name: number for number, parameter in enumerate(cost.plan.parameters)}
    alike: dict[tuple[str, tuple[int, ...]], list[Weight]] = {}
    for weight in weights:
        alike.setdefault((starred(weight.name), weight.layout.shape), []).append(weight)
    kinds = []
    for (name, shape), layers in alike.items():
        of = [numbers[weight.name] for weight in layers if weight.matrices is not None]
        who = [owner for weight in layers for owner in owners.get(weight.name, ())]
        kinds.append(
            {
                "name": name,
                "count": len(layers),
                "shape": list(shape),
                "algorithm": "muon" if of else "adamw",
                "split": layers[0].matrices,
                "layout": layers[0].layout.describe(),
                "matrices": len(who),
                "owners": len(set(who)),
                "flops": sum(sum(cost.plan.parameters[number].flops) for number in of),
                "bytes sent": sum(cost.traffic.sent[number] for number in of) * WIRE,
            }
        )
    return kinds
