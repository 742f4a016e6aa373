"""Preview: ``--dry-run``: who would own what in a run, without starting a rank."""

from __future__ import annotations

import torch

from muonmesh.cli.blueprint import parts_of
from muonmesh.cli.configuration import model_config
from muonmesh.cli.model import build_model
from muonmesh.cli.plan import planned, print_plan
from muonmesh.cli.settings import REPLICAS, Settings
from muonmesh.cli.terminal import make_console


def preview(settings: Settings) -> None:
    """Print the plan of a run's optimizer."""
    with torch.device("meta"):
        config = model_config(settings.model, vocab=settings.vocab, seq=settings.seq, init=settings.init is not None)
        parts = parts_of(build_model(config))
    ranks = settings.ranks
    meshes = {"ddp": f"ddp={ranks}", "hsdp": f"hsdp={REPLICAS}x{ranks // REPLICAS}"}
    print_plan(planned(settings.model, mesh=meshes.get(settings.parallel, f"fsdp={ranks}"), parts=parts))
    if settings.zero:
        make_console().print(f"ZeRO {settings.zero} is planned like FSDP2; its flat shards have other borders.")
