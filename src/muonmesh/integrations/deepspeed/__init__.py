"""DeepSpeed: makes engines that train with Muon, at every ZeRO stage. Muon is a client optimizer of the engine."""

from muonmesh.integrations.deepspeed.initialize import initialize

__all__ = ["initialize"]
