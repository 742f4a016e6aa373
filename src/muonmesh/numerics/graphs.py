"""Graphs: captures the orthogonalization of a batch as a CUDA graph, which one launch starts.

A graph reads and writes the addresses with which it was captured. So memory is kept between steps: for the matrices and
the results of a batch, and in a private pool for all intermediate tensors. Batches of one stream run one after the
other, so they share this memory, which is as large as the largest batch needs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from muonmesh.errors import explain_error

MOST = 4
"""Largest number of batches that have a graph."""

_ALIGNMENT = 512
"""The alignment of memory in bytes, as in torch's allocator."""


class Graphs:
    """The CUDA graphs of one optimizer's batches: of the first `MOST` batches that recur.

    Batches with the same shape, dtype and method share a graph. A graph belongs to one stream. On this stream, each
    batch is copied in, computed and copied out before the next batch is copied in.

    Args:
        device: The device of the matrices.

    Raises:
        ValueError: the device has no CUDA graphs.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            needed, write = "them on a CUDA device", "Leave cuda_graphs out, or move the model to the device first"
            raise ValueError(explain_error("cuda_graphs", f"True with matrices on {device}", needed, write))
        self._device = device
        self._seen: dict[tuple[Hashable, ...], int] = {}
        self._memory: dict[torch.cuda.Stream, _Memory] = {}
        self._batches: dict[tuple[Hashable, ...], _Batch] = {}

    def __len__(self) -> int:
        """Return how many batches have a graph, or get one at their next run."""
        return len(self._batches)

    @property
    def bytes(self) -> int:
        """The bytes of memory that are kept between steps."""
        return sum(memory.bytes for memory in self._memory.values())

    def memory(self, *key: Hashable) -> tuple[Tensor, Tensor] | None:
        """Return the graph's own memory for a batch with this key and for its results, so that `run` needs no copies.

        The results are valid until the next batch is written. None if there is no graph with this key.
        """
        found = self._batches.get((*key, torch.cuda.current_stream(self._device)))
        return None if found is None else (found.given[0], found.given[1])

    def run(self, call: Callable[..., object], given: Sequence[Tensor], *key: Hashable) -> bool:
        """Run ``call(*given)``: the second time in memory that is kept, from the third time on as a graph.

        Args:
            call: A function that starts the same kernels whatever the values of the tensors are. It may overwrite the
                first tensor, and its only result is written into the second. The CPU must not wait in it, and it must
                not communicate.
            given: The matrices and their results.
            key: Equal for calls that start the same kernels; it includes shapes and dtypes of the tensors.

        Returns:
            False if nothing was run: at the first time; if other batches have all graphs; or if the batch is larger
            than all batches that came before the first graph.
        """
        stream = torch.cuda.current_stream(self._device)
        key = (*key, stream)
        if key not in self._batches:
            size = 2 * _aligned(given[0].nbytes)
            if key not in self._seen or len(self._batches) == MOST:
                self._seen[key] = size
                return False
            if stream not in self._memory:
                most = max(seen for (*_, on), seen in self._seen.items() if on == stream)
                self._memory[stream] = _Memory(most, self._device)
            if size > len(self._memory[stream].long):
                return False
            self._batches[key] = _Batch(self._memory[stream], given)
        self._batches[key].run(call, given)
        return True


class _Memory:
    """The memory that the batches of one stream share.

    Attributes:
        long: The memory of their matrices and results.
        bytes: The bytes of ``long`` and of the graphs' pool.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.long = torch.empty(size, dtype=torch.uint8, device=device)
        self.bytes = size
        self._pool = torch.cuda.graph_pool_handle()
        self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, call: Callable[..., object], given: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        """Return the graph of a call without running it. The CPU waits for the device, once for each graph."""
        device, graph = self.long.device, torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch._C._cuda_clearCublasWorkspaces()  # this stream's may be another stream's, and be freed
        before = torch.cuda.memory_reserved(device)
        with torch.cuda.stream(self._aside):
            # Other threads, such as NCCL's, may query their events meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                call(*given)
            finally:
                graph.capture_end()
        self.bytes += torch.cuda.memory_reserved(device) - before
        torch._C._cuda_clearCublasWorkspaces()  # the graph's workspace stays in its pool
        return graph


class _Batch:
    """A batch that recurs, with its graph.

    Attributes:
        given: Matrices and results, at fixed addresses.
    """

    def __init__(self, memory: _Memory, given: Sequence[Tensor]) -> None:
        matrices, _ = given
        halves = memory.long[: matrices.nbytes], memory.long[_aligned(matrices.nbytes) :][: matrices.nbytes]
        self.given = [half.view(matrices.dtype).view(matrices.shape) for half in halves]
        self._memory, self._warm = memory, False
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, call: Callable[..., object], given: Sequence[Tensor]) -> None:
        """Run the batch, see `Graphs.run`. The first run compiles and loads kernels."""
        matrices, results = zip(self.given, given, strict=True)
        if not _is_one(*matrices):
            matrices[0].copy_(matrices[1])
        if self._warm and self._graph is None:
            self._graph = self._memory.capture(call, self.given)
        if self._graph is None:
            call(*self.given)
        else:
            self._graph.replay()
        self._warm = True
        if not _is_one(*results):
            results[1].copy_(results[0])


def _is_one(own: Tensor, theirs: Tensor) -> bool:
    """Whether a caller's tensor is the graph's own memory, so that no copy is needed."""
    return bool(torch._C._is_alias_of(own, theirs))  # type: ignore[attr-defined]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def capture_error() -> Exception:
    """Return the error for a caller that captures the step itself: a replay would read memory that is in other use."""
    needed = "it outside of one, since a replay would repeat its learning rate"
    write = "Capture forward and backward only, and write cuda_graphs=True"
    return RuntimeError(explain_error("step()", "in a CUDA graph capture", needed, write))
