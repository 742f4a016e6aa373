"""What the tests with real hosts share: ranks that have imported what takes long, once and not once a rank."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator

import pytest

from tests.support import workers

# No host may look for a hub, a dashboard or a newer version of itself.
os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "DO_NOT_TRACK": "1", "DS_BUILD_OPS": "0"}

HOSTS = (
    "accelerate",
    "transformers.trainer",
    "peft",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "lightning",
)
multiprocessing.set_forkserver_preload(
    [workers.__name__, "muonmesh.build", "muonmesh.integrations.qk_clip", *workers.MODELS, "deepspeed", *HOSTS]
)


def launches() -> Iterator[dict[int, workers.Pool]]:
    from tests.hosts import deepspeed_engine

    pools = {world: workers.Pool(world) for world in (2, 4)}
    for pool in pools.values():
        pool.run(deepspeed_engine.ready, timeout=240.0)
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, workers.Pool]]:
    """One launch per world size: DeepSpeed keeps groups and threads of its own for the life of a process."""
    yield from launches()


@pytest.fixture(scope="module")
def peers() -> Iterator[dict[int, workers.Pool]]:
    """Launches of their own, since tensor- and expert-parallel groups stay too."""
    yield from launches()
