"""The parts of Muon by the names that its step calls them."""

from __future__ import annotations

from torch import Tensor

from muonmesh.numerics.rules import parts
from muonmesh.numerics.rules.muon import MuonRule


def update_momentum(
    momentum: Tensor, gradient: Tensor, rule: MuonRule, *, active: Tensor | None = None, into: Tensor | None = None
) -> None:
    """Fold a gradient into the momentum, see `parts.fold`."""
    parts.fold(rule, gradient, {"momentum_buffer": momentum}, active=active, into=into)


def write_direction(momentum: Tensor, gradient: Tensor, rule: MuonRule, into: Tensor) -> None:
    """Write the direction, see `parts.write_direction`."""
    parts.write_direction(rule, gradient, {"momentum_buffer": momentum}, into)


def apply_update(
    parameter: Tensor, update: Tensor, rule: MuonRule, *, scale: float, active: Tensor | None = None
) -> None:
    """Decay and update weights, see `parts.apply`."""
    parts.apply(rule, parameter, update, {}, scale=scale, active=active)
