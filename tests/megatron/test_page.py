"""What docs/megatron.md says to write runs."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatrons

from tests.megatron import gathered, host
from tests.megatron.host import Shape
from tests.support.pages import run
from tests.support.workers import Pool


@host.writers()
def page(path: str) -> None:
    shape = Shape(tp=2, flat=True)
    host.begin(shape)
    chunks = host.chunks_of(shape)
    if dist.get_rank() == 0:
        os.mkdir(path)
    dist.barrier()
    names = {
        "config": host.optimizer_config(shape),
        "model_chunks": chunks,
        "forward_backward": lambda chunks: host.backward(shape, chunks, None, 0),
    }
    snippets = run("docs/megatron.md", {}, names, {"path": path})
    next(snippets)
    assert megatrons.get_megatron_optimizer.keywords == {"muon": {"lr": 6e-4, "momentum": 0.95}}
    results = next(snippets)
    optimizer = results["optimizer"]
    assert results["ok"]
    assert results["norm"] > 0
    rates = {group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert rates["muon"] == (6e-4, 0.1)
    assert rates["muon[weight_decay=0.0]"] == (6e-4, 0.0)
    before = gathered.gather(gathered.local_values(gathered.named(chunks)))
    next(snippets)
    after = gathered.gather(gathered.local_values(gathered.named(chunks)))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_page_about_megatron(tmp_path: Path) -> None:
    pool = Pool(2)  # of its own: install() is for good
    try:
        pool.run(page, str(tmp_path / "saved"), timeout=120.0)
    finally:
        pool.close()
