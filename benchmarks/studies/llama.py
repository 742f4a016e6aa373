"""A Llama and a text, those of `muonmesh train`: what scripts train that compare two ways to do the same step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from benchmarks.studies.sweep import RULES, rate_at
from torch import Tensor, nn

import muonmesh as mm
from muonmesh.tools.cli.corpus import Corpus, Windows
from muonmesh.tools.cli.model import build_model, model_config

VOCAB, LENGTH, BATCH, HELD_OUT = 2048, 128, 8, 32


def train(multiple: float, seed: int, corpus: Corpus, model_name: str, steps: int) -> dict[str, Any]:
    """One training with Muon at a multiple of its rate: validation losses by step."""
    torch.manual_seed(seed)
    model = build_model(model_config(model_name, vocab=corpus.vocab, seq=LENGTH))
    optimizer = mm.from_model(model, lr=RULES["muon"]["lr"] * multiple, process_group="local")
    windows = Windows(corpus.train(), length=LENGTH, seed=seed)
    held_out = torch.from_numpy(Windows(corpus.validation(), length=LENGTH, seed=0).spread(HELD_OUT))
    every = max(1, steps // 30)
    validation: list[tuple[int, float]] = []
    for step in take_steps(model, optimizer, windows, steps):
        if step % every == 0 or step == steps:
            model.eval()
            with torch.no_grad():
                validation.append((step, float(loss(model, held_out))))
            model.train()
            if not math.isfinite(validation[-1][1]):
                break
    return {"validation": validation}


def take_steps(
    model: nn.Module, optimizer: mm.Muon, windows: Windows, steps: int, *, batch: int = BATCH
) -> Iterator[int]:
    """Train on the schedule of `rate_at`, from the rates that the groups have; yield how many steps are done."""
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * rate_at(step, steps)
        loss(model, torch.from_numpy(windows.shuffled(range(step * batch, (step + 1) * batch)))).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step + 1


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
