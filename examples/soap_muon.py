"""SOAP-Muon, a rule in a file of its own: momentum is scaled in the eigenbasis of the gradients, then orthogonalised.

Each matrix of gradients G (rows × cols) keeps running means of G Gᵀ and Gᵀ G, of which the eigenvectors are the basis.
In it the update U is divided by the root of its second moment, element by element, before Muon orthogonalises it. All
this lies at the owner of the matrix; what travels is G.

From KellerJordan/modded-nanogpt at f411b3d3, records/track_3_optimization/results/20260504_contra_muon_mlp_soapish/
train_gpt_contra_normuon_soapish_mlp.py: the basis lines 221 to 242, the scaling 245 to 254, the running means 257 to
268, the order of all this 334 to 350. Record 44 there has beta2 0.9 and every 1. Contra-Muon, NorMuon and the floor of
the updates, which that script adds after orthogonalising, are rules of their own and left out.

Import this file, or name it among a package's entry points, and write ``mm.from_model(model, rule="soap-muon")``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import muonmesh as mm


@mm.register_rule("soap-muon")
@dataclass(frozen=True)
class SoapMuon(mm.MuonRule):
    """SOAP's scaling before Muon. On a device the host waits for each matrix, whose first step differs."""

    scale_invariant: ClassVar[bool] = False  # ε is compared with gradients

    soap_beta2: float = 0.9
    soap_every: int = 1  # steps between turns of the basis
    soap_eps: float = 1e-8

    def keeps(self) -> Mapping[str, str]:
        whole = {"momentum_buffer": "rows×cols", "second_moment": "rows×cols", "steps": "1×1"}
        sides = {"row_gram": "rows×rows", "row_basis": "rows×rows", "col_gram": "cols×cols", "col_basis": "cols×cols"}
        return {**whole, **sides}

    def fold(self, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        """Nothing: the owner has the momentum."""

    def direction(self, gradient: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return gradient

    def balance(self, direction: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        gradient, second, steps = direction, state["second_moment"], int(state["steps"])
        rows, cols, row_gram, col_gram = (state[k] for k in ("row_basis", "col_basis", "row_gram", "col_gram"))
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - self.momentum)
        update = gradient.lerp(momentum, self.momentum) if self.nesterov else momentum.clone()
        if steps:
            turned = rows.mT @ update @ cols
            second.lerp_(turned.square(), 1 - self.soap_beta2)
            # The script scales this back to the norm of the update, which orthogonalising does not see.
            update = rows @ (turned / second.sqrt().add(self.soap_eps)) @ cols.mT
        row_gram.lerp_(gradient @ gradient.mT, 1 - self.soap_beta2)
        col_gram.lerp_(gradient.mT @ gradient, 1 - self.soap_beta2)
        if not steps:
            rows.copy_(torch.linalg.eigh(row_gram)[1].flip(-1))
            cols.copy_(torch.linalg.eigh(col_gram)[1].flip(-1))
        elif steps % self.soap_every == 0:
            second.copy_(second[:, turn(rows, row_gram)][:, :, turn(cols, col_gram)])
        state["steps"].add_(1)
        return update

    def flops(self, rows: int, cols: int) -> int:
        return 6 * rows * cols * (rows + cols) + 7 * (rows**3 + cols**3) // self.soap_every


def turn(basis: Tensor, gram: Tensor) -> Tensor:
    """Turn a basis towards the eigenvectors by one power iteration; return the order that its vectors are put in."""
    order = (basis.mT @ gram @ basis)[0].diagonal().argsort(descending=True)
    basis.copy_(torch.linalg.qr(gram @ basis[:, :, order])[0])
    return order
