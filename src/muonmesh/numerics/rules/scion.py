"""Scion: the base class of its rules for embeddings and heads (Pethick et al., arXiv 2502.07529)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.scale import ScaleMode, StepSize
from muonmesh.numerics.setting import choice, rule_field

ScionLayer: TypeAlias = Literal["head", "embedding"]
"""The kind of layer: a "head" multiplies vectors with elements of about 1; an "embedding" looks up one index."""

ScionScale: TypeAlias = Literal["match_rms_adamw", "unit_rms_norm", "none"]
"""The scale modes that are defined for steps that are not orthogonalized."""


@dataclass(frozen=True, slots=True)
class ScionRule(MuonRule, ABC):
    """Base class of rules that divide the momentum by the operator norm of an embedding or a head.

    The paper decays weights by its rate γ and steps by γ times a radius ρ: write ``lr=γ·ρ`` and ``weight_decay=1/ρ``.
    It has no look-ahead: ``nesterov=False``.

    Attributes:
        layer: The kind of layer, ``scion_layer``. A tied weight is a head.
    """

    orthogonalizes: ClassVar[bool] = False

    scale_mode: ScaleMode = field(metadata={"setting": choice(None, ScionScale, " for a step that is not orthogonal")})
    layer: ScionLayer = rule_field("scion_layer", choice("head", ScionLayer))

    @abstractmethod
    def sizes(self, cols: int) -> tuple[float, float, float]:
        """Return the RMS of an update before it is scaled, if no row is zero, and the factors for operator norm 1.

        The first factor is that of a head, the second that of an embedding.
        """

    def scale(self, rows: int, cols: int) -> float:
        """Return the factor of the learning rate.

        "match_rms_adamw" gives the step an RMS of 0.2, as for Muon; "unit_rms_norm" is Scion's own scale; "none" is 1.
        """
        rms, head, embedding = self.sizes(cols)
        unit = head if self.layer == "head" else embedding
        factor = {"match_rms_adamw": 0.2 / rms, "unit_rms_norm": unit, "none": 1.0}
        return self.extra_scale_factor * factor[self.scale_mode]

    def step_size(self, rows: int, cols: int) -> StepSize:
        """Return the RMS of one step; its spectral norm is NaN, because it differs for every matrix."""
        return StepSize(float(self.lr) * self.scale(rows, cols) * self.sizes(cols)[0], float("nan"))
