"""Layout readers: functions that know where the tensors of another framework live.

The core reads torch's DTensors and ``layouts=``. What another framework writes on its tensors, only its reader reads.
This file imports nothing heavy, since `muonmesh` registers its own readers when it is imported.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from muonmesh.errors import LayoutError, explain_error

if TYPE_CHECKING:
    from torch import Tensor

    from muonmesh.layout import Layout

LayoutReader: TypeAlias = "Callable[[str, Tensor], tuple[Any, ...] | Layout | None]"
"""A function from the name of a parameter and its tensor on this rank to an entry of ``layouts=``; None: unknown."""

DECLARE = "Write Muon(..., layouts={name: muonmesh.FlatShards(...)}), which can say any cut of the flattened parameter"

_NAMED = re.compile(r"[\w.]+:\w+")
_registered: list[LayoutReader | str] = []


def register_layout_reader(reader: LayoutReader | str) -> LayoutReader | str:
    """Register a function that says where the tensors of a framework live, so that users need no ``layouts=``.

    A plan calls the readers for each tensor that has no entry in ``layouts=``, DTensors too. The reader registered last
    is called first, and the first answer counts. A reader reads only attributes of the tensor, and communicates
    nothing. It returns None for tensors of others. If it knows the tensor and cannot read it, it raises a LayoutError,
    because a shard that is taken for a whole matrix is a wrong update without an error. This function also works as a
    decorator::

        @muonmesh.register_layout_reader
        def row_shards(name, tensor):
            if isinstance(tensor, RowShard):
                return tensor.mesh, [Shard(0)], tensor.whole_shape

    Args:
        reader: A function of (name, tensor); or "module:function", which is imported when the first layout is read. For
            a plain tensor it returns (mesh, placements), or (mesh, placements, global shape), in DTensor's vocabulary.
            For any tensor it may return a `FlatShards`, also for a DTensor that holds other elements than its
            placements say.

    Returns:
        The same reader.

    Raises:
        TypeError: ``reader`` is neither a function nor "module:function".
    """
    candidate: object = reader
    if not (_NAMED.fullmatch(candidate) if isinstance(candidate, str) else callable(candidate)):
        needed = 'a function of (name, tensor), or "module:function"'
        raise TypeError(explain_error("register_layout_reader", f"{candidate!r}", needed, "Pass the function itself"))
    if reader not in _registered:
        _registered.insert(0, reader)
    return reader


def read_layout(name: str, tensor: Tensor) -> tuple[Any, ...] | Layout | None:
    """Return the first answer of a registered reader; None if all return None. No communication.

    Raises:
        LayoutError: a reader raises an error.
    """
    for number, reader in enumerate(_registered):
        try:
            if isinstance(reader, str):
                module, _, function = reader.partition(":")
                reader = _registered[number] = getattr(importlib.import_module(module), function)
            layout = reader(name, tensor)
        except LayoutError:
            raise
        except Exception as error:
            by = f"{reader.__module__}.{reader.__qualname__}" if hasattr(reader, "__qualname__") else repr(reader)
            problem = f"{type(error).__name__}: {error}, raised by the layout reader {by}"
            raise LayoutError(explain_error(name, problem, "its layout", DECLARE)) from error
        if layout is not None:
            return layout
    return None
