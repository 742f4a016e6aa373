"""DeepSpeed: Muon as a client optimizer of its engine, at every stage of ZeRO."""

try:
    import deepspeed  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "deepspeed: not installed; needed by muonmesh.integrations.deepspeed. Write pip install 'muonmesh[deepspeed]'"
    ) from missing

from muonmesh.integrations.deepspeed.initialize import initialize

__all__ = ["initialize"]
