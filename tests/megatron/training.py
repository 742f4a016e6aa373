"""Three steps of a Megatron model with our optimizer, beside one process that gets the same reduced gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from muonmesh.integrations.megatron import get_megatron_optimizer
from tests.megatron import gathered, host
from tests.megatron.oracle import Oracle
from tests.support.in_copies import work_in_copies


class Trained(NamedTuple):
    """What came out: by how much parameters differ from those of one process, losses, norms, and those expected."""

    differing: dict[str, float]
    losses: list[list[float]]
    norms: list[float | None]
    expected: list[float]
    moved: float
    skipped: list[bool]


def train(shape: host.Shape, steps: int = 3, **settings: Any) -> Trained:
    """Run on every rank."""
    host.begin(shape)
    chunks = host.chunks_of(shape)
    if shape.fsdp is not None:
        host.average_in_hybrid(chunks)
    config = host.optimizer_config(shape, **settings.pop("config", {}))
    optimizer = get_megatron_optimizer(config, chunks, **settings)
    muon = dict(settings.get("muon") or {})
    if muon.pop("state_device", None) is not None:
        work_in_copies(optimizer.optimizer)
    parameters = gathered.named(chunks)
    parameters = {name: p for name, p in parameters.items() if p.requires_grad}
    once = {name: p for name, p in parameters.items() if not getattr(p, "shared", False)}

    def of_all_ranks(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
        return gathered.gather(gathered.local_values(tensors)) if shape.fsdp is None else gathered.sharded(tensors)

    wholes = of_all_ranks(once)
    oracle = Oracle(
        wholes,
        lr=config.lr,
        weight_decay=config.weight_decay,
        adamw_betas=(config.adam_beta1, config.adam_beta2),
        adamw_eps=config.adam_eps,
        master_dtype=None if shape.dtype == torch.float32 else torch.float32,
        muon=muon,
        rules=settings.get("overrides"),
    )
    losses, norms, expected, skipped = [], [], [], []
    options = {key: settings[key] for key in ("policy", "skip_above") if key in settings}
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(host.backward(shape, chunks, optimizer, step))
        if shape.fsdp is None:
            reduced = gathered.gather(gathered.local_values(once, gathered.gradients(chunks)))
        else:
            reduced = gathered.sharded(once, gradients=True)
        scale = float(optimizer.get_loss_scale())
        stepped, norm, _ = optimizer.step()
        skipped.append(not stepped)
        norms.append(norm)
        gradients = {name: gradient / scale for name, gradient in reduced.items()}
        expected.append(oracle.step(gradients, config.clip_grad, **options))
        assert skipped[-1] == oracle.optimizer.skipped
    if shape.late_gather:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)  # no forward pass comes any more
    after = of_all_ranks(parameters)
    copy = after.pop("output_layer.weight", None) if shape.tied else None
    if copy is not None:
        assert torch.equal(copy, after["embedding.word_embeddings.weight"]), "tied copies have drifted apart"
    moved = max(float((after[name].float() - wholes[name].float()).abs().max()) for name in wholes)
    return Trained(oracle.differing(after), losses, norms, expected, moved, skipped)
