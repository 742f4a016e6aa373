"""DeviceRates: how fast a device is, and the one model of the time that a step takes on it.

`muonmesh.testing` offers this class under the name ``Rates``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceRates:
    """How fast a device is, for the model of time. By default one H100 SXM, its data sheet's figures where marked so.

    Attributes:
        flops: bf16 products, FLOP/s: 70 % of the data sheet's 989 TFLOP/s.
        bytes: Of its memory, B/s: 80 % of the data sheet's 3.35 TB/s.
        wire: Of the network to other ranks, B/s each way: 400 Gb/s.
        launch: Seconds of the host for one launch through torch.
        collective: Seconds until the first byte of a collective arrives.
    """

    flops: float = 0.70 * 989e12
    bytes: float = 0.80 * 3.35e12
    wire: float = 50e9
    launch: float = 6e-6
    collective: float = 30e-6

    def parts(
        self, *, launches: int, flops: int, elementwise_bytes: int, bytes_sent: int, collectives: int
    ) -> dict[str, float]:
        """Return the modelled seconds of the host, the device and the network, which work side by side.

        The host needs ``launch`` for each launch. The device computes the products and moves the elementwise bytes, one
        after the other. The network moves ``bytes_sent`` and begins each collective anew.
        """
        return {
            "host": launches * self.launch,
            "device": flops / self.flops + elementwise_bytes / self.bytes,
            "network": bytes_sent / self.wire + collectives * self.collective,
        }
