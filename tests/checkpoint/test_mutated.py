"""Mutated checkpoints: each is refused on every rank before anything changes, or loads equal; none acts or hangs."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from muonmesh.checkpoint.manifest import MANIFEST_FILE, METADATA_FILE, SETTINGS_FILE
from muonmesh.errors import FileError
from tests.support.folders import forge, read, write
from tests.support.mutations import MANY, QUICK, mutate
from tests.support.workers import Pool

RANKS = 2
SETTINGS = {"groups": [{"lr": 0.1, "rule": "muon", "betas": [0.9, 0.95]}], "step": 7}
DATA = ("__0_0.distcp", "__1_0.distcp")

FORMATS: dict[str, tuple[tuple[str, ...], str]] = {
    "folder": ((*DATA, METADATA_FILE, SETTINGS_FILE, MANIFEST_FILE), "as it was"),
    "manifest": ((MANIFEST_FILE,), "as it was"),
    "metadata alone": ((METADATA_FILE,), "forged"),
    "forged manifest": ((MANIFEST_FILE,), "forged"),
    "settings": ((SETTINGS_FILE,), "forged"),
    "forged folder": ((*DATA, METADATA_FILE, SETTINGS_FILE), "forged"),
}
"""Which files are changed, and what becomes of the manifest: somebody who can write one may write it anew."""


@pytest.fixture(scope="module")
def pool(workers: Callable[[int], Pool]) -> Pool:
    return workers(RANKS)


def sharded_tensors(factor: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = {
        f"model.{name}": distribute_tensor(torch.arange(24.0).view(6, 4) * factor + factor * number, mesh, [Shard(0)])
        for number, name in enumerate(("up", "down"))
    }
    return {**weights, "model.bias": torch.full((5,), 3.0 * factor, dtype=torch.bfloat16)}


def write_sharded(folder: Path) -> None:
    write(folder, sharded_tensors(1.0), SETTINGS)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def outcomes(root: Path, name: str, numbers: range) -> list[tuple[int, str, str]]:
    """Of each mutation its number, what it was (on rank 0), and what this rank made of it."""
    names, manifest = FORMATS[name]
    outside, right, empty = root / "outside", sharded_tensors(1.0), sharded_tensors(0.0)
    results = []
    for number in numbers:
        folder, mutation = root / f"{number}", ""
        if dist.get_rank() == 0:
            shutil.copytree(root / "whole", folder)
            mutation = mutate(folder, names, outside, number)
            if manifest == "forged":
                manifest_path = folder / MANIFEST_FILE
                with contextlib.suppress(ValueError, TypeError):  # it is no longer JSON, or no object
                    if manifest_path.is_file() and not manifest_path.is_symlink():
                        forge(folder)
        dist.barrier()
        read_tensors = {key: torch.zeros_like(tensor) for key, tensor in empty.items()}
        try:
            settings = read(folder, read_tensors)
        except FileError as error:
            unchanged = all(not local(tensor).any() for tensor in read_tensors.values())
            outcome = f"refused: {error}" if unchanged and "\n" not in str(error) else "refused, and changed"
        else:
            equal = all(torch.equal(local(read_tensors[key]), local(tensor)) for key, tensor in right.items())
            outcome = ("equal" if equal else "other numbers") + ("" if settings == SETTINGS else ", other settings")
        results.append((number, mutation, outcome))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    return results


@pytest.mark.parametrize("count", [QUICK, pytest.param(MANY, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", FORMATS)
def test_a_mutated_checkpoint_is_refused_on_every_rank_or_harmless(
    name: str, count: int, pool: Pool, tmp_path: Path
) -> None:
    pool.run(write_sharded, tmp_path / "whole")
    (tmp_path / "outside").mkdir()
    by_rank = pool.run(outcomes, tmp_path, name, range(count), timeout=1800.0)
    allowed = {"equal"}
    if FORMATS[name][1] == "forged":  # a forger's numbers and settings load, in the names, shapes and dtypes asked for
        allowed |= {"equal, other settings"}
    if name in ("forged manifest", "forged folder"):
        allowed |= {"other numbers", "other numbers, other settings"}
    counts = Counter[str]()
    for ranks in zip(*by_rank, strict=True):
        outcomes_of_ranks = {outcome for _, _, outcome in ranks}  # of forged numbers a rank may hold none
        assert outcomes_of_ranks <= allowed or (
            len(outcomes_of_ranks) == 1 and all(outcome.startswith("refused: ") for outcome in outcomes_of_ranks)
        ), ranks
        counts[max(outcomes_of_ranks).split(":")[0]] += 1
    # Metadata must be there and are not read; data that a forger changed load.
    assert counts["refused"] >= count // {"metadata alone": 10, "forged folder": 3}.get(name, 2)
    assert not (tmp_path / "outside" / "mark").exists(), "something ran"
    print(f"{name}: {count} mutations of seeds 0 to {count - 1}: {dict(counts)}")
