"""Megatron-Core: one optimizer with Muon and AdamW for its models, and layouts from its parameters' attributes."""

from typing import TYPE_CHECKING, Any

from muonmesh.groups.classifiers import register
from muonmesh.integrations.megatron.declared import declared_layouts
from muonmesh.integrations.megatron.main_grad import MainGrad
from muonmesh.integrations.megatron.roles import megatron_role

if TYPE_CHECKING:
    from muonmesh.integrations.megatron.build import get_megatron_optimizer, install

__all__ = ["MainGrad", "declared_layouts", "get_megatron_optimizer", "install"]

register(megatron_role)


def __getattr__(name: str) -> Any:
    """Import the functions that need megatron-core at their first use.

    The other names work without megatron-core, for example for Transformer Engine.
    """
    if name not in ("get_megatron_optimizer", "install"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from muonmesh.integrations.megatron import build

    return getattr(build, name)
