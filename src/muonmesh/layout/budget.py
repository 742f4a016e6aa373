"""Budget: the memory that a step may take, and the bucket sizes that keep the step within this memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from muonmesh.layout.parameter import Parameter

_PARTS = {(True, False): 8, (False, False): 3, (True, True): 16, (False, True): 12}
_LEAST = {False: 160 << 20, True: 256 << 20}
_WORKSPACE = 32 << 20
"""Memory that cuBLAS takes beside, on an H100."""


@dataclass(frozen=True)
class Budget:
    """The memory that a step may take on a rank in addition to weights, gradients and state.

    A very large matrix may need more. A bucket holds E bytes of an owner's matrices. If anything is gathered, a step on
    a device holds at most 8 E: buffers to send, receive and assemble the arriving bucket; matrices, results and squares
    of the computed bucket (`Plan.batch_size`); and buffers to send and receive the leaving bucket. If replicas hold
    whole matrices, it is 3 E: a buffer to send, and buffers to receive in two exchanges, or memory to compute in. A CPU
    keeps all buffers twice, and each of its threads takes some memory.

    Attributes:
        bytes: The whole budget in bytes.
        itemsize: Bytes of an element on the wire and in the computation.
        gathers: Whether any matrix is gathered.
        host: Whether the step runs on a CPU.
    """

    bytes: int = 1 << 40
    itemsize: int = 2
    gathers: bool = True
    host: bool = False

    @staticmethod
    def of(parameters: Sequence[Parameter], megabytes: float | None, *, itemsize: int, host: bool) -> Budget:
        """Return a budget of ``megabytes`` MiB, or by default one by the memory of torch.optim.Muon.

        torch.optim.Muon needs for the largest matrix the direction in fp32 and bf16, the result, and two squares. The
        default is twice that where matrices travel, at least 160 MiB, on a CPU 256 MiB. One device gets 1.5 times what
        torch.optim.Muon takes there with cuBLAS's workspace, of which we take one too from 2,048 rows on; at least what
        that is for GPT-2 small, 78 MiB. The default is larger for many small matrices: 1/128 of a rank's memory for
        matrices, gradients and momentum in fp32.
        """
        shapes = {matrix.shape for parameter in parameters for matrix in parameter.matrices}
        torchs = max((8 * rows * cols + 4 * rows * rows for rows, cols in shapes), default=0)
        ranks = set[int]().union(*{id(p.target.ranks): p.target.ranks for p in parameters}.values())
        stored = sum(math.prod(p.target.shape) * p.target.copies() for p in parameters) // max(1, len(ranks))
        if megabytes is not None:
            most = int(min(megabytes, 2.0**40) * 2**20)
        elif len(ranks) == 1 and not host:
            gpt2 = 8 * 768 * 3072 + 4 * 768 * 768
            most = max(3 * (torchs + _WORKSPACE) // 2 - _WORKSPACE, 3 * (gpt2 + _WORKSPACE) // 2, 12 * stored // 128)
        else:
            most = max(2 * torchs, _LEAST[host], 12 * stored // 128)
        gathers = any(p.momentum_storage.copies() < len(p.momentum_storage.ranks) for p in parameters)
        return Budget(most, itemsize, gathers, host)

    @property
    def bucket_elements(self) -> int:
        """The number of elements of an owner's matrices in a bucket."""
        return max(1, self.bytes // (_PARTS[self.gathers, self.host] * self.itemsize))

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that a source sends at a time; at most 16 MiB, because the backward pass needs memory."""
        return min(self.bucket_elements * self.itemsize, 1 << 24)

    @property
    def elements_on_device(self) -> int:
        """The number of elements whose state is on the device at a time, if state is kept in CPU memory."""
        return max(1, self.bytes // 32)


UNLIMITED = Budget()
