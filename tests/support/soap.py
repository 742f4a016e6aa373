"""SOAP before Muon as its authors wrote it, in fp64: what the rule "soap" is compared with.

KellerJordan/modded-nanogpt (MIT) at f411b3d3, records/track_3_optimization/results/20260609_soap_f1_auxb2_clean/
train_gpt_clean_SOTA.py, lines 355 to 400 and 433 to 472, with `.float()` left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fresh(rows: int, cols: int) -> dict[str, Any]:
    """Lines 433 to 439."""
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
    """Lines 355 to 361."""
    _, q = torch.linalg.eigh(mat + 1e-30 * torch.eye(mat.size(0), dtype=mat.dtype))
    return torch.flip(q, [1])


def basis_qr(
    row_gg: Tensor, col_gg: Tensor, q_row: Tensor, q_col: Tensor, exp_avg_sq: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Lines 363 to 375."""
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
    """Lines 377 to 387."""
    if state["q_row"] is None:
        return update
    q_row, q_col = state["q_row"], state["q_col"]
    projected = q_row.T @ update @ q_col
    state["exp_avg_sq"].mul_(beta2).add_(projected.square(), alpha=1 - beta2)
    denom = state["exp_avg_sq"].clamp_min(eps * eps).pow(0.5)
    precond = q_row @ (projected / denom) @ q_col.T
    precond.mul_(update.norm() / precond.norm().clamp_min(eps))
    return precond


def update_preconditioner(
    grad: Tensor, state: dict[str, Any], shampoo_beta: float = 0.9, precondition_frequency: int = 10
) -> None:
    """Lines 389 to 400."""
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
    """Lines 441 to 472: return what is orthogonalized."""
    state["momentum"].lerp_(grad, 1 - mu)
    momentum_update = grad.lerp(state["momentum"], mu)
    momentum_update = precondition_momentum(momentum_update, state)
    update_preconditioner(grad, state, precondition_frequency=precondition_frequency)
    return momentum_update
