"""Scion: what its rules for embeddings and heads have in common (Pethick et al., arXiv 2502.07529)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.scale import ScaleMode, StepSize
from muonmesh.numerics.setting import choice, rule_field

ScionLayer: TypeAlias = Literal["head", "embedding"]
"""What multiplies the weight: vectors whose elements are about 1, in a head; or one index, in an embedding."""

ScionScale: TypeAlias = Literal["match_rms_adamw", "unit_rms_norm", "none"]
"""The scale modes that mean something for steps that are not orthogonal."""


@dataclass(frozen=True, slots=True)
class ScionRule(MuonRule, ABC):
    """Momentum, brought to norm 1 by the operator norm of an embedding or of a head; it is not orthogonalized.

    The paper decays weights by its rate γ and steps by γ times a radius ρ: write ``lr=γ·ρ`` and ``weight_decay=1/ρ``.
    It has no look-ahead: ``nesterov=False``.

    Attributes:
        layer: What the weights are, ``scion_layer``. A tied weight is a head.
    """

    orthogonalizes: ClassVar[bool] = False

    scale_mode: ScaleMode = field(metadata={"setting": choice(None, ScionScale, " for a step that is not orthogonal")})
    layer: ScionLayer = rule_field("scion_layer", choice("head", ScionLayer))

    @abstractmethod
    def rms(self, rows: int, cols: int) -> float:
        """Return the RMS of an update before it is scaled, if no row is zero."""

    @abstractmethod
    def own(self, rows: int, cols: int) -> float:
        """Return the factor by which the update has Scion's operator norm 1."""

    def scale(self, rows: int, cols: int) -> float:
        """Return what the learning rate is multiplied by.

        "match_rms_adamw" gives the step an RMS of 0.2, as it does Muon's; "unit_rms_norm" is Scion's own; "none": 1.
        """
        factor = {"match_rms_adamw": 0.2 / self.rms(rows, cols), "unit_rms_norm": self.own(rows, cols), "none": 1.0}
        return self.extra_scale_factor * factor[self.scale_mode]

    def step_size(self, rows: int, cols: int) -> StepSize:
        """Return the RMS of one step; its spectral norm is another for every matrix."""
        return StepSize(float(self.lr) * self.scale(rows, cols) * self.rms(rows, cols), float("nan"))
