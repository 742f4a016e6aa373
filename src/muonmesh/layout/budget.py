"""Budget: the memory that a step may take, and how much travels and is computed at a time so that it keeps to that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from muonmesh.layout.parameter import Parameter

_PARTS = {(True, False): 8, (False, False): 3, (True, True): 16, (False, True): 12}
_LEAST = {False: 160 << 20, True: 256 << 20}


@dataclass(frozen=True)
class Budget:
    """The memory that a step takes on a rank beside weights, gradients and state, where its largest matrix lets it.

    A bucket holds E bytes of an owner's matrices. Where anything is gathered, a step on a device holds at most 8 E: of
    the bucket that arrives what is sent, received and assembled, of the one that is computed matrices, results and
    squares (`Plan.at_once`), and of the one that leaves what is sent and received. Where replicas hold whole matrices,
    it is 3 E: what is sent, and what is received in two rounds, or a third of it to compute in. A CPU keeps all buffers
    twice, and its threads take some memory each.

    Attributes:
        bytes: All of it.
        itemsize: Bytes of an element that travels and is computed.
        gathers: Whether any matrix is gathered.
        host: Whether the step is a CPU's.
    """

    bytes: int = 1 << 40
    itemsize: int = 2
    gathers: bool = True
    host: bool = False

    @staticmethod
    def of(parameters: Sequence[Parameter], megabytes: float | None, *, itemsize: int, host: bool) -> Budget:
        """Return what was asked for, or the default: twice what torch.optim.Muon takes for the largest matrix.

        That is fp32 and bf16 of the direction, the result, and two squares. Many small matrices get more: 1/128 of what
        a rank keeps in fp32 of matrices, their gradients and their momentum, and a few of them some MiB.
        """
        shapes = {matrix.shape for parameter in parameters for matrix in parameter.matrices}
        torchs = max((8 * rows * cols + 4 * rows * rows for rows, cols in shapes), default=0)
        ranks = set[int]().union(*{id(p.target.ranks): p.target.ranks for p in parameters}.values())
        stored = sum(math.prod(p.target.shape) * p.target.copies() for p in parameters) // max(1, len(ranks))
        most = (
            max(2 * torchs, 12 * stored // 128, _LEAST[host])
            if megabytes is None
            else int(min(megabytes, 2.0**40) * 2**20)
        )
        gathers = any(p.momentum_storage.copies() < len(p.momentum_storage.ranks) for p in parameters)
        return Budget(most, itemsize, gathers, host)

    @property
    def bucket_elements(self) -> int:
        """Elements of an owner's matrices in a bucket."""
        return max(1, self.bytes // (_PARTS[self.gathers, self.host] * self.itemsize))

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that a source sends at a time, during a backward pass, which needs memory itself."""
        return min(self.bucket_elements * self.itemsize, 1 << 24)

    @property
    def elements_on_device(self) -> int:
        """Elements whose state is on the device at a time, where it is kept on the host."""
        return max(1, self.bytes // 32)


UNLIMITED = Budget()
