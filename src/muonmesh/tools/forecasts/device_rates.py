"""DeviceRates: the speed of a device, and the model of the time that a step takes on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DeviceRates:
    """The speed of a device, for the model of time. Default: one H100 SXM; docs/internals/planning.md has sources.

    Attributes:
        flops: Upper limit of bf16 products in FLOP/s: 70 % of the data sheet's 989 TFLOP/s.
        published: FLOP/s of Triton's symmetric products on large matrices: 38 % (published by flash-muon, H800).
        bytes: Memory bandwidth in B/s: 80 % of the data sheet's 3.35 TB/s.
        wire: Network bandwidth to other ranks in B/s, each way: 400 Gb/s.
        kernel: Seconds that the CPU takes to start a kernel of muonmesh, with the Python code around it. This rate and
            the next three were measured on a machine with one H200.
        operation: Seconds that the CPU takes for an operation of torch that starts a kernel.
        view: Seconds that the CPU takes for an operation of torch that starts no kernel.
        matrix: Seconds that the CPU takes for each matrix, in the Python code of the step.
        collective: Seconds until the first byte of a collective arrives.
        message: Additional seconds for each rank that an all-to-all reaches.
        memory: Bytes of memory; no part of the model of time.
    """

    flops: float = 0.70 * 989e12
    published: float = 0.38 * 989e12
    bytes: float = 0.80 * 3.35e12
    wire: float = 50e9
    kernel: float = 30e-6
    operation: float = 12e-6
    view: float = 2e-6
    matrix: float = 28e-6
    collective: float = 30e-6
    message: float = 1e-6
    memory: float = 80e9

    @staticmethod
    def weight_of(elements: float, *, by_triton: bool) -> float:
        """Return the time of a FLOP in a product with ``elements`` in its result, relative to the rate ``published``.

        Fitted to flash-muon's times of X Xᵀ on an H800, 1024 to 8192 rows, by its kernel and by cuBLAS: both speeds
        grow with the side of the result to the power of 1.2, up to 3000 and 2200 rows. A batch counts as one square.
        """
        most, full = (1.0, 3000) if by_triton else (0.48 / 0.38, 2200)
        slower: float = (full * full / max(1.0, elements)) ** 0.6
        return max(1.0, slower) / most


class Timed:
    """A step whose time is modelled from figures of it, such as a `Forecast`."""

    def parts(self: Any, *, published: bool = True) -> dict[str, float]:
        """Return the modelled seconds of the CPU ("host"), the device and the network, which work in parallel.

        Args:
            published: Whether matrix products run at the rate ``published``. If False, they run at the upper limit
                ``flops``.
        """
        rates: DeviceRates = self.rates
        products = self.slow_flops / rates.published if published else self.flops / rates.flops
        started = self.kernels * rates.kernel + (self.launches - self.kernels) * rates.operation
        begun = self.collectives * rates.collective + self.messages * rates.message
        return {
            "host": started + self.views * rates.view + self.matrices * rates.matrix,
            "device": products + self.elementwise_bytes / rates.bytes,
            "network": self.bytes_sent / rates.wire + begun,
        }

    @property
    def seconds(self) -> float:
        """Modelled seconds of the step: the slowest of `parts`. Waits of one part for another are left out."""
        return max(self.parts().values())

    @property
    def limited_by(self) -> str:
        """The slowest of `parts`, such as "network"; "host or device" if this depends on the speed of products."""
        times = self.parts(published=False), self.parts()
        return " or ".join(dict.fromkeys(max(parts, key=parts.__getitem__) for parts in times))

    @property
    def best_seconds(self) -> float:
        """Lower bound of the modelled seconds of the step: products run at the upper limit of `DeviceRates.flops`."""
        return max(self.parts(published=False).values())
