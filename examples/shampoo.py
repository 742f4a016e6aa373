"""Shampoo, a rule in a file of its own: momentum between inverse fourth roots, as large as a step of Adam.

Each matrix of gradients G (rows × cols) keeps running means L of G·Gᵀ and R of Gᵀ·G. The step is L^(−1/4)·M·R^(−1/4)
with the momentum M, brought to the norm of Adam's step ("grafting"). The roots are computed every few steps; matrices
take turns at it. Until its first turn a matrix takes Adam's step.

From facebookresearch/optimizers as KellerJordan/modded-nanogpt at f411b3d3 has it in records/track_3_optimization/
results/20260513_shampoo_1_4_power/distributed_shampoo: distributed_shampoo.py lines 974 to 1012 (grafting) and 1053 to
1090 (momentum); preconditioner/shampoo_preconditioner_list.py 1229 to 1259 (means, interval);
preconditioner/matrix_functions.py 233 to 269 (root); preconditioner/adagrad_preconditioner_list.py (Adam). Settings are
those of train_gpt_shampoo.py lines 256 to 270, by which lr=0.0015, momentum=0.9 and weight_decay=0.2.

Import this file, or name it among a package's entry points, and write ``mm.from_model(model, rule="shampoo")``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import muonmesh as mm
from muonmesh.numerics.scale import StepSize


@mm.register_rule("shampoo")
@dataclass(frozen=True)
class Shampoo(mm.MuonRule):
    """Shampoo with Adam's step size. On a device the host waits for each eigenvalue problem."""

    orthogonalizes: ClassVar[bool] = False
    scale_invariant: ClassVar[bool] = False  # the epsilons are compared with gradients
    takes_turns: ClassVar[bool] = True

    shampoo_beta2: float = 0.95
    shampoo_every: int = 5  # steps between two inverse roots of a matrix
    shampoo_eps: float = 1e-12
    graft_eps: float = 1e-10

    def keeps(self) -> Mapping[str, str]:
        whole = {"momentum_buffer": "rows×cols", "second_moment": "rows×cols", "steps": "1×1"}
        sides = {"row_gram": "rows×rows", "row_root": "rows×rows", "col_gram": "cols×cols", "col_root": "cols×cols"}
        return {**whole, **sides}

    def fold(self, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        """Nothing: the owner has the momentum."""

    def direction(self, gradient: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return gradient

    def whole(self, update: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        gradient, steps = update, state["steps"].add_(1)
        lacks1, lacks2 = 1 - self.momentum**steps, 1 - self.shampoo_beta2**steps
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - self.momentum) / lacks1
        second = state["second_moment"].lerp_(gradient.square(), 1 - self.shampoo_beta2)
        for side, product in (("row", gradient @ gradient.mT), ("col", gradient.mT @ gradient)):
            gram = state[f"{side}_gram"].lerp_(product, 1 - self.shampoo_beta2)
            if self.is_due(self.shampoo_every):
                state[f"{side}_root"].copy_(self._inverse_root(gram / lacks2))
        adam = momentum / ((second / lacks2).sqrt() + self.graft_eps)
        step = state["row_root"] @ momentum @ state["col_root"]
        size = adam.norm(dim=(-2, -1), keepdim=True) / (step.norm(dim=(-2, -1), keepdim=True) + 1e-16)
        return torch.where(state["row_root"][:, :1, :1] == 0, adam, step * size)

    def _inverse_root(self, gram: Tensor) -> Tensor:
        """The inverse fourth root of a matrix and ε, which are made positive."""
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(gram)
        finite = gram.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)  # eigh raises for others
        values, vectors = torch.linalg.eigh(torch.where(finite, gram, eye))
        values = values - values.amin(-1, keepdim=True).clamp(max=0) + self.shampoo_eps
        return (vectors * values.pow(-0.25)[:, None]) @ vectors.mT

    def flops(self, rows: int, cols: int) -> int:
        return 4 * rows * cols * (rows + cols) + 11 * (rows**3 + cols**3) // self.shampoo_every

    def scale(self, rows: int, cols: int) -> float:
        return self.extra_scale_factor

    def step_size(self, rows: int, cols: int) -> StepSize:
        return StepSize(float("nan"), float("nan"))
