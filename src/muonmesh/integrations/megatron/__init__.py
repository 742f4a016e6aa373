"""Megatron-Core: one optimizer of both halves for its models, and what its parameters say of themselves."""

from muonmesh.integrations.megatron.declared import declared_layouts
from muonmesh.integrations.megatron.gradients import MainGrad

__all__ = ["MainGrad", "declared_layouts"]
