"""SOAP-Muon: momentum is scaled in the eigenbasis of the gradients, then orthogonalized (SOAP: arXiv 2409.11321)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from muonmesh.numerics.rules.even import over
from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.rules.rule import KeptAs, State
from muonmesh.numerics.setting import fraction, rule_field, whole


@dataclass(frozen=True, slots=True)
class SoapRule(MuonRule):
    """The rule "soap": Muon of momentum scaled by Adam's second moment in the basis of Shampoo's preconditioners.

    Each matrix keeps running means L of G·Gᵀ and R of Gᵀ·G, and Q_L and Q_R, orthogonal and near their eigenvectors.
    With U Muon's direction: ``P = Q_Lᵀ·U·Q_R``, ``v ← β₂·v + (1 − β₂)·P²``, and ``Q_L·(P/√v)·Q_Rᵀ`` is orthogonalized.
    Then L and R take in G, and the bases turn towards their eigenvectors by one power iteration. In the first step U
    itself is orthogonalized, and the bases become the eigenvectors. A matrix whose first gradient comes later begins
    with unit bases, so that the CPU need not wait for the device.

    All state, including the momentum, is kept at the owner of the matrix. Ranks send G, in the compute dtype.

    From KellerJordan/modded-nanogpt at f411b3d3, records/track_3_optimization/results/20260609_soap_f1_auxb2_clean/
    train_gpt_clean_SOTA.py, record 44: the bases lines 355 to 375, the scaling 377 to 387, the running means 389 to
    400, the order of all this 444 to 472. Left out are that script's trust gate, floors of updates and radii, which
    come after orthogonalizing or belong to attention alone.

    The script's epsilons of 1e-30 on the diagonals of L and R and of 1e-8 under norms change nothing. Its ε of 1e-8 in
    √v would suppress gradients of this size, so this rule has no ε: if v is zero, P is zero too and stays zero. L, R
    and v are kept in units of the first gradient (a power of two), so that no square vanishes. So gradients of any
    scale give the same bits.

    Attributes:
        beta2: β₂ of v, L and R, ``soap_beta2``.
        every: Steps between two turns of a basis, ``soap_every``. Matrices take turns, see `Rule.is_due`.
    """

    takes_turns: ClassVar[bool] = True
    never_negative: ClassVar[tuple[str, ...]] = ("second_moment",)

    beta2: float = rule_field("soap_beta2", fraction(0.9))
    every: int = rule_field("soap_every", whole(1, 1, "a whole number of at least 1, below 2**31", most=2**31 - 1))

    def keeps(self) -> Mapping[str, KeptAs]:
        """Return momentum, second moments, means of Gram matrices, bases and the unit of the gradients."""
        whole = {"momentum_buffer": "rows×cols", "second_moment": "rows×cols", "unit": "1×1"}
        sides = {"row_gram": "rows×rows", "row_basis": "rows×rows", "col_gram": "cols×cols", "col_basis": "cols×cols"}
        return {**whole, **sides}

    def fold(self, gradient: Tensor, state: State) -> None:
        """Do nothing: the owner has the momentum."""

    def direction(self, gradient: Tensor, state: State) -> Tensor:
        """Return the gradient."""
        return gradient

    def balance(self, direction: Tensor, state: State) -> Tensor:
        """Return the momentum scaled in the bases, and turn the bases."""
        rows, cols, second, fresh = state["row_basis"], state["col_basis"], state["second_moment"], state["unit"] == 0
        largest = direction.abs().amax((-2, -1), keepdim=True)
        power = over(largest, largest.frexp()[0])  # exact
        state["unit"].copy_(torch.where(fresh, torch.where(power == 0, 1.0, power), state["unit"]))
        momentum = state["momentum_buffer"].lerp_(direction, 1 - self.momentum)
        update = (direction.lerp(momentum, self.momentum) if self.nesterov else momentum) / state["unit"]
        turned = rows.mT @ update @ cols  # zeros in the first step, like what is kept
        second.lerp_(turned.square(), 1 - self.beta2)
        scaled = rows @ over(turned, second.sqrt()) @ cols.mT
        gradient = direction / state["unit"]
        for basis, gram, product, dim in (
            (rows, state["row_gram"], gradient @ gradient.mT, -2),
            (cols, state["col_gram"], gradient.mT @ gradient, -1),
        ):
            gram.lerp_(product, 1 - self.beta2)
            basis.copy_(torch.where(fresh, self._first(gram), basis))
            if self.steps_taken and self.is_due(self.every):
                order = _rotate(basis, gram)
                order = order[:, :, None] if dim == -2 else order[:, None, :]
                second.copy_(second.gather(dim, order.expand_as(second)))
        return torch.where(fresh, update, scaled)

    def _first(self, gram: Tensor) -> Tensor:
        """Return the basis that a matrix begins with."""
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(gram)
        if self.steps_taken:
            return eye
        finite = gram.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)  # eigh raises for others
        vectors: Tensor = torch.linalg.eigh(torch.where(finite, gram, eye))[1]
        return vectors.flip(-1)

    def flops(self, rows: int, cols: int) -> int:
        """Return the FLOPs of six products with the matrix for each side, and of power iterations, on average."""
        return 6 * rows * cols * (rows + cols) + 14 * (rows**3 + cols**3) // (3 * self.every)


def _rotate(basis: Tensor, gram: Tensor) -> Tensor:
    """Turn bases towards the eigenvectors by one power iteration; return the new order of their vectors."""
    product = gram @ basis
    order = torch.argsort((basis * product).sum(-2), dim=-1, descending=True, stable=True)  # by qᵀ·G·q
    basis.copy_(torch.linalg.qr(product.gather(-1, order[:, None, :].expand_as(product)))[0])
    return order
