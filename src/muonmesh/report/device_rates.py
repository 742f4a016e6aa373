"""DeviceRates: how fast a device is, and the one model of the time that a step takes on it.

`muonmesh.testing` offers this class under the name ``Rates``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DeviceRates:
    """How fast a device is, for the model of time. By default one H100 SXM; docs/plan.md has the source of each rate.

    Attributes:
        flops: The most that bf16 products may reach, FLOP/s: 70 % of the data sheet's 989 TFLOP/s.
        published: What a triangle of tiles by Triton is published to reach on large matrices: 38 % (flash-muon, H800).
        bytes: Of its memory, B/s: 80 % of the data sheet's 3.35 TB/s.
        wire: Of the network to other ranks, B/s each way: 400 Gb/s.
        kernel: Seconds of the host for a kernel of ours, with the step's Python around it.
        operation: Likewise for one of torch's.
        view: Likewise for an operation that starts none.
        matrix: Seconds of the host for each matrix, of the step's Python.
        collective: Seconds until the first byte of a collective arrives.
        message: Seconds more for each rank that an all-to-all reaches.
    """

    flops: float = 0.70 * 989e12
    published: float = 0.38 * 989e12
    bytes: float = 0.80 * 3.35e12
    wire: float = 50e9
    kernel: float = 30e-6
    operation: float = 4e-6
    view: float = 1e-6
    matrix: float = 10e-6
    collective: float = 30e-6
    message: float = 1e-6

    @staticmethod
    def weight_of(elements: float, *, by_triton: bool) -> float:
        """Return how much longer a FLOP takes than at the rate ``published``, in a product with so many elements.

        Fitted to flash-muon's times of X Xᵀ on an H800, 1024 to 8192 rows, by its kernel and by cuBLAS: both speeds
        grow with the side of the result to the power of 1.2, up to 3000 and 2200 rows. A batch counts as one square.
        """
        most, full = (1.0, 3000) if by_triton else (0.48 / 0.38, 2200)
        slower: float = (full * full / max(1.0, elements)) ** 0.6
        return max(1.0, slower) / most

    def parts(self, step: Any, *, published: bool) -> dict[str, float]:
        """Return the modelled seconds of the host, the device and the network, which work side by side.

        Args:
            step: A `muonmesh.testing.DryRun` or a `Forecast`, whose figures have the same names.
            published: Whether products are as fast as published ones, not as fast as they may be at most.
        """
        products = step.slow_flops / self.published if published else step.flops / self.flops
        started = step.kernels * self.kernel + (step.launches - step.kernels) * self.operation
        return {
            "host": started + step.views * self.view + step.matrices * self.matrix,
            "device": products + step.elementwise_bytes / self.bytes,
            "network": step.bytes_sent / self.wire + step.collectives * self.collective + step.messages * self.message,
        }
