"""Stochastic rounding of local shards: finds the number of each element in the whole parameter."""

from __future__ import annotations

from torch import Tensor

from muonmesh.comm.storage import Storage, this_rank
from muonmesh.comm.views import view_in_storage
from muonmesh.layout import Piece
from muonmesh.layout.region import Block, Region, number_in_whole, row_major
from muonmesh.numerics.rules import Hyperparameters
from muonmesh.numerics.stochastic import Rounding, keys_of


def rounding_of(name: str, storage: Storage, rule: Hyperparameters, piece: Piece) -> Rounding:
    """Return the stochastic rounding of a piece of a local shard in this step.

    Args:
        name: The name of the parameter, or of a tensor of its state.
        storage: The storage of this tensor.
        rule: The rule of the parameter's group; its ``stochastic_rounding`` must be a seed.
        piece: Elements of the local storage.
    """
    assert rule.stochastic_rounding is not None
    start, strides = number_in_whole(piece, _blocks(storage), storage.shape)
    return Rounding(keys_of(rule.stochastic_rounding, rule.steps_taken, name), start, strides)


def round_stored(name: str, storage: Storage, rule: Hyperparameters, exact: Tensor, into: Tensor) -> None:
    """Round this rank's part of a parameter, or of a tensor of its state, stochastically to bf16.

    Args:
        name: The name of the parameter, or of the tensor of its state.
        storage: The storage of this tensor.
        rule: The rule of the parameter's group; its ``stochastic_rounding`` must be a seed.
        exact: The values: fp32, contiguous, in the order of the local storage.
        into: The rounded values: bf16, of the same shape, written.
    """
    rounded = into.contiguous()
    for block in _blocks(storage):
        piece = Piece(block.region.shape, block.start, block.strides, 0, block.strides)
        rounding = rounding_of(name, storage, rule, piece)
        rounding.write(view_in_storage(exact, piece), view_in_storage(rounded, piece))
    if rounded is not into:
        into.copy_(rounded)


def _blocks(storage: Storage) -> tuple[Block, ...]:
    if storage.layout is None:
        whole = Region.box((0,) * len(storage.shape), tuple(storage.shape))
        return (Block(whole, 0, row_major(tuple(storage.shape))),)
    return tuple(block for block in storage.layout.blocks(this_rank()) if block.region.numel)
