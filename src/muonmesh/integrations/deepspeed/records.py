"""Records: reads from an engine where each parameter lies in DeepSpeed's flat tensors, and checks it.

muonmesh assumes nothing about how ZeRO cuts parameters. Each rank reads which intervals its own flat tensors hold, and
all ranks exchange this. Two checks follow: the intervals of each parameter cover it exactly once, and they contain the
parameter's values. If the records of another DeepSpeed version have another meaning, an error is raised when the engine
is made.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from muonmesh.comm.gather_objects import results_of_all_ranks, settled
from muonmesh.comm.placing import placements_of
from muonmesh.errors import LayoutError, explain_error
from muonmesh.layout import FlatParameter, FlatShards, Interval, MeshLayout


@dataclass(frozen=True)
class EngineParameter:
    """The description of one parameter of an engine: name, shape, matrices and tensor-parallel placement.

    Attributes:
        name: Canonical name, unique over all ranks: an expert has its number among the experts of all ranks.
        shape: Global shape.
        matrices: How the parameter splits into matrices, see `split_matrices`; None for AdamW's parameters.
        tensor_parallel: The number of tensor-parallel ranks.
        placement: The torch placement of the parameter over the tensor-parallel ranks.
    """

    name: str
    shape: tuple[int, ...]
    matrices: Any
    tensor_parallel: int
    placement: Placement

    def within(self, ranks: tuple[int, ...]) -> MeshLayout:
        """Return the parameter's layout over a data-parallel group and its tensor-parallel peers, before ZeRO cuts it.

        Args:
            ranks: The global ranks of the data-parallel group.

        Raises:
            LayoutError: the group contains tensor-parallel peers.
        """
        size = self.tensor_parallel
        if size == 1:
            return MeshLayout.replicated(self.shape, ranks)
        # DeepSpeed's mesh is (data, tensor), row-major.
        column = dist.get_rank() % size
        grid = [rank - column + peer for rank in ranks for peer in range(size)]
        if any(rank % size != column for rank in ranks):
            problem = f"a partition over the ranks {ranks}, which tensor parallelism of {size} shards among them"
            write = "Make the model without zero.Init, or set autotp_size to 1"
            raise LayoutError(explain_error(self.name, problem, "one over data-parallel ranks", write))
        placements = placements_of(self.name, (Replicate(), self.placement))
        return MeshLayout(self.shape, (len(ranks), size), tuple(grid), placements)


def engine_parameter(
    parameter: Any, name: str, shape: tuple[int, ...], matrices: Any, *, tensor_parallel: int
) -> EngineParameter:
    """Return the description of a parameter after the engine has configured its modules.

    Args:
        parameter: The parameter that DeepSpeed will train.
        name: See `EngineParameter`.
        shape: The global shape, from before the engine was made.
        matrices: See `EngineParameter`.
        tensor_parallel: The number of tensor-parallel ranks.

    Raises:
        LayoutError: DeepSpeed has cut the parameter in a way that muonmesh does not know.
    """
    placement = _placement(name, getattr(parameter, DS_AUTOTP_UC_META, None) or {}, shape, tensor_parallel)
    described = EngineParameter(name, shape, matrices, tensor_parallel, placement)
    peers = MeshLayout(shape, (tensor_parallel,), tuple(range(tensor_parallel)), placements_of(name, (placement,)))
    needed = peers.local_shape(dist.get_rank() % tensor_parallel)
    local_shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    if local_shape != needed:
        problem = f"shape {local_shape} in the engine"
        raise LayoutError(explain_error(name, problem, f"{needed} of {shape}", "Leave its module as it is, or whole"))
    return described


def _placement(name: str, meta: dict[str, Any], shape: tuple[int, ...], size: int) -> Placement:
    """Return the placement by which AutoTP has cut a parameter, from AutoTP's notes for universal checkpoints.

    Raises:
        LayoutError: the parts are uneven.
    """
    dim = meta.get("partition_dim")
    if size == 1 or dim is None or meta.get("replicated"):
        return Replicate()
    widths = meta.get("sub_param_shard_widths") or [meta.get("partition_sizes") or [shape[dim] / size] * size]
    if len({width for widths_of_part in widths for width in widths_of_part}) > 1:
        problem = f"uneven parts {widths} along dim {dim} under tensor parallelism"
        needed = f"{size} equal ones of each of its {len(widths)} parts"
        write = "Choose an autotp_size that divides its heads, or skip it in partition_config"
        raise LayoutError(explain_error(name, problem, needed, write))
    return Shard(dim) if len(widths) == 1 else _StridedShard(dim, split_factor=len(widths))


_READ = "0.19.8"
_DIFFERENT = f"Install deepspeed=={_READ}, whose records are known, or report this version to muonmesh"


@dataclass(frozen=True)
class Flat:
    """One flat fp32 tensor of the engine.

    Attributes:
        tensor: The flat tensor, which DeepSpeed gives to the optimizer to step; shape (size,).
        group: The index of its param group.
        process_group: The ranks that share its parameters.
        spans: Its parameters in the order in which they lie in it, each with the interval that this rank's flat
            tensor holds of it. The length is 0 if it holds no element.
    """

    tensor: Tensor
    group: int
    process_group: dist.ProcessGroup
    spans: tuple[tuple[nn.Parameter, Interval], ...]


def read_flats(engine: Any) -> list[Flat]:
    """Return the flat tensors of a ZeRO engine, in the order in which DeepSpeed steps them; no communication.

    Raises:
        LayoutError: the engine's records cannot be read.
    """
    zero, version = engine.optimizer, f"DeepSpeed {deepspeed.__version__}"
    try:
        if hasattr(zero, "fp16_partitioned_groups_flat"):
            return list(_read_stage_3(zero))
        if hasattr(zero, "round_robin_bit16_groups"):
            tensors, sizes = zero.single_partition_of_fp32_groups, zero.partition_size
            parameters, offsets = zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets
            return list(_read_partitions(zero, tensors, sizes, parameters, offsets))
        if hasattr(zero, "bf16_groups"):
            # `BF16_Optimizer` (stage 1 with fp32 accumulation) puts each group's parameters end to end.
            tensors, parameters = zero.fp32_groups_flat_partition, zero.bf16_groups
            lengths = [[parameter.numel() for parameter in group] for group in parameters]
            offsets = [list(itertools.accumulate(sizes_in_group, initial=0))[:-1] for sizes_in_group in lengths]
            return list(_read_partitions(zero, tensors, [t.numel() for t in tensors], parameters, offsets))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        problem = f"records of {type(zero).__name__} that cannot be read ({type(error).__name__}: {error})"
        raise LayoutError(explain_error(version, problem, f"those of {_READ}", _DIFFERENT)) from error
    raise LayoutError(explain_error(version, f"a {type(zero).__name__}", "a ZeRO optimizer", _DIFFERENT))


def _read_partitions(zero: Any, tensors: Any, sizes: Any, parameters: Any, offsets: Any) -> Iterator[Flat]:
    """Yield flat tensors in which each group's parameters lie at offsets and are cut into equal partitions."""
    for number, tensor in enumerate(tensors):
        group = zero.real_dp_process_group[number]
        low = dist.get_rank(group) * sizes[number]
        intervals = tuple(
            (parameter, Interval(0, parameter.numel(), offset).part(low, low + tensor.numel()))
            for parameter, offset in zip(parameters[number], offsets[number], strict=True)
        )
        yield Flat(tensor, number, group, intervals)


def _read_stage_3(zero: Any) -> Iterator[Flat]:
    """Yield the flat tensors of stage 3's sub-groups.

    Each rank holds an equal slice of every parameter; the last slices are padded with uninitialized memory.
    """
    for number, tensor in enumerate(zero.fp32_partitioned_groups_flat):
        group = zero._get_sub_group_process_group(number)
        intervals = []
        for parameter in zero.fp16_groups[number]:
            sub_group, start, length = zero.grad_position[zero.get_param_id(parameter)]
            if sub_group != number:
                problem = f"grad_position {sub_group} of a parameter in sub-group {number}"
                raise ValueError(explain_error("DeepSpeed", problem, f"{number}", _DIFFERENT))
            first = min(dist.get_rank(group) * length, parameter.ds_numel)
            intervals.append((parameter, Interval(first, min(length, parameter.ds_numel - first), start)))
        yield Flat(tensor, zero.sub_group_to_group_id[number], group, tuple(intervals))


def prove(
    read: Callable[[], list[Flat]], parameters: dict[int, EngineParameter]
) -> list[tuple[Flat, list[FlatParameter]]]:
    """Return each flat tensor with its parameters, after both checks. All ranks call it.

    Args:
        read: Returns the flat tensors of this rank.
        parameters: For each parameter, by its ``id``, its description before ZeRO cuts it.

    Raises:
        LayoutError: on every rank, if the records of any rank do not describe its flat tensors.
    """
    flats = settled(read, kind=LayoutError)
    everyone = results_of_all_ranks(lambda: _intervals(flats, parameters), kind=LayoutError)

    def contents(flat: Flat) -> list[FlatParameter]:
        ranks = tuple(dist.get_process_group_ranks(flat.process_group))
        records = [parameters[id(parameter)] for parameter, _ in flat.spans]
        return [FlatParameter(record.name, _layout_of(record, ranks, everyone), record.matrices) for record in records]

    # All ranks must succeed here before they gather parameters together.
    layouts = settled(lambda: [contents(flat) for flat in flats], kind=LayoutError)
    results_of_all_ranks(lambda: _compare(flats, parameters), kind=LayoutError)
    return list(zip(flats, layouts, strict=True))


_Intervals = Mapping[str, tuple[int, Interval]]
"""For each parameter by name: the size of the flat tensor of this rank that holds it, and its interval there."""


def _intervals(flats: Sequence[Flat], parameters: dict[int, EngineParameter]) -> _Intervals:
    """Return the intervals of this rank's flat tensors, for the other ranks.

    Raises:
        LayoutError: the flat tensors do not hold exactly the parameters of the groups, each once.
    """
    count = Counter(id(parameter) for flat in flats for parameter, _ in flat.spans)
    wrong = sum((count - Counter(parameters.keys())).values())
    missing = sorted(description.name for key, description in parameters.items() if key not in count)
    if wrong or missing:
        problem = f"{wrong} parameters in its flat tensors that it was not given, not {missing}"
        raise LayoutError(explain_error("DeepSpeed", problem, "those of the groups, each once", _DIFFERENT))
    return {parameters[id(p)].name: (flat.tensor.numel(), interval) for flat in flats for p, interval in flat.spans}


def _layout_of(record: EngineParameter, ranks: tuple[int, ...], everyone: Sequence[_Intervals]) -> FlatShards:
    within = record.within(ranks)
    try:
        entries = {rank: everyone[rank][record.name] for rank in within.ranks}
        sizes = [size for size, _ in entries.values()]
        layout = FlatShards.on_axes(within, [0], lambda rank, _: [entries[rank][1]], sizes)
        layout.prove_cover()
    except (KeyError, LayoutError) as error:
        needed = "each element held exactly once"
        raise LayoutError(explain_error(record.name, str(error), needed, _DIFFERENT)) from None
    return layout


def _compare(flats: Sequence[Flat], parameters: dict[int, EngineParameter]) -> None:
    """Raise LayoutError unless the flat tensors contain the values of the parameters that should lie there.

    At stage 3, the ranks of a process group gather one parameter at a time, so they all call it.
    """
    wrong = None
    every = ((flat.tensor, placed) for flat in flats for placed in flat.spans)
    for tensor, (parameter, (first, length, start)) in every:
        whole = _whole(parameter)
        in_buffer = tensor.detach()[start : start + length]
        needed = whole.reshape(-1)[first : first + length].to(in_buffer.device, in_buffer.dtype)
        if not torch.equal(in_buffer.nan_to_num(), needed.nan_to_num()):
            wrong = wrong or parameters[id(parameter)].name
    if wrong is not None:
        others = "other values in its flat fp32 tensor than in the module"
        same = "the same: the records do not say where it lies"
        raise LayoutError(explain_error(wrong, others, same, _DIFFERENT))


def _whole(parameter: Any) -> Tensor:
    """Return a copy of the whole parameter with which this rank's module computes; all ranks gather it at stage 3."""
    parted = hasattr(parameter, "ds_id") and parameter.ds_status.name != "AVAILABLE"
    with deepspeed.zero.GatheredParameters([parameter], enabled=parted):
        whole: Tensor = parameter.detach().clone()
    return whole
