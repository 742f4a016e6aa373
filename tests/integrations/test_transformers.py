"""A real `transformers` Trainer, whose clipping knows nothing of Muon: the Muon half does not feel it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import muonmesh as mm
from tests.hosts.replay import strengths
from tests.hosts.tiny import Tokens, llama
from tests.hosts.watch import Weights

STEPS = 6
LR = 1e-3
COEFFICIENT = 2.0**-27  # 7.5e-9; a power of two moves exponents only, so that nothing rounds differently
Snapshots = list[dict[str, Tensor]]
MATRIX = "_proj.weight"  # what Muon updates in a Llama


class ClipOurs(TrainerCallback):
    """What docs/clipping.md recommends: our clipping in place of the Trainer's."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
        optimizer.optimizer.clip_grad_norm_(1e-6)


def muon_of(model: nn.Module) -> torch.optim.Optimizer:
    return mm.from_model(model, lr=LR, weight_decay=0.0, compute_dtype=torch.float32)


def torch_muon(model: nn.Module) -> torch.optim.Optimizer:
    """The matrices alone: torch's takes no other parameters, and a Trainer no second optimizer."""
    matrices = [p for name, p in model.named_parameters() if name.endswith(MATRIX)]
    return torch.optim.Muon(matrices, lr=LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")


def train_by_trainer(
    folder: Path, build: Callable[[nn.Module], torch.optim.Optimizer], max_grad_norm: float, *more: TrainerCallback
) -> tuple[Snapshots, list[float]]:
    """Return the weights before and after each step, and the gradient norms that the Trainer logs."""
    model, snapshots = llama(vocab_size=256, hidden_size=32, intermediate_size=64, num_attention_heads=4), Weights()
    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        max_grad_norm=max_grad_norm,
        per_device_train_batch_size=8,
        learning_rate=LR,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    assert not arguments.fp16
    assert not arguments.bf16
    callbacks = [snapshots, *more]
    trainer = Trainer(model, arguments, train_dataset=Tokens(64), optimizers=(build(model), None), callbacks=callbacks)
    trainer.train()
    return snapshots.weights, [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def limit(norm: float) -> float:
    """Return the `max_grad_norm` for which torch computes the coefficient at this norm exactly."""
    total = torch.tensor(norm) + 1e-6
    tried = (COEFFICIENT * float(total) * (1 + ulps * 2.0**-25) for ulps in range(-8, 9))
    return next(value for value in tried if float((value / total).clamp(max=1.0)) == COEFFICIENT)


def relative_strengths(clipped: Snapshots, free: Snapshots, *, muon: bool) -> list[list[float]]:
    """For each step: RMS of the update over that without clipping, for each parameter of one half."""
    by_step = []
    for steps in zip(itertools.pairwise(clipped), itertools.pairwise(free), strict=True):
        first, second = (strengths(before, after, LR) for before, after in steps)
        by_step.append([first[name] / second[name] for name in first if name.endswith(MATRIX) == muon])
    return by_step


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> tuple[Snapshots, list[float]]:
    return train_by_trainer(tmp_path_factory.mktemp("free"), muon_of, 0.0)


def test_the_trainers_clipping_cannot_stall_muon(free: Any, tmp_path: Path) -> None:
    weights, norms = free
    clipped, clipped_norms = train_by_trainer(tmp_path, muon_of, limit(norms[0]))
    assert len(norms) == len(clipped_norms) == STEPS
    assert clipped_norms[0] == norms[0], "what the Trainer logs is the norm before clipping"
    assert all(limit(norms[0]) / norm < 1e-8 for norm in clipped_norms)
    # The first step has the same gradients up to a power of two: the same bits.
    matrices = [name for name in weights[0] if name.endswith(MATRIX)]
    assert len(matrices) == 14
    assert [name for name in matrices if not torch.equal(clipped[1][name], weights[1][name])] == []
    assert all(not torch.equal(weights[1][name], weights[0][name]) for name in matrices)
    # Later ones have other gradients, since AdamW's half stays behind; every update is at full strength.
    for step in relative_strengths(clipped, weights, muon=True):
        assert step == pytest.approx([1.0] * 14, rel=0.1)
    # What the Trainer's clipping does do: AdamW's ε of 1e-8 is far above its gradients.
    for step in relative_strengths(clipped, weights, muon=False):
        assert max(step) < 0.05


def test_the_same_clipping_stalls_torchs_muon(free: Any, tmp_path: Path) -> None:
    weights, norms = train_by_trainer(tmp_path, torch_muon, 0.0)
    assert norms[0] == free[1][0], "the same model, batch and gradients"
    clipped, _ = train_by_trainer(tmp_path, torch_muon, limit(norms[0]))
    for step in relative_strengths(clipped, weights, muon=True):
        assert max(step) < 1 / 3
        assert min(step) < 0.01


def test_our_clipping_as_a_callback_instead_of_the_trainers(free: Any, tmp_path: Path) -> None:
    weights, norms = free
    clipped, clipped_norms = train_by_trainer(tmp_path, muon_of, 0.0, ClipOurs())
    assert clipped_norms[0] == norms[0]
    # AdamW's gradients are clipped, in fact so far that its ε shows; Muon's not at all.
    for name in weights[0]:
        assert torch.equal(clipped[1][name], weights[1][name]) == name.endswith(MATRIX), name
