"""SOAP before Muon as its authors wrote it, in fp64: what `examples/soap_muon.py` is compared with.

KellerJordan/modded-nanogpt (MIT) at f411b3d3, records/track_3_optimization/results/20260504_contra_muon_mlp_soapish/
train_gpt_contra_normuon_soapish_mlp.py, lines 221 to 268 and 334 to 350, with `.float()` left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fresh(rows: int, cols: int) -> dict[str, Any]:
    """Lines 317 to 325."""
    return {
        "momentum": torch.zeros(rows, cols, dtype=torch.float64),
        "exp_avg_sq": torch.zeros(rows, cols, dtype=torch.float64),
        "row_gg": torch.zeros(rows, rows, dtype=torch.float64),
        "col_gg": torch.zeros(cols, cols, dtype=torch.float64),
        "q_row": None,
        "q_col": None,
        "soap_step": 0,
    }


def eigenbasis(mat: Tensor) -> Tensor:
    """Lines 221 to 227."""
    _, q = torch.linalg.eigh(mat + 1e-30 * torch.eye(mat.size(0), dtype=mat.dtype))
    return torch.flip(q, [1])


def basis_qr(
    row_gg: Tensor, col_gg: Tensor, q_row: Tensor, q_col: Tensor, exp_avg_sq: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Lines 230 to 242."""
    row_eig = torch.diag(q_row.T @ row_gg @ q_row)
    row_sort = torch.argsort(row_eig, descending=True)
    q_row = q_row[:, row_sort]
    exp_avg_sq = exp_avg_sq.index_select(0, row_sort)
    q_row, _ = torch.linalg.qr(row_gg @ q_row)

    col_eig = torch.diag(q_col.T @ col_gg @ q_col)
    col_sort = torch.argsort(col_eig, descending=True)
    q_col = q_col[:, col_sort]
    exp_avg_sq = exp_avg_sq.index_select(1, col_sort)
    q_col, _ = torch.linalg.qr(col_gg @ q_col)
    return q_row, q_col, exp_avg_sq


def precondition_momentum(update: Tensor, state: dict[str, Any], beta2: float = 0.9, eps: float = 1e-8) -> Tensor:
    """Lines 245 to 254."""
    if state["q_row"] is None:
        return update
    q_row, q_col = state["q_row"], state["q_col"]
    projected = q_row.T @ update @ q_col
    state["exp_avg_sq"].mul_(beta2).add_(projected.square(), alpha=1 - beta2)
    precond = q_row @ (projected / state["exp_avg_sq"].sqrt().add(eps)) @ q_col.T
    precond.mul_(update.norm() / precond.norm().clamp_min(eps))
    return precond


def update_preconditioner(
    grad: Tensor, state: dict[str, Any], shampoo_beta: float = 0.9, precondition_frequency: int = 10
) -> None:
    """Lines 257 to 268."""
    state["row_gg"].lerp_(grad @ grad.T, 1 - shampoo_beta)
    state["col_gg"].lerp_(grad.T @ grad, 1 - shampoo_beta)
    if state["q_row"] is None:
        state["q_row"] = eigenbasis(state["row_gg"])
        state["q_col"] = eigenbasis(state["col_gg"])
    elif state["soap_step"] > 0 and state["soap_step"] % precondition_frequency == 0:
        state["q_row"], state["q_col"], state["exp_avg_sq"] = basis_qr(
            state["row_gg"], state["col_gg"], state["q_row"], state["q_col"], state["exp_avg_sq"]
        )
    state["soap_step"] += 1


def step(grad: Tensor, state: dict[str, Any], *, mu: float, precondition_frequency: int) -> Tensor:
    """Lines 334 to 338 and 349 to 350: return what is orthogonalised."""
    state["momentum"].lerp_(grad, 1 - mu)
    momentum_update = grad.lerp(state["momentum"], mu)
    momentum_update = precondition_momentum(momentum_update, state)
    update_preconditioner(grad, state, precondition_frequency=precondition_frequency)
    return momentum_update
