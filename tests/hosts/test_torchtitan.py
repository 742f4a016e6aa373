"""torchtitan 0.3: its own trainer trains, logs, saves and resumes with `muonmesh.integrations.torchtitan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.hosts import titan
from tests.hosts.replay import Given, different, replayed, strengths, weights
from tests.hosts.world import launched

LR = 0.01
MUON = f'muonmesh.integrations.torchtitan.muon={{"lr": {LR}, "ns_steps": 4}}'
METRICS = "muonmesh.integrations.torchtitan.metrics"


def train(folder: Path, load_step: int = -1, **parallelism: Any) -> tuple[Any, list[Given], dict[str, Any]]:
    """Train to the sixth step, with a checkpoint at the third; return the trainer, its gradients and first weights."""
    trainer = titan.config(folder, [MUON, METRICS], load_step, **parallelism).build()
    trainer.metrics_processor.logger = titan.Recorder()
    (optimizer,) = trainer.optimizers
    given: list[Given] = []
    before = weights(trainer.model_parts[0])
    real = optimizer.step

    def step(*args: Any, **settings: Any) -> Any:
        if settings.get("closure", 0) is not None:  # torchtitan makes state by a step of closure=None
            given.append(Given.to(optimizer))
        return real(*args, **settings)

    optimizer.step = step
    trainer.train()
    trainer.close()
    del optimizer.step
    return trainer, given, before


def both(folder: Path, parallelism: dict[str, int]) -> dict[str, Any]:
    """Train, train again from the middle, and replay the gradients in one process."""
    with launched():
        trainer, given, before = train(folder, **parallelism)
        after = weights(trainer.model_parts[0])
        second, _, _ = train(folder, 3, **parallelism)
        resumed = different(after, weights(second.model_parts[0]))
        placed = {str(tuple(p.placements)) for p in trainer.model_parts[0].parameters()}

    def model() -> nn.Module:
        fresh: nn.Module = titan.config(folder, []).model_spec.model.build()
        for name, parameter in fresh.named_parameters():
            parameter.data = before[name].clone()
        return fresh

    first = replayed(model(), given[:1], ns_steps=4)
    return {
        "plain loop": different(after, replayed(model(), given, ns_steps=4)),
        "resumed": resumed,
        "weakest": min(
            v for n, v in strengths(before, first, LR / 2).items() if n.startswith("layers") and "norm" not in n
        ),
        "rows": trainer.metrics_processor.logger.rows,
        "again": second.metrics_processor.logger.rows,
        "placed": placed,
        "steps": len(given),
    }


def check(found: dict[str, Any]) -> None:
    assert found["plain loop"] == []
    assert found["resumed"] == []
    assert found["steps"] == 6
    losses, again = ([row["loss_metrics/global_avg_loss"] for row in found[key]] for key in ("rows", "again"))
    assert len(again) == 3
    assert losses[3:] == again
    assert found["weakest"] > 0.02  # in units of the rate, of gradients of low rank: a max_norm of 1e-6 stalls nothing
    rates = [row["lr/Muon/0"] for row in found["rows"]]
    assert rates[:2] == [LR / 2, LR]
    assert rates[-1] < rates[2]
    for row in found["rows"][1:]:
        assert row["muon/muon/update_to_weight"] > 0


@pytest.mark.parametrize(
    ("parallelism", "placement"),
    [
        ({}, "Shard(dim=0)"),
        ({"data_parallel_shard_degree": 2}, "Shard(dim=0)"),
        ({"tensor_parallel_degree": 2}, "Shard(dim=1)"),
        ({"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}, "Replicate()"),
    ],
    ids=["one", "FSDP2", "TP", "HSDP"],
)
def test_the_trainer(workers, parallelism: dict[str, int], placement: str, tmp_path: Path) -> None:
    for found in workers(2 if parallelism else 1).run(both, tmp_path, parallelism, timeout=300):
        check(found)
        assert any(placement in placed for placed in found["placed"]), found["placed"]
