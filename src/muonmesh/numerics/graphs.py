"""Graphs: the orthogonalization of a batch, captured as a CUDA graph and started by one launch.

A graph reads and writes the addresses with which it was captured. So memory is kept between steps: for the matrices and
the results of a batch, and in a private pool for all that lies between. Batches of one stream come one after the other,
so they take turns in it, and it is as large as the largest of them needs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from muonmesh.errors import explain_error

MOST = 4
"""Batches that have a graph."""

_ALIGNMENT = 512
"""Bytes, as torch's allocator aligns memory."""


class Graphs:
    """The CUDA graphs of one optimizer's batches: of the first `MOST` that come a second time.

    Batches with one shape, dtype and method share a graph. It belongs to one stream, on which each batch is copied in,
    computed and copied out before the next one is copied in.

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
        self._seen: dict[tuple[Hashable, ...], int] = {}
        self._memory: dict[torch.cuda.Stream, _Memory] = {}
        self._batches: dict[tuple[Hashable, ...], _Batch] = {}

    def __len__(self) -> int:
        """Return how many batches have a graph, or will at their next run."""
        return len(self._batches)

    @property
    def bytes(self) -> int:
        """The memory that is kept between steps."""
        return sum(memory.bytes for memory in self._memory.values())

    def memory(self, *key: Hashable) -> tuple[Tensor, Tensor] | None:
        """Return where a batch with this key may be written, and where `run` leaves its results, without any copy.

        What is read there is valid until the next batch is written. None: it has no graph.
        """
        found = self._batches.get((*key, torch.cuda.current_stream(self._device)))
        return None if found is None else (found.given[0], found.given[1])

    def run(self, call: Callable[..., object], given: Sequence[Tensor], *key: Hashable) -> bool:
        """Run ``call(*given)``: the second time in memory that is kept, from the third time on as a graph.

        Args:
            call: Starts the same whatever values the tensors have. It may overwrite the first, and leaves nothing but
                what it writes into the second. No host waits in it, and nothing is sent.
            given: The matrices, their results, and what else is read, a number for each.
            key: Equal for calls that start the same; it says shapes and dtypes of the tensors.

        Returns:
            False where nothing was run: at the first time, if other batches have the graphs, and if it is larger than
            all that came before these had any.
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
    """What the batches of one stream take turns in.

    Attributes:
        long: Their matrices and results.
        bytes: Those, and what the pool of the graphs has taken from the device.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.long = torch.empty(size, dtype=torch.uint8, device=device)
        self.bytes = size
        self._pool = torch.cuda.graph_pool_handle()
        self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, call: Callable[..., object], given: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        """Return the graph of a call, which is not run. The host waits for the device, once for each graph."""
        device, graph = self.long.device, torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch._C._cuda_clearCublasWorkspaces()  # those of this stream may be another's, and be freed
        before = torch.cuda.memory_reserved(device)
        with torch.cuda.stream(self._aside):
            # Other threads, such as NCCL's, may ask for their events meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                call(*given)
            finally:
                graph.capture_end()
        self.bytes += torch.cuda.memory_reserved(device) - before
        torch._C._cuda_clearCublasWorkspaces()  # that of the graph stays in its pool, and nobody else takes it
        return graph


class _Batch:
    """A batch that has come a second time, and its graph.

    Attributes:
        given: Matrices, results, and what else is read, at addresses that stay.
    """

    def __init__(self, memory: _Memory, given: Sequence[Tensor]) -> None:
        matrices, _, *numbers = given
        halves = memory.long[: matrices.nbytes], memory.long[_aligned(matrices.nbytes) :][: matrices.nbytes]
        self.given = [half.view(matrices.dtype).view(matrices.shape) for half in halves]
        self.given += [torch.empty_like(each) for each in numbers]
        self._memory, self._warm = memory, False
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, call: Callable[..., object], given: Sequence[Tensor]) -> None:
        """See `Graphs.run`. The first run makes all that is made once: kernels are compiled and loaded then."""
        matrices, results, *numbers = zip(self.given, given, strict=True)
        for own, theirs in (matrices, *numbers):
            if not _is_one(own, theirs):
                own.copy_(theirs)
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
    """Whether a caller works in the memory that was handed to it, which is then all of it."""
    return bool(torch._C._is_alias_of(own, theirs))  # type: ignore[attr-defined]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def refuse_capture() -> None:
    """Raise RuntimeError if a caller captures the step itself, whose tables are in memory that others have by then."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        needed = "it outside of one, since a replay would repeat its learning rate"
        write = "Capture forward and backward only, and write cuda_graphs=True"
        raise RuntimeError(explain_error("step()", "in a CUDA graph capture", needed, write))
