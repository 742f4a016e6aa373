"""DeepSpeed: makes engines that train with Muon, at every ZeRO stage. Muon is a client optimizer of the engine."""

try:
    import deepspeed  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "deepspeed: not installed; needed by muonmesh.integrations.deepspeed. Write pip install 'muonmesh[deepspeed]'"
    ) from missing

from muonmesh.integrations.deepspeed.initialize import initialize

__all__ = ["initialize"]
