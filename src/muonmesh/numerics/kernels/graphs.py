"""Graphs: the orthogonalization of a batch, captured as a CUDA graph and started by one launch.

A graph reads and writes the addresses with which it was captured. So each batch that has a graph has memory of its own,
kept between steps: the matrices, the results, what these are multiplied by, and in the graph's private pool all that
lies between.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from muonmesh.errors import explain_error

MOST = 4
"""Batches that have a graph, since each keeps memory."""


class Graphs:
    """The CUDA graphs of one optimizer's batches: of the first `MOST` that come a second time.

    Batches with one shape, dtype and method share a graph. They do not overwrite each other: a graph belongs to one
    stream, and on that stream each batch is copied in, computed and copied out before the next one is copied in.

    Args:
        device: Where the matrices are.

    Raises:
        ValueError: the device has no CUDA graphs.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            needed, write = "them on a CUDA device", "Leave cuda_graphs out, or move the model to the device first"
            raise ValueError(explain_error("cuda_graphs", f"True with matrices on {device}", needed, write))
        self._device = device
        self._seen = set[Hashable]()
        self._batches: dict[Hashable, _Batch] = {}

    def __len__(self) -> int:
        """Return how many batches have memory of their own."""
        return len(self._batches)

    @property
    def bytes(self) -> int:
        """The memory that is kept between steps."""
        return sum(batch.bytes for batch in self._batches.values())

    def memory(self, *key: Hashable) -> tuple[Tensor, Tensor] | None:
        """Return where a batch with this key may be written, and where `run` leaves its results, without any copy.

        What is read there is valid until the next batch with this key is written. None: it has no memory of its own.
        """
        found = self._batches.get((*key, torch.cuda.current_stream(self._device)))
        return None if found is None else (found.given[0], found.given[1])

    def run(self, call: Callable[..., object], given: Sequence[Tensor], *key: Hashable) -> bool:
        """Run ``call(*given)``: the second time in memory that is kept, from the third time on as a graph.

        Args:
            call: Starts the same whatever values the tensors have. It may overwrite the first, and leaves nothing but
                what it writes into the second. No host waits in it, and nothing is sent.
            given: The matrices, their results, and what else is read.
            key: Equal for calls that start the same; it says shapes and dtypes of the tensors.

        Returns:
            False where nothing was run: at the first time, and if other batches have the memory.
        """
        key = (*key, torch.cuda.current_stream(self._device))
        batch = self._batches.get(key)
        if batch is None:
            if key not in self._seen or len(self._batches) == MOST:
                self._seen.add(key)
                return False
            batch = self._batches[key] = _Batch(given)
        batch.run(call, given)
        return True


class _Batch:
    """One batch with memory of its own, and its graph.

    Attributes:
        given: Matrices, results, and what else is read, at addresses that stay.
        bytes: Theirs, and what the graph's pool has taken from the device.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.given = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in given]
        self.bytes = sum(each.nbytes for each in self.given)
        self._warm, self._graph = False, None  # type: tuple[bool, torch.cuda.CUDAGraph | None]

    def run(self, call: Callable[..., object], given: Sequence[Tensor]) -> None:
        """See `Graphs.run`. The first run makes all that is made once: kernels are compiled and loaded then."""
        (_, out, *_), (_, theirs, *_) = self.given, given
        for own, other in zip(self.given, given, strict=True):
            if own is not out and not _is_one(own, other):
                own.copy_(other)
        if self._warm and self._graph is None:
            self._graph = self._capture(call)
        if self._graph is None:
            call(*self.given)
        else:
            self._graph.replay()
        self._warm = True
        if not _is_one(out, theirs):
            theirs.copy_(out)

    def _capture(self, call: Callable[..., object]) -> torch.cuda.CUDAGraph:
        """Return the graph of a call, which is not run. The host waits for the device, once for each graph."""
        device, graph = self.given[0].device, torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch._C._cuda_clearCublasWorkspaces()  # those of this stream may be another's, and be freed
        before = torch.cuda.memory_reserved(device)
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            # Other threads, such as NCCL's, may ask for their events meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                call(*self.given)
            finally:
                graph.capture_end()
        self.bytes += torch.cuda.memory_reserved(device) - before
        torch._C._cuda_clearCublasWorkspaces()  # that of the graph stays in its pool, and nobody else takes it
        return graph


def _is_one(own: Tensor, other: Tensor) -> bool:
    """Whether a caller works in the memory that was handed to it, which is then all of it."""
    return bool(torch._C._is_alias_of(own, other))  # type: ignore[attr-defined]
